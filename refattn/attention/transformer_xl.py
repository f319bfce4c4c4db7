r"""Transformer-XL attention: a segment attends to a memory and itself, and positions enter by distance alone.

    logits[h,q,k] = scale * ( (q[h,q,:] + u[h,:]) . k[h,k,:]  +  (q[h,q,:] + w[h,:]) . r[h,p,:] ),    p = k_count - 1 - distance
    distance = q + k_count - q_count - k                                                     output = softmax over visible k . v

Taken apart (``keep_terms``; the paper's letters), the logits before bias and mask are a + b + c + d:

====  ==========================  =======================================
term  relative (this mechanism)   absolute (``absolute_q``, ``absolute_k``)
====  ==========================  =======================================
a     scale q . k                 scale q . k
b     scale q . r                 scale q . absolute_k
c     scale u . k                 scale absolute_q . k
d     scale w . r                 scale absolute_q . absolute_k
====  ==========================  =======================================

======  =======================================================  ==================
letter  axis                                                     where
======  =======================================================  ==================
...     any batch axes, broadcast as in matmul                   all
h       head                                                     all
q       position in the segment                                  q, output, lse
k       position in [memory, segment]: the last q are the        k, v
        segment's own
d, e    query/key channel, value channel                         q, k, r, u, w; v
p       row of the relative table, by falling distance           r, position_bias
======  =======================================================  ==================

Conventions: the memory stands first, which fixes the alignment; the scale acts on all four terms (the paper leaves it out);
u belongs to the keys and w to the positions (u and v in the paper); a query that may attend to nothing gives output 0,
lse -inf, gradients 0.  The table arrives projected: r = sinusoid(distances) W_R per head.

Source: Dai et al. 2019, arXiv:1901.02860, section 3.3 and appendix B; the learned variant is that of Shaw et al. 2018,
arXiv:1803.02155, with one scalar a row, as the authors' code has it.
"""

import math
from typing import Any

import numpy as np

from refattn import cost as costs
from refattn.arrays import (
    broadcast_leading,
    flatten_leading,
    is_array,
    is_integer,
    namespace,
    require_array,
    require_axes,
    require_integer,
    to_numpy,
)
from refattn.attention.blocks.transformer_xl import terms_of
from refattn.contraction import einsum
from refattn.core import options
from refattn.core.blocks import KEYS, listed_blocks
from refattn.core.problem import prepare
from refattn.core.terms import Relative
from refattn.mechanism import mechanism
from refattn.records import AttentionSettings, Counts, Elements, Pass, Result

__all__ = ["transformer_xl_attention"]


