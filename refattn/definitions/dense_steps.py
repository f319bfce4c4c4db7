"""Softmax attention in small steps over whole matrices, so that a mistake can replace one of them.

:class:`Steps` is scaled dot-product attention with every shared option, in float64 NumPy, forward and backward; it shares
nothing with the fast path or with the definition, and it is right as it stands.  ``dense_mistakes`` derives the wrong ones.
"""

import math
import operator
from functools import reduce
from typing import Any

import numpy as np

from refattn.arrays import sum_to_shape
from refattn.records import Result

__all__ = ["Arguments", "Steps", "conjunction", "divide", "product", "transpose"]

Arguments = dict[str, Any]


class Steps:
    """One call in steps.  Axes as in the public function; k and v are kept per query head."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.storage = np.asarray(arguments["q"]).dtype
        q, k, v = (np.asarray(arguments[n], dtype=np.float64) for n in "qkv")
        self.lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        self.h, self.rows, self.d = q.shape[-3:]
        self.g, self.columns, self.e = *k.shape[-3:-1], v.shape[-1]
        self.whole = (*self.lead, self.h, self.rows, self.columns)
        self.tiled_heads = self.get("head_map") == "tile"
        heads = np.arange(self.h)
        head = heads % self.g if self.tiled_heads else heads // (self.h // self.g)
        self.q, self.k, self.v = q, k[..., head, :, :], v[..., head, :, :]
        self.scale = self.number("scale", self.d**-0.5 if self.d else 1.0)
        self.cap = self.number("softcap", None)
        self.i, self.j = np.arange(self.rows)[:, None], np.arange(self.columns)
        self.real_rows = self.per_batch(self.get("query_lengths"), self.rows)
        self.real_columns = self.per_batch(self.get("key_lengths"), self.columns)
        align = "upper_left" if self.get("align") is None else self.get("align")
        if isinstance(align, str):
            self.offset = self.real_columns - self.real_rows if align == "lower_right" else self.per_batch(0, 0)
        else:
            self.offset = self.per_batch(align, 0)
        self.ahead = self.j - self.i - self.offset  # how far key j lies ahead of the place of query i

    def get(self, name: str) -> Any:
        return self.arguments.get(name)

    def number(self, name: str, default: Any) -> Any:
        return default if self.get(name) is None else float(np.reshape(self.get(name), ()))

    def array(self, name: str) -> Any:
        """A floating option as an array, or None."""
        return None if self.get(name) is None else np.asarray(self.get(name), dtype=np.float64)

    def per_batch(self, value: Any, default: int) -> np.ndarray:
        """Ints per batch, laid out against (..., h, q, k)."""
        value = np.asarray(default if value is None else value)
        if value.ndim == 1 and value.size == math.prod(self.lead):
            value = value.reshape(self.lead)
        return np.broadcast_to(value, self.lead)[..., None, None, None]

    # ------------------------------------------------------------------ visibility

    def parts(self) -> dict[str, Any]:
        """What each option in use lets a row see; a pair is visible where all agree."""
        found: dict[str, Any] = {"query_lengths": self.i < self.real_rows}
        if self.get("key_lengths") is not None:
            found["key_lengths"] = self.j < self.real_columns
        if self.get("mask") is not None:
            found["mask"] = np.asarray(self.get("mask"))
        if self.get("pattern") is not None:
            pattern = self.get("pattern").fit(self.rows, self.columns, batch=self.lead, heads=self.h)
            b = np.arange(math.prod(self.lead)).reshape(*self.lead, 1, 1, 1)
            h = np.arange(self.h)[:, None, None]
            found["pattern"] = pattern.visible(self.i, self.j, q=self.rows, k=self.columns, b=b, h=h)
        if self.get("causal"):
            found["causal"] = self.ahead <= 0
        if self.get("window") is not None:
            found["window"] = self.within(*self.get("window"))
        if self.get("query_segments") is not None:
            queries, keys = (np.asarray(self.get(f"{n}_segments"))[..., None, :] for n in ("query", "key"))
            found["segments"] = queries[..., :, None] == keys[..., None, :]
        return found

    def within(self, left: int | None, right: int | None) -> np.ndarray:
        seen = np.ones(self.ahead.shape, dtype=bool)
        if left is not None:
            seen &= self.ahead >= -left
        if right is not None:
            seen &= self.ahead <= right
        return seen

    def visible(self) -> Any:
        return conjunction(self.parts())

    # ------------------------------------------------------------------ forward

    def forward(self) -> Result:
        seen = self.visible()
        self.dot = self.dots()
        self.raw = self.scale * self.dot
        scaled = self.modified()
        self.hidden = np.zeros(self.whole, dtype=bool)  # by -inf, before any cap
        if self.get("score_mod") is not None:
            self.hidden |= scaled == -np.inf
        added = np.zeros(self.whole)
        bias = self.array("bias")
        if bias is not None:
            added = added + bias
            self.hidden |= bias == -np.inf
        slopes = self.array("alibi_slopes")
        if slopes is not None:
            added = added - slopes[:, None, None] * self.distance()
        self.seen = np.broadcast_to(seen, self.whole) & ~self.hidden
        self.real = np.broadcast_to((self.i < self.real_rows)[..., :1], (*self.whole[:-1], 1))

        self.cap_last = bool(self.get("softcap_after_bias"))
        self.inside = scaled + added if self.cap_last else scaled
        self.outside = np.zeros(self.whole) if self.cap_last else added  # what is added after the cap
        self.logits = (self.inside if self.cap is None else self.capped()) + self.outside
        self.faced = self.masked()

        sinks = np.zeros((self.h, 0)) if self.get("sinks") is None else self.array("sinks").reshape(self.h, -1)
        self.sinks = np.broadcast_to(sinks[:, None, :], (*self.whole[:-1], sinks.shape[-1]))
        top = self.maximum()
        self.shift = np.where(np.isneginf(top), 0.0, top)
        self.p, self.s = self.exponentials()
        self.total = self.row_sum()
        self.weights = np.where(self.real, self.normalized(), 0.0)
        keep = self.get("dropout_mask")
        self.keep = (
            np.ones(self.whole) if keep is None else np.broadcast_to(np.asarray(keep, dtype=np.float64), self.whole)
        )
        self.rate = float(self.get("dropout_rate") or 0.0)
        self.kept = self.keep / (1 - self.rate)
        self.output = self.contracted()
        self.full_lse = self.shift + np.log(self.total)
        self.lse = np.where(self.real, self.log_sum(), -np.inf)[..., 0]
        return Result(output=self.output, lse=self.stored_lse())

    def dots(self) -> np.ndarray:
        return self.q @ transpose(self.k)

    def modified(self) -> np.ndarray:
        score_mod = self.get("score_mod")
        return self.raw if score_mod is None else np.asarray(score_mod(self.raw, *self.indices()), dtype=np.float64)

    def indices(self) -> tuple[np.ndarray, ...]:
        b = np.arange(math.prod(self.lead)).reshape(*self.lead, 1, 1, 1)
        at = (b, np.arange(self.h)[:, None, None], self.i, self.j)
        return tuple(np.broadcast_to(n, self.whole) for n in at)

    def distance(self) -> np.ndarray:
        return np.abs(self.ahead)

    def capped(self) -> np.ndarray:
        return self.cap * np.tanh(self.inside / self.cap)

    def masked(self) -> np.ndarray:
        return np.where(self.seen, self.logits, -np.inf)

    def maximum(self) -> np.ndarray:
        top = self.faced.max(-1, keepdims=True, initial=-np.inf)
        return np.maximum(top, self.sinks.max(-1, keepdims=True, initial=-np.inf))

    def exponentials(self) -> tuple[np.ndarray, np.ndarray]:
        return np.exp(self.faced - self.shift), np.exp(self.sinks - self.shift)

    def row_sum(self) -> np.ndarray:
        return self.p.sum(-1, keepdims=True) + self.s.sum(-1, keepdims=True)

    def normalized(self) -> np.ndarray:
        return divide(self.p, self.total)

    def contracted(self) -> np.ndarray:
        return product(self.weights * self.kept, self.v, self.seen | (self.weights != 0))

    def log_sum(self) -> np.ndarray:
        if self.get("lse_includes_sinks") is False:
            return self.shift + np.log(self.p.sum(-1, keepdims=True))
        return self.full_lse

    def stored_lse(self) -> np.ndarray:
        return self.lse

    # ------------------------------------------------------------------ backward

    def backward(self, cotangents: Arguments) -> dict[str, np.ndarray]:
        d_output, d_lse = self.cotangents(*(cotangents.get(n) for n in ("output", "lse")))
        weights = self.recomputed()
        kept = self.kept_again()
        touched = self.seen | np.isnan(weights)
        d_weights = np.where(touched, self.value_cotangent(d_output) @ transpose(self.v), 0.0)
        self.delta = np.where(self.real, (d_output * self.output).sum(-1, keepdims=True), 0.0)
        d_logits = self.softmax_pull(weights, kept, d_weights, d_output)
        lse = self.lse[..., None]
        share = weights if self.get("lse_includes_sinks") is not False else np.exp(self.faced - lse)
        d_logits = np.where(touched, d_logits + np.where(np.isneginf(lse), 0.0, share) * d_lse, 0.0)

        found: dict[str, Any] = {}
        d_inside = d_logits
        if self.cap is not None:
            x = self.inside / self.cap
            found["softcap"] = np.where(touched, d_logits * (np.tanh(x) - x * (1 - np.tanh(x) ** 2)), 0.0)
            d_inside = np.where(touched, d_logits * self.bend(), 0.0)
        d_added = d_inside if self.cap_last and self.cap is not None else d_logits
        if self.get("alibi_slopes") is not None:
            found["alibi_slopes"] = -np.moveaxis(d_added * self.distance(), -3, -1)
        if self.get("bias") is not None:
            found["bias"] = self.bias_pull(d_added, self.array("bias").shape)
        if self.get("score_mod") is not None:
            d_inside = np.where(touched, d_inside * _slope(self.get("score_mod"), self.raw, self.indices()), 0.0)
        found["scale"] = np.where(touched, d_inside * self.dot, 0.0)
        d_dot = d_inside * self.scale_again()
        found["q"] = self.pull_q(d_dot, touched)
        found["k"] = self.over_group(self.pull_k(d_dot, touched))
        found["v"] = self.over_group(self.pull_v(weights * kept, d_output, touched))
        if self.get("sinks") is not None:
            d_sinks = self.sinks_pull(self.s / self.total, 0.0 if self.get("lse_includes_sinks") is False else d_lse)
            d_sinks = np.where(self.real, d_sinks, 0.0).reshape(-1, self.h, self.rows, self.sinks.shape[-1]).sum((0, 2))
            found["sinks"] = d_sinks.reshape(np.shape(self.get("sinks")))
        for name in {"softcap", "scale"} & set(found):
            found[name] = np.asarray(found[name].sum())
        return {n: sum_to_shape(x, np.shape(self.get(n))) for n, x in found.items() if self.get(n) is not None}

    def cotangents(self, d_output: Any, d_lse: Any) -> tuple[np.ndarray, np.ndarray]:
        d_output = np.zeros(self.output.shape) if d_output is None else np.asarray(d_output, dtype=np.float64)
        d_lse = np.zeros(self.lse.shape) if d_lse is None else np.asarray(d_lse, dtype=np.float64)
        return d_output, d_lse[..., None]

    def recomputed(self) -> np.ndarray:
        """The weights as the backward sees them; it may change ``seen`` too."""
        return self.weights

    def kept_again(self) -> np.ndarray:
        return self.kept

    def value_cotangent(self, d_output: np.ndarray) -> np.ndarray:
        return d_output

    def softmax_pull(
        self, weights: np.ndarray, kept: np.ndarray, d_weights: np.ndarray, d_output: np.ndarray
    ) -> np.ndarray:
        return weights * (kept * d_weights - self.delta)

    def bend(self) -> np.ndarray:
        return 1 - np.tanh(self.inside / self.cap) ** 2

    def scale_again(self) -> float:
        return self.scale

    def bias_pull(self, d_added: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return sum_to_shape(d_added, shape)

    def sinks_pull(self, probability: np.ndarray, d_lse: Any) -> np.ndarray:
        return probability * (d_lse - self.delta)

    def pull_q(self, d_dot: np.ndarray, touched: np.ndarray) -> np.ndarray:
        return product(d_dot, self.k, touched)

    def pull_k(self, d_dot: np.ndarray, touched: np.ndarray) -> np.ndarray:
        return product(transpose(d_dot), self.q, transpose(touched))

    def pull_v(self, used: np.ndarray, d_output: np.ndarray, touched: np.ndarray) -> np.ndarray:
        return product(transpose(used), d_output, transpose(touched))

    def by_group(self, x: np.ndarray, tiled: bool) -> np.ndarray:
        """(..., h, k, d) -> (r, ..., g, k, d): the r query heads of each key head."""
        r = self.h // self.g
        x = x.reshape(*x.shape[:-3], *((r, self.g) if tiled else (self.g, r)), *x.shape[-2:])
        return np.moveaxis(x, -4 if tiled else -3, 0)

    def over_group(self, x: np.ndarray) -> np.ndarray:
        return self.by_group(x, self.tiled_heads).sum(0)


def transpose(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


def conjunction(parts: dict[str, Any]) -> Any:
    return reduce(operator.and_, parts.values())


def divide(p: np.ndarray, total: np.ndarray) -> np.ndarray:
    """p / total, and 0 in rows without any mass."""
    return np.where(total == 0, 0.0, p / np.where(total == 0, 1.0, total))


def product(weights: np.ndarray, values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """``weights @ values`` over the pairs of ``seen``: 0 times NaN does not enter."""
    if np.isfinite(values).all():
        return weights @ values
    return np.where(seen[..., None], weights[..., None] * values[..., None, :, :], 0.0).sum(-2)


def _slope(score_mod: Any, logits: np.ndarray, at: tuple[np.ndarray, ...]) -> np.ndarray:
    """Derivative of a score_mod: its own, else complex step."""
    derivative = getattr(score_mod, "derivative", None)
    if derivative is not None:
        return np.asarray(derivative(logits, *at), dtype=np.float64)
    return np.imag(score_mod(logits + 1e-30j, *at)) / 1e-30
