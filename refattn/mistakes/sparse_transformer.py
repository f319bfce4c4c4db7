"""The ways people get Sparse Transformer attention wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np

from refattn import patterns
from refattn.definitions.dense_steps import Steps
from refattn.definitions.key_sets import other_keys, sparse_keys
from refattn.mistakes.dense_old import mutations_for
from refattn.records import Mutation, Result

__all__ = ["sparse_mutations"]


_OWN = ("pattern", "stride", "summary", "summary_offsets", "heads", "layer", "variant")


def _chosen(arguments: dict[str, Any]) -> dict[str, Any]:
    """The pattern's options with their defaults, and t and h."""
    defaults = {
        "pattern": "strided",
        "summary": None,
        "summary_offsets": None,
        "heads": "split",
        "layer": None,
        "variant": "paper",
    }
    h, t = np.shape(arguments["q"])[-3:-1]
    return {"t": t, "h": h, **defaults, **{n: x for n, x in arguments.items() if n in _OWN}}


def _as_dense(arguments: dict[str, Any], seen: np.ndarray | None = None) -> dict[str, Any]:
    """Arguments of dense attention over the sets."""
    seen = sparse_keys(**_chosen(arguments)) if seen is None else seen
    return {**{n: x for n, x in arguments.items() if n not in _OWN}, "pattern": patterns.dense(seen)}


def _other_sets(class_: str, says: str, sets: Callable[[dict[str, Any], np.ndarray], np.ndarray | None]) -> Mutation:
    """Softmax over other keys; ``sets`` gets the options with t and h, and the right sets (h, t, t)."""

    def wrong(arguments: dict[str, Any]) -> dict[str, Any] | None:
        chosen = _chosen(arguments)
        seen = sets(chosen, sparse_keys(**chosen))
        return None if seen is None else _as_dense(arguments, seen)

    return other_keys(class_, says, _as_dense, wrong)


def _each_offset(chosen: dict[str, Any]) -> np.ndarray:
    return np.broadcast_to(0 if chosen["summary_offsets"] is None else chosen["summary_offsets"], (chosen["h"],))


def _with(**changes: Any) -> Callable[..., np.ndarray | None]:
    """Other options; a change is a value or a function of the options (None: it does not apply)."""

    def sets(chosen: dict[str, Any], right: np.ndarray) -> np.ndarray | None:
        found = {n: x(chosen) if callable(x) else x for n, x in changes.items()}
        return None if any(x is None for x in found.values()) else sparse_keys(**{**chosen, **found})

    return sets


def _only(pattern: str, sets: Callable[..., np.ndarray | None]) -> Callable[..., np.ndarray | None]:
    return lambda chosen, right: sets(chosen, right) if chosen["pattern"] == pattern else None


def _distance(chosen: dict[str, Any]) -> np.ndarray:
    i = np.arange(chosen["t"])
    return i[:, None] - i


def _shorter_run(chosen: dict[str, Any], right: np.ndarray) -> np.ndarray:
    """The distances of the run end one too early or too late in a merged head too, whose union hides the difference."""
    gap = _distance(chosen)
    return right & ((gap != chosen["stride"] - (chosen["variant"] == "code")) | (gap == 0))


def _absolute(chosen: dict[str, Any], right: np.ndarray) -> np.ndarray:
    """The multiples are those of the position, not of the distance."""
    gap, stride = _distance(chosen), chosen["stride"]
    multiple = np.broadcast_to(np.arange(chosen["t"]) % stride == 0, gap.shape) & (gap >= 0)
    first = sparse_keys(**{**chosen, "heads": "first", "layer": None})
    second = sparse_keys(**{**chosen, "heads": "second", "layer": None})
    takes_second = (right & second).sum(axis=(-2, -1)) == second.sum(axis=(-2, -1))
    takes_first = (right & first).sum(axis=(-2, -1)) == first.sum(axis=(-2, -1))
    return np.where(takes_second[:, None, None], multiple | (first & takes_first[:, None, None]), right)


def _future(chosen: dict[str, Any], right: np.ndarray) -> np.ndarray:
    return right | np.swapaxes(right, -1, -2)


def _not_oneself(chosen: dict[str, Any], right: np.ndarray) -> np.ndarray:
    return right & (_distance(chosen) != 0)


def _earlier_blocks_only(chosen: dict[str, Any], right: np.ndarray) -> np.ndarray | None:
    """Summary columns of the own block are left out where no first part sees them."""
    block = np.arange(chosen["t"]) // chosen["stride"]
    second = sparse_keys(**{**chosen, "heads": "second", "layer": None})
    merged = chosen["heads"] == "merged"
    alone = np.all(right == second, axis=(-2, -1))[:, None, None] & (not merged)
    return np.where(alone, right & (block[:, None] != block), right)


