"""How positions are dealt out to ranks: contiguous, zigzag (rank r has the chunks r and 2 n - 1 - r of 2 n), striped (t mod n)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from refattn.arrays import device, namespace, require_array, require_integer, require_one_of

__all__ = ["DEALS", "positions", "shard", "unshard"]

DEALS = ("contiguous", "zigzag", "striped")


def positions(length: int, ranks: int, deal: str) -> list[np.ndarray]:
    """The positions of every rank, rising.  Lengths that do not divide: the first chunks have one position more."""
    require_one_of("deal", deal, DEALS)
    ranks = require_integer("ranks", ranks, minimum=1)
    every = np.arange(length)
    if deal == "striped":
        return [every[r::ranks] for r in range(ranks)]
    if deal == "contiguous":
        return np.array_split(every, ranks)
    chunks = np.array_split(every, 2 * ranks)
    return [np.concatenate([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)]


def shard(x: Any, ranks: int, *, deal: str, axis: int = -2) -> list[Any]:
    """The parts of an array that each rank gets.

    Parameters
    ----------
    x : array
    ranks : int
    deal : {"contiguous", "zigzag", "striped"}
    axis : int
        The axis of positions.

    Examples
    --------
    >>> import numpy as np
    >>> [part.ravel().tolist() for part in shard(np.arange(8)[:, None], 2, deal="zigzag")]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    require_array("x", x)
    axis = _axis(axis, x)
    xp, on = namespace(x), device(x)
    return [xp.take(x, xp.asarray(p, device=on), axis=axis) for p in positions(x.shape[axis], ranks, deal)]


def unshard(parts: Sequence[Any], *, deal: str, axis: int = -2) -> Any:
    """The array that ``shard`` cut into these parts."""
    if not isinstance(parts, (list, tuple)) or not parts:
        raise TypeError(f"parts is {parts!r}: expected a list of arrays, one for each rank")
    for n, part in enumerate(parts):
        require_array(f"parts[{n}]", part)
    axis = _axis(axis, parts[0])
    xp, on = namespace(*parts), device(parts[0])
    lengths = [part.shape[axis] for part in parts]
    dealt = positions(sum(lengths), len(parts), deal)
    if lengths != [len(p) for p in dealt]:
        expected = [len(p) for p in dealt]
        raise ValueError(
            f"parts have lengths {lengths}: expected {expected}, the {deal} deal of {sum(lengths)} positions"
        )
    back = np.argsort(np.concatenate(dealt), kind="stable")
    return xp.take(xp.concat(list(parts), axis=axis), xp.asarray(back, device=on), axis=axis)


def _axis(axis: int, x: Any) -> int:
    axis = require_integer("axis", axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis is {axis}: expected one of the {x.ndim} axes of an array of shape {tuple(x.shape)}")
    return axis % x.ndim
