"""Namespaces, leading axes, memory layouts and half dtypes."""

import array_api_strict
import numpy as np
import pytest
from contract.harness import TABLES, case, every, ids
from contract.test_numbers import assert_same, unit
from ml_dtypes import bfloat16
from support import EPS, assert_close, random_cotangents

STRICT = type(array_api_strict.zeros(1))


def strict(x):
    if isinstance(x, tuple):
        return tuple(map(strict, x))
    return array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize("mechanism, name", every(), ids=ids)
def test_another_namespace_gives_the_same(mechanism, name):
    it = case(mechanism, name)
    arguments = {n: strict(x) for n, x in it.arguments.items()}
    algorithm = ("whole", "tiled")[it.seed % 2]  # one of the two, as this namespace is slow; test_numbers has both
    result, pullback = it.mechanism.vjp(**arguments, algorithm=algorithm)
    assert all(type(x) is STRICT for x in result.fields.values() if x is not None)
    assert_same(result, it.result, 100 * EPS * unit(mechanism))
    gradients = pullback(**{n: strict(d) for n, d in it.cotangents.items()})
    assert_same(gradients, it.gradients, 200 * EPS * unit(mechanism))


def laid_out(x, kind):
    """The same numbers in other memory: reversed axes, steps of 2, negative steps."""
    if kind == 0:
        return np.array(x, order="F")
    step = (slice(1, None, 2), slice(None, None, -1))[kind - 1]
    memory = np.zeros(tuple(2 * s for s in x.shape) if kind == 1 else x.shape)
    memory[(step,) * x.ndim] = x
    return memory[(step,) * x.ndim]


@pytest.mark.parametrize("mechanism, name", every(), ids=ids)
def test_memory_layout_does_not_matter(mechanism, name):
    it = case(mechanism, name)
    arguments = it.changed(**{n: laid_out(it.arguments[n], (it.seed + i) % 3) for i, n in enumerate(it.floating())})
    result, pullback = it.mechanism.vjp(**arguments)
    assert_same(result, it.result, 100 * EPS * unit(mechanism))
    cotangents = {n: np.array(d, order="F") for n, d in it.cotangents.items()}
    assert_same(pullback(**cotangents), it.gradients, 200 * EPS * unit(mechanism))


@pytest.mark.parametrize("mechanism, name", every(), ids=ids)
def test_axes_of_stride_0(mechanism, name):
    """An array that is broadcast and its copy are the same argument; their gradients have the full shape."""
    it = case(mechanism, name)
    thin, full = dict(it.arguments), dict(it.arguments)
    for n in it.floating():
        x = it.arguments[n]
        thin[n] = np.broadcast_to(x[:1], x.shape) if x.ndim > 2 and x.size else x
        full[n] = thin[n].copy()
    (got, back), (want, want_back) = it.mechanism.vjp(**thin), it.mechanism.vjp(**full)
    assert_same(got, want, 100 * EPS * unit(mechanism))
    cotangents = {
        n: np.broadcast_to(np.ones(()), d.shape)
        for n, d in it.cotangents.items()
        if np.shape(getattr(want, n)) == d.shape
    }
    cotangents = {n: np.where(np.isfinite(getattr(want, n)), d, 0.0) for n, d in cotangents.items()}
    assert_same(back(**cotangents), want_back(**cotangents), 200 * EPS * unit(mechanism))


ROUNDING = {np.dtype(np.float16): 2.0**-11, np.dtype(bfloat16): 2.0**-8, np.dtype(np.float32): 2.0**-24}


@pytest.mark.parametrize("mechanism, name", every(), ids=ids)
def test_low_precision_is_computed_in_float32_and_rounded_once(mechanism, name):
    """One of three dtypes in every case."""
    it = case(mechanism, name)
    dtype, u = list(ROUNDING.items())[it.seed % 3]
    low = it.changed(**{n: it.arguments[n].astype(dtype) for n in it.floating()})
    exact = it.changed(**{n: low[n].astype(np.float64) for n in it.floating()})
    (result, pullback), (want, want_back) = it.mechanism.vjp(**low), it.mechanism.vjp(**exact)
    for field, x in want.fields.items():
        y = getattr(result, field)
        if x is None or x.dtype != np.float64:
            continue
        assert y.dtype == (dtype if field in it.mechanism._storage else np.float32), field
        size = np.max(np.abs(x), where=np.isfinite(x), initial=1.0)
        y = np.asarray(y, np.float64) / size
        assert_close(y, x / size, (u if field in it.mechanism._storage else 0) + 200 * 2.0**-24 * unit(mechanism))
    cotangents = {n: d.astype(dtype) for n, d in it.cotangents.items()}
    wanted = want_back(**{n: d.astype(np.float64) for n, d in cotangents.items()})
    for n, g in pullback(**cotangents).items():
        if n in it.floating():
            assert g.dtype == dtype, n
            size = max(1.0, np.max(np.abs(wanted[n]), initial=0.0))
            assert_close(g.astype(np.float64) / size, wanted[n] / size, u + 400 * 2.0**-24 * unit(mechanism))


