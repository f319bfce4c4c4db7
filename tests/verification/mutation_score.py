"""How many mistakes the verifier catches and names: every one of the catalogues is made, in process, and looked for.

    python tests/verification/mutation_score.py [--mechanism NAME] [--sample N] [--lifted N] [-o docs/mutation_score_table.md]

A mutant is a mistake x a side x a scope: in all calls, under one feature of the call, or at one place (the last head, the last
rows).  Its arrays are those of the right ones with what the mistake gives there, rounded to the dtype.  Probes, truth and bounds
are made once for all mutants of a mechanism.  A mutant that changes no number in any probe is counted apart.  *Caught*: some
probe is a mismatch.  *Named*: the first two explanations have its class, or one that gives the same numbers in every call.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from verification.ground import Candidate, Ground

import refattn as ra
from refattn.verification.conventions import Conventions
from refattn.verification.diagnosis import Hypothesis, JudgedCall, Workbench

SCOPES = ("all", "feature", "place")
DTYPES = ("float32", "bfloat16", "float64")
"""Tried in this order: mistakes of precision show in half storage alone, small ones in float64 alone."""

ROWS = 16
"""A tail tile: what is left over after tiles of so many rows."""

Condition = Callable[[JudgedCall], bool]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """``condition`` says in which calls the mistake is made, ``where`` at which place ("" = everywhere)."""

    hypothesis: Hypothesis
    scope: str
    says: str
    condition: Condition
    where: str = ""


@dataclasses.dataclass(frozen=True)
class Score:
    """``outcome`` is one of named, alike, unnamed, missed, silent."""

    mutant: str
    side: str
    scope: str
    outcome: str
    dtype: str = ""
    said: tuple[str, ...] = ()
    about: str = ""
    calls: tuple[str, ...] = ()
    seconds: float = 0.0
    lifted: bool = False


def candidate_of(ground: Ground, mutant: Mutant) -> Candidate:
    """The mutant: right but for what its mistake gives, where it makes it."""

    def answers(right: JudgedCall) -> dict[str, np.ndarray]:
        if not mutant.condition(right):
            return {}
        if mutant.where:
            rows = rows_at(right, mutant.where)
            wrong = {} if rows is None else ground.bench.in_rows(mutant.hypothesis, right, rows)
        else:
            wrong = ground.bench.predict(mutant.hypothesis, right)
        return {n: ground.stored(n, x) for n, x in wrong.items()}

    return Candidate(ground, answers, changes=True)


def rows_at(call: JudgedCall, where: str) -> np.ndarray | None:
    """The rows (..., h, q) of a place; None where a call has no such place beside others."""
    shape = np.shape(call.truth.values["output"])[:-1]
    rows = np.zeros(shape, dtype=bool)
    if where == "last head" and len(shape) > 2 and shape[-2] > 1:
        rows[..., -1, :] = True
    elif where == "tail tile" and shape[-1] > ROWS:
        rows[..., (shape[-1] - 1) // ROWS * ROWS :] = True
    else:
        return None
    return rows


# ---------------------------------------------------------------------- mutants


def _everywhere(call: JudgedCall) -> bool:
    return True


def _flag(name: str) -> Condition:
    return lambda call: bool(call.features.get(name, False))


def _one(name: str) -> Condition:
    return lambda call: call.features.get(name) == 1


def features_of(calls: Sequence[JudgedCall]) -> dict[str, Condition]:
    """The features on which a mistake may depend: options in use, one query, one key head."""
    flags = {n for c in calls for n, x in c.features.items() if x is True}
    found = {f"with {n}": _flag(n) for n in sorted(flags)}
    found |= {f"one of {n}": _one(n) for n in ("queries", "keys", "batch") if any(n in c.features for c in calls)}
    return found


def mutants_of(
    hypothesis: Hypothesis, showing: Sequence[JudgedCall], rng: random.Random, turn: int
) -> Iterator[Mutant]:
    """One mutant of each scope, as far as there is one: some calls under the feature show it, others do not have it."""
    yield Mutant(hypothesis, "all", "", _everywhere)
    usable = []
    for says, holds in features_of(showing).items():
        inside = sum(map(holds, showing))
        if 0 < inside < len(showing):
            usable.append((says, holds))
    if usable:
        says, holds = rng.choice(usable)
        yield Mutant(hypothesis, "feature", says, holds)
    place = ("last head", "tail tile")[turn % 2]
    if all(rows_at(c, place) is None for c in showing):
        place = ("last head", "tail tile")[(turn + 1) % 2]
    yield Mutant(hypothesis, "place", place, _everywhere, place)


def score(ground: Ground, mutant: Mutant, showing: Sequence[JudgedCall]) -> Score | None:
    """None where nothing is beyond rounding in this dtype."""
    start = time.perf_counter()
    candidate = candidate_of(ground, mutant)
    shown = {id(c) for c in showing}
    cases = [candidate.judged(c) if id(c) in shown else c for c in ground.calls]
    if all(c is right for c, right in zip(cases, ground.calls, strict=True)):
        return Score(mutant.hypothesis.name, mutant.hypothesis.side, mutant.scope, "silent")
    failing = [c for c in cases if c.failing]
    if not failing:
        return None
    causes = candidate.causes(cases)
    first = causes.records[:2]
    said = tuple(str(e["class"]) for e in first)
    if any(mutant.hypothesis.name in name.split(" + ") for name in said):
        outcome = "named"
    else:
        alike = [e for e in causes.mistakes if e.name in said and _same(e, failing)]
        outcome = "alike" if alike else "unnamed"
    calls = tuple(c.probe for c in failing)
    return Score(
        mutant.hypothesis.name, mutant.hypothesis.side, mutant.scope, outcome, ground.dtype, said, mutant.says, calls,
        time.perf_counter() - start,
    )  # fmt: skip


def _same(explanation: Any, failing: Sequence[JudgedCall]) -> bool:
    """Whether it gives all that fails, in every call, and nothing else: the numbers cannot tell it from the mistake."""
    return not explanation.left and not explanation.limited and len(explanation.calls) >= min(len(failing), 25)


# ---------------------------------------------------------------------- a mechanism


def scores_of(
    name: str,
    *,
    own: int | None = None,
    lifted: int | None = None,
    seed: int = 0,
    largest: int | None = None,
    scopes: Sequence[str] = SCOPES,
    only: str = "",
) -> Iterator[Score]:
    """Scores of a mechanism's own mistakes and of those that it shares with what it is built on; None = all of them."""
    mechanism = ra.mechanisms[name]
    bench = Workbench(mechanism, Conventions(), kept=500)
    ground = functools.cache(lambda dtype: Ground(mechanism, dtype, bench, seed=seed, largest=largest))
    mine = {id(m) for m in mechanism.catalogue.own}
    rng = random.Random(f"{name} {seed}")
    groups = (
        (False, own, [h for h in bench.mistakes if id(h.mistakes[0]) in mine]),
        (True, lifted, [h for h in bench.mistakes if id(h.mistakes[0]) not in mine]),
    )
    turn = 0
    for is_lifted, most, group in groups:
        chosen = [h for h in group if only in h.name]
        chosen = chosen if most is None or most >= len(chosen) else rng.sample(chosen, most)
        for hypothesis in chosen:
            turn += 1
            for found in _scores(ground, hypothesis, rng, turn, scopes):
                yield dataclasses.replace(found, lifted=is_lifted)


