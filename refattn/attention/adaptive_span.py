r"""Adaptive attention span: every head learns how far back it looks, by a soft ramp at the end of its span.

    logits[h,q,n] = scale * sum_d q[h,q,d] * (k[h,q-n,d] + key_positions[d,n])     n = 1 ... max_span, the n-th token before q
    ramp[h,q,n]   = clip((R + span[h,q] - x) / R, 0, 1)                             x = n - 1 + distance_origin
    output[h,q,e] = sum_n a[h,q,n] v[h,q-n,e]     a = ramp exp(logits) / sum_n ramp exp(logits)

======  ======================================================  ====================================
letter  axis                                                    where
======  ======================================================  ====================================
...     any batch axes, broadcast as in matmul                  all
h       head                                                    all
q, k    query position, key position; query i stands at         q, output; k, v
        k - q + i on the key axis
d, e    query/key channel, value channel                        q, k, key_positions; v, output
n       distance to a past key, from 1; persistent slot         key_positions; persistent_keys
======  ======================================================  ====================================

Conventions: a query does not see itself; the ramp is a factor of the exponential, not a term of the logit, so it also has a
gradient where it is 0: at both of its ends the inclusive one (factor 1).  Persistent slots take part in the softmax
without a ramp.  A query with nothing to see gives output 0, lse -inf and gradients 0.  Only keys within the largest span in
use (plus the ramp) are touched.

Source: Sukhbaatar et al. 2019, arXiv:1905.07799, section 2 (``distance_origin=1``); their released code counts distances
from 0 and divides by sum(ramp softmax) + 1e-8 (``distance_origin=0, renormalize_eps=1e-8``).  Persistent slots: Sukhbaatar et
al. 2019, arXiv:1907.01470, section 3.
"""

import math
from typing import Any

import numpy as np

from refattn.arrays import (
    device,
    flatten_leading,
    is_array,
    namespace,
    real,
    require_array,
    require_flag,
    require_integer,
    require_number,
)
from refattn.attention.blocks.adaptive_span import ROWS, Problem, rows_of_tile, tiles
from refattn.contraction import einsum
from refattn.core import options
from refattn.core.blocks import product
from refattn.cost import require_sizes
from refattn.mechanism import function, mechanism
from refattn.records import Counts, Elements, Pass, Result

__all__ = ["adaptive_span_attention", "span_penalty"]


