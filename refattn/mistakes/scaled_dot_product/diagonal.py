"""Mistakes about causal and the window."""

from refattn.definitions.scaled_dot_product import ScaledDotProduct, per_batch
from refattn.definitions.steps import step
from refattn.mistakes.scaled_dot_product.base import TILES, catalogue

# ---------------------------------------------------------------------- the diagonal


PLACES = (
    {"place": "upper left"},
    {"place": "lower right"},
    {"place": "lower right of the padded lengths"},
    {"place": "lower right of the padded keys"},
    {"place": "lower right of the padded queries"},
    {"place": "as far to the other side"},
)


class Misplaced(ScaledDotProduct):
    """A place of query 0 that is not the one asked for."""

    place = "upper left"

    @step
    def misplaced(self):
        """Where the mistake puts query 0 on the key axis."""
        return {
            "upper left": per_batch(0, self.lead),
            "lower right": self.real_keys - self.real_queries,
            "lower right of the padded lengths": per_batch(self.own_keys - self.queries, self.lead),
            "lower right of the padded keys": self.own_keys - self.real_queries,
            "lower right of the padded queries": self.real_keys - self.queries,
            "as far to the other side": -super().offset,
        }[self.place]


@catalogue.mistake(
    why="Frameworks put the diagonal at the upper left or the lower right; a cache's length is forgotten.",
    sides=("both", "forward"),
    variants=PLACES,
)
class causal_other(Misplaced):
    """causal and window stand {place}"""

    @step
    def offset(self):
        return self.misplaced if self.causal or self.window is not None else super().offset


@catalogue.mistake(
    name="causal_other",
    why="causal is a path of its own, with another origin than the window's.",
    sides=("both", "forward"),
    variants=PLACES,
)
class causal_diagonal_other(Misplaced):
    """the causal diagonal stands {place}"""

    @step
    def visible_by_causal(self):
        return self.j - self.i <= self.misplaced if self.causal else True


@catalogue.mistake(
    name="causal_other",
    why="The bound of the loop over keys is rounded up, and its last tile is not masked.",
    variants=TILES,
)
class causal_rounded(ScaledDotProduct):
    """all keys of the diagonal's tile of {tile} keys are visible"""

    @step
    def visible_by_causal(self):
        return self.j // self.tile <= (self.i + self.offset) // self.tile if self.causal else True


@catalogue.mistake(why="The backward has an offset of its own.", sides=("backward",), variants=PLACES)
class causal_bwd_other(causal_diagonal_other):
    """the causal diagonal of the backward stands {place}"""


@catalogue.mistake(
    name="causal_bwd_other", why="The backward has an offset of its own.", sides=("backward",), variants=PLACES
)
class causal_and_window_bwd_other(causal_other):
    """causal and window of the backward stand {place}"""


@catalogue.mistake(
    why="The flag is lost on a side path: with dropout, with returned weights.", sides=("both", "forward")
)
class causal_drop(ScaledDotProduct):
    """causal is ignored"""

    causal = False


@catalogue.mistake(why="< in place of <=.")
class causal_strict(ScaledDotProduct):
    """the diagonal is not visible"""

    @step
    def visible_by_causal(self):
        return self.ahead < 0 if self.causal else True


@catalogue.mistake(name="causal_other", why="The comparison is made with a count, not with an index.")
class causal_one_more(ScaledDotProduct):
    """one key beyond the diagonal is visible"""

    @step
    def visible_by_causal(self):
        return self.ahead <= 1 if self.causal else True


@catalogue.mistake(why="The comparison is turned round.")
class causal_inverted(ScaledDotProduct):
    """only the future is visible"""

    @step
    def visible_by_causal(self):
        return self.ahead > 0 if self.causal else True


@catalogue.mistake(name="causal_inverted", why="The comparison is turned round.")
class causal_transposed(ScaledDotProduct):
    """only the diagonal and the future are visible"""

    @step
    def visible_by_causal(self):
        return self.ahead >= 0 if self.causal else True


# ---------------------------------------------------------------------- the window


@catalogue.mistake(why="The window never reaches the path that runs.", sides=("both", "forward"))
class window_drop(ScaledDotProduct):
    """the window is ignored"""

    window = None


@catalogue.mistake(name="window_drop", why="The bound of the loop over keys takes its place, but for a tile.")
class window_left_drop(ScaledDotProduct):
    """the left edge of the window is ignored"""

    window_left = None


@catalogue.mistake(name="window_drop", why="causal is taken to cover it.")
class window_right_drop(ScaledDotProduct):
    """the right edge of the window is ignored"""

    window_right = None


@catalogue.mistake(name="window_drop", why="`if window:` is false for 0.")
class window_zero_drop(ScaledDotProduct):
    """a count of zero is read as no limit"""

    @step
    def window_left(self):
        return super().window_left or None

    @step
    def window_right(self):
        return super().window_right or None


@catalogue.mistake(why="The two counts are handed over in another order.")
class window_swapped(ScaledDotProduct):
    """left and right are exchanged"""

    @step
    def window_left(self):
        return super().window_right

    @step
    def window_right(self):
        return super().window_left


class Resized(ScaledDotProduct):
    """A window with other counts."""

    to_left = to_right = 0

    @step
    def window_left(self):
        left = super().window_left
        return None if left is None else left + self.to_left

    @step
    def window_right(self):
        right = super().window_right
        return None if right is None else right + self.to_right


@catalogue.mistake(
    why="A window of n keys and n keys before the own one are taken for the same.",
    variants=(
        {"where": "to the left", "to_left": 1},
        {"where": "to the right", "to_right": 1},
        {"where": "on both sides", "to_left": 1, "to_right": 1},
    ),
)
class window_plus1(Resized):
    """the window sees one key too many {where}"""


@catalogue.mistake(
    why="An edge is exclusive where it is inclusive in the public contract.",
    variants=(
        {"where": "to the left", "to_left": -1},
        {"where": "to the right", "to_right": -1},
        {"where": "on both sides", "to_left": -1, "to_right": -1},
    ),
)
class window_edge(Resized):
    """the window's edge is not visible {where}"""
