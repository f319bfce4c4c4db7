"""Mistakes about logits: scale, soft cap, bias, ALiBi."""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import step
from refattn.mistakes.scaled_dot_product.base import catalogue

# ---------------------------------------------------------------------- scale


@catalogue.mistake(why="The scale is expected in q, or is lost with a rewrite.")
class no_scale(ScaledDotProduct):
    """the scale is missing"""

    scale = 1.0
    d_scale = 0.0


@catalogue.mistake(why="Only a given scale is multiplied in.")
class scale_default_missing(ScaledDotProduct):
    """the default scale is left out, a given one is honoured"""

    default_scale = 1.0


@catalogue.mistake(why="q is scaled, and the logits once more.")
class scale_twice(ScaledDotProduct):
    """the scale is applied twice"""

    @step
    def scale(self):
        return super().scale ** 2

    @step
    def d_scale(self):
        return 2 * super().scale * super().d_scale


@catalogue.mistake(why="sqrt(d) is taken for 1 / sqrt(d).")
class scale_inv(ScaledDotProduct):
    """multiplied where it should be divided by the scale"""

    @step
    def scale(self):
        return 1 / super().scale

    @step
    def d_scale(self):
        return -(self.scale**2) * super().d_scale


@catalogue.mistake(name="scale_inv", why="sqrt(d) is taken for 1 / sqrt(d).")
class scale_default_inv(ScaledDotProduct):
    """the default scale is sqrt(d), a given one is honoured"""

    @step
    def default_scale(self):
        return self.channels**0.5


@catalogue.mistake(why="The scale is computed inside and the argument never read.")
class scale_ignored(ScaledDotProduct):
    """d**-0.5 in place of the scale given"""

    d_scale = 0.0

    @step
    def scale(self):
        return self.default_scale


@catalogue.mistake(why="The embedding's size is taken for that of a head.")
class scale_dmodel(ScaledDotProduct):
    """the scale is that of all heads together"""

    @step
    def default_scale(self):
        return (self.heads * self.channels) ** -0.5


@catalogue.mistake(why="The size is read from the wrong array.")
class scale_value(ScaledDotProduct):
    """the scale is that of the value channels"""

    @step
    def default_scale(self):
        return self.v.shape[-1] ** -0.5


@catalogue.mistake(
    name="scale_value",
    why="The size is read from the wrong axis.",
    variants=({"of": "the keys", "array": "k"}, {"of": "the queries", "array": "q"}),
)
class scale_of_length(ScaledDotProduct):
    """the scale is that of the number of {of}"""

    array = "k"

    @step
    def default_scale(self):
        return max(1, getattr(self, self.array).shape[-2]) ** -0.5


@catalogue.mistake(why="Channels are padded before the scale is taken from their number.")
class scale_padded(ScaledDotProduct):
    """the scale is that of d padded to a power of two"""

    @step
    def default_scale(self):
        return (1 << (self.channels - 1).bit_length()) ** -0.5


