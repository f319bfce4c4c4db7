"""Cases of linear_attention."""

import numpy as np

from refattn.attention.linear import linear_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3, "state": 3, "normalizer": 2}
FORMS = ("parallel", "recurrent", "chunked")
B, H, N, D, E = 2, 2, 7, 3, 2
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "state": {"causal": True, "state": True, "normalizer": True},
    "state_full": {"state": True, "normalizer": True, "q": 4},
    "state_alone": {"state": True, "normalize": False, "causal": True},
    "sums": {"normalize": False, "feature_map": "identity", "causal": True},
    "identity": {"feature_map": "identity", "causal": True},
    "eps": {"normalize_eps": 0.5, "causal": True},
    "lengths": {"key_lengths": np.array([4, 7])},
    "lengths_causal": {"key_lengths": (3, 7), "causal": True, "state": True, "normalizer": True},
    "no_keys": {"key_lengths": (0, 5)},
    "no_keys_causal": {"key_lengths": (0, 5), "causal": True},
    "more_queries": {"q": 9, "k": 4},
}
CASES = {f"{n}_{form}": {**x, "form": form, "chunk": 3} for n, x in OPTIONS.items() for form in FORMS}
COUNTED = [
    2 * ({"b": 2, "h": 3, "q": 40, "k": 40, "d": 6, "e": 5, **options},)
    for options in ({}, {"causal": True}, {"causal": True, "form": "chunked", "chunk": 16})
]
SHOWING = {
    "long": {"q": 150, "k": 150, "causal": True},
    "square_state": {"e": D, "state": True, "normalizer": True},
    "default_scale": {"scale": None, "normalize": False},
}


def arguments(name="plain_parallel", seed=0, **more):
    sizes = {"b": B, "h": H, "q": N, "k": N, "d": D, "e": E}
    return attention.example(rng(seed), **{**sizes, "scale": 0.7, **(CASES | SHOWING | OPTIONS)[name], **more})
