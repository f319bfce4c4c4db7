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

from refattn.arrays import (
    broadcast_leading,
    flatten_leading,
    is_array,
    is_bool,
    is_integer,
    namespace,
    require_axes,
    require_integer,
    require_number,
    require_one_of,
    to_namespace,
)
from refattn.attention.blocks.routing import Clusters
from refattn.attention.blocks.routing_members import Routed, normalise, normalise_backward
from refattn.core import options
from refattn.core.blocks import SMALL
from refattn.core.problem import prepare
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
    same = k is None
    k = q if same else k
    xp = namespace(q, k, v)
    sizes = require_axes(q=(q, "... h t d"))
    require_axes({n: sizes[n] for n in "hd"}, centroids=(centroids, "h c d"))
    require_axes({n: sizes[n] for n in "hd"}, k=(k, "... h t d"))
    require_axes({"h": sizes["h"], "t": k.shape[-2]}, v=(v, "... h t e"))
    lead = broadcast_leading(q=(q, 3), k=(k, 3), v=(v, 3))
    require_one_of("normalize", normalize, ("layer", "l2", None))
    require_one_of("cluster_normalize", cluster_normalize, ("same", "layer", "l2", None))
    require_one_of("key_norm", key_norm, (None, "l2"))
    require_one_of("causal_by", causal_by, ("position", "rank"))
    require_one_of("self_attention", self_attention, ("always", "last_resort", "never"))
    average_eps = require_number("average_eps", average_eps, minimum=0)
    h, c, t, t_k, d = sizes["h"], centroids.shape[-2], sizes["t"], k.shape[-2], sizes["d"]
    if c == 0:
        raise ValueError(f"centroids has shape {tuple(centroids.shape)}: expected at least one cluster")
    if projection is not None:
        require_axes({"d": d}, projection=(projection, "d d"))
    real_q, real_k = _mask("query_mask", query_mask, lead, t, xp), _mask("key_mask", key_mask, lead, t_k, xp)
    q, v = _joined(q, lead), _joined(v, lead)
    k = q if same else _joined(k, lead)
    with backend.quiet():
        q_norm = normalise(q, normalize)
        k_norm = q_norm if same else normalise(k, normalize)
        key_norms = normalise(k_norm[0], key_norm)
        sources = ((q, q_norm, real_q),) if same else ((q, q_norm, real_q), (k, k_norm, real_k))
        routes, routed = [], []  # what meets the centroids: how it was normalised; what becomes of it
        for x, norm, keep in sources:
            if cluster_normalize == "same":
                route = norm
            elif cluster_normalize == key_norm and same and normalize is None:
                route = key_norms  # the keys of the logits are the same array
            else:
                route = normalise(x, cluster_normalize)
            routes.append(route)
            routed.append(Routed(route[0], keep, projection))
        widths = _widths(cluster_size, t, t_k, c)
        if members is None:
            alike = same and widths[0] == widths[1] and query_mask is key_mask
            chosen_q = routed[0].members(centroids, widths[0], backend)
            if alike:
                chosen_k = chosen_q
            else:
                by_key = Routed(routed[0].x, real_k, None) if same else routed[1]
                chosen_k = by_key.members(centroids, widths[1], backend)
        else:
            alike = False
            chosen_q, chosen_k = _given_members(members, lead, h, c, (t, t_k), xp)
        losses = [x.loss(centroids, backend) for x in routed]
        entries = max(1, d * sum(n for _, n in losses))
        loss = sum(x for x, _ in losses) / entries

        arrays = (xp.reshape(x, (*lead, *x.shape[1:])) for x in (q_norm[0], key_norms[0], v))
        clusters = Clusters(
            backend=backend,
            problem=prepare(*arrays, backend=backend, **shared).problem,
            members=(chosen_q, chosen_k),
            masks=(real_q, real_k),
            alike=alike,
            causal=causal_by if causal else None,
            self_attention=self_attention,
            memory=_memory(memory_keys, memory_values, h, c, d, v.shape[-1]),
            relative=(
                _relative("relative_keys", relative_keys, d),
                _relative("relative_values", relative_values, v.shape[-1]),
            ),
            algorithm=algorithm,
            d_scale=shared.get("scale") is not None,
        )
        output = clusters.forward(average_eps, real_q)
    result = Result(
        output=xp.reshape(output, (*lead, *output.shape[1:])),
        commitment_loss=loss,
        members_q=xp.reshape(chosen_q, (*lead, *chosen_q.shape[1:])),
        members_k=xp.reshape(chosen_k, (*lead, *chosen_k.shape[1:])),
    )
    norms = ((*q_norm, normalize), (*k_norm, normalize), (*key_norms, key_norm))
    ways = [(*route, cluster_normalize) for route in routes]
    return result, (clusters, norms, ways, routed, entries, same, lead)


