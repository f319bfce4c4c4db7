"""longformer_attention: window and global tokens, gradients, definition, stored cases, counts, mistakes."""

import numpy as np
import pytest
from contract.cases.longformer import arguments
from support import assert_close, cases

from refattn.attention.longformer import longformer_attention as attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


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
