"""etc_attention: long and global rows, labels, masks, gradients, definition, counts, mistakes."""

import numpy as np
import pytest
from contract.cases.etc import arguments
from support import assert_close

from refattn.attention.etc import etc_attention as attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def test_without_labels_it_is_dense_attention_with_masks():
    given = arguments("no_labels", 4, t=9, n=3, radius=2)
    k, v = (np.concatenate([given[n + "_global"], given[n]], axis=-2) for n in "kv")
    result = attention.forward(**given)
    assert_close(result.output_global, scaled_dot_product_attention(given["q_global"], k, v), 60 * EPS)
    i, j = np.arange(9)[:, None], np.arange(12)
    mask = (j < 3) | (abs(j - 3 - i) <= 2)
    assert_close(result.output, scaled_dot_product_attention(given["q"], k, v, mask=mask), 60 * EPS)


def test_a_label_is_a_vector_added_to_the_key():
    given = arguments("distances", 5, radius=1, p=3, clip=1)
    k, labels = given["k"], given["labels"]
    i = 3  # its neighbours are 2 and 4
    keys = np.concatenate([given["k_global"], k[..., i - 1 : i + 2, :] + labels], axis=-2)
    values = np.concatenate([given["v_global"], given["v"][..., i - 1 : i + 2, :]], axis=-2)
    want = scaled_dot_product_attention(given["q"][..., i : i + 1, :], keys, values, scale=0.4)
    assert_close(attention(**given)[..., i : i + 1, :], want, 60 * EPS)


def test_one_cotangent_alone():
    given = arguments("plain", 6)
    result, pullback = attention.vjp(**given)
    both = pullback(output=np.ones_like(result.output), output_global=np.ones_like(result.output_global))
    first, second = pullback(np.ones_like(result.output)), pullback(output_global=np.ones_like(result.output_global))
    for n, g in both.items():
        assert_close(first[n] + second[n], g, 100 * EPS)
    assert not first["q_global"].any()
    assert not second["q"].any()


def test_counts():
    t, n, radius = 40, 3, 4
    i = np.arange(t)
    pairs = (abs(i[:, None] - i) <= radius).sum() + t * n + n * (n + t)
    assert attention.cost(t=t, n=n, d=3, e=2, radius=radius).multiplies == 5 * pairs
    assert attention.cost(t=t, n=n, d=3, e=2, p=7, radius=radius).multiplies == 5 * pairs + (t + n) * 7 * 3
    short, long = (attention.cost(t=t, n=64, d=1, e=0, radius=84) for t in (32768, 131072))
    assert 3.8 < long.computed_multiplies / short.computed_multiplies < 4.3


def test_padded_queries_reach_nothing_but_their_own_gradients():
    given = arguments("lengths", 9)
    clean, pullback = attention.vjp(**given)
    cotangents = {"output": np.ones_like(clean.output), "output_global": np.ones_like(clean.output_global)}
    want = pullback(**cotangents)
    for value in (np.nan, np.inf):
        dirty = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in given.items()}
        for n, ends in (("q", "lengths"), ("k", "lengths"), ("v", "lengths"), ("q_global", "global_lengths")):
            for b, end in enumerate(given[ends]):
                dirty[n][b, :, end:] = value
        result, pullback = attention.vjp(**dirty)
        assert np.array_equal(result.output, clean.output)
        assert np.array_equal(result.output_global, clean.output_global)
        for n, g in pullback(**cotangents).items():
            assert np.array_equal(g, want[n]), n


BAD = {
    "radius": ({"radius": -1}, ValueError, "radius is -1: expected at least 0"),
    "clip": ({"clip": 4}, ValueError, "clip is 4, so that distances have 9 labels: labels has 7 rows"),
    "even": ({"clip": None, "labels": np.zeros((2, 4, 3))}, ValueError, "labels has 4 rows: expected clip"),
    "labels": ({"labels": np.zeros((2, 7, 4))}, ValueError, "labels has shape (2, 7, 4): its axis 'd'"),
    "missing": ({"labels": None}, TypeError, "labels is missing"),
    "label": ({"long_labels": np.full((6, 2), 7)}, ValueError, "long_labels contains 7: expected labels 0 ... 6"),
    "shape": (
        {"global_labels": np.zeros((2, 6), int)},
        ValueError,
        "global_labels has shape (2, 6): expected (..., 2, 8)",
    ),
    "mask": ({"long_mask": np.ones((6, 2))}, TypeError, "long_mask has dtype float64: expected a bool array"),
    "lengths": ({"lengths": (7, 2)}, ValueError, "lengths is [7, 2]: expected between 0 and 6"),
    "global": ({"v_global": np.zeros((2, 2, 3, 2))}, ValueError, "v_global has shape (2, 2, 3, 2): its axis 'n'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind) as caught:
        attention.forward(**{**arguments(), **change})
    assert message in str(caught.value)


@pytest.mark.parametrize("sizes", [{"b": 0}, {"t": 1}, {"t": 0}, {"e": 0}])
def test_small_axes(sizes):
    given = arguments(**sizes)
    result, pullback = attention.vjp(**given)
    assert result.output.shape == (*given["q"].shape[:-1], given["v"].shape[-1])
    assert all(g.shape == given[n].shape for n, g in pullback(output_global=result.output_global).items())
