"""How many pairs a pattern sees, from few of its rows.

The number of keys of a row is a count between two ends, each of which stands at a key or moves along the diagonal with the
row.  It is linear in the row (over steps of the period, for patterns that repeat) between the rows where ends meet, so that
the sum over all rows follows from the first and the last row of each such run.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["CHUNK", "Ends", "all_rows", "runs", "twice_the_sum"]

CHUNK = 1 << 18
"""Pairs or rows looked at in one piece."""


@dataclasses.dataclass(frozen=True)
class Ends:
    """Where the runs of keys of a pattern end.

    Attributes
    ----------
    moving : frozenset of int
        Distances c of the ends i + c of row i.
    standing : frozenset of int
        Keys where runs end in any row.
    rows : frozenset of int
        Rows where something else changes.
    period : int
        The pattern repeats, moved along the diagonal, after so many rows.
    """

    moving: frozenset[int] = frozenset()
    standing: frozenset[int] = frozenset()
    rows: frozenset[int] = frozenset()
    period: int = 1

    @staticmethod
    def joined(parts: Iterable["Ends | None"]) -> "Ends | None":
        """Those of a combination; None where one part does not know its own."""
        moving: set[int] = set()
        standing: set[int] = set()
        rows: set[int] = set()
        period = 1
        for part in parts:
            if part is None:
                return None
            moving |= part.moving
            standing |= part.standing
            rows |= part.rows
            period = math.lcm(period, part.period)
        return Ends(frozenset(moving), frozenset(standing), frozenset(rows), period)


def all_rows(q: int, step: int) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Every row once, in pieces, with weight 2 (as :func:`runs`)."""
    for i0 in range(0, q, step):
        i = np.arange(i0, min(i0 + step, q))
        yield i, np.full(len(i), 2)


def runs(ends: Ends | None, q: int, k: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Rows and weights with sum over all rows of f = sum(weights * f(rows)) / 2; None where that is no saving."""
    if ends is None or ends.period >= q:
        return None
    standing = {0, k, *ends.standing}
    if 8 * len(ends.moving) * len(standing) > q:
        return None
    meet = {s - c for s in standing for c in ends.moving} | ends.rows
    p = ends.period
    cuts = np.unique([0, q, *(x for m in meet for x in (m - p, m, m + 1, m + p + 1) if 0 < x < q)])
    lengths = np.diff(cuts)
    if 2 * int(np.minimum(lengths, p).sum()) > q:
        return None
    residue = np.arange(p)
    many = (lengths[:, None] - residue - 1) // p + 1  # rows of this residue in the run
    there = many > 0
    first = (cuts[:-1, None] + residue)[there]
    weights = many[there]
    return np.concatenate([first, first + (weights - 1) * p]), np.concatenate([weights, weights])


def twice_the_sum(counts: np.ndarray, weights: np.ndarray, most: int | None, *, in_runs: bool) -> Any:
    """Twice the sum over the rows of :func:`all_rows` or :func:`runs`, each cut to ``most``."""
    if most is None:
        return np.sum(counts * weights, axis=-1)
    if not in_runs:
        return np.sum(np.minimum(counts, most) * weights, axis=-1)
    first, last = np.split(counts, 2, axis=-1)  # of a run, along which counts rise or fall evenly
    rows = weights[: weights.size // 2]
    low, high = np.minimum(first, last), np.maximum(first, last)
    step = (high - low) // np.maximum(rows - 1, 1)
    under = np.where(step > 0, (most - low) // np.maximum(step, 1) + 1, np.where(low <= most, rows, 0))
    under = np.clip(under, 0, rows)  # rows that are not cut
    return np.sum(under * (2 * low + step * (under - 1)) + 2 * (rows - under) * most, axis=-1)
