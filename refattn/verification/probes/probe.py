"""One designed call: its arguments before rounding, and how they lie in memory."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from refattn import arrays
from refattn.verification.conventions import CONVENTION_OPTIONS

__all__ = ["MEMORY_FORMS", "Probe", "in_memory", "storage_dtype"]

MEMORY_FORMS = ("contiguous", "transposed", "sliced", "expanded")


def storage_dtype(name: str) -> np.dtype:
    """NumPy dtype of a name, bfloat16 included."""
    if name == "bfloat16":
        from ml_dtypes import bfloat16

        return np.dtype(bfloat16)
    return np.dtype(name)


@dataclasses.dataclass(frozen=True)
class Probe:
    """One designed call.

    Attributes
    ----------
    name, says : str
        Short name, and what the probe makes visible.
    arguments : dict
        Every argument by its name; arrays are float64 masters (or bool, int), before rounding.
    positional : tuple of str
        The arrays that go by position, in order.
    cotangents : dict
        Random cotangents of the differentiable results.
    wrt : tuple of str
        Arguments whose gradients are asked for.
    features : dict of str
        What it is made of: level by feature, plain levels left out.  With ``sizes`` and ``seed`` it says all: the same
        recipe without one of its features is the probe that is one apart.
    sizes : dict of int
        Axis lengths by letter, as they were asked of the mechanism's example.
    seed : int
        What it was drawn with.
    memory, memory_of_cotangents : str
        Form in memory: "contiguous", "transposed", "sliced" or "expanded" (stride 0 over the batch; a cotangent is one
        number for all).
    poison : bool
        Non-finite or huge values stand where nobody may look.
    named : tuple of str
        Conventions that the candidate's signature must name for this probe to make sense.
    forms : tuple of str
        Forms of options that many implementations do not have: capabilities of their own.
    wide : tuple of str
        Arguments that are float32 where the others are of fewer bits.
    """

    name: str
    says: str
    arguments: dict[str, Any]
    positional: tuple[str, ...]
    cotangents: dict[str, np.ndarray]
    wrt: tuple[str, ...]
    features: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    seed: int = 0
    memory: str = "contiguous"
    memory_of_cotangents: str = "contiguous"
    poison: bool = False
    named: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options used, conventions left out: what a candidate must be able to take."""
        return tuple(n for n in self.arguments if n not in self.positional and n not in CONVENTION_OPTIONS)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the positional arrays: what a compiler compiles anew for."""
        return tuple(np.shape(x) for n in self.positional if (x := self.arguments.get(n)) is not None)

    @property
    def size(self) -> int:
        """Number of array elements: what "the smallest failing probe" means."""
        return sum(x.size for x in self.arguments.values() if isinstance(x, np.ndarray))

    def stored(self, dtype: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Arguments and cotangents rounded to ``dtype``, in the memory form of the probe.

        Finite values too large for the dtype become its largest finite number.  The cotangent of anything but the
        output has at least float32: so has the lse.
        """
        kind = storage_dtype(dtype)
        wide = np.dtype(np.float32) if arrays.is_half(dtype) else kind
        rounded = {n: _round(x, wide if n in self.wide else kind) for n, x in self.arguments.items()}
        arguments = {n: in_memory(x, self.memory) if n in self.positional else x for n, x in rounded.items()}
        cotangents = {n: _round(x, kind if n == "output" else wide) for n, x in self.cotangents.items()}
        form = self.memory_of_cotangents
        return arguments, {n: in_memory(x, form) if n == "output" else x for n, x in cotangents.items()}

    def clean(self) -> "Probe":
        """The same probe without poison and in plain memory: what tells a leak or a stride mistake from any other."""
        arguments = {
            n: np.where(np.isfinite(x) & (np.abs(x) < 1e29), x, 0.0)
            if n in ("k", "v") and isinstance(x, np.ndarray)
            else x
            for n, x in self.arguments.items()
        }
        return dataclasses.replace(
            self,
            name=f"{self.name} (clean)",
            arguments=arguments,
            memory="contiguous",
            memory_of_cotangents="contiguous",
            poison=False,
        )

    @property
    def in_plain_memory(self) -> bool:
        return self.memory == self.memory_of_cotangents == "contiguous"


def _round(x: Any, dtype: np.dtype) -> Any:
    if isinstance(x, tuple):
        return tuple(_round(part, dtype) for part in x)
    if not isinstance(x, np.ndarray) or x.dtype != np.float64:
        return x
    largest = float(_finfo(dtype).max)
    clipped = np.where(np.isfinite(x), np.clip(x, -largest, largest), x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return clipped.astype(dtype)


def _finfo(dtype: np.dtype) -> Any:
    if dtype.name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.finfo(dtype)
    return np.finfo(dtype)


def in_memory(x: Any, form: str) -> Any:
    """The array in a form of :data:`MEMORY_FORMS`; what is no array of three axes or more stays as it is.

    "expanded" gives stride 0 to the axes along which the array holds equal values, and makes it read-only.
    """
    if form not in MEMORY_FORMS:
        raise ValueError(f"memory is {form!r}: expected one of {', '.join(MEMORY_FORMS)}")
    if not isinstance(x, np.ndarray) or x.ndim < 3 or form == "contiguous":
        return x
    if form == "transposed":
        return np.swapaxes(np.ascontiguousarray(np.swapaxes(x, -3, -2)), -3, -2)
    if form == "sliced":
        wide = np.full((*x.shape[:-2], 2 * x.shape[-2] + 1, x.shape[-1]), 7.0).astype(x.dtype)
        view = wide[..., 1::2, :]
        view[...] = x
        return view
    part = x.copy()
    for axis in range(x.ndim):
        first = np.take(part, [0], axis=axis)
        if part.size and np.array_equal(np.broadcast_to(first, part.shape), part):
            part = first
    return np.broadcast_to(part, x.shape)
