"""The implementation under test: how it is found, what its signature takes, and one way of calling all of them.

A candidate is a callable (runs in this process) or a *target string* (runs in a child process, see ``isolate``):

======================================  ======================================================================
``package.module:function``             imported; the current folder is on the path
``path/file.py:function``               loaded from the file; its folder is on the path
``model.onnx``                          run by onnxruntime; arrays and options are matched to its inputs by name
``command:./program {inputs} {outputs}``  any program, any language: the exchange format below
``dump.safetensors``                    a recorded call: inputs and outputs of one call made elsewhere
======================================  ======================================================================

**Exchange format** (``command:`` and recorded calls).  ``{inputs}`` is a safetensors file with the arrays by name (q, k,
v, mask, bias ... as far as the probe uses them) and, when gradients are wanted, the cotangents ``d_output`` and
``d_lse``.  Its metadata holds ``mechanism``, ``options`` (the other options, a JSON object; tuples are JSON lists) and
``wrt`` (a JSON list: the arguments whose gradients are wanted).  The program writes ``{outputs}``: ``output``, further
results by name (``lse`` ...), gradients as ``d_q``, ``d_k`` ...; gradients it leaves out are "not provided".  To say that
it cannot take the options it writes a file without arrays and with the metadata entry ``unsupported`` = the reason.  Exit
status 0 is success, another one is a failed probe, death by a signal (or a status of 128 and more) is a crash.  A recorded
call is the two files in one: inputs, cotangents, outputs and gradients together, options in the metadata.
"""

import builtins
import contextlib
import dataclasses
import dis
import functools
import importlib
import importlib.util
import inspect
import json
import math
import shlex
import shutil
import sys
import sysconfig
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import array_api_compat
import numpy as np

from refattn.verification import exchange, isolate
from refattn.verification.conventions import (
    CONVENTION_OPTIONS,
    LSE_SWITCHES,
    PRESETS,
    Conventions,
    Preset,
    Unsupported,
    UsageError,
    detect,
    resolve,
    settle,
)
from refattn.verification.frameworks import Framework, framework

__all__ = ["Adapter", "Call", "Candidate", "Outcome", "Unsupported", "UsageError", "load_adapter", "open_candidate"]

