"""The ways people get Transformer-XL attention wrong, each as the numbers that the mistake gives.

:class:`Relative` writes the attention down once more, densely and in float64, in steps that a mistake replaces.  The shift
from table rows to keys is a table of places in the line of all (query, row) scores, so that a wrong slice or a value of the
next query's row is just another table.  Mistakes of softmax attention in general come from ``dense_mistakes``.
"""

from collections.abc import Collection
from typing import Any

import numpy as np

from refattn.mistakes.dense_old import mutations_for
from refattn.records import Mutation, Result

__all__ = ["Relative", "differ", "transformer_xl_mutations"]

Arguments = dict[str, Any]


def differ(right: Any, wrong: Any) -> bool:
    """Whether any array common to two sets of results differs by more than rounding."""
    for name in wrong:
        a, b = np.asarray(right[name]), np.asarray(wrong[name])
        if a.shape != b.shape or not np.allclose(
            a, b, rtol=0, atol=1e-9 * max(1.0, np.abs(a[np.isfinite(a)]).max(initial=0))
        ):
            return True
    return False


class Relative:
    """Transformer-XL attention on float64 arrays; ``r`` may be None."""

    scaled_positions = True

    def __init__(self, arguments: Arguments) -> None:
        a = self.a = arguments
        self.lead = np.broadcast_shapes(*(np.shape(a[n])[:-3] for n in ("q", "k", "v", "r") if a.get(n) is not None))
        self.q, self.k, self.v, self.r = (self.full(a.get(n)) for n in ("q", "k", "v", "r"))
        (self.h, self.n_q, self.d), self.n_k = self.q.shape[-3:], self.k.shape[-2]
        self.causal = a.get("causal", True)
        places = a.get("key_places")
        self.places = np.arange(self.n_k) if places is None else np.asarray(places)
        span = int(self.places[-1]) + 1 if self.n_k else 0
        self.n_p = span if self.causal else span + self.n_q
        scale = a.get("scale")
        self.scale = (self.d**-0.5 if self.d else 1.0) if scale is None else float(np.reshape(scale, ()))
        zero = np.zeros((self.h, self.d))
        self.u, self.w = (zero if a.get(n) is None else np.asarray(a[n], np.float64) for n in ("u", "w"))
        scalars = a.get("position_bias")
        self.scalars = np.zeros((self.h, self.n_p)) if scalars is None else np.asarray(scalars, np.float64)

    def full(self, x: Any) -> Any:
        return None if x is None else np.broadcast_to(np.asarray(x, np.float64), (*self.lead, *np.shape(x)[-3:]))

    # ------------------------------------------------------------ steps that mistakes replace

    def rows(self) -> np.ndarray:
        """Table row of every pair (q, k)."""
        return self.places[None, :] + (self.n_q - 1 if self.causal else self.n_q) - np.arange(self.n_q)[:, None]

    def line(self) -> np.ndarray:
        """Place of every pair in the line of the (query, row) scores; -1 reads 0."""
        row = self.rows()
        place = np.arange(self.n_q)[:, None] * self.n_p + row
        return np.where((row >= 0) & (row < self.n_p), place, -1)

    def biases(self) -> tuple[str, str]:
        """Which bias meets the keys, which the positions."""
        return "u", "w"

    def most(self) -> int | None:
        """Keys seen under same_length."""
        n = self.a.get("same_length", False)
        return None if n is False else self.n_k - self.n_q if n is True else n

    def older(self) -> np.ndarray:
        """How far key j lies behind query i, in keys."""
        return np.arange(self.n_q)[:, None] + (self.n_k - self.n_q) - np.arange(self.n_k)[None, :]

    def order(self) -> np.ndarray:
        """Order in which keys and values are read."""
        return np.arange(self.n_k)

    # ------------------------------------------------------------ the computation

    def forward(self) -> Result:
        content, position = self.biases()
        order = self.order()
        self.keys, self.values = self.k[..., order, :], self.v[..., order, :]
        self.q_content, self.q_position = (self.q + getattr(self, n)[:, None, :] for n in (content, position))
        content_logits = self.q_content @ np.swapaxes(self.keys, -1, -2)
        table = self.scalars[:, None, :] + np.zeros((*self.lead, self.h, self.n_q, self.n_p))
        if self.r is not None:
            table = table + self.q_position @ np.swapaxes(self.r, -1, -2)
        self.place = self.line()
        flat = np.concatenate([table.reshape(*self.lead, self.h, -1), np.zeros((*self.lead, self.h, 1))], axis=-1)
        position_logits = flat[..., self.place]
        self.position_logits = (self.scale if self.scaled_positions else 1.0) * position_logits
        self.unscaled = content_logits + (position_logits if self.scaled_positions else 0.0)
        logits = self.scale * content_logits + self.position_logits
        bias, mask = self.a.get("bias"), self.a.get("mask")
        seen = np.ones((self.n_q, self.n_k), bool)
        if self.causal:
            seen &= self.older() >= 0
        if self.most() is not None:
            seen &= self.older() < self.most()
        seen = np.broadcast_to(seen, logits.shape)
        if bias is not None:
            bias = np.asarray(bias, np.float64)
            seen = seen & (bias != -np.inf)
            logits = logits + np.where(bias == -np.inf, 0.0, bias)
        seen = seen if mask is None else seen & mask
        top = np.max(np.where(seen, logits, -np.inf), axis=-1, keepdims=True, initial=-np.inf)
        top = np.where(np.isfinite(top), top, 0.0)
        weights = np.where(seen, np.exp(np.where(seen, logits, 0.0) - top), 0.0)
        total = weights.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            self.lse = np.where(total > 0, np.log(total) + top, -np.inf)[..., 0]
        self.weights = weights / np.where(total > 0, total, 1.0)
        self.output = self.weights @ self.values
        return Result(output=self.output, lse=self.lse)

    def backward(self, cotangents: Arguments) -> dict[str, np.ndarray]:
        """Gradients of what ``forward`` computed, under the names of the arguments."""
        d_output, d_lse = cotangents.get("output"), cotangents.get("lse")
        d_output = np.zeros_like(self.output) if d_output is None else np.asarray(d_output, np.float64)
        delta = (d_output * self.output).sum(-1, keepdims=True)
        if d_lse is not None:
            delta = delta - np.asarray(d_lse, np.float64)[..., None]
        d_s = self.weights * (d_output @ np.swapaxes(self.values, -1, -2) - delta)
        order, scale = self.order(), self.scale
        d_k, d_v = np.zeros_like(self.keys), np.zeros_like(self.values)
        d_k[..., order, :] = scale * np.swapaxes(d_s, -1, -2) @ self.q_content
        d_v[..., order, :] = np.swapaxes(self.weights, -1, -2) @ d_output
        d_content = scale * d_s @ self.keys
        d_table = self.to_rows((self.scale if self.scaled_positions else 1.0) * d_s)
        content, position = self.biases()
        found = {"k": d_k, "v": d_v, content: d_content, "position_bias": d_table.sum(-2)}
        found["q"] = d_content
        if self.r is not None:
            d_position = d_table @ self.r
            found.update({position: d_position, "r": np.swapaxes(d_table, -1, -2) @ self.q_position})
            found["q"] = d_content + d_position
        self.whole_query = found["q"]
        for name in ("u", "w"):
            if name in found:
                found[name] = found[name].sum(-2)
        if self.a.get("bias") is not None:
            found["bias"] = d_s
        if self.a.get("scale") is not None:
            found["scale"] = (d_s * self.unscaled).sum()
        given = {n: np.shape(x) for n, x in self.a.items() if n in found and x is not None}
        return {n: _summed(found[n], shape) for n, shape in given.items()}

    def to_rows(self, d: np.ndarray) -> np.ndarray:
        """Cotangents of the pairs added up at the (query, row) scores they were read from."""
        batch = d.reshape(-1, self.n_q * self.n_k)
        flat = np.zeros((batch.shape[0], self.n_q * self.n_p + 1))
        for n, row in enumerate(batch):
            np.add.at(flat[n], self.place.reshape(-1), row)
        return flat[:, :-1].reshape(*self.lead, self.h, self.n_q, self.n_p)


