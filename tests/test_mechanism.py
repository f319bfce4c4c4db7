"""The Function object: binding, dtypes, namespaces, broadcasting adjoints, cotangents; the registry."""

import copy
import inspect
import pickle
import re
import subprocess
import sys

import array_api_strict
import numpy as np
import pytest
from ml_dtypes import bfloat16

import refattn as ra
from refattn.definitions import functions as table
from refattn.described import described
from refattn.mechanism import Mechanism, _named, function, mechanism
from refattn.records import Cost, Mutation, Result


def _forward(x, weight, *, shift=0.0, note=None):
    return Result(output=x * weight + shift, square=x * x), (x, weight)


def _backward(saved, *, output, square):
    x, weight = saved
    d_x = 0 * x * weight
    gradients = {"shift": None}
    if output is not None:
        d_x = d_x + output * weight
        gradients.update(weight=output * x, shift=output)
    if square is not None:
        d_x = d_x + 2 * x * square
    return {"x": d_x, **gradients}


double = function(
    _forward,
    _backward,
    name="double",
    differentiable=("x", "weight", "shift"),
    outputs=("output", "square"),
    primary=("x",),
)
X, W = np.arange(6.0).reshape(2, 3), np.ones((1, 3))


def test_gradients_have_the_shape_of_their_argument():
    result, pullback = double.vjp(X, W, shift=0.5)
    gradients = pullback(np.ones((2, 3)))
    assert np.array_equal(gradients["weight"], X.sum(0, keepdims=True))
    assert gradients["shift"].shape == ()
    assert gradients["shift"] == 6
    assert set(double.vjp(X, W)[1](result.output)) == {"x", "weight"}


def test_cotangents_by_position_by_name_and_left_out():
    _, pullback = double.vjp(X, W)
    d = np.ones((2, 3))
    assert np.array_equal(pullback(square=d)["x"], 2 * X)
    assert np.array_equal(pullback(d)["x"], pullback(output=d)["x"])
    assert (pullback()["x"] == 0).all()
    assert (pullback(square=d)["weight"] == 0).all()
    with pytest.raises(TypeError, match="one positional cotangent"):
        pullback(d, d)
    with pytest.raises(TypeError, match="'lse' has no cotangent; the differentiable results are output, square"):
        pullback(lse=d)
    with pytest.raises(ValueError, match=r"shape \(3,\): expected \(2, 3\)"):
        pullback(np.ones(3))
    with pytest.raises(TypeError, match="of the inputs' library"):
        pullback(array_api_strict.ones((2, 3)))
    with pytest.raises(TypeError, match="dtype int64: expected floating point"):
        pullback(np.ones((2, 3), int))


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.float64, np.longdouble])
def test_dtypes(dtype):
    result, pullback = double.vjp(X.astype(dtype), W.astype(dtype))
    assert result.output.dtype == dtype
    assert result.square.dtype == (np.float32 if np.dtype(dtype).itemsize == 2 else dtype)
    assert pullback(result.output)["x"].dtype == dtype


def test_compute_dtype():
    x = X.astype(np.float16)
    assert double.forward(x, W.astype(np.float16), compute_dtype="float64").square.dtype == np.float64
    assert double.forward(x, W.astype(np.float16), compute_dtype=np.float32).output.dtype == np.float16
    with pytest.raises(TypeError, match="compute_dtype is 'int32'"):
        double.forward(X, W, compute_dtype="int32")
    with pytest.raises(TypeError, match="no such dtype"):
        double.forward(array_api_strict.asarray(X), array_api_strict.asarray(W), compute_dtype="longdouble")
    assert double.forward(X.astype(complex), W, compute_dtype="complex128").output.dtype == np.complex128


