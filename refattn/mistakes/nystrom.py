"""How people get Nystrom attention wrong: landmarks and the zeros in front, the pseudo-inverse, its gradient."""

import numpy as np

from refattn.definitions.nystrom import Nystrom, back_through, transposed, zeros_in_front
from refattn.definitions.steps import einsum, step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.scaled_dot_product import catalogue as dense

catalogue = Catalogue(
    Nystrom,
    built_on=dense,
    without=(
        "alibi_*", "bias_*", "cap_*", "causal_*", "dlse_ignored", "drop_*", "gqa_*", "keep_*", "lengths_*",
        "lse_*", "mask_*", "none_mask", "pattern_drop", "score_mod_drop", "segments_*", "sink_*", "tail_*",
        "window_*", "empty_row_nan", "bwd_mask_dropped", "merge_empty", "masked_value_leak",
    ),
)  # fmt: skip
"""Without the mistakes with options that are not here."""


# ---------------------------------------------------------------------------------------------- zeros and landmarks


@catalogue.mistake(why="Padding stands behind everywhere else.")
class nystrom_pad_behind(Nystrom):
    """the zeros stand behind the sequence"""

    @step
    def padded_q(self):
        return zeros_behind(self.q, self.landmarks)

    @step
    def padded_k(self):
        return zeros_behind(self.k, self.landmarks)

    @step
    def padded_v(self):
        return zeros_behind(self.v, self.landmarks)

    @step
    def output(self):
        return self.attention_left.output[..., : self.q.shape[-2], :]

    @step
    def d_output(self):
        return zeros_behind(self.cotangent("output"), self.landmarks)

    @step
    def d_q(self):
        d = self.d_left.d_q + einsum("nq,...nd->...qd", self.averages_q, self.d_q_m)
        return d[..., : self.q.shape[-2], :]

    @step
    def d_k(self):
        d = self.d_right.d_k + einsum("nk,...nd->...kd", self.averages_k, self.d_k_m)
        return d[..., : self.k.shape[-2], :]

    @step
    def d_v(self):
        return self.d_right.d_v[..., : self.v.shape[-2], :]


@catalogue.mistake(why="A mean over tokens seems to mean real tokens.")
class nystrom_pad_mean(Nystrom):
    """the zeros do not count in the means"""

    @step
    def averages_q(self):
        return means_of_real(super().averages_q, self.padded_q.shape[-2] - self.q.shape[-2])

    @step
    def averages_k(self):
        return means_of_real(super().averages_k, self.padded_k.shape[-2] - self.k.shape[-2])


@catalogue.mistake(sides=("both", "forward"), why="A padding mask is given to the one softmax that has keys.")
class nystrom_pad_hidden(Nystrom):
    """the zeros in front are hidden from the softmax over keys"""

    @step
    def attention_right(self):
        real = np.arange(self.padded_k.shape[-2]) >= self.padded_k.shape[-2] - self.k.shape[-2]
        given = {"q": self.q_m, "k": self.padded_k, "v": self.padded_v, "mask": real[None, :]}
        return self.begin(self.inner, given)


@catalogue.mistake(name="tail_garbage", why="The length is cut down to a multiple, not filled up.")
class nystrom_tail_dropped(Nystrom):
    """keys beyond the last full segment are dropped"""

    @step
    def kept(self):
        return self.k.shape[-2] // self.landmarks * self.landmarks

    @step
    def padded_k(self):
        return self.k[..., : self.kept, :]

    @step
    def padded_v(self):
        return self.v[..., : self.kept, :]

    @step
    def d_k(self):
        d = self.d_right.d_k + einsum("nk,...nd->...kd", self.averages_k, self.d_k_m)
        return np.concatenate([d, np.zeros((*d.shape[:-2], self.k.shape[-2] - self.kept, d.shape[-1]))], axis=-2)

    @step
    def d_v(self):
        d = self.d_right.d_v
        return np.concatenate([d, np.zeros((*d.shape[:-2], self.v.shape[-2] - self.kept, d.shape[-1]))], axis=-2)


