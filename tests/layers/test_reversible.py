"""Reversible layers and the Reformer's attention layer: gradients, reuse of discrete choices, memory, reconstruction."""

import gc
import tracemalloc

import array_api_strict
import numpy as np
import pytest
from support import assert_adjoint, assert_close, assert_gradients

from refattn.layers import (
    bind,
    chain,
    feed_forward,
    layer_norm,
    linear,
    lsh_layer,
    residual,
    reversible_residual,
    reversible_stack,
)
from refattn.records import Result

T, M, H, D, F = 12, 4, 2, 3, 6
EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def attention_part(seed, *, t=T, m=M, h=H, d=D, hashes=2, dtype=np.float64, **options):
    """f: LSH attention with its layer norm."""
    draw = rng(seed).standard_normal
    shapes = {"w_qk": (m, h, d), "w_v": (m, h, d), "w_o": (h, d, m), "norm_weight": (m,), "norm_bias": (m,)}
    weights = {n: (draw(s) * m**-0.5 + (n == "norm_weight")).astype(dtype) for n, s in shapes.items()}
    rotations = draw((d, hashes, 2)).astype(dtype)
    return bind(lsh_layer, **weights, **{"rotations": rotations, "n_buckets": 4, "chunk": 4, "causal": True, **options})


def feed_forward_part(seed, *, m=M, f=F, chunk=5, dtype=np.float64, **options):
    """g: layer norm, then the feed-forward part in chunks."""
    draw = rng(seed + 1000).standard_normal
    weights = {"w_1": draw((m, f)) * m**-0.5, "b_1": draw(f), "w_2": draw((f, m)) * f**-0.5, "b_2": draw(m)}
    weights = {n: x.astype(dtype) for n, x in weights.items()}
    return chain(bind(layer_norm, **options), bind(feed_forward, **weights, activation="gelu", chunk=chunk, **options))


def blocks(depth, **options):
    return [
        (
            attention_part(n, **options),
            feed_forward_part(n, **{k: x for k, x in options.items() if k in ("m", "dtype", "chunk")}),
        )
        for n in range(depth)
    ]


# ------------------------------------------------------------------------------------------------ the attention layer


@pytest.mark.parametrize(
    "options", [{}, {"norm": False}, {"norm_weight": None}, {"causal": False, "duplicates": "multiset"}]
)
def test_lsh_layer_gradients(options):
    part = attention_part(3, t=8)
    given = {"x": rng(3).standard_normal((2, 8, M)), **part.arguments, **options, "scale": 0.8}
    buckets = lsh_layer.forward(**given).buckets
    given = {n: x for n, x in given.items() if n != "rotations" and x is not None}
    given["buckets"] = buckets
    assert_gradients(lsh_layer, given, rng(3))
    assert_adjoint(lsh_layer, given, rng(4))


def test_lsh_layer_names_the_bad_argument():
    part = attention_part(3)
    with pytest.raises(ValueError, match="w_qk has shape"):
        lsh_layer.forward(rng().standard_normal((T, M + 1)), **part.arguments)


# ------------------------------------------------------------------------------------------------ one block


def test_residual_and_its_inverse():
    f, g = attention_part(1), feed_forward_part(1)
    x_1, x_2 = rng(1).standard_normal((2, T, M))
    result = reversible_residual.forward(x_1, x_2, f, g)
    y_1 = x_1 + f.forward(x_2).output
    assert np.array_equal(result.y_1, y_1)
    assert np.array_equal(result.y_2, x_2 + g.forward(y_1).output)
    assert result.output[0] is result.y_1
    back = reversible_residual.inverse(*result.output, f, g)
    assert_close(back[0], x_1, 20 * EPS)
    assert_close(back[1], x_2, 20 * EPS)


