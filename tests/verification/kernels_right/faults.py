"""Kernels with one numerical fault each: right but for what is rounded, and how often."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from verification.kernels_right.logits import added, turned
from verification.kernels_right.setup import Array, Call, call_of

HALF = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Fault:
    """``run`` as in ``kernels_right.run``; the probes that are meant to show it."""

    run: Callable[[dict[str, Array], dict[str, Any], Any], dict[str, Array]]
    probes: tuple[str, ...]
    dtypes: tuple[str, ...] = HALF


def kernel(
    arrays: dict[str, Array],
    options: dict[str, Any],
    cotangents: Any,
    *,
    scaled_q: bool = False,
    scores: bool = False,
    row_sum: bool = False,
    parts: bool = False,
    accumulator: bool = False,
    d_q_sum: bool = False,
    d_p_half: bool = False,
    delta_half: bool = False,
    lse_half: bool = False,
    exp_error: float = 0.0,
    operands: int = 0,
) -> dict[str, Array]:
    """Softmax attention with what is named rounded to the storage; ``operands``: bits cut from operands of products."""
    c = call_of(**arrays, **options)
    store = c.store

    def cut(x: Array) -> Array:
        if not operands:
            return x
        bits = x.astype(np.float32).view(np.uint32)
        return ((bits + np.uint32(1 << (operands - 1))) & ~np.uint32((1 << operands) - 1)).view(np.float32)

    with np.errstate(all="ignore"):
        q = store(c.q * c.scale) if scaled_q else c.q
        x = (cut(q) @ turned(cut(c.k))) * (1 if scaled_q else c.scale)
        x = x.astype(c.q.dtype)
        s = added(c, store(x) if scores else x)
        top = s.max(axis=-1, keepdims=True)
        p = np.exp(s - top)
        p = p * p.dtype.type(1 + exp_error)
        p = store(p) if scores else p
        total = _sum_in_half(c, p) if row_sum else p.sum(axis=-1)
        lse = (top[..., 0] + np.log(total)).astype(c.q.dtype)
        if parts:
            out, lse = _parts(c, s)
        elif accumulator:
            out = _accumulated(c, store(p), c.v, 16) / total[..., None]
        else:
            out = (cut(store(p)) @ cut(c.v)) / total[..., None]
        out = out.astype(c.storage)
        found = {"output": out, "lse": lse}
        if not cotangents or "output" not in cotangents:
            return found
        d_out = cotangents["output"].astype(c.q.dtype)
        z = store(lse) if lse_half else lse
        p = np.exp(s - z[..., None]) * s.dtype.type(1 + exp_error)
        d_p = cut(d_out) @ turned(cut(c.v))
        d_p = store(d_p) if d_p_half else d_p
        delta = (d_out * out.astype(c.q.dtype)).sum(axis=-1)
        delta = store(delta) if delta_half else delta
        d_s = p * (d_p - (delta - cotangents.get("lse", np.zeros(())))[..., None])
        stored = cut(store(d_s).astype(c.q.dtype))
        d_q = _accumulated(c, stored, c.k, 8) if d_q_sum else stored @ cut(c.k)
        d_k, d_v = turned(stored) @ cut(c.q), turned(cut(store(p).astype(c.q.dtype))) @ cut(d_out)
        groups = [[i for i, own in enumerate(c.heads) if own == g] for g in range(c.groups)]
        found["d_q"] = (d_q * c.scale).astype(c.storage)
        for name, part in (("d_k", d_k * c.scale), ("d_v", d_v)):
            found[name] = np.stack([part[:, own].sum(axis=1) for own in groups], axis=1).astype(c.storage)
    return found


def _sum_in_half(c: Call, p: Array) -> Array:
    total = np.zeros(p.shape[:-1], p.dtype)
    for i in range(p.shape[-1]):
        total = c.store(total + p[..., i])
    return total


def _accumulated(c: Call, left: Array, right: Array, step: int) -> Array:
    total = np.zeros((*left.shape[:-1], right.shape[-1]), c.q.dtype)
    for at in range(0, right.shape[-2], step):
        total = c.store(total + left[..., at : at + step] @ right[..., at : at + step, :])
    return total


def _parts(c: Call, s: Array) -> tuple[Array, Array]:
    """Four splits whose outputs and lse are stored before they are merged."""
    width = -(-s.shape[-1] // 4)
    done = []
    for at in range(0, s.shape[-1], width):
        part = s[..., at : at + width]
        top = part.max(axis=-1, keepdims=True)
        p = np.exp(part - top)
        total = p.sum(axis=-1)
        out = (c.store(p) @ c.v[..., at : at + width, :]) / total[..., None]
        done.append((c.store(out), c.store(top[..., 0] + np.log(total))))
    lse = np.logaddexp.reduce([z for _, z in done], axis=0)
    return sum(np.exp(z - lse)[..., None] * out for out, z in done), lse.astype(c.q.dtype)


LONG = ("long_row", "quiet_row")
FAULTS = {
    "scores stored in half": Fault(partial(kernel, scores=True), ("large_logits", "mixed")),
    "row sum in half": Fault(partial(kernel, row_sum=True), LONG),
    "partial output and lse in half between splits": Fault(partial(kernel, parts=True), ("large_logits", *LONG)),
    "lse in half in the backward": Fault(partial(kernel, lse_half=True), ("large_logits", "mixed")),
    "scaled q rounded to half": Fault(partial(kernel, scaled_q=True), ("large_logits", "mixed")),
    "accumulator in half every 16 keys": Fault(partial(kernel, accumulator=True), LONG),
    "dQ accumulator in half every 8 keys": Fault(partial(kernel, d_q_sum=True), LONG),
    "dP in half": Fault(partial(kernel, d_p_half=True), ("same_signs", *LONG)),
    "row term in half": Fault(partial(kernel, delta_half=True), ("same_signs",)),
    "exp off by 1e-5": Fault(partial(kernel, exp_error=1e-5), ("plain", "mixed"), ("float32",)),
    "TF32 operands": Fault(partial(kernel, operands=13), ("plain", "mixed"), ("float32",)),
    "bfloat16 operands": Fault(partial(kernel, operands=16), ("plain", "mixed"), ("float32", "float16")),
}
