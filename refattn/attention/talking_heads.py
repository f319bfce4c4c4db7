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

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from refattn import cost as costs
from refattn.arrays import (
    broadcast_leading,
    device,
    flatten_leading,
    namespace,
    real,
    require_axes,
    to_namespace,
)
from refattn.contraction import einsum
from refattn.core import options
from refattn.core.blocks import KEYS, Group, View, groups, product, slice_blocks
from refattn.core.selections import Span
from refattn.mechanism import mechanism
from refattn.normalization import row_maximum
from refattn.records import AttentionSettings, Block, Counts, Elements, Pass, Result, Sizes

__all__ = ["talking_heads_attention"]

_SHARED = tuple(n for n in options.SHARED if n not in ("sinks", "lse_includes_sinks", "head_map"))
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
    xp, settings = backend.xp, call.options.settings
    b, h, n_q = settings.sizes.b, settings.sizes.h, settings.sizes.q
    lse = xp.full((b, h, n_q), -math.inf, dtype=q.dtype, device=device(q))
    output = xp.zeros((b, v.shape[-3], n_q, v.shape[-1]), dtype=q.dtype, device=device(q))
    kept = None
    if call.options.keep_weights:
        kept = [xp.zeros((b, h, n_q, k.shape[-2]), dtype=q.dtype, device=device(q)) for _ in range(2)]

    def run(group: Group) -> tuple[Any, ...]:
        with backend.quiet():
            return _forward_group(call, group, kept is not None)

    tasks = groups(settings)
    for group, (o, z, own) in zip(tasks, backend.map(run, tasks, work=3 * b * h * n_q * k.shape[-2]), strict=True):
        rows = (group.b, slice(None), slice(*group.q))
        output, lse = backend.assign(output, (*rows, slice(None)), o), backend.assign(lse, rows, z)
        if kept is not None:
            kept = [backend.assign(x, (*rows, slice(None)), part) for x, part in zip(kept, own, strict=True)]
    fields = {"output": call.unflattened(output), "lse": call.unflattened(lse)}
    if kept is not None:
        fields |= {"weights": call.unflattened(kept[0]), "logits": call.unflattened(kept[1])}
    return Result(**fields), (call, lse)


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """Cotangents of q, k, v, the projections and the shared options.

    With U the projected weights: dU = d_output v^T, dV = U^T d_output, d_weights = dU W^T, and per softmax head
    d_logits = weights (d_weights - rowsum(weights d_weights) + d_lse), then the terms, d_products = d_logits L^T,
    dQ = scale d_products K, dK = scale d_products^T Q; dL = products d_logits and dW = weights dU, summed over what each part is
    shared by.
    """
    call, kept_lse = saved
    backend, settings = call.backend, call.options.settings
    xp, lead = backend.xp, call.lead
    b = settings.sizes.b
    y, e = call.v.shape[1], call.v.shape[-1]
    n_q = settings.sizes.q
    zeros = {"dtype": call.q.dtype, "device": device(call.q)}
    d_output = xp.zeros((b, y, n_q, e), **zeros) if output is None else flatten_leading(output, 3, lead)
    d_lse = None if lse is None else flatten_leading(lse, 2, lead)
    rows = (xp.where(real(kept_lse) == -math.inf, xp.zeros_like(kept_lse), kept_lse), d_lse, d_output)

    def run(group: Group) -> tuple[Any, ...]:
        with backend.quiet():
            return _backward_group(call, group, *rows)

    found = {n: xp.zeros((b, *x.shape[1:]), **zeros) for n, x in (("q", call.q), ("k", call.k), ("v", call.v))}
    for mix in (call.logits, call.weights):
        found |= {n: xp.zeros((b, *x.shape[1:]) if x.ndim > 2 else x.shape, **zeros) for n, x in mix.parts.items()}
    found["scale"] = xp.zeros((), **zeros)
    for term in settings.terms:
        found |= term.whole()
    tasks = groups(settings)
    work = 8 * b * call.logits.heads[1] * n_q * call.k.shape[-2]
    for group, (own, sums) in zip(tasks, backend.map(run, tasks, work=work), strict=True):
        view = View(settings, group, backend, gradient=True)
        for n, part in own.items():
            queries = slice(*group.q)
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