def _scores(
    ground: Callable[[str], Ground], hypothesis: Hypothesis, rng: random.Random, turn: int, scopes: Sequence[str]
) -> Iterator[Score]:
    @functools.cache
    def showing(dtype: str) -> list[JudgedCall]:
        here = ground(dtype)
        return [c for c in here.calls if here.bench.predict(hypothesis, c)]

    order = DTYPES if showing(DTYPES[0]) else DTYPES[1:2]
    if not showing(order[0]):
        yield Score(hypothesis.name, hypothesis.side, "all", "silent")
        return
    for mutant in mutants_of(hypothesis, showing(order[0]), rng, turn):
        if mutant.scope not in scopes:
            continue
        found: list[Score | None] = []
        for dtype in order:
            found.append(score(ground(dtype), mutant, showing(dtype)))
            if found[-1] is not None and found[-1].outcome != "silent":
                break
        last = found[-1]
        if None in found and (last is None or last.outcome == "silent"):
            last = Score(hypothesis.name, hypothesis.side, mutant.scope, "missed", about=mutant.says)
        yield last


# ---------------------------------------------------------------------- the command


def row_of(name: str, found: Sequence[Score]) -> str:
    """A line of the table."""
    cells = [name]
    for part in (False, True):
        counts = collections.Counter(s.outcome for s in found if s.lifted == part)
        made = sum(counts.values()) - counts["silent"]
        named = counts["named"] + counts["alike"]
        cells += [
            str(made),
            _share(made - counts["missed"], made),
            _share(named, made),
            str(counts["alike"]),
            str(counts["silent"]),
        ]
    return "| " + " | ".join(cells) + " |"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %" if whole else ""


