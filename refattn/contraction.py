"""Einstein summation on any array API namespace: permute, reshape, one matmul (or multiply, sum) per pair.

    output[kept labels] = sum over all other labels of the product of the operands

The array API has no einsum, plain ``np.einsum`` runs a C loop (about ten times slower than BLAS on batched
contractions), and the einsum of other libraries is dispatched by library name. Here every contraction becomes a few
calls that each namespace has: ``permute_dims``, ``reshape``, ``matmul``, ``sum``, ``multiply``. The strict array API
namespace and the instrumented ones of `refattn.precision` therefore see every multiplication.

Conventions: the output is always explicit; ``...`` stands first in a term for any number of leading axes, which
broadcast as in ``matmul`` and are summed where the output has no ``...``; named axes never broadcast; values are never
conjugated. Plans depend on the shapes alone; what a call does is looked up by spec, types, shapes and dtypes, so that a
call costs 2 microseconds beyond its product.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import is_cupy_namespace

from refattn.arrays import dtype_name, is_array, is_half, namespace

__all__ = ["einsum", "einsum_vjp"]

Array = Any
Shape = tuple[int, ...]

# Ellipsis axes get Greek labels, counted from the last one: they cannot meet the ASCII letters of a caller.
_GREEK = "αβγδεζηθικλμνξοπ"

# Below this many elements per matrix, one copy is cheaper than another call of the matrix product.
_SMALL_MATRIX = 512


class _Arrangement(NamedTuple):
    """Sum over axes, then permute, then reshape; None leaves a step out."""

    summed: Shape | None = None
    axes: Shape | None = None
    shape: Shape | None = None


class _Step(NamedTuple):
    """One product: two operands by position (taken off the list), how each is laid out, the result's shapes."""

    left: int
    right: int
    arrange_left: _Arrangement
    arrange_right: _Arrangement
    product: str
    product_shape: Shape
    shape: Shape | None  # what it is reshaped to


class _Plan(NamedTuple):
    squeezed: tuple[Shape | None, ...]  # operand shapes without broadcast axes
    steps: tuple[_Step, ...]
    final: _Arrangement


class _Terms(NamedTuple):
    """A spec with its ellipses spelled out: one string of labels per operand, and the size of every label."""

    inputs: tuple[str, ...]
    output: str
    sizes: dict[str, int]

    def shape(self, labels: str) -> Shape:
        return tuple(self.sizes[label] for label in labels)


def einsum(spec: str, *operands: Array, out: Array | None = None) -> Array:
    """Sum of products of `operands` by the labels of `spec`.

    Parameters
    ----------
    spec : str
        Such as ``"...hqd,...hkd->...hqk"``: a term of letters for each operand, ``->``, the output's letters. ``...``
        may stand first in any term; spaces are ignored. A letter stands at most once in a term.
    *operands : arrays
        One for each term, of one namespace and any numeric dtype (Python scalars are not operands). Axes of the same
        letter have the same size, and size 1 does not broadcast; the axes of ``...`` broadcast as in matmul.
    out : array, optional
        A contiguous array of the result's shape and dtype, whose memory the result may take: new memory for every tile costs
        as much in page faults as the product itself. NumPy and CuPy use it where the last product comes out in the order of
        the output; always go on with what is returned.

    Returns
    -------
    array
        In the operands' common dtype. It may be a view of an operand when nothing is multiplied or summed, and its
        memory order need not be that of its axes. float16 and bfloat16 are contracted in float32 and rounded once:
        NumPy would sum float16 in float16 along all axes but the last.

    Raises
    ------
    ValueError
        Implicit output, a label twice in one term, an output label that no operand has, a wrong number of operands
        or axes, or two sizes for one axis.
    TypeError
        An operand that is no array, or is boolean.

    Notes
    -----
    Two operands take one batched matrix product, of views where the operands' axes allow it. Three and more are taken
    in the order of the cheapest path that `opt_einsum.contract_path` finds for the shapes.

    Examples
    --------
    >>> import numpy as np
    >>> logits = einsum("...hqd,...hkd->...hqk", np.ones((2, 3, 5, 4)), np.ones((3, 7, 4)))
    >>> logits.shape, float(logits[0, 0, 0, 0])
    ((2, 3, 5, 7), 4.0)
    """
    key: Any = None
    try:
        # the dtype's type first: dtypes of two libraries may hash alike, and comparing them warns
        key = (spec, *[(type(x), x.shape, type(x.dtype), x.dtype) for x in operands])
        contraction = _ready[key]
    except (KeyError, AttributeError, TypeError) as missing:
        if not isinstance(spec, str):
            raise TypeError(
                f"spec is a {type(spec).__name__}: expected a string such as 'ij,jk->ik', then the operands"
            ) from None
        contraction = _Contraction(_plan(spec, _shapes(spec, operands)), operands)
        if isinstance(missing, KeyError):  # else its dtypes have no hash
            if len(_ready) >= _MOST:
                _ready.clear()
            _ready[key] = contraction
    return contraction(operands, out)


