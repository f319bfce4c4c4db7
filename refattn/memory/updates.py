"""Memories after a segment: the newest rows, and compressed older ones; no gradient passes."""

from collections.abc import Callable
from typing import Any

from refattn.arrays import (
    broadcast_leading,
    is_array,
    namespace,
    require_axes,
    require_integer,
    require_one_of,
)
from refattn.mechanism import function
from refattn.records import Result

__all__ = ["joined", "update_compressed_memory", "update_memory"]


def joined(**parts: Any) -> Any:
    """Rows (..., n, m) one after the other; None and empty parts are passed over."""
    given = {n: a for n, a in parts.items() if a is not None}
    for name, a in given.items():
        if a.ndim < 2:
            raise ValueError(f"{name} has shape {tuple(a.shape)}: expected (..., rows, m)")
    require_axes(**{n: (a, f"... {n}_rows m") for n, a in given.items()})
    lead = broadcast_leading(**{n: (a, 2) for n, a in given.items()})
    xp = namespace(*given.values())
    rows = [a for a in given.values() if a.shape[-2]] or list(given.values())[:1]
    rows = [xp.broadcast_to(a, (*lead, *a.shape[-2:])) for a in rows]
    return rows[0] if len(rows) == 1 else xp.concat(rows, axis=-2)


def _require_hidden(name: str, hidden: Any) -> None:
    if hidden is None:
        raise TypeError(f"{name}: the argument 'hidden' is missing; the memories before it may be None")


def last(x: Any, count: int) -> Any:
    return x[..., max(0, x.shape[-2] - count) :, :]


def _update_memory_forward(memory: Any = None, hidden: Any = None, *, length: int) -> tuple[Result, Any]:
    """The newest ``length`` rows of [memory, hidden]; no gradient passes.

    Parameters
    ----------
    memory : array (..., n, m), or None for none yet
    hidden : array (..., q, m)
        Input of the layer in this segment.
    length : int
        Rows to keep; fewer are there until so many have been seen.

    Returns
    -------
    output : array (..., min(n + q, length), m)

    Raises
    ------
    ValueError
        Another width, or a negative length.
    """
    _require_hidden("update_memory", hidden)
    length = require_integer("length", length, minimum=0)
    return Result(output=last(joined(memory=memory, hidden=hidden), length)), None


def _update_compressed_forward(
    memory: Any = None,
    compressed: Any = None,
    hidden: Any = None,
    *,
    rate: int,
    memory_length: int,
    compressed_length: int,
    compress: Callable[[Any], Any],
    evict: str = "segment",
) -> tuple[Result, Any]:
    """Both memories after a segment; no gradient passes.

    Parameters
    ----------
    memory, compressed : arrays (..., n, m), each with its own number of rows, or None for none yet
    hidden : array (..., q, m)
        Input of the layer in this segment.
    rate : int
        Rows of memory per compressed row: at least 1, at most ``memory_length``.
    memory_length, compressed_length : int
        Rows to keep of each.
    compress : callable (..., n, m) -> (..., rows, m)
        Given the evicted rows as they are; not called when there are none, or nothing compressed is kept.
    evict : {"segment", "overflow"}
        "segment", the paper's rule: the oldest q rows of a full memory, which therefore starts with ``memory_length``
        zeros and has at least q rows.  "overflow": what does not fit into memory any more, of memory and hidden.

    Returns
    -------
    memory, compressed, evicted : arrays (..., rows, m)

    Raises
    ------
    ValueError
        Another width; a rate of 0 or larger than the memory; under "segment" a segment longer than the memory or a memory
        that is not full; rows from ``compress`` that are none.
    """
    _require_hidden("update_compressed_memory", hidden)
    rate = require_integer("rate", rate, minimum=1)
    memory_length = require_integer("memory_length", memory_length, minimum=0)
    compressed_length = require_integer("compressed_length", compressed_length, minimum=0)
    require_one_of("evict", evict, ("segment", "overflow"))
    if not callable(compress):
        raise TypeError(f"compress is a {type(compress).__name__}: expected a function of rows (..., n, m)")
    if rate > memory_length:
        raise ValueError(f"rate is {rate}: expected at most memory_length = {memory_length}")
    rows = joined(memory=memory, hidden=hidden)
    joined(memory=memory, compressed=compressed, hidden=hidden)  # one width
    n, q = 0 if memory is None else memory.shape[-2], hidden.shape[-2]
    if evict == "segment":
        if q > memory_length:
            raise ValueError(
                f"hidden has {q} rows and memory_length is {memory_length}: evict='segment' takes the oldest {q} rows of"
                " memory, expected at least as many"
            )
        if n != memory_length:
            raise ValueError(
                f"memory has {n} rows and memory_length is {memory_length}: evict='segment' expects a full memory (start"
                " with zeros, or use evict='overflow')"
            )
        gone = q
    else:
        gone = max(0, n + q - memory_length)
    evicted = rows[..., :gone, :]
    new = None
    if gone and compressed_length:
        new = compress(evicted)
        want = f"expected (..., rows, {rows.shape[-1]}) for the evicted rows {tuple(evicted.shape)}"
        if not is_array(new):
            raise TypeError(f"compress returned a {type(new).__name__}: {want}")
        if new.ndim < 2 or new.shape[-1] != rows.shape[-1]:
            raise ValueError(f"compress returned an array of shape {tuple(new.shape)}: {want}")
    if compressed is None and new is None:
        compressed = rows[..., :0, :]
    kept = last(joined(compressed=compressed, new=new), compressed_length)
    return Result(memory=last(rows, memory_length), compressed=kept, evicted=evicted), None


update_memory = function(_update_memory_forward, None, name="update_memory", differentiable=("memory", "hidden"))
update_compressed_memory = function(
    _update_compressed_forward,
    None,
    name="update_compressed_memory",
    differentiable=("memory", "compressed", "hidden"),
    outputs=("memory", "compressed"),
    storage=("memory", "compressed", "evicted"),
)
