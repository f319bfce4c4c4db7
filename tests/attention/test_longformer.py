"""longformer_attention: window and global tokens, gradients, definition, stored cases, counts, mistakes."""

import array_api_strict
import numpy as np
import pytest
from support import assert_adjoint, assert_close, assert_gradients, cases, random_cotangents

from refattn.attention.longformer import _Steps
from refattn.attention.longformer import longformer_attention as attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention

EPS = np.finfo(np.float64).eps
OPTIONS = {
    "plain": {},
    "no_globals": {"n": 0},
    "local_arrays": {"q_global": None, "k_global": None, "v_global": None},
    "some_arrays": {"k_global": None, "scale": 0.4},
    "uneven": {"window": (3, 1), "scale": 0.7},
    "past": {"window": (None, 0)},
    "oneself": {"window": (0, 0)},
    "lengths": {"query_lengths": (5, 8), "key_lengths": (6, 8), "align": "upper_left"},
    "no_keys": {"query_lengths": (8, 8), "key_lengths": (0, 8), "align": "lower_right"},
    "ragged": {"global_tokens": np.array([[1, 0, 0, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 0, 0, 0]], bool)},
    "one_batch": {"global_tokens": np.array([[1, 0, 0, 1, 0, 0, 0, 1], [0] * 8], bool)},
    "all_global": {"global_tokens": np.ones((2, 8), bool)},
}
OPTIONS["no_keys"].update(align="upper_left")


def rng(seed=0):
    return np.random.default_rng(seed)


def arguments(name="plain", seed=0, **more):
    return attention.example(rng(seed), **{"b": 2, "h": 2, "t": 8, "d": 3, "e": 2, **OPTIONS[name], **more})


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(name):
    given = arguments(name, h=1, d=2, e=1)
    names = [n for n in attention.differentiable if given.get(n) is not None]
    if name == "all_global":
        names = [n for n in names if n.endswith("_global")]  # the local arrays are not read
    assert_gradients(attention, given, rng(1), names=names)
    assert_adjoint(attention, arguments(name, 1), rng(2))


@pytest.mark.parametrize("t", [8, 37, 150])
@pytest.mark.parametrize("name", OPTIONS)
def test_blocks_equal_whole_and_definition(name, t):
    given = arguments(name, 2)
    if t != 8:
        given = arguments(name, 2, t=t, **{n: None for n in OPTIONS[name] if n == "global_tokens"}, n=5)
        if "global_tokens" not in given:
            given["global_tokens"] = rng(2).random((2, t)) < 0.1
    result, pullback = attention.vjp(**given)
    whole, whole_pullback = attention.vjp(**given, algorithm="whole")
    assert_close(result.output, whole.output, 40 * EPS + t * EPS)  # convex sums of at most t values
    if t < 100:
        assert_close(result.output, attention.definition(**given).output, 40 * EPS + t * EPS)
    cotangents = random_cotangents(attention, result, rng(3))
    got = pullback(**cotangents)
    for n, g in whole_pullback(**cotangents).items():
        assert_close(got[n], g, 200 * EPS + 10 * t * EPS)


def test_without_globals_it_is_a_window():
    given = arguments("no_globals", 3, t=40, window=(5, 2))
    qkv = {n: given[n] for n in "qkv"}
    assert_close(attention(**given), scaled_dot_product_attention(**qkv, window=(5, 2)), 60 * EPS)
    given["global_tokens"] = np.zeros(40, bool)
    assert_close(attention(**given), scaled_dot_product_attention(**qkv, window=(5, 2)), 60 * EPS)


def test_all_tokens_global_is_full_attention_of_the_global_arrays():
    given = arguments("all_global", 3)
    full = scaled_dot_product_attention(*(given[n + "_global"] for n in "qkv"))
    assert_close(attention(**given), full, 40 * EPS)


def test_lengths_of_the_whole_change_nothing():
    given = arguments("plain", 4)
    padded = {**given, "query_lengths": (8, 8), "key_lengths": (8, 8), "align": "upper_left"}
    assert np.array_equal(attention(**given), attention(**padded))


