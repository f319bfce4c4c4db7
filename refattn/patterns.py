"""Who may attend to whom.

A :class:`Pattern` says for query i and key j whether the pair is visible.  It answers for single pairs
(:meth:`~Pattern.visible`), for rectangular tiles (:meth:`~Pattern.tile`, :meth:`~Pattern.classify`,
:meth:`~Pattern.key_range`), for the whole plane (:meth:`~Pattern.to_mask`), and it counts its pairs without building
anything of the size q x k (:meth:`~Pattern.pairs`).  Patterns combine with ``&``, ``|`` and ``~``.

======  =============================================================================
letter  meaning
======  =============================================================================
q, k    number of queries, number of keys
i, j    one query position, one key position, each counted from 0 in its own sequence
b, h    batch entry (flat over all leading axes), query head
======  =============================================================================

>>> pattern = prefix(2) | causal()
>>> pattern
prefix(2) | causal()
>>> pattern.to_mask(3, 3).astype(int)
array([[1, 1, 0],
       [1, 1, 0],
       [1, 1, 1]])
>>> pattern.pairs(65536, 65536)          # 65536 * 65537 / 2 pairs of causal, and (0, 1)
2147516417

Sources: Child et al. 2019, arXiv:1904.10509, section 4.2 (strided, fixed); their released code for ``variant="code"``.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from refattn.arrays import device as device_of
from refattn.arrays import is_array, is_bool, is_integer, namespace, require_integer, require_one_of, to_numpy

__all__ = [
    "Pattern",
    "blocks",
    "by_head",
    "causal",
    "dense",
    "dilated",
    "documents",
    "fixed",
    "lengths",
    "mask_mod",
    "prefix",
    "strided",
    "window",
]

Which = int | Sequence[int] | np.ndarray | None
"""Batch entries or heads that an answer must hold for: one, several, or None = all that the pattern has."""

_COUNT_TILE = 1 << 18  # pairs looked at in one piece while counting
_DENSE_SCAN = 1 << 16  # pairs of a dense mask that classify is ready to read


class Pattern:
    """Who may attend to whom; made by the functions of this module, never changed afterwards.

    Attributes
    ----------
    batch, heads : int
        Number of batch entries and heads that the pattern's own arrays distinguish; 1 where all are alike.
    """

    batch: int = 1
    heads: int = 1

    def __init__(self, name: str, *positional: Any, **named: Any) -> None:
        self._name, self._positional, self._named = name, positional, named
        self._moved: dict[Any, Any] = {}

    # ------------------------------------------------------------------ questions

    def visible(self, i: Any, j: Any, *, q: int, k: int, b: Any = None, h: Any = None) -> Any:
        """Whether query i sees key j, element by element on broadcasting integer index arrays.

        Parameters
        ----------
        i, j : integer arrays of one library, or ints
            Query and key positions, 0 <= i < q and 0 <= j < k.
        q, k : int
            Number of queries and of keys.
        b, h : integer arrays or ints, optional
            Batch entry (flat) and query head; needed only where the pattern distinguishes them.

        Returns
        -------
        bool array in the library of i, of a shape that broadcasts to the common shape of the index arrays (axes that
        the pattern does not look at may be missing or of size 1).

        Raises
        ------
        ValueError
            If b or h is needed and missing, q != k without an alignment, or q or k differ from the pattern's arrays.
        """
        self._check(q, k)
        found = [x for x in (i, j, b, h) if is_array(x)]
        xp, device = (namespace(*found), device_of(found[0])) if found else (np, None)
        index = []
        for name, x in (("i", i), ("j", j), ("b", b), ("h", h)):
            if x is not None and not is_array(x):
                x = xp.asarray(require_integer(name, x), device=device)
            elif x is not None and not is_integer(x.dtype):
                raise TypeError(f"{name} has dtype {x.dtype}: expected integer positions")
            index.append(x)
        return self._visible(xp, *index, q=q, k=k)

    def tile(
        self,
        i0: int,
        i1: int,
        j0: int,
        j1: int,
        *,
        q: int,
        k: int,
        b: np.ndarray | None = None,
        h: np.ndarray | None = None,
        xp: Any = np,
        device: Any = None,
    ) -> Any:
        """Visibility of rows i0 <= i < i1 and keys j0 <= j < j1 as one bool array.

        Parameters
        ----------
        b : NumPy int array (n,), optional
            Batch entries.
        h : NumPy int array (g, r), optional
            Query heads, by key head and place within its group.
        xp, device
            Library and device of the answer.

        Returns
        -------
        bool array that broadcasts to (n, g, r, i1 - i0, j1 - j0); without the leading axes where they do not matter.
        """
        i = xp.reshape(xp.arange(i0, i1, device=device), (-1, 1))
        j = xp.reshape(xp.arange(j0, j1, device=device), (1, -1))
        if b is not None:
            b = xp.reshape(xp.asarray(b, device=device), (-1, 1, 1, 1, 1))
        if h is not None:
            h = xp.reshape(xp.asarray(h, device=device), (*h.shape, 1, 1))
        self._check(q, k)
        return self._visible(xp, i, j, b, h, q=q, k=k)

    def classify(self, i0: int, i1: int, j0: int, j1: int, *, q: int, k: int, b: Which = None, h: Which = None) -> str:
        """``"empty"``, ``"full"`` or ``"partial"`` for the tile of rows i0 <= i < i1 and keys j0 <= j < j1.

        ``"empty"`` and ``"full"`` are certain, and hold for every one of the batch entries and heads asked for (left
        out: all that the pattern has).  ``"partial"`` promises nothing.  A tile without pairs is empty.
        """
        if i0 >= i1 or j0 >= j1:
            return "empty"
        self._check(q, k)
        return self._classify(i0, i1, j0, j1, q, k, b, h)

    def key_range(self, i0: int, i1: int, *, q: int, k: int, b: Which = None, h: Which = None) -> tuple[int, int]:
        """(j0, j1) with 0 <= j0 <= j1 <= k: rows i0 <= i < i1 see nothing outside the keys j0 <= j < j1."""
        if i0 >= i1:
            return 0, 0
        self._check(q, k)
        j0, j1 = self._key_range(i0, i1, q, k, b, h)
        j0, j1 = max(int(j0), 0), min(int(j1), k)
        return (j0, j1) if j0 < j1 else (0, 0)

    def interval(self, i: np.ndarray, *, q: int, k: int, b: Any = None, h: Any = None) -> tuple[Any, Any] | None:
        """(j0, j1), each broadcasting with i, if every row i sees exactly the keys j0 <= j < j1 (not yet cut to 0 and k).

        None where a row's keys are no such run, or are not known to be.  NumPy index arrays that broadcast.
        """
        self._check(q, k)
        return self._interval(i, b, h, q, k)

    def to_mask(self, q: int, k: int, batch: int | None = None, heads: int | None = None) -> np.ndarray:
        """The whole pattern as a bool NumPy array, True = may attend.

        Returns
        -------
        (q, k) where neither batch entry nor head matters, else (heads, q, k), (batch, 1, q, k) or (batch, heads, q, k).
        Patterns with arrays of their own know ``batch`` and ``heads``; a function given to :func:`mask_mod` does not.
        """
        b, h = self._everything(batch, heads)
        seen = self.tile(0, q, 0, k, q=q, k=k, b=b, h=None if h is None else h[:, None])
        if seen.ndim > 2:
            seen = seen[..., 0, :, :]
        return np.broadcast_to(seen, (*seen.shape[:-2], q, k)).copy()

    def pairs(self, q: int, k: int, batch: int | None = None, heads: int | None = None) -> int:
        """Exact number of visible pairs, without building the mask.

        Summed over the pattern's own batch entries and heads (a pattern that distinguishes none is counted once), or
        over ``batch`` entries and ``heads`` heads where these are given.  Combinations whose rows cannot be counted by
        arithmetic, and :func:`mask_mod`, are counted tile by tile.
        """
        self._check(q, k)
        b, h = self._everything(batch, heads)
        copies = math.prod(1 if x is None else len(x) for x in (b, h))
        if q == 0 or k == 0 or copies == 0:
            return 0
        b_index = None if b is None else b[:, None, None]
        h_index = None if h is None else h[:, None]
        step = max(_COUNT_TILE // copies, 1)
        total = 0
        for i0 in range(0, q, step):
            i = np.arange(i0, min(i0 + step, q))
            counts = self._below(i, k, b_index, h_index, q, k)
            if counts is None:
                return self._count_tiles(0, q, 0, k, q, k, b, h)
            total += _total(counts, len(i), copies)
        return total

    def row_counts(self, q: int, k: int, batch: int | None = None, heads: int | None = None) -> np.ndarray:
        """How many keys each row sees, ints (q,), (heads, q) or (batch, heads, q); axes as in :meth:`to_mask`."""
        self._check(q, k)
        b, h = self._everything(batch, heads)
        i = np.arange(q)
        counts = self._below(i, k, None if b is None else b[:, None, None], None if h is None else h[:, None], q, k)
        if counts is None:
            return np.count_nonzero(self.to_mask(q, k, batch, heads), axis=-1)
        shape = (
            *(() if b is None else (len(b),)),
            *(() if b is None and h is None else (1 if h is None else len(h),)),
            q,
        )
        counts = np.asarray(counts)
        counts = counts.reshape(counts.shape[max(0, counts.ndim - len(shape)) :])  # axes that are left out have size 1
        return np.broadcast_to(counts, shape)

    def fit(self, q: int, k: int, *, batch: tuple[int, ...] = (), heads: int | None = None) -> "Pattern":
        """The pattern made ready for one problem.

        Checks q, k and the number of heads, and broadcasts the pattern's own leading axes to ``batch`` as NumPy does
        (or takes them as flat, if their product is that of ``batch``), so that b counts the entries of ``batch`` flat.

        Raises
        ------
        ValueError
            Naming the pattern and the sizes that disagree.
        """
        self._check(q, k)
        if heads is not None and self.heads not in (1, heads):
            raise ValueError(f"{self!r} has {self.heads} heads of its own: {heads} were asked for")
        return self._fit_batch(tuple(batch))

    # ------------------------------------------------------------------ combination

    def __and__(self, other: Any) -> "Pattern":
        return _All(self, other) if isinstance(other, Pattern) else NotImplemented

    def __or__(self, other: Any) -> "Pattern":
        return _Any(self, other) if isinstance(other, Pattern) else NotImplemented

    def __invert__(self) -> "Pattern":
        return _Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a pattern is neither true nor false: combine patterns with & | ~, not with and, or, not")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        mine, its = [(x._name, x._positional, sorted(x._named.items())) for x in (self, other)]
        return _same(mine, its)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        arguments = [
            *map(_show, self._positional),
            *(f"{n}={_show(x)}" for n, x in self._named.items() if x is not None),
        ]
        return f"{self._name}({', '.join(arguments)})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_moved": {}}

    # ------------------------------------------------------------------ what a kind of pattern answers itself

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        raise NotImplementedError

    def _check(self, q: int, k: int) -> None:
        """Raise where the pattern does not fit q queries and k keys."""

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        return "partial"

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Which, h: Which) -> tuple[int, int]:
        return 0, k

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        """How many keys j < m each row i sees, on broadcasting NumPy arrays (b (n,1,1), h (n,1)); None: not known."""
        return None

    def _interval(self, i: Any, b: Any, h: Any, q: int, k: int) -> tuple[Any, Any] | None:
        """(j0, j1) if each row sees exactly the keys j0 <= j < j1; None where that is not so."""
        return None

    def _fit_batch(self, batch: tuple[int, ...]) -> "Pattern":
        return self

    # ------------------------------------------------------------------ shared

    def _need(self, index: Any, letter: str) -> Any:
        if index is None:
            what = {"b": "batch entries", "h": "heads"}[letter]
            raise ValueError(f"{self!r} distinguishes {what}: {letter} is missing")
        return index

    def _on(self, xp: Any, device: Any, name: str) -> Any:
        """An own array in another library or on another device, moved there once."""
        key = (name, xp, str(device))
        if key not in self._moved:
            x = getattr(self, name)
            here = namespace(x) is xp and (device is None or device_of(x) == device)
            # a copy, as torch warns of read-only arrays
            self._moved[key] = x if here else xp.asarray(to_numpy(x).copy(), device=device)
        return self._moved[key]

    def _lookup(self, xp: Any, name: str, index: Any) -> Any:
        """Entries of an own array (n,) at an index array of any shape (the standard's take knows one axis)."""
        if xp is np:
            return np.take(self._on(np, None, name), index)
        table = self._on(xp, device_of(index), name)
        return xp.reshape(xp.take(table, xp.reshape(index, (-1,))), index.shape)

    def _everything(self, batch: int | None, heads: int | None) -> tuple[Any, Any]:
        """Index arrays of all batch entries and heads; None where none are given and the pattern has none."""
        found = []
        for name, own, given in (("batch entries", self.batch, batch), ("heads", self.heads, heads)):
            if given is not None and own not in (1, require_integer(name, given, minimum=0)):
                raise ValueError(f"{self!r} has {own} {name} of its own: {given} were asked for")
            count = own if given is None else given
            found.append(None if given is None and own == 1 else np.arange(count))
        return found[0], found[1]

    def _count_tiles(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Any, h: Any) -> int:
        copies = math.prod(1 if x is None else len(x) for x in (b, h))
        kind = self.classify(i0, i1, j0, j1, q=q, k=k, b=b, h=h)
        if kind != "partial":
            return (i1 - i0) * (j1 - j0) * copies if kind == "full" else 0
        if (i1 - i0) * (j1 - j0) * copies > _COUNT_TILE and max(i1 - i0, j1 - j0) > 1:
            if i1 - i0 >= j1 - j0:
                middle = (i0 + i1) // 2
                parts = [(i0, middle, j0, j1), (middle, i1, j0, j1)]
            else:
                middle = (j0 + j1) // 2
                parts = [(i0, i1, j0, middle), (i0, i1, middle, j1)]
            return sum(self._count_tiles(*part, q, k, b, h) for part in parts)
        seen = self.tile(i0, i1, j0, j1, q=q, k=k, b=b, h=None if h is None else h[:, None])
        seen = np.broadcast_to(seen, (*seen.shape[:-2], i1 - i0, j1 - j0))
        return int(np.count_nonzero(seen)) * copies // math.prod(seen.shape[:-2])


# ---------------------------------------------------------------------- per-batch arrays


class _PerBatch(Pattern):
    """A pattern whose own arrays have leading batch axes, kept flat as their first axis."""

    _lead: tuple[int, ...] = ()
    _entries: np.ndarray | None = None  # row of the own arrays for each batch entry; None: one after the other

    @property
    def _rows(self) -> int:
        return math.prod(self._lead)

    @property
    def batch(self) -> int:  # type: ignore[override]
        return self._rows if self._entries is None else len(self._entries)

    def _fit_batch(self, batch: tuple[int, ...]) -> Pattern:
        if self._rows == 1 or self._lead == batch:
            return self
        rows = np.arange(self._rows).reshape(self._lead)
        try:
            rows = np.broadcast_to(rows, batch)
        except ValueError:
            if len(self._lead) > 1 or self._rows != math.prod(batch):
                raise ValueError(f"{self!r} has batch axes {self._lead}: they do not broadcast to {batch}") from None
        fitted = copy.copy(self)
        fitted._entries, fitted._moved = rows.reshape(-1), {}
        return fitted

    def _row(self, xp: Any, b: Any) -> Any:
        """Index into the own arrays for an index array b."""
        if self._rows == 1:
            return 0
        self._need(b, "b")
        return b if self._entries is None else self._lookup(xp, "_entries", b)

    def _chosen(self, b: Which) -> np.ndarray:
        """Rows of the own arrays for the batch entries asked for, on the host."""
        if self._rows == 1:
            return np.zeros(1, int)
        if b is None:
            return np.arange(self._rows)
        rows = np.atleast_1d(np.asarray(b))
        return rows if self._entries is None else self._entries[rows]

    def _values(self, xp: Any, name: str, b: Any) -> Any:
        """Entries of an own array (n,) for an index array b: a Python int where there is only one."""
        return int(getattr(self, name)[0]) if self._rows == 1 else self._lookup(xp, name, self._row(xp, b))


# ---------------------------------------------------------------------- patterns of the distance


class _Distance(_PerBatch):
    """Visibility depends on the distance i + offset - j alone.

    ``_near`` and ``_far`` bound the visible distances (None: no bound).  ``align`` gives the offset.
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
            self._lead, self._offsets = align.shape, align.reshape(-1)

    def _check(self, q: int, k: int) -> None:
        if self._align is None and q != k:
            raise ValueError(
                f"{self!r} with {q} queries and {k} keys needs an align: 'upper_left' (query 0 stands on key 0)"
                f" or 'lower_right' (the last query stands on the last key), or an offset"
            )

    def _offset(self, q: int, k: int) -> int | None:
        """The offset, or None where each batch entry has its own."""
        if isinstance(self._align, int):
            return self._align
        if isinstance(self._align, np.ndarray):
            return int(self._offsets[0]) if self._rows == 1 else None
        return k - q if self._align == "lower_right" else 0

    def _host_offset(self, b: Any, q: int, k: int) -> Any:
        offset = self._offset(q, k)
        return self._values(np, "_offsets", b) if offset is None else offset

    def _all_offsets(self, b: Which, q: int, k: int) -> Iterable[int]:
        offset = self._offset(q, k)
        return set(self._offsets[self._chosen(b)].tolist()) if offset is None else (offset,)

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        offset = self._offset(q, k)
        if offset is None:
            offset = self._values(xp, "_offsets", b)
        return self._sees(xp, i + offset, j)

    def _sees(self, xp: Any, place: Any, j: Any) -> Any:
        """Whether the query that stands at ``place`` on the key axis sees key j."""
        if self._near is None and self._far is None:
            return place - j == place - j
        near = None if self._near is None else j <= (place - self._near if self._near else place)
        if self._far is None:
            return near
        far = j >= place - self._far
        return far if near is None else near & far

    def _between(self, a: Any, b: Any) -> Any:
        """How many of the distances a ... b (inclusive) are visible, on ints or arrays; b >= a - 1."""
        a = a if self._near is None else _larger(a, self._near)
        b = b if self._far is None else _smaller(b, self._far)
        return _larger(b - a + 1, 0)

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        lowest, highest = i0 - j1 + 1, i1 - 1 - j0  # every distance between them occurs in the tile
        kinds = set()
        for offset in self._all_offsets(b, q, k):
            count = self._between(lowest + offset, highest + offset)
            kinds.add("empty" if count == 0 else "full" if count == highest - lowest + 1 else "partial")
        return kinds.pop() if len(kinds) == 1 else "partial"

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Which, h: Which) -> tuple[int, int]:
        offsets = self._all_offsets(b, q, k)
        j0 = 0 if self._far is None else i0 + min(offsets, default=0) - self._far
        j1 = k if self._near is None else i1 + max(offsets, default=0) - self._near
        return j0, j1

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        place = i + self._host_offset(b, q, k)
        return self._between(place - m + 1, place)


class _Band(_Distance):
    """All distances from ``_near`` to ``_far``."""

    def _interval(self, i: Any, b: Any, h: Any, q: int, k: int) -> tuple[Any, Any] | None:
        place = i + self._host_offset(b, q, k)
        return 0 if self._far is None else place - self._far, k if self._near is None else place - self._near + 1


class _Dilated(_Distance):
    """Multiples of ``step``, on both sides."""

    def __init__(self, step: int) -> None:
        self._step = require_integer("step", step, minimum=1)
        super().__init__("dilated", self._step, near=None, far=None)

    def _sees(self, xp: Any, place: Any, j: Any) -> Any:
        return (place - j) % self._step == 0

    def _between(self, a: Any, b: Any) -> Any:
        return b // self._step - (a - 1) // self._step


class _Strided(_Distance):
    """Parts of strided attention other than the first alone: multiples of the stride, with or without the band.

    Whether the band ends at stride or stride - 1 makes no difference to "both": the distance stride is a multiple.
    """

    def __init__(self, stride: int, part: str, variant: str) -> None:
        self._stride, self._part = stride, part
        super().__init__("strided", stride, part=part, variant=variant, near=0, far=None)

    def _sees(self, xp: Any, place: Any, j: Any) -> Any:
        distance = place - j
        multiple = distance % self._stride == 0
        if self._part == "both":
            multiple = multiple | (distance <= self._stride)
        return multiple & (distance >= 0)

    def _between(self, a: Any, b: Any) -> Any:
        a, b = _larger(a, 0), _larger(b, -1)
        a = _smaller(a, b + 1)
        multiples = b // self._stride - (a - 1) // self._stride
        if self._part == "second":
            return multiples
        in_band = _larger(_smaller(b, self._stride) - a + 1, 0)
        inner = _smaller(b, self._stride)
        shared = _larger(inner // self._stride - (a - 1) // self._stride, 0)
        return multiples + in_band - shared


# ---------------------------------------------------------------------- fixed


class _Fixed(Pattern):
    """Own block of ``stride`` tokens, and summary columns at the same residues of every block."""

    def __init__(self, stride: int, summary: int, part: str, summary_offsets: Any) -> None:
        self._stride = require_integer("stride", stride, minimum=1)
        self._summary = require_integer("summary", summary, minimum=1)
        require_one_of("part", part, ("both", "first", "second"))
        self._part = part
        offsets = _host_ints("summary_offsets", summary_offsets)
        if offsets.ndim > 1:
            raise ValueError(f"summary_offsets has shape {offsets.shape}: expected an int or one per head, (h,)")
        offsets = offsets.reshape(-1)
        if offsets.size == 0:
            raise ValueError("summary_offsets is empty: expected an int or one per head, (h,)")
        if offsets.min() < 0 or offsets.max() + self._summary > self._stride:
            raise ValueError(
                f"summary {self._summary} with summary_offsets {offsets.tolist()} does not lie within the stride"
                f" {self._stride}: expected 0 <= offset and offset + summary <= stride"
            )
        self._first_residues = self._stride - self._summary - offsets
        self.heads = 1 if part == "first" else offsets.size
        shown = int(offsets[0]) if offsets.size == 1 else offsets
        super().__init__("fixed", self._stride, self._summary, part=part, summary_offsets=shown)

    def _residue(self, xp: Any, h: Any) -> Any:
        """First residue of the summary columns; one after another from there."""
        if self._first_residues.size == 1:
            return int(self._first_residues[0])
        return self._lookup(xp, "_first_residues", self._need(h, "h"))

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        seen = None
        if self._part != "second":
            seen = j // self._stride == i // self._stride
        if self._part != "first":
            place = j % self._stride - self._residue(xp, h)
            column = (place >= 0) & (place < self._summary)
            seen = column if seen is None else seen | column
        return seen & (j <= i)

    def _columns(self, m: Any, residue: Any) -> Any:
        """How many of the columns j < m are summary columns; m >= 0."""
        rest = _smaller(_larger(m % self._stride - residue, 0), self._summary)
        return m // self._stride * self._summary + rest

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        if j0 >= i1:
            return "empty"
        below = j1 <= i0 + 1  # the whole tile lies at or below the diagonal
        empty = full = False
        if self._part != "second":
            empty = i0 // self._stride * self._stride >= j1
            full = below and (i1 - 1) // self._stride * self._stride <= j0
            if self._part == "first" or full:
                return "empty" if empty else "full" if full else "partial"
        if self._first_residues.size == 1 or h is None:
            residues = set(self._first_residues.tolist())
        else:
            residues = set(self._first_residues[np.asarray(h).reshape(-1)].tolist())
        empty = (empty or self._part == "second") and all(
            self._columns(min(j1, i1), r) == self._columns(j0, r) for r in residues
        )
        full = below and all(self._columns(j1, r) - self._columns(j0, r) == j1 - j0 for r in residues)
        return "empty" if empty else "full" if full else "partial"

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Which, h: Which) -> tuple[int, int]:
        return (i0 // self._stride * self._stride if self._part == "first" else 0), i1

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        end = np.minimum(m, i + 1)
        start = i // self._stride * self._stride
        if self._part == "first":
            return np.maximum(end - start, 0)
        residue = self._residue(np, h)
        if self._part == "second":
            return self._columns(end, residue)
        return self._columns(np.minimum(end, start), residue) + np.maximum(end - start, 0)

    def _interval(self, i: Any, b: Any, h: Any, q: int, k: int) -> tuple[Any, Any] | None:
        return (i // self._stride * self._stride, i + 1) if self._part == "first" else None


# ---------------------------------------------------------------------- lengths, prefix


class _Lengths(_PerBatch):
    """The first ``key`` keys, seen by the first ``query`` queries."""

    def __init__(
        self, name: str, query: np.ndarray | None, key: np.ndarray | None, *positional: Any, **named: Any
    ) -> None:
        super().__init__(name, *positional, **named)
        given = [x for x in (query, key) if x is not None]
        try:
            self._lead = np.broadcast_shapes(*(x.shape for x in given))
        except ValueError:
            shapes = " and ".join(str(x.shape) for x in given)
            raise ValueError(f"{name}: query and key lengths have shapes {shapes}, which do not broadcast") from None
        self._query, self._key = (
            None if x is None else np.broadcast_to(x, self._lead).reshape(-1) for x in (query, key)
        )

    def _check(self, q: int, k: int) -> None:
        if self._name != "lengths":
            return
        for x, n, what in ((self._query, q, "queries"), (self._key, k, "keys")):
            if x is not None and x.size and x.max() > n:
                raise ValueError(f"{self!r} names {x.max()} {what}, but there are {n}")

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        rows = None if self._query is None else i < self._values(xp, "_query", b)
        keys = None if self._key is None else j < self._values(xp, "_key", b)
        if rows is None or keys is None:
            return keys if rows is None else rows
        return rows & keys

    def _ends(self, b: Which) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of queries and keys for the batch entries asked for; the largest integer where there is no limit."""
        rows = self._chosen(b)
        no_limit = np.full(len(rows), np.iinfo(np.int64).max)
        query, key = (no_limit if x is None else x[rows] for x in (self._query, self._key))
        return query, key

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        query, key = self._ends(b)
        if bool(np.all((query >= i1) & (key >= j1))):
            return "full"
        return "empty" if bool(np.all((query <= i0) | (key <= j0))) else "partial"

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Which, h: Which) -> tuple[int, int]:
        query, key = self._ends(b)
        return 0, min(int(np.max(np.where(query > i0, key, 0), initial=0)), k)

    def _interval(self, i: Any, b: Any, h: Any, q: int, k: int) -> tuple[Any, Any]:
        end = k if self._key is None else np.minimum(self._values(np, "_key", b), k)
        return 0, end if self._query is None else np.where(i < self._values(np, "_query", b), end, 0)

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        return np.minimum(m, self._interval(i, b, h, q, k)[1])


