"""Mistakes of Nystrom attention: each shows, and what the important ones give."""

import numpy as np
from support import assert_mistakes_show

from refattn.attention.nystrom import nystrom_attention as attention
from refattn.mistakes.engine import Case
from refattn.mistakes.nystrom import catalogue


def entry(name):
    return next(m for m in catalogue if m.edit.__name__ == name)


def test_every_mistake_shows():
    examples = (
        {"q": 8, "k": 11, "landmarks": 3, "iterations": 2},
        {"q": 9, "k": 9, "landmarks": 3, "iterations": 2, "pinv_scale": "batch"},
    )
    assert_mistakes_show(attention, catalogue, examples, np.random.default_rng(0))


def test_one_landmark_by_hand():
    # One landmark: left and middle are 1, the inverse 1, so the output is softmax(mean of q . k) v.  Three queries 0, 0, 3 and
    # keys of logit 0, ln 2: with the mean (1) weights 1/3, 2/3; with the first token (0) 1/2, 1/2; with the sum (3) 1/9, 8/9.
    given = {"q": np.array([[[0.0], [0.0], [3.0]]]), "k": np.log([[[1.0], [2.0]]]), "v": np.array([[[3.0], [6.0]]])}
    case = Case(catalogue.definition, {**given, "landmarks": 1})
    np.testing.assert_allclose(case.right.output[0, :, 0], 5.0, rtol=1e-15)
    first = case.results(entry("nystrom_first_tokens"))["output"][0, :, 0]
    np.testing.assert_allclose(first, 4.5, rtol=1e-15)
    sums = case.results(entry("nystrom_sums"))["output"][0, :, 0]
    np.testing.assert_allclose(sums, 51 / 9, rtol=1e-15)
    assert case.results(entry("nystrom_exact")) is None
    assert case.results(entry("nystrom_scale")) is None


def test_the_batch_s_scale_needs_a_batch():
    rng = np.random.default_rng(1)
    given = attention.example(rng, b=1, h=1, landmarks=3, iterations=2)
    assert Case(catalogue.definition, given).results(entry("nystrom_scale")) is None
    given = attention.example(rng, b=2, h=1, landmarks=3, iterations=2)
    wrong = Case(catalogue.definition, given).results(entry("nystrom_scale"))["output"]
    right = attention(**given, pinv_scale="batch")
    np.testing.assert_allclose(wrong, right, rtol=0, atol=1e-13)
