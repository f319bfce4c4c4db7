"""Namespaces, devices, dtypes and argument checks: everything that is said about an array before any mathematics.

Mechanisms never import NumPy: they ask :func:`namespace` for the array library of their inputs and stay inside the
array API standard.  bfloat16 comes from ml_dtypes, which ``numpy.isdtype`` and ``numpy.finfo`` refuse, so the dtype
questions are answered here.
"""

import math
import operator
from typing import Any

import array_api_compat
import numpy as np

__all__ = [
    "broadcast_leading",
    "device",
    "flatten_leading",
    "is_array",
    "is_bool",
    "is_complex",
    "is_half",
    "is_integer",
    "is_real_floating",
    "itemsize",
    "namespace",
    "real",
    "require_axes",
    "require_finite",
    "require_integer",
    "require_one_of",
    "require_positive",
    "sum_to_shape",
    "to_namespace",
    "to_numpy",
]

_HALF = ("float16", "bfloat16", "float8")


def is_array(x: Any) -> bool:
    """Whether ``x`` is an array of some library (NumPy scalars included; lists and Python numbers are not)."""
    return array_api_compat.is_array_api_obj(x)


def namespace(*arrays: Any) -> Any:
    """Array-API namespace shared by all arrays given; anything that is not an array is passed over.

    Raises
    ------
    TypeError
        If the arrays belong to two libraries, or none is an array.
    """
    found = [a for a in arrays if is_array(a)]
    if not found:
        raise TypeError(f"no array among the arguments, only {[type(a).__name__ for a in arrays]}")
    if all(type(a) is np.ndarray or isinstance(a, np.generic) for a in found):
        return np
    for a in found:
        if isinstance(a, (np.ma.MaskedArray, np.matrix)):
            raise TypeError(
                f"a {type(a).__name__} is no plain array: its products mean something else; pass numpy.asarray(x)"
            )
    try:
        return array_api_compat.array_namespace(*found)
    except TypeError:
        libraries = sorted({type(a).__module__.split(".")[0] for a in found})
        raise TypeError(
            f"arrays of several libraries in one call ({', '.join(libraries)}): bring all of them into one first"
        ) from None


def device(x: Any) -> Any:
    """Device of an array."""
    return array_api_compat.device(x)


def dtype_name(dtype: Any) -> str:
    """Short name of a dtype of any library: ``float32``, ``bfloat16``, ``complex128`` ..."""
    if isinstance(dtype, str):
        return dtype
    try:
        return np.dtype(dtype).name
    except TypeError:
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
        return str(name or dtype).split(".")[-1]


def itemsize(dtype: Any) -> int:
    """Bytes of one element of a dtype given by name or object."""
    name = dtype_name(dtype)
    if name == "bfloat16":
        return 2
    return 1 if name.startswith("float8") else np.dtype(name).itemsize


def is_half(dtype: Any) -> bool:
    """Whether a floating dtype has 16 bits or fewer, so that arithmetic is done in float32."""
    return dtype_name(dtype).startswith(_HALF)


def is_real_floating(dtype: Any) -> bool:
    name = dtype_name(dtype)
    return name.startswith(("float", "bfloat", "longdouble"))


def is_complex(dtype: Any) -> bool:
    return dtype_name(dtype).startswith(("complex", "clongdouble"))


def is_integer(dtype: Any) -> bool:
    return dtype_name(dtype).startswith(("int", "uint"))


def is_bool(dtype: Any) -> bool:
    return dtype_name(dtype) == "bool"


def real(x: Any) -> Any:
    """Real part of a complex array, the array itself otherwise: what maxima and comparisons look at."""
    return namespace(x).real(x) if is_complex(x.dtype) else x


def to_namespace(x: Any, xp: Any, *, dtype: Any = None, like: Any = None) -> Any:
    """Bring a host array, list or number into namespace ``xp`` (and the device of ``like``)."""
    where = {} if like is None else {"device": device(like)}
    if is_array(x) and namespace(x) is xp:
        return x if dtype is None or x.dtype == dtype else xp.astype(x, dtype)
    return xp.asarray(x if is_array(x) or np.isscalar(x) else np.asarray(x), dtype=dtype, **where)


def to_numpy(x: Any) -> np.ndarray:
    """Copy of an array of any library as a NumPy array (bfloat16 kept as ml_dtypes.bfloat16)."""
    if isinstance(x, (np.ndarray, np.generic)):
        return np.asarray(x)
    if array_api_compat.is_torch_array(x):
        x = x.detach().cpu()
        if "bfloat16" in str(x.dtype):
            from ml_dtypes import bfloat16

            return x.float().numpy().astype(bfloat16)
        return x.numpy()
    if array_api_compat.is_cupy_array(x):
        return x.get()
    unwrap = getattr(namespace(x), "to_numpy", None)
    return unwrap(x) if unwrap else np.asarray(x)


