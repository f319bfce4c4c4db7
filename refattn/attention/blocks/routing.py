"""Routing attention: the softmax inside all clusters, forward and backward, in runs of clusters."""

import math
from typing import Any

import numpy as np

from refattn.arrays import namespace, real
from refattn.contraction import einsum
from refattn.core.blocks import SMALL, product
from refattn.core.terms import places_to_rows, rows_to_places
from refattn.normalization import row_maximum

__all__ = ["Clusters"]


class _Task:
    """Whole heads n0 ... n1 - 1 that are computed together, and what their forward leaves."""

    def __init__(self, n0: int, n1: int, runs: list[tuple[int, int]]) -> None:
        self.n0, self.n1, self.runs = n0, n1, runs
        self.sums: tuple[Any, Any] = (None, None)  # rows of members of queries, of keys -> tokens
        self.part: list[Any] = []  # of each run: output (units, w, e) and lse (units, w)
        self.lse: list[Any] = []
        self.share: Any = None  # (heads, t, 1)


class Clusters:
    """Softmax attention of all clusters: units (batch, head, cluster) of one width, taken in runs of about 2^18 pairs."""

    def __init__(
        self,
        *,
        backend: Any,
        problem: Any,
        members: tuple[Any, Any],
        masks: tuple[Any, Any],
        alike: bool,
        causal: str | None,
        self_attention: str,
        memory: tuple[Any, Any] | None,
        relative: tuple[Any, Any],
        algorithm: str,
        d_scale: bool,
    ) -> None:
        xp = backend.xp
        self.backend, self.scale = backend, problem.scale
        self.visibility, self.dropout = problem.visibility, problem.dropout
        self.causal, self.self_attention, self.memory = causal, self_attention, memory
        self.relative_keys, self.relative_values = relative
        self.algorithm, self.d_scale = algorithm, d_scale
        b, self.h, self.c, self.n_q = members[0].shape
        self.n_k = members[1].shape[-1]
        self.units = b * self.h * self.c
        self.batch, self.lengths = b, (problem.q.shape[-2], problem.k.shape[-2])
        q, k, v = (
            xp.reshape(x, (b * self.h * t, x.shape[-1]))
            for x, t in ((problem.q, self.lengths[0]), (problem.k, self.lengths[1]), (problem.v, self.lengths[1]))
        )
        self.q = q
        self.sources = (q * self.scale, k, v)  # (b h t, channels)
        everything = (*self.sources, *(() if memory is None else memory))
        self.finite = all(_finite(x) for x in everything)
        self.positions, self.rows, empty, hidden = zip(
            *(self._index(x, keep, t) for x, keep, t in zip(members, masks, self.lengths, strict=True)), strict=True
        )
        # Masked queries are left out; a masked key is only hidden, as a token may see itself as last resort.
        self.dead, self.hidden = (hidden[0], empty[1]), hidden[1]
        # Members of queries that are those of the keys, in rising order: their ranks compare as their positions do.
        self.ranked = alike and all(x is None for x in hidden)
        self.tasks = self._tasks()

    def _index(self, members: Any, keep: Any, t: int) -> tuple[Any, Any, Any, Any]:
        """Positions (units, w), rows of the flat arrays, slots without a token, and with masked ones (None: no such)."""
        xp = self.backend.xp
        width = members.shape[-1]
        empty = members < 0
        hidden = empty
        place = xp.where(empty, xp.zeros_like(members), members)
        if keep is not None and t:
            entry = xp.arange(self.batch)[:, None, None, None] * t + place
            real_ones = xp.take(xp.reshape(keep, (-1,)), xp.reshape(entry, (-1,)))
            hidden = xp.logical_or(empty, xp.logical_not(xp.reshape(real_ones, members.shape)))
        heads = xp.reshape(xp.arange(self.batch * self.h), (self.batch, self.h, 1, 1))
        shape = (self.units, width)
        rows = xp.reshape(place + heads * t, shape)
        found = (xp.reshape(x, shape) if bool(xp.any(x)) else None for x in (empty, hidden))
        return xp.reshape(place, shape), rows, *found

    # ------------------------------------------------------------ runs of units

    def _tasks(self) -> list[_Task]:
        pairs = max(1, self.n_q * self._columns())
        heads = self.batch * self.h
        few = {"whole": heads, "tiled": 1}.get(self.algorithm, SMALL // (self.c * pairs))
        step = {"whole": self.units, "tiled": 1}.get(self.algorithm, SMALL // pairs)
        tasks = []
        for n in range(0, heads, max(1, few)):
            end = min(n + max(1, few), heads)
            width = max(1, step) if end - n == 1 else self.units
            runs = [(u, min(u + width, end * self.c)) for u in range(n * self.c, end * self.c, width)]
            tasks.append(_Task(n, end, runs))
        return tasks

    def _row_runs(self, units: int) -> list[tuple[int, int]]:
        step = max(16, SMALL // max(1, units * self._columns()))
        step = {"whole": self.n_q, "tiled": -(-self.n_q // 3)}.get(self.algorithm, step)
        return [(i, min(i + step, self.n_q)) for i in range(0, max(1, self.n_q), max(1, step))]

    def _columns(self) -> int:
        return self.n_k + (0 if self.memory is None else self.memory[0].shape[-2])

    def _work(self) -> int:
        return 2 * self.units * self.n_q * self._columns()

    def _take(self, flat: Any, side: int, units: tuple[int, int], rows: slice = slice(None), first: int = 0) -> Any:
        """Rows (a, w, channels) of a run of units; zeros where there is no token.  ``flat`` starts with row ``first``."""
        xp = self.backend.xp
        index = self.rows[side][units[0] : units[1], rows]
        index = index - first if first else index
        found = xp.reshape(xp.take(flat, xp.reshape(index, (-1,)), axis=0), (*index.shape, flat.shape[-1]))
        if self.dead[side] is None:
            return found
        dead = self.dead[side][units[0] : units[1], rows, None]
        return xp.where(dead, xp.zeros_like(found), found)

    def _keys(self, units: tuple[int, int]) -> tuple[Any, Any]:
        """Keys and values of a run of units, those of the memory last."""
        xp = self.backend.xp
        found = [self._take(self.sources[n], 1, units) for n in (1, 2)]
        if self.memory is not None:
            own = xp.arange(*units) % (self.h * self.c)
            found = [xp.concat([x, xp.take(m, own, axis=0)], axis=-2) for x, m in zip(found, self.memory, strict=True)]
        return found[0], found[1]

    def _numbers(self, units: tuple[int, int]) -> tuple[Any, Any]:
        """Batch entry and head of each unit, (a, 1, 1)."""
        heads = self.backend.xp.arange(*units)[:, None, None] // self.c
        return heads // self.h, heads % self.h

    def _visible(self, units: tuple[int, int], rows: slice) -> Any:
        """Who sees whom, bool broadcasting to (a, rows, columns); None where all do."""
        xp = self.backend.xp
        place = xp.arange(self.n_q)[None, rows, None], xp.arange(self.n_k)[None, None, :]
        own = self.positions[0][units[0] : units[1], rows, None], self.positions[1][units[0] : units[1], None, :]
        compared = place if self.ranked else own
        parts = []
        if self.causal is not None:
            i, j = place if self.causal == "rank" else compared
            parts.append(i >= j)
        if self.dead[0] is not None:
            parts.append(xp.logical_not(self.dead[0][units[0] : units[1], rows, None]))
        if self.hidden is not None:
            parts.append(xp.logical_not(self.hidden[units[0] : units[1], None, :]))
        if self.visibility is not None:
            b, h = self._numbers(units)
            parts.append(self.visibility.visible(*own, q=self.lengths[0], k=self.lengths[1], b=b, h=h))
        seen = None
        for x in parts:
            seen = x if seen is None else xp.logical_and(seen, x)
        memory = self._columns() - self.n_k
        if self.self_attention != "always":
            itself = compared[0] == compared[1]
            others = xp.logical_not(itself) if seen is None else xp.logical_and(seen, xp.logical_not(itself))
            if self.self_attention == "last_resort" and not memory:
                if self.dead[0] is not None:
                    itself = xp.logical_and(itself, ~self.dead[0][units[0] : units[1], rows, None])
                if self.dead[1] is not None:
                    itself = xp.logical_and(itself, ~self.dead[1][units[0] : units[1], None, :])
                others = xp.logical_or(others, xp.logical_and(itself, ~xp.any(others, axis=-1, keepdims=True)))
            seen = others
        if seen is None or not memory:
            return seen
        seen = xp.broadcast_to(seen, (*seen.shape[:-1], self.n_k))
        return xp.concat([seen, xp.ones((*seen.shape[:-1], memory), dtype=xp.bool)], axis=-1)

    def _factors(self, units: tuple[int, int], rows: slice) -> Any:
        """Dropout factors (a, rows, columns); None without dropout."""
        if self.dropout is None:
            return None
        xp = self.backend.xp
        mask, factor = self.dropout
        b, h = self._numbers(units)
        i, j = self.positions[0][units[0] : units[1], rows, None], self.positions[1][units[0] : units[1], None, :]
        flat: Any = 0
        for x, size in ((b, mask.shape[0]), (h, mask.shape[1]), (i, mask.shape[3]), (j, mask.shape[4])):
            flat = flat * size + (x if size > 1 else xp.zeros_like(x))
        kept = xp.reshape(xp.take(xp.reshape(mask, (-1,)), xp.reshape(flat, (-1,))), flat.shape)
        memory = self._columns() - self.n_k
        if memory:  # memory is never dropped
            kept = xp.concat([kept, xp.ones((*kept.shape[:-1], memory), dtype=xp.bool)], axis=-1)
        return xp.astype(kept, self.sources[0].dtype) * factor

    # ------------------------------------------------------------ relative tables, by rank

    def _ranks(self, rows: tuple[int, int], table: Any) -> Any:
        """Rows of a table for the differences of rank - (i1 - 1) ... w - 1 - i0 that a run of queries meets."""
        xp = self.backend.xp
        n = table.shape[0] // 2
        gap = np.clip(np.arange(1 - rows[1], self.n_k - rows[0]), -n, n) + n
        return xp.asarray(gap)

    def _by_rank(self, x: Any) -> Any:
        """(a, rows, w [+ memory]) -> (a, rows, differences of rank)."""
        return places_to_rows(x[..., : self.n_k])

    def _with_memory(self, x: Any) -> Any:
        """(a, rows, w) with zeros for the memory's columns."""
        xp = self.backend.xp
        memory = self._columns() - self.n_k
        return xp.concat([x, xp.zeros((*x.shape[:-1], memory), dtype=x.dtype)], axis=-1) if memory else x

    # ------------------------------------------------------------ forward

    def _logits(self, q: Any, k: Any, rows: tuple[int, int], seen: Any) -> Any:
        """(a, rows, columns), -inf where a pair is not seen; q is scaled."""
        xp, backend = self.backend.xp, self.backend
        logits = backend.matmul(q, xp.matrix_transpose(k))
        if self.relative_keys is not None:
            table = xp.take(self.relative_keys, self._ranks(rows, self.relative_keys), axis=0)
            logits = logits + self._with_memory(rows_to_places(backend.matmul(q, xp.matrix_transpose(table))))
        return logits if seen is None else xp.where(seen, logits, xp.asarray(-math.inf, dtype=logits.dtype))

    def _product(self, weights: Any, values: Any, seen: Any, finite: bool, *, transposed: bool = False) -> Any:
        """weights (transposed) times values; where these are not finite, nothing passes what is not seen."""
        if not finite:
            return product(self.backend, weights, values, seen, transposed=transposed)
        return self.backend.matmul(self.backend.xp.matrix_transpose(weights) if transposed else weights, values)

    def forward(self, eps: float, keep: Any) -> Any:
        """Means by token (b, h, t, e): the output of every place in every cluster, over (number of places + eps)."""
        xp, backend = self.backend.xp, self.backend

        def run(task: _Task) -> Any:
            with backend.quiet():
                return self._forward_task(task, eps, keep)

        found = backend.map(run, self.tasks, work=self._work())
        shape = (self.batch, self.h, self.lengths[0], self.sources[2].shape[-1])
        return xp.reshape(xp.concat(found, axis=0), shape) if found else xp.zeros(shape, dtype=self.sources[2].dtype)

    def _forward_task(self, task: _Task, eps: float, keep: Any) -> Any:
        xp = self.backend.xp
        by_query = self._summing(task, 0)
        task.sums = by_query, by_query if self.ranked else self._summing(task, 1)
        for units in task.runs:
            k, v = self._keys(units)
            found = [self._forward_rows(units, rows, k, v) for rows in self._row_runs(units[1] - units[0])]
            task.part.append(_concat(xp, [o for o, _ in found], 1))
            task.lse.append(_concat(xp, [z for _, z in found], 1))
        alive = xp.ones(((task.n1 - task.n0) * self.c, self.n_q), dtype=real(self.sources[2]).dtype)
        if self.dead[0] is not None:
            dead = self.dead[0][task.n0 * self.c : task.n1 * self.c, :]
            alive = xp.where(dead, xp.zeros_like(alive), alive)
        count = self._to_tokens(task, 0, [alive[..., None]])
        share = 1.0 / xp.where(count > 0, count + eps, xp.ones_like(count))
        shown = count > 0
        if keep is not None:
            heads = xp.broadcast_to(keep, (self.batch, self.h, self.lengths[0]))
            heads = xp.reshape(heads, (self.batch * self.h, self.lengths[0]))[task.n0 : task.n1, :, None]
            shown = xp.logical_and(shown, heads)
        task.share = xp.where(shown, share, xp.zeros_like(share))
        return self._to_tokens(task, 0, task.part) * task.share

    def _summing(self, task: _Task, side: int) -> Any:
        """The function that adds the rows of members up by token."""
        xp, t = self.backend.xp, self.lengths[side]
        start = task.n0 * self.c, task.n1 * self.c
        index = xp.reshape(self.rows[side][start[0] : start[1], :], (-1,)) - task.n0 * t
        return self.backend.summing(index, (task.n1 - task.n0) * t, self.sources[2].dtype)

    def _to_tokens(self, task: _Task, side: int, rows: list[Any]) -> Any:
        """Rows of members, (units, w, channels) of each run, added up by token: (heads, t, channels)."""
        xp = self.backend.xp
        x = _concat(xp, rows, 0)
        added = task.sums[side](xp.reshape(x, (x.shape[0] * x.shape[1], x.shape[2])))
        return xp.reshape(added, (task.n1 - task.n0, self.lengths[side], x.shape[2]))

    def _forward_rows(self, units: tuple[int, int], rows: tuple[int, int], k: Any, v: Any) -> tuple[Any, Any]:
        xp, backend, at = self.backend.xp, self.backend, slice(*rows)
        seen = self._visible(units, at)
        p = self._logits(self._take(self.sources[0], 0, units, at), k, rows, seen)
        maximum, shift = row_maximum(p)
        p -= shift[..., None]
        p = backend.exp_into(p)
        total = xp.sum(p, axis=-1)
        empty = maximum == -math.inf
        safe = xp.where(empty, xp.ones_like(total), total)
        lse = xp.where(empty, xp.full_like(total, -math.inf), xp.log(safe) + shift)
        factors = self._factors(units, at)
        p = p if factors is None else p * factors
        o = self._product(p, v, seen, self.finite)
        if self.relative_values is not None:
            table = xp.take(self.relative_values, self._ranks(rows, self.relative_values), axis=0)
            o = o + backend.matmul(self._by_rank(p), table)
        o /= safe[..., None]
        if self.dead[0] is not None:
            o = xp.where(self.dead[0][units[0] : units[1], at, None], xp.zeros_like(o), o)
        return o, lse

    # ------------------------------------------------------------ backward

    def backward(self, d_output: Any) -> dict[str, Any]:
        """Cotangents by name; q, k and v as (b, h, t, channels), q and k as they meet in the logits."""
        xp, backend = self.backend.xp, self.backend
        d_heads = xp.reshape(d_output, (self.batch * self.h, *d_output.shape[-2:]))

        def run(task: _Task) -> dict[str, Any]:
            with backend.quiet():
                return self._backward_task(task, d_heads)

        found = backend.map(run, self.tasks, work=2 * self._work())
        if not found:
            return {}
        gradients: dict[str, Any] = {}
        for name, side in (("q", 0), ("k", 1), ("v", 1)):
            x = xp.concat([part[name] for part in found], axis=0)
            gradients[name] = xp.reshape(x, (self.batch, self.h, self.lengths[side], x.shape[-1]))
        for name in ("scale", "relative_keys", "relative_values"):
            if name in found[0]:
                gradients[name] = sum(part[name] for part in found)
        if self.memory is not None:
            for name in ("memory_keys", "memory_values"):
                x = xp.concat([part[name] for part in found], axis=0)
                gradients[name] = xp.sum(xp.reshape(x, (self.batch, self.h, self.c, *x.shape[1:])), axis=0)
        return gradients

    def _backward_task(self, task: _Task, d_output: Any) -> dict[str, Any]:
        xp = self.backend.xp
        d_tokens = d_output[task.n0 : task.n1, ...] * task.share
        d_flat = xp.reshape(d_tokens, (d_tokens.shape[0] * d_tokens.shape[1], d_tokens.shape[2]))
        finite = self.finite and _finite(d_flat)
        first = task.n0 * self.lengths[0]
        d_q: list[Any] = []
        d_k: list[Any] = []
        d_v: list[Any] = []
        sums: dict[str, Any] = {}
        for units, part, lse in zip(task.runs, task.part, task.lse, strict=True):
            k, v = self._keys(units)
            rows_q: list[Any] = []
            rows_k: Any = 0.0
            rows_v: Any = 0.0
            for rows in self._row_runs(units[1] - units[0]):
                d_o = self._take(d_flat, 0, units, slice(*rows), first)
                at = (slice(None), slice(*rows))
                found = self._backward_rows(units, rows, k, v, part[(*at, ...)], lse[at], d_o, finite)
                rows_q.append(found[0])
                rows_k, rows_v = rows_k + found[1], rows_v + found[2]
                sums = {n: x + sums.get(n, 0.0) for n, x in found[3].items()}
            d_q.append(_concat(xp, rows_q, 1))
            d_k.append(rows_k)
            d_v.append(rows_v)
        if self.memory is not None:
            sums["memory_keys"] = _concat(xp, [x[:, self.n_k :, :] for x in d_k], 0)
            sums["memory_values"] = _concat(xp, [x[:, self.n_k :, :] for x in d_v], 0)
            d_k, d_v = [x[:, : self.n_k, :] for x in d_k], [x[:, : self.n_k, :] for x in d_v]
        by_token = self._to_tokens(task, 0, d_q)  # still without scale
        if self.d_scale:
            own = xp.reshape(self.q[first : first + d_flat.shape[0], :], by_token.shape)
            sums["scale"] = xp.sum(xp.where(by_token == 0, xp.zeros_like(by_token), by_token * own))
        return {
            "q": by_token * self.scale,
            "k": self._to_tokens(task, 1, d_k),
            "v": self._to_tokens(task, 1, d_v),
            **sums,
        }

    def _backward_rows(
        self,
        units: tuple[int, int],
        rows: tuple[int, int],
        k: Any,
        v: Any,
        part: Any,
        lse: Any,
        d_o: Any,
        finite: bool,
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        xp, backend, at = self.backend.xp, self.backend, slice(*rows)
        seen = self._visible(units, at)
        q = self._take(self.sources[0], 0, units, at)
        weights = self._logits(q, k, rows, seen)
        weights -= xp.where(real(lse) == -math.inf, xp.zeros_like(lse), lse)[..., None]
        weights = backend.exp_into(weights)
        factors = self._factors(units, at)
        kept = weights if factors is None else weights * factors
        d_v = self._product(kept, d_o, seen, finite, transposed=True)
        d_logits = backend.matmul(d_o, xp.matrix_transpose(v))  # dP
        own = {}
        if self.relative_values is not None:
            gap = self._ranks(rows, self.relative_values)
            by_rank = backend.matmul(d_o, xp.matrix_transpose(xp.take(self.relative_values, gap, axis=0)))
            d_logits = d_logits + self._with_memory(rows_to_places(by_rank))
            shares = einsum("arp,are->pe", self._by_rank(kept), d_o)
            own["relative_values"] = backend.segment_add(shares, gap, self.relative_values.shape[0])
        if factors is not None:
            d_logits = d_logits * factors
        d_logits -= xp.sum(d_o * part, axis=-1, keepdims=True)  # dP - Delta
        d_logits *= weights
        if seen is not None and not finite:
            d_logits = xp.where(seen, d_logits, xp.zeros_like(d_logits))
        d_q = self._product(d_logits, k, seen, finite)
        d_k = self._product(d_logits, q, seen, finite, transposed=True)
        if self.relative_keys is not None:
            gap = self._ranks(rows, self.relative_keys)
            by_rank = self._by_rank(d_logits)
            d_q = d_q + backend.matmul(by_rank, xp.take(self.relative_keys, gap, axis=0))
            shares = einsum("arp,ard->pd", by_rank, q)
            own["relative_keys"] = backend.segment_add(shares, gap, self.relative_keys.shape[0])
        return d_q, d_k, d_v, own


def _finite(x: Any) -> bool:
    """Whether no entry is NaN or infinite (a sum that overflows says no as well): one pass, no array."""
    xp = namespace(x)
    return bool(xp.isfinite(xp.sum(x)))


def _concat(xp: Any, parts: list[Any], axis: int) -> Any:
    return parts[0] if len(parts) == 1 else xp.concat(parts, axis=axis)
