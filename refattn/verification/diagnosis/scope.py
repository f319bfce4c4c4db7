"""Under which conditions a mistake is made: what the calls that show it have in common and the right ones lack."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from refattn.verification.diagnosis.calls import JudgedCall

__all__ = ["Condition", "scope_of"]

_MOST = 3
"""Conditions of one scope, at most."""

_RANKS = (2, 7, 20)
"""Conditions up to the first rank are tried alone, then those up to the next."""


@dataclasses.dataclass(frozen=True)
class Condition:
    """Something that holds for a call or not, and how a sentence says it."""

    says: str
    holds: Callable[[Mapping[str, Any]], bool] = dataclasses.field(compare=False)
    rank: int = 0  # smaller ones are tried first where two separate alike


def scope_of(wrong: Sequence[JudgedCall], right: Sequence[JudgedCall]) -> tuple[Condition, ...] | None:
    """Conditions that hold for all calls in ``wrong`` and, together, for none in ``right``; None where there are no such.

    ``right`` holds calls in which the mistake would be seen and is not.  Without any the scope is empty: the mistake is made
    wherever it can be seen.
    """
    conditions = sorted(_conditions(wrong), key=lambda c: c.rank)
    for plain in _RANKS:  # several plain conditions say more than one far-fetched
        chosen = _separating([c for c in conditions if c.rank <= plain], right)
        if chosen is not None:
            return chosen
    return None


def _separating(conditions: Sequence[Condition], right: Sequence[JudgedCall]) -> tuple[Condition, ...] | None:
    left, chosen = list(right), []
    while left:
        if len(chosen) == _MOST:
            return None
        best, kept = None, left
        for condition in conditions:
            still = [c for c in left if condition.holds(c.features)]
            if len(still) < len(kept):
                best, kept = condition, still
        if best is None:
            return None
        chosen.append(best)
        left = kept
    return tuple(chosen)


def _conditions(calls: Sequence[JudgedCall]) -> Iterator[Condition]:
    """Conditions that hold for all of these calls."""
    first = calls[0].features
    sizes = [n for n, x in first.items() if isinstance(x, int) and not isinstance(x, bool)]
    flags = {n for c in calls for n, x in c.features.items() if isinstance(x, bool)}
    for name in flags:
        values = {bool(c.features.get(name, False)) for c in calls}
        if values == {True}:
            yield Condition(f"with {_words(name)}", lambda f, n=name: bool(f.get(n, False)), 1)
    for name in sizes:
        values_ = [c.features[name] for c in calls if name in c.features]
        later = 10 * (name in ("batch", "heads", "key heads", "value channels"))  # these hardly ever are the reason
        if len(values_) < len(calls):
            continue
        low, high = min(values_), max(values_)
        if low == high == 1:
            yield Condition(_one(name), lambda f, n=name: f.get(n) == 1, 0)
            continue
        if low > 1:
            yield Condition(f"with {name} from {low} on", lambda f, n=name, x=low: f.get(n, 0) >= x, 5 + later)
        yield Condition(f"with {name} up to {high}", lambda f, n=name, x=high: f.get(n, 0) <= x, 6 + later)
        for tile in (128, 64, 32, 16, 8, 4):
            if all(x % tile for x in values_):
                yield Condition(
                    f"where {name} are no multiple of {tile}", lambda f, n=name, t=tile: f.get(n, 0) % t != 0, 4 + later
                )
            if not any(x % tile for x in values_):
                yield Condition(
                    f"where {name} are a multiple of {tile}", lambda f, n=name, t=tile: f.get(n, 1) % t == 0, 3
                )
    for a, b in (("queries", "keys"), ("heads", "key heads"), ("channels", "value channels")):
        if a not in first or b not in first:
            continue
        for says, test in (
            (f"where {a} and {b} are equally many", lambda x, y: x == y),
            (f"where {a} and {b} differ in number", lambda x, y: x != y),
            (f"with more {a} than {b}", lambda x, y: x > y),
            (f"with fewer {a} than {b}", lambda x, y: x < y),
        ):
            if all(test(c.features.get(a), c.features.get(b)) for c in calls):
                yield Condition(says, lambda f, a=a, b=b, t=test: t(f.get(a, 0), f.get(b, 0)), 2)
    if len({c.dtype for c in calls}) == 1:
        yield Condition(f"in {calls[0].dtype}", lambda f, d=calls[0].dtype: f["dtype"] == d, 1)
    for name in flags:  # what is absent explains less readily than what is there
        if not any(c.features.get(name, False) for c in calls):
            yield Condition(f"without {_words(name)}", lambda f, n=name: not f.get(n, False), 7)


def _one(name: str) -> str:
    singular = {"queries": "query", "keys": "key", "heads": "head", "key heads": "key head", "batch": "batch entry"}
    return f"with one {singular.get(name, name.removesuffix('s'))}"


def _words(name: str) -> str:
    return (
        name
        if " " in name
        else {"causal": "causal", "mask": "a mask", "window": "a window", "bias": "a bias"}.get(name, name)
    )
