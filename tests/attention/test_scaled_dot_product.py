"""scaled_dot_product_attention: gradients, equality with its definition, tiles, namespaces, bad input, special values."""

import array_api_strict
import numpy as np
import pytest
from ml_dtypes import bfloat16
from support import assert_adjoint, assert_close, assert_gradients, random_cotangents

from refattn import patterns
from refattn.attention.scaled_dot_product import scaled_dot_product_attention as attention
from refattn.normalization import merge

B, H, G, Q, K, D, E = 2, 4, 2, 3, 5, 3, 2
EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def base(seed=0, **sizes):
    return attention.example(rng(seed), **{"b": B, "h": H, "g": G, "q": Q, "k": K, "d": D, "e": E, **sizes})


def bend(logits, b, h, i, j):
    return logits * (1 + 0.1 * h) + 0.2 * b - 0.05 * (i - j) + 0.1 * logits**2


def bend_derivative(logits, b, h, i, j):
    return (1 + 0.1 * h) + 0.2 * logits


def with_derivative(logits, b, h, i, j):
    return bend(logits, b, h, i, j)


with_derivative.derivative = bend_derivative
hiding = rng(9).random((B, H, Q, K)) < 0.2
OPTIONS = {
    "plain": {},
    "mask": {"mask": rng(1).random((B, 1, Q, K)) < 0.7},
    "mask_empty_row": {"mask": np.arange(Q)[:, None] != 1},
    "bias": {"bias": rng(2).standard_normal((B, H, Q, K))},
    "bias_shared": {"bias": rng(2).standard_normal((H, 1, K))},
    "bias_one": {"bias": rng(2).standard_normal((1, 1))},
    "bias_hides": {"bias": np.where(hiding, -np.inf, rng(2).standard_normal((B, H, Q, K)))},
    "causal_lower": {"causal": True, "align": "lower_right"},
    "causal_upper": {"causal": True, "align": "upper_left"},
    "causal_negative": {"causal": True, "align": -1},
    "causal_per_batch": {"causal": True, "align": np.array([1, -2])},
    "window": {"window": (1, 0), "align": 1},
    "window_left": {"window": (None, 1), "align": "lower_right"},
    "lengths": {"query_lengths": [2, 0], "key_lengths": [3, 4]},
    "lengths_causal": {"query_lengths": [2, 3], "key_lengths": [4, 5], "causal": True, "align": "lower_right"},
    "segments": {"query_segments": np.array([[0, 0, 1], [1, 2, 2]]), "key_segments": np.array([0, 0, 1, 1, 2])},
    "scale": {"scale": 0.7},
    "scale_zero": {"scale": 0.0},
    "softcap": {"softcap": 1.3},
    "softcap_bias": {"softcap": 1.3, "bias": rng(2).standard_normal((B, H, Q, K))},
    "softcap_after": {"softcap": 1.3, "bias": rng(2).standard_normal((B, H, Q, K)), "softcap_after_bias": True},
    "softcap_after_hides": {"softcap": 1.3, "bias": np.where(hiding, -np.inf, 0.3), "softcap_after_bias": True},
    "alibi": {"alibi_slopes": rng(3).random(H), "align": "lower_right"},
    "sinks": {"sinks": rng(4).standard_normal(H)},
    "sinks_many": {"sinks": rng(4).standard_normal((H, 3)), "mask": np.arange(Q)[:, None] != 1},
    "sinks_outside": {
        "sinks": rng(4).standard_normal(H),
        "lse_includes_sinks": False,
        "mask": np.arange(Q)[:, None] != 1,
    },
    "sinks_padded": {"sinks": rng(4).standard_normal(H), "query_lengths": [2, 3]},
    "dropout": {"dropout_mask": rng(5).random((B, H, Q, K)) < 0.7, "dropout_rate": 0.3},
    "pattern": {"pattern": patterns.dilated(2) & patterns.causal(align=1)},
    "pattern_heads": {"pattern": patterns.dense(rng(6).random((H, Q, K)) < 0.6)},
    "score_mod_derivative": {"score_mod": with_derivative},
    "tile": {"head_map": "tile", "bias": rng(2).standard_normal((H, Q, K)), "sinks": rng(4).standard_normal(H)},
}
TOGETHER = {
    "mask": rng(1).random((B, 1, Q, K)) < 0.9, "bias": np.where(hiding, -np.inf, rng(2).standard_normal((B, H, Q, K))),
    "causal": True, "align": "lower_right", "window": (3, None), "key_lengths": [5, 4], "query_lengths": [3, 2],
    "query_segments": np.zeros((B, Q), int), "key_segments": np.array([0, 0, 1, 0, 0]), "scale": 0.6, "softcap": 1.7,
    "alibi_slopes": rng(3).random(H), "sinks": rng(4).standard_normal((H, 2)), "dropout_rate": 0.25,
    "dropout_mask": rng(5).random((B, H, Q, K)) < 0.75, "score_mod": with_derivative,
    "pattern": ~patterns.dense(np.eye(Q, K, 2, dtype=bool)),
}  # fmt: skip
OPTIONS["together"] = TOGETHER
OPTIONS["together_after"] = {**TOGETHER, "softcap_after_bias": True, "lse_includes_sinks": False, "head_map": "tile"}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_by_complex_step(name):
    arguments = {**base(), "scale": 0.5, **OPTIONS[name]}
    assert_gradients(attention, arguments, rng(7))


