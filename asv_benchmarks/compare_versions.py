"""Two versions of refattn beside each other: one table of medians of alternating calls.

usage: python asv_benchmarks/compare_versions.py OTHER_PYTHON [--pairs 5] [--only WORD] [--threads N] [--cpu]

OTHER_PYTHON is an interpreter whose refattn is the other version (a virtual environment of an older checkout). Each version
runs in a process of its own; every pair of calls is measured back to back, so that a slow moment of the machine hits both.
``--cpu`` takes the processor time of one thread, for a machine that others use too.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

SHORT, LONG = 256, 2048


def cases() -> dict[str, Callable[[], Callable[[], object]]]:
    """By name: what prepares a call, and returns it."""
    import numpy as np

    import refattn as ra

    def normal(*shape: int, dtype: str = "float32") -> Any:
        return np.random.default_rng(0).standard_normal(shape).astype(dtype)

    def both(mechanism: Any, *arrays: Any, **options: Any) -> Callable[[], object]:
        d_output = np.ones_like(mechanism(*arrays, **options))

        def call() -> object:
            _, pullback = mechanism.vjp(*arrays, **options)
            return pullback(d_output)

        return call

    dense = ra.scaled_dot_product_attention
    table = {}
    for dtype in ("float32", "float64"):
        for length in (SHORT, LONG):
            shape = (1, 8, length, 64)
            name = f"dense {shape} {dtype}"
            table[f"{name} forward"] = lambda s=shape, t=dtype: partial(dense, *[normal(*s, dtype=t)] * 3)
            table[f"{name} both"] = lambda s=shape, t=dtype: both(dense, *[normal(*s, dtype=t)] * 3)
    q, few = (1, 8, LONG, 64), (1, 2, LONG, 64)
    table["causal, both"] = lambda: both(dense, *[normal(*q)] * 3, causal=True)
    table["4 query heads a key head, both"] = lambda: both(dense, normal(*q), normal(*few), normal(*few))
    table["bias and soft cap, both"] = lambda: both(
        dense, *[normal(1, 4, 1024, 64)] * 3, bias=normal(1024, 1024), softcap=5.0
    )
    table["many small, (64, 8, 32, 16), both"] = lambda: both(dense, *[normal(64, 8, 32, 16)] * 3)
    table["smallest, (1, 1, 2, 2), both"] = lambda: both(dense, *[normal(1, 1, 2, 2)] * 3)
    table["one query, 65536 keys, forward"] = lambda: partial(
        dense, normal(1, 8, 1, 64), *[normal(1, 8, 1 << 16, 64)] * 2
    )
    table["local, block 64, both"] = lambda: both(ra.local_attention, *[normal(1, 8, 4096, 64)] * 3, block=64)
    table["talking heads, both"] = lambda: both(
        ra.talking_heads_attention,
        *[normal(1, 8, 512, 32)] * 3,
        logits_projection=normal(8, 8),
        weights_projection=normal(8, 8),
    )
    table["transformer-xl, both"] = lambda: both(
        ra.transformer_xl_attention, normal(4, 512, 64), *[normal(4, 1024, 64)] * 2, r=normal(4, 1024, 64)
    )
    table["lsh, both"] = lambda: both(
        ra.lsh_attention, *[normal(1, 4, 4096, 64)] * 2, rotations=normal(64, 2, 32), hashes=2, causal=True
    )
    return table


def serve(clock: Callable[[], float]) -> None:
    """Answer each line with the seconds of one call; an unknown case or one that fails with a line of text."""
    table = cases()
    calls: dict[str, Callable[[], object]] = {}
    print("\t".join(table), flush=True)
    for line in sys.stdin:
        name = line.rstrip("\n")
        try:
            if name not in calls:
                calls.clear()
                calls[name] = table[name]()
                calls[name]()
            times = []
            for _ in range(5):  # the shortest of a few: short calls are disturbed easily
                start = clock()
                calls[name]()
                times.append(clock() - start)
                if sum(times) > 0.3:
                    break
            print(min(times), flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)


def start(python: str, *flags: str) -> Any:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([python, "-P", __file__, "--serve", *flags], **pipes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(time.process_time if chosen.cpu else time.perf_counter)
        return
    if chosen.other is None:
        parser.error("OTHER_PYTHON is missing")
    if chosen.cpu:
        chosen.threads = 1
    if chosen.threads:
        os.environ.update(REFATTN_THREADS=str(chosen.threads), OPENBLAS_NUM_THREADS=str(chosen.threads))
    flags = ["--cpu"] if chosen.cpu else []
    workers = [start(python, *flags) for python in (sys.executable, chosen.other)]
    names, _ = (worker.stdout.readline().rstrip("\n").split("\t") for worker in workers)
    print(f"{'case':<44}{'this (ms)':>11}{'other (ms)':>12}{'ratio':>8}")
    for name in (n for n in names if chosen.only in n):
        times: list[list[float]] = [[], []]
        for _ in range(chosen.pairs):
            for worker, own in zip(workers, times, strict=True):
                worker.stdin.write(name + "\n")
                worker.stdin.flush()
                answer = worker.stdout.readline().strip()
                try:
                    own.append(float(answer))
                except ValueError:
                    print(f"{name:<44}{answer}")
        if all(times):
            ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
            this, other = (1e3 * statistics.median(x) for x in times)
            print(f"{name:<44}{this:>11.3f}{other:>12.3f}{ratio:>8.2f}", flush=True)
    for worker in workers:
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    main()
