r"""ETC attention: a long sequence with a window around every token, and a short global one that sees and is seen by everything.

    keys = [k_global, k], values = [v_global, v] along the positions, one softmax for each row:

    output[h,i,e]        = sum_j exp(logits[h,i,j] - lse) values[h,j,e]     over the global keys and long keys i - radius ... i + radius
    output_global[h,i,e] = sum_j exp(logits[h,i,j] - lse) values[h,j,e]     over all keys
    logits[h,i,j]        = scale sum_d q[h,i,d] (keys[h,j,d] + labels[h,l(i,j),d])

    l(i,j) between long tokens: clip + min(max(j - i, -clip), clip);  else as long_labels and global_labels say, -1 = none

======  ==================================================  ======================================================
letter  axis                                                where
======  ==================================================  ======================================================
...     any batch axes, broadcast as in matmul              all but labels
h       head                                                q, k, v, the global arrays, labels, outputs
t       long position                                       q, k, v, output, long_labels, long_mask
n       global position                                     q_global, k_global, v_global, output_global
p       label                                               labels
d, e    query/key channel, value channel                    q, k, labels; v, outputs
======  ==================================================  ======================================================

Conventions: each of the four pieces (global to global, global to long, long to global, long to long) has its mask, and the two
pieces of a row share one softmax; a label adds a vector to the key, the same for all batch entries.  A row that sees nothing
gives 0.  Work and memory are linear in t for a fixed number of global tokens and labels.

Source: Ainslie et al. 2020, arXiv:2004.08483, "Relative Position Encoding" and "Global-Local Attention"; labels after Shaw,
Uszkoreit, Vaswani 2018, arXiv:1803.02155.  The paper has projections for each of the four pieces, separate or shared; here
there is one for each sequence.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn import cost as costs
from refattn.arrays import (
    broadcast_leading,
    flatten_leading,
    is_array,
    is_bool,
    is_integer,
    namespace,
    require_axes,
    require_integer,
    sum_to_shape,
    to_namespace,
    to_numpy,
)
from refattn.contraction import einsum
from refattn.core import options
from refattn.core.blocks import one_length
from refattn.core.problem import prepare
from refattn.core.selections import Index
from refattn.core.terms import Term
from refattn.mechanism import mechanism
from refattn.patterns import Pattern, dense, prefix
from refattn.patterns import window as window_pattern
from refattn.records import Counts, Pass, Result

__all__ = ["etc_attention"]


class _Labels(Term):
    """logits + values[i, row(i,j)]; values (b|1, h, 1, q, p) are in the logits' scale, ``rows(view)`` gives ints, -1 = none.

    Blocks are slices of queries and keys.
    """

    names = ("labels",)

    def __init__(self, values: Any, rows: Callable[[Any], Any]) -> None:
        self.values, self.rows = values, rows

    def start(self, view: Any) -> dict[str, Any]:
        own = view.part(self.values)
        return {"labels": namespace(own).zeros_like(own)}

    def whole(self) -> dict[str, Any]:
        return {"labels": namespace(self.values).zeros_like(self.values)}

    def place(self, name: str, total: Any, part: Any, view: Any) -> Any:
        return view.backend.accumulate(total, (*view.slices(self.values), ...), part)

    def _entries(self, view: Any) -> tuple[Any, Any]:
        """Where a pair has a label (b|1, 1, 1, a, c), and its place among the block's a * p values (b|1, 1, 1, 1, a * c)."""
        xp, p = view.xp, self.values.shape[-1]
        rows = self.rows(view)
        a, c = rows.shape[-2:]
        flat = xp.where(rows < 0, xp.zeros_like(rows), rows) + xp.arange(a, dtype=rows.dtype)[:, None] * p
        return rows >= 0, xp.reshape(flat, (rows.shape[0], 1, 1, 1, a * c))

    def apply(self, logits: Any, view: Any) -> tuple[Any, Any]:
        xp = view.xp
        labelled, flat = self._entries(view)
        values = view.queries.take(view.part(self.values))  # (b, h, 1, a, p)
        values = xp.reshape(values, (*values.shape[:3], values.shape[-2] * values.shape[-1], 1))
        taken = xp.reshape(Index(flat).take(values), (*values.shape[:3], *labelled.shape[-2:]))
        return logits + xp.where(labelled, taken, xp.zeros_like(taken)), None

    def pull(self, d_logits: Any, kept: Any, view: Any, sums: dict[str, Any]) -> Any:
        xp, p = view.xp, self.values.shape[-1]
        labelled, flat = self._entries(view)
        share = xp.where(labelled, d_logits, xp.zeros_like(d_logits))
        a, c = share.shape[-2:]
        share = xp.reshape(share, (*share.shape[:3], a * c, 1))
        placed = view.backend.segment_add(share, flat[..., 0, :], a * p)
        placed = xp.reshape(placed, (*placed.shape[:3], a, p))
        placed = sum_to_shape(placed, (sums["labels"].shape[0], *placed.shape[1:]))
        sums["labels"] = view.queries.accumulate(view.backend, sums["labels"], placed)
        return d_logits


