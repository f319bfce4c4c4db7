"""Independent kernels of multi-head and Talking-Heads attention for the verifier's tests: right ones, and ways to break them.

Nothing here comes from refattn.  Whole matrices, one batch axis.
"""

import numpy as np

SHARED = ("mask", "bias", "scale", "causal")
PROJECTIONS = tuple(f"{kind}_{n}" for kind in "wb" for n in "qkvo")
MULTI_HEAD = (*PROJECTIONS, "extra_key", "extra_value", "zero_attention", *SHARED)
TALKING = (
    "logits_projection",
    "weights_projection",
    "query_logits",
    "key_logits",
    "query_weights",
    "key_weights",
    *SHARED,
)


def seen_and_bias(shape, mask, bias, causal):
    n_q, n_k = shape[-2:]
    seen = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape).copy()
    if causal:
        seen &= np.arange(n_k) <= np.arange(n_q)[:, None] + n_k - n_q
    if bias is None:
        return seen, np.zeros(shape)
    full = np.broadcast_to(bias, shape)
    return seen & ~np.isneginf(full), np.where(np.isneginf(full), 0, full)


def softmax(logits, seen):
    s = np.where(seen, logits, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, np.log(total) + top, -np.inf)[..., 0]
    return e / np.where(total > 0, total, 1), lse


def clean(x):
    return np.where(np.isfinite(x) & (np.abs(x) < 1e29), x, 0)


def onto(x, shape):
    while x.ndim > len(shape):
        x = x.sum(0)
    return x.sum(tuple(n for n, size in enumerate(shape) if size == 1), keepdims=True).reshape(shape)


