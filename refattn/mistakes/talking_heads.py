"""The ways people get Talking-Heads attention wrong.

Those of softmax attention are lifted into the softmax between the projections, but for those about channels, groups of heads and
sinks, which it has not.
"""

import numpy as np

from refattn.definitions.steps import contract, einsum, step
from refattn.definitions.talking_heads import PARTS, SoftmaxOfLogits, TalkingHeads, through
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.scaled_dot_product import catalogue as dense

__all__ = ["catalogue"]

WITHOUT = (
    "alias_stride", "arguments_exchanged", "batch_crossed", "cap_before_scale", "d_truncated", "dv_block_nosum", "gqa_axis",
    "gqa_grad_nosum", "gqa_tile", "gradient_absent", "grad_overwritten", "masked_value_leak", "narrow_products", "no_scale",
    "norm_grad_missing", "qk_overflow", "round_partials", "scale_default_missing", "scale_dmodel", "scale_grad", "scale_ignored",
    "scale_inv", "scale_padded", "scale_twice", "scale_value", "sink_drop", "sink_grad", "sink_heads", "sink_lse", "sink_twice",
    "sink_unshifted", "stale_scratch", "swap_kv", "tail_garbage", "tile_overrun",
)  # fmt: skip
catalogue = Catalogue(TalkingHeads, built_on=dense, without=WITHOUT)

# ---------------------------------------------------------------------- the order of the steps


class MaskedProducts(SoftmaxOfLogits):
    """Nothing is hidden behind the projection but what lies in padded rows."""

    @step
    def visible(self):
        return np.broadcast_to(self.visible_by_query_lengths, self.pairs)


@catalogue.mistake(why="A mask is added where scores are made.", sides=("forward",))
class th_mask_before_projection(TalkingHeads):
    """hidden pairs get -1e9 before the logits are projected"""

    inner = MaskedProducts

    @step
    def hidden_of_head_0(self):
        right = SoftmaxOfLogits({**{n: getattr(self, n) for n in self.shared}, "given_products": super().projected})
        return ~right.visible[..., :1, :, :]

    @property
    def shared(self):
        return [n for n in SoftmaxOfLogits.defaults if n in self.defaults and n != "scale"]

    @step
    def projected(self):
        return through(self.before, np.where(self.hidden_of_head_0, -1e9, self.scale * self.products))


@catalogue.mistake(why="The bias is added where scores are made.")
class th_bias_before_projection(TalkingHeads):
    """the bias is added before the logits are projected"""

    @step
    def early(self):
        """The bias, if it fits the key heads; a projection of one cannot be told from that of the other otherwise."""
        given = self.argument("bias")
        fits = given is not None and (given.ndim < 3 or given.shape[-3] in (1, self.q.shape[-3]))
        return np.where(np.isneginf(given.real), 0.0, given) if fits else None

    @step
    def bias(self):
        return self.argument("bias") if self.early is None else None

    @step
    def projected(self):
        return super().projected if self.early is None else super().projected + through(self.before, self.early_pairs)

    @step
    def early_pairs(self):
        return np.broadcast_to(self.early, (*self.lead, self.q.shape[-3], self.q.shape[-2], self.k.shape[-2]))

    @step
    def d_bias(self):
        return super().d_bias if self.early is None else self.d_products

    @step
    def d_before(self):
        if self.early is None:
            return super().d_before
        share = self.early_pairs[..., :, None, :, :] * self.d_projected[..., None, :, :, :]
        return super().d_before + np.where(self.touched[..., None, :, :, :], share, 0.0)