@catalogue.mistake(why="reshape(length / n, n) in place of (n, length / n).")
class nystrom_landmarks(Nystrom):
    """a landmark is the mean of every n-th token"""

    @step
    def averages_q(self):
        return every_nth(self.padded_q.shape[-2], self.landmarks)

    @step
    def averages_k(self):
        return every_nth(self.padded_k.shape[-2], self.landmarks)


@catalogue.mistake(name="nystrom_landmarks", why="Nystrom's method samples columns; this one averages.")
class nystrom_first_tokens(Nystrom):
    """a landmark is the first token of its segment"""

    @step
    def averages_q(self):
        return first_of_segments(super().averages_q)

    @step
    def averages_k(self):
        return first_of_segments(super().averages_k)


@catalogue.mistake(name="nystrom_landmarks", why="sum() in place of mean(), and the scale hides it.")
class nystrom_sums(Nystrom):
    """a landmark is the sum of its segment"""

    @step
    def averages_q(self):
        return 1.0 * (super().averages_q > 0)

    @step
    def averages_k(self):
        return 1.0 * (super().averages_k > 0)


@catalogue.mistake(
    name="nystrom_landmarks", why="One set of landmarks is enough for the kernel matrices of the literature."
)
class nystrom_landmarks_of_queries(Nystrom):
    """the landmarks of the queries serve as those of the keys"""

    @step
    def k_m(self):
        return self.q_m

    @step
    def d_q_m(self):
        return super().d_q_m + self.d_k_m

    @step
    def d_k(self):
        return self.rows_of(self.d_right.d_k, self.k.shape[-2])


# ---------------------------------------------------------------------------------------------- the pseudo-inverse


@catalogue.mistake(why="The maximum is taken over the whole tensor, as in the first released code.")
class nystrom_scale(Nystrom):
    """all matrices start from one scale, that of the batch"""

    scale_axes = None


@catalogue.mistake(
    name="nystrom_scale", why="The scale of each matrix is the better choice, and the option is overlooked."
)
class nystrom_scale_of_matrix(Nystrom):
    """every matrix starts from its own scale, not that of the batch"""

    @step
    def scale_axes(self):
        return (-1, -2)


@catalogue.mistake(name="nystrom_scale", why="Rows sum to 1, so that the largest column sum seems to be at most n.")
class nystrom_scale_of_landmarks(Nystrom):
    """the iteration starts from middle^T / n"""

    @step
    def largest(self):
        return np.full_like(super().largest, self.landmarks)

    @step
    def d_middle(self):
        return self.back_through_inverse[0] + transposed(self.d_first) / self.largest


@catalogue.mistake(name="nystrom_scale", why="Row sums are 1, and the maximum is taken over them.")
class nystrom_scale_of_rows(Nystrom):
    """the iteration starts from middle^T over the largest row sum, which is 1"""

    @step
    def largest(self):
        return np.ones_like(super().largest)

    @step
    def d_middle(self):
        return self.back_through_inverse[0] + transposed(self.d_first)


@catalogue.mistake(why="range(1, iterations).")
class nystrom_steps(Nystrom):
    """one step of the iteration too few"""

    @step
    def iterations(self):
        return max(0, self.argument("iterations") - 1)


@catalogue.mistake(name="nystrom_steps", why="The starting point counts as a step.")
class nystrom_step_more(Nystrom):
    """one step of the iteration too many"""

    @step
    def iterations(self):
        return self.argument("iterations") + 1


@catalogue.mistake(why="A library has a pseudo-inverse.")
class nystrom_exact(Nystrom):
    """the exact pseudo-inverse"""

    @step
    def inverse(self):
        return np.linalg.pinv(self.middle)

    @step
    def d_middle(self):
        """-Z^T dZ Z^T, where the matrix has full rank"""
        z = transposed(self.inverse)
        return -z @ self.d_inverse @ z


