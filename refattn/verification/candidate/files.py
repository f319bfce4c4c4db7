"""Arrays and options on their way to another process or language: safetensors files, and options as JSON.

A safetensors file is eight bytes (the length of the header, little endian), a JSON header
``{"q": {"dtype": "BF16", "shape": [...], "data_offsets": [begin, end]}, "__metadata__": {"options": "..."}}`` and the
raw bytes.  It is read and written here in a few lines because the NumPy front end of the safetensors package knows no
bfloat16; the files are ordinary ones, any safetensors library takes them.

Strides are part of a probe: :func:`memory_form` describes them, and :func:`in_form` builds an array with the same
strides elsewhere, the gaps between its elements filled with NaN.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

__all__ = [
    "clone",
    "compact",
    "flat",
    "from_json",
    "holds_arrays",
    "in_form",
    "memory_form",
    "nested",
    "read_tensors",
    "to_json",
    "write_tensors",
]

_DTYPES = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "C64": np.dtype(np.complex64),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_GAPS = 16  # gaps are filled with NaN only while the buffer is at most this many times the array


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file.

    Raises
    ------
    TypeError
        If an array has a dtype that the format lacks (complex128, object ...).
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, x in tensors.items():
        if x.dtype not in _NAMES:
            raise TypeError(f"{name} has dtype {x.dtype}, which a safetensors file cannot hold")
        header[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [offset, offset + x.nbytes]}
        offset += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Path(path).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            file.write(x.tobytes())


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays and metadata of a safetensors file.

    Raises
    ------
    ValueError
        If the file is not one.
    """
    data = Path(path).read_bytes()
    try:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            raw = data[8 + length + begin : 8 + length + end]
            tensors[name] = np.frombuffer(bytearray(raw), dtype=_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    return tensors, metadata


def to_json(value: Any) -> Any:
    """A value that ``json.dumps`` takes; tuples are marked, NumPy scalars become Python's.

    Raises
    ------
    TypeError
        If the value has no such form (a function, a pattern object).
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return {"tuple": [to_json(x) for x in value]}
    if isinstance(value, list):
        return [to_json(x) for x in value]
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def from_json(value: Any) -> Any:
    """Inverse of :func:`to_json`."""
    if isinstance(value, dict):
        return tuple(from_json(x) for x in value["tuple"])
    if isinstance(value, list):
        return [from_json(x) for x in value]
    return value


def holds_arrays(value: Any) -> bool:
    """Whether a value is a tuple of arrays (the members of clusters)."""
    return isinstance(value, tuple) and any(isinstance(x, np.ndarray) for x in value)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with arrays in tuples under names of their own: ``members`` becomes ``members@0``, ``members@1``."""
    found = {}
    for name, value in values.items():
        found.update({f"{name}@{i}": x for i, x in enumerate(value)} if holds_arrays(value) else {name: value})
    return found


def nested(values: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of :func:`flat`; ``like`` holds the values by name, or how many arrays stand in a tuple (0 = none)."""
    parts = {n: x if type(x) is int else len(x) if holds_arrays(x) else 0 for n, x in like.items()}
    if not any(f"{n}@0" in values for n in parts):
        return {n: values[n] for n in parts}
    return {n: tuple(values[f"{n}@{i}"] for i in range(parts[n])) if f"{n}@0" in values else values[n] for n in parts}


def memory_form(x: np.ndarray) -> dict[str, Any] | None:
    """Shape, strides (in elements) and writeable flag of an array; None for a plain, writeable, C-contiguous one."""
    if x.flags.c_contiguous and x.flags.writeable:
        return None
    return {
        "shape": list(x.shape),
        "strides": [s // x.itemsize for s in x.strides],
        "writeable": bool(x.flags.writeable),
    }


def compact(x: np.ndarray) -> np.ndarray:
    """The array with its stride-0 axes cut to one element: what has to be stored beside its form."""
    if not x.size:  # its strides may be 0, and mean nothing
        return x
    return x[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.strides)]


def in_form(x: np.ndarray, form: Mapping[str, Any] | None) -> np.ndarray:
    """Copy of ``x`` (or of what :func:`compact` left of it) in the given form, in memory of its own."""
    if form is None:
        return np.array(x, order="C", copy=True)
    shape, strides = tuple(form["shape"]), form["strides"]
    if 0 in shape:
        result = np.empty(shape, dtype=x.dtype)
    else:
        reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
        first = -sum(r for r in reach if r < 0)
        span = first + sum(r for r in reach if r > 0) + 1
        buffer = np.empty(span, dtype=x.dtype)
        if x.dtype == bool:
            buffer.fill(True)
        elif span <= _GAPS * x.size:
            buffer.view(np.uint8).fill(0xFF)  # NaN in every floating-point format, -1 in the signed integers
        result = np.lib.stride_tricks.as_strided(buffer[first:], shape, [s * x.itemsize for s in strides])
        result[...] = x
    if not form["writeable"]:
        result.flags.writeable = False
    return result


def clone(x: np.ndarray, *, writeable: bool = False) -> np.ndarray:
    """Copy of an array with the same strides; writeable like the array, or in any case."""
    form = memory_form(x)
    return in_form(compact(x), form and {**form, "writeable": writeable or form["writeable"]})
