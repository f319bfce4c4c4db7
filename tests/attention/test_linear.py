"""linear_attention: gradients, the three forms, a state carried across splits, definition, stored cases, counts."""

import tracemalloc

import numpy as np
import pytest
from contract.cases.linear import FORMS, B, D, E, H, N, arguments
from support import (
    assert_close,
    cases,
    random_cotangents,
)

from refattn.attention.linear import linear_attention as attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("form", FORMS)
def test_three_forms_agree_with_the_state_carried_across_splits(form):
    n, cut = 200, 77
    given = attention.example(rng(4), b=1, h=2, q=n, k=n, d=8, e=5, causal=True, state=True, normalizer=True)
    whole, pullback = attention.vjp(**given)
    cotangents = random_cotangents(attention, whole, rng(4))
    want = pullback(**cotangents)

    def part(at, state, normalizer):
        rows = {x: given[x][..., at, :] for x in "qkv"}
        return attention.vjp(**rows, causal=True, form=form, chunk=16, state=state, normalizer=normalizer)

    first, back_first = part(slice(0, cut), given["state"], given["normalizer"])
    second, back_second = part(slice(cut, n), first.state, first.normalizer)
    assert_close(np.concatenate([first.output, second.output], -2), whole.output, 1e-12)
    assert_close(second.state, whole.state, 1e-12)
    assert_close(second.normalizer, whole.normalizer, 1e-12)
    late = back_second(**{**cotangents, "output": cotangents["output"][..., cut:, :]})
    early = back_first(output=cotangents["output"][..., :cut, :], state=late["state"], normalizer=late["normalizer"])
    for x in "qkv":
        assert_close(np.concatenate([early[x], late[x]], -2), want[x], 1e-12 * max(1, np.abs(want[x]).max()))
    assert_close(early["state"], want["state"], 1e-12 * np.abs(want["state"]).max())
    assert_close(early["normalizer"], want["normalizer"], 1e-12 * np.abs(want["normalizer"]).max())


def test_values_of_one_give_one():
    given = arguments("causal", 5)
    given["v"] = np.ones_like(given["v"])
    for form in FORMS:
        assert_close(attention(**given, form=form, chunk=2), np.ones((B, H, N, E)), 8 * EPS)


@pytest.mark.parametrize("form", FORMS)
def test_nan_reaches_only_those_who_see_it(form):
    given = arguments("causal", 8, form=form, chunk=3)
    want, back = attention.vjp(**given)
    for name in "kv":
        poisoned = {**given, name: given[name].copy()}
        poisoned[name][..., 4, :] = np.nan
        result, pullback = attention.vjp(**poisoned)
        assert np.array_equal(result.output[..., :4, :], want.output[..., :4, :])
        assert np.isnan(result.output[..., 4:, :]).all()
        cotangents = random_cotangents(attention, want, rng(8))
        assert np.array_equal(pullback(**cotangents)["q"][..., :4, :], back(**cotangents)["q"][..., :4, :])
    padded = {**given, "key_lengths": (4, 4)}
    want, back = attention.vjp(**padded)
    for name in "kv":
        poisoned = {**padded, name: padded[name].copy()}
        poisoned[name][..., 4:, :] = np.nan
        result, pullback = attention.vjp(**poisoned)
        cotangents = random_cotangents(attention, want, rng(8))
        for field in want:
            assert np.array_equal(getattr(result, field), getattr(want, field))
        got, expected = pullback(**cotangents), back(**cotangents)
        for x in "qkv":
            assert np.array_equal(got[x], expected[x])


def test_empty_arrays():
    given = {"q": np.zeros((1, 2, 3, 4)), "k": np.zeros((1, 2, 0, 4)), "v": np.zeros((1, 2, 0, 5))}
    result, pullback = attention.vjp(**given)
    assert np.array_equal(result.output, np.zeros((1, 2, 3, 5)))
    assert pullback(np.ones((1, 2, 3, 5)))["k"].shape == (1, 2, 0, 4)
    result, pullback = attention.vjp(given["k"], given["k"], given["v"], causal=True)
    assert result.output.shape == (1, 2, 0, 5)
    assert pullback(result.output)["q"].shape == (1, 2, 0, 4)


