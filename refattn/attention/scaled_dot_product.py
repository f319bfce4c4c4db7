r"""Scaled dot-product attention, with grouped queries and every option that softmax attention has in the field.

    logits[h,q,k] = scale * sum_d q[h,q,d] * k[g(h),k,d]                 then score_mod, softcap, bias, ALiBi, visibility
    output[h,q,e] = sum_k exp(logits[h,q,k] - lse[h,q]) * v[g(h),k,e]    lse[h,q] = ln sum_k exp(logits[h,q,k])

======  ==========================================  ==================
letter  axis                                        where
======  ==========================================  ==================
...     any batch axes, broadcast as in matmul      all
h       query head                                  q, output, lse
g       key head, h a multiple of g                 k, v
q, k    query position, key position                q, output; k, v
d, e    query/key channel, value channel            q, k; v, output
======  ==========================================  ==================

Conventions: natural logarithm; masks True = may attend; a query that may attend to nothing gives output 0, lse -inf
(with sinks: the lse of the sinks) and gradients 0; windows are inclusive counts; where q != k the alignment is never guessed.

Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.  Soft cap: Gemma Team 2024, arXiv:2408.00118, section 2.
ALiBi: Press et al. 2021, arXiv:2108.12409.  Grouped queries: Ainslie et al. 2023, arXiv:2305.13245.
"""

from typing import Any

import numpy as np

from refattn import cost as costs
from refattn.core import options
from refattn.core.problem import prepare
from refattn.mechanism import mechanism
from refattn.records import Counts, Result

__all__ = ["scaled_dot_product_attention"]


@options.takes()
def forward(q: Any, k: Any, v: Any, *, backend: Any, algorithm: str, **shared: Any) -> tuple[Result, Any]:
    """softmax(scale q k^T) v.

    Parameters
    ----------
    q : array (..., h, q, d)
    k : array (..., g, k, d)
    v : array (..., g, k, e)
    {shared}

    Returns
    -------
    output : array (..., h, q, e), in the dtype of the inputs
    lse : array (..., h, q), in the compute dtype (float32 for half inputs)

    Raises
    ------
    ValueError
        Shapes that disagree, heads that do not divide, or a missing ``align``.
    TypeError
        Dtypes: integer arrays, a mask that is not bool, complex arrays without ``compute_dtype``.

    Examples
    --------
    Two keys, the second twice as likely as the first:

    >>> import numpy as np
    >>> q, k = np.array([[[1.0]]]), np.log([[[1.0], [2.0]]])
    >>> v = np.array([[[3.0], [6.0]]])
    >>> result = scaled_dot_product_attention.forward(q, k, v)
    >>> float(result.output[0, 0, 0]), bool(np.isclose(result.lse[0, 0], np.log(3)))
    (5.0, True)
    """
    prepared = prepare(q, k, v, backend=backend, algorithm=algorithm, **shared)
    result, saved = prepared.run()
    return result, (prepared, saved)


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """Cotangents of q, k, v, bias, scale, softcap, ALiBi slopes and sinks (derivation: ``refattn.core.backward``)."""
    prepared, forward_state = saved
    return prepared.gradients(forward_state, output, lse)


def cost(
    *, b: int = 1, h: int = 1, g: int | None = None, q: int, k: int, d: int, e: int | None = None, **settings: Any
) -> Counts:
    """Counts of softmax attention over the visible pairs; see ``refattn.cost.attention``."""
    return costs.softmax_counts(b=b, h=h, g=g, q=q, k=k, d=d, e=e, **settings)


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 6,
    g: int | None = None,
    q: int = 5,
    k: int = 7,
    d: int = 4,
    e: int = 3,
    **settings: Any,
) -> dict[str, Any]:
    """Normal q (b,h,q,d), k (b,g,k,d), v (b,g,k,e); options are passed through.  g defaults to h // 3 where that divides."""
    g = g or (h // 3 if h % 3 == 0 else h)
    normal = rng.standard_normal
    return {"q": normal((b, h, q, d)), "k": normal((b, g, k, d)), "v": normal((b, g, k, e)), **settings}


scaled_dot_product_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="scaled_dot_product_attention",
    differentiable=("q", "k", "v", *options.DIFFERENTIABLE),
    outputs=("output", "lse"),
)
