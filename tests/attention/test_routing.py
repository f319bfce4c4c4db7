"""routing_attention: gradients, definition, plain attention in special cases, stored cases, counts, mistakes, bad input."""

import numpy as np
import pytest
from contract.cases.routing import B, C, D, E, H, T, arguments
from support import assert_close, cases

from refattn import backends
from refattn.attention.routing import routing_attention as attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


# ------------------------------------------------------------------------------------------------ special cases


def base(seed=0, *, t=12, c=3, d=4, **options):
    return attention.example(rng(seed), b=2, h=2, t=t, c=c, d=d, e=3, **options)


def test_one_cluster_of_all_tokens_is_full_attention():
    for more in ({}, {"causal": True}, {"k": True, "causal": True}, {"k": True, "normalize": None}):
        given = base(11, c=1, cluster_size=12, average_eps=0.25, **more)
        result, back = attention.vjp(**given)
        q, k = given["q"], given["q"] if given["k"] is None else given["k"]
        if given.get("normalize", "layer") is not None:
            q, k = ((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) for x in (q, k))
        plain, plain_back = scaled_dot_product_attention.vjp(q, k, given["v"], causal=given.get("causal", False))
        assert_close(result.output, plain.output / 1.25, 50 * EPS)
        cotangent = rng(11).standard_normal(result.output.shape)
        assert_close(back(cotangent)["v"], plain_back(cotangent / 1.25)["v"], 50 * EPS)


def test_each_cluster_is_masked_dense_attention_then_the_mean():
    given = base(12, k=True, cluster_size=(4, 6), causal=True, normalize=None, members=True)
    total, count = 0.0, np.zeros((2, 2, 12, 1))
    for n in range(3):
        rows, columns = (np.any(m[..., n, :, None] == np.arange(12), axis=-2) for m in given["members"])
        mask = rows[..., :, None] & columns[..., None, :] & np.tri(12, dtype=bool)
        total = total + scaled_dot_product_attention(given["q"], given["k"], given["v"], mask=mask)
        count += rows[..., None]
    want = np.divide(total, count, out=np.zeros_like(total), where=count > 0)
    assert_close(attention(**given), want, 50 * EPS)


@pytest.mark.parametrize("k", [None, True])
def test_fixed_members_keep_the_future_out_and_chosen_ones_do_not(k):
    given = base(13, t=30, c=5, causal=True, members=True, **({} if k is None else {"k": True}))
    result = attention.forward(**given)
    moved = {n: x.copy() if n in ("q", "k", "v") and x is not None else x for n, x in given.items()}
    for n in ("q", "v") if k is None else ("q", "k", "v"):
        moved[n][..., 17:, :] = rng(14).standard_normal(moved[n][..., 17:, :].shape)
    moved["v"][..., 20:, :] = np.nan
    assert np.array_equal(attention.forward(**moved).output[..., :17, :], result.output[..., :17, :])
    # membership sees the future: without fixed members an early output moves
    moved.pop("members")
    moved["v"] = np.where(np.isnan(moved["v"]), 0.0, moved["v"])
    early = attention.forward(**moved).output[..., :17, :]
    assert np.max(np.abs(early - result.output[..., :17, :])) > 1e-3


def test_causal_by_rank_lets_the_future_in_where_members_differ():
    given = base(15, t=24, c=4, k=True, causal=True, causal_by="rank", members=True)
    late = {**given, "v": given["v"].copy()}
    late["v"][..., 12:, :] += 1.0
    moved = np.abs(attention(**late) - attention(**given))[..., :12, :]
    assert moved.max() > 1e-3
    shared = base(15, t=24, c=4, causal=True, members=True)
    assert_close(attention(**shared, causal_by="rank"), attention(**shared), 0)


def test_tokens_in_no_cluster_give_zero_and_the_order_of_tokens_does_not_matter():
    given = base(16, t=20, c=2, cluster_size=4)
    result = attention.forward(**given)
    taken = np.any(result.members_q[..., None] == np.arange(20), axis=(-3, -2))
    assert np.all(result.output[~taken] == 0)
    assert np.all(np.any(result.output != 0, axis=-1) == taken)
    order = rng(16).permutation(20)
    turned = attention(**{**given, **{n: given[n][..., order, :] for n in "qv"}})
    assert_close(turned, result.output[..., order, :], 50 * EPS)


