"""How people get RWKV-7 attention wrong; what recurrences share stands in ``refattn.mistakes.recurrence``."""

import numpy as np

from refattn.definitions.rwkv7 import RWKV7
from refattn.definitions.steps import einsum, step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.recurrence import catalogue as shared

catalogue = Catalogue(RWKV7, built_on=shared, without=("scale_from_e",))


@catalogue.mistake(name="decay_order", why="In the delta rule the state decays first.")
class remove_from_decayed(RWKV7):
    """what is removed is read from the decayed state"""

    @step
    def advance(self):
        factors, keys, values, removing, replacing = self.factors, self.keys, self.values, self.removing, self.replacing

        def found(state, t):
            decayed = factors[..., t, :, None] * state
            read = einsum("...de,...d->...e", decayed, removing[..., t, :])
            new = replacing[..., t, :, None] * read[..., None, :] + keys[..., t, :, None] * values[..., t, None, :]
            return decayed + new

        return found

    @step
    def decayed(self):
        return np.moveaxis(self.factors, -2, 0)[..., None] * self.entering

    @step
    def removed(self):
        return einsum("t...de,...td->...te", self.decayed, self.removing)

    @step
    def retreat(self):
        factors, removal = self.factors, self.removal_in_state
        return lambda d_state, t: factors[..., t, :, None] * (d_state + removal(d_state, t))

    @step
    def d_decayed(self):
        removal = self.removal_in_state
        return self.d_states + np.stack([removal(self.d_states[t], t) for t in range(self.rows)])

    @step
    def d_removing(self):
        return einsum("t...de,...te->...td", self.decayed, self.d_removed)


@catalogue.mistake(why="The names a and b, and z and b in other code, go both ways.")
class remove_replace(RWKV7):
    """remove and replace are exchanged"""

    @step
    def removing(self):
        return self.at_states(self.replace)

    @step
    def replacing(self):
        return self.at_states(self.remove)

    @step
    def d_remove(self):
        return self.from_states(self.d_replacing, self.remove)

    @step
    def d_replace(self):
        return self.from_states(self.d_removing, self.replace)


@catalogue.mistake(why="It is taken for RWKV-6, with another decay.")
class erase_dropped(RWKV7):
    """nothing is removed"""

    @step
    def removing(self):
        return np.zeros_like(super().removing)

    @step
    def d_removing(self):
        return np.zeros_like(super().d_removing)


@catalogue.mistake(why="a is handed over as kk in one place and as -kk in another.")
class remove_sign(RWKV7):
    """what is removed is added, and the other way round"""

    @step
    def removing(self):
        return -super().removing

    @step
    def d_removing(self):
        return -super().d_removing


@catalogue.mistake(sides=("backward",), why="The removal key is normalised, and its gradient is taken for small.")
class d_remove(RWKV7):
    """remove gets no gradient"""

    @step
    def d_removing(self):
        return np.zeros_like(super().d_removing)


@catalogue.mistake(sides=("backward",), why="dS is taken over from linear attention, where the transition is diagonal.")
class d_state_removal(RWKV7):
    """the cotangent of the state does not pass through the removal"""

    @step
    def removal_in_state(self):
        return lambda d_state, t: np.zeros_like(d_state)
