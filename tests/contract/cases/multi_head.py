"""Cases of multi_head_attention."""

import numpy as np
from contract.score_mods import bend_with_derivative

from refattn import patterns
from refattn.attention.multi_head import multi_head_attention as attention

rng = np.random.default_rng
BATCHED = {"x_q": 2, "x_k": 2, "x_v": 2, "mask": 3, "bias": 3, "dropout_mask": 3, "indices": 3, "block_indices": 3}
B, H, G, Q, K, D, E, M = 2, 4, 2, 3, 4, 3, 2, 3


def base(seed=0, *, shared=0, extra=False, biases=True, **sizes):
    """The example; ``shared`` leaves out x_v (1), and x_k too (2)."""
    options = {"extra_key": True, "extra_value": True} if extra else {}
    options |= dict.fromkeys(("x_v", "x_k")[:shared]) | ({} if biases else dict.fromkeys(("b_q", "b_k", "b_v", "b_o")))
    return attention.example(
        rng(seed), **{"b": B, "h": H, "g": G, "q": Q, "k": K, "d": D, "e": E, "m": M, **options, **sizes}
    )


hiding = rng(9).random((B, H, Q, K)) < 0.3
EXTRA = {"extra": True, "zero_attention": True}
CASES = {
    "plain": {},
    "no_biases": {"biases": False},
    "widths": {"m1": 4, "m2": 2},
    "keys_are_values": {"shared": 1},
    "self": {"shared": 2},
    "extra": {"extra": True},
    "zero": {"zero_attention": True},
    "both": EXTRA,
    "both_self_causal": {**EXTRA, "shared": 2, "causal": True},
    "both_mask": {**EXTRA, "mask": rng(1).random((B, 1, Q, K)) < 0.5},
    "both_hidden": {**EXTRA, "mask": np.zeros((1, 1), bool)},
    "both_lengths": {**EXTRA, "key_lengths": [2, 0], "query_lengths": [3, 1], "causal": True, "align": "lower_right"},
    "both_window": {**EXTRA, "window": (1, 0), "align": 2},
    "both_bias": {**EXTRA, "bias": np.where(hiding, -np.inf, rng(2).standard_normal((B, H, Q, K)))},
    "both_bias_one": {**EXTRA, "bias": rng(2).standard_normal((1, 1))},
    "both_alibi_cap": {**EXTRA, "alibi_slopes": rng(3).random(H), "align": 1, "softcap": 1.3},
    "both_cap_after": {**EXTRA, "bias": rng(2).standard_normal((H, Q, K)), "softcap": 1.3, "softcap_after_bias": True},
    "both_sinks": {**EXTRA, "sinks": rng(4).standard_normal((H, 2)), "lse_includes_sinks": False},
    "both_score_mod": {**EXTRA, "score_mod": bend_with_derivative},
    "both_dropout": {**EXTRA, "dropout_mask": rng(5).random((B, H, Q, K)) < 0.7, "dropout_rate": 0.3},
    "both_dropout_one": {**EXTRA, "dropout_mask": rng(5).random((B, H, Q, 1)) < 0.7, "dropout_rate": 0.3},
    "both_dropout_all": {**EXTRA, "dropout_mask": rng(5).random((B, H, Q, K + 2)) < 0.7, "dropout_rate": 0.3},
    "both_pattern": {**EXTRA, "pattern": patterns.dilated(2)},
    "both_tile": {**EXTRA, "head_map": "tile", "scale": 0.7, "query_segments": np.arange(Q), "key_segments": np.arange(K)},
    "indices": {"indices": rng(7).integers(-1, K + 2, (B, 1, Q, 3))},
    "both_indices": {**EXTRA, "indices": rng(7).integers(-1, K, (B, G, Q, 3)), "duplicates": "multiset"},
    "both_block_indices": {**EXTRA, "block_indices": rng(7).integers(-1, 2, (H, Q, 2)), "block": 3, "softcap": 1.3},
    "together": {
        "mask": rng(1).random((B, 1, Q, K)) < 0.8, "bias": rng(2).standard_normal((B, H, Q, K)), "causal": True, "align": 1,
        "softcap": 1.7, "sinks": rng(4).standard_normal(H), "key_lengths": [4, 3], "scale": 0.6,
    },
}  # fmt: skip
SHOWING = {
    "no_groups": {**EXTRA, "g": H, "causal": True, "align": "upper_left", "mask": rng(3).random((B, 1, Q, K)) < 0.7},
    "square_self": {"shared": 2, "k": Q},
    "square": {"k": Q, "g": H, "e": D},
    "square_wide": {"k": Q, "m": 5},
    "as_wide_as_heads": {"k": Q, "m": H * D},
    "extra_alike": {**EXTRA, "e": D},
}


def arguments(name="plain", seed=0, **more):
    return {n: x for n, x in base(seed, **{"scale": 0.5, **(CASES | SHOWING)[name], **more}).items() if x is not None}