@catalogue.mistake(why="Newton's iteration is the one in textbooks.")
class nystrom_newton(Nystrom):
    """the iteration is Z (2 I - middle Z)"""

    @step
    def steps_of_inverse(self):
        z = [self.first]
        for _ in range(self.iterations):
            z.append(z[-1] @ (2 * np.eye(self.landmarks) - self.middle @ z[-1]))
        return z

    @step
    def back_through_inverse(self):
        d_middle, d_z = np.zeros_like(self.middle), self.d_inverse
        for z in reversed(self.steps_of_inverse[:-1]):
            d_y = -transposed(z) @ d_z
            d_middle = d_middle + d_y @ transposed(z)
            d_z = d_z @ transposed(2 * np.eye(self.landmarks) - self.middle @ z) + transposed(self.middle) @ d_y
        return d_middle, d_z


@catalogue.mistake(why="The inverse of a transpose is the transpose of the inverse, and one of them is lost.")
class nystrom_transposed(Nystrom):
    """the inverse is transposed"""

    @step
    def inverse(self):
        return transposed(super().inverse)

    @step
    def back_through_inverse(self):
        return back_through(self.middle, self.steps_of_inverse[:-1], transposed(self.d_inverse))


@catalogue.mistake(name="step_dropped", why="The middle factor is taken for a normalisation.")
class nystrom_inverse_dropped(Nystrom):
    """the pseudo-inverse is left out: the two long softmaxes are multiplied"""

    @step
    def inverse(self):
        return np.broadcast_to(np.eye(self.landmarks), super().inverse.shape)

    @step
    def d_middle(self):
        return np.zeros_like(self.middle)


@catalogue.mistake(name="step_dropped", why="The matrix is small, so that an inverse of it seems to be all.")
class nystrom_middle_for_inverse(Nystrom):
    """the middle softmax itself stands in place of its pseudo-inverse"""

    @step
    def inverse(self):
        return self.middle

    @step
    def d_middle(self):
        return self.d_inverse


# ---------------------------------------------------------------------------------------------- gradients


@catalogue.mistake(sides=("backward",), why="The scale is computed under no_grad.")
class nystrom_scale_grad(Nystrom):
    """the starting scale is a constant in the backward"""

    d_largest = 0.0


@catalogue.mistake(sides=("backward",), why="An iteration is detached as a whole.")
class nystrom_inverse_grad(Nystrom):
    """the inverse is a constant in the backward"""

    @step
    def d_middle(self):
        return np.zeros_like(self.middle)


@catalogue.mistake(name="nystrom_inverse_grad", sides=("backward",), why="All but the last step run under no_grad.")
class nystrom_last_step_grad(Nystrom):
    """the backward goes through the last step of the iteration alone"""

    @step
    def d_middle(self):
        return back_through(self.middle, self.steps_of_inverse[:-1][-1:], self.d_inverse)[0]


@catalogue.mistake(sides=("backward",), why="The landmarks are detached, as a choice of tokens would be.")
class nystrom_landmark_grad(Nystrom):
    """the landmarks get no gradient"""

    @step
    def d_q(self):
        return self.rows_of(self.d_left.d_q, self.q.shape[-2])

    @step
    def d_k(self):
        return self.rows_of(self.d_right.d_k, self.k.shape[-2])


def zeros_behind(x, landmarks):
    missing = -x.shape[-2] % landmarks
    return zeros_in_front(x[..., ::-1, :], missing)[..., ::-1, :]


def means_of_real(averages, missing):
    averages = np.where(np.arange(averages.shape[-1]) < missing, 0.0, averages)
    total = averages.sum(1, keepdims=True)
    return np.where(total == 0, 0.0, averages / np.where(total == 0, 1.0, total))


def every_nth(length, landmarks):
    return (np.arange(length) % landmarks == np.arange(landmarks)[:, None]) / max(1, length // landmarks)


def first_of_segments(averages):
    return 1.0 * (np.arange(averages.shape[1]) == (averages > 0).argmax(1)[:, None])
