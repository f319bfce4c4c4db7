"""Cases of nystrom_attention."""

import numpy as np

from refattn.attention.nystrom import nystrom_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3}
CASES = {
    "plain": {},
    "padded": {"q": 5, "k": 7},
    "two_steps": {"iterations": 2},
    "no_step": {"iterations": 0},
    "batch": {"iterations": 2, "pinv_scale": "batch"},
    "batch_padded": {"iterations": 6, "pinv_scale": "batch", "q": 4, "k": 5},
    "one_landmark": {"landmarks": 1},
}
COUNTED = [
    2 * ({"b": 2, "h": 3, "d": 4, "e": 7, **sizes},)
    for sizes in ({"q": 12, "k": 18, "landmarks": 6}, {"q": 13, "k": 17, "landmarks": 5, "iterations": 3})
]


def arguments(name="plain", seed=0, **more):
    return attention.example(rng(seed), **{"b": 2, "h": 2, "q": 6, "k": 6, "d": 3, "e": 2, **CASES[name], **more})
