"""The signatures that are known: one file per library."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from refattn.verification.conventions.presets import (
    fla,
    fla_head_first,
    flash_attn,
    flashinfer,
    flashkda,
    hf,
    hf_gdn,
    jax,
    mamba,
    onnx,
    onnx_linear,
    rwkv,
    torch,
)
from refattn.verification.conventions.presets.preset import LSE_SWITCHES, Preset
from refattn.verification.conventions.record import APPROXIMATED, BUILT_IN, CHOICES, Conventions
from refattn.verification.errors import UsageError

__all__ = ["LSE_SWITCHES", "PRESETS", "Preset", "detect", "resolve"]

PRESETS: dict[str, Preset] = {
    module.PRESET.name: module.PRESET
    for module in (
        *(torch, jax, flash_attn, flashinfer, onnx, hf),
        *(flashkda, hf_gdn, onnx_linear, mamba, rwkv, fla, fla_head_first),
    )
}
"""By name; the first one whose signs fit a signature is taken."""


def detect(parameters: Sequence[str], mechanism: str = "scaled_dot_product_attention") -> str | None:
    """Name of the preset of a mechanism whose signature these parameter names are, or None."""
    names, known = set(parameters), [p for p in PRESETS.values() if mechanism in p.mechanisms]
    return next((p.name for p in known if any(sign <= names for sign in p.signs)), None)


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
    built_in = {n: fields.pop(n) for n in BUILT_IN if n in fields}
    if built_in:
        fields["fixed"] = tuple(built_in.items())
    for field, value in fields.items():
        if field == "fixed":
            continue
        if field == "allow":
            fields[field] = _allowed(value)
            continue
        if field not in CHOICES:
            raise UsageError(f"conventions: there is no field {field!r}; the fields are {', '.join(CHOICES)}, allow")
        if field in ("lse_base", "log_base"):
            fields[field] = value = str(value)
        if value not in CHOICES[field]:
            raise UsageError(
                f"conventions: {field} is {value!r}: expected one of {', '.join(map(repr, CHOICES[field]))}"
            )
    start = PRESETS[name].conventions if name else Conventions()
    return dataclasses.replace(start, **fields)


def _allowed(given: Any) -> tuple[tuple[str, float], ...]:
    """``{"tanh": 5e-4}`` as a tuple of pairs; relative errors lie between 0 and 1."""
    if not isinstance(given, (Mapping, tuple)):
        raise UsageError(f"conventions: allow is {given!r}: expected relative errors by name, as {{'tanh': 5e-4}}")
    for name, error in dict(given).items():
        if name not in APPROXIMATED:
            raise UsageError(f"conventions: allow has {name!r}: expected some of {', '.join(APPROXIMATED)}")
        if isinstance(error, bool) or not isinstance(error, (int, float)) or not 0 <= error < 1:
            raise UsageError(f"conventions: allow gives {name} {error!r}: expected a relative error from 0 to below 1")
    return tuple((name, float(error)) for name, error in dict(given).items())
