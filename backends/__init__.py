"""Backends: where the array operations run.

A backend supplies the dozen operations that the array API lacks (``base.Backend`` lists them) and may serve whole
attention problems with fused kernels.  ``resolve(None, xp)`` picks by the arrays: ``numpy`` for NumPy, ``cupy`` for
CuPy, ``array_api`` for anything else.  Fused backends are used only when named, by ``backend=`` or by the environment
variable ``REFATTN_BACKEND``.  Packages add backends through the entry-point group ``refattn.backends`` (name = key,
value = a Backend class).
"""

import difflib
import functools
import importlib
import os
from typing import Any

import array_api_compat
import numpy as np

from refattn.backends.base import Backend
from refattn.records import Capability

__all__ = ["Backend", "capabilities", "names", "resolve"]

_OWN = {
    "numpy": "refattn.backends.numpy:NumpyBackend",
    "array_api": "refattn.backends.array_api:ArrayApiBackend",
    "numba": "refattn.backends.numba:NumbaBackend",
    "cupy": "refattn.backends.cupy:CupyBackend",
    "numba_cuda": "refattn.backends.numba_cuda:NumbaCudaBackend",
}


@functools.cache
def _entry_points() -> dict[str, Any]:
    import importlib.metadata  # a fifth of the time that importing the package would take

    return {point.name: point for point in importlib.metadata.entry_points(group="refattn.backends")}


def names() -> tuple[str, ...]:
    """Names of all known backends, those of other packages included."""
    return (*_OWN, *(n for n in _entry_points() if n not in _OWN))


@functools.cache
def _load(name: str) -> type[Backend]:
    if name in _OWN:
        module, _, attribute = _OWN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    return _entry_points()[name].load()


def capabilities() -> list[Capability]:
    """What runs on this machine, and why the rest does not."""
    found = []
    for name in names():
        try:
            kind = _load(name)
            usable, reason = kind.usable()
            found.append(Capability(name, usable, reason, kind.fused))
        except Exception as error:  # a foreign backend that does not even import is a row of the table
            found.append(Capability(name, False, f"{type(error).__name__}: {error}"))
    return found


def resolve(name: str | None, xp: Any) -> Backend:
    """The backend of that name bound to namespace ``xp``; without a name the one that belongs to ``xp``.

    Raises
    ------
    ValueError
        If there is no such backend, it cannot run here, or it does not take arrays of ``xp``.
    """
    if name is None:
        name = os.environ.get("REFATTN_BACKEND") or None
    if name is None:
        name = "numpy" if xp is np else "cupy" if array_api_compat.is_cupy_namespace(xp) else "array_api"
    if not isinstance(name, str):
        raise TypeError(f"backend is a {type(name).__name__}: expected the name of one, {', '.join(names())}")
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backend is {name!r}: expected one of {', '.join(names())}{hint}")
    bound = _bound(name, xp)
    ok, reason = bound.takes(xp)
    if not ok:
        raise ValueError(f"backend {name!r} does not take these arrays: {reason}")
    return bound


@functools.lru_cache(maxsize=64)
def _bound(name: str, xp: Any) -> Backend:
    kind = _load(name)
    usable, reason = kind.usable()
    if not usable:
        raise ValueError(f"backend {name!r} does not run here: {reason}")
    return kind(xp)
