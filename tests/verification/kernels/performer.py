"""A kernel of Performer in NumPy alone, and ways to break it."""

import numpy as np


def kernels(*, own_maximum=False, future_sum=False, length_constant=False):
    """Forward and backward, position by position where causal.

    ``own_maximum``: every key subtracts its own; ``future_sum``: causal rows are divided by the sum over all keys;
    ``length_constant``: the backward forgets |x|^2.
    """

    def features(x, w, kernel, eps, whole):
        """phi and its slope in the exponent (or in w.x), x scaled."""
        y = x * x.dtype.type(x.shape[-1] ** -0.25)
        u = y @ w.T
        if kernel == "relu":
            return np.maximum(u, 0) + x.dtype.type(1e-3 if eps is None else eps), (u > 0).astype(x.dtype), y
        top = u.max((-1, -2), keepdims=True) if whole else u.max(-1, keepdims=True)
        ratio = x.dtype.type(len(w) ** -0.5)
        grown = ratio * np.exp(u - (y * y).sum(-1, keepdims=True) / 2 - top)
        return grown + ratio * x.dtype.type(1e-4 if eps is None else eps), grown, y

    def steps(q, k, features_, kernel, eps):
        return features(q, features_, kernel, eps, False), features(k, features_, kernel, eps, not own_maximum)

    def forward(q, k, v, *, features, kernel="softmax", eps=None, causal=False, key_sum_eps=0.0):
        (f, *_), (g, *_) = steps(q, k, features, kernel, eps)
        total = g.sum(-2) + q.dtype.type(key_sum_eps)
        if not causal:
            return f @ (g.swapaxes(-1, -2) @ v) / (f @ total[..., None])
        state, running = np.zeros((*f.shape[:2], f.shape[-1], v.shape[-1]), q.dtype), total - g.sum(-2)
        rows = []
        for i in range(f.shape[-2]):
            state = state + g[..., i, :, None] * v[..., i, None, :]
            running = running + g[..., i, :]
            divisor = (f[..., i, :] * (total if future_sum else running)).sum(-1, keepdims=True)
            rows.append((f[..., i, None, :] @ state)[..., 0, :] / divisor)
        return np.stack(rows, axis=-2)

    def backward(d_output, q, k, v, *, features, kernel="softmax", eps=None, causal=False, key_sum_eps=0.0):
        (f, slope_q, y_q), (g, slope_k, y_k) = steps(q, k, features, kernel, eps)
        n_q, n_k = f.shape[-2], g.shape[-2]
        seen = np.tri(n_q, n_k, dtype=q.dtype) if causal else np.ones((n_q, n_k), q.dtype)
        weights = seen * (f @ g.swapaxes(-1, -2))
        divisor = weights.sum(-1, keepdims=True) + q.dtype.type(key_sum_eps) * f.sum(-1, keepdims=True)
        d_total = d_output / divisor
        d_divisor = -(d_total * (weights @ v / divisor)).sum(-1, keepdims=True)
        d_weights = seen * (d_total @ v.swapaxes(-1, -2) + d_divisor)
        found = {"v": weights.swapaxes(-1, -2) @ d_total, "features": 0}
        d_f, d_g = d_weights @ g + q.dtype.type(key_sum_eps) * d_divisor, d_weights.swapaxes(-1, -2) @ f
        for name, d_phi, slope, y in (("q", d_f, slope_q, y_q), ("k", d_g, slope_k, y_k)):
            d_u = d_phi * slope
            d_y = d_u @ features
            if kernel == "softmax" and not length_constant:
                d_y = d_y - y * d_u.sum(-1, keepdims=True)
            found[name] = d_y * q.dtype.type(q.shape[-1] ** -0.25)
            found["features"] = found["features"] + np.einsum("bhtn,bhtd->nd", d_u, y)
        return found

    return forward, backward
