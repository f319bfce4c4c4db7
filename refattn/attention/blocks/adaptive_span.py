"""Adaptive spans: arguments checked, and tiles of queries with the band of keys before them."""

import math
from typing import Any, NamedTuple

from refattn.arrays import (
    broadcast_leading,
    device,
    flatten_leading,
    is_array,
    real,
    require_array,
    require_axes,
    require_finite,
    require_integer,
    require_number,
    require_one_of,
)
from refattn.contraction import einsum
from refattn.core import options
from refattn.core.blocks import product
from refattn.normalization import row_maximum

__all__ = ["ROWS", "Problem", "rows_of_tile", "tiles"]

ROWS = 64
"""Most queries of a tile: a tile of a queries touches a + span keys."""
FEWEST = 16
"""Queries of a tile whose spans are shorter: a tile for each query would cost more than the keys that it saves."""
DROPPED = 64
"""Slots that the released code drops at a time."""


class Problem:
    """Arguments as flat batches (b, h, ...), and what depends on the spans alone."""

    def __init__(self, q: Any, k: Any, v: Any, backend: Any, given: dict[str, Any]) -> None:
        xp = self.xp = backend.xp
        self.backend, self.given = backend, given
        require_axes(q=(q, "... h q d"), k=(k, "... h k d"), v=(v, "... h k e"))
        self.lead = broadcast_leading(q=(q, 3), k=(k, 3), v=(v, 3))
        self.h, self.n_q, self.d = q.shape[-3:]
        self.n_k, self.e = v.shape[-2:]
        self.b = math.prod(self.lead)
        if self.n_q > self.n_k:
            raise ValueError(f"q has {self.n_q} positions and k has {self.n_k}: the queries are the newest of the keys")
        self.q, self.k, self.v = (flatten_leading(x, 3, self.lead) for x in (q, k, v))
        self.q = xp.broadcast_to(self.q, (self.b, *self.q.shape[1:]))
        self.max_span = self._max_span(given["max_span"], given["key_positions"])
        self.ramp = require_number("ramp", given["ramp"], above=0)
        require_one_of("distance_origin", given["distance_origin"], (0, 1))
        self.eps = require_number("renormalize_eps", given["renormalize_eps"], minimum=0)
        scale = given["scale"]
        if scale is None:
            self.scale = self.d**-0.5 if self.d else 1.0
        else:
            require_finite("scale", scale)
            self.scale = xp.reshape(scale, ()) if is_array(scale) else scale
        self.span = self._span(given["span"])
        self.positions = self._positions(given["key_positions"])
        self.table = "hdn" if self.positions is not None and self.positions.ndim == 3 else "dn"  # its axes
        self.slots = self._slots(given["persistent_keys"], given["persistent_values"])
        self.mask = self._mask(given["mask"])
        self.reach = self._reach()

    def _max_span(self, value: Any, key_positions: Any) -> int:
        if value is None:
            value = self.n_k - self.n_q if key_positions is None else key_positions.shape[-1]
            if not value:
                raise ValueError(
                    "max_span is missing: there are as many queries as keys, so nothing else says how far back"
                )
        return require_integer("max_span", value, minimum=1)

    def _span(self, span: Any) -> Any:
        """(b|1, h, q|1)."""
        xp = self.xp
        require_array("span", span, axes=1)
        shape = tuple(span.shape)
        if shape == (self.h,):
            flat = xp.reshape(span, (1, self.h, 1))
        elif len(shape) >= 2 and shape[-2:] == (self.h, self.n_q):
            broadcast_leading(span=(span, 2), q=(self.given["q"], 3))
            flat = flatten_leading(span, 2, self.lead)
        else:
            raise ValueError(f"span has shape {shape}: expected ({self.h},) or (..., {self.h}, {self.n_q})")
        if span.size and not bool(xp.all((real(flat) >= 0) & (real(flat) <= self.max_span))):
            low, high = float(xp.min(real(flat))), float(xp.max(real(flat)))
            raise ValueError(
                f"span reaches from {low:g} to {high:g}: expected within [0, max_span] = [0, {self.max_span}] tokens"
            )
        return flat

    def _positions(self, key_positions: Any) -> Any:
        """(d, n) or (h, d, n)."""
        if key_positions is None:
            return None
        require_array("key_positions", key_positions, axes=2)
        shape = tuple(key_positions.shape)
        if shape not in ((self.d, self.max_span), (self.h, self.d, self.max_span)):
            wanted = f"({self.d}, {self.max_span}) or ({self.h}, {self.d}, {self.max_span})"
            raise ValueError(
                f"key_positions has shape {shape}: expected (d, n) or (h, d, n) with n = max_span: {wanted}"
            )
        return key_positions

    def _slots(self, keys: Any, values: Any) -> Any:
        if (keys is None) != (values is None):
            raise TypeError("persistent_keys and persistent_values go together: only one of them was given")
        if keys is None:
            return None
        sizes = {"h": self.h, "d": self.d, "e": self.e}
        require_axes(sizes, persistent_keys=(keys, "h n d"), persistent_values=(values, "h n e"))
        return (keys, values) if keys.shape[1] else None

    def _mask(self, mask: Any) -> Any:
        if mask is None:
            return None
        options.require_mask(mask, (*self.lead, self.h, self.n_q, self.n_k))
        full = self.xp.reshape(mask, (1,) * (3 - mask.ndim) + tuple(mask.shape)) if mask.ndim < 3 else mask
        return flatten_leading(full, 3, self.lead)

    def _reach(self) -> int:
        """Distances that can have weight: up to the largest span and its ramp.

        With ``renormalize_eps`` the sum of the softmax counts too, so it must run over the released code's slots: that code
        drops the oldest ones in multiples of 64.
        """
        if not self.span.size:
            return 0
        largest = math.ceil(float(self.xp.max(real(self.span)))) + math.ceil(self.ramp)
        if self.eps:
            return self.max_span - min(self.max_span - 1, max(0, self.max_span - largest)) // DROPPED * DROPPED
        return min(self.max_span, largest + 1 - self.given["distance_origin"])