# ------------------------------------------------------------------------------------------------ the call


@dataclasses.dataclass(frozen=True)
class _Call:
    """Checked arguments with one batch axis: q, k (b|1,x,.,d), v (b|1,y,k,e), and the options of the softmax heads.

    Those hold the terms, what is visible and the blocks, with the h softmax heads as the query heads of one key head.
    """

    q: Any
    k: Any
    v: Any
    scale: Any
    logits: "_Mix"
    weights: "_Mix"
    options: options.Options
    backend: Any
    lead: tuple[int, ...]

    def unflattened(self, x: Any) -> Any:
        """(b, ...) -> (..., ...)."""
        return namespace(x).reshape(x, (*self.lead, *x.shape[1:]))


def _call(q: Any, k: Any, v: Any, parts: dict[str, Any], shared: Any, backend: Any, algorithm: str) -> _Call:
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
    logits = _Mix({n: flat[n] for n in ("logits_projection", "query_logits", "key_logits") if n in flat}, (x, h))
    weights = _Mix({n: flat[n] for n in ("weights_projection", "query_weights", "key_weights") if n in flat}, (h, y))
    return _Call(flat["q"], flat["k"], flat["v"], read.settings.scale, logits, weights, read, backend, lead)


# ------------------------------------------------------------------------------------------------ projections over heads


class _Mix:
    """One projection over the heads of every pair, n heads to m: the sum of a static and two dynamic parts.

    ``parts`` by name: ``*_projection`` (n, m), left out = identity; ``query_*`` (b|1,q,n,m); ``key_*`` (b|1,k,n,m).
    """

    def __init__(self, parts: dict[str, Any], heads: tuple[int, int]) -> None:
        self.parts, self.heads = parts, heads
        self.identity = not any(x.ndim == 2 for x in parts.values())

    def on(self, view: View) -> "_Mixing":
        """This projection on the block of a view."""
        found = {}
        for name, x in self.parts.items():
            if x.ndim == 2:
                found["static"] = x
            else:
                by, run = ("query", view.queries) if name.startswith("query") else ("key", view.keys)
                found[by] = _batches(x, view.group)[:, run.start : run.stop, ...]
        return _Mixing(found, self.heads, self.identity)


