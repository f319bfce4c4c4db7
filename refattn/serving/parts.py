"""Split and ring forms: keys in parts, each attended to by itself, joined by their log-sum-exps.

    L = ln sum_n exp(L_n)      O = sum_n exp(L_n - L) O_n
    dO_n = exp(L_n - L) dO     dL_n = exp(L_n - L) (dO . (O_n - O) + dL)

A part is a plain call of the mechanism on some queries and some keys.  What speaks of positions (causal, windows, lengths, segments,
patterns, masks) is one pattern over the whole call, looked up at the part's positions; sinks join at the end, once.
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from refattn.arrays import broadcast_leading, device, flatten_leading, is_array, namespace, require_integer, to_numpy
from refattn.contraction import einsum
from refattn.core import options as shared
from refattn.core.options import read_sizes
from refattn.mechanism import Mechanism
from refattn.normalization import masked_softmax, merge, merge_backward
from refattn.patterns import Pattern
from refattn.records import Counts, Result, Sizes
from refattn.serving.dealing import positions
from refattn.serving.forms import Form, make, named
from refattn.serving.sequences import how

__all__ = ["ring", "split"]

_QUERIES = {"scaled_dot_product_attention": ("q",), "mla_attention": ("q_nope", "q_rope")}
_KEYS = {"scaled_dot_product_attention": ("k", "v"), "mla_attention": ("latent", "k_rope")}
"""Arrays over positions, which is their last axis but one."""

_PLACED = (
    *("mask", "pattern", "causal", "align", "window", "query_lengths", "key_lengths", "query_segments", "key_segments"),
)
"""Options that say which pairs are visible."""

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def split(mechanism: Any) -> Form:
    """The mechanism with its keys in parts, each by itself, and the parts merged (decode with split keys).

    ``splits`` is a number of parts, or the boundaries between them, as in ``splits=(2, 2, 5)``: parts 0 ... 1, none, 2 ... 4 and 5 on.
    The Result also holds part_outputs (n, ...) and part_lses (n, ...), without sinks.

    Parameters
    ----------
    mechanism : str or Mechanism
        Softmax attention over plain arrays: scaled_dot_product_attention, mla_attention.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = (np.random.default_rng(0).standard_normal((2, 5, 4)) for _ in range(3))
    >>> split("scaled_dot_product_attention").forward(q, k, v, splits=2).part_lses.shape
    (2, 2, 5)
    """
    extra = [inspect.Parameter("splits", _KEYWORD), inspect.Parameter("executor", _KEYWORD, default=None)]
    return _make("split", mechanism, extra, ("part_outputs", "part_lses"))


def ring(mechanism: Any) -> Form:
    """The mechanism over ranks that hold queries and keys each, keys going round.

    ``ranks``, ``deal`` ("contiguous", "zigzag", "striped": see ``shard``) and ``executor`` (a ``concurrent.futures.Executor`` that runs
    the meetings of a rank's queries with another's keys; None: one after the other, the same numbers).

    Parameters
    ----------
    mechanism : str or Mechanism
        Softmax attention over plain arrays: scaled_dot_product_attention, mla_attention.
    """
    extra = [
        inspect.Parameter("ranks", _KEYWORD),
        inspect.Parameter("deal", _KEYWORD, default="contiguous"),
        inspect.Parameter("executor", _KEYWORD, default=None),
    ]
    return _make("ring", mechanism, extra, ())


def _make(form: str, mechanism: Any, extra: Sequence[inspect.Parameter], outputs: Sequence[str]) -> Form:
    plain = named(mechanism)
    if plain.name not in _KEYS:
        raise ValueError(
            f"{plain.name} has no {form} form: its keys are not independent of each other; these have: {', '.join(_KEYS)}"
        )
    return make(
        form, plain, extra=extra, doc="{name} with keys in parts; see ``refattn.serving``.", forward=_forward, backward=_backward,
        counts=_counts, example=_example, outputs=outputs, refused=("keep_weights",),
    )  # fmt: skip


class _Taken(Pattern):
    """A pattern over all positions, at some of them: query i stands at ``queries[i]``, key j at ``keys[j]``, both rising."""

    def __init__(self, whole: Pattern, queries: np.ndarray, keys: np.ndarray, q: int, k: int) -> None:
        super().__init__("taken", whole, queries, keys)
        self.whole, self.queries, self.keys, self.q, self.k = whole, queries, keys, q, k
        self.batch, self.heads = whole.batch, whole.heads

    def _check(self, q: int, k: int) -> None:
        if (q, k) != (len(self.queries), len(self.keys)):
            raise ValueError(f"{self!r} is for {len(self.queries)} queries and {len(self.keys)} keys: not {q} and {k}")

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        def at(name: str, index: Any) -> Any:
            flat = xp.take(
                self._on(xp, device(index) if is_array(index) else None, name), xp.reshape(index, (-1,)), axis=0
            )
            return xp.reshape(flat, index.shape)

        return self.whole._visible(xp, at("queries", i), at("keys", j), b, h, q=self.q, k=self.k)

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Any, h: Any) -> str:
        rows, columns = self.queries[[i0, i1 - 1]], self.keys[[j0, j1 - 1]]
        ends = (int(rows[0]), int(rows[1]) + 1, int(columns[0]), int(columns[1]) + 1)
        return self.whole._classify(*ends, self.q, self.k, b, h)

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Any, h: Any) -> tuple[int, int]:
        start, stop = self.whole._key_range(int(self.queries[i0]), int(self.queries[i1 - 1]) + 1, self.q, self.k, b, h)
        return int(np.searchsorted(self.keys, start)), int(np.searchsorted(self.keys, stop))


class _ScoreMod:
    """A score_mod that is told the positions in the whole call."""

    def __init__(self, score_mod: Any, queries: np.ndarray, keys: np.ndarray) -> None:
        self.score_mod, self.queries, self.keys = score_mod, queries, keys
        if hasattr(score_mod, "derivative"):
            self.derivative = self._derivative

    def _at(self, table: np.ndarray, index: Any) -> Any:
        xp, on = namespace(index), device(index)
        return xp.reshape(xp.take(xp.asarray(table, device=on), xp.reshape(index, (-1,)), axis=0), index.shape)

    def __call__(self, logits: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return self.score_mod(logits, b, h, self._at(self.queries, i), self._at(self.keys, j))

    def _derivative(self, logits: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return self.score_mod.derivative(logits, b, h, self._at(self.queries, i), self._at(self.keys, j))


class Whole:
    """One call that is computed in parts."""

    def __init__(self, plain: Mechanism, arguments: dict[str, Any], backend: Any, algorithm: str) -> None:
        self.plain = plain
        own = {n: arguments.pop(n, None) for n in ("splits", "ranks", "deal", "executor")}
        self.given = {n: x for n, x in arguments.items() if x is not None}
        self.keywords = how(self.given, backend, algorithm)
        self.executor = own["executor"]
        if self.executor is not None and not hasattr(self.executor, "submit"):
            raise TypeError(f"executor is a {type(self.executor).__name__}: expected a concurrent.futures.Executor")
        self.query_arrays, self.key_arrays = _QUERIES[plain.name], _KEYS[plain.name]
        self.sizes = self._sizes()
        arrays = [x for x in self.given.values() if is_array(x)]
        self.xp, self.on, self.dtype = namespace(*arrays), device(arrays[0]), self.given[self.query_arrays[0]].dtype
        placed = {n: self.given[n] for n in _PLACED if n in self.given}
        terms = {n: self.given[n] for n in ("alibi_slopes",) if n in self.given}
        read = shared.read(self.sizes, xp=self.xp, dtype=self.dtype, device=self.on, **placed, **terms)
        self.settings = read.settings
        self.offset = shared.offsets(self.sizes.lead, self.sizes.q, self.sizes.k, {**shared.SHARED, **placed, **terms})
        if own["ranks"] is None:
            self.queries = [np.arange(self.sizes.q)]
            self.keys = _boundaries(own["splits"], self.sizes.k)
        else:
            if self.sizes.q != self.sizes.k:
                raise ValueError(f"ring: there are {self.sizes.q} queries and {self.sizes.k} keys: expected as many")
            self.queries = self.keys = positions(self.sizes.q, own["ranks"], own["deal"] or "contiguous")
        self.in_ranks = own["ranks"] is not None

    def _sizes(self) -> Sizes:
        if self.plain.name == "scaled_dot_product_attention":
            return read_sizes(self.given["q"], self.given["k"], self.given["v"])
        q, latent = self.given["q_nope"], self.given["latent"]
        if q.ndim < 3 or latent.ndim < 2:
            raise ValueError(
                f"q_nope has shape {tuple(q.shape)} and latent {tuple(latent.shape)}: expected (..., h, q, d) and (..., k, l)"
            )
        lead = broadcast_leading(q_nope=(q, 3), latent=(latent, 2))
        h, n_q, d = q.shape[-3:]
        return Sizes(lead=lead, h=h, g=1, q=n_q, k=latent.shape[-2], d=d, e=latent.shape[-1])

    # ------------------------------------------------------------------ a part

    def part(self, queries: np.ndarray, keys: np.ndarray) -> dict[str, Any]:
        """The plain call of some queries with some keys."""
        skipped = (*_PLACED, "alibi_slopes", "sinks", "lse_includes_sinks", "indices", "block_indices", "block", "bias")
        found = {n: x for n, x in self.given.items() if n not in skipped}
        if self.plain.name == "mla_attention" and "scale" not in found and "w_uk" not in found:
            raise TypeError("scale is missing: without w_uk the number of query channels is not known")
        for names, places in ((self.query_arrays, queries), (self.key_arrays, keys)):
            found |= {n: self.take(found[n], places, -2) for n in names if n in found}
        if "dropout_mask" in found:
            found["dropout_mask"] = self.take_pairs(found["dropout_mask"], queries, keys)
        if "score_mod" in found:
            found["score_mod"] = _ScoreMod(found["score_mod"], queries, keys)
        if self.settings.visibility is not None:
            found["pattern"] = _Taken(self.settings.visibility, queries, keys, self.sizes.q, self.sizes.k)
        for name, places in (("query_lengths", queries), ("key_lengths", keys)):
            lengths = getattr(self.settings, name)
            if lengths is not None:
                found[name] = np.searchsorted(places, lengths).reshape(self.sizes.lead)
        added = self.added(queries, keys)
        if added is not None:
            found["bias"] = added
        lists = self.lists(queries, keys)
        return found | ({} if lists is None else {"indices": lists})

    def take(self, x: Any, places: np.ndarray, axis: int) -> Any:
        """Some positions of an axis; a run of them is a slice."""
        axis %= x.ndim
        if len(places) and places[-1] - places[0] + 1 == len(places):
            return x[(*(slice(None),) * axis, slice(int(places[0]), int(places[-1]) + 1), ...)]
        return self.xp.take(x, self.xp.asarray(places, device=self.on), axis=axis)

    def take_pairs(self, x: Any, queries: np.ndarray, keys: np.ndarray) -> Any:
        """An array that broadcasts to (..., q, k), at some of its pairs."""
        for axis, places in ((-2, queries), (-1, keys)):
            if x.ndim >= -axis and x.shape[axis] != 1:
                x = self.take(x, places, axis)
        return x

    def distance(self, queries: np.ndarray, keys: np.ndarray) -> Any:
        """ALiBi's |i + offset - j|, (q, k) or (..., 1, q, k)."""
        gap = np.abs(queries[:, None] + self.offset[:, None, None, None] - keys)
        gap = gap[0, 0] if len(gap) == 1 else gap.reshape(*self.sizes.lead, *gap.shape[1:])
        kind = self.dtype if self.keywords.get("compute_dtype") is None else self.xp.float64
        return self.xp.asarray(gap, dtype=kind, device=self.on)

    def added(self, queries: np.ndarray, keys: np.ndarray) -> Any:
        """bias + ALiBi of the part, None without either."""
        bias, slopes = self.given.get("bias"), self.given.get("alibi_slopes")
        found = None if bias is None else self.take_pairs(bias, queries, keys)
        if slopes is None:
            return found
        alibi = -self.xp.reshape(slopes, (-1, 1, 1)) * self.distance(queries, keys)
        return alibi if found is None else found + alibi

    def lists(self, queries: np.ndarray, keys: np.ndarray) -> Any:
        """The listed keys by their place in the part, -1 where they lie in another."""
        listed, blocks = self.given.get("indices"), self.given.get("block_indices")
        if blocks is not None:
            size = require_integer("block", self.given.get("block"), minimum=1)
            chosen = to_numpy(blocks)[..., None]
            ids = np.where(chosen < 0, -1, chosen * size + np.arange(size))
            ids = ids.reshape(*ids.shape[:-2], -1)
        elif listed is not None:
            ids = to_numpy(listed)
        else:
            return None
        place = np.full(self.sizes.k + 1, -1)
        place[keys] = np.arange(len(keys))
        found = place[np.where((ids < 0) | (ids >= self.sizes.k), self.sizes.k, ids)]
        found = found if found.shape[-2] == 1 else found[..., queries, :]
        return self.xp.asarray(found, device=self.on)

    # ------------------------------------------------------------------ sinks

    def sink_part(self) -> tuple[Any, Any] | None:
        """The log-sum-exp of the sinks of every row (-inf in padding), and the shares of the sinks in it."""
        sinks = self.given.get("sinks")
        if sinks is None:
            return None
        xp = self.xp
        weights, lse = masked_softmax(sinks if sinks.ndim == 2 else xp.reshape(sinks, (-1, 1)))
        shape = (*self.sizes.lead, self.sizes.h, self.sizes.q)
        rows = xp.broadcast_to(xp.reshape(lse, (-1, 1)), shape)
        lengths = self.settings.query_lengths
        if lengths is not None:
            real = np.arange(self.sizes.q) < lengths.reshape(*self.sizes.lead, 1, 1)
            rows = xp.where(xp.asarray(real, device=self.on), rows, xp.full_like(rows, -math.inf))
        return rows, weights


