"""Exact counts: multiply-adds, element-wise operations, bytes, saved activations, parameters.

``attention`` counts one call of softmax attention, for any pattern and any block list; ``transformer`` counts whole layers,
``activations`` the arrays they leave.  Sizes are integers by axis letter; nothing here measures time.
"""

from refattn.arrays import itemsize
from refattn.cost.layers import activations, transformer
from refattn.cost.softmax import (
    DIRECTIONS,
    TERM_STEPS,
    WALKED,
    attention,
    distinct_groups,
    listed_pairs,
    require_sizes,
    rows_of_tiles,
    softmax_counts,
    softmax_settings,
    tiled_pairs,
)

__all__ = [
    "DIRECTIONS",
    "TERM_STEPS",
    "WALKED",
    "activations",
    "attention",
    "distinct_groups",
    "itemsize",
    "listed_pairs",
    "require_sizes",
    "rows_of_tiles",
    "softmax_counts",
    "softmax_settings",
    "tiled_pairs",
    "transformer",
]
