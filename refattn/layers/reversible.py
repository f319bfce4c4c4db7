"""Reversible residual layers: the backward computes the layers' inputs again from their outputs, so none is stored.

    y_1 = x_1 + f(x_2)          y_2 = x_2 + g(y_1)                  forward
    x_2 = y_2 - g(y_1)          x_1 = y_1 - f(x_2)                  what the backward starts with

and, with cotangents d_y_1, d_y_2 of the outputs,

    d_x_1 = d_y_1 + (dg/dy_1)^T d_y_2          d_x_2 = d_y_2 + (df/dx_2)^T d_x_1

where the parameters of g see d_y_2 and those of f see d_x_1.  Reconstruction is exact up to rounding; a discrete choice that
rounding could flip (hash buckets, a drawn dropout mask) is kept from the forward and handed back, see :func:`bind`.

Source: Gomez et al. 2017, arXiv:1707.04585; Kitaev et al. 2020, arXiv:2001.04451, section 3.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from refattn.arrays import is_array, is_integer, namespace, require_array, require_one_of
from refattn.records import Result

__all__ = ["bind", "chain", "reversible_residual", "reversible_stack"]


class _Bound:
    """A function of one array; ``reuse`` names the fields of its Result that :meth:`vjp` takes back as keywords."""

    def __init__(self, function: Any, arguments: dict[str, Any], reuse: Mapping[str, Sequence[str]]) -> None:
        self.function, self.arguments = function, arguments
        self.first = function.positional[0]
        self.replaces = dict(reuse)
        self.reuse = tuple(reuse)
        if self.first in arguments:
            raise TypeError(f"{function.name}: {self.first!r} is the argument that bind leaves open")

    def __repr__(self) -> str:
        return f"bind({self.function.name}, {', '.join(self.arguments)})"

    def _all(self, x: Any, kept: Mapping[str, Any]) -> dict[str, Any]:
        gone = {name for field in kept for name in self.replaces[field]}
        return {self.first: x, **{n: a for n, a in self.arguments.items() if n not in gone}, **kept}

    def forward(self, x: Any, **kept: Any) -> Result:
        """Result of the function at x."""
        return self.function.forward(**self._all(x, kept))

    def vjp(self, x: Any, **kept: Any) -> tuple[Result, Callable[..., dict[str, Any]]]:
        """Result, and the pullback; the gradient of the open argument is called ``x``."""
        result, pull = self.function.vjp(**self._all(x, kept))

        def pullback(*positional: Any, **cotangents: Any) -> dict[str, Any]:
            found = pull(*positional, **cotangents)
            return {"x": found.pop(self.first), **found}

        return result, pullback


class _Chain:
    """One bound function after the other."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts
        self.reuse = tuple(f"{n}.{name}" for n, part in enumerate(parts) for name in getattr(part, "reuse", ()))

    def _own(self, kept: Mapping[str, Any], n: int) -> dict[str, Any]:
        start = f"{n}."
        return {name[len(start) :]: a for name, a in kept.items() if name.startswith(start)}

    def forward(self, x: Any, **kept: Any) -> Result:
        """Result with the output of the last function and what the functions keep, as ``<number>.<field>``."""
        fields = {}
        for n, part in enumerate(self.parts):
            result = part.forward(x, **self._own(kept, n))
            x = result.output
            fields.update({f"{n}.{name}": getattr(result, name) for name in getattr(part, "reuse", ())})
        return Result(output=x, **fields)

    def vjp(self, x: Any, **kept: Any) -> tuple[Result, Callable[[Any], dict[str, Any]]]:
        """Result, and the pullback to x and to ``<number>.<name>`` of every function."""
        pulls, fields = [], {}
        for n, part in enumerate(self.parts):
            result, pull = part.vjp(x, **self._own(kept, n))
            x = result.output
            pulls.append(pull)
            fields.update({f"{n}.{name}": getattr(result, name) for name in getattr(part, "reuse", ())})

        def pullback(output: Any) -> dict[str, Any]:
            gradients: dict[str, Any] = {}
            for n in reversed(range(len(pulls))):
                found = pulls[n](output)
                output = found["x"]
                gradients.update({f"{n}.{name}": g for name, g in found.items() if name != "x"})
            return {"x": output, **gradients}

        return Result(output=x, **fields), pullback


