r"""Adaptive attention span: every head learns how far back it looks, by a soft ramp at the end of its span.

    logits[h,q,n] = scale * sum_d q[h,q,d] * (k[h,q-n,d] + key_positions[d,n])     n = 1 ... max_span, the n-th token before q
    ramp[h,q,n]   = clip((R + span[h,q] - x) / R, 0, 1)                             x = n - 1 + distance_origin
    output[h,q,e] = sum_n a[h,q,n] v[h,q-n,e]     a = ramp exp(logits) / sum_n ramp exp(logits)

======  ======================================================  ====================================
letter  axis                                                    where
======  ======================================================  ====================================
...     any batch axes, broadcast as in matmul                  all
h       head                                                    all
q, k    query position, key position; query i stands at         q, output; k, v
        k - q + i on the key axis
d, e    query/key channel, value channel                        q, k, key_positions; v, output
n       distance to a past key, from 1; persistent slot         key_positions; persistent_keys
======  ======================================================  ====================================

Conventions: a query does not see itself; the ramp is a factor of the exponential, not a term of the logit, so it also has a
gradient where it is 0: at both of its ends the inclusive one (factor 1).  Persistent slots take part in the softmax
without a ramp.  A query with nothing to see gives output 0, lse -inf and gradients 0.  Only keys within the largest span in
use (plus the ramp) are touched.

Source: Sukhbaatar et al. 2019, arXiv:1905.07799, section 2 (``distance_origin=1``); their released code counts distances
from 0 and divides by sum(ramp softmax) + 1e-8 (``distance_origin=0, renormalize_eps=1e-8``).  Persistent slots: Sukhbaatar et
al. 2019, arXiv:1907.01470, section 3.
"""

import math
from typing import Any

import numpy as np

from refattn.arrays import (
    broadcast_leading,
    device,
    flatten_leading,
    is_array,
    namespace,
    real,
    require_array,
    require_axes,
    require_finite,
    require_integer,
    require_number,
    require_one_of,
    require_positive,
)
from refattn.core import options
from refattn.core.blocks import product
from refattn.cost import require_sizes
from refattn.mechanism import function, mechanism
from refattn.mistakes.adaptive_span import adaptive_span_mutations
from refattn.normalization import row_maximum
from refattn.records import Counts, Elements, Pass, Result

__all__ = ["adaptive_span_attention", "span_penalty"]

ROWS = 64
"""Most queries of a tile: a tile of a queries touches a + span keys."""
DROPPED = 64
"""Slots that the released code drops at a time."""


