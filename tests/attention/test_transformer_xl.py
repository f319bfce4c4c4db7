"""transformer_xl_attention: gradients, definition, tiles, stored cases, equivalences, terms, cost, mistakes, bad input."""

import tracemalloc

import numpy as np
import pytest
from contract.cases.transformer_xl import B, D, E, H, K, Q, base
from support import assert_close, cases

from refattn.attention.scaled_dot_product import scaled_dot_product_attention
from refattn.attention.transformer_xl import transformer_xl_attention as attention
from refattn.positions import rel_shift

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.bitwise  # what is made up needs memory too
def test_memory_is_linear_in_the_length():
    """2048 x 4096 logits in float64 would be 64 MiB; a few tiles and the arrays are a fraction of it."""
    arguments = attention.example(rng(4), b=1, h=1, q=2048, k=4096, d=4, e=4)
    tracemalloc.start()
    try:
        result, pullback = attention.vjp(**arguments)
        pullback(result.output)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20  # half of one such matrix; a backward that built them would hold four


# ---------------------------------------------------------------------- stored cases of independent implementations


def time_major(x):
    axes = {4: (1, 2, 0, 3), 3: (1, 0, 2), 2: (1, 0)}[x.ndim]
    return x.transpose(axes)


def held_against(arguments, arrays, wanted, tolerance):
    result, pullback = attention.vjp(**arguments)
    assert_close(result.output, time_major(arrays["out"]), tolerance)
    assert_close(attention.definition(**arguments).output, time_major(arrays["out"]), tolerance)
    gradients = pullback(np.ascontiguousarray(time_major(arrays["cot_out"])))
    for name, want in wanted.items():
        assert_close(gradients[name], want, 10 * tolerance)
    return gradients


@pytest.mark.parametrize("case", [c for c in cases("transformer_xl") if c[0].startswith("core")], ids=lambda c: c[0])
def test_stored_transformer_xl(case):
    _, meta, arrays = case
    arguments, wanted = {}, {}
    for ours, theirs, moved in (
        ("q", "q", True), ("k", "k", True), ("v", "v", True), ("r", "r_head_k", True), ("u", "r_w_bias", False),
        ("w", "r_r_bias", False), ("position_bias", "r_bias", True),
    ):  # fmt: skip
        for prefix in ("in_", "w_"):
            if prefix + theirs in arrays:
                x, g = arrays[prefix + theirs], arrays["grad_" + theirs]
                arguments[ours], wanted[ours] = (time_major(x), time_major(g)) if moved else (x, g)
    if meta["options"]["mask"] == "same_length":
        arguments["same_length"] = True
    held_against(arguments, arrays, wanted, 1e-10)


@pytest.mark.parametrize("case", list(cases("hf_xlnet")), ids=lambda c: c[0])
def test_stored_xlnet(case):
    _, _, arrays = case
    arguments, wanted = {"causal": False}, {}
    for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("r", "k_r"), ("u", "r_w_bias"), ("w", "r_r_bias")):
        x, g = arrays["in_" + theirs], arrays["grad_" + theirs]
        arguments[ours], wanted[ours] = (time_major(x), time_major(g)) if x.ndim == 4 else (x, g)
    if "in_mask_True_is_masked" in arrays:
        arguments["mask"] = ~arrays["in_mask_True_is_masked"]
    if "in_seg_mat" in arrays:  # segment ids: a bias that depends on q, so q takes a second share of its gradient
        scale, query = arrays["in_q"].shape[-1] ** -0.5, arrays["in_q"] + arrays["in_r_s_bias"]
        which, segment = arrays["in_seg_mat"], arrays["in_seg_embed"]
        arguments["bias"] = scale * np.einsum("ijbs,ibhd,shd->bhij", which, query, segment)
        d_q = wanted.pop("q")
        gradients = held_against(arguments, arrays, wanted, 1e-10)
        d_query = scale * np.einsum("bhij,ijbs,shd->ibhd", gradients["bias"], which, segment)
        assert_close(gradients["q"] + time_major(d_query), d_q, 1e-9)
        assert_close(d_query.sum((0, 1)), arrays["grad_r_s_bias"], 1e-9)
    else:
        held_against(arguments, arrays, wanted, 1e-10)


# ---------------------------------------------------------------------- what the equation says


