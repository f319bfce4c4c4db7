"""What is done to a logit, as terms: each changes the logits of a block and takes its share of the cotangent back.

``view`` is the block as the core sees it (``refattn.core.blocks.View``).  Logits may be overwritten.  Each group of heads has
accumulators of its own, which the core adds up in a fixed order.  A term that also uses the queries leaves its share of
their cotangent in ``view.d_q``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from refattn.arrays import device, is_complex, namespace, real, sum_to_shape, to_namespace
from refattn.contraction import einsum
from refattn.core.blocks import product
from refattn.core.selections import take_pairs

__all__ = [
    "Alibi",
    "Among",
    "Bias",
    "Relative",
    "Repeats",
    "ScoreMod",
    "SoftCap",
    "Term",
    "add_pairs",
    "places_to_rows",
    "rows_to_places",
]

INFINITY = float("inf")


class Term:
    """What the core asks of a term.  ``names`` are its differentiable parameters."""

    names: tuple[str, ...] = ()

    def start(self, view: Any) -> dict[str, Any]:
        """Empty accumulators of one group."""
        return {}

    def whole(self) -> dict[str, Any]:
        """Empty gradients of the whole problem."""
        return {}

    def place(self, name: str, total: Any, part: Any, view: Any) -> Any:
        """The whole gradient with the share of one group added."""
        return total + part

    def apply(self, logits: Any, view: Any) -> tuple[Any, Any]:
        """Changed logits, and what ``pull`` needs (only when ``view.gradient``)."""
        raise NotImplementedError(type(self).__name__)

    def pull(self, d_logits: Any, kept: Any, view: Any, sums: dict[str, Any]) -> Any:
        """Cotangent of the logits before the term; shares of the parameters go into ``sums``."""
        raise NotImplementedError(type(self).__name__)


class Among(Term):
    """A term that knows the first ``count`` keys alone; a block of other keys passes it unchanged."""

    def __init__(self, term: Term, count: int) -> None:
        self.term, self.count, self.names = term, count, term.names

    def start(self, view: Any) -> dict[str, Any]:
        return self.term.start(view)

    def whole(self) -> dict[str, Any]:
        return self.term.whole()

    def place(self, name: str, total: Any, part: Any, view: Any) -> Any:
        return self.term.place(name, total, part, view)

    def apply(self, logits: Any, view: Any) -> tuple[Any, Any]:
        return self.term.apply(logits, view) if view.keys.extent[0] < self.count else (logits, None)

    def pull(self, d_logits: Any, kept: Any, view: Any, sums: dict[str, Any]) -> Any:
        return self.term.pull(d_logits, kept, view, sums) if view.keys.extent[0] < self.count else d_logits


class Bias(Term):
    """logits + bias; bias (b|1, g|1, r|1, q|1, k|1).  -inf hides the pair."""

    def __init__(self, bias: Any, name: str = "bias") -> None:
        self.bias, self.name, self.names = bias, name, (name,)
        self.hides = bool(namespace(bias).any(real(bias) == -INFINITY))

    def start(self, view: Any) -> dict[str, Any]:
        bias = view.part(self.bias)
        return {self.name: namespace(bias).zeros_like(bias)}

    def whole(self) -> dict[str, Any]:
        return {self.name: namespace(self.bias).zeros_like(self.bias)}

    def place(self, name: str, total: Any, part: Any, view: Any) -> Any:
        return view.backend.accumulate(total, (*view.slices(self.bias), ...), part)

    def apply(self, logits: Any, view: Any) -> tuple[Any, Any]:
        entries = take_pairs(view.part(self.bias), view.queries, view.keys)
        if self.hides:
            xp = namespace(entries)
            hidden = real(entries) == -INFINITY
            view.hide(hidden)
            entries = xp.where(hidden, xp.zeros_like(entries), entries)
        return logits + entries, None

    def pull(self, d_logits: Any, kept: Any, view: Any, sums: dict[str, Any]) -> Any:
        sums[self.name] = add_pairs(sums[self.name], d_logits, view)
        return d_logits


class Repeats(Term):
    """logits + ln of how often a pair counts, (b|1, g|1, r|1, q|1, k|1)."""

    def __init__(self, logs: Any) -> None:
        self.logs = logs

    def apply(self, logits: Any, view: Any) -> tuple[Any, Any]:
        return logits + take_pairs(view.part(self.logs), view.queries, view.keys), None

    def pull(self, d_logits: Any, kept: Any, view: Any, sums: dict[str, Any]) -> Any:
        return d_logits


class _PerHead(Term):
    """Shared by terms whose parameter ``value`` is one number, or one per query head (g, r)."""

    value: Any

    def start(self, view: Any) -> dict[str, Any]:
        return {self.names[0]: 0.0}

    def whole(self) -> dict[str, Any]:
        return {self.names[0]: namespace(self.value).zeros_like(self.value)}

    def place(self, name: str, total: Any, part: Any, view: Any) -> Any:
        return total + part if total.ndim == 0 else view.backend.accumulate(total, (view.group.g, slice(None)), part)


class SoftCap(_PerHead):
    """cap * tanh(logits / cap)."""

    names = ("softcap",)

    def __init__(self, cap: Any) -> None:
        self.value = cap

    def apply(self, logits: Any, view: Any) -> tuple[Any, Any]:
        ratio = logits / self.value
        bent = view.backend.tanh_into(ratio + 0 if view.gradient else ratio)
        return self.value * bent, (ratio, bent) if view.gradient else None

    def pull(self, d_logits: Any, kept: Any, view: Any, sums: dict[str, Any]) -> Any:
        ratio, bent = kept
        slope = 1 - bent * bent
        sums["softcap"] = sums["softcap"] + namespace(bent).sum(view.seen(d_logits * (bent - ratio * slope)))
        return view.seen(d_logits * slope)


class Alibi(_PerHead):
    """logits - slope * |i + offset - j|; slopes (g, r), offset (b,) ints."""

    names = ("alibi_slopes",)

    def __init__(self, slopes: Any, offset: Any) -> None:
        self.value, self.offset = slopes, offset

    def _distance(self, logits: Any, view: Any) -> Any:
        xp = namespace(logits)
        i, j = view.positions()
        gap = view.per_batch(self.offset, 1 + i.ndim) + i - j
        return xp.astype(xp.abs(gap), real(logits).dtype)

    def apply(self, logits: Any, view: Any) -> tuple[Any, Any]:
        distance = self._distance(logits, view)
        return logits - view.per_head(self.value) * distance, distance if view.gradient else None

    def pull(self, d_logits: Any, kept: Any, view: Any, sums: dict[str, Any]) -> Any:
        xp = namespace(d_logits)
        share = xp.sum(d_logits * kept, axis=(0, *range(3, d_logits.ndim)))
        sums["alibi_slopes"] = sums["alibi_slopes"] - share
        return d_logits


class ScoreMod(Term):
    """A user's element-wise function (logits, b, h, i, j) -> logits; its slope by ``.derivative`` or complex step."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def apply(self, logits: Any, view: Any) -> tuple[Any, Any]:
        xp = namespace(logits)
        b, h = view.numbers()
        i, j = view.positions()
        changed = self.function(logits + 0, b, h, i, j)
        shape = tuple(getattr(changed, "shape", ("a", type(changed).__name__)))
        if len(shape) > logits.ndim or any(
            m not in (1, n) for m, n in zip(shape[::-1], logits.shape[::-1], strict=False)
        ):
            raise ValueError(
                f"score_mod returned {shape} for logits of shape {tuple(logits.shape)}: expected that shape"
            )
        slope = self._slope(logits, (b, h, i, j)) if view.gradient else None
        changed = xp.broadcast_to(changed, logits.shape) + 0  # the core goes on in place
        if changed.dtype != logits.dtype:
            changed = xp.astype(changed, logits.dtype)
        hidden = real(changed) == -INFINITY
        if bool(xp.any(hidden)):
            view.hide(hidden)
            changed = xp.where(hidden, xp.zeros_like(changed), changed)
            slope = None if slope is None else xp.where(hidden, xp.zeros_like(slope), slope)
        return changed, slope

    def _slope(self, logits: Any, where: tuple[Any, ...]) -> Any:
        xp = namespace(logits)
        derivative = getattr(self.function, "derivative", None)
        if derivative is not None:
            return xp.broadcast_to(xp.asarray(derivative(logits, *where)), logits.shape)
        if is_complex(logits.dtype):
            raise ValueError(
                "score_mod under a complex compute_dtype needs a .derivative: complex step is in use already"
            )
        single = real(logits).dtype == xp.float32
        step = 1e-20 if single else 1e-200
        moved = self.function(xp.astype(logits, xp.complex64 if single else xp.complex128) + 1j * step, *where)
        if not is_complex(moved.dtype):
            raise ValueError(
                f"score_mod returned {moved.dtype} for complex logits, so it has no complex-step derivative:"
                " give it a .derivative attribute of the same arguments"
            )
        return xp.astype(xp.broadcast_to(xp.imag(moved) / step, logits.shape), logits.dtype)

    def pull(self, d_logits: Any, kept: Any, view: Any, sums: dict[str, Any]) -> Any:
        return view.seen(d_logits * kept)


