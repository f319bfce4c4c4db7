"""Right kernels pass and faults of precision do not: one seed at small sizes (`make calibrate` takes twenty, and all probes)."""

import functools

import pytest
from verification.calibrate import DENSE, DTYPES, composed_take, dense, power
from verification.kernels_right import VARIANTS
from verification.kernels_right.faults import FAULTS

from refattn.verification.probes import Plan


@functools.cache
def small_probes():
    plan = Plan(DENSE, accepts=composed_take)
    made = plan.build_all([*plan.alone(), *plan.special()])
    return [p for p in made if p.size < 16_000][::2]


def test_the_variants_are_many():
    assert len(VARIANTS) >= 200


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_right_kernel_is_accused(dtype):
    found = dense(0, dtype, 12, small_probes())
    assert found.count > 700
    assert found.failed == []
    # Room is left for kernels that are not here, and none is so wide that nothing would be seen.
    assert max(x[0] for x in found.seen.values()) < 4 / 1.2
    assert max(x[1] for x in found.seen.values()) < 0.75 / 1.2
    assert all(found.seen[name, dtype][0] > 0.3 for name in ("output", "lse", "d_q", "d_k", "d_v"))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_precision_is_seen(name):
    maximum, median, where = power(name, 0, FAULTS[name].dtypes[-1])
    assert maximum > 1.2 * 4 or median > 1.2 * 0.75, where
