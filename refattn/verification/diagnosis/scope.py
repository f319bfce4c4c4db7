"""Under which conditions a mistake is made: what the calls that show it have in common and the right ones lack."""

import dataclasses
import operator
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
    left, chosen = list(right), list[Condition]()
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
    flags = sorted({n for c in calls for n, x in c.features.items() if isinstance(x, bool)})
    for name in flags:
        if all(c.features.get(name, False) for c in calls):
            yield Condition(f"with {_words(name)}", _flag(name, True), 1)
    for name in sizes:
        lengths = [c.features[name] for c in calls if name in c.features]
        later = 10 * (name in ("batch", "heads", "key heads", "value channels"))  # these hardly ever are the reason
        if len(lengths) < len(calls):
            continue
        low, high = min(lengths), max(lengths)
        if low == high == 1:
            yield Condition(_one(name), _size(name, (1).__eq__), 0)
            continue
        if low > 1:
            yield Condition(f"with {name} from {low} on", _size(name, low.__le__), 5 + later)
        yield Condition(f"with {name} up to {high}", _size(name, high.__ge__), 6 + later)
        for tile in (128, 64, 32, 16, 8, 4):
            if all(x % tile for x in lengths):
                yield Condition(f"where {name} are no multiple of {tile}", _size(name, _off_tiles(tile)), 4 + later)
            if not any(x % tile for x in lengths):
                yield Condition(f"where {name} are a multiple of {tile}", _size(name, _on_tiles(tile)), 3 + later)
    for a, b in (("queries", "keys"), ("heads", "key heads"), ("channels", "value channels")):
        if a not in first or b not in first:
            continue
        for says, test in (
            (f"where {a} and {b} are equally many", operator.eq),
            (f"where {a} and {b} differ in number", operator.ne),
            (f"with more {a} than {b}", operator.gt),
            (f"with fewer {a} than {b}", operator.lt),
        ):
            compared = _compared(a, b, test)
            if all(compared(c.features) for c in calls):
                yield Condition(says, compared, 2)
    if len({c.dtype for c in calls}) == 1:
        dtype = calls[0].dtype
        yield Condition(f"in {dtype}", lambda features: features["dtype"] == dtype, 1)
    for name in flags:  # what is absent explains less readily than what is there
        if not any(c.features.get(name, False) for c in calls):
            yield Condition(f"without {_words(name)}", _flag(name, False), 7)


Holds = Callable[[Mapping[str, Any]], bool]


def _flag(name: str, wanted: bool) -> Holds:
    return lambda features: bool(features.get(name, False)) is wanted


def _size(name: str, test: Callable[[int], bool]) -> Holds:
    return lambda features: name in features and bool(test(features[name]))


def _compared(a: str, b: str, test: Callable[[int, int], bool]) -> Holds:
    return lambda features: bool(test(features.get(a, 0), features.get(b, 0)))


def _on_tiles(tile: int) -> Callable[[int], bool]:
    return lambda x: x % tile == 0


def _off_tiles(tile: int) -> Callable[[int], bool]:
    return lambda x: x % tile != 0


def _one(name: str) -> str:
    singular = {"queries": "query", "keys": "key", "heads": "head", "key heads": "key head", "batch": "batch entry"}
    return f"with one {singular.get(name, name.removesuffix('s'))}"


def _words(name: str) -> str:
    articles = {"mask": "a mask", "window": "a window", "bias": "a bias", "scale": "a scale", "softcap": "a soft cap"}
    return articles.get(name, name)
