"""Cases of adaptive_span_attention."""

import numpy as np

from refattn.attention.adaptive_span import adaptive_span_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3, "mask": 3}
CASES = {
    "plain": {},
    "released": {"distance_origin": 0, "renormalize_eps": 1e-3},
    "no_positions": {"key_positions": None},
    "positions_per_head": {"key_positions": rng(1).standard_normal((2, 3, 5))},
    "slots": {"n": 2},
    "slots_released": {"n": 2, "distance_origin": 0, "renormalize_eps": 1e-3},
    "dynamic": {"span": 5 * rng(2).random((2, 2, 3))},
    "dynamic_shared": {"span": 5 * rng(2).random((2, 3))},
    "mask": {"mask": rng(3).random((2, 1, 3, 8)) < 0.6},
    "mask_empty_row": {"mask": (np.arange(3) != 1)[:, None] & np.ones(8, bool)},
    "short_history": {"q": 6, "k": 8, "max_span": 5, "key_positions": rng(1).standard_normal((3, 5))},
    "no_memory": {"q": 5, "k": 5, "max_span": 4},
    "small_span": {"span": np.array([0.3, 0.1]), "ramp": 1.5},
    "scale": {"scale": 0.4},
}
COUNTED = [
    (
        {"b": 2, "h": 2, "q": 70, "k": 300, "d": 4, "e": 3, "max_span": 200, "span": np.array([40.0, 3.0]), "ramp": 4},
        {"b": 2, "h": 2, "q": 70, "k": 300, "d": 4, "e": 3, "max_span": 200, "span": 40, "ramp": 4},
    ),
]
SHOWING = {"both_ends_of_the_ramp": {"q": 5, "k": 9, "n": 2, "span": np.array([2.0, 1.0]), "ramp": 2.0}}


def arguments(name="plain", seed=0, **more):
    return attention.example(
        rng(seed), **{"b": 2, "h": 2, "q": 3, "k": 8, "d": 3, "e": 2, "scale": 0.7, **(CASES | SHOWING)[name], **more}
    )
