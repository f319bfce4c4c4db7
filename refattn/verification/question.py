"""One call as the candidate gets it, and how the reference answers it."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from refattn import arrays
from refattn.mechanism import Mechanism
from refattn.verification import conventions as conventions_
from refattn.verification.conventions import Conventions

__all__ = ["Question", "float64", "floating"]


@dataclasses.dataclass(frozen=True)
class Question:
    """One call as the candidate gets it: rounded arrays, and the conventions after which it is to be answered."""

    mechanism: Mechanism
    arrays: dict[str, Any]
    options: dict[str, Any]
    cotangents: dict[str, np.ndarray]
    wrt: tuple[str, ...]
    dtype: str
    conventions: Conventions = dataclasses.field(default_factory=Conventions)
    takes: frozenset[str] = frozenset()
    backend: str | None = None

    @property
    def precision(self) -> str:
        """Dtype whose rounding the candidate's arithmetic shows."""
        return "float32" if self.conventions.compute is not None and self.dtype == "float64" else self.dtype

    def arguments(self, conventions: Conventions | None = None, *, exact: bool = True) -> dict[str, Any]:
        """Arguments of the mechanism, floating arrays in float64 unless ``exact`` is False."""
        key = (conventions, exact)
        if key not in self._made:
            follow = conventions or self.conventions
            taken = self.takes.__contains__ if conventions is None else lambda name: False
            given = conventions_.reference_arguments(self.mechanism, self.arrays, self.options, follow, taken)
            self._made[key] = {n: float64(x) if exact and floating(x) else x for n, x in given.items()}
        return dict(self._made[key])

    @functools.cached_property
    def cotangents64(self) -> dict[str, np.ndarray]:
        return {n: float64(x) for n, x in self.cotangents.items()}

    @functools.cached_property
    def _made(self) -> dict[Any, dict[str, Any]]:
        return {}

    def answer(
        self, arguments: Mapping[str, Any], cotangents: Any, conventions: Conventions | None = None, **how: Any
    ) -> dict[str, np.ndarray]:
        """Results and gradients by array name, as a candidate of these conventions should give them."""
        result, pullback = self.vjp(arguments, **how)
        return self.read(result, pullback, arguments, cotangents, conventions)

    def vjp(self, arguments: Mapping[str, Any], **how: Any) -> tuple[Any, Any]:
        """The mechanism's own Result, and its pullback where gradients are wanted."""
        if self.backend is not None:
            how.setdefault("backend", self.backend)
        with np.errstate(all="ignore"):
            if self.wrt and self.cotangents:
                return self.mechanism.vjp(**arguments, **how)
            return self.mechanism.forward(**arguments, **how), None

    def read(
        self,
        result: Any,
        pullback: Any,
        arguments: Mapping[str, Any],
        cotangents: Mapping[str, Any],
        conventions: Conventions | None = None,
    ) -> dict[str, np.ndarray]:
        """A Result and its gradients in the conventions asked for, as NumPy arrays."""
        follow = conventions or self.conventions
        host = {n: arrays.to_numpy(x) if arrays.is_array(x) else x for n, x in arguments.items()}
        values = conventions_.reference_result(result, host, follow)
        values = {n: x for n, x in values.items() if n in self.mechanism.outputs}
        if pullback is not None:
            with np.errstate(all="ignore"):
                gradients = pullback(**conventions_.reference_cotangents(cotangents, follow))
            plain = {n: arrays.to_numpy(x) for n, x in cotangents.items()}
            wanted = conventions_.reference_gradients(gradients, result, host, plain, follow, self.options)
            values |= {f"d_{n}": x for n, x in wanted.items() if n in self.wrt}
        return values


def floating(x: Any) -> bool:
    return isinstance(x, np.ndarray) and arrays.is_real_floating(x.dtype)


def float64(x: Any) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.asarray(x).astype(np.float64)
