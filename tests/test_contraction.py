"""einsum: against np.einsum on every namespace, gradients, what it refuses, and that it does not copy."""

import re

import array_api_strict
import numpy as np
import pytest
from ml_dtypes import bfloat16

from refattn import contraction
from refattn.arrays import to_numpy
from refattn.contraction import einsum, einsum_vjp

# Each case is a spec and its operand shapes; together they take every branch of the planner.
CASES = [
    ("...hqd,...hkd->...hqk", [(2, 3, 5, 4), (2, 3, 7, 4)]),
    ("...hqk,...hke->...hqe", [(2, 3, 5, 7), (2, 3, 7, 6)]),
    ("...hqd,...hkd->...hqk", [(2, 1, 3, 5, 4), (4, 3, 7, 4)]),  # leading axes broadcast both ways
    ("...hqd,...hkd->...hqk", [(1, 3, 5, 4), (2, 3, 7, 4)]),
    ("...gnqd,...gkd->...gnqk", [(2, 3, 2, 5, 4), (2, 3, 7, 4)]),  # grouped heads
    ("...hqk,hx->...xqk", [(2, 3, 5, 7), (3, 4)]),  # heads mixed under a batch axis, small: one matrix product
    ("...hqk,hx->...xqk", [(2, 3, 25, 24), (3, 4)]),  # the same, large: batched, without a copy
    ("...hqk,...qxh->...xqk", [(2, 3, 5, 7), (2, 5, 4, 3)]),
    ("...qm,mhd->...hqd", [(2, 5, 6), (6, 3, 4)]),  # projections in and out
    ("...hqe,hem->...qm", [(2, 3, 5, 6), (3, 6, 4)]),
    ("...qm,...hqd->mhd", [(2, 5, 6), (2, 3, 5, 4)]),  # and their weight gradient: sums over leading axes
    ("...hqk,...hqk->...hq", [(2, 3, 5, 7), (2, 3, 5, 7)]),  # row dot products
    ("...hqk,h->...hqk", [(2, 3, 5, 7), (3,)]),  # nothing contracted
    ("i,j->ji", [(3,), (4,)]),
    ("ij,kl->jl", [(2, 3), (4, 5)]),  # labels of one operand only are summed first
    ("ijk,jl->", [(2, 3, 4), (3, 5)]),
    ("abc,cab->bac", [(2, 3, 4), (4, 2, 3)]),
    ("ij,ij->", [(0, 3), (0, 3)]),  # the empty sum is 0
    ("...ij->...ji", [(2, 3, 4)]),
    ("...ij->j", [(2, 5, 3, 4)]),
    ("->", [()]),
    (",i->i", [(), (3,)]),
    ("...hqk,hx,...xke->...xqe", [(2, 3, 5, 7), (3, 4), (2, 4, 7, 6)]),
    ("h,...hqd,d,...hkd->...hqk", [(3,), (2, 3, 5, 4), (4,), (3, 7, 4)]),
    ("... h q d , h d -> ... h q", [(2, 3, 5, 4), (3, 4)]),
]


def draw(rng, shapes, dtype=np.float64):
    arrays = [rng.standard_normal(shape) for shape in shapes]
    if np.dtype(dtype).kind == "c":
        arrays = [x + 1j * rng.standard_normal(x.shape) for x in arrays]
    return [x.astype(dtype) for x in arrays]


def numpy_einsum(spec, *arrays):
    """np.einsum with this library's rule that leading axes missing from the output are summed."""
    inputs, output = spec.replace(" ", "").split("->")
    if "..." in output or "..." not in inputs:
        return np.einsum(f"{inputs}->{output}", *arrays)
    kept = np.einsum(f"{inputs}->...{output}", *arrays)
    return kept.sum(axis=tuple(range(kept.ndim - len(output))))


def allowance(spec, arrays, unit=2.0**-53):
    """Two evaluations, each off by at most (terms in the sum + factors) roundings of the sum of absolute values."""
    terms = numpy_einsum(spec, *(np.ones(x.shape) for x in arrays))
    return 2 * (terms + len(arrays)) * unit * numpy_einsum(spec, *map(np.abs, arrays))


@pytest.fixture(params=["numpy", "array_api_strict", "torch", "jax.numpy"])
def to_library(request):
    if request.param == "numpy":
        return np.asarray
    library = pytest.importorskip(request.param, reason=f"{request.param} is an optional second array library")
    return library.asarray


