r"""Linformer: keys and values projected along the positions, so that every query meets n rows instead of k.

    pk[h,n,d]     = sum_k e_k[k,n] k[h,k,d]        pv[h,n,e] = sum_k e_v[k,n] v[h,k,e]
    logits[h,q,n] = scale * sum_d q[h,q,d] pk[h,n,d]
    output[h,q,e] = sum_n softmax_n(logits)[h,q,n] pv[h,n,e]

======  =======================================  =========================
letter  axis                                     where
======  =======================================  =========================
...     any batch axes                           q, k, v, output
h       head; the projections are shared by all  q, k, v, output
q, k    query position, key position             q, output; k, v, e_k, e_v
n       projected row                            e_k, e_v
d, e    query/key channel, value channel         q, k; v, output
======  =======================================  =========================

Conventions: no causal form exists, since every projected row mixes all positions; the rows of ``e_k`` and ``e_v`` are those of
the positions in use, so a table made for longer sequences is cut by the caller.

Source: Wang, Li, Khabsa, Fang, Ma 2020, arXiv:2006.04768, section 4, equation 7 (E and F there are e_k and e_v transposed).
"""

from typing import Any

import numpy as np

from refattn.arrays import broadcast_leading, require_axes, require_finite
from refattn.contraction import einsum
from refattn.cost import require_sizes
from refattn.mechanism import mechanism
from refattn.normalization import masked_softmax, masked_softmax_backward
from refattn.records import Counts, Elements, Pass, Result

__all__ = ["linformer_attention"]


def forward(q: Any, k: Any, v: Any, *, e_k: Any, e_v: Any, scale: Any = None) -> tuple[Result, Any]:
    """softmax(scale q (e_k^T k)^T) (e_v^T v).

    Parameters
    ----------
    q : array (..., h, q, d)
    k : array (..., h, k, d)
    v : array (..., h, k, e)
    e_k, e_v : arrays (k, n)
        Projections along the positions; sharing one means passing it twice.
    scale : float
        Default d**-0.5.

    Returns
    -------
    output : array (..., h, q, e)

    Raises
    ------
    ValueError
        Shapes that disagree, a scale that is not finite.

    Examples
    --------
    Two positions averaged into one row: every query gets the mean of the values.

    >>> import numpy as np
    >>> q, k, v = np.ones((1, 1, 1)), np.ones((1, 2, 1)), np.array([[[2.0], [4.0]]])
    >>> linformer_attention(q, k, v, e_k=np.full((2, 1), 0.5), e_v=np.full((2, 1), 0.5))
    array([[[3.]]])
    """
    sizes = require_axes(q=(q, "... h q d"), k=(k, "... h k d"), v=(v, "... h k e"), e_k=(e_k, "k n"), e_v=(e_v, "k n"))
    broadcast_leading(q=(q, 3), k=(k, 3), v=(v, 3))
    if scale is None:
        scale = max(1, sizes["d"]) ** -0.5
    else:
        require_finite("scale", scale)
    keys = einsum("kn,...hkd->...hnd", e_k, k)
    values = einsum("kn,...hke->...hne", e_v, v)
    products = einsum("...hqd,...hnd->...hqn", q, keys)
    weights, _ = masked_softmax(products * scale)
    output = einsum("...hqn,...hne->...hqe", weights, values)
    return Result(output=output), (q, k, v, e_k, e_v, scale, keys, values, products, weights)


def backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """Cotangents of q, k, v, e_k, e_v and scale."""
    if output is None:
        return {}
    q, k, v, e_k, e_v, scale, keys, values, products, weights = saved
    d_values = einsum("...hqn,...hqe->...hne", weights, output)
    d_weights = einsum("...hqe,...hne->...hqn", output, values)
    d_logits = masked_softmax_backward(weights, d_weights)
    d_products = d_logits * scale
    d_keys = einsum("...hqn,...hqd->...hnd", d_products, q)
    return {
        "q": einsum("...hqn,...hnd->...hqd", d_products, keys),
        "k": einsum("kn,...hnd->...hkd", e_k, d_keys),
        "v": einsum("kn,...hne->...hke", e_v, d_values),
        "e_k": einsum("...hkd,...hnd->kn", k, d_keys),
        "e_v": einsum("...hke,...hne->kn", v, d_values),
        "scale": einsum("...hqn,...hqn->", d_logits, products),
    }


def cost(*, b: int = 1, h: int = 1, q: int, k: int, n: int, d: int, e: int | None = None) -> Counts:
    """Counts: k n (d + e) for the projections and q n (d + e) for the attention, per head; linear in the length.

    Backward: twice that, and q n a head for the gradient of the scale.
    """
    e = d if e is None else e
    require_sizes(b=b, h=h, q=q, k=k, n=n, d=d, e=e)
    inputs = Elements(storage=b * h * (q * d + k * (d + e)) + 2 * k * n)
    results = Elements(storage=b * h * q * e)
    kept = Elements(storage=b * h * (n * (d + e) + 2 * q * n))
    once, logits = b * h * n * (q + k) * (d + e), b * h * q * n
    return Counts(
        forward=Pass(multiplies=once, elementwise=5 * logits, read=inputs, written=results, peak=results + kept),
        backward=Pass(
            multiplies=2 * once + logits,
            elementwise=6 * logits,
            read=inputs + kept + results,
            written=inputs,
            peak=inputs + 2 * kept,
        ),
        saved=inputs + kept,
        parameters=2 * k * n,
    )


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    q: int = 5,
    k: int = 7,
    n: int = 4,
    d: int = 3,
    e: int = 2,
    **settings: Any,
) -> dict[str, Any]:
    """Normal arrays and projections; options are passed through."""
    normal = rng.standard_normal
    return {
        "q": normal((b, h, q, d)), "k": normal((b, h, k, d)), "v": normal((b, h, k, e)),
        "e_k": normal((k, n)) / k**0.5, "e_v": normal((k, n)) / k**0.5, **settings,
    }  # fmt: skip


_PROBES = (
    {"q": 21, "k": 34, "n": 13, "scale": 0.3, "says": "13 rows for 34 positions, a scale of one's own"},
    {"q": 5, "k": 8, "n": 1, "says": "one row: every weight is 1"},
)

linformer_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="linformer_attention",
    differentiable=("q", "k", "v", "e_k", "e_v", "scale"),
    probes=_PROBES,
)
