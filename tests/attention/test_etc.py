"""etc_attention: long and global rows, labels, masks, gradients, definition, counts, mistakes."""

import array_api_strict
import numpy as np
import pytest
from support import assert_adjoint, assert_close, assert_gradients, random_cotangents

from refattn.attention.etc import _Steps
from refattn.attention.etc import etc_attention as attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention

EPS = np.finfo(np.float64).eps
OPTIONS = {
    "plain": {},
    "no_labels": {"p": 0},
    "distances": {"long_labels": None, "global_labels": None, "p": 5, "radius": 4, "clip": 2, "scale": 0.4},
    "default_clip": {"long_labels": None, "global_labels": None, "p": 5, "clip": None},
    "masks": {"long_mask": True, "global_mask": True},
    "shared_masks": {
        "long_mask": np.arange(12).reshape(6, 2) % 3 > 0,
        "global_mask": np.arange(16).reshape(2, 8) % 3 > 0,
    },
    "lengths": {"lengths": (6, 3), "global_lengths": (1, 2)},
    "no_keys": {"lengths": (0, 3), "global_lengths": (0, 2), "global_mask": True},
    "alone": {"radius": 0, "p": 1, "clip": 0, "long_labels": None},
    "no_global": {"n": 0},
}


def rng(seed=0):
    return np.random.default_rng(seed)


def arguments(name="plain", seed=0, **more):
    sizes = {"b": 2, "h": 2, "t": 6, "n": 2, "d": 3, "e": 2, "p": 7, "radius": 1}
    return attention.example(rng(seed), **{**sizes, **OPTIONS[name], **more})


@pytest.mark.parametrize("name", ["plain", "distances", "masks", "lengths"])
def test_gradients_by_complex_step(name):
    given = arguments(name, h=1, d=2, e=1)
    assert_gradients(attention, given, rng(1))


@pytest.mark.parametrize("name", OPTIONS)
def test_adjoint_identity(name):
    assert_adjoint(attention, arguments(name, 1), rng(2))


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_definition_and_the_steps_of_the_mistakes(name):
    given = arguments(name, 2)
    result, pullback = attention.vjp(**given)
    want, steps = attention.definition(**given), _Steps(given)
    for field in result:
        assert_close(getattr(result, field), getattr(want, field), 80 * EPS)  # up to 8 keys, products of 3 and labels
        assert_close(getattr(result, field), getattr(steps.result(), field), 80 * EPS)
    cotangents = random_cotangents(attention, result, rng(3))
    gradients = pullback(**cotangents)
    for n, g in steps.gradients(cotangents).items():
        assert_close(g, gradients[n], 400 * EPS)
    assert set(steps.gradients(cotangents)) == set(gradients)


@pytest.mark.parametrize("algorithm", ["whole", "tiled", "auto"])
def test_tiles(algorithm):
    given = arguments("masks", 3, t=150, n=5, radius=9, p=9, clip=3, lengths=(150, 88))
    result, pullback = attention.vjp(**given, algorithm=algorithm)
    steps = _Steps(given)
    cotangents = random_cotangents(attention, result, rng(3))
    for field in result:
        assert_close(getattr(result, field), getattr(steps.result(), field), 300 * EPS)
    gradients = pullback(**cotangents)
    for n, g in steps.gradients(cotangents).items():
        assert_close(g, gradients[n], 3000 * EPS)


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


def test_leading_axes_broadcast():
    draw = rng(6)
    normal = draw.standard_normal
    given = {"q": normal((3, 1, 2, 6, 3)), "k": normal((2, 2, 6, 3)), "v": normal((2, 6, 4)), "radius": 1}
    given.update(q_global=normal((2, 2, 3)), k_global=normal((3, 1, 2, 2, 3)), v_global=normal((2, 2, 4)))
    given.update(labels=normal((2, 5, 3)), clip=1, long_labels=draw.integers(-1, 5, (2, 6, 2)))
    given.update(global_mask=draw.random((3, 2, 2, 8)) < 0.7)
    result = attention.forward(**given)
    assert result.output.shape == (3, 2, 2, 6, 4)
    assert result.output_global.shape == (3, 2, 2, 2, 4)
    want = attention.definition(**given)
    for field in result:
        assert_close(getattr(result, field), getattr(want, field), 80 * EPS)
    assert_adjoint(attention, given, draw)


