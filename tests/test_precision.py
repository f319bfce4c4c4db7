"""Formats against their bit patterns, instrumented namespaces against plain evaluation, the bound against real errors."""

import functools
import gc
import math

import array_api_compat
import array_api_strict
import ml_dtypes
import numpy as np
import pytest

from refattn.arrays import namespace, to_numpy
from refattn.contraction import einsum, einsum_vjp
from refattn.precision import counting, output_bound, round_to, rounding, ulp_distance, unit_roundoff

NARROW = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


# Formats


@pytest.mark.parametrize(
    "dtype, exponent",
    [
        ("float16", -11),
        (ml_dtypes.bfloat16, -8),
        ("tf32", -11),
        (np.float32, -24),
        (np.dtype("float64"), -53),
        (array_api_strict.float32, -24),
        ("complex128", -53),
        (ml_dtypes.float8_e4m3fn, -4),
        ("float8_e5m2", -3),
    ],
)
def test_unit_roundoff(dtype, exponent):
    assert unit_roundoff(dtype) == 2.0**exponent


def test_unit_roundoff_of_longdouble_is_the_platforms():
    one = np.longdouble(1)
    unit = np.longdouble(unit_roundoff(np.longdouble))
    assert unit_roundoff("longdouble") == unit
    assert one + unit == one  # a tie, to even
    assert one + unit * 1.5 > one


def test_unit_roundoff_refuses_other_names():
    with pytest.raises(ValueError, match="'int32' is not a format known here, expected one of float64, float32, tf32"):
        unit_roundoff(np.int32)


def every_value(name):
    """All finite values of a format, ascending, from its bit patterns."""
    kind = NARROW[name]
    bits = 8 * np.dtype(kind).itemsize
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = np.arange(2**bits, dtype=f"u{bits // 8}").view(kind).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


@pytest.mark.parametrize("name", NARROW)
def test_round_to_keeps_values_and_takes_ties_to_even(name):
    values = every_value(name)
    assert np.array_equal(round_to(values, name), values)
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2  # exact in float64
    # The even neighbour is the one whose last significand bit is 0.
    even = np.where(low.astype(NARROW[name]).view(f"u{np.dtype(NARROW[name]).itemsize}") % 2 == 0, low, high)
    assert np.array_equal(round_to(middle, name), even)
    # One float64 step off the tie decides; a cast through float32 would fall back onto it.
    assert np.array_equal(round_to(np.nextafter(middle, -np.inf), name), low)
    assert np.array_equal(round_to(np.nextafter(middle, np.inf), name), high)


@pytest.mark.parametrize("name", NARROW)
def test_round_to_from_float32_equals_the_cast(name):
    bits = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32)
    x = np.append(bits.view(np.float32), np.float32([0.0, -0.0, np.inf, -np.inf, np.nan]))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(NARROW[name]).astype(np.float32)
        widened = x.astype(np.float64)
    for rounded in (round_to(x, name), round_to(widened, name).astype(np.float32)):
        assert np.array_equal(rounded, expected, equal_nan=True)
        zero = expected == 0
        assert np.array_equal(np.signbit(rounded[zero]), np.signbit(expected[zero]))
    assert round_to(x, name).dtype == np.float32


def test_round_to_tf32_and_beyond_the_largest_value():
    u = 2.0**-11
    x = np.float32([1 + u, 1 + 3 * u, 1 + u * 1.001, -1 - u, 3.4025e38, -np.inf])
    assert round_to(x, "tf32").tolist() == [1.0, 1 + 4 * u, 1 + 2 * u, -1.0, math.inf, -math.inf]
    over = np.array([464.0, 464.1, 65519.9, 65520.0])
    assert np.array_equal(round_to(over, "float8_e4m3fn"), [448.0, np.nan, np.nan, np.nan], equal_nan=True)
    assert round_to(over, "float16").tolist() == [464.0, 464.0, 65504.0, math.inf]
    assert np.array_equal(round_to(np.array([0.1]), "float32"), [np.float64(np.float32(0.1))])