class Relative(Term):
    """logits + scale (query_i . table[row] + bias[row]), row = origin + place_j - i: Transformer-XL's relative positions.

    ``query`` (b,g,1,q,d) is not scaled; ``table`` (b|1,g,p,d) and ``bias`` (g,p) may be None; ``places`` (k,) are host
    ints in rising order, None for 0 ... k - 1.  A row beyond the table counts as 0.  One product of the block's queries
    with the rows it needs, shifted by pad and reshape: blocks are slices.  The sums of query and bias are without scale.
    """

    def __init__(self, query: Any, table: Any, bias: Any, origin: int, places: Any = None) -> None:
        self.query, self.table, self.bias, self.origin, self.places = query, table, bias, origin, places
        self.rows = table.shape[-2] if table is not None else bias.shape[-1]
        self.names = ("relative_query", "relative_table") * (table is not None) + ("relative_bias",) * (
            bias is not None
        )
        xp = namespace(query)
        self.finite = table is None or bool(xp.all(xp.isfinite(table)) and xp.all(xp.isfinite(query)))

    def start(self, view: Any) -> dict[str, Any]:
        sums, (start, stop) = {}, view.group.q
        xp = namespace(self.query)
        if self.table is not None:
            query = view.part(self.query)
            shape = (*query.shape[:3], stop - start, query.shape[-1])
            sums["relative_query"] = xp.zeros(shape, dtype=query.dtype, device=device(query))
            sums["relative_table"] = xp.zeros_like(view.part(self.table))
        if self.bias is not None:
            sums["relative_bias"] = xp.zeros_like(self.bias[view.group.g, :])
        return sums

    def whole(self) -> dict[str, Any]:
        arrays = {"relative_query": self.query, "relative_table": self.table, "relative_bias": self.bias}
        return {name: namespace(arrays[name]).zeros_like(arrays[name]) for name in self.names}

    def place(self, name: str, total: Any, part: Any, view: Any) -> Any:
        if name == "relative_bias":
            return view.backend.accumulate(total, (view.group.g, slice(None)), part)
        rows = slice(*view.group.q) if name == "relative_query" else slice(None)
        between = (slice(None),) if name == "relative_query" else ()
        return view.backend.accumulate(total, (*view.slices(total), *between, rows, slice(None)), part)

    def _block(self, view: Any) -> tuple[Any, Any, slice, int, Any]:
        """Queries, table rows of the block, their slice, the rows missing at its end, the key columns among the places."""
        queries, keys = view.queries, view.keys
        if queries.batched or keys.batched:
            raise ValueError("relative positions are computed on slices of queries and keys, not on gathered blocks")
        columns = None
        first, last = keys.start, keys.stop
        if self.places is not None:
            columns = self.places[first:last] - self.places[first]
            first, last = int(self.places[first]), int(self.places[last - 1]) + 1
            columns = None if columns.shape[0] == last - first else columns
        begin, end = first + self.origin - queries.stop + 1, last + self.origin - queries.start
        rows = slice(min(begin, self.rows), min(end, self.rows))
        table = None if self.table is None else view.part(self.table)[:, :, None, rows, :]
        return queries.take(view.part(self.query)), table, rows, end - begin - (rows.stop - rows.start), columns

    def apply(self, logits: Any, view: Any) -> tuple[Any, Any]:
        xp = namespace(logits)
        query, table, rows, missing, columns = self._block(view)
        scores: Any = 0.0
        if table is not None:
            scores = einsum("...qd,...pd->...qp", query * view.problem.scale, table)
        if self.bias is not None:
            scores = scores + view.problem.scale * self.bias[None, view.group.g, None, None, rows]
            scores = xp.broadcast_to(scores, (*query.shape[:-1], rows.stop - rows.start))
        if missing:
            scores = xp.concat([scores, _zeros(scores, *scores.shape[:-1], missing)], axis=-1)
        by_place = rows_to_places(scores)
        if columns is not None:
            by_place = xp.take(by_place, to_namespace(columns, xp, like=logits), axis=-1)
        return logits + by_place, None

    def pull(self, d_logits: Any, kept: Any, view: Any, sums: dict[str, Any]) -> Any:
        xp, backend = namespace(d_logits), view.backend
        query, table, rows, missing, columns = self._block(view)

        def by_row(x: Any) -> Any:
            if columns is not None:  # places without a key get zeros
                inverse = np.full(int(columns[-1]) + 1, columns.shape[0])
                inverse[columns] = np.arange(columns.shape[0])
                x = xp.concat([x, _zeros(x, *x.shape[:-1], 1)], axis=-1)
                x = xp.take(x, to_namespace(inverse, xp, like=x), axis=-1)
            x = places_to_rows(x)
            return x[..., : x.shape[-1] - missing] if missing else x

        d_scores = by_row(d_logits)
        if self.bias is not None:
            share = xp.sum(d_scores, axis=(0, 2, 3))
            sums["relative_bias"] = backend.accumulate(sums["relative_bias"], (slice(None), rows), share)
        if table is not None:
            seen = None
            if not self.finite:
                seen = xp.ones(d_logits.shape, dtype=xp.bool) if view.visible is None else view.visible
                seen = by_row(xp.broadcast_to(seen, d_logits.shape))
            at = (..., slice(view.queries.start - view.group.q[0], view.queries.stop - view.group.q[0]), slice(None))
            d_query = product(view.backend, d_scores, table, seen)
            sums["relative_query"] = backend.accumulate(sums["relative_query"], at, d_query)
            d_table = product(view.backend, d_scores, query * view.problem.scale, seen, transposed=True)[:, :, 0, ...]
            d_table = sum_to_shape(d_table, (sums["relative_table"].shape[0], *d_table.shape[1:]))
            sums["relative_table"] = backend.accumulate(sums["relative_table"], (..., rows, slice(None)), d_table)
        return d_logits


