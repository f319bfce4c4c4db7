"""What a definition is made of: named steps, each computed when somebody asks for it.

A definition is a class whose steps are the equations of a mechanism, forward and backward, over whole matrices in float64::

    class ScaledDotProduct(Definition):
        @step
        def weights(self):
            return self.exponentials / self.row_sum

Which steps a step reads is recorded while it runs, never declared.  A subclass that replaces a step is an *edit*; given the
right call beside it (``right=``), an edited call computes only the steps that follow from the edit and takes all others over.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

__all__ = ["Definition", "NoCotangents", "constant", "contract", "einsum", "same_arrays", "step", "sum_to_shape"]


class NoCotangents(LookupError):
    """A gradient was asked of a call that has no cotangents."""


class step:
    """A named value of a call, computed once, on first use; its docstring is the formula in words where code is not enough."""

    def __init__(self, formula: Callable[[Any], Any]) -> None:
        self.formula, self.__doc__ = formula, formula.__doc__
        self.name = formula.__name__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, call: "Definition | None", owner: type | None = None) -> Any:
        return self if call is None else call.value(self)


class constant(step):
    """A step without a formula.  In a subclass body ``exponential = np.exp2`` in place of a step means the same."""

    def __init__(self, content: Any) -> None:
        self.content, self.name = content, "constant"
        self.formula = lambda call: content


class Definition:
    """One call of a mechanism, in steps.

    Parameters
    ----------
    arguments : mapping
        Arguments by their public names.  Floating arrays are taken to float64 (complex ones stay).  Inside a step
        ``self.causal`` reads the argument ``causal``, or its entry in ``defaults`` where it is missing.  A step of
        the same name takes its place (and gets at the argument by ``self.argument("causal")``): that is how a mistake
        misreads an argument.
    cotangents : mapping, optional
        Cotangents of result fields by name, for the gradients; those left out are zero.
    right : Definition, optional
        The right call with the same arguments and cotangents.
    handed : mapping, optional
        Values of steps that come from elsewhere: what a backward is given by a forward that it does not run itself
        (``output`` and ``lse``).
    storage : dtype, optional
        What the arrays are stored in where the call is made, for mistakes that show in narrow numbers only; default: the
        dtype of the first floating array.

    Attributes
    ----------
    results : dict
        Public result field -> name of its step; see ``result_fields`` for those that depend on the arguments.
    gradients : tuple of str
        Arguments with a gradient; that of ``q`` is the step ``d_q``.
    defaults : dict
        Arguments that may be left out.
    inner : constant step
        The definition that this one calls, if it is built on one: the mistakes of that one are mistakes of this one too.
    """

    results: ClassVar[Mapping[str, str]] = {"output": "output"}
    gradients: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}
    inner: Any = constant(None)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, content in list(vars(cls).items()):
            replaced = next((vars(c)[name] for c in cls.__mro__[1:] if name in vars(c)), None)
            takes_place = isinstance(replaced, step) or name in cls.defaults
            if takes_place and not isinstance(content, step):
                made = constant(content)
                made.__set_name__(cls, name)
                setattr(cls, name, made)

    def __init__(
        self,
        arguments: Mapping[str, Any],
        cotangents: Mapping[str, Any] | None = None,
        *,
        right: "Definition | None" = None,
        handed: Mapping[str, Any] | None = None,
        storage: Any = None,
    ) -> None:
        floating = (x.dtype for x in arguments.values() if _is_floating(x))
        self.storage = np.dtype(storage) if storage is not None else next(floating, np.dtype(np.float64))
        self.arguments = {
            n: _float64(x) for n, x in arguments.items() if x is not None or self.defaults.get(n) is not None
        }
        self.cotangents = (
            None if cotangents is None else {n: _float64(x) for n, x in cotangents.items() if x is not None}
        )
        self.right, self.handed = right, dict(handed or {})
        self.known: dict[str, Any] = dict(self.handed)
        self.reads: dict[str, set[str]] = {}
        self._open: list[str] = []  # the steps that are being computed, innermost last
        self._edited: dict[str, bool] = {}

    # ------------------------------------------------------------------ reading

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "arguments" not in self.__dict__:
            raise AttributeError(name)
        if name not in self.arguments and name not in self.defaults:
            raise AttributeError(f"{type(self).__name__} has neither a step nor an argument {name!r}")
        self._note(name)
        return self.argument(name)

    def argument(self, name: str) -> Any:
        """An argument as it was passed, even where a step of the same name stands for it."""
        return self.arguments.get(name, self.defaults.get(name))

    def cotangent(self, field: str) -> Any:
        """The cotangent of a result field; zeros where none was given."""
        if self.cotangents is None:
            raise NoCotangents(f"this call has no cotangents: that of {field} was asked for")
        self._note(f"cotangent of {field}")
        given = self.cotangents.get(field)
        return np.zeros(np.shape(getattr(self, self.result_fields()[field]))) if given is None else given

    def is_handed(self, name: str) -> bool:
        """Whether the value of a step came from elsewhere; counts as a read of it."""
        self._note(name)
        return name in self.handed

    def value(self, asked: step) -> Any:
        """The value of a step, computed, taken over from the right call, or known."""
        name = asked.name
        if getattr(type(self), name) is not asked:  # super().name: the formula that an edit replaces
            return asked.formula(self)
        self._note(name)
        if name not in self.known:
            if self.right is not None and not self._follows_an_edit(name):
                self.known[name] = getattr(self.right, name)
                self.reads[name] = self.right.reads.get(name, set())
            elif name not in self.known:  # where it was compared with the right one, it is known by now
                self.reads[name] = set()
                self._open.append(name)
                try:
                    with np.errstate(all="ignore"):
                        self.known[name] = asked.formula(self)
                finally:
                    self._open.pop()
        return self.known[name]

    def _note(self, name: str) -> None:
        if self._open:
            self.reads[self._open[-1]].add(name)

    def _follows_an_edit(self, name: str) -> bool:
        """Whether a step may have another value than in the right call."""
        known = self._edited.get(name)
        if known is None:
            self._edited[name] = True  # while it is found out
            known = self._edited[name] = self._may_differ(name)
        return known

    def _may_differ(self, name: str) -> bool:
        right = self.right
        assert right is not None
        if self.handed:
            handed = [n for n in self.handed if n == name or n.startswith(f"{name}.")]
            if any(right.handed.get(n) is not self.handed[n] for n in handed):
                return True
            if name in self.handed:
                return False
        if name.startswith("cotangent of "):
            field = name.removeprefix("cotangent of ")
            given, theirs = ((x.cotangents or {}).get(field) for x in (self, right))
            return given is not theirs
        mine, theirs = getattr(type(self), name, None), getattr(type(right), name, None)
        if mine is not theirs:
            return not self._is_as_right(name, _equal)
        if not isinstance(mine, step):  # an argument, the same in both calls
            return False
        try:
            getattr(right, name)
        except NoCotangents:
            return True
        if any(self._follows_an_edit(n) for n in right.reads.get(name, ())):
            return not self._is_as_right(name, operator.is_)
        return False

    def _is_as_right(self, name: str, same: Callable[[Any, Any], bool]) -> bool:
        """Whether a step that is edited, or follows an edit, has the right value after all: the edit is of what is not used."""
        outside, self._open = self._open, []
        try:
            return same(getattr(self, name), getattr(self.right, name))
        except Exception:  # raised again where the step is really asked for
            return False
        finally:
            self._open = outside

    # ------------------------------------------------------------------ whole calls

    def result_fields(self) -> Mapping[str, str]:
        """Result field -> step, for these arguments."""
        return self.results

    def result(self) -> dict[str, Any]:
        """All result fields."""
        return {field: getattr(self, name) for field, name in self.result_fields().items()}

    def gradient(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Gradients of the arguments that were passed, each of the shape of its argument."""
        asked = self.gradients if names is None else names
        return {
            n: sum_to_shape(np.asarray(getattr(self, f"d_{n}")), np.shape(self.arguments[n]))
            for n in asked
            if n in self.arguments
        }

    def pull(self, **cotangents: Any) -> "Definition":
        """The same call with cotangents of result fields: its gradients.  What is known already is not computed again."""
        return type(self)(self.arguments, cotangents, right=self, handed=self.handed, storage=self.storage)

    def begin(self, definition: "type[Definition]", arguments: Mapping[str, Any]) -> "Definition":
        """Another definition called from a step, which returns it.

        It shares what it can with the call that the right definition made in the same step, and is handed its own results
        where this call is handed results (:meth:`left_for_backward`).
        """
        here = self._open[-1]
        theirs = None if self.right is None else getattr(self.right, here)
        handed = {n.removeprefix(f"{here}."): x for n, x in self.handed.items() if n.startswith(f"{here}.")}
        call = definition(arguments, handed=handed, storage=self.storage)
        if isinstance(theirs, Definition) and same_arrays(theirs.arguments, call.arguments):
            call.right = theirs
        return call

    def left_for_backward(self) -> dict[str, Any]:
        """What this forward leaves for a backward, as ``handed`` takes it.

        The steps of the results ``output`` and ``lse``; those of a call made in the step ``attention`` as ``attention.output``.
        """
        fields = self.result_fields()
        left = {fields[n]: getattr(self, fields[n]) for n in ("output", "lse") if n in fields}
        for name, value in list(self.known.items()):
            if isinstance(value, Definition):
                left |= {f"{name}.{n}": x for n, x in value.left_for_backward().items()}
        return left


