"""multi_head_attention: gradients, definition, extra keys, roles, stored cases of three implementations, mistakes."""

import numpy as np
import pytest
from contract.cases.multi_head import B, D, E, G, H, K, M, Q, base
from support import assert_adjoint, assert_close, cases

import refattn as ra

attention = ra.multi_head_attention
EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def test_leading_axes_broadcast_and_none():
    arguments = {**base(7), "x_q": rng(1).standard_normal((3, 1, Q, M)), "x_k": rng(2).standard_normal((2, K, M))}
    arguments["x_v"] = rng(3).standard_normal((K, M))
    assert attention.forward(**arguments).output.shape == (3, 2, Q, M)
    assert_close(attention(**arguments), attention.definition(**arguments).output, 80 * EPS)
    assert_adjoint(attention, arguments, rng(4))
    shared = {
        **arguments,
        "x_v": rng(5).standard_normal((3, 1, Q, M)),
        "x_k": None,
        "x_q": rng(6).standard_normal((Q, M)),
    }
    assert_adjoint(
        attention, {n: x for n, x in shared.items() if x is not None}, rng(4)
    )  # x_q in two roles, broadcast in one
    assert attention(**{**arguments, "x_q": arguments["x_q"][0, 0], "x_k": arguments["x_k"][0]}).shape == (Q, M)


def test_identity_projections_are_plain_attention():
    q, k, v = (rng(n).standard_normal((B, 3, 5, 4)) for n in range(3))
    joined = [np.swapaxes(x, 1, 2).reshape(B, 5, 12) for x in (q, k, v)]
    w = np.eye(12).reshape(12, 3, 4)
    got = attention(*joined, w_q=w, w_k=w, w_v=w, w_o=np.eye(12).reshape(3, 4, 12))
    want = np.swapaxes(ra.scaled_dot_product_attention(q, k, v), 1, 2).reshape(B, 5, 12)
    assert np.array_equal(got, want)


def test_zero_attention_is_a_sink_of_logit_zero():
    arguments = base(8)
    zero, sink = attention.forward(**arguments, zero_attention=True), attention.forward(**arguments, sinks=np.zeros(H))
    assert_close(zero.output, sink.output, 80 * EPS)
    assert_close(zero.lse, sink.lse, 80 * EPS)


# ---------------------------------------------------------------------- stored cases


def head_weights(w, h):  # rows are (head, channel) -> (m, h, d)
    return w.reshape(h, -1, w.shape[-1]).transpose(2, 0, 1)


def output_weights(w, h):  # columns are (head, channel) -> (h, e, m)
    return w.T.reshape(h, -1, w.shape[0])


def stored_torch(meta, a):
    o = meta["options"]
    h = o["H"]
    names = ("query",) if o["self_attention"] else ("query", "key", "value")
    pairs = {f"x_{n[0]}": (a[f"in_{n}"], a[f"grad_{n}"]) for n in names}
    for at, n in enumerate("qkv"):
        if "w_in_proj_weight" in a:
            pairs[f"w_{n}"] = tuple(head_weights(np.split(a[p + "w_in_proj_weight"], 3)[at], h) for p in ("", "grad_"))
        else:
            pairs[f"w_{n}"] = tuple(head_weights(a[f"{p}w_{n}_proj_weight"], h) for p in ("", "grad_"))
        if o["bias"]:
            pairs[f"b_{n}"] = tuple(a[p + "w_in_proj_bias"].reshape(3, h, -1)[at] for p in ("", "grad_"))
    pairs["w_o"] = tuple(output_weights(a[p + "w_out_proj.weight"], h) for p in ("", "grad_"))
    if o["bias"]:
        pairs["b_o"] = tuple(a[p + "w_out_proj.bias"] for p in ("", "grad_"))
    if o["add_bias_kv"]:
        for ours, theirs in (("extra_key", "bias_k"), ("extra_value", "bias_v")):
            pairs[ours] = tuple(a[f"{p}w_{theirs}"].reshape(h, -1) for p in ("", "grad_"))
    options = {"zero_attention": o["add_zero_attn"]}
    keys = a["in_query"].shape[1] if o["self_attention"] else a["in_key"].shape[1]
    if "in_attn_mask" in a:
        mask = a["in_attn_mask"]
        mask = mask.reshape(-1, h, *mask.shape[1:]) if mask.ndim == 3 else mask
        options["mask" if mask.dtype == bool else "bias"] = ~mask if mask.dtype == bool else mask
    if "in_key_padding_mask_True_is_ignored" in a:
        options["mask"] = ~a["in_key_padding_mask_True_is_ignored"][:, None, None, :] & options.get(
            "mask", np.ones(keys, bool)
        )
    return pairs, options


