"""Checks that need no reference: relations between a candidate's own results.

Each relation follows from the form softmax(scores of q and k) . v alone, whatever the scores are.  A relation is held to
the rounding of a few results: 64 unit roundoffs of the storage dtype, relative to the largest value.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from refattn import precision
from refattn.mechanism import Mechanism
from refattn.verification.candidate import Call, Outcome
from refattn.verification.conventions import CONVENTION_OPTIONS
from refattn.verification.probes import storage_dtype

__all__ = ["check_properties"]

ROUNDOFFS = 64.0

_Arrays = dict[str, np.ndarray]
# A relation: name, what it says, calls (arrays, options), and what must be equal as pairs made from their outputs.
_Relation = tuple[str, str, list[tuple[_Arrays, dict[str, Any]]], Callable[[list[np.ndarray]], list[tuple[Any, Any]]]]


def check_properties(
    mechanism: Mechanism,
    ask: Callable[[Sequence[Call]], Sequence[Outcome]],
    dtype: str,
    accepts: Callable[[tuple[str, ...]], bool],
) -> list[dict[str, Any]]:
    """Run the relations that a candidate can take; empty for mechanisms that are not softmax over keys.

    Returns
    -------
    list of dict
        ``name``, ``ok`` and ``says``: what the relation is, and by how much it fails.
    """
    if "lse" not in mechanism.outputs or mechanism.positional != ("q", "k", "v"):
        return []
    found = []
    for name, says, calls, equal in _relations(np.random.default_rng(7), dtype):
        options = {n for _, more in calls for n in more} - set(CONVENTION_OPTIONS)
        if not options <= set(mechanism.options) or not accepts(tuple(sorted(options))):
            continue
        asked = [
            Call(f"{name}/{i}", mechanism.name, dict(arrays), dict(more)) for i, (arrays, more) in enumerate(calls)
        ]
        outcomes = ask(asked)
        if any(outcome.status != "ok" or "output" not in outcome.fields for outcome in outcomes):
            continue  # the probes say what is wrong there
        worst = 0.0
        for left, right in equal([outcome.fields["output"].astype(np.float64) for outcome in outcomes]):
            apart = np.max(np.abs(left - right), initial=0.0) / max(np.max(np.abs(right), initial=0.0), 1.0)
            worst = max(worst, float(apart) if np.isfinite(apart) else np.inf)
        units = worst / precision.unit_roundoff(dtype)
        ok = units <= ROUNDOFFS
        found.append({"name": name, "ok": ok, "says": says if ok else f"{says}; off by {units:.3g} unit roundoffs"})
    return found


def _relations(rng: np.random.Generator, dtype: str) -> Iterator[_Relation]:
    kind = storage_dtype(dtype)

    def draw(rows: int, keys: int) -> _Arrays:
        shapes = {"q": (2, 4, rows, 20), "k": (2, 4, keys, 20), "v": (2, 4, keys, 20)}
        return {n: rng.standard_normal(shape).astype(kind) for n, shape in shapes.items()}

    a = draw(11, 37)
    ones = {**a, "v": np.ones_like(a["v"])}
    yield "ones", "values of 1 give outputs of 1", [(ones, {})], lambda o: [(o[0], np.ones_like(o[0]))]

    doubled = {**a, "v": (a["v"] * kind.type(2)).astype(kind)}
    yield "linear", "doubled values double the output", [(a, {}), (doubled, {})], lambda o: [(o[1], 2 * o[0])]

    order = rng.permutation(37)
    shuffled = {**a, "k": a["k"][..., order, :], "v": a["v"][..., order, :]}
    yield "key_order", "the order of the keys does not matter", [(a, {}), (shuffled, {})], lambda o: [(o[1], o[0])]

    single: list[tuple[_Arrays, dict[str, Any]]] = [({n: x[i : i + 1] for n, x in a.items()}, {}) for i in range(2)]
    says = "a batch entry does not depend on the others"
    yield "batch", says, [(a, {}), *single], lambda o: [(o[1], o[0][:1]), (o[2], o[0][1:])]

    shifted = {n: x.copy() for n, x in a.items()}
    shifted["q"][..., -1] = 2
    raised = {**shifted, "k": shifted["k"].copy()}
    shifted["k"][..., -1], raised["k"][..., -1] = -4, 4
    says = "a constant added to all logits of a row does not matter"
    yield "shift", says, [(shifted, {}), (raised, {})], lambda o: [(o[1], o[0])]

    t = draw(37, 37)
    later = {**t, "k": t["k"].copy(), "v": t["v"].copy()}
    later["k"][..., 20:, :], later["v"][..., 20:, :] = 3, -3
    says = "with causal, later keys and values do not reach earlier rows"
    causal = {"causal": True, "align": "upper_left"}
    yield "future", says, [(t, causal), (later, causal)], lambda o: [(o[1][..., :20, :], o[0][..., :20, :])]
