"""jax.nn.dot_product_attention."""

from collections.abc import Mapping
from typing import Any

import array_api_compat

from refattn.verification.conventions.presets.preset import Preset, at_least
from refattn.verification.conventions.record import Conventions

__all__ = ["PRESET"]


_JAX_NAMES = {
    "mask": "mask",
    "bias": "bias",
    "scale": "scale",
    "causal": "is_causal",
    "query_lengths": "query_seq_lengths",
    "key_lengths": "key_value_seq_lengths",
    "window": "local_window_size",
}


def _jax_call(options: dict[str, Any], arrays: dict[str, Any], has: Mapping[str, Any]) -> dict[str, Any]:
    call = {_JAX_NAMES[n]: at_least(x, 4) if n in ("mask", "bias") else x for n, x in options.items()}
    for ours in ("query_lengths", "key_lengths"):
        if ours in options:
            lengths = options[ours]
            xp = array_api_compat.array_namespace(lengths)
            call[_JAX_NAMES[ours]] = xp.astype(lengths, xp.int32)
    if "window" in options:
        q, k = list(arrays.values())[:2]
        far = max(q.shape[1], k.shape[1])
        call["local_window_size"] = tuple(far if side is None else side for side in options["window"])
    return {**call, "return_residual": True} if "return_residual" in has else call


PRESET = Preset(
    name="jax",
    says="jax.nn.dot_product_attention",
    conventions=Conventions(
        align="upper_left",
        head_map="repeat",
        window="inclusive",
        lse_base="e",
        lse_gradient=False,
        empty_rows="mean",
        empty_lse="finite",
        empty_gradients="v",
        padded_rows="zero",
        bias_hides=False,
        masked_nan="may_leak",
        channels="equal",
        compute="float32",
        preset="jax",
    ),
    framework="jax",
    layout="blhd",
    parameters=(
        *("query", "key", "value", "bias", "mask", "scale", "is_causal", "query_seq_lengths"),
        *("key_value_seq_lengths", "local_window_size", "implementation", "return_residual"),
    ),
    signs=(frozenset({"key_value_seq_lengths"}), frozenset({"is_causal", "local_window_size"})),
    names=_JAX_NAMES,
    translate=_jax_call,
    lse_layout="bqh",
)
