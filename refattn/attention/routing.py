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

import dataclasses
import math
from typing import Any

import numpy as np

from refattn.arrays import (
    broadcast_leading,
    device,
    flatten_leading,
    is_array,
    is_bool,
    namespace,
    require_axes,
    require_integer,
    require_number,
    require_one_of,
)
from refattn.attention.blocks.routing import Members, Ranks, kept_pairs, seen
from refattn.attention.blocks.routing_members import Routed, given_members, normalise, normalise_backward, widths
from refattn.core import options
from refattn.core.blocks import SMALL
from refattn.core.problem import prepare
from refattn.cost import require_sizes
from refattn.mechanism import mechanism
from refattn.records import Counts, Elements, Pass, Result, Sizes

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
    sizes = _sizes(q, q if same else k, v, centroids, projection)
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
    call = _Call(
        backend=backend,
        algorithm=algorithm,
        sizes=sizes,
        settings=options.read(sizes, xp=xp, dtype=q.dtype, device=device(q), **shared).settings,
        dropout_rate=shared.get("dropout_rate", 0.0),
        arrays=tuple(None if x is None else _by_head(x, lead) for x in (q, k, v)),
        masks=(_mask("query_mask", query_mask, sizes, sizes.q, xp), _mask("key_mask", key_mask, sizes, sizes.k, xp)),
        centroids=centroids,
        size=size,
        members=members,
        alike=members is None and same and size[0] == size[1] and query_mask is key_mask,
        norms=(normalize, normalize if cluster_normalize == "same" else cluster_normalize, key_norm),
        projection=projection,
        causal=causal_by if causal else None,
        self_attention=self_attention,
        memory=_memory(memory_keys, memory_values, h, c, sizes.d, sizes.e),
        average_eps=require_number("average_eps", average_eps, minimum=0),
        relative=(
            _relative("relative_keys", relative_keys, sizes.d),
            _relative("relative_values", relative_values, sizes.e),
        ),
    )
    runs = call.runs()

    def forward_of(run: _Run) -> tuple[Any, ...]:
        with backend.quiet():
            return run.forward()

    parts = backend.map(forward_of, runs, work=2 * sizes.b * h * c * size[0] * size[1])
    output, losses, chosen_q, chosen_k = zip(*parts, strict=True)
    entries = max(1, sizes.d * call.tokens())
    result = Result(
        output=_joined(output, sizes),
        commitment_loss=sum(losses) / entries,
        members_q=_joined(chosen_q, sizes),
        members_k=_joined(chosen_k, sizes),
    )
    return result, (call, runs, entries)


def backward(saved: Any, *, output: Any, commitment_loss: Any) -> dict[str, Any]:
    """Cotangents of q, k, v, memory, relative tables and scale, from those of each run of heads (``_Run.backward``)."""
    call, runs, entries = saved
    backend, sizes = call.backend, call.sizes
    d_output = None if output is None else _by_head(output, sizes.lead)
    d_loss = None if commitment_loss is None else 2.0 * commitment_loss / entries

    def backward_of(run: _Run) -> dict[str, Any]:
        with backend.quiet():
            return run.backward(d_output, d_loss)

    parts = backend.map(backward_of, runs, work=4 * sizes.b * sizes.h * math.prod(call.size) * call.centroids.shape[-2])
    gradients: dict[str, Any] = {}
    for name in parts[0]:
        found = [part[name] for part in parts]
        if found[0] is None:
            continue
        if name in ("q", "k", "v"):
            gradients[name] = _joined(found, sizes)
        elif name.startswith("memory"):
            rows = backend.xp.concat(found, axis=0)  # (b h, c, n, .)
            gradients[name] = backend.xp.sum(backend.xp.reshape(rows, (sizes.b, sizes.h, *rows.shape[1:])), axis=0)
        else:
            gradients[name] = sum(found)
    return gradients


