"""Cases of performer_attention."""

import numpy as np

from refattn.attention.performer import performer_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3}
CASES = {
    "plain": {},
    "causal": {"causal": True, "q": 5},
    "relu": {"kernel": "relu"},
    "relu_causal": {"kernel": "relu", "causal": True, "eps": 0.1},
    "eps": {"eps": 0.3},
    "eps_causal": {"eps": 0.3, "causal": True},
    "sum_eps": {"key_sum_eps": 0.4},
    "sum_eps_causal": {"key_sum_eps": 0.4, "causal": True},
}
COUNTED = [
    2 * ({"b": 2, "h": 3, "q": 40, "k": 40, "d": 6, "e": 5, "n": 7, **options},)
    for options in ({}, {"causal": True, "chunk": 16}, {"kernel": "relu"})
]
SHOWING = {"long": {"q": 150, "k": 150, "causal": True}}


def arguments(name="plain", seed=0, **more):
    sizes = {"b": 2, "h": 1, "q": 4, "k": 5, "d": 3, "e": 2, "n": 4, "chunk": 2}
    return attention.example(rng(seed), **{**sizes, **(CASES | SHOWING)[name], **more})
