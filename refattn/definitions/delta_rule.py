"""Delta rule attention in steps: the recurrence itself, row by row, and back.

    A = exp(gamma) S_{t-1}      u = beta (v - A^T p)      S_t = A + k u^T      output = scale q . S_t

Axes: ``...`` any leading batch axes, ``g`` state head, ``n`` output head, ``t`` row, ``d`` key channel, ``e`` value channel.

Source: Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464, section 3; Yang et al. 2024, arXiv:2406.06484.
"""

import numpy as np

from refattn.definitions.recurrence import Recurrence, reciprocal_length
from refattn.definitions.steps import einsum, step

__all__ = ["DeltaRule", "definition"]


class DeltaRule(Recurrence):
    """What a key reads from the decayed state is replaced by the token's value."""

    gradients = ("q", "k", "v", "beta", "decay", "channel_decay", "head_decay", "erase_key", "scale", "state")
    defaults = {**Recurrence.defaults, "beta": None, "erase_key": None, "qk_norm": None, "norm_eps": 1e-6}
    shared = ("q", "k", "v", "erase_key")

    # ------------------------------------------------------------------ arguments

    @step
    def reciprocal(self):
        """1 / length of the rows of an array, as qk_norm says; a function."""
        kind, eps = self.qk_norm, self.norm_eps
        return lambda x: 1.0 if kind is None else reciprocal_length(x, kind, eps)

    @step
    def raw_queries(self):
        return np.take(np.where(self.real, self.q, 0.0), self.queries_of_heads, axis=-3)

    @step
    def plain_queries(self):
        """q / |q|"""
        return self.raw_queries * self.reciprocal(self.raw_queries)

    @step
    def raw_keys(self):
        return self.at_states(self.k)

    @step
    def keys(self):
        """k / |k|"""
        return self.raw_keys * self.reciprocal(self.raw_keys)

    @step
    def erase_keys(self):
        """The key, or what is given for it."""
        return self.keys if self.erase_key is None else self.at_states(self.erase_key)

    @step
    def betas(self):
        """(..., g, rows, 1)"""
        if self.beta is None:
            return np.ones((1, 1, 1))
        return np.where(self.real_rows, self.beta[..., None], 0.0)

    @step
    def write_betas(self):
        """beta of what is written."""
        return self.betas

    @step
    def erase_betas(self):
        """beta of what is taken away."""
        return self.betas

    # ------------------------------------------------------------------ forward

    @step
    def change(self):
        """u = beta (v - A^T p), a function of A and the row"""
        write, erase, values, erasing = self.write_betas, self.erase_betas, self.values, self.erase_keys

        def found(decayed, t):
            read = einsum("...de,...d->...e", decayed, erasing[..., t, :])
            return at(write, t) * values[..., t, :] - at(erase, t) * read

        return found

    @step
    def advance(self):
        """A + k u^T"""
        factors, keys, change = self.factors, self.keys, self.change

        def found(state, t):
            decayed = factors[..., t, :, None] * state
            return decayed + keys[..., t, :, None] * change(decayed, t)[..., None, :]

        return found

    @step
    def decayed(self):
        """A, (rows, ..., g, d, e)"""
        return np.moveaxis(self.factors, -2, 0)[..., None] * self.entering

    @step
    def erased(self):
        """A^T p, (..., g, rows, e)"""
        return einsum("t...de,...td->...te", self.decayed, self.erase_keys)

    @step
    def changes(self):
        """u, (..., g, rows, e)"""
        return self.write_betas * self.values - self.erase_betas * self.erased

    # ------------------------------------------------------------------ backward

    @step
    def erase_in_state(self):
        """-p du^T beta, what the erasing sends to A, a function of du and the row"""
        erase, erasing = self.erase_betas, self.erase_keys
        return lambda d_change, t: -erasing[..., t, :, None] * (at(erase, t) * d_change)[..., None, :]

    @step
    def retreat(self):
        """exp(gamma) (dS - p du^T beta) with du = dS^T k"""
        factors, keys, erase = self.factors, self.keys, self.erase_in_state

        def found(d_state, t):
            d_change = einsum("...de,...d->...e", d_state, keys[..., t, :])
            return factors[..., t, :, None] * (d_state + erase(d_change, t))

        return found

    @step
    def d_changes(self):
        """du = dS^T k, (..., g, rows, e)"""
        return einsum("t...de,...td->...te", self.d_states, self.keys)

    @step
    def d_decayed(self):
        """dS + what the erasing sends"""
        erase = self.erase_in_state
        more = [erase(self.d_changes[..., t, :], t) for t in range(self.rows)]
        return self.d_states + (np.stack(more) if more else 0.0)

    @step
    def d_values(self):
        """beta du"""
        return self.write_betas * self.d_changes

    @step
    def d_erase_keys(self):
        """-A (beta du)"""
        return -einsum("t...de,...te->...td", self.decayed, self.erase_betas * self.d_changes)

    @step
    def d_written_keys(self):
        """dS u"""
        return einsum("t...de,...te->...td", self.d_states, self.changes)

    @step
    def d_keys(self):
        """dS u, and what a key gets that erases too"""
        return self.d_written_keys + (self.d_erase_keys if self.erase_key is None else 0.0)

    @step
    def d_beta(self):
        """(v - A^T p) . du"""
        return np.where(self.real_rows, self.d_betas, 0.0)[..., 0]

    @step
    def d_betas(self):
        return ((self.values - self.erased) * self.d_changes).sum(-1, keepdims=True)

    @step
    def d_raw_queries(self):
        return self.through_length(self.d_plain_queries, self.raw_queries)

    @step
    def d_q(self):
        d = self.heads_added(self.d_raw_queries, self.queries_of_heads, self.q.shape[-3])
        return np.where(self.real, d, 0.0)

    @step
    def d_k(self):
        return self.from_states(self.through_length(self.d_keys, self.raw_keys), self.k)

    @step
    def d_v(self):
        return self.from_states(self.d_values, self.v)

    @step
    def d_erase_key(self):
        return self.from_states(self.d_erase_keys, self.erase_key)

    @step
    def along_length(self):
        """y (y . dy), what a change of length takes from a gradient; a function of x, y and dy"""
        kind, eps = self.qk_norm, self.norm_eps

        def found(x, y, d_y):
            short = np.sqrt((x * x).sum(-1, keepdims=True)) <= (eps if kind == "l2" else -1.0)
            return np.where(short, 0.0, y * (y * d_y).sum(-1, keepdims=True))

        return found

    def through_length(self, d_y, x):
        """r (dy - y (y . dy)) with y = r x"""
        if self.qk_norm is None:
            return d_y
        r = self.reciprocal(x)
        return r * (d_y - self.along_length(x, r * x, d_y))


def at(x, t):
    """Row t, or the only one."""
    return x[..., min(t, x.shape[-2] - 1), :]


definition = DeltaRule
