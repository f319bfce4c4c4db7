"""A kernel of the Synthesizer in NumPy alone, and ways to break it."""

import numpy as np


def kernels(*, exchanged=False, plain_shares=False, fixed_tables=False):
    """Forward and backward; each flag breaks one step."""

    def affine(x, w, b):
        y = np.einsum("bhqi,hio->bhqo", x, w)
        return y if b is None else y + b[None, :, None]

    def steps(x, v, o):
        """Every part's logits with what made them, the shares, and the weights."""
        parts, before, left, right = {}, None, None, None
        if o.get("w_1") is not None:
            before = affine(np.broadcast_to(x[:, None], (len(x), v.shape[1], *x.shape[1:])), o["w_1"], o.get("b_1"))
            hidden = np.maximum(before, 0)
        if o.get("w_2") is not None:
            parts["dense"] = affine(hidden, o["w_2"], o.get("b_2"))
        if o.get("w_a") is not None:
            left, right = affine(hidden, o["w_a"], o.get("b_a")), affine(hidden, o["w_b"], o.get("b_b"))
            spec = "bhqn,bhqp->bhqpn" if exchanged else "bhqn,bhqp->bhqnp"
            parts["factors"] = np.einsum(spec, left, right).reshape(*left.shape[:-1], -1)
        if o.get("random") is not None:
            parts["random"] = o["random"][None]
        if o.get("random_1") is not None:
            parts["ranked"] = np.einsum("hqr,hkr->hqk", o["random_1"], o["random_2"])[None]
        if o.get("other_logits") is not None:
            parts["others"] = o["other_logits"]
        mixture = o.get("mixture")
        shares = np.ones((1, 1), v.dtype) if mixture is None else np.atleast_2d(mixture)
        if mixture is not None and not plain_shares:
            shares = np.exp(shares - shares.max(-1, keepdims=True))
            shares = shares / shares.sum(-1, keepdims=True)
        logits = sum(shares[:, s, None, None] * part for s, part in enumerate(parts.values()))
        if o.get("causal"):
            logits = np.where(np.tri(*logits.shape[-2:], dtype=bool), logits, -np.inf)
        e = np.exp(logits - logits.max(-1, keepdims=True))
        weights = np.broadcast_to(e / e.sum(-1, keepdims=True), (*v.shape[:2], *logits.shape[-2:]))
        return parts, before, left, right, shares, weights

    def forward(x, v, **o):
        return steps(x, v, o)[-1] @ v

    def backward(d_output, x, v, **o):
        parts, before, left, right, shares, weights = steps(x, v, o)
        found = {"v": weights.swapaxes(-1, -2) @ d_output}
        d_p = d_output @ v.swapaxes(-1, -2)
        d_s = weights * (d_p - (weights * d_p).sum(-1, keepdims=True))
        d = {name: shares[:, s, None, None] * d_s for s, name in enumerate(parts)}
        if o.get("mixture") is not None:
            d_shares = np.stack([(d_s * part).sum((0, -1, -2)) for part in parts.values()], -1)
            inner = (shares * d_shares).sum(-1, keepdims=True)
            d_mixture = d_shares if plain_shares else shares * (d_shares - inner)
            found["mixture"] = d_mixture if o["mixture"].ndim == 2 else d_mixture.sum(0)

        def through(y, d_y, weight, bias):
            found[weight] = np.einsum("bhqi,bhqo->hio", y, d_y)
            if o.get(bias) is not None:
                found[bias] = d_y.sum((0, 2))
            return np.einsum("bhqo,hio->bhqi", d_y, o[weight])

        d_hidden = 0
        if "dense" in d:
            d_hidden = through(np.maximum(before, 0), d["dense"], "w_2", "b_2")
        if "factors" in d:
            n, p = left.shape[-1], right.shape[-1]
            shape = (*left.shape[:-1], p, n) if exchanged else (*left.shape[:-1], n, p)
            d_outer = d["factors"].reshape(shape)
            d_outer = d_outer.swapaxes(-1, -2) if exchanged else d_outer
            d_left, d_right = (d_outer @ right[..., None])[..., 0], (left[..., None, :] @ d_outer)[..., 0, :]
            d_hidden = d_hidden + through(np.maximum(before, 0), d_left, "w_a", "b_a")
            d_hidden = d_hidden + through(np.maximum(before, 0), d_right, "w_b", "b_b")
        if before is not None:
            tokens = np.broadcast_to(x[:, None], (len(x), v.shape[1], *x.shape[1:]))
            found["x"] = through(tokens, d_hidden * (before > 0), "w_1", "b_1").sum(1)
        if "random" in d:
            found["random"] = d["random"].sum(0) * (not fixed_tables)
        if "ranked" in d:
            table = d["ranked"].sum(0) * (not fixed_tables)
            found["random_1"] = table @ o["random_2"]
            found["random_2"] = table.swapaxes(-1, -2) @ o["random_1"]
        if "others" in d:
            found["other_logits"] = d["others"]
        return found

    return forward, backward
