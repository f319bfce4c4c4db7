"""BigBird attention in blocks: global rows and columns as runs, the band as slices, the random blocks gathered."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refattn.arrays import is_array, is_integer, require_integer, to_namespace, to_numpy
from refattn.core.blocks import KEYS, ROWS, SMALL, Group, Maker, some
from refattn.core.selections import Index, Lattice, Span
from refattn.patterns import Pattern
from refattn.patterns import blocks as block_pattern
from refattn.records import Block

__all__ = ["Layout"]

_PAIRS = 1 << 20
"""Pairs of queries and gathered random keys in one block: gradients of gathered keys take a pass over all keys for each."""


class Layout:
    """Which block sees which; the random ones without those that are seen anyway."""

    def __init__(self, t: int, h: int, block: Any, random_blocks: Any, window_blocks: Any, global_blocks: Any) -> None:
        self.t, self.block = t, min(require_integer("block", block, minimum=1), max(1, t))
        near = require_integer("window_blocks", window_blocks, minimum=0)
        if not isinstance(global_blocks, (tuple, list)) or len(global_blocks) != 2:
            raise TypeError(f"global_blocks is {global_blocks!r}: expected (first, last), two counts")
        first, last = (require_integer("global_blocks", x, minimum=0) for x in global_blocks)
        self.n = n = -(-t // self.block)
        self.near = min(near, n)
        self.first, self.last = min(first, n), max(min(first, n), n - last)  # the blocks between are not global
        drawn = _random("random_blocks", random_blocks, h, n)
        u = np.arange(n)[:, None]
        seen = (drawn < 0) | (abs(drawn - u) <= self.near) | (drawn < self.first) | (drawn >= self.last)
        seen = seen | (u < self.first) | (u >= self.last)
        ordered = np.sort(np.where(seen, n, drawn), axis=-1)
        again = np.zeros_like(seen)
        again[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
        ordered = np.sort(np.where(again, n, ordered), axis=-1)
        most = int((ordered < n).sum(-1).max(initial=0))
        self.drawn = np.where(ordered == n, -1, ordered)[..., :most]  # (h, n, r)

    def pattern(self) -> Pattern:
        """The same as one layout (h, n, n) of all pairs of blocks: for short sequences."""
        n, h = self.n, self.drawn.shape[0]
        u, w = np.arange(n)[:, None], np.arange(n)
        outside = (np.arange(n) < self.first) | (np.arange(n) >= self.last)
        layout = np.zeros((h, n, n + 1), dtype=bool)
        np.put_along_axis(layout, np.where(self.drawn < 0, n, self.drawn), True, axis=-1)
        return block_pattern(layout[..., :n] | (abs(u - w) <= self.near) | outside[:, None] | outside, self.block)

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Positions of the blocks start ... stop - 1."""
        return min(start * self.block, self.t), min(stop * self.block, self.t)

    def blocks(self, xp: Any, like: Any) -> Callable[..., Iterator[Block]]:
        """Global rows and columns as runs, the band as slices, the random blocks gathered.

        The runs come first: a run of queries replaces what was there, the others are merged into it.
        """

        def listed(visibility: Pattern | None, group: Group) -> Iterator[Block]:
            make = Maker(visibility, group, self.t, self.t, xp, like)
            everything, outside = [(0, self.t)], [self.span(0, self.first), self.span(self.last, self.n)]
            yield from _runs(make, outside, everything)
            yield from _runs(make, [self.span(self.first, self.last)], outside)
            yield from self._band(make)
            yield from self._gathered(make)

        return listed

    def _band(self, make: Maker) -> Iterator[Block]:
        full = max(self.first, min(self.last, self.t // self.block))  # a short last block is taken on its own
        step = max(1, SMALL // (make.units * self.block**2))
        for shift in range(-self.near, self.near + 1):
            for u in range(max(self.first, self.first + shift), min(full, full + shift), step):
                count = min(step, min(full, full + shift) - u)
                rows, columns = (Lattice(x * self.block, count, self.block) for x in (u, u - shift))
                yield from some(make.block(rows, columns))
        if full < self.last:
            short, lowest = self.last - 1, max(self.first, self.last - 1 - self.near)
            near = (self.span(lowest, short), self.span(short, self.last))
            before, last = (Lattice(begin, 1, end - begin) for begin, end in near)
            for queries, keys in ((last, before), (before, last), (last, last)):
                yield from some(make.block(queries, keys))

    def _gathered(self, make: Maker) -> Iterator[Block]:
        width = self.drawn.shape[-1] * self.block
        if not width:
            return
        full = max(self.first, min(self.last, self.t // self.block))
        step = max(1, _PAIRS // (make.units * width * self.block))
        runs = [(u, min(u + step, full)) for u in range(self.first, full, step)]
        runs += [(full, self.last)] * (full < self.last)
        for u, stop in runs:
            chosen = self.drawn[make.heads[:, 0], u:stop]  # (g, rows, r)
            if not (chosen >= 0).any():
                continue
            places = np.where(chosen < 0, self.t, chosen * self.block)[..., None] + np.arange(self.block)
            places = places.reshape(1, len(chosen), 1, stop - u, width)
            real = places < self.t
            length = self.span(u, u + 1)
            queries = Lattice(u * self.block, stop - u, length[1] - length[0])
            index = to_namespace(np.where(real, places, 0), make.xp, like=make.like)
            yield make.listed(queries, Index(index), to_namespace(real[..., None, :], make.xp, like=make.like))


def _runs(make: Maker, rows: list[tuple[int, int]], columns: list[tuple[int, int]]) -> Iterator[Block]:
    """All pairs of some positions, in tiles."""
    step = max(16, ROWS // make.heads.shape[1])
    for begin, end in rows:
        for i in range(begin, end, step):
            queries = Span(i, min(i + step, end))
            for start, stop in columns:
                for j in range(start, stop, KEYS):
                    yield from some(make.block(queries, Span(j, min(j + KEYS, stop))))


def _random(name: str, value: Any, h: int, n: int) -> np.ndarray:
    """The caller's (h, n, r) ints, checked."""
    if value is None:
        return np.full((h, n, 0), -1)
    if not is_array(value) or not is_integer(value.dtype):
        kind = f"has dtype {value.dtype}" if is_array(value) else f"is a {type(value).__name__}"
        raise TypeError(f"{name} {kind}: expected an int array (h, n, r), -1 = none")
    host = to_numpy(value).astype(np.int64)
    if host.ndim != 3 or host.shape[:2] != (h, n):
        raise ValueError(f"{name} has shape {host.shape}: expected (h, n, r) with {h} heads and {n} blocks")
    if host.size and (host.min() < -1 or host.max() >= n):
        wrong = host[(host < -1) | (host >= n)][0]
        raise ValueError(f"{name} contains {wrong}: expected blocks 0 ... {n - 1}, or -1 for none")
    return host