def test_binding_errors_name_what_is_wrong():
    with pytest.raises(TypeError, match="the argument 'weight' is missing"):
        double(X)
    with pytest.raises(TypeError, match="takes the arrays x, weight by position, 3 were given"):
        double(X, W, 0.5)
    with pytest.raises(TypeError, match="no option 'shfit'; did you mean 'shift'"):
        double(X, W, shfit=1.0)
    with pytest.raises(TypeError, match="'x' was given twice"):
        double(X, W, x=X)
    with pytest.raises(TypeError, match="x is a list"):
        double([1.0], W)
    with pytest.raises(TypeError, match="no array among the arguments"):
        double(1.0, 2.0)
    with pytest.raises(TypeError, match="x has dtype int64 and shape"):
        double(X.astype(int), W)
    with pytest.raises(ValueError, match="not served by the fused backend 'numba'"):
        double(X, W, backend="numba")


def test_a_call_without_an_output_gives_the_result():
    pair = function(
        lambda x: (Result(half=x / 2, twice=2 * x), None),
        lambda saved, *, half, twice: {"x": half / 2},
        name="pair",
        differentiable=("x",),
        outputs=("half", "twice"),
        storage=("half",),
    )
    assert np.array_equal(pair(X).twice, 2 * X)


def test_examples_refuse_what_they_do_not_have():
    for name in ("local_attention", "lsh_attention"):
        with pytest.raises(TypeError, match="'q' is neither an axis"):
            ra.mechanisms[name].example(np.random.default_rng(0), q=5, k=7)


COSTS = {
    "adaptive_span_attention": {"k": 16},
    "bigbird_attention": {"t": 32},
    "etc_attention": {"t": 32},
    "local_attention": {"t": 32},
    "longformer_attention": {"t": 32, "window": (4, 4)},
    "lsh_attention": {"t": 64, "chunk": 16},
    "nystrom_attention": {"q": 16, "k": 16},
    "sinkhorn_attention": {"t": 32},
    "sparse_transformer_attention": {"t": 64},
    "synthesizer_attention": {"m": 8, "f": 8},
    "topk_attention": {"count": 4},
}


@pytest.mark.parametrize("name", ra.mechanisms)
def test_every_cost_takes_checkpointing_and_checks_its_words(name):
    m = ra.mechanisms[name]
    required = [
        n for n, p in inspect.signature(m._cost).parameters.items() if p.default is p.empty and p.kind is p.KEYWORD_ONLY
    ]
    sizes = {**dict.fromkeys(required, 8), **COSTS.get(name, {})}
    whole, again = (m.cost(**sizes, direction="both", recompute=r) for r in (False, True))
    assert again.multiplies == whole.multiplies + m.cost(**sizes).multiplies
    assert 0 < again.saved_bytes <= whole.saved_bytes
    assert m.cost(**sizes, direction="backward", recompute=True).saved_bytes == 0
    with pytest.raises(ValueError, match="direction is 'up'"):
        m.cost(**sizes, direction="up")
    with pytest.raises(TypeError, match="dtype is 'float3'"):
        m.cost(**sizes, dtype="float3")


def test_signature_shows_what_a_caller_may_pass():
    parameters = inspect.signature(double).parameters
    assert list(parameters) == ["x", "weight", "shift", "note", "backend", "compute_dtype", "algorithm"]
    assert parameters["backend"].default is None
    assert "backend" in inspect.signature(ra.scaled_dot_product_attention).parameters


def test_result_is_a_read_only_record():
    result = double.forward(X, W)
    assert list(result) == ["output", "square"]
    assert "output" in result
    with pytest.raises(AttributeError, match="read-only"):
        result.output = X
    with pytest.raises(AttributeError, match="no field 'lse': this result has output, square"):
        result.lse  # noqa: B018


def test_registry_is_read_only_and_names_are_taken_once():
    assert ra.mechanisms["scaled_dot_product_attention"] is ra.scaled_dot_product_attention
    with pytest.raises(TypeError):
        ra.mechanisms["x"] = None
    m = ra.scaled_dot_product_attention
    with pytest.raises(ValueError, match="exists already"):
        mechanism(
            m._forward, m._backward, m._cost, m._example, name=m.name, equation="", paper="", axes={}, differentiable=("q",),
        )  # fmt: skip


