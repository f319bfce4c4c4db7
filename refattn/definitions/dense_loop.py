"""Softmax attention by its definition: one row of the score matrix at a time, in float64.

This is the second, independent path of every mechanism that is one softmax over keys.  It loops over (batch, head,
query), writes each step down as the formulas do, and shares nothing with the fast forward but a pattern's ``visible``::

    logits = scale q.k -> score_mod -> softcap -> + bias + ALiBi -> visibility -> sinks -> softmax -> dropout -> . v

Axes: ``...`` any leading batch axes, h query head, g key/value head, q and k positions, d and e channels, n sinks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from refattn.records import Result

__all__ = ["definition", "offsets", "visible_pairs"]

_Lengths = int | Sequence[int] | np.ndarray | None


def definition(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    pattern: Any = None,
    bias: np.ndarray | None = None,
    causal: bool = False,
    align: Any = None,
    window: tuple[int | None, int | None] | None = None,
    query_lengths: _Lengths = None,
    key_lengths: _Lengths = None,
    query_segments: np.ndarray | None = None,
    key_segments: np.ndarray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    softcap_after_bias: bool = False,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    lse_includes_sinks: bool = True,
    dropout_mask: np.ndarray | None = None,
    dropout_rate: float = 0.0,
    score_mod: Callable[..., Any] | None = None,
    keep_weights: bool = False,
    head_map: str = "repeat",
) -> Result:
    """Scaled dot-product attention with every shared option, slowly.

    ``o_i = sum_j w_ij v_j`` with ``w_ij = exp(s_ij - lse_i)`` over the keys that row i may see, where ``s`` are the
    logits described above and ``lse_i = ln(sum_j exp(s_ij) + sum_n exp(sink_n))``.

    Parameters
    ----------
    q : (..., h, q, d)
    k : (..., g, k, d)
    v : (..., g, k, e)
        Arrays; query head i uses key head i // (h / g), with ``head_map="tile"`` i % g.
    mask : bool, broadcasts to (..., h, q, k)
        True = may attend; joined with ``pattern``, ``causal``, ``window``, lengths and segments by "and".
    bias : broadcasts to (..., h, q, k)
        Added to the logits; -inf hides the pair before any cap, as -inf from ``score_mod`` does.
    align : "upper_left", "lower_right", int or ints per batch
        Where query 0 stands on the key axis; see :func:`offsets`.
    softcap : float
        ``c tanh(logits / c)``, around ``logits + bias + ALiBi`` with ``softcap_after_bias``.
    sinks : (h,) or (h, n)
        Logits that take probability and give nothing; left out of the lse by ``lse_includes_sinks=False``.
    dropout_mask : bool, broadcasts to (..., h, q, k)
        Kept weights are multiplied by 1 / (1 - dropout_rate) after the softmax.
    score_mod : callable (logits, b, h, i, j) -> logits
        Called once per row with arrays of shape (k,); b counts the leading axes flat.
    keep_weights : bool
        Also return ``weights`` (after dropout) and ``logits`` (as they meet visibility), both (..., h, q, k).

    Returns
    -------
    Result
        ``output`` (..., h, q, e) and ``lse`` (..., h, q), float64.  A row without keys gives output 0 and lse -inf (the
        logsumexp of its sinks, where the lse includes them); a row beyond ``query_lengths`` output 0 and lse -inf.

    Raises
    ------
    ValueError
        If ``align`` is missing where it is needed, or the head counts do not divide.
    TypeError
        If ``mask`` or ``dropout_mask`` is not bool.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.
    """
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    (heads, rows, channels), (groups, columns) = q.shape[-3:], k.shape[-3:-1]
    if heads % groups if groups else heads:
        raise ValueError(f"q has {heads} heads and k has {groups}: expected a multiple")
    q, k, v = (np.broadcast_to(x, lead + x.shape[-3:]) for x in (q, k, v))
    whole = (*lead, heads, rows, columns)

    visible = visible_pairs(
        lead, heads, rows, columns, mask=mask, pattern=pattern, causal=causal, align=align, window=window,
        query_lengths=query_lengths, key_lengths=key_lengths, query_segments=query_segments, key_segments=key_segments,
    )  # fmt: skip
    real_rows = _per_batch("query_lengths", rows if query_lengths is None else query_lengths, lead)
    if scale is None:
        factor = channels**-0.5 if channels else 1.0
    else:
        factor = _number(scale)
    cap = None if softcap is None else _number(softcap)
    bias = None if bias is None else np.broadcast_to(np.asarray(bias, dtype=np.float64), whole)
    keep = None if dropout_mask is None else np.broadcast_to(_boolean("dropout_mask", dropout_mask), whole)
    if dropout_rate and keep is None:
        raise ValueError(f"dropout_rate is {dropout_rate}, but no dropout_mask says which weights are kept")
    if alibi_slopes is not None:
        slopes = np.asarray(alibi_slopes, dtype=np.float64)
        offset = offsets(lead, rows, columns, align, query_lengths, key_lengths)
    sink_logits = np.zeros((heads, 0)) if sinks is None else np.asarray(sinks, dtype=np.float64).reshape(heads, -1)

    output = np.zeros((*lead, heads, rows, v.shape[-1]))
    lse = np.full((*lead, heads, rows), -np.inf)
    all_weights, all_logits = np.zeros(whole), np.zeros(whole)
    j = np.arange(columns)
    with np.errstate(all="ignore"):
        for b, batch in enumerate(np.ndindex(lead)):
            for h in range(heads):
                g = h % groups if head_map == "tile" else h // (heads // groups)
                keys, values = k[batch][g], v[batch][g]
                for i in range(rows):
                    row = (*batch, h, i)
                    logits = factor * np.sum(q[row] * keys, axis=-1)
                    hidden = np.zeros(columns, dtype=bool)
                    if score_mod is not None:
                        at = (np.full(columns, n) for n in (b, h, i))
                        logits = np.broadcast_to(np.asarray(score_mod(logits, *at, j), dtype=np.float64), (columns,))
                        hidden = logits == -np.inf
                    added = np.zeros(columns)
                    if bias is not None:
                        added = added + bias[row]
                        hidden = hidden | (bias[row] == -np.inf)
                    if alibi_slopes is not None:
                        added = added - slopes[h] * np.abs(i + offset[batch] - j)
                    if cap is None:
                        logits = logits + added
                    elif softcap_after_bias:
                        logits = cap * np.tanh((logits + added) / cap)
                    else:
                        logits = cap * np.tanh(logits / cap) + added
                    logits = np.where(hidden, -np.inf, logits)
                    all_logits[row] = logits

                    if i >= real_rows[batch]:
                        continue
                    seen = visible[row] & ~hidden
                    keys_lse = _log_sum_exp(logits[seen])
                    full_lse = _log_sum_exp(np.concatenate([logits[seen], sink_logits[h]]))
                    lse[row] = full_lse if lse_includes_sinks else keys_lse
                    # Where every logit is -inf there is no probability to share out.
                    weights = np.exp(logits[seen] - full_lse) if full_lse != -np.inf else np.zeros(seen.sum())
                    if keep is not None:
                        weights = weights * keep[row][seen] / (1 - dropout_rate)
                    output[row] = np.sum(weights[:, None] * values[seen], axis=0)
                    all_weights[row][seen] = weights
    if keep_weights:
        return Result(output=output, lse=lse, weights=all_weights, logits=all_logits)
    return Result(output=output, lse=lse)


def visible_pairs(
    lead: tuple[int, ...],
    heads: int,
    rows: int,
    columns: int,
    *,
    mask: np.ndarray | None = None,
    pattern: Any = None,
    causal: bool = False,
    align: Any = None,
    window: tuple[int | None, int | None] | None = None,
    query_lengths: _Lengths = None,
    key_lengths: _Lengths = None,
    query_segments: np.ndarray | None = None,
    key_segments: np.ndarray | None = None,
) -> np.ndarray:
    """Which key each row may see, bool (..., h, q, k): everything but -inf from bias or score_mod."""
    if (query_segments is None) != (key_segments is None):
        raise ValueError("query_segments and key_segments go together: only one of them was given")
    visible = np.ones((*lead, heads, rows, columns), dtype=bool)
    if mask is not None:
        visible &= _boolean("mask", mask)
    i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    if pattern is not None:
        pattern = pattern.fit(rows, columns, batch=lead, heads=heads)
    left, right = (None, None) if window is None else window
    offset = offsets(lead, rows, columns, align, query_lengths, key_lengths) if causal or window is not None else None
    real_rows = _per_batch("query_lengths", rows if query_lengths is None else query_lengths, lead)
    real_columns = _per_batch("key_lengths", columns if key_lengths is None else key_lengths, lead)
    for b, batch in enumerate(np.ndindex(lead)):
        here = (i < real_rows[batch]) & (j < real_columns[batch])
        if offset is not None:
            ahead = j - (i + offset[batch])
            if causal:
                here = here & (ahead <= 0)
            if left is not None:
                here = here & (ahead >= -left)
            if right is not None:
                here = here & (ahead <= right)
        if query_segments is not None and key_segments is not None:
            q_ids = np.broadcast_to(query_segments, (*lead, rows))[batch]
            k_ids = np.broadcast_to(key_segments, (*lead, columns))[batch]
            here = here & (q_ids[:, None] == k_ids[None, :])
        visible[batch] &= here
        if pattern is not None:
            for h in range(heads):
                visible[(*batch, h)] &= pattern.visible(i, j, q=rows, k=columns, b=np.asarray(b), h=np.asarray(h))
    return visible


def offsets(
    lead: tuple[int, ...],
    rows: int,
    columns: int,
    align: Any,
    query_lengths: _Lengths = None,
    key_lengths: _Lengths = None,
) -> np.ndarray:
    """Where query 0 stands on the key axis, an int per batch.

    "upper_left" is 0, "lower_right" k - q (of the lengths, where they are given), an int or ints per batch stand for
    themselves.  Only with q = k and without lengths may it be left out.
    """
    if align is None:
        if rows != columns or query_lengths is not None or key_lengths is not None:
            given = "lengths are given" if rows == columns else f"there are {rows} queries and {columns} keys"
            raise ValueError(
                f"align is missing: causal, window and alibi_slopes need it where {given};"
                ' expected "upper_left" (query 0 at key 0), "lower_right" (last query at last key), or an int per batch'
            )
        align = "upper_left"
    if isinstance(align, str):
        if align not in ("upper_left", "lower_right"):
            raise ValueError(f'align is {align!r}: expected "upper_left", "lower_right", an int or ints per batch')
        if align == "upper_left":
            return np.zeros(lead, dtype=int)
        real_rows = _per_batch("query_lengths", rows if query_lengths is None else query_lengths, lead)
        return _per_batch("key_lengths", columns if key_lengths is None else key_lengths, lead) - real_rows
    return _per_batch("align", align, lead)


def _per_batch(name: str, value: Any, lead: tuple[int, ...]) -> np.ndarray:
    value = np.asarray(value)
    if value.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {value.dtype}: expected ints")
    if value.ndim == 1 and value.size == math.prod(lead):
        value = value.reshape(lead)
    return np.broadcast_to(value.astype(int), lead)


def _number(value: Any) -> float:
    return float(np.reshape(value, ()))


def _boolean(name: str, value: Any) -> np.ndarray:
    value = np.asarray(value)
    if value.dtype != np.bool_:
        raise TypeError(f"{name} has dtype {value.dtype}: expected bool, True = kept")
    return value


def _log_sum_exp(x: np.ndarray) -> float:
    top = x.max(initial=-np.inf)
    return top + np.log(np.sum(np.exp(x - top))) if top != -np.inf else -np.inf
