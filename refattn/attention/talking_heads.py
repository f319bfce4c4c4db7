r"""Talking-Heads attention: projections over the heads, of the logits before the softmax and of the weights behind it.

    products[x,q,k] = scale * sum_d q[x,q,d] k[x,k,d]
    logits[h,q,k]   = sum_x products[x,q,k] L[x,h](q,k)       then score_mod, softcap, bias, ALiBi, visibility
    weights[h,q,k]  = exp(logits[h,q,k] - lse[h,q])           then dropout
    output[y,q,e]   = sum_k (sum_h weights[h,q,k] W[h,y](q,k)) v[y,k,e]

    L(q,k) = logits_projection + query_logits[q] + key_logits[k],   W(q,k) = weights_projection + query_weights[q] + key_weights[k]

=======  ==========================================  =================================
letter   axis                                        where
=======  ==========================================  =================================
...      any batch axes, broadcast as in matmul      all
x, h, y  key head, softmax head, value head          q, k; lse; v, output
q, k     query position, key position                q, output, lse; k, v
d, e     query/key channel, value channel            q, k; v, output
=======  ==========================================  =================================

Conventions: a projection left out is the identity (to which dynamic parts are added); everything that is said about logits or
weights (mask, bias, cap, slopes, dropout, lse) is said of the softmax heads h, behind the projection of the logits, before that
of the weights.  Rows of the weights sum to 1, rows of their projection need not.  A pair reaches value head y where a softmax
head sees it whose coefficient W[h,y] is not 0, and a key head's product reaches softmax head h where L[x,h] is not 0: a NaN
goes exactly there.

The blocks are walked twice, forward and backward: mixing heads inside the softmax leaves no running output to rescale, and
the row sums of weights times their cotangents, which softmax attention reads off d_output and output, exist here only summed
over all heads.  The first walk gives the lse of every softmax head, or these row sums; memory stays linear in the length.

Source: Shazeer, Lan, Cheng, Ding, Hou 2020, "Talking-Heads Attention", arXiv:2003.02436 (with its dynamic projections).
"""

import math
from typing import Any

import numpy as np

from refattn import cost as costs
from refattn.arrays import broadcast_leading, device, flatten_leading, real, require_axes
from refattn.attention.blocks.talking_heads import Call, Mix, backward_group, forward_group, runs
from refattn.core import options
from refattn.core.blocks import KEYS, Group, View, groups
from refattn.core.listed import CHOICES
from refattn.mechanism import mechanism
from refattn.normalization import lse_of
from refattn.records import AttentionSettings, Counts, Elements, Pass, Result, Sizes

__all__ = ["talking_heads_attention"]

_SHARED = tuple(n for n in options.SHARED if n not in ("sinks", "lse_includes_sinks", "head_map", *CHOICES))
_PARTS = {
    "logits_projection": "x h", "query_logits": "... q x h", "key_logits": "... k x h",
    "weights_projection": "h y", "query_weights": "... q h y", "key_weights": "... k h y",
}  # fmt: skip


