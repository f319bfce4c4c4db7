"""What the tests share: gradients by the complex step, comparisons in units of what was summed, stored cases.

Tolerances
----------
A sum of n terms that is computed in floating point with unit roundoff u is off by at most (n - 1) u times the sum of the
absolute terms, in whatever order it was added.  It may itself be 0: a tolerance in units of the result is then a
tolerance of 0, and whether a test passes is the BLAS's choice.  So every comparison here is in units of sums of absolute
terms:

* Arrays that a mechanism returns (`assert_close`): inputs and cotangents are standard normal, sums are short, hence
  the sums of absolute terms are of order 1 or of the order of the array's entries: max(1, |want|).
* Gradients (`complex_step_gradients`): the entry belonging to x is g = sum_e c_e dF_e/dx over the elements F_e of the
  results, with their cotangents c_e.  The complex step gives every term c_e dF_e/dx, so the sum of their absolute values
  is at hand.  A term is itself a sum; computed forwards or backwards it contains c_e F_e / x or c_e F_e with x of
  order 1 (the derivative of a weighted mean is a weighted mean minus the mean itself), which may cancel too.  The unit
  is therefore sum_e |c_e| (|dF_e/dx| + |F_e|) over the elements that x moves, and the largest unit of an array's entries
  serves the array: entries are sums over the same intermediate results.

The factor before the unit counts roundings: about 450 of 2**-52 (the 1e-13 below) cover sums of a few dozen terms in each of
the five or six steps of a mechanism, each product and each exponential included.
"""

import json
import pathlib

import numpy as np

DATA = pathlib.Path(__file__).parent / "data"
EPS = np.finfo(np.float64).eps
STEP = 1e-200  # no difference is taken, so the step may be as small as it likes


def cases(implementation):
    """(name, meta, arrays) of every stored case of an implementation."""
    for path in sorted((DATA / implementation).glob("*.npz")):
        with np.load(path, allow_pickle=False) as stored:
            yield path.stem, json.loads(path.with_suffix(".json").read_text()), {n: stored[n] for n in stored.files}


def random_cotangents(function, result, rng):
    """Standard normal cotangents of every differentiable field; 0 where the field is not finite."""
    cotangents = {}
    for name in function.outputs:
        if name in result:
            x = np.asarray(getattr(result, name))
            cotangents[name] = np.where(np.isfinite(x), rng.standard_normal(x.shape), 0.0)
    return cotangents


def differentiable(function, arguments):
    """The names of the arguments of this call that have a gradient."""
    return [n for n in function.differentiable if arguments.get(n) is not None]


def directional(function, arguments, directions, cotangents):
    """(sum, absolute) of the terms c_e dF_e along the directions (name -> array), by one complex step.

    ``absolute`` is the unit that the module's docstring derives.
    """
    moved = dict(arguments)
    for name, u in directions.items():
        x = np.asarray(arguments[name]) + 1j * STEP * np.asarray(u)
        moved[name] = complex(x) if x.ndim == 0 else x
    result = function.forward(**moved, compute_dtype="complex128")
    total = absolute = 0.0
    for name, c in cotangents.items():
        x = np.where(c == 0, 0.0, getattr(result, name))
        slope = np.imag(x) / STEP
        total += np.sum(c * slope)
        absolute += np.sum(np.abs(c) * (np.abs(slope) + np.where(slope == 0, 0.0, np.abs(np.real(x)))))
    return total, absolute


def complex_step_gradients(function, arguments, cotangents, names=None):
    """name -> (gradient entry by entry, unit of every entry) of sum(field * cotangent)."""
    gradients = {}
    for name in names or differentiable(function, arguments):
        shape = np.shape(arguments[name])
        g, unit = np.zeros(shape), np.zeros(shape)
        for at in np.ndindex(shape):
            u = np.zeros(shape)
            u[at] = 1.0
            g[at], unit[at] = directional(function, arguments, {name: u}, cotangents)
        gradients[name] = g, unit
    return gradients


