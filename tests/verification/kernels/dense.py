"""Independent attention kernels for the tests of the verifier: one right, tiled, with its backward, and ways to break it.

Nothing here comes from refattn.  ``attention(**changes)`` makes a forward and a backward; a change replaces one step.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray


def attention(
    *,
    tile: int = 16,
    diagonal: Callable[[int, int], int] = lambda q, k: k - q,
    key_head: Callable[[int, int, int], int] = lambda i, h, g: i // (h // g),
    scale_of: Callable[[int], float] = lambda d: d**-0.5,
    reach: int = 0,
    cap_after_mask: bool = False,
    tail_counts: bool = False,
    drop_sinks: bool = False,
    start: float = -np.inf,
    sum_over_group: bool = True,
    returns_lse: bool = True,
    round_weights: bool = True,
    accepts: tuple[str, ...] = ("mask", "bias", "causal", "window", "scale", "softcap", "sinks", "key_lengths"),
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A tiled online-softmax forward and its backward.

    ``tile`` keys at a time; ``diagonal`` the causal offset; ``reach`` widens the window to the left; ``tail_counts`` leaves the zero-padded
    keys of the last tile in the sum; ``start`` is where the running maximum begins.
    """

    def logits_of(q: Array, k: Array, o: dict[str, Any], first: int, keys: int) -> tuple[Array, Array, Array]:
        """Logits of one tile, the derivative of the cap, and what is seen."""
        rows, width = q.shape[-2], k.shape[-2]
        scale = scale_of(q.shape[-1]) if o.get("scale") is None else o["scale"]
        s = (q @ k.swapaxes(-1, -2)) * q.dtype.type(scale)
        slope = np.ones_like(s)
        seen = np.ones(s.shape, dtype=bool)
        i, j = np.arange(rows)[:, None], first + np.arange(width)[None, :]
        if o.get("mask") is not None:
            mask = np.broadcast_to(o["mask"], (*s.shape[:-1], keys))
            seen &= _columns(mask, first, width, False)
        lengths = o.get("key_lengths")
        lengths = None if lengths is None else np.asarray(lengths).reshape(-1, 1, 1, 1)
        offset = diagonal(rows, keys if lengths is None else lengths)
        if o.get("causal"):
            seen &= j <= i + offset
        if o.get("window") is not None:
            left, right = o["window"]
            if left is not None:
                seen &= j >= i + offset - left - reach
            if right is not None:
                seen &= j <= i + offset + right
        if lengths is not None:
            seen &= j < lengths
        if not tail_counts:
            seen &= j < keys
        c = o.get("softcap")
        if c is not None and not cap_after_mask:
            t = np.tanh(s / s.dtype.type(c))
            s, slope = s.dtype.type(c) * t, 1 - t * t
        if o.get("bias") is not None:
            s = s + _columns(np.broadcast_to(o["bias"], (*s.shape[:-1], keys)), first, width, 0).astype(s.dtype)
        seen &= s > -np.inf
        if c is not None and cap_after_mask:
            s = np.where(seen, s, -np.inf)
            t = np.tanh(s / s.dtype.type(c))
            s, slope = s.dtype.type(c) * t, 1 - t * t
            seen = np.broadcast_to(j < keys, s.shape)
        return np.where(seen, s, -np.inf), np.where(seen, slope, 0), seen

    def tiles(q: Array, k: Array, v: Array, o: dict[str, Any]) -> Any:
        """Tiles of keys and values, the last one filled with zeros; what nobody sees is zero as well."""
        keys = k.shape[-2]
        for first in range(0, keys, tile):
            part = [_padded(x[..., first : first + tile, :], tile) for x in (k, v)]
            s, slope, seen = logits_of(q, part[0], o, first, keys)
            used = seen.any(axis=-2)[..., None]
            yield first, min(tile, keys - first), np.where(used, part[0], 0), np.where(used, part[1], 0), s, slope, seen

    def widened(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array, list[int]]:
        compute = np.float64 if q.dtype == np.float64 else np.float32
        h, g = q.shape[1], k.shape[1]
        order = [key_head(i, h, g) for i in range(h)]
        return q.astype(compute), k.astype(compute)[:, order], v.astype(compute)[:, order], order

    def run(q: Array, k: Array, v: Array, o: dict[str, Any]) -> tuple[Array, Array]:
        q_, k_, v_, _ = widened(q, k, v)
        top = np.full(q_.shape[:-1], start, dtype=q_.dtype)
        total = np.zeros_like(top)
        out = np.zeros((*q_.shape[:-1], v_.shape[-1]), dtype=q_.dtype)
        sinks = None if drop_sinks else o.get("sinks")
        if sinks is not None:
            top = np.maximum(top, sinks.astype(q_.dtype)[None, :, None])
            total = np.exp(sinks.astype(q_.dtype)[None, :, None] - np.where(top == -np.inf, 0, top))
        for *_, values, s, _, _ in tiles(q_, k_, v_, o):
            new = np.maximum(top, s.max(axis=-1))
            safe = np.where(new == -np.inf, 0, new)
            p = np.exp(s - safe[..., None])
            factor = np.exp(top - safe)
            total = total * factor + p.sum(axis=-1)
            p = p.astype(q.dtype).astype(q_.dtype) if round_weights else p
            out = out * factor[..., None] + p @ values
            top = new
        some = total > 0
        safe = np.where(some, total, 1)
        return np.where(some[..., None], out / safe[..., None], 0), np.where(some, top + np.log(safe), -np.inf)

    def forward(q: Array, k: Array, v: Array, **o: Any) -> Any:
        with np.errstate(all="ignore"):
            out, lse = run(q, k, v, o)
        return (out.astype(q.dtype), lse) if returns_lse else out.astype(q.dtype)

    def backward(
        d_output: Array, q: Array, k: Array, v: Array, *, d_lse: Array | None = None, **o: Any
    ) -> dict[str, Array]:
        with np.errstate(all="ignore"):
            q_, k_, v_, order = widened(q, k, v)
            out, lse = run(q, k, v, o)
            d_out = d_output.astype(q_.dtype)
            delta = (d_out * out).sum(axis=-1) - (0 if d_lse is None else d_lse.astype(q_.dtype))
            safe = np.where(lse == -np.inf, 0, lse)
            scale = scale_of(q.shape[-1]) if o.get("scale") is None else o["scale"]
            d_q, d_k, d_v = (np.zeros(x.shape, q_.dtype) for x in (q_, k_, v_))
            d_bias = np.zeros((*q_.shape[:-1], k_.shape[-2]), q_.dtype)
            for first, width, keys, values, s, slope, _ in tiles(q_, k_, v_, o):
                p = np.where(lse[..., None] == -np.inf, 0, np.exp(s - safe[..., None]))
                d_s = p * (d_out @ values.swapaxes(-1, -2) - delta[..., None])
                inside = slice(first, first + width)
                d_bias[..., inside] = d_s[..., :width]
                d_s = d_s * slope
                if round_weights:
                    p, d_s = (x.astype(q.dtype).astype(q_.dtype) for x in (p, d_s))
                d_v[..., inside, :] = (p.swapaxes(-1, -2) @ d_out)[..., :width, :]
                d_k[..., inside, :] = (d_s.swapaxes(-1, -2) @ q_)[..., :width, :] * q_.dtype.type(scale)
                d_q += d_s @ keys * q_.dtype.type(scale)
            grads = {"q": d_q.astype(q.dtype)}
            for name, x, like in (("k", d_k, k), ("v", d_v, v)):
                total = np.zeros(like.shape, x.dtype)
                for i, head in enumerate(order):
                    total[:, head] = total[:, head] + x[:, i] if sum_over_group else x[:, i]
                grads[name] = total.astype(like.dtype)
            if o.get("bias") is not None:
                grads["bias"] = _summed(d_bias, o["bias"].shape).astype(o["bias"].dtype)
            if o.get("sinks") is not None and not drop_sinks:
                sinks = o["sinks"].astype(q_.dtype)[None, :, None]
                grads["sinks"] = -(np.exp(sinks - safe) * delta).sum(axis=(0, 2)).astype(o["sinks"].dtype)
            return grads

    kinds = inspect.Parameter
    arrays = [kinds(n, kinds.POSITIONAL_OR_KEYWORD) for n in ("q", "k", "v")]
    options = [kinds(n, kinds.KEYWORD_ONLY, default=None) for n in accepts]
    forward.__signature__ = inspect.Signature([*arrays, *options])  # type: ignore[attr-defined]
    return forward, backward


def _padded(x: Array, length: int) -> Array:
    short = length - x.shape[-2]
    return np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, short), (0, 0)]) if short else x


def _columns(x: Array, first: int, width: int, fill: Any) -> Array:
    part = x[..., first : first + width]
    short = width - part.shape[-1]
    return np.pad(part, [(0, 0)] * (x.ndim - 1) + [(0, short)], constant_values=fill) if short else part


def _summed(x: Array, shape: tuple[int, ...]) -> Array:
    extra = x.ndim - len(shape)
    axes = (*range(extra), *(i + extra for i, n in enumerate(shape) if n == 1 and x.shape[i + extra] != 1))
    return x.sum(axis=axes).reshape(shape)
