"""Position tables, the relative shift and rotations against loops, mpmath and stored numbers of other implementations."""

import math

import array_api_strict
import mpmath
import numpy as np
import pytest
from ml_dtypes import bfloat16
from support import assert_adjoint, assert_gradients, cases

from refattn import positions

UNIT = 2.0**-53  # unit roundoff of float64


# ---------------------------------------------------------------------- tables


@mpmath.workdps(40)
def test_sinusoid_has_all_sines_first():
    t, m = np.array([0, 1, 2.5, -3, 40000]), 6
    table = positions.sinusoid(t, m)
    assert table.shape == (5, m)
    assert table.dtype == np.float64
    for row, x in np.ndindex(5, 3):
        angle = float(t[row]) / mpmath.mpf(10000) ** (mpmath.mpf(2 * x) / m)
        # the frequency carries two roundings (power and quotient of the exponent, times ln 10000 < 10), the product one
        bound = UNIT * (1 + 14 * abs(float(angle)))
        assert abs(table[row, x] - mpmath.sin(angle)) <= bound
        assert abs(table[row, 3 + x] - mpmath.cos(angle)) <= bound
    assert positions.sinusoid([[1], [2]], 4).shape == (2, 1, 4)
    assert positions.sinusoid(array_api_strict.asarray([1, 2]), 4).shape == (2, 4)


