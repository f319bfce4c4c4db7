"""The keys that a caller lists for every query: ``indices``, or ``block_indices`` in blocks of ``block`` keys.

Lists hide every other key.  They are computed on directly: a query is a block of its own, with the keys of its list gathered.
Where weights are kept, or keys stand behind those that can be listed, they are a mask.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refattn import patterns
from refattn.arrays import (
    LARGEST,
    flatten_leading,
    is_array,
    is_integer,
    namespace,
    require_integer,
    require_one_of,
    to_numpy,
)
from refattn.core.blocks import Group, Maker
from refattn.core.selections import Index, Lattice
from refattn.records import Block, Sizes

__all__ = ["CHOICES", "Lists", "read_lists"]

CHOICES = ("indices", "block_indices", "block", "duplicates")
"""The shared options that this file reads."""

GATHERED = 1 << 21
"""Numbers (keys x channels, or pairs) that one block may gather."""


def read_lists(options: dict[str, Any], sizes: Sizes, key_head: np.ndarray) -> "Lists | None":
    """The lists among the shared options; ``key_head`` (h,) is the key head of each query head."""
    indices, blocks, block = (options[n] for n in ("indices", "block_indices", "block"))
    require_one_of("duplicates", options["duplicates"], ("union", "multiset"))
    if indices is not None and blocks is not None:
        raise TypeError("both of indices and block_indices given: expected one of them")
    if (block is None) != (blocks is None):
        missing, there = ("block", "block_indices") if block is None else ("block_indices", "block")
        raise TypeError(f"{missing} is missing: {there} needs it")
    if indices is None and blocks is None:
        return None
    if block is None:
        keys = _ints("indices", indices, sizes)
    else:
        size = min(require_integer("block", block, minimum=1, maximum=None), max(1, sizes.k))
        chosen = _ints("block_indices", blocks, sizes)
        chosen = np.minimum(chosen, -(-sizes.k // size))  # beyond the last one: no keys
        keys = np.where(chosen[..., None] < 0, -1, chosen[..., None] * size + np.arange(size))
        keys = keys.reshape(*chosen.shape[:-1], chosen.shape[-1] * size)
    return Lists(keys, sizes, key_head, multiset=options["duplicates"] == "multiset")


def _ints(name: str, lists: Any, sizes: Sizes) -> np.ndarray:
    """The caller's lists, checked, as host ints (..., 1 | g | h, q, n)."""
    expected = f"expected ints (..., 1, g or h, q, n), here g = {sizes.g}, h = {sizes.h}, q = {sizes.q}"
    if not is_array(lists) or not is_integer(lists.dtype):
        kind = f"has dtype {lists.dtype}" if is_array(lists) else f"is a {type(lists).__name__}"
        raise TypeError(f"{name} {kind}: {expected}; -1 = none")
    shape = tuple(lists.shape)
    fits = len(shape) >= 3 and shape[-3] in (1, sizes.g, sizes.h) and shape[-2] in (1, sizes.q)
    lead = shape[:-3]
    fits = fits and len(lead) <= len(sizes.lead)
    if not fits or any(m not in (1, n) for m, n in zip(lead[::-1], sizes.lead[::-1], strict=False)):
        raise ValueError(f"{name} has shape {shape}: {expected}, and the batch axes {sizes.lead}")
    host = to_numpy(lists)
    if host.dtype.kind == "u":
        host = np.minimum(host.astype(np.uint64), LARGEST)
    if host.size and host.min() < -1:
        raise ValueError(f"{name} contains {host[host < -1][0]}: expected numbers from 0, or -1 for none")
    return host.astype(np.int64)


