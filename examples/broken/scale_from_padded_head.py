"""Broken on purpose: the channels are padded to a multiple of 32, and the scale is taken from the padded size.

With 32, 64 or 128 channels nothing is wrong.
"""

import numpy as np

LANES = 32


def attention(q, k, v, *, scale=None):
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    group = q.shape[1] // k.shape[1]
    filler = ((0, 0), (0, 0), (0, 0), (0, -q.shape[-1] % LANES))
    queries = np.pad(q.astype(dtype), filler)
    keys, values = np.pad(k.astype(dtype), filler).repeat(group, axis=1), v.astype(dtype).repeat(group, axis=1)
    if scale is None:
        scale = queries.shape[-1] ** -0.5  # should be q.shape[-1]
    logits = scale * (queries @ np.swapaxes(keys, -1, -2))
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    return (weights / total @ values).astype(q.dtype), (top + np.log(total))[..., 0].astype(dtype)
