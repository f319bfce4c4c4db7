"""The fast forward and its gradients against numbers stored from torch, FlexAttention, JAX, transformers and ONNX.

Tolerances are those of the producer's arithmetic: 1e-10 in float64, 2e-5 in float32, a few last places of the storage dtype in
halves, or the constant that the case names; gradients get ten times as much.
"""

import ml_dtypes
import numpy as np
import pytest
from support import assert_close, cases

import refattn as ra

attention = ra.scaled_dot_product_attention
ACCURACY = {"float64": 1e-10, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def all_of(*peers):
    return [pytest.param(meta, a, id=f"{peer}-{name}") for peer in peers for name, meta, a in cases(peer)]


def tolerance(meta, a):
    stored = meta.get("original_dtypes", {})
    names = {stored.get(n, a[n].dtype.name) for n in a if n.startswith(("in_", "out"))} & set(ACCURACY)
    return max(*(ACCURACY[n] for n in names), meta.get("suggested_atol") or 0)


def check(a, meta, options, gradients=()):
    """Hold output, lse and gradients of a call on in_q, in_k, in_v against the stored ones."""
    accuracy = tolerance(meta, a)
    for array, name in (("in_bias", "bias"), ("in_keep_mask", "mask")):
        if array in a:
            options.setdefault(name, a[array])
    result, pullback = attention.vjp(a["in_q"], a["in_k"], a["in_v"], **options)
    assert result.output.dtype == a["in_q"].dtype
    assert_close(result.output, a["out"], accuracy)
    if "out_lse" in a:
        assert_close(result.lse, a["out_lse"], accuracy)
    if "cot_out" in a:
        found = pullback(a["cot_out"])
        for name in ("q", "k", "v", "bias", *gradients):
            if a.get(f"grad_{name}") is not None and name in found:
                assert_close(found[name], a[f"grad_{name}"], 10 * accuracy)


@pytest.mark.parametrize("meta, a", all_of("torch_sdpa"))
def test_torch(meta, a):
    o = meta["options"]
    causal = {"causal": True, "align": "upper_left"} if o.get("is_causal") else {}
    check(a, meta, {**({"scale": o["scale"]} if "scale" in o else {}), **causal})


@pytest.mark.parametrize("meta, a", all_of("jax_dpa"))
def test_jax(meta, a):
    o = meta["options"]
    options = {"scale": o["scale"]} if "scale" in o else {}
    if o.get("is_causal"):
        options.update(causal=True, align="upper_left")
    window = o.get("local_window_size")
    if window is not None:
        options.update(window=(window, window) if isinstance(window, int) else tuple(window), align="upper_left")
    for ours, theirs in (("query_lengths", "in_query_seq_lengths"), ("key_lengths", "in_key_value_seq_lengths")):
        if theirs in a:
            options[ours] = a[theirs]
    check(a, meta, options)


@pytest.mark.parametrize("meta, a", all_of("hf_gemma2", "hf_gpt_oss"))
def test_transformers(meta, a):
    o = meta["options"]
    options = {"causal": True}
    if "softcap" in o:
        options.update(scale=o["scale"], softcap=o["softcap"])
    if "in_sinks" in a:
        options["sinks"] = a["in_sinks"]
    if o.get("window"):
        options["window"] = (o["window"] - 1, 0)
    check(a, meta, options, gradients=("sinks",))


def onnx_call(meta, a):
    """Arguments of an ONNX Attention node: packed heads opened, past keys joined on, alignment by the past or the real length."""
    attributes = meta["attributes"]
    for name, dtype in meta["original_dtypes"].items():
        if dtype == "bfloat16" and name in a:
            a[name] = a[name].astype(ml_dtypes.bfloat16)

    def heads(x, count):
        return np.swapaxes(x.reshape(*x.shape[:2], count, -1), 1, 2) if x.ndim == 3 else x

    groups = attributes.get("kv_num_heads")
    q, out = (heads(a[n], attributes.get("q_num_heads")) for n in ("in_Q", "out_Y"))
    k, v = heads(a["in_K"], groups), heads(a["in_V"], groups)
    past = a["in_past_key"].shape[2] if "in_past_key" in a else 0
    if past:
        k, v = np.concatenate([a["in_past_key"], k], 2), np.concatenate([a["in_past_value"], v], 2)
    n_q, n_k = q.shape[2], k.shape[2]
    options = {name: attributes[name] for name in ("scale", "softcap") if attributes.get(name)}
    lengths = a.get("in_nonpad_kv_seqlen")
    if lengths is not None:
        options["key_lengths"] = lengths
    if attributes.get("is_causal"):
        options["causal"] = True
    edges = [attributes.get(f"{side}_window_size", -1) for side in ("left", "right")]
    if max(edges) >= 0:
        options["window"] = tuple(None if n < 0 else n for n in edges)
    if "causal" in options or "window" in options:
        options["align"] = past if lengths is None else lengths - n_q
    if "in_attn_mask" in a:
        mask = a["in_attn_mask"]
        if 1 < mask.shape[-1] < n_k:  # a short mask ends in "not visible"
            rest = (*mask.shape[:-1], n_k - mask.shape[-1])
            fill = np.zeros(rest, bool) if mask.dtype == bool else np.full(rest, -np.inf, mask.dtype)
            mask = np.concatenate([mask, fill], -1)
        options.update({"mask": mask} if mask.dtype == bool else {"bias": mask.astype(q.dtype)})
    return {"q": q, "k": k, "v": v, **options}, out


@pytest.mark.parametrize("meta, a", all_of("onnx"))
def test_onnx(meta, a):
    arguments, out = onnx_call(meta, a)
    result = attention.forward(**arguments)
    assert result.output.dtype == arguments["q"].dtype
    assert_close(result.output, out, tolerance(meta, a))
    assert_close(attention.definition(**arguments).output, out, tolerance(meta, a))
    mode = meta["attributes"].get("qk_matmul_output_mode", 0)
    if "out_qk_matmul_output" in a and mode in (0, 1, 3):
        before = {n: x for n, x in arguments.items() if n in ("q", "k", "v", "scale") or (mode == 1 and n == "softcap")}
        kept = attention.forward(**(arguments if mode == 3 else before), keep_weights=True)
        assert_close(kept.weights if mode == 3 else kept.logits, a["out_qk_matmul_output"], tolerance(meta, a))


def test_there_are_cases():
    assert {peer: len(list(cases(peer))) for peer in ("torch_sdpa", "jax_dpa", "onnx")} == {
        "torch_sdpa": 11,
        "jax_dpa": 9,
        "onnx": 41,
    }
