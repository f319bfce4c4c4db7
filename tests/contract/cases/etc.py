"""Cases of etc_attention."""

import numpy as np

from refattn.attention.etc import etc_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3, "q_global": 3, "k_global": 3, "v_global": 3}
CASES = {
    "plain": {},
    "no_labels": {"p": 0},
    "distances": {"long_labels": None, "global_labels": None, "p": 5, "radius": 4, "clip": 2, "scale": 0.4},
    "default_clip": {"long_labels": None, "global_labels": None, "p": 5, "clip": None},
    "masks": {"long_mask": True, "global_mask": True},
    "shared_masks": {
        "long_mask": np.arange(12).reshape(6, 2) % 3 > 0,
        "global_mask": np.arange(16).reshape(2, 8) % 3 > 0,
    },
    "lengths": {"lengths": (6, 3), "global_lengths": (1, 2)},
    "no_keys": {"lengths": (0, 3), "global_lengths": (0, 2), "global_mask": True},
    "alone": {"radius": 0, "p": 1, "clip": 0, "long_labels": None},
    "no_global": {"n": 0},
}
LONG = {
    "150": {
        "long_mask": True,
        "global_mask": True,
        "t": 150,
        "n": 5,
        "radius": 9,
        "p": 9,
        "clip": 3,
        "lengths": (150, 88),
    }
}
COUNTED = [2 * ({"b": 2, "h": 2, "t": 40, "n": 3, "d": 4, "e": 3, "p": p, "radius": 3, "clip": 2},) for p in (0, 7)]


def arguments(name="plain", seed=0, **more):
    sizes = {"b": 2, "h": 2, "t": 6, "n": 2, "d": 3, "e": 2, "p": 7, "radius": 1}
    return attention.example(rng(seed), **{**sizes, **(CASES | LONG)[name], **more})
