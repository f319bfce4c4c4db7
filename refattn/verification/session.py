"""One verification: capabilities are asked, probes go out, outcomes come in and are judged; anything can be asked again."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from refattn import arrays
from refattn.mechanism import Mechanism
from refattn.verification.candidate import Call, Candidate, Outcome
from refattn.verification.capabilities import Capabilities, capabilities_of
from refattn.verification.conventions import CONVENTION_OPTIONS
from refattn.verification.diagnosis import JudgedCall
from refattn.verification.errors import UsageError
from refattn.verification.limits import Limits
from refattn.verification.probes import Entry, Impossible, Plan, Probe, redraw
from refattn.verification.probes.recurrences import recurrent_features
from refattn.verification.question import Question
from refattn.verification.report import Row
from refattn.verification.truth import ReferenceNaNError, Truth, truth_of
from refattn.verification.verdict import Judgement, judge, ratio

__all__ = ["Budget", "Session"]

SECONDS, BYTES = 30.0, 4 << 30

Asked = tuple[Probe, str]  # a probe and a dtype


class Budget:
    """How much diagnosis may ask of a candidate: calls, seconds, and calls that end its process."""

    def __init__(self, calls: int = 200, seconds: float = 8.0, crashes: int = 5) -> None:
        self.calls, self.seconds, self.crashes = calls, seconds, crashes

    @property
    def spent(self) -> bool:
        return self.calls <= 0 or self.seconds <= 0 or self.crashes <= 0

    def charge(self, seconds: float, outcome: Outcome) -> None:
        """Take one call off."""
        self.calls -= 1
        self.seconds -= seconds
        self.crashes -= outcome.status in ("crash", "timeout", "memory")


class Session:
    """One candidate against one mechanism.

    Attributes
    ----------
    rows, cases, notes
        What the report shows: one row per call, the judged calls with all their numbers, sentences.
    structural
        Explanations that come from how the candidate behaves (state, strides, changed inputs, absent gradients).
    budget
        What :meth:`again` may still ask.
    """

    def __init__(
        self,
        candidate: Candidate,
        mechanism: Mechanism,
        *,
        dtypes: Sequence[str],
        gradients: bool,
        fixed: Mapping[str, Any] | None = None,
        backend: str | None = None,
        limits: Limits | None = None,
        also: Mapping[str, int] | None = None,
        requires: Sequence[str] = (),
        thorough: bool = False,
        seed: int = 0,
        seconds: float = SECONDS,
        memory: int = BYTES,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        self.candidate, self.mechanism, self.dtypes, self.gradients = candidate, mechanism, tuple(dtypes), gradients
        self.fixed, self.backend, self.progress, self.seed = dict(fixed or {}), backend, progress, seed
        self.seconds, self.memory = seconds, memory
        self.takes = frozenset(n for n in CONVENTION_OPTIONS if candidate.takes(n))
        self.capabilities = Capabilities(
            limits or Limits(), requires, recurrent=bool(recurrent_features(mechanism.name))
        )
        if candidate.conventions.channels == "equal":
            self.capabilities.refuse("value_channels", "the conventions declare equal channels", known=True)
        self.plan = Plan(
            mechanism,
            accepts=self._accepts,
            fit=self._fit,
            allows=self.capabilities.allows,
            fixed=self.fixed,
            also=dict(also or {}),
            few_shapes=candidate.compiles,
            seed=seed,
            thorough=thorough,
        )
        self.budget = Budget()
        self.rows: list[Row] = []
        self.cases: list[JudgedCall] = []
        self._probes: dict[int, Probe] = {}  # of the judged calls, which are kept alive for it
        self._alive: list[JudgedCall] = []
        self.notes: list[str] = []
        self.structural: list[dict[str, Any]] = []
        self._outcomes: dict[tuple[str, str], Outcome] = {}

    def _fit(self, sizes: dict[str, int]) -> dict[str, int]:
        """Sizes within the limits as they are known by now."""
        return self.capabilities.limits.fit(sizes)

    def _accepts(self, options: Sequence[str]) -> bool:
        if any(self.capabilities.refused(n) for n in options):
            return False
        return self.candidate.accepts([n for n in options if n in self.mechanism.options])[0]

    # ------------------------------------------------------------------ the run

    def run(self) -> None:
        """Ask what the candidate takes, then everything that it takes."""
        first = self._ask_capabilities()
        if not first:
            return
        self.plan.results = self._results
        rest = self._possible(self.plan.rest([probe for probe, _ in first]))
        taken = [d for d in self.dtypes if not self.capabilities.refused(d)]
        asked = [(probe, dtype) for dtype in taken for probe in rest]
        asked += [(probe, dtype) for probe, used in first for dtype in taken if dtype != used]
        again = first[:1]
        outcomes = self._ask([*asked, *again])
        self._take(asked, outcomes[: len(asked)])
        self._ask_the_rest_in_parts(rest, taken)
        self._compare_repeat(again[0], outcomes[-1])
        self._twins()
        if self.seed:
            self._note(f"the probes were drawn with --seed {self.seed}")
        self._say_what_was_left_out()

    def _ask_the_rest_in_parts(self, probes: Sequence[Probe], dtypes: Sequence[str]) -> None:
        """Rows of pairs that were refused as a whole: which features it does not take together, and the pairs without them."""
        refused = [p for p in probes if p.name.startswith("pairs_") and self._refused_whole(p, dtypes[0])]
        if not refused or self.candidate.patience.over:
            return
        for probe in refused[:_PARTS]:
            with_options = [n for n in probe.features if n in self.plan.features_that_pass(probe.options)]
            for one, other in itertools.combinations(with_options, 2):
                pair = frozenset({(one, probe.features[one]), (other, probe.features[other])})
                if pair in self.plan.forbidden or any(pair <= set(p.features.items()) for p in self._answered):
                    continue
                part = self.plan.build(Entry(f"{one}_and_{other}", dict(pair), {}))
                if part is not None and self._ask([(part, dtypes[0])])[0].status == "unsupported":
                    self.plan.forbidden.add(pair)
        self.rows = [r for r in self.rows if not any(r.probe == p.name for p in refused)]
        again = self._possible(self.plan.pairs(self._answered))
        again = [dataclasses.replace(p, name=p.name.replace("pairs", "parts")) for p in again]
        asked = [(p, d) for d in dtypes for p in again]
        self._take(asked, self._ask(asked))

    def _refused_whole(self, probe: Probe, dtype: str) -> bool:
        outcome = self._outcomes.get((probe.name, dtype))
        return outcome is not None and outcome.status == "unsupported"

    @property
    def _answered(self) -> list[Probe]:
        """The probes that gave numbers."""
        return [self.probe_of(case) for case in self.cases]

    @property
    def _results(self) -> set[str]:
        """The results that the candidate has been seen to return, and that may take a cotangent."""
        found = {name for outcome in self._outcomes.values() for name in outcome.fields}
        return found - {"lse"} if self.candidate.conventions.lse_gradient is False else found

    def recorded(self) -> None:
        """A recorded call: its own inputs are the only probe."""
        for recorded, outcome in zip(self.candidate.recorded, self.candidate.run(self.candidate.recorded), strict=True):
            for name, x in self.fixed.items():
                if name in recorded.options and not np.array_equal(recorded.options[name], x):
                    raise UsageError(f"options: {name} is {x!r}, and {recorded.options[name]!r} in the recorded call")
            call = dataclasses.replace(recorded, options={**recorded.options, **self.fixed})
            given = call.arrays | call.options
            dtype = next(
                x.dtype.name for x in given.values() if isinstance(x, np.ndarray) and arrays.is_real_floating(x.dtype)
            )
            cotangents = dict(call.cotangents or {})
            probe = Probe(call.id, "the recorded call", given, tuple(call.arrays), cotangents, call.wrt)
            self._settle((probe, dtype), outcome, call)

    # ------------------------------------------------------------------ capabilities

    def _ask_capabilities(self) -> list[Asked]:
        """The plainest call, then each shape and each option alone; what is refused is left out from then on."""
        dtype = self.dtypes[0]
        entries = self.plan.alone()
        plain = self.plan.build(entries[0])
        if plain is None and self.fixed:  # they may want other shapes
            plain = next((p for e in entries if e.about == "shape" and (p := self.plan.build(e)) is not None), None)
            if plain is None:
                reason = self.plan.refused[entries[0].name]
                raise UsageError(f"options: {_words(self.fixed)} fit no probe of {self.mechanism.name}: {reason}")
        if plain is not None and not self._fits_signature(plain):
            plain = None
        asked: list[Asked] = []
        if plain is not None:
            outcome = self._ask([(plain, dtype)])[0]
            if outcome.status in ("error", "unsupported") and self.candidate.abilities.resize:
                plain, outcome = self._ask_sizes(plain, dtype, outcome)
            self.capabilities.answer(capabilities_of(plain), outcome)
            self._settle((plain, dtype), outcome)
            asked.append((plain, dtype))
            for other in self.dtypes[1:]:
                outcome = self._ask([(plain, other)])[0]
                if outcome.status in ("error", "unsupported"):
                    self.capabilities.refuse(other, outcome.message)
                    self._refusal(other, other, outcome)
                else:
                    self._settle((plain, other), outcome)
        for about in ("capability", "shape", None):  # options are asked with the shapes that were answered
            names = [e for e in entries[1:] if (e.about if e.about in ("capability", "shape") else None) == about]
            batch = self._possible([p for entry in names if (p := self.plan.build(entry)) is not None])
            asked += self._ask_alone(batch, dtype)
        return asked

    def _ask_alone(self, batch: Sequence[Probe], dtype: str) -> list[Asked]:
        """Calls that ask for something new: those that were answered; the others say what is not taken."""
        asked = [(probe, dtype) for probe in batch]
        return self._take(asked, self._ask(asked))

    def _take(self, asked: Sequence[Asked], outcomes: Sequence[Outcome]) -> list[Asked]:
        """Rows for outcomes; an exception on the first call that asks for something says that it is not taken.

        Returns the calls that count.
        """
        answers = list(zip(asked, outcomes, strict=False))
        for (probe, _), outcome in answers:
            self.capabilities.answer(capabilities_of(probe), outcome)
        counted: list[Asked] = []
        for (probe, dtype), outcome in answers:
            names = capabilities_of(probe)
            unknown = self.capabilities.unknown(names)
            if outcome.status in ("error", "unsupported") and unknown and not self.candidate.patience.over:
                for name in unknown:
                    self.capabilities.refuse(name, outcome.message)
                self._refusal(probe.name, ", ".join(sorted(unknown)), outcome)
            elif outcome.status == "ok" or not any(self.capabilities.refused(n) for n in names):
                self._settle((probe, dtype), outcome)
                counted.append((probe, dtype))
        return counted

    def _ask_sizes(self, plain: Probe, dtype: str, outcome: Outcome) -> tuple[Probe, Outcome]:
        """The plainest call was refused: which sizes does it take?"""
        start = self.capabilities.limits
        friendly = self.capabilities.friendly()
        last: tuple[Probe, Outcome] | None = None
        for limits in friendly:
            self.capabilities.limits = limits
            probe = self.plan.again(plain)
            if probe is None or probe.shapes == plain.shapes:
                continue
            answer = self._ask([(probe, dtype)])[0]
            if answer.status not in ("error", "unsupported"):
                last = (probe, answer)
                break
        if last is None:
            self.capabilities.limits = start
            return plain, outcome
        for wider in self.capabilities.relaxations():
            kept, self.capabilities.limits = self.capabilities.limits, wider
            probe = self.plan.again(plain)
            if probe is None:
                self.capabilities.limits = kept
                continue
            answer = self._ask([(probe, dtype)])[0]
            if answer.status in ("error", "unsupported"):
                self.capabilities.limits = kept
            else:
                last = (probe, answer)
        says = f"other sizes are refused ({outcome.message}); it is called with {self.capabilities.limits.words()}"
        self._note(says)
        return last

    def _possible(self, probes: Sequence[Probe]) -> list[Probe]:
        """Those that the signature can take; the others become rows that say why not."""
        kept, shapes = [], set()
        for probe in probes:
            if not set(probe.named) <= self.takes or not self.capabilities.allows(probe.sizes):
                continue
            key = (tuple(sorted(probe.features.items())), probe.shapes)
            if key in shapes or not self._fits_signature(probe):
                continue
            shapes.add(key)
            kept.append(probe)
        return kept

    def _fits_signature(self, probe: Probe) -> bool:
        refused = [n for n in probe.options if self.capabilities.refused(n)]
        ok, reason = self.candidate.accepts(probe.options)
        if ok and not refused:
            return True
        if not refused:
            self.rows.append(Row(probe.name, "", probe.says, "not run", message=reason))
        return False

    def _refusal(self, name: str, what: str, outcome: Outcome) -> None:
        needed = self.capabilities.required(what)
        status = "error" if needed else "not supported"
        words = f"{what} is required, and refused" if needed else f"does not take {what}"
        self.rows.append(
            Row(name, "", what, status, message=f"{words} ({outcome.message})", traceback=outcome.traceback)
        )

    def _say_what_was_left_out(self) -> None:
        """Fixed options that did not fit, options of the signature that no call reached, gradients that nobody gave."""
        if self.fixed and self.plan.refused:
            reason = next(iter(self.plan.refused.values()))
            message = f"the fixed options do not fit: {reason}"
            self.rows += [Row(name, "", name, "not run", message=message) for name in self.plan.refused if name]
        reached = {n for case in self.cases for n in case.truth.question.options}
        for name in self.mechanism.options:
            if name in self.mechanism.positional or name in reached or name in CONVENTION_OPTIONS:
                continue
            if self.candidate.names(name) and not self.capabilities.refused(name):
                self._note(f"{name} is in the signature; no probe that ran used it")
        if self.gradients and self.cases and not any(n.startswith("d_") for case in self.cases for n in case.judged):
            self._note("gradients were asked for, and none was checked")

    # ------------------------------------------------------------------ calls

    def call_of(self, probe: Probe, dtype: str, name: str = "") -> Call:
        """The call of a probe in a dtype."""
        arguments, cotangents = probe.stored(dtype)
        return Call(
            id=name or probe.name,
            mechanism=self.mechanism.name,
            arrays={n: arguments.get(n) for n in probe.positional},
            options={n: x for n, x in arguments.items() if n not in probe.positional},
            cotangents=cotangents if self.gradients and probe.wrt else None,
            wrt=probe.wrt if self.gradients else (),
            seconds=self.seconds,
            bytes=self.memory,
        )

    def _ask(self, asked: Sequence[Asked]) -> list[Outcome]:
        calls = [self.call_of(probe, dtype, f"{i}/{probe.name}/{dtype}") for i, (probe, dtype) in enumerate(asked)]
        report = self.progress

        def tell(done: int, total: int) -> None:
            if report is not None:
                report(done, total, calls[min(done, total - 1)].id.partition("/")[2])

        return self.candidate.run(calls, tell)

    def probe_of(self, call: JudgedCall) -> Probe:
        """The probe of a judged call: its features, arguments before rounding, sizes, seed."""
        return self._probes[id(call)]

    def again(
        self,
        call: JudgedCall,
        *,
        drop: Sequence[str] = (),
        values: Mapping[str, np.ndarray] | None = None,
        sizes: Mapping[str, int] | None = None,
        seed: int | None = None,
    ) -> JudgedCall | None:
        """A judged call once more, changed: features taken off, other values, other lengths, another draw.

        Parameters
        ----------
        drop
            Features (keys of ``probe_of(call).features``) or options that are left out.
        values
            Arrays by argument name, cotangents as ``d_output`` ..., that replace what was drawn.
        sizes
            Axis lengths by letter.
        seed
            Another draw.

        Returns
        -------
        JudgedCall or None
            None where the mechanism or the candidate does not allow it, gives no numbers, or :attr:`budget` is spent.
        """
        able = self.candidate.abilities
        if self.budget.spent or not able.values or (sizes and not able.resize):
            return None
        try:
            probe = self._changed(self.probe_of(call), drop, sizes, seed)
        except Impossible:
            return None
        for name, x in (values or {}).items():
            own = name.removeprefix("d_")
            if own != name and own in probe.cotangents:
                probe = dataclasses.replace(probe, cotangents={**probe.cotangents, own: x})
            else:
                probe = dataclasses.replace(probe, arguments={**probe.arguments, name: x})
        limit = min(self.seconds, 5.0)
        start = time.perf_counter()
        (outcome,) = self.candidate.run([dataclasses.replace(self.call_of(probe, call.dtype), seconds=limit)])
        self.budget.charge(time.perf_counter() - start, outcome)
        if outcome.status != "ok":
            return None
        try:
            return self._judged((probe, call.dtype), outcome)[0]
        except (ValueError, TypeError, ReferenceNaNError):
            return None

    def _changed(self, probe: Probe, drop: Sequence[str], sizes: Mapping[str, int] | None, seed: int | None) -> Probe:
        """The probe drawn anew; options that belong to no feature are simply left out.

        Raises
        ------
        Impossible
            The mechanism or the candidate does not allow it.
        """
        if not drop and not sizes and seed is None:
            return probe
        passing = self.plan.features_that_pass(drop)
        features = [n for n in probe.features if n in drop or n in passing]
        if probe.features or sizes or seed is not None:
            probe = redraw(
                self.mechanism,
                probe,
                features=self.plan.taken(),
                drop=features,
                sizes=sizes,
                seed=seed,
                fixed=self.fixed,
                fit=self._fit,
            )
        left = {n: x for n, x in probe.arguments.items() if n not in drop or n in self.mechanism.positional}
        probe = dataclasses.replace(probe, arguments=left, wrt=tuple(n for n in probe.wrt if n in left))
        if not self.capabilities.allows(probe.sizes) or not self.candidate.accepts(probe.options)[0]:
            raise Impossible("the candidate does not take it")
        return probe

    # ------------------------------------------------------------------ judging

    def _truth(self, call: Call, dtype: str, outcome: Outcome) -> Truth:
        reached = outcome.cotangents or ("output",)
        cotangents = {n: x for n, x in (call.cotangents or {}).items() if n in reached}
        pulled = outcome.gradients or outcome.due or outcome.backward_failed
        cotangents = cotangents if pulled else {}
        question = Question(
            mechanism=self.mechanism,
            arrays=call.arrays,
            options=call.options,
            cotangents=cotangents,
            wrt=call.wrt if cotangents else (),
            dtype=dtype,
            conventions=self.candidate.conventions,
            takes=self.takes,
            backend=self.backend,
        )
        return truth_of(question)

    def _judged(self, asked: Asked, outcome: Outcome, call: Call | None = None) -> tuple[JudgedCall, list[Judgement]]:
        """The judged call, and all its verdicts: those of arrays that are no numbers, or of another dtype, too."""
        probe, dtype = asked
        call = call or self.call_of(probe, dtype)
        truth = self._truth(call, dtype, outcome)
        leak = probe.poison and self.candidate.conventions.masked_nan == "may_leak"
        got = _arrays(outcome)
        judgements = self._judgements(call, truth, outcome, got, leak)
        numbers = {n: x for n, x in got.items() if n in truth.values and arrays.is_real_floating(x.dtype)}
        kept = tuple(j for j in judgements if j.array in numbers and not j.says.startswith("dtype"))
        case = JudgedCall(probe.name, dtype, probe.size, truth, numbers, kept, leak)
        self._probes[id(case)] = probe
        self._alive.append(case)
        return case, judgements

    def _settle(self, asked: Asked, outcome: Outcome, call: Call | None = None) -> None:
        """A row of the report, and the judged call where there are numbers."""
        probe, dtype = asked
        about: dict[str, Any] = {"probe": probe.name, "dtype": dtype, "says": probe.says, "seconds": outcome.seconds}
        self._outcomes[probe.name, dtype] = outcome
        if outcome.status != "ok":
            status = "not run" if outcome.status == "unsupported" else outcome.status
            self.rows.append(Row(**about, status=status, message=outcome.message, traceback=outcome.traceback))
            return
        case, judgements = self._judged(asked, outcome, call)
        if case.leak and "output" in case.got and np.isnan(case.got["output"].astype(np.float64)).any():
            self._note(
                "a NaN that is masked leaks into other rows (0 * NaN), which the conventions allow: not a mismatch"
            )
        message = ""
        if outcome.mutated:
            message = f"the candidate changed its input {', '.join(outcome.mutated)}"
            self.explain("input_mutation", message, outcome.mutated, probe.name)
        absent = self._absent(outcome, case.truth, judgements)
        if absent:
            says = "no gradient comes back: None, detached or never computed"
            self.explain("gradient_absent", says, tuple(f"d_{n}" for n in absent), probe.name)
        wrong = message or not all(j.ok for j in judgements)
        verdict = "mismatch" if wrong else "ok"
        self.rows.append(Row(**about, status=verdict, judgements=tuple(judgements), message=message))
        self.cases.append(case)

    def _absent(self, outcome: Outcome, truth: Truth, judgements: Sequence[Judgement]) -> list[str]:
        """Gradients that the library must give and that are missing, or zero throughout where they are not."""
        absent = []
        for name in outcome.due:
            got, right = outcome.gradients.get(name), truth.values.get(f"d_{name}")
            if outcome.backward_failed or right is None:
                continue
            zero = got is not None and got.shape == right.shape and not got.any()
            wrong = any(j.array == f"d_{name}" and not j.ok for j in judgements)
            if got is None or (zero and wrong and bool((right != 0).any())):
                absent.append(name)
        return absent

    def _narrow_state(self, state: Any, truth: Truth) -> str:
        """What is wrong with the dtype of a recurrence's state: it is computed on with, so it must not be narrower than that."""
        if not recurrent_features(self.mechanism.name) or state is None or not arrays.is_real_floating(state.dtype):
            return ""
        due = "float32" if arrays.is_half(truth.question.dtype) else truth.question.dtype
        declared = self.candidate.conventions.state_dtype
        narrow = arrays.itemsize(state.dtype) < arrays.itemsize(due)
        allowed = declared is not None and arrays.itemsize(state.dtype) >= arrays.itemsize(declared)
        return f"dtype {state.dtype.name}, expected {due}" if narrow and not allowed else ""

    def _judgements(
        self, call: Call, truth: Truth, outcome: Outcome, got: dict[str, np.ndarray], leak: bool = False
    ) -> list[Judgement]:
        """One verdict for every array that is due, dtypes and missing ones included."""
        judgements = []
        for name in truth.values:
            own = name.removeprefix("d_")
            given = call.arrays.get(own, call.options.get(own))
            exact = name == "output" or (name.startswith("d_") and isinstance(given, np.ndarray))
            like = next(x for x in call.arrays.values() if x is not None) if name == "output" else given
            wanted = getattr(like, "dtype", None)
            if name == "state" and (late := self._narrow_state(got.get(name), truth)):
                judgements.append(Judgement(name, "mismatch", np.inf, np.inf, says=late))
                continue
            verdict = judge(name, got.get(name), truth, dtype=wanted if exact else None, leak=leak)
            if name.startswith("d_") and got.get(name) is None:
                missing = outcome.backward_failed or (own in outcome.due and "absent: the library gives no gradient")
                if missing:
                    verdict = Judgement(name, "mismatch", np.inf, np.inf, says=missing)
            judgements.append(verdict)
        if self.gradients and not any(n.startswith("d_") for n in truth.values):
            judgements += [
                Judgement(f"d_{n}", "not provided", says=outcome.message or "not provided") for n in call.wrt
            ]
        if "output" not in got:
            judgements = [j for j in judgements if j.array != "output"]
            judgements.append(Judgement("output", "mismatch", np.inf, np.inf, says="the candidate gave no output"))
        return [_unasked(j) for j in judgements]

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    # ------------------------------------------------------------------ state, strides, poison

    def _compare_repeat(self, asked: Asked, late: Outcome) -> None:
        """The first call once more at the very end: state left by other calls would show."""
        probe, dtype = asked
        early = self._outcomes[probe.name, dtype]
        if early.status != "ok" or late.status != "ok":
            return
        truth = self._truth(self.call_of(probe, dtype), dtype, early)
        once, twice = self._ask([(probe, dtype), (probe, dtype)])
        apart = _difference(early, late, truth) or _difference(once, twice, truth)
        if apart is None:
            return
        name, units = apart
        if units <= 1.0:
            self._note(f"the results of equal calls differ in their last bits ({name} by {units:.2g} of the bound)")
            return
        varies = once.status == twice.status == "ok" and _difference(once, twice, truth) is not None
        kind = "nondet" if varies else "stale_scratch"
        words = (
            "equal calls give different results"
            if varies
            else "a call gives another result after other calls than before them"
        )
        message = f"{words}: {name} by {units:.3g} of the bound"
        self.explain(kind, message, (name,), probe.name)
        says = "the same call again, after all others"
        self.rows.append(Row(f"{probe.name} (repeated)", dtype, says, "mismatch", message=message))

    def _twins(self) -> None:
        """Failing calls on poisoned or oddly stored arrays once more, clean: if that is right, the poison or the strides are it."""
        failed = [(c, p) for c in self.cases if c.failing and ((p := self.probe_of(c)).poison or not p.in_plain_memory)]
        failed = failed[:_TWINS]
        outcomes = self._ask([(p.clean(), c.dtype) for c, p in failed]) if failed else []
        for (case, probe), outcome in zip(failed, outcomes, strict=True):
            if outcome.status != "ok" or not all(j.ok for j in self._judged((probe.clean(), case.dtype), outcome)[1]):
                continue
            if probe.poison:
                says = "a NaN or a huge number that nobody may see reaches the results; without it they are right"
                self.explain("masked_value_leak", says, case.failing, case.probe)
            else:
                kind = "arrays" if probe.memory != "contiguous" else "cotangents"
                where = probe.memory if kind == "arrays" else probe.memory_of_cotangents
                self.explain(
                    "alias_stride", f"right on contiguous {kind}, wrong on {where} ones", case.failing, case.probe
                )

    def explain(self, name: str, says: str, outputs: Sequence[str], probe: str) -> None:
        """Enter an explanation that comes from how the candidate behaves; equal classes become one."""
        for entry in self.structural:
            if entry["class"] == name:
                entry["outputs"] = sorted({*entry["outputs"], *outputs})
                entry["probes"] = sorted({*entry["probes"], probe})
                return
        self.structural.append(
            {"class": name, "residual": 0.0, "outputs": sorted(outputs), "says": says, "probes": [probe]}
        )


_TWINS, _PARTS = 12, 8


def _words(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{n}={x!r}" for n, x in options.items())


def _arrays(outcome: Outcome) -> dict[str, np.ndarray]:
    return {**outcome.fields, **{f"d_{n}": x for n, x in outcome.gradients.items()}}


def _unasked(judgement: Judgement) -> Judgement:
    """A result other than the output that the candidate does not give is not checked; a gradient is not provided."""
    if judgement.verdict == "not provided" and not judgement.array.startswith("d_"):
        return Judgement(judgement.array, "not checked", says="the candidate does not return it")
    return judgement


def _difference(one: Outcome, other: Outcome, truth: Truth) -> tuple[str, float] | None:
    """The array in which two outcomes of equal calls differ most, in units of the bound; None if they are equal."""
    first, second = _arrays(one), _arrays(other)
    worst: tuple[str, float] | None = None
    for name, x in first.items():
        y = second.get(name)
        if y is None or np.shape(x) != np.shape(y) or np.shape(x) != np.shape(truth.bounds.get(name, np.nan)):
            continue
        units = ratio(y, x, truth.bounds[name])
        if units.size and units.max() > 0 and (worst is None or units.max() > worst[1]):
            worst = (name, float(units.max()))
    return worst
