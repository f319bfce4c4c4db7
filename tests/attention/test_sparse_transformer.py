"""sparse_transformer_attention: the paper's sets and counts, gradients, equality with its definition, stored cases."""

import numpy as np
import pytest
from contract.cases.sparse_transformer import PATTERNS, B, D, E, H, T, arguments
from support import assert_close, cases

from refattn import patterns
from refattn.attention.scaled_dot_product import scaled_dot_product_attention
from refattn.attention.sparse_transformer import sparse_transformer_attention as attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def base(seed=0, **settings):
    return arguments("strided_split", seed, **settings)


def listed(h, t, pattern="strided", stride=2, heads="split", summary=None, summary_offsets=0, variant="paper", layer=0):
    """The sets of section 4.2, as lists."""
    seen = np.zeros((h, t, t), bool)
    offsets = np.broadcast_to(summary_offsets, (h,))
    for n in range(h):
        first = {
            "split": n < (h + 1) // 2,
            "merged": True,
            "first": True,
            "second": False,
            "interleaved": layer % 2 == 0,
        }
        second = heads == "merged" or not first[heads]
        for i in range(t):
            for j in range(i + 1):
                if pattern == "strided":
                    near, far = i - j <= stride - (variant == "code"), (i - j) % stride == 0
                else:
                    near = i // stride == j // stride
                    far = stride - offsets[n] - summary <= j % stride <= stride - 1 - offsets[n]
                seen[n, i, j] = (first[heads] and near) or (second and far)
    return seen


@pytest.mark.parametrize("name", PATTERNS)
def test_the_sets_are_those_of_the_paper(name):
    options = {"stride": 2, **PATTERNS[name]}
    seen = listed(H, 23, **options)
    weights = attention.forward(**base(t=23, e=23, **PATTERNS[name]), keep_weights=True).weights
    assert np.array_equal(weights[0] > 0, seen)
    arguments = base(t=23, **PATTERNS[name])
    want = scaled_dot_product_attention.forward(**{n: arguments[n] for n in "qkv"}, mask=seen)
    got = attention.forward(**arguments)
    assert_close(got.output, want.output, 60 * EPS)  # up to 23 keys and 2 channels, both orders
    assert_close(got.lse, want.lse, 60 * EPS)
    assert_close(attention.definition(**arguments).output, want.output, 60 * EPS)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_reaches_exactly_the_rows_that_may_see_it(poison):
    arguments = base(9, t=40, stride=5, heads="merged")
    clean = attention.forward(**arguments)
    dirty = {**arguments, "v": arguments["v"].copy()}
    dirty["v"][0, 1, 17, :] = poison
    result, pullback = attention.vjp(**dirty)
    seen = np.zeros((B, H, 40), bool)
    seen[0, 1] = listed(1, 40, stride=5, heads="merged")[0, :, 17]
    assert np.array_equal(result.output[~seen], clean.output[~seen])
    assert not np.isfinite(result.output[seen]).any()
    assert np.isfinite(pullback(np.ones_like(result.output))["q"][~seen]).all()


# ---------------------------------------------------------------------- what the paper says of the pattern


def test_merged_counts_the_shared_key_once():
    """Equal logits, one-hot values: row 6 at stride 3 sees 3, 4, 5, 6 and 0, 3, 6: five keys of weight 1/5."""
    q, k, v = np.zeros((1, 7, 2)), np.zeros((1, 7, 2)), np.eye(7)[None]
    assert_close(attention(q, k, v, stride=3, heads="merged")[0, 6], np.array([1, 0, 0, 1, 1, 1, 1]) / 5, 4 * EPS)