@pytest.mark.parametrize("spec, shapes", CASES)
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_equals_numpy(spec, shapes, dtype):
    arrays = draw(np.random.default_rng(1), shapes, dtype)
    expected = numpy_einsum(spec, *arrays)
    output = einsum(spec, *arrays)
    assert output.shape == expected.shape
    assert output.dtype == dtype
    # A complex product is four real ones: a factor 2 covers its own roundings.
    assert np.all(np.abs(output - expected) <= 2 * allowance(spec, arrays))


@pytest.mark.parametrize("spec, shapes", CASES)
def test_other_libraries_equal_numpy(spec, shapes, to_library):
    arrays = draw(np.random.default_rng(2), shapes, np.float32)
    output = einsum(spec, *map(to_library, arrays))
    assert type(output) is type(to_library(arrays[0])) or isinstance(output, np.float32)
    assert output.dtype == to_library(arrays[0]).dtype
    expected = numpy_einsum(spec, *(x.astype(np.float64) for x in arrays))
    assert output.shape == expected.shape
    assert np.all(np.abs(to_numpy(output) - expected) <= allowance(spec, arrays, 2.0**-24))


def test_random_specs():
    """Specs drawn at random: labels, order, leading axes with size 1 or missing, one to four operands."""
    rng = np.random.default_rng(3)
    for _ in range(400):
        sizes = dict(zip("abcdef", rng.integers(1, 5, 6).tolist(), strict=True))
        lead = rng.integers(1, 4, rng.integers(0, 3)).tolist()
        terms, shapes = [], []
        for _ in range(rng.integers(1, 5)):
            labels = "".join(rng.permutation(list(sizes))[: rng.integers(0, 5)])
            own = lead[rng.integers(0, len(lead) + 1) :] if rng.random() < 0.7 else None
            broadcast = [n if rng.random() < 0.7 else 1 for n in own or ()]
            terms.append(labels if own is None else "..." + labels)
            shapes.append((*broadcast, *(sizes[x] for x in labels)))
        found = sorted(set("".join(terms)) - {"."})
        output = "".join(rng.permutation(found)[: rng.integers(0, len(found) + 1)]) if found else ""
        spec = f"{','.join(terms)}->{'...' if '...' in ''.join(terms) else ''}{output}"
        arrays = draw(rng, shapes)
        expected = numpy_einsum(spec, *arrays)
        actual = einsum(spec, *arrays)
        assert actual.shape == expected.shape, spec
        assert np.all(np.abs(actual - expected) <= allowance(spec, arrays)), (spec, shapes)


@pytest.mark.parametrize("spec, shapes", CASES)
def test_vjp_by_complex_step_and_adjoint(spec, shapes):
    """einsum is linear in each operand, so one complex step along a random direction gives the exact derivative."""
    rng = np.random.default_rng(4)
    arrays = draw(rng, shapes)
    d_output = rng.standard_normal(einsum(spec, *arrays).shape)
    cotangents = einsum_vjp(spec, arrays, d_output)
    for at, (x, cotangent) in enumerate(zip(arrays, cotangents, strict=True)):
        assert cotangent.shape == x.shape
        direction = rng.standard_normal(x.shape)
        stepped = [y + 1e-30j * direction if at == other else y for other, y in enumerate(arrays)]
        tangent = einsum(spec, *stepped).imag / 1e-30
        magnitude = np.sum(np.abs(tangent * d_output)) + np.sum(np.abs(cotangent * direction))
        assert abs(np.sum(tangent * d_output) - np.sum(cotangent * direction)) <= 1e-13 * magnitude


def test_vjp_on_the_strict_namespace_keeps_dtype():
    rng = np.random.default_rng(5)
    arrays = [array_api_strict.asarray(x) for x in draw(rng, [(1, 3, 4), (2, 3, 5)], np.float32)]
    d_output = array_api_strict.asarray(draw(rng, [(2, 5)], np.float32)[0])
    cotangents = einsum_vjp("...ij,...ik->...k", arrays, d_output)
    assert [x.shape for x in cotangents] == [(1, 3, 4), (2, 3, 5)]
    assert all(x.dtype == array_api_strict.float32 for x in cotangents)


