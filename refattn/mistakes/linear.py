"""The ways people get linear attention wrong, each as the numbers that the mistake gives.

:class:`Steps` writes linear attention down once more with its whole (q, k) matrix of weights, in float64, in steps that a
mistake replaces.  It is right as it stands and shares nothing with the mechanism.
"""

from typing import Any

import numpy as np

from refattn.arrays import sum_to_shape
from refattn.records import Mutation, Result

__all__ = ["linear_mutations"]

Arguments = dict[str, Any]


class Steps:
    """One call on float64 arrays."""

    def __init__(self, arguments: Arguments) -> None:
        a = self.a = arguments
        own = {"q": 3, "k": 3, "v": 3, "state": 3, "normalizer": 2}
        given = {n: np.asarray(a[n], np.float64) for n in own if a.get(n) is not None}
        self.lead = np.broadcast_shapes(*(x.shape[: x.ndim - own[n]] for n, x in given.items()))
        self.q, self.k, self.v = (given[n] for n in "qkv")
        self.d, self.n_q, self.n_k = self.q.shape[-1], self.q.shape[-2], self.k.shape[-2]
        heads = (*self.lead, self.q.shape[-3])
        self.start = given.get("state", np.zeros((*heads, self.d, self.v.shape[-1])))
        self.start_sum = given.get("normalizer", np.zeros((*heads, self.d)))
        scale = a.get("scale")
        self.scale = (self.d**-0.5 if self.d else 1.0) if scale is None else float(np.reshape(scale, ()))
        self.eps = a.get("normalize_eps", 0.0)
        self.normalize = a.get("normalize", True)

    # ------------------------------------------------------------ steps that mistakes replace

    def features(self, x: np.ndarray) -> np.ndarray:
        if self.a.get("feature_map", "elu") == "identity":
            return x
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    def slope(self, x: np.ndarray) -> np.ndarray:
        if self.a.get("feature_map", "elu") == "identity":
            return np.ones_like(x)
        return np.exp(np.minimum(x, 0))

    def ordered(self) -> np.ndarray:
        """(q, k) bool: what causal lets through."""
        if not self.a.get("causal", False):
            return np.ones((self.n_q, self.n_k), bool)
        return np.arange(self.n_q)[:, None] >= np.arange(self.n_k)

    def real(self) -> np.ndarray:
        """(..., 1, 1, k) bool: keys within the lengths."""
        lengths = self.a.get("key_lengths")
        if lengths is None:
            return np.ones((1, 1, self.n_k), bool)
        lengths = np.asarray(lengths)
        lengths = lengths.reshape(self.lead if lengths.size > 1 else ())
        return np.arange(self.n_k) < lengths[..., None, None, None]

    def divided(self, total: np.ndarray, divisor: np.ndarray) -> np.ndarray:
        empty = divisor == 0
        return np.where(empty, 0.0, total / np.where(empty, 1.0, divisor))

    def divisor(self) -> np.ndarray:
        """(..., q, 1)"""
        return (self.weights.sum(-1) + np.einsum("...qd,...d->...q", self.f, self.start_sum) + self.eps)[..., None]

    # ------------------------------------------------------------ the computation

    def forward(self) -> Result:
        self.phi_q, self.phi_k = self.features(self.q), self.features(self.k)
        self.f = self.scale * self.phi_q
        self.seen = self.ordered() & self.real()
        real_rows = np.swapaxes(self.real(), -1, -2)
        self.keys, self.values = np.where(real_rows, self.phi_k, 0.0), np.where(real_rows, self.v, 0.0)
        self.weights = np.where(self.seen, self.f @ np.swapaxes(self.keys, -1, -2), 0.0)
        total = self.weights @ self.values + self.f @ self.start
        self.sum = self.divisor()
        self.output = self.divided(total, self.sum) if self.normalize else total
        return Result(
            output=self.output,
            state=np.swapaxes(self.keys, -1, -2) @ self.values + self.start,
            normalizer=self.keys.sum(-2) + self.start_sum,
        )

    def backward(self, cotangents: dict[str, Any]) -> dict[str, np.ndarray]:
        zero = {"output": self.output, "state": self.start, "normalizer": self.start_sum}
        d_y, d_state, d_sum = (
            np.zeros_like(x) if cotangents.get(n) is None else np.asarray(cotangents[n], np.float64)
            for n, x in zero.items()
        )
        d_total = self.divided(d_y, self.sum) if self.normalize else d_y
        d_divisor = self.d_divisor(d_y, d_total)
        d_weights, d_f, d_keys = self.through_the_sum(d_divisor)
        d_weights = np.where(self.seen, d_weights + d_total @ np.swapaxes(self.values, -1, -2), 0.0)
        d_f = d_f + d_weights @ self.keys + d_total @ np.swapaxes(self.start, -1, -2)
        d_k = d_keys + np.swapaxes(d_weights, -1, -2) @ self.f + self.values @ np.swapaxes(d_state, -1, -2)
        d_k = d_k + d_sum[..., None, :]
        d_v = np.swapaxes(self.weights, -1, -2) @ d_total + self.keys @ d_state
        real_rows = np.swapaxes(self.real(), -1, -2)
        found = {
            "q": self.scale * d_f * self.slope(self.q),
            "k": np.where(real_rows, d_k, 0.0) * self.slope(self.k),
            "v": np.where(real_rows, d_v, 0.0),
            "scale": np.sum(d_f * self.phi_q),
            "state": np.swapaxes(self.f, -1, -2) @ d_total + d_state,
            "normalizer": np.sum(self.f * d_divisor, axis=-2) + d_sum,
        }
        return {n: sum_to_shape(g, np.shape(self.a[n])) for n, g in found.items() if self.a.get(n) is not None}

    def d_divisor(self, d_y: np.ndarray, d_total: np.ndarray) -> np.ndarray:
        """(..., q, 1): the cotangent of the sum of weights."""
        d = -np.sum(d_total * self.output, axis=-1, keepdims=True)
        return d if self.normalize else np.zeros_like(d)

    def through_the_sum(self, d_divisor: np.ndarray) -> tuple[Any, Any, Any]:
        """What it adds to the cotangents of weights, of f and of the keys' features."""
        return d_divisor, d_divisor * self.start_sum[..., None, :], 0.0