def backward(saved: Any, *, output: Any, commitment_loss: Any) -> dict[str, Any]:
    """Cotangents of q, k, v, memory, relative tables and scale.

    Averaging: d_part[c,i] = d_output[t] / (clusters of t + eps).  Inside a cluster, with P the weights:
    d_v = P^T d_part; dP = d_part (v + relative_values)^T; dS = P (dP - rowsum(d_part part));
    d_q = scale dS (k + relative_keys), d_k = scale dS^T q.  Rows of members are added up by token.
    Loss: d_x = 2 (x - centroid) / number of entries, back through the projection.  Then the normalisations, where what
    the queries, the keys and the loss send back has been added up.
    """
    clusters, (q_norm, k_norm, key_norm), routes, routed, entries, same, lead = saved
    backend = clusters.backend
    xp = backend.xp
    with backend.quiet():
        found: dict[str, Any] = {}
        if output is not None:
            found = clusters.backward(flatten_leading(output, 3, lead))
        # what queries, keys and loss send back, before and behind the normalisation of the logits
        inner: list[Any] = [found.get("q"), None if "k" not in found else normalise_backward(key_norm, found["k"])]
        outer: list[Any] = [None, None]
        if commitment_loss is not None:
            for n, (x, route) in enumerate(zip(routed, routes, strict=True)):
                d_x = x.backward(2.0 * commitment_loss / entries)
                if route[2] == "same":
                    inner[n] = _sum(inner[n], d_x)
                else:
                    outer[n] = normalise_backward(route, d_x)
        if same:
            inner = [_sum(*inner), None]
        d_q, d_k = (
            _sum(None if d is None else normalise_backward(norm, d), beside)
            for d, norm, beside in zip(inner, (q_norm, k_norm), outer, strict=True)
        )
    gradients = {"q": d_q, "k": d_k, "v": found.get("v")}
    gradients = {n: None if g is None else xp.reshape(g, (*lead, *g.shape[1:])) for n, g in gradients.items()}
    return {**found, **gradients}


def _sum(x: Any, y: Any) -> Any:
    """x + y, either of which may be None."""
    return y if x is None else x if y is None else x + y


# ------------------------------------------------------------------------------------------------ arguments


def _joined(x: Any, lead: tuple[int, ...]) -> Any:
    """(..., h, t, d) as (b, h, t, d), broadcast to all batch axes."""
    x = flatten_leading(x, 3, lead)
    return namespace(x).broadcast_to(x, (math.prod(lead), *x.shape[1:]))


def _mask(name: str, mask: Any, lead: tuple[int, ...], t: int, xp: Any) -> Any:
    """A mask as (b, 1, t), or None."""
    if mask is None:
        return None
    if not is_array(mask) or not is_bool(mask.dtype):
        kind = f"has dtype {mask.dtype}" if is_array(mask) else f"is a {type(mask).__name__}"
        raise TypeError(f"{name} {kind}: expected a bool array (..., t), True = a token")
    own = tuple(mask.shape[:-1])
    fits = mask.ndim and mask.shape[-1] == t and len(own) <= len(lead)
    if not fits or any(m not in (1, n) for m, n in zip(reversed(own), reversed(lead), strict=False)):
        raise ValueError(f"{name} has shape {tuple(mask.shape)}: expected one that broadcasts to {(*lead, t)}")
    return xp.broadcast_to(flatten_leading(mask, 1, lead)[:, None, :], (math.prod(lead), 1, t))


