"""Cases of delta_rule_attention."""

import numpy as np

from refattn.attention.delta_rule import delta_rule_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3, "beta": 2, "decay": 2, "channel_decay": 3, "erase_key": 3, "state": 3}
FORMS = ("chunked", "recurrent", "parallel")
OPTIONS = {
    "plain": {},
    "gated": {"beta": True, "decay": True, "state": True},
    "channels": {"beta": True, "channel_decay": True, "state": True},
    "erase_key": {"decay": True, "erase_key": True, "state": True},
    "l2_sum": {"qk_norm": "l2_sum", "beta": True, "head_decay": True, "norm_eps": 0.1},
    "l2": {"qk_norm": "l2", "beta": True, "lengths": (4, 7), "reset": True, "norm_eps": 0.5, "state": True},
    "steps": {
        "steps": 2,
        "beta": True,
        "decay": True,
        "head_decay": True,
        "state": True,
        "reset": True,
        "lengths": (3, 7),
    },
    "values_share": {"h": 2, "g": 4, "decay": True, "beta": True, "state": True},
    "queries_share": {"h": 4, "g": 2, "channel_decay": True, "head_map": "tile", "reset": True},
}
CASES = {n: {**x, "form": FORMS[i % 3], "chunk": 3} for i, (n, x) in enumerate(OPTIONS.items())}
COUNTED = [
    2 * ({"b": 2, "h": 2, "g": 4, "t": 40, "d": 6, "e": 5, **options},)
    for options in ({"chunk": 16}, {"form": "parallel"}, {"form": "recurrent"})
]
SHOWING = {
    "square": {"e": 3, "state": True, "channel_decay": True, "beta": True, "scale": None},
    "strong": {"t": 70, "decay": True, "strength": 100.0},
    "long": {"t": 150, "decay": True, "beta": True, "scale": None, "state": True},
}


def arguments(name="plain", seed=0, **more):
    sizes = {"b": 2, "h": 2, "t": 7, "d": 3, "e": 2, "scale": 0.7}
    return attention.example(rng(seed), **{**sizes, **(CASES | SHOWING)[name], **more})
