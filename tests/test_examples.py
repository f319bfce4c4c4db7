"""The example kernels: the tiled one is right in every precision, each broken one is wrong in its place only."""

import importlib.util
import pathlib

import numpy as np
import pytest
from ml_dtypes import bfloat16, finfo

import refattn as ra
from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.precision import Rounding, SoftmaxCall, softmax_bounds

definition = ra.scaled_dot_product_attention.definition
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": bfloat16}


def load(path):
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), EXAMPLES / f"{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


online_softmax = load("online_softmax")


def arrays(seed=0, *, b=2, h=6, g=2, q=53, k=97, d=10, e=7, dtype=np.float64, amplitude=1.0):
    rng = np.random.default_rng(seed)
    return {
        "q": (amplitude * rng.standard_normal((b, h, q, d))).astype(dtype),
        "k": rng.standard_normal((b, g, k, d)).astype(dtype),
        "v": rng.standard_normal((b, g, k, e)).astype(dtype),
    }


def options():
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((6, 1, 97))
    bias[2, 0, 90:] = -np.inf
    slopes, sinks = rng.random(6), rng.standard_normal((6, 2))
    mask = rng.random((2, 1, 53, 97)) < 0.8
    mask[1, 0, 7] = False
    lengths = np.array([97, 41])
    return {
        "plain": {},
        "causal": {"causal": True, "align": "lower_right"},
        "causal_upper_left": {"causal": True, "align": "upper_left"},
        "causal_empty_rows": {"causal": True, "align": -3},
        "window": {"window": (5, 2), "align": "lower_right"},
        "window_left": {"window": (40, None), "causal": True, "align": np.array([30, 44])},
        "scale_softcap": {"scale": 0.9, "softcap": 1.5},
        "bias": {"bias": bias},
        "mask": {"mask": mask},
        "sinks": {"sinks": sinks, "mask": mask},
        "alibi": {"alibi_slopes": slopes, "align": "lower_right"},
        "lengths": {"key_lengths": lengths},
        "everything": {
            "causal": True, "align": "lower_right", "window": (80, None), "scale": 0.4, "softcap": 2.0, "bias": bias,
            "mask": mask, "sinks": sinks[:, 0], "alibi_slopes": slopes, "key_lengths": lengths,
        },
    }  # fmt: skip


OPTIONS = options()


def stored(arguments, dtype):
    """Floating arrays in the dtype under test, and the same numbers in float64."""
    kept = {n: x.astype(dtype) if getattr(x, "dtype", None) == np.float64 else x for n, x in arguments.items()}
    return kept, {n: x.astype(np.float64) if getattr(x, "dtype", None) == dtype else x for n, x in kept.items()}


def units(dtype):
    """Unit roundoffs of the computation and of the stored results."""
    return (np.finfo(np.float64 if dtype == np.float64 else np.float32).eps / 2, float(finfo(dtype).eps) / 2)


