"""Derived bounds, for mechanisms whose output is softmax weights times values."""

from typing import Any

import numpy as np

from refattn import precision
from refattn.mechanism import Mechanism
from refattn.verification.bounds.spread import TINY, accumulation
from refattn.verification.question import Question

__all__ = ["output_bounds", "weighs_values"]

_OTHER_PRODUCTS = ("r", "key_positions")
"""Arrays whose products with q are part of the logits: the bound knows the rounding of q k^T alone."""


def weighs_values(mechanism: Mechanism) -> bool:
    return "keep_weights" in mechanism.options and {"q", "k", "v"} <= set(mechanism.positional)


def output_bounds(question: Question, exact: dict[str, Any], result: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """A-priori bound of the output, for mechanisms whose output is softmax weights times values (checked, not assumed)."""
    if not weighs_values(question.mechanism) or any(exact.get(name) is not None for name in _OTHER_PRODUCTS):
        return None
    if "weights" not in result:
        undropped = {n: x for n, x in exact.items() if n not in ("dropout_mask", "dropout_rate")}
        with np.errstate(all="ignore"):
            result = question.mechanism.forward(**undropped, keep_weights=True)
    if "weights" not in result or "logits" not in result:
        return None
    q, k, v = (np.where(np.isfinite(exact[n]), exact[n], 0.0) for n in ("q", "k", "v"))
    weights, logits = np.asarray(result.weights), np.asarray(result.logits)
    heads, groups = q.shape[-3], k.shape[-3]
    if weights.shape != logits.shape or weights.shape[-3:] != (heads, q.shape[-2], k.shape[-2]) or heads % groups:
        return None
    order = np.arange(heads) % groups if exact.get("head_map") == "tile" else np.arange(heads) // (heads // groups)
    k, v = k[..., order, :, :], v[..., order, :, :]
    weights = np.where(np.isfinite(weights), weights, 0.0)
    with np.errstate(all="ignore"):
        sure = (weights > 0) & np.isfinite(logits) & np.isfinite(result.lse)[..., None]
        sinks = (
            exact.get("sinks") is not None or exact.get("dropout_mask") is not None
        )  # lse or weights are others then
        softmax = sinks or np.allclose(weights[sure], np.exp(logits - result.lse[..., None])[sure], rtol=1e-6, atol=0)
    if not softmax:  # weighted otherwise, as by a ramp
        return None
    finite = np.isfinite(result.output)
    if not np.allclose((weights @ v)[finite], result.output[finite], rtol=1e-9, atol=1e-9):
        return None
    keep = exact.get("dropout_mask")
    factor = None if keep is None else np.broadcast_to(keep / (1.0 - exact["dropout_rate"]), weights.shape)
    scale = exact.get("scale")
    unit = precision.unit_roundoff(question.precision)
    with np.errstate(all="ignore"):
        bounds = precision.output_bound(
            q, k, v, logits=np.where(weights > 0, logits, -np.inf), weights=weights, factor=factor,
            scale=None if scale is None else float(scale),
            unit=accumulation(question.precision), unit_weights=unit, unit_output=unit,
        )  # fmt: skip
    return np.asarray(bounds.rss) + TINY, np.asarray(bounds.worst) + TINY
