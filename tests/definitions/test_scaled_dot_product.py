"""Softmax attention in steps against the same in loops, and its gradients against slopes of the loops."""

import numpy as np
import pytest
from dense_calls import FINITE, PROBES, cotangents_of

from refattn.definitions.dense_loop import definition as loop
from refattn.definitions.scaled_dot_product import ScaledDotProduct


def close(x, y, tolerance):
    """Equal where not finite, within the tolerance of the larger one elsewhere."""
    assert x.shape == y.shape
    finite = np.isfinite(y)
    np.testing.assert_array_equal(np.where(finite, 0, x), np.where(finite, 0, y))
    scale = np.abs(y[finite]).max(initial=1.0)
    assert np.abs(x[finite] - y[finite]).max(initial=0.0) <= tolerance * scale


@pytest.mark.parametrize("name", [n for n in PROBES if n != "wide"])
def test_steps_equal_loops(name):
    result = ScaledDotProduct(PROBES[name])
    want = loop(**PROBES[name])
    size = np.abs(want.lse[np.isfinite(want.lse)]).max(initial=1.0)  # the rounding of large logits reaches the weights
    close(result.output, want.output, 1e-12 + 4 * np.finfo(float).eps * size)
    close(result.lse, want.lse, 1e-12)


@pytest.mark.parametrize("name", FINITE)
def test_gradients_are_slopes_of_the_loops(name):
    """Central differences along one random direction of each argument, two steps and Richardson: error ~ h^4 and U / h."""
    arguments = {n: x.astype(np.float64) if n in "qkv" else x for n, x in PROBES[name].items()}
    if name == "deepest":  # logits of 2e9 leave differences no digits
        arguments["bias"] = arguments["bias"] + 2e9 - 500
    if name == "deeper":
        arguments["bias"] = arguments["bias"] + 6e4 - 500
    cotangents = cotangents_of(arguments)
    gradients = ScaledDotProduct(arguments, cotangents).gradient()
    names = ["q", "k", "v", *(n for n in ("bias", "sinks", "softcap", "scale", "alibi_slopes") if n in arguments)]
    assert sorted(gradients) == sorted(names)
    rng = np.random.default_rng(5)

    def along(n, direction, h):
        result = loop(**{**arguments, n: arguments[n] + h * direction})
        lse = np.where(np.isfinite(result.lse), result.lse, 0)
        return np.sum(result.output * cotangents["output"]) + np.sum(lse * cotangents["lse"])

    for n in names:
        assert np.shape(gradients[n]) == np.shape(arguments[n])
        direction = rng.standard_normal(np.shape(arguments[n]))
        coarse, fine = ((along(n, direction, h) - along(n, direction, -h)) / (2 * h) for h in (2e-3, 1e-3))
        slope = (4 * fine - coarse) / 3
        size = np.sum(np.abs(gradients[n] * direction))
        assert abs(np.sum(gradients[n] * direction) - slope) <= 1e-8 * max(1.0, size)
