"""Covering arrays: few rows in which every pair (or triple) of levels stands together somewhere.

Greedy, one row after another: it starts with a set of levels that no row has yet and gives each other feature the level that
completes most of what is left; where that makes no difference, the first level, which is the plain one.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

__all__ = ["combinations", "covering_rows"]

Levels = Mapping[str, Sequence[str]]
Row = dict[str, str]
Chosen = tuple[tuple[str, str], ...]
Possible = Callable[[Row], bool]


def combinations(features: Levels, strength: int, possible: Possible = lambda row: True) -> list[Chosen]:
    """Every possible set of ``strength`` levels of different features, as ((feature, level), ...)."""
    found = []
    for names in itertools.combinations(features, strength):
        for levels in itertools.product(*(features[n] for n in names)):
            if possible(dict(zip(names, levels, strict=True))):
                found.append(tuple(zip(names, levels, strict=True)))
    return found


def covering_rows(
    features: Levels,
    *,
    strength: int = 2,
    possible: Possible = lambda row: True,
    covered: Iterable[Mapping[str, str]] = (),
    seed: int = 0,
) -> list[Row]:
    """Rows that hold, together with the rows already ``covered``, every possible set of ``strength`` levels.

    Parameters
    ----------
    features
        Levels by feature; the first level of each is the plain one, which must be possible beside everything.
    possible
        Whether levels of some features go together; what it refuses stays refused however many are added.
    """
    rng = np.random.default_rng(seed)
    names = list(features)
    place = {n: i for i, n in enumerate(names)}
    left = dict.fromkeys(combinations(features, strength, possible))

    def sets_of(row: Mapping[str, str]) -> Iterable[Chosen]:
        return itertools.combinations([(n, row[n]) for n in names], strength)

    def gain(row: Row, name: str, level: str) -> int:
        """How many sets are completed by giving ``name`` this level."""
        total = 0
        for others in itertools.combinations(row.items(), strength - 1):
            total += tuple(sorted([*others, (name, level)], key=lambda x: place[x[0]])) in left
        return total

    for row in covered:
        for chosen in sets_of({n: row.get(n, features[n][0]) for n in names}):
            left.pop(chosen, None)
    rows: list[Row] = []
    while left:
        row = dict(next(iter(left)))
        for name in rng.permutation([n for n in names if n not in row]).tolist():
            best, most = features[name][0], gain(row, name, features[name][0])
            for level in features[name][1:]:
                more = gain(row, name, level)
                if more > most and possible({**row, name: level}):
                    best, most = level, more
            row[name] = best
        for chosen in sets_of(row):
            left.pop(chosen, None)
        rows.append({n: row[n] for n in names})
    return rows
