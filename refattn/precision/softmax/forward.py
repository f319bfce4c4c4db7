"""Errors of logits, weights and row sums; bounds of output and lse."""

import functools
from typing import Any

import numpy as np

from refattn.contraction import einsum
from refattn.precision.softmax.records import Bounds, Rounding, SoftmaxCall

__all__ = ["ForwardErrors", "finite", "growth", "products", "weigh"]

Array = np.ndarray

COMMON = 1.5
"""An approximation may be off by the whole of its error in every element: the median then needs more than one of it."""


def finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def growth(x: Any) -> Any:
    """e^x - 1 >= (1 + u)^n - 1, kept finite: beyond e^200 a bound says nothing more, and infinity times 0 is NaN."""
    return np.expm1(np.minimum(x, 200.0))


def weigh(x: Array, y: Array) -> Array:
    return einsum("...qk,...ke->...qe", x, y)


def products(x: Array, y: Array) -> Array:
    return einsum("...qd,...kd->...qk", x, y)


class ForwardErrors:
    """Sizes of the errors of logits, weights and row sums; output and lse."""

    def __init__(self, call: SoftmaxCall, units: Rounding) -> None:
        self.call, self.units = call, units
        u, a, c = units.accumulate, units.inputs, units.scores
        h, g = call.q.shape[-3], call.k.shape[-3]
        self.groups = g
        self.heads = np.arange(h) // max(1, h // max(1, g)) if call.heads is None else np.asarray(call.heads)
        self.q = finite(call.q)
        self.k, self.v = (finite(x)[..., self.heads, :, :] for x in (call.k, call.v))
        self.d, self.e = self.q.shape[-1], self.v.shape[-1]
        self.scale = self.d**-0.5 if call.scale is None else float(call.scale)

        visible = (call.weights > 0) & np.isfinite(call.logits)
        self.visible = visible
        # What lies far below the storage's last place only makes the arithmetic slow: its squares are subnormal.
        self.p = np.where(visible & (call.weights > 1e-20 * units.tiny), call.weights, 0.0)
        self.s = np.where(visible, call.logits, 0.0)
        self.n = visible.sum(axis=-1).astype(float)  # of a row
        self.rows = visible.sum(axis=-2).astype(float)  # of a key
        self.f = np.ones(()) if call.factor is None else np.broadcast_to(call.factor, visible.shape)
        self.pf = self.p * self.f

        top = np.where(visible, call.logits, -np.inf).max(axis=-1, initial=-np.inf)
        best = self.p.max(axis=-1, initial=0.0)
        lse_keys = np.where(self.n > 0, top - np.log(np.where(best > 0, best, 1.0)), -np.inf)
        self.sinks = self._sinks(call.sinks)  # (..., h, 1, sinks)
        lse = lse_keys  # the weights count the sinks already, so this has them where the row has a key
        if self.sinks.shape[-1]:
            alone = np.logaddexp.reduce(self.sinks, axis=-1)
            lse = np.where(self.n > 0, lse, alone)
            top = np.maximum(top, self.sinks.max(axis=-1))
        self.empty = ~np.isfinite(lse)
        self.lse, self.top = finite(lse), finite(top)
        sinks = np.where(np.isfinite(self.sinks), self.sinks, 0.0)
        self.w = np.where(np.isfinite(self.sinks) & ~self.empty[..., None], np.exp(sinks - self.lse[..., None]), 0.0)

        # Logits.
        raw, squares = products(self.q, self.k), products(self.q**2, self.k**2)
        self.raw = np.where(visible, raw, 0.0)
        squares = np.where(visible, squares, 0.0)
        self.v_raw = (u**2 * self.d + 2 * a**2) * squares + u**2 * self.d * self.raw**2
        x = self.scale * self.raw
        added = [np.where(visible, part, 0.0) for part in self._added()]
        parts = sum((part**2 for part in added), np.zeros(()))
        step = u**2 + c**2
        self.x, self.v_x = x, self.scale**2 * self.v_raw
        if call.softcap is None:
            self.slope, self.v_slope, self.tanh = np.ones(()), np.zeros(()), None
            v_s = self.v_x + step * (self.s**2 + parts + x**2)
        else:
            cap = float(call.softcap)
            inner = x + sum(added) if call.softcap_after_bias and added else x
            self.tanh = tanh = np.tanh(inner / cap)
            self.slope = slope = 1 - tanh**2
            self.x = inner
            self.v_x = self.v_x + step * (parts + x**2 + inner**2 if call.softcap_after_bias and added else 0.0)
            error = units.tanh
            self.v_slope = 4 * tanh**2 * slope**2 * (self.v_x + u**2 * inner**2) / cap**2
            self.v_slope = self.v_slope + u**2 * (4 * tanh**4 + 1) + 4 * tanh**4 * error**2
            v_s = slope**2 * self.v_x + step * (self.s**2 + (cap * tanh) ** 2 + (slope * inner) ** 2)
            v_s = v_s + (0.0 if call.softcap_after_bias else step * parts) + (error * cap * tanh) ** 2
        below = self.s - self.top[..., None]
        self.v_e = v_s + u**2 * (below**2 + 4) + units.exp**2 + c**2 * (below**2 + 1)
        self.sure = self.p**2 * self.v_e  # p^2 v_e
        sunk = np.where(self.w > 0, sinks, 0.0)
        self.v_sink = u**2 * (2 * sunk**2 + (sunk - self.top[..., None]) ** 2 + 4) + units.exp**2
        self.sunk = (self.w**2 * self.v_sink).sum(axis=-1)

        # Rows.
        self.merges = u**2 * (self.lse**2 + self.top**2) * self._roundings()
        self.v_row = self.sure.sum(axis=-1) + self.sunk + self.merges + u**2 * (self.n + 4) + (COMMON * units.exp) ** 2

    def _sinks(self, sinks: Array | None) -> Array:
        h = self.q.shape[-3]
        return np.zeros((h, 1, 0)) if sinks is None else np.reshape(np.asarray(sinks, np.float64), (h, 1, -1))

    def _added(self) -> list[Array]:
        """What is added to the logits, term by term."""
        call, found = self.call, []
        if call.bias is not None:
            found.append(finite(np.asarray(call.bias, np.float64)))
        if call.slopes is not None and call.distance is not None:
            found.append(np.asarray(call.slopes, np.float64)[:, None, None] * call.distance)
        return found

    def _roundings(self) -> Array:
        """How often L is rounded: merged in a tree, or summed in the log domain key by key."""
        n = np.maximum(self.n, 1.0)
        return np.maximum(1 + np.log2(n), n / 3)

    # -------------------------------------------------------------- rss

    @functools.cached_property
    def o(self) -> Array:
        return weigh(self.pf, self.v)

    @functools.cached_property
    def stored_weights(self) -> Array:
        """sum (pf)^2 v^2"""
        return weigh(self.pf**2, self.v**2)

    @functools.cached_property
    def forgotten(self) -> Array:
        """Of o + w (o_new - o), where a large partial output is merged into a small one: half a rounding of the largest f v."""
        largest = np.where(self.rows[..., None] > 0, np.abs(self.v), 0.0).max(axis=-2, keepdims=True, initial=0.0)
        return np.square(self.units.accumulate / 2 * self.f.max(initial=0.0) * largest) * (self.n[..., None] > 1)

    def moved(self, values: Array, centre: Array) -> Array:
        """sum_k p^2 v_e (f values - centre)^2 + centre^2 sum_sinks w^2 v_e, expanded."""
        square = weigh(self.sure * self.f**2, values**2) - 2 * centre * weigh(self.sure * self.f, values)
        both = self.sure.sum(axis=-1) + self.sunk
        return np.maximum(square + centre**2 * both[..., None], 0.0)

    def output_bounds(self) -> Bounds:
        units, o, n = self.units, self.o, self.n[..., None]
        narrow = units.operands**2 + units.inputs**2 + units.scores**2
        square = self.moved(self.v, o)
        square += units.accumulate**2 * n * (self.stored_weights + o**2)
        square += self.merges[..., None] * (o**2 + self.stored_weights)
        square += narrow * self.stored_weights + units.stored**2 * o**2
        square += self.forgotten
        if units.operands:
            square += units.tiny**2 * weigh(self.visible * self.f**2, self.v**2)
        return Bounds(np.where(n > 0, np.hypot(np.sqrt(square), units.tiny), 0.0), self.worst_output)

    def lse_bounds(self) -> Bounds:
        u = self.units.accumulate
        v_row, lse = self.v_row, self.lse
        pulled = (self.p * self.slope * self.x).sum(axis=-1)
        worst = self.worst_row
        if self.sinks.shape[-1] and not self.call.lse_includes_sinks:
            v_row, lse, share = self.keys_alone
            pulled = pulled / share
        square = v_row + u**2 * pulled**2 + u**2 * lse**2
        return Bounds(np.sqrt(square) + self.units.tiny, worst + u * np.abs(lse) + self.units.tiny)

    @functools.cached_property
    def keys_alone(self) -> tuple[Array, Array, Array]:
        """eta^2 and lse of the keys without the sinks, and the keys' share of the row."""
        u = self.units.accumulate
        share = np.where(self.n > 0, self.p.sum(axis=-1), 1.0)
        lse = np.where(self.n > 0, self.lse + np.log(share), 0.0)
        v_row = self.sure.sum(axis=-1) / share**2 + u**2 * (self.n + 4) + (COMMON * self.units.exp) ** 2
        return v_row + u**2 * (lse**2 + self.top**2) * self._roundings(), lse, share

    # -------------------------------------------------------------- worst case

    @functools.cached_property
    def worst_logit(self) -> Array:
        """Largest relative error of a weight before it is normalised, over legal orders (|q|.|k| = size)."""
        units, u = self.units, self.units.accumulate
        size = abs(self.scale) * np.where(self.visible, products(np.abs(self.q), np.abs(self.k)), 0.0)
        below = np.abs(self.s - self.top[..., None])
        few = 4 * (1 + np.ceil(self.n / 16))[..., None]
        delta = self.slope * growth((self.d + 4) * u + 2 * units.inputs) * size
        delta = delta + u * (4 * size + 2 * np.abs(self.s) + 2 * below + few) + units.exp
        delta = delta + units.scores * (3 * size + 3 * np.abs(self.s) + below + 1)
        if self.tanh is not None:
            delta = delta + units.tanh * abs(float(self.call.softcap)) * np.abs(self.tanh)
        for part in self._added():
            delta = delta + 2 * u * np.abs(part)
        return np.where(self.visible, delta, 0.0)

    @functools.cached_property
    def worst_row(self) -> Array:
        """Largest error of an lse; it is also the relative error that a row of weights has in common."""
        u, n = self.units.accumulate, self.n
        largest = self.worst_logit.max(axis=-1, initial=0.0)
        if self.sinks.shape[-1]:
            sunk = np.where(self.w > 0, np.abs(self.sinks), 0.0)
            few = 4 * (1 + np.ceil(n / 16))
            own = u * (4 * sunk + 2 * np.abs(self.top)[..., None] + few[..., None]) + self.units.exp
            largest = np.maximum(largest, np.where(self.w > 0, own, 0.0).max(axis=-1))
        merged = 2 * u * np.maximum(2 + np.ceil(np.log2(np.maximum(n, 1))), n) * (np.abs(self.lse) + np.abs(self.top))
        return largest + (2 * n + 4) * u + merged

    @functools.cached_property
    def worst_weight(self) -> Array:
        """E: e^(w_e + w_eta) - 1"""
        return np.where(self.visible, growth(self.worst_logit + self.worst_row[..., None]), 0.0)

    @functools.cached_property
    def sum_weights(self) -> Array:
        """gamma of a row's sums, with P rounded to the storage on the way."""
        units = self.units
        narrow = 2 * units.operands + 2 * units.inputs + 2 * units.scores
        return growth((2 * self.n + 6) * units.accumulate + narrow)

    @functools.cached_property
    def worst_output(self) -> Array:
        units = self.units
        error = self.worst_weight
        grown = self.sum_weights * (1 + error.max(axis=-1, initial=0.0)) + 2 * growth(self.worst_row)
        size = np.where(self.rows[..., None] > 0, np.abs(self.v), 0.0)
        worst = weigh(self.pf * (error + grown[..., None]), size)
        worst += 4 * units.accumulate * size.max(axis=-2, keepdims=True, initial=0.0)
        worst += 2 * units.tiny * (weigh(self.visible * self.f, size) + self.n[..., None])
        worst = worst * (1 + units.stored) + units.stored * np.abs(self.o) + units.tiny
        return np.where(self.n[..., None] > 0, worst, 0.0)
