"""How people get gated linear attention wrong; what recurrences share stands in ``refattn.mistakes.recurrence``."""

import numpy as np

from refattn.definitions.gated_linear import GatedLinear
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.recurrence import catalogue as shared

catalogue = Catalogue(GatedLinear, built_on=shared)


@catalogue.mistake(name="decay_order", why="The update is written as (S + k v) decay.")
class decay_after_write(GatedLinear):
    """a token's own key and value are decayed with the state"""

    @step
    def written_keys(self):
        return self.factors * super().written_keys

    @step
    def d_keys(self):
        return self.factors * self.d_written_keys + self.bonus_in_keys

    @step
    def d_log_decay(self):
        return super().d_log_decay + self.written_keys * self.d_written_keys


@catalogue.mistake(name="decay_order", why="RWKV-6 is the only one that reads first.")
class read_after(GatedLinear):
    """queries that should read before the write read after it"""

    read = "after"


@catalogue.mistake(name="decay_order", why="The state is decayed at the head of the loop, and read from there.")
class read_decayed(GatedLinear):
    """queries that should read the state before it decays read it decayed"""

    @step
    def read_states(self):
        if self.read == "after":
            return super().read_states
        return self.at_outputs(np.moveaxis(self.factors, -2, 0)[..., None] * self.entering)

    @step
    def d_decayed(self):
        return self.d_states + (self.d_read_states if self.read == "before" else 0.0)

    @step
    def d_walked(self):
        if self.read == "after":
            return super().d_walked
        d_state, found = np.zeros(self.start_state.shape), []
        for t in range(self.rows - 1, -1, -1):
            d_state = d_state + (self.d_final_state if t == self.rows - 1 else 0.0)
            found.append(d_state)
            d_state = self.retreat(d_state + self.d_read_states[t], t)
            d_state = np.where(self.emptied[..., t, None, None], 0.0, d_state)
        return np.stack(found[::-1]), d_state


@catalogue.mistake(why="The own token is added to the decayed state, and the decay is applied to both.")
class bonus_decayed(GatedLinear):
    """the bonus of a token is decayed"""

    @step
    def own_keys(self):
        return self.factors * super().own_keys

    @step
    def bonus_in_keys(self):
        return 0.0 if self.bonus is None else self.factors * super().bonus_in_keys

    @step
    def d_bonus(self):
        return (
            np.broadcast_to(self.factors * self.d_own_keys * self.keys, self.keys.shape)
            .sum(tuple(range(self.keys.ndim - 3)))
            .sum(-2)
        )

    @step
    def d_log_decay(self):
        return super().d_log_decay + (0.0 if self.bonus is None else self.own_keys * self.d_own_keys)


@catalogue.mistake(why="Other recurrences have none.")
class bonus_dropped(GatedLinear):
    """the bonus is left out"""

    bonus = None

    @step
    def d_bonus(self):
        return np.zeros(self.argument("bonus").shape)


@catalogue.mistake(why="S is (d, e) and both are the head size; the decay is broadcast from the right.")
class decay_axis(GatedLinear):
    """decays act on the value channels in place of the key channels"""

    @step
    def square(self):
        return self.channels == self.v.shape[-1]

    @step
    def advance(self):
        if not self.square:
            return super().advance
        factors, keys, values = self.factors, self.written_keys, self.written_values
        return lambda state, t: factors[..., t, None, :] * state + keys[..., t, :, None] * values[..., t, None, :]

    @step
    def retreat(self):
        if not self.square:
            return super().retreat
        factors = self.factors
        return lambda d_state, t: factors[..., t, None, :] * d_state

    @step
    def d_log_decay(self):
        if not self.square:
            return super().d_log_decay
        return np.moveaxis((self.d_decayed * self.entering).sum(-2), 0, -2) * self.factors


@catalogue.mistake(name="dv_ungated", sides=("backward",), why="dv is taken over from the kernel without a gate.")
class dv_without_decay(GatedLinear):
    """the gradient of v does not see the decays behind its token"""

    @step
    def d_written_values(self):
        d_state, found = self.d_final_state, []
        for t in range(self.rows - 1, -1, -1):
            d_state = d_state + self.d_read_states[t]
            found.append(np.einsum("...de,...d->...e", d_state, self.keys[..., t, :]))
        return np.stack(found[::-1], axis=-2)
