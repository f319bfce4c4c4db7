"""Synthesizer attention in steps: softmax attention whose logits are made from each token alone, or learned as a table.

    hidden[q,f] = max(x[q] . w_1 + b_1, 0)       dense B = hidden w_2 + b_2       factors B[q,n P + p] = left[q,n] right[q,p]
    random B = random                            ranked B = random_1 random_2^T   others B = other_logits
    logits = sum_s alpha_s B_s,  alpha = softmax(mixture)

Source: Tay et al. 2020, arXiv:2005.00743, section 3.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import contract, einsum, step, sum_to_shape

__all__ = ["Synthesizer", "definition"]

ARRAYS = (
    "w_1", "b_1", "w_2", "b_2", "w_a", "b_a", "w_b", "b_b", "random", "random_1", "random_2", "other_logits", "mixture",
)  # fmt: skip


class Synthesizer(ScaledDotProduct):
    """The softmax over keys, its gradient and the values are those of softmax attention; only the logits are others."""

    results = {"output": "output"}
    gradients = ("x", "v", *ARRAYS)
    defaults = {**ScaledDotProduct.defaults, "x": None, **dict.fromkeys(ARRAYS)}

    # ------------------------------------------------------------------ sizes

    @step
    def lead(self):
        """The batch axes of v, x and other_logits together."""
        own = (self.v.shape[:-3], () if self.x is None else self.x.shape[:-2])
        return np.broadcast_shapes(*own, () if self.other_logits is None else self.other_logits.shape[:-3])

    @property
    def heads(self):
        return self.v.shape[-3]

    @property
    def key_heads(self):
        return self.v.shape[-3]

    @property
    def queries(self):
        tables = (self.x, self.random, self.random_1, self.other_logits)
        return next(x.shape[-2] for x in tables if x is not None)

    @property
    def keys(self):
        return self.v.shape[-2]

    # ------------------------------------------------------------------ the parts of the logits

    @step
    def before_activation(self):
        """x w_1 + b_1, (..., h, q, f)"""
        return self.affine("...qm,hmf->...hqf", self.x, self.w_1, self.b_1)

    @step
    def hidden_layer(self):
        """max(x w_1 + b_1, 0)"""
        return np.where(self.before_activation <= 0, 0.0, self.before_activation)

    @step
    def dense_part(self):
        """hidden w_2 + b_2, (..., h, q, k)"""
        return self.affine("...hqf,hfk->...hqk", self.hidden_layer, self.w_2, self.b_2)

    @step
    def left(self):
        """hidden w_a + b_a, (..., h, q, n)"""
        return self.affine("...hqf,hfn->...hqn", self.hidden_layer, self.w_a, self.b_a)

    @step
    def right_factor(self):
        """hidden w_b + b_b, (..., h, q, p)"""
        return self.affine("...hqf,hfp->...hqp", self.hidden_layer, self.w_b, self.b_b)

    @step
    def factored_part(self):
        """left[n] right[p] at key n P + p"""
        return self.left[..., self.left_of_key] * self.right_factor[..., self.right_of_key]

    @step
    def left_of_key(self):
        """n of each key, (k,)"""
        return np.arange(self.keys) // self.right_factor.shape[-1]

    @step
    def right_of_key(self):
        """p of each key, (k,)"""
        return np.arange(self.keys) % self.right_factor.shape[-1]

    @step
    def table(self):
        """random"""
        return self.random

    @step
    def ranked_table(self):
        """random_1 random_2^T"""
        return einsum("hqr,hkr->hqk", self.random_1, self.random_2)

    @step
    def parts(self):
        """The parts whose arrays are given, in the order of the mixture."""
        made = {}
        if self.w_2 is not None:
            made["dense"] = self.dense_part
        if self.w_a is not None:
            made["factored"] = self.factored_part
        if self.random is not None:
            made["table"] = self.table
        if self.random_1 is not None:
            made["ranked"] = self.ranked_table
        if self.other_logits is not None:
            made["others"] = self.other_logits
        return made

    @step
    def shares(self):
        """softmax(mixture), (h or 1, s); one part alone has share 1"""
        if self.mixture is None:
            return np.ones((1, 1))
        mixture = np.atleast_2d(self.mixture)
        exponentials = np.exp(mixture - mixture.max(-1, keepdims=True, initial=-np.inf))
        return exponentials / exponentials.sum(-1, keepdims=True)

    @step
    def logits(self):
        """sum_s alpha_s B_s"""
        shared = (self.shares[:, s, None, None] * part for s, part in enumerate(self.parts.values()))
        return np.broadcast_to(sum(shared), self.pairs)

    def affine(self, spec, x, weight, bias):
        product = einsum(spec, x, weight)
        return product if bias is None else product + bias[:, None, :]

    # ------------------------------------------------------------------ backward

    @step
    def d_lse(self):
        """The lse is no result here."""
        return np.zeros(self.pairs[:-1])

    @step
    def d_parts(self):
        """alpha_s dS"""
        return {name: self.shares[:, s, None, None] * self.d_logits for s, name in enumerate(self.parts)}

    @step
    def d_shares(self):
        """Sum of dS B_s"""
        each = [np.where(self.touched, self.d_logits * x, 0.0).sum((-1, -2)) for x in self.parts.values()]
        return sum_to_shape(np.stack(each, axis=-1), self.shares.shape)

    @step
    def d_mixture(self):
        """alpha (d_alpha - sum alpha d_alpha)"""
        alpha = self.shares
        d = alpha * (self.d_shares - (alpha * self.d_shares).sum(-1, keepdims=True))
        return np.reshape(sum_to_shape(d, np.atleast_2d(self.mixture).shape), self.mixture.shape)

    @step
    def touched_rows(self):
        """Rows that see anything, (..., h, q, 1)"""
        return self.touched.any(-1, keepdims=True)

    def d_weight(self, d, x):
        """x^T d over the rows that see anything; (..., h, q, j) and (..., [h,] q, i) -> (..., h, i, j)"""
        rows = np.broadcast_to(self.touched_rows, d.shape)
        heads = "h" if x is not self.x else ""
        return contract(f"...hqj,...{heads}qi->...hij", d, x, rows)

    @step
    def d_w_2(self):
        return self.d_weight(self.d_parts["dense"], self.hidden_layer)

    @step
    def d_b_2(self):
        return self.d_parts["dense"].sum(-2)

    @step
    def d_left(self):
        """Sum of dB right over the keys of this left factor."""
        share = self.d_parts["factored"] * self.right_factor[..., self.right_of_key]
        return self.summed(share, self.left_of_key, self.left.shape[-1])

    @step
    def d_right_factor(self):
        """Sum of dB left over the keys of this right factor."""
        share = self.d_parts["factored"] * self.left[..., self.left_of_key]
        return self.summed(share, self.right_of_key, self.right_factor.shape[-1])

    def summed(self, share, index, count):
        """Sums over the keys of one index, untouched pairs left out."""
        share = np.where(self.touched, share, 0.0)
        return einsum("...k,kn->...n", share, (index[:, None] == np.arange(count)).astype(float))

    @step
    def d_w_a(self):
        return self.d_weight(self.d_left, self.hidden_layer)

    @step
    def d_b_a(self):
        return self.d_left.sum(-2)

    @step
    def d_w_b(self):
        return self.d_weight(self.d_right_factor, self.hidden_layer)

    @step
    def d_b_b(self):
        return self.d_right_factor.sum(-2)

    @step
    def d_hidden_layer(self):
        """The cotangents of all parts that are made from it."""
        total = 0.0
        if self.w_2 is not None:
            total = total + einsum("...hqk,hfk->...hqf", self.d_parts["dense"], self.w_2)
        if self.w_a is not None:
            total = total + einsum("...hqn,hfn->...hqf", self.d_left, self.w_a)
            total = total + einsum("...hqp,hfp->...hqf", self.d_right_factor, self.w_b)
        return total

    @step
    def activation_slope(self):
        """1 where x w_1 + b_1 > 0, else 0"""
        return np.where(self.before_activation <= 0, 0.0, 1.0)

    @step
    def d_before_activation(self):
        return self.activation_slope * self.d_hidden_layer

    @step
    def d_w_1(self):
        return self.d_weight(self.d_before_activation, self.x)

    @step
    def d_b_1(self):
        return self.d_before_activation.sum(-2)

    @step
    def d_x(self):
        """Tables do not read the tokens."""
        if self.w_1 is None:
            return np.zeros(self.x.shape)
        return einsum("...hqf,hmf->...qm", self.d_before_activation, self.w_1)

    @step
    def d_table(self):
        return self.d_parts["table"]

    @step
    def d_random(self):
        return self.d_table

    @step
    def d_ranked_table(self):
        """Summed over the batch."""
        return sum_to_shape(self.d_parts["ranked"], self.ranked_table.shape)

    @step
    def d_random_1(self):
        return einsum("hqk,hkr->hqr", self.d_ranked_table, self.random_2)

    @step
    def d_random_2(self):
        return einsum("hqk,hqr->hkr", self.d_ranked_table, self.random_1)

    @step
    def d_other_logits(self):
        return self.d_parts["others"]


definition = Synthesizer