@options.takes(*_SHARED)
def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    logits_projection: Any = None,
    weights_projection: Any = None,
    query_logits: Any = None,
    key_logits: Any = None,
    query_weights: Any = None,
    key_weights: Any = None,
    backend: Any,
    algorithm: str,
    **shared: Any,
) -> tuple[Result, Any]:
    """Attention whose heads talk: logits and weights are projected over the heads.

    Parameters
    ----------
    q : array (..., x, q, d)
    k : array (..., x, k, d)
    v : array (..., y, k, e)
    logits_projection : array (x, h)
        Left out: the identity, with h = x.
    weights_projection : array (h, y)
        Left out: the identity, with y = h.
    query_logits, key_logits : arrays (..., q, x, h), (..., k, x, h)
        Dynamic parts of the projection of the logits, by query and by key, added to the static one.
    query_weights, key_weights : arrays (..., q, h, y), (..., k, h, y)
        Likewise for the weights.
    {shared}

    Returns
    -------
    output : array (..., y, q, e), in the dtype of the inputs
    lse : array (..., h, q), in the compute dtype

    Raises
    ------
    ValueError
        Shapes that disagree, head counts without a projection between them, a missing ``align``.
    TypeError
        Dtypes.

    Notes
    -----
    h is the softmax head in all shapes of the shared options.  ``weights`` and ``logits`` (``keep_weights``) are those of the
    softmax heads; ``weights`` are after dropout, before their projection.

    Examples
    --------
    Two heads; value head 0 takes the mean of both heads' weights, value head 1 their difference:

    >>> import numpy as np
    >>> q, k = np.zeros((2, 1, 1)), np.zeros((2, 2, 1))
    >>> v = np.array([[[2.0], [4.0]], [[2.0], [4.0]]])  # both value heads
    >>> seen = np.array([[[True, False]], [[True, True]]])  # softmax head 0 sees key 0 alone
    >>> mix = np.array([[0.5, 1.0], [0.5, -1.0]])
    >>> talking_heads_attention(q, k, v, weights_projection=mix, mask=seen)[:, 0, 0]  # weights (3/4, 1/4) and (1/2, -1/2)
    array([ 2.5, -1. ])
    """
    parts = {
        "logits_projection": logits_projection,
        "query_logits": query_logits,
        "key_logits": key_logits,
        "weights_projection": weights_projection,
        "query_weights": query_weights,
        "key_weights": key_weights,
    }
    if backend.fused:
        raise ValueError(
            f"backend {backend.name!r} does not serve talking_heads_attention: its kernels do not mix heads"
        )
    call = _call(q, k, v, parts, shared, backend, algorithm)
    sizes, xp = call.options.settings.sizes, backend.xp
    rows = (sizes.b, sizes.h, sizes.q)
    zeros = {"dtype": q.dtype, "device": device(q)}
    output = xp.zeros((sizes.b, v.shape[-3], sizes.q, v.shape[-1]), **zeros)
    maximum, row_sum = xp.full(rows, -math.inf, dtype=real(output).dtype, device=device(q)), xp.zeros(rows, **zeros)
    kept = [xp.zeros((*rows, sizes.k), **zeros) for _ in range(2)] if call.options.keep_weights else []

    def run(group: Group) -> tuple[Any, ...]:
        with backend.quiet():
            return forward_group(call, group, keep=bool(kept))

    tasks = groups(call.options.settings)
    for group, (o, top, total, own) in zip(
        tasks, backend.map(run, tasks, work=3 * math.prod(rows) * sizes.k), strict=True
    ):
        at = (group.b, slice(None), slice(*group.q))
        output, maximum = backend.assign(output, (*at, slice(None)), o), backend.assign(maximum, at, top)
        row_sum = backend.assign(row_sum, at, total)
        kept = [backend.assign(x, (*at, slice(None)), part) for x, part in zip(kept, own, strict=True)]
    fields = {"output": call.unflattened(output), "lse": call.unflattened(lse_of(maximum, row_sum))}
    fields |= {n: call.unflattened(x) for n, x in zip(("weights", "logits"), kept, strict=False)}
    return Result(**fields), (call, maximum, row_sum)


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """Cotangents of q, k, v, the projections and the shared options.

    With U the projected weights: dU = d_output v^T, dV = U^T d_output, d_weights = dU W^T, and per softmax head
    d_logits = weights (d_weights - rowsum(weights d_weights) + d_lse), then the terms, d_products = d_logits L^T,
    dQ = scale d_products K, dK = scale d_products^T Q; dL = products d_logits and dW = weights dU, summed over what each part is
    shared by.
    """
    call, maximum, row_sum = saved
    backend, settings = call.backend, call.options.settings
    xp, lead, sizes = backend.xp, call.lead, call.options.settings.sizes
    zeros = {"dtype": call.q.dtype, "device": device(call.q)}
    d_output = xp.zeros((sizes.b, call.v.shape[1], sizes.q, call.v.shape[-1]), **zeros)
    d_output = d_output if output is None else flatten_leading(output, 3, lead)
    d_lse = None if lse is None else flatten_leading(lse, 2, lead)
    empty = maximum == -math.inf
    shift = xp.where(empty, xp.zeros_like(maximum), maximum)
    factor = 1 / xp.where(empty, xp.ones_like(row_sum), row_sum)

    def run(group: Group) -> tuple[Any, ...]:
        with backend.quiet():
            return backward_group(call, group, shift, factor, d_lse, d_output)

    shapes = {n: (sizes.b, *x.shape[1:]) for n, x in (("q", call.q), ("k", call.k), ("v", call.v))}
    shapes |= {
        n: x.shape if x.ndim == 2 else (sizes.b, *x.shape[1:])
        for mix in (call.logits, call.weights)
        for n, x in mix.parts.items()
    }
    found = {n: xp.zeros(shape, **zeros) for n, shape in {**shapes, "scale": ()}.items()}
    for term in settings.terms:
        found |= term.whole()
    tasks = groups(settings)
    for group, (own, sums) in zip(
        tasks, backend.map(run, tasks, work=8 * math.prod(row_sum.shape) * sizes.k), strict=True
    ):
        view = View(settings, group, backend, gradient=True)
        queries = slice(*group.q)
        for n, part in own.items():
            where = {"q": (slice(None), queries), "query_logits": (queries,), "query_weights": (queries,)}.get(n, ())
            if found[n].ndim > 2:
                found[n] = backend.accumulate(found[n], (group.b, *where, ...), part)
            else:
                found[n] = found[n] + part
        for term in settings.terms:
            for n in term.names:
                found[n] = term.place(n, found[n], sums[n], view)
    own = {n: x for n, x in found.items() if n in ("q", "k", "v") or (n in _PARTS and x.ndim > 2)}
    return {**call.options.gradients(found), **{n: call.unflattened(x) for n, x in own.items()}}


