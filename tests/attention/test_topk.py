"""topk_attention: the choice, gradients with the choice held fixed, equality with its definition, stored cases."""

import numpy as np
import pytest
from contract.cases.topk import CASES, TOGETHER, B, D, E, H, K, Q, arguments
from support import assert_close, cases, random_cotangents

from refattn.attention.scaled_dot_product import scaled_dot_product_attention
from refattn.attention.topk import topk_attention as attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def base(seed=0, **settings):
    return arguments("plain", seed, **settings)


# ---------------------------------------------------------------------- the choice


def test_all_keys_are_plain_attention():
    for more in ({}, {"causal": True, "align": "lower_right"}, {"bias": TOGETHER["bias"], "mask": TOGETHER["mask"]}):
        arguments = {**base(4, count=K), **more}
        result, pullback = attention.vjp(**arguments)
        del arguments["count"]
        want, want_pullback = scaled_dot_product_attention.vjp(**arguments)
        assert_close(result.output, want.output, 40 * EPS)
        assert_close(result.lse, want.lse, 40 * EPS)
        cotangents = random_cotangents(attention, want, rng(1))
        got = pullback(**cotangents)
        for n, g in want_pullback(**cotangents).items():
            assert_close(got[n], g, 100 * EPS)


def test_indices_given_are_a_mask():
    indices = CASES["indices"]["indices"]
    mask = (indices[..., None] == np.arange(K)).any(-2)
    arguments = base(5, **CASES["indices"])
    want = scaled_dot_product_attention.forward(**{n: arguments[n] for n in "qkv"}, mask=mask)
    assert_close(attention(**arguments), want.output, 40 * EPS)
    order = rng(1).permuted(indices, axis=-1)
    assert_close(attention(**{**arguments, "indices": order}), want.output, 40 * EPS)
    chosen = attention.forward(**base(5))
    again = attention.forward(**{**base(5), "count": None, "indices": chosen.indices})
    assert_close(again.output, chosen.output, 4 * EPS)


def test_equal_products_stay_equal_under_any_scale():
    """A scale that is folded into the queries rounds equal products apart, and another key is chosen."""
    rng = np.random.default_rng(0)
    q, k = rng.integers(-3, 4, (1, 1, 40, 6)).astype(float), rng.integers(-3, 4, (1, 1, 50, 6)).astype(float)
    v = rng.standard_normal((1, 1, 50, 2))
    scale = 0.1
    products = np.einsum("...qd,...kd->...qk", q, k)
    folded = np.einsum("...qd,...kd->...qk", q * scale, k)
    first = [np.argsort(-x, axis=-1, kind="stable")[..., :7] for x in (products, folded)]
    assert (first[0] != first[1]).any()  # the input shows it
    for algorithm in ("auto", "whole", "tiled"):
        result = attention.forward(q, k, v, count=7, scale=scale, algorithm=algorithm)
        assert np.array_equal(result.indices, first[0])
        assert_close(result.output, attention.definition(q, k, v, count=7, scale=scale).output, 1e-14)


def test_grouped_heads():
    """Two query heads share a key head, side by side or in turn; lists for one head, for key heads, for query heads."""
    drawn = rng(3).standard_normal
    q, k, v = drawn((2, 4, Q, D)), drawn((2, 2, K, D)), drawn((2, 2, K, E))
    for head_map, heads in (("repeat", [0, 0, 1, 1]), ("tile", [0, 1, 0, 1])):
        got, pullback = attention.vjp(q, k, v, count=3, head_map=head_map)
        want, want_pullback = attention.vjp(q, k[:, heads], v[:, heads], count=3)
        assert np.array_equal(got.indices, want.indices)
        assert_close(got.output, want.output, 40 * EPS)
        cotangents = random_cotangents(attention, want, rng(1))
        d, wanted = pullback(**cotangents), want_pullback(**cotangents)
        assert_close(d["q"], wanted["q"], 100 * EPS)
        for n in "kv":
            summed = np.stack([wanted[n][:, np.array(heads) == g].sum(1) for g in (0, 1)], 1)
            assert_close(d[n], summed, 100 * EPS)
        for lists in (got.indices[:, :1], got.indices[:, :2], got.indices):
            by_head = lists[:, heads] if lists.shape[1] == 2 else np.broadcast_to(lists, got.indices.shape)
            mask = (by_head[..., None] == np.arange(K)).any(-2)
            plain = scaled_dot_product_attention(q, k, v, head_map=head_map, mask=mask)
            result = attention.forward(q, k, v, indices=lists, head_map=head_map)
            assert_close(result.output, plain, 40 * EPS)
            assert np.array_equal(result.indices, by_head)


