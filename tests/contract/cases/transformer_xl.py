"""Cases of transformer_xl_attention."""

import numpy as np

from refattn.attention.transformer_xl import transformer_xl_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3, "r": 3, "absolute_q": 3, "absolute_k": 3, "mask": 3, "bias": 3}
B, H, Q, K, D, E = 2, 2, 3, 5, 3, 2
SIZES = {"b": B, "h": H, "q": Q, "k": K, "d": D, "e": E}


def base(seed=0, **more):
    return attention.example(rng(seed), **{**SIZES, **more})


def with_places(seed=0):
    return {**base(seed), "key_places": np.array([1, 3, 5, 6, 7]), "r": rng(1).standard_normal((H, 8, D))}


MASK = rng(1).random((B, 1, Q, K)) < 0.7
BIAS = np.where(rng(2).random((H, Q, K)) < 0.2, -np.inf, rng(3).standard_normal((H, Q, K)))
CASES = {
    "plain": base,
    "both_directions": lambda seed: base(seed, causal=False),
    "no_memory": lambda seed: base(seed, k=Q),
    "one_query": lambda seed: base(seed, q=1),
    "more_queries_than_keys": lambda seed: base(seed, q=4, k=3),
    "same_length": lambda seed: base(seed, same_length=True),
    "same_length_number": lambda seed: base(seed, same_length=3),
    "learned": lambda seed: base(seed, position_bias=True),
    "learned_both_directions": lambda seed: base(seed, position_bias=True, causal=False),
    "absolute": lambda seed: base(seed, absolute_q=True),
    "table_alone": lambda seed: {**base(seed), "u": None, "w": None},
    "no_table": lambda seed: {**base(seed), "r": None, "w": None},
    "mask": lambda seed: base(seed, mask=MASK),
    "mask_empty_row": lambda seed: base(seed, mask=np.arange(Q)[:, None] != 1),
    "bias_hides": lambda seed: base(seed, bias=BIAS),
    "scale_zero": lambda seed: base(seed, scale=0.0),
    "places": with_places,
    "table_per_batch": lambda seed: {**base(seed), "r": rng(5).standard_normal((B, H, K, D))},
    "together": lambda seed: {**with_places(seed), "bias": BIAS, "mask": MASK, "same_length": 4, "scale": 0.7},
}
LONG = {
    n: lambda seed, x=x: base(seed, b=1, h=1, q=300, k=1500, d=4, e=4, **x)
    for n, x in {
        "many_tiles": {},
        "many_tiles_both": {"causal": False},
        "many_tiles_same_length": {"same_length": True},
    }.items()
}
COUNTED = [
    2 * ({"b": 2, "h": 2, "q": 40, "k": 70, "d": 4, "e": 6, **options},)
    for options in ({}, {"causal": False}, {"same_length": True})
]


def arguments(name="plain", seed=0, **more):
    return {n: x for n, x in {"scale": 0.5, **(CASES | LONG)[name](seed), **more}.items() if x is not None}
