"""Forgetting attention in steps: causal softmax attention with the sum of the gates behind each key as one more bias.

    decay[h,i,j] = sum of log_forget[h,l] over j < l <= the position of query i        logits + bias + ALiBi + decay

Source: Lin et al. 2025, arXiv:2503.02130, section 3.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import constant, einsum, step

__all__ = ["Forgetting", "definition"]


class Forgetting(ScaledDotProduct):
    """Softmax over the keys up to the query, each less by what the gates after it forget."""

    gradients = (*ScaledDotProduct.gradients, "log_forget")
    defaults = {**{n: x for n, x in ScaledDotProduct.defaults.items() if n != "causal"}, "align": "lower_right"}
    causal = constant(True)

    # ------------------------------------------------------------------ the decay

    @step
    def behind(self):
        """Whether token l lies behind key j, (k, k): l > j."""
        return np.arange(self.own_keys)[None, :] > np.arange(self.own_keys)[:, None]

    @step
    def decay_to(self):
        """The sum of log_forget[l] over j < l <= p, (..., h, j, p)."""
        gates = np.asarray(self.log_forget)[..., None, :]
        return np.cumsum(np.where(self.behind, gates, 0.0), axis=-1)

    @step
    def query_position(self):
        """The key position of every query, (..., 1, q, 1); behind the last key there are no more gates."""
        at = self.j - self.ahead
        return np.clip(at[..., :1], 0, max(0, self.own_keys - 1)).astype(int)

    @step
    def stands_at(self):
        """Ones where query i stands at position p, (..., 1, q, p)."""
        return self.query_position == np.arange(self.own_keys)

    @step
    def decay(self):
        """decay_to at the places of the queries, (..., h, q, k)."""
        chosen = np.swapaxes(self.decay_to, -1, -2)  # (..., h, p, j)
        if not self.own_keys:
            return np.zeros(self.own_pairs)
        lead = np.broadcast_shapes(chosen.shape[:-2], self.query_position.shape[:-2])
        chosen = np.broadcast_to(chosen, (*lead, *chosen.shape[-2:]))
        return np.take_along_axis(chosen, np.broadcast_to(self.query_position, (*lead, self.queries, 1)), axis=-2)

    @step
    def forgotten(self):
        """Pairs with a gate of 0 between them."""
        return np.isneginf(self.decay.real)

    @step
    def added(self):
        """bias + ALiBi + decay"""
        return super().added + self.beside(np.where(self.forgotten, 0.0, self.decay), 0.0)

    @step
    def hidden(self):
        """Also by a gate of 0."""
        return super().hidden | self.beside(np.broadcast_to(self.forgotten, self.own_pairs), False)

    # ------------------------------------------------------------------ backward

    @step
    def d_decay(self):
        """What decay is given, at (position p, key j)."""
        return einsum("...hqj,...hqp->...hpj", self.d_own_added, np.broadcast_to(
            self.stands_at, (*self.pairs[:-1], self.own_keys)).astype(float))  # fmt: skip

    @step
    def d_log_forget(self):
        """The sum over the pairs j < l <= p."""
        upwards = (~self.behind).astype(float)  # l <= p, (p, l)
        total = einsum("...hpj,jl,pl->...hl", self.d_decay, self.behind.astype(float), upwards)
        return np.where(np.isneginf(np.real(self.log_forget)), 0.0, total)


definition = Forgetting