def table_of(found: Mapping[str, Sequence[Score]], says: str) -> list[str]:
    columns = ("mistakes", "caught", "named", "of these alike", "silent")
    head = ["mechanism", *columns, *(f"shared: {c}" for c in columns)]
    lines = [says, "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += [row_of(n, s) for n, s in found.items()]
    every = [s for some in found.values() for s in some]
    return [*lines, row_of("**all**", every)]


def _task(task: tuple[str, dict[str, Any], str]) -> tuple[str, list[Score]]:
    name, settings, log = task
    found = []
    for s in scores_of(name, **settings):
        found.append(s)
        if log:
            with pathlib.Path(log).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"mechanism": name, **dataclasses.asdict(s)}) + "\n")
    return name, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanism", nargs="*", default=list(ra.mechanisms), help="those that are scored; all")
    parser.add_argument("--sample", type=int, help="so many of a mechanism's own mistakes, each on one side; all")
    parser.add_argument("--lifted", type=int, default=300, help="so many shared ones over all mechanisms; -1 = all")
    parser.add_argument("--scopes", nargs="*", default=SCOPES)
    parser.add_argument("--only", default="", help="classes that contain this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--log", default="", help="every mutant as a line of JSON")
    parser.add_argument("-o", "--output", type=pathlib.Path)
    asked = parser.parse_args()
    built_on = [n for n in asked.mechanism if ra.mechanisms[n].catalogue.lifted()]
    each = None if asked.lifted < 0 else -(-asked.lifted // max(1, len(built_on)))
    settings = {
        "own": asked.sample,
        "lifted": each,
        "seed": asked.seed,
        "scopes": tuple(asked.scopes),
        "only": asked.only,
    }
    found: dict[str, list[Score]] = {}
    start = time.time()
    with concurrent.futures.ProcessPoolExecutor(asked.jobs) as pool:
        for name, some in pool.map(_task, [(n, settings, asked.log) for n in asked.mechanism]):
            found[name] = some
            print(row_of(name, some), f"{time.time() - start:.0f} s", file=sys.stderr, flush=True)
    for name, some in found.items():
        for s in some:
            if s.outcome in ("missed", "unnamed"):
                print(
                    f"{s.outcome}: {name}: {s.mutant} ({s.side}; {s.about or 'all calls'}): said {list(s.said)}",
                    file=sys.stderr,
                )
    own, shared = (("all" if n is None else n) for n in (asked.sample, each))
    says = f"Mistakes of each mechanism's own: {own}; shared ones: {shared}; scopes: {', '.join(asked.scopes)}; seed {asked.seed}."
    lines = table_of(found, says)
    print("\n".join(lines))
    if asked.output is not None:
        asked.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    every = [s for some in found.values() for s in some if s.outcome != "silent"]
    named = sum(s.outcome in ("named", "alike") for s in every)
    return int(any(s.outcome == "missed" for s in every) or named < 0.95 * len(every))


if __name__ == "__main__":
    sys.exit(main())
