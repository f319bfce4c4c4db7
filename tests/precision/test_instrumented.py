"""Instrumented namespaces against plain evaluation."""

import functools
import gc

import array_api_compat
import array_api_strict
import numpy as np
import pytest
from precision.examples import attention

from refattn.arrays import namespace, to_numpy
from refattn.contraction import einsum_vjp
from refattn.precision import counting, round_to, rounding, unit_roundoff


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
