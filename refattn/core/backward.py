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
    gradients = {"q": xp.zeros((b, g, r, q, d), **zeros), "scale": xp.zeros((), **zeros)}
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
    d_k, d_v = (xp.zeros(x.shape, **zeros) for x in (problem.k, problem.v))
    work = 5 * b * g * r * q * k
    for group, (d_queries, d_keys, d_values, d_scale, sums) in zip(
        tasks, backend.map(run, tasks, work=work), strict=True
    ):
        view = View(problem, group, backend, gradient=True)
        index = (group.b, group.g, slice(None), slice(*group.q), ...)
        gradients["q"] = backend.accumulate(gradients["q"], index, d_queries)
        gradients["scale"] = gradients["scale"] + d_scale
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
    zeros = {"dtype": q.dtype, "device": device(q)}
    d_q = xp.zeros((*q.shape[:3], stop - start, q.shape[-1]), **zeros)
    d_k, d_v = (xp.zeros((*q.shape[:2], 1, *x.shape[-2:]), **zeros) for x in (k, v))
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
        logits, kept = logits_of_block(view, keys, neutral=True)
        logits -= m
        weights = view.seen(backend.exp_into(logits))  # times the row's sum, as d_o and c are divided by it
        d_logits = einsum("...qe,...ke->...qk", d_o, values, out=view.buffer("d_weights", d_o, values))
        factor = view.dropout()
        if factor is None:
            d_values = summed(backend, weights, d_o, view.visible, apart=apart)
        else:
            d_values = summed(backend, weights * factor, d_o, view.visible, apart=apart)
            d_logits = d_logits * factor
        d_v = block.keys.accumulate(backend, d_v, d_values)
        d_logits -= c
        d_logits *= weights
        d_logits = view.seen(d_logits)
        for term, saved in zip(reversed(problem.terms), reversed(kept), strict=True):
            d_logits = term.pull(d_logits, saved, view, sums)
        d_rows = product(backend, d_logits, keys, view.visible)
        d_q = rows.accumulate(backend, d_q, d_rows if view.d_q is None else d_rows + view.d_q)
        d_k = block.keys.accumulate(backend, d_k, summed(backend, d_logits, view.q, view.visible, apart=apart))
    d_scale = xp.sum(xp.where(d_q == 0, xp.zeros_like(d_q), d_q * q[..., start:stop, :]))
    return d_q * problem.scale, d_k[:, :, 0, ...], d_v[:, :, 0, ...], d_scale, sums
