"""Floating-point formats: what each can hold, rounding to it, and the distance of two of its values."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from refattn.arrays import dtype_name, to_numpy

__all__ = ["FORMATS", "format_of", "round_to", "ulp_distance", "unit_roundoff"]

Array = Any


class Format(NamedTuple):
    """A binary format: bits of the significand (with the leading one), least normal exponent, largest value."""

    precision: int
    least_exponent: int  # 2**least_exponent is the smallest normal number
    largest: float
    infinite: bool = True


# Sources: IEEE 754-2019 (float16, 32, 64), the bfloat16 and TF32 layouts, OCP 8-bit Floating Point (float8).
FORMATS = {
    "float64": Format(53, -1022, float(np.finfo(np.float64).max)),
    "float32": Format(24, -126, float(np.finfo(np.float32).max)),
    "tf32": Format(11, -126, (2 - 2**-10) * 2.0**127),
    "bfloat16": Format(8, -126, (2 - 2**-7) * 2.0**127),
    "float16": Format(11, -14, 65504.0),
    "float8_e5m2": Format(3, -14, 57344.0),
    "float8_e4m3fn": Format(4, -6, 448.0, infinite=False),
}
# From float32 these casts round once and are up to thirty times faster than the arithmetic of round_to.
_CASTS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_REAL_PART = {"complex64": "float32", "complex128": "float64"}


def unit_roundoff(dtype: Any) -> float:
    """Largest relative error of rounding to nearest: 2^-p for a significand of p bits (half an ulp of 1).

    Parameters
    ----------
    dtype : dtype of any library, or its name
        ``float16``, ``bfloat16``, ``tf32`` (by name), ``float32``, ``float64``, ``longdouble``, ``float8_e4m3fn``,
        ``float8_e5m2``, or a complex dtype, which counts as its parts.

    Examples
    --------
    >>> unit_roundoff("bfloat16") == 2**-8, unit_roundoff(np.float32) == 2**-24
    (True, True)
    """
    name = dtype_name(dtype)
    name = _REAL_PART.get(name, name)
    if name in ("longdouble", np.dtype(np.longdouble).name):
        return float(np.finfo(np.longdouble).eps / 2)
    return 2.0 ** -format_of(name).precision


def format_of(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"dtype: {name!r} is not a format known here, expected one of {', '.join(FORMATS)}")
    return FORMATS[name]


def round_to(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Nearest values that `dtype` can hold, ties to even, in the dtype of `x`.

    float32 and float64 are rounded once, straight to the format. (A cast of float64 through float32 rounds twice, and
    a value just beside a tie then goes the wrong way.) Subnormal numbers are kept. Beyond the largest value the
    result is infinite as IEEE 754 has it, or NaN in ``float8_e4m3fn``, which has no infinity.

    Parameters
    ----------
    x : NumPy array, float32 or float64
    dtype : dtype or name
        As in `unit_roundoff`, longdouble excepted; a format as wide as `x` changes nothing.

    Examples
    --------
    >>> round_to(np.array([1 + 2**-8, 1 + 3 * 2**-8]), "bfloat16").tolist()       # ties: to 1 and to 1 + 4 / 256
    [1.0, 1.015625]
    """
    x = np.asarray(x)
    if x.dtype not in (np.float32, np.float64):
        raise TypeError(f"x: dtype {x.dtype}, expected float32 or float64")
    name = dtype_name(dtype)
    target = format_of(name)
    if target.precision >= FORMATS[x.dtype.name].precision:
        return x.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        if x.dtype == np.float32 and name in _CASTS:
            return x.astype(_CASTS[name]).astype(np.float32)
        # x = fraction * 2**exponent with 1/2 <= |fraction| < 1: an ulp is 2**(exponent - precision), at least that of
        # the smallest normal number.
        exponent = np.frexp(x)[1]
        ulp = np.maximum(exponent, target.least_exponent + 1) - target.precision
        rounded = np.ldexp(np.rint(np.ldexp(x, -ulp)), ulp)
        beyond = np.abs(rounded) > target.largest
    if beyond.any():
        rounded = np.where(beyond, np.copysign(np.inf if target.infinite else np.nan, x), rounded)
    return rounded.astype(x.dtype, copy=False)


def ulp_distance(x: Array, y: Array) -> np.ndarray:
    """How many representable steps lie between `x` and `y`, element by element.

    Parameters
    ----------
    x, y : arrays of one real dtype: float16, bfloat16, float32 or float64
        They broadcast against each other.

    Returns
    -------
    NumPy array of uint64
        0 where equal; +0 and -0 are the same value; infinity is one step beyond the largest finite value. Two NaNs
        are at distance 0, a NaN and a number at the largest uint64.

    Raises
    ------
    TypeError
        For different dtypes, and for others than the four (longdouble has unused bits).
    """
    x, y = to_numpy(x), to_numpy(y)
    if x.dtype != y.dtype:
        raise TypeError(f"ulp_distance: dtypes {x.dtype} and {y.dtype}, expected one dtype")
    if x.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
        raise TypeError(f"ulp_distance: dtype {x.dtype}, expected float16, bfloat16, float32 or float64")
    bits = 8 * x.dtype.itemsize

    def magnitude(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Without the sign bit, the bits of floats count upwards with their absolute value."""
        raw = np.ascontiguousarray(z).view(f"u{z.dtype.itemsize}").reshape(z.shape).astype(np.uint64)
        return raw & np.uint64(2 ** (bits - 1) - 1), raw >> np.uint64(bits - 1)

    (size_x, sign_x), (size_y, sign_y) = magnitude(x), magnitude(y)
    steps = np.where(sign_x == sign_y, np.maximum(size_x, size_y) - np.minimum(size_x, size_y), size_x + size_y)
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    steps = np.where(nan_x ^ nan_y, np.uint64(2**64 - 1), steps)
    return np.where(nan_x & nan_y, np.uint64(0), steps)
