r"""Exact top-k attention: every query attends to the keys with its largest logits.

    chosen[h,q,:] = the ``count`` largest logits[h,q,k] among visible keys        or ``indices`` as given
    output[h,q,e] = sum_{k in chosen} exp(logits[h,q,k] - lse[h,q]) * v[h,k,e]    lse[h,q] = ln sum_{k in chosen} exp(logits)

======  ==========================================  ==================
letter  axis                                        where
======  ==========================================  ==================
...     any batch axes, broadcast as in matmul      all
h       query head                                  q, output, lse, indices
g       key head, h a multiple of g                 k, v
q, k    query position, key position                q, output; k, v
n       place among the chosen                      indices
d, e    query/key channel, value channel            q, k; v, output
======  ==========================================  ==================

Conventions: logits are compared as they meet visibility (scaled, capped, with bias and ALiBi); equal ones go to the lower
index; a row that sees fewer keys has -1 in the places left.  The choice is held fixed by the gradient, which reaches the
chosen pairs alone.  A NaN logit counts as the largest, so that it shows.

This is what hashing and clustering approximate.  Source: Kitaev et al. 2020, arXiv:2001.04451, section 2 (the nearest keys
dominate the softmax); Gupta et al. 2021, arXiv:2106.06899, section 2 (exact top-k in blocks of queries).
"""

import math
from typing import Any

import numpy as np

from refattn import cost as costs
from refattn.arrays import device, require_integer
from refattn.core import options
from refattn.core.blocks import Group, groups
from refattn.core.forward import rows_of_logits
from refattn.core.listed import GATHERED
from refattn.core.problem import Prepared, prepare
from refattn.mechanism import mechanism
from refattn.records import Counts, Elements, Pass, Result, Sizes

__all__ = ["topk_attention"]

_SHARED = tuple(n for n in options.SHARED if n not in ("indices", "block_indices", "block"))


# ---------------------------------------------------------------------- the choice


def _choose(prepared: Prepared, count: int) -> Any:
    """(..., h, q, count) ints: keys by falling logit, -1 where a row sees no more."""
    problem, backend = prepared.problem, prepared.backend
    xp = backend.xp
    b, g, r, q, _ = problem.q.shape
    chosen = xp.full((b, g, r, q, count), -1, dtype=xp.int64, device=device(problem.q))
    tasks = groups(problem)

    def run(group: Group) -> Any:
        with backend.quiet():
            parts = []
            for logits in rows_of_logits(problem, group, backend):
                order = xp.astype(backend.top_k(logits, count), xp.int64)
                taken = xp.take_along_axis(logits, order, axis=-1)
                parts.append(xp.where(taken == -xp.inf, xp.full_like(order, -1), order))
            return xp.concat(parts, axis=-2) if parts else None

    for group, part in zip(tasks, backend.map(run, tasks, work=b * g * r * q * problem.k.shape[-2]), strict=True):
        if part is not None:
            chosen = backend.assign(chosen, (group.b, group.g, slice(None), slice(*group.q), ...), part)
    return xp.reshape(prepared.options.heads.join(chosen, 1), (*prepared.lead, g * r, q, count))


def _arguments(count: Any, indices: Any, n_k: int) -> int | None:
    """The count, checked; None where indices are given."""
    if (count is None) == (indices is None):
        what = "neither" if count is None else "both"
        raise TypeError(f"{what} of count and indices given: expected one of them")
    if count is None:
        return None
    count = require_integer("count", count, minimum=1)
    if count > n_k:
        raise ValueError(f"count is {count}, but there are {n_k} keys: expected at most as many")
    return count


# ---------------------------------------------------------------------- forward and backward


