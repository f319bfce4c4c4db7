"""Counts of softmax attention: closed forms, and equality with what a counting namespace sees."""

import importlib
import inspect
import time

import numpy as np
import pytest

import refattn as ra
from refattn import patterns, precision
from refattn.records import Counts, Elements, Pass

SIZES = {"b": 2, "h": 4, "g": 2, "q": 300, "k": 500, "d": 8, "e": 5}


def test_closed_form_without_masks():
    b, h, g, q, k, d, e = SIZES.values()
    f = ra.scaled_dot_product_attention.cost(**SIZES, dtype="float32")
    assert f.multiplies == f.computed_multiplies == b * h * q * k * (d + e)
    assert f.bytes_read == 4 * b * (h * q * d + g * k * (d + e))
    assert f.bytes_written == 4 * b * h * q * (e + 1)
    assert f.flops == 2 * f.multiplies + f.elementwise
    back = ra.scaled_dot_product_attention.cost(**SIZES, dtype="float32", direction="backward")
    assert back.multiplies == b * h * q * k * (3 * d + 2 * e)
    both = ra.scaled_dot_product_attention.cost(**SIZES, dtype="float32", direction="both")
    assert both.multiplies == f.multiplies + back.multiplies
    assert both.saved_bytes == f.bytes_read + f.bytes_written
    again = ra.scaled_dot_product_attention.cost(**SIZES, dtype="float32", direction="both", recompute=True)
    assert again.multiplies == both.multiplies + f.multiplies
    assert again.saved_bytes == f.bytes_read
    half = ra.scaled_dot_product_attention.cost(**SIZES, dtype="bfloat16")
    assert half.bytes_read == f.bytes_read // 2


def test_visible_pairs_are_those_of_the_pattern():
    causal = ra.scaled_dot_product_attention.cost(b=1, h=2, q=64, k=64, d=4, causal=True)
    assert causal.multiplies == 2 * (64 * 65 // 2) * 8
    window = ra.scaled_dot_product_attention.cost(b=1, h=1, q=64, k=64, d=4, window=(3, 0))
    assert window.multiplies == (64 * 4 - 6) * 8
    lengths = ra.scaled_dot_product_attention.cost(b=2, h=1, q=64, k=64, d=4, key_lengths=[10, 0])
    assert lengths.multiplies == 64 * 10 * 8


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "align": "lower_right"},
        {"window": (40, 3), "align": 100},
        {"pattern": patterns.prefix(130), "key_lengths": [500, 77]},
    ],
    ids=["plain", "causal", "window", "prefix"],
)
def test_computed_multiplies_equal_the_counted_ones(options):
    arguments = ra.scaled_dot_product_attention.example(np.random.default_rng(0), **SIZES)
    space = precision.counting()
    counted = {n: space.asarray(x) for n, x in arguments.items()}
    result, pullback = ra.scaled_dot_product_attention.vjp(**counted, **options)
    forward = space.counts.multiplies
    assert forward == ra.scaled_dot_product_attention.cost(**SIZES, **options).computed_multiplies
    pullback(result.output)
    want = ra.scaled_dot_product_attention.cost(**SIZES, direction="backward", **options).computed_multiplies
    assert space.counts.multiplies - forward == want


def test_bad_input():
    with pytest.raises(ValueError, match="direction is 'sideways'"):
        ra.scaled_dot_product_attention.cost(**SIZES, direction="sideways")
    with pytest.raises(ValueError, match="q is -1"):
        ra.scaled_dot_product_attention.cost(**{**SIZES, "q": -1})
    with pytest.raises(TypeError, match="cost has no size or option 'cuasal'; did you mean 'causal'"):
        ra.scaled_dot_product_attention.cost(**SIZES, cuasal=True)
    with pytest.raises(TypeError, match="k is 1.5"):
        ra.scaled_dot_product_attention.cost(**{**SIZES, "k": 1.5})


# ---------------------------------------------------------------------- directions, kinds of elements, checkpointing


def test_elements_are_counted_by_what_they_are_stored_in():
    mixed = Elements(storage=3, compute=5, index=7, flag=11)
    assert [mixed.bytes(size) for size in (2, 4, 8)] == [6 + 20 + 56 + 11, 12 + 20 + 56 + 11, 24 + 40 + 56 + 11]
    assert 2 * mixed + mixed == mixed * 3


