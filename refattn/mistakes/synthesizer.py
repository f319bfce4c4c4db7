"""The ways people get the Synthesizer wrong, each as the numbers that the mistake gives.

:class:`Steps` writes the mechanism down once more in float64 NumPy, in steps that a mistake replaces.  It is right as it stands and
shares nothing with the mechanism.
"""

from typing import Any

import numpy as np

from refattn.arrays import sum_to_shape
from refattn.records import Mutation, Result

__all__ = ["synthesizer_mutations"]

Arguments = dict[str, Any]


def _t(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


def _softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    top = x.max(axis, keepdims=True)
    e = np.exp(x - np.where(np.isfinite(top), top, 0.0))
    total = e.sum(axis, keepdims=True)
    return e / np.where(total == 0, 1.0, total)


class Steps:
    """One call on float64 arrays."""

    axis = -1
    fixed: tuple[str, ...] = ()
    delta = slope = True

    def __init__(self, arguments: Arguments) -> None:
        self.given = arguments
        kinds = (np.ndarray, float)
        self.a = {n: np.asarray(x, np.float64) for n, x in arguments.items() if isinstance(x, kinds) and n != "mask"}

    # ------------------------------------------------------------ steps that mistakes replace

    def activation(self, x: np.ndarray) -> np.ndarray:
        return np.maximum(x, 0.0)

    def activation_slope(self, x: np.ndarray) -> np.ndarray:
        return 1.0 * (x > 0) if self.slope else np.ones_like(x)

    def outer(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return np.repeat(left, right.shape[-1], -1) * np.tile(right, left.shape[-1])

    def outer_backward(self, d: np.ndarray, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        d = d.reshape(*d.shape[:-1], left.shape[-1], right.shape[-1])
        return (d * right[..., None, :]).sum(-1), (d * left[..., :, None]).sum(-2)

    def table(self, x: np.ndarray) -> np.ndarray:
        return x

    def shares(self) -> np.ndarray:
        """(h or 1, s)"""
        return np.atleast_2d(_softmax(self.a["mixture"])) if "mixture" in self.a else np.ones((1, 1))

    def shares_backward(self, shares: np.ndarray, d: np.ndarray) -> np.ndarray:
        return shares * (d - (shares * d).sum(-1, keepdims=True))

    def ordered(self, n_q: int, n_k: int) -> np.ndarray:
        if not self.given.get("causal", False):
            return np.ones((n_q, n_k), bool)
        return np.arange(n_q)[:, None] >= np.arange(n_k)

    def weigh(self, parts: list[np.ndarray], shares: np.ndarray, seen: np.ndarray) -> np.ndarray:
        logits = sum(shares[:, s, None, None] * part for s, part in enumerate(parts))
        return np.where(seen, _softmax(np.where(seen, logits, -np.inf), self.axis), 0.0)

    # ------------------------------------------------------------ the computation

    def affine(self, x: np.ndarray, weight: str, bias: str) -> np.ndarray:
        return x @ self.a[weight] + (self.a[bias][:, None] if bias in self.a else 0.0)

    def forward(self) -> Result:
        a, self.parts = self.a, {}
        if "w_1" in a:
            self.before = self.affine(a["x"][..., None, :, :], "w_1", "b_1")
            self.hidden = self.activation(self.before)
        if "w_2" in a:
            self.parts["dense"] = self.affine(self.hidden, "w_2", "b_2")
        if "w_a" in a:
            self.left, self.right = self.affine(self.hidden, "w_a", "b_a"), self.affine(self.hidden, "w_b", "b_b")
            self.parts["factors"] = self.outer(self.left, self.right)
        if "random" in a:
            self.parts["random"] = self.table(a["random"])
        if "random_1" in a:
            self.parts["ranked"] = a["random_1"] @ _t(a["random_2"])
        if "other_logits" in a:
            self.parts["others"] = a["other_logits"]
        first = next(iter(self.parts.values()))
        mask = self.given.get("mask")
        self.seen = self.ordered(*first.shape[-2:]) & (True if mask is None else mask)
        self.alpha = self.shares()
        self.weights = self.weigh(list(self.parts.values()), self.alpha, self.seen)
        return Result(output=self.weights @ a["v"])

    def backward(self, d_output: np.ndarray) -> dict[str, np.ndarray]:
        a, w = self.a, self.weights
        found = {"v": _t(w) @ d_output}
        d_w = d_output @ _t(a["v"])
        d_logits = w * (d_w - (w * d_w).sum(-1, keepdims=True) * self.delta)
        d = {name: self.alpha[:, s, None, None] * d_logits for s, name in enumerate(self.parts)}
        if "mixture" in a:
            each = np.stack([(d_logits * part).sum((-1, -2)) for part in self.parts.values()], -1)
            d_alpha = sum_to_shape(each, self.alpha.shape)
            found["mixture"] = self.shares_backward(self.alpha, d_alpha)

        def linear(x: np.ndarray, d_y: np.ndarray, weight: str, bias: str) -> np.ndarray:
            found[weight] = sum_to_shape(_t(x) @ d_y, a[weight].shape)
            if bias in a:
                found[bias] = sum_to_shape(d_y.sum(-2), a[bias].shape)
            return d_y @ _t(a[weight])

        d_hidden: Any = 0.0
        if "dense" in d:
            d_hidden = d_hidden + linear(self.hidden, d["dense"], "w_2", "b_2")
        if "factors" in d:
            d_left, d_right = self.outer_backward(d["factors"], self.left, self.right)
            d_hidden = d_hidden + linear(self.hidden, d_left, "w_a", "b_a") + linear(self.hidden, d_right, "w_b", "b_b")
        if "w_1" in a:
            d_before = d_hidden * self.activation_slope(self.before)
            found["x"] = linear(a["x"][..., None, :, :], d_before, "w_1", "b_1").sum(-3)
        if "random" in d:
            found["random"] = self.table(sum_to_shape(d["random"], a["random"].shape))
        if "ranked" in d:
            table = sum_to_shape(d["ranked"], (*a["random_1"].shape[:-1], a["random_2"].shape[-2]))
            found["random_1"], found["random_2"] = table @ a["random_2"], _t(table) @ a["random_1"]
        if "others" in d:
            found["other_logits"] = d["others"]
        found = {
            n: sum_to_shape(np.broadcast_to(g, g.shape), x.shape)
            for n, x in a.items()
            if (g := found.get(n)) is not None
        }
        return {n: np.zeros_like(x) if n in self.fixed or n not in found else found[n] for n, x in a.items()}


# ------------------------------------------------------------------------------------------------ mistakes


class _Linear(Steps):
    def activation(self, x: np.ndarray) -> np.ndarray:
        return x

    def activation_slope(self, x: np.ndarray) -> np.ndarray:
        return np.ones_like(x)


class _NoBiases(Steps):
    def affine(self, x: np.ndarray, weight: str, bias: str) -> np.ndarray:
        return x @ self.a[weight]


class _OtherOrder(Steps):
    """The left factor runs fast, the right one slowly."""

    def outer(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return np.tile(left, right.shape[-1]) * np.repeat(right, left.shape[-1], -1)

    def outer_backward(self, d: np.ndarray, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        d_right, d_left = super().outer_backward(d, right, left)
        return d_left, d_right


class _BothTiled(Steps):
    """Both factors are tiled, so that some pairs of entries never meet."""

    def outer(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return np.tile(left, right.shape[-1]) * np.tile(right, left.shape[-1])


class _Transposed(Steps):
    def table(self, x: np.ndarray) -> np.ndarray:
        return _t(x) if x.shape[-1] == x.shape[-2] else x


class _MixedAfter(Steps):
    """The softmax of every part alone, then the mixture."""

    def weigh(self, parts: list[np.ndarray], shares: np.ndarray, seen: np.ndarray) -> np.ndarray:
        each = [np.where(seen, _softmax(np.where(seen, part, -np.inf)), 0.0) for part in parts]
        total = np.zeros(())
        for s, weights in enumerate(each):
            total = total + shares[:, s, None, None] * weights
        return total


class _PlainShares(Steps):
    """The numbers of the mixture are used as they are."""

    def shares(self) -> np.ndarray:
        return np.atleast_2d(self.a["mixture"]) if "mixture" in self.a else np.ones((1, 1))

    def shares_backward(self, shares: np.ndarray, d: np.ndarray) -> np.ndarray:
        return d


class _EqualShares(Steps):
    fixed = ("mixture",)

    def shares(self) -> np.ndarray:
        found = super().shares()
        return np.full_like(found, 1 / found.shape[-1])


class _Everything(Steps):
    def ordered(self, n_q: int, n_k: int) -> np.ndarray:
        return np.ones((n_q, n_k), bool)


class _OverQueries(Steps):
    axis = -2


class _FixedTables(Steps):
    fixed = ("random", "random_1", "random_2")


class _FixedShares(Steps):
    fixed = ("mixture",)


class _NoDelta(Steps):
    delta = False


class _NoSlope(Steps):
    slope = False


def _differ(right: Any, wrong: Any) -> bool:
    return any(not np.allclose(right[n], wrong[n], rtol=1e-9, atol=1e-12, equal_nan=True) for n in wrong)


def _mistake(
    class_: str, says: str, wrong: type[Steps], *, gradients_too: bool = True, forward: bool = True
) -> Mutation:
    def mistaken_forward(arguments: Arguments) -> Result | None:
        with np.errstate(all="ignore"):
            result, right = wrong(arguments).forward(), Steps(arguments).forward()
        return result if _differ(right.fields, result.fields) else None

    def gradients(arguments: Arguments, cotangents: dict[str, Any]) -> dict[str, Any] | None:
        if cotangents.get("output") is None:
            return None
        d_output = np.asarray(cotangents["output"], np.float64)
        with np.errstate(all="ignore"):
            mistaken, right = wrong(arguments), Steps(arguments)
            mistaken.forward(), right.forward()
            found, expected = mistaken.backward(d_output), right.backward(d_output)
        return found if _differ(expected, found) else None

    return Mutation(
        class_, says, forward=mistaken_forward if forward else None, gradients=gradients if gradients_too else None
    )


synthesizer_mutations: tuple[Mutation, ...] = (
    _mistake("synthesizer_linear", "the hidden layer has no relu", _Linear),
    _mistake("bias_drop", "the biases are left out", _NoBiases, gradients_too=False),
    _mistake("synthesizer_tiling", "the two factors of the length are exchanged", _OtherOrder),
    _mistake("synthesizer_tiling", "both factors are tiled alike", _BothTiled, gradients_too=False),
    _mistake("synthesizer_transposed", "the table is read as (h, k, q)", _Transposed, gradients_too=False),
    _mistake("synthesizer_mixture_after", "the parts are mixed after the softmax", _MixedAfter, gradients_too=False),
    _mistake("synthesizer_mixture_plain", "the mixture is used without its softmax", _PlainShares),
    _mistake("synthesizer_mixture_equal", "the parts have equal shares", _EqualShares),
    _mistake("causal_drop", "all keys are seen", _Everything),
    _mistake("softmax_wrong_axis", "the softmax runs over queries", _OverQueries, gradients_too=False),
    _mistake("synthesizer_fixed", "the tables get no gradient", _FixedTables, forward=False),
    _mistake("synthesizer_mixture_grad", "the mixture gets no gradient", _FixedShares, forward=False),
    _mistake("delta_missing", "dS lacks the row term", _NoDelta, forward=False),
    _mistake("synthesizer_relu_grad", "the backward takes the relu for the identity", _NoSlope, forward=False),
)
