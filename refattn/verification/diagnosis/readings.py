"""What a kernel attends to, read from the outside: where values are unit vectors, the output is the weights.

A failing call is made again with such values, a slab of keys at a time, and with such cotangents, where ``d_v`` is the weights
that the backward uses.  Neither needs a catalogue of mistakes.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from refattn.verification.diagnosis.calls import JudgedCall
from refattn.verification.diagnosis.rows import ranges

__all__ = ["Reading", "read", "sentences"]

_SLABS = 12
"""Calls of one reading, at most: longer ones are read in their first keys only."""

_SEEN = 1e-7
"""Weights below this share of the largest of their row are taken for hidden pairs."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """Weights of one call, as the candidate has them and as they are due, (..., h, q, k); the keys that were read."""

    actual: np.ndarray
    expected: np.ndarray
    keys: int

    @property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """Pairs that the candidate sees, and those it should."""
        found = []
        for weights in (self.actual, self.expected):
            largest = np.abs(np.nan_to_num(weights)).max(axis=-1, keepdims=True, initial=0.0)
            found.append((np.abs(np.nan_to_num(weights)) > _SEEN * largest) | np.isnan(weights))
        return found[0], found[1]


def read(call: JudgedCall, live: Any) -> Reading | None:
    """The candidate's weights in a call; None where it cannot be made with other values, or its output has another shape."""
    v = call.truth.question.arrays.get("v")
    output = call.truth.values.get("output")
    if v is None or output is None or output.ndim != np.ndim(v) or output.shape[-1] != np.shape(v)[-1]:
        return None
    *_, keys, channels = np.shape(v)
    actual: list[np.ndarray] = []
    expected: list[np.ndarray] = []
    for start in range(0, keys, max(1, channels)):
        if len(actual) == _SLABS:
            break
        count = min(channels, keys - start)
        values = np.zeros(np.shape(v))
        values[..., start + np.arange(count), np.arange(count)] = 1.0
        made = live.again(call, values={"v": values})
        if made is None or "output" not in made.got or made.got["output"].shape != output.shape:
            return None
        actual.append(made.got["output"].astype(np.float64)[..., :count])
        expected.append(made.truth.values["output"][..., :count])
    if not actual:
        return None
    return Reading(np.concatenate(actual, -1), np.concatenate(expected, -1), sum(x.shape[-1] for x in actual))


def sentences(reading: Reading) -> Iterator[str]:
    """What the reading shows, in words: pairs seen and not due, due and not seen, rows whose weights do not sum up."""
    actual, expected = reading.seen
    for pairs, words in ((actual & ~expected, "sees, and should not,"), (expected & ~actual, "does not see")):
        if not pairs.any():
            continue
        index = np.argwhere(pairs)
        rows, keys = np.unique(index[:, -2]), np.unique(index[:, -1])
        heads = np.unique(index[:, -3])
        where = "" if heads.size == pairs.shape[-3] else f" in heads {ranges(heads)}"
        yield f"it {words} {int(pairs.sum())} pairs{where}: rows {ranges(rows)}, keys {ranges(keys)}"
    if not (actual ^ expected).any():
        apart = np.abs(reading.actual - reading.expected)
        if reading.keys == reading.actual.shape[-1] and np.isfinite(apart).all():
            sums = reading.actual.sum(-1), reading.expected.sum(-1)
            off = np.abs(sums[0] - sums[1]) > 1e-3 * np.maximum(1e-6, np.abs(sums[1]))
            if off.any():
                got, due = (float(x[off].flat[0]) for x in sums)
                yield f"the weights of {int(off.sum())} rows do not sum to what is due: {got:.4g} for {due:.4g}"
