"""Formats against their bit patterns."""

import math

import array_api_strict
import ml_dtypes
import numpy as np
import pytest

from refattn.precision import round_to, ulp_distance, unit_roundoff

NARROW = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


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