def test_residual_gradients_by_complex_step():
    """Against complex step of the two-stream function, buckets frozen."""
    f, g = attention_part(2), feed_forward_part(2)
    x = {"x_1": rng(2).standard_normal((T, M)), "x_2": rng(3).standard_normal((T, M))}
    _, pullback = reversible_residual.vjp(x["x_1"], x["x_2"], f, g)
    d = rng(4).standard_normal((2, T, M))
    gradients = pullback((d[0], d[1]))
    assert_close(pullback(y_1=d[0], y_2=d[1])["x_1"], gradients["x_1"], 0)
    only_second = pullback(y_2=d[1])
    buckets = f.forward(x["x_2"]).buckets

    complex_f = {n: a for n, a in f.arguments.items() if n != "rotations"} | {"buckets": buckets}
    wide = {"compute_dtype": "complex128"}

    def loss(inputs, own_f, own_g, weights=d):
        y_1 = inputs["x_1"] + bind(lsh_layer, **own_f, **wide).forward(inputs["x_2"]).output
        hidden = bind(layer_norm, **wide).forward(y_1).output
        y_2 = inputs["x_2"] + bind(feed_forward, **own_g, **wide).forward(hidden).output
        return np.sum(y_1 * weights[0]) + np.sum(y_2 * weights[1])

    def step(values, name, run):
        values = {
            n: np.asarray(a, dtype=complex) if getattr(a, "dtype", None) == np.float64 else a for n, a in values.items()
        }
        found = np.zeros(values[name].shape)
        for at in np.ndindex(found.shape):
            moved = values[name].copy()
            moved[at] += 1e-200j
            found[at] = np.imag(run({**values, name: moved})) / 1e-200
        return found

    complex_x = {n: a.astype(complex) for n, a in x.items()}
    wanted = {n: step(x, n, lambda v: loss(v, complex_f, g.parts[1].arguments)) for n in x}
    wanted["f.w_qk"] = step(complex_f, "w_qk", lambda v: loss(complex_x, v, g.parts[1].arguments))
    wanted["f.w_o"] = step(complex_f, "w_o", lambda v: loss(complex_x, v, g.parts[1].arguments))
    wanted["g.1.w_1"] = step(g.parts[1].arguments, "w_1", lambda v: loss(complex_x, complex_f, v))
    for name, want in wanted.items():
        # the inputs come back with a rounding error of their own
        assert np.max(np.abs(gradients[name] - want)) <= 1e-13 * np.max(np.abs(want)) + 1e-13, name
    half = step(x, "x_2", lambda v: loss(v, complex_f, g.parts[1].arguments, weights=np.stack([0 * d[0], d[1]])))
    assert_close(only_second["x_2"], half, 1e-12)


def test_chain_and_bind():
    first, second = bind(linear, weight=rng(1).standard_normal((M, M))), feed_forward_part(5)
    both = chain(first, second)
    x, d = rng(5).standard_normal((T, M)), rng(6).standard_normal((T, M))
    result, pullback = both.vjp(x)
    assert_close(result.output, second.forward(first.forward(x).output).output, 0)
    gradients = pullback(d)
    assert set(gradients) == {"x", "0.weight", "1.1.w_1", "1.1.b_1", "1.1.w_2", "1.1.b_2"}
    with pytest.raises(TypeError, match="'x' is the argument that bind leaves open"):
        bind(linear, x=x)
    with pytest.raises(ValueError, match="at least one"):
        chain()
    narrow = bind(linear, weight=np.zeros((M, M + 1)))
    with pytest.raises(ValueError, match=r"blocks\[0\]\.f gives shape \(12, 5\): expected that of its residual stream"):
        reversible_stack(x, [(narrow, narrow)])


# ------------------------------------------------------------------------------------------------ a stack