class Tile:
    """Queries i0 ... i1 - 1 of one batch entry and all heads of its group, and the band of keys before them."""

    def __init__(self, p: Problem, b: int, i0: int, i1: int) -> None:
        xp = p.xp
        self.p, self.b, self.i0, self.i1 = p, b, i0, i1
        self.a, self.w = i1 - i0, p.reach
        first = p.n_k - p.n_q + i0 - p.reach  # key of column 0; columns of keys before the first are cut off
        self.cut = max(0, -first)
        self.keys = slice(first + self.cut, first + self.a + p.reach - 1)
        entry = lambda x: x[min(b, x.shape[0] - 1), ...]  # noqa: E731
        self.q = entry(p.q)[:, i0:i1, :]
        self.k, self.v = entry(p.k)[:, self.keys, :], entry(p.v)[:, self.keys, :]
        like = {"device": device(p.q)}
        rows, columns = xp.arange(self.a, **like)[:, None], xp.arange(self.cut, self.a + self.w - 1, **like)[None, :]
        distance = rows + self.w - columns  # of query row to key column
        self.visible = (distance >= 1) & (distance <= self.w)
        if p.mask is not None:
            m = entry(p.mask)
            rows_of = m[:, i0:i1, :] if m.shape[-2] != 1 else m
            self.visible = self.visible & (rows_of[..., self.keys] if m.shape[-1] != 1 else rows_of)
        span = entry(p.span)
        self.span = span[:, i0:i1, None] if span.shape[-1] != 1 else span[..., None]
        x = xp.astype(distance - 1 + p.given["distance_origin"], real(p.q).dtype)
        self.level = (p.ramp + self.span - x) / p.ramp  # the ramp before it is clipped
        inside = (real(self.level) >= 0) & (real(self.level) <= 1)
        self.slope = self.visible & inside  # where the ramp's end or middle lets a gradient through
        # A key beyond the ramp is not seen, unless it counts in the sum of the softmax.
        self.seen = self.visible & (real(self.level) >= (-math.inf if p.eps else 0))
        weight = xp.where(real(self.level) > 1, xp.ones_like(self.level), self.level)
        weight = xp.where(real(self.level) > 0, weight, xp.zeros_like(weight))
        self.weight = xp.where(self.visible, weight, xp.zeros_like(weight))

    def skew(self, x: Any) -> Any:
        """(h, a, w) by distance, furthest first -> (h, a, columns) by key: row a moves a places to the right."""
        xp, (h, a, w) = self.p.xp, x.shape
        padded = xp.concat([x, xp.zeros((h, a, a), dtype=x.dtype, device=device(x))], axis=-1)
        shifted = xp.reshape(padded, (h, -1))[:, : a * (w + a - 1)]
        return xp.reshape(shifted, (h, a, w + a - 1))[..., self.cut :]

    def unskew(self, x: Any) -> Any:
        """Adjoint of ``skew``."""
        xp, (h, a) = self.p.xp, x.shape[:2]
        zeros = {"dtype": x.dtype, "device": device(x)}
        x = xp.concat([xp.zeros((h, a, self.cut), **zeros), x], axis=-1)
        flat = xp.concat([xp.reshape(x, (h, -1)), xp.zeros((h, a), **zeros)], axis=-1)
        return xp.reshape(flat, (h, a, self.w + a))[..., : self.w]

    def far_first(self, key_positions: Any) -> Any:
        """Columns 1 ... w of the position table, furthest first."""
        return self.p.xp.flip(key_positions[..., : self.w], axis=-1)

    def logits(self) -> tuple[Any, Any]:
        """Logits of the band (h, a, columns) and of the persistent slots (h, a, n) or None."""
        p, xp = self.p, self.p.xp
        scaled = self.q * p.scale
        s = einsum("hqd,hkd->hqk", scaled, self.k)
        s = xp.where(self.visible, s, xp.zeros_like(s))
        if p.positions is not None:
            s = s + self.skew(einsum(f"hqd,{p.table}->hqn", scaled, self.far_first(p.positions)))
        return s, None if p.slots is None else einsum("hqd,hnd->hqn", scaled, p.slots[0])

    def exponentials(self, s: Any, slots: Any, leading: Any) -> tuple[Any, Any, Any]:
        """exp(logits - shift) of band (0 where a pair is not seen) and slots; shift, the largest of ``leading`` and slots."""
        xp = self.p.xp
        peak, _ = row_maximum(xp.where(leading, s, xp.full_like(s, -math.inf)))
        if slots is not None:
            peak = xp.maximum(peak, row_maximum(slots)[0])
        shift = xp.where(peak == -math.inf, xp.zeros_like(peak), peak)[..., None]
        band = xp.where(self.seen, xp.exp(xp.where(self.seen, s, xp.zeros_like(s)) - shift), xp.zeros_like(s))
        return band, None if slots is None else xp.exp(slots - shift), shift[..., 0]

    def summed(self, band: Any, slots: Any, weight: Any) -> Any:
        """Sum of weight exp over band and slots (h, a); weights of 0 count nothing, be the exponential what it is."""
        xp = self.p.xp
        total = xp.sum(xp.where(real(weight) > 0, weight * band, xp.zeros_like(band)), axis=-1)
        return total if slots is None else total + xp.sum(slots, axis=-1)

    def shares(self) -> "Shares":
        xp, eps = self.p.xp, self.p.eps
        s, slots = self.logits()
        weighty = real(self.weight) > 0
        band, extra, shift = self.exponentials(s, slots, weighty)
        total = self.summed(band, extra, self.weight)
        empty = real(total) == 0
        one = xp.ones_like(total)
        lse = xp.where(empty, xp.full_like(total, -math.inf), xp.log(xp.where(empty, one, total)) + shift)
        over_sum = xp.where(empty, xp.zeros_like(total), 1 / xp.where(empty, one, total))[..., None]
        alone, slots_alone = band * over_sum, None if extra is None else extra * over_sum
        raw, slot_weights = alone, slots_alone
        if eps:  # sum(ramp exp) + eps sum(exp), whose largest exponent may belong to a key of weight 0
            band, extra, _ = self.exponentials(s, slots, self.seen)
            whole = self.summed(band, extra, xp.where(self.seen, xp.ones_like(band), xp.zeros_like(band)))
            divisor = self.summed(band, extra, self.weight) + eps * whole
            empty = real(divisor) == 0
            over = xp.where(empty, xp.zeros_like(divisor), 1 / xp.where(empty, one, divisor))[..., None]
            raw, slot_weights = band * over, None if extra is None else extra * over
        weights = xp.where(weighty, self.weight * raw, xp.zeros_like(raw))
        return Shares(weights, slot_weights, raw, alone, slots_alone, empty[..., None], lse)

    def attend(self, shares: "Shares") -> Any:
        """Weighted values (h, a, e)."""
        out = product(self.p.backend, shares.weights, self.v, real(self.weight) > 0)
        return out if shares.slots is None else out + einsum("hqn,hne->hqe", shares.slots, self.p.slots[1])

    def kept(self, shares: "Shares") -> tuple[Any, Any]:
        """Weights and logits laid out over all keys, persistent slots last."""
        p, xp = self.p, self.p.xp
        s, slots = self.logits()
        s = xp.where(self.seen, s, xp.full_like(s, -math.inf))
        found = []
        for band, extra, hidden in ((shares.weights, shares.slots, 0.0), (s, slots, -math.inf)):
            wide = xp.full((p.h, self.a, p.n_k), hidden, dtype=band.dtype, device=device(band))
            wide = p.backend.assign(wide, (slice(None), slice(None), self.keys), band)
            found.append(wide if extra is None else xp.concat([wide, extra], axis=-1))
        return found[0], found[1]


class Shares(NamedTuple):
    """What a tile's softmax gives, over the band (h, a, columns) and the slots (h, a, n)."""

    weights: Any  # ramp exp / divisor
    slots: Any  # exp / divisor of the slots, their weights
    raw: Any  # exp / divisor, without the ramp
    alone: Any  # exp / sum(ramp exp): without the ramp and without eps
    slots_alone: Any
    empty: Any  # (h, a, 1): rows that see nothing
    lse: Any


def rows_of_tile(reach: int) -> int:
    """Queries of a tile where each reaches so many keys."""
    return max(FEWEST, min(ROWS, reach))


def tiles(p: Problem, b: int) -> list[Tile]:
    rows = rows_of_tile(p.reach)
    return [Tile(p, b, i, min(i + rows, p.n_q)) for i in range(0, p.n_q, rows)]
