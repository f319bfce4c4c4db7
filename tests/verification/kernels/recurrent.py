"""Independent kernels of Transformer-XL and compressive attention for the verifier's tests: right ones, and broken ones.

Nothing here comes from refattn.  Relative scores are looked up pair by pair in the line of all (query, row) scores.
"""

import numpy as np


def transformer_xl(*, slice_off=False, swap=False, one_more=False, total_bias=False, table_without_bias=False):
    """Forward and backward; each flag breaks one step."""

    def places(n_q, n_k, causal):
        """Place of every pair in the line of all (query, row) scores, behind which one zero stands."""
        distance = (n_k - n_q) + np.arange(n_q)[:, None] - np.arange(n_k)[None, :]
        n_p = n_k if causal else n_k + n_q
        rows = (n_k - 1 if causal else n_k) - distance
        at = np.where(rows < n_p, np.arange(n_q)[:, None] * n_p + rows, n_q * n_p)
        if slice_off and causal:  # the slice [:-1] where [1:] belongs
            line = np.arange(n_q * n_p).reshape(n_q, n_p)
            at = np.pad(line, ((0, 0), (1, 0)), constant_values=n_q * n_p).reshape(n_p + 1, n_q)[:-1].reshape(n_q, n_p)
        return at, n_p

    def prepare(q, k, r, u, w, position_bias, causal, same_length, mask, bias, scale):
        h, n_q, d = q.shape[-3:]
        n_k = k.shape[-2]
        zero = np.zeros((h, d), q.dtype)
        u, w = zero if u is None else u, zero if w is None else w
        u, w = (w, u) if swap else (u, w)
        scale = q.dtype.type(d**-0.5 if scale is None else scale)
        age = np.arange(n_q)[:, None] + n_k - n_q - np.arange(n_k)[None, :]
        seen = age >= 0 if causal else np.ones((n_q, n_k), bool)
        if same_length is not False:
            seen = seen & (age < (n_k - n_q if same_length is True else same_length) + one_more)
        seen = np.broadcast_to(seen, (*q.shape[:-1], n_k))
        seen = seen if mask is None else seen & mask
        at, n_p = places(n_q, n_k, causal)
        qu, qw = q + u[:, None], q + w[:, None]
        scores = np.zeros((*q.shape[:-1], n_p), q.dtype)
        if r is not None:
            scores = scores + qw @ r.swapaxes(-1, -2)
        if position_bias is not None:
            scores = scores + position_bias[:, None]
        line = np.concatenate([scores.reshape(*q.shape[:-2], -1), np.zeros((*q.shape[:-2], 1), q.dtype)], axis=-1)
        unscaled = qu @ k.swapaxes(-1, -2) + line[..., at]
        logits = scale * unscaled
        if bias is not None:
            logits, seen = logits + bias, seen & ~np.isneginf(bias)
        return logits, unscaled, seen, qu, qw, scale, at, n_p

    def softmax(logits, seen):
        s = np.where(seen, logits, -np.inf)
        top = s.max(-1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0)
        e = np.where(seen, np.exp(s - top), 0)
        total = e.sum(-1, keepdims=True)
        lse = np.where(total > 0, np.log(total) + top, -np.inf)[..., 0]
        return (e / np.where(total > 0, total, 1)).astype(logits.dtype), lse.astype(logits.dtype)

    def clean(x):
        """Values that nobody sees do not count, whatever they are."""
        return np.where(np.isfinite(x) & (np.abs(x) < 1e29), x, 0)

    def forward(q, k, v, *, r=None, u=None, w=None, position_bias=None, causal=True, same_length=False, mask=None,
                bias=None, scale=None):  # fmt: skip
        with np.errstate(all="ignore"):
            logits, _, seen, *_ = prepare(q, k, r, u, w, position_bias, causal, same_length, mask, bias, scale)
            weights, lse = softmax(logits, seen)
            return weights @ clean(v), lse

    def backward(d_output, q, k, v, *, d_lse=None, r=None, u=None, w=None, position_bias=None, causal=True,
                 same_length=False, mask=None, bias=None, scale=None):  # fmt: skip
        with np.errstate(all="ignore"):
            logits, unscaled, seen, qu, qw, s, at, n_p = prepare(
                q, k, r, u, w, position_bias, causal, same_length, mask, bias, scale
            )
            weights, _ = softmax(logits, seen)
            d_p = d_output @ clean(v).swapaxes(-1, -2)
            inner = d_p - (weights * d_p).sum(-1, keepdims=True)
            inner = inner if d_lse is None else inner + d_lse[..., None]
            d_s = np.where(seen, weights * inner, 0)
            found = {"v": weights.swapaxes(-1, -2) @ d_output, "k": s * (d_s.swapaxes(-1, -2) @ qu)}
            line = np.zeros((q.shape[-2] * n_p + 1, *q.shape[:2]), q.dtype)
            np.add.at(line, at, np.moveaxis(s * d_s, (0, 1), (2, 3)))
            d_scores = np.moveaxis(line[:-1].reshape(q.shape[-2], n_p, *q.shape[:2]), (2, 3), (0, 1))
            content = s * (d_s @ clean(k))
            position = np.zeros_like(content)
            if r is not None:
                position = d_scores @ r
                found["r"] = (d_scores.swapaxes(-1, -2) @ (q if table_without_bias else qw)).sum(0)
            found["q"] = content + position
            d_u, d_w = content.sum((0, 2)), position.sum((0, 2))
            found["u"], found["w"] = (d_w, d_u) if swap else (d_u, d_w)
            if total_bias:
                found["u"] = found["w"] = found["q"].sum((0, 2))
            if position_bias is not None:
                found["position_bias"] = d_scores.sum((0, 2))
            if bias is not None:
                axes = tuple(n for n, size in enumerate(bias.shape) if size == 1)
                found["bias"] = d_s.sum(tuple(range(d_s.ndim - bias.ndim))).sum(axes, keepdims=True)
            if scale is not None:
                found["scale"] = np.sum(np.where(seen, d_s * unscaled, 0))
            return found

    return forward, backward