def test_values_are_never_conjugated():
    x = np.array([1j, 2.0])
    assert einsum("i,i->", x, x) == 3.0


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_halves_are_summed_in_float32(dtype):
    """4096 ones along an outer axis: float16 accumulation stops at 2048, bfloat16 at 256."""
    ones = np.ones((4096, 2), dtype)
    for output in (einsum("ij->j", ones), einsum("ij,ij->j", ones, ones), einsum("ij,k->j", ones, np.ones(1, dtype))):
        assert output.dtype == dtype
        assert output.tolist() == [4096.0, 4096.0]
    assert einsum("ij,ij->j", ones, np.ones((4096, 2), np.float32)).dtype == np.float32


def arranged(x, arrangement):
    """An operand as it is laid out for the product."""
    x = x if arrangement.summed is None else x.sum(axis=arrangement.summed)
    x = x if arrangement.axes is None else x.transpose(arrangement.axes)
    return x if arrangement.shape is None else x.reshape(arrangement.shape)


@pytest.mark.parametrize(
    "spec, shapes",
    [
        ("...hqd,...hkd->...hqk", [(2, 3, 64, 16), (2, 3, 64, 16)]),
        ("...hqk,...hke->...hqe", [(2, 3, 64, 64), (2, 3, 64, 16)]),
        ("...hqk,...hqe->...hke", [(2, 3, 64, 64), (2, 3, 64, 16)]),
        ("...hqk,hx->...xqk", [(2, 4, 64, 64), (4, 5)]),
        ("...hqd,hkd->...hqk", [(2, 3, 64, 16), (3, 64, 16)]),
        ("...qm,mhd->...hqd", [(2, 64, 16), (16, 3, 8)]),
        ("...gnqd,...gkd->...gnqk", [(2, 3, 2, 64, 16), (2, 3, 64, 16)]),
        ("...hqk,...hq->...hqk", [(2, 3, 8, 8), (2, 3, 8)]),
    ],
)
def test_operands_are_not_copied(spec, shapes):
    """Every operand of a common product reaches BLAS as a view."""
    (step,) = contraction._plan(spec, tuple(shapes)).steps
    arrays = [np.zeros(shape, np.float32) for shape in shapes]
    left = arranged(arrays[step.left], step.arrange_left)
    right = arranged(arrays[step.right], step.arrange_right)
    assert np.shares_memory(left, arrays[step.left])
    assert np.shares_memory(right, arrays[step.right])
    assert step.product == ("multiply" if spec == "...hqk,...hq->...hqk" else "matmul")


def test_the_larger_operand_decides_the_order_of_contracted_axes():
    (step,) = contraction._plan("qab,bam->qm", ((64, 8, 9), (9, 8, 4))).steps
    q, m = np.zeros((64, 8, 9)), np.zeros((9, 8, 4))
    assert np.shares_memory(arranged(q, step.arrange_left), q)
    assert not np.shares_memory(arranged(m, step.arrange_right), m)


@pytest.mark.parametrize(
    "spec, shapes",
    [
        ("...hqk,hx->...xqk", [(2, 4, 64, 64), (4, 5)]),
        ("...hkd,...hqd->...hqk", [(2, 3, 7, 4), (2, 3, 5, 4)]),
        ("ij,jk->ik", [(3, 4), (4, 5)]),
        ("jk,ij->ik", [(4, 5), (3, 4)]),
    ],
)
def test_results_come_in_the_order_asked_for(spec, shapes):
    """The factor that owns the last axis is the right one of the product: no transposed result."""
    assert einsum(spec, *map(np.zeros, shapes)).flags.c_contiguous


