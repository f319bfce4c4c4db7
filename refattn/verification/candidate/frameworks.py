"""Array libraries a candidate may speak: bring NumPy arrays there, results back, take gradients the library's way.

Each framework has ``bring(x)``, ``back(x)``, ``scope(x64)`` (a context for the call) and ``run(function, handed, wrt,
cotangents)``, which differentiates where the library can.  bfloat16 is ml_dtypes' on the NumPy side and crosses by its
bits.  Strides are kept where the library has strides (NumPy, torch, CuPy): nothing is made contiguous on the way.
"""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from refattn import arrays
from refattn.verification.errors import Unsupported, UsageError

__all__ = ["FRAMEWORKS", "Framework", "Pulled", "framework"]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Pulled:
    """What a backward gave: gradients, the cotangents that reached it, the arrays whose gradient is due, a remark.

    ``failed`` is the exception of a backward whose forward went well.
    """

    gradients: dict[str, Any] = dataclasses.field(default_factory=dict)
    applied: tuple[str, ...] = ()
    due: tuple[str, ...] = ()
    remark: str = ""
    failed: str = ""


Differentiated = tuple[dict[str, Any], Pulled]


class Framework:
    """NumPy itself, and what the others have in common."""

    name = "numpy"
    differentiates = False
    compiles = False  # whether every new shape costs seconds

    def bring(self, x: np.ndarray) -> Any:
        """The array in this library; ``x`` is the candidate's own writeable copy, strides included."""
        return x

    def back(self, x: Any) -> np.ndarray:
        """A result as a NumPy array.

        Raises
        ------
        TypeError
            If it is no array.
        """
        if not arrays.is_array(x):
            raise TypeError(f"a {type(x).__name__} is not an array")
        return np.asarray(arrays.to_numpy(x))

    def unchanged(self, handed: Any, host: np.ndarray, original: np.ndarray) -> bool:
        """Whether the array handed over (made from ``host``) still holds the bits of ``original``."""
        return host.tobytes() == original.tobytes()

    @contextlib.contextmanager
    def scope(self, x64: bool) -> Iterator[None]:
        """Context in which arrays are brought and the candidate is called."""
        yield

    def run(
        self,
        function: Callable[[dict[str, Any]], dict[str, Any]],
        handed: dict[str, Any],
        wrt: tuple[str, ...],
        cotangents: Mapping[str, np.ndarray],
    ) -> Differentiated:
        """Call ``function(handed)`` and differentiate it by the library's own means."""
        return function(handed), Pulled(remark="no backward was given, and this library has none of its own")


class Torch(Framework):
    """torch tensors; the backward is torch.autograd's."""

    name = "torch"
    differentiates = True

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def bring(self, x: np.ndarray) -> Any:
        import torch

        if any(s < 0 for s in x.strides):
            raise Unsupported("torch has no negative strides")
        if x.dtype == _BFLOAT16:
            t = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        else:
            t = torch.from_numpy(x)
        return t if self.device == "cpu" else _to_device(t, self.device)

    def back(self, x: Any) -> np.ndarray:
        import torch

        if not isinstance(x, torch.Tensor):
            return super().back(x)
        x = x.detach().cpu()
        if x.dtype == torch.bfloat16:
            return x.contiguous().view(torch.int16).numpy().view(_BFLOAT16)
        return x.resolve_neg().resolve_conj().numpy()

    def unchanged(self, handed: Any, host: np.ndarray, original: np.ndarray) -> bool:
        return self.back(handed).tobytes() == original.tobytes()

    def run(self, function, handed, wrt, cotangents):
        import torch

        leaves = {n: handed[n] for n in wrt if isinstance(handed.get(n), torch.Tensor)}
        for t in leaves.values():
            t.requires_grad_(True)
        fields = function(handed)
        due = tuple(leaves)
        try:
            seeds = self._seeds(fields, cotangents)
            if not seeds:
                return fields, Pulled(due=due, remark="nothing that was returned has a grad_fn")
            found = torch.autograd.grad(
                [y for y, _ in seeds.values()], list(leaves.values()), [d for _, d in seeds.values()], allow_unused=True
            )
        except NotImplementedError as error:
            return fields, Pulled(remark=f"backward: {str(error) or 'NotImplementedError'}")
        except RuntimeError as error:
            return fields, self._accumulated(function, handed, leaves, cotangents, str(error))
        except Exception as error:
            return fields, Pulled(
                applied=tuple(cotangents), due=due, failed=f"the backward raised {type(error).__name__}: {error}"
            )
        gradients = {n: g for n, g in zip(leaves, found, strict=True) if g is not None}
        return fields, Pulled(gradients, tuple(seeds), due)

    def _seeds(self, fields: Mapping[str, Any], cotangents: Mapping[str, np.ndarray]) -> dict[str, tuple[Any, Any]]:
        """(result, cotangent) by name, as far as the result can be differentiated."""
        import torch

        seeds = {}
        for name, d in cotangents.items():
            y = fields.get(name)
            if isinstance(y, torch.Tensor) and y.requires_grad:
                if tuple(y.shape) != d.shape:
                    raise ValueError(f"{name} has shape {tuple(y.shape)}: expected {d.shape}")
                brought = self.bring(d)
                seeds[name] = (y, brought if brought.dtype == y.dtype else brought.to(y.dtype))
        return seeds

    def _accumulated(self, function: Any, handed: Any, leaves: Any, cotangents: Any, first: str) -> Pulled:
        """By ``backward()`` on leaves of its own, for what ``autograd.grad`` cannot do (reentrant checkpoints)."""
        import torch

        own = {n: t.detach().requires_grad_(True) for n, t in leaves.items()}
        try:
            seeds = self._seeds(function({**handed, **own}), cotangents)
            torch.autograd.backward([y for y, _ in seeds.values()], [d for _, d in seeds.values()])
        except Exception as error:
            says = first if str(error) == first else f"{error} (and by autograd.grad: {first})"
            return Pulled(
                applied=tuple(cotangents), due=tuple(own), failed=f"the backward raised {type(error).__name__}: {says}"
            )
        gradients = {n: t.grad for n, t in own.items() if t.grad is not None}
        return Pulled(gradients, tuple(seeds), tuple(own))


