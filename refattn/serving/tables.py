"""What serving keeps beside the numbers: cumulated lengths, block tables, and a cache that new rows are written into."""

from typing import Any

import numpy as np

from refattn.arrays import (
    LARGEST,
    device,
    is_array,
    is_integer,
    namespace,
    require_array,
    require_integer,
    require_one_of,
    to_numpy,
)
from refattn.mechanism import function
from refattn.records import Result

__all__ = ["block_table", "read_cumulated", "read_lengths", "read_table", "update_cache"]


def _ints(name: str, value: Any, ndim: int) -> np.ndarray:
    """Host ints of a number of axes."""
    host = to_numpy(value) if is_array(value) else np.asarray(value)
    if host.dtype == object or (not is_integer(host.dtype) and (is_array(value) or host.size)):
        raise TypeError(f"{name} is {_shown(value)}: expected ints")
    if host.ndim != ndim:
        raise ValueError(f"{name} has shape {host.shape}: expected {ndim} {'axis' if ndim == 1 else 'axes'}")
    if host.dtype.kind == "u":
        host = np.minimum(host.astype(np.uint64), LARGEST)
    return host.astype(np.int64)


def _shown(value: Any) -> str:
    return f"an array of {value.dtype}" if is_array(value) else f"a {type(value).__name__}"


def read_cumulated(name: str, value: Any, rows: int | None, sequences: int | None = None) -> np.ndarray:
    """Cumulated lengths (b+1,): from 0, never falling, at most the rows that there are."""
    cumulated = _ints(name, value, 1)
    if not cumulated.size or cumulated[0] != 0:
        start = f"starts with {cumulated[0]}" if cumulated.size else "is empty"
        raise ValueError(f"{name} {start}: expected 0, then the end of each sequence")
    if (np.diff(cumulated) < 0).any():
        n = int(np.argmax(np.diff(cumulated) < 0))
        raise ValueError(f"{name} falls from {cumulated[n]} to {cumulated[n + 1]}: expected numbers that never fall")
    if rows is not None and cumulated[-1] > rows:
        raise ValueError(f"{name} ends with {cumulated[-1]}: expected at most {rows}, the rows of the arrays")
    if sequences is not None and len(cumulated) != sequences + 1:
        raise ValueError(f"{name} has {len(cumulated)} entries: expected {sequences + 1}, one more than sequences")
    return cumulated


def read_lengths(name: str, value: Any, sequences: int | None = None) -> np.ndarray:
    """Lengths (b,), none below 0."""
    lengths = _ints(name, value, 1)
    if (lengths < 0).any():
        raise ValueError(f"{name} contains {lengths.min()}: expected lengths from 0")
    if sequences is not None and len(lengths) != sequences:
        raise ValueError(f"{name} has {len(lengths)} entries: expected {sequences}, one per sequence")
    return lengths


