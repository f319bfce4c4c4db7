"""Cases of scaled_dot_product_attention."""

import numpy as np
from contract.score_mods import bend, bend_with_derivative

from refattn import patterns
from refattn.attention.scaled_dot_product import scaled_dot_product_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3, "mask": 3, "bias": 3, "dropout_mask": 3, "indices": 3, "block_indices": 3}
B, H, G, Q, K, D, E = 2, 4, 2, 3, 5, 3, 2


hiding = rng(9).random((B, H, Q, K)) < 0.2
CASES = {
    "plain": {},
    "mask": {"mask": rng(1).random((B, 1, Q, K)) < 0.7},
    "mask_empty_row": {"mask": np.arange(Q)[:, None] != 1},
    "bias": {"bias": rng(2).standard_normal((B, H, Q, K))},
    "bias_shared": {"bias": rng(2).standard_normal((H, 1, K))},
    "bias_one": {"bias": rng(2).standard_normal((1, 1))},
    "bias_hides": {"bias": np.where(hiding, -np.inf, rng(2).standard_normal((B, H, Q, K)))},
    "causal_lower": {"causal": True, "align": "lower_right"},
    "causal_upper": {"causal": True, "align": "upper_left"},
    "causal_negative": {"causal": True, "align": -1},
    "causal_per_batch": {"causal": True, "align": np.array([1, -2])},
    "window": {"window": (1, 0), "align": 1},
    "window_left": {"window": (None, 1), "align": "lower_right"},
    "lengths": {"query_lengths": [2, 0], "key_lengths": [3, 4]},
    "lengths_causal": {"query_lengths": [2, 3], "key_lengths": [4, 5], "causal": True, "align": "lower_right"},
    "segments": {"query_segments": np.array([[0, 0, 1], [1, 2, 2]]), "key_segments": np.array([0, 0, 1, 1, 2])},
    "scale": {"scale": 0.7},
    "scale_zero": {"scale": 0.0},
    "softcap": {"softcap": 1.3},
    "softcap_bias": {"softcap": 1.3, "bias": rng(2).standard_normal((B, H, Q, K))},
    "softcap_after": {"softcap": 1.3, "bias": rng(2).standard_normal((B, H, Q, K)), "softcap_after_bias": True},
    "softcap_after_hides": {"softcap": 1.3, "bias": np.where(hiding, -np.inf, 0.3), "softcap_after_bias": True},
    "alibi": {"alibi_slopes": rng(3).random(H), "align": "lower_right"},
    "sinks": {"sinks": rng(4).standard_normal(H)},
    "sinks_many": {"sinks": rng(4).standard_normal((H, 3)), "mask": np.arange(Q)[:, None] != 1},
    "sinks_outside": {
        "sinks": rng(4).standard_normal(H),
        "lse_includes_sinks": False,
        "mask": np.arange(Q)[:, None] != 1,
    },
    "sinks_padded": {"sinks": rng(4).standard_normal(H), "query_lengths": [2, 3]},
    "dropout": {"dropout_mask": rng(5).random((B, H, Q, K)) < 0.7, "dropout_rate": 0.3},
    "pattern": {"pattern": patterns.dilated(2) & patterns.causal(align=1)},
    "pattern_chunk": {"pattern": patterns.chunk(2, align=1), "causal": True, "align": 1},
    "pattern_tree": {"pattern": patterns.tree([-1, 0, 0], prefix=2)},
    "pattern_heads": {"pattern": patterns.dense(rng(6).random((H, Q, K)) < 0.6)},
    "score_mod": {"score_mod": bend},
    "score_mod_derivative": {"score_mod": bend_with_derivative},
    "indices": {"indices": rng(7).integers(-1, K + 2, (B, 1, Q, 4))},
    "indices_by_head": {"indices": rng(7).integers(-1, K, (H, Q, 3)), "alibi_slopes": rng(3).random(H), "align": 1},
    "indices_by_key_head": {"indices": rng(7).integers(-1, K, (G, Q, 3)), "head_map": "tile", "softcap": 1.3},
    "indices_counted": {
        "indices": rng(7).integers(-1, K, (B, G, Q, 6)),
        "duplicates": "multiset",
        "softcap": 1.3,
        "bias": np.where(hiding, -np.inf, rng(2).standard_normal((B, H, Q, K))),
        "sinks": rng(4).standard_normal(H),
    },
    "indices_none": {"indices": np.full((1, Q, 2), -1)},
    "block_indices": {"block_indices": rng(7).integers(-1, 4, (B, 1, Q, 2)), "block": 2},
    "block_indices_causal": {
        "block_indices": rng(7).integers(-1, 2, (H, Q, 3)),
        "block": 3,
        "causal": True,
        "align": "lower_right",
        "key_lengths": [5, 4],
        "duplicates": "multiset",
        "dropout_rate": 0.25,
        "dropout_mask": rng(5).random((B, H, Q, K)) < 0.75,
    },
    "tile": {"head_map": "tile", "bias": rng(2).standard_normal((H, Q, K)), "sinks": rng(4).standard_normal(H)},
}
TOGETHER = {
    "mask": rng(1).random((B, 1, Q, K)) < 0.9, "bias": np.where(hiding, -np.inf, rng(2).standard_normal((B, H, Q, K))),
    "causal": True, "align": "lower_right", "window": (3, None), "key_lengths": [5, 4], "query_lengths": [3, 2],
    "query_segments": np.zeros((B, Q), int), "key_segments": np.array([0, 0, 1, 0, 0]), "scale": 0.6, "softcap": 1.7,
    "alibi_slopes": rng(3).random(H), "sinks": rng(4).standard_normal((H, 2)), "dropout_rate": 0.25,
    "dropout_mask": rng(5).random((B, H, Q, K)) < 0.75, "score_mod": bend_with_derivative,
    "pattern": ~patterns.dense(np.eye(Q, K, 2, dtype=bool)),
}  # fmt: skip
CASES["together"] = TOGETHER
CASES["together_after"] = {**TOGETHER, "softcap_after_bias": True, "lse_includes_sinks": False, "head_map": "tile"}
COUNTED = [
    2 * ({"b": 2, "h": 4, "g": 2, "q": 9, "k": 11, "d": 4, "e": 3, **options},)
    for options in ({}, {"causal": True, "align": "lower_right"}, {"q": 300, "k": 300, "causal": True})
]


def arguments(name="plain", seed=0, **more):
    sizes = {"b": B, "h": H, "g": G, "q": Q, "k": K, "d": D, "e": E}
    return attention.example(rng(seed), **{**sizes, "scale": 0.5, **CASES[name], **more})
