"""How people get local attention wrong: the edges of blocks and windows, and what causal adds to them."""

import numpy as np

from refattn.definitions.local import Local
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.scaled_dot_product import catalogue as dense

catalogue = Catalogue(Local, built_on=dense)

FORMS = [{"form": "blocks"}, {"form": "distances"}]
"""A kernel may make a mistake in one form of the window and not in the other."""


class OneForm(Local):
    """What the mistakes of one form share."""

    form = "blocks"

    def concerned(self):
        """Whether this call has the form in which the mistake is made."""
        return bool(self.argument("exact")) == (self.form == "distances")

    def own_block(self):
        """Pairs of one block, (t, t)"""
        return self.i // self.size == self.j // self.size


@catalogue.mistake(why="Blocks are rolled, and the first one gets the last as its neighbour.", variants=FORMS)
class local_wrap(OneForm):
    """the first blocks see the last ones, and the other way round ({form})"""

    @step
    def nearby(self):
        if not self.concerned():
            return super().nearby
        around = max(1, self.keys if self.exact else -(-self.keys // self.size))
        gap = self.key_place - self.query_place
        return (-gap % around <= self.behind) | (gap % around <= self.ahead_of_own)


@catalogue.mistake(
    why="An inclusive edge is written as an exclusive one, or the other way round.",
    variants=[
        {"form": "blocks", "what": "one block too many", "more": 1},
        {"form": "blocks", "what": "one block too few", "more": -1},
        {"form": "distances", "what": "one key too many", "more": 1},
        {"form": "distances", "what": "one key too few", "more": -1},
    ],
)
class local_bounds(OneForm):
    """the window sees {what} to the left ({form})"""

    more = 1

    @step
    def behind(self):
        right = super().behind
        if not self.concerned() or (not self.exact and right + self.more < 0):
            return right
        return right + self.more


@catalogue.mistake(
    name="local_bounds",
    why="An inclusive edge is written as an exclusive one, or the other way round.",
    variants=[
        {"form": "blocks", "what": "one block too many", "more": 1},
        {"form": "distances", "what": "one key too many", "more": 1},
        {"form": "distances", "what": "one key too few", "more": -1},
    ],
)
class local_bounds_right(OneForm):
    """the window sees {what} to the right ({form})"""

    more = 1

    @step
    def ahead_of_own(self):
        return super().ahead_of_own + (self.more if self.concerned() else 0)


@catalogue.mistake(name="local_bounds", why="Two counts of one kind are passed by position.", variants=FORMS)
class local_sides_exchanged(OneForm):
    """look_backward and look_forward are exchanged ({form})"""

    @step
    def look_backward(self):
        return self.argument("look_forward" if self.concerned() else "look_backward")

    @step
    def look_forward(self):
        return self.argument("look_backward" if self.concerned() else "look_forward")


@catalogue.mistake(why="A library has one of the two forms alone.", variants=FORMS)
class local_blocks_for_distance(OneForm):
    """whole blocks are seen where distances count, or distances where blocks count ({form})"""

    @step
    def exact(self):
        given = bool(self.argument("exact"))
        return not given if self.concerned() else given


@catalogue.mistake(why="The concatenation of the neighbouring blocks is forgotten.", variants=FORMS)
class local_own_block_only(OneForm):
    """the neighbouring blocks are not seen ({form})"""

    @step
    def nearby(self):
        return super().nearby & self.own_block() if self.concerned() else super().nearby


@catalogue.mistake(why="Most code of local attention is causal, whatever it is asked.", variants=FORMS)
class local_own_block_causal(OneForm):
    """the own block hides its future, without causal ({form})"""

    @step
    def nearby(self):
        return super().nearby & (self.j <= self.i) if self.concerned() else super().nearby


@catalogue.mistake(why="The number of blocks is t // block.", variants=FORMS)
class local_tail_dropped(OneForm):
    """positions beyond the last full block are seen by nobody ({form})"""

    @step
    def nearby(self):
        near = super().nearby
        return near & (self.j < self.keys // self.size * self.size) if self.concerned() else near


@catalogue.mistake(why="Blocks without all their neighbours are taken for padding.", variants=FORMS)
class local_first_block_empty(OneForm):
    """blocks without a full look-back see only themselves ({form})"""

    @step
    def nearby(self):
        near = super().nearby
        if not self.concerned():
            return near
        full = self.i >= min(self.block * self.look_backward, self.keys)
        return near & (full | self.own_block())


@catalogue.mistake(
    why="Look-ahead is skipped as soon as causal is asked, as if query 0 always stood at key 0.",
    variants=FORMS,
)
class local_causal_cuts_ahead(OneForm):
    """with causal nothing after the query's own block or position is seen, whatever the offset ({form})"""

    @step
    def ahead_of_own(self):
        return 0 if self.causal and self.concerned() else super().ahead_of_own


@catalogue.mistake(why="What is to be hidden is the future AND what is too far, which never holds both.")
class causal_and_exact(Local):
    """exact and causal together hide nothing of the blocks"""

    @step
    def exact(self):
        return bool(self.argument("exact")) and not self.causal

    @step
    def visible_by_causal(self):
        return True if self.argument("exact") else super().visible_by_causal


@catalogue.mistake(name="causal_and_exact", why="Masks are joined by | where they mean what is seen.")
class causal_or_window(Local):
    """exact and causal together show what one of both shows"""

    @step
    def nearby(self):
        return super().nearby | self.causal_pairs if self.exact and self.causal else super().nearby

    @step
    def causal_pairs(self):
        """Pairs that causal shows."""
        return self.ahead <= 0

    @step
    def visible_by_causal(self):
        return True if self.exact and self.causal else super().visible_by_causal


@catalogue.mistake(
    why="The sequence is filled up to whole blocks with zeros, and the filling is not hidden.",
    sides=("both", "forward"),
    variants=FORMS,
)
class local_padding_seen(OneForm):
    """zeros that fill up the last block count as keys of logit 0 ({form})"""

    @step
    def filling(self):
        """How many filled-up positions a query sees, (t, 1); causal hides them all"""
        place = np.arange(self.keys, self.keys if self.causal else -(-self.keys // self.size) * self.size)
        place = place if self.exact else place // self.size
        gap = place - self.query_place
        return ((gap >= -self.behind) & (gap <= self.ahead_of_own)).sum(-1, keepdims=True)

    @step
    def maximum(self):
        top = super().maximum
        return np.where(self.filling > 0, np.maximum(top, 0.0), top) if self.concerned() else top

    @step
    def row_sum(self):
        return super().row_sum + (self.filling * np.exp(-self.maximum) if self.concerned() else 0.0)