def _widths(cluster_size: Any, t: int, t_k: int, c: int) -> tuple[int, int]:
    """Queries and keys of a cluster."""
    if cluster_size is None:
        pair = (max(1, t // c), max(1, t_k // c))
    elif isinstance(cluster_size, (tuple, list)):
        if len(cluster_size) != 2:
            raise ValueError(f"cluster_size is {cluster_size!r}: expected a number, or (queries, keys)")
        first, second = (require_integer("cluster_size", n, minimum=1) for n in cluster_size)
        pair = (first, second)
    else:
        first = require_integer("cluster_size", cluster_size, minimum=1)
        pair = (first, first)
    return min(pair[0], t), min(pair[1], t_k)


def _given_members(
    members: Any, lead: tuple[int, ...], h: int, c: int, lengths: tuple[int, int], xp: Any
) -> tuple[Any, Any]:
    """Members of queries and keys as int64 (b, h, c, w)."""
    if not isinstance(members, (tuple, list)) or len(members) != 2:
        raise TypeError(f"members is a {type(members).__name__}: expected (members of queries, members of keys)")
    found = []
    for x, t, name in zip(members, lengths, ("queries", "keys"), strict=True):
        if not is_array(x) or not is_integer(x.dtype):
            raise TypeError(f"members of {name}: expected an integer array (..., h, c, w)")
        own = tuple(x.shape[:-1])
        full = (*lead, h, c)
        fits = 2 < x.ndim <= len(full) + 1 and own[-2:] == (h, c)
        if not fits or any(m not in (1, n) for m, n in zip(reversed(own), reversed(full), strict=False)):
            raise ValueError(f"members of {name} have shape {tuple(x.shape)}: expected {full} and the cluster's width")
        x = to_namespace(x, xp)
        x = xp.astype(xp.broadcast_to(flatten_leading(x, 3, lead), (math.prod(lead), h, c, x.shape[-1])), xp.int64)
        if math.prod(x.shape):
            lowest, highest = int(xp.min(x)), int(xp.max(x))
            if lowest < -1 or highest >= t:
                raise ValueError(
                    f"members of {name} hold {lowest} ... {highest}: expected 0 to {t - 1}, or -1 for none"
                )
            ordered = xp.sort(x, axis=-1)
            twice = xp.logical_and(ordered[..., 1:] == ordered[..., :-1], ordered[..., 1:] >= 0)
            if bool(xp.any(twice)):
                token = int(xp.max(xp.where(twice, ordered[..., 1:], xp.full_like(ordered[..., 1:], -1))))
                raise ValueError(f"members of {name} are repeated: token {token} stands twice in one cluster")
        found.append(x)
    return found[0], found[1]


def _memory(keys: Any, values: Any, h: int, c: int, d: int, e: int) -> tuple[Any, Any] | None:
    """Memory keys and values as (h c, n, .), or None."""
    if keys is None and values is None:
        return None
    if keys is None or values is None:
        raise TypeError(f"{'memory_keys' if keys is None else 'memory_values'} is missing: they are given together")
    sizes = require_axes({"h": h, "c": c, "d": d}, memory_keys=(keys, "h c n d"))
    require_axes({"h": h, "c": c, "n": sizes["n"], "e": e}, memory_values=(values, "h c n e"))
    xp = namespace(keys)
    return xp.reshape(keys, (h * c, sizes["n"], d)), xp.reshape(values, (h * c, sizes["n"], e))


def _relative(name: str, table: Any, channels: int) -> Any:
    if table is not None and (table.ndim != 2 or table.shape[0] % 2 == 0 or table.shape[1] != channels):
        raise ValueError(f"{name} has shape {tuple(table.shape)}: expected (2n+1, {channels}), an odd number of rows")
    return table


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
    w_q, w_k = _widths(cluster_size, t, t, c)
    units = b * h
    pairs = c * w_q * (w_k + n)
    hidden = c * w_q * (w_q - 1) // 2 if causal and shared and w_q == w_k else 0
    routing = 2 * t * c * d * (1 if shared else 2)
    inputs = Elements(storage=units * t * (d * (1 if shared else 2) + e))
    written = Elements(storage=units * t * e)
    members = Elements(index=units * c * (w_q + w_k))
    kept = Elements(compute=units * c * w_q * (e + 1)) + members + inputs
    block = Elements(compute=max(SMALL, min(w_q, 16) * (w_k + n)))
    gathered = Elements(compute=units * c * (w_q * d + (w_k + n) * (d + e)))
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
    x = x if settings.get("projection") is None else x @ settings["projection"]
    scores = np.einsum("bhtd,hcd->bhct", x, given["centroids"])
    t, c = x.shape[-2], scores.shape[-2]
    width = _widths(settings.get("cluster_size"), t, t, c)[side]
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
    {
        "k": True,
        "members": True,
        "causal": True,
        "cluster_size": (7, 9),
        "says": "keys of their own, members given, causal",
    },
    {"members": True, "causal": True, "causal_by": "rank", "says": "members given, causal by place in the cluster"},
    {
        "members": True,
        "causal": True,
        "self_attention": "last_resort",
        "key_norm": "l2",
        "says": "oneself as last resort",
    },
    {
        "k": True,
        "members": True,
        "cluster_size": 4,
        "average_eps": 0.25,
        "says": "tokens in no cluster, a constant in the mean",
    },
    {
        "members": True,
        "cluster_size": 9,
        "relative_keys": True,
        "relative_values": True,
        "says": "relative terms by rank",
    },
    {
        "members": True,
        "memory_keys": True,
        "causal": True,
        "self_attention": "never",
        "says": "a memory of every cluster",
    },
    {
        "k": True,
        "members": True,
        "projection": True,
        "cluster_normalize": "l2",
        "says": "a projection before the centroids",
    },
    {"cluster_size": 5, "says": "members chosen by the candidate, with a margin"},
)

routing_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="routing_attention",
    differentiable=(
        "q",
        "k",
        "v",
        "scale",
        "memory_keys",
        "memory_values",
        "relative_keys",
        "relative_values",
    ),
    floating=("centroids", "projection"),
    outputs=("output", "commitment_loss"),
    probes=_PROBES,
)
