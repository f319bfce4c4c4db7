"""The ways people get Nystrom attention wrong, each as the numbers that the mistake gives.

:class:`Steps` writes the mechanism down once more in float64 NumPy, in steps that a mistake replaces.  It is right as it stands and
shares nothing with the mechanism.
"""

from typing import Any

import numpy as np

from refattn.arrays import sum_to_shape
from refattn.records import Mutation, Result

__all__ = ["nystrom_mutations"]

Arguments = dict[str, Any]


def _t(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


class Steps:
    """One call on float64 arrays."""

    power = -0.5
    constant_scale = constant_inverse = one_step = False

    def __init__(self, arguments: Arguments) -> None:
        self.a = arguments
        self.n = int(arguments["landmarks"])
        self.iterations = int(arguments.get("iterations", 6))
        self.batch = arguments.get("pinv_scale", "matrix") == "batch"
        self.q, self.k, self.v = (self.padded(np.asarray(arguments[n], np.float64)) for n in "qkv")
        self.scale = self.q.shape[-1] ** self.power

    # ------------------------------------------------------------ steps that mistakes replace

    def padded(self, x: np.ndarray) -> np.ndarray:
        missing = -x.shape[-2] % self.n
        return np.concatenate([np.zeros((*x.shape[:-2], missing, x.shape[-1])), x], axis=-2)

    def cut(self, x: np.ndarray, length: int) -> np.ndarray:
        return x[..., x.shape[-2] - length :, :]

    def averages(self, length: int) -> np.ndarray:
        """(n, padded length): the matrix of the means."""
        size = length // self.n
        return (np.arange(length) // size == np.arange(self.n)[:, None]) / size

    def key_logits(self, logits: np.ndarray) -> np.ndarray:
        return logits

    def largest(self) -> np.ndarray:
        sums = self.middle.sum(-2, keepdims=True)
        return sums.max(keepdims=True) if self.batch else sums.max(-1, keepdims=True)

    def inverse(self) -> np.ndarray:
        unit = np.eye(self.n)
        z = _t(self.middle) / self.largest()
        self.trail = []
        for _ in range(self.iterations):
            self.trail.append(z)
            y = self.middle @ z
            z = z @ (13 * unit - y @ (15 * unit - y @ (7 * unit - y))) / 4
        return z

    # ------------------------------------------------------------ the computation

    @staticmethod
    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def forward(self) -> Result:
        self.mean_q, self.mean_k = self.averages(self.q.shape[-2]), self.averages(self.k.shape[-2])
        self.q_m, self.k_m = self.mean_q @ self.q, self.mean_k @ self.k
        self.left = self.softmax(self.scale * self.q @ _t(self.k_m))
        self.middle = self.softmax(self.scale * self.q_m @ _t(self.k_m))
        self.right = self.softmax(self.key_logits(self.scale * self.q_m @ _t(self.k)))
        self.z = self.inverse()
        self.output = self.left @ (self.z @ (self.right @ self.v))
        return Result(output=self.cut(self.output, self.a["q"].shape[-2]))

    def backward(self, d_output: np.ndarray) -> dict[str, np.ndarray]:
        rows = np.zeros((*d_output.shape[:-2], self.q.shape[-2], d_output.shape[-1]))
        self.cut(rows, d_output.shape[-2])[...] = d_output
        summed = self.right @ self.v
        d_left, d_mixed = rows @ _t(self.z @ summed), _t(self.left) @ rows
        d_summed = _t(self.z) @ d_mixed
        d_middle = self.inverse_backward(sum_to_shape(d_mixed @ _t(summed), self.z.shape))

        def logits(weights: np.ndarray, d: np.ndarray) -> np.ndarray:
            return self.scale * weights * (d - (weights * d).sum(-1, keepdims=True))

        s_left, s_middle = logits(self.left, d_left), logits(self.middle, d_middle)
        s_right = logits(self.right, d_summed @ _t(self.v))
        found = {
            "q": s_left @ self.k_m + self.mean_q.T @ (s_middle @ self.k_m + s_right @ self.k),
            "k": _t(s_right) @ self.q_m + self.mean_k.T @ (_t(s_middle) @ self.q_m + _t(s_left) @ self.q),
            "v": _t(self.right) @ d_summed,
        }
        return {n: sum_to_shape(self.cut(g, self.a[n].shape[-2]), self.a[n].shape) for n, g in found.items()}

    def inverse_backward(self, d_z: np.ndarray) -> np.ndarray:
        """By the product rule over the four terms 13 Z - 15 Z Y + 7 Z Y^2 - Z Y^3 of each step, Y = A Z."""
        a, found = self.middle, np.zeros_like(self.middle)
        if self.constant_inverse:
            return found
        for n, z in enumerate(reversed(self.trail)):
            if n and self.one_step:
                return found
            y = a @ z
            powers = [np.broadcast_to(np.eye(self.n), y.shape), y, y @ y, y @ y @ y]
            d_y, d_next = np.zeros_like(y), np.zeros_like(z)
            for power, factor in enumerate((13, -15, 7, -1)):
                d = factor / 4 * d_z
                d_next = d_next + d @ _t(powers[power])
                for m in range(power):
                    d_y = d_y + _t(z @ powers[m]) @ d @ _t(powers[power - 1 - m])
            found = found + d_y @ _t(z)
            d_z = d_next + _t(a) @ d_y
        largest, sums = self.largest(), a.sum(-2, keepdims=True)
        found = found + _t(d_z) / largest
        if not self.constant_scale:
            axes = None if self.batch else (-1, -2)
            d_largest = -np.sum(_t(d_z) * a, axis=axes, keepdims=True) / largest**2
            ties = sums == largest
            found = found + np.where(ties, d_largest / np.sum(ties, axis=axes, keepdims=True), 0.0)
        return found


# ------------------------------------------------------------------------------------------------ mistakes


class _Unscaled(Steps):
    power = 0.0


class _Twice(Steps):
    power = -1.0


class _ZerosBehind(Steps):
    def padded(self, x: np.ndarray) -> np.ndarray:
        missing = -x.shape[-2] % self.n
        return np.concatenate([x, np.zeros((*x.shape[:-2], missing, x.shape[-1]))], axis=-2)

    def cut(self, x: np.ndarray, length: int) -> np.ndarray:
        return x[..., :length, :]


class _RealMeans(Steps):
    """Only the tokens of a segment count in its mean, not the zeros."""

    def averages(self, length: int) -> np.ndarray:
        found = super().averages(length)
        missing = length - self.a["q" if length == self.q.shape[-2] else "k"].shape[-2]
        found[:, :missing] = 0.0
        return found / np.maximum(found.sum(1, keepdims=True), 1e-300)


class _HiddenZeros(Steps):
    """The zeros in front get no weight."""

    def key_logits(self, logits: np.ndarray) -> np.ndarray:
        missing = logits.shape[-1] - self.a["k"].shape[-2]
        return np.where(np.arange(logits.shape[-1]) < missing, -1e300, logits)


class _Strided(Steps):
    """Every n-th token in place of n segments."""

    def averages(self, length: int) -> np.ndarray:
        return (np.arange(length) % self.n == np.arange(self.n)[:, None]) / (length // self.n)


class _FirstTokens(Steps):
    """The first token of a segment in place of its mean."""

    def averages(self, length: int) -> np.ndarray:
        return 1.0 * (np.arange(length) == np.arange(self.n)[:, None] * (length // self.n))


class _BatchScale(Steps):
    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.batch = True


class _MatrixScale(Steps):
    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.batch = False


class _NoStartingScale(Steps):
    """The iteration starts from A^T / n."""

    def largest(self) -> np.ndarray:
        return np.full((*self.middle.shape[:-2], 1, 1), float(self.n))


class _OneStepLess(Steps):
    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.iterations = max(0, self.iterations - 1)


class _OneStepMore(Steps):
    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.iterations += 1


class _Exact(Steps):
    def inverse(self) -> np.ndarray:
        return np.linalg.pinv(self.middle)


class _SecondOrder(Steps):
    """Newton's iteration Z (2 I - A Z)."""

    def inverse(self) -> np.ndarray:
        z = _t(self.middle) / self.largest()
        for _ in range(self.iterations):
            z = z @ (2 * np.eye(self.n) - self.middle @ z)
        return z


class _Transposed(Steps):
    def inverse(self) -> np.ndarray:
        return _t(super().inverse())


class _ConstantScale(Steps):
    constant_scale = True


class _ConstantInverse(Steps):
    constant_inverse = True


class _LastStepAlone(Steps):
    one_step = True


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


nystrom_mutations: tuple[Mutation, ...] = (
    _mistake("no_scale", "the logits are not scaled", _Unscaled),
    _mistake("scale_twice", "the logits are divided by d", _Twice),
    _mistake("nystrom_pad_behind", "the zeros stand behind the sequence", _ZerosBehind),
    _mistake("nystrom_pad_mean", "the zeros do not count in the means", _RealMeans),
    _mistake("nystrom_pad_hidden", "the zeros are hidden from the softmax over keys", _HiddenZeros),
    _mistake("nystrom_landmarks", "a landmark is the mean of every n-th token", _Strided),
    _mistake("nystrom_landmarks", "a landmark is the first token of its segment", _FirstTokens),
    _mistake("nystrom_scale", "all matrices start from one scale, that of the batch", _BatchScale),
    _mistake("nystrom_scale", "every matrix starts from its own scale, not that of the batch", _MatrixScale),
    _mistake("nystrom_scale", "the iteration starts from A^T / n", _NoStartingScale, gradients_too=False),
    _mistake("nystrom_steps", "one step of the iteration too few", _OneStepLess),
    _mistake("nystrom_steps", "one step of the iteration too many", _OneStepMore),
    _mistake("nystrom_exact", "the exact pseudo-inverse", _Exact, gradients_too=False),
    _mistake("nystrom_newton", "the iteration is Z (2 I - A Z)", _SecondOrder, gradients_too=False),
    _mistake("nystrom_transposed", "the inverse is transposed", _Transposed, gradients_too=False),
    _mistake("nystrom_scale_grad", "the starting scale is a constant in the backward", _ConstantScale, forward=False),
    _mistake("nystrom_inverse_grad", "the inverse is a constant in the backward", _ConstantInverse, forward=False),
    _mistake("nystrom_inverse_grad", "the backward goes through the last step alone", _LastStepAlone, forward=False),
)
