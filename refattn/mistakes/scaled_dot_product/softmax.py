"""Mistakes about the softmax: empty rows, range, sinks, the lse, dropout, tiles of an online softmax."""

import math

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


# ---------------------------------------------------------------------- sinks


@catalogue.mistake(why="Sinks are zero at first, and nothing shows.")
class sink_drop(ScaledDotProduct):
    """the sinks are ignored"""

    sinks = None
    d_sinks = 0.0


@catalogue.mistake(name="sink_drop", why="The backward knows no sinks.", sides=("backward",), arrays=("sinks",))
class sink_gradient_drop(ScaledDotProduct):
    """the sinks get no gradient"""

    d_sinks = 0.0


@catalogue.mistake(why="Only the logits are shifted.")
class sink_unshifted(ScaledDotProduct):
    """the maximum is not subtracted from the sinks"""

    @step
    def largest(self):
        return self.masked_logits.real.max(-1, keepdims=True, initial=-np.inf)

    @step
    def sink_exponentials(self):
        return np.broadcast_to(self.exponential(self.sink_logits), (*self.pairs[:-1], self.sink_logits.shape[-1]))


@catalogue.mistake(name="sink_unshifted", why="The sinks are counted after the loop over keys.")
class sink_outside_maximum(InRange):
    """the sinks are left out of the maximum: exp(sink - maximum) overflows"""

    @step
    def largest(self):
        return self.masked_logits.real.max(-1, keepdims=True, initial=-np.inf)


@catalogue.mistake(why="A sink enters in the loop and at its end.")
class sink_twice(ScaledDotProduct):
    """the sinks are counted twice"""

    @step
    def sink_exponentials(self):
        return 2 * super().sink_exponentials


