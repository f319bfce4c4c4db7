"""local_attention: windows by blocks and by distance, gradients, equality with its definition, stored cases."""

import numpy as np
import pytest
from contract.cases.local import WINDOWS, B, D, E, H, T, arguments
from support import assert_close, cases

from refattn import positions
from refattn.attention.local import local_attention as attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention
from refattn.patterns import window

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def base(seed=0, **settings):
    return arguments("default", seed, **settings)


def listed(t, block, look_backward=1, look_forward=0, exact=False, causal=False):
    """The keys of every row by comparing one pair at a time."""
    seen = np.zeros((t, t), bool)
    for i in range(t):
        for j in range(t):
            if exact:
                near = -block * look_forward <= i - j <= block * look_backward
            else:
                near = -look_forward <= i // block - j // block <= look_backward
            seen[i, j] = near and (j <= i or not causal)
    return seen


@pytest.mark.parametrize("name", WINDOWS)
def test_the_windows_are_those_listed(name):
    seen = listed(23, **{"block": 2, **WINDOWS[name]})
    arguments = base(t=23, **WINDOWS[name])
    assert np.array_equal(attention.forward(**arguments, keep_weights=True).weights[0, 0] > 0, seen)
    want = scaled_dot_product_attention.forward(**{n: arguments[n] for n in "qkv"}, mask=seen)
    got = attention.forward(**arguments)
    assert_close(got.output, want.output, 60 * EPS)  # up to 23 keys and 2 channels, both orders
    assert_close(got.lse, want.lse, 60 * EPS)
    assert attention.cost(t=23, d=2, e=1, **{"block": 2, **WINDOWS[name]}).multiplies == 3 * seen.sum()


def test_an_exact_window_is_a_window_a_pattern_and_a_mask():
    arguments = base(t=37, block=4, exact=True, look_backward=2, look_forward=1)
    qkv = {n: arguments[n] for n in "qkv"}
    got = attention(**arguments)
    mask = listed(37, 4, 2, 1, exact=True)
    for options in ({"window": (8, 4)}, {"pattern": window(8, 4)}, {"mask": mask}):
        assert_close(got, scaled_dot_product_attention(**qkv, **options), 60 * EPS)


@pytest.mark.parametrize(
    "options",
    [
        {"block": 64},
        {"block": 64, "exact": True, "causal": True},
        {"block": 1024, "exact": True},
        {"block": 8, "causal": True},
    ],
    ids=str,
)
def test_computed_pairs_grow_with_the_length(options):
    short, long = (attention.cost(t=t, d=1, e=0, **options) for t in (8192, 32768))
    assert 3.9 < long.computed_multiplies / short.computed_multiplies < 4.25  # the first rows see less
    assert long.computed_multiplies <= 2.2 * long.multiplies
    assert long.peak_bytes < 4.25 * short.peak_bytes


def test_pairs_of_an_exact_causal_window():
    n, w = 1000, 60
    assert (
        attention.cost(q=n, k=n, d=1, e=0, block=w, exact=True, causal=True).multiplies
        == n * (w + 1) - w * (w + 1) // 2
    )


def test_poison_reaches_exactly_the_rows_that_may_see_it():
    arguments = base(9, t=80, block=5)
    clean = attention.forward(**arguments)
    dirty = {**arguments, "v": arguments["v"].copy()}
    dirty["v"][0, 1, 17, :] = np.nan
    result, pullback = attention.vjp(**dirty)
    seen = np.zeros((B, H, 80), bool)
    seen[0, 1] = listed(80, 5)[:, 17]
    assert np.array_equal(result.output[~seen], clean.output[~seen])
    assert np.isnan(result.output[seen]).all()
    assert np.isfinite(pullback(np.ones_like(result.output))["q"][~seen]).all()


@pytest.mark.parametrize("algorithm", ["auto", "whole", "tiled"])
@pytest.mark.parametrize("more", [{}, {"exact": True}])
def test_causal_with_an_offset_leaves_what_it_shows(algorithm, more):
    """Query 7 stands at key 8, so it sees 7 and 8; with lengths the last query of 100 stands at key 102."""
    x, v = np.zeros((1, 9, 1)), np.arange(9.0)[None, :, None]
    given = {"q": x, "k": x, "v": v, "block": 1, "look_backward": 0, "look_forward": 1, "causal": True, **more}
    assert attention(**given, align=1, algorithm=algorithm)[0, 7] == 7.5
    assert attention.definition(**given, align=1).output[0, 7] == 7.5
    shift = {"query_lengths": (100, 103), "key_lengths": (103, 100), "align": "lower_right"}
    given = base(5, t=103, block=4, look_forward=3, causal=True, **shift, **more)
    result, pullback = attention.vjp(**given, algorithm=algorithm)
    want, expected = attention.definition.vjp(**given)
    assert_close(result.output, want.output, 100 * EPS)
    gradients, expected = pullback(output=result.output), expected(output=result.output)
    for n, g in expected.items():
        assert_close(gradients[n], g, 1000 * EPS)