@options.takes("mask", "scale", "keep_weights")
def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    span: Any,
    key_positions: Any = None,
    ramp: float = 32,
    max_span: int | None = None,
    distance_origin: int = 1,
    renormalize_eps: float = 0.0,
    persistent_keys: Any = None,
    persistent_values: Any = None,
    backend: Any,
    **shared: Any,
) -> tuple[Result, Any]:
    """Softmax attention over past keys, each weighted by a ramp that ends where the head's span does.

    Parameters
    ----------
    q : array (..., h, q, d)
        Query i stands at k - q + i on the key axis.
    k : array (..., h, k, d)
    v : array (..., h, k, e)
    span : array (h,) or (..., h, q)
        Tokens, in [0, max_span].  Differentiable.
    key_positions : array (d, n) or (h, d, n), optional
        Column n belongs to the n-th nearest past key, column 0 to the previous token; n = max_span.  Differentiable.
    ramp : float
        Tokens over which the weight falls from 1 to 0.
    max_span : int
        Keys that a query can reach; default k - q (or the columns of ``key_positions``), required if that is 0.
    distance_origin : {1, 0}
        Distance of the previous token: 1 in the paper, 0 in the released code.
    renormalize_eps : float
        Added to sum(ramp softmax) before the division, the softmax running over the keys within the largest span and its
        ramp, persistent slots included; 0 in the paper, 1e-8 in the released code.
    persistent_keys, persistent_values : arrays (h, n, d), (h, n, e), optional
        Slots that every query sees.  Differentiable.
    {shared}

    Returns
    -------
    output : array (..., h, q, e)
    lse : array (..., h, q)
        ln sum ramp exp(logits), persistent slots included.
    weights, logits : arrays (..., h, q, k + n)
        With ``keep_weights``; the persistent slots come last, logits are -inf where a query does not see a key.

    Raises
    ------
    ValueError
        A span outside [0, max_span], a table that does not fit, a missing ``max_span``.

    Examples
    --------
    Two past tokens of equal logits, span 0 and a ramp of 2: the nearer one (distance 1) has weight 1/2, the further one 0.

    >>> import numpy as np
    >>> q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 3, 1)), np.array([[[5.0], [7.0], [9.0]]])
    >>> adaptive_span_attention(q, k, v, span=np.array([0.0]), ramp=2)
    array([[[7.]]])
    """
    given = {
        "q": q, "span": span, "key_positions": key_positions, "ramp": ramp, "max_span": max_span,
        "distance_origin": distance_origin, "renormalize_eps": renormalize_eps, "persistent_keys": persistent_keys,
        "persistent_values": persistent_values, "scale": shared.get("scale"), "mask": shared.get("mask"),
    }  # fmt: skip
    p = Problem(q, k, v, backend, given)
    xp = p.xp
    keep = require_flag("keep_weights", shared.get("keep_weights", False))

    def run(b: int) -> tuple[Any, ...]:
        with backend.quiet():
            parts = []
            for tile in tiles(p, b):
                shares = tile.shares()
                parts.append((tile.attend(shares), shares.lse, *(tile.kept(shares) if keep else ())))
            return tuple(xp.concat(pieces, axis=1) for pieces in zip(*parts, strict=True))

    if p.b * p.h * p.n_q:
        pairs = p.b * p.h * p.n_q * (p.reach + ROWS)
        whole = [xp.stack(x, axis=0) for x in zip(*backend.map(run, range(p.b), work=2 * pairs * p.d), strict=True)]
    else:
        zeros = {"dtype": q.dtype, "device": device(q)}
        n = p.n_k + (0 if p.slots is None else p.slots[0].shape[1])
        shapes = [(p.b, p.h, p.n_q, p.e), (p.b, p.h, p.n_q), *([(p.b, p.h, p.n_q, n)] * (2 * keep))]
        whole = [xp.zeros(s, **zeros) for s in shapes]
    names = ("output", "lse", "weights", "logits")[: len(whole)]
    fields = {n: xp.reshape(x, (*p.lead, *x.shape[1:])) for n, x in zip(names, whole, strict=True)}
    return Result(**fields), (p, whole[0])


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """Cotangents of q, k, v, span, key_positions, the persistent slots and scale."""
    p, result = saved
    xp, backend = p.xp, p.backend
    zeros = {"dtype": p.q.dtype, "device": device(p.q)}
    d_out = xp.zeros(result.shape, **zeros) if output is None else flatten_leading(output, 3, p.lead)
    d_lse = xp.zeros(result.shape[:-1], **zeros) if lse is None else flatten_leading(lse, 2, p.lead)

    def run(b: int) -> dict[str, Any]:
        with backend.quiet():
            return _backward_entry(p, b, result[b, ...], d_out[b, ...], d_lse[b, ...])

    pairs = p.b * p.h * p.n_q * (p.reach + ROWS)
    parts = backend.map(run, range(p.b) if p.h * p.n_q else (), work=5 * pairs * p.d)
    if not parts:
        return {}
    gradients = {}
    for name in parts[0]:
        per_batch = [part[name] for part in parts]
        if name in ("q", "k", "v", "span"):
            stacked = xp.stack(per_batch, axis=0)
            gradients[name] = xp.reshape(stacked, (*p.lead, *stacked.shape[1:]))
        else:
            gradients[name] = sum(per_batch[1:], start=per_batch[0])
    if p.given["span"].ndim == 1:  # (..., h, q) -> (h,)
        gradients["span"] = xp.sum(gradients["span"], axis=-1)
    if p.positions is not None and p.given["key_positions"].ndim == 2:
        gradients["key_positions"] = xp.sum(gradients["key_positions"], axis=0)
    return gradients