def _summed(g: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    g = g.sum(tuple(range(g.ndim - len(shape))))
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and g.shape[i] != 1)
    return g.sum(axes, keepdims=True) if axes else g


# ---------------------------------------------------------------------- mistakes


def _mistake(
    class_: str, says: str, wrong: type, *, gradients_only: bool = False, without: Collection[str] = ()
) -> Mutation:
    """A Mutation from a class with replaced steps.  Gradients of names in ``without`` are not given."""

    def usable(a: Arguments) -> bool:
        return a.get("absolute_q") is None and np.size(a["q"]) > 0 and np.size(a["k"]) > 0

    def forward(a: Arguments) -> Result | None:
        if not usable(a):
            return None
        right, found = Relative(a).forward(), wrong(a).forward()
        return found if differ(right.fields, found.fields) else None

    def gradients(a: Arguments, cotangents: Arguments) -> dict[str, Any] | None:
        if not usable(a):
            return None
        pair = Relative(a), wrong(a)
        for one in pair:
            one.forward()
        right, found = (one.backward(cotangents) for one in pair)
        found = {n: g for n, g in found.items() if n not in without}
        return found if differ(right, found) else None

    return Mutation(class_, says, forward=None if gradients_only else forward, gradients=gradients)


class _ShiftSlice(Relative):
    """A zero column in front, read as rows of one more, the last row dropped in place of the first."""

    def line(self) -> np.ndarray:
        if not self.causal or self.n_p != self.n_k:
            return super().line()
        line = np.arange(self.n_q * (self.n_k + 1)).reshape(self.n_k + 1, self.n_q)[:-1].reshape(self.n_q, self.n_k)
        return _without_zero_column(line, self.n_k)


