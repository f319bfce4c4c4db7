"""Local attention in blocks: batches of small ones along the band, or the core's tiles where a window fills them.

Options come as numbers below the length t: ``block`` positions of a block, ``behind`` and ``ahead`` what is seen before and
after oneself, in blocks, or in positions with ``exact``.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refattn.arrays import require_flag, require_integer
from refattn.core import options
from refattn.core.blocks import Maker, banded, tiled
from refattn.patterns import Pattern, window
from refattn.patterns.counting import Ends
from refattn.records import Block

__all__ = ["Near", "seen_after"]

_LARGE = 512
"""Windows from this width on fill the core's own tiles: batching small blocks pays below it."""


class _Neighbours(Pattern):
    """The keys of the own block, of ``behind`` blocks before it and ``ahead`` blocks after it."""

    def __init__(self, block: int, behind: int, ahead: int) -> None:
        super().__init__("neighbours", block, behind, ahead)
        self._block, self._behind, self._ahead = block, behind, ahead

    def _ends(self, i: Any) -> tuple[Any, Any]:
        """First key that row i sees, and the first one after those that it sees; they may lie outside 0 ... k."""
        return (i // self._block - self._behind) * self._block, (i // self._block + self._ahead + 1) * self._block

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        start, end = self._ends(i)
        return (j >= start) & (j < end)

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Any, h: Any) -> str:
        (lowest, nearest), (farthest, highest) = self._ends(i0), self._ends(i1 - 1)
        if j1 <= lowest or j0 >= highest:
            return "empty"
        return "full" if j0 >= farthest and j1 <= nearest else "partial"

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Any, h: Any) -> tuple[int, int]:
        return self._ends(i0)[0], self._ends(i1 - 1)[1]

    def _interval(self, i: Any, b: Any, h: Any, q: int, k: int) -> tuple[Any, Any]:
        start, end = self._ends(i)
        return np.maximum(start, 0), np.minimum(end, k)

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        start, end = self._interval(i, b, h, q, k)
        return np.maximum(np.minimum(end, m) - start, 0)

    def _ends_of_rows(self, q: int, k: int) -> Ends:
        return Ends(frozenset((-self._behind * self._block, (self._ahead + 1) * self._block)), period=self._block)


@dataclasses.dataclass(frozen=True)
class Near:
    """What a query of a sequence of length t sees, before causal and the other options."""

    t: int
    block: int
    behind: int
    ahead: int
    exact: bool

    @classmethod
    def read(cls, t: int, block: Any, look_backward: Any, look_forward: Any, exact: Any) -> "Near":
        """The mechanism's own options, checked; what reaches beyond the sequence is cut there."""
        exact = require_flag("exact", exact)
        block = require_integer("block", block, minimum=1)
        behind = require_integer("look_backward", look_backward, minimum=0)
        ahead = require_integer("look_forward", look_forward, minimum=0)
        if exact:
            return cls(t, block, min(block * behind, t), min(block * ahead, t), True)
        return cls(t, min(block, max(1, t)), min(behind, t), min(ahead, t), False)

    @property
    def pattern(self) -> Pattern:
        return window(self.behind, self.ahead) if self.exact else _Neighbours(self.block, self.behind, self.ahead)

    def band(self, after: int) -> tuple[int, int, int]:
        """Size of the blocks, and how many a query looks back and forward; size 0 where tiles do better.

        ``after``: positions after itself that causal leaves a query.
        """
        unit = 1 if self.exact else self.block
        left, right = self.behind * unit, min(self.ahead * unit, after)
        size = min(max(16, math.ceil((left + right) / 2)), 128) if self.exact else self.block * max(1, 8 // self.block)
        behind, ahead = math.ceil(left / size), math.ceil(right / size)
        wide = left + right + (0 if self.exact else self.block) >= _LARGE or (behind + ahead + 1) * size >= self.t
        return 0 if wide else size, behind, ahead

    def blocks(self, after: int, xp: Any, like: Any) -> Callable[..., Iterator[Block]]:
        """The blocks of a group, given what else hides pairs."""
        t, pattern = self.t, self.pattern
        size, behind, ahead = self.band(after)

        def listed(visibility: Pattern | None, group: Any) -> Iterator[Block]:
            make = Maker(visibility, group, t, t, xp, like)
            if not size:
                return tiled(make, pattern)
            return banded(make, t, size, behind, ahead, lambda i, j: pattern.visible(i, j, q=t, k=t))

        return listed


def seen_after(lead: tuple[int, ...], t: int, shared: dict[str, Any]) -> int:
    """How many positions after its own a query may see: the largest offset with causal, else all.

    A query stands at its own place plus the offset, so that a positive one lets it look ahead.
    """
    if not require_flag("causal", shared.get("causal", False)):
        return t
    offsets = options.offsets(lead, t, t, {**options.SHARED, **shared})
    return min(t, max(0, int(offsets.max(initial=0))))
