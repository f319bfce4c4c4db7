"""Mistakes of multi-head attention: its own show, with derivatives of what they compute; those of softmax attention are lifted."""

import numpy as np
import pytest
from contract.cases.multi_head import CASES, B, D, E, G, H, K, Q, base
from mistake_slopes import assert_slopes

import refattn as ra
from refattn.definitions.multi_head import MultiHead
from refattn.mistakes.engine import Case, differs
from refattn.mistakes.multi_head import catalogue


def drawn(seed):
    return np.random.default_rng(seed)


def extra(seed=4, e=E):
    return {"extra_key": drawn(seed).standard_normal((G, D)), "extra_value": drawn(seed + 1).standard_normal((G, e))}


CALLS = {
    "plain": base(0),
    "extra": {**base(1), **extra(), "zero_attention": True, "causal": True, "align": 1, "mask": drawn(3).random((B, 1, Q, K)) < 0.7},
    "extra_dropout": {
        **base(2, e=D), **extra(e=D), "zero_attention": True, "dropout_rate": 0.25, "softcap": 1.5,
        "dropout_mask": drawn(5).random((B, H, Q, K + 2)) < 0.7, "bias": drawn(6).standard_normal((H, Q, K)),
    },
    "shared": base(2, shared=2, k=Q),
    "alike": base(3, k=Q, g=H, e=D),
    "wide": base(3, k=Q, m=H * D),
}  # fmt: skip


def cotangents_of(call, seed=9):
    return {n: drawn(seed).standard_normal(np.shape(x)) for n, x in call.result().items() if n in ("output", "lse")}


@pytest.fixture(scope="module")
def calls():
    return {n: Case(MultiHead, a, cotangents_of(MultiHead(a))) for n, a in CALLS.items()}


@pytest.mark.parametrize("mistake", catalogue.own, ids=lambda m: m.edit.__name__)
def test_own_mistakes_show_with_their_derivatives(calls, mistake):
    if "both" not in mistake.sides:
        assert any(c.gradients(mistake, "backward") for c in calls.values())
        return
    shown = [n for n, c in calls.items() if c.results(mistake) is not None]
    assert shown
    for name in shown[:2]:
        assert_slopes(mistake, CALLS[name], calls[name].right.cotangents, drawn(1), fixed=("maximum",))


def entry(class_, says=""):
    return next(m for m in catalogue if m.class_ == class_ and says in m.says)


@pytest.mark.parametrize("class_, name, changed", [
    ("causal_drop", "extra", {"causal": False}),
    ("mask_drop", "extra", {"mask": None}),
    ("bias_drop", "extra_dropout", {"bias": None}),
    ("cap_drop", "extra_dropout", {"softcap": None}),
    ("drop_scale", "extra_dropout", {"dropout_rate": 0.0}),
    ("no_scale", "plain", {"scale": 1.0}),
    ("gqa_tile", "plain", {"head_map": "tile"}),
    ("extra_key_drop", "extra", {"extra_key": None, "extra_value": None}),
    ("zero_attention_drop", "extra", {"zero_attention": False}),
])  # fmt: skip
def test_mistaken_options_are_those_options(calls, class_, name, changed):
    want = ra.multi_head_attention.forward(**{**CALLS[name], **changed})
    got = calls[name].results(entry(class_))
    np.testing.assert_allclose(got["output"], want.output, rtol=0, atol=1e-13)
    np.testing.assert_allclose(got["lse"], want.lse, rtol=0, atol=1e-13)


def test_lifted_gradients_are_pulled_through_the_projections(calls):
    case = calls["shared"]
    wrong = case.gradients(entry("gqa_grad_nosum"), "backward")
    right = case.right.gradient()
    assert not differs({n: right[n] for n in ("w_q", "w_o", "b_v", "b_q") if n != "b_v"}, wrong)
    assert np.max(np.abs(wrong["w_k"] - right["w_k"])) > 1e-3


@pytest.mark.parametrize("name", ["extra", "extra_dropout"])
def test_every_mistake_can_be_asked(calls, name):
    for mistake in catalogue:
        for side in mistake.sides:
            calls[name].results(mistake, side)
            calls[name].gradients(mistake, side)


@pytest.mark.parametrize("name", CASES)
def test_steps_and_mechanism_agree(name):
    arguments = base(0, **CASES[name])
    result, pullback = ra.multi_head_attention.vjp(**arguments)
    call = MultiHead(arguments)
    cotangents = cotangents_of(call)
    np.testing.assert_allclose(call.output, result.output, rtol=0, atol=1e-13)
    for n, x in pullback(**cotangents).items():
        want = call.pull(**cotangents).gradient([n])[n]
        np.testing.assert_allclose(x, want, rtol=0, atol=1e-12 * max(1, np.max(np.abs(want))))
