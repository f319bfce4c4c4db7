"""Routing attention in steps: every cluster is softmax attention over the whole sequence, of which it sees its members.

    members[c] = the tokens of the largest x . centroid      part[c] = softmax(scale q (k + relative)^T, members) (v + relative)
    output[t]  = sum of part[c,t] over the clusters with t / (their number + average_eps)

Axes: ``...`` any leading batch axes, ``h`` head, ``c`` cluster, ``t`` token, ``q`` and ``k`` tokens of a cluster, ``n`` row of a
memory, ``p`` row of a relative table, ``d`` and ``e`` channels.

Source: Roy, Saffar, Vaswani, Grangier 2020, arXiv:2003.05997, section 4 and algorithm 1.
"""

import math

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import Definition, einsum, step

__all__ = ["Clusters", "Routing", "definition"]


class Clusters(ScaledDotProduct):
    """Softmax attention with a row of a table added to each key and to each value: row n + r for a pair of ``gap`` r.

    The last ``memory_rows`` keys have no such row.
    """

    gradients = (*ScaledDotProduct.gradients, "relative_keys", "relative_values")
    defaults = {
        **ScaledDotProduct.defaults,
        "relative_keys": None,
        "relative_values": None,
        "gap": None,
        "memory_rows": 0,
    }

    @step
    def related(self):
        """Pairs that read the tables."""
        return np.broadcast_to(self.j < self.keys - self.memory_rows, self.pairs)

    def row(self, table):
        """Of each pair the row of a table of 2n + 1: its gap, clipped to -n ... n."""
        n = len(table) // 2
        row = np.clip(self.gap, -n, n) + n
        return np.concatenate([row, np.zeros((*row.shape[:-1], self.memory_rows), dtype=row.dtype)], axis=-1)

    def by_pair(self, by_row, table):
        """(..., q, p) -> (..., q, k): of every pair its row."""
        at = np.broadcast_to(self.row(table), self.pairs)
        by_row = np.broadcast_to(by_row, (*self.pairs[:-1], by_row.shape[-1]))
        return np.where(self.related, np.take_along_axis(by_row, at, axis=-1), 0.0)

    def by_row(self, pairs, table):
        """The adjoint: (..., q, k) -> (..., q, p)."""
        pairs, row = np.where(self.related, pairs, 0.0), self.row(table)
        return np.stack([np.where(row == n, pairs, 0.0).sum(-1) for n in range(len(table))], axis=-1)

    @step
    def products(self):
        """q . (k + relative)"""
        if self.relative_keys is None:
            return super().products
        return super().products + self.by_pair(
            einsum("...qd,pd->...qp", self.q, self.relative_keys), self.relative_keys
        )

    @step
    def output(self):
        """weights . (v + relative)"""
        if self.relative_values is None:
            return super().output
        shares = self.by_row(self.used_weights, self.relative_values)
        return super().output + einsum("...qp,pe->...qe", shares, self.relative_values)

    @step
    def d_used_weights(self):
        """dO . (v + relative)"""
        if self.relative_values is None:
            return super().d_used_weights
        own = self.by_pair(einsum("...qe,pe->...qp", self.d_output, self.relative_values), self.relative_values)
        return super().d_used_weights + np.where(self.touched, own, 0.0)

    @step
    def d_q(self):
        """scale dS . (k + relative)"""
        if self.relative_keys is None:
            return super().d_q
        shares = self.by_row(self.d_products, self.relative_keys)
        return super().d_q + einsum("...qp,pd->...qd", shares, self.relative_keys)

    @step
    def d_relative_keys(self):
        """scale dS^T . q, by row of the table"""
        shares = self.by_row(self.d_products, self.relative_keys)
        return einsum("...qp,...qd->pd", shares, np.where((shares != 0).any(-1, keepdims=True), self.q, 0.0))

    @step
    def d_relative_values(self):
        """P^T . dO, by row of the table"""
        shares = self.by_row(self.rebuilt_weights * self.rebuilt_dropout, self.relative_values)
        return einsum("...qp,...qe->pe", shares, np.where((shares != 0).any(-1, keepdims=True), self.d_output, 0.0))