def multi_head(*, extra_hidden=False, one_role=False, no_b_v=False):
    def run(x_q, x_k, x_v, o):
        f = x_q.dtype.type
        x = {"q": x_q, "k": x_q if x_k is None else x_k}
        x["v"] = x["k"] if x_v is None else x_v
        p = {n: np.einsum("btm,mhd->bhtd", x[n], o[f"w_{n}"]) for n in "qkv"}
        for n in "qkv":
            if o.get(f"b_{n}") is not None and not (no_b_v and n == "v"):
                p[n] = p[n] + o[f"b_{n}"][:, None]
        b, g, n_k = p["k"].shape[:3]
        h = p["q"].shape[1]
        seen, bias = seen_and_bias((b, h, p["q"].shape[2], n_k), o.get("mask"), o.get("bias"), o.get("causal"))
        rows = [] if o.get("extra_key") is None else [(o["extra_key"], o["extra_value"])]
        if o.get("zero_attention"):
            rows.append((np.zeros((g, p["k"].shape[-1])), np.zeros((g, p["v"].shape[-1]))))
        for row in rows:
            for n, r in zip("kv", row, strict=True):
                p[n] = np.concatenate(
                    [p[n], np.broadcast_to(r[:, None], (b, g, 1, r.shape[-1])).astype(p[n].dtype)], axis=2
                )
            last = seen[..., n_k - 1 : n_k] if extra_hidden else np.ones((*seen.shape[:-1], 1), bool)
            seen, bias = np.concatenate([seen, last], -1), np.concatenate([bias, np.zeros((*bias.shape[:-1], 1))], -1)
        scale = f(p["q"].shape[-1] ** -0.5 if o.get("scale") is None else o["scale"])
        keys, values = (np.repeat(p[n], h // g, axis=1) for n in "kv")
        dot = p["q"] @ keys.swapaxes(-1, -2)
        weights, lse = softmax(scale * dot + bias.astype(f), seen)
        heads = weights @ values
        output = np.einsum("bhqe,hem->bqm", heads, o["w_o"])
        output = output if o.get("b_o") is None else output + o["b_o"]
        return output.astype(f), lse.astype(f), (x, p, n_k, scale, dot, keys, values, weights, heads)

    def forward(x_q, x_k=None, x_v=None, **o):
        output, lse, _ = run(x_q, x_k, x_v, o)
        return output, lse

    def backward(d_output, x_q, x_k=None, x_v=None, *, d_lse=None, **o):
        x, p, n_k, scale, dot, keys, values, weights, heads = run(x_q, x_k, x_v, o)[2]
        h, g = p["q"].shape[1], p["k"].shape[1]
        found = {"w_o": np.einsum("bhqe,bqm->hem", heads, d_output)}
        if o.get("b_o") is not None:
            found["b_o"] = d_output.sum((0, 1))
        d_heads = np.einsum("bqm,hem->bhqe", d_output, o["w_o"])
        d_weights = d_heads @ values.swapaxes(-1, -2)
        d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
        if d_lse is not None:
            d_logits = d_logits + weights * d_lse[..., None]

        def groups(y):
            return y.reshape(y.shape[0], g, h // g, *y.shape[2:]).sum(2)

        d = {
            "q": scale * d_logits @ keys,
            "k": groups(scale * d_logits.swapaxes(-1, -2) @ p["q"]),
            "v": groups(weights.swapaxes(-1, -2) @ d_heads),
        }
        if o.get("extra_key") is not None:
            found["extra_key"], found["extra_value"] = (d[n][:, :, n_k].sum(0) for n in "kv")
        roles = {"q": "x_q", "k": "x_q" if x_k is None else "x_k"}
        roles["v"] = roles["k"] if x_v is None else "x_v"
        for n in "qkv":
            own = d[n] if n == "q" else d[n][:, :, :n_k]
            found[f"w_{n}"] = np.einsum("btm,bhtd->mhd", x[n], own)
            if o.get(f"b_{n}") is not None:
                found[f"b_{n}"] = own.sum((0, 2))
            tokens = np.einsum("bhtd,mhd->btm", own, o[f"w_{n}"])
            found[roles[n]] = tokens + (0 if one_role else found.get(roles[n], 0))
        if o.get("bias") is not None:
            found["bias"] = onto(d_logits[..., :n_k], o["bias"].shape)
        if o.get("scale") is not None:
            found["scale"] = np.asarray((d_logits * dot).sum())
        return {n: np.asarray(y, x_q.dtype) for n, y in found.items()}

    return forward, backward


def talking(*, transposed=False, mask_before=False, row_term_of_output=False):
    def coefficients(static, by_query, by_key, n, m):
        total = np.eye(n, m)[None, :, :, None, None] if static is None else static[None, :, :, None, None]
        if by_query is not None:
            total = total + by_query.transpose(0, 2, 3, 1)[..., None]
        if by_key is not None:
            total = total + by_key.transpose(0, 2, 3, 1)[..., None, :]
        return total

    def run(q, k, v, o):
        f = q.dtype.type
        x, y = q.shape[1], v.shape[1]
        first = o.get("logits_projection")
        second = o.get("weights_projection")
        if transposed and second is not None and second.shape[0] == second.shape[1]:
            second = second.T
        h = x if first is None else first.shape[1]
        before = coefficients(first, o.get("query_logits"), o.get("key_logits"), x, h)
        behind = coefficients(second, o.get("query_weights"), o.get("key_weights"), h, y)
        scale = f(q.shape[-1] ** -0.5 if o.get("scale") is None else o["scale"])
        dot = q @ clean(k).swapaxes(-1, -2)
        products = scale * dot
        seen, bias = seen_and_bias((q.shape[0], h, *dot.shape[-2:]), o.get("mask"), o.get("bias"), o.get("causal"))
        heard = products
        if mask_before:
            heard = np.where(seen[:, :1], products, -1e9)
        logits = (heard[:, :, None] * before).sum(1) + bias
        weights, lse = softmax(logits, np.ones_like(seen) if mask_before else seen)
        mixed = (weights[:, :, None] * behind).sum(1)
        output = mixed @ clean(v)
        return output.astype(f), lse.astype(f), (before, behind, scale, dot, products, weights, mixed)

    def forward(q, k, v, **o):
        output, lse, _ = run(q, k, v, o)
        return output, lse

    def backward(d_output, q, k, v, *, d_lse=None, **o):
        output, _, (before, behind, scale, dot, products, weights, mixed) = run(q, k, v, o)
        d_mixed = d_output @ clean(v).swapaxes(-1, -2)
        d_weights = (d_mixed[:, None] * behind).sum(2)
        term = (weights * d_weights).sum(-1, keepdims=True)
        if row_term_of_output and weights.shape[1] == output.shape[1]:
            term = (d_output * output).sum(-1, keepdims=True)
        d_logits = weights * (d_weights - term)
        if d_lse is not None:
            d_logits = d_logits + weights * d_lse[..., None]
        d_products = (d_logits[:, None] * before).sum(2)
        found = {
            "q": scale * d_products @ clean(k),
            "k": scale * d_products.swapaxes(-1, -2) @ q,
            "v": mixed.swapaxes(-1, -2) @ d_output,
        }
        shares = {"logits": (products, d_logits), "weights": (weights, d_mixed)}
        for name, (left, right) in shares.items():
            for kind, spec in (("{}_projection", "nm"), ("query_{}", "bqnm"), ("key_{}", "bknm")):
                key = kind.format(name)
                if o.get(key) is not None:
                    found[key] = np.einsum(f"bnqk,bmqk->{spec}", left, right)
        if o.get("bias") is not None:
            found["bias"] = onto(d_logits, o["bias"].shape)
        if o.get("scale") is not None:
            found["scale"] = np.asarray((d_products * dot).sum())
        return {n: np.asarray(g, q.dtype) for n, g in found.items()}

    return forward, backward
