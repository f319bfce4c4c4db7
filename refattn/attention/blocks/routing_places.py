"""Routing attention: tokens laid out by cluster, so that every cluster is a head of softmax attention, and back."""

import math
from typing import Any

from refattn import patterns
from refattn.arrays import device, namespace, real
from refattn.contraction import einsum
from refattn.core.selections import take_order
from refattn.core.terms import Relative, places_to_rows, rows_to_places

__all__ = ["Members", "Ranks", "kept_pairs", "seen"]


class Members:
    """The tokens of every cluster of n heads, the queries or the keys of it.

    Parameters
    ----------
    listed : int array (n, c, w)
        Positions, -1 for none.
    keep : bool array (n, t) or None
        Tokens that are not masked.
    like : array (n, t, channels)
        Whose rows they are: gives length, dtype and device.
    """

    def __init__(self, listed: Any, keep: Any, like: Any, backend: Any) -> None:
        xp = backend.xp
        self.shape, self.t, self.backend = listed.shape, like.shape[-2], backend
        n, c, w = listed.shape
        empty = listed < 0
        self.positions = xp.where(empty, xp.zeros_like(listed), listed)
        self.order = xp.reshape(self.positions, (n, c * w))
        hidden = empty
        if keep is not None and self.t:
            alive = take_order(keep[..., None], self.order)
            hidden = xp.logical_or(empty, xp.logical_not(xp.reshape(alive, empty.shape)))
        self.empty, self.hidden = (x if bool(xp.any(x)) else None for x in (empty, hidden))
        heads = xp.arange(n, device=device(listed))[:, None]
        self._add = backend.summing(xp.reshape(self.order + heads * self.t, (-1,)), n * self.t, like.dtype)

    def take(self, x: Any, without: Any) -> Any:
        """(n, t, d) -> (n, c, w, d), with zeros where ``without`` (n, c, w) says so."""
        xp = self.backend.xp
        shape = (*self.shape, x.shape[-1])
        if not self.t:
            return xp.zeros(shape, dtype=x.dtype, device=device(x))
        rows = xp.reshape(take_order(x, self.order), shape)
        return rows if without is None else xp.where(without[..., None], xp.zeros_like(rows), rows)

    def add(self, rows: Any) -> Any:
        """(n, c, w, d) -> (n, t, d): the rows of every token, added up; those of empty places are 0."""
        xp, n, d = self.backend.xp, self.shape[0], rows.shape[-1]
        return xp.reshape(self._add(xp.reshape(rows, (math.prod(self.shape), d))), (n, self.t, d))

    def counts(self, like: Any) -> Any:
        """In how many clusters each token is, masked ones in none, (n, t, 1)."""
        xp = self.backend.xp
        ones = xp.ones((*self.shape, 1), dtype=like.dtype, device=device(like))
        return real(
            self.add(ones if self.hidden is None else xp.where(self.hidden[..., None], xp.zeros_like(ones), ones))
        )


