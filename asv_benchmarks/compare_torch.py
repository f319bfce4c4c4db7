"""refattn beside torch on the CPU, both with the same number of threads: one table of medians of alternating runs.

usage: python asv_benchmarks/compare_torch.py [--quick] [--threads 2]

Rows: (1, 8, length, 64) for lengths 2048 and 4096, float64 and float32, forward (on the numpy backend, and fused on
numba) and forward + backward; then refattn's
full attention beside its causal one at length 8192. Each pair is measured back to back, so that a slow moment of the
machine hits both.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

HEADS, CHANNELS = 8, 64


def alternate(first: Callable[[], object], second: Callable[[], object], pairs: int) -> tuple[float, float, float]:
    """Median seconds of each, and the median of the ratios first / second within a pair; one warm-up run each."""
    times = []
    for pair in range(-1, pairs):
        both = []
        for call in (first, second):
            start = time.perf_counter()
            call()
            both.append(time.perf_counter() - start)
        if pair >= 0:
            times.append(both)
    ours, theirs = zip(*times, strict=True)
    return statistics.median(ours), statistics.median(theirs), statistics.median(a / b for a, b in times)


def heading(first: str, second: str) -> None:
    print(f"{'shape':<20}{'dtype':<10}{'direction':<20}{first:>11}{second:>11}{'ratio':>8}")


def row(length: int, dtype: str, direction: str, measured: tuple[float, float, float]) -> None:
    first, second, ratio = measured
    shape = f"(1, {HEADS}, {length}, {CHANNELS})"
    print(
        f"{shape:<20}{dtype:<10}{direction:<20}{first * 1e3:>8.1f} ms{second * 1e3:>8.1f} ms{ratio:>8.2f}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="length 1024 only (causal: 2048), 3 pairs instead of 9")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    for variable in ("REFATTN_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(given.threads)  # before numpy and torch are imported

    import numpy as np
    import torch

    import refattn as ra

    torch.set_num_threads(given.threads)
    attention, torch_attention = ra.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention
    rng = np.random.default_rng(0)

    def draw(length: int, dtype: str) -> list[np.ndarray]:
        """q, k, v and a cotangent of the output."""
        return [rng.standard_normal((1, HEADS, length, CHANNELS)).astype(dtype) for _ in range(4)]

    def both_ways(q: np.ndarray, k: np.ndarray, v: np.ndarray, d_output: np.ndarray) -> None:
        _, pullback = attention.vjp(q, k, v)
        pullback(d_output)

    def torch_both_ways(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_output: torch.Tensor) -> None:
        torch.autograd.grad(torch_attention(q, k, v), (q, k, v), d_output)

    pairs, lengths, causal_length = (3, [1024], 2048) if given.quick else (7, [2048, 4096], 8192)
    print(f"refattn {ra.__version__}, numpy {np.__version__}, torch {torch.__version__}")
    print(f"{given.threads} threads each, medians of {pairs} alternating pairs, ratio = first / second")
    heading("refattn", "torch")
    for length in lengths:
        for dtype in ("float64", "float32"):
            arrays = draw(length, dtype)
            tensors = [torch.from_numpy(x.copy()) for x in arrays]
            theirs = partial(torch_attention, *tensors[:3])
            row(length, dtype, "forward", alternate(partial(attention, *arrays[:3]), theirs, pairs))
            fused = partial(attention, *arrays[:3], backend="numba")
            row(length, dtype, "forward, numba", alternate(fused, theirs, pairs))
            for tensor in tensors[:3]:
                tensor.requires_grad_()
            measured = alternate(partial(both_ways, *arrays), partial(torch_both_ways, *tensors), pairs)
            row(length, dtype, "forward + backward", measured)

    print()
    heading("full", "causal")
    for dtype in ("float64", "float32"):
        full = partial(attention, *draw(causal_length, dtype)[:3])
        row(causal_length, dtype, "forward", alternate(full, partial(full, causal=True), max(3, pairs // 3)))


if __name__ == "__main__":
    main()
