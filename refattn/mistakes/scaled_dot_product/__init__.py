"""The ways people get softmax attention wrong.

By part of the computation, one file each.  Mechanisms that are built on softmax attention get these mistakes too.
"""

from refattn.mistakes.scaled_dot_product import (  # noqa: I001 - the order of the catalogue
    diagonal, masks, lengths, logits, heads, listed, softmax, sinks, lse, dropout, merging, places, exchanged, precision, backward,
)  # fmt: skip
from refattn.mistakes.scaled_dot_product.base import catalogue

__all__ = [
    "backward", "catalogue", "diagonal", "dropout", "exchanged", "heads", "lengths", "listed", "logits", "lse", "masks", "merging",
    "places", "precision", "sinks", "softmax",
]  # fmt: skip
