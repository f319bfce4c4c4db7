"""Serving forms equal plain calls: packed = padded = one by one, paged = contiguous, any split and any ring = the whole."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import refattn as ra
from tests.support import assert_adjoint, assert_gradients, cases

MECHANISM = ra.scaled_dot_product_attention
PACKED, PAGED = (form("scaled_dot_product_attention") for form in (ra.serving.packed, ra.serving.paged))
CLOSE = 1e-13  # sums of less than 100 terms of order 1
QUERIES, KEYS = np.array([0, 3, 1, 0, 4, 2]), np.array([2, 5, 0, 0, 3, 8])

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "much": {"causal": True, "softcap": 2.0, "sinks": np.linspace(-1, 3, 4), "alibi_slopes": np.linspace(0.1, 1, 4)},
}


def ends(lengths):
    return np.concatenate([[0], np.cumsum(lengths)])


def packed_arguments(rng, padding=3):
    """q, k, v with rows of NaN behind the last sequence."""

    def rows(count, heads, channels):
        return np.concatenate(
            [rng.standard_normal((count, heads, channels)), np.full((padding, heads, channels), np.nan)]
        )

    q, k, v = rows(QUERIES.sum(), 4, 5), rows(KEYS.sum(), 2, 5), rows(KEYS.sum(), 2, 3)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": ends(QUERIES), "cu_seqlens_k": ends(KEYS)}


def cotangents(rng, q_rows, h=4, e=3):
    """NaN in the rows of padding, which nobody reads."""
    d_output, d_lse = rng.standard_normal((q_rows, h, e)), rng.standard_normal((h, q_rows))
    d_output[QUERIES.sum() :], d_lse[:, QUERIES.sum() :] = np.nan, np.nan
    return {"output": d_output, "lse": d_lse}


def one_by_one(arguments, options, d):
    """Results and gradients of plain calls, put together by hand."""
    output, lse = np.zeros(d["output"].shape), np.full(d["lse"].shape, -np.inf)
    grads = {n: np.zeros(arguments[n].shape) for n in "qkv"}
    for n in range(len(QUERIES)):
        rows, keys = (slice(*arguments[c][n : n + 2]) for c in ("cu_seqlens_q", "cu_seqlens_k"))
        q, k, v = (np.swapaxes(arguments[c][s], 0, 1) for c, s in (("q", rows), ("k", keys), ("v", keys)))
        result, pullback = MECHANISM.vjp(q, k, v, align="lower_right", **options)
        output[rows], lse[:, rows] = np.swapaxes(result.output, 0, 1), result.lse
        g = pullback(output=np.swapaxes(d["output"][rows], 0, 1), lse=d["lse"][:, rows])
        for c, s in (("q", rows), ("k", keys), ("v", keys)):
            grads[c][s] = np.swapaxes(g[c], 0, 1)
    return output, lse, grads


def into_pages(arguments, page, rng, layout="NHD"):
    """The keys of packed arguments in permuted pages; what nobody may read is NaN, and no page."""
    lengths = np.diff(arguments["cu_seqlens_k"])
    counts = -(-lengths // page)
    order = rng.permutation(counts.sum() + 2)
    table = rng.choice([-1, 2**31 - 1, 0], (len(lengths), counts.max() + 2))
    first, pages = 0, {n: np.full((len(order), page, *arguments[n].shape[1:]), np.nan) for n in "kv"}
    for b, count in enumerate(counts):
        table[b, :count] = order[first : first + count]
        first += count
        for s in range(lengths[b]):
            for n in "kv":
                pages[n][table[b, s // page], s % page] = arguments[n][arguments["cu_seqlens_k"][b] + s]
    if layout == "HND":
        pages = {n: np.swapaxes(x, 1, 2) for n, x in pages.items()}
    rest = {"cu_seqlens_q": arguments["cu_seqlens_q"], "block_table": table, "seq_lens": lengths, "kv_layout": layout}
    return {"q": arguments["q"], **pages, **rest}


def out_of_pages(x, table, lengths, page, layout):
    x = np.swapaxes(x, 1, 2) if layout == "HND" else x
    rows = [x[table[b, s // page], s % page] for b in range(len(lengths)) for s in range(lengths[b])]
    return np.stack(rows)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed_is_one_by_one(options):
    rng = np.random.default_rng(0)
    arguments = packed_arguments(rng)
    d = cotangents(rng, len(arguments["q"]))
    result, pullback = PACKED.vjp(**arguments, **options)
    output, lse, grads = one_by_one(arguments, options, d)
    np.testing.assert_allclose(result.output, output, atol=CLOSE)
    np.testing.assert_allclose(result.lse, lse, atol=CLOSE)
    for name, g in grads.items():
        np.testing.assert_allclose(pullback(**d)[name], g, atol=CLOSE)
    slow, slow_pullback = PACKED.definition.vjp(**arguments, **options)
    np.testing.assert_allclose(slow.output, output, atol=CLOSE)
    for name, g in slow_pullback(**d).items():
        np.testing.assert_allclose(g, pullback(**d)[name], atol=1e-12)


def test_packed_is_padded():
    rng = np.random.default_rng(1)
    arguments = packed_arguments(rng)
    padded = {n: np.full((len(QUERIES), m, *arguments[n].shape[1:]), np.nan) for n, m in (("q", 4), ("k", 8), ("v", 8))}
    for n, cu in (("q", "cu_seqlens_q"), ("k", "cu_seqlens_k"), ("v", "cu_seqlens_k")):
        for b in range(len(QUERIES)):
            rows = arguments[n][arguments[cu][b] : arguments[cu][b + 1]]
            padded[n][b, : len(rows)] = rows
    lengths = {"query_lengths": QUERIES, "key_lengths": KEYS, "align": "lower_right", "causal": True}
    whole = MECHANISM.forward(**{n: np.swapaxes(x, 1, 2) for n, x in padded.items()}, **lengths)
    result = PACKED.forward(**arguments, causal=True)
    for b in range(len(QUERIES)):
        rows = slice(*arguments["cu_seqlens_q"][b : b + 2])
        np.testing.assert_allclose(np.swapaxes(result.output[rows], 0, 1), whole.output[b, :, : QUERIES[b]], atol=CLOSE)
        np.testing.assert_allclose(result.lse[:, rows], whole.lse[b, :, : QUERIES[b]], atol=CLOSE)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 2, 3, 5, 16])
def test_paged_is_contiguous(page, layout):
    rng = np.random.default_rng(page)
    packed = packed_arguments(rng)
    d = cotangents(rng, len(packed["q"]))
    paged = into_pages(packed, page, rng, layout)
    result, pullback = PAGED.vjp(**paged, causal=True)
    right, right_pullback = PACKED.vjp(**packed, causal=True)
    np.testing.assert_array_equal(result.output, right.output)
    np.testing.assert_array_equal(result.lse, right.lse)
    found, wanted = pullback(**d), right_pullback(**d)
    np.testing.assert_array_equal(found["q"], wanted["q"])
    for n in "kv":
        rows = out_of_pages(found[n], paged["block_table"], KEYS, page, layout)
        np.testing.assert_array_equal(rows, wanted[n][: KEYS.sum()])
        assert np.isclose(np.abs(found[n]).sum(), np.abs(rows).sum())  # 0 elsewhere
    slow, slow_pullback = PAGED.definition.vjp(**paged, causal=True)
    np.testing.assert_allclose(slow.output, right.output, atol=CLOSE)
    np.testing.assert_allclose(slow_pullback(**d)["v"], found["v"], atol=1e-12)


def test_shared_pages_add_their_gradients():
    """Decode of two sequences behind one prefix: the page of both gets what it would get in two copies."""
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((2, 4, 5)), rng.standard_normal((3, 2, 2, 5)), rng.standard_normal((3, 2, 2, 3))
    shared = {"block_table": np.array([[0, 1], [0, 2]]), "seq_lens": np.array([3, 4])}
    copies = {"block_table": np.array([[0, 1], [3, 2]]), "seq_lens": np.array([3, 4])}
    d = rng.standard_normal((2, 4, 3))
    one, pullback = PAGED.vjp(q, k, v, **shared)
    two, other = PAGED.vjp(q, np.concatenate([k, k[:1]]), np.concatenate([v, v[:1]]), **copies)
    np.testing.assert_array_equal(one.output, two.output)
    for n in "kv":
        twice = other(d)[n]
        np.testing.assert_allclose(pullback(d)[n][0], twice[0] + twice[3], atol=CLOSE)


PLACED = {
    "causal": {"causal": True},
    "everything": {
        "window": (4, 0), "align": "lower_right", "softcap": 3.0, "softcap_after_bias": True, "query_lengths": [9, 6],
        "key_lengths": [9, 7], "sinks": np.linspace(-1, 3, 6),
    },
    "sinks outside the lse": {"sinks": np.linspace(-1, 3, 12).reshape(6, 2), "lse_includes_sinks": False},
    "listed": {"indices": np.random.default_rng(0).integers(-1, 9, (2, 6, 9, 5)), "duplicates": "multiset"},
    "pattern": {"pattern": ra.patterns.strided(3)},
}  # fmt: skip


@pytest.mark.parametrize("options", PLACED.values(), ids=PLACED)
@pytest.mark.parametrize(
    "form, parts",
    [("split", {"splits": 1}), ("split", {"splits": 4}), ("split", {"splits": (2, 2, 5)})]
    + [("ring", {"ranks": n, "deal": deal}) for n in (2, 3) for deal in ("contiguous", "zigzag", "striped")],
)
def test_any_split_and_any_ring_is_the_whole(form, parts, options):
    rng = np.random.default_rng(5)
    arguments = MECHANISM.example(rng, b=2, h=6, q=9, k=9)
    arguments |= options | {"bias": rng.standard_normal((1, 6, 9, 9)), "alibi_slopes": rng.random(6)}
    made = getattr(ra.serving, form)("scaled_dot_product_attention")
    result, pullback = made.vjp(**arguments, **parts)
    right, right_pullback = MECHANISM.vjp(**arguments)
    d = {"output": rng.standard_normal(right.output.shape), "lse": rng.standard_normal(right.lse.shape)}
    np.testing.assert_allclose(result.output, right.output, atol=CLOSE)
    np.testing.assert_allclose(result.lse, right.lse, atol=CLOSE)
    found, wanted = pullback(**d), right_pullback(**d)
    assert found.keys() == wanted.keys()
    for name, g in wanted.items():
        np.testing.assert_allclose(found[name], g, atol=1e-12, err_msg=name)


def test_an_executor_changes_nothing():
    rng = np.random.default_rng(6)
    arguments = {**MECHANISM.example(rng, q=8, k=8), "causal": True, "ranks": 3, "deal": "zigzag"}
    ring = ra.serving.ring("scaled_dot_product_attention")
    d = rng.standard_normal((2, 6, 8, 3))
    alone, pullback = ring.vjp(**arguments)
    with ThreadPoolExecutor(2) as executor:
        threads, other = ring.vjp(**arguments, executor=executor)
        np.testing.assert_array_equal(threads.output, alone.output)
        for name, g in other(d).items():
            np.testing.assert_array_equal(g, pullback(d)[name])


@pytest.mark.parametrize("form", ["packed", "paged"])
def test_gradients_by_complex_step(form):
    rng = np.random.default_rng(7)
    arguments = packed_arguments(rng, padding=0)
    if form == "paged":
        arguments = into_pages(arguments, 3, rng)
        arguments |= {n: np.nan_to_num(arguments[n]) for n in "kv"}  # complex step sums over everything
    arguments |= {"causal": True, "sinks": np.linspace(-1, 1, 4)}
    made = getattr(ra.serving, form)("scaled_dot_product_attention")
    assert_gradients(made, arguments, rng)
    assert_adjoint(made, arguments, rng)


def test_a_state_belongs_to_its_sequence():
    """Packed recurrences carry one state each, also where a sequence is empty."""
    rng = np.random.default_rng(8)
    plain = ra.gated_linear_attention
    q, k, v = rng.standard_normal((5, 2, 3)), rng.standard_normal((5, 2, 3)), rng.standard_normal((5, 2, 4))
    state, decay = rng.standard_normal((3, 2, 3, 4)), -rng.random((5, 2))
    result = ra.serving.packed(plain).forward(q, k, v, state=state, decay=decay, cu_seqlens_q=[0, 2, 2, 5])
    np.testing.assert_array_equal(result.state[1], state[1])
    first = plain.forward(*(np.swapaxes(x[:2], 0, 1) for x in (q, k, v)), state=state[0], decay=decay[:2].T)
    np.testing.assert_allclose(result.output[:2], np.swapaxes(first.output, 0, 1), atol=CLOSE)
    np.testing.assert_allclose(result.state[0], first.state, atol=CLOSE)


def test_chunked_prefill_is_the_whole_prefill():
    """Queries in chunks behind the keys so far: the alignment is the past."""
    rng = np.random.default_rng(9)
    q, k, v = rng.standard_normal((7, 4, 5)), rng.standard_normal((7, 2, 5)), rng.standard_normal((7, 2, 3))
    whole = PACKED(q, k, v, cu_seqlens_q=[0, 7], causal=True, window=(3, 0))
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        chunk = PACKED(
            q[start:stop],
            k[:stop],
            v[:stop],
            cu_seqlens_q=[0, stop - start],
            cu_seqlens_k=[0, stop],
            causal=True,
            window=(3, 0),
        )
        np.testing.assert_allclose(chunk, whole[start:stop], atol=CLOSE)


@pytest.mark.parametrize("length", [0, 1, 7, 12])
@pytest.mark.parametrize("deal", ["contiguous", "zigzag", "striped"])
def test_shard_and_unshard(deal, length):
    x = np.arange(2 * length * 3).reshape(2, length, 3)
    parts = ra.serving.shard(x, 3, deal=deal)
    np.testing.assert_array_equal(ra.serving.unshard(parts, deal=deal), x)


def test_outside_cases():
    for _, _, arrays in cases("torch_nested"):
        made, options = PACKED, {"cu_seqlens_q": arrays["in_cu_seqlens_q"], "cu_seqlens_k": arrays["in_cu_seqlens_k"]}
        result, pullback = made.vjp(*(arrays[f"in_{n}"] for n in "qkv"), **options)
        np.testing.assert_allclose(result.output, arrays["out"], atol=1e-10)
        for n, g in pullback(arrays["cot_out"]).items():
            np.testing.assert_allclose(g, arrays[f"grad_{n}"], atol=1e-9)
    for _, meta, arrays in cases("vllm"):
        told = meta["options"]
        options = {"softcap": told["softcap"]} if told["softcap"] else {}
        options |= {} if told["window"] is None else {"window": (told["window"] - 1, 0)}
        served = {
            "block_table": arrays["in_block_tables"],
            "seq_lens": told["key_lengths"],
            "cu_seqlens_q": ends(told["query_lengths"]),
        }
        result, pullback = PAGED.vjp(
            arrays["in_q"], arrays["in_k_cache"], arrays["in_v_cache"], causal=True, **served, **options
        )
        np.testing.assert_allclose(result.output, arrays["out"], atol=2e-5)
        for n, g in pullback(arrays["cot_out"]).items():
            np.testing.assert_allclose(g, arrays["grad_q" if n == "q" else f"grad_{n}_cache"], atol=2e-4)


BAD = {
    "cu_seqlens_q ends with 9": {"cu_seqlens_q": [0, 3, 9]},
    "cu_seqlens_q falls": {"cu_seqlens_q": [0, 3, 2]},
    "cu_seqlens_q starts with 1": {"cu_seqlens_q": [1, 5]},
    "cu_seqlens_k has 2 entries: expected 3": {"cu_seqlens_q": [0, 1, 5], "cu_seqlens_k": [0, 5]},
    "cu_seqlens_q is an array of float64": {"cu_seqlens_q": np.array([0.0, 5.0])},
    "no option 'mask'": {"cu_seqlens_q": [0, 5], "mask": np.ones((5, 5), bool)},
    "pattern is a list of 1": {"cu_seqlens_q": [0, 2, 5], "pattern": [ra.patterns.prefix(2)]},
}


@pytest.mark.parametrize("says", BAD)
def test_bad_packed_input(says):
    q = np.zeros((5, 1, 2))
    with pytest.raises((TypeError, ValueError), match=says):
        PACKED(q, q, q, **BAD[says])


BAD_PAGES = {
    "holds page 7 in row 0: expected pages from 0 to 2": {"block_table": np.array([[0, 7]]), "seq_lens": [3]},
    "holds page -1": {"block_table": np.array([[-1, 0]]), "seq_lens": [3]},
    "block_table has 2 columns: sequence 0 of 5 keys needs 3 pages": {
        "block_table": np.array([[0, 1]]),
        "seq_lens": [5],
    },
    "seq_lens contains -1": {"block_table": np.array([[0, 1]]), "seq_lens": [-1]},
    "block_table has 2 rows and seq_lens 1": {"block_table": np.array([[0], [1]]), "seq_lens": [1]},
    "without cu_seqlens_q expected one per sequence": {"block_table": np.array([[0], [1]]), "seq_lens": [1, 1]},
    "kv_layout": {"block_table": np.array([[0, 1]]), "seq_lens": [1], "kv_layout": "NDH"},
}


@pytest.mark.parametrize("says", BAD_PAGES)
def test_bad_pages(says):
    pages = np.zeros((3, 2, 1, 2))
    with pytest.raises((TypeError, ValueError), match=says):
        PAGED(np.zeros((1, 1, 2)), pages, pages, **BAD_PAGES[says])


def test_other_bad_input():
    x = np.zeros((1, 4, 2))
    with pytest.raises(ValueError, match="splits is"):
        ra.serving.split("scaled_dot_product_attention")(x, x, x, splits=(3, 2))
    with pytest.raises(TypeError, match="executor is a str"):
        ra.serving.ring("scaled_dot_product_attention")(x, x, x, ranks=2, executor="threads")
    with pytest.raises(ValueError, match="last_page_len is 5"):
        ra.serving.block_table([0, 1], [0], [5], page=4)
    with pytest.raises(ValueError, match="mechanism is 'nothing'"):
        ra.serving.packed("nothing")


def test_forms_are_made_once_and_pickled_by_name():
    assert ra.serving.packed(MECHANISM) is PACKED is pickle.loads(pickle.dumps(PACKED))
    cost = PACKED.cost(h=2, d=4, cu_seqlens_q=[0, 3, 5], causal=True)
    assert cost.multiplies == sum(MECHANISM.cost(h=2, d=4, q=n, k=n, causal=True).multiplies for n in (3, 2))


@pytest.mark.parametrize("made", [PACKED, PAGED], ids=["packed", "paged"])
def test_known_mistakes_show(made):
    """A form has the mechanism's mistakes and its own, and its own change the numbers."""
    rng = np.random.default_rng(11)
    arguments = packed_arguments(rng, padding=0)
    if made is PAGED:
        arguments = into_pages(arguments, 2, rng)
    arguments["causal"] = True
    right = made.definition(**arguments).output
    own = {m.class_ for m in made.catalogue.own}
    assert own >= {"packed_upper_left"}
    assert len(made.mutations) > len(own)
    for mutation in made.mutations[: len(own)]:
        assert np.abs(mutation.forward(arguments).output - right).max() > 1e-3, mutation.class_
