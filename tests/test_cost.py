"""Counts of softmax attention: closed forms, and equality with what a counting namespace sees."""

import numpy as np
import pytest

import refattn as ra
from refattn import patterns, precision

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
    with pytest.raises(TypeError, match="'cuasal' is no option of softmax attention; did you mean 'causal'"):
        ra.scaled_dot_product_attention.cost(**SIZES, cuasal=True)
    with pytest.raises(TypeError, match="k is 1.5"):
        ra.scaled_dot_product_attention.cost(**{**SIZES, "k": 1.5})
