"""Floating-point formats, instrumented namespaces, and a forward error bound for softmax attention.

* `unit_roundoff`, `ulp_distance`, `round_to`: what a format can hold.
* `rounding`, `counting`: array API namespaces whose arrays round after every operation, or count what is done to them.
  Mechanisms take the namespace of their inputs, so they run in either without knowing.
* `output_bound`: how far an attention output may be from the exact one by rounding alone.
"""

import functools
import itertools
import math
import operator
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import array_api_compat.numpy
import ml_dtypes
import numpy as np

from refattn.arrays import dtype_name, is_array, is_complex, is_real_floating, to_numpy
from refattn.contraction import einsum

__all__ = ["Bounds", "Counts", "counting", "output_bound", "round_to", "rounding", "ulp_distance", "unit_roundoff"]

Array = Any


class _Format(NamedTuple):
    """A binary format: bits of the significand (with the leading one), least normal exponent, largest value."""

    precision: int
    least_exponent: int  # 2**least_exponent is the smallest normal number
    largest: float
    infinite: bool = True


# Sources: IEEE 754-2019 (float16, 32, 64), the bfloat16 and TF32 layouts, OCP 8-bit Floating Point (float8).
_FORMATS = {
    "float64": _Format(53, -1022, float(np.finfo(np.float64).max)),
    "float32": _Format(24, -126, float(np.finfo(np.float32).max)),
    "tf32": _Format(11, -126, (2 - 2**-10) * 2.0**127),
    "bfloat16": _Format(8, -126, (2 - 2**-7) * 2.0**127),
    "float16": _Format(11, -14, 65504.0),
    "float8_e5m2": _Format(3, -14, 57344.0),
    "float8_e4m3fn": _Format(4, -6, 448.0, infinite=False),
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
    return 2.0 ** -_format(name).precision


def _format(name: str) -> _Format:
    if name not in _FORMATS:
        raise ValueError(f"dtype: {name!r} is not a format known here, expected one of {', '.join(_FORMATS)}")
    return _FORMATS[name]


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
    target = _format(name)
    if target.precision >= _FORMATS[x.dtype.name].precision:
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


# Instrumented namespaces

# Results that share memory with an argument, or copy it without changing a value.
# fmt: off
_VIEWS = {
    "broadcast_arrays", "broadcast_to", "expand_dims", "flip", "getitem", "imag", "matrix_transpose",
    "moveaxis", "permute_dims", "real", "reshape", "squeeze", "unstack",
}
_MOVES = _VIEWS | {
    "arange", "asarray", "astype", "concat", "copy", "empty", "empty_like", "eye", "full", "full_like",
    "linspace", "meshgrid", "ones", "ones_like", "repeat", "roll", "stack", "take", "take_along_axis", "tile",
    "tril", "triu", "zeros", "zeros_like",
}
# fmt: on
_PLAIN_ATTRIBUTES = ("shape", "ndim", "size", "dtype", "device")
_NUMBERS = itertools.count()


class InstrumentedArray:
    """An array of an instrumented namespace: the data of the base library, every operation reported to the namespace.

    It has what the array API standard gives an array and nothing else: methods and functions of one library fail.
    """

    __slots__ = ("_data", "_xp")
    __array_ufunc__ = None  # NumPy arrays on the left leave the operation to us, which refuses the mixture
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: Array, xp: "Instrumented") -> None:
        self._data = data
        self._xp = xp

    def __array_namespace__(self, *, api_version: str | None = None) -> "Instrumented":
        return self._xp

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError(f"an array of {self._xp.__name__} does not become a NumPy array silently: use to_numpy")

    def __getattr__(self, name: str) -> Any:
        if name in _PLAIN_ATTRIBUTES:
            return getattr(self._data, name)
        if name in ("T", "mT"):
            return self._xp.apply("matrix_transpose", operator.attrgetter(name), self)
        raise AttributeError(f"{name!r} is not an attribute of an array in the array API standard")

    def __getitem__(self, key: Any) -> "InstrumentedArray":
        return self._xp.apply("getitem", operator.getitem, self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(value, InstrumentedArray):
            value = self._xp.asarray(value, dtype=self.dtype)
        self._data[self._xp.unwrap(key)] = self._xp.unwrap(value)

    def __repr__(self) -> str:
        return f"{self._xp.__name__}.{self._data!r}"


def _method(name: str, function: Callable, *, reflected: bool = False) -> Callable:
    def method(self: InstrumentedArray, *other: Any) -> Any:
        args = (*other, self) if reflected else (self, *other)
        return self._xp.apply(name, function, *args)

    return method


def _in_place(name: str, function: Callable) -> Callable:
    def method(self: InstrumentedArray, other: Any) -> InstrumentedArray:
        self._data[...] = self._xp.unwrap(self._xp.apply(name, function, self, other))
        return self

    return method


def _conversion(name: str) -> Callable:
    return lambda self: getattr(self._data, name)()


# fmt: off
_BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "matmul": "matmul", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}
_OTHER = {
    "neg": "negative", "pos": "positive", "abs": "abs", "invert": "bitwise_invert", "eq": "equal", "ne": "not_equal",
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
}
# fmt: on
for _symbol, _name in (_BINARY | _OTHER).items():
    _function = getattr(operator, f"__{_symbol}__")
    setattr(InstrumentedArray, f"__{_symbol}__", _method(_name, _function))
    if _symbol in _BINARY:
        setattr(InstrumentedArray, f"__r{_symbol}__", _method(_name, _function, reflected=True))
        setattr(InstrumentedArray, f"__i{_symbol}__", _in_place(_name, _function))
