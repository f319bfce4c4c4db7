r"""Routing attention: every centroid gathers the tokens nearest to it, and attention runs inside these clusters.

    x[t]           = normalise(q[t]) projection                             (and the same of k, where it is given)
    members[c]     = the w positions t with the largest sum_d x[t,d] centroids[c,d], in order of position
    logits[c,i,j]  = scale * sum_d q[i,d] (k[j,d] + relative_keys[j - i,d])       i, j by rank in members[c]
    part[c,i,e]    = sum_j softmax_j(logits)[c,i,j] (v[j,e] + relative_values[j - i,e])
    output[t,e]    = sum_{c, i: members[c,i] = t} part[c,i,e] / (number of clusters with t + average_eps)
    loss           = mean over tokens and channels of (x[t] - nearest centroid)^2

A token may stand in no cluster (output 0), in one or in several.  Every cluster has w queries and w keys, so its cost is
known beforehand: with c = sqrt(t) clusters of sqrt(t) tokens it grows as t^1.5.

======  ============================================  ==========================================
letter  axis                                          where
======  ============================================  ==========================================
...     any batch axes                                all but centroids, memory and relative ones
h       head                                          all but relative ones
t       position                                      q, k, v, output
c       cluster                                       centroids, members, memory_keys
w       place in a cluster (the api's n)              members
d, e    query/key channel, value channel              q, k, centroids; v, output
n       row of a memory; 2n + 1 of a relative table   memory_keys, relative_keys
======  ============================================  ==========================================

Conventions: ``causal`` hides later tokens inside a cluster; *membership itself sees the future* (a late token may take the
place of an earlier one), so only with fixed members does no token depend on later ones.  Centroids and everything discrete
have no gradient; ``refattn.routing`` moves the centroids.

Source: Roy, Saffar, Vaswani, Grangier 2020, arXiv:2003.05997, section 4 and algorithm 1.
"""

import math
from typing import Any

import numpy as np

from refattn.arrays import device, namespace, require_integer, require_number, require_one_of
from refattn.attention.blocks.routing import Call, Run
from refattn.attention.blocks.routing_arguments import (
    by_head,
    given_members,
    joined,
    read_mask,
    read_memory,
    read_relative,
    read_sizes,
    widths,
)  # fmt: skip
from refattn.attention.blocks.routing_members import normalise
from refattn.contraction import einsum
from refattn.core import options
from refattn.core.blocks import SMALL
from refattn.cost import require_sizes
from refattn.mechanism import mechanism
from refattn.records import Counts, Elements, Pass, Result

__all__ = ["routing_attention"]


