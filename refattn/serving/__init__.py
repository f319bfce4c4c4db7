"""Serving: packed sequences, paged keys and values, split keys, rings of ranks, as forms of any mechanism; and their tables.

A form is a Mechanism: the same options, ``forward``, ``vjp``, ``definition``, ``cost``, ``example``.  Each equals plain calls of the
mechanism, one for each sequence, or one for the whole.

>>> import numpy as np
>>> import refattn as ra
>>> attention = ra.serving.packed("scaled_dot_product_attention")
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((5, 2, 4)) for _ in range(3))
>>> attention.forward(q, k, v, cu_seqlens_q=[0, 2, 5], causal=True).lse.shape
(2, 5)
"""

import importlib
from typing import TYPE_CHECKING, Any

from refattn.serving.tables import block_table, update_cache

if TYPE_CHECKING:
    from refattn.serving.dealing import shard, unshard
    from refattn.serving.parts import ring, split
    from refattn.serving.sequences import packed, paged

__all__ = ["block_table", "packed", "paged", "ring", "shard", "split", "unshard", "update_cache"]

_LAZY = {
    "packed": "sequences",
    "paged": "sequences",
    "ring": "parts",
    "split": "parts",
    "shard": "dealing",
    "unshard": "dealing",
}


def __getattr__(name: str) -> Any:
    """Forms are loaded when they are first asked for: importing refattn stays quick."""
    if name in _LAZY:
        return getattr(importlib.import_module(f"refattn.serving.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'refattn.serving' has no attribute {name!r}")
