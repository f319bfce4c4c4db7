"""Does a candidate ask refattn itself?  Then its agreement says nothing."""

import builtins
import contextlib
import dis
import functools
import importlib
import sys
import sysconfig
import types
from typing import Any

__all__ = ["ImportWatch", "libraries_of", "root", "unwrapped", "uses_refattn"]

_LIBRARIES = tuple({sysconfig.get_paths()[n] for n in ("stdlib", "platstdlib", "purelib", "platlib")})


def libraries_of(function: Any) -> set[str]:
    """Top-level names of the modules that a function's own module has imported."""
    found = {root(getattr(function, "__module__", None) or "")}
    for value in getattr(unwrapped(function), "__globals__", {}).values():
        if isinstance(value, types.ModuleType):
            found.add(root(value.__name__))
    return found


def unwrapped(function: Any) -> Any:
    """The Python function inside partials, bound methods, wrappers and objects with ``__call__``."""
    while not isinstance(function, types.ModuleType):
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif "__wrapped__" in getattr(function, "__dict__", {}):
            function = function.__wrapped__
        else:
            break
    if isinstance(function, (types.ModuleType, types.FunctionType, type)) or not callable(function):
        return function
    call = type(function).__call__
    return call if isinstance(call, types.FunctionType) else function


def uses_refattn(function: Any) -> bool:
    """Whether a function reaches refattn through the names in its code, its closures or the functions it calls."""
    if function is None:
        return False
    if _of_refattn(function) or _of_refattn(type(function)):
        return True
    seen: set[int] = set()
    waiting = [unwrapped(function)]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if _of_refattn(current):
            return True
        if not isinstance(current, types.FunctionType) or (
            current.__code__.co_filename.startswith(_LIBRARIES) and len(seen) > 1
        ):
            continue
        names, imports = _names_in(current.__code__)
        if "refattn" in map(root, imports):
            return True
        values = [current.__globals__[n] for n in names if n in current.__globals__]
        for cell in current.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                values.append(cell.cell_contents)
        waiting += [unwrapped(x) for x in values]
    return False


def root(module: str) -> str:
    return module.partition(".")[0]


def _of_refattn(x: Any) -> bool:
    module = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None)
    return isinstance(module, str) and root(module) == "refattn"


def _names_in(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Global names used by a code object and those inside it, and the modules that it imports."""
    names, imports = set(), set()
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            imports.add(str(step.argval))
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(str(step.argval))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            names |= inner[0]
            imports |= inner[1]
    return names, imports


class ImportWatch:
    """Notices, while the candidate is loaded and called, that anything but refattn itself imports refattn."""

    def __init__(self) -> None:
        self.seen = False
        self._import, self._import_module = builtins.__import__, importlib.import_module

    def install(self) -> None:
        def watched(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            if level == 0:
                self._note(name, (globals or {}).get("__name__", ""))
            return self._import(name, globals, locals, fromlist, level)

        def watched_module(name: str, package: str | None = None) -> Any:
            self._note(name, sys._getframe(1).f_globals.get("__name__", ""))
            return self._import_module(name, package)

        builtins.__import__ = watched
        importlib.import_module = watched_module

    def _note(self, name: str, importer: str) -> None:
        if root(name) == "refattn" and root(importer) != "refattn":
            self.seen = True
