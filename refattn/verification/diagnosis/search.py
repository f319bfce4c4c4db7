"""Explaining what fails: the smallest failing call first, every hypothesis that fits it, and where each of them holds.

A hypothesis *fits* a call when the elements that are wrong are those that it predicts.  Calls in which it would be seen and is
not bound its scope (:mod:`refattn.verification.diagnosis.scope`); one that no condition keeps apart from such calls is refuted
and never printed.  What an explanation leaves over is explained by the next one.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from refattn.mistakes.engine import edited_steps, source_of_edit
from refattn.verification.diagnosis.calls import JudgedCall
from refattn.verification.diagnosis.hypotheses import TOO_LARGE, Hypothesis, Workbench, sides_worth_trying
from refattn.verification.diagnosis.matching import Match, match, shows
from refattn.verification.diagnosis.readings import Reading, read
from refattn.verification.diagnosis.rows import Place, places_of, tails, wrong_rows
from refattn.verification.diagnosis.scope import Condition, scope_of
from refattn.verification.diagnosis.structure import Finding, findings

__all__ = ["Explanation", "Live", "explain"]

ROUNDS = 6
"""Failing calls that are looked at from scratch, one after the other."""

CLOSEST, FAILING = 40, 24
"""How many passing calls may bound a hypothesis, and how many failing ones it is tried on."""

LARGE = 1 << 19
"""Pairs beyond which a call is no evidence about a hypothesis that was found in another one: it costs too much."""

_SEEN, _PAIRS = 60, 800
"""Mistakes that are combined, and how many pairs are tried."""

PLACES = 8
"""Places that are tried for one hypothesis in one call."""

CANDIDATES, ALIKE = 12, 4
"""Hypotheses of one call that are followed up, and how many that fit alike are printed."""


class Live(Protocol):
    """The candidate at hand: calls may be made again, changed."""

    def again(
        self, call: JudgedCall, *, drop: Sequence[str] = (), values: Mapping[str, Any] | None = None
    ) -> JudgedCall | None:
        """The call without some options, or with other values of some arrays; None where that cannot be called."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One entry of the report; ``as_record`` is its form there."""

    name: str
    says: str
    side: str
    outputs: tuple[str, ...]
    left: tuple[str, ...]
    residual: float
    scope: tuple[Condition, ...]
    place: str
    limited: tuple[str, ...]
    calls: tuple[JudgedCall, ...]
    confirmed: bool
    hypothesis: Hypothesis | None = None

    def as_record(self, failing: int) -> dict[str, Any]:
        steps: list[tuple[str, str, str]] = []
        names: list[str] = []
        for mistake in self.hypothesis.mistakes if self.hypothesis is not None else ():
            steps += source_of_edit(mistake)
            names += edited_steps(mistake)
        scope = ", ".join([c.says for c in self.scope] + [self.place] * bool(self.place))
        return {
            "class": self.name,
            "residual": self.residual,
            "outputs": sorted(self.outputs),
            "says": self.says,
            "scope": scope or "wherever it can be seen",
            "side": self.side,
            "confirmed": self.confirmed,
            "left": sorted(self.left),
            "at some places only": sorted(self.limited),
            "probes": sorted({c.probe for c in self.calls}),
            "share": len(self.calls) / max(1, failing),
            "why": "" if self.hypothesis is None else self.hypothesis.why,
            "step": names[0] if names else None,
            "sources": [{"step": n, "right": a, "edited": b} for n, a, b in steps],
        }


def explain(
    calls: Sequence[JudgedCall], bench: Workbench, *, live: Live | None = None, seconds: float = 8.0
) -> list[Explanation]:
    """Explanations of the failing calls, best first."""
    until = time.process_time() + seconds
    failing = sorted((c for c in calls if c.failing), key=_order)
    passing = sorted((c for c in calls if not c.failing and c.judged), key=_order)
    found: list[Explanation] = []
    left = [c for c in failing if c.pairs <= TOO_LARGE]
    for _ in range(ROUNDS):
        if not left or time.process_time() > until:
            break
        call = left[0]
        if live is not None:
            call, more = minimal(call, live, until)
            failing += [c for c in more if c.failing]
            passing += [c for c in more if not c.failing and c.judged]
        singles = list(sides_worth_trying(call, bench.mistakes))
        best = _of_call(call, [*bench.conventions_, *singles], bench, failing, passing, until)
        if not best and all(n.startswith("d_") for n in call.failing):
            best = _of_call(call, bench.anew, bench, failing, passing, until)
        if not best:
            best = _found_at_places(call, singles, bench, failing, passing, until)
        if not best:
            best = [_from_structure(f, call, failing, passing) for f in findings(call)[:2]]
        if not best:
            pairs = _pairs(call, bench, read(call, live) if live is not None else None)
            best = _of_call(call, pairs, bench, failing, passing, until)
        found += best
        covered = {id(c) for e in best for c in e.calls}
        same = set(call.failing)
        left = [
            c
            for c in left[1:]
            if id(c) not in covered and not (not best and set(c.failing) == same and _options(c) == _options(call))
        ]
    return _unique(found)