_HEAD_ARRAYS = ("q_global", "k_global", "v_global")  # options with axes (b, h, l, d), beside the positional arrays
_MEMORY_WORDS = ("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc", "RESOURCE_EXHAUSTED")
_TRACEBACK = 4000
_LIBRARIES = tuple({sysconfig.get_paths()[n] for n in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclasses.dataclass(frozen=True)
class Call:
    """One invocation of the candidate.

    ``arrays`` are the positional arrays of the mechanism in order, ``options`` everything else by refattn's names, both
    as NumPy arrays in storage dtype (bfloat16 of ml_dtypes) with axes (b, head, length, channel); ``cotangents`` by result,
    None = forward only; ``wrt`` the arguments whose gradients are wanted; ``bytes`` is the memory limit.
    """

    id: str
    mechanism: str
    arrays: dict[str, np.ndarray | None]
    options: dict[str, Any]
    cotangents: dict[str, np.ndarray] | None = None
    wrt: tuple[str, ...] = ()
    seconds: float = 30.0
    bytes: int = 4 << 30


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a call.

    ``status`` is "ok", "unsupported", "error" (an exception, or results that are none), "crash", "timeout" or "memory";
    ``fields`` and ``gradients`` are NumPy arrays by refattn's names and in its layout; ``cotangents`` names those that reached
    the candidate's backward; ``mutated`` the inputs that it changed.
    """

    status: str
    fields: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    gradients: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    message: str = ""
    mutated: tuple[str, ...] = ()
    traceback: str = ""
    seconds: float = 0.0
    cotangents: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Signature:
    """The options a callable takes: parameter names after the arrays, with defaults; ``any`` = ``**kwargs``."""

    names: Mapping[str, Any]
    any: bool
    module: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any], arrays: int) -> "_Signature | None":
        """The signature, or None where Python cannot tell (functions written in C)."""
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            return None
        module = bool(parameters) and parameters[0].name == "module"
        by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        taken = {p.name for p in by_position[: arrays + module]}
        variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
        names = {p.name: p.default for p in parameters if p.name not in taken and p.kind not in variable}
        return cls(names, any(p.kind is p.VAR_KEYWORD for p in parameters), module)


@dataclasses.dataclass(frozen=True)
class _Acceptance:
    """What a candidate can be asked, known without its being loaded here."""

    names: tuple[str, ...] | None  # None: unknown, everything is tried
    any: bool
    preset: str | None  # the preset whose call translation is in use
    rename: Mapping[str, str]
    supports: tuple[str, ...] | None
    built_in: tuple[str, ...] = ()  # options that the target was built with: neither handed over nor refused

    def takes(self, name: str) -> bool:
        """Whether the signature names a convention option."""
        return self.preset is None and self.names is not None and self.rename.get(name, name) in self.names

    def refusal(self, name: str) -> str | None:
        """Why the option cannot be asked for, or None."""
        if name in self.built_in:
            return None
        if self.supports is not None and name not in self.supports:
            return f"{name} is not among the options that are supported"
        if self.preset is not None:
            theirs = PRESETS[self.preset].names.get(name)
            if theirs is None:
                return f"{PRESETS[self.preset].says} has no {name}"
            known = self.names is None or theirs in self.names or self.any
            return None if known else f"its signature has no {theirs}"
        theirs = self.rename.get(name, name)
        if self.names is None or self.any or theirs in self.names:
            return None
        return f"its signature has no {theirs}"


class Adapter:
    """A loaded candidate: takes a Call, returns an Outcome.  Lives in this process or in the child.

    Parameters
    ----------
    function, backward
        The candidate, and its backward ``backward(d_output, q, k, v, **options)`` or None.
    positional
        Names of the mechanism's positional arrays.
    mechanism, framework, layout, rename, supports, conventions
        As in ``verify``; None where the user said nothing.
    built_in
        Names of options that the candidate was built with.
    independent
        True unless something is known; None: nobody can tell, and its code is not looked at.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backward: Callable[..., Any] | None = None,
        *,
        mechanism: str,
        positional: Sequence[str],
        name: str = "",
        framework: str | None = None,
        layout: str | None = None,
        rename: Mapping[str, str] | None = None,
        supports: Sequence[str] | None = None,
        conventions: Any = None,
        built_in: Sequence[str] = (),
        independent: bool | None = True,
    ) -> None:
        if not callable(function):
            raise UsageError(f"{name or function!r} is not callable")
        if backward is not None and not callable(backward):
            raise UsageError(f"backward {backward!r} is not callable")
        self.function, self.backward, self.positional = function, backward, tuple(positional)
        self.name = name or _name_of(function)
        found_out = independent is not None and (uses_refattn(function) or uses_refattn(backward))
        self.independent = False if found_out else independent
        self.signature = _Signature.of(function, len(self.positional))
        declared = resolve(conventions)
        self.preset, self.notes = self._find_preset(mechanism, declared, bool(rename))
        self.conventions = declared
        if self.preset is not None and declared.preset is None:
            self.conventions = dataclasses.replace(self.preset.conventions, **declared.declared())
        self.framework_name, self.framework = self._choose_framework(framework)
        self.layout = self._choose_layout(layout)
        self.acceptance = _Acceptance(
            names=self._option_names(),
            any=self.signature is not None and self.signature.any,
            preset=self.preset.name if self.preset else None,
            rename=dict(rename or {}),
            supports=None if supports is None else tuple(supports),
            built_in=tuple(built_in),
        )
        self.backward_signature = None if backward is None else _Signature.of(backward, len(self.positional) + 1)

    # ------------------------------------------------------------------ what it is

    def _find_preset(self, mechanism: str, declared: Conventions, renamed: bool) -> tuple[Preset | None, list[str]]:
        """The preset whose signature the candidate has, and how it was found."""
        self._library = _library_function(self.function)
        if mechanism != "scaled_dot_product_attention":
            return None, []
        if self._library:
            return PRESETS[self._library], [f"called as {PRESETS[self._library].says}"]
        explicit = PRESETS[declared.preset] if declared.preset else None
        if renamed:
            return None, []
        if self.signature is None:
            return explicit, []
        names = self._all_names()
        if explicit is not None and explicit.speaks(names):
            return explicit, [f"called as {explicit.says}"]
        found = detect(names)
        if found is None:
            return None, []
        return PRESETS[found], [f"its parameter names are those of {PRESETS[found].says}; called that way"]

    def _all_names(self) -> list[str]:
        with contextlib.suppress(TypeError, ValueError):
            return list(inspect.signature(self.function).parameters)
        return []

    def _option_names(self) -> tuple[str, ...] | None:
        if self.signature is not None:
            return tuple(self.signature.names)
        return self.preset.parameters if self.preset else None

    def _choose_framework(self, asked: str | None) -> tuple[str, Framework]:
        if self._library and self.preset is not None and (asked or "").partition(":")[0] != self.preset.framework:
            if asked is not None:
                self.notes.append(f"{self.preset.says} takes {self.preset.framework} arrays, not {asked}")
            asked = self.preset.framework
        if asked is None and self.preset is not None and self.preset.framework in _libraries_of(self.function):
            asked = self.preset.framework
        asked = asked or "numpy"
        return asked, framework(asked)

    def _choose_layout(self, asked: str | None) -> str:
        if self.preset is not None and (asked is None or self._library):
            return self.preset.layout
        layout = asked or "bhld"
        if sorted(layout) != sorted("bhld"):
            raise UsageError(f"layout is {layout!r}: expected 'bhld' or a permutation of it")
        return layout

    @property
    def limits_address_space(self) -> bool:
        """Whether RLIMIT_AS makes sense: a GPU driver maps far more than it uses."""
        return self.framework_name in ("numpy", "torch", "jax")

    def description(self) -> dict[str, Any]:
        """What the other process has to know, JSON-able."""
        return {
            "name": self.name,
            "framework": self.framework_name,
            "layout": self.layout,
            "conventions": self.conventions.declared(),
            "acceptance": dataclasses.asdict(self.acceptance),
            "has_backward": self.backward is not None or self.framework.differentiates,
            "explicit_backward": self.backward is not None,
            "independent": self.independent,
            "notes": self.notes,
        }

    # ------------------------------------------------------------------ a call

    def invoke(self, call: Call) -> Outcome:
        """Run one call; every exception of the candidate becomes an Outcome."""
        outcome = self._invoke(call, writeable=False)
        if outcome.status == "error" and self.framework_name == "numpy" and _complains_of_read_only(outcome.message):
            again = self._invoke(call, writeable=True)
            if again.mutated:
                return again
            says = f"cannot take read-only arrays, though it changes none: {outcome.message}"
            return dataclasses.replace(outcome, message=says)
        return outcome

    def _invoke(self, call: Call, *, writeable: bool) -> Outcome:
        clock = _Clock()
        try:
            return self._run(call, writeable, clock)
        except NotImplementedError as error:
            return Outcome("unsupported", message=str(error) or "NotImplementedError", seconds=clock.seconds)
        except MemoryError as error:
            return Outcome("memory", message=f"MemoryError: {error}", traceback=_traceback(), seconds=clock.seconds)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
            if self.signature is None and isinstance(error, TypeError) and "keyword" in str(error):
                return Outcome("unsupported", message=message, seconds=clock.seconds)
            memory = any(words.lower() in str(error).lower() for words in _MEMORY_WORDS)
            return Outcome(
                "memory" if memory else "error", message=message, traceback=_traceback(), seconds=clock.seconds
            )

    def _run(self, call: Call, writeable: bool, clock: "_Clock") -> Outcome:
        options = self._admitted(call.options)
        q, v = call.arrays.get("q"), call.arrays.get("v")
        if self.conventions.channels == "equal" and q is not None and v is not None and q.shape[-1] != v.shape[-1]:
            raise Unsupported("it wants as many value channels as query channels")
        given = {**call.arrays, **options}
        original = {n: self._turn_in(n, x) for n, x in given.items() if isinstance(x, np.ndarray)}
        writeable = writeable or self.framework_name != "numpy"  # NumPy alone knows read-only memory
        host = {n: exchange.clone(x, writeable=writeable) for n, x in original.items()}
        cotangents = dict(call.cotangents or {})
        if self.conventions.lse_gradient is False:
            cotangents.pop("lse", None)
        cotangents = {n: np.array(self._result_in(n, x), order="C") for n, x in cotangents.items()}
        x64 = any(x.dtype == np.float64 for x in host.values())
        with self.framework.scope(x64):
            handed = {n: self.framework.bring(host[n]) if n in host else x for n, x in given.items()}

            def timed(values: dict[str, Any]) -> dict[str, Any]:
                with clock:
                    return self._fields(values)

            # Compiled as a whole, JAX's own function takes a second for what takes ten operation by operation.
            function = self.framework.compiled(timed) if self._library else timed
            gradients: dict[str, Any] = {}
            applied: tuple[str, ...] = ()
            remark = ""
            if not cotangents or not call.wrt:
                fields = function(handed)
            elif self.backward is not None:
                fields = function(handed)
                gradients, applied, remark = self._explicit_backward(handed, cotangents)
            else:
                try:
                    fields, gradients, applied, remark = self.framework.run(function, handed, call.wrt, cotangents)
                except NotImplementedError as error:
                    fields = function(handed)
                    remark = f"backward: {str(error) or 'NotImplementedError'}"
            back = {n: self._result_out(n, self._back(n, x)) for n, x in fields.items()}
            pulled = {
                n: self._turn_out(n, self._back(f"the gradient of {n}", g))
                for n, g in gradients.items()
                if n in call.wrt
            }
            mutated = tuple(n for n in host if not self.framework.unchanged(handed[n], host[n], original[n]))
        return Outcome(
            "ok", back, pulled, remark, mutated=mutated, seconds=clock.seconds, cotangents=applied if pulled else ()
        )

    def _admitted(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options that are handed over; Unsupported if one cannot be."""
        admitted = settle(options, self.conventions, self.acceptance.takes)
        for name in CONVENTION_OPTIONS:
            if name in admitted and not self.acceptance.takes(name):
                del admitted[name]
        for name in list(admitted):
            if name in self.acceptance.built_in:
                del admitted[name]
            elif name not in CONVENTION_OPTIONS and (reason := self.acceptance.refusal(name)):
                raise Unsupported(reason)
        return admitted

    def _call_arguments(
        self, handed: Mapping[str, Any], signature: "_Signature | None"
    ) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments as the candidate wants them."""
        arrays = {n: handed[n] for n in self.positional if n in handed}
        options = {n: x for n, x in handed.items() if n not in arrays}
        if self.preset is None:
            return list(arrays.values()), {self.acceptance.rename.get(n, n): x for n, x in options.items()}
        names = signature.names if signature is not None else dict.fromkeys(self.preset.parameters)
        call = self.preset.translate(options, arrays, names)
        return list(arrays.values()), call

    def _fields(self, handed: Mapping[str, Any]) -> dict[str, Any]:
        """Call the candidate and name what it returns; arrays of the framework, in the candidate's layout."""
        if self.preset is not None and not self.preset.batched:
            return self._batch_by_batch(handed, self.preset)
        arrays, options = self._call_arguments(handed, self.signature)
        if self.signature is not None and self.signature.module:
            arrays = [_module_for(handed), *arrays]
        return self._named(self.function(*arrays, **options))

    def _batch_by_batch(self, handed: Mapping[str, Any], preset: Preset) -> dict[str, Any]:
        parts = []
        first = handed[self.positional[0]]
        xp = array_api_compat.array_namespace(first)
        for b in range(first.shape[0]):
            own = dict(handed)
            for n, x in handed.items():
                if n in self.positional:
                    own[n] = x[b, ...]
                elif n == "mask" and x.ndim > 3:
                    own[n] = x[min(b, x.shape[0] - 1), ...]
            arrays, options = self._call_arguments(own, self.signature)
            parts.append(self._named(self.function(*arrays, **options)))
        return {n: xp.stack([part[n] for part in parts]) for n in parts[0]}

    def _named(self, returned: Any) -> dict[str, Any]:
        if isinstance(returned, Mapping):
            return {str(n): x for n, x in returned.items() if x is not None}
        if isinstance(returned, (tuple, list)):
            names = self.preset.results if self.preset else ("output", "lse")
            if len(returned) > len(names) and not self.preset:
                raise TypeError(f"it returned {len(returned)} values: expected the output, (output, lse) or a dict")
            named = dict(zip(names, returned, strict=False))
            return {n: x for n, x in named.items() if n is not None and x is not None}
        if returned is None:
            raise TypeError("it returned None: expected the output, (output, lse) or a dict")
        return {"output": returned}

    def _explicit_backward(
        self, handed: Mapping[str, Any], cotangents: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, Any], tuple[str, ...], str]:
        """Gradients from the candidate's backward: by name, the cotangents it took, a remark."""
        assert self.backward is not None
        if self.preset is not None and not self.preset.batched:
            return {}, (), "backward: not called for a signature without a batch axis"
        signature = self.backward_signature
        known = None if signature is None or signature.any else set(signature.names)
        arrays, options = self._call_arguments(handed, signature)
        options = {n: x for n, x in options.items() if self.preset is None or n not in LSE_SWITCHES}
        missing = set() if known is None else set(options) - known
        if missing:
            return {}, (), f"backward: its signature has no {', '.join(sorted(missing))}"
        brought = {n: self.framework.bring(x) for n, x in cotangents.items()}
        applied = ["output"]
        for name, x in brought.items():  # that of the lse, of a state, of a loss
            if name != "output" and signature is not None and f"d_{name}" in signature.names:
                options[f"d_{name}"] = x
                applied.append(name)
        try:
            returned = self.backward(brought["output"], *arrays, **options)
        except NotImplementedError as error:
            return {}, (), f"backward: {str(error) or 'NotImplementedError'}"
        if isinstance(returned, Mapping):
            ours = {theirs: n for n, theirs in self.acceptance.rename.items()}
            gradients = {ours.get(str(n), str(n)): g for n, g in returned.items() if g is not None}
        else:
            if not isinstance(returned, (tuple, list)):
                returned = (returned,)
            names = [n for n in self.positional if n in handed]
            if len(returned) > len(names):
                raise TypeError(f"backward returned {len(returned)} values for the arrays {', '.join(names)}")
            gradients = {n: g for n, g in zip(names, returned, strict=False) if g is not None}
        return gradients, tuple(applied), ""

    def _back(self, what: str, x: Any) -> np.ndarray:
        try:
            return self.framework.back(x)
        except TypeError as error:
            raise TypeError(f"{what}: {error}") from None

    # ------------------------------------------------------------------ axis order

    def _turn_in(self, name: str, x: np.ndarray) -> np.ndarray:
        """An input in the candidate's axis order: a plain array stays plain, a strided one keeps its memory."""
        layout = self.layout if "b" in self.layout else "b" + self.layout
        if x.ndim != 4 or layout == "bhld" or not (name in self.positional or name in _HEAD_ARRAYS):
            return x
        turned = x.transpose(["bhld".index(c) for c in layout])
        if not x.flags.c_contiguous:
            return turned
        turned = np.ascontiguousarray(turned)
        turned.flags.writeable = x.flags.writeable
        return turned

    def _turn_out(self, name: str, x: np.ndarray) -> np.ndarray:
        layout = self.layout if "b" in self.layout else "b" + self.layout
        if x.ndim != 4 or not (name in self.positional or name in _HEAD_ARRAYS):
            return x
        return x.transpose([layout.index(c) for c in "bhld"])

    def _result_layout(self, name: str) -> tuple[str, str]:
        """(our axis order, the candidate's) of a result."""
        if name == "output":
            layout = (self.preset and self.preset.output_layout) or self.layout
            return "bhld", layout if "b" in layout else "b" + layout
        layout = self.preset.lse_layout if self.preset and name == "lse" else "bhq"
        return "bhq", layout if "b" in layout else "b" + layout

    def _result_in(self, name: str, x: np.ndarray) -> np.ndarray:
        ours, theirs = self._result_layout(name)
        return x.transpose([ours.index(c) for c in theirs]) if x.ndim == len(ours) else x

    def _result_out(self, name: str, x: np.ndarray) -> np.ndarray:
        ours, theirs = self._result_layout(name)
        return x.transpose([theirs.index(c) for c in ours]) if x.ndim == len(ours) else x

    # ------------------------------------------------------------------ from the other process

    def answer(self, call: Path, outcome: Path) -> dict[str, Any]:
        """Read a Call from a file, write its Outcome to another; returns the part that is no array."""
        result = self.invoke(_read_call(call))
        return _write_outcome(result, outcome, self.independent)


class _Clock:
    """Seconds spent in the candidate."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


def _traceback() -> str:
    return traceback.format_exc()[-_TRACEBACK:]


def _complains_of_read_only(message: str) -> bool:
    return any(words in message.lower() for words in ("read-only", "readonly", "not writeable", "not writable"))


def _module_for(handed: Mapping[str, Any]) -> Any:
    """What eager_attention_forward asks its module for."""
    q, k = handed["q"], handed["k"]
    return types.SimpleNamespace(
        num_key_value_groups=q.shape[1] // k.shape[1],
        training=False,
        scaling=q.shape[-1] ** -0.5,
        head_dim=q.shape[-1],
    )


def _name_of(function: Any) -> str:
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or type(function).__name__
    return f"{module}:{name}" if module else str(name)


def _library_function(function: Any) -> str | None:
    """The preset of a function that is torch's or JAX's own."""
    name, module = getattr(function, "__name__", ""), _root(getattr(function, "__module__", None) or "")
    if module == "torch" and name == "scaled_dot_product_attention":
        return "torch"
    if module == "jax" and name == "dot_product_attention":
        return "jax"
    return None


def _libraries_of(function: Any) -> set[str]:
    """Top-level names of the modules that a function's own module has imported."""
    found = {_root(getattr(function, "__module__", None) or "")}
    for value in getattr(_unwrapped(function), "__globals__", {}).values():
        if isinstance(value, types.ModuleType):
            found.add(_root(value.__name__))
    return found


def _unwrapped(function: Any) -> Any:
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


# ---------------------------------------------------------------------- does it use refattn itself?


def uses_refattn(function: Any) -> bool:
    """Whether a function reaches refattn through the names in its code, its closures or the functions it calls."""
    if function is None:
        return False
    if _of_refattn(function) or _of_refattn(type(function)):
        return True
    seen: set[int] = set()
    waiting = [_unwrapped(function)]
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
        if "refattn" in map(_root, imports):
            return True
        values = [current.__globals__[n] for n in names if n in current.__globals__]
        for cell in current.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                values.append(cell.cell_contents)
        waiting += [_unwrapped(x) for x in values]
    return False


def _root(module: str) -> str:
    return module.partition(".")[0]


def _of_refattn(x: Any) -> bool:
    module = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None)
    return isinstance(module, str) and _root(module) == "refattn"


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


