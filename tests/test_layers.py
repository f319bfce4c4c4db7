"""Layers around attention: values against plain formulas, gradients, stored modules, bad input."""

import array_api_strict
import mpmath
import numpy as np
import pytest
from support import assert_adjoint, assert_close, assert_gradients, cases

from refattn import layers
from refattn.attention.compressive import compressive_attention
from refattn.positions import sinusoid

EPS = np.finfo(np.float64).eps
M, F = 4, 5


def normal(*shape, seed=0):
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape)


BASICS = {
    "linear": (layers.linear, {"x": normal(2, 3, M), "weight": normal(M, F), "bias": normal(F)}),
    "linear_no_bias": (layers.linear, {"x": normal(M), "weight": normal(M, F)}),
    "layer_norm": (layers.layer_norm, {"x": normal(2, 3, M), "weight": normal(M), "bias": normal(M)}),
    "layer_norm_plain": (layers.layer_norm, {"x": normal(3, M), "eps": 0.1}),
    **{
        f"feed_forward_{activation}_{chunk}": (
            layers.feed_forward,
            {
                "x": normal(2, 7, M), "w_1": normal(M, F), "b_1": normal(F), "w_2": normal(F, 3), "b_2": normal(3),
                "activation": activation, "chunk": chunk,
            },
        )
        for activation in ("relu", "gelu")
        for chunk in (None, 1, 3, 9)
    },
    **{
        f"rms_norm_{activation}_{groups}_{gate_first}": (
            layers.rms_norm,
            {
                "x": normal(2, 3, 6), "weight": normal(6), "gate": normal(2, 3, 6, seed=1), "gate_first": gate_first,
                "activation": activation, "groups": groups, "offset": 1.0, "eps": 0.01,
            },
        )
        for activation in ("silu", "sigmoid")
        for groups in (1, 3)
        for gate_first in (False, True)
    },
    "rms_norm_plain": (layers.rms_norm, {"x": normal(6)}),
    "output_gate": (layers.output_gate, {"x": normal(2, 2, 3, 4), "gate": normal(2, 3, 1)}),
    "output_gate_silu": (layers.output_gate, {"x": normal(3, 4), "gate": normal(3, 4, seed=1), "activation": "silu"}),
    "feed_forward_no_biases": (
        layers.feed_forward,
        {"x": normal(7, M), "w_1": normal(M, F), "b_1": None, "w_2": normal(F, 3), "b_2": None},
    ),
}  # fmt: skip


def plain(name, a):
    """The formulas, once more."""
    if name.startswith("linear"):
        return a["x"] @ a["weight"] + a.get("bias", 0)
    if name.startswith("layer_norm"):
        x = a["x"]
        gap = x - x.mean(-1, keepdims=True)
        return gap / np.sqrt(x.var(-1, keepdims=True) + a.get("eps", 1e-5)) * a.get("weight", 1) + a.get("bias", 0)
    if "w_1" not in a:
        gate = a.get("gate", np.array(np.inf))
        act = 1 / (1 + np.exp(-gate)) if name.startswith("output_gate") or "gate" in a else 1.0
        if a.get("activation") == "silu":
            act = gate * act
        if name.startswith("output_gate"):
            return a["x"] * act
        y = a["x"] * act if a.get("gate_first") else a["x"]
        parts = y.reshape(*y.shape[:-1], a.get("groups", 1), -1)
        rms = np.sqrt((parts**2).mean(-1, keepdims=True) + a.get("eps", 1e-6))
        weighted = (parts / rms).reshape(y.shape) * (a.get("weight", 1) + a.get("offset", 0))
        return weighted if a.get("gate_first") else weighted * act
    hidden = a["x"] @ a["w_1"] + (0 if a["b_1"] is None else a["b_1"])
    if a.get("activation", "relu") == "relu":
        hidden = np.maximum(hidden, 0)
    else:
        hidden = np.vectorize(lambda t: float(t * mpmath.ncdf(t)))(hidden)
    return hidden @ a["w_2"] + (0 if a["b_2"] is None else a["b_2"])


@pytest.mark.parametrize("name", BASICS)
def test_values(name):
    function, arguments = BASICS[name]
    assert_close(function(**arguments), plain(name, arguments), 100 * EPS)


@pytest.mark.parametrize("name", BASICS)
def test_gradients(name):
    function, arguments = BASICS[name]
    rng = np.random.default_rng(0)
    assert_gradients(function, arguments, rng)
    assert_adjoint(function, arguments, rng)


