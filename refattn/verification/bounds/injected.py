"""Bounds for any mechanism: what random rounding errors do to it.

The mechanism and its pullback run `RUNS` times in float64 in a namespace in which every operation errs at random as a
kernel's may (:func:`refattn.precision.injecting`).  An element's bound is the root mean square of what that changes,
joined with the mean over its row, so that a few runs do not leave a lucky element with a small bound.

The errors injected are `SHRINK` of a kernel's and the deviations scaled back: what remains is the first order, and no
choice (of a maximum, of a bucket) turns over.  float64 cannot carry errors smaller than its own: there larger ones are
injected.

Two things that a right kernel may do are not in the operations of the mechanism.  The row term of the softmax derivative
may come from an output that is rounded to the storage, or merged from parts; that acts like an error of the lse's
cotangent, and is injected there.  And a lse that is merged, or summed key by key, is rounded more often.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from refattn import precision
from refattn.precision import Rounding
from refattn.verification.bounds.recurrences import carried_state, decay_floors
from refattn.verification.bounds.softmax import rounding
from refattn.verification.question import Question

__all__ = ["RUNS", "injected_bounds"]

RUNS = 8
SHRINK = 2.0**-6
FLOAT64 = 2.0**-30
"""Unit roundoff that is injected in place of float64's."""

FORGETS = -1e4
"""A log decay that leaves nothing, in place of -inf."""

SLOW = 4
"""A way of computing that takes so many times the operations of another one runs only once."""

_HOST = ("query_lengths", "key_lengths", "align")
"""Arguments that mechanisms read on the host."""


def injected_bounds(
    question: Question, exact: Mapping[str, Any], values: Mapping[str, np.ndarray], names: Collection[str]
) -> dict[str, np.ndarray]:
    """Bounds of the named values and gradients of a question.

    Parameters
    ----------
    exact : mapping
        The arguments in float64.
    values : mapping
        All right values, as the question's conventions have them.
    """
    units = rounding(question)
    own = units.accumulate < 2.0**-40
    shrink = FLOAT64 / units.accumulate if own else SHRINK
    squares = {n: np.zeros(values[n].shape) for n in names}
    for exactly, run in _runs(question, exact, values, units, shrink):
        for name, square in squares.items():
            with np.errstate(invalid="ignore", over="ignore"):
                apart = (run[name] - exactly[name]) / shrink
            square += np.square(np.where(np.isfinite(apart), apart, 0.0))
    merges = _merges(question, values, units)
    carried = carried_state(question, exact, values, units.accumulate)
    squares = {n: square / RUNS + carried.get(n, 0.0) for n, square in squares.items()}
    bounds = {n: _bound(n, values[n], square, merges, units) for n, square in squares.items()}
    floors = decay_floors(question, exact, values, units.accumulate)
    return {n: np.hypot(x, floors[n]) if n in floors else x for n, x in bounds.items()}


def _bound(name: str, right: np.ndarray, square: np.ndarray, merges: np.ndarray | None, units: Rounding) -> np.ndarray:
    level = np.where(np.isfinite(right), right, 0.0)
    if right.ndim and right.shape[-1]:
        square = square + square.mean(axis=-1, keepdims=True)
    stored = units.accumulate if name == "lse" else units.stored
    square = square + np.square(stored * level)
    if merges is not None and name == "lse":
        square = square + merges
    if merges is not None and name == "output":
        square = square + merges[..., None] * level**2
    return np.hypot(np.sqrt(square), units.tiny)


def _merges(question: Question, values: Mapping[str, np.ndarray], units: Rounding) -> np.ndarray | None:
    """Variance of a lse from being rounded itself, merge by merge or key by key; None where the output's rows have none."""
    lse, output = values.get("lse"), values.get("output")
    if lse is None or output is None or output.shape[:-1] != lse.shape:
        return None
    shapes = (np.shape(question.arrays.get(n, 0)) for n in ("v", "k", "q"))
    keys = next((shape[-2] for shape in shapes if len(shape) > 1), 1)
    often = max(1 + math.log2(max(keys, 1)), keys / 3)
    return 2 * often * np.square(units.accumulate * np.where(np.isfinite(lse), lse, 0.0))


def _runs(
    question: Question, exact: Mapping[str, Any], values: Mapping[str, np.ndarray], units: Rounding, shrink: float
) -> Iterator[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Pairs of results: without errors, and with them."""
    rng = np.random.default_rng(0)
    row_error = _row_error(question, values, units)

    def run(algorithm: str, shrink: float, decisions: Any = None) -> tuple[Any, dict[str, np.ndarray]]:
        cotangents = dict(question.cotangents64)
        if row_error is not None:
            noise = shrink * row_error * rng.standard_normal(row_error.shape)
            cotangents["lse"] = cotangents.get("lse", np.zeros(row_error.shape)) + noise
        xp = precision.injecting(units, rng, shrink=shrink, decisions=decisions)
        inside = {n: _inside(xp, n, x) for n, x in exact.items()}
        outside = {n: xp.asarray(x) for n, x in cotangents.items()}
        return xp, question.answer(inside, outside, algorithm=algorithm, backend=None)

    algorithms = ("whole", "tiled") if "algorithm" in question.mechanism._wants else ("auto",)
    found = {name: run(name, 0.0) for name in algorithms}
    slow = [n for n, (xp, _) in found.items() if xp.operations > SLOW * min(x.operations for x, _ in found.values())]
    order = [n for n in algorithms if n not in slow] * RUNS
    for name in [*slow, *order][:RUNS]:
        xp, exactly = found[name]
        yield exactly, run(name, shrink, xp.decisions)[1]


def _inside(xp: Any, name: str, x: Any) -> Any:
    """An argument for the namespace; lengths and offsets are lists there."""
    if isinstance(x, (tuple, list)) and any(isinstance(y, np.ndarray) for y in x):
        return type(x)(_inside(xp, name, y) for y in x)
    if not isinstance(x, np.ndarray):
        return x
    if name.endswith("decay"):  # an error of an infinite number is no number; this one forgets as much
        x = np.where(np.isneginf(x), FORGETS, x)
    return x.tolist() if name in _HOST else xp.asarray(x)


def _row_error(question: Question, values: Mapping[str, np.ndarray], units: Rounding) -> np.ndarray | None:
    """Standard deviation of the row term, as a cotangent of the lse; None where there is no lse to take it."""
    merges, d_output = _merges(question, values, units), question.cotangents64.get("output")
    if merges is None or d_output is None or not question.wrt or "lse" not in question.mechanism.outputs:
        return None
    output = values["output"]
    products = np.where(np.isfinite(output) & np.isfinite(d_output), d_output * output, 0.0)
    square = units.stored**2 * (products**2).sum(axis=-1) + merges * products.sum(axis=-1) ** 2
    base = math.log(2.0) if question.conventions.lse_base == "2" else 1.0
    return np.where(np.isfinite(values["lse"]), base * np.sqrt(square), 0.0)
