"""The ways people get LSH attention wrong, each as the numbers that the mistake gives.

A mistake replaces a step of :class:`_Call`, which computes LSH attention with matrices (t, t): ``copies[s,i,j]`` says how
often query i meets key j in round s, and the rounds are weighted by exp(lse[s] - lse), as most code does it.  The gradients
that come with a wrong forward are those that the right backward makes of it; a mistake of the backward alone has no forward.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn.arrays import sum_to_shape
from refattn.definitions.lsh_old import all_buckets, definition
from refattn.records import Mutation, Result

__all__ = ["lsh_mutations"]

_DEFAULTS = {n: p.default for n, p in inspect.signature(definition).parameters.items() if p.default is not p.empty}
_SAME = 1e-9  # results closer than this, relative to the largest entry, are the same


class _Call:
    """One call: arguments, buckets, and the steps that a mistake may replace."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.given = arguments
        self.options = {**_DEFAULTS, **arguments}
        qk, v = (np.asarray(arguments[n], dtype=np.float64) for n in ("qk", "v"))
        self.lead = np.broadcast_shapes(qk.shape[:-3], v.shape[:-3])
        self.qk, self.v = (np.broadcast_to(x, self.lead + x.shape[-3:]) for x in (qk, v))
        self.h, self.t, self.d = self.qk.shape[-3:]
        o = self.options
        self.full = o["short"] == "full" and self.t <= o["chunk"]
        self.keep = np.broadcast_to(True if o["mask"] is None else o["mask"], (*self.lead, self.t))
        self.scale = self.d**-0.5 if o["scale"] is None else float(np.reshape(o["scale"], ()))
        self.eps = {"l2": 1e-12, "rms": 1e-6}[o["key_norm"]] if o["norm_eps"] is None else o["norm_eps"]
        self.kept: Any = 1.0
        if o["dropout_mask"] is not None:
            self.kept = np.broadcast_to(o["dropout_mask"], (*self.lead, self.h, self.t, self.t)) / (
                1 - o["dropout_rate"]
            )
        self.seen = np.ones((*self.lead, self.h, self.t, self.t), dtype=bool)
        if o["pattern"] is not None:
            fitted, n = o["pattern"].fit(self.t, self.t, batch=self.lead, heads=self.h), np.arange(self.t)
            for b, batch in enumerate(np.ndindex(self.lead)):
                for h in range(self.h):
                    where = {"q": self.t, "k": self.t, "b": np.asarray(b), "h": np.asarray(h)}
                    self.seen[(*batch, h)] = fitted.visible(n[:, None], n[None, :], **where)

    def buckets(self) -> np.ndarray:
        if self.full:
            return np.zeros((*self.lead, self.h, 1, self.t), dtype=np.int64)
        names = ("rotations", "buckets", "rng", "hashes", "n_buckets", "chunk")
        keep = self.keep if self.options["padding_bucket"] else None
        return all_buckets(self.qk, self.lead, keep=keep, **{n: self.options[n] for n in names})

    # ------------------------------------------------------------------ who meets whom

    def order(self, numbers: np.ndarray) -> np.ndarray:
        """Positions of every round by (bucket, position), (s, t)."""
        return np.argsort(numbers, axis=-1, kind="stable")

    def hidden(self, at: tuple[int, ...], rank: np.ndarray) -> np.ndarray:
        """Pairs (s|1, t, t) that are out of sight whatever the windows hold, without the self pairs."""
        n = np.arange(self.t)
        hidden: Any = ~self.seen[at] | ~self.keep[at[:-1]][None, :]
        if self.options["causal"]:
            hidden = hidden | (n[None, :] > n[:, None])
        return hidden[None]

    def ring(self) -> bool:
        return self.options["wrap"] == "global"

    def reach(self) -> tuple[int, int]:
        return self.options["before"], self.options["after"]

    def windows(self, numbers: np.ndarray, rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How often i meets j in round s, (s, t, t), and how often trax counts the pair, (t, t)."""
        hashes, t = numbers.shape
        if self.full:
            return np.ones((1, t, t)), np.ones((t, t))
        chunk, (before, after) = self.options["chunk"], self.reach()
        chunks, place = -(-t // chunk), rank // chunk
        meets, counted = np.zeros((hashes, t, t)), np.zeros((t, t))
        for s in range(hashes):
            for r in range(hashes):
                if r != s and (not self.ring() or self.options["within_bucket"]):
                    continue
                ahead = place[r][None, :] + (r - s) * chunks - place[s][:, None]
                for step in range(-before, after + 1):
                    here = (ahead - step) % (hashes * chunks) == 0 if self.ring() else ahead == step
                    if self.options["within_bucket"]:
                        here = here & (numbers[s][:, None] == numbers[s][None, :])
                    meets[s] += here
                    if r == s:
                        counted += here
        return meets, counted

    def count(self, meets: np.ndarray, counted: np.ndarray) -> np.ndarray:
        """What a meeting counts, from (s, t, t) meetings that are all visible."""
        kind = self.options["duplicates"]
        if kind == "multiset" or self.full:
            return meets
        if kind == "trax1":
            return meets / (counted + 1e-9)
        return meets / np.maximum(np.sum(meets, axis=0), 1)  # most code spreads a pair over the rounds that show it

    def copies(self, at: tuple[int, ...], numbers: np.ndarray) -> np.ndarray:
        rank = np.argsort(self.order(numbers), axis=-1)
        meets, counted = self.windows(numbers, rank)
        meets = np.where(self.hidden(at, rank), 0.0, meets)
        own = np.eye(self.t, dtype=bool)
        if self.options["self_attention"] != "always":
            meets = np.where(own, 0.0, meets)
        copies = self.count(meets, counted)
        if self.options["self_attention"] == "last_resort":
            copies[0] += np.where(own & ~np.any(copies, axis=(0, 2))[:, None], 1.0, 0.0)
        return copies

    # ------------------------------------------------------------------ keys

    def keys(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys, and the factor that made them, (t, 1)."""
        square = np.sum(q * q, axis=-1, keepdims=True)
        if self.options["key_norm"] == "rms":
            factor = 1 / np.sqrt(square / self.d + self.eps)
        else:
            factor = 1 / np.maximum(np.sqrt(square), self.eps)
        return q * factor, factor

    def keys_backward(self, k: np.ndarray, factor: np.ndarray, d_k: np.ndarray) -> np.ndarray:
        inner = np.sum(k * d_k, axis=-1, keepdims=True)
        inner = inner / self.d if self.options["key_norm"] == "rms" else inner * (factor < 1 / self.eps)
        return factor * (d_k - k * inner)

    # ------------------------------------------------------------------ forward and backward

    def rounds(self, at: tuple[int, ...], numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        """Weights within each round (s,t,t), lse of each round (s,t), keys and their factors of one head."""
        k, factor = self.keys(self.qk[at])
        logits = self.scale * self.qk[at] @ k.T
        copies = self.copies(at, numbers)
        top = np.max(np.where(copies > 0, logits, -np.inf), axis=-1, keepdims=True, initial=-np.inf)
        top = np.where(np.isfinite(top), top, 0.0)
        shares = np.where(copies > 0, copies * np.exp(logits - top), 0.0)
        total = np.sum(shares, axis=-1, keepdims=True)
        return shares / np.where(total == 0, 1.0, total), np.log(total)[..., 0] + top[..., 0], k, factor

    def combine(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weight of every round (s, t) and the lse (t,)."""
        top = np.max(z, axis=0)
        shift = np.where(np.isfinite(top), top, 0.0)
        lse = np.log(np.sum(np.exp(z - shift), axis=0)) + shift
        return np.exp(z - np.where(np.isfinite(lse), lse, 0.0)), lse

    def head_kept(self, at: tuple[int, ...]) -> Any:
        return self.kept if isinstance(self.kept, float) else self.kept[at]

    def forward(self) -> Result:
        buckets = self.buckets()
        whole = (*self.lead, self.h, self.t)
        output, lse = np.zeros((*whole, self.v.shape[-1])), np.zeros(whole)
        for at in np.ndindex(whole[:-1]):
            p, z, _, _ = self.rounds(at, buckets[at])
            weights, lse[at] = self.combine(z)
            output[at] = np.sum(weights[..., None] * ((p * self.head_kept(at)) @ self.v[at]), axis=0)
        return Result(output=output, lse=lse, buckets=None if self.full else buckets)

    def round_cotangents(
        self, weights: np.ndarray, parts: np.ndarray, d_o: np.ndarray, d_lse: np.ndarray, rank: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Cotangents of every round's output (s,t,e) and lse (s,t)."""
        output = np.sum(weights[..., None] * parts, axis=0)
        through = np.sum(d_o * (parts - output), axis=-1)
        return weights[..., None] * d_o, weights * (through + d_lse)

    def backward(self, cotangents: dict[str, Any]) -> dict[str, Any]:
        buckets = self.buckets()
        d_qk, d_v, d_scale = np.zeros(self.qk.shape), np.zeros(self.v.shape), 0.0
        d_output = cotangents.get("output")
        for at in np.ndindex((*self.lead, self.h)):
            q, v, kept = self.qk[at], self.v[at], self.head_kept(at)
            p, z, k, factor = self.rounds(at, buckets[at])
            weights, _ = self.combine(z)
            parts = (p * kept) @ v
            d_o = np.zeros_like(parts[0]) if d_output is None else np.asarray(d_output)[at]
            d_z = np.zeros(self.t) if cotangents.get("lse") is None else np.asarray(cotangents["lse"])[at]
            rank = np.argsort(self.order(buckets[at]), axis=-1)
            d_parts, d_rounds = self.round_cotangents(weights, parts, d_o, d_z, rank)
            delta = np.sum(d_parts * parts, axis=-1)
            d_logits = np.sum(p * (kept * (d_parts @ v.T) + (d_rounds - delta)[..., None]), axis=0)
            d_v[at] = np.sum(np.swapaxes(p * kept, -1, -2) @ d_parts, axis=0)
            d_scale += np.sum(d_logits * (q @ k.T))
            d_k = self.scale * d_logits.T @ q
            d_qk[at] = self.scale * d_logits @ k + self.keys_backward(k, factor, d_k)
        found = {"qk": d_qk, "v": d_v, "scale": np.asarray(d_scale)}
        shapes = {n: np.shape(self.given[n]) for n in found if self.given.get(n) is not None}
        return {n: sum_to_shape(found[n], shape) for n, shape in shapes.items()}


# ------------------------------------------------------------------------------------------------ the mistakes


def _mistake(class_: str, says: str, *, forward: bool = True, **steps: Callable[..., Any]) -> Mutation:
    """A Mutation from replaced steps; None wherever it gives the right numbers."""
    wrong_class = type("_Mistaken", (_Call,), steps)

    def mistaken_forward(arguments: dict[str, Any]) -> Result | None:
        with np.errstate(all="ignore"):
            right, wrong = _Call(arguments).forward(), wrong_class(arguments).forward()
        return wrong if _differ(right.fields, wrong.fields) else None

    def mistaken_gradients(arguments: dict[str, Any], cotangents: dict[str, Any]) -> dict[str, Any] | None:
        with np.errstate(all="ignore"):
            right, wrong = _Call(arguments).backward(cotangents), wrong_class(arguments).backward(cotangents)
        return wrong if _differ(right, wrong) else None

    return Mutation(class_, says, forward=mistaken_forward if forward else None, gradients=mistaken_gradients)


def _differ(right: Any, wrong: Any) -> bool:
    for name, x in right.items():
        if x is None:
            continue
        x, y = (np.nan_to_num(np.asarray(a, dtype=np.float64), neginf=-1e300) for a in (x, wrong[name]))
        if x.size and np.max(np.abs(x - y)) > _SAME * max(1.0, float(np.max(np.abs(x)))):
            return True
    return False


def _with(**changes: Any) -> Callable[[_Call, dict[str, Any]], None]:
    """A constructor that reads some options in another way: fixed values, or functions of the right options."""

    def init(self: _Call, arguments: dict[str, Any]) -> None:
        _Call.__init__(self, arguments)
        right = dict(self.options)
        self.options.update({n: x(right) if callable(x) else x for n, x in changes.items()})

    return init


def _keys_as_they_are(self: _Call, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return q, np.ones((self.t, 1))


def _no_chain(self: _Call, k: np.ndarray, factor: np.ndarray, d_k: np.ndarray) -> np.ndarray:
    return d_k


def _norm_constant(self: _Call, k: np.ndarray, factor: np.ndarray, d_k: np.ndarray) -> np.ndarray:
    return factor * d_k


def _no_key_role(self: _Call, k: np.ndarray, factor: np.ndarray, d_k: np.ndarray) -> np.ndarray:
    return np.zeros_like(d_k)


def _other_norm(self: _Call, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    k, factor = _Call.keys(self, q)
    ratio = self.d**0.5 if self.options["key_norm"] == "l2" else self.d**-0.5
    return k * ratio, factor * ratio


def _other_norm_chain(self: _Call, k: np.ndarray, factor: np.ndarray, d_k: np.ndarray) -> np.ndarray:
    ratio = self.d**0.5 if self.options["key_norm"] == "l2" else self.d**-0.5
    return ratio * _Call.keys_backward(self, k / ratio, factor / ratio, d_k)


def _later_in_order(self: _Call, at: tuple[int, ...], rank: np.ndarray) -> np.ndarray:
    hidden = ~self.seen[at] | ~self.keep[at[:-1]][None, :]
    if not self.options["causal"]:
        return hidden[None]
    return hidden[None] | (rank[:, None, :] > rank[:, :, None])


def _narrow_keys(self: _Call, numbers: np.ndarray) -> np.ndarray:
    """Sort keys (bucket + round offset) * t + position, in 32 bits."""
    hashes, t = numbers.shape
    offset = np.arange(hashes)[:, None] * (int(numbers.max(initial=0)) + 1)
    keys = ((numbers + offset).astype(np.int64) * t + np.arange(t)).astype(np.int32)  # wraps around
    return np.argsort(keys, axis=-1, kind="stable")


def _positive_side(self: _Call) -> np.ndarray:
    buckets = _Call.buckets(self)
    rotations = self.options["rotations"]
    if self.full or rotations is None or isinstance(self.options["n_buckets"], (tuple, list)):
        return buckets
    projected = np.einsum("...htd,...dsn->...hstn", self.qk, np.asarray(rotations)) if np.ndim(rotations) == 3 else None
    return buckets if projected is None else np.argmax(projected, axis=-1)


def _equal_rounds(self: _Call, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _, lse = _Call.combine(self, z)
    shown = np.isfinite(z)
    return shown / np.maximum(np.sum(shown, axis=0), 1), lse


def _weights_constant(
    self: _Call, weights: np.ndarray, parts: np.ndarray, d_o: np.ndarray, d_lse: np.ndarray, rank: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    return weights[..., None] * d_o, weights * d_lse


def _order_for_inverse(
    self: _Call, weights: np.ndarray, parts: np.ndarray, d_o: np.ndarray, d_lse: np.ndarray, rank: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Cotangents are brought into sorted order by the inverse permutation: position i gets those of rank[rank[i]]."""
    d_parts, d_rounds = _Call.round_cotangents(self, weights, parts, d_o, d_lse, rank)
    twice = np.take_along_axis(rank, rank, axis=-1)
    return np.take_along_axis(d_parts, twice[..., None], axis=1), np.take_along_axis(d_rounds, twice, axis=1)


lsh_mutations = (
    _mistake(
        "lsh_self_visible",
        "a token sees itself like any other key, although it should only as last resort",
        __init__=_with(self_attention=lambda o: "never" if o["self_attention"] == "always" else "always"),
    ),
    _mistake(
        "lsh_key_not_normalised",
        "keys are the queries as they are, not divided by their norm",
        keys=_keys_as_they_are,
        keys_backward=_no_chain,
    ),
    _mistake(
        "lsh_scale",
        "keys have norm sqrt(d) where norm 1 is due, or 1 where sqrt(d) is: logits are off by sqrt(d)",
        keys=_other_norm,
        keys_backward=_other_norm_chain,
    ),
    _mistake(
        "lsh_duplicates",
        "a pair that meets in several rounds counts in each of them (or once where it should count in each)",
        __init__=_with(duplicates=lambda o: "union" if o["duplicates"] == "multiset" else "multiset"),
    ),
    _mistake(
        "lsh_wrap",
        "windows run on over the ends of a round (or stop there where they should run on)",
        __init__=_with(wrap=lambda o: "none" if o["wrap"] == "global" else "global"),
    ),
    _mistake(
        "lsh_look_back_missing",
        "a chunk sees only itself",
        __init__=_with(before=0, after=0),
    ),
    _mistake(
        "lsh_other_buckets",
        "keys of other buckets that share the window are seen",
        __init__=_with(within_bucket=lambda o: not o["within_bucket"]),
    ),
    _mistake(
        "lsh_sorted_causal",
        "causality compares places in the sorted order, not positions: queries see the future",
        hidden=_later_in_order,
    ),
    _mistake(
        "lsh_mask_ignored",
        "hidden keys are seen",
        __init__=lambda self, arguments: _Call.__init__(self, {**arguments, "mask": None}),
    ),
    _mistake(
        "lsh_offset_overflow",
        "the sort keys (bucket + round offset) * t + position overflow 32 bits",
        order=_narrow_keys,
    ),
    _mistake(
        "lsh_half_hash",
        "the bucket is the argmax of xR without -xR: half the buckets stay empty",
        buckets=_positive_side,
    ),
    _mistake(
        "lsh_rounds_mean",
        "the outputs of the rounds are averaged, not weighted by exp(lse of the round)",
        combine=_equal_rounds,
    ),
    _mistake(
        "lsh_round_weights_constant",
        "the gradient takes the weights of the rounds as constants",
        forward=False,
        round_cotangents=_weights_constant,
    ),
    _mistake(
        "unsort_grad",
        "the gradient of the un-sort is gathered by the inverse of the permutation it needs",
        forward=False,
        round_cotangents=_order_for_inverse,
    ),
    _mistake(
        "lsh_norm_constant",
        "the gradient takes the norm of the key as a constant",
        forward=False,
        keys_backward=_norm_constant,
    ),
    _mistake(
        "lsh_key_role_missing",
        "the gradient of qk leaves out its role as key",
        forward=False,
        keys_backward=_no_key_role,
    ),
)
