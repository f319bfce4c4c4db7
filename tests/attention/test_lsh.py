"""lsh_attention: gradients, equality with its definition and with plain attention, stored cases, counts, bad input."""

import array_api_strict
import numpy as np
import pytest
from contract.cases.lsh import B, D, E, H, T, base
from oracles.lsh_meetings import meetings
from support import assert_close, assert_gradients, cases, random_cotangents

from refattn import patterns
from refattn.attention.blocks.lsh_buckets import bucket_factors, hash_buckets, sort_buckets
from refattn.attention.lsh import lsh_attention as attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def test_strict_namespace_hashes_alike():
    given = attention.example(rng(4), b=1, h=2, t=12, pattern=patterns.window(5, 5))
    strict = {n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    assert np.array_equal(np.asarray(attention.forward(**strict).buckets), attention.forward(**given).buckets)


def test_few_units_share_out_their_rounds(monkeypatch):
    given = base(5, t=200, b=1, h=1, hashes=3, n=8, chunk=16, causal=True)
    given["dropout_mask"], given["dropout_rate"] = rng(5).random((200, 200)) < 0.8, 0.2
    results = []
    for size in (1 << 22, 0):  # rounds together; rounds apart
        monkeypatch.setattr("refattn.attention.blocks.lsh_rounds.APART", size)
        result, pullback = attention.vjp(**given)
        results.append((result, pullback(**random_cotangents(attention, result, rng(6)))))
    (together, want), (apart, got) = results
    assert_close(apart.output, together.output, 20 * EPS)
    assert_close(apart.lse, together.lse, 20 * EPS)
    for n in want:
        assert_close(got[n], want[n], 200 * EPS)


def test_leading_axes_broadcast():
    given = attention.example(rng(5), b=3, h=2, t=9, hashes=2)
    qk, v = given.pop("qk"), given.pop("v")
    two, one = attention.forward(qk[:, None], v[None, :], **given), attention.forward(qk[1:2], v[2:3], **given)
    assert two.output.shape == (3, 3, 2, 9, 5)
    assert two.buckets.shape == (3, 3, 2, 2, 9)
    assert_close(two.output[1, 2], one.output[0], 0)
    flat = attention.forward(qk[0], v[0], **given)
    assert flat.output.shape == (2, 9, 5)
    assert_gradients(attention, {"qk": qk[:1, :1, :5], "v": v[:2, :1, :5], **given, "chunk": 2}, rng(5))


# ------------------------------------------------------------------------------------------------ where buckets come from


@pytest.mark.parametrize("shape", [(), (H,), (B, H)])
@pytest.mark.parametrize("factors", [4, (2, 4), (4, 2, 2)])
def test_rotations_and_definition(shape, factors):
    given = base(6)
    del given["buckets"]
    n = sum(bucket_factors(factors, T, 4)) // 2
    given.update(rotations=rng(6).standard_normal((*shape, D, 3, n)), n_buckets=factors, hashes=3)
    got, want = attention.forward(**given), attention.definition(**given)
    assert np.array_equal(got.buckets, want.buckets)
    assert_close(got.output, want.output, 60 * EPS)
    frozen = {**given, "buckets": got.buckets}
    del frozen["rotations"]
    assert_close(attention.forward(**frozen).output, got.output, 0)
    scaled = {**given, "qk": given["qk"] * 7.0}
    assert np.array_equal(attention.forward(**scaled).buckets, got.buckets)


def test_hash_by_hand():
    x = np.array([[[[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0], [0.0, -1.0], [0.0, 0.0]]]])
    rotations = np.eye(2).reshape(1, 1, 2, 1, 2)
    assert hash_buckets(x, rotations, (4,))[0, 0, 0].tolist() == [0, 1, 2, 3, 0]
    # two factors of 2: one column each; digits (x < 0), the first least significant
    assert hash_buckets(x, rotations, (2, 2))[0, 0, 0].tolist() == [0, 0, 1, 2, 0]


def test_generator_draws_the_rotations():
    given = base(7)
    del given["buckets"]
    drawn = rng(11).standard_normal((D, 2, 2))
    by_rng = attention.forward(**given, hashes=2, rng=rng(11))
    assert np.array_equal(by_rng.buckets, attention.forward(**given, rotations=drawn).buckets)
    assert np.array_equal(by_rng.buckets, attention.definition(**given, hashes=2, rng=rng(11)).buckets)


def test_half_precision_hashes_in_float32():
    given = attention.example(rng(8), t=16)
    low = {n: x.astype(np.float16) if n in ("qk", "v") else x for n, x in given.items()}
    result = attention.forward(**low)
    assert result.output.dtype == np.float16
    assert result.lse.dtype == np.float32
    high = attention.forward(**{**low, "qk": low["qk"].astype(np.float64), "v": low["v"].astype(np.float64)})
    assert np.array_equal(result.buckets, high.buckets)
    assert_close(result.output, high.output, 4 * 2.0**-11)


def test_large_bucket_numbers_do_not_overflow():
    given = base(9, n=4)
    shifted = {**given, "buckets": given["buckets"] * (1 << 40) + (1 << 50)}
    assert_close(attention.forward(**shifted).output, attention.forward(**given).output, 0)
    order, rank = sort_buckets(shifted["buckets"])
    assert np.array_equal(np.take_along_axis(rank, order, -1), np.broadcast_to(np.arange(T), order.shape))


# ------------------------------------------------------------------------------------------------ what it equals


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("duplicates", ["union", "multiset"])
def test_rounds_are_one_softmax_over_their_pairs(within, duplicates):
    given = base(10, t=24, hashes=3, within_bucket=within, duplicates=duplicates, causal=True)
    result, pullback = attention.vjp(**given)
    count = np.zeros((B, H, 24, 24))
    for b, h in np.ndindex(B, H):
        meets = meetings([list(r) for r in given["buckets"][b, h]], 4, 1, 0, False, within)
        for i, row in enumerate(meets):
            for j, n in row.items():
                count[b, h, i, j] = n if duplicates == "multiset" else 1
    count *= np.arange(24)[:, None] > np.arange(24)
    count[~count.any(-1)] = np.eye(24)[np.nonzero(~count.any(-1))[-1]]
    keys = given["qk"] / np.linalg.norm(given["qk"], axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        plain, back = scaled_dot_product_attention.vjp(given["qk"], keys, given["v"], bias=np.log(count))
    assert_close(result.output, plain.output, 1e-13)
    assert_close(result.lse, plain.lse, 1e-13)
    cotangents = random_cotangents(attention, result, rng(10))
    got, want = pullback(**cotangents), back(**cotangents)
    assert_close(got["v"], want["v"], 1e-12)
    inner = np.sum(keys * want["k"], -1, keepdims=True)
    chained = (want["k"] - keys * inner) / np.linalg.norm(given["qk"], axis=-1, keepdims=True)
    assert_close(got["qk"], want["q"] + chained, 1e-12)


@pytest.mark.parametrize("options", [{}, {"wrap": "global"}, {"duplicates": "trax1", "hashes": 1}, {"short": "full"}])
def test_one_chunk_is_full_attention(options):
    options = {"hashes": 3, **options}
    given = base(11, t=8, n=1, **options, causal=True)
    given["chunk"] = 8
    result = attention.forward(**given)
    keys = given["qk"] / np.linalg.norm(given["qk"], axis=-1, keepdims=True)
    strict = np.arange(8)[:, None] > np.arange(8)
    strict[0, 0] = True
    plain = scaled_dot_product_attention.forward(given["qk"], keys, given["v"], mask=strict)
    assert_close(result.output, plain.output, 1e-8 if options.get("duplicates") == "trax1" else 1e-13)


def test_token_0_gives_its_own_value_and_no_future_token_matters():
    given = attention.example(rng(12), t=30, chunk=4, hashes=3, causal=True)
    result = attention.forward(**given)
    assert np.array_equal(result.output[..., 0, :], given["v"][..., 0, :])
    own = given["qk"][..., 0, :]
    assert_close(result.lse[..., 0], np.linalg.norm(own, axis=-1) * 6**-0.5, 8 * EPS)
    frozen = {**given, "buckets": result.buckets}
    del frozen["rotations"]
    moved = {**frozen, "qk": frozen["qk"].copy(), "v": frozen["v"].copy()}
    moved["qk"][..., 17:, :] += 1.0
    moved["v"][..., 17:, :] = np.nan
    assert np.array_equal(attention.forward(**moved).output[..., :17, :], result.output[..., :17, :])


def test_order_and_names_of_rounds_do_not_matter():
    given = base(13, t=24, hashes=3)
    want = attention.forward(**given).output
    assert_close(attention.forward(**{**given, "buckets": given["buckets"][:, :, [2, 0, 1]]}).output, want, 40 * EPS)
    assert_close(attention.forward(**{**given, "buckets": given["buckets"] + 5}).output, want, 0)
    # with the wrap of the implementations the order does matter
    ring = {**given, "wrap": "global", "within_bucket": False, "duplicates": "multiset"}
    swapped = {**ring, "buckets": ring["buckets"][:, :, [0, 2, 1]]}
    assert np.max(np.abs(attention.forward(**ring).output - attention.forward(**swapped).output)) > 0.01


def test_values_behind_a_mask_reach_nothing():
    given = base(14, t=12, n=1)
    keep = np.arange(12) != 5
    given.update(chunk=12, mask=keep, before=0)
    want, back = attention.vjp(**given)
    for name in ("v", "qk"):
        poisoned = {**given, name: given[name].copy()}
        poisoned[name][..., 5, :] = np.nan
        result, pullback = attention.vjp(**poisoned)
        others = np.flatnonzero(keep)
        assert np.array_equal(result.output[..., others, :], want.output[..., others, :])
        if name == "v":  # a NaN in qk is a NaN in a query too
            cotangent = np.where(keep[:, None], rng(14).standard_normal(want.output.shape), 0.0)
            assert np.array_equal(pullback(cotangent)["qk"], back(cotangent)["qk"])


def test_zero_vectors_and_no_tokens():
    given = base(15, t=6)
    given["qk"][..., 2, :] = 0.0
    assert_gradients(
        attention,
        {**given, "qk": given["qk"][:1, :1], "v": given["v"][:1, :1], "buckets": given["buckets"][:1, :1]},
        rng(15),
    )
    empty = {**given, "qk": np.zeros((2, 2, 0, D)), "v": np.zeros((2, 2, 0, E)), "buckets": np.zeros((2, 2, 1, 0), int)}
    assert attention.forward(**empty).output.shape == (2, 2, 0, E)


# ------------------------------------------------------------------------------------------------ stored cases


def one_head(x):
    return x[:, None]


def reformer_pytorch(meta, arrays):
    """Arguments of a stored reformer-pytorch case; rows whose result the peer defines in another way."""
    options = meta["options"]
    given = {"qk": one_head(arrays["in_qk"]), "v": one_head(arrays["in_v"]), "causal": options["causal"]}
    loose = None
    if "n_hashes" not in options:
        given.update(chunk=arrays["in_qk"].shape[1], short="full")
    else:
        given.update(
            hashes=options["n_hashes"],
            n_buckets=options["n_buckets"],
            chunk=options["bucket_size"],
            wrap="global",
            within_bucket=not options["attend_across_buckets"],
            duplicates="multiset" if options["allow_duplicate_attention"] else "trax1",
        )
        if options["rehash_each_round"]:
            given["rotations"] = arrays["w_rotations"][0]
        else:
            given["buckets"] = one_head(arrays["out_buckets"])
    if "in_input_mask" in arrays:
        given["mask"] = arrays["in_input_mask"]
        loose = ~arrays["in_input_mask"][:, None, :]
    return given, loose


@pytest.mark.parametrize(
    "name, meta, arrays", list(cases("reformer_pytorch")), ids=lambda x: x if isinstance(x, str) else ""
)
def test_reformer_pytorch(name, meta, arrays):
    given, loose = reformer_pytorch(meta, arrays)
    result, pullback = attention.vjp(**given)
    tolerance = max(1e-11, meta["suggested_atol"] if "dedup" in name else 0)  # it counts in float32
    want, cotangent, d_v = one_head(arrays["out"]), one_head(arrays["cot_out"]), one_head(arrays["grad_v"])
    if loose is not None:  # padded queries see themselves there, and a full row of hidden keys is uniform
        loose = loose[..., None]
        if name == "full_qk_input_mask":
            uniform = np.broadcast_to(np.mean(given["v"], axis=-2, keepdims=True), want.shape)
            assert_close(np.where(loose, uniform, 0), np.where(loose, want, 0), tolerance)
            padded = np.sum(np.where(loose, cotangent, 0), -2, keepdims=True) / want.shape[-2]
        else:
            padded = np.where(loose, cotangent, 0)
        d_v, cotangent = d_v - padded, np.where(loose, 0, cotangent)
        want, got = np.where(loose, 0, want), np.where(loose, 0, result.output)
    else:
        got = result.output
    assert_close(got, want, tolerance)
    if "out_buckets" in arrays:
        assert np.array_equal(result.buckets[:, 0], arrays["out_buckets"])
    gradients = pullback(cotangent)
    assert_close(gradients["v"], d_v, 10 * tolerance)
    assert_close(gradients["qk"], one_head(arrays["grad_qk"]), 10 * tolerance)
    assert_close(attention.definition(**given).output, result.output, 1e-11)


@pytest.mark.parametrize("name", ["r4_dedup_causal"])
def test_the_count_of_zero_is_their_mistake(name):
    """Pairs that meet across the border of two rounds have N = 0 there and gain ln(1e9) = 20.7; a true count differs."""
    stored = {n: (meta, arrays) for n, meta, arrays in cases("reformer_pytorch")}
    given, _ = reformer_pytorch(*stored[name])
    theirs = attention.forward(**given)
    assert np.max(theirs.lse - attention.forward(**{**given, "duplicates": "union"}).lse) > 15
    counted = {**given, "duplicates": "trax1", "wrap": "none"}  # without those pairs the count is the true one
    assert_close(
        attention.forward(**counted).output, attention.forward(**{**counted, "duplicates": "union"}).output, 1e-7
    )


@pytest.mark.parametrize(
    "name, meta, arrays",
    [c for c in cases("hf_reformer") if c[0].startswith("lsh")],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_hf_reformer(name, meta, arrays):
    options, n = meta["options"], meta["options"]["num_buckets"]
    given = {
        "qk": arrays["in_qk"], "v": arrays["in_v"], "rotations": arrays["w_rotations"], "hashes": options["num_hashes"],
        "n_buckets": n if isinstance(n, int) else tuple(n), "chunk": options["chunk_length"], "before": options["chunks_before"],
        "after": options["chunks_after"], "causal": options["causal"], "within_bucket": False, "duplicates": "multiset",
        "key_norm": "rms", "wrap": "global", "short": "full",
    }  # fmt: skip
    if "in_attention_mask" in arrays:
        given.update(mask=arrays["in_attention_mask"].astype(bool), padding_bucket=True)
    result, pullback = attention.vjp(**given)
    assert_close(result.output, arrays["out"], 1e-10)  # -1e9 and -1e5 in float64 leave 1e-11 of a logit
    if "out_buckets" in arrays:
        assert np.array_equal(result.buckets, arrays["out_buckets"])
    gradients = pullback(arrays["cot_out"])
    assert_close(gradients["qk"], arrays["grad_qk"], 1e-9)
    assert_close(gradients["v"], arrays["grad_v"], 1e-9)
    assert_close(attention.definition(**given).output, result.output, 1e-12)


# ------------------------------------------------------------------------------------------------ counts and bad input


def test_cost_counts_the_windows():
    cost = attention.cost(b=2, h=3, t=64, d=8, e=4, hashes=2, chunk=8, n_buckets=16)
    pairs = 2 * 64 * 16  # rounds * t * window
    hashed = 64 * 8 * 2 * 8
    assert cost.computed_multiplies == 6 * (pairs * 12 + hashed)
    assert cost.multiplies == 6 * (
        (pairs - 2 * 64) * 12 + hashed
    )  # the first chunk of each round has nothing before it
    assert (
        attention.cost(t=64, d=8, chunk=8, wrap="global").multiplies
        == attention.cost(t=64, d=8, chunk=8).computed_multiplies
    )
    both = attention.cost(t=64, d=8, chunk=8, direction="both", hashing=False)
    assert both.computed_multiplies == 64 * 16 * 7 * 8
    double = attention.cost(t=128, d=8, chunk=8, hashing=False)
    assert double.computed_multiplies == 2 * attention.cost(t=64, d=8, chunk=8, hashing=False).computed_multiplies


BAD = {
    "odd": ({"n_buckets": 3}, ValueError, "n_buckets is 3: expected an even number"),
    "odd_factor": ({"n_buckets": (4, 3)}, ValueError, "even"),
    "no_factor": ({"n_buckets": ()}, ValueError, "n_buckets"),
    "float_buckets": ({"n_buckets": 4.0}, TypeError, "n_buckets is 4.0"),
    "columns": ({"n_buckets": 6}, ValueError, "rotations has shape (2, 2, 2)"),
    "factors_columns": ({"n_buckets": (2, 4)}, ValueError, "rotations has shape (2, 2, 2)"),
    "rounds": ({"hashes": 3}, ValueError, "rotations has shape (2, 2, 2)"),
    "chunk_0": ({"chunk": 0}, ValueError, "chunk is 0: expected at least 1"),
    "before": ({"before": -1}, ValueError, "before is -1"),
    "wrap_ragged": ({"wrap": "global"}, ValueError, "multiple of chunk: t is 10 and chunk is 4"),
    "wrap_name": ({"wrap": "round"}, ValueError, "wrap is 'round'"),
    "duplicates_name": ({"duplicates": "count"}, ValueError, "duplicates is 'count'"),
    "no_source": ({"rotations": None}, ValueError, "none of them was given"),
    "two_sources": ({"rng": rng()}, ValueError, "rotations and rng was given"),
    "rng_kind": ({"rotations": None, "rng": 3}, TypeError, "rng is a int"),
    "buckets_length": ({"rotations": None, "buckets": np.zeros((B, H, 2, 9), int)}, ValueError, "buckets has shape (2, 2, 2, 9)"),
    "buckets_rounds": (
        {"rotations": None, "buckets": np.zeros((B, H, 3, T), int), "hashes": 2}, ValueError, "hashes = 2 rounds",
    ),
    "buckets_range": (
        {"rotations": None, "buckets": np.full((B, H, 2, T), 4), "n_buckets": 4}, ValueError, "numbers from 0 to 3",
    ),
    "buckets_dtype": ({"rotations": None, "buckets": np.zeros((B, H, 2, T))}, TypeError, "buckets: expected an integer"),
    "mask_dtype": ({"mask": np.ones(T)}, TypeError, "mask has dtype float64"),
    "mask_shape": ({"mask": np.ones((T, T), bool)}, ValueError, "patterns.dense"),
    "unshared": ({"bias": np.zeros((T, T))}, TypeError, "has no option 'bias'"),
    "lengths": ({"v": np.zeros((B, H, 9, E))}, ValueError, "v has shape (2, 2, 9, 1)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    given = base(16)
    del given["buckets"]
    given.update({"rotations": rng(16).standard_normal((D, 2, 2)), **change})
    with pytest.raises(kind) as caught:
        attention.forward(**given)
    assert message in str(caught.value)


# ------------------------------------------------------------------------------------------------ numbers and sizes


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_logits_keep_their_weights(dtype):
    """Equal logits of 1e4 (1e12 in float64), of which float32 rounds the log-sum-exp in the third decimal."""
    size = 1e4 if dtype == "float32" else 1e12
    qk, v = np.full((1, 64, 1), size, dtype), np.ones((1, 64, 1), dtype)
    result, pullback = attention.vjp(qk, v, buckets=np.zeros((1, 4, 64), int), chunk=8, scale=1.0)
    assert_close(result.output, v, 64 * np.finfo(dtype).eps)
    gradients = pullback(v)
    assert abs(gradients["v"].sum() - 64) < 64 * 64 * np.finfo(dtype).eps
    # the sum over the keys of dS is 0: each of its terms is rounded once, and multiplied by the key
    assert np.abs(gradients["qk"]).max() < 64 * 64 * np.finfo(dtype).eps


def test_a_lonely_row_that_is_no_number_is_none():
    qk, v = np.array([[[np.nan, 1.0], [1.0, 2.0]]]), np.array([[[3.0], [4.0]]])
    given = {"qk": qk, "v": v, "buckets": np.array([[[0, 1]]]), "chunk": 2}
    result, pullback = attention.vjp(**given)
    want = attention.definition(**given)
    for got in (result, want):
        assert np.isnan(got.output[0, 0]).all()
        assert np.isnan(got.lse[0, 0])
        assert got.output[0, 1] == 4.0
    assert np.isfinite(pullback(np.ones_like(v))["qk"][0, 1]).all()


@pytest.mark.parametrize("sizes", [{"b": 0}, {"h": 0}, {"t": 0}])
@pytest.mark.parametrize("library", [np, array_api_strict])
def test_empty_axes(sizes, library):
    given = base(30, **sizes)
    for source in ({"buckets": library.asarray(given["buckets"])}, {"rng": rng(1)}):
        qk, v = library.asarray(given["qk"]), library.asarray(given["v"])
        result, pullback = attention.vjp(qk, v, chunk=4, **source)
        gradients = pullback(library.zeros(result.output.shape, dtype=v.dtype))
        assert gradients["qk"].shape == qk.shape


def test_windows_end_with_the_sequence():
    given = base(31, t=12, before=10**9, after=10**9, within_bucket=False)
    near = attention(**{**given, "before": 3, "after": 3})
    assert np.array_equal(attention(**given), near)
    with pytest.raises(ValueError, match="before is 1000000000: expected at most the 6 chunks of all rounds"):
        attention(**{**given, "wrap": "global"})


@pytest.mark.parametrize("value", ["no", 1, np.nan, None])
@pytest.mark.parametrize("name", ["causal", "within_bucket", "padding_bucket"])
def test_flags_are_true_or_false(name, value):
    with pytest.raises(TypeError, match=f"{name} is .*: expected True or False"):
        attention(**{**base(), name: value})


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf, "small"])
def test_the_smallest_norm_is_a_number(value):
    with pytest.raises((ValueError, TypeError), match="norm_eps is"):
        attention(**{**base(), "norm_eps": value})
