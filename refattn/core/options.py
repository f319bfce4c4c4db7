"""The options that the softmax mechanisms share: read and checked against the sizes of a call.

    logits = scale q.k -> score_mod -> softcap -> + bias + ALiBi -> visibility -> sinks -> softmax -> dropout -> . v

``takes`` gives a mechanism's forward their names; ``read`` turns them into :class:`~refattn.records.AttentionSettings`, from
sizes alone, so that costs can be counted without arrays; ``refattn.core.problem`` adds the arrays.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from refattn import patterns
from refattn.arrays import (
    LARGEST,
    broadcast_leading,
    flatten_leading,
    is_array,
    is_bool,
    is_complex,
    is_integer,
    namespace,
    require_array,
    require_finite,
    require_flag,
    require_integer,
    require_number,
    require_one_of,
    require_positive,
    to_numpy,
)
from refattn.core import blocks as cutting
from refattn.core.heads import Heads
from refattn.core.listed import Lists, read_lists
from refattn.core.selections import Span
from refattn.core.terms import Alibi, Among, Bias, Repeats, ScoreMod, SoftCap
from refattn.records import AttentionSettings, Block, Sizes

__all__ = [
    "DIFFERENTIABLE",
    "SHARED",
    "Options",
    "offsets",
    "per_batch",
    "read",
    "read_sizes",
    "require_broadcast",
    "require_mask",
    "takes",
]

SHARED: dict[str, Any] = {
    "mask": None,
    "pattern": None,
    "bias": None,
    "causal": False,
    "align": None,
    "window": None,
    "query_lengths": None,
    "key_lengths": None,
    "query_segments": None,
    "key_segments": None,
    "scale": None,
    "softcap": None,
    "softcap_after_bias": False,
    "alibi_slopes": None,
    "sinks": None,
    "lse_includes_sinks": True,
    "dropout_mask": None,
    "dropout_rate": 0.0,
    "score_mod": None,
    "keep_weights": False,
    "head_map": "repeat",
    "indices": None,
    "block_indices": None,
    "block": None,
    "duplicates": "union",
}
"""Every shared option with its default."""

DIFFERENTIABLE = ("bias", "scale", "softcap", "alibi_slopes", "sinks")
"""Shared options that have a gradient."""

SHARED_DOC = """
    mask : bool array, broadcasts to (..., h, q, k)
        True = may attend.
    pattern : Pattern
        An object of ``refattn.patterns``; joined with everything else by "and".
    bias : array, broadcasts to (..., h, q, k)
        Added to the logits; -inf hides the pair.  Differentiable.
    causal : bool
        Query i sees the keys j <= i + offset.
    align : {"upper_left", "lower_right"}, int or ints per batch
        The offset, where query 0 stands on the key axis, for ``causal``, ``window`` and ALiBi: 0, k - q (of the lengths,
        where these are given), or a number.  Required where q != k or lengths are given and one of the three is used.
    window : (int or None, int or None)
        Keys seen to the left and right of the aligned diagonal, both inclusive; None = unlimited.
    query_lengths, key_lengths : ints per batch
        Positions beyond are padding: never read, output 0, lse -inf, gradient 0.
    query_segments, key_segments : int arrays (..., q), (..., k)
        Only equal ids attend.
    scale : float
        Default d**-0.5.  Differentiable.
    softcap : float
        c tanh(logits / c).  Differentiable.
    softcap_after_bias : bool
        The cap acts on logits + bias + ALiBi.
    alibi_slopes : array (h,)
        Adds -slope |i + offset - j|.  Differentiable.
    sinks : array (h,) or (h, n)
        Logits that take probability and give nothing.  Differentiable.
    lse_includes_sinks : bool
        Whether the returned lse counts them.
    dropout_mask : bool array, broadcasts to (..., h, q, k)
        True = kept.
    dropout_rate : float
        Kept weights are multiplied by 1 / (1 - rate) after the softmax; the lse is that of the undropped weights.
    score_mod : callable (logits, b, h, i, j) -> logits
        Element-wise, on index arrays (b flat over the batch axes); ``score_mod.derivative`` of the same arguments is its
        slope, else complex step.
    keep_weights : bool
        The Result also holds ``weights`` (after dropout) and ``logits``: as they meet visibility, -inf where bias or
        score_mod hides the pair and at queries and keys beyond their lengths; what masks hide keeps its logit.
    head_map : {"repeat", "tile"}
        Query head i uses key head i // (h / g), or i % g.
    indices : int array (..., 1 | g | h, q, n)
        The keys that each query may see; the head axis is always there.  -1 and numbers from k on stand for no key, the order
        means nothing; everything else that hides pairs still does.
    block_indices, block : int array (..., 1 | g | h, q, n), int
        The same in blocks of ``block`` keys: block c holds the keys c block ... (c + 1) block - 1; the last may be short.
    duplicates : {"union", "multiset"}
        A key that is listed twice counts once, or as often as it is listed."""
"""The numpydoc entries of the shared options, for the docstrings of mechanisms."""


def takes(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let ``forward(..., **shared)`` show the named shared options as keywords of its own (all of them without names).

    ``{shared}`` in its docstring becomes their documentation.
    """
    chosen = names or tuple(SHARED)

    def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        extra = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=SHARED[n]) for n in chosen]
        internal = [p for p in named if p.name in ("backend", "algorithm")]
        named = [p for p in named if p not in internal]
        forward.__signature__ = signature.replace(parameters=[*named, *extra, *internal])  # type: ignore[attr-defined]
        if forward.__doc__ and "{shared}" in forward.__doc__:
            entries = _entries(SHARED_DOC)
            text = "\n".join(entry for keys, entry in entries if any(k in chosen for k in keys))
            forward.__doc__ = forward.__doc__.replace("    {shared}", text)
        return forward

    return decorate


