"""Independent kernels of Sparse Transformer, local and top-k attention for the verifier's tests: right ones, broken ones.

Nothing here comes from refattn.  Each keeps the sets of keys as one bool array and works on whole matrices.
"""

import numpy as np

OWN = {
    "sparse_transformer_attention": ("pattern", "stride", "summary", "summary_offsets", "heads", "layer", "variant"),
    "local_attention": ("block", "look_backward", "look_forward", "exact"),
    "topk_attention": ("count", "indices"),
}
"""Options that are the mechanism's own; all kernels have mask, bias, scale and causal besides."""


def in_order(q, k):
    """q k^T with the channels added up in one order, so that equal keys have equal products bit for bit."""
    total = 0
    for c in range(q.shape[-1]):
        total = total + q[..., :, None, c] * k[..., None, :, c]
    return total + np.zeros((q.shape[-2], k.shape[-2]), q.dtype)


def softmax_over(choose, *, dot=None, after=None, unmasked_backward=False):
    """Forward and backward of attention over the pairs that ``choose(q, k, logits, seen, options)`` keeps."""

    def prepare(q, k, mask, bias, scale, causal, options):
        f = q.dtype.type
        r = q.shape[-3] // k.shape[-3]
        keys = np.repeat(k, r, axis=-3)
        factor = f(q.shape[-1] ** -0.5 if scale is None else scale)
        finite = np.where(np.isfinite(keys), keys, 0)
        logits = factor * (q @ finite.swapaxes(-1, -2) if dot is None else dot(q, finite))
        n_q, n_k = logits.shape[-2:]
        seen = np.ones(logits.shape, bool)
        if mask is not None:
            seen &= mask
        if causal:
            seen &= np.arange(n_k) <= np.arange(n_q)[:, None] + n_k - n_q
        if bias is not None:
            logits = logits + bias
            seen &= ~np.isneginf(bias)
        return logits, choose(q, k, logits, seen, options), keys, factor, r

    def weights_of(logits, seen):
        s = np.where(seen, logits, -np.inf)
        top = s.max(-1, keepdims=True, initial=-np.inf)
        top = np.where(np.isfinite(top), top, 0)
        e = np.exp(s - top)
        total = e.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = np.where(total > 0, np.log(total) + top, -np.inf)[..., 0]
        return (e / np.where(total > 0, total, 1)).astype(logits.dtype), lse.astype(logits.dtype)

    def clean(x):
        return np.where(np.isfinite(x) & (np.abs(x) < 1e29), x, 0)

    def forward(q, k, v, *, mask=None, bias=None, scale=None, causal=False, **options):
        logits, seen, _, _, r = prepare(q, k, mask, bias, scale, causal, options)
        weights, lse = weights_of(logits, seen)
        values = clean(np.repeat(v, r, axis=-3))
        if after is not None:
            mixed = after(logits, seen, values, options)
            return (weights @ values if mixed is None else mixed), lse
        return weights @ values, lse

    def backward(d_output, q, k, v, *, d_lse=None, mask=None, bias=None, scale=None, causal=False, **options):
        logits, seen, keys, factor, r = prepare(q, k, mask, bias, scale, causal, options)
        weights, _ = weights_of(logits, np.ones_like(seen) if unmasked_backward else seen)
        values = np.repeat(v, r, axis=-3)
        d_weights = d_output @ clean(values).swapaxes(-1, -2)
        d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
        if d_lse is not None:
            d_logits = d_logits + weights * d_lse[..., None]

        def groups(x):
            return x.reshape(*x.shape[:-3], k.shape[-3], r, *x.shape[-2:]).sum(-3)

        found = {
            "q": factor * (d_logits @ clean(keys)),
            "k": groups(factor * (d_logits.swapaxes(-1, -2) @ q)),
            "v": groups(weights.swapaxes(-1, -2) @ d_output),
        }
        if bias is not None:
            d = d_logits
            while d.ndim > bias.ndim:
                d = d.sum(0)
            found["bias"] = d.sum(tuple(n for n, size in enumerate(bias.shape) if size == 1), keepdims=True).reshape(
                bias.shape
            )
        if scale is not None:
            found["scale"] = np.asarray(
                (d_logits * np.where(seen, logits - bias if bias is not None else logits, 0)).sum() / factor, q.dtype
            )
        return found

    return forward, backward


