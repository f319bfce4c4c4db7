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

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refattn import cost as costs
from refattn.arrays import namespace, require_integer
from refattn.core import options
from refattn.core.blocks import Maker, banded, one_length, tiled
from refattn.core.problem import prepare
from refattn.mechanism import mechanism
from refattn.patterns import Pattern, window
from refattn.patterns.counting import Ends
from refattn.records import Block, Counts, Result

__all__ = ["local_attention"]

_LARGE = 512
"""Windows from this width on fill the core's own tiles: batching small blocks pays below it."""


class _Neighbours(Pattern):
    """The keys of the own block, of ``behind`` blocks before it and ``ahead`` blocks after it."""

    def __init__(self, block: int, behind: int, ahead: int) -> None:
        super().__init__("neighbours", block, behind, ahead)
        self._block, self._behind, self._ahead = block, behind, ahead

    def _ends(self, i: Any) -> tuple[Any, Any]:
        """First key that row i sees, and the first one after those that it sees; they may lie outside 0 ... k."""
        return (i // self._block - self._behind) * self._block, (i // self._block + self._ahead + 1) * self._block

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        start, end = self._ends(i)
        return (j >= start) & (j < end)

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Any, h: Any) -> str:
        (lowest, nearest), (farthest, highest) = self._ends(i0), self._ends(i1 - 1)
        if j1 <= lowest or j0 >= highest:
            return "empty"
        return "full" if j0 >= farthest and j1 <= nearest else "partial"

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Any, h: Any) -> tuple[int, int]:
        return self._ends(i0)[0], self._ends(i1 - 1)[1]

    def _interval(self, i: Any, b: Any, h: Any, q: int, k: int) -> tuple[Any, Any]:
        start, end = self._ends(i)
        return np.maximum(start, 0), np.minimum(end, k)

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        start, end = self._interval(i, b, h, q, k)
        return np.maximum(np.minimum(end, m) - start, 0)

    def _ends_of_rows(self, q: int, k: int) -> Ends:
        return Ends(frozenset((-self._behind * self._block, (self._ahead + 1) * self._block)), period=self._block)


def _settings(block: Any, look_backward: Any, look_forward: Any, exact: Any) -> tuple[int, int, int, bool]:
    if not isinstance(exact, (bool, np.bool_)):
        raise TypeError(f"exact is {exact!r}: expected True or False")
    return (
        require_integer("block", block, minimum=1),
        require_integer("look_backward", look_backward, minimum=0),
        require_integer("look_forward", look_forward, minimum=0),
        bool(exact),
    )


def _pattern(block: int, behind: int, ahead: int, exact: bool) -> Pattern:
    return window(block * behind, block * ahead) if exact else _Neighbours(block, behind, ahead)


def _blocks(
    block: int, behind: int, ahead: int, exact: bool, causal: bool, t: int, xp: Any, like: Any
) -> Callable[..., Iterator[Block]]:
    """The mechanism's own blocks: batches of small ones, or tiles where a window fills them."""
    pattern = _pattern(block, behind, ahead, exact)
    size, behind, ahead = _band(block, behind, ahead, exact, causal, t)

    def blocks(visibility: Pattern | None, group: Any) -> Iterator[Block]:
        make = Maker(visibility, group, t, t, xp, like)
        if not size:
            return tiled(make, pattern)
        return banded(make, t, size, behind, ahead, lambda i, j: pattern.visible(i, j, q=t, k=t))

    return blocks


def _band(block: int, behind: int, ahead: int, exact: bool, causal: bool, t: int) -> tuple[int, int, int]:
    """Size of the blocks, and how many a query looks back and forward; size 0 where tiles do better."""
    left, right = block * behind, 0 if causal else block * ahead
    if exact:
        size = min(max(16, math.ceil((left + right) / 2)), 128)
        behind, ahead = math.ceil(left / size), math.ceil(right / size)
    else:
        size = block * max(1, 8 // block)
        behind, ahead = (math.ceil(n * block / size) for n in (behind, 0 if causal else ahead))
    wide = left + right + (0 if exact else block) >= _LARGE or (behind + ahead + 1) * size >= t
    return 0 if wide else size, behind, ahead


@options.takes()
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
    settings = _settings(block, look_backward, look_forward, exact)
    t = _length(q, k)
    own: dict[str, Any] = {"extra_pattern": _pattern(*settings)}
    if algorithm != "whole" and not shared.get("keep_weights"):
        own["blocks"] = _blocks(*settings, shared.get("causal") is True, t, namespace(q, k, v), q)
    prepared = prepare(q, k, v, backend=backend, algorithm=algorithm, **own, **shared)
    result, saved = prepared.run()
    return result, (prepared, saved)


def _length(q: Any, k: Any) -> int:
    if q.ndim < 2 or k.ndim < 2 or q.shape[-2] != k.shape[-2]:
        raise ValueError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: expected as many queries as keys")
    return q.shape[-2]


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
    chosen = _settings(block, look_backward, look_forward, exact)
    own: dict[str, Any] = {"extra_pattern": _pattern(*chosen)}
    if not settings.get("keep_weights"):
        causal = settings.get("causal") is True
        size, behind, ahead = _band(*chosen, causal, t)
        own["blocks"] = _blocks(*chosen, causal, t, np, np.zeros(0))
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
