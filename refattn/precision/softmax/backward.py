"""Errors of the cotangents of weights and logits; bounds of every gradient as a sum of them."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from refattn.arrays import sum_to_shape
from refattn.contraction import einsum
from refattn.precision.softmax.forward import ForwardErrors, finite, growth, products, weigh
from refattn.precision.softmax.records import Bounds

__all__ = ["BackwardErrors"]

Array = np.ndarray


class BackwardErrors:
    """Sizes of the errors of cotangents of the weights and logits; every gradient as a sum of them."""

    def __init__(self, forward: ForwardErrors, d_output: Array | None, d_lse: Array | None) -> None:
        self.forward = fw = forward
        units, u = fw.units, fw.units.accumulate
        self.units = units
        shape = fw.p.shape[:-1]
        seen = fw.n > 0
        d_output = np.zeros((*shape, fw.e)) if d_output is None else np.broadcast_to(d_output, (*shape, fw.e))
        self.d_o = d_o = np.where(seen[..., None], finite(d_output), 0.0)
        given = np.zeros(shape) if d_lse is None else np.broadcast_to(d_lse, shape)
        d_lse = np.where(fw.empty, 0.0, finite(given))
        v_lse = np.zeros(())
        if fw.sinks.shape[-1] and not fw.call.lse_includes_sinks:  # the weights of that lse are p / share
            v_keys, _, share = fw.keys_alone
            d_lse = np.where(seen, d_lse / share, 0.0)
            v_lse = d_lse**2 * (v_keys + fw.v_row)
        o, p, pf, n = fw.o, fw.p, fw.pf, fw.n
        self.d_p = products(d_o, fw.v)
        squares = products(d_o**2, fw.v**2)
        self.v_dp = (u**2 * fw.e + 2 * units.inputs**2) * squares + (u**2 * fw.e + units.scores**2) * self.d_p**2
        self.delta0 = delta0 = (d_o * o).sum(axis=-1)
        self.shift = shift = delta0 - d_lse  # Delta
        self.lost = shift if fw.call.lse_includes_sinks else delta0  # what a sink's weight meets
        narrow = units.operands**2 + units.inputs**2 + units.scores**2

        # Delta: from a rounded output, from an output of other errors than the weights, from rowsum(P dP).
        d_pf = fw.f * self.d_p
        v_shift = ((d_o * o) ** 2).sum(axis=-1) * (units.stored**2 + u**2 * fw.e + units.inputs**2)
        v_shift += u**2 * (delta0**2 + d_lse**2 + shift**2) + v_lse
        v_shift += (d_o**2 * fw.forgotten).sum(axis=-1)
        v_shift += (fw.sure * (d_pf - delta0[..., None]) ** 2).sum(axis=-1)
        v_shift += delta0**2 * (fw.sunk + fw.merges + u**2 * (n + 4))
        v_shift += (pf**2 * self.v_dp).sum(axis=-1)
        v_shift += (u**2 * n + narrow) * ((pf * self.d_p) ** 2).sum(axis=-1)
        v_shift += units.tiny**2 * (d_o**2).sum(axis=-1)
        self.v_shift = v_shift

        g = d_pf - shift[..., None]
        self.d_s = d_s = p * g
        own = p**2 * (g**2 * (fw.v_e + 3 * u**2 + units.scores**2) + fw.f**2 * self.v_dp)  # I
        self.v_s = own
        self.d_u = d_u = fw.slope * d_s
        self.p_u = fw.slope * p
        self.v_u = fw.slope**2 * own + d_s**2 * fw.v_slope
        self.v_operand = self.v_u + (units.operands**2 + units.inputs**2 + units.scores**2) * d_u**2
        if units.operands:
            self.v_operand = self.v_operand + units.tiny**2 * fw.visible

    def bounds(self, wrt: Sequence[str]) -> dict[str, Bounds]:
        return {f"d_{name}": getattr(self, name)() for name in wrt}

    # -------------------------------------------------------------- sums over keys, over rows

    def q(self) -> Bounds:
        fw, units, u = self.forward, self.units, self.units.accumulate
        scale, n = fw.scale, fw.n[..., None]
        d_q = scale * weigh(self.d_u, fw.k)
        square = scale**2 * weigh(self.v_operand, fw.k**2)
        square += fw.v_row[..., None] * d_q**2 + self.v_shift[..., None] * (scale * weigh(self.p_u, fw.k)) ** 2
        square += u**2 * (n + 4) * (scale**2 * weigh(self.d_u**2, fw.k**2) + d_q**2)
        square += units.stored**2 * d_q**2
        worst = self.worst_u + growth((n + 8) * u + self._narrow()) * (np.abs(self.d_u) + self.worst_u)
        worst = abs(scale) * weigh(worst, np.abs(fw.k)) * (1 + units.stored) + units.stored * np.abs(d_q)
        return self._reduced(square, worst, np.shape(fw.call.q))

    def k(self) -> Bounds:
        fw, u = self.forward, self.units.accumulate
        independent = self.v_operand + self.d_u**2 * fw.v_row[..., None] + self.p_u**2 * self.v_shift[..., None]
        square = independent + u**2 * (fw.rows[..., None, :] + 4) * self.d_u**2
        square = fw.scale**2 * einsum("...qk,...qd->...kd", square, fw.q**2)
        value = fw.scale * einsum("...qk,...qd->...kd", self.d_u, fw.q)
        worst = self.worst_u + self._gamma_rows() * (np.abs(self.d_u) + self.worst_u)
        worst = abs(fw.scale) * einsum("...qk,...qd->...kd", worst, np.abs(fw.q))
        return self._over_heads(square, value, worst, np.shape(fw.call.k))

    def v(self) -> Bounds:
        fw, units, u = self.forward, self.units, self.units.accumulate
        narrow = units.operands**2 + units.inputs**2 + units.scores**2
        square = fw.pf**2 * (fw.v_e + fw.v_row[..., None] + narrow + u**2 * (fw.rows[..., None, :] + 6))
        if units.operands:
            square = square + units.tiny**2 * fw.visible * fw.f**2
        square = einsum("...qk,...qe->...ke", square, self.d_o**2)
        value = einsum("...qk,...qe->...ke", fw.pf, self.d_o)
        error = fw.worst_weight + fw.sum_weights[..., None] * (1 + fw.worst_weight)
        worst = fw.pf * (error + self._gamma_rows() * (1 + error))
        worst = einsum("...qk,...qe->...ke", worst, np.abs(self.d_o))
        if units.operands:
            worst = worst + units.tiny * einsum("...qk,...qe->...ke", fw.visible * fw.f, np.abs(self.d_o))
        return self._over_heads(square, value, worst, np.shape(fw.call.v))

    def _narrow(self) -> float:
        return 2 * self.units.operands + 2 * self.units.inputs + 2 * self.units.scores

    def _gamma_rows(self) -> Array:
        fw = self.forward
        shared = fw.q.shape[-3] / max(1, fw.groups)
        return growth((fw.rows * shared + 8) * self.units.accumulate + self._narrow())[..., None, :]

    def _over_heads(self, square: Array, value: Array, worst: Array, shape: tuple[int, ...]) -> Bounds:
        """Parts (..., h, k, .) of query heads, which may be stored before they are added, summed over each group."""
        fw, units, u = self.forward, self.units, self.units.accumulate
        square = square + (u**2 * (fw.rows[..., None] + 4) + units.stored**2) * value**2 + units.tiny**2
        worst = worst * (1 + 2 * units.stored) + units.stored * np.abs(value)
        member = np.equal.outer(fw.heads, np.arange(fw.groups)).astype(float)
        square, value, worst = (einsum("...hkc,hg->...gkc", x, member) for x in (square, value, worst))
        shared = len(fw.heads) / max(1, fw.groups)
        square += (units.stored**2 + u**2 * shared) * value**2
        return self._reduced(square, worst + units.stored * np.abs(value), shape)

    def _reduced(self, square: Array, worst: Array, shape: tuple[int, ...]) -> Bounds:
        """Over batch axes that the input does not have."""
        square, worst = (sum_to_shape(x, shape) for x in (square, worst))
        return Bounds(np.hypot(np.sqrt(square), self.units.tiny), worst + self.units.tiny)

    # -------------------------------------------------------------- sums of c dS over any axes

    def _sum(
        self,
        c: Array,
        shape: tuple[int, ...],
        *,
        inside: bool,
        v_c: Array | float = 0.0,
        more: Array | float = 0.0,
        worst_c: Array | float | None = 0.0,
    ) -> Bounds:
        """Bound of c X summed to ``shape``, X = dU behind the cap (``inside``) or dS; ``v_c`` is the variance of c."""
        fw, units, u = self.forward, self.units, self.units.accumulate
        x, own, p = (self.d_u, self.v_u, self.p_u) if inside else (self.d_s, self.v_s, fw.p)
        full = x.shape
        terms, common = c * x, c * p
        wide = (*(1,) * (len(full) - len(shape)), *shape)
        count = float(np.prod([n for n, m in zip(full, wide, strict=True) if m != n]))
        independent = c**2 * own + v_c * x**2
        total = sum_to_shape(terms, shape)
        square = sum_to_shape(independent, shape) + more
        v_row, v_shift = fw.v_row[..., None], self.v_shift[..., None]
        if wide[-1] == 1 and full[-1] != 1:
            terms_row, common_row = (y.sum(axis=-1, keepdims=True) for y in (terms, common))
        else:
            terms_row, common_row = terms, common
        square = square + sum_to_shape(terms_row**2 * v_row + common_row**2 * v_shift, shape)
        square = square + u**2 * (count + 4) * (sum_to_shape(terms**2, shape) + total**2)
        square = square + units.stored**2 * total**2
        worst = None
        if worst_c is not None:
            error = self.worst_u if inside else self.worst_s
            worst = np.abs(c) * error + worst_c * (np.abs(x) + error)
            worst = sum_to_shape(worst + growth((count + 8) * u) * np.abs(c) * (np.abs(x) + error), shape)
            worst = worst * (1 + units.stored) + units.stored * np.abs(total) + units.tiny
        return Bounds(np.hypot(np.sqrt(square), units.tiny), worst)

    def bias(self) -> Bounds:
        call = self.forward.call
        return self._sum(np.ones(()), np.shape(call.bias), inside=call.softcap_after_bias)

    def alibi_slopes(self) -> Bounds:
        call, h = self.forward.call, self.forward.q.shape[-3]
        bound = self._sum(np.asarray(call.distance, np.float64), (h, 1, 1), inside=call.softcap_after_bias)
        return Bounds(*(None if x is None else x.reshape(h) for x in bound))

    def scale(self) -> Bounds:
        fw, u = self.forward, self.units.accumulate
        scaled = fw.q**2 * u**2 * fw.n[..., None] * weigh(self.d_u**2, fw.k**2)  # those who take sum q dq
        size = np.where(fw.visible, products(np.abs(fw.q), np.abs(fw.k)), 0.0)
        worst = growth((fw.d + 4) * u + 2 * self.units.inputs) * size
        return self._sum(fw.raw, (), inside=True, v_c=fw.v_raw, more=scaled.sum(), worst_c=worst)

    def softcap(self) -> Bounds:
        """c tanh(x / c) by c: tanh - (x / c)(1 - tanh^2)."""
        fw, u = self.forward, self.units.accumulate
        ratio, slope = fw.x / float(fw.call.softcap), fw.slope
        t: Any = fw.tanh
        v_x = fw.v_x / float(fw.call.softcap) ** 2 + u**2 * ratio**2
        v_z = u**2 * (t**2 + 2 * (ratio * slope) ** 2) + (2 * t * slope * ratio) ** 2 * v_x
        v_z = v_z + ratio**2 * u**2 * (4 * t**4 + 1) + self.units.tanh**2 * t**2 * (1 + 4 * (ratio * t) ** 2)
        return self._sum(t - ratio * slope, (), inside=False, v_c=v_z, worst_c=None)

    def sinks(self) -> Bounds:
        """-sum w Delta over batch and rows."""
        fw, units, u = self.forward, self.units, self.units.accumulate
        lost = self.lost[..., None]
        terms = fw.w * lost
        square = fw.w**2 * (lost**2 * (fw.v_row[..., None] + fw.v_sink) + self.v_shift[..., None])
        batch = tuple(range(terms.ndim - 3))
        count = float(np.prod([terms.shape[a] for a in batch]) + terms.shape[-2])
        square, squares, total = (x.sum(axis=(*batch, -2)) for x in (square, terms**2, terms))
        square = square + u**2 * (count + 4) * (squares + total**2) + units.stored**2 * total**2
        rss = np.hypot(np.sqrt(square), units.tiny)
        return Bounds(rss.reshape(np.shape(fw.call.sinks)), None)

    # -------------------------------------------------------------- worst case

    @functools.cached_property
    def worst_s(self) -> Array:
        fw, units, u = self.forward, self.units, self.units.accumulate
        error, f = fw.worst_weight, fw.f
        gamma = growth((fw.e + 4) * u + 2 * units.inputs + units.scores)
        size_o, size_v = np.abs(self.d_o), np.where(fw.rows[..., None] > 0, np.abs(fw.v), 0.0)
        w_dp = gamma * products(size_o, size_v)
        narrow = fw.sum_weights[..., None]
        w_output = fw.worst_output
        from_output = (size_o * (w_output + gamma * (np.abs(fw.o) + w_output))).sum(axis=-1)
        from_rows = (np.abs(fw.pf * self.d_p) * (error + narrow) + fw.pf * (1 + error) * w_dp).sum(axis=-1)
        d_lse = np.abs(self.shift - self.delta0)
        w_shift = np.maximum(from_output, from_rows) + 3 * u * (np.abs(self.delta0) + d_lse)
        if fw.sinks.shape[-1] and not fw.call.lse_includes_sinks:
            w_shift = w_shift + d_lse * growth(2 * fw.worst_row)
        g = f * self.d_p - self.shift[..., None]
        w_g = f * w_dp + w_shift[..., None] + 3 * u * (np.abs(f * self.d_p) + np.abs(self.shift)[..., None])
        last = (4 * u + 2 * units.operands + 2 * units.scores) * (1 + error) * (np.abs(g) + w_g)
        return np.where(fw.visible, fw.p * (error * (np.abs(g) + w_g) + w_g + last) + units.tiny, 0.0)

    @functools.cached_property
    def worst_u(self) -> Array:
        fw, units, u = self.forward, self.units, self.units.accumulate
        if fw.tanh is None:
            return self.worst_s
        cap, tanh = abs(float(fw.call.softcap)), np.abs(fw.tanh)
        w_slope = 2 * tanh * np.minimum(1.0, fw.worst_logit / cap + u * np.abs(fw.x) / cap)
        w_slope = w_slope + u * (4 * tanh**2 + 2) + 2 * units.tanh * tanh**2
        return (fw.slope + w_slope) * self.worst_s + np.abs(self.d_s) * w_slope