def _entries(text: str) -> list[tuple[list[str], str]]:
    """The entries of numpydoc text: the names that each documents, and its lines."""
    entries: list[tuple[list[str], list[str]]] = []
    for line in text.strip("\n").split("\n"):
        if line.startswith("    ") and not line.startswith("     "):
            entries.append(([n.strip() for n in line.split(" : ")[0].split(",")], [line]))
        else:
            entries[-1][1].append(line)
    return [(names, "\n".join(lines)) for names, lines in entries]


def read_sizes(q: Any, k: Any, v: Any) -> Sizes:
    """Sizes of q (..., h, q, d), k (..., g, k, d) and v (..., g, k, e), which must agree."""
    for name, x, axes in (("q", q, "h, q, d"), ("k", k, "g, k, d"), ("v", v, "g, k, e")):
        require_array(name, x)
        if x.ndim < 3:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected at least 3 axes (..., {axes})")
    namespace(q, k, v)
    lead = broadcast_leading(q=(q, 3), k=(k, 3), v=(v, 3))
    (h, n_q, d), (g, n_k, d_k), (g_v, n_v, e) = (tuple(x.shape[-3:]) for x in (q, k, v))
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if d != d_k:
        raise ValueError(f"channels: q has {d} and k has {d_k}: expected the same ({shapes})")
    if n_k != n_v:
        raise ValueError(f"lengths: k has {n_k} positions and v has {n_v}: expected the same ({shapes})")
    if g != g_v:
        raise ValueError(f"heads: k has {g} and v has {g_v}: expected the same ({shapes})")
    if (g == 0 and h != 0) or (g and h % g):
        raise ValueError(f"heads: q has {h} and k has {g}, and {h} is not a multiple of {g} ({shapes})")
    return Sizes(lead=lead, h=h, g=g, q=n_q, k=n_k, d=d, e=e)


