"""Mistakes of the Synthesizer: each shows, differentiates its own forward, and gives these numbers."""

import numpy as np
from support import assert_mistakes_differentiate, assert_mistakes_show

from refattn.attention.synthesizer import synthesizer_attention as attention
from refattn.mistakes.engine import Case
from refattn.mistakes.synthesizer import catalogue

EXAMPLES = (
    {"q": 5, "k": 6, "p": 3, "w_2": True, "w_a": True, "random": True, "random_1": True, "other_logits": True},
    {"q": 6, "k": 6, "random": True, "causal": True},
    {"q": 5, "k": 6, "p": 3, "w_a": True},
)


def entry(name):
    return next(m for m in catalogue.own if m.edit.__name__ == name)


def test_every_mistake_shows():
    assert_mistakes_show(attention, catalogue, EXAMPLES, np.random.default_rng(0))


def test_gradients_are_those_of_the_wrong_forward():
    assert_mistakes_differentiate(attention, catalogue, EXAMPLES, np.random.default_rng(1))


def test_numbers_by_hand():
    """Tables of logits 0 and ln 3 for two keys: weights 1/4, 3/4 in the first part, 3/4, 1/4 in the second."""
    table, v = np.log([[[1.0, 3.0]]]), np.array([[[0.0], [4.0]]])
    case = Case(
        catalogue.definition,
        {"v": v, "random": table, "other_logits": table[..., ::-1], "mixture": np.log([3.0, 1.0])},
        {"output": np.ones((1, 1, 1))},
    )

    def output(name):
        return case.results(entry(name))["output"].item()

    # shares 3/4 and 1/4: logits ln 3 / 4 and 3 ln 3 / 4
    np.testing.assert_allclose(case.right.output.item(), 4 / (1 + 3**-0.5), rtol=1e-14)
    np.testing.assert_allclose(output("synthesizer_mixture_after"), 3 / 4 * 3 + 1 / 4 * 1, rtol=1e-14)
    np.testing.assert_allclose(output("synthesizer_mixture_equal"), 2.0, rtol=1e-14)
    np.testing.assert_allclose(output("synthesizer_mixture_plain"), 4 / (1 + 3 ** -np.log(3)), rtol=1e-14)
    np.testing.assert_allclose(output("synthesizer_mixture_order"), 4 / (1 + 3**0.5), rtol=1e-14)


def test_a_table_alone_has_no_layers_to_get_wrong():
    case = Case(catalogue.definition, attention.example(np.random.default_rng(3), q=4, k=6, random=True))
    shown = {m.edit.__name__ for m in catalogue.own if "both" in m.sides and case.results(m)}
    assert shown == {"synthesizer_table_shared", "synthesizer_scaled"}