@pytest.mark.parametrize("name", BASICS)
def test_strict_namespace(name):
    function, arguments = BASICS[name]
    strict = {n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    result, pullback = function.vjp(**strict)
    want, want_back = function.vjp(**arguments)
    assert_close(result.output, want.output, 50 * EPS)
    for n, g in want_back(want.output).items():
        assert_close(pullback(result.output)[n], g, 200 * EPS)


def test_half_precision_is_computed_in_float32():
    function, arguments = BASICS["feed_forward_gelu_3"]
    half = {n: x.astype(np.float16) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    wide = {n: x.astype(np.float64) if isinstance(x, np.ndarray) else x for n, x in half.items()}
    assert function(**half).dtype == np.float16
    assert_close(function(**half), function(**wide), 2.0**-11 + 50 * 2.0**-24)


class Doubled:
    """x -> 2 x p with a parameter p."""

    p = 1.5

    def forward(self, x):
        return layers.linear.forward(x, self.p * 2 * np.eye(x.shape[-1]))

    def vjp(self, x):
        result, pull = layers.linear.vjp(x, self.p * 2 * np.eye(x.shape[-1]))
        return result, lambda d: {"x": pull(d)["x"], "p": np.sum(d * 2 * x)}


def test_residual():
    x, d = normal(3, M), normal(3, M, seed=1)
    assert_close(layers.residual(x, Doubled()), 4 * x, 10 * EPS)
    result, pullback = layers.residual.vjp(x, Doubled())
    assert_close(result.output, 4 * x, 10 * EPS)
    gradients = pullback(d)
    assert_close(gradients["x"], 4 * d, 10 * EPS)
    assert_close(gradients["f.p"], np.sum(d * 2 * x), 50 * EPS)

    class Narrow:
        def forward(self, x):
            return layers.linear.forward(x, np.ones((M, 1)))

    with pytest.raises(ValueError, match=r"f\(x\) has shape \(3, 1\)"):
        layers.residual(x, Narrow())


# ---------------------------------------------------------------------- recurrent layers

H, D, E = 2, 3, 2


def recurrent(seed=0, *, q=3, k=2, n=None, **options):
    r = np.random.default_rng(seed)
    shapes = {
        "x": (2, q, M), "w_q": (M, H, D), "w_k": (M, H, D), "w_v": (M, H, E), "w_o": (H, E, M), "w_r": (M, H, D),
        "u": (H, D), "w": (H, D), "norm_weight": (M,), "norm_bias": (M,),
    }  # fmt: skip
    if k:
        shapes["memory"] = (2, k, M)
    if n is not None:
        shapes["compressed"] = (2, n, M)
    return {**{name: r.standard_normal(s) for name, s in shapes.items()}, **options}


RECURRENT = {
    "post": recurrent(),
    "pre": recurrent(norm="pre"),
    "no_memory": recurrent(k=0),
    "clamp": recurrent(clamp_length=2),
    "same_length": recurrent(same_length=True, norm="pre"),
    "compressed": recurrent(n=2),
    "compressed_pre": recurrent(n=2, norm="pre"),
    "spans": recurrent(n=2, compressed_positions="span_mid", rate=2, clamp_length=4),
    "bare": {n: a for n, a in recurrent().items() if n not in ("u", "w", "norm_weight", "norm_bias")},
}


def function_of(arguments):
    return layers.compressive_layer if "compressed" in arguments else layers.transformer_xl_layer


def by_parts(a):
    """The layer put together from the mechanism and the layer norm."""
    rows = {n: a[n] for n in ("compressed", "memory", "x") if n in a}
    norm = {"weight": a.get("norm_weight"), "bias": a.get("norm_bias")}
    span = a.get("rate", 1)
    count = sum(x.shape[1] * (span if n == "compressed" else 1) for n, x in rows.items())
    distances = np.minimum(np.arange(count)[::-1], a.get("clamp_length", count))
    own = {
        n: a[n] for n in ("w_q", "w_k", "w_v", "w_o", "u", "w", "same_length", "compressed_positions", "rate") if n in a
    }
    r = np.einsum("pm,mhd->hpd", sinusoid(distances, M), a["w_r"])
    if a.get("norm") == "pre":
        return a["x"] + compressive_attention(**{n: layers.layer_norm(x, **norm) for n, x in rows.items()}, r=r, **own)
    return layers.layer_norm(a["x"] + compressive_attention(**rows, r=r, **own), **norm)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_are_their_parts(name):
    a = RECURRENT[name]
    assert_close(function_of(a)(**a), by_parts(a), 200 * EPS)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_gradients(name):
    a, rng = RECURRENT[name], np.random.default_rng(0)
    function = function_of(a)
    through = assert_gradients(function, {**a, "through_memory": True}, rng)
    assert_adjoint(function, {**a, "through_memory": True}, rng)
    constant = [n for n in function.differentiable if n in a and n not in ("memory", "compressed")]
    gradients = assert_gradients(function, a, rng, names=constant)
    for n in ("memory", "compressed"):
        if n in a:
            assert (gradients[n] == 0).all()
            assert (through[n] != 0).any()


@pytest.mark.parametrize("name", ["post", "compressed_pre"])
def test_recurrent_layers_on_the_strict_namespace(name):
    a = RECURRENT[name]
    strict = {n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x for n, x in a.items()}
    result, pullback = function_of(a).vjp(**strict)
    want, want_back = function_of(a).vjp(**a)
    assert_close(result.output, want.output, 100 * EPS)
    for n, g in want_back(want.output).items():
        assert_close(pullback(result.output)[n], g, 500 * EPS)


def test_layer_without_compressed_rows_is_transformer_xl():
    a = RECURRENT["pre"]
    assert_close(layers.compressive_layer(**a, compressed=np.zeros((2, 0, M))), layers.transformer_xl_layer(**a), 0)


def test_kept_weights():
    result = layers.transformer_xl_layer.forward(**RECURRENT["post"], keep_weights=True)
    assert_close(result.weights.sum(-1), np.ones((2, H, 3)), 20 * EPS)


def head_weights(w):
    return np.ascontiguousarray(w.reshape(H, -1, w.shape[-1]).transpose(2, 0, 1))


@pytest.mark.parametrize("case", [c for c in cases("transformer_xl") if c[0].startswith("module")], ids=lambda c: c[0])
def test_stored_module(case):
    _, meta, a = case
    o = meta["options"]

    def batch_first(x):
        return np.ascontiguousarray(np.swapaxes(x, 0, 1))

    def output_weights(w):
        return np.ascontiguousarray(w.T.reshape(H, -1, w.shape[0]))

    def third(n):
        return lambda w: head_weights(np.split(w, 3)[n])

    arguments = {"x": batch_first(a["in_w"]), "memory": batch_first(a["in_mems"]), "through_memory": True}
    wanted = {"x": batch_first(a["grad_w"]), "memory": batch_first(a["grad_mems"])}
    arguments.update(norm="pre" if o["pre_lnorm"] else "post", clamp_length=o["clamp_len"])
    for ours, theirs, layout in (
        ("w_q", "qkv_net.weight", third(0)), ("w_k", "qkv_net.weight", third(1)), ("w_v", "qkv_net.weight", third(2)),
        ("w_o", "o_net.weight", output_weights), ("w_r", "r_net.weight", head_weights), ("u", "r_w_bias", np.asarray),
        ("w", "r_r_bias", np.asarray), ("norm_weight", "layer_norm.weight", np.asarray),
        ("norm_bias", "layer_norm.bias", np.asarray),
    ):  # fmt: skip
        arguments[ours], wanted[ours] = layout(a["w_" + theirs]), layout(a["grad_w_" + theirs])
    result, pullback = layers.transformer_xl_layer.vjp(**arguments)
    assert_close(result.output, batch_first(a["out"]), 1e-10)
    gradients = pullback(batch_first(a["cot_out"]))
    for name, want in wanted.items():
        assert_close(gradients[name], want, 1e-9)


BAD = {
    "linear": (layers.linear, {"x": normal(3, M), "weight": normal(5, M)}, r"weight has shape \(5, 4\)"),
    "linear_bias": (
        layers.linear,
        {"x": normal(3, M), "weight": normal(M, F), "bias": normal(M)},
        r"bias has shape \(4,\)",
    ),
    "norm": (layers.layer_norm, {"x": normal(3, M), "weight": normal(F)}, r"weight has shape \(5,\)"),
    "activation": (
        layers.feed_forward,
        {**BASICS["feed_forward_relu_1"][1], "activation": "tanh"},
        "activation is 'tanh'",
    ),
    "chunk": (layers.feed_forward, {**BASICS["feed_forward_relu_1"][1], "chunk": 0}, "chunk is 0"),
    "w_2": (layers.feed_forward, {**BASICS["feed_forward_relu_1"][1], "w_2": normal(M, M)}, r"w_2 has shape \(4, 4\)"),
    "memory": (layers.transformer_xl_layer, recurrent(memory=normal(2, 2, M + 1)), "memory has shape"),
    "placement": (layers.transformer_xl_layer, recurrent(norm="both"), "norm is 'both'"),
    "w_r": (layers.transformer_xl_layer, recurrent(w_r=normal(M + 2, H, D)), "w_r has shape"),
    "clamp": (layers.transformer_xl_layer, recurrent(clamp_length=-1), "clamp_length is -1"),
    "norm_weight": (layers.transformer_xl_layer, recurrent(norm_weight=normal(F)), "norm_weight has shape"),
    "spans": (layers.compressive_layer, recurrent(n=2, compressed_positions="span_end"), "rate is missing"),
}


def test_only_the_biases_may_be_left_out():
    with pytest.raises(TypeError, match="'w_2' is missing"):
        layers.feed_forward(normal(3, M), normal(M, F))


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    function, arguments, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        function.forward(**arguments)
