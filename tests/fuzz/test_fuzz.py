"""A few hundred drawn calls of all mechanisms, and the errors of malformed ones; `make fuzz` draws more."""

import pytest
from fuzz.draw import DRAWS, NOT_DRAWN, drawn
from fuzz.malformed import complaints
from fuzz.run import fault

import refattn as ra

CALLS = 10  # of each mechanism


@pytest.mark.parametrize("mechanism", DRAWS)
def test_drawn_calls(mechanism):
    found = [text for seed in range(CALLS) if (text := fault(mechanism, seed))]
    assert not found, "\n\n".join(found[:3])


@pytest.mark.parametrize("mechanism", DRAWS)
def test_malformed_calls_have_clear_errors(mechanism):
    found = complaints(mechanism)
    assert not found, "\n".join(found)


def test_every_mechanism_and_option_is_drawn():
    assert set(DRAWS) == set(ra.mechanisms)
    for name, attention in ra.mechanisms.items():
        options = {n for n, p in attention.__signature__.parameters.items() if p.kind is not p.VAR_KEYWORD}
        missing = options - {"algorithm", "backend", *NOT_DRAWN}
        for seed in range(400):
            call = drawn(name, seed) if missing else None
            missing -= set(call.arguments) if call else set()
        assert not missing, f"{name}: {sorted(missing)} are never drawn"
