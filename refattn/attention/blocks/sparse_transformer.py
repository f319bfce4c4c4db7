"""Sparse Transformer attention in blocks: which part each head takes, and its runs, columns of a table and summary columns."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refattn import cost as costs
from refattn import patterns
from refattn.arrays import is_array, namespace, require_integer, require_one_of, to_numpy
from refattn.core.blocks import SMALL, Maker, banded, some, tiled
from refattn.core.selections import Lattice
from refattn.records import Block

__all__ = [
    "Part",
    "blocks_of",
    "computed_pairs",
    "fold_heads",
    "key_heads",
    "mixed_parts",
    "pattern_of",
    "read_parts",
    "repeat_heads",
]

HEADS = ("split", "merged", "first", "second", "interleaved")
_LARGE = 512
"""Runs of keys from this length on fill the core's own tiles: batching small blocks pays below it."""


@dataclasses.dataclass(frozen=True)
class Part:
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


def read_parts(
    h: int,
    *,
    pattern: Any = "strided",
    stride: Any,
    summary: Any = None,
    summary_offsets: Any = None,
    heads: Any = "split",
    layer: Any = None,
    variant: Any = "paper",
) -> list[Part]:
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
        return [Part("strided", part, stride, variant=variant) for part in chosen]
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
    found = [Part("fixed", part, stride, summary, o) for part, o in zip(chosen, offsets, strict=True)]
    return [dataclasses.replace(p, summary=1, offset=0) if p.part == "first" else p for p in found]


def _offsets(summary_offsets: Any, h: int) -> list[int]:
    if summary_offsets is None:
        return [0] * h
    found = np.asarray(to_numpy(summary_offsets) if is_array(summary_offsets) else summary_offsets)
    if found.dtype.kind not in "iu" and (found.size or is_array(summary_offsets)):
        raise TypeError(f"summary_offsets is {summary_offsets!r}: expected ints, one per head")
    if found.ndim and found.shape != (h,):
        raise ValueError(f"summary_offsets has shape {found.shape}: expected ({h},), one per head")
    return np.broadcast_to(found, (h,)).tolist()


def pattern_of(parts: list[Part]) -> patterns.Pattern:
    kinds = list(dict.fromkeys(parts))
    if not kinds:  # no head asks
        return patterns.prefix(0)
    if len(kinds) == 1:
        return kinds[0].pattern()
    return patterns.by_head([kind.pattern() for kind in kinds], [kinds.index(p) for p in parts])


# ---------------------------------------------------------------------- blocks


def blocks_of(parts: list[Part], t: int, xp: Any, like: Any) -> Callable[..., Iterator[Block]]:
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


def _run(make: Maker, part: Part, t: int) -> Iterator[Block]:
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


def _columns(make: Maker, part: Part, t: int) -> Iterator[Block]:
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


def computed_pairs(part: Part, t: int) -> int:
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


# ---------------------------------------------------------------------- key heads shared by heads of different parts


def key_heads(h: int, g: int, head_map: str) -> list[int]:
    """Key head of each query head."""
    require_one_of("head_map", head_map, ("repeat", "tile"))
    if not g or h % g:
        return list(range(h))
    return [n % g if head_map == "tile" else n // (h // g) for n in range(h)]


def mixed_parts(parts: list[Part], numbers: list[int]) -> bool:
    """Whether some key head serves query heads of different parts."""
    return len(set(zip(numbers, parts, strict=True))) > len(set(numbers))


def repeat_heads(x: Any, numbers: list[int]) -> Any:
    """(..., g, t, d) -> (..., h, t, d)."""
    xp = namespace(x)
    return xp.stack([x[..., n, :, :] for n in numbers], axis=-3)


def fold_heads(x: Any, numbers: list[int], g: int) -> Any:
    """Adjoint of ``repeat_heads``: sums over the query heads of a key head."""
    xp = namespace(x)
    return xp.stack([sum(x[..., h, :, :] for h, n in enumerate(numbers) if n == head) for head in range(g)], axis=-3)