def einsum_vjp(spec: str, operands: Sequence[Array], d_output: Array) -> list[Array]:
    """Cotangents of all operands of ``einsum(spec, *operands)``, given the cotangent of its output.

    The cotangent of one operand is again an einsum: `d_output` takes the operand's place, and the operand's labels
    become the output. Labels that only this operand has are broadcast back, leading axes along which it was broadcast
    are summed.

    Parameters
    ----------
    spec, operands
        As given to `einsum`.
    d_output : array
        Cotangent of the output, of its shape.

    Returns
    -------
    list of arrays
        One for each operand, of its shape; broadcast labels may be views of stride 0.

    Raises
    ------
    ValueError, TypeError
        As `einsum`, and when `d_output` has another shape than the output.
    """
    shapes = _shapes(spec, operands)
    terms = _expand(spec, shapes)
    if tuple(d_output.shape) != terms.shape(terms.output):
        msg = (
            f"einsum_vjp({spec!r}): d_output has shape {tuple(d_output.shape)}, the output has "
            f"{terms.shape(terms.output)} (operands {_listed(shapes)})"
        )
        raise ValueError(msg)
    xp = namespace(d_output)
    cotangents = []
    for at, (plan, kept, full) in enumerate(_vjp_plans(spec, shapes)):
        others = [operand for other, operand in enumerate(operands) if other != at]
        cotangent = _Contraction(plan, (d_output, *others))((d_output, *others))
        if tuple(cotangent.shape) != kept:
            cotangent = xp.reshape(cotangent, kept)
        if kept != full:
            cotangent = xp.broadcast_to(cotangent, full)
        cotangents.append(cotangent if full == shapes[at] else xp.reshape(cotangent, shapes[at]))
    return cotangents


_Moves = tuple[tuple[int, Shape], ...]  # which of (sum, permute, reshape), and over, to or into what


