"""Short causal convolution in steps, tap by tap.

y[t] = act(bias + sum_i weight[:,i] rows[t + i])      rows = the state's, then x      state = the last w - 1 rows
"""

import numpy as np

from refattn.definitions.steps import Definition, einsum, step

__all__ = ["CausalConvolution", "causal_convolution_example"]


class CausalConvolution(Definition):
    """Each channel convolved with its own taps over the past."""

    results = {"output": "output", "state": "final_state"}
    gradients = ("x", "weight", "bias", "state")
    defaults = {"bias": None, "state": None, "activation": None}

    @property
    def taps(self):
        return self.argument("weight").shape[-1]

    @step
    def rows(self):
        """The rows before the first, then x."""
        given = np.zeros((self.taps - 1, self.x.shape[-1])) if self.state is None else self.state
        lead = np.broadcast_shapes(self.x.shape[:-2], given.shape[:-2])
        parts = [np.broadcast_to(y, (*lead, *y.shape[-2:])) for y in (given, self.x)]
        return np.concatenate(parts, axis=-2)

    @step
    def windows(self):
        """(..., t, m, w): what the taps meet at each position."""
        at = np.arange(self.x.shape[-2])[:, None] + np.arange(self.taps)
        return np.swapaxes(self.rows[..., at, :], -1, -2)

    @step
    def convolved(self):
        """sum_i weight[:,i] rows[t + i] + bias"""
        return einsum("...tmw,mw->...tm", self.windows, self.weight) + (0.0 if self.bias is None else self.bias)

    @step
    def output(self):
        return self.convolved * sigmoid(self.convolved) if self.activation == "silu" else self.convolved

    @step
    def final_state(self):
        """The last w - 1 rows, before the activation."""
        return self.rows[..., self.x.shape[-2] :, :]

    @step
    def d_convolved(self):
        d, z = self.cotangent("output"), self.convolved
        return d * sigmoid(z) * (1 + z * sigmoid(-z)) if self.activation == "silu" else d

    @step
    def d_rows(self):
        """Every tap sends its weight to the row that it met; the final state's rows get their own cotangent."""
        found = np.zeros(self.rows.shape)
        t = self.x.shape[-2]
        for i in range(self.taps):
            found[..., i : i + t, :] += self.d_convolved * self.weight[:, i]
        found[..., t:, :] += self.cotangent("state")
        return found

    @step
    def d_x(self):
        return self.d_rows[..., self.taps - 1 :, :]

    @step
    def d_state(self):
        return self.d_rows[..., : self.taps - 1, :]

    @step
    def d_weight(self):
        return einsum("...tm,...tmw->mw", self.d_convolved, self.windows)

    @step
    def d_bias(self):
        return einsum("...tm->m", self.d_convolved)


def sigmoid(x):
    return np.exp(-np.logaddexp(0.0, -x))


def causal_convolution_example(rng, *, b=2, t=5, m=3, w=4, **options):
    """Normal x (b,t,m), weight (m,w), bias (m,), state (b,w-1,m)."""
    normal = rng.standard_normal
    before = {"state": normal((b, w - 1, m))} if w else {}
    return {"x": normal((b, t, m)), "weight": normal((m, w)), "bias": normal(m), **before, **options}
