"""Sinkhorn attention in steps: a soft permutation of blocks, then softmax attention inside each block, forward and backward.

    R = exp(balanced((sort_logits + noise) / temperature))      sorted = R blocks
    output = softmax(scale q [sorted k, own k]^T) [sorted v, own v], block by block

Axes: ``...`` any leading batch axes, ``h`` head, ``t`` position, ``u`` and ``v`` places and blocks, ``c`` position in a block,
``d`` and ``e`` channels.

Source: Tay, Bahri, Yang, Metzler, Juan 2020, arXiv:2002.11296, sections 3.1 to 3.3.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import Definition, contract, einsum, step

__all__ = ["Sinkhorn", "definition"]


class Sinkhorn(Definition):
    """Rows are normalised first, then columns; under causal only earlier blocks move, and sums over a column run up to the row."""

    gradients = ("q", "k", "v", "sort_logits", "temperature", "scale")
    defaults = {"temperature": 0.75, "iterations": 7, "noise": None, "causal": False, "scale": None}
    inner = ScaledDotProduct

    # ------------------------------------------------------------------ the sort

    @property
    def places(self):
        return self.sort_logits.shape[-1]

    @step
    def temperature(self):
        return np.reshape(self.argument("temperature"), ())[()]

    @step
    def scores(self):
        """(sort_logits + noise) / temperature"""
        return (self.sort_logits + (0.0 if self.noise is None else self.noise)) / self.temperature

    @step
    def may_move(self):
        """(u, v): whether block v may be put at place u."""
        every = np.ones((self.places, self.places), dtype=bool)
        return np.tril(every, -1) if self.causal else every

    @step
    def half_steps(self):
        """What each half step normalises over: rows ("rows"), then columns; under causal the rows up to one's own ("down")."""
        return ["rows", "down" if self.causal else "columns"] * self.iterations

    @step
    def balance(self):
        """ln R before the first half step and after each."""
        x = [np.where(self.may_move, self.scores, -np.inf)]
        for kind in self.half_steps:
            x.append(np.where(np.isneginf(x[-1].real), x[-1], x[-1] - log_sums(x[-1], kind)))
        return x

    @step
    def sorting(self):
        """R = exp of the balanced scores"""
        return np.exp(self.balance[-1])

    # ------------------------------------------------------------------ blocks

    def blocks(self, x):
        """(..., t, d) -> (..., u, c, d)"""
        return x.reshape(*x.shape[:-2], self.places, self.block, x.shape[-1])

    def joined(self, x):
        """(..., u, c, d) -> (..., t, d)"""
        return x.reshape(*x.shape[:-3], self.places * self.block, x.shape[-1])

    @step
    def applied(self):
        """The matrix that moves blocks."""
        return self.sorting

    @step
    def sorted_keys(self):
        """Each place's mixture of key blocks."""
        return move(self.applied, self.blocks(self.k), self.may_move)

    @step
    def sorted_values(self):
        """Each place's mixture of value blocks."""
        return move(self.applied, self.blocks(self.v), self.may_move)

    @step
    def visible(self):
        """(u, a, c): who sees whom in a block; the sorted keys first."""
        place, position = np.arange(self.places)[:, None, None], np.arange(self.block)
        own = np.ones((self.places, self.block, self.block), dtype=bool)
        if not self.causal:
            return np.concatenate([own, own], axis=-1)
        return np.concatenate([own & (place > 0), own & (position[:, None] >= position)], axis=-1)

    @step
    def attention(self):
        """Every block is a head: queries of the block, keys [sorted, own]"""
        keys, values = (
            np.concatenate(np.broadcast_arrays(moved, self.blocks(own)), axis=-2)
            for moved, own in ((self.sorted_keys, self.k), (self.sorted_values, self.v))
        )
        given = {"q": self.blocks(self.q), "k": keys, "v": values, "mask": self.visible, "scale": self.scale}
        return self.begin(self.inner, given)

    @step
    def output(self):
        return self.joined(self.attention.output)

    # ------------------------------------------------------------------ backward

    @step
    def d_attention(self):
        """The attention with the cotangent of its output."""
        d_output = self.cotangent("output")
        return self.attention.pull(output=self.blocks(d_output))

    @step
    def d_q(self):
        return self.joined(self.d_attention.d_q)

    @step
    def d_sorted_keys(self):
        return self.d_attention.d_k[..., : self.block, :]

    @step
    def d_sorted_values(self):
        return self.d_attention.d_v[..., : self.block, :]

    @step
    def d_k(self):
        """Of a block's own copy, and R^T times those of the places that hold it."""
        moved = move(transposed(self.applied), self.d_sorted_keys, transposed(self.may_move))
        return self.joined(self.d_attention.d_k[..., self.block :, :] + moved)

    @step
    def d_v(self):
        moved = move(transposed(self.applied), self.d_sorted_values, transposed(self.may_move))
        return self.joined(self.d_attention.d_v[..., self.block :, :] + moved)

    @step
    def d_applied(self):
        """d_sorted_keys . k + d_sorted_values . v"""
        keys = einsum("...ucd,...vcd->...uv", self.d_sorted_keys, self.blocks(self.k))
        return keys + einsum("...uce,...vce->...uv", self.d_sorted_values, self.blocks(self.v))

    @step
    def d_sorting(self):
        return self.d_applied

    @step
    def d_scores(self):
        """Through exp, then through the half steps from the last: dx = dy - (share of x in the sum) sum(dy)."""
        d = np.where(self.sorting == 0, 0.0, self.d_sorting * self.sorting)
        for n in range(len(self.half_steps) - 1, -1, -1):
            d = log_sums_backward(self.balance[n], self.half_steps[n], d)
        return np.where(np.isneginf(self.balance[0].real), 0.0, d)

    @step
    def d_sort_logits(self):
        return self.d_scores / self.temperature

    @step
    def d_temperature(self):
        """-sum of d_scores scores / temperature"""
        return -np.where(self.d_scores == 0, 0.0, self.d_scores * self.scores).sum() / self.temperature

    @step
    def d_scale(self):
        return self.d_attention.d_scale