@options.takes(*_SHARED)
def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    count: int | None = None,
    indices: Any = None,
    backend: Any,
    algorithm: str,
    **shared: Any,
) -> tuple[Result, Any]:
    """softmax(scale q k^T, over the chosen keys of each query) v.

    Parameters
    ----------
    q : array (..., h, q, d)
    k : array (..., g, k, d)
    v : array (..., g, k, e)
    count : int
        Keys chosen for a query, 1 ... k: those with the largest logits.
    indices : int array (..., 1 | g | h, q, n)
        The chosen keys, instead of ``count``; the head axis is always there.  -1 and numbers from k on stand for no key, the
        order means nothing, and everything that hides pairs still does.
    {shared}

    Returns
    -------
    output : array (..., h, q, e), in the dtype of the inputs
    lse : array (..., h, q), in the compute dtype (float32 for half inputs)
    indices : int64 array (..., h, q, n)
        The chosen keys by falling logit, or those given.

    Raises
    ------
    ValueError
        Shapes that disagree, heads that do not divide, a count below 1 or above the number of keys, indices below -1, a missing
        ``align``.
    TypeError
        Both or neither of count and indices, or arrays of the wrong type.

    Examples
    --------
    Logits 0, ln 2, ln 4, of which two are kept: weights 1/3 and 2/3.

    >>> import numpy as np
    >>> q, k = np.ones((1, 1, 1)), np.log([[[1.0], [2.0], [4.0]]])
    >>> v = np.array([[[9.0], [3.0], [6.0]]])
    >>> result = topk_attention.forward(q, k, v, count=2)
    >>> result.indices.tolist(), round(float(result.output[0, 0, 0]), 12)
    ([[[2, 1]]], 5.0)
    """
    sizes = options.read_sizes(q, k, v)
    count = _arguments(count, indices, sizes.k)
    arguments = {"backend": backend, "algorithm": algorithm, **shared}
    if count is None:
        prepared = prepare(q, k, v, indices=indices, **arguments)
        xp, rows = backend.xp, (*sizes.lead, sizes.h, sizes.q)
        lists: Any = prepared.options.lists
        given = lists.of_heads()
        chosen = xp.asarray(np.broadcast_to(given, (*rows, given.shape[-1])), device=device(q), copy=True)
    else:
        chosen = _choose(prepare(q, k, v, **arguments), count)
        prepared = prepare(q, k, v, indices=chosen, **arguments)
    result, saved = prepared.run()
    return Result(**result.fields, indices=chosen), (prepared, saved)


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """Cotangents of q, k, v and the shared options, over the chosen pairs (derivation: ``refattn.core.backward``)."""
    prepared, forward_state = saved
    return prepared.gradients(forward_state, output, lse)


def cost(
    *,
    b: int = 1,
    h: int = 1,
    g: int | None = None,
    q: int,
    k: int,
    d: int,
    e: int | None = None,
    count: int | None = None,
    indices: Any = None,
    **shared: Any,
) -> Counts:
    """The search has d multiply-adds for every visible pair, then come d + e (backward: 3 d + 2 e) for every chosen one.

    The search computes all q k logits in runs of queries, whatever is visible.  Given ``indices`` are searched for nothing.
    """
    g, e = h if g is None else g, d if e is None else e
    costs.require_sizes(b=b, h=h, g=g, q=q, k=k, d=d, e=e)
    searched = _arguments(count, indices, k) is not None
    rows = b * h * q
    sizes = Sizes(lead=(b,), h=h, g=g, q=q, k=k, d=d, e=e)
    settled = options.read(sizes, xp=np, dtype=np.float64, indices=indices, **shared)
    visibility = settled.settings.visibility
    if searched:
        n = int(count or 0)
        compared = rows * k if visibility is None else visibility.pairs(q, k, batch=b, heads=h)
        chosen = rows * n if visibility is None else visibility.pairs(q, k, batch=b, heads=h, most=n)
    else:
        lists: Any = settled.lists
        n, compared, chosen = np.shape(indices)[-1], 0, costs.listed_pairs(lists, visibility)
    read, written = (
        Elements(storage=b * (h * q * d + g * k * (d + e))),
        Elements(storage=rows * e, compute=rows, index=rows * n),
    )
    gathered = Elements(compute=2 * min(rows * n * (d + e), 2 * GATHERED))
    return Counts(
        forward=Pass(
            multiplies=compared * d + chosen * (d + e),
            computed=searched * rows * k * d + rows * n * (d + e),
            elementwise=compared + 4 * chosen + rows * (d + 2 * e),
            read=read,
            written=written,
            peak=written + gathered,
        ),
        backward=Pass(
            multiplies=chosen * (3 * d + 2 * e),
            computed=rows * n * (3 * d + 2 * e),
            elementwise=4 * chosen + rows * (2 * d + 2 * e),
            read=read + written + Elements(storage=rows * e),
            written=read,
            peak=read + 2 * gathered,
        ),
        saved=read + written,
    )


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    g: int | None = None,
    q: int = 5,
    k: int = 7,
    d: int = 4,
    e: int = 3,
    n: int | None = None,
    count: int | None = 3,
    **settings: Any,
) -> dict[str, Any]:
    """Normal q (b,h,q,d), k (b,g,k,d), v (b,g,k,e), g = h unless given; options are passed through.

    count: no more than k; left out with indices.

    n: q and k are small whole numbers and only n keys differ, so that there are ties, exact in any order of summation.
    """
    normal = rng.standard_normal
    g = g or h
    arrays = {"q": normal((b, h, q, d)), "k": normal((b, g, k, d)), "v": normal((b, g, k, e))}
    if n is not None:
        arrays["q"], distinct = (rng.integers(-2, 3, size).astype(float) for size in ((b, h, q, d), (b, g, n, d)))
        arrays["k"] = distinct[..., np.arange(k) % n, :]
    if "indices" in settings:
        return {**arrays, **settings}
    return {**arrays, "count": min(count or 1, k), **settings}


