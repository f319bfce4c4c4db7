"""What every pattern answers, and patterns with an entry for each batch entry."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from refattn.arrays import device as device_of
from refattn.arrays import is_array, is_bool, is_integer, namespace, require_integer, to_numpy
from refattn.patterns.counting import CHUNK, Ends, all_rows, runs, twice_the_sum

__all__ = ["Pattern", "PerBatch", "Which", "host_array", "host_ints", "taken"]

Which = int | Sequence[int] | np.ndarray | None
"""Batch entries or heads that an answer must hold for: one, several, or None = all that the pattern has."""


class Pattern:
    """Who may attend to whom; made by the functions of ``refattn.patterns``, never changed afterwards.

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
        self._fits(q, k)
        arrays = [x for x in (i, j, b, h) if is_array(x)]
        xp, device = (namespace(*arrays), device_of(arrays[0])) if arrays else (np, None)
        index = []
        for name, x in (("i", i), ("j", j), ("b", b), ("h", h)):
            if x is not None and not is_array(x):
                x = xp.asarray(require_integer(name, x), device=device)
            elif x is not None and not is_integer(x.dtype):
                raise TypeError(f"{name} has dtype {x.dtype}: expected integer positions")
            elif x is not None and x.dtype not in (xp.int32, xp.int64):
                x = xp.astype(x, xp.int64)  # differences of unsigned or short positions would wrap
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
        self._fits(q, k)
        return self._classify(i0, i1, j0, j1, q, k, b, h)

    def key_range(self, i0: int, i1: int, *, q: int, k: int, b: Which = None, h: Which = None) -> tuple[int, int]:
        """(j0, j1) with 0 <= j0 <= j1 <= k: rows i0 <= i < i1 see nothing outside the keys j0 <= j < j1."""
        if i0 >= i1:
            return 0, 0
        self._fits(q, k)
        j0, j1 = self._key_range(i0, i1, q, k, b, h)
        j0, j1 = max(int(j0), 0), min(int(j1), k)
        return (j0, j1) if j0 < j1 else (0, 0)

    def interval(self, i: np.ndarray, *, q: int, k: int, b: Any = None, h: Any = None) -> tuple[Any, Any] | None:
        """(j0, j1), each broadcasting with i, if every row i sees exactly the keys j0 <= j < j1 (not yet cut to 0 and k).

        None where a row's keys are no such run, or are not known to be.  NumPy index arrays that broadcast.
        """
        self._fits(q, k)
        return self._interval(i, b, h, q, k)

    def reach(self, i0: np.ndarray, i1: np.ndarray, *, q: int, k: int, least: int = 1) -> np.ndarray:
        """How many keys lie between the first and the last that the rows i0 <= i < i1 see: (b | 1, h | 1, n) for n runs of rows.

        Where several runs of keys are seen, each counts in whole pieces of ``least`` keys; where it is not known that they are
        runs, all keys that may be seen count.
        """
        self._fits(q, k)
        b, h = self._everything(None, None)
        counts = self._reach(np.asarray(i0), np.asarray(i1), *_spread(b, h), q, k, least)
        return np.broadcast_to(counts, np.broadcast_shapes(np.shape(counts), (self.batch, self.heads, len(i0))))

    def to_mask(self, q: int, k: int, batch: int | None = None, heads: int | None = None) -> np.ndarray:
        """The whole pattern as a bool NumPy array, True = may attend.

        Returns
        -------
        (q, k) where neither batch entry nor head matters, else (heads, q, k), (batch, 1, q, k) or (batch, heads, q, k).
        Patterns with arrays of their own know ``batch`` and ``heads``; a function given to :func:`mask_mod` does not.
        """
        self._fits(q, k)
        b, h = self._everything(batch, heads)
        seen = self.tile(0, q, 0, k, q=q, k=k, b=b, h=None if h is None else h[:, None])
        if seen.ndim > 2:
            seen = seen[..., 0, :, :]
        return np.broadcast_to(seen, (*seen.shape[:-2], q, k)).copy()

    def pairs(
        self, q: int, k: int, batch: int | None = None, heads: int | None = None, *, most: int | None = None
    ) -> int:
        """Exact number of visible pairs, without building the mask.

        Summed over the pattern's own batch entries and heads (a pattern that distinguishes none is counted once), or
        over ``batch`` entries and ``heads`` heads where these are given.  ``most``: rows that see more count as so many.
        Combinations whose rows cannot be counted by arithmetic, and :func:`mask_mod`, are counted tile by tile.
        """
        self._fits(q, k)
        b, h = self._everything(batch, heads)
        copies = math.prod(1 if x is None else len(x) for x in (b, h))
        if q == 0 or k == 0 or copies == 0:
            return 0
        apart = (b if self.batch > 1 else None), (h if self.heads > 1 else None)  # rows of the others count alike
        few = runs(self._ends_of_rows(q, k), q, k)
        step = max(CHUNK // math.prod(1 if x is None else len(x) for x in apart), 1)
        total = 0
        for i, weights in all_rows(q, step) if few is None else [few]:
            counts = self._below(i, k, *_spread(*apart), q, k)
            if counts is None and most is not None:
                counts = np.minimum(self.row_counts(q, k, batch, heads), most)
                return int(counts.sum()) * copies // math.prod(counts.shape[:-1])
            if counts is None:
                return self._count_tiles(0, q, 0, k, q, k, b, h)
            counts = np.asarray(counts)
            counts = np.broadcast_to(counts, (*counts.shape[:-1], len(i)))
            if q * k >= 1 << 60:
                counts = counts.astype(object)
            sums = twice_the_sum(counts, weights, most, in_runs=few is not None)
            total += sum(np.ravel(sums).tolist()) * copies // np.size(sums)
        return total // 2

    def row_counts(self, q: int, k: int, batch: int | None = None, heads: int | None = None) -> np.ndarray:
        """How many keys each row sees, ints (q,), (heads, q) or (batch, heads, q); axes as in :meth:`to_mask`."""
        self._fits(q, k)
        b, h = self._everything(batch, heads)
        counts = self._below(np.arange(q), k, *_spread(b, h), q, k)
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
        self._fits(q, k)
        if heads is not None and self.heads not in (1, heads):
            raise ValueError(f"{self!r} has {self.heads} heads of its own: {heads} were asked for")
        return self._fit_batch(tuple(batch))

    # ------------------------------------------------------------------ combination

    def __and__(self, other: Any) -> "Pattern":
        from refattn.patterns.combinations import All

        return All(self, other) if isinstance(other, Pattern) else NotImplemented

    def __or__(self, other: Any) -> "Pattern":
        from refattn.patterns.combinations import AnyOf

        return AnyOf(self, other) if isinstance(other, Pattern) else NotImplemented

    def __invert__(self) -> "Pattern":
        from refattn.patterns.combinations import Not

        return Not(self)

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

    def _fits(self, q: int, k: int) -> None:
        for name, n in (("q", q), ("k", k)):
            require_integer(name, n, minimum=0)
        self._check(q, k)

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

    def _reach(self, i0: Any, i1: Any, b: Any, h: Any, q: int, k: int, least: int) -> Any:
        ends = self._ends_of_run(i0, i1, b, h, q, k)
        return np.full(np.shape(i0), k) if ends is None else np.maximum(ends[1] - ends[0], 0)

    def _ends_of_run(self, i0: Any, i1: Any, b: Any, h: Any, q: int, k: int) -> tuple[Any, Any] | None:
        """First key that the rows i0 <= i < i1 see and the first one after those; None where each row's keys are no run."""
        first, last = self._interval(i0, b, h, q, k), self._interval(i1 - 1, b, h, q, k)
        if first is None or last is None:
            return None
        return np.maximum(first[0], 0), np.minimum(np.maximum(first[1], last[1]), k)

    def _ends_of_rows(self, q: int, k: int) -> Ends | None:
        """Where the runs of visible keys end (``counting``); None: not known, every row is counted."""
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
        index = []
        for argument, what, own, asked in (
            ("batch", "batch entries", self.batch, batch),
            ("heads", "heads", self.heads, heads),
        ):
            if asked is not None:
                require_integer(argument, asked, minimum=0)
                if own not in (1, asked):
                    raise ValueError(f"{self!r} has {own} {what} of its own: {asked} were asked for")
            index.append(None if asked is None and own == 1 else np.arange(own if asked is None else asked))
        return index[0], index[1]

    def _count_tiles(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Any, h: Any) -> int:
        copies = math.prod(1 if x is None else len(x) for x in (b, h))
        kind = self.classify(i0, i1, j0, j1, q=q, k=k, b=b, h=h)
        if kind != "partial":
            return (i1 - i0) * (j1 - j0) * copies if kind == "full" else 0
        if (i1 - i0) * (j1 - j0) * copies > CHUNK and max(i1 - i0, j1 - j0) > 1:
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


# ---------------------------------------------------------------------- per-batch arrays


class PerBatch(Pattern):
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


def host_array(name: str, x: Any) -> Any:
    """An array as it is, lists and numbers as a NumPy array."""
    try:
        return x if is_array(x) else np.asarray(x) if np.size(x) else np.zeros(np.shape(x), dtype=np.int64)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {x!r}: expected an array") from None


def host_ints(name: str, x: Any) -> np.ndarray:
    """Integers of any library as a NumPy int64 array."""
    host = to_numpy(host_array(name, x))
    whole = host.dtype == object and all(isinstance(n, int) for n in host.flat)
    if whole or (host.dtype == np.uint64 and host.size and host.max() > np.iinfo(np.int64).max):
        raise ValueError(f"{name} is {_show(x)}: expected integers below 2**63")
    if not np.issubdtype(host.dtype, np.integer):
        raise TypeError(f"{name} is {_show(x)} of dtype {host.dtype}: expected integers")
    return host.astype(np.int64)


def taken(xp: Any, table: np.ndarray, index: Any) -> Any:
    """Entries of a short host table at an index array of any shape, in the library of the index."""
    if xp is np:
        return table[index]
    moved = xp.asarray(table, device=device_of(index))
    return xp.reshape(xp.take(moved, xp.reshape(index, (-1,))), index.shape)


def _spread(b: Any, h: Any) -> tuple[Any, Any]:
    """Index arrays (n,) of batch entries and heads made to broadcast as (n, 1, 1) and (n, 1) with rows."""
    return None if b is None else b[:, None, None], None if h is None else h[:, None]


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
