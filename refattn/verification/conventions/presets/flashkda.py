"""FlashKDA: raw gates and beta logits, the norm of q and k inside."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import array_api_compat
import numpy as np

from refattn.verification.conventions.presets.recurrences import recurrent
from refattn.verification.conventions.record import kda_gate

__all__ = ["PRESET"]

_BASE = recurrent(
    "flashkda",
    "FlashKDA's forward",
    ("delta_rule_attention",),
    names={"channel_decay": "g", "beta": "beta", "scale": "scale", "state": "initial_state"},
    requires={"delta_rule_attention": ("channel_decay", "beta")},
    signs=(frozenset({"A_log", "dt_bias", "lower_bound"}),),
    conventions={
        "head_map": "repeat",
        "state_layout": "ed",
        "gate": "kda",
        "beta": "logit",
        "fixed": (("qk_norm", "l2_sum"),),
    },
)


def _call(options: dict[str, Any], given: dict[str, Any], has: Mapping[str, Any]) -> dict[str, Any]:
    call = _BASE.translate(options, given, has)
    g = call["g"]
    xp = array_api_compat.array_namespace(g)
    a_log, bias, lower_bound = kda_gate(g.shape[-2], g.shape[-1])
    call |= {n: xp.asarray(x.astype(np.float32)) for n, x in (("A_log", a_log), ("dt_bias", bias))}
    return {n: x for n, x in {**call, "lower_bound": lower_bound}.items() if n in has}


PRESET = dataclasses.replace(_BASE, translate=_call)
