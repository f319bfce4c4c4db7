"""ETC attention for the core: labels as a term of the logits, what the rows of the two sequences see, its tables."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn.arrays import is_array, is_bool, is_integer, namespace, require_integer, sum_to_shape, to_numpy
from refattn.core import options
from refattn.core.selections import Index
from refattn.core.terms import Term
from refattn.patterns import Pattern, dense, prefix
from refattn.patterns import window as window_pattern

__all__ = [
    "Labels",
    "long_rows",
    "read_clip",
    "read_counts",
    "read_table",
    "seen_by_global",
    "seen_by_long",
    "table_rows",
]


class Labels(Term):
    """logits + values[i, row(i,j)]; values (b|1, h, 1, q, p) are in the logits' scale, ``rows(view)`` gives ints, -1 = none.

    Blocks are slices of queries and keys.
    """

    names = ("labels",)

    def __init__(self, values: Any, rows: Callable[[Any], Any]) -> None:
        self.values, self.rows = values, rows

    def start(self, view: Any) -> dict[str, Any]:
        own = view.part(self.values)
        return {"labels": namespace(own).zeros_like(own)}

    def whole(self) -> dict[str, Any]:
        return {"labels": namespace(self.values).zeros_like(self.values)}

    def place(self, name: str, total: Any, part: Any, view: Any) -> Any:
        return view.backend.accumulate(total, (*view.slices(self.values), ...), part)

    def _entries(self, view: Any) -> tuple[Any, Any]:
        """Where a pair has a label (b|1, 1, 1, a, c), and its place among the block's a * p values (b|1, 1, 1, 1, a * c)."""
        xp, p = view.xp, self.values.shape[-1]
        rows = self.rows(view)
        a, c = rows.shape[-2:]
        flat = xp.where(rows < 0, xp.zeros_like(rows), rows) + xp.arange(a, dtype=rows.dtype)[:, None] * p
        return rows >= 0, xp.reshape(flat, (rows.shape[0], 1, 1, 1, a * c))

    def apply(self, logits: Any, view: Any) -> tuple[Any, Any]:
        xp = view.xp
        labelled, flat = self._entries(view)
        values = view.queries.take(view.part(self.values))  # (b, h, 1, a, p)
        values = xp.reshape(values, (*values.shape[:3], values.shape[-2] * values.shape[-1], 1))
        taken = xp.reshape(Index(flat).take(values), (*values.shape[:3], *labelled.shape[-2:]))
        return logits + xp.where(labelled, taken, xp.zeros_like(taken)), None

    def pull(self, d_logits: Any, kept: Any, view: Any, sums: dict[str, Any]) -> Any:
        xp, p = view.xp, self.values.shape[-1]
        labelled, flat = self._entries(view)
        share = xp.where(labelled, d_logits, xp.zeros_like(d_logits))
        a, c = share.shape[-2:]
        share = xp.reshape(share, (*share.shape[:3], a * c, 1))
        placed = view.backend.segment_add(share, flat[..., 0, :], a * p)
        placed = xp.reshape(placed, (*placed.shape[:3], a, p))
        placed = sum_to_shape(placed, (sums["labels"].shape[0], *placed.shape[1:]))
        sums["labels"] = view.queries.accumulate(view.backend, sums["labels"], placed)
        return d_logits


def long_rows(n: int, clip: int, table: Any) -> Callable[[Any], Any]:
    """Labels of long queries; ``table`` (b|1, t, n) ints in the library of the arrays, or None."""

    def rows(view: Any) -> Any:
        xp = view.xp
        (i0, i1), (j0, j1) = view.queries.extent, view.keys.extent
        parts = []
        if j0 < n:
            stop = min(j1, n)
            if table is None:
                parts.append(xp.full((1, i1 - i0, stop - j0), -1, dtype=xp.int64))
            else:
                parts.append(table[view.group.b if table.shape[0] > 1 else slice(None), i0:i1, j0:stop])
        if j1 > n:
            first = max(j0, n) - n
            distance = xp.arange(first, j1 - n)[None, None, :] - xp.arange(i0, i1)[None, :, None]
            parts.append(xp.astype(xp.clip(distance, -clip, clip) + clip, xp.int64))
        lead = max(x.shape[0] for x in parts)
        whole = xp.concat([xp.broadcast_to(x, (lead, *x.shape[1:])) for x in parts], axis=-1)
        return whole[:, None, None, ...]

    return rows