def same_arrays(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two mappings hold the same objects, not merely equal ones."""
    return a.keys() == b.keys() and all(a[n] is b[n] for n in a)


def _equal(a: Any, b: Any) -> bool:
    """Whether two values of a step are equal; False where that cannot be told."""
    if a is b:
        return True
    if isinstance(a, (np.ndarray, np.generic, bool, int, float)) and isinstance(
        b, (np.ndarray, np.generic, bool, int, float)
    ):
        a, b = np.asarray(a), np.asarray(b)
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return isinstance(a, str) and isinstance(b, str) and a == b


def einsum(spec: str, *operands: Any) -> Any:
    """``np.einsum``, through BLAS where it can."""
    return np.einsum(spec, *operands, optimize=True)


def contract(spec: str, weights: Any, values: Any, seen: Any) -> Any:
    """``einsum`` of numbers of pairs with values; a pair that is not ``seen`` contributes nothing, 0 times NaN neither.

    ``weights`` and ``seen`` have the letters of the first term.  A NaN or infinity of a seen pair makes of the sum what it
    would in IEEE arithmetic, 0 times infinity included.
    """
    finite = np.isfinite(values)
    if finite.all():
        return einsum(spec, weights, values)
    seen = np.broadcast_to(seen, weights.shape)
    weights = np.where(seen, weights, 0.0)
    total = einsum(spec, weights, np.where(finite, values, 0.0))

    def meet(pairs: Any, places: Any) -> Any:
        return einsum(spec, pairs.astype(float), places.astype(float)) != 0

    above, below = values == np.inf, values == -np.inf
    odd = meet(seen, np.isnan(values)) | meet(seen & (weights == 0), above | below)
    up = meet(weights > 0, above) | meet(weights < 0, below)
    down = meet(weights > 0, below) | meet(weights < 0, above)
    total = np.where(up, np.inf, np.where(down, -np.inf, total)) + np.where(np.isnan(total), np.nan, 0.0)
    return np.where(odd | (up & down), np.nan, total)


def sum_to_shape(x: Any, shape: tuple[int, ...]) -> Any:
    """The adjoint of broadcasting an array of this shape to that of ``x``."""
    if x.shape == tuple(shape):
        return x
    x = (
        x.sum(axis=tuple(range(x.ndim - len(shape))))
        if x.ndim > len(shape)
        else x.reshape((1,) * (len(shape) - x.ndim) + x.shape)
    )
    axes = tuple(a for a, n in enumerate(shape) if n == 1 and x.shape[a] != 1)
    return np.broadcast_to(x.sum(axis=axes, keepdims=True), shape)


def _is_floating(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind not in "biu" and x.dtype != object


def _float64(x: Any) -> Any:
    if _is_floating(x) and x.dtype.kind != "c":
        return x.astype(np.float64, copy=False)
    return x
