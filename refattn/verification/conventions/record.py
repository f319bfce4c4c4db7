"""The record of what an implementation does by design, and how a user's words become one."""

import dataclasses
import math
from typing import Any, Literal

import numpy as np

__all__ = [
    "APPROXIMATED",
    "BUILT_IN",
    "CHOICES",
    "CONVENTION_OPTIONS",
    "DEFAULTS",
    "Conventions",
    "alternatives",
    "decay_of",
    "kda_gate",
]


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
    duplicates
        Of listed keys (``indices``, ``block_indices``): a key that is listed twice counts once, or twice.
    compute
        What operands of products are rounded to: "float32" (the whole arithmetic is never finer than that, whatever the
        dtype of the inputs), "tf32", "bfloat16", "float16".
    allow
        Relative errors of approximated functions, and of accumulators as ``sum``: ``{"tanh": 5e-4, "exp": 1e-5}``, kept as a
        tuple of pairs.
    scores
        "storage": logits and weights are rounded to the dtype of the inputs between the steps.
    state_layout
        States of recurrences with the key channel first ("de") or the value channel.
    log_base
        Base of the powers that log decays of recurrences are exponents of.
    state_dtype
        A state may be answered in this dtype though it is narrower than the one computed in.
    gate
        What stands in the place of a log decay: itself ("log"), w with the log decay -exp(w) ("exp"), or what Kimi's bounded gate
        takes ("kda", see :func:`kda_gate`).
    beta
        Betas as they are ("plain"), or what a sigmoid is taken of ("logit").
    fixed
        Options that are built in, with their values, kept as a tuple of pairs: they are not handed over.
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
    duplicates: Literal["union", "multiset"] | None = None
    compute: Literal["float32", "tf32", "bfloat16", "float16"] | None = None
    allow: tuple[tuple[str, float], ...] | None = None
    scores: Literal["storage"] | None = None
    state_layout: Literal["de", "ed"] | None = None
    log_base: Literal["e", "2"] | None = None
    state_dtype: Literal["float16", "bfloat16", "float32"] | None = None
    gate: Literal["log", "exp", "kda"] | None = None
    beta: Literal["plain", "logit"] | None = None
    fixed: tuple[tuple[str, Any], ...] | None = None
    preset: str | None = None

    def declared(self) -> dict[str, Any]:
        """The fields that are not None."""
        found = self.given()
        found |= dict(found.pop("fixed", ()))
        return found | {"allow": dict(found["allow"])} if "allow" in found else found

    def given(self) -> dict[str, Any]:
        """The fields that are not None, as they are kept."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def effective(self, name: str) -> Any:
        """The declared value of a field, else refattn's own."""
        value = getattr(self, name)
        return DEFAULTS.get(name) if value is None else value


CHOICES: dict[str, tuple[Any, ...]] = {
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
    "duplicates": ("union", "multiset"),
    "compute": ("float32", "tf32", "bfloat16", "float16"),
    "scores": ("storage",),
    "state_layout": ("de", "ed"),
    "log_base": ("e", "2"),
    "state_dtype": ("float16", "bfloat16", "float32"),
    "gate": ("log", "exp", "kda"),
    "beta": ("plain", "logit"),
}

BUILT_IN = ("activation", "dt_softplus", "form", "norm_eps", "qk_norm", "read", "scale")
"""Options that a kernel may have built in, so that they stand among its conventions."""

APPROXIMATED = ("tanh", "exp", "sum")
"""What may have a relative error of its own: two functions, and every partial sum."""

DEFAULTS: dict[str, Any] = {
    name: choices[0] for name, choices in CHOICES.items() if len(choices) > 1 and name not in ("compute", "state_dtype")
}
"""What the reference does where nothing is declared."""

CONVENTION_OPTIONS = ("align", "head_map", "softcap_after_bias", "lse_includes_sinks")
"""Options of refattn that are conventions of a candidate: handed over only if its signature names them."""


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
    ("duplicates", "multiset"): "duplicates_counted",
    ("duplicates", "union"): "duplicates_once",
    ("alibi", "absolute"): "alibi_absolute",
}


def kda_gate(h: int, d: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Parameters that a kernel with Kimi's bounded gate inside is given: a_log (h,), bias (h,d), the lower bound."""
    a_log, bias = np.linspace(-0.5, 0.4, h), 0.3 * np.cos(np.arange(h * d)).reshape(h, d)
    return a_log.astype(np.float32), bias.astype(np.float32), -5.0


def decay_of(gate: str | None, base: str | None, x: Any) -> tuple[Any, Any]:
    """The log decay that a candidate makes of x, and its derivative."""
    if gate == "exp":
        return -np.exp(x), -np.exp(x)
    if gate == "kda":
        a_log, bias, low = kda_gate(x.shape[-3], x.shape[-1])
        factor = np.exp(a_log.astype(np.float64))[:, None, None]
        s = 1 / (1 + np.exp(-factor * (x + bias.astype(np.float64)[:, None, :])))
        return low * s, low * s * (1 - s) * factor
    scale = math.log(2.0) if base == "2" else 1.0
    return scale * x, np.full(np.shape(x), scale)


def alternatives(conventions: Conventions) -> list[tuple[str, Conventions]]:
    """Every record that differs in one convention, each with the name of the mistake it would be (see the catalogue).

    Declared conventions are flipped too: a candidate that does not keep what it declares has an explanation as well.
    """
    found = []
    for (field, value), name in _CLASSES.items():
        if conventions.effective(field) != value:
            found.append((name, dataclasses.replace(conventions, **{field: value})))
    return found