def test_ties_go_to_the_lower_index():
    q, k, v = np.ones((1, 2, 1)), np.array([[[1.0], [2.0], [2.0], [1.0], [2.0]]]), np.arange(5.0).reshape(1, 5, 1)
    assert attention.forward(q, k, v, count=2).indices.tolist() == [[[1, 2], [1, 2]]]
    assert attention.forward(q, k, v, count=4).indices.tolist() == [[[1, 2, 4, 0]] * 2]
    assert attention.forward(q, -k, v, count=3).indices.tolist() == [[[0, 3, 1]] * 2]
    assert attention.forward(q, k, v, count=2, mask=np.array([True, False, True, True, True])).indices.tolist() == [
        [[2, 4]] * 2
    ]
    assert_close(attention(q, k, v, count=2), [[[1.5], [1.5]]], 4 * EPS)


def test_the_choice_comes_after_the_bias_and_visibility_and_before_dropout():
    q, k, v = np.zeros((1, 1, 2)), np.zeros((1, 4, 2)), np.arange(4.0).reshape(1, 4, 1)
    bias = np.array([0.0, 3.0, 1.0, 2.0])
    assert attention.forward(q, k, v, count=2, bias=bias[None]).indices.tolist() == [[[1, 3]]]
    hidden = np.array([[True, False, True, True]])
    assert attention.forward(q, k, v, count=2, bias=bias[None], mask=hidden).indices.tolist() == [[[3, 2]]]
    few = attention.forward(q, k, v, count=3, bias=np.array([[-np.inf, 0.0, -np.inf, 1.0]]))
    assert few.indices.tolist() == [[[3, 1, -1]]]
    assert_close(few.lse, [[np.log(1 + np.e)]], 4 * EPS)
    dropped = attention.forward(q, k, v, count=2, bias=bias[None], dropout_mask=np.array([[True, False, True, True]]))
    assert dropped.indices.tolist() == [[[1, 3]]]
    assert_close(dropped.output, [[[3 / (1 + np.e)]]], 4 * EPS)


def test_unchosen_pairs_have_no_gradient():
    arguments = base(6, bias=rng(1).standard_normal((B, H, Q, K)), count=2)
    result, pullback = attention.vjp(**arguments)
    d = pullback(**random_cotangents(attention, result, rng(2)))["bias"]
    assert np.array_equal(d != 0, (result.indices[..., None] == np.arange(K)).any(-2))


def test_a_nan_in_a_key_reaches_exactly_the_rows_that_see_it():
    arguments = base(7, causal=True, align="lower_right")
    clean = attention.forward(**arguments)
    dirty = {**arguments, "k": arguments["k"].copy()}
    dirty["k"][0, 1, 3, 0] = np.nan
    result = attention.forward(**dirty)
    seen = np.zeros((B, H, Q), bool)
    seen[0, 1, 1:] = True  # key 3, offset 2
    assert np.array_equal(result.output[~seen], clean.output[~seen])
    assert np.isnan(result.output[seen]).all()


@pytest.mark.parametrize("keys", [50, 700])
def test_long_inputs_in_several_runs(keys, monkeypatch):
    """Both the search and the gathered softmax cut the queries."""
    from refattn.core import blocks, forward, listed

    for module in (blocks, forward):
        monkeypatch.setattr(module, "SMALL", 1 << 12)
    monkeypatch.setattr(listed, "GATHERED", 1 << 10)
    arguments = attention.example(rng(9), b=2, h=2, q=90, k=keys, d=4, e=3, count=7, causal=True, align="lower_right")
    result, pullback = attention.vjp(**arguments)
    monkeypatch.undo()
    want, want_pullback = attention.vjp(**arguments, algorithm="whole")
    assert np.array_equal(result.indices, want.indices)
    assert_close(result.output, want.output, 60 * EPS)
    cotangents = random_cotangents(attention, want, rng(1))
    got = pullback(**cotangents)
    for n, g in want_pullback(**cotangents).items():
        assert_close(got[n], g, 1000 * EPS)  # a key may be chosen by 90 queries


