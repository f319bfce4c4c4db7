"""A kernel of BigBird attention in NumPy alone, and ways to break it."""

import numpy as np


def clean(x, lengths):
    """Padding is never read: zeros in its place."""
    if lengths is None:
        return x
    real = np.arange(x.shape[-2]) < np.reshape(lengths, (len(x), 1))
    return np.where(real[:, None, :, None], x, 0).astype(x.dtype)


def kernels(*, one_draw=False, wrap=False):
    """Forward and backward; the flags: all heads use the random blocks of head 0, the window wraps around."""

    def steps(q, k, block, random_blocks, window_blocks, global_blocks, query_lengths, key_lengths, scale):
        b, h, t, d = q.shape
        n = -(-t // block)
        gap = np.arange(n)[:, None] - np.arange(n)
        gap = np.minimum(gap % n, -gap % n) if wrap else abs(gap)
        layout = np.repeat((gap <= window_blocks)[None], h, axis=0)
        outside = (np.arange(n) < global_blocks[0]) | (np.arange(n) >= n - global_blocks[1])
        layout |= outside | outside[:, None]
        for head, u in np.ndindex(h, n):
            for w in () if random_blocks is None else random_blocks[0 if one_draw else head, u]:
                if w >= 0:
                    layout[head, u, w] = True
        seen = layout.repeat(block, -1).repeat(block, -2)[None, :, :t, :t]
        for lengths, axis in ((query_lengths, (-1, 1)), (key_lengths, (1, -1))):
            if lengths is not None:
                real = np.arange(t) < np.reshape(lengths, (b, 1))
                seen = seen & real.reshape(b, 1, *((t, 1) if axis == (-1, 1) else (1, t)))
        scale = q.dtype.type(d**-0.5 if scale is None else scale)
        dots = q @ k.swapaxes(-1, -2)
        s = np.where(seen, scale * dots, -np.inf)
        top = s.max(-1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0)
        p = np.exp(s - top)
        total = p.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = (np.log(total) + top)[..., 0]
        return (p / np.where(total == 0, 1, total)).astype(q.dtype), dots, scale, lse

    def forward(q, k, v, *, block, window_blocks=1, global_blocks=(1, 1), random_blocks=None, query_lengths=None,
                key_lengths=None, scale=None):  # fmt: skip
        q, k, v = clean(q, query_lengths), clean(k, key_lengths), clean(v, key_lengths)
        p, _, _, lse = steps(
            q, k, block, random_blocks, window_blocks, global_blocks, query_lengths, key_lengths, scale
        )
        return p @ v, lse

    def backward(d_output, q, k, v, *, d_lse=None, block, window_blocks=1, global_blocks=(1, 1), random_blocks=None,
                 query_lengths=None, key_lengths=None, scale=None):  # fmt: skip
        q, d_output = clean(q, query_lengths), clean(d_output, query_lengths)
        k, v = clean(k, key_lengths), clean(v, key_lengths)
        p, dots, factor, _ = steps(
            q, k, block, random_blocks, window_blocks, global_blocks, query_lengths, key_lengths, scale
        )
        d_p = d_output @ v.swapaxes(-1, -2)
        d_lse = 0 if d_lse is None else np.where(p.any(-1), d_lse, 0)[..., None]
        d_s = p * (d_p - (p * d_p).sum(-1, keepdims=True) + d_lse)
        return {"q": factor * d_s @ k, "k": factor * d_s.swapaxes(-1, -2) @ q, "v": p.swapaxes(-1, -2) @ d_output,
                "scale": (d_s * dots).sum()}  # fmt: skip

    return forward, backward
