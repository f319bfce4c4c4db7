"""A kernel of Sinkhorn attention in NumPy alone, and ways to break it."""

import numpy as np


def kernels(*, transposed=False, constant_sort=False):
    """Forward and backward, not causal; the flags: R is applied transposed, the sort gets no gradient."""

    def blocks(x, n):
        return x.reshape(*x.shape[:2], n, -1, x.shape[-1])

    def steps(q, k, v, sort_logits, temperature, iterations, noise, scale):
        n = sort_logits.shape[-1]
        x = (sort_logits if noise is None else sort_logits + noise) / q.dtype.type(temperature)
        trail = []
        for _ in range(iterations):
            for axis in (-1, -2):
                x = x - np.logaddexp.reduce(x, axis=axis, keepdims=True)
                trail.append((x, axis))
        r = np.exp(x)
        used = r.swapaxes(-1, -2) if transposed else r
        q, k, v = (blocks(y, n) for y in (q, k, v))
        keys, values = (np.concatenate([np.einsum("bhuv,bhvcd->bhucd", used, y), y], axis=-2) for y in (k, v))
        scale = q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)
        dots = q @ keys.swapaxes(-1, -2)
        p = np.exp(scale * dots - (scale * dots).max(-1, keepdims=True))
        return q, k, v, keys, values, used, r, trail, dots, p / p.sum(-1, keepdims=True), scale

    def forward(q, k, v, *, sort_logits, block, temperature=0.75, iterations=7, noise=None, scale=None):
        _, _, _, _, values, *_, p, _ = steps(q, k, v, sort_logits, temperature, iterations, noise, scale)
        return (p @ values).reshape(*q.shape[:3], -1)

    def backward(d_output, q, k, v, *, sort_logits, block, temperature=0.75, iterations=7, noise=None, scale=None):
        n, shapes = sort_logits.shape[-1], (q.shape, k.shape, v.shape)
        q, k, v, keys, values, used, r, trail, dots, p, factor = steps(
            q, k, v, sort_logits, temperature, iterations, noise, scale
        )
        d_o = blocks(d_output, n)
        d_p = d_o @ values.swapaxes(-1, -2)
        d_s = p * (d_p - (p * d_p).sum(-1, keepdims=True))
        d_q = factor * d_s @ keys
        d_keys, d_values = factor * d_s.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ d_o
        found, d_r = [], 0
        for d_both, y in ((d_keys, k), (d_values, v)):
            moved, own = d_both[..., :block, :], d_both[..., block:, :]
            found.append(own + np.einsum("bhuv,bhucd->bhvcd", used, moved))
            d_r = d_r + np.einsum("bhucd,bhvcd->bhuv", moved, y)
        d_x = r * (d_r.swapaxes(-1, -2) if transposed else d_r)
        for y, axis in reversed(trail):
            d_x = d_x - np.exp(y) * d_x.sum(axis, keepdims=True)
        if constant_sort:
            d_x = np.zeros_like(d_x)
        scores = (sort_logits if noise is None else sort_logits + noise) / temperature
        d_q, d_k, d_v = (x.reshape(shape) for x, shape in zip((d_q, *found), shapes, strict=True))
        return {"q": d_q, "k": d_k, "v": d_v, "sort_logits": d_x / temperature,
                "temperature": -(d_x * scores).sum() / temperature, "scale": (d_s * dots).sum()}  # fmt: skip

    return forward, backward
