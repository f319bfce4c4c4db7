"""bigbird_attention: who sees whom, gradients, definition, stored cases, counts, mistakes."""

import array_api_strict
import numpy as np
import pytest
from support import assert_adjoint, assert_close, assert_gradients, cases, random_cotangents

from refattn.attention.bigbird import bigbird_attention as attention
from refattn.attention.bigbird import bigbird_mutations
from refattn.attention.local import local_attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


OPTIONS = {
    "plain": {},
    "ragged": {"t": 19},
    "ragged_local_end": {"t": 19, "block": 4, "global_blocks": (1, 0)},
    "no_globals": {"t": 23, "block": 3, "global_blocks": (0, 0), "window_blocks": 2, "scale": 0.4},
    "no_window": {"window_blocks": 0, "global_blocks": (0, 1)},
    "wide_globals": {"t": 24, "block": 2, "global_blocks": (3, 2)},
    "all_global": {"t": 7, "block": 2, "global_blocks": (3, 3)},
    "no_random": {"r": 0},
    "lengths": {"query_lengths": (20, 9), "key_lengths": (11, 20)},
    "no_keys": {"query_lengths": (20, 9), "key_lengths": (0, 5)},
    "longer_block": {"t": 5, "block": 8},
    "overlapping": {"random_blocks": rng(1).integers(-1, 10, (3, 10, 6))},
    "overlapping_ragged": {"t": 19, "random_blocks": rng(2).integers(-1, 10, (3, 10, 6)), "global_blocks": (0, 0)},
}


def arguments(name="plain", seed=0, **more):
    return attention.example(rng(seed), **{"b": 2, "h": 3, "t": 20, "d": 3, "e": 2, **OPTIONS[name], **more})


