"""A kernel of ETC attention in NumPy alone, and ways to break it."""

import numpy as np


def kernels(*, sign=1, labels_to_queries=True):
    """Forward and backward on [global, long] as one sequence; ``sign=-1`` counts distances from key to query."""

    def steps(q, k, v, q_global, k_global, v_global, radius, labels, clip, long_labels, global_labels, long_mask,
              global_mask, lengths, global_lengths, scale):  # fmt: skip
        b, _, t, d = q.shape
        n = q_global.shape[2]
        q, k, v = (np.concatenate(pair, axis=2) for pair in ((q_global, q), (k_global, k), (v_global, v)))
        scale = q.dtype.type(d**-0.5 if scale is None else scale)
        gap = np.arange(t) - np.arange(t)[:, None]
        seen = np.ones((b, n + t, n + t), bool)
        seen[:, n:, n:] = abs(gap) <= radius
        if long_mask is not None:
            seen[:, n:, :n] = long_mask
        if global_mask is not None:
            seen[:, :n] = global_mask
        real = np.ones((b, n + t), bool)
        if global_lengths is not None:
            real[:, :n] = np.arange(n) < np.reshape(global_lengths, (b, 1))
        if lengths is not None:
            real[:, n:] = np.arange(t) < np.reshape(lengths, (b, 1))
        seen = (seen & real[:, None, :] & real[:, :, None])[:, None]
        dots = q @ k.swapaxes(-1, -2)
        hot = None
        if labels is not None:
            number = np.full((b, n + t, n + t), -1)
            number[:, n:, n:] = np.clip(sign * gap, -clip, clip) + clip
            if long_labels is not None:
                number[:, n:, :n] = long_labels
            if global_labels is not None:
                number[:, :n] = global_labels
            hot = (number[..., None] == np.arange(labels.shape[1])).astype(q.dtype)
            dots = dots + np.einsum("bhid,hpd,bijp->bhij", q, labels, hot, optimize=True)
        s = np.where(seen, scale * dots, -np.inf)
        top = s.max(-1, keepdims=True)
        p = np.exp(s - np.where(np.isfinite(top), top, 0))
        total = p.sum(-1, keepdims=True)
        return q, k, v, n, (p / np.where(total == 0, 1, total)).astype(q.dtype), dots, hot, scale

    names = ("radius", "labels", "clip", "long_labels", "global_labels", "long_mask", "global_mask", "lengths",
             "global_lengths", "scale")  # fmt: skip

    def forward(q, k, v, q_global, k_global, v_global, *, radius, labels=None, clip=None, long_labels=None,
                global_labels=None, long_mask=None, global_mask=None, lengths=None, global_lengths=None, scale=None):  # fmt: skip
        given = locals()
        _, _, values, n, p, *_ = steps(q, k, v, q_global, k_global, v_global, *(given[x] for x in names))
        out = p @ values
        return {"output": out[:, :, n:], "output_global": out[:, :, :n]}

    def backward(d_output, q, k, v, q_global, k_global, v_global, *, d_output_global, radius, labels=None, clip=None,
                 long_labels=None, global_labels=None, long_mask=None, global_mask=None, lengths=None,
                 global_lengths=None, scale=None):  # fmt: skip
        given = locals()
        x, keys, values, n, p, dots, hot, factor = steps(
            q, k, v, q_global, k_global, v_global, *(given[x] for x in names)
        )
        d = np.concatenate([d_output_global, d_output], axis=2)
        d_p = d @ values.swapaxes(-1, -2)
        d_s = p * (d_p - (p * d_p).sum(-1, keepdims=True))
        d_q = factor * d_s @ keys
        found = {"scale": (d_s * dots).sum()}
        if hot is not None:
            shares = np.einsum("bhij,bijp->bhip", d_s, hot, optimize=True)
            found["labels"] = factor * np.einsum("bhip,bhid->hpd", shares, x, optimize=True)
            if labels_to_queries:
                d_q = d_q + factor * np.einsum("bhip,hpd->bhid", shares, labels, optimize=True)
        d_k, d_v = factor * d_s.swapaxes(-1, -2) @ x, p.swapaxes(-1, -2) @ d
        for name, g in (("q", d_q), ("k", d_k), ("v", d_v)):
            found[name], found[name + "_global"] = g[:, :, n:], g[:, :, :n]
        return found

    return forward, backward
