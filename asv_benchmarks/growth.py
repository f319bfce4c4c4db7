"""How time and memory of sparse and local attention grow with the length, forward + backward, and how far from dense.

usage: python asv_benchmarks/growth.py [--quick] [--threads 1] [--repeats 3]

Strided and fixed (one summary column) at stride sqrt(length), merged heads, and local attention of a fixed window; one
head of 64 channels, float32. The exponent is the slope of a straight line through log(time) over log(length), times being
the least of the repeats. Memory is what NumPy holds at its peak during a call, beyond what it held before, inputs not
counted (tracemalloc), per position. Last, sparse beside dense causal attention at one length.
"""

import argparse
import math
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

CHANNELS = 64


def seconds(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_bytes(call: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def slope(lengths: list[int], values: list[float]) -> float:
    """Of the straight line through the logarithms."""
    return statistics.linear_regression([math.log(n) for n in lengths], [math.log(x) for x in values]).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="lengths 1024 ... 4096, dense at 4096")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    for variable in ("REFATTN_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(given.threads)  # before numpy is imported

    import numpy as np

    import refattn as ra

    rng = np.random.default_rng(0)
    sparse, local = ra.sparse_transformer_attention, ra.local_attention

    def both_ways(mechanism: Any, length: int, **options: Any) -> Callable[[], Any]:
        q, k, v, d_output = (rng.standard_normal((1, 1, length, CHANNELS)).astype(np.float32) for _ in range(4))

        def call() -> Any:
            _, pullback = mechanism.vjp(q, k, v, **options)
            return pullback(d_output)

        return call

    mechanisms: dict[str, Callable[[int], tuple[Any, dict[str, Any]]]] = {
        "strided": lambda n: (sparse, {"stride": math.isqrt(n), "heads": "merged"}),
        "fixed": lambda n: (sparse, {"stride": math.isqrt(n), "heads": "merged", "pattern": "fixed", "summary": 1}),
        "local, distances": lambda n: (local, {"block": 128, "exact": True, "causal": True}),
        "local, blocks": lambda n: (local, {"block": 128, "causal": True}),
    }
    lengths = [1024, 2048, 4096] if given.quick else [4096, 8192, 16384, 32768, 65536]
    print(f"refattn {ra.__version__}, numpy {np.__version__}, {given.threads} threads, least of {given.repeats}")
    print(f"{'':<18}{'length':>8}{'pairs':>12}{'computed':>10}{'seconds':>10}{'MiB':>8}{'bytes/position':>16}")
    for name, settings in mechanisms.items():
        times, peaks = [], []
        for n in lengths:
            mechanism, options = settings(n)
            call = both_ways(mechanism, n, **options)
            call()
            times.append(seconds(call, given.repeats))
            peaks.append(peak_bytes(call))
            counted = mechanism.cost(t=n, d=1, e=0, **options)
            share = counted.computed_multiplies / counted.multiplies
            print(
                f"{name:<18}{n:>8}{counted.multiplies:>12}{share:>9.2f}x{times[-1]:>10.3f}{peaks[-1] / 2**20:>8.1f}"
                f"{peaks[-1] / n:>16.0f}",
                flush=True,
            )
        print(f"{name:<18}exponent of time {slope(lengths, times):.2f}, of memory {slope(lengths, peaks):.2f}\n")

    n = 4096 if given.quick else 16384
    dense = seconds(both_ways(ra.scaled_dot_product_attention, n, causal=True), given.repeats)
    print(f"length {n}, forward + backward: dense causal {dense:.2f} s")
    for name in ("strided", "fixed"):
        mechanism, options = mechanisms[name](n)
        call = both_ways(mechanism, n, **options)
        call()
        took = seconds(call, given.repeats)
        print(f"{name:<18}{took:.3f} s: {dense / took:.1f} times faster")


if __name__ == "__main__":
    main()
