"""Broken on purpose: query i sees the keys up to i, also where the last query should stand at the last key.

With as many queries as keys nothing is wrong; decoding against a cache, the newest keys are never seen.
"""

import numpy as np


def attention(q, k, v, *, causal=False, scale=None):
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    group = q.shape[1] // k.shape[1]
    queries, keys, values = q.astype(dtype), *(x.astype(dtype).repeat(group, axis=1) for x in (k, v))
    logits = (q.shape[-1] ** -0.5 if scale is None else scale) * (queries @ np.swapaxes(keys, -1, -2))
    seen = np.ones(logits.shape[-2:], dtype=bool)
    if causal:
        seen = np.tril(seen)  # should be np.tril(seen, number of keys - number of queries)
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
