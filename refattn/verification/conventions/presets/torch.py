"""torch.nn.functional.scaled_dot_product_attention."""

from collections.abc import Mapping
from typing import Any

from refattn.verification.conventions.presets.preset import Preset, attention_mask
from refattn.verification.conventions.record import Conventions
from refattn.verification.errors import Unsupported

__all__ = ["PRESET"]


def _torch_call(options: dict[str, Any], arrays: dict[str, Any], has: Mapping[str, Any]) -> dict[str, Any]:
    call = {n: options[n] for n in ("scale",) if n in options}
    attn_mask = attention_mask(options, arrays, ndim=2)
    if attn_mask is not None:
        call["attn_mask"] = attn_mask
    if options.get("causal"):
        if attn_mask is not None:
            raise Unsupported("attn_mask together with is_causal is an error by design")
        call["is_causal"] = True
    q, k = list(arrays.values())[:2]
    if q.shape[-3] != k.shape[-3]:
        call["enable_gqa"] = True
    return call


PRESET = Preset(
    name="torch",
    says="torch.nn.functional.scaled_dot_product_attention",
    conventions=Conventions(
        align="upper_left",
        head_map="repeat",
        empty_rows="zero",
        masked_nan="may_leak",
        preset="torch",
    ),
    framework="torch",
    layout="bhld",
    parameters=("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    signs=(
        frozenset({"attn_mask", "is_causal", "dropout_p"}),
        frozenset({"attn_mask", "is_causal", "enable_gqa"}),
    ),
    names={"mask": "attn_mask", "bias": "attn_mask", "causal": "is_causal", "scale": "scale"},
    translate=_torch_call,
)
