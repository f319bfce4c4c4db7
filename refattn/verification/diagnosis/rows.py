"""Places: the rows of the output, (..., head, query), in which a call is wrong, by rules that other calls know too."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from refattn.verification.diagnosis.calls import JudgedCall

__all__ = ["Place", "places_of", "ranges", "tails", "wrong_rows"]

TILES = (16, 32, 64, 128, 8)
"""Rows of a tile, the usual ones first."""

Range = Callable[[int], tuple[int, int] | None]
"""From the length of an axis, the part of it that is meant; None where there is no such part."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A rule for each axis, counted from the last one, that is not meant whole; ``exact`` rows hold for one call alone."""

    says: str
    rules: tuple[tuple[int, Range], ...] = ()
    exact: np.ndarray | None = dataclasses.field(default=None, compare=False)

    def of(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """The rows that are meant; None where a call has no such place, or nothing beside it."""
        if self.exact is not None:
            return self.exact if self.exact.shape == shape else None
        rows = np.ones(shape, dtype=bool)
        for axis, rule in self.rules:
            part = rule(shape[axis]) if -axis <= len(shape) else None
            if part is None:
                return None
            inside = np.zeros(shape[axis], dtype=bool)
            inside[part[0] : part[1]] = True
            rows &= inside.reshape(-1, *[1] * (-axis - 1))
        return None if rows.all() or not rows.any() else rows


def wrong_rows(call: JudgedCall) -> np.ndarray | None:
    """Rows with a wrong element of output, lse or d_q, else heads with one of d_k or d_v; None where none has such axes."""
    output = call.truth.values.get("output")
    if output is None or output.ndim < 3:
        return None
    shape = output.shape[:-1]
    wrong = np.zeros(shape, dtype=bool)
    seen = False
    for name in ("output", "lse", "d_q", "d_qk"):
        if name not in call.failing:
            continue
        off = call.off(name)
        if off.shape == shape:
            wrong |= off
        elif off.shape[:-1] == shape:
            wrong |= off.any(axis=-1)
        else:
            continue
        seen = True
    if not seen:
        for name in ("d_k", "d_v"):
            if name in call.failing and len(shape) > 2 and call.off(name).shape[: len(shape) - 1] == shape[:-1]:
                wrong |= np.asarray(call.off(name).any(axis=(-1, -2)))[..., None]
                seen = True
    return wrong if seen else None


def places_of(rows: np.ndarray) -> Iterator[Place]:
    """Places that these rows may come from: along one axis alone, along all, just these."""
    axes = []
    for axis in range(-rows.ndim, 0):
        other = tuple(a for a in range(rows.ndim) if a != axis % rows.ndim)
        rules = list(_rules(np.asarray(rows.any(axis=other)), axis, rows.ndim))
        if rules:
            axes.append(rules)
    for rules in reversed(axes):  # rows first, then heads
        for says, axis, rule in rules:
            yield Place(f"in {says}", ((axis, rule),))
    if len(axes) > 1:
        for chosen in itertools.islice(itertools.product(*axes), 4):
            words = " of ".join(says for says, _, _ in reversed(chosen))
            yield Place(f"in {words}", tuple((axis, rule) for _, axis, rule in chosen))
    if not rows.all():
        yield Place(_in_words(rows), exact=rows)


def tails(length: int) -> Iterator[Place]:
    """The last tile of so many rows, for every usual tile."""
    seen = set()
    for tile in TILES:
        start = (length - 1) // tile * tile
        if start and start not in seen:
            seen.add(start)
            yield Place(f"in rows of the last tile of {tile}", ((-1, _tail(tile)),))


def _rules(hit: np.ndarray, axis: int, ndim: int) -> Iterator[tuple[str, int, Range]]:
    """What the positions of an axis that are hit have in common; nothing where all of them are."""
    n, at = hit.size, np.flatnonzero(hit)
    if at.size in (0, n):
        return
    name, plural = _names(axis, ndim)
    first, last = int(at[0]), int(at[-1])
    if last == n - 1:
        if axis == -1:
            for tile in TILES:
                if 0 < (n - 1) // tile * tile <= first:
                    yield f"rows of the last tile of {tile}", axis, _tail(tile)
        if at.size == n - first:
            if first == n - 1:
                yield f"the last {name}", axis, _last
            yield f"{plural} from {first} on", axis, _from(first)
    elif first == 0 and at.size == last + 1:
        if last == 0:
            yield f"the first {name}", axis, _up_to(1)
        else:
            yield f"the first {last + 1} {plural}", axis, _up_to(last + 1)


def _names(axis: int, ndim: int) -> tuple[str, str]:
    if axis == -1:
        return "row", "rows"
    return ("head", "heads") if axis == -2 and ndim > 2 else ("batch entry", "batch entries")


def _last(n: int) -> tuple[int, int] | None:
    return (n - 1, n) if n > 1 else None


def _from(first: int) -> Range:
    return lambda n: (first, n) if n > first else None


def _up_to(last: int) -> Range:
    return lambda n: (0, last) if n > last else None


def _tail(tile: int) -> Range:
    return lambda n: ((n - 1) // tile * tile, n) if n > tile else None


def _in_words(rows: np.ndarray) -> str:
    """``in head 3``, ``in rows 16-19 of batch entry 2``: axes along which not all positions are wrong."""
    parts = []
    for axis in range(rows.ndim):
        name, plural = _names(axis - rows.ndim, rows.ndim)
        hit = rows.any(axis=tuple(a for a in range(rows.ndim) if a != axis))
        if not hit.all():
            which = np.flatnonzero(hit)
            parts.append(f"{name if which.size == 1 else plural} {ranges(which)}")
    return f"in {' of '.join(reversed(parts))}" if parts else "in some rows of each head"


def ranges(numbers: np.ndarray) -> str:
    """``0-3, 7`` for [0, 1, 2, 3, 7], cut after a few."""
    cuts = np.flatnonzero(np.diff(numbers) != 1)
    spans = [(int(a[0]), int(a[-1])) for a in np.split(numbers, cuts + 1) if a.size]
    words = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:4]]
    return ", ".join(words) + (" ..." if len(spans) > 4 else "")
