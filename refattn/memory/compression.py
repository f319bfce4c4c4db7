"""Fewer rows in place of many: means, maxima, convolutions, the rows that were used most."""

from typing import Any

from refattn.arrays import (
    broadcast_leading,
    device,
    namespace,
    real,
    require_axes,
    require_integer,
    require_one_of,
)
from refattn.contraction import einsum
from refattn.mechanism import function
from refattn.records import Result

__all__ = ["compress"]


METHODS = ("mean", "max", "conv", "dilated_conv", "most_used")


def _compress_forward(
    old: Any,
    *,
    rate: int,
    method: str = "mean",
    weight: Any = None,
    bias: Any = None,
    usage: Any = None,
    dilation: int = 2,
    backend: Any,
) -> tuple[Result, Any]:
    """floor(n / rate) rows in place of n; the n mod rate newest rows are dropped first.

    Parameters
    ----------
    old : array (..., n, m)
        Rows, oldest first.
    rate : int
    method : {"mean", "max", "conv", "dilated_conv", "most_used"}
        "mean", "max": of each span of ``rate`` rows, by channel (ties of max: the gradient goes to the oldest).
        "conv": row c is bias[o] + sum over a, m of weight[o,m,a] old[c rate + a, m].
        "dilated_conv": as "conv", but tap a is read ``(taps - 1 - a) dilation`` rows before the span's last one, so that it
        reaches into earlier spans; rows before the first are zeros.  Any number of taps.  (The paper names a dilated
        convolution and does not say which.)
        "most_used": the rows of the largest usage, in their old order; of equal ones the newer.
    weight : array (o, m, rate)
        Of the convolutions; o = m where the result is to be a memory.
    bias : array (o,), optional
    usage : array (..., n)
        Average attention each row has received; a constant.
    dilation : int
        Of "dilated_conv".

    Returns
    -------
    output : array (..., n // rate, m or o)

    Raises
    ------
    ValueError
        A rate below 1, a weight or usage that is missing, too many or of another shape.
    """
    rate = require_integer("rate", rate, minimum=1)
    require_one_of("method", method, METHODS)
    if old.ndim < 2:
        raise ValueError(f"old has shape {tuple(old.shape)}: expected (..., n, m)")
    convolution = method in ("conv", "dilated_conv")
    for name, a, needed in (("weight", weight, convolution), ("usage", usage, method == "most_used")):
        if needed != (a is not None):
            raise ValueError(
                f"{name} is {'missing' if needed else 'given'}: method={method!r} {'needs' if needed else 'has no'} {name}"
            )
    if bias is not None and not convolution:
        raise ValueError(f"bias is given: method={method!r} has no bias")
    xp = namespace(old)
    *lead, n, m = old.shape
    count = n // rate
    rows = old[..., : count * rate, :]
    spans = xp.reshape(rows, (*lead, count, rate, m))
    if method == "mean":
        return Result(output=xp.sum(spans, axis=-2) / rate), (old, method, rate)
    if method == "max":
        index = xp.argmax(real(spans), axis=-2, keepdims=True)
        chosen = xp.arange(rate)[:, None] == index
        output = xp.sum(xp.where(chosen, spans, xp.zeros_like(spans)), axis=-2)
        return Result(output=output), (old, method, rate, chosen)
    if method == "most_used":
        if tuple(usage.shape[-1:]) != (n,):
            raise ValueError(f"usage has shape {tuple(usage.shape)}: expected (..., {n}), one number per row of old")
        broadcast_leading(old=(old, 2), usage=(usage, 1))
        used = xp.broadcast_to(real(usage)[..., : count * rate], (*lead, count * rate))
        order = backend.top_k(xp.flip(used, axis=-1), count)  # from the end: of equal ones the newer comes first
        kept = xp.sort(count * rate - 1 - order, axis=-1)
        chosen = xp.arange(count * rate) == kept[..., None]  # (..., count, n)
        at = xp.broadcast_to(kept[..., None], (*lead, count, m))
        return Result(output=xp.take_along_axis(rows, at, axis=-2)), (old, method, rate, chosen)
    o, m_w, taps = require_axes(weight=(weight, "o m a")).values()
    if m_w != m or (method == "conv" and taps != rate):
        wanted = f"(o, {m}, {rate if method == 'conv' else 'taps'})"
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: expected {wanted} for old {tuple(old.shape)} at rate {rate}"
        )
    if bias is not None and tuple(bias.shape) != (o,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: expected ({o},), the outputs of weight")
    step = 1 if method == "conv" else require_integer("dilation", dilation, minimum=1)
    read = _taps(rows, count, rate, taps, step)
    output = einsum("...cam,oma->...co", read, weight)
    return Result(output=output if bias is None else output + bias), (old, method, rate, read, weight, taps, step)


def _taps(rows: Any, count: int, rate: int, taps: int, step: int) -> Any:
    """(..., count, taps, m): what every tap of every output row reads."""
    xp = namespace(rows)
    lead, m = rows.shape[:-2], rows.shape[-1]
    before = (taps - 1) * step
    padded = xp.concat([xp.zeros((*lead, before, m), dtype=rows.dtype, device=device(rows)), rows], axis=-2)
    starts = [a * step + rate - 1 for a in range(taps)]
    read = [padded[..., s : s + (count - 1) * rate + 1 : rate, :] if count else rows[..., :0, :] for s in starts]
    return xp.stack(read, axis=-2)


def _compress_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """Adjoints: spread the mean, send to the maximum, to the kept row, back through the taps."""
    old, method, rate, *rest = saved
    if output is None:
        return {}
    xp = namespace(output)
    *lead, n, m = old.shape
    count = n // rate
    gradients: dict[str, Any] = {}
    if method == "mean":
        d_rows = xp.broadcast_to(output[..., :, None, :] / rate, (*lead, count, rate, m))
    elif method == "max":
        d_rows = xp.where(rest[0], output[..., :, None, :], xp.zeros_like(output[..., :, None, :]))
    elif method == "most_used":
        d_rows = einsum("...cn,...cm->...nm", xp.astype(rest[0], output.dtype), output)
    else:
        read, weight, taps, step = rest
        gradients = {"weight": einsum("...cam,...co->oma", read, output), "bias": einsum("...co->o", output)}
        d_read = einsum("...co,oma->...cam", output, weight)
        before = (taps - 1) * step
        # tap a of row c stands at padded place a step + rate - 1 + c rate: rows of length rate, one filled
        d_rows = xp.zeros((*lead, count * rate, m), dtype=output.dtype, device=device(output))
        for a in range(taps):
            spread = xp.stack([xp.zeros_like(d_read[..., a, :])] * (rate - 1) + [d_read[..., a, :]], axis=-2)
            spread = xp.reshape(spread, (*lead, count * rate, m))
            back = min(before - a * step, count * rate)
            shifted = spread[..., back:, :]
            d_rows = d_rows + xp.concat([shifted, xp.zeros_like(spread[..., :back, :])], axis=-2)
    d_rows = xp.reshape(d_rows, (*lead, count * rate, m))
    left = xp.zeros((*lead, n - count * rate, m), dtype=output.dtype, device=device(output))
    return {"old": xp.concat([d_rows, left], axis=-2), **gradients}


compress = function(
    _compress_forward,
    _compress_backward,
    name="compress",
    differentiable=("old", "weight", "bias"),
    floating=("usage",),
    primary=("old",),
)
