"""Mistakes about the lse and the base of its logarithm, and about the axis of the softmax."""

import math

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct, divide
from refattn.definitions.steps import step
from refattn.mistakes.scaled_dot_product.base import catalogue


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
