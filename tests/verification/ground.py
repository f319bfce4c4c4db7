"""Probes of one mechanism with truth and right verdicts, made once for many candidates that run in this process."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from verification.calibrate import question_of

from refattn.mechanism import Mechanism
from refattn.verification.causes import Causes, causes_of
from refattn.verification.diagnosis import JudgedCall, Workbench
from refattn.verification.probes import Impossible, Plan, Probe, redraw, storage_dtype
from refattn.verification.truth import ReferenceNaNError, truth_of
from refattn.verification.verdict import judge


def few_of(probes: Sequence[Probe], most: int) -> list[Probe]:
    """Small probes in which every level of every feature stands, filled up with others."""
    seen: set[tuple[str, str]] = set()
    chosen, rest = [], []
    for probe in sorted(probes, key=lambda p: p.size):
        new = set(probe.features.items()) - seen
        (chosen if new or not probe.features else rest).append(probe)
        seen |= new
    kept = {id(p) for p in (chosen + rest)[: max(most, len(chosen))]}
    return [p for p in probes if id(p) in kept]


class Ground:
    """What all candidates share, in one dtype.

    ``accepts``: the options that they take (conventions are none of them); ``cotangents``: the results whose cotangents they take,
    None = all; ``largest``, ``most``: the size of a probe and the number of probes, at most.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        dtype: str,
        bench: Workbench,
        *,
        accepts: Callable[[tuple[str, ...]], bool] | None = None,
        cotangents: Sequence[str] | None = None,
        seed: int = 0,
        largest: int | None = None,
        most: int | None = None,
    ) -> None:
        self.mechanism, self.dtype, self.bench, self.cotangents = mechanism, dtype, bench, cotangents
        self.plan = Plan(mechanism, accepts=accepts, seed=seed)
        self.accepts = accepts or (lambda names: True)
        self._made: dict[Any, JudgedCall | None] = {}
        self._probes: dict[int, Probe] = {}
        first = self.plan.build_all(self.plan.alone())
        found = [p for p in (*first, *self.plan.rest(first)) if self.accepts(p.options)]
        found = [p for p in found if (largest is None or p.size <= largest) and not (p.named and accepts)]
        self.calls = [self.right(p) for p in (found if most is None else few_of(found, most))]

    def probe_of(self, call: JudgedCall) -> Probe:
        return self._probes[id(call.truth)]

    def right(self, probe: Probe) -> JudgedCall:
        """The call with right arrays; raises what has no answer."""
        question = question_of(self.mechanism, probe, self.dtype)
        if self.cotangents is not None:
            kept = {n: x for n, x in question.cotangents.items() if n in self.cotangents}
            question = dataclasses.replace(question, cotangents=kept, wrt=question.wrt if kept else ())
        truth = truth_of(question)
        self._probes[id(truth)] = probe
        got = {n: self.stored(n, x) for n, x in truth.values.items()}
        judgements = tuple(judge(n, x, truth) for n, x in got.items())
        return JudgedCall(probe.name, self.dtype, probe.size, truth, got, judgements)

    def stored(self, name: str, x: Any) -> np.ndarray:
        """An array as a candidate would give it."""
        wide = name == "lse" and self.dtype in ("bfloat16", "float16")
        with np.errstate(all="ignore"):
            return np.asarray(x).astype("float32" if wide else storage_dtype(self.dtype))

    def changed(self, call: JudgedCall, **change: Any) -> JudgedCall | None:
        """The right call, changed as in ``Session.again``; None where that cannot be called."""
        key = (id(call.truth), _key(change))
        if key not in self._made:
            try:
                self._made[key] = self.right(self._redrawn(self.probe_of(call), **change))
            except (Impossible, ValueError, TypeError, ReferenceNaNError):
                self._made[key] = None
        return self._made[key]

    def clean(self, call: JudgedCall) -> JudgedCall:
        """The call without poison."""
        key = (id(call.truth), "clean")
        if key not in self._made:
            self._made[key] = self.right(self.probe_of(call).clean())
        return self._made[key]

    def _redrawn(
        self,
        probe: Probe,
        drop: Sequence[str] = (),
        values: Mapping[str, np.ndarray] | None = None,
        sizes: Mapping[str, int] | None = None,
        seed: int | None = None,
    ) -> Probe:
        if drop or sizes or seed is not None:
            passing = self.plan.features_that_pass(drop)
            features = [n for n in probe.features if n in drop or n in passing]
            probe = redraw(self.mechanism, probe, features=self.plan.taken(), drop=features, sizes=sizes, seed=seed)
            left = {n: x for n, x in probe.arguments.items() if n not in drop or n in self.mechanism.positional}
            probe = dataclasses.replace(probe, arguments=left, wrt=tuple(n for n in probe.wrt if n in left))
            if not self.accepts(probe.options):
                raise Impossible("the candidate does not take it")
        for name, x in (values or {}).items():
            own = name.removeprefix("d_")
            if own != name and own in probe.cotangents:
                probe = dataclasses.replace(probe, cotangents={**probe.cotangents, own: x})
            else:
                probe = dataclasses.replace(probe, arguments={**probe.arguments, name: x})
        return probe


class Candidate:
    """A candidate at hand: its answers to the calls of the ground, and to others that diagnosis wants (``again``).

    ``answers`` gives its arrays for a right call; None where it does not take the call.  With ``changes`` these are the arrays
    that differ from the right ones, all others are right.
    """

    def __init__(
        self,
        ground: Ground,
        answers: Callable[[JudgedCall], Mapping[str, np.ndarray] | None],
        *,
        changes: bool = False,
        most: int = 200,
    ) -> None:
        self.ground, self._answers, self._changes, self._left = ground, answers, changes, most

    def judged(self, right: JudgedCall) -> JudgedCall | None:
        """Its answer to a call, judged; the right call itself where nothing is said to differ; None where it gives none."""
        arrays = self._answers(right)
        if arrays is None or (self._changes and not arrays):
            return right if self._changes else None
        got = {**right.got, **arrays} if self._changes else dict(arrays)
        verdicts = tuple(
            judge(j.array, got[j.array], right.truth) if j.array in arrays else j
            for j in right.judgements
            if j.array in got
        )
        return dataclasses.replace(right, got=got, judgements=verdicts)

    def again(self, call: JudgedCall, **change: Any) -> JudgedCall | None:
        if self._left <= 0:
            return None
        self._left -= 1
        right = self.ground.changed(call, **change)
        return None if right is None else self.judged(right)

    def causes(self, cases: Sequence[JudgedCall]) -> Causes:
        """What explains the failing calls; a call that fails on poisoned values alone is said to leak."""
        structural = []
        for case in cases:
            if case.failing and self.ground.probe_of(case).poison:
                clean = self.judged(self.ground.clean(case))
                if clean is not None and not clean.failing:
                    entry = {"class": "masked_value_leak", "probes": [case.probe], "outputs": list(case.failing)}
                    structural.append(entry)
        return causes_of(cases, self.ground.bench, live=self, structural=structural)


def _key(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return hashlib.sha256(np.ascontiguousarray(x).tobytes()).digest()
    if isinstance(x, Mapping):
        return tuple((n, _key(y)) for n, y in sorted(x.items()))
    return tuple(x) if isinstance(x, list) else x
