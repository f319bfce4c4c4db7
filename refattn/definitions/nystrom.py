"""Nystrom attention in steps: three softmax attentions and the iteration for a pseudo-inverse, forward and backward.

    left  = softmax(q k_m^T / sqrt(d))     middle = softmax(q_m k_m^T / sqrt(d))     right = softmax(q_m k^T / sqrt(d))
    Z' = (13 Z - 15 Z Y + 7 Z Y^2 - Z Y^3) / 4,  Y = middle Z                        output = left Z (right v)

Axes: ``...`` any leading batch axes, ``h`` head, ``q`` and ``k`` positions, ``n``, ``m`` and ``o`` landmarks, ``d`` and ``e`` channels.

Source: Xiong et al. 2021, arXiv:2102.03902, section 3.2, algorithm 1; the iteration is its equation 11.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import Definition, einsum, step, sum_to_shape

__all__ = ["Nystrom", "definition"]

POWERS = (13, -15, 7, -1)
"""Four times the factors of Z, Z Y, Z Y^2 and Z Y^3."""


class Nystrom(Definition):
    """Landmarks are means of segments; zeros in front fill the lengths up, and count in the means and as keys."""

    gradients = ("q", "k", "v")
    defaults = {"iterations": 6, "pinv_scale": "matrix"}
    inner = ScaledDotProduct

    # ------------------------------------------------------------------ padding and landmarks

    @step
    def padded_q(self):
        """Zeros in front of q, up to a multiple of the landmarks."""
        return zeros_in_front(self.q, -self.q.shape[-2] % self.landmarks)

    @step
    def padded_k(self):
        return zeros_in_front(self.k, -self.k.shape[-2] % self.landmarks)

    @step
    def padded_v(self):
        return zeros_in_front(self.v, -self.v.shape[-2] % self.landmarks)

    @step
    def averages_q(self):
        """(n, q): the matrix of the means of segments."""
        return segment_means(self.padded_q.shape[-2], self.landmarks)

    @step
    def averages_k(self):
        return segment_means(self.padded_k.shape[-2], self.landmarks)

    @step
    def q_m(self):
        """Mean of each segment of q."""
        return einsum("nq,...qd->...nd", self.averages_q, self.padded_q)

    @step
    def k_m(self):
        """Mean of each segment of k."""
        return einsum("nk,...kd->...nd", self.averages_k, self.padded_k)

    # ------------------------------------------------------------------ three attentions

    @step
    def attention_right(self):
        """softmax(q_m k^T / sqrt(d)) v"""
        return self.begin(self.inner, {"q": self.q_m, "k": self.padded_k, "v": self.padded_v})

    @step
    def summed(self):
        """right v, (..., n, e)"""
        return self.attention_right.output

    @step
    def attention_middle(self):
        """softmax(q_m k_m^T / sqrt(d)): with unit vectors as values the output is the weights"""
        unit = np.broadcast_to(np.eye(self.landmarks), (self.k.shape[-3], self.landmarks, self.landmarks))
        return self.begin(self.inner, {"q": self.q_m, "k": self.k_m, "v": unit})

    @step
    def middle(self):
        """(..., n, n)"""
        return self.attention_middle.output

    @step
    def column_sums(self):
        return self.middle.sum(-2, keepdims=True)

    @step
    def scale_axes(self):
        """Over which axes of the column sums the largest is taken: of each matrix, or of batch and heads too."""
        return None if self.pinv_scale == "batch" else (-1, -2)

    @step
    def largest(self):
        """The largest column sum, (..., 1, 1)."""
        return self.column_sums.max(self.scale_axes, keepdims=True, initial=-np.inf)

    @step
    def first(self):
        """Z_0 = middle^T / largest"""
        return np.swapaxes(self.middle, -1, -2) / self.largest

    @step
    def steps_of_inverse(self):
        """Z before every step of the iteration, and after the last."""
        z = [self.first]
        for _ in range(self.iterations):
            y = einsum("...mn,...no->...mo", self.middle, z[-1])
            terms = [factor / 4 * z[-1] @ power for factor, power in zip(POWERS, powers(y), strict=True)]
            z.append(sum(terms))
        return z

    @step
    def inverse(self):
        """Z after the last step."""
        return self.steps_of_inverse[-1]

    @step
    def mixed(self):
        """Z (right v)"""
        return einsum("...mn,...ne->...me", self.inverse, self.summed)

    @step
    def attention_left(self):
        """softmax(q k_m^T / sqrt(d)) Z (right v)"""
        return self.begin(self.inner, {"q": self.padded_q, "k": self.k_m, "v": self.mixed})

    @step
    def output(self):
        return self.rows_of(self.attention_left.output, self.q.shape[-2])

    def rows_of(self, x, length):
        """Without the zeros in front."""
        return x[..., x.shape[-2] - length :, :]

    # ------------------------------------------------------------------ backward

    @step
    def d_output(self):
        """The cotangent, 0 for the zeros in front."""
        return zeros_in_front(self.cotangent("output"), self.padded_q.shape[-2] - self.q.shape[-2])

    @step
    def d_left(self):
        return self.attention_left.pull(output=self.d_output)

    @step
    def d_mixed(self):
        return self.d_left.d_v

    @step
    def d_inverse(self):
        """d_mixed (right v)^T; v may have batch axes that the matrices lack."""
        return sum_to_shape(einsum("...me,...ne->...mn", self.d_mixed, self.summed), self.inverse.shape)

    @step
    def d_summed(self):
        """Z^T d_mixed"""
        return einsum("...mn,...me->...ne", self.inverse, self.d_mixed)

    @step
    def d_right(self):
        return self.attention_right.pull(output=self.d_summed)

    @step
    def back_through_inverse(self):
        """Cotangents of middle (the sum over the steps) and of Z_0, by the product rule over the four terms of a step."""
        return back_through(self.middle, self.steps_of_inverse[:-1], self.d_inverse)

    @step
    def d_first(self):
        """The cotangent of Z_0."""
        return self.back_through_inverse[1]

    @step
    def d_largest(self):
        """-sum of dZ_0 . middle^T / largest^2; columns that share the largest sum share it."""
        inner = einsum("...nm,...mn->...mn", self.d_first, self.middle)
        return -inner.sum(self.scale_axes, keepdims=True) / self.largest**2

    @step
    def d_middle(self):
        """Through the iteration, through Z_0 = middle^T / largest, and through the largest column sum."""
        ties = self.column_sums == self.largest
        share = np.where(ties, self.d_largest / ties.sum(self.scale_axes, keepdims=True), 0.0)
        return self.back_through_inverse[0] + transposed(self.d_first) / self.largest + share

    @step
    def d_middle_attention(self):
        return self.attention_middle.pull(output=self.d_middle)

    @step
    def d_q_m(self):
        return self.d_middle_attention.d_q + self.d_right.d_q

    @step
    def d_k_m(self):
        return self.d_middle_attention.d_k + self.d_left.d_k

    @step
    def d_q(self):
        """Of the left attention, and through the means."""
        d = self.d_left.d_q + einsum("nq,...nd->...qd", self.averages_q, self.d_q_m)
        return self.rows_of(d, self.q.shape[-2])

    @step
    def d_k(self):
        """Of the right attention, and through the means."""
        d = self.d_right.d_k + einsum("nk,...nd->...kd", self.averages_k, self.d_k_m)
        return self.rows_of(d, self.k.shape[-2])

    @step
    def d_v(self):
        return self.rows_of(self.d_right.d_v, self.v.shape[-2])


def zeros_in_front(x, missing):
    return np.concatenate([np.zeros((*x.shape[:-2], missing, x.shape[-1])), x], axis=-2) if missing else x


def segment_means(length, landmarks):
    """(n, length): 1 / size where a position stands in segment n."""
    size = max(1, length // landmarks)
    return (np.arange(length) // size == np.arange(landmarks)[:, None]) / size


def back_through(middle, before, d_z):
    """Cotangents of ``middle`` and of the first Z of ``before``, the Z before each step, from that of the last one's result."""
    d_middle = np.zeros_like(middle)
    for z in reversed(before):
        y = middle @ z
        power, d_y, d_next = powers(y), np.zeros_like(y), np.zeros_like(d_z)
        for n, factor in enumerate(POWERS):  # Z Y^n: Z once, and each of the n factors Y
            d = factor / 4 * d_z
            d_next = d_next + d @ transposed(power[n])
            for m in range(n):
                d_y = d_y + transposed(z @ power[m]) @ d @ transposed(power[n - 1 - m])
        d_middle = d_middle + d_y @ transposed(z)
        d_z = d_next + transposed(middle) @ d_y
    return d_middle, d_z


def powers(y):
    """The unit matrix, Y, Y^2 and Y^3."""
    return [np.broadcast_to(np.eye(y.shape[-1]), y.shape), y, y @ y, y @ y @ y]


def transposed(x):
    return np.swapaxes(x, -1, -2)


definition = Nystrom
