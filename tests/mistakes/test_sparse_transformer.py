"""Mistakes of Sparse Transformer attention: each shows, differentiates its own forward, and gives these numbers."""

import numpy as np
from support import assert_mistakes_differentiate, assert_mistakes_show

from refattn.attention.sparse_transformer import sparse_transformer_attention as attention
from refattn.mistakes.engine import Case
from refattn.mistakes.sparse_transformer import catalogue

EXAMPLES = (
    {"t": 19, "stride": 4, "heads": "merged", "h": 3},
    {"t": 19, "stride": 4, "heads": "split", "h": 3},
    {"t": 23, "h": 3, "stride": 5, "summary": 2, "pattern": "fixed", "summary_offsets": [0, 1, 3]},
)


def entry(name):
    return next(m for m in catalogue.own if m.edit.__name__ == name)


def test_every_mistake_shows():
    assert_mistakes_show(attention, catalogue, EXAMPLES, np.random.default_rng(0))


def test_gradients_are_those_of_the_wrong_forward():
    assert_mistakes_differentiate(attention, catalogue, EXAMPLES, np.random.default_rng(1))


def seen(name, row, **options):
    """Keys that a row sees with a mistake, by one-hot values; stride 2, five tokens."""
    x, v = np.zeros((1, 5, 1)), np.eye(5)[None]
    case = Case(catalogue.definition, {"q": x, "k": x, "v": v, "stride": 2, **options})
    result = case.right.result() if name is None else case.results(entry(name))
    return np.flatnonzero(result["output"][0, row] > 0).tolist()


def test_sets_by_hand():
    assert seen(None, 4, heads="first") == [2, 3, 4]
    assert seen("sparse_local_off1", 4, heads="first") == [3, 4]
    assert seen("sparse_run_short", 4, heads="first") == [3, 4]
    assert seen(None, 3, heads="second") == [1, 3]
    assert seen("sparse_stride_absolute", 3, heads="second") == [0, 2]
    assert seen("sparse_heads_exchanged", 4, heads="first") == [0, 2, 4]
    fixed = {"pattern": "fixed", "summary": 1, "heads": "second"}
    assert seen(None, 4, **fixed) == [1, 3]
    assert seen("sparse_summary_columns", 4, **fixed) == [0, 2, 4]
    assert seen("sparse_columns_moved", 4, **fixed) == [0, 2, 4]
    assert seen("sparse_summary_own_block", 3, **fixed) == [1]


def test_a_merged_head_by_hand():
    """Row 4 at stride 2 sees 2, 3, 4 and 0, 2, 4: once each, the mean of two means, or 2 and 4 twice."""
    x, v = np.zeros((1, 5, 1)), np.arange(5.0).reshape(1, 5, 1)
    case = Case(catalogue.definition, {"q": x, "k": x, "v": v, "stride": 2, "heads": "merged"})
    assert case.right.output[0, 4, 0] == 9 / 4
    assert case.results(entry("sparse_union_mean"))["output"][0, 4, 0] == (3 + 2) / 2
    assert case.results(entry("sparse_key_twice"))["output"][0, 4, 0] == (3 + 0 + 2 * 2 + 2 * 4) / 6
    np.testing.assert_allclose(case.results(entry("sparse_union_mean_lse"))["lse"][0, 4], np.log(6))