def test_strided_reaches_every_causal_pair_in_two_steps_and_fixed_only_merged():
    t, causal = 25, np.tril(np.ones((25, 25), bool))

    def reach(*steps):
        seen = np.eye(t, dtype=int)
        for options in steps:
            seen = seen @ listed(1, t, **options)[0]
        return seen > 0

    strided = [{"stride": 5, "heads": part} for part in ("first", "second")]
    fixed = [{"stride": 5, "heads": part, "pattern": "fixed", "summary": 1} for part in ("first", "second")]
    assert np.array_equal(reach(*strided), causal)
    assert np.array_equal(reach(*reversed(strided)), causal)
    assert not np.array_equal(reach(*fixed), causal)
    assert not np.array_equal(reach(*reversed(fixed)), causal)
    merged = {**fixed[0], "heads": "merged"}
    assert np.array_equal(reach(merged, merged), causal)
    # and the mechanism propagates so: first, then second, carries the first value to the last row
    q, v = np.zeros((1, t, 1)), np.eye(t)[None]
    through = attention(q, q, attention(q, q, v, **strided[1]), **strided[0])
    assert np.array_equal(through[0] > 0, causal)


COUNTS = {  # n, stride: first, second, union (the table of the paper's patterns, also derived by hand for n = 16)
    (16, 4): (70, 40, 82),
    (3072, 32): (100_848, 148_992, 243_728),
    (12288, 128): (1_576_896, 595_968, 2_148_416),
    (65536, 256): (16_809_856, 8_421_376, 25_100_416),
}


@pytest.mark.parametrize("size", COUNTS)
def test_exact_counts_of_the_strided_pattern(size):
    n, stride = size
    for heads, pairs in zip(("first", "second", "merged"), COUNTS[size], strict=True):
        counted = attention.cost(t=n, d=3, e=2, stride=stride, heads=heads)
        assert counted.multiplies == 5 * pairs
    split = attention.cost(t=n, d=3, e=2, h=3, stride=stride)
    assert split.multiplies == 5 * (2 * COUNTS[size][0] + COUNTS[size][1])


def test_exact_counts_of_the_fixed_pattern():
    for heads, summary, pairs in (
        ("first", 8, 792_576),
        ("second", 8, 4_672_896),
        ("merged", 8, 5_462_016),
        ("merged", 32, 19_470_336),
    ):
        counted = attention.cost(t=12288, d=1, e=0, stride=128, pattern="fixed", heads=heads, summary=summary)
        assert counted.multiplies == pairs


@pytest.mark.parametrize("n", [4096, 16384, 65536])
@pytest.mark.parametrize("heads", ["first", "second", "merged", "split"])
@pytest.mark.parametrize(
    "pattern", [{}, {"pattern": "fixed", "summary": 1}, {"pattern": "fixed", "summary": 8}], ids=str
)
def test_no_more_than_twice_the_pairs_are_computed(n, heads, pattern):
    counted = attention.cost(t=n, d=1, e=0, h=2, stride=int(n**0.5), heads=heads, **pattern)
    assert counted.multiplies <= counted.computed_multiplies <= 2.2 * counted.multiplies


def test_cost_of_heads_that_share_keys():
    apart = attention.cost(t=64, d=4, h=4, stride=8)
    shared = attention.cost(q=64, k=64, d=4, h=4, g=1, stride=8)
    assert shared.computed_multiplies == apart.computed_multiplies
    with pytest.raises(ValueError, match="expected one length"):
        attention.cost(q=64, k=63, d=4, h=4, stride=8)


# ---------------------------------------------------------------------- others' numbers


def _openai(meta, arrays):
    """The released code's attention on (b, t, h * d), as calls of ours."""
    o = meta["options"]
    h = o["heads"]
    qkv = {n: np.swapaxes(arrays[f"in_{n}"].reshape(*arrays[f"in_{n}"].shape[:2], h, -1), 1, 2) for n in "qkv"}
    if o["attn_mode"] == "all":
        return None
    if o["attn_mode"] == "fixed":
        summary = o["blocksize"] * o["vertsize"]
        offsets = np.arange(h) % o["num_verts"] * summary
        more = {"pattern": "fixed", "summary": summary, "summary_offsets": offsets, "heads": "merged"}
    else:
        more = {"heads": "first" if o["attn_mode"] == "local" else "second", "variant": "code"}
    return {**qkv, **more, "stride": o["local_attn_ctx"]}


