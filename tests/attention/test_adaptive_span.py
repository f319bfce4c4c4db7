"""Adaptive span: gradients, the ramp's ends by hand, definition, stored cases, equivalences, mistakes, bad input, work."""

import numpy as np
import pytest
from contract.cases.adaptive_span import CASES
from support import assert_close, assert_gradients, cases, random_cotangents

import refattn as ra
import refattn.precision
from refattn.attention import adaptive_span

attention = ra.adaptive_span_attention
EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def base(seed=0, **settings):
    return attention.example(rng(seed), **{"b": 2, "h": 2, "q": 3, "k": 8, "d": 3, "e": 2, **settings})


@pytest.mark.parametrize("name", CASES)
def test_definition_and_tiles(name, monkeypatch):
    arguments = base(7, **CASES[name])
    result, pullback = attention.vjp(**arguments, keep_weights=True)
    want = attention.definition(**arguments, keep_weights=True)
    for field in ("output", "lse", "weights", "logits"):
        assert_close(getattr(result, field), getattr(want, field), 60 * EPS)
    cotangents = random_cotangents(attention, result, rng(1))
    gradients = pullback(**cotangents)
    monkeypatch.setattr(adaptive_span, "ROWS", 2)
    tiled, tiled_pullback = attention.vjp(**arguments)
    assert_close(tiled.output, result.output, 20 * EPS)
    for n, g in tiled_pullback(**cotangents).items():
        assert_close(g, gradients[n], 200 * EPS)


def test_gradient_of_the_span_at_both_ends_of_the_ramp():
    """Logits 0, values 1, 0, 0 at distances 1, 2, 3; span 1, ramp 2: weights 1, 1/2, 0, and both ends of the ramp are hit.

    M = 3/2, output = 2/3.  dM/dspan counts 1/2 at each of distances 1 (upper end), 2 (inside) and 3 (lower end):
    d output = (1/2 (1 - 2/3) + 1/2 (0 - 2/3) + 1/2 (0 - 2/3)) / (3/2) = -1/3; d lse = (3/2) / (3/2) = 1.
    """
    arguments = {
        "q": np.zeros((1, 1, 1)), "k": np.zeros((1, 4, 1)), "v": np.array([[[0.0], [0.0], [1.0], [9.0]]]),
        "span": np.array([1.0]), "ramp": 2,
    }  # fmt: skip
    result, pullback = attention.vjp(**arguments)
    assert_close(result.output, [[[2 / 3]]], 2 * EPS)
    assert_close(pullback(output=np.ones((1, 1, 1)))["span"], [-1 / 3], 4 * EPS)
    assert_close(pullback(lse=np.ones((1, 1)))["span"], [1.0], 4 * EPS)


def from_case(a, meta):
    """Arguments and wanted numbers: batch and head are one axis there, the furthest key comes first in the table."""
    o = meta["options"]
    h, n, d = o["nb_heads"], o["attn_span"], a["in_q"].shape[-1]

    def heads(x):
        return x.reshape(-1, h, *x.shape[1:])

    arguments = {
        "q": heads(a["in_q"]), "k": heads(a["in_k"]), "v": heads(a["in_v"]), "key_positions": a["in_key_pe"][0, :, ::-1],
        "ramp": o["ramp"], "max_span": n, "distance_origin": 0, "span": a["w_span_ratio"].reshape(h) * n, "renormalize_eps": 1e-8,
    }  # fmt: skip
    wanted = {c: heads(a["grad_" + c]) for c in "qkv"} | {"key_positions": a["grad_key_pe"][0, :, ::-1]}
    wanted["span"] = a["grad_span_ratio"].reshape(h) / n
    if o["pers_mem_size"]:
        key, value = np.sqrt(d), np.sqrt(o["pers_mem_size"])
        arguments.update(
            persistent_keys=np.swapaxes(a["w_pers_key"], 1, 2) * key, persistent_values=a["w_pers_val"] * value
        )
        wanted.update(
            persistent_keys=np.swapaxes(a["grad_pers_key"], 1, 2) / key, persistent_values=a["grad_pers_val"] / value
        )
    return arguments, wanted, heads(a["out"]), heads(a["cot_out"])


