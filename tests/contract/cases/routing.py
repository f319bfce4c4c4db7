"""Cases of routing_attention."""

import numpy as np

from refattn import patterns
from refattn.attention.routing import routing_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3, "query_mask": 1, "key_mask": 1, "dropout_mask": 3}
B, H, T, C, D, E, N = 2, 2, 8, 2, 4, 2, 2
KEEP = rng(5).random((B, T)) < 0.7
KEPT_KEYS = rng(6).random((B, T)) < 0.6
DROPOUT = rng(7).random((B, H, T, T)) < 0.6
CASES = {
    "shared": {},
    "separate": {"k": True},
    "causal": {"causal": True},
    "causal_separate": {"causal": True, "k": True},
    "rank": {"causal": True, "causal_by": "rank", "k": True},
    "sizes": {"cluster_size": (3, 5), "k": True, "causal": True},
    "sizes_shared": {"cluster_size": (5, 3), "causal": True, "self_attention": "last_resort"},
    "clipped": {"cluster_size": 30},
    "few": {"cluster_size": 2, "average_eps": 0.3},
    "l2": {"normalize": "l2", "k": True},
    "none": {"normalize": None},
    "cluster_l2": {"normalize": None, "cluster_normalize": "l2", "k": True},
    "cluster_layer": {"normalize": "l2", "cluster_normalize": "layer"},
    "cluster_none": {"cluster_normalize": None},
    "key_norm": {"normalize": None, "cluster_normalize": "l2", "key_norm": "l2"},
    "key_norm_separate": {"key_norm": "l2", "k": True},
    "projection": {"projection": True, "k": True},
    "projection_l2": {"projection": True, "cluster_normalize": "l2"},
    "last_resort": {"self_attention": "last_resort", "causal": True},
    "never": {"self_attention": "never", "causal": True},
    "members": {"members": True, "k": True},
    "members_shared": {"members": True, "causal": True, "causal_by": "rank"},
    "masks": {"query_mask": KEEP, "key_mask": KEPT_KEYS, "k": True},
    "masks_shared": {"query_mask": KEEP, "key_mask": KEEP, "causal": True, "average_eps": 0.1},
    "masks_members": {"query_mask": KEEP, "key_mask": KEPT_KEYS, "k": True, "members": True},
    "last_resort_hidden": {
        "self_attention": "last_resort", "causal": True, "members": True, "key_mask": KEPT_KEYS,
        "pattern": patterns.dense(rng(9).random((T, T)) < 0.5),
    },
    "one_mask": {"key_mask": KEPT_KEYS[:1], "self_attention": "last_resort"},
    "memory": {"memory_keys": True, "causal": True, "k": True},
    "memory_self": {"memory_keys": True, "causal": True, "self_attention": "last_resort"},
    "memory_never": {"memory_keys": True, "causal": True, "self_attention": "never"},
    "relative": {"relative_keys": True, "relative_values": True, "cluster_size": 5, "causal": True},
    "relative_keys": {"relative_keys": True, "k": True, "cluster_size": (4, 6)},
    "relative_all": {
        "relative_keys": True, "relative_values": True, "memory_keys": True, "cluster_size": 5, "query_mask": KEEP,
        "dropout_mask": DROPOUT, "dropout_rate": 0.4,
    },
    "pattern": {"pattern": patterns.dense(rng(8).random((B, 1, T, T)) < 0.6), "k": True},
    "pattern_heads": {"pattern": patterns.dense(rng(8).random((H, T, T)) < 0.6) & patterns.window(5, 2)},
    "dropout": {"dropout_mask": DROPOUT, "dropout_rate": 0.4, "causal": True},
    "dropout_shared": {"dropout_mask": DROPOUT[0, 0, :1], "dropout_rate": 0.25, "k": True},
}  # fmt: skip
SIZES_COUNTED = {"b": 2, "h": 3, "t": 30, "c": 4, "d": 6, "e": 5}
COUNTED = [
    ({**SIZES_COUNTED, "n": 2, "cluster_size": 7}, {**SIZES_COUNTED, "cluster_size": 7}),
    (
        {**SIZES_COUNTED, "n": 2, "causal": True, "cluster_size": (6, 9), "k": True, "memory_keys": True},
        {**SIZES_COUNTED, "n": 2, "causal": True, "cluster_size": (6, 9), "shared": False},
    ),
]


def arguments(name="shared", seed=0, **more):
    sizes = {"b": B, "h": H, "t": T, "c": C, "d": D, "e": E, "n": N}
    return attention.example(rng(seed), **{**sizes, **CASES[name], "scale": 0.7, **more})
