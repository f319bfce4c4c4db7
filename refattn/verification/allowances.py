"""Which declaration would let a candidate pass: operands of fewer bits, scores in the storage, an approximated function.

A kernel may round more than its dtype says by design.  Its errors are then no rounding of that dtype, and yet those of no
formula: they pass as soon as the bounds are widened as the convention would widen them.  The explanation names the convention,
with the record that declares it.  It is never a permission: undeclared, the verdict stays a mismatch.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from refattn import precision
from refattn.verification.truth import Truth, truth_of
from refattn.verification.verdict import judge

__all__ = ["Allowance", "Explained", "allowances", "explained_by_allowance", "largest_with"]

CALLS = 10
"""Failing calls of one dtype that every allowance is tried on, the smallest ones."""

TIGHT = 0.15
"""Errors below this share of a widened bound do not speak for it: so much room is not what the kernel uses."""

BEYOND = 2.0**20
"""In bounds: no declaration widens a bound by so much."""


@dataclasses.dataclass(frozen=True)
class Allowance:
    """A convention about rounding: the class of its mistake, a sentence, and the fields that declare it."""

    name: str
    says: str
    fields: tuple[tuple[str, Any], ...]

    @property
    def record(self) -> str:
        """What the user would declare, as JSON."""
        found = dict(self.fields)
        return json.dumps(found | {"allow": dict(found["allow"])} if "allow" in found else found)

    @property
    def sentence(self) -> str:
        return f"{self.says}; if by design: --conventions '{self.record}'"


class Call(Protocol):
    """A judged call, as diagnosis has it."""

    @property
    def probe(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def truth(self) -> Truth: ...
    @property
    def got(self) -> dict[str, np.ndarray]: ...
    @property
    def leak(self) -> bool: ...
    @property
    def failing(self) -> tuple[str, ...]: ...


@dataclasses.dataclass(frozen=True)
class Explained:
    """An allowance with which the failing calls of one dtype pass; ``residual`` is their largest error in its bounds."""

    allowance: Allowance
    dtype: str
    residual: float
    outputs: tuple[str, ...]
    calls: tuple[Call, ...]

    def as_record(self) -> dict[str, Any]:
        return {
            "class": self.allowance.name,
            "residual": self.residual,
            "outputs": sorted(self.outputs),
            "says": f"{self.dtype}: {self.allowance.sentence}",
            "probes": sorted({c.probe for c in self.calls}),
        }


def allowances(dtype: str, *, softcap: bool = False, lse_only: bool = False) -> list[Allowance]:
    """What a kernel of a dtype may have by design, likelier and narrower ones first.

    Parameters
    ----------
    softcap : bool
        Every failing call has a soft cap.
    lse_only : bool
        Nothing but the lse fails: the mark of an exponential that is off by the same factor everywhere.
    """
    own = precision.unit_roundoff(dtype)
    narrow = [
        Allowance("narrow_products", _narrow(dtype, name), (("compute", name),))
        for name in ("float32", "tf32", "float16", "bfloat16")
        if precision.unit_roundoff(name) > own
    ]
    scores = Allowance(
        "scores_in_storage",
        f"logits and weights were rounded to {dtype} between the steps",
        (("scores", "storage"),),
    )
    half = own > precision.unit_roundoff("float32")
    sums = Allowance(
        "low_prec_accum", f"sums over keys or channels were kept in {dtype}", (("allow", (("sum", own),)),)
    )
    found = [*narrow[:2], *([scores, sums] if half else []), *narrow[2:]]
    errors = [10.0**-n * step for n in range(12, 1, -1) for step in (1, 2, 5)]
    rough = {
        name: [
            Allowance(
                "rough_exponential", f"{name} has relative errors of about {error:.0e}", (("allow", ((name, error),)),)
            )
            for error in errors
            if error > 4 * min(own, 2.0**-24)
        ]
        for name in ("tanh", "exp")
    }
    first = [*([sums] if half else []), *rough["exp"]] if lse_only else []
    first = [*first, *(rough["tanh"] if softcap else [])]
    return [*first, *found, *(rough["exp"] if not lse_only else [])]


def _narrow(dtype: str, name: str) -> str:
    if dtype == "float64" and name == "float32":
        return "the arithmetic was that of float32"
    return f"operands of the products were rounded to {name.upper() if name == 'tf32' else name}"


def largest_with(call: Call, allowance: Allowance) -> float | None:
    """The largest error of a call's failing arrays in widened bounds; None where they do not pass."""
    question = call.truth.question
    fields = dict(allowance.fields)
    if any(getattr(question.conventions, n) is not None for n in fields):
        return None  # something else is declared
    widened = truth_of(dataclasses.replace(question, conventions=dataclasses.replace(question.conventions, **fields)))
    got = _with_right_row_sums(call) if allowance.name == "low_prec_accum" else call.got
    largest = 0.0
    for name in call.failing:
        found = judge(name, got[name], widened, leak=call.leak)
        if not found.ok:
            return None
        largest = max(largest, found.maximum)
    return largest


def _with_right_row_sums(call: Call) -> Mapping[str, np.ndarray]:
    """Lse and output as they would be with the exact row sums: a narrow accumulator stops growing, which is no random error.

    Each row of the output is then too large by the factor by which its sum is too small.
    """
    right, got = call.truth.values, dict(call.got)
    if not {"lse", "output"} <= set(got) or got["output"].shape[:-1] != got["lse"].shape:
        return got
    keys = max((np.shape(x)[-2] for n, x in call.truth.question.arrays.items() if n in ("k", "v")), default=0)
    with np.errstate(all="ignore"):
        off = right["lse"] - got["lse"].astype(np.float64)
        lost = np.isfinite(off) & (off > 0) & (off <= keys * precision.unit_roundoff(call.dtype))
        output = got["output"].astype(np.float64) * np.exp(-np.where(lost, off, 0.0))[..., None]
    got |= {"lse": np.where(lost, right["lse"], got["lse"]), "output": output.astype(got["output"].dtype)}
    return got


def explained_by_allowance(calls: Iterable[Call]) -> list[Explained]:
    """For each dtype the first allowance with which its failing calls pass, tightly."""
    failing: dict[str, list[Call]] = {}
    for call in sorted(calls, key=lambda c: c.size):
        if call.failing:
            failing.setdefault(call.dtype, []).append(call)
    found = []
    for dtype, wrong in failing.items():
        if not all(_is_numerical(call) for call in wrong):
            continue
        tried = wrong[:CALLS]
        softcap = all(c.truth.question.options.get("softcap") is not None for c in wrong)
        lse_only = all(c.failing == ("lse",) for c in wrong)
        for allowance in allowances(dtype, softcap=softcap, lse_only=lse_only):
            residual = _residual(tried, allowance)
            if residual is not None and residual >= TIGHT and _residual(wrong[CALLS::CALLS], allowance) is not None:
                outputs = {name for call in wrong for name in call.failing}
                found.append(Explained(allowance, dtype, residual, tuple(sorted(outputs)), tuple(wrong)))
                break
    return found


def _residual(calls: Sequence[Call], allowance: Allowance) -> float | None:
    largest = 0.0
    for call in calls:
        one = largest_with(call, allowance)
        if one is None:
            return None
        largest = max(largest, one)
    return largest


def _is_numerical(call: Call) -> bool:
    """Whether all errors are finite, and none so large that only a formula explains it."""
    verdicts: Mapping[str, Any] = {n: judge(n, call.got[n], call.truth, leak=call.leak) for n in call.failing}
    return all(j.maximum < BEYOND for j in verdicts.values())