class _ImportWatch:
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
        if _root(name) == "refattn" and _root(importer) != "refattn":
            self.seen = True


class _WatchedAdapter(Adapter):
    """The adapter of the child process, where every import of the candidate is watched."""

    watch: _ImportWatch

    def invoke(self, call: Call) -> Outcome:
        outcome = super().invoke(call)
        if self.watch.seen:
            self.independent = False
        return outcome


# ---------------------------------------------------------------------- loading


def load_adapter(spec: Mapping[str, Any]) -> Adapter:
    """Load target strings in the child process: ``spec`` holds target, backward, folder and the words of the user.

    Raises
    ------
    UsageError
        A target does not load.
    """
    watch = _ImportWatch()
    watch.install()
    sys.path.insert(0, spec["folder"])
    if spec["target"].endswith(".onnx"):
        function, backward = _onnx_function(Path(spec["target"]), spec["adapter"]), None
    else:
        function = load_function(spec["target"])
        backward = load_function(spec["backward"]) if spec["backward"] else None
    independent = None if spec["target"].endswith(".onnx") else not watch.seen
    adapter = _WatchedAdapter(function, backward, name=spec["target"], independent=independent, **spec["adapter"])
    adapter.watch = watch
    return adapter


def load_function(target: str) -> Callable[..., Any]:
    """The function behind ``package.module:function`` or ``path/file.py:function``.

    Raises
    ------
    UsageError
        The file, the module or the attribute does not exist, or the import fails.
    """
    place, _, attribute = target.rpartition(":")
    if not place or not attribute:
        raise UsageError(f"target {target!r}: {_TARGET_FORMS}")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except UsageError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UsageError(f"target {target!r} does not load: {type(error).__name__}: {error}\n{_traceback()}") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"target {target!r} does not load: {place} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"target {target!r} does not load: {attribute!r} is a {type(found).__name__}, not a function")
    return found


