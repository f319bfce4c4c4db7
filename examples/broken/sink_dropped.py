"""Broken on purpose: the keys are split in two, neither half counts the sink, and the merge forgets it too.

A sink far below the logits (a zero-initialised one over a long sequence, say) hides the mistake.
"""

import numpy as np


def part(q, k, v):
    """Largest logit, sum of exponentials and weighted values over some of the keys."""
    logits = q @ np.swapaxes(k, -1, -2)
    top = logits.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isneginf(top), 0, top)
    weights = np.exp(logits - top)
    return top, weights.sum(-1, keepdims=True), weights @ v


def attention(q, k, v, *, sinks=None, scale=None):
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    group = q.shape[1] // k.shape[1]
    keys, values = (x.astype(dtype).repeat(group, axis=1) for x in (k, v))
    queries = q.astype(dtype) * dtype(q.shape[-1] ** -0.5 if scale is None else scale)
    half = k.shape[2] // 2
    (top_1, sum_1, out_1), (top_2, sum_2, out_2) = (
        part(queries, keys[:, :, part_of], values[:, :, part_of]) for part_of in (slice(0, half), slice(half, None))
    )
    top = np.maximum(top_1, top_2)
    share_1, share_2 = np.exp(top_1 - top), np.exp(top_2 - top)
    total = share_1 * sum_1 + share_2 * sum_2  # should add exp(sinks - top)
    output = (share_1 * out_1 + share_2 * out_2) / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        return output.astype(q.dtype), (top + np.log(total))[..., 0].astype(dtype)
