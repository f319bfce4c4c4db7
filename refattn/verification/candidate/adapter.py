"""The adapter: how a loaded candidate is called (names, axis order, framework), and its answer read."""

import contextlib
import dataclasses
import inspect
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import array_api_compat
import numpy as np

from refattn.mechanism import functions, mechanisms
from refattn.verification.candidate import files
from refattn.verification.candidate.calls import Call, Outcome, read_call, write_outcome
from refattn.verification.candidate.frameworks import Framework, Pulled, framework
from refattn.verification.candidate.independence import libraries_of, root, watched_calls
from refattn.verification.candidate.served import LAYOUTS, Served
from refattn.verification.candidate.signature import Acceptance, Signature
from refattn.verification.conventions import (
    CONVENTION_OPTIONS,
    LSE_SWITCHES,
    PRESETS,
    Conventions,
    Preset,
    detect,
    resolve,
    settle,
)
from refattn.verification.errors import Unsupported, UsageError

__all__ = ["Adapter"]

_HEAD_ARRAYS = ("q_global", "k_global", "v_global", "channel_decay", "erase_key", "remove", "replace")
"""Options with axes (b, h, l, d), beside the positional arrays."""
_TOKEN_ARRAYS = ("decay", "beta", "dt")
"""Arrays with axes (b, h, l)."""
_OURS = {"final_state": "state", "final_states": "state", "present_state": "state", "o": "output"}
"""Our names of results that go by others."""
_STATE_COTANGENTS = ("d_state", "dht", "d_final_state", "d_final_states", "d_present_state")
_MEMORY_WORDS = ("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc", "RESOURCE_EXHAUSTED")
_TRACEBACK = 4000


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
    imports_refattn
        Whether it, or what it imports, imports refattn.
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
        imports_refattn: bool = False,
    ) -> None:
        if not callable(function):
            raise UsageError(f"{name or function!r} is not callable")
        if backward is not None and not callable(backward):
            raise UsageError(f"backward {backward!r} is not callable")
        self.name = name or _name_of(function)
        self.served, self.served_layout = None, None
        if (layout or "").partition(":")[0] in LAYOUTS:
            if mechanism != "scaled_dot_product_attention" or (framework or "numpy") != "numpy":
                raise UsageError(
                    f"layout is {layout!r}: packed and paged are for NumPy kernels of scaled_dot_product_attention"
                )
            self.served, self.served_layout = Served(function, backward, str(layout)), layout
            function, backward, layout = self.served, self.served.backward, None
        self.function, self.backward, self.positional = function, backward, tuple(positional)
        self.mechanism, self.imports_refattn = mechanism, imports_refattn
        self.signature = Signature.of(function, len(self.positional))
        declared = resolve(conventions)
        self.preset, self.notes = self._find_preset(mechanism, declared, bool(rename))
        self.conventions = declared
        if self.preset is not None and declared.preset is None:
            self.conventions = dataclasses.replace(self.preset.conventions, **declared.given())
        by_name = self.preset is not None and self.preset.by_name
        if by_name:
            self.signature = Signature.of(function, 0)
        built_in = (*built_in, *dict(self.conventions.fixed or ()))
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.framework_name, self.framework = self._choose_framework(framework)
        self.layout = self._choose_layout(layout)
        self.acceptance = Acceptance(
            names=self._option_names(),
            any=self.signature is not None and self.signature.any,
            preset=self.preset.name if self.preset else None,
            rename=dict(rename or {}),
            supports=None if supports is None else tuple(supports),
            built_in=tuple(built_in),
        )
        arrays = 0 if by_name else len(self.positional)
        self.backward_signature = None if backward is None else Signature.of(backward, arrays + 1)

    # ------------------------------------------------------------------ what it is

    def _find_preset(self, mechanism: str, declared: Conventions, renamed: bool) -> tuple[Preset | None, list[str]]:
        """The preset whose signature the candidate has, and how it was found."""
        self._library = _library_function(self.function)
        if not any(mechanism in p.mechanisms for p in PRESETS.values()):
            return None, []
        if self._library:
            return PRESETS[self._library], [f"called as {PRESETS[self._library].says}"]
        explicit = PRESETS[declared.preset] if declared.preset else None
        if explicit is not None and mechanism not in explicit.mechanisms:
            says = f"conventions: {explicit.says} are no signature of {mechanism}"
            raise UsageError(f"{says}; they have {', '.join(explicit.mechanisms)}")
        if renamed and mechanism == "scaled_dot_product_attention":
            return None, []
        if self.signature is None:
            return explicit, []
        names = self._all_names()
        if explicit is not None and explicit.speaks(names):
            return explicit, [f"called as {explicit.says}"]
        found = detect(names, mechanism)
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
        if asked is None and self.preset is not None and self.preset.framework in libraries_of(self.function):
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
            "mechanism": self.mechanism,
            "framework": self.framework_name,
            "layout": self.served_layout or self.layout,
            "conventions": self.conventions.declared(),
            "acceptance": dataclasses.asdict(self.acceptance),
            "has_backward": self.backward is not None or self.framework.differentiates,
            "explicit_backward": self.backward is not None,
            "compiles": self.framework.compiles,
            "imports_refattn": self.imports_refattn,
            "notes": self.notes,
        }

    # ------------------------------------------------------------------ a call

    def invoke(self, call: Call) -> Outcome:
        """Run one call; every exception of the candidate becomes an Outcome."""
        with watched_calls() as called:
            outcome = self._invoke_twice(call)
        return dataclasses.replace(outcome, called=tuple(sorted(called)))

    def _invoke_twice(self, call: Call) -> Outcome:
        """Once with read-only arrays; once more with others where that alone is what it complains of."""
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
            passes_on = self.signature is None or self.signature.any
            if passes_on and isinstance(error, TypeError) and "unexpected keyword" in str(error):
                return Outcome("unsupported", message=message, seconds=clock.seconds)
            memory = any(words.lower() in str(error).lower() for words in _MEMORY_WORDS)
            return Outcome(
                "memory" if memory else "error", message=message, traceback=_traceback(), seconds=clock.seconds
            )

    def _run(self, call: Call, writeable: bool, clock: "_Clock") -> Outcome:
        options = self.admitted(call.options)
        q, v = call.arrays.get("q"), call.arrays.get("v")
        if self.conventions.channels == "equal" and q is not None and v is not None and q.shape[-1] != v.shape[-1]:
            raise Unsupported("it wants as many value channels as query channels")
        options |= self._required({**call.arrays, **options})
        nested = {**call.arrays, **options}
        given = files.flat(nested)
        self._shapes = {n: np.shape(x) for n, x in given.items() if isinstance(x, np.ndarray)}
        original = {n: self.turn_in(n, x) for n, x in given.items() if isinstance(x, np.ndarray)}
        writeable = writeable or self.framework_name != "numpy"  # NumPy alone knows read-only memory
        host = {n: files.clone(x, writeable=writeable) for n, x in original.items()}
        cotangents = {n: self.result_in(n, x) for n, x in (call.cotangents or {}).items()}
        if self.conventions.lse_gradient is False:
            cotangents.pop("lse", None)
        host_cotangents = {n: files.clone(x, writeable=writeable) for n, x in cotangents.items()}
        x64 = any(x.dtype == np.float64 for x in host.values())
        with self.framework.scope(x64):
            brought = {n: self.framework.bring(host[n]) if n in host else x for n, x in given.items()}
            handed = files.nested(brought, nested)

            def timed(values: dict[str, Any]) -> dict[str, Any]:
                with clock:
                    return self._fields(values)

            pulled = Pulled()
            if not cotangents or not call.wrt:
                fields = timed(handed)
            elif self.backward is not None:
                fields = timed(handed)
                pulled = self._explicit_backward(handed, host_cotangents)
            else:
                try:
                    fields, pulled = self.framework.run(timed, handed, call.wrt, host_cotangents)
                except NotImplementedError as error:
                    fields = timed(handed)
                    pulled = Pulled(remark=f"backward: {str(error) or 'NotImplementedError'}")
            back = {n: self.result_out(n, self._back(n, x)) for n, x in fields.items()}
            gradients = {
                n: self.turn_out(n, self._back(f"the gradient of {n}", g))
                for n, g in pulled.gradients.items()
                if n in call.wrt
            }
            served = ("k",) if self.served is not None and self.served.mutated else ()
            mutated = served + tuple(n for n in host if not self.framework.unchanged(brought[n], host[n], original[n]))
            if self.framework_name == "numpy":
                mutated += tuple(f"d_{n}" for n, x in cotangents.items() if host_cotangents[n].tobytes() != x.tobytes())
        return Outcome(
            "ok",
            back,
            gradients,
            pulled.remark,
            mutated=mutated,
            seconds=clock.seconds,
            cotangents=pulled.applied if gradients or pulled.due or pulled.failed else (),
            due=pulled.due,
            backward_failed=pulled.failed,
        )

    def admitted(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options that are handed over; Unsupported if one cannot be."""
        admitted = settle(options, self.conventions, self.acceptance.takes)
        admitted |= {n: None for n, x in options.items() if x is None and n not in CONVENTION_OPTIONS}  # asked for so
        for name in CONVENTION_OPTIONS:
            if name in admitted and not self.acceptance.takes(name):
                del admitted[name]
        for name in list(admitted):
            if name in self.acceptance.built_in:
                del admitted[name]
            elif name not in CONVENTION_OPTIONS and (reason := self.acceptance.refusal(name)):
                raise Unsupported(reason)
        return admitted

    def _required(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the signature has no default for and the call leaves out: the mechanism's own default, if it has one."""
        if self.signature is None or self.preset is not None:
            return {}
        ours = {theirs: n for n, theirs in self.acceptance.rename.items()}
        owner = _owner(self.mechanism)
        defaults = {} if owner is None else inspect.signature(owner).parameters
        found = {}
        for theirs, default in self.signature.names.items():
            name = ours.get(theirs, theirs)
            if default is not inspect.Parameter.empty or name in given or name in self.acceptance.built_in:
                continue
            own = defaults[name].default if name in defaults else None
            if own is None or own is inspect.Parameter.empty:
                raise Unsupported(f"its signature requires {theirs}, which this call leaves out")
            found[name] = own
        return found

    def _call_arguments(
        self, handed: Mapping[str, Any], signature: "Signature | None"
    ) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments as the candidate wants them."""
        arrays = {n: handed[n] for n in self.positional if n in handed}
        options = {n: x for n, x in handed.items() if n not in arrays}
        if self.preset is None:
            return list(arrays.values()), {self.acceptance.rename.get(n, n): x for n, x in options.items()}
        for name in self.preset.requires.get(self.mechanism, ()):
            if name not in options:
                raise Unsupported(f"{self.preset.says} is not called without {name}")
        names = signature.names if signature is not None else dict.fromkeys(self.preset.parameters)
        named = {self.acceptance.rename[n]: x for n, x in options.items() if n in self.acceptance.rename}
        rest = {n: x for n, x in options.items() if n not in self.acceptance.rename}
        call = {**self.preset.translate(rest, arrays, names), **named}
        if self.preset.arrays and signature is not None:
            for theirs, default in signature.names.items():
                if default is inspect.Parameter.empty and theirs not in call and theirs not in _STATE_COTANGENTS:
                    raise Unsupported(f"its signature requires {theirs}, which this call leaves out")
        return ([] if self.preset.by_name else list(arrays.values())), call

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
            return {_OURS.get(str(n), str(n)): x for n, x in returned.items() if x is not None}
        if isinstance(returned, (tuple, list)):
            owner = _owner(self.mechanism)
            known = () if owner is None else owner.outputs
            names = self.preset.results if self.preset else known if len(known) > 1 else ("output", "lse")
            if len(returned) > len(names) and not self.preset:
                raise TypeError(f"it returned {len(returned)} values: expected the output, (output, lse) or a dict")
            named = dict(zip(names, returned, strict=False))
            return {n: x for n, x in named.items() if n is not None and x is not None}
        if returned is None:
            raise TypeError("it returned None: expected the output, (output, lse) or a dict")
        return {"output": returned}

    def _explicit_backward(self, handed: Mapping[str, Any], cotangents: Mapping[str, np.ndarray]) -> Pulled:
        """Gradients from the candidate's backward; an exception there leaves the forward's results their verdict."""
        assert self.backward is not None
        if self.preset is not None and not self.preset.batched:
            return Pulled(remark="backward: not called for a signature without a batch axis")
        signature = self.backward_signature
        known = None if signature is None or signature.any else set(signature.names)
        arrays, options = self._call_arguments(handed, signature)
        options = {n: x for n, x in options.items() if self.preset is None or n not in LSE_SWITCHES}
        missing = set() if known is None else set(options) - known
        if missing:
            return Pulled(remark=f"backward: its signature has no {', '.join(sorted(missing))}")
        brought = {n: self.framework.bring(x) for n, x in cotangents.items()}
        applied = ["output"]
        for name, x in brought.items():  # that of the lse, of a state, of a loss
            if name != "output" and signature is not None and f"d_{name}" in signature.names:
                options[f"d_{name}"] = x
                applied.append(name)
            elif name == "state" and signature is not None:
                theirs = next((n for n in _STATE_COTANGENTS if n in signature.names), None)
                if theirs is not None:
                    options[theirs] = x
                    applied.append(name)
        for theirs, default in signature.names.items() if signature is not None else ():
            if default is inspect.Parameter.empty and theirs.startswith("d_") and theirs not in options:
                return Pulled(remark=f"backward: its signature requires {theirs}, which this call leaves out")
        if "output" not in brought:  # a cotangent of the lse alone: that of the output is zero
            if applied == ["output"]:
                return Pulled(remark="backward: it takes no cotangent but that of the output")
            brought["output"] = self.framework.bring(np.zeros(self._output_shape(handed), dtype=self._dtype(handed)))
        try:
            returned = self.backward(brought["output"], *arrays, **options)
            gradients = self._named_gradients(returned, self._gradient_order(handed, cotangents))
        except NotImplementedError as error:
            return Pulled(remark=f"backward: {str(error) or 'NotImplementedError'}")
        except (MemoryError, KeyboardInterrupt):
            raise
        except Exception as error:
            return Pulled(applied=tuple(applied), failed=f"the backward raised {type(error).__name__}: {error}")
        return Pulled(gradients, tuple(applied))

    def _gradient_order(self, handed: Mapping[str, Any], cotangents: Mapping[str, Any]) -> list[str]:
        """What a tuple of gradients holds: the arrays, then the differentiable options that were passed, as the signature has them."""
        arrays = [n for n in self.positional if n in handed]
        owner = _owner(self.mechanism)
        if self.signature is None or owner is None:
            return arrays
        ours = self._our_names(list(handed))
        options = [ours.get(n, n) for n in self.signature.names]
        if self.preset is not None and self.preset.by_name:
            arrays = []
        return arrays + [n for n in options if n in handed and n in owner.differentiable]

    def _our_names(self, handed: Sequence[str]) -> dict[str, str]:
        """Our names by theirs; where one of theirs stands for several, that of what was handed over."""
        pairs: list[tuple[str, str]] = list(self.acceptance.rename.items())
        if self.preset is not None:
            pairs = [*self.preset.arrays.items(), *self.preset.names.items(), *pairs]
        pairs.sort(key=lambda pair: pair[0] in handed or pair[0] in self.acceptance.rename)
        return {theirs: ours for ours, theirs in pairs}

    def _named_gradients(self, returned: Any, names: Sequence[str]) -> dict[str, Any]:
        if isinstance(returned, Mapping):
            ours = self._our_names(names)
            return {ours.get(str(n), str(n)): g for n, g in returned.items() if g is not None}
        if not isinstance(returned, (tuple, list)):
            returned = (returned,)
        if len(returned) > len(names):
            raise TypeError(f"backward returned {len(returned)} values for the arrays {', '.join(names)}")
        return {n: g for n, g in zip(names, returned, strict=False) if g is not None}

    def _output_shape(self, handed: Mapping[str, Any]) -> tuple[int, ...]:
        """Shape of the output in the candidate's own layout, from one more call of the forward."""
        return tuple(self._fields(dict(handed))["output"].shape)

    def _dtype(self, handed: Mapping[str, Any]) -> np.dtype:
        return self.framework.back(next(x for n in self.positional if (x := handed.get(n)) is not None)).dtype

    def _back(self, what: str, x: Any) -> np.ndarray:
        try:
            return self.framework.back(x)
        except TypeError as error:
            raise TypeError(f"{what}: {error}") from None

    # ------------------------------------------------------------------ axis order

    def turn_in(self, name: str, x: np.ndarray) -> np.ndarray:
        """An input in the candidate's axis order: a plain array stays plain, a strided one keeps its memory."""
        if name.removeprefix("d_") == "state":
            return self._state(x)
        layout = self.layout if "b" in self.layout else "b" + self.layout
        if x.ndim == 3 and name in _TOKEN_ARRAYS and layout.index("l") < layout.index("h"):
            x = np.ascontiguousarray(x.swapaxes(1, 2))
        if x.ndim != 4 or layout == "bhld" or not self._has_heads(name):
            return x
        turned = x.transpose(["bhld".index(c) for c in layout])
        if not x.flags.c_contiguous:
            return turned
        turned = np.ascontiguousarray(turned)
        if self.preset is not None and self.preset.packed:
            turned = turned.reshape(*turned.shape[:2], -1)
        turned.flags.writeable = x.flags.writeable
        return turned

    def _has_heads(self, name: str) -> bool:
        return name in self.positional or name in _HEAD_ARRAYS

    def _state(self, x: np.ndarray) -> np.ndarray:
        """A recurrence's state between our layout (d, e) and the candidate's: the same both ways."""
        return np.ascontiguousarray(x.swapaxes(-1, -2)) if self.conventions.state_layout == "ed" and x.ndim > 2 else x

    def _unpacked(self, x: np.ndarray, heads: int) -> np.ndarray:
        """(b, l, h d) as (b, l, h, d)."""
        return x.reshape(*x.shape[:2], heads, -1) if x.ndim == 3 and heads and not x.shape[-1] % heads else x

    def turn_out(self, name: str, x: np.ndarray) -> np.ndarray:
        if name == "state":
            return self._state(x)
        layout = self.layout if "b" in self.layout else "b" + self.layout
        shape = self._shapes.get(name, ())
        if len(shape) == 3 and x.ndim == 3 and name in _TOKEN_ARRAYS and layout.index("l") < layout.index("h"):
            return x.swapaxes(1, 2)
        if self.preset is not None and self.preset.packed and len(shape) == 4:
            x = self._unpacked(x, shape[1])
        if x.ndim != 4 or not self._has_heads(name):
            return x
        return x.transpose([layout.index(c) for c in "bhld"])

    def result_layout(self, name: str) -> tuple[str, str]:
        """(our axis order, the candidate's) of a result."""
        if name == "output":
            layout = (self.preset and self.preset.output_layout) or self.layout
            return "bhld", layout if "b" in layout else "b" + layout
        layout = self.preset.lse_layout if self.preset and name == "lse" else "bhq"
        return "bhq", layout if "b" in layout else "b" + layout

    def result_in(self, name: str, x: np.ndarray) -> np.ndarray:
        if name == "state":
            return self._state(x)
        ours, theirs = self.result_layout(name)
        turned = x.transpose([ours.index(c) for c in theirs]) if x.ndim == len(ours) else x
        packed = self.preset is not None and self.preset.packed and turned.ndim == 4
        return turned.reshape(*turned.shape[:2], -1) if packed else turned

    def result_out(self, name: str, x: np.ndarray) -> np.ndarray:
        if name == "state":
            return self._state(x)
        if self.preset is not None and self.preset.packed and name == "output":
            x = self._unpacked(x, max(self._shapes[n][1] for n in self.positional if n in self._shapes))
        ours, theirs = self.result_layout(name)
        return x.transpose([theirs.index(c) for c in ours]) if x.ndim == len(ours) else x

    # ------------------------------------------------------------------ from the other process

    def answer(self, call: Path, outcome: Path) -> dict[str, Any]:
        """Read a Call from a file, write its Outcome to another; returns the part that is no array."""
        result = self.invoke(read_call(call))
        return write_outcome(result, outcome, self.imports_refattn)


def _owner(name: str) -> Any:
    """The mechanism or function of this name; None where there is none."""
    return mechanisms.get(name) or next((f for f in functions.values() if f.name == name), None)


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
    name, module = getattr(function, "__name__", ""), root(getattr(function, "__module__", None) or "")
    if module == "torch" and name == "scaled_dot_product_attention":
        return "torch"
    if module == "jax" and name == "dot_product_attention":
        return "jax"
    return None
