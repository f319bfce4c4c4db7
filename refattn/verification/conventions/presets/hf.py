"""eager_attention_forward of the transformers package."""

from collections.abc import Mapping
from typing import Any

from refattn.verification.conventions.presets.preset import Preset, attention_mask
from refattn.verification.conventions.record import Conventions

__all__ = ["PRESET"]


def _hf_call(options: dict[str, Any], arrays: dict[str, Any], has: Mapping[str, Any]) -> dict[str, Any]:
    q = next(iter(arrays.values()))
    call = {n: options[n] for n in ("softcap",) if n in options}
    call["attention_mask"] = attention_mask(options, arrays, ndim=4, hidden=None)
    call["scaling"] = options.get("scale", q.shape[-1] ** -0.5)
    return call


PRESET = Preset(
    name="hf",
    says="eager_attention_forward of the transformers package",
    conventions=Conventions(
        head_map="repeat",
        softcap_after_bias=False,
        empty_rows="mean",
        empty_gradients="open",
        bias_hides=False,
        masked_nan="may_leak",
        preset="hf",
    ),
    framework="torch",
    layout="bhld",
    output_layout="blhd",
    parameters=("module", "query", "key", "value", "attention_mask", "scaling", "dropout", "softcap"),
    signs=(frozenset({"attention_mask", "scaling"}),),
    names={"mask": "attention_mask", "bias": "attention_mask", "scale": "scaling", "softcap": "softcap"},
    translate=_hf_call,
    results=("output", None),
)
