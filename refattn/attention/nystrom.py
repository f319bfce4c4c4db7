r"""Nystrom attention: the weights of all pairs from those between tokens and a few landmarks, and a pseudo-inverse.

    q_m[h,n,d] = mean of the n-th segment of q          k_m[h,n,d] = mean of the n-th segment of k
    F = softmax(q k_m^T / sqrt(d))                      (q, n)
    A = softmax(q_m k_m^T / sqrt(d))                    (n, n)
    B = softmax(q_m k^T / sqrt(d))                      (n, k)
    Z_0 = A^T / (largest column sum of A)               Z' = Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4
    output = F Z (B v)

======  ===============================================  =========================
letter  axis                                             where
======  ===============================================  =========================
...     any batch axes                                   all
h       head                                             all
q, k    query position, key position                     q, output; k, v
d, e    channel, value channel                           q, k; v, output
n       landmark, one for each segment of the sequence   q_m, k_m, F, A, B, Z
======  ===============================================  =========================

Conventions: a length that is no multiple of the landmarks gets zeros in front, which count in the means and, as keys with logit 0,
in B.  The starting point divides by the largest row sum too, which is 1 for a softmax.  ``pinv_scale="batch"`` takes one largest
column sum for the whole batch and all heads, as released code does, so that a result depends on its batch until the iteration has
converged.  Where several columns share the largest sum, each gets an equal part of its gradient.  No causal form: landmarks mix positions.

Source: Xiong, Zeng, Chakraborty, Tan, Fung, Li, Singh 2021, arXiv:2102.03902: section 3.2, algorithm 1; the iteration is equation 11,
due to Razavi et al. 2014.
"""

from typing import Any

import numpy as np

from refattn.arrays import (
    broadcast_leading,
    device,
    namespace,
    real,
    require_axes,
    require_integer,
    require_one_of,
    sum_to_shape,
)
from refattn.contraction import einsum
from refattn.cost import require_sizes
from refattn.mechanism import mechanism
from refattn.normalization import masked_softmax, masked_softmax_backward
from refattn.records import Counts, Elements, Pass, Result

__all__ = ["nystrom_attention"]

SCALES = ("matrix", "batch")


def forward(
    q: Any, k: Any, v: Any, *, landmarks: int, iterations: int = 6, pinv_scale: str = "matrix"
) -> tuple[Result, Any]:
    """softmax(q k_m^T) pinv(softmax(q_m k_m^T)) softmax(q_m k^T) v with landmarks q_m, k_m.

    Parameters
    ----------
    q : array (..., h, q, d)
    k : array (..., h, k, d)
    v : array (..., h, k, e)
    landmarks : int
        Segments that queries and keys are cut into; at most the shorter of the two lengths.
    iterations : int
        Steps of the iteration for the pseudo-inverse.
    pinv_scale : {"matrix", "batch"}
        Whether each matrix starts from its own largest column sum, or all from the largest of batch and heads.

    Returns
    -------
    output : array (..., h, q, e)

    Raises
    ------
    ValueError
        Shapes that disagree, more landmarks than tokens, negative iterations, an unknown ``pinv_scale``.

    Examples
    --------
    One landmark: every query gets the weights of the mean query.

    >>> import numpy as np
    >>> q, k, v = np.zeros((1, 3, 1)), np.ones((1, 2, 1)), np.array([[[2.0], [4.0]]])
    >>> nystrom_attention(q, k, v, landmarks=1)
    array([[[3.],
            [3.],
            [3.]]])
    """
    sizes = require_axes(q=(q, "... h q d"), k=(k, "... h k d"), v=(v, "... h k e"))
    broadcast_leading(q=(q, 3), k=(k, 3), v=(v, 3))
    landmarks = require_integer("landmarks", landmarks, minimum=1)
    iterations = require_integer("iterations", iterations, minimum=0)
    require_one_of("pinv_scale", pinv_scale, SCALES)
    for name, x in (("q", q), ("k", k)):
        if landmarks > x.shape[-2]:
            raise ValueError(
                f"landmarks is {landmarks}: expected at most the {x.shape[-2]} tokens of {name} {tuple(x.shape)}"
            )
    scale = max(1, sizes["d"]) ** -0.5
    q, k, v = (_padded(x, landmarks) for x in (q, k, v))
    q_m, k_m = _segment_means(q, landmarks), _segment_means(k, landmarks)
    f, _ = masked_softmax(scale * einsum("...qd,...nd->...qn", q, k_m))
    a, _ = masked_softmax(scale * einsum("...md,...nd->...mn", q_m, k_m))
    b, _ = masked_softmax(scale * einsum("...nd,...kd->...nk", q_m, k))
    z, steps = _inverse(a, iterations, pinv_scale)
    summed = einsum("...nk,...ke->...ne", b, v)
    mixed = einsum("...mn,...ne->...me", z, summed)
    output = einsum("...qn,...ne->...qe", f, mixed)[..., -sizes["q"] :, :]
    kept = (q, k, v, q_m, k_m, f, a, b, z, steps, summed, mixed)
    return Result(output=output + 0), (kept, scale, landmarks, pinv_scale, sizes)


def backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """Cotangents of q, k and v: the three products, the iteration from its last step, three softmaxes, the means."""
    if output is None:
        return {}
    (q, k, v, q_m, k_m, f, a, b, z, steps, summed, mixed), scale, landmarks, pinv_scale, sizes = saved
    d_output = _padded(output, landmarks)
    d_f = einsum("...qe,...ne->...qn", d_output, mixed)
    d_mixed = einsum("...qn,...qe->...ne", f, d_output)
    d_z = einsum("...me,...ne->...mn", d_mixed, summed)
    d_summed = einsum("...mn,...me->...ne", z, d_mixed)
    d_b = einsum("...ne,...ke->...nk", d_summed, v)
    d_v = einsum("...nk,...ne->...ke", b, d_summed)
    # v may have batch axes that F, A and B lack: summed here, since the terms below are added to each other.
    d_f, d_z, d_b = (sum_to_shape(d, tuple(x.shape)) for d, x in ((d_f, f), (d_z, z), (d_b, b)))
    d_a = _inverse_backward(a, steps, pinv_scale, d_z)
    s_f, s_a, s_b = (scale * masked_softmax_backward(*pair) for pair in ((f, d_f), (a, d_a), (b, d_b)))
    d_q_m = einsum("...mn,...nd->...md", s_a, k_m) + einsum("...nk,...kd->...nd", s_b, k)
    d_k_m = einsum("...mn,...md->...nd", s_a, q_m) + einsum("...qn,...qd->...nd", s_f, q)
    d_q = einsum("...qn,...nd->...qd", s_f, k_m) + _segment_means_backward(d_q_m, q.shape[-2])
    d_k = einsum("...nk,...nd->...kd", s_b, q_m) + _segment_means_backward(d_k_m, k.shape[-2])
    return {"q": d_q[..., -sizes["q"] :, :], "k": d_k[..., -sizes["k"] :, :], "v": d_v[..., -sizes["k"] :, :]}


# ------------------------------------------------------------------------------------------------ steps


def _padded(x: Any, landmarks: int) -> Any:
    """Zeros in front, up to a multiple of ``landmarks``."""
    xp, missing = namespace(x), -x.shape[-2] % landmarks
    if not missing:
        return x
    zeros = xp.zeros((*x.shape[:-2], missing, x.shape[-1]), dtype=x.dtype, device=device(x))
    return xp.concat([zeros, x], axis=-2)