@dataclasses.dataclass(frozen=True)
class _Call:
    """The checked arguments; arrays (b h, t, .), masks (b, t), members (b h, c, w), memory (h, c, n, .)."""

    backend: Any
    algorithm: str
    sizes: Sizes
    settings: Any
    dropout_rate: float
    arrays: tuple[Any, Any, Any]
    masks: tuple[Any, Any]
    centroids: Any
    size: tuple[int, int]
    members: tuple[Any, Any] | None
    alike: bool  # the queries of a cluster are its keys
    norms: tuple[str | None, str | None, str | None]  # for the logits, for the centroids, of keys alone
    projection: Any
    causal: str | None
    self_attention: str
    memory: tuple[Any, Any] | None
    average_eps: float
    relative: tuple[Any, Any]

    def runs(self) -> list["_Run"]:
        """The heads, in runs of about 2^18 pairs."""
        heads = self.sizes.b * self.sizes.h
        rows = 0 if self.memory is None else self.memory[0].shape[-2]
        pairs = self.centroids.shape[-2] * self.size[0] * (self.size[1] + rows)
        step = {"whole": heads, "tiled": 1}.get(self.algorithm, SMALL // max(1, pairs))
        return [_Run(self, n, min(n + max(1, step), heads)) for n in range(0, max(1, heads), max(1, step))]

    def tokens(self) -> int:
        """Tokens that the loss is over."""
        shared = self.arrays[1] is None
        lengths = ((self.masks[0], self.sizes.q), (self.masks[1], 0 if shared else self.sizes.k))
        counts = (n * self.sizes.b if m is None or not n else int(namespace(m).count_nonzero(m)) for m, n in lengths)
        return self.sizes.h * sum(counts)


class _Run:
    """Heads n0 ... n1 - 1 of all batch entries and heads: arrays (n, t, .), and (n, c, w, .) by cluster."""

    def __init__(self, call: _Call, n0: int, n1: int) -> None:
        self.call, self.heads = call, slice(n0, n1)
        xp, h = call.backend.xp, call.sizes.h
        numbers = xp.arange(n0, n1, device=device(call.arrays[0]))
        self.numbers = numbers // h, numbers % h

    def forward(self) -> tuple[Any, ...]:
        """Output (n, t, e), sum of the squared distances, members (n, c, w) of queries and of keys."""
        call, backend, (of_logits, of_clusters, of_keys) = self.call, self.call.backend, self.call.norms
        xp, sizes, (entry, head) = backend.xp, call.sizes, self.numbers
        q, k, v = (None if x is None else x[self.heads, ...] for x in call.arrays)
        keep_q, keep_k = (None if m is None else xp.take(m, entry, axis=0) for m in call.masks)
        centroids = xp.take(call.centroids, head, axis=0)

        # what meets in the logits, and what meets the centroids
        self.q_norm = normalise(q, of_logits)
        self.k_norm = self.q_norm if k is None else normalise(k, of_logits)
        self.key_norm = normalise(self.k_norm[0], of_keys)
        self.routes, self.routed = [], []
        for x, norm, keep in ((q, self.q_norm, keep_q), (k, self.k_norm, keep_k)):
            if x is None:
                continue
            if of_clusters == of_logits:
                route = norm
            elif of_logits is None and k is None and of_clusters == of_keys:
                route = self.key_norm  # the keys of the logits are the same array
            else:
                route = normalise(x, of_clusters)
            self.routes.append(route)
            self.routed.append(Routed(route[0], keep, call.projection, centroids))
        loss = sum(x.loss() for x in self.routed)

        # members, and their rows
        if call.members is None:
            chosen_q = self.routed[0].members(call.size[0], backend)
            by_key = Routed(self.routed[0].x, keep_k, None, centroids) if k is None else self.routed[1]
            chosen_k = chosen_q if call.alike else by_key.members(call.size[1], backend)
        else:
            chosen_q, chosen_k = (x[self.heads, ...] for x in call.members)
        self.queries = queries = Members(chosen_q, keep_q, q, backend)
        self.keys = keys = queries if call.alike else Members(chosen_k, keep_k, v, backend)
        self.x_q = queries.take(self.q_norm[0], queries.hidden)
        x_k, x_v = keys.take(self.key_norm[0], keys.empty), keys.take(v, keys.empty)
        if call.memory is not None:
            x_k, x_v = (
                xp.concat([x, xp.take(m, head, axis=0)], axis=-2) for x, m in zip((x_k, x_v), call.memory, strict=True)
            )
        self.ranks = [None if table is None else Ranks(table, *call.size) for table in call.relative]
        key_ranks, value_ranks = self.ranks
        if value_ranks is not None:  # a unit vector for every key: their mean is the weights
            units = xp.eye(x_v.shape[-2], call.size[1], dtype=x_v.dtype, device=device(x_v))
            x_v = xp.concat([x_v, xp.broadcast_to(units, (*x_v.shape[:-2], *units.shape))], axis=-1)

        # softmax attention, every cluster a head
        dropout = call.settings.dropout
        self.prepared = prepare(
            self.x_q,
            x_k,
            x_v,
            backend=backend,
            algorithm=call.algorithm,
            extra_keys=0 if call.memory is None else call.memory[0].shape[-2],
            extra_terms=None if key_ranks is None else lambda heads, lead: [key_ranks.term(self.x_q)],
            pattern=seen(
                queries,
                keys,
                self.numbers,
                visibility=call.settings.visibility,
                ranked=call.alike and queries.hidden is None,
                causal=call.causal,
                self_attention=call.self_attention,
                memory=call.memory is not None,
            ),
            scale=call.settings.scale,
            dropout_mask=None if dropout is None else kept_pairs(dropout[0][:, :, 0, ...], queries, keys, self.numbers),
            dropout_rate=call.dropout_rate,
        )
        result, self.saved = self.prepared.run()
        part, self.weights = result.output[..., : sizes.e], result.output[..., sizes.e :]
        if value_ranks is not None:
            part = part + value_ranks.values(self.weights)
        if queries.hidden is not None:
            part = xp.where(queries.hidden[..., None], xp.zeros_like(part), part)

        # the mean over the clusters of a token
        count = queries.counts(part)
        shown = count > 0 if keep_q is None else xp.logical_and(count > 0, keep_q[..., None])
        self.share = xp.where(
            shown, 1 / xp.where(shown, count + call.average_eps, xp.ones_like(count)), xp.zeros_like(count)
        )
        return queries.add(part) * self.share, loss, chosen_q, chosen_k

    def backward(self, d_output: Any, d_loss: Any) -> dict[str, Any]:
        """Cotangents of q, k, v (n, t, .), memory (n, c, rows, .), tables and scale.

        Averaging: d_part[c,i] = d_output[t] / (clusters of t + eps).  Inside a cluster, with P the weights:
        d_v = P^T d_part; dP = d_part (v + relative_values)^T; dS = P (dP - rowsum(d_part part));
        d_q = scale dS (k + relative_keys), d_k = scale dS^T q.  Rows of members are added up by token.
        Loss: d_x = 2 (x - centroid) / number of entries, back through the projection.  Then the normalisations, where what
        the queries, the keys and the loss send back has been added up.
        """
        of_logits, of_clusters, of_keys = self.call.norms
        gradients = {} if d_output is None else self._through_clusters(d_output[self.heads, ...])
        d_keys = gradients.get("k")
        # what queries, keys and loss send back, before and behind the normalisation of the logits
        inner = [gradients.get("q"), None if d_keys is None else normalise_backward((*self.key_norm, of_keys), d_keys)]
        outer: list[Any] = [None, None]
        norms = self.q_norm, self.k_norm
        if d_loss is not None:
            for n, (x, route) in enumerate(zip(self.routed, self.routes, strict=True)):
                d_x = x.backward(d_loss)
                if of_clusters == of_logits:
                    inner[n] = _sum(inner[n], d_x)
                else:
                    outer[n] = normalise_backward((*route, of_clusters), d_x)
        if self.call.arrays[1] is None:
            inner = [_sum(*inner), None]
        d_q, d_k = (
            _sum(None if d is None else normalise_backward((*norm, of_logits), d), beside)
            for d, norm, beside in zip(inner, norms, outer, strict=True)
        )
        return {**gradients, "q": d_q, "k": d_k}

    def _through_clusters(self, d_output: Any) -> dict[str, Any]:
        """Cotangents of normalised queries and keys, of values, memory, tables and scale."""
        call, backend, queries, keys = self.call, self.call.backend, self.queries, self.keys
        xp, w, (key_ranks, value_ranks) = backend.xp, call.size[1], self.ranks
        scale, gradients = call.settings.scale, {}
        d_attended = d_part = queries.take(d_output * self.share, queries.hidden)
        if value_ranks is not None:
            d_attended = xp.concat([d_part, value_ranks.of_pairs(d_part)], axis=-1)  # dP of the tables
            gradients["relative_values"] = value_ranks.back_from_values(self.weights, d_part, backend)
        found = self.prepared.gradients(self.saved, d_attended, None)
        d_q, d_k, d_v = found["q"], found["k"], found["v"][..., : call.sizes.e]
        gradients["scale"] = found["scale"]
        if key_ranks is not None:
            by_row = xp.reshape(found["relative_query"], d_q.shape)  # dS . relative_keys
            d_q = d_q + scale * by_row
            gradients["scale"] = found["scale"] + xp.sum(by_row * self.x_q)
            gradients["relative_keys"] = key_ranks.back(xp.sum(found["relative_table"], axis=(0, 1)), backend)
        if call.memory is not None:
            gradients |= {"memory_keys": d_k[..., w:, :], "memory_values": d_v[..., w:, :]}
            d_k, d_v = d_k[..., :w, :], d_v[..., :w, :]
        if queries.hidden is not None:
            d_q = xp.where(queries.hidden[..., None], xp.zeros_like(d_q), d_q)
        return {**gradients, "q": queries.add(d_q), "k": keys.add(d_k), "v": keys.add(d_v)}


def _sum(x: Any, y: Any) -> Any:
    """x + y, either of which may be None."""
    return y if x is None else x if y is None else x + y


# ------------------------------------------------------------------------------------------------ arguments


def _sizes(q: Any, k: Any, v: Any, centroids: Any, projection: Any) -> Sizes:
    """Sizes of the arrays, which must agree."""
    sizes = require_axes(q=(q, "... h t d"))
    h, d = sizes["h"], sizes["d"]
    require_axes({"h": h, "d": d}, centroids=(centroids, "h c d"))
    require_axes({"h": h, "d": d}, k=(k, "... h t d"))
    require_axes({"h": h, "t": k.shape[-2]}, v=(v, "... h t e"))
    if centroids.shape[-2] == 0:
        raise ValueError(f"centroids has shape {tuple(centroids.shape)}: expected at least one cluster")
    if projection is not None:
        require_axes({"d": d}, projection=(projection, "d d"))
    lead = broadcast_leading(q=(q, 3), k=(k, 3), v=(v, 3))
    return Sizes(lead=lead, h=h, g=h, q=sizes["t"], k=k.shape[-2], d=d, e=v.shape[-1])


def _by_head(x: Any, lead: tuple[int, ...]) -> Any:
    """(..., h, t, d) as (b h, t, d), broadcast to all batch axes."""
    x = flatten_leading(x, 3, lead)
    xp, shape = namespace(x), (math.prod(lead), *x.shape[1:])
    return xp.reshape(xp.broadcast_to(x, shape), (shape[0] * shape[1], *shape[2:]))


def _joined(parts: Any, sizes: Sizes) -> Any:
    """Parts (n, ...) of all heads as (..., h, ...)."""
    xp = namespace(parts[0])
    x = parts[0] if len(parts) == 1 else xp.concat(list(parts), axis=0)
    return xp.reshape(x, (*sizes.lead, sizes.h, *x.shape[1:]))


def _mask(name: str, mask: Any, sizes: Sizes, t: int, xp: Any) -> Any:
    """A mask as (b, t), or None."""
    if mask is None:
        return None
    if not is_array(mask) or not is_bool(mask.dtype):
        kind = f"has dtype {mask.dtype}" if is_array(mask) else f"is a {type(mask).__name__}"
        raise TypeError(f"{name} {kind}: expected a bool array (..., t), True = a token")
    own, lead = tuple(mask.shape[:-1]), sizes.lead
    fits = mask.ndim and mask.shape[-1] == t and len(own) <= len(lead)
    if not fits or any(m not in (1, n) for m, n in zip(reversed(own), reversed(lead), strict=False)):
        raise ValueError(f"{name} has shape {tuple(mask.shape)}: expected one that broadcasts to {(*lead, t)}")
    return xp.broadcast_to(flatten_leading(mask, 1, lead), (sizes.b, t))


def _memory(keys: Any, values: Any, h: int, c: int, d: int, e: int) -> tuple[Any, Any] | None:
    """Memory keys and values (h, c, n, .), or None."""
    if keys is None and values is None:
        return None
    if keys is None or values is None:
        raise TypeError(f"{'memory_keys' if keys is None else 'memory_values'} is missing: they are given together")
    sizes = require_axes({"h": h, "c": c, "d": d}, memory_keys=(keys, "h c n d"))
    require_axes({"h": h, "c": c, "n": sizes["n"], "e": e}, memory_values=(values, "h c n e"))
    return keys, values


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
    w_q, w_k = widths(cluster_size, t, t, c)
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
