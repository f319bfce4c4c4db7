"""The core: memory linear in length, causal tiles skipped, NaN policy of products, gathered blocks by hand."""

import tracemalloc

import numpy as np
import pytest
from support import assert_close

import refattn as ra
from refattn import backends, patterns
from refattn.core import options
from refattn.core.blocks import groups, listed_blocks, product
from refattn.core.problem import prepare
from refattn.core.selections import Index, Span, take_pairs
from refattn.records import Block, Sizes

EPS = np.finfo(np.float64).eps
BACKEND = backends.resolve(None, np)


def peak(function):
    """Largest traced memory above what is held when it returns."""
    tracemalloc.start()
    try:
        held = function()
        now, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del held
    return most - now


def test_memory_is_linear_in_length():
    r = np.random.default_rng(0)

    def run(length):
        q, k, v = (r.standard_normal((1, 2, length, 16), dtype=np.float32) for _ in range(3))
        result, pullback = ra.scaled_dot_product_attention.vjp(q, k, v, causal=True)
        return result, pullback(result.output)

    small, large = peak(lambda: run(2048)), peak(lambda: run(6144))
    scores = 4 * 2 * 6144**2
    assert large < scores / 4
    assert large < 3.5 * small + (1 << 20)  # three times the length, and a tile


def test_long_keys_need_a_tile_of_memory():
    r = np.random.default_rng(1)
    q = r.standard_normal((1, 1, 64, 16), dtype=np.float32)
    k, v = (r.standard_normal((1, 1, 1 << 16, 16), dtype=np.float32) for _ in range(2))
    result = []
    assert peak(lambda: result.append(ra.scaled_dot_product_attention.forward(q, k, v))) < 4 << 20
    whole = ra.scaled_dot_product_attention.forward(*(x.astype(np.float64) for x in (q, k, v)), algorithm="whole")
    assert_close(result[0].output, whole.output, 1e-6)


def test_blocks_cover_every_visible_pair_once_and_skip_the_rest():
    q, k = 700, 5000
    pattern = patterns.causal(align=k - q) & patterns.window(900, 0, align=k - q)
    sizes = Sizes(lead=(1,), h=1, g=1, q=q, k=k, d=1, e=1)
    settings = options.read(sizes, xp=np, dtype=np.float64, pattern=pattern).settings
    count = np.zeros((q, k), int)
    computed = 0
    for group in groups(settings):
        for block in listed_blocks(settings, group, np):
            i, j = (slice(s.start, s.stop) for s in (block.queries, block.keys))
            seen = (
                True
                if block.visible is None
                else np.broadcast_to(block.visible(), (1, 1, 1, i.stop - i.start, j.stop - j.start))[0, 0, 0]
            )
            count[i, j] += seen
            computed += (i.stop - i.start) * (j.stop - j.start)
    assert np.array_equal(count, pattern.to_mask(q, k).astype(int))
    assert computed < 1.3 * pattern.pairs(q, k)


