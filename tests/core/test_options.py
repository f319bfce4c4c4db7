"""The shared options: read over sizes, bounded, one clear error each; kept logits; broadcasting; NaN behind masks."""

import sys

import numpy as np
import pytest
from support import assert_close

import refattn as ra
from refattn.core import options
from refattn.core.blocks import groups, listed_blocks
from refattn.records import Sizes

attention = ra.scaled_dot_product_attention
EPS = np.finfo(np.float64).eps


def arrays(seed=0, *, b=(2,), h=4, g=2, q=5, k=7):
    r = np.random.default_rng(seed)
    return {
        "q": r.standard_normal((*b, h, q, 3)),
        "k": r.standard_normal((*b, g, k, 3)),
        "v": r.standard_normal((*b, g, k, 2)),
    }


# ---------------------------------------------------------------------- reading


def test_options_are_read_without_arrays():
    """A million queries: nothing of that size is made."""
    n = 1_000_000
    sizes = Sizes(lead=(2, 3), h=8, g=2, q=n, k=n, d=64, e=32)
    read = options.read(sizes, xp=np, dtype=np.float32, causal=True, window=(64, 0), softcap=30.0)
    assert (sizes.b, sizes.r) == (6, 4)
    assert read.settings.visibility.pairs(n, n) == 65 * n - 64 * 65 // 2
    first = next(iter(groups(read.settings)))
    block = next(iter(listed_blocks(read.settings, first, np)))
    assert block.keys.extent[0] == 0


@pytest.mark.parametrize("window", [(1, sys.maxsize), (1, 10**30), (1, None), [1, np.int64(2**62)]])
def test_counts_beyond_every_array_are_unlimited(window):
    x = arrays()
    got = attention.forward(**x, window=window, align="lower_right")
    want = attention.forward(**x, mask=np.arange(5)[:, None] + 2 - np.arange(7) <= 1)
    assert np.array_equal(got.output, want.output)
    assert (
        attention.cost(b=1, h=1, q=5, k=7, d=3, window=window, align=2).multiplies
        == attention.cost(b=1, h=1, q=5, k=7, d=3, window=(1, 7), align=2).multiplies
    )


