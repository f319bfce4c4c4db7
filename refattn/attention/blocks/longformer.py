"""Longformer attention in blocks: the window as a band, then runs of rows against the gathered global keys."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import is_array, is_bool, require_integer, to_namespace, to_numpy
from refattn.core.blocks import ROWS, Group, Maker, banded, tiled
from refattn.core.selections import Index, Lattice
from refattn.patterns import Pattern, documents, window
from refattn.records import Block

__all__ = ["LARGE", "Globals", "blocks_of", "globals_of", "pattern_of", "read_tokens", "read_window"]

LARGE = 512
"""Windows from this width on fill the core's own tiles."""
_PAIRS = 1 << 20
"""Pairs of local rows and global keys in one block: gradients of gathered keys take a pass over all keys for each."""


class Globals(NamedTuple):
    """Where the global tokens of each batch entry stand; host arrays."""

    tokens: np.ndarray  # (b, t) bool
    places: np.ndarray  # (b, n): their positions, 0 where an entry has fewer
    slot: np.ndarray  # (b, t): the number of a position among the places, 0 where it has none
    counts: np.ndarray  # (b,)


def globals_of(tokens: np.ndarray) -> Globals:
    counts = tokens.sum(-1)
    n = int(counts.max(initial=0))
    order = np.argsort(~tokens, axis=-1, kind="stable")[:, :n]
    slot = np.where(tokens, np.cumsum(tokens, axis=-1) - 1, 0)
    return Globals(tokens, np.where(np.arange(n) < counts[:, None], order, 0), slot, counts)


def read_tokens(global_tokens: Any, lead: tuple[int, ...], t: int) -> np.ndarray:
    """The caller's (..., t) bool as (b, t)."""
    if global_tokens is None:
        return np.zeros((math.prod(lead), t), dtype=bool)
    if not is_array(global_tokens) or not is_bool(global_tokens.dtype):
        kind = f"has dtype {global_tokens.dtype}" if is_array(global_tokens) else f"is a {type(global_tokens).__name__}"
        raise TypeError(f"global_tokens {kind}: expected a bool array (..., t), True = global")
    host = to_numpy(global_tokens)
    return np.array(np.broadcast_to(host, (*lead, t))).reshape(math.prod(lead), t)


def read_window(span: Any, t: int) -> tuple[int, int]:
    """Keys seen on each side, as numbers below t."""
    if not isinstance(span, (tuple, list)) or len(span) != 2:
        raise TypeError(f"window is {span!r}: expected (left, right), two counts or None")
    for x in span:
        if x is not None:
            require_integer("window", x, minimum=0)
    left, right = (t if x is None else min(int(x), t) for x in span)
    return left, right


def local_pairs(marks: Globals, lead: tuple[int, ...]) -> Pattern:
    """Local rows and local keys: what the window alone decides."""
    tokens = marks.tokens.reshape(*lead, -1)
    return documents(np.where(tokens, 1, 0), np.where(tokens, 2, 0))


def local_rows(marks: Globals, lead: tuple[int, ...]) -> Pattern:
    tokens = marks.tokens.reshape(*lead, -1)
    return documents(np.where(tokens, 1, 0), np.zeros_like(tokens, dtype=int))


def pattern_of(left: int, right: int, marks: Globals, lead: tuple[int, ...]) -> Pattern:
    """Everything that a local row sees."""
    near = window(left, right, align=0)
    if not marks.counts.any():
        return near
    tokens = marks.tokens.reshape(*lead, -1)
    seen_by_all = documents(np.full(tokens.shape, 2), np.where(tokens, 2, 0))
    return local_rows(marks, lead) & (near | seen_by_all)


def blocks_of(
    left: int, right: int, marks: Globals, lead: tuple[int, ...], h: int, t: int, xp: Any, like: Any
) -> Callable[..., Iterator[Block]]:
    """The window as a band of blocks, then runs of rows against the gathered global keys."""
    n = marks.places.shape[-1]
    size = min(max(16, math.ceil((left + right) / 2)), 128)
    behind, ahead = math.ceil(left / size), math.ceil(right / size)
    near = window(left, right, align=0)
    pairs = rows = None
    if n:
        pairs, rows = (x.fit(t, t, batch=lead, heads=h) for x in (local_pairs(marks, lead), local_rows(marks, lead)))
        index = to_namespace(marks.places[:, None, None, None, :], xp, like=like)  # (b, 1, 1, 1, n)
        real = to_namespace(
            (np.arange(n) < marks.counts[:, None])[:, None, None, None, None, :], xp, like=like
        )  # (b, 1, 1, 1, 1, n)

    def joined(first: Pattern | None, second: Pattern | None) -> Pattern | None:
        return first if second is None else second if first is None else first & second

    def blocks(visibility: Pattern | None, group: Group) -> Iterator[Block]:
        make = Maker(joined(visibility, pairs), group, t, t, xp, like)
        if left + right >= LARGE or (behind + ahead + 1) * size >= t:
            yield from tiled(make, near)
        else:
            yield from banded(make, t, size, behind, ahead, lambda i, j: (i - j <= left) & (j - i <= right))
        if n:
            columns = Maker(joined(visibility, rows), group, t, t, xp, like)
            step = max(ROWS, _PAIRS // (columns.units * n))
            for start in range(0, t, step):
                queries = Lattice(start, 1, min(step, t - start))
                yield columns.listed(queries, Index(index[group.b, ...]), real[group.b, ...])

    return blocks