def _long_rows(n: int, clip: int, table: Any) -> Callable[[Any], Any]:
    """Labels of long queries; ``table`` (b|1, t, n) ints in the library of the arrays, or None."""

    def rows(view: Any) -> Any:
        xp = view.xp
        (i0, i1), (j0, j1) = view.queries.extent, view.keys.extent
        parts = []
        if j0 < n:
            stop = min(j1, n)
            if table is None:
                parts.append(xp.full((1, i1 - i0, stop - j0), -1, dtype=xp.int64))
            else:
                parts.append(table[view.group.b if table.shape[0] > 1 else slice(None), i0:i1, j0:stop])
        if j1 > n:
            first = max(j0, n) - n
            distance = xp.arange(first, j1 - n)[None, None, :] - xp.arange(i0, i1)[None, :, None]
            parts.append(xp.astype(xp.clip(distance, -clip, clip) + clip, xp.int64))
        lead = max(x.shape[0] for x in parts)
        whole = xp.concat([xp.broadcast_to(x, (lead, *x.shape[1:])) for x in parts], axis=-1)
        return whole[:, None, None, ...]

    return rows


def _table_rows(table: Any) -> Callable[[Any], Any]:
    """Labels of global queries: those of the table (b|1, n, n + t)."""

    def rows(view: Any) -> Any:
        (i0, i1), (j0, j1) = view.queries.extent, view.keys.extent
        own = view.group.b if table.shape[0] > 1 else slice(None)
        return table[own, i0:i1, j0:j1][:, None, None, ...]

    return rows


def _seen_by_long(n: int, t: int, radius: int, counts: Any, long_mask: Any, lead: tuple[int, ...]) -> Pattern:
    """Global keys (those of the mask), and long ones within the radius."""
    first = prefix(n if counts is None else counts.reshape(lead))
    near = window_pattern(radius, radius, align=n) & ~prefix(n)
    if long_mask is None:
        return first | near
    return (first & _Among(long_mask)) | near


class _Among(Pattern):
    """A mask over the first keys alone; bool (b|1, q, n)."""

    def __init__(self, mask: np.ndarray) -> None:
        super().__init__("among", mask)
        self._mask, self.batch = mask, mask.shape[0]
        self._flat = np.ascontiguousarray(mask).reshape(-1)

    def _fit_batch(self, batch: tuple[int, ...]) -> Pattern:
        return self

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        n = self._mask.shape[-1]
        entry = 0 if self.batch == 1 else self._need(b, "b")
        return self._lookup(xp, "_flat", (entry * self._mask.shape[1] + i) * n + xp.where(j < n, j, n - 1)) & (j < n)

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Any, h: Any) -> tuple[int, int]:
        return 0, self._mask.shape[-1]

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Any, h: Any) -> str:
        return "empty" if j0 >= self._mask.shape[-1] else "partial"


# ------------------------------------------------------------------------------------------------ arguments


def _table(name: str, value: Any, shape: tuple[int, ...], lead: tuple[int, ...], labels: int | None) -> Any:
    """A mask (``labels`` None) or label numbers (..., i, j) on the host, leading axes joined: (b, i, j), b = 1 if shared."""
    kind = "a bool array, True = may attend" if labels is None else "an int array of labels, -1 = none"
    fits = is_array(value) and (is_bool(value.dtype) if labels is None else is_integer(value.dtype))
    if not fits:
        what = f"has dtype {value.dtype}" if is_array(value) else f"is a {type(value).__name__}"
        raise TypeError(f"{name} {what}: expected {kind}")
    host = to_numpy(value)
    if host.shape[-2:] != shape:
        raise ValueError(f"{name} has shape {host.shape}: expected (..., {shape[0]}, {shape[1]})")
    if labels is not None and host.size and (host.min() < -1 or host.max() >= labels):
        wrong = host[(host < -1) | (host >= labels)][0]
        raise ValueError(f"{name} contains {wrong}: expected labels 0 ... {labels - 1}, or -1 for none")
    own = lead if math.prod(host.shape[:-2]) != 1 else (1,) * len(lead)
    host = np.broadcast_to(host.reshape(host.shape[-2:]) if own != lead else host, (*own, *shape))
    return host.reshape(math.prod(own), *shape)


