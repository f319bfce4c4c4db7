"""Cutting a problem into groups and blocks, and a block as terms and mechanisms see it.

A *group* is a range of batches and key heads whose blocks are computed together: groups are the tasks of the backend's pool,
and whatever they share is added in their order, so results do not depend on the number of threads.  A *block* is a set of
queries that meets a set of keys; every visible pair stands in exactly one.  Slices are cut here from the pattern of a problem;
mechanisms list gathered blocks of their own with a :class:`Maker`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refattn.arrays import to_namespace
from refattn.contraction import einsum
from refattn.core.selections import Lattice, Span, take_pairs
from refattn.patterns import Pattern
from refattn.records import AttentionSettings, Block

__all__ = [
    "KEYS",
    "ROWS",
    "SMALL",
    "SPLIT",
    "Group",
    "Maker",
    "View",
    "banded",
    "groups",
    "listed_blocks",
    "one_length",
    "product",
    "slice_blocks",
    "some",
    "summed",
    "tiled",
    "whole_block",
]

ROWS, KEYS = 256, 1024
"""Rows (query heads of one key head x queries) and keys of a tile: a few such tiles stay in a core's cache."""
SMALL = 1 << 18
"""Pairs up to which several (batch, key head) units share a block."""
SPLIT = 4
"""Query ranges into which a long problem of few units is cut, whatever the number of threads."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranges of batches, key heads and queries (and keys, where few queries meet many) that are computed together."""

    b: slice
    g: slice
    q: tuple[int, int]
    heads: Any  # NumPy (ng, r): the caller's numbers of the query heads
    k: tuple[int, int] | None = None  # a share of the keys, to be merged with the others; None: all

    @property
    def batches(self) -> np.ndarray:
        return np.arange(self.b.start, self.b.stop)


class View:
    """A block of one group: what terms and mechanisms may ask about it."""

    def __init__(self, problem: AttentionSettings, group: Group, backend: Any, gradient: bool) -> None:
        self.problem, self.group, self.backend, self.gradient = problem, group, backend, gradient
        self.xp = backend.xp
        self.scratch: dict[str, Any] = {}  # buffers of this group's tiles
        self.queries: Any = None
        self.keys: Any = None
        self.visible: Any = None
        self.hidden: Any = None  # what terms took out of sight
        self.q: Any = None  # (b, g, r, [n,] a, d), times scale
        self.d_q: Any = None  # what terms add to the cotangent of q / scale

    def enter(self, block: Block) -> None:
        self.queries, self.keys = block.queries, block.keys
        self.visible = None if block.visible is None else block.visible()
        self.hidden = self.d_q = None

    # -------------------------------------------------------------- parts of arrays

    def slices(self, x: Any) -> tuple[slice, slice]:
        """Index of this group into an array (b|1, g|1, ...)."""
        whole = slice(0, 1)
        return whole if x.shape[0] == 1 else self.group.b, whole if x.shape[1] == 1 else self.group.g

    def part(self, x: Any) -> Any:
        """This group's part of an array (b|1, g|1, ...)."""
        return x[(*self.slices(x), ...)]

    def per_head(self, x: Any) -> Any:
        """Values (g, r) laid out to broadcast with the logits."""
        part = x[self.group.g, :]
        return self.xp.reshape(part, (1, *part.shape, *(1,) * self._tail()))

    def per_batch(self, x: Any, ndim: int) -> Any:
        """Host values (b,) or (1,) laid out to broadcast with the logits."""
        x = np.asarray(x)
        part = x if x.shape[0] == 1 else x[self.group.b]
        return self._placed(part.reshape(-1, 1, 1, *(1,) * self._tail()))

    def _tail(self) -> int:
        return 3 if self.queries.batched or self.keys.batched else 2

    def numbers(self) -> tuple[Any, Any]:
        """Batch and query-head numbers laid out to broadcast with the logits."""
        tail = (1,) * self._tail()
        b, h = self.group.batches.reshape(-1, 1, 1, *tail), self.group.heads.reshape(1, *self.group.heads.shape, *tail)
        return self._placed(b), self._placed(h)

    def _placed(self, host: np.ndarray) -> Any:
        return self.xp.asarray(host, device=self.problem.device)

    def positions(self) -> tuple[Any, Any]:
        """Query and key positions laid out to broadcast with the logits: (..., a, 1) and (..., 1, c)."""
        xp = self.xp
        i, j = self.queries.positions(xp), self.keys.positions(xp)
        return xp.expand_dims(i, axis=-1), xp.expand_dims(j, axis=-2)

    def buffer(self, name: str, queries: Any, keys: Any) -> Any:
        """Memory for products of queries (..., a, d) and keys (..., c, d), until the next of that name; None for new memory."""
        if queries.dtype != keys.dtype:
            return None
        lead = np.broadcast_shapes(queries.shape[:-2], keys.shape[:-2])
        return self.backend.buffer(self.scratch, name, (*lead, queries.shape[-2], keys.shape[-2]), queries.dtype)

    # -------------------------------------------------------------- visibility

    def hide(self, hidden: Any) -> None:
        """Take pairs out of sight (an additive -inf)."""
        self.hidden = hidden if self.hidden is None else self.xp.logical_or(self.hidden, hidden)
        seen = self.xp.logical_not(hidden)
        self.visible = seen if self.visible is None else self.xp.logical_and(self.visible, seen)

    def seen(self, x: Any) -> Any:
        """x where visible, 0 elsewhere; may overwrite x."""
        return x if self.visible is None else self.backend.select_into(x, self.visible)

    def dropout(self) -> Any:
        """Factors of the weights: 0 where dropped, 1 / (1 - rate) where kept; None without dropout."""
        if self.problem.dropout is None:
            return None
        mask, factor = self.problem.dropout
        kept = take_pairs(self.part(mask), self.queries, self.keys)
        return self.xp.astype(kept, self.problem.dtype) * factor


