"""BigBird attention in steps: softmax attention over near, global and random blocks.

    |u - w| <= window_blocks,  or u or w among the first and last global blocks,  or w in random_blocks[h,u]

with u = i // block and w = j // block; one softmax over the set of all these keys.

Source: Zaheer et al. 2020, arXiv:2007.14062, section 2 and appendix D.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import step

__all__ = ["BigBird", "definition"]


class BigBird(ScaledDotProduct):
    """Softmax attention over the pairs of three kinds of blocks."""

    defaults = {**ScaledDotProduct.defaults, "random_blocks": None, "window_blocks": 1, "global_blocks": (1, 1)}

    @step
    def size(self):
        """Positions of a block; one that holds the whole sequence may be any longer."""
        return min(self.block, max(1, self.keys))

    @step
    def blocks(self):
        """How many blocks there are; the last may be short."""
        return -(-self.keys // self.size)

    @step
    def query_block(self):
        """u, (n, 1)"""
        return np.arange(self.blocks)[:, None]

    @step
    def key_block(self):
        """w, (n,)"""
        return np.arange(self.blocks)

    @step
    def near_blocks(self):
        """|u - w| <= window_blocks, (n, n)"""
        return abs(self.query_block - self.key_block) <= self.window_blocks

    @step
    def is_global(self):
        """Blocks among the first or the last global ones, (n,)"""
        first, last = self.global_blocks
        return (self.key_block < first) | (self.key_block >= self.blocks - last)

    @step
    def global_rows(self):
        """Global blocks see all, (n, 1)"""
        return self.is_global[:, None]

    @step
    def global_columns(self):
        """Global blocks are seen by all, (n,)"""
        return self.is_global

    @step
    def drawn(self):
        """Blocks of keys drawn for each head and row of blocks, -1 = none, (h, n, r)"""
        return np.full((1, self.blocks, 0), -1) if self.random_blocks is None else np.asarray(self.random_blocks)

    @step
    def random(self):
        """Pairs of blocks that were drawn, (h, n, n)"""
        return (self.drawn[..., None] == self.key_block).any(axis=-2)

    @step
    def seen_blocks(self):
        """(h, n, n)"""
        return (self.near_blocks | self.global_rows | self.global_columns)[None] | self.random

    @step
    def visible_by_blocks(self):
        """The pairs of the blocks that see each other, (h, t, t)"""
        u, w = self.i[:, 0] // self.size, self.j // self.size
        return self.seen_blocks[:, u[:, None], w]

    @step
    def visible(self):
        """In one of the blocks, and every option agrees."""
        return super().visible & self.visible_by_blocks


definition = BigBird
