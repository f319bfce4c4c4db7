"""Lists of keys (`indices`, `block_indices`): what they mean, by hand and as masks; counts; errors."""

import numpy as np
import pytest
from support import assert_close, random_cotangents

import refattn as ra

attention = ra.scaled_dot_product_attention
EPS = np.finfo(np.float64).eps


def drawn(seed=0, *, b=2, h=4, g=2, q=3, k=5, d=3, e=2):
    normal = np.random.default_rng(seed).standard_normal
    return {"q": normal((b, h, q, d)), "k": normal((b, g, k, d)), "v": normal((b, g, k, e))}


def test_a_key_that_is_listed_twice_by_hand():
    """Logits 0 everywhere: the values 1, 2, 4 in the proportions of how often each is listed."""
    q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 4, 1)), np.array([[[1.0], [2.0], [4.0], [8.0]]])
    lists = np.array([[[2, -1, 0, 2, 9]]])
    once = attention.forward(q, k, v, indices=lists)
    assert_close(once.output, [[[2.5]]], EPS)
    assert_close(once.lse, [[np.log(2)]], EPS)
    for algorithm in ("auto", "whole", "tiled"):
        twice = attention.forward(q, k, v, indices=lists, duplicates="multiset", algorithm=algorithm)
        assert_close(twice.output, [[[3.0]]], 2 * EPS)
        assert_close(twice.lse, [[np.log(3)]], 2 * EPS)


def test_blocks_are_the_keys_they_hold():
    """Blocks of 2 of 5 keys: the last holds one, block 3 none."""
    arrays = drawn()
    blocks = np.array([[[2, 0], [-1, 1], [3, 3]]])
    keys = np.array([[[4, 0, 1], [2, 3, -1], [-1, -1, -1]]])
    want, want_pullback = attention.vjp(**arrays, indices=keys)
    got, pullback = attention.vjp(**arrays, block_indices=blocks, block=2)
    assert_close(got.output, want.output, 4 * EPS)
    assert np.array_equal(got.lse[..., 2], np.full((2, 4), -np.inf))
    cotangents = random_cotangents(attention, want, np.random.default_rng(1))
    cotangents["lse"][..., 2] = 0
    for n, d in want_pullback(**cotangents).items():
        assert_close(pullback(**cotangents)[n], d, 8 * EPS)


