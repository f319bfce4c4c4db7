r"""How far rounding alone can take softmax attention from its exact values: output, lse and every gradient.

For each element there are two bounds.  **rss**, a root of a sum of squares, has the size of the error: it adds the
squares of rounding errors that are independent and of random sign.  It is a yardstick, not a guarantee; correct kernels
stay below 4 of it in every element and below 3/4 in most (measured: `docs/tolerances.md`).  **worst** adds absolute
values and holds for every order of summation; beyond it no rounding explains an error.

Units
-----
u of the accumulation (2^-24 for half storage too), w of the storage where it is narrower (the operands of the second
products, P and dS, are rounded to it), else 0, o of what is stored (output, gradients; the lse keeps u), t the absolute
rounding near zero of the storage.  Four more are 0 unless a kernel declares them (`Rounding`): a, by which inputs are
rounded before they are multiplied, exp and tanh, the relative errors of an approximated function, c, by which logits
and weights are rounded when they are stored between steps.  Letters: d and e channels, n visible keys of a row, N
visible rows of a key; raw = q.k, x = scale raw, s the logits, p the weights, f the dropout factor, slope = ds/dx,
m the row's maximum and L its lse, both with the sinks.

Logits and weights
------------------
A dot product of d rounded terms added in any order has variance u^2 d (q^2.k^2 + raw^2), up to a factor near 1: the
first part are the products, the second the partial sums, which grow to raw.  Scale, cap, bias and ALiBi add one rounding
each, of what they give.  The subtraction of m and the exponential turn this into a relative error of a weight:

    v_x = scale^2 [(u^2 d + 2 a^2) q^2.k^2 + u^2 d raw^2]          v_s = slope^2 v_x + roundings of x, cap, bias, ALiBi, s
    v_e = v_s + u^2 ((s - m)^2 + 4) + exp^2 + c^2 ((s - m)^2 + 1)

These errors e_ij are independent of each other.  But a weight is exp(s - L), or exp(s - m) over a sum: its row shares
one more error, that of L.  To first order that is sum_j p_j e_j, to which add the sum's own roundings (u^2 (n + 4)) and
what u |L| costs where L itself is rounded: a kernel that merges partial results rounds L once a merge, 1 + log2 n times
in a tree; one that adds key by key in the log domain rounds it n times, and as a rounding at key j is weighed by the
share of the keys up to j, about n/3 of them remain:

    M^2   = u^2 (L^2 + m^2) max(1 + log2 n, n/3)
    eta^2 = sum_k p^2 v_e + sum_sinks w^2 v_e + M^2 + u^2 (n + 4) + (3/2 exp)^2

so that dp_ij = p_ij (e_ij - eta_i), e independent, eta coherent along a row's keys and independent between rows.
exp enters twice: an approximation that is off by the same factor at every key moves L, and nothing else.

Output and lse
--------------
The output is the same for any common factor of a row, so only p e (f v - o) is left of it, summed in squares; then its own
sum, the rounding of P to the storage, the last rounding; with merges or a log-domain normaliser, o and the terms p v have
an error of M each; and o + w (o_new - o), one way to write a merge, forgets what a large partial output rounded.

Gradients
---------
With dP = dO V^T, Delta = sum dO o - d_lse, g = f dP - Delta, dS = p g, dU = slope dS:

    v_dP    = (u^2 e + 2 a^2) dO^2.v^2 + u^2 e dP^2
    v_Delta : o was rounded to the storage, or has other errors than the weights of the backward; the sum over e has its
              own; or Delta = rowsum(P dP) with P narrow.  All of these are coherent along a row.
    I       = p^2 [g^2 (v_e + 3 u^2) + f^2 v_dP]                   the part of dS that is independent between keys

A sum of c dS over any axes then has variance: sum c^2 I, + (sum_k c dS)^2 eta^2 + (sum_k c p)^2 v_Delta per row, + its own
sum.  All gradients are such sums: of k (d_q), of q (d_k), of ones (bias), of raw (scale), of distances (ALiBi slopes), of
the derivative by the cap.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import dtype_name, is_half, sum_to_shape
from refattn.contraction import einsum
from refattn.precision.formats import FORMATS, format_of, unit_roundoff

__all__ = ["Bounds", "Rounding", "SoftmaxCall", "softmax_bounds"]

Array = np.ndarray

COMMON = 1.5
"""An approximation may be off by the whole of its error in every element: the median then needs more than one of it."""

LOST = 0.5
"""Relative error of a weight from which on no first-order bound holds."""


class Bounds(NamedTuple):
    """Two bounds on the rounding error of each element; ``worst`` is None where none is derived."""

    rss: Array
    worst: Array | None


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
            Relative errors of "exp" and "tanh".
        """
        name = dtype_name(dtype)
        half, own = is_half(name), unit_roundoff(name)
        coarse = unit_roundoff(compute) if compute is not None else 0.0
        accumulate = unit_roundoff("float32") if half or coarse > own else own
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
    return 2.0 ** (form.least_exponent - (0 if flushed else form.precision))


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
    softcap: float | None = None
    softcap_after_bias: bool = False
    bias: Array | None = None
    slopes: Array | None = None
    distance: Array | None = None
    sinks: Array | None = None
    lse_includes_sinks: bool = True
    factor: Array | None = None


