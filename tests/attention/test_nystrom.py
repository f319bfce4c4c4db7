"""nystrom_attention: gradients through the iteration, definition, all landmarks, padding, stored cases, counts, mistakes."""

import numpy as np
import pytest
from contract.cases.nystrom import arguments
from support import assert_close, cases, random_cotangents

from refattn.attention.nystrom import _inverse_backward
from refattn.attention.nystrom import nystrom_attention as attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def test_all_landmarks_are_full_attention_up_to_the_residual_of_the_inverse():
    given = arguments("plain", 6, q=8, k=8, d=4, landmarks=8)
    want, back = scaled_dot_product_attention.vjp(given["q"], given["k"], given["v"])
    logits = given["q"] @ given["k"].swapaxes(-1, -2) / 2
    a = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    # output - A v = (A Z A - A) v: the error is what the residual of the inverse says, for any number of steps
    for iterations in (6, 10):
        z = a.swapaxes(-1, -2) / a.sum(-2).max(-1)[..., None, None]
        for _ in range(iterations):
            y = a @ z
            z = z @ (13 * np.eye(8) - y @ (15 * np.eye(8) - y @ (7 * np.eye(8) - y))) / 4
        output = attention(**{**given, "iterations": iterations})
        assert_close(output - want.output, (a @ z @ a - a) @ given["v"], 1e-11)
    result, pullback = attention.vjp(**{**given, "iterations": 30})
    condition = np.linalg.cond(a).max()
    assert condition < 1e5
    assert_close(result.output, want.output, 64 * condition * EPS)
    cotangents = random_cotangents(attention, result, rng(6))
    for n, g in back(**cotangents).items():
        assert_close(pullback(**cotangents)[n], g, 64 * condition**2 * EPS)


def test_zeros_in_front_count():
    given = arguments("padded", 7)
    long = {
        n: np.concatenate([np.zeros((2, 2, -given[n].shape[-2] % 3, given[n].shape[-1])), given[n]], -2) for n in "qkv"
    }
    assert_close(attention(**given), attention(**long, landmarks=3)[..., 1:, :], 8 * EPS)


def test_batch_scale_couples_the_batch_until_it_has_converged():
    given = arguments("batch", 8)
    alone = {n: x[:1] if isinstance(x, np.ndarray) else x for n, x in given.items()}
    assert np.abs(attention(**given)[:1] - attention(**alone)).max() > 1e-4
    late = {"iterations": 40}
    assert_close(attention(**{**given, **late})[:1], attention(**{**alone, **late}), 1e-9)
    own = {"pinv_scale": "matrix"}
    assert np.array_equal(attention(**{**given, **own})[:1], attention(**{**alone, **own}))


def test_columns_that_share_the_largest_sum_share_its_gradient():
    """Two landmarks, A = [[p, 1 - p], [1 - p, p]]: both columns sum to 1, and moving A[0, 0] up by t makes that 1 + t."""
    a = np.array([[0.7, 0.3], [0.3, 0.7]])
    d_z = np.array([[1.0, 0.0], [0.0, 0.0]])
    got = _inverse_backward(a, [a.T], "matrix", d_z)
    # Z = A^T / c: 1 from the numerator; -A[0,0] / c^2 from c, half of it to each column, alike for its two rows
    assert_close(got, np.array([[1 - 0.35, -0.35], [-0.35, -0.35]]), 4 * EPS)


def test_empty_arrays():
    given = {"q": np.zeros((0, 2, 3, 4)), "k": np.zeros((0, 2, 5, 4)), "v": np.zeros((0, 2, 5, 6))}
    for pinv_scale in ("matrix", "batch"):
        result, pullback = attention.vjp(**given, landmarks=2, pinv_scale=pinv_scale)
        assert result.output.shape == (0, 2, 3, 6)
        assert pullback(result.output)["k"].shape == (0, 2, 5, 4)


def test_cost_is_linear_in_the_length():
    counts = [attention.cost(q=t, k=t, d=64, landmarks=64, iterations=0).multiplies for t in (1024, 2048, 4096)]
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])


@pytest.mark.parametrize("name, meta, arrays", list(cases("nystrom")), ids=lambda x: x if isinstance(x, str) else "")
def test_stored_cases(name, meta, arrays):
    """A module: tokens to heads, attention, and back.  With a mask it zeroes masked tokens and averages over the others."""
    x, h = arrays["in_x"], meta["options"]["heads"]
    b, t, _ = x.shape

    def heads(w):
        return (x @ w.T).reshape(b, t, h, -1).swapaxes(1, 2)

    def joined(y):
        return y.swapaxes(1, 2).reshape(b, t, -1)

    weights = dict(zip("qkv", np.split(arrays["in_to_qkv__weight"], 3), strict=True))
    given = {c: heads(w) for c, w in weights.items()}
    options = {"landmarks": meta["options"]["num_landmarks"], "iterations": meta["options"]["pinv_iterations"]}
    result, pullback = attention.vjp(**given, **options, pinv_scale="batch")
    w_o, b_o = arrays["in_to_out__0__weight"], arrays["in_to_out__0__bias"]
    if "in_mask" in arrays:  # its mask and convolution are another mechanism: the numbers must not agree
        assert np.abs(joined(result.output) @ w_o.T + b_o - arrays["out"]).max() > 1e-2
        return
    assert_close(joined(result.output) @ w_o.T + b_o, arrays["out"], 1e-11)
    assert_close(attention.definition(**given, **options, pinv_scale="batch").output, result.output, 1e-11)
    gradients = pullback((arrays["cot_out"] @ w_o).reshape(b, t, h, -1).swapaxes(1, 2))
    found = np.concatenate([np.einsum("btf,btm->fm", joined(gradients[c]), x) for c in "qkv"])
    assert_close(found, arrays["grad_to_qkv__weight"], 1e-10)
    assert_close(sum(joined(gradients[c]) @ weights[c] for c in "qkv"), arrays["grad_x"], 1e-10)


# ------------------------------------------------------------------------------------------------ mistakes and bad input


BAD = {
    "landmarks_q": ({"landmarks": 7}, ValueError, "landmarks is 7: expected at most the 6 tokens of q (2, 2, 6, 3)"),
    "landmarks_k": (
        {"landmarks": 5, "k": np.zeros((2, 2, 4, 3)), "v": np.zeros((2, 2, 4, 2))},
        ValueError,
        "tokens of k",
    ),
    "none": ({"landmarks": 0}, ValueError, "landmarks is 0: expected at least 1"),
    "half": ({"landmarks": 2.5}, TypeError, "landmarks is 2.5: expected an integer"),
    "iterations": ({"iterations": -1}, ValueError, "iterations is -1: expected at least 0"),
    "scale": ({"pinv_scale": "head"}, ValueError, "pinv_scale is 'head'"),
    "channels": ({"k": np.zeros((2, 2, 6, 4))}, ValueError, "k has shape (2, 2, 6, 4): its axis 'd'"),
    "causal": ({"causal": True}, TypeError, "has no option 'causal'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind) as caught:
        attention.forward(**{**arguments(), **change})
    assert message in str(caught.value)
