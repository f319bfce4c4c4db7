"""Somebody else's implementation held against refattn: :func:`verify` and :func:`assert_matches`."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from refattn import arrays
from refattn.mechanism import Mechanism, mechanisms
from refattn.verification.candidate import Call, Candidate, Outcome, open_candidate
from refattn.verification.conventions import CONVENTION_OPTIONS, Conventions, UsageError
from refattn.verification.diagnosis import JudgedCall, Workbench, departure, explain
from refattn.verification.probes import Probe
from refattn.verification.probes import probes as designed_probes
from refattn.verification.properties import check_properties
from refattn.verification.question import Question
from refattn.verification.report import Report, Row
from refattn.verification.truth import ReferenceNaNError, Truth, truth_of
from refattn.verification.verdict import Judgement, judge, ratio

__all__ = ["Conventions", "ReferenceNaNError", "Report", "UsageError", "assert_matches", "verify"]

DTYPES = ("float64", "float32", "float16", "bfloat16")
SECONDS, BYTES = 30.0, 4 << 30


def verify(
    candidate: Callable[..., Any] | str,
    mechanism: str | Mechanism,
    *,
    dtypes: str | Sequence[str] = ("float32",),
    gradients: bool | None = None,
    backward: Callable[..., Any] | str | None = None,
    framework: str | None = None,
    layout: str | None = None,
    rename: Mapping[str, str] | None = None,
    supports: Sequence[str] | None = None,
    conventions: Any = None,
    options: Mapping[str, Any] | None = None,
    properties: bool = False,
    jobs: int = 1,
    backend: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Hold an implementation against a mechanism, on probes designed to make every feature visible.

    Parameters
    ----------
    candidate : callable or str
        Called as ``candidate(q, k, v, **options)``.  A callable runs in this process; a target string
        (``module:function``, ``path/file.py:function``, ``model.onnx``, ``command:...``, ``dump.safetensors``) in a child
        process with a limit of 30 s and 4 GiB per call.
    mechanism : str or Mechanism
        What it should be.
    dtypes : sequence of str
        Any of float64, float32, float16, bfloat16.
    gradients : bool, optional
        Also check gradients; default: when ``backward`` is given.
    backward : callable or str, optional
        ``backward(d_output, q, k, v, **options)``; torch and JAX candidates need none.
    framework : str, optional
        "numpy" (default), "torch", "jax", "cupy"; known signatures bring their own.
    layout : str, optional
        Axis order of q, k, v and the output; default "bhld".
    rename : mapping, optional
        Names of the candidate for options of refattn.
    supports : sequence of str, optional
        The options that the candidate has, where its signature does not tell.
    conventions : str, dict or Conventions, optional
        What is by design: a preset's name or a record.
    options : mapping, optional
        Options fixed in every probe.
    properties : bool
        Also run the checks that need no reference.
    jobs : int
        Child processes that share the calls of a target string.
    backend : str, optional
        Backend that computes the reference.
    progress : callable (done, total, label), optional
        Called after each call.

    Returns
    -------
    Report

    Raises
    ------
    UsageError
        Unknown mechanism, dtype, framework ..., or a target that does not load.
    ReferenceNaNError
        The reference itself has a NaN that no input explains.
    """
    found = _mechanism(mechanism)
    chosen = _dtypes(dtypes)
    fixed = {n: tuple(x) if isinstance(x, list) else x for n, x in (options or {}).items()}
    unknown = [n for n in fixed if n not in found.options]
    if unknown:
        near = difflib.get_close_matches(unknown[0], found.options, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"options: {found.name} has no option {unknown[0]!r}{hint}")
    with open_candidate(
        candidate,
        found,
        framework=framework,
        layout=layout,
        rename=rename,
        supports=supports,
        conventions=conventions,
        backward=backward,
        options=fixed,
        jobs=jobs,
    ) as opened:
        wanted = opened.explicit_backward if gradients is None else gradients
        session = _Session(opened, found, chosen, wanted, fixed, backend, progress)
        return session.recorded() if opened.recorded else session.run(properties)


def assert_matches(candidate: Callable[..., Any] | str, mechanism: str | Mechanism, **settings: Any) -> Report:
    """:func:`verify` for tests.

    Raises
    ------
    AssertionError
        With the table of the report, unless the candidate matches.
    """
    report = verify(candidate, mechanism, **settings)
    if not report.ok:
        raise AssertionError("\n" + report.table())
    return report


