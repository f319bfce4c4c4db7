"""Longformer attention: a window around every token, and a few global tokens that all see and that see all.

    local row i:    output[h,i,e] = sum_j softmax_j(scale q[h,i] . k[h,j]) v[h,j,e]      over i - left <= j <= i + right, and global j
    global row i:   output[h,i,e] = sum_j softmax_j(scale qg[h,i] . kg[h,j]) vg[h,j,e]   over all j

======= ==================================================  =====================================
letter  axis                                                where
======= ==================================================  =====================================
...     any batch axes, broadcast as in matmul              all
h       head                                                q, k, v, the global arrays, output
t, i, j position, of queries and keys alike                 all
n       global tokens of a batch entry                      (found from ``global_tokens``)
d, e    query/key channel, value channel                    q, k; v, output
======= ==================================================  =====================================

Conventions: each row is one softmax; a local row reads global keys through its own local arrays, a key that is global and in
the window counts once; keys beyond ``key_lengths`` are seen by nobody, global ones included.  Work and memory are linear in t
for a fixed number of global tokens.

Source: Beltagy, Peters, Cohan 2020, arXiv:2004.05150, section 3.1 (global attention, linear projections for it).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from refattn import cost as costs
from refattn.arrays import (
    broadcast_leading,
    is_array,
    is_bool,
    namespace,
    require_axes,
    require_integer,
    to_namespace,
    to_numpy,
)
from refattn.core import options
from refattn.core.blocks import ROWS, Group, Maker, banded, one_length, tiled
from refattn.core.problem import prepare
from refattn.core.selections import Index, Lattice, take_order
from refattn.mechanism import mechanism
from refattn.patterns import Pattern, documents, lengths, prefix, window
from refattn.patterns import window as window_pattern
from refattn.records import Block, Counts, Result

__all__ = ["longformer_attention"]

_LARGE = 512
"""Windows from this width on fill the core's own tiles."""
_PAIRS = 1 << 20
"""Pairs of local rows and global keys in one block: gradients of gathered keys take a pass over all keys for each."""
_SHARED = ("align", "query_lengths", "key_lengths", "scale")


class _Globals(NamedTuple):
    """Where the global tokens of each batch entry stand; host arrays."""

    tokens: np.ndarray  # (b, t) bool
    places: np.ndarray  # (b, n): their positions, 0 where an entry has fewer
    slot: np.ndarray  # (b, t): the number of a position among the places, 0 where it has none
    counts: np.ndarray  # (b,)


def _globals(tokens: np.ndarray) -> _Globals:
    counts = tokens.sum(-1)
    n = int(counts.max(initial=0))
    order = np.argsort(~tokens, axis=-1, kind="stable")[:, :n]
    slot = np.where(tokens, np.cumsum(tokens, axis=-1) - 1, 0)
    return _Globals(tokens, np.where(np.arange(n) < counts[:, None], order, 0), slot, counts)


def _tokens(global_tokens: Any, lead: tuple[int, ...], t: int) -> np.ndarray:
    """The caller's (..., t) bool as (b, t)."""
    if global_tokens is None:
        return np.zeros((math.prod(lead), t), dtype=bool)
    if not is_array(global_tokens) or not is_bool(global_tokens.dtype):
        kind = f"has dtype {global_tokens.dtype}" if is_array(global_tokens) else f"is a {type(global_tokens).__name__}"
        raise TypeError(f"global_tokens {kind}: expected a bool array (..., t), True = global")
    host = to_numpy(global_tokens)
    return np.array(np.broadcast_to(host, (*lead, t))).reshape(math.prod(lead), t)


def _edges(span: Any, t: int) -> tuple[int, int]:
    """Keys seen on each side, as numbers below t."""
    if not isinstance(span, (tuple, list)) or len(span) != 2:
        raise TypeError(f"window is {span!r}: expected (left, right), two counts or None")
    for x in span:
        if x is not None:
            require_integer("window", x, minimum=0)
    left, right = (t if x is None else min(int(x), t) for x in span)
    return left, right


def _local_pairs(found: _Globals, lead: tuple[int, ...]) -> Pattern:
    """Local rows and local keys: what the window alone decides."""
    tokens = found.tokens.reshape(*lead, -1)
    return documents(np.where(tokens, 1, 0), np.where(tokens, 2, 0))


