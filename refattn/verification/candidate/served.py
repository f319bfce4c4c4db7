"""Packed and paged candidates, called as plain ones: each call is dealt into sequences, and the answer put back.

Every batch entry is a sequence of its lengths.  What nobody may read (rows behind the last sequence, unused slots and pages) is NaN
or far off, table entries behind a sequence's pages are other pages, -1 or 2^31 - 1; rows behind the last sequence must come back as
output 0 and lse -inf, and no array that was handed over may change.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn.verification.errors import UsageError

__all__ = ["LAYOUTS", "Served", "parse_served"]

LAYOUTS = ("packed", "paged")
SERVING = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "block_table", "seq_lens", "kv_layout")
REFUSED = (
    *("mask", "bias", "pattern", "dropout_mask", "dropout_rate", "query_segments", "key_segments", "keep_weights"),
    *("indices", "block_indices", "block", "query_lengths", "key_lengths"),
)
PADDING = 3  # rows behind the last sequence
PAGES = (16, 5)  # slots of a page where none is asked for: both are tried


def parse_served(layout: str) -> tuple[str, str, int | None]:
    """("paged", "HND", 16) from "paged:HND:16"; the page is None where it is left open.

    Raises
    ------
    UsageError
        An unknown order of pages, or a page without slots.
    """
    kind, _, rest = layout.partition(":")
    order, _, page = rest.partition(":")
    if (order or "NHD") not in ("NHD", "HND"):
        raise UsageError(f"kv_layout is {order!r}: expected NHD or HND")
    if page and (not page.isdigit() or int(page) < 1):
        raise UsageError(f"page is {page}: expected a number of slots from 1")
    return kind, order or "NHD", int(page) if page else None


class Served:
    """A packed or paged function as ``function(q, k, v, *, query_lengths, key_lengths, **options)`` on plain NumPy arrays.

    Attributes
    ----------
    mutated : bool
        Whether the last call changed an array that it was handed.
    """

    def __init__(self, function: Callable[..., Any], backward: Callable[..., Any] | None, layout: str) -> None:
        self.function, self.pull = function, backward
        self.kind, self.kv_layout, self.page = parse_served(layout)
        self.mutated = False
        names = inspect.signature(function).parameters
        needed = ("block_table", "seq_lens") if self.kind == "paged" else ("cu_seqlens_q",)
        missing = [n for n in needed if n not in names]
        if missing:
            raise UsageError(
                f"layout is {self.kind!r}, and the signature does not name {', '.join(missing)}: expected some of {', '.join(SERVING)}"
            )
        keyword = inspect.Parameter.KEYWORD_ONLY
        own = [
            p for p in list(names.values())[3:] if p.name not in (*SERVING, *REFUSED) and p.kind is not p.VAR_KEYWORD
        ]
        lengths = [inspect.Parameter(n, keyword, default=None) for n in ("query_lengths", "key_lengths")]
        arrays = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in "qkv"]
        options = [p.replace(kind=keyword) for p in own]
        self.__signature__ = inspect.Signature([*arrays, *lengths, *options])
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__module__ = getattr(function, "__module__", "")
        self.__wrapped__ = function

    @property
    def backward(self) -> Callable[..., Any] | None:
        """The backward as one on plain arrays."""
        if self.pull is None:
            return None
        parameters = list(inspect.signature(self.pull).parameters.values())
        cotangent = inspect.Parameter("d_output", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        plain = list(self.__signature__.parameters.values())
        own = [p for p in parameters[4:] if p.name not in (*SERVING, *REFUSED) and p.kind is not p.VAR_KEYWORD]
        options = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]

        def backward(d_output: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
            return self._backward(d_output, q, k, v, **options)

        backward.__signature__ = inspect.Signature([cotangent, *plain[:5], *options])  # type: ignore[attr-defined]
        return backward

    def __call__(
        self, q: Any, k: Any, v: Any, *, query_lengths: Any = None, key_lengths: Any = None, **options: Any
    ) -> Any:
        deal = _Deal(self, q, k, v, query_lengths, key_lengths, options)
        returned = self._called(self.function, deal, deal.arrays, options)
        fields = returned if isinstance(returned, dict) else None
        parts = (
            list(fields.values())
            if fields is not None
            else list(returned)
            if isinstance(returned, (tuple, list))
            else [returned]
        )
        names = list(fields) if fields is not None else ["output", "lse"]
        found = {n: deal.back(n, np.asarray(x)) for n, x in zip(names, parts, strict=False) if n in ("output", "lse")}
        return found

    def _called(self, function: Callable[..., Any], deal: "_Deal", arrays: list[Any], options: dict[str, Any]) -> Any:
        named = inspect.signature(function).parameters
        tables = {n: x for n, x in deal.tables.items() if n in named}
        before = [x.tobytes() for x in (*arrays, *tables.values()) if isinstance(x, np.ndarray)]
        plain = {
            n: x.item() if n in ("scale", "softcap") and isinstance(x, np.ndarray) else x for n, x in options.items()
        }
        plain = {
            n: x.astype(np.float32) if n in ("sinks", "alibi_slopes") and isinstance(x, np.ndarray) else x
            for n, x in plain.items()
        }
        returned = function(*arrays, **tables, **plain)
        after = [x.tobytes() for x in (*arrays, *tables.values()) if isinstance(x, np.ndarray)]
        self.mutated = before != after
        return returned

    def _backward(
        self,
        d_output: Any,
        q: Any,
        k: Any,
        v: Any,
        *,
        query_lengths: Any = None,
        key_lengths: Any = None,
        **options: Any,
    ) -> Any:
        deal = _Deal(self, q, k, v, query_lengths, key_lengths, options)
        arrays = [deal.cotangent(d_output), *deal.arrays]
        if "d_lse" in options:
            options["d_lse"] = deal.cotangent(np.asarray(options["d_lse"])[..., None])[..., 0].T
        assert self.pull is not None
        returned = self._called(self.pull, deal, arrays, options)
        if isinstance(returned, dict):
            return {
                n: deal.gradient(n, np.asarray(g)) if n in "qkv" else g for n, g in returned.items() if g is not None
            }
        parts = returned if isinstance(returned, (tuple, list)) else (returned,)
        return tuple(
            deal.gradient(n, np.asarray(g)) if n in "qkv" and g is not None else g
            for n, g in zip("qkv", parts, strict=False)
        )


class _Deal:
    """One plain call as sequences: which batch entry and row each packed row is, and where each key lies."""

    def __init__(
        self, served: Served, q: Any, k: Any, v: Any, query_lengths: Any, key_lengths: Any, options: dict[str, Any]
    ) -> None:
        self.served, self.shapes = served, {"q": q.shape, "k": k.shape, "v": v.shape}
        b, self.h, n_q, _ = q.shape
        n_k = k.shape[2]
        full = np.full(b, n_q), np.full(b, n_k)
        rows, keys = (
            most if given is None else np.broadcast_to(np.asarray(given).reshape(-1), (b,)).astype(int)
            for most, given in zip(full, (query_lengths, key_lengths), strict=True)
        )
        self.entries, self.key_lengths, self.query_lengths = np.arange(b), keys, rows
        self.rng = np.random.default_rng(int(rows.sum()) * 31 + int(keys.sum()))
        self.fill = np.nan if (int(rows.sum()) + int(keys.sum())) % 2 else 37.0
        named = inspect.signature(served.function).parameters
        self.row_of: list[tuple[int, int]] = [(n, i) for n in range(b) for i in range(rows[n])]
        if served.kind == "paged" and "cu_seqlens_q" not in named:
            self._one_query_each(options)
        self.queries = self._packed(
            q, self.row_of, 0 if served.kind == "paged" and "cu_seqlens_q" not in named else PADDING
        )
        if served.kind == "paged":
            self._lay_pages(k, v)
        else:
            self.key_rows = [(n, s) for n in range(b) for s in range(keys[n])]
            self.arrays = [self.queries, *(self._packed(x, self.key_rows, PADDING) for x in (k, v))]
        self.tables = self._tables(named)

    def _one_query_each(self, options: dict[str, Any]) -> None:
        """Every query is a sequence of its own: it sees the keys up to its place where the call is causal."""
        window = options.get("window")
        if window is not None and (window[1] is None or window[1] > 0) and not options.get("causal"):
            raise NotImplementedError("one query in each sequence has no keys to its right")
        if options.get("alibi_slopes") is not None and not options.get("causal"):
            raise NotImplementedError("ALiBi on both sides, one query in each sequence")
        bounded = options.get("causal") or window is not None
        entries = np.asarray([n for n, _ in self.row_of], dtype=int)
        places = np.asarray([i for _, i in self.row_of], dtype=int)
        keys, rows = self.key_lengths[entries], self.query_lengths[entries]
        seen = np.clip(keys - rows + places + 1, 0, keys) if bounded else keys
        if bounded and (keys < rows).any() and window is not None:
            raise NotImplementedError("a window with more queries than keys, one query in each sequence")
        self.entries, self.seen = entries, seen
        self.query_lengths, self.single = np.ones(len(entries), int), True

    def _packed(self, x: np.ndarray, rows: list[tuple[int, int]], padding: int) -> np.ndarray:
        """(b, h, l, d) -> (t, h, d)."""
        found = np.full((len(rows) + padding, x.shape[1], x.shape[3]), self.fill).astype(x.dtype)
        for place, (n, i) in enumerate(rows):
            found[place] = x[n, :, i]
        return found

    def _lay_pages(self, k: np.ndarray, v: np.ndarray) -> None:
        served = self.served
        total = int(self.key_lengths.sum())
        page = self.page = served.page or PAGES[total % 2]
        counts = -(-self.key_lengths // page)
        order = self.rng.permutation(int(counts.sum()) + 3)
        table = self.rng.choice([-1, 2**31 - 1, *order[-3:].tolist()], (len(counts), int(counts.max(initial=0)) + 2))
        pages = [np.full((len(order), page, x.shape[1], x.shape[3]), self.fill).astype(x.dtype) for x in (k, v)]
        first = 0
        for n, count in enumerate(counts.tolist()):
            table[n, :count] = order[first : first + count]
            first += count
            for s in range(int(self.key_lengths[n])):
                for laid, x in zip(pages, (k, v), strict=True):
                    laid[table[n, s // page], s % page] = x[n, :, s]
        self.table = table
        turned = [np.ascontiguousarray(np.swapaxes(x, 1, 2)) for x in pages] if served.kv_layout == "HND" else pages
        self.arrays = [self.queries, *turned]

    def _tables(self, named: Any) -> dict[str, Any]:
        lengths = {"q": self.query_lengths, "k": self.key_lengths}
        cumulated = {n: np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for n, x in lengths.items()}
        keys = self.key_lengths
        found: dict[str, Any] = {}
        if self.served.kind == "paged":
            single = "cu_seqlens_q" not in named
            keys = self.seen if single else self.key_lengths
            table = self.table[self.entries] if single else self.table
            found = {
                "block_table": table.astype(np.int32),
                "seq_lens": keys.astype(np.int32),
                "kv_layout": self.served.kv_layout,
            }
            cumulated["k"] = np.concatenate([[0], np.cumsum(keys)]).astype(np.int32)
        elif "cu_seqlens_k" not in named and (self.query_lengths != self.key_lengths).any():
            raise NotImplementedError("without cu_seqlens_k there are as many keys as queries")
        return {
            **found,
            "cu_seqlens_q": cumulated["q"],
            "cu_seqlens_k": cumulated["k"],
            "max_seqlen_q": int(self.query_lengths.max(initial=0)),
            "max_seqlen_k": int(keys.max(initial=0)),
        }

    def back(self, name: str, x: np.ndarray) -> np.ndarray:
        """A result of the candidate as that of the plain call; one of a wrong shape stays as it is."""
        b, n_q = self.shapes["q"][0], self.shapes["q"][2]
        rows = len(self.queries)
        if name == "lse":
            if x.shape != (self.h, rows):
                return x
            x = x.T[..., None]
        elif x.ndim != 3 or x.shape[:2] != (rows, self.h):
            return x
        empty = -np.inf if name == "lse" else 0
        found = np.full((b, self.h, n_q, x.shape[-1]), empty).astype(x.dtype)
        for place, (n, i) in enumerate(self.row_of):
            found[n, :, i] = x[place]
        if not (
            x[len(self.row_of) :] == empty
        ).all():  # rows of no sequence were written: told where every row can be seen
            found[...] = np.nan
        return found[..., 0] if name == "lse" else found

    def cotangent(self, d: Any) -> np.ndarray:
        """(b, h, q, e) -> (t, h, e), NaN in padding."""
        fill, self.fill = self.fill, np.nan
        found = self._packed(np.asarray(d), self.row_of, len(self.queries) - len(self.row_of))
        self.fill = fill
        return found

    def gradient(self, name: str, g: np.ndarray) -> np.ndarray:
        """A gradient of the candidate as that of the plain call; NaN where it wrote into what is no sequence's."""
        given = {"q": self.queries, "k": self.arrays[1], "v": self.arrays[2]}[name]
        if g.shape != given.shape:
            return g
        found = np.zeros(self.shapes[name], dtype=g.dtype)
        rest = g.copy()
        if name == "q" or self.served.kind == "packed":
            for place, (n, i) in enumerate(self.row_of if name == "q" else self.key_rows):
                found[n, :, i], rest[place] = g[place], 0
        else:
            turned, left = ((np.swapaxes(x, 1, 2) if self.served.kv_layout == "HND" else x) for x in (g, rest))
            for n, length in enumerate(self.key_lengths.tolist()):
                for s in range(length):
                    slot = self.table[n, s // self.page], s % self.page
                    found[n, :, s] = turned[slot]
                    left[slot] = 0
        if (rest != 0).any():
            found[...] = np.nan
        return found
