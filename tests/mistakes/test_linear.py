"""Mistakes of linear attention: each shows, and what the important ones give."""

import numpy as np
from support import assert_mistakes_show

from refattn.attention.linear import linear_attention as attention
from refattn.mistakes.engine import Case
from refattn.mistakes.linear import catalogue

STATE = {"state": True, "normalizer": True}


def entry(name):
    return next(m for m in catalogue if m.edit.__name__ == name)


def test_every_mistake_shows():
    examples = (
        {"q": 140, "k": 140, "d": 4, "e": 4, "causal": True, "scale": 0.7, **STATE},
        {"q": 5, "k": 7, "key_lengths": (3, 7), "normalize_eps": 5.0, "scale": 0.7, **STATE},
        {"q": 5, "k": 7, "normalize": False},
    )
    assert_mistakes_show(attention, catalogue, examples, np.random.default_rng(0))


def test_numbers_by_hand():
    # phi(0) = 1: three keys of weight 1 each, values 3, 5, 1.
    x, v = np.zeros((1, 3, 1)), np.array([[[3.0], [5.0], [1.0]]])
    case = Case(
        catalogue.definition, {"q": x, "k": x, "v": v, "causal": True, "scale": 1.0}, {"output": np.ones((1, 3, 1))}
    )

    def output(name):
        return case.results(entry(name))["output"][0, :, 0].tolist()

    assert output("norm_recip") == [3.0, 16.0, 27.0]
    assert output("norm_future") == [1.0, 8 / 3, 3.0]
    assert output("norm_drop") == [3.0, 8.0, 9.0]
    assert output("causal_strict") == [0.0, 3.0, 4.0]
    assert output("causal_drop") == [3.0, 3.0, 3.0]
    assert case.gradients(entry("norm_recip"))["v"][0, :, 0].tolist() == [6.0, 5.0, 3.0]  # 1 + 2 + 3, 2 + 3, 3
    # dk = sum over the queries that see the key of (v - output) / their number; without the divisor's part: of v / number.
    right = case.right.gradient()["k"][0, :, 0]
    np.testing.assert_allclose(right, [-0.5, 1 / 2 + 2 / 3, -2 / 3], rtol=1e-14)
    wrong = case.gradients(entry("norm_grad_missing"), "backward")
    np.testing.assert_allclose(wrong["k"][0, :, 0], [3 + 3 / 2 + 1, 5 / 2 + 5 / 3, 1 / 3], rtol=1e-14)
    np.testing.assert_array_equal(wrong["q"], case.right.gradient()["q"])


def test_a_carry_lost_after_the_second_chunk_shows_beyond_it():
    given = attention.example(np.random.default_rng(1), q=129, k=129, causal=True)
    output = Case(catalogue.definition, given).results(entry("state_of_one_chunk"))
    # the variant of 16 is the first: rows of the third chunk on
    rows = np.abs(output["output"] - attention(**given)).max((0, 1, 3)) > 1e-9
    assert np.flatnonzero(rows)[0] == 32


def test_cotangents_without_rows_count_once():
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 3, 5, 4)) for _ in range(3))
    back = {"output": rng.standard_normal((2, 3, 5, 4)), "state": rng.standard_normal((2, 3, 4, 4))}
    case = Case(catalogue.definition, {"q": q, "k": k, "v": v}, back)
    rows = np.zeros((2, 3, 5), bool)
    rows[..., 3:] = True
    assert case.gradients(entry("causal_drop"), rows=rows) is None  # nothing is causal here
