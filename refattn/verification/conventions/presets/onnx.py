"""the Attention operator of ONNX, opset 23 and later, without a cache."""

from collections.abc import Mapping
from typing import Any

from refattn.verification.conventions.presets.preset import Preset, attention_mask
from refattn.verification.conventions.record import Conventions
from refattn.verification.errors import Unsupported

__all__ = ["PRESET"]


_ONNX_NAMES = {
    "mask": "attn_mask",
    "bias": "attn_mask",
    "causal": "is_causal",
    "scale": "scale",
    "softcap": "softcap",
    "key_lengths": "nonpad_kv_seqlen",
}


def _onnx_call(options: dict[str, Any], arrays: dict[str, Any], has: Mapping[str, Any]) -> dict[str, Any]:
    if options.get("causal") and "key_lengths" in options:
        raise Unsupported("with nonpad_kv_seqlen, the operator aligns causal at the lower right")
    call = {_ONNX_NAMES[n]: x for n, x in options.items() if n not in ("mask", "bias")}
    attn_mask = attention_mask(options, arrays, ndim=2)
    if attn_mask is not None:
        call["attn_mask"] = attn_mask
    if "causal" in options:
        call["is_causal"] = int(options["causal"])
    return call


PRESET = Preset(
    name="onnx",
    says="the Attention operator of ONNX, opset 23 and later, without a cache",
    conventions=Conventions(
        align="upper_left",
        head_map="repeat",
        softcap_after_bias=False,
        empty_rows="zero",
        masked_nan="may_leak",
        preset="onnx",
    ),
    framework="numpy",
    layout="bhld",
    parameters=(
        *("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen", "scale", "is_causal"),
        *("q_num_heads", "kv_num_heads", "softmax_precision", "softcap", "qk_matmul_output_mode"),
    ),
    signs=(frozenset({"is_causal", "nonpad_kv_seqlen"}), frozenset({"is_causal", "qk_matmul_output_mode"})),
    names=_ONNX_NAMES,
    translate=_onnx_call,
    results=("output", None, None, None),
)
