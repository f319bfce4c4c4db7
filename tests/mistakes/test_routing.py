"""Mistakes of routing attention: each shows, and what the important ones give."""

import numpy as np
from support import assert_mistakes_show

from refattn.attention.routing import routing_attention as attention
from refattn.mistakes.engine import Case
from refattn.mistakes.routing import catalogue

MASK = np.arange(18) < np.array([[15], [18]])


def entry(name):
    return next(m for m in catalogue if m.edit.__name__ == name)


def test_every_mistake_shows():
    examples = (
        {
            "causal": True,
            "key_norm": "l2",
            "average_eps": 0.25,
            "scale": 0.7,
            "self_attention": "last_resort",
            "projection": True,
        },
        {"k": True, "causal": True, "cluster_size": (7, 9), "relative_keys": True, "relative_values": True},
        {"causal": True, "causal_by": "rank", "k": True, "memory_keys": True, "query_mask": MASK, "key_mask": MASK},
        {"members": True, "normalize": "l2", "cluster_size": 9},
    )
    assert_mistakes_show(attention, catalogue, examples, np.random.default_rng(0))


def test_numbers_by_hand():
    # Two clusters, of tokens 0, 1 and of tokens 1, 2; all logits 0.  Token 1 takes the mean of its two clusters' means.
    members = np.array([[[0, 1], [1, 2]]])
    x, v = np.zeros((1, 4, 1)), np.array([[[2.0], [4.0], [8.0], [16.0]]])
    given = {"q": x, "v": v, "centroids": np.zeros((1, 2, 1)), "members": (members, members), "normalize": None}
    case = Case(catalogue.definition, given, {"output": np.ones((1, 4, 1)), "commitment_loss": np.array(0.0)})

    def output(name):
        return case.results(entry(name))["output"].ravel().tolist()

    assert case.right.output.ravel().tolist() == [3.0, 4.5, 6.0, 0.0]
    assert output("routing_sum_not_mean") == [3.0, 9.0, 6.0, 0.0]
    assert output("routing_mean_of_all") == [1.5, 4.5, 3.0, 0.0]
    assert output("routing_scatter_overwrite") == [3.0, 6.0, 6.0, 0.0]
    assert output("routing_self_never") == [4.0, 5.0, 4.0, 0.0]
    assert case.right.gradient()["v"].ravel().tolist() == [0.75, 1.5, 0.75, 0.0]
    assert case.gradients(entry("grad_overwritten"), "backward")["v"].ravel().tolist() == [0.75, 0.75, 0.75, 0.0]
    assert case.gradients(entry("routing_mean_grad"), "backward")["v"].ravel().tolist() == [1.0, 2.0, 1.0, 0.0]


def test_mistakes_without_effect_say_so():
    given = attention.example(np.random.default_rng(1), normalize=None, scale=1.0)
    case = Case(catalogue.definition, {n: x for n, x in given.items() if x is not None})
    for name in ("causal_drop", "memory_drop", "mask_drop", "no_scale", "routing_relative", "routing_projection"):
        assert case.results(entry(name)) is None
