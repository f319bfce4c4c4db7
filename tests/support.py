"""What the tests of every mechanism share: gradient checks, rounding bounds, stored cases."""

import json
import pathlib

import numpy as np

DATA = pathlib.Path(__file__).parent / "data"


def cases(implementation):
    """(name, meta, arrays) of every stored case of an implementation."""
    for path in sorted((DATA / implementation).glob("*.npz")):
        with np.load(path, allow_pickle=False) as stored:
            yield path.stem, json.loads(path.with_suffix(".json").read_text()), {n: stored[n] for n in stored.files}


def random_cotangents(function, result, rng):
    """Standard normal cotangents of every differentiable field; 0 where the field is not finite."""
    found = {}
    for name in function.outputs:
        if name in result:
            x = np.asarray(getattr(result, name))
            found[name] = np.where(np.isfinite(x), rng.standard_normal(x.shape), 0.0)
    return found


def _loss(result, cotangents):
    total = 0.0
    for name, d in cotangents.items():
        x = getattr(result, name)
        total = total + np.sum(np.where(d == 0, 0.0, d * np.where(d == 0, 0.0, x)))
    return total


def complex_step_gradients(function, arguments, cotangents, names=None):
    """d sum(field * cotangent) / d argument, entry by entry, by the complex step of 1e-200 (no cancellation)."""
    found = {}
    for name in names or [n for n in function.differentiable if arguments.get(n) is not None]:
        x = np.asarray(arguments[name], dtype=np.complex128)
        g = np.zeros(x.shape)
        for at in np.ndindex(x.shape):
            moved = x.copy()
            moved[at] += 1e-200j
            moved = complex(moved) if x.ndim == 0 else moved
            result = function.forward(**{**arguments, name: moved}, compute_dtype="complex128")
            g[at] = np.imag(_loss(result, cotangents)) / 1e-200
        found[name] = g
    return found


def assert_gradients(function, arguments, rng, *, tolerance=1e-13, names=None, cotangents=None):
    """Every gradient against complex step: max|difference| <= tolerance * max|gradient|, per array.

    float64 arguments.  Returns the gradients.
    """
    result, pullback = function.vjp(**arguments)
    cotangents = cotangents or random_cotangents(function, result, rng)
    gradients = pullback(**cotangents)
    wanted = complex_step_gradients(function, arguments, cotangents, names)
    assert set(wanted) <= set(gradients)
    for name, want in wanted.items():
        got = np.asarray(gradients[name])
        assert got.shape == want.shape, (name, got.shape, want.shape)
        scale = np.max(np.abs(want), initial=0.0)
        assert np.max(np.abs(got - want), initial=0.0) <= tolerance * max(scale, 1e-3), name
    return gradients


def assert_adjoint(function, arguments, rng, *, tolerance=1e-12):
    """<v, J u> = <J^T v, u> with random u for every differentiable argument at once and random v for every field."""
    result, pullback = function.vjp(**arguments)
    cotangents = random_cotangents(function, result, rng)
    gradients = pullback(**cotangents)
    moved, right, size = dict(arguments), 0.0, 0.0
    for name in function.differentiable:
        if arguments.get(name) is None:
            continue
        u = rng.standard_normal(np.shape(arguments[name]))
        x = np.asarray(arguments[name]) + 1e-200j * u
        moved[name] = complex(x) if x.ndim == 0 else x
        right += np.sum(gradients[name] * u)
        size += np.sum(np.abs(gradients[name] * u))
    left = np.imag(_loss(function.forward(**moved, compute_dtype="complex128"), cotangents)) / 1e-200
    assert abs(left - right) <= tolerance * max(size, 1e-3)


def assert_close(got, want, tolerance):
    """|got - want| <= tolerance * max(1, |want|); NaN and infinities must stand in the same places."""
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(got - want) / np.maximum(1.0, np.abs(want)))
    worst = np.max(error, initial=0.0)
    assert worst <= tolerance, f"{worst:.2e} > {tolerance:.2e} at {np.unravel_index(np.argmax(error), error.shape)}"
