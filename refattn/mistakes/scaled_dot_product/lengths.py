"""Mistakes about lengths, and about tails: what is left over by whole tiles."""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import step
from refattn.mistakes.scaled_dot_product.base import TILES, catalogue


@catalogue.mistake(why="Padding is taken for keys.")
class tail_unmasked(ScaledDotProduct):
    """keys beyond key_lengths are seen"""

    visible_by_key_lengths = True


@catalogue.mistake(why="Lengths are not read on this path; the diagonal stands where the padded lengths put it.")
class lengths_drop(ScaledDotProduct):
    """key_lengths are ignored, for the diagonal too"""

    key_lengths = None


@catalogue.mistake(name="lengths_drop", why="Lengths are not read on this path.")
class query_lengths_drop(ScaledDotProduct):
    """query_lengths are ignored, for the diagonal too"""

    query_lengths = None


@catalogue.mistake(name="lengths_drop", why="The lengths of one entry are handed to all.")
class lengths_of_first(ScaledDotProduct):
    """the lengths of batch entry 0 are those of all"""

    @step
    def real_queries(self):
        lengths = super().real_queries
        return np.broadcast_to(lengths.ravel()[0], lengths.shape) if lengths.size else lengths

    @step
    def real_keys(self):
        lengths = super().real_keys
        return np.broadcast_to(lengths.ravel()[0], lengths.shape) if lengths.size else lengths


@catalogue.mistake(why="Rows of padding are computed and stored like others.")
class tail_garbage(ScaledDotProduct):
    """rows beyond query_lengths are computed"""

    visible_by_query_lengths = True


@catalogue.mistake(
    name="tail_unmasked", why="A tail tile is filled with zeros, and exp(0) = 1 enters the row sum.", variants=TILES
)
class tail_of_zeros(ScaledDotProduct):
    """zeros that fill the last tile of {tile} keys are counted"""

    @step
    def tail(self):
        """The places beyond the last key up to a whole tile; none where lengths or a score_mod say what is beyond."""
        more = 0 if self.key_lengths is not None or self.score_mod is not None else -self.keys % self.tile
        return self.keys + np.arange(more)

    @step
    def tail_ahead(self):
        positional = self.causal or self.window is not None or self.alibi_slopes is not None
        return self.tail - self.i - self.offset if positional else np.zeros((self.queries, len(self.tail)))

    @step
    def tail_logits(self):
        """Zero keys: what is added remains, where causal and window hide nothing."""
        seen = self.visible_by_query_lengths & np.ones(self.tail_ahead.shape, bool)
        if self.causal:
            seen = seen & (self.tail_ahead <= 0)
        if self.window_left is not None:
            seen = seen & (self.tail_ahead >= -self.window_left)
        if self.window_right is not None:
            seen = seen & (self.tail_ahead <= self.window_right)
        slopes = 0.0 if self.alibi_slopes is None else self.alibi_slopes[:, None, None]
        logits = -slopes * np.abs(self.tail_ahead)
        if self.softcap_after_bias and self.cap is not None:
            logits = self.cap * np.tanh(logits / self.cap)
        return np.where(seen, logits, -np.inf)

    @step
    def largest(self):
        return np.maximum(super().largest, self.tail_logits.real.max(-1, keepdims=True, initial=-np.inf))

    @step
    def tail_exponentials(self):
        return self.exponential(self.tail_logits - self.maximum)

    @step
    def key_sum(self):
        return super().key_sum + self.tail_exponentials.sum(-1, keepdims=True)

    @step
    def d_tail_logits(self):
        """As d_logits, with values of zero."""
        delta, d_lse = self.delta, self.d_lse[..., None]
        if not self.lse_includes_sinks:
            return self.tail_exponentials * (
                np.where(self.row_sum == 0, 0, -delta / self.row_sum) + d_lse / self.key_sum
            )
        return np.where(self.row_sum == 0, 0.0, self.tail_exponentials / self.row_sum * (d_lse - delta))

    @step
    def d_tail_bias(self):
        if self.cap is None or not self.softcap_after_bias:
            return self.d_tail_logits
        return self.d_tail_logits * (1 - np.where(np.isneginf(self.tail_logits), 0, self.tail_logits / self.cap) ** 2)

    @step
    def d_alibi_slopes(self):
        extra = np.broadcast_to(self.d_tail_bias * np.abs(self.tail_ahead), (*self.pairs[:-1], len(self.tail)))
        return super().d_alibi_slopes - np.moveaxis(extra, -3, -1).sum(axis=tuple(range(extra.ndim - 1)))

    @step
    def d_softcap(self):
        if not self.softcap_after_bias:
            return super().d_softcap
        bent = np.where(np.isneginf(self.tail_logits), 0.0, self.tail_logits) / self.cap
        return super().d_softcap + (self.d_tail_logits * (bent - np.arctanh(bent) * (1 - bent**2))).sum()


@catalogue.mistake(why="The loop runs over whole tiles.", variants=TILES)
class tail_dropped(ScaledDotProduct):
    """keys beyond the last full tile of {tile} keys are not read"""

    @step
    def visible(self):
        return super().visible & (np.arange(self.keys) < (self.keys // self.tile * self.tile or self.keys))


@catalogue.mistake(
    name="tail_dropped", why="A bound is one too small: a tail of a single key is no tile.", variants=TILES
)
class tail_of_one_dropped(ScaledDotProduct):
    """the last key is not read where it stands alone in a tile of {tile}"""

    @step
    def visible(self):
        alone = self.keys % self.tile == 1 and self.keys > 1
        return super().visible & (np.arange(self.keys) < self.keys - 1) if alone else super().visible


class LengthsOff(ScaledDotProduct):
    """A length that is one off; the diagonal stays."""

    by = 1


@catalogue.mistake(
    why="A length is taken for an index, or an index for a length.",
    variants=(
        {"says": "one key beyond key_lengths is seen"},
        {"says": "the last key of key_lengths is not seen", "by": -1},
    ),
)
class lengths_off1(LengthsOff):
    """{says}"""

    @step
    def visible_by_key_lengths(self):
        return True if self.key_lengths is None else self.j < np.clip(self.real_keys + self.by, 0, self.own_keys)


@catalogue.mistake(
    name="lengths_off1",
    why="A length is taken for an index, or an index for a length.",
    variants=(
        {"says": "one row beyond query_lengths is computed"},
        {"says": "the last row of query_lengths is not computed", "by": -1},
    ),
)
class query_lengths_off1(LengthsOff):
    """{says}"""

    @step
    def visible_by_query_lengths(self):
        lengths = self.real_queries if self.query_lengths is None else self.real_queries + self.by
        return self.i < np.clip(lengths, 0, self.queries)
