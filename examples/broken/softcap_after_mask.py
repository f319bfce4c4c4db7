"""Broken on purpose: the soft cap comes after the mask, so that hidden logits of -inf become -cap and take probability.

With a large cap exp(-cap) is too small to be seen; without a mask nothing is wrong.
"""

import numpy as np


def attention(q, k, v, *, mask=None, softcap=None, scale=None):
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    group = q.shape[1] // k.shape[1]
    queries, keys, values = q.astype(dtype), *(x.astype(dtype).repeat(group, axis=1) for x in (k, v))
    logits = (q.shape[-1] ** -0.5 if scale is None else scale) * (queries @ np.swapaxes(keys, -1, -2))
    seen = np.broadcast_to(True if mask is None else mask, logits.shape)
    logits = np.where(seen, logits, -np.inf)
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)  # should stand before the mask
    top = logits.max(-1, keepdims=True)
    top = np.where(np.isneginf(top), 0, top)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return weighted_sum(weights, values, seen | (weights > 0)).astype(q.dtype), lse.astype(dtype)


def weighted_sum(weights, values, used):
    """weights @ values over the pairs in use: 0 times NaN must not enter."""
    if np.isfinite(values).all():
        return weights @ values
    return np.where(used[..., None], weights[..., None] * values[..., None, :, :], 0).sum(-2)
