"""The first step of the definition at which a candidate departs, with or without a mistake that explains it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from refattn.definitions.steps import Definition
from refattn.verification.diagnosis.calls import JudgedCall
from refattn.verification.diagnosis.hypotheses import TOO_LARGE, Workbench
from refattn.verification.diagnosis.readings import Reading, read, sentences
from refattn.verification.diagnosis.search import Explanation

__all__ = ["Departure", "departure"]

_LOGIT = 1e-3
"""Logits read from weights and lse are compared this closely, relative to the largest of them."""


class Departure:
    """Where values and gradients depart from the definition, what no explanation covers, and what readings show."""

    def __init__(self) -> None:
        self.values: str | None = None
        self.gradients: str | None = None
        self.unexplained: list[str] = []
        self.sentences: list[str] = []
        self.reading: Reading | None = None

    def as_record(self) -> dict[str, Any]:
        return {"values": self.values, "gradients": self.gradients, "unexplained": sorted(self.unexplained)}


def departure(
    calls: Sequence[JudgedCall], bench: Workbench, explanations: Sequence[Explanation], live: Any = None
) -> Departure:
    """Localise the failures of all calls, in the smallest one that shows values or gradients wrong."""
    found = Departure()
    failing = sorted((c for c in calls if c.failing), key=lambda c: (len(c.truth.question.options), c.size))
    explained = {n for e in explanations for n in e.outputs}
    found.unexplained = sorted({n for c in failing for n in c.failing} - explained)
    values = next((c for c in failing if any(not n.startswith("d_") for n in c.failing)), None)
    gradients = next((c for c in failing if all(n.startswith("d_") for n in c.failing)), None)
    for explanation in explanations:
        steps = _edited(explanation, bench)
        about_gradients = all(n.startswith("d_") for n in explanation.outputs)
        if steps and about_gradients and found.gradients is None:
            found.gradients = steps[0]
        elif steps and not about_gradients and found.values is None:
            found.values = steps[0]
    if values is not None and (found.values is None or live is not None):
        if live is not None:
            found.reading = read(values, live)
        if found.reading is not None:
            found.sentences = list(sentences(found.reading))
        found.values = found.values or _of_values(values, bench, found.reading)
    if gradients is not None and found.gradients is None:
        found.gradients = _of_gradients(gradients)
    return found


def _edited(explanation: Explanation, bench: Workbench) -> list[str]:
    """The edited steps; where an argument is misread, the steps that read it."""
    if explanation.hypothesis is None or not explanation.hypothesis.mistakes:
        return []
    record = explanation.as_record(1)
    names = [entry["step"] for entry in record["sources"]]
    steps = []
    for name in names:
        definition = bench.mechanism.definition.steps
        if isinstance(definition, type) and name not in _steps(definition):
            reads = bench.case(explanation.calls[0]).right.reads
            steps += [n for n, read_ in reads.items() if name in read_ and n.startswith("visible_")]
            steps += [n for n, read_ in reads.items() if name in read_]
        steps.append(name)
    return steps


def _steps(definition: type[Definition]) -> set[str]:
    return {n for c in definition.__mro__ for n in vars(c)}


def _of_values(call: JudgedCall, bench: Workbench, reading: Reading | None) -> str:
    """The first step of the forward that is wrong."""
    values = [n for n in call.failing if not n.startswith("d_")]
    right = _right_steps(call, bench)
    if reading is None or right is None or not hasattr(type(right), "masked_logits"):
        if "output" in values and "lse" in values:
            return "logits" if right is not None and hasattr(type(right), "logits") else "output"
        return values[0]
    actual, expected = reading.seen
    if (actual ^ expected).any():
        return "visible"
    close = np.abs(reading.actual - reading.expected) <= 1e-3 * np.abs(reading.expected).max(initial=1e-30)
    if close.all():
        return "output" if "output" in values else values[0]
    lse = call.got.get("lse")
    if lse is None or lse.shape != reading.actual.shape[:-1]:
        return "weights"
    with np.errstate(all="ignore"):
        logits = np.log(reading.actual) + lse.astype(np.float64)[..., None]
    due = right.logits[..., : reading.keys]
    seen = expected & np.isfinite(logits)
    if not seen.any():
        return "weights"
    apart = np.where(seen, logits - due, 0.0)
    if np.abs(apart).max() <= _LOGIT * max(1.0, float(np.abs(due[seen]).max())):
        return "row_sum"
    return _of_logits(logits, right, reading.keys, seen)


def _of_logits(logits: np.ndarray, right: Any, keys: int, seen: np.ndarray) -> str:
    """Which term of the logits is missing or wrong: the first step after which they agree, if one is left out."""
    scaled = right.scaled[..., :keys]
    for step, others in (
        ("capped", right.modified + right.added),
        ("added", right.capped + 0.0),
        ("scaled", right.products),
    ):
        other = np.broadcast_to(others, right.pairs)[..., :keys]
        if np.abs(np.where(seen, logits - other, 0.0)).max() <= _LOGIT * max(1.0, float(np.abs(scaled).max())):
            return step
    return "logits"


def _of_gradients(call: JudgedCall) -> str:
    """The first step of the backward that is wrong, from which gradients are."""
    wrong = [n for n in call.failing if n.startswith("d_")]
    right = [n for n in call.judged if n.startswith("d_") and n not in wrong]
    if "d_v" in wrong and {"d_q", "d_k"} & set(wrong):
        return "rebuilt_weights"
    if "d_v" in wrong:
        return "d_v"
    if {"d_q", "d_k"} <= set(wrong) and ("d_v" in right or "d_v" not in call.judged):
        return "d_logits"
    return wrong[0]


def _right_steps(call: JudgedCall, bench: Workbench) -> Any:
    if not isinstance(bench.mechanism.definition.steps, type) or call.pairs > TOO_LARGE:
        return None
    return bench.case(call).right
