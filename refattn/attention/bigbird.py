"""BigBird attention: every block of queries sees its neighbours, a few global blocks and some blocks drawn at random.

    output[h,i,e] = sum_j exp(logits[h,i,j] - lse[h,i]) v[h,j,e]        logits = scale q k^T, where with u = i // block, w = j // block

    |u - w| <= window_blocks,   or u or w among the first and last global blocks,   or w in random_blocks[h,u]

======= ==========================================  =========================
letter  axis                                        where
======= ==========================================  =========================
...     any batch axes, broadcast as in matmul      q, k, v, output, lse
h       head                                        all
t, i, j position, of queries and keys alike         q, k, v, output, lse
n, u, w block, n = ceil(t / block)                  random_blocks
r       random blocks of a row of blocks            random_blocks
d, e    query/key channel, value channel            q, k; v, output
======= ==========================================  =========================

Conventions: one softmax over the set of all these keys, so a block that is random and near, or drawn twice, counts once; the
window does not wrap around; the last block may be short.  Work and memory are linear in t.

Source: Zaheer et al. 2020, arXiv:2007.14062, section 2 and appendix D (the block form).
"""

import math
from typing import Any

import numpy as np

from refattn import cost as costs
from refattn.arrays import is_array, namespace, require_axes, require_integer, to_numpy
from refattn.attention.blocks.bigbird import Layout
from refattn.core import options
from refattn.core.blocks import one_length
from refattn.core.problem import prepare
from refattn.mechanism import mechanism
from refattn.records import Counts, Result

__all__ = ["bigbird_attention"]

_SHARED = ("query_lengths", "key_lengths", "scale")


@options.takes(*_SHARED)
def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    block: int,
    random_blocks: Any = None,
    window_blocks: int = 1,
    global_blocks: tuple[int, int] = (1, 1),
    backend: Any,
    algorithm: str,
    **shared: Any,
) -> tuple[Result, Any]:
    """softmax(scale q k^T, over near, global and random blocks) v.

    Parameters
    ----------
    q, k : arrays (..., h, t, d)
    v : array (..., h, t, e)
    block : int
        Positions of a block.
    random_blocks : int array (h, n, r)
        Blocks of keys that each block of queries sees besides; -1 = none.  Drawn by the caller.
    window_blocks : int
        Neighbours seen on each side.
    global_blocks : (int, int)
        How many blocks from the start and from the end see all blocks and are seen by all.
    {shared}

    Returns
    -------
    output : array (..., h, t, e), in the dtype of the inputs
    lse : array (..., h, t), in the compute dtype (float32 for half inputs)

    Raises
    ------
    ValueError
        Shapes that disagree, random blocks out of range, lengths beyond t.
    TypeError
        random_blocks that are no ints, counts that are no integers.

    Examples
    --------
    Zero queries take means: block {0, 1} is global, {4, 5} also sees {2, 3} by chance.

    >>> import numpy as np
    >>> q, k, v = np.zeros((1, 6, 2)), np.ones((1, 6, 2)), np.arange(6.0).reshape(1, 6, 1)
    >>> drawn = np.array([[[-1], [-1], [1]]])
    >>> options = {"block": 2, "window_blocks": 0, "global_blocks": (1, 0)}
    >>> bigbird_attention(q, k, v, **options)[0, :, 0].tolist()
    [2.5, 2.5, 1.5, 1.5, 2.5, 2.5]
    >>> bigbird_attention(q, k, v, random_blocks=drawn, **options)[0, 4:, 0].tolist()
    [2.5, 2.5]
    """
    sizes = require_axes(q=(q, "... h t d"), k=(k, "... h t d"), v=(v, "... h t e"))
    layout = Layout(sizes["t"], sizes["h"], block, random_blocks, window_blocks, global_blocks)
    own: dict[str, Any]
    if algorithm == "whole":
        own = {"extra_pattern": layout.pattern()}
    else:
        own = {"blocks": layout.blocks(namespace(q, k, v), q)}
    prepared = prepare(q, k, v, backend=backend, algorithm=algorithm, **own, **shared)
    result, saved = prepared.run()
    return result, (prepared, saved)


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """Cotangents of q, k, v and scale (derivation: ``refattn.core.backward``)."""
    prepared, forward_state = saved
    return prepared.gradients(forward_state, output, lse)


_COUNTED = 512
"""Blocks up to which costs are counted on the layout itself."""