_TARGET_FORMS = (
    "expected package.module:function, path/file.py:function, model.onnx, dump.safetensors"
    " or 'command:./program {inputs} {outputs}'"
)


def _load_file(path: Path) -> types.ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    for module in list(sys.modules.values()):
        origin = getattr(module, "__file__", None)
        if origin and module.__name__ == path.stem and Path(origin).resolve() == path:
            return module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules else f"candidate_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


_ONNX_TYPES = {
    "tensor(bool)": bool,
    "tensor(float16)": np.float16,
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
}


def _onnx_function(path: Path, request: Mapping[str, Any]) -> Callable[..., Any]:
    """A model as a function whose signature names the model's inputs.

    The positional arrays of the mechanism are the inputs of the same names (any case; query, key, value count as q, k,
    v), else the first ones.  An input ``attn_mask`` takes ``mask`` if it is bool, else ``bias``.  Attributes are
    part of the model: options fixed by the user (``options=``) are taken as built in.
    """
    try:
        import onnxruntime
    except ImportError:
        raise UsageError(f"target {str(path)!r} needs onnxruntime, which is not installed") from None
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    try:
        session = onnxruntime.InferenceSession(str(path), providers=onnxruntime.get_available_providers())
    except Exception as error:
        raise UsageError(f"target {str(path)!r} does not load: {type(error).__name__}: {error}") from error
    inputs = {x.name: x for x in session.get_inputs()}
    positional = list(request["positional"])
    long = {"query": "q", "key": "k", "value": "v"}
    ours = {long.get(name.lower(), name.lower()): name for name in inputs}
    arrays = [ours[n] for n in positional] if all(n in ours for n in positional) else list(inputs)[: len(positional)]
    options = [n for n in inputs if n not in arrays]
    masked = {n: "mask" if inputs[n].type == "tensor(bool)" else "bias" for n in options if n == "attn_mask"}
    results = [x.name for x in session.get_outputs()]

    def run(*given: Any, **more: Any) -> Any:
        theirs = {our: their for their, our in masked.items()}
        feed = {**dict(zip(arrays, given, strict=True)), **{theirs.get(n, n): np.asarray(x) for n, x in more.items()}}
        for name in masked:
            pairs = (given[0].shape[-2], given[1].shape[-2])
            if name not in feed:  # an input cannot be left out: a mask that hides nothing, a bias of zeros
                hides = inputs[name].type == "tensor(bool)"
                feed[name] = np.ones(pairs, dtype=bool) if hides else np.zeros(pairs, dtype=given[0].dtype)
            x = feed[name]
            feed[name] = np.broadcast_to(x, (*(1,) * (len(inputs[name].shape) - x.ndim), *x.shape[:-2], *pairs))
        for name, x in inputs.items():
            if name not in feed:
                raise Unsupported(f"the model wants its input {name}")
            want = _ONNX_TYPES.get(x.type)
            if want is not None and feed[name].dtype != want:
                raise Unsupported(f"the model's input {name} is {x.type}, not {feed[name].dtype}")
        made = session.run(None, {n: np.ascontiguousarray(x) for n, x in feed.items()})
        named = dict(zip(results, made, strict=True))
        return {"output": made[0], **{n: x for n, x in named.items() if n == "lse"}}

    kind = inspect.Parameter
    parameters = [kind(n, kind.POSITIONAL_ONLY) for n in positional]
    parameters += [kind(masked.get(n, n), kind.KEYWORD_ONLY) for n in options]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


