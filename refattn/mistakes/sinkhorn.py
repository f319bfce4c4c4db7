"""How people get Sinkhorn attention wrong: the soft sort and its gradient; inside the blocks it is softmax attention."""

import numpy as np

from refattn.definitions.sinkhorn import Sinkhorn, log_sums_backward, move, transposed
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.scaled_dot_product import catalogue as dense

catalogue = Catalogue(
    Sinkhorn,
    built_on=dense,
    without=(
        "alibi_*", "bias_*", "cap_*", "causal_*", "dlse_ignored", "drop_*", "gqa_*", "keep_*", "lengths_*",
        "lse_*", "none_mask", "pattern_drop", "score_mod_drop", "segments_*", "sink_*", "tail_*", "window_*",
    ),
)  # fmt: skip
"""Without the mistakes with options that are not here."""


# ---------------------------------------------------------------------------------------------- the sort


@catalogue.mistake(why="In the limit the order does not matter.")
class sinkhorn_order(Sinkhorn):
    """columns are normalised before rows"""

    @step
    def half_steps(self):
        return ["down" if self.causal else "columns", "rows"] * self.iterations


@catalogue.mistake(why="range(1, iterations).")
class sinkhorn_iterations(Sinkhorn):
    """one iteration too few"""

    @step
    def iterations(self):
        return max(0, self.argument("iterations") - 1)


@catalogue.mistake(name="sinkhorn_iterations", why="The two lines of an iteration are parted by the end of the loop.")
class sinkhorn_half_iteration(Sinkhorn):
    """the last normalisation of columns is missing"""

    @step
    def half_steps(self):
        return super().half_steps[:-1]


@catalogue.mistake(why="A softmax over the blocks looks like enough of a sort.")
class sinkhorn_rows_alone(Sinkhorn):
    """only rows are normalised"""

    @step
    def half_steps(self):
        return ["rows"] * self.iterations


@catalogue.mistake(why="The noise is added to what goes into the iterations.")
class sinkhorn_noise(Sinkhorn):
    """the noise is not divided by the temperature"""

    @step
    def scores(self):
        return self.sort_logits / self.temperature + (0.0 if self.noise is None else self.noise)

    @step
    def d_temperature(self):
        scores = self.sort_logits / self.temperature
        return -np.where(self.d_scores == 0, 0.0, self.d_scores * scores).sum() / self.temperature


@catalogue.mistake(name="sinkhorn_noise", why="Noise is switched off at evaluation, and stays off.")
class sinkhorn_noise_drop(Sinkhorn):
    """the noise is left out"""

    noise = None


@catalogue.mistake(why="Its default hides it.")
class sinkhorn_temperature(Sinkhorn):
    """the temperature is left out"""

    temperature = 1.0
    d_temperature = 0.0


@catalogue.mistake(name="sinkhorn_temperature", why="An inverse temperature is the other convention.")
class sinkhorn_temperature_inverse(Sinkhorn):
    """the scores are multiplied by the temperature"""

    @step
    def temperature(self):
        return 1 / super().temperature

    @step
    def d_temperature(self):
        return -super().d_temperature * self.temperature**2


@catalogue.mistake(name="unshifted_softmax", why="exp of large scores overflows; those of a test do not.")
class sinkhorn_unshifted(Sinkhorn):
    """the sort is normalised without logarithms: exp of the scores first, as in the dtype that the call computes in"""

    @step
    def balance(self):
        narrow = self.storage.itemsize < 8
        grown = np.exp(np.where(self.may_move, self.scores, -np.inf))
        grown = [grown.astype(np.float32).astype(np.float64) if narrow else grown]
        for kind in self.half_steps:
            x = grown[-1]
            total = x.cumsum(-2) if kind == "down" else x.sum(-1 if kind == "rows" else -2, keepdims=True)
            grown.append(np.where(total == 0, 0.0, x / np.where(total == 0, 1.0, total)))
        return [np.log(x) for x in grown]


@catalogue.mistake(why="R moves block v to place u, or place v gets block u: both read well.")
class sinkhorn_transposed(Sinkhorn):
    """R is applied transposed"""

    @step
    def applied(self):
        return transposed(self.sorting)

    @step
    def sorted_keys(self):
        return move(self.applied, self.blocks(self.k), transposed(self.may_move))

    @step
    def sorted_values(self):
        return move(self.applied, self.blocks(self.v), transposed(self.may_move))

    @step
    def d_k(self):
        moved = move(self.sorting, self.d_sorted_keys, self.may_move)
        return self.joined(self.d_attention.d_k[..., self.block :, :] + moved)

    @step
    def d_v(self):
        moved = move(self.sorting, self.d_sorted_values, self.may_move)
        return self.joined(self.d_attention.d_v[..., self.block :, :] + moved)

    @step
    def d_sorting(self):
        return transposed(self.d_applied)


@catalogue.mistake(why="Only keys decide where to look, so only keys are sorted.")
class sinkhorn_values(Sinkhorn):
    """the values stay in their places"""

    @step
    def sorted_values(self):
        return np.broadcast_to(self.blocks(self.v), super().sorted_values.shape)

    @step
    def d_v(self):
        return self.joined(self.d_attention.d_v[..., self.block :, :] + self.d_sorted_values)

    @step
    def d_applied(self):
        return np.einsum("...ucd,...vcd->...uv", self.d_sorted_keys, self.blocks(self.k))


