"""talking_heads_attention: gradients, definition, dynamic parts, both walks, poison, stored cases, counts."""

import numpy as np
import pytest
from contract.cases.talking_heads import CASES, PARTS, B, D, E, H, K, Q, X, Y, base
from contract.score_mods import bend_with_derivative
from support import assert_close, cases, random_cotangents

import refattn as ra

attention = ra.talking_heads_attention
EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


PLAIN = [
    "plain",
    "mask",
    "mask_empty_row",
    "bias_hides",
    "causal",
    "lengths",
    "softcap_after",
    "alibi",
    "dropout",
    "together",
]


@pytest.mark.parametrize("name", PLAIN)
def test_identity_projections_are_plain_attention(name):
    options = {n: x for n, x in CASES[name].items() if n != "dynamic"}
    q, k, v = (rng(n).standard_normal((B, H, s, c)) for n, s, c in ((0, Q, D), (1, K, D), (2, K, E)))
    want, want_back = ra.scaled_dot_product_attention.vjp(q, k, v, **options)
    cotangents = random_cotangents(attention, want, rng(3))
    for projections in ({}, {"logits_projection": np.eye(H), "weights_projection": np.eye(H)}):
        got, back = attention.vjp(q, k, v, **projections, **options)
        assert_close(got.output, want.output, 40 * EPS)
        assert_close(got.lse, want.lse, 40 * EPS)
        gradients = back(**cotangents)
        for n, g in want_back(**cotangents).items():
            assert_close(gradients[n], g, 300 * EPS)


def test_permuted_heads():
    """Projections that permute the heads are attention with permuted heads."""
    q, k, v = (rng(n).standard_normal((H, s, D)) for n, s in ((0, Q), (1, K), (2, K)))
    p = np.eye(H)[:, [2, 0, 1]]  # softmax head 0 hears key head 2
    assert_close(
        attention(q, k, v, logits_projection=p, weights_projection=p.T),
        ra.scaled_dot_product_attention(q, k, v),
        40 * EPS,
    )
    got = attention(q, k, v, logits_projection=p)
    assert_close(got, ra.scaled_dot_product_attention(q[[2, 0, 1]], k[[2, 0, 1]], v), 40 * EPS)


