"""Hash buckets and the sorted order of every round: the discrete half of LSH attention.

    digit[p]  = argmax over n of [x R_p ; -x R_p][n]                     R_p: the columns of factor p
    bucket    = sum_p digit[p] * prod_{u < p} factors[u]                 the first factor is the least significant digit
    order     = argsort of the buckets of a round, stable                chunk c of a round: places c*chunk ... of its order

Nothing here has a gradient.  Arrays are (b, h, s, t): batch, head, hash round, position.

Source: Kitaev et al. 2020, arXiv:2001.04451, section 2 (angular LSH of Andoni et al. 2015, arXiv:1509.02897).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn.arrays import (
    device,
    flatten_leading,
    is_array,
    is_bool,
    is_integer,
    namespace,
    real,
    require_array,
    require_axes,
    require_integer,
    to_namespace,
)
from refattn.contraction import einsum

__all__ = [
    "APART",
    "bucket_factors",
    "hash_buckets",
    "hash_margin",
    "read_buckets",
    "read_mask",
    "sort_buckets",
    "sorted_rounds",
]

APART = 1 << 22
"""Operations from which units hash and sort one by one, and few units compute round by round."""
HASHED = 1 << 20
"""Projections held at a time while hashing."""
DRAWN = 1 << 31
"""Most numbers that rotations are drawn for."""


def bucket_factors(n_buckets: Any, length: int, chunk: int) -> tuple[int, ...]:
    """The factors of the bucket count; the default is one factor 2 * max(1, length // chunk).

    Raises
    ------
    ValueError
        If a factor is odd or below 2: every projection gives two buckets, its positive and its negative side.
    """
    if n_buckets is None:
        return (2 * max(1, length // chunk),)
    many = isinstance(n_buckets, (tuple, list))
    factors = tuple(require_integer("n_buckets", f) for f in (n_buckets if many else (n_buckets,)))
    if not factors or any(f < 2 or f % 2 for f in factors):
        raise ValueError(
            f"n_buckets is {n_buckets!r}: expected an even number of at least 2, or a tuple of such factors"
        )
    return factors


def hash_buckets(x: Any, rotations: Any, factors: tuple[int, ...]) -> Any:
    """Bucket of every vector and round: x (b,h,t,d), rotations (b|1,h|1,d,s,n) -> int64 (b,h,s,t).

    Ties go to the first of the list [x R ; -x R], so a zero vector falls into bucket 0.
    """
    xp = namespace(x)
    x, rotations = real(x), real(rotations)
    b, h, t, d = x.shape
    s, n = rotations.shape[-2:]
    columns = xp.reshape(rotations, (*rotations.shape[:2], d, s * n))
    step = max(1, HASHED // max(1, b * h * s * n))
    parts = []
    for start in range(0, max(t, 1), step):
        projected = einsum("bhtd,bhdn->bhtn", x[:, :, start : min(start + step, t), :], columns)
        projected = xp.reshape(projected, (b, h, projected.shape[2], s, n))
        bucket, base, column = None, 1, 0
        for factor in factors:
            part = projected[..., column : column + factor // 2]
            digit = _signed_argmax(part)
            bucket = digit if bucket is None else bucket + base * digit
            base, column = base * factor, column + factor // 2
        parts.append(bucket)
    found = parts[0] if len(parts) == 1 else xp.concat(parts, axis=2)
    return xp.permute_dims(found, (0, 1, 3, 2))


def _signed_argmax(x: Any) -> Any:
    """argmax over the last axis of [x ; -x], without building it."""
    xp = namespace(x)
    high, low = xp.argmax(x, axis=-1), xp.argmin(x, axis=-1)
    positive = xp.max(x, axis=-1) >= -xp.min(x, axis=-1)
    return xp.astype(xp.where(positive, high, low + x.shape[-1]), xp.int64)


def sort_buckets(buckets: Any) -> tuple[Any, Any]:
    """Positions of every round by (bucket, position), and the place of every position: int64 (b,h,s,t) each.

    A stable sort of the bucket numbers alone: no key that joins bucket, round and position, so nothing can overflow.
    """
    xp = namespace(buckets)
    keys = buckets
    if math.prod(buckets.shape) and int(xp.max(buckets)) < 1 << 15:
        keys = xp.astype(buckets, xp.int16)  # NumPy sorts 16-bit integers by radix
    order = xp.astype(xp.argsort(keys, axis=-1, stable=True), xp.int64)
    return order, xp.astype(xp.argsort(order, axis=-1, stable=False), xp.int64)


def sorted_rounds(buckets: Any, backend: Any) -> list[Any]:
    """:func:`sort_buckets`, unit by unit where there is much to sort."""
    work = 16 * buckets.shape[2] * buckets.shape[3]
    return _by_unit(
        backend,
        buckets.shape[:2],
        buckets.shape,
        2,
        work,
        device(buckets),
        lambda unit: sort_buckets(buckets[(*unit, ...)]),
    )


def hash_margin(x: np.ndarray, rotations: np.ndarray, factors: tuple[int, ...]) -> np.ndarray:
    """Smallest lead of a winning bucket over the runner-up, in any round and factor, relative to the norm: (b,h,t)."""
    rotations = rotations if rotations.ndim > 3 else rotations[None]
    projected = np.einsum("...td,...dsn->...tsn", x / np.sqrt(np.sum(x * x, -1, keepdims=True)), rotations)
    lead, start = np.full(x.shape[:-1], np.inf), 0
    for factor in factors:
        part = projected[..., start : start + factor // 2]
        ranked = np.sort(np.concatenate([part, -part], axis=-1), axis=-1)
        lead = np.minimum(lead, np.min(ranked[..., -1] - ranked[..., -2], axis=-1))
        start += factor // 2
    return lead


# ------------------------------------------------------------------------------------------------ arguments


def read_mask(mask: Any, lead: tuple[int, ...], t: int) -> Any:
    """The mask as (b|1, 1, t), or None."""
    if mask is None:
        return None
    if not is_array(mask) or not is_bool(mask.dtype):
        kind = f"has dtype {mask.dtype}" if is_array(mask) else f"is a {type(mask).__name__}"
        raise TypeError(f"mask {kind}: expected a bool array (..., t), True = a key")
    require_axes({"t": t}, mask=(mask, "... t"))
    _require_within(
        "mask", mask, 1, lead, "(..., t); a (..., q, k) mask goes in as pattern=refattn.patterns.dense(mask)"
    )
    flat = flatten_leading(mask, 1, lead)
    return namespace(mask).expand_dims(flat, axis=1)


def _require_within(name: str, x: Any, keep: int, lead: tuple[int, ...], shape: str) -> None:
    own = tuple(x.shape[: x.ndim - keep])
    fits = len(own) <= len(lead) and all(m in (1, n) for m, n in zip(reversed(own), reversed(lead), strict=False))
    if not fits:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: its leading axes do not broadcast to {lead}; expected {shape}"
        )


def read_buckets(
    x: Any,
    backend: Any,
    lead: tuple[int, ...],
    *,
    rotations: Any,
    buckets: Any,
    rng: Any,
    hashes: Any,
    n_buckets: Any,
    chunk: int,
    pad: Any,
) -> Any:
    """Buckets of every round, int64 (b,h,s,t), from whatever was given; tokens that ``pad`` hides fall behind all others."""
    xp = namespace(x)
    b, h, t, d = x.shape
    sources = {"rotations": rotations, "buckets": buckets, "rng": rng}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        what = " and ".join(given) or "none of them"
        raise ValueError(f"the buckets come from one of rotations, buckets and rng: {what} was given")
    if hashes is not None:
        hashes = require_integer("hashes", hashes, minimum=1)
    factors = None if n_buckets is None else bucket_factors(n_buckets, t, chunk)
    if buckets is not None:
        found = _given_buckets(buckets, xp, lead, (b, h, t), hashes, factors, pad is not None)
    else:
        if rng is not None:
            if not isinstance(rng, np.random.Generator):
                raise TypeError(f"rng is a {type(rng).__name__}: expected a numpy.random.Generator")
            factors = bucket_factors(n_buckets, t, chunk)
            shape = (d, hashes or 1, sum(factors) // 2)
            if math.prod(shape) > DRAWN:
                raise ValueError(
                    f"hashes and n_buckets ask for rotations (d, s, n) = {shape}: expected at most {DRAWN} numbers"
                )
            rotations = to_namespace(rng.standard_normal(shape), xp, like=x, dtype=real(x).dtype)
        require_array("rotations", rotations)
        factors = (2 * rotations.shape[-1],) if factors is None and rotations.ndim else factors or (2,)
        found = _hashed(x, backend, rotations, lead, hashes, factors)
    if pad is not None:
        if factors is not None:
            last = math.prod(factors)
        else:
            shown = xp.where(pad[:, :, None, :], found, xp.zeros_like(found))
            last = 1 + (int(xp.max(shown)) if t and b and h else 0)
        found = xp.where(pad[:, :, None, :], found, xp.full_like(found, last))
    return found


def _given_buckets(
    buckets: Any,
    xp: Any,
    lead: tuple[int, ...],
    sizes: tuple[int, int, int],
    hashes: int | None,
    factors: tuple[int, ...] | None,
    padding: bool,
) -> Any:
    """Buckets that the caller gives, checked, as int64 (b,h,s,t)."""
    b, h, t = sizes
    if not is_array(buckets) or not is_integer(buckets.dtype):
        raise TypeError("buckets: expected an integer array (..., h, s, t)")
    if buckets.ndim < 3 or buckets.shape[-1] != t or buckets.shape[-3] not in (1, h):
        raise ValueError(f"buckets has shape {tuple(buckets.shape)}: expected (..., h, s, t) with h = {h}, t = {t}")
    if hashes not in (None, buckets.shape[-2]) or buckets.shape[-2] == 0:
        wanted = "at least one round" if hashes is None else f"hashes = {hashes} rounds"
        raise ValueError(f"buckets has shape {tuple(buckets.shape)}: expected (..., h, s, t) with {wanted}")
    _require_within("buckets", buckets, 3, lead, "(..., h, s, t)")
    found = xp.astype(flatten_leading(buckets, 3, lead), xp.int64)
    found = xp.broadcast_to(found, (b, h, *found.shape[2:]))
    if t and b and h:
        lowest, highest = int(xp.min(found)), int(xp.max(found))
        limit = None if factors is None else math.prod(factors) + padding
        if lowest < 0 or (limit is not None and highest >= limit):
            wanted = "numbers from 0" if limit is None else f"numbers from 0 to {limit - 1}"
            raise ValueError(f"buckets holds {lowest} ... {highest}: expected {wanted}, without round offsets")
    return found


def _hashed(
    x: Any, backend: Any, rotations: Any, lead: tuple[int, ...], hashes: int | None, factors: tuple[int, ...]
) -> Any:
    """Buckets by rotations, int64 (b,h,s,t)."""
    xp = namespace(x)
    b, h, t, d = x.shape
    shape = tuple(rotations.shape)
    if len(shape) < 3:
        raise ValueError(f"rotations has shape {shape}: expected (d, s, n), (h, d, s, n) or (..., h, d, s, n)")
    full = rotations if len(shape) > 3 else rotations[None, ...]
    own = (d, shape[-2] if hashes is None else hashes, sum(factors) // 2)
    if shape[-3:] != own or full.shape[-4] not in (1, h) or shape[-2] == 0:
        raise ValueError(
            f"rotations has shape {shape}: expected (d, s, n) = {own}, n half the sum of the factors {factors},"
            f" perhaps after (..., h) with h = {h}"
        )
    _require_within("rotations", full, 4, lead, "(d, s, n), (h, d, s, n) or (..., h, d, s, n)")
    flat = xp.broadcast_to(flatten_leading(full, 4, lead), (b, h, *own))

    def run(unit: tuple[slice, slice]) -> tuple[Any]:
        return (hash_buckets(x[(*unit, ...)], flat[(*unit, ...)], factors),)

    return _by_unit(backend, (b, h), (b, h, own[1], t), 1, t * math.prod(own), device(x), run)[0]


def _by_unit(
    backend: Any,
    units: tuple[int, int],
    shape: tuple[int, ...],
    count: int,
    work: int,
    where: Any,
    function: Callable[[tuple[slice, slice]], tuple[Any, ...]],
) -> list[Any]:
    """int64 arrays (b,h,...) of that shape, made for every (batch, head) unit by itself where there is much to do."""
    b, h = units
    tasks = [(slice(0, b), slice(0, h))]
    if b * h * work > APART:
        tasks = [(slice(i, i + 1), slice(j, j + 1)) for i in range(b) for j in range(h)]
    found = [backend.xp.zeros(shape, dtype=backend.xp.int64, device=where) for _ in range(count)]
    for unit, parts in zip(tasks, backend.map(function, tasks, work=b * h * work), strict=True):
        found = [backend.assign(x, (*unit, ...), part) for x, part in zip(found, parts, strict=True)]
    return found
