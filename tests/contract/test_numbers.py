"""Forward = definition, blocks = whole, and what is kept on request = the definition's."""

import inspect

import numpy as np
import pytest
from contract.harness import Case, case, every, ids
from support import EPS, assert_close, random_cotangents

UNIT = {"nystrom_attention": 1e4}  # six steps of the inverse multiply rounding by the condition of the inner matrix


def unit(mechanism):
    return UNIT.get(mechanism, 1.0)


def assert_same(got, want, tolerance):
    """Two Results, or two dicts of gradients."""
    fields = want if isinstance(want, dict) else want.fields
    for name, x in fields.items():
        y = got[name] if isinstance(got, dict) else getattr(got, name)
        if x is None or np.asarray(x).dtype.kind in "iub":
            assert np.array_equal(x, y), name
        else:
            size = np.max(np.abs(x), where=np.isfinite(x), initial=1.0)  # gradients are sums over many entries
            assert_close(np.asarray(y) / size, np.asarray(x) / size, tolerance)


@pytest.mark.parametrize("mechanism, name", every(), ids=ids)
def test_forward_equals_the_definition(mechanism, name):
    it = case(mechanism, name)
    assert set(it.definition.fields) == set(it.result.fields)
    assert_same(it.result, it.definition, 100 * EPS * unit(mechanism))


@pytest.mark.parametrize("algorithm", ["whole", "tiled"])
@pytest.mark.parametrize("mechanism, name", every(), ids=ids)
def test_algorithms_agree(mechanism, name, algorithm):
    it = case(mechanism, name)
    result, pullback = it.mechanism.vjp(**it.arguments, algorithm=algorithm)
    assert_same(result, it.result, 100 * EPS * unit(mechanism))
    assert_same(pullback(**it.cotangents), it.gradients, 200 * EPS * unit(mechanism))


@pytest.mark.parametrize("mechanism, name", every("LONG"), ids=ids)
def test_several_blocks_equal_the_whole(mechanism, name):
    it = Case(mechanism, name)
    rows = max(np.shape(x)[-2] for x in (it.arguments[n] for n in it.floating()) if np.ndim(x) > 1)
    result, pullback = it.call
    whole, back = it.mechanism.vjp(**it.arguments, algorithm="whole")
    assert_same(result, whole, (40 + rows) * EPS)
    if rows < 200:
        assert_same(result, it.definition, (40 + rows) * EPS)
    cotangents = random_cotangents(it.mechanism, whole, it.rng())
    assert_same(pullback(**cotangents), back(**cotangents), (200 + 10 * rows) * EPS)


KEPT = [c for c in every() if "keep_weights" in inspect.signature(Case(*c).mechanism).parameters]


@pytest.mark.parametrize("mechanism, name", KEPT, ids=ids)
def test_kept_weights_equal_the_definition(mechanism, name):
    """Where a pair is hidden, the logit may be shown or be -inf; the weight is 0."""
    it = case(mechanism, name)
    keep = {n: True for n in ("keep_weights", "keep_terms") if n in inspect.signature(it.mechanism).parameters}
    got, want = (f(**it.arguments, **keep) for f in (it.mechanism.forward, it.mechanism.definition))
    assert_same(got, {n: x for n, x in want.fields.items() if n != "logits"}, 100 * EPS)
    hidden = np.isinf(want.logits) | (want.weights == 0)
    assert_close(np.where(hidden, 0, got.logits), np.where(hidden, 0, want.logits), 100 * EPS)