@pytest.mark.parametrize("name", OPTIONS)
def test_adjoint_identity(name):
    assert_adjoint(attention, {**base(1), **OPTIONS[name]}, rng(8))


@pytest.mark.parametrize("algorithm", ["whole", "tiled"])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_definition(name, algorithm):
    arguments = {**base(2), **OPTIONS[name]}
    result = attention.forward(**arguments, algorithm=algorithm)
    want = attention.definition(**arguments)
    # every entry is a short sum of terms of order 1: (d + k + a dozen) roundings
    assert_close(result.output, want.output, 40 * EPS)
    assert_close(result.lse, want.lse, 40 * EPS)


@pytest.mark.parametrize("name", OPTIONS)
def test_tiled_gradients_equal_whole(name):
    arguments = {**base(3), **OPTIONS[name]}
    (whole, back), (_, back_tiled) = (attention.vjp(**arguments, algorithm=a) for a in ("whole", "tiled"))
    cotangents = random_cotangents(attention, whole, rng(3))
    want, got = back(**cotangents), back_tiled(**cotangents)
    for n in want:
        assert_close(got[n], want[n], 200 * EPS)


def test_score_mod_by_complex_step_equals_its_derivative():
    result, pullback = attention.vjp(**base(), score_mod=bend)
    _, known = attention.vjp(**base(), score_mod=with_derivative)
    d = rng(1).standard_normal(result.output.shape)
    for n, g in known(d).items():
        assert_close(pullback(d)[n], g, 20 * EPS)


def test_kept_weights_and_logits():
    for options in OPTIONS.values():
        arguments = {**base(4), **options}
        got, want = (
            attention.forward(**arguments, keep_weights=True),
            attention.definition(**arguments, keep_weights=True),
        )
        assert_close(got.weights, want.weights, 40 * EPS)
        hidden = np.broadcast_to(np.isinf(want.logits), want.logits.shape)
        assert_close(np.where(hidden, 0, got.logits), np.where(hidden, 0, want.logits), 40 * EPS)


def test_leading_axes_broadcast():
    r = rng(5)
    q, k, v = r.standard_normal((3, 1, H, Q, D)), r.standard_normal((2, G, K, D)), r.standard_normal((G, K, E))
    bias = r.standard_normal((3, 1, H, Q, K))
    arguments = {"q": q, "k": k, "v": v, "bias": bias, "key_lengths": np.array([[5, 3]])}
    result = attention.forward(**arguments)
    assert result.output.shape == (3, 2, H, Q, E)
    assert result.lse.shape == (3, 2, H, Q)
    assert_close(result.output, attention.definition(**arguments).output, 40 * EPS)
    assert_gradients(attention, arguments, r)


def test_no_leading_axes_and_one_head():
    r = rng(6)
    assert attention(
        r.standard_normal((1, Q, D)), r.standard_normal((1, K, D)), r.standard_normal((1, K, E))
    ).shape == (1, Q, E)


