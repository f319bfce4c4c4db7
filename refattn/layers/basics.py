"""What stands between attentions: linear maps, layer norm, feed-forward, residual connections, each with its gradient.

    linear         x weight + bias
    layer_norm     (x - mean) / sqrt(var + eps) * weight + bias, over the last axis      Ba et al. 2016, arXiv:1607.06450
    feed_forward   activation(x w_1 + b_1) w_2 + b_2                                     Vaswani et al. 2017, section 3.3
    residual       x + f(x)

Axes: ... any leading axes, t position, m, i, o model channels, f feed-forward channel.  In chunks, ``feed_forward`` never
holds more than one chunk of hidden units (Kitaev et al. 2020, arXiv:2001.04451, section 3).
"""

import math
from collections.abc import Callable
from typing import Any

from refattn import normalization
from refattn.arrays import namespace, real, require_array, require_integer, require_number, require_one_of
from refattn.contraction import einsum
from refattn.mechanism import function
from refattn.records import Result

__all__ = ["feed_forward", "layer_norm", "linear", "residual"]


def _linear_forward(x: Any, weight: Any, bias: Any = None) -> tuple[Result, Any]:
    """x weight + bias.

    Parameters
    ----------
    x : array (..., i)
    weight : array (i, o)
    bias : array (o,), optional

    Returns
    -------
    output : array (..., o)
    """
    _require_affine("x", x, "weight", weight, "bias", bias)
    output = einsum("...i,io->...o", x, weight)
    return Result(output=output if bias is None else output + bias), (x, weight, bias)


def _linear_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    x, weight, bias = saved
    if output is None:
        return {}
    gradients = {"x": einsum("...o,io->...i", output, weight), "weight": einsum("...i,...o->io", x, output)}
    return gradients if bias is None else {**gradients, "bias": einsum("...o->o", output)}


def _require_affine(n_x: str, x: Any, n_w: str, weight: Any, n_b: str, bias: Any) -> None:
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"{n_w} has shape {tuple(weight.shape)}: expected (i, o) with i = {x.shape[-1] if x.ndim else '?'},"
            f" the channels of {n_x} {tuple(x.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[1],):
        raise ValueError(f"{n_b} has shape {tuple(bias.shape)}: expected ({weight.shape[1]},), the outputs of {n_w}")