def bind(function: Any, *, reuse: Mapping[str, Sequence[str]] | None = None, **arguments: Any) -> Any:
    """A function of its first array alone, all other arguments fixed.

    Parameters
    ----------
    function : Function
        ``ra.layers.linear``, a mechanism, ... : whatever has forward and vjp.
    reuse : mapping, optional
        Result fields that stand for a choice made in the forward, each with the arguments that made it: a second call gets
        the field back as an argument of that name, in their place.  Default: ``{"buckets": ("rotations", "rng")}`` for a
        function that takes buckets, else nothing.
    **arguments
        All other arguments.

    Returns
    -------
    An object with ``forward(x)`` and ``vjp(x)``; gradients are ``x`` and the function's own parameters by their names.

    >>> import numpy as np
    >>> from refattn.layers import linear
    >>> f = bind(linear, weight=np.array([[2.0]]))
    >>> result, pullback = f.vjp(np.array([[3.0]]))
    >>> result.output, pullback(np.array([[1.0]]))["weight"]
    (array([[6.]]), array([[3.]]))
    """
    if not all(hasattr(function, n) for n in ("forward", "vjp", "positional", "options")):
        raise TypeError(
            f"function is a {type(function).__name__}: expected what has forward and vjp, such as ra.layers.linear"
        )
    if reuse is not None and not isinstance(reuse, Mapping):
        raise TypeError(
            f"reuse is a {type(reuse).__name__}: expected result fields, each with the arguments that made it"
        )
    if reuse is None:
        made_by = [n for n in ("rotations", "rng") if n in function.options]
        reuse = {"buckets": made_by} if "buckets" in function.options else {}
    return _Bound(function, arguments, reuse)


def chain(*parts: Any) -> Any:
    """One function of x after the other, as one object with ``forward(x)`` and ``vjp(x)``.

    Gradients of the n-th function's parameters are called ``<n>.<name>``.
    """
    if not parts:
        raise ValueError("chain: expected at least one function")
    for n, part in enumerate(parts):
        _require_bound(f"parts[{n}]", part)
    return _Chain(parts)


def _require_bound(name: str, f: Any) -> None:
    if not (hasattr(f, "forward") and hasattr(f, "vjp")):
        raise TypeError(f"{name} is a {type(f).__name__}: expected what has forward(x) and vjp(x), as bind makes it")


def _smallest(x: Any) -> Any:
    """Integers in the smallest type that holds them; anything else as it is."""
    if not is_array(x) or not is_integer(x.dtype):
        return x
    xp = namespace(x)
    size = x.shape and all(x.shape)
    low, high = (int(xp.min(x)), int(xp.max(x))) if size else (0, 0)
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32"):
        kind = getattr(xp, name)
        if xp.iinfo(kind).min <= low and high <= xp.iinfo(kind).max:
            return xp.astype(x, kind)
    return x


def _bytes(kept: Iterable[Mapping[str, Any]]) -> int:
    found = 0
    for fields in kept:
        for x in fields.values():
            if is_array(x):
                found += int(np.prod(x.shape)) * np.dtype(str(x.dtype).split(".")[-1]).itemsize
    return found


def _plus(a: Any, b: Any, name: str) -> Any:
    if tuple(a.shape) != tuple(b.shape):
        raise ValueError(f"{name} gives shape {tuple(b.shape)}: expected that of its residual stream, {tuple(a.shape)}")
    return a + b


def _kept(f: Any, result: Any) -> dict[str, Any]:
    return {n: _smallest(x) for n in getattr(f, "reuse", ()) if (x := getattr(result, n)) is not None}


def _forward(x_1: Any, x_2: Any, f: Any, g: Any, number: str) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """One block: y_1, y_2 and what f and g keep."""
    for name, part in ((f"{number}f", f), (f"{number}g", g)):
        _require_bound(name, part)
    for name, x in (("x_1", x_1), ("x_2", x_2)):
        require_array(name, x)
    result = f.forward(x_2)
    y_1, kept_f = _plus(x_1, result.output, f"{number}f"), _kept(f, result)
    result = g.forward(y_1)
    return y_1, _plus(x_2, result.output, f"{number}g"), kept_f, _kept(g, result)


def _backward(
    y: tuple[Any, Any], d_y: tuple[Any, Any], f: Any, g: Any, kept_f: dict[str, Any], kept_g: dict[str, Any]
) -> tuple[tuple[Any, Any], tuple[Any, Any], dict[str, Any]]:
    """One block backwards: its inputs again, their cotangents, and the gradients of f and g."""
    (y_1, y_2), (d_1, d_2) = y, d_y
    result, pull = g.vjp(y_1, **kept_g)
    found_g = pull(d_2)
    d_1, x_2 = d_1 + found_g["x"], y_2 - result.output
    result, pull = f.vjp(x_2, **kept_f)
    found_f = pull(d_1)
    d_2, x_1 = d_2 + found_f["x"], y_1 - result.output
    gradients = {f"f.{n}": a for n, a in found_f.items() if n != "x"}
    gradients.update({f"g.{n}": a for n, a in found_g.items() if n != "x"})
    return (x_1, x_2), (d_1, d_2), gradients


