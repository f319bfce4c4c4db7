"""Broken on purpose: the last tile of keys is filled up with zeros, and the zeros are counted.

A zero key has the logit 0 and a zero value: it takes probability and gives nothing.  With a length that is a multiple of the
tile nothing is wrong; with a long sequence the difference is small.
"""

import numpy as np

TILE = 64


def attention(q, k, v, *, scale=None):
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    group = q.shape[1] // k.shape[1]
    filler = ((0, 0), (0, 0), (0, -k.shape[2] % TILE), (0, 0))
    keys, values = (np.pad(x.astype(dtype).repeat(group, axis=1), filler) for x in (k, v))
    queries = q.astype(dtype) * dtype(q.shape[-1] ** -0.5 if scale is None else scale)
    top = np.full((*q.shape[:3], 1), -np.inf, dtype)
    total = np.zeros(top.shape, dtype)
    output = np.zeros((*q.shape[:3], v.shape[-1]), dtype)
    for start in range(0, keys.shape[2], TILE):
        tile = slice(start, start + TILE)
        logits = queries @ np.swapaxes(keys[:, :, tile], -1, -2)  # should be -inf from k.shape[2] on
        new_top = np.maximum(top, logits.max(-1, keepdims=True))
        rescale, weights = np.exp(top - new_top), np.exp(logits - new_top)
        total = rescale * total + weights.sum(-1, keepdims=True)
        output = rescale * output + weights @ values[:, :, tile]
        top = new_top
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return (output / np.where(total == 0, 1, total)).astype(q.dtype), lse