def _layer_norm_forward(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> tuple[Result, Any]:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis.

    Parameters
    ----------
    x : array (..., m)
    weight, bias : arrays (m,), optional
        Left out: 1 and 0.
    eps : float
        Added to the (biased) variance.

    Returns
    -------
    output : array (..., m)
    """
    require_number("eps", eps, minimum=0)
    require_array("x", x, axes=1)
    require_channels(x, weight=weight, bias=bias)
    normal, factor = normalization.layer_norm(x, eps)
    output = normal if weight is None else normal * weight
    return Result(output=output if bias is None else output + bias), (normal, factor, weight)


def _layer_norm_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    normal, factor, weight = saved
    if output is None:
        return {}
    d_normal = output if weight is None else output * weight
    x = normalization.layer_norm_backward(normal, factor, d_normal)
    return {"x": x, "weight": einsum("...m,...m->m", normal, output), "bias": einsum("...m->m", output)}


def require_channels(x: Any, **vectors: Any) -> None:
    """Weights and biases of a norm: one number for each channel of x, or None."""
    for name, a in vectors.items():
        if a is not None and tuple(a.shape) != tuple(x.shape[-1:]):
            raise ValueError(f"{name} has shape {tuple(a.shape)}: expected {tuple(x.shape[-1:])}, the channels of x")


def _relu(x: Any, backend: Any) -> tuple[Any, Any]:
    xp = namespace(x)
    positive = real(x) > 0
    return xp.where(positive, x, xp.zeros_like(x)), xp.where(positive, xp.ones_like(x), xp.zeros_like(x))


def _gelu(x: Any, backend: Any) -> tuple[Any, Any]:
    """x Phi(x) and its slope Phi(x) + x phi(x), Phi the normal distribution function by erf."""
    xp = namespace(x)
    phi = 0.5 * (1 + backend.erf(x * math.sqrt(0.5)))
    return x * phi, phi + x * xp.exp(-0.5 * x * x) * (2 * math.pi) ** -0.5


ACTIVATIONS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {"relu": _relu, "gelu": _gelu}


def _feed_forward_forward(
    x: Any,
    w_1: Any,
    b_1: Any = None,
    w_2: Any = None,
    b_2: Any = None,
    *,
    activation: str = "relu",
    chunk: int | None = None,
    backend: Any,
) -> tuple[Result, Any]:
    """activation(x w_1 + b_1) w_2 + b_2.

    Parameters
    ----------
    x : array (..., t, m)
    w_1, b_1 : arrays (m, f), (f,)
    w_2, b_2 : arrays (f, o), (o,)
        Only the biases may be left out, or None.
    activation : {"relu", "gelu"}
        The exact Gaussian error unit x Phi(x), no approximation by tanh.
    chunk : int, optional
        Positions computed at a time, forward and backward; the backward computes their hidden units again.

    Returns
    -------
    output : array (..., t, o)
    """
    if w_2 is None:
        raise TypeError("feed_forward: the argument 'w_2' is missing")
    require_one_of("activation", activation, tuple(ACTIVATIONS))
    _require_affine("x", x, "w_1", w_1, "b_1", b_1)
    _require_affine("the hidden units of w_1", w_1, "w_2", w_2, "b_2", b_2)
    cuts: list[Any] = [...]
    if chunk is not None:
        require_integer("chunk", chunk, minimum=1)
        if x.ndim < 2:
            raise ValueError(f"chunk is {chunk} and x has shape {tuple(x.shape)}: expected (..., t, m)")
        stops = range(chunk, x.shape[-2] + chunk, chunk)
        cuts = [(..., slice(t - chunk, min(t, x.shape[-2])), slice(None)) for t in stops] or cuts
    parts, kept = [], None
    for cut in cuts:
        hidden = _affine(x[cut], w_1, b_1)
        parts.append(_affine(ACTIVATIONS[activation](hidden, backend)[0], w_2, b_2))
        kept = hidden if chunk is None else None
    output = parts[0] if len(parts) == 1 else namespace(x).concat(parts, axis=-2)
    return Result(output=output), (x, w_1, b_1, w_2, b_2, activation, cuts, kept, backend)


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    y = einsum("...i,io->...o", x, weight)
    return y if bias is None else y + bias


def _feed_forward_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """With hidden = x w_1 + b_1, y = activation(hidden): dw_2 = y^T do, dhidden = (do w_2^T) slope, dw_1 = x^T dhidden."""
    x, w_1, b_1, w_2, _, activation, cuts, kept, backend = saved
    if output is None:
        return {}
    totals: dict[str, Any] = {}
    d_x = []
    for cut in cuts:
        hidden = _affine(x[cut], w_1, b_1) if kept is None else kept
        y, slope = ACTIVATIONS[activation](hidden, backend)
        d_hidden = einsum("...o,fo->...f", output[cut], w_2) * slope
        d_x.append(einsum("...f,mf->...m", d_hidden, w_1))
        part = {
            "w_1": einsum("...m,...f->mf", x[cut], d_hidden),
            "b_1": einsum("...f->f", d_hidden),
            "w_2": einsum("...f,...o->fo", y, output[cut]),
            "b_2": einsum("...o->o", output[cut]),
        }
        totals = {n: totals[n] + g for n, g in part.items()} if totals else part
    return {"x": d_x[0] if len(d_x) == 1 else namespace(x).concat(d_x, axis=-2), **totals}


class _Residual:
    """x + f(x), for any f with ``.forward(x)`` and ``.vjp(x)`` whose value has the shape of x (``bind`` makes one).

    Gradients: ``x``, and ``f.<name>`` for every other argument of f that has one.
    """

    name = __name__ = "residual"
    differentiable: tuple[str, ...] = ("x",)
    positional = options = ("x", "f")  # so that bind takes it: chain(bind(residual, f=...), bind(layer_norm, ...))

    def __call__(self, x: Any, f: Any) -> Any:
        return self.forward(x, f).output

    def forward(self, x: Any, f: Any) -> Result:
        """Result with the output."""
        self._check(x, f, "forward")
        return Result(output=self._sum(x, f.forward(x).output))

    def vjp(self, x: Any, f: Any) -> tuple[Result, Callable[[Any], dict[str, Any]]]:
        """Result, and the function from the cotangent of its output to the gradients."""
        self._check(x, f, "vjp")
        result, pull = f.vjp(x)

        def pullback(output: Any) -> dict[str, Any]:
            found = pull(output)
            return {"x": output + found["x"], **{f"f.{n}": g for n, g in found.items() if n != "x"}}

        return Result(output=self._sum(x, result.output)), pullback

    @staticmethod
    def _sum(x: Any, y: Any) -> Any:
        if tuple(x.shape) != tuple(y.shape):
            raise ValueError(f"f(x) has shape {tuple(y.shape)}: expected that of x, {tuple(x.shape)}")
        return x + y

    @staticmethod
    def _check(x: Any, f: Any, method: str) -> None:
        require_array("x", x)
        if not hasattr(f, method):
            raise TypeError(f"f is a {type(f).__name__}: expected what has forward(x) and vjp(x), as bind makes it")


linear = function(_linear_forward, _linear_backward, name="linear", differentiable=("x", "weight", "bias"))
layer_norm = function(
    _layer_norm_forward, _layer_norm_backward, name="layer_norm", differentiable=("x", "weight", "bias")
)
feed_forward = function(
    _feed_forward_forward,
    _feed_forward_backward,
    name="feed_forward",
    differentiable=("x", "w_1", "b_1", "w_2", "b_2"),
)
residual = _Residual()
