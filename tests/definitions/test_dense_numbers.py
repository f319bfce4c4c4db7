"""The definition against brute force in plain Python, mpmath, and the numbers of independent implementations."""

import json
import math
import pathlib

import mpmath
import numpy as np
import pytest
from oracles.dense_loop import visible_pairs

import refattn as ra
from refattn.patterns import mask_mod

definition = ra.scaled_dot_product_attention.definition

DATA = pathlib.Path(__file__).parent.parent / "data"
U = np.finfo(np.float64).eps / 2


def every(step):
    return mask_mod(lambda b, h, i, j: (i + j + b + h) % step == 0)


def arrays(rng, *, lead=(2,), h=6, g=3, q=4, k=7, d=5, e=3, amplitude=1.0):
    draw = rng.standard_normal
    return {
        "q": amplitude * draw((*lead, h, q, d)),
        "k": draw((*lead, g, k, d)),
        "v": draw((*lead, g, k, e)),
    }


def all_options(rng, *, lead=(2,), h=6, q=4, k=7):
    def mod(logits, b, h, i, j):
        moved = logits + 0.1 * b - 0.2 * h + 0.03 * i * j
        return np.where((i + 2 * j + h) % 11 == 0, -np.inf, moved)

    bias = rng.standard_normal((h, 1, k))
    bias[1, 0, 2] = -np.inf
    return {
        "mask": rng.random((*lead, 1, q, k)) < 0.9,
        "pattern": every(3),
        "bias": bias,
        "causal": True,
        "align": np.arange(3, 3 + math.prod(lead)).reshape(lead),
        "window": (5, 1),
        "query_lengths": q - 1,
        "key_lengths": np.full(lead, k - 1),
        "query_segments": rng.integers(0, 2, (*lead, q)),
        "key_segments": rng.integers(0, 2, (*lead, k)),
        "scale": 0.7,
        "softcap": 1.5,
        "alibi_slopes": rng.random(h),
        "sinks": rng.standard_normal((h, 2)),
        "dropout_mask": rng.random((*lead, h, q, k)) < 0.75,
        "dropout_rate": 0.25,
        "score_mod": mod,
    }


def brute_force(q, k, v, **o):
    """One batch axis, Python numbers only; returns output, lse as nested dicts {(b, h, i): ...}."""
    (bs, hs, qs, d), (gs, ks), e = q.shape, k.shape[1:3], v.shape[3]
    full = (bs, hs, qs, ks)
    at = {n: np.broadcast_to(o[n], full) for n in ("mask", "bias", "dropout_mask") if o.get(n) is not None}
    qn = np.broadcast_to(o.get("query_lengths", qs) if o.get("query_lengths") is not None else qs, (bs,))
    kn = np.broadcast_to(o.get("key_lengths", ks) if o.get("key_lengths") is not None else ks, (bs,))
    output, lse = np.zeros((bs, hs, qs, e)), np.full((bs, hs, qs), -math.inf)
    for b in range(bs):
        align = o.get("align") or 0 if np.ndim(o.get("align")) == 0 else int(o["align"][b])
        align = {"upper_left": 0, "lower_right": int(kn[b] - qn[b])}.get(align, align)
        for h in range(hs):
            g = h % gs if o.get("head_map") == "tile" else h // (hs // gs)
            for i in range(int(qn[b])):
                terms = {}
                for j in range(int(kn[b])):
                    s = math.fsum(float(q[b, h, i, c]) * float(k[b, g, j, c]) for c in range(d))
                    s *= d**-0.5 if o.get("scale") is None else o["scale"]
                    if o.get("score_mod"):
                        s = float(o["score_mod"](np.array(s), *map(np.array, (b, h, i, j))))
                    extra = float(at["bias"][b, h, i, j]) if "bias" in at else 0.0
                    if -math.inf in (s, extra):
                        continue
                    if o.get("alibi_slopes") is not None:
                        extra -= float(o["alibi_slopes"][h]) * abs(i + align - j)
                    if o.get("softcap") and o.get("softcap_after_bias"):
                        s = o["softcap"] * math.tanh((s + extra) / o["softcap"])
                    elif o.get("softcap"):
                        s = o["softcap"] * math.tanh(s / o["softcap"]) + extra
                    else:
                        s += extra
                    left, right = o.get("window") or (None, None)
                    see = "mask" not in at or at["mask"][b, h, i, j]
                    see = see and (o.get("pattern") is None or o["pattern"].to_mask(qs, ks, bs, hs)[b, h, i, j])
                    see = see and (not o.get("causal") or j <= i + align)
                    see = see and (left is None or j >= i + align - left) and (right is None or j <= i + align + right)
                    if o.get("query_segments") is not None:
                        see = see and o["query_segments"][b, i] == o["key_segments"][b, j]
                    if see:
                        terms[j] = s
                sinks = [] if o.get("sinks") is None else np.reshape(o["sinks"], (hs, -1))[h].tolist()
                keys_only = math.fsum(math.exp(s) for s in terms.values())
                total = keys_only + math.fsum(math.exp(s) for s in sinks)
                counted = total if o.get("lse_includes_sinks", True) else keys_only
                lse[b, h, i] = math.log(counted) if counted else -math.inf
                for c in range(e):
                    output[b, h, i, c] = math.fsum(
                        math.exp(s)
                        / total
                        * (at["dropout_mask"][b, h, i, j] / (1 - o["dropout_rate"]) if "dropout_mask" in at else 1)
                        * float(v[b, g, j, c])
                        for j, s in terms.items()
                    )
    return output, lse


