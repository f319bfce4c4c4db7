"""How well a hypothesis' arrays agree with a candidate's: element by element, because a mistake may show at some places only."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from refattn.precision import unit_roundoff
from refattn.verification.diagnosis.calls import JudgedCall

__all__ = ["WIDER", "Match", "match", "shows"]

WIDER = 2.0
"""Factor on the thresholds: bounds are those of the right answer, errors are those around a wrong one."""


@dataclasses.dataclass(frozen=True)
class Match:
    """A hypothesis on one call.

    ``explained`` are the failing arrays whose wrong elements it predicts, ``left`` the other failing ones; ``elsewhere`` the
    share of elements that it would change and that are right nevertheless, by array, where there are such.  ``residual`` is the
    largest distance that remains on explained elements, in bounds; ``telling`` whether they are more than zeros and infinities.
    """

    explained: tuple[str, ...]
    left: tuple[str, ...]
    elsewhere: dict[str, float]
    residual: float
    telling: bool

    @property
    def whole(self) -> bool:
        """Everything that fails is predicted, and nothing else."""
        return not self.left and not self.elsewhere


@np.errstate(all="ignore")
def match(call: JudgedCall, predicted: Mapping[str, np.ndarray], names: tuple[str, ...] | None = None) -> Match:
    """Hold predicted arrays against the candidate's (those of ``names`` only); an array not predicted counts as right."""
    explained, left, elsewhere = [], [], {}
    residual, telling = 0.0, False
    for name in call.judged if names is None else names:
        fails = name in call.failing
        wrong = predicted.get(name)
        if wrong is None or np.shape(wrong) != call.got[name].shape:
            if fails:
                left.append(name)
            continue
        wrong = np.asarray(wrong, dtype=np.float64)
        right = call.truth.values[name]
        limit = WIDER * call.limits(name)[0]
        if right.shape != wrong.shape:  # the candidate's array has another shape, and so has the hypothesis'
            typical = np.sqrt(np.mean(np.square(call.truth.bounds[name])))
            bound = np.hypot(typical, unit_roundoff(call.truth.question.precision) * np.abs(wrong))
            units = call.units(name, wrong, bound)
            if bool((units <= limit).all()):
                explained.append(name)
                telling = True
            else:
                left.append(name)
            continue
        bound = _around(wrong, right, call.truth.bounds[name], unit_roundoff(call.truth.question.precision))
        units = call.units(name, wrong, bound)
        off = call.off(name)
        other = _apart(wrong, right, bound) > limit
        if fails:
            if off.any() and bool((units[off] <= limit).all()) and bool(other[off].any()):
                explained.append(name)
                residual = max(residual, float(units[off].max()))
                numbers = call.got[name][off].astype(np.float64)
                telling |= bool((np.isfinite(numbers) & (numbers != 0)).any())
            else:
                left.append(name)
                continue
        unmoved = other & ~off & (units > limit)
        if unmoved.any():
            elsewhere[name] = float(unmoved.sum() / other.sum())
    return Match(tuple(explained), tuple(left), elsewhere, residual, telling)


@np.errstate(all="ignore")
def shows(call: JudgedCall, predicted: Mapping[str, np.ndarray]) -> bool:
    """Whether the hypothesis would be seen in this call at all."""
    for name in call.judged:
        wrong, right = predicted.get(name), call.truth.values[name]
        if wrong is None:
            continue
        if np.shape(wrong) != right.shape:
            return True
        wrong = np.asarray(wrong, dtype=np.float64)
        bound = _around(wrong, right, call.truth.bounds[name], unit_roundoff(call.truth.question.precision))
        left_open = call.truth.open.get(name)
        apart = _apart(wrong, right, bound)
        if left_open is not None and left_open.shape == apart.shape:
            apart = np.where(left_open, 0.0, apart)
        if bool((apart > WIDER * call.limits(name)[0]).any()):
            return True
    return False


def _apart(wrong: np.ndarray, right: np.ndarray, bound: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        units = np.abs(wrong - right) / bound
    same = (wrong == right) | (np.isnan(wrong) & np.isnan(right))
    units = np.where(np.isfinite(wrong) & np.isfinite(right), units, np.inf)
    return np.where(same, 0.0, units)


def _around(wrong: np.ndarray, right: np.ndarray, bound: np.ndarray, unit: float) -> np.ndarray:
    """Bound for a wrong value: that of the right one, its mean over the array, and the same relative error.

    Where the right one is zero throughout (a gradient that is to stop), eight units of the wrong one's mean size.
    """
    size = np.where(np.isfinite(right), np.abs(right), 0.0)
    relative = np.median(bound[size > 0] / size[size > 0]) if (size > 0).any() else 0.0
    level = np.where(np.isfinite(wrong), np.abs(wrong), 0.0)
    typical = np.sqrt(np.mean(np.square(bound))) if bound.size else 0.0
    if not (size > 0).any() and level.size:
        typical = typical + 8 * unit * np.sqrt(np.mean(np.square(level)))
    return np.sqrt(np.square(bound) + np.square(typical) + np.square(relative * level))
