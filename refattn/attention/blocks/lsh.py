"""Which pairs a hash round shows: windows of chunks over its sorted order, as blocks for the core.

Nothing here has a gradient.  Arrays are (b, h, s, t): batch, head, hash round, position.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refattn.arrays import device, namespace, real, require_flag, require_integer, require_one_of, to_namespace
from refattn.core.selections import Windows, take_order
from refattn.core.terms import Term
from refattn.records import Block

__all__ = ["PAIRS", "Multiplicity", "Plan", "Units"]

PAIRS = 1 << 18
"""Pairs of a block: enough that the calls cost little beside the products."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the rounds are cut, and what hides a pair."""

    length: int
    hashes: int
    chunk: int
    before: int
    after: int
    ring: bool  # windows run on over the chunks of all rounds, round after round, and around the end
    causal: bool
    within_bucket: bool
    duplicates: str
    self_visible: bool
    algorithm: str = "auto"

    @classmethod
    def read(
        cls, t: int, *, chunk: Any, before: Any, after: Any, causal: Any, within_bucket: Any, duplicates: Any, wrap: Any,
        short: Any, self_attention: Any, algorithm: str,
    ) -> tuple["Plan", bool]:  # fmt: skip
        """The options of a call, checked, for one round, and whether the sequence is too short to be hashed."""
        chunk = require_integer("chunk", chunk, minimum=1)
        before, after = (require_integer(n, x, minimum=0) for n, x in (("before", before), ("after", after)))
        causal, within_bucket = require_flag("causal", causal), require_flag("within_bucket", within_bucket)
        require_one_of("duplicates", duplicates, ("union", "multiset", "trax1"))
        require_one_of("wrap", wrap, ("none", "global"))
        require_one_of("short", short, ("hash", "full"))
        require_one_of("self_attention", self_attention, ("last_resort", "never", "always"))
        full = short == "full" and t <= chunk
        ring = wrap == "global" and not full
        if ring and t % chunk:
            raise ValueError(f'wrap="global" needs a length that is a multiple of chunk: t is {t} and chunk is {chunk}')
        if full or t == 0:
            before = after = 0
        plan = cls(
            length=t, hashes=1, chunk=min(chunk, max(1, t)), before=before, after=after, ring=ring, causal=causal,
            within_bucket=within_bucket and not full, duplicates="multiset" if full else duplicates,
            self_visible=self_attention == "always", algorithm=algorithm,
        )  # fmt: skip
        return plan, full

    def of(self, hashes: int) -> "Plan":
        """The plan for so many rounds; windows are cut at the ends of a round, or refused where they run around them all."""
        most = hashes * self.chunks
        for name, x in (("before", self.before), ("after", self.after)):
            if self.ring and x > most:
                raise ValueError(f'{name} is {x}: expected at most the {most} chunks of all rounds with wrap="global"')
        before, after = min(self.before, most), min(self.after, most)
        if not self.ring:
            before, after = min(before, self.chunks), min(after, self.chunks)
        return dataclasses.replace(self, hashes=hashes, before=before, after=after)

    @property
    def chunks(self) -> int:
        """Chunks of a round; the last may be short."""
        return -(-self.length // self.chunk)

    @property
    def reach(self) -> int:
        """Chunks in a window."""
        return self.before + 1 + self.after

    @property
    def rows(self) -> int:
        """Rows of a round's order, filled up to whole chunks."""
        return self.chunks * self.chunk

    def pieces(self, s: int) -> list[tuple[int, int, int, int]]:
        """The key rows of round s, in the order of its windows: (round, first row, last row + 1, where they begin)."""
        if not self.ring:
            return [(s, 0, self.rows, self.before * self.chunk)]
        found, at, total = [], 0, self.chunks + self.before + self.after
        while at < total:
            number, c = divmod((s * self.chunks - self.before + at) % (self.hashes * self.chunks), self.chunks)
            n = min(self.chunks - c, total - at)
            found.append((number, c * self.chunk, (c + n) * self.chunk, at * self.chunk))
            at += n
        return found


class Units:
    """The rounds of some (batch, head) units: orders, what the pairs of a block have in common, blocks.

    ``order``, ``rank``, ``buckets`` (b,h,s,t); ``keep`` bool (b,1,t) or None: False hides a key; ``visibility`` a fitted
    pattern or None, asked with the batch and head numbers ``numbers`` = ((b,), (h,)).
    """

    def __init__(
        self, plan: Plan, order: Any, rank: Any, buckets: Any, *, keep: Any = None, visibility: Any = None, numbers: Any
    ) -> None:
        self.plan, self.order, self.rank, self.keep = plan, order, rank, keep
        self.visibility, self.numbers = visibility, numbers
        self.xp = xp = namespace(order)
        self.like = {"device": device(order)}
        small = plan.length * (plan.chunks + plan.reach + 1) < 1 << 31
        self.integer = xp.int32 if small else xp.int64
        self.segments: Any = self._segments(buckets) if plan.within_bucket else None
        self.codes: Any = self._codes() if plan.duplicates == "union" and plan.hashes > 1 and not plan.ring else None
        self.places = None
        if plan.duplicates == "trax1" or (plan.ring and plan.duplicates == "union"):
            self.places = xp.permute_dims(xp.astype(rank // plan.chunk, self.integer), (0, 1, 3, 2))  # (b,h,t,s)

    def _segments(self, buckets: Any) -> Any:
        """Bucket numbers of each round counted 0, 1, 2 ... without gaps, (b,h,t,s)."""
        xp = self.xp
        ordered = xp.take_along_axis(buckets, self.order, axis=-1)
        new = xp.astype(ordered[..., 1:] != ordered[..., :-1], self.integer)
        first = xp.zeros((*new.shape[:-1], 1), dtype=self.integer, **self.like)
        counted = xp.cumulative_sum(xp.concat([first, new], axis=-1), axis=-1, dtype=self.integer)
        return xp.permute_dims(xp.take_along_axis(counted, self.rank, axis=-1), (0, 1, 3, 2))

    def _codes(self) -> Any:
        """Numbers (b,h,t,s) of which those of i and j differ by -before ... after exactly where round s shows the pair."""
        plan, xp = self.plan, self.xp
        codes = xp.permute_dims(xp.astype(self.rank // plan.chunk, self.integer), (0, 1, 3, 2))
        return codes if self.segments is None else codes + self.segments * (plan.chunks + plan.reach)

    # ------------------------------------------------------------------ orders

    def key_rows(self, s: int) -> Any:
        """Position of every key row of round s, (b,h,1,(chunks + before + after) * chunk); rows without a key hold 0."""
        plan, xp = self.plan, self.xp
        if plan.ring:
            return xp.concat([self._rows(r, first, last) for r, first, last, _ in plan.pieces(s)], axis=-1)
        zeros = xp.zeros((*self.order.shape[:2], 1, 1), dtype=xp.int64, **self.like)
        edges = [xp.repeat(zeros, n * plan.chunk, axis=-1) for n in (plan.before, plan.after)]
        return xp.concat([edges[0], self._rows(s, 0, plan.rows), edges[1]], axis=-1)

    def _rows(self, s: int, first: int, last: int) -> Any:
        xp, length = self.xp, self.plan.length
        part = self.order[:, :, s : s + 1, first : min(last, length)]
        if last <= length:
            return part
        filler = xp.zeros((*part.shape[:-1], last - length), dtype=part.dtype, **self.like)
        return xp.concat([part, filler], axis=-1)

    def to_positions(self, x: Any, s: int) -> Any:
        """Query rows of round s (b,h,...,rows,e) laid out by position, (b,h,...,t,e)."""
        rank = self.rank[:, :, s, :]
        return take_order(x, rank if x.ndim == 4 else self.xp.expand_dims(rank, axis=2))

    def keys_to_positions(self, x: Any, s: int) -> Any:
        """Key rows of round s (b,h,key rows,e) added up by position: the adjoint of taking ``key_rows``."""
        xp, plan, total = self.xp, self.plan, None
        for r, first, last, begin in plan.pieces(s):
            rank = self.rank[:, :, r, :]
            if last - first >= plan.length:
                part = take_order(x, rank + begin)
            else:
                inside = xp.logical_and(rank >= first, rank < last)
                n = last - first
                none = xp.zeros((*x.shape[:-2], 1, x.shape[-1]), dtype=x.dtype, **self.like)
                rows = xp.concat([x[..., begin : begin + n, :], none], axis=-2)
                part = take_order(rows, xp.where(inside, rank - first, xp.full_like(rank, n)))
            total = part if total is None else total + part
        return total

    # ------------------------------------------------------------------ blocks

    def blocks(self, s: int, rows: Any, keys: Any) -> Iterator[Block]:
        """The blocks of round s: runs of chunks, each with its windows."""
        plan = self.plan
        units = rows.shape[0] * rows.shape[1]
        step = max(1, PAIRS // max(1, units * plan.chunk * plan.chunk * plan.reach))
        step = {"auto": step, "whole": max(1, plan.chunks), "tiled": max(1, plan.chunks // 3)}[plan.algorithm]
        show = self._shows(s, rows, keys)
        for start in range(0, plan.chunks, step):
            stop = min(start + step, plan.chunks)
            queries = Windows(start, stop, plan.chunk, 1, rows)
            windows = Windows(start, stop, plan.chunk, plan.reach, keys)
            yield Block(queries, windows, None if show is None else _Shown(show, queries, windows))

    def _shows(self, s: int, rows: Any, keys: Any) -> Callable[[Any, Any], Any] | None:
        """Visibility of round s as a function of a block's queries and windows; None where all is visible."""
        plan, xp = self.plan, self.xp
        usable, real_rows = self._usable(keys), self._real_rows()
        i, j = xp.astype(rows, self.integer), xp.astype(keys, self.integer)
        tests: list[Callable[[Any, Any], Any]] = []
        if plan.causal:
            late = i if plan.self_visible else i - 1  # j <= late
            if usable is not None:
                j_seen, usable = xp.where(usable, j, xp.full_like(j, plan.length)), None
            else:
                j_seen = j
            if real_rows is not None:
                late, real_rows = xp.where(real_rows, late, xp.full_like(late, -1)), None
            tests.append(_compare(j_seen, late, xp.less_equal))
        elif not plan.self_visible:
            tests.append(_compare(j, i, xp.not_equal))
        if plan.within_bucket:
            own, other = self._own_segments(s, rows, keys)
            if usable is not None:
                other, usable = xp.where(usable, other, xp.full_like(other, -1)), None
            if real_rows is not None:
                own, real_rows = xp.where(real_rows, own, xp.full_like(own, -2)), None
            tests.append(_compare(other, own, xp.equal))
        if usable is not None:
            tests.append(lambda queries, windows: xp.expand_dims(windows.take_last(usable), axis=-2))
        if real_rows is not None:
            tests.append(lambda queries, windows: xp.expand_dims(queries.take_last(real_rows), axis=-1))
        if self.visibility is not None:
            tests.append(self._pattern)
        if self.codes is not None and s:
            tests.append(self._first_of_rounds(s, rows, keys))
        if plan.duplicates == "union" and plan.ring and (plan.hashes > 1 or plan.reach > plan.chunks):
            tests.append(self._first_of_ring(s, rows, keys))
        if not tests:
            return None

        def show(queries: Any, windows: Any) -> Any:
            seen = tests[0](queries, windows)
            for test in tests[1:]:
                seen = xp.logical_and(seen, test(queries, windows))
            return seen

        return show

    def _usable(self, keys: Any) -> Any:
        """Key rows that hold a key which is not hidden, (b|1,h|1,1,key rows); None if all do."""
        plan, xp = self.plan, self.xp
        usable = None
        if not plan.ring:
            n = xp.arange(keys.shape[-1], **self.like) - plan.before * plan.chunk
            usable = xp.logical_and(n >= 0, n < plan.length)[None, None, None, :]
        if self.keep is not None:
            kept = take_order(xp.expand_dims(self.keep, axis=-1), keys[:, :, 0, :])[..., 0][:, :, None, :]
            usable = kept if usable is None else xp.logical_and(usable, kept)
        return usable

    def _real_rows(self) -> Any:
        plan, xp = self.plan, self.xp
        if plan.rows == plan.length:
            return None
        return (xp.arange(plan.rows, **self.like) < plan.length)[None, None, None, :]

    def _own_segments(self, s: int, rows: Any, keys: Any) -> tuple[Any, Any]:
        """Bucket of every query row and key row in round s; key rows of another round have none in common with it."""
        plan, xp = self.plan, self.xp
        number = self.segments[..., s : s + 1]
        own, other = (take_order(number, x[:, :, 0, :])[..., 0][:, :, None, :] for x in (rows, keys))
        if plan.ring and plan.hashes > 1:
            mine = np.zeros(keys.shape[-1], dtype=bool)
            for r, first, last, begin in plan.pieces(s):
                mine[begin : begin + last - first] = r == s
            mine = to_namespace(mine, xp, like=keys)
            other = xp.where(mine, other, xp.full_like(other, -1))
        return own, other

    def _pattern(self, queries: Any, windows: Any) -> Any:
        xp = self.xp
        b, h = (to_namespace(np.asarray(x), xp, like=self.order) for x in self.numbers)
        return self.visibility.visible(
            xp.expand_dims(queries.positions(xp), axis=-1),
            xp.expand_dims(windows.positions(xp), axis=-2),
            q=self.plan.length,
            k=self.plan.length,
            b=xp.reshape(b, (-1, 1, 1, 1, 1, 1)),
            h=xp.reshape(h, (1, -1, 1, 1, 1, 1)),
        )

    # ------------------------------------------------------------------ pairs that meet more than once

    def _first_of_rounds(self, s: int, rows: Any, keys: Any) -> Callable[[Any, Any], Any]:
        """Pairs that no round before s shows."""
        plan, xp = self.plan, self.xp
        own, other = (take_order(self.codes[..., :s], x[:, :, 0, :]) for x in (rows, keys))
        before = [(_at(own, r), _at(other, r)) for r in range(s)]

        def show(queries: Any, windows: Any) -> Any:
            met = None
            for own, other in before:
                i, j = (
                    xp.expand_dims(queries.take_last(own), axis=-1),
                    xp.expand_dims(windows.take_last(other), axis=-2),
                )
                here = xp.logical_and(j >= i - plan.before, j <= i + plan.after)
                met = here if met is None else xp.logical_or(met, here)
            return xp.logical_not(met)

        return show

    def _first_of_ring(self, s: int, rows: Any, keys: Any) -> Callable[[Any, Any], Any]:
        """Pairs that stand in no window of a round before s, nor in an earlier chunk of their own window."""
        plan, xp = self.plan, self.xp
        ring = plan.hashes * plan.chunks
        own, other = (take_order(self.places, x[:, :, 0, :]) for x in (rows, keys))
        parts = [None, None]
        if self.segments is not None:
            parts = [take_order(self.segments, x[:, :, 0, :]) for x in (rows, keys)]
        slot = np.repeat(np.arange(plan.reach), plan.chunk)
        slot = to_namespace(slot.astype(np.int32), xp, like=rows)

        def show(queries: Any, windows: Any) -> Any:
            met = None
            for r in range(s + 1):
                for p in range(plan.hashes):
                    if self.segments is not None and p != r:
                        continue
                    i, j = _pair(xp, queries, windows, _at(own, r), _at(other, p))
                    distance = (j - i + (p - r) * plan.chunks + plan.before) % ring
                    here = distance < (slot if r == s else plan.reach)
                    if self.segments is not None:
                        i, j = _pair(xp, queries, windows, _at(parts[0], r), _at(parts[1], r))
                        here = xp.logical_and(here, i == j)
                    met = here if met is None else xp.logical_or(met, here)
            return xp.logical_not(met)

        return show


class Multiplicity(Term):
    """logits - ln(N + 1e-9), N the chunks in which the pair meets counted as trax and reformer-pytorch do.

    They compare chunk numbers round by round, so a pair that meets only across the border of two rounds has N = 0 and
    gains 20.7.
    """

    def __init__(self, units: Units, rows: Any, keys: Any) -> None:
        self.units = units
        self.own, self.other = (take_order(units.places, x[:, :, 0, :]) for x in (rows, keys))
        self.segments = None
        if units.segments is not None:
            self.segments = tuple(take_order(units.segments, x[:, :, 0, :]) for x in (rows, keys))

    def apply(self, logits: Any, view: Any) -> tuple[Any, Any]:
        plan, xp = self.units.plan, self.units.xp
        count: Any = 0.0
        for s in range(plan.hashes):
            i, j = _pair(xp, view.queries, view.keys, _at(self.own, s), _at(self.other, s))
            same = None
            if self.segments is not None:
                first, second = _pair(xp, view.queries, view.keys, *(_at(x, s) for x in self.segments))
                same = first == second
            for ahead in range(-plan.before, plan.after + 1):
                here = j == i + ahead
                if plan.ring:
                    here = (j - i - ahead) % (plan.hashes * plan.chunks) == 0
                here = here if same is None else xp.logical_and(here, same)
                count = count + xp.astype(here, real(logits).dtype)
        return logits - xp.log(count + 1e-9), None

    def pull(self, d_logits: Any, kept: Any, view: Any, sums: dict[str, Any]) -> Any:
        return d_logits


def _at(x: Any, s: int) -> Any:
    """Entry s of the last axis of (b,h,rows,s) as (b,h,1,rows)."""
    return x[:, :, None, :, s]


def _pair(xp: Any, queries: Any, windows: Any, own: Any, other: Any) -> tuple[Any, Any]:
    """Values of query rows and key rows laid out to broadcast with the logits of a block."""
    return xp.expand_dims(queries.take_last(own), axis=-1), xp.expand_dims(windows.take_last(other), axis=-2)


def _compare(other: Any, own: Any, test: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """test(key value, query value) on the pairs of a block."""
    xp = namespace(own)

    def show(queries: Any, windows: Any) -> Any:
        i, j = _pair(xp, queries, windows, own, other)
        return test(j, i)

    return show


@dataclasses.dataclass(frozen=True)
class _Shown:
    """Visibility of one block, computed when it is asked for."""

    show: Callable[[Any, Any], Any]
    queries: Any
    windows: Any

    def __call__(self) -> Any:
        return self.show(self.queries, self.windows)
