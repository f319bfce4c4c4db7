"""Argument checks: one clear error that names the argument, its value and what was expected."""

import sys

import numpy as np
import pytest

from refattn import arrays


@pytest.mark.parametrize("value", ["no", 0, 1.0, float("nan"), None, object(), np.array([True]), np.array(True)])
def test_a_flag_is_true_or_false(value):
    with pytest.raises(TypeError, match=r"^causal is .*: expected True or False$"):
        arrays.require_flag("causal", value)
    assert arrays.require_flag("causal", np.True_) is True


@pytest.mark.parametrize("value", [True, 2.0, "3", None, np.array([1]), np.array(1.0), 1j])
def test_an_integer_is_nothing_else(value):
    with pytest.raises(TypeError, match=r"^block is .*: expected an integer$"):
        arrays.require_integer("block", value)


def test_integers_are_bounded():
    assert arrays.require_integer("block", np.int32(3), minimum=1) == 3
    for value in (10**30, sys.maxsize, -(10**30)):
        with pytest.raises(ValueError, match=f"block is {value}: expected at most"):
            arrays.require_integer("block", value)
    with pytest.raises(ValueError, match="block is 0: expected at least 1"):
        arrays.require_integer("block", 0, minimum=1)


@pytest.mark.parametrize("value", [True, "1", None, [1.0], np.array("a"), np.array(True), np.array(None)])
def test_a_number_is_no_other_object(value):
    with pytest.raises(TypeError, match=r"^scale is .*: expected a number$"):
        arrays.require_finite("scale", value)


@pytest.mark.parametrize(
    "value", [float("nan"), -np.inf, 10**400, np.float32("inf"), np.array(np.nan), complex(0, np.inf)]
)
def test_a_number_is_finite(value):
    with pytest.raises(ValueError, match=r"^scale is .*: expected a finite number$"):
        arrays.require_finite("scale", value)


def test_numbers_are_real_and_within_bounds():
    assert arrays.require_number("eps", np.float32(0.5), minimum=0, below=1) == 0.5
    with pytest.raises(TypeError, match="eps is 1j: expected a real number"):
        arrays.require_number("eps", 1j)
    for value, bounds, expected in [
        (-1, {"minimum": 0}, "at least 0"),
        (0, {"above": 0}, "above 0"),
        (2, {"maximum": 1}, "at most 1"),
        (1, {"below": 1}, "below 1"),
    ]:
        with pytest.raises(ValueError, match=f"eps is {value}: expected .*{expected}"):
            arrays.require_number("eps", value, **bounds)


@pytest.mark.parametrize("value", [np.ones(3), ["a"], True, float("nan"), None, object(), "c"])
def test_a_choice_is_one_of_them(value):
    with pytest.raises(ValueError, match=r"^form is .*: expected one of 'a', 1$"):
        arrays.require_one_of("form", value, ("a", 1))
    arrays.require_one_of("form", np.int64(1), ("a", 1))


def test_a_dtype_without_a_hash_has_a_name():
    class Dtype:
        name = "float32"
        __hash__ = None

    assert arrays.dtype_name(Dtype()) == "float32"


def test_numbers_where_arrays_are_due():
    for check in (lambda: arrays.require_axes(q=(1.0, "... q d")), lambda: arrays.broadcast_leading(q=(1.0, 3))):
        with pytest.raises(TypeError, match="q is 1.0: expected an array"):
            check()
    with pytest.raises(ValueError, match=r"q has shape \(2,\): expected at least 3 axes"):
        arrays.broadcast_leading(q=(np.ones(2), 3))