def table_rows(table: Any) -> Callable[[Any], Any]:
    """Labels of global queries: those of the table (b|1, n, n + t)."""

    def rows(view: Any) -> Any:
        (i0, i1), (j0, j1) = view.queries.extent, view.keys.extent
        own = view.group.b if table.shape[0] > 1 else slice(None)
        return table[own, i0:i1, j0:j1][:, None, None, ...]

    return rows


def seen_by_long(n: int, t: int, radius: int, counts: Any, long_mask: Any, lead: tuple[int, ...]) -> Pattern:
    """Global keys (those of the mask), and long ones within the radius."""
    first = prefix(n if counts is None else counts.reshape(lead))
    near = window_pattern(radius, radius, align=n) & ~prefix(n)
    if long_mask is None:
        return first | near
    return (first & _Among(long_mask)) | near


class _Among(Pattern):
    """A mask over the first keys alone; bool (b|1, q, n)."""

    def __init__(self, mask: np.ndarray) -> None:
        super().__init__("among", mask)
        self._mask, self.batch = mask, mask.shape[0]
        self._flat = np.ascontiguousarray(mask).reshape(-1)

    def _fit_batch(self, batch: tuple[int, ...]) -> Pattern:
        return self

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        n = self._mask.shape[-1]
        entry = 0 if self.batch == 1 else self._need(b, "b")
        return self._lookup(xp, "_flat", (entry * self._mask.shape[1] + i) * n + xp.where(j < n, j, n - 1)) & (j < n)

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Any, h: Any) -> tuple[int, int]:
        return 0, self._mask.shape[-1]

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Any, h: Any) -> str:
        return "empty" if j0 >= self._mask.shape[-1] else "partial"


def seen_by_global(n: int, t: int, counts: Any, mask: Any) -> Pattern | None:
    """What a global row sees of [global, long] beside the lengths of the long keys; (b, n, n + t) is linear in t."""
    if counts is None and mask is None:
        return None
    seen = np.ones((1, n, n + t), dtype=bool) if mask is None else mask
    if counts is not None:
        j = np.arange(n + t)
        seen = seen & ((j >= n) | (j < counts[:, None]))[:, None, :]
    return dense(seen[:, None])


# ------------------------------------------------------------------------------------------------ arguments


def read_table(name: str, value: Any, shape: tuple[int, ...], lead: tuple[int, ...], labels: int | None) -> Any:
    """A mask (``labels`` None) or label numbers (..., i, j) on the host, leading axes joined: (b, i, j), b = 1 if shared."""
    kind = "a bool array, True = may attend" if labels is None else "an int array of labels, -1 = none"
    fits = is_array(value) and (is_bool(value.dtype) if labels is None else is_integer(value.dtype))
    if not fits:
        what = f"has dtype {value.dtype}" if is_array(value) else f"is a {type(value).__name__}"
        raise TypeError(f"{name} {what}: expected {kind}")
    host = to_numpy(value)
    if host.shape[-2:] != shape:
        raise ValueError(f"{name} has shape {host.shape}: expected (..., {shape[0]}, {shape[1]})")
    if labels is not None and host.size and (host.min() < -1 or host.max() >= labels):
        wrong = host[(host < -1) | (host >= labels)][0]
        raise ValueError(f"{name} contains {wrong}: expected labels 0 ... {labels - 1}, or -1 for none")
    own = lead if math.prod(host.shape[:-2]) != 1 else (1,) * len(lead)
    host = np.broadcast_to(host.reshape(host.shape[-2:]) if own != lead else host, (*own, *shape))
    return host.reshape(math.prod(own), *shape)


def read_counts(name: str, value: Any, most: int, lead: tuple[int, ...]) -> np.ndarray | None:
    if value is None:
        return None
    counts = np.broadcast_to(options.per_batch(name, value, lead), (math.prod(lead),))
    if counts.size and (counts.min() < 0 or counts.max() > most):
        raise ValueError(f"{name} is {counts.tolist()}: expected between 0 and {most}")
    return counts


def read_clip(clip: Any, labels: Any) -> int:
    """The largest distance with a label of its own."""
    if labels is None:
        return 0
    p = labels.shape[-2]
    if clip is None:
        if p % 2 == 0:
            raise ValueError(f"labels has {p} rows: expected clip, since 2 clip + 1 of them are for distances")
        return p // 2
    clip = require_integer("clip", clip, minimum=0)
    if 2 * clip + 1 > p:
        raise ValueError(f"clip is {clip}, so that distances have {2 * clip + 1} labels: labels has {p} rows")
    return clip
