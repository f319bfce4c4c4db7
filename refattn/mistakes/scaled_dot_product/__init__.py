"""The ways people get softmax attention wrong.

By part of the computation: who sees whom, the logits, the softmax, the backward.  Mechanisms that are built on
softmax attention get these mistakes too.
"""

from refattn.mistakes.scaled_dot_product import visibility, logits, softmax, backward  # noqa: F401, I001 - the order of the catalogue
from refattn.mistakes.scaled_dot_product.base import catalogue

__all__ = ["catalogue"]