def sizes(exact, result):
    """Per row the largest |q|.|k| and |logit|, and the number of keys: what rounding grows with."""
    keys = exact["k"].repeat(3, axis=1)
    scale = exact.get("scale", exact["q"].shape[-1] ** -0.5)
    products = scale * np.abs(exact["q"]) @ np.abs(np.swapaxes(keys, -1, -2))
    logits = np.where(result.weights > 0, np.abs(result.logits), 0)
    return products.max(-1), logits.max(-1), exact["k"].shape[2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_online_softmax(name, dtype):
    given, exact = stored({**arrays(), **OPTIONS[name]}, DTYPES[dtype])
    output, lse = online_softmax.attention(**given)
    want = definition(**exact, keep_weights=True)
    compute, unit = units(DTYPES[dtype])
    assert output.dtype == DTYPES[dtype]
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    call = SoftmaxCall(
        **{n: exact[n] for n in "qkv"}, logits=want.logits, weights=want.weights, scale=exact.get("scale")
    )
    bound = softmax_bounds(call, Rounding(accumulate=compute, stored=max(unit, compute)))["output"].worst
    assert (np.abs(output.astype(np.float64) - want.output) <= bound).all()
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want.lse))
    products, logits, n = sizes(exact, want)
    # An error of the logits passes to the lse undiminished; the sum of n exponentials adds n roundings.
    bound = compute * ((10 + 8) * products + 6 * logits + 2 * n + 8)
    finite = np.isfinite(want.lse)
    assert (np.abs(lse - np.where(finite, want.lse, 0)) <= bound)[finite].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_online_softmax_backward(name, dtype):
    given, exact = stored({**arrays(3), **OPTIONS[name]}, DTYPES[dtype])
    rng = np.random.default_rng(8)
    d_output = rng.standard_normal((2, 6, 53, 7)).astype(DTYPES[dtype])
    d_lse = rng.standard_normal((2, 6, 53)).astype(np.float32)
    steps = ScaledDotProduct(exact, {"output": d_output, "lse": d_lse})
    want = steps.gradient()
    found = dict(zip("qkv", online_softmax.attention_backward(d_output, **given, d_lse=d_lse), strict=True))
    # Each gradient is a sum of products; `size` is that sum with absolute values.  A weight is off by a relative error that
    # grows like the rounding of its logit, d_weights and delta by that of their sums over channels and keys.
    products, logits, n = sizes(exact, definition(**exact, keep_weights=True))
    d_o, v = np.abs(d_output.astype(np.float64)), np.abs(steps.values_of_head)
    rows = np.sum(d_o * np.abs(steps.output), -1) + np.abs(d_lse)
    d_logits = steps.weights * (d_o @ np.swapaxes(v, -1, -2) + rows[..., None]) * steps.scale
    size = {
        "q": d_logits @ np.abs(steps.keys_of_head),
        "k": np.swapaxes(d_logits, -1, -2) @ np.abs(steps.q),
        "v": np.swapaxes(steps.weights, -1, -2) @ d_o,
    }
    compute, unit = units(DTYPES[dtype])
    growth = compute * ((10 + 8) * products.max() + 6 * logits.max() + 2 * n + 32)
    for n, g in found.items():
        assert g.dtype == DTYPES[dtype]
        whole = size[n] if n == "q" else np.einsum("gh,bhkd->bgkd", steps.query_heads_summed, size[n])
        bound = growth * whole + unit * np.abs(want[n]) + float(finfo(DTYPES[dtype]).smallest_subnormal)
        assert (np.abs(g.astype(np.float64) - want[n]) <= bound).all()


@pytest.mark.parametrize("poisoned", ["k", "v"])
@pytest.mark.parametrize("hidden_by", ["mask", "bias"])
def test_online_softmax_keeps_poison_in_its_rows(poisoned, hidden_by):
    given = arrays(h=2)
    seen = np.ones((53, 97), dtype=bool)
    seen[:, 60] = np.arange(53) < 2

    def hide(seen):
        return {"mask": seen} if hidden_by == "mask" else {"bias": np.where(seen, 0.0, -np.inf)}

    clean = online_softmax.attention(**given, **hide(seen))
    d_output = np.ones_like(clean[0])
    clean_gradients = online_softmax.attention_backward(d_output, **given, **hide(seen))
    given[poisoned][:, :, 60] = np.nan
    output, lse = online_softmax.attention(**given, **hide(seen))
    assert np.isnan(output[:, :, :2]).all()
    np.testing.assert_allclose(output[:, :, 2:], clean[0][:, :, 2:], rtol=0, atol=1e-15)
    np.testing.assert_array_equal(lse[:, :, 2:], clean[1][:, :, 2:])
    d_q, _, _ = online_softmax.attention_backward(d_output, **given, **hide(seen))
    assert np.isnan(d_q[:, :, :2]).all()
    np.testing.assert_allclose(d_q[:, :, 2:], clean_gradients[0][:, :, 2:], rtol=0, atol=1e-14)
    seen[:, 60] = False
    hidden = online_softmax.attention(**given, **hide(seen))
    assert np.isfinite(hidden[0]).all()
    assert all(np.isfinite(g).all() for g in online_softmax.attention_backward(d_output, **given, **hide(seen)))


