"""Candidates: what is handed over, what comes back, and every kind of target."""

import dataclasses
import functools
import math
import sys

import ml_dtypes
import numpy as np
import pytest

import refattn as ra
from refattn.verification.candidate import Call, UsageError, files, open_candidate
from refattn.verification.conventions import (
    PRESETS,
    gradients_open,
    open_elements,
    reference_arguments,
    reference_cotangents,
    reference_gradients,
    reference_result,
)

SDPA = ra.scaled_dot_product_attention
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-8}


def make_call(q=5, k=7, h=6, g=2, e=8, dtype="float32", grad=False, wrt=("q", "k", "v"), name="0", seed=0, **options):
    """A call with arrays (2, h, q, 8), (2, g, k, 8), (2, g, k, e); floating options are rounded to the dtype."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    shapes = {"q": (2, h, q, 8), "k": (2, g, k, 8), "v": (2, g, k, e)}
    arrays = {n: rng.standard_normal(s).astype(kind) for n, s in shapes.items()}
    options = {n: x.astype(kind) if getattr(x, "dtype", None) == np.float64 else x for n, x in options.items()}
    cotangents = {
        "output": rng.standard_normal((2, h, q, e)).astype(kind),
        "lse": rng.standard_normal((2, h, q)).astype(
            np.promote_types(kind, np.float32) if dtype != "bfloat16" else np.float32
        ),
    }
    return Call(name, SDPA.name, arrays, options, cotangents if grad else None, wrt if grad else ())


def wide(values):
    return {
        n: x.astype(np.float64)
        if isinstance(x, np.ndarray) and (x.dtype.kind == "f" or x.dtype.name == "bfloat16")
        else x
        for n, x in values.items()
    }


def assert_agrees(candidate, call, outcome, dtype="float32", results=("output",), gradients=()):
    """The outcome is the reference's under the candidate's conventions, within some hundred roundings of size-1 numbers."""
    assert outcome.status == "ok", (outcome.message, outcome.traceback)
    arguments = reference_arguments(SDPA, wide(call.arrays), wide(call.options), candidate.conventions, candidate.takes)
    result, pull = SDPA.vjp(**arguments)
    fields = reference_result(result, arguments, candidate.conventions)
    left_open = open_elements(result, arguments, candidate.conventions)
    assert set(outcome.fields) == set(results)
    for name, x in outcome.fields.items():
        assert x.shape == fields[name].shape, name
        keep = ~left_open.get(name, np.zeros(x.shape, bool))
        np.testing.assert_allclose(
            x.astype(np.float64)[keep], fields[name][keep], rtol=30 * EPS[dtype], atol=30 * EPS[dtype], err_msg=name
        )
    assert set(outcome.gradients) == set(gradients)
    if gradients:
        assert not gradients_open(result, arguments, candidate.conventions)
        cotangents = {n: call.cotangents[n].astype(np.float64) for n in outcome.cotangents}
        raw = pull(**reference_cotangents(cotangents, candidate.conventions))
        wanted = reference_gradients(raw, result, arguments, cotangents, candidate.conventions, wide(call.options))
        for name in gradients:
            x = outcome.gradients[name]
            assert x.shape == wanted[name].shape, name
            tolerance = 100 * EPS[dtype]
            np.testing.assert_allclose(x.astype(np.float64), wanted[name], rtol=tolerance, atol=tolerance, err_msg=name)


def run_one(function, call, **more):
    with open_candidate(function, SDPA, **more) as candidate:
        (outcome,) = candidate.run([call])
    return candidate, outcome


# ---------------------------------------------------------------------- an independent kernel, dense, in NumPy


def weights_of(q, k, visible=None, bias=0.0, scale=None, softcap=None):
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    logits = q.astype(np.float64) @ np.swapaxes(k, -1, -2).astype(np.float64) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    logits = logits + bias
    if visible is not None:
        logits = np.where(visible, logits, -math.inf)
    top = np.maximum(logits.max(-1, keepdims=True), -1e300)
    p = np.exp(logits - top)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return p / np.where(total == 0, 1, total), np.where(total[..., 0] == 0, -math.inf, lse)


def dense(q, k, v, **settings):
    weights, lse = weights_of(q, k, **settings)
    v = np.repeat(v, q.shape[1] // v.shape[1], axis=1).astype(np.float64)
    return (weights @ v).astype(q.dtype), lse


def lower_right(q, k):
    return np.tril(np.ones((q, k), bool), k - q)


def attention(q, k, v, *, causal=False, mask=None, scale=None):
    visible = None if mask is None else mask
    if causal:
        own = lower_right(q.shape[2], k.shape[2])
        visible = own if mask is None else own & mask
    return dense(q, k, v, visible=visible, scale=scale)


def attention_backward(d_output, q, k, v, *, causal=False, mask=None, scale=None, d_lse=None):
    visible = None if mask is None else mask
    if causal:
        own = lower_right(q.shape[2], k.shape[2])
        visible = own if mask is None else own & mask
    weights, _ = weights_of(q, k, visible=visible, scale=scale)
    r, g = q.shape[1] // k.shape[1], k.shape[1]
    full = {n: np.repeat(x, r, axis=1).astype(np.float64) for n, x in (("k", k), ("v", v))}
    d = d_output.astype(np.float64)
    d_weights = d @ np.swapaxes(full["v"], -1, -2)
    d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    if d_lse is not None:
        d_logits = d_logits + weights * d_lse[..., None]
    d_logits = d_logits * (scale or q.shape[-1] ** -0.5)
    turned = np.swapaxes(d_logits, -1, -2) @ q.astype(np.float64), np.swapaxes(weights, -1, -2) @ d
    d_k, d_v = (x.reshape(x.shape[0], g, r, *x.shape[2:]).sum(2) for x in turned)
    return (d_logits @ full["k"]).astype(q.dtype), d_k.astype(q.dtype), d_v.astype(q.dtype)


# ---------------------------------------------------------------------- the protocol, in this process


def test_numpy_candidate_with_its_backward():
    mask = np.random.default_rng(1).random((2, 1, 5, 7)) > 0.3
    calls = [
        make_call(grad=True),
        make_call(grad=True, causal=True, scale=0.3),
        make_call(grad=True, mask=mask, e=4),
    ]
    with open_candidate(attention, SDPA, backward=attention_backward) as candidate:
        assert candidate.where == "this process"
        assert candidate.independent is True
        assert candidate.has_backward
        assert candidate.describe()["framework"] == "numpy"
        for call, outcome in zip(calls, candidate.run(calls), strict=True):
            assert_agrees(candidate, call, outcome, results=("output", "lse"), gradients=("q", "k", "v"))
            assert outcome.cotangents == ("output", "lse")
            assert outcome.seconds > 0


def test_layouts_are_permutations():
    seen = {}

    def blhd(q, k, v, *, causal=False):
        seen.update(q=q.shape, contiguous=q.flags.c_contiguous)
        output, lse = attention(*(x.transpose(0, 2, 1, 3) for x in (q, k, v)), causal=causal)
        return output.transpose(0, 2, 1, 3), lse

    def blhd_backward(d_output, q, k, v, *, causal=False, d_lse=None):
        turned = (x.transpose(0, 2, 1, 3) for x in (d_output, q, k, v))
        return {
            n: g.transpose(0, 2, 1, 3)
            for n, g in zip("qkv", attention_backward(*turned, causal=causal, d_lse=d_lse), strict=True)
        }

    call = make_call(grad=True, causal=True)
    candidate, outcome = run_one(blhd, call, layout="blhd", backward=blhd_backward)
    assert_agrees(candidate, call, outcome, results=("output", "lse"), gradients=("q", "k", "v"))
    assert seen == {"q": (2, 5, 6, 8), "contiguous": True}

    strided = np.ascontiguousarray(call.arrays["q"].transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)[..., ::-1]
    call.arrays["q"] = strided
    candidate, outcome = run_one(blhd, call, layout="blhd")
    assert_agrees(candidate, call, outcome, results=("output", "lse"))
    assert seen["contiguous"] is False
    with pytest.raises(UsageError, match="permutation"):
        open_candidate(blhd, SDPA, layout="bhl")


def test_only_what_the_signature_takes_is_asked_for():
    with open_candidate(attention, SDPA) as candidate:
        assert candidate.accepts(["causal", "mask"]) == (True, "")
        assert candidate.accepts(["align"]) == (True, "")
        fine, why = candidate.accepts(["causal", "softcap"])
        assert not fine
        assert "softcap" in why
        (outcome,) = candidate.run([make_call(softcap=2.0)])
        assert outcome.status == "unsupported"
        assert not candidate.takes("align")
    with open_candidate(attention, SDPA, supports=["causal"]) as candidate:
        assert candidate.accepts(["mask"])[0] is False
        (outcome,) = candidate.run([make_call(mask=np.ones((5, 7), bool))])
        assert outcome.status == "unsupported"


def test_conventions_are_handed_over_only_by_name():
    seen = []

    def named(q, k, v, *, causal=False, align="?", **more):
        seen.append((align, more))
        return q

    def anything(q, k, v, **more):
        seen.append(more)
        return q

    call = make_call(causal=True, align="upper_left", softcap=2.0, softcap_after_bias=True)
    run_one(named, call)
    run_one(anything, call)
    assert seen == [("upper_left", {"softcap": 2.0}), {"causal": True, "softcap": 2.0}]


def test_rename():
    def theirs(q, k, v, is_causal=False, sm_scale=None, offset=None):
        assert offset == "lower_right"
        return attention(q, k, v, causal=is_causal, scale=sm_scale)

    def theirs_backward(d_output, q, k, v, is_causal=False, sm_scale=None, offset=None):
        gradients = attention_backward(d_output, q, k, v, causal=is_causal, scale=sm_scale)
        return {**dict(zip("qkv", gradients, strict=True)), "sm_scale": np.asarray(1.0)}

    call = make_call(causal=True, scale=0.3, align="lower_right", grad=True, wrt=("q", "k", "v", "scale"))
    rename = {"causal": "is_causal", "scale": "sm_scale", "align": "offset"}
    candidate, outcome = run_one(theirs, call, rename=rename, backward=theirs_backward)
    assert candidate.takes("align")
    assert outcome.gradients.pop("scale") == 1
    assert outcome.cotangents == ("output",), "its backward takes no d_lse"
    assert_agrees(candidate, call, outcome, results=("output", "lse"), gradients=("q", "k", "v"))
    assert candidate.accepts(["causal"])[0]


def raises(error):
    def function(q, k, v):
        raise error

    return function


@pytest.mark.parametrize(
    "function, status, says",
    [
        (raises(NotImplementedError("half only")), "unsupported", "half only"),
        (raises(RuntimeError("kernel launch")), "error", "RuntimeError: kernel launch"),
        (raises(MemoryError("7 GiB")), "memory", "7 GiB"),
        (raises(RuntimeError("CUDA out of memory")), "memory", "out of memory"),
        (raises(SystemExit(2)), "error", "SystemExit"),
        (lambda q, k, v: None, "error", "returned None"),
        (lambda q, k, v: (q, q, q), "error", "3 values"),
        (lambda q, k, v: "text", "error", "output: a str is not an array"),
        (lambda q, k: q, "error", "TypeError"),
    ],
)
def test_what_goes_wrong_has_a_status(function, status, says):
    _, outcome = run_one(function, make_call())
    assert outcome.status == status
    assert says in outcome.message
    assert (outcome.traceback != "") == (status in ("error", "memory"))


def test_what_may_be_returned():
    for value in (lambda q: q, lambda q: (q, None), lambda q: [q], lambda q: {"output": q, "lse": None}):
        _, outcome = run_one(lambda q, k, v, value=value: value(q), make_call())
        assert list(outcome.fields) == ["output"]
    _, outcome = run_one(lambda q, k, v: {"output": q, "lse": q[..., 0], "buckets": q[0]}, make_call())
    assert list(outcome.fields) == ["output", "lse", "buckets"]


def test_a_backward_may_say_less():
    call = make_call(grad=True, causal=True)

    def bad(d_output, q, k, v, **options):
        raise ValueError("no")

    def refuses(d_output, q, k, v, **options):
        raise NotImplementedError("not causal")

    for backward, provided, says in (
        (lambda d, q, k, v, *, causal=False: {"v": v}, {"v"}, ""),
        (lambda d, q, k, v, *, causal=False: (q, None), {"q"}, ""),
        (lambda d, q, k, v: (q, k, v), set(), "no causal"),
        (refuses, set(), "not causal"),
    ):
        _, outcome = run_one(attention, call, backward=backward)
        assert outcome.status == "ok"
        assert set(outcome.gradients) == provided
        assert says in outcome.message
    _, outcome = run_one(attention, call, backward=bad)
    assert outcome.status == "ok", "the forward keeps its verdict"
    assert outcome.backward_failed == "the backward raised ValueError: no"
    _, outcome = run_one(attention, call)
    assert outcome.gradients == {}
    assert "no backward" in outcome.message


def test_changed_inputs_are_noticed_and_the_callers_arrays_stay():
    def scales_in_place(q, k, v, *, mask=None):
        mask[...] = True
        q *= 2
        return q

    call = make_call(mask=np.zeros((5, 7), bool))
    before = call.arrays["q"].copy()
    _, outcome = run_one(scales_in_place, call)
    assert outcome.status == "ok"
    assert outcome.mutated == ("q", "mask")
    assert (call.arrays["q"] == before).all()
    assert not call.options["mask"].any()

    for x in (call.arrays["q"], call.options["mask"]):
        x.flags.writeable = False
    _, outcome = run_one(scales_in_place, call)
    assert outcome.mutated == ("q", "mask"), "a read-only array is written to as soon as it can be"

    def demands_writeable(q, k, v):
        if not q.flags.writeable:
            raise ValueError("buffer source array is read-only")
        return q

    call.options.clear()
    _, outcome = run_one(demands_writeable, call)
    assert outcome.status == "error"
    assert "read-only" in outcome.message


def test_negative_zero_and_nan_are_compared_by_their_bits():
    call = make_call()
    call.arrays["q"][0, 0, 0, 0] = math.nan

    def flips_a_zero(q, k, v):
        v[v == 0] = -0.0
        return q

    assert run_one(flips_a_zero, call)[1].mutated == ()
    call.arrays["v"][0, 0, 0, 0] = 0.0
    assert run_one(flips_a_zero, call)[1].mutated == ("v",)


# ---------------------------------------------------------------------- independence


def _helper(q):
    return SDPA(q, q, q)


def _indirect(q, k, v):
    return [_helper(x) for x in (q, k, v)]


def _helping(q, k, v):
    from refattn import softmax

    return softmax(q, axis=-1)


def test_a_candidate_that_asks_refattn_is_found_out():
    local = SDPA

    def closure(q, k, v):
        return local(q, k, v)

    def by_the_definition(q, k, v):
        return SDPA.definition(q, k, v).output

    call = make_call(h=2, g=2, q=5, k=5)
    for function in (SDPA, SDPA.forward, _indirect, closure, by_the_definition, functools.partial(closure)):
        with open_candidate(function, SDPA) as candidate:
            candidate.run([call])
            assert candidate.independent is False, function
            assert candidate.asked_of_refattn == ("scaled_dot_product_attention",)
    for function in (attention, _helping):
        with open_candidate(function, SDPA) as candidate:
            candidate.run([call])
            assert candidate.independent is True, "an import or a helper is no matter"
    assert candidate.describe()["notes"] == ["it calls refattn's softmax: helpers, not the mechanism"]


def test_imports_and_calls_are_watched_in_the_child(tmp_path):
    (tmp_path / "helper_of_kernels.py").write_text("import refattn.contraction\n")
    lines = {
        "top": "import refattn\ndef f(q, k, v): return q\n",
        "late": "def f(q, k, v):\n    import refattn\n    return q\n",
        "dynamic": "import importlib\ndef f(q, k, v):\n    importlib.import_module('refattn')\n    return q\n",
        "helper": "def f(q, k, v):\n    import helper_of_kernels\n    return q\n",
        "asks": "import refattn\ndef f(q, k, v):\n    return refattn.local_attention(q, q, q, block=4)\n",
        "clean": "import numpy\ndef f(q, k, v):\n    import math\n    return q\n",
    }
    for name, text in lines.items():
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        candidate, outcome = run_one(f"{path}:f", make_call(h=2, g=2))
        assert outcome.status == "ok", outcome.message
        assert candidate.independent is (name != "asks"), name
        imports = any("imports refattn" in note for note in candidate.describe()["notes"])
        assert imports is (name not in ("clean", "asks")), name
    assert outcome.called == ()


# ---------------------------------------------------------------------- commands and recorded calls

PROGRAM = """
import json, sys
import numpy as np
sys.path.insert(0, {here!r})
from safetensors.numpy import save_file
from safetensors import safe_open
with safe_open(sys.argv[1], framework="numpy") as file:
    given = {{n: file.get_tensor(n) for n in file.keys()}}
    about = file.metadata()
