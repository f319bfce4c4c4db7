"""Malformed calls of every signature: each has to be refused by a TypeError or ValueError that names the argument.

Every argument of a good call is replaced, one at a time, by what its kind cannot be.  What may be right or wrong depending
on the sizes (0, -1, 10**30) may be accepted, but neither crash nor be refused in somebody else's words.
"""

import re
import warnings

import numpy as np

import refattn as ra

SELDOM = ["keep_weights", "keep_terms", "algorithm", "backend", "compute_dtype"]
FOREIGN = re.compile(
    r"operand|broadcast together|not supported between|unsupported|object of type|has no attribute|invalid literal|cannot"
    r" reshape|subscriptable|iterable|inhomogeneous|truth value|must be real|not callable|out of bounds|too large|ufunc|concatenat|slice"
)


class Odd:
    """An object that nothing expects."""

    def __repr__(self):
        return "Odd()"


def kind(parameter, value):
    """flag, choice, number, count, array, indices or other: from the default or from the value of a good call."""
    known = parameter.default if parameter.default is not parameter.empty and parameter.default is not None else value
    if isinstance(known, bool):
        return "flag"
    if isinstance(known, str):
        return "choice"
    if isinstance(known, float):
        return "number"
    if isinstance(known, (int, np.integer)):
        return "count"
    if isinstance(known, np.ndarray):
        return "array" if known.dtype.kind == "f" else "indices"
    return "other"


def wrong(what, value):
    """(value, must be refused) of every malformed value for an argument of that kind."""
    text, odd, nan = "no", Odd(), float("nan")
    if what == "flag":
        return [(x, True) for x in (text, nan, odd, np.array([True, False]), 2, "")]
    if what == "choice":
        return [(x, True) for x in ("nonsense", odd, 3, np.array([1.0, 2.0]), nan, b"x")]
    if what == "number":
        return [(x, True) for x in (text, nan, odd, np.ones(2), 1 + 2j, [1.0])] + [
            (x, False) for x in (float("inf"), -1.0, 10**400)
        ]
    if what == "count":
        return [(x, True) for x in (2.5, "3", odd, nan, np.ones(2))] + [
            (x, False) for x in (0, -1, 10**30, -(10**30), True)
        ]
    shapes = []
    if isinstance(value, np.ndarray) and value.ndim:
        grown = [np.concatenate([value, value[..., :1]], axis=-1)] if value.shape[-1] else []
        shapes = [(x, False) for x in (value[..., :0], value[..., None], *grown, np.zeros((), value.dtype))]
    if what == "array":
        bad = (
            text,
            odd,
            [[1.0]],
            np.zeros(value.shape, int),
            value.astype(np.complex128),
            value.astype(object),
            value > 0,
            nan,
        )
        return [(x, True) for x in bad] + [(0.5, False)] + shapes
    if what == "indices":
        return [(x, True) for x in (text, odd, value.astype(np.complex128), value.astype(object), nan)] + shapes
    return [(x, True) for x in (odd,)] + [
        (x, False) for x in (text, nan, -1, 10**30, np.ones(2), (1, 2, 3), [[1]], True)
    ]


def refusal(call, names, must, label):
    """None if the call is refused as it should be, else what happens instead."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with np.errstate(all="ignore"):
                call()
    except (TypeError, ValueError) as error:
        text = str(error)
        if not any(re.search(rf"\b{re.escape(n)}\b", text) for n in names):
            return f"{label}: the message names no argument: {text[:90]}"
        if FOREIGN.search(text):
            return f"{label}: in the words of another library: {text[:90]}"
        return None
    except Exception as error:
        return f"{label}: {type(error).__name__}: {str(error)[:80]}"
    return f"{label}: accepted" if must else None


def shown(x):
    return f"{x.dtype}{x.shape}" if isinstance(x, np.ndarray) else repr(x)[:30]


def options_of(mechanism):
    """Every option with a value of its kind, so that those that default to None are asked too."""
    from fuzz.draw import drawn

    found = {}
    for seed in range(40):
        call = drawn(mechanism, seed)
        if call is not None and all(np.size(x) for x in call.arguments.values() if isinstance(x, np.ndarray)):
            for name in call.arguments:
                found.setdefault(name, call)
    return found


LEGAL = {
    "adaptive_span": "ramp",  # need not be whole, as its default is
    "compressive": "same_length",  # a number is one of its values, as is True
    "sparse_transformer": "align",  # an int is one of its values
    "transformer_xl": "same_length",
}
"""Options for which a value of another kind than that of the draw is legal too."""


def complaints(mechanism):
    """What is wrong with the errors of this mechanism: one line each."""
    legal = LEGAL.get(mechanism.removesuffix("_attention"))
    attention = ra.mechanisms[mechanism]
    parameters = {n: p for n, p in attention.__signature__.parameters.items() if p.kind is not p.VAR_KEYWORD}
    lines = []
    for name, call in options_of(mechanism).items():
        if name == legal:
            continue
        value = call.arguments[name]
        what = kind(parameters[name], value)
        if isinstance(value, str) and what == "number":
            what = "choice"
        if name == "align":  # a choice or a number
            what = "other"
        for bad, must in wrong(what, value):
            arguments = {**call.arguments, name: bad}
            label = f"{name}={shown(bad)}"
            related = [name] if must else parameters
            lines.append(refusal(lambda a=arguments: attention.forward(**a), related, must, label))
    for name in ("algorithm", "keep_weights", "backend", "compute_dtype"):
        if name in parameters:
            good = next(iter(options_of(mechanism).values())).arguments
            for bad in ("nonsense", Odd(), 3, float("nan"), np.ones(2)):
                label = f"{name}={shown(bad)}"
                lines.append(
                    refusal(lambda g=good, n=name, b=bad: attention.forward(**g, **{n: b}), [name], True, label)
                )
    lines += cotangents(attention, mechanism)
    return [line for line in lines if line]


def cotangents(attention, mechanism):
    call = next(iter(options_of(mechanism).values()))
    result, pullback = attention.vjp(**call.arguments)
    for field in attention.outputs:
        d = np.asarray(getattr(result, field))
        for bad in (
            d.astype(complex),
            np.zeros(d.shape, int),
            d.tolist(),
            "no",
            1.0,
            np.zeros((*d.shape, 1)),
            d.astype(object),
            Odd(),
        ):
            yield refusal(
                lambda b=bad, f=field: pullback(**{f: b}), ["cotangent"], True, f"cotangent of {field}={shown(bad)}"
            )
    yield refusal(lambda: pullback(nonsense=result.output), ["nonsense"], True, "cotangent of nonsense")
