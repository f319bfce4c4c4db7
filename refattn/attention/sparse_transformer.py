"""Sparse Transformer: causal attention whose rows see about sqrt(t) keys, in two parts that together reach every position.

    output[h,i,e] = sum_{j in A_h(i)} exp(logits[h,i,j] - lse[h,i]) * v[g(h),j,e]    logits = scale * q k^T and shared terms

    strided  first:  j = max(0, i - stride) ... i               second:  (i - j) mod stride = 0
    fixed    first:  j // stride = i // stride                  second:  stride - o - c <= j mod stride < stride - o

all with j <= i; c is ``summary``, o the head's entry of ``summary_offsets``.  A *merged* head has one softmax over the union.

======= ==========================================  ==================
letter  axis                                        where
======= ==========================================  ==================
...     any batch axes, broadcast as in matmul      all
h       query head                                  q, output, lse
g       key head, h a multiple of g                 k, v
t, i, j position, of queries and keys alike         all
d, e    query/key channel, value channel            q, k; v, output
======= ==========================================  ==================

Conventions: the paper's first strided part holds stride + 1 keys; its released code keeps stride of them
(``variant="code"``).  The paper prints the last summary residue as stride, which does not occur; its example has stride - 1.
Only the listed pairs are computed, up to about half as many again: work and memory are O(t (stride + t / stride)) and O(t).

Source: Child et al. 2019, arXiv:1904.10509, section 4.2 (patterns) and 4.3 (heads).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refattn import cost as costs
from refattn import patterns
from refattn.arrays import is_array, namespace, require_integer, require_one_of, to_numpy
from refattn.core import options
from refattn.core.blocks import SMALL, Maker, banded, one_length, some, tiled
from refattn.core.problem import prepare
from refattn.core.selections import Lattice
from refattn.mechanism import mechanism
from refattn.records import Block, Counts, Result

__all__ = ["sparse_transformer_attention"]

HEADS = ("split", "merged", "first", "second", "interleaved")
_SHARED = tuple(n for n in options.SHARED if n != "pattern")
_LARGE = 512
"""Runs of keys from this length on fill the core's own tiles: batching small blocks pays below it."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """What one head sees."""

    kind: str  # "strided" or "fixed"
    part: str  # "first", "second" or "both"
    stride: int
    summary: int = 0
    offset: int = 0
    variant: str = "paper"

    def pattern(self) -> patterns.Pattern:
        if self.kind == "strided":
            return patterns.strided(self.stride, part=self.part, variant=self.variant)
        return patterns.fixed(self.stride, self.summary, part=self.part, summary_offsets=self.offset)


