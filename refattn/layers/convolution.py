"""Short causal convolution, channel by channel, with the rows that it carries on.

    y[t,m] = act(bias[m] + sum_i weight[m,i] x^[t + i, m])      x^ = the w - 1 rows of the state, then x: the last tap meets the present

The new state is the last w - 1 rows of x^, raw: of a call shorter than that part of the old state stays.

Axes: ... any leading axes, t position, m channel, w tap.
"""

from typing import Any

from refattn.arrays import broadcast_leading, device, namespace, real, require_axes, require_one_of
from refattn.mechanism import function
from refattn.records import Result

__all__ = ["causal_convolution"]

ACTIVATIONS = (None, "silu")


def _causal_convolution_forward(
    x: Any, weight: Any, bias: Any = None, *, state: Any = None, activation: str | None = None
) -> tuple[Result, Any]:
    """Each channel convolved with its own w taps over the past.

    Parameters
    ----------
    x : array (..., t, m)
    weight : array (m, w)
        The last tap meets the present.
    bias : array (m,), optional
    state : array (..., w - 1, m), optional
        The rows before the first; left out: 0.
    activation : {None, "silu"}

    Returns
    -------
    output : array (..., t, m)
    state : array (..., w - 1, m)
        The last rows, before the activation.
    """
    sizes = require_axes(x=(x, "... t m"), weight=(weight, "m w"))
    require_one_of("activation", activation, ACTIVATIONS)
    w = sizes["w"]
    if w < 1:
        raise ValueError(f"weight has shape {tuple(weight.shape)}: expected at least one tap")
    if bias is not None:
        require_axes(sizes, bias=(bias, "m"))
    shaped = {"x": (x, 2)}
    if state is not None:
        require_axes({"m": sizes["m"], "w": w - 1}, state=(state, "... w m"))
        shaped["state"] = (state, 2)
    lead, xp = broadcast_leading(**shaped), namespace(x)
    t, m = sizes["t"], sizes["m"]
    if state is None:
        state = xp.zeros((w - 1, m), dtype=x.dtype, device=device(x))
    rows = xp.concat([xp.broadcast_to(state, (*lead, w - 1, m)), xp.broadcast_to(x, (*lead, t, m))], axis=-2)
    z = rows[..., :t, :] * weight[:, 0]
    for i in range(1, w):
        z = z + rows[..., i : i + t, :] * weight[:, i]
    if bias is not None:
        z = z + bias
    output = z * _sigmoid(z) if activation == "silu" else z
    return Result(output=output, state=rows[..., t:, :] + 0), (rows, weight, z, activation, t)


def _causal_convolution_backward(saved: Any, *, output: Any, state: Any) -> dict[str, Any]:
    """dx^ = sum_i shifted weight_i dy, and the new state's cotangent on its rows;  its first w - 1 rows are those of the old state."""
    rows, weight, z, activation, t = saved
    xp, w = namespace(rows), weight.shape[-1]
    d_z = xp.zeros_like(z) if output is None else output
    if activation == "silu":
        s = _sigmoid(z)
        d_z = d_z * s * (1 + z * (1 - s))
    d_rows = xp.zeros_like(rows)
    d_weight = []
    none = lambda n: xp.zeros((*rows.shape[:-2], n, rows.shape[-1]), dtype=rows.dtype, device=device(rows))  # noqa: E731
    for i in range(w):
        d_rows = d_rows + xp.concat([none(i), d_z * weight[:, i], none(w - 1 - i)], axis=-2)
        d_weight.append(_summed(d_z * rows[..., i : i + t, :]))
    if state is not None:
        d_rows = d_rows + xp.concat([none(t), state], axis=-2)
    return {
        "x": d_rows[..., w - 1 :, :],
        "state": d_rows[..., : w - 1, :],
        "weight": xp.stack(d_weight, axis=-1),
        "bias": _summed(d_z),
    }


def _summed(x: Any) -> Any:
    """Over all axes but the channels."""
    return namespace(x).sum(x, axis=tuple(range(x.ndim - 1)))


def _sigmoid(x: Any) -> Any:
    xp = namespace(x)
    above = real(x) > 0
    e = xp.exp(xp.where(above, -x, x))
    return xp.where(above, xp.ones_like(e), e) / (1 + e)


causal_convolution = function(
    _causal_convolution_forward,
    _causal_convolution_backward,
    name="causal_convolution",
    differentiable=("x", "weight", "bias", "state"),
    outputs=("output", "state"),
    storage=("output", "state"),
    primary=("x",),
)
