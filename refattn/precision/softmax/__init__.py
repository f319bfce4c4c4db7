r"""How far rounding alone can take softmax attention from its exact values: output, lse and every gradient.

For each element there are two bounds.  **rss**, a root of a sum of squares, has the size of the error: it adds the
squares of rounding errors that are independent and of random sign.  It is a yardstick, not a guarantee; correct kernels
stay below 4 of it in every element and below 3/4 in most (measured: `make calibrate`).  **worst** adds absolute
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

from collections.abc import Sequence

import numpy as np

from refattn.precision.softmax.backward import BackwardErrors
from refattn.precision.softmax.forward import ForwardErrors
from refattn.precision.softmax.records import Bounds, Rounding, SoftmaxCall

__all__ = ["Bounds", "Rounding", "SoftmaxCall", "softmax_bounds"]

Array = np.ndarray

LOST = 0.5
"""Relative error of a weight from which on no first-order bound holds."""


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
        forward = ForwardErrors(call, rounding)
        bounds = {"output": forward.output_bounds(), "lse": forward.lse_bounds()}
        if wrt:
            bounds |= BackwardErrors(forward, d_output, d_lse).bounds(wrt)
    return _without_lost_rows(bounds, forward)


def _without_lost_rows(bounds: dict[str, Bounds], forward: "ForwardErrors") -> dict[str, Bounds]:
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
        found[name] = Bounds(np.where(rows, np.inf, bound.rss), bound.worst)
    return found
