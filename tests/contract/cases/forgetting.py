"""Cases of forgetting_attention."""

import numpy as np
from contract.score_mods import tilt

from refattn.attention.forgetting import forgetting_attention as attention
from refattn.patterns import window

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3, "log_forget": 2, "mask": 3, "bias": 3, "dropout_mask": 3}
B, H, Q, K, D, E = 2, 4, 5, 7, 2, 3
CASES = {
    "plain": {},
    "square": {"q": 6, "k": 6},
    "decode": {"q": 1},
    "more_queries": {"q": 8, "k": 5},
    "closed": {"closed": (2, 5)},
    "upper_left": {"align": "upper_left"},
    "offsets": {"align": [1, -2]},
    "behind_the_keys": {"align": 4},
    "lengths": {"key_lengths": [3, 7], "query_lengths": [5, 2]},
    "tile": {"head_map": "tile"},
    "sinks": {"sinks": rng(4).standard_normal(H), "lse_includes_sinks": False, "closed": (3,)},
    "cap_after": {"softcap": 1.7, "softcap_after_bias": True, "closed": (3,)},
    "listed": {"indices": rng(8).integers(-1, K, (1, Q, 3)), "duplicates": "multiset"},
    "together": {
        "mask": rng(1).random((B, 1, Q, K)) < 0.9, "bias": rng(2).standard_normal((B, H, Q, K)), "window": (4, None),
        "key_lengths": [7, 6], "query_lengths": [4, 5], "query_segments": np.zeros((B, Q), int),
        "key_segments": np.array([0, 0, 1, 0, 0, 0, 0]), "scale": 0.6, "softcap": 1.7, "alibi_slopes": rng(3).random(H),
        "sinks": rng(4).standard_normal((H, 2)), "dropout_rate": 0.25, "dropout_mask": rng(5).random((B, H, Q, K)) < 0.75,
        "pattern": window(None, 2, align=2), "score_mod": tilt, "closed": (1,),
    },
}  # fmt: skip
LONG = {
    "long": {"b": 1, "h": 2, "q": 401, "k": 401, "closed": (130, 300)},
    "few_queries": {"b": 1, "h": 2, "q": 70, "k": 401},
    "lengths_long": {"h": 2, "q": 193, "k": 193, "key_lengths": [180, 70]},
}
SHOWING = {"heads_of_groups": {"h": 4, "g": 2}, "closed_square": {"q": 6, "k": 6, "e": 2, "closed": (2,)}}
COUNTED = [
    2 * ({"h": 2, "q": 77, "k": 77, "b": 1, "d": 4, "e": 3},),
    2 * ({"h": 4, "g": 2, "q": 9, "k": 50, "b": 2, "d": 4, "e": 3},),
]


def arguments(name="plain", seed=0, closed=(), **more):
    options = {**(CASES | LONG | SHOWING)[name], **more}
    closed = options.pop("closed", closed)
    found = attention.example(rng(seed), **{"b": B, "h": H, "q": Q, "k": K, "d": D, "e": E, **options})
    found["log_forget"][..., list(closed)] = -np.inf
    return found
