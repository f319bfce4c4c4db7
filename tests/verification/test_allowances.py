"""Errors that a declaration about rounding explains: which one is named, that declared it passes, that formulas are none."""

import dataclasses
import functools

import numpy as np
import pytest
from verification.calibrate import DENSE, judged, question_of
from verification.kernels_right.faults import kernel

from refattn.verification.allowances import allowances, explained_by_allowance
from refattn.verification.probes import Plan
from refattn.verification.truth import truth_of


@dataclasses.dataclass(frozen=True)
class Call:
    probe: str
    dtype: str
    size: int
    truth: object
    got: dict
    failing: tuple
    leak: bool = False


@functools.cache
def made():
    plan = Plan(DENSE)
    wanted = ("plain", "mixed", "large_logits", "same_signs")
    return plan.build_all([e for e in (*plan.alone(), *plan.special()) if e.name in wanted])


def calls_of(run, dtype, **declared):
    found = []
    for probe in made():
        question = question_of(DENSE, probe, dtype, **declared)
        truth = truth_of(question)
        got = run(question.arrays, question.options, question.cotangents)
        failing = tuple(name for name, j, _ in judged(truth, got) if not j.ok)
        found.append(Call(probe.name, dtype, probe.size, truth, got, failing))
    return found


KINDS = {
    "tf32": ({"operands": 13}, "float32", "narrow_products", {"compute": "tf32"}, '{"compute": "tf32"}'),
    "bfloat16": ({"operands": 16}, "float32", "narrow_products", {"compute": "bfloat16"}, '{"compute": "bfloat16"}'),
    "scores": ({"scores": True}, "bfloat16", "scores_in_storage", {"scores": "storage"}, '{"scores": "storage"}'),
    "exp": (
        {"exp_error": 3e-5}, "float32", "rough_exponential", {"allow": (("exp", 3e-5),)}, '{"allow": {"exp": 5e-05}}',
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_named_with_the_record_that_declares_it(kind):
    change, dtype, name, _, record = KINDS[kind]
    calls = calls_of(functools.partial(kernel, **change), dtype)
    assert any(c.failing for c in calls)
    (found,) = explained_by_allowance(calls)
    assert (found.allowance.name, found.dtype) == (name, dtype)
    assert found.allowance.record == record
    assert found.as_record()["says"].endswith(f"if by design: --conventions '{record}'")
    assert found.residual < 4


@pytest.mark.parametrize("kind", KINDS)
def test_declared_it_passes(kind):
    change, dtype, _, declared, _ = KINDS[kind]
    assert [c.failing for c in calls_of(functools.partial(kernel, **change), dtype, **declared)] == [()] * 4


def test_a_formula_is_no_rounding():
    def wrong(arrays, options, cotangents):
        return kernel(arrays | {"q": arrays["q"] * np.float32(1.1)}, options, cotangents)

    assert explained_by_allowance(calls_of(wrong, "float32")) == []


def test_two_dtypes_are_explained_apart():
    calls = calls_of(functools.partial(kernel, operands=13), "float32") + calls_of(kernel, "bfloat16")
    assert [e.dtype for e in explained_by_allowance(calls)] == ["float32"]


def test_what_a_dtype_cannot_have_is_not_offered():
    offered = {dtype: [a.record for a in allowances(dtype)] for dtype in ("float64", "float32", "float16", "bfloat16")}
    assert '{"compute": "float32"}' in offered["float64"]
    assert '{"compute": "float32"}' not in offered["float32"]
    assert '{"scores": "storage"}' in offered["float16"]
    assert '{"scores": "storage"}' not in offered["float32"]
    assert not any("compute" in record for record in offered["bfloat16"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_row_sum_kept_in_the_storage_dtype_is_named(dtype):
    """Key after key: a narrow sum stops growing, which no random error does."""

    def narrow(arrays, options, cotangents):
        q, k, v = (arrays[n].astype(np.float32) for n in ("q", "k", "v"))
        k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        s = (options.get("scale") or q.shape[-1] ** -0.5) * (q @ k.swapaxes(-1, -2))
        p = np.exp(s - (top := s.max(-1, keepdims=True)))
        total = np.zeros(top.shape, arrays["q"].dtype)
        for column in range(p.shape[-1]):
            total += p[..., column : column + 1].astype(total.dtype)
        total = total.astype(np.float32)
        return {"output": (p @ v / total).astype(arrays["q"].dtype), "lse": (top + np.log(total))[..., 0]}

    plain = [c for c in calls_of(narrow, dtype) if c.probe == "plain"]
    assert plain[0].failing
    (found,) = explained_by_allowance(plain)
    assert found.allowance.name == "low_prec_accum"
    assert found.allowance.record.startswith('{"allow": {"sum": ')
