"""Which queries or keys a block holds: a run of positions, or lists of positions.

Arrays of one group have the axes (b, g, r, length, channel) or (b, g, r, length); a selection takes its positions from
them and puts values back.  A Span gives (..., a, channel), an Index one more axis: (..., n, a, channel) for n equal blocks.
"""

import math
from typing import Any

from refattn.arrays import namespace, to_namespace

__all__ = ["Index", "Span", "take_pairs"]


class Span:
    """Positions start ... stop - 1."""

    batched = False

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __repr__(self) -> str:
        return f"Span({self.start}, {self.stop})"

    @property
    def pairs_axes(self) -> tuple[int, ...]:
        """Shape of the positions."""
        return (self.stop - self.start,)

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
        return x + backend.segment_add(xp.reshape(values, (*values.shape[:-3], n * a, d)), index, x.shape[-2])


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
