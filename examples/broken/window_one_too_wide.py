"""Broken on purpose: a window of `left` keys beside the diagonal shows left + 1 of them.

The bounds were written for a half-open interval and moved twice.
"""

import numpy as np


def attention(q, k, v, *, window=None, scale=None):
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    group = q.shape[1] // k.shape[1]
    queries, keys, values = q.astype(dtype), *(x.astype(dtype).repeat(group, axis=1) for x in (k, v))
    logits = (q.shape[-1] ** -0.5 if scale is None else scale) * (queries @ np.swapaxes(keys, -1, -2))
    rows, columns = logits.shape[-2:]
    ahead = np.arange(columns) - np.arange(rows)[:, None] - (columns - rows)  # the last query stands at the last key
    seen = np.ones((rows, columns), dtype=bool)
    left, right = (None, None) if window is None else window
    if left is not None:
        seen &= ahead > -left - 2  # should be -left - 1
    if right is not None:
        seen &= ahead < right + 1
    logits = np.where(seen, logits, -np.inf)
    top = logits.max(-1, keepdims=True)
    top = np.where(np.isneginf(top), 0, top)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return weighted_sum(weights, values, seen).astype(q.dtype), lse.astype(dtype)


def weighted_sum(weights, values, seen):
    """weights @ values over visible pairs: 0 times NaN must not enter."""
    if np.isfinite(values).all():
        return weights @ values
    return np.where(seen[..., None], weights[..., None] * values[..., None, :, :], 0).sum(-2)
