r"""Decays inside a chunk of tokens: the three operations of every recurrence, and their gradients.

A chunk of c tokens enters with the state S (d,e).  G_i is the sum of the log decays of its rows 0 ... i, and everything that a
recurrence does there is one of three operations (:class:`Decays`), of rows x and y of d channels:

    pair    A[i,j]    = sum_d x[i,d] y[j,d] exp(G_i - G_j)         j <= i, or j < i
    read    O[i,e]    = sum_d x[i,d] exp(G_i) S[d,e]
    write   S'[d,e]   = exp(G_c) S[d,e] + sum_j k[j,d] exp(G_c - G_j) v[j,e]

A decay that acts *before* the row's own (``before=True``) has G_{i-1} in the place of G_i.  Every exponent is summed from its own
start, never as the difference of two long sums, and hidden pairs are hidden before the exponential: log decays of -inf and of
-745 a step are exact.  The gradient of a log decay is the sum over what straddles its token; the usual difference of two
cumulative sums loses every digit at strong decays.

Arrays in chunks have the axes (..., g, r, c, n): state head, query head of it (1 for what belongs to the state), row, channel.
"""

import math
from typing import Any

import numpy as np

from refattn.arrays import device, namespace
from refattn.contraction import einsum
from refattn.core.blocks import product

__all__ = ["Decays", "Pull", "fold", "solve_unit_lower"]

LARGE = 1 << 22
"""Elements at once of the exponentials (c, c, d) of decays that differ by channel."""


def fold(x: Any) -> Any:
    """Sum over the query heads of a state, axis -3."""
    return x if x.shape[-3] == 1 else namespace(x).sum(x, axis=-3, keepdims=True)


