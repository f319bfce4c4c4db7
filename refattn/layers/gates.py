"""RMS norm with a gate, and the gate on an attention's output, each with its gradient.

    rms(x) = x / sqrt(mean(x^2) + eps)
    rms_norm       (weight + offset) rms(x) act(gate), or (weight + offset) rms(x act(gate)) with the gate first
    output_gate    x act(gate)

Axes: ``...`` any leading axes, ``m`` channels, in ``groups`` equal parts that are normalised each for itself.
Sources: Zhang and Sennrich 2019, arXiv:1910.07467, section 4 (rms_norm); Dao and Gu 2024, arXiv:2405.21060, section 7 (its gate);
Qiu et al. 2025, arXiv:2505.06708, section 2.2 (output_gate).
"""

from typing import Any

from refattn.arrays import namespace, real, require_array, require_integer, require_number, require_one_of
from refattn.contraction import einsum
from refattn.layers.basics import require_channels
from refattn.mechanism import function
from refattn.records import Result

__all__ = ["output_gate", "rms_norm"]

GATES = ("silu", "sigmoid")


def _sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)), whose exponential never overflows."""
    xp = namespace(x)
    above = real(x) >= 0
    e = xp.exp(xp.where(above, -x, x))
    return xp.where(above, xp.ones_like(e), e) / (1 + e)


def _active(gate: Any, activation: str) -> tuple[Any, Any]:
    """act(gate) and its slope."""
    opened = _sigmoid(gate)
    closed = _sigmoid(-gate)  # 1 - opened, exact where that is small
    if activation == "sigmoid":
        return opened, opened * closed
    return gate * opened, opened * (1 + gate * closed)


def _parts(x: Any, groups: int) -> Any:
    """(..., m) as (..., groups, m / groups)."""
    return namespace(x).reshape(x, (*x.shape[:-1], groups, x.shape[-1] // groups))


def _mean(x: Any) -> Any:
    return namespace(x).sum(x, axis=-1, keepdims=True) / max(1, x.shape[-1])


def _rms_norm_forward(
    x: Any,
    weight: Any = None,
    *,
    offset: float = 0.0,
    gate: Any = None,
    gate_first: bool = False,
    activation: str = "silu",
    groups: int = 1,
    eps: float = 1e-6,
) -> tuple[Result, Any]:
    """(weight + offset) rms(x) act(gate), rms(x) = x / sqrt(mean(x^2) + eps) over the last axis.

    Parameters
    ----------
    x : array (..., m)
    weight : array (m,), optional
        Left out: 1, and no ``offset``.
    offset : float
        Added to the weight; 1 where a model stores the weight less 1.
    gate : array like x, optional
        Multiplies the normalised x by act(gate).
    gate_first : bool
        It multiplies x instead, before the norm.
    activation : {"silu", "sigmoid"}
        act: gate sigma(gate), or sigma(gate).
    groups : int
        Equal parts of the channels, each with a mean of its own.
    eps : float
        Added to the mean of the squares.

    Returns
    -------
    output : array (..., m)
    """
    require_array("x", x, axes=1)
    require_channels(x, weight=weight)
    require_number("eps", eps, minimum=0)
    require_number("offset", offset)
    require_integer("groups", groups, minimum=1)
    require_one_of("activation", activation, GATES)
    if x.shape[-1] % groups:
        raise ValueError(f"groups is {groups}: expected a divisor of {x.shape[-1]}, the channels of x")
    if gate is not None:
        require_array("gate", gate)
        if tuple(gate.shape) != tuple(x.shape):
            raise ValueError(f"gate has shape {tuple(gate.shape)}: expected {tuple(x.shape)}, that of x")
    act, slope = (None, None) if gate is None else _active(gate, activation)
    parts = _parts(x * act if gate_first and act is not None else x, groups)
    factor = (_mean(parts * parts) + eps) ** -0.5
    normal = namespace(x).reshape(parts * factor, x.shape)
    weighted = normal if weight is None else normal * (weight + offset)
    output = weighted if act is None or gate_first else weighted * act
    return Result(output=output), (x, normal, factor, weight, offset, weighted, act, slope, gate_first, groups)


def _rms_norm_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """With n = y r, r = (mean(y^2) + eps)^-1/2: dy = r (dn - n mean(dn n)), and the products around it."""
    x, normal, factor, weight, offset, weighted, act, slope, gate_first, groups = saved
    if output is None:
        return {}
    d_weighted = output if act is None or gate_first else output * act
    gradients = {"weight": einsum("...m,...m->m", normal, d_weighted)}
    d_normal = _parts(d_weighted if weight is None else d_weighted * (weight + offset), groups)
    along = _parts(normal, groups)
    d_y = factor * (d_normal - along * _mean(d_normal * along))
    d_y = namespace(x).reshape(d_y, x.shape)
    if act is None:
        return {"x": d_y, **gradients}
    if gate_first:
        return {"x": d_y * act, "gate": d_y * x * slope, **gradients}
    return {"x": d_y, "gate": output * weighted * slope, **gradients}


def _output_gate_forward(x: Any, gate: Any, *, activation: str = "sigmoid") -> tuple[Result, Any]:
    """x act(gate).

    Parameters
    ----------
    x : array
    gate : array
        Broadcasts to x: one number for a head is (..., h, t, 1).
    activation : {"sigmoid", "silu"}

    Returns
    -------
    output : array like x
    """
    require_array("x", x)
    require_array("gate", gate)
    require_one_of("activation", activation, GATES)
    shape, own = tuple(x.shape), tuple(gate.shape)
    if len(own) > len(shape) or any(m not in (1, n) for m, n in zip(reversed(own), reversed(shape), strict=False)):
        raise ValueError(f"gate has shape {own}: expected one that broadcasts to {shape}, that of x")
    act, slope = _active(gate, activation)
    return Result(output=x * act), (x, act, slope)


def _output_gate_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    x, act, slope = saved
    if output is None:
        return {}
    return {"x": output * act, "gate": output * x * slope}


rms_norm = function(_rms_norm_forward, _rms_norm_backward, name="rms_norm", differentiable=("x", "weight", "gate"))
output_gate = function(_output_gate_forward, _output_gate_backward, name="output_gate", differentiable=("x", "gate"))
