"""Cases of differential_attention."""

import numpy as np
from contract.score_mods import tilt

from refattn.attention.differential import differential_attention as attention
from refattn.patterns import window

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3, "lam": 2, "mask": 3, "bias": 3, "dropout_mask": 3}
B, H, Q, K, D, E = 2, 2, 4, 5, 2, 3
CASES = {
    "plain": {},
    "one_lambda": {"lam": np.array(0.6), "causal": True, "align": "lower_right"},
    "one_key": {"two_keys": False},
    "grouped": {"h": 4, "g": 2, "causal": True, "align": 1},
    "grouped_tile": {"h": 4, "g": 2, "head_map": "tile", "bias": rng(2).standard_normal((8, 1, K))},
    "halves": {"h": 3, "pairs": "halves", "alibi_slopes": rng(3).random(6), "align": 0},
    "shared_bias": {"bias": rng(2).standard_normal((Q, K)), "softcap": 1.7, "scale": 0.6},
    "lengths": {"key_lengths": [3, 0], "query_lengths": [4, 2]},
    "listed": {"h": 4, "g": 2, "indices": rng(8).integers(-1, K, (8, Q, 3))},
    "together": {
        "mask": rng(1).random((B, 4, Q, K)) < 0.9, "bias": rng(2).standard_normal((B, 4, Q, K)), "window": (4, None),
        "causal": True, "align": "lower_right", "key_lengths": [5, 4], "query_lengths": [4, 3],
        "query_segments": np.zeros((B, Q), int), "key_segments": np.array([0, 0, 1, 0, 0]), "scale": 0.6, "softcap": 1.7,
        "softcap_after_bias": True, "alibi_slopes": rng(3).random(4), "dropout_rate": 0.25,
        "dropout_mask": rng(5).random((B, 4, Q, K)) < 0.75, "pattern": window(None, 2, align=1), "score_mod": tilt,
        "pairs": "halves",
    },
}  # fmt: skip
LONG = {"long": {"b": 1, "h": 2, "q": 301, "k": 401, "causal": True, "align": "lower_right"}}
SHOWING = {"square": {"h": 4, "g": 4, "q": 5, "k": 5, "e": 2}, "pairs_of_keys": {"h": 4, "g": 2}}
COUNTED = [
    2 * ({"h": 2, "q": 77, "k": 50, "b": 1, "d": 4, "e": 3},),
    2 * ({"h": 4, "g": 2, "q": 9, "k": 50, "b": 2, "d": 4, "e": 3},),
]


def arguments(name="plain", seed=0, **more):
    options = {**(CASES | LONG | SHOWING)[name], **more}
    return attention.example(rng(seed), **{"b": B, "h": H, "q": Q, "k": K, "d": D, "e": E, **options})
