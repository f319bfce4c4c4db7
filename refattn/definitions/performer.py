"""Performer in steps: random features of queries and keys, and linear attention on them, forward and backward.

    y = x / d^(1/4)      u = features . y
    softmax: phi(x) = N^(-1/2) (exp(u - |y|^2 / 2 - largest u) + eps)      relu: phi(x) = max(u, 0) + eps

Axes: ``...`` any leading batch axes, ``h`` head, ``q`` and ``k`` positions, ``n`` feature (N of them), ``d`` and ``e`` channels.

Source: Choromanski et al. 2020, arXiv:2009.14794, section 2.3 and lemma 1; largest u and eps as in the released implementations.
"""

import numpy as np

from refattn.definitions.linear import Linear
from refattn.definitions.steps import Definition, einsum, step

__all__ = ["Performer", "definition"]


class Performer(Definition):
    """The largest u is a constant of the gradient: of a query over its features, of keys over all positions and features."""

    gradients = ("q", "k", "v", "features")
    defaults = {"kernel": "softmax", "eps": None, "causal": False, "key_sum_eps": 0.0, "chunk": None}
    inner = Linear

    @step
    def eps(self):
        """1e-4 for the softmax kernel, 1e-3 for the rectified one."""
        given = self.argument("eps")
        return (1e-3 if self.kernel == "relu" else 1e-4) if given is None else given

    @step
    def shrunk(self):
        """d^(-1/4), the factor of queries and of keys."""
        return max(1, self.q.shape[-1]) ** -0.25

    @step
    def y_q(self):
        """q / d^(1/4)"""
        return self.q * self.shrunk

    @step
    def y_k(self):
        """k / d^(1/4)"""
        return self.k * self.shrunk

    @step
    def query_vectors(self):
        """The random vectors of the queries."""
        return self.features

    @step
    def key_vectors(self):
        """The random vectors of the keys: the same."""
        return self.features

    @step
    def u_q(self):
        """features . y of the queries"""
        return einsum("...qd,nd->...qn", self.y_q, self.query_vectors)

    @step
    def u_k(self):
        """features . y of the keys"""
        return einsum("...kd,nd->...kn", self.y_k, self.key_vectors)

    @step
    def largest_q(self):
        """The largest u of each query."""
        return largest(self.u_q, (-1,))

    @step
    def largest_k(self):
        """The largest u of all keys of a head."""
        return largest(self.u_k, (-2, -1))

    @step
    def half_length(self):
        """The factor of |y|^2 in the exponent."""
        return 0.5

    @step
    def normaliser(self):
        """N^(-1/2) for the softmax kernel."""
        return 1.0 if self.kernel == "relu" else len(self.features) ** -0.5

    @step
    def grown_q(self):
        """N^(-1/2) exp(u - |y|^2 / 2 - largest u), or max(u, 0)"""
        return self.grown(self.u_q, self.y_q, self.largest_q)

    @step
    def grown_k(self):
        return self.grown(self.u_k, self.y_k, self.largest_k)

    def grown(self, u, y, top):
        if self.kernel == "relu":
            return np.where((u.real > 0) | np.isnan(u), u, 0.0)
        return self.normaliser * np.exp(u - self.half_length * (y * y).sum(-1, keepdims=True) - top)

    @step
    def phi_q(self):
        """Features of the queries, eps added."""
        return self.grown_q + self.normaliser * self.eps

    @step
    def phi_k(self):
        """Features of the keys, eps added."""
        return self.grown_k + self.normaliser * self.eps

    @step
    def attention(self):
        """Linear attention on the features."""
        given = {"q": self.phi_q, "k": self.phi_k, "v": self.v, "causal": self.causal}
        if self.key_sum_eps:
            given["normalizer"] = np.full((*self.phi_k.shape[:-2], self.phi_k.shape[-1]), self.key_sum_eps)
        return self.begin(self.inner, given | {"feature_map": "identity", "scale": 1.0})

    @step
    def output(self):
        return self.attention.output

    # ------------------------------------------------------------------ backward

    @step
    def d_attention(self):
        """Linear attention with the cotangent of its output; its final state has none."""
        return self.attention.pull(output=self.cotangent("output"))

    @step
    def slope_q(self):
        """d phi / d u: the exponential itself, or 1 above 0"""
        return 1.0 * (self.u_q.real > 0) if self.kernel == "relu" else self.grown_q

    @step
    def slope_k(self):
        return 1.0 * (self.u_k.real > 0) if self.kernel == "relu" else self.grown_k

    @step
    def d_u_q(self):
        """d phi(q) times the slope"""
        return self.slope_q * self.d_attention.d_q

    @step
    def d_u_k(self):
        """d phi(k) times the slope"""
        return self.slope_k * self.d_attention.d_k

    @step
    def length_in_q(self):
        """What -|y|^2 / 2 adds to dy: -(sum of du) y"""
        if self.kernel == "relu":
            return 0.0
        return -2 * self.half_length * self.d_u_q.sum(-1, keepdims=True) * self.y_q

    @step
    def length_in_k(self):
        if self.kernel == "relu":
            return 0.0
        return -2 * self.half_length * self.d_u_k.sum(-1, keepdims=True) * self.y_k

    @step
    def d_q(self):
        """(du . features + the length's part) / d^(1/4)"""
        return self.shrunk * (einsum("...qn,nd->...qd", self.d_u_q, self.query_vectors) + self.length_in_q)

    @step
    def d_k(self):
        return self.shrunk * (einsum("...kn,nd->...kd", self.d_u_k, self.key_vectors) + self.length_in_k)

    @step
    def d_v(self):
        return self.d_attention.d_v

    @step
    def features_in_queries(self):
        """What the queries send to the random vectors: du . y, over batch, heads and positions"""
        return einsum("...qn,...qd->nd", self.d_u_q, self.y_q)

    @step
    def features_in_keys(self):
        return einsum("...kn,...kd->nd", self.d_u_k, self.y_k)

    @step
    def d_features(self):
        return self.features_in_queries + self.features_in_keys


def largest(u, axes):
    """The largest finite entry along some axes, kept; 0 where there is none."""
    real = np.where(np.isfinite(u), u, -np.inf).real
    top = real.max(axes, keepdims=True, initial=-np.inf)
    return np.where(np.isneginf(top), 0.0, top)


definition = Performer
