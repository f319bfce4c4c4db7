"""Mistakes of Transformer-XL and Compressive attention: each shows, and what the important ones give."""

import numpy as np
from support import assert_mistakes_show

from refattn.attention.compressive import compressive_attention
from refattn.attention.transformer_xl import transformer_xl_attention as attention
from refattn.mistakes.compressive import catalogue as compressive
from refattn.mistakes.engine import Case
from refattn.mistakes.transformer_xl import catalogue


def entry(name, where=catalogue):
    return next(m for m in where if m.edit.__name__ == name)


def test_every_mistake_shows():
    examples = (
        {"q": 4, "k": 7, "same_length": True},
        {"q": 4, "k": 6, "causal": False},
        {"q": 3, "k": 5, "key_places": np.array([0, 3, 5, 6, 7])},
    )
    assert_mistakes_show(attention, catalogue, examples, np.random.default_rng(0))


def test_every_mistake_of_compressive_attention_shows():
    examples = (
        {"d": 4, "e": 4, "compressed_positions": "span_mid", "rate": 4},
        {"d": 4, "e": 4, "compressed_positions": "span_end", "rate": 3, "through_memory": True},
    )
    assert_mistakes_show(compressive_attention, compressive, examples, np.random.default_rng(1))


def test_no_scale_leaves_all_four_terms_unscaled():
    given = attention.example(np.random.default_rng(2))
    wrong = Case(catalogue.definition, given).results(entry("no_scale"))
    np.testing.assert_allclose(wrong["output"], attention(**given, scale=1.0), rtol=0, atol=1e-13)
    given = compressive_attention.example(np.random.default_rng(2))
    wrong = Case(compressive.definition, given).results(entry("no_scale", compressive))
    np.testing.assert_allclose(wrong["output"], compressive_attention(**given, scale=1.0), rtol=0, atol=1e-13)


def test_numbers_by_hand():
    # One query after two tokens of memory, all keys alike: weights by distance 2, 1, 0 are 2, 3, 3 of 8.
    given = {"q": np.ones((1, 1, 1)), "k": np.zeros((1, 3, 1)), "v": np.array([[[1.0], [2.0], [3.0]]])}
    case = Case(catalogue.definition, {**given, "r": np.log([[[2.0], [3.0], [3.0]]])})

    def output(name):
        return float(case.results(entry(name))["output"].squeeze())

    np.testing.assert_allclose(float(case.right.output.squeeze()), 17 / 8, rtol=1e-15)
    np.testing.assert_allclose(output("xl_distance_order"), (3 * 1 + 3 * 2 + 2 * 3) / 8, rtol=1e-15)
    np.testing.assert_allclose(output("xl_positions_drop"), 2.0, rtol=1e-15)
    np.testing.assert_allclose(output("memory_order"), (2 * 3 + 3 * 1 + 3 * 2) / 8, rtol=1e-15)
    np.testing.assert_allclose(output("xl_memory_drop"), 3.0, rtol=1e-15)
    np.testing.assert_allclose(output("xl_first_slot_hidden"), 2.5, rtol=1e-15)


def test_mistakes_without_effect_say_so():
    given = attention.example(np.random.default_rng(3))
    assert Case(catalogue.definition, given).results(entry("rel_shift_leak")) is None  # hidden by the causal mask
    given = attention.example(np.random.default_rng(3), absolute_q=True)
    case = Case(catalogue.definition, given)
    for name in ("rel_shift_slice", "xl_uw_swapped", "xl_distance_order", "xl_positions_drop"):
        assert case.results(entry(name)) is None  # absolute positions have none of this
