"""Softmax with empty rows, logsumexp, merging of partial results, layer norm: each with its backward.

A row that sees nothing has weights 0 and lse -inf.  Masked entries are selected away, never multiplied by zero, so NaN
and infinity behind a mask reach nothing.  Complex arrays work (complex step): maxima are those of the real part.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import dtype_name, is_bool, namespace, real, require_array, require_axes
from refattn.mechanism import function
from refattn.records import Result

__all__ = [
    "Partial",
    "layer_norm",
    "layer_norm_backward",
    "logsumexp",
    "lse_of",
    "masked_softmax",
    "masked_softmax_backward",
    "merge",
    "merge_backward",
    "merged",
    "partial_of_lse",
    "row_maximum",
    "shares",
    "softmax",
    "unit_norm",
    "unit_norm_backward",
]


def row_maximum(logits: Any) -> tuple[Any, Any]:
    """Maximum over the last axis (-inf for no entries), and a finite shift for exp: 0 where the maximum is -inf."""
    xp = namespace(logits)
    x = real(logits)
    if x.shape[-1] == 0:
        maximum = xp.full(x.shape[:-1], -math.inf, dtype=x.dtype)
    else:
        maximum = xp.max(x, axis=-1)
    return maximum, xp.where(maximum == -math.inf, xp.zeros_like(maximum), maximum)


def masked_softmax(logits: Any, visible: Any = None) -> tuple[Any, Any]:
    """Weights and lse over the last axis; ``visible`` broadcasts to ``logits``, True = may attend."""
    xp = namespace(logits)
    if visible is not None:
        logits = xp.where(visible, logits, xp.full_like(logits, -math.inf))
    maximum, shift = row_maximum(logits)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = xp.exp(logits - xp.expand_dims(shift, axis=-1))
        if visible is not None:
            weights = xp.where(visible, weights, xp.zeros_like(weights))
        total = xp.sum(weights, axis=-1, dtype=weights.dtype)
        empty = maximum == -math.inf
        safe = xp.where(empty, xp.ones_like(total), total)
        lse = xp.where(empty, xp.full_like(total, -math.inf), xp.log(safe) + shift)
    return weights / xp.expand_dims(safe, axis=-1), lse


def masked_softmax_backward(weights: Any, d_weights: Any = None, d_lse: Any = None) -> Any:
    """Cotangent of the logits: P (dP - rowsum(P dP) + d_lse), 0 where P is 0."""
    xp = namespace(weights)
    inner = xp.zeros_like(weights)
    if d_weights is not None:
        seen = xp.where(weights == 0, xp.zeros_like(weights), d_weights)
        inner = seen - xp.sum(weights * seen, axis=-1, keepdims=True)
    if d_lse is not None:
        inner = inner + xp.expand_dims(d_lse, axis=-1)
    return xp.where(weights == 0, xp.zeros_like(weights), weights * inner)


def _softmax_forward(x: Any, *, mask: Any = None) -> tuple[Result, Any]:
    """Softmax over the last axis: exp(x) / sum exp(x).

    Parameters
    ----------
    x : array (..., k)
        Logits.
    mask : bool array, optional
        Broadcasts to ``x``; True = may attend.  A row without a True gives zeros.
    """
    _require_row(x, mask)
    weights, _ = masked_softmax(x, mask)
    return Result(output=weights), weights


def _softmax_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    return {"x": None if output is None else masked_softmax_backward(saved, output)}


def _logsumexp_forward(x: Any, *, mask: Any = None) -> tuple[Result, Any]:
    """ln sum exp(x) over the last axis, -inf for a row without visible entries.

    Parameters
    ----------
    x : array (..., k)
        Logits.
    mask : bool array, optional
        Broadcasts to ``x``; True = may attend.
    """
    _require_row(x, mask)
    weights, lse = masked_softmax(x, mask)
    return Result(output=lse), weights


def _require_row(x: Any, mask: Any) -> None:
    if x.ndim == 0:
        raise ValueError("x has shape (): expected at least one axis, the one that is summed over")
    if mask is not None:
        require_array("mask", mask)
        if not is_bool(mask.dtype):
            raise TypeError(f"mask has dtype {dtype_name(mask.dtype)}: expected bool, True = may attend")
        shape = tuple(mask.shape)
        if len(shape) > x.ndim or any(m not in (1, n) for m, n in zip(shape[::-1], x.shape[::-1], strict=False)):
            raise ValueError(f"mask has shape {shape}: it does not broadcast to that of x, {tuple(x.shape)}")


def _logsumexp_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    return {"x": None if output is None else masked_softmax_backward(saved, None, output)}


softmax = function(_softmax_forward, _softmax_backward, name="softmax", differentiable=("x",))
logsumexp = function(_logsumexp_forward, _logsumexp_backward, name="logsumexp", differentiable=("x",))


class Partial(NamedTuple):
    """Softmax attention over some of the keys: all that merging needs, exact however large the logits are.

    The weights of row i are exp(logits[i] - maximum[i]) / row_sum[i], and ``output`` (..., q, e) is their product with the
    values.  ``maximum`` (..., q) is real (that of the real parts), -inf in a row that sees nothing, where ``output`` and
    ``row_sum`` are 0.  The log-sum-exp is maximum + ln(row_sum), and not the way to carry them: at logits of 1e4 float32
    rounds it in the third decimal.  What comes with nothing but an lse is (output, lse, 1 where it sees something).
    """

    output: Any
    maximum: Any
    row_sum: Any


def lse_of(maximum: Any, row_sum: Any) -> Any:
    """maximum + ln(row_sum), -inf for a row that sees nothing."""
    xp = namespace(row_sum)
    empty = maximum == -math.inf
    shift = xp.where(empty, xp.zeros_like(maximum), maximum)
    total = xp.where(empty, xp.ones_like(row_sum), row_sum)
    return xp.where(empty, xp.full_like(total, -math.inf), xp.log(total) + shift)


def partial_of_lse(output: Any, lse: Any) -> Partial:
    """What is known of a result that comes with its log-sum-exp alone."""
    xp = namespace(lse)
    seen = real(lse) != -math.inf
    shift = real(lse)
    rest = xp.where(seen, lse - xp.where(seen, shift, xp.zeros_like(shift)), xp.zeros_like(lse))  # 0, or imaginary
    return Partial(output, shift, xp.where(seen, xp.exp(rest), xp.zeros_like(lse)))


def shares(parts: Sequence[Partial]) -> tuple[list[Any], Any, Any]:
    """How much of each row's weight every part has, and the maximum and sum of all of them."""
    xp = namespace(parts[0].row_sum)
    maximum = functools.reduce(xp.maximum, (part.maximum for part in parts))
    empty = maximum == -math.inf
    shift = xp.where(empty, xp.zeros_like(maximum), maximum)
    sums = [part.row_sum * xp.exp(part.maximum - shift) for part in parts]
    row_sum = functools.reduce(operator.add, sums)
    safe = xp.where(empty, xp.ones_like(row_sum), row_sum)
    return [x / safe for x in sums], maximum, row_sum


