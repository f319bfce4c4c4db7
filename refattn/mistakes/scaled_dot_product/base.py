"""The catalogue that the other files of this folder fill, and what several of them need."""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.mistakes.engine import Catalogue

__all__ = ["TILES", "arithmetic", "catalogue", "last_tile", "scattered"]

catalogue = Catalogue(ScaledDotProduct)

TILES = tuple({"tile": n} for n in (4, 8, 16, 32, 64, 128))
"""Variants of a mistake that depends on a tile's size."""


def last_tile(size: int, tile: int) -> np.ndarray:
    """Which of ``size`` places stand in the last tile."""
    return np.arange(size) >= max(0, size - 1) // tile * tile


def arithmetic(call: ScaledDotProduct) -> type[np.floating]:
    """What a kernel computes in when its inputs are stored as those of this call."""
    return np.float32 if call.storage.itemsize <= 4 else np.float64


def scattered(values: np.ndarray, at: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """An array of this shape with ``values`` added at flat places: the adjoint of reading it there."""
    size = int(np.prod(shape))
    values = np.broadcast_to(values, at.shape).ravel()
    summed = np.bincount(at.ravel(), values.real, size)
    if np.iscomplexobj(values):
        summed = summed + 1j * np.bincount(at.ravel(), values.imag, size)
    return summed.reshape(shape)