@pytest.mark.parametrize(
    "spec, shapes, used",
    [
        ("...qd,...kd->...qk", [(2, 3, 7, 4), (2, 3, 5, 4)], True),
        ("...qd,...kd->...qk", [(2, 3, 4, 7, 4), (2, 3, 1, 5, 4)], True),  # one product of (4 x 7) rows per key head
        ("...qk,...qe->...ke", [(2, 1, 64, 32), (2, 3, 64, 16)], True),
        ("ij,j->ij", [(3, 4), (4,)], True),
        ("ij,jk,kl->il", [(3, 4), (4, 5), (5, 6)], True),
        ("hqk,hx->xqk", [(4, 7, 5), (4, 2)], True),
        ("ij,kj->ki", [(3, 4), (5, 4)], True),
        ("gqd,gkd->qgk", [(3, 7, 4), (3, 5, 4)], False),  # the batch axis of the product is not the first of the output
        ("ij->ji", [(3, 4)], False),
    ],
)
def test_results_go_into_the_memory_offered(spec, shapes, used):
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal(shape) for shape in shapes]
    want = np.einsum(spec, *operands)
    out = np.full(want.shape, np.nan)
    got = einsum(spec, *operands, out=out)
    assert np.allclose(got, want, rtol=1e-13, atol=1e-13)
    assert np.shares_memory(got, out) == used
    strict = [array_api_strict.asarray(x) for x in operands]
    memory = array_api_strict.asarray(out)
    assert np.allclose(np.asarray(einsum(spec, *strict, out=memory)), want, rtol=1e-13, atol=1e-13)


def test_dtypes_without_a_hash():
    """Those of older strict namespaces: nothing is kept ready for them."""

    class Dtype:
        name = "float64"
        __hash__ = None

    class Array(np.ndarray):
        dtype = Dtype()

    ready = len(contraction._ready)
    x = np.arange(6.0).reshape(2, 3)
    assert np.array_equal(np.asarray(einsum("ij,kj->ik", x.view(Array), x.view(Array))), x @ x.T)
    assert len(contraction._ready) == ready


def test_half_results_are_rounded_once_whatever_memory_is_offered():
    x = np.full((1, 4096), 1.0, np.float16)
    out = np.zeros((1, 1), np.float16)
    assert einsum("ij,kj->ik", x, x, out=out)[0, 0] == 4096


def test_three_operands_take_the_cheap_path():
    """(1000, 2) x (2, 1000) x (1000, 2): from the right, or a 1000 x 1000 array is built."""
    plan = contraction._plan("ab,bc,cd->ad", ((1000, 2), (2, 1000), (1000, 2)))
    assert {plan.steps[0].left, plan.steps[0].right} == {1, 2}


@pytest.mark.parametrize(
    "spec, shapes, message",
    [
        ("ij,jk", [(2, 3), (3, 4)], "output must be explicit"),
        ("ii->i", [(2, 2)], "label 'i' stands more than once in 'ii' of operand 0"),
        ("ij->jj", [(2, 2)], "label 'j' stands more than once in 'jj' of the output"),
        ("ij->ik", [(2, 3)], "label 'k' of the output is in no operand"),
        ("ij->...ij", [(2, 3)], "'...' of the output is in no operand"),
        ("i...->i...", [(2, 3)], "ASCII letters"),
        ("i1->i", [(2, 3)], "ASCII letters"),
        ("ij,jk->ik", [(2, 3)], "2 terms, 1 operands"),
        ("ij->ij", [(2, 3, 4)], "operand 0 has 3 axes, 'ij' needs 2"),
        ("...ijk->...k", [(3, 4)], "operand 0 has 2 axes, '...ijk' needs at least 3"),
        (
            "...hqd,...hkd->...hqk",
            [(2, 3, 5, 4), (2, 3, 7, 6)],
            "axis 'd' has size 4 in operand 0 and 6 in operand 1; operand shapes (2, 3, 5, 4), (2, 3, 7, 6)",
        ),
        ("hq,hk->hqk", [(3, 5), (1, 7)], "axis 'h' has size 3 in operand 0 and 1 in operand 1"),
        ("...q,...k->...qk", [(2, 9, 5), (3, 9, 7)], "leading axis -2 of '...' has the sizes [2, 3]"),
    ],
)
def test_refuses_with_the_reason(spec, shapes, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        einsum(spec, *map(np.zeros, shapes))
    assert repr(spec) in str(caught.value)


def test_refuses_what_is_no_numeric_array():
    with pytest.raises(TypeError, match="operand 1 is a float, expected an array"):
        einsum("i,->i", np.ones(3), 2.0)
    with pytest.raises(TypeError, match="operand 0 is boolean"):
        einsum("i,i->", np.ones(3, bool), np.ones(3))


def test_vjp_refuses_a_cotangent_of_another_shape():
    with pytest.raises(ValueError, match=r"d_output has shape \(2, 3\), the output has \(2, 4\)"):
        einsum_vjp("ij,jk->ik", [np.ones((2, 3)), np.ones((3, 4))], np.ones((2, 3)))
