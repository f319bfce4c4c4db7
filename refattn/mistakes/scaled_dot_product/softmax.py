"""Mistakes about the softmax: empty rows, range, tiles of an online softmax."""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct, divide
from refattn.definitions.steps import einsum, step
from refattn.mistakes.scaled_dot_product.base import TILES, arithmetic, catalogue, last_tile

# ---------------------------------------------------------------------- empty rows, hidden NaN


class EmptyRows(ScaledDotProduct):
    """Names the rows that see nothing."""

    @step
    def empty(self):
        return self.real_rows & (self.row_sum == 0)


@catalogue.mistake(why="0 / 0, or -inf - (-inf).")
class empty_row_nan(EmptyRows):
    """a row without keys is NaN"""

    @step
    def weights(self):
        return np.where(self.empty, np.nan, super().weights)

    @step
    def lse(self):
        return np.where(self.empty[..., 0], np.nan, super().lse)


@catalogue.mistake(name="empty_row_nan", why="0 / 0: the row sum is not looked at.")
class empty_output_nan(EmptyRows):
    """the output of a row without keys is NaN"""

    @step
    def weights(self):
        return np.where(self.empty, np.nan, super().weights)


@catalogue.mistake(
    name="empty_row_nan", why="The running maximum is still -inf after the first tile: -inf - (-inf).", variants=TILES
)
class empty_tile_nan(ScaledDotProduct):
    """a row whose first tile of {tile} keys is hidden is NaN"""

    @step
    def nothing_yet(self):
        return self.real_rows & ~self.seen[..., : self.tile].any(-1, keepdims=True)

    @step
    def weights(self):
        return np.where(self.nothing_yet, np.nan, super().weights)

    @step
    def lse(self):
        return np.where(self.nothing_yet[..., 0], np.nan, super().lse)


@catalogue.mistake(
    why="An empty row is given the value that seemed neutral.",
    variants=({"number": "+inf"}, {"number": "0"}, {"number": "nan"}),
)
class merge_empty(EmptyRows):
    """the lse of a row without keys is {number}"""

    number = "+inf"

    @step
    def lse(self):
        return np.where(self.empty[..., 0], float(self.number), super().lse)


@catalogue.mistake(why="0 * NaN = NaN: weights of 0 are multiplied with what is hidden.")
class masked_value_leak(ScaledDotProduct):
    """0 times a hidden NaN enters the output"""

    @step
    def output(self):
        return einsum("...hqk,...hke->...hqe", self.used_weights, self.values_of_head)

    @step
    def d_used_weights(self):
        return einsum("...hqe,...hke->...hqk", self.d_output, self.values_of_head)

    @step
    def touched(self):
        return np.ones(self.pairs, bool)


@catalogue.mistake(name="masked_value_leak", why="NaN + -inf = NaN: the mask is added.")
class masked_logit_leak(ScaledDotProduct):
    """a hidden NaN logit stays NaN under -inf"""

    @step
    def masked_logits(self):
        return self.logits + np.where(self.seen, 0.0, -np.inf)

    @step
    def touched(self):
        return super().touched | np.isnan(self.masked_logits)


# ---------------------------------------------------------------------- range


LARGEST = float(np.finfo(np.float32).max)
FINITE = (
    {"name": "-1e4", "number": -1e4},
    {"name": "-2e4", "number": -2e4},
    {"name": "-5e4", "number": -5e4},
    {"name": "-65504", "number": -65504.0},
    {"name": "-1e5", "number": -1e5},
    {"name": "-1e6", "number": -1e6},
    {"name": "-1e9", "number": -1e9},
    {"name": "-1e30", "number": -1e30},
    {"name": "-0.7 float32 max", "number": -0.7 * LARGEST},
    {"name": "-float32 max", "number": -LARGEST},
)
NEAR = tuple(x for x in FINITE if x["number"] >= -1e9)


class Sentinel(ScaledDotProduct):
    """Hidden logits are a number, in place of -inf."""

    number = -1e4

    @step
    def hidden_logits(self):
        return self.number

    @step
    def masked_logits(self):
        return np.where(self.seen, self.logits, np.where(self.real_rows, self.hidden_logits, -np.inf))


@catalogue.mistake(why="A large number stands for infinity.", variants=FINITE)
class finite_sentinel(Sentinel):
    """hidden logits are {name}, not -inf"""


@catalogue.mistake(name="finite_sentinel", why="A float mask of large numbers is added.", variants=NEAR)
class finite_sentinel_added(Sentinel):
    """{name} is added to hidden logits"""

    @step
    def hidden_logits(self):
        kernel = arithmetic(self)
        logits = np.where(np.isfinite(self.logits), self.logits, 0.0).real.astype(kernel)
        return (logits + kernel(self.number)).astype(np.float64)

    @step
    def touched(self):
        """The mask is a constant: hidden logits have gradients."""
        return super().touched | (self.rebuilt_weights != 0)