@pytest.mark.parametrize("sizes", [{"b": 0}, {"q": 0}, {"e": 0}, {"d": 0}])
def test_empty_axes(sizes):
    arguments = base(**sizes)
    for algorithm in ("auto", "whole", "tiled"):
        result, pullback = attention.vjp(**arguments, algorithm=algorithm)
        assert result.output.shape == (*arguments["q"].shape[:-1], arguments["v"].shape[-1])
        assert all(pullback(result.output)[n].shape == arguments[n].shape for n in "qkv")


# ---------------------------------------------------------------------- counts


def test_cost():
    c = attention.cost(b=2, h=3, q=5, k=7, d=4, e=6, count=3)
    assert c.multiplies == c.computed_multiplies == 2 * 3 * 5 * (7 * 4 + 3 * 10)
    causal = attention.cost(q=7, k=7, d=4, e=6, count=3, causal=True)
    assert causal.multiplies == 28 * 4 + (1 + 2 + 5 * 3) * 10
    assert causal.computed_multiplies == 49 * 4 + 21 * 10
    back = attention.cost(q=7, k=7, d=4, e=6, count=3, causal=True, direction="backward")
    assert back.multiplies == 18 * (3 * 4 + 2 * 6)
    given = attention.cost(q=2, k=7, d=4, e=6, indices=np.array([[[0, 1], [2, -1]]]))
    assert given.multiplies == 3 * 10
    both = attention.cost(q=7, k=7, d=4, e=6, count=3, causal=True, direction="both")
    assert both.multiplies == causal.multiplies + back.multiplies


# ---------------------------------------------------------------------- others' numbers


def test_stored_case_of_x_transformers():
    found = [c for c in cases("x_transformers") if "sparse_topk" in c[1]["options"]]
    assert found
    for _, meta, arrays in found:
        arguments = {**{n: arrays[f"in_{n}"] for n in "qkv"}, "count": meta["options"]["sparse_topk"]}
        if meta["options"]["causal"]:
            arguments |= {"causal": True, "align": "lower_right"}
        result, pullback = attention.vjp(**arguments)
        assert_close(result.output, arrays["out"], 1e-10)
        assert_close(attention.definition(**arguments).output, arrays["out"], 1e-10)
        gradients = pullback(arrays["cot_out"])
        for n in "qkv":
            assert_close(gradients[n], arrays[f"grad_{n}"], 1e-9)


def test_stored_case_of_indexed_attention():
    """An indexer scores the keys and keeps the best 5 of the past; two query heads share a key head there."""
    for _, _, arrays in (c for c in cases("fla") if c[1]["case"] == "dsa"):
        q, t = arrays["in_q"], np.arange(arrays["in_q"].shape[2])
        score = np.maximum(
            np.einsum("bthd,bsd->bhts", arrays["in_qi"], arrays["in_ki"]) * arrays["in_qi"].shape[-1] ** -0.5, 0
        )
        score = np.where(t <= t[:, None], np.einsum("bhts,bth->bts", score, arrays["in_wi"]), -np.inf)
        indices = np.argsort(-score, -1, kind="stable")[:, None, :, :5]
        indices = np.where(indices <= t[:, None], indices, -1)
        for mechanism in (attention, scaled_dot_product_attention):
            result, pullback = mechanism.vjp(q=q, k=arrays["in_k"], v=arrays["in_v"], indices=indices)
            assert_close(result.output, arrays["out"], 1e-10)
            gradients = pullback(arrays["cot_out"])
            for n in "qkv":
                assert_close(gradients[n], arrays[f"grad_{n}"], 1e-9)


# ---------------------------------------------------------------------- bad input, mistakes

