"""Gates of recurrences: log decays from a layer's projections, and the lambda of differential attention.

    softplus     gamma = -exp(a_log) softplus(z + bias)                  Mamba-2, Gated DeltaNet, Kimi Delta Attention
    bounded      gamma = lower_bound sigmoid(exp(a_log) (z + bias))      KDA's bounded gate; RWKV-7 with -exp(-1/2)
    logsigmoid   gamma = log sigmoid(z + bias) / temperature             GLA (temperature 16), forgetting attention
    exp          gamma = -exp(z + bias)                                  RWKV-6, RWKV-LM's raw w

Axes: those of z, whatever they are; ``a_log`` and ``bias`` broadcast to them (one a head: (g,1) for z (...,g,t), (g,1,1) for
z (...,g,t,d)).
"""

import math
from typing import Any

import numpy as np

from refattn.arrays import (
    is_array,
    namespace,
    real,
    require_array,
    require_axes,
    require_integer,
    require_number,
    require_one_of,
    sum_to_shape,
)
from refattn.contraction import einsum
from refattn.mechanism import function
from refattn.records import Result

__all__ = ["differential_lambda", "differential_lambda_init", "log_decay"]

FORMS = ("softplus", "bounded", "logsigmoid", "exp")


def _log_decay_forward(
    z: Any,
    *,
    form: str = "softplus",
    a_log: Any = 0.0,
    bias: Any = 0.0,
    lower_bound: float | None = None,
    temperature: float = 1.0,
    backend: Any,
) -> tuple[Result, Any]:
    """The log decay of a gate, at most 0.

    Parameters
    ----------
    z : array
        What a layer projects.
    form : {"softplus", "bounded", "logsigmoid", "exp"}
    a_log : array that broadcasts to z, or a number
        Log of the factor, of "softplus" and "bounded" alone.
    bias : array that broadcasts to z, or a number
        Added to z.
    lower_bound : float
        Below 0; of "bounded", which requires it.
    temperature : float
        Divides, of "logsigmoid" alone.

    Returns
    -------
    output : array of z's shape

    Raises
    ------
    ValueError
        An unknown form, an option that the form does not have, shapes that do not broadcast.
    """
    require_array("z", z)
    a_log, bias = (0.0 if x is None else x for x in (a_log, bias))
    require_one_of("form", form, FORMS)
    temperature = require_number("temperature", temperature, above=0)
    if form not in ("softplus", "bounded") and (is_array(a_log) or a_log != 0):
        raise ValueError(f"a_log is given: expected form 'softplus' or 'bounded' with it, not {form!r}")
    if form != "logsigmoid" and temperature != 1:
        raise ValueError(f"temperature is {temperature}: expected form 'logsigmoid' with it, not {form!r}")
    if form == "bounded":
        if lower_bound is None:
            raise ValueError("lower_bound is missing: expected a number below 0 with form 'bounded'")
        lower_bound = require_number("lower_bound", lower_bound, below=0)
    elif lower_bound is not None:
        raise ValueError(f"lower_bound is {lower_bound}: expected form 'bounded' with it, not {form!r}")
    xp = namespace(z)
    for name, x in (("a_log", a_log), ("bias", bias)):
        if is_array(x):
            _require_fits(name, x, z)
    with backend.quiet():
        y = z + bias
        factor: Any = xp.exp(a_log + xp.zeros_like(z)) if form in ("softplus", "bounded") else None
        if form == "softplus":
            output = -factor * _softplus(y)
        elif form == "bounded":
            output = lower_bound * _sigmoid(_times(factor, y))
        elif form == "logsigmoid":
            output = -_softplus(-y) / temperature
        else:
            output = -xp.exp(y)
    return Result(output=output), (y, factor, output, form, lower_bound, temperature, a_log, bias, backend)


def _log_decay_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """dz of each form;  softplus: da_log = sum gamma dgamma;  bounded: da_log = sum s ds with s = exp(a_log) (z + bias)."""
    *pieces, backend = saved
    if output is None:
        return {}
    with backend.quiet():
        return _gradients(output, *pieces)


