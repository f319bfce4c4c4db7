"""Probes: every mistake shows in one of them, and each is stored the way it says."""

import numpy as np
import pytest

import refattn as ra
from refattn.mechanism import Mechanism
from refattn.mistakes.engine import Case
from refattn.records import Cost, Result
from refattn.verification.conventions import CONVENTION_OPTIONS, Conventions
from refattn.verification.probes import Plan, covering_rows, probes, redraw, storage_dtype
from refattn.verification.probes.covering import combinations
from refattn.verification.question import Question
from refattn.verification.truth import truth_of
from refattn.verification.verdict import judge

DENSE = ra.scaled_dot_product_attention


@pytest.fixture(scope="module")
def made():
    return {probe.name: probe for probe in probes(DENSE)}


def question(probe, dtype, wrt=()):
    arguments, cotangents = probe.stored(dtype)
    arrays = {n: arguments[n] for n in probe.positional}
    options = {n: x for n, x in arguments.items() if n not in probe.positional}
    takes = frozenset(CONVENTION_OPTIONS)
    return Question(DENSE, arrays, options, cotangents if wrt else {}, wrt, dtype, Conventions(), takes)


# What no probe shows: options that are objects of refattn (a candidate cannot take them); roundings of partial results, which
# the calibration's faults of arithmetic hold.
UNSEEN = {"pattern_drop", "score_mod_drop", "round_partials"}

# Roundings to half storage: they show in half precision only.
OF_STORAGE = {"qk_overflow", "scores_in_storage", "low_prec_accum"}


def test_every_mistake_shows_in_a_probe(made):
    """The results (gradients apart) of at least one form of each class are outside the thresholds in some probe."""
    pending = {}
    for mistake in DENSE.catalogue:
        if set(mistake.sides) != {"backward"} and mistake.class_ not in UNSEEN:
            pending.setdefault(mistake.class_, []).append(mistake)
    for dtype, enough in (("float32", OF_STORAGE), ("float16", set())):
        for probe in sorted(made.values(), key=lambda p: p.size):
            if set(pending) <= enough:
                break
            asked = question(probe, dtype)
            truth = truth_of(asked)
            case = Case(DENSE.definition.steps, asked.arguments(), storage=storage_dtype(dtype))
            for name in list(pending):
                if any(_visible(case.results(m), truth) for m in pending[name]):
                    del pending[name]
    assert not pending


def _visible(results, truth):
    return results is not None and any(
        np.shape(results[n]) != right.shape or judge(n, results[n].astype(np.float32), truth).verdict == "mismatch"
        for n, right in truth.values.items()
    )


def test_the_family_is_complete(made):
    """Every option that a candidate of another library can take stands in some probe."""
    assert {option for probe in made.values() for option in probe.arguments} == set(DENSE.options) - {
        "pattern",
        "score_mod",
        "keep_weights",
    }


@pytest.mark.parametrize("name", sorted(ra.mechanisms))
def test_every_pair_of_levels_stands_in_a_probe(name):
    plan = Plan(ra.mechanisms[name])
    first = plan.build_all(plan.alone())
    assert first[0].name == "plain"
    table = plan.table(first + plan.rest(first))
    assert len(table) > 50
    assert [pair for pair, probe in table.items() if not probe] == []


def test_few_shapes_among_the_covering_rows():
    """JAX compiles anew for each shape."""
    plan = Plan(DENSE)
    shapes = {probe.shapes for probe in plan.pairs()}
    assert 8 <= len(shapes) <= 12


def test_covering_rows_hold_every_possible_pair():
    levels = {"a": ("0", "1", "2"), "b": ("0", "1"), "c": ("0", "1"), "d": ("0", "1", "2", "3")}

    def possible(row):
        return not (row.get("a") == "2" and row.get("b") == "1")

    for strength in (2, 3):
        rows = covering_rows(levels, strength=strength, possible=possible)
        wanted = combinations(levels, strength, possible)
        assert all(any(set(chosen) <= row.items() for row in rows) for chosen in wanted)
        assert all(possible(row) for row in rows)
        assert len(rows) < len(wanted)
    some = covering_rows(levels, possible=possible)
    assert covering_rows(levels, possible=possible, covered=some) == []


def test_what_a_candidate_does_not_take_is_left_out():
    plan = Plan(DENSE, accepts=lambda names: not {"bias", "window"} & set(names), fit=lambda s: {**s, "d": 64, "e": 64})
    made = plan.build_all(plan.alone())
    made += plan.rest(made)
    assert all(not {"bias", "window"} & set(p.options) for p in made)
    assert {p.arguments["q"].shape[-1] for p in made} == {64}
    assert all(plan.table(made).values())


def test_no_option_that_says_what_an_array_says():
    """A kernel without ``max_span`` or ``hashes`` is still asked."""
    for name, option in (("adaptive_span_attention", "max_span"), ("lsh_attention", "hashes")):
        plan = Plan(ra.mechanisms[name])
        made = plan.build_all(plan.alone())
        assert sum(option not in p.arguments for p in made) > len(made) / 2
    lsh = {p.name: p for p in probes(ra.lsh_attention)}
    assert "rotations" not in lsh["hashed_buckets"].arguments
    span = {p.name: p for p in probes(ra.adaptive_span_attention)}
    assert set(span["spans_alone"].options) == {"span", "ramp"}