@catalogue.mistake(
    name="scale_padded",
    why="Channels are padded before the scale is taken from their number.",
    variants=[{"multiple": n} for n in (8, 16, 32, 64, 128)],
)
class scale_padded_to_multiple(ScaledDotProduct):
    """the scale is that of d padded to a multiple of {multiple}"""

    multiple = 8

    @step
    def default_scale(self):
        return (-(-self.channels // self.multiple) * self.multiple) ** -0.5


@catalogue.mistake(why="float16 products are scaled only when they stand in memory.")
class qk_overflow(ScaledDotProduct):
    """q.k overflows float16 before the scale"""

    @step
    def products(self):
        x = super().products
        return np.where(np.abs(x) > 65504, np.sign(x) * np.inf, x) if self.storage == np.float16 else x


# ---------------------------------------------------------------------- soft cap


@catalogue.mistake(why="The argument is taken, stored, and never used.")
class cap_drop(ScaledDotProduct):
    """the soft cap is ignored"""

    softcap = None
    d_softcap = 0.0


@catalogue.mistake(why="The scale is applied last.")
class cap_before_scale(ScaledDotProduct):
    """the cap is taken before the scale"""

    @step
    def cap(self):
        return None if super().cap is None else super().cap * self.scale

    @step
    def d_softcap(self):
        return self.scale * super().d_softcap

    @step
    def d_scale(self):
        if self.cap is None:
            return super().d_scale
        by_cap = np.where(self.touched, self.d_logits * self.slope_by_cap, 0.0).sum()
        return super().d_scale + by_cap * self.cap / self.scale


class CappedMask(ScaledDotProduct):
    """Hidden logits of -inf meet the cap as well."""

    @step
    def masked_logits(self):
        if self.cap is None:
            return super().masked_logits
        outside = 0.0 if self.softcap_after_bias else self.added
        hidden = -self.cap + np.where(np.isneginf(outside), 0.0, outside)
        return np.where(self.seen, self.logits, np.where(self.real_rows, hidden, -np.inf))

    @step
    def touched(self):
        """Hidden logits have gradients: through the cap, and through what is added to it."""
        return super().touched | (self.rebuilt_weights != 0)

    @step
    def cap_slope(self):
        return np.where(self.seen, super().cap_slope, 0.0)

    @step
    def slope_by_cap(self):
        return np.where(self.seen, super().slope_by_cap, -1.0)


@catalogue.mistake(why="A specification once had the two in this order.")
class cap_after_mask(CappedMask):
    """hidden logits of -inf become -cap"""


@catalogue.mistake(name="cap_after_mask", why="A specification once had them in this order.")
class cap_around_all(CappedMask):
    """the cap is taken around logits, bias and mask"""

    softcap_after_bias = True


@catalogue.mistake(why="Both orders are in use.")
class cap_after_bias(ScaledDotProduct):
    """the cap is taken around logits plus bias, or around logits alone where it should be so"""

    @step
    def softcap_after_bias(self):
        return not self.argument("softcap_after_bias")


@catalogue.mistake(why="The formula is remembered wrongly.")
class cap_formula(ScaledDotProduct):
    """x tanh(x / cap)"""

    @step
    def capped(self):
        x = self.capped_input
        return x if self.cap is None else x * np.tanh(x / self.cap)

    @step
    def cap_slope(self):
        if self.cap is None:
            return 1.0
        x = self.capped_input / self.cap
        return np.tanh(x) + x * (1 - np.tanh(x) ** 2)

    @step
    def slope_by_cap(self):
        x = self.capped_input / self.cap
        return -(x**2) * (1 - np.tanh(x) ** 2)


@catalogue.mistake(name="cap_formula", why="The formula is remembered wrongly.")
class cap_not_multiplied(ScaledDotProduct):
    """tanh(x / cap), not multiplied by the cap"""

    @step
    def capped(self):
        return self.capped_input if self.cap is None else np.tanh(self.capped_input / self.cap)

    @step
    def cap_slope(self):
        return 1.0 if self.cap is None else super().cap_slope / self.cap

    @step
    def slope_by_cap(self):
        return -self.capped_input / self.cap * self.cap_slope


@catalogue.mistake(name="cap_formula", why="The formula is remembered wrongly.")
class cap_not_divided(ScaledDotProduct):
    """cap tanh(x), x not divided by the cap"""

    @step
    def capped(self):
        return self.capped_input if self.cap is None else self.cap * np.tanh(self.capped_input)

    @step
    def cap_slope(self):
        return 1.0 if self.cap is None else self.cap * (1 - np.tanh(self.capped_input) ** 2)

    @step
    def slope_by_cap(self):
        return np.tanh(self.capped_input)


@catalogue.mistake(name="cap_formula", why="A cheaper bound takes the place of tanh.")
class cap_clipped(ScaledDotProduct):
    """logits are clipped at the cap"""

    @step
    def inside(self):
        return True if self.cap is None else abs(self.capped_input.real) <= self.cap.real

    @step
    def capped(self):
        return np.where(self.inside, self.capped_input, np.sign(self.capped_input.real) * (self.cap or 0.0))

    @step
    def cap_slope(self):
        return np.where(self.inside, 1.0, 0.0)

    @step
    def slope_by_cap(self):
        return np.where(self.inside, 0.0, np.sign(self.capped_input.real))


@catalogue.mistake(why="The derivative of the cap is forgotten.", sides=("backward",))
class cap_bwd_drop(ScaledDotProduct):
    """the backward lacks 1 - tanh**2"""

    cap_slope = 1.0


@catalogue.mistake(name="cap_bwd_drop", why="The stored logits are capped ones.", sides=("backward",))
class cap_bwd_of_capped(ScaledDotProduct):
    """the backward takes 1 - tanh**2 of the capped logits"""

    @step
    def cap_slope(self):
        return 1.0 if self.cap is None else 1 - np.tanh(np.tanh(self.capped_input / self.cap)) ** 2


@catalogue.mistake(name="cap_bwd_drop", why="The backward rebuilds logits without the cap.", sides=("backward",))
class cap_bwd_uncapped(ScaledDotProduct):
    """the backward rebuilds the weights from logits without the cap"""

    @step
    def capped(self):
        return self.capped_input


# ---------------------------------------------------------------------- bias, ALiBi, score_mod


@catalogue.mistake(why="A side path does not read them.")
class alibi_drop(ScaledDotProduct):
    """the slopes are ignored"""

    alibi_slopes = None
    d_alibi_slopes = 0.0


@catalogue.mistake(
    why="The slopes are computed inside, as if the number of heads were a power of two.",
)
class alibi_geom(ScaledDotProduct):
    """the slopes are one geometric sequence"""

    first = 1
    d_alibi_slopes = 0.0

    @step
    def alibi_slopes(self):
        if self.argument("alibi_slopes") is None:
            return None
        return 2.0 ** (-8.0 * (np.arange(self.heads) + self.first) / self.heads)


@catalogue.mistake(why="Heads are counted from 0.")
class alibi_off1(alibi_geom):
    """the exponent of the slopes starts at 0"""

    first = 0


@catalogue.mistake(why="Decoding forgets the length of the cache.")
class alibi_nooffset(ScaledDotProduct):
    """distances are counted from the upper left"""

    @step
    def distance(self):
        return np.abs(self.j - self.i)


@catalogue.mistake(
    name="alibi_nooffset",
    why="Distances come from the padded lengths.",
)
class alibi_padded_offset(ScaledDotProduct):
    """distances are counted from the lower right of the padded lengths"""

    @step
    def distance(self):
        return np.abs(self.j - self.i - (self.own_keys - self.queries))


@catalogue.mistake(why="A sign is lost where the distance is not an absolute value.")
class alibi_signed(ScaledDotProduct):
    """future keys get a bonus"""

    @step
    def distance(self):
        return -self.ahead


@catalogue.mistake(name="alibi_signed", why="A sign is lost.")
class alibi_bonus(ScaledDotProduct):
    """every distance is a bonus"""

    @step
    def distance(self):
        return -np.abs(self.ahead)


@catalogue.mistake(name="alibi_signed", why="Under causal the distance is i - j, and nothing else is tried.")
class alibi_future_free(ScaledDotProduct):
    """future keys have no penalty"""

    @step
    def distance(self):
        return np.maximum(-self.ahead, 0)


@catalogue.mistake(why="A side path does not read it.")
class bias_drop(ScaledDotProduct):
    """the bias is ignored"""

    bias = None
    d_bias = 0.0


@catalogue.mistake(name="bias_drop", why="The backward rebuilds logits without it.", sides=("backward",))
class bias_bwd_drop(ScaledDotProduct):
    """the backward rebuilds the weights without the bias"""

    bias = None


@catalogue.mistake(why="Scale and bias are applied in the other order.")
class bias_scaled(ScaledDotProduct):
    """the bias is scaled too"""

    @step
    def bias(self):
        given = self.argument("bias")
        return None if given is None else given * self.scale

    @step
    def d_bias(self):
        return self.scale * super().d_bias

    @step
    def d_scale(self):
        if self.argument("bias") is None:
            return super().d_scale
        given = np.where(np.isneginf(self.bias.real), 0.0, self.argument("bias"))
        return super().d_scale + (self.d_own_added * given).sum()


@catalogue.mistake(
    why="The bias of a square problem is read without the length of the cache.",
    variants=({"side": "left", "sign": 1}, {"side": "right", "sign": -1}),
)
class bias_nooffset(ScaledDotProduct):
    """the bias is read k - q keys too far to the {side}"""

    sign = 1

    @step
    def bias(self):
        given = self.argument("bias")
        return None if given is None else np.roll(given, self.sign * (self.own_keys - self.queries), axis=-1)

    @step
    def d_bias(self):
        return np.roll(super().d_bias, -self.sign * (self.own_keys - self.queries), axis=-1)


@catalogue.mistake(why="The compiled path has no hook.")
class score_mod_drop(ScaledDotProduct):
    """score_mod is not called"""

    score_mod = None
