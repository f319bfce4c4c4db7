"""The bound of softmax attention against real errors."""

import numpy as np
import pytest
from precision.examples import attention

from refattn.precision import Rounding, SoftmaxCall, round_to, rounding, softmax_bounds, unit_roundoff


def output_bound(q, k, v, *, logits, weights, unit="float32", operands=0.0, stored=None, tiny=0.0, **call):
    """Bounds of the output alone; units by name or as numbers."""
    units = [
        x if isinstance(x, float) else unit_roundoff(x) for x in (unit, operands, unit if stored is None else stored)
    ]
    units = Rounding(accumulate=units[0], operands=units[1], stored=units[2], tiny=tiny)
    sizes = [x[None] if x.ndim == 2 else x for x in (q, k, v)]
    given = SoftmaxCall(**dict(zip("qkv", sizes, strict=True)), logits=logits, weights=weights, **call)
    return softmax_bounds(given, units)["output"]


def exact(q, k, v, *, scale, bias=0.0, cap=None, sink=-np.inf):
    """Float64 truth: output, logits, weights, and the slope of the cap."""
    s = scale * (q @ k.mT)
    slope = None
    if cap:
        s = cap * np.tanh(s / cap)
        slope = 1 - (s / cap) ** 2
    s = s + bias
    top = np.maximum(s.max(axis=-1, keepdims=True), sink)
    top = np.where(np.isfinite(top), top, 0.0)
    e = np.exp(s - top)
    total = e.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    p = e / np.where(total > 0, total, 1.0)
    return p @ v, s, p, slope


def evaluations(q, k, v, *, scale, bias=0.0, cap=None, sink=-np.inf, store=lambda x: x):
    """float32 attention in four legal orders; `store` rounds the weights where a kernel would."""
    f = np.float32
    q, k, v = (x.astype(f) for x in (q, k, v))
    scale, bias, sink = f(scale), np.asarray(bias, f), f(sink)

    def finish(s):
        if cap:
            s = f(cap) * np.tanh(s / f(cap))
        s = s + bias
        top = np.maximum(s.max(axis=-1, keepdims=True), sink)
        return s, np.where(np.isfinite(top), top, f(0))

    def divide(a, total):
        return a / np.where(total > 0, total, f(1))

    s, top = finish(scale * (q @ k.mT))
    e = np.exp(s - top)
    total = e.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    yield store(divide(e, total)) @ v  # normalise first
    s, top = finish((q * scale) @ k.mT)  # scaled queries, base 2, sums from left to right, reciprocal last
    base_2 = f(np.log2(np.e))
    e = np.exp2(s * base_2 - top * base_2)
    total = np.add.accumulate(e, axis=-1)[..., -1:] + np.exp(sink - top)
    yield (store(e) @ v) * divide(f(1), total)
    s = np.zeros(s.shape, f)
    for i in range(q.shape[-1]):  # channels from left to right
        s = s + q[..., i : i + 1] * k[..., None, :, i]
    s, _ = finish(s * scale)
    for order in (slice(None), slice(None, None, -1)):  # online, blocks of 16 keys from either end
        running = np.full((*s.shape[:-1], 1), sink, f)
        total = np.where(np.isfinite(running), f(1), f(0))
        output = np.zeros((*s.shape[:-1], v.shape[-1]), f)
        for at in range(0, s.shape[-1], 16):
            block, values = s[..., order][..., at : at + 16], v[..., order, :][..., at : at + 16, :]
            top = np.maximum(running, block.max(axis=-1, keepdims=True))
            shift = np.where(np.isfinite(top), top, f(0))
            rescale, e = np.exp(running - shift), np.exp(block - shift)
            total = total * rescale + e.sum(axis=-1, keepdims=True)
            output = output * rescale + store(e) @ values
            running = top
        yield divide(output, total)


SETTINGS = [(1, 64), (1, 256), (1, 1024), (4, 256), (4, 1024), (10, 256), (20, 256)]


def draw(amplitude, keys, dtype, *, d=64, e=48):
    rng = np.random.default_rng([amplitude, keys])
    arrays = [rng.standard_normal(shape) for shape in [(2, 24, d), (2, keys, d), (2, keys, e)]]
    arrays[0] *= amplitude
    return [round_to(x, dtype) for x in arrays]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("amplitude, keys", SETTINGS)
def test_right_evaluations_stay_within_both_bounds(amplitude, keys, dtype):
    """Calibration of the yardstick: at most 2 rss at the worst element of thousands, at most 0.4 at the median.

    With many keys and large logits it leaves room for a lse that is summed key by key, which none of these does.
    """
    q, k, v = draw(amplitude, keys, dtype)
    output, s, p, _ = exact(q, k, v, scale=1 / 8)
    stored = None if dtype == "float32" else dtype
    bound = output_bound(q, k, v, logits=s, weights=p, operands=stored or 0.0, stored=stored)
    assert bound.rss.shape == bound.worst.shape == output.shape
    for candidate in evaluations(q, k, v, scale=1 / 8, store=lambda x: round_to(x, dtype)):
        error = np.abs(round_to(candidate, dtype).astype(np.float64) - output)
        assert np.all(error <= bound.worst)
        ratio = error / bound.rss
        assert ratio.max() <= 2
        assert 0 < np.median(ratio) <= 0.4


