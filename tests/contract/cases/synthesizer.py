"""Cases of synthesizer_attention."""

import numpy as np

from refattn.attention.synthesizer import PARTS
from refattn.attention.synthesizer import synthesizer_attention as attention

rng = np.random.default_rng
BATCHED = {"x": 2, "v": 3, "other_logits": 3, "mask": 3}
ALL = {"w_2": True, "w_a": True, "random": True, "random_1": True, "other_logits": True}
CASES = {
    "dense": {},
    "dense_causal": {"causal": True},
    "factors": {"w_a": True},
    "random": {"random": True},
    "random_causal": {"random": True, "causal": True},
    "ranked": {"random_1": True},
    "others": {"other_logits": True},
    "dense_random": {"w_2": True, "random": True},
    "all": ALL,
    "all_causal": {**ALL, "causal": True},
}
CASES |= {f"{n}_masked": {**x, "masked": True} for n, x in CASES.items()}
CASES["all_bare"] = {**ALL, "bare": True}
PART = {"dense": ("dense",), "factors": ("dense_factors",), "random": ("random",), "ranked": ("random_factors",)}
SIZES_COUNTED = {"b": 2, "h": 3, "q": 10, "k": 10, "m": 5, "f": 4, "e": 3, "r": 3, "p": 2}
COUNTED = [
    (
        {**SIZES_COUNTED, **CASES[n]},
        {**SIZES_COUNTED, "parts": PART.get(n, tuple(PARTS)), "n": 5, "causal": "causal" in n},
    )
    for n in ("dense", "factors", "random", "ranked", "all", "all_causal")
]


def arguments(name="dense", seed=0, *, masked=False, bare=False, **more):
    """masked: a mask that differs from head to head, one row of which is empty; bare: no biases, one mixture for all heads."""
    options = {**CASES[name], **more}
    masked, bare = options.pop("masked", masked), options.pop("bare", bare)
    drawn = attention.example(rng(seed), **{"b": 2, "h": 2, "q": 3, "k": 4, "m": 3, "f": 3, "e": 2, **options})
    if "w_1" not in drawn:
        drawn["x"] = None
    if bare:
        drawn = {n: x for n, x in drawn.items() if not n.startswith("b_")}
        drawn["mixture"] = drawn["mixture"][0]
    if masked:
        keys = drawn["v"].shape[-2]
        drawn["mask"] = rng(seed).random((2, 2, keys if drawn.get("causal") else 3, keys)) < 0.6
        drawn["mask"][0, 1, 2] = False
    return drawn
