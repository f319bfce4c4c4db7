"""Softmax attention row by row in plain loops: short enough to check with a pencil.

    logits = scale q.k -> score_mod -> softcap -> + bias + ALiBi -> visibility -> sinks -> softmax -> dropout -> . v

Axes: ``...`` any leading batch axes, h query head, g key head, q and k positions, d and e channels, n sinks.
"""

import math

import numpy as np

from refattn.records import Result

__all__ = ["attention", "offsets", "visible_pairs"]


def attention(
    q, k, v, *, mask=None, pattern=None, bias=None, causal=False, align=None, window=None, query_lengths=None, key_lengths=None,
    query_segments=None, key_segments=None, scale=None, softcap=None, softcap_after_bias=False, alibi_slopes=None, sinks=None,
    lse_includes_sinks=True, dropout_mask=None, dropout_rate=0.0, score_mod=None, keep_weights=False, head_map="repeat",
    indices=None, block_indices=None, block=None, duplicates="union",
):  # fmt: skip
    """q (..., h, q, d), k (..., g, k, d), v (..., g, k, e) in float64; a row without keys gives output 0 and lse -inf."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    (heads, rows, channels), (groups, columns) = q.shape[-3:], k.shape[-3:-1]
    q, k, v = (np.broadcast_to(x, lead + x.shape[-3:]) for x in (q, k, v))
    whole = (*lead, heads, rows, columns)
    visible = visible_pairs(
        lead, heads, rows, columns, mask=mask, pattern=pattern, causal=causal, align=align, window=window,
        query_lengths=query_lengths, key_lengths=key_lengths, query_segments=query_segments, key_segments=key_segments,
    )  # fmt: skip
    real_rows = per_batch(rows if query_lengths is None else query_lengths, lead)
    real_columns = per_batch(columns if key_lengths is None else key_lengths, lead)
    scale = channels**-0.5 if scale is None else float(np.reshape(scale, ()))
    bias = None if bias is None else np.broadcast_to(np.asarray(bias, dtype=np.float64), whole)
    keep = None if dropout_mask is None else np.broadcast_to(dropout_mask, whole)
    sinks = np.zeros((heads, 0)) if sinks is None else np.asarray(sinks, dtype=np.float64).reshape(heads, -1)
    output = np.zeros((*lead, heads, rows, v.shape[-1]))
    lse = np.full((*lead, heads, rows), -np.inf)
    all_weights, all_logits = np.zeros(whole), np.full(whole, -np.inf)
    j = np.arange(columns)
    lists = indices if indices is not None else block_indices
    if lists is not None:
        lists = np.broadcast_to(lists, (*lead, *lists.shape[-3:]))
    with np.errstate(all="ignore"):
        for b, batch in enumerate(np.ndindex(lead)):
            for h in range(heads):
                g = h % groups if head_map == "tile" else h // (heads // groups)
                for i in range(rows):
                    row = (*batch, h, i)
                    if i >= real_rows[batch]:
                        continue
                    logits = scale * np.sum(q[row] * k[batch][g], axis=-1)
                    if score_mod is not None:
                        at = (np.full(columns, n) for n in (b, h, i))
                        logits = np.broadcast_to(np.asarray(score_mod(logits, *at, j), dtype=np.float64), (columns,))
                    hidden = (logits == -np.inf) if score_mod is not None else np.zeros(columns, bool)
                    added = np.zeros(columns)
                    if bias is not None:
                        added = added + bias[row]
                        hidden = hidden | (bias[row] == -np.inf)
                    if alibi_slopes is not None:
                        place = i + offsets(lead, rows, columns, align, query_lengths, key_lengths)[batch]
                        added = added - np.asarray(alibi_slopes, dtype=np.float64)[h] * np.abs(place - j)
                    if softcap is None:
                        logits = logits + added
                    elif softcap_after_bias:
                        logits = softcap * np.tanh((logits + added) / softcap)
                    else:
                        logits = softcap * np.tanh(logits / softcap) + added
                    seen = visible[row] & ~hidden
                    if lists is not None:
                        whose = {1: 0, heads: h}.get(lists.shape[-3], g)
                        listed = lists[(*batch, whose, i)].tolist()
                        times = np.array([listed.count(n if block is None else n // block) for n in range(columns)])
                        seen = seen & (times > 0)
                        if duplicates == "multiset":
                            logits = logits + np.log(np.maximum(times, 1))
                    all_logits[row] = np.where(hidden | (j >= real_columns[batch]), -np.inf, logits)
                    everything = np.concatenate([logits[seen], sinks[h]])
                    maximum = everything.max(initial=-np.inf)
                    if maximum == -np.inf:  # no probability to share out
                        continue
                    row_sum = np.sum(np.exp(everything - maximum))
                    weights = np.exp(logits[seen] - maximum) / row_sum
                    lse[row] = maximum + np.log(row_sum) if lse_includes_sinks else log_sum_exp(logits[seen])
                    if keep is not None:
                        weights = weights * keep[row][seen] / (1 - dropout_rate)
                    output[row] = np.sum(weights[:, None] * v[batch][g][seen], axis=0)
                    all_weights[row][seen] = weights
    kept = {"weights": all_weights, "logits": all_logits} if keep_weights else {}
    return Result(output=output, lse=lse, **kept)


def visible_pairs(
    lead, heads, rows, columns, *, mask=None, pattern=None, causal=False, align=None, window=None, query_lengths=None,
    key_lengths=None, query_segments=None, key_segments=None,
):  # fmt: skip
    """Which key each row may see, bool (..., h, q, k): everything but -inf from bias or score_mod."""
    visible = np.ones((*lead, heads, rows, columns), dtype=bool)
    if mask is not None:
        visible &= mask
    i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    if pattern is not None:
        pattern = pattern.fit(rows, columns, batch=lead, heads=heads)
    left, right = (None, None) if window is None else window
    real_rows = per_batch(rows if query_lengths is None else query_lengths, lead)
    real_columns = per_batch(columns if key_lengths is None else key_lengths, lead)
    for b, batch in enumerate(np.ndindex(lead)):
        here = (i < real_rows[batch]) & (j < real_columns[batch])
        if causal or window is not None:
            ahead = j - (i + offsets(lead, rows, columns, align, query_lengths, key_lengths)[batch])
            here = here & ((ahead <= 0) if causal else True)
            here = here & ((ahead >= -left) if left is not None else True)
            here = here & ((ahead <= right) if right is not None else True)
        if query_segments is not None:
            of_query = np.broadcast_to(query_segments, (*lead, rows))[batch]
            of_key = np.broadcast_to(key_segments, (*lead, columns))[batch]
            here = here & (of_query[:, None] == of_key[None, :])
        visible[batch] &= here
        for h in range(heads if pattern is not None else 0):
            visible[(*batch, h)] &= pattern.visible(i, j, q=rows, k=columns, b=np.asarray(b), h=np.asarray(h))
    return visible


def offsets(lead, rows, columns, align, query_lengths=None, key_lengths=None):
    """Where query 0 stands on the key axis, an int per batch."""
    if align is None or (isinstance(align, str) and align == "upper_left"):
        return np.zeros(lead, dtype=int)
    if isinstance(align, str):
        real_rows = per_batch(rows if query_lengths is None else query_lengths, lead)
        return per_batch(columns if key_lengths is None else key_lengths, lead) - real_rows
    return per_batch(align, lead)


def per_batch(value, lead):
    value = np.asarray(value)
    if value.ndim == 1 and value.size == math.prod(lead):
        value = value.reshape(lead)
    return np.broadcast_to(value, lead)


def log_sum_exp(x):
    top = x.max(initial=-np.inf)
    return top + np.log(np.sum(np.exp(x - top))) if top != -np.inf else -np.inf
