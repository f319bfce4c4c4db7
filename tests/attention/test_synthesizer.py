"""synthesizer_attention: every part and their mixture, gradients, definition, equivalences, counts, mistakes, bad input."""

import numpy as np
import pytest
from contract.cases.synthesizer import arguments
from support import assert_close, random_cotangents

from refattn.attention.scaled_dot_product import scaled_dot_product_attention
from refattn.attention.synthesizer import PARTS
from refattn.attention.synthesizer import synthesizer_attention as attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def test_products_of_queries_and_keys_as_the_only_part_are_full_attention():
    draw = rng(9)
    q, k, v = draw.standard_normal((3, 2, 3, 7, 4))
    want, back = scaled_dot_product_attention.vjp(q, k, v, causal=True)
    result, pullback = attention.vjp(None, v, other_logits=q @ k.swapaxes(-1, -2) / 2, causal=True)
    assert_close(result.output, want.output, 20 * EPS)
    d = draw.standard_normal(want.output.shape)
    assert_close(pullback(d)["v"], back(d)["v"], 50 * EPS)
    assert_close(pullback(d)["other_logits"] @ k / 2, back(d)["q"], 50 * EPS)


def test_factors_of_full_size_are_the_whole():
    """Factors k x 1 with a right one of 1 are a dense part; a table of rank k is any table."""
    dense = arguments("dense", 10)
    h, f, k = dense["w_2"].shape
    factors = {n: dense[n] for n in ("x", "v", "w_1", "b_1")}
    factors.update(w_a=dense["w_2"], b_a=dense["b_2"], w_b=np.zeros((h, f, 1)), b_b=np.ones((h, 1)))
    assert_close(attention(**factors), attention(**dense), 20 * EPS)
    table = arguments("random", 10)
    ranked = {"v": table["v"], "random_1": table["random"], "random_2": np.broadcast_to(np.eye(k), (h, k, k))}
    assert_close(attention(**ranked), attention(**table), 20 * EPS)


def test_a_mixture_that_leaves_one_part_is_that_part():
    given = arguments("all", 11)
    alone = {"dense": ("w_1", "b_1", "w_2", "b_2"), "dense_factors": ("w_1", "b_1", "w_a", "b_a", "w_b", "b_b")}
    for s, (name, arrays) in enumerate(PARTS.items()):
        mixture = np.full(5, -np.inf)
        mixture[s] = 0.0
        wanted = {n: given[n] for n in ("x", "v", *alone.get(name, arrays))}
        assert_close(attention(**{**given, "mixture": mixture}), attention(**wanted), 20 * EPS)


@pytest.mark.parametrize("name", ["dense_causal", "all_causal"])
def test_nan_reaches_only_those_who_see_it(name):
    given = arguments(name, 13)
    want, back = attention.vjp(**given)
    cotangents = random_cotangents(attention, want, rng(13))
    poisoned = {**given, "v": given["v"].copy()}
    poisoned["v"][..., 2, :] = np.nan
    result, pullback = attention.vjp(**poisoned)
    assert np.array_equal(result.output[..., :2, :], want.output[..., :2, :])
    assert np.isnan(result.output[..., 2:, :]).all()
    early = {"output": cotangents["output"].copy()}
    early["output"][..., 2:, :] = 0.0
    assert np.array_equal(pullback(**early)["v"][..., :2, :], back(**early)["v"][..., :2, :])
    poisoned = {**given, "x": given["x"].copy()}
    poisoned["x"][:, 1] = np.nan
    output = attention(**poisoned)
    assert np.isnan(output[..., 1, :]).all()
    rest = [0, 2, 3]
    assert np.array_equal(output[..., rest, :], want.output[..., rest, :])


def test_parameters():
    assert attention.cost(h=2, q=8, k=8, e=4, m=5, f=3).parameters == 2 * (5 * 3 + 3 * 8)
    cost = attention.cost(h=2, q=8, k=8, e=4, r=3, parts=("random", "random_factors"), direction="both")
    assert cost.parameters == 2 * (8 * 8 + 16 * 3) + 2


