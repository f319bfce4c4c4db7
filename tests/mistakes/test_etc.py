"""Mistakes of ETC attention: each shows, differentiates its own forward, and gives these numbers."""

import numpy as np
from support import assert_mistakes_differentiate, assert_mistakes_show

from refattn.attention.etc import etc_attention as attention
from refattn.mistakes.engine import Case
from refattn.mistakes.etc import catalogue

EXAMPLES = (
    {"t": 9, "radius": 6, "p": 7, "scale": 0.4},
    {"long_mask": True, "global_mask": True},
    {"lengths": (11, 6), "global_lengths": (3, 2)},
)


def entry(name):
    return next(m for m in catalogue.own if m.edit.__name__ == name)


def test_every_mistake_shows():
    assert_mistakes_show(attention, catalogue, EXAMPLES, np.random.default_rng(0))


def test_gradients_are_those_of_the_wrong_forward():
    assert_mistakes_differentiate(attention, catalogue, EXAMPLES, np.random.default_rng(1))


def test_means_by_hand():
    """A global value 9, long values 0, 3, 3, 6 with their neighbours."""
    x, v = np.zeros((1, 4, 1)), np.array([[[0.0], [3.0], [3.0], [6.0]]])
    one = np.zeros((1, 1, 1))
    given = {"q": x, "k": x, "v": v, "q_global": one, "k_global": one, "v_global": one + 9, "radius": 1}
    case = Case(catalogue.definition, given)
    assert case.right.output[0, :, 0].tolist() == [4.0, 3.75, 5.25, 6.0]
    assert case.results(entry("global_columns_drop"))["output"][0, :, 0].tolist() == [1.5, 2.0, 4.0, 4.5]
    assert case.results(entry("global_rows_drop"))["output_global"].item() == 9.0
    assert case.results(entry("etc_two_softmaxes"))["output"][0, :, 0].tolist() == [10.5, 11.0, 13.0, 13.5]


def test_without_labels_only_the_pieces_show():
    given = attention.example(np.random.default_rng(3), p=0)
    case = Case(catalogue.definition, given)
    assert {m.edit.__name__ for m in catalogue.own if "both" in m.sides and case.results(m)} == {
        "window_plus1", "etc_one_side", "etc_two_softmaxes", "global_columns_drop", "global_rows_drop",
    }  # fmt: skip
