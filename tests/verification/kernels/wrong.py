"""Wrong kernels over all mechanisms: whole, on one path, in the backward alone, in one array, two at once, in their precision."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from verification.kernels import Kernel, kernel

__all__ = ["FLAGS", "WRONG", "Wrong"]

Arrays = tuple[Any, ...]

FLAGS: dict[str, list[tuple[str, dict[str, Any], str]]] = {  # class, flags, where it shows: "both" or "backward"
    "adaptive_span_attention": [
        ("span_not_renormalised", {"finished": True}, "both"),
        ("span_ramp_grad", {"additive": True}, "backward"),
    ],
    "bigbird_attention": [
        ("bigbird_random_shared", {"one_draw": True}, "both"),
        ("bigbird_wrap", {"wrap": True}, "both"),
    ],
    "compressive_attention": [
        ("memory_order", {"memory_first": True}, "both"),
        ("gradient_into_memory", {"into_memory": True}, "backward"),
        ("memory_weights_detached", {"weights_detached": True}, "backward"),
    ],
    "efficient_attention": [
        ("efficient_key_axis", {"key_axis": -1}, "both"),
        ("delta_missing", {"column_term": False}, "backward"),
    ],
    "etc_attention": [
        ("etc_label_sign", {"sign": -1}, "both"),
        ("etc_label_grad", {"labels_to_queries": False}, "backward"),
    ],
    "linear_attention": [
        ("norm_future", {"future_sum": True}, "both"),
        ("state_cotangent", {"state_ignored": True}, "backward"),
    ],
    "linformer_attention": [
        ("linformer_shared", {"shared_table": True}, "both"),
        ("delta_missing", {"row_term_missing": True}, "backward"),
    ],
    "local_attention": [
        ("local_bounds", {"one_more": True}, "both"),
        ("local_wrap", {"wraps": True}, "both"),
    ],
    "longformer_attention": [
        ("global_twice", {"one_softmax_twice": True}, "both"),
        ("global_grad_drop", {"rows_without_gradient": True}, "backward"),
    ],
    "lsh_attention": [
        ("lsh_duplicates", {"no_counts": True}, "both"),
        ("lsh_look_back_missing", {"no_look_back": True}, "both"),
        ("lsh_key_not_normalised", {"plain_keys": True}, "both"),
        ("lsh_round_weights_constant", {"constant_weights": True}, "backward"),
        ("lsh_key_role_missing", {"no_key_role": True}, "backward"),
    ],
    "multi_head_attention": [
        ("extra_key_masked", {"extra_hidden": True}, "both"),
        ("projection_bias_drop", {"no_b_v": True}, "both"),
        ("role_grad_dropped", {"one_role": True}, "backward"),
    ],
    "nystrom_attention": [
        ("nystrom_pad_behind", {"zeros_behind": True}, "both"),
        ("nystrom_scale", {"batch_scale": True}, "both"),
        ("nystrom_scale_grad", {"scale_constant": True}, "backward"),
    ],
    "performer_attention": [
        ("performer_key_maximum", {"own_maximum": True}, "both"),
        ("performer_length_grad", {"length_constant": True}, "backward"),
    ],
    "routing_attention": [
        ("routing_sum_not_mean", {"summed": True}, "both"),
        ("routing_rank_leak", {"by_rank": True}, "both"),
        ("grad_overwritten", {"overwritten": True}, "backward"),
    ],
    "scaled_dot_product_attention": [
        ("causal_other", {"diagonal": lambda q, k: 0}, "both"),
        ("gqa_tile", {"key_head": lambda i, h, g: i % g}, "both"),
        ("scale_padded", {"scale_of": lambda d: 2.0 ** (-0.5 * np.ceil(np.log2(d)))}, "both"),
        ("window_plus1", {"reach": 1}, "both"),
        ("cap_after_mask", {"cap_after_mask": True}, "both"),
        ("tail_unmasked", {"tail_counts": True}, "both"),
        ("sink_drop", {"drop_sinks": True}, "both"),
        ("max_clamped0", {"start": 0.0}, "both"),
        ("gqa_grad_nosum", {"sum_over_group": False}, "backward"),
    ],
    "sinkhorn_attention": [
        ("sinkhorn_transposed", {"transposed": True}, "both"),
        ("sinkhorn_grad", {"constant_sort": True}, "backward"),
    ],
    "sparse_transformer_attention": [
        ("sparse_summary_columns", {"first_columns": True}, "both"),
        ("sparse_local_off1", {"off_by_one": True}, "both"),
    ],
    "synthesizer_attention": [
        ("synthesizer_tiling", {"exchanged": True}, "both"),
        ("synthesizer_mixture_plain", {"plain_shares": True}, "both"),
        ("synthesizer_fixed", {"fixed_tables": True}, "backward"),
    ],
    "talking_heads_attention": [
        ("th_transposed", {"transposed": True}, "both"),
        ("th_mask_before_projection", {"mask_before": True}, "both"),
        ("th_delta", {"row_term_of_output": True}, "backward"),
    ],
    "topk_attention": [
        ("topk_count", {"one_more": True}, "both"),
        ("topk_ties", {"ties_up": True}, "both"),
        ("topk_grad", {"unmasked_backward": True}, "backward"),
    ],
    "transformer_xl_attention": [
        ("rel_shift_slice", {"slice_off": True}, "both"),
        ("xl_same_length_off1", {"one_more": True}, "both"),
        ("xl_uw_swapped", {"swap": True}, "both"),
        ("xl_table_gradient", {"table_without_bias": True}, "backward"),
    ],
}


@dataclasses.dataclass(frozen=True)
class Wrong:
    """``classes`` that must be among the first explanations (all of them), and how the kernel is made."""

    mechanism: str
    kind: str
    classes: tuple[str, ...]
    make: Callable[[], Kernel]
    gradients: bool = True
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.mechanism.removesuffix('_attention')}-{self.kind}-{'+'.join(self.classes)}"


# ---------------------------------------------------------------------- what is composed


def on_a_path(wrong: Kernel, right: Kernel, holds: Callable[[Arrays, dict[str, Any]], bool]) -> Kernel:
    """The mistake is made in some calls alone."""

    def choose(name: str, arrays: Arrays, options: dict[str, Any]) -> Any:
        return getattr(wrong if holds(arrays, options) else right, name)

    @functools.wraps(right.forward)
    def forward(*arrays: Any, **options: Any) -> Any:
        return choose("forward", arrays, options)(*arrays, **options)

    @functools.wraps(right.backward)
    def backward(d_output: Any, *arrays: Any, **options: Any) -> Any:
        return choose("backward", arrays, options)(d_output, *arrays, **options)

    return dataclasses.replace(right, forward=forward, backward=backward)


def in_backward(wrong: Kernel, right: Kernel) -> Kernel:
    """The backward computes its forward anew, and that one is wrong."""
    return dataclasses.replace(right, backward=wrong.backward)


def in_one_array(wrong: Kernel, right: Kernel, name: str) -> Kernel:
    """One gradient alone comes from the wrong backward."""

    @functools.wraps(right.backward)
    def backward(*arrays: Any, **options: Any) -> Any:
        return {**right.backward(*arrays, **options), name: wrong.backward(*arrays, **options)[name]}

    return dataclasses.replace(right, backward=backward)


def with_results(right: Kernel, change: Callable[[dict[str, Any]], dict[str, Any]], names: tuple[str, ...]) -> Kernel:
    """The forward's results changed."""

    @functools.wraps(right.forward)
    def forward(*arrays: Any, **options: Any) -> Any:
        result = right.forward(*arrays, **options)
        fields = result if isinstance(result, dict) else dict(zip(names, result, strict=False))
        return change(fields)

    return dataclasses.replace(right, forward=forward)


