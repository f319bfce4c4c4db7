"""Mistakes that the engine makes are caught and named: a small sample (`make mutation-score` takes all of them)."""

import collections
import types

import numpy as np
import pytest
from verification.mutation_score import SCOPES, rows_at, scores_of


@pytest.mark.parametrize(("mechanism", "sample"), [("efficient_attention", 6), ("linear_attention", 3)])
def test_a_sample_is_caught_and_named(mechanism, sample):
    found = [s for s in scores_of(mechanism, own=sample, lifted=0, seed=3, largest=20_000) if s.outcome != "silent"]
    counts = collections.Counter(s.outcome for s in found)
    assert len(found) >= 2 * sample
    assert counts["missed"] == 0, found
    assert counts["named"] + counts["alike"] >= 0.9 * len(found), found
    assert {s.scope for s in found} == set(SCOPES)


def test_places_leave_something_beside_them():
    shapes = []
    for shape in ((2, 3, 19, 4), (1, 1, 33, 4), (2, 5, 16, 4)):
        call = types.SimpleNamespace(truth=types.SimpleNamespace(values={"output": np.zeros(shape)}))
        shapes.append([rows_at(call, place) for place in ("last head", "tail tile")])
    assert shapes[0][0].sum() == 2 * 19
    assert shapes[0][1].sum() == 2 * 3 * 3
    assert shapes[1][0] is None
    assert shapes[1][1].sum() == 1
    assert shapes[2][1] is None