# ---------------------------------------------------------------------- calls and outcomes as files


def _write_call(call: Call, path: Path) -> None:
    """Raises Unsupported for options that cannot leave the process."""
    tensors, forms = {}, {}
    plain: dict[str, dict[str, Any]] = {"arrays": {}, "options": {}}
    for group in ("arrays", "options"):
        for name, x in getattr(call, group).items():
            key = f"{group}.{name}"
            if isinstance(x, np.ndarray):
                tensors[key], forms[key] = exchange.compact(x), exchange.memory_form(x)
            else:
                try:
                    plain[group][name] = exchange.to_json(x)
                except TypeError as error:
                    raise Unsupported(f"{name}: {error}") from None
    for name, x in (call.cotangents or {}).items():
        tensors[f"cotangents.{name}"] = x
    order = {group: list(getattr(call, group)) for group in ("arrays", "options")}
    about = {"id": call.id, "mechanism": call.mechanism, "wrt": list(call.wrt), "forward": call.cotangents is None}
    exchange.write_tensors(
        path, tensors, {"call": json.dumps({**about, "forms": forms, "plain": plain, "order": order})}
    )


def _read_call(path: Path) -> Call:
    tensors, metadata = exchange.read_tensors(path)
    about = json.loads(metadata["call"])

    def group(name: str) -> dict[str, Any]:
        values = {n: exchange.from_json(x) for n, x in about["plain"][name].items()}
        for key, x in tensors.items():
            kind, _, own = key.partition(".")
            if kind == name:
                values[own] = exchange.in_form(x, about["forms"][key])
        return {n: values[n] for n in about["order"][name]}

    cotangents = {key.partition(".")[2]: x for key, x in tensors.items() if key.startswith("cotangents.")}
    return Call(
        id=about["id"],
        mechanism=about["mechanism"],
        arrays=group("arrays"),
        options=group("options"),
        cotangents=None if about["forward"] else cotangents,
        wrt=tuple(about["wrt"]),
    )