def log_sums(x, kind):
    """ln of the sums of exp(x) over rows, columns, or the rows up to one's own."""
    if kind == "down":
        return np.logaddexp.accumulate(x, axis=-2)
    return np.logaddexp.reduce(x, axis=-1 if kind == "rows" else -2, keepdims=True)


def log_sums_backward(x, kind, d_y):
    """The cotangent of x from that of y = x - log_sums(x)."""
    d_y = np.where(np.isneginf(x), 0.0, d_y)
    if kind != "down":
        share = np.exp(np.where(np.isneginf(x), x, x - log_sums(x, kind)))
        return d_y - share * d_y.sum(-1 if kind == "rows" else -2, keepdims=True)
    sums = log_sums(x, kind)  # x[t] stands in the sum of every row u from t on, with the share exp(x[t] - sums[u])
    earlier = np.tril(np.ones((x.shape[-2],) * 2, dtype=bool))[:, :, None]
    exponent = np.where(earlier & ~np.isneginf(x)[..., None, :, :], x[..., None, :, :] - sums[..., :, None, :], -np.inf)
    return d_y - einsum("...utv,...uv->...tv", np.exp(exponent), d_y)


def move(matrix, blocks, allowed):
    """(..., u, v) times (..., v, c, d): what may not move contributes nothing, 0 times NaN neither."""
    flat = blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])
    moved = contract("...uv,...vx->...ux", matrix, flat, allowed)
    return moved.reshape(*moved.shape[:-1], *blocks.shape[-2:])


def transposed(x):
    return np.swapaxes(x, -1, -2)


definition = Sinkhorn
