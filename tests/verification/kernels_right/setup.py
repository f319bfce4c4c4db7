"""What every kernel does with its arguments before it computes: heads repeated, who sees whom, what is added to a logit.

Nothing in this folder comes from refattn.
"""

import dataclasses
import math
from typing import Any

import numpy as np

Array = np.ndarray


@dataclasses.dataclass
class Call:
    """Arguments of one call in the compute dtype, (b, h, ., .) with key heads repeated."""

    q: Array
    k: Array
    v: Array
    heads: list[int]  # key head of each query head
    groups: int
    storage: Any
    scale: Any
    seen: Array
    bias: Array | None
    slopes: Array | None
    distance: Array | None  # minus |i + offset - j|
    cap: Any
    cap_last: bool
    sinks: Array | None  # (h, n)
    lse_with_sinks: bool
    factor: Array | None
    shapes: dict[str, tuple[int, ...]]

    def store(self, x: Array) -> Array:
        """Rounded to the storage dtype and back."""
        return x.astype(self.storage).astype(self.q.dtype)

    @property
    def half(self) -> bool:
        return self.storage != self.q.dtype


def call_of(q: Array, k: Array, v: Array, **o: Any) -> Call:
    storage = q.dtype
    compute = np.dtype(np.float64) if storage == np.float64 else np.dtype(np.float32)
    b, h, n_q, d = q.shape
    g, n_k = k.shape[1], k.shape[2]
    heads = [i % g for i in range(h)] if o.get("head_map") == "tile" else [i // (h // g) for i in range(h)]

    def wide(name: str) -> Array | None:
        x = o.get(name)
        return None if x is None else np.asarray(x).astype(compute)

    def lengths(name: str, n: int) -> Array:
        x = o.get(name)
        return np.full((b, 1, 1, 1), n) if x is None else np.broadcast_to(np.asarray(x), (b,)).reshape(b, 1, 1, 1)

    i, j = np.arange(n_q)[:, None], np.arange(n_k)[None, :]
    rows, columns = lengths("query_lengths", n_q), lengths("key_lengths", n_k)
    align = o.get("align", "lower_right")
    offset = columns - rows if align == "lower_right" else np.zeros_like(rows) if align == "upper_left" else align
    offset = offset if isinstance(offset, np.ndarray) and offset.ndim == 4 else np.reshape(offset, (-1, 1, 1, 1))
    seen = np.ones((b, h, n_q, n_k), dtype=bool) & (i < rows) & (j < columns)
    if o.get("causal"):
        seen &= j <= i + offset
    if o.get("window") is not None:
        left, right = o["window"]
        seen &= True if left is None else j >= i + offset - left
        seen &= True if right is None else j <= i + offset + right
    if o.get("mask") is not None:
        seen &= o["mask"]
    if o.get("query_segments") is not None:
        sides = [np.asarray(o[n]) for n in ("query_segments", "key_segments")]
        sides = [x.reshape(-1, 1, x.shape[-1]) for x in sides]
        seen &= sides[0][..., :, None] == sides[1][..., None, :]
    bias = wide("bias")
    if bias is not None:
        seen &= bias > -np.inf
        bias = np.where(np.isfinite(bias), bias, 0).astype(compute)
    slopes = wide("alibi_slopes")
    sinks = wide("sinks")
    keep = o.get("dropout_mask")
    used = seen.any(axis=(-2,))[..., None]
    return Call(
        q=q.astype(compute),
        k=np.where(used, k[:, heads], 0).astype(compute),
        v=np.where(used, v[:, heads], 0).astype(compute),
        heads=heads,
        groups=g,
        storage=storage,
        scale=compute.type(1 / math.sqrt(d) if o.get("scale") is None else o["scale"]),
        seen=seen,
        bias=bias,
        slopes=slopes,
        distance=None if slopes is None else -np.abs(i + offset - j).astype(compute),
        cap=None if o.get("softcap") is None else compute.type(o["softcap"]),
        cap_last=bool(o.get("softcap_after_bias")),
        sinks=None if sinks is None else sinks.reshape(h, -1),
        lse_with_sinks=o.get("lse_includes_sinks", True) is not False,
        factor=None if keep is None else (keep / (1 - o["dropout_rate"])).astype(compute),
        shapes={n: np.shape(x) for n, x in {"k": k, "v": v, "bias": o.get("bias"), "sinks": o.get("sinks")}.items()},
    )


def padded(c: Call, rows: Any) -> Array:
    """Rows beyond the query lengths, (b, 1, q): their lse is -inf even with sinks."""
    n = c.q.shape[2]
    return np.zeros((1, 1, n), bool) if rows is None else np.arange(n) >= np.asarray(rows).reshape(-1, 1, 1)
