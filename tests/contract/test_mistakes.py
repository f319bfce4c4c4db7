"""Every known mistake differs from the right numbers where it is offered, and is offered by some case."""

import numpy as np
import pytest
from contract.harness import TABLES, case, ids

import refattn as ra

DENSE = "scaled_dot_product_attention"
LIFTED = {m.class_ for m in ra.mechanisms[DENSE].mutations}


def label(mutation):
    return f"{mutation.class_}: {mutation.says}"


def apart(wrong, right):
    """The largest difference of two sets of arrays, in units of the right one's largest entry; a NaN on one side is one."""
    largest = 0.0
    for name, x in wrong.items():
        y = right.get(name)
        if y is None or x is None or np.shape(x) != np.shape(y):
            return np.inf  # an array that is missing or has another shape
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        differ = ~((x == y) | (np.isnan(x) & np.isnan(y)))
        with np.errstate(invalid="ignore", over="ignore"):
            gaps = np.where(np.isfinite(x) & np.isfinite(y), np.abs(x - y), np.inf)[differ]
        size = max(1.0, np.max(np.abs(y), where=np.isfinite(y), initial=0.0))
        largest = max(largest, np.max(gaps, initial=0.0) / size)
    return largest


def effect(mutation, it):
    """How far the mistake is from the right numbers in this case; None where it says that it has no effect."""
    found = []
    with np.errstate(all="ignore"):
        wrong = None if mutation.forward is None else mutation.forward(it.arguments)
        if wrong is not None:
            found.append(apart(wrong.fields, it.result.fields))
        wrong = None if mutation.gradients is None else mutation.gradients(it.arguments, it.cotangents)
        if wrong is not None:
            found.append(apart(wrong, it.gradients))
    return max(found) if found else None


def richest(mechanism):
    """The case with most arguments."""
    return max(TABLES[mechanism].CASES, key=lambda name: len(case(mechanism, name).arguments))


# Compressive attention takes the mistakes of Transformer-XL, and is causal: nothing beyond the edge of the shift is seen.
# Its distances have one sign for the same reason. Linformer's case has projections that are no square.
NEVER = [
    ("compressive_attention", "rel_shift_leak"),
    ("compressive_attention", "xl_distance_signed"),
    ("linformer_attention", "linformer_transposed"),
]
OWN = [  # those of softmax attention have cases of their own in tests/mistakes
    (mechanism, i)
    for mechanism, attention in ra.mechanisms.items()
    for i, m in enumerate(attention.mutations)
    if mechanism != DENSE and m.class_ not in LIFTED and (mechanism, m.class_) not in NEVER
]


@pytest.mark.parametrize("mechanism, i", OWN, ids=lambda x: ids(x) if isinstance(x, str) else str(x))
def test_some_case_shows_it(mechanism, i):
    mutation = ra.mechanisms[mechanism].mutations[i]
    for name in (*getattr(TABLES[mechanism], "SHOWING", {}), *TABLES[mechanism].CASES):
        moved = effect(mutation, case(mechanism, name))
        assert moved is None or moved > 1e-12, f"{label(mutation)} changes nothing in {name}, and does not say so"
        if moved is not None and moved > 1e-3:
            return
    raise AssertionError(f"no case shows {label(mutation)}")


@pytest.mark.parametrize("mechanism", ra.mechanisms)
def test_one_without_effect_says_so(mechanism):
    it = case(mechanism, richest(mechanism))
    for mutation in ra.mechanisms[mechanism].mutations:
        moved = effect(mutation, it)
        assert moved is None or moved > 1e-12, label(mutation)
