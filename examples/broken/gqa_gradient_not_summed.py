"""Broken on purpose: dK and dV of a key head are those of the last query head of its group, not the sum over the group.

The forward is right, and with as many key heads as query heads so is the backward.
"""

import numpy as np


def softmax(q, k, scale):
    """Weights and lse; k has as many heads as q."""
    logits = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ np.swapaxes(k, -1, -2))
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    return weights / total, (top + np.log(total))[..., 0]


def widened(q, k, v):
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    group = q.shape[1] // k.shape[1]
    return q.astype(dtype), k.astype(dtype).repeat(group, axis=1), v.astype(dtype).repeat(group, axis=1)


def attention(q, k, v, *, scale=None):
    queries, keys, values = widened(q, k, v)
    weights, lse = softmax(queries, keys, scale)
    return (weights @ values).astype(q.dtype), lse.astype(queries.dtype)


def attention_backward(d_output, q, k, v, *, d_lse=None, scale=None):
    queries, keys, values = widened(q, k, v)
    d_output = d_output.astype(queries.dtype)
    weights, _ = softmax(queries, keys, scale)
    d_weights = d_output @ np.swapaxes(values, -1, -2)
    delta = (d_output * (weights @ values)).sum(-1, keepdims=True)
    if d_lse is not None:
        delta = delta - d_lse.astype(queries.dtype)[..., None]
    d_scores = (q.shape[-1] ** -0.5 if scale is None else scale) * weights * (d_weights - delta)
    d_q, d_k, d_v = d_scores @ keys, np.zeros(k.shape, queries.dtype), np.zeros(v.shape, queries.dtype)
    for head in range(q.shape[1]):
        group = head // (q.shape[1] // k.shape[1])
        d_k[:, group] = np.swapaxes(d_scores[:, head], -1, -2) @ queries[:, head]  # should be +=
        d_v[:, group] = np.swapaxes(weights[:, head], -1, -2) @ d_output[:, head]  # should be +=
    return tuple(g.astype(x.dtype) for g, x in ((d_q, q), (d_k, k), (d_v, v)))