def compressive(*, memory_first=False, into_memory=False, weights_detached=False, **broken):
    """Projections around ``transformer_xl``; slots only."""
    core, core_backward = transformer_xl(**broken)

    def project(x, memory, compressed, w_q, w_k, w_v):
        order = (memory, compressed) if memory_first else (compressed, memory)
        context = np.concatenate([*order, x], axis=-2)
        q, k, v = (np.einsum("btm,mhd->bhtd", rows, w) for rows, w in ((x, w_q), (context, w_k), (context, w_v)))
        return context, q, k, v

    def forward(x, memory, compressed, *, w_q, w_k, w_v, w_o, r, u, w, same_length=False, through_memory=False):
        _, q, k, v = project(x, memory, compressed, w_q, w_k, w_v)
        heads, lse = core(q, k, v, r=r, u=u, w=w, same_length=same_length)
        return np.einsum("bhqe,hem->bqm", heads, w_o), lse

    def backward(d_output, x, memory, compressed, *, w_q, w_k, w_v, w_o, r, u, w, same_length=False, through_memory=False,
                 d_lse=None):  # fmt: skip
        context, q, k, v = project(x, memory, compressed, w_q, w_k, w_v)
        heads, _ = core(q, k, v, r=r, u=u, w=w, same_length=same_length)
        d_heads = np.einsum("bqm,hem->bhqe", d_output, w_o)
        g = core_backward(d_heads, q, k, v, d_lse=d_lse, r=r, u=u, w=w, same_length=same_length)
        rows = context
        if weights_detached:
            rows = context.copy()
            rows[:, : -x.shape[1]] = 0
        d_context = np.einsum("bhkd,mhd->bkm", g["k"], w_k) + np.einsum("bhke,mhe->bkm", g["v"], w_v)
        first, second = (memory, compressed) if memory_first else (compressed, memory)
        d_first, d_second, d_x = np.split(d_context, [first.shape[1], first.shape[1] + second.shape[1]], axis=1)
        d_memory, d_compressed = (d_first, d_second) if memory_first else (d_second, d_first)
        if not (through_memory or into_memory):
            d_memory, d_compressed = np.zeros_like(d_memory), np.zeros_like(d_compressed)
        return {
            "x": d_x + np.einsum("bhqd,mhd->bqm", g["q"], w_q), "memory": d_memory, "compressed": d_compressed,
            "w_q": np.einsum("bqm,bhqd->mhd", x, g["q"]), "w_k": np.einsum("bkm,bhkd->mhd", rows, g["k"]),
            "w_v": np.einsum("bkm,bhke->mhe", rows, g["v"]), "w_o": np.einsum("bhqe,bqm->hem", heads, d_output),
            "r": g["r"], "u": g["u"], "w": g["w"],
        }  # fmt: skip

    return forward, backward
