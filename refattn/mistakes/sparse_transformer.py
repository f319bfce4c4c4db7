"""How people get Sparse Transformer attention wrong: where the two parts begin and end, and which head takes which."""

import numpy as np

from refattn.definitions.sparse_transformer import SparseTransformer
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.scaled_dot_product import catalogue as dense

catalogue = Catalogue(SparseTransformer, built_on=dense, without=("pattern_drop",))


# ---------------------------------------------------------------------------------------------- the strided pattern


@catalogue.mistake(why="The paper's run has stride + 1 keys, that of its code stride.")
class sparse_local_off1(SparseTransformer):
    """the run holds stride keys where stride + 1 are due, or the other way round"""

    @step
    def run_length(self):
        return self.stride + (self.variant == "code")


@catalogue.mistake(
    name="sparse_local_off1", why="The run ends one too early; in a merged head the union hides most of it."
)
class sparse_run_short(SparseTransformer):
    """the farthest key of the run is missing"""

    @step
    def visible_by_pattern(self):
        right = super().visible_by_pattern
        if self.pattern == "fixed":
            return right
        return right & ((self.distance_back != self.run_length - 1) | (self.distance_back == 0))


@catalogue.mistake(why="The multiples are built once as columns, not as distances.")
class sparse_stride_absolute(SparseTransformer):
    """the multiples are those of the position"""

    @step
    def second_part(self):
        if self.pattern == "fixed":
            return super().second_part
        return ((self.j % self.stride == 0) & self.not_later)[None]


@catalogue.mistake(why="Code permutes tokens by t mod stride and forgets that the last row may be short.")
class sparse_tail_dropped(SparseTransformer):
    """queries beyond the last full row of stride tokens see only themselves of the second part"""

    @step
    def second_part(self):
        whole = self.keys // self.size * self.size
        own = self.i == self.j
        return super().second_part & ((self.i < whole) | own)


# ---------------------------------------------------------------------------------------------- the fixed pattern


@catalogue.mistake(why="Summary columns are counted from the block's beginning.")
class sparse_summary_columns(SparseTransformer):
    """the summary columns begin each block"""

    @step
    def last_column(self):
        return (self.summary or 0) + self.offset_of_columns


@catalogue.mistake(
    name="sparse_summary_columns",
    why="The paper prints the upper residue as the stride.",
    variants=[
        {"what": "one further to the right, as the paper prints them", "by": 1},
        {"what": "one too far to the left", "by": -1},
    ],
)
class sparse_columns_moved(SparseTransformer):
    """the summary columns stand {what}"""

    by = 1

    @step
    def second_part(self):
        if self.pattern != "fixed":
            return super().second_part
        residue = (self.j - self.by) % self.stride
        return (residue >= self.last_column - self.summary) & (residue < self.last_column) & self.not_later


@catalogue.mistake(name="sparse_summary_columns", why="One layout is built for all heads.")
class sparse_columns_shared(SparseTransformer):
    """every head has the same summary columns"""

    summary_offsets = None


@catalogue.mistake(name="sparse_summary_columns", why="A residue of the stride never occurs, and is counted.")
class sparse_columns_one_less(SparseTransformer):
    """the last of the summary columns is missing"""

    @step
    def second_part(self):
        if self.pattern != "fixed":
            return super().second_part
        return super().second_part & (self.j % self.stride != self.last_column - 1)


