"""The ways people get exact top-k attention wrong, and how close a choice is."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn import patterns
from refattn.definitions.dense_steps import Steps
from refattn.definitions.key_sets import as_mask, with_keys
from refattn.mistakes.dense_old import mutations_for
from refattn.records import Mutation, Result

__all__ = ["margin", "topk_mutations"]


def _logits(arguments: dict[str, Any]) -> np.ndarray:
    """(..., h, q, k) as they meet visibility; -inf where nothing is seen, inf for NaN."""
    steps = Steps({**{n: arguments[n] for n in "qkv"}, **_shared(arguments)})
    with np.errstate(all="ignore"):
        steps.forward()
    logits = np.where(steps.seen & steps.real, steps.logits, -np.inf)
    return np.where(np.isnan(logits), np.inf, logits)


def _chosen(arguments: dict[str, Any]) -> np.ndarray:
    """The right indices."""
    if arguments.get("indices") is not None:
        lead = np.broadcast_shapes(*(np.shape(arguments[n])[:-3] for n in "qkv"))
        own = np.asarray(arguments["indices"])
        return np.broadcast_to(own, (*lead, *np.shape(arguments["q"])[-3:-1], own.shape[-1]))
    logits = _logits(arguments)
    order = np.argsort(-logits, axis=-1, kind="stable")[..., : arguments["count"]]
    return np.where(np.take_along_axis(logits, order, axis=-1) == -np.inf, -1, order)


def margin(arguments: dict[str, Any]) -> float:
    """Distance of the last chosen logit from the first one left out, relative to the largest of the row; least of all rows.

    Whole numbers in q and k make products that are exact in any order, so that equal ones are equal everywhere: no limit.
    """
    whole = all(np.all(arguments[n] == np.round(arguments[n])) for n in "qk")
    count = arguments.get("count")
    if count is None or whole or count == np.shape(arguments["k"])[-2]:
        return math.inf
    logits = -np.sort(-_logits(arguments), axis=-1)
    size = np.max(np.where(np.isfinite(logits), np.abs(logits), 0), axis=-1, initial=0.0)
    with np.errstate(invalid="ignore"):
        gaps = (logits[..., count - 1] - logits[..., count]) / np.where(size > 0, size, 1)
    return float(np.min(np.where(np.isneginf(logits[..., count]), math.inf, gaps), initial=math.inf))


def _shared(arguments: dict[str, Any]) -> dict[str, Any]:
    return {n: x for n, x in arguments.items() if n not in ("q", "k", "v", "count", "indices")}


def _as_dense(arguments: dict[str, Any], indices: np.ndarray | None = None) -> dict[str, Any]:
    """Arguments of dense attention with the chosen keys as a pattern."""
    indices = _chosen(arguments) if indices is None else indices
    arrays = {n: arguments[n] for n in "qkv"}
    return {**arrays, **with_keys(_shared(arguments), as_mask(indices, np.shape(arguments["k"])[-2]))}


def _mistake(
    class_: str,
    says: str,
    change: Callable[[dict[str, Any], np.ndarray], tuple[dict[str, Any], np.ndarray] | None],
    *,
    forward: bool = True,
) -> Mutation:
    """``change`` gets the arguments and the right indices, and gives those of dense attention and the indices it takes."""

    def run(arguments: dict[str, Any]) -> tuple[Steps, np.ndarray, Result] | None:
        right = _chosen(arguments)
        changed = change(arguments, right)
        if changed is None:
            return None
        with np.errstate(all="ignore"):
            wrong, expected = Steps(changed[0]), Steps(_as_dense(arguments, right))
            result = wrong.forward()
            if np.array_equal(result.output, expected.forward().output, equal_nan=True):
                return None
        return wrong, changed[1], result

    def mistaken_forward(arguments: dict[str, Any]) -> Result | None:
        found = run(arguments)
        return None if found is None else Result(**found[2].fields, indices=found[1])

    def gradients(arguments: dict[str, Any], cotangents: dict[str, Any]) -> dict[str, Any] | None:
        found = run(arguments)
        if found is None:
            return None
        with np.errstate(all="ignore"):
            return {n: g for n, g in found[0].backward(cotangents).items() if arguments.get(n) is not None}

    return Mutation(class_, says, forward=mistaken_forward if forward else None, gradients=gradients)


def _searched(arguments: dict[str, Any], **changes: Any) -> np.ndarray:
    """What the search finds with options changed; None takes one away."""
    changed = {n: x for n, x in {**arguments, **changes}.items() if x is not None}
    return _chosen(changed)


def _found_without(name: str) -> Callable[..., Any]:
    """The search leaves an option out, the softmax does not."""

    def change(arguments: dict[str, Any], right: np.ndarray) -> Any:
        if arguments.get("count") is None or arguments.get(name) is None or arguments.get(name) is False:
            return None
        found = _searched(arguments, **{name: None})
        return _as_dense(arguments, found), found

    return change


def _count_changed(more: int) -> Callable[..., Any]:
    def change(arguments: dict[str, Any], right: np.ndarray) -> Any:
        count = arguments.get("count")
        if count is None or not 1 <= count + more <= np.shape(arguments["k"])[-2]:
            return None
        found = _searched(arguments, count=count + more)
        return _as_dense(arguments, found), found

    return change


def _smallest(arguments: dict[str, Any], right: np.ndarray) -> Any:
    """The search looks for the smallest q.k."""
    if arguments.get("count") is None:
        return None
    found = _searched(arguments, q=-np.asarray(arguments["q"], dtype=np.float64))
    return _as_dense(arguments, found), found


def _last_tie(arguments: dict[str, Any], right: np.ndarray) -> Any:
    """Ties to the higher index: the keys are searched from the end."""
    if arguments.get("count") is None or any(arguments.get(n) is not None for n in _PLACED):
        return None
    n_k = np.shape(arguments["k"])[-2]
    found = _searched(arguments, k=np.asarray(arguments["k"])[..., ::-1, :], v=np.asarray(arguments["v"])[..., ::-1, :])
    found = np.where(found < 0, -1, n_k - 1 - found)
    return _as_dense(arguments, found), found


_PLACED = (
    "mask", "pattern", "causal", "window", "query_lengths", "key_lengths", "query_segments", "key_segments", "bias",
    "alibi_slopes", "score_mod",
)  # fmt: skip
"""Options that tell one key from another: without them the search may run from the end."""


def _threshold(arguments: dict[str, Any], right: np.ndarray) -> Any:
    """Every key at least as large as the smallest chosen one is kept: more than count of them where there are ties."""
    if arguments.get("count") is None:
        return None
    n_k = np.shape(arguments["k"])[-2]
    logits = _logits(arguments)
    smallest = np.where(as_mask(right, n_k), logits, np.inf).min(-1, keepdims=True)
    kept = logits >= smallest
    extra = {**{n: arguments[n] for n in "qkv"}, **_shared(arguments)}
    given = extra.get("pattern")
    extra["pattern"] = patterns.dense(kept) if given is None else given & patterns.dense(kept)
    return extra, right


def _not_renormalised(arguments: dict[str, Any], right: np.ndarray) -> Any:
    """The weights of a softmax over all keys, the others set to 0: dropout without rescaling says the same."""
    if arguments.get("dropout_mask") is not None:
        return None
    plain = {**{n: arguments[n] for n in "qkv"}, **_shared(arguments)}
    return {**plain, "dropout_mask": as_mask(right, np.shape(arguments["k"])[-2]), "dropout_rate": 0.0}, right


def _first_head(arguments: dict[str, Any], right: np.ndarray) -> Any:
    found = np.broadcast_to(right[..., :1, :, :], right.shape)
    return _as_dense(arguments, found), found


def _last_key(arguments: dict[str, Any], right: np.ndarray) -> Any:
    """-1 counts from the end, as it does in Python."""
    found = np.where(right < 0, np.shape(arguments["k"])[-2] - 1, right)
    return _as_dense(arguments, found), found


def _all_keys(arguments: dict[str, Any], right: np.ndarray) -> Any:
    return {**{n: arguments[n] for n in "qkv"}, **_shared(arguments)}, right


# Mistakes that change which keys are largest would change the choice too: those are written out above.
_MOVING = (
    "causal_other", "causal_drop", "causal_strict", "causal_inverted", "window_drop", "window_swapped", "window_plus1",
    "window_edge", "mask_or_causal", "mask_drop", "pattern_drop", "segments_wrong", "keep_inverted", "keep_additive",
    "mask_bool_cast", "mask_stride", "tail_unmasked", "tail_dropped", "tail_garbage", "bias_drop", "bias_scaled", "bias_nooffset",
    "alibi_drop", "alibi_geom", "alibi_off1", "alibi_nooffset", "alibi_signed", "score_mod_drop", "d_truncated", "swap_kv",
    "gqa_tile", "gqa_axis", "gqa_grad_nosum", "scale_inv", "cap_after_bias", "cap_formula", "softmax_wrong_axis",
)  # fmt: skip

topk_mutations: tuple[Mutation, ...] = (
    _mistake("topk_ties", "equal logits go to the higher index", _last_tie),
    _mistake("topk_ties", "every key as large as the last chosen one is kept", _threshold),
    _mistake("topk_count", "one key too many is chosen", _count_changed(1)),
    _mistake("topk_count", "one key too few is chosen", _count_changed(-1)),
    _mistake("topk_smallest", "the smallest logits are chosen", _smallest),
    _mistake("topk_before_mask", "keys are chosen before the mask takes some away", _found_without("mask")),
    _mistake("topk_before_mask", "keys are chosen before causal takes some away", _found_without("causal")),
    _mistake("topk_before_bias", "keys are chosen before the bias is added", _found_without("bias")),
    _mistake("topk_not_renormalised", "the softmax runs over all keys, then some are dropped", _not_renormalised),
    _mistake("topk_heads", "the keys of head 0 are used for all", _first_head),
    _mistake("topk_padding", "-1 is read as the last key", _last_key),
    _mistake("topk_ignored", "all keys are used", _all_keys),
    _mistake("topk_grad", "the backward runs over all keys", _all_keys, forward=False),
    *mutations_for(_as_dense, exclude=_MOVING),
)
