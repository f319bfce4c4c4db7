"""Softmax and logsumexp over the last axis, in steps.

weights = exp(x - maximum) / row_sum        lse = ln(row_sum) + maximum        masked entries are selected away
"""

import numpy as np

from refattn.definitions.steps import Definition, step

__all__ = ["LogSumExp", "Softmax", "rows_example"]


class Softmax(Definition):
    """A row that sees nothing has weights 0."""

    gradients = ("x",)
    defaults = {"mask": None}

    @step
    def seen(self):
        """Where an entry counts."""
        hidden = np.isneginf(self.x.real)
        return ~hidden if self.mask is None else np.broadcast_to(self.mask, self.x.shape) & ~hidden

    @step
    def maximum(self):
        """Of the entries that count, 0 where there are none."""
        top = np.where(self.seen, self.x.real, -np.inf).max(-1, keepdims=True, initial=-np.inf)
        return np.where(np.isneginf(top), 0.0, top)

    @step
    def exponentials(self):
        """exp(x - maximum)"""
        return np.where(self.seen, np.exp(self.x - self.maximum), 0.0)

    @step
    def row_sum(self):
        return self.exponentials.sum(-1, keepdims=True)

    @step
    def weights(self):
        """exponentials / row_sum"""
        return self.exponentials / np.where(self.row_sum == 0, 1.0, self.row_sum)

    @step
    def output(self):
        return self.weights

    # ------------------------------------------------------------------ backward

    @step
    def d_x(self):
        """P (dP - sum_k P dP)"""
        d = np.where(self.weights == 0, 0.0, self.cotangent("output"))
        return self.weights * (d - (self.weights * d).sum(-1, keepdims=True))


class LogSumExp(Softmax):
    """-inf for a row that sees nothing."""

    @step
    def output(self):
        """ln(row_sum) + maximum"""
        return (np.log(self.row_sum) + self.maximum)[..., 0]

    @step
    def d_x(self):
        """P d_lse"""
        return np.where(self.weights == 0, 0.0, self.weights * self.cotangent("output")[..., None])


def rows_example(rng, *, b=2, q=3, k=5):
    """Normal logits x (b,q,k) and a mask with one empty row."""
    mask = rng.random((b, q, k)) < 0.7
    mask[:1, :1] = False
    return {"x": rng.standard_normal((b, q, k)), "mask": mask}
