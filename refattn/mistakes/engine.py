"""Mistakes as edits of a definition: declared, lifted, and asked what they would give.

A mistake is a subclass of a definition that replaces one or a few steps::

    dense = Catalogue(ScaledDotProduct)

    @dense.mistake(why="The flag is dropped on a side path: with dropout, with returned weights.")
    class causal_drop(ScaledDotProduct):
        '''causal is ignored'''

        causal = False

The class's name is that of the catalogue of mistakes, its docstring the sentence a report prints.  Nothing else is needed for
"in the forward alone", "in the backward alone" and "in one array alone" (:meth:`Case.results`, :meth:`Case.gradients`), nor for
the same mistake in a mechanism that is built on this one (:meth:`Catalogue.lifted`).
"""

import dataclasses
import fnmatch
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from refattn.definitions.steps import Definition, same_arrays, step
from refattn.records import Mutation, Result

__all__ = ["SIDES", "Case", "Catalogue", "Mistake", "combined", "differs", "edited_steps", "source_of_edit"]

SIDES = ("both", "forward", "backward")
"""Where a mistake is made.  *forward*: a right backward is handed wrong results; *backward*: a wrong one the right results."""

SAME = 1e-9
"""Results closer than this, relative to their largest entry (or to 1), are the same."""


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A way people get a mechanism wrong.

    ``class_`` is its name in the catalogue, ``says`` one sentence, ``why`` how people come to make it; ``edit`` the definition
    with the mistake; ``sides`` those of :data:`SIDES` on which it is offered; ``arrays``, where given, the only gradients that
    it predicts.
    """

    class_: str
    says: str
    why: str
    edit: type[Definition]
    sides: tuple[str, ...] = SIDES
    arrays: tuple[str, ...] | None = None

    def on(self, definition: type[Definition]) -> "Mistake":
        """The same mistake in a definition that is a subclass of this one's, or calls it."""
        return dataclasses.replace(self, edit=_lift(self.edit, definition))


class Catalogue:
    """The mistakes of one definition, in order: its own, and those of the definition it is built on.

    ``without``: names of the latter that are left out, ``*`` stands for anything.
    """

    def __init__(
        self, definition: type[Definition], *, built_on: "Catalogue | None" = None, without: Collection[str] = ()
    ) -> None:
        self.definition = definition
        self._own: list[Mistake] = []
        self._base, self._without = built_on, frozenset(without)

    def mistake(
        self,
        *,
        name: str | None = None,
        why: str = "",
        sides: tuple[str, ...] = SIDES,
        arrays: tuple[str, ...] | None = None,
        variants: Iterable[Mapping[str, Any]] = ({},),
    ) -> Callable[[type[Definition]], type[Definition]]:
        """Enter a subclass of the definition as a mistake; a decorator.

        ``name`` where the class's own is taken by another form of the mistake.  ``variants``: class constants with which it is
        entered several times; the docstring may name them in braces (``{tile}``).
        """

        def enter(edit: type[Definition]) -> type[Definition]:
            if not issubclass(edit, self.definition):
                raise TypeError(f"{edit.__name__} does not edit {self.definition.__name__}")
            says = " ".join((edit.__doc__ or "").split())
            for constants in variants:
                one = edit
                if constants:
                    body = {**constants, "__doc__": edit.__doc__, "__module__": edit.__module__}
                    one = type(edit.__name__, (edit,), body)
                sentence = says.format(**constants) if constants else says
                self._own.append(Mistake(name or edit.__name__, sentence, why, one, sides, arrays))
            return edit

        return enter

    def lifted(self) -> tuple[Mistake, ...]:
        """The mistakes of the definition that this one is built on."""
        if self._base is None:
            return ()
        return tuple(
            m.on(self.definition)
            for m in self._base
            if not any(fnmatch.fnmatchcase(m.class_, x) for x in self._without)
        )

    @property
    def own(self) -> tuple[Mistake, ...]:
        """The mistakes that are this mechanism's alone."""
        return tuple(self._own)

    def __iter__(self) -> Iterator[Mistake]:
        yield from self._own
        yield from self.lifted()

    def mutations(self) -> tuple[Mutation, ...]:
        """All mistakes as records of the public interface, each made on both sides (or on the only one it has)."""
        return tuple(_mutation(m, self.definition) for m in self)


def _lift(edit: type[Definition], definition: type[Definition]) -> type[Definition]:
    base = next(c for c in edit.__mro__[1:] if issubclass(definition, c))
    inner = definition.inner.content
    body = {"__doc__": edit.__doc__, "__module__": edit.__module__}
    if base is not Definition:
        return type(edit.__name__, (edit, definition), body)
    if inner is None:
        raise TypeError(f"{definition.__name__} is not built on what {edit.__name__} edits")
    return type(
        edit.__name__, (definition,), {**body, "inner": edit if issubclass(edit, inner) else _lift(edit, inner)}
    )


