"""Broken kernels are named, right ones are never blamed."""

import numpy as np
import pytest
from verification.kernels.dense import attention

import refattn as ra

BROKEN = {
    "causal_other": {"diagonal": lambda q, k: 0},
    "gqa_grad_nosum": {"sum_over_group": False},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_named(name):
    forward, backward = attention(**BROKEN[name])
    gradients = name == "gqa_grad_nosum"
    report = ra.verify(forward, "scaled_dot_product_attention", backward=backward, gradients=gradients)
    assert report.exit_code == 1
    first = report.explanations[0]
    assert first["class"] == name
    assert first["residual"] < 24
    assert first["outputs"] == (["d_k", "d_v"] if gradients else ["lse", "output"])
    assert first["says"]


def test_a_right_kernel_is_not_blamed():
    forward, backward = attention()
    report = ra.verify(forward, "scaled_dot_product_attention", dtypes=("float32", "bfloat16"), backward=backward)
    assert report.ok, report.table()
    assert report.explanations == []


def test_in_bfloat16_alone():
    forward, _ = attention(key_head=lambda i, h, g: i % g)
    report = ra.verify(forward, "scaled_dot_product_attention", dtypes="bfloat16")
    assert report.explanations[0]["class"] == "gqa_tile"


def test_two_mistakes_at_once():
    forward, _ = attention(reach=1, drop_sinks=True)
    report = ra.verify(forward, "scaled_dot_product_attention")
    assert {e["class"] for e in report.explanations} == {"window_plus1", "sink_drop"}


def test_a_declared_convention_is_followed_and_an_undeclared_one_is_named():
    forward, _ = attention(diagonal=lambda q, k: 0)
    declared = ra.verify(forward, "scaled_dot_product_attention", conventions={"align": "upper_left"})
    assert declared.ok, declared.table()
    right, _ = attention()
    other = ra.verify(right, "scaled_dot_product_attention", conventions={"align": "upper_left"})
    assert other.explanations[0]["class"] == "causal_other"


def test_what_nothing_explains_is_described():
    forward, _ = attention()

    def wrong(q, k, v):
        output, _ = forward(q, k, v)
        output = output.copy()
        output[:, 3, 16:] *= q.dtype.type(1.37)
        return output

    report = ra.verify(wrong, "scaled_dot_product_attention")
    assert report.exit_code == 1
    assert report.explanations == []
    text = "\n".join(report.notes)
    assert "no mistake of the catalogue" in text
    assert "h only 3" in report.table()
    assert "the bad rows start at 16, a multiple of 16" in report.table()


def test_another_layout_of_the_lse():
    forward, _ = attention()

    def swapped(q, k, v, *, mask=None):
        output, lse = forward(q, k, v, mask=mask)
        return output, np.swapaxes(lse, -1, -2)

    report = ra.verify(swapped, "scaled_dot_product_attention")
    assert report.exit_code == 1
    assert report.explanations[0]["class"] == "lse_layout"