@dataclasses.dataclass(frozen=True)
class _Mixing:
    """A projection on one block: ``static`` (n, m), ``query`` (b|1, a, n, m), ``key`` (b|1, c, n, m)."""

    parts: dict[str, Any]
    heads: tuple[int, int]
    identity: bool

    @property
    def turned(self) -> "_Mixing":
        """The transposed projection, m heads to n."""
        parts = {n: namespace(x).matrix_transpose(x) for n, x in self.parts.items()}
        return _Mixing(parts, self.heads[::-1], self.identity)

    def apply(self, x: Any) -> Any:
        """(b, n, a, c) -> (b, m, a, c).  Without any part it is x itself."""
        if not self.parts:
            return x
        xp = namespace(x)
        if not bool(xp.all(xp.isfinite(x))):
            return self._apply_where_not_zero(x)
        out = x if self.identity else None
        specs = {"static": "...nac,nm->...mac", "query": "...nac,...anm->...mac", "key": "...nac,...cnm->...mac"}
        for name, part in self.parts.items():
            share = einsum(specs[name], x, part)
            out = share if out is None else out + share
        return out

    def _coefficients(self, n: int, like: Any) -> Any:
        """From head n to all m heads, (b|1, m, a|1, c|1)."""
        xp = namespace(like)
        total = xp.zeros((1, self.heads[1], 1, 1), dtype=like.dtype, device=device(like))
        if self.identity:
            one = np.arange(self.heads[1]).reshape(1, -1, 1, 1) == n
            total = total + to_namespace(one, xp, like=like, dtype=like.dtype)
        if "static" in self.parts:
            total = total + self.parts["static"][n, :][None, :, None, None]
        if "query" in self.parts:
            total = total + xp.matrix_transpose(self.parts["query"][:, :, n, :])[..., None]
        if "key" in self.parts:
            total = total + xp.matrix_transpose(self.parts["key"][:, :, n, :])[:, :, None, :]
        return total

    def _apply_where_not_zero(self, x: Any) -> Any:
        """``apply`` for values that are not finite: a coefficient of 0 lets nothing through."""
        xp = namespace(x)
        out: Any = 0.0
        for n in range(self.heads[0]):
            coefficient = self._coefficients(n, x)
            share = coefficient * x[:, n : n + 1, ...]
            out = out + xp.where(coefficient == 0, xp.zeros_like(share), share)
        return out

    def reached(self, visible: Any, like: Any) -> Any:
        """Pairs that reach each of the m heads, where ``visible`` (b|1, n|1, a|1, c|1) or None says what each of n sees."""
        xp = namespace(like)
        shape = (like.shape[0], self.heads[0], *like.shape[2:])
        visible = xp.broadcast_to(
            xp.ones((), dtype=xp.bool, device=device(like)) if visible is None else visible, shape
        )
        if not self.parts:
            return visible
        found = xp.zeros((like.shape[0], self.heads[1], *like.shape[2:]), dtype=xp.bool, device=device(like))
        for n in range(self.heads[0]):
            found = found | (visible[:, n : n + 1, ...] & (self._coefficients(n, like) != 0))
        return found

    def pull(self, x: Any, d: Any, visible: Any, side: str) -> dict[str, Any]:
        """Cotangents of the parts from x (b, n, a, c) and the cotangent d (b, m, a, c) of ``apply(x)``.

        ``visible`` is about the heads of x (``side="in"``) or of d (``side="out"``); an invisible pair gives nothing.
        """
        xp = namespace(x)
        kept = {"static": "nm", "query": "banm", "key": "bcnm"}
        if visible is None or bool(xp.all(xp.isfinite(x)) and xp.all(xp.isfinite(d))):
            return {n: einsum(f"bnac,bmac->{kept[n]}", x, d) for n in self.parts}
        shares = []
        for n in range(self.heads[0]):
            seen = visible[:, n : n + 1, ...] if side == "in" and visible.shape[1] != 1 else visible
            shares.append(xp.where(seen, x[:, n : n + 1, ...] * d, xp.zeros_like(d)))
        share = xp.stack(shares, axis=1)
        return {n: einsum(f"bnmac->{kept[n]}", share) for n in self.parts}


def _batches(x: Any, group: Group) -> Any:
    return x if x.shape[0] == 1 else x[group.b, ...]


# ------------------------------------------------------------------------------------------------ one group of rows


def _runs(settings: Any, group: Group, xp: Any) -> Iterator[tuple[Span, list[Block]]]:
    """The blocks of a group, run by run of queries."""
    for _, run in itertools.groupby(slice_blocks(settings, group, xp), key=lambda block: id(block.queries)):
        blocks = list(run)
        yield blocks[0].queries, blocks


class _Logits:
    """Products and logits of the blocks of one run of queries."""

    def __init__(self, call: _Call, view: View, q: Any, k: Any) -> None:
        self.call, self.view, self.q, self.k = call, view, q, k

    def __call__(self, block: Block) -> tuple[Any, Any, list[Any]]:
        """Products (b, x, a, c), logits (b, 1, h, a, c) before visibility, and what each term keeps for its backward."""
        view, backend = self.view, self.view.backend
        view.enter(block)
        keys = block.keys.take(self.k)
        products = backend.matmul(self.q, backend.xp.matrix_transpose(keys), view.scratch, "products")
        logits = backend.xp.expand_dims(self.call.logits.on(view).apply(products), axis=1)
        kept = []
        for term in view.problem.terms:
            logits, own = term.apply(logits, view)
            kept.append(own)
        return products, logits, kept