def test_equal_products_go_to_the_lower_position():
    q = np.zeros((1, 1, 6, 2))
    v = np.arange(6.0).reshape(1, 1, 6, 1)
    result = attention.forward(q, None, v, centroids=np.ones((1, 2, 2)), cluster_size=3)
    assert np.array_equal(result.members_q[0, 0], [[0, 1, 2], [0, 1, 2]])
    assert np.array_equal(result.output[0, 0, :, 0], [1, 1, 1, 0, 0, 0])
    backend = backends.resolve("numpy", np)
    for seed in range(50):
        x = rng(seed).integers(0, 4, (3, 2, 11)).astype(float)
        x[rng(seed).random(x.shape) < 0.1] = np.nan
        for count in (0, 1, 5, 11):
            want = np.sort(np.argsort(-x, axis=-1, stable=True)[..., :count], -1)
            assert np.array_equal(backend.largest(x, count), want)


def test_masked_tokens_reach_nothing():
    keep = rng(17).random((2, 12)) < 0.7
    given = base(17, query_mask=keep, key_mask=keep, causal=True, self_attention="last_resort")
    want, back = attention.vjp(**given)
    poisoned = {**given, "q": given["q"].copy(), "v": given["v"].copy()}
    poisoned["q"][~keep[:, None] & np.ones((2, 2, 12), bool)] = np.nan
    poisoned["v"][~keep[:, None] & np.ones((2, 2, 12), bool)] = np.inf
    for members in (None, (want.members_q, want.members_k), 2 * (np.broadcast_to(np.arange(12), (2, 2, 3, 12)),)):
        clean, back = attention.vjp(**given, members=members)
        result, pullback = attention.vjp(**poisoned, members=members)
        assert np.array_equal(result.output, clean.output)
        assert np.all(result.output[~keep[:, None] & np.ones((2, 2, 12), bool)] == 0)
        assert result.commitment_loss == clean.commitment_loss
        cotangent = rng(18).standard_normal(clean.output.shape)
        shown = np.where(keep[:, None, :, None], cotangent, np.nan)  # a NaN cotangent of a padded row
        got, expected = pullback(shown), back(cotangent)
        real_rows = np.broadcast_to(keep[:, None, :], (2, 2, 12))
        assert_close(got["v"], expected["v"], 0)
        assert_close(got["q"][real_rows], expected["q"][real_rows], 0)
        assert not got["q"][~real_rows].any()  # where there are NaN
        assert not got["v"][~real_rows].any()


@pytest.mark.parametrize("kind", ["layer", "l2", None])
def test_a_masked_token_has_no_gradient_whatever_it_holds(kind):
    keep = np.arange(12) != 5
    given = base(27, query_mask=keep, key_mask=keep, normalize=kind, key_norm="l2", cluster_normalize="l2")
    for value in (np.nan, np.inf, 0.0):
        for n in ("q", "v"):
            given[n][..., 5, :] = value
        result, pullback = attention.vjp(**given)
        got = pullback(output=np.ones_like(result.output), commitment_loss=np.ones(()))
        assert all(np.all(got[n][..., 5, :] == 0) and np.isfinite(got[n]).all() for n in ("q", "v"))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("sign", [1, -1])
def test_equal_logits_of_any_size_have_equal_weights(dtype, sign):
    """Three tokens of logits +- 10^4 and +- 10^8: their mean, which a rounded lse would miss by 5e-4 in float32."""
    eps = np.finfo(dtype).eps
    for size in (1e2, 1e4):
        q, k = (np.full((1, 3, 1), x, dtype) for x in (size, sign * size))
        v, ones = np.array([[[1.0], [0.0], [0.0]]], dtype), np.ones((1, 1, 1), dtype)
        result, pullback = attention.vjp(q, k, v, centroids=ones, normalize=None, cluster_size=3, scale=1.0)
        assert_close(result.output, np.full((1, 3, 1), 1 / 3), 2 * eps)
        assert_close(pullback(v)["v"], np.full((1, 3, 1), 1 / 3), 2 * eps)