@options.takes("scale", "pattern", "dropout_mask", "dropout_rate")
def forward(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    centroids: Any,
    cluster_size: Any = None,
    normalize: str | None = "layer",
    cluster_normalize: str | None = "same",
    key_norm: str | None = None,
    projection: Any = None,
    causal: bool = False,
    causal_by: str = "position",
    self_attention: str = "always",
    members: Any = None,
    query_mask: Any = None,
    key_mask: Any = None,
    memory_keys: Any = None,
    memory_values: Any = None,
    average_eps: float = 0.0,
    relative_keys: Any = None,
    relative_values: Any = None,
    backend: Any,
    algorithm: str,
    **shared: Any,
) -> tuple[Result, Any]:
    """Softmax attention inside clusters of tokens, averaged over the clusters that a token is in.

    Parameters
    ----------
    q : array (..., h, t, d)
    k : array (..., h, t, d), optional
        Left out: the queries are the keys, and a cluster's queries are its keys.  It may have another length than q.
    v : array (..., h, t, e)
        As long as the keys.
    centroids : array (h, c, d)
        No gradient.
    cluster_size : int or (int, int)
        Tokens of a cluster, (queries, keys); at most the length.  Default: t // c, at least 1.  Not used with ``members``.
    normalize : {"layer", "l2", None}
        What is done to q and k before the logits: (x - mean) / sqrt(var + 1e-6), x / max(||x||, 1e-12), or nothing.
    cluster_normalize : {"same", "layer", "l2", None}
        What meets the centroids, and enters the loss: the arrays of the logits, or q and k normalised in another way.
    key_norm : {None, "l2"}
        Keys alone, after ``normalize``, for the logits alone: also where the queries are the keys.
    projection : array (d, d)
        Multiplied to what meets the centroids, after its normalisation; no gradient.
    causal : bool
        Within a cluster, query i sees no key j > i.
    causal_by : {"position", "rank"}
        i and j are positions in the sequence, or places in the two lists of members.  By rank, queries with members of their
        own see later tokens.
    self_attention : {"always", "last_resort", "never"}
        Whether a query sees the key of its own position: like any other; only where it sees no other key of the cluster and no
        memory, but then whatever hides it otherwise, provided that it is among the cluster's keys; or never.
    members : (int array, int array), each (..., h, c, w)
        Positions of the queries and of the keys of each cluster, ranked as they stand; -1 for none.
    query_mask, key_mask : bool arrays (..., t)
        False: never a member, hidden in the logits, not in the loss; the output of a masked query is 0.  Each acts on its own
        side, also where the queries are the keys (the loss then goes by ``query_mask``).
    memory_keys, memory_values : arrays (h, c, n, d), (h, c, n, e)
        Further keys and values of each cluster, visible to all of its queries; used as given.
    average_eps : float
        Added to the number of clusters that the output is divided by.
    relative_keys, relative_values : arrays (2n+1, d), (2n+1, e)
        Row n + r belongs to the keys r places after the query in the lists of members, r clipped to -n ... n.
    {shared}

    Returns
    -------
    output : array (..., h, t, e), in the dtype of the inputs
    commitment_loss : 0-d array, in the compute dtype
        Of q and k together (q once where it is both).
    members_q, members_k : int64 arrays (..., h, c, w)
        In order of position, -1 last; given members as they are.

    Raises
    ------
    ValueError
        Centroids of another width, a cluster size below 1, members that are repeated or out of range, shapes that disagree.
    TypeError
        Masks that are not bool, members that are no integers.

    Examples
    --------
    Two directions, two clusters; every token takes the mean of the two values of its own cluster:

    >>> import numpy as np
    >>> q = np.array([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])
    >>> v = np.array([[[1.0], [2.0], [3.0], [4.0]]])
    >>> result = routing_attention.forward(q, None, v, centroids=np.eye(2)[None], cluster_size=2, normalize=None)
    >>> result.members_q[0]
    array([[0, 2],
           [1, 3]])
    >>> result.output[0, :, 0]
    array([2., 3., 2., 3.])
    """
    if backend.fused:
        raise ValueError(f"backend {backend.name!r} does not serve routing_attention: its clusters are gathered")
    if v is None:
        raise TypeError("routing_attention: the argument 'v' is missing")
    xp, same = namespace(q, v), k is None
    sizes = read_sizes(q, q if same else k, v, centroids, projection)
    lead, h, c = sizes.lead, sizes.h, centroids.shape[-2]
    require_one_of("normalize", normalize, ("layer", "l2", None))
    require_one_of("cluster_normalize", cluster_normalize, ("same", "layer", "l2", None))
    require_one_of("key_norm", key_norm, (None, "l2"))
    require_one_of("causal_by", causal_by, ("position", "rank"))
    require_one_of("self_attention", self_attention, ("always", "last_resort", "never"))
    size = widths(cluster_size, sizes.q, sizes.k, c)
    if members is not None:
        members = given_members(members, lead, h, c, (sizes.q, sizes.k), xp)
        size = tuple(x.shape[-1] for x in members)
    call = Call(
        backend=backend,
        algorithm=algorithm,
        sizes=sizes,
        settings=options.read(sizes, xp=xp, dtype=q.dtype, device=device(q), **shared).settings,
        dropout_rate=shared.get("dropout_rate", 0.0),
        arrays=(by_head(q, lead), None if same else by_head(k, lead), by_head(v, lead)),
        masks=(
            read_mask("query_mask", query_mask, sizes, sizes.q, xp),
            read_mask("key_mask", key_mask, sizes, sizes.k, xp),
        ),
        centroids=centroids,
        size=size,
        members=members,
        alike=members is None and same and size[0] == size[1] and query_mask is key_mask,
        norms=(normalize, normalize if cluster_normalize == "same" else cluster_normalize, key_norm),
        projection=projection,
        causal=causal_by if causal else None,
        self_attention=self_attention,
        memory=read_memory(memory_keys, memory_values, h, c, sizes.d, sizes.e),
        average_eps=require_number("average_eps", average_eps, minimum=0),
        relative=(
            read_relative("relative_keys", relative_keys, sizes.d),
            read_relative("relative_values", relative_values, sizes.e),
        ),
    )
    runs = call.runs()

    def forward_of(run: Run) -> tuple[Any, ...]:
        with backend.quiet():
            return run.forward()

    parts = backend.map(forward_of, runs, work=2 * sizes.b * h * c * size[0] * size[1])
    output, losses, chosen_q, chosen_k = zip(*parts, strict=True)
    entries = max(1, sizes.d * call.tokens())
    result = Result(
        output=joined(output, sizes),
        commitment_loss=sum(losses) / entries,
        members_q=joined(chosen_q, sizes),
        members_k=joined(chosen_k, sizes),
    )
    return result, (call, runs, entries)


