"""sparse_transformer_attention: the paper's sets and counts, gradients, equality with its definition, stored cases."""

import array_api_strict
import numpy as np
import pytest
from support import assert_adjoint, assert_close, assert_gradients, cases, random_cotangents

from refattn import patterns, precision
from refattn.attention.scaled_dot_product import scaled_dot_product_attention
from refattn.attention.sparse_transformer import sparse_transformer_attention as attention

EPS = np.finfo(np.float64).eps
B, H, T, D, E = 2, 3, 7, 2, 2


def rng(seed=0):
    return np.random.default_rng(seed)


def base(seed=0, **settings):
    return attention.example(rng(seed), **{"b": B, "h": H, "t": T, "d": D, "e": E, "stride": 2, **settings})


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


PATTERNS = {
    "strided_split": {},
    "strided_merged": {"heads": "merged"},
    "strided_first": {"heads": "first", "stride": 3},
    "strided_second": {"heads": "second", "stride": 3},
    "strided_code": {"heads": "first", "stride": 3, "variant": "code"},
    "strided_code_merged": {"heads": "merged", "stride": 3, "variant": "code"},
    "strided_even_layer": {"heads": "interleaved", "layer": 2},
    "strided_odd_layer": {"heads": "interleaved", "layer": 1},
    "strided_1": {"heads": "merged", "stride": 1},
    "strided_long": {"stride": 40, "heads": "split"},
    "fixed_split": {"pattern": "fixed", "stride": 3, "summary": 1},
    "fixed_merged": {"pattern": "fixed", "stride": 3, "summary": 2, "heads": "merged"},
    "fixed_second": {"pattern": "fixed", "stride": 3, "summary": 2, "heads": "second", "summary_offsets": 1},
    "fixed_offsets": {"pattern": "fixed", "stride": 4, "summary": 1, "heads": "merged", "summary_offsets": [0, 2, 0]},
    "fixed_offsets_second": {
        "pattern": "fixed",
        "stride": 3,
        "summary": 1,
        "heads": "second",
        "summary_offsets": [0, 2, 1],
    },
}
TOGETHER = {
    "mask": rng(1).random((B, 1, T, T)) < 0.9,
    "bias": np.where(rng(9).random((B, H, T, T)) < 0.1, -np.inf, rng(2).standard_normal((B, H, T, T))),
    "causal": True, "align": "lower_right", "window": (4, None), "key_lengths": [7, 5], "query_lengths": [6, 7],
    "query_segments": np.zeros((B, T), int), "key_segments": np.array([0, 0, 1, 0, 0, 0, 0]), "scale": 0.6, "softcap": 1.7,
    "alibi_slopes": rng(3).random(H), "sinks": rng(4).standard_normal((H, 2)), "dropout_rate": 0.25,
    "dropout_mask": rng(5).random((B, H, T, T)) < 0.75, "score_mod": lambda s, b, h, i, j: s * (1 + 0.1 * h) + 0.1 * b - 0.05 * (i - j),
}  # fmt: skip
SHARED = {
    "mask": {"mask": TOGETHER["mask"]},
    "bias_shared": {"bias": rng(2).standard_normal((H, 1, T)), "heads": "merged"},
    "lengths": {"key_lengths": [3, 0], "query_lengths": [5, 7]},
    "dropout": {n: TOGETHER[n] for n in ("dropout_mask", "dropout_rate")},
    "together": TOGETHER,
    "together_fixed": {**TOGETHER, **PATTERNS["fixed_offsets"], "lse_includes_sinks": False},
    "together_merged": {**TOGETHER, "heads": "merged", "softcap_after_bias": True},
    "grouped": {"h": 4, "g": 2, "heads": "split"},
    "grouped_mixed": {"h": 4, "g": 1, "heads": "split", "bias": rng(2).standard_normal((4, T, T))},
    "grouped_tile": {"h": 4, "g": 2, "head_map": "tile", "sinks": rng(4).standard_normal(4)},
    "grouped_offsets": {
        "h": 4, "g": 2, "pattern": "fixed", "stride": 3, "summary": 1, "heads": "merged", "summary_offsets": [0, 1, 2, 0],
    },
}  # fmt: skip
OPTIONS = {**PATTERNS, **SHARED}


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


