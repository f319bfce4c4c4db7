"""efficient_attention: gradients, definition, padded keys, stored cases, counts, mistakes."""

import numpy as np
import pytest
from contract.cases.efficient import arguments
from support import assert_adjoint, assert_close, cases

from refattn.attention.efficient import efficient_attention as attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


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
    given = arguments(seed=5)
    given["v"] = np.ones_like(given["v"])
    assert_close(attention(**given), np.ones((2, 2, 3, 2)), 10 * EPS)


def test_large_and_duplicated_entries():
    given = arguments(seed=5)
    given.update(q=given["q"] * 1e4, k=given["k"] * 1e4 - 1e5)
    assert_close(attention(**given), attention.definition(**given).output, 40 * EPS)


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


def test_without_channels_the_output_is_zero():
    result, pullback = attention.vjp(np.zeros((1, 2, 0)), np.zeros((1, 3, 0)), np.ones((1, 3, 2)))
    assert result.output.tolist() == [[[0.0, 0.0], [0.0, 0.0]]]
    assert (pullback(np.ones((1, 2, 2)))["v"] == 0).all()


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