def test_round_to_refuses_other_arrays():
    with pytest.raises(TypeError, match="x: dtype int64, expected float32 or float64"):
        round_to(np.arange(3), "bfloat16")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_ulp_distance(dtype):
    def step(x, n):
        bits = np.array([x], dtype).view(f"u{np.dtype(dtype).itemsize}")
        return (bits + bits.dtype.type(n)).view(dtype)

    one = np.array([1.0], dtype)
    assert ulp_distance(one, step(1.0, 5)).tolist() == [5]
    assert ulp_distance(step(1.0, 5), one).tolist() == [5]
    # Through zero: three subnormals down and two up; both zeros are one value.
    assert ulp_distance(-step(0.0, 3), step(0.0, 2)).tolist() == [5]
    assert ulp_distance(np.array([0.0], dtype), np.array([-0.0], dtype)).tolist() == [0]
    largest = np.array([float(ml_dtypes.finfo(dtype).max)], dtype)
    assert ulp_distance(largest, np.array([np.inf], dtype)).tolist() == [1]
    nan = np.array([np.nan], dtype)
    assert ulp_distance(nan, nan).tolist() == [0]
    assert ulp_distance(nan, one).tolist() == [2**64 - 1]
    assert ulp_distance(np.ones((2, 1), dtype), np.ones(3, dtype)).shape == (2, 3)


def test_ulp_distance_refuses():
    with pytest.raises(TypeError, match="dtypes float32 and float64, expected one dtype"):
        ulp_distance(np.ones(2, np.float32), np.ones(2))
    with pytest.raises(TypeError, match="expected float16, bfloat16, float32 or float64"):
        ulp_distance(np.ones(2, np.longdouble), np.ones(2, np.longdouble))


# Instrumented namespaces


def attention(q, k, v, mask):
    """Softmax attention as mechanisms are written: the namespace of the inputs, slices, selects, in-place parts."""
    xp = namespace(q, k, v)
    logits = einsum("...qd,...kd->...qk", q, k) * q.shape[-1] ** -0.5
    logits = xp.where(mask, logits, xp.asarray(-xp.inf, dtype=logits.dtype))
    top = xp.max(logits, axis=-1, keepdims=True)
    weights = xp.exp(logits - top)
    total = xp.sum(weights, axis=-1, keepdims=True)
    output = xp.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)
    for rows in (slice(0, 2), slice(2, None)):
        output[..., rows, :] += einsum("...qk,...ke->...qe", weights[..., rows, :] / total[..., rows, :], v)
    assert xp.isdtype(output.dtype, "real floating")
    assert output.dtype == xp.float32
    assert bool(xp.all(total >= 1))
    assert float(xp.finfo(xp.float32).eps) == 2.0**-23
    return output, xp.log(total[..., 0]) + top[..., 0]


@pytest.fixture
def inputs():
    rng = np.random.default_rng(2)
    shapes = {"q": (2, 3, 5, 4), "k": (2, 3, 7, 4), "v": (2, 3, 7, 6)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return arrays | {"mask": np.tri(5, 7, 2, dtype=bool)}


BASES = {"numpy": np, "strict": array_api_strict}


@pytest.mark.parametrize("make", [functools.partial(rounding, "float32"), counting])
@pytest.mark.parametrize("base", BASES)
def test_instrumented_evaluation_equals_the_plain_one(inputs, make, base):
    xp = make(base=BASES[base])
    wrapped = {name: xp.asarray(BASES[base].asarray(x)) for name, x in inputs.items()}
    assert array_api_compat.array_namespace(*wrapped.values()) is xp
    for actual, expected in zip(attention(**wrapped), attention(**inputs), strict=True):
        assert namespace(actual) is xp
        assert np.array_equal(xp.to_numpy(actual), expected)
        assert np.array_equal(to_numpy(actual), expected)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32", "float8_e4m3fn"])
def test_rounding_leaves_only_values_of_the_format(inputs, dtype, base):
    xp = rounding(dtype, base=BASES[base])
    wrapped = {name: xp.asarray(BASES[base].asarray(x)) for name, x in inputs.items()}
    output, lse = attention(**wrapped)
    for x in (output, lse, wrapped["q"] * 0.1, wrapped["q"] / 3, xp.mean(wrapped["q"]), xp.exp(wrapped["k"])):
        assert np.array_equal(round_to(xp.to_numpy(x), dtype), xp.to_numpy(x))
    difference = np.abs(xp.to_numpy(output) - attention(**inputs)[0])
    # About ten roundings in a row, none of which is amplified by logits of size 1: within 20 u of max|v| = 3.
    assert 0 < difference.max() <= 20 * unit_roundoff(dtype) * 3


def test_rounding_once_or_each():
    """512 products of 1: the float32 accumulator is exact, bfloat16 stops at 256, float8 (4 bits) at 16."""
    ones = np.ones((1, 512), np.float32)
    for dtype, stop in {"bfloat16": 256, "float8_e4m3fn": 16}.items():
        each = rounding(dtype, accumulate="each")
        a = each.asarray(ones)
        for total in (
            a @ a.mT,
            a[0, :] @ a[0, :],
            a @ a[0, :],
            each.sum(a),
            each.sum(a, axis=1),
            each.sum(a, axis=-1, keepdims=True),
        ):
            assert total.ndim <= 2
            assert each.to_numpy(total).ravel().tolist() == [stop]
        assert each.sum(a, axis=0, keepdims=True).shape == (1, 512)
        assert each.sum(each.asarray(np.ones((2, 3, 4), np.float32)), axis=(0, 2)).shape == (3,)
    once = rounding("bfloat16")
    a = once.asarray(ones)
    assert float((a @ a.mT)[0, 0]) == 512.0
    batched = rounding("float32", accumulate="each")
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, 1, 3, 4)).astype("f"), rng.standard_normal((5, 4, 6)).astype("f")
    product = batched.to_numpy(batched.asarray(a) @ batched.asarray(b))
    # Two sums of four products: each within gamma_4 of the sum of absolute values.
    assert np.all(np.abs(product - a @ b) <= 8 * 2.0**-24 * (np.abs(a) @ np.abs(b)))