def test_directions_and_checkpointing_have_one_rule():
    """Checkpointing saves what is read, runs the forward again and then holds its results beside the backward."""
    one, two, three = (Elements(storage=n) for n in (1, 2, 3))
    counts = Counts(
        forward=Pass(multiplies=10, computed=20, elementwise=30, read=one, written=two, peak=three),
        backward=Pass(multiplies=100, elementwise=300, read=three, written=one, peak=5 * one),
        saved=7 * one,
        parameters=9,
    )
    forward, backward, both = (counts.cost(4, d, False) for d in ("forward", "backward", "both"))
    assert (forward.computed_multiplies, backward.computed_multiplies, both.computed_multiplies) == (20, 100, 120)
    assert (forward.saved_bytes, backward.saved_bytes, both.saved_bytes) == (28, 0, 28)
    assert (forward.peak_bytes, backward.peak_bytes, both.peak_bytes) == (12, 20, 20)
    assert {x.parameters for x in (forward, backward, both)} == {9}
    forward, backward, both = (counts.cost(4, d, True) for d in ("forward", "backward", "both"))
    assert (forward.saved_bytes, backward.saved_bytes, both.saved_bytes) == (4, 0, 4)
    assert (backward.multiplies, both.multiplies) == (110, 120)
    assert backward.peak_bytes == both.peak_bytes == 4 * (2 + 5)


