r"""Efficient attention: a softmax over channels of the queries and one over positions of the keys, linear in the length.

    rho_q[h,q,d]  = exp(q[h,q,d]) / sum_d exp(q[h,q,d])          over channels
    rho_k[h,k,d]  = exp(k[h,k,d]) / sum_k exp(k[h,k,d])          over positions
    output[h,q,e] = sum_d rho_q[h,q,d] sum_k rho_k[h,k,d] v[h,k,e]

======  =============================  =========================
letter  axis                           where
======  =============================  =========================
...     any batch axes                 all
h       head                           all
q, k    query position, key position   q, output; k, v
d, e    channel, value channel         q, k; v, output
======  =============================  =========================

Conventions: no scale and no causal form; rows of an implied weight matrix sum to 1.  Keys beyond ``key_lengths`` are never
read; a batch entry without keys gives output 0.

Source: Shen, Zhang, Zhao, Yi, Li 2018, arXiv:1812.01243, section 3.2, with the softmax normalisation of equation 7.
"""

import math
from typing import Any

import numpy as np

from refattn.arrays import broadcast_leading, namespace, require_axes, to_namespace
from refattn.contraction import einsum
from refattn.core.options import per_batch
from refattn.cost import require_sizes
from refattn.mechanism import mechanism
from refattn.normalization import masked_softmax, masked_softmax_backward
from refattn.records import Counts, Elements, Pass, Result

__all__ = ["efficient_attention"]


def forward(q: Any, k: Any, v: Any, *, key_lengths: Any = None) -> tuple[Result, Any]:
    """softmax over channels of q times (softmax over positions of k)^T v.

    Parameters
    ----------
    q : array (..., h, q, d)
    k : array (..., h, k, d)
    v : array (..., h, k, e)
    key_lengths : ints per batch
        Keys beyond are padding.

    Returns
    -------
    output : array (..., h, q, e)

    Raises
    ------
    ValueError
        Shapes that disagree, lengths beyond the keys.

    Examples
    --------
    Equal keys and one channel: every query gets the mean of the values.

    >>> import numpy as np
    >>> q, k, v = np.ones((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[2.0], [4.0]]])
    >>> efficient_attention(q, k, v)
    array([[[3.]]])
    """
    require_axes(q=(q, "... h q d"), k=(k, "... h k d"), v=(v, "... h k e"))
    lead = broadcast_leading(q=(q, 3), k=(k, 3), v=(v, 3))
    xp = namespace(q, k, v)
    real_keys = None
    if key_lengths is not None:
        counts = per_batch("key_lengths", key_lengths, lead)
        if counts.size and (counts.min() < 0 or counts.max() > k.shape[-2]):
            raise ValueError(f"key_lengths is {counts.tolist()}: expected between 0 and {k.shape[-2]}")
        counts = np.array(np.broadcast_to(counts, (math.prod(lead),))).reshape(*lead, 1, 1)
        real_keys = xp.arange(k.shape[-2]) < to_namespace(counts, xp, like=k)  # (..., 1, k)
        v = _selected(real_keys[..., None], v)
    over_channels, _ = masked_softmax(q)
    if real_keys is not None:  # a batch entry without keys reads no query
        over_channels = _selected(xp.any(real_keys, axis=-1)[..., None, None], over_channels)
    columns = xp.matrix_transpose(k)  # (..., h, d, k)
    over_keys, _ = masked_softmax(columns, None if real_keys is None else real_keys[..., None, :])
    context = einsum("...hdk,...hke->...hde", over_keys, v)
    output = einsum("...hqd,...hde->...hqe", over_channels, context)
    return Result(output=output), (v, real_keys, over_channels, over_keys, context)


def backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """Cotangents of q, k and v: two softmax backwards around one (d, e) matrix."""
    if output is None:
        return {}
    v, real_keys, over_channels, over_keys, context = saved
    xp = namespace(v)
    d_channels = einsum("...hqe,...hde->...hqd", output, context)
    d_context = einsum("...hqd,...hqe->...hde", over_channels, output)
    d_keys = einsum("...hde,...hke->...hdk", d_context, v)
    d_v = einsum("...hdk,...hde->...hke", over_keys, d_context)
    if real_keys is not None:
        d_v = _selected(real_keys[..., None], d_v)
    return {
        "q": masked_softmax_backward(over_channels, d_channels),
        "k": xp.matrix_transpose(masked_softmax_backward(over_keys, d_keys)),
        "v": d_v,
    }


def _selected(keep: Any, x: Any) -> Any:
    return namespace(x).where(keep, x, namespace(x).zeros_like(x))


def cost(*, b: int = 1, h: int = 1, q: int, k: int, d: int, e: int | None = None) -> Counts:
    """Counts: (q + k) d e multiply-adds a head, twice that backward; linear in the length."""
    e = d if e is None else e
    require_sizes(b=b, h=h, q=q, k=k, d=d, e=e)
    inputs = Elements(storage=b * h * (q * d + k * (d + e)))
    results, kept = Elements(storage=b * h * q * e), Elements(storage=b * h * (q * d + k * d + d * e))
    once, steps = b * h * (q + k) * d * e, 4 * b * h * d * (q + k)
    return Counts(
        forward=Pass(multiplies=once, elementwise=steps, read=inputs, written=results, peak=results + kept),
        backward=Pass(
            multiplies=2 * once, elementwise=steps, read=inputs + kept + results, written=inputs, peak=inputs + 2 * kept
        ),
        saved=inputs + kept,
    )


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    q: int = 5,
    k: int = 7,
    d: int = 4,
    e: int = 3,
    **settings: Any,
) -> dict[str, Any]:
    """Normal arrays; options are passed through."""
    normal = rng.standard_normal
    return {"q": normal((b, h, q, d)), "k": normal((b, h, k, d)), "v": normal((b, h, k, e)), **settings}


_PROBES = (
    {"q": 9, "k": 15, "b": 2, "key_lengths": (15, 6), "says": "padded keys"},
    {"q": 4, "k": 6, "b": 2, "key_lengths": (0, 6), "says": "a batch entry without keys"},
)

efficient_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="efficient_attention",
    differentiable=("q", "k", "v"),
    probes=_PROBES,
)