class _Contraction:
    """A plan for operands of given types, shapes and dtypes: all that can be decided before the numbers are there."""

    def __init__(self, plan: _Plan, operands: Sequence[Array]) -> None:
        names = [dtype_name(operand.dtype) for operand in operands]
        if "bool" in names:
            at = names.index("bool")
            raise TypeError(f"einsum: operand {at} is boolean; cast it to a number, or select with where")
        self.halves = tuple(at for at, name in enumerate(names) if is_half(name))
        numpy = all(type(operand) is np.ndarray for operand in operands)
        self.calls: Any = (_numpy_sum, np.ndarray.transpose, np.ndarray.reshape) if numpy else None
        self.squeezed = tuple((at, shape) for at, shape in enumerate(plan.squeezed) if shape is not None)
        self.steps = [
            (s.left, s.right, _moves(s.arrange_left), _moves(s.arrange_right), s.product == "matmul", s.shape)
            for s in plan.steps
        ]
        self.final = _moves(plan.final)
        # Where the last product is laid out as the output, the output's memory seen in the shape of that product.
        self.direct = plan.steps[-1].product_shape if plan.steps and not self.final and not self.halves else None

    def __call__(self, operands: Sequence[Array], out: Array | None = None) -> Array:
        calls, xp = self.calls, np
        if calls is None:
            xp = namespace(*operands)
            calls = (lambda x, axes: xp.sum(x, axis=axes)), xp.permute_dims, xp.reshape
        arrays = list(operands)
        if self.halves:
            dtype = xp.result_type(*operands)
            for at in self.halves:
                arrays[at] = xp.astype(arrays[at], xp.float32)
        for at, squeezed in self.squeezed:
            arrays[at] = calls[2](arrays[at], squeezed)
        last = len(self.steps) - 1
        for n, (at_left, at_right, moves_left, moves_right, is_matmul, shape) in enumerate(self.steps):
            left, right = arrays[at_left], arrays[at_right]
            for call, how in moves_left:
                left = calls[call](left, how)
            for call, how in moves_right:
                right = calls[call](right, how)
            if out is not None and n == last and self.direct and (xp is np or is_cupy_namespace(xp)):
                (xp.matmul if is_matmul else xp.multiply)(left, right, out=out.reshape(self.direct))
                return out
            product = xp.matmul(left, right) if is_matmul else xp.multiply(left, right)
            if product.shape == ():
                product = xp.asarray(product)  # NumPy gives a scalar
            if shape is not None:
                product = calls[2](product, shape)
            if last:
                arrays = [x for at, x in enumerate(arrays) if at not in (at_left, at_right)]
                arrays.append(product)
            else:
                arrays = [product]
        result = arrays[0]
        for call, how in self.final:
            result = calls[call](result, how)
        return xp.astype(result, dtype, copy=False) if self.halves else result


_ready: dict[Any, _Contraction] = {}
_MOST = 4096
"""Contractions that are kept ready."""


def _numpy_sum(x: np.ndarray, axes: Shape) -> np.ndarray:
    return np.asarray(x.sum(axis=axes))  # NumPy gives a scalar when nothing is left


def _moves(arrangement: _Arrangement) -> _Moves:
    return tuple((call, how) for call, how in enumerate(arrangement) if how is not None)


# Planning: from labels and sizes to arrangements


@lru_cache(maxsize=4096)
def _plan(spec: str, shapes: tuple[Shape, ...]) -> _Plan:
    return _plan_terms(_expand(spec, shapes), shapes)


@lru_cache(maxsize=4096)
def _vjp_plans(spec: str, shapes: tuple[Shape, ...]) -> list[tuple[_Plan, Shape, Shape]]:
    """For each operand: its plan, the result's shape with 1 for its own summed labels, its shape without broadcasts."""
    terms = _expand(spec, shapes)
    plans = []
    for at, labels in enumerate(terms.inputs):
        inputs = (terms.output, *terms.inputs[:at], *terms.inputs[at + 1 :])
        found = set().union(*inputs)
        swapped = terms._replace(inputs=inputs, output="".join(x for x in labels if x in found))
        plan = _plan_terms(swapped, (terms.shape(terms.output), *shapes[:at], *shapes[at + 1 :]))
        kept = tuple(terms.sizes[x] if x in found else 1 for x in labels)
        plans.append((plan, kept, terms.shape(labels)))
    return plans


def _plan_terms(terms: _Terms, shapes: tuple[Shape, ...]) -> _Plan:
    labels = list(terms.inputs)
    steps = []
    for left, right in _path(terms):
        rest = [x for at, x in enumerate(labels) if at not in (left, right)]
        later = set(terms.output).union(*rest)
        # Output labels first: what a later step contracts comes to stand last, as matmul wants it.
        candidates = dict.fromkeys(terms.output + labels[left] + labels[right])
        target = "".join(x for x in candidates if x in later and x in labels[left] + labels[right])
        # The factor that owns the last label kept goes to the right: its axis then already is the last one.
        own = [x for x in target if (x in labels[left]) != (x in labels[right])]
        if own and own[-1] in labels[left]:
            left, right = right, left
        step, result = _plan_pair(left, right, labels, target, terms.sizes)
        steps.append(step)
        labels = [*rest, result]
    final = _arrangement(labels[0], terms.output, terms.shape(terms.output), terms.sizes)
    squeezed = [terms.shape(x) for x in terms.inputs]
    reshaped = tuple(new if new != old else None for new, old in zip(squeezed, shapes, strict=True))
    return _Plan(reshaped, tuple(steps), final)