def backward(saved: Any, *, output: Any, commitment_loss: Any) -> dict[str, Any]:
    """Cotangents of q, k, v, memory, relative tables and scale, from those of each run of heads (``Run.backward``)."""
    call, runs, entries = saved
    backend, sizes = call.backend, call.sizes
    d_output = None if output is None else by_head(output, sizes.lead)
    d_loss = None if commitment_loss is None else 2.0 * commitment_loss / entries

    def backward_of(run: Run) -> dict[str, Any]:
        with backend.quiet():
            return run.backward(d_output, d_loss)

    parts = backend.map(backward_of, runs, work=4 * sizes.b * sizes.h * math.prod(call.size) * call.centroids.shape[-2])
    gradients: dict[str, Any] = {}
    for name in parts[0]:
        found = [part[name] for part in parts]
        if found[0] is None:
            continue
        if name in ("q", "k", "v"):
            gradients[name] = joined(found, sizes)
        elif name.startswith("memory"):
            rows = backend.xp.concat(found, axis=0)  # (b h, c, n, .)
            gradients[name] = backend.xp.sum(backend.xp.reshape(rows, (sizes.b, sizes.h, *rows.shape[1:])), axis=0)
        else:
            gradients[name] = sum(found)
    return gradients


# ------------------------------------------------------------------------------------------------ counts and example