@pytest.mark.parametrize(
    "options",
    [
        {"cap": 5.0},
        {"cap": 5.0, "bias": True},
        {"sink": 6.0},
        {"sink": -3.0},
        {"bias": True},
        {"bias": -1e4},  # all logits negative
        {"bias": 1e4},
        {"offset": 100.0},  # values with a common offset
        {"scale": 1.0},  # one key takes all
    ],
)
def test_the_worst_case_holds_with_options(options):
    rng = np.random.default_rng(7)
    q, k, v = draw(3, 100, "float32")
    v = round_to(v + options.get("offset", 0.0), "float32")
    bias = options.get("bias", 0.0)
    if bias is True:
        bias = round_to(3 * rng.standard_normal((2, 24, 100)), "float32")
        bias[rng.random(bias.shape) < 0.4] = -np.inf
        bias[:, 5, :] = -np.inf  # a row that sees nothing
    call = {
        "scale": options.get("scale", 1 / 8),
        "bias": bias,
        "cap": options.get("cap"),
        "sink": options.get("sink", -np.inf),
    }
    output, s, p, _ = exact(q, k, v, **call)
    sinks = None if np.isneginf(call["sink"]) else np.full(2, call["sink"])
    added = None if np.ndim(bias) == 0 and bias == 0 else np.asarray(bias)
    how = {"scale": call["scale"], "softcap": call["cap"], "sinks": sinks, "bias": added}
    bound = output_bound(q, k, v, logits=s, weights=p, **how)
    assert np.isfinite(bound.worst).all()
    for candidate in evaluations(q, k, v, **call):
        error = np.abs(candidate.astype(np.float64) - output)
        assert np.all(error <= bound.worst)
        assert np.all(error <= 3 * bound.rss)
    if options.get("bias") is True:
        assert np.all(bound.worst[:, 5] == 0)
        assert np.all(bound.rss[:, 5] == 0)


@pytest.mark.parametrize("accumulate", ["float32", "each"])
@pytest.mark.parametrize("dtype", ["tf32", "float16", "bfloat16"])
def test_the_worst_case_holds_where_every_operation_is_rounded(dtype, accumulate):
    """Few channels and keys: here the guarantee is only some ten times the error, so a term too few would show."""
    xp = rounding(dtype, accumulate=accumulate)
    rng = np.random.default_rng(10)
    q, k, v = (round_to(rng.standard_normal((400, n, 4)), dtype) for n in (5, 7, 7))
    mask = np.tri(5, 7, 2, dtype=bool)
    s = np.where(mask, 0.5 * (q @ k.mT), -np.inf)
    p = np.exp(s) / np.exp(s).sum(axis=-1, keepdims=True)
    output, _ = attention(*(xp.asarray(x.astype(np.float32)) for x in (q, k, v)), xp.asarray(mask))
    ratio = (
        np.abs(xp.to_numpy(output) - p @ v)
        / output_bound(q, k, v, logits=s, weights=p, unit=dtype, operands=dtype).worst
    )
    assert 0.005 < ratio.max() <= 1


def test_bounds_see_a_zero_padded_tail():
    """64 real keys in a tile of 128: the zeros counted in the denominator are far beyond any rounding."""
    for dtype, stored in (("float32", None), ("bfloat16", "bfloat16")):
        q, k, v = draw(1, 64, dtype)
        output, s, p, _ = exact(q, k, v, scale=1 / 8)
        bound = output_bound(q, k, v, logits=s, weights=p, operands=stored or 0.0, stored=stored)
        padded = [np.concatenate([x, np.zeros_like(x)], axis=-2) for x in (k, v)]
        wrong = exact(q, *padded, scale=1 / 8)[0]
        error = np.abs(round_to(wrong, dtype) - output)
        assert (error / bound.rss).max() > 10
        assert np.median(error / bound.rss) > 10
        assert (error / bound.worst).max() > 10


def test_float16_weights_that_underflow_stay_within_the_worst_case():
    """3000 keys, one of them ahead by 10: the other weights, 4e-5, are subnormal in float16."""
    rng = np.random.default_rng(8)
    q, k, v = np.ones((1, 4, 1)), np.zeros((1, 3000, 1)), round_to(1 + rng.random((1, 3000, 3)), "float16")
    k[:, 0] = 10.0
    output, s, p, _ = exact(q, k, v, scale=1.0)
    bound = output_bound(q, k, v, logits=s, weights=p, scale=1.0, operands="float16", tiny=2.0**-25)
    relative = output_bound(q, k, v, logits=s, weights=p, scale=1.0, operands="float16")
    assert np.all(bound.worst > relative.worst + 3000 * 2.0**-25)
    for candidate in evaluations(q, k, v, scale=1.0, store=lambda x: round_to(x, "float16")):
        assert np.all(np.abs(candidate - output) <= bound.worst)


