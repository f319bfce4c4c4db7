"""refattn's LSH attention beside reformer-pytorch's on the CPU: one table of medians of alternating pairs.

usage: python asv_benchmarks/compare_reformer.py [--lengths 4096 16384] [--pairs 3] [--threads 2]

8 heads, d = 64, float32, 4 rounds, chunk 64, causal, forward + backward. First with the peer's semantics (every meeting
counts, windows run on around the ends, keys of other buckets seen), both with the same rotations and so the same buckets;
beside it refattn's own default (a pair counts once, within the bucket). Needs reformer-pytorch and torch, which refattn
does not install: pip install --no-deps reformer-pytorch local-attention axial-positional-embedding product-key-memory
colt5-attention einops
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

HEADS, CHANNELS, ROUNDS, CHUNK = 8, 64, 4, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    for variable in ("REFATTN_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(given.threads)  # before numpy and torch are imported

    import numpy as np
    import torch
    from reformer_pytorch import LSHAttention

    import refattn as ra

    torch.set_num_threads(given.threads)
    rng = np.random.default_rng(0)
    print(f"refattn {ra.__version__}, numpy {np.__version__}, torch {torch.__version__}; {given.threads} threads each")
    print(f"{'length':>7}{'peer':>9}{'refattn':>9}{'ratio':>7}{'default':>10}{'ratio':>7}{'largest difference':>20}")
    for length in given.lengths:
        buckets = length // CHUNK
        qk, v, d_output = (rng.standard_normal((HEADS, length, CHANNELS)).astype(np.float32) for _ in range(3))
        rotations = rng.standard_normal((CHANNELS, ROUNDS, buckets // 2)).astype(np.float32)
        theirs = LSHAttention(bucket_size=CHUNK, n_hashes=ROUNDS, causal=True).eval()
        drawn, randn = torch.from_numpy(rotations)[None], torch.randn
        tensors = [torch.from_numpy(x.copy()).requires_grad_() for x in (qk, v)]
        found = {}

        def peer(tensors=tensors, theirs=theirs, d_output=d_output, drawn=drawn, randn=randn, found=found) -> None:
            torch.randn = lambda *a, **k: drawn.expand(*a[0])  # the peer draws its rotations anew in every call
            try:
                output, *_ = theirs(*tensors)
            finally:
                torch.randn = randn
            torch.autograd.grad(output, tensors, torch.from_numpy(d_output))
            found["peer"] = output.detach().numpy()

        def ours(name: str, qk=qk, v=v, d_output=d_output, found=found, **options) -> None:
            result, pullback = ra.lsh_attention.vjp(qk, v, **options)
            pullback(d_output)
            found[name] = result.output

        same = {"rotations": rotations, "hashes": ROUNDS, "n_buckets": buckets, "chunk": CHUNK, "causal": True}
        as_peer = {**same, "wrap": "global", "within_bucket": False, "duplicates": "multiset"}
        calls: tuple[Callable[[], None], ...] = (
            peer,
            lambda ours=ours, as_peer=as_peer: ours("refattn", **as_peer),
            lambda ours=ours, same=same: ours("default", **same),
        )
        times = []
        for pair in range(-1, given.pairs):
            row = []
            for call in calls:
                start = time.perf_counter()
                call()
                row.append(time.perf_counter() - start)
            if pair >= 0:
                times.append(row)
        first, second, third = (statistics.median(column) for column in zip(*times, strict=True))
        ratios = [statistics.median(row[n] / row[0] for row in times) for n in (1, 2)]
        difference = np.max(np.abs(found["peer"] - found["refattn"]))
        print(
            f"{length:>7}{first:>7.2f} s{second:>7.2f} s{ratios[0]:>7.2f}{third:>8.2f} s{ratios[1]:>7.2f}{difference:>20.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