def _counts(name: str, value: Any, most: int, lead: tuple[int, ...]) -> np.ndarray | None:
    if value is None:
        return None
    counts = np.broadcast_to(options.per_batch(name, value, lead), (math.prod(lead),))
    if counts.size and (counts.min() < 0 or counts.max() > most):
        raise ValueError(f"{name} is {counts.tolist()}: expected between 0 and {most}")
    return counts


def _clip(clip: Any, labels: Any) -> int:
    """The largest distance with a label of its own."""
    if labels is None:
        return 0
    p = labels.shape[-2]
    if clip is None:
        if p % 2 == 0:
            raise ValueError(f"labels has {p} rows: expected clip, since 2 clip + 1 of them are for distances")
        return p // 2
    clip = require_integer("clip", clip, minimum=0)
    if 2 * clip + 1 > p:
        raise ValueError(f"clip is {clip}, so that distances have {2 * clip + 1} labels: labels has {p} rows")
    return clip


# ------------------------------------------------------------------------------------------------ forward and backward


def forward(
    q: Any,
    k: Any,
    v: Any,
    q_global: Any,
    k_global: Any,
    v_global: Any,
    *,
    radius: int,
    labels: Any = None,
    clip: int | None = None,
    long_labels: Any = None,
    global_labels: Any = None,
    long_mask: Any = None,
    global_mask: Any = None,
    lengths: Any = None,
    global_lengths: Any = None,
    scale: Any = None,
    backend: Any,
    algorithm: str,
) -> tuple[Result, Any]:
    """Long rows: softmax over the global keys and a window; global rows: softmax over everything; labels added to keys.

    Parameters
    ----------
    q, k : arrays (..., h, t, d)
    v : array (..., h, t, e)
        The long sequence.
    q_global, k_global : arrays (..., h, n, d)
    v_global : array (..., h, n, e)
        The global one.
    radius : int
        Long tokens see each other up to this distance.
    labels : array (h, p, d)
        Vectors added to keys.  Rows 0 ... 2 clip are those of the distances -clip ... clip, key minus query.
    clip : int
        Larger distances take the label of this one.  Default: (p - 1) / 2, all rows being distances.
    long_labels : int array (..., t, n)
        Labels of global keys for long queries; -1 = none, which is the default.
    global_labels : int array (..., n, n + t)
        Labels of the keys [global, long] for global queries, likewise.
    long_mask : bool array (..., t, n)
        Which global keys a long query may attend to.
    global_mask : bool array (..., n, n + t)
        Which of the keys [global, long] a global query may attend to.
    lengths, global_lengths : ints per batch
        Real long and global tokens; those beyond are padding: never read, output 0, gradient 0.
    scale : float
        Default d**-0.5; of the label term too.  Differentiable.

    Returns
    -------
    output : array (..., h, t, e), in the dtype of the inputs
    output_global : array (..., h, n, e)

    Raises
    ------
    ValueError
        Shapes that disagree, labels out of range, a clip that has not enough labels, lengths beyond the arrays.
    TypeError
        Masks that are not bool, label numbers that are no ints.

    Examples
    --------
    Zero queries take means: of the global value 9 and the neighbours; the global row of everything.

    >>> import numpy as np
    >>> q, k, v = np.zeros((1, 4, 1)), np.ones((1, 4, 1)), np.array([[[0.0], [3.0], [3.0], [6.0]]])
    >>> one = np.zeros((1, 1, 1))
    >>> result = etc_attention.forward(q, k, v, one, one, one + 9, radius=1)
    >>> result.output[0, :, 0].tolist(), round(float(result.output_global[0, 0, 0]), 6)
    ([4.0, 3.75, 5.25, 6.0], 4.2)
    """
    sizes = require_axes(
        q=(q, "... h t d"), k=(k, "... h t d"), v=(v, "... h t e"),
        q_global=(q_global, "... h n d"), k_global=(k_global, "... h n d"), v_global=(v_global, "... h n e"),
    )  # fmt: skip
    h, t, n, d = (sizes[x] for x in "htnd")
    if labels is not None:
        require_axes({"h": h, "d": d}, labels=(labels, "h p d"))
    elif clip is not None or long_labels is not None or global_labels is not None:
        raise TypeError("labels is missing: clip, long_labels and global_labels say how they are used")
    radius, clip = require_integer("radius", radius, minimum=0), _clip(clip, labels)
    arrays = {"q": q, "k": k, "v": v, "q_global": q_global, "k_global": k_global, "v_global": v_global}
    leading = {name: (x, 3) for name, x in arrays.items()}
    given = {
        "long_labels": long_labels,
        "global_labels": global_labels,
        "long_mask": long_mask,
        "global_mask": global_mask,
    }
    leading.update((name, (x, 2)) for name, x in given.items() if is_array(x) and x.ndim > 1)
    lead = broadcast_leading(**leading)
    xp = namespace(q, k, v)
    shapes = {"long": (t, n), "global": (n, n + t)}
    p = None if labels is None else labels.shape[-2]
    tables: dict[str, Any] = {
        name: None if x is None else _table(name, x, shapes[name.split("_")[0]], lead, p if "labels" in name else None)
        for name, x in given.items()
    }
    long_counts = _counts("lengths", lengths, t, lead)
    global_counts = _counts("global_lengths", global_lengths, n, lead)

    def spread(x: Any) -> Any:
        return xp.broadcast_to(x, (*lead, *x.shape[-3:]))

    keys, values = (
        xp.concat([spread(first), spread(second)], axis=-2) for first, second in ((k_global, k), (v_global, v))
    )
    shared = {"scale": scale, "backend": backend, "algorithm": algorithm}
    factor = (max(1, d) ** -0.5) if scale is None else scale

    def term(query: Any, rows: Any) -> tuple[Any, Any]:
        """Products of queries and labels (..., h, q, p), and the term that adds them up."""
        if labels is None or rows is None:
            return None, None
        products = einsum("...hqd,hpd->...hqp", query, labels)

        def terms(layout: Any, lead: tuple[int, ...]) -> list[Term]:
            return [_Labels(layout.split(flatten_leading(products * factor, 3, lead)), rows)]

        return products, terms

    def moved(name: str) -> Any:
        table = tables[name]
        return None if table is None else to_namespace(np.array(table, dtype=np.int64), xp, like=q)

    long_q, global_q = spread(q), spread(q_global)
    masked = tables["long_mask"] if n else None
    own = _seen_by_long(n, t, radius, global_counts, masked, lead)
    ends = None if long_counts is None else n + long_counts
    products, terms = term(long_q, _long_rows(n, clip, moved("long_labels")))
    long = prepare(
        long_q,
        keys,
        values,
        extra_pattern=own,
        extra_terms=terms,
        query_lengths=long_counts,
        key_lengths=ends,
        **shared,
    )
    long_result, long_state = long.run()

    table = moved("global_labels")
    global_products, terms = term(global_q, None if table is None else _table_rows(table))
    own_global = _seen_by_global(n, t, global_counts, tables["global_mask"])
    whole = prepare(
        global_q,
        keys,
        values,
        extra_pattern=own_global,
        extra_terms=terms,
        query_lengths=global_counts,
        key_lengths=ends,
        **shared,
    )
    global_result, global_state = whole.run()
    result = Result(output=long_result.output, output_global=global_result.output)
    return result, (
        (long, long_state, long_q, products),
        (whole, global_state, global_q, global_products),
        (labels, factor, n, lead),
    )


