"""Gated linear attention in steps: the recurrence itself, token by token, and back.

    S_t = exp(gamma) S_{t-1} + k v^T      output = scale q . S_t

Axes: ``...`` any leading batch axes, ``g`` state head, ``n`` output head, ``t`` token, ``d`` key channel, ``e`` value channel.

Source: Yang, Wang, Shen, Panda, Kim 2023, arXiv:2312.06635, sections 3 and 4.
"""

import numpy as np

from refattn.definitions.recurrence import Recurrence, add_heads
from refattn.definitions.steps import einsum, step

__all__ = ["GatedLinear", "definition"]


class GatedLinear(Recurrence):
    """Every token adds its key and value to a state that decays."""

    gradients = ("q", "k", "v", "decay", "channel_decay", "head_decay", "bonus", "scale", "state")

    # ------------------------------------------------------------------ forward

    @step
    def advance(self):
        """exp(gamma) S + k v^T"""
        factors, keys, values = self.factors, self.written_keys, self.written_values
        return lambda state, t: factors[..., t, :, None] * state + keys[..., t, :, None] * values[..., t, None, :]

    @step
    def written_keys(self):
        return self.keys

    @step
    def written_values(self):
        return self.values

    @step
    def read_states(self):
        """The state behind the token; read before: the one before it, which has not decayed."""
        return self.at_outputs(self.entering if self.read == "before" else self.states)

    @step
    def own_keys(self):
        """bonus k, with which a query reads its own token's value, (..., g, t, d)."""
        return self.bonus[:, None, :] * self.keys

    @step
    def own_weights(self):
        """q . bonus k, (..., n, t, 1)"""
        return (self.queries * np.take(self.own_keys, self.reads_of_heads, axis=-3)).sum(-1, keepdims=True)

    @step
    def own_values(self):
        return np.take(self.values, self.reads_of_heads, axis=-3)

    @step
    def output(self):
        """q . S + (q . bonus k) v"""
        read = einsum("...td,...tde->...te", self.queries, self.read_states)
        return np.where(self.real, read + (0.0 if self.bonus is None else self.own_weights * self.own_values), 0.0)

    # ------------------------------------------------------------------ backward

    @step
    def retreat(self):
        """exp(gamma) dS"""
        factors = self.factors
        return lambda d_state, t: factors[..., t, :, None] * d_state

    @step
    def d_own_weights(self):
        """dO . v, (..., n, t, 1)"""
        return (self.d_output * self.own_values).sum(-1, keepdims=True)

    @step
    def d_queries(self):
        """S dO + bonus k (dO . v)"""
        if self.bonus is None:
            return super().d_queries
        return super().d_queries + np.take(self.own_keys, self.reads_of_heads, axis=-3) * self.d_own_weights

    @step
    def d_own_keys(self):
        """q (dO . v), added up at the states."""
        return add_heads(self.queries * self.d_own_weights, self.reads_of_heads, self.states_of_values)

    @step
    def bonus_in_keys(self):
        return 0.0 if self.bonus is None else self.bonus[:, None, :] * self.d_own_keys

    @step
    def bonus_in_values(self):
        """(q . bonus k) dO"""
        if self.bonus is None:
            return 0.0
        return add_heads(self.own_weights * self.d_output, self.reads_of_heads, self.states_of_values)

    @step
    def d_written_keys(self):
        """dS v"""
        return einsum("t...de,...te->...td", self.d_states, self.written_values)

    @step
    def d_written_values(self):
        """dS^T k"""
        return einsum("t...de,...td->...te", self.d_states, self.written_keys)

    @step
    def d_keys(self):
        return self.d_written_keys + self.bonus_in_keys

    @step
    def d_values(self):
        return self.d_written_values + self.bonus_in_values

    @step
    def d_k(self):
        return self.from_states(self.d_keys, self.k)

    @step
    def d_v(self):
        return self.from_states(self.d_values, self.v)

    @step
    def d_bonus(self):
        """sum of k q (dO . v)"""
        return einsum("...gtd->gd", self.d_own_keys * self.keys)


definition = GatedLinear