# ------------------------------------------------------------------------------------------------ groups and slices


def groups(settings: AttentionSettings, *, by_keys: bool = False) -> list[Group]:
    """The groups of a problem, by its shape alone; ``by_keys``: few queries may share out their keys."""
    sizes, heads = settings.sizes, np.asarray(settings.heads)
    b, g, q, k = sizes.b, sizes.g, sizes.q, sizes.k
    unit = sizes.r * q * k
    few = settings.blocks is None and settings.tile is None and b * g < SPLIT
    cuts: list[tuple[Any, Any]] = [((0, q), None)]
    if few and unit > 16 * SMALL and q >= 2 * ROWS:
        cuts = [(run, None) for run in _runs(q, ROWS)]
    elif few and by_keys and unit > 4 * SMALL and k >= 2 * KEYS:
        cuts = [((0, q), run) for run in _runs(k, KEYS)]
    if g == 0:
        return []
    heads_step = 1 if settings.apart else min(g, max(1, SMALL // max(1, unit)))
    batch_step = max(1, SMALL // max(1, unit * heads_step)) if unit * g <= SMALL else 1
    return [
        Group(slice(s, min(s + batch_step, b)), slice(n, min(n + heads_step, g)), rows, heads[n : n + heads_step], keys)
        for s in range(0, b, batch_step)
        for n in range(0, g, heads_step)
        for rows, keys in cuts
    ]


def _runs(length: int, tile: int) -> list[tuple[int, int]]:
    """About SPLIT runs of whole tiles."""
    step = math.ceil(length / (SPLIT * tile)) * tile
    return [(s, min(s + step, length)) for s in range(0, length, step)]


FINEST = 16
"""Keys below which a tile is cut no further, however few its rows."""


def slice_blocks(settings: AttentionSettings, group: Group, xp: Any) -> Iterator[Block]:
    """Blocks of a group as runs of queries times runs of keys: empty ones skipped, full ones without a mask."""
    k = settings.sizes.k
    first, last = group.k or (0, k)
    rows, keys = settings.tile or (max(16, ROWS // max(1, settings.sizes.r)), KEYS)
    pattern = settings.visibility
    for i0 in range(*group.q, rows):
        i1 = min(i0 + rows, group.q[1])
        queries = Span(i0, i1)
        if pattern is None:
            for j0 in range(first, last, keys):
                yield Block(queries, Span(j0, min(j0 + keys, last)))
            continue
        asked = {"q": settings.sizes.q, "k": k, "b": group.batches.tolist(), "h": group.heads.reshape(-1).tolist()}
        lowest, highest = pattern.key_range(i0, i1, **asked)
        lowest, highest = max(lowest, first), min(highest, last)
        for j0 in range(lowest, highest, keys):
            for kind, s, e in _segments(pattern, i0, i1, j0, min(j0 + keys, highest), max(rows, FINEST), asked):
                if kind == "empty":
                    continue
                tile = None if kind == "full" else _Tile(settings, group, i0, i1, s, e, xp)
                yield Block(queries, Span(s, e), tile)


def whole_block(settings: AttentionSettings, group: Group, xp: Any) -> Iterator[Block]:
    """All queries of a group against all keys, invisible pairs included: what ``keep_weights`` shows."""
    n_k = settings.sizes.k
    if n_k and group.q[1] > group.q[0]:
        tile = None if settings.visibility is None else _Tile(settings, group, *group.q, 0, n_k, xp)
        yield Block(Span(*group.q), Span(0, n_k), tile)


def _segments(
    pattern: Any, i0: int, i1: int, j0: int, j1: int, least: int, asked: dict[str, Any]
) -> list[tuple[str, int, int]]:
    """The tile cut into runs of keys of one kind, no finer than ``least`` keys."""
    kind = pattern.classify(i0, i1, j0, j1, **asked)
    if kind != "partial" or j1 - j0 <= least:
        return [(kind, j0, j1)]
    middle = (j0 + j1) // 2
    parts = _segments(pattern, i0, i1, j0, middle, least, asked) + _segments(pattern, i0, i1, middle, j1, least, asked)
    joined = parts[:1]
    for kind, s, e in parts[1:]:
        if kind == joined[-1][0]:
            joined[-1] = (kind, joined[-1][1], e)
        else:
            joined.append((kind, s, e))
    return joined


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Visibility of one partly visible tile, computed when it is asked for."""

    settings: AttentionSettings
    group: Group
    i0: int
    i1: int
    j0: int
    j1: int
    xp: Any

    def __call__(self) -> Any:
        place = {
            "q": self.settings.sizes.q,
            "k": self.settings.sizes.k,
            "b": self.group.batches,
            "h": self.group.heads,
            "xp": self.xp,
        }
        return self.settings.visibility.tile(self.i0, self.i1, self.j0, self.j1, **place)


def listed_blocks(settings: AttentionSettings, group: Group, xp: Any) -> Iterator[Block]:
    """The blocks of a group: the mechanism's own, or slices."""
    if settings.blocks is not None:
        return settings.blocks(group)
    return slice_blocks(settings, group, xp)


# ------------------------------------------------------------------------------------------------ blocks of mechanisms


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

    def block(self, queries: Any, keys: Any, seen: np.ndarray | None = None) -> Block | None:
        """The block, or None where nothing is visible; ``seen``: what the mechanism's own pattern sees of it (None: everything)."""
        if 0 in queries.pairs_axes or 0 in keys.pairs_axes or (seen is not None and not seen.any()):
            return None
        if seen is not None and seen.all():
            seen = None
        kind = "full"
        if self.visibility is not None:
            asked = {"b": self.group.batches.tolist(), "h": self.heads.reshape(-1).tolist(), **self.sizes}
            kind = self.visibility.classify(*queries.extent, *keys.extent, **asked)
        if kind == "empty":
            return None
        mask = None if seen is None else to_namespace(seen, self.xp, like=self.like)
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
    lengths = {n: x for n, x in (("t", t), ("q", q), ("k", k)) if x is not None}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"lengths are {lengths}: expected one length, as t or as q and k")
    return next(iter(lengths.values()))


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
                seen = None if kind == "full" else np.asarray(pattern.tile(*queries.extent, *keys.extent, **make.sizes))
                yield from some(make.block(queries, keys, seen))


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
    by_shift = {shift: sees(base + i, base - shift * size + j) for shift in range(behind, -ahead - 1, -1)}
    step = max(1, SMALL // (make.units * size * size))
    for c in range(first, last, step):
        n = min(step, last - c)
        run = Lattice(c * size, n, size)
        for shift, seen in by_shift.items():
            yield from some(make.block(run, Lattice((c - shift) * size, n, size), seen))
    for c in (*range(first), *range(last, math.ceil(length / size))):
        queries = Span(c * size, min((c + 1) * size, length))
        keys = Span(max(0, (c - behind) * size), min((c + ahead + 1) * size, length))
        i, j = (np.arange(*x.extent) for x in (queries, keys))
        yield from some(make.block(queries, keys, sees(i[:, None], j[None, :])))


def some(block: Block | None) -> tuple[Block, ...]:
    """The block, if there is one."""
    return () if block is None else (block,)


# ------------------------------------------------------------------------------------------------ products


def product(backend: Any, weights: Any, values: Any, visible: Any, *, transposed: bool = False) -> Any:
    """weights (..., q, k) times values (..., k, e), in which an invisible pair contributes nothing even if values are NaN.

    ``transposed``: summed over the queries, with values (..., q, e); ``visible`` is laid out as the weights in any case.
    """
    xp = backend.xp
    spec = "...qk,...qe->...ke" if transposed else "...qk,...ke->...qe"
    if visible is None:
        return einsum(spec, weights, values)
    finite = xp.isfinite(values)
    if bool(xp.all(finite)):
        return einsum(spec, weights, values)
    output = einsum(spec, weights, xp.where(finite, values, xp.zeros_like(values)))
    visible = xp.broadcast_to(visible, weights.shape)
    if transposed:
        weights, visible = xp.matrix_transpose(weights), xp.matrix_transpose(visible)
    odd = xp.any(xp.logical_not(finite), axis=-1)
    odd = xp.any(xp.reshape(odd, (-1, odd.shape[-1])), axis=0)
    for j in range(odd.shape[0]):
        if bool(odd[j]):
            row = values[..., j : j + 1, :]
            share = weights[..., j : j + 1] * xp.where(finite[..., j : j + 1, :], xp.zeros_like(row), row)
            output = output + xp.where(visible[..., j : j + 1], share, xp.zeros_like(share))
    return output


def summed(backend: Any, weights: Any, values: Any, visible: Any, *, apart: bool = False) -> Any:
    """Weights (b, g, r, ..., q, k) times values (b, g, r, ..., q, e), summed over queries and the query heads r: (b, g, 1, ..., k, e).

    As in :func:`product`, an invisible pair contributes nothing.  ``apart``: the query heads have keys of their own, and are
    not summed over.
    """
    xp = backend.xp
    if apart:
        return product(backend, weights, values, visible, transposed=True)
    if visible is not None and not bool(xp.all(xp.isfinite(values))):
        return xp.sum(product(backend, weights, values, visible, transposed=True), axis=2, keepdims=True)
    spec = "bgrqk,bgrqe->bgke" if weights.ndim == 5 else "bgrnqk,bgrnqe->bgnke"
    return einsum(spec, weights, values)[:, :, None, ...]
