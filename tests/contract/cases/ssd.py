"""Cases of ssd_attention."""

import numpy as np

from refattn.attention.ssd import ssd_attention as attention

rng = np.random.default_rng
BATCHED = {"x": 3, "dt": 2, "b": 3, "c": 3, "state": 3}
FORMS = ("chunked", "recurrent", "parallel")
OPTIONS = {
    "plain": {},
    "model": {"skip": True, "dt_bias": True, "dt_softplus": True, "state": True},
    "limits": {"dt_bias": True, "dt_limit": (0.3, 0.8), "state": True},
    "groups": {"h": 4, "g": 2, "lengths": (3, 7), "dt_bias": True, "dt_softplus": True, "skip": True, "state": True},
}
CASES = {n: {**x, "form": FORMS[i % 3], "chunk": 3} for i, (n, x) in enumerate(OPTIONS.items())}
COUNTED = [
    2 * ({"b": 2, "h": 4, "g": 2, "t": 40, "d": 6, "e": 5, **options},)
    for options in ({"chunk": 16}, {"form": "parallel"}, {"form": "recurrent"})
]
SHOWING = {
    "square": {"e": 3, "state": True, "skip": True, "dt_bias": True, "dt_softplus": True},
    "long": {"t": 150, "state": True, "dt_softplus": True},
    "strong": {"t": 70, "strength": 100.0},
    "far": {"dt_softplus": True, "dt_bias": np.full(2, 800.0)},
    "clipped": {"dt_softplus": True, "dt_limit": (0.75, 0.9), "state": True},
}


def arguments(name="plain", seed=0, **more):
    sizes = {"b": 2, "h": 2, "t": 7, "d": 3, "e": 2}
    return attention.example(rng(seed), **{**sizes, **(CASES | SHOWING)[name], **more})
