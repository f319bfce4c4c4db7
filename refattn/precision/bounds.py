"""How far rounding alone can take the output of softmax attention."""

from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import dtype_name
from refattn.contraction import einsum
from refattn.precision.formats import FORMATS, format_of, unit_roundoff

__all__ = ["Bounds", "output_bound"]


class Bounds(NamedTuple):
    """Two bounds on the rounding error of each element of an attention output."""

    rss: np.ndarray
    worst: np.ndarray


def output_bound(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    logits: np.ndarray,
    weights: np.ndarray,
    visible: np.ndarray | None = None,
    scale: float | None = None,
    slope: np.ndarray | None = None,
    factor: np.ndarray | None = None,
    unit: Any = "float32",
    unit_weights: Any = None,
    unit_output: Any = None,
) -> Bounds:
    r"""How far rounding alone can take the output of softmax attention from its exact value, element by element.

    To first order an error ds in the logits moves the output by

        do[i,e] = sum_j p[i,j] (v[j,e] - o[i,e]) ds[i,j]

    because sum_j p[i,j] (v[j] - o[i]) = 0, with p the softmax and o = sum_j p v. An evaluation that computes in a
    format of unit roundoff u makes these errors (|q|.|k| is the dot product of absolute values, m the row's maximum,
    n the number of visible keys of the row, d the channels):

    ============================================  =====================================================
    error                                         size
    ============================================  =====================================================
    dot product q.k, scaled before or after       slope * scale * gamma(d + 4) * |q|.|k|
    cap, bias, subtraction of m, change of base   u (4 scale |q|.|k| + 2 |s| + 2 |s - m|)
    exp to two ulp, online rescaling              4 u (1 + n / 16)
    sums of p v and of p, normalisation           gamma(2n + 4) on each product and on |o|
    weights stored in a narrower format           unit_weights * p |v|
    output stored                                 unit_output * |o|
    ============================================  =====================================================

    **worst** adds absolute values. It is a guarantee, second-order terms included: with delta the sum of the first
    three rows, gamma(n) = e^(nu) - 1 >= (1 + u)^n - 1, and weights a[j] = p[j] e^ds[j] (1 + theta[j]) in the numerator,
    b[j] = p[j] e^ds[j] (1 + phi[j]) in the denominator, the computed output is sum_j a[j] v[j] / sum_j b[j], hence

        |do| <= [sum_j p (e^delta - 1) |v - o| + e^max(delta) theta (sum_j p |v| + |o|)] e^(max(delta) + 2 theta)

    plus underflow and the rounding of the output. It holds for sums in any order, with fused multiply-add or without,
    normalised before or after the product with v, whole or online in blocks of at least 16 keys. What exceeds it is
    not this function. Expect it to be 10 to 1000 times the error.

    **rss** adds squares, as independent errors of random sign do, with sqrt(n) in place of n:

        rss^2 = sum_j p^2 delta^2 (v - o)^2 + u^2 n (sum_j p^2 v^2 + o^2) + u_w^2 sum_j p^2 v^2 + u_o^2 o^2
        delta^2 = (slope scale u)^2 d (q^2.k^2 + (q.k)^2) + u^2 (s^2 + (s - m)^2 + 4)

    It has the size of the error, and is a yardstick for it, not a guarantee. (v - o)^2 is expanded, so that both forms
    cost a few contractions of the attention's own size and no (q, k, e) array is built.

    Parameters
    ----------
    q : (..., q, d) float64 NumPy array
    k : (..., k, d)
    v : (..., k, e)
        The candidate's own, already rounded inputs; heads already repeated; leading axes broadcast.
    logits : (..., q, k)
        Final logits s: scaled, capped, with bias.
    weights : (..., q, k)
        Exact softmax of the logits, before dropout. Rows may sum to less than 1: the rest belongs to sinks, which
        have value 0.
    visible : (..., q, k) bool, optional
        Pairs that take part; default: where the logits are above -inf. A fully masked row has bound 0.
    scale : float, optional
        Default d^-1/2.
    slope : (..., q, k), optional
        Derivative of the final logits by scale * q.k, as in 1 - (logits / c)^2 for a soft cap c. Default 1.
    factor : (..., q, k), optional
        What multiplies the weights after the softmax: dropout's keep / (1 - rate). Default 1.
    unit, unit_weights, unit_output : dtype, name or number
        Format of the computation, of the weights if they are stored before the product with v, and of the output if
        it is rounded once more. A number is a unit roundoff, without underflow.

    Returns
    -------
    Bounds
        ``rss`` and ``worst``, float64, of the output's shape. NaN and infinite inputs count as 0: outputs that are
        not finite are to be compared by place, not by distance.

    Raises
    ------
    TypeError
        If an array is not float64.
    """
    for name, x in {"q": q, "k": k, "v": v, "logits": logits, "weights": weights}.items():
        if getattr(x, "dtype", None) != np.float64:
            raise TypeError(f"{name}: {getattr(x, 'dtype', type(x).__name__)}, expected a float64 NumPy array")
    (u, tiny), (u_w, tiny_w), (u_o, tiny_o) = map(_unit_and_underflow, (unit, unit_weights, unit_output))
    d = q.shape[-1]
    scale = abs(d**-0.5 if scale is None else float(scale))
    slope = np.abs(1.0 if slope is None else slope)
    visible = np.broadcast_to((logits > -np.inf) & (True if visible is None else visible), weights.shape)
    q, k, v = (np.where(np.isfinite(x), x, 0.0) for x in (q, k, v))
    s = np.where(visible & np.isfinite(logits), logits, 0.0)
    p = np.where(visible & np.isfinite(weights), weights, 0.0)
    n = visible.sum(axis=-1, keepdims=True)
    top, sink, s_sink = _sinks(s, p, visible)

    # The output is sum_j p (f v) - o sum_j p = 0 around any centre; a near one keeps |v - o| tight and free of
    # cancellation. Weighted by p, it ignores what stands in keys that nobody sees.
    o = einsum("...qk,...ke->...qe", p if factor is None else p * factor, v)
    seen = einsum("...qk->...k", p)
    total = np.maximum(seen.sum(axis=-1, keepdims=True), np.finfo(float).tiny)
    centre = einsum("...k,...ke->...e", seen / total, v)[..., None, :] if factor is None else 0.0
    f = 1.0 if factor is None else np.abs(factor)
    w, away = v - centre, o - centre

    def weighted(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return einsum("...qk,...ke->...qe", x, y)

    def growth(x: np.ndarray) -> np.ndarray:
        """e^x - 1, kept finite: beyond e^200 a bound says nothing more, and infinity times 0 would be NaN."""
        return np.expm1(np.minimum(x, 200.0))

    with np.errstate(over="ignore"):
        # Worst case: absolute values, every term an upper bound.
        size = scale * einsum("...qd,...kd->...qk", np.abs(q), np.abs(k))
        few = 4 * (1 + np.ceil(n / 16))
        delta = slope * growth((d + 4) * u) * size + u * (4 * size + 2 * np.abs(s) + 2 * np.abs(s - top) + few)
        delta = np.where(visible, delta, 0.0)
        delta_sink = np.where(sink > 0, u * (2 * np.abs(s_sink) + 2 * np.abs(s_sink - top) + few), 0.0)
        largest = np.maximum(delta.max(axis=-1, keepdims=True, initial=0.0), delta_sink)
        theta = growth((2 * n + 4) * u + u_w)
        moved = p * growth(delta)
        worst = weighted(moved * f, np.abs(w)) + np.abs(away) * moved.sum(axis=-1, keepdims=True)
        worst += sink * growth(delta_sink) * np.abs(o)
        worst += (1 + growth(largest)) * theta * (weighted(p * f, np.abs(v)) + np.abs(o))
        worst *= 1 + growth(largest + 2 * theta)
        worst += (tiny + tiny_w) * (weighted(visible * f, np.abs(v)) + n)
        worst = worst * (1 + u_o) + u_o * np.abs(o) + np.where(n > 0, tiny_o, 0.0)

        # Root sum of squares: one standard deviation of independent errors, or a little more.
        product, squares = einsum("...qd,...kd->...qk", q, k), einsum("...qd,...kd->...qk", q**2, k**2)
        delta2 = (slope * scale) ** 2 * d * (squares + product**2) + s**2 + (s - top) ** 2 + 4
        moved2 = np.where(visible, (p * u) ** 2 * delta2, 0.0)
        # sum moved2 (f w - away)^2, expanded.
        square = weighted(moved2 * f**2, w**2) - 2 * away * weighted(moved2 * f, w)
        square += away**2 * moved2.sum(axis=-1, keepdims=True)
        square = np.maximum(square, 0.0) + (sink * u * o) ** 2 * (s_sink**2 + (s_sink - top) ** 2 + 4)
        stored = weighted((p * f) ** 2, v**2)
        square += u**2 * n * (stored + o**2) + u_w**2 * stored + u_o**2 * o**2
        square += tiny_w**2 * weighted(visible * f**2, v**2) + np.where(n > 0, tiny_o**2, 0.0)
    return Bounds(np.sqrt(square), worst)


def _sinks(s: np.ndarray, p: np.ndarray, visible: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per row, with the key axis kept: maximum of keys and sinks, probability of the sinks together, their logit."""
    top = np.where(visible, s, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    likely = p.max(axis=-1, keepdims=True, initial=0.0)
    sink = 1.0 - p.sum(axis=-1, keepdims=True)
    # What the float64 sum itself leaves is no sink; a row without weights has output 0 in any case.
    present = (sink > 4 * p.shape[-1] * 2.0**-53) & (likely > 0)
    sink = np.where(present, sink, 0.0)
    s_sink = np.where(present, top + np.log(np.where(present, sink / np.where(present, likely, 1.0), 1.0)), top)
    return np.maximum(top, s_sink), sink, s_sink


def _unit_and_underflow(unit: Any) -> tuple[float, float]:
    """Unit roundoff, and the absolute error near zero: the smallest normal number where hardware may flush to zero."""
    if unit is None:
        return 0.0, 0.0
    if isinstance(unit, (int, float)):
        return float(unit), 0.0
    name = dtype_name(unit)
    form = format_of(name)
    flushed = form.least_exponent <= FORMATS["float32"].least_exponent
    return unit_roundoff(name), 2.0 ** (form.least_exponent - (0 if flushed else form.precision))
