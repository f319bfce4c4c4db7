"""Injected rounding errors: their size, what stays exact, and that no choice is tipped."""

import numpy as np
import pytest

from refattn.precision import Rounding, injecting

SINGLE = Rounding(accumulate=2.0**-24, stored=2.0**-24)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def drawn(function, *arrays, rounding=SINGLE, runs=300):
    """Standard deviation of what the errors change, over runs."""
    found = []
    for seed in range(runs):
        xp = injecting(rounding, np.random.default_rng(seed), shrink=2.0**-6)
        found.append(xp.to_numpy(function(xp, *map(xp.asarray, arrays))) - function(np, *arrays))
    return np.sqrt(np.mean(np.square(found), axis=0)) * 2.0**6


def test_sums_err_with_their_terms_and_their_partial_sums(rng):
    x, a, b = rng.standard_normal((3, 50)), rng.standard_normal((3, 50)), rng.standard_normal((50, 2)) + 3
    for function in (lambda xp, x: xp.sum(x, axis=-1), lambda xp, x: 50 * xp.mean(x, axis=-1)):
        size = np.sqrt(50 * (np.sum(x**2, axis=-1) + np.sum(x, axis=-1) ** 2))
        np.testing.assert_allclose(drawn(function, x), 2.0**-24 * size, rtol=0.2)
    size = np.sqrt(50 * (a**2 @ b**2 + (a @ b) ** 2))
    np.testing.assert_allclose(drawn(lambda xp, a, b: xp.matmul(a, b), a, b), 2.0**-24 * size, rtol=0.2)


def test_moves_selections_and_sums_of_one_term_are_exact(rng):
    x = rng.standard_normal((4, 1, 5))

    def moved(xp, x):
        y = xp.where(x > 0, x, xp.zeros_like(x))
        return xp.max(xp.sum(xp.permute_dims(y, (2, 1, 0)), axis=1), axis=0)

    assert drawn(moved, x, runs=5).max() == 0


def test_only_what_is_computed_is_rounded_to_the_storage(rng):
    """A product of inputs, moved or scaled by a number, has the errors of float32; one of weights those of bfloat16."""
    half = Rounding(accumulate=2.0**-24, operands=2.0**-8, stored=2.0**-8)
    x, y = rng.standard_normal((6, 8)), rng.standard_normal((8, 6))
    scaled = drawn(
        lambda xp, x, y: xp.matmul(xp.matrix_transpose(y) * 0.5, xp.matrix_transpose(x)), x, y, rounding=half
    )
    assert scaled.max() < 2.0**-18
    computed = drawn(lambda xp, x, y: xp.matmul(xp.exp(x), y), x, y, rounding=half)
    np.testing.assert_allclose(computed, 2.0**-8 * np.sqrt(np.exp(x) ** 2 @ y**2), rtol=0.2)

    def assigned(xp, x, y):
        buffer = xp.zeros_like(x)
        buffer[0, ...] = xp.exp(x[0, ...])  # no longer exact
        return xp.matmul(buffer, y)

    assert drawn(assigned, x, y, rounding=half)[0].min() > 2.0**-11


def test_an_approximated_function_is_off_everywhere_at_once(rng):
    x = np.zeros(1000)
    means = []
    for seed in range(20):
        xp = injecting(Rounding(accumulate=2.0**-24, stored=2.0**-24, exp=1e-4), np.random.default_rng(seed))
        apart = xp.to_numpy(xp.exp(xp.asarray(x))) - 1
        assert abs(apart.std() - 1e-4) < 1e-5
        means.append(apart.mean())
    assert 0.5e-4 < np.std(means) < 3e-4  # one number for a whole run


def test_decisions_of_another_run_are_kept(rng):
    x = np.array([1.0, 1.0, 0.0, 1.0])

    def chosen(xp, x):
        y = x * xp.asarray(1 / 3)
        return xp.argmax(y), y == xp.max(y), xp.argsort(y), xp.floor(y * 3)

    exact = injecting(SINGLE, rng, shrink=0.0)
    right = chosen(exact, exact.asarray(x))
    tipped = []
    for seed in range(10):
        xp = injecting(SINGLE, np.random.default_rng(seed), decisions=exact.decisions)
        for got, want in zip(chosen(xp, xp.asarray(x)), right, strict=True):
            np.testing.assert_array_equal(xp.to_numpy(got), exact.to_numpy(want))
        alone = injecting(SINGLE, np.random.default_rng(seed))
        tipped.append(int(chosen(alone, alone.asarray(x))[0]))
    assert len(set(tipped)) > 1


def test_nothing_that_is_not_finite_is_changed():
    xp = injecting(SINGLE, np.random.default_rng(0))
    x = xp.asarray(np.array([np.inf, -np.inf, np.nan, 0.0]))
    np.testing.assert_array_equal(xp.to_numpy(x * 2), [np.inf, -np.inf, np.nan, 0.0])


def test_what_cancels_exactly_is_no_decision(rng):
    """``where(x == 0, 0, ...)`` keeps what is nothing at nothing; a difference that happens to cancel still errs."""

    def cancelled(xp, a, b):
        x = xp.asarray(a) * 3.0 - xp.asarray(b) * 3.0
        return xp.to_numpy(xp.where(x == 0, xp.zeros_like(x), x * 2.0))

    a = rng.standard_normal(50)
    exact = injecting(SINGLE, np.random.default_rng(0), shrink=0.0)
    assert not cancelled(exact, a, a).any()
    erring = injecting(SINGLE, np.random.default_rng(1), decisions=exact.decisions)
    assert cancelled(erring, a, a).all()