def _seen_only(explanation: Explanation, others: Sequence[Explanation]) -> bool:
    """Whether it only says what the numbers look like, where a mistake explains these arrays."""
    named = (e for e in others if e.hypothesis is not None)
    return explanation.hypothesis is None and any(set(explanation.outputs) <= set(e.outputs) for e in named)


def minimal(call: JudgedCall, live: Live, until: float) -> tuple[JudgedCall, list[JudgedCall]]:
    """The call without every option that it fails without just as well, and all calls made on the way."""
    made: list[JudgedCall] = []
    for option in list(_options(call)):
        if time.process_time() > until:
            break
        shorter = live.again(call, drop=(option,))
        if shorter is None:
            continue
        made.append(shorter)
        if shorter.failing and set(shorter.failing) <= set(call.failing):
            call = shorter
    return call, made


# ---------------------------------------------------------------------------------------------- one call


def _of_call(
    call: JudgedCall,
    tried: Sequence[Hypothesis],
    bench: Workbench,
    failing: Sequence[JudgedCall],
    passing: Sequence[JudgedCall],
    until: float,
) -> list[Explanation]:
    """The hypotheses that explain most of a call, as far as other calls do not refute them."""
    fitting: list[tuple[Hypothesis, Match]] = []
    for n, hypothesis in enumerate(tried):
        fit = _fit(hypothesis, call, bench)
        if fit is not None and fit.explained:
            fitting.append((hypothesis, fit))
        if n % 16 == 0 and time.process_time() > until:
            break
    fitting.sort(key=lambda entry: _rank(*entry))
    if fitting and fitting[0][1].left:
        fitting = _with_a_second(call, bench, fitting) + fitting
    explanations: list[Explanation] = []
    for hypothesis, fit in fitting[:CANDIDATES]:
        if explanations and (bool(fit.left), bool(fit.elsewhere)) > (
            bool(explanations[0].left),
            bool(explanations[0].limited),
        ):
            break
        made = _everywhere(hypothesis, fit, call, bench, failing, passing)
        if made is not None:
            explanations.append(made)
    explanations.sort(key=lambda e: (bool(e.left), bool(e.limited), -len(e.calls), len(e.scope)))
    return explanations[:ALIKE]


def _fit(hypothesis: Hypothesis, call: JudgedCall, bench: Workbench) -> Match | None:
    """How a hypothesis fits a call; its gradients are computed only where its results do not speak against it."""
    values = tuple(n for n in call.failing if not n.startswith("d_"))
    predicted = bench.predict(hypothesis, call, gradients=False)
    if values:
        if (
            not predicted
            or not match(call, predicted, tuple(n for n in call.judged if not n.startswith("d_"))).explained
        ):
            return None
    elif hypothesis.side == "both" and predicted and shows(call, predicted):
        return None  # the results are right, and would not be
    return match(call, bench.predict(hypothesis, call))


def _placed(hypothesis: Hypothesis, fit: Match, call: JudgedCall, bench: Workbench) -> Iterator[tuple[Match, Place]]:
    """The hypothesis made at one place alone, for every place where that explains more."""
    rows = wrong_rows(call)
    if rows is None or rows.all() or not hypothesis.mistakes:
        return
    for place in itertools.islice(places_of(rows), PLACES):
        there = _at(hypothesis, place, call, bench)
        better = there is not None and (len(there.left), bool(there.elsewhere)) < (len(fit.left), bool(fit.elsewhere))
        if there is not None and better and there.explained:
            yield there, place


