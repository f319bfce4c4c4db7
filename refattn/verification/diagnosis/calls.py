"""What diagnosis looks at: judged calls, which of their elements are off, and what distinguishes one call from another."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from refattn import arrays
from refattn.verification.truth import Truth
from refattn.verification.verdict import Judgement, ratio

__all__ = ["JudgedCall"]


@dataclasses.dataclass(frozen=True)
class JudgedCall:
    """One call: what was right, what the candidate gave, and the verdicts.

    ``got`` holds the candidate's arrays by name (``output``, ``lse``, ``d_q`` ...), ``leak`` whether NaN may stand anywhere.
    """

    probe: str
    dtype: str
    size: int
    truth: Truth
    got: dict[str, np.ndarray]
    judgements: tuple[Judgement, ...]
    leak: bool = False

    @functools.cached_property
    def failing(self) -> tuple[str, ...]:
        """Arrays that are wrong."""
        return tuple(j.array for j in self.judgements if j.verdict == "mismatch" and j.array in self.got)

    @functools.cached_property
    def judged(self) -> tuple[str, ...]:
        """Arrays with a verdict, right or wrong."""
        return tuple(j.array for j in self.judgements if j.verdict in ("ok", "mismatch") and j.array in self.got)

    def limits(self, name: str) -> tuple[float, float]:
        """Maximum and median of error/bound that pass for this array."""
        return next(j.limits for j in self.judgements if j.array == name)

    def units(self, name: str, wanted: np.ndarray, bound: np.ndarray) -> np.ndarray:
        """Distance of the candidate's array from ``wanted`` in bounds; 0 where conventions leave the element open."""
        units = ratio(self.got[name], wanted, bound, leak=self.leak)
        left_open = self.truth.open.get(name)
        return units if left_open is None or left_open.shape != units.shape else np.where(left_open, 0.0, units)

    def off(self, name: str) -> np.ndarray:
        """Elements of an array that are off: beyond the largest error that passes, or, where only the median fails, beyond that."""
        if name not in self._off:
            units = self.units(name, self.truth.values[name], self.truth.bounds[name])
            largest, median = self.limits(name)
            off = units > largest
            self._off[name] = off if off.any() or name not in self.failing else units > median
        return self._off[name]

    @functools.cached_property
    def _off(self) -> dict[str, np.ndarray]:
        return {}

    @functools.cached_property
    def pairs(self) -> int:
        """About how many pairs a call has: what an answer to it costs."""
        rows = max((x.size // max(1, x.shape[-1]) for n, x in self.truth.values.items() if n == "output"), default=1)
        keys = [
            np.shape(x)[-2] for n, x in self.truth.question.arrays.items() if n in ("k", "v", "qk") and np.ndim(x) > 1
        ]
        return rows * max(keys, default=1)

    @functools.cached_property
    def features(self) -> dict[str, Any]:
        """What a scope may speak of: options in use (bool), their special levels (bool), sizes (int)."""
        question = self.truth.question
        given = {n: x for n, x in {**question.arrays, **question.options}.items() if x is not None}
        return {"dtype": self.dtype, **_sizes(question.arrays), **_levels(given)}


def _sizes(named: Mapping[str, Any]) -> dict[str, int]:
    shapes = {n: np.shape(x) for n, x in named.items() if x is not None}
    q = shapes.get("q", shapes.get("qk"))
    k, v = shapes.get("k", q), shapes.get("v")
    if q is None or k is None or len(q) < 3 or len(k) < 3:
        return {f"axis {axis} of {n}": size for n, shape in shapes.items() for axis, size in enumerate(shape)}
    sizes = {"queries": q[-2], "keys": k[-2], "heads": q[-3], "key heads": k[-3], "channels": q[-1]}
    if v is not None:
        sizes["value channels"] = v[-1]
    if len(q) > 3:
        sizes["batch"] = q[0]
    return {n: int(x) for n, x in sizes.items()}


def _levels(given: Mapping[str, Any]) -> dict[str, bool]:
    """Options in use and their special levels."""
    found: dict[str, bool] = {}
    for name, x in given.items():
        if x is False or (
            isinstance(x, (int, float)) and not isinstance(x, bool) and x == 0 and name == "dropout_rate"
        ):
            continue
        if name in ("q", "k", "v", "qk", "align", "head_map") or (name == "x_q"):
            continue
        label = f"{name}={x}" if isinstance(x, str) else name
        found[label] = True
        if name == "window" and isinstance(x, (tuple, list)):
            left, right = x
            found["a window of zero on the left"] = left == 0
            found["a window open on the left"] = left is None
            found["a window open on the right"] = right is None
            shape = np.shape(given.get("k", 0))
            keys = shape[-2] if len(shape) >= 2 else None
            found["a window as long as the keys"] = keys is not None and left is not None and left >= keys
        if name.endswith("lengths"):
            lengths = np.unique(np.asarray(x))
            found[f"unequal {name}"] = lengths.size > 1
            found[f"an empty sequence in {name}"] = bool((lengths == 0).any())
        if name == "mask" and isinstance(x, np.ndarray) and x.ndim:
            found["a mask with empty rows"] = bool((~x.any(axis=-1)).any())
        if name == "bias" and arrays.is_array(x):
            found["a bias with -inf"] = bool(np.isneginf(np.asarray(x).astype(np.float64)).any())
    return found
