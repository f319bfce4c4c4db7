"""Cases of sinkhorn_attention."""

import numpy as np

from refattn.attention.sinkhorn import sinkhorn_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3, "sort_logits": 3, "noise": 3}
CASES = {
    "plain": {},
    "no_noise": {"noise": None},
    "exp": {"noise": None, "iterations": 0},
    "once": {"iterations": 1, "scale": 0.4},
    "causal": {"causal": True, "scale": 0.7},
    "causal_once": {"causal": True, "iterations": 1, "noise": None},
    "one_block": {"block": 6},
    "one_block_causal": {"block": 6, "causal": True},
    "single": {"block": 1, "temperature": 1.3},
}
SIZES_COUNTED = {"b": 2, "h": 3, "t": 24, "block": 4, "d": 6, "e": 5}
COUNTED = [({**SIZES_COUNTED, "iterations": 0, "noise": None}, SIZES_COUNTED)]


def arguments(name="plain", seed=0, **more):
    return attention.example(rng(seed), **{"b": 2, "h": 2, "t": 6, "block": 2, "d": 3, "e": 2, **CASES[name], **more})
