"""How people get delta rule attention wrong; what recurrences share stands in ``refattn.mistakes.recurrence``."""

import numpy as np

from refattn.definitions.delta_rule import DeltaRule, at
from refattn.definitions.steps import einsum, step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.recurrence import catalogue as shared

catalogue = Catalogue(DeltaRule, built_on=shared)

# ---------------------------------------------------------------------------------------------- order, erasing, beta


@catalogue.mistake(name="decay_order", why="The error is computed at the head of the loop, before the state decays.")
class erase_undecayed(DeltaRule):
    """what the key reads for erasing comes from the state before it decays"""

    @step
    def advance(self):
        factors, keys, change = self.factors, self.keys, self.change

        def found(state, t):
            return factors[..., t, :, None] * state + keys[..., t, :, None] * change(state, t)[..., None, :]

        return found

    @step
    def decayed(self):
        return self.entering

    @step
    def retreat(self):
        factors, keys, erase = self.factors, self.keys, self.erase_in_state

        def found(d_state, t):
            d_change = einsum("...de,...d->...e", d_state, keys[..., t, :])
            return factors[..., t, :, None] * d_state + erase(d_change, t)

        return found

    @step
    def d_decayed(self):
        return self.d_states


@catalogue.mistake(name="decay_order", why="The update is written as (S + k u) decay.")
class decay_after_write(DeltaRule):
    """the state decays after the write, with what was written"""

    @step
    def advance(self):
        factors, keys, change = self.factors, self.keys, self.change
        return lambda state, t: (
            factors[..., t, :, None] * (state + keys[..., t, :, None] * change(state, t)[..., None, :])
        )

    @step
    def decayed(self):
        return self.entering

    @step
    def retreat(self):
        factors, keys, erase = self.factors, self.keys, self.erase_in_state

        def found(d_state, t):
            d_inner = factors[..., t, :, None] * d_state
            return d_inner + erase(einsum("...de,...d->...e", d_inner, keys[..., t, :]), t)

        return found

    @step
    def d_inner(self):
        """Cotangent of S + k u^T."""
        return np.moveaxis(self.factors, -2, 0)[..., None] * self.d_states

    @step
    def d_changes(self):
        return einsum("t...de,...td->...te", self.d_inner, self.keys)

    @step
    def d_written_keys(self):
        return einsum("t...de,...te->...td", self.d_inner, self.changes)

    @step
    def d_log_decay(self):
        return np.moveaxis((self.d_states * self.states).sum(-1), 0, -2)


@catalogue.mistake(why="It is linear attention with another name for the gate.")
class erase_dropped(DeltaRule):
    """nothing is taken away before a write"""

    @step
    def erase_betas(self):
        return np.zeros_like(super().erase_betas)

    @step
    def d_betas(self):
        return (self.values * self.d_changes).sum(-1, keepdims=True)


@catalogue.mistake(why="v is multiplied by beta beforehand, as the chunked form has it.")
class beta_on_value_only(DeltaRule):
    """all of the old value is taken away, beta acts on the new one alone"""

    @step
    def erase_betas(self):
        return np.ones_like(super().erase_betas)

    @step
    def d_betas(self):
        return (self.values * self.d_changes).sum(-1, keepdims=True)


@catalogue.mistake(why="beta is applied where the projection is, v comes as it is.")
class beta_on_erase_only(DeltaRule):
    """beta acts on what is taken away alone, all of the new value is written"""

    @step
    def write_betas(self):
        return np.where(self.real_rows, 1.0, 0.0)

    @step
    def d_betas(self):
        return (-self.erased * self.d_changes).sum(-1, keepdims=True)


@catalogue.mistake(why="k beta and v beta are made beforehand, and the kernel multiplies again.")
class beta_twice(DeltaRule):
    """beta is applied twice"""

    @step
    def betas(self):
        return super().betas ** 2

    @step
    def d_betas(self):
        return 2 * DeltaRule.betas.formula(self) * super().d_betas


@catalogue.mistake(name="beta_raw", why="use_beta_sigmoid_in_kernel is on, and the layer has applied it too.")
class beta_sigmoid(DeltaRule):
    """beta goes through a sigmoid"""

    @step
    def betas(self):
        if self.beta is None:
            return super().betas
        return np.where(self.real_rows, 1 / (1 + np.exp(-self.beta[..., None])), 0.0)

    @step
    def d_betas(self):
        s = self.betas
        return super().d_betas * (1.0 if self.beta is None else s * (1 - s))


@catalogue.mistake(why="Kernels of the plain delta rule have one key.")
class erase_key_ignored(DeltaRule):
    """the key erases where another one is given for it"""

    erase_key = None

    @step
    def d_erase_key(self):
        return np.zeros(self.argument("erase_key").shape)


@catalogue.mistake(name="erase_key_ignored", why="Two keys of one shape, and the names b and k go both ways.")
class erase_write_swapped(DeltaRule):
    """the given erase key writes, and the key erases"""

    @step
    def keys(self):
        return super().keys if self.erase_key is None else self.at_states(self.erase_key)

    @step
    def erase_keys(self):
        return DeltaRule.keys.formula(self)

    @step
    def d_keys(self):
        return super().d_keys if self.erase_key is None else self.d_erase_keys

    @step
    def d_erase_key(self):
        return self.from_states(self.d_written_keys, self.argument("erase_key"))


