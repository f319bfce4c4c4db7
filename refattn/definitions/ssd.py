"""State-space duality (Mamba-2) in steps: steps of time, the gated linear recurrence that they drive, and back.

    step = clip(softplus(dt + dt_bias))      S_t = exp(step a) S_{t-1} + step b x^T      output = c . S_t + skip x

Axes: ``...`` any leading batch axes, ``h`` head, ``g`` group of heads, ``t`` token, ``d`` state channel, ``e`` head channel.

Source: Dao, Gu 2024, arXiv:2405.21060, sections 3 and 6.
"""

import math

import numpy as np

from refattn.definitions.gated_linear import GatedLinear
from refattn.definitions.scaled_dot_product import per_batch
from refattn.definitions.steps import Definition, einsum, step

__all__ = ["SSD", "definition"]


class SSD(Definition):
    """Gated linear attention with q = c, k = b, v = step x and the decay step a."""

    inner = GatedLinear
    results = {"output": "output", "state": "final_state"}
    gradients = ("x", "dt", "a", "b", "c", "skip", "dt_bias", "state")
    defaults = {
        "skip": None, "dt_bias": None, "dt_softplus": False, "dt_limit": (0.0, math.inf), "state": None,
        "lengths": None, "form": None, "chunk": None,
    }  # fmt: skip

    # ------------------------------------------------------------------ forward

    @step
    def lead(self):
        arrays = [(self.x, 3), (self.b, 3), (self.c, 3), (self.dt, 2), (self.state, 3)]
        return np.broadcast_shapes(*(x.shape[: x.ndim - axes] for x, axes in arrays if x is not None))

    @step
    def real(self):
        """(..., 1, t): tokens that are no padding."""
        tokens = np.arange(self.x.shape[-2])
        if self.lengths is None:
            return np.ones((1, len(tokens)), dtype=bool)
        return tokens < per_batch(self.lengths, self.lead)[..., 0]

    @step
    def raw_steps(self):
        """dt + dt_bias, 0 in padding"""
        bias = 0.0 if self.dt_bias is None else self.dt_bias[:, None]
        return np.where(self.real, self.dt, 0.0) + bias

    @step
    def soft_steps(self):
        """softplus, where it is asked for"""
        z = self.raw_steps
        return np.logaddexp(0.0, z) if self.dt_softplus else z

    @step
    def time_steps(self):
        """Clipped, (..., h, t); 0 in padding"""
        return np.where(self.real, np.clip(self.soft_steps, *self.dt_limit), 0.0)

    @step
    def write_steps(self):
        """The steps in what is written."""
        return self.time_steps

    @step
    def decay_steps(self):
        """The steps in the decay."""
        return self.time_steps

    @step
    def real_x(self):
        """x, 0 in padding"""
        return np.where(self.real[..., None], self.x, 0.0)

    @step
    def attention(self):
        """The recurrence."""
        arguments = {
            "q": self.c, "k": self.b, "v": self.write_steps[..., None] * self.real_x,
            "decay": self.decay_steps * self.a[:, None], "scale": 1.0, "state": self.state, "lengths": self.lengths,
        }  # fmt: skip
        return self.begin(self.inner, arguments)

    @step
    def skips(self):
        """skip x"""
        if self.skip is None:
            return 0.0
        weight = self.skip[:, None] if self.skip.ndim == 1 else self.skip
        return weight[:, None, :] * self.real_x

    @step
    def output(self):
        """c . S + skip x"""
        return self.attention.output + self.skips

    @step
    def final_state(self):
        return self.attention.final_state

    # ------------------------------------------------------------------ backward

    @step
    def d_output(self):
        return np.where(self.real[..., None], self.cotangent("output"), 0.0)

    @step
    def d_final_state(self):
        return self.cotangent("state")

    @step
    def inner_gradients(self):
        return self.attention.pull(output=self.d_output, state=self.d_final_state)

    @step
    def d_inner_decay(self):
        return self.inner_gradients.d_decay

    @step
    def d_write_steps(self):
        """dv . x"""
        return (self.inner_gradients.d_v * self.real_x).sum(-1)

    @step
    def d_decay_steps(self):
        """a dgamma"""
        return self.a[:, None] * self.d_inner_decay

    @step
    def d_time_steps(self):
        """Two paths: what is written and what is forgotten."""
        return np.where(self.real, self.d_write_steps + self.d_decay_steps, 0.0)

    @step
    def d_soft_steps(self):
        """0 at a limit and beyond"""
        low, high = self.dt_limit
        inside = (self.soft_steps > low) & (self.soft_steps < high)
        return np.where(inside, self.d_time_steps, 0.0)

    @step
    def d_dt(self):
        """sigma(dt + dt_bias)"""
        z = self.raw_steps
        return self.d_soft_steps * (np.exp(-np.logaddexp(0.0, -z)) if self.dt_softplus else 1.0)

    @step
    def d_dt_bias(self):
        return einsum("...ht->h", self.d_dt)

    @step
    def d_a(self):
        """sum of step dgamma"""
        return einsum("...ht->h", self.decay_steps * self.d_inner_decay)

    @step
    def d_x(self):
        """step dv + skip dO"""
        weight = 0.0 if self.skip is None else (self.skip[:, None] if self.skip.ndim == 1 else self.skip)[:, None, :]
        own = self.write_steps[..., None] * self.inner_gradients.d_v
        return np.where(self.real[..., None], own + weight * self.d_output, 0.0)

    @step
    def d_b(self):
        return self.inner_gradients.d_k

    @step
    def d_c(self):
        return self.inner_gradients.d_q

    @step
    def d_skip(self):
        own = einsum("...hte->he", self.d_output * self.real_x)
        return own.sum(-1) if self.skip.ndim == 1 else own

    @step
    def d_state(self):
        return self.inner_gradients.d_state


definition = SSD
