"""The ways people get Performer attention wrong, each as the numbers that the mistake gives.

:class:`Steps` writes the mechanism down once more with its whole (q, k) matrix of weights, in float64, in steps that a mistake
replaces.  It is right as it stands and shares nothing with the mechanism.
"""

from typing import Any

import numpy as np

from refattn.arrays import sum_to_shape
from refattn.records import Mutation, Result

__all__ = ["performer_mutations"]

Arguments = dict[str, Any]


def _t(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


class Steps:
    """One call on float64 arrays."""

    power = -0.25
    halved = 1.0  # factor of -|y|^2 / 2
    query_axes: tuple[int, ...] = (-1,)
    key_axes: tuple[int, ...] = (-2, -1)
    past = True
    constant_sum = constant_length = moving_maximum = False

    def __init__(self, arguments: Arguments) -> None:
        self.a = arguments
        self.q, self.k, self.v, self.w = (np.asarray(arguments[n], np.float64) for n in ("q", "k", "v", "features"))
        self.relu = arguments.get("kernel", "softmax") == "relu"
        eps = arguments.get("eps")
        self.eps = (1e-3 if self.relu else 1e-4) if eps is None else eps
        self.sum_eps = arguments.get("key_sum_eps", 0.0)
        self.causal = bool(arguments.get("causal", False)) and self.past
        self.ratio = 1.0 if self.relu else len(self.w) ** -0.5

    def features(self, x: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        """phi, its slope in u, y, and where u is largest."""
        y = x * x.shape[-1] ** self.power
        u = y @ self.w.T
        if self.relu:
            return np.maximum(u, 0.0) + self.eps, 1.0 * (u > 0), y, np.zeros_like(u)
        top = u.max(axes, keepdims=True)
        grown = self.ratio * np.exp(u - self.halved * np.sum(y * y, -1, keepdims=True) / 2 - top)
        return grown + self.ratio * self.eps, grown, y, 1.0 * (u == top)

    def divisor(self) -> np.ndarray:
        """(..., q, 1)"""
        return (self.weights.sum(-1) + self.sum_eps * self.phi_q.sum(-1))[..., None]

    def divided(self, total: np.ndarray) -> np.ndarray:
        empty = self.sum == 0
        return np.where(empty, 0.0, total / np.where(empty, 1.0, self.sum))

    def forward(self) -> Result:
        self.phi_q, self.slope_q, self.y_q, self.top_q = self.features(self.q, self.query_axes)
        self.phi_k, self.slope_k, self.y_k, self.top_k = self.features(self.k, self.key_axes)
        n_q, n_k = self.q.shape[-2], self.k.shape[-2]
        self.seen = np.arange(n_q)[:, None] >= np.arange(n_k) if self.causal else np.ones((n_q, n_k), bool)
        self.weights = np.where(self.seen, self.phi_q @ _t(self.phi_k), 0.0)
        self.sum = self.divisor()
        self.output = self.divided(self.weights @ self.v)
        return Result(output=self.output)

    def backward(self, d_output: np.ndarray) -> dict[str, np.ndarray]:
        d_total = self.divided(d_output)
        d_sum = -np.sum(d_total * self.output, -1, keepdims=True) * (not self.constant_sum)
        d_weights = np.where(self.seen, d_total @ _t(self.v) + d_sum, 0.0)
        d_q, from_q = self.pulled(
            d_weights @ self.phi_k + self.sum_eps * d_sum, self.slope_q, self.y_q, self.top_q, (-1,)
        )
        d_k, from_k = self.pulled(_t(d_weights) @ self.phi_q, self.slope_k, self.y_k, self.top_k, (-2, -1))
        found = {"q": d_q, "k": d_k, "v": _t(self.weights) @ d_total, "features": from_q + from_k}
        return {n: sum_to_shape(g, np.shape(self.a[n])) for n, g in found.items()}

    def pulled(
        self, d_phi: np.ndarray, slope: np.ndarray, y: np.ndarray, top: np.ndarray, axes: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Cotangents of x and of the features."""
        d_u = d_phi * slope
        d_y = 0.0 if self.relu or self.constant_length else -self.halved * d_u.sum(-1, keepdims=True) * y
        if self.moving_maximum and not self.relu:
            d_u = d_u - top * d_u.sum(axes, keepdims=True)
        d_x = (d_u @ self.w + d_y) * y.shape[-1] ** self.power
        return d_x, (_t(d_u) @ y).reshape(-1, *self.w.shape).sum(0)


# ------------------------------------------------------------------------------------------------ mistakes


class _Multiplies(Steps):
    def divided(self, total: np.ndarray) -> np.ndarray:
        return total * self.sum


class _Unscaled(Steps):
    power = 0.0


class _Scaled(Steps):
    power = -0.5


class _NoLength(Steps):
    halved = 0.0


class _WholeLength(Steps):
    halved = 2.0


class _MaximumOfEachKey(Steps):
    key_axes = (-1,)


class _NoEps(Steps):
    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.eps = 0.0


class _NoSumEps(Steps):
    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.sum_eps = 0.0


class _Everything(Steps):
    past = False


class _FinalSum(Steps):
    """The sum over all keys stands under every row."""

    def divisor(self) -> np.ndarray:
        return self.phi_q @ (self.phi_k.sum(-2) + self.sum_eps)[..., None]


class _OneEpsPerRow(Steps):
    """The constant is added once to the denominator."""

    def divisor(self) -> np.ndarray:
        return self.weights.sum(-1, keepdims=True) + self.sum_eps


class _ConstantSum(Steps):
    constant_sum = True


class _ConstantLength(Steps):
    constant_length = True


class _MovingMaximum(Steps):
    moving_maximum = True


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


performer_mutations: tuple[Mutation, ...] = (
    _mistake("norm_recip", "values are multiplied by the sum of weights", _Multiplies, gradients_too=False),
    _mistake("no_scale", "q and k are not divided by d^(1/4)", _Unscaled),
    _mistake("scale_twice", "q and k are divided by sqrt(d) each", _Scaled),
    _mistake("performer_length", "the features lack exp(-|y|^2 / 2)", _NoLength),
    _mistake("performer_length", "the features have exp(-|y|^2)", _WholeLength),
    _mistake("performer_key_maximum", "every key has a maximum of its own, which does not cancel", _MaximumOfEachKey),
    _mistake("eps_drop", "the constant of the features is left out", _NoEps),
    _mistake("performer_sum_eps", "the constant of the key sum is left out", _NoSumEps),
    _mistake("performer_sum_eps", "the constant is added once to the denominator", _OneEpsPerRow, gradients_too=False),
    _mistake("causal_drop", "all keys are seen", _Everything),
    _mistake("norm_future", "causal rows are divided by the sum over all keys", _FinalSum, gradients_too=False),
    _mistake("delta_missing", "the sum of weights is a constant in the backward", _ConstantSum, forward=False),
    _mistake("performer_length_grad", "the backward lacks the term of |y|^2", _ConstantLength, forward=False),
    _mistake("performer_maximum_grad", "the backward goes through the maximum", _MovingMaximum, forward=False),
)
