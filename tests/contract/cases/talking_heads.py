"""Cases of talking_heads_attention."""

import numpy as np
from contract.score_mods import bend_with_derivative

from refattn import patterns
from refattn.attention.talking_heads import talking_heads_attention as attention

rng = np.random.default_rng
BATCHED = {
    "q": 3,
    "k": 3,
    "v": 3,
    "query_logits": 3,
    "key_logits": 3,
    "query_weights": 3,
    "key_weights": 3,
    "mask": 3,
    "bias": 3,
    "dropout_mask": 3,
}
B, X, H, Y, Q, K, D, E = 2, 2, 3, 4, 3, 5, 3, 2
PARTS = ("query_logits", "key_logits", "query_weights", "key_weights")


def base(seed=0, *, dynamic=False, **sizes):
    parts = dict.fromkeys(PARTS, True) if dynamic else {}
    return attention.example(
        rng(seed), **{"b": B, "x": X, "h": H, "y": Y, "q": Q, "k": K, "d": D, "e": E, **parts, **sizes}
    )


hiding = rng(9).random((B, H, Q, K)) < 0.3
CASES = {
    "plain": {},
    "dynamic": {"dynamic": True},
    "only_query_logits": {"query_logits": rng(1).standard_normal((B, Q, X, H))},
    "only_key_weights": {"key_weights": rng(1).standard_normal((1, K, H, Y))},
    "identity_before": {"logits_projection": None, "x": H},
    "identity_behind": {"weights_projection": None, "y": H},
    "identity": {"logits_projection": None, "weights_projection": None, "x": H, "y": H},
    "identity_dynamic": {"logits_projection": None, "weights_projection": None, "x": H, "y": H, "dynamic": True},
    "mask": {"mask": rng(1).random((B, H, Q, K)) < 0.6},
    "mask_empty_row": {"mask": np.arange(Q)[:, None] != 1, "dynamic": True},
    "bias": {"bias": rng(2).standard_normal((B, H, Q, K))},
    "bias_shared": {"bias": rng(2).standard_normal((H, 1, K))},
    "bias_hides": {"bias": np.where(hiding, -np.inf, rng(2).standard_normal((B, H, Q, K)))},
    "causal": {"causal": True, "align": "lower_right"},
    "causal_negative": {"causal": True, "align": -1},
    "window": {"window": (1, 0), "align": 1},
    "lengths": {"query_lengths": [2, 0], "key_lengths": [3, 4], "dynamic": True},
    "segments": {"query_segments": np.array([[0, 0, 1], [1, 2, 2]]), "key_segments": np.array([0, 0, 1, 1, 2])},
    "scale": {"scale": 0.7},
    "softcap_bias": {"softcap": 1.3, "bias": rng(2).standard_normal((B, H, Q, K))},
    "softcap_after": {"softcap": 1.3, "bias": rng(2).standard_normal((B, H, Q, K)), "softcap_after_bias": True},
    "alibi": {"alibi_slopes": rng(3).random(H), "align": "lower_right"},
    "dropout": {"dropout_mask": rng(5).random((B, H, Q, K)) < 0.7, "dropout_rate": 0.3, "dynamic": True},
    "pattern_heads": {"pattern": patterns.dense(rng(6).random((H, Q, K)) < 0.6)},
    "score_mod": {"score_mod": bend_with_derivative},
    "together": {
        "mask": rng(1).random((B, 1, Q, K)) < 0.9, "bias": np.where(hiding, -np.inf, rng(2).standard_normal((B, H, Q, K))),
        "causal": True, "align": "lower_right", "window": (3, None), "key_lengths": [5, 4], "query_lengths": [3, 2], "scale": 0.6,
        "softcap": 1.7, "alibi_slopes": rng(3).random(H), "dropout_rate": 0.25, "dropout_mask": rng(5).random((B, H, Q, K)) < 0.75,
        "score_mod": bend_with_derivative, "dynamic": True,
    },
}  # fmt: skip
COUNTED = [
    2 * ({"b": 2, "h": 4, "x": 3, "y": 2, "q": 9, "k": 11, "d": 4, "e": 3, **options},)
    for options in ({}, {"causal": True, "align": "lower_right"})
]
SQUARE = {"x": H, "y": H, "dynamic": True}
SHOWING = {
    "square": {**SQUARE, "mask": rng(3).random((B, 1, Q, K)) < 0.6, "bias": rng(2).standard_normal((H, Q, K))},
    "square_dropout": {"x": H, "y": H, "dropout_mask": rng(5).random((B, H, Q, K)) < 0.7, "dropout_rate": 0.3},
    "square_plain": {"x": H, "y": H},
    "self": {**SQUARE, "q": K},
}


def arguments(name="plain", seed=0, **more):
    return {n: x for n, x in base(seed, **{"scale": 0.5, **(CASES | SHOWING)[name], **more}).items() if x is not None}
