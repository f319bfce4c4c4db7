"""performer_attention: gradients, definition, the law of its error, memory of the causal form, stored cases, counts, mistakes."""

import math

import numpy as np
import pytest
from contract.cases.performer import arguments
from support import (
    assert_close,
    cases,
    random_cotangents,
)

from refattn import precision
from refattn.attention.performer import orthogonal_features
from refattn.attention.performer import performer_attention as attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def test_pieces_change_nothing():
    given = attention.example(rng(6), b=1, h=2, q=150, k=150, d=6, e=5, n=12, causal=True, key_sum_eps=0.1)
    want, back = attention.vjp(**given, chunk=150)
    cotangents = random_cotangents(attention, want, rng(6))
    for chunk in (1, 16, 64, 200):
        got, pullback = attention.vjp(**given, chunk=chunk)
        assert_close(got.output, want.output, 150 * EPS)
        for n, g in pullback(**cotangents).items():
            assert_close(g, back(**cotangents)[n], 2000 * EPS)


def test_causal_memory_is_linear_in_the_length():
    peaks = []
    for length in (256, 1024):
        counter = precision.counting()
        given = attention.example(rng(7), b=1, h=1, q=length, k=length, d=4, e=4, n=8, causal=True, chunk=16)
        moved = {n: counter.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
        result, pullback = attention.vjp(**moved)
        pullback(counter.asarray(np.ones(result.output.shape)))
        peaks.append(counter.counts.peak_bytes)
    assert peaks[1] < 4.1 * peaks[0]


@pytest.mark.parametrize("orthogonal", [True, False])
def test_error_falls_with_the_root_of_the_features(orthogonal):
    """The relative variance of one weight is (exp(|x + y|^2) - 1) / n: small norms, or the law begins beyond reach."""
    draw = rng(8)
    d = 8
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in draw.standard_normal((2, 1, 12, d)))
    q, k = (0.5 * d**0.25 * x for x in (q, k))  # norm 0.5 after the scaling
    v = draw.standard_normal((1, 12, 3))
    want = scaled_dot_product_attention(q, k, v)
    counts, errors = (32, 128, 512, 2048), []
    for n in counts:
        tables = [orthogonal_features(draw, n, d) if orthogonal else draw.standard_normal((n, d)) for _ in range(40)]
        errors.append(math.sqrt(np.mean([(attention(q, k, v, features=w, eps=0.0) - want) ** 2 for w in tables])))
    slope = np.polyfit(np.log(counts), np.log(errors), 1)[0]
    assert -0.6 < slope < -0.4  # each error is known to 1 / sqrt(2 * 40) and better: the slope to 0.03
    assert errors[-1] < 0.02


def test_features_have_the_lengths_of_normal_vectors_and_right_angles():
    w = orthogonal_features(rng(9), 4000, 5)
    blocks = w.reshape(-1, 5, 5)
    products = np.einsum("bnd,bmd->bnm", blocks, blocks) * (1 - np.eye(5))
    assert np.abs(products).max() < 1e-13
    assert abs(np.mean(np.sum(w**2, 1)) - 5) < 5 * math.sqrt(10 / 4000)  # chi-squared of 5: variance 10
    assert orthogonal_features(rng(9), 3, 8).shape == (3, 8)


def test_the_maximum_cancels_without_eps():
    """Keys far from 0: exp alone would overflow; the quotient does not depend on c."""
    given = arguments(seed=10, eps=0.0)
    given["k"] = given["k"] * 60.0
    given["features"] = given["features"] * 20.0
    output = attention(**given)
    assert np.isfinite(output).all()
    largest = np.abs(given["v"]).max(axis=(-1, -2))
    assert (np.abs(output) <= 1.000001 * largest[..., None, None]).all()


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@pytest.mark.parametrize("name", "kv")
def test_nan_reaches_only_later_rows(kernel, name):
    given = attention.example(rng(12), k=9, causal=True, chunk=4, kernel=kernel)
    if kernel == "softmax":  # key 5 must not be the one that sets c
        given["k"][..., 5, :] = 0.0
    want, back = attention.vjp(**given)
    poisoned = {**given, name: given[name].copy()}
    poisoned[name][..., 5, :] = np.nan
    result, pullback = attention.vjp(**poisoned)
    assert np.array_equal(result.output[..., :5, :], want.output[..., :5, :])
    assert np.isnan(result.output[..., 5:, :]).all()
    cotangents = random_cotangents(attention, want, rng(12))
    assert np.array_equal(pullback(**cotangents)["q"][..., :5, :], back(**cotangents)["q"][..., :5, :])


def test_empty_arrays():
    w = np.ones((2, 4))
    given = {"q": np.zeros((1, 2, 3, 4)), "k": np.zeros((1, 2, 0, 4)), "v": np.zeros((1, 2, 0, 5)), "features": w}
    for kernel in ("softmax", "relu"):
        result, pullback = attention.vjp(**given, kernel=kernel, key_sum_eps=0.1)
        assert np.array_equal(result.output, np.zeros((1, 2, 3, 5)))
        assert np.array_equal(result.output, attention.definition(**given, kernel=kernel).output)
        assert pullback(result.output)["k"].shape == (1, 2, 0, 4)


def test_cost_is_linear_in_the_length():
    counts = [attention.cost(q=t, k=t, d=64, n=256, causal=True).computed_multiplies for t in (1024, 4096)]
    assert counts[1] == 4 * counts[0]


@pytest.mark.parametrize("name, meta, arrays", list(cases("performer")), ids=lambda x: x if isinstance(x, str) else "")
def test_stored_cases(name, meta, arrays):
    given = {
        "q": arrays["in_q"],
        "k": arrays["in_k"],
        "v": arrays["in_v"],
        "features": arrays["in_projection"],
        "chunk": 4,
    }
    given["kernel"] = meta["options"].get("kernel", "softmax")
    if meta["options"]["causal"]:
        given.update(causal=True, key_sum_eps=1e-6)
    result, pullback = attention.vjp(**given)
    assert_close(result.output, arrays["out"], 1e-12)
    assert_close(attention.definition(**given).output, arrays["out"], 1e-12)
    gradients = pullback(arrays["cot_out"])
    for x in "qkv":
        assert_close(gradients[x], arrays["grad_" + x], 1e-12)


# ------------------------------------------------------------------------------------------------ mistakes and bad input

BAD = {
    "unequal": ({"causal": True}, ValueError, "as many queries as keys: q has shape (2, 1, 4, 3)"),
    "kernel": ({"kernel": "elu"}, ValueError, "kernel is 'elu'"),
    "channels": ({"features": np.zeros((4, 2))}, ValueError, "features has shape (4, 2): its axis 'd'"),
    "heads": ({"features": np.zeros((2, 4, 3))}, ValueError, "features has shape (2, 4, 3): expected 2 axes (n d)"),
    "none": ({"features": np.zeros((0, 3))}, ValueError, "features has shape (0, 3): expected at least one row"),
    "eps": ({"eps": float("nan")}, ValueError, "eps is nan"),
    "eps_negative": ({"eps": -1.0}, ValueError, "eps is -1.0: expected at least 0"),
    "sum_eps": ({"key_sum_eps": float("inf")}, ValueError, "key_sum_eps is inf"),
    "chunk": ({"chunk": 0}, ValueError, "chunk is 0: expected at least 1"),
    "mask": ({"mask": np.ones((4, 5), bool)}, TypeError, "has no option 'mask'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind) as caught:
        attention.forward(**{**arguments(), **change})
    assert message in str(caught.value)