@pytest.mark.parametrize("name", ra.mechanisms)
def test_every_mechanism_has_what_the_contract_names(name):
    m = ra.mechanisms[name]
    assert isinstance(m, Mechanism)
    assert m.name == name
    assert getattr(ra, name) is m
    assert "output" in m.equation
    assert re.search(r"20\d\d, .*arXiv:", m.paper)
    assert m.axes
    assert all(len(letter) == 1 and text for letter, text in m.axes.items())
    assert m.differentiable
    assert m.mutations
    assert all(isinstance(x, Mutation) and (x.forward or x.gradients) and x.says for x in m.mutations)
    arguments = m.example(np.random.default_rng(0))
    before = {n: x.copy() for n, x in arguments.items() if isinstance(x, np.ndarray)}
    result, pullback = m.vjp(**arguments)
    gradients = pullback(np.ones_like(result.output))
    for n, g in gradients.items():
        assert g.shape == np.shape(arguments[n])
    assert all(np.array_equal(arguments[n], x) for n, x in before.items())
    want = m.definition(**arguments)
    np.testing.assert_allclose(result.output, want.output, rtol=1e-11, atol=1e-11)


def test_mutation_answers_to_class():
    m = ra.scaled_dot_product_attention.mutations[0]
    assert getattr(m, "class") == m.class_


def test_costs_add_up():
    total = Cost(multiplies=2, elementwise=3, peak_bytes=5) + Cost(multiplies=1, peak_bytes=9)
    assert total == Cost(multiplies=3, elementwise=3, peak_bytes=9)
    assert total.flops == 9


DOCSTRING = """Squares: every number times itself.

    output[h,q] = x[h,q] x[h,q]
        + 0

======  ==================  =====
letter  axis                where
======  ==================  =====
...     any batch axes      x
h       head                x
q, k    query, key          x
i, j    position; both of   x
        one sequence
======  ==================  =====

Source: Someone 1999, arXiv:0000.00000, section 1.  Not this.
"""


def test_a_docstring_says_what_the_mechanism_is():
    says = described("here", DOCSTRING)
    assert says.title == "Squares: every number times itself."
    assert says.equation == "output[h,q] = x[h,q] x[h,q]\n    + 0"
    assert says.paper == "Someone 1999, arXiv:0000.00000, section 1"
    both = "position; both of one sequence"
    assert dict(says.axes) == {"h": "head", "q": "query", "k": "key", "i": both, "j": both}


@pytest.mark.parametrize(
    "text, part",
    [
        (None, "title: expected a first line"),
        (DOCSTRING.replace("    ", ""), "equation: expected an indented equation"),
        (DOCSTRING.replace("letter", "column"), "axes: expected a table of axes"),
        (DOCSTRING.replace("Source", "From"), "paper: expected a paragraph"),
    ],
)
def test_a_docstring_without_a_part_is_named_with_it(text, part):
    with pytest.raises(ValueError, match=f"the docstring of refattn.here has no {part}"):
        described("refattn.here", text)


# ---------------------------------------------------------------------- pickling, registry


@pytest.mark.parametrize("found", [*ra.mechanisms.values(), *ra.functions.values()], ids=lambda x: x.key)
def test_mechanisms_and_functions_are_pickled_by_name(found):
    assert pickle.loads(pickle.dumps(found)) is found
    assert copy.deepcopy({"it": found})["it"] is found
    assert copy.copy(found) is found
    assert len(pickle.dumps(found)) < 120


def test_a_pickled_mechanism_arrives_in_another_process():
    code = (
        "import pickle, sys; m = pickle.loads(sys.stdin.buffer.read()); print(m.name, m.cost(q=2, k=2, d=1).multiplies)"
    )
    data = pickle.dumps(ra.scaled_dot_product_attention)
    run = subprocess.run([sys.executable, "-P", "-c", code], input=data, capture_output=True, check=True)
    assert run.stdout.decode().split() == ["scaled_dot_product_attention", "8"]


