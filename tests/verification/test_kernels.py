"""The verifier on independent kernels of every mechanism: right ones pass, wrong ones are found, and what is wrong is named.

In process, on small probes; truth, bounds and predictions are made once for all kernels of a mechanism.
"""

import dataclasses
import functools
import inspect

import numpy as np
import pytest
from verification.calibrate import answers
from verification.ground import Candidate, Ground
from verification.kernels import MAKERS, kernel
from verification.kernels.wrong import WRONG

import refattn as ra
from refattn.verification.conventions import Conventions
from refattn.verification.diagnosis import Workbench

LARGEST, MOST = 12_000, 24


@functools.lru_cache(2)
def bench(mechanism):
    return Workbench(ra.mechanisms[mechanism], Conventions(), kept=200)


@functools.lru_cache(2)
def ground(mechanism, dtype="float32"):
    right = kernel(mechanism)
    return Ground(
        ra.mechanisms[mechanism], dtype, bench(mechanism), accepts=lambda names: right.accepts(tuple(n for n in names if n in ra.mechanisms[mechanism].options)), cotangents=right.cotangents, largest=LARGEST,
        most=MOST,
    )  # fmt: skip


def candidate(mechanism, made, dtype="float32", gradients=True):
    """The kernel on the ground of its mechanism, and its judged calls."""
    base = ground(mechanism, dtype)

    def run(right):
        question = right.truth.question
        question = question if gradients else dataclasses.replace(question, cotangents={}, wrt=())
        try:
            got = answers((made.forward, made.backward), question, ra.mechanisms[mechanism].outputs)
        except (NotImplementedError, TypeError, ValueError):  # a shape, or a form of an option, that it does not take
            return None
        return {n: np.asarray(x) for n, x in got.items() if n in right.truth.values}

    at_hand = Candidate(base, run)
    return at_hand, [case for call in base.calls if (case := at_hand.judged(call)) is not None]


def in_half(made):
    """Arithmetic in float32 on stored halves, as kernels do it."""

    def wide(x):
        return x.astype(np.float32) if isinstance(x, np.ndarray) and x.dtype.itemsize == 2 else x

    def narrow(name, x, kind):
        return x if name in ("lse", "commitment_loss") else np.asarray(x).astype(kind)

    def forward(*arrays, **options):
        kind = arrays[0].dtype
        result = made.forward(*map(wide, arrays), **{n: wide(x) for n, x in options.items()})
        if isinstance(result, dict):
            return {n: narrow(n, x, kind) for n, x in result.items()}
        if isinstance(result, tuple):
            return (result[0].astype(kind), *result[1:])
        return result.astype(kind)

    def backward(*arrays, **options):
        kind = arrays[1].dtype
        found = made.backward(*map(wide, arrays), **{n: wide(x) for n, x in options.items()})
        return {n: np.asarray(x).astype(kind) for n, x in found.items()}

    forward.__signature__, backward.__signature__ = map(inspect.signature, (made.forward, made.backward))
    return dataclasses.replace(made, forward=forward, backward=backward)


def of_mechanism(entries, name=lambda x: x):
    """One worker takes all tests of a mechanism where the runner can group them."""
    return [pytest.param(x, id=str(x)) for x in sorted(entries, key=name)]


@pytest.mark.parametrize("mechanism", MAKERS)
def test_a_right_kernel_passes(mechanism):
    _, cases = candidate(mechanism, kernel(mechanism))
    assert len(cases) >= 8
    failed = [f"{c.probe}: {j.array}: {j.says}" for c in cases for j in c.judgements if not j.ok]
    assert failed == []
    assert any(n.startswith("d_") for c in cases for n in c.judged)


@pytest.mark.parametrize("wrong", of_mechanism(WRONG, lambda w: w.mechanism))
def test_a_wrong_kernel_is_found_and_named(wrong):
    at_hand, cases = candidate(wrong.mechanism, wrong.make(), wrong.dtype, wrong.gradients)
    assert any(c.failing for c in cases)
    said = [e["class"] for e in at_hand.causes(cases).records]
    first = [name for e in said[:2] for name in e.split(" + ")]
    assert set(wrong.classes) <= set(first), said