def _backward_entry(p: Problem, b: int, result: Any, d_out: Any, d_lse: Any) -> dict[str, Any]:
    """Gradients of one batch entry.

    With a = ramp exp(s) / D, D = M + eps Z, M = sum ramp exp(s), Z = sum exp(s), Delta = d_out . output:
    da = d_out . v;  dramp = exp(s) (da - Delta) / D + d_lse exp(s) / M;  ds = ramp dramp - eps Delta exp(s) / D
    """
    xp, backend, eps = p.xp, p.backend, p.eps
    zeros = {"dtype": p.q.dtype, "device": device(p.q)}
    d_k, d_v = xp.zeros((p.h, p.n_k, p.d), **zeros), xp.zeros((p.h, p.n_k, p.e), **zeros)
    d_q, d_span = [], []
    d_positions = None if p.positions is None else xp.zeros((p.h, p.d, p.max_span), **zeros)
    d_slots = None if p.slots is None else [xp.zeros(x.shape, **zeros) for x in p.slots]
    for tile in tiles(p, b):
        rows = slice(tile.i0, tile.i1)
        at = tile.shares()
        d_o, d_z = d_out[:, rows, :], d_lse[:, rows, None]
        weighty = real(tile.weight) > 0
        delta = _selected(~at.empty, xp.sum(d_o * result[:, rows, :], axis=-1, keepdims=True))
        d_a = einsum("hqe,hke->hqk", d_o, tile.v)
        d_ramp = _selected(tile.seen & (at.raw != 0), at.raw * (d_a - delta))
        d_ramp = d_ramp + _selected(tile.seen & (at.alone != 0) & (d_z != 0), at.alone * d_z)
        # The weight of 0 at the far end of the ramp has a slope too.
        d_span.append(xp.sum(_selected(tile.slope, d_ramp), axis=-1) / p.ramp)
        d_s = _selected(weighty, tile.weight * d_ramp)
        if eps:
            d_s = d_s - _selected(tile.seen, eps * delta * at.raw)
        scaled = tile.q * p.scale
        place = (slice(None), tile.keys, slice(None))
        d_v = backend.accumulate(d_v, place, product(backend, at.weights, d_o, weighty, transposed=True))
        d_k = backend.accumulate(d_k, place, product(backend, d_s, scaled, tile.seen, transposed=True))
        d_rows = product(backend, d_s, tile.k, tile.seen)
        if d_positions is not None:
            by_distance = tile.unskew(d_s)
            d_rows = d_rows + einsum(f"hqn,{p.table}->hqd", by_distance, tile.far_first(p.positions))
            used = _selected(xp.any(by_distance != 0, axis=-1, keepdims=True), scaled)  # a masked query adds nothing
            share = xp.flip(einsum("hqd,hqn->hdn", used, by_distance), axis=-1)
            d_positions = backend.accumulate(d_positions, (slice(None), slice(None), slice(0, p.reach)), share)
        if d_slots is not None:
            keys, values = p.slots
            d_weights = einsum("hqe,hne->hqn", d_o, values)
            d_s = at.slots * (d_weights - delta * (1 + eps)) + d_z * at.slots_alone
            d_rows = d_rows + einsum("hqn,hnd->hqd", d_s, keys)
            d_slots[0] = d_slots[0] + einsum("hqn,hqd->hnd", d_s, scaled)
            d_slots[1] = d_slots[1] + einsum("hqn,hqe->hne", at.slots, d_o)
        d_q.append(d_rows)
    rows_of_q = xp.concat(d_q, axis=1)
    own = p.q[b, ...]
    found = {
        "q": rows_of_q * p.scale,
        "k": d_k,
        "v": d_v,
        "span": xp.concat(d_span, axis=1),
        "scale": xp.sum(rows_of_q * _selected(rows_of_q != 0, own)),
    }
    if d_positions is not None:
        found["key_positions"] = d_positions
    if d_slots is not None:
        found.update(persistent_keys=d_slots[0], persistent_values=d_slots[1])
    return found


def _selected(keep: Any, x: Any) -> Any:
    return namespace(x).where(keep, x, namespace(x).zeros_like(x))