def stored_keras(meta, a):
    pairs = {f"x_{n[0]}": (a[f"in_{n}"], a[f"grad_{n}"]) for n in ("query", "key", "value")}
    for n, theirs in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "attention_output")):
        for kind, end in (("w", "kernel"), ("b", "bias")):
            pairs[f"{kind}_{n}"] = a[f"w_{theirs}.{end}"], a[f"grad_w_{theirs}.{end}"]
    masked = "in_attention_mask" in a
    return pairs, {"causal": True, "mask": a["in_attention_mask"][:, None]} if masked else {}


def stored_x_transformers(meta, a):
    h = meta["options"]["heads"]
    pairs = {"x_q": (a["in_x"], a["grad_x"])}
    for n in "qkv":
        pairs[f"w_{n}"] = tuple(head_weights(a[f"{p}w_to_{n}.weight"], h) for p in ("", "grad_"))
    pairs["w_o"] = tuple(output_weights(a[p + "w_to_out.weight"], h) for p in ("", "grad_"))
    return pairs, {"causal": True, "window": (3, 0)}


STORED = {"torch_mha": stored_torch, "keras": stored_keras, "x_transformers_module": stored_x_transformers}


@pytest.mark.parametrize(("origin", "name", "meta", "a"), [(o, *case) for o in STORED for case in cases(o)])
def test_stored_cases(origin, name, meta, a):
    pairs, options = STORED[origin](meta, a)
    single = any(x.dtype == np.float32 for x, _ in pairs.values())
    unit = max(2e-5 if single else 1e-10, meta["suggested_atol"] or 0)  # the producer's precision
    arguments = {n: x for n, (x, _) in pairs.items()} | options
    result, pullback = attention.vjp(**arguments)
    assert_close(result.output, a["out"], unit)
    gradients = pullback(a["cot_out"])
    for n, (_, want) in pairs.items():
        assert_close(gradients[n], want, 10 * unit)
    if "out_weights" in a:
        weights = attention.forward(**arguments, keep_weights=True).weights
        assert_close(weights.mean(1) if meta["options"]["average_attn_weights"] else weights, a["out_weights"], unit)


# ---------------------------------------------------------------------- counts


