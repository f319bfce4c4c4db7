"""Mistakes about lists of keys and of blocks: what stands for no key, what counts twice, whose list it is."""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import step
from refattn.mistakes.scaled_dot_product.base import catalogue


@catalogue.mistake(why="Absent places are clamped to a valid address and not hidden.")
class topk_clamped(ScaledDotProduct):
    """-1 in a list is read as key 0"""

    @step
    def listed_keys(self):
        right = super().listed_keys
        return None if right is None else np.maximum(right, 0)


@catalogue.mistake(name="topk_clamped", why="-1 counts from the end, as it does in Python.")
class list_absent_last(ScaledDotProduct):
    """-1 in a list is read as the last key"""

    @step
    def listed_keys(self):
        right = super().listed_keys
        return None if right is None else np.where(right < 0, self.own_keys - 1, right)


@catalogue.mistake(why="Each listed place is computed for itself.")
class duplicates_counted(ScaledDotProduct):
    """a key that is listed twice counts twice"""

    duplicates = "multiset"


@catalogue.mistake(why="The list is scattered into a mask.")
class duplicates_once(ScaledDotProduct):
    """a key that is listed twice counts once"""

    duplicates = "union"


@catalogue.mistake(why="The index array lost its head axis.")
class selection_per_head(ScaledDotProduct):
    """the list of the first head is used for all"""

    @step
    def list_of_head(self):
        return np.zeros(self.heads, dtype=int)


@catalogue.mistake(
    name="selection_per_head", why="Lists of key heads are read like those of query heads, or the other way."
)
class list_head_map(ScaledDotProduct):
    """lists of key heads are dealt to the query heads by the other head map"""

    @step
    def list_of_head(self):
        given = self.indices if self.indices is not None else self.block_indices
        if given.shape[-3] in (1, self.heads):
            return super().list_of_head
        lists, heads = given.shape[-3], np.arange(self.heads)
        return heads // (self.heads // lists) if self.head_map == "tile" else heads % lists


@catalogue.mistake(why="The keys of one query serve its whole tile.", variants=[{"tile": n} for n in (2, 4, 8, 16)])
class list_rows(ScaledDotProduct):
    """a tile of {tile} queries uses the list of its first one"""

    tile = 4

    @step
    def listed_keys(self):
        right = super().listed_keys
        if right is None or right.shape[-2] == 1:
            return right
        return right[..., np.arange(self.queries) // self.tile * self.tile, :]


@catalogue.mistake(
    name="block_not_causal", why="What is listed is taken to be visible: the chooser looked at the past alone."
)
class list_not_causal(ScaledDotProduct):
    """listed keys are seen whatever lies ahead"""

    @step
    def visible_by_causal(self):
        return super().visible_by_causal if self.listed_keys is None else True


@catalogue.mistake(name="lengths_drop", why="What is listed is taken to be visible.", sides=("both", "forward"))
class list_not_padded(ScaledDotProduct):
    """listed keys are seen beyond their lengths"""

    @step
    def visible_by_key_lengths(self):
        return super().visible_by_key_lengths if self.listed_keys is None else True


@catalogue.mistake(name="mask_drop", why="What is listed is taken to be visible.", sides=("both", "forward"))
class list_not_masked(ScaledDotProduct):
    """listed keys are seen whatever the mask says"""

    @step
    def visible_by_mask(self):
        return super().visible_by_mask if self.listed_keys is None else True


@catalogue.mistake(why="The choice is computed and not used.", sides=("both", "forward", "backward"))
class list_ignored(ScaledDotProduct):
    """all keys are seen, listed or not"""

    visible_by_list = True


@catalogue.mistake(why="Block numbers are taken for the keys where blocks begin.")
class block_start_unscaled(ScaledDotProduct):
    """block c begins at key c"""

    @step
    def listed_keys(self):
        if self.block_indices is None:
            return super().listed_keys
        blocks = np.asarray(self.block_indices, dtype=np.int64)[..., self.list_of_head, :, :]
        keys = blocks[..., None] + np.arange(self.block_size)
        return np.where(blocks[..., None] < 0, -1, keys).reshape(*blocks.shape[:-1], -1)


@catalogue.mistake(name="tail_dropped", why="The number of blocks is rounded down.")
class list_last_block_dropped(ScaledDotProduct):
    """a last block that is short is never seen"""

    @step
    def listed_keys(self):
        right = super().listed_keys
        if self.block_indices is None:
            return right
        return np.where(right >= self.own_keys // self.block_size * self.block_size, -1, right)
