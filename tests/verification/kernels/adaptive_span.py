"""A kernel of adaptive spans in NumPy alone, and ways to break it."""

import numpy as np


def kernels(*, finished=False, additive=False):
    """Whole matrices; ``finished``: the ramp on finished softmax weights; ``additive``: d span through a log ramp."""

    def steps(q, k, v, span, key_positions, ramp, max_span, scale):
        n_q, n_k, d = q.shape[-2], k.shape[-2], q.shape[-1]
        scale = q.dtype.type(d**-0.5 if scale is None else scale)
        distance = np.arange(n_q)[:, None] + n_k - n_q - np.arange(n_k)[None]
        limit = max_span or (n_k - n_q if key_positions is None else key_positions.shape[-1])
        seen = (distance >= 1) & (distance <= limit)
        column = np.clip(distance - 1, 0, limit - 1)
        s = q @ k.swapaxes(-1, -2)
        if key_positions is not None:
            s = s + np.take_along_axis(q @ key_positions, np.broadcast_to(column, s.shape), -1)
        spans = span[:, None, None] if span.ndim == 1 else span[..., None]
        level = ((ramp + spans - distance) / ramp).astype(q.dtype)
        m = np.where(seen, np.clip(level, 0, 1), 0).astype(q.dtype)
        logits = np.where(seen if finished else m > 0, scale * s, -np.inf)
        top = logits.max(-1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0).astype(q.dtype)
        e = np.where(seen, np.exp(np.minimum(scale * s - top, 80)), 0).astype(q.dtype)
        total = (e if finished else m * e).sum(-1, keepdims=True)
        safe = np.where(total > 0, total, 1)
        with np.errstate(divide="ignore"):
            lse = (top + np.log((m * e).sum(-1, keepdims=True)))[..., 0]
        return scale, s, m, e / safe, level, seen, column, lse

    def forward(q, k, v, *, span, key_positions=None, ramp=32, max_span=None, scale=None):
        _, _, m, raw, _, _, _, lse = steps(q, k, v, span, key_positions, ramp, max_span, scale)
        return (m * raw) @ v, lse

    def backward(d_output, q, k, v, *, d_lse=None, span, key_positions=None, ramp=32, max_span=None, scale=None):
        factor, _, m, raw, level, seen, column, _ = steps(q, k, v, span, key_positions, ramp, max_span, scale)
        a = m * raw
        d_a = d_output @ v.swapaxes(-1, -2)
        row = (a * d_a).sum(-1, keepdims=True) - (0 if d_lse is None else d_lse[..., None])
        d_m = np.where(seen, raw * (d_a - row), 0)
        d_s = factor * m * d_m
        ends = seen & (level >= 0) & (level <= 1)
        d_level = np.where(ends & (m > 0) if additive else ends, d_m, 0).sum(-1) / ramp
        d_q = d_s @ k
        found = {"span": d_level.sum((0, 2)) if span.ndim == 1 else d_level}
        if key_positions is not None:
            by_distance = np.zeros((*d_s.shape[:-1], key_positions.shape[-1]), d_s.dtype)
            for i in range(d_s.shape[-2]):
                for j in np.flatnonzero(seen[i]):
                    by_distance[..., i, column[i, j]] += d_s[..., i, j]
            d_q = d_q + by_distance @ key_positions.swapaxes(-1, -2)
            table = q.swapaxes(-1, -2) @ by_distance
            found["key_positions"] = table.sum((0, 1)) if key_positions.ndim == 2 else table.sum(0)
        return {**found, "q": d_q, "k": d_s.swapaxes(-1, -2) @ q, "v": a.swapaxes(-1, -2) @ d_output}

    return forward, backward
