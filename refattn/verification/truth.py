"""What is right: the mechanism in float64 on the candidate's own rounded inputs, with a bound for every element."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from refattn.mechanism import Mechanism
from refattn.verification import conventions as conventions_
from refattn.verification.bounds.injected import injected_bounds
from refattn.verification.bounds.softmax import derived_bounds, keeps_weights
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
    keep = {"keep_weights": True} if keeps_weights(mechanism) and exact.get("dropout_mask") is None else {}
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

    derived = {n: x for n, x in derived_bounds(question, exact, result).items() if n in values}
    derived = {n: x for n, x in derived.items() if x.rss.shape == values[n].shape}
    bounds = {n: x.rss for n, x in derived.items()}
    if left := [n for n in values if n not in derived]:
        bounds |= injected_bounds(question, exact, values, left)
    return Truth(
        question=question,
        values=values,
        bounds=bounds,
        worst={n: x.worst for n, x in derived.items() if x.worst is not None},
        kinds={n: "derived" if n in derived else "injected" for n in values},
        open=left_open,
    )


def _nan_is_due(mechanism: Mechanism, exact: Mapping[str, Any]) -> bool:
    """Whether the definition has a NaN too: then an input put it there."""
    if all(np.isfinite(x).all() for x in exact.values() if floating(x)):
        return False
    with np.errstate(all="ignore"):
        return any(np.isnan(x).any() for x in mechanism.definition(**exact).fields.values() if floating(x))
