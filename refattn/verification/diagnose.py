"""What explains a mismatch: every known mistake, and every other convention, held against the candidate's own numbers.

A hypothesis predicts arrays.  It *fits* a call when all arrays that it predicts agree with the candidate's within the
thresholds (a little wider than those of the verdict, because the bounds belong to the right answer), those included
that the reference passes.  The explanations are the hypotheses that fit most of the failing calls and contradict none,
passing calls included; what they leave over is explained by the next ones.  Only mismatches are ever looked at: a right
kernel cannot be blamed.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from refattn.mechanism import Mechanism
from refattn.precision import unit_roundoff
from refattn.records import Mutation
from refattn.verification import conventions as conventions_
from refattn.verification.conventions import Conventions
from refattn.verification.truth import Truth
from refattn.verification.verdict import THRESHOLDS, Judgement, counted, passes, ratio, statistics

__all__ = ["Case", "Hypothesis", "explain", "hypotheses"]

WIDER = 2.0
"""Factor on the thresholds: bounds are those of the right answer, errors are those around a wrong one."""

ROUNDS, CONTROLS = 8, 12
"""How many failing calls all hypotheses are tried on, one after the other, and how many passing calls may contradict."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One judged call: what was right, what the candidate gave, and the verdicts."""

    probe: str
    dtype: str
    size: int
    truth: Truth
    got: dict[str, np.ndarray]
    judgements: tuple[Judgement, ...]
    leak: bool = False

    @property
    def failing(self) -> tuple[str, ...]:
        return tuple(j.array for j in self.judgements if j.verdict == "mismatch")

    @property
    def judged(self) -> tuple[str, ...]:
        return tuple(j.array for j in self.judgements if j.verdict in ("ok", "mismatch"))

    @functools.cached_property
    def out_of_range(self) -> bool:
        """Zeros, NaN or infinities where numbers are due: overflow or underflow of the kernel's own precision."""
        for name in self.failing:
            got, right = self.got[name].astype(np.float64), self.truth.values[name]
            if got.shape == right.shape and bool(
                (((got == 0) | ~np.isfinite(got)) & np.isfinite(right) & (right != 0)).any()
            ):
                return True
        return False


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """Something that may have been done instead.

    ``predict(case, gradients, exact)`` gives the arrays of a call, the results alone or the gradients alone; None = says nothing
    there.  ``exact=False`` asks on arrays in the storage dtype, for mistakes that need the kernel's precision.
    """

    name: str
    says: str
    predict: Callable[[Case, bool, bool], dict[str, np.ndarray] | None]


@dataclasses.dataclass
class _Score:
    """How a hypothesis does on one call: it fits, or says nothing but the truth, or is contradicted."""

    fits: bool = True
    visible: bool = False  # on an array that fails, it predicts something else than the truth
    differs: bool = False  # on any array
    residual: float = 0.0
    arrays: tuple[str, ...] = ()

    @property
    def explains(self) -> bool:
        return self.fits and self.visible

    @property
    def contradicted(self) -> bool:
        return not self.explains and self.differs


def hypotheses(mechanism: Mechanism, conventions: Conventions) -> list[Hypothesis]:
    """All mutations of the mechanism and all alternative conventions."""
    found = [_mutation(m) for m in mechanism.mutations]
    found += [_convention(name, other, conventions) for name, other in conventions_.alternatives(conventions)]
    return found


def _mutation(mutation: Mutation, follow: Conventions | None = None) -> Hypothesis:
    def predict(case: Case, gradients: bool, exact: bool) -> dict[str, np.ndarray] | None:
        question = case.truth.question
        record = follow or question.conventions
        arguments = question.arguments(follow, exact=exact)
        with np.errstate(all="ignore"):
            if not gradients:
                result = None if mutation.forward is None else mutation.forward(arguments)
                return None if result is None else conventions_.reference_result(result, arguments, record)
            if mutation.gradients is None:
                return None
            given = conventions_.reference_cotangents(question.cotangents64, record)
            found = mutation.gradients(arguments, given)
            return None if found is None else {f"d_{n}": np.asarray(x) for n, x in found.items() if n in question.wrt}

    return Hypothesis(mutation.class_, mutation.says, predict)


