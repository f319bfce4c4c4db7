"""How people get ETC attention wrong: the four pieces and their softmax, the labels, the gradients of both."""

import numpy as np

from refattn.definitions.etc import ETC, LabelledKeys
from refattn.definitions.steps import einsum, step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.options import about
from refattn.mistakes.scaled_dot_product import catalogue as dense

NONE_OF = about(
    "alibi_slopes", "bias", "dropout", "head_map", "pattern", "score_mod", "segments", "sinks", "softcap",
    "mask", "causal", "window", "lengths"
)  # fmt: skip
"""Mistakes of softmax attention about what this mechanism does not have."""

catalogue = Catalogue(ETC, built_on=dense, without=NONE_OF)


# ---------------------------------------------------------------------------------------------- the pieces


@catalogue.mistake(
    why="The number of neighbours is read as a width, or oneself is counted.",
    variants=[{"what": "large", "more": 1}, {"what": "small", "more": -1}],
)
class window_plus1(ETC):
    """the radius is one too {what}"""

    more = 1

    @step
    def long_to_long(self):
        return abs(self.distance) <= max(0, self.radius + self.more)


@catalogue.mistake(why="The blocked local part looks back only.")
class etc_one_side(ETC):
    """long tokens see no long tokens after them"""

    @step
    def long_to_long(self):
        return super().long_to_long & (self.distance <= 0)


@catalogue.mistake(why="The long-to-global piece is left out.")
class global_columns_drop(ETC):
    """long tokens do not see the global ones"""

    long_to_global = False


@catalogue.mistake(why="The global-to-long piece is left out.")
class global_rows_drop(ETC):
    """global tokens see each other alone"""

    @step
    def from_global(self):
        return super().from_global & ~self.key_is_long


@catalogue.mistake(why="Only the padding of the piece's own sequence is masked.")
class tail_unmasked(ETC):
    """global rows see padded long tokens"""

    @step
    def real_keys(self):
        return super().real_keys | (self.key_is_long & ~self.query_is_long)


@catalogue.mistake(name="tail_unmasked", why="Only the padding of the piece's own sequence is masked.")
class padded_globals_seen(ETC):
    """long rows see padded global tokens"""

    @step
    def real_keys(self):
        return super().real_keys | (~self.key_is_long & self.query_is_long)


@catalogue.mistake(
    why="Masks are made for the long-to-long piece alone.",
    variants=[{"piece": "long_to_global"}, {"piece": "from_global"}],
)
class mask_drop(ETC):
    """the mask of the piece {piece} is ignored"""

    piece = "long_to_global"

    @step
    def long_to_global(self):
        return np.array(True) if self.piece == "long_to_global" else super().long_to_global

    @step
    def from_global(self):
        return np.array(True) if self.piece == "from_global" else super().from_global


class _Apart(LabelledKeys):
    """Keys of the two kinds have a softmax each, and both are added."""

    defaults = {**LabelledKeys.defaults, "key_is_long": None}

    @step
    def groups(self):
        """Exponentials of the two kinds of keys, each with its own maximum, over their sums."""
        found = []
        for kind in (self.key_is_long, ~self.key_is_long):
            logits = np.where(kind, self.masked_logits, -np.inf)
            top = logits.max(-1, keepdims=True, initial=-np.inf)
            exponentials = np.exp(logits - np.where(np.isneginf(top), 0.0, top))
            total = exponentials.sum(-1, keepdims=True)
            found.append(exponentials / np.where(total == 0, 1.0, total))
        return found

    @step
    def weights(self):
        return sum(self.groups)

    @step
    def rebuilt_weights(self):
        return self.weights

    @step
    def d_softmax(self):
        return sum(p * (self.d_weights - (p * self.d_weights).sum(-1, keepdims=True)) for p in self.groups)


@catalogue.mistake(why="Each piece is an attention of its own, and the results are added.")
class etc_two_softmaxes(ETC):
    """global and long keys have a softmax each"""

    inner = _Apart

    @step
    def given(self):
        return {**super().given, "key_is_long": self.key_is_long}


# ---------------------------------------------------------------------------------------------- labels


