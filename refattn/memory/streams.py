"""A long sequence, segment by segment, through recurrent layers and their memories."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from refattn.arrays import device, is_array, namespace, require_array, require_integer, require_one_of
from refattn.memory.compression import compress
from refattn.memory.updates import joined, update_compressed_memory, update_memory

__all__ = ["Step", "stream"]


class Step(NamedTuple):
    """One segment of a stream.

    ``output`` is that of the last layer; ``memories`` holds (memory, compressed) of every layer after the segment;
    ``evicted`` the rows that each layer's memory let go of (for the losses of the compression); ``pullback`` maps the
    cotangent of the output to gradients: ``x`` and ``layers[n].<name>``, within this segment.
    """

    output: Any
    memories: tuple[tuple[Any, Any], ...]
    evicted: tuple[Any, ...]
    pullback: Callable[[Any], dict[str, Any]]


def stream(
    segments: Iterable[Any],
    layers: Sequence[Any],
    *,
    memory_length: int,
    compressed_length: int = 0,
    rate: int | None = None,
    compress: Any = None,
    evict: str = "overflow",
    initial: str = "empty",
    recurrence: str = "own",
    memories: Sequence[tuple[Any, Any]] | None = None,
) -> Iterator[Step]:
    """Walk a long sequence segment by segment through recurrent layers.

    Each layer reads its own memories as they were before the segment, then they take the layer's input.

    Parameters
    ----------
    segments : iterable of arrays (..., q, m)
        In order; any lengths.
    layers : sequence of (function, arguments), or of bound functions
        Such as ``(ra.layers.compressive_layer, {"w_q": ..., ...})`` or what ``ra.layers.bind`` and ``ra.layers.chain``
        make.  A function is given the memories it has arguments for: ``memory``, ``compressed``; one without, such as
        ``feed_forward``, works on x alone.
    memory_length, compressed_length : int
        Rows of the memories of every layer.
    rate : int
        Compression rate; needed with compressed memories.
    compress : callable, or a sequence of callables, one for each layer
        (..., n, m) -> (..., rows, m); default the mean over ``rate`` rows.
    evict : {"overflow", "segment"}
        As for ``update_compressed_memory``; "segment" starts with zeros.
    initial : {"empty", "zeros"}
        Memories before the first segment: none, or zeros, which take part in the softmax (as in some public code).
    recurrence : {"own", "above"}
        "above": before each segment the memories move down one layer, the first layer's to the last, so that a layer reads
        what the next one wrote ("enhanced recurrence" in public code).  All layers need the same width.
    memories : sequence of (memory, compressed), optional
        Go on from the ``memories`` of an earlier step.

    Yields
    ------
    Step
        output, memories, evicted, pullback.

    Raises
    ------
    ValueError
        Lengths, rates and counts that do not fit.
    """
    if is_array(segments) or not isinstance(segments, Iterable):
        raise TypeError(f"segments is a {type(segments).__name__}: expected arrays (..., q, m), one after the other")
    if not isinstance(layers, (list, tuple)):
        raise TypeError(f"layers is a {type(layers).__name__}: expected a list of layers")
    memory_length = require_integer("memory_length", memory_length, minimum=0)
    compressed_length = require_integer("compressed_length", compressed_length, minimum=0)
    require_one_of("initial", initial, ("empty", "zeros"))
    require_one_of("recurrence", recurrence, ("own", "above"))
    if compressed_length and rate is None:
        raise ValueError(f"rate is missing: compressed_length is {compressed_length}")
    compressions = list(compress) if isinstance(compress, (list, tuple)) else [compress] * len(layers)
    if len(compressions) != len(layers):
        raise ValueError(
            f"compress has {len(compressions)} entries: expected one, or one for each of {len(layers)} layers"
        )
    if memories is not None and not isinstance(memories, (list, tuple)):
        raise TypeError(
            f"memories is a {type(memories).__name__}: expected pairs (memory, compressed), one for each layer"
        )
    state = None if memories is None else list(memories)
    for pair in state or ():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise TypeError(f"memories holds a {type(pair).__name__}: expected pairs (memory, compressed)")
    if state is not None and len(state) != len(layers):
        raise ValueError(f"memories has {len(state)} entries: expected one for each of {len(layers)} layers")
    parts = [_parts(layer) for layer in layers]

    def walk() -> Iterator[Step]:
        nonlocal state
        for segment in segments:
            require_array("segments", segment, axes=2)
            x, pulls, after, gone = segment, [], [], []
            if recurrence == "above" and state is not None:
                state = [*state[1:], *state[:1]]
            for n, (layer, arguments) in enumerate(parts):
                memory, compressed = (
                    state[n] if state is not None else _initial(x, memory_length, compressed_length, initial == "zeros")
                )
                own = {"memory": memory, "compressed": compressed}
                takes = getattr(layer, "differentiable", ())
                result, pull = layer.vjp(x, **{name: a for name, a in own.items() if name in takes}, **arguments)
                pulls.append(pull)
                if compressed_length and "compressed" in takes:
                    new = update_compressed_memory.forward(
                        memory, compressed, x, rate=rate, memory_length=memory_length, evict=evict,
                        compressed_length=compressed_length, compress=compressions[n] or _mean_of(rate),
                    )  # fmt: skip
                    after.append((new.memory, new.compressed))
                    gone.append(new.evicted)
                else:
                    rows = joined(memory=memory, hidden=x)
                    after.append((update_memory(memory, x, length=memory_length), compressed))
                    gone.append(rows[..., : max(0, rows.shape[-2] - memory_length), :])
                x = result.output
            state = after
            yield Step(x, tuple(after), tuple(gone), _pullback(pulls))

    return walk()


def _parts(layer: Any) -> tuple[Any, Any]:
    """Function and arguments of one layer."""
    pair = tuple(layer) if isinstance(layer, (tuple, list)) else (layer, {})
    if hasattr(layer, "function"):
        pair = layer.function, layer.arguments
    if len(pair) != 2 or not hasattr(pair[0], "vjp") or not isinstance(pair[1], dict):
        raise TypeError(f"layers holds a {type(layer).__name__}: expected (function, arguments), or what bind makes")
    return pair


def _initial(x: Any, memory_length: int, compressed_length: int, zeros: bool) -> tuple[Any, Any]:
    def rows(count: int) -> Any:
        shape = (*x.shape[:-2], count if zeros else 0, x.shape[-1])
        return namespace(x).zeros(shape, dtype=x.dtype, device=device(x))

    return rows(memory_length), rows(compressed_length)


def _mean_of(rate: int | None) -> Callable[[Any], Any]:
    return lambda old: compress(old, rate=rate)


def _pullback(pulls: list[Callable[[Any], dict[str, Any]]]) -> Callable[[Any], dict[str, Any]]:
    def pullback(output: Any) -> dict[str, Any]:
        gradients: dict[str, Any] = {}
        for n in reversed(range(len(pulls))):
            found = pulls[n](output)
            output = found["x"]
            gradients.update({f"layers[{n}].{name}": g for name, g in found.items() if name not in _CONSTANT})
        return {"x": output, **gradients}

    return pullback


_CONSTANT = ("x", "memory", "compressed")
