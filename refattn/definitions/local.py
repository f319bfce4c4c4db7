"""Local attention in steps: softmax attention over the keys near the query, by blocks of positions or by distance.

    blocks:  i // block - look_backward <= j // block <= i // block + look_forward
    exact:   i - block look_backward <= j <= i + block look_forward

Source: Parmar et al. 2018, arXiv:1802.05751, section 4; Child et al. 2019, arXiv:1904.10509.
"""

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import step

__all__ = ["Local", "definition"]


class Local(ScaledDotProduct):
    """Softmax attention over the keys nearby; joined with every other restriction by "and"."""

    defaults = {**ScaledDotProduct.defaults, "look_backward": 1, "look_forward": 0, "exact": False}

    @step
    def size(self):
        """Positions of a block; one that holds the whole sequence may be any longer."""
        return min(self.block, max(1, self.keys))

    @step
    def behind(self):
        """Blocks before the own one, or positions before the own one with ``exact``."""
        return min(self.look_backward * (self.block if self.exact else 1), self.keys)

    @step
    def ahead_of_own(self):
        """Blocks after the own one, or positions after the own one with ``exact``."""
        return min(self.look_forward * (self.block if self.exact else 1), self.keys)

    @step
    def query_place(self):
        """What is compared: the block of a query, or its position."""
        return self.i if self.exact else self.i // self.size

    @step
    def key_place(self):
        return self.j if self.exact else self.j // self.size

    @step
    def nearby(self):
        """- look_backward <= place of the key - place of the query <= look_forward, (t, t)"""
        gap = self.key_place - self.query_place
        return (gap >= -self.behind) & (gap <= self.ahead_of_own)

    @step
    def visible(self):
        """Nearby, and every option agrees."""
        return super().visible & self.nearby


definition = Local
