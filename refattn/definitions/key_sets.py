"""Which keys each row sees, written out: what the definitions and the mistakes of the sparse mechanisms start from.

Slow on purpose, and nothing here is used by a fast path but :func:`as_mask`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from refattn import patterns
from refattn.definitions.dense_loop import definition as dense_definition
from refattn.definitions.dense_loop import visible_pairs
from refattn.definitions.dense_steps import Steps
from refattn.records import Mutation, Result

__all__ = ["as_mask", "largest_keys", "near_keys", "other_keys", "sparse_keys", "with_keys"]

Arguments = dict[str, Any]


def near_keys(t: int, block: int, look_backward: int, look_forward: int, exact: bool) -> np.ndarray:
    """Local attention, bool (t, t)."""
    seen = np.zeros((t, t), dtype=bool)
    for i in range(t):
        if exact:
            first, last = i - block * look_backward, i + block * look_forward
        else:
            first, last = (i // block - look_backward) * block, (i // block + look_forward) * block + block - 1
        seen[i, max(0, first) : last + 1] = True
    return seen


def sparse_keys(
    t: int,
    h: int,
    pattern: str,
    stride: int,
    summary: int | None,
    summary_offsets: Any,
    heads: str,
    layer: int | None,
    variant: str,
) -> np.ndarray:
    """Sparse Transformer attention, bool (h, t, t)."""
    offsets = np.broadcast_to(0 if summary_offsets is None else np.asarray(summary_offsets), (h,))
    alike: dict[tuple[bool, bool, int], np.ndarray] = {}  # heads of one kind see the same keys
    kinds = []
    for n in range(h):
        first = (
            heads in ("merged", "first") or (heads == "split" and 2 * n < h) or (layer is not None and layer % 2 == 0)
        )
        kinds.append((first, heads == "merged" or not first, stride - int(offsets[n])))
    for first, second, last in set(kinds):
        seen = np.zeros((t, t), dtype=bool)
        for i in range(t):
            if first and pattern == "strided":
                seen[i, max(0, i - stride + (variant == "code")) : i + 1] = True
            if first and pattern == "fixed":
                seen[i, i - i % stride : i + 1] = True
            if second and pattern == "strided":
                seen[i, i % stride : i + 1 : stride] = True
            if second and pattern == "fixed":
                for residue in range(last - int(summary or 0), last):
                    seen[i, residue : i + 1 : stride] = True
        alike[first, second, last] = seen
    return np.stack([alike[kind] for kind in kinds]) if kinds else np.zeros((0, t, t), dtype=bool)


def largest_keys(q: np.ndarray, k: np.ndarray, v: np.ndarray, count: int, shared: Arguments) -> np.ndarray:
    """(..., h, q, count): keys by falling logit, ties to the lower index, -1 where there are no more."""
    visibility = (
        "mask", "pattern", "causal", "align", "window", "query_lengths", "key_lengths", "query_segments", "key_segments",
    )  # fmt: skip
    terms = {n: x for n, x in shared.items() if n not in ("dropout_mask", "dropout_rate", "keep_weights", "sinks")}
    logits = dense_definition(q, k, v, **terms, keep_weights=True).logits
    *lead, h, n_q, n_k = logits.shape
    seen = visible_pairs(tuple(lead), h, n_q, n_k, **{n: x for n, x in shared.items() if n in visibility})
    chosen = np.full((*logits.shape[:-1], count), -1)
    for row in np.ndindex(logits.shape[:-1]):
        values = {j: np.inf if np.isnan(x) else x for j, x in enumerate(logits[row]) if seen[row][j] and x != -np.inf}
        best = sorted(values, key=lambda j: (-values[j], j))[:count]
        chosen[row][: len(best)] = best
    return chosen


def as_mask(indices: np.ndarray, n_k: int) -> np.ndarray:
    """(..., q, n) ints as (..., q, k) bool."""
    places = np.zeros((*indices.shape[:-1], n_k + 1), dtype=bool)
    np.put_along_axis(places, np.where(indices < 0, n_k, indices), True, axis=-1)
    return places[..., :n_k]


def with_keys(shared: Arguments, seen: np.ndarray) -> Arguments:
    """The shared options with these pairs (h?, q, k) as one more pattern."""
    more = patterns.dense(seen)
    given = shared.get("pattern")
    return {**shared, "pattern": more if given is None else given & more}


def other_keys(
    class_: str, says: str, right: Callable[[Arguments], Arguments], wrong: Callable[[Arguments], Arguments | None]
) -> Mutation:
    """The mistake of a softmax over other keys.

    ``right`` and ``wrong`` map the mechanism's arguments to those of dense attention (None: the mistake does not apply).
    """

    def steps(arguments: Arguments) -> Steps | None:
        changed = wrong(arguments)
        if changed is None:
            return None
        found, expected = Steps(changed), Steps(right(arguments))
        seen, wanted = (np.broadcast_to(x.visible(), x.whole) for x in (found, expected))
        return None if np.array_equal(seen, wanted) else found

    def forward(arguments: Arguments) -> Result | None:
        with np.errstate(all="ignore"):
            found = steps(arguments)
            return None if found is None else found.forward()

    def gradients(arguments: Arguments, cotangents: Arguments) -> Arguments | None:
        with np.errstate(all="ignore"):
            found = steps(arguments)
            if found is None:
                return None
            found.forward()
            return found.backward(cotangents)

    return Mutation(class_, says, forward=forward, gradients=gradients)
