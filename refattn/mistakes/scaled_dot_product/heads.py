"""Mistakes about heads and channels."""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import step
from refattn.mistakes.scaled_dot_product.base import catalogue

# ---------------------------------------------------------------------- heads


@catalogue.mistake(why="Key heads are tiled where they are repeated in the public contract, or the reverse.")
class gqa_tile(ScaledDotProduct):
    """the heads are mapped the other way"""

    @step
    def head_map(self):
        return "repeat" if self.argument("head_map") == "tile" else "tile"


@catalogue.mistake(name="gqa_tile", why="The head is taken modulo the size of a group.")
class gqa_modulo_group(ScaledDotProduct):
    """the key head is the query head modulo the size of a group"""

    @step
    def key_head(self):
        return np.arange(self.heads) % max(1, self.heads // max(1, self.key_heads)) % self.key_heads


@catalogue.mistake(name="gqa_tile", why="The head is divided by the number of key heads, not by a group's size.")
class gqa_divided(ScaledDotProduct):
    """the key head is the query head divided by the number of key heads"""

    @step
    def key_head(self):
        return np.arange(self.heads) // max(1, self.key_heads) % self.key_heads


@catalogue.mistake(name="gqa_tile", why="Grouped heads are taken for a single key head.")
class gqa_first(ScaledDotProduct):
    """every query head reads key head 0"""

    @step
    def key_head(self):
        return np.zeros(self.heads, int)


@catalogue.mistake(
    why="In the layout (batch, length, head, channel) the wrong axis is repeated.",
)
class gqa_axis(ScaledDotProduct):
    """the key heads are repeated along the positions"""

    @step
    def read_place(self):
        """(head, position) of k that each (query head, position) reads: the length is repeated, then cut into h heads."""
        flat = np.arange(self.keys) * self.heads + np.arange(self.heads)[:, None]
        return flat % max(1, self.key_heads), flat // max(1, self.key_heads) % max(1, self.keys)

    @step
    def keys_of_head(self):
        return self.k[..., self.read_place[0], self.read_place[1], :]

    @step
    def values_of_head(self):
        return self.v[..., self.read_place[0], self.read_place[1], :]

    @step
    def d_k(self):
        return self.returned(self.d_keys_of_head, self.k)

    @step
    def d_v(self):
        return self.returned(self.d_values_of_head, self.v)

    def returned(self, d, array):
        """The adjoint of reading: (h, k, c) back to (g, k, c)."""
        total = np.zeros((*d.shape[:-3], *array.shape[-3:]), d.dtype)
        np.add.at(total, (..., *self.read_place, slice(None)), d)
        return total


# ---------------------------------------------------------------------- channels


class Truncated(ScaledDotProduct):
    """Arrays of which only the first channels are read."""

    which = "the first 64 channels"

    def channels_read(self, size):
        match self.which:
            case "the power of two below d":
                return 1 << (max(1, size).bit_length() - 1)
            case "the first 64 channels":
                return min(size, 64)
            case "half the channels":
                return size // 2 or size
            case _:
                block = int(self.which.split()[-1])
                return size // block * block or size

    def cut(self, array):
        return np.where(np.arange(array.shape[-1]) < self.channels_read(array.shape[-1]), array, 0.0)


CHANNELS = tuple(
    {"which": which}
    for which in (
        "the power of two below d",
        "the first 64 channels",
        "half the channels",
        *(f"whole blocks of {n}" for n in (4, 16, 32, 64)),
    )
)


@catalogue.mistake(why="The loop over channels ends early.", variants=CHANNELS)
class d_truncated(Truncated):
    """q.k over {which} only"""

    @step
    def q(self):
        return self.cut(self.argument("q"))

    @step
    def k(self):
        return self.cut(self.argument("k"))

    @step
    def d_q(self):
        return self.cut(super().d_q)

    @step
    def d_k(self):
        return self.cut(super().d_k)


@catalogue.mistake(name="d_truncated", why="The loop over channels ends early.", variants=CHANNELS)
class values_truncated(Truncated):
    """values of {which} only"""

    @step
    def v(self):
        return self.cut(self.argument("v"))

    @step
    def d_v(self):
        return self.cut(super().d_v)
