"""Query heads and the key heads that they share."""

from typing import Any

import numpy as np

from refattn.arrays import namespace

__all__ = ["Heads"]


class Heads:
    """Query heads h <-> (g, r): the r query heads of each of the g key heads; ``key_head`` (h,) is the key head of each."""

    def __init__(self, h: int, g: int, head_map: str) -> None:
        self.h, self.g, self.r, self.tile = h, g, h // g if g else 0, head_map == "tile"
        numbers = np.arange(h)
        self.numbers = numbers.reshape(self.r, g).T if self.tile else numbers.reshape(g, self.r)
        self.key_head = numbers % max(1, g) if self.tile else numbers // max(1, self.r)

    def split(self, x: Any, axis: int = 1) -> Any:
        """Axis of h (or 1) into (g, r) (or (1, 1))."""
        xp = namespace(x)
        before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
        if size == 1 and self.h != 1:
            return xp.reshape(x, (*before, 1, 1, *after))
        if not self.tile:
            return xp.reshape(x, (*before, self.g, self.r, *after))
        x = xp.reshape(x, (*before, self.r, self.g, *after))
        order = list(range(x.ndim))
        order[axis], order[axis + 1] = axis + 1, axis
        return xp.permute_dims(x, tuple(order))

    def join(self, x: Any, axis: int) -> Any:
        """(g, r) at ``axis`` back into one axis in the caller's order."""
        xp = namespace(x)
        if self.tile and x.shape[axis] * x.shape[axis + 1] == self.h:
            order = list(range(x.ndim))
            order[axis], order[axis + 1] = axis + 1, axis
            x = xp.permute_dims(x, tuple(order))
        return xp.reshape(x, (*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :]))
