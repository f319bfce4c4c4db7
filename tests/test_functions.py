"""Functions around attention against their definitions: results, gradients, registry."""

import numpy as np
import pytest

import refattn as ra
from refattn.definitions import functions as table

U = 2.0**-53


def close(a, b, terms=1e4):
    """Equal up to the rounding of sums of so many terms of the size of the largest entry."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    assert a.shape == b.shape
    finite = np.isfinite(b)
    assert np.array_equal(a[~finite], b[~finite], equal_nan=True)
    scale = max(1.0, np.max(np.abs(b[finite]), initial=0.0))
    assert np.max(np.abs(a[finite] - b[finite]), initial=0.0) <= terms * U * scale


CASES = [(name, {}) for name in ra.functions] + [
    ("layers.feed_forward", {"activation": "relu"}),
    ("layers.compressive_layer", {"norm": "pre", "through_memory": True}),
    ("layers.compressive_layer", {"norm": "post", "through_memory": True, "clamp_length": 2}),
    ("layers.compressive_layer", {"compressed_positions": "span_end", "rate": 3}),
    ("layers.transformer_xl_layer", {"norm": "pre", "keep_weights": True}),
    ("layers.transformer_xl_layer", {"same_length": True}),
    ("layers.lsh_layer", {"causal": True, "norm": False}),
    ("memory.compress", {"method": "mean"}),
    ("memory.compress", {"method": "max"}),
    ("memory.compress", {"method": "conv"}),
    ("memory.compress", {"method": "most_used"}),
    ("memory.compress", {"method": "mean", "rate": 3}),
    ("memory.attention_reconstruction_loss", {"norm": "mse", "scale": 0.3}),
    ("memory.auto_encoding_loss", {"norm": "mse"}),
    ("routing.update_centroids", {"method": "ema"}),
    ("routing.update_centroids", {"method": "means"}),
]


@pytest.mark.parametrize(
    "name, options", CASES, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values()))
)
def test_functions_equal_their_definitions(name, options):
    function, rng = ra.functions[name], np.random.default_rng(7)
    arguments = function.example(rng, **options)
    result, pullback = function.vjp(**arguments)
    want, want_back = function.definition.vjp(**arguments)
    flat = lambda x: x if isinstance(x, (tuple, list)) else [x]  # noqa: E731
    assert set(result) == set(want)
    for field in result:
        for a, b in zip(flat(getattr(result, field)), flat(getattr(want, field)), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                close(a, b)
    cotangents = {n: rng.standard_normal(np.shape(getattr(result, n))) for n in function.outputs}
    gradients, wanted = pullback(**cotangents), want_back(**cotangents)
    assert set(gradients) == set(wanted) == {n for n in function.differentiable if arguments.get(n) is not None}
    for n, g in gradients.items():
        close(g, wanted[n])


def test_every_function_has_a_definition_and_an_example():
    assert set(table.definitions) == set(table.examples) == set(ra.functions)


def test_known_mistakes_of_functions():
    assert {m.class_ for m in ra.functions["memory.update_compressed_memory"].mutations} >= {"memory_order"}
    assert ra.functions["softmax"].mutations == ()


def test_definitions_come_back_in_the_caller_s_library():
    strict = pytest.importorskip("array_api_strict")
    x = strict.asarray([[1.0, 2.0]])
    assert isinstance(ra.softmax.definition(x).output, type(x))