def cost(
    *,
    b: int = 1,
    h: int = 1,
    t: int,
    c: int,
    d: int,
    e: int | None = None,
    n: int = 0,
    cluster_size: Any = None,
    causal: bool = False,
    shared: bool = True,
) -> Counts:
    """Counts of one call on sequences of one length; ``shared``: the queries are the keys; n rows of memory a cluster.

    Routing has t c d multiply-adds twice (products laid out by centroid for the members, by token for the nearest centroid),
    and as much again for keys of their own.  The c w (w + n) pairs of a head have d + e (backward: 3 d + 2 e).
    ``multiplies`` leaves out the pairs above the diagonal of a cluster where it is causal and shared; otherwise which pairs
    are visible depends on the members.
    """
    e = d if e is None else e
    require_sizes(b=b, h=h, t=t, d=d, e=e, n=n)
    require_integer("c", c, minimum=1)
    w_q, w_k = widths(cluster_size, t, t, c)
    units = b * h
    pairs = c * w_q * (w_k + n)
    hidden = c * w_q * (w_q - 1) // 2 if causal and shared and w_q == w_k else 0
    routing = 2 * t * c * d * (1 if shared else 2)
    inputs = Elements(storage=units * t * (d * (1 if shared else 2) + e))
    written = Elements(storage=units * t * e)
    members = Elements(index=units * c * (w_q + w_k))
    gathered = Elements(compute=units * c * (w_q * d + (w_k + n) * (d + e)))
    kept = Elements(compute=units * c * w_q * (e + 2)) + gathered + members + inputs
    block = Elements(compute=max(SMALL, min(w_q, 16) * (w_k + n)))
    return Counts(
        forward=Pass(
            multiplies=units * (routing + (pairs - hidden) * (d + e)),
            computed=units * (routing + pairs * (d + e)),
            elementwise=units * (4 * (pairs - hidden) + t * (6 * d + e) + t * c + c * w_q * 2 * e),
            read=inputs + Elements(storage=h * c * d),
            written=written + members,
            peak=kept + written + Elements(compute=units * t * c) + 2 * block,
        ),
        backward=Pass(
            multiplies=units * (pairs - hidden) * (3 * d + 2 * e),
            computed=units * pairs * (3 * d + 2 * e),
            elementwise=units * (4 * (pairs - hidden) + t * 8 * d + c * w_q * 2 * e + c * (w_q + w_k) * (d + e)),
            read=kept + written,
            written=inputs,
            peak=kept + inputs + gathered + 4 * block,
        ),
        saved=kept,
    )


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    t: int = 18,
    c: int = 3,
    d: int = 6,
    e: int = 5,
    n: int = 2,
    **settings: Any,
) -> dict[str, Any]:
    """Normal arrays, redrawn until every choice of members and of nearest centroids has a margin of 1e-3.

    ``k=True`` draws keys apart from the queries (else the queries are the keys), ``projection=True``, ``memory_keys=True``,
    ``relative_keys=True`` and ``relative_values=True`` draw those, ``members=True`` gives the chosen members as an argument.
    """
    normal = rng.standard_normal
    settings = {"cluster_size": max(1, -(-t // c)), **settings}
    given: dict[str, Any] = {"q": normal((b, h, t, d)), "k": None, "v": normal((b, h, t, e))}
    if settings.pop("k", None) is True:
        given["k"] = normal((b, h, t, d))
    given["centroids"] = normal((h, c, d))
    drawn = {
        "projection": (d, d),
        "memory_keys": (h, c, n, d),
        "relative_keys": (2 * n + 1, d),
        "relative_values": (2 * n + 1, e),
    }
    for name, shape in drawn.items():
        if settings.get(name) is True:
            settings[name] = normal(shape)
    if settings.get("memory_keys") is not None and settings.get("memory_values", True) is True:
        settings["memory_values"] = normal((h, c, n, e))
    wanted = settings.pop("members", None)
    for _ in range(300):
        unsafe = [_unsafe(given[x], given, settings, side) for side, x in enumerate("qk") if given[x] is not None]
        if not any(x.any() for x in unsafe):
            break
        for name, where in zip("qk", unsafe, strict=False):
            given[name][where] = normal((int(where.sum()), d))
    else:
        raise ValueError(f"no example with clear choices was found for t = {t}, c = {c}")
    if wanted is True:
        found = routing_attention.definition(**given, **settings)
        wanted = (found.members_q, found.members_k)
    return {**given, **settings, **({} if wanted is None else {"members": wanted})}


def _unsafe(x: np.ndarray, given: dict[str, Any], settings: dict[str, Any], side: int) -> np.ndarray:
    """Bool (b, h, t): tokens that stand within 1e-3 of another one at the cut of a cluster, or between two centroids."""
    kind = settings.get("cluster_normalize", "same")
    x, _ = normalise(x, settings.get("normalize", "layer") if kind == "same" else kind)
    x = x if settings.get("projection") is None else einsum("bhtd,df->bhtf", x, settings["projection"])
    scores = einsum("bhtd,hcd->bhct", x, given["centroids"])
    t, c = x.shape[-2], scores.shape[-2]
    width = widths(settings.get("cluster_size"), t, t, c)[side]
    ranked = np.sort(scores, axis=-2)
    close = np.zeros(x.shape[:-1], bool) if c == 1 else ranked[..., -1, :] - ranked[..., -2, :] < 1e-3
    if width < t:  # masked tokens only move the cut: a margin between all neighbours near it is kept
        order = np.sort(scores, axis=-1)
        apart = np.diff(order, axis=-1).min(-1) if settings.get("query_mask") is not None else None
        low, high = order[..., -width - 1], order[..., -width]
        tight = (high - low < 1e-3) if apart is None else (high - low < 1e-3) | (apart < 1e-6)
        close |= np.any(tight[..., None] & (np.abs(scores - high[..., None]) <= 1e-3), axis=-2)
    return close


_PROBES = (
    {"members": True, "says": "members given"},
    {"members": True, "causal": True, "says": "members given, causal by position"},
    {"k": True, "members": True, "causal": True, "cluster_size": (7, 9), "says": "keys of their own, members given, causal"},
    {"members": True, "causal": True, "causal_by": "rank", "says": "members given, causal by place in the cluster"},
    {"members": True, "causal": True, "self_attention": "last_resort", "key_norm": "l2", "says": "oneself as last resort"},
    {"k": True, "members": True, "cluster_size": 4, "average_eps": 0.25, "says": "tokens in no cluster, a constant in the mean"},
    {"members": True, "cluster_size": 9, "relative_keys": True, "relative_values": True, "says": "relative terms by rank"},
    {"members": True, "memory_keys": True, "causal": True, "self_attention": "never", "says": "a memory of every cluster"},
    {"k": True, "members": True, "projection": True, "cluster_normalize": "l2", "says": "a projection before the centroids"},
    {"cluster_size": 5, "says": "members chosen by the candidate, with a margin"},
)  # fmt: skip

routing_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="routing_attention",
    differentiable=("q", "k", "v", "scale", "memory_keys", "memory_values", "relative_keys", "relative_values"),
    floating=("centroids", "projection"),
    outputs=("output", "commitment_loss"),
    probes=_PROBES,
)
