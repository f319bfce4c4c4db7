"""Namespaces, devices, dtypes and argument checks: everything that is said about an array before any mathematics.

Mechanisms never import NumPy: they ask :func:`namespace` for the array library of their inputs and stay inside the
array API standard.  bfloat16 comes from ml_dtypes, which ``numpy.isdtype`` and ``numpy.finfo`` refuse, so the dtype
questions are answered here.
"""

import functools
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
    "named_dtype",
    "namespace",
    "real",
    "require_array",
    "require_axes",
    "require_finite",
    "require_flag",
    "require_integer",
    "require_number",
    "require_one_of",
    "require_positive",
    "sum_to_shape",
    "to_namespace",
    "to_numpy",
]

_HALF = ("float16", "bfloat16", "float8")

LARGEST = 1 << 48
"""No array has as many elements: counts and offsets up to here can be added and multiplied by a few in int64."""


def is_array(x: Any) -> bool:
    """Whether ``x`` is an array of some library (NumPy scalars included; lists and Python numbers are not)."""
    return not isinstance(x, type) and array_api_compat.is_array_api_obj(x)


def namespace(*arrays: Any) -> Any:
    """Array-API namespace shared by all arrays given; anything that is not an array is passed over.

    Raises
    ------
    TypeError
        If the arrays belong to two libraries, or none is an array.
    """
    if arrays and all(type(a) is np.ndarray for a in arrays):
        return np
    kinds = [type(a).__name__ for a in arrays]
    arrays = tuple(a for a in arrays if is_array(a))
    if not arrays:
        raise TypeError(f"no array among the arguments, only {kinds}")
    if all(type(a) is np.ndarray or isinstance(a, np.generic) for a in arrays):
        return np
    for a in arrays:
        if isinstance(a, (np.ma.MaskedArray, np.matrix)):
            raise TypeError(
                f"a {type(a).__name__} is no plain array: its products mean something else; pass numpy.asarray(x)"
            )
    try:
        return array_api_compat.array_namespace(*arrays)
    except TypeError:
        libraries = sorted({type(a).__module__.split(".")[0] for a in arrays})
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
    if dtype is None or isinstance(dtype, (tuple, list, dict)):  # which NumPy would take for something
        return type(dtype).__name__
    kind: Any = type(dtype)
    try:
        return _dtype_name(kind, dtype)
    except TypeError:  # it has no hash, as those of older strict namespaces
        return _dtype_name.__wrapped__(kind, dtype)


@functools.lru_cache(maxsize=256)
def _dtype_name(kind: Any, dtype: Any) -> str:  # the kind keeps dtypes of different libraries from being compared
    try:
        return np.dtype(dtype).name
    except TypeError:
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
        return str(name or dtype).split(".")[-1]


def named_dtype(name: str, xp: Any) -> Any:
    """The dtype of this name in a namespace, None where it has none; NumPy's bfloat16 is that of ml_dtypes."""
    if xp is np and name == "bfloat16":
        from ml_dtypes import bfloat16

        return np.dtype(bfloat16)
    found = getattr(xp, name, None)
    return np.dtype(found) if xp is np and found is not None else found


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
            return x.float().numpy().astype(named_dtype("bfloat16", np))
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
        require_array(name, x, axes=keep)
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
        require_array(name, x)
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


def require_array(name: str, value: Any, *, axes: int = 0) -> None:
    """Reject what is no array, or has fewer than ``axes`` axes."""
    if not is_array(value):
        raise TypeError(f"{name} is {_shown(value)}: expected an array")
    if value.ndim < axes:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: expected at least {axes} axes")


def require_flag(name: str, value: Any) -> bool:
    """True or False (NumPy's too) as a Python bool; numbers, strings and arrays are no flags."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {_shown(value)}: expected True or False")
    return bool(value)


def require_integer(name: str, value: Any, *, minimum: int | None = None, maximum: int | None = LARGEST) -> int:
    """The value as a Python int between ``minimum`` (default: -maximum) and ``maximum`` (None: without limit)."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {_shown(value)}: expected an integer") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} is {number}: expected at least {minimum}")
    if maximum is not None and not -maximum <= number <= maximum:
        raise ValueError(f"{name} is {number}: expected at most {maximum}")
    return number


def require_finite(name: str, value: Any) -> float | complex:
    """A finite number, or a 0-d array of one, as a Python number (a complex one under complex step)."""
    if is_array(value):
        if value.ndim:
            raise ValueError(f"{name} has shape {tuple(value.shape)}: expected a number")
        if not (is_integer(value.dtype) or is_real_floating(value.dtype) or is_complex(value.dtype)):
            raise TypeError(f"{name} is {_shown(value)}: expected a number")
        number = complex(value) if is_complex(value.dtype) else float(value)
    elif isinstance(value, bool) or not isinstance(value, (int, float, complex)):
        raise TypeError(f"{name} is {_shown(value)}: expected a number")
    else:
        try:
            number = value if isinstance(value, complex) else float(value)
        except OverflowError:
            number = math.inf
    if not (math.isfinite(number.real) and math.isfinite(number.imag)):
        raise ValueError(f"{name} is {_shown(value)}: expected a finite number")
    return number


def require_number(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> float:
    """A finite real number as a Python float, within the bounds (``above`` and ``below`` exclude their ends)."""
    number = require_finite(name, value)
    if isinstance(number, complex):
        raise TypeError(f"{name} is {_shown(value)}: expected a real number")
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} is {_shown(value)}: expected at least {minimum}")
    if above is not None and number <= above:
        raise ValueError(f"{name} is {_shown(value)}: expected a number above {above}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} is {_shown(value)}: expected at most {maximum}")
    if below is not None and number >= below:
        raise ValueError(f"{name} is {_shown(value)}: expected a number below {below}")
    return number


def require_positive(name: str, value: Any) -> None:
    """Reject what is no finite number above zero (the real part decides under complex step)."""
    if not require_finite(name, value).real > 0:
        raise ValueError(f"{name} is {value}: expected a number above 0")


def require_one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Reject a value that is not among the choices (strings, numbers, None)."""
    plain = value is None or isinstance(value, (str, int, float, np.generic))
    if not plain or not any(isinstance(value, bool) == isinstance(x, bool) and value == x for x in choices):
        raise ValueError(f"{name} is {_shown(value)}: expected one of {', '.join(map(repr, choices))}")


def _shown(value: Any) -> str:
    """The value for a message: an array by its dtype and shape, anything long cut."""
    if is_array(value) and (value.ndim or isinstance(value, np.ndarray)):
        return f"an array {dtype_name(value.dtype)}{tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__} {text[:60]}..."
