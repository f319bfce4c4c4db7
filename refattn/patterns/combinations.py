"""Several patterns together: ``&``, ``|``, ``~`` and one for each head."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from refattn.patterns.base import Pattern, Which, host_ints
from refattn.patterns.counting import Ends

__all__ = ["All", "AnyOf", "ByHead", "Not"]


class Combination(Pattern):
    """Several patterns together."""

    _symbol = ""
    _parts: tuple[Pattern, ...]

    def __init__(self, *parts: Pattern) -> None:
        flat: list[Pattern] = []
        for part in parts:
            flat.extend(part._parts if type(part) is type(self) and isinstance(part, Combination) else (part,))
        super().__init__(self._symbol, *flat)
        self._parts = tuple(flat)

    @property
    def batch(self) -> int:  # type: ignore[override]
        return self._common("batch", "batch entries")

    @property
    def heads(self) -> int:  # type: ignore[override]
        return self._common("heads", "heads")

    def _common(self, attribute: str, what: str) -> int:
        sizes = {getattr(p, attribute) for p in self._parts} - {1}
        if len(sizes) > 1:
            raise ValueError(f"{self!r}: its parts distinguish {' and '.join(map(str, sorted(sizes)))} {what}")
        return sizes.pop() if sizes else 1

    def __repr__(self) -> str:
        return f" {self._symbol} ".join(f"({p!r})" if isinstance(p, (All, AnyOf)) else repr(p) for p in self._parts)

    def _check(self, q: int, k: int) -> None:
        for part in self._parts:
            part._check(q, k)

    def _fit_batch(self, batch: tuple[int, ...]) -> Pattern:
        return type(self)(*(p._fit_batch(batch) for p in self._parts))

    def _join(self, answers: Iterable[Any]) -> Any:
        raise NotImplementedError

    def _ends_of_rows(self, q: int, k: int) -> Ends | None:
        return Ends.joined(p._ends_of_rows(q, k) for p in self._parts)

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        return self._join(p._visible(xp, i, j, b, h, q=q, k=k) for p in self._parts)

    def tile(self, *corners: int, **where: Any) -> Any:
        return self._join(p.tile(*corners, **where) for p in self._parts)


class All(Combination):
    """Pairs that every part sees."""

    _symbol = "&"

    def _join(self, answers: Iterable[Any]) -> Any:
        seen = None
        for x in answers:
            seen = x if seen is None else seen & x
        return seen

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        answer = "full"
        for part in self._parts:
            kind = part._classify(i0, i1, j0, j1, q, k, b, h)
            if kind == "empty":
                return kind
            if kind == "partial":
                answer = kind
        return answer

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Which, h: Which) -> tuple[int, int]:
        ranges = [p._key_range(i0, i1, q, k, b, h) for p in self._parts]
        return max(r[0] for r in ranges), min(r[1] for r in ranges)

    def _interval(self, i: Any, b: Any, h: Any, q: int, k: int) -> tuple[Any, Any] | None:
        return self._narrowed(self._parts, i, b, h, q, k)

    @staticmethod
    def _narrowed(parts: Sequence[Pattern], i: Any, b: Any, h: Any, q: int, k: int) -> tuple[Any, Any] | None:
        start, end = 0, k
        for part in parts:
            ends = part._interval(i, b, h, q, k)
            if ends is None:
                return None
            start, end = np.maximum(start, ends[0]), np.minimum(end, ends[1])
        return start, end

    def _reach(self, i0: Any, i1: Any, b: Any, h: Any, q: int, k: int, least: int) -> Any:
        if self._interval(i0[:1], b, h, q, k) is not None:
            return super()._reach(i0, i1, b, h, q, k, least)
        return functools.reduce(np.minimum, (p._reach(i0, i1, b, h, q, k, least) for p in self._parts))

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        """Known where at most one part is no interval: that one is counted between the ends of the others."""
        intervals: list[Pattern] = []
        others: list[Pattern] = []
        for part in self._parts:
            (others if part._interval(i, b, h, q, k) is None else intervals).append(part)
        ends = self._narrowed(intervals, i, b, h, q, k)
        if len(others) > 1 or ends is None:
            return None
        end = np.minimum(ends[1], m)
        start = np.minimum(ends[0], np.maximum(end, 0))
        end = np.maximum(end, start)
        if not others:
            return end - start
        upto, before = (others[0]._below(i, x, b, h, q, k) for x in (end, start))
        return None if upto is None or before is None else upto - before


class AnyOf(Combination):
    """Pairs that at least one part sees."""

    _symbol = "|"

    def _join(self, answers: Iterable[Any]) -> Any:
        seen = None
        for x in answers:
            seen = x if seen is None else seen | x
        return seen

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        answer = "empty"
        for part in self._parts:
            kind = part._classify(i0, i1, j0, j1, q, k, b, h)
            if kind == "full":
                return kind
            if kind == "partial":
                answer = kind
        return answer

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Which, h: Which) -> tuple[int, int]:
        ranges = [p.key_range(i0, i1, q=q, k=k, b=b, h=h) for p in self._parts]
        ranges = [r for r in ranges if r[0] < r[1]]
        return (min(r[0] for r in ranges), max(r[1] for r in ranges)) if ranges else (0, 0)

    def _reach(self, i0: Any, i1: Any, b: Any, h: Any, q: int, k: int, least: int) -> Any:
        ends = [p._ends_of_run(i0, i1, b, h, q, k) for p in self._parts]
        known = [x for x in ends if x is not None]
        if len(known) < len(ends):
            return np.minimum(sum(p._reach(i0, i1, b, h, q, k, least) for p in self._parts), k)
        starts, stops = (np.stack(np.broadcast_arrays(*x)) for x in zip(*known, strict=True))
        stops = np.minimum(-(-stops // least) * least, np.max(stops, axis=0))
        starts = np.minimum(starts // least * least, stops)
        order = np.argsort(starts, axis=0)
        count, reached = 0, np.zeros_like(starts[0])
        for at in order:
            start, stop = (np.take_along_axis(x, at[None], axis=0)[0] for x in (starts, stops))
            count = count + np.maximum(stop - np.maximum(start, reached), 0)
            reached = np.maximum(reached, stop)
        return count

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        """Inclusion and exclusion, one part at a time."""
        *rest, last = sorted(self._parts, key=lambda p: p._interval(i, b, h, q, k) is not None)
        if not rest:
            return last._below(i, m, b, h, q, k)
        first = rest[0] if len(rest) == 1 else AnyOf(*rest)
        counts = [p._below(i, m, b, h, q, k) for p in (first, last, All(first, last))]
        return None if any(c is None for c in counts) else counts[0] + counts[1] - counts[2]


class Not(Combination):
    """Pairs that the part does not see."""

    _symbol = "~"

    def __invert__(self) -> Pattern:
        return self._parts[0]

    def __repr__(self) -> str:
        part = self._parts[0]
        return f"~({part!r})" if isinstance(part, (All, AnyOf)) else f"~{part!r}"

    def _join(self, answers: Iterable[Any]) -> Any:
        return ~next(iter(answers))

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        kind = self._parts[0]._classify(i0, i1, j0, j1, q, k, b, h)
        return {"empty": "full", "full": "empty"}.get(kind, kind)

    def _interval(self, i: Any, b: Any, h: Any, q: int, k: int) -> tuple[Any, Any] | None:
        """Known where the runs of the part begin at the first key, or end at the last one."""
        ends = self._parts[0]._interval(i, b, h, q, k)
        if ends is None:
            return None
        if np.all(np.asarray(ends[0]) <= 0):
            return np.maximum(ends[1], 0), k
        if np.all(np.asarray(ends[1]) >= k):
            return 0, np.minimum(ends[0], k)
        return None

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        count = self._parts[0]._below(i, m, b, h, q, k)
        return None if count is None else m - count


class ByHead(Pattern):
    """A pattern for each head."""

    def __init__(self, parts: Sequence[Any], which: Any) -> None:
        which = host_ints("which", which)
        if (
            not isinstance(parts, (list, tuple))
            or not parts
            or not all(isinstance(p, Pattern) and p.heads == 1 for p in parts)
        ):
            raise TypeError(f"parts are {parts!r}: expected patterns that do not distinguish heads")
        if which.ndim != 1 or not which.size or which.min() < 0 or which.max() >= len(parts):
            raise ValueError(f"which is {which.tolist()}: expected for each head a number below {len(parts)}")
        parts = tuple(parts)
        super().__init__("by_head", parts, which)
        self._parts, self._which = parts, which
        self.heads = which.size

    @property
    def batch(self) -> int:  # type: ignore[override]
        return max(p.batch for p in self._parts)

    def _check(self, q: int, k: int) -> None:
        for part in self._parts:
            part._check(q, k)

    def _fit_batch(self, batch: tuple[int, ...]) -> Pattern:
        return ByHead([p._fit_batch(batch) for p in self._parts], self._which)

    def _reach(self, i0: Any, i1: Any, b: Any, h: Any, q: int, k: int, least: int) -> Any:
        which = self._which[0] if self.heads == 1 else self._which[self._need(h, "h")]
        return sum(p._reach(i0, i1, b, h, q, k, least) * (which == n) for n, p in enumerate(self._parts))

    def _ends_of_rows(self, q: int, k: int) -> Ends | None:
        return Ends.joined(p._ends_of_rows(q, k) for p in self._parts)

    def _asked(self, h: Which) -> list[Pattern]:
        which = self._which if h is None else self._which[np.asarray(h).reshape(-1)]
        return [self._parts[n] for n in np.unique(which)]

    def _by_head(self, xp: Any, h: Any, answers: Iterable[Any]) -> Any:
        """The answer of each head's part; the answers are bool arrays."""
        own = int(self._which[0]) if self.heads == 1 else self._lookup(xp, "_which", self._need(h, "h"))
        seen = None
        for n, answer in enumerate(answers):
            here = answer & (own == n)
            seen = here if seen is None else seen | here
        return seen

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        return self._by_head(xp, h, (p._visible(xp, i, j, b, h, q=q, k=k) for p in self._parts))

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        kinds = {p._classify(i0, i1, j0, j1, q, k, b, None) for p in self._asked(h)}
        return kinds.pop() if len(kinds) == 1 else "partial"

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Which, h: Which) -> tuple[int, int]:
        ranges = [p.key_range(i0, i1, q=q, k=k, b=b) for p in self._asked(h)]
        ranges = [r for r in ranges if r[0] < r[1]]
        return (min(r[0] for r in ranges), max(r[1] for r in ranges)) if ranges else (0, 0)

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        own = self._which[0] if self.heads == 1 else self._which[self._need(h, "h")]
        total: Any = 0
        for n, part in enumerate(self._parts):
            count = part._below(i, m, b, h, q, k)
            if count is None:
                return None
            total = total + count * (own == n)
        return total