def _segment_means(x: Any, landmarks: int) -> Any:
    xp = namespace(x)
    segments = xp.reshape(x, (*x.shape[:-2], landmarks, x.shape[-2] // landmarks, x.shape[-1]))
    return xp.mean(segments, axis=-2)


def _segment_means_backward(d_mean: Any, length: int) -> Any:
    xp = namespace(d_mean)
    size = length // d_mean.shape[-2]
    return xp.repeat(d_mean / size, size, axis=-2)


def _inverse(a: Any, iterations: int, pinv_scale: str) -> tuple[Any, list[Any]]:
    """Z after the iteration, and what each step keeps: Z, A Z and the two inner brackets before it."""
    xp = namespace(a)
    largest, _, _ = _largest_column_sum(a, pinv_scale)
    z = xp.matrix_transpose(a) / largest
    unit = xp.eye(a.shape[-1], dtype=a.dtype, device=device(a))
    steps = []
    for _ in range(iterations):
        y = einsum("...mn,...no->...mo", a, z)
        inner = 15 * unit - einsum("...mn,...no->...mo", y, 7 * unit - y)
        outer = 13 * unit - einsum("...mn,...no->...mo", y, inner)
        steps.append((z, y, inner, outer))
        z = einsum("...mn,...no->...mo", z, outer) / 4
    return z, [*steps, z]


def _inverse_backward(a: Any, steps: list[Any], pinv_scale: str, d_z: Any) -> Any:
    """Cotangent of A: each step of the iteration, then Z_0 = A^T / largest and the columns that have the largest sum."""
    xp = namespace(a)
    d_a = xp.zeros_like(a)
    unit = xp.eye(a.shape[-1], dtype=a.dtype, device=device(a))
    for z, y, inner, outer in reversed(steps[:-1]):
        d_outer = einsum("...nm,...no->...mo", z, d_z) / 4
        d_inner = -einsum("...nm,...no->...mo", y, d_outer)
        d_y = -einsum("...mo,...no->...mn", d_outer, inner)
        d_y = d_y - einsum("...mo,...no->...mn", d_inner, 7 * unit - y)
        d_y = d_y + einsum("...nm,...no->...mo", y, d_inner)
        d_a = d_a + einsum("...mo,...no->...mn", d_y, z)
        d_z = einsum("...mo,...no->...mn", d_z, outer) / 4 + einsum("...nm,...no->...mo", a, d_y)
    largest, ties, count = _largest_column_sum(a, pinv_scale)
    d_first = xp.matrix_transpose(d_z) / largest
    axes = (-1, -2) if pinv_scale == "matrix" else None
    d_largest = -xp.sum(d_first * a, axis=axes, keepdims=True) / largest
    return d_a + d_first + xp.where(ties, d_largest / count, xp.zeros_like(a))


def _largest_column_sum(a: Any, pinv_scale: str) -> tuple[Any, Any, Any]:
    """The largest column sum (..., 1, 1), which columns have it, and how many these are."""
    xp = namespace(a)
    sums = xp.sum(a, axis=-2, keepdims=True)
    axes = (-1, -2) if pinv_scale == "matrix" else None
    if not sums.size:
        return xp.ones_like(sums[..., :1]), sums == 0, 1
    ties = real(sums) == xp.max(real(sums), axis=axes, keepdims=True)
    count = xp.sum(xp.astype(ties, a.dtype), axis=axes, keepdims=True)
    return xp.sum(xp.where(ties, sums, xp.zeros_like(sums)), axis=axes, keepdims=True) / count, ties, count


# ------------------------------------------------------------------------------------------------ counts, example


def cost(
    *,
    b: int = 1,
    h: int = 1,
    q: int,
    k: int,
    d: int,
    e: int | None = None,
    landmarks: int,
    iterations: int = 6,
) -> Counts:
    """Counts on the padded lengths: n (q + k) (d + e) for the two long matrices, n^2 (d + e) in the middle, 4 n^3 a step.

    Backward: twice the products, and 8 n^3 a step.
    """
    e = d if e is None else e
    n = require_integer("landmarks", landmarks, minimum=1)
    require_sizes(b=b, h=h, q=q, k=k, d=d, e=e, iterations=iterations)
    q_p, k_p, units = q + -q % n, k + -k % n, b * h
    pairs = n * (q_p + k_p)
    products, inverse = units * (pairs + n * n) * (d + e), units * iterations * 4 * n**3
    inputs, results = Elements(storage=units * (q * d + k * (d + e))), Elements(storage=units * q * e)
    kept = Elements(compute=units * (pairs + n * n * (2 + 4 * iterations) + n * (2 * d + 2 * e)))
    steps = units * (5 * (pairs + n * n) + (q_p + k_p) * d)
    return Counts(
        forward=Pass(
            multiplies=products + inverse,
            elementwise=steps + units * 4 * iterations * n * n,
            read=inputs,
            written=results,
            peak=results + kept,
        ),
        backward=Pass(
            multiplies=2 * (products + inverse),
            elementwise=steps + units * 8 * iterations * n * n,
            read=inputs + kept + results,
            written=inputs,
            peak=inputs + 2 * kept,
        ),
        saved=inputs + kept,
    )


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    q: int = 6,
    k: int = 8,
    d: int = 4,
    e: int = 3,
    landmarks: int = 3,
    **settings: Any,
) -> dict[str, Any]:
    """Normal q (b,h,q,d), k (b,h,k,d), v (b,h,k,e); at most as many landmarks as tokens."""
    normal = rng.standard_normal
    return {
        "q": normal((b, h, q, d)), "k": normal((b, h, k, d)), "v": normal((b, h, k, e)),
        "landmarks": min(landmarks, q, k), **settings,
    }  # fmt: skip


_PROBES = (
    {"q": 24, "k": 24, "landmarks": 6, "says": "segments of equal length, nothing added in front"},
    {"q": 23, "k": 31, "landmarks": 5, "says": "lengths that are no multiple of the landmarks: zeros in front"},
    {"q": 20, "k": 20, "landmarks": 5, "iterations": 2, "says": "two steps: the inverse is far from converged"},
    {
        "q": 20,
        "k": 15,
        "landmarks": 5,
        "iterations": 3,
        "pinv_scale": "batch",
        "says": "one starting scale for the batch",
    },
    {"q": 9, "k": 14, "landmarks": 1, "says": "one landmark: all queries get the same output"},
)

nystrom_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="nystrom_attention",
    differentiable=("q", "k", "v"),
    probes=_PROBES,
)
