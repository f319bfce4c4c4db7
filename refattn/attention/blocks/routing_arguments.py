"""Routing attention: its arrays as the computation takes them, checked."""

import math
from typing import Any

from refattn.arrays import (
    broadcast_leading,
    flatten_leading,
    is_array,
    is_bool,
    is_integer,
    namespace,
    require_axes,
    require_integer,
    to_namespace,
)  # fmt: skip
from refattn.records import Sizes

__all__ = ["by_head", "given_members", "joined", "read_mask", "read_memory", "read_relative", "read_sizes", "widths"]


def read_sizes(q: Any, k: Any, v: Any, centroids: Any, projection: Any) -> Sizes:
    """Sizes of the arrays, which must agree."""
    sizes = require_axes(q=(q, "... h t d"))
    h, d = sizes["h"], sizes["d"]
    require_axes({"h": h, "d": d}, centroids=(centroids, "h c d"))
    require_axes({"h": h, "d": d}, k=(k, "... h t d"))
    require_axes({"h": h, "t": k.shape[-2]}, v=(v, "... h t e"))
    if centroids.shape[-2] == 0:
        raise ValueError(f"centroids has shape {tuple(centroids.shape)}: expected at least one cluster")
    if projection is not None:
        require_axes({"d": d}, projection=(projection, "d d"))
    lead = broadcast_leading(q=(q, 3), k=(k, 3), v=(v, 3))
    return Sizes(lead=lead, h=h, g=h, q=sizes["t"], k=k.shape[-2], d=d, e=v.shape[-1])


def by_head(x: Any, lead: tuple[int, ...]) -> Any:
    """(..., h, t, d) as (b h, t, d), broadcast to all batch axes."""
    x = flatten_leading(x, 3, lead)
    xp, shape = namespace(x), (math.prod(lead), *x.shape[1:])
    return xp.reshape(xp.broadcast_to(x, shape), (shape[0] * shape[1], *shape[2:]))


def joined(parts: Any, sizes: Sizes) -> Any:
    """Parts (n, ...) of all heads as (..., h, ...)."""
    xp = namespace(parts[0])
    x = parts[0] if len(parts) == 1 else xp.concat(list(parts), axis=0)
    return xp.reshape(x, (*sizes.lead, sizes.h, *x.shape[1:]))


def read_mask(name: str, mask: Any, sizes: Sizes, t: int, xp: Any) -> Any:
    """A mask as (b, t), or None."""
    if mask is None:
        return None
    if not is_array(mask) or not is_bool(mask.dtype):
        kind = f"has dtype {mask.dtype}" if is_array(mask) else f"is a {type(mask).__name__}"
        raise TypeError(f"{name} {kind}: expected a bool array (..., t), True = a token")
    own, lead = tuple(mask.shape[:-1]), sizes.lead
    fits = mask.ndim and mask.shape[-1] == t and len(own) <= len(lead)
    if not fits or any(m not in (1, n) for m, n in zip(reversed(own), reversed(lead), strict=False)):
        raise ValueError(f"{name} has shape {tuple(mask.shape)}: expected one that broadcasts to {(*lead, t)}")
    return xp.broadcast_to(flatten_leading(mask, 1, lead), (sizes.b, t))


def read_memory(keys: Any, values: Any, h: int, c: int, d: int, e: int) -> tuple[Any, Any] | None:
    """Memory keys and values (h, c, n, .), or None."""
    if keys is None and values is None:
        return None
    if keys is None or values is None:
        raise TypeError(f"{'memory_keys' if keys is None else 'memory_values'} is missing: they are given together")
    sizes = require_axes({"h": h, "c": c, "d": d}, memory_keys=(keys, "h c n d"))
    require_axes({"h": h, "c": c, "n": sizes["n"], "e": e}, memory_values=(values, "h c n e"))
    return keys, values


def read_relative(name: str, table: Any, channels: int) -> Any:
    if table is not None and (table.ndim != 2 or table.shape[0] % 2 == 0 or table.shape[1] != channels):
        raise ValueError(f"{name} has shape {tuple(table.shape)}: expected (2n+1, {channels}), an odd number of rows")
    return table


def widths(cluster_size: Any, t: int, t_k: int, c: int) -> tuple[int, int]:
    """Queries and keys of a cluster."""
    if cluster_size is None:
        pair = (max(1, t // c), max(1, t_k // c))
    elif isinstance(cluster_size, (tuple, list)):
        if len(cluster_size) != 2:
            raise ValueError(f"cluster_size is {cluster_size!r}: expected a number, or (queries, keys)")
        first, second = (require_integer("cluster_size", n, minimum=1, maximum=None) for n in cluster_size)
        pair = (first, second)
    else:
        first = require_integer("cluster_size", cluster_size, minimum=1, maximum=None)
        pair = (first, first)
    return min(pair[0], t), min(pair[1], t_k)


def given_members(
    members: Any, lead: tuple[int, ...], h: int, c: int, lengths: tuple[int, int], xp: Any
) -> tuple[Any, Any]:
    """Members of queries and keys as int64 (b h, c, w)."""
    if not isinstance(members, (tuple, list)) or len(members) != 2:
        raise TypeError(f"members is a {type(members).__name__}: expected (members of queries, members of keys)")
    found = []
    for x, t, name in zip(members, lengths, ("queries", "keys"), strict=True):
        if not is_array(x) or not is_integer(x.dtype):
            raise TypeError(f"members of {name}: expected an integer array (..., h, c, w)")
        own = tuple(x.shape[:-1])
        full = (*lead, h, c)
        fits = 2 < x.ndim <= len(full) + 1 and own[-2:] == (h, c)
        if not fits or any(m not in (1, n) for m, n in zip(reversed(own), reversed(full), strict=False)):
            raise ValueError(f"members of {name} have shape {tuple(x.shape)}: expected {full} and the cluster's width")
        x = to_namespace(x, xp)
        x = xp.astype(xp.broadcast_to(flatten_leading(x, 3, lead), (math.prod(lead), h, c, x.shape[-1])), xp.int64)
        if math.prod(x.shape):
            lowest, highest = int(xp.min(x)), int(xp.max(x))
            if lowest < -1 or highest >= t:
                raise ValueError(
                    f"members of {name} hold {lowest} ... {highest}: expected 0 to {t - 1}, or -1 for none"
                )
            ordered = xp.sort(x, axis=-1)
            twice = xp.logical_and(ordered[..., 1:] == ordered[..., :-1], ordered[..., 1:] >= 0)
            if bool(xp.any(twice)):
                token = int(xp.max(xp.where(twice, ordered[..., 1:], xp.full_like(ordered[..., 1:], -1))))
                raise ValueError(f"members of {name} are repeated: token {token} stands twice in one cluster")
        found.append(xp.reshape(x, (x.shape[0] * h, *x.shape[2:])))
    return found[0], found[1]
