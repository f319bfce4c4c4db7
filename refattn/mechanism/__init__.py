"""The Function and Mechanism objects: one way of calling everything, and the registry of mechanisms.

The mathematics lives in plain functions of a mechanism's file::

    forward(q, k, v, *, option=...)            -> (Result, saved)
    backward(saved, *, output, lse)            -> {"q": ..., "k": ...}      cotangents in, None where left out

A Function puts around them what is the same everywhere: binding and naming of arguments, one namespace, the compute
dtype, rounding of the results to the dtype of the inputs, adjoints of broadcasting, and errors.  A forward that names
``backend`` or ``algorithm`` among its keywords is given them.
"""

import difflib
import importlib
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from refattn import arrays
from refattn.described import described
from refattn.mechanism.calls import COMMON, Call, check_of
from refattn.records import Cost, Counts, Mutation, Result

__all__ = ["Function", "Mechanism", "function", "functions", "mechanism", "mechanisms"]

ROOMS = ("layers", "memory", "positions", "routing", "gates", "serving")
"""Rooms whose functions are called by the room's name too."""
MISTAKEN = ("layers", "memory")
"""Those of them that have known mistakes."""

_registry: dict[str, "Mechanism"] = {}
mechanisms: Mapping[str, "Mechanism"] = MappingProxyType(_registry)
"""Every registered mechanism by name; read-only."""

_others: dict[str, "Function"] = {}
functions: Mapping[str, "Function"] = MappingProxyType(_others)
"""Every differentiable function of the library that is no mechanism, by name: "softmax", "positions.rotary" ...; read-only."""


def _table(kind: str, name: str) -> Any:
    """What refattn/definitions/functions.py has for a function that is no mechanism."""
    table = getattr(importlib.import_module("refattn.definitions.functions"), kind)
    if name not in table:
        raise LookupError(f"{name} has no entry in {kind} of refattn.definitions.functions")
    return table[name]


def _found(name: str) -> "Function | None":
    return _registry.get(name) or _others.get(name)


def _named(name: str) -> "Function":
    """The mechanism or function of this name, as pickles ask for it."""
    importlib.import_module("refattn")
    found = _found(name)
    if found is None:
        raise LookupError(f"refattn has no mechanism or function {name!r}")
    return found


observers: list[Callable[[str], None]] = []
"""Called with the name of a function before each of its calls: how the verifier sees that a candidate asks the reference."""


