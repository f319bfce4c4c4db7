"""The backend protocol, with portable versions of every operation that need nothing but the array API."""

from collections.abc import Callable, Iterable
from typing import Any

import array_api_extra as xpx
import numpy as np

from refattn.arrays import device, to_numpy
from refattn.records import AttentionProblem

__all__ = ["Backend"]


class Backend:
    """Operations that the array API standard lacks, on the arrays of one namespace.

    Functions that return an array may reuse the memory of their first argument where their name ends in ``_into`` or
    their docstring says so: always rebind.
    """

    name = "array_api"
    fused = False
    """Whether this backend serves whole problems and must be asked for by name."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    @classmethod
    def usable(cls) -> tuple[bool, str]:
        """Whether this backend runs on this machine, and why not."""
        return True, ""

    @classmethod
    def takes(cls, xp: Any) -> tuple[bool, str]:
        """Whether it works on the arrays of this library, and why not."""
        return True, ""

    def serves(self, problem: AttentionProblem) -> tuple[bool, str]:
        """Whether a fused kernel computes this problem, and why not."""
        return False, f"backend {self.name!r} has no fused kernels"

    # ------------------------------------------------------------------ element-wise and products

    def buffer(self, scratch: dict[str, Any], name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Memory of that name for a result, kept in ``scratch`` until the next use; None where results get memory of their own."""
        return None

    def exp_into(self, x: Any) -> Any:
        """exp(x); may overwrite x."""
        return self.xp.exp(x)

    def tanh_into(self, x: Any) -> Any:
        """tanh(x); may overwrite x."""
        return self.xp.tanh(x)

    def select_into(self, x: Any, visible: Any, fill: float = 0.0) -> Any:
        """x where visible, which broadcasts to it, ``fill`` elsewhere; may overwrite x."""
        return self.xp.where(visible, x, self.xp.full_like(x, fill))

    def erf(self, x: Any) -> Any:
        """Error function of a real array, accurate to its dtype."""
        host = self.to_numpy(x)
        from scipy.special import erf

        return self.xp.asarray(erf(host.astype(np.float64)).astype(host.dtype))

    # ------------------------------------------------------------------ writing

    def assign(self, x: Any, index: Any, values: Any) -> Any:
        """x with x[index] = values; slices only; may overwrite x."""
        return xpx.at(x)[index].set(values)

    def accumulate(self, x: Any, index: Any, values: Any) -> Any:
        """x with x[index] += values; slices only; may overwrite x."""
        return xpx.at(x)[index].add(values)

    def segment_add(self, values: Any, index: Any, size: int) -> Any:
        """Scatter-add along the second last axis: out[..., index[..., n], :] += values[..., n, :].

        ``values`` (..., n, d); ``index`` ints (..., n) or (n,), repeated indices are summed; result (..., size, d).
        """
        host, rows = self.to_numpy(values), np.broadcast_to(self.to_numpy(index), values.shape[:-1])
        out = np.zeros((*values.shape[:-2], size, values.shape[-1]), host.dtype)
        for at in np.ndindex(*values.shape[:-2]):
            np.add.at(out[at], rows[at], host[at])
        return self.xp.asarray(out, device=device(values))

    def summing(self, index: Any, size: int, dtype: Any) -> Callable[[Any], Any]:
        """:meth:`segment_add` for one index (n,), as a function of the values (n, d), to be called several times."""
        return lambda values: self.segment_add(values, index, size)

    def top_k(self, x: Any, count: int) -> Any:
        """Indices of the ``count`` largest real values along the last axis, largest first, ties to the lower index."""
        return self.xp.argsort(x, axis=-1, descending=True, stable=True)[..., :count]

    def largest(self, x: Any, count: int) -> Any:
        """The same indices in rising order."""
        return self.xp.sort(self.top_k(x, count), axis=-1)

    def normal(self, rng: "np.random.Generator", shape: tuple[int, ...], dtype: Any = None) -> Any:
        """Standard normal numbers drawn by NumPy, so that every backend sees the same ones."""
        x = self.xp.asarray(rng.standard_normal(shape))
        return x if dtype is None else self.xp.astype(x, dtype)

    # ------------------------------------------------------------------ moving and waiting

    def to_numpy(self, x: Any) -> np.ndarray:
        """The array on the host."""
        return to_numpy(x)

    def quiet(self) -> Any:
        """Context in which infinities and NaN, which have a meaning here, raise no warnings."""
        return np.errstate(all="ignore")

    def synchronize(self) -> None:
        """Wait until everything asked for is computed."""

    def map(self, function: Callable[[Any], Any], tasks: Iterable[Any], *, work: int = 0) -> list[Any]:
        """Results of independent tasks in their order; ``work`` is a rough count of operations in all."""
        return [function(task) for task in tasks]