def _seen_by_global(n: int, t: int, counts: Any, mask: Any) -> Pattern | None:
    """What a global row sees of [global, long] beside the lengths of the long keys; (b, n, n + t) is linear in t."""
    if counts is None and mask is None:
        return None
    seen = np.ones((1, n, n + t), dtype=bool) if mask is None else mask
    if counts is not None:
        j = np.arange(n + t)
        seen = seen & ((j >= n) | (j < counts[:, None]))[:, None, :]
    return dense(seen[:, None])


def backward(saved: Any, *, output: Any, output_global: Any) -> dict[str, Any]:
    """Cotangents of all arrays, labels and scale: those of the long rows and of the global rows.

    A label's product with q is one more term of the logit: with D[i,p] = sum of dlogits over the keys with that label,
    dq = scale D labels, dlabels = scale D^T q, and scale gets sum D (q . labels).
    """
    long_part, global_part, (labels, factor, n, lead) = saved
    found: dict[str, Any] = {}

    def add(name: str, x: Any) -> None:
        found[name] = x if name not in found else found[name] + x

    for (prepared, state, query, products), d, own in (
        (long_part, output, "q"),
        (global_part, output_global, "q_global"),
    ):
        if d is None:
            continue
        xp = namespace(d)
        part = prepared.gradients(state, d, None)
        add(own, part["q"])
        for name, both in (("k", part["k"]), ("v", part["v"])):
            add(name + "_global", both[..., :n, :])
            add(name, both[..., n:, :])
        add("scale", part["scale"])
        if products is not None:
            d_values = part["labels"]  # (b, h, 1, q, p)
            d_values = xp.reshape(d_values, (*lead, d_values.shape[1], *d_values.shape[-2:]))
            add(own, factor * einsum("...hqp,hpd->...hqd", d_values, labels))
            add("labels", factor * einsum("...hqp,...hqd->hpd", d_values, query))
            add("scale", xp.sum(xp.where(d_values == 0, xp.zeros_like(d_values), d_values * products)))
    return found