def softmax_bounds(
    call: SoftmaxCall,
    rounding: Rounding,
    d_output: Array | None = None,
    d_lse: Array | None = None,
    wrt: Sequence[str] = (),
) -> dict[str, Bounds]:
    """Bounds by array name: ``output``, ``lse``, and ``d_q`` ... for each name of ``wrt``.

    Parameters
    ----------
    call : SoftmaxCall
        NaN and infinite inputs count as 0: what is not finite is to be compared by place, not by distance.
    rounding : Rounding
    d_output, d_lse : arrays, optional
        Cotangents, (..., h, q, e) and (..., h, q).
    wrt : sequence of str
        Some of q, k, v, bias, scale, softcap, alibi_slopes, sinks.

    Raises
    ------
    TypeError
        If an array of the call is not float64.
    """
    for name in ("q", "k", "v", "logits", "weights"):
        x = getattr(call, name)
        if getattr(x, "dtype", None) != np.float64:
            raise TypeError(f"{name}: {getattr(x, 'dtype', type(x).__name__)}, expected a float64 NumPy array")
    with np.errstate(over="ignore", invalid="ignore"):
        forward = _Forward(call, rounding)
        bounds = {"output": forward.output_bounds(), "lse": forward.lse_bounds()}
        if wrt:
            bounds |= _Backward(forward, d_output, d_lse).bounds(wrt)
    return _without_lost_rows(bounds, forward)


def _without_lost_rows(bounds: dict[str, Bounds], forward: "_Forward") -> dict[str, Bounds]:
    """Infinite bounds where the arithmetic cannot resolve the logits: errors of weights beyond `LOST` are of no order.

    That takes declared formats, such as TF32 at logits near 1e5.  The lse then has its worst case.
    """
    lost = np.where(forward.visible, forward.v_e, 0.0).max(axis=-1, initial=0.0) > LOST**2
    if not lost.any():
        return bounds
    found = dict(bounds)
    for name, bound in bounds.items():
        if name == "lse":
            found[name] = Bounds(np.where(lost, bound.worst, bound.rss), bound.worst)
            continue
        rows = lost[..., None] if name in ("output", "d_q") else np.ones((), bool)
        found[name] = Bounds(*(None if x is None else np.where(rows, np.inf, x) for x in bound))
    return found


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def _growth(x: Any) -> Any:
    """e^x - 1 >= (1 + u)^n - 1, kept finite: beyond e^200 a bound says nothing more, and infinity times 0 is NaN."""
    return np.expm1(np.minimum(x, 200.0))


def _weigh(x: Array, y: Array) -> Array:
    return einsum("...qk,...ke->...qe", x, y)


def _products(x: Array, y: Array) -> Array:
    return einsum("...qd,...kd->...qk", x, y)


