"""What is right: the mechanism in float64 on the candidate's own rounded inputs, with a bound for every element."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from refattn import precision
from refattn.mechanism import Mechanism
from refattn.verification import conventions as conventions_
from refattn.verification.bounds.softmax import output_bounds, weighs_values
from refattn.verification.bounds.spread import accumulation, noisy_row_term, orders, spread
from refattn.verification.conventions import Conventions
from refattn.verification.question import Question, float64, floating

__all__ = ["ReferenceNaNError", "Truth", "truth_of"]


class ReferenceNaNError(RuntimeError):
    """refattn itself gave a NaN where no input explains one: an error of this library, never a verdict."""


@dataclasses.dataclass(frozen=True)
class Truth:
    """What is right: values and bounds by array name (``output``, ``lse``, ``d_q`` ...).

    ``worst`` holds the worst-case bound where one is derived, ``kinds`` the kind of each bound, ``open`` the elements
    that the conventions leave to the implementation (True = not compared; the whole array: not checked).
    """

    question: Question
    values: dict[str, np.ndarray]
    bounds: dict[str, np.ndarray]
    worst: dict[str, np.ndarray]
    kinds: dict[str, str]
    open: dict[str, np.ndarray]


def truth_of(question: Question) -> Truth:
    """Truth and bounds of one call.

    Raises
    ------
    ReferenceNaNError
        If the float64 reference has a NaN that no input explains.
    """
    follow, mechanism = question.conventions, question.mechanism
    exact, cotangents = question.arguments(), question.cotangents64
    # The weights come with the same call; after dropout they are no softmax, so then they are asked for apart.
    keep = {"keep_weights": True} if weighs_values(mechanism) and exact.get("dropout_mask") is None else {}
    result, pullback = question.vjp(exact, **keep)
    native = dataclasses.replace(question, conventions=Conventions()).read(result, pullback, exact, cotangents)
    for name, x in native.items():
        if np.isnan(x).any() and not _nan_is_due(mechanism, exact):
            shapes = ", ".join(f"{n} {np.shape(x)}" for n, x in exact.items() if isinstance(x, np.ndarray))
            raise ReferenceNaNError(f"{mechanism.name}: NaN in {name} of the reference ({shapes}): an error of refattn")
    values = {n: float64(x) for n, x in question.read(result, pullback, exact, cotangents).items()}
    left_open = dict(conventions_.open_elements(result, exact, follow))
    if conventions_.gradients_open(result, exact, follow):
        left_open |= {n: np.ones(x.shape, dtype=bool) for n, x in values.items() if n.startswith("d_")}

    runs = [*orders(question, exact, values), noisy_row_term(question, exact, result, pullback)]
    unit, accumulate = precision.unit_roundoff(question.precision), accumulation(question.precision)
    bounds, worst = {}, {}
    kinds = dict.fromkeys(values, "spread")
    for name, x in values.items():
        stored = accumulate if name == "lse" else unit
        bounds[name] = spread(x, [float64(run[name]) for run in runs if name in run], stored, accumulate)
    derived = output_bounds(question, exact, result)
    if derived is not None and derived[0].shape == values["output"].shape:
        # Rows that a convention fills otherwise (the mean of v in empty rows) are no weighted sum: their bound is the spread.
        filled = (values["output"] != native["output"]) & ~np.isnan(native["output"])
        bounds["output"], worst["output"] = (np.where(filled, np.fmax(x, bounds["output"]), x) for x in derived)
        kinds["output"] = "derived"
    return Truth(question, values, bounds, worst, kinds, left_open)


def _nan_is_due(mechanism: Mechanism, exact: Mapping[str, Any]) -> bool:
    """Whether the definition has a NaN too: then an input put it there."""
    if all(np.isfinite(x).all() for x in exact.values() if floating(x)):
        return False
    with np.errstate(all="ignore"):
        return any(np.isnan(x).any() for x in mechanism.definition(**exact).fields.values() if floating(x))
