"""What an implementation does by design, and how the signatures of well-known libraries are called.

A :class:`Conventions` record says where implementations differ without one of them being wrong: where query 0 stands on
the key axis, which key head a query head reads, how many keys a window of W holds, the base of the lse, what an empty
row gives.  ``None`` means "not declared"; the reference then follows refattn's own default (:data:`DEFAULTS`).

Three families of functions use the record:

- :func:`reference_arguments`, :func:`reference_cotangents`, :func:`reference_result` and :func:`reference_gradients`
  carry a probe to refattn and its results back, so that the reference follows the declared conventions;
- :func:`open_elements` and :func:`gradients_open` say where a convention leaves the value open;
- :func:`alternatives` flips one convention at a time: what diagnosis tries when the candidate disagrees.

A :class:`Preset` is a record together with the call translation of one library: names, layout, one argument that stands
for two options, switches such as ``enable_gqa``.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import array_api_compat
import numpy as np

from refattn import arrays as array_tools
from refattn.records import Result

__all__ = [
    "CONVENTION_OPTIONS",
    "DEFAULTS",
    "LSE_SWITCHES",
    "PRESETS",
    "Conventions",
    "Preset",
    "Unsupported",
    "UsageError",
    "alternatives",
    "detect",
    "gradients_open",
    "mean_row_sizes",
    "open_elements",
    "reference_arguments",
    "reference_cotangents",
    "reference_gradients",
    "reference_result",
    "resolve",
    "settle",
]


class UsageError(ValueError):
    """The request itself cannot be carried out: unknown preset, target that does not load ... (exit status 2)."""


class Unsupported(NotImplementedError):
    """The candidate cannot take this call; the probe is not run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conventions:
    """What is by design; None = not declared.

    Attributes
    ----------
    align
        Where query 0 stands on the key axis, for causal, window and ALiBi.
    head_map
        Query head i of h reads key head i // (h/g) ("repeat") or i % g ("tile").
    window
        ``(W, r)`` sees W keys before the aligned diagonal ("inclusive") or W - 1 ("count": W keys with oneself).
    softcap_after_bias
        The cap is taken around logits plus bias and ALiBi.
    lse_base, lse_includes_sinks, lse_gradient
        Base of the lse; whether it counts the sinks; whether it takes a cotangent.
    empty_rows, empty_lse
        Output and lse of a query that sees no key; "finite" = some finite number.
    empty_gradients
        With ``empty_rows="mean"``: the cotangent of an empty row reaches v alone ("v"), or nothing is promised.
    padded_rows
        Output of queries beyond ``query_lengths``: 0, or whatever is there ("open").
    bias_hides
        False: -inf in a bias is no mask, a row that it empties is nobody's promise.
    alibi
        -slope |i + offset - j| ("absolute"), or slope (j - i - offset), which rewards future keys ("signed").
    masked_nan
        A NaN in a masked key or value stays there, or may leak as 0 * NaN.
    channels
        "equal": value channels must be as many as query channels.
    compute
        "float32": the arithmetic is never finer than that, whatever the dtype of the inputs.
    preset
        Name of the preset this record came from.
    """

    align: Literal["lower_right", "upper_left"] | None = None
    head_map: Literal["repeat", "tile"] | None = None
    window: Literal["inclusive", "count"] | None = None
    softcap_after_bias: bool | None = None
    lse_base: Literal["e", "2"] | None = None
    lse_includes_sinks: bool | None = None
    lse_gradient: bool | None = None
    empty_rows: Literal["zero", "mean", "nan"] | None = None
    empty_lse: Literal["-inf", "+inf", "0", "finite"] | None = None
    empty_gradients: Literal["v", "open"] | None = None
    padded_rows: Literal["zero", "open"] | None = None
    bias_hides: bool | None = None
    alibi: Literal["absolute", "signed"] | None = None
    masked_nan: Literal["stays", "may_leak"] | None = None
    channels: Literal["equal"] | None = None
    compute: Literal["float32"] | None = None
    preset: str | None = None

    def declared(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def effective(self, name: str) -> Any:
        """The declared value of a field, else refattn's own."""
        value = getattr(self, name)
        return DEFAULTS.get(name) if value is None else value


_CHOICES: dict[str, tuple[Any, ...]] = {
    "align": ("lower_right", "upper_left"),
    "head_map": ("repeat", "tile"),
    "window": ("inclusive", "count"),
    "softcap_after_bias": (False, True),
    "lse_base": ("e", "2"),
    "lse_includes_sinks": (True, False),
    "lse_gradient": (True, False),
    "empty_rows": ("zero", "mean", "nan"),
    "empty_lse": ("-inf", "+inf", "0", "finite"),
    "empty_gradients": ("v", "open"),
    "padded_rows": ("zero", "open"),
    "bias_hides": (True, False),
    "alibi": ("absolute", "signed"),
    "masked_nan": ("stays", "may_leak"),
    "channels": ("equal",),
    "compute": ("float32",),
}

DEFAULTS: dict[str, Any] = {name: choices[0] for name, choices in _CHOICES.items() if len(choices) > 1}
"""What the reference does where nothing is declared."""

CONVENTION_OPTIONS = ("align", "head_map", "softcap_after_bias", "lse_includes_sinks")
"""Options of refattn that are conventions of a candidate: handed over only if its signature names them."""


def resolve(given: "Conventions | Mapping[str, Any] | str | None") -> Conventions:
    """A record from what a user gives: None, a preset's name, a record, or fields by name (``preset`` among them).

    Raises
    ------
    UsageError
        Unknown preset, unknown field, or a value that the field does not take.
    """
    if given is None:
        return Conventions()
    if isinstance(given, Conventions):
        return given
    if isinstance(given, str):
        given = {"preset": given}
    fields = {name: value for name, value in dict(given).items() if value is not None}
    name = fields.pop("preset", None)
    if name is not None and name not in PRESETS:
        raise UsageError(f"conventions: there is no preset {name!r}; the presets are {', '.join(PRESETS)}")
    for field, value in fields.items():
        if field not in _CHOICES:
            raise UsageError(f"conventions: there is no field {field!r}; the fields are {', '.join(_CHOICES)}")
        if field == "lse_base":
            fields[field] = value = str(value)
        if value not in _CHOICES[field]:
            raise UsageError(
                f"conventions: {field} is {value!r}: expected one of {', '.join(map(repr, _CHOICES[field]))}"
            )
    start = PRESETS[name].conventions if name else Conventions()
    return dataclasses.replace(start, **fields)


# ---------------------------------------------------------------------- the reference follows the conventions


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
    settled = {n: x for n, x in settled.items() if n in known or n not in CONVENTION_OPTIONS}
    if "window" in settled and conventions.window == "count":
        settled.update(_counted_window(arrays, settled))
    if "alibi_slopes" in settled and conventions.alibi == "signed":
        slopes = np.asarray(settled.pop("alibi_slopes"))
        signed = _signed_alibi(slopes, _distance(arrays, settled))
        bias = settled.get("bias")
        settled["bias"] = signed if bias is None else np.asarray(bias).astype(signed.dtype) + signed
    return {**arrays, **settled}


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
    slopes = options.get("alibi_slopes")
    if slopes is not None and conventions.alibi == "signed" and "bias" in wanted:
        d_bias = wanted.pop("bias")
        heads = d_bias * _distance(arguments, arguments)
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


def mean_row_sizes(result: Result, arguments: Mapping[str, Any], conventions: Conventions) -> np.ndarray | None:
    """Mean |v| over the keys where an empty row holds the mean of v, 0 in all other rows: what its rounding scales with.

    (…, h, q, e), or None where the conventions put no mean anywhere.
    """
    empty = _empty_rows(result, arguments)
    if empty is None or conventions.empty_rows != "mean" or not empty.any():
        return None
    sizes = np.abs(np.asarray(arguments["v"]).astype(np.float64)).mean(axis=-2, keepdims=True)
    sizes = np.take(sizes, _key_heads(empty.shape[-2], sizes.shape[-3], arguments), axis=-3)
    return np.where(empty[..., None], sizes, 0.0)


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


def _distance(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> np.ndarray:
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
    mask = _distance(arrays, options) > 0
    given = options.get("mask")
    return {"window": (0, right), "mask": mask if given is None else mask & np.asarray(given)}


def _signed_alibi(slopes: np.ndarray, distance: np.ndarray) -> np.ndarray:
    dtype = np.dtype(np.float32) if array_tools.is_half(slopes.dtype) else slopes.dtype
    return slopes.astype(dtype)[:, None, None] * distance.astype(dtype)


# ---------------------------------------------------------------------- conventions as explanations

_CLASSES: dict[tuple[str, Any], str] = {
    ("align", "lower_right"): "causal_other",
    ("align", "upper_left"): "causal_other",
    ("head_map", "tile"): "gqa_tile",
    ("head_map", "repeat"): "gqa_repeat",
    ("window", "count"): "window_edge",
    ("window", "inclusive"): "window_plus1",
    ("softcap_after_bias", True): "cap_after_bias",
    ("softcap_after_bias", False): "cap_before_bias",
    ("lse_base", "2"): "lse_base2",
    ("lse_base", "e"): "lse_base_e",
    ("lse_includes_sinks", False): "lse_without_sinks",
    ("lse_includes_sinks", True): "lse_with_sinks",
    ("empty_rows", "zero"): "empty_row_zero",
    ("empty_rows", "mean"): "empty_row_mean",
    ("empty_rows", "nan"): "empty_row_nan",
    ("empty_lse", "-inf"): "empty_lse_minus_inf",
    ("empty_lse", "+inf"): "empty_lse_plus_inf",
    ("empty_lse", "0"): "empty_lse_zero",
    ("alibi", "signed"): "alibi_signed",
    ("alibi", "absolute"): "alibi_absolute",
}


def alternatives(conventions: Conventions) -> list[tuple[str, Conventions]]:
    """Every record that differs in one convention, each with the name of the mistake it would be (see the catalogue).

    Declared conventions are flipped too: a candidate that does not keep what it declares has an explanation as well.
    """
    found = []
    for (field, value), name in _CLASSES.items():
        if conventions.effective(field) != value:
            found.append((name, dataclasses.replace(conventions, **{field: value})))
    return found


# ---------------------------------------------------------------------- presets: the call translation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """Conventions and call translation of one library's signature.

    ``names`` maps the options of refattn that it can express to its parameters; ``translate(options, arrays, has)`` gives the keyword
    arguments for arrays of the framework (``has``: the candidate's parameters with their defaults) and raises
    Unsupported for combinations.  ``signs`` are groups of parameter names, any of which, complete, tells the signature;
    ``results`` names the fields of a returned tuple; ``batched=False``: the signature has no batch axis.
    """

    name: str
    says: str
    conventions: Conventions
    framework: str
    layout: str
    parameters: tuple[str, ...]
    signs: tuple[frozenset[str], ...]
    names: Mapping[str, str]
    translate: Callable[[dict[str, Any], dict[str, Any], Mapping[str, Any]], dict[str, Any]]
    results: tuple[str | None, ...] = ("output", "lse")
    output_layout: str | None = None
    lse_layout: str = "bhq"
    batched: bool = True
    needs_module: bool = False

    def speaks(self, parameters: Iterable[str]) -> bool:
        """Whether a signature has a name that is this library's and not refattn's."""
        return bool(set(parameters) & set(self.parameters) - {"q", "k", "v", "query", "key", "value"} - set(self.names))


def detect(parameters: Sequence[str]) -> str | None:
    """Name of the preset whose signature these parameter names are, or None."""
    names = set(parameters)
    return next((p.name for p in PRESETS.values() if any(sign <= names for sign in p.signs)), None)


LSE_SWITCHES = ("return_lse", "return_softmax_lse", "return_attn_probs", "return_residual")
"""Parameters of known signatures that ask for the lse; a backward has no use for them."""


def _at_least(x: Any, ndim: int) -> Any:
    xp = array_api_compat.array_namespace(x)
    return xp.reshape(x, (1,) * (ndim - x.ndim) + tuple(x.shape)) if x.ndim < ndim else x


def _same_dtype(x: Any, like: Any) -> Any:
    xp = array_api_compat.array_namespace(x)
    return x if x.dtype == like.dtype else xp.astype(x, like.dtype)


def _attention_mask(
    options: Mapping[str, Any], arrays: Mapping[str, Any], *, ndim: int, hidden: float | None = -math.inf
) -> Any:
    """Mask and bias as one argument; a bool mask alone stays bool.  ``hidden=None``: additive, by the lowest number."""
    mask, bias = options.get("mask"), options.get("bias")
    first = next(iter(arrays.values()))
    xp = array_api_compat.array_namespace(first)
    if mask is None:
        return None if bias is None else _at_least(_same_dtype(bias, first), ndim)
    if bias is None:
        if hidden is not None:
            return _at_least(mask, ndim)
        bias = xp.zeros((1,), dtype=first.dtype)
    low = -float(xp.finfo(first.dtype).max) if hidden is None else hidden
    return _at_least(xp.where(mask, _same_dtype(bias, first), xp.asarray(low, dtype=first.dtype)), ndim)


def _torch_call(options: dict[str, Any], arrays: dict[str, Any], has: Mapping[str, Any]) -> dict[str, Any]:
    call = {n: options[n] for n in ("scale",) if n in options}
    attn_mask = _attention_mask(options, arrays, ndim=2)
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
    call = {_JAX_NAMES[n]: _at_least(x, 4) if n in ("mask", "bias") else x for n, x in options.items()}
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
        mask = _at_least(options["mask"], 3)
        if mask.shape[-3] != 1:
            raise Unsupported("flashinfer's custom_mask has no head axis")
        xp = array_api_compat.array_namespace(mask)
        q, k = list(arrays.values())[:2]
        call["custom_mask"] = xp.broadcast_to(xp.reshape(mask, mask.shape[-2:]), (q.shape[0], k.shape[0]))
    return {**call, "return_lse": True} if "return_lse" in has else call


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
    attn_mask = _attention_mask(options, arrays, ndim=2)
    if attn_mask is not None:
        call["attn_mask"] = attn_mask
    if "causal" in options:
        call["is_causal"] = int(options["causal"])
    return call


def _hf_call(options: dict[str, Any], arrays: dict[str, Any], has: Mapping[str, Any]) -> dict[str, Any]:
    q = next(iter(arrays.values()))
    call = {n: options[n] for n in ("softcap",) if n in options}
    call["attention_mask"] = _attention_mask(options, arrays, ndim=4, hidden=None)
    call["scaling"] = options.get("scale", q.shape[-1] ** -0.5)
    return call


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
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
        ),
        Preset(
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
        ),
        Preset(
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
        ),
        Preset(
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
        ),
        Preset(
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
        ),
        Preset(
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
            needs_module=True,
        ),
    )
}
"""The signatures that are known, by name."""