# ---------------------------------------------------------------------- documents


class _Documents(_PerBatch):
    """Equal identifiers."""

    def __init__(self, query_ids: Any, key_ids: Any) -> None:
        query, key = _host_ints("query_ids", query_ids), _host_ints("key_ids", key_ids)
        for name, x in (("query_ids", query), ("key_ids", key)):
            if x.ndim == 0:
                raise ValueError(f"{name} has shape (): expected (..., length)")
        try:
            self._lead = np.broadcast_shapes(query.shape[:-1], key.shape[:-1])
        except ValueError:
            raise ValueError(
                f"query_ids {query.shape} and key_ids {key.shape}: leading axes do not broadcast"
            ) from None
        super().__init__("documents", query, key)
        self._q, self._k = query.shape[-1], key.shape[-1]
        self._query = np.broadcast_to(query, (*self._lead, self._q)).reshape(self._rows, self._q)
        self._key = np.broadcast_to(key, (*self._lead, self._k)).reshape(self._rows, self._k)
        self._query_flat, self._key_flat = self._query.reshape(-1), self._key.reshape(-1)
        self._sorted = bool(np.all(np.diff(self._query) >= 0) and np.all(np.diff(self._key) >= 0))

    def _check(self, q: int, k: int) -> None:
        if (q, k) != (self._q, self._k):
            raise ValueError(f"{self!r} is for {self._q} queries and {self._k} keys: got {q} and {k}")

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        row = self._row(xp, b)
        return self._lookup(xp, "_query_flat", row * self._q + i) == self._lookup(xp, "_key_flat", row * self._k + j)

    def _extent(self, ids: np.ndarray, row: int, start: int, end: int) -> tuple[int, int]:
        """Smallest and largest identifier in a slice."""
        if self._sorted:
            return int(ids[row, start]), int(ids[row, end - 1])
        piece = ids[row, start:end]
        return int(piece.min()), int(piece.max())

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        kinds = set()
        for row in self._chosen(b):
            low, high = self._extent(self._query, row, i0, i1)
            key_low, key_high = self._extent(self._key, row, j0, j1)
            if high < key_low or key_high < low:
                kinds.add("empty")
            else:
                kinds.add("full" if low == high == key_low == key_high else "partial")
        return kinds.pop() if len(kinds) == 1 else "partial"

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Which, h: Which) -> tuple[int, int]:
        if not self._sorted:
            return 0, k
        rows = self._chosen(b)
        starts = [int(np.searchsorted(self._key[r], self._query[r, i0], side="left")) for r in rows]
        ends = [int(np.searchsorted(self._key[r], self._query[r, i1 - 1], side="right")) for r in rows]
        return min(starts, default=0), max(ends, default=0)

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        row = self._row(np, b)
        ids, ranks = np.unique(self._key, return_inverse=True)
        if ids.size == 0:
            return np.zeros_like(i)
        # one increasing number for each key by (row, identifier, position): a count is a difference of two places
        entry = np.arange(self._key.shape[0])[:, None] * ids.size
        codes = np.sort(((entry + ranks.reshape(self._key.shape)) * k + np.arange(k)).reshape(-1))
        wanted = self._query_flat[row * self._q + i]
        rank = np.minimum(np.searchsorted(ids, wanted), ids.size - 1)
        start = (row * ids.size + rank) * k
        count = np.searchsorted(codes, start + m) - np.searchsorted(codes, start)
        return np.where(ids[rank] == wanted, count, 0)


