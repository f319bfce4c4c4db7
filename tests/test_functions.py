"""Functions around attention against their definitions: results, gradients, registry."""

import functools
import inspect
import sys

import array_api_strict
import numpy as np
import pytest

import refattn as ra
from refattn.arrays import namespace
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
    ("gates.log_decay", {"form": "bounded"}),
    ("gates.log_decay", {"form": "logsigmoid", "temperature": 16.0}),
    ("gates.log_decay", {"form": "exp"}),
    ("layers.causal_convolution", {"activation": "silu"}),
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
    x = array_api_strict.asarray([[1.0, 2.0]])
    assert isinstance(ra.softmax.definition(x).output, type(x))


# ---------------------------------------------------------------------- malformed calls, axes of size 0


WRONG = [
    None, True, "no", -1, 0, 1.5, -0.5, np.nan, np.inf, 10**30, sys.maxsize, [], (), object(), np.zeros((2, 2)), np.zeros(()),
    np.array(1), np.zeros(0), np.zeros((0, 3, 4)), lambda x: x, {1: 2}, np.ones((2, 2), bool), b"x", np.int32, np.float16,
    np.ones((2, 3, 4)), np.ones((2, 3, 4), complex), array_api_strict.ones((2, 3)), np.array(["a"]), np.array([None]),
    np.float64(2.0), np.zeros((1,) * 7),
]  # fmt: skip
RAW = (
    "unsupported operand", "has no attribute", "not iterable", "ambiguous", "object is not", "ufunc", "operands could not",
    "cannot reshape", "bad operand", "not supported between", "has no len",
)  # fmt: skip
LATER = {"norm_eps", "hashes"}  # of lsh_attention: checked there


def complaint(call, name, value):
    """What is wrong with the way a call refuses a value; None where it takes it, or says clearly why it does not."""
    try:
        call(value)
    except (TypeError, ValueError) as error:
        said = str(error)
        if name not in said or any(x in said for x in RAW):
            return name, value, error
    except Exception as error:
        return name, value, error
    return None


@pytest.mark.parametrize(
    "name, options", CASES, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values()))
)
def test_malformed_arguments_are_named(name, options):
    function = ra.functions[name]
    arguments = function.example(np.random.default_rng(7), **options)

    def run(argument, value):
        result, pullback = function.vjp(**{**arguments, argument: value})
        xp = namespace(getattr(result, function.outputs[0]))
        pullback(**{n: xp.ones(getattr(result, n).shape) for n in function.outputs})

    found = [
        complaint(functools.partial(run, argument), argument, value)
        for argument in function.options
        for value in WRONG
        if argument not in LATER
    ]
    assert [x for x in found if x] == []


PLAIN = {
    "sinusoid": (ra.positions.sinusoid, {"positions": [1, 2], "m": 4}),
    "relative_distances": (ra.positions.relative_distances, {"q": 2, "k": 3, "causal": True}),
    "alibi_slopes": (ra.positions.alibi_slopes, {"h": 3}),
    "retention_decay": (ra.positions.retention_decay, {"h": 3}),
    "lightning_decay": (ra.positions.lightning_decay, {"h": 3, "layer": 0, "layers": 2}),
    "t5_bucket": (
        ra.positions.t5_bucket,
        {"distance": [1, 2], "buckets": 32, "max_distance": 128, "bidirectional": True},
    ),
    "initial_centroids": (
        ra.routing.initial_centroids,
        {"rng": np.random.default_rng(0), "h": 2, "c": 2, "d": 3, "normalize": "layer", "tokens": None, "iterations": 2},
    ),
    "transformer": (
        ra.cost.transformer,
        {"layers": 2, "m": 8, "h": 2, "q": 4, "span": 3, "g": 1, "f": 3, "biases": False, "norms": True, "recompute": False},
    ),
    "activations": (ra.cost.activations, {"layers": 2, "m": 8, "h": 2, "q": 4, "x": 2, "y": 1}),
    "stream": (
        lambda **given: list(ra.memory.stream(**given)),
        {
            "segments": [np.ones((2, 4))], "layers": [(ra.layers.linear, {"weight": np.ones((4, 4))})], "memory_length": 3,
            "compressed_length": 2, "rate": 1, "compress": None, "evict": "overflow", "initial": "empty",
            "recurrence": "own", "memories": None,
        },
    ),
    "bind": (ra.layers.bind, {"function": ra.layers.linear, "reuse": None}),
    "residual": (ra.layers.residual.vjp, {"x": np.ones((2, 4)), "f": ra.layers.bind(ra.layers.linear, weight=np.eye(4))}),
    "reversible_stack": (ra.layers.reversible_stack.vjp, {"x": np.ones((2, 4)), "blocks": [], "readout": "concat"}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_malformed_arguments_of_plain_functions_are_named(name):
    function, arguments = PLAIN[name]
    function(**arguments)
    found = [
        complaint(lambda value, n=argument: function(**{**arguments, n: value}), argument, value)
        for argument in arguments
        for value in WRONG
    ]
    assert [x for x in found if x] == []


SIZED = [(n, o) for n, o in CASES if n != "layers.lsh_layer"]  # its empty axes are held where lsh_attention is


@pytest.mark.parametrize(
    "name, options", SIZED, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values()))
)
def test_axes_of_size_0_and_1(name, options):
    """Results of the definition, or one error that names something; in NumPy and in the strict namespace."""
    function = ra.functions[name]
    letters = [n for n in inspect.signature(table.examples[name]).parameters if len(n) == 1]
    refused: list[str] = []
    for letter in letters:
        for size in (0, 1):
            arguments = function.example(np.random.default_rng(7), **options, **{letter: size})
            if "compress" in arguments:
                continue
            try:
                result, pullback = function.vjp(**arguments)
            except ValueError as error:
                refused.append(str(error))
                continue
            gradients = pullback(**{n: np.ones(getattr(result, n).shape) for n in function.outputs})
            want, want_back = function.definition.vjp(**arguments)
            wanted = want_back(**{n: np.ones(getattr(want, n).shape) for n in function.outputs})
            strict = {n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
            other, back = function.vjp(**strict)
            also = back(**{n: array_api_strict.ones(getattr(other, n).shape) for n in function.outputs})
            for n in function.outputs:
                close(getattr(result, n), getattr(want, n))
                close(getattr(other, n), getattr(want, n))
            for n, g in wanted.items():
                close(gradients[n], g)
                close(also[n], g)
    assert [x for x in refused if "expected" not in x] == []


def test_distances_beyond_64_bits_and_counts_beyond_reason():
    bucket = ra.positions.t5_bucket
    assert bucket([2**63 - 1, -(2**63), 3]).tolist() == [15, 31, 3]
    assert bucket(np.array([200, 3], np.uint8)).tolist() == [15, 3]
    assert bucket(np.array([2**64 - 1], np.uint64)).tolist() == [15]
    assert bucket([]).shape == (0,)
    with pytest.raises(ValueError, match="buckets is 1000000000: expected at most 4096"):
        bucket([1], buckets=10**9)


@pytest.mark.parametrize("eps", [-1e-9, np.nan, np.inf, "small", True])
def test_eps_is_a_number_of_at_least_0(eps):
    with pytest.raises((TypeError, ValueError), match="eps is"):
        ra.layers.layer_norm(np.ones((2, 3)), eps=eps)
