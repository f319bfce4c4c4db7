"""How people get Performer attention wrong: the features and their constants; what follows them is linear attention."""

import numpy as np

from refattn.definitions.performer import Performer, largest
from refattn.definitions.steps import einsum, step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.linear import catalogue as linear

catalogue = Catalogue(
    Performer,
    built_on=linear,
    without=(
        "no_scale", "scale_default_missing", "eps_drop", "norm_eps_max", "feature_offset", "feature_relu", "features_differ",
        "feature_grad", "scale_grad", "tail_unmasked", "padding_in_normalizer", "state_drop", "state_transposed",
        "state_without_last_chunk", "state_cotangent", "initial_state_grad", "norm_start_drop",
    ),
)  # fmt: skip
"""Without the mistakes with arguments of linear attention that are fixed here, or that are this mechanism's own."""


# ---------------------------------------------------------------------------------------------- scale and length


@catalogue.mistake(why="The scale of the logits has no obvious place when there are no logits.")
class no_scale(Performer):
    """q and k are not divided by d^(1/4)"""

    shrunk = 1.0


@catalogue.mistake(why="The whole scale is put on both sides.")
class scale_twice(Performer):
    """q and k are divided by sqrt(d) each"""

    @step
    def shrunk(self):
        return max(1, self.q.shape[-1]) ** -0.5


@catalogue.mistake(why="The random features of a Gaussian kernel have no such term.")
class performer_length(Performer):
    """the features lack exp(-|y|^2 / 2)"""

    half_length = 0.0


@catalogue.mistake(name="performer_length", why="The half is lost.")
class performer_whole_length(Performer):
    """the features have exp(-|y|^2) in place of exp(-|y|^2 / 2)"""

    half_length = 1.0


@catalogue.mistake(name="performer_length", why="|x|^2 is taken before x is divided by d^(1/4).")
class performer_unscaled_length(Performer):
    """the features have exp(-|x|^2 / 2) of the unscaled x"""

    @step
    def half_length(self):
        return 0.5 / self.shrunk**2


# ---------------------------------------------------------------------------------------------- features and constants


@catalogue.mistake(
    name="features_differ", why="Each side draws its own random vectors.", variants=[{"places": 1}, {"places": -1}]
)
class keys_use_other_rows(Performer):
    """the keys use the random vectors in another order than the queries (moved on by {places})"""

    places = 1

    @step
    def key_vectors(self):
        return np.roll(self.features, self.places, axis=0)

    @step
    def features_in_keys(self):
        return np.roll(super().features_in_keys, -self.places, axis=0)


@catalogue.mistake(name="features_differ", why="One side negates them, as trigonometric features allow.")
class keys_use_negated_rows(Performer):
    """the keys use the negated random vectors"""

    @step
    def key_vectors(self):
        return -self.features

    @step
    def features_in_keys(self):
        return -super().features_in_keys


@catalogue.mistake(why="The random vectors are brought to norm 1, without the lengths drawn for them.")
class performer_unit_features(Performer):
    """the random vectors are normalised to length sqrt(d)"""

    @step
    def lengths(self):
        return np.sqrt((self.features**2).sum(-1, keepdims=True)) / max(1, self.features.shape[-1]) ** 0.5

    @step
    def query_vectors(self):
        return self.features / self.lengths

    @step
    def key_vectors(self):
        return self.features / self.lengths

    @step
    def d_features(self):
        d = super().d_features / self.lengths
        unit = self.features / np.sqrt((self.features**2).sum(-1, keepdims=True))
        return d - unit * (unit * d).sum(-1, keepdims=True)


@catalogue.mistake(why="Queries have a maximum of their own, so keys get one too.")
class performer_key_maximum(Performer):
    """every key has a maximum of its own, which does not cancel"""

    @step
    def largest_k(self):
        return largest(self.u_k, (-1,))


