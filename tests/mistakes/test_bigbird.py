"""Mistakes of BigBird attention: each shows, differentiates its own forward, and gives these numbers."""

import numpy as np
from support import assert_mistakes_differentiate, assert_mistakes_show

from refattn.attention.bigbird import bigbird_attention as attention
from refattn.mistakes.bigbird import catalogue
from refattn.mistakes.engine import Case

DRAWN = np.array([[[3, -1], [0, 3], [0, 0], [1, -1], [2, 3]], [[-1, -1], [3, 4], [4, -1], [0, 1], [0, 1]]])
EXAMPLES = (
    {"t": 20, "r": 2},
    {"t": 19, "block": 2, "r": 1, "global_blocks": (1, 0)},
    {"t": 9, "h": 2, "block": 2, "random_blocks": DRAWN, "global_blocks": (0, 0), "window_blocks": 1},
)


def entry(name):
    return next(m for m in catalogue.own if m.edit.__name__ == name)


def test_every_mistake_shows():
    assert_mistakes_show(attention, catalogue, EXAMPLES, np.random.default_rng(0))


def test_gradients_are_those_of_the_wrong_forward():
    assert_mistakes_differentiate(attention, catalogue, EXAMPLES[1:], np.random.default_rng(1))


def test_means_by_hand():
    """Blocks {0, 1}, {2, 3}, {4, 5}, of which the first is global and the last drew the middle one."""
    x, v = np.zeros((1, 6, 1)), np.arange(6.0).reshape(1, 6, 1)
    drawn = np.array([[[-1], [-1], [1]]])
    given = {"q": x, "k": x, "v": v, "block": 2, "window_blocks": 0, "global_blocks": (1, 0), "random_blocks": drawn}
    case = Case(catalogue.definition, given)

    def rows(name):
        return case.results(entry(name))["output"][0, ::2, 0].tolist()

    assert case.right.output[0, ::2, 0].tolist() == [2.5, 1.5, 2.5]
    assert rows("bigbird_random_drop") == [2.5, 1.5, 2.5 + 0.0]  # {0, 1, 4, 5} has the same mean
    assert rows("bigbird_random_transposed") == [2.5, 2.5, 2.5]
    assert rows("global_columns_drop") == [2.5, 2.5, 3.5]
    assert rows("global_rows_drop") == [0.5, 1.5, 2.5]
    assert rows("bigbird_none_is_last") == [2.5, 2.5, 2.5]


def test_everything_global_leaves_nothing_to_get_wrong():
    case = Case(catalogue.definition, attention.example(np.random.default_rng(2), t=12, global_blocks=(3, 3)))
    shown = {m.class_ for m in catalogue.own if case.results(m) is not None}
    assert shown <= {"bigbird_global", "bigbird_duplicates"}
