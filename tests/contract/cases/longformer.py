"""Cases of longformer_attention."""

import numpy as np

from refattn.attention.longformer import longformer_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3, "q_global": 3, "k_global": 3, "v_global": 3, "global_tokens": 1}
CASES = {
    "small": {"h": 1, "d": 2, "e": 1},
    "plain": {},
    "no_globals": {"n": 0},
    "local_arrays": {"q_global": None, "k_global": None, "v_global": None},
    "some_arrays": {"k_global": None, "scale": 0.4},
    "uneven": {"window": (3, 1), "scale": 0.7},
    "past": {"window": (None, 0)},
    "oneself": {"window": (0, 0)},
    "lengths": {"query_lengths": (5, 8), "key_lengths": (6, 8), "align": "upper_left"},
    "no_keys": {"query_lengths": (8, 8), "key_lengths": (0, 8), "align": "lower_right"},
    "ragged": {"global_tokens": np.array([[1, 0, 0, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 0, 0, 0]], bool)},
    "one_batch": {"global_tokens": np.array([[1, 0, 0, 1, 0, 0, 0, 1], [0] * 8], bool)},
    "all_global": {"global_tokens": np.ones((2, 8), bool)},
}
CASES["no_keys"].update(align="upper_left")
LONG = {
    f"{n}_{t}": {**{m: y for m, y in x.items() if m != "global_tokens"}, "t": t, "n": 5}
    for n, x in CASES.items() if n not in ("ragged", "one_batch", "all_global", "no_globals") for t in (37, 150)
}  # fmt: skip
LONG |= {f"scattered_{t}": {"t": t, "global_tokens": rng(2).random((2, t)) < 0.1} for t in (37, 150)}
COUNTED = [2 * ({"b": 1, "h": 2, "t": 70, "d": 4, "e": 3, "n": n, "window": (5, 3)},) for n in (0, 2)]


def arguments(name="plain", seed=0, **more):
    return attention.example(rng(seed), **{"b": 2, "h": 2, "t": 8, "d": 3, "e": 2, **(CASES | LONG)[name], **more})