@pytest.mark.parametrize("name", ["dense", "factors", "all"])
def test_a_row_that_sees_nothing_reaches_no_weight(name):
    """Token 2 is NaN; it sees nothing in any head, or nothing in one of two."""
    for hidden in (slice(None), 0):
        given = arguments(name, 20)
        mask = np.ones((given["v"].shape[-3], given["x"].shape[-2], given["v"].shape[-2]), bool)
        mask[hidden, 2] = False
        clean, pullback = attention.vjp(**given, mask=mask)
        d_output = rng(20).standard_normal(clean.output.shape)
        want = pullback(d_output)
        dirty = {**given, "x": given["x"].copy()}
        dirty["x"][:, 2] = np.nan
        result, pullback = attention.vjp(**dirty, mask=mask)
        assert np.array_equal(result.output[:, hidden], clean.output[:, hidden])
        gradients, defined = pullback(d_output), attention.definition.vjp(**dirty, mask=mask)[1](d_output)
        for n, g in gradients.items():
            heads = slice(None) if n in ("x", "mixture") or hidden == slice(None) else slice(0, 1)
            if n == "v":
                assert np.array_equal(g[:, hidden], want[n][:, hidden])
            elif n not in ("x", "mixture", "other_logits"):
                assert np.array_equal(g[heads], want[n][heads]), n
                assert_close(defined[n][heads], want[n][heads], 200 * EPS)


# ------------------------------------------------------------------------------------------------ bad input

BAD = {
    "no_values": ("dense", {"v": None}, TypeError, "the argument 'v' is missing"),
    "no_part": ("dense", {"w_1": None, "w_2": None, "b_1": None, "b_2": None}, ValueError, "no logits: give"),
    "no_hidden": ("dense", {"w_1": None, "b_1": None}, ValueError, "w_1 missing: the part 'dense' needs w_1, w_2"),
    "no_output": ("random", {"w_1": np.zeros((2, 3, 3))}, ValueError, "w_1 is given without w_2"),
    "no_tokens": ("dense", {"x": None}, ValueError, "x is not: the dense parts are made from the tokens"),
    "half_table": ("ranked", {"random_2": None}, ValueError, "random_2 missing: the part 'random_factors'"),
    "bias_alone": ("random", {"b_2": np.zeros((2, 4))}, ValueError, "b_2 is given without w_2"),
    "mixture": ("dense_random", {"mixture": None}, ValueError, "mixture is missing: expected 2 numbers for the parts dense, random"),
    "shares": ("dense_random", {"mixture": np.zeros(3)}, ValueError, "mixture has shape (3,): expected (2,) or (2, 2)"),
    "factors": ("factors", {"w_b": np.zeros((2, 3, 3)), "b_b": None}, ValueError, "expected factors n p = 4 keys"),
    "keys": ("dense", {"w_2": np.zeros((2, 3, 5))}, ValueError, "w_2 has shape (2, 3, 5): its axis 'k'"),
    "queries": ("dense_random", {"random": np.zeros((2, 4, 4))}, ValueError, "random has shape (2, 4, 4): its axis 'q'"),
    "causal": ("dense", {"causal": True}, ValueError, "as many queries as keys: 3 and 4"),
    "flag": ("dense", {"causal": "no"}, TypeError, "causal is 'no': expected True or False"),
    "list": ("dense", {"mixture": [1.0]}, TypeError, "mixture is a list"),
    "mask": ("dense", {"mask": np.zeros((3, 4))}, TypeError, "mask has dtype float64: expected a bool array"),
    "scale": ("dense", {"scale": 1.0}, TypeError, "has no option 'scale'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    base, change, kind, message = BAD[name]
    with pytest.raises(kind) as caught:
        attention.forward(**{**arguments(base), **change})
    assert message in str(caught.value)