@catalogue.mistake(why="The own block is left to the first part, which another head has.")
class sparse_summary_own_block(SparseTransformer):
    """summary columns of the own block are not seen"""

    @step
    def second_part(self):
        if self.pattern != "fixed" or self.sharing == "merged":
            return super().second_part
        return super().second_part & (self.i // self.size != self.j // self.size)


@catalogue.mistake(why="The run of the strided pattern is reused.")
class sparse_fixed_run(SparseTransformer):
    """the first part of the fixed pattern is a run of stride keys, not the own block"""

    @step
    def first_part(self):
        return self.not_later & (self.distance_back < self.stride) if self.pattern == "fixed" else super().first_part


# ---------------------------------------------------------------------------------------------- heads


class _OnePart(SparseTransformer):
    """A merged head that sees one of its parts."""

    part = "first"

    @step
    def takes_first(self):
        return np.full((self.heads, 1, 1), self.part == "first")

    @step
    def takes_second(self):
        return np.full((self.heads, 1, 1), self.part == "second")


class _FirstPart(_OnePart):
    """The first part alone."""


class _SecondPart(_OnePart):
    """The second part alone."""

    part = "second"


class TwoSoftmaxes(SparseTransformer):
    """A merged head as the mean of two attentions."""

    @step
    def calls(self):
        """The attentions of the two parts."""
        return tuple(part(self.arguments, storage=self.storage) for part in (_FirstPart, _SecondPart))

    @step
    def output(self):
        return sum(call.output for call in self.calls) / 2 if self.sharing == "merged" else super().output


@catalogue.mistake(why="Each part is an attention, and a merged head is taken for their mean.")
class sparse_union_mean(TwoSoftmaxes):
    """a merged head is the mean of two softmaxes"""

    @step
    def pulled(self):
        """The backward of both attentions, each given half the cotangent, and that of the lse, which is the right one."""
        halves = [call.pull(output=self.d_output / 2) for call in self.calls]
        return (*halves, SparseTransformer(self.arguments, storage=self.storage).pull(lse=self.d_lse))

    @step
    def d_q(self):
        return sum(call.d_q for call in self.pulled) if self.sharing == "merged" else super().d_q

    @step
    def d_k(self):
        return sum(call.d_k for call in self.pulled) if self.sharing == "merged" else super().d_k

    @step
    def d_v(self):
        return sum(call.d_v for call in self.pulled) if self.sharing == "merged" else super().d_v

    @step
    def d_bias(self):
        return sum(call.d_bias for call in self.pulled) if self.sharing == "merged" else super().d_bias

    @step
    def d_scale(self):
        return sum(call.d_scale for call in self.pulled) if self.sharing == "merged" else super().d_scale


@catalogue.mistake(
    name="sparse_union_mean", why="The parts' lse are at hand, and are joined.", sides=("both", "forward"), arrays=()
)
class sparse_union_mean_lse(TwoSoftmaxes):
    """a merged head is the mean of two softmaxes, and its lse that of both together"""

    @step
    def lse(self):
        return np.logaddexp(*(call.lse for call in self.calls)) if self.sharing == "merged" else super().lse


@catalogue.mistake(name="sparse_union_mean", why="The parts are merged by their lse as if they had no key in common.")
class sparse_key_twice(SparseTransformer):
    """the key that both parts hold is counted twice"""

    @step
    def times(self):
        """How often a pair counts, (h, t, t)"""
        both = self.takes_first & self.takes_second & self.first_part & self.second_part
        return 1.0 + both

    @step
    def exponentials(self):
        return self.times * super().exponentials

    @step
    def rebuilt_weights(self):
        return self.times * super().rebuilt_weights if self.is_handed("lse") else super().rebuilt_weights


@catalogue.mistake(why="The halves of the heads are exchanged, or the parity of the layers.")
class sparse_heads_exchanged(SparseTransformer):
    """the second part stands where the first is due, and the other way round"""

    @step
    def takes_first(self):
        return super().takes_first if self.sharing == "merged" else ~super().takes_first


@catalogue.mistake(why="One layout is built, that of merged heads.")
class sparse_heads_merged(SparseTransformer):
    """every head sees both parts"""

    sharing = "merged"


@catalogue.mistake(why="h // 2 heads take the first part where ceil(h / 2) are due.")
class sparse_heads_split(SparseTransformer):
    """of an odd number of heads the middle one takes the second part"""

    @step
    def takes_first(self):
        if self.sharing != "split":
            return super().takes_first
        return np.arange(self.heads)[:, None, None] < self.heads // 2


# ---------------------------------------------------------------------------------------------- order


@catalogue.mistake(why="The layout is symmetric, and nothing hides the future.")
class causal_drop(SparseTransformer):
    """the pattern is seen in both directions"""

    @step
    def visible_by_pattern(self):
        right = super().visible_by_pattern
        return right | np.swapaxes(right, -1, -2)


@catalogue.mistake(why="j < i for j <= i.")
class causal_strict(SparseTransformer):
    """a query does not see its own key"""

    @step
    def visible_by_pattern(self):
        return super().visible_by_pattern & (self.i != self.j)


@catalogue.mistake(why="The layout is passed and not used.")
class sparse_dense(SparseTransformer):
    """all earlier keys are seen"""

    @step
    def visible_by_pattern(self):
        return np.broadcast_to(self.not_later, (self.heads, self.queries, self.keys))
