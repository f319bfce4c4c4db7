"""Efficient attention in steps: two softmaxes around one (d, e) matrix, forward and backward.

    output = softmax_d(q) . (softmax_k(k)^T . v)

Axes: ``...`` any leading batch axes, ``h`` head, ``q`` and ``k`` positions, ``d`` and ``e`` channels.

Source: Shen, Zhang, Zhao, Yi, Li 2018, arXiv:1812.01243, section 3.2, equation 7.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import divide, per_batch
from refattn.definitions.steps import Definition, einsum, step

__all__ = ["Efficient", "definition"]


class Efficient(Definition):
    """Keys beyond their length have weight 0 and enter nothing; without keys, or without channels, the output is 0."""

    gradients = ("q", "k", "v")
    defaults = {"key_lengths": None}

    @step
    def lead(self):
        """The batch axes of q, k and v together."""
        return np.broadcast_shapes(*(x.shape[:-3] for x in (self.q, self.k, self.v)))

    @step
    def real_keys(self):
        """Keys that are no padding, (..., 1, k, 1)."""
        keys = self.k.shape[-2]
        if self.key_lengths is None:
            return np.ones((1, keys, 1), dtype=bool)
        return np.arange(keys)[:, None] < per_batch(self.key_lengths, self.lead)

    @step
    def values(self):
        """v, 0 in padding"""
        return np.where(self.real_keys, self.v, 0.0)

    # ------------------------------------------------------------------ the queries' softmax

    @step
    def query_axis(self):
        """channels"""
        return -1

    @step
    def query_logits(self):
        return self.q

    @step
    def query_maximum(self):
        """The largest channel of a query."""
        return maximum(self.query_logits, self.query_axis)

    @step
    def query_exponentials(self):
        """exp(q - maximum)"""
        return np.exp(self.query_logits - self.query_maximum)

    @step
    def query_weights(self):
        """exp(q - maximum) / their sum over channels; 0 in a batch entry without keys"""
        total = self.query_exponentials.sum(self.query_axis, keepdims=True)
        some = self.real_keys.any(-2, keepdims=True)
        return np.where(some, divide(self.query_exponentials, total), 0.0)

    # ------------------------------------------------------------------ the keys' softmax

    @step
    def key_axis(self):
        """positions"""
        return -2

    @step
    def key_logits(self):
        """k, -inf in padding"""
        return np.where(self.real_keys, self.k, -np.inf)

    @step
    def key_maximum(self):
        """The largest entry of a channel over all positions."""
        return maximum(self.key_logits, self.key_axis)

    @step
    def key_exponentials(self):
        """exp(k - maximum)"""
        return np.exp(self.key_logits - self.key_maximum)

    @step
    def key_weights(self):
        """exp(k - maximum) / their sum over positions"""
        return divide(self.key_exponentials, self.key_exponentials.sum(self.key_axis, keepdims=True))

    # ------------------------------------------------------------------ output

    @step
    def context(self):
        """key_weights^T . v, (..., h, d, e)"""
        return einsum("...kd,...ke->...de", self.key_weights, self.values)

    @step
    def output(self):
        """query_weights . context"""
        return einsum("...qd,...de->...qe", self.query_weights, self.context)

    # ------------------------------------------------------------------ backward

    @step
    def d_output(self):
        return self.cotangent("output")

    @step
    def d_context(self):
        """query_weights^T . dO"""
        return einsum("...qd,...qe->...de", self.query_weights, self.d_output)

    @step
    def d_query_weights(self):
        """dO . context^T"""
        return einsum("...qe,...de->...qd", self.d_output, self.context)

    @step
    def query_delta(self):
        """The row term: sum over channels of weights d_weights."""
        return (self.query_weights * self.d_query_weights).sum(self.query_axis, keepdims=True)

    @step
    def d_query_logits(self):
        """weights (d_weights - delta)"""
        return np.where(self.query_weights == 0, 0.0, self.query_weights * (self.d_query_weights - self.query_delta))

    @step
    def d_q(self):
        return self.d_query_logits

    @step
    def d_key_weights(self):
        """v . d_context^T"""
        return einsum("...ke,...de->...kd", self.values, self.d_context)

    @step
    def key_delta(self):
        """The column term: sum over positions of weights d_weights."""
        return (self.key_weights * self.d_key_weights).sum(self.key_axis, keepdims=True)

    @step
    def d_key_logits(self):
        """weights (d_weights - delta)"""
        return np.where(self.key_weights == 0, 0.0, self.key_weights * (self.d_key_weights - self.key_delta))

    @step
    def d_k(self):
        return np.where(self.real_keys, self.d_key_logits, 0.0)

    @step
    def d_v(self):
        """key_weights . d_context"""
        return np.where(self.real_keys, einsum("...kd,...de->...ke", self.key_weights, self.d_context), 0.0)


def maximum(x, axis):
    """The largest real part along an axis, kept; 0 where there is none."""
    top = x.real.max(axis, keepdims=True, initial=-np.inf)
    return np.where(np.isneginf(top), 0.0, top)


definition = Efficient