@pytest.mark.parametrize("name", ["plain", "together", "together_after", "bias_hides", "lengths", "pattern_heads"])
def test_strict_namespace(name):
    arguments = {**base(7), **OPTIONS[name]}
    strict = {
        n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) and n != "align" else x
        for n, x in arguments.items()
    }
    if "score_mod" in strict:
        strict.pop("score_mod")
        arguments.pop("score_mod")
    for algorithm in ("whole", "tiled"):
        result, pullback = attention.vjp(**strict, algorithm=algorithm)
        want, want_back = attention.vjp(**arguments, algorithm=algorithm)
        cotangents = random_cotangents(attention, want, rng(1))
        got = pullback(**{n: array_api_strict.asarray(x) for n, x in cotangents.items()})
        assert type(result.output) is type(strict["q"])
        assert_close(result.output, want.output, 20 * EPS)
        for n, g in want_back(**cotangents).items():
            assert_close(got[n], g, 100 * EPS)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32])
def test_low_precision_rounds_once(dtype):
    arguments = {n: x.astype(dtype) for n, x in base(8).items()}
    result, pullback = attention.vjp(**arguments)
    assert result.output.dtype == dtype
    assert result.lse.dtype == np.float32
    want = attention.forward(**{n: x.astype(np.float64) for n, x in arguments.items()})
    unit = {np.float16: 2.0**-11, bfloat16: 2.0**-8, np.float32: 2.0**-24}[dtype]
    # float32 inside: 40 roundings of 2**-24; then one rounding to the storage dtype
    assert_close(result.output, want.output, unit + 40 * 2.0**-24)
    assert all(g.dtype == dtype for g in pullback(result.output).values())


