"""Packed and paged forms: sequences of one batch, each a plain call of the mechanism on its own rows."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from refattn.arrays import device, dtype_name, is_array, is_complex, namespace, require_one_of
from refattn.mechanism import Mechanism
from refattn.records import Counts, Elements, Pass, Result
from refattn.serving.forms import Form, make, named
from refattn.serving.layout import (
    DROPPED,
    FILL,
    axes_of,
    key_side,
    length_axis,
    plain_axes,
    result_axes,
    served,
    unserved,
)
from refattn.serving.tables import read_cumulated, read_lengths, read_table

__all__ = ["packed", "paged"]

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def packed(mechanism: Any) -> Form:
    """The mechanism on sequences that lie one behind the other, without padding between them.

    Parameters
    ----------
    mechanism : str or Mechanism

    Returns
    -------
    Mechanism
        Arrays have their length first and no batch axes: q (t, h, d), k (s, g, d), v (s, g, e), per-token arrays alike; states
        begin with b.  ``cu_seqlens_q`` (b+1,) says where sequences begin and end, ``cu_seqlens_k`` likewise for keys (left out:
        the same); rows from the last entry on are padding: output 0, lse -inf, gradient 0, never read.  ``align`` is lower right in
        each sequence unless given; ``pattern`` (one, or a list with one per sequence), ``score_mod`` and lists of keys speak of
        positions inside the sequence.  output (t, h, e), lse (h, t).

    Examples
    --------
    Two sequences of 1 and 2 tokens:

    >>> import numpy as np
    >>> q = k = np.zeros((3, 1, 4))
    >>> v = np.array([1.0, 2.0, 4.0]).reshape(3, 1, 1)
    >>> packed("scaled_dot_product_attention")(q, k, v, cu_seqlens_q=[0, 1, 3])[:, 0, 0].tolist()
    [1.0, 3.0, 3.0]
    """
    plain = named(mechanism)
    letters = {c for axes in plain_axes(plain.name).values() for c in axes.split()}
    extra = [inspect.Parameter("cu_seqlens_q", _KEYWORD)]
    if "k" in letters:
        extra.append(inspect.Parameter("cu_seqlens_k", _KEYWORD, default=None))
    return make(
        "packed", plain, extra=extra, doc=_DOC, forward=_forward, backward=_backward, counts=_packed_counts, example=_packed_example
    )  # fmt: skip


def paged(mechanism: Any) -> Form:
    """The mechanism on keys and values that lie in pages of a cache.

    Parameters
    ----------
    mechanism : str or Mechanism

    Returns
    -------
    Mechanism
        Key-side arrays are pages: k (n, page, g, d), with ``kv_layout="HND"`` (n, g, page, d).  Key s of sequence b lies in page
        ``block_table[b, s // page]``, slot s % page; ``seq_lens`` (b,) counts all keys; what lies beyond is never read.  q is packed by
        ``cu_seqlens_q``, left out: one query per sequence.  A page in several rows gets the sum of its gradients.

    Examples
    --------
    Three keys in pages 1 and 0 of two slots; what stands in the last slot is not read:

    >>> import numpy as np
    >>> pages = np.array([[4.0, np.nan], [1.0, 1.0]]).reshape(2, 2, 1, 1)
    >>> q = np.zeros((1, 1, 1))
    >>> attention = paged("scaled_dot_product_attention")
    >>> attention(q, np.zeros_like(pages), pages, block_table=[[1, 0]], seq_lens=[3]).item()
    2.0
    """
    plain = named(mechanism)
    if not key_side(plain.name):
        raise ValueError(f"{plain.name} has no paged form: it keeps a state, not keys")
    extra = [inspect.Parameter("block_table", _KEYWORD), inspect.Parameter("seq_lens", _KEYWORD)]
    extra += [
        inspect.Parameter("cu_seqlens_q", _KEYWORD, default=None),
        inspect.Parameter("kv_layout", _KEYWORD, default="NHD"),
    ]
    return make(
        "paged", plain, extra=extra, doc=_DOC, forward=_forward, backward=_backward, counts=_paged_counts, example=_paged_example
    )  # fmt: skip


_DOC = """{name}, sequence by sequence; see ``refattn.serving``."""

OWN = ("cu_seqlens_q", "cu_seqlens_k", "block_table", "seq_lens", "kv_layout")


class Sequences:
    """Where each sequence of a call lies: rows of queries, and rows of keys or the pages of its keys."""

    def __init__(self, plain: Mechanism, arguments: Mapping[str, Any]) -> None:
        self.plain, self.table = plain, plain_axes(plain.name)
        self.given = {n: x for n, x in arguments.items() if n not in OWN and x is not None}
        self.axes = {n: axes_of(n, x, self.table) for n, x in self.given.items()}
        arrays = [x for x in self.given.values() if is_array(x)]
        self.xp, self.on = namespace(*arrays), device(arrays[0])
        self.in_pages = arguments.get("block_table") is not None
        for name, axes in self.axes.items():
            if "b" not in axes.split() and axes:
                wanted = len(axes.split()) + (self.in_pages and "k" in axes.split())
                if not is_array(self.given[name]) or self.given[name].ndim != wanted:
                    shape = tuple(getattr(self.given[name], "shape", ()))
                    raise ValueError(f"{name} has shape {shape}: expected {wanted} axes ({self._shown(axes)})")
        self.rows = self._rows("q", self.given)
        if self.in_pages:
            self._read_pages(arguments)
        else:
            self._read_packed(arguments)
        self.sequences = len(self.cu_q) - 1
        for name, axes in self.axes.items():
            if axes.split()[:1] == ["b"] and len(self.given[name]) != self.sequences:
                raise ValueError(
                    f"{name} has {len(self.given[name])} entries: expected {self.sequences}, one per sequence"
                )
        patterns = self.given.get("pattern")
        if isinstance(patterns, (list, tuple)) and len(patterns) != self.sequences:
            raise ValueError(f"pattern is a list of {len(patterns)}: expected {self.sequences}, one per sequence")

    def _shown(self, axes: str) -> str:
        letters = axes.split()
        at = next(i for i, c in enumerate(letters) if c in "qk")
        rest = [c for i, c in enumerate(letters) if i != at]
        if self.in_pages and letters[at] == "k":
            return "n page " + " ".join(rest)
        return " ".join(["t" if letters[at] == "q" else "s", *rest])

    def _rows(self, letter: str, given: Mapping[str, Any]) -> int:
        """The length that all arrays over queries, or over keys, have."""
        found: dict[str, int] = {}
        for name, x in given.items():
            axes = self.axes[name].split()
            if letter in axes:
                found[name] = x.shape[length_axis(self.axes[name])] // self.steps(name)
        if len(set(found.values())) > 1:
            shapes = ", ".join(f"{n} has {m}" for n, m in found.items())
            raise ValueError(f"lengths: {shapes}: expected the same")
        return next(iter(found.values()), 0)

    def steps(self, name: str) -> int:
        """Rows of an array for each token."""
        steps = self.given.get("steps", 1)
        return int(steps) if name in ("k", "v", "beta", "erase_key") and isinstance(steps, int) else 1

    def _read_packed(self, arguments: Mapping[str, Any]) -> None:
        self.cu_q = read_cumulated("cu_seqlens_q", arguments["cu_seqlens_q"], self.rows)
        keys = self._rows("k", self.given)
        given = arguments.get("cu_seqlens_k")
        name = "cu_seqlens_q" if given is None else "cu_seqlens_k"
        has_keys = any("k" in axes.split() for axes in self.axes.values())
        value = self.cu_q if given is None else given
        self.cu_k = read_cumulated(name, value, keys if has_keys else None, len(self.cu_q) - 1)
        self.key_rows, self.key_lengths = keys, np.diff(self.cu_k)

    def _read_pages(self, arguments: Mapping[str, Any]) -> None:
        require_one_of("kv_layout", arguments.get("kv_layout", "NHD"), ("NHD", "HND"))
        self.heads_first = arguments.get("kv_layout") == "HND"
        self.key_lengths = read_lengths("seq_lens", arguments["seq_lens"])
        sizes = {}
        for name, axes in self.axes.items():
            if "k" in axes.split():
                x = self.given[name]
                slots = 2 if self.heads_first and axes.split()[0] in ("g", "h") else 1
                sizes[name] = (x.shape[0], x.shape[slots])
        if len(set(sizes.values())) != 1:
            raise ValueError(
                f"pages: {', '.join(f'{n} has {m[0]} of {m[1]} slots' for n, m in sizes.items())}: expected the same"
            )
        self.pages, self.page = next(iter(sizes.values()))
        if not self.page:
            raise ValueError("pages have no slots: expected at least one")
        self.own_pages = read_table(arguments["block_table"], self.key_lengths, self.pages, self.page)
        b = len(self.key_lengths)
        if arguments.get("cu_seqlens_q") is None:
            if self.rows != b:
                raise ValueError(
                    f"there are {self.rows} queries and {b} sequences: without cu_seqlens_q expected one per sequence"
                )
            self.cu_q = np.arange(b + 1)
        else:
            self.cu_q = read_cumulated("cu_seqlens_q", arguments["cu_seqlens_q"], self.rows, b)

    # ------------------------------------------------------------------ plain arguments

    def __iter__(self) -> Any:
        """Numbers of the sequences; where there is none, one without queries and keys: it tells the shapes of results."""
        return iter(range(max(1, self.sequences)))

    def span(self, n: int, letter: str) -> tuple[int, int]:
        """First row of a sequence, and the one behind its last."""
        cumulated = self.cu_q if letter == "q" else self.cu_k
        return (int(cumulated[n]), int(cumulated[n + 1])) if n < self.sequences else (0, 0)

    def arguments(self, n: int) -> dict[str, Any]:
        """The plain call of sequence n."""
        found = {}
        for name, x in self.given.items():
            axes = self.axes[name]
            if not axes:
                found[name] = x
            elif axes.split()[0] == "b":
                found[name] = self._entry(x, n)
            elif self.in_pages and "k" in axes.split():
                found[name] = unserved(self._from_pages(x, axes, n), axes)
            else:
                start, stop = (e * self.steps(name) for e in self.span(n, "q" if "q" in axes.split() else "k"))
                found[name] = unserved(_cut(x, length_axis(axes), start, stop), axes)
        pattern = found.get("pattern")
        if isinstance(pattern, (list, tuple)):
            found["pattern"] = pattern[n] if n < self.sequences else None
        if found.get("score_mod") is not None:
            found["score_mod"] = _OfSequence(found["score_mod"], n)
        if "align" in self.plain.options and found.get("align") is None:
            found["align"] = "lower_right"
        return found

    def _entry(self, x: Any, n: int) -> Any:
        if n < self.sequences:
            one = x[n]
            return one if is_array(one) and one.ndim else int(one) if np.shape(one) == () else one
        return self.xp.zeros(x.shape[1:], dtype=x.dtype, device=self.on) if is_array(x) and x.ndim > 1 else 0

    def _from_pages(self, x: Any, axes: str, n: int) -> Any:
        """The keys of sequence n, (s, ...)."""
        own = self.own_pages[n] if n < self.sequences else np.zeros(0, np.int64)
        length = int(self.key_lengths[n]) if n < self.sequences else 0
        taken = self.xp.take(x, self.xp.asarray(own, device=self.on), axis=0)
        if self.heads_first and axes.split(maxsplit=1)[0] in ("g", "h"):
            taken = self.xp.moveaxis(taken, 2, 1)
        return self.xp.reshape(taken, (len(own) * self.page, *taken.shape[2:]))[:length, ...]

    # ------------------------------------------------------------------ results and gradients

    def joined(self, parts: Sequence[Any], axes: str, name: str, like_rows: str) -> Any:
        """Parts of the sequences as one array in the served layout, with what stands in padding."""
        at = length_axis(axes, name)
        pieces = [served(x, axes, name) for x in parts]
        if name in ("indices", "block_indices"):
            pieces = _even(pieces, self.xp)
        rows = (self.rows if like_rows == "q" else self.key_rows) * self.steps(name)
        there = sum(x.shape[at] for x in pieces)
        if rows > there:
            shape = [*pieces[0].shape]
            shape[at] = rows - there
            fill = self.xp.full(tuple(shape), FILL.get(name, 0), dtype=pieces[0].dtype, device=self.on)
            pieces.append(fill)
        return self.xp.concat(pieces, axis=at) if len(pieces) > 1 else pieces[0]

    def result(self, results: Sequence[Result]) -> Result:
        """The results of the sequences as one."""
        fields = {}
        for name in results[0]:
            if name in DROPPED:
                continue
            axes = result_axes(self.plain.name, name)
            parts = [getattr(r, name) for r in results]
            if parts[0] is None:
                continue
            fields[name] = self._stacked(parts) if axes[0] == "b" else self.joined(parts, axes, name, "q")
        return Result(**fields)

    def _stacked(self, parts: Sequence[Any]) -> Any:
        stacked = self.xp.stack(list(parts), axis=0)
        return stacked[: self.sequences, ...]

    def cotangents(self, n: int, cotangents: Mapping[str, Any]) -> dict[str, Any]:
        """Those of sequence n, in the plain layout."""
        found = {}
        for name, d in cotangents.items():
            if d is None:
                continue
            axes = result_axes(self.plain.name, name)
            if axes[0] == "b":
                found[name] = (
                    d[n, ...] if n < self.sequences else self.xp.zeros(d.shape[1:], dtype=d.dtype, device=self.on)
                )
            else:
                found[name] = unserved(_cut(d, length_axis(axes, name), *self.span(n, "q")), axes, name)
        return found

    def gradients(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The gradients of the sequences as those of the arguments."""
        found = {}
        for name in parts[0]:
            axes = self.axes[name]
            pieces = [g[name] for g in parts]
            if not axes:
                found[name] = sum(pieces[1:], start=pieces[0])
            elif axes[0] == "b":
                found[name] = self._stacked(pieces)
            elif self.in_pages and "k" in axes.split():
                found[name] = self._into_pages(self.given[name], axes, [served(x, axes) for x in pieces])
            else:
                found[name] = self.joined(pieces, axes, f"d_{name}", "q" if "q" in axes.split() else "k")
        return found

    def _into_pages(self, like: Any, axes: str, parts: Sequence[Any]) -> Any:
        """Gradients of the keys of all sequences, added into the pages that they came from."""
        pages: list[Any] = [None] * self.pages
        for n, own in enumerate(self.own_pages):
            rows = parts[n]
            short = len(own) * self.page - rows.shape[0]
            zeros = self.xp.zeros((short, *rows.shape[1:]), dtype=rows.dtype, device=self.on)
            rows = self.xp.reshape(self.xp.concat([rows, zeros], axis=0), (len(own), self.page, *rows.shape[1:]))
            for c, page in enumerate(own.tolist()):
                pages[page] = rows[c, ...] if pages[page] is None else pages[page] + rows[c, ...]
        nothing = self.xp.zeros((self.page, *parts[0].shape[1:]), dtype=parts[0].dtype, device=self.on)
        stacked = [nothing if x is None else x for x in pages]
        total = (
            self.xp.stack(stacked, axis=0)
            if stacked
            else self.xp.zeros(like.shape, dtype=parts[0].dtype, device=self.on)
        )
        return self.xp.moveaxis(total, 1, 2) if self.heads_first and axes.split(maxsplit=1)[0] in ("g", "h") else total


class _OfSequence:
    """A score_mod that is told the number of the sequence as b."""

    def __init__(self, score_mod: Any, n: int) -> None:
        self.score_mod, self.n = score_mod, n
        if hasattr(score_mod, "derivative"):
            self.derivative = self._derivative

    def __call__(self, logits: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return self.score_mod(logits, b + self.n, h, i, j)

    def _derivative(self, logits: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return self.score_mod.derivative(logits, b + self.n, h, i, j)


def _cut(x: Any, axis: int, start: int, stop: int) -> Any:
    return x[(*(slice(None),) * axis, slice(start, stop), ...)]


def _even(parts: Sequence[Any], xp: Any) -> list[Any]:
    """Lists of different width, made as wide as the widest by -1."""
    width = max(x.shape[-1] for x in parts)
    return [
        xp.concat([x, xp.full((*x.shape[:-1], width - x.shape[-1]), -1, dtype=x.dtype, device=device(x))], axis=-1)
        for x in parts
    ]


def how(arguments: Mapping[str, Any], backend: Any, algorithm: str) -> dict[str, Any]:
    """Keywords that make the plain call compute as this one does."""
    found = {"backend": backend.name, "algorithm": algorithm}
    for x in arguments.values():
        if is_array(x) and is_complex(x.dtype):
            found["compute_dtype"] = dtype_name(x.dtype)
    return found


def _forward(plain: Mechanism, arguments: dict[str, Any], backend: Any, algorithm: str) -> tuple[Result, Any]:
    call = Sequences(plain, arguments)
    keywords = how(arguments, backend, algorithm)
    done = [plain.vjp(**call.arguments(n), **keywords) for n in call]
    return call.result([result for result, _ in done]), (call, [pullback for _, pullback in done])


def _backward(saved: Any, cotangents: Mapping[str, Any]) -> dict[str, Any]:
    call, pullbacks = saved
    return call.gradients([pullbacks[n](**call.cotangents(n, cotangents)) for n in call])


# ---------------------------------------------------------------------------------------------- costs and examples


def _lengths(sizes: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of queries and keys from the tables of a call."""
    cu_q, cu_k, seq_lens = (sizes.pop(n, None) for n in ("cu_seqlens_q", "cu_seqlens_k", "seq_lens"))
    keys = None if seq_lens is None else read_lengths("seq_lens", seq_lens)
    if cu_q is None and keys is None:
        raise TypeError("'cu_seqlens_q' is missing")
    queries = (
        np.ones(len(keys), np.int64)
        if cu_q is None and keys is not None
        else np.diff(read_cumulated("cu_seqlens_q", cu_q, None))
    )
    if keys is None:
        keys = queries if cu_k is None else np.diff(read_cumulated("cu_seqlens_k", cu_k, None, len(queries)))
    return queries, keys


def _packed_counts(plain: Mechanism, sizes: Mapping[str, Any]) -> Counts:
    rest = dict(sizes)
    queries, keys = _lengths(rest)
    names = inspect.signature(plain._cost).parameters
    total = Counts(forward=Pass(), backward=Pass())
    for q, k in zip(queries.tolist(), keys.tolist(), strict=True):
        lengths = {"q": q, "k": k} if "k" in names else {"t": q}
        if "align" in plain.options:
            lengths["align"] = rest.get("align", "lower_right")
        total = total + plain._cost(
            **{**rest, "b": 1, **{n: x for n, x in lengths.items() if n in names or n == "align"}}
        )
    return total


def _paged_counts(plain: Mechanism, sizes: Mapping[str, Any]) -> Counts:
    """As packed, and the tables."""
    rest = {n: x for n, x in sizes.items() if n not in ("kv_layout", "page", "block_table")}
    counts = _packed_counts(plain, rest)
    lengths = read_lengths("seq_lens", sizes["seq_lens"])
    entries = len(lengths) + (0 if "block_table" not in sizes else int(np.size(sizes["block_table"])))
    tables = Pass(read=Elements(index=entries))
    return counts + Counts(forward=tables, backward=tables)


def _packed_example(plain: Mechanism, rng: "np.random.Generator", **sizes: Any) -> dict[str, Any]:
    """Three sequences, one of them empty, cut out of the mechanism's own example."""
    table = plain_axes(plain.name)
    arguments = plain.example(rng, **{**sizes, "b": 1})
    found = {n: served(x[0], table[n]) if n in table and is_array(x) else x for n, x in arguments.items()}
    lengths = {}
    for letter in "qk":
        rows = [found[n].shape[length_axis(table[n])] for n in found if letter in table.get(n, "").split()]
        lengths[letter] = rows[0] if rows else 0
    cuts = {c: [0, n // 2, n // 2, n] for c, n in lengths.items()}
    found["cu_seqlens_q"] = np.asarray(cuts["q"])
    if any("k" in axes.split() for axes in table.values()):
        found["cu_seqlens_k"] = np.asarray(cuts["k"])
    return found


def _paged_example(plain: Mechanism, rng: "np.random.Generator", *, page: int = 2, **sizes: Any) -> dict[str, Any]:
    """The packed example with its keys in permuted pages."""
    found = _packed_example(plain, rng, **sizes)
    lengths = np.diff(found.pop("cu_seqlens_k"))
    needed = [-(-int(n) // page) for n in lengths]
    pages = rng.permutation(sum(needed) + 1)
    block_table, first = np.full((len(needed), max(needed) + 1), -1), 0
    for n, count in enumerate(needed):
        block_table[n, :count] = pages[first : first + count]
        first += count
    for name in key_side(plain.name):
        if name in found:
            x, start = found[name], 0
            fill = math.nan if x.dtype.kind == "f" else 0
            laid = np.full((len(pages), page, *x.shape[1:]), fill, dtype=x.dtype)
            for n, length in enumerate(lengths.tolist()):
                for s in range(length):
                    laid[block_table[n, s // page], s % page] = x[start + s]
                start += length
            found[name] = laid
    return {**found, "block_table": block_table, "seq_lens": lengths}
