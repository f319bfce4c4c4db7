"""sinkhorn and sinkhorn_attention: the operator, gradients, definition, causal, stored cases, counts, mistakes."""

import numpy as np
import pytest
from contract.cases.sinkhorn import arguments
from support import assert_close, assert_gradients, cases

from refattn.attention.local import local_attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention as dense
from refattn.attention.sinkhorn import sinkhorn
from refattn.attention.sinkhorn import sinkhorn_attention as attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


# ---------------------------------------------------------------------- the operator


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("iterations", [0, 1, 5])
def test_operator_gradients(iterations, causal):
    scores = rng(1).standard_normal((2, 4, 4))
    given = {"scores": scores, "iterations": iterations, "causal": causal}
    assert_gradients(sinkhorn, given, rng(2))
    scores[0, 1, 0] = scores[1, 2, 3] = -np.inf
    result, pullback = sinkhorn.vjp(**given)
    assert result.output[0, 1, 0] == result.output[1, 2, 3] == 0
    gradient = pullback(np.ones((2, 4, 4)))["scores"]
    assert np.isfinite(gradient).all()
    assert gradient[0, 1, 0] == gradient[1, 2, 3] == 0


def test_operator_makes_rows_and_columns_sum_to_one():
    scores = 3 * rng(3).standard_normal((2, 6, 6))
    once, often = (sinkhorn(scores, iterations=n) for n in (1, 300))
    assert_close(once.sum(-2), np.ones((2, 6)), 10 * EPS)
    assert np.abs(once.sum(-1) - 1).max() > 1e-2
    assert_close(often.sum(-1), np.ones((2, 6)), 1e-9)
    matrix = np.exp(scores)  # the same by dividing, without logarithms
    for _ in range(7):
        matrix = matrix / matrix.sum(-1, keepdims=True)
        matrix = matrix / matrix.sum(-2, keepdims=True)
    assert_close(sinkhorn(scores, iterations=7), matrix, 100 * EPS)


def test_operator_with_scores_of_any_size():
    scores = rng(4).standard_normal((5, 5))
    assert_close(sinkhorn(scores - 1e4, iterations=3), sinkhorn(scores, iterations=3), 1e-11)  # 1e4 eps in the scores
    found = sinkhorn(1e5 * np.eye(5), iterations=2)
    assert_close(found, np.eye(5), 10 * EPS)
    assert sinkhorn(rng(4).standard_normal((2, 3, 5)), iterations=2).shape == (2, 3, 5)
    assert sinkhorn(np.zeros((0, 3, 3)), iterations=2).shape == (0, 3, 3)


def test_operator_causal_looks_at_no_later_row():
    scores = rng(5).standard_normal((6, 6))
    found = sinkhorn(scores, iterations=4, causal=True)
    assert np.array_equal(found, np.tril(found, -1))
    assert (found[1:, 0] > 0).all()
    moved = scores.copy()
    moved[4:] += 3 * rng(6).standard_normal((2, 6))
    later = sinkhorn(moved, iterations=4, causal=True)
    assert np.array_equal(later[:4], found[:4])
    assert np.abs(later[4:] - found[4:]).max() > 1e-3


@pytest.mark.parametrize(
    "name, meta, arrays",
    [c for c in cases("sinkhorn") if c[0].startswith("sorting")],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_stored_cases_of_the_operator(name, meta, arrays):
    result, pullback = sinkhorn.vjp(scores=arrays["in_r"], iterations=meta["options"]["n_iters"])
    assert_close(result.output, arrays["out"], 1e-10)
    assert_close(pullback(arrays["cot_out"])["scores"], arrays["grad_r"], 1e-9)


# ---------------------------------------------------------------------- attention


def test_a_hard_permutation_moves_whole_blocks():
    given = arguments("no_noise", 3, t=8)
    order = np.array([2, 0, 3, 1])  # place u gets block order[u]
    given["sort_logits"] = np.broadcast_to(np.where(order[:, None] == np.arange(4), 0.0, -1e4), (2, 2, 4, 4)).copy()
    seen = (np.arange(4) == np.arange(4)[:, None]) | (order[:, None] == np.arange(4))
    mask = np.kron(seen, np.ones((2, 2), bool))
    assert_close(attention(**given), dense(given["q"], given["k"], given["v"], mask=mask), 100 * EPS)


def test_causal_sees_no_future():
    given = arguments("causal", 4, t=12, block=3)
    moved = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in given.items()}
    for n in "kv":
        moved[n][..., 7:, :] += 1.0
    moved["sort_logits"][..., 3:, :] += rng(1).standard_normal((1, 4))
    before, after = attention(**given), attention(**moved)
    assert np.array_equal(before[..., :7, :], after[..., :7, :])
    assert np.abs(before[..., 7:, :] - after[..., 7:, :]).min() > 0
    qkv = {n: given[n] for n in "qkv"}
    local = local_attention(**qkv, block=3, look_backward=0, causal=True, scale=0.7)
    assert_close(before[..., :3, :], local[..., :3, :], 50 * EPS)  # place 0 has no sorted block