def test_online_softmax_far_below_zero():
    """Logits of about -1e5 in float32: a finite sentinel, or a maximum that starts at 0, would lose the row."""
    given, exact = stored({**arrays(), "bias": np.full((53, 97), -1e5)}, np.float32)
    output, lse = online_softmax.attention(**given, causal=True, align="lower_right")
    want = definition(**exact, causal=True, align="lower_right")
    assert np.abs(lse - want.lse).max() <= 1e5 * 2**-23
    # The logits keep an absolute error of 1e5 * 2^-24 each, which the weights feel as a relative one.
    assert np.abs(output - want.output).max() <= 4 * 1e5 * 2**-24 * np.abs(given["v"]).max()


@pytest.mark.parametrize("sizes", [{"b": 0}, {"q": 0}, {"k": 0}, {"q": 1, "k": 1}, {"k": 40}, {"q": 24, "k": 81}])
def test_online_softmax_sizes(sizes):
    given = arrays(**sizes)
    output, lse = online_softmax.attention(**given)
    want = definition(**given)
    np.testing.assert_allclose(output, want.output, rtol=0, atol=1e-14)
    np.testing.assert_allclose(lse, want.lse, rtol=1e-14)
    gradients = online_softmax.attention_backward(np.ones_like(output), **given)
    assert [g.shape for g in gradients] == [given[n].shape for n in "qkv"]


def difference(name, call, **changed):
    """Largest difference between a broken kernel and the definition (of other options), in output and lse."""
    output, lse = load(f"broken/{name}").attention(**call)
    assert output.dtype == call["q"].dtype
    want = definition(**{**call, **changed})
    same = np.array_equal(np.isfinite(lse), np.isfinite(want.lse))
    worst = (
        np.abs(output - want.output).max(),
        np.abs(np.where(np.isfinite(lse), lse - np.nan_to_num(want.lse), 0)).max(),
    )
    return max(worst) if same else np.inf


RIGHT = 1e-13
lower_right = {"align": "lower_right"}


def small(**sizes):
    return arrays(**{"q": 5, "k": 9, "d": 6, "e": 4, **sizes})


def test_causal_upper_left():
    for sizes in ({"k": 5}, {}, {"q": 9, "k": 5}):
        assert difference("causal_upper_left", small(**sizes)) < RIGHT
        call = {**small(**sizes), "causal": True}
        assert difference("causal_upper_left", call, align="upper_left") < RIGHT
        assert (difference("causal_upper_left", call, **lower_right) < RIGHT) == (sizes == {"k": 5})


def test_gqa_tiled():
    for sizes, right in (({}, False), ({"g": 6}, True), ({"g": 1}, True), ({"h": 2}, True)):
        assert (difference("gqa_tiled", small(**sizes)) < RIGHT) == right
        assert difference("gqa_tiled", small(**sizes), head_map="tile") < RIGHT


def test_softcap_after_mask():
    mask = np.random.default_rng(0).random((2, 1, 5, 9)) < 0.6
    for given, right in (
        ({}, True),
        ({"mask": mask}, True),
        ({"softcap": 1.5}, True),
        ({"softcap": 1.5, "mask": mask}, False),
    ):
        assert (difference("softcap_after_mask", {**small(), **given}) < RIGHT) == right
    call = {**small(), "softcap": 40.0, "mask": mask | (np.arange(9) < 1)}
    assert difference("softcap_after_mask", call) < RIGHT  # exp(-40) is invisible


