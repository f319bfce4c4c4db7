"""Talking-Heads attention block by block: projections over heads, and the two walks forward and backward.

Arrays of pairs are (b, n, a, c): batch, any kind of head, the block's queries and keys.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from refattn.arrays import device, namespace, real, to_namespace
from refattn.contraction import einsum
from refattn.core.blocks import Group, View, product, slice_blocks, whole_block
from refattn.core.options import Options
from refattn.core.selections import Span
from refattn.normalization import row_maximum
from refattn.records import Block

__all__ = ["Call", "Mix", "backward_group", "forward_group", "runs"]


@dataclasses.dataclass(frozen=True)
class Call:
    """Checked arguments with one batch axis: q, k (b|1,x,.,d), v (b|1,y,k,e), and the options of the softmax heads.

    Those hold the terms, what is visible and the blocks, with the h softmax heads as the query heads of one key head.
    """

    q: Any
    k: Any
    v: Any
    scale: Any
    logits: "Mix"
    weights: "Mix"
    options: Options
    backend: Any
    lead: tuple[int, ...]

    def unflattened(self, x: Any) -> Any:
        """(b, ...) -> (..., ...)."""
        return namespace(x).reshape(x, (*self.lead, *x.shape[1:]))


# ------------------------------------------------------------------------------------------------ projections over heads


class Mix:
    """One projection over the heads of every pair, n heads to m: the sum of a static and two dynamic parts.

    ``parts`` by name: ``*_projection`` (n, m), left out = identity; ``query_*`` (b|1,q,n,m); ``key_*`` (b|1,k,n,m).
    """

    def __init__(self, parts: dict[str, Any], heads: tuple[int, int]) -> None:
        self.parts, self.heads = parts, heads
        self.identity = not any(x.ndim == 2 for x in parts.values())
        self.finite = all(bool(namespace(x).all(namespace(x).isfinite(x))) for x in parts.values())

    def on(self, view: View) -> "Mixing":
        """This projection on the block of a view."""
        found = {}
        for name, x in self.parts.items():
            if x.ndim == 2:
                found["static"] = x
            else:
                by, run = ("query", view.queries) if name.startswith("query") else ("key", view.keys)
                found[by] = _batches(x, view.group)[:, run.start : run.stop, ...]
        return Mixing(found, self.heads, self.identity, self.finite)


@dataclasses.dataclass(frozen=True)
class Mixing:
    """A projection on one block: ``static`` (n, m), ``query`` (b|1, a, n, m), ``key`` (b|1, c, n, m)."""

    parts: dict[str, Any]
    heads: tuple[int, int]
    identity: bool
    finite: bool

    @property
    def turned(self) -> "Mixing":
        """The transposed projection, m heads to n."""
        parts = {n: namespace(x).matrix_transpose(x) for n, x in self.parts.items()}
        return Mixing(parts, self.heads[::-1], self.identity, self.finite)

    def apply(self, x: Any, visible: Any = None) -> Any:
        """(b, n, a, c) -> (b, m, a, c).  Without any part it is x itself.

        ``visible`` (b|1, n|1, a|1, c|1): pairs of x that are 0 because they are invisible, whatever their coefficients are.
        """
        if not self.parts:
            return x
        xp = namespace(x)
        if not (self.finite and bool(xp.all(xp.isfinite(x)))):
            return self._apply_where_not_zero(x, visible)
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

    def _apply_where_not_zero(self, x: Any, visible: Any) -> Any:
        """``apply`` for numbers that are not finite: neither a coefficient of 0 nor an invisible pair lets anything through."""
        xp = namespace(x)
        out: Any = 0.0
        for n in range(self.heads[0]):
            coefficient = self._coefficients(n, x)
            share = coefficient * x[:, n : n + 1, ...]
            through = coefficient != 0
            if visible is not None:
                through = through & (visible[:, n : n + 1, ...] if visible.shape[1] != 1 else visible)
            out = out + xp.where(through, share, xp.zeros_like(share))
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
        kept = {"static": "nm", "query": "...anm", "key": "...cnm"}
        if visible is None or bool(xp.all(xp.isfinite(x)) and xp.all(xp.isfinite(d))):
            return {n: einsum(f"...nac,...mac->{kept[n]}", x, d) for n in self.parts}
        shares = []
        for n in range(self.heads[0]):
            seen = visible[:, n : n + 1, ...] if side == "in" and visible.shape[1] != 1 else visible
            share = x[:, n : n + 1, ...] * d
            shares.append(xp.where(seen, share, xp.zeros_like(share)))
        share = xp.stack(shares, axis=1)
        return {n: einsum(f"...nmac->{kept[n]}", share) for n in self.parts}


def _batches(x: Any, group: Group) -> Any:
    return x if x.shape[0] == 1 else x[group.b, ...]


# ------------------------------------------------------------------------------------------------ one group of rows


def runs(settings: Any, group: Group, xp: Any, *, whole: bool = False) -> Iterator[tuple[Span, list[Block]]]:
    """The blocks of a group, run by run of queries; ``whole``: every pair in one block, invisible ones too."""
    blocks = (whole_block if whole else slice_blocks)(settings, group, xp)
    for _, run in itertools.groupby(blocks, key=lambda block: id(block.queries)):
        listed = list(run)
        yield listed[0].queries, listed


class _Logits:
    """Products and logits of the blocks of one run of queries."""

    def __init__(self, call: Call, view: View, q: Any, k: Any) -> None:
        self.call, self.view, self.q, self.k = call, view, q, k

    def __call__(self, block: Block) -> tuple[Any, Any, list[Any]]:
        """Products (b, x, a, c), logits (b, 1, h, a, c) before visibility, and what each term keeps for its backward."""
        view, xp = self.view, self.view.xp
        view.enter(block)
        keys = block.keys.take(self.k)
        products = einsum("...qd,...kd->...qk", self.q, keys, out=view.buffer("products", self.q, keys))
        logits = xp.expand_dims(self.call.logits.on(view).apply(products), axis=1)
        batches = view.group.b.stop - view.group.b.start
        if (
            logits.shape[0] != batches
        ):  # what follows may differ between batch entries that q, k and their projections share
            logits = xp.broadcast_to(logits, (batches, *logits.shape[1:])) + xp.zeros_like(logits)
        kept = []
        for term in view.problem.terms:
            logits, own = term.apply(logits, view)
            kept.append(own)
        return products, logits, kept


def forward_group(call: Call, group: Group, *, keep: bool) -> tuple[Any, Any, Any, list[Any]]:
    """Output (b, y, q, e), maximum and row sum (b, h, q) of the rows of a group; with ``keep`` their weights and logits."""
    backend, settings = call.backend, call.options.settings
    xp = backend.xp
    view = View(settings, group, backend, gradient=False)
    q, k, v = (_batches(x, group) for x in (call.q, call.k, call.v))
    start, stop = group.q
    b, h = group.b.stop - group.b.start, call.logits.heads[1]
    like = {"dtype": q.dtype, "device": device(q)}
    output = xp.zeros((b, v.shape[1], stop - start, v.shape[-1]), **like)
    maxima = xp.full((b, h, stop - start), -math.inf, dtype=real(q).dtype, device=device(q))
    sums = xp.zeros((b, h, stop - start), **like)
    kept: list[Any] = []

    for queries, blocks in runs(settings, group, xp, whole=keep):
        find = _Logits(call, view, queries.take(q) * call.scale, k)
        maximum: Any = None
        total: Any = None
        for block in blocks:  # first walk: maximum and sum of every softmax head
            _, logits, _ = find(block)
            seen = logits if view.visible is None else xp.where(view.visible, logits, xp.full_like(logits, -math.inf))
            top, shift = row_maximum(seen)
            if maximum is not None:
                top = xp.maximum(maximum, top)
                shift = xp.where(top == -math.inf, xp.zeros_like(top), top)
            row = xp.sum(backend.exp_into(seen - shift[..., None]), axis=-1)
            total = row if maximum is None else total * xp.exp(maximum - shift) + row
            maximum = top
        rows = Span(queries.start - start, queries.stop - start)
        maxima = rows.assign_last(backend, maxima, maximum[:, 0, ...])
        sums = rows.assign_last(backend, sums, total[:, 0, ...])
        factor = (1 / xp.where(maximum == -math.inf, xp.ones_like(total), total))[..., None]
        for block in blocks:  # second walk: the weights, mixed
            if len(blocks) > 1:
                _, logits, _ = find(block)
            weights = view.seen(backend.exp_into(logits - shift[..., None])) * factor
            dropped = view.dropout()
            weights = (weights if dropped is None else weights * dropped)[:, 0, ...]
            if keep:
                kept = [weights, _shown(view, logits)[:, 0, ...]]
            mixing = call.weights.on(view)
            part = _product(view, mixing, mixing.apply(weights, _heads(view.visible)), block.keys.take(v))
            output = rows.accumulate(backend, output, part)
    if keep and not kept:  # no rows or no keys
        kept = [xp.zeros((b, h, stop - start, k.shape[-2]), **like) for _ in range(2)]
    return output, maxima, sums, kept


def _shown(view: View, logits: Any) -> Any:
    """Logits as ``keep_weights`` shows them: -inf where a term hides the pair, and in padding."""
    xp, settings = view.xp, view.problem
    hidden = [] if view.hidden is None else [view.hidden]
    for lengths, positions in zip((settings.query_lengths, settings.key_lengths), view.positions(), strict=True):
        if lengths is not None:
            hidden.append(positions >= view.per_batch(lengths, 5))
    for where in hidden:
        logits = xp.where(where, xp.full_like(logits, -math.inf), logits)
    return logits


def _product(view: View, mixing: Mixing, mixed: Any, values: Any, *, transposed: bool = False) -> Any:
    """mixed (b, m, a, c) @ values, where only pairs that ``mixing`` lets through from a seeing softmax head count."""
    xp = view.xp
    visible = None
    if not bool(xp.all(xp.isfinite(values))):
        visible = mixing.reached(_heads(view.visible), mixed)
    return product(view.backend, mixed, values, visible, transposed=transposed)


def _heads(visible: Any) -> Any:
    """Visibility that broadcasts to (b, 1, h, a, c), as (b|1, h|1, a, c); None stays None."""
    if visible is None:
        return None
    if visible.ndim == 5:
        return visible[:, 0, ...]
    return namespace(visible).reshape(visible, (1,) * (4 - visible.ndim) + tuple(visible.shape))


def backward_group(call: Call, group: Group, shift: Any, factor: Any, d_lse: Any, d_output: Any) -> tuple[Any, Any]:
    """Cotangents by name of one group's rows, and those of the terms; the weights are exp(logits - ``shift``) ``factor``."""
    backend, settings = call.backend, call.options.settings
    xp = backend.xp
    view = View(settings, group, backend, gradient=True)
    q, k, v, shift, factor, d_output = (_batches(x, group) for x in (call.q, call.k, call.v, shift, factor, d_output))
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

    for queries, blocks in runs(settings, group, xp):
        rows = Span(queries.start - start, queries.stop - start)
        scaled = queries.take(q) * call.scale
        find = _Logits(call, view, scaled, k)
        top, inverse = (queries.take_last(x)[:, None, ..., None] for x in (shift, factor))
        d_o = queries.take(d_output)

        def weigh(
            block: Block, find: _Logits = find, top: Any = top, inverse: Any = inverse, d_o: Any = d_o
        ) -> tuple[Any, ...]:
            """What both walks need of a block: products, kept by terms, weights, dropped weights, d_mixed, d_weights."""
            products, logits, kept = find(block)
            weights = view.seen(backend.exp_into(logits - top)) * inverse
            mixing = call.weights.on(view)
            values = block.keys.take(v)
            d_mixed = einsum("...qe,...ke->...qk", d_o, values, out=view.buffer("d_mixed", d_o, values))
            d_weights = xp.expand_dims(mixing.turned.apply(d_mixed), axis=1)
            dropout = view.dropout()
            d_weights = view.seen(d_weights if dropout is None else d_weights * dropout)
            return products, kept, weights, weights if dropout is None else weights * dropout, d_mixed, d_weights

        centre: Any = 0.0 if d_lse is None else -queries.take_last(d_lse)[:, None, :, :, None]
        for block in blocks:  # first walk: row sums of weights times d_weights
            step = weigh(block)
            centre = centre + xp.sum(step[2] * step[-1], axis=-1, keepdims=True)
        for block in blocks:  # second walk: the gradients
            products, kept, weights, dropped, d_mixed, d_weights = weigh(block) if len(blocks) > 1 else step
            visible = _heads(view.visible)
            logits_mixing, mixing = call.logits.on(view), call.weights.on(view)
            dropped = dropped[:, 0, ...]
            d_v = _product(view, mixing, mixing.apply(dropped, visible), d_o, transposed=True)
            found["v"] = block.keys.accumulate(backend, found["v"], d_v)
            own = mixing.pull(dropped, d_mixed, visible, "in")
            _add(found, call.weights, own, rows, block.keys, backend)
            d_logits = view.seen(weights * (d_weights - centre))
            for term, kept_by_term in zip(reversed(settings.terms), reversed(kept), strict=True):
                d_logits = term.pull(d_logits, kept_by_term, view, sums)
            d_logits = d_logits[:, 0, ...]
            own = logits_mixing.pull(products, d_logits, visible, "out")
            _add(found, call.logits, own, rows, block.keys, backend)
            turned = logits_mixing.turned
            d_products = turned.apply(d_logits, visible)
            d_q = _product(view, turned, d_products, block.keys.take(k))
            found["q"] = rows.accumulate(backend, found["q"], d_q)
            d_k = _product(view, turned, d_products, scaled, transposed=True)
            found["k"] = block.keys.accumulate(backend, found["k"], d_k)
    d_q = found["q"]
    share = d_q * q[..., start:stop, :]
    found["scale"] = xp.sum(xp.where(d_q == 0, xp.zeros_like(share), share))
    found["q"] = d_q * call.scale
    return found, sums


def _add(found: dict[str, Any], mix: Mix, own: dict[str, Any], rows: Span, keys: Span, backend: Any) -> None:
    """Add a block's cotangents of the parts of a projection."""
    for name, x in mix.parts.items():
        if x.ndim == 2:
            found[name] = found[name] + own["static"]
            continue
        by, run = ("query", rows) if name.startswith("query") else ("key", keys)
        index = (slice(None), slice(run.start, run.stop), ...)
        found[name] = backend.accumulate(found[name], index, own[by])
