"""The ways people get local attention wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np

from refattn.definitions.key_sets import near_keys, other_keys, with_keys
from refattn.mistakes.dense_old import mutations_for
from refattn.records import Mutation

__all__ = ["local_mutations"]


def _chosen(arguments: dict[str, Any]) -> tuple[int, int, int, int, bool]:
    """Length, block, look_backward, look_forward, exact."""
    options = {"look_backward": 1, "look_forward": 0, "exact": False, **arguments}
    return (np.shape(options["q"])[-2], *(options[n] for n in ("block", "look_backward", "look_forward", "exact")))


def _shared(arguments: dict[str, Any]) -> dict[str, Any]:
    own = ("block", "look_backward", "look_forward", "exact")
    return {n: x for n, x in arguments.items() if n not in own}


def _as_dense(arguments: dict[str, Any]) -> dict[str, Any]:
    return with_keys(_shared(arguments), near_keys(*_chosen(arguments)))


def _other_sets(class_: str, says: str, sets: Callable[..., np.ndarray | None]) -> Mutation:
    """Softmax over other keys; ``sets`` gets the length, block, look_backward, look_forward, exact and the right sets."""

    def wrong(arguments: dict[str, Any]) -> dict[str, Any] | None:
        chosen = _chosen(arguments)
        seen = sets(*chosen, near_keys(*chosen))
        return None if seen is None else with_keys(_shared(arguments), seen)

    return other_keys(class_, says, _as_dense, wrong)


def _wrapped(t: int, block: int, behind: int, ahead: int, exact: bool, right: np.ndarray) -> np.ndarray:
    i = np.arange(t)
    n, around, unit = (i, t, block) if exact else (i // block, -(-t // block), 1)
    gap = n[:, None] - n
    return (gap % around <= behind * unit) | (-gap % around <= ahead * unit)


def _off_by_one(more: int) -> Callable[..., np.ndarray | None]:
    """The window of positions ``more`` keys longer, or one block more, on the left."""

    def sets(t: int, block: int, behind: int, ahead: int, exact: bool, right: np.ndarray) -> np.ndarray | None:
        if not exact:
            return near_keys(t, block, behind + more, ahead, False) if behind + more >= 0 else None
        gap = np.arange(t)[:, None] - np.arange(t)
        return (gap <= block * behind + more) & (-gap <= block * ahead)

    return sets


def _in_either_form(class_: str, says: str, sets: Callable[..., np.ndarray | None]) -> tuple[Mutation, ...]:
    """A mistake made with blocks, and the same one made with distances: a kernel may make just one of them."""

    def only(form: bool) -> Callable[..., np.ndarray | None]:
        return lambda t, block, behind, ahead, exact, right: (
            sets(t, block, behind, ahead, exact, right) if bool(exact) is form else None
        )

    return tuple(
        _other_sets(class_, f"{says} ({name})", only(form)) for form, name in ((False, "blocks"), (True, "distances"))
    )


local_mutations: tuple[Mutation, ...] = (
    *_in_either_form("local_wrap", "the first blocks see the last ones, and the other way round", _wrapped),
    *_in_either_form("local_bounds", "the window sees one key, or one block, too many to the left", _off_by_one(1)),
    *_in_either_form("local_bounds", "the window sees one key, or one block, too few to the left", _off_by_one(-1)),
    *_in_either_form(
        "local_bounds",
        "look_backward and look_forward are exchanged",
        lambda t, block, behind, ahead, exact, right: near_keys(t, block, ahead, behind, exact),
    ),
    *_in_either_form(
        "local_blocks_for_distance",
        "whole blocks are seen where distances count, or distances where blocks count",
        lambda t, block, behind, ahead, exact, right: near_keys(t, block, behind, ahead, not exact),
    ),
    *_in_either_form(
        "local_own_block_only",
        "the neighbouring blocks are not seen",
        lambda t, block, behind, ahead, exact, right: near_keys(t, block, 0, 0, False) & right,
    ),
    *_in_either_form(
        "local_own_block_causal",
        "the own block hides its future, without causal",
        lambda t, block, behind, ahead, exact, right: np.tril(right),
    ),
    *_in_either_form(
        "local_tail_dropped",
        "positions beyond the last full block are seen by nobody",
        lambda t, block, behind, ahead, exact, right: right & (np.arange(t) < t // block * block),
    ),
    *_in_either_form(
        "local_first_block_empty",
        "blocks without a full look-back see only themselves",
        lambda t, block, behind, ahead, exact, right: (
            right & ((np.arange(t)[:, None] >= block * behind) | near_keys(t, block, 0, 0, False))
        ),
    ),
    *mutations_for(_as_dense, exclude=("pattern_drop",)),
)
