"""Numba on the CPU: a fused forward for softmax attention whose rows see runs of keys.

One pass over a tile subtracts the maximum, takes exp and sums, with an exp that the compiler vectorises; products go to
BLAS.  Tiles run on the thread pool of the numpy backend, which serves everything else.
"""

import functools
import math
from typing import Any

import numpy as np

from refattn.backends.numpy import NumpyBackend, blas_threads
from refattn.records import AttentionProblem

__all__ = ["NumbaBackend"]

ROWS, KEYS = 64, 512


class NumbaBackend(NumpyBackend):
    """NumPy arrays; the forward of plain, causal, windowed and padded attention in fused tiles."""

    name = "numba"
    fused = True

    def serves(self, problem: AttentionProblem) -> tuple[bool, str]:
        """float32 and float64, no score terms, no dropout, and every row's keys one run."""
        return served(problem)

    def forward(self, problem: AttentionProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Output (b,g,r,q,e), maximum and row sum (b,g,r,q) over the keys, sinks not yet counted."""
        b, g, r, q, d = problem.q.shape
        k, e = problem.v.shape[-2:]
        output = np.zeros((b, g, r, q, e), problem.q.dtype)
        maximum, row_sum = np.full((b, g, r, q), -math.inf, problem.q.dtype), np.zeros((b, g, r, q), problem.q.dtype)
        if not (k and output.size + maximum.size):
            return output, maximum, row_sum
        first, last = row_runs(problem)
        tile = _kernels()[problem.q.dtype.name]
        order = [(n, m, s, i) for n in range(b) for m in range(g) for s in range(r) for i in range(0, q, ROWS)]

        def run(place: tuple[int, int, int, int]) -> None:
            n, m, s, i = place
            rows = slice(i, min(i + ROWS, q))
            keys = min(n, problem.k.shape[0] - 1), m
            tile(
                np.ascontiguousarray(problem.q[n, m, s, rows]) * problem.q.dtype.type(problem.scale),
                np.ascontiguousarray(problem.k[keys]),
                np.ascontiguousarray(problem.v[min(n, problem.v.shape[0] - 1), m]),
                np.ascontiguousarray(first[n, m, s, rows]),
                np.ascontiguousarray(last[n, m, s, rows]),
                output[n, m, s, rows],
                maximum[n, m, s, rows],
                row_sum[n, m, s, rows],
            )

        self.map(run, order, work=b * g * r * q * k * (d + e))
        return output, maximum, row_sum


def served(problem: AttentionProblem) -> tuple[bool, str]:
    """Whether a kernel that walks runs of keys computes this problem, and why not."""
    if problem.q.dtype not in (np.float32, np.float64):
        return False, f"it computes in float32 and float64, not {problem.q.dtype}"
    if problem.terms:
        return False, f"it has no score terms ({', '.join(type(t).__name__ for t in problem.terms)})"
    if problem.dropout is not None:
        return False, "it has no dropout"
    if problem.blocks is not None:
        return False, "it has no gathered blocks"
    if problem.visibility is not None and _interval(problem) is None:
        return False, f"the keys that a row sees are no single run under {problem.visibility!r}"
    return True, ""


def row_runs(problem: AttentionProblem) -> tuple[np.ndarray, np.ndarray]:
    """First and one past the last visible key of every row, host ints (b, g, r, q)."""
    b, g, r, q, _ = problem.q.shape
    k = problem.k.shape[-2]
    found = (np.zeros(1, np.int64), np.full(1, k)) if problem.visibility is None else _interval(problem)
    order = np.asarray(problem.heads).reshape(-1)
    ends = []
    for x in found or ():
        x = np.broadcast_to(np.clip(x, 0, k), (b, g * r, q))
        ends.append(x[:, order, :].reshape(b, g, r, q))
    return ends[0], ends[1]


def _interval(problem: AttentionProblem) -> tuple[Any, Any] | None:
    b, g, r, q, _ = problem.q.shape
    place = {"b": np.arange(b)[:, None, None], "h": np.arange(g * r)[:, None]}
    return problem.visibility.interval(np.arange(q), q=q, k=problem.k.shape[-2], **place)


@functools.cache
def _kernels() -> dict[str, Any]:
    """The tile kernel of each dtype, compiled on first use: importing refattn does not import numba."""
    import numba
    from scipy.linalg import cython_blas  # noqa: F401 - the BLAS of compiled products, to be held to one thread as NumPy's is

    blas_threads.cache_clear()
    jit = functools.partial(numba.njit, nogil=True, error_model="numpy")

    # exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln(2) / 2, exp(r) by its Taylor polynomial.  n comes out of the low bits
    # of x / ln 2 + 1.5 * 2^52 (2^23), so the loop holds no conversion that would stop the compiler from vectorising it.
    # "contract" alone: reassociation would cancel that sum.
    @jit(fastmath={"contract"})
    def exp_64(x, shift, bits, powers):
        for j in range(x.size):
            y = max(x[j] - shift, -708.0)
            magic = y * 1.4426950408889634 + 6755399441055744.0
            powers[j] = magic
            n = magic - 6755399441055744.0
            r = (y - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10
            p = 1 / 479001600.0
            for c in (39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0):
                p = p * r + 1 / c
            x[j] = p if x[j] - shift >= -708.0 else 0.0
        for j in range(x.size):
            bits[j] = (bits[j] << 52) + (1023 << 52)
        for j in range(x.size):
            x[j] *= powers[j]

    @jit(fastmath={"contract"})
    def exp_32(x, shift, bits, powers):
        f = np.float32
        for j in range(x.size):
            y = max(x[j] - shift, f(-87.0))
            magic = y * f(1.44269504) + f(12582912.0)
            powers[j] = magic
            n = magic - f(12582912.0)
            r = (y - n * f(0.693359375)) - n * f(-2.12194440e-4)
            p = f(1 / 5040.0)
            for c in (720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0):
                p = p * r + f(1 / c)
            x[j] = p if x[j] - shift >= f(-87.0) else f(0.0)
        for j in range(x.size):
            bits[j] = np.int32(bits[j] << np.int32(23)) + np.int32(127 << 23)
        for j in range(x.size):
            x[j] *= powers[j]

    @jit(fastmath={"reassoc"})
    def total_of(x):
        total = x.dtype.type(0)
        for j in range(x.size):
            total += x[j]
        return total

    @jit(fastmath={"nnan", "nsz"})
    def highest(x):
        top = x[0]
        for j in range(x.size):
            top = max(top, x[j])
        return top

    @jit
    def has_nan(x):
        odd = 0
        for j in range(x.size):
            odd |= int(x[j] != x[j])
        return odd != 0

    def kernel(exp: Any, integer: Any) -> Any:
        @jit
        def tile(q, k, v, first, last, output, maximum, total):
            number = q.dtype.type
            rows, keys, channels = q.shape[0], min(KEYS, k.shape[0]), output.shape[1]
            buffer = np.empty(rows * keys, q.dtype)
            bits = np.empty(keys, integer)
            powers = bits.view(q.dtype)
            for j0 in range(first.min() // keys * keys, last.max(), keys):
                width = min(keys, k.shape[0] - j0)
                s = buffer[: rows * width].reshape(rows, width)
                np.dot(q, k[j0 : j0 + width].T, s)
                whole = True
                for i in range(rows):
                    a, b = max(first[i] - j0, 0), min(last[i] - j0, width)
                    whole = whole and a == 0 and b == width
                    if a >= b:
                        s[i] = 0
                        continue
                    s[i, :a] = 0
                    s[i, b:] = 0
                    top = max(maximum[i], highest(s[i, a:b]))
                    if maximum[i] != maximum[i] or has_nan(s[i, a:b]):
                        top = number(np.nan)
                    shift = number(0) if top == -np.inf else top
                    factor = np.exp(maximum[i] - shift)
                    exp(s[i, a:b], shift, bits, powers)
                    total[i] = total[i] * factor + total_of(s[i, a:b])
                    maximum[i] = top
                    for c in range(channels):
                        output[i, c] *= factor
                values = v[j0 : j0 + width]
                if whole or np.isfinite(values).all():
                    output += np.dot(s, values)
                else:  # a NaN behind the edge of a row's run must not meet its zero weight
                    for i in range(rows):
                        a, b = max(first[i] - j0, 0), min(last[i] - j0, width)
                        for j in range(a, b):
                            for c in range(channels):
                                output[i, c] += s[i, j] * values[j, c]
            for i in range(rows):
                if maximum[i] == -np.inf:
                    output[i] = 0
                else:
                    for c in range(channels):
                        output[i, c] /= total[i]

        return tile

    return {"float64": kernel(exp_64, np.int64), "float32": kernel(exp_32, np.int32)}
