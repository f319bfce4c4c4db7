"""Evaluation with cached keys and values against computing the whole window anew for every token.

usage: python asv_benchmarks/compare_recomputation.py [--lengths 800 1800 2800 3800] [--layers 4] [--channels 128] [--threads 1]

The setting of table 9 of the Transformer-XL paper (arXiv:1901.02860), for a narrow model and a batch of 1: the prediction of
one token costs a forward over the whole window (as in Al-Rfou et al. 2018), or one row through every layer, whose keys and
values of the earlier tokens are kept. Printed: processor seconds per token, the ratios, and their growth with the length.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


def seconds(function: Callable[[], object], least: int = 3, total: float = 1.0) -> float:
    """Median processor time of a call, over at least ``least`` calls and ``total`` seconds."""
    function()
    found: list[float] = []
    while len(found) < least or sum(found) < total:
        start = time.process_time()
        function()
        found.append(time.process_time() - start)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(PAPER))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--segment", type=int, default=64, help="tokens of the longer cached segment")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    for variable in ("REFATTN_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(given.threads)  # before numpy is imported

    import numpy as np

    import refattn as ra

    m, h = given.channels, given.heads
    d = m // h
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (m**-0.5 * rng.standard_normal(shape)).astype(np.float32)

    attention = [
        {"w_q": normal(m, h, d), "w_k": normal(m, h, d), "w_v": normal(m, h, d), "w_o": normal(h, d, m),
         "w_r": normal(m, h, d), "u": normal(h, d), "w": normal(h, d)}
        for _ in range(given.layers)
    ]  # fmt: skip
    mlp = [{"w_1": normal(m, 4 * m), "b_1": None, "w_2": normal(4 * m, m), "b_2": None} for _ in range(given.layers)]

    def whole_window(x: np.ndarray) -> np.ndarray:
        """Last row of the last layer, from all rows of the window."""
        for a, f in zip(attention, mlp, strict=True):
            x = ra.layers.transformer_xl_layer(x, **a)
            x = ra.layers.layer_norm(x + ra.layers.feed_forward(x, **f))
        return x[:, -1:]

    class Cache:
        """Keys and values of every layer, with room for ``room`` more; the tables are projected once."""

        def __init__(self, length: int, segment: int, room: int) -> None:
            self.length, self.start, self.stop = length, 0, 0
            self.k = np.zeros((given.layers, 1, h, length + room, d), np.float32)
            self.v = np.zeros_like(self.k)
            table = ra.positions.sinusoid(np.arange(length + segment - 1, -1, -1), m).astype(np.float32)
            self.r = [np.ascontiguousarray(ra.einsum("pm,mhd->hpd", table, a["w_r"])) for a in attention]

        def read(self, x: np.ndarray) -> np.ndarray:
            """Output rows of a segment, which then belongs to the memory."""
            n = x.shape[1]
            start, stop = max(0, self.stop - self.length), self.stop + n
            for layer, (a, f) in enumerate(zip(attention, mlp, strict=True)):
                q, self.k[layer, :, :, self.stop : stop], self.v[layer, :, :, self.stop : stop] = (
                    ra.einsum("btm,mhd->bhtd", x, a[name]) for name in ("w_q", "w_k", "w_v")
                )
                keys, values = (c[layer, :, :, start:stop] for c in (self.k, self.v))
                r = self.r[layer][:, self.r[layer].shape[1] - (stop - start) :]
                heads = ra.transformer_xl_attention(q, keys, values, r=r, u=a["u"], w=a["w"])
                x = ra.layers.layer_norm(x + ra.einsum("bhte,hem->btm", heads, a["w_o"]))
                x = ra.layers.layer_norm(x + ra.layers.feed_forward(x, **f))
            self.stop = stop
            return x

    x = normal(1, 40, m) * 10
    cache = Cache(39, 1, 40)
    by_token = [cache.read(x[:, t : t + 1]) for t in range(40)][-1]
    error = np.abs(by_token - whole_window(x)).max()
    print(
        f"{given.layers} layers of {m} channels, {h} heads, float32, batch 1, {given.threads} thread(s), numpy {np.__version__}"
    )
    print(f"both ways agree on 40 tokens to {error:.1e}")
    head = f"cached x{given.segment}"
    titles = f"{'length':>6} {'window':>10} {'cached x1':>10} {head:>11} {'speed-up':>9} {'speed-up':>9} {'paper':>6}"
    print(f"{titles}   (processor seconds per token)")
    ratios = []
    for length in given.lengths:
        window = normal(1, length, m) * 10
        slow = seconds(lambda window=window: whole_window(window))
        times = []
        for segment in (1, given.segment):
            cache = Cache(length, segment, segment)
            cache.k[:] = rng.standard_normal(cache.k.shape)
            cache.v[:] = rng.standard_normal(cache.v.shape)
            rows = window[:, :segment]

            def read(cache: Cache = cache, rows: np.ndarray = rows, length: int = length) -> None:
                cache.stop = length  # the memory is full
                cache.read(rows)

            times.append(seconds(read, least=20) / segment)
        ratios.append([slow / t for t in times])
        print(
            f"{length:6} {slow:10.4f} {times[0]:10.6f} {times[1]:11.6f} {ratios[-1][0]:8.0f}x {ratios[-1][1]:8.0f}x"
            f" {str(PAPER.get(length, '')) + 'x':>6}",
            flush=True,
        )
    if len(given.lengths) > 1:
        logs = np.log(given.lengths)
        slopes = [np.polyfit(logs, np.log(column), 1)[0] for column in np.transpose(ratios)]
        paper = np.polyfit(np.log(list(PAPER)), np.log(list(PAPER.values())), 1)[0]
        print(
            f"speed-up grows as length^{slopes[0]:.2f} token by token, length^{slopes[1]:.2f} by segments; paper: {paper:.2f}"
        )


if __name__ == "__main__":
    main()
