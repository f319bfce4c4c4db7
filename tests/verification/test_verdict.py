"""Verdict: thresholds on right kernels, what must fail, and where it says the error is."""

import numpy as np
import pytest

import refattn as ra
from refattn.verification.conventions import CONVENTION_OPTIONS, Conventions
from refattn.verification.locate import axes_of, locate
from refattn.verification.probes import probes
from refattn.verification.question import Question
from refattn.verification.truth import ReferenceNaNError, truth_of
from refattn.verification.verdict import THRESHOLDS, judge

DENSE = ra.scaled_dot_product_attention


def asked(probe, dtype, gradients=True, conventions=None):
    arguments, cotangents = probe.stored(dtype)
    arrays = {n: arguments[n] for n in probe.positional}
    options = {n: x for n, x in arguments.items() if n not in probe.positional}
    wrt = probe.wrt if gradients else ()
    return Question(
        DENSE,
        arrays,
        options,
        cotangents if gradients else {},
        wrt,
        dtype,
        conventions or Conventions(),
        frozenset(CONVENTION_OPTIONS),
    )


@pytest.fixture(scope="module")
def mixed():
    return truth_of(asked(next(p for p in probes(DENSE) if p.name == "mixed"), "float32"))


def test_thresholds_are_not_idle(mixed):
    """An error of the storage format's last place in every element is seen by the median, one large one by the maximum."""
    right = mixed.values["output"].astype(np.float32)
    assert judge("output", right, mixed).ok
    everywhere = judge("output", (right * np.float32(1 + 2**-18)), mixed)
    assert not everywhere.ok
    assert everywhere.median > THRESHOLDS["float32"]["derived"][1]
    one = right.copy()
    one[1, 2, 3, 4] += 1e-4
    found = judge("output", one, mixed)
    assert not found.ok
    assert found.median < THRESHOLDS["float32"]["derived"][1]
    assert found.where["worst"] == {"b": 1, "h": 2, "q": 3, "e": 4}


def test_worst_case_bound_means_certainty(mixed):
    right = mixed.values["output"].astype(np.float32)
    barely = right.copy()
    barely[0, 0, 0, 0] += 6 * mixed.bounds["output"][0, 0, 0, 0]
    far = right.copy()
    far[0, 0, 0, 0] += 2 * mixed.worst["output"][0, 0, 0, 0]
    assert mixed.worst["output"][0, 0, 0, 0] > 6 * mixed.bounds["output"][0, 0, 0, 0]
    assert [judge("output", x, mixed).ok for x in (barely, far)] == [False, False]
    assert [judge("output", x, mixed).certain for x in (barely, far)] == [False, True]


def test_wrong_shape_and_dtype_are_mismatches(mixed):
    right = mixed.values["output"].astype(np.float32)
    assert judge("output", right[0], mixed).says == f"shape {right[0].shape}, expected {right.shape}"
    assert "dtype float64" in judge("output", right.astype(np.float64), mixed, dtype=np.float32).says
    assert not judge("output", right.astype(int), mixed).ok
    assert judge("output", None, mixed).verdict == "not provided"


def test_gradients_that_cancel_have_a_floor():
    """One key: the gradients of q and k are 0, and rounding of the row term must be allowed to show."""
    question = asked(next(p for p in probes(DENSE) if p.name == "one_key"), "bfloat16")
    question.cotangents.pop("lse")
    truth = truth_of(question)
    assert not truth.values["d_q"].any()
    keys = np.repeat(question.arrays["k"].astype(np.float64), 3, axis=1) * 20**-0.5
    noise = 2.0**-9 * keys * np.ones(truth.values["d_q"].shape)  # an error of the row term times scale times k
    assert judge("d_q", noise.astype(np.float32), truth).ok
    assert not judge("d_q", (100 * noise).astype(np.float32), truth).ok


def test_mean_rows_of_a_declared_convention_have_a_bound():
    probe = next(p for p in probes(DENSE) if p.name == "mask_empty")
    truth = truth_of(asked(probe, "float32", conventions=Conventions(empty_rows="mean")))
    exact = truth.values["output"]
    assert exact[0, 0, 4].any()
    assert judge("output", (exact * (1 + 2e-8)).astype(np.float32), truth).ok
    assert not judge("output", (exact * (1 + 2e-6)).astype(np.float32), truth).ok


def test_reference_nan_is_our_error(monkeypatch):
    probe = next(p for p in probes(DENSE) if p.name == "mixed")
    broken = ra.mechanism.Mechanism.forward if hasattr(ra, "mechanism") else type(DENSE).forward

    def poisoned(self, *args, **kwargs):
        result = broken(self, *args, **kwargs)
        result.output[0, 0, 0, 0] = np.nan
        return result

    monkeypatch.setattr(type(DENSE), "forward", poisoned)
    with pytest.raises(ReferenceNaNError, match="NaN in output"):
        truth_of(asked(probe, "float32", gradients=False))


def test_a_nan_that_an_input_explains_is_right():
    """A NaN in a key that some rows see reaches these rows, and must be there in the candidate's output too."""
    probe = next(p for p in probes(DENSE) if p.name == "causal_on")
    question = asked(probe, "float32", gradients=False)
    question.arrays["k"][0, 0, 20] = np.nan
    truth = truth_of(question)
    hit = np.isnan(truth.values["output"])
    assert hit.any()
    assert not hit.all()
    right = truth.values["output"].astype(np.float32)
    assert judge("output", right, truth).ok
    assert not judge("output", np.nan_to_num(right), truth).ok


def test_locate_names_heads_rows_and_tiles():
    units = np.zeros((2, 6, 200, 3))
    units[:, 4, 128:, :] = 9.0
    units[1, 4, 150, 2] = 99.0
    found = locate(units > 4, units, "output")
    assert found["worst"] == {"b": 1, "h": 4, "q": 150, "e": 2}
    assert found["first"] == {"b": 0, "h": 4, "q": 128, "e": 0}
    assert found["only"] == {"h": [4], "q": list(range(128, 200))}
    assert found["starts_at_multiple_of"] == 128
    assert found["share"] == pytest.approx(72 / 1200)


def test_axis_letters():
    assert axes_of("d_bias", 3) == ["h", "q", "k"]
    assert axes_of("output", 5) == ["b0", "b", "h", "q", "e"]
    assert axes_of("d_sinks", 1) == ["h"]
    assert axes_of("memory", 2) == ["axis0", "axis1"]
