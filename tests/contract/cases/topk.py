"""Cases of topk_attention."""

import numpy as np
from contract.score_mods import tilt

from refattn import patterns
from refattn.attention.topk import topk_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3, "indices": 3, "mask": 3, "bias": 3, "dropout_mask": 3}
B, H, Q, K, D, E = 2, 3, 4, 6, 3, 2


def random_indices(r, shape, n, keys):
    """Distinct keys, in no order, some of them -1."""
    rows = np.stack([r.permutation(keys)[:n] for _ in range(int(np.prod(shape)))]).reshape(*shape, n)
    return np.where(r.random(rows.shape) < 0.2, -1, rows)


def steep(logits, b, h, i, j):
    return tilt(logits, b, h, 30 * i, 30 * j)


TOGETHER = {
    "mask": rng(1).random((B, 1, Q, K)) < 0.9,
    "bias": np.where(rng(9).random((B, H, Q, K)) < 0.1, -np.inf, rng(2).standard_normal((B, H, Q, K))),
    "causal": True, "align": "lower_right", "window": (4, None), "key_lengths": [6, 5], "query_lengths": [4, 3],
    "query_segments": np.zeros((B, Q), int), "key_segments": np.array([0, 0, 1, 0, 0, 0]), "scale": 0.6, "softcap": 1.7,
    "alibi_slopes": rng(3).random(H), "sinks": rng(4).standard_normal((H, 2)), "dropout_rate": 0.25,
    "dropout_mask": rng(5).random((B, H, Q, K)) < 0.75, "pattern": ~patterns.dense(np.eye(Q, K, 1, dtype=bool)),
    "score_mod": tilt,
}  # fmt: skip
CASES = {
    "plain": {},
    "one": {"count": 1},
    "all": {"count": K},
    "causal": {"causal": True, "align": "lower_right", "count": 3},
    "causal_empty_rows": {"causal": True, "align": -2, "count": 3},
    "bias_shared": {"bias": rng(2).standard_normal((H, 1, K)), "count": 3},
    "lengths": {"key_lengths": [3, 0], "query_lengths": [3, 4]},
    "dropout": {n: TOGETHER[n] for n in ("dropout_mask", "dropout_rate")},
    "sinks": {"sinks": rng(4).standard_normal(H)},
    "together": {**TOGETHER, "count": 3},
    "together_after": {**TOGETHER, "count": 4, "lse_includes_sinks": False, "softcap_after_bias": True},
    "indices": {"indices": random_indices(rng(6), (B, H, Q), 4, K)},
    "indices_shared": {"indices": random_indices(rng(6), (1, Q), 3, K)},
    "indices_masked": {**TOGETHER, "indices": random_indices(rng(6), (B, H, Q), 4, K)},
    "indices_none": {"indices": np.full((B, H, Q, 2), -1)},
    "grouped": {"h": 4, "g": 2, "count": 3, "causal": True, "align": "lower_right"},
    "grouped_tile": {"h": 4, "g": 2, "count": 3, "head_map": "tile", "bias": rng(2).standard_normal((4, Q, K))},
    "indices_twice": {"indices": np.array([[[0, 3, 3, 9, 0, -1]]])},
    "indices_counted": {"indices": np.array([[[0, 3, 3, 9, 0, -1]]]), "duplicates": "multiset", "softcap": 1.3},
    "indices_by_key_head": {"h": 6, "g": 2, "head_map": "tile", "indices": random_indices(rng(6), (B, 2, Q), 4, K)},
    "indices_no_places": {"indices": np.zeros((B, H, Q, 0), int)},
}
COUNTED = [
    2 * ({"b": 2, "h": 3, "q": 9, "k": 11, "d": 4, "e": 5, "count": 3, **options},)
    for options in ({}, {"causal": True, "align": "lower_right"})
]
SHOWING = {
    "score_mod": {"score_mod": steep},
    "ties": {"count": 3, "tied": True},
    "mask_causal": {"mask": rng(1).random((B, 1, Q, K)) < 0.6, "causal": True, "align": "lower_right"},
}


def arguments(name="plain", seed=0, **more):
    sizes = {"b": B, "h": H, "q": Q, "k": K, "d": D, "e": E, "count": 2}
    options = {**sizes, **(CASES | SHOWING)[name], **more}
    tied = options.pop("tied", False)
    drawn = attention.example(rng(seed), **options)
    if tied:  # every key twice
        drawn["k"][..., 3:, :] = drawn["k"][..., :3, :]
    return drawn