@catalogue.mistake(name="th_bias_before_projection", why="The cap is part of the scores.")
class th_cap_before_projection(TalkingHeads):
    """the cap is taken before the logits are projected"""

    softcap = None

    @step
    def given_cap(self):
        given = self.argument("softcap")
        return None if given is None else np.reshape(given, ())[()]

    @step
    def bent(self):
        return None if self.given_cap is None else np.tanh(self.scale * self.products / self.given_cap)

    @step
    def projected(self):
        return super().projected if self.bent is None else through(self.before, self.given_cap * self.bent)

    @step
    def d_before(self):
        if self.bent is None:
            return super().d_before
        share = self.given_cap * self.bent[..., :, None, :, :] * self.d_projected[..., None, :, :, :]
        return np.where(self.touched[..., None, :, :, :], share, 0.0)

    @step
    def d_products(self):
        return super().d_products * (1.0 if self.bent is None else 1 - self.bent**2)

    @step
    def d_softcap(self):
        inside = self.scale * self.products / self.given_cap
        slope = self.bent - inside * (1 - self.bent**2)
        return np.where(self.products_touched, super().d_products * slope, 0.0).sum()


@catalogue.mistake(why="Rows that sum to 1 are expected behind the projection too.", sides=("forward",))
class th_renormalised(TalkingHeads):
    """the projected weights are made to sum to 1 again"""

    @step
    def mixed(self):
        total = super().mixed.sum(-1, keepdims=True)
        return np.where(total == 0, 0.0, super().mixed / np.where(total == 0, 1.0, total))


@catalogue.mistake(name="th_renormalised", why="The softmax is taken behind both projections.", sides=("forward",))
class th_second_softmax(TalkingHeads):
    """a second softmax follows the projection of the weights"""

    @step
    def mixed(self):
        p = np.where(self.reached, np.exp(super().mixed - super().mixed.max(-1, keepdims=True, initial=0.0)), 0.0)
        total = p.sum(-1, keepdims=True)
        return p / np.where(total == 0, 1.0, total)


@catalogue.mistake(why="Other implementations drop projected weights.", sides=("forward",))
class th_dropout_behind(TalkingHeads):
    """dropout acts on the projected weights"""

    @step
    def square(self):
        return self.softmax_heads == self.v.shape[-3]

    @step
    def dropout_mask(self):
        return None if self.square else self.argument("dropout_mask")

    @step
    def mixed(self):
        keep = self.argument("dropout_mask")
        if keep is None or not self.square:
            return super().mixed
        return super().mixed * np.broadcast_to(keep, super().mixed.shape) / (1 - self.argument("dropout_rate"))


# ---------------------------------------------------------------------- the projections


def part_dropped(*names):
    """A class body that leaves parts of the projections out."""
    return {**dict.fromkeys(names), **{f"d_{n}": 0.0 for n in names}}


@catalogue.mistake(
    why="A projection is not applied where the shapes do not need it.",
    variants=(
        {"what": "neither projection is applied", "which": PARTS, **part_dropped(*PARTS)},
        {"what": "the logits_projection is not applied", "which": PARTS[:1], **part_dropped("logits_projection")},
        {"what": "the weights_projection is not applied", "which": PARTS[3:4], **part_dropped("weights_projection")},
    ),
)
class th_projection_drop(TalkingHeads):
    """{what}"""

    which = PARTS

    @step
    def softmax_heads(self):
        """A missing projection leaves the number of heads as it is."""
        given = [self.argument(n) for n in PARTS[:3] if self.argument(n) is not None]
        return given[0].shape[-1] if given else self.q.shape[-3]


class Turned(TalkingHeads):
    """A square projection read with its axes exchanged."""

    def turned(self, name):
        given = self.argument(name)
        return given.T if given is not None and given.shape[0] == given.shape[1] else given


@catalogue.mistake(why="A weight is stored as (out, in).")
class th_transposed(Turned):
    """the logits_projection is applied transposed"""

    @step
    def logits_projection(self):
        return self.turned("logits_projection")

    @step
    def d_logits_projection(self):
        d = super().d_logits_projection
        return d.T if d.shape[0] == d.shape[1] else d


@catalogue.mistake(name="th_transposed", why="A weight is stored as (out, in).")
class th_weights_transposed(Turned):
    """the weights_projection is applied transposed"""

    @step
    def weights_projection(self):
        return self.turned("weights_projection")

    @step
    def d_weights_projection(self):
        d = super().d_weights_projection
        return d.T if d.shape[0] == d.shape[1] else d