def _at(hypothesis: Hypothesis, place: Place, call: JudgedCall, bench: Workbench) -> Match | None:
    """How the hypothesis fits where it is made at this place; None where the call has no such place."""
    rows = _rows(place, call)
    return None if rows is None else match(call, bench.in_rows(hypothesis, call, rows))


def _rows(place: Place, call: JudgedCall) -> np.ndarray | None:
    output = call.truth.values.get("output")
    return None if output is None else place.of(output.shape[:-1])


def _found_at_places(
    call: JudgedCall,
    tried: Sequence[Hypothesis],
    bench: Workbench,
    failing: Sequence[JudgedCall],
    passing: Sequence[JudgedCall],
    until: float,
) -> list[Explanation]:
    fitting = _at_places(call, tried, bench, until)
    made = [_over_all(h, fit, place, call, bench, failing, passing) for h, fit, place in fitting]
    return sorted((e for e in made if e is not None), key=lambda e: (-len(e.calls), len(e.scope)))[:ALIKE]


def _at_places(
    call: JudgedCall, tried: Sequence[Hypothesis], bench: Workbench, until: float
) -> list[tuple[Hypothesis, Match, Place]]:
    """What explains gradients that are wrong because a mistake of the backward is made in the last rows alone.

    These are summed over rows: none of them tells which.
    """
    output = call.truth.values.get("output")
    if output is None or output.ndim < 3 or any(not n.startswith("d_") for n in call.failing):
        return []
    found: list[tuple[Hypothesis, Match, Place]] = []
    for hypothesis in tried:
        if time.process_time() > until or not hypothesis.mistakes:
            break
        if hypothesis.side != "backward" or not set(call.failing) <= set(bench.predict(hypothesis, call)):
            continue
        for place in itertools.islice(tails(output.shape[-2]), 2):
            fit = _at(hypothesis, place, call, bench)
            if fit is not None and fit.whole and fit.explained:
                found.append((hypothesis, fit, place))
                break
    return found[:CANDIDATES]


def _rank(hypothesis: Hypothesis, fit: Match) -> tuple[Any, ...]:
    order = {"both": 0, "backward": 1, "forward": 1}
    return (
        len(fit.left),
        not fit.telling,
        bool(fit.elsewhere),
        max(fit.elsewhere.values(), default=0.0),
        order[hypothesis.side],
        fit.residual,
    )


def _pairs(call: JudgedCall, bench: Workbench, reading: Reading | None) -> list[Hypothesis]:
    """Two mistakes at once, both of which show in this call by themselves.

    Where the pairs that the candidate sees were read and are not those due: two mistakes about visibility that give just these
    pairs, whether or not one alone would show (causal and a window may hide the same keys).
    """
    possible = [h for h in sides_worth_trying(call, bench.mistakes) if h.side != "forward"]
    if reading is None or not bool((reading.seen[0] != reading.seen[1]).any()):
        shown = [h for h in possible if shows(call, bench.predict(h, call, gradients=h.side == "backward"))]
        return _two_of(_few_of_each(shown), bench)[:_PAIRS]
    about = [h for h in possible if bench.edits_before(h, call, "seen") and not bench.edits_before(h, call, "products")]
    return [h for h in _two_of(_few_of_each(about), bench) if bench.sees(h, call, reading)]


def _two_of(hypotheses: Sequence[Hypothesis], bench: Workbench) -> list[Hypothesis]:
    made = (bench.together(a, b) for a, b in itertools.combinations(hypotheses, 2) if a.name != b.name)
    return [h for h in made if h is not None]


