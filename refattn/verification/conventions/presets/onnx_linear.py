"""ONNX LinearAttention: packed (b, t, h d)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from refattn.verification.conventions.presets.recurrences import recurrent
from refattn.verification.errors import Unsupported

__all__ = ["PRESET"]

_BASE = recurrent(
    "onnx-linear",
    "ONNX LinearAttention",
    ("gated_linear_attention", "delta_rule_attention"),
    arrays={"q": "query", "k": "key", "v": "value"},
    names={"decay": "decay", "channel_decay": "decay", "beta": "beta", "scale": "scale", "state": "past_state"},
    signs=(frozenset({"q_num_heads", "kv_num_heads"}),),
    conventions={"head_map": "repeat"},
    layout="blhd",
    packed=True,
    requires={"delta_rule_attention": ("beta",)},
    framework="numpy",
)


def _call(options: dict[str, Any], given: dict[str, Any], has: Mapping[str, Any]) -> dict[str, Any]:
    if "decay" in options and "channel_decay" in options:
        raise Unsupported("LinearAttention has one decay")
    call = {n: x for n, x in _BASE.translate(options, given, has).items() if n in has}
    gated = "decay" in call
    delta = "beta" in call
    call["update_rule"] = {
        (False, False): "linear",
        (True, False): "gated",
        (False, True): "delta",
        (True, True): "gated_delta",
    }[gated, delta]
    return call


PRESET = dataclasses.replace(_BASE, translate=_call)