# ------------------------------------------------------------------------------------------------ mistakes


class _Multiplies(Steps):
    def divided(self, total: np.ndarray, divisor: np.ndarray) -> np.ndarray:
        return total * divisor

    def forward(self) -> Result:
        result = super().forward()
        self.total = self.weights @ self.values + self.f @ self.start
        return result

    def d_divisor(self, d_y: np.ndarray, d_total: np.ndarray) -> np.ndarray:
        d = np.sum(d_y * self.total, axis=-1, keepdims=True)
        return d if self.normalize else np.zeros_like(d)


class _FinalSum(Steps):
    """The sum over all keys stands under every row."""

    def every(self) -> np.ndarray:
        return (self.keys.sum(-2) + self.start_sum)[..., None, :]

    def divisor(self) -> np.ndarray:
        return np.sum(self.f * self.every(), axis=-1, keepdims=True) + self.eps

    def through_the_sum(self, d_divisor: np.ndarray) -> tuple[Any, Any, Any]:
        return 0.0, d_divisor * self.every(), np.sum(d_divisor * self.f, axis=-2, keepdims=True)


class _NoEps(Steps):
    def divisor(self) -> np.ndarray:
        return super().divisor() - self.eps


class _Everything(Steps):
    def ordered(self) -> np.ndarray:
        return np.ones((self.n_q, self.n_k), bool)


class _Strict(Steps):
    def ordered(self) -> np.ndarray:
        seen = super().ordered()
        return seen if seen.all() else seen & ~np.eye(self.n_q, self.n_k, dtype=bool)


