"""How people get efficient attention wrong: axes of the two softmaxes, scales, padding, range, gradients."""

import numpy as np

from refattn.definitions.efficient import Efficient
from refattn.definitions.steps import einsum, step
from refattn.mistakes.engine import Catalogue

catalogue = Catalogue(Efficient)


# ---------------------------------------------------------------------------------------------- the two softmaxes


@catalogue.mistake(why="Both softmaxes are taken along the same axis.")
class efficient_query_axis(Efficient):
    """the queries' softmax runs over positions"""

    query_axis = -2


@catalogue.mistake(why="Ordinary attention never takes a softmax over positions of the keys themselves.")
class efficient_key_axis(Efficient):
    """the keys' softmax runs over channels"""

    key_axis = -1

    @step
    def key_logits(self):
        return np.where(self.real_keys, self.k, 0.0)

    @step
    def key_weights(self):
        return np.where(self.real_keys, super().key_weights, 0.0)


@catalogue.mistake(why="One function serves both, called with the arguments of the other.")
class axis_crossed(Efficient):
    """the queries' softmax runs over positions and the keys' over channels"""

    query_axis = -2
    key_axis = -1

    @step
    def key_logits(self):
        return np.where(self.real_keys, self.k, 0.0)

    @step
    def key_weights(self):
        return np.where(self.real_keys, super().key_weights, 0.0)


@catalogue.mistake(
    why="The paper offers a scaling by sqrt(n) in place of the softmax (its equation 6); code mixes the two."
)
class efficient_scaling(Efficient):
    """queries and keys are divided by sqrt(positions) in place of their softmaxes"""

    @step
    def query_weights(self):
        return self.q / max(1, self.q.shape[-2]) ** 0.5

    @step
    def key_weights(self):
        return np.where(self.real_keys, self.k, 0.0) / max(1, self.k.shape[-2]) ** 0.5

    @step
    def d_query_logits(self):
        return self.d_query_weights / max(1, self.q.shape[-2]) ** 0.5

    @step
    def d_key_logits(self):
        return self.d_key_weights / max(1, self.k.shape[-2]) ** 0.5


@catalogue.mistake(name="step_dropped", why="The keys' softmax alone makes the output a mean of values.")
class query_softmax_dropped(Efficient):
    """the queries have no softmax"""

    @step
    def query_weights(self):
        return self.q

    @step
    def d_query_logits(self):
        return self.d_query_weights


@catalogue.mistake(name="step_dropped", why="The queries' softmax looks like the only one that is needed.")
class key_softmax_dropped(Efficient):
    """the keys have no softmax"""

    @step
    def key_weights(self):
        return np.where(self.real_keys, self.k, 0.0)

    @step
    def d_key_logits(self):
        return self.d_key_weights


@catalogue.mistake(why="exp without the maximum passes every test whose inputs are small.")
class unshifted_softmax(Efficient):
    """the maximum is not subtracted before exp"""

    @step
    def query_maximum(self):
        return np.zeros_like(super().query_maximum)

    @step
    def key_maximum(self):
        return np.zeros_like(super().key_maximum)

    @step
    def query_exponentials(self):
        return self.overflowing(super().query_exponentials)

    @step
    def key_exponentials(self):
        return self.overflowing(super().key_exponentials)

    def overflowing(self, x):
        """As in the dtype that the call computes in."""
        narrow = self.storage.itemsize < 8
        with np.errstate(over="ignore"):
            return x.astype(np.float32).astype(np.float64) if narrow else x

    @step
    def query_weights(self):
        return self.query_exponentials / self.query_exponentials.sum(self.query_axis, keepdims=True)

    @step
    def key_weights(self):
        return self.key_exponentials / self.key_exponentials.sum(self.key_axis, keepdims=True)


# ---------------------------------------------------------------------------------------------- scales


@catalogue.mistake(name="unshifted_softmax", why="One of the two softmaxes is written by hand.")
class unshifted_keys(unshifted_softmax):
    """the maximum is not subtracted before the exp of the keys alone"""

    @step
    def query_maximum(self):
        return super(unshifted_softmax, self).query_maximum


@catalogue.mistake(name="unshifted_softmax", why="One of the two softmaxes is written by hand.")
class unshifted_queries(unshifted_softmax):
    """the maximum is not subtracted before the exp of the queries alone"""

    @step
    def key_maximum(self):
        return super(unshifted_softmax, self).key_maximum


