"""Numba-CUDA: one small fused forward kernel on CuPy arrays; on NumPy arrays under Numba's simulator.

A thread owns one query row and walks the keys in tiles that its block of threads brings into shared memory, with an
online softmax in registers and local memory.  ``NUMBA_ENABLE_CUDASIM=1``, set before numba is imported, runs the same
kernel without a GPU.
"""

import importlib.util
import math
import os
from typing import Any

import numpy as np

from refattn.backends.cupy import CupyBackend
from refattn.backends.numba import row_runs, served
from refattn.backends.numpy import NumpyBackend
from refattn.records import AttentionProblem

__all__ = ["NumbaCudaBackend"]

CHANNELS = 128
"""Most channels of queries and keys, and of values, that fit a thread's local memory."""


def _simulated() -> bool:
    return os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


class NumbaCudaBackend(NumpyBackend if _simulated() else CupyBackend):  # type: ignore[misc]
    """The forward of plain, causal, windowed and padded attention in one kernel; everything else as CuPy does it."""

    name = "numba_cuda"
    fused = True

    @classmethod
    def usable(cls) -> tuple[bool, str]:
        if not _simulated():
            if importlib.util.find_spec("cupy") is None:
                return False, "cupy is not installed (pip install refattn[cuda12]), and NUMBA_ENABLE_CUDASIM is not 1"
            ok, reason = super().usable()
            if not ok:
                return ok, reason
        from numba import cuda

        return (True, "") if cuda.is_available() else (False, "numba finds no CUDA device")

    def serves(self, problem: AttentionProblem) -> tuple[bool, str]:
        """What ``numba`` serves, up to 128 channels."""
        ok, reason = served(problem)
        widest = max(problem.q.shape[-1], problem.v.shape[-1])
        if ok and widest > CHANNELS:
            return False, f"its threads hold {CHANNELS} channels, not {widest}"
        return ok, reason

    def forward(self, problem: AttentionProblem) -> tuple[Any, Any, Any]:
        """Output (b,g,r,q,e), maximum and row sum (b,g,r,q) over the keys, sinks not yet counted."""
        xp = self.xp
        b, g, r, q, d = problem.q.shape
        k, e = problem.v.shape[-2:]
        output = xp.zeros((b, g, r, q, e), dtype=problem.q.dtype)
        maximum = xp.full((b, g, r, q), -math.inf, dtype=problem.q.dtype)
        row_sum = xp.zeros((b, g, r, q), dtype=problem.q.dtype)
        if not (k and q and b * g * r):
            return output, maximum, row_sum
        first, last = row_runs(problem)
        units = b * g * r
        rows = xp.ascontiguousarray(xp.reshape(problem.q, (units, q, d)) * problem.q.dtype.type(problem.scale))
        keys = xp.ascontiguousarray(xp.broadcast_to(problem.k, (b, g, k, d)).reshape(b * g, k, d))
        values = xp.ascontiguousarray(xp.broadcast_to(problem.v, (b, g, k, e)).reshape(b * g, k, e))
        runs = [xp.asarray(np.ascontiguousarray(x.reshape(units, q)).astype(np.int32)) for x in (first, last)]
        results = (output.reshape(units, q, e), maximum.reshape(units, q), row_sum.reshape(units, q))
        from refattn.backends.numba_cuda_kernel import launch  # imports numba.cuda

        launch(rows, keys, values, runs[0], runs[1], r, *results)
        return output, maximum, row_sum