def combined(one: type[Definition], other: type[Definition]) -> type[Definition] | None:
    """Both edits at once; None where one is an edit of the other, or they are made in definitions that do not fit together."""
    if issubclass(one, other) or issubclass(other, one):
        return None
    if one.inner is not other.inner and one.inner.content is not None and other.inner.content is not None:
        base = [c.inner.content for c in (one, other)]
        inner = combined(*base) if all(isinstance(b, type) for b in base) else None
        if inner is not None:
            return type(f"{one.__name__}_and_{other.__name__}", (one, other), {"inner": inner})
    try:
        return type(f"{one.__name__}_and_{other.__name__}", (one, other), {})
    except TypeError:  # no order of the bases serves both
        return None


# ---------------------------------------------------------------------------------------------- what a mistake gives


class Case:
    """One call and its right steps, of which every mistake is asked what it would give instead.

    Parameters
    ----------
    definition : type of Definition
    arguments : mapping
    cotangents : mapping, optional
        Of result fields.
    storage : dtype, optional
        See :class:`~refattn.definitions.steps.Definition`.
    """

    def __init__(
        self,
        definition: type[Definition],
        arguments: Mapping[str, Any],
        cotangents: Mapping[str, Any] | None = None,
        *,
        storage: Any = None,
    ) -> None:
        self.right = definition(arguments, {} if cotangents is None else cotangents, storage=storage)
        self._rebuilt: Definition | None = None
        self._calls: dict[str, Any] = {}  # side -> call, and the edit that they belong to

    def results(self, mistake: Mistake, side: str = "both", *, rows: Any = None) -> dict[str, Any] | None:
        """Result fields with this mistake; None where none of them differs from the right one.

        ``rows``, a bool array against the rows of the output (..., h, q): the mistake is made in these alone.
        """
        if side == "backward" or self._empty():
            return None
        right, wrong = self.right.result(), self._call(mistake.edit, "both").result()
        if rows is not None:
            at = np.broadcast_to(rows, np.shape(right["output"])[:-1])
            wrong = {n: _where_rows(at, x, right[n]) for n, x in wrong.items()}
        return wrong if differs(right, wrong) else None

    def gradients(self, mistake: Mistake, side: str = "both", *, rows: Any = None) -> dict[str, Any] | None:
        """Gradients by argument with this mistake; None where none of them differs.

        On the side *forward* they are those of the right backward that was handed the wrong ``output`` and ``lse``.  With
        ``rows`` the wrong backward gets the cotangents of these, the right one those of all others, and both are added.
        """
        if self._empty():
            return None
        names = [n for n in self.right.gradients if n in self.right.arguments]
        if mistake.arrays is not None:
            names = [n for n in names if n in mistake.arrays]
        call = self._call(mistake.edit, side)
        wrong = call.gradient(names) if rows is None else self._in_rows(call, names, rows)
        return wrong if differs(self._expected(side).gradient(names), wrong) else None

    def _empty(self) -> bool:
        """Whether an array that matters is empty: there are no numbers to get wrong."""
        if not any(map(np.size, self.right.result().values())):
            return True
        return any(not np.size(self.right.arguments.get(n, 0)) for n in self.right.gradients)

    def _expected(self, side: str) -> Definition:
        """The right gradients; rebuilt from output and lse where a mistake's are, since that rounds at large logits."""
        if side == "both":
            return self.right
        if self._rebuilt is None:
            right = self.right
            self._rebuilt = type(right)(
                right.arguments, right.cotangents, right=right, handed=right.left_for_backward(), storage=right.storage
            )
        return self._rebuilt

    def _in_rows(self, call: Definition, names: list[str], rows: Any) -> dict[str, Any]:
        """Cotangents without such rows (a state's) go to the wrong part, as its results do."""
        at = np.broadcast_to(rows, np.shape(self.right.result()["output"])[:-1])
        cotangents = self.right.cotangents or {}
        inside = {n: _where_rows(at, x, np.zeros_like(x)) for n, x in cotangents.items()}
        outside = {n: x - inside[n] for n, x in cotangents.items()}
        wrong, right = call.pull(**inside).gradient(names), self.right.pull(**outside).gradient(names)
        return {n: wrong[n] + right[n] for n in names}

    def value(self, mistake: Mistake, step_: str) -> Any:
        """The value of one step with this mistake, made on both sides."""
        return getattr(self._call(mistake.edit, "both"), step_)

    def _call(self, edit: type[Definition], side: str) -> Definition:
        if (
            self._calls.setdefault("edit", edit) is not edit
        ):  # the calls of one mistake at a time: they hold many arrays
            self._calls = {"edit": edit}
        if side not in self._calls:
            right, definition, handed = self.right, edit, None
            if side == "backward":
                handed = right.left_for_backward()
            elif side == "forward":
                handed, definition = self._call(edit, "both").left_for_backward(), type(right)
            self._calls[side] = definition(
                right.arguments, right.cotangents, right=self._expected(side), handed=handed, storage=right.storage
            )
        return self._calls[side]