rows = np.broadcast_to(np.array([0, 1, 2]), (B, H, Q, 3))


def test_without_keys_only_no_key_can_be_given():
    q, k, v = np.zeros((1, 3, 2)), np.zeros((1, 0, 2)), np.zeros((1, 0, 4))
    indices = np.full((1, 3, 2), -1)
    for algorithm in ("auto", "whole"):
        result, pullback = attention.vjp(q, k, v, indices=indices, algorithm=algorithm)
        assert np.array_equal(result.output, np.zeros((1, 3, 4)))
        assert np.array_equal(result.lse, np.full((1, 3), -np.inf))
        assert {n: g.shape for n, g in pullback(result.output).items()} == {"q": q.shape, "k": k.shape, "v": v.shape}
    assert np.array_equal(attention.definition(q, k, v, indices=indices).output, np.zeros((1, 3, 4)))
    with pytest.raises(ValueError, match="count is 1, but there are 0 keys"):
        attention(q, k, v, count=1)


BAD = {
    "too_many": ({"count": 7}, ValueError, "count is 7, but there are 6 keys"),
    "zero": ({"count": 0}, ValueError, "count is 0: expected at least 1"),
    "float": ({"count": 2.0}, TypeError, "count is 2.0: expected an integer"),
    "both": ({"indices": rows}, TypeError, "both of count and indices given"),
    "neither": ({"count": None}, TypeError, "neither of count and indices given"),
    "duplicates": ({"duplicates": "once"}, ValueError, "duplicates is 'once'"),
    "negative": ({"count": None, "indices": rows - 2}, ValueError, "indices contains -2"),
    "shape": ({"count": None, "indices": rows[:, :2]}, ValueError, r"indices has shape \(2, 2, 4, 3\)"),
    "dtype": ({"count": None, "indices": rows * 1.0}, TypeError, "indices has dtype float64: expected ints"),
    "list": ({"count": None, "indices": [[0]]}, TypeError, "indices is a list"),
    "heads": ({"k": np.zeros((B, 2, K, D)), "v": np.zeros((B, 2, K, E))}, ValueError, "3 is not a multiple of 2"),
    "head_axis": ({"count": None, "indices": rows[0, 0]}, ValueError, r"indices has shape \(4, 3\)"),
    "rank": ({"q": np.zeros((2, 3))}, ValueError, r"q has shape \(2, 3\)"),
    "align": ({"causal": True}, ValueError, "align is missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        attention.forward(**{**base(), **change})


def test_how_close_a_choice_is():
    """Logits 4, 3.5, 1 at count 2: 2.5 of 4; a masked row sees no more than it chooses; whole numbers have no limit."""
    q, k, v = np.array([[[0.5]]]), np.array([[[2.0], [8.0], [7.0]]]), np.zeros((1, 3, 1))
    arguments = {"q": q, "k": k, "v": v, "count": 2, "scale": 1.0}
    assert attention.margin(arguments) == 2.5 / 4
    assert attention.margin({**arguments, "mask": np.array([[True, True, False]])}) == np.inf
    assert attention.margin({**arguments, "count": 3}) == np.inf
    assert (
        attention.margin({**arguments, "k": np.array([[[2.0], [8.0], [2.0]]]), "bias": np.array([[0.0, 0.1, 0.0]])})
        == 0.0
    )
    assert attention.margin(attention.example(rng(), n=2, count=3)) == np.inf
    tied = attention.example(rng(3), n=2, k=6, count=6)
    assert all(np.array_equal(tied["k"][..., j, :], tied["k"][..., j + 2, :]) for j in range(4))


def test_ties_of_whole_numbers_are_exact_only_under_a_scale_that_is_a_power_of_two():
    rng = np.random.default_rng(0)
    whole = {n: rng.integers(-2, 3, (1, 1, 6, 4)).astype(float) for n in "qkv"}
    whole["k"][..., 3:, :] = whole["k"][..., :3, :]
    margin = attention.margin
    assert margin(whole | {"count": 2}) == np.inf
    assert margin(whole | {"count": 2, "scale": 0.25}) == np.inf
    assert margin(whole | {"count": 3, "scale": 0.37}) < 1e-12
