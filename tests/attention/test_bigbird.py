"""bigbird_attention: who sees whom, gradients, definition, stored cases, counts, mistakes."""

import tracemalloc

import numpy as np
import pytest
from contract.cases.bigbird import CASES, arguments
from support import assert_close, cases

from refattn.attention.bigbird import bigbird_attention as attention
from refattn.attention.local import local_attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


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


@pytest.mark.parametrize("name", CASES)
def test_the_pairs_are_those_listed(name):
    given = arguments(name, 1)
    lengths = {n: given[n] for n in ("query_lengths", "key_lengths", "scale") if n in given}
    want = scaled_dot_product_attention.forward(*(given[n] for n in "qkv"), mask=listed(given), **lengths)
    got = attention.forward(**given)
    assert_close(got.output, want.output, 60 * EPS)
    assert_close(got.lse, want.lse, 60 * EPS)


def test_without_globals_and_random_blocks_it_is_local_attention():
    given = arguments("no_random", 4, t=37, block=5, global_blocks=(0, 0))
    qkv = {n: given[n] for n in "qkv"}
    assert_close(attention(**given), local_attention(**qkv, block=5, look_backward=1, look_forward=1), 60 * EPS)


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


def test_memory_is_linear_and_counts_end_with_the_sequence():
    q = np.zeros((1, 1 << 16, 1), np.float32)
    tracemalloc.start()
    attention(q, q, q, block=16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6  # a layout of all pairs of its 4096 blocks holds 17 million numbers
    given = arguments("no_globals", 3)
    want = attention(**{**given, "window_blocks": 20, "random_blocks": None})
    assert np.array_equal(attention(**{**given, "window_blocks": 10**9, "random_blocks": None}), want)
    assert_close(attention(**{**given, "block": 10**9, "random_blocks": None}), want, 60 * EPS)
    assert_close(attention(**{**given, "global_blocks": (10**9, 10**9), "random_blocks": None}), want, 60 * EPS)


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
