"""Memories: updates, compressions and losses against loops, gradients, stored cases, streams against one long sequence."""

import array_api_strict
import numpy as np
import pytest
from support import assert_adjoint, assert_close, assert_gradients, cases

from refattn import layers, memory
from refattn.attention.compressive import compressive_attention

EPS = np.finfo(np.float64).eps


def normal(*shape, seed=0):
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape)


# ---------------------------------------------------------------------- updates


def test_update_memory_keeps_the_newest_rows():
    x = np.arange(10.0)[:, None] * np.ones(3)
    assert_close(memory.update_memory(x[:4], x[4:7], length=5)[:, 0], [2, 3, 4, 5, 6], 0)
    assert_close(memory.update_memory(x[:4], x[4:10], length=3)[:, 0], [7, 8, 9], 0)
    assert_close(memory.update_memory(x[:1], x[1:3], length=5)[:, 0], [0, 1, 2], 0)
    assert_close(memory.update_memory(None, x[:2], length=5)[:, 0], [0, 1], 0)
    assert memory.update_memory(x[:4], x[4:], length=0).shape == (0, 3)


def test_update_memory_broadcasts_and_stops_gradients():
    m, h = normal(4, 3), normal(2, 5, 3)
    result, pullback = memory.update_memory.vjp(m, h, length=6)
    assert_close(result.output[1], np.concatenate([m[3:], h[1]]), 0)
    gradients = pullback(np.ones_like(result.output))
    assert gradients["memory"].shape == m.shape
    assert gradients["hidden"].shape == h.shape
    assert all((g == 0).all() for g in gradients.values())


def halves(old):
    return memory.compress(old, rate=2)


def test_the_paper_compresses_the_oldest_rows_of_a_full_memory():
    rows = np.arange(20.0)[:, None] * np.ones(2)
    result = memory.update_compressed_memory.forward(
        rows[6:14], rows[:3], rows[14:18], rate=2, memory_length=8, compressed_length=4, compress=halves
    )
    assert_close(result.evicted[:, 0], [6, 7, 8, 9], 0)
    assert_close(result.memory[:, 0], np.arange(10, 18), 0)
    assert_close(result.compressed[:, 0], [1, 2, 6.5, 8.5], 0)


def test_a_stream_of_evictions_by_overflow():
    """Segments of 4, memory 8, compressed 6, rate 4: evicted 0, 0, 4, 4, ...; lengths 4, 8, 8 and 0, 0, 1, 2, ..., 6, 6."""
    m = c = None
    evicted, lengths = [], []
    for n in range(10):
        new = memory.update_compressed_memory.forward(
            m, c, np.full((4, 2), float(n)), rate=4, memory_length=8, compressed_length=6, evict="overflow",
            compress=lambda old: memory.compress(old, rate=4),
        )  # fmt: skip
        m, c = new.memory, new.compressed
        evicted.append(new.evicted.shape[0])
        lengths.append((m.shape[0], c.shape[0]))
    assert evicted == [0, 0, *[4] * 8]
    assert lengths == [(4, 0), (8, 0), (8, 1), (8, 2), (8, 3), (8, 4), (8, 5), (8, 6), (8, 6), (8, 6)]
    assert_close(c[:, 0], np.arange(2, 8), 0)  # the oldest compressed rows are gone


def test_compress_is_not_called_for_nothing():
    def never(old):
        raise AssertionError

    m, h = normal(3, 2), normal(2, 2)
    more = {"rate": 2, "memory_length": 5, "compress": never, "evict": "overflow"}
    assert memory.update_compressed_memory.forward(m, None, h, compressed_length=4, **more).compressed.shape == (0, 2)
    more.update(memory_length=4)
    assert memory.update_compressed_memory.forward(m, None, h, compressed_length=0, **more).evicted.shape == (1, 2)


def test_update_compressed_memory_stops_gradients():
    m, c, h = normal(4, 3), normal(2, 3), normal(2, 3)
    result, pullback = memory.update_compressed_memory.vjp(
        m, c, h, rate=2, memory_length=4, compressed_length=3, compress=halves
    )
    gradients = pullback(memory=np.ones_like(result.memory), compressed=np.ones_like(result.compressed))
    assert all((g == 0).all() for g in gradients.values())
    assert set(gradients) == {"memory", "compressed", "hidden"}