def test_leading_axes_broadcast():
    draw = rng(5)
    q, k, v = draw.standard_normal((3, 1, 2, 8, 3)), draw.standard_normal((2, 2, 8, 3)), draw.standard_normal((2, 8, 4))
    given = {"q": q, "k": k, "v": v, "window": (1, 2), "q_global": draw.standard_normal((2, 8, 3))}
    given["global_tokens"] = draw.random((3, 2, 8)) < 0.3
    result = attention.forward(**given)
    assert result.output.shape == (3, 2, 2, 8, 4)
    assert_close(result.output, attention.definition(**given).output, 40 * EPS)
    assert_adjoint(attention, given, draw)
    shared = {"q": k[0], "k": k[0], "v": v, "window": (1, 2), "global_tokens": given["global_tokens"][0]}
    assert attention(**shared).shape == (2, 2, 8, 4)
    assert_close(attention(**shared), attention.definition(**shared).output, 40 * EPS)
    assert_adjoint(attention, shared, draw)


@pytest.mark.parametrize("name, t", [("ragged", 8), ("lengths", 8), ("plain", 90)])
def test_strict_namespace(name, t):
    given = arguments(name, 6, t=t)
    strict = {n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    want, back = attention.vjp(**given)
    got, back_strict = attention.vjp(**strict)
    cotangents = random_cotangents(attention, want, rng(6))
    assert_close(np.asarray(got.output), want.output, 20 * EPS)
    expected = back(**cotangents)
    for n, g in back_strict(output=array_api_strict.asarray(cotangents["output"])).items():
        assert_close(np.asarray(g), expected[n], 100 * EPS)


def test_padding_is_never_read_and_nan_stays_where_it_is_seen():
    given = arguments("lengths", 7)
    want, back = attention.vjp(**given)
    dirty = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in given.items()}
    for name in ("k", "v", "k_global", "v_global"):
        dirty[name][0, :, 6:] = np.nan
    result, pullback = attention.vjp(**dirty)
    assert np.array_equal(result.output, want.output)
    d = np.ones_like(want.output)
    expected = back(d)
    for n, g in pullback(d).items():
        assert np.array_equal(g, expected[n])
    given = arguments("plain", 7, t=60, n=0)
    given["global_tokens"] = np.arange(60) == 50
    given["v"][0, 0, 10] = np.nan
    hit = np.isnan(attention(**given)[0, 0]).all(-1)
    assert np.flatnonzero(hit).tolist() == [8, 9, 10, 11, 12, 50]


def test_half_precision_is_computed_in_float32():
    given = {n: x.astype(np.float16) if x.dtype == float else x for n, x in arguments(window=None).items()}
    output = attention(**given, window=(2, 2))
    assert output.dtype == np.float16
    assert_close(output, attention.definition(**given, window=(2, 2)).output, 2 * 2.0**-11)


def test_pairs_are_counted_and_grow_with_the_length():
    t, n = 50, 3
    tokens = np.arange(t) < n
    i = np.arange(t)
    near = (abs(i[:, None] - i) <= 4) | tokens
    pairs = near[~tokens].sum() + n * t
    assert attention.cost(t=t, n=n, d=3, e=2, window=(4, 4)).multiplies == 5 * pairs
    short, long = (attention.cost(t=t, n=4, d=1, e=0, window=(256, 256)) for t in (4096, 16384))
    assert 3.9 < long.computed_multiplies / short.computed_multiplies < 4.25  # the first rows see less
    assert long.computed_multiplies < 1.7 * long.multiplies


