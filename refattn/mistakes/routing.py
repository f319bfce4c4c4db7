"""The ways people get routing attention wrong, each as the numbers that the mistake gives.

:class:`Steps` writes routing attention down once more, densely and in float64: each cluster as a (t, t) matrix of weights over
the whole sequence, members as columns of zeros and ones.  Its steps are what a mistake replaces; it is right as it stands.
"""

import math
from typing import Any

import numpy as np

from refattn.arrays import sum_to_shape
from refattn.records import Mutation, Result

__all__ = ["Steps", "routing_mutations"]

Arguments = dict[str, Any]


class Steps:
    """One call on float64 arrays; axes (..., h, c, q, k) inside."""

    def __init__(self, arguments: Arguments) -> None:
        a = self.a = arguments
        self.same = a.get("k") is None
        raw = {"q": a["q"], "k": a["q"] if self.same else a["k"], "v": a["v"]}
        self.lead = np.broadcast_shapes(*(np.shape(x)[:-3] for x in raw.values()))
        self.q, self.k, self.v = (
            np.broadcast_to(np.asarray(x, np.float64), (*self.lead, *np.shape(x)[-3:])) for x in raw.values()
        )
        (self.h, self.t, self.d), self.t_k = self.q.shape[-3:], self.k.shape[-2]
        self.mu = self.array("centroids")
        self.c = self.mu.shape[1]
        scale = a.get("scale")
        self.scale = (self.d**-0.5 if self.d else 1.0) if scale is None else float(np.reshape(scale, ()))
        self.kind = a.get("normalize", "layer")
        self.cluster_kind = a.get("cluster_normalize", "same")
        self.eps = a.get("average_eps", 0.0)
        self.real = [
            np.broadcast_to(True if a.get(m) is None else a[m], (*self.lead, n))[..., None, :]
            for m, n in (("query_mask", self.t), ("key_mask", self.t_k))
        ]

    def array(self, name: str) -> Any:
        return None if self.a.get(name) is None else np.asarray(self.a[name], np.float64)

    # ------------------------------------------------------------ steps that mistakes replace

    def normal(self, x: np.ndarray, kind: str | None) -> np.ndarray:
        if kind == "layer":
            centred = x - x.mean(-1, keepdims=True)
            return centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + 1e-6)
        return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12) if kind == "l2" else x

    def normal_back(self, x: np.ndarray, kind: str | None, d: np.ndarray) -> np.ndarray:
        if kind is None:
            return d
        y = self.normal(x, kind)
        if kind == "layer":
            factor = 1 / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
            return factor * (d - d.mean(-1, keepdims=True) - y * (d * y).mean(-1, keepdims=True))
        size = np.linalg.norm(x, axis=-1, keepdims=True)
        return np.where(size > 1e-12, d - y * (d * y).sum(-1, keepdims=True), d) / np.maximum(size, 1e-12)

    def routed(self, x: np.ndarray) -> np.ndarray:
        """What meets the centroids."""
        y = self.normal(x, self.kind if self.cluster_kind == "same" else self.cluster_kind)
        return y if self.a.get("projection") is None else y @ self.array("projection")

    def scores(self, x: np.ndarray) -> np.ndarray:
        """(..., h, c, t): by these, tokens are chosen."""
        return np.einsum("...htd,hcd->...hct", x, self.mu)

    def width(self, side: int) -> int:
        size, t = self.a.get("cluster_size"), (self.t, self.t_k)[side]
        if size is None:
            return min(t, max(1, t // self.c))
        return min(t, size[side] if isinstance(size, (tuple, list)) else size)

    def places(self, side: int) -> np.ndarray:
        """(..., h, c, t) ints: the place of every token in every cluster, -1 where it is no member."""
        given, t = self.a.get("members"), (self.t, self.t_k)[side]
        if given is None:
            return self.ranked(side)
        listed = np.broadcast_to(given[side], (*self.lead, self.h, self.c, np.shape(given[side])[-1]))
        found = np.full((*listed.shape[:-1], t), -1)
        for at in np.ndindex(*listed.shape[:-1]):
            for i, token in enumerate(listed[at]):
                if token >= 0:
                    found[at][token] = i
        return found

    def ranked(self, side: int) -> np.ndarray:
        """Places of the tokens with the largest scores, in order of position."""
        score = self.scores(self.x_q if side == 0 else self.x_k)
        score = np.where(self.real[side][..., None, :], score, -np.inf)
        best = np.argsort(-score, axis=-1, kind="stable")[..., : self.width(side)]
        member = np.zeros(score.shape, bool)
        np.put_along_axis(member, best, True, -1)
        member &= score > -np.inf
        return np.where(member, np.cumsum(member, axis=-1) - 1, -1)

    def ordered(self) -> Any:
        """What causal lets through."""
        if not self.a.get("causal", False):
            return True
        if self.a.get("causal_by", "position") == "rank":
            return self.place_q[..., :, None] >= self.place_k[..., None, :]
        return np.arange(self.t)[:, None] >= np.arange(self.t_k)

    def self_rule(self) -> str:
        return self.a.get("self_attention", "always")

    def key_kind(self) -> str | None:
        return self.a.get("key_norm")

    def averaged(self, part: np.ndarray) -> np.ndarray:
        """(..., h, c, t, e) -> (..., h, t, e)."""
        return part.sum(-3) / np.where(self.count > 0, self.count + self.eps, 1.0)[..., None]

    def spread(self, d_output: np.ndarray) -> np.ndarray:
        """The adjoint of averaged, for each cluster."""
        d = d_output / np.where(self.count > 0, self.count + self.eps, 1.0)[..., None]
        return np.broadcast_to(d[..., None, :, :], (*self.part.shape[:-1], d.shape[-1]))

    def gathered(self, d: np.ndarray) -> np.ndarray:
        """What all clusters send back to the tokens, (..., h, c, t, .) -> (..., h, t, .)."""
        return d.sum(-3)

    def loss(self) -> float:
        sizes = [np.sum(np.broadcast_to(r, g.shape[:-1])) * self.d for g, r in zip(self.gaps, self.real, strict=False)]
        self.entries = max(1.0, float(sum(sizes)))
        return sum(np.sum(g**2) for g in self.gaps) / self.entries

    # ------------------------------------------------------------ the computation

    def forward(self) -> Result:
        self.x_q, self.x_k = self.routed(self.q), self.routed(self.k)
        self.q_n, self.k_n = self.normal(self.q, self.kind), self.normal(self.k, self.kind)
        self.keys = self.normal(self.k_n, self.key_kind())
        self.gaps = []
        for x, keep in ((self.x_q, self.real[0]),) if self.same else zip((self.x_q, self.x_k), self.real, strict=True):
            nearest = np.argmax(np.einsum("...htd,hcd->...htc", x, self.mu), axis=-1)
            own = np.stack([self.mu[h][nearest[..., h, :]] for h in range(self.h)], axis=-3)
            self.gaps.append(np.where(keep[..., None], x - own, 0.0))
        self.place_q, self.place_k = self.places(0), self.places(1)
        alive = (self.place_q >= 0) & self.real[0][..., None, :]
        seen = alive[..., :, None] & ((self.place_k >= 0) & self.real[1][..., None, :])[..., None, :]
        seen = seen & self.ordered()
        if self.a.get("pattern") is not None:
            b = math.prod(self.lead)
            mask = self.a["pattern"].fit(self.t, self.t_k, batch=self.lead, heads=self.h)
            mask = np.broadcast_to(mask.to_mask(self.t, self.t_k, b, self.h), (b, self.h, self.t, self.t_k))
            seen = seen & mask.reshape(*self.lead, self.h, 1, self.t, self.t_k)
        memory = self.array("memory_keys")
        self.memory = 0 if memory is None else memory.shape[-2]
        itself = np.eye(self.t, self.t_k, dtype=bool)
        if self.self_rule() != "always":
            others = seen & ~itself
            last = ~others.any(-1, keepdims=True) & (self.self_rule() == "last_resort") & (self.memory == 0)
            own = alive[..., :, None] & (self.place_k >= 0)[..., None, :] & itself
            seen = others | (own & last)
        logits = np.einsum("...htd,...hkd->...htk", self.q_n, self.keys)[..., None, :, :]
        gap = self.place_k[..., None, :] - self.place_q[..., :, None]
        self.rows = {n: self.one_hot(gap, len(self.a[n])) for n in _TABLES if self.a.get(n) is not None}
        if "relative_keys" in self.rows:
            by_row = self.q_n @ self.array("relative_keys").T
            logits = logits + np.einsum("...htp,...hctkp->...hctk", by_row, self.rows["relative_keys"])
        logits = np.broadcast_to(logits, (*seen.shape[:-2], self.t, self.t_k))
        values = np.broadcast_to(self.v[..., None, :, :], (*seen.shape[:-2], *self.v.shape[-2:]))
        if self.memory:
            own = np.einsum("...htd,hcnd->...hctn", self.q_n, memory)
            logits = np.concatenate([logits, own], axis=-1)
            held = np.broadcast_to(self.array("memory_values"), (*values.shape[:-2], self.memory, values.shape[-1]))
            values = np.concatenate([values, held], axis=-2)
            seen = np.concatenate([seen, np.broadcast_to(alive[..., None], (*seen.shape[:-1], self.memory))], axis=-1)
        self.seen, self.values, self.raw = seen, values, logits
        logits = self.scale * logits
        top = np.max(np.where(seen, logits, -np.inf), axis=-1, keepdims=True, initial=-np.inf)
        top = np.where(np.isfinite(top), top, 0.0)
        weights = np.where(seen, np.exp(np.where(seen, logits - top, 0.0)), 0.0)
        total = weights.sum(-1, keepdims=True)
        self.weights = weights / np.where(total > 0, total, 1.0)
        self.factors: Any = 1.0
        if self.a.get("dropout_mask") is not None:
            kept = np.broadcast_to(self.a["dropout_mask"], (*self.lead, self.h, self.t, self.t_k))[..., None, :, :]
            self.factors = np.ones(weights.shape)
            self.factors[..., : self.t_k] = kept
            self.factors = self.factors / (1 - self.a.get("dropout_rate", 0.0))
        self.kept = self.weights * self.factors
        self.part = self.kept @ values
        if "relative_values" in self.rows:
            by_row = np.einsum("...tk,...tkp->...tp", self.kept[..., : self.t_k], self.rows["relative_values"])
            self.part = self.part + by_row @ self.array("relative_values")
        self.count = alive.sum(-2)
        return Result(
            output=self.averaged(self.part),
            commitment_loss=np.float64(self.loss()),
            members_q=self.listed(0),
            members_k=self.listed(1),
        )

    def one_hot(self, gap: np.ndarray, rows: int) -> np.ndarray:
        """The row of a relative table of every pair, as zeros and ones (..., p)."""
        return np.clip(gap, -(rows // 2), rows // 2)[..., None] + rows // 2 == np.arange(rows)

    def listed(self, side: int) -> np.ndarray:
        """The members as the public function returns them."""
        given = self.a.get("members")
        if given is not None:
            return np.broadcast_to(given[side], (*self.lead, self.h, self.c, np.shape(given[side])[-1]))
        place = (self.place_q, self.place_k)[side]
        found = np.full((*place.shape[:-1], self.width(side)), -1)
        for at in np.ndindex(*place.shape[:-1]):
            tokens = np.flatnonzero(place[at] >= 0)[: found.shape[-1]]
            found[at][: len(tokens)] = tokens
        return found

    def backward(self, cotangents: dict[str, Any]) -> dict[str, np.ndarray]:
        d_output = cotangents.get("output")
        d_output = np.zeros((*self.lead, self.h, self.t, self.v.shape[-1])) if d_output is None else d_output
        d_output = np.where(self.real[0][..., None], np.asarray(d_output, np.float64), 0.0)
        d_part = self.spread(d_output)
        d_kept = d_part @ np.swapaxes(self.values, -1, -2)
        found: dict[str, np.ndarray] = {}
        if "relative_values" in self.rows:
            by_row = d_part @ self.array("relative_values").T
            d_kept[..., : self.t_k] += np.einsum("...tp,...tkp->...tk", by_row, self.rows["relative_values"])
            own = self.kept[..., : self.t_k]
            by_row = np.einsum("...tk,...tkp->...tp", own, self.rows["relative_values"])
            found["relative_values"] = _summed(np.swapaxes(by_row, -1, -2) @ d_part)
        d_weights = d_kept * self.factors
        delta = np.sum(d_weights * self.weights, axis=-1, keepdims=True)
        d_logits = self.weights * (d_weights - delta)
        own = d_logits[..., : self.t_k]
        d_values = np.swapaxes(self.kept, -1, -2) @ d_part
        d_q = own @ self.keys[..., None, :, :]
        d_k = self.scale * np.swapaxes(own, -1, -2) @ self.q_n[..., None, :, :]
        if "relative_keys" in self.rows:
            by_row = np.einsum("...tk,...tkp->...tp", own, self.rows["relative_keys"])
            d_q = d_q + by_row @ self.array("relative_keys")
            found["relative_keys"] = self.scale * _summed(np.swapaxes(by_row, -1, -2) @ self.q_n[..., None, :, :])
        if self.memory:
            rest = d_logits[..., self.t_k :]
            d_q = d_q + rest @ self.array("memory_keys")
            d_held = self.scale * np.swapaxes(rest, -1, -2) @ self.q_n[..., None, :, :]
            found["memory_keys"] = d_held.reshape(-1, *d_held.shape[-4:]).sum(0)
            d_held = d_values[..., self.t_k :, :]
            found["memory_values"] = d_held.reshape(-1, *d_held.shape[-4:]).sum(0)
        found["scale"] = np.sum(d_logits * np.where(self.seen, self.raw, 0.0))
        found["v"] = self.gathered(d_values[..., : self.t_k, :])
        d_q, d_k = self.scale * self.gathered(d_q), self.normal_back(self.k_n, self.key_kind(), self.gathered(d_k))
        raw = [np.zeros(self.q.shape), np.zeros(self.k.shape)]
        d_loss = cotangents.get("commitment_loss")
        for n, gap in enumerate(self.gaps if d_loss is not None else ()):
            d_x = self.d_loss(gap) * float(np.reshape(d_loss, ()))  # type: ignore[arg-type]
            d_x = d_x if self.a.get("projection") is None else d_x @ self.array("projection").T
            source = (self.q, self.k)[n]
            raw[n] = raw[n] + self.normal_back(
                source, self.kind if self.cluster_kind == "same" else self.cluster_kind, d_x
            )
        d_q, d_k = self.normal_back(self.q, self.kind, d_q), self.normal_back(self.k, self.kind, d_k)
        found.update({"q": self.both_roles(d_q, d_k) + raw[0]} if self.same else {"q": d_q + raw[0], "k": d_k + raw[1]})
        return {n: sum_to_shape(g, np.shape(self.a[n])) for n, g in found.items() if self.a.get(n) is not None}

    def d_loss(self, gap: np.ndarray) -> np.ndarray:
        return 2 * gap / self.entries

    def both_roles(self, d_q: np.ndarray, d_k: np.ndarray) -> np.ndarray:
        """A token's gradient where it is query and key."""
        return d_q + d_k


def _summed(x: np.ndarray) -> np.ndarray:
    """Over all but the last two axes."""
    return x.reshape(-1, *x.shape[-2:]).sum(0)


_TABLES = ("relative_keys", "relative_values")


# ------------------------------------------------------------------------------------------------ mistakes


class _RankLeak(Steps):
    def ordered(self) -> Any:
        return self.place_q[..., :, None] >= self.place_k[..., None, :] if self.a.get("causal") else True


class _PositionForRank(Steps):
    def ordered(self) -> Any:
        return np.arange(self.t)[:, None] >= np.arange(self.t_k) if self.a.get("causal") else True


class _NotCausal(Steps):
    def ordered(self) -> Any:
        return True


class _Sum(Steps):
    def averaged(self, part: np.ndarray) -> np.ndarray:
        return part.sum(-3)

    def spread(self, d_output: np.ndarray) -> np.ndarray:
        return np.broadcast_to(d_output[..., None, :, :], (*self.part.shape[:-1], d_output.shape[-1]))


class _AllClusters(Steps):
    """The mean runs over all clusters, whether or not the token is in them."""

    def averaged(self, part: np.ndarray) -> np.ndarray:
        return part.mean(-3)

    def spread(self, d_output: np.ndarray) -> np.ndarray:
        return np.broadcast_to(d_output[..., None, :, :] / self.c, (*self.part.shape[:-1], d_output.shape[-1]))


class _Overwrite(Steps):
    """Of several clusters, the last one writes a token's output."""

    def last(self) -> np.ndarray:
        alive = (self.place_q >= 0) & self.real[0][..., None, :]
        later = np.flip(np.cumsum(np.flip(alive, -2), axis=-2), -2)
        return (alive & (later == 1))[..., None]

    def averaged(self, part: np.ndarray) -> np.ndarray:
        return np.where(self.last(), part, 0.0).sum(-3)

    def spread(self, d_output: np.ndarray) -> np.ndarray:
        return np.where(self.last(), d_output[..., None, :, :], 0.0)


class _GradOverwrite(Steps):
    """The gradients of a token's clusters overwrite each other."""

    def gathered(self, d: np.ndarray) -> np.ndarray:
        place = self.place_q if d.shape[-2] == self.t else self.place_k
        alive = place >= 0
        later = np.flip(np.cumsum(np.flip(alive, -2), axis=-2), -2)
        return np.where((alive & (later == 1))[..., None], d, 0.0).sum(-3)


class _NoEps(Steps):
    def averaged(self, part: np.ndarray) -> np.ndarray:
        self.eps = 0.0
        return super().averaged(part)


class _Smallest(Steps):
    def scores(self, x: np.ndarray) -> np.ndarray:
        return -super().scores(x)


class _Assigned(Steps):
    """Of the tokens of a cluster only those stay that have no nearer centroid."""

    def ranked(self, side: int) -> np.ndarray:
        score = self.scores(self.x_q if side == 0 else self.x_k)
        nearest = np.argmax(score, axis=-2)[..., None, :] == np.arange(self.c)[:, None]
        member = (super().ranked(side) >= 0) & nearest
        return np.where(member, np.cumsum(member, axis=-1) - 1, -1)


class _Narrow(Steps):
    def width(self, side: int) -> int:
        return max(1, super().width(side) - 1)


class _HeadCentroids(Steps):
    def scores(self, x: np.ndarray) -> np.ndarray:
        return np.einsum("...htd,cd->...hct", x, self.mu[0])


class _ByScore(Steps):
    """Members are ranked by their score and not by position."""

    def ranked(self, side: int) -> np.ndarray:
        right = super().ranked(side)
        score = np.where(right >= 0, self.scores(self.x_q if side == 0 else self.x_k), -np.inf)
        place = np.argsort(np.argsort(-score, axis=-1, kind="stable"), axis=-1, kind="stable")
        return np.where(right >= 0, place, -1)


class _NoProjection(Steps):
    def routed(self, x: np.ndarray) -> np.ndarray:
        return self.normal(x, self.kind if self.cluster_kind == "same" else self.cluster_kind)


class _NotNormal(Steps):
    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        if self.cluster_kind == "same":
            self.cluster_kind = self.kind
        self.kind = None


class _UnitForLayer(Steps):
    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        swap = {"layer": "l2", "l2": "layer", None: None, "same": "same"}
        self.kind, self.cluster_kind = swap[self.kind], swap[self.cluster_kind]


class _KeysNotUnit(Steps):
    def key_kind(self) -> str | None:
        return None


class _KeysUnit(Steps):
    def key_kind(self) -> str | None:
        return "l2"


class _NoScale(Steps):
    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.scale = 1.0


class _SelfAlways(Steps):
    def self_rule(self) -> str:
        return "always"


class _SelfNever(Steps):
    def self_rule(self) -> str:
        return "never"


class _NoMemory(Steps):
    def array(self, name: str) -> Any:
        return None if name == "memory_keys" else super().array(name)


class _NoMasks(Steps):
    def __init__(self, arguments: Arguments) -> None:
        super().__init__({**arguments, "query_mask": None, "key_mask": None})


class _RelativeTurned(Steps):
    def one_hot(self, gap: np.ndarray, rows: int) -> np.ndarray:
        return super().one_hot(-gap, rows)


class _RelativeByPosition(Steps):
    def one_hot(self, gap: np.ndarray, rows: int) -> np.ndarray:
        by_position = np.arange(self.t_k)[None, :] - np.arange(self.t)[:, None]
        return super().one_hot(np.broadcast_to(by_position, gap.shape), rows)


class _LossSum(Steps):
    def loss(self) -> float:
        return super().loss() * self.entries

    def d_loss(self, gap: np.ndarray) -> np.ndarray:
        return 2 * gap


class _LossAdded(Steps):
    """The means of q and of k are added; shared ones count twice."""

    def loss(self) -> float:
        return 2 * super().loss()

    def d_loss(self, gap: np.ndarray) -> np.ndarray:
        return 2 * super().d_loss(gap)


class _LossHalf(Steps):
    def d_loss(self, gap: np.ndarray) -> np.ndarray:
        return gap / self.entries


class _NoLossGradient(Steps):
    def d_loss(self, gap: np.ndarray) -> np.ndarray:
        return np.zeros_like(gap)


class _NormIgnored(Steps):
    def normal_back(self, x: np.ndarray, kind: str | None, d: np.ndarray) -> np.ndarray:
        return d


class _QueryRole(Steps):
    def both_roles(self, d_q: np.ndarray, d_k: np.ndarray) -> np.ndarray:
        return d_q


class _MeanIgnored(Steps):
    def spread(self, d_output: np.ndarray) -> np.ndarray:
        return np.broadcast_to(d_output[..., None, :, :], (*self.part.shape[:-1], d_output.shape[-1]))


def _differ(right: Any, wrong: Any) -> bool:
    return any(
        np.shape(right[n]) != np.shape(wrong[n]) or not np.allclose(right[n], wrong[n], rtol=1e-9, atol=1e-12)
        for n in wrong
    )


def _mistake(class_: str, says: str, wrong: type[Steps], *, forward: bool = True) -> Mutation:
    def both(arguments: Arguments) -> tuple[Steps, Result, Steps, Result]:
        mistaken, right = wrong(arguments), Steps(arguments)
        return mistaken, mistaken.forward(), right, right.forward()

    def mistaken_forward(arguments: Arguments) -> Result | None:
        with np.errstate(all="ignore"):
            _, result, _, expected = both(arguments)
        return result if _differ(expected.fields, result.fields) else None

    def gradients(arguments: Arguments, cotangents: dict[str, Any]) -> dict[str, Any] | None:
        with np.errstate(all="ignore"):
            mistaken, _, right, _ = both(arguments)
            found, expected = mistaken.backward(cotangents), right.backward(cotangents)
        expected = {n: g for n, g in expected.items() if n in found}
        return found if _differ(expected, found) else None

    return Mutation(class_, says, forward=mistaken_forward if forward else None, gradients=gradients)


routing_mutations: tuple[Mutation, ...] = (
    _mistake("routing_rank_leak", "causal by rank where queries and keys have members of their own", _RankLeak),
    _mistake("routing_rank_leak", "causal by position where rank is asked for", _PositionForRank),
    _mistake("routing_sum_not_mean", "the outputs of a token's clusters are summed", _Sum),
    _mistake("routing_sum_not_mean", "the mean runs over all clusters", _AllClusters),
    _mistake("routing_scatter_overwrite", "the last of a token's clusters writes its output", _Overwrite),
    _mistake("routing_eps_drop", "the constant in the mean is left out", _NoEps),
    _mistake("routing_farthest", "the tokens farthest from the centroid are taken", _Smallest),
    _mistake("routing_assignment", "members that are nearer to another centroid are dropped", _Assigned),
    _mistake("routing_width", "one member too few", _Narrow),
    _mistake("routing_heads", "the centroids of head 0 are used for all", _HeadCentroids),
    _mistake("routing_order", "members are ranked by score", _ByScore),
    _mistake("routing_projection", "the projection is left out", _NoProjection),
    _mistake("routing_norm", "queries and keys are not normalised", _NotNormal),
    _mistake("routing_norm", "unit norm in place of layer norm, or the reverse", _UnitForLayer),
    _mistake("routing_key_norm", "keys are not brought to norm 1", _KeysNotUnit),
    _mistake("routing_key_norm", "keys are brought to norm 1 without being asked", _KeysUnit),
    _mistake("no_scale", "logits are not scaled", _NoScale),
    _mistake("causal_drop", "later tokens are seen", _NotCausal),
    _mistake("routing_self", "a token sees itself like any other", _SelfAlways),
    _mistake("routing_self", "a token never sees itself", _SelfNever),
    _mistake("memory_drop", "the memory is left out", _NoMemory),
    _mistake("mask_drop", "the masks are left out", _NoMasks),
    _mistake("routing_relative", "relative rows are read in the other direction", _RelativeTurned),
    _mistake("routing_relative", "relative rows go by position in place of rank", _RelativeByPosition),
    _mistake("routing_loss", "the loss is a sum", _LossSum),
    _mistake("routing_loss", "the loss counts twice", _LossAdded),
    _mistake("routing_loss_grad", "half the gradient of the loss", _LossHalf, forward=False),
    _mistake("routing_loss_grad", "no gradient of the loss", _NoLossGradient, forward=False),
    _mistake(
        "routing_norm_grad", "the normalisation counts as the identity in the backward", _NormIgnored, forward=False
    ),
    _mistake(
        "grad_overwritten", "the gradients of a token's clusters overwrite each other", _GradOverwrite, forward=False
    ),
    _mistake(
        "grad_subset", "shared queries get the gradient of their role as queries alone", _QueryRole, forward=False
    ),
    _mistake("routing_mean_grad", "the mean is left out of the backward", _MeanIgnored, forward=False),
)