def _forward_group(call: _Call, group: Group, keep: bool) -> tuple[Any, Any, Any]:
    """Output (b, y, q, e) and lse (b, h, q) of the rows of a group; with ``keep`` also their weights and logits."""
    backend, settings = call.backend, call.options.settings
    xp = backend.xp
    view = View(settings, group, backend, gradient=False)
    q, k, v = (_batches(x, group) for x in (call.q, call.k, call.v))
    start, stop = group.q
    b, h, y = group.b.stop - group.b.start, call.logits.heads[1], v.shape[1]
    like = {"dtype": q.dtype, "device": device(q)}
    output = xp.zeros((b, y, stop - start, v.shape[-1]), **like)
    lse = xp.full((b, h, stop - start), -math.inf, **like)
    kept = [xp.zeros((b, h, stop - start, k.shape[-2]), **like) for _ in range(2)] if keep else None

    for queries, blocks in _runs(settings, group, xp):
        find = _Logits(call, view, queries.take(q) * call.scale, k)
        maximum = total = None
        for block in blocks:  # first walk: the lse of every softmax head
            _, logits, _ = find(block)
            seen = logits if view.visible is None else xp.where(view.visible, logits, xp.full_like(logits, -math.inf))
            top, shift = row_maximum(seen)
            if maximum is not None:
                top = xp.maximum(maximum, top)
                shift = xp.where(top == -math.inf, xp.zeros_like(top), top)
            row = xp.sum(backend.exp_into(seen - shift[..., None]), axis=-1)
            total = row if maximum is None else total * xp.exp(maximum - shift) + row
            maximum = top
        empty = maximum == -math.inf
        safe = xp.where(empty, xp.zeros_like(total), xp.log(xp.where(empty, xp.ones_like(total), total)) + shift)
        rows = Span(queries.start - start, queries.stop - start)
        lse = rows.assign_last(backend, lse, xp.where(empty, xp.full_like(safe, -math.inf), safe)[:, 0, ...])
        for block in blocks:  # second walk: the weights, mixed
            if len(blocks) > 1:
                _, logits, _ = find(block)
            weights = view.seen(backend.exp_into(logits - safe[..., None]))
            factor = view.dropout()
            weights = (weights if factor is None else weights * factor)[:, 0, ...]
            if kept is not None:
                index = (..., slice(rows.start, rows.stop), slice(block.keys.start, block.keys.stop))
                parts = (weights, logits[:, 0, ...])
                kept = [backend.assign(x, index, part) for x, part in zip(kept, parts, strict=True)]
            mixing = call.weights.on(view)
            part = _product(view, mixing, mixing.apply(weights), block.keys.take(v))
            output = rows.accumulate(backend, output, part)
    return output, lse, kept


def _product(view: View, mixing: _Mixing, mixed: Any, values: Any, *, transposed: bool = False) -> Any:
    """mixed (b, m, a, c) @ values, where only pairs that ``mixing`` lets through from a seeing softmax head count."""
    xp = view.xp
    visible = None
    if not bool(xp.all(xp.isfinite(values))):
        visible = mixing.reached(None if view.visible is None else _heads(view.visible), mixed)
    return product(view.backend, mixed, values, visible, transposed=transposed)


def _heads(visible: Any) -> Any:
    """Visibility that broadcasts to (b, 1, h, a, c), as (b|1, h|1, a, c)."""
    if visible.ndim == 5:
        return visible[:, 0, ...]
    return namespace(visible).reshape(visible, (1,) * (4 - visible.ndim) + tuple(visible.shape))