def test_rounding_keeps_views():
    xp = rounding("bfloat16")
    x = xp.zeros((2, 3), dtype=xp.float32)
    row = xp.reshape(x, (6,))[3:]
    row += 0.1
    assert xp.to_numpy(x).tolist() == [[0, 0, 0], [0.10009765625] * 3]
    x[0, 1] = 0.3
    assert float(x[0, 1]) == 0.30078125


def test_rounding_refuses():
    with pytest.raises(ValueError, match="accumulate: 'half', expected 'float32' or 'each'"):
        rounding("bfloat16", accumulate="half")
    with pytest.raises(ValueError, match="'int8' is not a format known here"):
        rounding("int8")
    xp = rounding("bfloat16")
    with pytest.raises(TypeError, match="holds real arrays, this result is complex64"):
        xp.asarray(np.ones(2, np.complex64))


def test_counting_multiplies_and_elements():
    xp = counting()
    a, b = (xp.asarray(np.ones(shape, np.float32)) for shape in [(2, 1, 3, 4), (5, 4, 6)])
    assert (xp.counts.multiplies, xp.counts.elementwise) == (0, 0)
    product = a @ b
    assert xp.counts.multiplies == 2 * 5 * 3 * 4 * 6
    xp.exp(product)
    xp.sum(product, axis=-1)
    assert xp.counts.elementwise == 2 * product.size
    xp.reshape(product, (-1,))[:3]
    xp.concat([product, product])
    assert xp.counts.elementwise == 2 * product.size
    xp.counts.reset()
    xp.tensordot(a, b, axes=([3], [1]))
    assert (xp.counts.multiplies, xp.counts.elementwise) == (2 * 1 * 3 * 4 * 5 * 6, 0)
    xp.counts.reset()
    arrays = [xp.asarray(np.ones(shape)) for shape in [(2, 3, 5, 4), (3, 7, 4)]]
    d_output = xp.asarray(np.ones((2, 3, 5, 7)))
    einsum_vjp("...hqd,...hkd->...hqk", arrays, d_output)
    assert xp.counts.multiplies == 2 * (2 * 3 * 5 * 7 * 4)


def test_counting_memory():
    xp = counting()
    source = np.ones((100, 10))
    x = xp.asarray(source)
    assert xp.counts.live_bytes == 8000
    view = xp.permute_dims(x, (1, 0))[2:, :]
    wide = xp.broadcast_to(x, (50, 100, 10))
    assert xp.counts.live_bytes == 8000
    y = x + 1
    z = y[:1, :]
    assert xp.counts.live_bytes == 16000
    del y
    gc.collect()
    assert xp.counts.live_bytes == 16000  # z still holds its base
    y = x * 2
    del y, z
    gc.collect()
    assert (xp.counts.live_bytes, xp.counts.peak_bytes) == (8000, 24000)
    del x, view, wide, source
    gc.collect()
    assert xp.counts.live_bytes == 0
    xp.counts.reset()
    assert xp.counts.peak_bytes == 0