CASES = {
    "plain": lambda o: {},
    "tile": lambda o: {"head_map": "tile"},
    "one_key_head": lambda o: {},
    "mask": lambda o: {"mask": o["mask"]},
    "mask_shared": lambda o: {"mask": o["mask"][0, 0]},
    "pattern": lambda o: {"pattern": o["pattern"]},
    "bias": lambda o: {"bias": o["bias"]},
    "causal_upper_left": lambda o: {"causal": True, "align": "upper_left"},
    "causal_lower_right": lambda o: {"causal": True, "align": "lower_right"},
    "causal_negative": lambda o: {"causal": True, "align": -2},
    "causal_per_batch": lambda o: {"causal": True, "align": np.array([0, 2])},
    "window": lambda o: {"window": (1, 0), "align": "lower_right"},
    "window_left": lambda o: {"window": (2, None), "align": "upper_left"},
    "window_right": lambda o: {"window": (None, 1), "align": "upper_left"},
    "lengths": lambda o: {
        "causal": True,
        "align": "lower_right",
        "query_lengths": np.array([2, 4]),
        "key_lengths": np.array([7, 0]),
    },
    "segments": lambda o: {n: o[n] for n in ("query_segments", "key_segments")},
    "scale": lambda o: {"scale": 0.3},
    "softcap": lambda o: {"softcap": 1.5, "bias": o["bias"]},
    "softcap_after_bias": lambda o: {"softcap": 1.5, "bias": o["bias"], "softcap_after_bias": True},
    "alibi": lambda o: {"alibi_slopes": o["alibi_slopes"], "align": "lower_right"},
    "sinks": lambda o: {"sinks": o["sinks"][:, 0]},
    "sinks_several": lambda o: {"sinks": o["sinks"]},
    "sinks_not_in_lse": lambda o: {"sinks": o["sinks"], "lse_includes_sinks": False},
    "dropout": lambda o: {n: o[n] for n in ("dropout_mask", "dropout_rate")},
    "score_mod": lambda o: {"score_mod": o["score_mod"]},
    "score_mod_cap": lambda o: {"score_mod": o["score_mod"], "softcap": 1.5},
    "everything": lambda o: o,
    "everything_tile": lambda o: o | {"head_map": "tile", "softcap_after_bias": True, "lse_includes_sinks": False},
}


@pytest.mark.parametrize("name", CASES)
def test_brute_force(name):
    rng = np.random.default_rng(3)
    x = arrays(rng, g=1 if name == "one_key_head" else 3)
    options = CASES[name](all_options(rng))
    result = definition(**x, **options)
    output, lse = brute_force(**x, **options)
    # Logits of size <= 10 from 5 products, 7 keys: a few tens of roundings of numbers of that size.
    np.testing.assert_allclose(result.output, output, rtol=0, atol=200 * U)
    np.testing.assert_allclose(result.lse, lse, rtol=0, atol=200 * U)