def listed(given):
    """The pairs seen, from one comparison at a time."""
    h, t = given["q"].shape[-3:-1]
    block, near, (first, last) = (given[n] for n in ("block", "window_blocks", "global_blocks"))
    n = -(-t // block)
    seen = np.zeros((h, t, t), bool)
    for head, i, j in np.ndindex(h, t, t):
        u, w = i // block, j // block
        drawn = given["random_blocks"][head, u].tolist() if "random_blocks" in given else []
        seen[head, i, j] = abs(u - w) <= near or min(u, w) < first or max(u, w) >= n - last or w in drawn
    return seen


@pytest.mark.parametrize("name", OPTIONS)
def test_the_pairs_are_those_listed(name):
    given = arguments(name, 1)
    lengths = {n: given[n] for n in ("query_lengths", "key_lengths", "scale") if n in given}
    want = scaled_dot_product_attention.forward(*(given[n] for n in "qkv"), mask=listed(given), **lengths)
    got = attention.forward(**given)
    assert_close(got.output, want.output, 60 * EPS)
    assert_close(got.lse, want.lse, 60 * EPS)


@pytest.mark.parametrize("name", ["ragged_local_end", "lengths", "overlapping_ragged"])
def test_gradients_by_complex_step(name):
    given = arguments(name, b=1, d=1, e=1, h=3)
    for n in ("query_lengths", "key_lengths"):
        if n in given:
            given[n] = given[n][1:]
    assert_gradients(attention, given, rng(1))


@pytest.mark.parametrize("name", OPTIONS)
def test_adjoint_identity(name):
    assert_adjoint(attention, arguments(name, 1), rng(2))


@pytest.mark.parametrize("name", OPTIONS)
def test_blocks_equal_whole_and_definition(name):
    given = arguments(name, 2)
    result, pullback = attention.vjp(**given)
    whole, whole_pullback = attention.vjp(**given, algorithm="whole")
    definition = attention.definition(**given)
    for field in result:
        assert_close(getattr(result, field), getattr(whole, field), 60 * EPS)
        assert_close(getattr(result, field), getattr(definition, field), 60 * EPS)
    cotangents = random_cotangents(attention, result, rng(3))
    got = pullback(**cotangents)
    for n, g in whole_pullback(**cotangents).items():
        assert_close(got[n], g, 400 * EPS)


@pytest.mark.parametrize("t, block", [(400, 16), (385, 16), (300, 7)])
def test_longer_sequences(t, block):
    given = arguments("plain", 3, t=t, block=block, r=3, key_lengths=(t, t - 33))
    result, pullback = attention.vjp(**given)
    whole, whole_pullback = attention.vjp(**given, algorithm="whole")
    assert_close(result.output, whole.output, t * EPS)
    cotangents = random_cotangents(attention, result, rng(3))
    got = pullback(**cotangents)
    for n, g in whole_pullback(**cotangents).items():
        assert_close(got[n], g, 10 * t * EPS)


def test_without_globals_and_random_blocks_it_is_local_attention():
    given = arguments("no_random", 4, t=37, block=5, global_blocks=(0, 0))
    qkv = {n: given[n] for n in "qkv"}
    assert_close(attention(**given), local_attention(**qkv, block=5, look_backward=1, look_forward=1), 60 * EPS)


def test_leading_axes_broadcast():
    draw = rng(5)
    q, k, v = draw.standard_normal((3, 1, 2, 8, 3)), draw.standard_normal((2, 2, 8, 3)), draw.standard_normal((2, 8, 4))
    given = {"q": q, "k": k, "v": v, "block": 1, "random_blocks": draw.integers(-1, 8, (2, 8, 2))}
    result = attention.forward(**given)
    assert result.output.shape == (3, 2, 2, 8, 4)
    assert_close(result.output, attention.definition(**given).output, 60 * EPS)
    assert_adjoint(attention, given, draw)


@pytest.mark.parametrize("name", ["plain", "ragged_local_end", "lengths"])
def test_strict_namespace(name):
    given = arguments(name, 6)
    strict = {n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    want, back = attention.vjp(**given)
    got, back_strict = attention.vjp(**strict)
    cotangents = random_cotangents(attention, want, rng(6))
    for field in want:
        assert_close(np.asarray(getattr(got, field)), getattr(want, field), 20 * EPS)
    expected = back(**cotangents)
    for n, g in back_strict(**{n: array_api_strict.asarray(x) for n, x in cotangents.items()}).items():
        assert_close(np.asarray(g), expected[n], 100 * EPS)


def test_poison_reaches_exactly_the_rows_that_may_see_it():
    given = arguments("overlapping_ragged", 7)
    clean = attention(**given)
    for j in (3, 9, 18):
        dirty = {**given, "v": given["v"].copy()}
        dirty["v"][0, :, j] = np.nan
        result, pullback = attention.vjp(**dirty)
        seen = np.zeros((2, 3, 19), bool)
        seen[0] = listed(given)[:, :, j]
        assert np.array_equal(result.output[~seen], clean[~seen])
        assert np.isnan(result.output[seen]).all()
        assert np.isfinite(pullback(np.ones_like(clean))["q"][~seen]).all()


def test_counts():
    given = arguments("ragged", 8)
    pairs = listed(given).sum()
    own = {n: given[n] for n in ("block", "random_blocks", "window_blocks", "global_blocks")}
    found = attention.cost(h=3, t=19, d=3, e=2, **own)
    assert found.multiplies == 5 * pairs
    assert found.computed_multiplies <= 2 * found.multiplies
    short, long = (attention.cost(t=t, d=1, e=0, block=64, r=3) for t in (4096, 16384))
    assert 3.8 < long.computed_multiplies / short.computed_multiplies < 4.3
    assert long.computed_multiplies < 1.1 * long.multiplies


@pytest.mark.parametrize("name, meta, arrays", list(cases("hf_bigbird")), ids=lambda x: x if isinstance(x, str) else "")
def test_stored_cases(name, meta, arrays):
    """All batch entries of a case have one layout; its random blocks are those that nothing else explains."""
    layout = arrays["in_block_layout"][0]
    n = layout.shape[-1]
    u, w = np.arange(n)[:, None], np.arange(n)
    drawn = layout & ~((abs(u - w) <= 1) | (np.minimum(u, w) == 0) | (np.maximum(u, w) == n - 1))
    random_blocks = np.full((*layout.shape[:2], int(drawn.sum(-1).max())), -1)
    for at in np.ndindex(*layout.shape[:2]):
        random_blocks[at][: drawn[at].sum()] = np.flatnonzero(drawn[at])
    lengths = arrays["in_attention_mask"].astype(int).sum(-1)
    given = {**{x: arrays["in_" + x] for x in "qkv"}, "block": meta["options"]["block_size"]}
    given.update(random_blocks=random_blocks, query_lengths=lengths, key_lengths=lengths)
    result, pullback = attention.vjp(**given)
    assert_close(result.output, arrays["out"], 1e-8)  # it masks by -10000
    assert_close(attention.definition(**given).output, arrays["out"], 1e-8)
    gradients = pullback(arrays["cot_out"])
    for x in "qkv":
        assert_close(gradients[x], arrays["grad_" + x], 1e-7)


SHOWN_BY = {"bigbird_none_is_last": "overlapping_ragged", "bigbird_wrap": "no_globals"}


@pytest.mark.parametrize("mutation", bigbird_mutations, ids=lambda m: m.says.replace(" ", "_"))
def test_own_mistakes_differ_visibly(mutation):
    given = arguments(SHOWN_BY.get(mutation.class_, "plain"), 9)
    result, pullback = attention.vjp(**given)
    cotangents = random_cotangents(attention, result, rng(9))
    assert np.abs(mutation.forward(given).output - result.output).max() > 1e-3
    wrong, right = mutation.gradients(given, cotangents), pullback(**cotangents)
    assert max(np.abs(wrong[n] - right[n]).max() for n in wrong) > 1e-3


def test_mistakes_that_do_not_show_say_so():
    assert [m.class_ for m in bigbird_mutations if m.forward(arguments("all_global")) is not None] == []


BAD = {
    "block": ({"block": 0}, ValueError, "block is 0: expected at least 1"),
    "window": ({"window_blocks": -1}, ValueError, "window_blocks is -1: expected at least 0"),
    "globals": ({"global_blocks": 2}, TypeError, "global_blocks is 2: expected (first, last)"),
    "beyond": (
        {"random_blocks": np.full((3, 10, 1), 10)},
        ValueError,
        "random_blocks contains 10: expected blocks 0 ... 9",
    ),
    "shape": (
        {"random_blocks": np.zeros((3, 9, 1), int)},
        ValueError,
        "random_blocks has shape (3, 9, 1): expected (h, n, r)",
    ),
    "dtype": (
        {"random_blocks": np.zeros((3, 10, 1))},
        TypeError,
        "random_blocks has dtype float64: expected an int array",
    ),
    "heads": ({"k": np.zeros((2, 1, 20, 3))}, ValueError, "k has shape (2, 1, 20, 3): its axis 'h'"),
    "lengths": ({"key_lengths": (5, 21)}, ValueError, "key_lengths is [5, 21]: expected between 0 and 20"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind) as caught:
        attention.forward(**{**arguments(), **change})
    assert message in str(caught.value)


@pytest.mark.parametrize("sizes", [{"b": 0}, {"t": 1}, {"t": 0, "r": 0}, {"e": 0}])
def test_small_axes(sizes):
    given = arguments(**sizes)
    result, pullback = attention.vjp(**given)
    assert result.output.shape == (*given["q"].shape[:-1], given["v"].shape[-1])
    assert all(g.shape == given[n].shape for n, g in pullback(result.output).items())