class _Problem:
    """Arguments as flat batches (b, h, ...), and what depends on the spans alone."""

    def __init__(self, q: Any, k: Any, v: Any, backend: Any, given: dict[str, Any]) -> None:
        xp = self.xp = backend.xp
        self.backend, self.given = backend, given
        require_axes(q=(q, "... h q d"), k=(k, "... h k d"), v=(v, "... h k e"))
        self.lead = broadcast_leading(q=(q, 3), k=(k, 3), v=(v, 3))
        self.h, self.n_q, self.d = q.shape[-3:]
        self.n_k, self.e = v.shape[-2:]
        self.b = math.prod(self.lead)
        if self.n_q > self.n_k:
            raise ValueError(f"q has {self.n_q} positions and k has {self.n_k}: the queries are the newest of the keys")
        self.q, self.k, self.v = (flatten_leading(x, 3, self.lead) for x in (q, k, v))
        self.q = xp.broadcast_to(self.q, (self.b, *self.q.shape[1:]))
        self.max_span = self._max_span(given["max_span"], given["key_positions"])
        self.ramp = given["ramp"]
        require_positive("ramp", self.ramp)
        require_one_of("distance_origin", given["distance_origin"], (0, 1))
        eps = given["renormalize_eps"]
        require_finite("renormalize_eps", eps)
        if eps < 0:
            raise ValueError(f"renormalize_eps is {eps}: expected at least 0")
        scale = given["scale"]
        if scale is None:
            self.scale = self.d**-0.5 if self.d else 1.0
        else:
            require_finite("scale", scale)
            self.scale = xp.reshape(scale, ()) if is_array(scale) else scale
        self.span = self._span(given["span"])
        self.positions = self._positions(given["key_positions"])
        self.slots = self._slots(given["persistent_keys"], given["persistent_values"])
        self.mask = self._mask(given["mask"])
        self.reach = self._reach()

    def _max_span(self, value: Any, key_positions: Any) -> int:
        if value is None:
            value = self.n_k - self.n_q if key_positions is None else key_positions.shape[-1]
            if not value:
                raise ValueError(
                    "max_span is missing: there are as many queries as keys, so nothing else says how far back"
                )
        return require_integer("max_span", value, minimum=1)

    def _span(self, span: Any) -> Any:
        """(b|1, h, q|1)."""
        xp = self.xp
        shape = tuple(span.shape)
        if shape == (self.h,):
            flat = xp.reshape(span, (1, self.h, 1))
        elif len(shape) >= 2 and shape[-2:] == (self.h, self.n_q):
            broadcast_leading(span=(span, 2), q=(self.given["q"], 3))
            flat = flatten_leading(span, 2, self.lead)
        else:
            raise ValueError(f"span has shape {shape}: expected ({self.h},) or (..., {self.h}, {self.n_q})")
        if span.size and not bool(xp.all((real(flat) >= 0) & (real(flat) <= self.max_span))):
            low, high = float(xp.min(real(flat))), float(xp.max(real(flat)))
            raise ValueError(
                f"span reaches from {low:g} to {high:g}: expected within [0, max_span] = [0, {self.max_span}] tokens"
            )
        return flat

    def _positions(self, key_positions: Any) -> Any:
        """(h|1, d, n)."""
        if key_positions is None:
            return None
        shape = tuple(key_positions.shape)
        if shape not in ((self.d, self.max_span), (self.h, self.d, self.max_span)):
            wanted = f"({self.d}, {self.max_span}) or ({self.h}, {self.d}, {self.max_span})"
            raise ValueError(
                f"key_positions has shape {shape}: expected (d, n) or (h, d, n) with n = max_span: {wanted}"
            )
        return self.xp.reshape(key_positions, (1, *shape)) if len(shape) == 2 else key_positions

    def _slots(self, keys: Any, values: Any) -> Any:
        if (keys is None) != (values is None):
            raise TypeError("persistent_keys and persistent_values go together: only one of them was given")
        if keys is None:
            return None
        sizes = {"h": self.h, "d": self.d, "e": self.e}
        require_axes(sizes, persistent_keys=(keys, "h n d"), persistent_values=(values, "h n e"))
        return (keys, values) if keys.shape[1] else None

    def _mask(self, mask: Any) -> Any:
        if mask is None:
            return None
        options.require_mask(mask, (*self.lead, self.h, self.n_q, self.n_k))
        full = self.xp.reshape(mask, (1,) * (3 - mask.ndim) + tuple(mask.shape)) if mask.ndim < 3 else mask
        return flatten_leading(full, 3, self.lead)

    def _reach(self) -> int:
        """Distances that can have weight: up to the largest span and its ramp.

        With ``renormalize_eps`` the sum of the softmax counts too, so it must run over the released code's slots: that code
        drops the oldest ones in multiples of 64.
        """
        if not self.span.size:
            return 0
        largest = math.ceil(float(self.xp.max(real(self.span)))) + math.ceil(self.ramp)
        if self.given["renormalize_eps"]:
            return self.max_span - min(self.max_span - 1, max(0, self.max_span - largest)) // DROPPED * DROPPED
        return min(self.max_span, largest + 1 - self.given["distance_origin"])