class _Forward:
    """Sizes of the errors of logits, weights and row sums; output and lse."""

    def __init__(self, call: SoftmaxCall, units: Rounding) -> None:
        self.call, self.units = call, units
        u, a, c = units.accumulate, units.inputs, units.scores
        h, g = call.q.shape[-3], call.k.shape[-3]
        self.groups = g
        self.heads = np.arange(h) // max(1, h // max(1, g)) if call.heads is None else np.asarray(call.heads)
        self.q = _finite(call.q)
        self.k, self.v = (_finite(x)[..., self.heads, :, :] for x in (call.k, call.v))
        self.d, self.e = self.q.shape[-1], self.v.shape[-1]
        self.scale = self.d**-0.5 if call.scale is None else float(call.scale)

        visible = (call.weights > 0) & np.isfinite(call.logits)
        self.visible = visible
        self.p = np.where(visible, call.weights, 0.0)
        self.s = np.where(visible, call.logits, 0.0)
        self.n = visible.sum(axis=-1).astype(float)  # of a row
        self.rows = visible.sum(axis=-2).astype(float)  # of a key
        self.f = np.ones(()) if call.factor is None else np.broadcast_to(call.factor, visible.shape)
        self.pf = self.p * self.f

        top = np.where(visible, call.logits, -np.inf).max(axis=-1, initial=-np.inf)
        best = self.p.max(axis=-1, initial=0.0)
        lse_keys = np.where(self.n > 0, top - np.log(np.where(best > 0, best, 1.0)), -np.inf)
        self.sinks = self._sinks(call.sinks)  # (..., h, 1, sinks)
        lse = lse_keys  # the weights count the sinks already, so this has them where the row has a key
        if self.sinks.shape[-1]:
            alone = np.logaddexp.reduce(self.sinks, axis=-1)
            lse = np.where(self.n > 0, lse, alone)
            top = np.maximum(top, self.sinks.max(axis=-1))
        self.empty = ~np.isfinite(lse)
        self.lse, self.top = _finite(lse), _finite(top)
        sinks = np.where(np.isfinite(self.sinks), self.sinks, 0.0)
        self.w = np.where(np.isfinite(self.sinks) & ~self.empty[..., None], np.exp(sinks - self.lse[..., None]), 0.0)

        # Logits.
        raw, squares = _products(self.q, self.k), _products(self.q**2, self.k**2)
        self.raw = np.where(visible, raw, 0.0)
        squares = np.where(visible, squares, 0.0)
        self.v_raw = (u**2 * self.d + 2 * a**2) * squares + u**2 * self.d * self.raw**2
        x = self.scale * self.raw
        added = [np.where(visible, part, 0.0) for part in self._added()]
        parts = sum((part**2 for part in added), np.zeros(()))
        step = u**2 + c**2
        self.x, self.v_x = x, self.scale**2 * self.v_raw
        if call.softcap is None:
            self.slope, self.v_slope, self.tanh = np.ones(()), np.zeros(()), None
            v_s = self.v_x + step * (self.s**2 + parts + x**2)
        else:
            cap = float(call.softcap)
            inner = x + sum(added) if call.softcap_after_bias and added else x
            self.tanh = tanh = np.tanh(inner / cap)
            self.slope = slope = 1 - tanh**2
            self.x = inner
            self.v_x = self.v_x + step * (parts + x**2 + inner**2 if call.softcap_after_bias and added else 0.0)
            error = units.tanh
            self.v_slope = 4 * tanh**2 * slope**2 * (self.v_x + u**2 * inner**2) / cap**2
            self.v_slope = self.v_slope + u**2 * (4 * tanh**4 + 1) + 4 * tanh**4 * error**2
            v_s = slope**2 * self.v_x + step * (self.s**2 + (cap * tanh) ** 2 + (slope * inner) ** 2)
            v_s = v_s + (0.0 if call.softcap_after_bias else step * parts) + (error * cap * tanh) ** 2
        below = self.s - self.top[..., None]
        self.v_e = v_s + u**2 * (below**2 + 4) + units.exp**2 + c**2 * (below**2 + 1)
        self.sure = self.p**2 * self.v_e  # p^2 v_e
        sunk = np.where(self.w > 0, sinks, 0.0)
        self.v_sink = u**2 * (2 * sunk**2 + (sunk - self.top[..., None]) ** 2 + 4) + units.exp**2
        self.sunk = (self.w**2 * self.v_sink).sum(axis=-1)

        # Rows.
        self.merges = u**2 * (self.lse**2 + self.top**2) * self._roundings()
        self.v_row = self.sure.sum(axis=-1) + self.sunk + self.merges + u**2 * (self.n + 4) + (COMMON * units.exp) ** 2

    def _sinks(self, sinks: Array | None) -> Array:
        h = self.q.shape[-3]
        return np.zeros((h, 1, 0)) if sinks is None else np.reshape(np.asarray(sinks, np.float64), (h, 1, -1))

    def _added(self) -> list[Array]:
        """What is added to the logits, term by term."""
        call, found = self.call, []
        if call.bias is not None:
            found.append(_finite(np.asarray(call.bias, np.float64)))
        if call.slopes is not None and call.distance is not None:
            found.append(np.asarray(call.slopes, np.float64)[:, None, None] * call.distance)
        return found

    def _roundings(self) -> Array:
        """How often L is rounded: merged in a tree, or summed in the log domain key by key."""
        n = np.maximum(self.n, 1.0)
        return np.maximum(1 + np.log2(n), n / 3)

    # -------------------------------------------------------------- rss

    @functools.cached_property
    def o(self) -> Array:
        return _weigh(self.pf, self.v)

    @functools.cached_property
    def stored_weights(self) -> Array:
        """sum (pf)^2 v^2"""
        return _weigh(self.pf**2, self.v**2)

    @functools.cached_property
    def forgotten(self) -> Array:
        """Of o + w (o_new - o), where a large partial output is merged into a small one: half a rounding of the largest f v."""
        largest = np.where(self.rows[..., None] > 0, np.abs(self.v), 0.0).max(axis=-2, keepdims=True, initial=0.0)
        return np.square(self.units.accumulate / 2 * self.f.max(initial=0.0) * largest) * (self.n[..., None] > 1)

    def moved(self, values: Array, centre: Array) -> Array:
        """sum_k p^2 v_e (f values - centre)^2 + centre^2 sum_sinks w^2 v_e, expanded."""
        square = _weigh(self.sure * self.f**2, values**2) - 2 * centre * _weigh(self.sure * self.f, values)
        both = self.sure.sum(axis=-1) + self.sunk
        return np.maximum(square + centre**2 * both[..., None], 0.0)

    def output_bounds(self) -> Bounds:
        units, o, n = self.units, self.o, self.n[..., None]
        narrow = units.operands**2 + units.inputs**2 + units.scores**2
        square = self.moved(self.v, o)
        square += units.accumulate**2 * n * (self.stored_weights + o**2)
        square += self.merges[..., None] * (o**2 + self.stored_weights)
        square += narrow * self.stored_weights + units.stored**2 * o**2
        square += self.forgotten
        if units.operands:
            square += units.tiny**2 * _weigh(self.visible * self.f**2, self.v**2)
        return Bounds(np.where(n > 0, np.hypot(np.sqrt(square), units.tiny), 0.0), self.worst_output)

    def lse_bounds(self) -> Bounds:
        u = self.units.accumulate
        v_row, lse = self.v_row, self.lse
        pulled = (self.p * self.slope * self.x).sum(axis=-1)
        worst = self.worst_row
        if self.sinks.shape[-1] and not self.call.lse_includes_sinks:
            v_row, lse, share = self.keys_alone
            pulled = pulled / share
        square = v_row + u**2 * pulled**2 + u**2 * lse**2
        return Bounds(np.sqrt(square) + self.units.tiny, worst + u * np.abs(lse) + self.units.tiny)

    @functools.cached_property
    def keys_alone(self) -> tuple[Array, Array, Array]:
        """eta^2 and lse of the keys without the sinks, and the keys' share of the row."""
        u = self.units.accumulate
        share = np.where(self.n > 0, self.p.sum(axis=-1), 1.0)
        lse = np.where(self.n > 0, self.lse + np.log(share), 0.0)
        v_row = self.sure.sum(axis=-1) / share**2 + u**2 * (self.n + 4) + (COMMON * self.units.exp) ** 2
        return v_row + u**2 * (lse**2 + self.top**2) * self._roundings(), lse, share

    # -------------------------------------------------------------- worst case

    @functools.cached_property
    def worst_logit(self) -> Array:
        """Largest relative error of a weight before it is normalised, over legal orders (|q|.|k| = size)."""
        units, u = self.units, self.units.accumulate
        size = abs(self.scale) * np.where(self.visible, _products(np.abs(self.q), np.abs(self.k)), 0.0)
        below = np.abs(self.s - self.top[..., None])
        few = 4 * (1 + np.ceil(self.n / 16))[..., None]
        delta = self.slope * _growth((self.d + 4) * u + 2 * units.inputs) * size
        delta = delta + u * (4 * size + 2 * np.abs(self.s) + 2 * below + few) + units.exp
        delta = delta + units.scores * (3 * size + 3 * np.abs(self.s) + below + 1)
        if self.tanh is not None:
            delta = delta + units.tanh * abs(float(self.call.softcap)) * np.abs(self.tanh)
        for part in self._added():
            delta = delta + 2 * u * np.abs(part)
        return np.where(self.visible, delta, 0.0)

    @functools.cached_property
    def worst_row(self) -> Array:
        """Largest error of an lse; it is also the relative error that a row of weights has in common."""
        u, n = self.units.accumulate, self.n
        largest = self.worst_logit.max(axis=-1, initial=0.0)
        if self.sinks.shape[-1]:
            sunk = np.where(self.w > 0, np.abs(self.sinks), 0.0)
            few = 4 * (1 + np.ceil(n / 16))
            own = u * (4 * sunk + 2 * np.abs(self.top)[..., None] + few[..., None]) + self.units.exp
            largest = np.maximum(largest, np.where(self.w > 0, own, 0.0).max(axis=-1))
        merged = 2 * u * np.maximum(2 + np.ceil(np.log2(np.maximum(n, 1))), n) * (np.abs(self.lse) + np.abs(self.top))
        return largest + (2 * n + 4) * u + merged

    @functools.cached_property
    def worst_weight(self) -> Array:
        """E: e^(w_e + w_eta) - 1"""
        return np.where(self.visible, _growth(self.worst_logit + self.worst_row[..., None]), 0.0)

    @functools.cached_property
    def sum_weights(self) -> Array:
        """gamma of a row's sums, with P rounded to the storage on the way."""
        units = self.units
        narrow = 2 * units.operands + 2 * units.inputs + 2 * units.scores
        return _growth((2 * self.n + 6) * units.accumulate + narrow)

    @functools.cached_property
    def worst_output(self) -> Array:
        units = self.units
        error = self.worst_weight
        grown = self.sum_weights * (1 + error.max(axis=-1, initial=0.0)) + 2 * _growth(self.worst_row)
        size = np.where(self.rows[..., None] > 0, np.abs(self.v), 0.0)
        worst = _weigh(self.pf * (error + grown[..., None]), size)
        worst += 4 * units.accumulate * size.max(axis=-2, keepdims=True, initial=0.0)
        worst += 2 * units.tiny * (_weigh(self.visible * self.f, size) + self.n[..., None])
        worst = worst * (1 + units.stored) + units.stored * np.abs(self.o) + units.tiny
        return np.where(self.n[..., None] > 0, worst, 0.0)


