"""Sparse Transformer attention in steps: softmax attention over one or both parts of a strided or fixed pattern.

    strided  first:  0 <= i - j <= stride (code: < stride)      second:  (i - j) mod stride = 0
    fixed    first:  j // stride = i // stride                  second:  stride - o - summary <= j mod stride < stride - o

all with j <= i; o is the head's entry of ``summary_offsets``.

Source: Child et al. 2019, arXiv:1904.10509, sections 4.2 and 4.3.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import step

__all__ = ["SparseTransformer", "definition"]


class SparseTransformer(ScaledDotProduct):
    """Softmax attention over the keys of a head's part; a merged head has one softmax over the union of both."""

    defaults = {
        **ScaledDotProduct.defaults, "pattern": "strided", "summary": None, "summary_offsets": None, "heads": "split",
        "layer": None, "variant": "paper",
    }  # fmt: skip

    @step
    def sharing(self):
        """How the heads share the parts: the argument ``heads``, a name that stands for their number here."""
        return self.argument("heads")

    @step
    def takes_first(self):
        """Heads that see the first part, (h, 1, 1)"""
        head = np.arange(self.heads)[:, None, None]
        if self.sharing == "interleaved":
            return np.full(head.shape, self.layer % 2 == 0)
        return 2 * head < self.heads if self.sharing == "split" else np.full(head.shape, self.sharing != "second")

    @step
    def takes_second(self):
        """Heads that see the second part, (h, 1, 1)"""
        return np.full(self.takes_first.shape, True) if self.sharing == "merged" else ~self.takes_first

    @step
    def distance_back(self):
        """i - j, (t, t)"""
        return self.i - self.j

    @step
    def run_length(self):
        """Keys of the run that ends at the query: stride + 1 in the paper, stride in its code."""
        return self.stride + (self.variant != "code")

    @step
    def first_part(self):
        """The run of keys that ends at the query, or the own block up to it, (t, t)"""
        if self.pattern == "fixed":
            return (self.i // self.size == self.j // self.size) & self.not_later
        return self.not_later & (self.distance_back < self.run_length)

    @step
    def size(self):
        """The stride; one that is longer than the sequence may be any longer."""
        return min(self.stride, max(1, self.keys))

    @step
    def not_later(self):
        """j <= i, (t, t)"""
        return self.distance_back >= 0

    @step
    def offset_of_columns(self):
        """How far left of the block's end the summary columns of a head stand, (h, 1, 1)"""
        given = 0 if self.summary_offsets is None else self.summary_offsets
        return np.broadcast_to(given, (self.heads,))[:, None, None]

    @step
    def last_column(self):
        """The residue after the last summary column, (h, 1, 1)"""
        return self.stride - self.offset_of_columns

    @step
    def second_part(self):
        """Distances that are multiples of the stride, or the summary columns of all blocks, (h or 1, t, t)"""
        if self.pattern == "fixed":
            residue = self.j if self.stride > self.keys else self.j % self.stride
            return (residue >= self.last_column - self.summary) & (residue < self.last_column) & self.not_later
        multiple = self.distance_back == 0 if self.stride > self.keys else self.distance_back % self.stride == 0
        return (multiple & self.not_later)[None]

    @step
    def visible_by_pattern(self):
        """The keys of the parts that a head takes, (h, t, t)"""
        return (self.takes_first & self.first_part) | (self.takes_second & self.second_part)


definition = SparseTransformer
