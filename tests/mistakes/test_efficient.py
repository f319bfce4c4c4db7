"""Mistakes of efficient attention: each shows, and what the important ones give."""

import numpy as np
from support import assert_mistakes_show

from refattn.attention.efficient import efficient_attention as attention
from refattn.mistakes.efficient import catalogue
from refattn.mistakes.engine import Case


def entry(name):
    return next(m for m in catalogue if m.edit.__name__ == name)


def test_every_mistake_shows():
    examples = ({"d": 4, "e": 4, "key_lengths": (4, 7)}, {"key_lengths": (0, 7)})
    assert_mistakes_show(attention, catalogue, examples, np.random.default_rng(0))


def test_numbers_by_hand():
    # One channel: its weight is 1, so the output is the mean of the values weighted by exp(k) = 1, 2, 5 (the last is padding).
    given = {"q": np.zeros((1, 2, 1)), "k": np.log([[[1.0], [2.0], [5.0]]]), "v": np.array([[[3.0], [6.0], [9.0]]])}
    case = Case(catalogue.definition, {**given, "key_lengths": 2}, {"output": np.ones((1, 2, 1))})

    def output(name):
        return case.results(entry(name))["output"].ravel()

    np.testing.assert_allclose(case.right.output.ravel(), [5.0, 5.0], rtol=1e-15)
    np.testing.assert_allclose(output("efficient_query_axis"), [2.5, 2.5], rtol=1e-15)
    np.testing.assert_allclose(output("efficient_key_axis"), [9.0, 9.0], rtol=1e-15)
    np.testing.assert_allclose(output("tail_unmasked"), [15 / 4, 15 / 4], rtol=1e-15)
    np.testing.assert_allclose(output("lengths_drop"), [60 / 8, 60 / 8], rtol=1e-15)
    np.testing.assert_allclose(output("mask_after_softmax"), [15 / 8, 15 / 8], rtol=1e-15)
    # dk = 2 queries x weight (v - 5); without the column term 2 weight v.
    wrong = case.gradients(entry("key_delta_missing"), "backward")["k"].ravel()
    np.testing.assert_allclose(wrong, [2 * 3 / 3, 2 * 2 * 6 / 3, 0.0], rtol=1e-15)


def test_a_softmax_without_its_maximum_overflows_in_the_dtype_of_the_call():
    given = {n: np.full((1, 2, 2), x) for n, x in (("q", 100.0), ("k", 1.0), ("v", 1.0))}
    mistake = entry("unshifted_softmax")
    assert Case(catalogue.definition, given).results(mistake) is None
    narrow = Case(catalogue.definition, {n: x.astype(np.float32) for n, x in given.items()})
    assert np.isnan(narrow.results(mistake)["output"]).all()
