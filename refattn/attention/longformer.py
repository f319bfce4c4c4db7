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
from typing import Any

import numpy as np

from refattn import cost as costs
from refattn.arrays import (
    broadcast_leading,
    is_array,
    namespace,
    require_axes,
    to_namespace,
)
from refattn.attention.blocks.longformer import LARGE, blocks_of, globals_of, pattern_of, read_tokens, read_window
from refattn.core import options
from refattn.core.blocks import one_length
from refattn.core.problem import prepare
from refattn.core.selections import take_order
from refattn.mechanism import mechanism
from refattn.patterns import lengths, prefix
from refattn.patterns import window as window_pattern
from refattn.records import Counts, Result

__all__ = ["longformer_attention"]

_SHARED = ("align", "query_lengths", "key_lengths", "scale")


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
    left, right = read_window(window, t)
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

    tokens = read_tokens(global_tokens, lead, t)
    marks = globals_of(tokens)
    own: dict[str, Any] = {"extra_pattern": pattern_of(left, right, marks, lead)}
    if algorithm != "whole":
        own["blocks"] = blocks_of(left, right, marks, lead, h, t, xp, q)
    full_q = xp.broadcast_to(q, (*lead, *q.shape[-3:]))
    local = prepare(full_q, k, v, **own, **arguments, **shared)
    result, local_state = local.run()
    output = result.output
    if not marks.counts.any():
        return Result(output=output), (local, local_state, None)

    real = tokens
    if shared.get("query_lengths") is not None:
        real = tokens & (np.arange(t) < options.per_batch("query_lengths", shared["query_lengths"], lead)[:, None])
    rows = globals_of(real)
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
    gradients = local.gradients(local_state, xp.where(is_global, xp.zeros_like(output), output), None)
    if not index.shape[-1]:
        return gradients
    d_rows = take_order(output, index)
    more = whole.gradients(global_state, xp.where(present, d_rows, xp.zeros_like(d_rows)), None)
    d_q = take_order(more["q"], slot)
    more["q"] = xp.where(is_row, d_q, xp.zeros_like(d_q))  # each global row back to its position
    for name, own in ((n_q, "q"), (n_k, "k"), (n_v, "v")):
        if name == own:
            shape = np.broadcast_shapes(tuple(gradients[own].shape), tuple(more[own].shape))
            gradients[own] = xp.broadcast_to(gradients[own], shape) + more[own]
        else:
            gradients[name] = more[own]
    gradients["scale"] = gradients["scale"] + more["scale"]
    return gradients


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
    left, right = read_window(window, t)
    settings.pop("align", None)
    sizes: dict[str, Any] = {"b": b, "h": h, "k": t, "d": d, "e": e}
    if global_tokens is None and t * t > costs.WALKED:
        n = min(n, t)
        computed = costs.tiled_pairs(window_pattern(left, right, align=0), t)
        if left + right < LARGE:
            size = min(max(16, math.ceil((left + right) / 2)), 128)
            computed = t * (math.ceil(left / size) + 1 + math.ceil(right / size)) * size
        own = (window_pattern(left, right, align=0) | prefix(n)) & ~lengths(query_lengths=n)
        total = costs.softmax_counts(q=t, extra_pattern=own, computed=h * (computed + t * n), **sizes, **settings)
        return total + costs.softmax_counts(q=n, **sizes, **settings) if n else total
    marks = globals_of(read_tokens(np.arange(t) < n if global_tokens is None else np.asarray(global_tokens), (b,), t))
    total = costs.softmax_counts(
        q=t,
        extra_pattern=pattern_of(left, right, marks, (b,)),
        blocks=blocks_of(left, right, marks, (b,), h, t, np, np.zeros(0)),
        **sizes,
        **settings,
    )
    if marks.counts.any():
        settings["query_lengths"] = marks.counts
        total = total + costs.softmax_counts(q=marks.places.shape[-1], **sizes, **settings)
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
