"""The Numba-CUDA kernel on the simulator.  Run with NUMBA_ENABLE_CUDASIM=1, which must be set before numba is imported."""

import os

import numpy as np
import pytest
from support import assert_close

import refattn as ra
from refattn import backends

simulated = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
pytestmark = pytest.mark.skipif(not simulated, reason="needs NUMBA_ENABLE_CUDASIM=1 (make test runs this file so)")


def arrays(dtype, b=2, h=2, g=1, q=33, k=35, d=3, e=2):  # one row and three keys beyond a tile of 32
    r = np.random.default_rng(0)
    shapes = ((b, h, q, d), (b, g, k, d), (b, g, k, e))
    return [r.standard_normal(s).astype(dtype) for s in shapes]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "align": "lower_right"},
        {"causal": True, "align": -3},
        {"window": (4, 2), "align": 3, "key_lengths": [35, 20]},
        {"key_lengths": [0, 33], "query_lengths": [33, 5], "sinks": np.array([0.5, -1.0])},
        {"head_map": "tile", "scale": 0.9},
    ],
    ids=str,
)
def test_kernel_equals_numpy(options):
    dtype = np.float32
    q, k, v = arrays(dtype)
    if "sinks" in options:
        options = {**options, "sinks": options["sinks"].astype(dtype)}
    got = ra.scaled_dot_product_attention.forward(q, k, v, backend="numba_cuda", **options)
    want = ra.scaled_dot_product_attention.forward(q, k, v, **options)
    # up to 35 sequential additions of terms of order 1
    assert_close(got.output, want.output, 60 * np.finfo(dtype).eps)
    assert_close(got.lse, want.lse, 60 * np.finfo(dtype).eps)


def test_weights_at_large_logits():
    q, k = np.ones((1, 1, 1), np.float32), np.full((1, 40, 1), 1e4, np.float32)  # more than a tile of equal logits
    v = np.arange(40, dtype=np.float32).reshape(1, 40, 1)
    result, pullback = ra.scaled_dot_product_attention.vjp(q, k, v, scale=1.0, backend="numba_cuda")
    assert result.output[0, 0, 0] == 19.5
    assert_close(pullback(np.ones_like(result.output))["v"], np.full(v.shape, 1 / 40), 1e-7)


def test_gradient_and_refusals():
    q, k, v = arrays(np.float64)
    result, pullback = ra.scaled_dot_product_attention.vjp(q, k, v, backend="numba_cuda", causal=True, align=2)
    want, want_back = ra.scaled_dot_product_attention.vjp(q, k, v, causal=True, align=2)
    for name, g in want_back(np.ones_like(want.output)).items():
        assert_close(pullback(np.ones_like(result.output))[name], g, 1e-13)
    with pytest.raises(ValueError, match="does not serve this call: it has no score terms"):
        ra.scaled_dot_product_attention(q, k, v, softcap=2.0, backend="numba_cuda")
    wide = np.zeros((1, 1, 2, 200))
    with pytest.raises(ValueError, match="hold 128 channels"):
        ra.scaled_dot_product_attention(wide, wide, wide, backend="numba_cuda")


def test_poison_stays_behind_the_edge():
    q, k, v = arrays(np.float64)
    clean = ra.scaled_dot_product_attention(q, k, v, backend="numba_cuda", causal=True, align=0)
    k[..., 33:, :], v[..., 33:, :] = np.nan, np.nan
    assert np.array_equal(ra.scaled_dot_product_attention(q, k, v, backend="numba_cuda", causal=True, align=0), clean)


def test_capabilities_name_it():
    assert {c.name: c.usable for c in backends.capabilities()}["numba_cuda"]