class _Tile:
    """Queries i0 ... i1 - 1 of one batch entry and all heads of its group, and the band of keys before them."""

    def __init__(self, p: _Problem, b: int, i0: int, i1: int) -> None:
        xp = p.xp
        self.p, self.b, self.i0, self.i1 = p, b, i0, i1
        self.a, self.w = i1 - i0, p.reach
        first = p.n_k - p.n_q + i0 - p.reach  # key of column 0; columns of keys before the first are cut off
        self.cut = max(0, -first)
        self.keys = slice(first + self.cut, first + self.a + p.reach - 1)
        entry = lambda x: x[min(b, x.shape[0] - 1), ...]  # noqa: E731
        self.q = entry(p.q)[:, i0:i1, :]
        self.k, self.v = entry(p.k)[:, self.keys, :], entry(p.v)[:, self.keys, :]
        like = {"device": device(p.q)}
        rows, columns = xp.arange(self.a, **like)[:, None], xp.arange(self.cut, self.a + self.w - 1, **like)[None, :]
        distance = rows + self.w - columns  # of query row to key column
        self.visible = (distance >= 1) & (distance <= self.w)
        if p.mask is not None:
            m = entry(p.mask)
            rows_of = m[:, i0:i1, :] if m.shape[-2] != 1 else m
            self.visible = self.visible & (rows_of[..., self.keys] if m.shape[-1] != 1 else rows_of)
        span = entry(p.span)
        self.span = span[:, i0:i1, None] if span.shape[-1] != 1 else span[..., None]
        x = xp.astype(distance - 1 + p.given["distance_origin"], real(p.q).dtype)
        self.level = (p.ramp + self.span - x) / p.ramp  # the ramp before it is clipped
        inside = (real(self.level) >= 0) & (real(self.level) <= 1)
        self.slope = self.visible & inside  # where the ramp's end or middle lets a gradient through
        weight = xp.where(real(self.level) > 1, xp.ones_like(self.level), self.level)
        weight = xp.where(real(self.level) > 0, weight, xp.zeros_like(weight))
        self.weight = xp.where(self.visible, weight, xp.zeros_like(weight))

    def skew(self, x: Any) -> Any:
        """(h, a, w) by distance, furthest first -> (h, a, columns) by key: row a moves a places to the right."""
        xp, (h, a, w) = self.p.xp, x.shape
        padded = xp.concat([x, xp.zeros((h, a, a), dtype=x.dtype, device=device(x))], axis=-1)
        shifted = xp.reshape(padded, (h, -1))[:, : a * (w + a - 1)]
        return xp.reshape(shifted, (h, a, w + a - 1))[..., self.cut :]

    def unskew(self, x: Any) -> Any:
        """Adjoint of ``skew``."""
        xp, (h, a) = self.p.xp, x.shape[:2]
        zeros = {"dtype": x.dtype, "device": device(x)}
        x = xp.concat([xp.zeros((h, a, self.cut), **zeros), x], axis=-1)
        flat = xp.concat([xp.reshape(x, (h, -1)), xp.zeros((h, a), **zeros)], axis=-1)
        return xp.reshape(flat, (h, a, self.w + a))[..., : self.w]

    def far_first(self, key_positions: Any) -> Any:
        """Columns 1 ... w of the position table, furthest first."""
        return self.p.xp.flip(key_positions[..., : self.w], axis=-1)

    def logits(self) -> tuple[Any, Any]:
        """Logits of the band (h, a, columns) and of the persistent slots (h, a, n) or None."""
        p, xp = self.p, self.p.xp
        scaled = self.q * p.scale
        s = p.backend.matmul(scaled, xp.matrix_transpose(self.k))
        s = xp.where(self.visible, s, xp.zeros_like(s))
        if p.positions is not None:
            s = s + self.skew(p.backend.matmul(scaled, self.far_first(p.positions)))
        return s, None if p.slots is None else p.backend.matmul(scaled, xp.matrix_transpose(p.slots[0]))

    def softmax(self) -> tuple[Any, Any, Any, Any, Any]:
        """exp(logits - shift) of band (0 where invisible) and slots, sum of weighted exp, denominator, shift."""
        p, xp = self.p, self.p.xp
        s, slots = self.logits()
        seen = self.visible if p.given["renormalize_eps"] else self.visible & (real(self.level) >= 0)
        weighty = real(self.weight) > 0
        leading = seen if p.given["renormalize_eps"] else weighty
        peak, _ = row_maximum(xp.where(leading, s, xp.full_like(s, -math.inf)))
        if slots is not None:
            peak = xp.maximum(peak, row_maximum(slots)[0])
        shift = xp.where(peak == -math.inf, xp.zeros_like(peak), peak)[..., None]
        band = xp.where(seen, xp.exp(xp.where(seen, s, xp.zeros_like(s)) - shift), xp.zeros_like(s))
        extra = None if slots is None else xp.exp(slots - shift)
        total = xp.sum(xp.where(weighty, self.weight * band, xp.zeros_like(band)), axis=-1)
        all_of = xp.sum(xp.where(seen, band, xp.zeros_like(band)), axis=-1)
        if extra is not None:
            total, all_of = total + xp.sum(extra, axis=-1), all_of + xp.sum(extra, axis=-1)
        denominator = total + p.given["renormalize_eps"] * all_of if p.given["renormalize_eps"] else total
        return band, extra, total, denominator, shift[..., 0]

    def shares(self) -> tuple[Any, ...]:
        """Weights a of band and slots, exp / denominator of both, exp / weighted sum, lse."""
        xp = self.p.xp
        band, extra, total, denominator, shift = self.softmax()

        def over(x: Any) -> Any:
            return xp.where(real(x) == 0, xp.zeros_like(x), 1 / xp.where(real(x) == 0, xp.ones_like(x), x))[..., None]

        raw = band * over(denominator)
        a = xp.where(real(self.weight) > 0, self.weight * raw, xp.zeros_like(raw))
        slots = None if extra is None else extra * over(denominator)
        safe = xp.where(real(total) == 0, xp.ones_like(total), total)
        lse = xp.where(real(total) == 0, xp.full_like(total, -math.inf), xp.log(safe) + shift)
        # exp(logit - lse) = exp / total = raw * denominator / total
        factor = denominator[..., None] * over(total)
        return a, slots, raw, factor, lse

    def attend(self, a: Any, slots: Any) -> Any:
        """Weighted values (h, a, e)."""
        out = product(self.p.backend, a, self.v, self.visible & (real(self.weight) > 0))
        return out if slots is None else out + self.p.backend.matmul(slots, self.p.slots[1])


