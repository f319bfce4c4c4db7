"""Mistakes of top-k attention: each shows, differentiates its own forward, and gives these numbers."""

import numpy as np
from support import assert_mistakes_differentiate, assert_mistakes_show

from refattn import patterns
from refattn.attention.topk import topk_attention as attention
from refattn.mistakes.engine import Case
from refattn.mistakes.topk import catalogue


def rng(seed=0):
    return np.random.default_rng(seed)


def ramp(s, b, h, i, j):
    return s + 0.3 * j


SOME = np.where(np.arange(20) < 16, -1, np.arange(20))
EXAMPLES = (
    {"mask": rng(1).random((2, 1, 5, 7)) < 0.6, "bias": 2 * rng(2).standard_normal((3, 5, 7))},
    {"q": 9, "k": 9, "causal": True, "alibi_slopes": np.array([0.5, 1.0, 0.2])},
    {"q": 9, "k": 9, "window": (2, 2), "score_mod": ramp},
    {"pattern": patterns.dilated(2), "key_lengths": [5, 7], "align": 0},
    {"n": 3, "count": 2, "k": 9},
    {"k": 23, "q": 21, "indices": np.where(np.arange(21)[:, None] % 2, SOME, np.arange(20) % 7)[None]},
)


def entry(name):
    return next(m for m in catalogue.own if m.edit.__name__ == name)


def test_every_mistake_shows():
    assert_mistakes_show(attention, catalogue, EXAMPLES, rng())


def test_gradients_are_those_of_the_wrong_forward():
    assert_mistakes_differentiate(attention, catalogue, EXAMPLES[:4], rng(1))


def test_numbers_by_hand():
    """Logits 0, ln 2, ln 4, values 9, 3, 6, two keys kept: weights 1/3 and 2/3."""
    q, k = np.ones((1, 1, 1)), np.log([[[1.0], [2.0], [4.0]]])
    v = np.array([[[9.0], [3.0], [6.0]]])
    case = Case(catalogue.definition, {"q": q, "k": k, "v": v, "count": 2}, {"output": np.ones((1, 1, 1))})

    def output(name):
        return case.results(entry(name))["output"].item()

    np.testing.assert_allclose(case.right.output.item(), 5.0, rtol=1e-15)
    np.testing.assert_allclose(output("topk_smallest"), 9 / 3 + 2 * 3 / 3, rtol=1e-15)
    np.testing.assert_allclose(output("topk_ignored"), (9 + 6 + 24) / 7, rtol=1e-15)
    np.testing.assert_allclose(output("topk_not_renormalised"), (6 + 24) / 7, rtol=1e-15)
    # the right lse is ln 6: a backward over all keys gives key 0 exp(0) / 6 of the cotangent
    wrong = case.gradients(entry("topk_grad"), "backward")
    np.testing.assert_allclose(wrong["v"][0, :, 0], [1 / 6, 1 / 3, 2 / 3], rtol=1e-15)


def test_which_keys_are_taken():
    q, k, v = np.ones((1, 1, 1)), np.array([[[2.0], [1.0], [2.0]]]), np.eye(3)[None]
    case = Case(catalogue.definition, {"q": q, "k": k, "v": v, "count": 1, "mask": np.array([[True, True, True]])})
    assert case.right.chosen.tolist() == [[[0]]]
    assert case.results(entry("topk_ties"))["indices"].tolist() == [[[2]]]
    assert (case.results(entry("topk_threshold"))["output"][0, 0] > 0).tolist() == [True, False, True]
    hidden = Case(catalogue.definition, {"q": q, "k": k, "v": v, "count": 1, "mask": np.array([[False, True, False]])})
    assert hidden.right.output[0, 0].tolist() == [0.0, 1.0, 0.0]
    assert hidden.results(entry("topk_before_mask"))["output"][0, 0].tolist() == [0.0, 0.0, 0.0]


def test_a_first_tile_without_keys():
    q, v = np.ones((1, 2, 1)), np.array([[[1.0], [2.0]]])
    given = {"q": q, "k": q, "v": v, "indices": np.array([[[-1, -1, 1], [0, -1, -1]]])}
    case = Case(catalogue.definition, given)
    assert case.right.output[0, :, 0].tolist() == [2.0, 1.0]
    wrong = case.results(entry("first_chosen_absent"))["output"][0, :, 0]
    assert np.isnan(wrong).tolist() == [True, False]


def test_all_keys_chosen_leave_nothing_to_get_wrong():
    case = Case(catalogue.definition, attention.example(rng(12), count=7))
    for m in catalogue.own:
        if m.class_.startswith("topk_") and m.class_ not in ("topk_count", "topk_rows") and "both" in m.sides:
            shown = case.results(m)
            assert shown is None or np.allclose(shown["output"], case.right.output), m.says
