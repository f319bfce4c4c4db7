"""Cases of sparse_transformer_attention."""

import numpy as np
from contract.score_mods import tilt

from refattn.attention.sparse_transformer import sparse_transformer_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3, "mask": 3, "bias": 3, "dropout_mask": 3}
B, H, T, D, E = 2, 3, 7, 2, 2
PATTERNS = {
    "strided_split": {},
    "strided_merged": {"heads": "merged"},
    "strided_first": {"heads": "first", "stride": 3},
    "strided_second": {"heads": "second", "stride": 3},
    "strided_code": {"heads": "first", "stride": 3, "variant": "code"},
    "strided_code_merged": {"heads": "merged", "stride": 3, "variant": "code"},
    "strided_even_layer": {"heads": "interleaved", "layer": 2},
    "strided_odd_layer": {"heads": "interleaved", "layer": 1},
    "strided_1": {"heads": "merged", "stride": 1},
    "strided_long": {"stride": 40, "heads": "split"},
    "fixed_split": {"pattern": "fixed", "stride": 3, "summary": 1},
    "fixed_merged": {"pattern": "fixed", "stride": 3, "summary": 2, "heads": "merged"},
    "fixed_second": {"pattern": "fixed", "stride": 3, "summary": 2, "heads": "second", "summary_offsets": 1},
    "fixed_offsets": {"pattern": "fixed", "stride": 4, "summary": 1, "heads": "merged", "summary_offsets": [0, 2, 0]},
    "fixed_offsets_second": {
        "pattern": "fixed",
        "stride": 3,
        "summary": 1,
        "heads": "second",
        "summary_offsets": [0, 2, 1],
    },
}
TOGETHER = {
    "mask": rng(1).random((B, 1, T, T)) < 0.9,
    "bias": np.where(rng(9).random((B, H, T, T)) < 0.1, -np.inf, rng(2).standard_normal((B, H, T, T))),
    "causal": True, "align": "lower_right", "window": (4, None), "key_lengths": [7, 5], "query_lengths": [6, 7],
    "query_segments": np.zeros((B, T), int), "key_segments": np.array([0, 0, 1, 0, 0, 0, 0]), "scale": 0.6, "softcap": 1.7,
    "alibi_slopes": rng(3).random(H), "sinks": rng(4).standard_normal((H, 2)), "dropout_rate": 0.25,
    "dropout_mask": rng(5).random((B, H, T, T)) < 0.75, "score_mod": tilt,
}  # fmt: skip
SHARED = {
    "mask": {"mask": TOGETHER["mask"]},
    "bias_shared": {"bias": rng(2).standard_normal((H, 1, T)), "heads": "merged"},
    "lengths": {"key_lengths": [3, 0], "query_lengths": [5, 7]},
    "dropout": {n: TOGETHER[n] for n in ("dropout_mask", "dropout_rate")},
    "together": TOGETHER,
    "together_fixed": {**TOGETHER, **PATTERNS["fixed_offsets"], "lse_includes_sinks": False},
    "together_merged": {**TOGETHER, "heads": "merged", "softcap_after_bias": True},
    "grouped": {"h": 4, "g": 2, "heads": "split"},
    "grouped_mixed": {"h": 4, "g": 1, "heads": "split", "bias": rng(2).standard_normal((4, T, T))},
    "grouped_tile": {"h": 4, "g": 2, "head_map": "tile", "sinks": rng(4).standard_normal(4)},
    "grouped_offsets": {
        "h": 4, "g": 2, "pattern": "fixed", "stride": 3, "summary": 1, "heads": "merged", "summary_offsets": [0, 1, 2, 0],
    },
}  # fmt: skip
CASES = {**PATTERNS, **SHARED}
CUTS = {
    "strided_merged": {"heads": "merged", "stride": 16},
    "strided_shared": {"heads": "split", "stride": 7, "g": 1},
    "strided_wide": {"heads": "merged", "stride": 100},
    "strided_second": {"heads": "second", "stride": 2},
    "fixed_merged": {"heads": "merged", "stride": 3, "pattern": "fixed", "summary": 2, "summary_offsets": [0, 1, 0, 1]},
    "fixed_split": {"heads": "split", "stride": 40, "pattern": "fixed", "summary": 5},
}
LONG = {  # several batches of bands, residue classes and summary columns, and ragged ends
    f"{n}_{t}{end}": {"b": 1, "h": 4, "t": t, **x, **({
        "key_lengths": [t - 3], "query_segments": np.arange(t) // 50, "key_segments": np.arange(t) // 50,
    } if end else {})}
    for n, x in CUTS.items() for t in (64, 150, 257) for end in ("", "_segments")
}  # fmt: skip
COUNTED = [
    2 * ({"h": 4, "t": 70, "stride": 7, "b": 1, "d": 4, "e": 3, **options},)
    for options in (
        {"heads": "merged", "g": 2},
        {"heads": "split", "g": 1},
        {"pattern": "fixed", "summary": 2, "heads": "merged"},
    )
]


def arguments(name="strided_split", seed=0, **more):
    return attention.example(
        rng(seed), **{"b": B, "h": H, "t": T, "d": D, "e": E, "stride": 2, **(CASES | LONG)[name], **more}
    )
