"""Who sees whom in softmax attention: sizes, heads, and every option that hides a pair, in steps.

Axes: ``...`` any leading batch axes, ``h`` query head, ``g`` key head, ``q`` and ``k`` positions.
"""

import math
from typing import Any

import numpy as np

from refattn.definitions.steps import Definition, step

__all__ = ["Visibility", "per_batch"]


class Visibility(Definition):
    """The steps of softmax attention up to ``visible``, of the arguments q, k, v and the options that speak of positions."""

    # ------------------------------------------------------------------ sizes and heads

    @step
    def lead(self):
        """The batch axes of q, k and v together."""
        return np.broadcast_shapes(*(x.shape[:-3] for x in (self.q, self.k, self.v)))

    @property
    def heads(self):
        return self.q.shape[-3]

    @property
    def key_heads(self):
        return self.k.shape[-3]

    @property
    def queries(self):
        return self.q.shape[-2]

    @property
    def keys(self):
        return self.k.shape[-2]

    @property
    def own_keys(self):
        """Keys that have a position.  ``extra_keys`` more stand behind them: scaled and capped, otherwise left alone."""
        return self.keys - self.extra_keys

    @property
    def channels(self):
        return self.q.shape[-1]

    @property
    def pairs(self):
        """The shape (..., h, q, k)."""
        return (*self.lead, self.heads, self.queries, self.keys)

    @property
    def own_pairs(self):
        return (*self.pairs[:-1], self.own_keys)

    def beside(self, own, fill):
        """Numbers of the keys that have a position, with ``fill`` for the extra keys."""
        if not self.extra_keys:
            return own
        parts = [np.broadcast_to(own, self.own_pairs), np.broadcast_to(fill, (*self.pairs[:-1], self.extra_keys))]
        return np.concatenate(parts, axis=-1)

    @step
    def i(self):
        return np.arange(self.queries)[:, None]

    @step
    def j(self):
        return np.arange(self.own_keys)

    @step
    def key_head(self):
        """The key head of each query head, (h,)."""
        heads = np.arange(self.heads)
        return heads % self.key_heads if self.head_map == "tile" else heads // (self.heads // max(1, self.key_heads))

    @step
    def keys_of_head(self):
        """k[g(h)], (..., h, k, d)."""
        return self.k[..., self.key_head, :, :]

    @step
    def values_of_head(self):
        """v[g(h)], (..., h, k, e)."""
        return self.v[..., self.key_head, :, :]

    # ------------------------------------------------------------------ who sees whom

    @step
    def real_queries(self):
        """Queries that are no padding, an int per batch against (..., h, q, k)."""
        return per_batch(self.queries if self.query_lengths is None else self.query_lengths, self.lead)

    @step
    def real_keys(self):
        return per_batch(self.own_keys if self.key_lengths is None else self.key_lengths, self.lead)

    @step
    def offset(self):
        """Where query 0 stands on the key axis."""
        align = self.align
        if align is None:
            if self.queries != self.own_keys or self.query_lengths is not None or self.key_lengths is not None:
                raise ValueError(
                    f"align is missing: causal, window and alibi_slopes need it where queries ({self.queries}) and keys"
                    f' ({self.own_keys}) differ or lengths are given; expected "upper_left", "lower_right" or ints per batch'
                )
            align = "upper_left"
        if not isinstance(align, str):
            return per_batch(align, self.lead)
        return self.real_keys - self.real_queries if align == "lower_right" else per_batch(0, self.lead)

    @step
    def ahead(self):
        """How far key j lies ahead of the place of query i: j - i - offset."""
        return self.j - self.i - self.offset

    @step
    def visible_by_query_lengths(self):
        return self.i < self.real_queries

    @step
    def visible_by_key_lengths(self):
        return self.j < self.real_keys

    @step
    def visible_by_mask(self):
        return True if self.mask is None else self.mask

    @step
    def visible_by_pattern(self):
        if self.pattern is None:
            return True
        pattern = self.pattern.fit(self.queries, self.own_keys, batch=self.lead, heads=self.heads)
        b = np.arange(math.prod(self.lead)).reshape(*self.lead, 1, 1, 1)
        h = np.arange(self.heads)[:, None, None]
        return pattern.visible(self.i, self.j, q=self.queries, k=self.own_keys, b=b, h=h)

    @step
    def visible_by_causal(self):
        return self.ahead <= 0 if self.causal else True

    @step
    def window_left(self):
        """How many keys behind its place a query sees; None = all."""
        return None if self.window is None else self.window[0]

    @step
    def window_right(self):
        """How many keys ahead."""
        return None if self.window is None else self.window[1]

    @step
    def visible_by_window(self):
        return True if self.window is None else self.within(self.window_left, self.window_right)

    @step
    def visible_by_segments(self):
        if self.query_segments is None:
            return True
        return self.query_segments[..., None, :, None] == self.key_segments[..., None, None, :]

    @step
    def list_of_head(self):
        """Which of the lists (1, g or h of them) each query head reads, (h,)."""
        given = self.indices if self.indices is not None else self.block_indices
        lists = given.shape[-3]
        if lists == 1:
            return np.zeros(self.heads, dtype=int)
        return np.arange(self.heads) if lists == self.heads else self.key_head

    @step
    def listed_keys(self):
        """Keys in the list of each query, (..., h, q, n); what is outside 0 ... k - 1 stands for none.  None without lists."""
        if self.indices is not None:
            return np.asarray(self.indices, dtype=np.int64)[..., self.list_of_head, :, :]
        if self.block_indices is None:
            return None
        blocks = np.asarray(self.block_indices, dtype=np.int64)[..., self.list_of_head, :, :]
        keys = np.minimum(blocks, self.own_keys)[..., None] * self.block_size + np.arange(self.block_size)
        return np.where(blocks[..., None] < 0, -1, keys).reshape(*blocks.shape[:-1], blocks.shape[-1] * self.block_size)

    @step
    def block_size(self):
        return min(int(self.block), max(1, self.own_keys))

    @step
    def times_listed(self):
        """How often each key stands in the list of a query, (..., h, q, k)"""
        keys = self.own_keys
        lists = np.broadcast_to(self.listed_keys, (*self.own_pairs[:-1], self.listed_keys.shape[-1]))
        lists = np.where((lists < 0) | (lists > keys), keys, lists)  # a column behind the keys collects what is none
        rows = lists.reshape(math.prod(lists.shape[:-1]), lists.shape[-1])
        times = np.zeros((len(rows), keys + 1), dtype=int)
        np.add.at(times, (np.arange(len(rows))[:, None], rows), 1)
        return times[:, :keys].reshape(self.own_pairs)

    @step
    def visible_by_list(self):
        return True if self.listed_keys is None else self.times_listed > 0

    @step
    def visible(self):
        """Every option agrees, (..., h, q, k)."""
        seen = np.ones(self.own_pairs, dtype=bool)
        for part in (
            self.visible_by_query_lengths, self.visible_by_key_lengths, self.visible_by_mask, self.visible_by_pattern,
            self.visible_by_causal, self.visible_by_window, self.visible_by_segments, self.visible_by_list,
        ):  # fmt: skip
            seen = seen & part
        return self.beside(seen, self.visible_by_query_lengths)

    def within(self, left, right):
        """-left <= ahead <= right; None = unlimited."""
        seen = np.ones(self.ahead.shape, dtype=bool)
        if left is not None:
            seen = seen & (self.ahead >= -left)
        return seen if right is None else seen & (self.ahead <= right)


def per_batch(value: Any, lead: tuple[int, ...]) -> np.ndarray:
    """Ints per batch (or one for all), laid out against (..., h, q, k)."""
    value = np.asarray(value)
    if value.ndim == 1 and value.size == math.prod(lead):
        value = value.reshape(lead)
    return np.broadcast_to(value, lead)[..., None, None, None]