class _WholeChunks(Steps):
    """The keys of the query's own piece are all visible."""

    def ordered(self) -> np.ndarray:
        seen = super().ordered()
        size = min(16, max(2, self.n_k // 2))
        return seen | (np.arange(self.n_q)[:, None] // size == np.arange(self.n_k) // size)


class _EarlierChunks(Steps):
    """A query reads the state before its own piece, and nothing of the piece."""

    def ordered(self) -> np.ndarray:
        seen = super().ordered()
        size = min(16, max(2, self.n_k // 2))
        return seen if seen.all() else seen & (np.arange(self.n_q)[:, None] // size > np.arange(self.n_k) // size)


class _Padding(Steps):
    def real(self) -> np.ndarray:
        return np.ones((1, 1, self.n_k), bool)


class _NoState(Steps):
    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.start = np.zeros_like(self.start)


class _NoStartSum(Steps):
    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.start_sum = np.zeros_like(self.start_sum)


class _NoScale(Steps):
    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.scale = 1.0


class _Elu(Steps):
    def features(self, x: np.ndarray) -> np.ndarray:
        return super().features(x) - (self.a.get("feature_map", "elu") == "elu")


class _Relu(Steps):
    def features(self, x: np.ndarray) -> np.ndarray:
        return x if self.a.get("feature_map", "elu") == "identity" else np.maximum(x, 0.0)

    def slope(self, x: np.ndarray) -> np.ndarray:
        return np.ones_like(x) if self.a.get("feature_map", "elu") == "identity" else 1.0 * (x > 0)


class _FlatSlope(Steps):
    def slope(self, x: np.ndarray) -> np.ndarray:
        return np.ones_like(x)


class _ConstantSum(Steps):
    def d_divisor(self, d_y: np.ndarray, d_total: np.ndarray) -> np.ndarray:
        return np.zeros_like(super().d_divisor(d_y, d_total))


class _NoStateCotangent(Steps):
    def backward(self, cotangents: dict[str, Any]) -> dict[str, np.ndarray]:
        return super().backward({"output": cotangents.get("output")})


class _NoOutputCotangent(Steps):
    def backward(self, cotangents: dict[str, Any]) -> dict[str, np.ndarray]:
        return super().backward({**cotangents, "output": np.ones_like(self.output)})


def _differ(right: Any, wrong: Any) -> bool:
    return any(not np.allclose(right[n], wrong[n], rtol=1e-9, atol=1e-12, equal_nan=True) for n in wrong)


def _mistake(class_: str, says: str, wrong: type[Steps], *, forward: bool = True) -> Mutation:
    def mistaken_forward(arguments: Arguments) -> Result | None:
        with np.errstate(all="ignore"):
            result, right = wrong(arguments).forward(), Steps(arguments).forward()
        return result if _differ(right.fields, result.fields) else None

    def gradients(arguments: Arguments, cotangents: dict[str, Any]) -> dict[str, Any] | None:
        with np.errstate(all="ignore"):
            mistaken, right = wrong(arguments), Steps(arguments)
            mistaken.forward(), right.forward()
            found, expected = mistaken.backward(cotangents), right.backward(cotangents)
        return found if _differ(expected, found) else None

    return Mutation(class_, says, forward=mistaken_forward if forward else None, gradients=gradients)


linear_mutations: tuple[Mutation, ...] = (
    _mistake("norm_recip", "values are multiplied by the sum of weights in place of its inverse", _Multiplies),
    _mistake("norm_future", "causal rows are divided by the sum over all keys", _FinalSum),
    _mistake("eps_drop", "the constant of the divisor is left out", _NoEps),
    _mistake("causal_drop", "all keys are seen", _Everything),
    _mistake("causal_strict", "the query's own key is not seen", _Strict),
    _mistake("chunk_vs_recurrent", "the keys of the query's own chunk are all seen", _WholeChunks),
    _mistake("chunk_vs_recurrent", "of its own chunk a query sees nothing", _EarlierChunks),
    _mistake("tail_unmasked", "padded keys enter the state", _Padding),
    _mistake("state_drop", "the initial state is not used", _NoState),
    _mistake("state_drop", "the initial normalizer is not used", _NoStartSum),
    _mistake("no_scale", "queries are not scaled", _NoScale),
    _mistake("feature_offset", "elu without the 1 added", _Elu),
    _mistake("feature_relu", "relu features", _Relu),
    _mistake("feature_grad", "the slope of the features is taken as 1", _FlatSlope, forward=False),
    _mistake("delta_missing", "the sum of weights counts as a constant in the backward", _ConstantSum, forward=False),
    _mistake("state_cotangent", "cotangents of the final state are ignored", _NoStateCotangent, forward=False),
    _mistake("dout_ignored", "the cotangent of the output is taken as 1", _NoOutputCotangent, forward=False),
)
