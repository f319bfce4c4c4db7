"""Which mistakes of softmax attention are about one of its options, for mechanisms that do not have it."""

__all__ = ["about"]

_OPTIONS = {
    "alibi_slopes": ("alibi_drop", "alibi_geom", "alibi_nooffset", "alibi_off1", "alibi_signed"),
    "bias": ("bias_drop", "bias_grad", "bias_nooffset", "bias_scaled"),
    "causal": ("causal_bwd_other", "causal_drop", "causal_inverted", "causal_other", "causal_strict"),
    "dropout": ("drop_bwd_scale", "drop_ignored", "drop_mask_mismatch", "drop_rowsum", "drop_scale", "drop_softmax_bwd"),
    "head_map": ("gqa_axis", "gqa_grad_nosum", "gqa_tile"),
    "lengths": ("lengths_drop", "lengths_off1", "tail_garbage"),
    "lse": ("dlse_ignored", "lse_base2", "lse_layout", "lse_partial_max", "merge_empty"),
    "mask": ("keep_additive", "keep_inverted", "mask_bool_cast", "mask_drop", "mask_or_causal", "mask_stride", "none_mask"),
    "pattern": ("pattern_drop",),
    "scale": (
        "no_scale", "qk_overflow", "scale_default_missing", "scale_dmodel", "scale_grad", "scale_ignored", "scale_inv",
        "scale_padded", "scale_twice", "scale_value",
    ),
    "score_mod": ("score_mod_drop",),
    "segments": ("segments_wrong",),
    "sinks": ("sink_drop", "sink_grad", "sink_heads", "sink_lse", "sink_twice", "sink_unshifted"),
    "softcap": ("cap_after_bias", "cap_after_mask", "cap_before_scale", "cap_bwd_drop", "cap_drop", "cap_formula"),
    "window": ("window_drop", "window_edge", "window_plus1", "window_swapped"),
}  # fmt: skip


def about(*options: str) -> tuple[str, ...]:
    """Classes of the mistakes that only a mechanism with one of these options can have."""
    return tuple(class_ for option in options for class_ in _OPTIONS[option])
