"""Mistakes of Performer attention: each shows, and what the important ones give."""

import numpy as np
from support import assert_mistakes_show

from refattn.attention.performer import performer_attention as attention
from refattn.mistakes.engine import Case
from refattn.mistakes.performer import catalogue


def entry(name):
    return next(m for m in catalogue if m.edit.__name__ == name)


def test_every_mistake_shows():
    examples = ({"q": 20, "k": 20, "causal": True, "eps": 0.2, "key_sum_eps": 0.5}, {"kernel": "relu", "eps": 0.1})
    assert_mistakes_show(attention, catalogue, examples, np.random.default_rng(0))


def test_linear_attention_s_mistakes_are_lifted():
    names = {m.class_ for m in catalogue.lifted()}
    assert {
        "norm_recip",
        "norm_future",
        "causal_drop",
        "chunk_vs_recurrent",
        "delta_missing",
        "norm_grad_missing",
    } <= names
    assert not {m.class_ for m in catalogue.own} & names


def test_numbers_by_hand():
    # d = 1: y = x, u = x.  phi(x) = exp(x - x^2 / 2 - largest x), eps = 0; two keys, 0 and 1.
    given = {"q": np.zeros((1, 1, 1)), "k": np.array([[[0.0], [1.0]]]), "v": np.array([[[1.0], [0.0]]])}
    given |= {"features": np.ones((1, 1)), "eps": 0.0}
    case = Case(catalogue.definition, given)

    def output(name):
        return float(case.results(entry(name))["output"].squeeze())

    def share(x):
        return 1 / (1 + np.exp(x))  # of the first key where the other has weight exp(x)

    np.testing.assert_allclose(float(case.right.output.squeeze()), share(0.5), rtol=1e-15)
    np.testing.assert_allclose(output("performer_length"), share(1.0), rtol=1e-15)
    np.testing.assert_allclose(output("performer_whole_length"), share(0.0), rtol=1e-15)
    np.testing.assert_allclose(output("performer_key_maximum"), share(-0.5), rtol=1e-15)
    np.testing.assert_allclose(output("keys_use_negated_rows"), share(-1.5), rtol=1e-15)
    np.testing.assert_allclose(output("performer_kernel"), 0.0, atol=0)  # phi(q) = max(0, 0): no weight at all
