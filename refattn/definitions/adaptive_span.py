"""Adaptive attention span by its definition: one query after the other, one past key after the other, in float64."""

import math
from typing import Any

import numpy as np

from refattn.records import Result

__all__ = ["definition"]


def definition(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    span: np.ndarray,
    key_positions: np.ndarray | None = None,
    ramp: float = 32,
    max_span: int | None = None,
    distance_origin: int = 1,
    renormalize_eps: float = 0.0,
    persistent_keys: np.ndarray | None = None,
    persistent_values: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    scale: Any = None,
    keep_weights: bool = False,
) -> Result:
    """The numbers of ``adaptive_span_attention``, slowly; arguments as there."""
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (np.broadcast_to(x, lead + x.shape[-3:]) for x in (q, k, v))
    (heads, rows, channels), columns = q.shape[-3:], k.shape[-2]
    limit = max_span or (columns - rows if key_positions is None else key_positions.shape[-1])
    scale = max(1, channels) ** -0.5 if scale is None else float(np.reshape(scale, ()))
    spans = np.broadcast_to(span[:, None] if span.ndim == 1 else span, (*lead, heads, rows))
    allowed = (
        np.ones((*lead, heads, rows, columns), bool)
        if mask is None
        else np.broadcast_to(mask, (*lead, heads, rows, columns))
    )
    n = 0 if persistent_keys is None else persistent_keys.shape[-2]
    furthest = min(limit, math.ceil(span.max(initial=0.0)) + math.ceil(ramp) + 1 - distance_origin)
    if renormalize_eps:  # slots of the released code, which drops the oldest ones by 64
        unused = limit - math.ceil(span.max(initial=0.0)) - math.ceil(ramp)
        furthest = limit - min(limit - 1, max(0, unused)) // 64 * 64
    output = np.zeros((*lead, heads, rows, v.shape[-1]))
    lse = np.full((*lead, heads, rows), -np.inf)
    weights, logits = (np.zeros((*lead, heads, rows, columns + n)) for _ in range(2))
    for at in np.ndindex(*lead, heads, rows):
        *batch, h, i = at
        head = (*batch, h)
        place = columns - rows + i
        seen: list[tuple[int, float, float, np.ndarray]] = []  # column, ramp weight, logit, value
        for distance in range(1, furthest + 1):
            j = place - distance
            if j < 0 or not allowed[(*at, j)]:
                continue
            logit = float(scale * math.fsum(q[at] * k[head][j]))
            if key_positions is not None:
                table = key_positions if key_positions.ndim == 2 else key_positions[h]
                logit += scale * math.fsum(q[at] * table[:, distance - 1])
            x = distance - 1 + distance_origin
            m = float(np.clip((ramp + spans[at] - x) / ramp, 0.0, 1.0))
            seen.append((j, m, logit, v[head][j]))
            logits[at][j] = logit
        for s in range(n):
            key, value = persistent_keys[h, s], persistent_values[h, s]  # type: ignore[index]
            logit = scale * math.fsum(q[at] * key)
            seen.append((columns + s, 1.0, logit, value))
            logits[at][columns + s] = logit
        used = [logit for _, m, logit, _ in seen if m > 0]
        if not used:
            continue
        peak = max(logit for _, m, logit, _ in seen if m > 0 or renormalize_eps)
        total = math.fsum(m * math.exp(logit - peak) for _, m, logit, _ in seen if m > 0)
        everything = math.fsum(math.exp(logit - peak) for _, _, logit, _ in seen) if renormalize_eps else 0.0
        lse[at] = peak + math.log(total)
        for place_of, m, logit, value in seen:
            if m > 0:
                share = m * math.exp(logit - peak) / (total + renormalize_eps * everything)
                weights[at][place_of] = share
                output[at] += share * value
    if keep_weights:
        return Result(output=output, lse=lse, weights=weights, logits=logits)
    return Result(output=output, lse=lse)
