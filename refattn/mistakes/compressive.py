"""How people get the Compressive Transformer's attention wrong: the context around Transformer-XL attention, and its gradients."""

import numpy as np

from refattn.definitions.compressive import Compressive
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.transformer_xl import catalogue as transformer_xl

catalogue = Catalogue(Compressive, built_on=transformer_xl, without=("memory_order", "rel_shift_leak"))
"""Without two that other orders of the context stand for, and that a causal context never shows."""


# ---------------------------------------------------------------------------------------------- the context


class Reordered(Compressive):
    """The parts of the context in another order."""

    @step
    def order(self):
        given = super().order
        return tuple(n for n in self.sequence if n in given)


@catalogue.mistake(why="The memory was there first.")
class memory_order(Reordered):
    """the memory stands before the compressed rows"""

    sequence = ("memory", "compressed", "x")


@catalogue.mistake(why="concat([x, memories]).")
class memory_after_segment(Reordered):
    """the segment stands before both memories"""

    sequence = ("x", "compressed", "memory")


@catalogue.mistake(why="A queue is filled from the front.")
class compressed_reversed(Compressive):
    """the newest compressed row stands first"""

    @step
    def parts(self):
        return {n: x[..., ::-1, :] if n == "compressed" else x for n, x in super().parts.items()}

    @step
    def d_compressed(self):
        return super().d_compressed[..., ::-1, :]


@catalogue.mistake(name="compressed_reversed", why="A queue is filled from the front.")
class memory_reversed(Compressive):
    """the newest row of the memory stands first"""

    @step
    def parts(self):
        return {n: x[..., ::-1, :] if n == "memory" else x for n, x in super().parts.items()}

    @step
    def d_memory(self):
        return super().d_memory[..., ::-1, :]


class PartHidden(Compressive):
    """A part of the context that no query sees."""

    hidden = None

    @step
    def rows_seen(self):
        """(k,) bool"""
        names = np.concatenate([np.full(self.parts[n].shape[-2], n) for n in self.order])
        return names != self.hidden

    @step
    def mask(self):
        given = self.argument("mask")
        return self.rows_seen[None, :] if given is None else given & self.rows_seen


@catalogue.mistake(why="They are stored and carried on, and the concatenation has two parts.")
class compressed_ignored(PartHidden):
    """compressed rows are never attended"""

    hidden = "compressed"


@catalogue.mistake(
    name="compressed_ignored", why="Compression takes the place of the memory in place of standing before it."
)
class memory_ignored(PartHidden):
    """the memory is never attended, compressed rows are"""

    hidden = "memory"


@catalogue.mistake(why="All public code counts rows.")
class compressed_slots(Compressive):
    """every compressed row counts as one place, whatever compressed_positions says"""

    @step
    def places(self):
        right = super().places
        if right is None or not right.size:
            return right
        return np.arange(right.size) + int(right[-1]) + 1 - right.size


class OtherWithin(Compressive):
    """A compressed row stands at another of its tokens."""

    @step
    def within(self):
        right = super().within
        return right if right is None else self.token(right)

    def token(self, right):
        return right


@catalogue.mistake(name="compressed_places", why="The span's first token is the index that is multiplied by the rate.")
class compressed_at_start(OtherWithin):
    """a compressed row stands at the first token of its span"""

    def token(self, right):
        return 0


@catalogue.mistake(name="compressed_places", why="Of an even number of tokens there are two in the middle.")
class compressed_at_earlier_middle(OtherWithin):
    """the middle of a span is the earlier of two"""

    def token(self, right):
        return (self.rate - 1) // 2 if self.compressed_positions == "span_mid" else right


@catalogue.mistake(why="Two projections of one shape.")
class key_value_swapped(Compressive):
    """w_k and w_v are exchanged"""

    @step
    def exchanged(self):
        return self.w_k.shape == self.w_v.shape

    @step
    def key_projection(self):
        return self.w_v if self.exchanged else self.w_k

    @step
    def value_projection(self):
        return self.w_k if self.exchanged else self.w_v

    @step
    def d_w_k(self):
        return super().d_w_v if self.exchanged else super().d_w_k

    @step
    def d_w_v(self):
        return super().d_w_k if self.exchanged else super().d_w_v


@catalogue.mistake(name="step_dropped", why="Queries of a cached key need no projection in some layouts.")
class output_projection_of_last_head(Compressive):
    """only the last head reaches the output"""

    @step
    def alone(self):
        """The heads that are read."""
        return (np.arange(self.heads.shape[-3]) == self.heads.shape[-3] - 1)[:, None, None]

    @step
    def output(self):
        if self.w_o is None:
            return super().output
        return np.einsum("...hqe,hem->...qm", np.where(self.alone, self.heads, 0.0), self.w_o)

    @step
    def d_heads(self):
        return super().d_heads if self.w_o is None else np.where(self.alone, super().d_heads, 0.0)

    @step
    def d_w_o(self):
        return np.where(self.alone, super().d_w_o, 0.0)


# ---------------------------------------------------------------------------------------------- gradients


@catalogue.mistake(sides=("backward",), why="detach() is left out when the memory is stored.")
class gradient_into_memory(Compressive):
    """the memories get a gradient that is to stop"""

    memory_passes = True


@catalogue.mistake(sides=("backward",), why="Memories are detached everywhere else.")
class memory_stopped(Compressive):
    """through_memory=True, and no gradient passes"""

    memory_passes = False


class OwnRows(Compressive):
    """Projections that learn through the segment alone."""

    def without_memories(self, rows):
        own = np.arange(rows.shape[-2]) >= rows.shape[-2] - self.x.shape[-2]
        return np.where(own[:, None], rows, 0.0)


@catalogue.mistake(sides=("backward",), why="The memory's keys and values are computed under no_grad.")
class memory_weights_detached(OwnRows):
    """w_k and w_v do not learn through the memories' rows"""

    @step
    def key_rows(self):
        return self.without_memories(self.context)

    @step
    def value_rows(self):
        return self.without_memories(self.context)


@catalogue.mistake(name="memory_weights_detached", sides=("backward",), why="One of two caches is detached.")
class memory_keys_detached(OwnRows):
    """w_k does not learn through the memories' rows"""

    @step
    def key_rows(self):
        return self.without_memories(self.context)


@catalogue.mistake(name="grad_subset", sides=("backward",), why="x enters twice, and one way back is forgotten.")
class segment_as_queries(Compressive):
    """x gets the gradient of its queries alone"""

    @step
    def d_x(self):
        return super().d_x - self.d_part("x")
