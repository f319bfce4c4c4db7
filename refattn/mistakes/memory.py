"""The ways people get the update of compressed memories wrong."""

from refattn.definitions.memory import UpdateCompressedMemory, joined, newest
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue

__all__ = ["catalogues"]

update = Catalogue(UpdateCompressedMemory)
catalogues = {"memory.update_compressed_memory": update}


@update.mistake(why="The memory is read from its end, where the newest rows are.")
class eviction_newest(UpdateCompressedMemory):
    """the newest rows of the memory are compressed in place of the oldest"""

    @step
    def evicted(self):
        return newest(self.old, self.gone)


@update.mistake(why="The segment is at hand when the memories are updated, the oldest rows of the memory are not.")
class eviction_of_segment(UpdateCompressedMemory):
    """the segment itself is compressed"""

    @step
    def evicted(self):
        return newest(self.hidden, self.gone)


@update.mistake(why="The joined rows are cut from the wrong side.")
class memory_keeps_oldest(UpdateCompressedMemory):
    """the memory keeps its oldest rows and drops the segment"""

    @step
    def new_memory(self):
        return self.rows[..., : self.memory_length, :]


@update.mistake(why="The operands of a concatenation are exchanged.")
class memory_order(UpdateCompressedMemory):
    """the segment goes in front of the memory"""

    @step
    def new_memory(self):
        return joined(self.hidden, self.old)[..., : self.memory_length, :]


@update.mistake(why="The operands of a concatenation are exchanged.")
class compressed_order(UpdateCompressedMemory):
    """new compressed rows go in front of the old ones"""

    @step
    def in_order(self):
        return (self.new_rows, self.compressed)


@update.mistake(why="A memory is written as a stack.")
class memory_reversed(UpdateCompressedMemory):
    """the memory holds the newest row first"""

    @step
    def new_memory(self):
        return super().new_memory[..., ::-1, :]