@pytest.mark.parametrize("algorithm", ["whole", "tiled"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_reaches_what_it_is_projected_to(poison, algorithm):
    """Softmax head 0 alone sees key 3; it hears key head 0, and value head 0 hears it."""
    logits_projection, weights_projection = np.ones((X, H)), np.ones((H, Y))
    logits_projection[1, 0], weights_projection[0, 1:] = 0.0, 0.0
    seen = np.ones((H, Q, K), bool)
    seen[1:, :, 3] = False
    fixed = {"logits_projection": logits_projection, "weights_projection": weights_projection, "mask": seen}
    clean_arguments = {**base(8), **fixed}
    clean = attention.forward(**clean_arguments, algorithm=algorithm)
    for name, at, expected in (("k", 0, [0]), ("k", 1, []), ("v", 0, [0]), ("v", 1, [])):
        dirty = {**clean_arguments, name: clean_arguments[name].copy()}
        dirty[name][0, at, 3] = poison
        result, pullback = attention.vjp(**dirty, algorithm=algorithm)
        want = attention.definition(**dirty)
        assert_close(result.output, want.output, 60 * EPS)
        assert_close(result.lse, want.lse, 60 * EPS)
        touched = [
            y for y in range(Y) if not np.allclose(result.output[0, y], clean.output[0, y], rtol=0, atol=60 * EPS)
        ]
        assert touched == expected, (name, at)
        assert_close(result.output[1], clean.output[1], 60 * EPS)
        gradients = pullback(np.ones_like(result.output))
        assert np.isfinite(gradients["q"][1]).all()
        assert np.isfinite(gradients["v"][1]).all()
        if not expected:  # a projection's own gradient asks what would come through if the 0 were not 0
            own = {"k": ("logits_projection", (1, 0)), "v": ("weights_projection", (0, 1))}[name]
            assert not np.isfinite(gradients[own[0]][own[1]])
            gradients[own[0]][own[1]] = 0.0
            assert all(np.isfinite(g).all() for g in gradients.values()), name


def test_poisoned_padding_reaches_nothing():
    arguments = {**base(9, **CASES["dynamic"]), "query_lengths": [2, 0], "key_lengths": [3, 4]}
    dirty = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    for b, (rows, keys) in enumerate(((2, 3), (0, 4))):
        dirty["q"][b, :, rows:] = np.nan
        dirty["k"][b, :, keys:], dirty["v"][b, :, keys:] = np.nan, np.inf
    for algorithm in ("whole", "tiled"):
        (want, want_back), (got, got_back) = (attention.vjp(**a, algorithm=algorithm) for a in (arguments, dirty))
        assert_close(got.output, want.output, 60 * EPS)  # values that are not finite take another order of summation
        assert_close(got.lse, want.lse, 60 * EPS)
        assert (got.output[0, :, 2] == 0).all()
        d = rng(1).standard_normal(want.output.shape)
        poisoned = d.copy()
        poisoned[0, :, 2:], poisoned[1] = np.nan, np.nan
        for n, g in want_back(d).items():
            assert_close(got_back(poisoned)[n], g, 100 * EPS)


def test_several_ranges_of_rows_and_blocks_of_keys():
    """Long enough for several tasks and blocks: equal to its own rows one by one, and bitwise the same again."""
    r = rng(11)
    n = 2100
    arguments = attention.example(r, b=1, x=2, h=2, y=3, q=n, k=n, d=4, e=3, **dict.fromkeys(PARTS, True))
    arguments = {m: x.astype(np.float32) for m, x in arguments.items()}
    result, pullback = attention.vjp(**arguments, causal=True)
    few = slice(2000, 2010)
    part = {**arguments, **{m: arguments[m][..., few, :] for m in ("q",)}}
    part |= {m: arguments[m][:, few] for m in ("query_logits", "query_weights")}
    rows = attention.forward(**part, causal=True, align=2000)
    assert_close(rows.output, result.output[..., few, :], 2e-5)
    d = r.standard_normal(result.output.shape).astype(np.float32)
    first, again = pullback(d), pullback(d)
    assert all(np.array_equal(first[m], again[m]) for m in first)
    only = np.zeros_like(d)
    only[..., few, :] = d[..., few, :]
    want = attention.vjp(**part, causal=True, align=2000)[1](d[..., few, :])
    got = pullback(only)
    # every cotangent meets values and logits of order 1 to 4: the sum of absolute terms, over sums of up to n of them
    unit = 4 * float(np.sum(np.abs(d[..., few, :])))
    for m in ("k", "v", "logits_projection", "weights_projection", "key_logits", "key_weights"):
        assert np.max(np.abs(got[m] - want[m])) <= 2.0**-24 * np.sqrt(n) * unit, m


@pytest.mark.parametrize("sizes", [{"b": 0}, {"q": 0}, {"k": 0}, {"e": 0}, {"d": 0}, {"h": 0, "x": 0, "y": 0}])
def test_empty_axes(sizes):
    arguments = {n: np.nan_to_num(x, posinf=0, neginf=0) for n, x in _safe_example(sizes).items()}
    for algorithm in ("auto", "whole", "tiled"):
        result, pullback = attention.vjp(**arguments, algorithm=algorithm)
        assert {n: g.shape for n, g in pullback(result.output).items()} == {n: x.shape for n, x in arguments.items()}
    if sizes.get("k") == 0:
        assert (result.output == 0).all()
        assert (result.lse == -np.inf).all()


def _safe_example(sizes):
    with np.errstate(all="ignore"):
        if sizes.get("h") == 0:
            return {"q": np.zeros((B, 0, Q, D)), "k": np.zeros((B, 0, K, D)), "v": np.zeros((B, 0, K, E))}
        return base(0, **sizes)


# ---------------------------------------------------------------------- stored cases


@pytest.mark.parametrize(
    ("name", "meta", "a"), [c for c in cases("x_transformers") if c[1]["options"]["talking_heads"]]
)
def test_stored_cases(name, meta, a):
    o = meta["options"]
    arguments = {n: a[f"in_{n}"] for n in "qkv"}
    if "scale" in o:
        arguments["scale"] = o["scale"]
    if "in_keep_mask" in a:
        arguments["mask"] = a["in_keep_mask"]
    if o.get("causal"):
        arguments |= {"causal": True, "align": "lower_right"}
    wanted = {n: a[f"grad_{n}"] for n in "qkv"}
    if "pre" in o["talking_heads"]:  # there W is [out, in], and its product is added to what goes in
        arguments["logits_projection"] = np.eye(len(a["w_pre"])) + a["w_pre"].T
        wanted["logits_projection"] = a["grad_w_pre"].T
        plain = attention(**{**arguments, "logits_projection": a["w_pre"].T})
        assert (
            plain.shape != a["out"].shape or np.max(np.abs(plain - a["out"])) > 1e-3
        )  # without the residual it is another
    if "post" in o["talking_heads"]:
        arguments["weights_projection"] = np.ascontiguousarray(a["w_post"].T)
        wanted["weights_projection"] = a["grad_w_post"].T
    unit = max(1e-10, meta["suggested_atol"] or 0)  # float64 in the producer
    result, pullback = attention.vjp(**arguments)
    assert_close(result.output, a["out"], unit)
    gradients = pullback(a["cot_out"])
    for n, want in wanted.items():
        assert_close(gradients[n], want, 10 * unit)


# ---------------------------------------------------------------------- bad input

BAD = {
    "rank": ({"q": np.zeros((Q, D))}, ValueError, "q has shape"),
    "key_heads": ({"k": np.zeros((B, 5, K, D))}, ValueError, "k has shape .2, 5, 5, 3.*'x'"),
    "channels": ({"k": np.zeros((B, X, K, 7))}, ValueError, "k has shape"),
    "lengths": ({"v": np.zeros((B, Y, 9, E))}, ValueError, "v has shape"),
    "logits_projection": ({"logits_projection": np.zeros((H, X))}, ValueError, "logits_projection has shape"),
    "weights_projection": ({"weights_projection": np.zeros((Y, H))}, ValueError, "weights_projection has shape"),
    "missing_before": ({"logits_projection": None}, ValueError, "logits_projection is missing: it leads from 2 heads to 3"),
    "missing_behind": ({"weights_projection": None}, ValueError, "weights_projection is missing: it leads from 3 heads to 4"),
    "query_logits": ({"query_logits": np.zeros((B, K, X, H))}, ValueError, "query_logits has shape"),
    "key_weights": ({"key_weights": np.zeros((B, K, H, H))}, ValueError, "key_weights has shape"),
    "batch": ({"query_weights": np.zeros((3, Q, H, Y))}, ValueError, "leading axes"),
    "mask": ({"mask": np.ones((X, Q, K), bool)}, ValueError, "mask has shape"),
    "bias": ({"bias": np.ones((Y, Q, K))}, ValueError, "bias has shape"),
    "align": ({"causal": True}, ValueError, "align is missing"),
    "sinks": ({"sinks": np.zeros(H)}, TypeError, "talking_heads_attention has no option 'sinks'"),
    "head_map": ({"head_map": "tile"}, TypeError, "talking_heads_attention has no option 'head_map'"),
    "fused": ({"backend": "numba"}, ValueError, "'numba' does not serve talking_heads_attention"),
    "integers": ({"logits_projection": np.ones((X, H), int)}, TypeError, "logits_projection has dtype int64"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        attention.forward(**{**base(), **change})


# ---------------------------------------------------------------------- faults that were found


@pytest.mark.parametrize(
    "more", [{}, {"score_mod": bend_with_derivative}, {"algorithm": "tiled"}], ids=["plain", "score_mod", "tiled"]
)
@pytest.mark.parametrize("name", ["q", "k", "v", *PARTS])
def test_one_array_with_a_batch_axis_that_the_others_lack(name, more):
    given = {n: x[0] if n in ("q", "k", "v", *PARTS) else x for n, x in base(3, dynamic=True).items()}
    given[name] = np.stack([given[name], 0.5 * given[name], given[name] + 1])
    result, pullback = attention.vjp(**given, **more)
    want, pull = attention.definition.vjp(**given, **{n: x for n, x in more.items() if n == "score_mod"})
    cotangents = random_cotangents(attention, result, rng(2))
    assert_close(result.output, want.output, 60 * EPS)
    for n, g in pull(**cotangents).items():
        assert_close(pullback(**cotangents)[n], g, 300 * EPS)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype, size", [(np.float32, 100), (np.float64, 1e8)])
def test_weights_are_exact_at_large_logits(dtype, size, sign):
    """Weights of exp(logit - lse) would be off by the rounding of the lse: a thousandth at logits of 1e4 in float32."""
    q, k, v = (np.full((2, n, 1), x, dtype) for n, x in ((3, size), (4, sign * size), (4, 1)))
    result, pullback = attention.vjp(q, k, v, scale=1.0)
    assert (result.output == 1).all()
    assert (pullback(np.ones_like(result.output))["v"] == 0.75).all()
    assert (attention.definition(q, k, v, scale=1.0).output == 1).all()


@pytest.mark.parametrize("algorithm", ["whole", "tiled"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_dynamic_parts_of_padding_and_hidden_keys_reach_nothing(poison, algorithm):
    given = {**base(5, dynamic=True), "query_lengths": [2, 3], "mask": np.arange(K) != 2}
    dirty = {n: x.copy() if n in PARTS else x for n, x in given.items()}
    for n in ("query_logits", "query_weights"):
        dirty[n][0, 2] = poison
    for n in ("key_logits", "key_weights"):
        dirty[n][:, 2] = poison
    results, pulled = [], []
    for arguments in (given, dirty):
        result, pullback = attention.vjp(**arguments, algorithm=algorithm)
        results.append(result)
        pulled.append(pullback(**random_cotangents(attention, result, rng(2))))
        call, pull = attention.definition.vjp(**arguments)
        assert_close(result.output, call.output, 60 * EPS)
        for n, g in pull(**random_cotangents(attention, result, rng(2))).items():
            assert_close(pulled[-1][n], g, 300 * EPS)
    assert_close(results[1].output, results[0].output, 60 * EPS)
    for n, g in pulled[0].items():
        assert_close(pulled[1][n], g, 300 * EPS)


def test_kept_logits_are_minus_infinity_where_a_bias_hides_and_in_padding():
    bias = np.where(np.arange(K) == 1, -np.inf, 0.0)
    given = {**base(6), "bias": bias[None], "key_lengths": [3, 5], "query_lengths": [3, 1]}
    kept, want = attention.forward(**given, keep_weights=True), attention.definition(**given, keep_weights=True)
    np.testing.assert_array_equal(np.isneginf(kept.logits), np.isneginf(want.logits))
    assert np.isneginf(kept.logits[..., 1]).all()
    assert np.isneginf(kept.logits[0, ..., 3:]).all()
    assert np.isneginf(kept.logits[1, :, 1:]).all()


def test_kept_logits_stand_in_tiles_that_nobody_sees_too():
    given = {**base(7, q=300, k=2100), "causal": True, "align": "upper_left"}
    kept, want = attention.forward(**given, keep_weights=True), attention.definition(**given, keep_weights=True)
    assert_close(kept.logits, want.logits, 100 * EPS)
    assert_close(kept.weights, want.weights, 100 * EPS)