def ordinary(x, pairs):
    """The same two streams with everything stored: the pullback uses the stored inputs."""
    y_1 = y_2 = x
    pulls = []
    for f, g in pairs:
        result, pull_f = f.vjp(y_2)
        y_1 = y_1 + result.output
        result, pull_g = g.vjp(y_1)
        y_2 = y_2 + result.output
        pulls.append((pull_f, pull_g))

    def pullback(d_1, d_2):
        gradients = {}
        for i in reversed(range(len(pulls))):
            found = pulls[i][1](d_2)
            d_1 = d_1 + found["x"]
            gradients.update({f"blocks[{i}].g.{n}": a for n, a in found.items() if n != "x"})
            found = pulls[i][0](d_1)
            d_2 = d_2 + found["x"]
            gradients.update({f"blocks[{i}].f.{n}": a for n, a in found.items() if n != "x"})
        return {"x": d_1 + d_2, **gradients}

    return (y_1, y_2), pullback


@pytest.mark.parametrize("readout", ["concat", "mean"])
@pytest.mark.parametrize("depth", [0, 1, 5])
def test_stack_gradients_equal_the_ordinary_ones(depth, readout):
    x, pairs = rng(7).standard_normal((2, T, M)), blocks(depth)
    result, pullback = reversible_stack.vjp(x, pairs, readout=readout)
    (y_1, y_2), plain = ordinary(x, pairs)
    want = np.concatenate([y_1, y_2], -1) if readout == "concat" else (y_1 + y_2) / 2
    assert np.array_equal(result.output, want)
    assert np.array_equal(reversible_stack(x, pairs, readout=readout), want)
    d = rng(8).standard_normal(want.shape)
    wanted = plain(d[..., :M], d[..., M:]) if readout == "concat" else plain(d / 2, d / 2)
    gradients = pullback(d)
    assert set(gradients) == set(wanted)
    for n in wanted:
        assert_close(gradients[n], wanted[n], 1e-10)
    assert_close(pullback(d)["x"], gradients["x"], 0)  # called again, nothing has changed


def test_stack_in_a_strict_namespace():
    x, pairs = rng(9).standard_normal((T, M)), blocks(2)
    want, back = reversible_stack.vjp(x, pairs)

    def strict(part):
        if hasattr(part, "parts"):
            return chain(*map(strict, part.parts))
        arrays = {n: array_api_strict.asarray(a) if isinstance(a, np.ndarray) else a for n, a in part.arguments.items()}
        return bind(part.function, **arrays)

    strict_pairs = [(strict(f), strict(g)) for f, g in pairs]
    result, pullback = reversible_stack.vjp(array_api_strict.asarray(x), strict_pairs)
    assert_close(np.asarray(result.output), want.output, 1e-13)
    d = rng(10).standard_normal(want.output.shape)
    assert_close(np.asarray(pullback(array_api_strict.asarray(d))["x"]), back(d)["x"], 1e-12)


class _Recorder:
    """f with a choice that rounding could flip: a mask drawn anew in every call, unless it is handed back."""

    reuse = ("mask",)

    def __init__(self, seed):
        self.draw, self.calls = rng(seed), []

    def forward(self, x, mask=None):
        return self.vjp(x, mask)[0]

    def vjp(self, x, mask=None):
        self.calls.append(mask is not None)
        mask = self.draw.random(x.shape) < 0.5 if mask is None else mask
        return Result(output=np.tanh(x) * mask, mask=mask), lambda d: {"x": d * mask / np.cosh(x) ** 2}


def test_drawn_masks_are_reused():
    f, g = _Recorder(1), _Recorder(2)
    x = rng(11).standard_normal((T, M))
    result, pullback = reversible_stack.vjp(x, [(f, g), (f, g)], readout="mean")
    u = rng(12).standard_normal(x.shape)
    d = np.ones_like(result.output)
    gradient = pullback(d)["x"]
    assert f.calls == [False, False, True, True]
    f, g = _Recorder(1), _Recorder(2)  # the same draws again
    moved = reversible_stack(x + 1e-6 * u, [(f, g), (f, g)], readout="mean")
    f, g = _Recorder(1), _Recorder(2)
    less = reversible_stack(x - 1e-6 * u, [(f, g), (f, g)], readout="mean")
    assert abs(np.sum((moved - less) / 2e-6) - np.sum(gradient * u)) < 1e-7


