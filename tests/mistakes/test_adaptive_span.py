"""Mistakes of adaptive spans: each shows, and what the important ones give."""

import numpy as np
from support import assert_mistakes_show

from refattn.attention.adaptive_span import adaptive_span_attention as attention
from refattn.mistakes.adaptive_span import catalogue
from refattn.mistakes.engine import Case


def entry(name):
    return next(m for m in catalogue if m.edit.__name__ == name)


def test_every_mistake_shows():
    examples = (
        {"q": 5, "k": 17, "span": np.array([4.0, 0.0, 7.0]), "ramp": 3.0, "max_span": 12, "n": 2},
        {"q": 5, "k": 17, "ramp": 3.0, "max_span": 12, "n": 1},
        {"q": 4, "k": 9, "ramp": 2.5, "distance_origin": 0, "renormalize_eps": 0.5},
    )
    assert_mistakes_show(attention, catalogue, examples, np.random.default_rng(0))


def test_numbers_by_hand():
    # Three past keys of equal logits at distances 1, 2, 3; span 1 and ramp 2: weights 1, 1/2, 0 before they are normalised.
    given = {"q": np.zeros((1, 1, 1)), "k": np.zeros((1, 4, 1)), "v": np.array([[[9.0], [6.0], [3.0], [0.0]]])}
    case = Case(
        catalogue.definition,
        {**given, "span": np.array([1.0]), "ramp": 2.0, "max_span": 3},
        {"output": np.ones((1, 1, 1))},
    )

    def output(name):
        return float(case.results(entry(name))["output"].squeeze())

    np.testing.assert_allclose(float(case.right.output.squeeze()), (3 + 6 / 2) / 1.5, rtol=1e-15)
    np.testing.assert_allclose(
        output("span_not_renormalised"), (3 + 6 / 2) / 3, rtol=1e-15
    )  # three keys within the ramp
    np.testing.assert_allclose(output("span_hard"), 3.0, rtol=1e-15)
    np.testing.assert_allclose(output("span_origin"), (3 + 6 + 9 / 2) / 2.5, rtol=1e-15)
    np.testing.assert_allclose(output("span_self_visible"), 3 / 2 / 1.5, rtol=1e-15)  # 0, 3 of weights 1, 1/2
    # d span = 1/2 sum of (v - output) / 1.5 over the ramp, both of its ends included: keys of weights 1, 1/2, 0.
    right = float(case.right.gradient()["span"][0])
    np.testing.assert_allclose(right, (-1 + 2 + 5) / 3, rtol=1e-14)
    wrong = case.gradients(entry("span_ramp_grad"), "backward")["span"][0]
    np.testing.assert_allclose(wrong, (-1 + 2) / 3, rtol=1e-14)
    wrong = case.gradients(entry("span_ramp_grad_exclusive"), "backward")["span"][0]
    np.testing.assert_allclose(wrong, 2 / 3, rtol=1e-14)
