"""Linear attention in steps, through the whole matrix of its weights, forward and backward.

    weights = scale phi(q) . phi(k), where visible      output = (weights . v + f . state) / (weights . 1 + f . normalizer + eps)

Axes: ``...`` any leading batch axes, ``h`` head, ``q`` and ``k`` positions, ``d`` feature, ``e`` value channel.

Source: Katharopoulos, Vyas, Pappas, Fleuret 2020, arXiv:2006.16236, sections 3.2 and 3.3.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import per_batch
from refattn.definitions.steps import Definition, contract, einsum, step

__all__ = ["Linear", "definition"]


class Linear(Definition):
    """A query reads the sums over the keys that it sees; keys beyond their length enter nothing."""

    results = {"output": "output", "state": "final_state", "normalizer": "final_normalizer"}
    gradients = ("q", "k", "v", "scale", "state", "normalizer")
    defaults = {
        "feature_map": "elu", "causal": False, "scale": None, "normalize": True, "normalize_eps": 0.0, "state": None,
        "normalizer": None, "key_lengths": None, "form": None, "chunk": None,
    }  # fmt: skip

    # ------------------------------------------------------------------ sizes and arguments

    @step
    def lead(self):
        """The batch axes of all arrays together."""
        arrays = [self.q, self.k, self.v, *(() if self.state is None else (self.state,))]
        sums = () if self.normalizer is None else (self.normalizer.shape[:-2],)
        return np.broadcast_shapes(*(x.shape[:-3] for x in arrays), *sums)

    @property
    def queries(self):
        return self.q.shape[-2]

    @property
    def keys(self):
        return self.k.shape[-2]

    @step
    def scale(self):
        given = self.argument("scale")
        return self.default_scale if given is None else np.reshape(given, ())[()]

    @step
    def default_scale(self):
        """d**-0.5"""
        return self.q.shape[-1] ** -0.5 if self.q.shape[-1] else 1.0

    @step
    def start_state(self):
        """The sum of phi(k) v^T over earlier keys, (..., h, d, e)."""
        shape = (*self.lead, self.q.shape[-3], self.q.shape[-1], self.v.shape[-1])
        return np.broadcast_to(0.0 if self.state is None else self.state, shape)

    @step
    def start_normalizer(self):
        """The sum of phi(k) over earlier keys, (..., h, d)."""
        shape = (*self.lead, self.q.shape[-3], self.q.shape[-1])
        return np.broadcast_to(0.0 if self.normalizer is None else self.normalizer, shape)

    # ------------------------------------------------------------------ features

    @step
    def phi(self):
        """The feature map, a function."""
        return identity if self.feature_map == "identity" else elu_plus_one

    @step
    def phi_slope(self):
        """Its derivative, a function."""
        return one if self.feature_map == "identity" else elu_slope

    @step
    def query_features(self):
        """phi(q)"""
        return self.phi(self.q)

    @step
    def key_features(self):
        """phi(k), 0 in padding"""
        return np.where(self.real_keys, self.phi(self.k), 0.0)

    @step
    def scaled_features(self):
        """f = scale phi(q)"""
        return self.scale * self.query_features

    @step
    def values(self):
        """v, 0 in padding"""
        return np.where(self.real_keys, self.v, 0.0)

    # ------------------------------------------------------------------ who sees whom

    @step
    def real_keys(self):
        """Keys that are no padding, (..., 1, k, 1)."""
        if self.key_lengths is None:
            return np.ones((1, self.keys, 1), dtype=bool)
        return np.arange(self.keys)[:, None] < per_batch(self.key_lengths, self.lead)

    @step
    def visible_by_causal(self):
        return np.arange(self.queries)[:, None] >= np.arange(self.keys) if self.causal else True

    @step
    def visible(self):
        """(..., 1, q, k)"""
        return self.visible_by_causal & np.swapaxes(self.real_keys, -1, -2) & np.ones((self.queries, 1), dtype=bool)

    # ------------------------------------------------------------------ forward

    @step
    def products(self):
        """f . phi(k)"""
        return einsum("...qd,...kd->...qk", self.scaled_features, self.key_features)

    @step
    def weights(self):
        """f . phi(k), where visible"""
        return np.where(self.visible, self.products, 0.0)

    @step
    def numerator(self):
        """weights . v + f . state"""
        own = contract("...qk,...ke->...qe", self.weights, self.values, self.visible)
        return own + einsum("...qd,...de->...qe", self.scaled_features, self.start_state)

    @step
    def start_share(self):
        """f . normalizer, what earlier keys add to the sum of a row, (..., q, 1)."""
        return einsum("...qd,...d->...q", self.scaled_features, self.start_normalizer)[..., None]

    @step
    def divisor(self):
        """weights . 1 + f . normalizer + eps, (..., q, 1)"""
        return self.weights.sum(-1, keepdims=True) + self.start_share + self.normalize_eps

    @step
    def reciprocal(self):
        """1 / divisor; 0 in rows without any weight."""
        empty = self.divisor == 0
        return np.where(empty, 0.0, 1 / np.where(empty, 1.0, self.divisor))

    @step
    def output(self):
        """numerator / divisor"""
        return self.numerator * self.reciprocal if self.normalize else self.numerator

    @step
    def final_state(self):
        """state + phi(k)^T v"""
        return einsum("...kd,...ke->...de", self.key_features, self.values) + self.start_state

    @step
    def final_normalizer(self):
        """normalizer + sum of phi(k)"""
        return self.key_features.sum(-2) + self.start_normalizer

    # ------------------------------------------------------------------ backward

    @step
    def d_output(self):
        return self.cotangent("output")

    @step
    def d_final_state(self):
        return self.cotangent("state")

    @step
    def d_final_normalizer(self):
        return self.cotangent("normalizer")

    @step
    def d_numerator(self):
        """dO / divisor"""
        return self.d_output * self.reciprocal if self.normalize else self.d_output

    @step
    def d_divisor(self):
        """-(dO . output) / divisor, (..., q, 1)"""
        d = -(self.d_numerator * self.output).sum(-1, keepdims=True)
        return d if self.normalize else np.zeros_like(d)

    @step
    def divisor_in_features(self):
        """What the divisor adds to df: d_divisor (sum of the visible phi(k) + normalizer)."""
        seen = np.where(self.visible, self.d_divisor, 0.0)
        own = contract("...qk,...kd->...qd", seen, self.key_features, self.visible)
        return own + self.d_divisor * self.start_normalizer[..., None, :]

    @step
    def divisor_in_keys(self):
        """What the divisor adds to dphi(k): f of the queries that see the key, times d_divisor."""
        seen = np.where(self.visible, self.d_divisor, 0.0)
        return contract("...qk,...qd->...kd", seen, self.scaled_features, self.visible)

    @step
    def d_weights(self):
        """dO/divisor . v, where visible"""
        return np.where(self.visible, einsum("...qe,...ke->...qk", self.d_numerator, self.values), 0.0)

    @step
    def d_scaled_features(self):
        """d_weights . phi(k) + dO/divisor . state^T + what the divisor adds"""
        own = contract("...qk,...kd->...qd", self.d_weights, self.key_features, self.visible)
        start = einsum("...qe,...de->...qd", self.d_numerator, self.start_state)
        return own + start + self.divisor_in_features

    @step
    def d_key_features(self):
        """d_weights^T . f + what the divisor adds + v dS^T + dz"""
        own = contract("...qk,...qd->...kd", self.d_weights, self.scaled_features, self.visible)
        return own + self.divisor_in_keys + self.state_in_keys

    @step
    def state_in_keys(self):
        """v dS^T + dz, what the final sums send to phi(k)."""
        return einsum("...ke,...de->...kd", self.values, self.d_final_state) + self.d_final_normalizer[..., None, :]

    @step
    def d_q(self):
        """scale df phi'(q)"""
        d = self.scale * self.d_scaled_features
        return np.where(d == 0, 0.0, d * self.phi_slope(self.q))

    @step
    def d_k(self):
        """dphi(k) phi'(k)"""
        d = np.where(self.real_keys, self.d_key_features, 0.0)
        return np.where(d == 0, 0.0, d * self.phi_slope(self.k))

    @step
    def d_v(self):
        """weights^T . dO/divisor + phi(k) dS"""
        own = contract("...qk,...qe->...ke", self.weights, self.d_numerator, self.visible)
        return np.where(self.real_keys, own + self.state_in_values, 0.0)

    @step
    def state_in_values(self):
        """phi(k) dS"""
        return einsum("...kd,...de->...ke", self.key_features, self.d_final_state)

    @step
    def d_scale(self):
        """Sum of df phi(q)"""
        d = self.d_scaled_features
        return np.where(d == 0, 0.0, d * self.query_features).sum()

    @step
    def d_state(self):
        """f^T dO/divisor + dS"""
        return einsum("...qd,...qe->...de", self.scaled_features, self.d_numerator) + self.d_final_state

    @step
    def d_normalizer(self):
        """Sum of f d_divisor, + dz"""
        return (self.scaled_features * self.d_divisor).sum(-2) + self.d_final_normalizer


def elu_plus_one(x):
    """x + 1 above 0, exp(x) below"""
    return np.where(x.real > 0, x + 1, elu_slope(x))


def elu_slope(x):
    """1 above 0, exp(x) below"""
    return np.exp(np.where(x.real > 0, 0.0, x))


def identity(x):
    return x


def one(x):
    return 1.0


definition = Linear
