"""What every drawn call is held to: the definition, the adjoint identity, float64, and what is hidden stays hidden.

Tolerances: a backward stable evaluation returns the exact results of inputs that are moved by a few roundings.  How far
that moves the results is measured on the definition itself (`reach`): its inputs are moved by 2**-30 of themselves, with
random signs, and the change is scaled to one rounding.  A result may be off by as many of these as it has roundings: 64 and
one for every term of the longest sum, four times that in gradients.  The unit thus grows with the logits where rounding a
logit matters, and with nothing else.
"""

import warnings

import array_api_strict
import numpy as np
from contract.test_arrays import laid_out
from contract.test_arrays import strict as to_strict
from support import assert_adjoint, differentiable, random_cotangents

import refattn as ra

ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11}
MOVE = 2.0**-30


class Fault(AssertionError):
    """A call that does not do what it should."""


def floats(arguments):
    return [n for n, x in arguments.items() if isinstance(x, np.ndarray) and x.dtype.kind == "f"]


def longest(arguments):
    return max([1, *(s for n in floats(arguments) for s in arguments[n].shape)])


def moved(arguments, rng):
    """Every floating array moved by MOVE of itself, with random signs."""
    return arguments | {
        n: arguments[n] * (1 + MOVE * rng.choice([-1.0, 1.0], arguments[n].shape)) for n in floats(arguments)
    }


def largest(x):
    return np.max(np.abs(x), where=np.isfinite(x), initial=0.0)


def reach(evaluate, arguments, rng):
    """Name -> how far one rounding of all inputs moves that array (in units of the roundoff), and its own size."""
    want = evaluate(arguments)
    others = [evaluate(moved(arguments, rng)) for _ in range(2)]
    inputs = max([1.0, *(largest(arguments[n]) for n in floats(arguments))])  # products with them are what is summed
    summed = {"scale": inputs**2}  # products of two
    with np.errstate(invalid="ignore"):
        return want, {
            n: max(largest(x), summed.get(n, inputs), *(largest(np.asarray(o[n]) - x) / MOVE for o in others))
            for n, x in want.items()
        }


def compare(got, want, unit, tolerance, dtype, what):
    """|got - want| <= tolerance * unit, and one rounding to dtype; NaN and infinities in the same places."""
    for n, x in want.items():
        y = np.asarray(got[n], np.float64)
        if y.shape != np.shape(x):
            raise Fault(f"{what} {n} has shape {y.shape}: expected {np.shape(x)}")
        same = (y == x) | (np.isnan(x) & np.isnan(y))
        with np.errstate(invalid="ignore"):
            room = tolerance * unit[n] + ROUNDING[dtype] * np.abs(x) + (2.0**-24 if dtype == "float16" else 0.0)
            bad = ~same & ~(np.abs(y - x) <= room)
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise Fault(
                f"{what} {n}{list(at)} is {y[at]!r}: expected {np.asarray(x)[at]!r} within {np.asarray(room)[at]:.1e}"
            )


def prepared(call):
    """The arguments as they are passed: dtype, layout, namespace; and the same numbers in float64."""
    arguments = dict(call.arguments)
    for n in floats(arguments):
        arguments[n] = arguments[n].astype(call.dtype).astype(np.float64)
    passed = dict(arguments)
    for i, n in enumerate(floats(arguments)):
        x = arguments[n] if call.layout == 0 else laid_out(arguments[n], (call.layout + i) % 3)
        passed[n] = x.astype(call.dtype, order="K")
    if call.namespace == "strict":
        passed = {n: to_strict(x) for n, x in passed.items()}
    return passed, arguments


def fields(result):
    return {n: np.asarray(x) for n, x in result.fields.items() if x is not None and np.asarray(x).dtype.kind == "f"}


def check(call):
    """Raises Fault, or whatever the call raises."""
    if call.namespace == "strict" and call.dtype == "float16":
        call.namespace = "numpy"  # the standard has no half dtypes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _check(call)


