"""efficient_attention: gradients, definition, padded keys, stored cases, counts, mistakes."""

import array_api_strict
import numpy as np
import pytest
from support import assert_adjoint, assert_close, assert_gradients, cases, random_cotangents

from refattn import precision
from refattn.attention.efficient import efficient_attention as attention

EPS = np.finfo(np.float64).eps
OPTIONS = {"plain": {}, "lengths": {"key_lengths": np.array([3, 5])}, "no_keys": {"key_lengths": (0, 4)}}


def rng(seed=0):
    return np.random.default_rng(seed)


def arguments(seed=0, **more):
    return attention.example(rng(seed), **{"b": 2, "h": 2, "q": 3, "k": 5, "d": 3, "e": 2, **more})


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_by_complex_step(name):
    assert_gradients(attention, arguments(**OPTIONS[name]), rng(1))
    assert_adjoint(attention, arguments(**OPTIONS[name]), rng(2))


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_definition(name):
    given = arguments(3, **OPTIONS[name])
    assert_close(attention(**given), attention.definition(**given).output, 40 * EPS)  # convex sums of 3 and 5 terms


def test_leading_axes_broadcast():
    draw = rng(4)
    q, k, v = draw.standard_normal((3, 1, 2, 4, 3)), draw.standard_normal((2, 2, 6, 3)), draw.standard_normal((2, 6, 5))
    for lengths in (None, np.array([[6, 2], [1, 4], [3, 5]]), np.array([6, 2, 1, 4, 3, 5])):
        given = {"q": q, "k": k, "v": v, "key_lengths": lengths}
        result = attention.forward(**given)
        assert result.output.shape == (3, 2, 2, 4, 5)
        assert_close(result.output, attention.definition(**given).output, 40 * EPS)
        assert_adjoint(attention, given, rng(4))


def test_weights_are_a_distribution():
    given = arguments(5)
    given["v"] = np.ones_like(given["v"])
    assert_close(attention(**given), np.ones((2, 2, 3, 2)), 10 * EPS)


def test_large_and_duplicated_entries():
    given = arguments(5)
    given.update(q=given["q"] * 1e4, k=given["k"] * 1e4 - 1e5)
    assert_close(attention(**given), attention.definition(**given).output, 40 * EPS)


@pytest.mark.parametrize("name", OPTIONS)
def test_strict_namespace(name):
    given = arguments(6, **OPTIONS[name])
    strict = {n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    want, back = attention.vjp(**given)
    got, back_strict = attention.vjp(**strict)
    cotangents = random_cotangents(attention, want, rng(6))
    assert_close(np.asarray(got.output), want.output, 20 * EPS)
    for n, g in back_strict(output=array_api_strict.asarray(cotangents["output"])).items():
        assert_close(np.asarray(g), back(**cotangents)[n], 50 * EPS)


def test_padding_is_never_read():
    given = arguments(7, key_lengths=(3, 3))
    want, back = attention.vjp(**given)
    dirty = {**given, "k": given["k"].copy(), "v": given["v"].copy()}
    dirty["k"][..., 3:, :], dirty["v"][..., 3:, :] = np.nan, np.inf
    result, pullback = attention.vjp(**dirty)
    assert np.array_equal(result.output, want.output)
    d = np.ones_like(want.output)
    for n, g in back(d).items():
        assert np.array_equal(pullback(d)[n], g)


def test_half_precision_is_computed_in_float32():
    given = {n: x.astype(np.float16) for n, x in arguments(8).items()}
    output = attention(**given)
    assert output.dtype == np.float16
    assert_close(output, attention.definition(**given).output, 2 * 2.0**-11)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_cost_equals_counted_products(direction):
    sizes = {"b": 2, "h": 3, "q": 10, "k": 14, "d": 6, "e": 4}
    counter = precision.counting()
    given = {n: counter.asarray(x) for n, x in attention.example(rng(9), **sizes).items()}
    result, pullback = attention.vjp(**given)
    if direction == "backward":
        counter.counts.reset()
        pullback(counter.asarray(np.ones(result.output.shape)))
    assert counter.counts.multiplies == attention.cost(**sizes, direction=direction).computed_multiplies


def test_cost_is_linear_in_the_length():
    counts = [attention.cost(q=n, k=n, d=64, direction="both").multiplies for n in (1024, 4096)]
    assert counts[1] == 4 * counts[0]


def test_stored_case_of_linear_attention_transformer():
    """It multiplies softmax(q) by d**-0.5, which is one factor of the output."""
    found = [c for c in cases("linear_attention_transformer") if c[0] == "noncausal"]
    assert found
    for _, _, arrays in found:
        factor = arrays["in_q"].shape[-1] ** -0.5
        given = {n: arrays["in_" + n] for n in "qkv"}
        result, pullback = attention.vjp(**given)
        assert_close(factor * result.output, arrays["out"], 1e-10)
        assert_close(factor * attention.definition(**given).output, arrays["out"], 1e-10)
        for n, g in pullback(factor * arrays["cot_out"]).items():
            assert_close(g, arrays["grad_" + n], 1e-9)


BAD = {
    "channels": ({"k": np.zeros((2, 2, 5, 4))}, ValueError, "k has shape (2, 2, 5, 4): its axis 'd'"),
    "values": ({"v": np.zeros((2, 2, 4, 2))}, ValueError, "v has shape (2, 2, 4, 2): its axis 'k'"),
    "lengths": ({"key_lengths": (3, 9)}, ValueError, "key_lengths is [3, 9]: expected between 0 and 5"),
    "causal": ({"causal": True}, TypeError, "has no option 'causal'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind) as caught:
        attention.forward(**{**arguments(), **change})
    assert message in str(caught.value)