@catalogue.mistake(name="sink_twice", why="Every split counts the sinks, then the splits are merged.", variants=TILES)
class sink_every_split(ScaledDotProduct):
    """the sinks are counted in every split of {tile} keys"""

    @step
    def sink_exponentials(self):
        return max(1, -(-self.keys // self.tile)) * super().sink_exponentials


@catalogue.mistake(why="The axis of heads is (group, head of the group) in one place, the reverse in the other.")
class sink_heads(ScaledDotProduct):
    """the sinks are laid out by group, not by head"""

    @step
    def regrouped(self):
        """Whose sinks each head gets."""
        return np.arange(self.heads).reshape(self.key_heads, -1).T.ravel()

    @step
    def sinks(self):
        given = self.argument("sinks")
        return None if given is None else given[self.regrouped]

    @step
    def d_sinks(self):
        return super().d_sinks[np.argsort(self.regrouped)]


@catalogue.mistake(why="Both conventions of the lse are in use.")
class sink_lse(ScaledDotProduct):
    """the lse leaves the sinks out, or counts them where it should not"""

    @step
    def lse_includes_sinks(self):
        return not self.argument("lse_includes_sinks")


@catalogue.mistake(name="sink_lse", why="The lse of the keys is what is stored.", sides=("backward",))
class sink_saved_lse(ScaledDotProduct):
    """the backward recomputes the weights from an lse without the sinks"""

    @step
    def saved_lse(self):
        return np.where(self.real_rows, self.maximum + np.log(self.key_sum), -np.inf)[..., 0]


@catalogue.mistake(
    why="Rows, terms or factors of the sum are lost.",
    sides=("backward",),
    arrays=("sinks",),
    variants=(
        {"says": "the sinks' gradient lacks the cotangent of the lse", "d_lse": 0.0},
        {"says": "the sinks' gradient lacks the row term", "delta": 0.0},
        {"says": "the sinks' gradient sums over padded rows too", "visible_by_query_lengths": True},
    ),
)
class sink_grad(ScaledDotProduct):
    """{says}"""

    @step
    def d_sink_logits(self):
        d_lse = self.d_lse[..., None] if self.lse_includes_sinks and np.ndim(self.d_lse) else 0.0
        return np.where(self.sink_weights == 0, 0.0, self.sink_weights * (d_lse - self.delta))


@catalogue.mistake(
    name="sink_grad",
    why="Rows of the sum are lost.",
    sides=("backward",),
    arrays=("sinks",),
    variants=(
        {"which": "batch entry 0", "axis": "batch", "first": True},
        {"which": "the last batch entry", "axis": "batch", "first": False},
        {"which": "the first row", "axis": "rows", "first": True},
        {"which": "the last row", "axis": "rows", "first": False},
    ),
)
class sink_grad_rows(ScaledDotProduct):
    """the sinks' gradient is that of {which}"""

    axis, first = "rows", True

    @step
    def d_sinks(self):
        x = self.d_sink_logits
        x = x.reshape(-1, *x.shape[-3:])
        end = slice(0, 1) if self.first else slice(-1, None)
        x = x[end] if self.axis == "batch" else x[..., end, :]
        return x.sum((0, 2)).reshape(np.shape(self.argument("sinks")))


@catalogue.mistake(name="sink_grad", why="A sign is lost.", sides=("backward",), arrays=("sinks",))
class sink_grad_sign(ScaledDotProduct):
    """the sinks' gradient has the wrong sign"""

    @step
    def d_sinks(self):
        return -super().d_sinks


# ---------------------------------------------------------------------- lse and base


@catalogue.mistake(
    why="Kernels work in base 2 and forget to convert.",
    variants=(
        {"how": "a logarithm to base 2", "factor": 1 / math.log(2)},
        {"how": "converted from base 2 though it is natural", "factor": math.log(2)},
    ),
)
class lse_base2(ScaledDotProduct):
    """the lse is {how}"""

    factor = 1 / math.log(2)

    @step
    def lse(self):
        return self.factor * super().lse

    @step
    def d_lse(self):
        return self.factor * super().d_lse


@catalogue.mistake(
    name="lse_base2", why="Maximum and sum are converted apart.",
    variants=(
        {"how": "the lse has the maximum in base 2", "of_maximum": 1 / math.log(2), "of_sum": 1.0},
        {"how": "the lse has the maximum converted from base 2", "of_maximum": math.log(2), "of_sum": 1.0},
        {"how": "the lse has the logarithm of the sum in base 2", "of_maximum": 1.0, "of_sum": 1 / math.log(2)},
    ),
)  # fmt: skip
class lse_half_base2(ScaledDotProduct):
    """{how}"""

    of_maximum = of_sum = 1.0

    @step
    def lse(self):
        total = self.row_sum if self.lse_includes_sinks else self.key_sum
        lse = self.of_maximum * self.maximum + self.of_sum * np.log(total)
        return np.where(self.real_rows, lse, -np.inf)[..., 0]

    @step
    def d_lse(self):
        """The maximum, which is subtracted and added, is held fixed."""
        return self.of_sum * super().d_lse


@catalogue.mistake(name="lse_base2", why="The stored lse is natural, exp2 is what rebuilds.", sides=("backward",))
class lse_base2_backward(ScaledDotProduct):
    """the backward takes an lse to base 2 for a natural one"""

    @step
    def saved_lse(self):
        return super().saved_lse / math.log(2)


@catalogue.mistake(name="lse_base2", why="The stored lse is in base 2, and is not converted back.", sides=("backward",))
class lse_natural_backward(ScaledDotProduct):
    """the backward converts a natural lse as if it were in base 2"""

    @step
    def saved_lse(self):
        return super().saved_lse * math.log(2)


@catalogue.mistake(why="exp2 is cheaper, and its factor log2(e) is forgotten.")
class exp2_nolog2e(ScaledDotProduct):
    """2**x in place of e**x"""

    @step
    def exponential(self):
        return np.exp2

    @step
    def d_softmax(self):
        return math.log(2) * super().d_softmax

    @step
    def lse_share(self):
        """The maximum, which is subtracted and added, is held fixed."""
        return math.log(2) * super().lse_share

    @step
    def d_sink_logits(self):
        return math.log(2) * super().d_sink_logits


@catalogue.mistake(name="exp2_nolog2e", why="exp2 is cheaper, and its factor log2(e) is forgotten.")
class exp2_nolog2e_underived(ScaledDotProduct):
    """2**x in place of e**x, in a backward that knows nothing of it"""

    @step
    def exponential(self):
        return np.exp2


@catalogue.mistake(name="exp2_nolog2e", why="exp2 is cheaper, and its factor log2(e) is forgotten.")
class exp2_and_log2(exp2_nolog2e):
    """2**x in place of e**x, and the lse in base 2"""

    @step
    def lse(self):
        total = self.row_sum if self.lse_includes_sinks else self.key_sum
        return np.where(self.real_rows, self.maximum + np.log2(total), -np.inf)[..., 0]

    @step
    def lse_share(self):
        return super().lse_share / math.log(2)

    @step
    def d_sink_logits(self):
        d_lse = self.d_lse[..., None] if self.lse_includes_sinks else 0.0
        return np.where(self.sink_weights == 0, 0.0, self.sink_weights * (d_lse - math.log(2) * self.delta))


@catalogue.mistake(name="exp2_nolog2e", why="The factor is folded into the scale, which sinks have not.")
class exp2_of_sinks(ScaledDotProduct):
    """the sinks enter as 2**(sink - maximum)"""

    @step
    def sink_exponentials(self):
        return np.exp2((self.sink_logits - self.maximum).real)

    @step
    def d_sink_logits(self):
        return math.log(2) * super().d_sink_logits


@catalogue.mistake(name="exp2_nolog2e", why="The factor is folded into the scale, which the bias has not.")
class exp2_of_bias(ScaledDotProduct):
    """the bias is added where logits are in base 2 already"""

    @step
    def added(self):
        return math.log(2) * super().added

    @step
    def d_added(self):
        return math.log(2) * super().d_added


@catalogue.mistake(why="The axis of heads and that of rows are in another order.", arrays=())
class lse_layout(ScaledDotProduct):
    """the lse is (..., q, h)"""

    @step
    def lse(self):
        return np.swapaxes(super().lse, -1, -2)


@catalogue.mistake(name="lse_layout", why="The buffer is (q, h), its shape (h, q).")
class lse_memory(ScaledDotProduct):
    """the lse is stored as (..., q, h) and read as (..., h, q)"""

    @step
    def lse(self):
        return np.swapaxes(super().lse, -1, -2).reshape(super().lse.shape)

    @step
    def d_lse(self):
        d = super().d_lse
        return np.swapaxes(d.reshape(*d.shape[:-2], d.shape[-1], d.shape[-2]), -1, -2)


@catalogue.mistake(name="lse_layout", why="The backward reads the buffer in another order.", sides=("backward",))
class lse_memory_backward(ScaledDotProduct):
    """the backward reads the lse (..., h, q) as (..., q, h)"""

    @step
    def saved_lse(self):
        right = super().saved_lse
        return np.swapaxes(right.reshape(*right.shape[:-2], right.shape[-1], right.shape[-2]), -1, -2)


@catalogue.mistake(why="The axis is counted from the wrong end.")
class softmax_wrong_axis(ScaledDotProduct):
    """the softmax runs over the queries"""

    @step
    def weights(self):
        finite = np.where(np.isneginf(self.masked_logits.real), 0.0, self.masked_logits.real)
        p = self.exponential(self.masked_logits - finite.max(-2, keepdims=True, initial=-np.inf))
        return divide(p, p.sum(-2, keepdims=True))

    @step
    def d_softmax(self):
        delta = (self.rebuilt_weights * self.d_weights).sum(-2, keepdims=True)
        return self.rebuilt_weights * (self.d_weights - delta)

    @step
    def lse_share(self):
        return divide(self.exponentials, self.row_sum if self.lse_includes_sinks else self.key_sum)

    @step
    def d_sink_logits(self):
        d_lse = self.d_lse[..., None] if self.lse_includes_sinks else 0.0
        return self.sink_weights * d_lse


# ---------------------------------------------------------------------- dropout


@catalogue.mistake(why="The flag of training is not handed on.")
class drop_ignored(ScaledDotProduct):
    """no weight is dropped"""

    dropout_mask = None
    dropout_rate = 0.0


@catalogue.mistake(why="The factor 1 / (1 - rate) is forgotten.")
class drop_scale(ScaledDotProduct):
    """kept weights are not scaled up"""

    dropout_rate = 0.0


@catalogue.mistake(name="drop_scale", why="The two factors are confused.")
class drop_scale_rate(ScaledDotProduct):
    """kept weights are scaled by 1 / rate"""

    @step
    def dropout_rate(self):
        given = self.argument("dropout_rate")
        return 1 - given if given else given


@catalogue.mistake(why="Weights are dropped before they are summed.")
class drop_rowsum(ScaledDotProduct):
    """dropped weights are missing from the row sum"""

    @step
    def keep(self):
        return np.ones(self.pairs) if self.dropout_mask is None else np.broadcast_to(self.dropout_mask, self.pairs)

    @step
    def row_sum(self):
        return super().row_sum - (self.exponentials * (1 - self.keep)).sum(-1, keepdims=True)

    @step
    def d_softmax(self):
        return self.rebuilt_weights * (self.d_weights - self.keep * self.delta)

    @step
    def lse_share(self):
        return super().lse_share * self.keep if self.lse_includes_sinks else super().lse_share


@catalogue.mistake(
    why="The mask is drawn again, or read with other strides.",
    variants=(
        {"how": "that of query 0 for all", "axis": -2},
        {"how": "that of head 0 for all", "axis": -3},
        {"how": "that of batch entry 0 for all", "axis": -4},
        {"how": "that of key 0 for all", "axis": -1},
    ),
)
class drop_mask_mismatch(ScaledDotProduct):
    """the dropout mask is {how}"""

    axis = -2

    @step
    def dropout(self):
        right = super().dropout
        if right.ndim < -self.axis:
            return right
        first = np.arange(min(1, right.shape[self.axis]))
        return np.broadcast_to(np.take(right, first, axis=self.axis), right.shape)


@catalogue.mistake(name="drop_mask_mismatch", why="True means keep in one library, drop in the other.")
class drop_inverted(ScaledDotProduct):
    """the dropout mask says which weights are dropped"""

    @step
    def dropout_mask(self):
        given = self.argument("dropout_mask")
        return None if given is None else ~np.asarray(given, bool)


@catalogue.mistake(name="drop_mask_mismatch", why="Rows and columns of the mask are exchanged.")
class drop_transposed(ScaledDotProduct):
    """the dropout mask is transposed"""

    @step
    def dropout(self):
        right = super().dropout
        return np.swapaxes(right, -1, -2) if right.shape[-1] == right.shape[-2] else right


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
