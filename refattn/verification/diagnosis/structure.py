"""Faults that show in the numbers themselves, without a catalogue: zeros, NaN, results in another's place, garbage in padding."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from refattn.verification.diagnosis.calls import JudgedCall

__all__ = ["Finding", "findings"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What the wrong elements of the arrays of one call look like."""

    name: str
    says: str
    arrays: tuple[str, ...]


def findings(call: JudgedCall) -> list[Finding]:
    """Everything that the wrong elements of a call are, the most telling first."""
    found: dict[str, Finding] = {}
    for name in call.failing:
        for class_, says in _of_array(call, name):
            known = found.get(class_)
            found[class_] = Finding(class_, says, (*(known.arrays if known else ()), name))
    return sorted(found.values(), key=lambda f: -len(f.arrays))


def _of_array(call: JudgedCall, name: str) -> Iterator[tuple[str, str]]:
    got, right = call.got[name].astype(np.float64), call.truth.values[name]
    if got.shape != right.shape:
        return
    off = call.off(name)
    wrong, due = got[off], right[off]
    if not wrong.size:
        return
    padding = _padding(call, name)
    if padding is not None and (off & ~padding).sum() == 0:
        yield "tail_garbage", "only places of padding are wrong: they hold numbers where nothing is due"
        return
    if name == "lse" and bool(off.any()):
        others = np.unique(np.concatenate([right[np.isfinite(right)], [0.0]]))
        near = (
            np.min(np.abs(wrong[:, None] - others[None, :]), axis=1, initial=np.inf)
            if others.size <= 1 << 14
            else np.inf
        )
        tolerance = 1e-5 * np.maximum(1.0, np.abs(wrong))
        placed = ~np.isfinite(wrong) | (near <= tolerance)
        if bool(np.all(placed)) and "output" not in call.failing and not bool((wrong == 0).all()):
            yield (
                "lse_slot",
                "the wrong entries of the lse are those of other rows, or empty: written to or read from other places",
            )
    if bool((wrong == 0).all()) and bool((due != 0).any()):
        where = "everywhere" if off.sum() == np.isfinite(due).size == right.size else "where numbers are due"
        yield "unwritten", f"zeros {where}: these places are not written on this path, or hold what was there before"
        return
    if bool(np.isnan(wrong).all()):
        empty = np.isneginf(call.truth.values.get("lse", np.zeros(1)))
        if (
            name in ("output", "lse")
            and empty.any()
            and empty.shape == (right.shape if name == "lse" else right.shape[:-1])
        ):
            rows = empty if name == "lse" else np.broadcast_to(empty[..., None], right.shape)
            if bool((rows | ~off).all()):
                yield "empty_row_nan", "NaN in rows that see no key"
                return
        yield "nan", "NaN where numbers are due"
    yield from _moved(got, right, off, name)


def _moved(got: np.ndarray, right: np.ndarray, off: np.ndarray, name: str) -> Iterator[tuple[str, str]]:
    """Right numbers in a wrong place along the batch or the heads."""
    kinds = {0: ("batch_crossed", "batch entry"), 1: ("head_crossed", "head")}
    for axis, (class_, what) in kinds.items():
        if right.ndim < 3 or axis >= right.ndim - 1 or right.shape[axis] < 2:
            continue
        if right.ndim == 3 and name != "lse":
            continue
        for shift in range(1, right.shape[axis]):
            moved = np.roll(right, shift, axis=axis)
            with np.errstate(invalid="ignore"):
                same = np.isclose(got, moved, rtol=1e-3, atol=0.0, equal_nan=True)
            if bool(same[off].all()) and bool((np.isfinite(moved[off]) & (moved[off] != right[off])).any()):
                yield class_, f"the result of one {what} stands in the place of another"
                return


def _padding(call: JudgedCall, name: str) -> np.ndarray | None:
    """Places beyond the lengths, for arrays over queries or keys; None where there are no lengths."""
    options = call.truth.question.arguments()
    lengths = {
        "q": "query_lengths",
        "k": "key_lengths",
        "v": "key_lengths",
        "output": "query_lengths",
        "lse": "query_lengths",
    }
    option = lengths.get(name.removeprefix("d_"))
    if option is None or options.get(option) is None:
        return None
    right = call.truth.values[name]
    count = np.asarray(options[option])
    axis = right.ndim - (1 if name == "lse" else 2)
    positions = np.arange(right.shape[axis]).reshape(-1, *(1,) * (right.ndim - axis - 1))
    count = count.reshape(*count.shape, *(1,) * (right.ndim - count.ndim)) if count.ndim else count
    return np.broadcast_to(positions >= count, right.shape)
