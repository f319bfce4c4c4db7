"""Cases of bigbird_attention."""

import numpy as np

from refattn.attention.bigbird import bigbird_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3}
CASES = {
    "small": {"b": 1, "h": 2, "t": 9, "d": 2, "e": 1},
    "plain": {},
    "ragged": {"t": 19},
    "ragged_local_end": {"t": 19, "block": 4, "global_blocks": (1, 0)},
    "no_globals": {"t": 23, "block": 3, "global_blocks": (0, 0), "window_blocks": 2, "scale": 0.4},
    "no_window": {"window_blocks": 0, "global_blocks": (0, 1)},
    "wide_globals": {"t": 24, "block": 2, "global_blocks": (3, 2)},
    "all_global": {"t": 7, "block": 2, "global_blocks": (3, 3)},
    "no_random": {"r": 0},
    "lengths": {"query_lengths": (20, 9), "key_lengths": (11, 20)},
    "no_keys": {"query_lengths": (20, 9), "key_lengths": (0, 5)},
    "longer_block": {"t": 5, "block": 8},
    "overlapping": {"random_blocks": rng(1).integers(-1, 10, (3, 10, 6))},
    "overlapping_ragged": {"t": 19, "random_blocks": rng(2).integers(-1, 10, (3, 10, 6)), "global_blocks": (0, 0)},
}
LONG = {
    f"{t}_by_{block}": {"t": t, "block": block, "r": 3, "key_lengths": (t, t - 33)}
    for t, block in ((400, 16), (385, 16), (300, 7))
}
COUNTED = [
    2 * ({"b": 2, "h": 2, "t": t, "d": 4, "e": 3, "r": 2, "block": 4, **options},)
    for t, options in ((40, {}), (75, {"global_blocks": (0, 0)}))
]


def arguments(name="plain", seed=0, **more):
    return attention.example(rng(seed), **{"b": 2, "h": 3, "t": 20, "d": 3, "e": 2, **(CASES | LONG)[name], **more})
