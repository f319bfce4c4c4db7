"""A form of a mechanism: the same options, other arrays; one object for each mechanism and form."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from refattn.mechanism import Mechanism, mechanisms
from refattn.records import Counts
from refattn.serving.layout import DROPPED, REFUSED

__all__ = ["Form", "make", "named"]

_made: dict[tuple[str, str], "Form"] = {}


def named(mechanism: Any) -> Mechanism:
    """A mechanism from its name, or itself."""
    found = mechanisms.get(mechanism) if isinstance(mechanism, str) else mechanism
    if not isinstance(found, Mechanism) or isinstance(found, Form):
        raise ValueError(f"mechanism is {mechanism!r}: expected a mechanism of refattn, or the name of one")
    return found


class Form(Mechanism):
    """A serving form of ``plain``; ``form`` is "packed", "paged", "split" or "ring"."""

    def __init__(self, form: str, plain: Mechanism, forward: Any, backward: Any, **parts: Any) -> None:
        self.form, self.plain = form, plain
        super().__init__(
            forward,
            backward,
            name=f"serving.{form}({plain.name})",
            equation=plain.equation,
            paper=plain.paper,
            axes=plain.axes,
            **parts,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.form, self.plain.name)

    @property
    def definition(self) -> Any:
        """One plain call of the mechanism's definition for each sequence, or for the whole."""
        if self._definition._steps is None:
            room = importlib.import_module("refattn.definitions.serving")
            self._definition._steps = room.form_of(self.form, self.plain.name, self.plain.definition.steps)
        return self._definition

    @property
    def catalogue(self) -> Any:
        """The mistakes of the form, and those of the mechanism made in every sequence."""
        if self._catalogue is None:
            room = importlib.import_module("refattn.mistakes.serving")
            self._catalogue = room.catalogue_of(self.definition.steps, self.plain.catalogue)
        return self._catalogue


def _rebuilt(form: str, name: str) -> Form:
    importlib.import_module("refattn")
    return getattr(importlib.import_module("refattn.serving"), form)(name)


SERVED = ("packed", "paged")
"""Forms whose lengths are told by tables."""


def _in_order(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """``**options`` last."""
    return sorted(parameters, key=lambda p: p.kind)


def make(
    form: str,
    mechanism: Any,
    *,
    extra: Sequence[inspect.Parameter],
    doc: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    counts: Callable[[Mechanism, Mapping[str, Any]], Counts],
    example: Callable[..., dict[str, Any]],
    outputs: Sequence[str] = (),
    refused: Sequence[str] = REFUSED,
) -> Form:
    """The form of a mechanism, made once.

    ``forward(plain, arguments, backend, algorithm)`` gives the Result and what ``backward(saved, cotangents)`` needs;
    ``extra`` are the form's own parameters.
    """
    plain = named(mechanism)
    key = form, plain.name
    if _made.get(key) is not None and _made[key].plain is plain:
        return _made[key]

    def call(*, backend: Any, algorithm: str, **arguments: Any) -> Any:
        return forward(plain, arguments, backend, algorithm)

    def pull(saved: Any, **cotangents: Any) -> dict[str, Any]:
        return backward(saved, cotangents)

    def cost(**sizes: Any) -> Counts:
        return counts(plain, sizes)

    def draw(rng: Any, **sizes: Any) -> dict[str, Any]:
        return example(plain, rng, **sizes)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter(p.name, keyword, default=None) for p in extra]
    sizes = [
        p for p in inspect.signature(plain._cost).parameters.values() if form not in SERVED or p.name not in "bqkt"
    ]
    cost.__signature__ = inspect.Signature(_in_order([*sizes, *own]))  # type: ignore[attr-defined]
    drawn = [*inspect.signature(plain._example).parameters.values()]
    if form == "paged":
        own = [*own, inspect.Parameter("page", keyword, default=2, annotation=int)]
    known = {p.name for p in drawn}
    draw.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        _in_order([*drawn, *(p for p in own if p.name not in known)])
    )
    kept = {n: p for n, p in plain.__signature__.parameters.items() if n in plain.options and n not in refused}
    arrays = [p for p in kept.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    options = [p for p in kept.values() if p.kind is not p.POSITIONAL_OR_KEYWORD]
    internal = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in ("backend", "algorithm")]
    call.__signature__ = inspect.Signature([*arrays, *extra, *options, *internal])  # type: ignore[attr-defined]
    known = set(kept)
    call.__doc__ = doc.format(name=plain.name)
    _made[key] = Form(
        form,
        plain,
        call,
        pull,
        cost=cost,
        example=draw,
        differentiable=tuple(n for n in plain.differentiable if n in known),
        floating=tuple(n for n in plain._floating if n in known and n not in plain.differentiable),
        outputs=(*(n for n in plain.outputs if n not in DROPPED), *outputs),
        storage=plain._storage,
        primary=tuple(n for n in plain._primary if n in known),
    )
    return _made[key]
