"""The forward of softmax attention over a problem, block by block in O(length) memory.

    logits = terms(scale q k^T) where visible      weights = exp(logits - maximum) / row_sum      output = weights v

Blocks that share their queries are one online softmax (running maximum, sum, weighted values); runs over the same query are
merged.  What is carried is always (output, maximum, row_sum), never a rounded log-sum-exp.

Masking selects, it never multiplies: a NaN or infinity behind a mask reaches nothing.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from refattn.arrays import device, real
from refattn.contraction import einsum
from refattn.core.blocks import SMALL, Group, View, groups, listed_blocks, product, whole_block
from refattn.core.selections import Span
from refattn.normalization import Partial, lse_of, merged, row_maximum
from refattn.records import AttentionProblem

__all__ = [
    "Forward",
    "finish",
    "forward",
    "forward_group",
    "logits_of_block",
    "real_rows",
    "rows_of_logits",
    "with_sinks",
]


@dataclasses.dataclass(frozen=True)
class Forward:
    """What the forward leaves for the caller and the backward.

    ``output`` (b,g,r,q,e) and ``lse`` (b,g,r,q) are the results, sinks counted as the options say.  The weights over the
    keys are exp(logits - maximum) / row_sum, times ``share`` where sinks take the rest (None without sinks): ``maximum``
    and ``row_sum`` (b,g,r,q) are those of the keys alone, -inf and 0 in a row that sees none.  The backward and kept weights
    come from these and not from the lse, which rounds them away at large logits; an lse from elsewhere is
    (maximum=lse, row_sum=1).
    """

    output: Any
    lse: Any
    maximum: Any
    row_sum: Any
    share: Any = None
    logits: Any = None
    weights: Any = None


def forward(problem: AttentionProblem, backend: Any, *, keep: bool = False) -> Forward:
    """Results of a problem; ``keep`` also returns logits and weights (b,g,r,q,k), whose blocks must be slices."""
    xp = backend.xp
    b, g, r, q, _ = problem.q.shape
    k, e = problem.v.shape[-2:]
    tasks = groups(problem, by_keys=True)

    def run(group: Group) -> tuple[Partial, list[Any]]:
        blocks: list[Any] = []
        with backend.quiet():
            return forward_group(problem, group, backend, blocks if keep else None), blocks

    kept: Any = None
    if keep:
        like = {"device": problem.device}
        shape = (b, g, r, q, k)
        kept = xp.zeros(shape, dtype=problem.q.dtype, **like), xp.zeros(shape, dtype=xp.bool, **like)
    parts = backend.map(run, tasks, work=2 * b * g * r * q * k)
    whole = parts[0][0] if len(parts) == 1 else _nothing(xp, (b, g, r, q), e, problem)
    for group, (part, blocks) in zip(tasks, parts, strict=True):
        index = (group.b, group.g, slice(None), slice(*group.q), ...)
        if group.k is not None:
            with backend.quiet():
                part = merged(Partial(*(x[index] for x in whole)), part)
        if part is not whole:
            whole = Partial(*(backend.assign(x, index, y) for x, y in zip(whole, part, strict=True)))
        for queries, keys, logits, visible in blocks:
            pairs = (group.b, group.g, slice(None), slice(*queries.extent), slice(*keys.extent))
            kept = backend.assign(kept[0], pairs, logits), backend.assign(kept[1], pairs, visible)
    return finish(problem, backend, whole, kept)


def _nothing(xp: Any, rows: tuple[int, ...], channels: int, problem: AttentionProblem) -> Partial:
    """The result over no keys."""
    like = {"dtype": problem.q.dtype, "device": device(problem.q)}
    row_sum = xp.zeros(rows, **like)
    return Partial(xp.zeros((*rows, channels), **like), xp.full_like(real(row_sum), -math.inf), row_sum)


def forward_group(problem: AttentionProblem, group: Group, backend: Any, kept: list[Any] | None = None) -> Partial:
    """Attention over the keys of one group; ``kept`` takes in (queries, keys, logits, visible) of its blocks."""
    xp = backend.xp
    view = View(problem, group, backend, gradient=False)
    q, k, v = view.part(problem.q), view.part(problem.k)[:, :, None, ...], view.part(problem.v)[:, :, None, ...]
    start, stop = group.q
    result = _nothing(xp, (*q.shape[:3], stop - start), v.shape[-1], problem)
    state: Partial | None = None  # of the present run of queries; its output is not normalised
    queries: Any = None

    def put_back(result: Partial) -> Partial:
        """The result with the present run of queries in place."""
        if state is None:
            return result
        empty = state.maximum == -math.inf
        safe = xp.where(empty, xp.ones_like(state.row_sum), state.row_sum)
        part = Partial(state.output / safe[..., None], state.maximum, state.row_sum)
        rows = queries if queries.batched else Span(queries.start - start, queries.stop - start)
        if problem.blocks is None and queries.extent == group.q:
            return part
        if problem.blocks is not None and not queries.once:
            before = rows.take_last(result.maximum)
            if bool(xp.any(before != -math.inf)):  # other blocks of these queries were there
                part = merged(Partial(rows.take(result.output), before, rows.take_last(result.row_sum)), part)
        return Partial(
            rows.assign(backend, result.output, part.output),
            rows.assign_last(backend, result.maximum, part.maximum),
            rows.assign_last(backend, result.row_sum, part.row_sum),
        )

    slices = kept is not None and problem.blocks is None
    for block in whole_block(problem, group, xp) if slices else listed_blocks(problem, group, xp):
        if block.queries is not queries:
            result = put_back(result)
            queries, state = block.queries, None
            view.q = queries.take(q) * problem.scale
        view.enter(block)
        logits, _ = logits_of_block(view, block.keys.take(k), neutral=False)
        if kept is not None:
            kept.append((queries, block.keys, *_shown(view, logits)))
        state = _online(view, logits, block.keys.take(v), state)
    return put_back(result)


def logits_of_block(view: View, keys: Any, *, neutral: bool, scale: Any = None) -> tuple[Any, list[Any]]:
    """Logits of the block of a view (before visibility), and what each term keeps for its backward.

    ``neutral``: 0 at invisible pairs before the terms, so that their slopes are finite there.  ``scale``: what the products are
    multiplied by, where the queries of the view are not.
    """
    logits = einsum("...qd,...kd->...qk", view.q, keys, out=view.buffer("logits", view.q, keys))
    if scale is not None:
        logits = logits * scale
    if neutral:
        logits = view.seen(logits)
    kept = []
    for term in view.problem.terms:
        logits, saved = term.apply(logits, view)
        kept.append(saved)
    return logits, kept


def _shown(view: View, logits: Any) -> tuple[Any, Any]:
    """Logits as ``keep_weights`` shows them, -inf where a term hides the pair, and what is visible."""
    xp = view.xp
    if view.hidden is None:
        logits = logits + 0  # the core goes on in place
    else:
        logits = xp.where(view.hidden, xp.full_like(logits, -math.inf), logits)
    return logits, True if view.visible is None else xp.broadcast_to(view.visible, logits.shape)


def _online(view: View, logits: Any, values: Any, state: Partial | None) -> Partial:
    """One step of the online softmax: maximum, sum and weighted values with the block's keys added."""
    xp, backend = view.xp, view.backend
    if view.visible is not None:
        logits = backend.select_into(logits, view.visible, -math.inf)
    maximum, shift = row_maximum(logits)
    if state is not None:
        maximum = xp.maximum(state.maximum, maximum)
        shift = xp.where(maximum == -math.inf, xp.zeros_like(maximum), maximum)
    logits -= shift[..., None]
    weights = backend.exp_into(logits)
    row_sum = xp.sum(weights, axis=-1)
    factor = view.dropout()
    weights = weights if factor is None else weights * factor
    output = product(backend, weights, values, view.visible)
    if state is None:
        return Partial(output, maximum, row_sum)
    rescale = xp.exp(state.maximum - shift)
    return Partial(state.output * rescale[..., None] + output, maximum, state.row_sum * rescale + row_sum)