def _columns_moved(by: int) -> Callable[..., np.ndarray | None]:
    """Summary columns further to the right in every block by ``by`` tokens; they stay in their block."""

    def sets(chosen: dict[str, Any], right: np.ndarray) -> np.ndarray | None:
        offsets = _each_offset(chosen) - by
        if offsets.max(initial=0) + chosen["summary"] > chosen["stride"]:
            return None
        return sparse_keys(**{**chosen, "summary_offsets": offsets})

    return sets


def _first_columns(chosen: dict[str, Any], right: np.ndarray) -> np.ndarray:
    offsets = chosen["stride"] - chosen["summary"] - _each_offset(chosen)
    return sparse_keys(**{**chosen, "summary_offsets": offsets})


def _exchanged(chosen: dict[str, Any], right: np.ndarray) -> np.ndarray | None:
    if chosen["heads"] == "merged":
        return None
    first, second = (sparse_keys(**{**chosen, "heads": part, "layer": None}) for part in ("first", "second"))
    return np.where(np.all(right == first, axis=(-2, -1))[:, None, None], second, first)


def _two_softmaxes(says: str, *, counted_twice: bool, whole_lse: bool) -> Mutation:
    """A merged head as two softmaxes: their mean, or merged as if the parts had no key in common."""

    def forward(arguments: dict[str, Any]) -> Result | None:
        chosen = _chosen(arguments)
        if chosen["heads"] != "merged":
            return None
        with np.errstate(all="ignore"):
            parts = [
                Steps(_as_dense(arguments, sparse_keys(**{**chosen, "heads": part}))).forward()
                for part in ("first", "second")
            ]
            right = Steps(_as_dense(arguments)).forward()
            lse = np.logaddexp(*(p.lse for p in parts))
            shares = [np.exp(p.lse - lse) if counted_twice else np.full(p.lse.shape, 0.5) for p in parts]
            shares = [np.where(np.isneginf(lse), 0.0, share)[..., None] for share in shares]
            output = sum(share * p.output for share, p in zip(shares, parts, strict=True))
        if np.allclose(output, right.output, rtol=1e-9, atol=1e-12, equal_nan=True):
            return None
        return Result(output=output, lse=right.lse if whole_lse else lse)

    return Mutation("sparse_union_mean", says, forward=forward)


sparse_mutations: tuple[Mutation, ...] = (
    _other_sets(
        "sparse_local_off1",
        "the run holds stride keys where stride + 1 are due, or the other way round",
        _only("strided", _with(variant=lambda chosen: "code" if chosen["variant"] == "paper" else "paper")),
    ),
    _other_sets("sparse_local_off1", "the farthest key of the run is missing", _only("strided", _shorter_run)),
    _other_sets("sparse_stride_absolute", "the multiples are those of the position", _only("strided", _absolute)),
    _two_softmaxes("a merged head is the mean of two softmaxes", counted_twice=False, whole_lse=True),
    _two_softmaxes(
        "a merged head is the mean of two softmaxes, and its lse that of both together",
        counted_twice=False,
        whole_lse=False,
    ),
    _two_softmaxes("the key that both parts hold is counted twice", counted_twice=True, whole_lse=False),
    _other_sets("sparse_summary_columns", "the summary columns begin each block", _only("fixed", _first_columns)),
    _other_sets(
        "sparse_summary_columns",
        "the summary columns stand one further to the right, as the paper prints them",
        _only("fixed", _columns_moved(1)),
    ),
    _other_sets(
        "sparse_summary_columns",
        "the summary columns stand one too far to the left",
        _only("fixed", _columns_moved(-1)),
    ),
    _other_sets(
        "sparse_summary_columns",
        "every head has the same summary columns",
        _only("fixed", lambda chosen, right: sparse_keys(**{**chosen, "summary_offsets": None})),
    ),
    _other_sets(
        "sparse_summary_own_block",
        "summary columns of the own block are not seen",
        _only("fixed", _earlier_blocks_only),
    ),
    _other_sets(
        "sparse_heads_exchanged",
        "the second part stands where the first is due, and the other way round",
        _exchanged,
    ),
    _other_sets("sparse_heads_merged", "every head sees both parts", _with(heads="merged", layer=lambda chosen: 0)),
    _other_sets("causal_drop", "the pattern is seen in both directions", _future),
    _other_sets("causal_strict", "a query does not see its own key", _not_oneself),
    _other_sets("sparse_dense", "all earlier keys are seen", lambda chosen, right: np.tril(np.ones(right.shape, bool))),
    *mutations_for(_as_dense, exclude=("pattern_drop",)),
)
