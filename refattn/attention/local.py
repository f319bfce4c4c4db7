"""Local attention: every query sees the keys near it, by blocks or by exact distance.

    output[h,i,e] = sum_j exp(logits[h,i,j] - lse[h,i]) * v[g(h),j,e]         logits = scale * q k^T and the shared terms

    blocks:  j with  i // block - look_backward <= j // block <= i // block + look_forward
    exact:   j with  i - block * look_backward <= j <= i + block * look_forward

======= ==========================================  ==================
letter  axis                                        where
======= ==========================================  ==================
...     any batch axes, broadcast as in matmul      all
h       query head                                  q, output, lse
g       key head, h a multiple of g                 k, v
t, i, j position, of queries and keys alike         all
d, e    query/key channel, value channel            q, k; v, output
======= ==========================================  ==================

Conventions: the sequence does not wrap around and is not padded; the last block may be short; with ``exact`` the query
itself always counts; ``causal`` takes the future away from either form.  Work and memory are linear in t.

Source: Parmar et al. 2018, arXiv:1802.05751, section 4 (local self-attention); Child et al. 2019, arXiv:1904.10509.
"""

from typing import Any

import numpy as np

from refattn import cost as costs
from refattn.arrays import namespace
from refattn.attention.blocks.local import Near, seen_after
from refattn.core import options
from refattn.core.blocks import one_length
from refattn.core.listed import CHOICES
from refattn.core.problem import prepare
from refattn.mechanism import mechanism
from refattn.records import Counts, Result

__all__ = ["local_attention"]


@options.takes(*(n for n in options.SHARED if n not in CHOICES))
def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    block: int,
    look_backward: int = 1,
    look_forward: int = 0,
    exact: bool = False,
    backend: Any,
    algorithm: str,
    **shared: Any,
) -> tuple[Result, Any]:
    """softmax(scale q k^T, over the keys nearby) v.

    Parameters
    ----------
    q : array (..., h, t, d)
    k : array (..., g, t, d)
    v : array (..., g, t, e)
    block : int
        Positions of a block, at least 1.
    look_backward, look_forward : int
        Blocks before and after the own one that a query sees.
    exact : bool
        Count positions, not blocks: i - j <= block * look_backward and j - i <= block * look_forward.
    {shared}

    Returns
    -------
    output : array (..., h, t, e), in the dtype of the inputs
    lse : array (..., h, t), in the compute dtype (float32 for half inputs)

    Raises
    ------
    ValueError
        Shapes that disagree, as many queries as keys missing, a block below 1, a negative look_backward or look_forward.
    TypeError
        Options or arrays of the wrong type.

    Examples
    --------
    Zero queries take the mean of what they see: blocks {0, 1}, {2, 3}, {4}, each with the one before it.

    >>> import numpy as np
    >>> q, k, v = np.zeros((1, 5, 2)), np.ones((1, 5, 2)), np.arange(5.0).reshape(1, 5, 1)
    >>> local_attention(q, k, v, block=2)[0, :, 0].tolist()
    [0.5, 0.5, 1.5, 1.5, 3.0]
    >>> local_attention(q, k, v, block=2, exact=True)[0, :, 0].tolist()
    [0.0, 0.5, 1.0, 2.0, 3.0]
    """
    sizes = options.read_sizes(q, k, v)
    if sizes.q != sizes.k:
        raise ValueError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: expected as many queries as keys")
    near = Near.read(sizes.q, block, look_backward, look_forward, exact)
    own: dict[str, Any] = {"extra_pattern": near.pattern}
    if algorithm != "whole" and not shared.get("keep_weights"):
        own["blocks"] = near.blocks(seen_after(sizes.lead, sizes.q, shared), namespace(q, k, v), q)
    prepared = prepare(q, k, v, backend=backend, algorithm=algorithm, **own, **shared)
    result, saved = prepared.run()
    return result, (prepared, saved)


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """Cotangents of q, k, v and the shared options (derivation: ``refattn.core.backward``)."""
    prepared, forward_state = saved
    return prepared.gradients(forward_state, output, lse)


def cost(
    *,
    b: int = 1,
    h: int = 1,
    g: int | None = None,
    t: int | None = None,
    q: int | None = None,
    k: int | None = None,
    d: int,
    e: int | None = None,
    block: int,
    look_backward: int = 1,
    look_forward: int = 0,
    exact: bool = False,
    **settings: Any,
) -> Counts:
    """Counts over the visible pairs; ``computed_multiplies`` over the blocks.  t, or q = k, is the length."""
    t = one_length(t, q, k)
    near = Near.read(t, block, look_backward, look_forward, exact)
    own: dict[str, Any] = {"extra_pattern": near.pattern}
    if not settings.get("keep_weights"):
        after = seen_after((b,), t, settings)
        size, behind, ahead = near.band(after)
        own["blocks"] = near.blocks(after, np, np.zeros(0))
        own["computed"] = h * (t * (behind + 1 + ahead) * size if size else costs.tiled_pairs(own["extra_pattern"], t))
    return costs.softmax_counts(b=b, h=h, g=g, q=t, k=t, d=d, e=e, **own, **settings)


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    g: int | None = None,
    t: int = 11,
    d: int = 4,
    e: int = 3,
    block: int = 3,
    **settings: Any,
) -> dict[str, Any]:
    """Normal q (b,h,t,d), k (b,g,t,d), v (b,g,t,e); options are passed through.  g defaults to h."""
    g = g or h
    normal = rng.standard_normal
    return {"q": normal((b, h, t, d)), "k": normal((b, g, t, d)), "v": normal((b, g, t, e)), "block": block, **settings}


_PROBES = (
    {
        "t": 29,
        "block": 4,
        "look_backward": 2,
        "look_forward": 1,
        "says": "whole blocks on both sides, the last one short",
    },
    {"t": 31, "block": 5, "causal": True, "says": "causal blocks that look back by one"},
    {"t": 30, "block": 4, "look_backward": 2, "look_forward": 1, "exact": True, "says": "distances on both sides"},
    {"t": 26, "block": 3, "exact": True, "causal": True, "says": "distances, causal"},
    {"t": 9, "block": 16, "says": "a sequence shorter than a block"},
)

local_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="local_attention",
    differentiable=("q", "k", "v", *options.DIFFERENTIABLE),
    outputs=("output", "lse"),
    probes=_PROBES,
)