@catalogue.mistake(why="The loop over writes is the loop over tokens.")
class decay_every_step(DeltaRule):
    """with several writes a token, the state decays before each of them"""

    @step
    def log_decay(self):
        return np.repeat(self.token_decay, self.steps, axis=-2)

    @step
    def d_token_decay(self):
        d = self.d_log_decay
        d = d.reshape(*d.shape[:-2], self.tokens, self.steps, d.shape[-1]).sum(-2)
        return np.where(self.real, d, 0.0)


# ---------------------------------------------------------------------------------------------- the norm of q and k


@catalogue.mistake(why="F.normalize and ggml's l2_norm bound the length from below.")
class qk_norm_eps_max(DeltaRule):
    """q and k are divided by max(length, eps) in place of sqrt(length^2 + eps)"""

    @step
    def qk_norm(self):
        given = self.argument("qk_norm")
        return "l2" if given == "l2_sum" else given


@catalogue.mistake(why="x / (norm(x) + eps) is the other way to write it.")
class qk_norm_eps_outside(DeltaRule):
    """eps is added to the length in place of its square"""

    @step
    def reciprocal(self):
        if self.qk_norm is None:
            return super().reciprocal
        eps = self.norm_eps
        return lambda x: inverse(np.sqrt((x * x).sum(-1, keepdims=True)) + eps)

    @step
    def along_length(self):
        eps = self.norm_eps

        def found(x, y, d_y):
            n = np.sqrt((x * x).sum(-1, keepdims=True))
            return y * (y * d_y).sum(-1, keepdims=True) * (n + eps) * inverse(n)

        return found


def inverse(x):
    return np.where(x == 0, 0.0, 1 / np.where(x == 0, 1.0, x))


@catalogue.mistake(why="The norm is taken from an rms norm, whose eps stands beside a mean.")
class qk_norm_eps_mean(DeltaRule):
    """eps is added to the mean of the squares in place of their sum"""

    @step
    def norm_eps(self):
        return self.argument("norm_eps") * self.channels if self.qk_norm == "l2_sum" else self.argument("norm_eps")

    @step
    def argument_norm_eps(self):
        return self.norm_eps


@catalogue.mistake(why="q is scaled where it is loaded.")
class qk_norm_after_scale(DeltaRule):
    """q is scaled before it is normalised, which takes the scale away"""

    @step
    def queries(self):
        if self.qk_norm is None:
            return super().queries
        scaled = self.scale * self.raw_queries
        return scaled * self.reciprocal(scaled)

    @step
    def d_scaled_queries(self):
        return self.through_length(self.d_queries, self.scale * self.raw_queries)

    @step
    def d_raw_queries(self):
        return super().d_raw_queries if self.qk_norm is None else self.scale * self.d_scaled_queries

    @step
    def d_scale(self):
        return super().d_scale if self.qk_norm is None else (self.d_scaled_queries * self.raw_queries).sum()


@catalogue.mistake(why="The flag of the kernel is off, and the layer relies on it.")
class qk_norm_dropped(DeltaRule):
    """q and k are not normalised"""

    qk_norm = None


@catalogue.mistake(sides=("backward",), why="The norm is computed outside of what is differentiated.")
class qk_norm_grad(DeltaRule):
    """the length of q and k counts as a constant in the backward"""

    @step
    def along_length(self):
        return lambda x, y, d_y: 0.0


# ---------------------------------------------------------------------------------------------- gradients


@catalogue.mistake(sides=("backward",), why="dh is taken over from linear attention, where nothing is erased.")
class d_state_erase(DeltaRule):
    """the cotangent of the state does not pass through the erasing"""

    @step
    def erase_in_state(self):
        erasing = self.erase_keys
        return lambda d_change, t: 0.0 * erasing[..., t, :, None] * d_change[..., None, :]


@catalogue.mistake(
    sides=("backward",), why="The Gram matrix has the key on both sides, and one of them is differentiated."
)
class dk_shared_pair(DeltaRule):
    """the gradient of k has its part as a written key alone, not as what erases"""

    @step
    def d_keys(self):
        return self.d_written_keys


@catalogue.mistake(
    sides=("backward",),
    why="dbeta is taken through the values, and not through the triangular matrix that beta multiplies too.",
    variants=[{"size": n} for n in (16, 64)],
)
class dbeta_pair_term(DeltaRule):
    """the gradient of beta leaves out what is erased of the same chunk of {size} rows"""

    size = 64

    @step
    def d_betas(self):
        """(v - what the chunk's entry state, decayed, holds for the key) . du"""
        found = []
        for t in range(self.rows):
            start = t // self.size * self.size
            decay = self.log_decay[..., start : t + 1, :].sum(-2)
            read = einsum(
                "...de,...d->...e", np.exp(decay)[..., None] * self.entering[start], self.erase_keys[..., t, :]
            )
            found.append(((self.values[..., t, :] - read) * self.d_changes[..., t, :]).sum(-1, keepdims=True))
        return np.stack(found, axis=-2)


@catalogue.mistake(sides=("backward",), why="beta is a number near 1, and the gradient flows through u as it is.")
class dv_without_beta(DeltaRule):
    """the gradient of v is not multiplied by beta"""

    @step
    def d_values(self):
        return self.d_changes * np.ones_like(at(self.betas, 0)[..., None, :])
