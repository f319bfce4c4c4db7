"""Which conventions does an implementation follow?  One small call per question, held against every answer.

The answers are those of :class:`~refattn.verification.conventions.Conventions`.  A question is decided when one answer
fits and every other is clearly off; what a candidate's signature cannot take stays undeclared.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from refattn import arrays as array_tools
from refattn.mechanism import Mechanism
from refattn.verification.candidate import Call, Candidate
from refattn.verification.conventions import Conventions, UsageError, reference_arguments, reference_result

__all__ = ["discover"]

_FITS = 1e-3  # float32 kernels on inputs of size 1 are off by 1e-6; another convention by 0.1 and more
_HEADS, _KEY_HEADS, _CHANNELS = 6, 2, 10


@dataclasses.dataclass(frozen=True)
class _Question:
    """A field of the record, its possible values, and the first of the option sets that the candidate takes."""

    field: str
    values: tuple[Any, ...]
    options: tuple[dict[str, Any], ...]
    array: str = "output"
    q: int = 7
    k: int = 7


def _questions(rng: np.random.Generator) -> list[_Question]:
    mask = np.ones((7, 7), dtype=bool)
    mask[2] = False
    bias = 2 * rng.standard_normal((_HEADS, 7, 7))
    slopes = 2.0 ** -np.arange(1.0, _HEADS + 1)
    sinks = rng.standard_normal(_HEADS)
    empty = ({"mask": mask}, {"key_lengths": np.array([0, 7])})
    # The alignment first among the positional ones: windows and ALiBi are asked about where it makes no difference.
    return [
        _Question("head_map", ("repeat", "tile"), ({},)),
        _Question("align", ("lower_right", "upper_left"), ({"causal": True}, {"window": (2, 1)}), q=5, k=9),
        _Question(
            "window",
            ("inclusive", "count"),
            ({"window": (2, 1)}, {"window": (2, 0), "causal": True}, {"window": (2, None)}),
        ),
        _Question("softcap_after_bias", (False, True), ({"softcap": 1.5, "bias": bias},)),
        _Question("alibi", ("absolute", "signed"), ({"alibi_slopes": slopes},)),
        _Question("lse_base", ("e", "2"), ({},), "lse"),
        _Question("lse_includes_sinks", (True, False), ({"sinks": sinks},), "lse"),
        _Question("empty_rows", ("zero", "mean", "nan"), empty),
        _Question("empty_lse", ("-inf", "+inf", "0"), empty, "lse"),
    ]


def discover(candidate: Candidate, mechanism: Mechanism) -> tuple[Conventions, dict[str, str]]:
    """The conventions a candidate follows.

    Parameters
    ----------
    candidate
        An opened candidate; what it declares is the starting point.
    mechanism
        A softmax mechanism with arrays q, k, v.

    Returns
    -------
    Conventions
        What was found; fields that could not be decided are None.
    dict of str
        For these, why.

    Raises
    ------
    UsageError
        If the mechanism is not of that kind.
    """
    if tuple(mechanism.positional) != ("q", "k", "v") or "lse" not in mechanism.outputs:
        raise UsageError(f"conventions are discovered for softmax mechanisms of q, k, v; {mechanism.name} is none")
    rng = np.random.default_rng(0)
    found = dataclasses.replace(candidate.conventions, preset=None)
    undecided: dict[str, str] = {}
    grouped = _grouped_heads(candidate, mechanism)
    for question in _questions(rng):
        if question.field == "head_map" and not grouped:
            undecided["head_map"] = "it takes no fewer key heads than query heads"
            continue
        found = dataclasses.replace(found, **{question.field: None})
        value, why = _ask(candidate, mechanism, question, found, grouped)
        if value is None:
            undecided[question.field] = why
        found = dataclasses.replace(found, **{question.field: value})
    if found.masked_nan is None:
        value, why = _masked_nan(candidate, mechanism, grouped)
        found = dataclasses.replace(found, masked_nan=value)
        if value is None:
            undecided["masked_nan"] = why
    return found, undecided


def _call(
    mechanism: Mechanism, question: _Question, options: Mapping[str, Any], grouped: bool, poisoned: bool = False
) -> Call:
    """A float32 call; ``poisoned``: the last value is NaN."""
    rng = np.random.default_rng(1)
    g = _KEY_HEADS if grouped else _HEADS
    shape = {"q": (2, _HEADS, question.q, _CHANNELS), "k": (2, g, question.k, _CHANNELS)}
    q, k, v = (rng.standard_normal(shape[n]).astype(np.float32) for n in ("q", "k", "k"))
    v += np.float32(1.0)  # so that the mean of v is not 0
    if poisoned:
        v[..., -1, :] = np.nan
    narrow = {n: x.astype(np.float32) if getattr(x, "dtype", None) == np.float64 else x for n, x in options.items()}
    return Call(question.field, mechanism.name, {"q": q, "k": k, "v": v}, narrow)


def _grouped_heads(candidate: Candidate, mechanism: Mechanism) -> bool:
    (outcome,) = candidate.run([_call(mechanism, _Question("head_map", (), ()), {}, grouped=True)])
    return outcome.status == "ok"


def _ask(
    candidate: Candidate, mechanism: Mechanism, question: _Question, known: Conventions, grouped: bool
) -> tuple[Any, str]:
    why = ""
    for options in question.options:
        accepted, reason = candidate.accepts(options)
        if not accepted:
            why = why or reason
            continue
        call = _call(mechanism, question, options, grouped)
        (outcome,) = candidate.run([call])
        if outcome.status != "ok":
            why = why or outcome.message
        elif question.array not in outcome.fields:
            return None, f"it returns no {question.array}"
        else:
            return _best(question, call, outcome.fields[question.array], mechanism, known, candidate)
    return None, why


def _masked_nan(candidate: Candidate, mechanism: Mechanism, grouped: bool) -> tuple[Any, str]:
    """Whether a NaN in a value that nobody may see reaches the output."""
    mask = np.ones((7, 7), dtype=bool)
    mask[:, 6] = False
    accepted, why = candidate.accepts(["mask"])
    if not accepted:
        return None, why
    call = _call(mechanism, _Question("masked_nan", (), ()), {"mask": mask}, grouped, poisoned=True)
    (outcome,) = candidate.run([call])
    if outcome.status != "ok":
        return None, outcome.message
    leaks = np.isnan(outcome.fields["output"].astype(np.float64)).any()
    return ("may_leak" if leaks else "stays"), ""


def _best(
    question: _Question, call: Call, got: np.ndarray, mechanism: Mechanism, known: Conventions, candidate: Candidate
) -> tuple[Any, str]:
    distances = {}
    wide = {
        n: x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
        for n, x in call.options.items()
    }
    exact = {n: None if x is None else x.astype(np.float64) for n, x in call.arrays.items()}
    for value in question.values:
        record = dataclasses.replace(known, **{question.field: value})
        arguments = reference_arguments(mechanism, exact, wide, record, candidate.takes)
        result = mechanism.forward(**arguments)
        distances[value] = _distance(got, reference_result(result, arguments, record)[question.array])
    if question.field == "empty_lse" and min(distances.values()) > _FITS:
        empty = np.isneginf(array_tools.to_numpy(result.lse))
        if np.isfinite(got[empty].astype(np.float64)).all():
            return "finite", ""
    fitting = [value for value, d in distances.items() if d <= _FITS]
    if len(fitting) == 1:
        return fitting[0], ""
    return None, "several answers fit" if fitting else f"no answer fits ({', '.join(map(str, question.values))})"


def _distance(got: np.ndarray, wanted: np.ndarray) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(invalid="ignore"):
        off = np.where((got == wanted) | (np.isnan(got) & np.isnan(wanted)), 0.0, np.abs(got - wanted))
    return float(np.max(np.where(np.isnan(off), np.inf, off), initial=0.0))
