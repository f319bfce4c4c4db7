"""Mistakes of Talking-Heads attention: its own show, with derivatives of what they compute; those of softmax attention are lifted."""

import numpy as np
import pytest
from contract.cases.talking_heads import CASES, SHOWING, B, H, K, Q, arguments
from mistake_slopes import assert_slopes

import refattn as ra
from refattn.definitions.talking_heads import TalkingHeads
from refattn.mistakes.engine import Case
from refattn.mistakes.talking_heads import catalogue

CALLS = {n: arguments(n) for n in ("plain", "dynamic", "together", *SHOWING)}
CALLS["capped"] = arguments("square", softcap=1.3)
CALLS["long"] = arguments("dynamic", q=11, k=9)

CALLS["default"] = {n: x for n, x in CALLS["square_plain"].items() if n != "scale"}


def cotangents_of(call, seed=9):
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(np.shape(x)) for n, x in call.result().items() if n in ("output", "lse")}


@pytest.fixture(scope="module")
def calls():
    return {n: Case(TalkingHeads, a, cotangents_of(TalkingHeads(a))) for n, a in CALLS.items()}


@pytest.mark.parametrize("mistake", catalogue.own, ids=lambda m: m.edit.__name__)
def test_own_mistakes_show_with_their_derivatives(calls, mistake):
    if mistake.class_ == "masked_value_leak":
        return  # below
    if "both" not in mistake.sides:
        kind = "results" if "forward" in mistake.sides else "gradients"
        assert any(getattr(c, kind)(mistake, mistake.sides[0]) for c in calls.values())
        return
    shown = [n for n, c in calls.items() if c.results(mistake) is not None]
    assert shown
    for name in shown[:3]:
        assert_slopes(mistake, CALLS[name], calls[name].right.cotangents, np.random.default_rng(1), fixed=("maximum",))


def test_hidden_values_leak():
    given = arguments("plain", mask=np.arange(K) != 2)
    given["v"] = given["v"].copy()
    given["v"][0, :, 2] = np.nan
    leaked = Case(TalkingHeads, given).results(entry("masked_value_leak"))
    assert np.isnan(leaked["output"][0]).all()
    assert np.isfinite(leaked["output"][1]).all()


def entry(class_, says=""):
    return next(m for m in catalogue if m.class_ == class_ and says in m.says)


@pytest.mark.parametrize("class_, name, changed", [
    ("causal_drop", "together", {"causal": False}),
    ("mask_drop", "square", {"mask": None}),
    ("bias_drop", "square", {"bias": None}),
    ("cap_drop", "together", {"softcap": None}),
    ("drop_scale", "square_dropout", {"dropout_rate": 0.0}),
    ("no_scale", "plain", {"scale": 1.0}),
    ("th_projection_drop", "square_plain", {"logits_projection": None, "weights_projection": None}),
    ("th_dynamic_dropped", "dynamic", {"query_logits": None, "key_logits": None}),
])  # fmt: skip
def test_mistaken_options_are_those_options(calls, class_, name, changed):
    want = ra.talking_heads_attention.forward(**{**CALLS[name], **changed})
    got = calls[name].results(entry(class_))
    np.testing.assert_allclose(got["output"], want.output, rtol=0, atol=1e-13)
    np.testing.assert_allclose(got["lse"], want.lse, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["together", "long"])
def test_every_mistake_can_be_asked(calls, name):
    for mistake in catalogue:
        for side in mistake.sides:
            calls[name].results(mistake, side)
            calls[name].gradients(mistake, side)


@pytest.mark.parametrize("name", CASES)
def test_steps_and_mechanism_agree(name):
    given = arguments(name)
    result, pullback = ra.talking_heads_attention.vjp(**given)
    call = TalkingHeads(given)
    cotangents = cotangents_of(call)
    np.testing.assert_allclose(call.output, result.output, rtol=0, atol=1e-13)
    for n, x in pullback(**cotangents).items():
        want = call.pull(**cotangents).gradient([n])[n]
        np.testing.assert_allclose(x, want, rtol=0, atol=1e-12 * max(1, np.max(np.abs(want))))


def test_loops_agree():
    """Query by query and head by head, as the equations stand."""
    given = arguments("dynamic")
    q, k, v = (given[n] for n in "qkv")
    output = np.zeros((B, v.shape[1], Q, v.shape[-1]))
    for b, i in np.ndindex(B, Q):
        products = 0.5 * np.einsum("xd,xkd->xk", q[b, :, i], k[b])
        before = given["logits_projection"] + given["query_logits"][b, i] + given["key_logits"][b]  # (k, x, h)
        logits = np.stack([[products[:, j] @ before[j][:, h] for j in range(K)] for h in range(H)])
        weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        behind = given["weights_projection"] + given["query_weights"][b, i] + given["key_weights"][b]
        for y in range(v.shape[1]):
            mixed = [weights[:, j] @ behind[j][:, y] for j in range(K)]
            output[b, y, i] = mixed @ v[b, y]
    np.testing.assert_allclose(TalkingHeads(given).output, output, rtol=0, atol=1e-13)
