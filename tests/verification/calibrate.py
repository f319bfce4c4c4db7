"""Error/bound of right kernels, over seeds, dtypes and probes: what the thresholds of the verdict must leave room for.

usage: python tests/verification/calibrate.py [--seeds 20] [--every 40] [--jobs 2] [-o docs/tolerances_table.md]

Dense: the kernels of ``kernels_right``, each on one in ``every`` of the probes of each seed (another one each time).
Other mechanisms: the right kernels of the verifier's own tests, on every probe that they take; they compute in the dtype of
their inputs, so float64 and float32 alone.
Power: kernels with one numerical fault, on the probes that are meant for them.
"""

import argparse
import concurrent.futures
import dataclasses
import inspect
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

TESTS = pathlib.Path(__file__).resolve().parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from verification.kernels import MAKERS, kernel  # noqa: E402
from verification.kernels_right import VARIANTS, run  # noqa: E402
from verification.kernels_right.faults import FAULTS  # noqa: E402

import refattn as ra  # noqa: E402
from refattn.verification.conventions import CONVENTION_OPTIONS, Conventions  # noqa: E402
from refattn.verification.probes import Plan, Probe, probes  # noqa: E402
from refattn.verification.question import Question  # noqa: E402
from refattn.verification.truth import Truth, truth_of  # noqa: E402
from refattn.verification.verdict import FEW, Judgement, judge  # noqa: E402

DTYPES = ("float64", "float32", "float16", "bfloat16")
DENSE = ra.scaled_dot_product_attention
LISTS = {"indices", "block_indices", "block", "duplicates"}
"""Options that the composed kernels do not have."""


def composed_take(names: Iterable[str]) -> bool:
    """Whether the composed kernels have these options."""
    return not LISTS & set(names)


def question_of(mechanism: Any, probe: Probe, dtype: str, gradients: bool = True, **declared: Any) -> Question:
    arguments, cotangents = probe.stored(dtype)
    return Question(
        mechanism,
        {n: arguments.get(n) for n in probe.positional},
        {n: x for n, x in arguments.items() if n not in probe.positional},
        cotangents if gradients else {},
        probe.wrt if gradients else (),
        dtype,
        Conventions(**declared),
        frozenset(CONVENTION_OPTIONS),
    )


def judged(truth: Truth, got: dict[str, Any]) -> Iterator[tuple[str, Judgement, float]]:
    """Array, verdict and the median where it counts."""
    for name, right in truth.values.items():
        if got.get(name) is not None:
            j = judge(name, np.asarray(got[name]), truth)
            yield name, j, j.median if right.size >= FEW else 0.0


def answers(kernel: tuple[Callable, Callable], question: Question, outputs: tuple[str, ...]) -> dict[str, Any]:
    """What (forward, backward) of the verifier's tests give for a question."""
    forward, backward = kernel
    arrays = [question.arrays[n] for n in question.arrays]
    known = inspect.signature(forward).parameters
    options = {n: x for n, x in question.options.items() if n not in CONVENTION_OPTIONS or n in known}
    with np.errstate(all="ignore"):
        result = forward(*arrays, **options)
        fields = result if isinstance(result, dict) else None
        if fields is None:
            fields = dict(zip(outputs, result if isinstance(result, tuple) else (result,), strict=False))
        found = dict(fields)
        if question.wrt:
            takes = inspect.signature(backward).parameters
            back = {n: question.cotangents.get(n, np.zeros_like(x)) for n, x in fields.items() if n in outputs}
            more = {f"d_{n}": x for n, x in back.items() if n != "output" and f"d_{n}" in takes}
            gradients = backward(back["output"], *arrays, **more, **options)
            if not isinstance(gradients, dict):
                gradients = dict(zip(question.arrays, gradients, strict=False))
            found |= {f"d_{n}": x for n, x in gradients.items() if n in question.wrt}
    return found


class Largest:
    """Largest maximum and median, with where they were seen, by key; and what did not pass."""

    def __init__(self) -> None:
        self.seen: dict[Any, list[Any]] = {}
        self.failed: list[str] = []
        self.count = 0

    def add(self, key: Any, j: Judgement, median: float, where: str) -> None:
        found = self.seen.setdefault(key, [0.0, 0.0, "", ""])
        if j.maximum >= found[0]:
            found[0], found[2] = j.maximum, where
        if median >= found[1]:
            found[1], found[3] = median, where
        if not j.ok:
            self.failed.append(f"{key} {where}: {j.maximum:.3g} / {j.median:.3g}: {j.says}")

    def join(self, other: "Largest") -> None:
        for key, (maximum, median, at, of) in other.seen.items():
            found = self.seen.setdefault(key, [0.0, 0.0, "", ""])
            if maximum >= found[0]:
                found[0], found[2] = maximum, at
            if median >= found[1]:
                found[1], found[3] = median, of
        self.failed += other.failed
        self.count += other.count


def dense(seed: int, dtype: str, every: int, made: Iterable[Probe] | None = None) -> Largest:
    """The composed kernels; variant i meets probe j where i + j + seed is a multiple of ``every``."""
    largest = Largest()
    for j, probe in enumerate(probes(DENSE, seed=seed, accepts=composed_take) if made is None else made):
        question = question_of(DENSE, probe, dtype)
        truth = truth_of(question)
        for i, (name, variant) in enumerate(VARIANTS.items()):
            if (i + j + seed) % every:
                continue
            largest.count += 1
            got = run(variant, question.arrays, question.options, question.cotangents)
            for array, judgement, median in judged(truth, got):
                largest.add((array, dtype), judgement, median, f"seed {seed}, {probe.name}: {name}")
    return largest