def flatten_leading(x: Any, keep: int, leading: tuple[int, ...]) -> Any:
    """Broadcast the axes before the last ``keep`` to ``leading`` and join them into one batch axis.

    A batch axis of size 1 is kept at 1 when every leading axis of ``x`` is 1 or missing: nothing is copied for it.
    """
    xp = namespace(x)
    own = tuple(x.shape[: x.ndim - keep])
    tail = tuple(x.shape[x.ndim - keep :])
    if math.prod(own) == 1:
        return xp.reshape(x, (1, *tail))
    if own != leading:
        x = xp.broadcast_to(x, (*leading, *tail))
    return xp.reshape(x, (math.prod(leading), *tail))


def broadcast_leading(**arrays: Any) -> tuple[int, ...]:
    """Common leading shape of arrays given as ``name=(array, number of own axes)``."""
    result: tuple[int, ...] = ()
    for name, (x, keep) in arrays.items():
        own = tuple(x.shape[: x.ndim - keep])
        try:
            result = np.broadcast_shapes(result, own)
        except ValueError:
            others = ", ".join(f"{n} {tuple(a.shape)}" for n, (a, _) in arrays.items())
            raise ValueError(f"{name}: leading axes {own} do not broadcast with {result} (arrays: {others})") from None
    return result


def sum_to_shape(x: Any, shape: tuple[int, ...]) -> Any:
    """Adjoint of broadcasting: sum over the axes along which ``shape`` was stretched to that of ``x``."""
    xp = namespace(x)
    if tuple(x.shape) == tuple(shape):
        return x
    extra = x.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(i + extra for i, n in enumerate(shape) if n == 1 and x.shape[i + extra] != 1)
    if axes:
        x = xp.sum(x, axis=axes)
    return xp.reshape(x, shape)


def require_axes(sizes: dict[str, int] | None = None, /, **arrays: tuple[Any, str]) -> dict[str, int]:
    """Check shapes by named axes and return the sizes.

    Each argument is ``name=(array, "... h q d")``: a leading ``...`` allows any number of batch axes, a name that
    occurs in several arrays must have one size everywhere, ``1`` or a number stands for itself.

    Raises
    ------
    ValueError
        Naming the argument, its shape, the axis that disagrees and what was expected.
    """
    known = dict(sizes or {})
    origin: dict[str, str] = {}
    for name, (x, axes) in arrays.items():
        letters = axes.split()
        shape = tuple(x.shape)
        free = letters[0] == "..."
        letters = letters[1:] if free else letters
        if len(shape) < len(letters) or (not free and len(shape) != len(letters)):
            wanted = f"{'at least ' if free else ''}{len(letters)} axes ({axes})"
            raise ValueError(f"{name} has shape {shape}: expected {wanted}")
        for letter, size in zip(letters, shape[len(shape) - len(letters) :], strict=True):
            if letter.isdigit():
                if size != int(letter):
                    raise ValueError(f"{name} has shape {shape}: expected ({axes})")
                continue
            if known.setdefault(letter, size) != size:
                where = f" (from {origin[letter]})" if letter in origin else ""
                raise ValueError(
                    f"{name} has shape {shape}: its axis {letter!r} of ({axes}) is {size}, but {known[letter]} was expected{where}"
                )
            origin.setdefault(letter, f"{name} {shape}")
    return known


def require_integer(name: str, value: Any, *, minimum: int | None = None) -> int:
    """The value as a Python int, or an error that names the argument."""
    try:
        if isinstance(value, bool):
            raise TypeError
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}: expected an integer") from None
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} is {value}: expected at least {minimum}")
    return value


def require_finite(name: str, value: Any) -> None:
    """Reject NaN and infinity in a number or a 0-d array."""
    x = complex(value) if is_array(value) and is_complex(value.dtype) else value
    x = x if isinstance(x, complex) else float(x)
    if not (math.isfinite(x.real) and math.isfinite(x.imag)):
        raise ValueError(f"{name} is {value}: expected a finite number")


def require_positive(name: str, value: Any) -> None:
    """Reject a number that is not finite and above zero."""
    require_finite(name, value)
    x = value.real if isinstance(value, complex) else float(real(value) if is_array(value) else value)
    if not x > 0:
        raise ValueError(f"{name} is {value}: expected a number above 0")


def require_one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Reject a value that is not among the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: expected one of {', '.join(map(repr, choices))}")