def _tiles(p: _Problem, b: int) -> list[_Tile]:
    rows = max(1, min(ROWS, p.reach))
    return [_Tile(p, b, i, min(i + rows, p.n_q)) for i in range(0, p.n_q, rows)]


@options.takes("mask", "scale", "keep_weights")
def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    span: Any,
    key_positions: Any = None,
    ramp: float = 32,
    max_span: int | None = None,
    distance_origin: int = 1,
    renormalize_eps: float = 0.0,
    persistent_keys: Any = None,
    persistent_values: Any = None,
    backend: Any,
    **shared: Any,
) -> tuple[Result, Any]:
    """Softmax attention over past keys, each weighted by a ramp that ends where the head's span does.

    Parameters
    ----------
    q : array (..., h, q, d)
        Query i stands at k - q + i on the key axis.
    k : array (..., h, k, d)
    v : array (..., h, k, e)
    span : array (h,) or (..., h, q)
        Tokens, in [0, max_span].  Differentiable.
    key_positions : array (d, n) or (h, d, n), optional
        Column n belongs to the n-th nearest past key, column 0 to the previous token; n = max_span.  Differentiable.
    ramp : float
        Tokens over which the weight falls from 1 to 0.
    max_span : int
        Keys that a query can reach; default k - q (or the columns of ``key_positions``), required if that is 0.
    distance_origin : {1, 0}
        Distance of the previous token: 1 in the paper, 0 in the released code.
    renormalize_eps : float
        Added to sum(ramp softmax) before the division, the softmax running over the keys within the largest span and its
        ramp, persistent slots included; 0 in the paper, 1e-8 in the released code.
    persistent_keys, persistent_values : arrays (h, n, d), (h, n, e), optional
        Slots that every query sees.  Differentiable.
    {shared}

    Returns
    -------
    output : array (..., h, q, e)
    lse : array (..., h, q)
        ln sum ramp exp(logits), persistent slots included.
    weights, logits : arrays (..., h, q, k + n)
        With ``keep_weights``; the persistent slots come last, logits are -inf where a query does not see a key.

    Raises
    ------
    ValueError
        A span outside [0, max_span], a table that does not fit, a missing ``max_span``.

    Examples
    --------
    Two past tokens of equal logits, span 0 and a ramp of 2: the nearer one (distance 1) has weight 1/2, the further one 0.

    >>> import numpy as np
    >>> q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 3, 1)), np.array([[[5.0], [7.0], [9.0]]])
    >>> adaptive_span_attention(q, k, v, span=np.array([0.0]), ramp=2)
    array([[[7.]]])
    """
    given = {
        "q": q, "span": span, "key_positions": key_positions, "ramp": ramp, "max_span": max_span,
        "distance_origin": distance_origin, "renormalize_eps": renormalize_eps, "persistent_keys": persistent_keys,
        "persistent_values": persistent_values, "scale": shared.get("scale"), "mask": shared.get("mask"),
    }  # fmt: skip
    p = _Problem(q, k, v, backend, given)
    xp = p.xp
    keep = bool(shared.get("keep_weights", False))

    def run(b: int) -> tuple[Any, ...]:
        with backend.quiet():
            parts = []
            for tile in _tiles(p, b):
                a, slots, _, _, lse = tile.shares()
                parts.append((tile.attend(a, slots), lse, *(_kept(tile, a, slots) if keep else ())))
            return tuple(xp.concat(pieces, axis=1) for pieces in zip(*parts, strict=True))

    if p.b * p.h * p.n_q:
        pairs = p.b * p.h * p.n_q * (p.reach + ROWS)
        whole = [xp.stack(x, axis=0) for x in zip(*backend.map(run, range(p.b), work=2 * pairs * p.d), strict=True)]
    else:
        zeros = {"dtype": q.dtype, "device": device(q)}
        n = p.n_k + (0 if p.slots is None else p.slots[0].shape[1])
        shapes = [(p.b, p.h, p.n_q, p.e), (p.b, p.h, p.n_q), *([(p.b, p.h, p.n_q, n)] * (2 * keep))]
        whole = [xp.zeros(s, **zeros) for s in shapes]
    names = ("output", "lse", "weights", "logits")[: len(whole)]
    fields = {n: xp.reshape(x, (*p.lead, *x.shape[1:])) for n, x in zip(names, whole, strict=True)}
    return Result(**fields), (p, whole[0])