class _ReversibleResidual:
    """y_1 = x_1 + f(x_2), y_2 = x_2 + g(y_1); the backward computes x_1 and x_2 again.

    f and g have ``forward(x)`` and ``vjp(x)`` and keep the shape of x (``bind`` makes one).  ``output`` is the pair
    (y_1, y_2), each also a field of its own.  Gradients: ``x_1``, ``x_2``, ``f.<name>``, ``g.<name>``.
    """

    name = __name__ = "reversible_residual"

    def __call__(self, x_1: Any, x_2: Any, f: Any, g: Any) -> tuple[Any, Any]:
        return self.forward(x_1, x_2, f, g).output

    def forward(self, x_1: Any, x_2: Any, f: Any, g: Any) -> Result:
        """Result with y_1, y_2 and output, the pair of them."""
        y_1, y_2, _, _ = _forward(x_1, x_2, f, g, "")
        return Result(output=(y_1, y_2), y_1=y_1, y_2=y_2)

    def vjp(self, x_1: Any, x_2: Any, f: Any, g: Any) -> tuple[Result, Callable[..., dict[str, Any]]]:
        """Result, and the function from cotangents, a pair or ``y_1=``, ``y_2=``, to gradients."""
        y_1, y_2, kept_f, kept_g = _forward(x_1, x_2, f, g, "")
        xp = namespace(y_1)

        def pullback(output: Any = None, *, y_1: Any = None, y_2: Any = None) -> dict[str, Any]:
            if output is not None:
                y_1, y_2 = output
            d = tuple(xp.zeros_like(y) if a is None else a for a, y in ((y_1, ends[0]), (y_2, ends[1])))
            _, (d_1, d_2), gradients = _backward(ends, d, f, g, kept_f, kept_g)
            return {"x_1": d_1, "x_2": d_2, **gradients}

        ends = (y_1, y_2)
        return Result(output=ends, y_1=y_1, y_2=y_2), pullback

    def inverse(self, y_1: Any, y_2: Any, f: Any, g: Any) -> tuple[Any, Any]:
        """x_1 and x_2 from y_1 and y_2."""
        x_2 = y_2 - g.forward(y_1).output
        return y_1 - f.forward(x_2).output, x_2


class _ReversibleStack:
    """Reversible blocks one after the other on two copies of x; only the last block's outputs are kept for the backward.

    ``blocks`` are pairs (f, g).  ``readout``: ``"concat"`` gives (..., t, 2 m), the two streams side by side; ``"mean"``
    gives (..., t, m).  Result: ``output``, and ``reused_bytes``, the size of the choices (hash buckets, drawn masks) that
    the backward takes from the forward, integers in the smallest type that holds them.  Gradients: ``x``,
    ``blocks[i].f.<name>``, ``blocks[i].g.<name>``.
    """

    name = __name__ = "reversible_stack"

    def __call__(self, x: Any, blocks: Sequence[tuple[Any, Any]], *, readout: str = "concat") -> Any:
        return self.forward(x, blocks, readout=readout).output

    def forward(self, x: Any, blocks: Sequence[tuple[Any, Any]], *, readout: str = "concat") -> Result:
        """Result with the output."""
        return self.vjp(x, blocks, readout=readout)[0]

    def vjp(
        self, x: Any, blocks: Sequence[tuple[Any, Any]], *, readout: str = "concat"
    ) -> tuple[Result, Callable[[Any], dict[str, Any]]]:
        """Result, and the function from the cotangent of the output to gradients."""
        require_one_of("readout", readout, ("concat", "mean"))
        require_array("x", x, axes=1)
        pairs = isinstance(blocks, (list, tuple)) and all(isinstance(p, (list, tuple)) and len(p) == 2 for p in blocks)
        if not pairs:
            raise TypeError(f"blocks is {blocks!r}: expected pairs (f, g)")
        y_1 = y_2 = x
        kept = []
        for i, (f, g) in enumerate(blocks):
            y_1, y_2, *own = _forward(y_1, y_2, f, g, f"blocks[{i}].")
            kept.append(own)
        xp, ends, width = namespace(x), (y_1, y_2), x.shape[-1]
        output = xp.concat(list(ends), axis=-1) if readout == "concat" else (y_1 + y_2) / 2

        def pullback(output: Any) -> dict[str, Any]:
            d = (output[..., :width], output[..., width:]) if readout == "concat" else (output / 2, output / 2)
            y, gradients = ends, {}
            for i in reversed(range(len(blocks))):
                y, d, found = _backward(y, d, *blocks[i], *kept[i])
                gradients.update({f"blocks[{i}].{n}": a for n, a in found.items()})
            return {"x": d[0] + d[1], **gradients}

        return Result(output=output, reused_bytes=_bytes(fields for own in kept for fields in own)), pullback


reversible_residual = _ReversibleResidual()
reversible_stack = _ReversibleStack()
