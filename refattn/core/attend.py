"""The core: softmax attention over a problem, whole or block by block in O(length) memory, forward and backward.

    logits = terms(scale q k^T) where visible        weights = exp(logits - lse)        output = weights v

Blocks come as a list: slices cut here from the problem's pattern, or gathered blocks given by a mechanism.  Each run of
blocks with the same queries is one online softmax; runs over the same query are merged by their lse.  A *group* is a range
of batches and key heads whose blocks are computed together: groups are the tasks of the backend's pool, and whatever they
share (gradients of bias, sinks, scale, of a key split over query ranges) is added in their order, so results do not depend
on the number of threads.

Masking selects, it never multiplies: a NaN or infinity behind a mask reaches nothing, forward or backward.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from refattn.arrays import device, namespace, real, to_namespace
from refattn.core.selections import Span, take_pairs
from refattn.core.terms import add_pairs
from refattn.normalization import row_maximum
from refattn.records import AttentionProblem, Block

__all__ = [
    "Forward",
    "Group",
    "View",
    "backward",
    "backward_group",
    "forward",
    "forward_group",
    "groups",
    "listed_blocks",
    "merged",
    "product",
    "rows_of_logits",
    "slice_blocks",
]

ROWS, KEYS = 256, 1024
"""Rows (query heads of one key head x queries) and keys of a tile: a few such tiles stay in a core's cache."""
SMALL = 1 << 18
"""Pairs up to which several (batch, key head) units share a block."""
SPLIT = 4
"""Query ranges into which a long problem of few units is cut, whatever the number of threads."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranges of batches, key heads and queries that are computed together."""

    b: slice
    g: slice
    q: tuple[int, int]
    heads: Any  # NumPy (ng, r): the caller's numbers of the query heads

    @property
    def batches(self) -> np.ndarray:
        return np.arange(self.b.start, self.b.stop)


class View:
    """A block of one group: what terms and mechanisms may ask about it."""

    def __init__(self, problem: AttentionProblem, group: Group, backend: Any, gradient: bool) -> None:
        self.problem, self.group, self.backend, self.gradient = problem, group, backend, gradient
        self.xp = backend.xp
        self.scratch: dict[str, Any] = {}  # buffers of this group's tiles
        self.queries: Any = None
        self.keys: Any = None
        self.visible: Any = None
        self.q: Any = None  # (b, g, r, [n,] a, d), times scale
        self.d_q: Any = None  # what terms add to the cotangent of q / scale

    def enter(self, block: Block) -> None:
        self.queries, self.keys = block.queries, block.keys
        self.visible = None if block.visible is None else block.visible()
        self.d_q = None

    # -------------------------------------------------------------- parts of arrays

    def slices(self, x: Any) -> tuple[slice, slice]:
        """Index of this group into an array (b|1, g|1, ...)."""
        whole = slice(0, 1)
        return whole if x.shape[0] == 1 else self.group.b, whole if x.shape[1] == 1 else self.group.g

    def own(self, x: Any) -> Any:
        """This group's part of an array (b|1, g|1, ...)."""
        return x[(*self.slices(x), ...)]

    def per_head(self, x: Any) -> Any:
        """Values (g, r) laid out to broadcast with the logits."""
        part = x[self.group.g, :]
        return self.xp.reshape(part, (1, *part.shape, *(1,) * self._tail()))

    def per_batch(self, x: Any, ndim: int) -> Any:
        """Host values (b,) or (1,) laid out to broadcast with the logits."""
        x = np.asarray(x)
        part = x if x.shape[0] == 1 else x[self.group.b]
        return to_namespace(part.reshape(-1, 1, 1, *(1,) * self._tail()), self.xp, like=self.problem.q)

    def _tail(self) -> int:
        return 3 if self.queries.batched or self.keys.batched else 2

    def numbers(self) -> tuple[Any, Any]:
        """Batch and query-head numbers laid out to broadcast with the logits."""
        tail = (1,) * self._tail()
        b, h = self.group.batches.reshape(-1, 1, 1, *tail), self.group.heads.reshape(1, *self.group.heads.shape, *tail)
        like = self.problem.q
        return to_namespace(b, self.xp, like=like), to_namespace(h, self.xp, like=like)

    def positions(self) -> tuple[Any, Any]:
        """Query and key positions laid out to broadcast with the logits: (..., a, 1) and (..., 1, c)."""
        xp = self.xp
        i, j = self.queries.positions(xp), self.keys.positions(xp)
        return xp.expand_dims(i, axis=-1), xp.expand_dims(j, axis=-2)

    # -------------------------------------------------------------- visibility

    def hide(self, hidden: Any) -> None:
        """Take pairs out of sight (an additive -inf)."""
        seen = self.xp.logical_not(hidden)
        self.visible = seen if self.visible is None else self.xp.logical_and(self.visible, seen)

    def seen(self, x: Any) -> Any:
        """x where visible, 0 elsewhere; may overwrite x."""
        return x if self.visible is None else self.backend.select_into(x, self.visible)

    def dropout(self) -> Any:
        """Factors of the weights: 0 where dropped, 1 / (1 - rate) where kept; None without dropout."""
        if self.problem.dropout is None:
            return None
        mask, factor = self.problem.dropout
        kept = take_pairs(self.own(mask), self.queries, self.keys)
        return _factors(self.xp, kept, factor, self.problem.q.dtype)

    def add_pairs(self, total: Any, d_logits: Any) -> Any:
        """Cotangents of the block added to a bias-like accumulator of the group."""
        return add_pairs(total, d_logits, self)

    def product(self, weights: Any, values: Any, visible: Any, *, transposed: bool = False) -> Any:
        """:func:`product` on this view's backend."""
        return product(self.backend, weights, values, visible, transposed=transposed)