def test_parameters_do_not_depend_on_the_number_of_heads():
    for h in (6, 12, 24, 48):
        assert attention.cost(h=h, q=5, k=5, d=768 // h).parameters == 4 * 768**2
    cost = attention.cost(b=2, h=4, g=2, q=5, k=7, d=3, e=2, m=8, m1=9, m2=10, biases=True, extra_key=True)
    assert cost.parameters == 8 * 12 + 9 * 6 + 10 * 4 + 8 * 8 + (12 + 6 + 4 + 8) + (6 + 4)
    arrays = base(0, m1=5, m2=6, extra=True)
    assert attention.cost(
        b=B, h=H, g=G, q=Q, k=K, d=D, e=E, m=M, m1=5, m2=6, biases=True, extra_key=True
    ).parameters == sum(x.size for n, x in arrays.items() if not n.startswith("x_"))


def test_extra_keys_are_counted_outside_the_pattern():
    sizes = {"b": 2, "h": 3, "q": 6, "k": 6, "d": 4, "e": 2}
    plain, extra = attention.cost(**sizes, causal=True), attention.cost(**sizes, causal=True, zero_attention=True)
    assert plain.multiplies == ra.scaled_dot_product_attention.cost(**sizes, causal=True).multiplies == 6 * 21 * 6
    assert extra.multiplies - plain.multiplies == 6 * 6 * 6


# ---------------------------------------------------------------------- bad input

BAD = {
    "w_q": ({"w_q": np.zeros((5, H, D))}, ValueError, "w_q has shape .5, 4, 3.*'m'.* is 5, but 3"),
    "w_k_channels": ({"w_k": np.zeros((M, G, 7))}, ValueError, "w_k has shape"),
    "w_v": ({"w_v": np.zeros((7, G, E))}, ValueError, "w_v has shape"),
    "w_o": ({"w_o": np.zeros((H, 5, M))}, ValueError, "w_o has shape"),
    "w_o_heads": ({"w_o": np.zeros((3, E, M))}, ValueError, "w_o has shape"),
    "axes": ({"w_q": np.zeros((M, H * D))}, ValueError, "w_q has shape .3, 12.: expected 3 axes"),
    "b_q": ({"b_q": np.zeros(D)}, ValueError, "b_q has shape"),
    "b_o": ({"b_o": np.zeros(M + 1)}, ValueError, "b_o has shape"),
    "groups": ({"w_q": np.zeros((M, 3, D)), "w_o": np.zeros((3, E, M)), "b_q": None}, ValueError, "3 is not a multiple of 2"),
    "lengths": ({"x_v": np.zeros((B, 9, M))}, ValueError, "x_v has shape"),
    "batch": ({"x_k": np.zeros((3, K, M)), "x_v": np.zeros((3, K, M))}, ValueError, "leading axes"),
    "extra_key": ({"extra_key": np.zeros((G, D))}, TypeError, "extra_value is missing"),
    "extra_shape": ({"extra_key": np.zeros((H, D)), "extra_value": np.zeros((H, E))}, ValueError, "extra_key has shape"),
    "zero_attention": ({"zero_attention": 1}, TypeError, "zero_attention is 1"),
    "mask_columns": ({"mask": np.ones((Q, K + 1), bool), "zero_attention": True}, ValueError, "mask has shape"),
    "missing": ({"w_o": None}, TypeError, "the argument 'w_o' is None"),
    "align": ({"causal": True}, ValueError, "align is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        attention.forward(**{**base(), **change})


EXTRA_KEYS = {"zero_attention": True, "extra_key": np.full((2, 3), 0.3), "extra_value": np.full((2, 2), 0.7)}


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"key_lengths": [2, 4]},
        {"mask": np.tri(4, dtype=bool)},
        {"pattern": ra.patterns.window(1, 0)},
        {"bias": np.random.default_rng(8).standard_normal((2, 4, 4))},
        {"alibi_slopes": np.array([0.5, 0.25]), "softcap": 2.0},
        {"score_mod": lambda s, b, h, i, j: s + 0.1 * (i - j)},
        {"query_segments": np.array([0, 0, 1, 1]), "key_segments": np.array([0, 1, 1, 0])},
        {"query_lengths": [3, 4]},
    ],
    ids=lambda o: next(iter(o)),
)
def test_keeping_weights_changes_nothing_beside_extra_keys(options):
    r = np.random.default_rng(9)
    arguments = {
        "x_q": r.standard_normal((2, 4, 5)), "w_q": r.standard_normal((5, 2, 3)), "w_k": r.standard_normal((5, 2, 3)),
        "w_v": r.standard_normal((5, 2, 2)), "w_o": r.standard_normal((2, 2, 5)), **EXTRA_KEYS, **options,
    }  # fmt: skip
    plain, kept = (
        ra.multi_head_attention.forward(**arguments),
        ra.multi_head_attention.forward(**arguments, keep_weights=True),
    )
    want = ra.multi_head_attention.definition(**arguments, keep_weights=True)
    np.testing.assert_allclose(kept.output, plain.output, rtol=0, atol=1e-14)
    np.testing.assert_allclose(kept.output, want.output, rtol=0, atol=1e-13)
    np.testing.assert_allclose(kept.weights, want.weights, rtol=0, atol=1e-14)
    np.testing.assert_allclose(kept.logits, want.logits, rtol=0, atol=1e-13)