@dataclasses.dataclass(frozen=True)
class Options:
    """The shared options of one call as the core takes them, and the way of their gradients back to the caller's shapes."""

    settings: AttentionSettings
    heads: Heads
    keep_weights: bool
    shapes: dict[str, tuple[int, ...]]
    """Of each differentiable option, with the broadcast axes that its gradient still has."""
    lists: Lists | None
    """The keys that are listed for each query."""
    head_axes: dict[str, int]
    """Where the core's gradient of an option has its heads (g, r)."""

    def gradients(self, core: dict[str, Any]) -> dict[str, Any]:
        """Cotangents of the shared options from the core's layout into the caller's; others stay as they are."""
        joined = {n: self.heads.join(g, self.head_axes[n]) if n in self.head_axes else g for n, g in core.items()}
        return {n: namespace(g).reshape(g, self.shapes[n]) if n in self.shapes else g for n, g in joined.items()}


def read(
    sizes: Sizes,
    *,
    xp: Any,
    dtype: Any,
    device: Any = None,
    algorithm: str = "auto",
    extra_pattern: Any = None,
    blocks: Callable[..., Any] | None = None,
    extra_terms: Callable[..., Sequence[Any]] | None = None,
    added_terms: Callable[..., Sequence[Any]] | None = None,
    apart: bool = False,
    extra_keys: int = 0,
    **options: Any,
) -> Options:
    """Check the shared options and say what they mean for attention of these sizes.

    Parameters
    ----------
    sizes : Sizes
        ``k`` counts the extra keys.
    xp, dtype, device
        Library, compute dtype and device of the arrays of the call.
    algorithm : {"auto", "whole", "tiled"}
    extra_pattern : Pattern
        The mechanism's own, joined by "and".
    blocks : callable (visibility, group) -> blocks
        The mechanism's own blocks, given everything else that restricts visibility; without it the core cuts slices.
    extra_terms : callable (heads, lead) -> terms
        Terms that come first; their cotangents stay as they lay them out.
    added_terms : callable (heads, lead) -> terms
        The same, where the bias is added.
    apart : bool
        The blocks of one key head are not those of another.
    extra_keys : int
        The last so many keys are seen by every real row, and of the terms only a soft cap changes their logits.
    **options
        The shared options.
    """
    options = _named(options)
    heads = Heads(sizes.h, sizes.g, options["head_map"])
    others = dataclasses.replace(sizes, k=sizes.k - extra_keys)  # what options speak of
    reader = _Reader(others, heads, xp, dtype, device)
    offset = offsets(sizes.lead, others.q, others.k, options)
    terms = () if extra_terms is None else tuple(extra_terms(heads, sizes.lead))
    terms += reader.terms(options, offset, () if added_terms is None else added_terms(heads, sizes.lead))
    lists = read_lists(options, others, heads.key_head)
    lengths = {n: reader.lengths(n, options[n]) for n in ("query_lengths", "key_lengths")}
    visibility = _visibility(others, offset, lengths, options)
    if extra_pattern is not None and blocks is None:
        fitted = extra_pattern.fit(others.q, others.k, batch=sizes.lead, heads=sizes.h)
        visibility = fitted if visibility is None else visibility & fitted
    if lists is not None:
        if blocks is not None:
            raise TypeError("indices and block_indices are no options of a mechanism that has blocks of its own")
        if extra_keys or algorithm == "whole" or options["keep_weights"]:
            listed = lists.pattern().fit(others.q, others.k, batch=sizes.lead, heads=sizes.h)
            visibility = listed if visibility is None else visibility & listed
            terms += reader.repeats(lists)
        else:
            blocks = lists.blocks(heads.split, xp, device)
    scale = options["scale"]
    settings = AttentionSettings(
        sizes=others,
        heads=heads.numbers,
        scale=_default_scale(sizes.d) if scale is None else reader.number("scale", scale),
        dtype=dtype,
        device=device,
        terms=terms,
        visibility=visibility,
        **lengths,
        sinks=reader.sinks(options["sinks"]),
        lse_includes_sinks=options["lse_includes_sinks"],
        dropout=reader.dropout(options["dropout_mask"], options["dropout_rate"], extra_keys),
        blocks=None if blocks is None else functools.partial(blocks, visibility),
        tile=_tile(algorithm, options["keep_weights"], others),
        apart=apart,
    )
    if extra_keys:
        settings = _with_extra_keys(settings, extra_keys, xp, whole=options["keep_weights"])
    return Options(settings, heads, options["keep_weights"], reader.shapes, lists, reader.head_axes)


