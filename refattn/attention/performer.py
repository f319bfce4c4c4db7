r"""Performer: random features whose products estimate exp(q . k), so that the softmax becomes linear attention.

    y(x)         = x / d^(1/4)
    u(x)[n]      = sum_d features[n,d] y(x)[d]
    softmax      : phi(x)[n] = N^(-1/2) (exp(u(x)[n] - |y(x)|^2 / 2 - c(x)) + eps)
    relu         : phi(x)[n] = max(u(x)[n], 0) + eps
    output[i,e]  = sum_n phi(q_i)[n] sum_j phi(k_j)[n] v[j,e] / sum_n phi(q_i)[n] (sum_j phi(k_j)[n] + key_sum_eps)

with j over the keys that query i sees.  c keeps the exponential below 1: for a query the largest u of its own features, for keys
the largest u over all positions and features of the head.

======  ============================  ===================
letter  axis                          where
======  ============================  ===================
...     any batch axes                q, k, v, output
h       head                          q, k, v, output
q, k    query position, key position  q, output; k, v
d, e    channel, value channel        q, k; v, output
n       feature, N of them            features
======  ============================  ===================

Conventions: the features are given, one set for all heads; c counts as a constant in the gradient (without eps it would cancel);
a row whose denominator is 0 gives output 0 and gradients 0.  In the causal form too, c of the keys is taken over all positions:
through eps it lets a little of the future into the past.

Source: Choromanski, Likhosherstov, Dohan et al. 2020, arXiv:2009.14794: section 2.3 and lemma 1 (positive features), 2.4 (orthogonal
features), appendix B.1 (causal prefix sums).  c and eps are those of the released implementations.
"""

import math
from typing import Any

import numpy as np

from refattn.arrays import (
    broadcast_leading,
    namespace,
    real,
    require_axes,
    require_integer,
    require_number,
    require_one_of,
)
from refattn.attention import linear
from refattn.contraction import einsum
from refattn.cost import require_sizes
from refattn.mechanism import mechanism
from refattn.records import Counts, Elements, Pass, Result

__all__ = ["orthogonal_features", "performer_attention"]

KERNELS = {"softmax": 1e-4, "relu": 1e-3}
"""The kernels and the eps that each has by default."""


