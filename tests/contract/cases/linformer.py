"""Cases of linformer_attention."""

import numpy as np

from refattn.attention.linformer import linformer_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3}
CASES = {"plain": {}, "scale": {"scale": 0.7}, "one_row": {"n": 1}, "few_keys": {"k": 2}}
COUNTED = [2 * ({"b": 2, "h": 3, "q": 10, "k": 14, "n": 5, "d": 6, "e": 4},)]


def arguments(name="plain", seed=0, **more):
    return attention.example(
        rng(seed), **{"b": 2, "h": 2, "q": 3, "k": 5, "n": 4, "d": 3, "e": 2, **CASES[name], **more}
    )