options = json.loads(about["options"])
if options.get("softcap") == 13:
    sys.exit(5)
if "window" in options:
    save_file({{}}, sys.argv[2], {{"unsupported": "no window"}})
    sys.exit(0)
assert about["mechanism"] == "scaled_dot_product_attention" and "align" not in options
q, k, v = (given[n].transpose(0, 2, 1, 3).astype(np.float64) for n in "qkv")
k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
logits = q @ k.swapaxes(-1, -2) * options["sm_scale"]
if options["is_causal"]:
    logits = np.where(np.tril(np.ones(logits.shape[-2:], bool), logits.shape[-1] - logits.shape[-2]), logits, -np.inf)
p = np.exp(logits)
p /= p.sum(-1, keepdims=True)
made = {{"output": (p @ v).transpose(0, 2, 1, 3).astype(np.float32)}}
if "d_output" in given:
    assert json.loads(about["wrt"]) == ["q", "k", "v"]
    d_v = p.swapaxes(-1, -2) @ given["d_output"].transpose(0, 2, 1, 3)
    made["d_v"] = d_v.reshape(2, 2, 3, 7, 8).sum(2).transpose(0, 2, 1, 3).astype(np.float32)
save_file({{n: np.ascontiguousarray(x) for n, x in made.items()}}, sys.argv[2])
"""


def test_a_program_by_files(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.format(here=str(tmp_path)))
    target = f"command:{sys.executable} {tmp_path / 'program.py'} {{inputs}} {{outputs}}"
    call = make_call(grad=True, causal=True, scale=0.3)
    rename = {"causal": "is_causal", "scale": "sm_scale"}
    with open_candidate(target, SDPA, layout="blhd", rename=rename) as candidate:
        assert candidate.where == "child process"
        assert candidate.independent is None
        fine, failed, refused = candidate.run([call, make_call(softcap=13), make_call(window=(2, 0), name="2")])
    assert_agrees(candidate, call, fine, gradients=("v",))
    assert fine.cotangents == ("output",)
    assert (failed.status, failed.message) == ("error", "the program ended with status 5")
    assert (refused.status, refused.message) == ("unsupported", "no window")


@pytest.mark.parametrize("target", ["command:true", "command:/nowhere/program {inputs} {outputs}"])
def test_programs_that_cannot_be_started(target):
    with pytest.raises(UsageError):
        open_candidate(target, SDPA)


def record(path, call, outcome, layout, metadata=None, prefix=("", "")):
    turn = {"bhld": (0, 1, 2, 3), "blhd": (0, 2, 1, 3)}[layout]
    tensors = {prefix[0] + n: x.transpose(turn) for n, x in call.arrays.items()}
    tensors.update({prefix[0] + n: x for n, x in call.options.items() if isinstance(x, np.ndarray)})
    tensors.update({prefix[1] + n: x.transpose(turn) if x.ndim == 4 else x for n, x in outcome.fields.items()})
    tensors.update({f"d_{n}": x.transpose(turn) if x.ndim == 4 else x for n, x in call.cotangents.items()})
    tensors.update({f"d_{n}": x.transpose(turn) for n, x in outcome.gradients.items()})
    files.write_tensors(path, tensors, metadata or {})


def test_recorded_call(tmp_path):
    mask = np.random.default_rng(1).random((2, 1, 5, 7)) > 0.3
    call = make_call(grad=True, mask=mask, causal=True, scale=0.3)
    _, outcome = run_one(attention, call, backward=attention_backward)
    for layout, prefix in (("bhld", ("", "")), ("blhd", ("inputs.", "outputs."))):
        path = tmp_path / f"{layout}.safetensors"
        record(path, call, outcome, layout, {"options": '{"is_causal": true, "scale": 0.3}'}, prefix)
        with open_candidate(str(path), SDPA, layout=layout, rename={"causal": "is_causal"}) as candidate:
            assert candidate.where == "recorded call"
            (recorded,) = candidate.recorded
            assert recorded.options["causal"] is True
            (again,) = candidate.run(candidate.recorded)
            assert_agrees(candidate, recorded, again, results=("output", "lse"), gradients=("q", "k", "v"))
            assert candidate.run([dataclasses.replace(call, id="other")])[0].status == "unsupported"


def test_recorded_calls_that_hold_too_little(tmp_path):
    path = tmp_path / "dump.safetensors"
    with pytest.raises(UsageError, match="no file"):
        open_candidate(str(path), SDPA)
    path.write_bytes(b"rubbish")
    with pytest.raises(UsageError, match="not a safetensors file"):
        open_candidate(str(path), SDPA)
    files.write_tensors(path, {"q": np.zeros((1, 1, 2, 2))})
    with pytest.raises(UsageError, match="output"):
        open_candidate(str(path), SDPA)
    files.write_tensors(path, {n: np.zeros((1, 1, 2, 2)) for n in ("q", "k", "v", "output")}, {"options": '{"cap": 1}'})
    with pytest.raises(UsageError, match="cap"):
        open_candidate(str(path), SDPA)


def test_misuse():
    with pytest.raises(UsageError, match="framework"):
        open_candidate(attention, SDPA, framework="tensorflow")
    with pytest.raises(UsageError, match="target string as well"):
        open_candidate("module:function", SDPA, backward=attention_backward)
    with pytest.raises(UsageError, match="not callable"):
        open_candidate(3, SDPA)
    if not any(map(sys.modules.get, ("cupy",))):
        with pytest.raises(UsageError, match="cupy is not installed"):
            open_candidate(attention, SDPA, framework="cupy")


# ---------------------------------------------------------------------- known signatures, by functions that have them


def test_flash_attn_signature():
    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        assert return_attn_probs
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        away = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
        visible = away <= 0 if causal else np.ones_like(away, bool)
        left, right = window_size
        visible &= (away >= -left if left >= 0 else True) & (away <= right if right >= 0 else True)
        bias = 0.0 if alibi_slopes is None else -alibi_slopes.astype(np.float64)[:, None, None] * abs(away)
        assert alibi_slopes is None or alibi_slopes.dtype == np.float32
        output, lse = dense(q, k, v, visible=visible, bias=bias, scale=softmax_scale, softcap=softcap)
        return output.transpose(0, 2, 1, 3), lse, None

    slopes = ra.positions.alibi_slopes(6) if hasattr(ra, "positions") else 2.0 ** -np.arange(1.0, 7.0)
    calls = [
        make_call(),
        make_call(causal=True, scale=0.2),
        make_call(q=9, causal=True),
        make_call(window=(2, None), softcap=1.5),
        make_call(window=(2, 0), causal=True, alibi_slopes=slopes),
        make_call(alibi_slopes=slopes, dtype="float64"),
    ]
    with open_candidate(flash_attn_func, SDPA) as candidate:
        assert candidate.describe()["preset"] == "flash-attn"
        assert (candidate.layout, candidate.framework) == ("blhd", "numpy")
        assert any("flash_attn_func" in note for note in candidate.notes)
        for call, outcome in zip(calls, candidate.run(calls), strict=True):
            assert_agrees(candidate, call, outcome, results=("output", "lse"))
        assert not candidate.accepts(["sinks"])[0], "this version has no learnable_sink"
        assert not candidate.accepts(["mask"])[0]
        (outcome,) = candidate.run([make_call(e=4)])
        assert outcome.status == "unsupported"


def test_a_backward_of_a_known_signature_is_called_by_its_names():
    def forward(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), return_lse=False):
        assert return_lse
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        output, lse = attention(q, k, v, causal=causal, scale=softmax_scale)
        return output.transpose(0, 2, 1, 3), lse

    def backward(d_output, q, k, v, softmax_scale=None, causal=False):
        turned = (x.transpose(0, 2, 1, 3) for x in (d_output, q, k, v))
        return tuple(g.transpose(0, 2, 1, 3) for g in attention_backward(*turned, causal=causal, scale=softmax_scale))

    call = make_call(grad=True, causal=True, scale=0.3)
    candidate, outcome = run_one(forward, call, backward=backward)
    assert candidate.describe()["preset"] == "flash-attn"
    assert_agrees(candidate, call, outcome, results=("output", "lse"), gradients=("q", "k", "v"))
    assert outcome.cotangents == ("output",)


def test_flashinfer_signature():
    def single_prefill(
        q, k, v, custom_mask=None, causal=False, kv_layout="NHD", sm_scale=None, window_left=-1,
        logits_soft_cap=None, return_lse=False,
    ):  # fmt: skip
        assert q.ndim == 3
        q, k, v = (x.transpose(1, 0, 2)[None] for x in (q, k, v))
        away = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
        visible = away <= 0 if causal else np.ones_like(away, bool)
        if custom_mask is not None:
            assert custom_mask.shape == visible.shape
            visible = custom_mask
        if window_left >= 0:
            visible = visible & (away >= -window_left)
        output, lse = dense(q, k, v, visible=visible, scale=sm_scale, softcap=logits_soft_cap)
        return output[0].transpose(1, 0, 2), lse[0].T / math.log(2)

    mask = np.random.default_rng(1).random((2, 1, 5, 7)) > 0.4
    calls = [make_call(causal=True), make_call(mask=mask, softcap=2.0, e=4), make_call(window=(2, None), scale=0.2)]
    with open_candidate(single_prefill, SDPA) as candidate:
        assert candidate.describe()["preset"] == "flashinfer"
        for call, outcome in zip(calls, candidate.run(calls), strict=True):
            assert_agrees(candidate, call, outcome, results=("output", "lse"))
        refusals = [
            make_call(causal=True, mask=mask),
            make_call(window=(2, 1)),
            make_call(mask=np.ones((6, 5, 7), bool)),
        ]
        assert [o.status for o in candidate.run(refusals)] == ["unsupported"] * 3


def test_onnx_operator_signature():
    def attention_operator(
        Q, K, V, attn_mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None, *, scale=None,
        is_causal=0, softcap=0.0, qk_matmul_output_mode=0,
    ):  # fmt: skip
        visible = np.ones((Q.shape[2], K.shape[2]), bool)
        if is_causal:
            visible = np.tril(visible)
        if nonpad_kv_seqlen is not None:
            visible = visible & (np.arange(K.shape[2]) < nonpad_kv_seqlen[:, None, None, None])
        bias = 0.0
        if attn_mask is not None and attn_mask.dtype == bool:
            visible = visible & attn_mask
        elif attn_mask is not None:
            bias = attn_mask
        return dense(Q, K, V, visible=visible, bias=bias, scale=scale, softcap=softcap)[0], None, None

    rng = np.random.default_rng(1)
    mask, bias = rng.random((2, 1, 5, 7)) > 0.4, rng.standard_normal((6, 5, 7))
    calls = [
        make_call(causal=True, mask=mask),
        make_call(bias=bias, mask=mask, softcap=2.0, e=4),
        make_call(key_lengths=np.array([3, 7]), scale=0.2),
    ]
    with open_candidate(attention_operator, SDPA) as candidate:
        assert candidate.describe()["preset"] == "onnx"
        for call, outcome in zip(calls, candidate.run(calls), strict=True):
            assert_agrees(candidate, call, outcome)
        (outcome,) = candidate.run([make_call(causal=True, key_lengths=np.array([3, 7]))])
        assert outcome.status == "unsupported"


ONNXRUNTIME = """
import numpy as np