class Floored(ScaledDotProduct):
    """A running maximum that starts at a number: smaller exponentials underflow in the kernel's arithmetic."""

    number = 0.0

    @step
    def largest(self):
        return np.maximum(super().largest, self.number)

    @step
    def exponential(self):
        kernel = arithmetic(self)
        return lambda x: np.exp(x.real).astype(kernel).astype(np.float64)


@catalogue.mistake(name="finite_sentinel", why="The running maximum has to start somewhere.", variants=NEAR)
class maximum_floored(Floored):
    """the running maximum starts at {name}"""


@catalogue.mistake(why="A zeroed buffer, or a guard against -inf that is kept.")
class max_clamped0(Floored):
    """the running maximum starts at 0"""


class InRange(ScaledDotProduct):
    """exp in the range of the kernel's arithmetic."""

    @step
    def exponential(self):
        top, least = (88.7, -103.9) if arithmetic(self) is np.float32 else (709.7, -745.1)
        return lambda x: np.where(x > top, np.inf, np.where(x < least, 0.0, np.exp(np.minimum(x, top))))


@catalogue.mistake(why="The textbook's formula.")
class unshifted_softmax(InRange):
    """the maximum is not subtracted before exp, which overflows or underflows in the arithmetic's range"""

    maximum = 0.0

    @step
    def weights(self):
        seen = self.seen.any(-1, keepdims=True) & self.real_rows
        return np.where(seen, self.exponentials / self.row_sum, 0.0)


@catalogue.mistake(why="A guard against division by zero.", variants=({"eps": 1e-6}, {"eps": 1e-5}, {"eps": 1e-4}))
class row_sum_eps(ScaledDotProduct):
    """{eps} is added to the row sum"""

    eps = 1e-6

    @step
    def key_sum(self):
        return super().key_sum + self.eps


# ---------------------------------------------------------------------- tiles of an online softmax


class Online(ScaledDotProduct):
    """Names what an online softmax knows when it meets a key."""

    tile = 4

    @step
    def running(self):
        """The maximum at the end of each key's tile."""
        end = np.minimum((np.arange(self.keys) // self.tile + 1) * self.tile, self.keys) - 1
        top = np.take(np.maximum.accumulate(self.masked_logits.real, axis=-1), end, axis=-1)
        return np.where(np.isneginf(top), 0.0, top)

    @step
    def unscaled(self):
        """exp(logit - maximum at the time)"""
        return self.exponential(self.masked_logits - self.running)


@catalogue.mistake(
    why="The accumulator is not multiplied by exp(old - new maximum).", sides=("forward",), variants=TILES
)
class rescale_missing(Online):
    """the output is not rescaled from tile to tile of {tile} keys"""

    @step
    def weights(self):
        return np.where(self.real_rows, divide(self.unscaled, self.row_sum), 0.0)


@catalogue.mistake(
    name="rescale_missing", why="Neither is multiplied by exp(old - new maximum).", sides=("forward",), variants=TILES
)
class rescale_missing_everywhere(Online):
    """output and row sum are not rescaled from tile to tile of {tile} keys"""

    @step
    def exponentials(self):
        return self.unscaled


@catalogue.mistake(
    why="The row sum is not multiplied by exp(old - new maximum), the accumulator is.",
    sides=("forward",),
    variants=TILES,
)
class online_sum(Online):
    """the row sum is not rescaled from tile to tile of {tile} keys"""

    @step
    def key_sum(self):
        return self.unscaled.sum(-1, keepdims=True)


@catalogue.mistake(
    name="online_sum", why="The factor exp(old - new maximum) is applied twice.", sides=("forward",), variants=TILES
)
class online_sum_twice(Online):
    """the row sum is rescaled twice from tile to tile of {tile} keys"""

    @step
    def key_sum(self):
        return self.exponential(self.masked_logits + self.running - 2 * self.maximum).sum(-1, keepdims=True)


@catalogue.mistake(why="The tile's share is assigned, not added.", sides=("both", "forward"), variants=TILES)
class accumulator_overwritten(ScaledDotProduct):
    """the output is the last share of a tile of {tile} keys alone"""

    @step
    def dropout(self):
        return super().dropout * last_tile(self.keys, self.tile)


@catalogue.mistake(
    name="accumulator_overwritten", why="The loop ends after its first turn.", sides=("both", "forward"), variants=TILES
)
class first_tile_only(ScaledDotProduct):
    """the output is the share of the first tile of {tile} keys alone"""

    @step
    def dropout(self):
        return super().dropout * (np.arange(self.keys) < self.tile)


@catalogue.mistake(why="The running maximum is not what is stored.", sides=("both", "forward"), variants=TILES)
class lse_partial_max(ScaledDotProduct):
    """the lse has the maximum of the last tile of {tile} keys"""

    @step
    def last_maximum(self):
        last = self.masked_logits[..., last_tile(self.keys, self.tile)]
        return last.real.max(-1, keepdims=True, initial=-np.inf)

    @step
    def lse(self):
        return super().lse + (self.last_maximum - self.maximum)[..., 0]