_PLAIN = ("status", "message", "mutated", "traceback", "seconds", "cotangents")


def _write_outcome(outcome: Outcome, path: Path, independent: bool | None) -> dict[str, Any]:
    tensors = {f"fields.{n}": x for n, x in outcome.fields.items()}
    tensors.update({f"gradients.{n}": x for n, x in outcome.gradients.items()})
    try:
        exchange.write_tensors(path, tensors)
    except TypeError as error:
        outcome = Outcome("error", message=str(error), seconds=outcome.seconds, mutated=outcome.mutated)
        exchange.write_tensors(path, {})
    return {**{n: getattr(outcome, n) for n in _PLAIN}, "independent": independent}


def _read_outcome(path: Path, body: Mapping[str, Any]) -> Outcome:
    tensors, _ = exchange.read_tensors(path)
    groups: dict[str, dict[str, np.ndarray]] = {"fields": {}, "gradients": {}}
    for key, x in tensors.items():
        kind, _, name = key.partition(".")
        groups[kind][name] = x
    plain: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in body.items() if n in _PLAIN}
    return Outcome(fields=groups["fields"], gradients=groups["gradients"], **plain)


# ---------------------------------------------------------------------- the places a candidate runs


class _Here:
    """A callable, in this process."""

    where = "this process"

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.loaded = adapter.description()
        self.independent = adapter.independent

    def run(self, call: Call) -> Outcome:
        return self.adapter.invoke(call)

    def close(self) -> None:
        """Nothing to end."""


class _InChild:
    """A target string: one child process, replaced when it dies."""

    where = "child process"

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        self._child: isolate.Child | None = self._start()
        assert self._child is not None
        self.loaded = self._child.loaded
        self.independent: bool | None = self.loaded["independent"]

    def _start(self) -> isolate.Child:
        try:
            return isolate.Child(self._spec)
        except isolate.LoadError as error:
            raise UsageError(str(error)) from None

    def run(self, call: Call) -> Outcome:
        if self._child is None:
            self._child = self._start()
        files = {n: self._child.folder / f"{n}.safetensors" for n in ("call", "outcome")}
        try:
            _write_call(call, files["call"])
        except Unsupported as error:
            return Outcome("unsupported", message=str(error))
        request = {n: str(path) for n, path in files.items()}
        reply = self._child.ask(request, call.seconds, call.bytes)
        if reply.status != "ok":
            self.close()
            return Outcome(reply.status, message=reply.message, traceback=reply.log)
        if reply.body["independent"] is False:
            self.independent = False
        outcome = _read_outcome(files["outcome"], reply.body)
        if outcome.status == "memory":  # an allocation failed somewhere: what is left of the process is not trusted
            self.close()
        return outcome

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class _Program:
    """A foreign program, started once per call (see the module docstring for the files)."""

    where = "child process"
    independent: bool | None = None

    def __init__(self, target: str, request: Mapping[str, Any]) -> None:
        self.argv = shlex.split(target.removeprefix("command:"))
        if not self.argv or not any("{inputs}" in a for a in self.argv) or not any("{outputs}" in a for a in self.argv):
            raise UsageError(f"target {target!r}: expected 'command:./program {{inputs}} {{outputs}}'")
        if shutil.which(self.argv[0]) is None:
            raise UsageError(f"target {target!r} does not load: there is no program {self.argv[0]!r}")

        def anything(*arrays: Any, **options: Any) -> None:
            """Stands for the program where only its signature is asked for."""

        more = {n: x for n, x in request.items() if n != "framework"}
        self._adapter = Adapter(anything, name=target, independent=None, **more)
        self.loaded = {
            **self._adapter.description(),
            "has_backward": True,
            "explicit_backward": True,
            "independent": None,
        }
        self._folder = tempfile.TemporaryDirectory(prefix="refattn-", ignore_cleanup_errors=True)

    def run(self, call: Call) -> Outcome:
        adapter, folder = self._adapter, Path(self._folder.name)
        inputs, outputs = folder / "inputs.safetensors", folder / "outputs.safetensors"
        outputs.unlink(missing_ok=True)
        try:
            options = adapter._admitted(call.options)
            named = {adapter.acceptance.rename.get(n, n): x for n, x in {**call.arrays, **options}.items()}
            rest = {n: exchange.to_json(x) for n, x in named.items() if not isinstance(x, np.ndarray) and x is not None}
        except (Unsupported, TypeError) as error:
            return Outcome("unsupported", message=str(error))
        tensors = {n: adapter._turn_in(n, x) for n, x in named.items() if isinstance(x, np.ndarray)}
        tensors.update({f"d_{n}": adapter._result_in(n, x) for n, x in (call.cotangents or {}).items()})
        metadata = {
            "mechanism": call.mechanism,
            "options": json.dumps({n: x["tuple"] if isinstance(x, dict) else x for n, x in rest.items()}),
            "wrt": json.dumps(list(call.wrt)),
        }
        exchange.write_tensors(inputs, tensors, metadata)
        argv = [a.replace("{inputs}", str(inputs)).replace("{outputs}", str(outputs)) for a in self.argv]
        start = time.perf_counter()
        try:
            reply = isolate.run_program(argv, call.seconds, call.bytes, folder / "log.txt")
        except OSError as error:
            return Outcome("error", message=f"the program does not start: {error}")
        seconds = time.perf_counter() - start
        if reply.status != "ok":
            return Outcome(reply.status, message=reply.message, traceback=reply.log, seconds=seconds)
        if reply.body["status"] != 0:
            says = f"the program {isolate.exit_words(reply.body['status'])}"
            return Outcome("error", message=says, traceback=reply.log, seconds=seconds)
        try:
            made, said = exchange.read_tensors(outputs)
        except (OSError, ValueError) as error:
            return Outcome(
                "error", message=f"its outputs cannot be read: {error}", traceback=reply.log, seconds=seconds
            )
        if "unsupported" in said:
            return Outcome("unsupported", message=said["unsupported"], seconds=seconds)
        return _outcome_from_tensors(made, call, adapter, seconds)

    def close(self) -> None:
        self._folder.cleanup()


