"""How people get linear attention wrong: the normaliser, the state and its chunks, the features, the gradients."""

import numpy as np

from refattn.definitions.linear import Linear
from refattn.definitions.steps import einsum, step
from refattn.mistakes.engine import Catalogue

catalogue = Catalogue(Linear)

CHUNKS = [{"size": n} for n in (16, 32, 64)]


# ---------------------------------------------------------------------------------------------- the sum of the weights


@catalogue.mistake(why="A function named normalizer returns the sum in one place and its inverse in another.")
class norm_recip(Linear):
    """values are multiplied by the sum of weights in place of its inverse"""

    @step
    def reciprocal(self):
        return super().divisor

    @step
    def d_divisor(self):
        d = (self.d_output * self.numerator).sum(-1, keepdims=True)
        return d if self.normalize else np.zeros_like(d)


@catalogue.mistake(why="The sum over keys is taken before the causal loop, where the full form has it.")
class norm_future(Linear):
    """causal rows are divided by the sum over all keys"""

    @step
    def divisor(self):
        sums = einsum("...qd,...kd->...qk", self.scaled_features, self.key_features)
        return sums.sum(-1, keepdims=True) + self.start_share + self.normalize_eps

    @step
    def divisor_in_features(self):
        sums = self.key_features.sum(-2, keepdims=True) + self.start_normalizer[..., None, :]
        return self.d_divisor * sums

    @step
    def divisor_in_keys(self):
        return (self.d_divisor * self.scaled_features).sum(-2, keepdims=True) * np.ones((self.keys, 1))


@catalogue.mistake(why="A sum of positive features looks safe to divide by.")
class eps_drop(Linear):
    """the constant of the divisor is left out"""

    normalize_eps = 0.0


@catalogue.mistake(why="The constant is meant as a floor: max(sum, eps).")
class norm_eps_max(Linear):
    """the sum of weights is bounded from below by the constant, which is not added"""

    @step
    def divisor(self):
        total = self.weights.sum(-1, keepdims=True) + self.start_share
        return np.maximum(total, self.normalize_eps)

    @step
    def d_divisor(self):
        return np.where(self.divisor == self.normalize_eps, 0.0, super().d_divisor)


@catalogue.mistake(why="Kernels of the later, unnormalised variants have no divisor.")
class norm_drop(Linear):
    """the output is not divided by the sum of weights"""

    normalize = False


@catalogue.mistake(why="The initial normalizer is not handed to the divisor, only the keys' own sums are.")
class norm_start_drop(Linear):
    """the initial normalizer enters the result, but not the divisor"""

    start_share = 0.0

    @step
    def divisor_in_features(self):
        return super().divisor_in_features - self.d_divisor * self.start_normalizer[..., None, :]

    @step
    def d_normalizer(self):
        return self.d_final_normalizer


# ---------------------------------------------------------------------------------------------- who sees whom


@catalogue.mistake(why="The full form is used on a path that is to be causal.")
class causal_drop(Linear):
    """all keys are seen"""

    visible_by_causal = True


@catalogue.mistake(why="The state is read before the query's own key is written.")
class causal_strict(Linear):
    """the query's own key is not seen"""

    @step
    def visible_by_causal(self):
        seen = super().visible_by_causal
        return seen & ~np.eye(self.queries, self.keys, dtype=bool) if self.causal else seen


@catalogue.mistake(name="chunk_vs_recurrent", why="The mask inside a chunk is forgotten.", variants=CHUNKS)
class chunk_not_causal(Linear):
    """inside its own chunk of {size} keys a query sees all of them"""

    size = 16

    @step
    def visible_by_causal(self):
        if not self.causal:
            return True
        own = np.arange(self.queries)[:, None] // self.size == np.arange(self.keys) // self.size
        return super().visible_by_causal | own


