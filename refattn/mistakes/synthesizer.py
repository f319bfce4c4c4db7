"""How people get the Synthesizer wrong: how the parts are made, where they are mixed, and what gets a gradient."""

import numpy as np

from refattn.definitions.steps import einsum, step, sum_to_shape
from refattn.definitions.synthesizer import Synthesizer
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.options import about
from refattn.mistakes.scaled_dot_product import catalogue as dense

NONE_OF = (
    *about(
        "alibi_slopes", "bias", "dropout", "head_map", "pattern", "score_mod", "segments", "sinks", "softcap",
        "lengths", "lse", "scale", "window"
    ),
    "arguments_exchanged",
    "batch_crossed",
    "swap_kv",
)  # fmt: skip
"""Mistakes of softmax attention about what this mechanism does not have."""

catalogue = Catalogue(Synthesizer, built_on=dense, without=NONE_OF)


# ---------------------------------------------------------------------------------------------- the parts


@catalogue.mistake(why="A layer is linear until somebody writes its activation.")
class synthesizer_linear(Synthesizer):
    """the hidden layer has no relu"""

    @step
    def hidden_layer(self):
        return self.before_activation

    @step
    def activation_slope(self):
        return np.ones(self.before_activation.shape)


@catalogue.mistake(why="Projections without biases are common elsewhere.")
class bias_drop(Synthesizer):
    """the biases are left out"""

    def affine(self, spec, x, weight, bias):
        return einsum(spec, x, weight)

    @step
    def before_activation(self):
        return self.affine("...qm,hmf->...hqf", self.x, self.w_1, None)

    @step
    def dense_part(self):
        return self.affine("...hqf,hfk->...hqk", self.hidden_layer, self.w_2, None)

    @step
    def left(self):
        return self.affine("...hqf,hfn->...hqn", self.hidden_layer, self.w_a, None)

    @step
    def right_factor(self):
        return self.affine("...hqf,hfp->...hqp", self.hidden_layer, self.w_b, None)

    @step
    def d_b_1(self):
        return np.zeros(self.b_1.shape)

    @step
    def d_b_2(self):
        return np.zeros(self.b_2.shape)

    @step
    def d_b_a(self):
        return np.zeros(self.b_a.shape)

    @step
    def d_b_b(self):
        return np.zeros(self.b_b.shape)


@catalogue.mistake(why="One factor is repeated and the other tiled, in the wrong roles.")
class synthesizer_tiling(Synthesizer):
    """the two factors of the length are exchanged"""

    @step
    def left_of_key(self):
        return np.arange(self.keys) % self.left.shape[-1]

    @step
    def right_of_key(self):
        return np.arange(self.keys) // self.left.shape[-1]


@catalogue.mistake(name="synthesizer_tiling", why="Both factors are tiled to the length.")
class synthesizer_both_tiled(Synthesizer):
    """both factors are tiled alike"""

    @step
    def left_of_key(self):
        return np.arange(self.keys) % self.left.shape[-1]


@catalogue.mistake(why="The two factors are added up, as outer sums of logits often are.")
class synthesizer_factors_added(Synthesizer):
    """the two factors are added, not multiplied"""

    @step
    def factored_part(self):
        return self.left[..., self.left_of_key] + self.right_factor[..., self.right_of_key]

    @step
    def d_left(self):
        return self.summed(self.d_parts["factored"], self.left_of_key, self.left.shape[-1])

    @step
    def d_right_factor(self):
        return self.summed(self.d_parts["factored"], self.right_of_key, self.right_factor.shape[-1])


@catalogue.mistake(why="The table is stored as (h, k, q), or a framework's linear layer transposes it.")
class synthesizer_transposed(Synthesizer):
    """the table is read as (h, k, q)"""

    @step
    def table(self):
        return np.swapaxes(self.random, -1, -2) if self.queries == self.keys else self.random

    @step
    def d_random(self):
        return np.swapaxes(self.d_table, -1, -2) if self.queries == self.keys else self.d_table


@catalogue.mistake(why="One table is made for all heads.")
class synthesizer_table_shared(Synthesizer):
    """all heads read the table of head 0"""

    @step
    def table(self):
        return np.broadcast_to(self.random[:1], self.random.shape)

    @step
    def d_random(self):
        first = np.arange(self.heads)[:, None, None] == 0
        return np.where(first, sum_to_shape(self.d_table, self.random.shape).sum(0, keepdims=True), 0.0)


