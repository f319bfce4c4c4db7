"""Array API namespaces that see every operation: one rounds each result to a format, one counts."""

import functools
import itertools
import math
import operator
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import array_api_compat.numpy
import numpy as np

from refattn.arrays import dtype_name, is_array, is_complex, is_real_floating, to_numpy
from refattn.precision.formats import format_of, round_to

__all__ = ["MOVES", "Counts", "Instrumented", "InstrumentedArray", "counting", "rounding"]

Array = Any

# Results that share memory with an argument, or copy it without changing a value.
# fmt: off
VIEWS = {
    "broadcast_arrays", "broadcast_to", "expand_dims", "flip", "getitem", "imag", "matrix_transpose",
    "moveaxis", "permute_dims", "real", "reshape", "squeeze", "unstack",
}
MOVES = VIEWS | {
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
    ``exact`` says whether its values came in as they are: inputs and constants, moved or not (see `injecting`).
    """

    __slots__ = ("_data", "_xp", "exact")
    __array_ufunc__ = None  # NumPy arrays on the left leave the operation to us, which refuses the mixture
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: Array, xp: "Instrumented", exact: bool = False) -> None:
        self._data = data
        self._xp = xp
        self.exact = exact

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
        self.exact = self.exact and value.exact

    def __repr__(self) -> str:
        return f"{self._xp.__name__}.{self._data!r}"


def _method(name: str, function: Callable, *, reflected: bool = False) -> Callable:
    def method(self: InstrumentedArray, *other: Any) -> Any:
        args = (*other, self) if reflected else (self, *other)
        return self._xp.apply(name, function, *args)

    return method


def _in_place(name: str, function: Callable) -> Callable:
    def method(self: InstrumentedArray, other: Any) -> InstrumentedArray:
        result = self._xp.apply(name, function, self, other)
        self._data[...] = self._xp.unwrap(result)
        self.exact = result.exact
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
        wrapped = self._wrap("asarray", (), raw)
        wrapped.exact = x.exact if isinstance(x, InstrumentedArray) else True
        return wrapped

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
        format_of(dtype)
        super().__init__(f"rounding_{dtype}", base)
        self._dtype = dtype
        self._each = each

    def apply(self, name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        if self._each and name in ("matmul", "sum"):
            function = self._matmul_each if name == "matmul" else self._sum_each
        return super().apply(name, function, *args, **kwargs)

    def finish(self, name: str, args: tuple, raw: Array) -> Array:
        if name in VIEWS:
            return raw
        if is_complex(raw.dtype):
            raise TypeError(f"{name}: {self.__name__} holds real arrays, this result is {dtype_name(raw.dtype)}")
        if not is_real_floating(raw.dtype):
            return raw
        values = to_numpy(raw)
        rounded = round_to(values, self._dtype)
        if not format_of(self._dtype).infinite:
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
            elif name not in MOVES:
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
