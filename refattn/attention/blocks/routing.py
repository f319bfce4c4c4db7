"""Routing attention of a run of heads: whom the centroids choose, softmax attention in every cluster, the mean by token."""

import dataclasses
from typing import Any

from refattn.arrays import device, namespace
from refattn.attention.blocks.routing_members import Routed, normalise, normalise_backward
from refattn.attention.blocks.routing_places import Members, Ranks, kept_pairs, seen
from refattn.core.blocks import SMALL
from refattn.core.problem import prepare
from refattn.records import Sizes

__all__ = ["Call", "Run"]


@dataclasses.dataclass(frozen=True)
class Call:
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

    def runs(self) -> list["Run"]:
        """The heads, in runs of about 2^18 pairs."""
        heads = self.sizes.b * self.sizes.h
        rows = 0 if self.memory is None else self.memory[0].shape[-2]
        pairs = self.centroids.shape[-2] * self.size[0] * (self.size[1] + rows)
        step = {"whole": heads, "tiled": 1}.get(self.algorithm, SMALL // max(1, pairs))
        return [Run(self, n, min(n + max(1, step), heads)) for n in range(0, max(1, heads), max(1, step))]

    def tokens(self) -> int:
        """Tokens that the loss is over."""
        shared = self.arrays[1] is None
        lengths = ((self.masks[0], self.sizes.q), (self.masks[1], 0 if shared else self.sizes.k))
        counts = (n * self.sizes.b if m is None or not n else int(namespace(m).count_nonzero(m)) for m, n in lengths)
        return self.sizes.h * sum(counts)


class Run:
    """Heads n0 ... n1 - 1 of all batch entries and heads: arrays (n, t, .), and (n, c, w, .) by cluster."""

    def __init__(self, call: Call, n0: int, n1: int) -> None:
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