@catalogue.mistake(
    name="chunk_vs_recurrent",
    why="Only the part between chunks is computed, or the inner one is lost.",
    variants=CHUNKS,
)
class chunk_inner_missing(Linear):
    """of its own chunk of {size} keys a query sees nothing"""

    size = 16

    @step
    def visible_by_causal(self):
        if not self.causal:
            return True
        return np.arange(self.queries)[:, None] // self.size > np.arange(self.keys) // self.size


@catalogue.mistake(
    name="state_lost_at_chunk", why="The state is assigned to where it is to be added up.", variants=CHUNKS
)
class state_of_one_chunk(Linear):
    """a query sees its own chunk of {size} keys and the one before it, nothing earlier"""

    size = 16

    @step
    def visible_by_causal(self):
        if not self.causal:
            return True
        gap = np.arange(self.queries)[:, None] // self.size - np.arange(self.keys) // self.size
        return super().visible_by_causal & (gap <= 1)


@catalogue.mistake(name="state_lost_at_chunk", why="Chunks are computed as sequences of their own.", variants=CHUNKS)
class state_never_carried(Linear):
    """a query sees its own chunk of {size} keys alone"""

    size = 16

    @step
    def visible_by_causal(self):
        if not self.causal:
            return True
        same = np.arange(self.queries)[:, None] // self.size == np.arange(self.keys) // self.size
        return super().visible_by_causal & same


@catalogue.mistake(why="phi(0) = 1: a padded key of zeros still has weight.")
class tail_unmasked(Linear):
    """padded keys enter the state"""

    @step
    def real_keys(self):
        return np.ones((1, self.keys, 1), dtype=bool)


@catalogue.mistake(why="Only v is masked: the numerator is right and the sum of weights is not.")
class padding_in_normalizer(Linear):
    """padded keys count in the sum of weights"""

    @step
    def key_features(self):
        return self.phi(self.k)

    @step
    def visible(self):
        return np.broadcast_to(self.visible_by_causal, (1, self.queries, self.keys))

    @step
    def d_k(self):
        d = self.d_key_features
        return np.where(d == 0, 0.0, d * self.phi_slope(self.k))


# ---------------------------------------------------------------------------------------------- state and scale


@catalogue.mistake(name="state_drop", why="The recurrence starts from zeros.")
class state_ignored(Linear):
    """the initial state is not used"""

    state = None

    @step
    def d_state(self):
        return np.zeros(np.shape(self.argument("state")))


@catalogue.mistake(name="state_drop", why="A state is handed on without the sum that belongs to it.")
class normalizer_ignored(Linear):
    """the initial normalizer is not used"""

    normalizer = None

    @step
    def d_normalizer(self):
        return np.zeros(np.shape(self.argument("normalizer")))


@catalogue.mistake(why="The loop over chunks returns the state that it entered the last one with.", variants=CHUNKS)
class state_without_last_chunk(Linear):
    """the final state leaves out the last chunk of {size} keys"""

    size = 16

    @step
    def written(self):
        last = max(0, self.keys - 1) // self.size * self.size
        return (np.arange(self.keys) < last)[:, None]

    @step
    def final_state(self):
        own = einsum("...kd,...ke->...de", np.where(self.written, self.key_features, 0.0), self.values)
        return own + self.start_state

    @step
    def final_normalizer(self):
        return np.where(self.written, self.key_features, 0.0).sum(-2) + self.start_normalizer

    @step
    def state_in_keys(self):
        return np.where(self.written, super().state_in_keys, 0.0)

    @step
    def state_in_values(self):
        return np.where(self.written, super().state_in_values, 0.0)


@catalogue.mistake(why="One library keeps states as (d, e), another as (e, d).")
class state_transposed(Linear):
    """the initial state is read transposed"""

    @step
    def start_state(self):
        right = super().start_state
        return np.swapaxes(right, -1, -2) if right.shape[-1] == right.shape[-2] else right

    @step
    def d_state(self):
        d = super().d_state - self.d_final_state
        return (np.swapaxes(d, -1, -2) if d.shape[-1] == d.shape[-2] else d) + self.d_final_state