class Routing(Definition):
    """Membership, nearest centroids and the centroids themselves have no gradient."""

    results = {
        "output": "output", "commitment_loss": "commitment_loss", "members_q": "listed_q", "members_k": "listed_k",
    }  # fmt: skip
    gradients = ("q", "k", "v", "scale", "memory_keys", "memory_values", "relative_keys", "relative_values")
    defaults = {
        "k": None, "cluster_size": None, "normalize": "layer", "cluster_normalize": "same", "key_norm": None,
        "projection": None, "causal": False, "causal_by": "position", "self_attention": "always", "members": None,
        "query_mask": None, "key_mask": None, "memory_keys": None, "memory_values": None, "average_eps": 0.0,
        "relative_keys": None, "relative_values": None, "scale": None, "pattern": None, "dropout_mask": None,
        "dropout_rate": 0.0,
    }  # fmt: skip
    inner = Clusters

    # ------------------------------------------------------------------ sizes and arguments

    @step
    def shared(self):
        """Whether the queries are the keys."""
        return self.k is None

    @step
    def given_keys(self):
        return self.q if self.shared else self.k

    @step
    def lead(self):
        """The batch axes of q, k and v together."""
        return np.broadcast_shapes(*(x.shape[:-3] for x in (self.q, self.given_keys, self.v)))

    @property
    def heads(self):
        return self.q.shape[-3]

    @property
    def clusters(self):
        return self.centroids.shape[-2]

    @property
    def queries(self):
        return self.q.shape[-2]

    @property
    def keys(self):
        return self.given_keys.shape[-2]

    @step
    def real_queries(self):
        """(..., 1, t)"""
        mask = np.ones(self.queries, dtype=bool) if self.query_mask is None else self.query_mask
        return np.broadcast_to(mask, (*self.lead, self.queries))[..., None, :]

    @step
    def real_keys(self):
        mask = np.ones(self.keys, dtype=bool) if self.key_mask is None else self.key_mask
        return np.broadcast_to(mask, (*self.lead, self.keys))[..., None, :]

    # ------------------------------------------------------------------ normalisation

    @step
    def normal_q(self):
        """What the queries meet keys as."""
        return normalised(self.whole(self.q), self.normalize)

    @step
    def normal_k(self):
        return normalised(self.whole(self.given_keys), self.normalize)

    @step
    def unit_k(self):
        """The keys of the logits: after ``key_norm``."""
        return normalised(self.normal_k, self.key_norm)

    @step
    def routed_kind(self):
        """How what meets the centroids is normalised."""
        return self.normalize if self.cluster_normalize == "same" else self.cluster_normalize

    @step
    def x_q(self):
        """What meets the centroids, (..., h, t, d)."""
        x = normalised(self.whole(self.q), self.routed_kind)
        return x if self.projection is None else einsum("...td,df->...tf", x, self.projection)

    @step
    def x_k(self):
        x = normalised(self.whole(self.given_keys), self.routed_kind)
        return x if self.projection is None else einsum("...td,df->...tf", x, self.projection)

    def whole(self, x):
        return np.broadcast_to(x, (*self.lead, *x.shape[-3:]))

    # ------------------------------------------------------------------ members

    @step
    def scores_q(self):
        """x . centroid, (..., h, c, t): by these, tokens are chosen."""
        return einsum("...htd,hcd->...hct", self.x_q, self.centroids)

    @step
    def scores_k(self):
        return einsum("...htd,hcd->...hct", self.x_k, self.centroids)

    @step
    def widths(self):
        """Tokens of a cluster, (queries, keys)."""
        size, lengths = self.cluster_size, (self.queries, self.keys)
        if size is None:
            return [min(n, max(1, n // self.clusters)) for n in lengths]
        pair = size if isinstance(size, (tuple, list)) else (size, size)
        return [min(w, n) for w, n in zip(pair, lengths, strict=True)]

    @step
    def chosen_q(self):
        """(..., h, c, t) bool: the tokens of the largest scores."""
        return best(self.scores_q, self.real_queries, self.widths[0])

    @step
    def chosen_k(self):
        return best(self.scores_k, self.real_keys, self.widths[1])

    @step
    def place_q(self):
        """The place of every token in the list of every cluster, (..., h, c, t); -1 where it is no member."""
        if self.members is not None:
            return self.places_of(self.members[0], self.queries)
        return np.where(self.chosen_q, np.cumsum(self.chosen_q, axis=-1) - 1, -1)

    @step
    def place_k(self):
        if self.members is not None:
            return self.places_of(self.members[1], self.keys)
        return np.where(self.chosen_k, np.cumsum(self.chosen_k, axis=-1) - 1, -1)

    def places_of(self, listed, tokens):
        """Places of tokens from lists of members (..., h, c, w), -1 for none."""
        listed = np.broadcast_to(listed, (*self.lead, self.heads, self.clusters, np.shape(listed)[-1]))
        found = np.full((*listed.shape[:-1], tokens + 1), -1)
        np.put_along_axis(found, np.where(listed < 0, tokens, listed), np.arange(listed.shape[-1]), axis=-1)
        return found[..., :tokens]

    @step
    def listed_q(self):
        """Members in order of position, -1 last; given ones as they are."""
        return self.listed(self.place_q, 0)

    @step
    def listed_k(self):
        return self.listed(self.place_k, 1)

    def listed(self, place, side):
        if self.members is not None:
            given = self.members[side]
            return np.broadcast_to(given, (*place.shape[:-1], np.shape(given)[-1])).astype(np.int64)
        tokens = np.where(place >= 0, np.arange(place.shape[-1]), place.shape[-1])
        found = np.sort(tokens, axis=-1)[..., : self.widths[side]]
        return np.where(found == place.shape[-1], -1, found)

    # ------------------------------------------------------------------ who sees whom

    @step
    def alive(self):
        """Tokens that are queries of a cluster, (..., h, c, t)."""
        return (self.place_q >= 0) & self.real_queries[..., None, :]

    @step
    def visible_by_causal(self):
        """By position, or by place in the two lists."""
        if not self.causal:
            return True
        if self.causal_by == "rank":
            return self.place_q[..., :, None] >= self.place_k[..., None, :]
        return np.arange(self.queries)[:, None] >= np.arange(self.keys)

    @step
    def visible_by_pattern(self):
        if self.pattern is None:
            return True
        pattern = self.pattern.fit(self.queries, self.keys, batch=self.lead, heads=self.heads)
        b = np.arange(math.prod(self.lead)).reshape(*self.lead, 1, 1, 1)
        h, i, j = np.arange(self.heads)[:, None, None], np.arange(self.queries)[:, None], np.arange(self.keys)
        seen = pattern.visible(i, j, q=self.queries, k=self.keys, b=b, h=h)
        return np.broadcast_to(seen, (*self.lead, self.heads, self.queries, self.keys))[..., None, :, :]

    @step
    def memory_rows(self):
        return 0 if self.memory_keys is None else self.memory_keys.shape[-2]

    @step
    def others(self):
        """Keys of the cluster that a query may see, by members, masks, causal and pattern; (..., h, c, q, k)."""
        keys = (self.place_k >= 0) & self.real_keys[..., None, :]
        return self.alive[..., :, None] & keys[..., None, :] & self.visible_by_causal & self.visible_by_pattern

    @step
    def visible_keys(self):
        """The same after ``self_attention``: oneself as any other, never, or only where there is no other."""
        if self.self_attention == "always":
            return self.others
        itself = np.eye(self.queries, self.keys, dtype=bool)
        seen = self.others & ~itself
        if self.self_attention == "never" or self.memory_rows:
            return seen
        own = self.alive[..., :, None] & (self.place_k >= 0)[..., None, :] & itself
        return seen | (own & ~seen.any(-1, keepdims=True))

    @step
    def visible(self):
        """Keys, then the rows of the memory, which every query of the cluster sees."""
        memory = np.broadcast_to(self.alive[..., None], (*self.alive.shape, self.memory_rows))
        return np.concatenate([self.visible_keys, memory], axis=-1)

    # ------------------------------------------------------------------ attention

    @step
    def gap(self):
        """How many places key j stands after query i, (..., h, c, q, k)."""
        return self.place_k[..., None, :] - self.place_q[..., :, None]

    @step
    def attention(self):
        """Every cluster is a head of softmax attention, over all tokens and its memory."""
        q, k, v = (x[..., None, :, :] for x in (self.normal_q, self.unit_k, self.whole(self.v)))
        q = np.broadcast_to(q, (*q.shape[:-3], self.clusters, *q.shape[-2:]))
        k, v = self.with_memory(k, self.memory_keys), self.with_memory(v, self.memory_values)
        given = {"q": q, "k": k, "v": v, "mask": self.visible, "scale": self.scale}
        given |= {"relative_keys": self.relative_keys, "relative_values": self.relative_values}
        given |= {"gap": self.gap, "memory_rows": self.memory_rows}
        if self.dropout_mask is not None:
            kept = np.broadcast_to(self.dropout_mask, (*self.lead, self.heads, self.queries, self.keys))[
                ..., None, :, :
            ]
            kept = np.concatenate([kept, np.ones((*kept.shape[:-1], self.memory_rows), dtype=bool)], axis=-1)
            given |= {"dropout_mask": kept, "dropout_rate": self.dropout_rate}
        return self.begin(self.inner, given)

    def with_memory(self, x, held):
        """(..., h, 1, t, d) for every cluster, its memory (h, c, n, d) behind."""
        x = np.broadcast_to(x, (*x.shape[:-3], self.clusters, *x.shape[-2:]))
        if held is None:
            return x
        return np.concatenate([x, np.broadcast_to(held, (*x.shape[:-2], *held.shape[-2:]))], axis=-2)

    @step
    def part(self):
        """The output of every cluster, (..., h, c, t, e)."""
        return self.attention.output

    @step
    def count(self):
        """The number of clusters of a token, (..., h, t)."""
        return self.alive.sum(-2)

    @step
    def share(self):
        """1 / (count + average_eps), of each cluster with the token, (..., h, c, t, 1)."""
        share = 1 / np.where(self.count > 0, self.count + self.average_eps, 1.0)
        return (share[..., None, :] * self.alive)[..., None]

    @step
    def output(self):
        """Sum over clusters of share part"""
        return np.where(self.share == 0, 0.0, self.share * self.part).sum(-3)

    # ------------------------------------------------------------------ the loss

    @step
    def gaps_q(self):
        """x - its nearest centroid, 0 for masked tokens, (..., h, t, d)."""
        return self.to_nearest(self.x_q, self.real_queries)

    @step
    def gaps_k(self):
        return self.to_nearest(self.x_k, self.real_keys)

    def to_nearest(self, x, real):
        nearest = einsum("...htd,hcd->...htc", x, self.centroids).argmax(-1)
        centroids = np.broadcast_to(self.centroids, (*self.lead, *self.centroids.shape))
        own = np.take_along_axis(centroids, nearest[..., None], axis=-2)
        return np.where(real[..., None], x - own, 0.0)

    @step
    def entries(self):
        """Tokens times channels that the mean runs over."""
        tokens = self.real_queries.sum() + (0 if self.shared else self.real_keys.sum())
        return max(1, int(tokens) * self.heads * self.q.shape[-1])

    @step
    def commitment_loss(self):
        """The mean of (x - nearest centroid)^2"""
        total = (self.gaps_q**2).sum() + (0.0 if self.shared else (self.gaps_k**2).sum())
        return total / self.entries

    # ------------------------------------------------------------------ backward

    @step
    def d_part(self):
        """share d_output, to every cluster with the token"""
        d = self.cotangent("output")[..., None, :, :]
        return np.where(self.share == 0, 0.0, self.share * d)

    @step
    def d_attention(self):
        return self.attention.pull(output=self.d_part)

    @step
    def back_from_clusters(self):
        """Cotangents of what the clusters gathered: queries, keys, values, (..., h, c, t, .)."""
        call = self.d_attention
        return call.d_q, call.d_k[..., : self.keys, :], call.d_v[..., : self.keys, :]

    @step
    def d_normal_q(self):
        """Sum over clusters"""
        return self.back_from_clusters[0].sum(-3)

    @step
    def d_unit_k(self):
        """Sum over clusters"""
        return self.back_from_clusters[1].sum(-3)

    @step
    def d_loss(self):
        """2 (x - centroid) / entries, of queries and keys"""
        factor = 2 * self.cotangent("commitment_loss") / self.entries
        return factor * self.gaps_q, factor * self.gaps_k

    @step
    def through_normal_q(self):
        """The queries' part of the attention, back through the normalisation."""
        return normalised_backward(self.whole(self.q), self.normalize, self.d_normal_q)

    @step
    def through_normal_k(self):
        d = normalised_backward(self.normal_k, self.key_norm, self.d_unit_k)
        return normalised_backward(self.whole(self.given_keys), self.normalize, d)

    @step
    def loss_in_q(self):
        """The loss's part, back through projection and normalisation."""
        return self.through_routing(self.q, self.d_loss[0])

    @step
    def loss_in_k(self):
        return self.through_routing(self.given_keys, self.d_loss[1])

    def through_routing(self, x, d):
        d = d if self.projection is None else einsum("...tf,df->...td", d, self.projection)
        return normalised_backward(self.whole(x), self.routed_kind, d)

    @step
    def d_q(self):
        """As queries and in the loss; as keys too, where they are both"""
        own = self.through_normal_q + self.loss_in_q
        return own + self.through_normal_k if self.shared else own

    @step
    def d_k(self):
        return self.through_normal_k + self.loss_in_k

    @step
    def d_v(self):
        """Sum over clusters"""
        return self.back_from_clusters[2].sum(-3)

    @step
    def d_memory_keys(self):
        return self.d_attention.d_k[..., self.keys :, :]

    @step
    def d_memory_values(self):
        return self.d_attention.d_v[..., self.keys :, :]

    @step
    def d_relative_keys(self):
        return self.d_attention.d_relative_keys

    @step
    def d_relative_values(self):
        return self.d_attention.d_relative_values

    @step
    def d_scale(self):
        return self.d_attention.d_scale


def best(scores, real, width):
    """(..., h, c, t) bool: the real tokens of the ``width`` largest scores; of equal ones the first."""
    scores = np.where(real[..., None, :], scores, -np.inf)
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :width]
    found = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(found, order, True, axis=-1)
    return found & real[..., None, :]


def normalised(x, kind):
    """(x - mean) / sqrt(var + 1e-6), x / max(||x||, 1e-12), or x."""
    if kind == "layer":
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), 1e-12) if kind == "l2" else x


def normalised_backward(x, kind, d):
    """The cotangent of x; 0 where nothing comes back to a token, whatever the token is."""
    if kind is None or not x.shape[-1]:
        return d
    y = normalised(x, kind)
    if kind == "layer":
        found = d - d.mean(-1, keepdims=True) - y * (d * y).mean(-1, keepdims=True)
        found = found / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    else:
        length = np.sqrt((x * x).sum(-1, keepdims=True))
        turned = np.where(length > 1e-12, d - y * (d * y).sum(-1, keepdims=True), d)
        found = turned / np.maximum(length, 1e-12)
    return np.where((d == 0).all(-1, keepdims=True), 0.0, found)


definition = Routing
