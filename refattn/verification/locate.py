"""Where an array is wrong: axis letters, the worst and the first element, the positions that hold bad ones."""

from typing import Any

import numpy as np

__all__ = ["axes_of", "locate"]

_AXES = {
    "output": "bhqe", "lse": "bhq", "q": "bhqd", "k": "bgkd", "v": "bgke", "qk": "bhtd", "bias": "bhqk", "sinks": "hn", "alibi_slopes": "h",
    "x": "btm", "x_q": "bqm", "x_k": "bkm", "x_v": "bkm", "w_q": "mhd", "w_k": "mgd", "w_v": "mge", "w_o": "hem",
}  # fmt: skip
_TILES = (128, 64, 32, 16)


def axes_of(array: str, ndim: int) -> list[str]:
    """Axis letters of an array; further leading axes are b0, b1 ..., axes of unknown arrays axis0, axis1 ..."""
    letters = list(_AXES.get(array.removeprefix("d_"), ""))
    if array == "d_sinks" and ndim == 1:
        letters = ["h"]
    if not letters:
        return [f"axis{i}" for i in range(ndim)]
    missing = ndim - len(letters)
    return (
        [f"b{i}" for i in range(missing)] + letters if missing > 0 else letters[-missing:] if missing < 0 else letters
    )


def locate(bad: np.ndarray, units: np.ndarray, array: str) -> dict[str, Any]:
    """Where an array is wrong.

    Returns
    -------
    dict
        ``worst`` and ``first`` index by axis letter, ``count`` and ``share`` of bad elements, ``only``: for each axis on which not all
        positions hold a bad element, the ones that do; ``first_row`` and ``starts_at_multiple_of`` for the length axis.
    """
    letters = axes_of(array, bad.ndim)
    worst = np.unravel_index(int(np.argmax(units)), units.shape)
    first = np.unravel_index(int(np.argmax(bad)), bad.shape)
    found: dict[str, Any] = {
        "worst": {letter: int(i) for letter, i in zip(letters, worst, strict=True)},
        "first": {letter: int(i) for letter, i in zip(letters, first, strict=True)},
        "count": int(bad.sum()),
        "share": float(bad.mean()),
        "only": {},
    }
    for axis, letter in enumerate(letters):
        hit = bad.any(axis=tuple(a for a in range(bad.ndim) if a != axis))
        if hit.any() and not hit.all():
            found["only"][letter] = [int(i) for i in np.flatnonzero(hit)]
        if letter in ("q", "k", "t") and hit.any():
            start = int(np.argmax(hit))
            if start:
                found["first_row"] = start
                found["starts_at_multiple_of"] = next((n for n in _TILES if start % n == 0), None)
    return found