for _symbol in ("bool", "int", "float", "complex", "index"):
    setattr(InstrumentedArray, f"__{_symbol}__", _conversion(f"__{_symbol}__"))


class Instrumented:
    """A namespace over a base one: every function unwraps its arrays, calls the base, and lets `finish` see the result.

    Names are those of the base; dtypes and constants are the base's own.
    """

    def __init__(self, name: str, base: Any) -> None:
        self._base = array_api_compat.numpy if base is np else base
        # array_api_compat tells namespaces apart by their names.
        self.__name__ = f"{name}_{next(_NUMBERS)}"

    def __repr__(self) -> str:
        return f"<namespace {self.__name__} over {self._base.__name__}>"

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._base, name)
        if isinstance(value, (type, types.ModuleType)) or not callable(value):
            return value

        @functools.wraps(value)
        def function(*args: Any, **kwargs: Any) -> Any:
            return self.apply(name, value, *args, **kwargs)

        setattr(self, name, function)
        return function

    def asarray(self, x: Any, /, **options: Any) -> InstrumentedArray:
        """Array of this namespace from one of the base's, a NumPy array, a number or nested lists of numbers."""
        raw = self._base.asarray(x._data if isinstance(x, InstrumentedArray) else x, **options)
        return self._wrap("asarray", (), raw)

    def to_numpy(self, x: InstrumentedArray) -> np.ndarray:
        """The data of an array of this namespace, as a NumPy array."""
        return to_numpy(self.unwrap(x))

    def apply(self, name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the base library that does what the array API calls `name`."""
        raw_args = tuple(map(self.unwrap, args))
        raw_kwargs = {key: self.unwrap(value) for key, value in kwargs.items()}
        return self._wrap(name, raw_args, function(*raw_args, **raw_kwargs))

    def unwrap(self, x: Any) -> Any:
        if isinstance(x, InstrumentedArray):
            if x._xp is not self:
                raise TypeError(f"an array of {x._xp.__name__} among those of {self.__name__}")
            return x._data
        if isinstance(x, (tuple, list)):
            return type(x)(map(self.unwrap, x))
        if isinstance(x, np.generic):
            return x.item()  # a Python number does not widen float32
        if is_array(x) and not isinstance(x, type):
            raise TypeError(f"a plain {type(x).__name__} among arrays of {self.__name__}: bring it in with asarray")
        return x

    def _wrap(self, name: str, args: tuple, raw: Any) -> Any:
        if isinstance(raw, (tuple, list)):
            parts = [self._wrap(name, args, part) for part in raw]
            return type(raw)(*parts) if hasattr(raw, "_fields") else type(raw)(parts)
        if not is_array(raw):
            return raw
        if isinstance(raw, np.generic):
            raw = np.asarray(raw)
        return InstrumentedArray(self.finish(name, args, raw), self)

    def finish(self, name: str, args: tuple, raw: Array) -> Array:
        """What this namespace does with a result of the base library; `args` are the base's arguments."""
        raise NotImplementedError


def rounding(dtype: Any, *, base: Any = np, accumulate: str = "float32") -> Instrumented:
    """Namespace that computes as hardware of a narrow format would: every result is rounded to `dtype`.

    Arrays hold float32 (or float64) data. Each function is evaluated by the base library and its result rounded once
    with `round_to`: a matrix product or a sum thus accumulates in float32. Python numbers are not rounded before use;
    ``finfo`` and the dtypes are those of the data. Infinities stay what they are, as masks need them, also in
    ``float8_e4m3fn``.

    Parameters
    ----------
    dtype : dtype or name
        ``"float16"``, ``"bfloat16"``, ``"tf32"``, ``"float8_e4m3fn"``, ``"float8_e5m2"`` or ``"float32"``.
    base : namespace
        The library that holds the data; assignment into arrays needs one that allows it.
    accumulate : {"float32", "each"}
        ``"each"`` also rounds every product and every partial sum of ``matmul`` and ``sum``, in index order. Other
        reductions (``mean``, ``cumulative_sum``) are rounded once.

    Raises
    ------
    TypeError
        When a result is complex.

    Examples
    --------
    >>> xp = rounding("bfloat16")
    >>> float(xp.sum(xp.asarray(np.full(300, 1, "float32")))), float(xp.asarray(1.0) / 3)
    (300.0, 0.333984375)
    >>> xp = rounding("bfloat16", accumulate="each")
    >>> float(xp.sum(xp.asarray(np.full(300, 1, "float32"))))                    # 256 + 1 is rounded to 256
    256.0
    """
    if accumulate not in ("float32", "each"):
        raise ValueError(f"accumulate: {accumulate!r}, expected 'float32' or 'each'")
    return _Rounding(dtype_name(dtype), base, accumulate == "each")


class _Rounding(Instrumented):
    def __init__(self, dtype: str, base: Any, each: bool) -> None:
        _format(dtype)
        super().__init__(f"rounding_{dtype}", base)
        self._dtype = dtype
        self._each = each

    def apply(self, name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        if self._each and name in ("matmul", "sum"):
            function = self._matmul_each if name == "matmul" else self._sum_each
        return super().apply(name, function, *args, **kwargs)

    def finish(self, name: str, args: tuple, raw: Array) -> Array:
        if name in _VIEWS:
            return raw
        if is_complex(raw.dtype):
            raise TypeError(f"{name}: {self.__name__} holds real arrays, this result is {dtype_name(raw.dtype)}")
        if not is_real_floating(raw.dtype):
            return raw
        values = to_numpy(raw)
        rounded = round_to(values, self._dtype)
        if not _format(self._dtype).infinite:
            rounded = np.where(np.isinf(values), values, rounded)
        return rounded if isinstance(raw, np.ndarray) else self._base.asarray(rounded, device=raw.device)

    def _matmul_each(self, a: Array, b: Array) -> Array:
        column, row = (a.ndim == 1, b.ndim == 1)
        a = a[None, :] if column else a
        b = b[:, None] if row else b
        xp = self._base
        products = (
            self.finish("multiply", (), a[..., :, i : i + 1] * b[..., i : i + 1, :]) for i in range(a.shape[-1])
        )
        shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        total = xp.zeros(shape, dtype=xp.result_type(a, b))
        for product in products:
            total = self.finish("add", (), total + product)
        total = total[..., 0, :] if column else total
        return total[..., 0] if row else total

    def _sum_each(self, x: Array, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Array:
        xp = self._base
        if not is_real_floating(x.dtype):
            return xp.sum(x, axis=axis, dtype=dtype, keepdims=keepdims)
        axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
        axes = tuple(at % x.ndim for at in axes)
        rest = tuple(at for at in range(x.ndim) if at not in axes)
        kept = tuple(x.shape[at] for at in rest)
        terms = xp.reshape(xp.permute_dims(x, axes + rest), (math.prod(x.shape[at] for at in axes), *kept))
        total = xp.zeros(kept, dtype=dtype or x.dtype)
        for i in range(terms.shape[0]):
            total = self.finish("add", (), total + terms[i, ...])
        return xp.reshape(total, tuple(1 if at in axes else n for at, n in enumerate(x.shape))) if keepdims else total


@dataclass
class Counts:
    """What a `counting` namespace has seen.

    Attributes
    ----------
    multiplies : int
        Multiply-adds of ``matmul`` and ``tensordot``: batch x rows x columns x contracted length.
    elementwise : int
        Elements (of the largest array, argument or result) of all other functions, creation and movement excepted.
    live_bytes, peak_bytes : int
        Memory of the arrays alive now, and the most there was at once. A view adds nothing to its base.
    """

    multiplies: int = 0
    elementwise: int = 0
    live_bytes: int = 0
    peak_bytes: int = 0

    def reset(self) -> None:
        """Start anew: nothing counted, the peak is what is alive."""
        self.multiplies = self.elementwise = 0
        self.peak_bytes = self.live_bytes


def counting(base: Any = np) -> "_Counting":
    """Namespace that counts: its ``counts`` is a `Counts`, also right when several threads share it.

    An array counts from the moment it enters the namespace, arguments brought in by ``asarray`` included, until its
    memory is free. Buffers inside one function of the base library are not seen. Which arrays are views is asked of
    NumPy and CuPy (``base``); in another library every array counts as memory of its own.

    Examples
    --------
    >>> xp = counting()
    >>> a = xp.asarray(np.ones((2, 3)))
    >>> b = a @ a.mT
    >>> xp.counts
    Counts(multiplies=12, elementwise=0, live_bytes=80, peak_bytes=80)
    """
    return _Counting(base)


class _Counting(Instrumented):
    def __init__(self, base: Any) -> None:
        super().__init__("counting", base)
        self.counts = Counts()
        self._owners: set[int] = set()
        # Reentrant: a buffer may die, and report it, while this thread holds the lock.
        self._lock = threading.RLock()

    def finish(self, name: str, args: tuple, raw: Array) -> Array:
        with self._lock:
            if name == "matmul":
                self.counts.multiplies += _size(raw) * args[0].shape[-1]
            elif name == "tensordot":  # rows * n, n * columns and rows * columns elements
                self.counts.multiplies += math.isqrt(_size(args[0]) * _size(args[1]) * _size(raw))
            elif name not in _MOVES:
                self.counts.elementwise += max(_size(x) for x in (*args, raw) if is_array(x))
            self._track(raw)
        return raw

    def _track(self, raw: Array) -> None:
        owner = part = raw
        while (part := getattr(part, "base", None)) is not None:
            owner = part if is_array(part) else owner
        if id(owner) in self._owners:
            return
        size = _size(owner) * np.dtype(dtype_name(owner.dtype)).itemsize
        self._owners.add(id(owner))
        weakref.finalize(owner, self._release, id(owner), size).atexit = False
        self.counts.live_bytes += size
        self.counts.peak_bytes = max(self.counts.peak_bytes, self.counts.live_bytes)

    def _release(self, owner: int, size: int) -> None:
        with self._lock:
            self._owners.discard(owner)
            self.counts.live_bytes -= size


def _size(x: Array) -> int:
    return math.prod(x.shape)


# Forward error bound


class Bounds(NamedTuple):
    """Two bounds on the rounding error of each element of an attention output."""

    rss: np.ndarray
    worst: np.ndarray


def output_bound(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    logits: np.ndarray,
    weights: np.ndarray,
    visible: np.ndarray | None = None,
    scale: float | None = None,
    slope: np.ndarray | None = None,
    factor: np.ndarray | None = None,
    unit: Any = "float32",
    unit_weights: Any = None,
    unit_output: Any = None,
) -> Bounds:
    r"""How far rounding alone can take the output of softmax attention from its exact value, element by element.

    To first order an error ds in the logits moves the output by

        do[i,e] = sum_j p[i,j] (v[j,e] - o[i,e]) ds[i,j]

    because sum_j p[i,j] (v[j] - o[i]) = 0, with p the softmax and o = sum_j p v. An evaluation that computes in a
    format of unit roundoff u makes these errors (|q|.|k| is the dot product of absolute values, m the row's maximum,
    n the number of visible keys of the row, d the channels):

    ============================================  =====================================================
    error                                         size
    ============================================  =====================================================
    dot product q.k, scaled before or after       slope * scale * gamma(d + 4) * |q|.|k|
    cap, bias, subtraction of m, change of base   u (4 scale |q|.|k| + 2 |s| + 2 |s - m|)
    exp to two ulp, online rescaling              4 u (1 + n / 16)
    sums of p v and of p, normalisation           gamma(2n + 4) on each product and on |o|
    weights stored in a narrower format           unit_weights * p |v|
    output stored                                 unit_output * |o|
    ============================================  =====================================================

    **worst** adds absolute values. It is a guarantee, second-order terms included: with delta the sum of the first
    three rows, gamma(n) = e^(nu) - 1 >= (1 + u)^n - 1, and weights a[j] = p[j] e^ds[j] (1 + theta[j]) in the numerator,
    b[j] = p[j] e^ds[j] (1 + phi[j]) in the denominator, the computed output is sum_j a[j] v[j] / sum_j b[j], hence

        |do| <= [sum_j p (e^delta - 1) |v - o| + e^max(delta) theta (sum_j p |v| + |o|)] e^(max(delta) + 2 theta)

    plus underflow and the rounding of the output. It holds for sums in any order, with fused multiply-add or without,
    normalised before or after the product with v, whole or online in blocks of at least 16 keys. What exceeds it is
    not this function. Expect it to be 10 to 1000 times the error.

    **rss** adds squares, as independent errors of random sign do, with sqrt(n) in place of n:

        rss^2 = sum_j p^2 delta^2 (v - o)^2 + u^2 n (sum_j p^2 v^2 + o^2) + u_w^2 sum_j p^2 v^2 + u_o^2 o^2
        delta^2 = (slope scale u)^2 d (q^2.k^2 + (q.k)^2) + u^2 (s^2 + (s - m)^2 + 4)

    It has the size of the error, and is a yardstick for it, not a guarantee. (v - o)^2 is expanded, so that both forms
    cost a few contractions of the attention's own size and no (q, k, e) array is built.

    Parameters
    ----------
    q : (..., q, d) float64 NumPy array
    k : (..., k, d)
    v : (..., k, e)
        The candidate's own, already rounded inputs; heads already repeated; leading axes broadcast.
    logits : (..., q, k)
        Final logits s: scaled, capped, with bias.
    weights : (..., q, k)
        Exact softmax of the logits, before dropout. Rows may sum to less than 1: the rest belongs to sinks, which
        have value 0.
    visible : (..., q, k) bool, optional
        Pairs that take part; default: where the logits are above -inf. A fully masked row has bound 0.
    scale : float, optional
        Default d^-1/2.
    slope : (..., q, k), optional
        Derivative of the final logits by scale * q.k, as in 1 - (logits / c)^2 for a soft cap c. Default 1.
    factor : (..., q, k), optional
        What multiplies the weights after the softmax: dropout's keep / (1 - rate). Default 1.
    unit, unit_weights, unit_output : dtype, name or number
        Format of the computation, of the weights if they are stored before the product with v, and of the output if
        it is rounded once more. A number is a unit roundoff, without underflow.

    Returns
    -------
    Bounds
        ``rss`` and ``worst``, float64, of the output's shape. NaN and infinite inputs count as 0: outputs that are
        not finite are to be compared by place, not by distance.

    Raises
    ------
    TypeError
        If an array is not float64.
    """
    for name, x in {"q": q, "k": k, "v": v, "logits": logits, "weights": weights}.items():
        if getattr(x, "dtype", None) != np.float64:
            raise TypeError(f"{name}: {getattr(x, 'dtype', type(x).__name__)}, expected a float64 NumPy array")
    (u, tiny), (u_w, tiny_w), (u_o, tiny_o) = map(_unit_and_underflow, (unit, unit_weights, unit_output))
    d = q.shape[-1]
    scale = abs(d**-0.5 if scale is None else float(scale))
    slope = np.abs(1.0 if slope is None else slope)
    visible = np.broadcast_to((logits > -np.inf) & (True if visible is None else visible), weights.shape)
    q, k, v = (np.where(np.isfinite(x), x, 0.0) for x in (q, k, v))
    s = np.where(visible & np.isfinite(logits), logits, 0.0)
    p = np.where(visible & np.isfinite(weights), weights, 0.0)
    n = visible.sum(axis=-1, keepdims=True)
    top, sink, s_sink = _sinks(s, p, visible)

    # The output is sum_j p (f v) - o sum_j p = 0 around any centre; a near one keeps |v - o| tight and free of
    # cancellation. Weighted by p, it ignores what stands in keys that nobody sees.
    o = einsum("...qk,...ke->...qe", p if factor is None else p * factor, v)
    seen = einsum("...qk->...k", p)
    total = np.maximum(seen.sum(axis=-1, keepdims=True), np.finfo(float).tiny)
    centre = einsum("...k,...ke->...e", seen / total, v)[..., None, :] if factor is None else 0.0
    f = 1.0 if factor is None else np.abs(factor)
    w, away = v - centre, o - centre

    def weighted(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return einsum("...qk,...ke->...qe", x, y)

    def growth(x: np.ndarray) -> np.ndarray:
        """e^x - 1, kept finite: beyond e^200 a bound says nothing more, and infinity times 0 would be NaN."""
        return np.expm1(np.minimum(x, 200.0))

    with np.errstate(over="ignore"):
        # Worst case: absolute values, every term an upper bound.
        size = scale * einsum("...qd,...kd->...qk", np.abs(q), np.abs(k))
        few = 4 * (1 + np.ceil(n / 16))
        delta = slope * growth((d + 4) * u) * size + u * (4 * size + 2 * np.abs(s) + 2 * np.abs(s - top) + few)
        delta = np.where(visible, delta, 0.0)
        delta_sink = np.where(sink > 0, u * (2 * np.abs(s_sink) + 2 * np.abs(s_sink - top) + few), 0.0)
        largest = np.maximum(delta.max(axis=-1, keepdims=True, initial=0.0), delta_sink)
        theta = growth((2 * n + 4) * u + u_w)
        moved = p * growth(delta)
        worst = weighted(moved * f, np.abs(w)) + np.abs(away) * moved.sum(axis=-1, keepdims=True)
        worst += sink * growth(delta_sink) * np.abs(o)
        worst += (1 + growth(largest)) * theta * (weighted(p * f, np.abs(v)) + np.abs(o))
        worst *= 1 + growth(largest + 2 * theta)
        worst += (tiny + tiny_w) * (weighted(visible * f, np.abs(v)) + n)
        worst = worst * (1 + u_o) + u_o * np.abs(o) + np.where(n > 0, tiny_o, 0.0)

        # Root sum of squares: one standard deviation of independent errors, or a little more.
        product, squares = einsum("...qd,...kd->...qk", q, k), einsum("...qd,...kd->...qk", q**2, k**2)
        delta2 = (slope * scale) ** 2 * d * (squares + product**2) + s**2 + (s - top) ** 2 + 4
        moved2 = np.where(visible, (p * u) ** 2 * delta2, 0.0)
        # sum moved2 (f w - away)^2, expanded.
        square = weighted(moved2 * f**2, w**2) - 2 * away * weighted(moved2 * f, w)
        square += away**2 * moved2.sum(axis=-1, keepdims=True)
        square = np.maximum(square, 0.0) + (sink * u * o) ** 2 * (s_sink**2 + (s_sink - top) ** 2 + 4)
        stored = weighted((p * f) ** 2, v**2)
        square += u**2 * n * (stored + o**2) + u_w**2 * stored + u_o**2 * o**2
        square += tiny_w**2 * weighted(visible * f**2, v**2) + np.where(n > 0, tiny_o**2, 0.0)
    return Bounds(np.sqrt(square), worst)


def _sinks(s: np.ndarray, p: np.ndarray, visible: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per row, with the key axis kept: maximum of keys and sinks, probability of the sinks together, their logit."""
    top = np.where(visible, s, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    likely = p.max(axis=-1, keepdims=True, initial=0.0)
    sink = 1.0 - p.sum(axis=-1, keepdims=True)
    # What the float64 sum itself leaves is no sink; a row without weights has output 0 in any case.
    present = (sink > 4 * p.shape[-1] * 2.0**-53) & (likely > 0)
    sink = np.where(present, sink, 0.0)
    s_sink = np.where(present, top + np.log(np.where(present, sink / np.where(present, likely, 1.0), 1.0)), top)
    return np.maximum(top, s_sink), sink, s_sink


def _unit_and_underflow(unit: Any) -> tuple[float, float]:
    """Unit roundoff, and the absolute error near zero: the smallest normal number where hardware may flush to zero."""
    if unit is None:
        return 0.0, 0.0
    if isinstance(unit, (int, float)):
        return float(unit), 0.0
    name = dtype_name(unit)
    form = _format(name)
    flushed = form.least_exponent <= _FORMATS["float32"].least_exponent
    return unit_roundoff(name), 2.0 ** (form.least_exponent - (0 if flushed else form.precision))