def test_what_is_not_registered_is_not_pickled():
    with pytest.raises(pickle.PicklingError, match="<function double> is not registered"):
        pickle.dumps(double)
    with pytest.raises(LookupError, match="no mechanism or function 'squares'"):
        _named("squares")


def test_results_are_pickled_and_copied():
    result = double.forward(X, W)
    for other in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert list(other) == list(result)
        assert np.array_equal(other.output, result.output)


def test_functions_that_are_no_mechanisms_have_names():
    assert ra.functions["softmax"] is ra.softmax
    assert ra.functions["positions.rotary"] is ra.positions.rotary
    assert ra.functions["layers.layer_norm"] is ra.layers.layer_norm
    assert ra.functions["memory.compress"] is ra.memory.compress
    assert not set(ra.functions) & set(ra.mechanisms)
    assert (ra.positions.rotary.name, ra.positions.rotary.key) == ("rotary", "positions.rotary")
    with pytest.raises(TypeError):
        ra.functions["mine"] = double
    assert (double.positional, double.options) == (("x", "weight"), ("x", "weight", "shift", "note"))


def test_cotangents_are_real_unless_the_arguments_are_complex():
    _, pullback = double.vjp(X, W)
    with pytest.raises(TypeError, match="the cotangent of output has dtype complex128: expected floating point"):
        pullback(np.ones((2, 3), complex))
    _, pullback = double.vjp(X.astype(complex), W, compute_dtype="complex128")
    assert pullback(np.ones((2, 3), complex))["x"].dtype == np.complex128


WRONG = [
    None,
    True,
    "no",
    -1,
    1.5,
    np.nan,
    10**30,
    [],
    object(),
    np.zeros((2, 2)),
    {1: 2},
    1j,
    b"x",
    np.int32,
    np.float16,
    int,
]


@pytest.mark.parametrize("name", ["compute_dtype", "backend", "algorithm"])
def test_malformed_common_options_are_named(name):
    for value in WRONG[1:]:
        if name == "compute_dtype" and value is np.float16:
            continue
        with pytest.raises((TypeError, ValueError), match=name):
            ra.softmax(X, **{name: value}) if name != "algorithm" else ra.scaled_dot_product_attention(
                X, X, X, algorithm=value
            )


SIZES = {"window": (2, 2), "count": 3, "landmarks": 4, "m": 8, "n": 2, "k": 20, "q": 16, "t": 16}


@pytest.mark.parametrize("name", ra.mechanisms)
def test_malformed_sizes_are_named(name):
    """Every parameter of every cost takes each wrong value, or says its own name."""
    m = ra.mechanisms[name]
    parameters = {n: p for n, p in inspect.signature(m._cost).parameters.items() if p.kind is p.KEYWORD_ONLY}
    sizes = {n: SIZES.get(n, 8) for n, p in parameters.items() if p.default is p.empty}
    if "t" in parameters:
        sizes["t"] = 16
    if "count" in parameters:
        sizes["count"] = 3
    m.cost(**sizes)
    unnamed = []
    for parameter in parameters:
        for value in WRONG:
            try:
                m.cost(**{**sizes, parameter: value})
            except (TypeError, ValueError) as error:
                unnamed += [] if parameter in str(error) else [(parameter, value, error)]
    assert unnamed == []


@pytest.mark.parametrize("found", [*ra.mechanisms.values(), *ra.functions.values()], ids=lambda x: x.key)
def test_examples_name_what_they_cannot_draw(found):
    rng = np.random.default_rng(0)
    with pytest.raises(TypeError, match="rng is a int: expected a numpy.random.Generator"):
        found.example(3)
    with pytest.raises(TypeError, match="'hats' is neither an axis"):
        found.example(rng, hats=3)
    make = found._example if isinstance(found, Mechanism) else table.examples[found.key]
    letter = next(n for n in inspect.signature(make).parameters if len(n) == 1)
    for value in (-1, 1.5, True, "no", 10**30):
        with pytest.raises((TypeError, ValueError), match=f"{letter} is "):
            found.example(rng, **{letter: value})
