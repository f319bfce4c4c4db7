"""Mistakes of local attention: each shows, differentiates its own forward, and gives these numbers."""

import numpy as np
import pytest
from support import assert_mistakes_differentiate, assert_mistakes_show

from refattn.attention.local import local_attention as attention
from refattn.mistakes.engine import Case
from refattn.mistakes.local import catalogue

BOTH_SIDES = {"t": 20, "block": 3, "look_backward": 2, "look_forward": 1}
EXAMPLES = (
    BOTH_SIDES,
    {**BOTH_SIDES, "exact": True},
    {**BOTH_SIDES, "causal": True, "align": 2},
    {**BOTH_SIDES, "exact": True, "causal": True, "align": 2},
)


def test_every_mistake_shows():
    assert_mistakes_show(attention, catalogue, EXAMPLES, np.random.default_rng(0))


def test_gradients_are_those_of_the_wrong_forward():
    assert_mistakes_differentiate(attention, catalogue, EXAMPLES[1:3], np.random.default_rng(1))


@pytest.mark.parametrize(
    ("says", "rows"),
    [
        ("the first blocks see the last ones, and the other way round (blocks)", [5 / 3, 5 / 3, 1.5, 1.5, 3.0]),
        ("the window sees one block too few to the left (blocks)", [0.5, 0.5, 2.5, 2.5, 4.0]),
        ("positions beyond the last full block are seen by nobody (blocks)", [0.5, 0.5, 1.5, 1.5, 2.5]),
        ("the own block hides its future, without causal (blocks)", [0.0, 0.5, 1.0, 1.5, 3.0]),
        ("zeros that fill up the last block count as keys of logit 0 (blocks)", [0.5, 0.5, 1.5, 1.5, 9 / 4]),
    ],
)
def test_means_by_hand(says, rows):
    """Values 0 ... 4 in blocks {0, 1}, {2, 3}, {4}, each with the one before it: means of what is seen."""
    x, v = np.zeros((1, 5, 1)), np.arange(5.0).reshape(1, 5, 1)
    case = Case(catalogue.definition, {"q": x, "k": x, "v": v, "block": 2})
    assert case.right.output[0, :, 0].tolist() == [0.5, 0.5, 1.5, 1.5, 3.0]
    mistake = next(m for m in catalogue.own if m.says == says)
    np.testing.assert_allclose(case.results(mistake)["output"][0, :, 0], rows, rtol=1e-14)


def test_the_look_ahead_that_causal_cuts():
    """Query 7 stands at key 8: it sees its own block and, causal or not, that of key 8."""
    x, v = np.zeros((1, 9, 1)), np.arange(9.0)[None, :, None]
    given = {"q": x, "k": x, "v": v, "block": 1, "look_backward": 0, "look_forward": 1, "causal": True, "align": 1}
    case = Case(catalogue.definition, given)
    assert case.right.output[0, 7, 0] == 7.5
    cut = next(m for m in catalogue.own if m.class_ == "local_causal_cuts_ahead" and "blocks" in m.says)
    assert case.results(cut)["output"][0, 7, 0] == 7.0


def test_what_changes_nothing_is_not_offered():
    given = attention.example(np.random.default_rng(2), t=6, block=3, causal=True)
    case = Case(catalogue.definition, given, {"output": np.ones((2, 3, 6, 3))})
    silent = ("local_wrap", "local_own_block_causal", "local_tail_dropped", "local_first_block_empty")
    for m in catalogue.own:
        if m.class_ in silent or m.says.endswith("(distances)"):
            assert case.results(m) is None, m.says
            assert case.gradients(m) is None, m.says
