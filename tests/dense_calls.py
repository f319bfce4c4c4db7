"""Calls of softmax attention on which every option, and so every mistake about it, shows."""

import numpy as np

from refattn import patterns

SLOPES = np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])  # the paper's, 6 heads


def tilt(logits, b, h, i, j):
    return logits * (1 + 0.1 * h) + 0.2 * b - 0.03 * i * j


def call(seed=0, *, b=2, h=6, g=2, q=5, k=9, d=7, e=3, dtype=np.float64, **options):
    """Arguments with pairwise different sizes; an option given as a function draws its value."""
    rng = np.random.default_rng(seed)
    shapes = {"q": (b, h, q, d), "k": (b, g, k, d), "v": (b, g, k, e)}
    drawn = {n: option(rng) if callable(option) and n != "score_mod" else option for n, option in options.items()}
    return {**{n: rng.standard_normal(shape).astype(dtype) for n, shape in shapes.items()}, **drawn}


def normal(*shape):
    return lambda rng: rng.standard_normal(shape)


def coin(*shape, p=0.7):
    return lambda rng: rng.random(shape) < p


def deep(rng):
    """A bias that pushes every logit below -104, where float32 exponentials of the plain logit are zero."""
    return rng.standard_normal((6, 5, 9)) - 130


def spiked(arguments, name, b, j):
    """The key or value at (b, ., j) is NaN."""
    x = arguments[name].copy()
    x[b, :, j] = np.nan
    return {**arguments, name: x}


def half_range():
    x = call(dtype=np.float16)
    return {**x, "q": x["q"] * np.float16(300), "k": x["k"] * np.float16(300), "scale": 1e-5}


LENGTHS = {"query_lengths": np.array([5, 3]), "key_lengths": np.array([6, 9])}
DROPOUT = {"dropout_mask": coin(2, 6, 5, 9), "dropout_rate": 0.25}
PROBES = {
    "plain": call(),
    "causal": call(1, causal=True, align="lower_right"),
    "causal_more_queries": call(1, q=9, k=5, causal=True, align="upper_left"),
    "causal_lengths": call(2, causal=True, align="lower_right", **LENGTHS),
    "lengths": call(2, **LENGTHS),
    "empty_rows": call(1, q=9, k=5, causal=True, align="lower_right"),
    "window": call(3, window=(2, 1), align="lower_right"),
    "window_zero": call(3, window=(0, 2), align="lower_right"),
    "mask": call(4, mask=coin(2, 1, 5, 9), bias=normal(2, 1, 1, 9)),
    "mask_square": call(4, q=9, mask=coin(2, 6, 9, 9), bias=normal(9, 9)),
    "mask_causal": call(4, mask=coin(5, 9), causal=True, align=4),
    "listed": call(4, indices=lambda rng: rng.integers(-1, 9, (2, 2, 5, 4)), mask=coin(2, 1, 5, 9), **LENGTHS),
    "listed_often": call(
        4, q=9, causal=True, indices=lambda rng: rng.integers(-1, 9, (6, 9, 7)), duplicates="multiset", softcap=2.0
    ),
    "listed_blocks": call(4, q=9, causal=True, block_indices=lambda rng: rng.integers(-1, 3, (2, 6, 9, 2)), block=4),
    "bias": call(5, bias=lambda rng: np.where(rng.random((6, 5, 9)) < 0.3, 0.0, rng.standard_normal((6, 5, 9)))),
    "bias_per_head": call(5, bias=normal(6, 1, 9), scale=0.7),
    "softcap": call(6, softcap=1.5, bias=normal(5, 9), mask=coin(5, 9), scale=1.2),
    "alibi": call(7, alibi_slopes=SLOPES * 1.5, align="lower_right"),
    "sinks": call(8, sinks=normal(6), scale=1.0),
    "sinks_above": call(8, sinks=lambda rng: rng.standard_normal(6) + 120, dtype=np.float32),
    "sinks_lengths": call(8, sinks=normal(6, 2), **LENGTHS),
    "segments": call(9, query_segments=np.arange(10).reshape(2, 5) // 3, key_segments=np.arange(18).reshape(2, 9) // 4),
    "dropout": call(10, **DROPOUT),
    "mask_lengths": call(9, mask=coin(5, 9), key_lengths=np.array([6, 9])),
    "dropout_square": call(10, q=9, dropout_mask=coin(2, 6, 9, 9), dropout_rate=0.25),
    "pattern": call(11, pattern=patterns.dilated(3)),
    "score_mod": call(12, score_mod=tilt, softcap=2.0),
    "wide": call(13, b=1, h=2, g=1, k=129, q=131, d=66, e=129, sinks=normal(2)),
    "wide_causal": call(13, b=1, h=1, g=1, k=129, q=131, d=2, e=2, causal=True, align=0),
    "alike": call(25, h=2, g=2, q=9, e=7),
    "same_d_and_e": call(14, e=7),
    "deep": call(15, bias=deep, dtype=np.float32),
    "deeper": call(15, bias=lambda rng: rng.standard_normal((6, 5, 9)) - 6e4, mask=coin(5, 9), dtype=np.float32),
    "deepest": call(15, bias=lambda rng: rng.standard_normal((6, 5, 9)) - 2e9, dtype=np.float32),
    "poisoned_key": spiked(call(16, mask=np.arange(9) != 4), "k", 1, 4),
    "poisoned_value": spiked(call(16, mask=np.arange(9) != 4), "v", 1, 4),
    "half_range": half_range(),
    "stored_half": call(19, k=35, q=35, sinks=normal(6), dtype=np.float16),
    "stored_single": call(20, softcap=2.0, dtype=np.float32),
    "positions": call(21, b=1, h=1, g=1, q=3, k=300, d=2, e=2, causal=True, align=0),
    "many_positions": call(21, b=1, h=1, g=1, q=2, k=66000, d=1, e=1, causal=True, align=0),
    "square": call(22, q=9, e=7, query_segments=np.arange(18).reshape(2, 9) // 2, key_segments=np.arange(18).reshape(2, 9) // 4),
    "no_keys": call(23, q=9, query_lengths=np.array([5, 9]), key_lengths=np.array([0, 9]), sinks=normal(6)),
    "ragged": call(23, b=3, q=9, query_lengths=np.array([9, 4, 7]), key_lengths=np.array([0, 9, 3])),
    "block_mask": call(24, q=35, k=40, mask=lambda rng: np.kron(rng.random((9, 10)) < 0.5, np.ones((4, 4), bool))[:35]),
    "everything": call(
        17, mask=coin(2, 1, 5, 9), pattern=patterns.dilated(2) | patterns.window(1, 1, align=2), bias=normal(2, 6, 1, 9),
        causal=True, align=np.array([4, 2]), window=(6, None), scale=0.6, softcap=1.3, softcap_after_bias=True,
        alibi_slopes=SLOPES, sinks=normal(6, 2), lse_includes_sinks=False, head_map="tile", score_mod=tilt, **DROPOUT,
    ),
}  # fmt: skip
UNFIT = ("wide", "wide_causal", "half_range", "many_positions")  # large, or in half
FINITE = [n for n in PROBES if not n.startswith(("poisoned", "stored")) and n not in UNFIT]


def cotangents_of(arguments, seed=99):
    rng = np.random.default_rng(seed)
    lead = arguments["q"].shape[:-1]
    return {"output": rng.standard_normal((*lead, arguments["v"].shape[-1])), "lse": rng.standard_normal(lead)}
