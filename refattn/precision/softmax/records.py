"""What the bounds of softmax attention are asked about: a call, and the rounding of a kernel's arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import dtype_name, is_half
from refattn.precision.formats import FORMATS, format_of, unit_roundoff

__all__ = ["Bounds", "Rounding", "SoftmaxCall", "underflow"]

Array = np.ndarray


class Bounds(NamedTuple):
    """Two bounds on the rounding error of each element; ``worst`` is None where none is derived."""

    rss: Any
    worst: Any


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Unit roundoffs of a kernel's arithmetic; see the module's docstring.

    Attributes
    ----------
    accumulate : float
        Of sums, exponentials and everything that has no unit of its own.
    operands : float
        Of computed operands of products (weights, cotangents of logits), where narrower than ``accumulate``; else 0.
    inputs : float
        By which the inputs are rounded before they are multiplied; 0 where they are multiplied as they are.
    stored : float
        Of the output and the gradients.
    tiny : float
        Absolute rounding near zero of the storage.
    scores : float
        By which logits and weights are rounded between steps; else 0.
    exp, tanh : float
        Relative errors of approximated functions; else 0.
    """

    accumulate: float
    operands: float = 0.0
    inputs: float = 0.0
    stored: float
    tiny: float = 0.0
    scores: float = 0.0
    exp: float = 0.0
    tanh: float = 0.0

    @classmethod
    def of(
        cls,
        dtype: Any,
        *,
        compute: str | None = None,
        scores: str | None = None,
        allow: Mapping[str, float] | None = None,
    ) -> "Rounding":
        """What a kernel does on inputs of a dtype: half storage is computed in float32.

        Parameters
        ----------
        compute : str, optional
            Format that the operands of products are rounded to ("tf32", "bfloat16", "float16", "float32").
        scores : {"storage"}, optional
            Logits and weights are rounded to ``dtype`` between the steps.
        allow : mapping, optional
            Relative errors of "exp" and "tanh"; as "sum" the unit roundoff of accumulators.
        """
        name = dtype_name(dtype)
        half, own = is_half(name), unit_roundoff(name)
        coarse = unit_roundoff(compute) if compute is not None else 0.0
        accumulate = max(unit_roundoff("float32") if half or coarse > own else own, (allow or {}).get("sum", 0.0))
        operands = max(own if half else 0.0, coarse)
        return cls(
            accumulate=accumulate,
            operands=operands if operands > accumulate else 0.0,
            inputs=coarse if coarse > max(own, accumulate) else 0.0,
            stored=max(own, accumulate),
            tiny=underflow(name if not coarse > own else "float32"),
            scores=own if scores == "storage" else 0.0,
            exp=(allow or {}).get("exp", 0.0),
            tanh=(allow or {}).get("tanh", 0.0),
        )


def underflow(name: str) -> float:
    """Absolute error near zero: the least normal number where hardware may flush to zero, else half of the last place."""
    form = format_of(name)
    flushed = form.least_exponent <= FORMATS["float32"].least_exponent
    smallest = 2.0 ** (form.least_exponent - (0 if flushed else form.precision))
    return max(smallest, 1e-110)  # its square is a number of float64


@dataclass(frozen=True, kw_only=True)
class SoftmaxCall:
    """One call of softmax attention with what its exact forward keeps; float64, leading axes broadcast.

    Attributes
    ----------
    q, k, v : (..., h, q, d), (..., g, k, d), (..., g, k, e)
        The candidate's own, already rounded inputs.
    logits, weights : (..., h, q, k)
        Final logits, and their exact softmax before dropout: 0 where a pair is invisible.
    heads : sequence of int, optional
        Key head of every query head; default h // g neighbours share one.
    scale, softcap : float, optional
        Default d^-1/2 and none.
    softcap_after_bias : bool
        The cap is taken around x + bias + ALiBi.
    bias : array, optional
        Broadcasts to (..., h, q, k).
    slopes, distance : array, optional
        The logits contain slopes[h] * distance[..., q, k].
    sinks : (h,) or (h, n), optional
    lse_includes_sinks : bool
    factor : (..., h, q, k), optional
        What multiplies the weights after the softmax: dropout's keep / (1 - rate).
    """

    q: Array
    k: Array
    v: Array
    logits: Array
    weights: Array
    heads: Sequence[int] | None = None
    scale: float | None = None
    softcap: Any = None
    softcap_after_bias: bool = False
    bias: Any = None
    slopes: Array | None = None
    distance: Array | None = None
    sinks: Any = None
    lse_includes_sinks: bool = True
    factor: Array | None = None