def test_dropout_factor():
    rng = np.random.default_rng(9)
    q, k, v = draw(3, 96, "float32")
    _, s, p, _ = exact(q, k, v, scale=1 / 8)
    keep = (rng.random(p.shape) < 0.75) / 0.75
    output = (p * keep) @ v
    bound = output_bound(q, k, v, logits=s, weights=p, factor=keep)
    f = np.float32
    single = np.exp((s - s.max(axis=-1, keepdims=True)).astype(f))
    candidate = (single / single.sum(axis=-1, keepdims=True) * keep.astype(f)) @ v.astype(f)
    error = np.abs(candidate - output)
    assert np.all(error <= bound.worst)
    assert np.all(error <= 3 * bound.rss)
    # Without the factor the bound is another one.
    assert not np.allclose(bound.rss, output_bound(q, k, v, logits=s, weights=p).rss, rtol=0.05)


def test_what_nobody_sees_does_not_enter():
    q, k, v = draw(1, 20, "float32")
    clean = output_bound(q, k[:, :12], v[:, :12], **logits_and_weights(q, k[:, :12], v[:, :12]))
    poisoned_k, poisoned_v = k.copy(), v.copy()
    poisoned_k[:, 12:16], poisoned_k[:, 16:] = np.nan, 1e30
    poisoned_v[:, 12:18], poisoned_v[:, 18:] = 1e30, np.inf
    given = logits_and_weights(q, k[:, :12], v[:, :12])
    padded = {
        "logits": np.concatenate([given["logits"], np.full((2, 24, 8), np.nan)], axis=-1),
        "weights": np.concatenate([given["weights"], np.zeros((2, 24, 8))], axis=-1),
    }
    poisoned = output_bound(q, poisoned_k, poisoned_v, **padded)
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)  # sums of 12 and of 20 terms, in float64


def logits_and_weights(q, k, v):
    _, s, p, _ = exact(q, k, v, scale=q.shape[-1] ** -0.5)
    return {"logits": s, "weights": p}


@pytest.mark.parametrize("units", [(2.0**-24, 2.0**-8, 2.0**-8), (2.0**-12, 0.0, 2.0**-12)])
def test_the_output_has_the_formula_of_the_docstring(units):
    """Spelled out with the (q, k, e) arrays that are avoided, with a cap and a sink as one more key."""
    q, k, v = draw(2, 30, "bfloat16", d=6, e=5)
    sink = 1.5
    output, s, p, slope = exact(q, k, v, scale=0.5, cap=2.0, sink=sink)
    u, w, o = units
    x = 0.5 * (q @ k.mT)
    v_x = 0.25 * u**2 * 6 * ((q**2) @ (k**2).mT + (q @ k.mT) ** 2)
    v_s = slope**2 * v_x + u**2 * (s**2 + s**2 + (slope * x) ** 2)
    top = np.maximum(s.max(axis=-1, keepdims=True), sink)
    lse = np.log(np.exp(s).sum(axis=-1, keepdims=True) + np.exp(sink))
    v_e = v_s + u**2 * ((s - top) ** 2 + 4)
    share, v_sink = np.exp(sink - lse), u**2 * (2 * sink**2 + (sink - top) ** 2 + 4)
    away = v[:, None, :, :] - output[:, :, None, :]
    merges = u**2 * (lse**2 + top**2) * 10  # 30 keys: n / 3

    stored = (p**2) @ (v**2)
    square = np.sum((p**2 * v_e)[..., None] * away**2, axis=-2) + share**2 * v_sink * output**2
    square += u**2 * 30 * (stored + output**2) + merges * (output**2 + stored)
    square += w**2 * stored + o**2 * output**2 + u**2 / 4 * np.square(v).max(axis=-2, keepdims=True)
    call = {"logits": s, "weights": p, "scale": 0.5, "softcap": 2.0, "sinks": np.full(2, sink)}
    bound = output_bound(q, k, v, **call, unit=u, operands=w, stored=o)
    np.testing.assert_allclose(bound.rss, np.sqrt(square), rtol=1e-9)


def test_a_hopeless_format_gives_a_huge_bound_and_no_nan():
    q, k, v = draw(20, 64, "float32")
    v[:, :, 0] = 0.0
    _, s, p, _ = exact(q, k, v, scale=1 / 8)
    bound = output_bound(q, k, v, logits=s, weights=p, unit="float8_e5m2")
    assert not np.isnan(bound.rss).any()
    assert np.isfinite(bound.worst).all()
    assert np.all(bound.worst[..., 1:] > 1e30)


def test_bound_refuses_single_precision():
    q, k, v = (x.astype(np.float32) for x in draw(1, 20, "float32"))
    with pytest.raises(TypeError, match="q: float32, expected a float64 NumPy array"):
        output_bound(q, k, v, logits=q @ k.mT, weights=q @ k.mT)