def _convention(name: str, other: Conventions, declared: Conventions) -> Hypothesis:
    changed = {f: v for f, v in dataclasses.asdict(other).items() if v != getattr(declared, f)}

    def predict(case: Case, gradients: bool, exact: bool) -> dict[str, np.ndarray] | None:
        question = case.truth.question
        values = question.answer(question.arguments(other), question.cotangents64, other)
        return {n: x for n, x in values.items() if n.startswith("d_") == gradients}

    words = ", ".join(f"{field} = {value!r}" for field, value in changed.items())
    return Hypothesis(name, f"another convention than the one in force: {words}", predict)


def _score(hypothesis: Hypothesis, case: Case) -> _Score:
    score = _attempt(hypothesis, case, True)
    if not score.explains and case.out_of_range and case.dtype != "float64":
        narrow = _attempt(hypothesis, case, False)
        return narrow if narrow.explains else score
    return score


def _attempt(hypothesis: Hypothesis, case: Case, exact: bool) -> _Score:
    """The results first: most hypotheses are contradicted there, and their gradients are never computed."""
    score = _Score()
    for gradients in (False, True):
        names = [n for n in case.judged if n.startswith("d_") == gradients]
        if not names or not score.fits:
            continue
        try:
            predicted = hypothesis.predict(case, gradients, exact)
        except (ValueError, TypeError, ArithmeticError, LookupError):
            continue  # not made for these arguments
        for name in names:
            if predicted is not None and name in predicted and np.shape(predicted[name]) == case.got[name].shape:
                _weigh(score, case, name, np.asarray(predicted[name], dtype=np.float64))
    return score


def _weigh(score: _Score, case: Case, name: str, wrong: np.ndarray) -> None:
    truth = case.truth
    right, bound = truth.values[name], truth.bounds[name]
    if right.shape != wrong.shape:  # the candidate's array has another shape, and so has the hypothesis'
        right, bound = np.full(wrong.shape, np.inf), np.full(wrong.shape, np.sqrt(np.mean(np.square(bound))))
    largest, median = THRESHOLDS[truth.question.precision][truth.kinds[name]]
    wide = _around(wrong, right, bound, unit_roundoff(truth.question.precision))
    other = not passes(*statistics(_units(case, name, wrong, right, wide), counted(right)), (largest, median))
    found = statistics(_units(case, name, case.got[name], wrong, wide), counted(wrong))
    score.differs |= other
    score.fits &= passes(*found, (WIDER * largest, WIDER * median))
    if name in case.failing:
        score.visible |= other
        score.arrays = (*score.arrays, name)
        score.residual = max(score.residual, found[0])


def _units(case: Case, name: str, got: np.ndarray, wanted: np.ndarray, bound: np.ndarray) -> np.ndarray:
    units = ratio(got, wanted, bound, leak=case.leak)
    left_open = case.truth.open.get(name)
    return units if left_open is None or left_open.shape != units.shape else np.where(left_open, 0.0, units)


def _around(wrong: np.ndarray, right: np.ndarray, bound: np.ndarray, unit: float) -> np.ndarray:
    """Bound for a wrong value: that of the right one, its mean over the array, and the same relative error.

    Where the right one is zero throughout (a gradient that is to stop), one unit of the wrong one's mean size.
    """
    size = np.where(np.isfinite(right), np.abs(right), 0.0)
    relative = np.median(bound[size > 0] / size[size > 0]) if (size > 0).any() else 0.0
    level = np.where(np.isfinite(wrong), np.abs(wrong), 0.0)
    typical = np.sqrt(np.mean(np.square(bound))) if bound.size else 0.0
    if not (size > 0).any() and level.size:
        typical = typical + unit * np.sqrt(np.mean(np.square(level)))
    return np.sqrt(np.square(bound) + np.square(typical) + np.square(relative * level))


# ---------------------------------------------------------------------- the search


