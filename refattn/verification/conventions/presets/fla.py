"""flash-linear-attention: chunk and recurrent functions, (b, t, h, d)."""

from refattn.verification.conventions.presets.recurrences import BLOCK, recurrent

__all__ = ["PRESET"]

PRESET = recurrent(
    "fla",
    "flash-linear-attention's functions",
    ("gated_linear_attention", "delta_rule_attention"),
    names={
        "decay": "g",
        "channel_decay": "gk",
        "head_decay": "g_gamma",
        "beta": "beta",
        "scale": "scale",
        "state": "initial_state",
    },
    signs=(frozenset({"initial_state", "output_final_state"}),),
    conventions={"head_map": "repeat"},
    always={"chunk_size": BLOCK},
)