def test_stored_cases_of_openai_sparse():
    count = 0
    for _, meta, arrays in cases("openai_sparse"):
        arguments = _openai(meta, arrays)
        if arguments is None:
            continue
        for out in ("out", "out_blocksparse"):
            if out not in arrays:
                continue
            want = arrays[out]
            got = np.asarray(attention(**arguments))
            got = np.swapaxes(got, 1, 2).reshape(want.shape)
            assert_close(got, want, 1e-10 if want.dtype == np.float64 else 2e-5)
            assert_close(
                np.swapaxes(np.asarray(attention.definition(**arguments).output), 1, 2).reshape(want.shape),
                want,
                1e-10 if want.dtype == np.float64 else 2e-5,
            )
            count += 1
    assert count >= 6


# ---------------------------------------------------------------------- bad input, mistakes

BAD = {
    "stride_0": ({"stride": 0}, ValueError, "stride is 0: expected at least 1"),
    "stride_float": ({"stride": 2.0}, TypeError, "stride is 2.0: expected an integer"),
    "wide": ({"pattern": "fixed", "stride": 3, "summary": 4}, ValueError, "summary is 4: expected at most the stride, 3"),
    "no_summary": ({"pattern": "fixed", "summary": None}, ValueError, "summary is missing"),
    "offsets": (
        {"pattern": "fixed", "stride": 3, "summary": 2, "summary_offsets": [0, 1, 2]}, ValueError, "summary_offsets is .0, 1, 2.",
    ),
    "offsets_shape": (
        {"pattern": "fixed", "stride": 3, "summary": 1, "summary_offsets": [0, 1]}, ValueError, r"shape \(2,\): expected \(3,\)",
    ),
    "offsets_float": (
        {"pattern": "fixed", "stride": 3, "summary": 1, "summary_offsets": 0.5}, TypeError, "summary_offsets is 0.5: expected ints",
    ),
    "strided_summary": ({"summary": 1}, ValueError, "the strided pattern has no summary columns"),
    "pattern": ({"pattern": "dilated"}, ValueError, "pattern is 'dilated'"),
    "pattern_object": ({"pattern": patterns.causal()}, TypeError, "pattern is a Band: expected 'strided' or 'fixed'"),
    "heads": ({"heads": "both"}, ValueError, "heads is 'both'"),
    "variant": ({"variant": "old"}, ValueError, "variant is 'old'"),
    "layer": ({"heads": "interleaved"}, ValueError, "layer is missing"),
    "layer_unused": ({"layer": 1}, ValueError, "only heads='interleaved' uses"),
    "lengths": ({"q": np.zeros((B, H, 3, D))}, ValueError, "as many queries as keys"),
    "heads_divide": ({"k": np.zeros((B, 2, T, D)), "v": np.zeros((B, 2, T, E))}, ValueError, "3 is not a multiple of 2"),
    "unknown": ({"strid": 3}, TypeError, "did you mean 'stride'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        attention.forward(**{**base(), **change})


def test_a_missing_stride_is_named():
    arguments = base()
    del arguments["stride"]
    with pytest.raises(TypeError, match="'stride' is missing"):
        attention(**arguments)


@pytest.mark.parametrize("sizes", [{"b": 0}, {"t": 0}, {"t": 1}, {"e": 0}, {"d": 0}, {"h": 0, "summary_offsets": []}])
def test_empty_axes(sizes):
    for name in ("strided_merged", "fixed_offsets"):
        options = (
            sizes if "summary_offsets" in PATTERNS[name] else {n: s for n, s in sizes.items() if n != "summary_offsets"}
        )
        arguments = base(**{**PATTERNS[name], **options})
        for algorithm in ("auto", "whole", "tiled"):
            result, pullback = attention.vjp(**arguments, algorithm=algorithm)
            assert result.output.shape == (*arguments["q"].shape[:-1], arguments["v"].shape[-1])
            assert all(pullback(result.output)[n].shape == arguments[n].shape for n in "qkv")