def _first_batch(arguments):
    """One batch entry suffices for complex step, which calls once for every entry of every array."""
    found = dict(arguments)
    for n, x in arguments.items():
        if np.ndim(x) == 4 or n in ("query_lengths", "key_lengths", "query_segments"):
            found[n] = x[:1]
    return found


@pytest.mark.parametrize("name", SHARED | {n: PATTERNS[n] for n in ("strided_merged", "fixed_offsets_second")})
def test_gradients_by_complex_step(name):
    arguments = _first_batch(base(**OPTIONS[name]))
    names = [n for n in attention.differentiable if arguments.get(n) is not None and n != "bias"]
    if name in ("bias_shared", "grouped_mixed"):
        names.append("bias")
    assert_gradients(attention, arguments, rng(7), names=names)


@pytest.mark.parametrize("name", OPTIONS)
def test_adjoint_identity(name):
    assert_adjoint(attention, base(1, t=T, **OPTIONS[name]), rng(8))


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_definition_and_the_whole_algorithm(name):
    arguments = base(2, **OPTIONS[name])
    result, pullback = attention.vjp(**arguments)
    whole, whole_pullback = attention.vjp(**arguments, algorithm="whole")
    want = attention.definition(**arguments)
    for field in ("output", "lse"):
        assert_close(getattr(result, field), getattr(want, field), 40 * EPS)
        assert_close(getattr(whole, field), getattr(want, field), 40 * EPS)
    cotangents = random_cotangents(attention, result, rng(3))
    got = pullback(**cotangents)
    for n, g in whole_pullback(**cotangents).items():
        assert_close(got[n], g, 200 * EPS)