def test_sizes_of_none_and_beyond_every_array():
    given = base(28)
    assert np.array_equal(attention(**{**given, "cluster_size": 10**30}), attention(**{**given, "cluster_size": 12}))
    for sizes in ({"t": 0}, {"b": 0}, {"h": 0}, {"e": 0}, {"t": 0, "k": True}, {"n": 0, "memory_keys": True}):
        given = attention.example(rng(), **{"b": 2, "h": 2, "t": 6, "c": 2, "d": 3, "e": 2, **sizes})
        result, pullback = attention.vjp(**given)
        got = pullback(output=result.output, commitment_loss=np.ones(()))
        assert result.output.shape == given["v"].shape
        assert all(got[n].shape == given[n].shape for n in ("q", "v"))
    empty = np.zeros((1, 4, 0))
    v = np.arange(4.0).reshape(1, 4, 1)
    result = attention.forward(empty, None, v, centroids=np.zeros((1, 2, 0)), cluster_size=2, normalize=None)
    assert np.array_equal(result.output[0, :, 0], [0.5, 0.5, 0.0, 0.0])  # no channels: all tie, tokens 0 and 1 twice


def test_values_that_are_not_finite_reach_those_who_see_them():
    given = base(19, causal=True, members=True, k=True, cluster_size=5)
    want = attention.forward(**given).output
    poisoned = {**given, "v": given["v"].copy()}
    poisoned["v"][..., 4, :] = np.nan
    got = attention.forward(**poisoned).output
    sees = np.zeros((2, 2, 12), bool)
    for at in np.ndindex(2, 2, 3):
        if 4 in given["members"][1][at]:
            rows = given["members"][0][at]
            sees[at[:2]][rows[rows >= 4]] = True
    assert np.array_equal(np.isnan(got).all(-1), sees)
    assert np.array_equal(got[~sees], want[~sees])


def test_half_precision_and_no_tokens():
    given = base(21, causal=True, members=True)
    given = {n: x.astype(np.float16) if n in ("q", "v", "centroids") else x for n, x in given.items()}
    result = attention.forward(**given)
    assert result.output.dtype == np.float16
    assert result.commitment_loss.dtype == np.float32
    assert_close(result.output, attention.definition(**given).output, 4 * 2.0**-11)
    empty = {"q": np.zeros((2, 2, 0, 4)), "k": None, "v": np.zeros((2, 2, 0, 3)), "centroids": np.zeros((2, 3, 4))}
    result, pullback = attention.vjp(**empty)
    assert result.output.shape == (2, 2, 0, 3)
    assert pullback(result.output, commitment_loss=np.ones(()))["q"].shape == (2, 2, 0, 4)


# ------------------------------------------------------------------------------------------------ counts