class Lists:
    """Keys (..., 1 | g | h, q, n), as ``given`` and in rising order, with the number of keys in every place that holds none.

    ``multiset``: a key counts as often as it is listed; otherwise once.
    """

    def __init__(self, keys: np.ndarray, sizes: Sizes, key_head: np.ndarray, *, multiset: bool) -> None:
        self.sizes, self.key_head, self.multiset = sizes, key_head, multiset
        self.given = keys
        none = sizes.k
        keys = np.sort(np.where((keys < 0) | (keys > none), none, keys), axis=-1)
        if not multiset:
            again = keys[..., 1:] == keys[..., :-1]
            keys[..., 1:][again] = none
        self.keys = keys

    def of_heads(self) -> np.ndarray:
        """The lists of the query heads as given, (..., 1 | h, 1 | q, n)."""
        return self.given if self.given.shape[-3] in (1, self.sizes.h) else self.given[..., self.key_head, :, :]

    def counts(self) -> np.ndarray:
        """How often each key is listed, (..., 1 | h, 1 | q, k)."""
        keys, n_k = self.keys, self.sizes.k
        rows = keys.reshape(math.prod(keys.shape[:-1]), keys.shape[-1])
        at = rows + np.arange(len(rows))[:, None] * (n_k + 1)  # one more column collects the places without a key
        counts = np.bincount(at.reshape(-1), minlength=len(rows) * (n_k + 1))
        counts = counts.reshape(*keys.shape[:-1], n_k + 1)[..., :n_k]
        return counts if counts.shape[-3] in (1, self.sizes.h) else counts[..., self.key_head, :, :]

    def pairs(self, lead: tuple[int, ...]) -> int:
        """Pairs of a query and a key in its list, over all batch entries and heads."""
        fresh = self.keys < self.sizes.k
        fresh[..., 1:] &= self.keys[..., 1:] != self.keys[..., :-1]
        per_list = np.broadcast_to(fresh.sum(-1), (*lead, fresh.shape[-3], self.sizes.q))
        return int(per_list.sum()) * (self.sizes.h // max(1, fresh.shape[-3]))

    def pattern(self) -> patterns.Pattern:
        """The listed keys as a mask."""
        return patterns.dense(self.counts() > 0)

    def blocks(self, split: Callable[[Any], Any], xp: Any, device: Any) -> "Gathered":
        """The lists as blocks of the core; ``split`` brings one axis of query heads h into (g, r)."""
        keys = flatten_leading(self.keys, 3, self.sizes.lead)
        if keys.shape[1] == self.sizes.h:
            keys = split(keys)
        else:  # one list for all query heads of a key head
            keys = keys[:, :, None, ...]
        keys = np.broadcast_to(keys, (*keys.shape[:3], self.sizes.q, keys.shape[-1]))
        return Gathered(self.sizes, xp.asarray(keys, device=device))


class Gathered:
    """Blocks of one query each, with the keys (b | 1, g | 1, r | 1, q, n) of its list gathered; see ``AttentionSettings.blocks``."""

    def __init__(self, sizes: Sizes, keys: Any) -> None:
        self.sizes, self.keys = sizes, keys

    def __call__(self, visibility: patterns.Pattern | None, group: Group) -> Iterator[Block]:
        keys, xp = self.keys, namespace(self.keys)
        n_q, n_k, n = self.sizes.q, self.sizes.k, keys.shape[-1]
        if not n or not n_k:
            return
        make = Maker(visibility, group, n_q, n_k, xp, keys)
        of_group = (group.b if keys.shape[0] > 1 else slice(None), group.g if keys.shape[1] > 1 else slice(None))
        lists = make.units if keys.shape[2] > 1 else max(1, make.units // make.heads.shape[1])
        numbers = n * max(lists * max(self.sizes.d, self.sizes.e), make.units)
        rows = max(1, GATHERED // numbers)
        for start in range(0, n_q, rows):
            stop = min(start + rows, n_q)
            listed = keys[(*of_group, slice(None), slice(start, stop), slice(None))]
            there = listed < n_k
            at = Index(xp.where(there, listed, xp.zeros_like(listed)))
            yield make.listed(Lattice(start, stop - start, 1), at, there[..., None, :])