def _to_device(t: Any, device: str) -> Any:
    """A tensor on another device with the strides it has here (``Tensor.to`` would compact them)."""
    import torch

    if t.numel() == 0:
        return t.to(device)
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    flat = torch.as_strided(t, (span,), (1,))
    return torch.as_strided(flat.to(device), t.shape, t.stride())


class Jax(Framework):
    """JAX arrays; the backward is jax.vjp's.

    It runs operation by operation: each is compiled once for every shape that it meets, so that calls on few shapes are
    quick whatever their options.

    JAX turns 64-bit arrays into 32-bit ones unless told otherwise.  ``jax_enable_x64`` is switched on for the calls
    whose arrays are float64, and for these alone, so that a candidate's own constants keep their usual types elsewhere.
    """

    name = "jax"
    differentiates = True
    compiles = True

    def bring(self, x: np.ndarray) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(x)

    def back(self, x: Any) -> np.ndarray:
        import jax

        return np.asarray(x) if isinstance(x, jax.Array) else super().back(x)

    def unchanged(self, handed: Any, host: np.ndarray, original: np.ndarray) -> bool:
        return True  # JAX arrays cannot be written to

    @contextlib.contextmanager
    def scope(self, x64: bool) -> Iterator[None]:
        import jax

        if not x64:
            yield
            return
        with jax.enable_x64(True):
            yield

    def run(self, function, handed, wrt, cotangents):
        import jax
        import jax.numpy as jnp

        leaves = {n: handed[n] for n in wrt if isinstance(handed.get(n), jax.Array)}
        fields, pull = jax.vjp(lambda given: function({**handed, **given}), leaves)
        due = tuple(leaves)
        for name, d in cotangents.items():
            y = fields.get(name)
            if y is not None and y.shape != d.shape:
                return fields, Pulled(due=due, failed=f"{name} has shape {y.shape}: expected {d.shape}")
        applied = tuple(n for n in cotangents if fields.get(n) is not None)
        seeds = {
            n: jnp.asarray(cotangents[n]).astype(y.dtype) if n in applied else _zero_cotangent(y)
            for n, y in fields.items()
        }
        try:
            (gradients,) = pull(seeds)
        except Exception as error:
            return fields, Pulled(
                applied=applied, due=due, failed=f"the backward raised {type(error).__name__}: {error}"
            )
        return fields, Pulled(dict(gradients), applied, due)


def _zero_cotangent(y: Any) -> Any:
    import jax
    import jax.numpy as jnp

    if jnp.issubdtype(y.dtype, jnp.floating):
        return jnp.zeros_like(y)
    return np.zeros(y.shape, dtype=jax.dtypes.float0)


class CuPy(Framework):
    """CuPy arrays on the current GPU."""

    name = "cupy"

    def bring(self, x: np.ndarray) -> Any:
        import cupy

        if x.dtype == _BFLOAT16:
            raise Unsupported("CuPy has no bfloat16")
        y = cupy.asarray(np.ascontiguousarray(x))
        if x.flags.c_contiguous or x.size == 0 or any(s < 0 for s in x.strides):
            return y
        span = 1 + sum((n - 1) * s // x.itemsize for n, s in zip(x.shape, x.strides, strict=True))
        strided = cupy.lib.stride_tricks.as_strided(cupy.empty(span, dtype=x.dtype), x.shape, x.strides)
        strided[...] = y
        return strided

    def unchanged(self, handed: Any, host: np.ndarray, original: np.ndarray) -> bool:
        return self.back(handed).tobytes() == original.tobytes()


FRAMEWORKS = {"numpy": Framework, "torch": Torch, "jax": Jax, "cupy": CuPy}


def framework(name: str) -> Framework:
    """The framework of that name; ``torch:cuda:0`` puts the tensors on a device.

    Raises
    ------
    UsageError
        Unknown name, or a library that is not installed.
    """
    library, _, device = name.partition(":")
    if library not in FRAMEWORKS or (device and library != "torch"):
        known = ", ".join(map(repr, FRAMEWORKS))
        raise UsageError(f"framework is {name!r}: expected one of {known}, or 'torch:<device>'")
    if importlib.util.find_spec(library) is None:
        raise UsageError(f"framework is {name!r}, but {library} is not installed")
    return Torch(device) if device else FRAMEWORKS[library]()