@pytest.mark.parametrize("head_map", ["repeat", "tile"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_list_is_a_mask(heads, head_map):
    arrays = drawn(heads)
    lists = np.random.default_rng(3).integers(-1, 6, (2, heads, 3, 4))
    mask = (lists[..., None] == np.arange(5)).any(-2)
    if heads == 2:
        mask = np.repeat(mask, 2, 1) if head_map == "repeat" else np.tile(mask, (1, 2, 1, 1))
    options = {"causal": True, "align": "lower_right", "head_map": head_map}
    want, want_pullback = attention.vjp(**arrays, mask=mask, **options)
    cotangents = {n: np.where(np.isfinite(x), x, 0) for n, x in want.fields.items()}
    for algorithm in ("auto", "whole"):
        got, pullback = attention.vjp(**arrays, indices=lists, **options, algorithm=algorithm)
        assert_close(got.output, want.output, 20 * EPS)
        for n, d in want_pullback(**cotangents).items():
            assert_close(pullback(**cotangents)[n], d, 60 * EPS)


def test_order_filling_and_width_mean_nothing():
    arrays = drawn(5, k=7)
    lists = np.random.default_rng(3).permuted(np.broadcast_to(np.arange(7), (2, 1, 3, 7)), axis=-1)[..., :4]
    want = attention(**arrays, indices=lists)
    filled = np.concatenate([np.full((2, 1, 3, 2), -1), lists[..., ::-1], np.full((2, 1, 3, 1), 2**62)], -1)
    assert_close(attention(**arrays, indices=filled.astype(np.int64)), want, 20 * EPS)
    assert_close(attention(**arrays, indices=lists.astype(np.uint8)), want, 20 * EPS)


def test_what_is_not_listed_reaches_nothing():
    arrays = drawn(6)
    lists = np.array([[[0, 1], [1, 3], [3, 3]]])
    clean, pullback = attention.vjp(**arrays, indices=lists)
    dirty = {**arrays, "k": arrays["k"].copy(), "v": arrays["v"].copy()}
    dirty["k"][:, :, [2, 4]], dirty["v"][:, :, [2, 4]] = np.nan, np.inf
    got, dirty_pullback = attention.vjp(**dirty, indices=lists)
    assert_close(got.output, clean.output, 20 * EPS)
    for n, d in pullback(clean.output).items():
        assert_close(dirty_pullback(clean.output)[n], d, 60 * EPS)


def test_counts():
    """6 query heads of 2 x 3 rows: two lists of 3 keys hold one key twice, one of them none."""
    lists = np.array([[[0, 1, 1], [2, 2, 4], [-1, 9, 9]]])
    sizes = {"b": 2, "h": 6, "g": 2, "q": 3, "k": 5, "d": 4, "e": 3}
    counts = attention.cost(**sizes, indices=lists)
    assert counts.multiplies == 2 * 6 * (2 + 2 + 0) * (4 + 3)
    assert counts.computed_multiplies == 2 * 6 * 3 * 3 * (4 + 3)
    causal = attention.cost(**sizes, indices=lists, causal=True, align=0)
    assert causal.multiplies == 2 * 6 * (1 + 0 + 0) * (4 + 3)
    blocks = attention.cost(**sizes, block_indices=np.array([[[0], [1], [-1]]]), block=4)
    assert blocks.multiplies == 2 * 6 * (4 + 1) * 7


def test_long_lists_in_several_runs(monkeypatch):
    from refattn.core import listed

    arrays = drawn(8, q=70, k=90, h=4, g=1)
    lists = np.random.default_rng(2).integers(-1, 90, (2, 1, 70, 20))
    want, want_pullback = attention.vjp(**arrays, indices=lists, algorithm="whole")
    monkeypatch.setattr(listed, "GATHERED", 1 << 10)
    got, pullback = attention.vjp(**arrays, indices=lists)
    assert_close(got.output, want.output, 40 * EPS)
    for n, d in want_pullback(want.output).items():
        assert_close(pullback(want.output)[n], d, 1000 * EPS)  # a key stands in up to 70 lists of 4 heads


lists = np.zeros((2, 4, 3, 2), int)
BAD = {
    "both": ({"indices": lists, "block_indices": lists, "block": 2}, TypeError, "both of indices and block_indices"),
    "no_block": ({"block_indices": lists}, TypeError, "block is missing"),
    "no_lists": ({"block": 2}, TypeError, "block_indices is missing"),
    "block_0": ({"block_indices": lists, "block": 0}, ValueError, "block is 0: expected at least 1"),
    "block_float": ({"block_indices": lists, "block": 2.0}, TypeError, "block is 2.0: expected an integer"),
    "floats": ({"indices": lists * 1.0}, TypeError, "indices has dtype float64: expected ints"),
    "list": ({"indices": [[[0]]]}, TypeError, "indices is a list: expected ints"),
    "heads": ({"indices": lists[:, :3]}, ValueError, r"indices has shape \(2, 3, 3, 2\): expected ints"),
    "queries": ({"indices": lists[:, :, :2]}, ValueError, r"indices has shape \(2, 4, 2, 2\)"),
    "batch": ({"indices": np.concatenate([lists, lists])}, ValueError, r"and the batch axes \(2,\)"),
    "axes": ({"indices": lists[0, 0]}, ValueError, r"indices has shape \(3, 2\)"),
    "negative": ({"indices": lists - 2}, ValueError, "indices contains -2: expected numbers from 0, or -1 for none"),
    "duplicates": ({"duplicates": "sum"}, ValueError, "duplicates is 'sum'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        attention(**drawn(), **change)


def test_sizes_beyond_every_array():
    arrays = drawn(9)
    plain = attention(**arrays)
    assert_close(attention(**arrays, block_indices=np.zeros((1, 3, 1), int), block=10**30), plain, 10 * EPS)
    assert not attention(**arrays, block_indices=np.full((1, 3, 1), 2**62), block=10**30).any()
    assert not attention(**arrays, indices=np.zeros((1, 3, 0), int)).any()