class Input:
    def __init__(self, name, type, shape):
        self.name, self.type, self.shape = name, type, shape

def get_available_providers():
    return ["CPUExecutionProvider"]

class InferenceSession:
    def __init__(self, path, providers):
        with open(path) as file:
            self.kind = file.read()
        if self.kind == "rubbish":
            raise RuntimeError("no protobuf")

    def get_inputs(self):
        letters = ["b", "h", "q", "d"]
        names = [Input(n, "tensor(float)", letters) for n in ("value", "key", "query")]
        return [Input("attn_mask", f"tensor({self.kind})", letters), *names]

    def get_outputs(self):
        return [Input("Y", "tensor(float)", None)]

    def run(self, outputs, feed):
        q, k, v, mask = (feed[n] for n in ("query", "key", "value", "attn_mask"))
        assert all(type(x) is np.ndarray and x.flags.c_contiguous for x in feed.values())
        assert mask.ndim == 4 and mask.shape[-2:] == (q.shape[2], k.shape[2])
        logits = q @ np.repeat(k, 3, 1).swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        logits = np.where(mask, logits, -np.inf) if mask.dtype == bool else logits + mask
        logits = np.where(np.tril(np.ones(logits.shape[-2:], bool)), logits, -np.inf)
        p = np.exp(logits - logits.max(-1, keepdims=True))
        return [p / p.sum(-1, keepdims=True) @ np.repeat(v, 3, 1)]