@catalogue.mistake(why="Logits of attention are scaled, and these are no products of queries and keys.")
class synthesizer_scaled(Synthesizer):
    """the logits are divided by sqrt(e)"""

    @step
    def factor(self):
        """e**-0.5"""
        return max(1, self.v.shape[-1]) ** -0.5

    @step
    def logits(self):
        return super().logits * self.factor

    @step
    def d_parts(self):
        return {name: d * self.factor for name, d in super().d_parts.items()}

    @step
    def d_shares(self):
        return super().d_shares * self.factor


# ---------------------------------------------------------------------------------------------- the mixture


@catalogue.mistake(why="Each part is an attention of its own; weights are mixed, not logits.")
class synthesizer_mixture_after(Synthesizer):
    """the parts are mixed after the softmax"""

    @step
    def part_weights(self):
        """The softmax of every part, (..., h, q, k)"""
        found = []
        for part in self.parts.values():
            logits = np.where(self.seen, part, -np.inf)
            top = logits.max(-1, keepdims=True, initial=-np.inf)
            exponentials = np.exp(logits - np.where(np.isneginf(top), 0.0, top))
            total = exponentials.sum(-1, keepdims=True)
            found.append(exponentials / np.where(total == 0, 1.0, total))
        return found

    @step
    def weights(self):
        return sum(self.shares[:, s, None, None] * p for s, p in enumerate(self.part_weights))

    @step
    def d_parts(self):
        found = {}
        for s, (name, p) in enumerate(zip(self.parts, self.part_weights, strict=True)):
            d = p * (self.d_weights - (p * self.d_weights).sum(-1, keepdims=True))
            found[name] = np.where(self.touched, self.shares[:, s, None, None] * d, 0.0)
        return found

    @step
    def d_shares(self):
        each = [np.where(self.touched, self.d_weights * p, 0.0).sum((-1, -2)) for p in self.part_weights]
        return sum_to_shape(np.stack(each, axis=-1), self.shares.shape)


@catalogue.mistake(why="The softmax of the mixture is forgotten.")
class synthesizer_mixture_plain(Synthesizer):
    """the mixture is used without its softmax"""

    @step
    def shares(self):
        return super().shares if self.mixture is None else np.atleast_2d(self.mixture)

    @step
    def d_mixture(self):
        return np.reshape(self.d_shares, self.mixture.shape)


@catalogue.mistake(why="The parts are averaged.")
class synthesizer_mixture_equal(Synthesizer):
    """the parts have equal shares"""

    @step
    def shares(self):
        return np.full(super().shares.shape, 1 / super().shares.shape[-1])

    @step
    def d_mixture(self):
        return np.zeros(self.mixture.shape)


@catalogue.mistake(why="Parts are collected in another order than their numbers.")
class synthesizer_mixture_order(Synthesizer):
    """the shares belong to the parts in reversed order"""

    @step
    def shares(self):
        return super().shares[:, ::-1]

    @step
    def d_mixture(self):
        alpha, d = super().shares, self.d_shares[:, ::-1]
        return np.reshape(alpha * (d - (alpha * d).sum(-1, keepdims=True)), self.mixture.shape)


# ---------------------------------------------------------------------------------------------- gradients alone


@catalogue.mistake(why="A random table is taken for a constant.", sides=("backward",))
class synthesizer_fixed(Synthesizer):
    """the tables get no gradient"""

    @step
    def d_random(self):
        return np.zeros(self.random.shape)

    @step
    def d_random_1(self):
        return np.zeros(self.random_1.shape)

    @step
    def d_random_2(self):
        return np.zeros(self.random_2.shape)


@catalogue.mistake(why="The shares are taken for constants.", sides=("backward",))
class synthesizer_mixture_grad(Synthesizer):
    """the mixture gets no gradient"""

    @step
    def d_mixture(self):
        return np.zeros(self.mixture.shape)


@catalogue.mistake(why="The mask of the relu is not kept.", sides=("backward",))
class synthesizer_relu_grad(Synthesizer):
    """the backward takes the relu for the identity"""

    @step
    def activation_slope(self):
        return np.ones(self.before_activation.shape)


@catalogue.mistake(
    name="synthesizer_factor_grad", why="Repeating and tiling need a sum each in the backward.", sides=("backward",)
)
class synthesizer_factor_last(Synthesizer):
    """the gradient of a factor is that of one of its keys, not their sum"""

    def summed(self, share, index, count):
        last = np.array([np.flatnonzero(index == n)[-1] for n in range(count)])
        return np.where(self.touched, share, 0.0)[..., last]

    @step
    def d_left(self):
        share = self.d_parts["factored"] * self.right_factor[..., self.right_of_key]
        return self.summed(share, self.left_of_key, self.left.shape[-1])

    @step
    def d_right_factor(self):
        share = self.d_parts["factored"] * self.left[..., self.left_of_key]
        return self.summed(share, self.right_of_key, self.right_factor.shape[-1])
