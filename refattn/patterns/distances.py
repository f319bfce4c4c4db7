"""Patterns of the distance between query and key, and of fixed blocks of positions."""

import sys
from typing import Any

import numpy as np

from refattn.arrays import require_integer, require_one_of
from refattn.patterns.base import Pattern, PerBatch, Which, host_ints, taken
from refattn.patterns.counting import Ends

__all__ = ["Band", "Chunk", "Fixed", "Spaced", "parse_align"]


class Band(PerBatch):
    """Query i stands on the key axis at i + offset and sees the distances from ``near`` to ``far``; None: no bound.

    ``align`` says where query 0 stands: an offset, one for each batch entry, or a name.
    """

    def __init__(
        self,
        name: str,
        *positional: Any,
        near: int | None,
        far: int | None,
        align: Any = 0,
        shown: Any = None,
        **named: Any,
    ) -> None:
        super().__init__(name, *positional, **named, align=shown)
        self._near, self._far, self._align = near, far, align
        if isinstance(align, np.ndarray):
            self._lead = align.shape

    def _check(self, q: int, k: int) -> None:
        require_align(self, self._align, q, k)

    def _ends_by_row(self, q: int, k: int) -> tuple[list[int], list[int]]:
        """(first, last) for each row of the offsets: query i sees the keys i + first <= j <= i + last.

        Cut to what makes a difference, -q ... k, in Python's integers: nothing wraps, however large counts and offsets are.
        """
        offsets = offsets_of(self._align, q, k)
        first = [-q if self._far is None else min(max(n - self._far, -q), k) for n in offsets]
        last = [k if self._near is None else min(max(n - self._near, -q), k) for n in offsets]
        return first, last

    def _ends_asked(self, b: Which, q: int, k: int) -> list[tuple[int, int]]:
        """The different (first, last) of the batch entries asked for."""
        ends = list(zip(*self._ends_by_row(q, k), strict=True))
        return ends if self._rows == 1 else list({ends[n] for n in self._chosen(b).tolist()})

    def _at(self, xp: Any, ends: list[int], b: Any) -> Any:
        """The ends of the batch entries b: a Python int where there is only one."""
        return ends[0] if self._rows == 1 else taken(xp, np.asarray(ends, np.int64), self._row(xp, b))

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        first, last = self._ends_by_row(q, k)
        seen = None
        if self._near is not None or self._far is None:
            seen = j <= i + self._at(xp, last, b)
        if self._far is not None:
            far = j >= i + self._at(xp, first, b)
            seen = far if seen is None else seen & far
        return seen

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        ends = self._ends_asked(b, q, k)
        lowest, highest = j0 - i1 + 1, j1 - 1 - i0  # every j - i between them occurs in the tile
        if all(first <= lowest and last >= highest for first, last in ends):
            return "full"
        apart = all(first > highest or last < lowest or first > last for first, last in ends)
        return "empty" if apart else "partial"

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Which, h: Which) -> tuple[int, int]:
        ends = self._ends_asked(b, q, k)
        return i0 + min((x[0] for x in ends), default=k), i1 + max((x[1] for x in ends), default=-q)

    def _interval(self, i: Any, b: Any, h: Any, q: int, k: int) -> tuple[Any, Any]:
        first, last = (self._at(np, x, b) for x in self._ends_by_row(q, k))
        return i + first, i + last + 1

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        start, end = self._interval(i, b, h, q, k)
        return np.maximum(np.minimum(end, m) - np.maximum(start, 0), 0)

    def _ends_of_rows(self, q: int, k: int) -> Ends | None:
        first, last = self._ends_by_row(q, k)
        return Ends(frozenset((*first, *(n + 1 for n in last))))


class Spaced(Pattern):
    """Distances i - j that are multiples of a step.

    ``causal``: only from 0 on.  ``near``: then also those up to the step (whether to step or step - 1 makes no difference).
    """

    def __init__(self, name: str, step: int, *, causal: bool = False, near: bool = False, **named: Any) -> None:
        self._step, self._causal, self._near = step, causal, near
        super().__init__(name, step, **named)

    def _within(self, q: int, k: int) -> int:
        """The step, cut to the first one that no distance reaches."""
        return min(self._step, max(q, k) + 1)

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        step, distance = self._within(q, k), i - j
        seen = distance % step == 0
        if self._near:
            seen = seen | (distance <= step)
        return seen & (distance >= 0) if self._causal else seen

    def _between(self, a: Any, b: Any, step: int) -> Any:
        """How many of the distances a ... b (inclusive) are visible, on ints or arrays; b >= a - 1."""
        if self._causal:
            b = np.maximum(b, -1)
            a = np.minimum(np.maximum(a, 0), b + 1)
        multiples = b // step - (a - 1) // step
        if not self._near:
            return multiples
        inner = np.minimum(b, step)
        return multiples + np.maximum(inner - a + 1, 0) - np.maximum(inner // step - (a - 1) // step, 0)

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        lowest, highest = i0 - j1 + 1, i1 - 1 - j0  # every distance between them occurs in the tile
        count = self._between(lowest, highest, self._within(q, k))
        return "empty" if count == 0 else "full" if count == highest - lowest + 1 else "partial"

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Which, h: Which) -> tuple[int, int]:
        return 0, i1 if self._causal else k

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        return self._between(i - m + 1, i, self._within(q, k))

    def _reach(self, i0: Any, i1: Any, b: Any, h: Any, q: int, k: int, least: int) -> Any:
        return np.minimum(i1, k) if self._causal else np.full(np.shape(i0), k)

    def _ends_of_rows(self, q: int, k: int) -> Ends | None:
        step = self._within(q, k)
        return Ends(frozenset((0, 1, -step, 1 - step)), period=step)


