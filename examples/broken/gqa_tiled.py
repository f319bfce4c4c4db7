"""Broken on purpose: the key heads are tiled (0 1 0 1 0 1) where each should serve a block of query heads (0 0 0 1 1 1).

With one key head, or as many as query heads, nothing is wrong.
"""

import numpy as np


def attention(q, k, v, *, scale=None):
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    copies = (1, q.shape[1] // k.shape[1], 1, 1)
    keys, values = (
        np.tile(k, copies).astype(dtype),
        np.tile(v, copies).astype(dtype),
    )  # should be repeat(copies, axis=1)
    logits = (q.shape[-1] ** -0.5 if scale is None else scale) * (q.astype(dtype) @ np.swapaxes(keys, -1, -2))
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    return (weights / total @ values).astype(q.dtype), (top + np.log(total))[..., 0].astype(dtype)
