"""Cases of rwkv7_attention."""

import numpy as np

from refattn.attention.rwkv7 import rwkv7_attention as attention

rng = np.random.default_rng
BATCHED = {"q": 3, "k": 3, "v": 3, "remove": 3, "replace": 3, "decay": 2, "channel_decay": 3, "state": 3}
FORMS = ("chunked", "recurrent", "parallel")
OPTIONS = {
    "plain": {},
    "gated": {"decay": True, "state": True},
    "channels": {"channel_decay": True, "state": True, "scale": None},
    "documents": {"channel_decay": True, "reset": True, "state": True, "lengths": (4, 7)},
    "values_share": {"h": 2, "g": 4, "head_decay": True, "state": True},
    "queries_share": {"h": 4, "g": 2, "decay": True, "head_map": "tile", "reset": True},
}
CASES = {n: {**x, "form": FORMS[i % 3], "chunk": 3} for i, (n, x) in enumerate(OPTIONS.items())}
COUNTED = [
    2 * ({"b": 2, "h": 2, "g": 4, "t": 40, "d": 6, "e": 5, **options},)
    for options in ({"chunk": 16}, {"form": "parallel"}, {"form": "recurrent"})
]
SHOWING = {
    "square": {"e": 3, "state": True, "channel_decay": True, "scale": None},
    "strong": {"t": 70, "decay": True, "strength": 100.0},
    "long": {"t": 150, "channel_decay": True, "scale": None, "state": True},
}


def arguments(name="plain", seed=0, **more):
    sizes = {"b": 2, "h": 2, "t": 7, "d": 3, "e": 2, "scale": 0.7}
    return attention.example(rng(seed), **{**sizes, **(CASES | SHOWING)[name], **more})