@pytest.mark.parametrize("exact", [False, True])
def test_counts_beyond_the_sequence_mean_all_of_it(exact):
    given = base(6, t=20, block=10**9, look_backward=10**9, look_forward=10**9, exact=exact)
    assert_close(attention(**given), scaled_dot_product_attention(**{n: given[n] for n in "qkv"}), 60 * EPS)
    with pytest.raises(ValueError, match="look_backward is 1000000000000000000000000000000"):
        attention(**{**given, "look_backward": 10**30})


# ---------------------------------------------------------------------- others' numbers


def _compare(arguments, arrays, *, tolerance, gradients=None):
    """Output and gradients; ``gradients``: those of q and k after the caller's chain rule."""
    result, pullback = attention.vjp(**arguments)
    assert_close(result.output, arrays["out"], tolerance)
    assert_close(attention.definition(**arguments).output, arrays["out"], tolerance)
    found = pullback(arrays["cot_out"])
    for n in "qkv":
        got = found[n] if gradients is None or n not in gradients else gradients[n](found[n])
        assert_close(got, arrays[f"grad_{n}"], 10 * tolerance)
    return found


LOCAL = {name: (meta, arrays) for name, meta, arrays in cases("local_attention")}


def _options(meta, arrays):
    o = meta["options"]
    found = {"block": o["window_size"], "exact": o["exact_windowsize"], "causal": o["causal"]}
    found |= {n: o[n] for n in ("look_backward", "look_forward")}
    if o["scale"]:
        found["scale"] = o["scale"]
    if "in_mask" in arrays:
        found["mask"] = arrays["in_mask"][:, None, None, :]
    return {**{n: arrays[f"in_{n}"] for n in "qkv"}, **found}


@pytest.mark.parametrize(
    "name",
    [
        n
        for n, (m, a) in LOCAL.items()
        if not (m["options"]["shared_qk"] or m["options"]["rotary_dim"] or "in_attn_bias" in a)
    ],
)
def test_stored_cases_of_local_attention(name):
    meta, arrays = LOCAL[name]
    _compare(_options(meta, arrays), arrays, tolerance=1e-10)


@pytest.mark.parametrize("name", [n for n, (m, _) in LOCAL.items() if m["options"]["shared_qk"]])
def test_stored_cases_with_shared_keys(name):
    """There the keys have norm 1, and a logit of -5e4 makes oneself the last resort."""
    meta, arrays = LOCAL[name]
    arguments = _options(meta, arrays)
    k, t = arguments["k"], np.arange(arguments["k"].shape[-2])
    norm = np.linalg.norm(k, axis=-1, keepdims=True)
    arguments |= {"k": k / norm, "bias": np.where(t[:, None] == t, -5e4, 0.0)}
    back = {"k": lambda d: (d - k / norm * (k / norm * d).sum(-1, keepdims=True)) / norm}
    _compare(arguments, arrays, tolerance=1e-10, gradients=back)


