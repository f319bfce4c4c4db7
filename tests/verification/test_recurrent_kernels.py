"""The verifier on kernels of Transformer-XL and compressive attention: passes the right one, names what is wrong."""

import pytest
from verification.recurrent_kernels import compressive, transformer_xl

import refattn as ra


def narrow(**broken):
    """A kernel with few options: fewer probes run."""
    forward, backward = transformer_xl(**broken)

    def run(q, k, v, *, r, u, w, same_length=False):
        return forward(q, k, v, r=r, u=u, w=w, same_length=same_length)

    def back(d_output, q, k, v, *, r, u, w, same_length=False, d_lse=None):
        return backward(d_output, q, k, v, r=r, u=u, w=w, same_length=same_length, d_lse=d_lse)

    return run, back


@pytest.mark.parametrize(
    ("name", "kernel"), [("transformer_xl_attention", transformer_xl), ("compressive_attention", compressive)]
)
def test_the_right_kernel_passes(name, kernel):
    forward, backward = kernel()
    report = ra.verify(forward, name, backward=backward)
    assert report.ok, report.table()


@pytest.mark.parametrize(
    ("name", "class_", "kernel"),
    [
        ("transformer_xl_attention", "rel_shift_slice", narrow(slice_off=True)),
        ("transformer_xl_attention", "xl_same_length_off1", narrow(one_more=True)),
        ("transformer_xl_attention", "xl_table_gradient", narrow(table_without_bias=True)),
        ("compressive_attention", "memory_order", compressive(memory_first=True)),
        ("compressive_attention", "gradient_into_memory", compressive(into_memory=True)),
        ("compressive_attention", "memory_weights_detached", compressive(weights_detached=True)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_wrong_kernel_is_found_and_its_mistake_named(name, class_, kernel):
    forward, backward = kernel
    report = ra.verify(forward, name, backward=backward)
    assert not report.ok
    assert class_ in report.explanations[0]["class"].split(" + "), report.explanations
