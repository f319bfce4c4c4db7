"""Cases of local_attention."""

import numpy as np
from contract.score_mods import tilt

from refattn.attention.local import local_attention as attention
from refattn.patterns import window

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3, "mask": 3, "bias": 3, "dropout_mask": 3}
B, H, T, D, E = 2, 3, 7, 2, 2
WINDOWS = {
    "default": {},
    "causal": {"causal": True},
    "both_sides": {"look_backward": 2, "look_forward": 1},
    "own_block": {"look_backward": 0, "block": 3},
    "ahead": {"look_backward": 0, "look_forward": 1, "block": 3},
    "one": {"block": 1, "look_backward": 2},
    "longer_than_t": {"block": 9},
    "exact": {"exact": True, "look_forward": 1},
    "exact_causal": {"exact": True, "causal": True, "block": 3},
    "exact_oneself": {"exact": True, "look_backward": 0},
    "exact_wide": {"exact": True, "block": 30, "look_forward": 2},
}
TOGETHER = {
    "mask": rng(1).random((B, 1, T, T)) < 0.9,
    "bias": np.where(rng(9).random((B, H, T, T)) < 0.1, -np.inf, rng(2).standard_normal((B, H, T, T))),
    "causal": True, "align": "lower_right", "window": (3, None), "key_lengths": [7, 5], "query_lengths": [6, 7],
    "query_segments": np.zeros((B, T), int), "key_segments": np.array([0, 0, 1, 0, 0, 0, 0]), "scale": 0.6, "softcap": 1.7,
    "alibi_slopes": rng(3).random(H), "sinks": rng(4).standard_normal((H, 2)), "dropout_rate": 0.25,
    "dropout_mask": rng(5).random((B, H, T, T)) < 0.75, "pattern": window(None, 2),
    "score_mod": tilt,
}  # fmt: skip
SHARED = {
    "bias_shared": {"bias": rng(2).standard_normal((H, 1, T)), "look_forward": 1},
    "lengths": {"key_lengths": [3, 0], "query_lengths": [5, 7]},
    "dropout": {n: TOGETHER[n] for n in ("dropout_mask", "dropout_rate")},
    "together": {**TOGETHER, "look_forward": 1},
    "together_exact": {**TOGETHER, "exact": True, "look_forward": 1, "lse_includes_sinks": False, "softcap_after_bias": True},
    "grouped": {"h": 4, "g": 2, "sinks": rng(4).standard_normal(4)},
    "grouped_tile": {"h": 4, "g": 2, "head_map": "tile", "bias": rng(2).standard_normal((4, T, T))},
}  # fmt: skip
CASES = {**WINDOWS, **SHARED}
LONG = {
    **{f"{n}_{t}": {**x, "b": 1, "t": t} for n, x in WINDOWS.items() for t in (70, 193)},
    **{f"lengths_{t}": {"b": 1, "t": t, "key_lengths": [t - 9], "block": 3, "look_backward": 2, "look_forward": 1} for t in (70, 193)},
    **{
        f"block_{block}_{exact}": {
            "b": 1, "h": 2, "t": 401, "block": block, "exact": exact, "look_forward": 1, "bias": rng(1).standard_normal((2, 1, 401)),
        } for block in (1, 2, 17, 64, 130) for exact in (False, True)
    },
}  # fmt: skip
COUNTED = [
    2 * ({"h": 2, "t": 77, "b": 1, "d": 4, "e": 3, "block": 9, **options},)
    for options in ({}, {"exact": True, "look_forward": 1}, {"block": 60})
]


def arguments(name="default", seed=0, **more):
    return attention.example(
        rng(seed), **{"b": B, "h": H, "t": T, "d": D, "e": E, "block": 2, **(CASES | LONG)[name], **more}
    )
