"""The backward of softmax attention over a problem, block by block: logits and weights are computed again.

With W = exp(logits - maximum) / row_sum over the keys, R the dropout factors, s the share of the keys beside sinks and
Delta = rowsum(dO O):

    dV = (W R)^T s dO        dS = W (R (s dO V^T) - s Delta + dlse_keys)        dQ = scale dS K        dK = scale dS^T Q

and dS goes through the terms before dQ and dK; dlse_keys is the cotangent of the lse of the keys alone: that of the lse
itself, times s where it includes the sinks.  dscale = sum Q (dS K); dsink = -(weight of the sink) (Delta - dlse).

W comes from (maximum, row_sum), and the division by row_sum is done per row: on dO, Delta and dlse.
"""

import math
from typing import Any

from refattn.arrays import device, namespace
from refattn.contraction import einsum
from refattn.core.blocks import Group, View, groups, listed_blocks, product, summed
from refattn.core.forward import Forward, logits_of_block, with_sinks
from refattn.core.selections import Span
from refattn.records import AttentionProblem

__all__ = ["backward", "backward_group"]


def backward(problem: AttentionProblem, backend: Any, saved: Forward, d_output: Any, d_lse: Any) -> dict[str, Any]:
    """Cotangents of q (b,g,r,q,d), k, v (b|1,g,k,.), scale, sinks and every term's parameters."""
    xp = backend.xp
    b, g, r, q, d = problem.q.shape
    k, e = problem.v.shape[-2:]
    zeros = {"dtype": problem.q.dtype, "device": device(problem.q)}
    d_output = xp.zeros((b, g, r, q, e), **zeros) if d_output is None else d_output
    gradients = {"scale": xp.zeros((), **zeros)}
    with backend.quiet():
        maximum, shift, d_rows, d_sinks = _row_terms(problem, backend, saved, d_output, d_lse)
    if d_sinks is not None:
        gradients["sinks"] = d_sinks
    tasks = groups(problem, by_keys=True)

    def run(group: Group) -> tuple[Any, ...]:
        with backend.quiet():
            return backward_group(problem, group, backend, maximum, shift, d_rows)

    shared: dict[str, Any] = {}
    for term in problem.terms:
        shared.update(term.whole())
    parts = backend.map(run, tasks, work=5 * b * g * r * q * k)
    whole = len(parts) == 1 and problem.k.shape[0] == problem.v.shape[0] == b
    if whole:  # one group of everything: nothing is copied
        gradients["q"], d_k, d_v = parts[0][:3]
    else:
        gradients["q"] = xp.zeros((b, g, r, q, d), **zeros)
        d_k, d_v = (xp.zeros(x.shape, **zeros) for x in (problem.k, problem.v))
    for group, (d_queries, d_keys, d_values, d_scale, sums) in zip(tasks, parts, strict=True):
        view = View(problem, group, backend, gradient=True)
        gradients["scale"] = gradients["scale"] + d_scale
        if not whole:
            index = (group.b, group.g, slice(None), slice(*group.q), ...)
            gradients["q"] = backend.accumulate(gradients["q"], index, d_queries)
            keys = slice(*(group.k or (0, k)))
            at = (*view.slices(d_k), keys, slice(None))
            d_k = backend.accumulate(d_k, at, _fold_batch(d_keys[:, :, keys, :], d_k))
            d_v = backend.accumulate(d_v, (*view.slices(d_v), *at[2:]), _fold_batch(d_values[:, :, keys, :], d_v))
        for term in problem.terms:
            for name in term.names:
                shared[name] = term.place(name, shared[name], sums[name], view)
    gradients.update(k=d_k, v=d_v, **shared)
    return gradients


def _fold_batch(part: Any, whole: Any) -> Any:
    """Sum over batches where all of them share one set of keys."""
    return namespace(part).sum(part, axis=0, keepdims=True) if whole.shape[0] == 1 and part.shape[0] > 1 else part


def _row_terms(problem: AttentionProblem, backend: Any, saved: Forward, d_output: Any, d_lse: Any) -> tuple[Any, ...]:
    """What the blocks need of every row: a finite maximum, (s Delta - dlse_keys) / row_sum, s dO / row_sum; cotangent of the sinks."""
    xp = backend.xp
    empty = saved.maximum == -math.inf
    maximum = xp.where(empty, xp.zeros_like(saved.maximum), saved.maximum)
    factor = 1 / xp.where(empty, xp.ones_like(saved.row_sum), saved.row_sum)
    shift = xp.sum(d_output * saved.output, axis=-1)
    shift = xp.where(empty, xp.zeros_like(shift), shift)
    d_sinks = None
    if problem.sinks is None:
        shift = shift if d_lse is None else shift - d_lse
    else:
        _, _, weights = with_sinks(problem, saved.maximum, saved.row_sum, xp)
        inclusive = d_lse is not None and problem.lse_includes_sinks
        shift = shift - d_lse if inclusive else shift
        share = weights * shift[..., None]
        d_sinks = -xp.sum(xp.where(weights == 0, xp.zeros_like(share), share), axis=(0, 3))
        shift = shift * saved.share
        if d_lse is not None and not inclusive:
            shift = shift - d_lse
    scaled = factor if saved.share is None else factor * saved.share
    return maximum, shift * factor, d_output * scaled[..., None], d_sinks