@pytest.mark.parametrize("algorithm", ["whole", "tiled"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_reaches_exactly_the_rows_that_may_see_it(poison, algorithm):
    arguments = {**base(9, q=5, k=7), "causal": True, "align": "lower_right"}
    clean = attention.forward(**arguments, algorithm=algorithm)
    for name in ("k", "v"):
        dirty = {**arguments, name: arguments[name].copy()}
        dirty[name][0, 1, 4, :] = poison
        result, pullback = attention.vjp(**dirty, algorithm=algorithm)
        seen = np.zeros((B, H, 5), bool)
        seen[0, 2:, 2:] = True  # key 4 with offset 2 is seen from row 2 on, by the two heads of key head 1
        assert np.array_equal(result.output[~seen], clean.output[~seen])
        if name == "v":
            assert not np.isfinite(result.output[seen]).any()
        gradients = pullback(np.ones_like(result.output))
        assert np.isfinite(gradients["q"][~seen]).all()
        assert np.isfinite(gradients["k"][1]).all()


def test_poisoned_padding_is_never_read():
    arguments = {**base(10, q=4, k=6), "query_lengths": [3, 2], "key_lengths": [4, 0], "sinks": np.ones(H)}
    want, want_back = attention.vjp(**arguments)
    dirty = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    for b, (rows, keys) in enumerate(zip([3, 2], [4, 0], strict=True)):
        dirty["q"][b, :, rows:] = np.nan
        dirty["k"][b, :, keys:] = np.nan
        dirty["v"][b, :, keys:] = np.inf
    result, pullback = attention.vjp(**dirty)
    assert np.array_equal(result.output, want.output)
    assert np.array_equal(result.lse, want.lse)
    assert (result.lse[0, :, 3] == -np.inf).all()
    cotangent = rng(1).standard_normal(want.output.shape)
    poisoned = cotangent.copy()
    poisoned[0, :, 3:] = np.nan
    poisoned[1, :, 2:] = np.nan
    for n, g in want_back(np.where(np.isnan(poisoned), 0, cotangent)).items():
        assert np.array_equal(pullback(poisoned)[n], g), n


def test_extreme_logits():
    q, k, v = np.full((1, 1, 2), 1e3), np.array([[[1e3, 1e3], [1e3, 1e3 - 1e-3]]]), np.array([[[1.0], [2.0]]])
    exact = attention.forward(q, k, v, scale=1.0)  # logits 2e6 and 2e6 - 1
    assert_close(exact.output, [[[1 + 1 / (1 + np.e)]]], 1e-9)  # 2e6 carries 2**-32 absolute
    low = attention.forward(q, -k, v, scale=1.0)
    assert_close(low.output, [[[2 - 1 / (1 + np.e)]]], 1e-9)
    f = attention.forward(*(x.astype(np.float32) for x in (q, -k * 100, v)), scale=1.0)
    assert np.isfinite(f.lse).all()
    assert f.lse[0, 0] < -1e8


def test_inputs_are_not_modified_and_may_be_views():
    r = rng(11)
    wide = r.standard_normal((B, Q, H, 2 * D))
    q = np.swapaxes(wide, 1, 2)[..., ::2]
    k = np.broadcast_to(r.standard_normal((G, 1, D)), (B, G, K, D))
    v = r.standard_normal((B, G, E, K)).swapaxes(-1, -2)
    for x in (q, v):
        x.flags.writeable = False
    before = [x.copy() for x in (q, k, v)]
    result, pullback = attention.vjp(q, k, v, softcap=2.0)
    first = pullback(np.ones_like(result.output))
    again = pullback(np.ones_like(result.output))
    assert all(np.array_equal(x, y) for x, y in zip(before, (q, k, v), strict=True))
    assert all(np.array_equal(first[n], again[n]) for n in first)
    copies = attention.forward(q.copy(), k.copy(), v.copy(), softcap=2.0)
    assert_close(result.output, copies.output, 20 * EPS)


@pytest.mark.parametrize("sizes", [{"b": 0}, {"q": 0}, {"k": 0}, {"e": 0}, {"d": 0}, {"h": 0, "g": 0}])
def test_empty_axes(sizes):
    arguments = attention.example(rng(), **{"b": B, "h": H, "g": G, "q": Q, "k": K, "d": D, "e": E, **sizes})
    if sizes.get("h") == 0:
        arguments = {"q": np.zeros((B, 0, Q, D)), "k": np.zeros((B, 0, K, D)), "v": np.zeros((B, 0, K, E))}
    for algorithm in ("auto", "whole", "tiled"):
        result, pullback = attention.vjp(**arguments, algorithm=algorithm)
        assert result.output.shape == (*arguments["q"].shape[:-1], arguments["v"].shape[-1])
        assert {n: g.shape for n, g in pullback(result.output).items()} == {n: x.shape for n, x in arguments.items()}
    if sizes.get("k") == 0:
        assert (result.output == 0).all()
        assert (result.lse == -np.inf).all()


@pytest.mark.parametrize("includes", [True, False])
def test_sinks_switched_off_by_minus_infinity(includes):
    arguments = {**base(13), "mask": np.arange(Q)[:, None] != 1}
    want, want_back = attention.vjp(**arguments)
    result, pullback = attention.vjp(**arguments, sinks=np.full(H, -np.inf), lse_includes_sinks=includes)
    assert_close(result.output, want.output, 4 * EPS)
    assert_close(result.lse, want.lse, 4 * EPS)
    cotangents = random_cotangents(attention, want, rng(1))
    gradients = pullback(**cotangents)
    assert (gradients["sinks"] == 0).all()
    for n, g in want_back(**cotangents).items():
        assert_close(gradients[n], g, 20 * EPS)
    assert_close(attention.definition(**arguments, sinks=np.full(H, -np.inf)).output, want.output, 40 * EPS)


def test_a_window_without_edges_needs_no_align():
    assert np.array_equal(attention(**base(), window=(None, None)), attention(**base()))


BAD = {
    "rank": ({"q": np.zeros((2, 3))}, ValueError, r"q has shape \(2, 3\)"),
    "heads": ({"q": np.zeros((B, 3, Q, D))}, ValueError, "3 is not a multiple of 2"),
    "channels": ({"k": np.zeros((B, G, K, 7))}, ValueError, "channels: q has 3 and k has 7"),
    "lengths": ({"v": np.zeros((B, G, 4, E))}, ValueError, "k has 5 positions and v has 4"),
    "batch": ({"k": np.zeros((3, G, K, D))}, ValueError, "leading axes"),
    "float_mask": ({"mask": np.ones((Q, K))}, TypeError, "mask has dtype float64: expected a bool array"),
    "mask_shape": ({"mask": np.ones((Q, 4), bool)}, ValueError, r"mask has shape \(3, 4\)"),
    "causal_align": ({"causal": True}, ValueError, "(?s)upper_left.*lower_right"),
    "window_align": ({"window": (1, 1)}, ValueError, "(?s)upper_left.*lower_right"),
    "alibi_align": ({"alibi_slopes": np.ones(H)}, ValueError, "(?s)upper_left.*lower_right"),
    "negative_window": ({"window": (-1, 0), "align": 0}, ValueError, "left is -1"),
    "align": ({"causal": True, "align": "bottom"}, ValueError, "align is 'bottom'"),
    "sink_number": ({"sinks": 0.1}, TypeError, "sinks is 0.1: expected an array"),
    "slope_number": ({"alibi_slopes": 0.1, "align": 0}, TypeError, "alibi_slopes is 0.1: expected an array"),
    "fused_weights": ({"keep_weights": True, "backend": "numba"}, ValueError, "it keeps no weights"),
    "none": ({"q": None}, TypeError, "the argument 'q' is None"),
    "masked_array": ({"k": np.ma.array(np.zeros((B, G, K, D)))}, TypeError, "MaskedArray is no plain array"),
    "scale_vector": ({"scale": np.ones(1)}, ValueError, r"scale has shape \(1,\): expected a number"),
    "segment_dtype": (
        {"query_segments": np.zeros(Q), "key_segments": np.zeros(K, int)},
        TypeError,
        "query_segments has dtype float64",
    ),
    "score_mod_shape": ({"score_mod": lambda s, b, h, i, j: np.ones(4)}, ValueError, r"score_mod returned \(4,\)"),
    "score_mod_number": ({"score_mod": lambda s, b, h, i, j: "x"}, ValueError, "score_mod returned"),
    "unknown": ({"cuasal": True}, TypeError, "no option 'cuasal'; did you mean 'causal'"),
    "backend": ({"backend": "numpi"}, ValueError, "did you mean 'numpy'"),
    "integers": ({"q": np.zeros((B, H, Q, D), int)}, TypeError, "q has dtype int64"),
    "complex": ({"q": np.zeros((B, H, Q, D), complex)}, TypeError, "compute_dtype='complex128'"),
    "namespaces": ({"q": array_api_strict.zeros((B, H, Q, D))}, TypeError, "several libraries"),
    "scale": ({"scale": np.nan}, ValueError, "scale is nan"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap is 0.0"),
    "sinks": ({"sinks": np.zeros(3)}, ValueError, r"sinks has shape \(3,\)"),
    "slopes": ({"alibi_slopes": np.zeros(3), "align": 0}, ValueError, "alibi_slopes has shape"),
    "key_lengths": ({"key_lengths": [6, 1]}, ValueError, "key_lengths is .6, 1.: expected between 0 and 5"),
    "dropout": ({"dropout_rate": 0.5}, ValueError, "dropout_mask is missing"),
    "list": ({"q": [[1.0]]}, TypeError, "q is a list"),
    "algorithm": ({"algorithm": "fast"}, ValueError, "algorithm is 'fast'"),
    "pattern": ({"pattern": np.ones((Q, K), bool)}, TypeError, "pattern is a ndarray"),
    "segments": ({"query_segments": np.zeros(Q, int)}, TypeError, "key_segments is missing"),
    "head_map": ({"head_map": "cycle"}, ValueError, "head_map is 'cycle'"),
    "tiled_weights": ({"keep_weights": True, "algorithm": "tiled"}, ValueError, "keep_weights needs"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        attention.forward(**{**base(), **change})


def test_bad_cotangents():
    result, pullback = attention.vjp(**base())
    with pytest.raises(ValueError, match="cotangent of output has shape"):
        pullback(np.zeros((1, 2)))
    with pytest.raises(TypeError, match="'weights' has no cotangent"):
        pullback(weights=result.output)


def test_only_what_was_passed_has_a_gradient():
    result, pullback = attention.vjp(**base(), scale=0.3)
    gradients = pullback(result.output)
    assert set(gradients) == {"q", "k", "v", "scale"}
    assert gradients["scale"].shape == ()


def test_merge_of_two_halves_is_the_whole():
    q, k, v = base(12).values()
    whole = attention.forward(q, k, v)
    parts = [attention.forward(q, k[..., s, :], v[..., s, :]) for s in (slice(0, 2), slice(2, None))]
    output, lse = merge([p.output for p in parts], [p.lse for p in parts])
    assert_close(output, whole.output, 20 * EPS)
    assert_close(lse, whole.lse, 20 * EPS)
