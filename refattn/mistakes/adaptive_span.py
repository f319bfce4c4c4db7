"""The ways people get adaptive spans wrong, each as the numbers that the mistake gives.

:class:`_Dense` writes the attention down once more over whole (b, h, q, k) arrays, in steps that a mistake replaces; its
backward follows the same steps, so a kernel with automatic gradients and a wrong forward is recognised in both.
"""

import functools
from typing import Any

import numpy as np

from refattn.records import Mutation, Result

__all__ = ["adaptive_span_mutations"]

Arguments = dict[str, Any]


class _Dense:
    """Adaptive span attention on whole float64 arrays; the flags of a subclass are the mistakes."""

    origin_shift = 0  # added to every distance
    self_visible = False
    renormalised = True
    clipped = True
    reversed_positions = False
    positions_scaled = True
    shared_span = False
    ramped_slots = False
    additive = False
    ramp_width = 1.0
    inclusive = True

    def __init__(self, arguments: Arguments) -> None:
        a = self.a = arguments
        lead = self.lead = np.broadcast_shapes(*(np.shape(a[n])[:-3] for n in "qkv"))
        self.q, self.k, self.v = (
            np.broadcast_to(np.asarray(a[n], np.float64), lead + np.shape(a[n])[-3:]) for n in "qkv"
        )
        (self.h, self.n_q, d), self.n_k = self.q.shape[-3:], self.k.shape[-2]
        scale = a.get("scale")
        self.scale = d**-0.5 if scale is None else float(np.reshape(scale, ()))
        table = a.get("key_positions")
        limit = a.get("max_span") or (self.n_k - self.n_q if table is None else np.shape(table)[-1])
        i, j = np.arange(self.n_q)[:, None] + self.n_k - self.n_q, np.arange(self.n_k)[None]
        self.distance = i - j
        shown = int(self.self_visible)
        self.visible = (self.distance >= 1 - shown) & (self.distance <= limit - shown)
        if a.get("mask") is not None:
            self.visible = self.visible & np.asarray(a["mask"])
        self.visible = np.broadcast_to(self.visible, (*lead, self.h, self.n_q, self.n_k))
        span = np.asarray(a["span"], np.float64)
        self.span = span[:, None] if span.ndim == 1 else span  # (..., h, q|1)
        if self.shared_span:
            self.span = np.broadcast_to(self.span.max(axis=-2, keepdims=True), self.span.shape)
        self.width = float(a.get("ramp", 32)) * self.ramp_width
        x = self.distance - 1 + a.get("distance_origin", 1) + self.origin_shift + shown
        self.level = (self.width + self.span[..., None] - x) / self.width
        self.m = np.where(self.visible, np.clip(self.level, 0.0, 1.0 if self.clipped else None), 0.0)
        self.table, self.column = None, np.clip(self.distance - 1 + shown, 0, None)
        if table is not None:
            table = np.asarray(table, np.float64)
            table = table[..., ::-1] if self.reversed_positions else table
            self.table = np.broadcast_to(table, (self.h, *table.shape[-2:]))
            self.column = np.where((self.column >= 0) & (self.column < table.shape[-1]), self.column, 0)
        self.slots = None
        if a.get("persistent_keys") is not None:
            self.slots = tuple(np.asarray(a[n], np.float64) for n in ("persistent_keys", "persistent_values"))
        self.eps = a.get("renormalize_eps", 0.0)

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(all="ignore"):
            s = self.scale * np.einsum("...qd,...kd->...qk", self.q, self.k)
            if self.table is not None:
                t = np.einsum("...hqd,hdn->...hqn", self.q, self.table) * (self.scale if self.positions_scaled else 1.0)
                s = s + np.take_along_axis(t, np.broadcast_to(self.column, s.shape), -1)
            s = np.where(self.visible, s, 0.0)
            if self.slots is not None:
                s = np.concatenate([s, self.scale * np.einsum("...hqd,hnd->...hqn", self.q, self.slots[0])], -1)
            n = s.shape[-1] - self.n_k
            ones = np.ones((*s.shape[:-1], n))
            if self.ramped_slots:
                ones = ones * np.clip(self.span[..., None] / self.width, 0, 1)
            m = np.concatenate([self.m, ones], -1)
            seen = np.concatenate([self.visible, np.ones_like(ones, bool)], -1)
            inner = seen & (m > 0) if not self.eps and self.renormalised else seen
            peak = np.max(np.where(inner, s, -np.inf), -1, keepdims=True, initial=-np.inf)
            peak = np.where(peak == -np.inf, 0.0, peak)
            e = np.where(seen, np.exp(s - peak), 0.0)
            total, everything = (
                np.where(m > 0, m * e, 0.0).sum(-1, keepdims=True),
                np.where(inner, e, 0.0).sum(-1, keepdims=True),
            )
            self.denominator = total + self.eps * everything if self.renormalised else everything
            safe = np.where(self.denominator == 0, 1.0, self.denominator)
            self.s, self.e, self.m_all, self.total, self.seen = s, e, m, total, inner
            self.weights = np.where(m > 0, m * e, 0.0) / safe
            self.raw = np.where(self.denominator == 0, 0.0, e / safe)
            output = np.einsum("...qk,...ke->...qe", self.weights[..., : self.n_k], self.v)
            if self.slots is not None:
                output = output + np.einsum("...hqn,hne->...hqe", self.weights[..., self.n_k :], self.slots[1])
            lse = np.where(
                total[..., 0] > 0, np.log(np.where(total[..., 0] > 0, total[..., 0], 1.0)) + peak[..., 0], -np.inf
            )
        self.output = output
        return output, lse

    def gradients(self, cotangents: dict[str, Any]) -> dict[str, np.ndarray]:
        self.run()
        d_o, d_z = cotangents.get("output"), cotangents.get("lse")
        d_o = np.zeros_like(self.output) if d_o is None else np.asarray(d_o, np.float64)
        n_k = self.n_k
        with np.errstate(all="ignore"):
            d_a = np.einsum("...qe,...ke->...qk", d_o, self.v)
            if self.slots is not None:
                d_a = np.concatenate([d_a, np.einsum("...hqe,hne->...hqn", d_o, self.slots[1])], -1)
            delta = (d_o * self.output).sum(-1, keepdims=True)
            alone = np.where(self.total > 0, self.denominator / np.where(self.total > 0, self.total, 1.0), 0.0)
            z = 0.0 if d_z is None else np.where(self.total > 0, np.asarray(d_z, np.float64)[..., None], 0.0) * alone
            if self.renormalised:
                d_m = self.raw * (d_a - delta + z)
                d_s = self.m_all * d_m - self.eps * delta * np.where(self.seen, self.raw, 0.0)
            else:
                d_m = self.raw * (d_a + z)
                d_s = self.m_all * d_m - delta * self.raw
        band, m = d_s[..., :n_k], d_m[..., :n_k]
        ends = (self.level >= 0) & (self.level <= 1) if self.inclusive else (self.level > 0) & (self.level < 1)
        d_level = np.where(self.visible & ends, m, 0.0)
        if self.additive:
            d_level = np.where(self.m > 0, d_level, 0.0)
        found = {"span": self._span(d_level.sum(-1) / self.width)}
        d_q = np.einsum("...qk,...kd->...qd", band, self.k)
        if self.table is not None:
            by_distance = np.zeros((*band.shape[:-1], self.table.shape[-1]))
            for at in np.ndindex(band.shape[:-1]):
                np.add.at(by_distance[at], self.column[at[-1]], band[at])
            ratio = 1.0 if self.positions_scaled else 1 / self.scale
            d_q = d_q + ratio * np.einsum("...hqn,hdn->...hqd", by_distance, self.table)
            table = ratio * self.scale * np.einsum("...hqn,...hqd->...hdn", by_distance, self.q)
            table = table[..., ::-1] if self.reversed_positions else table
            found["key_positions"] = self._sum(table, np.shape(self.a["key_positions"]))
        if self.slots is not None:
            extra = d_s[..., n_k:]
            d_q = d_q + np.einsum("...hqn,hnd->...hqd", extra, self.slots[0])
            keys = self.scale * np.einsum("...hqn,...hqd->...hnd", extra, self.q)
            values = np.einsum("...hqn,...hqe->...hne", self.weights[..., n_k:], d_o)
            found.update(
                persistent_keys=self._sum(keys, keys.shape[-3:]), persistent_values=self._sum(values, values.shape[-3:])
            )
        found["q"] = self._sum(self.scale * d_q, np.shape(self.a["q"]))
        found["k"] = self._sum(self.scale * np.einsum("...qk,...qd->...kd", band, self.q), np.shape(self.a["k"]))
        found["v"] = self._sum(np.einsum("...qk,...qe->...ke", self.weights[..., :n_k], d_o), np.shape(self.a["v"]))
        return found

    def _span(self, d: np.ndarray) -> np.ndarray:
        shape = np.shape(self.a["span"])
        d = np.broadcast_to(d, (*self.lead, self.h, self.n_q))
        if self.shared_span:  # the largest head takes it all
            whole = np.zeros_like(d)
            np.put_along_axis(
                whole, np.argmax(np.broadcast_to(self.span, d.shape), -2)[..., None, :], d.sum(-2, keepdims=True), -2
            )
            d = whole
        return self._sum(d.sum(-1), shape) if len(shape) == 1 else self._sum(d, shape)

    @staticmethod
    def _sum(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        x = x.sum(tuple(range(x.ndim - len(shape)))) if x.ndim > len(shape) else x
        axes = tuple(n for n, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if want == 1 != have)
        return x.sum(axes, keepdims=True) if axes else x


def _differs(kind: type[_Dense], arguments: Arguments) -> bool:
    right, wrong = _Dense(arguments), kind(arguments)
    return not all(
        np.allclose(x, y, rtol=0, atol=1e-9, equal_nan=True) for x, y in zip(right.run(), wrong.run(), strict=True)
    )


def _forward(kind: type[_Dense], arguments: Arguments) -> Result | None:
    if not _differs(kind, arguments):
        return None
    output, lse = kind(arguments).run()
    return Result(output=output, lse=lse)


def _gradients(kind: type[_Dense], arguments: Arguments, cotangents: dict[str, Any]) -> dict[str, Any] | None:
    right, wrong = _Dense(arguments).gradients(cotangents), kind(arguments).gradients(cotangents)
    if all(
        np.allclose(right[n], wrong[n], rtol=0, atol=1e-9 * max(1.0, np.abs(right[n]).max(initial=0))) for n in wrong
    ):
        return None
    return wrong


def _no_cotangent(name: str) -> Any:
    def gradients(arguments: Arguments, cotangents: dict[str, Any]) -> dict[str, Any] | None:
        if cotangents.get(name) is None or not np.any(cotangents[name]):
            return None
        return _Dense(arguments).gradients({**cotangents, name: None})

    return gradients


def _variant(**flags: Any) -> type[_Dense]:
    return type("Variant", (_Dense,), flags)


def _other_origin(arguments: Arguments) -> type[_Dense]:
    return _variant(origin_shift=1 if arguments.get("distance_origin", 1) == 0 else -1)


_WRONG = (
    (
        "span_not_renormalised",
        "the ramp multiplies finished softmax weights, which then sum to less than 1",
        {"renormalised": False},
    ),
    ("span_self_visible", "a query sees itself as its nearest key", {"self_visible": True}),
    ("span_ramp_unclipped", "the ramp goes on growing above 1 inside the span", {"clipped": False}),
    ("span_ramp_width", "the ramp is twice as wide", {"ramp_width": 2.0}),
    ("span_positions_reversed", "key_positions are read furthest key first", {"reversed_positions": True}),
    ("span_positions_unscaled", "the position term is not scaled", {"positions_scaled": False}),
    ("span_shared", "all heads use the largest head's span", {"shared_span": True}),
    ("span_slots_ramped", "persistent slots are weighted by the span too", {"ramped_slots": True}),
)

adaptive_span_mutations: tuple[Mutation, ...] = (
    Mutation(
        "span_origin",
        "distances are counted from the other origin",
        forward=lambda a: _forward(_other_origin(a), a),
        gradients=lambda a, c: _gradients(_other_origin(a), a, c),
    ),
    *(
        Mutation(
            name,
            says,
            forward=functools.partial(_forward, _variant(**flags)),
            gradients=functools.partial(_gradients, _variant(**flags)),
        )
        for name, says, flags in _WRONG
    ),
    Mutation(
        "span_ramp_grad",
        "the gradient of the span leaves out the far end of the ramp (an additive log ramp)",
        gradients=functools.partial(_gradients, _variant(additive=True)),
    ),
    Mutation(
        "span_ramp_grad",
        "the gradient of the span is exclusive at both ends of the ramp",
        gradients=functools.partial(_gradients, _variant(inclusive=False)),
    ),
    Mutation("dlse_ignored", "the cotangent of lse is not used", gradients=_no_cotangent("lse")),
    Mutation("dout_ignored", "the cotangent of the output is not used", gradients=_no_cotangent("output")),
)
