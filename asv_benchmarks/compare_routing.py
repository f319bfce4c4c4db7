"""refattn's routing attention beside routing-transformer's on the CPU, and how its time grows.

usage: python asv_benchmarks/compare_routing.py [--lengths 4096 16384] [--pairs 5] [--threads 2] [--growth]

8 heads, d = 64, float32, sqrt(length) clusters of sqrt(length) tokens, causal, queries as keys, forward + backward; the
peer's semantics on both sides and the same centroids. Every pair is measured back to back, wall time and the processor
time of the process; medians. --growth: refattn alone at 1024 ... 16384, and the slope of log(time) over log(length).
The comparison needs routing-transformer and torch, which refattn does not install: pip install --no-deps
routing-transformer local-attention product-key-memory mixture-of-experts colt5-attention axial-positional-embedding einops
"""

import argparse
import math
import os
import statistics
import time
from typing import Any

HEADS, CHANNELS = 8, 64


def clocks(call: Any) -> tuple[float, float]:
    """Wall and processor seconds of one call."""
    wall, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--growth", action="store_true")
    given = parser.parse_args()
    for variable in ("REFATTN_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(given.threads)  # before numpy and torch are imported

    import numpy as np

    import refattn as ra

    rng = np.random.default_rng(0)
    print(f"refattn {ra.__version__}, numpy {np.__version__}; {given.threads} threads")

    def draw(length: int) -> tuple[list[np.ndarray], np.ndarray]:
        arrays = [rng.standard_normal((1, HEADS, length, CHANNELS)).astype(np.float32) for _ in range(3)]
        return arrays, rng.standard_normal((HEADS, math.isqrt(length), CHANNELS)).astype(np.float32)

    def ours(arrays: list[np.ndarray], centroids: np.ndarray) -> np.ndarray:
        q, v, d_output = arrays
        result, pullback = ra.routing_attention.vjp(
            q,
            None,
            v,
            centroids=centroids,
            cluster_size=centroids.shape[1],
            normalize=None,
            cluster_normalize="l2",
            key_norm="l2",
            causal=True,
            self_attention="last_resort",
            average_eps=1e-5,
        )
        pullback(d_output)
        return result.output

    if given.growth:
        lengths, best = [1024, 2048, 4096, 8192, 16384], []
        for length in lengths:
            arrays, centroids = draw(length)
            best.append(min(clocks(lambda a=arrays, c=centroids: ours(a, c))[0] for _ in range(given.pairs)))
            print(f"{length:>7}{best[-1] * 1e3:>10.1f} ms")
        line = statistics.linear_regression([math.log(n) for n in lengths], [math.log(x) for x in best])
        print(f"exponent {line.slope:.2f}")
        return

    import torch
    from routing_transformer.routing_transformer import KmeansAttention

    torch.set_num_threads(given.threads)
    print(f"torch {torch.__version__}")
    print(f"{'length':>7}{'peer':>11}{'refattn':>11}{'ratio':>7}{'cpu ratio':>11}{'largest difference':>20}")
    for length in given.lengths:
        arrays, centroids = draw(length)
        clusters = centroids.shape[1]
        theirs = KmeansAttention(
            num_clusters=clusters, window_size=clusters, num_heads=HEADS, head_dim=CHANNELS, causal=True, shared_qk=True
        ).eval()
        theirs.kmeans.means.data = torch.from_numpy(centroids)
        theirs.kmeans.initted.fill_(True)
        q, v, d_output = map(torch.from_numpy, arrays)
        found = {}

        def peer(theirs=theirs, q=q, v=v, d_output=d_output, found=found) -> None:
            q, v = (x.clone().requires_grad_() for x in (q, v))
            output, _ = theirs(q, q, v)
            output.backward(d_output)
            found["peer"] = output.detach().numpy()

        def mine(arrays=arrays, centroids=centroids, found=found) -> None:
            found["refattn"] = ours(arrays, centroids)

        rows = [(*clocks(peer), *clocks(mine)) for _ in range(given.pairs + 1)][1:]
        first, second = (statistics.median(row[n] for row in rows) for n in (0, 2))
        wall, used = (statistics.median(row[n + 2] / row[n] for row in rows) for n in (0, 1))
        difference = float(np.max(np.abs(found["peer"] - found["refattn"])))
        print(
            f"{length:>7}{first * 1e3:>8.1f} ms{second * 1e3:>8.1f} ms{wall:>7.2f}{used:>11.2f}{difference:>20.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