def assert_gradients(function, arguments, rng, *, tolerance=1e-13, names=None, cotangents=None):
    """Every gradient, entry by entry, against the complex step (float64 arguments).  Returns the gradients."""
    result, pullback = function.vjp(**arguments)
    cotangents = cotangents or random_cotangents(function, result, rng)
    gradients = pullback(**cotangents)
    wanted = complex_step_gradients(function, arguments, cotangents, names)
    assert set(wanted) <= set(gradients)
    for name, (want, unit) in wanted.items():
        got = np.asarray(gradients[name])
        assert got.shape == want.shape, (name, got.shape, want.shape)
        error, bound = np.max(np.abs(got - want), initial=0.0), tolerance * np.max(unit, initial=0.0)
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"
    return gradients


def assert_adjoint(function, arguments, rng, *, tolerance=1e-13, cotangents=None, gradients=None):
    """<v, J u> = <J^T v, u> with random u for every differentiable argument at once and random v for every field."""
    if gradients is None:
        result, pullback = function.vjp(**arguments)
        cotangents = random_cotangents(function, result, rng)
        gradients = pullback(**cotangents)
    directions = {n: rng.standard_normal(np.shape(arguments[n])) for n in differentiable(function, arguments)}
    left, unit = directional(function, arguments, directions, cotangents)
    terms = np.concatenate([np.ravel(gradients[n] * u) for n, u in directions.items()])
    unit += np.sum(np.abs(terms))
    assert abs(left - np.sum(terms)) <= tolerance * unit, f"{left} and {np.sum(terms)}: unit {unit:.2e}"


def assert_close(got, want, tolerance):
    """|got - want| <= tolerance * max(1, |want|); NaN and infinities must stand in the same places."""
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(got - want) / np.maximum(1.0, np.abs(want)))
    worst = np.max(error, initial=0.0)
    assert worst <= tolerance, f"{worst:.2e} > {tolerance:.2e} at {np.unravel_index(np.argmax(error), error.shape)}"


def assert_mistakes_show(mechanism, catalogue, examples, rng):
    """Every mistake that is the catalogue's own shows in one of the examples: in results, in gradients, on each of its sides."""
    from refattn.mistakes.engine import Case

    wanted = {(m.class_, m.says): {(s, what) for s in m.sides for what in _shown_by(m, s)} for m in catalogue.own}
    for options in examples:
        given = {n: x for n, x in mechanism.example(rng, **options).items() if x is not None}
        cotangents = random_cotangents(mechanism, mechanism.definition(**given), rng)
        case = Case(catalogue.definition, given, cotangents)
        for m in catalogue.own:
            left = wanted[m.class_, m.says]
            for side, what in sorted(left):
                if getattr(case, what)(m, side) is not None:
                    left.discard((side, what))
    left = {m: x for m, x in wanted.items() if x}
    assert left == {}, left


def assert_mistakes_differentiate(mechanism, catalogue, examples, rng, without=()):
    """What a mistake on both sides gives as gradients is the derivative of its own forward, by central differences.

    With a step of 1e-6 the difference is off by about 1e-12 of the third derivative and by 1e-16 / 1e-6 of the results.
    ``without``: names of edits whose derivative has jumps (a choice that moves) or that a backward cannot know.
    """
    from refattn.mistakes.engine import Case

    for options in examples:
        given = {n: x for n, x in mechanism.example(rng, **options).items() if x is not None}
        cotangents = random_cotangents(mechanism, mechanism.definition(**given), rng)
        case = Case(catalogue.definition, given, cotangents)
        for m in catalogue.own:
            if "both" not in m.sides or m.arrays is not None or m.edit.__name__ in without:
                continue
            gradients = case.gradients(m) or {}
            for name, g in gradients.items():
                x = np.asarray(given[name])
                if x.dtype.kind != "f" or not np.isfinite(g).all():
                    continue
                d = rng.standard_normal(x.shape)
                ends = [_summed(m.edit({**given, name: x + s * 1e-6 * d}).result(), cotangents) for s in (1, -1)]
                want = (ends[0] - ends[1]) / 2e-6
                unit = max(1.0, float(np.abs(g * d).sum()))
                assert abs((g * d).sum() - want) < 1e-7 * unit, (m.class_, m.says, name)


def _summed(result, cotangents):
    return sum(float(np.where(np.isfinite(result[n]), result[n] * c, 0.0).sum()) for n, c in cotangents.items())


def _shown_by(mistake, side):
    """A wrong forward shows in results; whether in gradients too depends on what its backward is handed."""
    if side == "forward":
        return ("results",)
    return ("gradients",) if side == "backward" or mistake.sides == ("backward",) else ("results",)
