"""Which queries or keys a block holds: a run of positions, or lists of positions.

Arrays of one group have the axes (b, g, r, length, channel) or (b, g, r, length); a selection takes its positions from
them and puts values back.  A Span gives (..., a, channel), an Index one more axis: (..., n, a, channel) for n equal blocks;
Windows are n overlapping runs of an array that is in a block's order already.
"""

import math
from typing import Any

import numpy as np

from refattn.arrays import namespace, to_namespace

__all__ = ["Index", "Lattice", "Span", "Windows", "take_order", "take_pairs"]


class Span:
    """Positions start ... stop - 1."""

    batched = False
    once = False

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __repr__(self) -> str:
        return f"Span({self.start}, {self.stop})"

    @property
    def pairs_axes(self) -> tuple[int, ...]:
        """Shape of the positions."""
        return (self.stop - self.start,)

    @property
    def extent(self) -> tuple[int, int]:
        """All positions lie in start <= position < stop."""
        return self.start, self.stop

    def positions(self, xp: Any) -> Any:
        """Integer positions (a,)."""
        return xp.arange(self.start, self.stop)

    def take(self, x: Any) -> Any:
        """(..., length, channel) -> (..., a, channel)."""
        return x[..., self.start : self.stop, :]

    def take_last(self, x: Any) -> Any:
        """(..., length) -> (..., a)."""
        return x[..., self.start : self.stop]

    def assign(self, backend: Any, x: Any, values: Any) -> Any:
        """x with its rows replaced."""
        return backend.assign(x, (..., slice(self.start, self.stop), slice(None)), values)

    def assign_last(self, backend: Any, x: Any, values: Any) -> Any:
        return backend.assign(x, (..., slice(self.start, self.stop)), values)

    def accumulate(self, backend: Any, x: Any, values: Any) -> Any:
        """x with values added to its rows."""
        return backend.accumulate(x, (..., slice(self.start, self.stop), slice(None)), values)


class Lattice:
    """Columns of a table: the positions from ``start`` on, written in ``rows`` rows of ``stride``, of which the columns
    ``first`` ... ``first + width - 1`` are meant.  Slices of the array, so nothing is gathered or scattered.

    Parameters
    ----------
    layout : {"rows", "columns", "joined"}
        The lists of positions: one for each row (n = rows, a = width), one for each column (n = width, a = rows), or one
        for all (n = 1, a = rows * width).
    """

    batched = True
    once = False

    def __init__(
        self, start: int, rows: int, stride: int, *, first: int = 0, width: int | None = None, layout: str = "rows"
    ) -> None:
        self.start, self.rows, self.stride, self.layout = start, rows, stride, layout
        self.first, self.width = first, stride if width is None else width

    def __repr__(self) -> str:
        return f"Lattice({self.start}, {self.rows}, {self.stride}, {self.first}, {self.width}, {self.layout!r})"

    @property
    def pairs_axes(self) -> tuple[int, ...]:
        shapes = {"rows": (self.rows, self.width), "columns": (self.width, self.rows)}
        return shapes.get(self.layout, (1, self.rows * self.width))

    @property
    def extent(self) -> tuple[int, int]:
        """All positions lie in start <= position < stop."""
        begin = self.start + self.first
        return begin, begin + (self.rows - 1) * self.stride + self.width

    def positions(self, xp: Any) -> Any:
        """Integer positions (n, a)."""
        table = xp.arange(self.rows)[:, None] * self.stride + xp.arange(self.width)[None, :] + (self.start + self.first)
        if self.layout == "columns":
            return xp.matrix_transpose(table)
        return table if self.layout == "rows" else xp.reshape(table, (1, -1))

    def take(self, x: Any) -> Any:
        xp = namespace(x)
        lead, d = x.shape[:-2], x.shape[-1]
        if self.rows == 1:
            begin = self.start + self.first
            table = x[..., begin : begin + self.width, :][..., None, :, :]
        else:
            table = x[..., self.start : self.start + self.rows * self.stride, :]
            table = xp.reshape(table, (*lead, self.rows, self.stride, d))[..., self.first : self.first + self.width, :]
        if self.layout == "columns":
            return self._turned(table)
        return table if self.layout == "rows" else xp.reshape(table, (*lead, 1, self.rows * self.width, d))

    def take_last(self, x: Any) -> Any:
        return self.take(namespace(x).expand_dims(x, axis=-1))[..., 0]

    @staticmethod
    def _turned(table: Any) -> Any:
        axes = list(range(table.ndim))
        axes[-3], axes[-2] = axes[-2], axes[-3]
        return namespace(table).permute_dims(table, tuple(axes))

    def _pieces(self, values: Any) -> Any:
        """Slices of positions and the values that belong there: as few as there are."""
        xp = namespace(values)
        lead, d = values.shape[:-3], values.shape[-1]
        table = self._turned(values) if self.layout == "columns" else values
        table = xp.reshape(table, (*lead, self.rows, self.width, d))
        begin, end = self.extent
        if self.width == self.stride or self.rows == 1:
            yield slice(begin, end), xp.reshape(table, (*lead, self.rows * self.width, d))
        elif self.width <= self.rows:
            for n in range(self.width):
                yield slice(begin + n, end - self.width + n + 1, self.stride), table[..., n, :]
        else:
            for n in range(self.rows):
                row = begin + n * self.stride
                yield slice(row, row + self.width), table[..., n, :, :]

    def assign(self, backend: Any, x: Any, values: Any) -> Any:
        for where, part in self._pieces(values):
            x = backend.assign(x, (..., where, slice(None)), part)
        return x

    def assign_last(self, backend: Any, x: Any, values: Any) -> Any:
        for where, part in self._pieces(namespace(values).expand_dims(values, axis=-1)):
            x = backend.assign(x, (..., where), part[..., 0])
        return x

    def accumulate(self, backend: Any, x: Any, values: Any) -> Any:
        for where, part in self._pieces(values):
            x = backend.accumulate(x, (..., where, slice(None)), part)
        return x