def merged(*parts: Partial) -> Partial:
    """Attention over several disjoint sets of keys as one; a part that sees nothing leaves the others bit for bit."""
    xp = namespace(parts[0].row_sum)
    weights, maximum, row_sum = shares(parts)
    output = None
    for weight, part in zip(weights, parts, strict=True):
        weight = xp.astype(weight, part.output.dtype, copy=False)[..., None]
        share = xp.where((part.maximum == -math.inf)[..., None], xp.zeros_like(part.output), weight * part.output)
        output = share if output is None else output + share
    return Partial(output, maximum, row_sum)


def merge(outputs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Join attention over disjoint key sets: lse = ln sum exp(lse_n), output = sum exp(lse_n - lse) output_n.

    Parameters
    ----------
    outputs : sequence of arrays (..., q, e)
        Normalised outputs of each part.
    lses : sequence of arrays (..., q)
        Their natural log-sum-exps; -inf (with output 0) is the neutral element and leaves the other parts bit for bit.

    Returns
    -------
    output, lse : arrays (..., q, e) and (..., q)

    Raises
    ------
    ValueError
        If the sequences are empty, differ in length, or shapes disagree.
    """
    for name, parts in (("outputs", outputs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise TypeError(f"{name} is a {type(parts).__name__}: expected a list of arrays, one for each part")
    if len(outputs) != len(lses) or not outputs:
        raise ValueError(f"merge got {len(outputs)} outputs and {len(lses)} lses: expected as many, at least one")
    require_axes(
        **{f"outputs[{n}]": (x, "... q e") for n, x in enumerate(outputs)},
        **{f"lses[{n}]": (x, "... q") for n, x in enumerate(lses)},
    )
    namespace(*outputs, *lses)
    with np.errstate(invalid="ignore", divide="ignore"):
        whole = merged(*(partial_of_lse(x, lse) for x, lse in zip(outputs, lses, strict=True)))
        return whole.output, lse_of(whole.maximum, whole.row_sum)


def merge_backward(
    outputs: Sequence[Any], lses: Sequence[Any], d_output: Any, d_lse: Any
) -> tuple[list[Any], list[Any]]:
    """Cotangents of the parts: w_n d_output and w_n (d_output . (output_n - output) + d_lse), w_n = exp(lse_n - lse)."""
    xp = namespace(*outputs, *lses)
    with np.errstate(invalid="ignore", divide="ignore"):
        parts = [partial_of_lse(x, lse) for x, lse in zip(outputs, lses, strict=True)]
        output, weights = merged(*parts).output, shares(parts)[0]
    d_outputs = [xp.expand_dims(w, axis=-1) * d_output for w in weights]
    d_lses = [w * (xp.sum(d_output * (x - output), axis=-1) + d_lse) for w, x in zip(weights, outputs, strict=True)]
    return d_outputs, d_lses


def _mean(x: Any) -> Any:
    """Over the last axis, which stays; 0 of nothing."""
    return namespace(x).sum(x, axis=-1, keepdims=True, dtype=x.dtype) / max(1, x.shape[-1])


def layer_norm(x: Any, eps: float) -> tuple[Any, Any]:
    """(x - mean) / sqrt(var + eps) over the last axis, and the factor 1 / sqrt(var + eps)."""
    centred = x - _mean(x)
    factor = (_mean(centred * centred) + eps) ** -0.5
    return centred * factor, factor


def layer_norm_backward(normal: Any, factor: Any, d_normal: Any) -> Any:
    """Cotangent of x from that of its normalised form."""
    return factor * (d_normal - _mean(d_normal) - normal * _mean(d_normal * normal))


def unit_norm(x: Any, eps: float) -> tuple[Any, Any]:
    """x / max(||x||, eps) over the last axis, and the factor 1 / max(||x||, eps)."""
    xp = namespace(x)
    norm = xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True))
    factor = 1 / xp.where(real(norm) > eps, norm, xp.full_like(norm, eps))
    return x * factor, factor


def unit_norm_backward(normal: Any, factor: Any, d_normal: Any, eps: float) -> Any:
    """Cotangent of x: factor (d - normal (normal . d)), without the second term where ||x|| is below eps."""
    xp = namespace(normal)
    along = xp.sum(normal * d_normal, axis=-1, keepdims=True)
    along = xp.where(real(factor) < 1 / eps, along, xp.zeros_like(along))
    d_x = d_normal - normal * along
    d_x *= factor
    return d_x
