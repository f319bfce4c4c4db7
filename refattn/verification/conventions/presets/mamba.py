"""Mamba-2's chunk scan: x, dt, A, B, C."""

from refattn.verification.conventions.presets.recurrences import BLOCK, recurrent

__all__ = ["PRESET"]

PRESET = recurrent(
    "mamba",
    "mamba_chunk_scan_combined",
    ("ssd_attention",),
    arrays={"x": "x", "dt": "dt", "a": "A", "b": "B", "c": "C"},
    names={
        "skip": "D",
        "dt_bias": "dt_bias",
        "dt_softplus": "dt_softplus",
        "dt_limit": "dt_limit",
        "state": "initial_states",
    },
    signs=(frozenset({"dt", "A", "B", "C"}),),
    conventions={"head_map": "repeat", "state_layout": "ed"},
    always={"chunk_size": BLOCK},
)