def test_mpmath():
    rng = np.random.default_rng(5)
    x = arrays(rng, lead=(), h=2, g=1, q=2, k=3, d=3, e=2)
    bias = rng.standard_normal((2, 2, 3))
    sinks = np.array([0.4, -1.0])
    result = definition(**x, bias=bias, softcap=1.2, sinks=sinks)
    with mpmath.workdps(40):
        for h, i in np.ndindex(2, 2):
            logits = []
            for j in range(3):
                dot = mpmath.fsum(mpmath.mpf(x["q"][h, i, c]) * mpmath.mpf(x["k"][0, j, c]) for c in range(3))
                cap = mpmath.mpf(1.2)
                logits.append(cap * mpmath.tanh(dot / mpmath.sqrt(3) / cap) + mpmath.mpf(bias[h, i, j]))
            lse = mpmath.log(mpmath.fsum(mpmath.exp(s) for s in [*logits, mpmath.mpf(sinks[h])]))
            assert abs(result.lse[h, i] - lse) < 30 * U
            for c in range(2):
                exact = mpmath.fsum(mpmath.exp(s - lse) * mpmath.mpf(x["v"][0, j, c]) for j, s in enumerate(logits))
                assert abs(result.output[h, i, c] - exact) < 30 * U


def stored(peer):
    return [pytest.param(path, id=f"{peer}-{path.stem}") for path in sorted((DATA / peer).glob("*.npz"))]


def options_of(meta, x):
    """The options of a stored case in our words."""
    o, case = meta["options"], meta["case"]
    i, j = np.arange(x["in_q"].shape[2])[:, None], np.arange(x["in_k"].shape[2])
    options = {name: o[name] for name in ("scale", "softcap") if name in o}
    if meta["peer"] in ("hf_gemma2", "hf_gpt_oss") or o.get("is_causal") or "causal" in case:
        options.update(causal=True, align="upper_left")
    if o.get("window"):
        options.update(window=(o["window"] - 1, 0))
    for ours, theirs in (
        ("bias", "in_bias"),
        ("mask", "in_keep_mask"),
        ("sinks", "in_sinks"),
        ("alibi_slopes", "w_slopes"),
    ):
        if theirs in x:
            options[ours] = x[theirs]
    if case == "dilated":
        options["mask"] = (j <= i) & ((i - j) % o["dilation"] == 0)
    if case == "prefix_lm":
        options["mask"] = (j <= i) | (j < o["prefix"])
    if "w_doc" in x:
        options.update(query_segments=x["w_doc"], key_segments=x["w_doc"])
    return options


@pytest.mark.parametrize(
    "path", [case for peer in ("torch_sdpa", "torch_flex", "hf_gemma2", "hf_gpt_oss") for case in stored(peer)]
)
def test_stored(path):
    meta = json.loads(path.with_suffix(".json").read_text())
    with np.load(path) as file:
        x = dict(file)
    result = definition(x["in_q"], x["in_k"], x["in_v"], **options_of(meta, x))
    dtype = x["in_q"].dtype
    size = x["in_q"].shape[-1] + x["in_k"].shape[-2]
    # First order: rounding of the logits (their size times the additions) reaches the output times the spread of v.
    logits = (
        np.abs(options_of(meta, x).get("scale", x["in_q"].shape[-1] ** -0.5))
        * np.abs(x["in_q"]).max()
        * 8
        * np.abs(x["in_k"]).max()
    )
    bound = np.finfo(dtype).eps * (size + logits) * 2 * np.abs(x["in_v"]).max()
    assert np.abs(result.output - x["out"]).max() <= bound
    if "out_lse" in x:
        assert np.abs(result.lse - x["out_lse"]).max() <= bound


def test_leading_axes_broadcast_and_are_counted_flat():
    rng = np.random.default_rng(7)
    x = arrays(rng, lead=(2, 3), h=2, g=2)
    x["k"], x["v"] = x["k"][:, :1], x["v"][0]
    lengths, offset = rng.integers(1, 8, (2, 3)), rng.integers(0, 3, (2, 1))
    options = {"pattern": every(2), "key_lengths": lengths, "causal": True, "align": offset}
    result = definition(**x, **options)
    assert result.output.shape == (2, 3, 2, 4, 3)
    full = {n: np.broadcast_to(a, (2, 3, *a.shape[-3:])).reshape(6, *a.shape[-3:]) for n, a in x.items()}
    flat = brute_force(
        **full, **options | {"key_lengths": lengths.ravel(), "align": np.broadcast_to(offset, (2, 3)).ravel()}
    )
    np.testing.assert_allclose(result.output.reshape(6, 2, 4, 3), flat[0], rtol=0, atol=100 * U)