N = 10**6
MILLION = {
    "adaptive_span": {"q": N, "k": 2 * N, "span": np.linspace(10, 4000, 8)},
    "bigbird": {"t": N, "block": 64, "r": 3},
    "compressive": {"q": N, "k": N, "n": N // 4, "m": 512},
    "delta_rule": {"t": N, "g": 8},
    "etc": {"t": N, "n": 512, "radius": 84, "p": 25, "clip": 12},
    "forgetting": {"q": N, "k": N},
    "gated_linear": {"t": N},
    "linear": {"q": N, "k": N, "causal": True, "form": "recurrent"},
    "linformer": {"q": N, "k": N, "n": 256},
    "local": {"t": N, "block": 64, "causal": True},
    "longformer": {"t": N, "window": (256, 256), "n": 4},
    "lsh": {"t": N, "hashes": 4, "before": 10**9, "chunk": 1},
    "multi_head": {"q": N, "k": N, "causal": True, "extra_key": True},
    "nystrom": {"q": N, "k": N, "landmarks": 64},
    "performer": {"q": N, "k": N, "n": 256, "causal": True},
    "routing": {"t": N, "c": 1000},
    "rwkv7": {"t": N},
    "sinkhorn": {"t": N, "block": 1000},
    "sparse_transformer": {"t": N, "stride": 1000},
    "ssd": {"t": N, "g": 2},
    "topk": {"q": N, "k": N, "count": 32, "causal": True},
    "transformer_xl": {"q": N, "k": 2 * N},
}


@pytest.mark.parametrize("name", ra.mechanisms)
def test_a_million_tokens_are_counted_in_a_tenth_of_a_second(name):
    """The slowest takes 0.05 s on a busy machine; walking the tiles of a million tokens took 15."""
    sizes = {"b": 2, "h": 8, "d": 64, **MILLION.get(name.removesuffix("_attention"), {"q": N, "k": N, "causal": True})}
    if name in ("synthesizer_attention", "efficient_attention"):
        sizes = {"b": 2, "h": 8, "q": N, "k": N, "e" if name.startswith("s") else "d": 64}
    best = np.inf
    for _ in range(3):
        start = time.perf_counter()
        cost = ra.mechanisms[name].cost(**sizes, direction="both")
        best = min(best, time.perf_counter() - start)
    assert cost.computed_multiplies >= cost.multiplies > N
    assert best < 0.1


LONG = {
    "scaled_dot_product": [
        {},
        {"causal": True, "g": 2},
        {"window": (100, 3)},
        {"causal": True, "align": 0, "key_lengths": [4091, 2048]},
        {"pattern": patterns.prefix(100) | patterns.causal() & patterns.window(50, 0)},
        {"pattern": ~patterns.window(300, 300)},
    ],
    "multi_head": [{"extra_key": True, "causal": True}],
    "talking_heads": [{"causal": True}, {"window": (40, 0)}],
    "transformer_xl": [{}],
    "topk": [{"count": 9, "causal": True}],
    "local": [{"block": 64}, {"block": 600}, {"block": 64, "look_forward": 1, "exact": True}],
    "sparse_transformer": [
        {"stride": 64},
        {"stride": 1000, "heads": "merged"},
        {"stride": 64, "pattern": "fixed", "summary": 8},
        {"stride": 700, "pattern": "fixed", "summary": 8, "heads": "merged"},
    ],
    "longformer": [{"window": (64, 64), "n": 5}],
    "etc": [{"n": 64, "radius": 84}],
}


@pytest.mark.parametrize("name, options", [(n, x) for n, many in LONG.items() for x in many])
def test_long_sequences_are_counted_as_the_walk_counts_them(name, options, monkeypatch):
    """Visible pairs exactly; pairs of blocks by rows of tiles, within a tenth where rows see several runs of keys."""
    mechanism = ra.mechanisms[f"{name}_attention"]
    where = {"t": 4096} if "t" in inspect.signature(mechanism._cost).parameters else {"q": 4096, "k": 4096}
    walked = mechanism.cost(b=2, h=4, d=32, **where, **options)
    for module in ("refattn.cost", "refattn.cost.softmax"):
        monkeypatch.setattr(importlib.import_module(module), "WALKED", 1 << 20)
    counted = mechanism.cost(b=2, h=4, d=32, **where, **options)
    assert counted.multiplies == walked.multiplies
    assert counted.computed_multiplies == pytest.approx(walked.computed_multiplies, rel=0.1)


@pytest.mark.parametrize("ends", [(1, 1), (0, 0), (2, 1), (0, 3)])
@pytest.mark.parametrize("t", [64, 127, 513])
def test_bigbird_is_counted_without_its_layout(t, ends, monkeypatch):
    bigbird = importlib.import_module("refattn.attention.bigbird")
    for block, near in ((1, 0), (3, 1), (16, 2), (16, 40)):
        sizes = {"t": t, "h": 2, "d": 3, "block": block, "window_blocks": near, "global_blocks": ends}
        monkeypatch.setattr(bigbird, "_COUNTED", 10**6)
        want = ra.bigbird_attention.cost(**sizes)
        monkeypatch.setattr(bigbird, "_COUNTED", 0)
        assert ra.bigbird_attention.cost(**sizes).multiplies == want.multiplies
        if t % block == 0 or ends[1]:  # else a drawn block may be the short one
            monkeypatch.setattr(bigbird, "_COUNTED", 10**6)
            want = ra.bigbird_attention.cost(**sizes, r=2)
            monkeypatch.setattr(bigbird, "_COUNTED", 0)
            assert ra.bigbird_attention.cost(**sizes, r=2).multiplies == want.multiplies


def test_bigbird_is_counted_within_lengths(monkeypatch):
    bigbird = importlib.import_module("refattn.attention.bigbird")
    sizes = {"t": 130, "b": 3, "h": 2, "d": 3, "block": 16, "key_lengths": [130, 0, 41], "query_lengths": [130, 9, 100]}
    drawn = np.random.default_rng(0).integers(0, 9, (2, 9, 2))
    for more in (
        {},
        {"random_blocks": drawn},
        {"window_blocks": 3, "global_blocks": (0, 0)},
        {"global_blocks": (4, 6)},
    ):
        monkeypatch.setattr(bigbird, "_COUNTED", 10**6)
        want = ra.bigbird_attention.cost(**sizes, **more).multiplies
        monkeypatch.setattr(bigbird, "_COUNTED", 0)
        assert ra.bigbird_attention.cost(**sizes, **more).multiplies == want


def test_spans_of_heads_are_counted_each():
    sizes = {"q": 512, "k": 512 + 4096, "d": 16, "max_span": 4096}
    one, other = (ra.adaptive_span_attention.cost(h=1, **sizes, span=s).multiplies for s in (100, 300))
    both = ra.adaptive_span_attention.cost(h=2, **sizes, span=[100, 300])
    assert both.multiplies == one + other
    assert both.computed_multiplies == ra.adaptive_span_attention.cost(h=2, **sizes, span=300).computed_multiplies
    with pytest.raises(ValueError, match="span has 2 entries: expected a number, or one for each of the 3 heads"):
        ra.adaptive_span_attention.cost(h=3, **sizes, span=[100, 300])


def test_etc_takes_its_own_clip():
    counted = [ra.etc_attention.cost(t=40, n=3, d=3, radius=4, p=7, **x) for x in ({}, {"clip": 3})]
    assert counted[0] == counted[1]
    with pytest.raises(ValueError, match="clip is 4, so that distances have 9 labels: p is 7"):
        ra.etc_attention.cost(t=40, n=3, d=3, radius=4, p=7, clip=4)


@pytest.mark.parametrize("name", ra.mechanisms)
def test_errors_of_counts_name_what_is_wrong(name):
    mechanism = ra.mechanisms[name]
    with pytest.raises(TypeError, match=f"{name}.cost: .*is missing"):
        mechanism.cost()
    with pytest.raises(TypeError, match="has no size or option 'hats'"):
        mechanism.cost(hats=3)
    with pytest.raises(TypeError, match="recompute is 'no'"):
        mechanism.cost(recompute="no")
    with pytest.raises(TypeError, match="dtype is 'floaty'"):
        mechanism.cost(dtype="floaty")
