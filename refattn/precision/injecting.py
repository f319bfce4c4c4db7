"""An array API namespace that injects the rounding errors a kernel may make, at random."""

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from refattn.precision.instrumented import MOVES, Instrumented, InstrumentedArray
from refattn.precision.softmax import Rounding

__all__ = ["injecting"]

Array = Any

# Functions whose result is one of their arguments, or decides between them: they round nothing.
# fmt: off
_EXACT = MOVES | {
    "abs", "argmax", "argmin", "argsort", "ceil", "clip", "copysign", "floor", "isfinite", "isinf", "isnan", "max",
    "maximum", "min", "minimum", "negative", "positive", "round", "sign", "signbit", "sort", "trunc", "where",
}
# fmt: on
_SCALED = {"multiply", "divide"}
"""Exact arrays times a number need no rounding to the storage either."""
_SUMS = {"sum", "mean", "cumulative_sum"}
_EQUAL = {"equal", "not_equal"}
_STEPS = {"ceil", "floor", "round", "sign", "trunc"}
_KEPT = MOVES | {"negative", "positive", "where"}
"""Functions of exact arrays whose results are exact too: values of the inputs, or numbers."""


def injecting(
    rounding: Rounding, rng: np.random.Generator, *, shrink: float = 1.0, decisions: Sequence[Array] | None = None
) -> "_Injecting":
    """Namespace of float64 NumPy arrays in which every operation errs as one of a kernel may, at random.

    ==========================================  =========================================================
    operation                                   error of its result, N standard normal for each element
    ==========================================  =========================================================
    moves, selections, comparisons, maxima      none
    ``matmul`` over n terms                     u sqrt(n (a^2 b^2 + (a b)^2)) N: the products, the partial sums
    ``sum``, ``mean``, ``cumulative_sum``       u sqrt(n (sum x^2 + (sum x)^2)) N
    all others                                  relative, u N
    ``exp``, ``tanh`` that are approximated     relative, by their error, one N for the whole run beside those of elements
    ==========================================  =========================================================

    With narrow storage an operand of a ``matmul`` is rounded to it, relative w N and absolute t N, unless it is an
    input, moved or multiplied by a number: such a product needs no rounding.

    What is decided (comparisons, orders, places of maxima, rounding to integers) is kept in ``decisions``.  Given to the
    namespace of another run of the same function, it is decided there in the same way: errors then never tip a choice.

    Parameters
    ----------
    rounding : Rounding
        Sizes of the errors.
    rng : Generator
    shrink : float
        Factor on all of them: what comes out, divided by it, is the first-order error.
    decisions : list, optional
        Of an earlier run, such as one with ``shrink=0``.

    Examples
    --------
    >>> xp = injecting(Rounding(accumulate=2.0**-24, stored=2.0**-24), np.random.default_rng(0))
    >>> x = xp.exp(xp.asarray(np.zeros(1000)))
    >>> bool(0.9 < np.std(xp.to_numpy(x)) * 2**24 < 1.1)
    True
    """
    return _Injecting(rounding, rng, shrink, decisions)