def _example_indices(n_q: int, n_k: int) -> np.ndarray:
    """(1, 1, q, 4): keys of different spacing, the third missing in every other row."""
    i = np.arange(n_q)[:, None]
    found = (5 * i + np.array([7, 0, 3, 11])) % n_k
    return np.where((np.arange(4) == 2) & (i % 2 == 1), -1, found)[None, None]


def margin(arguments: dict[str, Any]) -> float:
    """Distance of the last chosen logit from the first one left out, relative to the largest of the row; least of all rows.

    Whole numbers in q and k, and a scale that is a power of two, make products that are exact in any order, so that equal
    ones are equal everywhere: no limit.
    """
    scale = arguments.get("scale")
    exact = np.frexp(np.shape(arguments["q"])[-1] ** -0.5 if scale is None else float(np.reshape(scale, ())))[0] == 0.5
    whole = exact and all(np.all(arguments[n] == np.round(arguments[n])) for n in "qk")
    count = arguments.get("count")
    if count is None or whole or count == np.shape(arguments["k"])[-2]:
        return math.inf
    logits = -np.sort(-topk_attention.definition.steps(arguments).compared, axis=-1)
    size = np.max(np.where(np.isfinite(logits), np.abs(logits), 0), axis=-1, initial=0.0)
    with np.errstate(invalid="ignore"):
        gaps = (logits[..., count - 1] - logits[..., count]) / np.where(size > 0, size, 1)
    return float(np.min(np.where(np.isneginf(logits[..., count]), math.inf, gaps), initial=math.inf))


_PROBES = (
    {"q": 13, "k": 29, "count": 1, "says": "one key for each query: weights of 1"},
    {"q": 11, "k": 23, "count": 23, "says": "all keys: plain attention"},
    {
        "q": 19,
        "k": 19,
        "count": 4,
        "causal": True,
        "align": "lower_right",
        "says": "rows that see fewer keys than count",
    },
    {
        "q": 12,
        "k": 27,
        "d": 4,
        "n": 5,
        "count": 8,
        "says": "every key stands several times: ties go to the lower index",
    },
    {"q": 9, "k": 17, "indices": _example_indices(9, 17), "says": "keys given, in no order, -1 = none"},
)

topk_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="topk_attention",
    differentiable=("q", "k", "v", *options.DIFFERENTIABLE),
    outputs=("output", "lse"),
    probes=_PROBES,
    margin=margin,
)
