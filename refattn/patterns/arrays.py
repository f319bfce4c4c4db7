"""Patterns that hold arrays: lengths, documents, layouts, masks, functions of the indices."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn.arrays import device as device_of
from refattn.arrays import is_array, is_bool, namespace, require_integer, to_numpy
from refattn.patterns.base import Pattern, PerBatch, Which, host_array, host_ints
from refattn.patterns.counting import Ends

__all__ = ["Blocks", "Dense", "Documents", "Lengths", "MaskMod"]

_DENSE_SCAN = 1 << 16
"""Pairs of a dense mask that classify is ready to read."""


class Lengths(PerBatch):
    """The first ``key`` keys, seen by the first ``query`` queries."""

    def __init__(
        self, name: str, query: np.ndarray | None, key: np.ndarray | None, *positional: Any, **named: Any
    ) -> None:
        super().__init__(name, *positional, **named)
        lengths = [x for x in (query, key) if x is not None]
        try:
            self._lead = np.broadcast_shapes(*(x.shape for x in lengths))
        except ValueError:
            shapes = " and ".join(str(x.shape) for x in lengths)
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

    def _ends_of_rows(self, q: int, k: int) -> Ends | None:
        query, key = (set() if x is None else {min(n, max(q, k)) for n in x.tolist()} for x in (self._query, self._key))
        return Ends(standing=frozenset(key), rows=frozenset(query))


# ---------------------------------------------------------------------- documents


class Documents(PerBatch):
    """Equal identifiers."""

    def __init__(self, query_ids: Any, key_ids: Any) -> None:
        query, key = host_ints("query_ids", query_ids), host_ints("key_ids", key_ids)
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
        self._sorted = bool(all(np.all(x[:, 1:] >= x[:, :-1]) for x in (self._query, self._key)))

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

    def _interval(self, i: Any, b: Any, h: Any, q: int, k: int) -> tuple[Any, Any] | None:
        if not self._sorted:
            return None
        row = self._row(np, b)
        first, beyond = self._runs
        return first[row, i], beyond[row, i]

    @functools.cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray]:
        """First key of each query's document and the first one after it, where identifiers are sorted."""
        rows = list(zip(self._key, self._query, strict=True))
        first = np.asarray([np.searchsorted(x, y, side="left") for x, y in rows]).reshape(self._query.shape)
        beyond = np.asarray([np.searchsorted(x, y, side="right") for x, y in rows]).reshape(self._query.shape)
        return first, beyond

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


class Blocks(Pattern):
    """Whole blocks of size x size pairs; the last one may be cut short."""

    def __init__(self, layout: Any, size: int) -> None:
        layout = to_numpy(host_array("layout", layout))
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

    def _ends_of_rows(self, q: int, k: int) -> Ends | None:
        edges = range(0, max(q, k) + self._size, self._size)
        return Ends(standing=frozenset(edges), rows=frozenset(edges))


class Dense(PerBatch):
    """A bool mask; axes of size 1 stand for all."""

    def __init__(self, mask: Any) -> None:
        mask = host_array("mask", mask)
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
        if heads != 1:
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


class MaskMod(Pattern):
    """A function of the indices."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise TypeError(f"mask_mod: {function!r} is a {type(function).__name__}: expected a function of b, h, i, j")
        super().__init__("mask_mod", function)
        self._function = function

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        b = Missing(self, "b") if b is None else b
        h = Missing(self, "h") if h is None else h
        seen = self._function(b, h, i, j)
        if isinstance(seen, bool):
            seen = xp.asarray(seen, device=device_of(i))
        if not is_array(seen) or not is_bool(seen.dtype):
            kind = f"an array of dtype {seen.dtype}" if is_array(seen) else f"a {type(seen).__name__}"
            raise TypeError(f"{self!r} returned {kind}: expected a bool array, True = may attend")
        return (
            seen if seen.ndim >= 2 else seen | ((i < 0) & (j < 0))
        )  # a function of one index: never fewer axes than i, j


class Missing:
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


def _pick(x: Any, index: np.ndarray, axis: int) -> Any:
    """Entries along one axis; a slice where they follow one another."""
    start = int(index[0]) if len(index) else 0
    if np.array_equal(index, np.arange(start, start + len(index))):
        return x[(slice(None),) * axis + (slice(start, start + len(index)), ...)]
    xp = namespace(x)
    return xp.take(x, xp.asarray(index, device=device_of(x)), axis=axis)
