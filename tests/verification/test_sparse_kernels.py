"""The verifier on kernels of Sparse Transformer, local and top-k attention: passes the right one, names what is wrong."""

import pytest
from verification.sparse_kernels import OWN, local, sparse, topk

import refattn as ra

KERNELS = {
    "sparse_transformer_attention": sparse,
    "local_attention": local,
    "topk_attention": topk,
}
WRONG = [  # mechanism, class, how the kernel is broken, whether its backward is judged too
    ("sparse_transformer_attention", "sparse_summary_columns", {"first_columns": True}, True),
    ("sparse_transformer_attention", "sparse_union_mean", {"mean": True}, False),
    ("local_attention", "local_bounds", {"one_more": True}, True),
    ("local_attention", "local_wrap", {"wraps": True}, False),
    ("topk_attention", "topk_grad", {"unmasked_backward": True}, True),
    ("topk_attention", "topk_ties", {"ties_up": True}, False),
]


@pytest.mark.parametrize("name", KERNELS)
def test_the_right_kernel_passes(name):
    forward, backward = KERNELS[name]()
    report = ra.verify(forward, name, backward=backward, supports=(*OWN[name], "causal"))
    assert report.ok, report.table()


@pytest.mark.parametrize(("name", "class_", "broken", "gradients"), WRONG, ids=[w[1] for w in WRONG])
def test_a_wrong_kernel_is_found_and_its_mistake_named(name, class_, broken, gradients):
    forward, backward = KERNELS[name](**broken)
    report = ra.verify(forward, name, backward=backward if gradients else None, supports=OWN[name])
    assert not report.ok
    assert class_ in report.explanations[0]["class"].split(" + "), report.explanations
