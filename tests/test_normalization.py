"""Softmax, logsumexp, merge and layer norm: values, gradients, empty rows, exact neutral elements."""

import array_api_strict
import mpmath
import numpy as np
import pytest
from support import assert_adjoint, assert_close, assert_gradients

import refattn as ra
from refattn.normalization import layer_norm, layer_norm_backward, masked_softmax, merge_backward

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


MASK = np.array([[True, True, False, True], [False, False, False, False], [True, False, False, False]])


@pytest.mark.parametrize("function", [ra.softmax, ra.logsumexp], ids=lambda f: f.name)
@pytest.mark.parametrize("mask", [None, MASK])
def test_gradients(function, mask):
    x = rng().standard_normal((2, 3, 4))
    assert_gradients(function, {"x": x, "mask": mask}, rng(1))
    assert_adjoint(function, {"x": x, "mask": mask}, rng(1))


def test_softmax_against_mpmath():
    x = np.array([700.0, 699.5, -700.0, 0.25])
    with mpmath.workdps(40):
        total = mpmath.fsum(mpmath.exp(mpmath.mpf(t)) for t in x.tolist())
        weights = [float(mpmath.exp(mpmath.mpf(t)) / total) for t in x.tolist()]
        lse = float(mpmath.log(total))
    assert_close(ra.softmax(x), weights, 4 * EPS)
    assert_close(ra.logsumexp(x), lse, 4 * EPS)


def test_empty_rows_and_poison():
    x = np.where(MASK, 1.0, np.nan)
    weights, lse = masked_softmax(x, MASK)
    assert_close(weights, [[1 / 3, 1 / 3, 0, 1 / 3], [0, 0, 0, 0], [1, 0, 0, 0]], EPS)
    assert_close(lse, [1 + np.log(3), -np.inf, 1], 4 * EPS)
    assert ra.softmax(np.zeros((2, 0))).shape == (2, 0)
    assert (ra.logsumexp(np.zeros((2, 0))) == -np.inf).all()
    assert np.isnan(ra.softmax(np.array([np.nan, 1.0]))).all()


def test_strict_namespace():
    x = rng().standard_normal((3, 4))
    got = ra.softmax.forward(array_api_strict.asarray(x), mask=array_api_strict.asarray(MASK)).output
    assert_close(got, ra.softmax(x, mask=MASK), 2 * EPS)


def parts(seed=0):
    r = rng(seed)
    outputs = [r.standard_normal((2, 3, 4)) for _ in range(3)]
    lses = [r.standard_normal((2, 3)) for _ in range(3)]
    outputs[1][0, 1], lses[1][0, 1] = 0, -np.inf
    for o, z in zip(outputs, lses, strict=True):
        o[1, 2], z[1, 2] = 0, -np.inf
    return outputs, lses


def test_merge_is_the_weighted_mean():
    outputs, lses = parts()
    output, lse = ra.merge(outputs, lses)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.exp(np.stack(lses))
        total = weights.sum(0)
        want = np.where(total[..., None] > 0, (weights[..., None] * np.stack(outputs)).sum(0) / total[..., None], 0)
        assert_close(output, want, 8 * EPS)
        assert_close(lse, np.log(total), 8 * EPS)
    assert lse[1, 2] == -np.inf


def test_merge_with_the_neutral_element_keeps_every_bit():
    outputs, lses = parts()
    empty = np.zeros_like(outputs[0]), np.full_like(lses[0], -np.inf)
    for order in ((0, 1), (1, 0)):
        pair = [(outputs[0], lses[0]), empty]
        output, lse = ra.merge(*zip(*(pair[n] for n in order), strict=True))
        assert np.array_equal(output, outputs[0])
        assert np.array_equal(lse, lses[0])
    output, lse = ra.merge([empty[0], empty[0]], [empty[1], empty[1]])
    assert (output == 0).all()
    assert (lse == -np.inf).all()


def test_merge_order_changes_nothing_but_rounding():
    outputs, lses = parts(3)
    want = ra.merge(outputs, lses)
    for order in ((2, 0, 1), (1, 2, 0)):
        got = ra.merge([outputs[n] for n in order], [lses[n] for n in order])
        assert_close(got[0], want[0], 8 * EPS)
        assert_close(got[1], want[1], 8 * EPS)
    nested = ra.merge(*zip(ra.merge(outputs[:2], lses[:2]), (outputs[2], lses[2]), strict=True))
    assert_close(nested[0], want[0], 16 * EPS)


def test_merge_backward_by_complex_step():
    outputs, lses = parts(4)
    r = rng(5)
    d_output, d_lse = r.standard_normal((2, 3, 4)), r.standard_normal((2, 3))
    d_lse[1, 2] = 0
    d_outputs, d_lses = merge_backward(outputs, lses, d_output, d_lse)
    for n in range(3):
        for at in np.ndindex(2, 3):
            if lses[n][at] == -np.inf:
                assert d_lses[n][at] == 0
                continue
            moved = [z.astype(complex) for z in lses]
            moved[n][at] += 1e-200j
            output, lse = ra.merge([o.astype(complex) for o in outputs], moved)
            want = (np.sum(d_output * output.imag) + np.sum(np.where(d_lse == 0, 0, d_lse * lse.imag))) / 1e-200
            assert_close(d_lses[n][at], want, 1e-13)
        moved_outputs = [o.astype(complex) for o in outputs]
        moved_outputs[n][0, 0, 1] += 1e-200j
        output, _ = ra.merge(moved_outputs, [z.astype(complex) for z in lses])
        assert_close(d_outputs[n][0, 0, 1], np.sum(d_output * output.imag) / 1e-200, 1e-13)


@pytest.mark.parametrize(
    "outputs, lses, message",
    [
        ([], [], "0 outputs and 0 lses"),
        ([np.zeros((2, 3))], [np.zeros(2), np.zeros(2)], "1 outputs and 2 lses"),
        ([np.zeros((2, 3)), np.zeros((4, 3))], [np.zeros(2), np.zeros(2)], r"outputs\[1\] has shape \(4, 3\)"),
        ([np.zeros((2, 3))], [np.zeros(4)], r"lses\[0\] has shape \(4,\)"),
    ],
)
def test_merge_bad_input(outputs, lses, message):
    with pytest.raises(ValueError, match=message):
        ra.merge(outputs, lses)


def test_softmax_and_merge_name_what_they_need():
    with pytest.raises(ValueError, match="expected at least one axis"):
        ra.softmax(np.array(1.0))
    with pytest.raises(TypeError, match="expected a list of arrays"):
        ra.merge(np.zeros((2, 3, 4)), np.zeros((2, 3)))


def test_layer_norm_and_its_backward():
    r = rng(6)
    x, d = r.standard_normal((2, 5)), r.standard_normal((2, 5))
    normal, factor = layer_norm(x, 1e-5)
    assert_close(normal, (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5), 8 * EPS)
    got = layer_norm_backward(normal, factor, d)
    for at in np.ndindex(2, 5):
        moved = x.astype(complex)
        moved[at] += 1e-200j
        assert_close(got[at], np.sum(d * layer_norm(moved, 1e-5)[0].imag) / 1e-200, 1e-13)
