"""Softmax attention in steps against the same in loops, and its gradients against slopes of the loops."""

import numpy as np
import pytest
from dense_calls import FINITE, PROBES, cotangents_of
from oracles.dense_loop import attention as loop

import refattn as ra
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


@pytest.mark.parametrize("sink", [0.0, 30.0, 800.0])
def test_keys_far_below_their_sinks_keep_their_lse(sink):
    rng = np.random.default_rng(3)
    mechanism = ra.scaled_dot_product_attention
    arguments = mechanism.example(rng) | {"sinks": np.full(6, sink), "lse_includes_sinks": False}
    result, pullback = mechanism.definition.vjp(**arguments)
    logits = np.einsum("bhqd,bhkd->bhqk", arguments["q"], np.repeat(arguments["k"], 3, axis=1)) / 2
    want = np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(result.lse, want, rtol=0, atol=1e-13)
    # With a cotangent of the lse alone: the softmax over the keys, whatever the sinks are.
    share = np.exp(logits - want[..., None])
    d_q = np.einsum("bhqk,bhkd->bhqd", share, np.repeat(arguments["k"], 3, axis=1)) / 2
    np.testing.assert_allclose(pullback(lse=np.ones(want.shape))["q"], d_q, rtol=0, atol=1e-13)


def test_no_heads():
    rng = np.random.default_rng(4)
    empty = {n: rng.standard_normal((2, 0, 3, 4)) for n in "qkv"}
    assert ra.scaled_dot_product_attention.definition(**empty, sinks=np.zeros(0)).output.shape == (2, 0, 3, 4)