@options.takes("scale", "mask", "bias", "keep_weights")
def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    r: Any = None,
    u: Any = None,
    w: Any = None,
    position_bias: Any = None,
    absolute_q: Any = None,
    absolute_k: Any = None,
    causal: bool = True,
    same_length: bool | int = False,
    key_places: Any = None,
    keep_terms: bool = False,
    backend: Any,
    algorithm: str,
    **shared: Any,
) -> tuple[Result, Any]:
    """softmax(scale ((q + u) k^T + shift((q + w) r^T))) v over [memory, segment].

    Parameters
    ----------
    q : array (..., h, q, d)
    k : array (..., h, k, d)
    v : array (..., h, k, e)
        Keys and values of memory and segment, oldest first.
    r : array (h, p, d) or (..., h, p, d)
        Projected relative table.  ``causal``: p = k rows, row p holds distance k - 1 - p.  Otherwise p = k + q rows of the
        distances k ... -q + 1.  Left out: no positions.
    u, w : array (h, d)
        Biases of the query towards keys and towards positions.
    position_bias : array (h, p)
        Learned scalars by distance, in place of w . r.
    absolute_q, absolute_k : arrays (..., h, q, d), (..., h, k, d)
        Projected absolute positions, added to q and k, in place of r, u and w: the ordinary attention of the paper's
        comparison.
    causal : bool
        Query i sees the keys of distance >= 0.
    same_length : bool or int
        Every query sees as many keys, the newest ones, itself included: ``True`` k - q of them (the authors' PyTorch
        code), or a number of one's own (k - q + 1 is what their TensorFlow code does).
    key_places : int array (k,)
        For keys that stand for several positions: where each key stands, rising, the segment's own at the end one by one.
        Distances are counted in places; p is then the last place + 1 (+ q).  Visibility still counts keys.
    keep_terms : bool
        The Result also holds ``term_a`` ... ``term_d`` (..., h, q, k), 0 where the table has no row.
    {shared}

    Returns
    -------
    output : array (..., h, q, e), in the dtype of the inputs
    lse : array (..., h, q), in the compute dtype (float32 for half inputs)

    Raises
    ------
    ValueError
        Shapes that disagree, a table whose rows do not match keys (and queries), options that exclude each other.
    TypeError
        Dtypes: integer arrays, a mask that is not bool, complex arrays without ``compute_dtype``.

    Examples
    --------
    One query after two tokens of memory, all keys alike; distance 2 is 2 / 3 as likely as the other two:

    >>> import numpy as np
    >>> q, k, v = np.ones((1, 1, 1)), np.zeros((1, 3, 1)), np.array([[[1.0], [2.0], [3.0]]])
    >>> r = np.log([[[2.0], [3.0], [3.0]]])  # rows of distance 2, 1, 0
    >>> transformer_xl_attention(q, k, v, r=r)
    array([[[2.125]]])
    """
    xp = namespace(q, k, v)
    given = {"r": r, "u": u, "w": w, "position_bias": position_bias, "absolute_q": absolute_q, "absolute_k": absolute_k}
    n_q, n_k, n_p, places = _check(q, k, v, given, causal, same_length, key_places)
    q_position: Any = None
    if absolute_q is not None:
        q_content, k_content = q + absolute_q, k + absolute_k
    else:
        q_content, k_content = q if u is None else q + u[:, None, :], k
        q_position = q if w is None else q + w[:, None, :]
    extra = [(x, 3) for x in (r, absolute_q, absolute_k) if x is not None]
    lead = broadcast_leading(q=(q, 3), k=(k, 3), v=(v, 3), **{f"r{n}": x for n, x in enumerate(extra)})
    if lead != broadcast_leading(q=(q_content, 3), k=(k, 3), v=(v, 3)):
        q_content = xp.broadcast_to(q_content, (*lead, *q_content.shape[-3:]))

    def relative(layout: Any, lead: tuple[int, ...]) -> list[Relative]:
        if r is None and position_bias is None:
            return []
        query = xp.broadcast_to(q_position, (*lead, *q_position.shape[-3:]))
        query = layout.split(xp.reshape(query, (math.prod(lead), *query.shape[-3:])))
        table = None if r is None else flatten_leading(r, 3, lead)
        return [Relative(query, table, position_bias, n_q - 1 if causal else n_q, places)]

    seen = _visibility(n_q, n_k, causal, same_length)
    prepared = prepare(
        q_content, k_content, v, backend=backend, algorithm=algorithm, extra_terms=relative, **seen, **shared
    )
    result, done = prepared.run()
    if keep_terms:
        scale = prepared.problem.scale
        terms = terms_of(q, k, given, scale, n_p, causal, places)
        result = Result(
            **result.fields, **{name: xp.broadcast_to(x, (*lead, *x.shape[-3:])) for name, x in terms.items()}
        )
    return result, (prepared, done, given, q_position)


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """Cotangents of all arrays; dS is that of the logits, dB its shift back to table rows.

    dq = scale (dS k + dB r), du = sum over queries of scale dS k, dw that of scale dB r, dr = scale dB^T (q + w),
    dk = scale dS^T (q + u), dscale = sum dS (logits / scale).
    """
    prepared, done, given, q_position = saved
    found = prepared.gradients(done, output, lse)
    xp = namespace(found["q"])
    lead, scale = prepared.lead, prepared.problem.scale
    gradients = {name: g for name, g in found.items() if not name.startswith("relative_")}
    if given["absolute_q"] is not None:
        return {**gradients, "absolute_q": found["q"], "absolute_k": found["k"]}
    if given["u"] is not None:
        gradients["u"] = einsum("...hqd->hd", found["q"])
    if given["r"] is not None:
        d_raw = xp.reshape(found["relative_query"], (*lead, *found["q"].shape[-3:]))  # dB r
        d_position = scale * d_raw
        gradients["q"] = found["q"] + d_position
        d_r = found["relative_table"]
        gradients["r"] = xp.reshape(d_r, (*(lead if d_r.shape[0] != 1 else (1,) * len(lead)), *d_r.shape[1:]))
        if given["w"] is not None:
            gradients["w"] = einsum("...hqd->hd", d_position)
        gradients["scale"] = gradients["scale"] + xp.sum(d_raw * xp.where(d_raw == 0, xp.zeros_like(d_raw), q_position))
    if given["position_bias"] is not None:
        d_bias = found["relative_bias"]
        gradients["position_bias"] = scale * d_bias
        gradients["scale"] = gradients["scale"] + xp.sum(d_bias * given["position_bias"])
    return gradients