@pytest.mark.parametrize("name", ["plain", "masks", "lengths"])
def test_strict_namespace(name):
    given = arguments(name, 7)
    strict = {n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    want, back = attention.vjp(**given)
    got, back_strict = attention.vjp(**strict)
    cotangents = random_cotangents(attention, want, rng(7))
    expected = back(**cotangents)
    for field in want:
        assert_close(np.asarray(getattr(got, field)), getattr(want, field), 20 * EPS)
    for n, g in back_strict(**{n: array_api_strict.asarray(x) for n, x in cotangents.items()}).items():
        assert_close(np.asarray(g), expected[n], 100 * EPS)


def test_padding_is_never_read():
    given = arguments("lengths", 8)
    want, back = attention.vjp(**given)
    dirty = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in given.items()}
    for n in "kv":
        dirty[n][1, :, 3:] = np.nan
        dirty[n + "_global"][0, :, 1:] = np.nan
    result, pullback = attention.vjp(**dirty)
    cotangents = random_cotangents(attention, want, rng(8))
    expected = back(**cotangents)
    for field in want:
        assert np.array_equal(getattr(result, field), getattr(want, field))
    for n, g in pullback(**cotangents).items():
        assert np.array_equal(g, expected[n])


def test_half_precision_is_computed_in_float32():
    given = {n: x.astype(np.float16) if getattr(x, "dtype", None) == np.float64 else x for n, x in arguments().items()}
    result, want = attention.forward(**given), attention.definition(**given)
    for field in result:
        assert getattr(result, field).dtype == np.float16
        assert_close(getattr(result, field), getattr(want, field), 2 * 2.0**-11)


def test_counts():
    t, n, radius = 40, 3, 4
    i = np.arange(t)
    pairs = (abs(i[:, None] - i) <= radius).sum() + t * n + n * (n + t)
    assert attention.cost(t=t, n=n, d=3, e=2, radius=radius).multiplies == 5 * pairs
    assert attention.cost(t=t, n=n, d=3, e=2, p=7, radius=radius).multiplies == 5 * pairs + (t + n) * 7 * 3
    short, long = (attention.cost(t=t, n=64, d=1, e=0, radius=84) for t in (32768, 131072))
    assert 3.8 < long.computed_multiplies / short.computed_multiplies < 4.3


SHOWN_BY = {"tail_unmasked": "lengths", "etc_label_clip": "distances"}


@pytest.mark.parametrize("mutation", attention.mutations, ids=lambda m: m.says.replace(" ", "_"))
def test_mistakes_differ(mutation):
    given = arguments(SHOWN_BY.get(mutation.class_, "plain"), 9)
    result, pullback = attention.vjp(**given)
    cotangents = random_cotangents(attention, result, rng(9))
    if mutation.forward is not None:
        wrong = mutation.forward(given)
        assert max(np.abs(getattr(wrong, n) - getattr(result, n)).max() for n in wrong) > 1e-3
    if mutation.gradients is not None:
        wrong, right = mutation.gradients(given, cotangents), pullback(**cotangents)
        assert max(np.abs(wrong[n] - right[n]).max() for n in wrong) > 1e-3


def test_mistakes_that_do_not_show_say_so():
    given = arguments("no_labels", 9)
    shown = {m.class_ for m in attention.mutations if m.forward is not None and m.forward(given) is not None}
    assert shown == {"window_plus1", "etc_two_softmaxes", "global_columns_drop", "global_rows_drop"}
    cotangents = random_cotangents(attention, attention.forward(**given), rng(9))
    shown = {m.class_ for m in attention.mutations if m.gradients is not None and m.gradients(given, cotangents)}
    assert shown == {"window_plus1", "global_columns_drop", "global_rows_drop"}


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