def test_a_probe_can_be_drawn_again(made):
    probe = made["causal_segments_mask_mixed"]
    assert set(probe.features) == {"shape", "causal", "segments", "mask"}
    again = redraw(DENSE, probe)
    np.testing.assert_array_equal(again.arguments["q"], probe.arguments["q"])
    less = redraw(DENSE, probe, drop=("mask", "segments"), sizes={"q": 5}, seed=3)
    assert set(less.options) == {"causal"}
    assert less.arguments["q"].shape[-2] == 5
    assert less.arguments["k"].shape == probe.arguments["k"].shape
    assert (less.arguments["v"] != probe.arguments["v"]).any()


def test_lengths_and_heads_differ_pairwise(made):
    a = made["mixed"].arguments
    (b, h, q, d), (_, g, k, e) = a["q"].shape, a["v"].shape
    assert len({h, g, q, k, d, e}) == 6
    assert h // g not in (g, 1)
    assert h & (h - 1)
    assert d & (d - 1)
    assert d % 16
    assert e != d
    lengths = {(p.arguments["q"].shape[-2], p.arguments["k"].shape[-2]) for p in made.values()}
    assert any(q < k for q, k in lengths)
    assert any(q > k for q, k in lengths)
    assert any(q == 1 < k for q, k in lengths)
    assert any(q == k for q, k in lengths)
    assert any(k > 32 and k % 32 == 1 for q, k in lengths)
    assert any(k >= 1000 for q, k in lengths)
    del b


def test_logits_are_where_the_probe_says(made):
    for name, low, high in (
        ("negative_logits", -200, -120),
        ("negative_masked_tile", -200, -120),
        ("far_negative_logits", -1.1e5, -0.9e5),
    ):
        a, _ = made[name].stored("float16")
        q, k = (a[n].astype(np.float64) for n in ("q", "k"))
        logits = np.repeat(k, 3, axis=1) @ np.swapaxes(q, -1, -2) * q.shape[-1] ** -0.5
        assert low < logits.min() < logits.max() < high
    a, _ = made["large_logits"].stored("float16")
    q, k = (a[n].astype(np.float64) for n in ("q", "k"))
    dot = np.repeat(k, 3, axis=1) @ np.swapaxes(q, -1, -2)
    assert dot.min() > 65504 > dot.max() * q.shape[-1] ** -0.5


def test_rounding_keeps_what_is_finite_finite(made):
    a, _ = made["poisoned_large"].stored("float16")
    assert np.isfinite(a["k"].astype(np.float64)).all()
    assert (a["k"].astype(np.float64) == 65504).any()
    assert a["mask"].dtype == bool
    a, cotangents = made["mixed"].stored("bfloat16")
    assert a["q"].dtype == storage_dtype("bfloat16")
    assert cotangents["output"].dtype == a["q"].dtype
    assert cotangents["lse"].dtype == np.float32


def test_memory_forms(made):
    transposed, _ = made["memory_transposed"].stored("float32")
    assert not transposed["q"].flags.c_contiguous
    assert np.swapaxes(transposed["q"], 1, 2).flags.c_contiguous
    sliced, _ = made["memory_sliced"].stored("float32")
    assert sliced["k"].strides[-2] == 2 * sliced["k"].shape[-1] * 4
    expanded, _ = made["memory_expanded"].stored("float32")
    assert expanded["k"].strides[0] == 0
    assert not expanded["k"].flags.writeable
    clean = made["memory_expanded"].clean().stored("float32")[0]
    assert clean["k"].flags.c_contiguous
    np.testing.assert_array_equal(clean["k"], expanded["k"])
    _, cotangents = made["cotangent_memory_transposed"].stored("float32")
    assert not cotangents["output"].flags.c_contiguous
    _, cotangents = made["cotangent_memory_expanded"].stored("float32")
    assert set(cotangents["output"].strides) == {0}


def test_poison_stands_where_nobody_looks(made):
    for name in ("poisoned_keys", "poisoned_values", "poisoned_large", "lengths_poisoned"):
        probe = made[name]
        dirty, clean = (DENSE.forward(**p.arguments) for p in (probe, probe.clean()))
        assert probe.poison
        np.testing.assert_array_equal(dirty.output, clean.output)


def test_fixed_options():
    made = probes(DENSE, options={"causal": True})
    assert all(probe.arguments["causal"] is True for probe in made)
    assert len(made) > 100


def test_a_probe_does_not_depend_on_the_others():
    one = {p.name: p for p in probes(DENSE)}
    other = {p.name: p for p in probes(DENSE, accepts=lambda names: "bias" not in names)}
    assert "bias" in one["combined"].options
    assert "bias" not in other["combined"].options
    np.testing.assert_array_equal(one["mixed"].arguments["k"], other["mixed"].arguments["k"])


def test_options_that_a_mechanism_lists():
    """``probe_options``: sizes by letter, options by name, both to the example; what it returns wins."""

    def forward(x, *, power=1, flip=False):
        return Result(output=x**power * (-1 if flip else 1)), None

    def example(rng, *, n=3, power=1, flip=False):
        return {"x": rng.standard_normal(n), "power": power + 1}

    mine = Mechanism(
        forward, lambda saved, **d: {}, lambda **s: Cost(), example,
        name="mine", equation="", paper="", axes={}, differentiable=("x",), definition=lambda x, **o: forward(x, **o)[0],
        probes=({"n": 7, "power": 2, "says": "cubes"},),
    )  # fmt: skip
    found = {p.name: p for p in probes(mine)}
    assert found["listed_0"].arguments["x"].shape == (7,)
    assert found["listed_0"].arguments["power"] == 3
    assert found["listed_0"].says == "cubes"
    assert found["flip_True"].options == ("flip", "power")