def odd_rows(arrays: Arrays, options: dict[str, Any]) -> bool:
    return arrays[0].shape[-2] % 2 == 1


IN_BACKWARD = ("adaptive_span", "bigbird", "efficient", "linear", "routing", "scaled_dot_product", "talking_heads")
TWO = ("bigbird", "efficient", "local", "multi_head", "performer", "talking_heads")
"""Mechanisms whose kernels are broken in these ways: what takes long in the others is left to `make mutation-score`."""

ARRAYS = {
    "compressive_attention": "x",
    "multi_head_attention": "x_q",
    "synthesizer_attention": "x",
    "lsh_attention": "v",
}
"""The gradient that alone is wrong; d_v of most."""


def _wrong() -> Iterator[Wrong]:
    for mechanism, flags in FLAGS.items():
        for name, flag, side in flags:
            yield Wrong(mechanism, "whole", (name,), functools.partial(kernel, mechanism, **flag), side == "backward")
        name, flag, _ = flags[0]
        yield Wrong(mechanism, "path", (name,), functools.partial(_on_path, mechanism, flag), gradients=False)
        short = mechanism.removesuffix("_attention")
        if short in IN_BACKWARD:
            yield Wrong(mechanism, "backward", (name,), functools.partial(_in_backward, mechanism, flag))
        if short in (*IN_BACKWARD, "compressive", "etc", "longformer", "performer", "topk"):
            array = ARRAYS.get(mechanism, "v")
            yield Wrong(mechanism, "array", (name,), functools.partial(_in_array, mechanism, flag, array))
        if short in TWO:
            second, other, side = flags[1]
            make = functools.partial(kernel, mechanism, **flag, **other)
            yield Wrong(mechanism, "two", (name, second), make, side == "backward")