def cost(
    *,
    b: int = 1,
    h: int = 1,
    q: int,
    k: int,
    d: int,
    e: int | None = None,
    span: Any,
    ramp: float = 32,
    max_span: int | None = None,
    n: int = 0,
    positions: bool = True,
) -> Counts:
    """Counts of pairs within span + ramp, and of n persistent slots for every query; a span, or one for each head.
    The largest span in use is computed for all heads.  ``positions``: whether ``key_positions`` are given, whose products run
    by distance.
    """
    e = d if e is None else e
    require_sizes(b=b, h=h, q=q, k=k, d=d, e=e, n=n)
    ramp = require_number("ramp", ramp, above=0)
    many = isinstance(span, (list, tuple)) or (is_array(span) and span.ndim > 0)
    spans = [require_number("span", x, minimum=0) for x in (span if many else [span] * max(1, h))]
    if many and len(spans) != h:
        raise ValueError(f"span has {len(spans)} entries: expected a number, or one for each of the {h} heads")
    limit = k - q if max_span is None else require_integer("max_span", max_span, minimum=1)
    reaches = [min(limit, math.ceil(x) + math.ceil(ramp)) for x in spans]
    reach, before = max(reaches), k - q  # the largest in use, keys before the first query
    pairs = b * sum(_within(q, before, x) for x in reaches) * (h // max(1, len(reaches)))
    rows = rows_of_tile(reach)
    columns = q * (reach + rows - 1) - (rows - q % rows) * (q % rows) * bool(q % rows)  # the last tile is narrower
    short = max(
        0, min(-(-q // rows), -(-(reach - before) // rows))
    )  # tiles whose first columns lie before the first key
    cut = sum(min(rows, q - t * rows) * (reach - before - t * rows) for t in range(short))
    computed = b * h * (columns - cut)
    by_distance, slots = b * h * q * reach * bool(positions), b * h * q * n
    inputs = Elements(storage=b * h * (q * d + k * (d + e)))
    results = Elements(storage=b * h * q * e, compute=b * h * q)
    tile = Elements(compute=4 * h * rows * (reach + rows))

    def counted(channels: int, position: int, **moved: Any) -> Pass:
        return Pass(
            multiplies=pairs * (channels + position * bool(positions)) + slots * channels,
            computed=computed * channels + by_distance * position + slots * channels,
            elementwise=(pairs + slots) * 8,
            **moved,
        )

    return Counts(
        forward=counted(d + e, d, read=inputs, written=results, peak=results + tile),
        backward=counted(
            3 * d + 2 * e,
            3 * d,
            read=inputs + results + Elements(storage=b * h * q * e),
            written=inputs,
            peak=inputs + tile,
        ),
        saved=inputs + results,
        parameters=h + d * limit * bool(positions) + h * n * (d + e),
    )


def _within(q: int, before: int, reach: int) -> int:
    """Pairs of q queries, the first of which has ``before`` keys before it and each next one more, at most ``reach`` each."""
    short = max(0, min(q, reach - before))
    return short * before + short * (short - 1) // 2 + (q - short) * reach


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    q: int = 5,
    k: int = 12,
    d: int = 4,
    e: int = 3,
    n: int = 0,
    max_span: int | None = None,
    ramp: float = 2.5,
    **settings: Any,
) -> dict[str, Any]:
    """Normal arrays, spans spread over [0, max_span], a position table, n persistent slots; options are passed through."""
    normal = rng.standard_normal
    limit = max_span or max(1, k - q)
    found = {
        "q": normal((b, h, q, d)), "k": normal((b, h, k, d)), "v": normal((b, h, k, e)), "span": limit * rng.random(h),
        "key_positions": normal((d, limit)), "max_span": limit, "ramp": ramp,
    }  # fmt: skip
    if n:
        found.update(persistent_keys=normal((h, n, d)), persistent_values=normal((h, n, e)))
    return {**found, **settings}


_PROBES = (
    {
        "says": "spans of whole tokens: both ends of the ramp are hit",
        "h": 3, "q": 5, "k": 17, "span": np.array([4.0, 0.0, 7.0]), "ramp": 3.0, "max_span": 12,
    },
    {
        "says": "a short history: the first queries reach back beyond the first key",
        "h": 3, "q": 14, "k": 17, "span": np.array([2.5, 9.25, 6.0]), "ramp": 2.0, "max_span": 11,
    },
    {"says": "persistent slots", "h": 3, "q": 6, "k": 19, "n": 2, "ramp": 2.5},
    {"says": "the released form", "h": 3, "q": 6, "k": 19, "distance_origin": 0, "renormalize_eps": 1e-3, "ramp": 2.5},
)  # fmt: skip

adaptive_span_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="adaptive_span_attention",
    differentiable=("q", "k", "v", "span", "key_positions", "persistent_keys", "persistent_values", "scale"),
    outputs=("output", "lse"),
    probes=_PROBES,
)


def _penalty_forward(span: Any, *, coefficient: float, max_span: int) -> tuple[Result, Any]:
    """Penalty on spans: coefficient * mean over heads of the span in tokens (over queries too, for a span per query).

    Parameters
    ----------
    span : array (h,) or (..., h, q)
        Tokens.
    coefficient : float
        2e-6 in the paper, 0.5e-6 at max_span 8192; summed over layers by the caller.
    max_span : int
        Only checks the spans.

    Source: Sukhbaatar et al. 2019, arXiv:1905.07799, equation 4, with spans in tokens.
    """
    require_number("coefficient", coefficient)
    require_integer("max_span", max_span, minimum=1)
    require_array("span", span, axes=1)
    if 0 in span.shape:
        raise ValueError(f"span has shape {tuple(span.shape)}: expected at least one span")
    xp = namespace(span)
    if not bool(xp.all((real(span) >= 0) & (real(span) <= max_span))):
        raise ValueError(f"span is {span}: expected within [0, max_span] = [0, {max_span}] tokens")
    count = math.prod(span.shape)
    return Result(output=coefficient * xp.sum(span) / count), (span, coefficient / count)


def _penalty_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    span, share = saved
    if output is None:
        return {}
    return {"span": namespace(span).zeros_like(span) + output * share}


span_penalty = function(_penalty_forward, _penalty_backward, name="span_penalty", differentiable=("span",))