class _ShiftLeak(Relative):
    """The causal shift of k rows where both directions are seen: beyond its edge stand the next query's scores."""

    def line(self) -> np.ndarray:
        if self.causal or self.n_p != self.n_k + self.n_q:
            return super().line()
        line = np.arange(self.n_q * (self.n_k + 1)).reshape(self.n_k + 1, self.n_q)[1:].reshape(self.n_q, self.n_k)
        place = _without_zero_column(line, self.n_k)
        query, row = np.divmod(place, self.n_k)
        return np.where(place < 0, -1, query * self.n_p + row + 1)  # row 1 of the long table is distance k - 1


def _without_zero_column(line: np.ndarray, n: int) -> np.ndarray:
    """Places in rows of n + 1 with a zero first, as places in rows of n; -1 for the zero."""
    query, row = np.divmod(line, n + 1)
    return np.where(row == 0, -1, query * n + row - 1)


class _ShiftMissing(Relative):
    def rows(self) -> np.ndarray:
        return np.broadcast_to(self.places[None, :], (self.n_q, self.n_k))


class _Ascending(Relative):
    def rows(self) -> np.ndarray:
        return self.n_p - 1 - super().rows()


class _DistanceOffBy1(Relative):
    def rows(self) -> np.ndarray:
        return super().rows() - 1


class _OffsetMissing(Relative):
    """Distances counted as if the segment stood at key 0."""

    def rows(self) -> np.ndarray:
        return super().rows() + (self.n_k - self.n_q)


class _Swapped(Relative):
    def biases(self) -> tuple[str, str]:
        return "w", "u"


class _OneBias(Relative):
    def biases(self) -> tuple[str, str]:
        return "u", "u"


class _PositionUnscaled(Relative):
    scaled_positions = False


class _MemoryLast(Relative):
    def order(self) -> np.ndarray:
        return np.roll(np.arange(self.n_k), self.n_q)  # the segment's keys first


class _OneMore(Relative):
    def most(self) -> int | None:
        n = super().most()
        return None if n is None else n + 1


class _SameLengthIgnored(Relative):
    def most(self) -> int | None:
        return None


class _CausalUpperLeft(Relative):
    def older(self) -> np.ndarray:
        return super().older() - (self.n_k - self.n_q)


class _MemoryDetached(Relative):
    def backward(self, cotangents: Arguments) -> dict[str, np.ndarray]:
        found = super().backward(cotangents)
        for name in ("k", "v"):
            found[name] = found[name].copy()
            found[name][..., : self.n_k - self.n_q, :] = 0.0
        return found


class _AdjointUnshifted(Relative):
    def to_rows(self, d: np.ndarray) -> np.ndarray:
        found = np.zeros((*d.shape[:-1], self.n_p))
        n = min(self.n_p, self.n_k)
        found[..., :n] = d[..., :n]
        return found