def test_nan_reaches_only_those_who_see_it():
    given = arguments("causal", 5)
    want, back = attention.vjp(**given)
    for name in "kv":
        dirty = {**given, name: given[name].copy()}
        dirty[name][..., 4, :] = np.nan
        result, pullback = attention.vjp(**dirty)
        assert np.array_equal(result.output[..., :4, :], want.output[..., :4, :])
        d = np.ones_like(want.output)
        assert np.array_equal(pullback(d)["q"][..., :4, :], back(d)["q"][..., :4, :])


def test_visible_pairs_under_causal():
    t, block, n = 12, 3, 4
    pairs = sum(block * (u > 0) + c + 1 for u in range(n) for c in range(block)) + n * (n - 1) // 2 * block
    assert attention.cost(t=t, block=block, d=1, e=0, causal=True).multiplies == pairs


def test_stored_case_with_gumbel_noise():
    """There the sort logits are ln(relu(mean q . mean k) + eps): the chain rule goes through them."""
    found = [c for c in cases("sinkhorn") if c[0].startswith("attention")]
    assert found
    for _, meta, arrays in found:
        o, (q, k, v) = meta["options"], (arrays["in_" + n] for n in "qkv")
        b, h, t, d = q.shape
        block, eps = o["bucket_size"], 1e-6
        n = t // block
        pooled_q, pooled_k = (x.reshape(b, h, n, block, d).mean(-2) for x in (q, k))
        r = d**-0.5 * pooled_q @ pooled_k.swapaxes(-1, -2)
        u = arrays["in_gumbel_uniform"].reshape(b, h, n, n)
        given = {"q": q, "k": k, "v": v, "block": block, "noise": -np.log(-np.log(u + eps) + eps)}
        given.update(
            sort_logits=np.log(np.maximum(r, 0) + eps), temperature=o["temperature"], iterations=o["sinkhorn_iter"]
        )
        result, pullback = attention.vjp(**given)
        assert_close(result.output, arrays["out"], 1e-9)
        assert_close(attention.definition(**given).output, arrays["out"], 1e-9)
        g = pullback(arrays["cot_out"])
        d_r = np.where(r > 0, g["sort_logits"] / (np.maximum(r, 0) + eps), 0) * d**-0.5

        def spread(x, block=block):
            return np.repeat(x / block, block, axis=-2)

        assert_close(g["q"] + spread(d_r @ pooled_k), arrays["grad_q"], 1e-8)
        assert_close(g["k"] + spread(d_r.swapaxes(-1, -2) @ pooled_q), arrays["grad_k"], 1e-8)
        assert_close(g["v"], arrays["grad_v"], 1e-8)


BAD = {
    "length": ({"block": 4}, ValueError, "expected a length of 3 blocks of 4, which is 12"),
    "block": ({"block": 0}, ValueError, "block is 0: expected at least 1"),
    "square": ({"sort_logits": np.zeros((2, 2, 3, 4))}, ValueError, "sort_logits has shape (2, 2, 3, 4)"),
    "heads": ({"sort_logits": np.zeros((2, 1, 3, 3))}, ValueError, "its axis 'h'"),
    "temperature": ({"temperature": 0.0}, ValueError, "temperature is 0.0: expected a number above 0"),
    "iterations": ({"iterations": -1}, ValueError, "iterations is -1: expected at least 0"),
    "noise": (
        {"noise": np.zeros((2, 2, 3, 2))},
        ValueError,
        "noise has shape (2, 2, 3, 2): expected one that broadcasts",
    ),
    "causal": ({"causal": 1}, TypeError, "causal is 1: expected True or False"),
    "scale": ({"scale": float("nan")}, ValueError, "scale is nan"),
    "mask": ({"mask": np.ones((6, 6), bool)}, TypeError, "has no option 'mask'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind) as caught:
        attention.forward(**{**arguments(), **change})
    assert message in str(caught.value)


def test_bad_input_of_the_operator():
    with pytest.raises(ValueError, match="scores has shape"):
        sinkhorn(np.zeros(3), iterations=1)
    with pytest.raises(ValueError, match="as many places as blocks"):
        sinkhorn(np.zeros((3, 4)), iterations=1, causal=True)