def _backward_group(call: _Call, group: Group, lse: Any, d_lse: Any, d_output: Any) -> tuple[Any, Any]:
    """Cotangents by name of one group's rows, and those of the terms; ``lse`` is finite."""
    backend, settings = call.backend, call.options.settings
    xp = backend.xp
    view = View(settings, group, backend, gradient=True)
    q, k, v, lse, d_output = (_batches(x, group) for x in (call.q, call.k, call.v, lse, d_output))
    d_lse = None if d_lse is None else _batches(d_lse, group)
    start, stop = group.q
    b = group.b.stop - group.b.start
    like = {"dtype": q.dtype, "device": device(q)}
    lengths = {"q": stop - start, "query_logits": stop - start, "query_weights": stop - start}
    found = {
        "q": xp.zeros((b, q.shape[1], lengths["q"], q.shape[-1]), **like),
        "k": xp.zeros((b, *k.shape[1:]), **like),
        "v": xp.zeros((b, *v.shape[1:]), **like),
    }
    for mix in (call.logits, call.weights):
        for n, x in mix.parts.items():
            shape = x.shape if x.ndim == 2 else (b, lengths.get(n, x.shape[1]), *x.shape[2:])
            found[n] = xp.zeros(shape, **like)
    sums: dict[str, Any] = {}
    for term in settings.terms:
        sums |= term.start(view)

    for queries, blocks in _runs(settings, group, xp):
        rows = Span(queries.start - start, queries.stop - start)
        scaled = queries.take(q) * call.scale
        find = _Logits(call, view, scaled, k)
        z = queries.take_last(lse)[:, None, ..., None]
        d_o = queries.take(d_output)

        def weigh(block: Block, find: _Logits = find, z: Any = z, d_o: Any = d_o) -> tuple[Any, ...]:
            """What both walks need of a block: products, kept by terms, weights, projected cotangent, d_weights."""
            products, logits, kept = find(block)
            weights = view.seen(backend.exp_into(logits - z))
            mixing = call.weights.on(view)
            d_mixed = backend.matmul(d_o, xp.matrix_transpose(block.keys.take(v)), view.scratch, "d_mixed")
            d_weights = xp.expand_dims(mixing.turned.apply(d_mixed), axis=1)
            factor = view.dropout()
            d_weights = view.seen(d_weights if factor is None else d_weights * factor)
            return products, kept, weights, weights if factor is None else weights * factor, d_mixed, d_weights

        shift: Any = 0.0 if d_lse is None else -queries.take_last(d_lse)[:, None, :, :, None]
        for block in blocks:  # first walk: row sums of weights times d_weights
            step = weigh(block)
            shift = shift + xp.sum(step[2] * step[-1], axis=-1, keepdims=True)
        for block in blocks:  # second walk: the gradients
            products, kept, weights, dropped, d_mixed, d_weights = weigh(block) if len(blocks) > 1 else step
            visible = None if view.visible is None else _heads(view.visible)
            logits_mixing, mixing = call.logits.on(view), call.weights.on(view)
            dropped = dropped[:, 0, ...]
            d_v = _product(view, mixing, mixing.apply(dropped), d_o, transposed=True)
            found["v"] = block.keys.accumulate(backend, found["v"], d_v)
            own = mixing.pull(dropped, d_mixed, visible, "in")
            _add(found, call.weights, own, rows, block.keys, backend)
            d_logits = view.seen(weights * (d_weights - shift))
            for term, kept_by_term in zip(reversed(settings.terms), reversed(kept), strict=True):
                d_logits = term.pull(d_logits, kept_by_term, view, sums)
            d_logits = d_logits[:, 0, ...]
            own = logits_mixing.pull(products, d_logits, visible, "out")
            _add(found, call.logits, own, rows, block.keys, backend)
            turned = logits_mixing.turned
            d_products = turned.apply(d_logits)
            d_q = _product(view, turned, d_products, block.keys.take(k))
            found["q"] = rows.accumulate(backend, found["q"], d_q)
            d_k = _product(view, turned, d_products, scaled, transposed=True)
            found["k"] = block.keys.accumulate(backend, found["k"], d_k)
    d_q = found["q"]
    own_q = q[..., start:stop, :]
    found["scale"] = xp.sum(xp.where(d_q == 0, xp.zeros_like(d_q), d_q * own_q))
    found["q"] = d_q * call.scale
    return found, sums


def _add(found: dict[str, Any], mix: _Mix, own: dict[str, Any], rows: Span, keys: Span, backend: Any) -> None:
    """Add a block's cotangents of the parts of a projection."""
    for name, x in mix.parts.items():
        if x.ndim == 2:
            found[name] = found[name] + own["static"]
            continue
        by, run = ("query", rows) if name.startswith("query") else ("key", keys)
        index = (slice(None), slice(run.start, run.stop), ...)
        found[name] = backend.accumulate(found[name], index, own[by])


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
        for queries, blocks in _runs(settings, group, np):
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