def _parts(
    h: int,
    *,
    pattern: Any = "strided",
    stride: Any,
    summary: Any = None,
    summary_offsets: Any = None,
    heads: Any = "split",
    layer: Any = None,
    variant: Any = "paper",
) -> list[_Part]:
    """The part of each head; every option checked."""
    if not isinstance(pattern, str):
        raise TypeError(f"pattern is a {type(pattern).__name__}: expected 'strided' or 'fixed'")
    require_one_of("pattern", pattern, ("strided", "fixed"))
    require_one_of("heads", heads, HEADS)
    require_one_of("variant", variant, ("paper", "code"))
    stride = require_integer("stride", stride, minimum=1)
    if heads == "interleaved":
        if layer is None:
            raise ValueError(
                "layer is missing: heads='interleaved' takes the first part in even layers, else the second"
            )
        layer = require_integer("layer", layer, minimum=0)
    elif layer is not None:
        raise ValueError(f"layer is {layer!r}, which only heads='interleaved' uses (heads is {heads!r})")
    half = -(-h // 2)
    chosen = {
        "split": ["first"] * half + ["second"] * (h - half),
        "merged": ["both"] * h,
        "interleaved": [("first", "second")[(layer or 0) % 2]] * h,
    }.get(heads, [heads] * h)
    if pattern == "strided":
        for name, value in (("summary", summary), ("summary_offsets", summary_offsets)):
            if value is not None:
                raise ValueError(f"{name} is {value!r}: the strided pattern has no summary columns")
        return [_Part("strided", part, stride, variant=variant) for part in chosen]
    if summary is None:
        raise ValueError("summary is missing: the fixed pattern needs the number of summary columns of a block")
    summary = require_integer("summary", summary, minimum=1)
    offsets = _offsets(summary_offsets, h)
    if summary > stride:
        raise ValueError(f"summary is {summary}: expected at most the stride, {stride}")
    if any(o < 0 or o + summary > stride for o in offsets):
        raise ValueError(
            f"summary_offsets is {offsets}: expected 0 <= offset and offset + summary <= stride, here at most {stride - summary}"
        )
    found = [_Part("fixed", part, stride, summary, o) for part, o in zip(chosen, offsets, strict=True)]
    return [dataclasses.replace(p, summary=1, offset=0) if p.part == "first" else p for p in found]


def _offsets(summary_offsets: Any, h: int) -> list[int]:
    if summary_offsets is None:
        return [0] * h
    found = np.asarray(to_numpy(summary_offsets) if is_array(summary_offsets) else summary_offsets)
    if found.dtype.kind not in "iu":
        raise TypeError(f"summary_offsets is {summary_offsets!r}: expected ints, one per head")
    if found.ndim and found.shape != (h,):
        raise ValueError(f"summary_offsets has shape {found.shape}: expected ({h},), one per head")
    return np.broadcast_to(found, (h,)).tolist()


def _pattern(parts: list[_Part]) -> patterns.Pattern:
    kinds = list(dict.fromkeys(parts))
    if len(kinds) == 1:
        return kinds[0].pattern()
    return patterns.by_head([kind.pattern() for kind in kinds], [kinds.index(p) for p in parts])


# ---------------------------------------------------------------------- blocks


def _blocks(parts: list[_Part], t: int, xp: Any, like: Any) -> Callable[..., Iterator[Block]]:
    """The blocks of a group; all its heads have one part."""

    def blocks(visibility: patterns.Pattern | None, group: Any) -> Iterator[Block]:
        make = Maker(visibility, group, t, t, xp, like)
        part = parts[int(make.heads.reshape(-1)[0])]
        if part.part != "second":
            yield from _run(make, part, t)
        if part.kind == "strided" and part.part != "first":
            yield from _residues(make, part.stride, t, 0 if part.part == "second" else 2)
        if part.kind == "fixed" and part.part != "first":
            yield from _columns(make, part, t)

    return blocks


def _run(make: Maker, part: _Part, t: int) -> Iterator[Block]:
    """The first part: a run of keys that ends at the query.

    In a merged strided head it holds the distances 0 ... stride, in either variant: the union is the same.
    """
    stride = part.stride
    if part.part == "both" and part.kind == "strided":
        part = dataclasses.replace(part, variant="paper")
    own = dataclasses.replace(part, part="first").pattern()

    def sees(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return own.visible(i, j, q=t, k=t)

    if part.kind == "fixed":
        small, size, behind = stride < _LARGE, stride, 0
    else:
        size = min(max(16, -(-stride // 2)), 128)
        behind = -(-stride // size)
        small = stride < _LARGE and (behind + 1) * size < t
    return banded(make, t, size, behind, 0, sees) if small else tiled(make, own)


def _residues(make: Maker, stride: int, t: int, least: int) -> Iterator[Block]:
    """Keys whose distance is a multiple of the stride, at least ``least`` of them away.

    Positions are written in rows of ``stride``: the pairs are those of one column, one batch entry for each column.
    """
    rows, rest = t // stride, t % stride
    tile = math.isqrt(SMALL // (make.units * stride))
    tile = max(1, min(tile, 256, max(8, -(-rows // 2))))
    for u0 in range(0, rows, tile):
        u1 = min(u0 + tile, rows)
        queries = Lattice(u0 * stride, u1 - u0, stride, layout="columns")
        for v0 in range(0, u1 - least, tile):
            v1 = min(v0 + tile, u1 - least)
            keys = Lattice(v0 * stride, v1 - v0, stride, layout="columns")
            yield from some(make.block(queries, keys, np.arange(u0, u1)[:, None] - np.arange(v0, v1) >= least))
    if rest:  # a last row that is not full: one query in each of its columns
        queries = Lattice(rows * stride, rest, 1)
        step = max(1, SMALL // (make.units * rest))
        for v0 in range(0, rows + 1 - max(least, 1), step):
            v1 = min(v0 + step, rows + 1 - max(least, 1))
            yield from some(make.block(queries, Lattice(v0 * stride, v1 - v0, stride, width=rest, layout="columns")))
        if least == 0:
            yield from some(make.block(queries, Lattice(rows * stride, rest, 1)))


def _columns(make: Maker, part: _Part, t: int) -> Iterator[Block]:
    """The summary columns: those of earlier blocks, and of the own one where no first part has seen them."""
    stride, width, first = part.stride, part.summary, part.stride - part.offset - part.summary
    own = part.part == "second"
    seen = part.pattern()
    count = -(-t // stride)
    joined = max(1, count // 32)  # stride blocks whose queries are computed together

    def keys(c0: int, c1: int) -> Iterator[Lattice]:
        """Summary columns of the blocks c0 ... c1 - 1; the last block of all may lack some."""
        whole = min(c1, t // stride)
        if c0 < whole:
            yield Lattice(c0 * stride, whole - c0, stride, first=first, width=width, layout="joined")
        if whole < c1:
            start = whole * stride + first
            if start < t:
                yield Lattice(start, 1, min(width, t - start))

    for c0 in range(0, count, joined):
        c1 = min(c0 + joined, count)
        start, stop = c0 * stride, min(c1 * stride, t)
        queries = Lattice(start, 1, stop - start)
        step = max(1, SMALL // (make.units * (stop - start) * width))
        for n in range(0, c0, step):
            for earlier in keys(n, min(n + step, c0)):
                yield from some(make.block(queries, earlier))
        i = np.arange(start, stop)[:, None]
        for near in keys(c0, c1 if own else c1 - 1):
            j = near.positions(np)
            here = seen.visible(i, j, q=t, k=t)
            if not own:
                here = here & (j // stride < i // stride)
            yield from some(make.block(queries, near, here))


# ---------------------------------------------------------------------- forward and backward


@options.takes(*_SHARED)
def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    pattern: str = "strided",
    stride: int,
    summary: int | None = None,
    summary_offsets: Any = None,
    heads: str = "split",
    layer: int | None = None,
    variant: str = "paper",
    backend: Any,
    algorithm: str,
    **shared: Any,
) -> tuple[Result, Any]:
    """softmax(scale q k^T, over the keys of the sparse pattern) v.

    Parameters
    ----------
    q : array (..., h, t, d)
    k : array (..., g, t, d)
    v : array (..., g, t, e)
    pattern : {"strided", "fixed"}
    stride : int
        At least 1; near sqrt(t) for the least work.
    summary : int
        Summary columns in each block of ``stride`` positions; for the fixed pattern, at most ``stride``.
    summary_offsets : int or ints (h,), optional
        How far to the left of the block's end each head's columns stand, in tokens; default 0.
    heads : {"split", "merged", "first", "second", "interleaved"}
        "split": the first ceil(h / 2) heads take the first part, the others the second; "merged": all the union;
        "interleaved": all the first part in even layers, the second in odd ones.
    layer : int
        For "interleaved".
    variant : {"paper", "code"}
        Whether the first strided part holds stride + 1 or stride keys.
    {shared}

    Returns
    -------
    output : array (..., h, t, e), in the dtype of the inputs
    lse : array (..., h, t), in the compute dtype (float32 for half inputs)

    Raises
    ------
    ValueError
        Shapes that disagree, queries and keys of different number, a stride below 1, a summary wider than the stride,
        columns outside the block, options that the pattern or the heads do not use.
    TypeError
        Options or arrays of the wrong type.

    Examples
    --------
    Zero queries take the mean of what they see.  Row 4 at stride 2: keys 2, 3, 4, then 0, 2, 4; together 0, 2, 3, 4.

    >>> import numpy as np
    >>> q, k, v = np.zeros((1, 5, 2)), np.ones((1, 5, 2)), np.arange(5.0).reshape(1, 5, 1)
    >>> [float(sparse_transformer_attention(q, k, v, stride=2, heads=x)[0, 4, 0]) for x in ("first", "second", "merged")]
    [3.0, 2.0, 2.25]
    """
    own = {"pattern": pattern, "stride": stride, "summary": summary, "summary_offsets": summary_offsets}
    t, h, g = _sizes(q, k)
    parts = _parts(h, **own, heads=heads, layer=layer, variant=variant)
    arguments: dict[str, Any] = {"backend": backend, "algorithm": algorithm, **shared}
    repeated = None
    if algorithm == "whole" or shared.get("keep_weights"):
        prepared = prepare(q, k, v, extra_pattern=_pattern(parts), **arguments)
    else:
        blocks = _blocks(parts, t, namespace(q, k, v), q)
        numbers = _key_heads(h, g, shared.get("head_map", "repeat"))
        if _mixed(parts, numbers):  # heads of one key head see different keys: each gets a copy of its own
            repeated = (numbers, g)
            arguments["head_map"] = "repeat"
            k, v = (_repeat(x, numbers) for x in (k, v))
        prepared = prepare(q, k, v, blocks=blocks, apart=len(set(parts)) > 1, **arguments)
    result, saved = prepared.run()
    return result, (prepared, saved, repeated)


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """Cotangents of q, k, v and the shared options (derivation: ``refattn.core.backward``)."""
    prepared, forward_state, repeated = saved
    gradients = prepared.gradients(forward_state, output, lse)
    if repeated is not None:
        for name in ("k", "v"):
            gradients[name] = _fold(gradients[name], *repeated)
    return gradients


def _sizes(q: Any, k: Any) -> tuple[int, int, int]:
    """t, h, g; heads that do not divide are left to ``core.options``."""
    if q.ndim < 3 or k.ndim < 3 or q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: expected (..., h, t, d) and (..., g, t, d),"
            " as many queries as keys"
        )
    return q.shape[-2], q.shape[-3], k.shape[-3]


def _key_heads(h: int, g: int, head_map: str) -> list[int]:
    """Key head of each query head."""
    if not g or h % g:
        return list(range(h))
    return [n % g if head_map == "tile" else n // (h // g) for n in range(h)]


def _mixed(parts: list[_Part], numbers: list[int]) -> bool:
    """Whether some key head serves query heads of different parts."""
    return len(set(zip(numbers, parts, strict=True))) > len(set(numbers))


def _repeat(x: Any, numbers: list[int]) -> Any:
    """(..., g, t, d) -> (..., h, t, d)."""
    xp = namespace(x)
    return xp.stack([x[..., n, :, :] for n in numbers], axis=-3)


def _fold(x: Any, numbers: list[int], g: int) -> Any:
    """Adjoint of ``_repeat``: sums over the query heads of a key head."""
    xp = namespace(x)
    return xp.stack([sum(x[..., h, :, :] for h, n in enumerate(numbers) if n == head) for head in range(g)], axis=-3)


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
    pattern: str = "strided",
    stride: int,
    summary: int | None = None,
    summary_offsets: Any = None,
    heads: str = "split",
    layer: int | None = None,
    variant: str = "paper",
    **settings: Any,
) -> Counts:
    """Counts over the visible pairs; ``computed_multiplies`` over the blocks.  t, or q = k, is the length."""
    t, e, groups = one_length(t, q, k), d if e is None else e, h if g is None else g
    own = {"pattern": pattern, "stride": stride, "summary": summary, "summary_offsets": summary_offsets}
    parts = _parts(h, **own, heads=heads, layer=layer, variant=variant)
    sizes: dict[str, Any] = {"b": b, "h": h, "q": t, "k": t, "d": d, "e": e, "extra_pattern": _pattern(parts)}
    if settings.get("keep_weights"):
        return costs.softmax_counts(g=groups, **sizes, **settings)
    mixed = _mixed(parts, _key_heads(h, groups, settings.get("head_map", "repeat")))
    if mixed:
        groups, settings = h, {**settings, "head_map": "repeat"}
    blocks, computed = _blocks(parts, t, np, np.zeros(0)), sum(_pairs(part, t) for part in parts)
    apart = len(set(parts)) > 1
    return costs.softmax_counts(g=groups, **sizes, blocks=blocks, computed=computed, apart=apart, **settings)


def _pairs(part: _Part, t: int) -> int:
    """Pairs of one head in the blocks of long sequences."""
    stride, rows, pairs = part.stride, t // part.stride, 0
    if part.part != "second":  # a run of keys, in bands of blocks or in tiles
        size = stride if part.kind == "fixed" else min(max(16, -(-stride // 2)), 128)
        behind = 0 if part.kind == "fixed" else -(-stride // size)
        run = dataclasses.replace(part, part="first").pattern()
        pairs += t * (behind + 1) * size if stride < _LARGE else costs.tiled_pairs(run, t)
    if part.part == "first":
        return pairs
    if part.kind == "strided":
        tile = max(1, min(math.isqrt(SMALL // min(stride, SMALL)), 256, max(8, -(-rows // 2))))
        return pairs + stride * rows * (rows + tile) // 2 + (t % stride) * (rows + 1)
    joined = max(1, -(-t // stride) // 32) * stride  # queries that are computed together
    return pairs + t * (t + joined) // 2 // stride * part.summary


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 4,
    g: int | None = None,
    t: int = 11,
    d: int = 4,
    e: int = 3,
    stride: int = 3,
    pattern: str = "strided",
    **settings: Any,
) -> dict[str, Any]:
    """Normal q (b,h,t,d), k (b,g,t,d), v (b,g,t,e); options are passed through.  g defaults to h."""
    g = g or h
    normal = rng.standard_normal
    if pattern == "fixed":
        settings.setdefault("summary", 1)
    arrays = {"q": normal((b, h, t, d)), "k": normal((b, g, t, d)), "v": normal((b, g, t, e))}
    return {**arrays, "pattern": pattern, "stride": stride, **settings}


_PROBES = (
    {"t": 29, "stride": 5, "heads": "merged", "says": "merged heads: the key that both parts hold counts once"},
    {"t": 30, "stride": 5, "heads": "first", "says": "the run of stride + 1 keys alone"},
    {"t": 30, "stride": 5, "heads": "first", "variant": "code", "says": "the run of stride keys of the released code"},
    {"t": 31, "stride": 5, "heads": "second", "says": "the multiples of the stride alone"},
    {"t": 17, "h": 3, "stride": 4, "heads": "interleaved", "layer": 1, "says": "an odd layer: the second part"},
    {"t": 29, "stride": 6, "pattern": "fixed", "summary": 2, "says": "fixed, heads split between the parts"},
    {
        "t": 31,
        "h": 3,
        "stride": 6,
        "pattern": "fixed",
        "summary": 2,
        "heads": "merged",
        "summary_offsets": np.array([0, 2, 4]),
        "says": "fixed, merged, each head with summary columns of its own",
    },
    {"t": 28, "stride": 6, "pattern": "fixed", "summary": 2, "heads": "second", "says": "summary columns alone"},
)

sparse_transformer_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="sparse_transformer_attention",
    differentiable=("q", "k", "v", *options.DIFFERENTIABLE),
    outputs=("output", "lse"),
    probes=_PROBES,
)