def _path(terms: _Terms) -> Sequence[tuple[int, ...]]:
    if len(terms.inputs) <= 2:
        return [(0, 1)][: len(terms.inputs) - 1]
    from opt_einsum import contract_path

    spec = f"{','.join(terms.inputs)}->{terms.output}"
    return contract_path(spec, *map(terms.shape, terms.inputs), shapes=True)[0]


def _plan_pair(left: int, right: int, terms: list[str], target: str, sizes: dict[str, int]) -> tuple[_Step, str]:
    """One product of two of the terms, keeping the labels of `target`; also the labels of the result."""

    def count(labels: Sequence[str]) -> int:
        return math.prod(sizes[x] for x in labels)

    def arrange(term: str, kept: str, axes: Sequence[str], *merged: Sequence[str]) -> _Arrangement:
        """Sum `term` to the labels `kept`; put `axes` first, of size 1 where it has none, then the merged ones."""
        order = [x for x in (*axes, *chain(*merged)) if x in kept]
        shape = (*(sizes[x] if x in kept else 1 for x in axes), *map(count, merged))
        return _arrangement(term, order, shape, sizes)

    a, b = terms[left], terms[right]
    kept_a = "".join(x for x in a if x in b or x in target)
    kept_b = "".join(x for x in b if x in a or x in target)
    larger = kept_a if count(kept_a) >= count(kept_b) else kept_b
    contracted = [x for x in larger if x in kept_a and x in kept_b and x not in target]
    if not contracted:
        shape = tuple(sizes[x] for x in target)
        step = _Step(left, right, arrange(a, kept_a, target), arrange(b, kept_b, target), "multiply", shape, None)
        return step, target
    rows = _fused(kept_a, kept_b, contracted, count)
    columns = _fused(kept_b, kept_a, contracted, count)
    batch = [x for x in target if x not in rows and x not in columns]
    result = "".join(batch + rows + columns)
    step = _Step(
        left,
        right,
        arrange(a, kept_a, batch, rows, contracted),
        arrange(b, kept_b, batch, contracted, columns),
        "matmul",
        (*(sizes[x] for x in batch), count(rows), count(columns)),
        None if len(rows) == len(columns) == 1 else tuple(sizes[x] for x in result),
    )
    return step, result


def _fused(labels: str, other: str, contracted: list[str], count: Callable[[Sequence[str]], int]) -> list[str]:
    """The labels of one factor that form the matrix axis; its other own labels become broadcast batch axes.

    Axes that lie side by side merge without a copy. Where the own axes are split (``hqk`` summed over ``h`` under a
    batch axis), the largest side-by-side group is taken and the rest is looped over by matmul, unless the operand has
    to be copied anyway or the matrices would be tiny.
    """
    own = [x for x in labels if x not in other]
    runs = [list(run) for kept, run in groupby(labels, key=own.__contains__) if kept]
    if len(runs) < 2 or "".join(contracted) not in labels:
        return own
    largest = max(runs, key=count)
    return largest if count(largest) * count(contracted) >= _SMALL_MATRIX else own


def _arrangement(term: str, order: Sequence[str], shape: Shape, sizes: dict[str, int]) -> _Arrangement:
    summed = tuple(at for at, x in enumerate(term) if x not in order)
    kept = [x for x in term if x in order]
    axes = tuple(kept.index(x) for x in order)
    return _Arrangement(
        summed or None,
        None if axes == tuple(range(len(axes))) else axes,
        None if shape == tuple(sizes[x] for x in order) else shape,
    )