class Fixed(Pattern):
    """Own block of ``stride`` tokens, and summary columns at the same residues of every block."""

    def __init__(self, stride: int, summary: int, part: str, summary_offsets: Any) -> None:
        self._stride = require_integer("stride", stride, minimum=1, maximum=sys.maxsize)
        self._summary = require_integer("summary", summary, minimum=1, maximum=sys.maxsize)
        require_one_of("part", part, ("both", "first", "second"))
        self._part = part
        offsets = host_ints("summary_offsets", summary_offsets)
        if offsets.ndim > 1:
            raise ValueError(f"summary_offsets has shape {offsets.shape}: expected an int or one per head, (h,)")
        offsets = offsets.reshape(-1)
        if offsets.size == 0:
            raise ValueError("summary_offsets is empty: expected an int or one per head, (h,)")
        if offsets.min() < 0 or int(offsets.max()) + self._summary > self._stride:
            raise ValueError(
                f"summary {self._summary} with summary_offsets {offsets.tolist()} does not lie within the stride"
                f" {self._stride}: expected 0 <= offset and offset + summary <= stride"
            )
        self._offsets = offsets
        self.heads = 1 if part == "first" else offsets.size
        shown = int(offsets[0]) if offsets.size == 1 else offsets
        super().__init__("fixed", self._stride, self._summary, part=part, summary_offsets=shown)

    def _within(self, q: int, k: int) -> tuple[int, int, np.ndarray]:
        """Stride, number of summary columns and their first residues, cut to the first position that does not occur."""
        beyond = max(q, k) + 1
        residues = [min(self._stride - self._summary - n, beyond) for n in self._offsets.tolist()]
        return min(self._stride, beyond), min(self._summary, beyond), np.asarray(residues, np.int64)

    def _residue(self, xp: Any, residues: np.ndarray, h: Any) -> Any:
        """First residue of the summary columns; one after another from there."""
        return int(residues[0]) if residues.size == 1 else taken(xp, residues, self._need(h, "h"))

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        stride, summary, residues = self._within(q, k)
        seen = None
        if self._part != "second":
            seen = j // stride == i // stride
        if self._part != "first":
            place = j % stride - self._residue(xp, residues, h)
            column = (place >= 0) & (place < summary)
            seen = column if seen is None else seen | column
        return seen & (j <= i)

    @staticmethod
    def _columns(m: Any, residue: Any, stride: int, summary: int) -> Any:
        """How many of the columns j < m are summary columns; m >= 0."""
        return m // stride * summary + np.minimum(np.maximum(m % stride - residue, 0), summary)

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        if j0 >= i1:
            return "empty"
        stride, summary, residues = self._within(q, k)
        below = j1 <= i0 + 1  # the whole tile lies at or below the diagonal
        empty = full = False
        if self._part != "second":
            empty = i0 // stride * stride >= j1
            full = below and (i1 - 1) // stride * stride <= j0
            if self._part == "first" or full:
                return "empty" if empty else "full" if full else "partial"
        if residues.size > 1 and h is not None:
            residues = residues[np.asarray(h).reshape(-1)]
        lower, cut, upper = (self._columns(m, residues, stride, summary) for m in (j0, min(j1, i1), j1))
        if (empty or self._part == "second") and np.all(cut == lower):
            return "empty"
        return "full" if below and np.all(upper - lower == j1 - j0) else "partial"

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Which, h: Which) -> tuple[int, int]:
        return (i0 // self._stride * self._stride if self._part == "first" else 0), i1

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        stride, summary, residues = self._within(q, k)
        end, start = np.minimum(m, i + 1), i // stride * stride
        if self._part == "first":
            return np.maximum(end - start, 0)
        sizes = (self._residue(np, residues, h), stride, summary)
        if self._part == "second":
            return self._columns(end, *sizes)
        return self._columns(np.minimum(end, start), *sizes) + np.maximum(end - start, 0)

    def _interval(self, i: Any, b: Any, h: Any, q: int, k: int) -> tuple[Any, Any] | None:
        stride, _, _ = self._within(q, k)
        return (i // stride * stride, i + 1) if self._part == "first" else None

    def _reach(self, i0: Any, i1: Any, b: Any, h: Any, q: int, k: int, least: int) -> Any:
        first = i0 // self._stride * self._stride if self._part == "first" else 0
        return np.maximum(np.minimum(i1, k) - first, 0)

    def _ends_of_rows(self, q: int, k: int) -> Ends | None:
        stride, _, _ = self._within(q, k)
        return Ends(frozenset((0, 1)), period=stride)


class Chunk(PerBatch):
    """Query i stands on the key axis at i + offset and sees the keys of the chunk of ``size`` keys that it stands in."""

    def __init__(self, size: int, align: Any) -> None:
        super().__init__("chunk", size, align=align)
        self._size, self._align = size, align
        if isinstance(align, np.ndarray):
            self._lead = align.shape

    def _check(self, q: int, k: int) -> None:
        require_align(self, self._align, q, k)

    def _within(self, q: int, k: int) -> tuple[int, list[int]]:
        """Size and offsets, cut to what makes a difference, in Python's integers: nothing wraps."""
        size, offsets = self._size, offsets_of(self._align, q, k)
        if size > q + k:  # one chunk of all keys: only where its queries begin and end matters
            rows = [min(max(size - n, 0), q + k) for n in offsets]  # from its end on
            return max(q + k, 1), [max(n, -q) if n < 0 else q + k - m for n, m in zip(offsets, rows, strict=True)]
        return size, [min(max(n, -q), -(-k // size) * size) for n in offsets]

    def _start(self, xp: Any, i: Any, b: Any, q: int, k: int) -> tuple[Any, int]:
        """First key of the chunk of each query, and the size."""
        size, offsets = self._within(q, k)
        place = offsets[0] if self._rows == 1 else taken(xp, np.asarray(offsets, np.int64), self._row(xp, b))
        return (i + place) // size * size, size

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        start, size = self._start(xp, i, b, q, k)
        return (j >= start) & (j < start + size)

    def _runs(self, i0: int, i1: int, b: Which, q: int, k: int) -> list[tuple[int, int]]:
        """First and last chunk of the rows, for the different offsets asked for; chunks count from 0, as the keys do."""
        size, offsets = self._within(q, k)
        asked = {offsets[n] for n in self._chosen(b).tolist()} if self._rows > 1 else offsets
        return [((i0 + n) // size, (i1 - 1 + n) // size) for n in asked]

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        size, _ = self._within(q, k)
        lowest, highest = j0 // size, (j1 - 1) // size
        runs = self._runs(i0, i1, b, q, k)
        if all(first == last == lowest == highest for first, last in runs):
            return "full"
        return "empty" if all(last < lowest or first > highest for first, last in runs) else "partial"

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Which, h: Which) -> tuple[int, int]:
        size, _ = self._within(q, k)
        runs = self._runs(i0, i1, b, q, k)
        return min((x[0] for x in runs), default=0) * size, (max((x[1] for x in runs), default=-1) + 1) * size

    def _interval(self, i: Any, b: Any, h: Any, q: int, k: int) -> tuple[Any, Any]:
        start, size = self._start(np, i, b, q, k)
        return start, start + size

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        start, end = self._interval(i, b, h, q, k)
        return np.maximum(np.minimum(end, m) - np.maximum(start, 0), 0)


def offsets_of(align: Any, q: int, k: int) -> list[int]:
    """The offsets that ``align`` means, one for all or one for each batch entry."""
    if isinstance(align, np.ndarray):
        return [int(n) for n in align.reshape(-1)]
    return [align] if isinstance(align, int) else [k - q if align == "lower_right" else 0]


def require_align(pattern: Pattern, align: Any, q: int, k: int) -> None:
    """Reject q != k where nothing says how they are aligned."""
    if align is None and q != k:
        raise ValueError(
            f"{pattern!r} with {q} queries and {k} keys needs an align: 'upper_left' (query 0 stands on key 0)"
            f" or 'lower_right' (the last query stands on the last key), or an offset"
        )


def parse_align(align: Any) -> Any:
    """None, one of the two names, an int, or a NumPy int array with one entry per batch entry."""
    if align is None or isinstance(align, str):
        require_one_of("align", align, (None, "upper_left", "lower_right"))
        return align
    if isinstance(align, int) and not isinstance(align, bool):
        return align
    found = host_ints("align", align)
    return int(found) if found.ndim == 0 else found