def _call(q: Any, k: Any, v: Any, parts: dict[str, Any], shared: Any, backend: Any, algorithm: str) -> Call:
    given = {n: (x, _PARTS[n]) for n, x in parts.items() if x is not None}
    sizes = require_axes(q=(q, "... x q d"), k=(k, "... x k d"), v=(v, "... y k e"), **given)
    x, y = sizes["x"], sizes["y"]
    h = sizes.get("h", x)
    for name, heads in (("logits_projection", (x, h)), ("weights_projection", (h, y))):
        if parts[name] is None and heads[0] != heads[1]:
            raise ValueError(
                f"{name} is missing: it leads from {heads[0]} heads to {heads[1]} (q {tuple(q.shape)}, v {tuple(v.shape)}); left out it"
                " is the identity"
            )
    own = {"q": (q, 3), "k": (k, 3), "v": (v, 3), **{n: (p, 3) for n, (p, _) in given.items() if p.ndim > 2}}
    lead = broadcast_leading(**own)
    flat = {n: flatten_leading(array, 3, lead) for n, (array, _) in own.items()}
    flat |= {n: p for n, (p, _) in given.items() if p.ndim == 2}
    softmax = Sizes(lead=lead, h=h, g=1, q=sizes["q"], k=sizes["k"], d=sizes["d"], e=sizes["e"])
    read = options.read(softmax, xp=backend.xp, dtype=q.dtype, device=device(q), algorithm=algorithm, **shared)
    logits = Mix({n: flat[n] for n in ("logits_projection", "query_logits", "key_logits") if n in flat}, (x, h))
    weights = Mix({n: flat[n] for n in ("weights_projection", "query_weights", "key_weights") if n in flat}, (h, y))
    return Call(flat["q"], flat["k"], flat["v"], read.settings.scale, logits, weights, read, backend, lead)


# ------------------------------------------------------------------------------------------------ counts, example


def cost(
    *,
    b: int = 1,
    h: int,
    x: int | None = None,
    y: int | None = None,
    q: int,
    k: int,
    d: int,
    e: int | None = None,
    logits_projection: Any = True,
    weights_projection: Any = True,
    query_logits: Any = None,
    key_logits: Any = None,
    query_weights: Any = None,
    key_weights: Any = None,
    **settings: Any,
) -> Counts:
    """Counts of one call on q (b,x,q,d), k (b,x,k,d), v (b,y,k,e); x and y default to h, e to d.

    Both static projections are counted unless they are given as None; the dynamic parts where they are anything else.  A pair takes
    x d + y e multiply-adds for the products, x h for every part of the projection of the logits and h y for every part of that of
    the weights: with one part each and equal head counts, h / d more than attention without them.  ``computed_multiplies`` counts
    both walks: rows whose keys do not fit one block have their products and logits computed twice.
    """
    x, y, e = h if x is None else x, h if y is None else y, d if e is None else e
    costs.require_sizes(b=b, h=h, x=x, y=y, q=q, k=k, d=d, e=e)
    before = [logits_projection is not None, query_logits is not None, key_logits is not None]
    behind = [weights_projection is not None, query_weights is not None, key_weights is not None]
    n_before, n_behind = sum(before) * x * h, sum(behind) * h * y
    plan = costs.softmax_settings(b=b, h=h, g=1, q=q, k=k, **settings)
    visible = b * h * q * k if plan.visibility is None else plan.visibility.pairs(q, k, batch=b, heads=h)
    once, twice, largest = _walked(plan)

    logits, mixed = x * d + n_before, y * e + n_behind  # products and logits; projected weights and output
    again = logits + mixed  # logits, d_weights
    gradients = (n_behind + y * e) + n_behind + n_before + (n_before + 2 * x * d)  # dV, dW, dL, d_products and dQ, dK
    steps = 4 + sum(n for name, n in costs.TERM_STEPS.items() if settings.get(name) is not None)
    parts = x * h * before[0] + h * y * behind[0] + b * x * h * (q * before[1] + k * before[2])
    parts += b * h * y * (q * behind[1] + k * behind[2])
    inputs = Elements(storage=b * (x * q * d + x * k * d + y * k * e) + parts)
    results, lse = Elements(storage=b * y * q * e), Elements(compute=b * h * q)
    tile = Elements(compute=largest)
    return Counts(
        forward=Pass(
            multiplies=visible * (logits + mixed) // max(1, h),
            computed=once * (logits + mixed) + twice * (2 * logits + mixed),
            elementwise=visible * (steps + 2) + b * q * (x * d + y * e),
            read=inputs,
            written=results + lse,
            peak=results + lse + tile * (x + 2 * h + y),
        ),
        backward=Pass(
            multiplies=visible * (again + gradients) // max(1, h),
            computed=once * (again + gradients) + twice * (2 * again + gradients),
            elementwise=visible * (steps + 4) + 2 * b * q * x * d,
            read=inputs + 2 * results + lse,
            written=inputs,
            peak=inputs + tile * (2 * x + 3 * h + 2 * y),
        ),
        saved=inputs + lse,
        parameters=x * h * before[0] + h * y * behind[0],
    )


