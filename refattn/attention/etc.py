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

from typing import Any

import numpy as np

from refattn import cost as costs
from refattn.arrays import (
    broadcast_leading,
    flatten_leading,
    is_array,
    namespace,
    require_axes,
    require_finite,
    require_integer,
    to_namespace,
)
from refattn.attention.blocks.etc import (
    Labels,
    long_rows,
    read_clip,
    read_counts,
    read_table,
    seen_by_global,
    seen_by_long,
    table_rows,
)
from refattn.contraction import einsum
from refattn.core.blocks import one_length
from refattn.core.problem import prepare
from refattn.mechanism import mechanism
from refattn.records import Counts, Pass, Result

__all__ = ["etc_attention"]


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
    radius, clip = require_integer("radius", radius, minimum=0), read_clip(clip, labels)
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
        name: None
        if x is None
        else read_table(name, x, shapes[name.split("_")[0]], lead, p if "labels" in name else None)
        for name, x in given.items()
    }
    long_counts = read_counts("lengths", lengths, t, lead)
    global_counts = read_counts("global_lengths", global_lengths, n, lead)

    def spread(x: Any) -> Any:
        return xp.broadcast_to(x, (*lead, *x.shape[-3:]))

    keys, values = (
        xp.concat([spread(first), spread(second)], axis=-2) for first, second in ((k_global, k), (v_global, v))
    )
    shared = {"scale": scale, "backend": backend, "algorithm": algorithm}
    if scale is not None:
        require_finite("scale", scale)
    factor = (max(1, d) ** -0.5) if scale is None else scale

    def term(query: Any, rows: Any) -> tuple[Any, Any]:
        """Products of queries and labels (..., h, q, p), and the term that adds them up."""
        if labels is None or rows is None:
            return None, None
        with backend.quiet():  # infinities of padded queries
            products = einsum("...hqd,hpd->...hqp", query, labels)

        def terms(layout: Any, lead: tuple[int, ...]) -> list[Labels]:
            return [Labels(layout.split(flatten_leading(products * factor, 3, lead)), rows)]

        return products, terms

    def moved(name: str) -> Any:
        table = tables[name]
        return None if table is None else to_namespace(np.array(table, dtype=np.int64), xp, like=q)

    long_q, global_q = spread(q), spread(q_global)
    masked = tables["long_mask"] if n else None
    own = seen_by_long(n, t, radius, global_counts, masked, lead)
    ends = None if long_counts is None else n + long_counts
    products, terms = term(long_q, long_rows(n, clip, moved("long_labels")))
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
    global_products, terms = term(global_q, None if table is None else table_rows(table))
    own_global = seen_by_global(n, t, global_counts, tables["global_mask"])
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
            touched = xp.any(d_values != 0, axis=-1, keepdims=True)  # a query that saw nothing may be NaN
            query = xp.where(touched, query, xp.zeros_like(query))
            add("labels", factor * einsum("...hqp,...hqd->hpd", d_values, query))
            products = xp.where(d_values == 0, xp.zeros_like(products), products)
            add("scale", xp.sum(d_values * products))
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
    if clip is not None and p and 2 * require_integer("clip", clip, minimum=0) + 1 > p:
        raise ValueError(f"clip is {clip}, so that distances have {2 * clip + 1} labels: p is {p}")
    sizes = {"b": b, "h": h, "k": n + t, "d": d, "e": e, **settings}
    own = seen_by_long(n, t, require_integer("radius", radius, minimum=0), None, None, (b,))
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