def _on_path(mechanism: str, flag: dict[str, Any]) -> Kernel:
    return on_a_path(kernel(mechanism, **flag), kernel(mechanism), odd_rows)


def _in_backward(mechanism: str, flag: dict[str, Any]) -> Kernel:
    return in_backward(kernel(mechanism, **flag), kernel(mechanism))


def _in_array(mechanism: str, flag: dict[str, Any], array: str) -> Kernel:
    return in_one_array(kernel(mechanism, **flag), kernel(mechanism), array)


def _lse_turned(mechanism: str) -> Kernel:
    return with_results(
        kernel(mechanism), lambda f: {**f, "lse": np.ascontiguousarray(f["lse"].swapaxes(-1, -2))}, ("output", "lse")
    )


def _batch_crossed(mechanism: str) -> Kernel:
    return with_results(kernel(mechanism), lambda f: {**f, "output": f["output"][::-1].copy()}, ("output", "lse"))


def _base_2(mechanism: str) -> Kernel:
    return with_results(
        kernel(mechanism), lambda f: {**f, "lse": f["lse"] / np.log(2).astype("float32")}, ("output", "lse")
    )


def _narrow(mechanism: str) -> Kernel:
    """Operands rounded to bfloat16 in a float32 call."""
    right = kernel(mechanism)

    def cut(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or x.dtype != np.float32 or x.ndim < 3:
            return x
        return ((x.view(np.uint32) + np.uint32(1 << 15)) & ~np.uint32((1 << 16) - 1)).view(np.float32)

    @functools.wraps(right.forward)
    def forward(*arrays: Any, **options: Any) -> Any:
        return right.forward(*map(cut, arrays), **options)

    return dataclasses.replace(right, forward=forward)


DENSE = "scaled_dot_product_attention"
WITH_LSE = (
    "bigbird_attention",
    "local_attention",
    "scaled_dot_product_attention",
    "sparse_transformer_attention",
    "topk_attention",
)

WRONG = [
    *_wrong(),
    *(Wrong(m, "layout", ("lse_layout",), functools.partial(_lse_turned, m), False) for m in WITH_LSE),
    *(Wrong(m, "layout", ("lse_base2",), functools.partial(_base_2, m), False) for m in WITH_LSE),
    Wrong(DENSE, "layout", ("batch_crossed",), functools.partial(_batch_crossed, DENSE), False),
    *(
        Wrong(m, "precision", ("narrow_products",), functools.partial(_narrow, m), False)
        for m in (DENSE, "bigbird_attention")
    ),
]