def _mechanism(given: str | Mechanism) -> Mechanism:
    if isinstance(given, Mechanism):
        return given
    if given not in mechanisms:
        near = difflib.get_close_matches(given, mechanisms, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there is {', '.join(mechanisms)}"
        raise UsageError(f"there is no mechanism {given!r}{hint}")
    return mechanisms[given]


def _dtypes(given: str | Sequence[str]) -> tuple[str, ...]:
    names = (
        tuple(n.strip() for n in given.split(",")) if isinstance(given, str) else tuple(map(arrays.dtype_name, given))
    )
    for name in names:
        if name not in DTYPES:
            raise UsageError(f"dtypes: {name!r} is not known here; expected some of {', '.join(DTYPES)}")
    if not names:
        raise UsageError(f"dtypes is empty; expected some of {', '.join(DTYPES)}")
    return names


class _Session:
    """One verification: probes out, outcomes in, judged and explained."""

    def __init__(
        self,
        candidate: Candidate,
        mechanism: Mechanism,
        dtypes: tuple[str, ...],
        gradients: bool,
        fixed: dict[str, Any],
        backend: str | None,
        progress: Callable[[int, int, str], None] | None,
    ) -> None:
        self.candidate, self.mechanism, self.dtypes, self.gradients = candidate, mechanism, dtypes, gradients
        self.fixed, self.backend, self.progress = fixed, backend, progress
        self.takes = frozenset(n for n in CONVENTION_OPTIONS if candidate.takes(n))
        self.rows: list[Row] = []
        self.cases: list[JudgedCall] = []
        self._probes: dict[int, Probe] = {}  # of the judged calls
        self.notes: list[str] = []
        self.explained: list[dict[str, Any]] = []
        self.order: list[str] = []  # names of the probes as they were made

    # ------------------------------------------------------------------ the run

    def run(self, properties: bool) -> Report:
        first, gqa, value_size = self._preflight()
        planned, skipped = self._plan(gqa, value_size, {probe.name for probe, _ in first})
        self.rows.extend(skipped)
        asked = [(probe, dtype) for dtype in self.dtypes for probe in planned]
        asked += [(probe, dtype) for probe, used in first for dtype in self.dtypes if dtype != used]
        outcomes = self._ask([*asked, *((probe, dtype) for probe, dtype in self._repeats(asked))])
        for (probe, dtype), outcome in zip(asked, outcomes, strict=False):
            self._judge(probe, dtype, outcome)
        self._compare_repeats(asked, outcomes)
        self._twins(planned)
        found = self._properties() if properties else ()
        return self._report(found)

    def _properties(self) -> tuple[dict[str, Any], ...]:
        found = check_properties(
            self.mechanism, self.candidate.run, self.dtypes[0], lambda names: self.candidate.accepts(names)[0]
        )
        if not found:
            self._note("no check without a reference applies here")
        return tuple(found)

    def recorded(self) -> Report:
        """A recorded call: its own inputs are the only probe."""
        calls = self.candidate.recorded
        for call, outcome in zip(calls, self.candidate.run(calls), strict=True):
            given = call.arrays | call.options
            dtype = next(
                x.dtype.name for x in given.values() if isinstance(x, np.ndarray) and arrays.is_real_floating(x.dtype)
            )
            probe = Probe(
                call.id, "the recorded call", given, tuple(call.arrays), dict(call.cotangents or {}), call.wrt
            )
            self._judge(probe, dtype, outcome, call)
        return self._report()

    def _preflight(self) -> tuple[list[tuple[Probe, str]], bool, bool]:
        """Try grouped heads and value channels of another number first: where they are refused, later probes avoid them."""
        dtype = self.dtypes[0]
        equal = self.candidate.conventions.channels == "equal"
        made = {p.name: p for p in designed_probes(self.mechanism, options=self.fixed, value_size=not equal)}
        tried = [
            p
            for n in ("plain", "grouped_heads", "value_channels")
            if (p := made.get(n)) is not None and self._possible(p)[0]
        ]
        if "grouped_heads" not in made:
            return [], True, not equal
        if equal:
            tried = [p for p in tried if p.name != "value_channels"]
        outcomes = dict(zip((p.name for p in tried), self._ask([(p, dtype) for p in tried]), strict=True))
        for probe in tried:
            self._judge(probe, dtype, outcomes[probe.name])
        able = {n: n in outcomes and outcomes[n].status == "ok" for n in ("plain", "grouped_heads", "value_channels")}
        if not able["plain"]:  # it says nothing about shapes
            return [(p, dtype) for p in tried], True, not equal
        for name, words in (
            ("grouped_heads", "as many key heads as query heads"),
            ("value_channels", "as many value as key channels"),
        ):
            if name in outcomes and not able[name]:
                status = outcomes[name].status
                hint = "; where it is not meant to take them, NotImplementedError says so" if status == "error" else ""
                self.notes.append(f"{name} was answered by {status}: every other probe has {words}{hint}")
        return [(p, dtype) for p in tried], able["grouped_heads"], able["value_channels"] and not equal

    def _plan(self, gqa: bool, value_size: bool, done: set[str]) -> tuple[list[Probe], list[Row]]:
        def accepts(names: tuple[str, ...]) -> bool:
            return self.candidate.accepts(names)[0]

        planned, skipped = [], []
        made = designed_probes(self.mechanism, options=self.fixed, accepts=accepts, gqa=gqa, value_size=value_size)
        self.order = [probe.name for probe in made]
        for probe in made:
            if probe.name in done or not set(probe.named) <= self.takes:
                continue
            if probe.name in ("grouped_heads", "value_channels") and not any(probe.shapes.values()):
                continue
            possible, reason = self._possible(probe)
            if possible:
                planned.append(probe)
            else:
                skipped.append(Row(probe.name, "", probe.says, "not run", message=reason))
        return planned, skipped

    def _possible(self, probe: Probe) -> tuple[bool, str]:
        return self.candidate.accepts(probe.options)

    def _ask(self, asked: Sequence[tuple[Probe, str]]) -> list[Outcome]:
        calls = [self._call(probe, dtype, f"{i}/{probe.name}/{dtype}") for i, (probe, dtype) in enumerate(asked)]
        report = self.progress

        def tell(done: int, total: int) -> None:
            if report is not None:
                report(done, total, calls[min(done, total - 1)].id.partition("/")[2])

        return self.candidate.run(calls, tell)

    def _call(self, probe: Probe, dtype: str, name: str) -> Call:
        arguments, cotangents = probe.stored(dtype)
        return Call(
            id=name,
            mechanism=self.mechanism.name,
            arrays={n: arguments.get(n) for n in probe.positional},
            options={n: x for n, x in arguments.items() if n not in probe.positional},
            cotangents=cotangents if self.gradients and probe.wrt else None,
            wrt=probe.wrt if self.gradients else (),
            seconds=SECONDS,
            bytes=BYTES,
        )

    # ------------------------------------------------------------------ judging

    def _truth(self, call: Call, dtype: str, outcome: Outcome) -> Truth:
        reached = outcome.cotangents or ("output",)
        cotangents = {n: x for n, x in (call.cotangents or {}).items() if n in reached} if outcome.gradients else {}
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

    def _judge(self, probe: Probe, dtype: str, outcome: Outcome, call: Call | None = None) -> None:
        call = call or self._call(probe, dtype, probe.name)
        about: dict[str, Any] = {"probe": probe.name, "dtype": dtype, "says": probe.says, "seconds": outcome.seconds}
        if outcome.status != "ok":
            status = "not run" if outcome.status == "unsupported" else outcome.status
            self.rows.append(Row(**about, status=status, message=outcome.message, traceback=outcome.traceback))
            return
        self.rows.append(self._row(about, probe, call, outcome, dtype))

    def _row(self, about: dict[str, Any], probe: Probe, call: Call, outcome: Outcome, dtype: str) -> Row:
        truth = self._truth(call, dtype, outcome)
        leak = probe.poison and self.candidate.conventions.masked_nan == "may_leak"
        got = {**outcome.fields, **{f"d_{n}": x for n, x in outcome.gradients.items()}}
        judgements = self._judgements(call, truth, outcome, got, leak)
        if leak and "output" in got and np.isnan(got["output"].astype(np.float64)).any():
            self._note(
                "a NaN that is masked leaks into other rows (0 * NaN), which the conventions allow: not a mismatch"
            )
        message = ""
        if outcome.mutated:
            message = f"the candidate changed its input {', '.join(outcome.mutated)}"
            self._structural("input_mutation", message, outcome.mutated, probe.name)
        wrong = message or not all(j.ok for j in judgements)
        row = Row(**about, status="mismatch" if wrong else "ok", judgements=tuple(judgements), message=message)
        numbers = {n: x for n, x in got.items() if n in truth.values and arrays.is_real_floating(x.dtype)}
        kept = tuple(j for j in judgements if j.array in numbers and not j.says.startswith("dtype"))
        judged = JudgedCall(probe.name, dtype, probe.size, truth, numbers, kept, leak)
        self.cases.append(judged)
        self._probes[id(judged)] = probe
        return row

    # ------------------------------------------------------------------ what diagnosis asks

    def again(
        self, call: JudgedCall, *, drop: Sequence[str] = (), values: Mapping[str, Any] | None = None
    ) -> JudgedCall | None:
        """A judged call once more, without some options or with other values of some arrays."""
        probe = self._probes[id(call)]
        arguments = {n: x for n, x in probe.arguments.items() if n not in drop} | dict(values or {})
        name = f"{probe.name} without {', '.join(drop)}" if drop else f"{probe.name} with other values"
        changed = dataclasses.replace(
            probe, name=name, arguments=arguments,
            wrt=tuple(n for n in probe.wrt if n not in drop),
        )  # fmt: skip
        (outcome,) = self._ask([(changed, call.dtype)])
        if outcome.status != "ok":
            return None
        about = {"probe": changed.name, "dtype": call.dtype, "says": probe.says, "seconds": outcome.seconds}
        try:
            self._row(about, changed, self._call(changed, call.dtype, changed.name), outcome, call.dtype)
        except (ValueError, TypeError, ReferenceNaNError):
            return None
        return self.cases.pop()

    def _judgements(
        self, call: Call, truth: Truth, outcome: Outcome, got: dict[str, np.ndarray], leak: bool = False
    ) -> list[Judgement]:
        """One verdict for every array that is due, dtypes and missing ones included."""
        judgements = []
        for name in truth.values:
            given = call.arrays.get(name.removeprefix("d_"), call.options.get(name.removeprefix("d_")))
            exact = name == "output" or (name.startswith("d_") and isinstance(given, np.ndarray))
            like = next(x for x in call.arrays.values() if x is not None) if name == "output" else given
            wanted = getattr(like, "dtype", None)
            judgements.append(judge(name, got.get(name), truth, dtype=wanted if exact else None, leak=leak))
        if self.gradients and not outcome.gradients:
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

    # ------------------------------------------------------------------ environment: state, strides, poison

    def _repeats(self, asked: Sequence[tuple[Probe, str]]) -> list[tuple[Probe, str]]:
        """The first call once more at the very end: state left by other calls would show."""
        return list(asked[:1])

    def _compare_repeats(self, asked: Sequence[tuple[Probe, str]], outcomes: Sequence[Outcome]) -> None:
        if not asked or len(outcomes) <= len(asked):
            return
        probe, dtype = asked[0]
        early, late = outcomes[0], outcomes[len(asked)]
        if early.status != "ok" or late.status != "ok":
            return
        again = self._ask([(probe, dtype), (probe, dtype)])
        truth = self._truth(self._call(probe, dtype, probe.name), dtype, early)
        apart = _difference(early, late, truth)
        if apart is None:
            return
        name, units = apart
        if units <= 1.0:
            self.notes.append(
                f"the results of equal calls differ in their last bits ({name} by {units:.2g} of the bound)"
            )
            return
        varies = again[0].status == again[1].status == "ok" and _difference(again[0], again[1], truth) is not None
        kind = "nondet" if varies else "stale_scratch"
        words = (
            "equal calls give different results"
            if varies
            else "a call gives another result after other calls than before them"
        )
        message = f"{words}: {name} by {units:.3g} of the bound"
        self._structural(kind, message, (name,), probe.name)
        self.rows.append(
            Row(f"{probe.name} (repeated)", dtype, "the same call again, after all others", "mismatch", message=message)
        )

    def _twins(self, planned: Sequence[Probe]) -> None:
        """Failing calls on poisoned or oddly stored arrays once more, clean: if that is right, the poison or the strides are it."""
        special = {p.name: p for p in planned if p.poison or p.memory != "contiguous"}
        failed = [
            (special[r.probe], r.dtype) for r in self.rows if r.probe in special and r.status in ("mismatch", "error")
        ]
        if not failed:
            return
        clean = [(probe.clean(), dtype) for probe, dtype in failed]
        for (probe, dtype), (twin, _), outcome in zip(failed, clean, self._ask(clean), strict=True):
            if outcome.status != "ok":
                continue
            call = self._call(twin, dtype, twin.name)
            got = {**outcome.fields, **{f"d_{n}": x for n, x in outcome.gradients.items()}}
            if not all(j.ok for j in self._judgements(call, self._truth(call, dtype, outcome), outcome, got)):
                continue
            row = next(r for r in self.rows if r.probe == probe.name and r.dtype == dtype)
            if row.status == "mismatch" and all(j.ok for j in row.judgements):
                continue  # its results are right: another fault, a changed input, was found there
            arrays_ = tuple(j.array for j in row.judgements if not j.ok)
            if probe.poison:
                says = "a NaN or a huge number that nobody may see reaches the results; without it they are right"
                self._structural("masked_value_leak", says, arrays_, probe.name)
            else:
                says = f"right on contiguous arrays, wrong on {probe.memory} ones"
                self._structural("alias_stride", says, arrays_, probe.name)

    def _structural(self, name: str, says: str, outputs: Sequence[str], probe: str) -> None:
        for entry in self.explained:
            if entry["class"] == name:
                entry["outputs"] = sorted({*entry["outputs"], *outputs})
                entry["probes"] = sorted({*entry["probes"], probe})
                return
        self.explained.append(
            {"class": name, "residual": 0.0, "outputs": sorted(outputs), "says": says, "probes": [probe]}
        )

    # ------------------------------------------------------------------ the report

    def _report(self, found: tuple[dict[str, Any], ...] = ()) -> Report:
        for row in self.rows:
            if row.status == "timeout":
                self._structural("hang", f"no answer within {SECONDS:g} s", (), row.probe)
        covered = {probe for entry in self.explained for probe in entry["probes"]}
        open_cases = [c for c in self.cases if not (c.failing and c.probe in covered)]
        failing = sum(bool(c.failing) for c in open_cases)
        bench = Workbench(self.mechanism, self.candidate.conventions)
        live = None if self.candidate.recorded else self
        found_causes = explain(open_cases, bench, live=live)
        departs = departure(self.cases, bench, found_causes, live)
        explanations = [e.as_record(failing) for e in found_causes] + self.explained
        if any(row.status == "mismatch" for row in self.rows) and not explanations:
            self.notes.extend(_structure(self.cases))
        if self.candidate.where == "this process":
            self.notes.append("the candidate ran in this process: a crash or a hang would have ended it")
        place = {dtype: i for i, dtype in enumerate(("", *self.dtypes))}
        rank = {name: i for i, name in enumerate(self.order)}
        rows = sorted(self.rows, key=lambda r: (place.get(r.dtype, len(place)), rank.get(r.probe, len(rank))))
        return Report(
            self.mechanism.name, self.candidate.describe(), tuple(rows), explanations, tuple(self.notes), found,
            departs.as_record(), tuple(departs.sentences),
        )  # fmt: skip


def _unasked(judgement: Judgement) -> Judgement:
    """A result other than the output that the candidate does not give is not checked; a gradient is not provided."""
    if judgement.verdict == "not provided" and not judgement.array.startswith("d_"):
        return Judgement(judgement.array, "not checked", says="the candidate does not return it")
    return judgement


def _difference(one: Outcome, other: Outcome, truth: Truth) -> tuple[str, float] | None:
    """The array in which two outcomes of equal calls differ most, in units of the bound; None if they are equal."""
    first = {**one.fields, **{f"d_{n}": x for n, x in one.gradients.items()}}
    second = {**other.fields, **{f"d_{n}": x for n, x in other.gradients.items()}}
    worst: tuple[str, float] | None = None
    for name, x in first.items():
        y = second.get(name)
        if y is None or np.shape(x) != np.shape(y) or np.shape(x) != np.shape(truth.bounds.get(name, np.nan)):
            continue
        units = ratio(y, x, truth.bounds[name])
        if units.size and units.max() > 0 and (worst is None or units.max() > worst[1]):
            worst = (name, float(units.max()))
    return worst


def _structure(cases: Sequence[JudgedCall]) -> list[str]:
    """What the errors look like, where nothing in the catalogue explains them."""
    failing = sorted((c for c in cases if c.failing), key=lambda c: c.size)
    sentences = ["no mistake of the catalogue and no other convention explains the mismatch"]
    outputs = [c.got["output"].astype(np.float64) for c in cases if "output" in c.got]
    if outputs and all(not x.any() for x in outputs):
        sentences.append("the output is zero everywhere")
    for name in ("q", "v"):
        same = [
            np.array_equal(c.got["output"], c.truth.question.arrays[name])
            for c in cases
            if "output" in c.got and c.truth.question.arrays.get(name) is not None
        ]
        if same and any(same):
            sentences.append(f"the output is the input {name} where the shapes allow it")
    for case in failing[:1]:
        for j in case.judgements:
            if not j.ok:
                sentences.append(f"smallest failing probe {case.probe} ({case.dtype}): {j.array}: {j.says}")
    return sentences