def test_rel_shift_is_the_table_by_distance():
    """The logits are those of the textbook: all rows, then the shift; no value of a neighbour beyond the edge."""
    for causal in (True, False):
        a = base(9, causal=causal)
        logits = attention.forward(**a, keep_weights=True).logits
        content = (a["q"] + a["u"][:, None]) @ np.swapaxes(a["k"], -1, -2)
        position = rel_shift((a["q"] + a["w"][:, None]) @ np.swapaxes(a["r"], -1, -2), causal=causal)
        assert_close(logits, D**-0.5 * (content + position), 20 * EPS)


def test_terms_add_up_to_the_logits():
    for arguments in (base(10), base(10, causal=False), base(10, position_bias=True), base(10, absolute_q=True)):
        result = attention.forward(**arguments, keep_terms=True, keep_weights=True)
        total = result.term_a + result.term_b + result.term_c + result.term_d
        assert_close(total, result.logits, 20 * EPS)


def test_absolute_terms():
    a = base(11, absolute_q=True)
    result = attention.forward(**a, keep_terms=True)
    whole = scaled_dot_product_attention.forward(
        a["q"] + a["absolute_q"], a["k"] + a["absolute_k"], a["v"], causal=True, align="lower_right"
    )
    assert_close(result.output, whole.output, 20 * EPS)
    assert_close(result.term_c, D**-0.5 * np.einsum("hqd,bhkd->bhqk", a["absolute_q"], a["k"]), 20 * EPS)


def test_without_positions_it_is_softmax_attention():
    a = {**base(12), "r": None, "u": None, "w": None}
    want = scaled_dot_product_attention.forward(a["q"], a["k"], a["v"], causal=True, align="lower_right")
    assert_close(attention.forward(**a).output, want.output, 20 * EPS)


def test_segments_with_all_of_the_past_as_memory_are_one_long_sequence():
    a = base(13, q=7, k=7)
    whole = attention.forward(**a)
    for cut in (1, 3, 5):
        parts = []
        for start, stop in ((0, cut), (cut, 7)):
            r = a["r"][:, 7 - stop :]  # distances stop - 1 ... 0
            parts.append(
                attention(a["q"][:, :, start:stop], a["k"][:, :, :stop], a["v"][:, :, :stop], r=r, u=a["u"], w=a["w"])
            )
        assert_close(np.concatenate(parts, axis=-2), whole.output, 20 * EPS)


def test_same_length_counts_keys():
    a = base(14, q=4, k=10)
    weights = attention.forward(**a, same_length=True, keep_weights=True).weights
    assert (np.count_nonzero(weights, axis=-1) == 6).all()  # as many as the memory holds
    weights = attention.forward(**a, same_length=7, keep_weights=True).weights
    assert (np.count_nonzero(weights, axis=-1) == 7).all()  # one more: the other convention in use
    assert (weights[..., np.arange(4), np.arange(4) + 6] > 0).all()  # itself included


def test_zero_memory_is_attended():
    """Zeros in the memory are keys like any other: they dilute, unlike an empty memory."""
    a = base(15, q=3, k=3)
    padded = {n: np.concatenate([np.zeros_like(a[n][:, :, :2]), a[n]], axis=2) for n in "kv"}
    longer = np.concatenate([rng(1).standard_normal((H, 2, D)), a["r"]], axis=1)
    zeros = attention(a["q"], padded["k"], padded["v"], r=longer, u=a["u"], w=a["w"])
    assert np.abs(zeros - attention(**a)).max() > 0.1
    hidden = attention(a["q"], padded["k"], padded["v"], r=longer, u=a["u"], w=a["w"], mask=np.arange(5) >= 2)
    assert_close(hidden, attention(**a), 20 * EPS)


