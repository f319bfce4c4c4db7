"""Cases of efficient_attention."""

import numpy as np

from refattn.attention.efficient import efficient_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3}
CASES = {"plain": {}, "lengths": {"key_lengths": np.array([3, 5])}, "no_keys": {"key_lengths": (0, 4)}}
COUNTED = [2 * ({"b": 2, "h": 3, "q": 10, "k": 14, "d": 6, "e": 4},)]


def arguments(name="plain", seed=0, **more):
    return attention.example(rng(seed), **{"b": 2, "h": 2, "q": 3, "k": 5, "d": 3, "e": 2, **CASES[name], **more})