def cost(
    *,
    b: int = 1,
    h: int = 1,
    t: int | None = None,
    q: int | None = None,
    k: int | None = None,
    d: int,
    e: int | None = None,
    r: int = 0,
    block: int,
    random_blocks: Any = None,
    window_blocks: int = 1,
    global_blocks: tuple[int, int] = (1, 1),
    **settings: Any,
) -> Counts:
    """Counts over the visible pairs; t, or q = k, is the length.

    Without ``random_blocks``, r blocks that are neither near nor global are counted for every row of blocks that has so many.
    """
    t = one_length(t, q, k)
    costs.require_sizes(b=b, h=h, t=t, r=r)
    sizes: dict[str, Any] = {"b": b, "h": h, "q": t, "k": t, "d": d, "e": e}
    n = -(-t // require_integer("block", block, minimum=1))
    if n <= _COUNTED:
        if random_blocks is None and r:
            random_blocks = _draw(np.random.default_rng(0), h, n, r, window_blocks, global_blocks)
        layout = Layout(t, h, block, random_blocks, window_blocks, global_blocks)
        own: dict[str, Any] = {"extra_pattern": layout.pattern(), "blocks": layout.blocks(np, np.zeros(0))}
        return costs.softmax_counts(**sizes, **own, **settings)
    none = np.zeros((0, n, 0), np.int64)  # the random blocks are counted here
    layout = Layout(t, 0, block, none, window_blocks, global_blocks)
    near, inner = layout.near, layout.last - layout.first  # blocks that are no global ones
    outside = t - (layout.span(layout.first, layout.last)[1] - layout.span(layout.first, layout.last)[0])
    lengths = [settings.get(name) for name in ("query_lengths", "key_lengths")]
    if any(x is not None for x in lengths):
        drawn_blocks = (
            None if random_blocks is None else Layout(t, h, block, random_blocks, window_blocks, global_blocks).drawn
        )
        pairs = _within_lengths(layout, b, h, r, drawn_blocks, *(t if x is None else x for x in lengths))
        return costs.softmax_counts(**sizes, visible=pairs, computed=-(-pairs // max(1, b)), **settings)
    if random_blocks is None:
        free = max(0, inner - 2 * near - 1)  # of the blocks between, those that are not near; more at both ends
        drawn = h * sum(
            min(r, inner - min(near, u) - min(near, inner - 1 - u) - 1) for u in (*range(min(near, inner)),) * 2
        )
        drawn += h * max(0, inner - 2 * near) * min(r, free)
    else:
        drawn = int(np.count_nonzero(Layout(t, h, block, random_blocks, window_blocks, global_blocks).drawn >= 0))
    band = inner * (2 * near + 1) - near * (near + 1) if inner > near else inner * inner
    per_head = outside * t + (t - outside) * outside + band * block**2
    pairs = h * per_head + drawn * block**2
    if layout.last == n and inner and t % block:  # a short last block: fewer keys of its band
        lacking = block - t % block
        pairs -= h * lacking * (2 * min(near + 1, inner) * block - lacking)
    return costs.softmax_counts(**sizes, visible=b * pairs, computed=pairs, **settings)


def _within_lengths(layout: Layout, b: int, h: int, r: int, drawn: Any, queries: Any, keys: Any) -> int:
    """Visible pairs where each batch entry has lengths, by rows of blocks; blocks not drawn yet count as those between on average."""
    first, last, near = layout.first, layout.last, layout.near
    edges = np.arange(layout.n) * layout.block
    rows, columns = (
        np.clip(np.broadcast_to(to_numpy(x) if is_array(x) else np.asarray(x), (b,))[:, None] - edges, 0, layout.block)
        for x in (queries, keys)
    )
    upto = np.concatenate([np.zeros((b, 1), np.int64), np.cumsum(columns, axis=-1)], axis=-1)
    whole, between = upto[:, -1:], upto[:, last : last + 1] - upto[:, first : first + 1]
    u = np.arange(first, last)
    low, high = np.maximum(u - near, first), np.minimum(u + near + 1, last)
    seen = h * (whole - between + upto[:, high] - upto[:, low])
    if drawn is None:
        others = np.minimum(r, last - first - (high - low))
        seen = seen + h * others * (between // max(1, last - first))
    else:
        chosen = np.where(drawn[:, first:last] < 0, layout.n, drawn[:, first:last])  # (h, rows, r)
        seen = seen + np.pad(columns, ((0, 0), (0, 1)))[:, chosen].sum((1, 3))
    own = int((rows[:, first:last] * seen).sum())
    return own + h * int(((rows.sum(-1, keepdims=True) - rows[:, first:last].sum(-1, keepdims=True)) * whole).sum())


def _draw(
    rng: "np.random.Generator", h: int, n: int, r: int, window_blocks: int, global_blocks: tuple[int, int]
) -> np.ndarray:
    """(h, n, r): different blocks for each head, none of them near or global; -1 where there are not enough."""
    found = np.full((h, n, r), -1)
    for head, u in np.ndindex(h, n):
        free = [w for w in range(global_blocks[0], n - global_blocks[1]) if abs(u - w) > window_blocks]
        if global_blocks[0] <= u < n - global_blocks[1]:
            chosen = rng.permutation(free)[:r]
            found[head, u, : len(chosen)] = chosen
    return found


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    t: int = 20,
    d: int = 4,
    e: int = 3,
    r: int = 2,
    block: int = 2,
    window_blocks: int = 1,
    global_blocks: tuple[int, int] = (1, 1),
    **settings: Any,
) -> dict[str, Any]:
    """Normal q, k (b,h,t,d), v (b,h,t,e), and r random blocks for every row of blocks; r=0: without."""
    normal = rng.standard_normal
    given = {"q": normal((b, h, t, d)), "k": normal((b, h, t, d)), "v": normal((b, h, t, e)), "block": block}
    given.update(window_blocks=window_blocks, global_blocks=global_blocks)
    if r and "random_blocks" not in settings:
        given["random_blocks"] = _draw(rng, h, math.ceil(t / block), r, window_blocks, global_blocks)
    return {**given, **settings}


_PROBES = (
    {"t": 64, "block": 4, "r": 3, "says": "three random blocks for each row, another set for each head"},
    {
        "t": 37,
        "block": 5,
        "r": 1,
        "global_blocks": (1, 0),
        "says": "a short last block, global blocks at the start alone",
    },
    {
        "t": 30,
        "block": 3,
        "r": 2,
        "window_blocks": 2,
        "global_blocks": (2, 1),
        "says": "two neighbours, two global blocks",
    },
    {
        "t": 40,
        "b": 2,
        "block": 4,
        "query_lengths": (40, 23),
        "key_lengths": (40, 23),
        "says": "padded positions, in the last global block too",
    },
    {
        "t": 33,
        "block": 4,
        "r": 0,
        "global_blocks": (0, 0),
        "scale": 0.3,
        "says": "the window alone, a scale of one's own",
    },
)

bigbird_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="bigbird_attention",
    differentiable=("q", "k", "v", "scale"),
    outputs=("output", "lse"),
    probes=_PROBES,
)