def finish(problem: AttentionProblem, backend: Any, keys: Partial, kept: Any = None) -> Forward:
    """What comes after the sum over keys: padded rows, sinks, and the kept logits and weights."""
    xp = backend.xp
    with backend.quiet():
        present = real_rows(problem, xp)
        output, maximum, row_sum = keys
        if present is not None:
            output = xp.where(present[..., None], output, xp.zeros_like(output))
            maximum = xp.where(present, maximum, xp.full_like(maximum, -math.inf))
            row_sum = xp.where(present, row_sum, xp.zeros_like(row_sum))
        lse, share = lse_of(maximum, row_sum), None
        if problem.sinks is not None:
            share, everything, _ = with_sinks(problem, maximum, row_sum, xp)
            output = output * share[..., None]
            if problem.lse_includes_sinks:
                lse = everything
        if kept is None:
            return Forward(output, lse, maximum, row_sum, share)
        logits, visible = kept
        empty = maximum == -math.inf
        weights = xp.exp(logits - xp.where(empty, xp.zeros_like(maximum), maximum)[..., None])
        factor = 1 / xp.where(empty, xp.ones_like(row_sum), row_sum)
        weights = weights * (factor if share is None else factor * share)[..., None]
        weights = xp.where(visible, weights, xp.zeros_like(weights))
        if problem.dropout is not None:
            mask, factor = problem.dropout
            weights = weights * (xp.astype(mask, weights.dtype) * factor)
        padding = _padding(problem, visible, xp)
        if padding is not None:
            logits = xp.where(padding, xp.full_like(logits, -math.inf), logits)
    return Forward(output, lse, maximum, row_sum, share, logits, weights)


