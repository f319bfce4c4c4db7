"""How people get exact top-k attention wrong: what is compared, how many are taken, and what the softmax then runs over."""

import numpy as np

from refattn.definitions.steps import step
from refattn.definitions.topk import TopK
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.scaled_dot_product import catalogue as dense

catalogue = Catalogue(TopK, built_on=dense, without=("list_*", "topk_clamped", "block_start_unscaled"))


@catalogue.mistake(why="A sort from the end, or an unstable one.")
class topk_ties(TopK):
    """equal logits go to the higher index"""

    @step
    def ranked(self):
        return self.keys - 1 - np.argsort(-self.compared[..., ::-1], axis=-1, kind="stable")


@catalogue.mistake(name="topk_ties", why="The k-th largest logit is used as a threshold.")
class topk_threshold(TopK):
    """every key as large as the last chosen one is kept"""

    @step
    def visible_by_choice(self):
        if self.argument("count") is None:
            return super().visible_by_choice
        smallest = np.where(super().visible_by_choice, self.compared, np.inf).min(-1, keepdims=True)
        return self.compared >= smallest


@catalogue.mistake(
    why="An inclusive count, or one key kept for the query itself.",
    variants=[{"what": "many", "more": 1}, {"what": "few", "more": -1}],
)
class topk_count(TopK):
    """one key too {what} is chosen"""

    more = 1

    @step
    def count(self):
        count = self.argument("count")
        return count + self.more if count is not None and 1 <= count + self.more <= self.keys else count


@catalogue.mistake(why="A distance is sorted where a product is due, or ascending order is taken for descending.")
class topk_smallest(TopK):
    """the smallest logits are chosen"""

    @step
    def compared(self):
        return np.where(self.candidates, -np.real(self.logits), -np.inf)


class ComparedWithout(TopK):
    """The search leaves an option out, the softmax does not."""

    left_out = "mask"

    @step
    def compared(self):
        if self.argument("count") is None or self.argument(self.left_out) is None:
            return super().compared
        return TopK({n: x for n, x in self.arguments.items() if n != self.left_out}, storage=self.storage).compared


@catalogue.mistake(
    why="The best keys are picked from the whole sequence, and the mask takes some of them away afterwards.",
    variants=[{"left_out": n} for n in ("mask", "causal", "window", "key_lengths", "pattern")],
)
class topk_before_mask(ComparedWithout):
    """keys are chosen before {left_out} takes some away"""


@catalogue.mistake(
    why="The search has its own product of queries and keys, without what is added to it.",
    variants=[{"left_out": n} for n in ("bias", "alibi_slopes", "score_mod")],
)
class topk_before_bias(ComparedWithout):
    """keys are chosen before {left_out} changes the logits"""


@catalogue.mistake(why="Weights are sorted, not logits, and the others are set to 0.")
class topk_not_renormalised(TopK):
    """the softmax runs over all keys, then some are dropped"""

    @step
    def seen(self):
        return self.candidates

    @step
    def dropout(self):
        return super().dropout * self.visible_by_choice


@catalogue.mistake(why="The index array lost its head axis.")
class topk_heads(TopK):
    """the keys of head 0 are used for all"""

    @step
    def chosen(self):
        right = super().chosen
        return np.broadcast_to(right[..., :1, :, :], right.shape)


@catalogue.mistake(why="The keys of one query serve its whole tile.", variants=[{"tile": n} for n in (4, 8, 16)])
class topk_rows(TopK):
    """a tile of {tile} queries uses the keys of its first one"""

    tile = 4

    @step
    def chosen(self):
        return super().chosen[..., np.arange(self.queries) // self.tile * self.tile, :]


@catalogue.mistake(why="-1 counts from the end, as it does in Python.")
class topk_padding(TopK):
    """-1 is read as the last key"""

    @step
    def chosen(self):
        return np.where(super().chosen < 0, self.keys - 1, super().chosen)


@catalogue.mistake(name="topk_padding", why="Absent places are clamped to a valid address and not hidden.")
class topk_padding_first(TopK):
    """-1 is read as key 0"""

    @step
    def chosen(self):
        return np.maximum(super().chosen, 0)


@catalogue.mistake(why="The choice is computed and not used.")
class topk_ignored(TopK):
    """all keys are used"""

    visible_by_choice = True


@catalogue.mistake(
    name="empty_row_nan",
    why="The running maximum starts at -inf, and -inf - (-inf) rescales what follows.",
    sides=("both", "forward"),
    variants=[{"tile": n} for n in (2, 4, 8, 16)],
)
class first_chosen_absent(TopK):
    """a row whose first {tile} places hold no key is NaN"""

    tile = 2

    @step
    def lost(self):
        """Rows whose first tile of places is all -1, (..., h, q, 1)"""
        return (self.chosen[..., : self.tile] < 0).all(-1, keepdims=True) & self.visible_by_query_lengths

    @step
    def row_sum(self):
        return np.where(self.lost, np.nan, super().row_sum)


@catalogue.mistake(why="The backward is that of dense attention.", sides=("backward",))
class topk_grad(TopK):
    """the backward runs over all keys"""

    @step
    def seen(self):
        return self.candidates


@catalogue.mistake(
    name="topk_grad", why="The backward makes its own softmax, that of dense attention.", sides=("backward",)
)
class topk_dense_backward(topk_grad):
    """the backward is that of attention over all keys, with its own row sums"""

    @step
    def rebuilt_weights(self):
        return self.weights

    @step
    def delta(self):
        return (self.rebuilt_weights * self.d_weights).sum(-1, keepdims=True)


@catalogue.mistake(name="topk_grad", why="One key's cotangent is written by many rows at once.", sides=("backward",))
class topk_scatter_overwrites(TopK):
    """a key chosen by several queries keeps the cotangent of the last of them"""

    @step
    def last_row(self):
        """Pairs of a key and the last query that chose it, (..., h, q, k)"""
        last = self.queries - 1 - np.argmax(self.seen[..., ::-1, :], axis=-2)
        return np.arange(self.queries)[:, None] == last[..., None, :]

    @step
    def d_keys_of_head(self):
        return np.einsum("...hqk,...hqd->...hkd", np.where(self.last_row, self.d_products, 0.0), self.q)

    @step
    def d_values_of_head(self):
        used = np.where(self.last_row, self.rebuilt_weights * self.rebuilt_dropout, 0.0)
        return np.einsum("...hqk,...hqe->...hke", used, self.d_output)