class _Backward:
    """Sizes of the errors of cotangents of the weights and logits; every gradient as a sum of them."""

    def __init__(self, forward: _Forward, d_output: Array | None, d_lse: Array | None) -> None:
        self.forward = fw = forward
        units, u = fw.units, fw.units.accumulate
        self.units = units
        shape = fw.p.shape[:-1]
        seen = fw.n > 0
        d_output = np.zeros((*shape, fw.e)) if d_output is None else np.broadcast_to(d_output, (*shape, fw.e))
        self.d_o = d_o = np.where(seen[..., None], _finite(d_output), 0.0)
        given = np.zeros(shape) if d_lse is None else np.broadcast_to(d_lse, shape)
        d_lse = np.where(fw.empty, 0.0, _finite(given))
        v_lse = np.zeros(())
        if fw.sinks.shape[-1] and not fw.call.lse_includes_sinks:  # the weights of that lse are p / share
            v_keys, _, share = fw.keys_alone
            d_lse = np.where(seen, d_lse / share, 0.0)
            v_lse = d_lse**2 * (v_keys + fw.v_row)
        o, p, pf, n = fw.o, fw.p, fw.pf, fw.n
        self.d_p = _products(d_o, fw.v)
        squares = _products(d_o**2, fw.v**2)
        self.v_dp = (u**2 * fw.e + 2 * units.inputs**2) * squares + (u**2 * fw.e + units.scores**2) * self.d_p**2
        self.delta0 = delta0 = (d_o * o).sum(axis=-1)
        self.shift = shift = delta0 - d_lse  # Delta
        self.lost = shift if fw.call.lse_includes_sinks else delta0  # what a sink's weight meets
        narrow = units.operands**2 + units.inputs**2 + units.scores**2

        # Delta: from a rounded output, from an output of other errors than the weights, from rowsum(P dP).
        d_pf = fw.f * self.d_p
        v_shift = ((d_o * o) ** 2).sum(axis=-1) * (units.stored**2 + u**2 * fw.e + units.inputs**2)
        v_shift += u**2 * (delta0**2 + d_lse**2 + shift**2) + v_lse
        v_shift += (d_o**2 * fw.forgotten).sum(axis=-1)
        v_shift += (fw.sure * (d_pf - delta0[..., None]) ** 2).sum(axis=-1)
        v_shift += delta0**2 * (fw.sunk + fw.merges + u**2 * (n + 4))
        v_shift += (pf**2 * self.v_dp).sum(axis=-1)
        v_shift += (u**2 * n + narrow) * ((pf * self.d_p) ** 2).sum(axis=-1)
        v_shift += units.tiny**2 * (d_o**2).sum(axis=-1)
        self.v_shift = v_shift

        g = d_pf - shift[..., None]
        self.d_s = d_s = p * g
        own = p**2 * (g**2 * (fw.v_e + 3 * u**2 + units.scores**2) + fw.f**2 * self.v_dp)  # I
        self.v_s = own
        self.d_u = d_u = fw.slope * d_s
        self.p_u = fw.slope * p
        self.v_u = fw.slope**2 * own + d_s**2 * fw.v_slope
        self.v_operand = self.v_u + (units.operands**2 + units.inputs**2 + units.scores**2) * d_u**2
        if units.operands:
            self.v_operand = self.v_operand + units.tiny**2 * fw.visible

    def bounds(self, wrt: Sequence[str]) -> dict[str, Bounds]:
        return {f"d_{name}": getattr(self, name)() for name in wrt}

    # -------------------------------------------------------------- sums over keys, over rows

    def q(self) -> Bounds:
        fw, units, u = self.forward, self.units, self.units.accumulate
        scale, n = fw.scale, fw.n[..., None]
        d_q = scale * _weigh(self.d_u, fw.k)
        square = scale**2 * _weigh(self.v_operand, fw.k**2)
        square += fw.v_row[..., None] * d_q**2 + self.v_shift[..., None] * (scale * _weigh(self.p_u, fw.k)) ** 2
        square += u**2 * (n + 4) * (scale**2 * _weigh(self.d_u**2, fw.k**2) + d_q**2)
        square += units.stored**2 * d_q**2
        worst = self.worst_u + _growth((n + 8) * u + self._narrow()) * (np.abs(self.d_u) + self.worst_u)
        worst = abs(scale) * _weigh(worst, np.abs(fw.k)) * (1 + units.stored) + units.stored * np.abs(d_q)
        return self._reduced(square, worst, np.shape(fw.call.q))

    def k(self) -> Bounds:
        fw, u = self.forward, self.units.accumulate
        independent = self.v_operand + self.d_u**2 * fw.v_row[..., None] + self.p_u**2 * self.v_shift[..., None]
        square = independent + u**2 * (fw.rows[..., None, :] + 4) * self.d_u**2
        square = fw.scale**2 * einsum("...qk,...qd->...kd", square, fw.q**2)
        value = fw.scale * einsum("...qk,...qd->...kd", self.d_u, fw.q)
        worst = self.worst_u + self._gamma_rows() * (np.abs(self.d_u) + self.worst_u)
        worst = abs(fw.scale) * einsum("...qk,...qd->...kd", worst, np.abs(fw.q))
        return self._over_heads(square, value, worst, np.shape(fw.call.k))

    def v(self) -> Bounds:
        fw, units, u = self.forward, self.units, self.units.accumulate
        narrow = units.operands**2 + units.inputs**2 + units.scores**2
        square = fw.pf**2 * (fw.v_e + fw.v_row[..., None] + narrow + u**2 * (fw.rows[..., None, :] + 6))
        if units.operands:
            square = square + units.tiny**2 * fw.visible * fw.f**2
        square = einsum("...qk,...qe->...ke", square, self.d_o**2)
        value = einsum("...qk,...qe->...ke", fw.pf, self.d_o)
        error = fw.worst_weight + fw.sum_weights[..., None] * (1 + fw.worst_weight)
        worst = fw.pf * (error + self._gamma_rows() * (1 + error))
        worst = einsum("...qk,...qe->...ke", worst, np.abs(self.d_o))
        if units.operands:
            worst = worst + units.tiny * einsum("...qk,...qe->...ke", fw.visible * fw.f, np.abs(self.d_o))
        return self._over_heads(square, value, worst, np.shape(fw.call.v))

    def _narrow(self) -> float:
        return 2 * self.units.operands + 2 * self.units.inputs + 2 * self.units.scores

    def _gamma_rows(self) -> Array:
        fw = self.forward
        shared = fw.q.shape[-3] / max(1, fw.groups)
        return _growth((fw.rows * shared + 8) * self.units.accumulate + self._narrow())[..., None, :]

    def _over_heads(self, square: Array, value: Array, worst: Array, shape: tuple[int, ...]) -> Bounds:
        """Parts (..., h, k, .) of query heads, which may be stored before they are added, summed over each group."""
        fw, units, u = self.forward, self.units, self.units.accumulate
        square = square + (u**2 * (fw.rows[..., None] + 4) + units.stored**2) * value**2 + units.tiny**2
        worst = worst * (1 + 2 * units.stored) + units.stored * np.abs(value)
        member = np.equal.outer(fw.heads, np.arange(fw.groups)).astype(float)
        square, value, worst = (einsum("...hkc,hg->...gkc", x, member) for x in (square, value, worst))
        shared = len(fw.heads) / max(1, fw.groups)
        square += (units.stored**2 + u**2 * shared) * value**2
        return self._reduced(square, worst + units.stored * np.abs(value), shape)

    def _reduced(self, square: Array, worst: Array, shape: tuple[int, ...]) -> Bounds:
        """Over batch axes that the input does not have."""
        square, worst = (sum_to_shape(x, shape) for x in (square, worst))
        return Bounds(np.hypot(np.sqrt(square), self.units.tiny), worst + self.units.tiny)

    # -------------------------------------------------------------- sums of c dS over any axes

    def _sum(
        self,
        c: Array,
        shape: tuple[int, ...],
        *,
        inside: bool,
        v_c: Array | float = 0.0,
        more: Array | float = 0.0,
        worst_c: Array | float | None = 0.0,
    ) -> Bounds:
        """Bound of c X summed to ``shape``, X = dU behind the cap (``inside``) or dS; ``v_c`` is the variance of c."""
        fw, units, u = self.forward, self.units, self.units.accumulate
        x, own, p = (self.d_u, self.v_u, self.p_u) if inside else (self.d_s, self.v_s, fw.p)
        full = x.shape
        terms, common = c * x, c * p
        wide = (*(1,) * (len(full) - len(shape)), *shape)
        count = float(np.prod([n for n, m in zip(full, wide, strict=True) if m != n]))
        independent = c**2 * own + v_c * x**2
        total = sum_to_shape(terms, shape)
        square = sum_to_shape(independent, shape) + more
        v_row, v_shift = fw.v_row[..., None], self.v_shift[..., None]
        if wide[-1] == 1 and full[-1] != 1:
            terms_row, common_row = (y.sum(axis=-1, keepdims=True) for y in (terms, common))
        else:
            terms_row, common_row = terms, common
        square = square + sum_to_shape(terms_row**2 * v_row + common_row**2 * v_shift, shape)
        square = square + u**2 * (count + 4) * (sum_to_shape(terms**2, shape) + total**2)
        square = square + units.stored**2 * total**2
        worst = None
        if worst_c is not None:
            error = self.worst_u if inside else self.worst_s
            worst = np.abs(c) * error + worst_c * (np.abs(x) + error)
            worst = sum_to_shape(worst + _growth((count + 8) * u) * np.abs(c) * (np.abs(x) + error), shape)
            worst = worst * (1 + units.stored) + units.stored * np.abs(total) + units.tiny
        return Bounds(np.hypot(np.sqrt(square), units.tiny), worst)

    def bias(self) -> Bounds:
        call = self.forward.call
        return self._sum(np.ones(()), np.shape(call.bias), inside=call.softcap_after_bias)

    def alibi_slopes(self) -> Bounds:
        call, h = self.forward.call, self.forward.q.shape[-3]
        bound = self._sum(np.asarray(call.distance, np.float64), (h, 1, 1), inside=call.softcap_after_bias)
        return Bounds(*(None if x is None else x.reshape(h) for x in bound))

    def scale(self) -> Bounds:
        fw, u = self.forward, self.units.accumulate
        scaled = fw.q**2 * u**2 * fw.n[..., None] * _weigh(self.d_u**2, fw.k**2)  # those who take sum q dq
        size = np.where(fw.visible, _products(np.abs(fw.q), np.abs(fw.k)), 0.0)
        worst = _growth((fw.d + 4) * u + 2 * self.units.inputs) * size
        return self._sum(fw.raw, (), inside=True, v_c=fw.v_raw, more=scaled.sum(), worst_c=worst)

    def softcap(self) -> Bounds:
        """c tanh(x / c) by c: tanh - (x / c)(1 - tanh^2)."""
        fw, u = self.forward, self.units.accumulate
        ratio, t, slope = fw.x / float(fw.call.softcap), fw.tanh, fw.slope
        v_x = fw.v_x / float(fw.call.softcap) ** 2 + u**2 * ratio**2
        v_z = u**2 * (t**2 + 2 * (ratio * slope) ** 2) + (2 * t * slope * ratio) ** 2 * v_x
        v_z = v_z + ratio**2 * u**2 * (4 * t**4 + 1) + self.units.tanh**2 * t**2 * (1 + 4 * (ratio * t) ** 2)
        return self._sum(t - ratio * slope, (), inside=False, v_c=v_z, worst_c=None)

    def sinks(self) -> Bounds:
        """-sum w Delta over batch and rows."""
        fw, units, u = self.forward, self.units, self.units.accumulate
        lost = self.lost[..., None]
        terms = fw.w * lost
        square = fw.w**2 * (lost**2 * (fw.v_row[..., None] + fw.v_sink) + self.v_shift[..., None])
        batch = tuple(range(terms.ndim - 3))
        count = float(np.prod([terms.shape[a] for a in batch]) + terms.shape[-2])
        square, squares, total = (x.sum(axis=(*batch, -2)) for x in (square, terms**2, terms))
        square = square + u**2 * (count + 4) * (squares + total**2) + units.stored**2 * total**2
        rss = np.hypot(np.sqrt(square), units.tiny)
        return Bounds(rss.reshape(np.shape(fw.call.sinks)), None)

    # -------------------------------------------------------------- worst case

    @functools.cached_property
    def worst_s(self) -> Array:
        fw, units, u = self.forward, self.units, self.units.accumulate
        error, f = fw.worst_weight, fw.f
        products = _growth((fw.e + 4) * u + 2 * units.inputs + units.scores)
        size_o, size_v = np.abs(self.d_o), np.where(fw.rows[..., None] > 0, np.abs(fw.v), 0.0)
        w_dp = products * _products(size_o, size_v)
        narrow = fw.sum_weights[..., None]
        w_output = fw.worst_output
        from_output = (size_o * (w_output + products * (np.abs(fw.o) + w_output))).sum(axis=-1)
        from_rows = (np.abs(fw.pf * self.d_p) * (error + narrow) + fw.pf * (1 + error) * w_dp).sum(axis=-1)
        d_lse = np.abs(self.shift - self.delta0)
        w_shift = np.maximum(from_output, from_rows) + 3 * u * (np.abs(self.delta0) + d_lse)
        if fw.sinks.shape[-1] and not fw.call.lse_includes_sinks:
            w_shift = w_shift + d_lse * _growth(2 * fw.worst_row)
        g = f * self.d_p - self.shift[..., None]
        w_g = f * w_dp + w_shift[..., None] + 3 * u * (np.abs(f * self.d_p) + np.abs(self.shift)[..., None])
        last = (4 * u + 2 * units.operands + 2 * units.scores) * (1 + error) * (np.abs(g) + w_g)
        return np.where(fw.visible, fw.p * (error * (np.abs(g) + w_g) + w_g + last) + units.tiny, 0.0)

    @functools.cached_property
    def worst_u(self) -> Array:
        fw, units, u = self.forward, self.units, self.units.accumulate
        if fw.tanh is None:
            return self.worst_s
        cap, tanh = abs(float(fw.call.softcap)), np.abs(fw.tanh)
        w_slope = 2 * tanh * np.minimum(1.0, fw.worst_logit / cap + u * np.abs(fw.x) / cap)
        w_slope = w_slope + u * (4 * tanh**2 + 2) + 2 * units.tanh * tanh**2
        return (fw.slope + w_slope) * self.worst_s + np.abs(self.d_s) * w_slope
