"""Weights at large logits: (maximum, sum) is carried through merges, the backward and kept weights, never a rounded lse.

The numbers are exact: logits of equal size give weights 1/2, 1/3 ... whatever their size.
"""

import numpy as np
import pytest

import refattn as ra
from refattn.normalization import Partial, lse_of, merged, partial_of_lse

attention = ra.scaled_dot_product_attention


def equal_logits(size, keys, dtype):
    """One query, ``keys`` keys, all logits ``size``; values 0, 1, 2 ..."""
    q, k = np.ones((1, 1, 1), dtype), np.full((1, keys, 1), size, dtype)
    return q, k, np.arange(keys, dtype=dtype).reshape(1, keys, 1)


@pytest.mark.parametrize(
    "size, keys, dtype",
    [
        (1e4, 2, "f4"),
        (-1e4, 7, "f4"),
        (-1e8, 7, "f4"),
        (6e4, 3, "f2"),
        (1e16, 2, "f8"),
        (-1e16, 4, "f8"),
        (1e30, 5, "f4"),
    ],
)
@pytest.mark.parametrize("algorithm", ["whole", "tiled"])
def test_equal_logits_of_any_size_have_equal_weights(size, keys, dtype, algorithm):
    q, k, v = equal_logits(size, keys, dtype)
    result, pullback = attention.vjp(q, k, v, scale=1.0, algorithm=algorithm)
    unit = np.finfo(np.float32 if dtype == "f2" else dtype).eps
    mean = (keys - 1) / 2
    assert abs(float(result.output[0, 0, 0]) - mean) <= max(unit * keys, np.finfo(dtype).eps) * mean
    gradients = pullback(np.ones_like(result.output))
    tolerance = keys * np.finfo(dtype).eps
    np.testing.assert_allclose(gradients["v"], np.full(v.shape, 1 / keys), rtol=tolerance, atol=0)
    centred = (np.arange(keys) - mean) / keys  # dS = P (dP - delta), P = 1 / keys, dP = v
    np.testing.assert_allclose(gradients["k"][0, :, 0], centred, rtol=0, atol=tolerance * keys)
    if algorithm == "whole":
        kept = attention.forward(q, k, v, scale=1.0, keep_weights=True)
        np.testing.assert_allclose(kept.weights, np.full((1, 1, keys), 1 / keys), rtol=tolerance, atol=0)


def test_weights_beside_a_sink_of_the_same_size():
    q, k, v = equal_logits(1e4, 3, "f4")
    result, pullback = attention.vjp(q, k, v, scale=1.0, sinks=np.full(1, 1e4, "f4"), keep_weights=True)
    np.testing.assert_allclose(result.weights, np.full((1, 1, 3), 0.25), rtol=4e-7)
    np.testing.assert_allclose(result.output, [[[0.75]]], rtol=4e-7)
    gradients = pullback(np.ones_like(result.output))
    np.testing.assert_allclose(gradients["v"], np.full(v.shape, 0.25), rtol=4e-7)
    np.testing.assert_allclose(gradients["sinks"], [-0.25 * 0.75], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("d_lse", [0.0, 1.0])
def test_gradients_beside_a_sink_that_takes_everything(dtype, d_lse):
    """lse of the keys alone: its weights are 1/2 each however small the keys' share of all weight is."""
    x = np.ones((1, 2, 1), dtype)
    k = np.array([[[-1e3], [-1e3]]], dtype)
    result, pullback = attention.vjp(x, k, x, sinks=np.zeros(1, dtype), lse_includes_sinks=False)
    np.testing.assert_allclose(result.lse, np.full((1, 2), -1e3 + np.log(2)), rtol=1e-6)
    gradients = pullback(output=x, lse=np.full((1, 2), d_lse, dtype))
    np.testing.assert_allclose(gradients["k"], np.full((1, 2, 1), d_lse), rtol=1e-6)  # two rows x 1/2
    np.testing.assert_allclose(gradients["q"], np.full((1, 2, 1), -1e3 * d_lse), rtol=1e-6)
    assert np.all(gradients["v"] == 0)
    assert np.all(gradients["sinks"] == 0)


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_rows_that_are_cut_into_tiles(backend):
    """Keys of several tiles, half of them at the maximum."""
    keys = 4096
    q, k, v = equal_logits(1e4, keys, "f4")
    k[:, ::2] = 0
    v[:] = (np.arange(keys) % 4 == 1).reshape(1, keys, 1)  # half of the keys that count
    result, pullback = attention.vjp(q, k, v, scale=1.0, backend=backend)
    assert result.output[0, 0, 0] == 0.5
    weights = pullback(np.ones_like(result.output))["v"][0, :, 0]
    assert np.array_equal(weights[1::2], np.full(keys // 2, 2 / keys))
    assert np.all(weights[::2] == 0)


def test_merged_parts_at_large_logits():
    """ra.merge sees rounded lses; what is merged inside the library keeps its digits."""
    parts = [Partial(np.full((1, 1), x, "f4"), np.full(1, 1e4, "f4"), np.full(1, n, "f4")) for x, n in ((3, 1), (0, 2))]
    whole = merged(*parts)
    assert whole.output[0, 0] == 1
    assert (whole.maximum[0], whole.row_sum[0]) == (1e4, 3)
    assert lse_of(whole.maximum, whole.row_sum)[0] == np.float32(1e4 + np.log(3))


def test_a_part_that_sees_nothing_leaves_the_others_bit_for_bit():
    r = np.random.default_rng(0)
    part = Partial(r.standard_normal((3, 4)), r.standard_normal(3), 1 + r.random(3))
    empty = Partial(np.full((3, 4), np.nan), np.full(3, -np.inf), np.zeros(3))
    for order in ((part, empty), (empty, part)):
        with np.errstate(invalid="ignore"):
            assert all(np.array_equal(a, b) for a, b in zip(merged(*order), part, strict=True))
    nothing = merged(empty, empty)
    assert (nothing.output == 0).all()
    assert (nothing.row_sum == 0).all()


def test_an_lse_from_elsewhere():
    output, lse = np.array([[3.0]]), np.array([[2.5]])
    part = partial_of_lse(output, lse)
    assert lse_of(part.maximum, part.row_sum) == lse
    assert partial_of_lse(output, np.full((1, 1), -np.inf)).row_sum == 0
