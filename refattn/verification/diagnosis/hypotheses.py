"""What may have been done instead: known mistakes on every side, other conventions, and what needs no catalogue.

A hypothesis predicts the candidate's arrays for a judged call.  Mistakes are edits of the definition's steps
(:mod:`refattn.mistakes.engine`); the right steps of a call are computed once and shared by all of them.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from refattn import arrays
from refattn.mechanism import Mechanism
from refattn.mistakes.engine import Case, Mistake, combined, edited_steps
from refattn.records import Mutation, Result
from refattn.verification import conventions as conventions_
from refattn.verification.conventions import Conventions
from refattn.verification.diagnosis.calls import JudgedCall
from refattn.verification.diagnosis.readings import Reading
from refattn.verification.probes import storage_dtype
from refattn.verification.truth import Truth

__all__ = ["Hypothesis", "Workbench", "sides_worth_trying"]

TOO_LARGE = 1 << 24
"""Pairs of a call beyond which its steps, whole matrices, are not computed."""

_KEPT = 6
"""Calls whose right steps are kept at once: those of a long call are large."""

_BYTES = 1 << 29
"""What kept predictions may take."""


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """Something that may have been done instead.

    ``side`` is one of ``refattn.mistakes.engine.SIDES``; ``mistakes`` are edits of steps (two where two are made at once),
    ``mutation`` a mistake of an older form, ``conventions`` another convention that the candidate may follow.  ``anew``: a
    backward that computes its forward once more, the mistake included, beside a right forward.
    """

    name: str
    says: str
    side: str = "both"
    mistakes: tuple[Mistake, ...] = ()
    mutation: Mutation | None = dataclasses.field(default=None, compare=False)
    conventions: Conventions | None = None
    why: str = ""
    anew: bool = False

    def made_anew(self) -> "Hypothesis":
        """The same mistake in a backward that computes its forward once more."""
        says = f"{self.says}, in a backward that computes its forward anew"
        return dataclasses.replace(self, says=says, side="backward", anew=True)


@dataclasses.dataclass(frozen=True)
class _Prediction:
    """Arrays, and what they were predicted for, which lives as long: it is known by its identity."""

    hypothesis: Hypothesis
    truth: Truth
    arrays: dict[str, np.ndarray]

    @property
    def bytes(self) -> int:
        return sum(np.asarray(x).nbytes for x in self.arrays.values())


class Workbench:
    """All hypotheses about one candidate, and what they predict; predictions of a call share its right steps.

    What is predicted for a call follows from its truth alone: candidates that get the same calls may share a bench.  ``kept``
    is how many calls' right steps it keeps.
    """

    def __init__(self, mechanism: Mechanism, conventions: Conventions, *, kept: int = _KEPT) -> None:
        self.mechanism, self.conventions, self._kept = mechanism, conventions, kept
        self._cases: OrderedDict[int, tuple[Truth, Case]] = OrderedDict()
        self._predictions: OrderedDict[tuple[int, int, Any], _Prediction] = OrderedDict()
        self._bytes = 0
        catalogue = mechanism.catalogue
        self.mistakes: list[Hypothesis] = []
        if catalogue is None:
            self.mistakes = [Hypothesis(m.class_, m.says, mutation=m) for m in mechanism.mutations]
        else:
            for side in ("both", "forward", "backward"):
                self.mistakes += [
                    Hypothesis(m.class_, m.says, side, (m,), why=m.why) for m in catalogue if side in m.sides
                ]
        self.anew = [h.made_anew() for h in self.mistakes if h.side == "both" and h.mistakes]
        self.conventions_: list[Hypothesis] = []
        for name, other in conventions_.alternatives(conventions):
            changed = {f: v for f, v in dataclasses.asdict(other).items() if v != getattr(conventions, f)}
            words = ", ".join(f"{field} = {value!r}" for field, value in changed.items())
            says = f"another convention than the one in force: {words}"
            self.conventions_.append(Hypothesis(name, says, conventions=other))

    def together(self, one: Hypothesis, other: Hypothesis) -> Hypothesis | None:
        """Both mistakes at once; None where they cannot be combined."""
        if not one.mistakes or not other.mistakes:
            return None
        edit = combined(one.mistakes[0].edit, other.mistakes[0].edit)
        if edit is None:
            return None
        mistake = dataclasses.replace(one.mistakes[0], edit=edit, arrays=None, sides=("both",))
        return Hypothesis(
            f"{one.name} + {other.name}", f"{one.says}; and {other.says}", "both", (mistake,), why=one.why
        )

    # ------------------------------------------------------------------ predictions

    def in_rows(self, hypothesis: Hypothesis, call: JudgedCall, rows: np.ndarray) -> dict[str, np.ndarray]:
        """What a mistake gives that is made in these rows (..., h, q) of the output alone."""
        if not hypothesis.mistakes:
            return {}
        (mistake,) = hypothesis.mistakes
        wanted = any(n.startswith("d_") for n in call.judged)
        key = (id(hypothesis), id(call.truth), (rows.tobytes(), wanted))
        if key not in self._predictions:
            try:
                with np.errstate(all="ignore"):
                    case = self.case(call)
                    results = case.results(mistake, hypothesis.side, rows=rows)
                    gradients = case.gradients(mistake, hypothesis.side, rows=rows) if wanted else None
                    made = self._named(call, results, gradients)
            except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError):
                made = {}
            self._keep(key, _Prediction(hypothesis, call.truth, made))
        self._predictions.move_to_end(key)
        return {n: x for n, x in self._predictions[key].arrays.items() if n in call.judged}

    def predict(self, hypothesis: Hypothesis, call: JudgedCall, *, gradients: bool = True) -> dict[str, np.ndarray]:
        """The judged arrays that would differ from the right ones; empty where the hypothesis says nothing here.

        ``gradients=False`` leaves these out, which is cheaper.
        """
        found: dict[str, np.ndarray] = {}
        wanted = gradients and any(n.startswith("d_") for n in call.judged)
        for part in (False, True)[: 1 + wanted]:
            key = (id(hypothesis), id(call.truth), part)
            if key not in self._predictions:
                try:
                    with np.errstate(all="ignore"):
                        made = self._predict(hypothesis, call, part)
                except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError):
                    made = {}  # not made for these arguments
                self._keep(key, _Prediction(hypothesis, call.truth, made))
            self._predictions.move_to_end(key)
            found |= {n: x for n, x in self._predictions[key].arrays.items() if n in call.judged}
        return found

    def _keep(self, key: tuple[int, int, Any], prediction: "_Prediction") -> None:
        self._predictions[key] = prediction
        self._bytes += prediction.bytes
        while self._bytes > _BYTES and len(self._predictions) > 1:
            self._bytes -= self._predictions.popitem(last=False)[1].bytes

    def edits_before(self, hypothesis: Hypothesis, call: JudgedCall, step: str) -> bool:
        """Whether a mistake is made in a step that this one follows from."""
        right = self.case(call).right
        if not hasattr(type(right), step):
            return False
        getattr(right, step)
        reached, open_ = {step}, [step]
        while open_:
            for name in right.reads.get(open_.pop(), ()):
                if name not in reached:
                    reached.add(name)
                    open_.append(name)
        return any(name in reached for m in hypothesis.mistakes for name in edited_steps(m))

    def sees(self, hypothesis: Hypothesis, call: JudgedCall, reading: Reading) -> bool:
        """Whether a mistake sees just the pairs that the candidate was read to see (rows without any say nothing)."""
        (mistake,) = hypothesis.mistakes
        actual = reading.seen[0]
        try:
            seen = self.case(call).value(mistake, "seen")[..., : reading.keys]
        except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError):
            return False
        if np.shape(seen) != actual.shape:
            return False
        return bool((seen == actual)[actual.any(axis=-1)].all())

    def case(self, call: JudgedCall) -> Case:
        """The right steps of a call."""
        if call.pairs > TOO_LARGE:
            raise ValueError(f"{call.probe} has {call.pairs} pairs: more than whole matrices can hold")
        key = id(call.truth)
        if key not in self._cases:
            question = call.truth.question
            cotangents = conventions_.reference_cotangents(question.cotangents64, question.conventions)
            steps = self.mechanism.definition.steps
            made = Case(steps, question.arguments(), cotangents, storage=storage_dtype(question.precision))
            self._cases[key] = (call.truth, made)
            while len(self._cases) > self._kept:
                self._cases.popitem(last=False)
        self._cases.move_to_end(key)
        return self._cases[key][1]

    def _predict(self, hypothesis: Hypothesis, call: JudgedCall, gradients: bool) -> dict[str, np.ndarray]:
        """The results alone, or the gradients alone."""
        question = call.truth.question
        if hypothesis.conventions is not None:
            other = hypothesis.conventions
            made = question.answer(question.arguments(other), question.cotangents64, other)
            return {n: x for n, x in made.items() if n.startswith("d_") == gradients}
        if hypothesis.mutation is not None:
            arguments = question.arguments()
            mutation = hypothesis.mutation
            if not gradients:
                result = mutation.forward(arguments) if mutation.forward else None
                return self._named(call, None if result is None else dict(result.fields), None)
            cotangents = conventions_.reference_cotangents(question.cotangents64, question.conventions)
            return self._named(call, None, mutation.gradients(arguments, cotangents) if mutation.gradients else None)
        (mistake,) = hypothesis.mistakes
        case = self.case(call)
        if gradients:
            return self._named(call, None, case.gradients(mistake, "both" if hypothesis.anew else hypothesis.side))
        return self._named(call, case.results(mistake, hypothesis.side), None)

    def _named(
        self, call: JudgedCall, results: Mapping[str, Any] | None, gradients: Mapping[str, Any] | None
    ) -> dict[str, np.ndarray]:
        """Results and gradients as a candidate of the declared conventions would give them, by array name."""
        question = call.truth.question
        follow, arguments = question.conventions, question.arguments()
        found: dict[str, np.ndarray] = {}
        right = Result(**self.mechanism_result(call))
        if results is not None:
            numbers = {n: x for n, x in results.items() if arrays.is_array(x)}
            found |= conventions_.reference_result(Result(**numbers), arguments, follow)
        if gradients is not None:
            plain = question.cotangents64
            wanted = conventions_.reference_gradients(gradients, right, arguments, plain, follow, question.options)
            found |= {f"d_{n}": np.asarray(x) for n, x in wanted.items() if n in question.wrt}
        return found

    def mechanism_result(self, call: JudgedCall) -> dict[str, Any]:
        """The right results of a call, before conventions."""
        if self.mechanism.catalogue is None:
            return {n: x for n, x in call.truth.values.items() if not n.startswith("d_")}
        return self.case(call).right.result()


def sides_worth_trying(call: JudgedCall, hypotheses: Sequence[Hypothesis]) -> Iterator[Hypothesis]:
    """Hypotheses that can explain what fails in a call."""
    values = any(not n.startswith("d_") for n in call.failing)
    judged_gradients = any(n.startswith("d_") for n in call.judged)
    for hypothesis in hypotheses:
        if hypothesis.side == "backward" and values:
            continue
        if hypothesis.side == "forward" and not values:
            continue
        if hypothesis.side == "forward" and not judged_gradients and "both" in hypothesis.mistakes[0].sides:
            continue  # the same results
        yield hypothesis
