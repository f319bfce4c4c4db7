"""synthesizer_attention: every part and their mixture, gradients, definition, equivalences, counts, mistakes, bad input."""

import array_api_strict
import numpy as np
import pytest
from support import assert_adjoint, assert_close, assert_gradients, random_cotangents

from refattn import precision
from refattn.attention.scaled_dot_product import scaled_dot_product_attention
from refattn.attention.synthesizer import PARTS
from refattn.attention.synthesizer import synthesizer_attention as attention
from refattn.mistakes.synthesizer import Steps

EPS = np.finfo(np.float64).eps
ALL = {"w_2": True, "w_a": True, "random": True, "random_1": True, "other_logits": True}
OPTIONS = {
    "dense": {},
    "dense_causal": {"causal": True},
    "factors": {"w_a": True},
    "random": {"random": True},
    "random_causal": {"random": True, "causal": True},
    "ranked": {"random_1": True},
    "others": {"other_logits": True},
    "dense_random": {"w_2": True, "random": True},
    "all": ALL,
    "all_causal": {**ALL, "causal": True},
}


def rng(seed=0):
    return np.random.default_rng(seed)


def arguments(name="dense", seed=0, **more):
    given = attention.example(
        rng(seed), **{"b": 2, "h": 2, "q": 3, "k": 4, "m": 3, "f": 3, "e": 2, **OPTIONS[name], **more}
    )
    if "w_1" not in given:
        given["x"] = None
    return given


def masked(name, seed):
    """With a mask that differs from head to head, one row of which is empty."""
    given = arguments(name, seed)
    mask = rng(seed).random((2, 2, given["v"].shape[-2] if given.get("causal") else 3, given["v"].shape[-2])) < 0.6
    mask[0, 1, 2] = False
    return {**given, "mask": mask}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_by_complex_step(name):
    assert_gradients(attention, arguments(name), rng(1))
    assert_gradients(attention, masked(name, 2), rng(2))
    assert_adjoint(attention, arguments(name, 3), rng(3))


def test_gradients_without_biases_and_with_one_mixture_for_all_heads():
    given = {n: x for n, x in arguments("all", 4).items() if n not in ("b_1", "b_2", "b_a", "b_b")}
    given["mixture"] = given["mixture"][0]
    assert_gradients(attention, given, rng(4))
    assert_close(attention(**given), attention.definition(**given).output, 50 * EPS)


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_definition(name):
    for given in (arguments(name, 5), masked(name, 6)):
        assert_close(attention(**given), attention.definition(**given).output, 50 * EPS)  # sums of at most 4 terms


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_of_the_mistakes_are_right(name):
    given = masked(name, 7)
    result, pullback = attention.vjp(**given)
    steps = Steps(given)
    assert_close(steps.forward().output, result.output, 50 * EPS)
    cotangents = random_cotangents(attention, result, rng(7))
    right, found = pullback(**cotangents), steps.backward(cotangents["output"])
    assert set(right) == set(found)
    for n, g in right.items():
        assert_close(found[n], g, 100 * EPS)


@pytest.mark.parametrize("name", ["dense", "random", "others", "all"])
def test_leading_axes_broadcast(name):
    draw, given = rng(8), arguments(name, 8)
    if given["x"] is not None:
        given["x"] = draw.standard_normal((3, 1, 3, 3))
    if "other_logits" in given:
        given["other_logits"] = draw.standard_normal((2, 2, 3, 4))
    given["v"] = draw.standard_normal((4, 1, 2, 2, 4, 2))
    result = attention.forward(**given)
    assert result.output.shape == ((4, 3, 2, 2, 3, 2) if given["x"] is not None else (4, 1, 2, 2, 3, 2))
    assert_close(result.output, attention.definition(**given).output, 50 * EPS)
    assert_adjoint(attention, given, rng(8))


def test_products_of_queries_and_keys_as_the_only_part_are_full_attention():
    draw = rng(9)
    q, k, v = draw.standard_normal((3, 2, 3, 7, 4))
    want, back = scaled_dot_product_attention.vjp(q, k, v, causal=True)
    result, pullback = attention.vjp(None, v, other_logits=q @ k.swapaxes(-1, -2) / 2, causal=True)
    assert_close(result.output, want.output, 20 * EPS)
    d = draw.standard_normal(want.output.shape)
    assert_close(pullback(d)["v"], back(d)["v"], 50 * EPS)
    assert_close(pullback(d)["other_logits"] @ k / 2, back(d)["q"], 50 * EPS)


