"""NumPy on the CPU: BLAS products, in-place element-wise work, a thread pool over independent blocks."""

import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np

from refattn.backends.base import Backend

__all__ = ["NumpyBackend", "blas_threads", "threads", "use_executor"]

SERIAL_WORK = 1 << 22
"""Below this many operations a pool costs more than it gives."""

_BITS = {"e": np.int16, "f": np.int32, "d": np.int64}

_local = threading.local()
_chosen: list[Executor] = []
_limit = [threading.Lock()]  # held while BLAS is; replaced in the child of a fork


def threads() -> int:
    """Threads of the pool: ``REFATTN_THREADS``, else the processors that this process may use."""
    named = os.environ.get("REFATTN_THREADS")
    if named:
        if not named.isdecimal() or int(named) < 1:
            raise ValueError(f"REFATTN_THREADS is {named!r}: expected a whole number of at least 1")
        return int(named)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _pool(size: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(size, thread_name_prefix="refattn")


@functools.cache
def blas_threads() -> Any:
    """Controller of the BLAS libraries loaded so far."""
    from threadpoolctl import ThreadpoolController  # 5 ms to build: once

    return ThreadpoolController()


@contextlib.contextmanager
def use_executor(executor: Executor) -> Iterator[None]:
    """Run blocks on another ``concurrent.futures`` executor that shares this process's memory."""
    _chosen.append(executor)
    try:
        yield
    finally:
        _chosen.remove(executor)


class NumpyBackend(Backend):
    """Operations on ``numpy.ndarray``."""

    name = "numpy"

    @classmethod
    def takes(cls, xp: Any) -> tuple[bool, str]:
        return xp is np, f"they belong to {xp.__name__}, not to NumPy"

    def buffer(self, scratch: dict[str, Any], name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """New memory for every tile costs as much in page faults as the product itself: tiles reuse their buffers."""
        size = math.prod(shape)
        memory = scratch.get(name)
        if memory is None or memory.size < size or memory.dtype != dtype:
            memory = scratch[name] = np.empty(size, dtype)
        return memory[:size].reshape(shape)

    def exp_into(self, x: Any) -> Any:
        return np.exp(x, out=x)

    def tanh_into(self, x: Any) -> Any:
        return np.tanh(x, out=x)

    def select_into(self, x: Any, visible: Any, fill: float = 0.0) -> Any:
        """By bits: ``np.where`` branches on every element, four to ten times as slow where the mask has no pattern."""
        kind = _BITS.get(x.dtype.char)
        if kind is None or not x.flags.writeable:
            return np.where(visible, x, x.dtype.type(fill))
        bits = x.view(kind)
        mask = visible.astype(kind)
        np.negative(mask, out=mask)  # all bits where visible
        bits &= mask
        if fill:
            np.invert(mask, out=mask)
            mask &= np.asarray(fill, x.dtype).view(kind)
            bits |= mask
        return x

    def erf(self, x: Any) -> Any:
        from scipy.special import erf

        return erf(x)

    def assign(self, x: Any, index: Any, values: Any) -> Any:
        x[index] = values
        return x

    def accumulate(self, x: Any, index: Any, values: Any) -> Any:
        x[index] += values
        return x

    def segment_add(self, values: Any, index: Any, size: int) -> Any:
        """A product with a 0/1 matrix in CSR form: about ten times faster than ``np.add.at``."""
        from scipy.sparse import csr_array

        lead, (n, d) = values.shape[:-2], values.shape[-2:]
        batch = int(np.prod(lead))
        if not values.size or not np.issubdtype(values.dtype, np.inexact) or values.dtype.itemsize > 16:
            out = np.zeros((*lead, size, d), values.dtype)
            for at in np.ndindex(*lead):
                np.add.at(out[at], np.broadcast_to(index, (*lead, n))[at], values[at])
            return out
        index = np.asarray(index)
        if index.ndim == 1:  # one pattern for all: the batch becomes columns
            matrix = csr_array((np.ones(n, values.dtype), index, np.arange(n + 1)), shape=(n, size))
            flat = np.moveaxis(values.reshape(batch, n, d), 1, 0).reshape(n, batch * d)
            return np.ascontiguousarray(np.moveaxis((matrix.T @ flat).reshape(size, batch, d), 1, 0)).reshape(
                *lead, size, d
            )
        rows = np.broadcast_to(index, (*lead, n)).reshape(batch, n) + np.arange(batch)[:, None] * size
        matrix = csr_array(
            (np.ones(batch * n, values.dtype), rows.reshape(-1), np.arange(batch * n + 1)),
            shape=(batch * n, batch * size),
        )
        return (matrix.T @ values.reshape(batch * n, d)).reshape(*lead, size, d)

    def summing(self, index: Any, size: int, dtype: Any) -> Callable[[Any], Any]:
        """The 0/1 matrix is built once."""
        from scipy.sparse import csr_array

        n = len(index)
        if not np.issubdtype(dtype, np.inexact) or np.dtype(dtype).itemsize > 16:
            return lambda values: self.segment_add(values, index, size)
        matrix = csr_array((np.ones(n, dtype), index, np.arange(n + 1)), shape=(n, size)).T
        return lambda values: matrix @ values

    def top_k(self, x: Any, count: int) -> Any:
        """By partition; a full stable sort only where the threshold value repeats across the cut."""
        n = x.shape[-1]
        if count >= n or count == 0 or np.iscomplexobj(x):
            return np.argsort(-np.real(x), axis=-1, stable=True)[..., :count]
        chosen = np.sort(np.argpartition(-x, count - 1, axis=-1)[..., :count], axis=-1)
        values = np.take_along_axis(x, chosen, -1)
        threshold = values.min(-1, keepdims=True)
        tied = ((x >= threshold).sum(-1) != count) | np.isnan(threshold[..., 0])
        order = np.argsort(-values, axis=-1, stable=True)
        chosen = np.take_along_axis(chosen, order, -1)
        if tied.any():
            chosen[tied] = np.argsort(-x[tied], axis=-1, stable=True)[..., :count]
        return chosen

    def largest(self, x: Any, count: int) -> Any:
        """By the value at the cut, which the sort of the whole row is not needed for; a stable sort where it repeats."""
        n = x.shape[-1]
        if not 0 < count < n or np.iscomplexobj(x):
            return np.sort(self.top_k(x, count), axis=-1)
        rows = x.reshape(-1, n)
        chosen = rows >= np.partition(rows, n - count, axis=-1)[:, n - count, None]
        unclear = np.flatnonzero(np.count_nonzero(chosen, axis=-1) != count)  # ties across the cut, or NaN
        if unclear.size:
            first = np.argsort(-rows[unclear], axis=-1, stable=True)[:, :count]
            chosen[unclear] = False
            chosen[unclear[:, None], first] = True
        found = np.flatnonzero(chosen).reshape(-1, count) - np.arange(len(rows))[:, None] * n
        return found.reshape(*x.shape[:-1], count)

    def map(self, function: Callable[[Any], Any], tasks: Iterable[Any], *, work: int = 0) -> list[Any]:
        """On the pool; nested calls and small work run where they are.

        BLAS is held to one thread meanwhile, even where the pool has one: the same numbers with any number of threads.
        """
        tasks = list(tasks)
        if len(tasks) < 2 or work < SERIAL_WORK or getattr(_local, "inside", False):
            return [function(task) for task in tasks]

        def run(task: Any) -> Any:
            _local.inside = True
            try:
                return function(task)
            finally:
                _local.inside = False

        size = threads()
        with _limit[0], blas_threads().limit(limits=1, user_api="blas"):
            if size < 2:
                return [run(task) for task in tasks]
            return list((_chosen[-1] if _chosen else _pool(size)).map(run, tasks))


def _start_afresh() -> None:
    """In the child of a fork: the pools' threads stayed with the parent, and a lock may be held by one of them."""
    _pool.cache_clear()
    _limit[0] = threading.Lock()
    _local.__dict__.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
