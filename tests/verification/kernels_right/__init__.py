"""Right kernels of softmax attention, composed of independent pieces: every order, base, domain, storage that is legal."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from verification.kernels_right.backwards import Backward, backward
from verification.kernels_right.forwards import FORWARDS
from verification.kernels_right.logits import ORDERS, added
from verification.kernels_right.setup import Array, Call, call_of, padded

__all__ = ["VARIANTS", "run"]

BACKWARDS = {
    "plain": Backward(),
    "scale_in_q": Backward(logits="into_q", from_q=True),
    "base_2": Backward(weights="base_2", keys=8),
    "rowsum": Backward(row="weights"),
    "rowsum_wide": Backward(row="weights", narrow=False, weights="anew"),
    "factored": Backward(factored=True, keys=16, logits="reversed_channels"),
    "per_head": Backward(heads=True, keys=32),
    "wide": Backward(narrow=False, logits="one_by_one"),
    "other_product": Backward(logits="two_halves", row="weights", heads=True, from_q=True),
    "anew": Backward(weights="anew", logits="into_k"),
}


def _variants() -> dict[str, tuple[str, str, str, bool]]:
    """Each forward with every order of logits and every backward, in turn: more than 200."""
    found = {}
    orders, backwards = list(ORDERS), list(BACKWARDS)
    for n, (name, i) in enumerate(itertools.product(FORWARDS, range(12))):
        order, back = orders[(n + i) % len(orders)], backwards[(3 * n + i) % len(backwards)]
        narrow = i % 3 > 0
        found[f"{name}, {order}, {back}, {'narrow' if narrow else 'wide'} weights"] = (name, order, back, narrow)
    return found


VARIANTS = _variants()
"""Name of a kernel: its forward, the order of its logits, its backward, and whether P is rounded to the storage."""


def run(variant: tuple[str, str, str, bool], arrays: dict[str, Array], options: dict[str, Any], cotangents: Any) -> Any:
    """Outputs and gradients by name: ``output``, ``lse``, ``d_q`` ..."""
    name, order, back, narrow = variant
    c = call_of(**arrays, **options)
    with np.errstate(all="ignore"):
        forward: Callable[[Call, Array], tuple[Array, Array]] = FORWARDS[name]
        storage = c.storage
        c.storage = storage if narrow else c.q.dtype
        s = added(c, ORDERS[order](c))
        out, lse = forward(c, s)
        c.storage = storage
        beyond = padded(c, options.get("query_lengths"))
        lse = np.where(beyond, -np.inf, lse).astype(c.q.dtype)
        stored = np.where(beyond[..., None] | ~c.seen.any(-1)[..., None], 0, out).astype(storage)
        shown = lse
        if c.sinks is not None and not c.lse_with_sinks:
            shown = FORWARDS[name](_without_sinks(c), s)[1]
        found = {"output": stored, "lse": shown}
        if cotangents:
            d_out = cotangents.get("output", np.zeros(stored.shape)).astype(c.q.dtype)
            gradients = backward(c, BACKWARDS[back], stored.astype(c.q.dtype), lse, d_out, cotangents.get("lse"))
            found |= {f"d_{n}": np.asarray(x).astype(storage) for n, x in gradients.items()}
    return found


def _without_sinks(c: Call) -> Call:
    return dataclasses.replace(c, sinks=None)