def test_factors_of_full_size_are_the_whole():
    """Factors k x 1 with a right one of 1 are a dense part; a table of rank k is any table."""
    dense = arguments("dense", 10)
    h, f, k = dense["w_2"].shape
    factors = {n: dense[n] for n in ("x", "v", "w_1", "b_1")}
    factors.update(w_a=dense["w_2"], b_a=dense["b_2"], w_b=np.zeros((h, f, 1)), b_b=np.ones((h, 1)))
    assert_close(attention(**factors), attention(**dense), 20 * EPS)
    table = arguments("random", 10)
    ranked = {"v": table["v"], "random_1": table["random"], "random_2": np.broadcast_to(np.eye(k), (h, k, k))}
    assert_close(attention(**ranked), attention(**table), 20 * EPS)


def test_a_mixture_that_leaves_one_part_is_that_part():
    given = arguments("all", 11)
    alone = {"dense": ("w_1", "b_1", "w_2", "b_2"), "dense_factors": ("w_1", "b_1", "w_a", "b_a", "w_b", "b_b")}
    for s, (name, arrays) in enumerate(PARTS.items()):
        mixture = np.full(5, -np.inf)
        mixture[s] = 0.0
        wanted = {n: given[n] for n in ("x", "v", *alone.get(name, arrays))}
        assert_close(attention(**{**given, "mixture": mixture}), attention(**wanted), 20 * EPS)


@pytest.mark.parametrize("name", OPTIONS)
def test_strict_namespace(name):
    given = masked(name, 12)
    strict = {n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    want, back = attention.vjp(**given)
    got, back_strict = attention.vjp(**strict)
    cotangents = random_cotangents(attention, want, rng(12))
    assert_close(np.asarray(got.output), want.output, 20 * EPS)
    for n, g in back_strict(output=array_api_strict.asarray(cotangents["output"])).items():
        assert_close(np.asarray(g), back(**cotangents)[n], 50 * EPS)


@pytest.mark.parametrize("name", ["dense_causal", "all_causal"])
def test_nan_reaches_only_those_who_see_it(name):
    given = arguments(name, 13)
    want, back = attention.vjp(**given)
    cotangents = random_cotangents(attention, want, rng(13))
    poisoned = {**given, "v": given["v"].copy()}
    poisoned["v"][..., 2, :] = np.nan
    result, pullback = attention.vjp(**poisoned)
    assert np.array_equal(result.output[..., :2, :], want.output[..., :2, :])
    assert np.isnan(result.output[..., 2:, :]).all()
    early = {"output": cotangents["output"].copy()}
    early["output"][..., 2:, :] = 0.0
    assert np.array_equal(pullback(**early)["v"][..., :2, :], back(**early)["v"][..., :2, :])
    poisoned = {**given, "x": given["x"].copy()}
    poisoned["x"][:, 1] = np.nan
    output = attention(**poisoned)
    assert np.isnan(output[..., 1, :]).all()
    rest = [0, 2, 3]
    assert np.array_equal(output[..., rest, :], want.output[..., rest, :])


def test_half_precision_is_computed_in_float32():
    given = {n: x.astype(np.float16) if isinstance(x, np.ndarray) else x for n, x in arguments("all", 14).items()}
    output = attention(**given)
    assert output.dtype == np.float16
    assert_close(output, attention.definition(**given).output, 2 * 2.0**-11)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["dense", "factors", "random", "ranked", "all", "all_causal"])