@catalogue.mistake(name="performer_key_maximum", why="The maximum is taken over the whole tensor.")
class performer_batch_maximum(Performer):
    """the keys' maximum runs over batch and heads too, which shows through eps"""

    @step
    def largest_k(self):
        return largest(self.u_k, tuple(range(self.u_k.ndim)))


@catalogue.mistake(why="exp without a maximum passes every test whose inputs are small.")
class unshifted_softmax(Performer):
    """no maximum is subtracted in the features, which shows through eps"""

    @step
    def largest_q(self):
        return np.zeros_like(super().largest_q)

    @step
    def largest_k(self):
        return np.zeros_like(super().largest_k)


@catalogue.mistake(why="It looks like a guard against 0.")
class eps_drop(Performer):
    """the constant of the features is left out"""

    eps = 0.0


@catalogue.mistake(name="eps_drop", why="The constant is added after the factor N^(-1/2), as in some code.")
class performer_eps_outside(Performer):
    """the constant is added to the features after their factor N^(-1/2)"""

    @step
    def phi_q(self):
        return self.grown_q + self.eps

    @step
    def phi_k(self):
        return self.grown_k + self.eps


@catalogue.mistake(why="A second constant beside eps goes unnoticed.")
class performer_sum_eps(Performer):
    """the constant of the key sum is left out"""

    key_sum_eps = 0.0


@catalogue.mistake(
    name="performer_sum_eps", why="The constant is added to the denominator in place of the sum of keys."
)
class performer_sum_eps_once(Performer):
    """the constant is added once to the denominator"""

    @step
    def attention(self):
        given = {
            "q": self.phi_q,
            "k": self.phi_k,
            "v": self.v,
            "causal": self.causal,
            "normalize_eps": self.key_sum_eps,
        }
        return self.begin(self.inner, given | {"feature_map": "identity", "scale": 1.0})


@catalogue.mistake(why="The rectified kernel is the default of some code.")
class performer_kernel(Performer):
    """rectified features in place of the exponential ones, or the reverse"""

    @step
    def kernel(self):
        return "softmax" if self.argument("kernel") == "relu" else "relu"


# ---------------------------------------------------------------------------------------------- gradients


@catalogue.mistake(sides=("backward",), why="|y|^2 is computed under no_grad together with the maximum.")
class performer_length_grad(Performer):
    """the backward lacks the term of |y|^2"""

    length_in_q = 0.0
    length_in_k = 0.0


@catalogue.mistake(sides=("backward",), why="The maximum is not detached.")
class performer_maximum_grad(Performer):
    """the backward goes through the maximum"""

    @step
    def moved_q(self):
        return through_maximum(super().d_u_q, self.u_q, self.largest_q, (-1,), self.kernel)

    @step
    def moved_k(self):
        return through_maximum(super().d_u_k, self.u_k, self.largest_k, (-2, -1), self.kernel)

    @step
    def d_q(self):
        return self.shrunk * (einsum("...qn,nd->...qd", self.moved_q, self.query_vectors) + self.length_in_q)

    @step
    def d_k(self):
        return self.shrunk * (einsum("...kn,nd->...kd", self.moved_k, self.key_vectors) + self.length_in_k)

    @step
    def features_in_queries(self):
        return einsum("...qn,...qd->nd", self.moved_q, self.y_q)

    @step
    def features_in_keys(self):
        return einsum("...kn,...kd->nd", self.moved_k, self.y_k)


@catalogue.mistake(sides=("backward",), why="Random vectors are buffers in most code.")
class gradient_absent(Performer):
    """the random vectors get no gradient"""

    @step
    def d_features(self):
        return np.zeros_like(super().d_features)


@catalogue.mistake(
    name="grad_subset", sides=("backward",), why="Two calls of one feature map, one of them under no_grad."
)
class features_from_keys_alone(Performer):
    """the random vectors learn from the keys alone"""

    features_in_queries = 0.0


def through_maximum(d_u, u, top, axes, kernel):
    """Minus what all entries send to the largest one."""
    if kernel == "relu":
        return d_u
    return d_u - (u == top) * d_u.sum(axes, keepdims=True)