def _where_rows(rows: np.ndarray, inside: Any, outside: Any) -> Any:
    """``inside`` in these rows (..., h, q), ``outside`` elsewhere; arrays that have no such rows are taken from inside."""
    inside, outside = np.asarray(inside), np.asarray(outside)
    if inside.shape != outside.shape or inside.shape[: rows.ndim] != rows.shape:
        return inside
    return np.where(rows.reshape(rows.shape + (1,) * (inside.ndim - rows.ndim)), inside, outside)


def differs(right: Mapping[str, Any], wrong: Mapping[str, Any]) -> bool:
    """Whether any array differs by more than rounding in float64."""
    for name, x in right.items():
        if x is wrong[name]:
            continue
        a, b = np.asarray(x), np.asarray(wrong[name])
        if a.shape != b.shape:
            return True
        if a.dtype.kind in "bi":
            if not np.array_equal(a, b):
                return True
            continue
        finite = np.isfinite(a) & np.isfinite(b)
        if not np.array_equal(np.where(finite, 0.0, a), np.where(finite, 0.0, b), equal_nan=True):
            return True
        a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
        if a.size and np.abs(b - a).max() > SAME * max(1.0, np.abs(a).max()):
            return True
    return False


def _mutation(mistake: Mistake, definition: type[Definition]) -> Mutation:
    side = "both" if "both" in mistake.sides else mistake.sides[0]

    def forward(arguments: dict[str, Any]) -> Result | None:
        wrong = _case(definition, arguments, None).results(mistake, side)
        return None if wrong is None else Result(**wrong)

    def gradients(arguments: dict[str, Any], cotangents: dict[str, Any]) -> dict[str, Any] | None:
        return _case(definition, arguments, cotangents).gradients(mistake, side)

    return Mutation(
        mistake.class_,
        mistake.says,
        forward=None if side == "backward" else forward,
        gradients=None if mistake.arrays == () else gradients,
    )


_latest: list[Case] = []


def _case(definition: type[Definition], arguments: Mapping[str, Any], cotangents: Mapping[str, Any] | None) -> Case:
    """The case of the last call where this one has the same arrays: mutations are asked one after the other."""
    asked = Case(definition, arguments, cotangents)
    known = _latest[0].right if _latest else None
    if (
        type(known) is definition
        and same_arrays(known.arguments, asked.right.arguments)
        and (cotangents is None or same_arrays(known.cotangents or {}, asked.right.cotangents or {}))
    ):
        return _latest[0]
    _latest[:] = [asked]
    return asked


# ---------------------------------------------------------------------------------------------- what a report prints


def edited_steps(mistake: Mistake) -> list[str]:
    """Names of the steps that the mistake replaces; those of the inner definition where the mistake was lifted from it."""
    return [name for name, _, _ in _edits(mistake.edit)]


def source_of_edit(mistake: Mistake) -> list[tuple[str, str, str]]:
    """For each edited step its name, its right source and its edited source; empty text where there is none."""
    return [(name, _source(right, name), _source(wrong, name)) for name, right, wrong in _edits(mistake.edit)]


def _edits(edit: type[Definition]) -> list[tuple[str, Any, Any]]:
    found: dict[str, tuple[str, Any, Any]] = {}
    home = edit.__module__
    for owner in edit.__mro__:
        if owner.__module__ != home:
            continue
        for name, content in vars(owner).items():
            if isinstance(content, step) and name not in found:
                right = next((vars(c)[name] for c in edit.__mro__ if c.__module__ != home and name in vars(c)), None)
                if name == "inner" and isinstance(content.content, type):  # type: ignore[attr-defined]
                    return _edits(content.content)  # type: ignore[attr-defined]
                found[name] = (name, right, content)
    return list(found.values())


def _source(content: Any, name: str) -> str:
    if not isinstance(content, step):
        return ""
    if hasattr(content, "content"):
        shown = content.content
        return f"{name} = {getattr(shown, '__name__', None) or repr(shown)}"
    try:
        return textwrap.dedent(inspect.getsource(content.formula)).strip()
    except OSError:
        return ""
