"""Does a candidate ask refattn itself?  Then its agreement says nothing.

What counts is a call of a mechanism while the candidate runs; an import alone, or a call of a helper, is a note.
"""

import builtins
import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from refattn.mechanism import observers

__all__ = ["ImportWatch", "libraries_of", "root", "unwrapped", "watched_calls"]


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


@contextlib.contextmanager
def watched_calls() -> Iterator[set[str]]:
    """The names of refattn's functions that are called meanwhile."""
    called: set[str] = set()
    observers.append(called.add)
    try:
        yield called
    finally:
        observers.remove(called.add)


def root(module: str) -> str:
    return module.partition(".")[0]


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
