"""flash-linear-attention's older references, (b, h, t, d)."""

import dataclasses

from refattn.verification.conventions.presets.fla import PRESET as FLA

__all__ = ["PRESET"]

PRESET = dataclasses.replace(
    FLA,
    name="fla-head-first",
    says="flash-linear-attention's older references, heads first",
    conventions=dataclasses.replace(FLA.conventions, preset="fla-head-first"),
    layout="bhld",
    signs=(),
)
