"""What the Reformer's parts do: what the hash finds, time by length, memory by length and by depth.

usage: python examples/reformer.py {hash,rounds,length,memory,depth} [--quick] [--picture F.png] [--data F.json]

hash    collision probability by angle, recall of the exact top keys and softmax mass by rounds and buckets (figure 12 of
        the survey of efficient attention shows such a picture); the picture needs matplotlib
rounds  table 2 of the paper: accuracy by hash rounds beside 1 - (1 - p)^H, and the same law on planted neighbours
length  figure 5 (right): seconds for forward and backward at a fixed number of tokens, cut into ever longer sequences
memory  peak of the working memory of forward and backward at 65536 tokens, 8 heads, d = 64, 4 rounds, float32
depth   activation memory of a reversible and an ordinary stack by depth; reconstruction error by depth
"""

import argparse
import gc
import json
import math
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import refattn as ra
from refattn.attention.lsh_recall import (
    collision_probability,
    found_by_rounds,
    found_pairs,
    measured_collisions,
    recall,
    shown_pairs,
)

Table = dict[str, Any]


def factors(length: int, chunk: int) -> tuple[int, ...]:
    """About 2 * length / chunk buckets; above 128 as two factors, so that hashing does not outgrow attention."""
    n = 2 * max(1, length // chunk)
    if n <= 128:
        return (n,)
    first = 2 ** math.ceil(math.log2(math.sqrt(n)))
    return first, 2 * max(1, n // (2 * first))


# ------------------------------------------------------------------------------------------------ what the hash finds


def clustered(rng: np.random.Generator, t: int, d: int, clusters: int, spread: float) -> np.ndarray:
    """Vectors (t, d) around random centres: attention that has something to find."""
    centres = rng.standard_normal((clusters, d))
    x = centres[rng.integers(0, clusters, t)] + spread * rng.standard_normal((t, d))
    return x * (8.0 * d**0.5 / np.linalg.norm(x, axis=-1, keepdims=True))


def hash_findings(quick: bool) -> Table:
    rng = np.random.default_rng(0)
    angles = np.linspace(0, math.pi, 19)
    samples = 500 if quick else 5000
    collisions = {
        str(n): [measured_collisions(a, n, d=64, rng=rng, samples=samples) for a in angles] for n in (2, 4, 16, 64)
    }
    print("collision probability by angle (closed form for 2 and 4 buckets in brackets)")
    print("angle/pi  " + "".join(f"{n + ' buckets':>20}" for n in collisions))
    for i, a in enumerate(angles):
        forms = {n: f" ({float(collision_probability(a, int(n))):.3f})" if int(n) < 5 else "" for n in collisions}
        print(f"{a / math.pi:>8.3f}  " + "".join(f"{collisions[n][i]:.3f}{forms[n]}".rjust(20) for n in collisions))

    t, d, chunk, hashes, top = (128 if quick else 1024), 64, (8 if quick else 32), 16, 8
    qk = clustered(rng, t, d, t // 16, 0.7)
    table: Table = {"angles": angles.tolist(), "collisions": collisions, "t": t, "chunk": chunk, "top": top, "rows": []}
    print(
        f"\n{t} tokens around {t // 16} centres, chunk {chunk}: share of the {top} largest logits found, softmax mass found"
    )
    print("buckets  rounds   recall   mass    without chunks: recall   mass")
    for n in (t // chunk // 2, t // chunk, 2 * t // chunk, 4 * t // chunk):
        given = {
            "qk": qk[None],
            "v": qk[None, :, :1],
            "rng": np.random.default_rng(1),
            "hashes": hashes,
            "chunk": chunk,
        }
        buckets = ra.lsh_attention.forward(**given, n_buckets=n).buckets[0]
        found, mass = recall(qk, found_pairs(shown_pairs(buckets, chunk=chunk)), top=top)
        all_found, all_mass = recall(qk, found_pairs(shown_pairs(buckets, chunk=chunk, windows=False)), top=top)
        row = {"buckets": n, "recall": found.tolist(), "mass": mass.tolist(), "hash_recall": all_found.tolist()}
        table["rows"].append({**row, "hash_mass": all_mass.tolist()})
        for s in (1, 2, 4, 8, 16):
            numbers = (found[s - 1], mass[s - 1], all_found[s - 1], all_mass[s - 1])
            print("{:>7}  {:>6}   {:>6.3f}  {:>6.3f}  {:>22.3f}  {:>6.3f}".format(n, s, *numbers))
    return table


def draw_findings(table: Table, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    share = np.array(table["angles"]) / math.pi
    for n, values in table["collisions"].items():
        (line,) = left.plot(share, values, "o", markersize=4, label=f"{n} buckets")
        if int(n) in (2, 4):
            left.plot(share, collision_probability(share * math.pi, int(n)), "-", linewidth=1, color=line.get_color())
    left.set(xlabel="angle / π", ylabel="probability of one bucket", title="collisions (lines: closed form)")
    rounds = np.arange(1, len(table["rows"][0]["recall"]) + 1)
    for axis, name, title in (
        (middle, "recall", f"share of the {table['top']} largest logits found"),
        (right, "mass", "softmax mass found"),
    ):
        for row in table["rows"]:
            (line,) = axis.plot(rounds, row[name], "o-", markersize=3, label=f"{row['buckets']} buckets")
            axis.plot(rounds, row[f"hash_{name}"], ":", linewidth=1, color=line.get_color())
        axis.set(xlabel="hash rounds", ylim=(0, 1.02), title=title)
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    right.plot([], [], ":", color="grey", label="no chunks: the bucket alone")
    for axis in (left, right):
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)


# ------------------------------------------------------------------------------------------------ table 2

TABLE_2 = {"full": (52.5, 76.9, 92.5, 94.8), "LSH-4": (91.9, 99.4, 99.9, 100.0), "LSH-2": (86.8, 98.1, 99.9, 100.0),
           "LSH-1": (77.9, 94.8, 99.6, 99.9)}  # fmt: skip
ROUNDS = (1, 2, 4, 8)


def rounds_law(quick: bool) -> Table:
    print("accuracy in percent by the rounds of evaluation, as the paper's table 2 (left) and 1 - (1 - p)^H (right)")
    print(
        f"{'trained with':<14}"
        + "".join(f"{f'LSH-{n}':>9}" for n in ROUNDS)
        + "     "
        + "".join(f"{n:>9}" for n in ROUNDS)
    )
    for name, row in TABLE_2.items():
        law = [100 * float(found_by_rounds(row[0] / 100, n)) for n in ROUNDS]
        print(f"{name:<14}" + "".join(f"{x:>9.1f}" for x in row) + "     " + "".join(f"{x:>9.2f}" for x in law))

    rng = np.random.default_rng(0)
    length, d, chunk = (256 if quick else 1024), 64, (16 if quick else 64)
    table: Table = {"length": length, "rows": []}
    print(
        f"\nplanted: {length // 2} queries, the key of each at the given cosine somewhere before it; share found, and the law"
    )
    print(
        f"{'cosine':<14}" + "".join(f"{f'LSH-{n}':>9}" for n in ROUNDS) + "     " + "".join(f"{n:>9}" for n in ROUNDS)
    )
    half = length // 2
    for cosine in (0.99, 0.95, 0.9, 0.8, 0.6):
        x = rng.standard_normal((half, d))
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
        other = rng.standard_normal((half, d))
        other -= x * np.sum(x * other, axis=-1, keepdims=True)
        other /= np.linalg.norm(other, axis=-1, keepdims=True)
        order = rng.permutation(half)
        tokens = np.concatenate([x[order], cosine * x + math.sqrt(1 - cosine**2) * other])
        target = np.argsort(order)  # the key of query half + n stands at target[n]
        trials = 2 if quick else 8
        hits = []
        for seed in range(trials):
            given = {"qk": tokens[None], "v": tokens[None, :, :1], "rng": np.random.default_rng(seed), "hashes": 8}
            buckets = ra.lsh_attention.forward(**given, chunk=chunk, causal=True).buckets[0]
            shown = shown_pairs(buckets, chunk=chunk, causal=True)
            hits.append(shown[:, np.arange(half, length), target])
        hit = np.stack(hits)  # (trial, round, query)
        measured = [float(np.logical_or.accumulate(hit, axis=1)[:, n - 1].mean()) for n in ROUNDS]
        law = [float(found_by_rounds(hit.mean(), n)) for n in ROUNDS]
        table["rows"].append({"cosine": cosine, "measured": measured, "law": law})
        print(
            f"{cosine:<14}"
            + "".join(f"{100 * x:>9.1f}" for x in measured)
            + "     "
            + "".join(f"{100 * x:>9.2f}" for x in law)
        )
    return table


# ------------------------------------------------------------------------------------------------ time and memory


def seconds(call: Callable[[], Any], runs: int) -> float:
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def by_length(quick: bool) -> Table:
    tokens, d, hashes, chunk = (4096 if quick else 65536), 64, 4, 64
    lengths = [n for n in (1024, 2048, 4096, 8192, 16384, 32768, 65536) if n <= tokens]
    longest = 2048 if quick else 16384
    rng = np.random.default_rng(0)
    q, k, v, d_output = (rng.standard_normal((tokens, d)).astype(np.float32) for _ in range(4))
    table: Table = {"tokens": tokens, "length": [], "lsh": [], "full": [], "full_forward": []}
    print(
        f"{tokens} tokens in all, one head, d = {d}, causal, float32; LSH with {hashes} rounds, chunk {chunk}; seconds"
    )
    print(f"{'length':>7}{'batch':>7}{'LSH':>9}{'full':>9}{'full, forward':>15}")
    for length in lengths:
        shape = (tokens // length, 1, length, d)
        x, keys, values, cotangent = (a.reshape(shape) for a in (q, k, v, d_output))

        def lsh(x: Any = x, values: Any = values, cotangent: Any = cotangent, length: int = length) -> None:
            given = {"rng": np.random.default_rng(0), "hashes": hashes, "n_buckets": factors(length, chunk)}
            _, pullback = ra.lsh_attention.vjp(x, values, **given, chunk=chunk, causal=True)
            pullback(cotangent)

        def full(x: Any = x, keys: Any = keys, values: Any = values, cotangent: Any = cotangent) -> None:
            _, pullback = ra.scaled_dot_product_attention.vjp(x, keys, values, causal=True)
            pullback(cotangent)

        def full_forward(x: Any = x, keys: Any = keys, values: Any = values) -> None:
            ra.scaled_dot_product_attention(x, keys, values, causal=True)

        row = {"lsh": seconds(lsh, 2), "full": seconds(full, 1) if length <= longest else None}
        row["full_forward"] = seconds(full_forward, 1) if length <= 2 * longest else None
        table["length"].append(length)
        for name, value in row.items():
            table[name].append(value)
        texts = ["-" if x is None else f"{x:.2f}" for x in row.values()]
        print(f"{length:>7}{tokens // length:>7}{texts[0]:>9}{texts[1]:>9}{texts[2]:>15}", flush=True)
    return table


def draw_lengths(table: Table, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, label in (("lsh", "LSH, 4 rounds"), ("full", "full attention"), ("full_forward", "full, forward only")):
        points = [(n, x) for n, x in zip(table["length"], table[name], strict=True) if x is not None]
        axis.loglog(*zip(*points, strict=True), "o:" if name == "full_forward" else "o-", label=label)
    axis.set_xticks(table["length"], [f"{n}\n/ {table['tokens'] // n}" for n in table["length"]])
    axis.minorticks_off()
    shown = [x for name in ("lsh", "full", "full_forward") for x in table[name] if x is not None]
    marks = [x for x in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if min(shown) / 2 <= x <= max(shown) * 2]
    axis.set_yticks(marks, [f"{x:g}" for x in marks])
    axis.set(
        xlabel="sequence length / batch",
        ylabel="seconds, forward + backward",
        title=f"{table['tokens']} tokens, one head",
    )
    axis.legend()
    figure.savefig(path, dpi=120)


def peak_memory(quick: bool) -> Table:
    t, h, d, hashes, chunk = (4096 if quick else 65536), 8, 64, 4, 64
    rng = np.random.default_rng(0)
    x, v, d_output = (rng.standard_normal((1, h, t, d)).astype(np.float32) for _ in range(3))
    gc.collect()
    tracemalloc.start()
    start = time.perf_counter()
    given = {"rng": np.random.default_rng(1), "hashes": hashes, "n_buckets": factors(t, chunk), "chunk": chunk}
    _, pullback = ra.lsh_attention.vjp(x, v, **given, causal=True)
    forward = tracemalloc.get_traced_memory()[1]
    pullback(d_output)
    peak = tracemalloc.get_traced_memory()[1]
    took = time.perf_counter() - start
    tracemalloc.stop()
    print(f"{t} tokens, {h} heads, d = {d}, {hashes} rounds, float32, forward + backward in {took:.1f} s")
    print(f"working memory above inputs: {forward / 2**20:.0f} MiB forward, {peak / 2**20:.0f} MiB at most")
    print(f"full scores alone: {4 * h * t * t / 2**30:.0f} GiB")
    return {"forward": forward, "peak": peak, "seconds": took}


def by_depth(quick: bool) -> Table:
    t, m, h, d, hashes, chunk = (256 if quick else 2048), 64, 4, 16, 2, 32
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, t, m))

    def block(dtype: Any) -> tuple[Any, Any]:
        def draw(*s: int) -> np.ndarray:
            return (rng.standard_normal(s) * s[0] ** -0.5).astype(dtype)

        weights = {"w_qk": draw(m, h, d), "w_v": draw(m, h, d), "w_o": draw(h, d, m)}
        rotations = rng.standard_normal((d, hashes, t // chunk)).astype(dtype)
        layers = ra.layers
        f = layers.bind(layers.lsh_layer, **weights, rotations=rotations, chunk=chunk, causal=True)
        mlp = {"w_1": draw(m, 2 * m), "b_1": draw(2 * m), "w_2": draw(2 * m, m), "b_2": draw(m)}
        return f, layers.chain(layers.bind(layers.layer_norm), layers.bind(layers.feed_forward, **mlp, chunk=256))

    def held(depth: int, reversible: bool) -> tuple[int, int]:
        """Bytes alive between forward and backward, and those of the buckets among them."""
        pairs = [block(np.float64) for _ in range(depth)]
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        reused = 0
        if reversible:
            result, pullback = ra.layers.reversible_stack.vjp(x, pairs)
            reused = result.reused_bytes
            alive = [result, pullback]
        else:
            alive, y = [], x
            for f, g in pairs:
                for part in (f, g):
                    result, pullback = ra.layers.residual.vjp(y, part)
                    y = result.output
                    alive.append(pullback)
        gc.collect()
        found = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        return found - reused, reused

    table: Table = {"depth": [], "reversible": [], "buckets": [], "ordinary": [], "error": {}}
    print(f"{t} tokens, m = {m}, {h} heads, LSH with {hashes} rounds: bytes held between forward and backward")
    print(f"{'depth':>6}{'reversible':>14}{'its buckets':>14}{'ordinary':>14}")
    held(1, True), held(1, False)  # paths of contractions and the like are cached once
    for depth in (2, 4, 8, 16):
        kept, buckets = held(depth, True)
        plain, _ = held(depth, False)
        for name, value in (("depth", depth), ("reversible", kept), ("buckets", buckets), ("ordinary", plain)):
            table[name].append(value)
        print(f"{depth:>6}{kept:>14,}{buckets:>14,}{plain:>14,}")
    ratios = [table[n][-1] / table[n][0] for n in ("reversible", "ordinary")]
    print(f"depth 16 against 2: reversible {ratios[0]:.3f}, ordinary {ratios[1]:.2f}")

    print("\nlargest |x again - x| after going up and down (x about 1)")
    for dtype in (np.float32, np.float64):
        errors = []
        for depth in (1, 2, 4, 8, 16):
            rng = np.random.default_rng(1)
            pairs = [block(dtype) for _ in range(depth)]
            start = x[:, :256].astype(dtype)
            y_1 = y_2 = start
            for f, g in pairs:
                y_1, y_2 = ra.layers.reversible_residual(y_1, y_2, f, g)
            for f, g in reversed(pairs):
                y_1, y_2 = ra.layers.reversible_residual.inverse(y_1, y_2, f, g)
            errors.append(float(max(np.max(np.abs(y_1 - start)), np.max(np.abs(y_2 - start)))))
        table["error"][np.dtype(dtype).name] = errors
        print(
            f"{np.dtype(dtype).name}: "
            + "  ".join(f"depth {n}: {e:.1e}" for n, e in zip((1, 2, 4, 8, 16), errors, strict=True))
        )
    return table


RUNS = {"hash": hash_findings, "rounds": rounds_law, "length": by_length, "memory": peak_memory, "depth": by_depth}
DRAWN = {"hash": draw_findings, "length": draw_lengths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(RUNS))
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--data", type=Path, help="write the numbers as JSON")
    given = parser.parse_args()
    if given.picture and given.what not in DRAWN:
        parser.error(f"there is a picture of {' and '.join(DRAWN)} only")
    table = RUNS[given.what](given.quick)
    if given.data:
        given.data.write_text(json.dumps(table), encoding="utf-8")
    if given.picture:
        DRAWN[given.what](table, given.picture)


if __name__ == "__main__":
    main()