def orthogonal_features(rng: "np.random.Generator", n: int, d: int) -> np.ndarray:
    """Random features (n, d) for :func:`performer_attention`: normal vectors, orthogonal within each block of d rows.

    The directions are orthonormal, the lengths those of independent normal vectors, so that every row alone is standard normal.

    Parameters
    ----------
    rng : numpy.random.Generator
    n, d : int
        Number of features, channels.

    Returns
    -------
    array (n, d), float64

    Examples
    --------
    >>> import numpy as np
    >>> x = orthogonal_features(np.random.default_rng(0), 3, 4)
    >>> bool(np.allclose(x @ x.T, np.diag(np.sum(x**2, axis=1))))
    True
    """
    n, d = require_integer("n", n, minimum=0), require_integer("d", d, minimum=1)
    directions = np.zeros((0, d))
    for _ in range(-(-n // d)):
        turned, triangle = np.linalg.qr(rng.standard_normal((d, d)))
        # Signs of the diagonal: without them the directions are not uniform, and the error does not go to 0.
        directions = np.concatenate([directions, (turned * np.sign(np.diag(triangle))).T])
    directions = directions[:n]
    return directions * np.sqrt(np.sum(rng.standard_normal((n, d)) ** 2, axis=1, keepdims=True))


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    features: Any,
    kernel: str = "softmax",
    eps: float | None = None,
    causal: bool = False,
    key_sum_eps: float = 0.0,
    chunk: int = 64,
    backend: Any,
) -> tuple[Result, Any]:
    """Attention by random features: linear in the length.

    Parameters
    ----------
    q : array (..., h, q, d)
    k : array (..., h, k, d)
    v : array (..., h, k, e)
    features : array (n, d)
        One random vector for each feature; see :func:`orthogonal_features`.
    kernel : {"softmax", "relu"}
        Positive features of exp(q . k / sqrt(d)), or rectified ones, which estimate no softmax.
    eps : float
        Added to every feature; default 1e-4 (softmax) or 1e-3 (relu).
    causal : bool
        Query i sees the keys j <= i; needs q = k.
    key_sum_eps : float
        Added to every feature of the sum over keys that stands in the denominator.
    chunk : int
        The causal form takes so many positions at a time, with the sums over all earlier ones: its memory is linear in the
        length, and the numbers do not depend on ``chunk`` but for rounding.

    Returns
    -------
    output : array (..., h, q, e)

    Raises
    ------
    ValueError
        Shapes that disagree, no features, an unknown kernel, ``causal`` with q != k, a chunk below 1, constants that are not finite.

    Examples
    --------
    Equal keys have equal weights, whatever the features:

    >>> import numpy as np
    >>> x, v = np.ones((1, 2, 1)), np.array([[[2.0], [4.0]]])
    >>> performer_attention(x, x, v, features=np.array([[0.3], [-1.0]])).round(12)
    array([[[3.],
            [3.]]])
    >>> performer_attention(x, x, v, features=np.array([[0.3], [-1.0]]), causal=True).round(12)
    array([[[2.],
            [3.]]])
    """
    sizes = require_axes(q=(q, "... h q d"), k=(k, "... h k d"), v=(v, "... h k e"), features=(features, "n d"))
    broadcast_leading(q=(q, 3), k=(k, 3), v=(v, 3))
    require_one_of("kernel", kernel, tuple(KERNELS))
    if not sizes["n"]:
        raise ValueError(f"features has shape {tuple(features.shape)}: expected at least one row")
    eps = KERNELS[kernel] if eps is None else eps
    eps = require_number("eps", eps, minimum=0)
    key_sum_eps = require_number("key_sum_eps", key_sum_eps, minimum=0)
    if causal and sizes["q"] != sizes["k"]:
        raise ValueError(
            f"causal Performer attention needs as many queries as keys: q has shape {tuple(q.shape)}, k {tuple(k.shape)}"
        )
    xp = namespace(q, k, v)
    with backend.quiet():
        phi_q, kept_q = _features(q, features, kernel, eps, (-1,))
        phi_k, kept_k = _features(k, features, kernel, eps, (-2, -1))
    result, kept = linear.forward(
        phi_q,
        phi_k,
        v,
        feature_map="identity",
        causal=causal,
        scale=1.0,
        normalizer=xp.full_like(phi_k[..., 0, :], key_sum_eps) if key_sum_eps and sizes["k"] else None,
        chunk=chunk,
        backend=backend,
    )
    return Result(output=result.output), (kept, kept_q, kept_k, features, kernel, backend)


def backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """Cotangents of q, k, v and features: linear attention backwards, then the two feature maps."""
    if output is None:
        return {}
    kept, kept_q, kept_k, features, kernel, backend = saved
    found = linear.backward(kept, output=output, state=None, normalizer=None)
    with backend.quiet():
        d_q, d_features_q = _features_backward(found["q"], features, kernel, *kept_q)
        d_k, d_features_k = _features_backward(found["k"], features, kernel, *kept_k)
    return {"q": d_q, "k": d_k, "v": found["v"], "features": d_features_q + d_features_k}


# ------------------------------------------------------------------------------------------------ steps


def _features(x: Any, features: Any, kernel: str, eps: float, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """phi(x) (..., n), and what its backward needs; ``axes``: where c is the largest u."""
    xp = namespace(x)
    y = x * x.shape[-1] ** -0.25 if x.shape[-1] else x
    u = einsum("...td,nd->...tn", y, features)
    if kernel == "relu":
        above = real(u) > 0
        return xp.where(above | xp.isnan(u), u, xp.zeros_like(u)) + eps, (y, above)
    size = real(u)
    if x.shape[-2]:
        # An entry that is not finite spoils its own row alone, not the largest one of all.
        largest = xp.max(xp.where(xp.isfinite(size), size, xp.full_like(size, -math.inf)), axis=axes, keepdims=True)
        u = u - xp.where(largest == -math.inf, xp.zeros_like(largest), largest)
    grown = features.shape[0] ** -0.5 * xp.exp(u - xp.sum(y * y, axis=-1, keepdims=True) / 2)
    return grown + features.shape[0] ** -0.5 * eps, (y, grown)


def _features_backward(d_phi: Any, features: Any, kernel: str, y: Any, kept: Any) -> tuple[Any, Any]:
    """Cotangents of x and features: of u, and for the softmax kernel of -|y|^2 / 2; c is held fixed."""
    xp = namespace(d_phi)
    d_u = xp.where(kept, d_phi, xp.zeros_like(d_phi)) if kernel == "relu" else kept * d_phi
    d_y = einsum("...tn,nd->...td", d_u, features)
    if kernel == "softmax":
        d_y = d_y - xp.sum(d_u, axis=-1, keepdims=True) * y
    d_x = d_y * d_y.shape[-1] ** -0.25 if d_y.shape[-1] else d_y
    return d_x, einsum("...tn,...td->nd", d_u, y)


# ------------------------------------------------------------------------------------------------ counts, example


def cost(
    *,
    b: int = 1,
    h: int = 1,
    q: int,
    k: int,
    d: int,
    e: int | None = None,
    n: int,
    causal: bool = False,
    chunk: int = 64,
) -> Counts:
    """Counts: linear attention on n features, and n d multiply-adds for each query and key to make them (twice that backward)."""
    e = d if e is None else e
    require_sizes(b=b, h=h, q=q, k=k, d=d, e=e, n=n)
    core = linear.cost(b=b, h=h, q=q, k=k, d=n, e=e, causal=causal, chunk=chunk)
    positions = b * h * (q + k)
    inputs, features = Elements(storage=positions * d + n * d), Elements(storage=positions * n)
    kept = Elements(compute=positions * (n + d))
    made = Counts(
        forward=Pass(
            multiplies=positions * n * d,
            elementwise=positions * (3 * d + 4 * n),
            read=inputs,
            written=features,
            peak=inputs + kept,
        ),
        backward=Pass(
            multiplies=2 * positions * n * d,
            elementwise=positions * (3 * d + 2 * n),
            read=inputs + features,
            written=inputs,
            peak=inputs + 2 * kept,
        ),
        saved=inputs + kept,
        parameters=n * d,
    )
    return made + core


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    q: int = 5,
    k: int = 7,
    d: int = 4,
    e: int = 6,
    n: int = 9,
    **settings: Any,
) -> dict[str, Any]:
    """Normal q (b,h,q,d), k (b,h,k,d), v (b,h,k,e) and orthogonal features (n,d).  Causal: q becomes k."""
    normal = rng.standard_normal
    q = k if settings.get("causal") else q
    return {
        "q": normal((b, h, q, d)), "k": normal((b, h, k, d)), "v": normal((b, h, k, e)),
        "features": orthogonal_features(rng, n, d), **settings,
    }  # fmt: skip


_PROBES = (
    {"q": 21, "k": 21, "n": 15, "causal": True, "says": "causal: query i sees the keys up to its own"},
    {"q": 70, "k": 70, "n": 6, "causal": True, "says": "causal, longer than a usual piece"},
    {
        "q": 19,
        "k": 19,
        "n": 7,
        "causal": True,
        "key_sum_eps": 0.5,
        "says": "a constant added to every feature of the key sum",
    },
    {"q": 11, "k": 19, "n": 12, "eps": 0.2, "says": "a large constant in the features: the stabilising maximum shows"},
    {"q": 13, "k": 13, "n": 8, "causal": True, "eps": 0.2, "says": "causal with a large constant in the features"},
    {"q": 11, "k": 19, "n": 9, "kernel": "relu", "says": "rectified features"},
    {"q": 17, "k": 17, "n": 9, "kernel": "relu", "causal": True, "eps": 0.1, "says": "rectified features, causal"},
)

performer_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="performer_attention",
    differentiable=("q", "k", "v", "features"),
    probes=_PROBES,
)
