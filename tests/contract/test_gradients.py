"""Gradients: complex step, adjoint of every result, reuse of the pullback, the definition's own gradients."""

import numpy as np
import pytest
from contract.harness import TABLES, Case, case, every, ids
from contract.test_numbers import assert_same, unit
from support import EPS, assert_adjoint, assert_gradients, differentiable, directional

import refattn as ra

FIRST = [(m, next(iter(module.CASES))) for m, module in TABLES.items()]


@pytest.mark.parametrize("mechanism, name", FIRST, ids=ids)
def test_every_entry_by_complex_step(mechanism, name):
    it = case(mechanism, name)
    assert_gradients(it.mechanism, it.arguments, it.rng(), tolerance=1e-13 * unit(mechanism))


@pytest.mark.parametrize("mechanism, name", every(), ids=ids)
def test_every_gradient_by_complex_step(mechanism, name):
    """Along a random direction, which every wrong entry moves, and at one entry, which says what it should be."""
    it = case(mechanism, name)
    rng = it.rng()
    for n in differentiable(it.mechanism, it.arguments):
        g = np.asarray(it.gradients[n])
        assert g.shape == np.shape(it.arguments[n])
        directions = [rng.standard_normal(g.shape)]
        for place in rng.integers(0, g.size, 1) if g.size > 1 else ():
            directions.append(np.zeros(g.shape))
            directions[-1].flat[place] = 1.0
        for u in directions:
            want, size = directional(it.mechanism, it.arguments, {n: u}, it.cotangents)
            size += np.sum(np.abs(g * u)) + np.max(np.abs(g), initial=0.0)  # entries share intermediate results
            assert abs(np.sum(g * u) - want) <= 1e-13 * unit(mechanism) * size, (n, np.sum(g * u), want)


@pytest.mark.parametrize("mechanism, name", every(), ids=ids)
def test_adjoint_of_every_result(mechanism, name):
    it = case(mechanism, name)
    for field, cotangent in it.cotangents.items():
        alone = {field: cotangent}
        gradients = it.call[1](**alone)
        assert_adjoint(
            it.mechanism,
            it.arguments,
            it.rng(),
            cotangents=alone,
            gradients=gradients,
            tolerance=1e-13 * unit(mechanism),
        )


@pytest.mark.parametrize("mechanism, name", every(), ids=ids)
def test_a_pullback_may_be_used_again_and_changes_nothing(mechanism, name):
    it = Case(mechanism, name)
    before = {n: np.copy(it.arguments[n]) for n in it.floating()}
    for n in it.floating():
        it.arguments[n].flags.writeable = False
    cotangents = {n: d.copy() for n, d in it.cotangents.items()}
    fields = {n: np.copy(x) for n, x in it.result.fields.items()}
    first, again = it.gradients, it.call[1](**it.cotangents)
    assert list(first) == differentiable(it.mechanism, it.arguments)
    for was, now in ((before, it.arguments), (cotangents, it.cotangents), (fields, it.result.fields), (first, again)):
        assert all(np.array_equal(x, now[n], equal_nan=x.dtype.kind == "f") for n, x in was.items())


HAVE = [(m, n) for m, n in every() if isinstance(ra.mechanisms[m].definition.steps, type)]


@pytest.mark.parametrize("mechanism, name", HAVE, ids=ids)
def test_gradients_equal_those_of_the_definition(mechanism, name):
    it = case(mechanism, name)
    result, pullback = it.mechanism.definition.vjp(**it.arguments)
    assert_same(result, it.definition, 100 * EPS * unit(mechanism))
    assert_same(it.gradients, pullback(**it.cotangents), 200 * EPS * unit(mechanism))