def _local_rows(found: _Globals, lead: tuple[int, ...]) -> Pattern:
    tokens = found.tokens.reshape(*lead, -1)
    return documents(np.where(tokens, 1, 0), np.zeros_like(tokens, dtype=int))


def _pattern(left: int, right: int, found: _Globals, lead: tuple[int, ...]) -> Pattern:
    """Everything that a local row sees."""
    near = window(left, right, align=0)
    if not found.counts.any():
        return near
    tokens = found.tokens.reshape(*lead, -1)
    seen_by_all = documents(np.full(tokens.shape, 2), np.where(tokens, 2, 0))
    return _local_rows(found, lead) & (near | seen_by_all)


def _blocks(
    left: int, right: int, found: _Globals, lead: tuple[int, ...], h: int, t: int, xp: Any, like: Any
) -> Callable[..., Iterator[Block]]:
    """The window as a band of blocks, then runs of rows against the gathered global keys."""
    n = found.places.shape[-1]
    size = min(max(16, math.ceil((left + right) / 2)), 128)
    behind, ahead = math.ceil(left / size), math.ceil(right / size)
    near = window(left, right, align=0)
    pairs = rows = None
    if n:
        pairs, rows = (x.fit(t, t, batch=lead, heads=h) for x in (_local_pairs(found, lead), _local_rows(found, lead)))
        index = to_namespace(found.places[:, None, None, None, :], xp, like=like)  # (b, 1, 1, 1, n)
        real = to_namespace(
            (np.arange(n) < found.counts[:, None])[:, None, None, None, None, :], xp, like=like
        )  # (b, 1, 1, 1, 1, n)

    def joined(first: Pattern | None, second: Pattern | None) -> Pattern | None:
        return first if second is None else second if first is None else first & second

    def blocks(visibility: Pattern | None, group: Group) -> Iterator[Block]:
        make = Maker(joined(visibility, pairs), group, t, t, xp, like)
        if left + right >= _LARGE or (behind + ahead + 1) * size >= t:
            yield from tiled(make, near)
        else:
            yield from banded(make, t, size, behind, ahead, lambda i, j: (i - j <= left) & (j - i <= right))
        if n:
            columns = Maker(joined(visibility, rows), group, t, t, xp, like)
            step = max(ROWS, _PAIRS // (columns.units * n))
            for start in range(0, t, step):
                queries = Lattice(start, 1, min(step, t - start))
                yield columns.listed(queries, Index(index[group.b, ...]), real[group.b, ...])

    return blocks


@options.takes(*_SHARED)
def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    q_global: Any = None,
    k_global: Any = None,
    v_global: Any = None,
    window: tuple[int | None, int | None],
    global_tokens: Any = None,
    backend: Any,
    algorithm: str,
    **shared: Any,
) -> tuple[Result, Any]:
    """softmax over a window and the global tokens; global rows see everything, by arrays of their own.

    Parameters
    ----------
    q, k : arrays (..., h, t, d)
    v : array (..., h, t, e)
    q_global, k_global, v_global : arrays of the same shapes
        What global rows use; one that is left out is the local one.  Only the global rows of q_global are read.
    window : (int or None, int or None)
        Keys seen to the left and right of oneself, both inclusive; None = unlimited.
    global_tokens : bool array (..., t)
        True = global; another number of them in each batch entry is fine.
    {shared}

    Returns
    -------
    output : array (..., h, t, e), in the dtype of the inputs

    Raises
    ------
    ValueError
        Shapes that disagree, a negative window, lengths beyond t, an alignment that moves queries off their own keys.
    TypeError
        global_tokens that is no bool array, a window that is no pair.

    Examples
    --------
    Zero queries take means: of oneself and the key before; token 0 is global, so the others see it and it sees all.

    >>> import numpy as np
    >>> q, k, v = np.zeros((1, 5, 2)), np.ones((1, 5, 2)), np.arange(5.0).reshape(1, 5, 1)
    >>> first = np.arange(5) == 0
    >>> longformer_attention(q, k, v, window=(1, 0), global_tokens=first)[0, :, 0].round(2).tolist()
    [2.0, 0.5, 1.0, 1.67, 2.33]
    """
    arrays = {"q": (q, "... h t d"), "k": (k, "... h t d"), "v": (v, "... h t e")}
    for name, x, axes in (
        ("q_global", q_global, "... h t d"), ("k_global", k_global, "... h t d"), ("v_global", v_global, "... h t e")
    ):  # fmt: skip
        if x is not None:
            arrays[name] = (x, axes)
    sizes = require_axes(**arrays)
    h, t = sizes["h"], sizes["t"]
    left, right = _edges(window, t)
    leading = {n: (x, 3) for n, (x, _) in arrays.items()}
    if is_array(global_tokens):
        require_axes({"t": t}, global_tokens=(global_tokens, "... t"))
        leading["global_tokens"] = (global_tokens, 1)
    lead = broadcast_leading(**leading)
    xp = namespace(q, k, v)
    if np.any(options.offsets(lead, t, t, {**options.SHARED, **shared, "window": (left, right)})):
        raise ValueError(
            f"align is {shared['align']!r}: every query stands at its own key here, expected an offset of 0"
        )
    shared.pop("align", None)
    arguments = {"backend": backend, "algorithm": algorithm}

    tokens = _tokens(global_tokens, lead, t)
    found = _globals(tokens)
    own: dict[str, Any] = {"extra_pattern": _pattern(left, right, found, lead)}
    if algorithm != "whole":
        own["blocks"] = _blocks(left, right, found, lead, h, t, xp, q)
    full_q = xp.broadcast_to(q, (*lead, *q.shape[-3:]))
    local = prepare(full_q, k, v, **own, **arguments, **shared)
    result, local_state = local.run()
    output = result.output
    if not found.counts.any():
        return Result(output=output), (local, local_state, None)

    real = tokens
    if shared.get("query_lengths") is not None:
        real = tokens & (np.arange(t) < options.per_batch("query_lengths", shared["query_lengths"], lead)[:, None])
    rows = _globals(real)
    names = tuple(n if x is None else n + "_global" for n, x in (("q", q_global), ("k", k_global), ("v", v_global)))
    q_global, k_global, v_global = (
        local_x if x is None else x for local_x, x in ((q, q_global), (k, k_global), (v, v_global))
    )

    def moved(x: np.ndarray) -> Any:
        return to_namespace(x.reshape(*lead, *x.shape[1:]), xp, like=q)

    index, slot = moved(rows.places[:, None]), moved(rows.slot[:, None])  # (..., 1, n) and (..., 1, t)
    present = moved((np.arange(rows.places.shape[-1]) < rows.counts[:, None])[:, None, :, None])
    is_global, is_row = moved(tokens[:, None, :, None]), moved(real[:, None, :, None])
    queries = take_order(xp.broadcast_to(q_global, (*lead, *q_global.shape[-3:])), index)
    lengths: dict[str, Any] = {
        "query_lengths": rows.counts,
        "key_lengths": shared.get("key_lengths"),
        "scale": shared.get("scale"),
    }
    whole = prepare(queries, k_global, v_global, **arguments, **lengths)
    global_result, global_state = whole.run()
    output = xp.where(is_row, take_order(global_result.output, slot), output) if rows.places.shape[-1] else output
    return Result(output=output), (
        local,
        local_state,
        (whole, global_state, names, index, slot, present, is_global, is_row),
    )


def backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """Cotangents of all arrays and of scale: those of the local rows and of the global rows (``refattn.core.backward``)."""
    if output is None:
        return {}
    local, local_state, rows = saved
    if rows is None:
        return local.gradients(local_state, output, None)
    whole, global_state, (n_q, n_k, n_v), index, slot, present, is_global, is_row = rows
    xp = namespace(output)
    found = local.gradients(local_state, xp.where(is_global, xp.zeros_like(output), output), None)
    if not index.shape[-1]:
        return found
    d_rows = take_order(output, index)
    more = whole.gradients(global_state, xp.where(present, d_rows, xp.zeros_like(d_rows)), None)
    d_q = take_order(more["q"], slot)
    more["q"] = xp.where(is_row, d_q, xp.zeros_like(d_q))  # each global row back to its position
    for name, own in ((n_q, "q"), (n_k, "k"), (n_v, "v")):
        if name == own:
            shape = np.broadcast_shapes(tuple(found[own].shape), tuple(more[own].shape))
            found[own] = xp.broadcast_to(found[own], shape) + more[own]
        else:
            found[name] = more[own]
    found["scale"] = found["scale"] + more["scale"]
    return found


def cost(
    *,
    b: int = 1,
    h: int = 1,
    t: int | None = None,
    q: int | None = None,
    k: int | None = None,
    d: int,
    e: int | None = None,
    n: int = 0,
    window: tuple[int | None, int | None],
    global_tokens: Any = None,
    **settings: Any,
) -> Counts:
    """Counts of the window and the global columns, and of the global rows against all keys.

    t, or q = k, is the length.  ``global_tokens`` (b, t) or (t,) as in the call; without it the first n tokens are global.
    """
    t = one_length(t, q, k)
    costs.require_sizes(b=b, h=h, t=t, n=n)
    left, right = _edges(window, t)
    settings.pop("align", None)
    sizes: dict[str, Any] = {"b": b, "h": h, "k": t, "d": d, "e": e}
    if global_tokens is None and t * t > costs.WALKED:
        n = min(n, t)
        computed = costs.tiled_pairs(window_pattern(left, right, align=0), t)
        if left + right < _LARGE:
            size = min(max(16, math.ceil((left + right) / 2)), 128)
            computed = t * (math.ceil(left / size) + 1 + math.ceil(right / size)) * size
        own = (window_pattern(left, right, align=0) | prefix(n)) & ~lengths(query_lengths=n)
        total = costs.softmax_counts(q=t, extra_pattern=own, computed=h * (computed + t * n), **sizes, **settings)
        return total + costs.softmax_counts(q=n, **sizes, **settings) if n else total
    found = _globals(_tokens(np.arange(t) < n if global_tokens is None else np.asarray(global_tokens), (b,), t))
    total = costs.softmax_counts(
        q=t,
        extra_pattern=_pattern(left, right, found, (b,)),
        blocks=_blocks(left, right, found, (b,), h, t, np, np.zeros(0)),
        **sizes,
        **settings,
    )
    if found.counts.any():
        settings["query_lengths"] = found.counts
        total = total + costs.softmax_counts(q=found.places.shape[-1], **sizes, **settings)
    return total


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    t: int = 11,
    d: int = 4,
    e: int = 3,
    n: int = 2,
    window: Any = (2, 2),
    **settings: Any,
) -> dict[str, Any]:
    """Normal arrays, and n global tokens in each batch entry, at random places, with arrays of their own.

    ``q_global=None`` (and so on) leaves one out; n=0: no global tokens and no global arrays.
    """
    normal = rng.standard_normal
    given = {"q": normal((b, h, t, d)), "k": normal((b, h, t, d)), "v": normal((b, h, t, e)), "window": window}
    if n:
        given["global_tokens"] = rng.random((b, t)).argsort(-1) < n
        given.update((name + "_global", normal(given[name].shape)) for name in "qkv")
    given.update(settings)
    return {name: x for name, x in given.items() if x is not None}


_PROBES = (
    {"t": 29, "n": 0, "window": (3, 3), "says": "no global tokens"},
    {
        "t": 31,
        "n": 3,
        "window": (4, 2),
        "scale": 0.3,
        "says": "an uneven window, three global tokens, a scale of one's own",
    },
    {
        "t": 23,
        "n": 2,
        "q_global": None,
        "k_global": None,
        "v_global": None,
        "says": "global tokens by the local arrays",
    },
    {
        "t": 26,
        "b": 2,
        "n": 3,
        "query_lengths": (26, 17),
        "key_lengths": (26, 17),
        "align": "upper_left",
        "says": "padded positions, global tokens among them",
    },
    {"t": 9, "n": 1, "window": (20, 20), "says": "a window longer than the sequence"},
)

longformer_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="longformer_attention",
    differentiable=("q", "k", "v", "q_global", "k_global", "v_global", "scale"),
    probes=_PROBES,
)
