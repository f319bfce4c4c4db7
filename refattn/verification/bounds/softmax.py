"""Derived bounds, where a call is one softmax over scale q.k: what :mod:`refattn.precision.softmax` is asked, and of what.

Whether a call is one is checked on its own numbers, not assumed: the kept weights must be the softmax of the kept logits,
the logits those of q, k and the options, and the output the weights times v.  So the same formulas judge every mechanism
with ``keep_weights`` that only chooses who may see whom.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from refattn.mechanism import Mechanism
from refattn.precision import Bounds, Rounding, SoftmaxCall, softmax_bounds
from refattn.verification import conventions as conventions_
from refattn.verification.conventions.reference import distance
from refattn.verification.question import Question

__all__ = ["derived_bounds", "keeps_weights"]

_COVERED = ("q", "k", "v", "bias", "scale", "softcap", "alibi_slopes", "sinks")
"""Arguments whose gradients have a derived bound."""


def keeps_weights(mechanism: Mechanism) -> bool:
    """Whether the forward can show the weights and logits that derived bounds are made of."""
    return (
        "keep_weights" in mechanism.options
        and {"q", "k", "v"} <= set(mechanism.positional)
        and "lse" in mechanism.outputs
    )


def derived_bounds(question: Question, exact: Mapping[str, Any], result: Any) -> dict[str, Bounds]:
    """Bounds by array name, in the conventions of the question; empty where the call is no softmax of scale q.k.

    Parameters
    ----------
    exact : mapping
        The arguments in float64.
    result : Result
        Of these arguments; with the weights kept, or it is asked for once more without dropout.
    """
    if not keeps_weights(question.mechanism):
        return {}
    if "weights" not in result:
        undropped = {n: x for n, x in exact.items() if n not in ("dropout_mask", "dropout_rate")}
        with np.errstate(all="ignore"):
            kept: Any = question.mechanism.forward(**undropped, keep_weights=True)
        kept = kept if "weights" in kept else None
    else:
        kept = result
    call = None if kept is None else _call(question, exact, kept)
    if call is None or not _is_softmax(call, kept.output):
        return {}
    factor = None
    if exact.get("dropout_mask") is not None:
        factor = np.asarray(exact["dropout_mask"], dtype=float) / (1.0 - exact.get("dropout_rate", 0.0))
        call = dataclasses.replace(call, factor=factor)
    follow = question.conventions
    cotangents = conventions_.reference_cotangents(question.cotangents64, follow)
    wrt = [n for n in question.wrt if n in _COVERED] if question.cotangents else []
    bounds = softmax_bounds(call, rounding(question), cotangents.get("output"), cotangents.get("lse"), wrt)
    if follow.lse_base == "2":
        bounds["lse"] = _to_base_2(bounds["lse"], np.asarray(result.lse), rounding(question).accumulate)
    if follow.empty_rows == "mean":
        bounds |= _with_mean_rows(question, exact, result, bounds)
    return bounds


def rounding(question: Question) -> Rounding:
    """Units of the candidate's arithmetic, declared allowances included."""
    follow = question.conventions
    return Rounding.of(question.dtype, compute=follow.compute, scores=follow.scores, allow=dict(follow.allow or ()))


def _call(question: Question, exact: Mapping[str, Any], kept: Any) -> SoftmaxCall | None:
    q, k, v = (exact[n] for n in ("q", "k", "v"))
    h, g = q.shape[-3], k.shape[-3]
    weights, logits = np.asarray(kept.weights), np.asarray(kept.logits)
    if weights.shape != logits.shape or weights.shape[-3:] != (h, q.shape[-2], k.shape[-2]) or h % g:
        return None
    slopes, bias, signed = exact.get("alibi_slopes"), exact.get("bias"), None
    if slopes is not None:
        signed = -np.abs(distance(exact, exact))
    elif question.options.get("alibi_slopes") is not None:  # signed by convention: the reference has it in its bias
        slopes, bias = question.options["alibi_slopes"], question.options.get("bias")
        signed = distance(exact, exact)
    return SoftmaxCall(
        q=q,
        k=k,
        v=v,
        logits=logits,
        weights=weights,
        heads=[i % g for i in range(h)] if exact.get("head_map") == "tile" else None,
        scale=_number(exact.get("scale")),
        softcap=_number(exact.get("softcap")),
        softcap_after_bias=bool(exact.get("softcap_after_bias", False)),
        bias=None if bias is None else np.asarray(bias, dtype=np.float64),
        slopes=None if slopes is None else np.asarray(slopes, dtype=np.float64),
        distance=None if signed is None else np.asarray(signed, dtype=np.float64),
        sinks=None if exact.get("sinks") is None else np.asarray(exact["sinks"], dtype=np.float64),
        lse_includes_sinks=exact.get("lse_includes_sinks", True) is not False,
    )