@catalogue.mistake(name="sinkhorn_values", why="A hard sort at evaluation is used for training too.")
class sinkhorn_hard(Sinkhorn):
    """every place gets the one block with the largest share"""

    @step
    def applied(self):
        best = self.sorting.argmax(-1)
        chosen = np.arange(self.places) == best[..., None]
        return 1.0 * (chosen & (self.sorting.max(-1, keepdims=True) > 0))

    d_applied = 0.0

    @step
    def d_sorting(self):
        return np.zeros_like(self.sorting)


# ---------------------------------------------------------------------------------------------- blocks


@catalogue.mistake(why="The sorted block is attended in place of the own one.")
class sinkhorn_own_block(Sinkhorn):
    """a block does not see itself"""

    @step
    def visible(self):
        seen = np.array(super().visible)
        alone = (np.arange(self.places) == 0)[:, None, None] if self.causal else False
        seen[..., self.block :] &= alone
        return seen


@catalogue.mistake(why="Local attention alone is left when the sort is switched off.")
class sinkhorn_sorted_block(Sinkhorn):
    """a block does not see the block put beside it"""

    @step
    def visible(self):
        seen = np.array(super().visible)
        seen[..., : self.block] = False
        return seen


@catalogue.mistake(why="A lower triangle includes the diagonal.")
class sinkhorn_causal(Sinkhorn):
    """under causal a block may be put at its own place"""

    @step
    def may_move(self):
        return np.tril(np.ones((self.places, self.places), dtype=bool)) if self.causal else super().may_move

    @step
    def visible(self):
        seen = np.array(super().visible)
        if self.causal:
            seen[0, :, : self.block] = True
        return seen


@catalogue.mistake(name="sinkhorn_causal", why="The columns of a masked matrix are normalised as a whole.")
class sinkhorn_causal_columns(Sinkhorn):
    """under causal a column is normalised over all places, later ones too"""

    @step
    def half_steps(self):
        return ["rows", "columns"] * self.iterations


@catalogue.mistake(name="causal_drop", why="The sort is masked, and the blocks themselves are not.")
class sinkhorn_own_not_causal(Sinkhorn):
    """under causal a query sees its whole own block"""

    @step
    def visible(self):
        seen = np.array(super().visible)
        seen[..., self.block :] = True
        return seen


@catalogue.mistake(why="The flag stops at a wrapper.")
class causal_drop(Sinkhorn):
    """causal is ignored"""

    causal = False


# ---------------------------------------------------------------------------------------------- gradients


@catalogue.mistake(sides=("backward",), why="A permutation has no gradient.")
class sinkhorn_grad(Sinkhorn):
    """the sort is a constant for the gradient"""

    @step
    def d_scores(self):
        return np.zeros_like(super().d_scores)


@catalogue.mistake(name="sinkhorn_grad", sides=("backward",), why="All iterations but the last run under no_grad.")
class sinkhorn_last_half_step_grad(Sinkhorn):
    """the gradient goes through the last half step alone"""

    @step
    def d_scores(self):
        d = np.where(self.sorting == 0, 0.0, self.d_sorting * self.sorting)
        if self.half_steps:
            d = log_sums_backward(self.balance[-2], self.half_steps[-1], d)
        return np.where(np.isneginf(self.balance[0]), 0.0, d)


@catalogue.mistake(
    name="sinkhorn_grad", sides=("backward",), why="Normalising is taken for a shift without a gradient."
)
class sinkhorn_exp_grad(Sinkhorn):
    """the gradient goes through exp alone, not through the normalisations"""

    @step
    def d_scores(self):
        return np.where(self.sorting == 0, 0.0, self.d_sorting * self.sorting)


@catalogue.mistake(
    name="sinkhorn_grad", sides=("backward",), why="The sort's gradient is taken of the keys, where it matters."
)
class sinkhorn_values_grad(Sinkhorn):
    """the sort learns from the keys alone"""

    @step
    def d_applied(self):
        return np.einsum("...ucd,...vcd->...uv", self.d_sorted_keys, self.blocks(self.k))


@catalogue.mistake(sides=("backward",), why="The unsort is an index in code with hard permutations.")
class unsort_grad(Sinkhorn):
    """sorted keys and values send their gradient back by R in place of its transpose"""

    @step
    def d_k(self):
        moved = move(self.applied, self.d_sorted_keys, self.may_move)
        return self.joined(self.d_attention.d_k[..., self.block :, :] + moved)

    @step
    def d_v(self):
        moved = move(self.applied, self.d_sorted_values, self.may_move)
        return self.joined(self.d_attention.d_v[..., self.block :, :] + moved)


@catalogue.mistake(name="temperature_grad", sides=("backward",), why="The temperature is a setting in most code.")
class sinkhorn_temperature_grad(Sinkhorn):
    """the temperature gets no gradient"""

    d_temperature = 0.0