def _kept(tile: _Tile, a: Any, slots: Any) -> tuple[Any, Any]:
    """Weights and logits of a tile laid out over all keys, persistent slots last."""
    p, xp = tile.p, tile.p.xp
    s, slot_logits = tile.logits()
    seen = tile.visible if p.given["renormalize_eps"] else tile.visible & (real(tile.level) >= 0)
    found = []
    for band, extra, hidden in (
        (a, slots, 0.0),
        (xp.where(seen, s, xp.full_like(s, -math.inf)), slot_logits, -math.inf),
    ):
        wide = xp.full((p.h, tile.a, p.n_k), hidden, dtype=band.dtype, device=device(band))
        wide = p.backend.assign(wide, (slice(None), slice(None), tile.keys), band)
        found.append(wide if extra is None else xp.concat([wide, extra], axis=-1))
    return found[0], found[1]


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """Cotangents of q, k, v, span, key_positions, the persistent slots and scale."""
    p, result = saved
    xp, backend = p.xp, p.backend
    zeros = {"dtype": p.q.dtype, "device": device(p.q)}
    d_out = xp.zeros(result.shape, **zeros) if output is None else flatten_leading(output, 3, p.lead)
    d_lse = xp.zeros(result.shape[:-1], **zeros) if lse is None else flatten_leading(lse, 2, p.lead)

    def run(b: int) -> dict[str, Any]:
        with backend.quiet():
            return _backward_entry(p, b, result[b, ...], d_out[b, ...], d_lse[b, ...])

    pairs = p.b * p.h * p.n_q * (p.reach + ROWS)
    parts = backend.map(run, range(p.b) if p.h * p.n_q else (), work=5 * pairs * p.d)
    if not parts:
        return {}
    gradients = {}
    for name in parts[0]:
        per_batch = [part[name] for part in parts]
        if name in ("q", "k", "v", "span"):
            stacked = xp.stack(per_batch, axis=0)
            gradients[name] = xp.reshape(stacked, (*p.lead, *stacked.shape[1:]))
        else:
            gradients[name] = sum(per_batch[1:], start=per_batch[0])
    if p.given["span"].ndim == 1:  # (..., h, q) -> (h,)
        gradients["span"] = xp.sum(gradients["span"], axis=-1)
    if p.positions is not None and p.given["key_positions"].ndim == 2:
        gradients["key_positions"] = xp.sum(gradients["key_positions"], axis=0)
    return gradients