def test_counted_multiplies_grow_with_exponent_3_2():
    sizes = [4**n for n in range(4, 8)]  # 256 ... 16384
    counts = [attention.cost(t=t, c=int(t**0.5), d=64, direction="both").computed_multiplies for t in sizes]
    slopes = np.diff(np.log(counts)) / np.diff(np.log(sizes))
    assert np.all(np.abs(slopes - 1.5) < 1e-12)
    causal = attention.cost(t=1024, c=32, d=64, causal=True)
    assert causal.multiplies == 2 * 1024 * 32 * 64 + 32 * (32 * 33 // 2) * 128


# ------------------------------------------------------------------------------------------------ stored cases


def routing_transformer(meta, arrays):
    """Arguments of a stored case of routing-transformer, members left to be chosen."""
    options, shared = meta["options"], meta["options"]["shared_qk"]
    given = {
        "q": arrays["in_q"], "k": None if shared else arrays["in_k"], "v": arrays["in_v"], "centroids": arrays["w_means"],
        "cluster_size": (options["window_size"], options["context_window_size"] or options["window_size"]),
        "causal": options["causal"], "normalize": None, "cluster_normalize": "l2", "key_norm": "l2" if shared else None,
        "average_eps": options["scatter_eps"], "self_attention": "last_resort" if shared else "always",
    }  # fmt: skip
    return given, (arrays["out_indices_q_by_numpy"], arrays["out_indices_k_by_numpy"])


@pytest.mark.parametrize(
    "name, meta, arrays", list(cases("routing_transformer")), ids=lambda x: x if isinstance(x, str) else ""
)
def test_routing_transformer(name, meta, arrays):
    given, members = routing_transformer(meta, arrays)
    cotangent, want = arrays["cot_out"], arrays["out"]
    held = np.ones(want.shape[:-1], bool)
    if "in_key_mask" in arrays:
        given.update(members=members, key_mask=arrays["in_key_mask"])
    elif "in_query_mask" in arrays:  # a masked query is uniform over its clusters there, and gives 0 here
        keep = arrays["in_query_mask"]
        given.update(members=members, query_mask=keep, key_mask=keep)
        held = np.broadcast_to(keep[:, None], held.shape)
        assert np.any(want[~held] != 0)
    else:
        result = attention.forward(**given)
        assert np.array_equal(result.members_q, np.sort(members[0], -1))
        assert np.array_equal(result.members_k, np.sort(members[1], -1))
        assert_close(meta["options"]["commitment"] * result.commitment_loss, arrays["out_aux_loss"], 1e-15)
    result, pullback = attention.vjp(**given)
    assert_close(result.output[held], want[held], 1e-12)
    assert_close(attention.definition(**given).output[held], want[held], 1e-12)
    gradients = pullback(np.where(held[..., None], cotangent, 0.0))
    for n in ("q", "k", "v"):
        # the uniform rows send gradients to values there, through weights that do not depend on q and k
        if given.get(n) is not None and (n != "v" or held.all()):
            assert_close(gradients[n], arrays["grad_" + n], 1e-11)


# ------------------------------------------------------------------------------------------------ mistakes and bad input


MEMBERS = np.zeros((B, H, C, 1), int)
BAD = {
    "width": ({"centroids": np.zeros((H, C, 5))}, ValueError, "centroids has shape (2, 2, 5)"),
    "heads": ({"centroids": np.zeros((3, C, D))}, ValueError, "centroids has shape (3, 2, 4)"),
    "no_cluster": ({"centroids": np.zeros((H, 0, D))}, ValueError, "at least one cluster"),
    "size_0": ({"cluster_size": 0}, ValueError, "cluster_size is 0: expected at least 1"),
    "size_three": ({"cluster_size": (1, 2, 3)}, ValueError, "expected a number, or (queries, keys)"),
    "size_float": ({"cluster_size": 2.0}, TypeError, "cluster_size is 2.0"),
    "repeated": ({"members": (MEMBERS, np.full((B, H, C, 2), 3))}, ValueError, "members of keys are repeated: token 3"),
    "range": ({"members": (MEMBERS + T, MEMBERS)}, ValueError, "members of queries hold 8 ... 8: expected 0 to 7"),
    "negative": ({"members": (MEMBERS - 2, MEMBERS)}, ValueError, "members of queries hold -2"),
    "members_dtype": ({"members": (MEMBERS + 0.5, MEMBERS)}, TypeError, "members of queries: expected an integer array"),
    "members_shape": ({"members": (MEMBERS[:, :1], MEMBERS)}, ValueError, "members of queries have shape (2, 1, 2, 1)"),
    "members_one": ({"members": MEMBERS}, TypeError, "expected (members of queries, members of keys)"),
    "normalize": ({"normalize": "unit"}, ValueError, "normalize is 'unit'"),
    "cluster_normalize": ({"cluster_normalize": "unit"}, ValueError, "cluster_normalize is 'unit'"),
    "key_norm": ({"key_norm": "rms"}, ValueError, "key_norm is 'rms'"),
    "causal_by": ({"causal_by": "time"}, ValueError, "causal_by is 'time'"),
    "self": ({"self_attention": "only"}, ValueError, "self_attention is 'only'"),
    "projection": ({"projection": np.zeros((D, 3))}, ValueError, "projection has shape (4, 3)"),
    "mask": ({"query_mask": np.ones(T)}, TypeError, "query_mask has dtype float64"),
    "mask_shape": ({"key_mask": np.ones((3, T), bool)}, ValueError, "key_mask has shape (3, 8)"),
    "memory_alone": ({"memory_keys": np.zeros((H, C, 1, D))}, TypeError, "memory_values is missing"),
    "memory": ({"memory_keys": np.zeros((H, C, 1, D)), "memory_values": np.zeros((H, C, 2, E))}, ValueError, "memory_values"),
    "relative": ({"relative_keys": np.zeros((4, D))}, ValueError, "relative_keys has shape (4, 4): expected (2n+1, 4)"),
    "values": ({"v": np.zeros((B, H, 9, E))}, ValueError, "v has shape (2, 2, 9, 2)"),
    "bias": ({"bias": np.zeros((T, T))}, TypeError, "has no option 'bias'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind) as caught:
        attention.forward(**{**arguments("shared"), **change})
    assert message in str(caught.value)
