"""Differential attention in steps: two softmax attentions over the same values, and their difference.

    output = attention(q_1, k_1, v) - lam attention(q_2, k_2, v)

Source: Ye et al. 2024, arXiv:2410.05258, section 2.1.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import Definition, step, sum_to_shape

__all__ = ["Differential", "definition"]

LEFT_OUT = ("sinks", "lse_includes_sinks", "keep_weights", "extra_keys")
SHARED = tuple(n for n in ScaledDotProduct.defaults if n not in LEFT_OUT)
WITH_HEADS = ("mask", "bias", "dropout_mask", "indices", "block_indices")


class Differential(Definition):
    """The heads of a pair are neighbours or stand in two halves; options per head count the query heads."""

    results = {"output": "output", "lses": "lses"}
    gradients = ("q", "k", "v", "lam", *(n for n in ScaledDotProduct.gradients if n in SHARED and n not in "qkv"))
    defaults = {"pairs": "adjacent", **{n: ScaledDotProduct.defaults[n] for n in SHARED}}
    inner = ScaledDotProduct

    # ------------------------------------------------------------------ heads

    @property
    def query_heads(self):
        return self.q.shape[-3]

    @property
    def has_two_keys(self):
        """Whether every map has keys of its own."""
        return self.k.shape[-3] != self.v.shape[-3]

    @step
    def whole_q(self):
        """The queries with every batch axis that lambda has."""
        if np.ndim(self.lam) < 3:
            return self.q
        lead = np.broadcast_shapes(self.lam.shape[:-2], *(x.shape[:-3] for x in (self.q, self.k, self.v)))
        return np.broadcast_to(self.q, (*lead, *self.q.shape[-3:]))

    @step
    def first_heads(self):
        """The query heads of the first map."""
        return heads_of_map(0, self.query_heads, self.pairs)

    @step
    def second_heads(self):
        return heads_of_map(1, self.query_heads, self.pairs)

    @step
    def first_keys(self):
        """The key heads of the first map."""
        return heads_of_map(0, self.k.shape[-3], self.pairs) if self.has_two_keys else np.arange(self.k.shape[-3])

    @step
    def second_keys(self):
        return heads_of_map(1, self.k.shape[-3], self.pairs) if self.has_two_keys else np.arange(self.k.shape[-3])

    def options_of(self, heads):
        """The shared options as these query heads have them."""
        found = {n: getattr(self, n) for n in SHARED}
        for n in WITH_HEADS:
            if found[n] is not None and np.ndim(found[n]) > 2 and np.shape(found[n])[-3] == self.query_heads:
                found[n] = np.asarray(found[n])[..., heads, :, :]
        if found["alibi_slopes"] is not None:
            found["alibi_slopes"] = found["alibi_slopes"][heads]
        if self.score_mod is not None:
            found["score_mod"] = told_the_heads(self.score_mod, heads)
        return found

    # ------------------------------------------------------------------ forward

    @step
    def first(self):
        """attention(q_1, k_1, v)"""
        arrays = {"q": self.whole_q[..., self.first_heads, :, :], "k": self.k[..., self.first_keys, :, :], "v": self.v}
        return self.begin(self.inner, {**arrays, **self.options_of(self.first_heads)})

    @step
    def second(self):
        """attention(q_2, k_2, v)"""
        arrays = {
            "q": self.whole_q[..., self.second_heads, :, :],
            "k": self.k[..., self.second_keys, :, :],
            "v": self.v,
        }
        return self.begin(self.inner, {**arrays, **self.options_of(self.second_heads)})

    @step
    def factor(self):
        """lam for every row, (..., h, q, 1) or a number."""
        return self.lam[..., None] if np.ndim(self.lam) else self.lam

    @step
    def output(self):
        """O_1 - lam O_2"""
        return self.first.output - self.factor * self.second.output

    @step
    def lses(self):
        return np.stack([self.first.lse, self.second.lse])

    # ------------------------------------------------------------------ backward

    @step
    def d_lses(self):
        return self.cotangent("lses")

    @step
    def d_second_output(self):
        """-lam dO"""
        return -self.factor * self.cotangent("output")

    @step
    def d_first(self):
        return self.first.pull(output=self.cotangent("output"), lse=self.d_lses[0])

    @step
    def d_second(self):
        return self.second.pull(output=self.d_second_output, lse=self.d_lses[1])

    @step
    def d_lam(self):
        """-sum_e dO O_2"""
        seen = np.isfinite(self.second.lse)[..., None]
        along = np.where(seen, self.cotangent("output") * self.second.output, 0.0)
        return sum_to_shape(-along.sum(-1), np.shape(self.lam))

    @step
    def d_q(self):
        return self.at_heads("q", self.first_heads, self.second_heads, -3)

    @step
    def d_k(self):
        return self.at_heads("k", self.first_keys, self.second_keys, -3)

    @step
    def d_v(self):
        """The sum of both maps."""
        return self.d_first.d_v + self.d_second.d_v

    @step
    def d_bias(self):
        if np.ndim(self.bias) > 2 and self.bias.shape[-3] == self.query_heads:
            return self.at_heads("bias", self.first_heads, self.second_heads, -3)
        return self.d_first.d_bias + self.d_second.d_bias

    @step
    def d_alibi_slopes(self):
        return self.at_heads("alibi_slopes", self.first_heads, self.second_heads, 0)

    @step
    def d_scale(self):
        return self.d_first.d_scale + self.d_second.d_scale

    @step
    def d_softcap(self):
        return self.d_first.d_softcap + self.d_second.d_softcap

    def at_heads(self, name, first, second, axis):
        """The gradients of both maps at the places of their heads; where they share one, the sum."""
        shape = np.shape(self.argument(name))
        parts = [np.asarray(getattr(part, f"d_{name}")) for part in (self.d_first, self.d_second)]
        if not parts[0].ndim:  # nothing reaches it
            return np.zeros(shape)
        size = shape[axis]
        total = np.zeros(tuple(size if n == axis % parts[0].ndim else m for n, m in enumerate(parts[0].shape)))
        moved = np.moveaxis(total, axis, 0)
        for part, heads in zip(parts, (first, second), strict=True):
            np.add.at(moved, heads, np.moveaxis(part, axis, 0))
        return total


def heads_of_map(number, heads, pairs):
    """Which of all heads belong to a map."""
    return np.arange(heads)[number::2] if pairs == "adjacent" else np.arange(heads // 2) + number * (heads // 2)


def told_the_heads(function, heads):
    """A score_mod that is given the numbers among all query heads."""

    def modified(logits, b, h, i, j):
        return function(logits, b, heads[h], i, j)

    if getattr(function, "derivative", None) is not None:
        modified.derivative = lambda logits, b, h, i, j: function.derivative(logits, b, heads[h], i, j)
    return modified


definition = Differential