# Reading a spec


@lru_cache(maxsize=4096)
def _expand(spec: str, shapes: tuple[Shape, ...]) -> _Terms:
    """Read `spec` for operands of these shapes; every ``...`` becomes labels, broadcast axes lose theirs."""
    inputs, output = _parse(spec)

    def refuse(problem: str) -> ValueError:
        return ValueError(f"einsum({spec!r}): {problem}; operand shapes {_listed(shapes)}")

    if len(inputs) != len(shapes):
        raise refuse(f"{len(inputs)} terms, {len(shapes)} operands")
    leads = []
    for at, (term, shape) in enumerate(zip(inputs, shapes, strict=True)):
        named = term.removeprefix("...")
        if len(shape) < len(named) or (len(shape) > len(named) and named == term):
            at_least = "" if named == term else "at least "
            raise refuse(f"operand {at} has {len(shape)} axes, {term!r} needs {at_least}{len(named)}")
        leads.append(shape[: len(shape) - len(named)])
    depth = max(map(len, leads), default=0)
    if depth > len(_GREEK):
        raise refuse(f"more than {len(_GREEK)} leading axes")

    sizes: dict[str, int] = {}
    for back in range(depth, 0, -1):
        found = {lead[-back] for lead in leads if len(lead) >= back} - {1}
        if len(found) > 1:
            raise refuse(f"leading axis {-back} of '...' has the sizes {sorted(found)}, which do not broadcast")
        sizes[_GREEK[back - 1]] = found.pop() if found else 1
    terms = []
    for at, (term, shape, lead) in enumerate(zip(inputs, shapes, leads, strict=True)):
        named = term.removeprefix("...")
        for label, size in zip(named, shape[len(lead) :], strict=True):
            if sizes.setdefault(label, size) != size:
                first = next(n for n, earlier in enumerate(inputs) if label in earlier)
                raise refuse(f"axis {label!r} has size {sizes[label]} in operand {first} and {size} in operand {at}")
        greek = _GREEK[: len(lead)][::-1]
        terms.append("".join(x for x, n in zip(greek, lead, strict=True) if n == sizes[x]) + named)
    greek = _GREEK[:depth][::-1] if output.startswith("...") else ""
    return _Terms(tuple(terms), greek + output.removeprefix("..."), sizes)


@cache
def _parse(spec: str) -> tuple[tuple[str, ...], str]:
    left, arrow, output = spec.replace(" ", "").partition("->")

    def refuse(problem: str) -> ValueError:
        return ValueError(f"einsum({spec!r}): {problem}")

    if not arrow:
        raise refuse("the output must be explicit, as in 'ij,jk->ik'")
    inputs = tuple(left.split(","))
    for name, term in [*((f"operand {at}", term) for at, term in enumerate(inputs)), ("the output", output)]:
        labels = term.removeprefix("...")
        if labels and not (labels.isascii() and labels.isalpha()):
            raise refuse(f"{term!r} of {name} is not '...' (first, if at all) and ASCII letters")
        repeated = sorted({x for x in labels if labels.count(x) > 1})
        if repeated:
            raise refuse(f"label {repeated[0]!r} stands more than once in {term!r} of {name}")
    unknown = sorted(set(output.removeprefix("...")) - set(left))
    if unknown:
        raise refuse(f"label {unknown[0]!r} of the output is in no operand")
    if output.startswith("...") and "..." not in left:
        raise refuse("'...' of the output is in no operand")
    return inputs, output


def _shapes(spec: str, operands: Sequence[Array]) -> tuple[Shape, ...]:
    for at, operand in enumerate(operands):
        if not is_array(operand):
            raise TypeError(f"einsum({spec!r}): operand {at} is a {type(operand).__name__}, expected an array")
    return tuple(tuple(operand.shape) for operand in operands)


def _listed(shapes: Sequence[Shape]) -> str:
    return ", ".join(map(str, shapes))