def test_rows_without_keys():
    x = arrays(np.random.default_rng(0))
    empty = np.zeros((4, 7), dtype=bool)
    result = definition(**x, mask=empty)
    assert not result.output.any()
    assert (result.lse == -np.inf).all()
    sinks = np.array([[0.3, -1.0]] * 6)
    result = definition(**x, mask=empty, sinks=sinks, query_lengths=3)
    assert not result.output.any()
    np.testing.assert_allclose(result.lse[..., :3], math.log(math.exp(0.3) + math.exp(-1.0)), rtol=4 * U)
    assert (result.lse[..., 3] == -np.inf).all()
    assert (definition(**x, mask=empty, sinks=sinks, lse_includes_sinks=False).lse == -np.inf).all()
    x["k"], x["v"] = x["k"][:, :, :0], x["v"][:, :, :0]
    assert (definition(**x).lse == -np.inf).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["k", "v"])
def test_poison_reaches_the_rows_that_may_see_it(name, poison):
    x = arrays(np.random.default_rng(1), h=3)
    options = {"causal": True, "align": 1}
    clean = definition(**x, **options)
    x[name][:, 1, 3, 2] = poison
    result = definition(**x, **options)
    reached = ~(np.isfinite(result.output).all(-1) & np.isfinite(result.lse)) | (result.lse != clean.lse)
    expected = np.zeros((2, 3, 4), dtype=bool)
    expected[:, 1, 2:] = True
    np.testing.assert_array_equal(reached, expected)
    np.testing.assert_array_equal(result.output[~expected], clean.output[~expected])


def test_minus_infinity_hides_before_the_cap():
    x = arrays(np.random.default_rng(2))
    mask = np.random.default_rng(2).random((2, 6, 4, 7)) < 0.6
    want = definition(**x, mask=mask, softcap=2.0).output
    bias = np.where(mask, 0.0, -np.inf)
    for options in (
        {"bias": bias},
        {"bias": bias, "softcap_after_bias": True},
        {"score_mod": lambda s, b, h, i, j: np.where(mask[b, h, i, j], s, -np.inf)},
    ):
        np.testing.assert_array_equal(definition(**x, softcap=2.0, **options).output, want)


def test_keep_weights():
    rng = np.random.default_rng(4)
    x = arrays(rng, g=6)
    options = all_options(rng) | {"score_mod": None}
    result = definition(**x, **options, keep_weights=True)
    np.testing.assert_allclose(np.einsum("bhqk,bhke->bhqe", result.weights, x["v"]), result.output, rtol=0, atol=50 * U)
    seen = visible_pairs((2,), 6, 4, 7, **{n: options[n] for n in VISIBILITY}) & np.isfinite(result.logits)
    undropped = np.exp(
        np.where(seen, result.logits, -np.inf) - np.where(np.isfinite(result.lse), result.lse, 0)[..., None]
    )
    np.testing.assert_allclose(undropped * options["dropout_mask"] / 0.75, result.weights, rtol=50 * U)
    real = (np.arange(4)[:, None] < 3) & (np.arange(7) < 6)
    shown = np.broadcast_to(np.isfinite(options["bias"]) & real, result.logits.shape)
    assert (np.isfinite(result.logits) == shown).all()  # a value also where the pair is invisible


VISIBILITY = (
    "mask", "pattern", "causal", "align", "window", "query_lengths", "key_lengths", "query_segments", "key_segments",
)  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (2, 2)}, {"alibi_slopes": np.ones(6)}], ids=["causal", "window", "alibi"]
)
def test_align_must_be_said(options):
    x = arrays(np.random.default_rng(0))
    with pytest.raises(ValueError, match="upper_left.*lower_right"):
        definition(**x, **options)
    square = x | {"k": x["k"][:, :, :4], "v": x["v"][:, :, :4]}
    definition(**square, **options)
    with pytest.raises(ValueError, match="lengths are given"):
        definition(**square, **options, key_lengths=3)
