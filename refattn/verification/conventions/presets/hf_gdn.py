"""The gated delta rule of the transformers package (Qwen3-Next)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from refattn.verification.conventions.presets.recurrences import BLOCK, recurrent
from refattn.verification.errors import Unsupported

__all__ = ["PRESET"]

_BASE = recurrent(
    "hf-gdn",
    "the gated delta rule of the transformers package",
    ("delta_rule_attention",),
    arrays={"q": "query", "k": "key", "v": "value"},
    names={"decay": "g", "beta": "beta", "state": "initial_state", "qk_norm": "use_qk_l2norm_in_kernel"},
    signs=(frozenset({"query", "g", "beta"}), frozenset({"query", "initial_state", "output_final_state"})),
    conventions={"head_map": "repeat"},
    always={"chunk_size": BLOCK},
)


def _call(options: dict[str, Any], given: dict[str, Any], has: Mapping[str, Any]) -> dict[str, Any]:
    call = _BASE.translate(options, given, has)
    if options.get("qk_norm") not in (None, "l2_sum"):
        raise Unsupported("use_qk_l2norm_in_kernel has eps inside the root")
    if "use_qk_l2norm_in_kernel" in has:
        call["use_qk_l2norm_in_kernel"] = options.get("qk_norm") == "l2_sum"
    call.setdefault("initial_state", None)
    return {n: x for n, x in call.items() if n in has}


PRESET = dataclasses.replace(_BASE, translate=_call)