def seen(
    queries: Members,
    keys: Members,
    numbers: tuple[Any, Any],
    *,
    visibility: Any,
    ranked: bool,
    causal: str | None,
    self_attention: str,
    memory: bool,
) -> patterns.Pattern | None:
    """Who sees whom, as a pattern of places: the batch is the heads, the heads are their clusters; None where all are seen.

    ``numbers``: the batch entry and the head (n,) that each of them is for the caller.
    ``ranked``: the queries of a cluster are its keys, in order of position and none of them masked, so that places compare as
    positions do.  ``visibility`` is the caller's pattern of positions, fitted; ``causal`` says by what: position or rank.
    """
    xp = queries.backend.xp
    shown = (queries.hidden, keys.hidden, visibility, causal)
    if self_attention == "always" and all(x is None for x in shown):
        return None

    def at(x: Any, b: Any, h: Any, i: Any) -> Any:
        """x (n, c, w) at the index arrays, which broadcast."""
        flat = (b * x.shape[1] + h) * x.shape[2] + i
        return xp.reshape(xp.take(xp.reshape(x, (-1,)), xp.reshape(flat, (-1,))), flat.shape)

    def positions(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, Any]:
        return at(queries.positions, b, h, i), at(keys.positions, b, h, j)

    def others(b: Any, h: Any, i: Any, j: Any) -> Any:
        """What members, masks, causal and pattern show, oneself left out unless one is a key like any other."""
        parts = []
        where = (i, j) if ranked else positions(b, h, i, j)
        if causal is not None:
            parts.append(i >= j if causal == "rank" else where[0] >= where[1])
        if self_attention != "always":
            parts.append(where[0] != where[1])
        if queries.hidden is not None:
            parts.append(xp.logical_not(at(queries.hidden, b, h, i)))
        if keys.hidden is not None:
            parts.append(xp.logical_not(at(keys.hidden, b, h, j)))
        if visibility is not None:
            own = positions(b, h, i, j)
            entry, head = (xp.reshape(xp.take(x, xp.reshape(b, (-1,))), b.shape) for x in numbers)
            parts.append(visibility.visible(*own, q=queries.t, k=keys.t, b=entry, h=head))
        result = parts[0]
        for part in parts[1:]:
            result = xp.logical_and(result, part)
        return result

    def with_last_resort(b: Any, h: Any, i: Any, j: Any) -> Any:
        """A row that sees no other key of its cluster sees itself, whatever hides it otherwise."""
        first, second = (i, j) if ranked else positions(b, h, i, j)
        itself = first == second
        for x, place in ((queries.hidden, i), (keys.empty, j)):
            if x is not None:
                itself = xp.logical_and(itself, xp.logical_not(at(x, b, h, place)))
        everything = xp.reshape(xp.arange(keys.shape[2], device=device(j)), (1, keys.shape[2]))
        alone = xp.logical_not(xp.any(others(b, h, i, everything), axis=-1, keepdims=True))
        return xp.logical_or(others(b, h, i, j), xp.logical_and(itself, alone))

    return patterns.mask_mod(with_last_resort if self_attention == "last_resort" and not memory else others)


def kept_pairs(mask: Any, queries: Members, keys: Members, numbers: tuple[Any, Any]) -> Any:
    """A dropout mask (b|1, h|1, q|1, k|1) of positions as one of places, (n, c, w, w)."""
    xp = namespace(mask)
    entry, head = (xp.reshape(x, (-1, 1, 1, 1)) for x in numbers)
    flat: Any = 0
    places = entry, head, queries.positions[..., :, None], keys.positions[..., None, :]
    for x, size in zip(places, mask.shape, strict=True):
        flat = flat * size + (x if size > 1 else xp.zeros_like(x))
    flat = xp.broadcast_to(flat, (*queries.shape, keys.shape[2]))
    return xp.reshape(xp.take(xp.reshape(mask, (-1,)), xp.reshape(flat, (-1,))), flat.shape)


class Ranks:
    """A relative table (2n + 1, channels) by place: row n + r belongs to the keys r places after the query, r clipped to -n ... n."""

    def __init__(self, table: Any, w_q: int, w_k: int) -> None:
        xp = namespace(table)
        n = table.shape[0] // 2
        gap = xp.arange(1 - w_q, max(w_k, 1), device=device(table))  # of places, as rows of the core's table
        self.rows = xp.clip(gap, -n, n) + n
        self.size, self.origin = table.shape[0], w_q - 1
        self.table = xp.take(table, self.rows, axis=0)

    def term(self, q: Any) -> Relative:
        """logits + scale q . row, for q (n, c, w, d)."""
        xp = namespace(q)
        table = xp.broadcast_to(self.table[None, None, ...], (1, q.shape[1], *self.table.shape))
        return Relative(q[:, :, None, ...], table, None, self.origin)

    def of_pairs(self, x: Any) -> Any:
        """x (n, c, w, e) . row, of every pair (n, c, w, w)."""
        return rows_to_places(einsum("ncqe,pe->ncqp", x, self.table))

    def values(self, weights: Any) -> Any:
        """Weights (n, c, w, w) times rows, (n, c, w, e)."""
        return einsum("ncqp,pe->ncqe", places_to_rows(weights), self.table)

    def back_from_values(self, weights: Any, d_values: Any, backend: Any) -> Any:
        """Cotangent of the caller's table from that of the values."""
        return self.back(einsum("ncqp,ncqe->pe", places_to_rows(weights), d_values), backend)

    def back(self, d_rows: Any, backend: Any) -> Any:
        """Cotangent of the caller's table from that of the core's rows."""
        return backend.segment_add(d_rows, self.rows, self.size)