def backward_group(
    problem: AttentionProblem, group: Group, backend: Any, maximum: Any, shift: Any, d_output: Any
) -> tuple[Any, ...]:
    """Cotangents of q, k, v, scale and terms of one group.

    Of every row ``maximum``, finite, ``shift`` = Delta - dlse and ``d_output``, the last two divided by the row's sum: the
    weights are exp(logits - maximum) / row_sum.
    """
    xp = backend.xp
    view = View(problem, group, backend, gradient=True)
    q, k, v = view.part(problem.q), view.part(problem.k)[:, :, None, ...], view.part(problem.v)[:, :, None, ...]
    maximum, shift, d_output = view.part(maximum), view.part(shift), view.part(d_output)
    start, stop = group.q
    d_q, d_k, d_v = (
        _Sum(backend, q, shape)
        for shape in (
            (*q.shape[:3], stop - start, q.shape[-1]),
            (*q.shape[:2], 1, *k.shape[-2:]),
            (*q.shape[:2], 1, *v.shape[-2:]),
        )
    )
    sums: dict[str, Any] = {}
    for term in problem.terms:
        sums.update(term.start(view))
    queries: Any = None
    for block in listed_blocks(problem, group, xp):
        if block.queries is not queries:
            queries = block.queries
            rows = queries if queries.batched else Span(queries.start - start, queries.stop - start)
            view.q = queries.take(q) * problem.scale
            m, c = queries.take_last(maximum)[..., None], queries.take_last(shift)[..., None]
            d_o = queries.take(d_output)
        view.enter(block)
        keys, values = block.keys.take(k), block.keys.take(v)
        apart = keys.shape[2] > 1  # query heads of one key head have lists of their own
        logits, kept = logits_of_block(view, keys, neutral=bool(problem.terms))
        logits -= m
        weights = view.seen(backend.exp_into(logits))  # times the row's sum, as d_o and c are divided by it
        d_logits = einsum("...qe,...ke->...qk", d_o, values, out=view.buffer("d_weights", d_o, values))
        factor = view.dropout()
        if factor is None:
            d_values = summed(backend, weights, d_o, view.visible, apart=apart)
        else:
            d_values = summed(backend, weights * factor, d_o, view.visible, apart=apart)
            d_logits = d_logits * factor
        d_v.add(block.keys, d_values)
        d_logits -= c
        d_logits *= weights
        if view.visible is not None and not bool(xp.isfinite(xp.sum(d_logits))):  # else 0 with the weights
            d_logits = view.seen(d_logits)
        for term, saved in zip(reversed(problem.terms), reversed(kept), strict=True):
            d_logits = term.pull(d_logits, saved, view, sums)
        d_rows = product(backend, d_logits, keys, view.visible)
        d_q.add(rows, d_rows if view.d_q is None else d_rows + view.d_q)
        d_k.add(block.keys, summed(backend, d_logits, view.q, view.visible, apart=apart))
    d_rows = d_q.total()
    d_scale = _product_of_all(xp, d_rows, q[..., start:stop, :])
    return d_rows * problem.scale, d_k.total()[:, :, 0, ...], d_v.total()[:, :, 0, ...], d_scale, sums


class _Sum:
    """Cotangents of an array, added up block by block; what comes first for all rows at once is taken as it is."""

    def __init__(self, backend: Any, like: Any, shape: tuple[int, ...]) -> None:
        self.backend, self.like, self.shape = backend, like, shape
        self.sum: Any = None

    def add(self, selection: Any, values: Any) -> None:
        if self.sum is None and not selection.batched and selection.extent == (0, self.shape[-2]):
            self.sum = values
        else:
            self.sum = selection.accumulate(self.backend, self.total(), values)

    def total(self) -> Any:
        if self.sum is None:
            self.sum = namespace(self.like).zeros(self.shape, dtype=self.like.dtype, device=device(self.like))
        return self.sum


def _product_of_all(xp: Any, d_rows: Any, rows: Any) -> Any:
    """Sum of d_rows rows, in which a row without a cotangent counts nothing, whatever it holds."""
    total = xp.sum(d_rows * rows)
    if bool(xp.isfinite(total)):
        return total
    return xp.sum(xp.where(d_rows == 0, xp.zeros_like(d_rows), d_rows * rows))
