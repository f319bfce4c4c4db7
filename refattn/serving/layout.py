"""Which axis of an argument or a result is a length, and the axes of the served forms.

Axes are written by letters, those of queries ``q``, those of keys ``k``; a leading ``b`` says one entry for each sequence.  A form
has the length axis first: q (..., h, q, d) is served as (t, h, d).  What has no such letter is the same for all sequences.
"""

from typing import Any

from refattn.arrays import is_array, namespace

__all__ = ["DROPPED", "FILL", "REFUSED", "axes_of", "key_side", "plain_axes", "result_axes", "served", "unserved"]

_SOFTMAX = {
    "q": "h q d", "k": "g k d", "v": "g k e", "query_segments": "q", "key_segments": "k", "query_lengths": "b", "key_lengths": "b",
    "align": "b", "indices": "n q c", "block_indices": "n q c",
}  # fmt: skip
_TOKENS = {
    "q": "h q d", "k": "g q d", "v": "g q e", "decay": "g q", "channel_decay": "g q d", "beta": "g q", "erase_key": "g q d",
    "remove": "g q d", "replace": "g q d", "reset": "q", "state": "b g d e", "lengths": "b",
}  # fmt: skip
_ARGUMENTS: dict[str, dict[str, str]] = {
    "scaled_dot_product_attention": _SOFTMAX,
    "multi_head_attention": _SOFTMAX | {"x_q": "q m", "x_k": "k m", "x_v": "k m"},
    "topk_attention": _SOFTMAX,
    "local_attention": _SOFTMAX,
    "sparse_transformer_attention": _SOFTMAX,
    "mla_attention": _SOFTMAX | {"q_nope": "h q d", "q_rope": "h q r", "latent": "k l", "k_rope": "k r"},
    "deepseek_sparse_attention": _SOFTMAX | {"q_index": "n q i", "k_index": "k i", "w_index": "n q"},
    "native_sparse_attention": _SOFTMAX | {"gates": "3 h q", "k_window": "g k d", "v_window": "g k e"},
    "moba_attention": _SOFTMAX,
    "compressed_sparse_attention": _SOFTMAX | {"kv": "k d"},
    "forgetting_attention": _SOFTMAX | {"log_forget": "h k"},
    "differential_attention": _SOFTMAX | {"lam": "h q"},
    "sigmoid_attention": _SOFTMAX,
    "stick_breaking_attention": _SOFTMAX,
    "additive_attention": _SOFTMAX,
    "quantized_attention": _SOFTMAX,
    "linear_attention": _SOFTMAX | {"state": "b h d e", "normalizer": "b h d"},
    "gated_linear_attention": _TOKENS,
    "delta_rule_attention": _TOKENS,
    "rwkv7_attention": _TOKENS,
    "ssd_attention": {"x": "h q e", "dt": "h q", "b": "g q d", "c": "g q d", "state": "b h d e", "lengths": "b"},
}
"""Mechanism -> argument -> axes of the plain call, batch axes left out."""

REFUSED = (
    *(
        "mask",
        "bias",
        "dropout_mask",
        "dropout_rate",
        "keep_weights",
        "keep_index_scores",
        "keep_importance",
        "keep_branches",
    ),
    *("entries", "entry_indices", "k_compressed", "v_compressed", "descale_block"),
)
"""Options that speak of pairs of a query and a key, or have a length that is neither."""

_RESULTS = {
    "output": "h q e",
    "lse": "h q",
    "lses": "2 h q",
    "remainder": "h q",
    "indices": "n q c",
    "block_indices": "n q c",
}
_STATES = {"state": "b g d e", "normalizer": "b h d"}
DROPPED = ("index_scores", "importance", "outputs", "logits", "weights")
"""Results over queries and keys, which forms leave out."""

FILL = {"lse": -float("inf"), "lses": -float("inf"), "indices": -1, "block_indices": -1}
"""What stands in padding, where it is not 0."""


def plain_axes(mechanism: str) -> dict[str, str]:
    """Axes of the arguments of a mechanism that has lengths; an error where it has no served form."""
    if mechanism not in _ARGUMENTS:
        raise ValueError(f"{mechanism} has no packed and no paged form; these have: {', '.join(_ARGUMENTS)}")
    return _ARGUMENTS[mechanism]


def axes_of(name: str, value: Any, table: dict[str, str]) -> str:
    """Axes of an argument as it was passed; "" where it is the same for all sequences (a number, a table of the layer)."""
    axes = table.get(name, "")
    if name == "lam" and is_array(value) and value.ndim == 0:
        return ""
    if axes == "b" and not hasattr(value, "__len__") and not (is_array(value) and value.ndim):
        return ""
    return axes


def result_axes(mechanism: str, name: str) -> str:
    """Axes of a result of the plain call."""
    if name == "output" and mechanism == "multi_head_attention":
        return "q m"
    return (_RESULTS | _STATES)[name]


def key_side(mechanism: str) -> tuple[str, ...]:
    """Arguments that lie in pages."""
    return tuple(n for n, axes in plain_axes(mechanism).items() if "k" in axes.split())


def _order(axes: str, last: bool) -> list[int]:
    """For each axis of the served array, its place in the plain one: the length comes first, behind a counted axis."""
    letters = axes.split()
    at = next(i for i, c in enumerate(letters) if c in "qk")
    if last:
        return list(range(len(letters)))
    others = [i for i in range(len(letters)) if i != at]
    counted = 1 if letters[0].isdigit() else 0
    return [*others[:counted], at, *others[counted:]]


def length_axis(axes: str, name: str = "") -> int:
    """Where the served array has its length."""
    order = _order(axes, name in ("lse", "lses"))
    return next(i for i, place in enumerate(order) if axes.split()[place] in "qk")


def served(x: Any, axes: str, name: str = "") -> Any:
    """An array of the plain call (without batch axes) with the axes of the form; lse keeps (h, t)."""
    return _permuted(x, _order(axes, name in ("lse", "lses")))


def unserved(x: Any, axes: str, name: str = "") -> Any:
    """The other way round."""
    order = _order(axes, name in ("lse", "lses"))
    return _permuted(x, [order.index(i) for i in range(len(order))])


def _permuted(x: Any, order: list[int]) -> Any:
    return x if order == sorted(order) else namespace(x).permute_dims(x, tuple(order))