def test_cost_equals_counted_products(name, direction):
    parts = {"dense": ("dense",), "factors": ("dense_factors",), "random": ("random",), "ranked": ("random_factors",)}
    sizes = {"b": 2, "h": 3, "q": 10, "k": 10, "m": 5, "f": 4, "e": 3, "r": 3}
    given = attention.example(rng(15), **sizes, p=2, **OPTIONS[name])
    counter = precision.counting()
    moved = {n: counter.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    result, pullback = attention.vjp(**moved)
    if direction == "backward":
        counter.counts.reset()
        pullback(counter.asarray(np.ones(result.output.shape)))
    options = {"parts": parts.get(name, tuple(PARTS)), "n": 5, "p": 2, "causal": "causal" in name}
    cost = attention.cost(**sizes, **options, direction=direction)
    assert counter.counts.multiplies == cost.computed_multiplies
    assert cost.multiplies <= cost.computed_multiplies


def test_parameters():
    assert attention.cost(h=2, q=8, k=8, e=4, m=5, f=3).parameters == 2 * (5 * 3 + 3 * 8)
    cost = attention.cost(h=2, q=8, k=8, e=4, r=3, parts=("random", "random_factors"), direction="both")
    assert cost.parameters == 2 * (8 * 8 + 16 * 3) + 2


# ------------------------------------------------------------------------------------------------ mistakes and bad input

SHOWN_BY = {
    "synthesizer_tiling": "factors", "synthesizer_transposed": "random_causal", "synthesizer_mixture_after": "all",
    "synthesizer_mixture_plain": "all", "synthesizer_mixture_equal": "all", "synthesizer_mixture_grad": "all",
    "causal_drop": "dense_causal", "synthesizer_fixed": "random",
}  # fmt: skip


@pytest.mark.parametrize("mutation", attention.mutations, ids=lambda m: m.says.replace(" ", "_"))
def test_mistakes_differ(mutation):
    given = {n: x for n, x in arguments(SHOWN_BY.get(mutation.class_, "dense"), 16).items() if x is not None}
    result, pullback = attention.vjp(**given)
    cotangents = random_cotangents(attention, result, rng(16))
    right = pullback(**cotangents)
    if mutation.forward is not None:
        assert np.abs(mutation.forward(given).output - result.output).max() > 1e-3
    if mutation.gradients is not None:
        wrong = mutation.gradients(given, cotangents)
        assert set(wrong) == set(right)
        assert max(np.abs(wrong[n] - right[n]).max() for n in wrong) > 1e-3


def test_mistakes_that_do_not_show_say_so():
    silent = {
        m.class_ for m in attention.mutations if m.forward is not None and m.forward(arguments("random", 17)) is None
    }
    assert silent == {
        "synthesizer_linear", "bias_drop", "synthesizer_tiling", "synthesizer_transposed", "synthesizer_mixture_after",
        "synthesizer_mixture_plain", "synthesizer_mixture_equal", "causal_drop",
    }  # fmt: skip


BAD = {
    "no_values": ("dense", {"v": None}, TypeError, "the argument 'v' is missing"),
    "no_part": ("dense", {"w_1": None, "w_2": None, "b_1": None, "b_2": None}, ValueError, "no logits: give"),
    "no_hidden": ("dense", {"w_1": None, "b_1": None}, ValueError, "w_1 missing: the part 'dense' needs w_1, w_2"),
    "no_output": ("random", {"w_1": np.zeros((2, 3, 3))}, ValueError, "w_1 is given without w_2"),
    "no_tokens": ("dense", {"x": None}, ValueError, "x is not: the dense parts are made from the tokens"),
    "half_table": ("ranked", {"random_2": None}, ValueError, "random_2 missing: the part 'random_factors'"),
    "bias_alone": ("random", {"b_2": np.zeros((2, 4))}, ValueError, "b_2 is given without w_2"),
    "mixture": ("dense_random", {"mixture": None}, ValueError, "mixture is missing: expected 2 numbers for the parts dense, random"),
    "shares": ("dense_random", {"mixture": np.zeros(3)}, ValueError, "mixture has shape (3,): expected (2,) or (2, 2)"),
    "factors": ("factors", {"w_b": np.zeros((2, 3, 3)), "b_b": None}, ValueError, "expected factors n p = 4 keys"),
    "keys": ("dense", {"w_2": np.zeros((2, 3, 5))}, ValueError, "w_2 has shape (2, 3, 5): its axis 'k'"),
    "queries": ("dense_random", {"random": np.zeros((2, 4, 4))}, ValueError, "random has shape (2, 4, 4): its axis 'q'"),
    "causal": ("dense", {"causal": True}, ValueError, "as many queries as keys: 3 and 4"),
    "mask": ("dense", {"mask": np.zeros((3, 4))}, TypeError, "mask has dtype float64: expected a bool array"),
    "scale": ("dense", {"scale": 1.0}, TypeError, "has no option 'scale'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    base, change, kind, message = BAD[name]
    with pytest.raises(kind) as caught:
        attention.forward(**{**arguments(base), **change})
    assert message in str(caught.value)
