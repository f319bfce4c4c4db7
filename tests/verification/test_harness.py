"""The verifier's own failures that others' tools had: nothing vacuous passes."""

import numpy as np
import pytest
from verification.kernels.dense import attention

import refattn as ra

RIGHT, _ = attention()
MECHANISM = "scaled_dot_product_attention"


def zeros(q, k, v, *, mask=None):
    return np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)


def noise(q, k, v, *, mask=None):
    """Right up to noise of 0.5, which an absolute tolerance of 0.5 lets pass."""
    output = RIGHT(q, k, v, mask=mask)[0]
    return output + np.random.default_rng(0).uniform(-0.5, 0.5, output.shape).astype(q.dtype)


def small_noise(q, k, v, *, mask=None):
    """Relative noise of 1e-3, within the usual allclose of half formats, but the arithmetic is float32."""
    output = RIGHT(q, k, v, mask=mask)[0]
    return output * (1 + 1e-3 * np.random.default_rng(0).uniform(-1, 1, output.shape)).astype(q.dtype)


def input_back(q, k, v, *, mask=None):
    return v[:, :, : q.shape[-2]] if v.shape[:-2] == q.shape[:-2] and q.shape[-2] <= v.shape[-2] else zeros(q, k, v)


def constant(q, k, v, *, mask=None):
    return np.broadcast_to(v.mean(), (*q.shape[:-1], v.shape[-1])).astype(q.dtype)


def one_nan(q, k, v, *, mask=None):
    output = RIGHT(q, k, v, mask=mask)[0].copy()
    output[0, 0, 0, 0] = np.nan
    return output


def all_nan(q, k, v, *, mask=None):
    return np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)


@pytest.mark.parametrize("cheat", [zeros, noise, small_noise, input_back, constant, one_nan, all_nan])
def test_nothing_vacuous_passes(cheat):
    report = ra.verify(cheat, MECHANISM)
    assert report.exit_code == 1
    assert "ok" not in {row.status for row in report.rows if row.probe in ("plain", "mixed", "mask_full", "long_tail")}


def test_zeros_are_called_zeros():
    report = ra.verify(zeros, MECHANISM)
    assert any("zero everywhere" in note for note in report.notes) or report.explanations


def test_minus_infinity_in_the_right_place_passes():
    def masked(q, k, v, *, mask=None):
        return RIGHT(q, k, v, mask=mask)

    report = ra.verify(masked, MECHANISM)
    assert report.ok, report.table()
    row = next(row for row in report.rows if row.probe == "mask_empty")
    assert {j.array for j in row.judgements if j.verdict == "ok"} == {"output", "lse"}


@pytest.mark.parametrize("value", [np.inf, -1e30, 0.0, np.nan])
def test_another_value_in_its_place_does_not(value):
    def masked(q, k, v, *, mask=None):
        output, lse = RIGHT(q, k, v, mask=mask)
        return output, np.where(np.isneginf(lse), value, lse).astype(lse.dtype)

    report = ra.verify(masked, MECHANISM)
    failing = {row.probe for row in report.failing}
    assert "mask_empty" in failing
    assert failing.isdisjoint({"plain", "mixed", "mask_full", "mask_keys"})


def test_nan_in_an_empty_row_is_named():
    def masked(q, k, v, *, mask=None):
        output, lse = RIGHT(q, k, v, mask=mask)
        return np.where(np.isneginf(lse)[..., None], np.nan, output).astype(q.dtype), lse

    report = ra.verify(masked, MECHANISM)
    assert report.exit_code == 1
    assert "empty_row_nan" in {e["class"] for e in report.explanations}


def test_a_leaking_nan_is_named_and_may_be_declared():
    def leaking(q, k, v, *, mask=None):
        logits = q @ np.repeat(k, q.shape[1] // k.shape[1], axis=1).swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
        with np.errstate(all="ignore"):
            logits = logits if mask is None else np.where(mask, logits, -np.inf)
            top = logits.max(axis=-1, keepdims=True)
            weights = np.exp(logits - np.where(np.isfinite(top), top, 0))
            total = weights.sum(axis=-1, keepdims=True)
            weights = weights / np.where(total > 0, total, 1)
            return weights @ np.repeat(v, q.shape[1] // v.shape[1], axis=1)

    report = ra.verify(leaking, MECHANISM)
    assert {row.probe for row in report.failing} == {"poisoned_values"}
    assert report.explanations[0]["class"] == "masked_value_leak"
    declared = ra.verify(leaking, MECHANISM, conventions={"masked_nan": "may_leak"})
    assert declared.ok, declared.table()
    assert any("leaks" in note for note in declared.notes)