@catalogue.mistake(why="Habit: attention divides by sqrt(d).")
class scale_twice(Efficient):
    """the queries are scaled by d**-0.5 first"""

    @step
    def factor(self):
        return max(1, self.q.shape[-1]) ** -0.5

    @step
    def query_logits(self):
        return self.factor * self.q

    @step
    def d_q(self):
        return self.factor * self.d_query_logits


@catalogue.mistake(
    name="scale_twice", why="The scale is put on the weights, as released code does with a head's queries."
)
class output_scaled(Efficient):
    """the queries' weights are multiplied by d**-0.5"""

    @step
    def factor(self):
        return max(1, self.q.shape[-1]) ** -0.5

    @step
    def query_weights(self):
        return self.factor * super().query_weights

    @step
    def d_query_logits(self):
        weights = self.query_weights / self.factor
        delta = (weights * self.d_query_weights).sum(self.query_axis, keepdims=True)
        return self.factor * weights * (self.d_query_weights - delta)


# ---------------------------------------------------------------------------------------------- padding


@catalogue.mistake(why="Padding is zeroed in k before the softmax over positions.")
class tail_unmasked(Efficient):
    """padded keys count as zeros in the softmax over positions"""

    @step
    def key_logits(self):
        return np.where(self.real_keys, self.k, 0.0)


@catalogue.mistake(why="The lengths stop at a wrapper.")
class lengths_drop(Efficient):
    """padded keys and values count like any others"""

    key_lengths = None


@catalogue.mistake(why="The mask is applied to the weights, as to a dropout.")
class mask_after_softmax(Efficient):
    """padded keys count in the softmax, and their weights are zeroed afterwards"""

    @step
    def key_logits(self):
        return self.k

    @step
    def every_weight(self):
        return super().key_weights

    @step
    def key_weights(self):
        return np.where(self.real_keys, self.every_weight, 0.0)

    @step
    def d_k(self):
        return np.where(self.real_keys, self.d_key_logits, -self.every_weight * self.key_delta)


@catalogue.mistake(why="Of two arrays of one shape the wrong one is read.")
class swap_kv(Efficient):
    """keys and values are exchanged"""

    @step
    def exchanged(self):
        return self.argument("k").shape[-1] == self.argument("v").shape[-1]

    @step
    def key_logits(self):
        return np.where(self.real_keys, self.argument("v"), -np.inf) if self.exchanged else super().key_logits

    @step
    def values(self):
        return np.where(self.real_keys, self.argument("k"), 0.0) if self.exchanged else super().values

    @step
    def d_k(self):
        return super().d_v if self.exchanged else super().d_k

    @step
    def d_v(self):
        return np.where(self.real_keys, self.d_key_logits, 0.0) if self.exchanged else super().d_v


# ---------------------------------------------------------------------------------------------- gradients


@catalogue.mistake(sides=("backward",), why="The derivative of a softmax without its second term.")
class delta_missing(Efficient):
    """the queries' softmax backward lacks its row term"""

    query_delta = 0.0


@catalogue.mistake(
    name="delta_missing", sides=("backward",), why="The derivative of a softmax without its second term."
)
class key_delta_missing(Efficient):
    """the keys' softmax backward lacks its column term"""

    key_delta = 0.0


@catalogue.mistake(name="delta_missing", sides=("backward",), why="The helper of the queries is used for the keys.")
class key_delta_over_channels(Efficient):
    """the term of the keys' softmax backward is summed over channels in place of positions"""

    @step
    def key_delta(self):
        return (self.key_weights * self.d_key_weights).sum(-1, keepdims=True)


@catalogue.mistake(sides=("backward",), why="A test that calls sum().backward() hands over ones.")
class dout_ignored(Efficient):
    """the cotangent of the output is taken as 1"""

    @step
    def d_output(self):
        return np.ones_like(super().d_output)


@catalogue.mistake(sides=("backward",), why="The context is detached to save memory.")
class gradient_absent(Efficient):
    """keys and values get no gradient"""

    @step
    def d_k(self):
        return np.zeros_like(super().d_k)

    @step
    def d_v(self):
        return np.zeros_like(super().d_v)


@catalogue.mistake(sides=("backward",), why="The gradient of v is taken through the queries' weights alone.")
class efficient_value_grad(Efficient):
    """d_v uses keys in place of their weights"""

    @step
    def d_v(self):
        return np.where(self.real_keys, einsum("...kd,...de->...ke", self.k, self.d_context), 0.0)
