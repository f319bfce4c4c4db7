"""Cases of lsh_attention."""

import numpy as np

from refattn import patterns
from refattn.attention.lsh import lsh_attention as attention

rng = np.random.default_rng
BATCHED = {"qk": 3, "v": 3, "buckets": 3, "mask": 1, "dropout_mask": 3}
B, H, T, D, E = 2, 2, 10, 2, 1


def base(seed=0, *, t=T, b=B, h=H, hashes=2, n=3, **options):
    """Small arrays with given buckets: nothing discrete depends on qk."""
    draw = rng(seed)
    qk, v = draw.standard_normal((b, h, t, D)), draw.standard_normal((b, h, t, E))
    return {"qk": qk, "v": v, "buckets": draw.integers(0, n, (b, h, hashes, t)), "chunk": 4, **options}


KEEP = rng(5).random((B, T)) < 0.6
KEEP[0, 1:] = False  # token 0 is the only key of batch 0
SPARSE = rng(6).random((B, 1, T, T)) < 0.4
CASES = {
    "default": {},
    "causal": {"causal": True},
    "one_round": {"hashes": 1},
    "three_rounds": {"hashes": 3, "n": 2},
    "multiset": {"duplicates": "multiset"},
    "multiset_causal": {"duplicates": "multiset", "causal": True, "hashes": 3},
    "trax1": {"duplicates": "trax1"},
    "across": {"within_bucket": False},
    "across_multiset": {"within_bucket": False, "duplicates": "multiset"},
    "ragged_around": {"before": 1, "after": 1, "within_bucket": False},
    "far": {"before": 5, "after": 4, "n": 6},
    "own_chunk": {"before": 0},
    "ring": {"t": 8, "wrap": "global"},
    "ring_across": {"t": 8, "wrap": "global", "within_bucket": False},
    "ring_across_multiset": {
        "t": 8,
        "wrap": "global",
        "within_bucket": False,
        "duplicates": "multiset",
        "causal": True,
    },
    "ring_across_trax1": {"t": 8, "wrap": "global", "within_bucket": False, "duplicates": "trax1"},
    "ring_trax1": {"t": 8, "wrap": "global", "duplicates": "trax1", "hashes": 3},
    "ring_twice": {"t": 8, "wrap": "global", "within_bucket": False, "before": 1, "after": 1, "hashes": 1},
    "ring_twice_multiset": {"t": 8, "wrap": "global", "duplicates": "multiset", "before": 2, "after": 1, "hashes": 1},
    "ring_many": {"t": 8, "wrap": "global", "within_bucket": False, "before": 3, "after": 2, "hashes": 3},
    "mask": {"mask": KEEP},
    "mask_causal": {"mask": KEEP, "causal": True, "duplicates": "multiset"},
    "mask_across": {"mask": KEEP[:1], "within_bucket": False},
    "padding_bucket": {"mask": KEEP, "padding_bucket": True},
    "pattern": {"pattern": patterns.dense(SPARSE)},
    "pattern_heads": {"pattern": patterns.dense(rng(6).random((H, T, T)) < 0.4) & patterns.window(4, 4)},
    "rms": {"key_norm": "rms", "norm_eps": 0.01},
    "large_eps": {"norm_eps": 1.5},
    "always": {"self_attention": "always"},
    "always_causal": {"self_attention": "always", "causal": True, "duplicates": "multiset", "mask": KEEP},
    "always_all": {"self_attention": "always", "within_bucket": False, "t": 8, "duplicates": "multiset"},
    "never": {"self_attention": "never", "causal": True},
    "dropout": {"dropout_mask": rng(7).random((B, H, T, T)) < 0.6, "dropout_rate": 0.4, "causal": True},
    "dropout_shared": {"dropout_mask": rng(7).random((T, 1)) < 0.6, "dropout_rate": 0.25, "causal": True},
    "short_full": {"chunk": 10, "short": "full", "mask": KEEP},
    "short_hash": {"chunk": 32},
    "one_token": {"t": 1},
    "hashed": {"hashed": True, "t": 16},
    "hashed_causal": {"hashed": True, "t": 13, "causal": True, "hashes": 3},
}
COUNTED = [
    2 * ({"b": 2, "h": 3, "t": 64, "d": 8, "e": 4, "hashes": 2, "chunk": 8, "n_buckets": 16, **options},)
    for options in ({}, {"causal": True})
]
SHOWING = {
    "large_buckets": {"buckets": base()["buckets"] * (1 << 28)},
    "factors": {"hashed": True, "t": 16, "n_buckets": (4, 2), "within_bucket": False},
}


def arguments(name="default", seed=0, **more):
    options = {"scale": 0.7, **(CASES | SHOWING)[name], **more}
    if options.pop("hashed", False):  # buckets from rotations, every choice with a margin
        return attention.example(rng(seed), **{"b": B, "h": H, "d": 3, "e": E, **options})
    return base(seed, **options)