def other(name: str, seed: int, dtype: str) -> Largest:
    """The right kernel of another mechanism, on the probes whose options it takes."""
    largest, mechanism, made = Largest(), ra.mechanisms[name], kernel(name)

    def accepts(options: tuple[str, ...]) -> bool:
        return made.accepts(tuple(n for n in options if n in mechanism.options))

    plan = Plan(mechanism, accepts=accepts, seed=seed)
    for probe in plan.build_all([*plan.alone(), *plan.special()]):
        if not accepts(probe.options) or probe.named or probe.poison or probe.size > 100_000:
            continue
        question = question_of(mechanism, probe, dtype)
        kept = {n: x for n, x in question.cotangents.items() if n in made.cotangents}
        question = dataclasses.replace(question, cotangents=kept, wrt=question.wrt if kept else ())
        try:
            got = answers((made.forward, made.backward), question, mechanism.outputs)
        except (NotImplementedError, TypeError, ValueError):
            continue  # shapes or options that it does not take
        truth = truth_of(question)
        largest.count += 1
        for array, judgement, median in judged(truth, got):
            kind = truth.kinds[array]
            largest.add((name, kind, dtype), judgement, median, f"seed {seed}, {probe.name}: {array}")
    return largest


def power(name: str, seed: int, dtype: str) -> tuple[float, float, str]:
    """Largest maximum and median of a kernel with one numerical fault, and where."""
    fault, plan = FAULTS[name], Plan(DENSE, seed=seed)
    best = (0.0, 0.0, "")
    for probe in plan.build_all([x for x in (*plan.alone(), *plan.special()) if x.name in fault.probes]):
        question = question_of(DENSE, probe, dtype)
        got = fault.run(question.arrays, question.options, question.cotangents)
        for array, j, median in judged(truth_of(question), got):
            if max(j.maximum / j.limits[0], median / j.limits[1]) > max(best[0] / 4.0, best[1] / 0.75):
                best = (j.maximum, median, f"{probe.name}: {array}")
    return best


# ---------------------------------------------------------------------- tables


def _cell(found: list[Any] | None) -> str:
    return "" if found is None else f"{found[0]:.2g} / {found[1]:.2g}"


def table_of(largest: Largest, rows: Iterable[Any], says: str) -> list[str]:
    lines = [f"| {says} | " + " | ".join(DTYPES) + " |", "|---" * (len(DTYPES) + 1) + "|"]
    for row in rows:
        label = " ".join(row) if isinstance(row, tuple) else row
        key = row if isinstance(row, tuple) else (row,)
        lines.append(f"| {label} | " + " | ".join(_cell(largest.seen.get((*key, d))) for d in DTYPES) + " |")
    return lines


def _task(task: tuple[Any, ...]) -> Any:
    kind, *rest = task
    return kind, rest, {"dense": dense, "other": other, "power": power}[kind](*rest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--other-seeds", type=int, default=2)
    parser.add_argument("--every", type=int, default=216)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("-o", "--output", type=pathlib.Path)
    asked = parser.parse_args()
    tasks: list[tuple[Any, ...]] = [("power", n, 0, d) for n, f in FAULTS.items() for d in f.dtypes]
    tasks += [
        ("other", n, s, d) for s in range(asked.other_seeds) for n in MAKERS if n != DENSE.name for d in DTYPES[:2]
    ]
    tasks += [("dense", s, d, asked.every) for s in range(asked.seeds) for d in DTYPES]
    right, others, faults = Largest(), Largest(), {}
    with concurrent.futures.ProcessPoolExecutor(asked.jobs) as pool:
        for n, (kind, rest, found) in enumerate(pool.map(_task, tasks)):
            if kind == "power":
                faults[rest[0], rest[2]] = found
            else:
                (right if kind == "dense" else others).join(found)
            print(f"{n + 1} of {len(tasks)}: {kind} {rest}", file=sys.stderr, flush=True)
    lines = [
        f"Largest error/bound, maximum / median over the elements of an array, of {len(VARIANTS)} right kernels of softmax",
        f"attention in {right.count} calls (derived bounds; 4 / 0.75 passes):",
        "",
        *table_of(right, sorted({k[0] for k in right.seen}), "array"),
        "",
        f"Right kernels of other mechanisms in {others.count} calls (injected bounds pass up to 6 / 0.75):",
        "",
        *table_of(others, sorted({k[:2] for k in others.seen}), "mechanism and bound"),
        "",
        "Kernels with one numerical fault, on the probe that shows it best:",
        "",
        "| fault | dtype | maximum / median | where |",
        "|---|---|---|---|",
        *(f"| {n} | {d} | {_cell([a, b])} | {at} |" for (n, d), (a, b, at) in faults.items()),
    ]
    print("\n".join(lines))
    for key, found in sorted(right.seen.items()):
        print(*key, *(f"{x:.3g}" if isinstance(x, float) else x for x in found), sep=" | ", file=sys.stderr)
    failed = [*right.failed, *others.failed]
    missed = [n for n, (a, b, _) in faults.items() if a <= 4.0 and b <= 0.75]
    print(*failed, *(f"not seen: {n}" for n in missed), sep="\n", file=sys.stderr)
    if asked.output is not None:
        asked.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return bool(failed or missed or any(math.isnan(x[0]) for x in right.seen.values()))


if __name__ == "__main__":
    sys.exit(main())
