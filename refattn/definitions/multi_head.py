"""Multi-head attention by its definition: token by token and head by head, in float64."""

from typing import Any

import numpy as np

from refattn.definitions import dense_loop as dense_definition
from refattn.records import Result

__all__ = ["definition", "with_extra_keys"]

_VISIBILITY = (
    "mask",
    "pattern",
    "causal",
    "align",
    "window",
    "query_lengths",
    "key_lengths",
    "query_segments",
    "key_segments",
)


def definition(
    x_q: np.ndarray,
    x_k: np.ndarray | None = None,
    x_v: np.ndarray | None = None,
    *,
    w_q: np.ndarray,
    w_k: np.ndarray,
    w_v: np.ndarray,
    w_o: np.ndarray,
    b_q: np.ndarray | None = None,
    b_k: np.ndarray | None = None,
    b_v: np.ndarray | None = None,
    b_o: np.ndarray | None = None,
    extra_key: np.ndarray | None = None,
    extra_value: np.ndarray | None = None,
    zero_attention: bool = False,
    **shared: Any,
) -> Result:
    """Token by token and head by head: projections by dot products, attention by its own definition, heads added one by one.

    The extra keys are ordinary keys of it: the mask is written out and set for them, the bias (with ALiBi) is 0 there.
    """
    x_k = x_q if x_k is None else x_k
    x_v = x_k if x_v is None else x_v

    def heads(x: np.ndarray, w: np.ndarray, b: np.ndarray | None) -> np.ndarray:
        m, n, channels = w.shape
        made = np.zeros((*x.shape[:-2], n, x.shape[-2], channels))
        for at in np.ndindex(x.shape[:-1]):
            for head in range(n):
                row = sum((x[at][c] * w[c, head] for c in range(m)), np.zeros(channels))
                made[(*at[:-1], head, at[-1])] = row if b is None else row + b[head]
        return made

    with np.errstate(all="ignore"):
        q, k, v = heads(x_q, w_q, b_q), heads(x_k, w_k, b_k), heads(x_v, w_v, b_v)
        k, v, shared = with_extra_keys(q, k, v, extra_key, extra_value, zero_attention, shared)
        result = dense_definition.definition(q, k, v, **shared)
        rows, lead = q.shape[-2], result.lse.shape[:-2]
        output = np.zeros((*lead, rows, w_o.shape[-1]))
        for at in np.ndindex(*lead, rows):
            for head in range(w_o.shape[0]):
                for channel in range(w_o.shape[1]):
                    output[at] += result.output[(*at[:-1], head, at[-1], channel)] * w_o[head, channel]
            output[at] += 0.0 if b_o is None else b_o
        real = dense_definition.visible_pairs(lead, 1, rows, 1, query_lengths=shared.get("query_lengths"))
        output[~real[..., 0, :, 0]] = 0.0
    return Result(**{**result.fields, "output": output})


def with_extra_keys(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    extra_key: np.ndarray | None,
    extra_value: np.ndarray | None,
    zero_attention: bool,
    shared: dict[str, Any],
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """k and v with the extra and the zero key as ordinary ones, and the shared options in which nothing but a cap touches them."""
    rows: list[Any] = [] if extra_key is None else [(extra_key, extra_value)]
    rows += [(np.zeros((k.shape[-3], k.shape[-1])), np.zeros((v.shape[-3], v.shape[-1])))] * bool(zero_attention)
    if not rows:
        return k, v, shared
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    (heads, count), keys = q.shape[-3:-1], k.shape[-2]
    for key, value in rows:
        k = np.concatenate([k, np.broadcast_to(np.expand_dims(key, -2), (*k.shape[:-2], 1, k.shape[-1]))], axis=-2)
        v = np.concatenate([v, np.broadcast_to(np.expand_dims(value, -2), (*v.shape[:-2], 1, v.shape[-1]))], axis=-2)
    beside = [(0, 0)] * (len(lead) + 2) + [(0, len(rows))]
    asked = {n: shared[n] for n in _VISIBILITY if n in shared}
    visible = dense_definition.visible_pairs(lead, heads, count, keys, **asked)
    changed = {n: x for n, x in shared.items() if n not in _VISIBILITY}
    changed["mask"] = np.pad(visible, beside, constant_values=True)
    changed["query_lengths"] = shared.get("query_lengths")

    bias = np.zeros((*lead, heads, count, keys))
    if shared.get("bias") is not None:
        bias = bias + shared["bias"]
    slopes = changed.pop("alibi_slopes", None)
    if slopes is not None:
        lengths = (shared.get("query_lengths"), shared.get("key_lengths"))
        offset = dense_definition.offsets(lead, count, keys, shared.get("align"), *lengths)[..., None, None, None]
        bias = bias - slopes[:, None, None] * np.abs(np.arange(count)[:, None] + offset - np.arange(keys))
    changed["bias"] = np.pad(bias, beside)
    kept = shared.get("dropout_mask")
    if kept is not None and kept.shape[-1] != keys + len(rows):
        full = np.broadcast_to(kept, (*lead, heads, count, keys))
        changed["dropout_mask"] = np.pad(full, beside, constant_values=True)
    if shared.get("score_mod") is not None:
        changed["score_mod"] = _among(shared["score_mod"], keys)
    return k, v, changed


def _among(score_mod: Any, keys: int) -> Any:
    """The score_mod on the first keys, no change of the others."""

    def modified(logits: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return np.where(j < keys, score_mod(logits, b, h, i, np.minimum(j, keys - 1)), logits) if keys else logits

    return modified
