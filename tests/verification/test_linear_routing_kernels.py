"""The verifier on kernels of linear and routing attention: passes the right one, names what is wrong."""

import pytest
from verification.linear_routing_kernels import linear, routing

import refattn as ra


@pytest.mark.parametrize(("name", "kernel"), [("linear_attention", linear), ("routing_attention", routing)])
def test_the_right_kernel_passes(name, kernel):
    forward, backward = kernel()
    report = ra.verify(forward, name, backward=backward)
    assert report.ok, report.table()


@pytest.mark.parametrize(
    ("name", "class_", "kernel"),
    [
        ("linear_attention", "norm_future", linear(future_sum=True)),
        ("linear_attention", "state_cotangent", linear(state_ignored=True)),
        ("routing_attention", "routing_sum_not_mean", routing(summed=True)),
        ("routing_attention", "routing_rank_leak", routing(by_rank=True)),
        ("routing_attention", "grad_overwritten", routing(overwritten=True)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_wrong_kernel_is_found_and_its_mistake_named(name, class_, kernel):
    forward, backward = kernel
    report = ra.verify(forward, name, backward=backward)
    assert not report.ok
    assert class_ in report.explanations[0]["class"].split(" + "), report.explanations
