"""NaN and infinity go where the definition lets them go, and what nothing depends on is never read.

What nothing depends on is found out by moving numbers, not by knowing the mechanism.  A row that drops out of the equation
only by arithmetic (the query of a single key has weight 1 whatever it is) is no such row: the definition tells them apart.
"""

import numpy as np
import pytest
from contract.harness import TABLES, case, every, ids
from contract.test_numbers import assert_same, unit
from support import EPS, differentiable

KEYS = ("k", "v", "x_k", "x_v", "memory", "compressed", "k_global", "v_global", "other_logits")
FAR = 30.0  # far enough to be chosen, or not to be, wherever the mechanism chooses


def values(it, arguments, cotangents):
    """All results and gradients by name; warnings are the caller's business."""
    result, pullback = it.mechanism.vjp(**arguments)
    gradients = pullback(**cotangents)
    return {f"result {n}": x for n, x in result.fields.items() if x is not None} | {
        f"gradient {n}": np.asarray(g) for n, g in gradients.items()
    }


def moved(it, name, where, u):
    x = it.arguments[name].copy()
    x[where] += u * (np.abs(x[where]) < np.inf)
    return it.changed(**{name: x})


def hidden_rows(it):
    """Argument -> rows that nothing depends on: their gradient is 0 and moving them, far and back, changes nothing."""
    clean = values(it, it.arguments, it.cotangents)
    hidden, data = {}, TABLES[it.mechanism.name].BATCHED  # not parameters: those are read where they stand
    for name in differentiable(it.mechanism, it.arguments):
        g = np.asarray(it.gradients[name])
        if name not in data or g.ndim < 2:
            continue
        where = ~np.any(g != 0, axis=-1)
        if where.any():
            u = FAR * it.rng().standard_normal((int(where.sum()), g.shape[-1]))
            if all(same(values(it, moved(it, name, where, s * u), it.cotangents), clean) for s in (1, -1)):
                with np.errstate(all="ignore"):
                    by_definition = it.mechanism.definition(**moved(it, name, where, np.full_like(u, np.nan)))
                if same(by_definition.fields, it.definition.fields):
                    hidden[name] = where
    return hidden


def same(got, want):
    return all(x is None or np.array_equal(got[n], x, equal_nan=x.dtype.kind == "f") for n, x in want.items())


@pytest.mark.parametrize("mechanism, name", every(), ids=ids)
def test_what_nothing_depends_on_is_never_read(mechanism, name):
    it = case(mechanism, name)
    hidden = hidden_rows(it)
    for poison in (np.nan, np.inf) if hidden else ():
        dirty = dict(it.arguments)
        for n, where in hidden.items():
            dirty[n] = dirty[n].copy()
            dirty[n][where] = poison
        assert_same(
            values(it, dirty, it.cotangents), values(it, it.arguments, it.cotangents), 100 * EPS * unit(mechanism)
        )


@pytest.mark.parametrize("mechanism, name", every(), ids=ids)
def test_cotangents_of_rows_without_keys_are_never_read(mechanism, name):
    """Rows whose lse is -inf; where there is no lse, rows of output that are 0 and whose cotangent moves nothing."""
    it = case(mechanism, name)
    x = it.result.output
    if "lse" in it.result:
        empty = it.result.lse == -np.inf
        same_rows = empty.shape == x.shape[:-1]  # Talking-Heads mixes the rows of several heads into one
        empty = {"lse": empty, **({"output": empty[..., None] | np.zeros_like(x, bool)} if same_rows else {})}
    elif "dropout_mask" in it.arguments:
        return  # a row whose keys were all dropped is 0 too
    else:
        empty = {"output": np.all(x == 0, axis=-1, keepdims=True) | np.zeros_like(x, bool)}
        far = {**it.cotangents, "output": it.cotangents["output"] + FAR * empty["output"]}
        if not same(it.call[1](**far), it.gradients):
            return
    dirty = {n: np.where(empty[n], np.nan, d) if n in empty else d for n, d in it.cotangents.items()}
    assert_same(it.call[1](**dirty), it.gradients, 100 * EPS * unit(mechanism))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mechanism, name", every(), ids=ids)
def test_a_nan_reaches_the_results_that_the_definition_says(mechanism, name):
    it = case(mechanism, name)
    rng = it.rng()
    for n in differentiable(it.mechanism, it.arguments):
        g = np.asarray(it.gradients[n])
        if n not in KEYS or not g.size or (n == "k" and mechanism == "routing_attention"):
            continue  # where a NaN among the clusters goes, nobody says
        at = tuple(rng.integers(g.shape[:-1]))
        x = it.arguments[n].copy()
        x[at] = np.nan
        got, want = (f(**it.changed(**{n: x})) for f in (it.mechanism.forward, it.mechanism.definition))
        for field, y in want.fields.items():
            if y is not None and y.dtype.kind == "f":
                assert np.array_equal(np.isnan(getattr(got, field)), np.isnan(y)), f"{n}{at}: {field}"
                assert_same(
                    {field: np.nan_to_num(getattr(got, field))}, {field: np.nan_to_num(y)}, 100 * EPS * unit(mechanism)
                )
