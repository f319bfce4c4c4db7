"""Mistakes of LSH attention: each shows, differentiates its own forward, and gives these numbers."""

import numpy as np
from support import assert_mistakes_differentiate, assert_mistakes_show

from refattn.attention.lsh import lsh_attention as attention
from refattn.mistakes.engine import Case
from refattn.mistakes.lsh import catalogue


def rng(seed=0):
    return np.random.default_rng(seed)


KEEP = rng(5).random((2, 12)) < 0.6
EXAMPLES = (
    {"t": 12, "n_buckets": 4, "scale": 0.7},
    {"t": 12, "n_buckets": (4, 2), "key_norm": "rms", "causal": True, "dropout_rate": 0.25,
     "dropout_mask": rng(1).random((12, 12)) < 0.8},
    {"t": 12, "n_buckets": (4, 2), "wrap": "global", "within_bucket": False, "mask": KEEP, "causal": True, "duplicates": "multiset"},
)  # fmt: skip
LARGE = {"t": 12, "buckets": rng(2).integers(0, 4, (2, 3, 2, 12)) << 28, "n_buckets": 1 << 31}


def entry(name):
    return next(m for m in catalogue.own if m.edit.__name__ == name)


def test_every_mistake_shows():
    assert_mistakes_show(attention, catalogue, (*EXAMPLES, LARGE), rng())


def test_gradients_are_those_of_the_wrong_forward():
    assert_mistakes_differentiate(attention, catalogue, EXAMPLES, rng(1))


def test_means_by_hand():
    """Equal queries, buckets {0, 2} and {1, 3} in chunks of 2: every token sees its partner alone."""
    qk, v = np.ones((1, 4, 1)), np.array([[[1.0], [2.0], [3.0], [4.0]]])
    case = Case(catalogue.definition, {"qk": qk, "v": v, "buckets": np.array([[[0, 1, 0, 1]]]), "chunk": 2})

    def rows(name):
        return case.results(entry(name))["output"][0, :, 0].tolist()

    assert case.right.output[0, :, 0].tolist() == [3.0, 4.0, 1.0, 2.0]
    assert rows("lsh_self_visible") == [2.0, 3.0, 2.0, 3.0]
    assert rows("lsh_other_buckets") == [3.0, 8 / 3, 1.0, 2.0]  # the second chunk sees the first too
    assert case.results(entry("lsh_wrap")) is None  # within buckets there is nothing to see around the end


def test_a_lonely_token_has_nothing_but_its_norm_to_get_wrong():
    given = {"qk": rng(3).standard_normal((1, 1, 2)), "v": np.ones((1, 1, 1)), "buckets": np.zeros((1, 1, 1), int)}
    case = Case(catalogue.definition, given, {"output": np.ones((1, 1, 1)), "lse": np.ones((1, 1))})
    shown = {m.edit.__name__ for m in catalogue.own if case.gradients(m, "both" if "both" in m.sides else m.sides[0])}
    assert shown == {
        "lsh_key_not_normalised", "lsh_scale", "lsh_query_normalised", "lsh_last_resort_drop", "lsh_norm_constant",
        "lsh_query_role_missing",
    }  # fmt: skip