UPDATES = {
    "segment": {"memory": normal(6, 3), "compressed": normal(3, 3), "hidden": normal(2, 3), "memory_length": 6},
    "overflow": {"memory": normal(5, 3), "compressed": None, "hidden": normal(4, 3), "memory_length": 5, "evict": "overflow"},
}  # fmt: skip


@pytest.mark.parametrize("mutation", memory.memory_mutations, ids=lambda m: m.class_)
def test_every_mistake_of_an_update_shows(mutation):
    arguments = {**UPDATES["segment"], "rate": 2, "compressed_length": 3, "compress": halves}
    right, wrong = memory.update_compressed_memory.forward(**arguments), mutation.forward(arguments)
    assert max(np.abs(getattr(wrong, n) - x).max() for n, x in right.fields.items()) > 1e-3
    assert {m.class_ for m in memory.memory_mutations} >= {"eviction_newest", "memory_order", "compressed_order"}


def test_mistakes_that_do_not_show_say_nothing():
    shown = {
        m.class_
        for m in memory.memory_mutations
        if m.forward({**UPDATES["overflow"], "rate": 2, "compressed_length": 3, "compress": halves}) is not None
    }
    assert "compressed_order" not in shown  # no compressed rows before these
    assert "eviction_newest" in shown


# ---------------------------------------------------------------------- compressions

RATE, M = 3, 4
COMPRESSIONS = {
    "mean": {},
    "max": {},
    "conv": {"weight": normal(5, M, RATE), "bias": normal(5)},
    "conv_without_bias": {"method": "conv", "weight": normal(5, M, RATE)},
    "dilated_conv": {"weight": normal(5, M, RATE), "bias": normal(5)},
    "dilated_conv_4": {"method": "dilated_conv", "weight": normal(2, M, 4), "dilation": 3},
    "most_used": {"usage": normal(2, 8) ** 2},
}


def compression(name):
    options = dict(COMPRESSIONS[name])
    options.setdefault("method", name)
    return {"rate": RATE, **options}


