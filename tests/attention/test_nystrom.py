"""nystrom_attention: gradients through the iteration, definition, all landmarks, padding, stored cases, counts, mistakes."""

import array_api_strict
import numpy as np
import pytest
from support import assert_adjoint, assert_close, assert_gradients, cases, random_cotangents

from refattn import precision
from refattn.attention.nystrom import _inverse_backward
from refattn.attention.nystrom import nystrom_attention as attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention
from refattn.mistakes.nystrom import Steps

EPS = np.finfo(np.float64).eps
OPTIONS = {
    "plain": {},
    "padded": {"q": 5, "k": 7},
    "two_steps": {"iterations": 2},
    "no_step": {"iterations": 0},
    "batch": {"iterations": 2, "pinv_scale": "batch"},
    "batch_padded": {"iterations": 6, "pinv_scale": "batch", "q": 4, "k": 5},
    "one_landmark": {"landmarks": 1},
}


def rng(seed=0):
    return np.random.default_rng(seed)


def arguments(name="plain", seed=0, **more):
    return attention.example(rng(seed), **{"b": 2, "h": 2, "q": 6, "k": 6, "d": 3, "e": 2, **OPTIONS[name], **more})


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_by_complex_step(name):
    """Six steps multiply rounding by the condition of the inner matrix: hence 1e-11 in place of 1e-13."""
    assert_gradients(attention, arguments(name, d=2), rng(1), tolerance=1e-11)
    assert_adjoint(attention, arguments(name, 1), rng(2), tolerance=1e-11)


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_definition(name):
    given = arguments(name, 3, q=8, k=9)
    assert_close(attention(**given), attention.definition(**given).output, 1e-12)


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_of_the_mistakes_are_right(name):
    given = arguments(name, 4)
    result, pullback = attention.vjp(**given)
    steps = Steps(given)
    assert_close(steps.forward().output, result.output, 1e-12)
    cotangents = random_cotangents(attention, result, rng(4))
    for n, g in steps.backward(cotangents["output"]).items():
        assert_close(g, pullback(**cotangents)[n], 1e-11)


@pytest.mark.parametrize("pinv_scale", ["matrix", "batch"])
def test_leading_axes_broadcast(pinv_scale):
    draw = rng(5)
    q, k, v = (draw.standard_normal((*lead, 2, 5, 3)) for lead in ((3, 1), (2,), (4, 1, 1)))
    given = {"q": q, "k": k, "v": v, "landmarks": 2, "pinv_scale": pinv_scale, "iterations": 2}
    result = attention.forward(**given)
    assert result.output.shape == (4, 3, 2, 2, 5, 3)
    assert_close(result.output, attention.definition(**given).output, 1e-12)
    assert_adjoint(attention, given, rng(5), tolerance=1e-11)


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


@pytest.mark.parametrize("name", OPTIONS)
def test_strict_namespace(name):
    given = arguments(name, 9)
    strict = {n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    want, back = attention.vjp(**given)
    got, back_strict = attention.vjp(**strict)
    cotangents = random_cotangents(attention, want, rng(9))
    assert_close(np.asarray(got.output), want.output, 1e-12)
    for n, g in back_strict(output=array_api_strict.asarray(cotangents["output"])).items():
        assert_close(np.asarray(g), back(**cotangents)[n], 1e-11)


def test_half_precision_is_computed_in_float32():
    given = {n: x.astype(np.float16) if isinstance(x, np.ndarray) else x for n, x in arguments(seed=10).items()}
    output = attention(**given)
    assert output.dtype == np.float16
    assert_close(output, attention.definition(**given).output, 2 * 2.0**-11)


def test_empty_arrays():
    given = {"q": np.zeros((0, 2, 3, 4)), "k": np.zeros((0, 2, 5, 4)), "v": np.zeros((0, 2, 5, 6))}
    for pinv_scale in ("matrix", "batch"):
        result, pullback = attention.vjp(**given, landmarks=2, pinv_scale=pinv_scale)
        assert result.output.shape == (0, 2, 3, 6)
        assert pullback(result.output)["k"].shape == (0, 2, 5, 4)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "sizes", [{"q": 12, "k": 18, "landmarks": 6}, {"q": 13, "k": 17, "landmarks": 5, "iterations": 3}]
)
def test_cost_equals_counted_products(sizes, direction):
    sizes = {"b": 2, "h": 3, "d": 4, "e": 7, **sizes}
    counter = precision.counting()
    given = attention.example(rng(11), **sizes)
    moved = {n: counter.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    result, pullback = attention.vjp(**moved)
    if direction == "backward":
        counter.counts.reset()
        pullback(counter.asarray(np.ones(result.output.shape)))
    assert counter.counts.multiplies == attention.cost(**sizes, direction=direction).computed_multiplies


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


@pytest.mark.parametrize("mutation", attention.mutations, ids=lambda m: m.says.replace(" ", "_"))
def test_mistakes_differ(mutation):
    shown_by = (
        "padded" if "pad" in mutation.class_ else "batch" if "not that of the batch" in mutation.says else "two_steps"
    )
    given = arguments(shown_by, 12)
    result, pullback = attention.vjp(**given)
    cotangents = random_cotangents(attention, result, rng(12))
    right = pullback(**cotangents)
    if mutation.forward is not None:
        assert np.abs(mutation.forward(given).output - result.output).max() > 1e-4
    if mutation.gradients is not None:
        wrong = mutation.gradients(given, cotangents)
        assert set(wrong) == set(right)
        assert max(np.abs(wrong[n] - right[n]).max() for n in wrong) > 1e-4


def test_mistakes_that_do_not_show_say_so():
    given = arguments("one_landmark", 13, b=1, h=1, d=1)
    silent = {m.class_ for m in attention.mutations if m.forward is not None and m.forward(given) is None}
    assert {"nystrom_pad_behind", "nystrom_scale", "nystrom_steps", "nystrom_exact", "no_scale"} <= silent
    d = {"output": np.ones((1, 1, 6, 2))}
    grads = {m.class_ for m in attention.mutations if m.forward is None and m.gradients(given, d) is None}
    assert {"nystrom_scale_grad", "nystrom_inverse_grad"} <= grads


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