@pytest.mark.parametrize("algorithm", ["whole", "tiled"])
def test_poison_stays_with_the_pairs_that_meet_it(algorithm):
    clean = attention.forward(**base(16))
    mask = np.ones((Q, K), bool)
    mask[:, 1] = False
    for name in ("k", "v"):
        dirty = base(16)
        dirty[name][0, 0, 1] = np.nan
        result, pullback = attention.vjp(**dirty, mask=mask, algorithm=algorithm)
        assert np.isfinite(result.output).all()
        assert all(np.isfinite(g).all() for g in pullback(np.ones_like(result.output)).values())
    dirty = base(16)
    dirty["r"][0, 0] = np.nan  # distance 4: the last query and the first key alone
    result, pullback = attention.vjp(**dirty, algorithm=algorithm)
    assert np.isnan(result.output[:, 0, 2]).all()
    assert_close(np.delete(result.output[:, 0], 2, axis=1), np.delete(clean.output[:, 0], 2, axis=1), 20 * EPS)
    d = np.ones_like(result.output)
    d[:, 0, 2] = 0
    assert np.isfinite(np.delete(pullback(d)["q"], 2, axis=2)).all()
    dirty = base(16)
    dirty["q"][0, 0, 0] = np.nan  # query 0 sees the keys up to 2, distances 0 ... 2
    masked = np.ones((Q, K), bool)
    masked[0] = False  # ... and here nothing
    result, pullback = attention.vjp(**dirty, mask=masked, algorithm=algorithm)
    assert all(np.isfinite(g).all() for g in pullback(np.ones_like(result.output)).values())


@pytest.mark.parametrize("sizes", [{"b": 0}, {"q": 0}, {"k": 0, "q": 0}, {"e": 0}, {"d": 0}, {"h": 0}])
def test_empty_axes(sizes):
    arguments = base(17, **sizes)
    for algorithm in ("auto", "whole", "tiled"):
        result, pullback = attention.vjp(**arguments, algorithm=algorithm)
        shapes = {n: g.shape for n, g in pullback(result.output).items()}
        assert shapes == {n: x.shape for n, x in arguments.items()}


# ---------------------------------------------------------------------- cost, mistakes, bad input


def test_visible_pairs_are_counted():
    cost = attention.cost(q=3, k=5, d=2, e=4)
    assert cost.multiplies == (3 + 4 + 5) * (2 + 2 + 4)  # queries see 3, 4 and 5 keys
    assert cost.parameters == 2 * 2


BAD = {
    "rows": ({"r": np.zeros((H, 4, D))}, ValueError, r"r has shape \(2, 4, 3\): expected \(..., 2, 5, 3\): 5 rows, as many as the keys"),
    "rows_both": ({"causal": False}, ValueError, r"8 rows, .*keys and the queries together"),
    "u": ({"u": np.zeros((H, 4))}, ValueError, r"u has shape \(2, 4\)"),
    "w_alone": ({"r": None}, ValueError, "w is given without r"),
    "two_scalars": ({"position_bias": np.zeros((H, K))}, ValueError, "w and position_bias are both given"),
    "scalars": ({"w": None, "position_bias": np.zeros((H, 4))}, ValueError, r"position_bias has shape \(2, 4\)"),
    "heads": ({"k": np.zeros((B, 1, K, D))}, ValueError, "k has shape .* 'h'"),
    "lengths": ({"v": np.zeros((B, H, 4, E))}, ValueError, "v has shape .* 'k'"),
    "rank": ({"q": np.zeros((Q, D))}, ValueError, "q has shape"),
    "absolute_alone": ({"absolute_q": np.zeros((H, Q, D))}, ValueError, "absolute_k is missing"),
    "absolute_mixed": (
        {"absolute_q": np.zeros((H, Q, D)), "absolute_k": np.zeros((H, K, D))}, ValueError, "together with r",
    ),
    "same_length_both": ({"causal": False, "r": np.zeros((H, 8, D)), "same_length": True}, ValueError, "needs causal=True"),
    "same_length_zero": ({"same_length": 0}, ValueError, "same_length is 0"),
    "same_length_type": ({"same_length": "pytorch"}, TypeError, "same_length is 'pytorch'"),
    "causal": ({"causal": 1}, TypeError, "causal is 1"),
    "places_count": ({"key_places": [0, 1]}, ValueError, "expected 5 integers"),
    "places_order": ({"key_places": [0, 2, 1, 3, 4]}, ValueError, "rising places"),
    "places_segment": ({"key_places": [0, 1, 2, 4, 5]}, ValueError, "the last 3 one by one"),
    "softcap": ({"softcap": 1.0}, TypeError, "no option 'softcap'"),
    "mask": ({"mask": np.ones((Q, K))}, TypeError, "mask has dtype float64"),
    "tiled_weights": ({"keep_weights": True, "algorithm": "tiled"}, ValueError, "keep_weights needs"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        attention.forward(**{**base(), **change})


def test_same_length_needs_a_memory():
    with pytest.raises(ValueError, match="there are 3 queries and 3 keys"):
        attention.forward(**base(k=3), same_length=True)