def _gradients(
    output: Any,
    y: Any,
    factor: Any,
    gamma: Any,
    form: str,
    lower_bound: Any,
    temperature: float,
    a_log: Any,
    bias: Any,
) -> dict[str, Any]:
    xp = namespace(y)
    d_log = None
    if form == "softplus":
        d_z, d_log = -factor * _sigmoid(y) * output, gamma * output
    elif form == "bounded":
        s = _times(factor, y)
        slope = lower_bound * _sigmoid(s) * _sigmoid(-s)
        flat = slope == 0  # saturated: no factor, however large, brings anything back
        d_s = xp.where(flat, xp.zeros_like(slope), slope * output)
        d_z = xp.where(flat, xp.zeros_like(slope), d_s * xp.where(flat, xp.ones_like(factor), factor))
        d_log = xp.where(flat, xp.zeros_like(slope), d_s * xp.where(flat, xp.ones_like(s), s))
    elif form == "logsigmoid":
        d_z = _sigmoid(-y) * output / temperature
    else:
        d_z = gamma * output
    gradients = {"z": d_z}
    for name, x, d in (("bias", bias, d_z), ("a_log", a_log, d_log)):
        if d is not None:
            gradients[name] = sum_to_shape(d, tuple(x.shape) if is_array(x) else ())
    return gradients


def _require_fits(name: str, x: Any, z: Any) -> None:
    try:
        fits = np.broadcast_shapes(tuple(x.shape), tuple(z.shape)) == tuple(z.shape)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: expected one that broadcasts to that of z {tuple(z.shape)}"
        )


def _times(factor: Any, y: Any) -> Any:
    """factor y, 0 where y is 0 even if the factor overflows."""
    xp = namespace(y)
    return xp.where(y == 0, y, factor * xp.where(y == 0, xp.ones_like(y), y))


def _softplus(x: Any) -> Any:
    """log(1 + exp(x)) without overflow."""
    xp = namespace(x)
    above = real(x) > 0
    return xp.where(above, x, xp.zeros_like(x)) + xp.log1p(xp.exp(xp.where(above, -x, x)))


def _sigmoid(x: Any) -> Any:
    xp = namespace(x)
    above = real(x) > 0
    e = xp.exp(xp.where(above, -x, x))
    return xp.where(above, xp.ones_like(e), e) / (1 + e)


log_decay = function(
    _log_decay_forward, _log_decay_backward, name="log_decay", differentiable=("z", "a_log", "bias"), primary=("z",)
)


def _differential_lambda_forward(lq1: Any, lk1: Any, lq2: Any, lk2: Any, *, lambda_init: float) -> tuple[Result, Any]:
    """exp(lq1.lk1) - exp(lq2.lk2) + lambda_init: the factor of the second map of differential attention.

    Parameters
    ----------
    lq1, lk1, lq2, lk2 : arrays (d,)
    lambda_init : float
        Where it starts; :func:`differential_lambda_init` gives that of the paper.

    Returns
    -------
    output : array ()
        Ye et al. 2024, arXiv:2410.05258, equation 2.
    """
    lambda_init = require_number("lambda_init", lambda_init)
    given = {"lq1": lq1, "lk1": lk1, "lq2": lq2, "lk2": lk2}
    require_axes(**{name: (x, "d") for name, x in given.items()})
    xp = namespace(lq1)
    parts = tuple(xp.exp(einsum("d,d->", *pair)) for pair in ((lq1, lk1), (lq2, lk2)))
    return Result(output=parts[0] - parts[1] + lambda_init), (given, parts)


def _differential_lambda_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """dlq1 = d exp(lq1.lk1) lk1, and so on; the second pair with the other sign."""
    given, (first, second) = saved
    if output is None:
        return {}
    first, second = output * first, -output * second
    return {
        "lq1": first * given["lk1"], "lk1": first * given["lq1"], "lq2": second * given["lk2"], "lk2": second * given["lq2"],
    }  # fmt: skip


def differential_lambda_init(layer: int) -> float:
    """0.8 - 0.6 exp(-0.3 layer), the layers counted from 0 (Ye et al. 2024, arXiv:2410.05258, section 2.1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * require_integer("layer", layer, minimum=0))


differential_lambda = function(
    _differential_lambda_forward,
    _differential_lambda_backward,
    name="differential_lambda",
    differentiable=("lq1", "lk1", "lq2", "lk2"),
)