def test_buckets_are_reused_in_the_smallest_type():
    x, pairs = rng(13).standard_normal((3, T, M)), blocks(3)
    result, _ = reversible_stack.vjp(x, pairs)
    assert result.reused_bytes == 3 * (3 * H * 2 * T)  # depth * (batch, h, s, t), one byte each
    seen = []

    class Spy:
        reuse = ("buckets",)

        def __init__(self, part):
            self.part = part

        def forward(self, y, **kept):
            return self.part.forward(y, **kept)

        def vjp(self, y, **kept):
            seen.append(kept["buckets"])
            return self.part.vjp(y, **kept)

    spied = [(Spy(f), g) for f, g in pairs]
    result, pullback = reversible_stack.vjp(x, spied)
    pullback(np.ones_like(result.output))
    assert [a.dtype for a in seen] == [np.uint8] * 3


# ------------------------------------------------------------------------------------------------ memory and rounding


def held_bytes(run, x, depth):
    """Bytes alive after the forward, and the peak of forward and backward, above what stood before."""
    pairs = memory_blocks(depth, x)
    run(x, pairs)(None)  # caches of paths and the like
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    pull = run(x, pairs)
    gc.collect()
    alive = tracemalloc.get_traced_memory()[0] - before
    pull(None)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return alive, peak, pairs


def memory_blocks(depth, x):
    draw = rng(14).standard_normal
    m = x.shape[-1]
    f = bind(linear, weight=draw((m, m)) * m**-0.5)
    g = bind(feed_forward, w_1=draw((m, m)), b_1=draw(m), w_2=draw((m, m)) / m, b_2=draw(m), chunk=64)
    return [(f, g)] * depth  # one set of weights for all blocks: their gradients are counted once


def run_reversible(x, pairs):
    result, pullback = reversible_stack.vjp(x, pairs)

    def pull(_):
        d = np.ones_like(result.output)
        return [None for _ in pullback(d)]

    return pull


def run_ordinary(x, pairs):
    (y_1, y_2), pullback = ordinary(x, pairs)
    return lambda _: [None for _ in pullback(np.ones_like(y_1), np.ones_like(y_2))]


def test_activation_memory_does_not_grow_with_depth():
    x = rng(15).standard_normal((1024, 16))
    parameters = 2 * 3 * 16 * 16 * 8  # gradients of both depths: 3 matrices a block
    (alive_2, peak_2, _), (alive_16, peak_16, _) = (held_bytes(run_reversible, x, depth) for depth in (2, 16))
    assert alive_16 <= 1.1 * alive_2 + 16 * 500  # and half a kilobyte of Python objects a block
    assert peak_16 - 8 * parameters <= 1.1 * peak_2 + 16 * 2000
    (plain_2, *_), (plain_16, *_) = (held_bytes(run_ordinary, x, depth) for depth in (2, 16))
    assert 6 < plain_16 / plain_2 < 9


@pytest.mark.parametrize("dtype, bound", [(np.float32, 2e-4), (np.float64, 4e-13)])
def test_reconstruction_error_grows_slowly(dtype, bound):
    """|x again - x| after 16 blocks: about eps * (depth * size of the streams)."""
    x = rng(16).standard_normal((2, T, M)).astype(dtype)
    y_1 = y_2 = x
    pairs = blocks(16, dtype=dtype)
    for f, g in pairs:
        y_1, y_2 = reversible_residual(y_1, y_2, f, g)
    for f, g in reversed(pairs):
        y_1, y_2 = reversible_residual.inverse(y_1, y_2, f, g)
    assert y_1.dtype == dtype
    error = max(np.max(np.abs(y_1 - x)), np.max(np.abs(y_2 - x)))
    assert 0 < error < bound


def test_ordinary_residual_is_the_same_pieces():
    f = attention_part(17)
    x = rng(17).standard_normal((T, M))
    assert np.array_equal(residual(x, f), x + f.forward(x).output)