"""


def test_a_model_is_fed_by_the_names_of_its_inputs(tmp_path, monkeypatch):
    # A stand-in for onnxruntime: what is under test is how a model's inputs are matched, filled and refused.
    (tmp_path / "onnxruntime.py").write_text(ONNXRUNTIME)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "masked.onnx").write_text("bool")
    (tmp_path / "biased.onnx").write_text("float")
    (tmp_path / "broken.onnx").write_text("rubbish")
    rng = np.random.default_rng(1)
    mask, bias = rng.random((2, 1, 1, 7)) > 0.3, rng.standard_normal((6, 5, 7))
    mask[..., 0] = True
    fixed = {"causal": True}
    for name, calls, other in (
        ("masked", [make_call(causal=True), make_call(causal=True, mask=mask)], "bias"),
        ("biased", [make_call(causal=True), make_call(causal=True, bias=bias)], "mask"),
    ):
        target = str(tmp_path / f"{name}.onnx")
        with open_candidate(target, SDPA, conventions="onnx", options=fixed) as candidate:
            assert candidate.independent is None
            for call, outcome in zip(calls, candidate.run(calls), strict=True):
                assert_agrees(candidate, call, outcome)
            assert candidate.accepts(["causal"])[0], "built into the model"
            assert not candidate.accepts([other])[0]
            (outcome,) = candidate.run([make_call(dtype="float64")])
            assert (outcome.status, "tensor(float)" in outcome.message) == ("unsupported", True)
    for name, says in (("broken", "no protobuf"), ("missing", "no file")):
        with pytest.raises(UsageError, match=says):
            open_candidate(str(tmp_path / f"{name}.onnx"), SDPA)


# ---------------------------------------------------------------------- torch and JAX


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="torch is not installed (extra peers)")


def test_torch_s_own_function(torch):
    rng = np.random.default_rng(1)
    mask, bias = rng.random((2, 1, 5, 7)) > 0.3, rng.standard_normal((6, 5, 7))
    mask[0, 0, 2] = False
    every = ("q", "k", "v")
    calls = [
        (make_call(grad=True, e=4), every, "float32"),
        (make_call(grad=True, dtype="bfloat16"), every, "bfloat16"),
        (make_call(grad=True, dtype="float64", causal=True, scale=0.3), every, "float64"),
        (make_call(grad=True, dtype="float64", q=9, causal=True), every, "float64"),
        (make_call(grad=True, dtype="float64", mask=mask), every, "float64"),
        (make_call(grad=True, dtype="float64", mask=mask[0, 0, 1]), every, "float64"),
        (make_call(grad=True, dtype="float64", bias=bias, wrt=(*every, "bias")), (*every, "bias"), "float64"),
        (make_call(grad=True, dtype="float64", bias=bias, mask=mask, wrt=("bias",)), ("bias",), "float64"),
    ]
    with open_candidate(torch.nn.functional.scaled_dot_product_attention, SDPA, framework="numpy") as candidate:
        assert any("takes torch arrays, not numpy" in note for note in candidate.notes)
        assert candidate.describe()["preset"] == "torch"
        assert (candidate.framework, candidate.layout) == ("torch", "bhld")
        assert candidate.independent is True
        for (call, gradients, dtype), outcome in zip(calls, candidate.run([c for c, _, _ in calls]), strict=True):
            assert_agrees(candidate, call, outcome, dtype, gradients=gradients)
            assert outcome.cotangents == ("output",)
        assert not candidate.accepts(["softcap"])[0]
        (outcome,) = candidate.run([make_call(causal=True, mask=mask)])
        assert outcome.status == "unsupported"


def test_torch_functions_by_our_names(torch):
    seen = {}

    def with_lse(q, k, v, *, causal=False, mask=None):
        seen.update(strides=[x.stride() for x in (q, k, v)], dtype=q.dtype)
        r = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(r, 1) for x in (k, v))
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            logits = logits.masked_fill(
                ~torch.ones(logits.shape[-2:], dtype=bool).tril(logits.shape[-1] - logits.shape[-2]), -math.inf
            )
        return torch.softmax(logits, -1) @ v, torch.logsumexp(logits, -1)

    call = make_call(grad=True, causal=True)
    call.arrays["q"] = np.broadcast_to(call.arrays["q"][:, :1], (2, 6, 5, 8))
    call.arrays["k"] = np.ascontiguousarray(call.arrays["k"].transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    wanted = [tuple(s // 4 for s in x.strides) for x in call.arrays.values()]
    candidate, outcome = run_one(with_lse, call, framework="torch")
    assert_agrees(candidate, call, outcome, results=("output", "lse"), gradients=("q", "k", "v"))
    assert outcome.cotangents == ("output", "lse")
    assert seen == {"strides": wanted, "dtype": torch.float32}, "nothing was made contiguous"

    def in_place(q, k, v):
        k.mul_(2)
        return q * 1

    assert run_one(in_place, make_call(), framework="torch")[1].mutated == ("k",)

    _, outcome = run_one(lambda q, k, v: q.detach() * 2, make_call(grad=True), framework="torch")
    assert (outcome.status, outcome.gradients) == ("ok", {})
    assert "grad_fn" in outcome.message
    call = make_call(grad=True)
    candidate, outcome = run_one(
        lambda q, k, v: (q.sum(-1, keepdim=True) * v[:, :1, :1] * 1, q.detach().sum(-1)), call, framework="torch"
    )
    assert set(outcome.gradients) == {"q", "v"}, "k takes no part: not provided"
    assert outcome.cotangents == ("output",), "the lse has no grad_fn"


def test_eager_attention_of_transformers(torch):
    def eager_attention_forward(
        module, query, key, value, attention_mask, scaling, dropout=0.0, softcap=None, **kwargs
    ):
        key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        weights = query @ key.mT * scaling
        if softcap is not None:
            weights = softcap * torch.tanh(weights / softcap)
        if attention_mask is not None:
            weights = weights + attention_mask
        weights = torch.softmax(weights, -1)
        assert not module.training
        return (weights @ value).transpose(1, 2).contiguous(), weights

    rng = np.random.default_rng(1)
    mask, bias = rng.random((2, 1, 5, 7)) > 0.3, rng.standard_normal((6, 5, 7))
    every = ("q", "k", "v")
    calls = [
        (make_call(grad=True), every),
        (make_call(grad=True, softcap=1.5, mask=mask), every),
        (make_call(grad=True, bias=bias, scale=0.2, wrt=(*every, "bias")), (*every, "bias")),
    ]
    mask = mask.copy()
    mask[1, 0, 3] = False
    with open_candidate(eager_attention_forward, SDPA, framework="torch") as candidate:
        assert candidate.describe()["preset"] == "hf"
        for (call, gradients), outcome in zip(calls, candidate.run([c for c, _ in calls]), strict=True):
            assert_agrees(candidate, call, outcome, gradients=gradients)
        call = make_call(mask=mask)
        assert_agrees(candidate, call, candidate.run([call])[0])  # the mean of v in the empty row


def test_a_signature_decides_the_framework_by_what_its_module_imports(tmp_path):
    path = tmp_path / "kernels_in_numpy.py"
    path.write_text(
        "def f(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None): return query * 1\n"
    )
    with open_candidate(f"{path}:f", SDPA) as candidate:
        assert (candidate.describe()["preset"], candidate.framework) == ("torch", "numpy")
    with open_candidate(f"{path}:f", SDPA, rename={"causal": "is_causal"}) as candidate:
        assert candidate.describe()["preset"] is None, "a rename says that the user knows better"
        assert candidate.accepts(["causal"])[0]
        assert not candidate.accepts(["mask"])[0]
    with open_candidate(f"{path}:f", SDPA, conventions={"align": "lower_right"}) as candidate:
        assert candidate.conventions == dataclasses.replace(PRESETS["torch"].conventions, align="lower_right")


def test_a_preset_for_a_signature_of_our_own_is_conventions_alone():
    with open_candidate(attention, SDPA, conventions="jax") as candidate:
        assert candidate.describe()["preset"] is None
        assert (candidate.layout, candidate.framework) == ("bhld", "numpy")
        assert candidate.conventions == PRESETS["jax"].conventions


def test_jax_s_own_function():
    jax = pytest.importorskip("jax", reason="jax is not installed (extra peers)")
    mask = np.random.default_rng(1).random((2, 1, 5, 7)) > 0.3
    mask[0, 0, 2] = False
    every = ("q", "k", "v")
    lengths = {"query_lengths": np.array([4, 5]), "key_lengths": np.array([7, 4])}
    calls = [
        make_call(grad=True, mask=mask, causal=True, window=(3, None), scale=0.3, **lengths),
        make_call(dtype="float64"),
    ]
    with open_candidate(jax.nn.dot_product_attention, SDPA) as candidate:
        assert candidate.describe()["preset"] == "jax"
        assert (candidate.framework, candidate.layout) == ("jax", "blhd")
        outcomes = candidate.run(calls)
        assert_agrees(candidate, calls[0], outcomes[0], results=("output", "lse"), gradients=every)
        assert outcomes[0].cotangents == ("output",), "JAX stops the gradient of its lse"
        assert_agrees(candidate, calls[1], outcomes[1], results=("output", "lse"))  # arithmetic in float32
        assert outcomes[1].fields["output"].dtype == np.float64, "64-bit arrays stay 64-bit during such a call"
        assert candidate.run([make_call(e=4)])[0].status == "unsupported"

    def raw(q, k, v):
        return jax.numpy.einsum("bhqd,bhkd->bhqk", q, q) @ q, q.sum(-1)

    call = make_call(grad=True, dtype="bfloat16")
    _, outcome = run_one(raw, call, framework="jax")
    assert outcome.cotangents == ("output", "lse")
    assert outcome.gradients["q"].dtype == ml_dtypes.bfloat16
    assert not outcome.gradients["k"].astype(np.float32).any()