@catalogue.mistake(why="Query minus key for key minus query.")
class etc_label_sign(ETC):
    """distances are counted from key to query"""

    @step
    def distance_label(self):
        return super().distance_label.swapaxes(-1, -2)


@catalogue.mistake(why="The table is read where it has an entry, and nowhere else.")
class etc_label_clip(ETC):
    """distances beyond the clip have no label"""

    @step
    def distance_label(self):
        return np.where(abs(self.distance) > self.largest_distance, -1, super().distance_label)


@catalogue.mistake(name="etc_label_clip", why="A clip off by one: the largest distance shares the label of the next.")
class etc_clip_short(ETC):
    """distances are clipped one too early"""

    @step
    def distance_label(self):
        most = max(0, self.largest_distance - 1)
        middle = super().distance_label - np.minimum(
            np.maximum(self.distance, -self.largest_distance), self.largest_distance
        )
        return middle + np.minimum(np.maximum(self.distance, -most), most)


class _Unscaled(LabelledKeys):
    """The label term is added to scaled logits as it is."""

    @step
    def products(self):
        return super().products - self.label_term if self.labels is not None else super().products

    @step
    def scaled(self):
        return super().scaled + self.label_term if self.labels is not None else super().scaled

    @step
    def d_label_products(self):
        right = super().d_label_products
        return right / self.scale if self.labels is not None else right


@catalogue.mistake(why="Only the products of queries and keys are scaled.")
class etc_label_scale(ETC):
    """the label term is not scaled"""

    inner = _Unscaled


@catalogue.mistake(why="One table is made and broadcast over the heads.")
class etc_label_heads(ETC):
    """all heads have the labels of head 0"""

    @step
    def given(self):
        right = super().given
        if self.labels is None:
            return right
        return {**right, "labels": np.broadcast_to(self.labels[:1], self.labels.shape)}

    @step
    def d_labels(self):
        right = super().d_labels
        first = right.sum(-3, keepdims=True)
        return np.where(np.arange(right.shape[-3])[:, None, None] == 0, first, 0.0)


@catalogue.mistake(
    why="The tables of the other pieces are forgotten.", variants=[{"table": "long_labels"}, {"table": "global_labels"}]
)
class etc_labels_drop(ETC):
    """{table} are ignored"""

    table = "long_labels"

    @step
    def long_labels(self):
        return None if self.table == "long_labels" else self.argument("long_labels")

    @step
    def global_labels(self):
        return None if self.table == "global_labels" else self.argument("global_labels")


@catalogue.mistake(why="-1 counts from the end, as it does in Python.")
class etc_none_is_last(ETC):
    """-1 among the labels is read as the last label"""

    @step
    def label(self):
        right = super().label
        return None if right is None else np.where(right < 0, self.labels.shape[-2] - 1, right)


class _QueriesForgotten(LabelledKeys):
    """Labels do not reach the queries."""

    d_q_of_labels = 0.0


@catalogue.mistake(why="The term is taken for a bias that does not depend on the queries.", sides=("backward",))
class etc_label_grad(ETC):
    """labels give the queries no gradient"""

    inner = _QueriesForgotten


class _LongRowsAlone(LabelledKeys):
    """Labels get gradients from long rows alone."""

    defaults = {**LabelledKeys.defaults, "query_is_long": None}

    @step
    def d_labels(self):
        return einsum("...hqp,...hqd->...hpd", np.where(self.query_is_long, self.d_label_products, 0.0), self.q)


@catalogue.mistake(
    name="etc_label_grad",
    why="The two kinds of rows are two kernels, and their gradients are not added.",
    sides=("backward",),
)
class etc_label_grad_shared(ETC):
    """labels get no gradient from global rows"""

    inner = _LongRowsAlone

    @step
    def given(self):
        return {**super().given, "query_is_long": self.query_is_long}


@catalogue.mistake(
    name="global_grad_drop",
    why="The two kinds of rows are two kernels, and their gradients are not added.",
    sides=("backward",),
)
class etc_global_rows_grad(ETC):
    """no gradient comes from the global rows"""

    @step
    def d_attention(self):
        return self.attention.pull(output=self.joined(np.zeros(self.output_global.shape), self.cotangent("output")))