@pytest.mark.parametrize("name, meta, a", list(cases("adaptive_span")), ids=lambda x: x if isinstance(x, str) else "")
def test_stored_cases(name, meta, a):
    arguments, wanted, out, cotangent = from_case(a, meta)
    result, pullback = attention.vjp(**arguments)
    # the peer builds its ramp template in float32: 2**-24 of a distance
    tolerance = max(1e-10, meta.get("suggested_atol") or 0)
    assert_close(result.output, out, tolerance)
    gradients = pullback(cotangent)
    for n, want in wanted.items():
        assert_close(gradients[n], want, 10 * tolerance)
    o = meta["options"]
    loss = ra.span_penalty(arguments["span"], coefficient=o["span_loss_coeff"], max_span=o["attn_span"])
    assert_close(loss, a["out_span_loss"], 1e-7)


def test_a_span_over_everything_is_attention_with_key_positions():
    r = rng(9)
    q, k, v = r.standard_normal((2, 4, 3)), r.standard_normal((2, 9, 3)), r.standard_normal((2, 9, 2))
    table = r.standard_normal((3, 5))
    got = attention.forward(q, k, v, span=np.full(2, 5.0), key_positions=table)
    distance = np.arange(4)[:, None] + 5 - np.arange(9)
    seen = (distance >= 1) & (distance <= 5)
    bias = 3**-0.5 * np.take_along_axis(q @ table, np.broadcast_to(np.clip(distance - 1, 0, 4), (2, 4, 9)), -1)
    want = ra.scaled_dot_product_attention.forward(q, k, v, bias=bias, mask=seen)
    assert_close(got.output, want.output, 40 * EPS)
    assert_close(got.lse, want.lse, 40 * EPS)


def test_poison_beyond_the_reach_and_behind_the_mask():
    arguments = base(10, q=4, k=12, span=np.array([1.0, 2.0]), ramp=1.0, max_span=8)
    want, want_back = attention.vjp(**arguments)
    dirty = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    dirty["k"][:, :, :4], dirty["v"][:, :, :4] = np.nan, np.inf
    result, pullback = attention.vjp(**dirty)
    assert np.array_equal(result.output, want.output)
    for n, g in pullback(np.ones_like(result.output)).items():
        assert np.array_equal(g, want_back(np.ones_like(want.output))[n]), n


def test_work_follows_the_largest_current_span():
    sizes = {"b": 1, "h": 4, "q": 512, "k": 512 + 4096, "d": 16, "max_span": 4096}
    narrow, wide = (attention.cost(**sizes, span=s) for s in (100, 4096))
    assert narrow.multiplies == 512 * 4 * 132 * (3 * 16)
    assert wide.multiplies == 512 * 4 * 4096 * (3 * 16)
    assert narrow.computed_multiplies < 0.06 * wide.computed_multiplies
    counted = ra.precision.counting()
    arguments = attention.example(
        rng(), b=2, h=2, q=70, k=300, d=4, e=3, max_span=200, span=np.array([40.0, 3.0]), ramp=4
    )
    attention.forward(**{n: counted.asarray(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()})
    want = attention.cost(b=2, h=2, q=70, k=300, d=4, e=3, max_span=200, span=40, ramp=4)
    assert counted.counts.multiplies == want.computed_multiplies


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4)])
def test_span_penalty(shape):
    span = 5 * rng(4).random(shape)
    assert_close(ra.span_penalty(span, coefficient=2e-6, max_span=8), 2e-6 * span.mean(), EPS)
    assert_gradients(ra.span_penalty, {"span": span, "coefficient": 0.5, "max_span": 8}, rng())