# Where batch entries are not independent: flat batch numbers inside a function, one divisor for the whole batch.
COUPLED = (
    "score_mod",
    "together",
    "per_batch",
    "pattern",
    "indices_masked",
    "nystrom_attention-batch",
    "routing_attention-mask",
)
INDEPENDENT = [c for c in every() if not any(word in "-".join(c) for word in COUPLED)]
# These broadcast to the leading axes of the others, and bring none of their own.
BEHIND = {"lses": 1}  # results whose batch axes stand behind an axis of their own
FOLLOWERS = ("mask", "bias", "dropout_mask", "buckets", "query_mask", "key_mask", "noise", "indices", "global_tokens")


def names_in_turn(it, more):
    """All arguments with leading axes in the first case of a mechanism, one of them in each other case."""
    table = TABLES[it.mechanism.name]
    names = [n for n in table.BATCHED if n in it.arguments]
    if not more:  # some other array has to bring the axis
        names = [n for n in names if np.ndim(it.arguments[n]) > table.BATCHED[n]]
        names = [n for n in names if any(m != n and m not in FOLLOWERS for m in names)]
    return names if it.name == next(iter(table.CASES)) else names[it.seed % len(names) :][:1] if names else []


def alike(it, name, lead):
    """Three arrays like this argument, with as many leading axes as the call has."""
    core, x = TABLES[it.mechanism.name].BATCHED[name], np.asarray(it.arguments[name])
    x = x.reshape((1,) * (lead + core - x.ndim) + x.shape)
    if x.dtype == bool:
        return [x, ~x, np.roll(x, 1, axis=-1)]
    if x.dtype.kind == "i":
        return [x, np.roll(x, 1, axis=-1), np.roll(x, 2, axis=-1)]
    return [x, *(x + 0.5 * it.rng().standard_normal((2, *x.shape)))]


@pytest.mark.parametrize("mechanism, name", INDEPENDENT, ids=ids)
def test_every_argument_may_have_a_leading_axis_more(mechanism, name):
    """Three calls in one: the results stand along the new axis, gradients of what is shared are sums."""
    it = case(mechanism, name)
    arguments = {n: np.asarray(x)[None] if n.endswith("lengths") and len(x) > 1 else x for n, x in it.arguments.items()}
    core = TABLES[mechanism].BATCHED
    lead = max(np.ndim(it.arguments[n]) - axes for n, axes in core.items() if n in it.arguments)
    for n in names_in_turn(it, more=True):
        wide = (n, next(m for m in core if m in it.arguments)) if n in FOLLOWERS else (n,)
        slices = {m: alike(it, m, lead) for m in wide}
        result, pullback = it.mechanism.vjp(**{**arguments, **{m: np.stack(x) for m, x in slices.items()}})
        calls = [it.mechanism.vjp(**it.changed(**{m: x[i] for m, x in slices.items()})) for i in range(3)]
        for field, x in result.fields.items():
            parts = [getattr(r, field) for r, _ in calls]
            if x is not None:
                want = (
                    np.mean(parts, axis=0) if np.ndim(x) == 0 else np.stack(parts, axis=BEHIND.get(field, 0))
                )  # a loss is a mean
                assert_same({field: x}, {field: want}, 100 * EPS * unit(mechanism))
        cotangents = random_cotangents(it.mechanism, result, it.rng())
        gradients = [
            back(
                **{f: d / 3 if np.ndim(d) == 0 else np.take(d, i, axis=BEHIND.get(f, 0)) for f, d in cotangents.items()}
            )
            for i, (_, back) in enumerate(calls)
        ]
        want = {m: (np.stack if m in wide else sum)([g[m] for g in gradients]) for m in gradients[0]}
        assert_same(pullback(**cotangents), want, 200 * EPS * unit(mechanism))


@pytest.mark.parametrize("mechanism, name", INDEPENDENT, ids=ids)
def test_every_argument_may_lack_the_leading_axis(mechanism, name):
    it = case(mechanism, name)
    for n in names_in_turn(it, more=False):
        x = np.asarray(it.arguments[n])
        full = it.changed(**{n: np.broadcast_to(x[:1], x.shape).copy()})
        (got, back), (want, want_back) = (it.mechanism.vjp(**a) for a in (it.changed(**{n: x[0]}), full))
        assert_same(got, want, 100 * EPS * unit(mechanism))
        cotangents = random_cotangents(it.mechanism, want, it.rng())
        wanted = want_back(**cotangents)
        wanted |= {n: np.sum(wanted[n], axis=0)} if n in wanted else {}
        assert_same(back(**cotangents), wanted, 200 * EPS * unit(mechanism))
