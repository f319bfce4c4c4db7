"""The functions that make patterns."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from refattn.arrays import require_integer, require_one_of
from refattn.patterns.arrays import Blocks, Dense, Documents, Lengths, MaskMod
from refattn.patterns.base import Pattern, host_ints
from refattn.patterns.combinations import ByHead
from refattn.patterns.distances import Band, Chunk, Fixed, Spaced, parse_align
from refattn.patterns.trees import SharedPrefix, Tree, documents_of, parents_of

__all__ = [
    "blocks",
    "by_head",
    "causal",
    "chunk",
    "dense",
    "dilated",
    "documents",
    "fixed",
    "lengths",
    "mask_mod",
    "prefix",
    "shared_prefix",
    "strided",
    "tree",
    "window",
]


def causal(align: str | int | Any = None) -> Pattern:
    """Query i sees the keys j <= i + offset.

    Parameters
    ----------
    align : "upper_left", "lower_right", int or ints per batch, optional
        The offset: where query 0 stands on the key axis.  ``"upper_left"`` is 0, ``"lower_right"`` is k - q.  May be
        left out only where q = k; a negative offset leaves the first rows empty.

    Raises
    ------
    ValueError
        Once q and k are known and differ, if ``align`` was left out.

    Examples
    --------
    >>> causal("lower_right").to_mask(2, 4).astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 1]])
    """
    align = parse_align(align)
    return Band("causal", near=0, far=None, align=align, shown=align)


def window(left: int | None, right: int | None, align: str | int | Any = None) -> Pattern:
    """Query i sees the keys i + offset - left <= j <= i + offset + right.

    ``left`` and ``right`` count the keys beside the aligned diagonal, which is seen too; None = unlimited.  ``align``
    as in :func:`causal`.
    """
    for name, value in (("left", left), ("right", right)):
        if value is not None:
            require_integer(name, value, minimum=0, maximum=sys.maxsize)
    align = parse_align(align)
    left, right = (None if x is None else int(x) for x in (left, right))
    return Band("window", left, right, near=None if right is None else -right, far=left, align=align, shown=align)


def prefix(n: int | Any) -> Pattern:
    """Every query sees the first n keys, j < n, and nothing else; n an int, or ints per batch."""
    key = host_ints("n", n)
    if key.size and key.min() < 0:
        raise ValueError(f"n is {n}: expected at least 0")
    return Lengths("prefix", None, key, int(key) if key.ndim == 0 else key)


def chunk(size: int, align: str | int | Any = None) -> Pattern:
    """Query i sees the keys of its own chunk, (i + offset) // size = j // size, on both sides; ``align`` as in :func:`causal`.

    Examples
    --------
    >>> chunk(2, align=1).to_mask(3, 5).astype(int)
    array([[1, 1, 0, 0, 0],
           [0, 0, 1, 1, 0],
           [0, 0, 1, 1, 0]])
    """
    return Chunk(require_integer("size", size, minimum=1, maximum=sys.maxsize), parse_align(align))


def tree(parents: Any, prefix: int = 0) -> Pattern:
    """Drafts that branch: query i sees the first ``prefix`` keys, the keys of its ancestors and its own, key prefix + i.

    ``parents`` (q,) holds the parent of each query, an earlier one, or -1 for a root.

    Examples
    --------
    >>> tree([-1, 0, 0, 1], prefix=1).to_mask(4, 5).astype(int)
    array([[1, 1, 0, 0, 0],
           [1, 1, 1, 0, 0],
           [1, 1, 0, 1, 0],
           [1, 1, 1, 0, 1]])
    """
    return Tree(parents_of(parents), require_integer("prefix", prefix, minimum=0))


def shared_prefix(lengths: Any, prefix_of: Any) -> Pattern:
    """Documents side by side, of ``lengths`` (n,): each sees itself causally, and document ``prefix_of[n]`` whole; n: none.

    Examples
    --------
    >>> shared_prefix([2, 1, 2], prefix_of=[0, 0, 0]).to_mask(5, 5).astype(int)
    array([[1, 0, 0, 0, 0],
           [1, 1, 0, 0, 0],
           [1, 1, 1, 0, 0],
           [1, 1, 0, 1, 0],
           [1, 1, 0, 1, 1]])
    """
    return SharedPrefix(*documents_of(lengths, prefix_of))


def dilated(step: int) -> Pattern:
    """Query i sees the keys with (i - j) mod step = 0, on both sides."""
    return Spaced("dilated", require_integer("step", step, minimum=1, maximum=sys.maxsize))


def strided(stride: int, part: str = "both", variant: str = "paper") -> Pattern:
    """Strided sparse attention, causal by itself.

    ``"first"``: 0 <= i - j <= stride in the paper (stride + 1 keys), < stride in its code; ``"second"``: 0 <= i - j and
    (i - j) mod stride = 0; ``"both"``: one or the other.  Source: arXiv:1904.10509, section 4.2.
    """
    stride = require_integer("stride", stride, minimum=1, maximum=sys.maxsize)
    require_one_of("part", part, ("both", "first", "second"))
    require_one_of("variant", variant, ("paper", "code"))
    if part == "first":
        return Band(
            "strided", stride, part=part, variant=variant, near=0, far=stride if variant == "paper" else stride - 1
        )
    return Spaced("strided", stride, causal=True, near=part == "both", part=part, variant=variant)


def fixed(stride: int, summary: int, part: str = "both", summary_offsets: int | Any = 0) -> Pattern:
    """Fixed sparse attention, causal by itself.

    ``"first"``: keys j <= i of the own block, j // stride = i // stride.  ``"second"``: keys j <= i in the ``summary``
    columns of every block, whose residues j mod stride are stride - offset - summary ... stride - offset - 1.
    ``"both"``: one or the other.  ``summary_offsets`` is one offset in tokens, or one per head (h,).
    Source: arXiv:1904.10509, section 4.2 (which prints the last residue as stride; its example shows stride - 1).
    """
    return Fixed(stride, summary, part, summary_offsets)


def documents(query_ids: Any, key_ids: Any) -> Pattern:
    """Only equal identifiers attend: ``query_ids`` ints (..., q), ``key_ids`` ints (..., k)."""
    return Documents(query_ids, key_ids)


def lengths(query_lengths: Any = None, key_lengths: Any = None) -> Pattern:
    """Positions beyond the lengths are padding: i < query length and j < key length; ints per batch, or one for all."""
    found = []
    for name, x in (("query_lengths", query_lengths), ("key_lengths", key_lengths)):
        if x is not None:
            x = host_ints(name, x)
            if x.size and x.min() < 0:
                raise ValueError(f"{name} is {x.tolist()}: expected at least 0")
        found.append(x)
    if found[0] is None and found[1] is None:
        raise TypeError("lengths: query_lengths or key_lengths is needed")
    named = {n: x for n, x in zip(("query_lengths", "key_lengths"), found, strict=True) if x is not None}
    return Lengths("lengths", *found, **named)


def blocks(layout: Any, size: int) -> Pattern:
    """Query i sees key j where ``layout[h, i // size, j // size]``; layout bool (n, n) or (h, n, n), not causal."""
    return Blocks(layout, size)


def dense(mask: Any) -> Pattern:
    """A bool mask (..., h, q, k) or (q, k), True = may attend; axes of size 1 stand for all.

    The array is not copied: it must not change while the pattern is in use.
    """
    return Dense(mask)


def by_head(parts: Sequence[Pattern], which: Any) -> Pattern:
    """A pattern for each head: head h has ``parts[which[h]]``; ``which`` ints (h,)."""
    return ByHead(parts, which)


def mask_mod(function: Callable[..., Any]) -> Pattern:
    """``function(b, h, i, j)`` of broadcasting index arrays returns a bool array, True = may attend.

    It says nothing about its shape beforehand: every tile counts as partial, and ``batch`` and ``heads`` are needed
    where the function looks at b or h.
    """
    return MaskMod(function)