def with_sinks(problem: AttentionProblem, maximum: Any, row_sum: Any, xp: Any) -> tuple[Any, Any, Any]:
    """The softmax over the keys as one and every sink: weight of the keys, lse of all (b,g,r,q), weights of the sinks (b,g,r,q,n)."""
    sinks = problem.sinks[None, :, :, None, :]
    peak, _ = row_maximum(sinks)
    top = xp.maximum(maximum, peak)
    nothing = top == -math.inf  # no key, and sinks that are switched off by -inf
    shift = xp.where(nothing, xp.zeros_like(top), top)
    share, weights = row_sum * xp.exp(maximum - shift), xp.exp(sinks - shift[..., None])
    total = share + xp.sum(weights, axis=-1)
    total = xp.where(nothing, xp.ones_like(total), total)
    lse = xp.where(nothing, xp.full_like(total, -math.inf), xp.log(total) + shift)
    present = real_rows(problem, xp)
    if present is not None:
        lse = xp.where(present, lse, xp.full_like(lse, -math.inf))
        weights = xp.where(present[..., None], weights, xp.zeros_like(weights))
    return share / total, lse, weights / total[..., None]


def real_rows(problem: AttentionProblem, xp: Any) -> Any:
    """(b, 1, 1, q) bool: rows that are no padding; None where there is none."""
    if problem.query_lengths is None:
        return None
    present = np.arange(problem.q.shape[-2]) < problem.query_lengths[:, None]
    return xp.asarray(present[:, None, None, :], device=problem.device)


def _padding(problem: AttentionProblem, visible: Any, xp: Any) -> Any:
    """Pairs (b,1,1,q,k) of padded rows or padded keys; None where there are none.  Extra keys lie behind, and are visible."""
    padding = None
    if problem.key_lengths is not None:
        beyond = np.arange(visible.shape[-1]) >= problem.key_lengths[:, None]
        padding = xp.asarray(beyond[:, None, None, None, :], device=problem.device)
        padding = xp.logical_and(padding, xp.logical_not(visible))
    present = real_rows(problem, xp)
    if present is not None:
        absent = xp.logical_not(present)[..., None]
        padding = absent if padding is None else xp.logical_or(padding, absent)
    return padding


def rows_of_logits(problem: AttentionProblem, group: Group, backend: Any) -> Iterator[Any]:
    """Real parts of the logits of a group over all keys, (b,g,r,a,k) for one run of queries after the other.

    They are those that meet visibility; -inf stands where a pair is invisible, +inf for NaN.  For mechanisms that compare: products
    first, then the scale, so that equal products stay equal (a scaled query would round them apart).
    """
    xp = backend.xp
    view = View(problem, group, backend, gradient=False)
    q, k = view.part(problem.q), view.part(problem.k)[:, :, None, ...]
    rows = max(16, SMALL // max(1, math.prod(q.shape[:3]) * k.shape[-2]))
    for i0 in range(*group.q, rows):
        run = dataclasses.replace(group, q=(i0, min(i0 + rows, group.q[1])))
        for block in whole_block(problem, run, xp):
            view.enter(block)
            view.q = block.queries.take(q)
            logits = real(logits_of_block(view, k, neutral=False, scale=problem.scale)[0])
            logits = xp.where(xp.isnan(logits), xp.full_like(logits, math.inf), logits)
            yield logits if view.visible is None else xp.where(view.visible, logits, xp.full_like(logits, -math.inf))