class _Injecting(Instrumented):
    """Written for many small operations: its own cost is that of a few of NumPy's."""

    def __init__(
        self, rounding: Rounding, rng: np.random.Generator, shrink: float, decisions: Sequence[Array] | None
    ) -> None:
        super().__init__("injecting", np)
        self.decisions: list[Array] = []
        self._decided = None if decisions is None else iter(decisions)
        self.operations = 0  # calls so far
        self._unit = shrink * rounding.accumulate
        self._operands, self._inputs = shrink * rounding.operands, shrink * rounding.inputs
        self._narrow = bool(self._operands or self._inputs)
        self._tiny, self._scores = shrink * rounding.tiny, shrink * rounding.scores
        self._approximate = {n: shrink * x for n, x in (("exp", rounding.exp), ("tanh", rounding.tanh)) if x}
        self._common = {n: rng.standard_normal() for n in self._approximate}
        self._draw = random.Random(int(rng.integers(1 << 32)))

    def apply(self, name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        self.operations += 1
        given = [x._data if type(x) is InstrumentedArray and x._xp is self else self.unwrap(x) for x in args]
        named = {key: self.unwrap(x) for key, x in kwargs.items()} if kwargs else kwargs
        if name == "matmul":
            given = [self._operand(x._data, x.exact) for x in args]
        raw = function(*given, **named)
        if isinstance(raw, np.generic):
            raw = np.asarray(raw)
        exact = self._narrow and (name in _KEPT or name in _SCALED) and _all_exact(name, args, kwargs)
        if type(raw) is not np.ndarray:
            return self._parts(raw, exact)
        if name not in MOVES and (name in _STEPS or raw.dtype != np.float64):
            raw = self._decide(raw, anew=name in _EQUAL and any(isinstance(x, (int, float)) for x in given))
        elif name not in _EXACT and raw.size and self._unit:
            raw = self._erring(name, function, given, named, raw)
        return InstrumentedArray(raw, self, exact)

    def _decide(self, raw: Array, anew: bool) -> Array:
        """A decision as the earlier run took it.  ``anew``: as this one does, because ``x == 0`` asks for what is exactly nothing;
        a sum that cancels in the earlier run and not in this one is something."""
        if self._decided is not None:
            earlier = next(self._decided, raw)
            raw = raw if anew else earlier.copy()
        self.decisions.append(raw)
        return raw

    def unwrap(self, x: Any) -> Any:
        kind = type(x)
        if kind is InstrumentedArray and x._xp is self:
            return x._data
        if kind is int or kind is slice or x is None or x is Ellipsis:
            return x
        return tuple([self.unwrap(y) for y in x]) if kind is tuple else super().unwrap(x)

    def _parts(self, raw: Any, exact: bool) -> Any:
        """Results that are no array: lists and tuples of them, dtypes, numbers."""
        result = self._wrap("", (), raw)
        for x in _arrays((result,)):
            x.exact = exact
        return result

    def finish(self, name: str, args: tuple, raw: Array) -> Array:
        return raw

    def _operand(self, raw: Array, exact: bool) -> Array:
        """An operand of a product as it is rounded to the storage, or to what products are computed in."""
        unit = self._inputs if exact else self._operands
        if not unit:
            return raw
        return raw * (1 + unit * self._noise(raw)) + self._tiny * self._noise(raw)

    def _noise(self, like: Array, unit: float | None = None) -> Array:
        """Standard normal numbers N, or 1 + unit N: some stretch of a long table, much cheaper than new ones."""
        table, n = _table(unit), like.size
        if n > table.size // 4:
            numbers = np.random.default_rng(self._draw.getrandbits(32)).standard_normal(like.shape)
            return numbers if unit is None else 1 + unit * numbers
        start = int(self._draw.random() * (table.size - n))
        return table[start : start + n].reshape(like.shape)

    def _erring(self, name: str, function: Callable, given: list, named: dict[str, Any], raw: Array) -> Array:
        if name == "matmul":
            a, b = given
            size = a.shape[-1] * ((a * a) @ (b * b) + raw * raw)
            raw = raw + self._unit * np.sqrt(size) * self._noise(raw)
        elif name in _SUMS:
            x = given[0]
            count = x.shape[-1] if name == "cumulative_sum" else x.size // raw.size
            if count > 1:
                squares = function(x * x, *given[1:], **named)
                size = squares + count * raw * raw if name == "mean" else count * (squares + raw * raw)
                raw = raw + self._unit * np.sqrt(size) * self._noise(raw)
        else:
            raw *= self._noise(raw, self._unit)
        if self._scores:
            raw = raw * (1 + self._scores * self._noise(raw))
        if name in self._approximate:
            raw = raw * (1 + self._approximate[name] * (1.5 * self._common[name] + self._noise(raw)))
        return raw


@functools.lru_cache(8)
def _table(unit: float | None) -> Array:
    numbers = np.random.default_rng(0).standard_normal(1 << 18)
    return numbers if unit is None else 1 + unit * numbers


def _all_exact(name: str, args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the result consists of values that came in as they are, up to a factor that is a number."""
    given = list(_arrays((*args, *kwargs.values()) if kwargs else args))
    if name in _SCALED:
        return all(x.exact for x in given) and sum(x._data.size > 1 for x in given) <= 1
    if name == "where":
        given = given[1:]
    return all(x.exact for x in given)


def _arrays(found: Iterable[Any]) -> Iterator[InstrumentedArray]:
    for x in found:
        if type(x) is InstrumentedArray:
            yield x
        elif type(x) in (tuple, list):
            yield from _arrays(x)
