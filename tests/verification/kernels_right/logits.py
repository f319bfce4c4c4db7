"""Logits in several orders: where the scale goes, in which order channels are added, which base."""

from collections.abc import Callable

import numpy as np
from verification.kernels_right.setup import Array, Call


def turned(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def after(c: Call) -> Array:
    return (c.q @ turned(c.k)) * c.scale


def into_q(c: Call) -> Array:
    return (c.q * c.scale) @ turned(c.k)


def into_k(c: Call) -> Array:
    return c.q @ turned(c.k * c.scale)


def halved(c: Call) -> Array:
    """The root of the scale on either side."""
    root = c.q.dtype.type(np.sqrt(np.abs(c.scale)))
    return ((c.q * root) @ turned(c.k * root)) * np.sign(c.scale)


def reversed_channels(c: Call) -> Array:
    return (c.q[..., ::-1] @ turned(c.k[..., ::-1])) * c.scale


def one_by_one(c: Call) -> Array:
    """Channels from left to right, as a loop adds them."""
    s = np.zeros((*c.q.shape[:-1], c.k.shape[-2]), c.q.dtype)
    for i in range(c.q.shape[-1]):
        s += c.q[..., i, None] * c.k[..., None, :, i]
    return s * c.scale


def two_halves(c: Call) -> Array:
    d = c.q.shape[-1] // 2
    return c.scale * (c.q[..., :d] @ turned(c.k[..., :d]) + c.q[..., d:] @ turned(c.k[..., d:]))


ORDERS: dict[str, Callable[[Call], Array]] = {
    f.__name__: f for f in (after, into_q, into_k, halved, reversed_channels, one_by_one, two_halves)
}


def added(c: Call, x: Array) -> Array:
    """Scaled products with cap, bias and ALiBi; -inf where a pair is not seen."""
    y = x
    if c.cap is not None and not c.cap_last:
        y = c.cap * np.tanh(y / c.cap)
    if c.bias is not None:
        y = y + c.bias
    if c.slopes is not None:
        y = y + c.slopes[:, None, None] * c.distance
    if c.cap is not None and c.cap_last:
        y = c.cap * np.tanh(y / c.cap)
    return np.where(c.seen, y, -np.inf).astype(x.dtype)


def through_cap(c: Call, x: Array) -> tuple[Array, Array]:
    """The cap's derivative, and that by the cap itself."""
    if c.cap is None:
        return np.ones((), x.dtype), np.zeros((), x.dtype)
    inner = x
    if c.cap_last:
        inner = x + (0 if c.bias is None else c.bias)
        inner = inner + (0 if c.slopes is None else c.slopes[:, None, None] * c.distance)
    t = np.tanh(inner / c.cap)
    slope = 1 - t * t
    return slope.astype(x.dtype), (t - (inner / c.cap) * slope).astype(x.dtype)
