"""transformer_xl_attention: gradients, definition, tiles, stored cases, equivalences, terms, cost, mistakes, bad input."""

import tracemalloc

import array_api_strict
import numpy as np
import pytest
from ml_dtypes import bfloat16
from support import assert_adjoint, assert_close, assert_gradients, cases, random_cotangents

from refattn import precision
from refattn.attention.scaled_dot_product import scaled_dot_product_attention
from refattn.attention.transformer_xl import transformer_xl_attention as attention
from refattn.mistakes.transformer_xl import Relative
from refattn.positions import rel_shift

B, H, Q, K, D, E = 2, 2, 3, 5, 3, 2
SIZES = {"b": B, "h": H, "q": Q, "k": K, "d": D, "e": E}
EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def base(seed=0, **more):
    return attention.example(rng(seed), **{**SIZES, **more})


def with_places(seed=0):
    return {**base(seed), "key_places": np.array([1, 3, 5, 6, 7]), "r": rng(1).standard_normal((H, 8, D))}


MASK = rng(1).random((B, 1, Q, K)) < 0.7
BIAS = np.where(rng(2).random((H, Q, K)) < 0.2, -np.inf, rng(3).standard_normal((H, Q, K)))
OPTIONS = {
    "plain": base,
    "both_directions": lambda seed: base(seed, causal=False),
    "no_memory": lambda seed: base(seed, k=Q),
    "one_query": lambda seed: base(seed, q=1),
    "more_queries_than_keys": lambda seed: base(seed, q=4, k=3),
    "same_length": lambda seed: base(seed, same_length=True),
    "same_length_number": lambda seed: base(seed, same_length=3),
    "learned": lambda seed: base(seed, position_bias=True),
    "learned_both_directions": lambda seed: base(seed, position_bias=True, causal=False),
    "absolute": lambda seed: base(seed, absolute_q=True),
    "table_alone": lambda seed: {**base(seed), "u": None, "w": None},
    "no_table": lambda seed: {**base(seed), "r": None, "w": None},
    "mask": lambda seed: base(seed, mask=MASK),
    "mask_empty_row": lambda seed: base(seed, mask=np.arange(Q)[:, None] != 1),
    "bias_hides": lambda seed: base(seed, bias=BIAS),
    "scale_zero": lambda seed: base(seed, scale=0.0),
    "places": with_places,
    "table_per_batch": lambda seed: {**base(seed), "r": rng(5).standard_normal((B, H, K, D))},
    "together": lambda seed: {**with_places(seed), "bias": BIAS, "mask": MASK, "same_length": 4, "scale": 0.7},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_by_complex_step(name):
    assert_gradients(attention, {"scale": 0.5, **OPTIONS[name](0)}, rng(7))


@pytest.mark.parametrize("name", OPTIONS)
def test_adjoint_identity(name):
    assert_adjoint(attention, {"scale": 0.5, **OPTIONS[name](1)}, rng(8))


@pytest.mark.parametrize("algorithm", ["whole", "tiled"])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_definition(name, algorithm):
    arguments = OPTIONS[name](2)
    result = attention.forward(**arguments, algorithm=algorithm, keep_terms=True)
    want = attention.definition(**arguments, keep_terms=True)
    for field in want:  # sums of 2 d + k terms of order 1
        assert_close(getattr(result, field), getattr(want, field), 60 * EPS)


@pytest.mark.parametrize("name", OPTIONS)
def test_tiled_gradients_equal_whole(name):
    arguments = OPTIONS[name](3)
    (whole, back), (_, back_tiled) = (attention.vjp(**arguments, algorithm=a) for a in ("whole", "tiled"))
    cotangents = random_cotangents(attention, whole, rng(3))
    want, got = back(**cotangents), back_tiled(**cotangents)
    for n in want:
        assert_close(got[n], want[n], 200 * EPS)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"same_length": True}])
def test_many_tiles_equal_one(options):
    arguments = attention.example(rng(4), b=1, h=1, q=300, k=1500, d=4, e=4, **options)
    (result, back), (whole, back_whole) = (attention.vjp(**arguments, algorithm=a) for a in ("auto", "whole"))
    assert_close(result.output, whole.output, 1500 * EPS)
    d = rng(5).standard_normal(result.output.shape)
    got, want = back(d), back_whole(d)
    for n in want:  # sums over up to 300 x 1500 pairs, in units of their largest
        assert np.abs(got[n] - want[n]).max() <= 1500 * EPS * np.abs(want[n]).max()


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


def test_leading_axes():
    r = rng(6)
    arguments = {
        "q": r.standard_normal((3, 1, H, Q, D)),
        "k": r.standard_normal((2, H, K, D)),
        "v": r.standard_normal((H, K, E)),
        "r": r.standard_normal((3, 1, H, K, D)),
        "u": r.standard_normal((H, D)),
        "w": r.standard_normal((H, D)),
    }
    result = attention.forward(**arguments)
    assert result.output.shape == (3, 2, H, Q, E)
    assert_close(result.output, attention.definition(**arguments).output, 60 * EPS)
    assert_adjoint(attention, arguments, r)
    alone = base()
    alone.update({n: alone[n][0] for n in "qkv"})
    wide = {**alone, "r": r.standard_normal((4, H, K, D))}  # the table alone has a batch
    assert attention.forward(**alone).output.shape == (H, Q, E)
    assert attention.forward(**wide).output.shape == (4, H, Q, E)
    assert_adjoint(attention, wide, r)


