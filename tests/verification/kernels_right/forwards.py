"""Output and lse from logits, in many orders.  Each takes (call, logits) and gives (output, lse with the sinks)."""

from collections.abc import Callable
from functools import partial

import numpy as np
from verification.kernels_right.setup import Array, Call


def _safe(top: Array) -> Array:
    return np.where(top == -np.inf, 0, top).astype(top.dtype)


def _sinks(c: Call, shape: tuple[int, ...]) -> Array:
    """(b, h, q, n)"""
    return np.broadcast_to(c.sinks[None, :, None, :], (*shape, c.sinks.shape[-1]))


def _kept(c: Call, p: Array, columns: slice = slice(None)) -> Array:
    return p if c.factor is None else p * np.broadcast_to(c.factor, c.seen.shape)[..., columns]


def _finish(out: Array, total: Array, top: Array) -> tuple[Array, Array]:
    some = total > 0
    safe = np.where(some, total, 1)
    lse = np.where(some, top + np.log(safe), -np.inf)
    return np.where(some[..., None], out / safe[..., None], 0).astype(out.dtype), lse.astype(out.dtype)


def _no_values(c: Call) -> Array:
    return np.zeros((*c.q.shape[:-1], c.v.shape[-1]), c.q.dtype)


def whole(c: Call, s: Array, *, first: bool = False, reciprocal: bool = False) -> tuple[Array, Array]:
    """All keys at once; ``first``: weights are normalised before they meet the values."""
    top = s.max(axis=-1)
    if c.sinks is not None:
        top = np.maximum(top, c.sinks.max(-1)[None, :, None])
    p = np.exp(s - _safe(top)[..., None])
    total = p.sum(axis=-1)
    if c.sinks is not None:
        total = total + np.exp(_sinks(c, top.shape) - _safe(top)[..., None]).sum(axis=-1)
    if not first and not reciprocal:
        return _finish(c.store(_kept(c, p)) @ c.v, total, _safe(top))
    safe = np.where(total > 0, total, 1)
    lse = np.where(total > 0, _safe(top) + np.log(safe), -np.inf).astype(p.dtype)
    if first:
        return c.store(_kept(c, p / safe[..., None])) @ c.v, lse
    return (c.store(_kept(c, p)) @ c.v) * (1 / safe)[..., None], lse


def online(c: Call, s: Array, *, tile: int, backwards: bool = False, base_2: bool = False) -> tuple[Array, Array]:
    """Tiles of keys with a running maximum."""
    log2e = s.dtype.type(np.log2(np.e))
    exp = np.exp2 if base_2 else np.exp
    s = s * log2e if base_2 else s
    top = np.full(s.shape[:-1], -np.inf, s.dtype)
    total, out = np.zeros_like(top), _no_values(c)
    if c.sinks is not None:
        sinks = _sinks(c, top.shape) * (log2e if base_2 else 1)
        top = sinks.max(axis=-1).astype(s.dtype)
        total = exp(sinks - _safe(top)[..., None]).sum(axis=-1).astype(s.dtype)
    starts = range(0, s.shape[-1], tile)
    for at in reversed(starts) if backwards else starts:
        part = slice(at, at + tile)
        new = np.maximum(top, s[..., part].max(axis=-1))
        p, rescale = exp(s[..., part] - _safe(new)[..., None]), exp(top - _safe(new))
        total = total * rescale + p.sum(axis=-1)
        out = out * rescale[..., None] + c.store(_kept(c, p, part)) @ c.v[..., part, :]
        top = new
    out, lse = _finish(out, total, _safe(top))
    if base_2:
        some = total > 0
        lse = np.where(some, (_safe(top) + np.log2(np.where(some, total, 1))) / log2e, -np.inf).astype(s.dtype)
    return out, lse


def _part(c: Call, s: Array, part: slice) -> tuple[Array, Array]:
    """A finished softmax over some keys, without sinks."""
    top = s[..., part].max(axis=-1)
    p = np.exp(s[..., part] - _safe(top)[..., None])
    return _finish(c.store(_kept(c, p, part)) @ c.v[..., part, :], p.sum(axis=-1), _safe(top))


