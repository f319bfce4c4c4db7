"""Cases of compressive_attention."""

import numpy as np

from refattn.attention.compressive import compressive_attention as attention

rng = np.random.default_rng
BATCHED = {"x": 2, "memory": 2, "compressed": 2, "mask": 3, "bias": 3}
SIZES = {"b": 2, "h": 2, "q": 3, "k": 2, "n": 2, "m": 4, "d": 3, "e": 2}


def base(seed=0, **more):
    return attention.example(rng(seed), **{**SIZES, **more})


def without(seed, *names):
    return {n: x for n, x in base(seed).items() if n not in names}


CASES = {
    "plain": base,
    "per_head": lambda seed: without(seed, "w_o"),
    "no_positions": lambda seed: without(seed, "r", "w"),
    "table_alone": lambda seed: without(seed, "u", "w"),
    "no_biases_no_positions": lambda seed: without(seed, "r", "u", "w"),
    "span_end": lambda seed: base(seed, compressed_positions="span_end", rate=3),
    "span_mid": lambda seed: base(seed, compressed_positions="span_mid", rate=2),
    "mask": lambda seed: base(seed, mask=rng(1).random((2, 1, 3, 7)) < 0.7),
    "bias": lambda seed: base(seed, bias=rng(2).standard_normal((2, 3, 7)), scale=0.6),
    "same_length": lambda seed: base(seed, same_length=True),
    "empty_compressed": lambda seed: base(seed, n=0),
    "no_memories": lambda seed: {**without(seed, "memory", "compressed"), "r": rng(3).standard_normal((2, 3, 3))},
}
SIZES_COUNTED = {"b": 2, "h": 2, "q": 6, "k": 5, "n": 3, "m": 8, "d": 4, "e": 3}
COUNTED = [(SIZES_COUNTED, SIZES_COUNTED)]
SHOWING = {
    "square": lambda seed: base(seed, e=3),
    "stopped": lambda seed: base(seed, through_memory=False),
}


def arguments(name="plain", seed=0, **more):
    """Memories are variables here: where they are constants, their gradient is 0 by decree and not a derivative."""
    return {"scale": 0.5, "through_memory": True, **(CASES | SHOWING)[name](seed), **more}
