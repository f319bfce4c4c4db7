"""The reference follows the conventions: a probe's arguments to refattn, and its results back."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from refattn import arrays as array_tools
from refattn.records import Result
from refattn.verification.conventions.record import CONVENTION_OPTIONS, Conventions, decay_of

__all__ = [
    "gradients_open",
    "open_elements",
    "reference_arguments",
    "reference_cotangents",
    "reference_gradients",
    "reference_result",
    "settle",
]


def settle(
    options: Mapping[str, Any], conventions: Conventions, takes: Callable[[str], bool] = lambda name: False
) -> dict[str, Any]:
    """The options with the four convention options resolved.

    A convention option that the candidate takes by name is what the probe says; else what is declared; else the
    default, which stays out of the options except for ``align``, which refattn wants to be told.
    """
    settled = {n: x for n, x in options.items() if x is not None and (n not in CONVENTION_OPTIONS or takes(n))}
    needs_align = settled.get("causal") or "window" in settled or "alibi_slopes" in settled
    relevant = {
        "align": needs_align,
        "head_map": conventions.head_map is not None,
        "softcap_after_bias": "softcap" in settled and conventions.softcap_after_bias is not None,
        "lse_includes_sinks": "sinks" in settled and conventions.lse_includes_sinks is not None,
        "duplicates": bool({"indices", "block_indices"} & set(settled)) and conventions.duplicates is not None,
    }
    for name, needed in relevant.items():
        if needed:
            settled.setdefault(name, conventions.effective(name))
    return settled


def reference_arguments(
    mechanism: Any,
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    conventions: Conventions,
    takes: Callable[[str], bool] = lambda name: False,
) -> dict[str, Any]:
    """Arguments for the mechanism that follow the declared conventions.

    Parameters
    ----------
    mechanism
        A mechanism; options of the record that it does not have are left out.
    arrays, options
        The probe, by refattn's names, as NumPy arrays with axes (b, head, length, channel).
    conventions
        What is declared.
    takes
        Whether the candidate's signature names a convention option, and so got the probe's value.
    """
    known = inspect.signature(mechanism).parameters
    settled = settle(options, conventions, takes)
    settled = {n: x for n, x in settled.items() if n in known or n not in (*CONVENTION_OPTIONS, "duplicates")}
    if "window" in settled and conventions.window == "count":
        settled.update(_counted_window(arrays, settled))
    if "alibi_slopes" in settled and conventions.alibi == "signed":
        slopes = np.asarray(settled.pop("alibi_slopes"))
        signed = _signed_alibi(slopes, distance(arrays, settled))
        bias = settled.get("bias")
        settled["bias"] = signed if bias is None else np.asarray(bias).astype(signed.dtype) + signed
    if "channel_decay" in known:
        for name in ("decay", "channel_decay"):
            if isinstance(settled.get(name), np.ndarray) and _gated(conventions):
                settled[name] = decay_of(conventions.gate, conventions.log_base, _wide(settled[name]))[0]
        if conventions.beta == "logit" and isinstance(settled.get("beta"), np.ndarray):
            settled["beta"] = 1 / (1 + np.exp(-_wide(settled["beta"])))
    return {**arrays, **settled}


def _gated(conventions: Conventions) -> bool:
    return conventions.gate not in (None, "log") or conventions.log_base == "2"


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def reference_cotangents(cotangents: Mapping[str, Any], conventions: Conventions) -> dict[str, Any]:
    """Cotangents for refattn's results from those of the candidate's: an lse to base 2 is the natural one over ln 2."""
    result = dict(cotangents)
    if result.get("lse") is not None and conventions.lse_base == "2":
        result["lse"] = result["lse"] / math.log(2.0)
    return result


def reference_result(result: Result, arguments: Mapping[str, Any], conventions: Conventions) -> dict[str, np.ndarray]:
    """The reference's fields as the candidate should have them: base of the lse, values of empty rows.

    A NaN that stands in ``result`` itself is refattn's error: look for it before.
    """
    fields = {n: np.array(array_tools.to_numpy(x)) for n, x in result.fields.items() if array_tools.is_array(x)}
    empty = _empty_rows(result, arguments)
    if empty is None:
        return fields
    if conventions.lse_base == "2":
        fields["lse"] = (fields["lse"] / math.log(2.0)).astype(fields["lse"].dtype)
    if not empty.any():
        return fields
    if conventions.empty_lse in ("+inf", "0"):
        fields["lse"][empty] = math.inf if conventions.empty_lse == "+inf" else 0.0
    if conventions.empty_rows == "nan":
        fields["output"][empty] = math.nan
    elif conventions.empty_rows == "mean":
        v = np.asarray(arguments["v"])
        mean = v.astype(np.promote_types(fields["output"].dtype, np.float32)).mean(axis=-2, keepdims=True)
        h = fields["output"].shape[-3]
        mean = np.take(mean, _key_heads(h, v.shape[-3], arguments), axis=-3)
        fields["output"] = np.where(empty[..., None], mean, fields["output"]).astype(fields["output"].dtype)
    return fields


def reference_gradients(
    gradients: Mapping[str, Any],
    result: Result,
    arguments: Mapping[str, Any],
    cotangents: Mapping[str, Any],
    conventions: Conventions,
    options: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """Gradients as the candidate should have them.

    Parameters
    ----------
    gradients, result
        What refattn gave for ``arguments`` (see :func:`reference_arguments`) and :func:`reference_cotangents`.
    cotangents
        Those given to the candidate.
    options
        The probe's own options, before the conventions.
    """
    wanted = {n: np.array(array_tools.to_numpy(x)) for n, x in gradients.items()}
    for name in ("decay", "channel_decay"):
        if name in wanted and _gated(conventions) and isinstance(options.get(name), np.ndarray):
            slope = decay_of(conventions.gate, conventions.log_base, _wide(options[name]))[1]
            wanted[name] = wanted[name] * slope
    if "beta" in wanted and conventions.beta == "logit":
        s = 1 / (1 + np.exp(-_wide(np.asarray(options["beta"]))))
        wanted["beta"] = wanted["beta"] * s * (1 - s)
    slopes = options.get("alibi_slopes")
    if slopes is not None and conventions.alibi == "signed" and "bias" in wanted:
        d_bias = wanted.pop("bias")
        heads = d_bias * distance(arguments, arguments)
        wanted["alibi_slopes"] = heads.sum(axis=tuple(i for i in range(heads.ndim) if i != heads.ndim - 3))
        if options.get("bias") is not None:
            wanted["bias"] = array_tools.sum_to_shape(d_bias, np.shape(options["bias"]))
    empty = _empty_rows(result, arguments)
    if empty is not None and conventions.empty_rows == "mean" and "v" in wanted and empty.any():
        d_output = cotangents.get("output")
        if d_output is not None:
            d_v = wanted["v"]
            share = np.where(empty[..., None], d_output, 0).astype(d_v.dtype).sum(axis=-2) / d_v.shape[-2]
            mapped = _key_heads(share.shape[-2], d_v.shape[-3], arguments)
            for head, key_head in enumerate(mapped):
                d_v[..., key_head, :, :] += share[..., head, None, :]
    return wanted


def open_elements(result: Result, arguments: Mapping[str, Any], conventions: Conventions) -> dict[str, np.ndarray]:
    """Where the conventions leave a value open: bool arrays by field, True = do not compare."""
    empty = _empty_rows(result, arguments)
    if empty is None:
        return {}
    padded = _padded_rows(arguments, empty.shape)
    output = np.zeros(empty.shape, dtype=bool)
    lse = np.zeros(empty.shape, dtype=bool)
    if conventions.empty_lse == "finite":
        lse |= empty
    if conventions.bias_hides is False and _bias_hides(arguments):
        output |= empty
        lse |= empty
    if conventions.padded_rows == "open":
        output |= padded
    if conventions.empty_lse not in (None, "-inf") or conventions.padded_rows == "open":
        lse |= padded
    fields = {"output": output[..., None], "lse": lse}
    return {n: np.broadcast_to(x, np.shape(getattr(result, n))) for n, x in fields.items() if x.any()}


def gradients_open(result: Result, arguments: Mapping[str, Any], conventions: Conventions) -> bool:
    """Whether nothing is promised about the gradients of this call: it has empty rows whose backward is open."""
    empty = _empty_rows(result, arguments)
    if empty is None or not empty.any():
        return False
    mean = conventions.empty_rows == "mean" and conventions.empty_gradients != "v"
    return conventions.empty_rows == "nan" or mean or (conventions.bias_hides is False and _bias_hides(arguments))


def _empty_rows(result: Result, arguments: Mapping[str, Any]) -> np.ndarray | None:
    """(…, h, q): queries that see no key and are no padding; None where the result is no (…, h, q, e) with an lse."""
    if "lse" not in result or "v" not in arguments or not array_tools.is_array(result.lse):
        return None
    lse = array_tools.to_numpy(result.lse)
    if tuple(result.output.shape[:-1]) != lse.shape:
        return None
    return np.isneginf(lse.astype(np.float64)) & ~_padded_rows(arguments, lse.shape)


def _padded_rows(arguments: Mapping[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    lengths = arguments.get("query_lengths")
    if lengths is None:
        return np.zeros(shape, dtype=bool)
    lengths = np.asarray(lengths).reshape(*np.shape(lengths), 1, 1)
    return np.broadcast_to(np.arange(shape[-1]) >= lengths, shape)


def _bias_hides(arguments: Mapping[str, Any]) -> bool:
    bias = arguments.get("bias")
    return bias is not None and bool(np.isneginf(np.asarray(bias).astype(np.float64)).any())


def _key_heads(h: int, g: int, arguments: Mapping[str, Any]) -> list[int]:
    if arguments.get("head_map") == "tile":
        return [i % g for i in range(h)]
    return [i // (h // g) for i in range(h)]


def distance(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> np.ndarray:
    """(1, q, k) or (b, 1, q, k): j - i - offset, the signed distance of key j from the aligned diagonal."""
    queries = arrays["x_q"] if "x_q" in arrays else arrays["q"]
    keys = next(x for n in ("x_k", "k", "x_q", "q") if (x := arrays.get(n)) is not None)
    q, k = queries.shape[-2], keys.shape[-2]
    align = options.get("align", "lower_right")
    if align == "upper_left":
        offset: Any = 0
    elif align == "lower_right":
        lengths = (options.get("key_lengths"), options.get("query_lengths"))
        key_length, query_length = (n if x is None else np.asarray(x) for n, x in zip((k, q), lengths, strict=True))
        offset = key_length - query_length
    else:
        offset = align
    offset = np.asarray(offset)
    offset = offset.reshape(*offset.shape, 1, 1, 1) if offset.ndim else offset
    return np.arange(k) - np.arange(q)[None, :, None] - offset


def _counted_window(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The inclusive window that sees what a counted one sees; W = 0 hides oneself too, which takes a mask."""
    left, right = options["window"]
    if left is None or left > 0:
        return {"window": (None if left is None else left - 1, right)}
    mask = distance(arrays, options) > 0
    given = options.get("mask")
    return {"window": (0, right), "mask": mask if given is None else mask & np.asarray(given)}


def _signed_alibi(slopes: np.ndarray, distance: np.ndarray) -> np.ndarray:
    dtype = np.dtype(np.float32) if array_tools.is_half(slopes.dtype) else slopes.dtype
    return slopes.astype(dtype)[:, None, None] * distance.astype(dtype)