class Index:
    """n lists of a positions each.

    Parameters
    ----------
    index : int array (n, a), or (b|1, g|1, r|1, n, a) where lists differ
        Positions; slots without a token may hold any position, they must be invisible in the block.
    inverse : int array (length,) or (b|1, g|1, r|1, length), optional
        For queries, each of which stands in at most one slot: the flat slot n * a + ... of every position, -1 for none.
    """

    batched = True
    once = False

    def __init__(self, index: Any, inverse: Any = None) -> None:
        self.index, self.inverse = index, inverse

    def __repr__(self) -> str:
        return f"Index{tuple(self.index.shape)}"

    @property
    def pairs_axes(self) -> tuple[int, ...]:
        return tuple(self.index.shape[-2:])

    def positions(self, xp: Any) -> Any:
        """Integer positions (..., n, a)."""
        return to_namespace(self.index, xp)

    def take(self, x: Any) -> Any:
        return _take_rows(x, self.index)

    def take_last(self, x: Any) -> Any:
        xp = namespace(x)
        return _take_rows(xp.expand_dims(x, axis=-1), self.index)[..., 0]

    def _placed(self, x: Any, values: Any) -> tuple[Any, Any]:
        """Values laid out by position, and where a position has one."""
        xp = namespace(x)
        if self.inverse is None:
            raise ValueError("these positions are a key selection: they have no inverse to assign by")
        inverse = to_namespace(self.inverse, xp, like=x)
        flat = xp.reshape(values, (*values.shape[:-3], values.shape[-3] * values.shape[-2], values.shape[-1]))
        slot = xp.where(inverse < 0, xp.zeros_like(inverse), inverse)
        rows = _take_rows(flat, xp.expand_dims(slot, axis=-2))[..., 0, :, :]
        return rows, xp.expand_dims(inverse >= 0, axis=-1)

    def assign(self, backend: Any, x: Any, values: Any) -> Any:
        rows, present = self._placed(x, values)
        return namespace(x).where(present, rows, x)

    def assign_last(self, backend: Any, x: Any, values: Any) -> Any:
        xp = namespace(x)
        return self.assign(backend, xp.expand_dims(x, axis=-1), xp.expand_dims(values, axis=-1))[..., 0]

    def accumulate(self, backend: Any, x: Any, values: Any) -> Any:
        xp = namespace(x)
        if self.inverse is not None:
            rows, present = self._placed(x, values)
            return x + xp.where(present, rows, xp.zeros_like(rows))
        n, a, d = values.shape[-3:]
        index = to_namespace(self.index, xp, like=x)
        index = xp.reshape(index, (*index.shape[:-2], n * a))
        if values.ndim == 6 and values.shape[2] != x.shape[2]:  # lists of several query heads, added into one key head
            index = xp.broadcast_to(index, (*index.shape[:2], values.shape[2], n * a))
            index = xp.reshape(index, (*index.shape[:2], 1, -1))
            values = xp.reshape(values, (*values.shape[:2], 1, values.shape[2] * n, a, d))
            n = values.shape[3]
        return x + backend.segment_add(xp.reshape(values, (*values.shape[:-3], n * a, d)), index, x.shape[-2])