# ---------------------------------------------------------------------- layouts and masks


class _Blocks(Pattern):
    """Whole blocks of size x size pairs; the last one may be cut short."""

    def __init__(self, layout: Any, size: int) -> None:
        layout = to_numpy(layout) if is_array(layout) else np.asarray(layout)
        if layout.dtype != bool:
            raise TypeError(f"layout has dtype {layout.dtype}: expected bool, True = the block is visible")
        if layout.ndim not in (2, 3):
            raise ValueError(f"layout has shape {layout.shape}: expected (n, n) or (h, n, n)")
        self._size = require_integer("size", size, minimum=1)
        super().__init__("blocks", layout, self._size)
        self._layout = layout if layout.ndim == 3 else layout[None]
        self._flat = np.ascontiguousarray(self._layout).reshape(-1)
        self.heads = self._layout.shape[0]

    def _check(self, q: int, k: int) -> None:
        _, rows, columns = self._layout.shape
        for n, count, what in ((q, rows, "queries"), (k, columns, "keys")):
            if -(-n // self._size) != count:
                raise ValueError(
                    f"{self!r}: {n} {what} make {-(-n // self._size)} blocks of {self._size}, the layout has {count}"
                )

    def _head(self, h: Any) -> Any:
        return 0 if self.heads == 1 else self._need(h, "h")

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        _, rows, columns = self._layout.shape
        index = (self._head(h) * rows + i // self._size) * columns + j // self._size
        return self._lookup(xp, "_flat", index)

    def _part(self, h: Which, i0: int, i1: int, j0: int, j1: int) -> np.ndarray:
        s = self._size
        part = self._layout[:, i0 // s : (i1 - 1) // s + 1, j0 // s : (j1 - 1) // s + 1]
        return part if self.heads == 1 or h is None else part[np.asarray(h).reshape(-1)]

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        part = self._part(h, i0, i1, j0, j1)
        return "full" if part.all() else "partial" if part.any() else "empty"

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Which, h: Which) -> tuple[int, int]:
        if k == 0:
            return 0, 0
        seen = np.flatnonzero(self._part(h, i0, i1, 0, k).any(axis=(0, 1)))
        return (int(seen[0]) * self._size, int(seen[-1] + 1) * self._size) if seen.size else (0, 0)

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        padded = np.pad(self._layout, ((0, 0), (0, 0), (0, 1)))
        before = (np.cumsum(padded, axis=-1) - padded) * self._size
        at = (self._head(h), i // self._size, m // self._size)
        return before[at] + padded[at] * (m % self._size)


class _Dense(_PerBatch):
    """A bool mask; axes of size 1 stand for all."""

    def __init__(self, mask: Any) -> None:
        if not is_array(mask):
            mask = np.asarray(mask)
        if not is_bool(mask.dtype):
            raise TypeError(
                f"mask has dtype {mask.dtype} and shape {tuple(mask.shape)}: expected bool, True = may attend"
            )
        if mask.ndim < 2:
            raise ValueError(f"mask has shape {tuple(mask.shape)}: expected (..., h, q, k), at least (q, k)")
        super().__init__("dense", mask)
        shape = tuple(mask.shape)
        self._lead = shape[:-3]
        self.heads = shape[-3] if len(shape) > 2 else 1
        self._mask = namespace(mask).reshape(mask, (self._rows, self.heads, *shape[-2:]))

    @property
    def _flat(self) -> Any:
        return namespace(self._mask).reshape(self._mask, (-1,))

    def _check(self, q: int, k: int) -> None:
        rows, columns = self._mask.shape[2:]
        if rows not in (1, q) or columns not in (1, k):
            raise ValueError(f"{self!r} does not broadcast to {q} queries and {k} keys")

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        _, heads, rows, columns = self._mask.shape
        index = self._row(xp, b) * heads
        if heads > 1:
            index = index + self._need(h, "h")
        index = index * rows + (i if rows > 1 else i * 0)
        index = index * columns + (j if columns > 1 else j * 0)
        return self._lookup(xp, "_flat", index)

    def _piece(self, mask: Any, entries: Any, h: Any, i0: int, i1: int, j0: int, j1: int) -> Any:
        """The part (entries, heads, rows, keys) of the mask; axes of size 1 stay so."""
        piece = mask
        if mask.shape[2] > 1:
            piece = piece[:, :, i0:i1, :]
        if mask.shape[3] > 1:
            piece = piece[:, :, :, j0:j1]
        if self._rows > 1:
            piece = _pick(piece, entries, 0)
        return piece if self.heads == 1 or h is None else _pick(piece, np.asarray(h).reshape(-1), 1)

    def tile(
        self,
        i0: int,
        i1: int,
        j0: int,
        j1: int,
        *,
        q: int,
        k: int,
        b: np.ndarray | None = None,
        h: np.ndarray | None = None,
        xp: Any = np,
        device: Any = None,
    ) -> Any:
        self._check(q, k)
        entries = None if self._rows == 1 else self._chosen(self._need(b, "b"))
        heads = (1, 1) if self.heads == 1 else self._need(h, "h").shape
        piece = self._piece(self._on(xp, device, "_mask"), entries, h, i0, i1, j0, j1)
        tail = piece.shape[2:]
        if self._rows > 1:
            return xp.reshape(piece, (piece.shape[0], *heads, *tail))
        return xp.reshape(piece, tail if self.heads == 1 else (*heads, *tail))

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        entries = self._chosen(b)
        heads = 1 if self.heads == 1 else self.heads if h is None else np.size(h)
        if (i1 - i0) * (j1 - j0) * len(entries) * heads > _DENSE_SCAN:
            return "partial"
        xp = namespace(self._mask)
        piece = self._piece(self._mask, entries, h, i0, i1, j0, j1)
        return "full" if bool(xp.all(piece)) else "partial" if bool(xp.any(piece)) else "empty"

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        if np.ndim(m) or m != k:  # whole rows only: anything else would be counted from the mask anyway
            return None
        mask = self._on(np, None, "_mask")
        rows = mask[:, :, i[0] : i[-1] + 1] if mask.shape[2] > 1 else mask
        counts = np.count_nonzero(rows, axis=-1) * (1 if mask.shape[3] > 1 else k)  # (rows, heads, i)
        if self._entries is not None and self._rows > 1:
            counts = counts[self._entries]
        return counts


class _MaskMod(Pattern):
    """A function of the indices."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise TypeError(f"mask_mod: {function!r} is a {type(function).__name__}: expected a function of b, h, i, j")
        super().__init__("mask_mod", function)
        self._function = function

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        b = _Missing(self, "b") if b is None else b
        h = _Missing(self, "h") if h is None else h
        seen = self._function(b, h, i, j)
        if isinstance(seen, bool):
            seen = xp.asarray(seen, device=device_of(i))
        if not is_array(seen) or not is_bool(seen.dtype):
            kind = f"an array of dtype {seen.dtype}" if is_array(seen) else f"a {type(seen).__name__}"
            raise TypeError(f"{self!r} returned {kind}: expected a bool array, True = may attend")
        return (
            seen if seen.ndim >= 2 else seen | ((i < 0) & (j < 0))
        )  # a function of one index: never fewer axes than i, j


class _Missing:
    """Stands for an index that was not given: whoever computes with it is told so."""

    def __init__(self, pattern: Pattern, letter: str) -> None:
        self.__dict__.update(_pattern=pattern, _letter=letter)

    def _raise(self, *_: Any, **__: Any) -> Any:
        self.__dict__["_pattern"]._need(None, self.__dict__["_letter"])

    __array_ufunc__ = None  # NumPy arrays leave arithmetic with it to the operators below
    __getattr__ = __getitem__ = __index__ = __int__ = __float__ = __bool__ = __array__ = __iter__ = __len__ = _raise
    __hash__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __pos__ = __abs__ = __invert__ = _raise
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _raise
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __and__ = __rand__ = _raise
    __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _raise


# ---------------------------------------------------------------------- combinations


class _Combination(Pattern):
    """Several patterns together."""

    _symbol = ""
    _parts: tuple[Pattern, ...]

    def __init__(self, *parts: Pattern) -> None:
        flat: list[Pattern] = []
        for part in parts:
            flat.extend(part._parts if type(part) is type(self) and isinstance(part, _Combination) else (part,))
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
        return f" {self._symbol} ".join(f"({p!r})" if isinstance(p, (_All, _Any)) else repr(p) for p in self._parts)

    def _check(self, q: int, k: int) -> None:
        for part in self._parts:
            part._check(q, k)

    def _fit_batch(self, batch: tuple[int, ...]) -> Pattern:
        return type(self)(*(p._fit_batch(batch) for p in self._parts))

    def _join(self, answers: Iterable[Any]) -> Any:
        raise NotImplementedError

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        return self._join(p._visible(xp, i, j, b, h, q=q, k=k) for p in self._parts)

    def tile(self, *corners: int, **where: Any) -> Any:
        return self._join(p.tile(*corners, **where) for p in self._parts)


class _All(_Combination):
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


class _Any(_Combination):
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

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        """Inclusion and exclusion, one part at a time."""
        *rest, last = sorted(self._parts, key=lambda p: p._interval(i, b, h, q, k) is not None)
        if not rest:
            return last._below(i, m, b, h, q, k)
        first = rest[0] if len(rest) == 1 else _Any(*rest)
        counts = [p._below(i, m, b, h, q, k) for p in (first, last, _All(first, last))]
        return None if any(c is None for c in counts) else counts[0] + counts[1] - counts[2]


class _Not(_Combination):
    """Pairs that the part does not see."""

    _symbol = "~"

    def __invert__(self) -> Pattern:
        return self._parts[0]

    def __repr__(self) -> str:
        part = self._parts[0]
        return f"~({part!r})" if isinstance(part, (_All, _Any)) else f"~{part!r}"

    def _join(self, answers: Iterable[Any]) -> Any:
        return ~next(iter(answers))

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        kind = self._parts[0]._classify(i0, i1, j0, j1, q, k, b, h)
        return {"empty": "full", "full": "empty"}.get(kind, kind)

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        count = self._parts[0]._below(i, m, b, h, q, k)
        return None if count is None else m - count


class _ByHead(Pattern):
    """A pattern for each head."""

    def __init__(self, parts: Sequence[Any], which: Any) -> None:
        parts, which = tuple(parts), _host_ints("which", which)
        if not all(isinstance(p, Pattern) and p.heads == 1 for p in parts):
            raise TypeError(f"parts are {parts!r}: expected patterns that do not distinguish heads")
        if which.ndim != 1 or not which.size or which.min() < 0 or which.max() >= len(parts):
            raise ValueError(f"which is {which.tolist()}: expected for each head a number below {len(parts)}")
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
        return _ByHead([p._fit_batch(batch) for p in self._parts], self._which)

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


# ---------------------------------------------------------------------- small helpers


def _pick(x: Any, index: np.ndarray, axis: int) -> Any:
    """Entries along one axis; a slice where they follow one another."""
    start = int(index[0]) if len(index) else 0
    if np.array_equal(index, np.arange(start, start + len(index))):
        return x[(slice(None),) * axis + (slice(start, start + len(index)), ...)]
    xp = namespace(x)
    return xp.take(x, xp.asarray(index, device=device_of(x)), axis=axis)


def _larger(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)


def _smaller(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


def _total(counts: Any, rows: int, copies: int) -> int:
    """Sum of counts that broadcast to (..., rows), repeated to ``copies`` of the leading entries."""
    counts = np.asarray(counts)
    counts = np.broadcast_to(counts, (*counts.shape[:-1], rows))
    return int(counts.sum()) * copies // math.prod(counts.shape[:-1])


def _host_ints(name: str, x: Any) -> np.ndarray:
    found = to_numpy(x) if is_array(x) else np.asarray(x)
    if not np.issubdtype(found.dtype, np.integer):
        raise TypeError(f"{name} is {x!r} of dtype {found.dtype}: expected integers")
    return found.astype(np.int64)


def _parse_align(align: Any) -> Any:
    """None, one of the two names, an int, or a NumPy int array with one entry per batch entry."""
    if align is None or isinstance(align, str):
        require_one_of("align", align, (None, "upper_left", "lower_right"))
        return align
    if isinstance(align, int) and not isinstance(align, bool):
        return align
    found = _host_ints("align", align)
    return int(found) if found.ndim == 0 else found


def _show(x: Any) -> str:
    if not is_array(x) or isinstance(x, np.generic):
        return getattr(x, "__qualname__", None) or repr(x)
    shape = tuple(x.shape)
    if isinstance(x, np.ndarray) and x.size <= 12 and not is_bool(x.dtype):
        return repr(x.tolist())
    return f"<{x.dtype} {shape}>"


def _same(a: Any, b: Any) -> bool:
    if is_array(a) or is_array(b):
        return is_array(a) and is_array(b) and np.array_equal(to_numpy(a), to_numpy(b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


# ---------------------------------------------------------------------- constructors


def causal(align: str | int | Any = None) -> Pattern:
    """Query i sees the keys j <= i + offset.

    Parameters
    ----------
    align : "upper_left", "lower_right", int or ints per batch, optional
        The offset: where query 0 stands on the key axis.  ``"upper_left"`` is 0, ``"lower_right"`` is k - q.  May be
        left out only where q = k; a negative offset leaves the first rows empty.

    Raises
    ------
    ValueError
        Once q and k are known and differ, if ``align`` was left out.

    Examples
    --------
    >>> causal("lower_right").to_mask(2, 4).astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 1]])
    """
    align = _parse_align(align)
    return _Band("causal", near=0, far=None, align=align, shown=align)


def window(left: int | None, right: int | None, align: str | int | Any = None) -> Pattern:
    """Query i sees the keys i + offset - left <= j <= i + offset + right.

    ``left`` and ``right`` count the keys beside the aligned diagonal, which is seen too; None = unlimited.  ``align``
    as in :func:`causal`.
    """
    for name, value in (("left", left), ("right", right)):
        if value is not None:
            require_integer(name, value, minimum=0)
    align = _parse_align(align)
    left, right = (None if x is None else int(x) for x in (left, right))
    return _Band("window", left, right, near=None if right is None else -right, far=left, align=align, shown=align)


def prefix(n: int | Any) -> Pattern:
    """Every query sees the first n keys, j < n, and nothing else; n an int, or ints per batch."""
    key = _host_ints("n", n)
    if key.size and key.min() < 0:
        raise ValueError(f"n is {n}: expected at least 0")
    return _Lengths("prefix", None, key, int(key) if key.ndim == 0 else key)


def dilated(step: int) -> Pattern:
    """Query i sees the keys with (i - j) mod step = 0, on both sides."""
    return _Dilated(step)


def strided(stride: int, part: str = "both", variant: str = "paper") -> Pattern:
    """Strided sparse attention, causal by itself.

    ``"first"``: 0 <= i - j <= stride in the paper (stride + 1 keys), < stride in its code; ``"second"``: 0 <= i - j and
    (i - j) mod stride = 0; ``"both"``: one or the other.  Source: arXiv:1904.10509, section 4.2.
    """
    stride = require_integer("stride", stride, minimum=1)
    require_one_of("part", part, ("both", "first", "second"))
    require_one_of("variant", variant, ("paper", "code"))
    if part == "first":
        return _Band(
            "strided", stride, part=part, variant=variant, near=0, far=stride if variant == "paper" else stride - 1
        )
    return _Strided(stride, part, variant)


def fixed(stride: int, summary: int, part: str = "both", summary_offsets: int | Any = 0) -> Pattern:
    """Fixed sparse attention, causal by itself.

    ``"first"``: keys j <= i of the own block, j // stride = i // stride.  ``"second"``: keys j <= i in the ``summary``
    columns of every block, whose residues j mod stride are stride - offset - summary ... stride - offset - 1.
    ``"both"``: one or the other.  ``summary_offsets`` is one offset in tokens, or one per head (h,).
    Source: arXiv:1904.10509, section 4.2 (which prints the last residue as stride; its example shows stride - 1).
    """
    return _Fixed(stride, summary, part, summary_offsets)


def documents(query_ids: Any, key_ids: Any) -> Pattern:
    """Only equal identifiers attend: ``query_ids`` ints (..., q), ``key_ids`` ints (..., k)."""
    return _Documents(query_ids, key_ids)


def lengths(query_lengths: Any = None, key_lengths: Any = None) -> Pattern:
    """Positions beyond the lengths are padding: i < query length and j < key length; ints per batch, or one for all."""
    found = []
    for name, x in (("query_lengths", query_lengths), ("key_lengths", key_lengths)):
        if x is not None:
            x = _host_ints(name, x)
            if x.size and x.min() < 0:
                raise ValueError(f"{name} is {x.tolist()}: expected at least 0")
        found.append(x)
    if found[0] is None and found[1] is None:
        raise TypeError("lengths: query_lengths or key_lengths is needed")
    named = {n: x for n, x in zip(("query_lengths", "key_lengths"), found, strict=True) if x is not None}
    return _Lengths("lengths", *found, **named)


def blocks(layout: Any, size: int) -> Pattern:
    """Query i sees key j where ``layout[h, i // size, j // size]``; layout bool (n, n) or (h, n, n), not causal."""
    return _Blocks(layout, size)


def dense(mask: Any) -> Pattern:
    """A bool mask (..., h, q, k) or (q, k), True = may attend; axes of size 1 stand for all.

    The array is not copied: it must not change while the pattern is in use.
    """
    return _Dense(mask)


def by_head(parts: Sequence[Pattern], which: Any) -> Pattern:
    """A pattern for each head: head h has ``parts[which[h]]``; ``which`` ints (h,)."""
    return _ByHead(parts, which)


def mask_mod(function: Callable[..., Any]) -> Pattern:
    """``function(b, h, i, j)`` of broadcasting index arrays returns a bool array, True = may attend.

    It says nothing about its shape beforehand: every tile counts as partial, and ``batch`` and ``heads`` are needed
    where the function looks at b or h.
    """
    return _MaskMod(function)
