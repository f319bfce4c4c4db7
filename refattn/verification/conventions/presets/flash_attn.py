"""flash_attn_func."""

from collections.abc import Mapping
from typing import Any

import array_api_compat

from refattn.verification.conventions.presets.preset import LSE_SWITCHES, Preset
from refattn.verification.conventions.record import Conventions

__all__ = ["PRESET"]


_FLASH_ATTN_NAMES = {
    "scale": "softmax_scale",
    "causal": "causal",
    "window": "window_size",
    "softcap": "softcap",
    "alibi_slopes": "alibi_slopes",
    "sinks": "learnable_sink",
}


def _flash_attn_call(options: dict[str, Any], arrays: dict[str, Any], has: Mapping[str, Any]) -> dict[str, Any]:
    call = {_FLASH_ATTN_NAMES[n]: x for n, x in options.items()}
    if "alibi_slopes" in options:
        slopes = options["alibi_slopes"]
        xp = array_api_compat.array_namespace(slopes)
        call["alibi_slopes"] = xp.astype(slopes, xp.float32)
    if "window" in options:
        unlimited = None if has.get("window_size") == (None, None) else -1
        call["window_size"] = tuple(unlimited if side is None else side for side in options["window"])
    switch = next((n for n in LSE_SWITCHES if n in has), None)
    return {**call, switch: True} if switch else call


PRESET = Preset(
    name="flash-attn",
    says="flash_attn_func",
    conventions=Conventions(
        align="lower_right",
        head_map="repeat",
        window="inclusive",
        softcap_after_bias=False,
        lse_base="e",
        lse_gradient=False,
        empty_rows="zero",
        alibi="absolute",
        masked_nan="may_leak",
        channels="equal",
        preset="flash-attn",
    ),
    framework="torch",
    layout="blhd",
    parameters=(
        *("q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"),
        *("deterministic", "return_attn_probs", "learnable_sink", "return_lse", "return_softmax_lse"),
    ),
    signs=(frozenset({"softmax_scale", "window_size"}), frozenset({"softmax_scale", "causal"})),
    names=_FLASH_ATTN_NAMES,
    translate=_flash_attn_call,
    results=("output", "lse", None),
)
