"""linformer_attention: gradients, definition, identity projections, stored cases, counts, mistakes."""

import array_api_strict
import numpy as np
import pytest
from support import assert_adjoint, assert_close, assert_gradients, cases, random_cotangents

from refattn import precision
from refattn.attention.linformer import linformer_attention as attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def arguments(seed=0, **more):
    return attention.example(rng(seed), **{"b": 2, "h": 2, "q": 3, "k": 5, "n": 4, "d": 3, "e": 2, **more})


@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"n": 1}, {"k": 2}], ids=str)
def test_gradients_by_complex_step(options):
    names = ["v", "e_v"] if options.get("n") == 1 else None  # one row: its weight is 1, the others' gradient is 0
    assert_gradients(attention, arguments(**options), rng(1), names=names)
    assert_adjoint(attention, arguments(**options), rng(2))


def test_equals_definition_with_leading_axes():
    draw = rng(3)
    q, k, v = draw.standard_normal((3, 1, 2, 4, 3)), draw.standard_normal((2, 2, 6, 3)), draw.standard_normal((2, 6, 5))
    given = {"q": q, "k": k, "v": v, "e_k": draw.standard_normal((6, 4)), "e_v": draw.standard_normal((6, 4))}
    result = attention.forward(**given)
    assert result.output.shape == (3, 2, 2, 4, 5)
    assert_close(result.output, attention.definition(**given).output, 100 * EPS)  # sums of 6, 3 and 4 terms
    assert_close(attention(**given, scale=0.3), attention.definition(**given, scale=0.3).output, 100 * EPS)
    assert_adjoint(attention, given, rng(4))


def test_identity_projections_are_full_attention():
    given = arguments(5, k=7, n=7)
    given.update(e_k=np.eye(7), e_v=np.eye(7))
    result, pullback = attention.vjp(**given)
    qkv = {n: given[n] for n in "qkv"}
    want, back = scaled_dot_product_attention.vjp(**qkv)
    assert_close(result.output, want.output, 20 * EPS)
    cotangent = random_cotangents(attention, result, rng(5))
    for n, g in back(**cotangent).items():
        assert_close(pullback(**cotangent)[n], g, 50 * EPS)


def test_strict_namespace():
    given = arguments(6)
    strict = {n: array_api_strict.asarray(x) for n, x in given.items()}
    want, back = attention.vjp(**given)
    got, back_strict = attention.vjp(**strict)
    cotangents = random_cotangents(attention, want, rng(6))
    assert_close(np.asarray(got.output), want.output, 20 * EPS)
    for n, g in back_strict(output=array_api_strict.asarray(cotangents["output"])).items():
        assert_close(np.asarray(g), back(**cotangents)[n], 50 * EPS)


def test_half_precision_is_computed_in_float32():
    given = {n: x.astype(np.float16) for n, x in arguments(7).items()}
    output = attention(**given)
    assert output.dtype == np.float16
    assert_close(output, attention.definition(**given).output, 2 * 2.0**-11)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_cost_equals_counted_products(direction):
    sizes = {"b": 2, "h": 3, "q": 10, "k": 14, "n": 5, "d": 6, "e": 4}
    counter = precision.counting()
    given = {n: counter.asarray(x) for n, x in attention.example(rng(8), **sizes).items()}
    result, pullback = attention.vjp(**given)
    if direction == "backward":
        counter.counts.reset()
        pullback(counter.asarray(np.ones(result.output.shape)))
    assert counter.counts.multiplies == attention.cost(**sizes, direction=direction).computed_multiplies


def test_cost_is_linear_in_the_length():
    counts = [attention.cost(q=n, k=n, n=256, d=64, direction="both").multiplies for n in (1024, 4096)]
    assert counts[1] == 4 * counts[0]


@pytest.mark.parametrize("name, meta, arrays", list(cases("linformer")), ids=lambda x: x if isinstance(x, str) else "")
def test_stored_cases(name, meta, arrays):
    """A module: tokens to heads by one matrix each, attention, and back; a table for longer sequences is cut."""
    x, h = arrays["in_x"], meta["options"]["heads"]
    b, t, _ = x.shape

    def heads(w):
        return (x @ w.T).reshape(b, t, h, -1).swapaxes(1, 2)

    def joined(y):
        return y.swapaxes(1, 2).reshape(b, t, -1)

    weights = {c: arrays[f"in_to_{c}__weight"] for c in "qkv"}
    given = {c: heads(w) for c, w in weights.items()}
    given.update(e_k=arrays["in_proj_k"][:t], e_v=arrays["in_proj_v"][:t])
    result, pullback = attention.vjp(**given)
    out = joined(result.output) @ arrays["in_to_out__weight"].T + arrays["in_to_out__bias"]
    assert_close(out, arrays["out"], 1e-9)
    assert_close(attention.definition(**given).output, result.output, 1e-12)
    d = (arrays["cot_out"] @ arrays["in_to_out__weight"]).reshape(b, t, h, -1).swapaxes(1, 2)
    gradients = pullback(d)
    for c in "qkv":
        assert_close(np.einsum("btf,btm->fm", joined(gradients[c]), x), arrays[f"grad_to_{c}__weight"], 1e-8)
        assert_close(gradients["e_" + c] if c != "q" else 0.0, arrays[f"grad_proj_{c}"][:t] if c != "q" else 0.0, 1e-8)
    assert_close(sum(joined(gradients[c]) @ weights[c] for c in "qkv"), arrays["grad_x"], 1e-8)


@pytest.mark.parametrize("mutation", attention.mutations, ids=lambda m: m.says.replace(" ", "_"))
def test_mistakes_differ(mutation):
    given = arguments(9)
    result, pullback = attention.vjp(**given)
    cotangents = random_cotangents(attention, result, rng(9))
    if mutation.forward is not None:
        assert np.abs(mutation.forward(given).output - result.output).max() > 1e-3
    else:
        wrong, right = mutation.gradients(given, cotangents), pullback(**cotangents)
        assert max(np.abs(wrong[n] - right[n]).max() for n in wrong) > 1e-3


def test_a_mistake_that_does_not_show_says_so():
    given = arguments(10)
    given["e_v"] = given["e_k"]
    silent = [m.class_ for m in attention.mutations if m.forward is not None and m.forward(given) is None]
    assert silent == ["linformer_shared"]


BAD = {
    "rows": ({"e_k": np.zeros((6, 4))}, ValueError, "e_k has shape (6, 4): its axis 'k'"),
    "columns": ({"e_v": np.zeros((5, 3))}, ValueError, "e_v has shape (5, 3): its axis 'n'"),
    "channels": ({"k": np.zeros((2, 2, 5, 4))}, ValueError, "k has shape (2, 2, 5, 4): its axis 'd'"),
    "scale": ({"scale": float("inf")}, ValueError, "scale is inf"),
    "causal": ({"causal": True}, TypeError, "has no option 'causal'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind) as caught:
        attention.forward(**{**arguments(), **change})
    assert message in str(caught.value)