class Residual(TalkingHeads):
    """A projection to which the identity is added."""

    def with_identity(self, name):
        given = self.argument(name)
        return given + np.eye(*given.shape) if given is not None and given.shape[0] == given.shape[1] else given


@catalogue.mistake(why="One library initialises and adds the identity.")
class th_residual(Residual):
    """the identity is added to the logits_projection"""

    @step
    def logits_projection(self):
        return self.with_identity("logits_projection")


@catalogue.mistake(name="th_residual", why="One library initialises and adds the identity.")
class th_weights_residual(Residual):
    """the identity is added to the weights_projection"""

    @step
    def weights_projection(self):
        return self.with_identity("weights_projection")


@catalogue.mistake(why="The dynamic parts are computed in place of the static one.")
class th_static_dropped(TalkingHeads):
    """the dynamic parts replace the logits_projection"""

    @step
    def dynamic(self):
        return self.query_logits is not None or self.key_logits is not None

    @step
    def logits_projection(self):
        if not self.dynamic:
            return self.argument("logits_projection")
        return np.zeros(
            (self.q.shape[-3], (self.query_logits if self.key_logits is None else self.key_logits).shape[-1])
        )

    @step
    def d_logits_projection(self):
        return 0.0 * super().d_logits_projection if self.dynamic else super().d_logits_projection


@catalogue.mistake(name="th_static_dropped", why="The dynamic parts are computed in place of the static one.")
class th_static_weights_dropped(TalkingHeads):
    """the dynamic parts replace the weights_projection"""

    @step
    def dynamic(self):
        return self.query_weights is not None or self.key_weights is not None

    @step
    def weights_projection(self):
        if not self.dynamic:
            return self.argument("weights_projection")
        return np.zeros((self.softmax_heads, self.v.shape[-3]))

    @step
    def d_weights_projection(self):
        return 0.0 * super().d_weights_projection if self.dynamic else super().d_weights_projection


@catalogue.mistake(
    why="Dynamic parts are an option of few implementations.",
    variants=[
        {"what": f"{' and '.join(names)} left out", **part_dropped(*names)}
        for names in (
            ("query_logits", "key_logits"), ("query_weights", "key_weights"), ("query_logits",), ("key_logits",),
            ("query_weights",), ("key_weights",),
        )
    ],
)  # fmt: skip
class th_dynamic_dropped(TalkingHeads):
    """{what}"""

    @step
    def softmax_heads(self):
        given = [self.argument(n) for n in PARTS[:3] if self.argument(n) is not None]
        return given[0].shape[-1] if given else self.q.shape[-3]


@catalogue.mistake(
    name="th_dynamic_dropped", why="Queries and keys are taken for one another in self-attention.",
)  # fmt: skip
class th_dynamic_exchanged(TalkingHeads):
    """query_logits and key_logits, query_weights and key_weights are exchanged"""

    def other(self, mine, theirs):
        a, b = self.argument(mine), self.argument(theirs)
        return b if a is not None and b is not None and a.shape == b.shape else a

    @step
    def query_logits(self):
        return self.other("query_logits", "key_logits")

    @step
    def key_logits(self):
        return self.other("key_logits", "query_logits")

    @step
    def query_weights(self):
        return self.other("query_weights", "key_weights")

    @step
    def key_weights(self):
        return self.other("key_weights", "query_weights")

    def exchanged(self, mine, own, others, theirs):
        a, b = self.argument(mine), self.argument(theirs)
        return others if a is not None and b is not None and a.shape == b.shape else own

    @step
    def d_query_logits(self):
        return self.exchanged("query_logits", super().d_query_logits, super().d_key_logits, "key_logits")

    @step
    def d_key_logits(self):
        return self.exchanged("key_logits", super().d_key_logits, super().d_query_logits, "query_logits")

    @step
    def d_query_weights(self):
        return self.exchanged("query_weights", super().d_query_weights, super().d_key_weights, "key_weights")

    @step
    def d_key_weights(self):
        return self.exchanged("key_weights", super().d_key_weights, super().d_query_weights, "query_weights")


# ---------------------------------------------------------------------- backward