@catalogue.mistake(why="With normalised weights the scale cancels, so that nobody misses it.")
class no_scale(Linear):
    """queries are not scaled"""

    scale = 1.0
    d_scale = 0.0


@catalogue.mistake(why="The kernel takes a scale and has none of its own.")
class scale_default_missing(Linear):
    """the default scale is left out, a given one is honoured"""

    default_scale = 1.0


# ---------------------------------------------------------------------------------------------- features


@catalogue.mistake(why="elu alone is the library's function; the 1 is a line of its own.")
class feature_offset(Linear):
    """elu without the 1 added"""

    @step
    def phi(self):
        right = super().phi
        return right if self.feature_map == "identity" else lambda x: right(x) - 1


@catalogue.mistake(why="Both are positive features, and relu is cheaper.")
class feature_relu(Linear):
    """relu features"""

    @step
    def phi(self):
        return super().phi if self.feature_map == "identity" else lambda x: np.where(x.real > 0, x, 0.0)

    @step
    def phi_slope(self):
        return super().phi_slope if self.feature_map == "identity" else lambda x: 1.0 * (x.real > 0)


@catalogue.mistake(why="The map is applied inside the key cache and once more by the caller, or by neither.")
class features_differ(Linear):
    """queries meet the features of the keys as they are, without the feature map"""

    @step
    def query_features(self):
        return self.q

    @step
    def d_q(self):
        return self.scale * self.d_scaled_features


# ---------------------------------------------------------------------------------------------- gradients


@catalogue.mistake(sides=("backward",), why="The features are linear above 0, where most test inputs are.")
class feature_grad(Linear):
    """the slope of the features is taken as 1"""

    @step
    def phi_slope(self):
        return lambda x: 1.0


@catalogue.mistake(sides=("backward",), why="The divisor is detached, or its kernel has no backward.")
class delta_missing(Linear):
    """the sum of weights counts as a constant in the backward"""

    @step
    def d_divisor(self):
        return np.zeros_like(super().d_divisor)


@catalogue.mistake(sides=("backward",), why="The running sum of the keys comes from a kernel without a backward.")
class norm_grad_missing(Linear):
    """the gradient through the divisor is left out of dk"""

    divisor_in_keys = 0.0


@catalogue.mistake(
    name="norm_grad_missing", sides=("backward",), why="The two divisors are fused, and one is forgotten."
)
class norm_grad_missing_in_dq(Linear):
    """the gradient through the divisor is left out of dq"""

    divisor_in_features = 0.0


@catalogue.mistake(sides=("backward",), why="Training never used the final state, so nobody looked.")
class state_cotangent(Linear):
    """cotangents of the final state are ignored"""

    @step
    def d_final_state(self):
        return np.zeros_like(super().d_final_state)

    @step
    def d_final_normalizer(self):
        return np.zeros_like(super().d_final_normalizer)


@catalogue.mistake(sides=("backward",), why="The initial state is taken for a constant.")
class initial_state_grad(Linear):
    """initial state and normalizer get no gradient"""

    @step
    def d_state(self):
        return np.zeros_like(super().d_state)

    @step
    def d_normalizer(self):
        return np.zeros_like(super().d_normalizer)


@catalogue.mistake(sides=("backward",), why="A test that calls sum().backward() hands over ones.")
class dout_ignored(Linear):
    """the cotangent of the output is taken as 1"""

    @step
    def d_output(self):
        return np.ones_like(super().d_output)


@catalogue.mistake(sides=("backward",), why="The scale stands in the forward's features, which the backward reads.")
class scale_grad(Linear):
    """dq is not scaled"""

    @step
    def d_q(self):
        d = self.d_scaled_features
        return np.where(d == 0, 0.0, d * self.phi_slope(self.q))
