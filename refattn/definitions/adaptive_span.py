"""Adaptive spans in steps: softmax attention over past keys whose exponentials are weighted by a ramp.

    products = q . (k + key_positions of the distance)      exponentials = ramp exp(scale products - maximum)

Persistent slots are further keys after the others, of ramp 1.

Axes: ``...`` any leading batch axes, ``h`` head, ``q`` position, ``k`` key or slot, ``n`` distance or slot, ``d`` and ``e`` channels.

Source: Sukhbaatar et al. 2019, arXiv:1905.07799, section 2; slots: Sukhbaatar et al. 2019, arXiv:1907.01470, section 3.
"""

import math

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct, divide
from refattn.definitions.steps import contract, einsum, step

__all__ = ["AdaptiveSpan", "definition"]

DROPPED = 64
"""Slots that the released code drops at a time."""


class AdaptiveSpan(ScaledDotProduct):
    """A query sees the keys before its own; the ramp's derivative is 1 at both of its ends."""

    gradients = ("q", "k", "v", "span", "key_positions", "persistent_keys", "persistent_values", "scale")
    defaults = {
        **ScaledDotProduct.defaults, "lse_includes_sinks": False, "key_positions": None, "ramp": 32, "max_span": None,
        "distance_origin": 1, "renormalize_eps": 0.0, "persistent_keys": None, "persistent_values": None,
    }  # fmt: skip

    # ------------------------------------------------------------------ keys and slots

    @property
    def past_keys(self):
        return self.k.shape[-2]

    @property
    def slots(self):
        return 0 if self.persistent_keys is None else self.persistent_keys.shape[-2]

    @property
    def keys(self):
        return self.past_keys + self.slots

    @step
    def keys_of_head(self):
        """[k, persistent keys]"""
        return with_slots(self.k, self.persistent_keys)

    @step
    def values_of_head(self):
        """[v, persistent values]"""
        return with_slots(self.v, self.persistent_values)

    # ------------------------------------------------------------------ who sees whom

    @step
    def nearest(self):
        """The distance of the nearest key that a query sees: 1, the token before it."""
        return 1

    @step
    def steps_back(self):
        """How far key j lies before query i, which stands at k - q + i, (q, k)."""
        return self.i + self.past_keys - self.queries - np.arange(self.past_keys)

    @step
    def longest_span(self):
        """max_span, or what says it otherwise."""
        if self.max_span is not None:
            return self.max_span
        return self.past_keys - self.queries if self.key_positions is None else self.key_positions.shape[-1]

    @step
    def reach(self):
        """The largest distance: with ``renormalize_eps`` the released code's, which drops the oldest slots by 64."""
        if not self.renormalize_eps:
            return self.longest_span
        unused = self.longest_span - math.ceil(self.span.real.max(initial=0.0)) - math.ceil(self.ramp)
        return self.longest_span - min(self.longest_span - 1, max(0, unused)) // DROPPED * DROPPED

    @step
    def visible_past(self):
        """Keys within the reach, (..., h, q, k) without the slots."""
        first = self.nearest
        seen = (self.steps_back >= first) & (self.steps_back <= self.reach + first - 1) & self.visible_by_mask
        return np.broadcast_to(seen & self.visible_by_ramp, (*self.pairs[:-1], self.past_keys))

    @step
    def visible_by_ramp(self):
        """Keys up to the far end of the ramp; all, where ``renormalize_eps`` adds what the softmax gives the others."""
        return True if self.renormalize_eps else self.level.real >= 0

    @step
    def visible(self):
        """Keys within the reach, and every slot."""
        return np.concatenate([self.visible_past, np.ones((*self.pairs[:-1], self.slots), dtype=bool)], axis=-1)

    # ------------------------------------------------------------------ the ramp

    @step
    def span_of_head(self):
        """(..., h, q|1)"""
        return self.span[:, None] if self.span.ndim == 1 else self.span

    @step
    def ramp_width(self):
        return self.ramp

    @step
    def origin(self):
        """The distance at which the token before the query is counted."""
        return self.distance_origin

    @step
    def level(self):
        """(R + span - x) / R with x the distance, counted from the origin; the ramp before it is clipped."""
        x = self.steps_back - 1 + self.origin
        return (self.ramp_width + self.span_of_head[..., None] - x) / self.ramp_width

    @step
    def clipped(self):
        """clip((R + span - x) / R, 0, 1)"""
        return np.where(self.level.real > 1, 1.0, np.where(self.level.real > 0, self.level, 0.0))

    @step
    def ramp_of_slots(self):
        """1: slots are always seen in full."""
        return np.ones((*self.pairs[:-1], self.slots))

    @step
    def weighting(self):
        """The ramp of keys and slots, 0 where hidden."""
        past = np.broadcast_to(self.clipped, (*self.pairs[:-1], self.past_keys))
        return np.concatenate([np.where(self.visible_past, past, 0.0), self.ramp_of_slots], axis=-1)

    # ------------------------------------------------------------------ logits

    @step
    def column(self):
        """The column of key_positions of each pair: distance - 1, (q, k)."""
        return self.steps_back - self.nearest

    @step
    def position_table(self):
        """key_positions, (h|1, d, n)"""
        return self.key_positions if self.key_positions.ndim == 3 else self.key_positions[None]

    @step
    def position_products(self):
        """q . key_positions of the distance; 0 beyond the table and for slots"""
        if self.key_positions is None:
            return 0.0
        by_distance = einsum("...hqd,hdn->...hqn", self.q, np.broadcast_to(self.position_table, self.table_shape))
        past = np.where(self.in_table, by_distance[..., np.arange(self.queries)[:, None], self.safe_column], 0.0)
        return np.concatenate([past, np.zeros((*past.shape[:-1], self.slots))], axis=-1)

    @step
    def table_shape(self):
        return (self.heads, *self.key_positions.shape[-2:])

    @step
    def in_table(self):
        """Pairs whose distance the table holds, (q, k)."""
        return (self.column >= 0) & (self.column < self.key_positions.shape[-1])

    @step
    def safe_column(self):
        return np.where(self.in_table, self.column, 0)

    @step
    def content(self):
        """q . k"""
        return einsum("...hqd,...hkd->...hqk", self.q, self.keys_of_head)

    @step
    def products(self):
        """q . (k + key_positions)"""
        return self.content + self.position_products

    @step
    def shown_logits(self):
        """The result ``logits``: -inf where a query does not see a key."""
        return np.where(self.visible, self.logits, -np.inf)

    # ------------------------------------------------------------------ softmax

    @step
    def largest(self):
        """The largest logit of a row among those of weight above 0 (of all that are seen, with ``renormalize_eps``)."""
        leading = self.seen if self.renormalize_eps else self.seen & (self.weighting.real > 0)
        return np.where(leading, self.logits, -np.inf).real.max(-1, keepdims=True, initial=-np.inf)

    @step
    def weighted_maximum(self):
        """The largest logit among those of weight above 0."""
        leading = self.seen & (self.weighting.real > 0)
        top = np.where(leading, self.logits, -np.inf).real.max(-1, keepdims=True, initial=-np.inf)
        return np.where(np.isneginf(top), 0.0, top)

    @step
    def weighted_sum(self):
        """Sum of ramp exp(logits - weighted_maximum): what the lse is of, whatever keys of weight 0 add to the divisor"""
        grown = self.exponential(self.masked_logits - self.weighted_maximum)
        return np.where(self.weighting == 0, 0.0, self.weighting * grown).sum(-1, keepdims=True)

    @step
    def lse(self):
        """weighted_maximum + ln(weighted_sum)"""
        if not self.renormalize_eps:
            return super().lse
        return (self.weighted_maximum + np.log(self.weighted_sum))[..., 0]

    @step
    def plain_exponentials(self):
        """exp(logits - maximum), without the ramp"""
        return self.exponential(self.masked_logits - self.maximum)

    @step
    def exponentials(self):
        """ramp exp(logits - maximum)"""
        return np.where(self.weighting == 0, 0.0, self.weighting * self.plain_exponentials)

    @step
    def row_sum(self):
        """Sum of ramp exp, plus ``renormalize_eps`` times the sum of exp"""
        if not self.renormalize_eps:
            return super().row_sum
        return super().row_sum + self.renormalize_eps * self.plain_exponentials.sum(-1, keepdims=True)

    # ------------------------------------------------------------------ backward

    @step
    def rebuilt_plain(self):
        """exp(logits) / row_sum, without the ramp; exp(logits - lse) where an lse is handed over."""
        if self.is_handed("lse") and not self.renormalize_eps:
            shift = np.where(np.isneginf(self.lse), 0.0, self.lse)[..., None]
            return np.where(self.seen & ~np.isneginf(self.lse)[..., None], self.exponential(self.logits - shift), 0.0)
        return divide(self.plain_exponentials, self.row_sum)

    @step
    def rebuilt_weights(self):
        """The weights as the backward has them."""
        return np.where(self.weighting == 0, 0.0, self.weighting * self.rebuilt_plain)

    @step
    def lse_share_without_ramp(self):
        """exp(logits - lse): d lse / d ramp"""
        if not self.renormalize_eps:
            return self.rebuilt_plain
        return divide(self.exponential(self.masked_logits - self.weighted_maximum), self.weighted_sum)

    @step
    def touched(self):
        """Pairs that the backward may touch."""
        return self.seen | np.isnan(self.rebuilt_weights)

    @step
    def d_ramp(self):
        """exp(logits) / row_sum (dP - delta) + d_lse exp(logits - lse): not through the weights, since the ramp may be 0"""
        own = np.where(self.rebuilt_plain == 0, 0.0, self.rebuilt_plain * (self.d_weights - self.delta))
        share = self.lse_share_without_ramp
        of_lse = np.where((share == 0) | (self.d_lse[..., None] == 0), 0.0, share * self.d_lse[..., None])
        return np.where(self.touched, own + of_lse, 0.0)

    @step
    def d_logits(self):
        """ramp d_ramp - eps delta exp(logits) / row_sum"""
        d = np.where(self.weighting == 0, 0.0, self.weighting * self.d_ramp)
        if self.renormalize_eps:
            d = d - self.renormalize_eps * self.delta * self.rebuilt_plain
        return np.where(self.touched, d, 0.0)

    @step
    def ramp_slope(self):
        """1 where the ramp is between its ends, both included, (..., h, q, k)."""
        return (self.level.real >= 0) & (self.level.real <= 1)

    @step
    def d_level(self):
        """The cotangent of the ramp before it is clipped."""
        return np.where(self.visible_past & self.ramp_slope, self.d_ramp[..., : self.past_keys], 0.0)

    @step
    def d_span(self):
        """Sum of d_level / R over the keys, and over the queries where a head has one span."""
        d = self.d_level.sum(-1) / self.ramp_width
        return d.sum(-1) if np.ndim(self.argument("span")) == 1 else d

    @step
    def d_by_distance(self):
        """Cotangents of q . key_positions, added up by distance, (..., h, q, n)."""
        past = np.where(self.in_table, self.d_products[..., : self.past_keys], 0.0)
        return by_column(past, self.safe_column, self.key_positions.shape[-1])

    @step
    def distances_touched(self):
        """Distances at which a query sees a key."""
        past = np.where(self.in_table, self.touched[..., : self.past_keys], False)
        return by_column(1.0 * past, self.safe_column, self.key_positions.shape[-1]) != 0

    @step
    def d_q(self):
        """d_products . k, and by distance . key_positions"""
        own = contract("...hqk,...hkd->...hqd", self.d_products, self.keys_of_head, self.touched)
        if self.key_positions is None:
            return own
        table = np.broadcast_to(np.swapaxes(self.position_table, -1, -2), (self.heads, *self.table_shape[:0:-1]))
        return own + contract("...hqn,...hnd->...hqd", self.d_by_distance, table, self.distances_touched)

    @step
    def d_key_positions(self):
        """q^T . by distance, summed over the batch, and over the heads where they share a table"""
        d = contract("...hqn,...hqd->...hnd", self.d_by_distance, self.q, self.distances_touched)
        d = np.swapaxes(d, -1, -2)
        return d.sum(-3) if np.ndim(self.argument("key_positions")) == 2 else d

    @step
    def d_k(self):
        return self.d_keys_of_head[..., : self.past_keys, :]

    @step
    def d_v(self):
        return self.d_values_of_head[..., : self.past_keys, :]

    @step
    def d_persistent_keys(self):
        return self.d_keys_of_head[..., self.past_keys :, :]

    @step
    def d_persistent_values(self):
        return self.d_values_of_head[..., self.past_keys :, :]


def with_slots(x, slots):
    """Slots (h, n, d) after the keys (..., h, k, d)."""
    if slots is None:
        return x
    return np.concatenate([x, np.broadcast_to(slots, (*x.shape[:-3], *slots.shape))], axis=-2)


def by_column(d, column, columns):
    """(..., q, k) added up at the columns that the pairs read: (..., q, n)."""
    lead = d.shape[:-2]
    line = np.arange(d.shape[-2])[:, None] * columns + column
    flat = np.zeros((d.shape[-2] * columns, *lead))
    np.add.at(flat, line.reshape(-1), np.moveaxis(d.reshape(*lead, line.size), -1, 0))
    return np.moveaxis(flat, 0, -1).reshape(*lead, d.shape[-2], columns)


definition = AdaptiveSpan
