"""The registry, the operations that the array API lacks on every backend, and the fused forward on Numba."""

import array_api_strict
import numpy as np
import pytest
from support import assert_close

import refattn as ra
from refattn import backends
from refattn.backends.numpy import NumpyBackend, threads, use_executor

NUMPY, STRICT = backends.resolve(None, np), backends.resolve(None, array_api_strict)


def both(x):
    return (NUMPY, x), (STRICT, array_api_strict.asarray(x))


def test_choice_by_namespace_name_and_environment(monkeypatch):
    assert NUMPY.name == "numpy"
    assert STRICT.name == "array_api"
    assert backends.resolve("array_api", np).name == "array_api"
    monkeypatch.setenv("REFATTN_BACKEND", "numba")
    assert backends.resolve(None, np).name == "numba"
    with pytest.raises(ValueError, match="backend is 'nunba'.*did you mean 'numba'"):
        backends.resolve("nunba", np)


def test_arrays_of_another_library_are_refused():
    x = array_api_strict.ones((1, 2, 2))
    for name in ("numpy", "numba"):
        with pytest.raises(ValueError, match=f"backend '{name}' does not take these arrays: they belong to"):
            ra.scaled_dot_product_attention(x, x, x, backend=name)


def test_thread_count_is_read_with_care(monkeypatch):
    for value in ("zero", "0", "-1"):
        monkeypatch.setenv("REFATTN_THREADS", value)
        with pytest.raises(ValueError, match="REFATTN_THREADS is"):
            threads()
    monkeypatch.setenv("REFATTN_THREADS", "3")
    assert threads() == 3


def test_capabilities_say_why_not():
    found = {c.name: c for c in backends.capabilities()}
    assert set(found) >= {"numpy", "array_api", "numba", "cupy", "numba_cuda"}
    assert found["numpy"].usable
    assert found["numba"].fused
    for c in found.values():
        assert c.usable or c.reason


def test_segment_add_sums_repeated_indices():
    r = np.random.default_rng(0)
    values = r.standard_normal((2, 3, 7, 4))
    for index in (r.integers(0, 5, (2, 3, 7)), r.integers(0, 5, 7)):
        want = np.zeros((2, 3, 5, 4))
        for b in np.ndindex(2, 3):
            for n in range(7):
                want[b][np.broadcast_to(index, (2, 3, 7))[b][n]] += values[b][n]
        for backend, x in both(values):
            got = backend.segment_add(x, backend.xp.asarray(index), 5)
            assert_close(got, want, 7 * np.finfo(np.float64).eps)


def test_segment_add_keeps_nan_where_it_belongs():
    values = np.array([[np.nan], [1.0], [2.0]])
    for backend, x in both(values):
        assert_close(
            backend.segment_add(x, backend.xp.asarray(np.array([2, 0, 0])), 4), [[3.0], [0.0], [np.nan], [0.0]], 0
        )


def test_top_k_breaks_ties_to_the_lower_index():
    x = np.array([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0], [-np.inf, 5.0, -np.inf, 1.0, 1.0]])
    for backend, y in both(x):
        for count in range(6):
            want = np.argsort(-x, axis=-1, stable=True)[:, :count]
            assert np.array_equal(np.asarray(backend.top_k(y, count)), want)


def test_erf_to_the_last_bits():
    x = np.linspace(-4, 4, 41)
    import math

    want = [math.erf(t) for t in x]
    for backend, y in both(x):
        assert_close(backend.erf(y), want, 4 * np.finfo(np.float64).eps)


def test_random_numbers_are_the_same_everywhere():
    draws = [np.asarray(b.normal(np.random.default_rng(3), (2, 5))) for b in (NUMPY, STRICT)]
    assert np.array_equal(*draws)


