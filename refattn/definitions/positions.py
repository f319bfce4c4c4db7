"""The relative shift and rotations, in steps.

rel_shift    output[i,j] = x[i, j + start - i]        rotary    (a, c) -> [[cos, -sin], [sin, cos]] (a, c)
"""

import numpy as np

from refattn.definitions.steps import Definition, einsum, step

__all__ = ["RelShift", "Rotary", "rel_shift_example", "rotary_example"]


class RelShift(Definition):
    """Rows of a table by distance, read by key."""

    gradients = ("x",)

    @step
    def rows(self):
        """(q, k): which entry of the table each pair reads; outside of it: none."""
        q, p = self.x.shape[-2:]
        start, k = (q - 1, p) if self.causal else (q, p - q)
        return np.arange(k) + start - np.arange(q)[:, None]

    @step
    def inside(self):
        return (self.rows >= 0) & (self.rows < self.x.shape[-1])

    @step
    def output(self):
        i = np.arange(self.x.shape[-2])[:, None]
        return np.where(self.inside, self.x[..., i, np.where(self.inside, self.rows, 0)], 0.0)

    @step
    def d_x(self):
        """Each entry gets what was read from it."""
        d_x = np.zeros_like(self.x)
        i = np.broadcast_to(np.arange(self.x.shape[-2])[:, None], self.rows.shape)
        d_x[..., i[self.inside], self.rows[self.inside]] = self.cotangent("output")[..., self.inside]
        return d_x


class Rotary(Definition):
    """Pairs of channels turned by an angle proportional to the position."""

    gradients = ("x", "cos", "sin")
    defaults = {"positions": None, "base": 10000.0, "layout": "half", "dims": None, "cos": None, "sin": None}

    @step
    def dims(self):
        return self.x.shape[-1] if self.argument("dims") is None else self.argument("dims")

    @step
    def channels(self):
        """(n, 2): the two channels of each pair."""
        n = np.arange(self.dims // 2)
        return np.stack([n, n + self.dims // 2] if self.layout == "half" else [2 * n, 2 * n + 1], axis=-1)

    @step
    def angles(self):
        """t base^(-2n/dims)"""
        t = np.arange(self.x.shape[-2]) if self.positions is None else np.asarray(self.positions)
        return t[..., None] * self.base ** (-2.0 * np.arange(self.dims // 2) / max(1, self.dims))

    @step
    def rotation(self):
        """(..., q, n, 2, 2)"""
        cos = np.cos(self.angles) if self.argument("cos") is None else self.argument("cos")
        sin = np.sin(self.angles) if self.argument("sin") is None else self.argument("sin")
        return np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2)

    @step
    def pairs(self):
        """(..., q, n, 2)"""
        return self.x[..., self.channels]

    @step
    def output(self):
        return self.placed(einsum("...xy,...y->...x", self.rotation, self.pairs), self.x)

    def placed(self, pairs, rest):
        """Pairs put back to their channels; channels beyond the turned ones are those of ``rest``."""
        whole = np.broadcast_to(rest, (*pairs.shape[:-2], rest.shape[-1])).astype(pairs.dtype)
        whole[..., self.channels] = pairs
        return whole

    # ------------------------------------------------------------------ backward

    @step
    def d_pairs(self):
        return self.cotangent("output")[..., self.channels]

    @step
    def d_x(self):
        """The transposed rotation."""
        return self.placed(einsum("...xy,...x->...y", self.rotation, self.d_pairs), self.cotangent("output"))

    @step
    def d_cos(self):
        """d_a a + d_c c"""
        return (self.d_pairs * self.pairs).sum(-1)

    @step
    def d_sin(self):
        """d_c a - d_a c"""
        return self.d_pairs[..., 1] * self.pairs[..., 0] - self.d_pairs[..., 0] * self.pairs[..., 1]


def rel_shift_example(rng, *, b=2, q=3, p=5):
    """Normal scores x (b,q,p), causal."""
    return {"x": rng.standard_normal((b, q, p)), "causal": True}


def rotary_example(rng, *, b=2, q=3, d=6):
    """Normal x (b,q,d) and whole positions."""
    return {"x": rng.standard_normal((b, q, d)), "positions": rng.integers(0, 50, (b, q))}