def by_loops(old, *, rate, method, weight=None, bias=None, usage=None, dilation=2):
    *lead, n, m = old.shape
    found = []
    for c in range(n // rate):
        span = [old[..., c * rate + a, :] for a in range(rate)]
        if method == "mean":
            found.append(sum(span) / rate)
        elif method == "max":
            found.append(np.max(span, axis=0))
        elif method != "most_used":
            total = np.zeros((*lead, weight.shape[0])) + (0 if bias is None else bias)
            for a in range(weight.shape[-1]):
                back = 0 if method == "conv" else (weight.shape[-1] - 1 - a) * dilation
                at = c * rate + a if method == "conv" else c * rate + rate - 1 - back
                if at >= 0:
                    total = total + old[..., at, :] @ weight[..., a].T
            found.append(total)
    if method == "most_used":
        result = np.zeros((*lead, n // rate, m))
        for at in np.ndindex(*lead):
            used = usage[at][: n // rate * rate]
            best = sorted(range(len(used)), key=lambda j, used=used: (used[j], j))[-(n // rate) :]
            result[at] = old[at][sorted(best)]
        return result
    return np.stack(found, axis=-2)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_compressions_against_loops(name):
    old = normal(2, 8, M)
    got = memory.compress(old, **compression(name))
    assert got.shape[-2] == 2
    assert_close(got, by_loops(old, **compression(name)), 20 * EPS)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_compression_gradients(name):
    arguments = {"old": normal(2, 8, M), **compression(name)}
    rng = np.random.default_rng(0)
    gradients = assert_gradients(memory.compress, arguments, rng)
    assert (gradients["old"][:, 6:] == 0).all()  # the two newest rows are dropped
    assert_adjoint(memory.compress, arguments, rng)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_compression_on_the_strict_namespace(name):
    options = compression(name)
    strict = {n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    old = normal(2, 8, M)
    result, pullback = memory.compress.vjp(array_api_strict.asarray(old), **strict)
    want, want_back = memory.compress.vjp(old, **options)
    assert_close(result.output, want.output, 20 * EPS)
    for n, g in want_back(want.output).items():
        assert_close(pullback(result.output)[n], g, 20 * EPS)


def test_ties():
    old = np.array([[1.0], [1.0], [0.0], [2.0]])
    _, pullback = memory.compress.vjp(old, rate=2, method="max")
    assert_close(pullback(np.ones((2, 1)))["old"][:, 0], [1, 0, 0, 1], 0)
    kept = memory.compress(np.arange(6.0)[:, None], rate=2, method="most_used", usage=np.array([5.0, 1, 1, 1, 5, 1]))
    assert_close(kept[:, 0], [0, 4, 5], 0)  # of the equal ones the newest


def test_mean_is_a_convolution_and_a_dilation_of_1_too():
    old = normal(2, 8, M)
    mean = np.eye(M)[:, :, None] * np.full(RATE, 1 / RATE)
    assert_close(memory.compress(old, rate=RATE, method="conv", weight=mean), memory.compress(old, rate=RATE), 10 * EPS)
    options = compression("conv")
    dilated = memory.compress(old, **{**options, "method": "dilated_conv"}, dilation=1)
    assert_close(dilated, memory.compress(old, **options), 10 * EPS)


def test_fewer_rows_than_the_rate_give_none():
    for name in COMPRESSIONS:
        options = compression(name)
        if "usage" in options:
            options["usage"] = options["usage"][:, :2]
        result, pullback = memory.compress.vjp(normal(2, 2, M), **options)
        assert result.output.shape[-2] == 0
        assert (pullback(result.output)["old"] == 0).all()


# ---------------------------------------------------------------------- losses


def reconstruction(norm="l2"):
    return {
        "hidden": normal(2, 3, M), "old": normal(2, 6, M), "compressed": normal(2, 2, M), "norm": norm,
        "w_q": normal(M, 2, 3), "w_k": normal(M, 2, 3, seed=1), "w_v": normal(M, 2, 5),
    }  # fmt: skip


def plain_attention(hidden, rows, w_q, w_k, w_v, scale):
    q, k, v = (np.einsum("btm,mhd->bhtd", x, w) for x, w in ((hidden, w_q), (rows, w_k), (rows, w_v)))
    logits = scale * q @ np.swapaxes(k, -1, -2)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("norm", ["l2", "mse"])
def test_reconstruction_loss(norm):
    a = reconstruction(norm)
    weights = [a[n] for n in ("w_q", "w_k", "w_v")]
    for scale in (None, 1.0):
        s = 3**-0.5 if scale is None else scale
        gap = plain_attention(a["hidden"], a["old"], *weights, s) - plain_attention(
            a["hidden"], a["compressed"], *weights, s
        )
        want = np.sqrt((gap**2).sum()) if norm == "l2" else (gap**2).mean()
        got = memory.attention_reconstruction_loss(**a, scale=scale)
        assert got.shape == ()
        assert_close(got, want, 100 * EPS)


@pytest.mark.parametrize("norm", ["l2", "mse"])
def test_reconstruction_loss_trains_the_compressed_rows_alone(norm):
    gradients = assert_gradients(memory.attention_reconstruction_loss, reconstruction(norm), np.random.default_rng(1))
    assert set(gradients) == {"compressed"}
    assert_adjoint(memory.attention_reconstruction_loss, reconstruction(norm), np.random.default_rng(2))


@pytest.mark.parametrize("norm", ["l2", "mse"])
def test_auto_encoding_loss(norm):
    a = {
        "old": normal(2, 7, 5),
        "compressed": normal(2, 2, M),
        "weight": normal(M, 5, 3),
        "bias": normal(5),
        "norm": norm,
    }
    gap = []
    for c in range(2):
        for tap in range(3):
            gap.append(a["compressed"][:, c] @ a["weight"][:, :, tap] + a["bias"] - a["old"][:, 3 * c + tap])
    want = np.sqrt(np.sum(np.square(gap))) if norm == "l2" else np.mean(np.square(gap))
    assert_close(memory.auto_encoding_loss(**a), want, 100 * EPS)
    gradients = assert_gradients(memory.auto_encoding_loss, a, np.random.default_rng(1))
    assert set(gradients) == {"compressed", "weight", "bias"}
    assert_adjoint(memory.auto_encoding_loss, a, np.random.default_rng(2))


def test_losses_are_zero_where_nothing_is_lost():
    a = {**reconstruction(), "compressed": normal(2, 6, M)}
    a["old"] = a["compressed"]  # rate 1, the identity
    result, pullback = memory.attention_reconstruction_loss.vjp(**a)
    assert result.output == 0
    assert (pullback(np.ones(()))["compressed"] == 0).all()
    old = normal(2, 6, M)
    assert memory.auto_encoding_loss(old, old, weight=np.eye(M)[:, :, None]) == 0


def test_losses_on_the_strict_namespace():
    strict = {n: array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x for n, x in reconstruction().items()}
    result, pullback = memory.attention_reconstruction_loss.vjp(**strict)
    want, want_back = memory.attention_reconstruction_loss.vjp(**reconstruction())
    assert_close(result.output, want.output, 20 * EPS)
    assert_close(pullback(result.output)["compressed"], want_back(want.output)["compressed"], 50 * EPS)


# ---------------------------------------------------------------------- stored cases


def head_weights(w, h):
    return np.ascontiguousarray(w.reshape(h, -1, w.shape[-1]).transpose(2, 0, 1))


def peer(arrays, options):
    """Arguments of the attention, of the compression, and the projections, from a stored case."""
    h = options["heads"]
    w_k, w_v = (head_weights(w, h) for w in np.split(arrays["w_to_kv.weight"], 2))
    projections = {"w_q": head_weights(arrays["w_to_q.weight"], h), "w_k": w_k, "w_v": w_v}
    w_o = np.ascontiguousarray(arrays["w_to_out.weight"].T.reshape(h, -1, arrays["w_to_out.weight"].shape[0]))
    conv = {"rate": options["cmem_ratio"], "method": "conv", "weight": arrays["w_compress_mem_fn.conv.weight"],
            "bias": arrays["w_compress_mem_fn.conv.bias"]}  # fmt: skip
    return projections, w_o, conv


PEER = [c for c in cases("compressive_transformer") if c[0] != "rel_shift_only"]


@pytest.mark.parametrize("case", PEER, ids=lambda c: c[0])
def test_stored_attention(case):
    _, meta, a = case
    o = meta["options"]
    projections, w_o, _ = peer(a, o)
    n = a["in_cmem"].shape[1] + a["in_mem"].shape[1] + a["in_x"].shape[1]
    arguments = {"x": a["in_x"], "memory": a["in_mem"], "compressed": a["in_cmem"], **projections, "w_o": w_o}
    arguments.update(r=np.ascontiguousarray(a["in_pos_emb"][:, -n:]), through_memory=True)
    result, pullback = compressive_attention.vjp(**arguments)
    want = a["out_logits"] - a["w_to_out.bias"]
    assert_close(result.output, want, 1e-9)
    assert_close(compressive_attention.definition(**arguments).output, want, 1e-9)
    gradients = pullback(a["cot_out_logits"])
    for ours, theirs in (("x", "grad_x"), ("memory", "grad_mem"), ("compressed", "grad_cmem")):
        assert_close(gradients[ours], a[theirs], 1e-8)
    assert_close(gradients["r"], a["grad_pos_emb"][:, -n:], 1e-8)
    assert_close(gradients["w_q"], head_weights(a["grad_w_to_q.weight"], o["heads"]), 1e-8)
    if "grad_w_to_kv.weight" in a:  # the peer freezes this weight once it has compressed; ours goes on learning
        for name, g in zip(("w_k", "w_v"), np.split(a["grad_w_to_kv.weight"], 2), strict=True):
            assert_close(gradients[name], head_weights(g, o["heads"]), 1e-8)
    else:
        assert np.abs(gradients["w_k"]).max() > 0


def padded(old, rate):
    """The peer's padding of a ragged eviction: len % rate zeros in front (rate - len % rate were needed)."""
    return np.concatenate([np.zeros_like(old[:, : old.shape[1] % rate]), old], axis=1)


@pytest.mark.parametrize(
    "case", [c for c in PEER if c[1]["options"]["t"] == c[1]["options"]["seq_len"]], ids=lambda c: c[0]
)
def test_stored_memories_and_auxiliary_loss(case):
    _, meta, a = case
    o = meta["options"]
    projections, _, conv = peer(a, o)
    new = memory.update_compressed_memory.forward(
        a["in_mem"], a["in_cmem"], a["in_x"], rate=o["cmem_ratio"], memory_length=o["mem_len"],
        compressed_length=o["cmem_len"], evict="overflow",
        compress=lambda old: memory.compress(padded(np.asarray(old), o["cmem_ratio"]), **conv),
    )  # fmt: skip
    assert_close(new.memory, a["out_new_mem"], 1e-9)
    assert_close(new.compressed, a["out_new_cmem"], 1e-9)
    if "gradaux_w_compress_mem_fn.conv.weight" not in a:
        return
    compressed, back = memory.compress.vjp(padded(np.asarray(new.evicted), o["cmem_ratio"]), **conv)
    # the peer compares with its whole memory, not with the evicted rows alone
    loss, pullback = memory.attention_reconstruction_loss.vjp(
        a["in_x"], a["in_mem"], np.asarray(compressed.output), **projections, norm="mse", scale=o["dim_head"] ** -0.5
    )
    assert_close(loss.output, a["out_aux_loss"], 1e-9)
    gradients = back(pullback(np.ones(()))["compressed"])
    assert_close(gradients["weight"], a["gradaux_w_compress_mem_fn.conv.weight"], 1e-8)
    assert_close(gradients["bias"], a["gradaux_w_compress_mem_fn.conv.bias"], 1e-8)


def test_quirks_of_the_peer_are_differences_of_ours():
    """Its padding loses the newest evicted row; its loss looks at the whole memory where the paper looks at ``old``."""
    stored = {name: (meta, a) for name, meta, a in PEER}
    meta, a = stored["ratio3_pad"]
    _, _, conv = peer(a, meta["options"])
    old = np.concatenate([a["in_mem"], a["in_x"]], axis=1)[:, : -meta["options"]["mem_len"]]
    ours, theirs = memory.compress(old, **conv), memory.compress(padded(old, 3), **conv)
    assert (ours.shape[1], theirs.shape[1]) == (1, 2)  # 5 rows: one span, or two made of 2 zeros and the 4 oldest
    moved = old.copy()
    moved[:, 4] += 1
    assert_close(memory.compress(padded(moved, 3), **conv), theirs, 0)  # the newest row has no influence
    meta, a = stored["mem_longer_than_seq"]
    o = meta["options"]
    projections, _, conv = peer(a, o)
    old = a["in_mem"][:, : o["seq_len"]]
    loss = memory.attention_reconstruction_loss(
        a["in_x"], old, memory.compress(old, **conv), **projections, norm="mse", scale=o["dim_head"] ** -0.5
    )
    assert np.abs(loss - a["out_aux_loss"]) > 1e-3


# ---------------------------------------------------------------------- streams


def weights(m=6, h=2, d=4, seed=0, gain=0.4):
    r = np.random.default_rng(seed)
    shapes = {
        "w_q": (m, h, d),
        "w_k": (m, h, d),
        "w_v": (m, h, d),
        "w_o": (h, d, m),
        "w_r": (m, h, d),
        "u": (h, d),
        "w": (h, d),
    }
    found = {n: gain * r.standard_normal(s) for n, s in shapes.items()}
    return {**found, "norm_weight": 1 + 0.1 * r.standard_normal(m), "norm_bias": 0.1 * r.standard_normal(m)}


def cut(x, *ends):
    return [x[..., s:e, :] for s, e in zip((0, *ends), (*ends, x.shape[-2]), strict=True)]


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("ends", [(6,), (3, 6, 9), (1, 2, 7)])
@pytest.mark.parametrize("depth", [1, 3])
def test_memory_of_all_history_is_one_long_sequence(depth, ends, norm):
    x = normal(2, 12, 6)
    stack = [(layers.transformer_xl_layer, {**weights(seed=n), "norm": norm}) for n in range(depth)]
    (whole,) = memory.stream([x], stack, memory_length=12)
    steps = list(memory.stream(cut(x, *ends), stack, memory_length=12))
    assert_close(np.concatenate([s.output for s in steps], axis=1), whole.output, 200 * depth * EPS)
    assert steps[-1].memories[0][0].shape == (2, 12, 6)
    # the last segment's gradients are those of the long sequence where only its own rows may move
    d = np.zeros_like(whole.output)
    d[:, ends[-1] :] = normal(2, 12 - ends[-1], 6)
    got, want = steps[-1].pullback(d[:, ends[-1] :]), whole.pullback(d)
    assert_close(got["x"], want["x"][:, ends[-1] :], 1000 * depth * EPS)
    if depth == 1:  # memories are inputs of the layer: the weights of one layer see no difference
        for name, g in got.items():
            if name != "x":
                assert_close(g, want[name], 1000 * EPS)


def reach(layer_count, segment, memory_length, **options):
    """How far back stands the oldest token that moves the first output of the last segment."""
    total = segment * (layer_count * memory_length // segment + 6)
    x = normal(total, 6)
    moved = np.concatenate([x[None], x + np.eye(total)[:, :, None]])  # row n + 1: token n is moved
    stack = [(layers.compressive_layer, weights(seed=n)) for n in range(layer_count)]
    *_, last = memory.stream(np.split(moved, total // segment, axis=1), stack, memory_length=memory_length, **options)
    first = last.output[:, 0]
    moves = np.abs(first[1:] - first[0]).max(axis=-1) > 1e-13  # outputs of order 1: a dozen of their units
    return total - segment - int(np.argmax(moves))


@pytest.mark.parametrize(("layer_count", "segment", "memory_length"), [(1, 2, 4), (2, 2, 4), (3, 2, 4), (2, 4, 4)])
def test_dependency_reach_is_layers_times_memory(layer_count, segment, memory_length):
    assert reach(layer_count, segment, memory_length) == layer_count * memory_length


def test_the_papers_reach_in_miniature():
    """16 layers of 640 reach 10,240 tokens; 16 layers of 2 reach 32."""
    assert reach(16, 2, 2) == 32


@pytest.mark.parametrize("evict", ["overflow", "segment"])
def test_range_of_the_compressive_form(evict):
    """One layer reaches memory + rate * compressed tokens."""
    options = {"compressed_length": 3, "rate": 2, "evict": evict, "initial": "zeros"}
    assert reach(1, 4, 4, **options) == 4 + 2 * 3


def test_rate_1_is_transformer_xl_with_a_longer_memory():
    x = normal(2, 12, 6)
    compressive, plain = [(layers.compressive_layer, weights())], [(layers.transformer_xl_layer, weights())]
    one = memory.stream(cut(x, 4, 8), compressive, memory_length=4, compressed_length=3, rate=1, evict="overflow")
    other = memory.stream(cut(x, 4, 8), plain, memory_length=7)
    for a, b in zip(one, other, strict=True):
        assert_close(a.output, b.output, 50 * EPS)
    empty = memory.stream(cut(x, 4, 8), compressive, memory_length=7)  # no compressed rows at all
    for a, b in zip(empty, memory.stream(cut(x, 4, 8), plain, memory_length=7), strict=True):
        assert_close(a.output, b.output, 0)


def test_initial_memories_and_going_on():
    x = normal(9, 6)
    stack = [(layers.transformer_xl_layer, weights(seed=n)) for n in range(2)]
    empty, zeros = (list(memory.stream(cut(x, 3, 6), stack, memory_length=4, initial=i)) for i in ("empty", "zeros"))
    assert np.abs(empty[0].output - zeros[0].output).max() > 1e-3  # zeros are attended
    (again,) = memory.stream([x[6:]], stack, memory_length=4, memories=empty[1].memories)
    assert_close(again.output, empty[2].output, 0)
    assert [s.evicted[0].shape[0] for s in empty] == [0, 2, 3]


def test_memories_may_come_from_the_layer_above():
    """Two layers exchange their memories at every segment; what they write goes behind what they were given."""
    x = normal(6, 6)
    stack = [(layers.transformer_xl_layer, weights(seed=n)) for n in range(2)]
    first, second = memory.stream(cut(x, 3), stack, memory_length=4, recurrence="above")
    below = layers.transformer_xl_layer.forward(x[3:], first.memories[1][0], **weights(seed=0))
    top = layers.transformer_xl_layer(below.output, first.memories[0][0], **weights(seed=1))
    assert_close(second.output, top, 20 * EPS)
    assert_close(second.memories[0][0], np.concatenate([first.memories[1][0][-1:], x[3:]]), 0)


def test_layers_without_memory_and_gradients_of_a_stack():
    m = 6
    mlp = {"w_1": normal(m, 8), "b_1": normal(8), "w_2": normal(8, m), "b_2": normal(m), "activation": "gelu"}
    stack = [
        (layers.transformer_xl_layer, weights()),
        (layers.feed_forward, mlp),
        (layers.transformer_xl_layer, weights(seed=1)),
    ]
    x = normal(8, m)
    steps = list(memory.stream(cut(x, 4), stack, memory_length=4))
    d = normal(4, m)
    gradients = steps[1].pullback(d)
    assert {n.split(".")[0] for n in gradients} == {"x", "layers[0]", "layers[1]", "layers[2]"}
    assert not any(n.endswith((".memory", ".compressed", ".x")) for n in gradients)

    def loss(w_1):
        changed = [stack[0], (layers.feed_forward, {**mlp, "w_1": w_1}), stack[2]]
        return np.sum(
            d * next(iter(memory.stream([x[4:]], changed, memory_length=4, memories=steps[0].memories))).output
        )

    u = normal(m, 8, seed=3)
    slope = (loss(mlp["w_1"] + 1e-6 * u) - loss(mlp["w_1"] - 1e-6 * u)) / 2e-6
    assert_close(np.sum(gradients["layers[1].w_1"] * u), slope, 1e-7)  # central difference: 1e-12 + rounding / 1e-6


def test_bound_layers_are_the_same():
    x, own = normal(3, 6), weights()
    mlp = layers.bind(layers.feed_forward, w_1=normal(6, 8), b_1=None, w_2=normal(8, 6), b_2=None)
    block = layers.chain(layers.bind(layers.residual, f=mlp), layers.bind(layers.layer_norm, weight=np.ones(6)))
    (step,) = memory.stream([x], [layers.bind(layers.transformer_xl_layer, **own), block], memory_length=3)
    y = layers.transformer_xl_layer(x, **own)
    assert_close(step.output, layers.layer_norm(y + mlp.forward(y).output, np.ones(6)), 20 * EPS)
    assert "layers[1].0.f.w_1" in step.pullback(step.output)


def test_tied_biases_add_their_gradients():
    x, u = normal(3, 6), normal(2, 4)
    stack = [(layers.transformer_xl_layer, {**weights(seed=n), "u": u}) for n in range(2)]
    d = normal(3, 6, seed=5)

    def loss(u):
        tied = [(f, {**a, "u": u}) for f, a in stack]
        return np.sum(d * next(iter(memory.stream([x], tied, memory_length=3))).output)

    gradients = next(iter(memory.stream([x], stack, memory_length=3))).pullback(d)
    move = normal(2, 4, seed=6)
    slope = (loss(u + 1e-6 * move) - loss(u - 1e-6 * move)) / 2e-6
    assert_close(np.sum((gradients["layers[0].u"] + gradients["layers[1].u"]) * move), slope, 1e-7)


# ---------------------------------------------------------------------- bad input

UPDATE = {
    "memory": normal(4, 3), "compressed": normal(2, 3), "hidden": normal(2, 3), "rate": 2, "memory_length": 4,
    "compressed_length": 3, "compress": halves,
}  # fmt: skip
BAD_UPDATE = {
    "width": ({"memory": normal(4, 5)}, ValueError, "hidden has shape .* 'm'"),
    "compressed_width": ({"compressed": normal(2, 5)}, ValueError, "has shape .* 'm'"),
    "rate_0": ({"rate": 0}, ValueError, "rate is 0: expected at least 1"),
    "rate_large": ({"rate": 5}, ValueError, "rate is 5: expected at most memory_length = 4"),
    "long_segment": ({"hidden": normal(5, 3)}, ValueError, "hidden has 5 rows and memory_length is 4"),
    "memory_not_full": ({"memory": normal(3, 3)}, ValueError, "expects a full memory"),
    "evict": ({"evict": "newest"}, ValueError, "evict is 'newest'"),
    "compress_type": ({"compress": lambda old: None}, TypeError, "compress returned a NoneType"),
    "compress_width": ({"compress": lambda old: old[..., :1]}, ValueError, "compress returned an array of shape"),
    "length": ({"memory_length": -1}, ValueError, "memory_length is -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_UPDATE)
def test_bad_updates(name):
    change, kind, message = BAD_UPDATE[name]
    with pytest.raises(kind, match=message):
        memory.update_compressed_memory.forward(**{**UPDATE, **change})


BAD_COMPRESS = {
    "rate": ({"rate": 0}, ValueError, "rate is 0"),
    "method": ({"method": "median"}, ValueError, "method is 'median'"),
    "weight_missing": ({"method": "conv"}, ValueError, "weight is missing"),
    "weight_given": ({"weight": normal(3, 3, 2)}, ValueError, "weight is given"),
    "weight_shape": ({"method": "conv", "weight": normal(3, 3, 4)}, ValueError, r"expected \(o, 3, 2\)"),
    "bias": ({"bias": normal(3)}, ValueError, "has no bias"),
    "bias_shape": ({"method": "conv", "weight": normal(5, 3, 2), "bias": normal(3)}, ValueError, "bias has shape"),
    "usage_missing": ({"method": "most_used"}, ValueError, "usage is missing"),
    "usage_shape": ({"method": "most_used", "usage": normal(4)}, ValueError, "usage has shape"),
    "rank": ({"old": normal(3)}, ValueError, "old has shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_COMPRESS)
def test_bad_compressions(name):
    change, kind, message = BAD_COMPRESS[name]
    with pytest.raises(kind, match=message):
        memory.compress(**{"old": normal(5, 3), "rate": 2, **change})


def test_other_bad_input():
    with pytest.raises(TypeError, match="'hidden' is missing"):
        memory.update_memory(normal(2, 3), length=1)
    with pytest.raises(ValueError, match="length is -1"):
        memory.update_memory(normal(2, 3), normal(2, 3), length=-1)
    with pytest.raises(ValueError, match="hidden has shape"):
        memory.update_memory(normal(2, 4), normal(2, 3), length=1)
    with pytest.raises(ValueError, match="norm is 'l1'"):
        memory.attention_reconstruction_loss(**{**reconstruction(), "norm": "l1"})
    with pytest.raises(ValueError, match="compressed has shape"):
        memory.attention_reconstruction_loss(**{**reconstruction(), "compressed": normal(2, 2, M + 1)})
    with pytest.raises(ValueError, match="compressed has 3 rows: expected 2"):
        memory.auto_encoding_loss(normal(4, M), normal(3, M), weight=normal(M, M, 2))
    with pytest.raises(ValueError, match="rate is missing"):
        memory.stream([], [], memory_length=4, compressed_length=2)
    with pytest.raises(ValueError, match="compress has 1 entries"):
        memory.stream(
            [], [(layers.compressive_layer, {})] * 2, memory_length=4, compressed_length=2, rate=2, compress=[halves]
        )
    with pytest.raises(ValueError, match="memories has 1 entries"):
        memory.stream([], [(layers.compressive_layer, {})] * 2, memory_length=4, memories=[(None, None)])
    with pytest.raises(ValueError, match="recurrence is 'below'"):
        memory.stream([], [], memory_length=4, recurrence="below")
    with pytest.raises(ValueError, match="initial is 'ones'"):
        memory.stream([], [], memory_length=4, initial="ones")
