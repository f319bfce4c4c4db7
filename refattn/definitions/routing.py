"""Routing attention by loops over clusters, queries and keys: the slow, independent path."""

import math
from typing import Any

import numpy as np

from refattn.records import Result

__all__ = ["definition"]


def definition(
    q: np.ndarray,
    k: np.ndarray | None = None,
    v: Any = None,
    *,
    centroids: np.ndarray,
    cluster_size: Any = None,
    normalize: str | None = "layer",
    cluster_normalize: str | None = "same",
    key_norm: str | None = None,
    projection: np.ndarray | None = None,
    causal: bool = False,
    causal_by: str = "position",
    self_attention: str = "always",
    members: Any = None,
    query_mask: Any = None,
    key_mask: Any = None,
    memory_keys: np.ndarray | None = None,
    memory_values: Any = None,
    average_eps: float = 0.0,
    relative_keys: np.ndarray | None = None,
    relative_values: np.ndarray | None = None,
    scale: Any = None,
    pattern: Any = None,
    dropout_mask: Any = None,
    dropout_rate: float = 0.0,
) -> Result:
    """Every cluster lists its tokens by a sort; every place in it is one softmax; tokens take the mean over their places."""
    shared = k is None
    k = q if k is None else k
    lead = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    (h, t, d), t_k, e = q.shape[-3:], k.shape[-2], v.shape[-1]
    c = centroids.shape[1]
    q, k, v = (np.broadcast_to(x, (*lead, *x.shape[-3:])) for x in (q, k, v))
    scale = (d**-0.5 if d else 1.0) if scale is None else float(np.reshape(scale, ()))
    real_q, real_k = (
        np.broadcast_to(True if m is None else m, (*lead, n)) for m, n in ((query_mask, t), (key_mask, t_k))
    )
    dropped = None if dropout_mask is None else np.broadcast_to(dropout_mask, (*lead, h, t, t_k))
    visible = None
    if pattern is not None:
        batch = math.prod(lead)
        visible = pattern.fit(t, t_k, batch=lead, heads=h).to_mask(t, t_k, batch, h)
        visible = np.broadcast_to(visible, (batch, h, t, t_k)).reshape(*lead, h, t, t_k)
    widths = _widths(cluster_size, (t, t_k), c)

    q_n, k_n = _normalised(q, normalize), _normalised(k, normalize)
    keys = _normalised(k_n, key_norm)
    x_q, x_k = (
        n if cluster_normalize == "same" else _normalised(x, cluster_normalize) for x, n in ((q, q_n), (k, k_n))
    )
    if projection is not None:
        x_q, x_k = x_q @ projection, x_k @ projection
    if members is None:
        members = tuple(
            _chosen(x, centroids, keep, w) for x, keep, w in ((x_q, real_q, widths[0]), (x_k, real_k, widths[1]))
        )
    members = tuple(np.broadcast_to(m, (*lead, h, c, m.shape[-1])).astype(np.int64) for m in members)

    output = np.zeros((*lead, h, t, e))
    for at in np.ndindex(*lead, h):
        total, count = np.zeros((t, e)), np.zeros(t)
        for n in range(c):
            own_keys = members[1][at][n]
            for i, token in enumerate(members[0][at][n]):
                if token < 0 or not real_q[at[:-1]][token]:
                    continue
                seen = []
                for j, key in enumerate(own_keys):
                    hidden = key < 0 or not real_k[at[:-1]][key]
                    hidden = hidden or (causal and (key > token if causal_by == "position" else j > i))
                    hidden = hidden or (visible is not None and not visible[at][token, key])
                    if not hidden:
                        seen.append((j, key))
                others = [(j, key) for j, key in seen if key != token]
                if self_attention != "always":
                    seen = others
                if self_attention == "last_resort" and not others and not _any(memory_keys):
                    seen = [(j, key) for j, key in enumerate(own_keys) if key == token]
                entries = []  # (logit, weight factor, value)
                for j, key in seen:
                    own = keys[at][key] + _relative(relative_keys, j - i)
                    factor = 1.0 if dropped is None else dropped[at][token, key] / (1 - dropout_rate)
                    entries.append(
                        (scale * q_n[at][token] @ own, factor, v[at][key] + _relative(relative_values, j - i))
                    )
                if memory_keys is not None:
                    factor = 1.0 if dropped is None else 1 / (1 - dropout_rate)
                    for own, value in zip(memory_keys[at[-1]][n], memory_values[at[-1]][n], strict=True):
                        entries.append((scale * q_n[at][token] @ own, factor, value))
                count[token] += 1
                if entries:
                    top = max(x for x, _, _ in entries)
                    whole = math.fsum(math.exp(x - top) for x, _, _ in entries)
                    for x, factor, value in entries:
                        total[token] += math.exp(x - top) / whole * factor * value
        for token in range(t):
            if count[token]:
                output[at][token] = total[token] / (count[token] + average_eps)
    losses = [
        (x[at][token] - centroids[at[-1]][np.argmax(centroids[at[-1]] @ x[at][token])]) ** 2
        for x, keep in (((x_q, real_q),) if shared else ((x_q, real_q), (x_k, real_k)))
        for at in np.ndindex(*lead, h)
        for token in np.flatnonzero(keep[at[:-1]])
    ]  # fmt: skip
    loss = np.mean(losses) if losses else np.float64(0.0)
    return Result(output=output, commitment_loss=loss, members_q=members[0], members_k=members[1])


def _any(memory: Any) -> bool:
    return memory is not None and memory.shape[-2] > 0


def _relative(table: Any, gap: int) -> Any:
    if table is None:
        return 0.0
    n = len(table) // 2
    return table[n + max(-n, min(n, gap))]


def _normalised(x: np.ndarray, kind: str | None) -> np.ndarray:
    if kind == "layer":
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), 1e-12) if kind == "l2" else x


def _widths(cluster_size: Any, lengths: tuple[int, int], c: int) -> list[int]:
    if cluster_size is None:
        return [min(n, max(1, n // c)) for n in lengths]
    pair = cluster_size if isinstance(cluster_size, (tuple, list)) else (cluster_size, cluster_size)
    return [min(w, n) for w, n in zip(pair, lengths, strict=True)]


def _chosen(x: np.ndarray, centroids: np.ndarray, keep: np.ndarray, width: int) -> np.ndarray:
    """(..., h, c, w): of each cluster, the real tokens of the largest products, in rising order; -1 for none."""
    found = np.full((*x.shape[:-2], centroids.shape[1], width), -1)
    for at in np.ndindex(*x.shape[:-2]):
        for n, centroid in enumerate(centroids[at[-1]]):
            scores = x[at] @ centroid
            tokens = sorted(np.flatnonzero(keep[at[:-1]]), key=lambda token: (-scores[token], token))[:width]
            found[at][n, : len(tokens)] = sorted(tokens)
    return found
