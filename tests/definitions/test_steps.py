"""The engine of definitions: what is computed, what is taken over, what an edit reaches."""

import numpy as np
import pytest

from refattn.definitions.steps import Definition, NoCotangents, contract, einsum, step

RNG = np.random.default_rng(0)


class Square(Definition):
    """output = (factor x)^2"""

    gradients = ("x", "factor")
    defaults = {"factor": 1.0}

    @step
    def scaled(self):
        """factor x"""
        return self.factor * self.x

    @step
    def output(self):
        return self.scaled**2

    @step
    def d_scaled(self):
        return 2 * self.scaled * self.cotangent("output")

    @step
    def d_x(self):
        return self.factor * self.d_scaled

    @step
    def d_factor(self):
        return (self.x * self.d_scaled).sum()


class factor_ignored(Square):
    factor = 1.0


class doubled(Square):
    @step
    def scaled(self):
        return 2 * super().scaled


class gradient_halved(Square):
    @step
    def d_scaled(self):
        return super().d_scaled / 2


def test_steps_are_computed_once_and_arguments_have_defaults():
    call = Square({"x": np.array([1.0, 2.0])}, {"output": np.ones(2)})
    assert call.result()["output"].tolist() == [1.0, 4.0]
    assert call.output is call.output
    assert call.gradient()["x"].tolist() == [2.0, 4.0]
    assert set(call.gradient()) == {"x"}  # factor was not passed


def test_gradients_need_cotangents_and_pull_brings_them():
    call = Square({"x": np.array([3.0]), "factor": 2.0})
    with pytest.raises(NoCotangents, match="output"):
        call.gradient()
    pulled = call.pull(output=np.array([1.0]))
    assert pulled.gradient() == {"x": np.array([24.0]), "factor": np.array(36.0)}
    assert pulled.output is call.output


def test_other_cotangents_give_other_gradients():
    call = Square({"x": np.array([3.0])}, {"output": np.array([1.0])})
    assert call.gradient()["x"] == 6.0
    pulled = call.pull(output=np.array([2.0]))
    assert pulled.gradient()["x"] == 12.0
    assert pulled.output is call.output


def test_an_edit_computes_only_what_follows_from_it():
    right = Square({"x": np.array([1.0, 2.0]), "factor": 3.0}, {"output": np.ones(2)})
    wrong = gradient_halved(right.arguments, right.cotangents, right=right)
    assert wrong.output is right.output
    assert wrong.scaled is right.scaled
    assert wrong.gradient()["x"].tolist() == (right.gradient()["x"] / 2).tolist()
    wrong = doubled(right.arguments, right.cotangents, right=right)
    assert wrong.output.tolist() == (4 * right.output).tolist()


def test_an_argument_is_edited_like_a_step():
    right = Square({"x": np.array([1.0, 2.0]), "factor": 3.0}, {"output": np.ones(2)})
    right.gradient()
    wrong = factor_ignored(right.arguments, right.cotangents, right=right)
    assert wrong.output.tolist() == [1.0, 4.0]
    assert wrong.gradient()["x"].tolist() == [2.0, 4.0]
    assert wrong.argument("factor") == 3.0


def test_what_is_handed_over_is_not_computed():
    right = Square({"x": np.array([1.0]), "factor": 3.0})
    handed = Square(right.arguments, {"output": np.ones(1)}, right=right, handed={"scaled": np.array([5.0])})
    assert handed.output.tolist() == [25.0]
    assert handed.gradient()["x"].tolist() == [30.0]


class Wrapped(Definition):
    """output = sum of Square(x + shift)"""

    gradients = ("x", "shift")
    defaults = {"shift": 0.0}
    inner = Square

    @step
    def square(self):
        return self.begin(self.inner, {"x": self.shifted, "factor": 3.0})

    @step
    def shifted(self):
        return self.x + self.shift

    @step
    def output(self):
        return self.square.output.sum()

    @step
    def d_x(self):
        return self.square.pull(output=np.full(self.x.shape, self.cotangent("output"))).d_x

    @step
    def d_shift(self):
        return self.d_x.sum()


class wrapped_factor_ignored(Wrapped):
    inner = factor_ignored


def test_a_definition_inside_another_shares_what_it_can():
    right = Wrapped({"x": np.array([1.0, 2.0]), "shift": 1.0}, {"output": np.array(1.0)})
    assert right.output == 9 * (4 + 9)
    assert right.gradient()["x"].tolist() == [36.0, 54.0]
    wrong = wrapped_factor_ignored(right.arguments, right.cotangents, right=right)
    assert wrong.output == 4 + 9
    assert wrong.shifted is right.shifted
    assert wrong.gradient()["x"].tolist() == [4.0, 6.0]


def test_unknown_names_are_an_error():
    with pytest.raises(AttributeError, match="neither a step nor an argument 'y'"):
        Square({"x": np.ones(1)}).y  # noqa: B018


def test_half_arguments_are_computed_in_double_and_their_storage_is_known():
    call = Square({"x": np.ones(2, np.float16)})
    assert call.x.dtype == np.float64
    assert call.storage == np.float16


@pytest.mark.parametrize("spec, seen_axis", [("...hqk,...hke->...hqe", -1), ("...hqk,...hqe->...hke", -2)])
def test_contract_keeps_unseen_nan_out(spec, seen_axis):
    weights, values = RNG.standard_normal((2, 3, 4, 4)), RNG.standard_normal((2, 3, 4, 5))
    assert np.array_equal(contract(spec, weights, values, True), einsum(spec, weights, values))
    seen = np.ones(weights.shape, bool)
    np.moveaxis(seen, seen_axis, -1)[..., 1] = False
    poisoned = values.copy()
    poisoned[..., 1, :] = [np.nan, np.inf, -np.inf, np.nan, 1.0]
    expected = einsum(spec, np.where(seen, weights, 0.0), values)
    got = contract(spec, np.where(seen, weights, 0.0), poisoned, seen)
    np.testing.assert_allclose(got, expected, rtol=0, atol=8 * 4 * np.finfo(float).eps * np.abs(expected).max())
    seen[:] = True
    assert np.isnan(contract(spec, weights, poisoned, seen)[..., 0]).all()


def test_contract_makes_of_seen_infinities_what_arithmetic_makes():
    weights = np.array([[[1.0, 0.0, -1.0, 2.0]]])
    values = np.array([[[np.inf, 1.0], [2.0, np.inf], [3.0, np.inf], [4.0, 5.0]]])
    got = contract("hqk,hke->hqe", weights, values, np.array([[[True, True, True, True]]]))
    assert got[0, 0, 0] == np.inf
    assert np.isnan(got[0, 0, 1])  # 0 times infinity
    got = contract("hqk,hke->hqe", weights, values, np.array([[[True, False, True, True]]]))
    assert got[0, 0].tolist() == [np.inf, -np.inf]
    got = contract("hqk,hke->hqe", weights, values, np.array([[[False, False, False, True]]]))
    assert got[0, 0].tolist() == [8.0, 10.0]