def test_tail_not_masked():
    for k, right in ((64, True), (128, True), (9, False), (65, False), (127, False)):
        call = small(k=k)
        assert (difference("tail_not_masked", call) < RIGHT) == right
        padded = {n: np.pad(call[n], ((0, 0), (0, 0), (0, -k % 64), (0, 0))) for n in "kv"}
        assert difference("tail_not_masked", call, **padded) < RIGHT


def test_window_one_too_wide():
    for window, meant in (((2, 1), (3, 1)), ((0, 0), (1, 0)), ((1, None), (2, None))):
        call = {**small(), "window": window}
        assert difference("window_one_too_wide", call, **lower_right) > 1e-3
        assert difference("window_one_too_wide", call, window=meant, **lower_right) < RIGHT
    for window in (None, (9, 1), (None, 2)):
        assert difference("window_one_too_wide", {**small(), "window": window}, **lower_right) < RIGHT


def test_scale_from_padded_head():
    for d, right in ((6, False), (32, True), (33, False), (64, True)):
        assert (difference("scale_from_padded_head", small(d=d)) < RIGHT) == right
        assert difference("scale_from_padded_head", {**small(d=d), "scale": 0.3}) < RIGHT
    assert difference("scale_from_padded_head", small(), scale=32**-0.5) < RIGHT


def test_sink_dropped():
    sinks = np.random.default_rng(0).standard_normal(6)
    assert difference("sink_dropped", small()) < RIGHT
    assert difference("sink_dropped", {**small(), "sinks": sinks}) > 1e-2
    assert difference("sink_dropped", {**small(), "sinks": sinks}, sinks=None) < RIGHT
    assert difference("sink_dropped", {**small(), "sinks": np.full(6, -60.0)}) < RIGHT


def test_gqa_gradient_not_summed():
    broken = load("broken/gqa_gradient_not_summed")
    rng = np.random.default_rng(2)
    for g in (2, 6):
        call = small(g=g)
        assert difference("gqa_gradient_not_summed", call) < RIGHT
        d_output, d_lse = rng.standard_normal((2, 6, 5, 4)), rng.standard_normal((2, 6, 5))
        found = broken.attention_backward(d_output, **call, d_lse=d_lse)
        right = online_softmax.attention_backward(d_output, **call, d_lse=d_lse)
        assert np.abs(found[0] - right[0]).max() < RIGHT
        for wrong, summed in zip(found[1:], right[1:], strict=True):
            assert (np.abs(wrong - summed).max() < RIGHT) == (g == 6)
    alone = {"q": call["q"][:, :3], "k": call["k"][:, :1], "v": call["v"][:, :1]}
    last = online_softmax.attention_backward(d_output[:, 2:3], alone["q"][:, 2:], alone["k"], alone["v"])
    found = broken.attention_backward(d_output[:, :3], **alone)
    assert np.abs(found[1] - last[1]).max() < RIGHT


@pytest.mark.parametrize("name", sorted(p.stem for p in (EXAMPLES / "broken").glob("*.py")))
@pytest.mark.parametrize("dtype", DTYPES)
def test_broken_kernels_keep_the_dtype_and_are_right_where_nothing_is_asked(name, dtype):
    """One key head, 64 keys, 32 channels, no option: every one of them is right."""
    given, exact = stored(small(g=1, k=64, d=32), DTYPES[dtype])
    output, lse = load(f"broken/{name}").attention(**given)
    assert output.dtype == DTYPES[dtype]
    want = definition(**exact, keep_weights=True)
    compute, unit = units(DTYPES[dtype])
    call = SoftmaxCall(**{n: exact[n] for n in "qkv"}, logits=want.logits, weights=want.weights)
    bound = softmax_bounds(call, Rounding(accumulate=compute, stored=max(unit, compute)))["output"].worst
    assert (np.abs(output.astype(np.float64) - want.output) <= bound).all()
    assert np.abs(lse - want.lse).max() <= compute * 400
