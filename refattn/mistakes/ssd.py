"""How people get state-space duality wrong; what recurrences share stands in ``refattn.mistakes.recurrence``."""

import math

import numpy as np

from refattn.definitions.ssd import SSD
from refattn.definitions.steps import einsum, step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.gated_linear import catalogue as linear

NOT_HERE = (
    "scale_*", "dscale", "decay_channel_shared", "decay_axis", "gva_tile", "bonus_*", "read_*", "decay_order", "gate_raw",
    "lengths_ignored", "reset_ignored", "padding_decays", "safe_exp",
)  # fmt: skip
catalogue = Catalogue(SSD, built_on=linear, without=NOT_HERE)


@catalogue.mistake(why="The discretisation is remembered of a, and forgotten of b.")
class dt_not_in_write(SSD):
    """what is written is not multiplied by the step"""

    @step
    def write_steps(self):
        return np.where(self.real, np.ones_like(super().write_steps), 0.0)

    @step
    def d_write_steps(self):
        return np.zeros_like(super().d_write_steps)


@catalogue.mistake(why="x dt is handed to a kernel that multiplies by the step.")
class dt_twice_in_write(SSD):
    """what is written is multiplied by the step twice"""

    @step
    def write_steps(self):
        return super().write_steps ** 2

    @step
    def d_write_steps(self):
        return 2 * self.time_steps * super().d_write_steps


@catalogue.mistake(why="The caller adds the bias, and so does the kernel.")
class dt_bias_twice(SSD):
    """the bias is added to dt twice"""

    @step
    def raw_steps(self):
        return super().raw_steps + (0.0 if self.dt_bias is None else self.dt_bias[:, None])

    @step
    def d_dt_bias(self):
        return 2 * super().d_dt_bias


@catalogue.mistake(why="The limits are meant for dt.")
class dt_clamp_before_softplus(SSD):
    """dt is clipped before the softplus"""

    @step
    def soft_steps(self):
        z = np.clip(self.raw_steps, *self.dt_limit)
        return np.logaddexp(0.0, z) if self.dt_softplus else z

    @step
    def time_steps(self):
        return np.where(self.real, self.soft_steps, 0.0)

    @step
    def d_soft_steps(self):
        low, high = self.dt_limit
        return np.where((self.raw_steps > low) & (self.raw_steps < high), self.d_time_steps, 0.0)


@catalogue.mistake(name="dt_clamp_before_softplus", why="The limits are only used where dt is initialised.")
class dt_limit_ignored(SSD):
    """the limits of dt are not used"""

    dt_limit = (-math.inf, math.inf)


@catalogue.mistake(why="dt is taken for the step itself.")
class dt_softplus_dropped(SSD):
    """the softplus is left out"""

    dt_softplus = False


@catalogue.mistake(why="log(1 + exp(z)) as the formula is written.")
class softplus_overflow(SSD):
    """the softplus overflows for large dt"""

    @step
    def soft_steps(self):
        limit = math.log(float(np.finfo(self.storage).max)) if self.storage.kind == "f" else 88.0
        return np.where(self.dt_softplus & (self.raw_steps > limit), np.inf, super().soft_steps)


@catalogue.mistake(why="repeat and repeat_interleave: two functions, both right somewhere.")
class group_tile(SSD):
    """head h uses group h modulo the number of groups"""

    @step
    def attention(self):
        return self.begin(self.inner, {**super().attention.arguments, "head_map": "tile"})


@catalogue.mistake(why="D is a line of its own, outside of the kernel.")
class skip_dropped(SSD):
    """the skip is left out"""

    skip = None

    @step
    def d_skip(self):
        return np.zeros(self.argument("skip").shape)


@catalogue.mistake(name="gate_raw", why="A_log is a parameter of the layer, a that of the kernel.")
class a_log(SSD):
    """a is taken for the log of the rate: -exp(a) in its place"""

    @step
    def a(self):
        return -np.exp(self.argument("a"))

    @step
    def d_a(self):
        return self.a * super().d_a


@catalogue.mistake(name="padding_decays", why="softplus(0 + bias) is not 0: a padded token still has a step.")
class padding_steps(SSD):
    """padded tokens have a step and decay the state"""

    @step
    def attention(self):
        steps = np.clip(self.soft_steps, *self.dt_limit)
        given = super().attention.arguments
        return self.begin(self.inner, {**given, "decay": steps * self.a[:, None], "lengths": None})

    @step
    def output(self):
        return np.where(self.real[..., None], super().output, 0.0)

    @step
    def d_decay_steps(self):
        return self.a[:, None] * self.d_inner_decay

    @step
    def d_time_steps(self):
        return np.where(self.real, self.d_write_steps, 0.0) + self.d_decay_steps

    @step
    def d_a(self):
        return einsum("...ht->h", np.clip(self.soft_steps, *self.dt_limit) * self.d_inner_decay)

    @step
    def d_dt(self):
        return np.where(self.real, super().d_dt, 0.0)

    @step
    def d_dt_bias(self):
        return einsum("...ht->h", SSD.d_dt.formula(self))


@catalogue.mistake(
    name="ddt_one_path", sides=("backward",), why="The kernel of the decay returns its own ddt, and it is not added."
)
class ddt_of_write_only(SSD):
    """the gradient of dt goes through what is written alone"""

    @step
    def d_time_steps(self):
        return np.where(self.real, self.d_write_steps, 0.0)


@catalogue.mistake(name="ddt_one_path", sides=("backward",), why="x dt is made outside of what is differentiated.")
class ddt_of_decay_only(SSD):
    """the gradient of dt goes through the decay alone"""

    @step
    def d_time_steps(self):
        return np.where(self.real, self.d_decay_steps, 0.0)


@catalogue.mistake(sides=("backward",), why="A clamp in a custom backward is forgotten.")
class dt_clip_grad(SSD):
    """the gradient of dt passes the limits"""

    @step
    def d_soft_steps(self):
        return self.d_time_steps


@catalogue.mistake(sides=("backward",), why="The skip is added to the output of the kernel, whose dx is returned.")
class dx_without_skip(SSD):
    """the gradient of x does not go through the skip"""

    @step
    def d_x(self):
        return np.where(self.real[..., None], self.write_steps[..., None] * self.inner_gradients.d_v, 0.0)