def _walked(settings: AttentionSettings) -> tuple[int, int, int]:
    """Pairs, of all softmax heads together, of runs in one block and of the others; and those of the largest block."""
    once = twice = largest = 0
    if settings.sizes.q * settings.sizes.k > costs.WALKED:
        rows, keys, _ = costs.rows_of_tiles(settings)
        pairs = rows * np.max(keys, axis=1)  # (b | 1, runs): a block holds all heads
        single = np.max(keys, axis=1) <= KEYS
        alike = settings.sizes.b // max(1, pairs.shape[0])
        once, twice = (alike * int(np.sum(pairs * side)) for side in (single, ~single))
        return once, twice, int(np.max(rows * np.minimum(keys, KEYS), initial=0))
    for times, group in costs.distinct_groups(settings):
        units = times * (group.b.stop - group.b.start)
        for queries, blocks in runs(settings, group, np):
            pairs = [(queries.stop - queries.start) * (n.keys.stop - n.keys.start) for n in blocks]
            once, twice = once + units * sum(pairs) * (len(blocks) == 1), twice + units * sum(pairs) * (len(blocks) > 1)
            largest = max(largest, units // times * max(pairs))
    return once, twice, largest


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    x: int | None = None,
    y: int | None = None,
    q: int = 5,
    k: int = 7,
    d: int = 4,
    e: int = 6,
    **settings: Any,
) -> dict[str, Any]:
    """Normal q (b,x,q,d), k (b,x,k,d), v (b,y,k,e) and static projections; x and y default to h.

    A part of the projections asked for by True is drawn (``query_logits=True``), by None left out.
    """
    x, y = h if x is None else x, h if y is None else y
    found = {
        n: rng.standard_normal(shape) for n, shape in (("q", (b, x, q, d)), ("k", (b, x, k, d)), ("v", (b, y, k, e)))
    }
    shapes = {"logits_projection": (x, h), "query_logits": (b, q, x, h), "key_logits": (b, k, x, h)}
    shapes |= {"weights_projection": (h, y), "query_weights": (b, q, h, y), "key_weights": (b, k, h, y)}
    for name, shape in shapes.items():
        static = name.endswith("projection")
        asked = settings.pop(name, True if static else None)
        if asked is True:
            asked = rng.standard_normal(shape) * (max(1, shape[0]) ** -0.5 if static else 0.3)
        if asked is not None:
            found[name] = asked
    return {**found, **settings}


_DYNAMIC = {n: True for n in _PARTS if not n.endswith("projection")}
_PROBES = (
    {"h": 5, "q": 9, "k": 13, "d": 6, "e": 4, "says": "as many key heads and value heads as softmax heads"},
    {"h": 5, "q": 9, "k": 9, "d": 6, "e": 4, "causal": True, "says": "equal head counts, causal"},
    {"h": 5, "q": 9, "k": 13, "d": 6, "e": 4, **_DYNAMIC, "says": "equal head counts, dynamic parts"},
    {"h": 5, "x": 3, "y": 4, "q": 9, "k": 13, "d": 6, "e": 4, **_DYNAMIC, "says": "three head counts, dynamic parts"},
    {"h": 5, "q": 9, "k": 13, "d": 6, "e": 4, "logits_projection": None, "says": "only the weights are projected"},
    {"h": 5, "q": 9, "k": 13, "d": 6, "e": 4, "weights_projection": None, "says": "only the logits are projected"},
)

talking_heads_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="talking_heads_attention",
    differentiable=("q", "k", "v", *_PARTS, *(n for n in options.DIFFERENTIABLE if n != "sinks")),
    outputs=("output", "lse"),
    probes=_PROBES,
)
