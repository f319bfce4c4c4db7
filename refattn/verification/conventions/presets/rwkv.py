"""RWKV-LM's RWKV-7: r, w, k, v, a, b with the raw w."""

from refattn.verification.conventions.presets.recurrences import recurrent

__all__ = ["PRESET"]

PRESET = recurrent(
    "rwkv",
    "RWKV-LM's RWKV-7",
    ("rwkv7_attention",),
    arrays={"q": "r", "k": "k", "v": "v"},
    names={"channel_decay": "w", "remove": "a", "replace": "b", "state": "state"},
    signs=(frozenset({"r", "w", "k", "v", "a", "b"}),),
    conventions={"state_layout": "ed", "gate": "exp", "channels": "equal"},
    by_name=True,
)