def _backward_entry(p: _Problem, b: int, result: Any, d_out: Any, d_lse: Any) -> dict[str, Any]:
    """Gradients of one batch entry.

    With a = ramp exp(s) / D, D = M + eps Z, M = sum ramp exp(s), Z = sum exp(s), Delta = d_out . output:
    da = d_out . v;  ds = a (da - Delta) - eps Delta exp(s) / D + d_lse a D / M;  dramp = exp(s) (da - Delta) / D + d_lse exp(s) / M
    """
    xp, backend = p.xp, p.backend
    zeros = {"dtype": p.q.dtype, "device": device(p.q)}
    eps = p.given["renormalize_eps"]
    d_k, d_v = xp.zeros((p.h, p.n_k, p.d), **zeros), xp.zeros((p.h, p.n_k, p.e), **zeros)
    d_q, d_span = [], []
    d_positions = None if p.positions is None else xp.zeros((p.h, p.d, p.max_span), **zeros)
    d_slots = None if p.slots is None else [xp.zeros(x.shape, **zeros) for x in p.slots]
    for tile in _tiles(p, b):
        rows = slice(tile.i0, tile.i1)
        a, slots, raw, factor, _ = tile.shares()
        d_o, d_z = d_out[:, rows, :], d_lse[:, rows, None]
        weighty = tile.visible & (real(tile.weight) > 0)
        delta = xp.sum(d_o * result[:, rows, :], axis=-1, keepdims=True)
        dead = xp.sum(real(raw), axis=-1, keepdims=True) == 0 if slots is None else xp.zeros_like(real(delta)) > 0
        delta = xp.where(dead, xp.zeros_like(delta), delta)
        d_a = backend.matmul(d_o, xp.matrix_transpose(tile.v))
        d_a = xp.where(tile.visible & (raw != 0), d_a - delta, xp.zeros_like(d_a))
        d_ramp = raw * (d_a + d_z * factor)  # the weight of 0 at the far end of the ramp has a slope too
        d_s = xp.where(weighty, tile.weight * d_ramp, xp.zeros_like(d_ramp)) - eps * delta * raw
        d_span.append(xp.sum(xp.where(tile.slope, d_ramp, xp.zeros_like(d_ramp)), axis=-1) / p.ramp)
        scaled = tile.q * p.scale
        place = (slice(None), tile.keys, slice(None))
        d_v = backend.accumulate(d_v, place, product(backend, a, d_o, weighty, transposed=True))
        d_k = backend.accumulate(d_k, place, product(backend, d_s, scaled, tile.visible, transposed=True))
        d_rows = product(backend, d_s, tile.k, tile.visible)
        if d_positions is not None:
            by_distance = tile.unskew(d_s)
            d_rows = d_rows + backend.matmul(by_distance, xp.matrix_transpose(tile.far_first(p.positions)))
            share = xp.flip(backend.matmul(xp.matrix_transpose(scaled), by_distance), axis=-1)
            d_positions = backend.accumulate(d_positions, (slice(None), slice(None), slice(0, p.reach)), share)
        if d_slots is not None:
            keys, values = p.slots
            d_weights = backend.matmul(d_o, xp.matrix_transpose(values))
            d_s = slots * (d_weights - delta * (1 + eps) + d_z * factor)
            d_rows = d_rows + backend.matmul(d_s, keys)
            d_slots[0] = d_slots[0] + backend.matmul(xp.matrix_transpose(d_s), scaled)
            d_slots[1] = d_slots[1] + backend.matmul(xp.matrix_transpose(slots), d_o)
        d_q.append(d_rows)
    rows_of_q = xp.concat(d_q, axis=1)
    own = p.q[b, ...]
    found = {
        "q": rows_of_q * p.scale,
        "k": d_k,
        "v": d_v,
        "span": xp.concat(d_span, axis=1),
        "scale": xp.sum(xp.where(rows_of_q == 0, xp.zeros_like(own), rows_of_q * own)),
    }
    if d_positions is not None:
        found["key_positions"] = d_positions
    if d_slots is not None:
        found.update(persistent_keys=d_slots[0], persistent_values=d_slots[1])
    return found


