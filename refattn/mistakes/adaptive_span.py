"""How people get adaptive spans wrong: the ramp, what it multiplies, distances, their table, slots, the gradient of the span."""

import numpy as np

from refattn.definitions.adaptive_span import AdaptiveSpan, by_column
from refattn.definitions.scaled_dot_product import divide
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.scaled_dot_product import catalogue as dense

catalogue = Catalogue(
    AdaptiveSpan,
    built_on=dense,
    without=(
        "alibi_*", "bias_*", "cap_*", "causal_*", "drop_*", "gqa_*", "keep_additive", "lengths_*", "mask_stride", "none_mask",
        "pattern_drop", "score_mod_drop", "segments_*", "sink_*", "tail_*", "window_*", "mask_or_causal",
    ),
)  # fmt: skip
"""Without the mistakes with options that are not here."""


# ---------------------------------------------------------------------------------------------- the ramp


@catalogue.mistake(why="The paper multiplies inside the softmax; a mask on finished weights looks alike.")
class span_not_renormalised(AdaptiveSpan):
    """the ramp multiplies finished softmax weights, which then sum to less than 1"""

    visible_by_ramp = True

    @step
    def row_sum(self):
        return self.plain_exponentials.sum(-1, keepdims=True)

    @step
    def largest(self):
        return np.where(self.seen, self.logits, -np.inf).real.max(-1, keepdims=True, initial=-np.inf)

    @step
    def rebuilt_plain(self):
        return divide(self.plain_exponentials, self.row_sum)

    @step
    def d_ramp(self):
        d = np.where(self.touched, self.rebuilt_plain * self.d_weights, 0.0)
        return d + self.d_lse[..., None] * divide(self.plain_exponentials, self.key_sum)

    @step
    def d_logits(self):
        d = np.where(self.weighting == 0, 0.0, self.weighting * self.d_ramp)
        return np.where(self.touched, d - self.delta * self.rebuilt_plain, 0.0)


@catalogue.mistake(why="The paper counts from the token before, the released code from 0.")
class span_origin(AdaptiveSpan):
    """distances are counted from the other origin"""

    @step
    def origin(self):
        return 1 - self.distance_origin


@catalogue.mistake(why="Ordinary causal attention sees the diagonal.")
class span_self_visible(AdaptiveSpan):
    """a query sees itself as its nearest key"""

    nearest = 0

    @step
    def level(self):
        x = self.steps_back + self.origin
        return (self.ramp_width + self.span_of_head[..., None] - x) / self.ramp_width


@catalogue.mistake(why="min(x, 1) is left out of a clip.")
class span_ramp_unclipped(AdaptiveSpan):
    """the ramp goes on growing above 1 inside the span"""

    @step
    def clipped(self):
        return np.where(self.level.real > 0, self.level, 0.0)

    @step
    def ramp_slope(self):
        return self.level.real >= 0


@catalogue.mistake(why="R is taken for half of the ramp.")
class span_ramp_width(AdaptiveSpan):
    """the ramp is twice as wide"""

    @step
    def ramp_width(self):
        return 2 * self.ramp

    @step
    def level(self):
        return super().level


@catalogue.mistake(why="The ramp looks like a detail of training.")
class span_hard(AdaptiveSpan):
    """keys within the span have weight 1, all others 0"""

    @step
    def clipped(self):
        return 1.0 * (self.level.real >= 1)

    @step
    def ramp_slope(self):
        return np.zeros(self.level.shape, dtype=bool)


@catalogue.mistake(why="A mask is a factor of the logits in other places.")
class span_on_logits(AdaptiveSpan):
    """the ramp multiplies the logits in place of the exponentials"""

    @step
    def factor(self):
        past = np.broadcast_to(self.clipped, (*self.pairs[:-1], self.past_keys))
        return np.concatenate([past, self.ramp_of_slots], axis=-1)

    @step
    def logits(self):
        return self.factor * super().logits

    @step
    def weighting(self):
        return np.where(self.visible, 1.0, 0.0)

    @step
    def d_level(self):
        d = self.d_scaled * self.scaled / np.where(self.factor == 0, 1.0, self.factor)
        return np.where(self.visible_past & self.ramp_slope, d[..., : self.past_keys], 0.0)

    @step
    def d_scaled(self):
        return self.factor * self.d_logits


@catalogue.mistake(why="One bound on the keys serves all heads.")
class span_shared(AdaptiveSpan):
    """all heads use the largest head's span"""

    @step
    def widest(self):
        return np.broadcast_to(super().span_of_head, (*self.pairs[:-2], super().span_of_head.shape[-1]))

    @step
    def span_of_head(self):
        return np.broadcast_to(self.widest.max(-2, keepdims=True), self.widest.shape)

    @step
    def d_span(self):
        d = self.d_level.sum(-1) / self.ramp_width
        d = d if np.ndim(self.argument("span")) > 1 else d.sum(-1, keepdims=True)
        first = self.widest.argmax(-2)[..., None, :]
        whole = np.zeros_like(d)
        np.put_along_axis(whole, first, d.sum(-2, keepdims=True), -2)
        return whole if np.ndim(self.argument("span")) > 1 else whole[..., 0]


# ---------------------------------------------------------------------------------------------- positions and slots


