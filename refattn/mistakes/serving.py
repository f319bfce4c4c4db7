"""How people get packed and paged attention wrong; the mistakes of the mechanism are made in every sequence."""

import numpy as np

from refattn.definitions.serving import Packed, Paged, Sequences
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue

__all__ = ["catalogue_of"]


def catalogue_of(definition, plain):
    """The mistakes of a form, whose definition this is, built on those of the mechanism."""
    catalogue = Catalogue(definition, built_on=plain)
    if not issubclass(definition, Sequences):
        return catalogue

    @catalogue.mistake(why="The mask is aligned as in a batch of equal lengths.")
    class packed_upper_left(definition):
        """query 0 of each sequence stands at its key 0"""

        @step
        def offsets(self):
            return [0] * self.sequences

    if issubclass(definition, Packed):

        @catalogue.mistake(why="Lengths of keys are taken from those of queries.")
        class lengths_of_queries(definition):
            """the sequences of keys are cut as those of the queries"""

            @step
            def key_ends(self):
                return np.minimum(self.query_ends, super().key_ends[-1])

    if issubclass(definition, Paged):

        @catalogue.mistake(why="Values are read by another column of the table than keys.")
        class v_page(definition):
            """every value is read from the first page of its sequence"""

            @step
            def value_rows(self):
                size = self.page
                return [rows[:1] // size * size + np.arange(len(rows)) % size for rows in self.key_rows]

        @catalogue.mistake(why="The loop over keys ends before the last one.")
        class key_lost(definition):
            """the last key of each sequence is not seen"""

            @step
            def key_lengths(self):
                return np.maximum(super().key_lengths - 1, 0)

    return catalogue
