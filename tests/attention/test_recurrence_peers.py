"""Recurrences against stored cases of independent implementations: outputs, states and gradients, in every form, definitions too."""

import numpy as np
import pytest
from support import assert_close, cases

import refattn as ra

LN2 = np.log(2.0)
LINEAR, DELTA = ra.gated_linear_attention, ra.delta_rule_attention
QKV = {n: n for n in ("q", "k", "v")}
SSD = {n: n for n in ("x", "dt", "a", "b", "c", "skip", "dt_bias")}


def plan(peer, name, meta, arrays):
    """The function, our names of its arrays, options; or None where the case is none of a recurrence's core."""
    o = meta.get("options") or {}
    channels = arrays["in_g"].ndim == 4 if "in_g" in arrays else False
    decay = {"channel_decay" if channels else "decay": "g"} if "in_g" in arrays else {}
    scale = {"scale": o["scale"]} if o.get("scale") else {}
    if peer == "hf_minimax":
        slopes = ra.positions.lightning_decay(arrays["in_q"].shape[1], o["layer"], o["layers"])
        return LINEAR, QKV, {"head_decay": slopes, "scale": 1.0}
    if peer == "hf_mamba2" or name == "state_update":
        return ra.ssd_attention, SSD, {"dt_softplus": True, "dt_limit": tuple(o.get("time_step_limit", (0.0, np.inf)))}
    if name.startswith("ssd_minimal"):
        return LINEAR, {"q": "c", "k": "b", "v": "x", "decay": "g"}, {"scale": 1.0}
    if name.startswith("retention"):
        return LINEAR, QKV, {"head_decay": ra.positions.retention_decay(arrays["in_q"].shape[1])}
    if name.startswith(("simple_gla", "gla", "rwkv6")):
        own = next(n for n in ("g", "gk", "w") if f"in_{n}" in arrays)
        names = QKV | {"decay" if name.startswith("simple") else "channel_decay": own}
        before = name.startswith("rwkv6")
        return LINEAR, names | ({"bonus": "u"} if before else {}), scale | ({"read": "before"} if before else {})
    if peer == "onnx_linear_attention":
        function = DELTA if "delta" in o["update_rule"] else LINEAR
        return function, QKV | decay | ({"beta": "beta"} if "in_beta" in arrays else {}), scale
    options = scale | ({"qk_norm": "l2_sum"} if o.get("use_qk_l2norm") else {})
    if "gated_delta_product" in name:
        options |= {"steps": 2, "scale": 0.5}
    return DELTA, QKV | decay | ({"beta": "beta"} if "in_beta" in arrays else {}), options


SPECIAL = ("linear_attn", "kda_gate", "hgrn2", "gdn2", "rms_norm", "attn_sink", "parallel_")
PEERS = (
    "fla",
    "hf_qwen3_next",
    "hf_kimi_linear",
    "hf_mamba2",
    "hf_minimax",
    "mamba_ssm",
    "attn_gym",
    "onnx_linear_attention",
)
KINDS = ("simple_gla", "gla", "rwkv6", "retention", "gated_delta", "kda", "delta_rule", "linear_attn")
CASES = [
    (peer, *case)
    for peer in PEERS
    for case in cases(peer)
    if not case[0].startswith(SPECIAL) and (peer != "fla" or case[0].startswith(KINDS))
]


def agree(function, given, wanted, gradients, cotangents, tolerance):
    for call in (function, function.definition):
        result, pullback = call.vjp(**given)
        for field, x in wanted.items():
            assert_close(getattr(result, field), x, tolerance)
        if gradients:
            found = pullback(**cotangents)
            for n, x in gradients.items():
                assert_close(found[n], x, 10 * tolerance)


def tolerance_of(meta, arrays):
    narrow = any(x.dtype == np.float32 for n, x in arrays.items() if n.startswith(("in_", "out")))
    return max(2e-5 if narrow else 1e-10, (meta.get("suggested_atol") or 0) if not narrow else 0)


