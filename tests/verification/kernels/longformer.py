"""A kernel of Longformer attention in NumPy alone, and ways to break it."""

import numpy as np


def kernels(*, one_softmax_twice=False, rows_without_gradient=False):
    """Forward and backward; the flags: global keys in the window count twice, global rows give no gradient."""

    def softmax(q, k, count, scale):
        dots = q @ k.swapaxes(-1, -2)
        s = np.where(count > 0, scale * dots, -np.inf)
        top = s.max(-1, keepdims=True)
        p = (count * np.exp(s - np.where(np.isfinite(top), top, 0))).astype(q.dtype)
        total = p.sum(-1, keepdims=True)
        return p / np.where(total == 0, 1, total), dots

    def steps(q, k, v, q_global, k_global, v_global, window, global_tokens, query_lengths, key_lengths, scale):
        b, _, t, d = q.shape
        scale = q.dtype.type(d**-0.5 if scale is None else scale)
        tokens = np.zeros((b, t), bool) if global_tokens is None else global_tokens
        i = np.arange(t)
        ahead = i - i[:, None]
        left, right = (ahead.size if n is None else n for n in window)
        near = (ahead >= -left) & (ahead <= right)
        column = tokens[:, None, None, :]
        real = np.ones((b, 1, 1, t), bool) if key_lengths is None else i < np.reshape(key_lengths, (b, 1, 1, 1))
        count = near.astype(int) + column if one_softmax_twice else near | column
        rows = np.ones((b, 1, t, 1), bool)
        if query_lengths is not None:
            rows = i[:, None] < np.reshape(query_lengths, (b, 1, 1, 1))
        whole = [x if y is None else y for x, y in ((q, q_global), (k, k_global), (v, v_global))]
        every = np.broadcast_to(real, (b, 1, t, t))
        return (
            scale,
            (q, k, v),
            whole,
            softmax(q, k, count * real, scale),
            softmax(*whole[:2], every, scale),
            column,
            rows,
        )

    def forward(q, k, v, *, window, q_global=None, k_global=None, v_global=None, global_tokens=None, query_lengths=None,
                key_lengths=None, scale=None):  # fmt: skip
        _, local, whole, (p, _), (p_all, _), column, rows = steps(
            q, k, v, q_global, k_global, v_global, window, global_tokens, query_lengths, key_lengths, scale
        )
        return np.where(rows, np.where(column.swapaxes(-1, -2), p_all @ whole[2], p @ local[2]), 0)

    def backward(d_output, q, k, v, *, window, q_global=None, k_global=None, v_global=None, global_tokens=None,
                 query_lengths=None, key_lengths=None, scale=None):  # fmt: skip
        factor, local, whole, of_local, of_whole, column, rows = steps(
            q, k, v, q_global, k_global, v_global, window, global_tokens, query_lengths, key_lengths, scale
        )
        d_output, row = np.where(rows, d_output, 0), column.swapaxes(-1, -2)
        found = {n: np.zeros_like(x) for n, x in (("q", q), ("k", k), ("v", v))}
        found.update(
            (n, np.zeros_like(x))
            for n, x in (("q_global", q_global), ("k_global", k_global), ("v_global", v_global))
            if x is not None
        )
        d_scale = 0
        for arrays, (p, dots), d_o, ending in (
            (local, of_local, np.where(row, 0, d_output), ""),
            (whole, of_whole, np.where(row, d_output, 0) * (not rows_without_gradient), "_global"),
        ):
            d_p = d_o @ arrays[2].swapaxes(-1, -2)
            d_s = p * (d_p - (p * d_p).sum(-1, keepdims=True))
            d_scale = d_scale + (d_s * dots).sum()
            parts = (factor * d_s @ arrays[1], factor * d_s.swapaxes(-1, -2) @ arrays[0], p.swapaxes(-1, -2) @ d_o)
            for n, g in zip("qkv", parts, strict=True):
                name = n + ending if n + ending in found else n
                found[name] = found[name] + g
        return {**found, "scale": d_scale}

    return forward, backward
