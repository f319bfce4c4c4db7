"""The hash rounds of LSH attention as one softmax: each round in its own order through the core, then merged.

With W[s,i,j] = exp(logits - maximum) / row_sum over all rounds and Delta_i = d_output_i . output_i:

    dv_j = sum_{s,i} W d_output_i      da = W (d_output_i . v_j - Delta_i + d_lse_i)      dq_i = scale sum_{s,j} da k_j
    dqk  = dq + (dk - k (k . dk) / n) / norm, in its two roles; n = 1 for l2 and d for rms

A row that sees nobody in any round sees itself, with weight 1.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refattn.arrays import device, real
from refattn.attention.blocks.lsh import PAIRS, Multiplicity, Plan, Units
from refattn.attention.blocks.lsh_buckets import APART
from refattn.core.backward import backward_group
from refattn.core.blocks import SPLIT, Group, View
from refattn.core.forward import forward_group
from refattn.core.selections import take_order
from refattn.normalization import Partial, merged

__all__ = ["Rounds"]


@dataclasses.dataclass(frozen=True)
class Rounds:
    """All rounds of one call: (batch, head) units in groups, round after round, each in its own order."""

    problem: Any
    backend: Any
    plan: Plan
    order: Any
    rank: Any
    buckets: Any
    keep: Any
    key_norm: str
    eps: float
    last_resort: bool

    def _units(self, view: Any) -> Units:
        group = view.group
        return Units(
            self.plan,
            view.part(self.order),
            view.part(self.rank),
            view.part(self.buckets),
            keep=None if self.keep is None else view.part(self.keep),
            visibility=self.problem.visibility,
            numbers=(group.batches, group.heads.reshape(-1)),
        )

    def _round(self, view: Any, units: Units, s: int, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Round s as a problem of its own, q, k and v in its order; its one group; its query rows."""
        plan = self.plan
        keys = units.key_rows(s)
        rows = keys[..., plan.before * plan.chunk : plan.before * plan.chunk + plan.rows]
        dropout = self.problem.dropout
        problem = dataclasses.replace(
            self.problem,
            q=take_order(q, rows),
            k=take_order(k, keys[:, :, 0, :]),
            v=take_order(v, keys[:, :, 0, :]),
            terms=(Multiplicity(units, rows, keys),) if plan.duplicates == "trax1" else (),
            visibility=None,
            blocks=lambda group: units.blocks(s, rows, keys),
            dropout=None if dropout is None else (view.part(dropout[0]), dropout[1]),
        )
        whole = Group(slice(0, q.shape[0]), slice(0, q.shape[1]), (0, plan.rows), view.group.heads)
        return problem, whole, rows

    def _keys(self, x: Any) -> tuple[Any, Any]:
        """Normalised keys (b,h,t,d), and the factors that the normalisation multiplies by, (b,h,t,1)."""
        xp = self.backend.xp
        square = xp.sum(x * x, axis=-1, keepdims=True)
        if self.key_norm == "rms":
            factor = 1 / xp.sqrt(square / x.shape[-1] + self.eps)
        else:
            norm = xp.sqrt(square)
            factor = 1 / xp.where(real(norm) > self.eps, norm, xp.full_like(norm, self.eps))
        return x * factor, factor

    def _keys_backward(self, k: Any, factor: Any, d_k: Any) -> Any:
        """factor (d_k - k (k . d_k) / n); for l2 no second term where the norm is below eps.  A key nobody saw gives 0."""
        xp = self.backend.xp
        inner = xp.sum(k * d_k, axis=-1, keepdims=True)
        if self.key_norm == "rms":
            inner = inner / max(1, k.shape[-1])
        else:
            inner = xp.where(real(factor) * self.eps < 1, inner, xp.zeros_like(inner))
        seen = xp.any(d_k != 0, axis=-1, keepdims=True)
        return xp.where(seen, factor * (d_k - k * inner), xp.zeros_like(d_k))

    def _groups(self) -> list[Any]:
        """As many units together as fill a block of one round."""
        b, h = self.problem.q.shape[:2]
        if not self.plan.length:
            return []
        per_unit = max(1, self.plan.rows * self.plan.reach * self.plan.chunk)
        together = max(1, PAIRS // per_unit)
        heads, batches = min(h, together), max(1, together // max(1, h))
        numbers, rows = np.asarray(self.problem.heads), (0, self.plan.length)
        return [
            Group(slice(i, min(i + batches, b)), slice(j, min(j + heads, h)), rows, numbers[j : j + heads])
            for i in range(0, b, batches)
            for j in range(0, h, max(1, heads))
        ]

    def _jobs(self) -> tuple[list[Any], list[tuple[int, ...]], int]:
        """Groups of units, the rounds that each takes at a time, and the work of all: few units share out their rounds."""
        plan, groups = self.plan, self._groups()
        units = self.problem.q.shape[0] * self.problem.q.shape[1]
        work = 2 * units * plan.hashes * plan.rows * plan.reach * plan.chunk
        every = tuple(range(plan.hashes))
        apart = len(groups) < SPLIT and work > APART
        return groups, [(s,) for s in every] if apart else [every], work

    def _run(self, function: Callable[..., tuple[Any, ...]], gradient: bool) -> Iterator[tuple[Any, list[Any]]]:
        """Every group's view, and what the function gives for its shares of the rounds, in order."""
        groups, shares, work = self._jobs()
        views = [View(self.problem, group, self.backend, gradient) for group in groups]

        def run(job: tuple[Any, tuple[int, ...]]) -> tuple[Any, ...]:
            with self.backend.quiet():
                return function(*job)

        done = self.backend.map(run, [(view, rounds) for view in views for rounds in shares], work=work)
        for n, view in enumerate(views):
            yield view, done[n * len(shares) : (n + 1) * len(shares)]

    # ------------------------------------------------------------------ forward

    def forward(self) -> tuple[Partial, Any]:
        """The softmax over all rounds (b,h,t,...), and bool (b,h,t): the rows that see nobody but, perhaps, themselves."""
        xp, backend, problem = self.backend.xp, self.backend, self.problem
        shape = (*problem.q.shape[:2], problem.q.shape[-2])
        like = {"device": device(problem.q)}
        row_sum = xp.zeros(shape, dtype=problem.q.dtype, **like)
        output = xp.zeros((*shape, problem.v.shape[-1]), dtype=problem.q.dtype, **like)
        whole = (output, xp.full_like(real(row_sum), -math.inf), row_sum, xp.zeros(shape, dtype=xp.bool, **like))
        for view, parts in self._run(self._forward_rounds, False):
            with backend.quiet():
                part = parts[0] if len(parts) == 1 else merged(*parts)
                alone = part.maximum == -math.inf
                if self.last_resort and bool(xp.any(alone)):
                    part = self._with_oneself(view, part, alone)
            index = (view.group.b, view.group.g, ...)
            whole = tuple(backend.assign(x, index, y) for x, y in zip(whole, (*part, alone), strict=True))
        return Partial(*whole[:3]), whole[3]

    def _forward_rounds(self, view: Any, rounds: tuple[int, ...]) -> Partial:
        """Some rounds together, laid out by position."""
        units = self._units(view)
        q, v = view.part(self.problem.q), view.part(self.problem.v)
        k, _ = self._keys(q[:, :, 0, ...])
        total = None
        for s in rounds:
            problem, group, _ = self._round(view, units, s, q, k, v)
            part = forward_group(problem, group, self.backend)
            rows = [units.to_positions(x[:, :, 0, :, None], s)[..., 0] for x in part[1:]]
            part = Partial(units.to_positions(part.output[:, :, 0, ...], s), *rows)
            total = part if total is None else merged(total, part)
        return total  # type: ignore[return-value] # there is a round

    def _with_oneself(self, view: Any, part: Partial, alone: Any) -> Partial:
        """Rows that are ``alone`` see themselves: weight 1, or NaN where their logit is no number."""
        xp = self.backend.xp
        q, v, kept = view.part(self.problem.q)[:, :, 0, ...], view.part(self.problem.v), self._kept_oneself(view)
        logits, weight = self._oneself(q, self._keys(q)[0])
        own = weight[..., None] * (v if kept is None else v * kept)
        return Partial(
            xp.where(alone[..., None], own, part.output),
            xp.where(alone, real(logits), part.maximum),
            xp.where(alone, xp.exp(logits - real(logits)), part.row_sum),
        )

    def _oneself(self, q: Any, k: Any) -> tuple[Any, Any]:
        """scale q_i . k_i, and the weight of a row that sees itself alone, (b,h,t)."""
        logits = self.problem.scale * self.backend.xp.sum(q * k, axis=-1)
        return logits, self.backend.xp.exp(logits - logits)

    def _kept_oneself(self, view: Any) -> Any:
        """Dropout factors of the pairs (i, i), (b|1,h|1,t|1,1); None without dropout."""
        if self.problem.dropout is None:
            return None
        xp = self.backend.xp
        mask, factor = self.problem.dropout
        mask = view.part(mask)[:, :, 0, ...]
        n_q, n_k = mask.shape[-2:]
        if n_q > 1 and n_k > 1:
            flat = xp.reshape(mask, (*mask.shape[:-2], n_q * n_k))
            mask = xp.take(flat, xp.arange(n_q) * (n_k + 1), axis=-1)
        else:
            mask = xp.reshape(mask, (*mask.shape[:-2], n_q * n_k))
        return xp.astype(mask, self.problem.q.dtype)[..., None] * factor

    # ------------------------------------------------------------------ backward

    def backward(self, total: Partial, alone: Any, d_output: Any, d_lse: Any) -> tuple[Any, Any, Any]:
        """Cotangents of qk (b,h,t,d), v (b,h,t,e) and scale."""
        xp, backend, problem = self.backend.xp, self.backend, self.problem
        zeros = {"dtype": problem.q.dtype, "device": device(problem.q)}
        d_qk, d_v = (xp.zeros((*alone.shape, x.shape[-1]), **zeros) for x in (problem.q, problem.v))
        d_scale = xp.zeros((), **zeros)
        d_output = xp.zeros_like(total.output) if d_output is None else xp.broadcast_to(d_output, total.output.shape)
        d_lse = xp.zeros(alone.shape, **zeros) if d_lse is None else xp.broadcast_to(d_lse, alone.shape)

        def rounds(view: Any, which: tuple[int, ...]) -> tuple[Any, ...]:
            rows = [view.part(x) for x in (*total, alone, d_output, d_lse)]
            return self._backward_rounds(view, which, *rows)

        for view, parts in self._run(rounds, True):
            with backend.quiet():
                sums = parts[0]
                for part in parts[1:]:
                    sums = tuple(a + b for a, b in zip(sums, part, strict=True))
                own_qk, own_v, own_scale = self._both_roles(
                    view, sums, *(view.part(x) for x in (alone, d_output, d_lse))
                )
            index = (view.group.b, view.group.g, ...)
            d_qk, d_v = backend.assign(d_qk, index, own_qk), backend.assign(d_v, index, own_v)
            d_scale = d_scale + own_scale
        return d_qk, d_v, d_scale

    def _backward_rounds(
        self,
        view: Any,
        which: tuple[int, ...],
        output: Any,
        maximum: Any,
        row_sum: Any,
        alone: Any,
        d_output: Any,
        d_lse: Any,
    ) -> tuple[Any, ...]:
        """Sums over some rounds: cotangents of q, k, v and scale."""
        xp, units = self.backend.xp, self._units(view)
        q, v = view.part(self.problem.q), view.part(self.problem.v)
        k, _ = self._keys(q[:, :, 0, ...])
        alone = xp.logical_or(alone, row_sum == 0)  # what such rows see stands in no round
        factor = 1 / xp.where(alone, xp.ones_like(row_sum), row_sum)  # weights are exp(logits - maximum) times this
        maximum = xp.astype(xp.where(alone, xp.zeros_like(maximum), maximum), factor.dtype)
        shift = factor * (xp.sum(d_output * output, axis=-1) - d_lse)  # Delta - d_lse
        rows_of = xp.stack([maximum, xp.where(alone, xp.zeros_like(shift), shift)], axis=-1)
        d_output = d_output * factor[..., None]
        d_q, d_k, d_v = xp.zeros_like(k), xp.zeros_like(k), xp.zeros_like(v)
        d_scale = xp.zeros((), dtype=k.dtype, device=device(k))
        for s in which:
            problem, group, rows = self._round(view, units, s, q, k, v)
            row, d_o = (take_order(x[:, :, None, ...], rows) for x in (rows_of, d_output))
            a, b, c, e, _ = backward_group(problem, group, self.backend, real(row[..., 0]), row[..., 1], d_o)
            d_q += units.to_positions(a[:, :, 0, ...], s)
            d_k += units.keys_to_positions(b, s)
            d_v += units.keys_to_positions(c, s)
            d_scale = d_scale + e
        return d_q, d_k, d_v, d_scale

    def _both_roles(
        self, view: Any, sums: tuple[Any, ...], alone: Any, d_output: Any, d_lse: Any
    ) -> tuple[Any, Any, Any]:
        """Cotangents of qk, v and scale: rows that see themselves added, both roles of qk together."""
        xp, scale = self.backend.xp, self.problem.scale
        d_q, d_k, d_v, d_scale = sums
        q = view.part(self.problem.q)[:, :, 0, ...]
        k, factor = self._keys(q)
        if self.last_resort and bool(xp.any(alone)):
            _, weight = self._oneself(q, k)
            kept, here = self._kept_oneself(view), alone[..., None]
            d_own = weight[..., None] * (d_output if kept is None else d_output * kept)
            d_v = d_v + xp.where(here, d_own, xp.zeros_like(d_own))
            d_logit = (weight * d_lse)[..., None]  # the row's lse is its own logit, scale q_i . k_i
            d_q = d_q + xp.where(here, scale * d_logit * k, xp.zeros_like(k))
            d_k = d_k + xp.where(here, scale * d_logit * q, xp.zeros_like(q))
            d_scale = d_scale + xp.sum(xp.where(here, d_logit * q * k, xp.zeros_like(q)))
        return d_q + self._keys_backward(k, factor, d_k), d_v, d_scale