def _number(x: Any) -> float | None:
    return None if x is None else float(x)


def _is_softmax(call: SoftmaxCall, output: Any) -> bool:
    """Whether logits, weights and output are those of one softmax of scale q.k."""
    heads = call.q.shape[-3]
    order = np.arange(heads) // (heads // call.k.shape[-3]) if call.heads is None else np.asarray(call.heads)
    q, k, v = (np.where(np.isfinite(x), x, 0.0) for x in (call.q, call.k, call.v))
    k, v = k[..., order, :, :], v[..., order, :, :]
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    with np.errstate(all="ignore"):
        sure = (call.weights > 0) & np.isfinite(call.logits)
        x = scale * np.einsum("...qd,...kd->...qk", q, k, optimize=True)
        size = np.abs(scale) * np.einsum("...qd,...kd->...qk", np.abs(q), np.abs(k), optimize=True)
        added = np.zeros(()) if call.bias is None else call.bias
        if call.slopes is not None:
            added = added + call.slopes[:, None, None] * call.distance
        if call.softcap is None:
            x = x + added
        elif call.softcap_after_bias:
            x = call.softcap * np.tanh((x + added) / call.softcap)
        else:
            x = call.softcap * np.tanh(x / call.softcap) + added
        if not (np.abs(x - call.logits) <= 1e-10 * (size + np.abs(added) + 1))[sure].all():
            return False
        likely = np.where(sure, call.weights, 0.0)
        top = np.where(likely == likely.max(axis=-1, keepdims=True, initial=0.0), call.logits - np.log(likely), -np.inf)
        softmax = np.exp(call.logits - top.max(axis=-1, keepdims=True, initial=-np.inf))
        sure &= call.weights > 1e-290  # below, float64 itself is coarse
        if not np.allclose(call.weights[sure], softmax[sure], rtol=1e-6, atol=0):  # weighted otherwise, as by a ramp
            return False
        weighted = np.einsum("...qk,...ke->...qe", np.where(sure, call.weights, 0.0), v, optimize=True)
        finite = np.isfinite(output)
    return output.shape == weighted.shape and np.allclose(weighted[finite], output[finite], rtol=1e-9, atol=1e-9)


def _to_base_2(bounds: Bounds, lse: np.ndarray, unit: float) -> Bounds:
    """The lse over ln 2: one rounding more."""
    last = unit * np.abs(np.where(np.isfinite(lse), lse, 0.0)) / math.log(2.0)
    return Bounds(np.hypot(bounds.rss / math.log(2.0), last), bounds.worst / math.log(2.0) + 2 * last)


def _with_mean_rows(
    question: Question, exact: Mapping[str, Any], result: Any, bounds: Mapping[str, Bounds]
) -> dict[str, Bounds]:
    """Bounds of ``output`` and ``d_v`` where empty rows give the mean of v: weights 1/k, without errors of logits."""
    empty = np.isneginf(np.asarray(result.lse))
    if not empty.any():
        return {}
    units, v = rounding(question), np.where(np.isfinite(exact["v"]), exact["v"], 0.0)
    heads, groups, n = result.output.shape[-3], v.shape[-3], v.shape[-2]
    order = np.arange(heads) % groups if exact.get("head_map") == "tile" else np.arange(heads) // (heads // groups)
    narrow = units.operands**2 + units.inputs**2 + units.scores**2
    u = units.accumulate

    def grown(squares: np.ndarray, total: np.ndarray, count: int) -> np.ndarray:
        square = (u**2 * (count + 6) + narrow) * squares + (u**2 * (count + 4) + units.stored**2) * total**2
        return np.sqrt(square) + units.tiny

    mean = np.take(v.mean(axis=-2, keepdims=True), order, axis=-3)
    own = grown(np.take((v**2).sum(axis=-2, keepdims=True), order, axis=-3) / n**2, mean, n)
    rows, output = empty[..., None], bounds["output"]
    found = {
        "output": Bounds(*(np.where(rows, own * times, x) for x, times in zip(output, (1.0, n + 8.0), strict=True)))
    }
    d_output = question.cotangents64.get("output")
    if "d_v" in bounds and d_output is not None:
        share = np.where(rows, d_output, 0.0) / n
        member = np.equal.outer(order, np.arange(groups)).astype(float)
        squares, total = (np.einsum("...hqe,hg->...ge", x, member, optimize=True) for x in (share**2, share))
        more = grown(squares, total, share.shape[-2] * heads // groups)[..., None, :]
        d_v = bounds["d_v"]
        found["d_v"] = Bounds(np.hypot(d_v.rss, more), d_v.worst + (share.shape[-2] + 8.0) * more)
    return found