def test_cost_is_linear_in_the_length():
    counts = [attention.cost(q=n, k=n, d=64, causal=True, form="chunked").computed_multiplies for n in (1024, 4096)]
    assert counts[1] == 4 * counts[0]


# ------------------------------------------------------------------------------------------------ stored cases


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "name, meta, arrays",
    [c for c in cases("fast_transformers") if "linear_elu" in c[0]],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_fast_transformers(name, meta, arrays, form):
    causal = bool(meta["options"].get("causal")) or name.startswith("recurrent")
    given = {"q": arrays["in_q"], "k": arrays["in_k"], "v": arrays["in_v"], "causal": causal}
    given.update(scale=1.0, normalize_eps=1e-6, form=form, chunk=4)
    if "in_key_lengths" in arrays:
        given["key_lengths"] = arrays["in_key_lengths"]
    check(given, arrays, 2e-6 if arrays["in_q"].dtype == np.float32 else 1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "name, meta, arrays",
    [c for c in cases("fla") if c[0].startswith("linear_attn")],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_fla(name, meta, arrays, form):
    given = {"q": arrays["in_q"], "k": arrays["in_k"], "v": arrays["in_v"], "causal": True, "form": form, "chunk": 4}
    normalized = name == "linear_attn_normalized"
    given.update(feature_map="identity", normalize=normalized, normalize_eps=1e-10)
    if "in_h0" in arrays:
        given.update(state=arrays["in_h0"], scale=0.7)
    check(given, arrays, 1e-12)


def check(given, arrays, tolerance):
    result, pullback = attention.vjp(**given)
    assert_close(result.output, arrays["out"], tolerance)
    assert_close(attention.definition(**given).output, arrays["out"], tolerance)
    for stored, field in (("out_S", "state"), ("out_state", "state"), ("out_Z", "normalizer")):
        if stored in arrays:
            assert_close(getattr(result, field), arrays[stored], tolerance)
    if "cot_out" in arrays:
        gradients = pullback(arrays["cot_out"])
        for x in ("q", "k", "v"):
            assert_close(gradients[x], arrays["grad_" + x], 10 * tolerance)


# ------------------------------------------------------------------------------------------------ mistakes and bad input


def test_causal_memory_is_linear_in_the_length_by_default():
    n, d = 4096, 8
    x = np.zeros((1, n, d), np.float32)
    tracemalloc.start()
    try:
        attention(x, x, x, causal=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 20 * n * d  # a (q, k) matrix has 4 n n bytes, 25 times as many


def test_an_unnormalised_causal_sum_of_no_value_channels():
    given = attention.example(rng(0), k=4, e=0, causal=True, normalize=False)
    result, pullback = attention.vjp(**given)
    assert result.output.shape == (2, 3, 4, 0)
    assert (pullback(output=result.output)["q"] == 0).all()


BAD = {
    "eps": ({"normalize_eps": -1.0}, ValueError, "normalize_eps is -1.0: expected at least 0"),

    "unequal": ({"causal": True, "q": np.zeros((B, H, 5, D))}, ValueError, "as many queries as keys"),
    "map": ({"feature_map": "relu"}, ValueError, "feature_map is 'relu'"),
    "form": ({"form": "tiled"}, ValueError, "form is 'tiled'"),
    "chunk": ({"chunk": 0}, ValueError, "chunk is 0: expected at least 1"),
    "channels": ({"k": np.zeros((B, H, N, 4))}, ValueError, "k has shape (2, 2, 7, 4)"),
    "state": ({"state": np.zeros((B, H, E, D))}, ValueError, "state has shape (2, 2, 2, 3)"),
    "normalizer": ({"normalizer": np.zeros((B, H, E))}, ValueError, "normalizer has shape (2, 2, 2)"),
    "lengths": ({"key_lengths": (3, 9)}, ValueError, "key_lengths is [3, 9]: expected between 0 and 7"),
    "scale": ({"scale": float("nan")}, ValueError, "scale is nan"),
    "mask": ({"mask": np.ones((N, N), bool)}, TypeError, "has no option 'mask'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind) as caught:
        attention.forward(**{**arguments("plain"), **change})
    assert message in str(caught.value)
