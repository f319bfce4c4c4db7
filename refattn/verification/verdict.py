"""Errors, bounds and the verdict: how far a candidate's arrays are from the truth, in units of what rounding explains.

The truth is the mechanism in float64 on the candidate's own rounded inputs.  An element's error is divided by its bound,
and an array passes when both statistics stay within the thresholds of its dtype: the *maximum* over elements (nothing
stands out) and the *median* (nothing is off everywhere).

Bounds
------
``derived``
    Where the call is one softmax over scale q.k: root sums of squares of the rounding errors of every step, see
    :mod:`refattn.precision.softmax`.  The worst case is reported beside them: beyond it no rounding explains the error.
    It is never a permission.
``injected``
    Everything else: the mechanism under random rounding errors, see :mod:`refattn.verification.bounds.injected`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from refattn import arrays, precision
from refattn.verification.locate import locate
from refattn.verification.question import float64
from refattn.verification.truth import ReferenceNaNError, Truth

__all__ = ["THRESHOLDS", "Judgement", "counted", "judge", "passes", "ratio", "statistics"]

THRESHOLDS: dict[str, dict[str, tuple[float, float]]] = {
    dtype: {"derived": (4.0, 0.75), "injected": (6.0, 0.75)} for dtype in ("float64", "float32", "float16", "bfloat16")
}
"""Largest maximum and median of error/bound that pass, per dtype and kind of bound.

``make calibrate`` measures what right kernels need of them.
"""

FEW = 32
"""Below so many elements the median says no more than the maximum: only the maximum decides."""


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Verdict on one array."""

    array: str
    verdict: str  # "ok" | "mismatch" | "not provided" | "not checked"
    maximum: float = 0.0
    median: float = 0.0
    bound: str = ""
    certain: bool = False
    says: str = ""
    where: dict[str, Any] = dataclasses.field(default_factory=dict)
    limits: tuple[float, float] = (math.inf, math.inf)  # of maximum and median

    @property
    def ok(self) -> bool:
        return self.verdict != "mismatch"


def ratio(got: np.ndarray, truth: np.ndarray, bound: np.ndarray, *, leak: bool = False) -> np.ndarray:
    """|got - truth| / bound per element; infinite where NaN or infinity stands in one and not, or otherwise, in the other.

    ``leak=True`` lets a NaN of ``got`` stand anywhere.
    """
    got, truth = float64(got), float64(truth)
    with np.errstate(all="ignore"):
        units = np.abs(got - truth) / bound
    same = (got == truth) | (np.isnan(got) & np.isnan(truth))
    units = np.where(np.isfinite(got) & np.isfinite(truth), units, np.inf)
    units = np.where(same, 0.0, units)
    return np.where(np.isnan(got), 0.0, units) if leak else units


def counted(right: np.ndarray) -> np.ndarray:
    """Elements that the median is about: zeros that are due (padding, empty rows) are no evidence."""
    return np.isfinite(right) & (right != 0)


def statistics(units: np.ndarray, inside: np.ndarray | None = None) -> tuple[float, float, int]:
    """Maximum of error/bound, its median over the elements ``inside`` that count, and how many these are."""
    if not units.size:
        return 0.0, 0.0, 0
    chosen = units[inside | (units > 0)] if inside is not None else units
    return float(units.max()), float(np.median(chosen)) if chosen.size else 0.0, chosen.size


def passes(maximum: float, median: float, count: int, limits: tuple[float, float]) -> bool:
    return maximum <= limits[0] and (count < FEW or median <= limits[1])


def judge(
    array: str,
    got: Any,
    truth: Truth,
    *,
    dtype: Any = None,
    leak: bool = False,
) -> Judgement:
    """Verdict on one array of a candidate.

    Parameters
    ----------
    array : str
        Its name: ``output``, ``lse``, ``d_q`` ...
    got : array or None
        What the candidate gave; None = nothing.
    dtype : dtype or None
        The dtype it must have; None = any floating dtype.
    leak : bool
        NaN may stand where the truth has none (declared by the convention ``masked_nan``).

    Raises
    ------
    ReferenceNaNError
        If the truth holds a NaN where it has a bound for a number.
    """
    right, bound, kind = truth.values[array], truth.bounds[array], truth.kinds[array]
    if np.isnan(bound).any():
        raise ReferenceNaNError(f"the bound of {array} has a NaN")
    if got is None:
        return Judgement(array, "not provided")
    got = np.asarray(got)
    if got.shape != right.shape:
        return Judgement(array, "mismatch", math.inf, math.inf, kind, says=f"shape {got.shape}, expected {right.shape}")
    if dtype is not None and got.dtype != dtype:
        wrong = f"dtype {got.dtype.name}, expected {np.dtype(dtype).name}"
        return Judgement(array, "mismatch", math.inf, math.inf, kind, says=wrong)
    if not arrays.is_real_floating(got.dtype):
        return Judgement(
            array, "mismatch", math.inf, math.inf, kind, says=f"dtype {got.dtype.name}, expected a floating dtype"
        )
    if dtype is None:
        bound = np.hypot(bound, precision.unit_roundoff(got.dtype) * np.where(np.isfinite(right), right, 0.0))
    skipped = truth.open.get(array, np.zeros((), dtype=bool))
    if right.size and skipped.all():
        return Judgement(array, "not checked", says="the conventions promise nothing here")
    units = np.where(skipped, 0.0, ratio(got, right, bound, leak=leak))
    maximum, median, many = statistics(units, counted(right) & ~skipped)
    limits = THRESHOLDS[truth.question.precision][kind]
    ok = passes(maximum, median, many, limits)
    worst = truth.worst.get(array)
    certain = not ok and (
        not math.isfinite(maximum)
        or (worst is not None and bool((np.where(skipped, 0.0, ratio(got, right, worst, leak=leak)) > 1).any()))
    )
    says = ""
    where: dict[str, Any] = {}
    if not ok:
        bad = units > limits[0]
        where = locate(bad if bad.any() else units > limits[1], units, array)
        says = _says(got, right, units, where)
    return Judgement(array, "ok" if ok else "mismatch", maximum, median, kind, certain, says, where, limits)


def _says(got: np.ndarray, right: np.ndarray, units: np.ndarray, where: dict[str, Any]) -> str:
    at = tuple(where["worst"].values())
    wrong_nan = int((np.isnan(got.astype(np.float64)) & ~np.isnan(right)).sum())
    parts = [f"worst at {_named(where['worst'])}: {float(got[at]):.6g}, expected {float(right[at]):.6g}"]
    if wrong_nan:
        parts.append(f"{wrong_nan} of {got.size} are NaN where numbers are due")
    parts.append(f"{where['count']} of {got.size} elements off, the first at {_named(where['first'])}")
    parts.extend(f"{letter} only {_ranges(only)}" for letter, only in where["only"].items())
    if where.get("starts_at_multiple_of"):
        parts.append(f"the bad rows start at {where['first_row']}, a multiple of {where['starts_at_multiple_of']}")
    return "; ".join(parts)


def _named(index: Mapping[str, int]) -> str:
    return "(" + ", ".join(f"{letter}={i}" for letter, i in index.items()) + ")"


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3, 7`` for [0, 1, 2, 3, 7]."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
