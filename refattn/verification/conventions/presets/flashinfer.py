"""flashinfer.single_prefill_with_kv_cache."""

from collections.abc import Mapping
from typing import Any

import array_api_compat

from refattn.verification.conventions.presets.preset import Preset, at_least
from refattn.verification.conventions.record import Conventions
from refattn.verification.errors import Unsupported

__all__ = ["PRESET"]


_FLASHINFER_NAMES = {
    "scale": "sm_scale",
    "causal": "causal",
    "window": "window_left",
    "softcap": "logits_soft_cap",
    "mask": "custom_mask",
}


def _flashinfer_call(options: dict[str, Any], arrays: dict[str, Any], has: Mapping[str, Any]) -> dict[str, Any]:
    call = {_FLASHINFER_NAMES[n]: x for n, x in options.items()}
    if "window" in options:
        left, right = options["window"]
        if right is not None and not (right == 0 and options.get("causal")):
            raise Unsupported("flashinfer's window has a left side only")
        call["window_left"] = -1 if left is None else left
    if "mask" in options:
        if options.get("causal"):
            raise Unsupported("flashinfer's custom_mask replaces causal by design")
        mask = at_least(options["mask"], 3)
        if mask.shape[-3] != 1:
            raise Unsupported("flashinfer's custom_mask has no head axis")
        xp = array_api_compat.array_namespace(mask)
        q, k = list(arrays.values())[:2]
        call["custom_mask"] = xp.broadcast_to(xp.reshape(mask, mask.shape[-2:]), (q.shape[0], k.shape[0]))
    return {**call, "return_lse": True} if "return_lse" in has else call


PRESET = Preset(
    name="flashinfer",
    says="flashinfer.single_prefill_with_kv_cache",
    conventions=Conventions(
        align="lower_right",
        head_map="repeat",
        window="inclusive",
        lse_base="2",
        empty_rows="zero",
        masked_nan="may_leak",
        preset="flashinfer",
    ),
    framework="torch",
    layout="lhd",
    parameters=(
        *("q", "k", "v", "custom_mask", "packed_custom_mask", "causal", "kv_layout", "pos_encoding_mode"),
        *("sm_scale", "window_left", "logits_soft_cap", "return_lse"),
    ),
    signs=(frozenset({"sm_scale", "logits_soft_cap"}), frozenset({"sm_scale", "window_left"})),
    names=_FLASHINFER_NAMES,
    translate=_flashinfer_call,
    lse_layout="qh",
    batched=False,
)
