"""Who may attend to whom.

A :class:`Pattern` says for query i and key j whether the pair is visible.  It answers for single pairs
(:meth:`~Pattern.visible`), for rectangular tiles (:meth:`~Pattern.tile`, :meth:`~Pattern.classify`,
:meth:`~Pattern.key_range`), for the whole plane (:meth:`~Pattern.to_mask`), and it counts its pairs without building
anything of the size q x k (:meth:`~Pattern.pairs`).  Patterns combine with ``&``, ``|`` and ``~``.

======  =============================================================================
letter  meaning
======  =============================================================================
q, k    number of queries, number of keys
i, j    one query position, one key position, each counted from 0 in its own sequence
b, h    batch entry (flat over all leading axes), query head
======  =============================================================================

>>> pattern = prefix(2) | causal()
>>> pattern
prefix(2) | causal()
>>> pattern.to_mask(3, 3).astype(int)
array([[1, 1, 0],
       [1, 1, 0],
       [1, 1, 1]])
>>> pattern.pairs(65536, 65536)          # 65536 * 65537 / 2 pairs of causal, and (0, 1)
2147516417

Sources: Child et al. 2019, arXiv:1904.10509, section 4.2 (strided, fixed); their released code for ``variant="code"``.
"""

from refattn.patterns.base import Pattern
from refattn.patterns.makers import (
    blocks,
    by_head,
    causal,
    chunk,
    dense,
    dilated,
    documents,
    fixed,
    lengths,
    mask_mod,
    prefix,
    shared_prefix,
    strided,
    tree,
    window,
)

__all__ = [
    "Pattern",
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
