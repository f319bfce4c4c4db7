"""compressive_attention: gradients, definition, what it is made of, stop-gradients, cost, mistakes, bad input."""

import array_api_strict
import numpy as np
import pytest
from support import assert_adjoint, assert_close, assert_gradients, random_cotangents

from refattn import precision
from refattn.attention.compressive import compressive_attention as attention
from refattn.attention.transformer_xl import transformer_xl_attention
from refattn.mistakes.compressive import Compressive

SIZES = {"b": 2, "h": 2, "q": 3, "k": 2, "n": 2, "m": 4, "d": 3, "e": 2}
EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def base(seed=0, **more):
    return attention.example(rng(seed), **{**SIZES, **more})


def without(seed, *names):
    return {n: x for n, x in base(seed).items() if n not in names}


OPTIONS = {
    "plain": base,
    "per_head": lambda seed: without(seed, "w_o"),
    "no_positions": lambda seed: without(seed, "r", "w"),
    "table_alone": lambda seed: without(seed, "u", "w"),
    "no_biases_no_positions": lambda seed: without(seed, "r", "u", "w"),
    "span_end": lambda seed: base(seed, compressed_positions="span_end", rate=3),
    "span_mid": lambda seed: base(seed, compressed_positions="span_mid", rate=2),
    "mask": lambda seed: base(seed, mask=rng(1).random((2, 1, 3, 7)) < 0.7),
    "bias": lambda seed: base(seed, bias=rng(2).standard_normal((2, 3, 7)), scale=0.6),
    "same_length": lambda seed: base(seed, same_length=True),
    "empty_compressed": lambda seed: base(seed, n=0),
    "no_memories": lambda seed: {**without(seed, "memory", "compressed"), "r": rng(3).standard_normal((2, 3, 3))},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_by_complex_step(name):
    arguments = {"scale": 0.5, **OPTIONS[name](0)}
    assert_gradients(attention, {**arguments, "through_memory": True}, rng(7))
    constant = [
        n for n in attention.differentiable if n not in ("memory", "compressed") and arguments.get(n) is not None
    ]
    gradients = assert_gradients(attention, arguments, rng(7), names=constant)
    assert all((gradients[n] == 0).all() for n in ("memory", "compressed") if n in gradients)


@pytest.mark.parametrize("name", OPTIONS)
def test_adjoint_identity(name):
    assert_adjoint(attention, {**OPTIONS[name](1), "through_memory": True}, rng(8))


@pytest.mark.parametrize("algorithm", ["whole", "tiled"])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_definition(name, algorithm):
    arguments = OPTIONS[name](2)
    result = attention.forward(**arguments, algorithm=algorithm)
    want = attention.definition(**arguments)
    assert_close(result.output, want.output, 100 * EPS)
    assert_close(result.lse, want.lse, 100 * EPS)
    pair = (attention.vjp(**arguments, algorithm=a) for a in ("whole", algorithm))
    one, other = (pullback(random_cotangents(attention, r, rng(1))["output"]) for r, pullback in pair)
    for n in one:
        assert_close(other[n], one[n], 200 * EPS)


def test_kept_weights_and_terms():
    arguments = base(3)
    got, want = (f(**arguments, keep_weights=True, keep_terms=True) for f in (attention.forward, attention.definition))
    for field in want:
        assert_close(getattr(got, field), getattr(want, field), 100 * EPS)


def test_leading_axes():
    arguments = base(4, b=1)
    arguments["x"] = rng(5).standard_normal((3, 2, 3, 4))
    arguments["memory"] = rng(6).standard_normal((2, 2, 4))
    arguments["compressed"] = arguments["compressed"][0]
    result = attention.forward(**arguments)
    assert result.output.shape == (3, 2, 3, 4)
    assert_close(result.output, attention.definition(**arguments).output, 100 * EPS)
    assert_adjoint(attention, {**arguments, "through_memory": True}, rng(1))


@pytest.mark.parametrize("name", ["plain", "span_mid", "per_head", "no_memories"])
def test_strict_namespace(name):
    arguments = OPTIONS[name](5)
    strict = {n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    result, pullback = attention.vjp(**strict, algorithm="tiled")
    want, want_back = attention.vjp(**arguments, algorithm="tiled")
    cotangents = random_cotangents(attention, want, rng(1))
    got = pullback(**{n: array_api_strict.asarray(x) for n, x in cotangents.items()})
    assert_close(result.output, want.output, 50 * EPS)
    for n, g in want_back(**cotangents).items():
        assert_close(got[n], g, 200 * EPS)


def test_half_precision_comes_back_in_its_dtype():
    arguments = {n: x.astype(np.float16) for n, x in base(6).items()}
    result, pullback = attention.vjp(**arguments)
    want = attention.forward(**{n: x.astype(np.float64) for n, x in arguments.items()})
    assert result.output.dtype == np.float16
    assert result.lse.dtype == np.float32
    assert_close(result.output, want.output, 2.0**-11 + 100 * 2.0**-24)
    assert pullback(result.output)["w_k"].dtype == np.float16


def test_it_is_transformer_xl_over_the_joined_rows():
    a = base(7)
    context = np.concatenate([a["compressed"], a["memory"], a["x"]], axis=1)
    q = np.einsum("bqm,mhd->bhqd", a["x"], a["w_q"])
    k, v = (np.einsum("bkm,mhd->bhkd", context, a[n]) for n in ("w_k", "w_v"))
    heads = transformer_xl_attention(q, k, v, r=a["r"], u=a["u"], w=a["w"])
    assert_close(attention(**a), np.einsum("bhqe,hem->bqm", heads, a["w_o"]), 50 * EPS)


def test_a_span_of_one_token_is_a_slot():
    a = base(8)
    for kind in ("span_end", "span_mid"):
        assert_close(attention(**a, compressed_positions=kind, rate=1), attention(**a), 0)


def test_places_of_spans():
    """Two compressed rows of 3 tokens, 2 of memory, 3 of the segment: the query at token 10 reads the rows' distances."""
    a = {**base(9), "u": None, "w": None}
    for kind, distances in (("span_end", (8, 5, 4, 3, 2, 1, 0)), ("span_mid", (9, 6, 4, 3, 2, 1, 0))):
        r = np.zeros((2, 11, 3))
        r[:, :, 0] = np.arange(10, -1, -1)  # the table holds the distance itself
        given = {**a, "r": r, "compressed_positions": kind, "rate": 3, "keep_terms": True}
        q = np.einsum("bqm,mhd->bhqd", a["x"], a["w_q"])
        want = 3**-0.5 * q[:, :, -1, :1] * np.array(distances)
        assert_close(attention.forward(**given).term_b[:, :, -1], want, 50 * EPS)


def test_projections_learn_through_memory_rows():
    """Without memories in the context the gradient of w_k is another one, though nothing flows into the memories."""
    a = base(10)
    result, pullback = attention.vjp(**a)
    gradients = pullback(np.ones_like(result.output))
    assert (gradients["memory"] == 0).all()
    assert (gradients["compressed"] == 0).all()
    wrong = next(m for m in attention.mutations if m.class_ == "memory_weights_detached")
    detached = wrong.gradients(a, {"output": np.ones_like(result.output)})
    assert np.abs(detached["w_k"] - gradients["w_k"]).max() > 1e-3
    assert_close(detached["w_q"], gradients["w_q"], 200 * EPS)


def test_cost_equals_counted_products():
    sizes = {"b": 2, "h": 2, "q": 6, "k": 5, "n": 3, "m": 8, "d": 4, "e": 3}
    a = attention.example(rng(11), **sizes)
    xp = precision.counting()
    result, pullback = attention.vjp(**{n: xp.asarray(x) for n, x in a.items()}, through_memory=True)
    forward = xp.counts.multiplies
    assert forward == attention.cost(**sizes, dtype="float64").computed_multiplies
    pullback(result.output)
    assert xp.counts.multiplies - forward == attention.cost(**sizes, direction="backward").computed_multiplies
    assert attention.cost(**sizes).parameters == 8 * 2 * (4 + 4 + 3 + 3) + 2 * 2 * 4


FITTING = {
    "compressed_slots": "span_end", "xl_same_length_off1": "same_length", "xl_same_length_ignored": "same_length",
}  # fmt: skip
OWN = ("memory_", "compressed_", "gradient_", "key_value", "xl_", "rel_shift_slice", "rel_shift_missing")


@pytest.mark.parametrize(
    "mutation", [m for m in attention.mutations if m.class_.startswith(OWN)], ids=lambda m: m.class_
)
def test_every_mistake_shows(mutation):
    arguments = OPTIONS[FITTING.get(mutation.class_, "plain")](12)
    if mutation.class_ == "key_value_swapped":
        arguments = base(12, e=3)
    arguments["through_memory"] = mutation.class_ == "memory_stopped"
    result, pullback = attention.vjp(**arguments)
    cotangents = random_cotangents(attention, result, rng(1))
    gradients = pullback(**cotangents)
    if mutation.forward is not None:
        assert np.abs(mutation.forward(arguments).output - result.output).max() > 1e-4
    wrong = mutation.gradients(arguments, cotangents)
    assert max(np.abs(wrong[n] - gradients[n]).max() for n in wrong) > 1e-4


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("through", [False, True])
def test_mistakes_start_from_the_right_numbers(name, through):
    arguments = {**OPTIONS[name](13), "through_memory": through}
    one = Compressive(arguments)
    found = one.forward()
    result, pullback = attention.vjp(**arguments)
    assert_close(found.output, result.output, 100 * EPS)
    cotangents = random_cotangents(attention, result, rng(1))
    gradients = pullback(**cotangents)
    for n, g in one.backward(cotangents).items():
        assert_close(g, gradients[n], 200 * EPS)


BAD = {
    "memory_width": (
        {"memory": np.zeros((2, 2, 5))},
        ValueError,
        r"memory has shape \(2, 2, 5\): expected 4 channels like x",
    ),
    "compressed_width": ({"compressed": np.zeros((2, 2, 5))}, ValueError, "compressed has shape"),
    "projection": ({"w_k": np.zeros((5, 2, 3))}, ValueError, "w_k has shape"),
    "heads": ({"w_v": np.zeros((4, 3, 2))}, ValueError, "w_v has shape"),
    "output": ({"w_o": np.zeros((2, 3, 4))}, ValueError, "w_o has shape"),
    "table": ({"r": np.zeros((2, 6, 3))}, ValueError, "r has shape .* 7 rows"),
    "w_alone": ({"r": None}, ValueError, "w is given without r"),
    "positions": ({"compressed_positions": "start"}, ValueError, "compressed_positions is 'start'"),
    "rate_missing": ({"compressed_positions": "span_end"}, ValueError, "rate is missing"),
    "rate_0": ({"compressed_positions": "span_end", "rate": 0}, ValueError, "rate is 0"),
    "batch": ({"memory": np.zeros((3, 2, 4))}, ValueError, "leading axes"),
    "rank": ({"x": np.zeros(4)}, ValueError, r"x has shape \(4,\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        attention.forward(**{**base(), **change})