@pytest.mark.parametrize("q, k", [(2, 5), (5, 2), (3, 3), (1, 4), (4, 0), (0, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_relative_distances_are_those_that_the_shift_brings_into_place(q, k, causal):
    table = positions.relative_distances(q, k, causal=causal)
    assert table.shape == (k if causal else k + q,)
    shifted = positions.rel_shift(np.broadcast_to(table.astype(float), (q, len(table))), causal=causal)
    for i, j in np.ndindex(q, k):
        distance = i + k - q - j
        if distance >= 0 or not causal:
            assert shifted[i, j] == distance
        else:
            assert shifted[i, j] == 0


def test_alibi_slopes_of_the_authors_code():
    assert positions.alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert positions.alibi_slopes(6).tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    assert positions.alibi_slopes(1).tolist() == [2.0**-8]
    twelve = [2.0**-n for n in range(1, 9)] + [2.0 ** -(n + 0.5) for n in range(4)]
    assert positions.alibi_slopes(12).tolist() == twelve
    forty = positions.alibi_slopes(40)
    assert forty.shape == (40,)
    assert forty[:32].tolist() == positions.alibi_slopes(32).tolist()
    assert forty[32:].tolist() == positions.alibi_slopes(64)[:16:2].tolist()


@mpmath.workdps(40)
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets, end", [(32, 128), (8, 16), (16, 32), (4, 9), (6, 20), (32, 1000)])
def test_t5_buckets_have_the_edges_of_the_formula(buckets, end, bidirectional):
    distance = np.arange(-1100, 1100)
    got = positions.t5_bucket(distance, buckets=buckets, max_distance=end, bidirectional=bidirectional)
    n = buckets // 2 if bidirectional else buckets
    e = n // 2
    for d, bucket in zip(distance.tolist(), got.tolist(), strict=True):
        size = abs(d) if bidirectional else max(d, 0)
        want = size
        if size >= e:
            # 1e-30 keeps an exact edge on its side in 40 digits
            steps = mpmath.log(mpmath.mpf(size) / e) / mpmath.log(mpmath.mpf(end) / e) * (n - e)
            want = min(e + int(mpmath.floor(steps + mpmath.mpf(10) ** -30)), n - 1)
        assert bucket == want + (n if bidirectional and d < 0 else 0), d
    assert set(got.tolist()) <= set(range(buckets))


def test_t5_bucket_by_hand():
    distance = np.array(
        [[0, 1, 7, 8, 15, 16, 32, 64, 127, 128, 10**6], [-1, -7, -8, -16, -64, -127, -128, -200, -3, -2, -9]]
    )
    assert positions.t5_bucket(distance).tolist() == [
        [0, 1, 7, 8, 9, 10, 12, 14, 15, 15, 15],
        [17, 23, 24, 26, 30, 31, 31, 31, 19, 18, 24],
    ]
    assert positions.t5_bucket([-5, 0, 3], bidirectional=False).tolist() == [0, 0, 3]


# ---------------------------------------------------------------------- relative shift


def shift_by_loop(x, causal):
    *lead, q, p = x.shape
    k = p if causal else p - q
    out = np.zeros((*lead, q, k))
    for i, j in np.ndindex(q, k):
        row = j + q - 1 - i if causal else j + q - i
        if row < p:
            out[..., i, j] = x[..., i, row]
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q, k", [(3, 5), (5, 3), (1, 4), (4, 1), (2, 0), (0, 3), (4, 4)])
def test_rel_shift_moves_and_never_leaks(q, k, causal):
    rng = np.random.default_rng(q * 10 + k)
    x = rng.standard_normal((2, 3, q, k if causal else k + q))
    want = shift_by_loop(x, causal)
    got = positions.rel_shift(x, causal=causal)
    assert np.array_equal(got, want)
    strict = positions.rel_shift(array_api_strict.asarray(x), causal=causal)
    assert isinstance(strict, type(array_api_strict.asarray(x)))
    assert np.array_equal(np.asarray(strict), want)
    # the gradient of a selection is exact: place it back by the loop
    result, pullback = positions.rel_shift.vjp(x, causal=causal)
    d_output = rng.standard_normal(result.output.shape)
    want_gradient = np.zeros_like(x)
    for at in np.ndindex(q, k):
        row = at[1] + q - 1 - at[0] if causal else at[1] + q - at[0]
        if row < x.shape[-1]:
            want_gradient[..., at[0], row] += d_output[..., at[0], at[1]]
    for _ in range(2):
        assert np.array_equal(pullback(d_output)["x"], want_gradient)
    assert not pullback()["x"].any()


def test_rel_shift_of_the_three_by_five_example():
    """Taking the wrong slice of the padded matrix, or leaving the next row's numbers in, shows here."""
    x = np.arange(15.0).reshape(3, 5)
    assert positions.rel_shift(x, causal=True).tolist() == [[2, 3, 4, 0, 0], [6, 7, 8, 9, 0], [10, 11, 12, 13, 14]]
    assert positions.rel_shift(x, causal=False).tolist() == [[3, 4], [7, 8], [11, 12]]


def test_rel_shift_of_another_implementation():
    arrays = stored("rel_shift_only")[1]
    assert np.array_equal(positions.rel_shift(arrays["in_x"], causal=True), arrays["out"])


# ---------------------------------------------------------------------- rotary


def stored(name):
    return {n: (meta, arrays) for n, meta, arrays in cases("positions")}[name]


def rotate_by_loop(x, at, base, layout, dims):
    """Multiplication of complex numbers, one pair at a time; ``at`` (..., q) already has the axes of x."""
    out = x.copy()
    for place in np.ndindex(x.shape[:-1]):
        for n in range(dims // 2):
            a, c = (n, n + dims // 2) if layout == "half" else (2 * n, 2 * n + 1)
            angle = float(at[place]) * base ** (-2 * n / dims)
            turned = complex(x[place][a], x[place][c]) * complex(math.cos(angle), math.sin(angle))
            out[place][a], out[place][c] = turned.real, turned.imag
    return out


ROTATIONS = {
    "plain": {},
    "interleaved": {"layout": "interleaved"},
    "partial": {"dims": 4, "base": 500.0},
    "partial interleaved": {"dims": 6, "layout": "interleaved"},
    "nothing": {"dims": 0},
    "fractional": {"positions": np.array([0.5, -3, 2.25, 1e4, 7])},
    "per batch": {"positions": np.arange(10).reshape(2, 1, 5)},
    "one for all": {"positions": np.array([3])},
}


@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("xp", [np, array_api_strict])
def test_rotary_multiplies_complex_numbers(name, xp):
    options = ROTATIONS[name]
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 3, 5, 8))
    at = np.broadcast_to(options.get("positions", np.arange(5)), x.shape[:-1])
    dims = options.get("dims", 8)
    want = rotate_by_loop(x, at, options.get("base", 10000.0), options.get("layout", "half"), dims)
    moved = {n: xp.asarray(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    got = np.asarray(positions.rotary(xp.asarray(x), **moved))
    # frequency within 4 roundings of the exact one, so the angle carries that error times the position; then 3 operations
    bound = UNIT * (4 + 8 * np.abs(at)[..., None]) * np.max(np.abs(x))
    assert np.all(np.abs(got - want) <= bound)
    assert np.array_equal(got[..., dims:], x[..., dims:])


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotary_gradient(name):
    rng = np.random.default_rng(4)
    arguments = {"x": rng.standard_normal((2, 3, 5, 8)), **ROTATIONS[name]}
    assert set(assert_gradients(positions.rotary, arguments, rng)) == {"x"}
    assert_adjoint(positions.rotary, arguments, rng)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_given_cosines_replace_positions_and_have_gradients(layout):
    rng = np.random.default_rng(5)
    angles = np.arange(5)[:, None] * 10000.0 ** (-2 * np.arange(3) / 6)
    x = rng.standard_normal((2, 3, 5, 8))
    same = positions.rotary(x, dims=6, layout=layout)
    assert np.array_equal(positions.rotary(x, dims=6, layout=layout, cos=np.cos(angles), sin=np.sin(angles)), same)
    tables = {"cos": rng.standard_normal((2, 1, 5, 3)), "sin": rng.standard_normal((5, 3))}
    arguments = {"x": x, "dims": 6, "layout": layout, **tables}
    assert set(assert_gradients(positions.rotary, arguments, rng)) == {"x", "cos", "sin"}
    assert_adjoint(positions.rotary, arguments, rng)


def test_rotary_leaves_products_depending_on_the_distance_alone():
    rng = np.random.default_rng(6)
    q, k = rng.standard_normal((2, 1, 16))
    products = [
        (positions.rotary(q, np.array([t + 7])) * positions.rotary(k, np.array([t]))).sum() for t in (0, 1, 13, 1000)
    ]
    # angles up to 1007 with 4 roundings each, 16 products
    assert np.ptp(products) <= 16 * 8 * 1007 * UNIT * np.max(np.abs(q)) * np.max(np.abs(k))


def test_half_precision_is_rotated_in_float32_and_rounded_once():
    rng = np.random.default_rng(7)
    for dtype in (np.float16, bfloat16):
        x = rng.standard_normal((3, 4000, 8)).astype(dtype)
        got, pullback = positions.rotary.vjp(x)
        want = positions.rotary(x.astype(np.float32))
        assert got.output.dtype == dtype
        assert np.array_equal(got.output, want.astype(dtype))
        assert pullback(x)["x"].dtype == dtype


def test_rotary_of_other_implementations():
    meta, a = stored("llama_rotate_half")
    for x in "qk":
        got, pullback = positions.rotary.vjp(a[f"in_{x}"], a["in_pos"][:, None])
        assert np.allclose(got.output, a[f"out_{x}"], rtol=0, atol=1e-6)  # its frequencies are float32
    gradient = positions.rotary.vjp(a["in_q"], a["in_pos"][:, None])[1](a["cot_out_q"])["x"]
    assert np.allclose(gradient, a["grad_q"], rtol=0, atol=1e-6)

    meta, a = stored("rope_interp2")
    d, factor = meta["options"]["dim"], meta["options"]["interpolation_factor"]
    got, pullback = positions.rotary.vjp(a["in_x"], a["in_pos"] / factor, layout="interleaved", dims=d)
    assert np.allclose(got.output, a["out"], rtol=0, atol=1e-6)
    assert np.allclose(pullback(a["cot_out"])["x"], a["grad_x"], rtol=0, atol=1e-6)

    for name, layout, dims in (
        ("onnx_rotary_embedding", "half", None),
        ("onnx_rotary_embedding_with_interleaved_rotary_dim", "interleaved", 4),
    ):
        meta, a = stored(name)
        cos, sin = (a[f"in_{n}_cache"][a["in_position_ids"]][:, None] for n in ("cos", "sin"))
        got = positions.rotary(a["in_X"], cos=cos, sin=sin, layout=layout, dims=dims)
        assert got.dtype == np.float32
        assert np.allclose(got, a["out_Y"], rtol=0, atol=4 * 2.0**-24 * np.max(np.abs(a["in_X"])))


def test_t5_buckets_of_another_implementation():
    for name in ("t5_bias_bidir_24x40", "t5_bias_causal_6x40"):
        meta, a = stored(name)
        options = meta["options"]
        q, k = a["out_buckets"].shape
        distance = np.arange(k - q, k)[:, None] - np.arange(k)
        got = positions.t5_bucket(
            distance,
            buckets=options["num_buckets"],
            max_distance=options["max_distance"],
            bidirectional=not options["causal"],
        )
        assert np.array_equal(got, a["out_buckets"])


# ---------------------------------------------------------------------- errors

X = np.zeros((2, 5, 8))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: positions.sinusoid([1], 5), "m is 5"),
        (lambda: positions.sinusoid([1j], 4), "positions have dtype complex128"),
        (lambda: positions.alibi_slopes(0), "h is 0"),
        (lambda: positions.relative_distances(-1, 2), "q is -1"),
        (lambda: positions.t5_bucket([0.5]), "distance has dtype float64"),
        (lambda: positions.t5_bucket([1], buckets=5), "buckets is 5"),
        (lambda: positions.t5_bucket([1], buckets=1, bidirectional=False), "buckets is 1"),
        (lambda: positions.t5_bucket([1], max_distance=8), "max_distance is 8"),
        (lambda: positions.rel_shift(X), "'causal' is missing"),
        (lambda: positions.rel_shift(X[0, 0], causal=True), r"x has shape \(8,\)"),
        (lambda: positions.rel_shift(np.zeros((5, 3)), causal=False), "at least 5"),
        (lambda: positions.rotary(X, layout="neox"), "layout is 'neox'"),
        (lambda: positions.rotary(X[0, 0]), r"x has shape \(8,\)"),
        (lambda: positions.rotary(np.zeros((5, 7))), "dims is 7"),
        (lambda: positions.rotary(X, dims=10), "dims is 10"),
        (lambda: positions.rotary(X, base=-1.0), "base is -1.0"),
        (lambda: positions.rotary(X, np.arange(4)), r"positions has the axes \(..., q\) = \(4,\)"),
        (lambda: positions.rotary(X, cos=np.zeros((5, 4))), "sin is missing"),
        (lambda: positions.rotary(X, cos=np.zeros((5, 3)), sin=np.zeros((5, 4))), r"cos has shape \(5, 3\)"),
        (
            lambda: positions.rotary(X, cos=np.zeros((5, 4)), sin=np.zeros((3, 4))),
            r"sin has the axes \(..., q\) = \(3,\)",
        ),
        (lambda: positions.rotary(X, np.arange(5), cos=np.zeros((5, 4)), sin=np.zeros((5, 4))), "positions are given"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
