"""The kernel of the numba_cuda backend; a module of its own because the simulator replaces the module's ``cuda``."""

import functools
import math
from typing import Any

import numpy as np
from numba import cuda, float32, float64

from refattn.backends.numba_cuda import CHANNELS

__all__ = ["launch"]

ROWS = 32
"""Query rows, and keys brought in at a time, of a block of threads."""


def launch(q: Any, k: Any, v: Any, first: Any, last: Any, r: int, output: Any, maximum: Any, row_sum: Any) -> None:
    """Fill ``output`` (units, q, e), ``maximum`` and ``row_sum`` (units, q) from q (units, q, d), k and v (units / r, k, .)."""
    units, count = q.shape[:2]
    kernel = _kernel(q.dtype.name)[(-(-count // ROWS), units), ROWS]
    if isinstance(q, np.ndarray):  # the simulator: its own arrays, so that nothing is copied back into the inputs
        held = [cuda.to_device(x) for x in (q, k, v, first, last)]
        results = [cuda.to_device(x) for x in (output, maximum, row_sum)]
        kernel(*held, r, *results)
        for x, result in zip((output, maximum, row_sum), results, strict=True):
            x[...] = result.copy_to_host()
    else:
        kernel(q, k, v, first, last, r, output, maximum, row_sum)


@functools.cache
def _kernel(dtype: str) -> Any:
    """The kernel for one dtype, compiled on first use."""
    number = {"float32": float32, "float64": float64}[dtype]

    @cuda.jit
    def attend_rows(q, k, v, first, last, r, output, maxima, sums):
        key_tile = cuda.shared.array((ROWS, CHANNELS), number)
        value_tile = cuda.shared.array((ROWS, CHANNELS), number)
        row = cuda.local.array(CHANNELS, number)
        weighted = cuda.local.array(CHANNELS, number)
        unit, thread = cuda.blockIdx.y, cuda.threadIdx.x
        i = cuda.blockIdx.x * ROWS + thread
        group = unit // r
        real = i < q.shape[1]
        start, stop = (first[unit, i], last[unit, i]) if real else (0, 0)
        for c in range(q.shape[2]):
            row[c] = q[unit, i, c] if real else 0
        for c in range(v.shape[2]):
            weighted[c] = 0
        maximum, total = number(-math.inf), number(0)
        for j0 in range(0, k.shape[1], ROWS):
            j = j0 + thread
            if j < k.shape[1]:
                for c in range(q.shape[2]):
                    key_tile[thread, c] = k[group, j, c]
                for c in range(v.shape[2]):
                    value_tile[thread, c] = v[group, j, c]
            cuda.syncthreads()
            for n in range(max(start - j0, 0), min(stop - j0, ROWS)):
                logit = number(0)
                for c in range(q.shape[2]):
                    logit += row[c] * key_tile[n, c]
                top = logit if logit > maximum or logit != logit else maximum
                shift = top if top != -math.inf else number(0)
                factor, weight = number(math.exp(maximum - shift)), number(math.exp(logit - shift))
                total = total * factor + weight
                for c in range(v.shape[2]):
                    weighted[c] = weighted[c] * factor + weight * value_tile[n, c]
                maximum = top
            cuda.syncthreads()
        if real and maximum != -math.inf:
            for c in range(v.shape[2]):
                output[unit, i, c] = weighted[c] / total
            maxima[unit, i] = maximum
            sums[unit, i] = total

    return attend_rows