class DeltaOfOutput(SoftmaxOfLogits):
    """A row term that comes from elsewhere."""

    @step
    def delta(self):
        return self.handed_delta


@catalogue.mistake(why="Without mixing dO . O is the row term of a head.", sides=("backward",))
class th_delta(TalkingHeads):
    """the row term of a softmax head is rowsum(d_output output) of the value head of its number"""

    @step
    def pulled(self):
        right = super().pulled
        if self.softmax_heads != self.v.shape[-3]:
            return right
        delta = (self.d_output * self.output).sum(-1, keepdims=True)
        arguments = {**right.arguments, "handed_delta": delta}
        return DeltaOfOutput(arguments, right.cotangents, handed=right.handed, storage=right.storage)


@catalogue.mistake(
    why="The sum over positions is taken over one of them.",
    sides=("backward",),
    arrays=("logits_projection", "weights_projection"),
)
class th_projection_grad(TalkingHeads):
    """gradients of the static projections are those of batch entry 0"""

    def first(self, d):
        d = d.sum((-1, -2))
        return d.reshape(-1, *d.shape[-2:])[0]

    @step
    def d_logits_projection(self):
        return self.first(self.d_before)

    @step
    def d_weights_projection(self):
        return self.first(self.d_behind)


# ---------------------------------------------------------------------- products and values


@catalogue.mistake(why="0 * NaN = NaN: weights of 0 are multiplied with what is hidden.", arrays=())
class masked_value_leak(TalkingHeads):
    """0 times what stands at hidden values enters the sum"""

    @step
    def output(self):
        return einsum("...yqk,...yke->...yqe", self.mixed, self.v)


@catalogue.mistake(why="The scale is expected in q, as its initialisation has it in one implementation.")
class no_scale(TalkingHeads):
    """the products are not scaled"""

    scale = 1.0
    d_scale = 0.0


@catalogue.mistake(why="Only a given scale is multiplied in.")
class scale_default_missing(TalkingHeads):
    """the default scale is left out, a given one is honoured"""

    default_scale = 1.0


@catalogue.mistake(why="q is scaled, and the products once more.")
class scale_twice(TalkingHeads):
    """the scale is applied twice"""

    @step
    def scale(self):
        return super().scale ** 2

    @step
    def d_scale(self):
        return 2 * super().scale * super().d_scale


@catalogue.mistake(why="sqrt(d) is taken for 1 / sqrt(d).")
class scale_inv(TalkingHeads):
    """the products are divided by the scale"""

    @step
    def scale(self):
        return 1 / super().scale

    @step
    def d_scale(self):
        return -(self.scale**2) * super().d_scale


@catalogue.mistake(why="The channels of all heads together are taken for those of one.")
class scale_dmodel(TalkingHeads):
    """the scale comes from all heads' channels"""

    @step
    def default_scale(self):
        return max(1, self.q.shape[-3] * self.q.shape[-1]) ** -0.5


@catalogue.mistake(why="The size is read from the wrong array.")
class scale_value(TalkingHeads):
    """the scale comes from the value channels"""

    @step
    def default_scale(self):
        return max(1, self.v.shape[-1]) ** -0.5


@catalogue.mistake(why="dQ and dK are products of dS, and the scale is forgotten.", sides=("backward",))
class scale_grad(TalkingHeads):
    """dQ and dK lack the scale"""

    scale_of_gradients = 1.0


@catalogue.mistake(why="A tile's share is stored where it should be added.", sides=("backward",), arrays=("k", "v"))
class grad_overwritten(TalkingHeads):
    """dK and dV are those of the last 8 queries"""

    @step
    def last_rows(self):
        n = self.q.shape[-2]
        return (np.arange(n) >= max(0, n - 1) // 8 * 8)[:, None]

    @step
    def d_k(self):
        d = self.scale_of_gradients * self.d_products * self.last_rows
        return contract("...xqk,...xqd->...xkd", d, self.q, self.products_touched)

    @step
    def d_v(self):
        return contract("...yqk,...yqe->...yke", self.mixed * self.last_rows, self.d_output, self.reached)