@pytest.mark.parametrize(
    "name, meta, arrays", list(cases("hf_longformer")), ids=lambda x: x if isinstance(x, str) else ""
)
def test_stored_cases(name, meta, arrays):
    half = meta["options"]["attention_window"] // 2
    given = {**{n: arrays["in_" + n] for n in "qkv"}, "window": (half, half)}
    names = list("qkv")
    if "in_q_global" in arrays:
        given["global_tokens"] = arrays["in_global_tokens"]
        names += [n + "_global" for n in "qkv"]
        given.update((n, arrays["in_" + n]) for n in names[3:])
    if arrays["in_padding"].any():
        lengths = (~arrays["in_padding"]).sum(-1)
        given.update(query_lengths=lengths, key_lengths=lengths, align="upper_left")
    result, pullback = attention.vjp(**given)
    assert_close(result.output, arrays["out"], 1e-10)
    assert_close(attention.definition(**given).output, arrays["out"], 1e-10)
    gradients = pullback(arrays["cot_out"])
    for n in names:
        assert_close(gradients[n], arrays["grad_" + n], 1e-9)


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_of_the_mistakes_are_right(name):
    given = arguments(name, 8)
    result, pullback = attention.vjp(**given)
    steps = _Steps(given)
    assert_close(steps.forward().output, result.output, 60 * EPS)
    cotangents = random_cotangents(attention, result, rng(8))
    gradients = pullback(**cotangents)
    for n, g in steps.gradients(cotangents["output"]).items():
        assert_close(g, gradients[n], 200 * EPS)


@pytest.mark.parametrize("mutation", attention.mutations, ids=lambda m: m.says.replace(" ", "_"))
def test_mistakes_differ(mutation):
    given = arguments("lengths" if mutation.class_ == "tail_unmasked" else "uneven", 9)
    result, pullback = attention.vjp(**given)
    cotangents = random_cotangents(attention, result, rng(9))
    if mutation.forward is not None:
        assert np.abs(mutation.forward(given).output - result.output).max() > 1e-3
    wrong, right = mutation.gradients(given, cotangents), pullback(**cotangents)
    if wrong is not None:
        assert max(np.abs(wrong[n] - right[n]).max() for n in wrong) > 1e-3
    elif mutation.class_ != "global_columns_projection":
        raise AssertionError("no gradients")


def test_mistakes_that_do_not_show_say_so():
    given = arguments("no_globals", 9)
    cotangents = {"output": rng(9).standard_normal((2, 2, 8, 2))}
    shown = {m.class_ for m in attention.mutations if m.forward is not None and m.forward(given) is not None}
    assert shown == {"window_plus1"}
    assert {m.class_ for m in attention.mutations if m.gradients(given, cotangents) is not None} == shown


BAD = {
    "window": ({"window": 3}, TypeError, "window is 3: expected (left, right)"),
    "negative": ({"window": (-1, 2)}, ValueError, "window is -1: expected at least 0"),
    "ints": ({"global_tokens": np.array([0, 3])}, ValueError, "global_tokens has shape (2,): its axis 't'"),
    "list": ({"global_tokens": [0, 3]}, TypeError, "global_tokens is a list: expected a bool array"),
    "dtype": ({"global_tokens": np.zeros(8, int)}, TypeError, "global_tokens has dtype int64: expected a bool array"),
    "beyond": ({"global_tokens": np.arange(9) == 8}, ValueError, "global_tokens has shape (9,): its axis 't'"),
    "align": ({"align": 2}, ValueError, "align is 2: every query stands at its own key"),
    "missing": ({"key_lengths": (5, 8)}, ValueError, "align is missing"),
    "queries": ({"q": np.zeros((2, 2, 7, 3))}, ValueError, "its axis 't' of (... h t d)"),
    "heads": ({"k": np.zeros((2, 1, 8, 3))}, ValueError, "k has shape (2, 1, 8, 3): its axis 'h'"),
    "lengths": (
        {"key_lengths": (5, 9), "align": "upper_left"},
        ValueError,
        "key_lengths is [5, 9]: expected between 0 and 8",
    ),
    "global": ({"v_global": np.zeros((2, 2, 8, 3))}, ValueError, "v_global has shape (2, 2, 8, 3): its axis 'e'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind) as caught:
        attention.forward(**{**arguments(), **change})
    assert message in str(caught.value)


@pytest.mark.parametrize("sizes", [{"b": 0}, {"t": 1, "n": 1}, {"e": 0}])
def test_small_axes(sizes):
    given = arguments(**sizes)
    result, pullback = attention.vjp(**given)
    assert result.output.shape == (*given["q"].shape[:-1], given["v"].shape[-1])
    assert all(g.shape == given[n].shape for n, g in pullback(result.output).items())