def _few_of_each(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """At most four forms of each class."""
    by_class: dict[str, list[Hypothesis]] = {}
    for h in hypotheses:
        by_class.setdefault(h.name, []).append(h)
    return [h for some in by_class.values() for h in some[:4]][:_SEEN]


def _with_a_second(
    call: JudgedCall, bench: Workbench, fitting: Sequence[tuple[Hypothesis, Match]]
) -> list[tuple[Hypothesis, Match]]:
    """A mistake that explains some of the arrays together with one of the backward that explains the others."""
    found = []
    seconds = [h for h in bench.mistakes if h.side == "backward"]
    for first, fit in fitting[:3]:
        for second in seconds:
            both = bench.together(first, second)
            if both is None:
                continue
            joined = match(call, bench.predict(both, call))
            if set(joined.explained) > set(fit.explained) and not joined.left:
                found.append((both, joined))
    return found[:4]


# ---------------------------------------------------------------------------------------------- all calls


def _everywhere(
    hypothesis: Hypothesis,
    fit: Match,
    call: JudgedCall,
    bench: Workbench,
    failing: Sequence[JudgedCall],
    passing: Sequence[JudgedCall],
) -> Explanation | None:
    """The hypothesis over all calls: where it holds; None where calls inside every possible scope refute it."""
    if fit.left or fit.elsewhere:
        for there, place in _placed(hypothesis, fit, call, bench):
            made = _over_all(hypothesis, there, place, call, bench, failing, passing)
            if made is not None:
                return made
    return _over_all(hypothesis, fit, None, call, bench, failing, passing)


def _over_all(
    hypothesis: Hypothesis,
    fit: Match,
    place: Place | None,
    call: JudgedCall,
    bench: Workbench,
    failing: Sequence[JudgedCall],
    passing: Sequence[JudgedCall],
) -> Explanation | None:
    """The hypothesis, made at a place where there is one, over all calls."""
    elsewhere = None if place is None or place.exact is not None else place
    positive, limited = [call], set(fit.elsewhere)
    residual, outputs, left = fit.residual, set(fit.explained), set(fit.left)
    negative: list[JudgedCall] = []
    for other in _closest(call, failing, FAILING):
        if other is call:
            continue
        there = None if elsewhere is None else _at(hypothesis, elsewhere, other, bench)
        there = _fit(hypothesis, other, bench) if there is None else there
        if there is not None and there.explained:
            positive.append(other)
            limited |= set(there.elsewhere)
            residual = max(residual, there.residual)
            outputs |= set(there.explained)
    for other in _closest(call, passing, CLOSEST):
        if elsewhere is None:
            seen = shows(other, bench.predict(hypothesis, other))
        else:
            rows = _rows(elsewhere, other)
            seen = rows is not None and shows(other, bench.in_rows(hypothesis, other, rows))
        if seen:
            negative.append(other)
    scope = scope_of(positive, negative)
    if scope is None:
        scope = scope_of([call], negative)
        positive = [call]
    if scope is None:
        return None
    return Explanation(
        hypothesis.name, hypothesis.says, hypothesis.side, tuple(outputs), tuple(left), residual, scope,
        "" if place is None else place.says, tuple(limited), tuple(positive), confirmed=len(positive) > 1, hypothesis=hypothesis,
    )  # fmt: skip


def _from_structure(
    finding: Finding, call: JudgedCall, failing: Sequence[JudgedCall], passing: Sequence[JudgedCall]
) -> Explanation:
    alike = [c for c in failing if c is call or any(f.name == finding.name for f in findings(c))]
    scope = scope_of(alike, list(passing)) or scope_of([call], list(passing)) or ()
    left = tuple(n for n in call.failing if n not in finding.arrays)
    return Explanation(
        finding.name,
        finding.says,
        "both",
        finding.arrays,
        left,
        0.0,
        scope,
        "",
        (),
        tuple(alike),
        confirmed=len(alike) > 1,
    )


def _closest(call: JudgedCall, calls: Sequence[JudgedCall], most: int) -> list[JudgedCall]:
    """The calls that are most like this one: the same options, then small ones."""
    mine = set(_options(call))
    calls = [c for c in calls if c is call or c.pairs <= LARGE]
    return sorted(calls, key=lambda c: (len(mine ^ set(_options(c))), _order(c)))[:most]


def _options(call: JudgedCall) -> tuple[str, ...]:
    return tuple(sorted(n for n, x in call.truth.question.options.items() if x is not None))


def _order(call: JudgedCall) -> tuple[int, int, int]:
    """Exact dtypes first, then few options, then small calls."""
    dtypes = ("float64", "float32", "float16", "bfloat16")
    rank = dtypes.index(call.dtype) if call.dtype in dtypes else len(dtypes)
    return rank, len(_options(call)), call.pairs


def _unique(explanations: Sequence[Explanation]) -> list[Explanation]:
    """One entry per class, the one that covers most calls; the most covering classes first."""
    kept: dict[str, Explanation] = {}
    for entry in explanations:
        known = kept.get(entry.name)
        if known is None or len(entry.calls) > len(known.calls):
            kept[entry.name] = entry
    order = {n: (_seen_only(e, explanations), bool(e.left), bool(e.limited), -len(e.calls)) for n, e in kept.items()}
    return sorted(kept.values(), key=lambda e: order[e.name])