def cost(
    *,
    b: int = 1,
    h: int = 1,
    q: int,
    k: int,
    d: int,
    e: int | None = None,
    span: Any,
    ramp: float = 32,
    max_span: int | None = None,
    n: int = 0,
    positions: bool = True,
) -> Counts:
    """Counts of pairs within span + ramp, and of n persistent slots for every query; a span, or one for each head.

    The largest span in use is computed for all heads.  ``positions``: whether ``key_positions`` are given, whose products run
    by distance.
    """
    e = d if e is None else e
    require_sizes(b=b, h=h, q=q, k=k, d=d, e=e, n=n)
    ramp = require_number("ramp", ramp, above=0)
    many = isinstance(span, (list, tuple)) or (is_array(span) and span.ndim > 0)
    spans = [require_number("span", x, minimum=0) for x in (span if many else [span] * max(1, h))]
    if many and len(spans) != h:
        raise ValueError(f"span has {len(spans)} entries: expected a number, or one for each of the {h} heads")
    limit = k - q if max_span is None else require_integer("max_span", max_span, minimum=1)
    reaches = [min(limit, math.ceil(x) + math.ceil(ramp)) for x in spans]
    reach, before = max(reaches), k - q  # the largest in use, keys before the first query
    pairs = b * sum(_within(q, before, x) for x in reaches) * (h // max(1, len(reaches)))
    rows = max(1, min(ROWS, reach))
    columns = q * (reach + rows - 1) - (rows - q % rows) * (q % rows) * bool(q % rows)  # the last tile is narrower
    short = max(
        0, min(-(-q // rows), -(-(reach - before) // rows))
    )  # tiles whose first columns lie before the first key
    cut = sum(min(rows, q - t * rows) * (reach - before - t * rows) for t in range(short))
    computed = b * h * (columns - cut)
    by_distance, slots = b * h * q * reach * bool(positions), b * h * q * n
    inputs = Elements(storage=b * h * (q * d + k * (d + e)))
    results = Elements(storage=b * h * q * e, compute=b * h * q)
    tile = Elements(compute=4 * h * rows * (reach + rows))

    def counted(channels: int, position: int, **moved: Any) -> Pass:
        return Pass(
            multiplies=pairs * (channels + position * bool(positions)) + slots * channels,
            computed=computed * channels + by_distance * position + slots * channels,
            elementwise=(pairs + slots) * 8,
            **moved,
        )

    return Counts(
        forward=counted(d + e, d, read=inputs, written=results, peak=results + tile),
        backward=counted(
            3 * d + 2 * e,
            3 * d,
            read=inputs + results + Elements(storage=b * h * q * e),
            written=inputs,
            peak=inputs + tile,
        ),
        saved=inputs + results,
        parameters=h + d * limit * bool(positions) + h * n * (d + e),
    )


def _within(q: int, before: int, reach: int) -> int:
    """Pairs of q queries, the first of which has ``before`` keys before it and each next one more, at most ``reach`` each."""
    short = max(0, min(q, reach - before))
    return short * before + short * (short - 1) // 2 + (q - short) * reach


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    q: int = 5,
    k: int = 12,
    d: int = 4,
    e: int = 3,
    n: int = 0,
    max_span: int | None = None,
    ramp: float = 2.5,
    **settings: Any,
) -> dict[str, Any]:
    """Normal arrays, spans spread over [0, max_span], a position table, n persistent slots; options are passed through."""
    normal = rng.standard_normal
    limit = max_span or max(1, k - q)
    found = {
        "q": normal((b, h, q, d)), "k": normal((b, h, k, d)), "v": normal((b, h, k, e)), "span": limit * rng.random(h),
        "key_positions": normal((d, limit)), "max_span": limit, "ramp": ramp,
    }  # fmt: skip
    if n:
        found.update(persistent_keys=normal((h, n, d)), persistent_values=normal((h, n, e)))
    return {**found, **settings}


_PROBES = (
    {
        "says": "spans of whole tokens: both ends of the ramp are hit",
        "h": 3,
        "q": 5,
        "k": 17,
        "span": np.array([4.0, 0.0, 7.0]),
        "ramp": 3.0,
        "max_span": 12,
    },
    {
        "says": "a short history: the first queries reach back beyond the first key",
        "h": 3,
        "q": 14,
        "k": 17,
        "span": np.array([2.5, 9.25, 6.0]),
        "ramp": 2.0,
        "max_span": 11,
    },
    {"says": "persistent slots", "h": 3, "q": 6, "k": 19, "n": 2, "ramp": 2.5},
    {"says": "the released form", "h": 3, "q": 6, "k": 19, "distance_origin": 0, "renormalize_eps": 1e-3, "ramp": 2.5},
)

adaptive_span_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    mutations=adaptive_span_mutations,
    name="adaptive_span_attention",
    differentiable=("q", "k", "v", "span", "key_positions", "persistent_keys", "persistent_values", "scale"),
    outputs=("output", "lse"),
    probes=_PROBES,
)


def _penalty_forward(span: Any, *, coefficient: float, max_span: int) -> tuple[Result, Any]:
    """Penalty on spans: coefficient * mean over heads of the span in tokens (over queries too, for a span per query).

    Parameters
    ----------
    span : array (h,) or (..., h, q)
        Tokens.
    coefficient : float
        2e-6 in the paper, 0.5e-6 at max_span 8192; summed over layers by the caller.
    max_span : int
        Only checks the spans.

    Source: Sukhbaatar et al. 2019, arXiv:1905.07799, equation 4, with spans in tokens.
    """
    require_number("coefficient", coefficient)
    require_integer("max_span", max_span, minimum=1)
    require_array("span", span, axes=1)
    if 0 in span.shape:
        raise ValueError(f"span has shape {tuple(span.shape)}: expected at least one span")
    xp = namespace(span)
    if not bool(xp.all((real(span) >= 0) & (real(span) <= max_span))):
        raise ValueError(f"span is {span}: expected within [0, max_span] = [0, {max_span}] tokens")
    return Result(output=coefficient * xp.mean(span)), (span, coefficient)


def _penalty_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    span, coefficient = saved
    if output is None:
        return {}
    return {"span": 0 * span + output * (coefficient / math.prod(span.shape))}


span_penalty = function(_penalty_forward, _penalty_backward, name="span_penalty", differentiable=("span",))