def _merge(a: tuple[Array, Array], b: tuple[Array, Array], sigmoid: bool) -> tuple[Array, Array]:
    (o1, z1), (o2, z2) = a, b
    z = np.logaddexp(z1, z2)
    if sigmoid:  # o + w (o_new - o), as rings write it
        with np.errstate(over="ignore", invalid="ignore"):
            w = np.where(z == -np.inf, 0, 1 / (1 + np.exp(np.where(np.isnan(z1 - z2), 0, z1 - z2)))).astype(o1.dtype)
        return o1 + w[..., None] * (o2 - o1), z
    w1, w2 = np.exp(z1 - _safe(z)), np.exp(z2 - _safe(z))
    return w1[..., None] * o1 + w2[..., None] * o2, z


def _with_sinks(c: Call, found: tuple[Array, Array]) -> tuple[Array, Array]:
    if c.sinks is None:
        return found
    out, keys = found
    z = np.logaddexp(keys, np.logaddexp.reduce(_sinks(c, keys.shape), axis=-1))
    return out * np.exp(keys - _safe(z))[..., None], z.astype(out.dtype)


def split(c: Call, s: Array, *, parts: int, tree: bool = False, sigmoid: bool = False) -> tuple[Array, Array]:
    """Finished softmaxes over parts of the keys, merged by their lse one after the other or in a tree."""
    width = -(-s.shape[-1] // parts)
    done = [_part(c, s, slice(at, at + width)) for at in range(0, s.shape[-1], width)]
    while len(done) > 1:
        if tree:
            pairs = [done[i : i + 2] for i in range(0, len(done), 2)]
            done = [_merge(*pair, sigmoid) if len(pair) == 2 else pair[0] for pair in pairs]
        else:
            done = [_merge(done[0], done[1], sigmoid), *done[2:]]
    return _with_sinks(c, done[0])


def log_domain(c: Call, s: Array, *, step: int = 0) -> tuple[Array, Array]:
    """Weights exp(logits - lse); the lse key by key (``step`` 1), in steps, or by one reduction."""
    if step:
        z = np.full(s.shape[:-1], -np.inf, s.dtype)
        for at in range(0, s.shape[-1], step):
            z = np.logaddexp(z, np.logaddexp.reduce(s[..., at : at + step], axis=-1))
    else:
        z = np.logaddexp.reduce(s, axis=-1)
    if c.sinks is not None:
        z = np.logaddexp(z, np.logaddexp.reduce(_sinks(c, z.shape), axis=-1)).astype(s.dtype)
    p = np.where(c.seen, np.exp(s - _safe(z)[..., None]), 0).astype(s.dtype)
    return c.store(_kept(c, p)) @ c.v, z


def compensated(c: Call, s: Array) -> tuple[Array, Array]:
    """The row sum with Kahan's correction, sorted from small to large."""
    top = s.max(axis=-1)
    if c.sinks is not None:
        top = np.maximum(top, c.sinks.max(-1)[None, :, None])
    p = np.exp(s - _safe(top)[..., None])
    terms = np.sort(p, axis=-1)
    if c.sinks is not None:
        terms = np.concatenate([np.exp(_sinks(c, top.shape) - _safe(top)[..., None]), terms], axis=-1)
    total, lost = np.zeros_like(top), np.zeros_like(top)
    for i in range(terms.shape[-1]):
        y = terms[..., i] - lost
        new = total + y
        lost, total = (new - total) - y, new
    return _finish(c.store(_kept(c, p)) @ c.v, total, _safe(top))


def last_key_first(c: Call, s: Array) -> tuple[Array, Array]:
    """One key after the other from the end, weights and values added in a loop."""
    return online(c, s, tile=1, backwards=True) if s.shape[-1] <= 70 else online(c, s, tile=13, backwards=True)


FORWARDS: dict[str, Callable[[Call, Array], tuple[Array, Array]]] = {
    "whole": whole,
    "normalised_first": partial(whole, first=True),
    "reciprocal": partial(whole, reciprocal=True),
    "online_8": partial(online, tile=8),
    "online_16_backwards": partial(online, tile=16, backwards=True),
    "online_64": partial(online, tile=64),
    "base_2": partial(online, tile=10_000, base_2=True),
    "base_2_online_16": partial(online, tile=16, base_2=True),
    "split_2": partial(split, parts=2),
    "split_7": partial(split, parts=7),
    "split_4_tree": partial(split, parts=4, tree=True),
    "ring_4": partial(split, parts=4, sigmoid=True),
    "ring_7_tree": partial(split, parts=7, tree=True, sigmoid=True),
    "log_domain": log_domain,
    "log_domain_by_8": partial(log_domain, step=8),
    "log_domain_by_key": partial(log_domain, step=1),
    "compensated": compensated,
    "last_key_first": last_key_first,
}