BAD = {
    "a number as q": ({"q": 1.0}, TypeError, "q is 1.0: expected an array"),
    "a list as k": ({"k": [1.0]}, TypeError, "k is a list"),
    "an unknown option": ({"casual": True}, TypeError, "'casual'; did you mean 'causal'"),
    "causal by word": ({"causal": "no"}, TypeError, "causal is 'no': expected True or False"),
    "causal as array": ({"causal": np.array([True])}, TypeError, r"causal is an array bool\(1,\): expected True or"),
    "causal as NaN": ({"causal": float("nan")}, TypeError, "causal is nan: expected True or False"),
    "causal as number": ({"causal": 1}, TypeError, "causal is 1: expected True or False"),
    "keep_weights by word": ({"keep_weights": "yes"}, TypeError, "keep_weights is 'yes': expected True or False"),
    "sinks flag": ({"lse_includes_sinks": None}, TypeError, "lse_includes_sinks is None: expected True or False"),
    "cap flag": ({"softcap_after_bias": 0}, TypeError, "softcap_after_bias is 0: expected True or False"),
    "head_map": ({"head_map": np.ones(2)}, ValueError, "head_map is an array .*: expected one of 'repeat', 'tile'"),
    "scale NaN": ({"scale": float("nan")}, ValueError, "scale is nan: expected a finite number"),
    "scale infinite": ({"scale": np.array(np.inf)}, ValueError, "scale is .*: expected a finite number"),
    "scale complex": ({"scale": 1j}, TypeError, "scale is"),
    "scale complex, real dtype": ({"scale": 1j, "compute_dtype": "float32"}, TypeError, "scale is 1j: expected a real"),
    "scale by word": ({"scale": "auto"}, TypeError, "scale is"),
    "a scale per head": ({"scale": np.ones(4)}, ValueError, r"scale has shape \(4,\): expected a number"),
    "softcap 0": ({"softcap": 0.0}, ValueError, "softcap is 0.0: expected a number above 0"),
    "window of words": ({"window": ("a", 1)}, TypeError, "window: left is 'a': expected an integer"),
    "window of floats": ({"window": (1.5, 2)}, TypeError, "window: left is 1.5: expected an integer"),
    "window of three": ({"window": (1, 2, 3)}, TypeError, r"window is \(1, 2, 3\): expected \(left, right\)"),
    "window of one": ({"window": 3}, TypeError, r"window is 3: expected \(left, right\)"),
    "window below 0": ({"window": (0, -2), "align": 0}, ValueError, "window: right is -2: expected at least 0"),
    "align beyond": ({"align": 10**30, "causal": True}, ValueError, "align is 10+: expected ints of at most"),
    "align by word": ({"align": "left"}, ValueError, "align is 'left': expected one of"),
    "align as float": ({"align": 1.0}, TypeError, "align is 1.0: expected ints per batch"),
    "align as flag": ({"align": True}, TypeError, "align is True: expected ints per batch"),
    "lengths beyond": ({"key_lengths": [3, 8]}, ValueError, r"key_lengths is \[3, 8\]: expected between 0 and 7"),
    "lengths below 0": ({"query_lengths": [-1, 2]}, ValueError, r"query_lengths is \[-1, 2\]: expected between 0 and 5"),
    "lengths of 10^30": ({"key_lengths": [10**30, 1]}, ValueError, "key_lengths is .*: expected ints of at most"),
    "lengths as floats": ({"key_lengths": [1.0, 2.0]}, TypeError, "key_lengths is .*: expected ints per batch"),
    "ragged lengths": ({"key_lengths": [[1], [2, 3]]}, TypeError, "key_lengths is .*: expected ints per batch"),
    "three lengths": ({"key_lengths": [1, 2, 3]}, ValueError, r"key_lengths has shape \(3,\): expected the batch axes"),
    "one segment": ({"query_segments": np.zeros(5, int)}, TypeError, "key_segments is missing"),
    "segments of floats": (
        {"query_segments": np.zeros(5), "key_segments": np.zeros(7, int)}, TypeError, "query_segments has dtype float64",
    ),
    "mask of numbers": ({"mask": np.ones((5, 7))}, TypeError, "mask has dtype float64: expected a bool array"),
    "mask of another size": ({"mask": np.ones((5, 6), bool)}, ValueError, r"mask has shape \(5, 6\): expected one that"),
    "a number as bias": ({"bias": 1.0}, TypeError, "bias is .*: expected an array"),
    "bias with more axes": ({"bias": np.ones((3, 2, 4, 5, 7))}, ValueError, r"bias has shape \(3, 2, 4, 5, 7\)"),
    "pattern as mask": ({"pattern": np.ones((5, 7), bool)}, TypeError, "pattern is a ndarray: expected an object of"),
    "slopes of another count": (
        {"alibi_slopes": np.ones(3), "align": 0}, ValueError, r"alibi_slopes has shape \(3,\): expected \(4,\)",
    ),
    "a number as sinks": ({"sinks": 1.0}, TypeError, "sinks is 1.0: expected an array"),
    "dropout_rate 1": ({"dropout_rate": 1}, ValueError, "dropout_rate is 1: expected a number below 1"),
    "dropout_rate NaN": ({"dropout_rate": float("nan")}, ValueError, "dropout_rate is nan: expected a finite number"),
    "no draw": ({"dropout_rate": 0.5}, ValueError, "dropout_mask is missing"),
    "score_mod by name": ({"score_mod": "causal"}, TypeError, "score_mod is a str: expected a function"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        attention.forward(**{**arrays(), **change})


@pytest.mark.parametrize("empty", ["b", "h", "q", "k", "d", "e"])
@pytest.mark.parametrize("algorithm", ["auto", "whole", "tiled"])
def test_empty_axes(empty, algorithm):
    n = {"b": 2, "h": 4, "g": 2, "q": 5, "k": 7, "d": 3, "e": 2, empty: 0}
    n["g"] = 0 if empty == "h" else 2
    x = np.zeros((n["b"], n["h"], n["q"], n["d"])), np.zeros((n["b"], n["g"], n["k"], n["d"]))
    v = np.ones((n["b"], n["g"], n["k"], n["e"]))
    settings = {"bias": np.zeros((n["q"], n["k"])), "softcap": 2.0, "sinks": np.zeros(n["h"]), "scale": 1.0}
    result, pullback = attention.vjp(*x, v, **settings, causal=True, align=0, algorithm=algorithm)
    assert result.output.shape == (n["b"], n["h"], n["q"], n["e"])
    gradients = pullback(output=np.ones_like(result.output), lse=np.ones_like(result.lse))
    assert all(np.isfinite(g).all() for g in gradients.values())
    if empty == "k":
        assert (result.output == 0).all()
        assert_close(result.lse, np.zeros(result.lse.shape), 0)  # the sinks alone


def test_a_pattern_of_no_heads():
    x = np.zeros((2, 0, 5, 3))
    pattern = ra.patterns.dense(np.ones((0, 5, 5), bool))
    assert attention(x, x, x, pattern=pattern).shape == x.shape
    assert attention.definition(x, x, x, pattern=pattern).output.shape == x.shape


def test_no_lengths_for_no_batch():
    x = np.zeros((0, 2, 5, 3))
    result = attention.forward(x, x, x, query_lengths=[], key_lengths=np.zeros(0, int), causal=True, align=[])
    assert result.output.shape == x.shape


# ---------------------------------------------------------------------- kept logits


def test_kept_logits_are_those_that_meet_visibility():
    """-inf where bias or score_mod hides the pair and at padding; what masks hide keeps its logit."""
    x = arrays(1, g=4)
    bias = np.zeros((5, 7))
    bias[1, 2] = -np.inf
    result = attention.forward(
        **x,
        scale=1.0,
        bias=bias,
        score_mod=lambda s, b, h, i, j: np.where((i == 3) & (j == 4), -np.inf, s + 1),
        mask=np.arange(7) != 0,
        query_lengths=[5, 4],
        key_lengths=[7, 6],
        keep_weights=True,
    )
    want = np.einsum("bhqd,bhkd->bhqk", x["q"], x["k"]) + 1
    want[:, :, 1, 2] = want[:, :, 3, 4] = -np.inf
    want[1, :, 4, :] = want[1, :, :, 6] = -np.inf
    assert_close(result.logits, want, 8 * EPS)
    assert (result.weights[..., 0] == 0).all()
    assert np.all((result.weights > 0) == (np.isfinite(want) & (np.arange(7) != 0)))


# ---------------------------------------------------------------------- leading axes


@pytest.mark.parametrize("longer", ["q", "k", "v", "q k", "k v"])
@pytest.mark.parametrize("more", [{}, {"bias": (5, 7), "sinks": (4,), "dropout": True, "lengths": True}])
@pytest.mark.parametrize("algorithm", ["auto", "tiled"])
def test_each_input_with_one_axis_more(longer, more, algorithm):
    r = np.random.default_rng(2)
    x = arrays(2)
    stacked = {n: np.stack([a, r.standard_normal(a.shape), r.standard_normal(a.shape)]) for n, a in x.items()}
    x |= {n: stacked[n] for n in longer.split()}
    settings = {n: r.standard_normal(more[n]) for n in ("bias", "sinks") if n in more}
    if more:
        settings |= {"dropout_mask": r.random((2, 4, 5, 7)) < 0.6, "dropout_rate": 0.4, "key_lengths": [7, 4]}
    settings["scale"] = 0.7
    result, pullback = attention.vjp(**x, **settings, algorithm=algorithm)
    d_output, d_lse = r.standard_normal(result.output.shape), r.standard_normal(result.lse.shape)
    got = pullback(output=d_output, lse=d_lse)
    names = ("q", "k", "v", *(n for n in ("bias", "sinks", "scale") if n in settings))
    want = dict.fromkeys(names, 0.0)
    for s in range(3):
        part = {n: a[s] if n in longer.split() else a for n, a in x.items()}
        one, pull = attention.vjp(**part, **settings, algorithm="whole")
        assert_close(result.output[s], one.output, 30 * EPS)
        assert_close(result.lse[s], one.lse, 30 * EPS)
        for n, g in pull(output=d_output[s], lse=d_lse[s]).items():
            if n in longer.split():
                assert_close(got[n][s], g, 200 * EPS)
            else:
                want[n] = want[n] + g
    for n in names:
        if n not in longer.split():
            assert_close(got[n], want[n], 400 * EPS)


# ---------------------------------------------------------------------- what masks hide is never read

HIDING = {
    "mask": {"mask": np.arange(7) < 5},
    "pattern": {"pattern": ra.patterns.prefix(5)},
    "key_lengths": {"key_lengths": [5, 5]},
    "bias": {"bias": np.where(np.arange(7) < 5, 0.3, -np.inf) * np.ones((5, 1))},
    "segments": {"query_segments": np.zeros(5, int), "key_segments": (np.arange(7) >= 5).astype(int)},
    "score_mod": {"score_mod": lambda s, b, h, i, j: np.where(j < 5, s, -np.inf)},
}
WITH = {
    "nothing": {},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": np.full(4, 0.2), "align": 0},
    "sinks": {"sinks": np.full((4, 2), 0.2)},
    "dropout": {"dropout_mask": np.arange(35).reshape(5, 7) % 3 != 0, "dropout_rate": 0.25},
}


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("extra", WITH)
@pytest.mark.parametrize("algorithm", ["whole", "tiled"])
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_hidden_keys_and_values_reach_nothing(hiding, extra, algorithm, odd):
    settings = {**HIDING[hiding], **WITH[extra], "scale": 0.6, "algorithm": algorithm}
    x = arrays(3)
    poisoned = {n: a.copy() for n, a in x.items()}
    poisoned["k"][..., 5:, :] = odd
    poisoned["v"][..., 5:, :] = odd
    (want, want_pull), (got, got_pull) = (attention.vjp(**a, **settings) for a in (x, poisoned))
    assert_close(got.output, want.output, 4 * EPS)
    assert_close(got.lse, want.lse, 4 * EPS)
    d_output, d_lse = np.ones_like(want.output), np.ones_like(want.lse)
    wanted = want_pull(output=d_output, lse=d_lse)
    for n, g in got_pull(output=d_output, lse=d_lse).items():
        assert_close(g, wanted[n], 100 * EPS)


@pytest.mark.parametrize("extra", WITH)
@pytest.mark.parametrize("algorithm", ["whole", "tiled"])
def test_padded_queries_and_their_cotangents_reach_nothing(extra, algorithm):
    settings = {"query_lengths": [3, 4], **WITH[extra], "scale": 0.6, "algorithm": algorithm}
    x = arrays(4)
    padded = np.arange(5) >= np.array([3, 4])[:, None]
    poisoned = {**x, "q": np.where(padded[:, None, :, None], np.nan, x["q"])}
    (want, want_pull), (got, got_pull) = (attention.vjp(**a, **settings) for a in (x, poisoned))
    assert_close(got.output, want.output, 4 * EPS)
    assert np.all(got.output[padded[:, None, :].repeat(4, 1)] == 0)
    assert np.all(got.lse[padded[:, None, :].repeat(4, 1)] == -np.inf)
    d_output, d_lse = np.ones_like(want.output), np.ones_like(want.lse)
    wanted = want_pull(output=d_output, lse=d_lse)
    d_output = np.where(padded[:, None, :, None], np.nan, d_output)
    d_lse = np.where(padded[:, None, :], np.inf, d_lse)
    for n, g in got_pull(output=d_output, lse=d_lse).items():
        assert_close(g, wanted[n], 100 * EPS)