def explain(cases: Sequence[Case], mechanism: Mechanism, conventions: Conventions) -> list[dict[str, Any]]:
    """Explanations of the failing calls, best first.

    Returns
    -------
    list of dict
        ``class``, ``residual`` (largest error/bound left on the arrays explained), ``outputs`` (those arrays), ``says``,
        ``probes`` (names of the failing probes that fit) and ``share`` (how many of the failing calls they are).
    """
    failing = sorted((c for c in cases if c.failing), key=_order)
    passing = sorted((c for c in cases if not c.failing and c.judged), key=_order)
    if not failing:
        return []
    found = _search(hypotheses(mechanism, conventions), failing, passing, ROUNDS)
    return found or _search(list(_pairs(mechanism, conventions, failing[0])), failing, passing, 1)


def _pairs(mechanism: Mechanism, conventions: Conventions, case: Case) -> Iterator[Hypothesis]:
    """Every mutation together with every other convention that this call shows."""
    for name, other in conventions_.alternatives(conventions):
        if _score(_convention(name, other, conventions), case).differs:
            for m in mechanism.mutations:
                yield dataclasses.replace(
                    _mutation(m, other), name=f"{m.class_} + {name}", says=f"{m.says}; and the convention of {name}"
                )


def _order(case: Case) -> tuple[int, int]:
    """Exact dtypes first, then small calls."""
    dtypes = ("float64", "float32", "float16", "bfloat16")
    return (dtypes.index(case.dtype) if case.dtype in dtypes else len(dtypes), case.size)


def _search(
    tried: Sequence[Hypothesis], failing: Sequence[Case], passing: Sequence[Case], rounds: int
) -> list[dict[str, Any]]:
    """Explain the smallest failing call, take off all calls that the same explanation fits, and go on with the rest."""
    explanations: list[dict[str, Any]] = []
    left = list(range(len(failing)))
    for _ in range(rounds):
        if not left:
            break
        case = failing[left[0]]
        scored = [(h, _scores(h, failing, passing)) for h in tried if _score(h, case).explains]
        covers = [(h, scores, {i for i in left if scores[i].explains}) for h, scores in scored if scores]
        most = max((len(cover) for *_, cover in covers), default=0)
        best = [(h, scores) for h, scores, cover in covers if len(cover) == most]
        explanations += [_record(h, scores, failing) for h, scores in best]
        covered = {i for _, scores in best for i in left if scores[i].explains}
        # What nothing explains is left alone, together with the other calls of the same options.
        covered |= {i for i in left if not best and _options(failing[i]) == _options(case)}
        left = [i for i in left if i not in covered]
    return _unique(sorted(explanations, key=lambda record: (-record["share"], record["residual"])))


def _scores(hypothesis: Hypothesis, failing: Sequence[Case], passing: Sequence[Case]) -> list[_Score]:
    """Scores on all failing calls; empty when passing calls contradict the hypothesis, or most failing ones do."""
    if any(_score(hypothesis, case).contradicted for case in passing[:CONTROLS]):
        return []
    scores = [_score(hypothesis, case) for case in failing]
    # Where two mistakes show at once, each of them alone is contradicted; one that mostly is, is none.
    return scores if sum(s.explains for s in scores) > sum(s.contradicted for s in scores) else []


def _options(case: Case) -> tuple[str, ...]:
    return tuple(sorted(case.truth.question.options))


def _record(hypothesis: Hypothesis, scores: Sequence[_Score], failing: Sequence[Case]) -> dict[str, Any]:
    inside = [i for i, score in enumerate(scores) if score.explains]
    return {
        "class": hypothesis.name,
        "residual": max(scores[i].residual for i in inside),
        "outputs": sorted({name for i in inside for name in scores[i].arrays}),
        "says": hypothesis.says,
        "probes": sorted({failing[i].probe for i in inside}),
        "share": len(inside) / len(failing),
    }


def _unique(explanations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per class: the mistake and the convention of the same name are the same explanation."""
    kept: dict[str, dict[str, Any]] = {}
    for entry in explanations:
        kept.setdefault(entry["class"], entry)
    return list(kept.values())