class Function:
    """A differentiable function with a hand-derived gradient.

    Parameters
    ----------
    forward, backward : callable
        The mathematics, see the module docstring; no backward: what lies outside every gradient, which is zero.
    differentiable : sequence of str
        Arguments that have a gradient: floating arrays, or Python numbers where that is the default, for scale and softcap (their
        gradient is 0-d).
    floating : sequence of str
        Floating arguments without a gradient (random draws, memories): cast like the others.
    outputs : sequence of str
        Result fields that accept a cotangent.
    storage : sequence of str
        Result fields returned in the dtype of the inputs; all others keep the compute dtype.
    primary : sequence of str
        Arguments whose widest dtype is "the dtype of the inputs"; default: the positional ones that are differentiable.

    Attributes
    ----------
    name, key : str
        What it is called, and what it is found by in ``functions`` or ``mechanisms``: ``"rotary"`` and ``"positions.rotary"``.
    positional, options : tuple of str
        Arguments that may be given by position, and all arguments but backend, compute_dtype and algorithm.
    """

    margin: Callable[[dict[str, Any]], float] | None = None
    probe_options: tuple[Mapping[str, Any], ...] = ()
    catalogue: Any = None

    def __init__(
        self,
        forward: Callable[..., tuple[Result, Any]],
        backward: Callable[..., dict[str, Any]] | None,
        *,
        differentiable: Sequence[str],
        floating: Sequence[str] = (),
        outputs: Sequence[str] = ("output",),
        storage: Sequence[str] = ("output",),
        primary: Sequence[str] = (),
        name: str | None = None,
        doc: str | None = None,
    ) -> None:
        self.name = self.key = name or forward.__name__.strip("_")
        self.differentiable = tuple(differentiable)
        self.outputs = tuple(outputs)
        self._forward, self._backward = forward, backward
        self._floating = (*self.differentiable, *floating)
        self._storage = tuple(storage)
        self._signature = inspect.signature(forward)
        parameters = self._signature.parameters
        self.positional: tuple[str, ...] = tuple(n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD)
        self._primary = tuple(primary) or tuple(n for n in self.positional if n in self._floating)
        self._wants = tuple(n for n in ("backend", "algorithm") if n in parameters)
        self.options: tuple[str, ...] = tuple(n for n in parameters if n not in ("backend", "algorithm"))
        self._plain = {n: c for n, p in parameters.items() if (c := check_of(p)) is not None}
        unknown = set(self._floating) - set(parameters)
        if unknown:
            raise TypeError(f"{self.name}: {sorted(unknown)} are not arguments of its forward")
        self.__doc__ = doc or forward.__doc__
        self.__name__ = self.name
        self.__wrapped__ = forward  # where doctest finds the source
        shown = [p for n, p in parameters.items() if n in self.options]
        common = dict(zip(COMMON, (None, None, "auto"), strict=True))
        shown += [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d) for n, d in common.items()]
        self.__signature__ = inspect.Signature(shown)

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by name: another process takes its own."""
        if _found(self.key) is not self:
            raise pickle.PicklingError(f"{self!r} is not registered: only what a name leads to can be pickled")
        return _named, (self.key,)

    def __copy__(self) -> "Function":
        return self

    def __deepcopy__(self, memo: Any) -> "Function":
        return self  # nothing in it changes

    # ------------------------------------------------------------------ the calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output array; the Result of a function that has no field of that name."""
        result = self.forward(*args, **kwargs)
        return result.output if "output" in result else result

    def forward(self, *args: Any, **kwargs: Any) -> Result:
        """All results as a Result."""
        call = Call(self, args, kwargs)
        result, _ = call.run()
        return call.stored(result)

    def vjp(self, *args: Any, **kwargs: Any) -> tuple[Result, Callable[..., dict[str, Any]]]:
        """The Result, and a function from cotangents of its fields to gradients of the arguments.

        ``pullback(d_output)`` or ``pullback(output=..., lse=...)``: a field left out counts as zero.  It may be called
        many times and changes nothing.  Arguments and results are not copied for it: leave them as they are until then.
        """
        call = Call(self, args, kwargs)
        result, saved = call.run()
        stored = call.stored(result)

        def pullback(*positional: Any, **cotangents: Any) -> dict[str, Any]:
            if len(positional) > 1 or (positional and self.outputs[0] in cotangents):
                raise TypeError(
                    f"{self.name}: one positional cotangent, that of {self.outputs[0]!r}; the others by name"
                )
            if positional:
                cotangents[self.outputs[0]] = positional[0]
            return call.pull(saved, stored, cotangents)

        return stored, pullback

    # ------------------------------------------------------------------ companions, loaded when they are asked for

    @property
    def definition(self) -> "Reference":
        """The same numbers by the slow, independent path."""
        return Reference(self, _table("definitions", self.key))

    @property
    def _example(self) -> Any:
        return _table("examples", self.key)

    def example(self, rng: "np.random.Generator", **sizes: Any) -> dict[str, Any]:
        """Valid keyword arguments (float64 NumPy arrays) drawn from ``rng``."""
        make = self._example
        return make(rng, **self._checked_sizes(make, rng, sizes))

    def _checked_sizes(self, make: Callable[..., Any], rng: Any, sizes: dict[str, Any]) -> dict[str, Any]:
        """Sizes of an example as Python ints, or an error that names one."""
        if not isinstance(rng, np.random.Generator):
            raise TypeError(f"{self.name}.example: rng is a {type(rng).__name__}: expected a numpy.random.Generator")
        parameters = dict(list(inspect.signature(make).parameters.items())[1:])
        free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        checked = {}
        for name, value in sizes.items():
            optional = free and name in self.options and not (name in self.positional and type(value) is int)
            if name not in parameters and not optional:
                axes = ", ".join(n for n in parameters if len(n) == 1)
                raise TypeError(f"{self.name}.example: {name!r} is neither an axis ({axes}) nor an option of it")
            kind = parameters[name].annotation if name in parameters else None
            counted = name in parameters and (len(name) == 1 or kind in (int, int | None))
            if counted and not (value is None and (kind == int | None or parameters[name].default is None)):
                value = arrays.require_integer(name, value, minimum=0)
            checked[name] = value
        return checked

    @property
    def mutations(self) -> tuple[Mutation, ...]:
        """The known mistakes; empty where there are none."""
        room = self.key.rpartition(".")[0]
        if room not in MISTAKEN:
            return ()
        known = importlib.import_module(f"refattn.mistakes.{room}").catalogues.get(self.key)
        return () if known is None else known.mutations()

    # ------------------------------------------------------------------ binding

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, without defaults; errors name the function, the argument and the nearest known name."""
        for observe in observers:
            observe(self.name)
        if len(args) > len(self.positional):
            raise TypeError(
                f"{self.name} takes the arrays {', '.join(self.positional)} by position, {len(args)} were given; options go by name"
            )
        bound = dict(zip(self.positional, args, strict=False))
        for key, value in kwargs.items():
            if key not in self.options:
                near = difflib.get_close_matches(key, (*self.options, *COMMON), n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(self.options)}"
                raise TypeError(f"{self.name} has no option {key!r}{hint}")
            if key in bound:
                raise TypeError(f"{self.name}: {key!r} was given twice")
            bound[key] = value
        for key, parameter in self._signature.parameters.items():
            required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            if required and bound.get(key) is None and key in self.options:
                state = "None" if key in bound else "missing"
                raise TypeError(f"{self.name}: the argument {key!r} is {state}")
        return bound


class Mechanism(Function):
    """An attention mechanism: a Function with a definition, a cost, an example and its known mistakes.

    Its definition is ``definition`` of refattn/definitions/<the same file>, its mistakes ``catalogue`` of
    refattn/mistakes/<the same file>, both loaded when they are first asked for, unless they are given.

    Parameters
    ----------
    forward, backward : callable
        The mathematics, as for :class:`Function`.
    cost : callable
        ``cost(*, b=1, h=1, q, k, ..., option=...)`` -> Counts.
    example : callable
        ``example(rng, *, b=2, ..., **options)`` -> valid keyword arguments.
    name : str
    probes : sequence of dict
        Option sets that the verifier probes beside the general ones; see ``refattn.verification.probes``.
    margin : callable, optional
        For mechanisms that choose: how far the closest choice of a call is from another one, relative to what is compared.
    equation, paper, axes
        Left out: from the docstring of the forward's module (``refattn.described``).
    **options
        As for :class:`Function`.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        cost: Callable[..., Counts],
        example: Callable[..., dict[str, Any]],
        *,
        definition: Any = None,
        mutations: Any = None,
        name: str,
        probes: Sequence[Mapping[str, Any]] = (),
        margin: Callable[[dict[str, Any]], float] | None = None,
        equation: str | None = None,
        paper: str | None = None,
        axes: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(forward, backward, name=name, **options)
        self.title = name
        if equation is None or paper is None or axes is None:
            module = sys.modules[forward.__module__]
            if sys.flags.optimize < 2:  # which takes docstrings away
                says = described(module.__name__, module.__doc__)
                equation, paper, axes, self.title = says.equation, says.paper, says.axes, says.title
        self.equation, self.paper, self.axes = equation or "", paper or "", MappingProxyType(dict(axes or {}))
        self.probe_options, self.margin = tuple(probes), margin
        self._cost, self._drawn = cost, example
        edits = hasattr(mutations, "mutations")
        self._catalogue: Any = mutations if edits else None
        self._mutations: Any = None if edits else mutations
        self._file = forward.__module__.rpartition(".")[2]
        self._definition = Reference(self, definition)

    @property
    def _example(self) -> Any:
        return self._drawn

    @property
    def definition(self) -> "Reference":
        """The same numbers by the slow, independent path."""
        return self._definition

    @property
    def mutations(self) -> tuple[Mutation, ...]:
        """The known mistakes, loaded when they are first asked for: ``catalogue`` of refattn/mistakes/<the same file>."""
        if self.catalogue is not None and not isinstance(self._mutations, tuple):
            self._mutations = self.catalogue.mutations()
        return tuple(self._mutations)

    @property
    def catalogue(self) -> Any:
        """The known mistakes as edits of the definition; None where they were given as plain mutations."""
        if self._catalogue is None and self._mutations is None:
            self._catalogue = importlib.import_module(f"refattn.mistakes.{self._file}").catalogue
        return self._catalogue

    def cost(
        self, *, dtype: Any = "float32", direction: str = "forward", recompute: bool = False, **sizes: Any
    ) -> Cost:
        """Counts of one call: sizes by axis letter, and options as in the call.

        Parameters
        ----------
        dtype : str or dtype
            Of the arrays.
        direction : {"forward", "backward", "both"}
        recompute : bool
            Checkpointing: the backward runs the forward again, and only the inputs are saved.
        **sizes
            Sizes and options that matter to the counts; other options of the mechanism change nothing.
        """
        arrays.require_one_of("direction", direction, ("forward", "backward", "both"))
        arrays.require_flag("recompute", recompute)
        try:
            size = arrays.itemsize(dtype)
        except (TypeError, ValueError):
            raise TypeError(f"dtype is {dtype!r}: expected the name of a dtype") from None
        parameters = inspect.signature(self._cost).parameters
        named = {n for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
        for name in sizes:
            if name not in named and name not in self.options:
                near = difflib.get_close_matches(name, (*named, *self.options), n=1, cutoff=0.5)
                hint = (
                    f"; did you mean {near[0]!r}?"
                    if near
                    else f"; it has {', '.join(n for n in parameters if n in named)}"
                )
                raise TypeError(f"{self.name}.cost has no size or option {name!r}{hint}")
        missing = [n for n in named if parameters[n].default is inspect.Parameter.empty and n not in sizes]
        if missing:
            raise TypeError(f"{self.name}.cost: {', '.join(map(repr, sorted(missing)))} is missing")
        for name in named & sizes.keys():
            kind = parameters[name].annotation
            if kind is bool:
                arrays.require_flag(name, sizes[name])
            elif kind is int or (kind == int | None and sizes[name] is not None):
                sizes[name] = arrays.require_integer(name, sizes[name], minimum=0)
        counted = sizes if len(named) < len(parameters) else {n: x for n, x in sizes.items() if n in named}
        return self._cost(**counted).cost(size, direction, recompute)

    def example(self, rng: "np.random.Generator", **sizes: Any) -> dict[str, Any]:
        """Valid keyword arguments (float64 NumPy arrays) drawn from ``rng``."""
        return self._example(rng, **self._checked_sizes(self._example, rng, sizes))


class Reference:
    """The definition of a mechanism or function, as a function: the same numbers by the slow, independent path, in float64.

    Called like its owner it returns a Result; ``vjp`` returns the Result and a pullback, as that of the mechanism does,
    with gradients of its own.  Arrays come back in the caller's namespace, in float64.
    """

    def __init__(self, owner: Function, steps: Any) -> None:
        self._owner, self._steps = owner, steps

    @property
    def steps(self) -> Any:
        """The class of its steps: ``definition`` of refattn/definitions/<the mechanism's file>, unless it was given one."""
        if self._steps is None and isinstance(self._owner, Mechanism):
            self._steps = importlib.import_module(f"refattn.definitions.{self._owner._file}").definition
        return self._steps

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        xp, host = self._host(args, kwargs)
        if not isinstance(self.steps, type):
            return self._returned(self.steps(**host).fields, xp)
        return self._returned(self.steps(host).result(), xp)

    def vjp(self, *args: Any, **kwargs: Any) -> tuple[Result, Callable[..., dict[str, Any]]]:
        """The Result, and a function from cotangents of its fields to gradients of the arguments."""
        xp, host = self._host(args, kwargs)
        if not isinstance(self.steps, type):
            raise TypeError(
                f"the definition of {self._owner.name} has no gradients: it is a function, not a class of steps"
            )
        call = self.steps(host)

        def pullback(*positional: Any, **cotangents: Any) -> dict[str, Any]:
            if positional:
                cotangents[self._owner.outputs[0]] = positional[0]
            given = {n: arrays.to_numpy(x) for n, x in cotangents.items() if x is not None}
            names = [n for n in self._owner.differentiable if host.get(n) is not None]
            return dict(self._returned(call.pull(**given).gradient(names), xp).fields)

        return self._returned(call.result(), xp), pullback

    def _host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The namespace of the arguments, and these as NumPy arrays, the floating ones in float64."""
        for name in COMMON:
            kwargs.pop(name, None)
        bound = self._owner.bind(args, kwargs)
        host = {}
        for name, x in bound.items():
            if arrays.is_array(x):
                x = arrays.to_numpy(x)
                if name in self._owner._floating:
                    x = x.astype(np.float64)
            host[name] = x
        return arrays.namespace(*bound.values()), host

    def _returned(self, fields: Mapping[str, Any], xp: Any) -> Result:
        if xp is np:
            return Result(**fields)
        return Result(**{n: xp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in fields.items()})


def function(
    forward: Callable[..., Any], backward: Callable[..., Any] | None, *, name: str | None = None, **options: Any
) -> Function:
    """A Function (see there); one of this package is entered in ``functions``, under its room's name where it has one."""
    module = forward.__module__.split(".")
    own = module[0] == "refattn"
    made = Function(forward, backward, name=name, **options)
    if own:
        made.key = f"{module[1]}.{made.name}" if module[1] in ROOMS else made.name
        _others[made.key] = made
    return made


def mechanism(*parts: Any, **options: Any) -> Mechanism:
    """Build a Mechanism and enter it in ``mechanisms``; a name can be taken only once."""
    made = Mechanism(*parts, **options)
    if made.name in _registry:
        raise ValueError(f"a mechanism named {made.name!r} exists already")
    _registry[made.name] = made
    return made