def _boundaries(splits: Any, length: int) -> list[np.ndarray]:
    """Parts of the keys: as many, as equal as can be, or between boundaries."""
    if splits is None:
        raise TypeError("splits is missing: expected a number of parts, or the boundaries between them")
    if isinstance(splits, (int, np.integer)) and not isinstance(splits, bool):
        return list(np.array_split(np.arange(length), require_integer("splits", splits, minimum=1)))
    try:
        ends = [require_integer("splits", x, minimum=0) for x in splits]
    except TypeError:
        raise TypeError(f"splits is {splits!r}: expected a number of parts, or the boundaries between them") from None
    if ends != sorted(ends) or (ends and ends[-1] > length):
        raise ValueError(f"splits is {ends}: expected boundaries that never fall, up to the {length} keys")
    return [np.arange(a, b) for a, b in zip([0, *ends], [*ends, length], strict=True)]


def _result_of(task: tuple[Mechanism, dict[str, Any], dict[str, Any]]) -> Result:
    plain, arguments, keywords = task
    return plain.forward(**arguments, **keywords)


def _gradients_of(task: tuple[Mechanism, dict[str, Any], dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    plain, arguments, keywords, cotangents = task
    return plain.vjp(**arguments, **keywords)[1](**cotangents)


def _forward(plain: Mechanism, arguments: dict[str, Any], backend: Any, algorithm: str) -> tuple[Result, Any]:
    call = Whole(plain, dict(arguments), backend, algorithm)
    tasks = [(plain, call.part(queries, keys), call.keywords) for queries in call.queries for keys in call.keys]
    pullbacks: list[Any] = []
    if call.executor is not None:
        results = list(call.executor.map(_result_of, tasks))
    else:
        done = [plain.vjp(**given, **keywords) for _, given, keywords in tasks]
        results, pullbacks = [r for r, _ in done], [p for _, p in done]
    n = len(call.keys)
    parts = [results[r * n : (r + 1) * n] for r in range(len(call.queries))]
    joined = [merge([p.output for p in row], [p.lse for p in row]) for row in parts]
    output, lse = (_in_order(call, [x[i] for x in joined], axis) for i, axis in ((0, -2), (1, -1)))
    before = (output, lse)
    sinks = call.sink_part()
    if sinks is not None:
        whole = merge([output, call.xp.zeros_like(output)], [lse, sinks[0]])
        output, lse = whole[0], whole[1] if call.given.get("lse_includes_sinks", True) else lse
    fields = {"output": output, "lse": lse}
    if not call.in_ranks:
        fields["part_outputs"] = call.xp.stack([p.output for p in parts[0]], axis=0)
        fields["part_lses"] = call.xp.stack([p.lse for p in parts[0]], axis=0)
    return Result(**fields), (call, tasks, pullbacks, parts, before, sinks)


def _in_order(call: Whole, parts: Sequence[Any], axis: int) -> Any:
    """What the ranks have, at its positions."""
    if len(parts) == 1:
        return parts[0]
    back = np.argsort(np.concatenate(call.queries), kind="stable")
    joined = call.xp.concat(list(parts), axis=axis)
    return call.xp.take(joined, call.xp.asarray(back, device=call.on), axis=axis % joined.ndim)


def _backward(saved: Any, cotangents: Mapping[str, Any]) -> dict[str, Any]:
    call, tasks, pullbacks, parts, (output, lse), sinks = saved
    xp = call.xp
    d_output, d_lse = (
        xp.zeros_like(x) if cotangents.get(n) is None else cotangents[n] for n, x in (("output", output), ("lse", lse))
    )
    found: dict[str, Any] = {}
    if sinks is not None:
        inside = call.given.get("lse_includes_sinks", True)
        both = merge_backward(
            [output, xp.zeros_like(output)], [lse, sinks[0]], d_output, d_lse if inside else xp.zeros_like(d_lse)
        )
        d_output, d_lse = both[0][0], both[1][0] if inside else both[1][0] + d_lse
        per_head = xp.sum(both[1][1], axis=tuple(i for i in range(lse.ndim) if i != lse.ndim - 2))
        found["sinks"] = xp.reshape(einsum("h,hn->hn", per_head, sinks[1]), call.given["sinks"].shape)
    pulled = []
    for queries, row in zip(call.queries, parts, strict=True):
        outputs, lses = [p.output for p in row], [p.lse for p in row]
        d_outputs, d_lses = merge_backward(
            outputs, lses, call.take(d_output, queries, -2), call.take(d_lse, queries, -1)
        )
        for n in range(len(row)):
            given = {"output": d_outputs[n], "lse": d_lses[n]}
            for name, field in (("part_outputs", "output"), ("part_lses", "lse")):
                if cotangents.get(name) is not None:
                    given[field] = given[field] + cotangents[name][n, ...]
            pulled.append(given)
    if call.executor is not None:
        every = list(call.executor.map(_gradients_of, [(*task, d) for task, d in zip(tasks, pulled, strict=True)]))
    else:
        every = [pullback(**d) for pullback, d in zip(pullbacks, pulled, strict=True)]
    return found | _collected(call, every)


def _collected(call: Whole, every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Gradients of the parts as those of the arguments."""
    pairs = [(queries, keys) for queries in call.queries for keys in call.keys]
    found: dict[str, Any] = {}
    for name in every[0]:
        if name == "bias":
            found |= _of_added(call, [g["bias"] for g in every], pairs)
            continue
        places = 0 if name in call.query_arrays else 1 if name in call.key_arrays else None
        if places is None:
            found[name] = _sum(g[name] for g in every)
            continue
        lists = call.queries if places == 0 else call.keys
        n = len(call.keys)
        sums = [
            _sum(g[name] for i, g in enumerate(every) if (i // n if places == 0 else i % n) == own)
            for own in range(len(lists))
        ]
        found[name] = _back(call, sums, lists)
    return found


def _sum(arrays: Iterable[Any]) -> Any:
    total = None
    for x in arrays:
        total = x if total is None else total + x
    return total


def _back(call: Whole, parts: Sequence[Any], places: Sequence[np.ndarray]) -> Any:
    joined = call.xp.concat(list(parts), axis=-2)
    order = np.argsort(np.concatenate(places), kind="stable")
    return call.xp.take(joined, call.xp.asarray(order, device=call.on), axis=joined.ndim - 2)


def _of_added(call: Whole, gradients: Sequence[Any], pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Gradients of bias and ALiBi slopes from those of their sum in each part."""
    xp, found = call.xp, {}
    slopes, bias = call.given.get("alibi_slopes"), call.given.get("bias")
    if slopes is not None:
        total = None
        for g, (queries, keys) in zip(gradients, pairs, strict=True):
            weighted = g * call.distance(queries, keys)
            heads = xp.sum(weighted, axis=tuple(i for i in range(g.ndim) if i != g.ndim - 3))
            total = -heads if total is None else total - heads
        found["alibi_slopes"] = total
    if bias is not None:
        n = len(call.keys)
        rows = []
        for r in range(len(call.queries)):
            own = [flatten_leading(g, 3, call.sizes.lead) if g.ndim >= 3 else g for g in gradients[r * n : (r + 1) * n]]
            rows.append(_along(call, own, call.keys, -1, bias))
        whole = _along(call, rows, call.queries, -2, bias)
        found["bias"] = xp.reshape(whole, _shape_of(call, bias, whole))
    return found


def _shape_of(call: Whole, bias: Any, whole: Any) -> tuple[int, ...]:
    if bias.ndim < 3:
        return tuple(whole.shape)
    lead = call.sizes.lead if whole.shape[0] != 1 else (1,) * len(call.sizes.lead)
    return (*lead, *whole.shape[1:])


def _along(call: Whole, parts: Sequence[Any], places: Sequence[np.ndarray], axis: int, bias: Any) -> Any:
    """Gradients of parts of an axis, put together; summed where the array has but one entry there."""
    if bias.ndim < -axis or bias.shape[axis] == 1:
        total = _sum(call.xp.sum(x, axis=axis, keepdims=True) if x.ndim >= -axis else x for x in parts)
        return total
    joined = call.xp.concat(list(parts), axis=axis)
    order = np.argsort(np.concatenate(places), kind="stable")
    return call.xp.take(joined, call.xp.asarray(order, device=call.on), axis=axis % joined.ndim)


def _counts(plain: Mechanism, sizes: Mapping[str, Any]) -> Counts:
    """The multiplies of the whole call; what merging adds is left out."""
    return plain._cost(**{n: x for n, x in sizes.items() if n not in ("splits", "ranks", "deal", "executor")})


def _example(plain: Mechanism, rng: "np.random.Generator", **sizes: Any) -> dict[str, Any]:
    own: dict[str, Any] = {n: sizes.pop(n) for n in ("splits", "ranks", "deal") if n in sizes}
    return {**plain.example(rng, **sizes), **own}
