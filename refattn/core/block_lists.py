"""Lists of blocks that mechanisms share: tiles of a pattern, and blocks of one size batched along a band.

A :class:`Maker` turns queries and keys into a :class:`~refattn.records.Block` of one group of heads, and takes in what else
hides pairs there (masks, lengths, segments ...): a block without visible pairs is left out, one that sees all its pairs has
no mask.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refattn.arrays import to_namespace
from refattn.core.attend import KEYS, ROWS, SMALL, Group
from refattn.core.selections import Lattice, Span
from refattn.patterns import Pattern
from refattn.records import Block

__all__ = ["Maker", "banded", "one_length", "some", "tiled"]


class Maker:
    """Blocks of one group.

    Parameters
    ----------
    visibility : Pattern or None
        What hides pairs besides the mechanism's own pattern.
    group : Group
        Whose blocks they are.
    q, k : int
        Numbers of queries and keys.
    xp, like
        Library of the arrays, and one of them for its device.
    """

    def __init__(self, visibility: Pattern | None, group: Group, q: int, k: int, xp: Any, like: Any) -> None:
        self.visibility, self.group, self.xp, self.like = visibility, group, xp, like
        self.heads = np.asarray(group.heads)
        self.units = max(1, len(group.batches) * self.heads.size)
        self.sizes: dict[str, Any] = {"q": q, "k": k}

    def block(self, queries: Any, keys: Any, own: np.ndarray | None = None) -> Block | None:
        """The block, or None where nothing is visible; ``own``: what the mechanism sees of it (None: everything)."""
        if 0 in queries.pairs_axes or 0 in keys.pairs_axes or (own is not None and not own.any()):
            return None
        if own is not None and own.all():
            own = None
        kind = "full"
        if self.visibility is not None:
            asked = {"b": self.group.batches.tolist(), "h": self.heads.reshape(-1).tolist(), **self.sizes}
            kind = self.visibility.classify(*queries.extent, *keys.extent, **asked)
        if kind == "empty":
            return None
        mask = None if own is None else to_namespace(own, self.xp, like=self.like)
        if kind == "full" or self.visibility is None:
            return Block(queries, keys, None if mask is None else lambda: mask)
        return Block(queries, keys, self._hiding(self.visibility, queries, keys, mask))

    def listed(self, queries: Any, keys: Any, mask: Any) -> Block:
        """A block whose keys are lists; ``mask`` (in ``xp``): the slots that hold a key."""
        if self.visibility is None:
            return Block(queries, keys, lambda: mask)
        return Block(queries, keys, self._hiding(self.visibility, queries, keys, mask))

    def _hiding(self, pattern: Pattern, queries: Any, keys: Any, mask: Any) -> Callable[[], Any]:
        """What the pattern and the mask both see, computed when it is asked for."""

        def visible() -> Any:
            xp = self.xp
            if isinstance(queries, Span) and isinstance(keys, Span):
                where = {"b": self.group.batches, "h": self.heads, **self.sizes}
                seen = pattern.tile(*queries.extent, *keys.extent, xp=xp, **where)
            else:
                i, j = xp.expand_dims(queries.positions(xp), axis=-1), xp.expand_dims(keys.positions(xp), axis=-2)
                tail = (1,) * i.ndim
                b = to_namespace(self.group.batches.reshape(-1, 1, 1, *tail), xp, like=self.like)
                h = to_namespace(self.heads.reshape(1, *self.heads.shape, *tail), xp, like=self.like)
                seen = pattern.visible(i, j, b=b, h=h, **self.sizes)
            return seen if mask is None else seen & mask

        return visible


def one_length(t: int | None, q: int | None, k: int | None) -> int:
    """The length of a sequence that is queries and keys alike, given as t, q or k."""
    given = {n: x for n, x in (("t", t), ("q", q), ("k", k)) if x is not None}
    if len(set(given.values())) != 1:
        raise ValueError(f"lengths are {given}: expected one length, as t or as q and k")
    return next(iter(given.values()))


def tiled(make: Maker, pattern: Pattern) -> Iterator[Block]:
    """Runs of queries times runs of keys, where the pattern (one for all batch entries and heads) sees anything."""
    q, k = make.sizes["q"], make.sizes["k"]
    rows = max(16, ROWS // make.heads.shape[1])
    for i0 in range(0, q, rows):
        queries = Span(i0, min(i0 + rows, q))
        lowest, highest = pattern.key_range(*queries.extent, **make.sizes)
        for j0 in range(lowest, highest, KEYS):
            keys = Span(j0, min(j0 + KEYS, highest, k))
            kind = pattern.classify(*queries.extent, *keys.extent, **make.sizes)
            if kind != "empty":
                own = None if kind == "full" else np.asarray(pattern.tile(*queries.extent, *keys.extent, **make.sizes))
                yield from some(make.block(queries, keys, own))


def banded(
    make: Maker, length: int, size: int, behind: int, ahead: int, sees: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> Iterator[Block]:
    """Blocks of ``size`` queries, each with the same number of blocks of ``size`` keys, batched; work linear in the length.

    Parameters
    ----------
    length : int
        Number of positions, of queries and of keys.
    size : int
        Positions of a block.
    behind, ahead : int
        How many blocks before and after its own a query may look at.
    sees : callable (i, j) -> bool array
        The pattern, on NumPy positions; it must not change when i and j both move by ``size``.
    """
    count = length // size
    first = min(behind, count)  # the blocks first ... last - 1 have all their neighbours
    last = max(first, count - ahead)
    i, j = np.arange(size)[:, None], np.arange(size)[None, :]
    base = behind * size
    own = {shift: sees(base + i, base - shift * size + j) for shift in range(behind, -ahead - 1, -1)}
    step = max(1, SMALL // (make.units * size * size))
    for c in range(first, last, step):
        n = min(step, last - c)
        run = Lattice(c * size, n, size)
        for shift, seen in own.items():
            yield from some(make.block(run, Lattice((c - shift) * size, n, size), seen))
    for c in (*range(first), *range(last, math.ceil(length / size))):
        queries = Span(c * size, min((c + 1) * size, length))
        keys = Span(max(0, (c - behind) * size), min((c + ahead + 1) * size, length))
        i, j = (np.arange(*x.extent) for x in (queries, keys))
        yield from some(make.block(queries, keys, sees(i[:, None], j[None, :])))


def some(block: Block | None) -> tuple[Block, ...]:
    """The block, if there is one."""
    return () if block is None else (block,)