@pytest.mark.parametrize("name", ["plain", "both_directions", "places", "learned", "together", "absolute"])
def test_strict_namespace(name):
    arguments = OPTIONS[name](7)
    strict = {n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    for algorithm in ("whole", "tiled"):
        result, pullback = attention.vjp(**strict, algorithm=algorithm, keep_terms=True)
        want, want_back = attention.vjp(**arguments, algorithm=algorithm, keep_terms=True)
        cotangents = random_cotangents(attention, want, rng(1))
        got = pullback(**{n: array_api_strict.asarray(x) for n, x in cotangents.items()})
        assert type(result.output) is type(strict["q"])
        assert_close(result.term_b, want.term_b, 20 * EPS)
        assert_close(result.output, want.output, 20 * EPS)
        for n, g in want_back(**cotangents).items():
            assert_close(got[n], g, 100 * EPS)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32])
def test_low_precision_rounds_once(dtype):
    arguments = {n: x.astype(dtype) for n, x in base(8).items()}
    result, pullback = attention.vjp(**arguments)
    want = attention.forward(**{n: x.astype(np.float64) for n, x in arguments.items()})
    unit = {np.float16: 2.0**-11, bfloat16: 2.0**-8, np.float32: 2.0**-24}[dtype]
    assert_close(result.output, want.output, unit + 60 * 2.0**-24)  # float32 inside, then one rounding
    assert all(g.dtype == dtype for g in pullback(result.output).values())


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


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"same_length": True}])
def test_cost_equals_counted_products(options):
    a = attention.example(rng(18), b=2, h=2, q=40, k=70, d=4, e=6, **options)
    xp = precision.counting()
    result, pullback = attention.vjp(**{n: xp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in a.items()})
    sizes = {"b": 2, "h": 2, "q": 40, "k": 70, "d": 4, "e": 6, "dtype": "float64", **options}
    assert xp.counts.multiplies == attention.cost(**sizes).computed_multiplies
    forward = xp.counts.multiplies
    pullback(result.output)
    backward = attention.cost(**sizes, direction="backward").computed_multiplies
    assert xp.counts.multiplies - forward == backward
    both = attention.cost(**sizes, direction="both")
    assert both.computed_multiplies == attention.cost(**sizes).computed_multiplies + backward


def test_visible_pairs_are_counted():
    cost = attention.cost(q=3, k=5, d=2, e=4)
    assert cost.multiplies == (3 + 4 + 5) * (2 + 2 + 4)  # queries see 3, 4 and 5 keys
    assert cost.parameters == 2 * 2


FITTING = {
    "rel_shift_leak": "both_directions",
    "xl_same_length_off1": "same_length",
    "xl_same_length_ignored": "same_length",
}
OWN = [m for m in attention.mutations if m.class_.startswith(("xl_", "rel_", "memory_"))]


@pytest.mark.parametrize("mutation", OWN, ids=lambda m: m.class_)
def test_every_mistake_shows(mutation):
    arguments = OPTIONS[FITTING.get(mutation.class_, "plain")](19)
    result, pullback = attention.vjp(**arguments)
    cotangents = random_cotangents(attention, result, rng(1))
    gradients = pullback(**cotangents)
    if mutation.forward is not None:
        wrong = mutation.forward(arguments)
        assert np.abs(wrong.output - result.output).max() > 1e-3
    wrong = mutation.gradients(arguments, cotangents)
    assert max(np.abs(wrong[n] - gradients[n]).max() for n in wrong) > 1e-3


def test_catalogue():
    names = {m.class_ for m in attention.mutations}
    wanted = {
        "rel_shift_slice",
        "rel_shift_leak",
        "xl_uw_swapped",
        "xl_distance_order",
        "memory_order",
        "xl_same_length_off1",
    }
    assert wanted <= names
    assert attention.mutations[0].forward({**base(absolute_q=True)}) is None  # absolute positions have none of this
    leak = next(m for m in attention.mutations if m.class_ == "rel_shift_leak")
    assert leak.forward(base()) is None  # hidden by the causal mask


@pytest.mark.parametrize(
    "name", ["plain", "both_directions", "same_length", "learned", "mask", "bias_hides", "places", "together"]
)
def test_mistakes_start_from_the_right_numbers(name):
    arguments = OPTIONS[name](20)
    one = Relative(arguments)
    found = one.forward()
    result, pullback = attention.vjp(**arguments)
    assert_close(found.output, result.output, 60 * EPS)
    cotangents = random_cotangents(attention, result, rng(1))
    for n, g in one.backward(cotangents).items():
        assert_close(g, pullback(**cotangents)[n], 200 * EPS)


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