def rows_to_places(x: Any) -> Any:
    """(..., a, n) -> (..., a, n - a + 1): output[i, j] = x[i, j + a - 1 - i]."""
    xp = namespace(x)
    *lead, a, n = x.shape
    if a == 1:
        return x
    line = xp.reshape(x, (*lead, a * n))[..., a - 1 : a * n - 1]  # place (i, j) stands at i (n - 1) + j
    return xp.reshape(line, (*lead, a, n - 1))[..., : n - a + 1]


def places_to_rows(x: Any) -> Any:
    """The adjoint of rows_to_places: (..., a, c) -> (..., a, a + c - 1)."""
    xp = namespace(x)
    *lead, a, c = x.shape
    if a == 1:
        return x
    n = a + c - 1
    rows = xp.reshape(xp.concat([x, _zeros(x, *lead, a, a - 2)], axis=-1), (*lead, a * (n - 1)))
    line = xp.concat([_zeros(x, *lead, a - 1), rows, _zeros(x, *lead, 1)], axis=-1)
    return xp.reshape(line, (*lead, a, n))


def _zeros(like: Any, *shape: int) -> Any:
    return namespace(like).zeros(shape, dtype=like.dtype, device=device(like))


def add_pairs(total: Any, d_logits: Any, view: Any) -> Any:
    """total (b|1, g|1, r|1, q|1, k|1) of one group with the cotangents of a block added, broadcast axes summed."""
    xp = namespace(total)
    queries, keys, backend = view.queries, view.keys, view.backend
    n_q, n_k = total.shape[-2:]
    lead = tuple(1 if total.shape[n] == 1 else d_logits.shape[n] for n in range(3))
    if not queries.batched and not keys.batched:
        target = (*lead, 1 if n_q == 1 else d_logits.shape[-2], 1 if n_k == 1 else d_logits.shape[-1])
        rows = slice(None) if n_q == 1 else slice(queries.start, queries.stop)
        columns = slice(None) if n_k == 1 else slice(keys.start, keys.stop)
        return backend.accumulate(total, (..., rows, columns), sum_to_shape(d_logits, target))
    shape = d_logits.shape  # (b, g, r, n, a, c)
    summed = sum_to_shape(d_logits, (*lead, *shape[3:]))
    if n_q == 1 and n_k == 1:
        return total + xp.sum(summed, axis=(-3, -2, -1))[..., None, None]
    i = xp.expand_dims(queries.positions(xp), axis=-1) if n_q > 1 else xp.zeros((1, 1, 1), dtype=xp.int64)
    j = xp.expand_dims(keys.positions(xp), axis=-2) if n_k > 1 else xp.zeros((1, 1, 1), dtype=xp.int64)
    flat = i * n_k + j
    if flat.ndim > 3 and any(a != 1 and b == 1 for a, b in zip(flat.shape[:3], lead, strict=True)):
        summed, lead = (
            d_logits,
            tuple(shape[:3]),
        )  # lists differ along an axis the bias is shared over: sum after placing
    flat = xp.broadcast_to(flat, (*(lead if flat.ndim > 3 else ()), *shape[3:]))
    entries = shape[3] * shape[4] * shape[5]
    placed = backend.segment_add(
        xp.reshape(summed, (*lead, entries, 1)), xp.reshape(flat, (*flat.shape[:-3], entries)), n_q * n_k
    )
    return total + sum_to_shape(xp.reshape(placed, (*lead, n_q, n_k)), tuple(total.shape))