class _TableWithoutBias(Relative):
    def backward(self, cotangents: Arguments) -> dict[str, np.ndarray]:
        self.q_position = self.q
        return super().backward(cotangents)


class _BiasTotals(Relative):
    def backward(self, cotangents: Arguments) -> dict[str, np.ndarray]:
        found = super().backward(cotangents)
        total = _summed(self.whole_query, (self.h, 1, self.d))[:, 0]
        return {n: total if n in ("u", "w") else g for n, g in found.items()}


def _as_softmax(a: Arguments) -> Arguments | None:
    """The same attention as scaled dot-product attention with a bias."""
    if a.get("absolute_q") is not None or not np.size(a["q"]) or not np.size(a["k"]):
        return None
    one = Relative(a)
    one.forward()
    bias = one.position_logits
    bias = bias if a.get("bias") is None else bias + a["bias"]
    found = {"q": one.q + one.u[:, None, :], "k": one.k, "v": one.v, "scale": one.scale, "bias": bias}
    if a.get("mask") is not None:
        found["mask"] = a["mask"]
    if one.causal:
        found.update(causal=True, align="lower_right")
    most = one.most()
    if most is not None:
        found.update(window=(most - 1, None))
    return found


_FOREIGN = (
    "alibi_drop", "alibi_geom", "alibi_nooffset", "alibi_off1", "alibi_signed", "bias_drop", "bias_nooffset", "bias_scaled",
    "cap_after_bias", "cap_after_mask", "cap_before_scale", "cap_drop", "cap_formula", "drop_ignored", "drop_rowsum",
    "drop_scale", "gqa_axis", "gqa_tile", "mask_stride", "pattern_drop", "score_mod_drop", "segments_wrong", "sink_drop",
    "sink_heads", "sink_lse", "sink_twice", "sink_unshifted", "window_drop", "window_edge", "window_plus1", "window_swapped",
)  # fmt: skip
"""Mistakes with options that are not here, or of the bias and window that positions and same_length turn into."""


def _same(arguments: Arguments, result: Result) -> Result:
    return result


_own: tuple[tuple[str, str, type, dict[str, Any]], ...] = (
    ("rel_shift_slice", "the shift drops the last row in place of the first", _ShiftSlice, {}),
    ("rel_shift_leak", "beyond the edge of the shift stand the next query's scores", _ShiftLeak, {}),
    ("rel_shift_missing", "scores by table row are added as if they were scores by key", _ShiftMissing, {}),
    ("xl_distance_order", "the table is read by rising distance", _Ascending, {}),
    ("xl_distance_off1", "every distance is one too large", _DistanceOffBy1, {}),
    ("xl_offset_missing", "distances leave out the length of the memory", _OffsetMissing, {}),
    ("xl_uw_swapped", "u meets the positions and w the keys", _Swapped, {}),
    ("xl_bias_shared", "u is added once, for keys and positions", _OneBias, {"without": ("u", "w")}),
    ("xl_position_unscaled", "only the content part is scaled", _PositionUnscaled, {}),
    ("memory_order", "the memory stands after the segment", _MemoryLast, {}),
    ("xl_same_length_off1", "same_length shows one key more", _OneMore, {}),
    ("xl_same_length_ignored", "same_length is not applied", _SameLengthIgnored, {}),
    ("xl_causal_upper_left", "the causal diagonal starts at key 0", _CausalUpperLeft, {}),
    ("xl_memory_detached", "keys and values of the memory get no gradient", _MemoryDetached, {"gradients_only": True}),
    ("xl_shift_adjoint", "the gradient is not shifted back to table rows", _AdjointUnshifted, {"gradients_only": True}),
    ("xl_table_gradient", "dr leaves out w", _TableWithoutBias, {"gradients_only": True}),
    ("xl_bias_gradient", "du and dw are both the whole query cotangent", _BiasTotals, {"gradients_only": True}),
)

transformer_xl_mutations: tuple[Mutation, ...] = (
    *(_mistake(class_, says, wrong, **more) for class_, says, wrong, more in _own),
    *mutations_for(_as_softmax, finish=_same, exclude=_FOREIGN),
)
