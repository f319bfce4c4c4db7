"""Parts of the diagnosis on numbers that a person can follow: matching, scopes, faults of structure, readings, departures."""

import dataclasses

import numpy as np
import pytest

import refattn as ra
from refattn.verification.diagnosis import JudgedCall, Workbench, departure, explain
from refattn.verification.diagnosis.matching import match, shows
from refattn.verification.diagnosis.readings import Reading, sentences
from refattn.verification.diagnosis.scope import scope_of
from refattn.verification.diagnosis.structure import findings
from refattn.verification.question import Question
from refattn.verification.truth import truth_of
from refattn.verification.verdict import judge

MECHANISM = ra.scaled_dot_product_attention


def called(kernel, *, seed=0, sizes=None, name="probe", **options):
    """A kernel's results on one drawn call, judged."""
    rng = np.random.default_rng(seed)
    example = MECHANISM.example(rng, **{"b": 2, "h": 4, "g": 2, "q": 5, "k": 7, "d": 4, "e": 3, **(sizes or {})})
    arrays = {n: x.astype(np.float32) for n, x in example.items()}
    question = Question(MECHANISM, arrays, options, {}, (), "float32", takes=frozenset({"align"}))
    truth = truth_of(question)
    got = kernel(**arrays, **options)
    judgements = tuple(judge(n, got[n], truth) for n in got)
    return JudgedCall(name, "float32", sum(x.size for x in arrays.values()), truth, got, judgements)


def right(**arguments):
    result = MECHANISM.forward(**arguments)
    return {"output": result.output, "lse": result.lse}


def without_window_where_one_query(**arguments):
    if arguments["q"].shape[-2] == 1:
        arguments.pop("window", None)
    return right(**arguments)


def test_an_explanation_has_the_scope_that_the_calls_give():
    calls = []
    for seed, queries in enumerate((1, 1, 3, 5, 2)):
        for options in ({}, {"causal": True, "align": "lower_right"}, {"window": (1, 0), "align": "lower_right"}):
            calls.append(called(without_window_where_one_query, seed=seed, sizes={"q": queries}, **options))
    explanations = explain(calls, Workbench(MECHANISM, calls[0].truth.question.conventions))
    first = explanations[0]
    assert first.name == "window_drop"
    assert [c.says for c in first.scope] == ["with one query"]
    assert first.confirmed
    assert set(first.outputs) == {"output", "lse"}
    found = departure(calls, Workbench(MECHANISM, calls[0].truth.question.conventions), explanations)
    assert found.unexplained == []


def test_right_calls_need_no_explanation():
    calls = [called(right, seed=n) for n in range(3)]
    assert not any(c.failing for c in calls)
    assert explain(calls, Workbench(MECHANISM, calls[0].truth.question.conventions)) == []


def test_match_tells_what_is_explained_what_is_left_and_what_is_limited():
    def first_half_doubled(**arguments):
        found = {n: x.copy() for n, x in right(**arguments).items()}
        found["output"][:1] *= 2
        found["lse"] += 1
        return found

    call = called(first_half_doubled)
    truth = call.truth.values
    fit = match(call, {"output": 2 * truth["output"]})
    assert fit.explained == ("output",)
    assert fit.left == ("lse",)
    assert fit.elsewhere["output"] == pytest.approx(0.5)
    assert not match(call, {"output": 3 * truth["output"], "lse": truth["lse"] + 1}).whole
    assert match(call, {"output": 3 * truth["output"], "lse": truth["lse"] + 1}).explained == ("lse",)
    assert shows(call, {"output": 2 * truth["output"]})
    assert not shows(call, {"output": truth["output"] * (1 + 1e-9)})


@dataclasses.dataclass(frozen=True)
class Featured:
    features: dict
    dtype: str = "float32"


def test_scopes_keep_right_calls_out_or_there_is_none():
    one = Featured({"dtype": "float32", "queries": 1, "keys": 70, "window": True})
    two = Featured({"dtype": "float32", "queries": 1, "keys": 9, "window": True, "mask": True})
    clean = Featured({"dtype": "float32", "queries": 1, "keys": 9})
    long = Featured({"dtype": "float32", "queries": 5, "keys": 9, "window": True})
    assert scope_of([one, two], []) == ()
    assert [c.says for c in scope_of([one, two], [clean])] == ["with a window"]
    assert {c.says for c in scope_of([one, two], [clean, long])} == {"with one query", "with a window"}
    assert scope_of([one, two], [two]) is None


def zeros(**arguments):
    return {n: np.zeros_like(x) for n, x in right(**arguments).items()}


def crossed(**arguments):
    return {n: np.roll(x, 1, axis=0) for n, x in right(**arguments).items()}


def padded_garbage(**arguments):
    found = {n: x.copy() for n, x in right(**arguments).items()}
    found["output"][1, :, 3:] = 7.0
    return found


@pytest.mark.parametrize(
    "kernel, options, name",
    [
        (zeros, {}, "unwritten"),
        (crossed, {}, "batch_crossed"),
        (padded_garbage, {"query_lengths": np.array([5, 3]), "key_lengths": np.array([7, 4])}, "tail_garbage"),
    ],
)
def test_faults_of_structure(kernel, options, name):
    call = called(kernel, **options)
    assert call.failing
    assert findings(call)[0].name == name


def test_readings_say_which_pairs():
    expected = np.tril(np.ones((1, 4, 4))) / np.arange(1, 5)[None, :, None]
    actual = expected.copy()
    actual[:, 2:, 3] = 0.2
    actual[:, 3, 0] = 0.0
    said = list(sentences(Reading(actual, expected, 4)))
    assert said == [
        "it sees, and should not, 1 pairs: rows 2, keys 3",
        "it does not see 1 pairs: rows 3, keys 0",
    ]
