"""Gradients from the inputs, the stored output and the lse, with the products taken in several ways."""

import dataclasses
from typing import Any

import numpy as np
from verification.kernels_right.logits import ORDERS, added, through_cap, turned
from verification.kernels_right.setup import Array, Call


@dataclasses.dataclass(frozen=True)
class Backward:
    """What a backward does.

    ``weights``: exp(logits - lse) ("lse"), in base 2 ("base_2"), or softmax anew ("anew"); ``row``: the row term as the
    sum of d_output times the stored output, or of P times dP; ``narrow``: P and dS rounded to the storage before their
    products; ``factored``: P dP - P Delta in place of P (dP - Delta); ``keys``: d_q added over tiles of so many keys;
    ``heads``: d_k and d_v stored for every query head before the group is summed; ``from_q``: d_scale = sum q dq.
    """

    logits: str = "after"
    weights: str = "lse"
    row: str = "output"
    narrow: bool = True
    factored: bool = False
    keys: int = 0
    heads: bool = False
    from_q: bool = False


def _to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    extra = x.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(i + extra for i, n in enumerate(shape) if n == 1)
    return x.sum(axis=axes).reshape(shape)


def backward(c: Call, how: Backward, out: Array, lse: Array, d_out: Array, d_lse: Array | None) -> dict[str, Array]:
    """``out`` as it was stored, ``lse`` of keys and sinks; all in the compute dtype."""
    x = ORDERS[how.logits](c)
    s = added(c, x)
    empty = lse == -np.inf
    z = np.where(empty, 0, lse)[..., None].astype(s.dtype)
    if how.weights == "base_2":
        log2e = s.dtype.type(np.log2(np.e))
        p = np.exp2(s * log2e - z * log2e)
    elif how.weights == "anew" and c.sinks is None:
        top = s.max(axis=-1, keepdims=True)
        p = np.exp(s - np.where(top == -np.inf, 0, top))
        total = p.sum(axis=-1, keepdims=True)
        p = p / np.where(total > 0, total, 1)
    else:
        p = np.exp(s - z)
    p = np.where(c.seen & ~empty[..., None], p, 0).astype(s.dtype)
    d_out = np.where(c.seen.any(-1)[..., None], d_out, 0).astype(s.dtype)
    f = np.ones((), s.dtype) if c.factor is None else c.factor
    pf = p * f
    narrow = c.store if how.narrow else lambda y: y
    d_p = d_out @ turned(c.v)
    delta = (d_out * out).sum(axis=-1) if how.row == "output" else (pf * d_p).sum(axis=-1)
    shift, lost = delta, delta
    if d_lse is not None:
        d_lse = np.where(empty, 0, d_lse).astype(s.dtype)
        if c.sinks is not None and not c.lse_with_sinks:
            share = p.sum(axis=-1)
            shift = delta - np.where(share > 0, d_lse / np.where(share > 0, share, 1), 0)
        else:
            shift = lost = delta - d_lse
    if how.factored:
        d_s = pf * d_p - p * shift[..., None]
    else:
        d_s = p * (f * d_p - shift[..., None])
    slope, by_cap = through_cap(c, x)
    d_u = slope * d_s
    stored = narrow(d_u)
    step = how.keys or max(1, c.k.shape[-2])
    d_q = np.zeros_like(c.q)
    for at in range(0, c.k.shape[-2], step):
        d_q = d_q + stored[..., at : at + step] @ c.k[..., at : at + step, :]
    d_k = turned(stored) @ c.q * c.scale
    d_v = turned(narrow(pf)) @ d_out
    if how.heads:
        d_k, d_v = c.store(d_k), c.store(d_v)
    members = [[i for i, own in enumerate(c.heads) if own == g] for g in range(c.groups)]
    found: dict[str, Any] = {
        "q": d_q * c.scale,
        "k": np.stack([d_k[:, own].sum(axis=1) for own in members], axis=1),
        "v": np.stack([d_v[:, own].sum(axis=1) for own in members], axis=1),
    }
    if c.bias is not None:
        found["bias"] = _to_shape(d_u if c.cap_last else d_s, c.shapes["bias"])
    raw = ORDERS[how.logits](c) / c.scale
    found["scale"] = (c.q * d_q).sum() if how.from_q else (np.where(c.seen, raw, 0) * d_u).sum()
    if c.cap is not None:
        found["softcap"] = (d_s * by_cap).sum()
    if c.slopes is not None:
        found["alibi_slopes"] = ((d_u if c.cap_last else d_s) * c.distance).sum(axis=(0, 2, 3))
    if c.sinks is not None:
        w = np.exp(c.sinks[None, :, None, :] - z) * ~empty[..., None]
        found["sinks"] = -(w * lost[..., None]).sum(axis=(0, 2)).reshape(c.shapes["sinks"])
    return found
