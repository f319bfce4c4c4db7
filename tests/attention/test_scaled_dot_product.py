"""scaled_dot_product_attention: gradients, equality with its definition, tiles, namespaces, bad input, special values."""

import array_api_strict
import numpy as np
import pytest
from contract.score_mods import bend, bend_with_derivative
from support import assert_close, random_cotangents

from refattn.attention.scaled_dot_product import scaled_dot_product_attention as attention
from refattn.normalization import merge

B, H, G, Q, K, D, E = 2, 4, 2, 3, 5, 3, 2
EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def base(seed=0, **sizes):
    return attention.example(rng(seed), **{"b": B, "h": H, "g": G, "q": Q, "k": K, "d": D, "e": E, **sizes})


def test_score_mod_by_complex_step_equals_its_derivative():
    result, pullback = attention.vjp(**base(), score_mod=bend)
    _, known = attention.vjp(**base(), score_mod=bend_with_derivative)
    d = rng(1).standard_normal(result.output.shape)
    for n, g in known(d).items():
        assert_close(pullback(d)[n], g, 20 * EPS)


def test_no_leading_axes_and_one_head():
    r = rng(6)
    assert attention(
        r.standard_normal((1, Q, D)), r.standard_normal((1, K, D)), r.standard_normal((1, K, E))
    ).shape == (1, Q, E)


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


def test_extreme_logits():
    q, k, v = np.full((1, 1, 2), 1e3), np.array([[[1e3, 1e3], [1e3, 1e3 - 1e-3]]]), np.array([[[1.0], [2.0]]])
    exact = attention.forward(q, k, v, scale=1.0)  # logits 2e6 and 2e6 - 1
    assert_close(exact.output, [[[1 + 1 / (1 + np.e)]]], 1e-9)  # 2e6 carries 2**-32 absolute
    low = attention.forward(q, -k, v, scale=1.0)
    assert_close(low.output, [[[2 - 1 / (1 + np.e)]]], 1e-9)
    f = attention.forward(*(x.astype(np.float32) for x in (q, -k * 100, v)), scale=1.0)
    assert np.isfinite(f.lse).all()
    assert f.lse[0, 0] < -1e8


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
