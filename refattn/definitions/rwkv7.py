"""RWKV-7 attention in steps: the recurrence itself, token by token, and back.

    c = S_{t-1}^T remove      S_t = exp(gamma) S_{t-1} + replace c^T + k v^T      output = scale q . S_t

Axes: ``...`` any leading batch axes, ``g`` state head, ``n`` output head, ``t`` token, ``d`` key channel, ``e`` value channel.

Source: Peng et al. 2025, arXiv:2503.14456, section 4.1.
"""

from refattn.definitions.recurrence import Recurrence
from refattn.definitions.steps import einsum, step

__all__ = ["RWKV7", "definition"]


class RWKV7(Recurrence):
    """One vector reads the state before it decays, another writes back what was read."""

    gradients = ("q", "k", "v", "remove", "replace", "decay", "channel_decay", "head_decay", "scale", "state")
    defaults = {**Recurrence.defaults, "scale": 1.0}
    shared = ("q", "k", "v", "remove", "replace")

    # ------------------------------------------------------------------ forward

    @step
    def removing(self):
        return self.at_states(self.remove)

    @step
    def replacing(self):
        return self.at_states(self.replace)

    @step
    def advance(self):
        """exp(gamma) S + replace (S^T remove)^T + k v^T"""
        factors, keys, values, removing, replacing = self.factors, self.keys, self.values, self.removing, self.replacing

        def found(state, t):
            read = einsum("...de,...d->...e", state, removing[..., t, :])
            back = replacing[..., t, :, None] * read[..., None, :]
            return factors[..., t, :, None] * state + back + keys[..., t, :, None] * values[..., t, None, :]

        return found

    @step
    def removed(self):
        """c = S_{t-1}^T remove, (..., g, t, e)"""
        return einsum("t...de,...td->...te", self.entering, self.removing)

    # ------------------------------------------------------------------ backward

    @step
    def removal_in_state(self):
        """remove dc^T with dc = dS^T replace, a function of dS and the token"""
        removing, replacing = self.removing, self.replacing

        def found(d_state, t):
            d_read = einsum("...de,...d->...e", d_state, replacing[..., t, :])
            return removing[..., t, :, None] * d_read[..., None, :]

        return found

    @step
    def retreat(self):
        """exp(gamma) dS + remove dc^T"""
        factors, removal = self.factors, self.removal_in_state
        return lambda d_state, t: factors[..., t, :, None] * d_state + removal(d_state, t)

    @step
    def d_keys(self):
        """dS v"""
        return einsum("t...de,...te->...td", self.d_states, self.values)

    @step
    def d_values(self):
        """dS^T k"""
        return einsum("t...de,...td->...te", self.d_states, self.keys)

    @step
    def d_replacing(self):
        """dS c"""
        return einsum("t...de,...te->...td", self.d_states, self.removed)

    @step
    def d_removed(self):
        """dc = dS^T replace"""
        return einsum("t...de,...td->...te", self.d_states, self.replacing)

    @step
    def d_removing(self):
        """S_{t-1} dc"""
        return einsum("t...de,...te->...td", self.entering, self.d_removed)

    @step
    def d_k(self):
        return self.from_states(self.d_keys, self.k)

    @step
    def d_v(self):
        return self.from_states(self.d_values, self.v)

    @step
    def d_remove(self):
        return self.from_states(self.d_removing, self.remove)

    @step
    def d_replace(self):
        return self.from_states(self.d_replacing, self.replace)


definition = RWKV7
