"""Softmax attention one tile at a time, as flash attention kernels do it, in plain NumPy: forward and backward.

The score matrix is never built.  Forward, a row keeps three things while the key tiles pass by: the largest logit so far,
the sum of exponentials and the weighted sum of values, both in units of that largest logit.  When the largest logit moves,
sum and accumulator are rescaled.  Backward, each tile's weights are computed again from the logits and the lse.

Arrays are (batch, head, length, channel); q may have more heads than k and v, its head i then uses key head i // (h / g).
Half precision is computed in float32 and rounded once at the end.

    refattn verify examples/online_softmax.py:attention --mechanism scaled_dot_product_attention \\
        --gradients --backward examples/online_softmax.py:attention_backward
"""

import numpy as np

QUERY_TILE, KEY_TILE = 24, 40


class Problem:
    """The arrays in the dtype of the computation, and the logits of any tile."""

    def __init__(self, q, k, v, causal, align, window, scale, softcap, bias, mask, sinks, alibi_slopes, key_lengths):
        self.dtype = np.float64 if q.dtype == np.float64 else np.float32
        self.q, k, v = (x.astype(self.dtype) for x in (q, k, v))
        self.batch, self.heads, self.rows, channels = q.shape
        self.groups, self.columns = k.shape[1:3]
        head = np.arange(self.heads) // (self.heads // self.groups)
        self.k, self.v = k[:, head], v[:, head]
        whole = (self.batch, self.heads, self.rows, self.columns)
        self.bias = None if bias is None else np.broadcast_to(bias, whole)
        self.mask = None if mask is None else np.broadcast_to(mask, whole)
        self.slopes = None if alibi_slopes is None else alibi_slopes.astype(self.dtype)[:, None, None]
        sinks = np.zeros((self.heads, 0)) if sinks is None else sinks
        self.sinks = sinks.astype(self.dtype).reshape(self.heads, 1, -1)
        self.scale = self.dtype(channels**-0.5 if scale is None else scale)
        self.softcap = None if softcap is None else self.dtype(softcap)
        self.causal = causal
        self.left, self.right = (None, None) if window is None else window
        lengths = self.columns if key_lengths is None else key_lengths
        self.lengths = np.broadcast_to(lengths, self.batch).reshape(-1, 1, 1, 1)
        if align is None or isinstance(align, str):
            offset = np.zeros(1, int) if align == "upper_left" else self.lengths - self.rows
        else:
            offset = np.asarray(align)
        self.offset = np.broadcast_to(offset.reshape(-1), self.batch).reshape(-1, 1, 1, 1)

    def tile(self, queries, keys):
        """Logits of a tile, which of its pairs are visible, and the slope of the soft cap."""
        i, j = np.arange(queries.start, queries.stop)[:, None], np.arange(keys.start, keys.stop)
        logits = self.scale * (self.q[:, :, queries] @ transpose(self.k[:, :, keys]))
        ahead = j - i - self.offset
        seen = np.broadcast_to(j < self.lengths, logits.shape)
        if self.causal:
            seen = seen & (ahead <= 0)
        if self.left is not None:
            seen = seen & (ahead >= -self.left)
        if self.right is not None:
            seen = seen & (ahead <= self.right)
        if self.mask is not None:
            seen = seen & self.mask[:, :, queries, keys]
        slope = self.dtype(1)
        if self.softcap is not None:
            bent = np.tanh(logits / self.softcap)
            logits, slope = self.softcap * bent, 1 - bent * bent
        if self.bias is not None:
            bias = self.bias[:, :, queries, keys].astype(self.dtype)
            logits, seen = logits + bias, seen & (bias != -np.inf)
        if self.slopes is not None:
            logits = logits - self.slopes * np.abs(ahead).astype(self.dtype)
        return np.where(seen, logits, self.dtype(-np.inf)), seen, slope


def tiles(length, size):
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def transpose(x):
    return np.swapaxes(x, -1, -2)


def product(weights, values, seen):
    """weights @ values over visible pairs: 0 times NaN must not enter."""
    if np.isfinite(values).all():
        return weights @ values
    return np.where(seen[..., None], weights[..., None] * values[..., None, :, :], 0).sum(-2, dtype=values.dtype)


