"""The rows of the output, (..., head, query), in which a call is wrong."""

import numpy as np

from refattn.verification.diagnosis.calls import JudgedCall

__all__ = ["ranges", "rows_in_words", "wrong_rows"]


def wrong_rows(call: JudgedCall) -> np.ndarray | None:
    """Rows with a wrong element of output, lse or d_q; None where none of these is judged over such rows."""
    output = call.truth.values.get("output")
    if output is None or output.ndim < 3:
        return None
    shape = output.shape[:-1]
    wrong = np.zeros(shape, dtype=bool)
    seen = False
    for name in ("output", "lse", "d_q", "d_qk"):
        if name not in call.failing:
            continue
        off = call.off(name)
        if off.shape == shape:
            wrong |= off
        elif off.shape[:-1] == shape:
            wrong |= off.any(axis=-1)
        else:
            continue
        seen = True
    return wrong if seen else None


def rows_in_words(rows: np.ndarray) -> str:
    """``in head 3``, ``in rows 16-19 of batch entry 2``: axes along which not all positions are wrong."""
    names = (
        ["batch entry", "head", "row"][-rows.ndim :]
        if rows.ndim <= 3
        else ["batch entry"] * (rows.ndim - 2) + ["head", "row"]
    )
    parts = []
    for axis, name in enumerate(names):
        hit = rows.any(axis=tuple(a for a in range(rows.ndim) if a != axis))
        if not hit.all():
            which = np.flatnonzero(hit)
            if which.size == 1:
                plural = name
            else:
                plural = "batch entries" if name == "batch entry" else f"{name}s"
            parts.append(f"{plural} {ranges(which)}")
    return f"in {' of '.join(reversed(parts))}" if parts else ""


def ranges(numbers: np.ndarray) -> str:
    """``0-3, 7`` for [0, 1, 2, 3, 7], cut after a few."""
    cuts = np.flatnonzero(np.diff(numbers) != 1)
    spans = [(int(a[0]), int(a[-1])) for a in np.split(numbers, cuts + 1) if a.size]
    words = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:4]]
    return ", ".join(words) + (" ..." if len(spans) > 4 else "")
