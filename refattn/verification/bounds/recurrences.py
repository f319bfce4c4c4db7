"""Two things that a right kernel of a recurrence may do and that are not in the operations of the mechanism.

It may carry its state token by token, and round it each time, where the mechanism walks in chunks.  And it may take the gradients
of log decays as differences of two large sums.

The gradient of a log decay is the sum of everything that straddles its token.  Kernels compute it as a running sum, from the end, of
q dq - k dk, and of what the final state sends: equal in exact arithmetic, but its error is that of the terms, not of what is left of
them.  At a log decay of -20 what is left is a 1e-9th of them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from refattn.definitions.recurrence import Recurrence
from refattn.definitions.steps import step
from refattn.verification import conventions as conventions_
from refattn.verification.question import Question

__all__ = ["carried_state", "decay_floors"]

RUNS, NOISE = 6, 2.0**-30
"""How often a noisy state is carried, and by how much it is off each time: float64 holds no roundings of its own."""

ROUNDINGS = 2.0
"""Of a token: of its decay and of the sum."""

READERS, WRITERS = ("q", "remove", "c"), ("k", "replace", "erase_key", "b")


def decay_floors(
    question: Question, exact: Mapping[str, Any], values: Mapping[str, np.ndarray], unit: float
) -> dict[str, np.ndarray]:
    """One rounding ``unit`` of the absolute terms, for the gradients of decays (``d_decay`` ...) that are asked for."""
    decays = [n for n in ("decay", "channel_decay", "head_decay") if f"d_{n}" in values]
    time = [n for n in ("dt", "a", "dt_bias") if f"d_{n}" in values and "x" in exact]
    if not decays and not time:
        return {}
    written = exact["x"] if "x" in exact else exact["v"]
    heads = written.shape[-3]
    tile, steps = exact.get("head_map") == "tile", int(exact.get("steps", 1))
    total: Any = 0.0
    for name in (*READERS, *WRITERS):
        if exact.get(name) is None or f"d_{name}" not in values:
            continue
        terms = _at_states(np.abs(exact[name] * values[f"d_{name}"]), heads, tile)
        if steps > 1 and name in WRITERS:
            terms = terms.reshape(*terms.shape[:-2], -1, steps, terms.shape[-1]).sum(-2)
        total = total + np.cumsum(terms[..., ::-1, :], axis=-2)[..., ::-1, :]  # from each token on
    d_state = question.cotangents64.get("state")
    if d_state is not None and "state" in values:
        total = total + np.abs(d_state * values["state"]).sum(-1)[..., None, :]
    if not isinstance(total, np.ndarray):
        return {}
    total = unit * np.where(np.isfinite(total), total, 0.0)
    summed = total.sum(-1)  # (..., g, t): one decay for all channels
    found = {"d_decay": summed, "d_channel_decay": total, "d_head_decay": _per_head(summed)}
    if time:
        rate = np.abs(exact["a"])[:, None]
        step = np.abs(exact["dt"]) + (0.0 if exact.get("dt_bias") is None else np.abs(exact["dt_bias"])[:, None]) + 1.0
        found |= {"d_dt": rate * summed, "d_dt_bias": _per_head(rate * summed), "d_a": _per_head(step * summed)}
    return {n: np.broadcast_to(x, values[n].shape) for n, x in found.items() if n in values}


def carried_state(
    question: Question, exact: Mapping[str, Any], values: Mapping[str, np.ndarray], unit: float
) -> dict[str, np.ndarray]:
    """Mean squares of what a state, and its cotangent, that are rounded at every token do to results and gradients."""
    steps = question.mechanism.definition.steps
    inner = getattr(getattr(steps, "inner", None), "content", None)
    lifted = isinstance(inner, type) and issubclass(inner, Recurrence)
    if not isinstance(steps, type) or not (issubclass(steps, Recurrence) or lifted):
        return {}
    rng = np.random.default_rng(0)
    kind: Any = steps
    noisy: Any = type("Noisy", (steps,), {"inner": _noisy(inner, rng)}) if lifted else _noisy(steps, rng)
    exactly = _answer(kind, question, exact)
    squares = {n: np.zeros(x.shape) for n, x in exactly.items() if n in values}
    for _ in range(RUNS):
        found = _answer(noisy, question, exact)
        for n in squares:
            with np.errstate(invalid="ignore", over="ignore"):
                apart = (found[n] - exactly[n]) * (ROUNDINGS * unit / NOISE)
            squares[n] += np.square(np.where(np.isfinite(apart), apart, 0.0)) / RUNS
    return squares


def _noisy(kind: Any, rng: np.random.Generator) -> Any:
    def off(x: np.ndarray) -> np.ndarray:
        return x * (1 + NOISE * rng.standard_normal(x.shape))

    class Noisy(kind):
        @step
        def advance(self) -> Any:
            right = super().advance
            return lambda state, t: off(right(state, t))

        @step
        def retreat(self) -> Any:
            right = super().retreat
            return lambda d_state, t: off(right(d_state, t))

    return Noisy


def _answer(kind: Any, question: Question, exact: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Results and gradients by array name, as the question's conventions have them."""
    wanted = [n for n in question.wrt if exact.get(n) is not None]
    call = kind({n: x for n, x in exact.items() if x is not None}, question.cotangents64)
    found: Any = {n: np.asarray(x) for n, x in call.result().items()}
    if not question.cotangents or not wanted:
        return found
    gradients = call.gradient(wanted)
    follow = question.conventions
    turned = conventions_.reference_gradients(gradients, found, exact, question.cotangents64, follow, question.options)
    return found | {f"d_{n}": np.asarray(x) for n, x in turned.items()}


def _per_head(x: np.ndarray) -> np.ndarray:
    """Errors of many tokens, added up as independent ones."""
    return np.sqrt((x**2).sum(axis=(*range(x.ndim - 2), -1)))


def _at_states(x: np.ndarray, heads: int, tile: bool) -> np.ndarray:
    """Terms of each state: a shared head's count for all of its states, those of a state's queries add up."""
    own = x.shape[-3]
    if own == heads:
        return x
    if own < heads:
        order = np.arange(heads) % own if tile else np.arange(heads) // (heads // own)
        return np.take(x, order, axis=-3)
    shape = (own // heads, heads) if tile else (heads, own // heads)
    return x.reshape(*x.shape[:-3], *shape, *x.shape[-2:]).sum(axis=-4 if tile else -3)
