"""Packed and paged kernels, written independently: right ones are accepted, wrong ones caught."""

import numpy as np
import pytest

import refattn as ra
from refattn.verification.candidate import open_candidate
from refattn.verification.errors import UsageError
from refattn.verification.limits import parse_sizes
from refattn.verification.session import Session

NAME = "scaled_dot_product_attention"


def softmax_attention(q, k, v, scale, hidden):
    """(h, q, d), (h, k, d), (h, k, e); rows that see nothing give 0 and -inf."""
    z = np.where(hidden, -np.inf, np.float32(scale) * (q @ k.swapaxes(1, 2)))
    top = z.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(z - np.where(np.isneginf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    lse = np.where(total[..., 0] > 0, np.log(np.where(total > 0, total, 1))[..., 0] + top[..., 0], -np.inf)
    return p @ v / np.where(total > 0, total, 1), lse.astype(q.dtype)


class Kernel:
    """Attention over sequences; what a subclass changes is its fault."""

    def rows(self, cu, n):
        return slice(int(cu[n]), int(cu[n + 1]))

    def offset(self, queries, keys):
        return keys - queries

    def scale(self, d, scale):
        return d**-0.5 if scale is None else scale

    def one(self, q, k, v, scale, causal):
        group = q.shape[1] // k.shape[1]
        q, k, v = q.swapaxes(0, 1), np.repeat(k.swapaxes(0, 1), group, 0), np.repeat(v.swapaxes(0, 1), group, 0)
        n_q, n_k = q.shape[1], k.shape[1]
        gap = np.arange(n_k) - np.arange(n_q)[:, None] - self.offset(n_q, n_k)
        return self.attention(
            q, k, v, self.scale(q.shape[-1], scale), (gap > 0) if causal else np.zeros((n_q, n_k), bool)
        )

    attention = staticmethod(softmax_attention)

    def packed(self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal=False, scale=None):
        output = np.zeros((*q.shape[:2], v.shape[2]), q.dtype)
        lse = np.full((q.shape[1], q.shape[0]), -np.inf, q.dtype)
        for n in range(len(cu_seqlens_q) - 1):
            rows, keys = self.rows(cu_seqlens_q, n), self.rows(cu_seqlens_k, n)
            o, one = self.one(q[rows], k[keys], v[keys], scale, causal)
            output[rows], lse[:, rows] = o.swapaxes(0, 1), one
        return output, lse

    def keys_of(self, pages, table, n, length):
        s = np.arange(length)
        size = pages.shape[1]
        return pages[table[n, s // size], s % size]

    values_of = None

    def length(self, seq_lens, n, page):
        return int(seq_lens[n])

    def paged(self, q, k, v, *, block_table, seq_lens, cu_seqlens_q, causal=False, scale=None):
        output = np.zeros((*q.shape[:2], v.shape[3]), q.dtype)
        lse = np.full((q.shape[1], q.shape[0]), -np.inf, q.dtype)
        for n in range(len(seq_lens)):
            length, rows = self.length(seq_lens, n, k.shape[1]), self.rows(cu_seqlens_q, n)
            keys = self.keys_of(k, block_table, n, length)
            values = (self.values_of or self.keys_of)(v, block_table, n, length)
            o, one = self.one(q[rows], keys, values, scale, causal)
            output[rows], lse[:, rows] = o.swapaxes(0, 1), one
        return output, lse


class SplitKernel(Kernel):
    """Keys in parts of three, joined by their log-sum-exps."""

    def attention(self, q, k, v, scale, hidden):
        parts = [
            softmax_attention(q, k[:, a : a + 3], v[:, a : a + 3], scale, hidden[:, a : a + 3])
            for a in range(0, max(1, k.shape[1]), 3)
        ]
        return self.merge(parts)

    def merge(self, parts):
        lse = parts[0][1]
        for _, one in parts[1:]:
            lse = np.logaddexp(lse, one)
        safe = np.where(np.isneginf(lse), 0, lse)
        return sum(np.exp(one - safe)[..., None] * o for o, one in parts), lse


class Decode(Kernel):
    def decode(self, q, k, v, *, block_table, seq_lens, scale=None):
        """One query in each sequence, lower right: no mask is needed."""
        return self.paged(
            q, k, v, block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=np.arange(len(q) + 1), scale=scale
        )


def one_mask(q, k, v, *, cu_seqlens_q, cu_seqlens_k, scale=None, causal=False):
    """All sequences in one product, the others masked."""
    ids = [np.repeat(np.arange(len(c) - 1), np.diff(c)) for c in (cu_seqlens_q, cu_seqlens_k)]
    at = [np.arange(c[-1]) - np.repeat(c[:-1], np.diff(c)) for c in (cu_seqlens_q, cu_seqlens_k)]
    offset = np.diff(cu_seqlens_k) - np.diff(cu_seqlens_q)
    hidden = ids[0][:, None] != ids[1]
    if causal:
        hidden = hidden | (at[1] > at[0][:, None] + offset[ids[0]][:, None])
    group, rows = q.shape[1] // k.shape[1], cu_seqlens_q[-1]
    heads = lambda x, n: np.repeat(x[: cu_seqlens_k[-1]].swapaxes(0, 1), n, 0)  # noqa: E731
    o, one = softmax_attention(
        q[:rows].swapaxes(0, 1),
        heads(k, group),
        heads(v, group),
        q.shape[-1] ** -0.5 if scale is None else scale,
        hidden,
    )
    output, lse = np.zeros((*q.shape[:2], v.shape[2]), q.dtype), np.full((q.shape[1], len(q)), -np.inf, q.dtype)
    output[:rows], lse[:, :rows] = o.swapaxes(0, 1), one
    return output, lse


def heads_first(q, k, v, *, block_table, seq_lens, cu_seqlens_q, causal=False, scale=None):
    swapped = (np.swapaxes(x, 1, 2) for x in (k, v))
    return Kernel().paged(
        q, *swapped, block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, causal=causal, scale=scale
    )


RIGHT = {
    "packed": (Kernel().packed, {"layout": "packed"}),
    "packed_mask": (one_mask, {"layout": "packed"}),
    "packed_split": (SplitKernel().packed, {"layout": "packed"}),
    "paged": (Kernel().paged, {"layout": "paged"}),
    "paged_split": (SplitKernel().paged, {"layout": "paged", "page": 4}),
    "paged_heads_first": (heads_first, {"layout": "paged", "kv_layout": "HND"}),
    "decode": (Decode().decode, {"layout": "paged"}),
}


class UpperLeft(Kernel):
    def offset(self, queries, keys):
        return 0


class Leak(Kernel):
    """A sequence sees one key of the next."""

    def packed(self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal=False, scale=None):
        more = np.minimum(cu_seqlens_k + (np.arange(len(cu_seqlens_k)) > 0), cu_seqlens_k[-1])
        output, lse = np.zeros((*q.shape[:2], v.shape[2]), q.dtype), np.full((q.shape[1], len(q)), -np.inf, q.dtype)
        for n in range(len(cu_seqlens_q) - 1):
            rows, keys = self.rows(cu_seqlens_q, n), slice(int(cu_seqlens_k[n]), int(more[n + 1]))
            o, one = self.one(q[rows], k[keys], v[keys], scale, causal)
            output[rows], lse[:, rows] = o.swapaxes(0, 1), one
        return output, lse


class QueryLengths(Kernel):
    """The lengths of queries are taken for those of keys."""

    def packed(self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal=False, scale=None):
        return super().packed(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=np.minimum(cu_seqlens_q, len(k)),
            causal=causal,
            scale=scale,
        )


class PaddingWritten(Kernel):
    def packed(self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal=False, scale=None):
        output, lse = super().packed(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, causal=causal, scale=scale
        )
        output[cu_seqlens_q[-1] :] = 1
        return output, lse


class ChangesKeys(Kernel):
    def packed(self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal=False, scale=None):
        found = super().packed(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, causal=causal, scale=scale
        )
        k[-1] = 0
        return found


class LastPageFull(Kernel):
    def length(self, seq_lens, n, page):
        return -(-int(seq_lens[n]) // page) * page


class PageExtra(Kernel):
    """A page more than needed is read where the length is a multiple of the page."""

    def keys_of(self, pages, table, n, length):
        size = pages.shape[1]
        s = np.arange(length + (size if length % size == 0 and length else 0))
        return pages[np.clip(table[n, s // size], 0, len(pages) - 1), s % size]


class StaleSlot(Kernel):
    def length(self, seq_lens, n, page):
        return int(seq_lens[n]) + (int(seq_lens[n]) % page != 0)


class LastKeyLost(Kernel):
    def length(self, seq_lens, n, page):
        return max(0, int(seq_lens[n]) - 1)


class OtherRow(Kernel):
    def keys_of(self, pages, table, n, length):
        return super().keys_of(pages, np.clip(np.roll(table, 1, 0), 0, len(pages) - 1), n, length)


class PageOrder(Kernel):
    def keys_of(self, pages, table, n, length):
        count = -(-length // pages.shape[1])
        order = np.concatenate([table[n, :count][::-1], table[n, count:]])
        return super().keys_of(pages, order[None], 0, length)


class ValuePage(Kernel):
    """The values of the first page, whatever the table says."""

    def values_of(self, pages, table, n, length):
        first = np.broadcast_to(table[n, :1], table[n].shape)
        return self.keys_of(pages, first[None], 0, length)


class LongestLength(Kernel):
    def length(self, seq_lens, n, page):
        return int(seq_lens.max())

    def keys_of(self, pages, table, n, length):
        return super().keys_of(pages, np.clip(table, 0, len(pages) - 1), n, length)


class MergeUnweighted(SplitKernel):
    def merge(self, parts):
        return sum(o for o, _ in parts) / len(parts), super().merge(parts)[1]


class MergeBase2(SplitKernel):
    def merge(self, parts):
        lse = super().merge(parts)[1]
        safe = np.where(np.isneginf(lse), 0, lse)
        weights = [np.exp2(one - safe)[..., None] for _, one in parts]
        total = sum(weights)
        return sum(w * o for w, (o, _) in zip(weights, parts, strict=True)) / np.where(total > 0, total, 1), lse


PACKED = (UpperLeft, Leak, QueryLengths, PaddingWritten, ChangesKeys, MergeUnweighted, MergeBase2)
PAGED = (
    *(UpperLeft, LastPageFull, PageExtra, StaleSlot, LastKeyLost, OtherRow, PageOrder, ValuePage, LongestLength),
    MergeUnweighted,
)
WRONG = {c.__name__: (c().packed, "packed") for c in PACKED} | {
    f"{c.__name__}Paged": (c().paged, "paged") for c in PAGED
}


SIZES = "b=3,q=7,k=12,h=6,g=2,d=8,e=5"


def rows_of(kernel, layout):
    """What the calls of a verification give, without the search for what explains a mismatch."""
    mechanism = ra.mechanisms[NAME]
    with open_candidate(kernel, mechanism, layout=layout) as opened:
        session = Session(opened, mechanism, dtypes=("float32",), gradients=False, limits=parse_sizes(SIZES))
        session.run()
        return session.rows


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_are_accepted(name):
    kernel, settings = RIGHT[name]
    report = ra.verify(kernel, NAME, sizes=SIZES, **settings)
    assert report.ok, report.table()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_caught(name):
    kernel, layout = WRONG[name]
    rows = rows_of(kernel, "paged:NHD:4" if layout == "paged" else layout)
    assert any(row.status == "mismatch" for row in rows)


def backward(d_output, q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal=False, scale=None):
    """Gradients of the packed kernel, sequence by sequence."""
    found = [np.zeros_like(x) for x in (q, k, v)]
    for n in range(len(cu_seqlens_q) - 1):
        rows, keys = slice(*cu_seqlens_q[n : n + 2]), slice(*cu_seqlens_k[n : n + 2])
        group = q.shape[1] // k.shape[1]
        queries, d = q[rows].swapaxes(0, 1), d_output[rows].swapaxes(0, 1)
        spread = [np.repeat(x[keys].swapaxes(0, 1), group, 0) for x in (k, v)]
        c = q.shape[-1] ** -0.5 if scale is None else scale
        gap = (
            np.arange(spread[0].shape[1])
            - np.arange(queries.shape[1])[:, None]
            - (spread[0].shape[1] - queries.shape[1])
        )
        z = np.where((gap > 0) & bool(causal), -np.inf, np.float32(c) * (queries @ spread[0].swapaxes(1, 2)))
        top = z.max(-1, keepdims=True, initial=-np.inf)
        p = np.exp(z - np.where(np.isneginf(top), 0, top))
        p = p / np.where(p.sum(-1, keepdims=True) > 0, p.sum(-1, keepdims=True), 1)
        d_p = d @ spread[1].swapaxes(1, 2)
        d_z = np.float32(c) * p * (d_p - (p * d_p).sum(-1, keepdims=True))
        found[0][rows] = (d_z @ spread[0]).swapaxes(0, 1)
        for x, g in ((found[1], d_z.swapaxes(1, 2) @ queries), (found[2], p.swapaxes(1, 2) @ d)):
            x[keys] = g.reshape(k.shape[1], group, *g.shape[1:]).sum(1).swapaxes(0, 1)
    return tuple(found)


def without_first_group(*arrays, **options):
    """A backward that leaves the last row of the keys' gradients out."""
    d_q, d_k, d_v = backward(*arrays, **options)
    d_k[max(0, options["cu_seqlens_k"][-1] - 1)] = 0
    return d_q, d_k, d_v


def test_backward_of_packed_kernels():
    right = ra.verify(Kernel().packed, NAME, layout="packed", backward=backward, sizes=SIZES)
    assert right.ok, right.table()
    assert not ra.verify(Kernel().packed, NAME, layout="packed", backward=without_first_group, sizes=SIZES).ok


def test_what_a_layout_needs_is_said():
    with pytest.raises(UsageError, match="does not name block_table, seq_lens"):
        ra.verify(Kernel().packed, NAME, layout="paged")
    with pytest.raises(UsageError, match="kv_layout is 'DHN'"):
        ra.verify(Kernel().paged, NAME, layout="paged", kv_layout="DHN")
    with pytest.raises(UsageError, match="kv_layout and page are for layout 'paged'"):
        ra.verify(Kernel().packed, NAME, layout="packed", page=4)
    with pytest.raises(UsageError, match="packed and paged are for NumPy kernels"):
        ra.verify(Kernel().packed, "topk_attention", layout="packed")
