"""The options that the softmax mechanisms share: checked, and turned into a problem for the core and back.

    logits = scale q.k -> score_mod -> softcap -> + bias + ALiBi -> visibility -> sinks -> softmax -> dropout -> . v

``takes`` gives a mechanism's forward their names, ``prepare`` builds the :class:`~refattn.records.AttentionProblem`,
and the :class:`Prepared` it returns lays results and gradients out as the caller's arrays are.
"""

import dataclasses
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from refattn import patterns
from refattn.arrays import (
    broadcast_leading,
    device,
    flatten_leading,
    is_array,
    is_bool,
    is_integer,
    namespace,
    require_array,
    require_finite,
    require_flag,
    require_one_of,
    require_positive,
    to_namespace,
    to_numpy,
)
from refattn.core import attend
from refattn.core import terms as scores
from refattn.core.selections import Span
from refattn.records import AttentionProblem, Block, Result

__all__ = [
    "DIFFERENTIABLE",
    "SHARED",
    "Prepared",
    "offsets",
    "per_batch",
    "prepare",
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
        The Result also holds ``weights`` (after dropout) and ``logits`` (as they meet visibility).
    head_map : {"repeat", "tile"}
        Query head i uses key head i // (h / g), or i % g."""
"""The numpydoc entries of the shared options, for the docstrings of mechanisms."""


def takes(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let ``forward(..., **shared)`` show the named shared options as keywords of its own (all of them without names).

    ``{shared}`` in its docstring becomes their documentation.
    """
    chosen = names or tuple(SHARED)

    def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        extra = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=SHARED[n]) for n in chosen]
        internal = [p for p in own if p.name in ("backend", "algorithm")]
        own = [p for p in own if p not in internal]
        forward.__signature__ = signature.replace(parameters=[*own, *extra, *internal])  # type: ignore[attr-defined]
        if forward.__doc__ and "{shared}" in forward.__doc__:
            entries = _entries(SHARED_DOC)
            text = "\n".join(entry for keys, entry in entries if any(k in chosen for k in keys))
            forward.__doc__ = forward.__doc__.replace("    {shared}", text)
        return forward

    return decorate


def _entries(text: str) -> list[tuple[list[str], str]]:
    found: list[tuple[list[str], list[str]]] = []
    for line in text.strip("\n").split("\n"):
        if line.startswith("    ") and not line.startswith("     "):
            found.append(([n.strip() for n in line.split(" : ")[0].split(",")], [line]))
        else:
            found[-1][1].append(line)
    return [(names, "\n".join(lines)) for names, lines in found]


class Prepared:
    """A problem in the core's layout, and the way back to the caller's."""

    def __init__(self, problem: AttentionProblem, backend: Any, shape: dict[str, Any], layout: "_Heads") -> None:
        self.problem, self.backend, self.shape, self.layout = problem, backend, shape, layout
        self.given: dict[str, Any] = {}

    def run(self, *, keep: bool = False) -> tuple[Result, Any]:
        """Result with output (..., h, q, e), lse (..., h, q) (and logits, weights), and what ``gradients`` needs."""
        kernel = self.backend if self.backend.fused else None
        if kernel is not None:
            if keep:
                raise ValueError(f"backend {kernel.name!r} does not serve this call: it keeps no weights")
            ok, reason = kernel.serves(self.problem)
            if not ok:
                raise ValueError(f"backend {kernel.name!r} does not serve this call: {reason}")
            done = attend.finish(self.problem, kernel, *kernel.forward(self.problem))
        else:
            done = attend.forward(self.problem, self.backend, keep=keep)
        lse = done.lse if self.problem.lse_includes_sinks else done.lse_keys
        fields = {"output": self._out(done.output, 2), "lse": self._out(lse, 1)}
        if keep:
            fields.update(weights=self._out(done.weights, 2), logits=self._out(done.logits, 2))
        return Result(**fields), done

    def gradients(self, saved: Any, output: Any, lse: Any) -> dict[str, Any]:
        """Cotangents of q, k, v and the shared options from those of output and lse."""
        kernel = self.backend
        if kernel.fused:  # no fused kernel has a backward of its own yet: the recomputation needs only output and lse
            from refattn import backends

            kernel = backends.resolve("numpy" if kernel.xp is np else "array_api", kernel.xp)
        flat_o = None if output is None else self.layout.split(flatten_leading(output, 3, self.shape["lead"]))
        flat_l = None if lse is None else self.layout.split(flatten_leading(lse, 2, self.shape["lead"]))
        found = attend.backward(self.problem, kernel, saved, flat_o, flat_l)
        own = {"q": self._out(found.pop("q"), 2), "k": self._keys(found.pop("k")), "v": self._keys(found.pop("v"))}
        return {**own, **self.shared_gradients(found)}

    def shared_gradients(self, found: dict[str, Any]) -> dict[str, Any]:
        """Cotangents of the shared options from the core's layout into the caller's; others stay as they are."""
        given = {n: self.layout.join(g, self.given[n]) for n, g in found.items() if n in self.given}
        return {**found, **{n: namespace(g).reshape(g, self.shape[n]) for n, g in given.items()}}

    def _out(self, x: Any, tail: int) -> Any:
        """(b, g, r, q, ...) -> (..., h, q, ...)."""
        x = self.layout.join(x, 1)
        return namespace(x).reshape(x, (*self.shape["lead"], *x.shape[1:]))

    def _keys(self, x: Any) -> Any:
        """(b|1, g, k, .) -> (..., g, k, .), still to be summed over broadcast axes."""
        lead = self.shape["lead"] if x.shape[0] != 1 else (1,) * len(self.shape["lead"])
        return namespace(x).reshape(x, (*lead, *x.shape[1:]))


class _Heads:
    """Query heads h <-> (g, r): the r query heads of each of the g key heads."""

    def __init__(self, h: int, g: int, head_map: str) -> None:
        self.h, self.g, self.r, self.tile = h, g, h // g if g else 0, head_map == "tile"
        numbers = np.arange(h)
        self.numbers = numbers.reshape(self.r, g).T if self.tile else numbers.reshape(g, self.r)

    def split(self, x: Any, axis: int = 1) -> Any:
        """Axis of h (or 1) into (g, r) (or (1, 1))."""
        xp = namespace(x)
        before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
        if size == 1 and self.h != 1:
            return xp.reshape(x, (*before, 1, 1, *after))
        if not self.tile:
            return xp.reshape(x, (*before, self.g, self.r, *after))
        x = xp.reshape(x, (*before, self.r, self.g, *after))
        order = list(range(x.ndim))
        order[axis], order[axis + 1] = axis + 1, axis
        return xp.permute_dims(x, tuple(order))

    def join(self, x: Any, axis: int) -> Any:
        """(g, r) at ``axis`` back into one axis in the caller's order."""
        xp = namespace(x)
        if self.tile and x.shape[axis] * x.shape[axis + 1] == self.h:
            order = list(range(x.ndim))
            order[axis], order[axis + 1] = axis + 1, axis
            x = xp.permute_dims(x, tuple(order))
        return xp.reshape(x, (*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :]))


def prepare(
    q: Any,
    k: Any,
    v: Any,
    *,
    backend: Any,
    algorithm: str = "auto",
    extra_pattern: Any = None,
    blocks: Callable[..., Any] | None = None,
    extra_terms: Callable[..., Sequence[Any]] | None = None,
    apart: bool = False,
    extra_keys: int = 0,
    **options: Any,
) -> Prepared:
    """Check q (..., h, q, d), k (..., g, k, d), v (..., g, k, e) and the shared options; build the problem.

    ``extra_pattern`` is the mechanism's own, joined by "and".  ``blocks(visibility, group)`` lists the mechanism's own
    blocks, given everything else that restricts visibility; without it the core cuts slices.  ``extra_terms(layout, lead)``
    gives score terms that come first; what they add up stands in ``Prepared.gradients`` as they laid it out.
    ``apart``: the blocks of one key head are not those of another.
    The last ``extra_keys`` keys are seen by every real row, and of the terms only a soft cap changes their logits.
    """
    for name in options:
        if name not in SHARED:
            near = difflib.get_close_matches(name, SHARED, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; they are {', '.join(SHARED)}"
            raise TypeError(f"{name!r} is no option of softmax attention{hint}")
    options = {**SHARED, **options}
    for name in ("causal", "softcap_after_bias", "lse_includes_sinks", "keep_weights"):
        options[name] = require_flag(name, options[name])
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_array(name, x)
    xp = namespace(q, k, v)
    for name, x, axes in (("q", q, "h q d"), ("k", k, "g k d"), ("v", v, "g k e")):
        if x.ndim < 3:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: expected at least 3 axes (..., {axes.replace(' ', ', ')})"
            )
    lead = broadcast_leading(q=(q, 3), k=(k, 3), v=(v, 3))
    (h, n_q, d), (g, n_k, d_k), (g_v, n_v) = q.shape[-3:], k.shape[-3:], v.shape[-3:-1]
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if d != d_k:
        raise ValueError(f"channels: q has {d} and k has {d_k}: expected the same ({shapes})")
    if n_k != n_v:
        raise ValueError(f"lengths: k has {n_k} positions and v has {n_v}: expected the same ({shapes})")
    if g != g_v:
        raise ValueError(f"heads: k has {g} and v has {g_v}: expected the same ({shapes})")
    if (g == 0 and h != 0) or (g and h % g):
        raise ValueError(f"heads: q has {h} and k has {g}, and {h} is not a multiple of {g} ({shapes})")
    n_k -= extra_keys
    require_one_of("head_map", options["head_map"], ("repeat", "tile"))
    layout = _Heads(h, g, options["head_map"])
    shape: dict[str, Any] = {"lead": lead}
    batch = math.prod(lead)

    scale = options["scale"]
    if scale is None:
        scale = d**-0.5 if d else 1.0
    else:
        require_finite("scale", scale)

    def spread(name: str, x: Any) -> Any:
        """A (..., h, q, k)-like array as (b|1, g|1, r|1, q|1, k|1)."""
        every = name == "dropout_mask" and is_array(x) and tuple(x.shape[-1:]) == (n_k + extra_keys,)
        require_broadcast(name, x, (*lead, h, n_q, n_k + extra_keys if every else n_k))
        full = xp.reshape(x, (1,) * (3 - x.ndim) + tuple(x.shape)) if x.ndim < 3 else x
        own = full.shape[:-3]
        flat = flatten_leading(full, 3, lead)
        shape[name] = (*lead, *flat.shape[1:]) if math.prod(own) != 1 else tuple(full.shape)
        return layout.split(flat)

    terms: list[Any] = [] if extra_terms is None else list(extra_terms(layout, lead))
    given: dict[str, int] = {}
    offset = offsets(lead, n_q, n_k, options)
    if options["score_mod"] is not None:
        if not callable(options["score_mod"]):
            raise TypeError(
                f"score_mod is a {type(options['score_mod']).__name__}: expected a function (logits, b, h, i, j)"
            )
        terms.append(scores.ScoreMod(options["score_mod"]))
    cap = options["softcap"]
    if cap is not None:
        require_positive("softcap", cap)
        cap = scores.SoftCap(
            xp.asarray(cap, dtype=q.dtype, device=device(q)) if not is_array(cap) else xp.reshape(cap, ())
        )
        shape["softcap"] = ()
    added: list[Any] = []
    if options["bias"] is not None:
        added.append(scores.Bias(spread("bias", options["bias"])))
        given["bias"] = 1
    if options["alibi_slopes"] is not None:
        slopes = options["alibi_slopes"]
        require_array("alibi_slopes", slopes)
        if tuple(slopes.shape) != (h,):
            raise ValueError(f"alibi_slopes has shape {tuple(slopes.shape)}: expected ({h},), one per query head")
        added.append(scores.Alibi(layout.split(slopes, 0), offset))
        shape["alibi_slopes"], given["alibi_slopes"] = (h,), 0
    if cap is None:
        terms += added
    else:
        terms += [*added, cap] if options["softcap_after_bias"] else [cap, *added]

    visibility, rows = _visibility(q, lead, h, n_q, n_k, offset, options)
    if extra_pattern is not None and blocks is None:
        fitted = extra_pattern.fit(n_q, n_k, batch=lead, heads=h)
        visibility = fitted if visibility is None else visibility & fitted
    own_blocks = None
    if blocks is not None:
        restricting = visibility

        def own_blocks(group: Any) -> Any:
            return blocks(restricting, group)

    sinks = options["sinks"]
    if sinks is not None:
        require_array("sinks", sinks)
        if sinks.ndim not in (1, 2) or sinks.shape[0] != h:
            raise ValueError(f"sinks has shape {tuple(sinks.shape)}: expected ({h},) or ({h}, n), per query head")
        shape["sinks"], given["sinks"] = tuple(sinks.shape), 0
        sinks = layout.split(xp.reshape(sinks, (h, 1)) if sinks.ndim == 1 else sinks, 0)

    dropout = _dropout(options, spread)
    if dropout is not None and extra_keys and dropout[0].shape[-1] != n_k + extra_keys:
        kept, factor = dropout  # a mask over the k keys drops no others
        kept = xp.broadcast_to(kept, (*kept.shape[:-1], n_k))
        others = xp.ones((*kept.shape[:-1], extra_keys), dtype=xp.bool, device=device(q))
        dropout = xp.concat([kept, others], axis=-1), factor

    flat_q = layout.split(flatten_leading(q, 3, lead))
    if flat_q.shape[0] != batch:  # the queries are shared by a batch that only the keys have
        flat_q = xp.broadcast_to(flat_q, (batch, *flat_q.shape[1:]))
    problem = AttentionProblem(
        q=flat_q,
        k=flatten_leading(k, 3, lead),
        v=flatten_leading(v, 3, lead),
        scale=scale if not is_array(scale) else xp.reshape(scale, ()),
        heads=layout.numbers,
        terms=tuple(terms),
        visibility=visibility,
        blocks=own_blocks,
        sinks=sinks,
        lse_includes_sinks=options["lse_includes_sinks"],
        dropout=dropout,
        rows=rows,
        tile=_tile(algorithm, options["keep_weights"], layout.r, n_q, n_k),
        apart=apart,
    )
    if extra_keys:
        problem = _with_extra_keys(problem, extra_keys, xp, whole=options["keep_weights"])
    prepared = Prepared(problem, backend, shape, layout)
    prepared.given = given
    return prepared


def _with_extra_keys(problem: AttentionProblem, count: int, xp: Any, *, whole: bool) -> AttentionProblem:
    """The problem with its last ``count`` keys in blocks of their own, which no pattern and no term but a cap touches.

    ``whole``: the other keys in one block, invisible pairs included.
    """
    n_k = problem.k.shape[-2] - count
    inner = dataclasses.replace(problem, k=problem.k[..., :n_k, :])
    rows = problem.tile[0] if problem.tile else max(16, attend.ROWS // max(1, problem.q.shape[2]))

    cut = attend.whole_block if whole else attend.slice_blocks

    def blocks(group: attend.Group) -> Iterator[Block]:
        for i0 in range(*group.q, rows):
            queries = Span(i0, min(i0 + rows, group.q[1]))
            for block in cut(inner, dataclasses.replace(group, q=queries.extent), xp):
                yield Block(queries, block.keys, block.visible)
            real_rows = None
            if problem.rows is not None:  # padded queries are not read
                real = np.arange(*queries.extent) < np.asarray(problem.rows)[group.b][:, None, None, None]
                real_rows = functools.partial(to_namespace, real[..., None], xp, like=problem.q)
            yield Block(queries, Span(n_k, n_k + count), real_rows)

    terms = tuple(t if isinstance(t, scores.SoftCap) else scores.Among(t, n_k) for t in problem.terms)
    return dataclasses.replace(problem, blocks=blocks, terms=terms)


def _tile(algorithm: str, keep: bool, r: int, n_q: int, n_k: int) -> tuple[int, int] | None:
    if keep and algorithm == "tiled":
        raise ValueError("keep_weights needs algorithm='whole': the tiled one never holds all weights")
    if keep or algorithm == "whole":
        return max(1, n_q), max(1, n_k)
    if algorithm == "tiled":  # small enough that short inputs have several tiles too
        return max(1, min(attend.ROWS // max(1, r), -(-n_q // 3))), max(1, min(attend.KEYS, -(-n_k // 3)))
    return None


def offsets(lead: tuple[int, ...], n_q: int, n_k: int, options: dict[str, Any]) -> np.ndarray:
    """Key position of query 0, host ints (b,) or (1,), from ``align`` and the lengths.

    Raises
    ------
    ValueError
        If causal, window or ALiBi is used with q != k or with lengths, and ``align`` does not say how.
    """
    align = options["align"]
    lengths = {n: options[n] for n in ("query_lengths", "key_lengths") if options[n] is not None}
    window = options["window"]
    used = [n for n in ("causal", "window", "alibi_slopes") if options[n] is not None and options[n] is not False]
    if window is not None and (not isinstance(window, (tuple, list)) or len(window) != 2):
        raise TypeError(f"window is {window!r}: expected (left, right), two counts or None")
    if window is not None and window[0] is None and window[1] is None:
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
    host = to_numpy(value) if is_array(value) else np.asarray(value)
    if not is_integer(host.dtype):
        raise TypeError(f"{name} is {value!r}: expected ints per batch")
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
    q: Any, lead: tuple[int, ...], h: int, n_q: int, n_k: int, offset: np.ndarray, options: dict[str, Any]
) -> tuple[Any, Any]:
    """The conjunction of everything that hides pairs, as one fitted Pattern (None: all visible), and real rows per batch."""
    parts = []
    rows = None
    place = int(offset[0]) if offset.size == 1 else offset
    if options["causal"]:
        parts.append(patterns.causal(align=place))
    if options["window"] is not None and tuple(options["window"]) != (None, None):
        left, right = options["window"]
        parts.append(patterns.window(left, right, align=place))
    if options["query_lengths"] is not None or options["key_lengths"] is not None:
        own = {}
        for name, most in (("query_lengths", n_q), ("key_lengths", n_k)):
            if options[name] is not None:
                counts = per_batch(name, options[name], lead)
                if counts.size and (counts.min() < 0 or counts.max() > most):
                    raise ValueError(f"{name} is {counts.tolist()}: expected between 0 and {most}")
                own[name] = counts
        rows = own.get("query_lengths")
        rows = None if rows is None else np.broadcast_to(rows, (math.prod(lead),)).copy()
        parts.append(patterns.lengths(**own))
    if (options["query_segments"] is None) != (options["key_segments"] is None):
        missing = "query_segments" if options["query_segments"] is None else "key_segments"
        raise TypeError(f"{missing} is missing: segments are given for queries and keys together")
    if options["query_segments"] is not None:
        for name, length in (("query_segments", n_q), ("key_segments", n_k)):
            ids = options[name]
            if not is_array(ids) or not is_integer(ids.dtype) or ids.ndim < 1 or ids.shape[-1] != length:
                found = (
                    f"has dtype {ids.dtype} and shape {tuple(ids.shape)}"
                    if is_array(ids)
                    else f"is a {type(ids).__name__}"
                )
                raise TypeError(f"{name} {found}: expected ints (..., {length})")
        parts.append(patterns.documents(options["query_segments"], options["key_segments"]))
    if options["mask"] is not None:
        mask = options["mask"]
        if isinstance(mask, (bool, np.bool_)):
            mask = np.asarray(mask)
        require_mask(mask, (*lead, h, n_q, n_k))
        xp = namespace(mask)
        parts.append(
            patterns.dense(xp.reshape(mask, (1,) * (2 - mask.ndim) + tuple(mask.shape)) if mask.ndim < 2 else mask)
        )
    if options["pattern"] is not None:
        if not isinstance(options["pattern"], patterns.Pattern):
            raise TypeError(f"pattern is a {type(options['pattern']).__name__}: expected an object of refattn.patterns")
        parts.append(options["pattern"])
    if not parts:
        return None, rows
    whole = parts[0]
    for part in parts[1:]:
        whole = whole & part
    return whole.fit(n_q, n_k, batch=lead, heads=h), rows


def _dropout(options: dict[str, Any], spread: Callable[[str, Any], Any]) -> tuple[Any, float] | None:
    mask, rate = options["dropout_mask"], options["dropout_rate"]
    if not (isinstance(rate, (int, float, np.floating)) and 0 <= rate < 1):
        raise ValueError(f"dropout_rate is {rate!r}: expected a number in [0, 1)")
    if mask is None:
        if rate:
            raise ValueError(
                f"dropout_rate is {rate}, but dropout_mask is missing: the draw is an argument, not made here"
            )
        return None
    if not is_array(mask) or not is_bool(mask.dtype):
        raise TypeError("dropout_mask: expected a bool array, True = kept")
    return spread("dropout_mask", mask), 1.0 / (1.0 - float(rate))


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