@pytest.mark.parametrize("form", ["chunked", "recurrent", "parallel"])
@pytest.mark.parametrize("peer, name, meta, arrays", CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_peers(peer, name, meta, arrays, form):
    base = LN2 if "log2" in name else 1.0
    arrays = {n: base * x if n == "in_g" else x / base if n == "grad_g" else x for n, x in arrays.items()}
    function, names, options = plan(peer, name, meta, arrays)
    given = {n: arrays[f"in_{theirs}"] for n, theirs in names.items()} | options | {"form": form, "chunk": 4}
    wanted = {"output": arrays["out"]}
    if "out_state" in arrays:
        wanted["state"] = arrays["out_state"]
    if "in_h0" in arrays:
        given["state"] = arrays["in_h0"]
        names = {**names, "state": "h0"}
    cotangents = {f: arrays[n] for f, n in (("output", "cot_out"), ("state", "cot_out_state")) if n in arrays}
    gradients = {n: arrays[f"grad_{c}"] for n, c in names.items() if f"grad_{c}" in arrays}
    agree(function, given, wanted, gradients, cotangents, tolerance_of(meta, arrays))


def only(peer, name):
    return next((meta, arrays) for n, meta, arrays in cases(peer) if n == name)


def test_hgrn2():
    """k = 1 - exp(g), whose gradient goes on to g."""
    meta, a = only("fla", "hgrn2")
    e = np.exp(a["in_g"])
    options = ({"state": a["in_h0"]} if "in_h0" in a else {}) | (
        {"scale": meta["options"]["scale"]} if meta["options"] else {}
    )
    result, pullback = LINEAR.vjp(a["in_q"], 1 - e, a["in_v"], channel_decay=a["in_g"], **options)
    assert_close(result.output, a["out"], 1e-10)
    g = pullback(**{f: a[n] for f, n in (("output", "cot_out"), ("state", "cot_out_state")) if n in a})
    assert_close(g["channel_decay"] - e * g["k"], a["grad_g"], 1e-9)


def test_gated_deltanet_2():
    """It erases b k and writes w v."""
    _, a = only("fla", "gdn2_chunk_ragged")
    given = {"erase_key": a["in_b"] * a["in_k"], "channel_decay": a["in_g"]} | (
        {"state": a["in_h0"]} if "in_h0" in a else {}
    )
    result, pullback = DELTA.vjp(a["in_q"], a["in_k"], a["in_w"] * a["in_v"], **given)
    assert_close(result.output, a["out"], 1e-9)
    g = pullback(**{f: a[n] for f, n in (("output", "cot_out"), ("state", "cot_out_state")) if n in a})
    assert_close(g["k"] + a["in_b"] * g["erase_key"], a["grad_k"], 1e-8)
    assert_close(a["in_k"] * g["erase_key"], a["grad_b"], 1e-8)
    assert_close(a["in_v"] * g["v"], a["grad_w"], 1e-8)


def test_rwkv7_with_the_raw_w():
    _, a = only("rwkv_lm", "rwkv7")
    gamma, gate_back = ra.gates.log_decay.vjp(a["in_w"], form="exp")
    given = {"remove": a["in_a"], "replace": a["in_b"], "channel_decay": gamma.output}
    result, pullback = ra.rwkv7_attention.vjp(a["in_r"], a["in_k"], a["in_v"], **given)
    tolerance = 1e-10 if a["out"].dtype == np.float64 else 2e-5
    assert_close(result.output, a["out"], tolerance)
    g = pullback(output=a["cot_out"])
    assert_close(gate_back(g["channel_decay"])["z"], a["grad_w"], 10 * tolerance)
    for ours, theirs in {"q": "r", "k": "k", "v": "v", "remove": "a", "replace": "b"}.items():
        assert_close(g[ours], a[f"grad_{theirs}"], 10 * tolerance)


def test_the_gate_of_kimi_delta_attention():
    _, a = only("fla", "kda_gate_softplus")
    per_head = a["in_a_log"][:, None] if a["in_a_log"].ndim == 1 else a["in_a_log"]
    result, pullback = ra.gates.log_decay.vjp(a["in_z"], a_log=per_head, bias=a["in_bias"])
    assert_close(result.output, a["out"], 1e-10)
    g = pullback(a["cot_out"])
    assert_close(g["z"], a["grad_z"], 1e-9)
    assert_close(g["a_log"].reshape(a["grad_a_log"].shape), a["grad_a_log"], 1e-9)
    assert_close(g["bias"], a["grad_bias"], 1e-9)


@pytest.mark.parametrize(
    "name, meta, arrays", list(cases("causal_conv1d")), ids=lambda x: x if isinstance(x, str) else ""
)
def test_short_convolutions(name, meta, arrays):
    turned = {n: np.swapaxes(x, 1, 2) if x.ndim == 3 else x for n, x in arrays.items()}
    given = {"x": turned["in_x"], "weight": turned["w_weight"], "bias": turned["w_bias"]}
    given["activation"] = meta["options"]["activation"]
    names = {"x": "x", "weight": "w_weight", "bias": "w_bias"}
    if "in_state" in turned:
        given["state"], names["state"] = turned["in_state"], "state"
    wanted = {"output": turned["out"], "state": turned["out_state"]}
    gradients = {n: turned[f"grad_{c}"] for n, c in names.items()}
    cotangents = {"output": turned["cot_out"], "state": turned["cot_out_state"]}
    agree(ra.layers.causal_convolution, given, wanted, gradients, cotangents, tolerance_of(meta, arrays))