def _check(
    q: Any, k: Any, v: Any, given: dict[str, Any], causal: bool, same_length: bool | int, key_places: Any
) -> tuple[int, int, int, np.ndarray | None]:
    """Counts of queries, keys and table rows, and the places of the keys; every disagreement is an error here."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_array(name, x, axes=3)
    sizes = require_axes(q=(q, "... h q d"), k=(k, "... h k d"), v=(v, "... h k e"))
    n_q, n_k = sizes["q"], sizes["k"]
    places = None
    if key_places is not None:
        if not is_array(key_places):
            if not isinstance(key_places, (list, tuple)):
                kind = type(key_places).__name__
                raise TypeError(f"key_places is a {kind}: expected {n_k} integers from 0, one per key")
            key_places = np.asarray([require_integer("each of key_places", n) for n in key_places], dtype=np.int64)
        places = to_numpy(key_places)
        if not is_integer(places.dtype) or places.shape != (n_k,) or (n_k and places[0] < 0):
            raise ValueError(
                f"key_places is {places.dtype} {places.shape}: expected {n_k} integers from 0, one per key"
            )
        own = places[max(0, n_k - n_q) :]
        if (np.diff(places) < 1).any() or (np.diff(own) != 1).any():
            raise ValueError(f"key_places is {places.tolist()}: expected rising places, the last {n_q} one by one")
        places = places.astype(np.int64)
    span = n_k if places is None or n_k == 0 else int(places[-1]) + 1
    n_p = span if causal else span + n_q
    what = "the keys" if places is None else "the places of the keys"
    rows = f"{n_p} rows, {'as many as ' + what if causal else what + ' and the queries together (causal=False)'}"
    h, d = sizes["h"], sizes["d"]
    for name, shape in (("r", (h, n_p, d)), ("position_bias", (h, n_p))):
        x = given[name]
        if x is None:
            continue
        if x.ndim < len(shape) or (name != "r" and x.ndim != len(shape)) or tuple(x.shape[-len(shape) :]) != shape:
            wanted = ("(..., " if name == "r" else "(") + ", ".join(map(str, shape)) + ")"
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected {wanted}: {rows}")
    for name in ("u", "w"):
        if given[name] is not None and tuple(given[name].shape) != (h, d):
            raise ValueError(f"{name} has shape {tuple(given[name].shape)}: expected (h, d) = {(h, d)}")
    if given["w"] is not None and given["position_bias"] is not None:
        raise ValueError("w and position_bias are both given: position_bias takes the place of w . r")
    if given["w"] is not None and given["r"] is None:
        raise ValueError("w is given without r: it is the bias towards the rows of r")
    if (given["absolute_q"] is None) != (given["absolute_k"] is None):
        missing = "absolute_q" if given["absolute_q"] is None else "absolute_k"
        raise ValueError(f"{missing} is missing: absolute positions are given for queries and keys together")
    if given["absolute_q"] is not None:
        mixed = [n for n in ("r", "u", "w", "position_bias") if given[n] is not None]
        if mixed:
            raise ValueError(
                f"absolute_q and absolute_k are given together with {mixed[0]}: expected one kind of positions"
            )
        require_axes(
            sizes, absolute_q=(given["absolute_q"], "... h q d"), absolute_k=(given["absolute_k"], "... h k d")
        )
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal is {causal!r}: expected True or False")
    if same_length is not False:
        if not causal:
            raise ValueError("same_length needs causal=True: it counts the newest keys up to the query itself")
        if same_length is True and n_k <= n_q:
            raise ValueError(
                f"same_length=True shows every query k - q keys, and there are {n_q} queries and {n_k} keys: expected a"
                " memory before the segment, or a number of keys"
            )
        if same_length is not True:
            require_integer("same_length", same_length, minimum=1)
    return n_q, n_k, n_p, places


def _visibility(n_q: int, n_k: int, causal: bool, same_length: bool | int) -> dict[str, Any]:
    """The shared options that say the same."""
    if not causal:
        return {}
    seen: dict[str, Any] = {"causal": True, "align": n_k - n_q}
    if same_length is not False:
        seen["window"] = ((n_k - n_q if same_length is True else same_length) - 1, None)
    return seen


def cost(
    *,
    b: int = 1,
    h: int = 1,
    q: int,
    k: int,
    d: int,
    e: int | None = None,
    causal: bool = True,
    same_length: bool | int = False,
    **shared: Any,
) -> Counts:
    """Counts of softmax attention (``refattn.cost.attention``) and of the positions.

    Each block of a queries and c keys takes one product with a + c - 1 table rows, d multiply-adds an entry; backward three
    (scores again, dq, dr).  Visible pairs count d more forward and 3 d more backward.
    """
    if same_length is not True and same_length is not False:
        same_length = require_integer("same_length", same_length, minimum=1)
    if same_length is True and k <= q:
        raise ValueError(f"same_length=True shows every query k - q keys: k is {k} and q {q}")
    shared = {**_visibility(q, k, causal, same_length), **shared}
    base = costs.softmax_counts(b=b, h=h, q=q, k=k, d=d, e=e, **shared)
    pairs = base.forward.multiplies // max(1, d + (d if e is None else e))
    entries = _position_entries(costs.softmax_settings(b=b, h=h, g=h, q=q, k=k, d=d, **shared), causal)
    table = Elements(storage=h * d * (k if causal else k + q))
    positions = Counts(
        forward=Pass(multiplies=pairs * d, computed=entries * d, elementwise=pairs, read=table),
        backward=Pass(multiplies=3 * pairs * d, computed=3 * entries * d, elementwise=pairs, read=table, written=table),
        saved=table,
        parameters=2 * h * d,
    )
    return base + positions


def _position_entries(settings: AttentionSettings, causal: bool) -> int:
    """Query-row products over all blocks that would be computed."""
    q, k = settings.sizes.q, settings.sizes.k
    table, origin, total = k if causal else k + q, q - 1 if causal else q, 0
    if q * k > costs.WALKED:
        rows, keys, units = costs.rows_of_tiles(settings)
        return units * int((rows * np.minimum(table, keys + -(-keys // KEYS) * (rows - 1))).sum())
    for times, group in costs.distinct_groups(settings):
        units = times * (group.b.stop - group.b.start) * group.heads.size
        for block in listed_blocks(settings, group, np):
            i, j = block.queries, block.keys
            entries = min(table, j.stop + origin - i.start) - min(table, j.start + origin - i.stop + 1)
            total += units * (i.stop - i.start) * entries
    return total


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    q: int = 5,
    k: int = 7,
    d: int = 4,
    e: int = 6,
    causal: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Normal q (b,h,q,d), k (b,h,k,d), v (b,h,k,e), r (h,p,d), u and w (h,d); options are passed through.

    ``position_bias=True`` and ``absolute_q=True`` draw the arrays of those variants.
    """
    normal = rng.standard_normal
    arrays = {"q": normal((b, h, q, d)), "k": normal((b, h, k, d)), "v": normal((b, h, k, e))}
    places = settings.get("key_places")
    span = k if places is None or not k else int(places[-1]) + 1
    rows = span if causal else span + q
    if settings.get("absolute_q") is True:
        own = {"absolute_q": normal((h, q, d)), "absolute_k": normal((h, k, d))}
    elif settings.get("position_bias") is True:
        own = {"r": normal((h, rows, d)), "u": normal((h, d)), "position_bias": normal((h, rows))}
    else:
        own = {"r": normal((h, rows, d)), "u": normal((h, d)), "w": normal((h, d))}
    return {**arrays, **({} if causal else {"causal": False}), **settings, **own}


_PROBES = (
    {"q": 9, "k": 21, "same_length": True, "says": "same_length: k - q keys, oneself included"},
    {"q": 7, "k": 7, "says": "no memory"},
    {"q": 6, "k": 11, "causal": False, "says": "both directions: the table has k + q rows"},
    {"q": 8, "k": 19, "position_bias": True, "says": "a learned scalar by distance in place of w . r"},
)

transformer_xl_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="transformer_xl_attention",
    differentiable=("q", "k", "v", "r", "u", "w", "position_bias", "absolute_q", "absolute_k", "bias", "scale"),
    outputs=("output", "lse"),
    probes=_PROBES,
)