def _named(options: dict[str, Any]) -> dict[str, Any]:
    """All shared options, with defaults, their flags as bools."""
    for name in options:
        if name not in SHARED:
            near = difflib.get_close_matches(name, SHARED, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; they are {', '.join(SHARED)}"
            raise TypeError(f"{name!r} is no option of softmax attention{hint}")
    options = {**SHARED, **options}
    for name in ("causal", "softcap_after_bias", "lse_includes_sinks", "keep_weights"):
        options[name] = require_flag(name, options[name])
    require_one_of("head_map", options["head_map"], ("repeat", "tile"))
    options["window"] = _window(options["window"])
    return options


def _default_scale(d: int) -> float:
    return d**-0.5 if d else 1.0


def _tile(algorithm: str, keep: bool, sizes: Sizes) -> tuple[int, int] | None:
    if keep and algorithm == "tiled":
        raise ValueError("keep_weights needs algorithm='whole': the tiled one never holds all weights")
    if keep or algorithm == "whole":
        return max(1, sizes.q), max(1, sizes.k)
    if algorithm == "tiled":  # small enough that short inputs have several tiles too
        rows = min(cutting.ROWS // max(1, sizes.r), -(-sizes.q // 3))
        return max(1, rows), max(1, min(cutting.KEYS, -(-sizes.k // 3)))
    return None


class _Reader:
    """Options of one call in the core's layout; keeps what leads their gradients back."""

    def __init__(self, sizes: Sizes, heads: Heads, xp: Any, dtype: Any, device: Any) -> None:
        self.sizes, self.heads, self.xp, self.dtype, self.device = sizes, heads, xp, dtype, device
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.head_axes: dict[str, int] = {}

    def number(self, name: str, value: Any) -> Any:
        """A finite number, or a 0-d array of one."""
        number = require_finite(name, value)
        if isinstance(number, complex) and not is_complex(self.dtype):
            raise TypeError(f"{name} is {value!r}: expected a real number")
        return self.xp.reshape(value, ()) if is_array(value) else value

    def terms(self, options: dict[str, Any], offset: np.ndarray, own: Sequence[Any]) -> tuple[Any, ...]:
        """What is done to a logit, in order; ``own`` terms of a mechanism stand beside the bias."""
        first: list[Any] = []
        if options["score_mod"] is not None:
            if not callable(options["score_mod"]):
                kind = type(options["score_mod"]).__name__
                raise TypeError(f"score_mod is a {kind}: expected a function (logits, b, h, i, j)")
            first.append(ScoreMod(options["score_mod"]))
        cap = self._cap(options["softcap"])
        added: list[Any] = [*own]
        if options["bias"] is not None:
            added.append(Bias(self.pairs("bias", options["bias"])))
            self.head_axes["bias"] = 1
        if options["alibi_slopes"] is not None:
            added.append(Alibi(self._slopes(options["alibi_slopes"]), offset))
        return (*first, *added, *cap) if options["softcap_after_bias"] else (*first, *cap, *added)

    def _cap(self, value: Any) -> tuple[Any, ...]:
        if value is None:
            return ()
        require_positive("softcap", value)
        value = self.number("softcap", value)
        self.shapes["softcap"] = ()
        if not is_array(value):
            value = self.xp.asarray(value, dtype=self.dtype, device=self.device)
        return (SoftCap(value),)

    def _slopes(self, slopes: Any) -> Any:
        h = self.sizes.h
        require_array("alibi_slopes", slopes)
        if tuple(slopes.shape) != (h,):
            raise ValueError(f"alibi_slopes has shape {tuple(slopes.shape)}: expected ({h},), one per query head")
        self.shapes["alibi_slopes"], self.head_axes["alibi_slopes"] = (h,), 0
        return self.heads.split(slopes, 0)

    def pairs(self, name: str, x: Any, *, extra_keys: int = 0) -> Any:
        """An array that broadcasts to (..., h, q, k), as (b|1, g|1, r|1, q|1, k|1)."""
        xp, lead = self.xp, self.sizes.lead
        require_broadcast(name, x, (*lead, self.sizes.h, self.sizes.q, self.sizes.k + extra_keys))
        full = xp.reshape(x, (1,) * (3 - x.ndim) + tuple(x.shape)) if x.ndim < 3 else x
        flat = flatten_leading(full, 3, lead)
        self.shapes[name] = (*lead, *flat.shape[1:]) if math.prod(full.shape[:-3]) != 1 else tuple(full.shape)
        return self.heads.split(flat)

    def repeats(self, lists: Lists) -> tuple[Any, ...]:
        """The term of keys that count more than once."""
        if not lists.multiset:
            return ()
        logs = self.xp.asarray(np.log(np.maximum(lists.counts(), 1)), dtype=self.dtype, device=self.device)
        return (Repeats(self.heads.split(flatten_leading(logs, 3, self.sizes.lead))),)

    def sinks(self, sinks: Any) -> Any:
        """(g, r, n)."""
        if sinks is None:
            return None
        h = self.sizes.h
        require_array("sinks", sinks)
        if sinks.ndim not in (1, 2) or sinks.shape[0] != h:
            raise ValueError(f"sinks has shape {tuple(sinks.shape)}: expected ({h},) or ({h}, n), per query head")
        self.shapes["sinks"], self.head_axes["sinks"] = tuple(sinks.shape), 0
        return self.heads.split(self.xp.reshape(sinks, (h, 1)) if sinks.ndim == 1 else sinks, 0)

    def dropout(self, mask: Any, rate: Any, extra_keys: int) -> tuple[Any, float] | None:
        """The keep mask over all keys and the factor of what is kept; a mask that leaves the extra keys out drops none of them."""
        rate = require_number("dropout_rate", rate, minimum=0, below=1)
        if mask is None:
            if rate:
                raise ValueError(
                    f"dropout_rate is {rate}, but dropout_mask is missing: the draw is an argument, not made here"
                )
            return None
        if not is_array(mask) or not is_bool(mask.dtype):
            raise TypeError("dropout_mask: expected a bool array, True = kept")
        n_k = self.sizes.k
        everything = bool(extra_keys) and tuple(mask.shape[-1:]) == (n_k + extra_keys,)
        kept = self.pairs("dropout_mask", mask, extra_keys=extra_keys if everything else 0)
        if extra_keys and not everything:
            xp = self.xp
            kept = xp.broadcast_to(kept, (*kept.shape[:-1], n_k))
            ones = xp.ones((*kept.shape[:-1], extra_keys), dtype=xp.bool, device=self.device)
            kept = xp.concat([kept, ones], axis=-1)
        return kept, 1.0 / (1.0 - rate)

    def lengths(self, name: str, lengths: Any) -> np.ndarray | None:
        """Host ints (b,), each between 0 and the number of positions."""
        if lengths is None:
            return None
        most = self.sizes.q if name == "query_lengths" else self.sizes.k
        counts = per_batch(name, lengths, self.sizes.lead)
        if counts.size and (counts.min() < 0 or counts.max() > most):
            raise ValueError(f"{name} is {counts.tolist()}: expected between 0 and {most}")
        return np.broadcast_to(counts, (self.sizes.b,)).copy()


def _with_extra_keys(settings: AttentionSettings, count: int, xp: Any, *, whole: bool) -> AttentionSettings:
    """Settings with ``count`` more keys in blocks of their own, which no pattern and no term but a cap touches.

    ``whole``: the other keys in one block, invisible pairs included.
    """
    sizes = settings.sizes
    rows = settings.tile[0] if settings.tile else max(16, cutting.ROWS // max(1, sizes.r))
    cut = cutting.whole_block if whole else cutting.slice_blocks

    def blocks(group: cutting.Group) -> Iterator[Block]:
        for i0 in range(*group.q, rows):
            queries = Span(i0, min(i0 + rows, group.q[1]))
            for block in cut(settings, dataclasses.replace(group, q=queries.extent), xp):
                yield Block(queries, block.keys, block.visible)
            real_rows = None
            if settings.query_lengths is not None:  # padded queries are not read
                real = np.arange(*queries.extent) < settings.query_lengths[group.b, None, None, None]
                real_rows = functools.partial(xp.asarray, real[..., None], device=settings.device)
            yield Block(queries, Span(sizes.k, sizes.k + count), real_rows)

    return dataclasses.replace(
        settings,
        sizes=dataclasses.replace(sizes, k=sizes.k + count),
        blocks=blocks,
        terms=tuple(t if isinstance(t, SoftCap) else Among(t, sizes.k) for t in settings.terms),
    )


def _window(window: Any) -> tuple[int | None, int | None] | None:
    """(left, right), each a count or None = unlimited; None where neither restricts anything."""
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window is {window!r}: expected (left, right), two counts or None")
    for name, count in zip(("left", "right"), window, strict=True):
        if count is not None:
            require_integer(f"window: {name}", count, minimum=0, maximum=None)
    left, right = (None if x is None else min(int(x), LARGEST) for x in window)  # beyond every array all is seen
    return None if left is None and right is None else (left, right)


def offsets(lead: tuple[int, ...], n_q: int, n_k: int, options: dict[str, Any]) -> np.ndarray:
    """Key position of query 0, host ints (b,) or (1,), from ``align`` and the lengths.

    Raises
    ------
    ValueError
        If causal, window or ALiBi is used with q != k or with lengths, and ``align`` does not say how.
    """
    align = options["align"]
    lengths = {n: options[n] for n in ("query_lengths", "key_lengths") if options[n] is not None}
    used = [n for n in ("causal", "window", "alibi_slopes") if options[n] is not None and options[n] is not False]
    if _window(options["window"]) is None and "window" in used:
        used.remove("window")  # it restricts nothing
    if align is None:
        if used and (n_q != n_k or lengths):
            why = f"there are {n_q} queries and {n_k} keys" if n_q != n_k else f"{' and '.join(lengths)} are given"
            raise ValueError(
                f"align is missing: {' and '.join(used)} with it left out is ambiguous because {why}; say"
                ' align="upper_left" (query 0 at key 0) or align="lower_right" (last query at last key), or an offset'
            )
        return np.zeros(1, np.int64)
    if isinstance(align, str):
        require_one_of("align", align, ("upper_left", "lower_right"))
        if align == "upper_left":
            return np.zeros(1, np.int64)
        ends = [
            np.asarray(default) if options[n] is None else per_batch(n, options[n], lead)
            for n, default in (("key_lengths", n_k), ("query_lengths", n_q))
        ]
        return np.atleast_1d(ends[0] - ends[1])
    return per_batch("align", align, lead)


def per_batch(name: str, value: Any, lead: tuple[int, ...]) -> np.ndarray:
    """Ints per batch as a flat host array (b,) or (1,)."""
    try:
        host = to_numpy(value) if is_array(value) else np.asarray(value)
        if host.dtype == object and all(isinstance(x, int) for x in host.flat):
            raise OverflowError
    except OverflowError:
        raise ValueError(f"{name} is {value}: expected ints of at most {LARGEST}") from None
    except ValueError:
        raise TypeError(f"{name} is {value!r}: expected ints per batch") from None
    if not is_integer(host.dtype) and (is_array(value) or host.shape != (0,)):  # an empty list has no ints to tell by
        raise TypeError(f"{name} is {value!r}: expected ints per batch")
    if host.size and not (int(host.min()) >= -LARGEST and int(host.max()) <= LARGEST):
        raise ValueError(f"{name} is {value}: expected ints of at most {LARGEST}")
    host = host.astype(np.int64)
    batch = math.prod(lead)
    if host.size == 1:
        return host.reshape(1)
    if host.shape != lead and host.size == batch and host.ndim == 1:
        return host
    try:
        return np.broadcast_to(host, lead).reshape(-1)
    except ValueError:
        raise ValueError(f"{name} has shape {host.shape}: expected the batch axes {lead}, or {batch} ints") from None


def _visibility(
    sizes: Sizes, offset: np.ndarray, lengths: dict[str, np.ndarray | None], options: dict[str, Any]
) -> Any:
    """The conjunction of everything that hides pairs, as one fitted Pattern; None where all pairs are visible."""
    parts: list[Any] = []
    place = int(offset[0]) if offset.size == 1 else offset
    if options["causal"]:
        parts.append(patterns.causal(align=place))
    if options["window"] is not None:
        left, right = options["window"]
        parts.append(patterns.window(left, right, align=place))
    if any(counts is not None for counts in lengths.values()):
        parts.append(patterns.lengths(**{n: counts for n, counts in lengths.items() if counts is not None}))
    if options["query_segments"] is not None or options["key_segments"] is not None:
        parts.append(_segments(sizes, options["query_segments"], options["key_segments"]))
    if options["mask"] is not None:
        mask = options["mask"]
        if isinstance(mask, (bool, np.bool_)):
            mask = np.asarray(mask)
        require_mask(mask, (*sizes.lead, sizes.h, sizes.q, sizes.k))
        if mask.ndim < 2:
            mask = namespace(mask).reshape(mask, (1,) * (2 - mask.ndim) + tuple(mask.shape))
        parts.append(patterns.dense(mask))
    if options["pattern"] is not None:
        if not isinstance(options["pattern"], patterns.Pattern):
            raise TypeError(f"pattern is a {type(options['pattern']).__name__}: expected an object of refattn.patterns")
        parts.append(options["pattern"])
    if not parts:
        return None
    return functools.reduce(operator.and_, parts).fit(sizes.q, sizes.k, batch=sizes.lead, heads=sizes.h)


def _segments(sizes: Sizes, query_segments: Any, key_segments: Any) -> Any:
    if query_segments is None or key_segments is None:
        missing = "query_segments" if query_segments is None else "key_segments"
        raise TypeError(f"{missing} is missing: segments are given for queries and keys together")
    for name, ids, length in (("query_segments", query_segments, sizes.q), ("key_segments", key_segments, sizes.k)):
        if not is_array(ids):
            raise TypeError(f"{name} is a {type(ids).__name__}: expected an array of ints (..., {length})")
        if not is_integer(ids.dtype) or ids.ndim < 1 or ids.shape[-1] != length:
            raise TypeError(f"{name} has dtype {ids.dtype} and shape {tuple(ids.shape)}: expected ints (..., {length})")
    return patterns.documents(query_segments, key_segments)


def require_mask(mask: Any, shape: tuple[int, ...]) -> None:
    """Reject a mask that is no bool array, or does not broadcast to ``shape``."""
    if not is_array(mask) or not is_bool(mask.dtype):
        kind = f"has dtype {mask.dtype}" if is_array(mask) else f"is a {type(mask).__name__}"
        raise TypeError(f"mask {kind}: expected a bool array, True = may attend (additive masks go to bias)")
    require_broadcast("mask", mask, shape)


def require_broadcast(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Reject what is no array that broadcasts to ``shape``."""
    if not is_array(x):
        raise TypeError(
            f"{name} is a {type(x).__name__}: expected an array that broadcasts to (..., h, q, k) = {shape}"
        )
    fits = x.ndim <= len(shape) and all(m in (1, n) for m, n in zip(reversed(x.shape), reversed(shape), strict=False))
    if not fits:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: expected one that broadcasts to (..., h, q, k) = {shape}")