def test_results_do_not_depend_on_threads_or_executor(monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    r = np.random.default_rng(1)
    q, k, v = (r.standard_normal((1, 2, 1100, 16)) for _ in range(3))
    bias = r.standard_normal((1100, 1100))

    def run():
        result, pullback = ra.scaled_dot_product_attention.vjp(q, k, v, bias=bias, scale=0.3)
        return [result.output, *pullback(np.ones_like(result.output)).values()]

    runs = []
    for count in ("1", "2", "3"):
        monkeypatch.setenv("REFATTN_THREADS", count)
        runs.append(run())
    with ThreadPoolExecutor(2) as pool, use_executor(pool):
        runs.append(run())
    for other in runs[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(runs[0], other, strict=True))


class TestNumba:
    """Fused forward against the numpy backend."""

    CASES = (
        {},
        {"causal": True, "align": "lower_right"},
        {"causal": True, "align": "upper_left", "window": (7, None)},
        {"causal": True, "align": -5, "key_lengths": [1000, 0], "sinks": True},
        {"query_lengths": [70, 3], "window": (3, 2), "align": np.array([10, 900])},
        {"head_map": "tile", "scale": 30.0},
    )

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("options", CASES, ids=str)
    def test_equals_numpy(self, options, dtype):
        r = np.random.default_rng(0)
        q, k, v = (r.standard_normal(s).astype(dtype) for s in ((2, 6, 70, 9), (2, 2, 1100, 9), (2, 2, 1100, 5)))
        options = dict(options)
        if options.get("sinks"):
            options["sinks"] = np.arange(6.0).astype(dtype)
        got = ra.scaled_dot_product_attention.forward(q, k, v, backend="numba", **options)
        want = ra.scaled_dot_product_attention.forward(q, k, v, **options)
        # roundings of the logits (up to 30 x 9 in size) are the conditioning; 2 sqrt(1100) for the sums
        size = 1 + np.max(np.abs(np.where(np.isinf(want.lse), 0, want.lse)))
        tolerance = (16 * size + 70) * np.finfo(dtype).eps
        assert_close(got.output, want.output, tolerance)
        assert_close(got.lse, want.lse, tolerance)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_exp_is_accurate(self, dtype):
        """One key against many sizes of logit difference: weights are exp(x) / (1 + exp(x)) with nothing else in the way."""
        x = -np.concatenate([np.linspace(0, 40, 401), [80.0, 100.0, 600.0, 800.0]]).astype(dtype)
        q = np.stack([np.zeros_like(x), x], axis=-1)[None]
        k = np.array([[[1.0, 0.0], [0.0, 1.0]]], dtype)
        v = np.array([[[0.0], [1.0]]], dtype)
        got = ra.scaled_dot_product_attention(q, k, v, scale=1.0, backend="numba")[0, :, 0]
        wide = x.astype(np.longdouble)
        want = (np.exp(wide) / (1 + np.exp(wide))).astype(dtype)
        tiny = np.finfo(dtype).tiny
        error = np.abs(got - want) / np.maximum(want, tiny)
        normal = want > 4 * tiny
        assert error[normal].max() <= 4 * np.finfo(dtype).eps  # exp, the sum, the quotient, the product
        assert (got[~normal] <= 4 * tiny).all()

    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    def test_poison(self, poison):
        r = np.random.default_rng(2)
        q, k, v = (r.standard_normal((1, 2, 90, 4)) for _ in range(3))
        for name, x in (("k", k), ("v", v)):
            dirty = {"q": q, "k": k, "v": v, name: x.copy()}
            dirty[name][0, 1, 50] = poison
            got = ra.scaled_dot_product_attention(**dirty, causal=True, backend="numba")
            want = ra.scaled_dot_product_attention(**dirty, causal=True)
            assert np.array_equal(np.isfinite(got), np.isfinite(want))
            assert_close(got, want, 1e-13)

    def test_refusals_give_the_reason(self):
        x = np.zeros((1, 1, 3, 2))
        for options, reason in (
            ({"softcap": 1.0}, "no score terms .SoftCap."),
            ({"dropout_mask": np.ones((3, 3), bool)}, "no dropout"),
            ({"pattern": ra.patterns.dilated(2)}, "no single run"),
            ({"compute_dtype": "longdouble"}, "it computes in float32 and float64"),
        ):
            with pytest.raises(ValueError, match=reason):
                ra.scaled_dot_product_attention(x, x, x, backend="numba", **options)


def test_a_backend_of_another_package_is_found(monkeypatch):
    class Point:
        name = "elsewhere"

        def load(self):
            return type("Elsewhere", (NumpyBackend,), {"name": "elsewhere"})

    monkeypatch.setattr(backends, "_entry_points", lambda: {"elsewhere": Point()})
    backends._load.cache_clear()
    x = np.ones((1, 2, 2))
    assert ra.scaled_dot_product_attention(x, x, x, backend="elsewhere").shape == (1, 2, 2)
    backends._load.cache_clear()
    backends._bound.cache_clear()