@catalogue.mistake(why="The nearest key stands last in memory and first in the table.")
class span_positions_reversed(AdaptiveSpan):
    """key_positions are read furthest key first"""

    @step
    def position_table(self):
        return super().position_table[..., ::-1]

    @step
    def d_key_positions(self):
        return super().d_key_positions[..., ::-1]


class PositionsScaled(AdaptiveSpan):
    """The position term has a factor of its own beside the scale."""

    factor = None

    @step
    def position_products(self):
        return self.factor * super().position_products

    @step
    def d_by_distance(self):
        return self.factor * super().d_by_distance


@catalogue.mistake(why="The paper prints no scale; code divides the sum, or only the content.")
class span_positions_unscaled(PositionsScaled):
    """the position term is not scaled"""

    @step
    def factor(self):
        return 1 / self.scale

    @step
    def d_scale(self):
        return np.where(self.touched, self.d_scaled * self.content, 0.0).sum()


@catalogue.mistake(name="span_positions_drop", why="Positions are taken for optional.")
class span_positions_left_out(PositionsScaled):
    """key_positions are left out"""

    factor = 0.0


@catalogue.mistake(why="Distances are counted from 0 in the table and from 1 in the ramp.")
class span_positions_off1(AdaptiveSpan):
    """key_positions are read one distance further"""

    @step
    def column(self):
        return super().column + 1


@catalogue.mistake(why="The mask is applied to everything that the softmax sees.")
class span_slots_ramped(AdaptiveSpan):
    """persistent slots are weighted by the span too"""

    @step
    def ramp_of_slots(self):
        level = np.clip(self.span_of_head[..., None] / self.ramp_width, 0.0, 1.0)
        return np.broadcast_to(level, super().ramp_of_slots.shape)

    @step
    def d_span(self):
        inside = (self.span_of_head >= 0) & (self.span_of_head <= self.ramp_width)
        extra = np.where(inside, self.d_ramp[..., self.past_keys :].sum(-1) / self.ramp_width, 0.0)
        return super().d_span + (extra.sum(-1) if np.ndim(self.argument("span")) == 1 else extra)


@catalogue.mistake(name="span_slots_drop", why="Slots belong to a later paper.")
class span_slots_hidden(AdaptiveSpan):
    """persistent slots are not seen"""

    @step
    def visible(self):
        return np.concatenate([self.visible_past, np.zeros((*self.pairs[:-1], self.slots), dtype=bool)], axis=-1)

    @step
    def ramp_of_slots(self):
        return np.zeros_like(super().ramp_of_slots)


@catalogue.mistake(why="It looks like a guard against 0.")
class eps_drop(AdaptiveSpan):
    """the constant added to the sum of the ramped softmax is left out"""

    renormalize_eps = 0.0


# ---------------------------------------------------------------------------------------------- gradients


@catalogue.mistake(
    sides=("backward",), why="ln(ramp) added to the logits has the same forward, and no gradient where the ramp is 0."
)
class span_ramp_grad(AdaptiveSpan):
    """the gradient of the span leaves out the far end of the ramp (an additive log ramp)"""

    @step
    def ramp_slope(self):
        return super().ramp_slope & (self.level.real > 0)


@catalogue.mistake(
    name="span_ramp_grad", sides=("backward",), why="A clip has gradient 0 at its ends in some libraries."
)
class span_ramp_grad_exclusive(AdaptiveSpan):
    """the gradient of the span is exclusive at both ends of the ramp"""

    @step
    def ramp_slope(self):
        return (self.level.real > 0) & (self.level.real < 1)


@catalogue.mistake(name="span_ramp_grad", sides=("backward",), why="jax.numpy.clip passes half.")
class span_ramp_grad_half(AdaptiveSpan):
    """at both ends of the ramp half the gradient of the span passes"""

    @step
    def d_level(self):
        ends = (self.level.real == 0) | (self.level.real == 1)
        return np.where(ends, 0.5, 1.0) * super().d_level


@catalogue.mistake(
    name="span_ramp_grad", sides=("backward",), why="The span is given as a fraction of max_span elsewhere."
)
class span_ramp_grad_unscaled(AdaptiveSpan):
    """the gradient of the span is not divided by the width of the ramp"""

    @step
    def d_span(self):
        return super().d_span * self.ramp_width


@catalogue.mistake(name="span_grad_weights", sides=("backward",), why="a / m is at hand, exp(s) is not.")
class span_grad_by_weights(AdaptiveSpan):
    """the gradient of the ramp is taken as that of the weights times the weights, without dividing by the ramp"""

    @step
    def d_level(self):
        right = super().d_level
        return right * self.clipped


@catalogue.mistake(name="gradient_absent", sides=("backward",), why="A mask needs no gradient.")
class span_absent(AdaptiveSpan):
    """the span gets no gradient"""

    @step
    def d_span(self):
        return np.zeros_like(super().d_span)


@catalogue.mistake(name="span_positions_grad", sides=("backward",), why="The skew back to distances is left out.")
class span_positions_unskewed(AdaptiveSpan):
    """the gradient of key_positions is not shifted back to distances"""

    @step
    def d_by_distance(self):
        past = self.d_products[..., : self.past_keys]
        columns = self.key_positions.shape[-1]
        return by_column(past, np.minimum(np.arange(self.past_keys), columns - 1) + 0 * self.safe_column, columns)
