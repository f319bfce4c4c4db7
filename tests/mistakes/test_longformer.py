"""Mistakes of Longformer attention: each shows, differentiates its own forward, and gives these numbers."""

import numpy as np
from support import assert_mistakes_differentiate, assert_mistakes_show

from refattn.attention.longformer import longformer_attention as attention
from refattn.mistakes.engine import Case
from refattn.mistakes.longformer import catalogue

UNEQUAL = np.array([[1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1], [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]], bool)
EXAMPLES = (
    {"t": 11, "window": (2, 3), "global_tokens": UNEQUAL},
    {"t": 11, "window": (2, 2), "query_lengths": (11, 8), "key_lengths": (11, 8), "align": 0, "scale": 0.3},
)


def entry(name):
    return next(m for m in catalogue.own if m.edit.__name__ == name)


def test_every_mistake_shows():
    assert_mistakes_show(attention, catalogue, EXAMPLES, np.random.default_rng(0))


def test_gradients_are_those_of_the_wrong_forward():
    assert_mistakes_differentiate(attention, catalogue, EXAMPLES, np.random.default_rng(1))


def test_means_by_hand():
    """Each token and the one before it; token 0 is global: it sees all, and all see it."""
    x, v = np.zeros((1, 5, 1)), np.arange(5.0).reshape(1, 5, 1)
    given = {"q": x, "k": x, "v": v, "window": (1, 0), "global_tokens": np.arange(5) == 0}
    case = Case(catalogue.definition, given)

    def rows(name):
        return case.results(entry(name))["output"][0, :, 0].tolist()

    np.testing.assert_allclose(case.right.output[0, :, 0], [2.0, 0.5, 1.0, 5 / 3, 7 / 3], rtol=1e-15)
    assert rows("global_columns_drop") == [2.0, 0.5, 1.5, 2.5, 3.5]
    np.testing.assert_allclose(rows("global_rows_drop"), [0.0, 0.5, 1.0, 5 / 3, 7 / 3], rtol=1e-15)
    np.testing.assert_allclose(rows("global_twice"), [2.0, 1 / 3, 1.0, 5 / 3, 7 / 3], rtol=1e-15)


def test_filled_lists_by_hand():
    """One global token in the first entry, none in the second: there a key of logit 0 and value 0 joins every row."""
    x, v = np.zeros((2, 1, 3, 1)), np.ones((2, 1, 3, 1))
    tokens = np.array([[True, False, False], [False, False, False]])
    case = Case(catalogue.definition, {"q": x, "k": x, "v": v, "window": (0, 0), "global_tokens": tokens})
    wrong = case.results(entry("longformer_pad_global"))["output"][..., 0]
    assert wrong.tolist() == [[[1.0, 1.0, 1.0]], [[0.5, 0.5, 0.5]]]


def test_without_global_tokens_only_the_window_shows():
    given = attention.example(np.random.default_rng(3), n=0)
    cotangents = {"output": np.random.default_rng(4).standard_normal((2, 3, 11, 3))}
    case = Case(catalogue.definition, given, cotangents)
    assert {m.class_ for m in catalogue.own if case.results(m)} == {"window_plus1", "longformer_window_halved"}
    assert not any(case.gradients(m, "backward") for m in catalogue.own if m.sides == ("backward",))