def forward(problem):
    """Output and lse in the dtype of the computation."""
    p = problem
    output = np.zeros((p.batch, p.heads, p.rows, p.v.shape[-1]), p.dtype)
    lse = np.zeros((p.batch, p.heads, p.rows), p.dtype)
    sinks_top = p.sinks.max(-1, keepdims=True, initial=-np.inf)
    sinks_total = np.exp(p.sinks - finite(sinks_top)).sum(-1, keepdims=True)
    for queries in tiles(p.rows, QUERY_TILE):
        shape = (p.batch, p.heads, queries.stop - queries.start, 1)
        # The sinks are as good as a first tile of keys whose values are zero.
        top, total = np.broadcast_to(sinks_top, shape), np.broadcast_to(sinks_total, shape)
        accumulator = np.zeros((*shape[:3], p.v.shape[-1]), p.dtype)
        for keys in tiles(p.columns, KEY_TILE):
            logits, seen, _ = p.tile(queries, keys)
            new_top = np.maximum(top, logits.max(-1, keepdims=True))
            rescale = np.exp(top - finite(new_top))
            weights = np.exp(logits - finite(new_top))
            total = rescale * total + weights.sum(-1, keepdims=True)
            accumulator = rescale * accumulator + product(weights, p.v[:, :, keys], seen)
            top = new_top
        nothing = total == 0
        output[:, :, queries] = np.where(nothing, 0, accumulator / np.where(nothing, 1, total))
        lse[:, :, queries] = (finite(top) + np.log(total))[..., 0]
    return output, lse


def finite(top):
    """A row that has seen no key yet has the maximum -inf: shift it by 0, for -inf - (-inf) is NaN."""
    return np.where(np.isneginf(top), 0, top)


def backward(problem, d_output, d_lse):
    """Gradients of q, k, v in the dtype of the computation.

    d_logits = weights (d_weights - delta + d_lse) with delta = sum(d_output output), the sum over a row of weights d_weights.
    """
    p = problem
    output, lse = forward(p)
    lse, d_lse = finite(lse[..., None]), d_lse[..., None]
    delta = (d_output * output).sum(-1, keepdims=True)
    d_q, d_k, d_v = np.zeros_like(p.q), np.zeros_like(p.k), np.zeros_like(p.v)
    for queries in tiles(p.rows, QUERY_TILE):
        d_o = d_output[:, :, queries]
        for keys in tiles(p.columns, KEY_TILE):
            logits, seen, slope = p.tile(queries, keys)
            weights = np.where(seen, np.exp(logits - lse[:, :, queries]), 0)
            d_weights = d_o @ transpose(p.v[:, :, keys])
            d_logits = weights * (d_weights - delta[:, :, queries] + d_lse[:, :, queries])
            d_scores = np.where(seen, p.scale * d_logits * slope, 0)
            d_q[:, :, queries] += product(d_scores, p.k[:, :, keys], seen)
            d_k[:, :, keys] += product(transpose(d_scores), p.q[:, :, queries], transpose(seen))
            d_v[:, :, keys] += product(transpose(weights), d_o, transpose(seen))
    group = (p.batch, p.groups, p.heads // p.groups)
    return d_q, *(x.reshape(*group, *x.shape[2:]).sum(2) for x in (d_k, d_v))


def attention(
    q, k, v, *, causal=False, align="lower_right", window=None, scale=None, softcap=None, bias=None, mask=None,
    sinks=None, alibi_slopes=None, key_lengths=None,
):  # fmt: skip
    """Output (b, h, q, e) in the dtype of q, and lse (b, h, q)."""
    problem = Problem(q, k, v, causal, align, window, scale, softcap, bias, mask, sinks, alibi_slopes, key_lengths)
    with np.errstate(divide="ignore", invalid="ignore"):  # log 0 = -inf is meant; NaN inputs give NaN
        output, lse = forward(problem)
    return output.astype(q.dtype), lse


def attention_backward(
    d_output, q, k, v, *, d_lse=None, causal=False, align="lower_right", window=None, scale=None, softcap=None, bias=None,
    mask=None, sinks=None, alibi_slopes=None, key_lengths=None,
):  # fmt: skip
    """Gradients of q, k and v in their dtypes."""
    problem = Problem(q, k, v, causal, align, window, scale, softcap, bias, mask, sinks, alibi_slopes, key_lengths)
    d_output = d_output.astype(problem.dtype)
    d_lse = np.zeros(q.shape[:3], problem.dtype) if d_lse is None else d_lse.astype(problem.dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        gradients = backward(problem, d_output, d_lse)
    return tuple(g.astype(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True))