def test_arrays_behave_like_the_standards():
    xp = counting()
    x = xp.asarray(np.arange(6.0).reshape(2, 3))
    assert (x.shape, x.ndim, x.size, x.device) == ((2, 3), 2, 6, "cpu")
    assert x.mT.shape == x.T.shape == (3, 2)
    assert float(x[1, 2]) == 5.0
    assert int(xp.sum(x)) == 15
    assert [10, 11, 12][xp.asarray(1)] == 11
    assert bool(xp.all((2 - x == -(x - 2)) & ~(x < 0)))
    assert float((2.0**x)[1, 0]) == 8.0
    x += 1
    rows = x[0, ...]
    rows *= 10  # in place: through the view
    assert xp.to_numpy(x).tolist() == [[10, 20, 30], [4, 5, 6]]
    x[x > 5] = np.float64(0)
    assert xp.to_numpy(x).tolist() == [[0, 0, 0], [4, 5, 0]]
    x[:, 0] = xp.asarray([7.0, 8.0])
    assert [float(part[0]) for part in xp.unstack(x)] == [7.0, 8.0]
    assert xp.unique_counts(x).counts.shape == (4,)
    assert xp.result_type(x, xp.float32) == xp.float64
    assert (x * np.float64(2)).dtype == xp.float64
    assert (xp.astype(x, xp.float32) * np.float64(2)).dtype == xp.float32
    assert repr(x).startswith("counting_")


def test_arrays_do_not_mix_or_leave_silently():
    xp, other = counting(), counting()
    x = xp.asarray(np.ones(3))
    with pytest.raises(TypeError, match="a plain ndarray among arrays of counting_.*bring it in with asarray"):
        x + np.ones(3)
    with pytest.raises(TypeError, match="a plain ndarray"):
        np.ones(3) * x
    with pytest.raises(TypeError, match="an array of counting_"):
        xp.add(x, other.asarray(np.ones(3)))
    with pytest.raises(TypeError, match="several libraries"):
        namespace(x, other.asarray(np.ones(3)))
    with pytest.raises(TypeError, match="use to_numpy"):
        np.asarray(x)
    with pytest.raises(AttributeError, match="'sum' is not an attribute of an array in the array API standard"):
        x.sum()


# Forward error bound


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
    """Calibration of the yardstick: at most 2 rss at the worst element of thousands, 0.02 to 0.4 at the median."""
    q, k, v = draw(amplitude, keys, dtype)
    output, s, p, _ = exact(q, k, v, scale=1 / 8)
    stored = None if dtype == "float32" else dtype
    bound = output_bound(q, k, v, logits=s, weights=p, unit_weights=stored, unit_output=stored)
    assert bound.rss.shape == bound.worst.shape == output.shape
    for candidate in evaluations(q, k, v, scale=1 / 8, store=lambda x: round_to(x, dtype)):
        error = np.abs(round_to(candidate, dtype).astype(np.float64) - output)
        assert np.all(error <= bound.worst)
        ratio = error / bound.rss
        assert ratio.max() <= 2
        assert 0.02 <= np.median(ratio) <= 0.4


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
    output, s, p, slope = exact(q, k, v, **call)
    bound = output_bound(q, k, v, logits=s, weights=p, scale=call["scale"], slope=slope)
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
    ratio = np.abs(xp.to_numpy(output) - p @ v) / output_bound(q, k, v, logits=s, weights=p, unit=dtype).worst
    assert 0.03 < ratio.max() <= 1


def test_bounds_see_a_zero_padded_tail():
    """64 real keys in a tile of 128: the zeros counted in the denominator are far beyond any rounding."""
    for dtype, stored in (("float32", None), ("bfloat16", "bfloat16")):
        q, k, v = draw(1, 64, dtype)
        output, s, p, _ = exact(q, k, v, scale=1 / 8)
        bound = output_bound(q, k, v, logits=s, weights=p, unit_weights=stored, unit_output=stored)
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
    bound = output_bound(q, k, v, logits=s, weights=p, scale=1.0, unit_weights="float16")
    relative = output_bound(q, k, v, logits=s, weights=p, scale=1.0, unit_weights=2.0**-11)
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
    visible = np.ones((2, 24, 20), bool)
    visible[..., 12:] = False
    clean = output_bound(q, k[:, :12], v[:, :12], **logits_and_weights(q, k[:, :12], v[:, :12]))
    poisoned_k, poisoned_v = k.copy(), v.copy()
    poisoned_k[:, 12:16], poisoned_k[:, 16:] = np.nan, 1e30
    poisoned_v[:, 12:18], poisoned_v[:, 18:] = 1e30, np.inf
    given = logits_and_weights(q, k[:, :12], v[:, :12])
    padded = {name: np.concatenate([x, np.full((2, 24, 8), np.nan)], axis=-1) for name, x in given.items()}
    poisoned = output_bound(q, poisoned_k, poisoned_v, visible=visible, **padded)
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)  # sums of 12 and of 20 terms, in float64