BAD = {
    "negative_span": ({"span": np.array([-1.0, 2.0])}, "span reaches from -1 to 2: expected within"),
    "wide_span": ({"span": np.array([1.0, 6.0])}, r"expected within \[0, max_span\] = \[0, 5\]"),
    "nan_span": ({"span": np.array([np.nan, 1.0])}, "span reaches from nan"),
    "span_shape": ({"span": np.zeros(3)}, r"span has shape \(3,\): expected \(2,\)"),
    "table": ({"key_positions": np.zeros((3, 4))}, r"key_positions has shape \(3, 4\)"),
    "missing": ({"q": np.zeros((2, 2, 8, 3)), "max_span": None, "key_positions": None}, "max_span is missing"),
    "more_queries": ({"q": np.zeros((2, 2, 9, 3))}, "q has 9 positions and k has 8"),
    "ramp": ({"ramp": 0}, "ramp is 0: expected a number above 0"),
    "origin": ({"distance_origin": 2}, "distance_origin is 2"),
    "eps": ({"renormalize_eps": -1.0}, "renormalize_eps is -1.0"),
    "slots": (
        {"persistent_keys": np.zeros((2, 1, 4)), "persistent_values": np.zeros((2, 1, 2))},
        "persistent_keys has shape",
    ),
    "heads": ({"k": np.zeros((2, 3, 8, 3))}, "k has shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        attention.forward(**{**base(), **change})


def test_half_of_the_slots_missing_and_foreign_options():
    with pytest.raises(TypeError, match="go together"):
        attention.forward(**base(), persistent_keys=np.zeros((2, 1, 3)))
    with pytest.raises(TypeError, match="adaptive_span_attention has no option 'bias'"):
        attention.forward(**base(), bias=np.zeros((3, 8)))
    with pytest.raises(TypeError, match="mask has dtype float64"):
        attention.forward(**base(), mask=np.ones((3, 8)))


@pytest.mark.parametrize("sizes", [{"b": 0}, {"q": 0}, {"h": 0}])
def test_empty_axes(sizes):
    arguments = attention.example(rng(), **{"b": 2, "h": 2, "q": 3, "k": 8, **sizes})
    result, pullback = attention.vjp(**arguments)
    gradients = pullback(np.ones_like(result.output))
    assert all(g.shape == np.shape(arguments[n]) for n, g in gradients.items())


def test_large_logits_beyond_the_span_leave_the_lse_alone():
    """With renormalize_eps the sum runs over keys of weight 0 too: far larger logits there take all weight, not the lse."""
    q, v = np.ones((1, 1, 1)), np.array([[[1.0], [2.0], [3.0], [0.0]]])
    k = np.array([[[2000.0], [1.0], [1.0], [0.0]]])  # the furthest key has ramp 0
    given = {"q": q, "k": k, "v": v, "span": np.array([1.0]), "ramp": 1.0, "scale": 1.0, "renormalize_eps": 1e-3}
    result, pullback = attention.vjp(**given)
    _, definition = attention.definition.vjp(**given)
    assert_close(result.lse, np.array([[1.0]]), 1e-15)  # the nearest key alone: weights 1, 0, 0
    assert (result.output == 0).all()
    d = {"output": np.ones((1, 1, 1)), "lse": np.ones((1, 1))}
    gradients, wanted = pullback(**d), definition(**d)
    assert_close(gradients["q"], np.array([[[1.0]]]), 1e-14)
    for name in ("q", "k", "v"):
        assert_close(gradients[name], wanted[name], 1e-14)


def test_a_key_of_weight_zero_may_be_nan():
    q, v = np.ones((1, 1, 1)), np.array([[[1.0], [2.0], [3.0], [0.0]]])
    k = np.array([[[1.0], [np.nan], [2.0], [0.0]]])
    result = attention.forward(
        q, k, v, span=np.array([1.0]), ramp=1.0, scale=1.0
    )  # distance 2 is the far end of the ramp
    assert_close(result.lse, np.array([[2.0]]), 1e-15)
    assert_close(result.output, np.array([[[3.0]]]), 1e-15)