def _outcome_from_tensors(
    made: Mapping[str, np.ndarray], call: Call, adapter: Adapter, seconds: float = 0.0
) -> Outcome:
    gradients, fields = {}, {}
    for name, x in made.items():
        own = name.removeprefix("d_")
        if name.startswith("d_") and own in call.wrt:
            gradients[own] = adapter._turn_out(own, x)
        elif not name.startswith("d_"):
            fields[name] = adapter._result_out(name, x)
    if "output" not in fields:
        return Outcome("error", message=f"there is no 'output' among the outputs ({', '.join(made) or 'none'})")
    applied = tuple(n for n in (call.cotangents or {}) if n == "output" or n in fields) if gradients else ()
    return Outcome("ok", fields, gradients, seconds=seconds, cotangents=applied)


class _Recorded:
    """A recorded call: its inputs are the only probe, its outputs the only answer."""

    where = "recorded call"
    independent: bool | None = None

    def __init__(self, path: Path, request: Mapping[str, Any], known: Sequence[str]) -> None:
        if not path.is_file():
            raise UsageError(f"there is no file {path}")
        try:
            tensors, metadata = exchange.read_tensors(path)
            options = json.loads(metadata.get("options", "{}"))
        except ValueError as error:
            raise UsageError(f"{path} does not load: {error}") from None
        request = {**request, "layout": request["layout"] or metadata.get("layout")}

        def anything(*arrays: Any, **options: Any) -> None:
            """Stands for whatever was recorded."""

        adapter = Adapter(
            anything, name=str(path), independent=None, **{n: x for n, x in request.items() if n != "framework"}
        )
        self.loaded = {**adapter.description(), "independent": None}
        tensors = {n.removeprefix("inputs.").removeprefix("outputs."): x for n, x in tensors.items()}
        ours = {theirs: n for n, theirs in adapter.acceptance.rename.items()}
        tensors = {ours.get(n, n): x for n, x in tensors.items()}
        options = {ours.get(n, n): tuple(x) if isinstance(x, list) else x for n, x in options.items()}
        missing = [n for n in adapter.positional[:1] if n not in tensors]
        if missing or "output" not in tensors:
            what = ", ".join([*missing, *([] if "output" in tensors else ["output"])])
            raise UsageError(f"{path} holds no {what}: it has {', '.join(tensors) or 'no arrays'}")
        unknown = [n for n in options if n not in known]
        if unknown:
            raise UsageError(f"{path}: the mechanism has no option {', '.join(unknown)}")
        arrays = {n: adapter._turn_out(n, tensors[n]) if n in tensors else None for n in adapter.positional}
        options.update({n: adapter._turn_out(n, x) for n, x in tensors.items() if n in known and n not in arrays})
        wrt = tuple(n for n in (*arrays, *options) if f"d_{n}" in tensors)
        cotangents = {n: adapter._result_out(n, tensors[f"d_{n}"]) for n in ("output", "lse") if f"d_{n}" in tensors}
        self.call = Call(
            "recorded", request["mechanism"], arrays, options, cotangents if wrt and cotangents else None, wrt
        )
        made = {n: x for n, x in tensors.items() if n not in known and n not in ("d_output", "d_lse")}
        self.outcome = _outcome_from_tensors(made, self.call, adapter)
        if self.outcome.gradients:
            self.outcome = dataclasses.replace(self.outcome, cotangents=tuple(cotangents))
        self.loaded["has_backward"] = bool(self.outcome.gradients)

    def run(self, call: Call) -> Outcome:
        if call.id != self.call.id:
            return Outcome("unsupported", message="a recorded call answers no other")
        return self.outcome

    def close(self) -> None:
        """Nothing to end."""


# ---------------------------------------------------------------------- the candidate


