"""CuPy: the array API on a CUDA device."""

import importlib.util
from typing import Any

import array_api_compat
import numpy as np

from refattn.backends.base import Backend

__all__ = ["CupyBackend"]


class CupyBackend(Backend):
    """Operations on ``cupy.ndarray``; scatter-add by atomics, so its gradients are not bitwise reproducible."""

    name = "cupy"

    @classmethod
    def takes(cls, xp: Any) -> tuple[bool, str]:
        return array_api_compat.is_cupy_namespace(xp), f"they belong to {xp.__name__}, not to CuPy"

    @classmethod
    def usable(cls) -> tuple[bool, str]:
        if importlib.util.find_spec("cupy") is None:
            return False, "cupy is not installed (pip install refattn[cuda12])"
        import cupy

        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            return False, f"no CUDA device: {error}"
        return count > 0, "" if count else "no CUDA device"

    def exp_into(self, x: Any) -> Any:
        return self.xp.exp(x, out=x)

    def tanh_into(self, x: Any) -> Any:
        return self.xp.tanh(x, out=x)

    def erf(self, x: Any) -> Any:
        from cupyx.scipy.special import erf

        return erf(x)

    def assign(self, x: Any, index: Any, values: Any) -> Any:
        x[index] = values
        return x

    def accumulate(self, x: Any, index: Any, values: Any) -> Any:
        x[index] += values
        return x

    def segment_add(self, values: Any, index: Any, size: int) -> Any:
        import cupy

        lead, (n, d) = values.shape[:-2], values.shape[-2:]
        batch = int(np.prod(lead))
        rows = cupy.broadcast_to(index, (*lead, n)).reshape(batch, n) + cupy.arange(batch)[:, None] * size
        out = cupy.zeros((batch * size, d), values.dtype)
        cupy.add.at(out, rows.reshape(-1), values.reshape(batch * n, d))
        return out.reshape(*lead, size, d)

    def synchronize(self) -> None:
        import cupy

        cupy.cuda.get_current_stream().synchronize()