class Windows:
    """Windows start ... stop - 1 of ``reach`` chunks each: window c is rows c * size ... (c + reach) * size - 1.

    Parameters
    ----------
    start, stop, size, reach : int
        reach = 1 gives the chunks themselves, as queries need them.
    order : int array (b|1, g|1, r|1, length)
        The position that each row of the arrays stands for; rows that stand for none must be invisible in the block.
    """

    batched = True
    once = True  # as queries: no row stands in another block of its order

    def __init__(self, start: int, stop: int, size: int, reach: int = 1, order: Any = None) -> None:
        self.start, self.stop, self.size, self.reach, self.order = start, stop, size, reach, order

    def __repr__(self) -> str:
        return f"Windows({self.start}, {self.stop}, size={self.size}, reach={self.reach})"

    @property
    def pairs_axes(self) -> tuple[int, ...]:
        return self.stop - self.start, self.reach * self.size

    def positions(self, xp: Any) -> Any:
        """Integer positions (..., n, a)."""
        return self.take_last(to_namespace(self.order, xp))

    def _rows(self, ahead: int) -> slice:
        return slice((self.start + ahead) * self.size, (self.stop + ahead) * self.size)

    def take(self, x: Any) -> Any:
        xp = namespace(x)
        if xp is np and self.reach > 1 and self.stop > self.start:  # a view: products need no copy of what overlaps
            rows = x[..., self.start * self.size : (self.stop - 1 + self.reach) * self.size, :]
            windows = np.lib.stride_tricks.sliding_window_view(rows, self.reach * self.size, axis=-2)
            return np.swapaxes(windows[..., :: self.size, :, :], -1, -2)
        shape = (*x.shape[:-2], self.stop - self.start, self.size, x.shape[-1])
        parts = [xp.reshape(x[..., self._rows(ahead), :], shape) for ahead in range(self.reach)]
        return parts[0] if self.reach == 1 else xp.concat(parts, axis=-2)

    def take_last(self, x: Any) -> Any:
        xp = namespace(x)
        shape = (*x.shape[:-1], self.stop - self.start, self.size)
        parts = [xp.reshape(x[..., self._rows(ahead)], shape) for ahead in range(self.reach)]
        return parts[0] if self.reach == 1 else xp.concat(parts, axis=-1)

    def assign(self, backend: Any, x: Any, values: Any) -> Any:
        n, a, d = values.shape[-3:]
        rows = namespace(x).reshape(values, (*values.shape[:-3], n * a, d))
        return backend.assign(x, (..., self._rows(0), slice(None)), rows)

    def assign_last(self, backend: Any, x: Any, values: Any) -> Any:
        rows = namespace(x).reshape(values, (*values.shape[:-2], values.shape[-2] * values.shape[-1]))
        return backend.assign(x, (..., self._rows(0)), rows)

    def accumulate(self, backend: Any, x: Any, values: Any) -> Any:
        n, d = values.shape[-3], values.shape[-1]
        for ahead in range(self.reach):
            part = values[..., ahead * self.size : (ahead + 1) * self.size, :]
            part = namespace(x).reshape(part, (*values.shape[:-3], n * self.size, d))
            x = backend.accumulate(x, (..., self._rows(ahead), slice(None)), part)
        return x


def take_order(x: Any, order: Any) -> Any:
    """x (*lead, length, d) at order (*lead|1, a) -> (*lead, a, d)."""
    return _take_rows(x, namespace(order).expand_dims(order, axis=-2))[..., 0, :, :]


def _take_rows(x: Any, index: Any) -> Any:
    """x (*lead, length, d) at index (n, a) or (*lead|1, n, a) -> (*lead, n, a, d), by a flat one-dimensional take."""
    xp = namespace(x)
    index = to_namespace(index, xp, like=x)
    n, a = index.shape[-2:]
    *lead, length, d = x.shape
    if index.ndim == 2:
        return xp.reshape(xp.take(x, xp.reshape(index, (-1,)), axis=-2), (*lead, n, a, d))
    full = tuple(max(s, t) if min(s, t) else 0 for s, t in zip(lead, index.shape[:-2], strict=True))
    if tuple(lead) != full:
        x = xp.broadcast_to(x, (*full, length, d))
    rows = math.prod(full)
    flat = xp.reshape(xp.broadcast_to(index, (*full, n, a)), (rows, n * a))
    if rows > 1:
        flat = flat + xp.expand_dims(xp.arange(rows, dtype=flat.dtype), axis=1) * length
    return xp.reshape(xp.take(xp.reshape(x, (rows * length, d)), xp.reshape(flat, (-1,)), axis=0), (*full, n, a, d))


def take_pairs(x: Any, queries: Any, keys: Any) -> Any:
    """Entries of x (b|1, g|1, r|1, q|1, k|1) at the pairs of a block, broadcasting to the block's logits."""
    xp = namespace(x)
    n_q, n_k = x.shape[-2:]
    if not queries.batched and not keys.batched:
        rows = slice(None) if n_q == 1 else slice(queries.start, queries.stop)
        columns = slice(None) if n_k == 1 else slice(keys.start, keys.stop)
        return x[..., rows, columns]
    i = xp.expand_dims(queries.positions(xp), axis=-1) if n_q > 1 else xp.zeros((1, 1, 1), dtype=xp.int64)
    j = xp.expand_dims(keys.positions(xp), axis=-2) if n_k > 1 else xp.zeros((1, 1, 1), dtype=xp.int64)
    flat = i * n_k + j  # (..., n, a, c)
    flat = flat if flat.ndim > 2 else xp.expand_dims(flat, axis=0)
    *lead, n, a, c = flat.shape
    entries = xp.reshape(x, (*x.shape[:-2], n_q * n_k, 1))
    taken = _take_rows(entries, xp.reshape(flat, (*lead, n, a * c)))[..., 0]
    return xp.reshape(taken, (*taken.shape[:-1], a, c))