# ------------------------------------------------------------------------------------------------ counts, example


def cost(
    *,
    b: int = 1,
    h: int = 1,
    t: int | None = None,
    q: int | None = None,
    k: int | None = None,
    n: int,
    d: int,
    e: int | None = None,
    p: int = 0,
    radius: int,
    clip: int | None = None,
    **settings: Any,
) -> Counts:
    """Counts of long rows against global keys and their window, of global rows against everything, and of q times the labels.

    t, or q = k, is the length; p labels (0: none) cost (t + n) p d multiply-adds a head, twice that backward, whatever ``clip``.
    """
    t = one_length(t, q, k)
    costs.require_sizes(b=b, h=h, t=t, n=n, p=p)
    if clip is not None and 2 * require_integer("clip", clip, minimum=0) + 1 > p:
        raise ValueError(f"clip is {clip}, so that distances have {2 * clip + 1} labels: p is {p}")
    sizes = {"b": b, "h": h, "k": n + t, "d": d, "e": e, **settings}
    own = _seen_by_long(n, t, require_integer("radius", radius, minimum=0), None, None, (b,))
    rows = costs.softmax_counts(q=t, extra_pattern=own, **sizes) + costs.softmax_counts(q=n, **sizes)
    products = b * h * (t + n) * p * d
    labels = Counts(forward=Pass(multiplies=products), backward=Pass(multiplies=2 * products), parameters=h * p * d)
    return rows + labels


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    t: int = 11,
    n: int = 3,
    d: int = 4,
    e: int = 3,
    p: int = 8,
    radius: int = 2,
    clip: int | None = 2,
    **settings: Any,
) -> dict[str, Any]:
    """Normal arrays and p labels, of which 2 clip + 1 are for distances and the others are drawn for the other pieces.

    p=0: without labels.  ``long_mask=True`` and ``global_mask=True`` draw masks.
    """
    normal = rng.standard_normal
    given: dict[str, Any] = {"q": normal((b, h, t, d)), "k": normal((b, h, t, d)), "v": normal((b, h, t, e))}
    given.update(q_global=normal((b, h, n, d)), k_global=normal((b, h, n, d)), v_global=normal((b, h, n, e)))
    given["radius"] = radius
    if p:
        clip = (p - 1) // 2 if clip is None else min(clip, (p - 1) // 2)
        given.update(labels=normal((h, p, d)), clip=clip)
        first = 2 * clip + 1
        for name, shape in (("long_labels", (b, t, n)), ("global_labels", (b, n, n + t))):
            drawn = rng.integers(first - 1, p, shape)
            given[name] = np.where(drawn < first, -1, drawn)
    given.update({name: x for name, x in settings.items() if x is not True})
    for name, shape in (("long_mask", (b, t, n)), ("global_mask", (b, n, n + t))):
        if settings.get(name) is True:
            given[name] = rng.random(shape) < 0.7
    return {name: x for name, x in given.items() if x is not None}


_PROBES = (
    {"t": 27, "n": 4, "p": 0, "radius": 3, "says": "no labels"},
    {
        "t": 21,
        "n": 2,
        "p": 5,
        "radius": 6,
        "clip": 2,
        "scale": 0.3,
        "says": "distances beyond the clip, a scale of one's own",
    },
    {"t": 19, "n": 3, "long_mask": True, "global_mask": True, "says": "masks of the three pieces with global tokens"},
    {"t": 17, "n": 4, "b": 2, "lengths": (17, 9), "global_lengths": (4, 2), "says": "padded long and global tokens"},
    {"t": 5, "n": 2, "radius": 9, "says": "a radius beyond the sequence"},
)

etc_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="etc_attention",
    differentiable=("q", "k", "v", "q_global", "k_global", "v_global", "labels", "scale"),
    outputs=("output", "output_global"),
    storage=("output", "output_global"),
    probes=_PROBES,
)