def read_table(value: Any, lengths: np.ndarray, pages: int, page: int) -> list[np.ndarray]:
    """The pages of each sequence, in order; what a table (b, p) has beyond them is not looked at."""
    table = _ints("block_table", value, 2)
    if len(table) != len(lengths):
        raise ValueError(
            f"block_table has {len(table)} rows and seq_lens {len(lengths)} entries: expected one row per sequence"
        )
    rows = []
    for n, length in enumerate(lengths.tolist()):
        needed = -(-length // page)
        if needed > table.shape[1]:
            raise ValueError(
                f"block_table has {table.shape[1]} columns: sequence {n} of {length} keys needs {needed} pages of {page}"
            )
        row = table[n, :needed]
        if needed and (row.min() < 0 or row.max() >= pages):
            wrong = int(row[(row < 0) | (row >= pages)][0])
            raise ValueError(f"block_table holds page {wrong} in row {n}: expected pages from 0 to {pages - 1}")
        rows.append(row)
    return rows


def block_table(indptr: Any, indices: Any, last_page_len: Any = None, *, page: int) -> tuple[np.ndarray, np.ndarray]:
    """A table of pages and the lengths, from page numbers in compressed rows (as FlashInfer has them).

    Parameters
    ----------
    indptr : ints (b+1,)
        Sequence n has the pages ``indices[indptr[n]:indptr[n+1]]``.
    indices : ints
        Page numbers.
    last_page_len : ints (b,), optional
        Filled slots of each last page, 1 ... page; 0 for a sequence without pages.  Left out: all pages are full.
    page : int
        Slots of a page.

    Returns
    -------
    block_table : ints (b, p)
        -1 beyond a sequence's pages.
    seq_lens : ints (b,)

    Examples
    --------
    >>> table, lengths = block_table([0, 2, 3], [7, 4, 5], [1, 3], page=4)
    >>> table.tolist(), lengths.tolist()
    ([[7, 4], [5, -1]], [5, 3])
    """
    page = require_integer("page", page, minimum=1)
    pages = _ints("indices", indices, 1)
    ends = read_cumulated("indptr", indptr, len(pages))
    counts = np.diff(ends)
    lengths = counts * page
    if last_page_len is not None:
        last = read_lengths("last_page_len", last_page_len, len(counts))
        wrong = np.where(counts > 0, (last < 1) | (last > page), last != 0)
        if wrong.any():
            n = int(np.argmax(wrong))
            expected = f"1 to {page}" if counts[n] else "0, as it has no pages"
            raise ValueError(f"last_page_len is {last[n]} for sequence {n}: expected {expected}")
        lengths = np.where(counts > 0, lengths - page + last, 0)
    table = np.full((len(counts), int(counts.max(initial=0))), -1, dtype=np.int64)
    for n, count in enumerate(counts.tolist()):
        table[n, :count] = pages[ends[n] : ends[n] + count]
    return table, lengths


def _positions(cache: Any, update: Any, write_indices: Any, mode: str, axis: int) -> tuple[np.ndarray, int]:
    """Where each new row of each sequence goes, (b, t), and the axis counted from the front."""
    require_array("cache", cache)
    require_array("update", update)
    require_one_of("mode", mode, ("linear", "circular"))
    axis = require_integer("axis", axis)
    at = axis + cache.ndim if axis < 0 else axis
    if not 0 < at < cache.ndim:
        raise ValueError(f"axis is {axis}: expected one of the {cache.ndim} axes of cache behind the first")
    expected = (*cache.shape[:at], None, *cache.shape[at + 1 :])
    if update.ndim != cache.ndim or any(m is not None and m != n for m, n in zip(expected, update.shape, strict=False)):
        raise ValueError(
            f"update has shape {tuple(update.shape)} and cache {tuple(cache.shape)}: expected the same but for axis {axis}"
        )
    start = read_lengths("write_indices", write_indices, cache.shape[0])
    slots, rows = cache.shape[at], update.shape[at]
    if rows > slots:
        raise ValueError(f"update has {rows} rows and cache {slots}: expected at most as many")
    places = start[:, None] + np.arange(rows)
    if mode == "circular":
        return places % max(1, slots), at
    if places.size and places.max() >= slots:
        raise ValueError(f"write_indices is {start.tolist()}: {rows} rows from there do not fit into {slots}")
    return places, at


def _sources(cache: Any, update: Any, places: np.ndarray, at: int) -> np.ndarray:
    """Of each slot (b, s), the row of [cache, update] that it holds afterwards."""
    slots = cache.shape[at]
    source = np.broadcast_to(np.arange(slots), (cache.shape[0], slots)).copy()
    np.put_along_axis(source, places, slots + np.arange(update.shape[at])[None], axis=1)
    return source


def _update_forward(
    cache: Any, update: Any, write_indices: Any, *, mode: str = "linear", axis: int = -2
) -> tuple[Result, Any]:
    """A cache with new rows written into it, as a new array.

    Parameters
    ----------
    cache : array (b, ..., s, d)
    update : array (b, ..., t, d)
        Row r of sequence n is written at ``write_indices[n] + r``.
    write_indices : ints (b,)
    mode : {"linear", "circular"}
        Circular: positions count modulo s.
    axis : int
        The axis of the rows.

    Examples
    --------
    >>> import numpy as np
    >>> update_cache(np.zeros((1, 3, 1)), np.array([[[5.0], [6.0]]]), [2], mode="circular")[0, :, 0].tolist()
    [6.0, 0.0, 5.0]
    """
    places, at = _positions(cache, update, write_indices, mode, axis)
    xp, on = namespace(cache, update), device(cache)
    source = _sources(cache, update, places, at)
    rows = [
        xp.take(xp.concat([cache[n, ...], update[n, ...]], axis=at - 1), xp.asarray(source[n], device=on), axis=at - 1)
        for n in range(cache.shape[0])
    ]
    output = xp.stack(rows, axis=0) if rows else cache
    return Result(output=output), (xp, on, source, places, at)


def _update_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """Slots that were overwritten give nothing to the cache, and theirs to the update."""
    if output is None:
        return {}
    xp, on, source, places, at = saved
    kept = xp.asarray(source == np.arange(source.shape[1]), device=on)
    kept = xp.reshape(kept, (source.shape[0], *(1,) * (at - 1), source.shape[1], *(1,) * (output.ndim - at - 1)))
    taken = [xp.take(output[n, ...], xp.asarray(places[n], device=on), axis=at - 1) for n in range(len(places))]
    return {
        "cache": xp.where(kept, output, xp.zeros_like(output)),
        "update": xp.stack(taken, axis=0) if taken else None,
    }


update_cache = function(_update_forward, _update_backward, name="update_cache", differentiable=("cache", "update"))