class Candidate:
    """An opened candidate (see :func:`open_candidate`); a context manager.

    Attributes
    ----------
    name, where
        What it is called; "this process", "child process" or "recorded call".
    conventions
        Declared ones, a preset's included.
    framework, layout, notes
        What it is called with, and sentences for the report.
    has_backward
        A backward was given, or the framework differentiates.
    recorded
        The only calls that a recorded call can answer; empty for every other candidate.
    """

    def __init__(self, make: Callable[[], Any], jobs: int = 1) -> None:
        self._make = make
        self._places = [make()]
        first = self._places[0]
        about = first.loaded
        self._jobs = max(1, jobs) if first.where == "child process" else 1
        self.name: str = about["name"]
        self.where: str = first.where
        self.conventions = resolve(about["conventions"])
        self.framework: str = about["framework"]
        self.layout: str = about["layout"]
        self.has_backward: bool = about["has_backward"]
        self.explicit_backward: bool = about["explicit_backward"]
        self.notes: tuple[str, ...] = tuple(about["notes"])
        self.recorded: tuple[Call, ...] = (first.call,) if isinstance(first, _Recorded) else ()
        acceptance = about["acceptance"]
        for n in ("names", "supports", "built_in"):
            acceptance[n] = None if acceptance[n] is None else tuple(acceptance[n])
        self._acceptance = _Acceptance(**acceptance)

    @property
    def independent(self) -> bool | None:
        """False when it uses refattn itself, as far as is known by now; None when nobody can tell."""
        known = [place.independent for place in self._places]
        return False if False in known else known[0]

    def takes(self, name: str) -> bool:
        """Whether its signature names a convention option (``**kwargs`` does not count)."""
        return self._acceptance.takes(name)

    def accepts(self, options: Iterable[str]) -> tuple[bool, str]:
        """Whether these options can be asked for, else the reason."""
        for name in options:
            if name not in CONVENTION_OPTIONS and (reason := self._acceptance.refusal(name)):
                return False, reason
        return True, ""

    def run(self, calls: Sequence[Call], progress: Callable[[int, int], None] | None = None) -> list[Outcome]:
        """One outcome per call, in order.

        In a child process a call that crashes, hangs or runs out of memory takes nothing with it: the remaining calls go
        to a new child.  ``progress(done, total)`` is called after each outcome.
        """
        done = 0

        def some(place: Any, part: Sequence[Call]) -> list[Outcome]:
            nonlocal done
            found = []
            for call in part:
                found.append(place.run(call))
                done += 1
                if progress is not None:
                    progress(done, len(calls))
            return found

        jobs = min(self._jobs, len(calls))
        if jobs <= 1:
            return some(self._places[0], calls)
        while len(self._places) < jobs:
            self._places.append(self._make())
        size = math.ceil(len(calls) / jobs)
        parts = [calls[i : i + size] for i in range(0, len(calls), size)]
        with ThreadPoolExecutor(jobs) as pool:
            return [x for part in pool.map(some, self._places, parts) for x in part]

    def describe(self) -> dict[str, Any]:
        """For the report: what was verified and how it was called."""
        return {
            "target": self.name,
            "where": self.where,
            "framework": self.framework,
            "layout": self.layout,
            "preset": self._acceptance.preset,
            "conventions": self.conventions.declared(),
            "independent": self.independent,
            "notes": list(self.notes),
        }

    def close(self) -> None:
        """End its processes."""
        for place in self._places:
            place.close()

    def __enter__(self) -> "Candidate":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_candidate(
    target: Callable[..., Any] | str,
    mechanism: Any,
    *,
    framework: str | None = None,
    layout: str | None = None,
    rename: Mapping[str, str] | None = None,
    supports: Sequence[str] | None = None,
    conventions: Any = None,
    backward: Callable[..., Any] | str | None = None,
    options: Mapping[str, Any] | None = None,
    jobs: int = 1,
) -> Candidate:
    """Load a candidate and find out how it is called.

    Parameters
    ----------
    target
        A callable, or a target string (see the module docstring).
    mechanism
        The Mechanism it is held against.
    framework
        "numpy", "torch", "jax", "cupy" or "torch:<device>"; None = NumPy, or what a known signature works with.
    layout
        Axis order of q, k, v and the output: a permutation of "bhld"; None = "bhld", or that of a known signature.
    rename
        Its names for refattn's options.  With it, known signatures are not looked for.
    supports
        The options it has, said by hand.
    conventions
        A preset's name, a dict of fields, or a Conventions record.
    backward
        Its backward, callable or string like the target.
    options
        Options fixed in every probe: built in for an ONNX model, otherwise handed over like the others.
    jobs
        Child processes that share the calls.

    Raises
    ------
    UsageError
        The target does not load, or framework, layout, conventions or preset are unknown.
    """
    positional = tuple(mechanism._positional)
    request: dict[str, Any] = {
        "mechanism": mechanism.name,
        "positional": list(positional),
        "framework": framework,
        "layout": layout,
        "rename": dict(rename or {}),
        "supports": None if supports is None else list(supports),
        "conventions": resolve(conventions).declared(),
    }
    if not isinstance(target, str):
        function = load_function(backward) if isinstance(backward, str) else backward
        return Candidate(lambda: _Here(Adapter(target, function, **request)))
    if backward is not None and not isinstance(backward, str):
        raise UsageError("a target string runs in a child process: its backward must be a target string as well")
    if target.startswith("command:"):
        if backward is not None:
            raise UsageError("a command writes its gradients beside its outputs; it takes no backward target")
        return Candidate(lambda: _Program(target, request), jobs)
    if target.endswith(".safetensors"):
        known = list(inspect.signature(mechanism).parameters)
        return Candidate(lambda: _Recorded(Path(target), request, known))
    if target.endswith(".onnx"):
        request["built_in"] = list(options or {})
    elif ":" not in target:
        raise UsageError(f"target {target!r}: {_TARGET_FORMS}")
    spec = {"target": target, "backward": backward, "folder": str(Path.cwd()), "adapter": request}
    return Candidate(lambda: _InChild(spec), jobs)
