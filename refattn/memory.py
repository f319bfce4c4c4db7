"""Memories across segments: Transformer-XL's cache, the Compressive Transformer's second one, its compressions and losses.

    memory'      = the last rows of [memory, hidden]                                    a constant of the next segment
    compressed'  = the last rows of [compressed, f(the rows that memory lets go of)]

A memory holds rows of a layer's *input*; everything that crosses a segment's edge is a constant (stop-gradient): the
compression f learns from its own losses alone, and these losses train nothing else.

Axes: ... batch, n row of a memory, q position in the segment, m and o model channels, a tap within a span of ``rate`` rows.

Source: Dai et al. 2019, arXiv:1901.02860, section 3.2; Rae et al. 2019, arXiv:1911.05507, section 3, algorithms 1 and 2.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from refattn.arrays import (
    broadcast_leading,
    device,
    is_array,
    namespace,
    real,
    require_axes,
    require_integer,
    require_one_of,
)
from refattn.contraction import einsum
from refattn.mechanism import function
from refattn.normalization import masked_softmax, masked_softmax_backward
from refattn.records import Mutation, Result

__all__ = [
    "Step",
    "attention_reconstruction_loss",
    "auto_encoding_loss",
    "compress",
    "memory_mutations",
    "stream",
    "update_compressed_memory",
    "update_memory",
]


# ---------------------------------------------------------------------- memories


def _joined(**parts: Any) -> Any:
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


def _last(x: Any, count: int) -> Any:
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
    return Result(output=_last(_joined(memory=memory, hidden=hidden), length)), None


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
    if rate > memory_length:
        raise ValueError(f"rate is {rate}: expected at most memory_length = {memory_length}")
    rows = _joined(memory=memory, hidden=hidden)
    _joined(memory=memory, compressed=compressed, hidden=hidden)  # one width
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
    kept = _last(_joined(compressed=compressed, new=new), compressed_length)
    return Result(memory=_last(rows, memory_length), compressed=kept, evicted=evicted), None


def _evicting(
    evicted: Callable[[Any, Any, int], Any], kept: Callable[[Any, Any, int], Any], newest_first: bool = False
) -> Callable[[dict[str, Any]], Result | None]:
    """The update with another choice of the rows that go and of those that stay: functions of (memory, hidden, n)."""

    def forward(a: dict[str, Any]) -> Result | None:
        right = update_compressed_memory.forward(**a)
        memory = a["hidden"][..., :0, :] if a["memory"] is None else a["memory"]
        gone = evicted(memory, a["hidden"], right.evicted.shape[-2])
        new = a["compress"](gone) if gone.shape[-2] and a["compressed_length"] else None
        old = a["compressed"] if a["compressed"] is not None else memory[..., :0, :]
        joined = _joined(new=new, old=old) if newest_first else _joined(old=old, new=new)
        found = Result(
            memory=kept(memory, a["hidden"], a["memory_length"]),
            compressed=_last(joined, a["compressed_length"]),
            evicted=gone,
        )
        xp = namespace(memory)
        same = all(
            x.shape == y.shape and bool(xp.all(x == y))
            for x, y in zip(found.fields.values(), right.fields.values(), strict=True)
        )
        return None if same else found

    return forward


def _right_evicted(memory: Any, hidden: Any, n: int) -> Any:
    return _joined(memory=memory, hidden=hidden)[..., :n, :]


def _right_kept(memory: Any, hidden: Any, n: int) -> Any:
    return _last(_joined(memory=memory, hidden=hidden), n)


memory_mutations = (
    Mutation(
        "eviction_newest",
        "the newest rows of the memory are compressed in place of the oldest",
        _evicting(lambda m, h, n: _last(m, n), _right_kept),
    ),
    Mutation(
        "eviction_of_segment",
        "the segment itself is compressed",
        _evicting(lambda m, h, n: _last(h, n), _right_kept),
    ),
    Mutation(
        "memory_keeps_oldest",
        "the memory keeps its oldest rows and drops the segment",
        _evicting(_right_evicted, lambda m, h, n: _joined(memory=m, hidden=h)[..., :n, :]),
    ),
    Mutation(
        "memory_order",
        "the segment goes in front of the memory",
        _evicting(_right_evicted, lambda m, h, n: _joined(hidden=h, memory=m)[..., :n, :]),
    ),
    Mutation(
        "compressed_order",
        "new compressed rows go in front of the old ones",
        _evicting(_right_evicted, _right_kept, newest_first=True),
    ),
    Mutation(
        "memory_reversed",
        "the memory holds the newest row first",
        _evicting(_right_evicted, lambda m, h, n: namespace(m).flip(_right_kept(m, h, n), axis=-2)),
    ),
)
"""The ways people get ``update_compressed_memory`` wrong."""


def _stop(saved: Any, **cotangents: Any) -> dict[str, Any]:
    """Nothing passes: the gradients are zero."""
    return {}


# ---------------------------------------------------------------------- compressions

METHODS = ("mean", "max", "conv", "dilated_conv", "most_used")


def _compress_forward(
    old: Any,
    *,
    rate: int,
    method: str = "mean",
    weight: Any = None,
    bias: Any = None,
    usage: Any = None,
    dilation: int = 2,
    backend: Any,
) -> tuple[Result, Any]:
    """floor(n / rate) rows in place of n; the n mod rate newest rows are dropped first.

    Parameters
    ----------
    old : array (..., n, m)
        Rows, oldest first.
    rate : int
    method : {"mean", "max", "conv", "dilated_conv", "most_used"}
        "mean", "max": of each span of ``rate`` rows, by channel (ties of max: the gradient goes to the oldest).
        "conv": row c is bias[o] + sum over a, m of weight[o,m,a] old[c rate + a, m].
        "dilated_conv": as "conv", but tap a is read ``(taps - 1 - a) dilation`` rows before the span's last one, so that it
        reaches into earlier spans; rows before the first are zeros.  Any number of taps.  (The paper names a dilated
        convolution and does not say which.)
        "most_used": the rows of the largest usage, in their old order; of equal ones the newer.
    weight : array (o, m, rate)
        Of the convolutions; o = m where the result is to be a memory.
    bias : array (o,), optional
    usage : array (..., n)
        Average attention each row has received; a constant.
    dilation : int
        Of "dilated_conv".

    Returns
    -------
    output : array (..., n // rate, m or o)

    Raises
    ------
    ValueError
        A rate below 1, a weight or usage that is missing, too many or of another shape.
    """
    rate = require_integer("rate", rate, minimum=1)
    require_one_of("method", method, METHODS)
    if old.ndim < 2:
        raise ValueError(f"old has shape {tuple(old.shape)}: expected (..., n, m)")
    convolution = method in ("conv", "dilated_conv")
    for name, a, needed in (("weight", weight, convolution), ("usage", usage, method == "most_used")):
        if needed != (a is not None):
            raise ValueError(
                f"{name} is {'missing' if needed else 'given'}: method={method!r} {'needs' if needed else 'has no'} {name}"
            )
    if bias is not None and not convolution:
        raise ValueError(f"bias is given: method={method!r} has no bias")
    xp = namespace(old)
    *lead, n, m = old.shape
    count = n // rate
    rows = old[..., : count * rate, :]
    spans = xp.reshape(rows, (*lead, count, rate, m))
    if method == "mean":
        return Result(output=xp.sum(spans, axis=-2) / rate), (old, method, rate)
    if method == "max":
        index = xp.argmax(real(spans), axis=-2, keepdims=True)
        chosen = xp.arange(rate)[:, None] == index
        output = xp.sum(xp.where(chosen, spans, xp.zeros_like(spans)), axis=-2)
        return Result(output=output), (old, method, rate, chosen)
    if method == "most_used":
        if tuple(usage.shape[-1:]) != (n,):
            raise ValueError(f"usage has shape {tuple(usage.shape)}: expected (..., {n}), one number per row of old")
        broadcast_leading(old=(old, 2), usage=(usage, 1))
        used = xp.broadcast_to(real(usage)[..., : count * rate], (*lead, count * rate))
        order = backend.top_k(xp.flip(used, axis=-1), count)  # from the end: of equal ones the newer comes first
        kept = xp.sort(count * rate - 1 - order, axis=-1)
        chosen = xp.arange(count * rate) == kept[..., None]  # (..., count, n)
        at = xp.broadcast_to(kept[..., None], (*lead, count, m))
        return Result(output=xp.take_along_axis(rows, at, axis=-2)), (old, method, rate, chosen)
    o, m_w, taps = require_axes(weight=(weight, "o m a")).values()
    if m_w != m or (method == "conv" and taps != rate):
        wanted = f"(o, {m}, {rate if method == 'conv' else 'taps'})"
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: expected {wanted} for old {tuple(old.shape)} at rate {rate}"
        )
    if bias is not None and tuple(bias.shape) != (o,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: expected ({o},), the outputs of weight")
    step = 1 if method == "conv" else require_integer("dilation", dilation, minimum=1)
    read = _taps(rows, count, rate, taps, step)
    output = einsum("...cam,oma->...co", read, weight)
    return Result(output=output if bias is None else output + bias), (old, method, rate, read, weight, taps, step)


def _taps(rows: Any, count: int, rate: int, taps: int, step: int) -> Any:
    """(..., count, taps, m): what every tap of every output row reads."""
    xp = namespace(rows)
    *lead, n, m = rows.shape
    before = (taps - 1) * step
    padded = xp.concat([xp.zeros((*lead, before, m), dtype=rows.dtype, device=device(rows)), rows], axis=-2)
    read = [padded[..., a * step + rate - 1 : a * step + n : rate, :] for a in range(taps)]
    return xp.stack([x[..., :count, :] for x in read], axis=-2)


def _compress_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """Adjoints: spread the mean, send to the maximum, to the kept row, back through the taps."""
    old, method, rate, *rest = saved
    if output is None:
        return {}
    xp = namespace(output)
    *lead, n, m = old.shape
    count = n // rate
    gradients: dict[str, Any] = {}
    if method == "mean":
        d_rows = xp.broadcast_to(output[..., :, None, :] / rate, (*lead, count, rate, m))
    elif method == "max":
        d_rows = xp.where(rest[0], output[..., :, None, :], xp.zeros_like(output[..., :, None, :]))
    elif method == "most_used":
        d_rows = einsum("...cn,...cm->...nm", xp.astype(rest[0], output.dtype), output)
    else:
        read, weight, taps, step = rest
        gradients = {"weight": einsum("...cam,...co->oma", read, output), "bias": einsum("...co->o", output)}
        d_read = einsum("...co,oma->...cam", output, weight)
        before = (taps - 1) * step
        # tap a of row c stands at padded place a step + rate - 1 + c rate: rows of length rate, one filled
        d_rows = xp.zeros((*lead, count * rate, m), dtype=output.dtype, device=device(output))
        for a in range(taps):
            spread = xp.stack([xp.zeros_like(d_read[..., a, :])] * (rate - 1) + [d_read[..., a, :]], axis=-2)
            spread = xp.reshape(spread, (*lead, count * rate, m))
            back = min(before - a * step, count * rate)
            shifted = spread[..., back:, :]
            d_rows = d_rows + xp.concat([shifted, xp.zeros_like(spread[..., :back, :])], axis=-2)
    d_rows = xp.reshape(d_rows, (*lead, count * rate, m))
    left = xp.zeros((*lead, n - count * rate, m), dtype=output.dtype, device=device(output))
    return {"old": xp.concat([d_rows, left], axis=-2), **gradients}


# ---------------------------------------------------------------------- losses


def _distance(difference: Any, norm: str) -> Any:
    """The Euclidean norm of all entries, or their mean square (0 of nothing)."""
    xp = namespace(difference)
    total = xp.sum(difference * difference)
    if norm == "l2":
        return xp.sqrt(total)
    return total / max(1, _entries(difference))


def _distance_backward(difference: Any, norm: str, loss: Any, d: Any) -> Any:
    """Cotangent of the difference; the norm has gradient 0 where it is 0."""
    if norm == "mse":
        return difference * (2.0 * d / max(1, _entries(difference)))
    xp = namespace(difference)
    zero = real(loss) == 0
    return difference * xp.where(zero, xp.zeros_like(loss), d / xp.where(zero, xp.ones_like(loss), loss))


def _entries(x: Any) -> int:
    count = 1
    for n in x.shape:
        count *= n
    return count


def _reconstruction_forward(
    hidden: Any,
    old: Any,
    compressed: Any,
    *,
    w_q: Any,
    w_k: Any,
    w_v: Any,
    norm: str = "l2",
    scale: float | None = None,
) -> tuple[Result, Any]:
    """How much attention changes when it reads the compressed rows in place of the old ones.

    loss = ||attention(hidden, old) - attention(hidden, compressed)||, by content alone: no positions, no causal mask, no
    mixing with the segment.  The gradient goes to ``compressed`` alone, and from there into the compression.

    Parameters
    ----------
    hidden : array (..., q, m)
    old : array (..., n, m)
    compressed : array (..., c, m)
    w_q, w_k, w_v : arrays (m, h, d), (m, h, d), (m, h, e)
    norm : {"l2", "mse"}
        The Euclidean norm over all entries (the paper's; its gradient at 0 is 0), or the mean square (public code).
    scale : float
        Of the logits; default d**-0.5.  (The paper's algorithm writes none; code uses it.)

    Returns
    -------
    output : 0-d array

    Raises
    ------
    ValueError
        Shapes that disagree.
    """
    require_one_of("norm", norm, ("l2", "mse"))
    for name, a in (("hidden", hidden), ("old", old), ("compressed", compressed)):
        if a.ndim < 2:
            raise ValueError(f"{name} has shape {tuple(a.shape)}: expected (..., rows, m)")
    sizes = require_axes(
        hidden=(hidden, "... q m"), old=(old, "... n m"), compressed=(compressed, "... c m"),
        w_q=(w_q, "m h d"), w_k=(w_k, "m h d"), w_v=(w_v, "m h e"),
    )  # fmt: skip
    scale = (sizes["d"] ** -0.5 if sizes["d"] else 1.0) if scale is None else scale
    q = einsum("...qm,mhd->...hqd", hidden, w_q) * scale

    def attend(rows: Any) -> tuple[Any, Any, Any, Any]:
        k, v = einsum("...nm,mhd->...hnd", rows, w_k), einsum("...nm,mhe->...hne", rows, w_v)
        weights, _ = masked_softmax(einsum("...hqd,...hnd->...hqn", q, k))
        return einsum("...hqn,...hne->...hqe", weights, v), weights, k, v

    want, (got, weights, _, v) = attend(old)[0], attend(compressed)
    difference = got - want
    loss = _distance(difference, norm)
    return Result(output=loss), (q, weights, v, w_k, w_v, difference, norm, loss)


def _reconstruction_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """Softmax attention backwards, to its keys and values alone: d compressed = dk w_k^T + dv w_v^T."""
    q, weights, v, w_k, w_v, difference, norm, loss = saved
    if output is None:
        return {}
    d_out = _distance_backward(difference, norm, loss, output)
    d_v = einsum("...hqn,...hqe->...hne", weights, d_out)
    d_logits = masked_softmax_backward(weights, einsum("...hqe,...hne->...hqn", d_out, v))
    d_k = einsum("...hqn,...hqd->...hnd", d_logits, q)
    return {"compressed": einsum("...hnd,mhd->...nm", d_k, w_k) + einsum("...hne,mhe->...nm", d_v, w_v)}


def _auto_encoding_forward(
    old: Any, compressed: Any, *, weight: Any, bias: Any = None, norm: str = "l2"
) -> tuple[Result, Any]:
    """How well a linear decoder rebuilds the old rows from the compressed ones: ||old - decoded||.

    decoded[c rate + a, o] = sum over m of compressed[c, m] weight[m, o, a] + bias[o].  ``old`` is a constant.

    Parameters
    ----------
    old : array (..., n, o)
        The rows after the last whole span are left out of account.
    compressed : array (..., c, m)
    weight : array (m, o, rate)
    bias : array (o,), optional
    norm : {"l2", "mse"}

    Returns
    -------
    output : 0-d array

    Raises
    ------
    ValueError
        Shapes that disagree: more compressed rows than old ones can have given.
    """
    require_one_of("norm", norm, ("l2", "mse"))
    for name, a in (("old", old), ("compressed", compressed)):
        if a.ndim < 2:
            raise ValueError(f"{name} has shape {tuple(a.shape)}: expected (..., rows, channels)")
    sizes = require_axes(old=(old, "... n o"), compressed=(compressed, "... c m"), weight=(weight, "m o a"))
    if bias is not None:
        require_axes(sizes, bias=(bias, "o"))
    n, c, rate = sizes["n"], sizes["c"], sizes["a"]
    if c != (n // rate if rate else 0):
        raise ValueError(
            f"compressed has {c} rows: expected {n // rate if rate else 0}, one for each {rate} of the {n} rows of old"
        )
    xp = namespace(compressed)
    decoded = einsum("...cm,moa->...cao", compressed, weight)
    decoded = decoded if bias is None else decoded + bias
    spans = xp.reshape(old[..., : c * rate, :], (*old.shape[:-2], c, rate, old.shape[-1]))
    difference = decoded - spans
    loss = _distance(difference, norm)
    return Result(output=loss), (compressed, weight, difference, norm, loss)


def _auto_encoding_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    compressed, weight, difference, norm, loss = saved
    if output is None:
        return {}
    d = _distance_backward(difference, norm, loss, output)
    return {
        "compressed": einsum("...cao,moa->...cm", d, weight),
        "weight": einsum("...cao,...cm->moa", d, compressed),
        "bias": einsum("...cao->o", d),
    }


# ---------------------------------------------------------------------- streams


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
    state = None if memories is None else list(memories)
    if state is not None and len(state) != len(layers):
        raise ValueError(f"memories has {len(state)} entries: expected one for each of {len(layers)} layers")
    return _walk(
        segments,
        [_parts(layer) for layer in layers],
        memory_length,
        compressed_length,
        rate,
        compressions,
        evict,
        initial == "zeros",
        recurrence == "above",
        state,
    )


def _walk(
    segments: Iterable[Any],
    layers: list[tuple[Any, Any]],
    memory_length: int,
    compressed_length: int,
    rate: int | None,
    compressions: list[Any],
    evict: str,
    zeros: bool,
    above: bool,
    state: list[tuple[Any, Any]] | None,
) -> Iterator[Step]:
    for segment in segments:
        x, pulls, after, gone = segment, [], [], []
        if above and state is not None:
            state = [*state[1:], *state[:1]]
        for n, (layer, arguments) in enumerate(layers):
            memory, compressed = state[n] if state is not None else _initial(x, memory_length, compressed_length, zeros)
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
                rows = _joined(memory=memory, hidden=x)
                after.append((update_memory(memory, x, length=memory_length), compressed))
                gone.append(rows[..., : max(0, rows.shape[-2] - memory_length), :])
            x = result.output
        state = after
        yield Step(x, tuple(after), tuple(gone), _pullback(pulls))


def _parts(layer: Any) -> tuple[Any, Any]:
    """Function and arguments of one layer."""
    if isinstance(layer, (tuple, list)):
        return layer[0], layer[1]
    return (layer.function, layer.arguments) if hasattr(layer, "function") else (layer, {})


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

update_memory = function(_update_memory_forward, _stop, name="update_memory", differentiable=("memory", "hidden"))
update_compressed_memory = function(
    _update_compressed_forward,
    _stop,
    name="update_compressed_memory",
    differentiable=("memory", "compressed", "hidden"),
    outputs=("memory", "compressed"),
    storage=("memory", "compressed", "evicted"),
)
compress = function(
    _compress_forward,
    _compress_backward,
    name="compress",
    differentiable=("old", "weight", "bias"),
    floating=("usage",),
    primary=("old",),
)
attention_reconstruction_loss = function(
    _reconstruction_forward,
    _reconstruction_backward,
    name="attention_reconstruction_loss",
    differentiable=("compressed",),
    floating=("hidden", "old", "w_q", "w_k", "w_v", "scale"),
)
auto_encoding_loss = function(
    _auto_encoding_forward,
    _auto_encoding_backward,
    name="auto_encoding_loss",
    differentiable=("compressed", "weight", "bias"),
    floating=("old",),
)