def test_stored_case_with_a_bias_for_places_in_a_block():
    meta, arrays = LOCAL["attn_bias"]
    arguments = _options(meta, arrays)
    w, t = arguments["block"], np.arange(arguments["q"].shape[-2])
    place = t - (t[:, None] // w - arguments["look_backward"]) * w
    inside = (place >= 0) & (place < arrays["in_attn_bias"].shape[-1])
    index = (slice(None), np.broadcast_to(t[:, None] % w, place.shape), np.where(inside, place, 0))
    arguments["bias"] = np.where(inside, arrays["in_attn_bias"][index], 0.0)
    gradients = _compare(arguments, arrays, tolerance=1e-10)
    d = np.zeros_like(arrays["in_attn_bias"])
    np.add.at(d, index, np.where(inside, gradients["bias"], 0.0))
    assert_close(d, arrays["grad_attn_bias"], 1e-9)


@pytest.mark.parametrize("name", [n for n, (m, _) in LOCAL.items() if m["options"]["rotary_dim"]])
def test_stored_cases_with_rotary_positions(name):
    """There the angles are float32: 1e-6.  Where queries may look ahead, theirs run ahead of the keys' by one window."""
    meta, arrays = LOCAL[name]
    o, arguments = meta["options"], _options(meta, arrays)
    t, d = np.arange(arguments["q"].shape[-2]), o["rotary_dim"]
    ahead = 0
    if meta.get("quirk"):
        assert "shifted by one window" in meta["quirk"]
        ahead = o["window_size"]
    turned = {}
    for n, places in (("q", t + ahead), ("k", t)):
        factor = 1.0
        if o["xpos"]:
            power = (t / o["xpos_scale_base"])[:, None] * (1 if n == "q" else -1)
            factor = np.tile(((np.arange(0, d, 2) + 0.4 * d) / (1.4 * d)) ** power, 2)
        result, back = positions.rotary.vjp(x=arguments[n], positions=places, base=10000.0, layout="half")
        arguments[n] = np.asarray(result.output) * factor
        turned[n] = lambda g, back=back, factor=factor: back(output=np.asarray(g) * factor)["x"]
    _compare(arguments, arrays, tolerance=1e-6, gradients=turned)


@pytest.mark.parametrize("name", [c for c in cases("hf_reformer") if c[0].startswith("local")], ids=lambda c: c[0])
def test_stored_cases_of_reformer_local_attention(name):
    _, meta, arrays = name
    o = meta["options"]
    keep = arrays.get("in_attention_mask")
    arguments = {**{n: arrays[f"in_{n}"] for n in "qkv"}, "block": o["chunk_length"], "causal": o["causal"]}
    arguments |= {"look_backward": o["chunks_before"], "look_forward": o["chunks_after"]}
    if keep is not None:
        arguments["mask"] = keep.astype(bool)[:, None, None]
    tolerance = 1e-10 if arrays["out"].dtype == np.float64 else 2e-5
    if not meta.get("quirk"):
        _compare(arguments, arrays, tolerance=tolerance)
        return
    # it wraps around: that is the mistake of that name here, gradients included
    assert "wrap" in meta["quirk"]
    wrapped = next(m for m in attention.mutations if m.class_ == "local_wrap")
    assert_close(wrapped.forward(arguments).output, arrays["out"], tolerance)
    gradients = wrapped.gradients(arguments, {"output": arrays["cot_out"]})
    for n in "qkv":
        assert_close(gradients[n], arrays[f"grad_{n}"], 10 * tolerance)
    own = attention(**arguments)
    first = slice(0, o["chunk_length"])
    assert np.abs(own[..., first, :] - arrays["out"][..., first, :]).max() > 1e-3
    assert_close(own[..., o["chunk_length"] :, :], arrays["out"][..., o["chunk_length"] :, :], tolerance)


def test_stored_case_of_fast_transformers():
    """An even context of c keys begins c / 2 before the query: a window, not one of blocks."""
    for _, meta, arrays in cases("fast_transformers"):
        if "local_context" not in meta["options"]:
            continue
        c = meta["options"]["local_context"]
        arguments = {**{n: arrays[f"in_{n}"] for n in "qkv"}, "window": (None, c - c // 2 - 1), "align": "upper_left"}
        arguments |= {"block": c // 2, "exact": True, "look_forward": 1}
        if "in_key_lengths" in arrays:
            arguments["key_lengths"] = arrays["in_key_lengths"]
        tolerance = 1e-10 if arrays["out"].dtype == np.float64 else 2e-5
        _compare(arguments, arrays, tolerance=tolerance)


# ---------------------------------------------------------------------- bad input

BAD = {
    "block_0": ({"block": 0}, ValueError, "block is 0: expected at least 1"),
    "block_float": ({"block": 2.5}, TypeError, "block is 2.5: expected an integer"),
    "backward": ({"look_backward": -1}, ValueError, "look_backward is -1: expected at least 0"),
    "forward": ({"look_forward": -1}, ValueError, "look_forward is -1: expected at least 0"),
    "exact": ({"exact": 1}, TypeError, "exact is 1: expected True or False"),
    "lengths": ({"q": np.zeros((B, H, 3, D))}, ValueError, "as many queries as keys"),
    "heads": ({"k": np.zeros((B, 2, T, D)), "v": np.zeros((B, 2, T, E))}, ValueError, "3 is not a multiple of 2"),
    "unknown": ({"blocks": 3}, TypeError, "did you mean 'block'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        attention.forward(**{**base(), **change})


@pytest.mark.parametrize("sizes", [{"b": 0}, {"t": 0}, {"t": 1}, {"e": 0}, {"d": 0}])
def test_empty_axes(sizes):
    arguments = base(**sizes)
    for algorithm in ("auto", "whole", "tiled"):
        result, pullback = attention.vjp(**arguments, algorithm=algorithm)
        assert result.output.shape == (*arguments["q"].shape[:-1], arguments["v"].shape[-1])
        assert all(pullback(result.output)[n].shape == arguments[n].shape for n in "qkv")
