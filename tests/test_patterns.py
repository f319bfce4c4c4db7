"""Patterns against loops that read like their sentences in the documentation."""

import json
import pickle
import sys
import time
from pathlib import Path

import array_api_strict
import numpy as np
import pytest

from refattn import patterns

DATA = Path(__file__).parent / "data" / "openai_sparse"
SIZES = [(5, 5), (4, 7), (7, 4), (1, 6), (6, 1), (9, 9), (0, 3), (3, 0)]


def loop(rule, q, k, batch, heads):
    """(batch, heads, q, k) bool by asking ``rule(b, h, i, j)`` for every pair."""
    mask = np.zeros((batch, heads, q, k), bool)
    for at in np.ndindex(mask.shape):
        mask[at] = rule(*at)
    return mask


def make(name, q, k, rng):
    """A pattern, its rule, and its batch and head counts (None: not distinguished)."""
    p = patterns
    if name.startswith("causal"):
        align = {"left": "upper_left", "right": "lower_right", "back": -2, "ahead": 3}[name.split()[1]]
        offset = {"upper_left": 0, "lower_right": k - q}.get(align, align)
        return p.causal(align=align), lambda b, h, i, j: j <= i + offset, None, None
    if name.startswith("window"):
        left, right, offset = {
            "a": (2, 1, 0),
            "b": (0, 0, -2),
            "c": (None, 1, 1),
            "d": (1, None, -1),
            "e": (None, None, 0),
        }[name.split()[1]]
        low, high = (1e9 if x is None else x for x in (left, right))
        return p.window(left, right, align=offset), lambda b, h, i, j: -low <= j - i - offset <= high, None, None
    if name == "aligned per batch":
        offsets = rng.integers(-3, 4, 3)
        return p.causal(align=offsets), lambda b, h, i, j: j <= i + offsets[b], 3, None
    if name == "aligned window":
        offsets = rng.integers(-3, 4, (1, 3))
        return p.window(1, 0, align=offsets), lambda b, h, i, j: 0 <= i + offsets[0, b] - j <= 1, 3, None
    if name.startswith("chunk"):
        align = {"left": "upper_left", "right": "lower_right", "back": -2, "ahead": 2, "batch": rng.integers(-3, 4, 3)}
        align = align[name.split()[1]]
        offset = {"upper_left": 0, "lower_right": k - q}.get(align, align) if isinstance(align, str) else align
        place = lambda b, i: i + (offset[b] if np.ndim(offset) else offset)  # noqa: E731
        return p.chunk(3, align), lambda b, h, i, j: place(b, i) // 3 == j // 3, 3 if np.ndim(offset) else None, None
    if name == "tree":
        parents = [int(rng.integers(-1, n)) for n in range(q)]
        prefix = max(k - q, 0)
        above = [set() for _ in range(q)]
        for n, parent in enumerate(parents):
            above[n] = {n} | (above[parent] if parent >= 0 else set())
        pattern = p.tree(parents, prefix=prefix)
        return pattern, lambda b, h, i, j: j < prefix or j - prefix in above[i], None, None
    if name == "shared prefix":
        lengths = rng.multinomial(q, np.ones(3) / 3)
        prefix_of, document = rng.integers(0, 3, 3), np.repeat(np.arange(3), lengths)
        rule = lambda b, h, i, j: (  # noqa: E731
            (document[i] == document[j] and j <= i)
            or (document[j] == prefix_of[document[i]] and document[i] != document[j])
        )
        return p.shared_prefix(lengths, prefix_of), rule, None, None
    if name == "prefix":
        return p.prefix(3), lambda b, h, i, j: j < 3, None, None
    if name == "dilated":
        return p.dilated(3), lambda b, h, i, j: abs(i - j) in range(0, 99, 3), None, None
    if name.startswith("strided"):
        _, part, variant = name.split()
        band = range(4) if variant == "paper" else range(3)
        return (
            p.strided(3, part, variant),
            lambda b, h, i, j: (part != "second" and i - j in band) or (part != "first" and i - j in range(0, 99, 3)),
            None,
            None,
        )
    if name.startswith("fixed"):
        part = name.split()[1]
        offsets = np.array([0, 2, 1]) if "heads" in name else np.array([1])
        columns = [{4 - o - 1, 4 - o - 2} for o in offsets] if "heads" in name else [{4 - 1 - 1, 4 - 1 - 2}]
        own = lambda i, j: any(4 * n <= j <= i < 4 * n + 4 for n in range(99))  # noqa: E731
        return (
            p.fixed(4, 2, part, summary_offsets=offsets if "heads" in name else 1),
            lambda b, h, i, j: (
                j <= i
                and (
                    (part != "second" and own(i, j))
                    or (part != "first" and j % 4 in columns[h if "heads" in name else 0])
                )
            ),
            None,
            3 if "heads" in name and part != "first" else None,
        )
    if name.startswith("documents"):
        if "sorted" in name:
            a, c = np.sort(rng.integers(0, 3, (2, q)), -1), np.sort(rng.integers(0, 3, (2, k)), -1)
        elif "one" in name:
            a, c = rng.integers(-1, 2, q), rng.integers(-1, 3, k)
            return p.documents(a, c), lambda b, h, i, j: a[i] == c[j], None, None
        else:
            a, c = rng.integers(0, 3, (1, q)), rng.integers(0, 4, (2, k))
            return p.documents(a, c), lambda b, h, i, j: a[0, i] == c[b, j], 2, None
        return p.documents(a, c), lambda b, h, i, j: a[b, i] == c[b, j], 2, None
    if name.startswith("lengths"):
        a, c = rng.integers(0, q + 1, 3), rng.integers(0, k + 1, 3)
        if "keys" in name:
            return p.lengths(key_lengths=c), lambda b, h, i, j: j < c[b], 3, None
        if "queries" in name:
            return p.lengths(query_lengths=a), lambda b, h, i, j: i < a[b], 3, None
        return p.lengths(a, c), lambda b, h, i, j: i < a[b] and j < c[b], 3, None
    if name.startswith("blocks"):
        shape = (-(-q // 2), -(-k // 2))
        layout = rng.random((3, *shape) if "heads" in name else shape) < 0.5
        whole = np.broadcast_to(layout, (3, *shape))
        return p.blocks(layout, 2), lambda b, h, i, j: whole[h, i // 2, j // 2], None, 3 if "heads" in name else None
    if name.startswith("dense"):
        shape = {"dense": (q, k), "dense heads": (3, q, k), "dense batch": (2, 1, q, k), "dense all": (2, 3, q, k),
                 "dense keys": (2, 1, 1, k), "dense rows": (q, 1)}[name]  # fmt: skip
        mask = rng.random(shape) < 0.5
        whole = np.broadcast_to(mask, (2, 3, q, k))
        lead = (1,) * (4 - mask.ndim) + shape
        return (
            p.dense(mask),
            lambda b, h, i, j: whole[b, h, i, j],
            *(n if n > 1 else None for n in lead[:2]),
        )
    if name == "mask_mod":
        return p.mask_mod(lambda b, h, i, j: (i * j) % 3 == 0), lambda b, h, i, j: i * j % 3 == 0, None, None
    if name == "by head":
        parts = [make(n, q, k, rng) for n in ("window a", "dilated", "fixed both")]
        return (
            p.by_head([x[0] for x in parts], [2, 0, 1]),
            lambda b, h, i, j: parts[[2, 0, 1][h]][1](b, h, i, j),
            None,
            3,
        )
    if name == "aligned by head":
        parts = [make(n, q, k, rng) for n in ("aligned per batch", "prefix")]
        return p.by_head([x[0] for x in parts], [0, 1, 0]), lambda b, h, i, j: parts[h % 2][1](b, h, i, j), 3, 3
    raise KeyError(name)


NAMES = [
    *("causal left", "causal right", "causal back", "causal ahead"),
    *("window a", "window b", "window c", "window d", "window e", "aligned per batch", "aligned window"),
    *("prefix", "dilated", "strided first paper", "strided second paper", "strided both paper"),
    *("strided first code", "strided both code", "fixed first", "fixed second", "fixed both"),
    *("fixed second heads", "fixed both heads", "documents", "documents sorted", "documents one"),
    *("lengths", "lengths keys", "lengths queries", "blocks", "blocks heads"),
    *("dense", "dense heads", "dense batch", "dense all", "dense keys", "dense rows", "mask_mod"),
    *("by head", "aligned by head", "chunk left", "chunk right", "chunk back", "chunk ahead"),
]
ALONE = {
    "chunk batch": SIZES,
    "tree": [(q, k) for q, k in SIZES if q <= k],
    "shared prefix": [(5, 5), (9, 9), (0, 0), (1, 1)],
}
"""Of one size, or with batch entries: not drawn into combinations."""


def hold(pattern, rule, q, k, batch, heads, rng, exact=False):
    """Every answer of the pattern against the loop."""
    nb, nh = batch or 2, heads or 3
    want = loop(rule, q, k, nb, nh)
    mask = pattern.to_mask(q, k)
    minimal = (batch, heads or 1) if batch else (heads,) if heads else ()
    assert mask.shape == (*minimal, q, k)
    assert mask.dtype == bool
    assert np.array_equal(np.broadcast_to(mask, want.shape), want)
    assert np.array_equal(np.broadcast_to(pattern.to_mask(q, k, batch=nb, heads=nh), want.shape), want)
    assert pattern.pairs(q, k) == mask.sum()
    assert type(pattern.pairs(q, k)) is int
    assert pattern.pairs(q, k, batch=nb, heads=nh) == want.sum()
    assert np.array_equal(pattern.row_counts(q, k), mask.sum(-1))
    assert np.array_equal(np.broadcast_to(pattern.row_counts(q, k, batch=nb, heads=nh), want.shape[:-1]), want.sum(-1))

    b, h, i, j = np.ix_(*map(np.arange, want.shape))
    assert np.array_equal(np.broadcast_to(pattern.visible(i, j, q=q, k=k, b=b, h=h), want.shape), want)
    strict = [array_api_strict.asarray(x) for x in (i, j, b, h)]
    seen = pattern.visible(strict[0], strict[1], q=q, k=k, b=strict[2], h=strict[3])
    assert isinstance(seen, type(strict[0]))
    assert np.array_equal(np.broadcast_to(np.asarray(seen), want.shape), want)

    for _ in range(12):
        i0, i1 = np.sort(rng.integers(0, q + 1, 2)).tolist()
        j0, j1 = np.sort(rng.integers(0, k + 1, 2)).tolist()
        bs = rng.permutation(nb)[: rng.integers(1, nb + 1)]
        hs = rng.permutation(nh)[: rng.integers(1, nh + 1)]
        part = want[bs][:, hs][:, :, i0:i1, j0:j1]
        for xp in (np, array_api_strict):
            got = pattern.tile(i0, i1, j0, j1, q=q, k=k, b=bs, h=hs[:, None], xp=xp)
            got = np.broadcast_to(np.asarray(got), (len(bs), len(hs), 1, i1 - i0, j1 - j0))[:, :, 0]
            assert np.array_equal(got, part)
        for which in ({"b": bs, "h": hs}, {"b": bs.tolist(), "h": range(nh)}, {"b": int(bs[0]), "h": int(hs[0])}, {}):
            chosen = want[np.atleast_1d(which.get("b", np.arange(nb)))][:, np.atleast_1d(which.get("h", np.arange(nh)))]
            chosen = chosen[:, :, i0:i1]
            piece = chosen[..., j0:j1]
            kind = pattern.classify(i0, i1, j0, j1, q=q, k=k, **which)
            true = "empty" if not piece.any() else "full" if piece.all() else "partial"
            assert kind in (true, "partial"), (pattern, i0, i1, j0, j1, which)
            if exact:
                assert kind == true, (pattern, i0, i1, j0, j1, which)
            first, end = pattern.key_range(i0, i1, q=q, k=k, **which)
            assert 0 <= first <= end <= k
            assert not chosen[..., :first].any()
            assert not chosen[..., end:].any()


# classify promises nothing beyond what is certain; for these it always knows
EXACT = {*NAMES[:9], "prefix", "dilated", *(n for n in NAMES if n.startswith("strided")), "fixed first", "fixed second"}
EXACT |= {"aligned per batch", "aligned window", "lengths", "lengths keys", "lengths queries"}
EXACT |= {"dense", "dense heads", "dense batch", "dense all", "dense keys", "dense rows", "blocks", "blocks heads"}


@pytest.mark.parametrize("name", NAMES)
def test_every_answer_agrees_with_a_loop(name):
    rng = np.random.default_rng(NAMES.index(name))
    for q, k in SIZES:
        pattern, rule, batch, heads = make(name, q, k, rng)
        hold(pattern, rule, q, k, batch, heads, rng, exact=name in EXACT)


@pytest.mark.parametrize("name", ALONE)
def test_every_answer_of_chunks_and_trees_agrees_with_a_loop(name):
    rng = np.random.default_rng(len(name))
    for q, k in ALONE[name]:
        pattern, rule, batch, heads = make(name, q, k, rng)
        hold(pattern, rule, q, k, batch, heads, rng)


@pytest.mark.parametrize("seed", range(18))
def test_combinations_agree_with_a_loop(seed):
    rng = np.random.default_rng(1000 + seed)
    for q, k in ((5, 7), (7, 5), (6, 6)):
        names = rng.choice([n for n in NAMES if not n.startswith("aligned") and not n.startswith("lengths")], 3)
        if seed % 3 == 0:
            names = rng.choice([n for n in NAMES if n.startswith(("aligned", "lengths", "causal", "window"))], 3)
        made = [make(n, q, k, rng) for n in names]
        pattern, rule, batch, heads = made[0]
        for other, its, nb, nh in made[1:]:
            mine = rule
            symbol = rng.choice(["&", "|", "&~", "~|", "~&"])
            pattern = {
                "&": lambda a, b: a & b,
                "|": lambda a, b: a | b,
                "&~": lambda a, b: a & ~b,
                "~|": lambda a, b: ~(a | b),
                "~&": lambda a, b: ~a & ~b,
            }[symbol](pattern, other)
            rule = {
                "&": lambda *at, a=mine, b=its: a(*at) and b(*at),
                "|": lambda *at, a=mine, b=its: a(*at) or b(*at),
                "&~": lambda *at, a=mine, b=its: a(*at) and not b(*at),
                "~|": lambda *at, a=mine, b=its: not (a(*at) or b(*at)),
                "~&": lambda *at, a=mine, b=its: not a(*at) and not b(*at),
            }[symbol]
            batch, heads = batch or nb, heads or nh
        hold(pattern, rule, q, k, batch, heads, rng)


def test_large_counts_go_by_rows_not_by_pairs(monkeypatch):
    """Counts of section 4.2 sizes; walking 65536 x 65536 pairs would be seen as a call of tile."""
    monkeypatch.setattr(patterns.Pattern, "tile", None)
    cases = {
        (16, 4): (70, 40, 82, 136),
        (3072, 32): (100848, 148992, 243728, 4720128),
        (12288, 128): (1576896, 595968, 2148416, 75503616),
        (65536, 256): (16809856, 8421376, 25100416, 2147516416),
    }
    for (n, stride), counts in cases.items():
        made = [patterns.strided(stride, part) for part in ("first", "second", "both")]
        assert tuple(p.pairs(n, n) for p in (*made, patterns.causal())) == counts
        assert (made[0] | made[1]).pairs(n, n) == counts[2]
    assert patterns.fixed(128, 8, "first").pairs(12288, 12288) == 792576
    assert patterns.fixed(128, 8, "second").pairs(12288, 12288) == 4672896
    assert patterns.fixed(128, 8).pairs(12288, 12288) == 5462016
    assert patterns.fixed(128, 32).pairs(12288, 12288) == 19470336
    million = 10**6
    assert patterns.window(99, 0).pairs(million, million) == 100 * million - 99 * 100 // 2
    assert (patterns.causal() & patterns.dilated(1000)).pairs(million, million) == sum(
        i // 1000 + 1 for i in range(million)
    )
    document = patterns.documents(np.arange(million) // 1000, np.arange(million) // 1000)
    assert document.pairs(million, million) == 1000 * million
    assert (document & patterns.causal()).pairs(million, million) == 1000 * (1000 * 1001 // 2)
    assert patterns.lengths([3, million], [4, 5]).pairs(million, million) == 3 * 4 + 5 * million


def drawn(rng, q, k):
    """A pattern of random kind, with ends that meet the edges of q x k in every way."""
    count = lambda high: int(rng.integers(0, high))  # noqa: E731
    align = ["upper_left", "lower_right", count(100) - 50, rng.integers(-30, 30, 3)][count(4)]
    stride = 4 + count(16)
    return [
        lambda: patterns.causal(align),
        lambda: patterns.window(None if count(3) == 0 else count(60), None if count(3) == 0 else count(60), align),
        lambda: patterns.prefix(count(k + 9)),
        lambda: patterns.dilated(1 + count(8)),
        lambda: patterns.strided(stride, ["both", "first", "second"][count(3)]),
        lambda: patterns.fixed(stride, 1 + count(2), summary_offsets=rng.integers(0, stride - 2, 2)),
        lambda: patterns.lengths(rng.integers(0, q + 1, 3), rng.integers(0, k + 1, 3)),
        lambda: patterns.documents(np.sort(rng.integers(0, 3, (3, q))), np.sort(rng.integers(0, 3, (3, k)))),
        lambda: patterns.blocks(rng.random((-(-q // stride), -(-k // stride))) < 0.4, stride),
    ][count(9)]()


@pytest.mark.parametrize("seed", range(60))
def test_counts_from_few_rows_are_those_of_the_mask(seed):
    rng = np.random.default_rng(seed)
    q, k = (int(n) for n in rng.integers(1, 500, 2))
    pattern = drawn(rng, q, k)
    for _ in range(seed % 3):
        other = drawn(rng, q, k)
        pattern = [pattern & other, pattern | other, ~pattern & other][rng.integers(3)]
    counts = np.count_nonzero(pattern.to_mask(q, k), axis=-1)
    assert pattern.pairs(q, k) == counts.sum()
    for most in (0, 1, 5, 40, 600):
        assert pattern.pairs(q, k, most=most) == np.minimum(counts, most).sum()
    np.testing.assert_array_equal(pattern.row_counts(q, k), counts)


@pytest.mark.parametrize("n", [10**6, 10**12])
def test_counts_of_any_size_take_no_time(n):
    """A tenth of a second is a thousand times what they take; walking a million rows takes as long."""
    start = time.perf_counter()
    assert patterns.causal().pairs(n, n) == n * (n + 1) // 2
    assert (patterns.causal() & patterns.window(4, 4) | patterns.prefix(3)).pairs(n, n) == 8 * n - 25
    near, second, common = 1001 * n - 1000 * 1001 // 2, 1000 * (n // 1000) * (n // 1000 + 1) // 2, 2 * n - 1000
    assert patterns.strided(1000).pairs(n, n) == near + second - common
    assert time.perf_counter() - start < 0.1


HUGE = [sys.maxsize, -sys.maxsize, 10**30, -(10**30)]


@pytest.mark.parametrize("n", HUGE)
def test_huge_counts_and_offsets_do_not_wrap(n):
    q, k = 4, 5
    i, j = np.arange(q)[:, None], np.arange(k)
    cases = [(patterns.causal(n), j <= i.astype(object) + n), (patterns.chunk(3, n), np.zeros((q, k), bool))]
    if n == sys.maxsize:
        cases += [
            (patterns.window(1, n, 0), j >= i - 1),
            (patterns.chunk(n, 0), j >= 0 * i),
            (patterns.chunk(n, -1), (j >= 0) & (i >= 1)),
            (patterns.chunk(n, n - 2), (j >= 0) & (i < 2)),
            (patterns.window(n, 1, 0), j <= i + 1),
            (patterns.window(n, n, align=-n), j <= i),
            (patterns.strided(n), j <= i),
            (patterns.strided(n, "second"), j == i),
            (patterns.dilated(n), j == i),
            (patterns.fixed(n, 1), j <= i),
            (patterns.fixed(n, n, "second"), j <= i),
            (patterns.fixed(n, 2, "second"), np.zeros((q, k), bool)),
        ]
    if abs(n) == sys.maxsize:
        cases.append((patterns.window(1, sys.maxsize, align=np.array([n])), (j <= i) & (n < 0)))
    for pattern, want in cases:
        np.testing.assert_array_equal(pattern.to_mask(q, k), want.astype(bool), err_msg=repr(pattern))
        assert pattern.pairs(q, k) == np.count_nonzero(want)
        lowest, highest = pattern.key_range(1, 3, q=q, k=k)
        assert not np.delete(want[1:3], np.s_[lowest:highest], axis=1).any()
        assert pattern.classify(0, q, 0, k, q=q, k=k) == (
            "full" if want.all() else "partial" if want.any() else "empty"
        )


def test_short_and_unsigned_positions_do_not_wrap():
    i, j = np.arange(3, dtype=np.uint8)[:, None], np.arange(4, dtype=np.int8)
    for pattern in (patterns.dilated(2), patterns.strided(2), patterns.window(1, 0, -1)):
        np.testing.assert_array_equal(pattern.visible(i, j, q=3, k=4), pattern.to_mask(3, 4))


def test_counting_by_tiles_skips_what_is_empty_or_full():
    """Neither part is an interval, so only the tiles on the edge are looked at."""
    n = 4096
    seen = []

    def rule(b, h, i, j):
        seen.append(i.size * j.size)
        return (i + j) % 2 == 0

    pattern = patterns.mask_mod(rule) & patterns.documents(np.arange(n) // 64, np.arange(n) // 64) & patterns.dilated(1)
    assert pattern.pairs(n, n) == n // 64 * 64 * 32
    assert max(seen) <= 1 << 18


def test_a_band_of_a_million_keys_is_found_without_walking_them():
    n = 10**6
    pattern = patterns.window(255, 0, align="upper_left") & patterns.lengths(key_lengths=[n, 500])
    assert pattern.key_range(1000, 1256, q=n, k=n, b=0) == (745, 1256)
    assert pattern.key_range(1000, 1256, q=n, k=n, b=1) == (0, 0)
    assert pattern.key_range(700, 1256, q=n, k=n) == (445, 1256)
    assert (pattern | patterns.prefix(4)).key_range(1000, 1256, q=n, k=n, b=1) == (0, 4)


@pytest.mark.parametrize("case", ["local_8", "strided_1", "fixed_nv1_vs2", "fixed_nv2_vs2"])
def test_masks_of_the_released_sparse_transformer_code(case):
    options = json.loads((DATA / f"{case}.json").read_text())["options"]
    arrays = np.load(DATA / f"{case}.npz")
    n, stride, heads = options["n"], options["local_attn_ctx"], options["heads"]
    if options["attn_mode"] == "fixed":
        summary = options["blocksize"] * options["vertsize"]
        offsets = np.arange(heads) % options["num_verts"] * summary
        pattern = patterns.fixed(stride, summary, summary_offsets=offsets if options["num_verts"] > 1 else 0)
        layout = patterns.blocks(arrays["out_block_layout"], options["blocksize"]) & patterns.causal()
        want = arrays["out_blocksparse_keep_mask"]
        assert np.array_equal(np.broadcast_to(layout.to_mask(n, n), want.shape), want)
    else:
        part = {"local": "first", "strided": "second"}[options["attn_mode"]]
        pattern = patterns.strided(stride, part=part, variant="code")
        want = arrays["out_keep_mask"]
    assert np.array_equal(np.broadcast_to(pattern.to_mask(n, n), want.shape), want)


def test_leading_axes_are_flattened_and_broadcast():
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 2, (2, 1, 4))
    mask = rng.random((3, 1, 4, 4)) < 0.5
    pattern = patterns.documents(ids, ids) & patterns.dense(mask)
    fitted = pattern.fit(4, 4, batch=(2, 3), heads=5)
    same = ids[..., :, None] == ids[..., None, :]
    want = (same & mask[:, 0])[:, :, None].reshape(6, 1, 4, 4)
    assert np.array_equal(fitted.to_mask(4, 4), want)
    assert fitted.pairs(4, 4) == want.sum()
    assert fitted.pairs(4, 4, batch=6, heads=5) == 5 * want.sum()
    b = np.array([4, 1])
    i, j = np.arange(4)[:, None], np.arange(4)
    assert np.array_equal(fitted.visible(i, j, q=4, k=4, b=b[:, None, None]), want[b, 0])
    for at in range(6):
        kind = fitted.classify(0, 4, 0, 4, q=4, k=4, b=at)
        assert kind == "partial" or want[at].all() == (kind == "full")
    flat = patterns.causal(align=np.arange(6))
    assert flat.fit(4, 4, batch=(2, 3)).to_mask(4, 4).shape == (6, 1, 4, 4)
    with pytest.raises(ValueError, match=r"causal\(align=\[0, 1, 2, 3, 4, 5\]\).*\(6,\).*\(2, 4\)"):
        flat.fit(4, 4, batch=(2, 4))
    with pytest.raises(ValueError, match="3 heads of its own: 4"):
        patterns.blocks(np.ones((3, 2, 2), bool), 2).fit(4, 4, heads=4)
    with pytest.raises(ValueError, match="2 and 3 batch entries"):
        (patterns.prefix([1, 2]) & patterns.prefix([1, 2, 3])).to_mask(4, 4)


def test_a_dense_mask_is_sliced_in_its_own_library_and_moved_once_to_another():
    mask = np.random.default_rng(0).random((2, 3, 5, 7)) < 0.5
    strict = patterns.dense(array_api_strict.asarray(mask))
    assert np.array_equal(strict.to_mask(5, 7), mask)
    h = np.array([[2], [0]])
    tile = strict.tile(1, 4, 2, 6, q=5, k=7, b=np.array([1]), h=h, xp=array_api_strict)
    assert np.array_equal(np.asarray(tile), mask[[1]][:, h.ravel()][..., 1:4, 2:6].reshape(1, 2, 1, 3, 4))
    plain = patterns.dense(mask)
    assert np.shares_memory(plain.tile(1, 4, 2, 6, q=5, k=7, b=np.array([0]), h=np.array([[0, 1]])), mask)


def test_reads_like_its_constructor_and_compares_by_value():
    p = patterns
    assert repr(p.causal()) == "causal()"
    assert repr(p.window(3, None, align="lower_right")) == "window(3, None, align='lower_right')"
    assert repr(p.strided(4, "first", "code")) == "strided(4, part='first', variant='code')"
    assert repr(p.fixed(8, 2, summary_offsets=[0, 2])) == "fixed(8, 2, part='both', summary_offsets=[0, 2])"
    assert repr(p.lengths(key_lengths=[1, 2])) == "lengths(key_lengths=[1, 2])"
    assert repr(p.dense(np.ones((2, 3), bool))) == "dense(<bool (2, 3)>)"
    a, b, c = p.causal(), p.prefix(2), p.dilated(3)
    assert repr((a & b) & c) == "causal() & prefix(2) & dilated(3)"
    assert repr(~(a | b) & ~c) == "~(causal() | prefix(2)) & ~dilated(3)"
    assert ~~a is a
    assert (a & b) & c == a & (b & c)
    assert a & b != b & a
    assert hash(p.documents([1, 2], [1, 2])) == hash(p.documents(np.array([1, 2]), [1, 2]))
    assert p.documents([1, 2], [1, 2]) == p.documents(np.array([1, 2]), [1, 2])
    assert p.causal(align=[1, 2]) != p.causal(align=[1, 3])
    assert p.causal() != p.causal("upper_left")
    assert p.dense(np.ones((2, 2), bool)) != p.dense(np.eye(2) > 0)
    assert p.causal() != 3
    with pytest.raises(TypeError, match="&"):
        bool(a)
    with pytest.raises(TypeError):
        a & np.ones((2, 2), bool)
    used = p.dense(np.eye(4) > 0) & p.documents([1, 1, 2, 2], [1, 1, 2, 2])
    used.tile(0, 2, 0, 2, q=4, k=4, xp=array_api_strict)
    assert pickle.loads(pickle.dumps(used)) == used


def test_indices_may_be_plain_numbers():
    pattern = patterns.causal(align=[0, 2]) & patterns.fixed(4, 1, summary_offsets=[0, 1])
    assert bool(pattern.visible(5, 3, q=8, k=8, b=0, h=0))
    assert not pattern.visible(5, 3, q=8, k=8, b=1, h=1)
    assert pattern.visible(np.arange(8), 3, q=8, k=8, b=0, h=0).tolist() == [False] * 3 + [True] * 5


def test_missing_batch_entries_and_heads_are_named():
    i, j = np.arange(4)[:, None], np.arange(4)
    for pattern, letter in (
        (patterns.causal(align=[0, 1]), "b"),
        (patterns.lengths(key_lengths=[1, 2]), "b"),
        (patterns.documents([[0] * 4, [1] * 4], [0] * 4), "b"),
        (patterns.dense(np.ones((2, 1, 4, 4), bool)), "b"),
        (patterns.dense(np.ones((2, 4, 4), bool)), "h"),
        (patterns.blocks(np.ones((2, 2, 2), bool), 2), "h"),
        (patterns.fixed(4, 1, summary_offsets=[0, 1]), "h"),
        (patterns.mask_mod(lambda b, h, i, j: (b == 0) & (i >= j)), "b"),
        (patterns.mask_mod(lambda b, h, i, j: np.zeros(3, bool)[h] | (i >= j)), "h"),
        (patterns.mask_mod(lambda b, h, i, j: i - h >= j), "h"),
    ):
        for ask in (
            lambda p: p.visible(i, j, q=4, k=4),
            lambda p: p.tile(0, 4, 0, 4, q=4, k=4),
        ):
            with pytest.raises(ValueError, match=f"{letter} is missing") as caught:
                ask(pattern)
            assert repr(pattern) in str(caught.value)


def test_an_alignment_is_asked_for_where_it_matters():
    for pattern in (patterns.causal(), patterns.window(1, 1), ~patterns.causal() | patterns.prefix(1)):
        pattern.to_mask(3, 3)
        for ask in (
            lambda p: p.to_mask(3, 4),
            lambda p: p.pairs(3, 4),
            lambda p: p.classify(0, 1, 0, 1, q=3, k=4),
            lambda p: p.key_range(0, 1, q=3, k=4),
            lambda p: p.fit(3, 4),
        ):
            with pytest.raises(ValueError, match="'upper_left'.*'lower_right'"):
                ask(pattern)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda p: p.causal(align="bottom"), "align is 'bottom'"),
        (lambda p: p.causal(align=1.5), "align is 1.5"),
        (lambda p: p.window(-1, 0), "left is -1"),
        (lambda p: p.window(0, 1.5), "right is 1.5"),
        (lambda p: p.prefix(-1), "n is -1"),
        (lambda p: p.dilated(0), "step is 0"),
        (lambda p: p.strided(0), "stride is 0"),
        (lambda p: p.strided(2, part="third"), "part is 'third'"),
        (lambda p: p.strided(2, variant="mine"), "variant is 'mine'"),
        (lambda p: p.fixed(4, 5), "summary 5 .* stride 4"),
        (lambda p: p.fixed(4, 0), "summary is 0"),
        (lambda p: p.fixed(4, 2, summary_offsets=[0, 3]), "summary_offsets"),
        (lambda p: p.fixed(4, 2, summary_offsets=[0.5]), "summary_offsets"),
        (lambda p: p.documents([0.5], [1]), "query_ids"),
        (lambda p: p.documents(np.zeros((2, 3), int), np.zeros((3, 3), int)), "do not broadcast"),
        (lambda p: p.lengths(), "query_lengths or key_lengths"),
        (lambda p: p.lengths(key_lengths=[1, -1]), "key_lengths"),
        (lambda p: p.lengths(key_lengths=[9]).to_mask(3, 4), "9 keys, but there are 4"),
        (lambda p: p.documents([1, 2], [1]).to_mask(3, 1), "2 queries and 1 keys"),
        (lambda p: p.blocks(np.ones((2, 2), bool), 2).to_mask(5, 4), "layout has 2"),
        (lambda p: p.blocks(np.ones((2, 2)), 2), "layout has dtype float64"),
        (lambda p: p.blocks(np.ones(2, bool), 2), "layout has shape"),
        (lambda p: p.dense(np.ones((2, 2))), "mask has dtype float64"),
        (lambda p: p.dense(np.ones(2, bool)), "mask has shape"),
        (lambda p: p.dense(np.ones((2, 2), bool)).to_mask(3, 2), "does not broadcast to 3 queries"),
        (lambda p: p.by_head([p.causal()], [0, 1]), "a number below 1"),
        (lambda p: p.by_head([p.causal(), 3], [0, 1]), "expected patterns"),
        (lambda p: p.by_head([p.fixed(4, 1, summary_offsets=[0, 1])], [0]), "do not distinguish heads"),
        (lambda p: p.mask_mod(3), "expected a function"),
        (lambda p: p.mask_mod(lambda b, h, i, j: i + j).to_mask(2, 2), "expected a bool array"),
        (lambda p: p.prefix([1, 2]).to_mask(2, 2, batch=3), "2 batch entries of its own"),
        (lambda p: p.causal().visible(np.zeros(2), np.zeros(2), q=2, k=2), "i has dtype float64"),
        (lambda p: p.prefix(10**30), "n is .* below 2"),
        (lambda p: p.causal(np.uint64(2**63)), "align is .* below 2"),
        (lambda p: p.lengths(key_lengths=[1, [2]]), "key_lengths is .*expected an array"),
        (lambda p: p.by_head(None, [0]), "parts are None"),
        (lambda p: p.by_head([], [0]), "parts are"),
        (lambda p: p.dense([[True], [True, False]]), "mask is .*expected an array"),
        (lambda p: p.causal().to_mask("4", 4), "q is '4'"),
        (lambda p: p.causal().pairs(10**30, 10**30), "q is 1000"),
        (lambda p: p.causal().to_mask(4, 4, batch=-1), "batch is -1"),
    ],
)
def test_bad_input_is_named(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build(patterns)