class Decays:
    """The decays of one chunk, and the three operations that they take part in.

    Parameters
    ----------
    backend
    gamma : array (..., c, n)
        Natural logs; n = 1 where all channels decay alike, else d.
    resets : ints (..., c), optional
        How many resets stand in rows up to this one, its own included: nothing passes a reset.
    """

    def __init__(self, backend: Any, gamma: Any, resets: Any = None) -> None:
        xp = self.xp = namespace(gamma)
        self.backend, self.gamma, self.resets = backend, gamma, resets
        none = xp.zeros_like(gamma[..., :1, :])
        until = xp.cumulative_sum(gamma, axis=-2)
        after = xp.flip(xp.cumulative_sum(xp.flip(gamma[..., 1:, :], axis=-2), axis=-2), axis=-2)
        self.until, self.before = xp.exp(until), xp.exp(xp.concat([none, until[..., :-1, :]], axis=-2))
        self.after = xp.exp(xp.concat([after, none], axis=-2))
        self.whole = xp.matrix_transpose(self.until[..., -1:, :])
        self._known: dict[Any, Any] = {}
        if resets is not None:
            self.entered = xp.expand_dims(resets == 0, axis=-1)  # rows that the state at the entry reaches
            self.leaves = xp.expand_dims(resets == resets[..., -1:], axis=-1)  # rows that reach the end
            self.through = self.entered[..., -1:, :]

    @property
    def by_channel(self) -> bool:
        return self.gamma.shape[-1] != 1

    def visible(self, strict: bool) -> Any:
        """(..., i, j): j <= i, or j < i, and no reset between."""
        if ("visible", strict) not in self._known:
            row = self.xp.arange(self.gamma.shape[-2], device=device(self.gamma))
            seen = row[:, None] > row[None, :] if strict else row[:, None] >= row[None, :]
            if self.resets is not None:
                seen = seen & (self.resets[..., :, None] == self.resets[..., None, :])
            self._known["visible", strict] = seen
        return self._known["visible", strict]

    def between(self, strict: bool, before: bool, channels: slice = slice(None)) -> Any:
        """exp(G_i - G_j) of visible pairs, 0 of the others; with ``before`` exp(G_{i-1} - G_j).

        (..., i, j), or (..., i, j, n) where channels decay each in its own way.
        """
        key = (strict, before, channels.start, channels.stop)
        if key not in self._known:
            xp = self.xp
            found = self._products(channels) if self.by_channel else self._sums()
            if before:
                axis = -3 if self.by_channel else -2
                above = found[..., :1, :, :] if self.by_channel else found[..., :1, :]
                rows = found[..., :-1, :, :] if self.by_channel else found[..., :-1, :]
                found = xp.concat([xp.zeros_like(above), rows], axis=axis)
            if self.resets is not None:
                seen = self.visible(strict)
                found = hidden(seen[..., None] if self.by_channel else seen, found)
            self._known[key] = found
        return self._known[key]

    def _sums(self) -> Any:
        """exp of the sums of log decays behind j up to i, 0 for j > i."""
        xp, gamma = self.xp, self.gamma[..., 0]
        row = xp.arange(gamma.shape[-1], device=device(gamma))
        own = gamma[..., :, None]
        sums = xp.cumulative_sum(hidden(row[:, None] > row[None, :], own), axis=-2)
        never = xp.asarray(-math.inf, dtype=gamma.dtype, device=device(gamma))
        return xp.exp(xp.where(row[:, None] >= row[None, :], sums, never))

    def _products(self, channels: slice) -> Any:
        """The same as products of factors of at most 1: an exponential for each row and channel in place of each pair."""
        xp, factors = self.xp, self.xp.exp(self.gamma[..., channels])
        one, none = xp.ones_like(factors[..., :1, :]), xp.zeros_like(factors)
        row, rows = one, [xp.concat([one, none[..., 1:, :]], axis=-2)]
        for i in range(1, factors.shape[-2]):
            row = xp.concat([row * factors[..., i : i + 1, :], one], axis=-2)
            rows.append(xp.concat([row, none[..., i + 1 :, :]], axis=-2))
        return xp.stack(rows, axis=-3)

    def slices(self, *arrays: Any) -> list[slice]:
        """Channels that are taken at once."""
        rows, heads = self.gamma.shape[-2], math.prod(np.broadcast_shapes(*(x.shape[:-2] for x in arrays)))
        width, n = max(1, LARGE // max(1, rows * rows * heads)), self.gamma.shape[-1]
        return [slice(a, min(a + width, n)) for a in range(0, n, width)] or [slice(0, 0)]

    # ------------------------------------------------------------------ the three operations

    def pair(self, x: Any, y: Any, *, strict: bool = False, before: bool = False) -> Any:
        """A (..., i, j); 0 where a pair is hidden."""
        strict = strict or before
        if self.by_channel:
            found = 0
            for at in self.slices(x, y):
                own = x[..., :, None, at] * self.between(strict, before, at)
                found = found + einsum("...ijd,...jd->...ij", own, y[..., at])
        else:
            found = einsum("...id,...jd->...ij", x, y) * self.between(strict, before)
        return hidden(self.visible(strict), found)

    def read(self, x: Any, state: Any, *, before: bool = False) -> Any:
        """What rows x read of the state at the entry."""
        found = einsum("...id,...de->...ie", x * (self.before if before else self.until), state)
        return found if self.resets is None else hidden(self.entered, found)

    def write(self, state: Any, k: Any, v: Any, *more: tuple[Any, Any]) -> Any:
        """The state at the end: what is left of that at the entry, and k v^T of every row (and of ``more`` pairs of k, v)."""
        kept = self.whole * state
        if self.resets is not None:
            kept = hidden(self.through, kept)
        for keys, values in ((k, v), *more):
            kept = kept + einsum("...jd,...je->...de", self.leaving(keys * self.after), self.leaving(values))
        return kept

    def leaving(self, rows: Any) -> Any:
        """Rows of which something reaches the end of the chunk, the others 0."""
        return rows if self.resets is None else hidden(self.leaves, rows)

    def seen(self, weights: Any, values: Any, *, strict: bool = False) -> Any:
        """weights (..., i, j) times values (..., j, e), in which a hidden pair contributes nothing, NaN neither."""
        return product(self.backend, weights, values, self.visible(strict))

    def seen_from(self, weights: Any, values: Any, *, strict: bool = False) -> Any:
        """weights^T times values (..., i, e), summed over the query heads of a state."""
        return fold(product(self.backend, weights, values, self.visible(strict), transposed=True))

    def hide(self, pairs: Any, *, strict: bool = False) -> Any:
        return hidden(self.visible(strict), pairs)


class Pull:
    """Cotangents through the operations of one chunk; what each sends to the log decays adds up to :meth:`gamma`."""

    def __init__(self, decays: Decays, wanted: bool = True) -> None:
        self.decays, self.wanted = decays, wanted
        self.rows: dict[str, Any] = {}
        self.pairs: Any = 0

    def pair(
        self, d_pairs: Any, x: Any, y: Any, pairs: Any, *, strict: bool = False, before: bool = False
    ) -> tuple[Any, Any]:
        """Cotangents of x and of y (of the state), from that of A = ``pairs``, 0 where a pair is hidden.

        dx[i] = sum_j dA[i,j] y[j] L[i,j] and dy[j] = sum_i dA[i,j] x[i] L[i,j]; a log decay gets dA A of what straddles it.
        """
        decays, xp, strict = self.decays, self.decays.xp, strict or before
        if not decays.by_channel:
            weights = d_pairs * decays.between(strict, before)
            if self.wanted:
                self.pairs = self.pairs + self._straddle(fold_pairs(d_pairs * pairs)[..., None], before)
            return decays.seen(weights, y, strict=strict), decays.seen_from(weights, x, strict=strict)
        seen = decays.visible(strict)[..., None]
        clean = bool(xp.all(xp.isfinite(x))) and bool(xp.all(xp.isfinite(y)))
        d_x, d_y, straddling = [], [], []
        for at in decays.slices(d_pairs, x, y):
            weights = d_pairs[..., None] * decays.between(strict, before, at)
            left, right = weights * y[..., None, :, at], weights * x[..., :, None, at]
            if not clean:  # 0 times NaN
                left, right = hidden(seen, left), hidden(seen, right)
            d_x.append(xp.sum(left, axis=-2))
            d_y.append(fold(xp.sum(right, axis=-3)))
            if self.wanted:
                terms = left * x[..., :, None, at]
                straddling.append(self._straddle(fold_pairs(terms if clean else hidden(seen, terms), 4), before))
        if self.wanted:
            self.pairs = self.pairs + xp.concat(straddling, axis=-1)
        return xp.concat(d_x, axis=-1), xp.concat(d_y, axis=-1)

    def read(self, d_read: Any, x: Any, state: Any, *, before: bool = False) -> tuple[Any, Any]:
        """Cotangents of x and of the state."""
        decays = self.decays
        if decays.resets is not None:
            d_read = hidden(decays.entered, d_read)
        factor = decays.before if before else decays.until
        d_x = factor * einsum("...ie,...de->...id", d_read, state)
        if decays.resets is not None:
            d_x, x = hidden(decays.entered, d_x), hidden(decays.entered, x)
        self._rows("before" if before else "until", d_x * x)
        return d_x, fold(einsum("...id,...ie->...de", factor * x, d_read))

    def write(self, d_state: Any, state: Any, k: Any, v: Any, *more: tuple[Any, Any]) -> tuple[Any, ...]:
        """Cotangents of the state at the entry, of k, of v, and of the further pairs."""
        decays = self.decays
        kept = decays.whole * d_state
        if decays.resets is not None:
            kept, state = hidden(decays.through, kept), hidden(decays.through, state)
        if self.wanted:
            self.rows["whole"] = self._summed(decays.xp.sum(kept * state, axis=-1)[..., None, :])
        found = [kept]
        for keys, values in ((k, v), *more):
            d_k = decays.leaving(decays.after * einsum("...je,...de->...jd", values, d_state))
            self._rows("after", d_k * decays.leaving(keys))
            found += [d_k, decays.leaving(einsum("...jd,...de->...je", decays.after * keys, d_state))]
        return tuple(found)

    def gamma(self) -> Any:
        """Cotangent of the log decays: of everything that straddles them."""
        xp, rows, total = self.decays.xp, self.rows, self.pairs
        if "until" in rows:
            total = total + _from_here(rows["until"], own=True)
        if "before" in rows:
            total = total + _from_here(rows["before"], own=False)
        if "after" in rows:
            sums = xp.cumulative_sum(rows["after"], axis=-2)
            total = total + xp.concat([xp.zeros_like(sums[..., :1, :]), sums[..., :-1, :]], axis=-2)
        return total + rows["whole"]

    def _rows(self, name: str, terms: Any) -> None:
        if self.wanted:
            terms = fold(self._summed(terms))
            self.rows[name] = self.rows[name] + terms if name in self.rows else terms

    def _summed(self, terms: Any) -> Any:
        """Over the channels, where they share a decay."""
        return terms if self.decays.by_channel else self.decays.xp.sum(terms, axis=-1, keepdims=True)

    def _straddle(self, terms: Any, before: bool) -> Any:
        """sum of the pairs with j < t <= i (``before``: t < i), from terms (..., i, j, n)."""
        xp, shift = self.decays.xp, int(before)
        if terms.shape[-1] != 1:
            c = terms.shape[-2]
            sums = [xp.sum(terms[..., t + shift :, :t, :], axis=(-3, -2)) for t in range(c)]
            return xp.stack(sums, axis=-2)
        terms = terms[..., 0]
        sums = xp.flip(xp.cumulative_sum(xp.flip(terms, axis=-2), axis=-2), axis=-2)
        if before:
            sums = xp.concat([sums[..., 1:, :], xp.zeros_like(sums[..., :1, :])], axis=-2)
        row = xp.arange(sums.shape[-2], device=device(sums))
        return xp.sum(hidden(row[:, None] > row[None, :], sums), axis=-1, keepdims=True)


def fold_pairs(x: Any, axis: int = 3) -> Any:
    """Sum over the query heads of a state where pairs follow."""
    return x if x.shape[-axis] == 1 else namespace(x).sum(x, axis=-axis, keepdims=True)


def hidden(seen: Any, x: Any) -> Any:
    """x where it is seen, 0 elsewhere."""
    xp = namespace(x)
    return xp.where(seen, x, xp.zeros((), dtype=x.dtype, device=device(x)))


def _from_here(rows: Any, own: bool) -> Any:
    """Sums of rows (..., c, n) from each on, with or without its own."""
    xp = namespace(rows)
    sums = xp.flip(xp.cumulative_sum(xp.flip(rows, axis=-2), axis=-2), axis=-2)
    return sums if own else xp.concat([sums[..., 1:, :], xp.zeros_like(sums[..., :1, :])], axis=-2)


def solve_unit_lower(lower: Any, right: Any, decays: Decays, *, transposed: bool = False, block: int = 16) -> Any:
    """x of (I + lower) x = right, or (I + lower)^T x = right, by substitution; ``lower`` (..., c, c) is strictly lower.

    Never through an inverse, least of all one by doubling: with 64 equal keys its intermediate numbers reach 1e18.
    """
    xp = namespace(lower, right)
    seen = None if decays.resets is None else decays.visible(strict=True)
    if transposed:  # in reversed order it is a lower one again
        turn = lambda x: xp.flip(xp.matrix_transpose(x), axis=(-2, -1))  # noqa: E731
        seen = None if seen is None else turn(seen)
        lower, right = turn(lower), xp.flip(right, axis=-2)
    solved: Any = None
    for start in range(0, lower.shape[-1], block):
        rows = slice(start, min(start + block, lower.shape[-1]))
        rest = right[..., rows, :]
        if solved is not None:
            hidden = None if seen is None else seen[..., rows, :start]
            rest = rest - product(decays.backend, lower[..., rows, :start], solved, hidden)
        own = rest[..., :1, :]
        for i in range(1, rest.shape[-2]):
            at = slice(start + i, start + i + 1)
            hidden = None if seen is None else seen[..., at, start : start + i]
            row = rest[..., i : i + 1, :] - product(decays.backend, lower[..., at, start : start + i], own, hidden)
            own = xp.concat([own, row], axis=-2)
        solved = own if solved is None else xp.concat([solved, own], axis=-2)
    return xp.flip(solved, axis=-2) if transposed else solved