def test_gathered_blocks_equal_the_masked_whole():
    """Even and odd positions as two blocks of lists, a second batch of neighbours, with every term and dropout."""
    r = np.random.default_rng(2)
    b, h, t = 2, 4, 12
    q, k, v = r.standard_normal((b, h, t, 3)), r.standard_normal((b, 2, t, 3)), r.standard_normal((b, 2, t, 2))
    i, j = np.arange(t)[:, None], np.arange(t)[None]
    pattern = patterns.dense((i - j) % 2 == 0) | patterns.dense(j == i + 1)
    classes = np.arange(t).reshape(-1, 2).T  # (2, 6)
    inverse = np.empty(t, int)
    inverse[classes.reshape(-1)] = np.arange(t)
    alone = np.arange(t).reshape(t, 1)

    def blocks(visibility, group):
        def seen(rows, columns, extra):
            def visible():
                n, m = rows[..., :, None], columns[..., None, :]
                place = {
                    "b": group.batches.reshape(-1, 1, 1, 1, 1, 1),
                    "h": group.heads.reshape(1, *group.heads.shape, 1, 1, 1),
                }
                found = np.broadcast_to(extra(n, m), (1, 1, 1, *np.broadcast_shapes(n.shape, m.shape)))
                return found if visibility is None else found & visibility.visible(n, m, q=t, k=t, **place)

            return visible

        yield Block(Index(classes, inverse), Index(classes), seen(classes, classes, lambda n, m: (n - m) % 2 == 0))
        yield Block(
            Index(alone, np.arange(t)),
            Index(np.minimum(alone + 1, t - 1)),
            seen(alone, np.minimum(alone + 1, t - 1), lambda n, m: m == n + 1),
        )

    settings = {
        "mask": r.random((b, 1, t, t)) < 0.8, "bias": r.standard_normal((b, h, t, t)), "alibi_slopes": r.random(h), "softcap": 1.5,
        "sinks": r.standard_normal(h), "dropout_mask": r.random((h, t, t)) < 0.7, "dropout_rate": 0.3, "scale": 0.8, "key_lengths": [12, 7],
        "align": 0,
    }  # fmt: skip
    for change in (
        {},
        {"bias": r.standard_normal((h, 1, t))},
        {"bias": r.standard_normal((t, 1))},
        {"bias": r.standard_normal((1, 1))},
    ):
        one = prepare(q, k, v, backend=BACKEND, blocks=blocks, extra_pattern=pattern, **{**settings, **change})
        two = prepare(q, k, v, backend=BACKEND, extra_pattern=pattern, algorithm="whole", **{**settings, **change})
        (got, got_state), (want, want_state) = one.run(), two.run()
        assert_close(got.output, want.output, 60 * EPS)
        assert_close(got.lse, want.lse, 60 * EPS)
        d_output, d_lse = r.standard_normal(want.output.shape), r.standard_normal(want.lse.shape)
        wanted = two.gradients(want_state, d_output, d_lse)
        for name, g in one.gradients(got_state, d_output, d_lse).items():
            assert_close(g, wanted[name], 400 * EPS)


@pytest.mark.parametrize("transposed", [False, True])
def test_product_lets_no_invisible_pair_through(transposed):
    r = np.random.default_rng(3)
    weights, visible = r.random((3, 4)), np.array([[True, False, True, True]] * 2 + [[False] * 4])
    weights = np.where(visible, weights, 0)
    values = r.standard_normal((3 if transposed else 4, 2))
    clean = product(BACKEND, weights, values, visible, transposed=transposed)
    assert_close(clean, (weights.T if transposed else weights) @ values, 8 * EPS)
    row = 2 if transposed else 1
    values[row] = [np.nan, np.inf]
    with BACKEND.quiet():  # as the core calls it
        got = product(BACKEND, weights, values, visible, transposed=transposed)
    assert_close(got, clean, 8 * EPS)


def test_selections_take_and_put_back():
    r = np.random.default_rng(4)
    x = r.standard_normal((2, 1, 1, 6, 3))
    lists = np.stack([r.permutation(6).reshape(2, 3) for _ in range(2)]).reshape(2, 1, 1, 2, 3)
    inverse = np.argsort(lists.reshape(2, 1, 1, 6), -1)
    chosen = Index(lists, inverse)
    taken = chosen.take(x)
    assert taken.shape == (2, 1, 1, 2, 3, 3)
    assert np.array_equal(taken[1, 0, 0, 1, 2], x[1, 0, 0, lists[1, 0, 0, 1, 2]])
    assert np.array_equal(chosen.assign(BACKEND, np.zeros_like(x), taken), x)
    assert np.array_equal(chosen.accumulate(BACKEND, x.copy(), taken), 2 * x)
    assert np.array_equal(Index(lists).accumulate(BACKEND, x.copy(), taken), 2 * x)
    with pytest.raises(ValueError, match="no inverse to assign by"):
        Index(lists).assign(BACKEND, x, taken)
    span = Span(1, 4)
    assert np.array_equal(span.assign(BACKEND, np.zeros_like(x), span.take(x))[..., 1:4, :], x[..., 1:4, :])
    table = r.standard_normal((1, 1, 1, 6, 6))
    entries = take_pairs(table, Index(lists), Index(lists))
    assert entries[1, 0, 0, 0, 1, 2] == table[0, 0, 0, lists[1, 0, 0, 0, 1], lists[1, 0, 0, 0, 2]]


def test_growth_of_long_causal_work_is_half():
    full = ra.scaled_dot_product_attention.cost(b=1, h=1, q=8192, k=8192, d=64)
    causal = ra.scaled_dot_product_attention.cost(b=1, h=1, q=8192, k=8192, d=64, causal=True)
    assert causal.computed_multiplies < 0.52 * full.computed_multiplies
