"""The verifier on kernels of multi-head and Talking-Heads attention: passes the right one, names what is wrong."""

import pytest
from verification.heads_kernels import MULTI_HEAD, TALKING, multi_head, talking

import refattn as ra

KERNELS = {
    "multi_head_attention": (
        multi_head,
        MULTI_HEAD,
        {
            "extra_key_masked": {"extra_hidden": True},
            "projection_bias_drop": {"no_b_v": True},
            "role_grad_dropped": {"one_role": True},
        },
    ),
    "talking_heads_attention": (
        talking,
        TALKING,
        {
            "th_transposed": {"transposed": True},
            "th_mask_before_projection": {"mask_before": True},
            "th_delta": {"row_term_of_output": True},
        },
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_right_kernel_passes(name):
    make, supports, _ = KERNELS[name]
    forward, backward = make()
    report = ra.verify(forward, name, backward=backward, supports=supports)
    assert report.ok, report.table()


@pytest.mark.parametrize(("name", "class_"), [(n, c) for n, (_, _, wrong) in KERNELS.items() for c in wrong])
def test_a_wrong_kernel_is_found_and_its_mistake_named(name, class_):
    make, supports, wrong = KERNELS[name]
    forward, backward = make(**wrong[class_])
    if name == "talking_heads_attention":  # fewer probes, fewer explanations to try
        supports = ("logits_projection", "weights_projection", "mask")
    report = ra.verify(forward, name, backward=backward, supports=supports)
    assert not report.ok
    assert class_ in report.explanations[0]["class"].split(" + "), report.explanations
