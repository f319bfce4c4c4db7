"""The verifier on kernels of LSH attention: passes the right one, backward included, and names what is wrong."""

import pytest
from verification.lsh_kernels import lsh

import refattn as ra


def test_the_right_kernel_passes():
    forward, backward = lsh()
    report = ra.verify(forward, "lsh_attention", backward=backward)
    assert report.ok, report.table()


@pytest.mark.parametrize(
    ("class_", "flag"),
    [
        ("lsh_duplicates", "no_counts"),
        ("lsh_look_back_missing", "no_look_back"),
        ("lsh_key_not_normalised", "plain_keys"),
        ("lsh_round_weights_constant", "constant_weights"),
        ("lsh_key_role_missing", "no_key_role"),
    ],
)
def test_a_wrong_kernel_is_found_and_its_mistake_named(class_, flag):
    forward, backward = lsh(**{flag: True})
    report = ra.verify(forward, "lsh_attention", backward=backward)
    assert not report.ok
    assert class_ in report.explanations[0]["class"].split(" + "), report.explanations