def _check(call):
    mechanism = ra.mechanisms[call.mechanism]
    rng = np.random.default_rng(call.seed)
    passed, exact = prepared(call)
    before = {n: np.array(passed[n]) for n in floats(call.arguments)}
    result, pullback = mechanism.vjp(**passed, algorithm=call.algorithm)

    def by_definition(arguments):
        return fields(mechanism.definition(**arguments))

    want, unit = reach(by_definition, exact, rng)
    compute = "float32" if call.dtype == "float16" else call.dtype
    tolerance = (64 + longest(exact)) * ROUNDING[compute]
    got = fields(result)
    if call.mechanism in ("topk_attention", "lsh_attention", "routing_attention") and compute != "float64":
        chosen = mechanism.definition(**exact)
        names = [n for n in ("indices", "buckets", "members_q", "members_k") if n in result]
        if any(not np.array_equal(np.asarray(getattr(result, n)), getattr(chosen, n)) for n in names):
            return  # a choice so close that float32 may see it otherwise
    for n in want:
        compare({n: got[n]}, {n: want[n]}, unit, tolerance, str(getattr(result, n).dtype).rpartition(".")[2], "result")

    cotangents = {
        n: d.astype(call.dtype).astype(np.float64) for n, d in random_cotangents(mechanism, result, rng).items()
    }
    as_passed = {n: d.astype(call.dtype) for n, d in cotangents.items()}
    if call.namespace == "strict":
        as_passed = {n: array_api_strict.asarray(d) for n, d in as_passed.items()}
    gradients = {n: np.asarray(g, np.float64) for n, g in pullback(**as_passed).items()}
    if list(gradients) != differentiable(mechanism, passed):
        raise Fault(f"gradients of {list(gradients)}: expected {differentiable(mechanism, passed)}")

    def by_float64(numbers):  # cotangents are inputs of the backward like the others
        back = mechanism.vjp(**{n: numbers[n] for n in exact})[1]
        return {n: np.asarray(g) for n, g in back(**{n: numbers[f"d_{n}"] for n in cotangents}).items()}

    wanted, units = reach(by_float64, exact | {f"d_{n}": np.asarray(d) for n, d in cotangents.items()}, rng)
    tolerance *= 4  # four sums stand behind one another
    dtypes = {n: call.dtype if isinstance(exact[n], np.ndarray) else compute for n in wanted}
    for n in wanted:
        compare({n: gradients[n]}, {n: wanted[n]}, units, tolerance, dtypes[n], "gradient of")
    spread = max([1.0, *units.values(), *unit.values()])
    assert_adjoint(
        mechanism,
        exact,
        rng,
        cotangents=cotangents,
        gradients=wanted,
        tolerance=1e-13 * max(1.0, call.amplitude**2, spread / 100),
    )
    if isinstance(mechanism.definition.steps, type):
        by_steps = mechanism.definition.vjp(**exact)[1](**cotangents)
        compare(wanted, by_steps, units, tolerance, "float64", "definition's gradient of")
    for n, x in before.items():
        if not np.array_equal(np.array(passed[n]), x, equal_nan=True):
            raise Fault(f"{n} was changed")
    hidden(call, mechanism, exact, cotangents, rng)


def hidden(call, mechanism, exact, cotangents, rng):
    """What lies beyond the lengths may hold anything."""
    dirty = dict(exact)
    for lengths, names in (("key_lengths", "kv"), ("query_lengths", "q")):
        for n in names:
            if lengths in exact and n in exact and np.ndim(exact[n]) == 4:
                dirty[n] = exact[n].copy()
                for b, length in enumerate(np.ravel(exact[lengths])):
                    dirty[n][b, :, int(length) :] = rng.choice([np.nan, np.inf, -np.inf])
    if all(dirty[n] is x for n, x in exact.items()):
        return
    (want, want_back), (got, back) = (mechanism.vjp(**a, algorithm=call.algorithm) for a in (exact, dirty))
    for n, x in fields(want).items():
        compare(
            {n: fields(got)[n]}, {n: x}, {n: max(1.0, largest(x))}, 1e-12, "float64", "result behind poisoned padding"
        )
    gradients, wanted = back(**cotangents), want_back(**cotangents)
    for n, g in wanted.items():
        unit = {n: max(1.0, largest(np.asarray(g)))}
        compare({n: gradients[n]}, {n: np.asarray(g)}, unit, 1e-11, "float64", "gradient behind poisoned padding of")
