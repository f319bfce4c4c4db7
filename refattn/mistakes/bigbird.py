"""How people get BigBird attention wrong: which blocks are near, global or random, and how often each counts."""

import numpy as np

from refattn.definitions.bigbird import BigBird
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.options import about
from refattn.mistakes.scaled_dot_product import catalogue as dense

NONE_OF = about(
    "alibi_slopes", "bias", "dropout", "head_map", "pattern", "score_mod", "segments", "sinks", "softcap",
    "mask", "causal", "window"
)  # fmt: skip
"""Mistakes of softmax attention about what this mechanism does not have."""

catalogue = Catalogue(BigBird, built_on=dense, without=NONE_OF)


@catalogue.mistake(why="An inference path has window and global blocks alone.")
class bigbird_random_drop(BigBird):
    """the random blocks are not seen"""

    random = False


@catalogue.mistake(why="One draw is made and broadcast.")
class bigbird_random_shared(BigBird):
    """all heads see the random blocks of head 0"""

    @step
    def drawn(self):
        return np.broadcast_to(super().drawn[:1], super().drawn.shape)


@catalogue.mistake(why="The list of draws leaves out the global rows, and is read as if it did not.")
class bigbird_random_rows(BigBird):
    """random blocks belong to the row before, as if the first one were not counted"""

    @step
    def drawn(self):
        return np.roll(super().drawn, 1, axis=1)


@catalogue.mistake(why="The layout is indexed [key block, query block].")
class bigbird_random_transposed(BigBird):
    """a random block sees the rows that drew it, not the other way round"""

    @step
    def random(self):
        return np.swapaxes(super().random, -1, -2)


@catalogue.mistake(why="-1 counts from the end, as it does in Python.")
class bigbird_none_is_last(BigBird):
    """-1 among the random blocks is read as the last block"""

    @step
    def drawn(self):
        return np.where(super().drawn < 0, self.blocks - 1, super().drawn)


@catalogue.mistake(why="A width of three blocks is read as a count for each side.")
class bigbird_window(BigBird):
    """one block too many is seen on each side"""

    @step
    def near_blocks(self):
        return abs(self.query_block - self.key_block) <= self.window_blocks + 1


@catalogue.mistake(name="bigbird_window", why="The two neighbours are not gathered.")
class bigbird_own_block(BigBird):
    """only the own block is near"""

    window_blocks = 0


@catalogue.mistake(why="Blocks are rolled to make neighbours.")
class bigbird_wrap(BigBird):
    """the first blocks see the last ones as neighbours"""

    @step
    def near_blocks(self):
        gap = (self.query_block - self.key_block) % max(1, self.blocks)
        return np.minimum(gap, self.blocks - gap) <= self.window_blocks


@catalogue.mistake(why="The rows of global blocks are computed as any other.")
class global_rows_drop(BigBird):
    """global blocks are seen by all but see their window"""

    @step
    def global_rows(self):
        return super().global_rows & self.is_global


@catalogue.mistake(why="Global rows are computed apart, and their columns forgotten.")
class global_columns_drop(BigBird):
    """global blocks see all but are not seen"""

    @step
    def global_columns(self):
        return self.is_global & self.is_global[:, None]


@catalogue.mistake(why="The paper's figure has global tokens at the beginning only.")
class bigbird_global(BigBird):
    """only the first blocks are global"""

    @step
    def is_global(self):
        return self.key_block < self.global_blocks[0]


@catalogue.mistake(why="Window, global and random keys are concatenated, each as it is.")
class bigbird_duplicates(BigBird):
    """a random block that is near, global or drawn twice counts again"""

    @step
    def times(self):
        """How often a pair counts, (h, t, t)"""
        near = self.near_blocks | self.global_rows | self.global_columns
        inner = ~self.is_global[:, None]  # rows of global blocks gather nothing
        drawn = (self.drawn[..., None] == self.key_block).sum(axis=-2) * inner
        u, w = self.i[:, 0] // self.size, self.j // self.size
        return np.maximum(near + drawn, 1)[:, u[:, None], w].astype(float)

    @step
    def exponentials(self):
        return self.times * super().exponentials

    @step
    def rebuilt_weights(self):
        return self.times * super().rebuilt_weights if self.is_handed("lse") else super().rebuilt_weights


@catalogue.mistake(why="The number of blocks is t // block.")
class bigbird_tail_dropped(BigBird):
    """keys of a short last block are seen by nobody"""

    @step
    def visible_by_blocks(self):
        return super().visible_by_blocks & (self.j < self.keys // self.size * self.size)


@catalogue.mistake(why="Two layouts are built, and each head takes the one of its parity.")
class bigbird_heads_rolled(BigBird):
    """every head sees the random blocks of the head before it"""

    @step
    def drawn(self):
        return np.roll(super().drawn, 1, axis=0)
