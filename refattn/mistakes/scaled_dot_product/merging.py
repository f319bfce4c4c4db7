"""Mistakes in merging partial results: splits of the keys whose outputs and lse are put together afterwards."""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct, divide
from refattn.definitions.steps import step
from refattn.mistakes.scaled_dot_product.base import catalogue

SPLITS = tuple({"splits": n} for n in (2, 3, 4, 8))
FORWARD = ("forward",)


class Split(ScaledDotProduct):
    """Keys in equal splits, each with a softmax of its own."""

    splits = 2

    @step
    def split_of_key(self):
        return np.arange(self.keys) // max(1, -(-self.keys // self.splits))

    @step
    def split_lse(self):
        """(..., h, q, s), without sinks"""
        sums = np.stack([x.sum(-1) for x in self.by_split(self.exponentials)], axis=-1)
        return np.where(self.real_rows, self.maximum + np.log(sums), -np.inf)

    @step
    def split_weights(self):
        """The weights within each split, (..., h, q, k)."""
        parts = [divide(x, x.sum(-1, keepdims=True)) for x in self.by_split(self.exponentials)]
        return np.where(self.real_rows, np.concatenate(parts, axis=-1), 0.0)

    @step
    def of_splits(self):
        """What each split counts in the merged result, (..., h, q, s)."""
        return np.ones(self.split_lse.shape)

    def by_split(self, x):
        return [x[..., self.split_of_key == s] for s in range(int(self.split_of_key.max(initial=0)) + 1)]


@catalogue.mistake(
    name="merge_empty", why="0 / 0 in the split, or -inf - (-inf) in the merge.", sides=FORWARD, variants=SPLITS
)
class merge_empty_split(Split):
    """a row is NaN if one of {splits} splits of the keys holds none that it sees"""

    @step
    def none_seen(self):
        return self.real_rows & np.isneginf(self.split_lse).any(-1, keepdims=True)

    @step
    def weights(self):
        return np.where(self.none_seen, np.nan, super().weights)

    @step
    def lse(self):
        return np.where(self.none_seen[..., 0], np.nan, super().lse)


class Merged(Split):
    """The weights of splits that are merged in another way."""

    @step
    def weights(self):
        return self.split_weights * np.take(self.of_splits, self.split_of_key, axis=-1)


@catalogue.mistake(
    name="lse_base2", why="The splits' lse are natural, the merge takes powers of 2.", sides=FORWARD, variants=SPLITS
)
class merge_base2(Merged):
    """{splits} splits of the keys are merged with powers of 2 of their natural lse"""

    @step
    def powers(self):
        top = np.where(np.isneginf(self.split_lse), 0.0, self.split_lse).max(-1, keepdims=True)
        return np.exp2(self.split_lse - top)

    @step
    def of_splits(self):
        return divide(self.powers, self.powers.sum(-1, keepdims=True))


@catalogue.mistake(
    name="lse_base2", why="The splits' lse are in base 2, the merge takes powers of e.", sides=FORWARD, variants=SPLITS
)
class merge_natural(merge_base2):
    """{splits} splits of the keys are merged with powers of e of their lse in base 2"""

    @step
    def powers(self):
        lse = self.split_lse / np.log(2.0)
        return np.exp(lse - np.where(np.isneginf(lse), 0.0, lse).max(-1, keepdims=True))


@catalogue.mistake(why="Partial outputs are averaged.", sides=FORWARD, variants=SPLITS)
class merge_unweighted(Merged):
    """the outputs of {splits} splits of the keys are averaged"""

    @step
    def of_splits(self):
        return np.full(self.split_lse.shape, 1 / self.split_lse.shape[-1])


@catalogue.mistake(
    name="merge_unweighted",
    why="Partial outputs are normalised already, and are added.",
    sides=FORWARD,
    variants=SPLITS,
)
class merge_added(Merged):
    """the outputs of {splits} splits of the keys are added"""


@catalogue.mistake(why="Logarithms are added where their exponentials are due.", sides=FORWARD, variants=SPLITS)
class merge_lse(Split):
    """the lse is the sum of those of {splits} splits of the keys"""

    @step
    def lse(self):
        return self.split_lse.sum(-1)


@catalogue.mistake(name="merge_lse", why="A maximum is merged where a sum is due.", sides=FORWARD, variants=SPLITS)
class merge_lse_largest(Split):
    """the lse is the largest of those of {splits} splits of the keys"""

    @step
    def lse(self):
        return self.split_lse.max(-1)


@catalogue.mistake(
    name="sink_drop",
    why="The sinks are counted in a split, and the merge weighs splits by their keys.",
    sides=FORWARD,
    variants=SPLITS,
)
class merge_sinks_lost(Split):
    """the sinks are lost where {splits} splits of the keys are merged"""

    @step
    def sink_exponentials(self):
        merged = self.split_of_key.max(initial=0) > 0
        return np.zeros_like(super().sink_exponentials) if merged else super().sink_exponentials
