"""NaN and infinity go where the dependence goes: found out by moving numbers, not by knowing the mechanism."""

import numpy as np
import pytest
from contract.harness import Case, case, every, ids
from contract.test_numbers import assert_same, unit
from support import EPS, differentiable

FAR = 30.0  # far enough to be chosen, or not to be, wherever the mechanism chooses


def values(it, arguments, cotangents):
    """All results and gradients by name; warnings are the caller's business."""
    result, pullback = it.mechanism.vjp(**arguments)
    gradients = pullback(**cotangents)
    return {f"result {n}": x for n, x in result.fields.items() if x is not None} | {
        f"gradient {n}": np.asarray(g) for n, g in gradients.items()
    }


def rows(it, name):
    """The rows (all axes but the last) of an argument: one mask."""
    return np.ones(np.shape(it.arguments[name])[:-1] or (1,), bool)


def moved(it, name, where, u):
    x = it.arguments[name].copy()
    x[where] += u * (np.abs(x[where]) < np.inf)
    return it.changed(**{name: x})


def bounded(name):
    return name in ("span", "scale", "softcap", "temperature")


def hidden_rows(it):
    """Argument -> rows that nothing depends on: their gradient is 0 and moving them, far and back, changes nothing."""
    clean = values(it, it.arguments, it.cotangents)
    hidden = {}
    for name in differentiable(it.mechanism, it.arguments):
        g = np.asarray(it.gradients[name])
        if g.ndim < 2 or bounded(name):
            continue
        where = ~np.any(g != 0, axis=-1)
        if where.any():
            u = FAR * it.rng().standard_normal((int(where.sum()), g.shape[-1]))
            if all(same(values(it, moved(it, name, where, s * u), it.cotangents), clean) for s in (1, -1)):
                hidden[name] = where
    return hidden


def same(got, want):
    return all(np.array_equal(got[n], x, equal_nan=x.dtype.kind == "f") for n, x in want.items())


@pytest.mark.parametrize("mechanism, name", every(), ids=ids)
def test_what_nothing_depends_on_is_never_read(mechanism, name):
    it = case(mechanism, name)
    hidden = hidden_rows(it)
    for poison in (np.nan, np.inf):
        dirty = dict(it.arguments)
        for n, where in hidden.items():
            dirty[n] = dirty[n].copy()
            dirty[n][where] = poison
        assert_same(
            values(it, dirty, it.cotangents), values(it, it.arguments, it.cotangents), 100 * EPS * unit(mechanism)
        )


@pytest.mark.parametrize("mechanism, name", every(), ids=ids)
def test_cotangents_of_empty_rows_are_never_read(mechanism, name):
    it = case(mechanism, name)
    dirty = dict(it.cotangents)
    for field, d in it.cotangents.items():
        x = getattr(it.result, field)
        empty = (x == 0) | np.isinf(x)
        empty = np.all(empty, axis=-1, keepdims=True) & np.ones(x.shape, bool) if field != "lse" else empty
        other = {**it.cotangents, field: np.where(empty, d + 1, d)}
        if same(it.call[1](**other), it.gradients):
            dirty[field] = np.where(empty, np.nan, d)
    assert_same(it.call[1](**dirty), it.gradients, 100 * EPS * unit(mechanism))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mechanism, name", every(), ids=ids)
def test_a_row_that_is_not_finite_reaches_what_depends_on_it_alone(mechanism, name):
    it = Case(mechanism, name)
    rng = it.rng()
    clean = values(it, it.arguments, it.cotangents)
    for n in differentiable(it.mechanism, it.arguments):
        g = np.asarray(it.gradients[n])
        if g.ndim < 2 or bounded(n) or not g.any():
            continue
        seen = np.argwhere(np.any(g != 0, axis=-1))
        at = tuple(seen[rng.integers(len(seen))])
        u = FAR * rng.standard_normal(g.shape[-1])
        others = [values(it, moved(it, n, at, s * u), it.cotangents) for s in (1, -1, 1 / FAR)]
        for poison in (np.nan, np.inf, -np.inf):
            x = it.arguments[n].copy()
            x[at] = poison
            got = values(it, it.changed(**{n: x}), it.cotangents)
            for field, want in clean.items():
                untouched = np.all([other[field] == want for other in others], axis=0)
                found = np.where(untouched, got[field], 0)
                wanted = np.where(untouched, want, 0)
                assert_same({field: found}, {field: wanted}, 100 * EPS * unit(mechanism)), (n, at, poison)
