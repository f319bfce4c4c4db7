"""Mistakes of Linformer and Sinkhorn attention: each shows, and what the important ones give."""

import numpy as np
from support import assert_mistakes_show

from refattn.attention.linformer import linformer_attention
from refattn.attention.sinkhorn import sinkhorn_attention
from refattn.mistakes.engine import Case
from refattn.mistakes.linformer import catalogue as linformer
from refattn.mistakes.sinkhorn import catalogue as sinkhorn


def entry(name, where):
    return next(m for m in where if m.edit.__name__ == name)


def test_every_mistake_shows():
    far = 1e3 * np.random.default_rng(0).standard_normal((2, 3, 4, 4))
    examples = (
        {"t": 12, "block": 3, "causal": True},
        {"t": 12, "block": 3},
        {"t": 12, "block": 3, "sort_logits": far},
    )
    assert_mistakes_show(sinkhorn_attention, sinkhorn, examples, np.random.default_rng(0))
    examples = ({"k": 4, "n": 4}, {})
    assert_mistakes_show(linformer_attention, linformer, examples, np.random.default_rng(1))


def test_a_mistake_that_does_not_show_says_so():
    given = linformer_attention.example(np.random.default_rng(2))
    given["e_v"] = given["e_k"]
    case = Case(linformer.definition, given)
    silent = {m.edit.__name__ for m in linformer.own if "forward" in m.sides and case.results(m) is None}
    assert silent == {"linformer_shared", "linformer_exchanged", "linformer_transposed"}


def test_the_sort_by_hand():
    # Two blocks of one token, values 2 and 4; R = [[0, 1], [1, 0]] exchanges them: each query sees both, with equal weights.
    x = np.ones((1, 2, 1))
    given = {
        "q": 0 * x,
        "k": x,
        "v": np.array([[[2.0], [4.0]]]),
        "sort_logits": np.array([[[-50.0, 50.0], [50.0, -50.0]]]),
    }
    case = Case(sinkhorn.definition, {**given, "block": 1})

    def output(name):
        return case.results(entry(name, sinkhorn))["output"].ravel()

    np.testing.assert_allclose(case.right.output.ravel(), [3.0, 3.0], rtol=1e-15)
    np.testing.assert_allclose(output("sinkhorn_own_block"), [4.0, 2.0], rtol=1e-15)
    np.testing.assert_allclose(output("sinkhorn_values"), [2.0, 4.0], rtol=1e-15)
    np.testing.assert_allclose(output("sinkhorn_sorted_block"), [2.0, 4.0], rtol=1e-15)
    assert case.results(entry("sinkhorn_order", sinkhorn)) is None


def test_dense_mistakes_are_lifted():
    for where in (linformer, sinkhorn):
        names = {m.class_ for m in where.lifted()}
        assert {
            "no_scale",
            "scale_default_missing",
            "scale_inv",
            "softmax_wrong_axis",
            "delta_missing",
            "dout_ignored",
        } <= names