# ---------------------------------------------------------------------- Sparse Transformer


def sparse(*, off_by_one=False, first_columns=False, mean=False, **broken):
    def part(n, h, heads, layer):
        if heads == "split":
            return "first" if n < (h + 1) // 2 else "second"
        return ("first", "second")[layer % 2] if heads == "interleaved" else heads

    def sets(t, h, which, options):
        stride, kind = options["stride"], options.get("pattern", "strided")
        gap = np.subtract.outer(np.arange(t), np.arange(t))
        j = np.arange(t)
        offsets = options.get("summary_offsets")
        found = []
        for n in range(h):
            mine = which or part(n, h, options.get("heads", "split"), options.get("layer"))
            if kind == "strided":
                limit = stride - 1 if options.get("variant") == "code" else stride
                near, far = gap <= limit - off_by_one, gap % stride == 0
            else:
                summary = options["summary"]
                offset = 0 if offsets is None else int(np.broadcast_to(offsets, (h,))[n])
                start = offset if first_columns else stride - offset - summary
                near = j // stride == (j // stride)[:, None]
                far = np.broadcast_to((j % stride >= start) & (j % stride < start + summary), gap.shape)
            pairs = {"first": near, "second": far, "merged": near | far}[mine]
            found.append(pairs & (gap >= 0))
        return np.stack(found)

    def choose(q, k, logits, seen, options):
        return seen & sets(q.shape[-2], q.shape[-3], None, options)

    def average(logits, seen, values, options):
        """Two softmaxes and their mean, where one over the union is due."""
        if not mean or options.get("heads") != "merged":
            return None
        output = 0
        for which in ("first", "second"):
            pairs = seen & sets(logits.shape[-1], logits.shape[-3], which, options)
            s = np.where(pairs, logits, -np.inf)
            top = s.max(-1, keepdims=True)
            e = np.exp(s - np.where(np.isfinite(top), top, 0))
            total = e.sum(-1, keepdims=True)
            output = output + (e / np.where(total > 0, total, 1)).astype(logits.dtype) @ values / 2
        return output.astype(logits.dtype)

    return softmax_over(choose, after=average if mean else None, **broken)


# ---------------------------------------------------------------------- local


def local(*, wraps=False, one_more=False, **broken):
    def choose(q, k, logits, seen, options):
        t, block = q.shape[-2], options["block"]
        behind, ahead = options.get("look_backward", 1), options.get("look_forward", 0)
        places = np.arange(t)
        if options.get("exact"):
            gap = places[:, None] - places
            return seen & (gap <= behind * block + one_more) & (gap >= -ahead * block)
        n = places // block
        gap = n[:, None] - n
        if wraps:
            count = -(-t // block)
            return seen & ((gap % count <= behind) | (-gap % count <= ahead))
        return seen & (gap <= behind + one_more) & (gap >= -ahead)

    return softmax_over(choose, **broken)


# ---------------------------------------------------------------------- top-k


def topk(*, one_more=False, before_mask=False, ties_up=False, **broken):
    def choose(q, k, logits, seen, options):
        n_k = logits.shape[-1]
        if options.get("indices") is not None:
            listed = (options["indices"][..., None] == np.arange(n_k)).any(-2)
            return seen & listed
        compared = np.where(np.ones_like(seen) if before_mask else seen, logits, -np.inf)
        count = min(options["count"] + one_more, n_k)
        if ties_up:
            order = n_k - 1 - np.argsort(-compared[..., ::-1], axis=-1, kind="stable")
        else:
            order = np.argsort(-compared, axis=-1, kind="stable")
        kept = np.zeros_like(seen)
        np.put_along_axis(kept, order[..., :count], True, axis=-1)
        return kept & seen

    return softmax_over(choose, dot=in_order, **broken)
