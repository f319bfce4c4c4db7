"""The verifier on independent kernels of every mechanism: right ones pass, wrong ones are found, and what is wrong is named.

In process, on small probes; truth, bounds and predictions are made once for all kernels of a mechanism.
"""

import collections
import dataclasses
import functools

import numpy as np
import pytest
from verification.calibrate import answers
from verification.ground import Candidate, Ground
from verification.kernels import MAKERS, kernel
from verification.kernels.wrong import WRONG

import refattn as ra
from refattn.verification.conventions import Conventions
from refattn.verification.diagnosis import Workbench

LARGEST, MOST = 30_000, 16


@functools.lru_cache(2)
def bench(mechanism):
    return Workbench(ra.mechanisms[mechanism], Conventions(), kept=200)


@functools.lru_cache(2)
def ground(mechanism, dtype="float32"):
    right, known = kernel(mechanism), ra.mechanisms[mechanism].options

    def accepts(names):
        return right.accepts(tuple(n for n in names if n in known))

    settings = {"accepts": accepts, "cotangents": right.cotangents, "largest": LARGEST, "most": MOST}
    return Ground(ra.mechanisms[mechanism], dtype, bench(mechanism), **settings)


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


@pytest.mark.parametrize("mechanism", MAKERS)
def test_a_right_kernel_passes(mechanism):
    _, cases = candidate(mechanism, kernel(mechanism))
    assert len(cases) >= 6
    failed = [f"{c.probe}: {j.array}: {j.says}" for c in cases for j in c.judgements if not j.ok]
    assert failed == []
    assert any(n.startswith("d_") for c in cases for n in c.judged)


@pytest.mark.parametrize("wrong", sorted(WRONG, key=lambda w: w.mechanism), ids=str)
def test_a_wrong_kernel_is_found_and_named(wrong):
    at_hand, cases = candidate(wrong.mechanism, wrong.make(), wrong.dtype, wrong.gradients)
    assert any(c.failing for c in cases)
    said = [e["class"] for e in at_hand.causes(cases).records]
    first = [name for e in said[:2] for name in e.split(" + ")]
    assert set(wrong.classes) <= set(first), said


def test_there_are_enough_of_every_kind():
    kinds = collections.Counter(w.kind for w in WRONG)
    assert len(WRONG) >= 60 + 45
    assert {w.mechanism for w in WRONG} == set(MAKERS)
    assert min(kinds.values()) >= 2
    assert len(kinds) >= 7
