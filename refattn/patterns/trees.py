"""Patterns of nodes and documents that share what stands before them: trees of drafts, documents behind a common prefix."""

from typing import Any

import numpy as np

from refattn.patterns.base import Pattern, Which, host_ints

__all__ = ["SharedPrefix", "Tree"]


class Tree(Pattern):
    """Node i sees the keys of the prefix, its ancestors and itself; the key of node n is ``prefix`` + n."""

    def __init__(self, parents: np.ndarray, prefix: int) -> None:
        super().__init__("tree", parents, prefix=prefix)
        self._prefix, self._nodes = prefix, parents.size
        seen = np.eye(parents.size, dtype=bool)  # node, ancestor or itself
        for i, parent in enumerate(parents.tolist()):
            if parent >= 0:
                seen[i] |= seen[parent]
        self._seen = seen.reshape(-1)
        counts = np.zeros((parents.size, parents.size + 1), np.int64)
        np.cumsum(seen, axis=1, out=counts[:, 1:])
        self._counts = counts.reshape(-1)  # how many of the first n nodes each node sees

    def _check(self, q: int, k: int) -> None:
        if (q, k) != (self._nodes, self._nodes + self._prefix):
            raise ValueError(
                f"{self!r} is for {self._nodes} queries and {self._nodes + self._prefix} keys: got {q} and {k}"
            )

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        node = j - self._prefix
        inside = node >= 0
        return self._lookup(xp, "_seen", i * q + xp.where(inside, node, xp.zeros_like(node))) | ~inside

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        if j1 <= self._prefix:
            return "full"
        return "empty" if j0 >= self._prefix + i1 else "partial"

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Which, h: Which) -> tuple[int, int]:
        return 0, self._prefix + i1  # parents come first

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        nodes = np.maximum(np.minimum(m, k) - self._prefix, 0)
        return np.minimum(m, self._prefix) + np.take(self._counts, i * (q + 1) + nodes)


class SharedPrefix(Pattern):
    """A position sees its own document up to itself, and the whole document that stands for its prefix."""

    def __init__(self, lengths: np.ndarray, prefix_of: np.ndarray) -> None:
        super().__init__("shared_prefix", lengths, prefix_of)
        ends = np.cumsum(lengths)
        document = np.repeat(np.arange(lengths.size), lengths)
        first, last = (ends - lengths)[prefix_of], ends[prefix_of]
        none = prefix_of == np.arange(lengths.size)
        self._length = int(lengths.sum())
        self._start = (ends - lengths)[document]  # of each position: where its document begins,
        self._first, self._last = (
            np.where(none, 0, x)[document] for x in (first, last)
        )  # and its prefix begins and ends

    def _check(self, q: int, k: int) -> None:
        if (q, k) != (self._length, self._length):
            raise ValueError(f"{self!r} is for {self._length} queries and as many keys: got {q} and {k}")

    def _visible(self, xp: Any, i: Any, j: Any, b: Any, h: Any, *, q: int, k: int) -> Any:
        start, first, last = (self._lookup(xp, n, i) for n in ("_start", "_first", "_last"))
        return ((j >= start) & (j <= i)) | ((j >= first) & (j < last))

    def _rows(self, i0: int, i1: int) -> tuple[Any, ...]:
        rows = slice(i0, i1)
        return np.arange(i0, i1), self._start[rows], self._first[rows], self._last[rows]

    def _classify(self, i0: int, i1: int, j0: int, j1: int, q: int, k: int, b: Which, h: Which) -> str:
        i, start, first, last = self._rows(i0, i1)
        if np.all(((start <= j0) & (j1 <= i + 1)) | ((first <= j0) & (j1 <= last))):
            return "full"
        apart = ((j1 <= start) | (j0 > i)) & ((j1 <= first) | (j0 >= last))
        return "empty" if np.all(apart) else "partial"

    def _key_range(self, i0: int, i1: int, q: int, k: int, b: Which, h: Which) -> tuple[int, int]:
        i, start, first, last = self._rows(i0, i1)
        return int(np.where(first < last, np.minimum(start, first), start).min()), int(np.maximum(i + 1, last).max())

    def _below(self, i: np.ndarray, m: Any, b: Any, h: Any, q: int, k: int) -> Any:
        start, first, last = self._start[i], self._first[i], self._last[i]
        own = np.maximum(np.minimum(m, i + 1) - start, 0)
        return own + np.maximum(np.minimum(m, last) - first, 0)


def parents_of(parents: Any) -> np.ndarray:
    """The parent of each node, checked: -1 for a root, else a node before it."""
    found = host_ints("parents", parents)
    if found.ndim != 1:
        raise ValueError(f"parents has shape {found.shape}: expected the parent of each query, (q,)")
    wrong = np.flatnonzero((found < -1) | (found >= np.arange(found.size)))
    if wrong.size:
        raise ValueError(
            f"parents: node {wrong[0]} has the parent {found[wrong[0]]}: expected an earlier node, or -1 for a root"
        )
    return found


def documents_of(lengths: Any, prefix_of: Any) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of documents and, for each, the document that is its prefix (itself: none), checked."""
    found, prefix = host_ints("lengths", lengths), host_ints("prefix_of", prefix_of)
    if found.ndim != 1 or prefix.shape != found.shape:
        raise ValueError(
            f"lengths and prefix_of have shapes {found.shape} and {prefix.shape}: expected one number per document each"
        )
    if found.size and found.min() < 0:
        raise ValueError(f"lengths is {found.tolist()}: expected at least 0")
    if found.size and (prefix.min() < 0 or prefix.max() >= found.size):
        raise ValueError(f"prefix_of is {prefix.tolist()}: expected documents 0 ... {found.size - 1}, its own for none")
    return found, prefix