def logits_and_weights(q, k, v):
    _, s, p, _ = exact(q, k, v, scale=q.shape[-1] ** -0.5)
    return {"logits": s, "weights": p}


@pytest.mark.parametrize("units", [(2.0**-24, 2.0**-8, 2.0**-9), (2.0**-12, 0.0, 0.0)])
def test_bounds_are_the_formulas_of_the_docstring(units):
    """Spelled out with the (q, k, e) arrays that output_bound avoids, with a cap and a sink as one more key."""
    q, k, v = draw(2, 30, "bfloat16", d=6, e=5)
    sink = 1.5
    output, s, p, slope = exact(q, k, v, scale=0.5, cap=2.0, sink=sink)
    u, u_w, u_o = units
    size = 0.5 * (np.abs(q) @ np.abs(k).mT)
    squares = (0.5 * slope) ** 2 * 6 * ((q**2) @ (k**2).mT + (q @ k.mT) ** 2)

    def with_sink(x, value):
        return np.concatenate([x, np.full((*x.shape[:-1], 1), value)], axis=-1)

    s, size, slope, squares = with_sink(s, sink), with_sink(size, 0), with_sink(slope, 0), with_sink(squares, 0)
    p = np.concatenate([p, 1 - p.sum(axis=-1, keepdims=True)], axis=-1)
    away = np.concatenate([v, np.zeros((2, 1, 5))], axis=-2)[:, None, :, :] - output[:, :, None, :]
    below = s - s.max(axis=-1, keepdims=True)

    square = np.sum((p**2 * u**2 * (squares + s**2 + below**2 + 4))[..., None] * away**2, axis=-2)
    stored = (p[..., :-1] ** 2) @ (v**2)
    square += u**2 * 30 * (stored + output**2) + u_w**2 * stored + u_o**2 * output**2
    options = {"logits": s[..., :-1], "weights": p[..., :-1], "scale": 0.5, "slope": slope[..., :-1]}
    bound = output_bound(q, k, v, **options, unit=u, unit_weights=u_w, unit_output=u_o)
    np.testing.assert_allclose(bound.rss, np.sqrt(square), rtol=1e-9)

    delta = slope * np.expm1(10 * u) * size + u * (4 * size + 2 * np.abs(s) + 2 * np.abs(below) + 4 * 3)
    largest = delta.max(axis=-1, keepdims=True)
    theta = np.expm1(64 * u + u_w)
    moved = p * np.expm1(delta)
    rest = np.exp(largest) * theta * (p[..., :-1] @ np.abs(v) + np.abs(output))

    def total(part):
        return (part + rest) * np.exp(largest + 2 * theta) * (1 + u_o) + u_o * np.abs(output)

    seen = p[..., :-1].sum(axis=-2)
    centre = (seen[:, None, :] @ v) / seen.sum(axis=-1)[:, None, None]
    around = moved[..., :-1] @ np.abs(v - centre) + moved[..., -1:] * np.abs(output)
    around += moved[..., :-1].sum(axis=-1, keepdims=True) * np.abs(output - centre)
    np.testing.assert_allclose(bound.worst, total(around), rtol=1e-9)
    assert np.all(total(np.sum(moved[..., None] * np.abs(away), axis=-2)) <= bound.worst * (1 + 1e-9))


def test_a_common_offset_of_the_values_costs_only_the_sums():
    """Errors of the logits act on v - o, so values near 2^30 leave gamma(2n + 4) on |v| and on |o|, nothing more."""
    q, k, v = draw(4, 64, "float32")
    _, s, p, _ = exact(q, k, v, scale=1 / 8)
    bound = output_bound(q, k, v + 2.0**30, logits=s, weights=p)
    sums = 132 * 2.0**-24 * 2 * 2.0**30
    assert np.all(np.abs(bound.worst / sums - 1) < 0.01)


def test_a_hopeless_format_gives_a_huge_bound_and_no_nan():
    q, k, v = draw(20, 64, "float32")
    v[:, :, 0] = 0.0
    _, s, p, _ = exact(q, k, v, scale=1 / 8)
    bound = output_bound(q, k, v, logits=s, weights=p, unit="float8_e5m2")
    assert np.isfinite(bound.rss).all()
    assert np.isfinite(bound.worst).all()
    assert np.all(bound.worst[..., 1:] > 1e30)


def test_bound_refuses_single_precision():
    q, k, v = (x.astype(np.float32) for x in draw(1, 20, "float32"))
    with pytest.raises(TypeError, match="q: float32, expected a float64 NumPy array"):
        output_bound(q, k, v, logits=q @ k.mT, weights=q @ k.mT)