@pytest.mark.parametrize("t", [64, 150, 257])
@pytest.mark.parametrize(
    "options",
    [
        {"heads": "merged", "stride": 16},
        {"heads": "split", "stride": 7, "g": 1},
        {"heads": "merged", "stride": 100},
        {"heads": "second", "stride": 2},
        {"heads": "merged", "stride": 3, "pattern": "fixed", "summary": 2, "summary_offsets": [0, 1, 0, 1]},
        {"heads": "split", "stride": 40, "pattern": "fixed", "summary": 5},
    ],
    ids=str,
)
def test_batched_blocks_equal_the_whole(t, options):
    """Lengths where bands, residue classes and summary columns have several batches, and ragged ends."""
    lengths = {"key_lengths": [t - 3], "query_segments": np.arange(t) // 50, "key_segments": np.arange(t) // 50}
    for more in ({}, lengths):
        arguments = base(4, b=1, h=4, t=t, **options, **more)
        result, pullback = attention.vjp(**arguments)
        whole, whole_pullback = attention.vjp(**arguments, algorithm="whole")
        assert_close(result.output, whole.output, 300 * EPS)
        assert_close(result.lse, whole.lse, 300 * EPS)
        cotangents = random_cotangents(attention, result, rng(3))
        got = pullback(**cotangents)
        for n, g in whole_pullback(**cotangents).items():
            assert_close(got[n], g, 2000 * EPS)  # sums over up to 257 rows, several terms each


def test_leading_axes_broadcast():
    r = rng(5)
    q, k, v = r.standard_normal((3, 1, H, T, D)), r.standard_normal((2, H, T, D)), r.standard_normal((H, T, E))
    arguments = {"q": q, "k": k, "v": v, "stride": 2, "heads": "merged", "bias": r.standard_normal((3, 1, H, T, T))}
    result = attention.forward(**arguments)
    assert result.output.shape == (3, 2, H, T, E)
    assert_close(result.output, attention.definition(**arguments).output, 40 * EPS)
    assert_adjoint(attention, arguments, r)
    flat = {n: arguments[n].reshape(-1, *arguments[n].shape[-3:])[0] for n in ("q", "k", "v", "bias")}
    assert_close(attention(**{**arguments, **flat}), result.output[0, 0], 40 * EPS)


@pytest.mark.parametrize("name", ["together", "together_fixed", "together_merged", "grouped_mixed", "grouped_offsets"])
def test_strict_namespace(name):
    arguments = base(7, **OPTIONS[name])
    arguments.pop("score_mod", None)
    strict = {n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    result, pullback = attention.vjp(**strict)
    want, want_pullback = attention.vjp(**arguments)
    cotangents = random_cotangents(attention, want, rng(1))
    got = pullback(**{n: array_api_strict.asarray(x) for n, x in cotangents.items()})
    assert type(result.output) is type(strict["q"])
    assert_close(result.output, want.output, 20 * EPS)
    for n, g in want_pullback(**cotangents).items():
        assert_close(got[n], g, 100 * EPS)


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


@pytest.mark.parametrize("sizes", [{"b": 0}, {"t": 0}, {"t": 1}, {"e": 0}, {"d": 0}])
def test_empty_axes(sizes):
    for name in ("strided_merged", "fixed_offsets"):
        arguments = base(**{**PATTERNS[name], **sizes})
        for algorithm in ("auto", "whole", "tiled"):
            result, pullback = attention.vjp(**arguments, algorithm=algorithm)
            assert result.output.shape == (*arguments["q"].shape[:-1], arguments["v"].shape[-1])
            assert all(pullback(result.output)[n].shape == arguments[n].shape for n in "qkv")


OWN = {
    "sparse_local_off1": {"heads": "first", "stride": 3},
    "sparse_stride_absolute": {"heads": "merged", "stride": 3},
    "sparse_union_mean": {"heads": "merged", "stride": 3},
    "sparse_summary_columns": {
        "pattern": "fixed",
        "stride": 5,
        "summary": 1,
        "heads": "merged",
        "summary_offsets": [1, 2, 3],
    },
    "sparse_summary_own_block": {"pattern": "fixed", "stride": 3, "summary": 1, "heads": "second"},
    "sparse_heads_exchanged": {"heads": "split"},
    "sparse_heads_merged": {"heads": "split"},
    "causal_drop": {},
    "causal_strict": {},
    "sparse_dense": {},
}


@pytest.mark.parametrize("class_", OWN)
def test_own_mistakes_differ_visibly(class_):
    arguments = base(11, t=19, **OWN[class_])
    right, pullback = attention.vjp(**arguments)
    cotangents = random_cotangents(attention, right, rng(1))
    gradients = pullback(**cotangents)
    found = [m for m in attention.mutations if m.class_ == class_ and m.forward is not None]
    shown = 0
    for mutation in found:
        wrong = mutation.forward(arguments)
        if wrong is None:
            continue
        shown += 1
        assert np.abs(np.asarray(wrong.output) - right.output).max() > 1e-3
        if mutation.gradients is not None:
            d = mutation.gradients(arguments, cotangents)
            assert max(np.abs(d[n] - gradients[n]).max() for n in d) > 1e-3
    assert shown >= (4 if class_ == "sparse_summary_columns" else 1)


def test_mistakes_of_softmax_are_offered_too():
    assert {"no_scale", "lse_base2", "dlse_ignored"} <= {m.class_ for m in attention.mutations}
    arguments = base(12, scale=0.3)
    wrong = next(m for m in attention.mutations if m.class_ == "no_scale").forward(arguments)
    assert_close(wrong.output, attention(**{**arguments, "scale": 1.0}), 40 * EPS)


@pytest.mark.parametrize(
    "options",
    [{"heads": "merged", "g": 2}, {"heads": "split", "g": 1}, {"pattern": "fixed", "summary": 2, "heads": "merged"}],
    ids=str,
)
def test_computed_multiplies_equal_the_counted_ones(options):
    settings = {"h": 4, "t": 70, "stride": 7, "b": 1, "d": 4, "e": 3, **options}
    space = precision.counting()
    arguments = attention.example(rng(), **settings)
    result, pullback = attention.vjp(
        **{n: space.asarray(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    )
    forward = space.counts.multiplies
    assert forward == attention.cost(**settings).computed_multiplies
    pullback(result.output)
    assert space.counts.multiplies - forward == attention.cost(**settings, direction="backward").computed_multiplies