# ------------------------------------------------------------------------------------------------ cutting


def groups(problem: AttentionProblem) -> list[Group]:
    """The groups of a problem, by its shape alone."""
    b, g, r, q, _ = problem.q.shape
    k = problem.k.shape[-2]
    heads = np.asarray(problem.heads)
    unit = r * q * k
    if problem.blocks is None and problem.tile is None and b * g < SPLIT and unit > 16 * SMALL and q >= 2 * ROWS:
        step = -(-q // SPLIT)
        step = -(-step // ROWS) * ROWS
        cuts = [(s, min(s + step, q)) for s in range(0, q, step)]
    else:
        cuts = [(0, q)]
    if g == 0:
        return []
    heads_step = g if unit * g <= SMALL and not problem.apart else 1
    batch_step = max(1, SMALL // max(1, unit * heads_step)) if unit * g <= SMALL else 1
    return [
        Group(slice(s, min(s + batch_step, b)), slice(n, min(n + heads_step, g)), cut, heads[n : n + heads_step])
        for s in range(0, b, batch_step)
        for n in range(0, g, heads_step)
        for cut in cuts
    ]


def slice_blocks(problem: AttentionProblem, group: Group, xp: Any) -> Iterator[Block]:
    """Blocks of a group as runs of queries times runs of keys: empty ones skipped, full ones without a mask."""
    r, k = problem.q.shape[2], problem.k.shape[-2]
    rows, keys = problem.tile or (max(16, ROWS // max(1, r)), KEYS)
    pattern = problem.visibility
    for i0 in range(*group.q, rows):
        i1 = min(i0 + rows, group.q[1])
        queries = Span(i0, i1)
        if pattern is None:
            for j0 in range(0, k, keys):
                yield Block(queries, Span(j0, min(j0 + keys, k)))
            continue
        asked = {"q": problem.q.shape[-2], "k": k, "b": group.batches.tolist(), "h": group.heads.reshape(-1).tolist()}
        lowest, highest = pattern.key_range(i0, i1, **asked)
        for j0 in range(lowest, highest, keys):
            for kind, s, e in _segments(pattern, i0, i1, j0, min(j0 + keys, highest), rows, asked):
                if kind == "empty":
                    continue
                tile = None if kind == "full" else _Tile(problem, group, i0, i1, s, e, xp)
                yield Block(queries, Span(s, e), tile)


def whole_block(problem: AttentionProblem, group: Group, xp: Any) -> Iterator[Block]:
    """All queries of a group against all keys, invisible pairs included: what ``keep_weights`` shows."""
    n_k = problem.k.shape[-2]
    if n_k and group.q[1] > group.q[0]:
        tile = None if problem.visibility is None else _Tile(problem, group, *group.q, 0, n_k, xp)
        yield Block(Span(*group.q), Span(0, n_k), tile)


def _segments(
    pattern: Any, i0: int, i1: int, j0: int, j1: int, least: int, asked: dict[str, Any]
) -> list[tuple[str, int, int]]:
    """The tile cut into runs of keys of one kind, no finer than ``least`` keys."""
    kind = pattern.classify(i0, i1, j0, j1, **asked)
    if kind != "partial" or j1 - j0 <= least:
        return [(kind, j0, j1)]
    middle = (j0 + j1) // 2
    parts = _segments(pattern, i0, i1, j0, middle, least, asked) + _segments(pattern, i0, i1, middle, j1, least, asked)
    joined = parts[:1]
    for kind, s, e in parts[1:]:
        if kind == joined[-1][0]:
            joined[-1] = (kind, joined[-1][1], e)
        else:
            joined.append((kind, s, e))
    return joined


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Visibility of one partly visible tile, computed when it is asked for."""

    problem: AttentionProblem
    group: Group
    i0: int
    i1: int
    j0: int
    j1: int
    xp: Any

    def __call__(self) -> Any:
        q, k = self.problem.q.shape[-2], self.problem.k.shape[-2]
        place = {"q": q, "k": k, "b": self.group.batches, "h": self.group.heads, "xp": self.xp}
        return self.problem.visibility.tile(self.i0, self.i1, self.j0, self.j1, **place)


def listed_blocks(problem: AttentionProblem, group: Group, xp: Any) -> Iterator[Block]:
    """The blocks of a group: the mechanism's own, or slices."""
    if problem.blocks is not None:
        return problem.blocks(group)
    return slice_blocks(problem, group, xp)


# ------------------------------------------------------------------------------------------------ shared steps


def _mT(x: Any) -> Any:
    return namespace(x).matrix_transpose(x)


def product(backend: Any, weights: Any, values: Any, visible: Any, *, transposed: bool = False) -> Any:
    """weights (..., a, c) @ values (..., c, e), in which an invisible pair contributes nothing even if values are NaN.

    ``transposed``: weights^T @ values, with ``visible`` laid out as the weights.
    """
    xp = backend.xp
    left = _mT(weights) if transposed else weights
    if visible is None:
        return backend.matmul(left, values)
    finite = xp.isfinite(values)
    if bool(xp.all(finite)):
        return backend.matmul(left, values)
    clean = xp.where(finite, values, xp.zeros_like(values))
    out = backend.matmul(left, clean)
    visible = xp.broadcast_to(visible, weights.shape)
    visible = _mT(visible) if transposed else visible
    odd = xp.any(xp.logical_not(finite), axis=-1)
    odd = xp.any(xp.reshape(odd, (-1, odd.shape[-1])), axis=0)
    for j in range(odd.shape[0]):
        if bool(odd[j]):
            row = values[..., j : j + 1, :]
            share = left[..., j : j + 1] * xp.where(finite[..., j : j + 1, :], xp.zeros_like(row), row)
            out = out + xp.where(visible[..., j : j + 1], share, xp.zeros_like(share))
    return out


def _logits(view: View, k: Any, neutral: bool) -> tuple[Any, list[Any]]:
    """Logits of the block (before visibility) and what each term keeps for its backward."""
    problem, backend = view.problem, view.backend
    logits = backend.matmul(view.q, _mT(k), view.scratch, "logits")
    if neutral and view.visible is not None:
        logits = view.seen(logits)
    kept = []
    for term in problem.terms:
        logits, own = term.apply(logits, view)
        kept.append(own)
    return logits, kept


def rows_of_logits(problem: AttentionProblem, group: Group, backend: Any) -> Iterator[Any]:
    """Real parts of the logits of a group over all keys, (b,g,r,a,k) for one run of queries after the other.

    They are those that meet visibility; -inf stands where a pair is invisible, +inf for NaN.  For mechanisms that compare.
    """
    xp = backend.xp
    view = View(problem, group, backend, gradient=False)
    q, k = view.own(problem.q), view.own(problem.k)[:, :, None, ...]
    n_k = k.shape[-2]
    asked = {"q": q.shape[-2], "k": n_k, "b": group.batches.tolist(), "h": group.heads.reshape(-1).tolist()}
    rows = max(16, SMALL // max(1, math.prod(q.shape[:3]) * n_k))
    for i0 in range(*group.q, rows):
        i1 = min(i0 + rows, group.q[1])
        pattern = problem.visibility
        seen = pattern is None or pattern.classify(i0, i1, 0, n_k, **asked) == "full"
        view.enter(Block(Span(i0, i1), Span(0, n_k), None if seen else _Tile(problem, group, i0, i1, 0, n_k, xp)))
        view.q = view.queries.take(q) * problem.scale
        s = real(_logits(view, k, neutral=False)[0])
        s = xp.where(xp.isnan(s), xp.full_like(s, math.inf), s)
        yield s if view.visible is None else xp.where(view.visible, s, xp.full_like(s, -math.inf))


# ------------------------------------------------------------------------------------------------ forward


@dataclasses.dataclass(frozen=True)
class Forward:
    """What the forward leaves for the caller and the backward: (b,g,r,q,e) and (b,g,r,q)."""

    output: Any
    lse: Any  # includes the sinks
    lse_keys: Any  # the keys alone (the same array without sinks)
    logits: Any = None
    weights: Any = None


def forward(problem: AttentionProblem, backend: Any, *, keep: bool = False) -> Forward:
    """Output and log-sum-exp of a problem; ``keep`` also returns logits and weights (b,g,r,q,k) of slice blocks."""
    xp = backend.xp
    b, g, r, q, _ = problem.q.shape
    k, e = problem.v.shape[-2:]
    like = {"device": device(problem.q)}
    output = xp.zeros((b, g, r, q, e), dtype=problem.q.dtype, **like)
    lse = xp.full((b, g, r, q), -math.inf, dtype=problem.q.dtype, **like)
    logits = xp.zeros((b, g, r, q, k), dtype=problem.q.dtype, **like) if keep else None
    seen = xp.zeros((b, g, r, q, k), dtype=xp.bool, **like) if keep else None

    tasks = groups(problem)

    def run(group: Group) -> tuple[Any, ...]:
        with backend.quiet():
            return forward_group(problem, group, backend, keep)

    work = 2 * b * g * r * q * k
    for group, (o, z, s, m) in zip(tasks, backend.map(run, tasks, work=work), strict=True):
        index = (group.b, group.g, slice(None), slice(*group.q), ...)
        output = backend.assign(output, index, o)
        lse = backend.assign(lse, index, z)
        if keep:
            logits, seen = backend.assign(logits, index, s), backend.assign(seen, index, m)
    return finish(problem, backend, output, lse, logits, seen)


def forward_group(problem: AttentionProblem, group: Group, backend: Any, keep: bool = False) -> tuple[Any, ...]:
    """Output and lse over the keys of one group (and with ``keep`` its logits and visible pairs)."""
    xp = backend.xp
    view = View(problem, group, backend, gradient=False)
    q, k, v = view.own(problem.q), view.own(problem.k)[:, :, None, ...], view.own(problem.v)[:, :, None, ...]
    start, stop = group.q
    shape = (*q.shape[:3], stop - start)
    output = xp.zeros((*shape, v.shape[-1]), dtype=q.dtype, device=device(q))
    lse = xp.full(shape, -math.inf, dtype=q.dtype, device=device(q))
    logits = seen = None
    if keep:
        logits = xp.zeros((*shape, k.shape[-2]), dtype=q.dtype, device=device(q))
        seen = xp.zeros((*shape, k.shape[-2]), dtype=xp.bool, device=device(q))
    state: tuple[Any, Any, Any] | None = None
    queries: Any = None

    def flush() -> None:
        nonlocal output, lse
        if state is None:
            return
        maximum, total, weighted = state
        empty = maximum == -math.inf
        safe = xp.where(empty, xp.ones_like(total), total)
        shift = xp.where(empty, xp.zeros_like(maximum), maximum)
        part, z = weighted / safe[..., None], xp.where(empty, xp.full_like(total, -math.inf), xp.log(safe) + shift)
        if queries.batched:
            if not queries.once:
                part, z = merged(xp, queries.take(output), queries.take_last(lse), part, z)
            output, lse = queries.assign(backend, output, part), queries.assign_last(backend, lse, z)
        else:
            rows = Span(queries.start - start, queries.stop - start)
            output, lse = rows.assign(backend, output, part), rows.assign_last(backend, lse, z)

    whole = keep and problem.blocks is None
    for block in whole_block(problem, group, xp) if whole else listed_blocks(problem, group, xp):
        if block.queries is not queries:
            flush()
            queries, state = block.queries, None
            view.q = queries.take(q) * problem.scale
        view.enter(block)
        keys, values = block.keys.take(k), block.keys.take(v)
        s, _ = _logits(view, keys, neutral=False)
        if keep:
            index = (..., slice(queries.start - start, queries.stop - start), slice(block.keys.start, block.keys.stop))
            logits = backend.assign(logits, index, s + 0)
            seen = backend.assign(seen, index, True if view.visible is None else xp.broadcast_to(view.visible, s.shape))
        state = _online(problem, view, s, values, state)
    flush()
    return output, lse, logits, seen


def _online(problem: AttentionProblem, view: View, s: Any, v: Any, state: Any) -> tuple[Any, Any, Any]:
    """One step of the online softmax: (maximum, sum, weighted values) with the block's keys added."""
    xp, backend = view.xp, view.backend
    if view.visible is not None:
        s = backend.select_into(s, view.visible, -math.inf)
    maximum, shift = row_maximum(s)
    if state is not None:
        before, total, weighted = state
        maximum = xp.maximum(before, maximum)
        shift = xp.where(maximum == -math.inf, xp.zeros_like(maximum), maximum)
    s -= shift[..., None]
    p = backend.exp_into(s)
    row = xp.sum(p, axis=-1)
    factor = view.dropout()
    p = p if factor is None else p * factor
    part = product(backend, p, v, view.visible)
    if state is None:
        return maximum, row, part
    rescale = xp.exp(before - shift)
    return maximum, total * rescale + row, weighted * rescale[..., None] + part


def merged(xp: Any, o1: Any, z1: Any, o2: Any, z2: Any) -> tuple[Any, Any]:
    """Two partial results over disjoint keys in one."""
    maximum = xp.maximum(real(z1), real(z2))
    shift = xp.where(maximum == -math.inf, xp.zeros_like(maximum), maximum)
    w1, w2 = xp.exp(z1 - shift), xp.exp(z2 - shift)
    total = w1 + w2
    empty = maximum == -math.inf
    safe = xp.where(empty, xp.ones_like(total), total)
    z = xp.where(empty, xp.full_like(total, -math.inf), xp.log(safe) + shift)
    return _weighted(xp, w1 / safe, o1) + _weighted(xp, w2 / safe, o2), z


def _weighted(xp: Any, w: Any, x: Any) -> Any:
    w = w[..., None]
    return xp.where(w == 0, xp.zeros_like(x), w * x)


def finish(
    problem: AttentionProblem, backend: Any, output: Any, lse: Any, logits: Any = None, seen: Any = None
) -> Forward:
    """What comes after the sum over keys: sinks, padded rows, and the kept weights."""
    xp = backend.xp
    keys = lse
    with backend.quiet():
        if problem.sinks is not None:
            sinks = problem.sinks[None, :, :, None, :]  # (1, g, r, 1, n)
            peak, _ = row_maximum(sinks)
            maximum = xp.maximum(real(lse), peak)
            nothing = maximum == -math.inf  # no key, and sinks that are switched off by -inf
            maximum = xp.where(nothing, xp.zeros_like(maximum), maximum)
            share = xp.exp(lse - maximum)
            total = share + xp.sum(xp.exp(sinks - maximum[..., None]), axis=-1)
            safe = xp.where(nothing, xp.ones_like(total), total)
            output = output * (share / safe)[..., None]
            lse = xp.where(nothing, xp.full_like(total, -math.inf), maximum + xp.log(safe))
        real_rows = _real_rows(problem, xp)
        if real_rows is not None:
            lse = xp.where(real_rows, lse, xp.full_like(lse, -math.inf))
            output = xp.where(real_rows[..., None], output, xp.zeros_like(output))
        weights = None
        if logits is not None:
            safe = xp.where(real(lse) == -math.inf, xp.zeros_like(lse), lse)
            weights = xp.where(seen, xp.exp(logits - safe[..., None]), xp.zeros_like(logits))
            if problem.dropout is not None:
                mask, factor = problem.dropout
                weights = weights * _factors(xp, mask, factor, weights.dtype)
    return Forward(output, lse, keys, logits, weights)


def _factors(xp: Any, mask: Any, factor: float, dtype: Any) -> Any:
    return xp.astype(mask, dtype) * factor


def _real_rows(problem: AttentionProblem, xp: Any) -> Any:
    """(b, 1, 1, q) bool: rows that are no padding; None where there is none."""
    if problem.rows is None:
        return None
    count = to_namespace(np.asarray(problem.rows), xp, like=problem.q)
    return xp.arange(problem.q.shape[-2])[None, None, None, :] < count[:, None, None, None]


# ------------------------------------------------------------------------------------------------ backward


def backward(problem: AttentionProblem, backend: Any, saved: Forward, d_output: Any, d_lse: Any) -> dict[str, Any]:
    """Cotangents of q (b,g,r,q,d), k, v (b,g,k,.), scale, sinks and every term's parameters.

    With P = exp(logits - lse), R the dropout factors and Delta = rowsum(dO O) - dlse:
    dV = (P R)^T dO, dS = P (R (dO V^T) - Delta), then dS through the terms, dQ = scale dU K, dK = scale dU^T Q,
    dscale = sum Q (dU K); dsink = -sum exp(sink - lse) Delta.
    """
    xp = backend.xp
    b, g, r, q, d = problem.q.shape
    k, e = problem.v.shape[-2:]
    like = {"device": device(problem.q)}
    zeros = {"dtype": problem.q.dtype, **like}
    d_output = xp.zeros((b, g, r, q, e), **zeros) if d_output is None else d_output
    gradients = {"q": xp.zeros((b, g, r, q, d), **zeros), "scale": xp.zeros((), **zeros)}
    with backend.quiet():
        shift, d_sinks = _row_terms(problem, backend, saved, d_output, d_lse)
    if d_sinks is not None:
        gradients["sinks"] = d_sinks
    lse = xp.where(real(saved.lse) == -math.inf, xp.zeros_like(saved.lse), saved.lse)
    tasks = groups(problem)

    def run(group: Group) -> tuple[Any, ...]:
        with backend.quiet():
            return backward_group(problem, group, backend, lse, shift, d_output)

    shared: dict[str, Any] = {}
    for term in problem.terms:
        shared.update(term.whole())
    d_k = xp.zeros(problem.k.shape, **zeros)
    d_v = xp.zeros(problem.v.shape, **zeros)
    for group, (d_queries, d_keys, d_values, d_scale, sums) in zip(
        tasks, backend.map(run, tasks, work=5 * b * g * r * q * k), strict=True
    ):
        view = View(problem, group, backend, gradient=True)
        gradients["q"] = backend.assign(
            gradients["q"], (group.b, group.g, slice(None), slice(*group.q), ...), d_queries
        )
        gradients["scale"] = gradients["scale"] + d_scale
        d_k = backend.accumulate(d_k, (*view.slices(d_k), ...), _fold_batch(d_keys, d_k))
        d_v = backend.accumulate(d_v, (*view.slices(d_v), ...), _fold_batch(d_values, d_v))
        for term in problem.terms:
            for name in term.names:
                shared[name] = term.place(name, shared[name], sums[name], view)
    gradients.update(k=d_k, v=d_v, **shared)
    return gradients


def _fold_batch(part: Any, whole: Any) -> Any:
    """Sum over batches where all of them share one set of keys."""
    return namespace(part).sum(part, axis=0, keepdims=True) if whole.shape[0] == 1 and part.shape[0] > 1 else part


def _row_terms(problem: AttentionProblem, backend: Any, saved: Forward, d_output: Any, d_lse: Any) -> tuple[Any, Any]:
    """Delta - dlse of every row (what is subtracted from dP), and the cotangent of the sinks."""
    xp = backend.xp
    delta = xp.sum(d_output * saved.output, axis=-1)
    delta = xp.where(real(saved.lse_keys) == -math.inf, xp.zeros_like(delta), delta)
    shift = delta
    if d_lse is not None:
        if problem.sinks is None or problem.lse_includes_sinks:
            shift = delta - d_lse
        else:  # lse = that of the keys alone: its weights are P exp(lse - lse_keys)
            empty = real(saved.lse_keys) == -math.inf
            ratio = xp.where(
                empty, xp.zeros_like(delta), xp.exp(saved.lse - xp.where(empty, xp.zeros_like(delta), saved.lse_keys))
            )
            shift = delta - xp.where(empty, xp.zeros_like(d_lse), d_lse) * ratio
    if problem.sinks is None:
        return shift, None
    lost = shift if problem.lse_includes_sinks else delta
    weights = xp.exp(
        problem.sinks[None, :, :, None, :]
        - xp.where(real(saved.lse) == -math.inf, xp.zeros_like(saved.lse), saved.lse)[..., None]
    )
    share = weights * lost[..., None]
    real_rows = _real_rows(problem, xp)
    if real_rows is not None:
        share = xp.where(real_rows[..., None], share, xp.zeros_like(share))
    return shift, -xp.sum(share, axis=(0, 3))


def backward_group(
    problem: AttentionProblem, group: Group, backend: Any, lse: Any, shift: Any, d_output: Any
) -> tuple[Any, ...]:
    """Cotangents of q, k, v, scale and terms of one group; ``shift`` = Delta - dlse and a finite ``lse`` per row."""
    xp = backend.xp
    view = View(problem, group, backend, gradient=True)
    q, k, v = view.own(problem.q), view.own(problem.k)[:, :, None, ...], view.own(problem.v)[:, :, None, ...]
    lse, shift, d_output = view.own(lse), view.own(shift), view.own(d_output)
    start, stop = group.q
    zeros = {"dtype": q.dtype, "device": device(q)}
    batch = q.shape[0]
    d_q = xp.zeros((*q.shape[:3], stop - start, q.shape[-1]), **zeros)
    d_k = xp.zeros((batch, q.shape[1], 1, *k.shape[-2:]), **zeros)
    d_v = xp.zeros((batch, q.shape[1], 1, *v.shape[-2:]), **zeros)
    sums: dict[str, Any] = {}
    for term in problem.terms:
        sums.update(term.start(view))
    queries: Any = None
    for block in listed_blocks(problem, group, xp):
        if block.queries is not queries:
            queries = block.queries
            rows = queries if queries.batched else Span(queries.start - start, queries.stop - start)
            raw = queries.take(q)
            view.q = raw * problem.scale
            z, c, d_o = queries.take_last(lse)[..., None], queries.take_last(shift)[..., None], queries.take(d_output)
        view.enter(block)
        keys, values = block.keys.take(k), block.keys.take(v)
        s, kept = _logits(view, keys, neutral=True)
        s -= z
        p = view.seen(backend.exp_into(s))
        d_s = backend.matmul(d_o, _mT(values), view.scratch, "d_weights")  # dP
        factor = view.dropout()
        kept_p = p if factor is None else p * factor
        d_s = d_s if factor is None else d_s * factor
        d_v = block.keys.accumulate(
            backend, d_v, _over_heads(product(backend, kept_p, d_o, view.visible, transposed=True))
        )
        d_s -= c
        d_s *= p  # dS = P (dP - Delta)
        d_s = view.seen(d_s)
        for term, own in zip(reversed(problem.terms), reversed(kept), strict=True):
            d_s = term.pull(d_s, own, view, sums)
        d_rows = product(backend, d_s, keys, view.visible)
        d_q = rows.accumulate(backend, d_q, d_rows if view.d_q is None else d_rows + view.d_q)
        d_k = block.keys.accumulate(
            backend, d_k, _over_heads(product(backend, d_s, view.q, view.visible, transposed=True))
        )
    own_q = q[..., start:stop, :]
    d_scale = xp.sum(xp.where(d_q == 0, xp.zeros_like(d_q), d_q * own_q))
    return d_q * problem.scale, d_k[:, :, 0, ...], d_v[:, :, 0, ...], d_scale, sums


def _over_heads(x: Any) -> Any:
    """Sum over the query heads that share a key head."""
    return x if x.shape[2] == 1 else namespace(x).sum(x, axis=2, keepdims=True)
