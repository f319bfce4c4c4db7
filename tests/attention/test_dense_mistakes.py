"""The catalogue of mistakes: its base is right, and every mistake shows where it should and only there."""

import math

import numpy as np
import pytest
from ml_dtypes import bfloat16

from refattn import patterns
from refattn.definitions.dense_loop import definition
from refattn.definitions.dense_steps import Steps
from refattn.mistakes.scaled_dot_product import dense_mutations, mutations_for
from refattn.records import Result

SLOPES = np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])  # the paper's, 6 heads


def tilt(logits, b, h, i, j):
    return logits * (1 + 0.1 * h) + 0.2 * b - 0.03 * i * j


def call(seed=0, *, b=2, h=6, g=2, q=5, k=9, d=7, e=3, dtype=np.float64, **options):
    """Arguments with pairwise different sizes; an option given as a function draws its value."""
    rng = np.random.default_rng(seed)
    shapes = {"q": (b, h, q, d), "k": (b, g, k, d), "v": (b, g, k, e)}
    drawn = {n: option(rng) if callable(option) and n != "score_mod" else option for n, option in options.items()}
    return {**{n: rng.standard_normal(shape).astype(dtype) for n, shape in shapes.items()}, **drawn}


def normal(*shape):
    return lambda rng: rng.standard_normal(shape)


def coin(*shape, p=0.7):
    return lambda rng: rng.random(shape) < p


def deep(rng):
    """A bias that pushes every logit below -104, where float32 exponentials of the plain logit are zero."""
    return rng.standard_normal((6, 5, 9)) - 130


def spiked(arguments, name, b, j):
    """The key or value at (b, ., j) is NaN."""
    x = arguments[name].copy()
    x[b, :, j] = np.nan
    return {**arguments, name: x}


def half_range():
    x = call(dtype=np.float16)
    return {**x, "q": x["q"] * np.float16(300), "k": x["k"] * np.float16(300), "scale": 1e-5}


LENGTHS = {"query_lengths": np.array([5, 3]), "key_lengths": np.array([6, 9])}
DROPOUT = {"dropout_mask": coin(2, 6, 5, 9), "dropout_rate": 0.25}
PROBES = {
    "plain": call(),
    "causal": call(1, causal=True, align="lower_right"),
    "causal_more_queries": call(1, q=9, k=5, causal=True, align="upper_left"),
    "causal_lengths": call(2, causal=True, align="lower_right", **LENGTHS),
    "lengths": call(2, **LENGTHS),
    "empty_rows": call(1, q=9, k=5, causal=True, align="lower_right"),
    "window": call(3, window=(2, 1), align="lower_right"),
    "mask": call(4, mask=coin(2, 1, 5, 9), bias=normal(2, 1, 1, 9)),
    "mask_square": call(4, q=9, mask=coin(2, 6, 9, 9), bias=normal(9, 9)),
    "mask_causal": call(4, mask=coin(5, 9), causal=True, align=4),
    "bias": call(5, bias=lambda rng: np.where(rng.random((6, 5, 9)) < 0.3, 0.0, rng.standard_normal((6, 5, 9)))),
    "bias_per_head": call(5, bias=normal(6, 1, 9), scale=0.7),
    "softcap": call(6, softcap=1.5, bias=normal(5, 9), mask=coin(5, 9), scale=1.2),
    "alibi": call(7, alibi_slopes=SLOPES * 1.5, align="lower_right"),
    "sinks": call(8, sinks=normal(6), scale=1.0),
    "segments": call(9, query_segments=np.arange(10).reshape(2, 5) // 3, key_segments=np.arange(18).reshape(2, 9) // 4),
    "dropout": call(10, **DROPOUT),
    "pattern": call(11, pattern=patterns.dilated(3)),
    "score_mod": call(12, score_mod=tilt, softcap=2.0),
    "wide": call(13, b=1, h=2, g=1, k=130, q=131, d=66, e=129),
    "same_d_and_e": call(14, e=7),
    "deep": call(15, bias=deep, dtype=np.float32),
    "deeper": call(15, bias=lambda rng: rng.standard_normal((6, 5, 9)) - 6e4, mask=coin(5, 9), dtype=np.float32),
    "deepest": call(15, bias=lambda rng: rng.standard_normal((6, 5, 9)) - 2e9, dtype=np.float32),
    "poisoned_key": spiked(call(16, mask=np.arange(9) != 4), "k", 1, 4),
    "poisoned_value": spiked(call(16, mask=np.arange(9) != 4), "v", 1, 4),
    "half_range": half_range(),
    "everything": call(
        17, mask=coin(2, 1, 5, 9), pattern=patterns.dilated(2) | patterns.window(1, 1, align=2), bias=normal(2, 6, 1, 9),
        causal=True, align=np.array([4, 2]), window=(6, None), scale=0.6, softcap=1.3, softcap_after_bias=True,
        alibi_slopes=SLOPES, sinks=normal(6, 2), lse_includes_sinks=False, head_map="tile", score_mod=tilt, **DROPOUT,
    ),
}  # fmt: skip
FINITE = [n for n in PROBES if not n.startswith("poisoned") and n not in ("wide", "half_range")]


def cotangents_of(arguments, seed=99):
    rng = np.random.default_rng(seed)
    lead = arguments["q"].shape[:-1]
    return {"output": rng.standard_normal((*lead, arguments["v"].shape[-1])), "lse": rng.standard_normal(lead)}


def close(x, y, tolerance):
    """Equal where not finite, within the tolerance of the larger one elsewhere."""
    assert x.shape == y.shape
    finite = np.isfinite(y)
    np.testing.assert_array_equal(np.where(finite, 0, x), np.where(finite, 0, y))
    scale = np.abs(y[finite]).max(initial=1.0)
    assert np.abs(x[finite] - y[finite]).max(initial=0.0) <= tolerance * scale


@pytest.mark.parametrize("name", [n for n in PROBES if n != "wide"])
def test_base_equals_definition(name):
    with np.errstate(all="ignore"):
        result = Steps(PROBES[name]).forward()
    want = definition(**PROBES[name])
    size = np.abs(want.lse[np.isfinite(want.lse)]).max(initial=1.0)  # the rounding of large logits reaches the weights
    close(result.output, want.output, 1e-12 + 4 * np.finfo(float).eps * size)
    close(result.lse, want.lse, 1e-12)


@pytest.mark.parametrize("name", FINITE)
def test_base_gradients_are_slopes_of_the_definition(name):
    """Central differences along one random direction of each argument, two steps and Richardson: error ~ h^4 and U / h."""
    arguments = {n: x.astype(np.float64) if n in "qkv" else x for n, x in PROBES[name].items()}
    if name == "deepest":  # logits of 2e9 leave differences no digits
        arguments["bias"] = arguments["bias"] + 2e9 - 500
    if name == "deeper":
        arguments["bias"] = arguments["bias"] + 6e4 - 500
    cotangents = cotangents_of(arguments)
    with np.errstate(all="ignore"):
        steps = Steps(arguments)
        steps.forward()
        gradients = steps.backward(cotangents)
    names = ["q", "k", "v", *(n for n in ("bias", "sinks", "softcap", "scale", "alibi_slopes") if n in arguments)]
    assert sorted(gradients) == sorted(names)
    rng = np.random.default_rng(5)

    def along(n, direction, h):
        result = definition(**{**arguments, n: arguments[n] + h * direction})
        lse = np.where(np.isfinite(result.lse), result.lse, 0)
        return np.sum(result.output * cotangents["output"]) + np.sum(lse * cotangents["lse"])

    for n in names:
        assert np.shape(gradients[n]) == np.shape(arguments[n])
        direction = rng.standard_normal(np.shape(arguments[n]))
        coarse, fine = ((along(n, direction, h) - along(n, direction, -h)) / (2 * h) for h in (2e-3, 1e-3))
        slope = (4 * fine - coarse) / 3
        size = np.sum(np.abs(gradients[n] * direction))
        assert abs(np.sum(gradients[n] * direction) - slope) <= 1e-8 * max(1.0, size)


BY_TILE = (
    "d_truncated", "dv_block_nosum", "grad_overwritten", "lse_partial_max", "rescale_missing", "scale_padded",
    "tail_dropped", "tail_unmasked",
)  # fmt: skip


@pytest.fixture(scope="module")
def shown():
    """(Mutation number, kind) -> the first probe on which it shows."""
    found = {}
    for name, arguments in PROBES.items():
        cotangents = cotangents_of(arguments)
        for i, mutation in enumerate(dense_mutations):
            if name == "wide" and mutation.class_ not in BY_TILE:
                continue
            for kind, inputs in (("forward", (arguments,)), ("gradients", (arguments, cotangents))):
                mistaken = getattr(mutation, kind)
                if mistaken is not None and (i, kind) not in found and mistaken(*inputs) is not None:
                    found[i, kind] = name
    return found


def test_every_mistake_shows(shown):
    for i, mutation in enumerate(dense_mutations):
        for kind in ("forward", "gradients"):
            assert getattr(mutation, kind) is None or (i, kind) in shown, (mutation.class_, mutation.says, kind)


def test_mistakes_need_their_option(shown):
    """On plain attention nothing shows that is about an option."""
    plain = {dense_mutations[i].class_ for (i, _), name in shown.items() if name == "plain"}
    assert plain == {
        "no_scale", "scale_twice", "scale_inv", "scale_dmodel", "scale_value", "scale_padded", "scale_grad", "d_truncated",
        "gqa_tile", "gqa_axis", "gqa_grad_nosum", "softmax_wrong_axis", "lse_base2", "exp2_nolog2e", "lse_layout",
        "lse_partial_max", "rescale_missing", "tail_unmasked", "tail_dropped", "dout_ignored", "dlse_ignored",
        "delta_missing", "grad_sign", "grad_overwritten",
    }  # fmt: skip


def results(class_, arguments, says=""):
    """What the mutations of a class give for these arguments."""
    found = [m.forward(arguments) for m in dense_mutations if m.class_ == class_ and says in m.says and m.forward]
    return [r for r in found if r is not None]


def gradients(class_, arguments, says="", **cotangents):
    cotangents = cotangents or cotangents_of(arguments)
    found = [
        m.gradients(arguments, cotangents)
        for m in dense_mutations
        if m.class_ == class_ and says in m.says and m.gradients
    ]
    return [g for g in found if g is not None]


def matches(found, want):
    assert any(
        np.allclose(r.output, want.output, rtol=0, atol=1e-12) and np.allclose(r.lse, want.lse, rtol=0, atol=1e-12)
        for r in found
    )


CHANGED = {
    "causal_other": ("causal", {"align": "upper_left"}),
    "causal_drop": ("causal", {"causal": False}),
    "window_drop": ("window", {"window": None}),
    "window_plus1": ("window", {"window": (3, 1)}),
    "window_edge": ("window", {"window": (2, 0)}),
    "mask_drop": ("mask", {"mask": None}),
    "segments_wrong": ("segments", {"query_segments": None, "key_segments": None}),
    "pattern_drop": ("pattern", {"pattern": None}),
    "gqa_tile": ("plain", {"head_map": "tile"}),
    "no_scale": ("sinks", {"scale": 1 / 7}),
    "scale_twice": ("plain", {"scale": 1 / 7}),
    "scale_inv": ("plain", {"scale": math.sqrt(7)}),
    "scale_dmodel": ("plain", {"scale": 42**-0.5}),
    "scale_padded": ("plain", {"scale": 8**-0.5}),
    "cap_drop": ("softcap", {"softcap": None}),
    "cap_after_bias": ("softcap", {"softcap_after_bias": True}),
    "alibi_nooffset": ("alibi", {"align": "upper_left"}),
    "alibi_drop": ("alibi", {"alibi_slopes": None}),
    "bias_drop": ("bias", {"bias": None}),
    "sink_drop": ("sinks", {"sinks": None}),
    "sink_lse": ("sinks", {"lse_includes_sinks": False}),
    "drop_scale": ("dropout", {"dropout_rate": 0.0}),
    "drop_ignored": ("dropout", {"dropout_mask": None, "dropout_rate": 0.0}),
}


@pytest.mark.parametrize("class_", CHANGED)
def test_mistaken_options_are_those_options(class_):
    name, changed = CHANGED[class_]
    arguments = PROBES[name]
    if class_ == "no_scale":
        arguments, changed = {**arguments, "scale": 0.3}, {"scale": 1.0}
    matches(results(class_, arguments), definition(**{**arguments, **changed}))


def test_causal_variants():
    arguments = PROBES["causal"]
    i, j = np.arange(5)[:, None], np.arange(9)
    for class_, seen in (("causal_strict", j < i + 4), ("causal_inverted", j >= i + 4)):
        matches(results(class_, arguments), definition(**{**arguments, "causal": False, "mask": seen}))


def test_tail_is_attention_over_zero_keys():
    arguments = PROBES["plain"]
    more = {n: np.concatenate([arguments[n], np.zeros_like(arguments[n][:, :, :7])], axis=2) for n in "kv"}
    matches(results("tail_unmasked", arguments, "tile of 16"), definition(**{**arguments, **more}))
    assert gradients("tail_unmasked", arguments, "tile of 16")[0]["k"].shape == arguments["k"].shape
    # A causal kernel hides such a tail by itself.
    assert not results("tail_unmasked", PROBES["causal"])


def test_cap_after_mask_gives_hidden_keys_the_weight_of_minus_cap():
    arguments = call(softcap=1.5, mask=np.arange(9) < 6)
    logits = definition(**arguments, keep_weights=True).logits
    shown = np.where(arguments["mask"], logits, -1.5)
    matches(
        results("cap_after_mask", arguments),
        definition(np.ones((2, 6, 5, 1)), np.zeros((2, 2, 9, 1)), arguments["v"], bias=shown),
    )


def test_empty_rows():
    arguments = PROBES["empty_rows"]
    mean = arguments["v"].mean(2).repeat(3, axis=1)
    for result in results("finite_sentinel", arguments, "-1e9, not"):
        np.testing.assert_allclose(result.output[:, :, 0], mean, rtol=0, atol=1e-14)
    nan = results("empty_row_nan", arguments)[0]
    assert np.isnan(nan.output[:, :, :4]).all()
    assert np.isfinite(nan.output[:, :, 4:]).all()
    assert np.isnan(gradients("empty_row_nan", arguments)[0]["k"]).all()
    assert {float(r.lse[0, 0, 0]) for r in results("merge_empty", arguments)} == {0.0, np.inf}


def test_range():
    (clamped,) = results("max_clamped0", PROBES["deep"])
    assert not clamped.output.any()
    assert (clamped.lse == -np.inf).all()
    assert not results(
        "max_clamped0", {**PROBES["deep"], "q": PROBES["deep"]["q"].astype(np.float64)}
    )  # exp(-130) is a number
    below = results("finite_sentinel", PROBES["deeper"], "maximum starts at -5e4")
    assert not below[0].output.any()
    assert np.isnan(results("qk_overflow", PROBES["half_range"])[0].output).any()


def test_poison():
    for name in ("poisoned_key", "poisoned_value"):
        leaked = results("masked_value_leak", PROBES[name])
        assert len(leaked) == 1
        assert np.isnan(leaked[0].output[1]).all()
        assert np.isfinite(leaked[0].output[0]).all()


def test_lse():
    want = definition(**PROBES["plain"])
    result = results("lse_base2", PROBES["plain"])[0]
    np.testing.assert_array_equal(result.output, results("lse_layout", PROBES["plain"])[0].output)
    np.testing.assert_allclose(np.exp2(result.lse), np.exp(want.lse), rtol=1e-12)
    assert results("lse_layout", PROBES["plain"])[0].lse.shape == (2, 5, 6)


def test_online_softmax_without_rescaling():
    """Two tiles by hand: the sums of the first are in units of its own maximum."""
    arguments = call(b=1, h=1, g=1, q=1, k=6, d=2)
    logits = definition(**arguments, keep_weights=True).logits[0, 0, 0]
    first, total = logits[:4].max(), logits.max()
    p = np.exp(logits - np.where(np.arange(6) < 4, first, max(first, total)))
    (both,) = results("rescale_missing", arguments, "row sum are not rescaled from tile to tile of 4") or [None]
    if first == total:
        assert both is None
    else:
        np.testing.assert_allclose(both.output[0, 0, 0], p @ arguments["v"][0, 0] / p.sum(), rtol=1e-12)


def test_gradients_of_groups():
    arguments = PROBES["plain"]
    alone = {n: x.repeat(3, axis=1) if n in "kv" else x for n, x in arguments.items()}
    cotangents = cotangents_of(arguments)
    with np.errstate(all="ignore"):
        steps = Steps(alone)
        steps.forward()
        per_head = steps.backward(cotangents)
    first, last, mean = gradients("gqa_grad_nosum", arguments)
    for n in "kv":
        groups = per_head[n].reshape(2, 2, 3, *per_head[n].shape[2:])
        np.testing.assert_allclose(first[n], groups[:, :, 0], rtol=0, atol=1e-13)
        np.testing.assert_allclose(last[n], groups[:, :, 2], rtol=0, atol=1e-13)
        np.testing.assert_allclose(3 * mean[n], groups.sum(2), rtol=0, atol=1e-12)
    (other,) = gradients("gqa_tile", arguments, "other map")
    interleaved = per_head["k"].reshape(2, 3, 2, *per_head["k"].shape[2:]).sum(1)
    np.testing.assert_allclose(other["k"], interleaved, rtol=0, atol=1e-12)


def test_gradients_of_cotangents():
    arguments = PROBES["plain"]
    cotangents = cotangents_of(arguments)

    def right(**some):
        with np.errstate(all="ignore"):
            steps = Steps(arguments)
            steps.forward()
            return steps.backward(some)

    (ignored,) = gradients("dlse_ignored", arguments)
    np.testing.assert_allclose(ignored["q"], right(output=cotangents["output"])["q"], rtol=0, atol=1e-14)
    assert not gradients("dlse_ignored", arguments, output=cotangents["output"])
    (ones,) = gradients("dout_ignored", arguments)
    np.testing.assert_allclose(ones["v"], right(output=np.ones((2, 6, 5, 3)))["v"], rtol=0, atol=1e-14)


def test_dropped_arguments_have_no_gradient():
    (found,) = gradients("sink_drop", PROBES["sinks"], "ignored")
    assert not found["sinks"].any()
    (found,) = gradients("cap_drop", PROBES["softcap"])
    assert found["softcap"] == 0
    assert "scale" in found
    assert "scale" not in gradients("scale_twice", PROBES["softcap"])[0]  # its place in the graph is another


def test_arguments_stay_as_they_are():
    arguments = call(3, mask=coin(5, 9), sinks=normal(6), softcap=2.0, bias=normal(5, 9), dtype=bfloat16)
    before = {n: np.array(x) for n, x in arguments.items()}
    cotangents = cotangents_of(arguments)
    for array in (*arguments.values(), *cotangents.values()):
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    for mutation in dense_mutations:
        if mutation.forward and (result := mutation.forward(arguments)) is not None:
            assert result.output.dtype == result.lse.dtype == np.float64
        if mutation.gradients:
            mutation.gradients(arguments, cotangents)
    for n, x in before.items():
        np.testing.assert_array_equal(np.asarray(arguments[n], np.float64), x.astype(np.float64))


@pytest.mark.parametrize(
    "sizes", [{"b": 0}, {"q": 0}, {"k": 0}, {"e": 0}, {"b": 1, "h": 1, "g": 1, "q": 1, "k": 1, "d": 1, "e": 1}]
)
def test_small_sizes(sizes):
    arguments = call(**sizes)
    for mutation in dense_mutations:
        if mutation.forward:
            mutation.forward(arguments)
        if mutation.gradients:
            mutation.gradients(arguments, cotangents_of(arguments))


def test_mutations_for_another_mechanism():
    """A mechanism whose names differ: local attention as scaled dot-product attention with a window."""
    arguments = call(2, q=9)

    def prepare(a):
        return {**{n: x for n, x in a.items() if n != "reach"}, "window": (a["reach"], a["reach"]), "align": 0}

    adapted = mutations_for(prepare, exclude=("gqa_tile", "gqa_axis"))
    assert {m.class_ for m in dense_mutations} - {m.class_ for m in adapted} == {"gqa_tile", "gqa_axis"}
    (dropped,) = [m for m in adapted if m.says == "the window is ignored"]
    result = dropped.forward({**arguments, "reach": 2})
    np.testing.assert_allclose(result.output, definition(**arguments).output, rtol=0, atol=1e-13)
    assert set(dropped.gradients({**arguments, "reach": 2}, cotangents_of(arguments))) == {"q", "k", "v"}
    assert mutations_for(lambda a: None)[0].forward(arguments) is None
    (finished,) = [
        m
        for m in mutations_for(prepare, finish=lambda a, r: Result(output=2 * r.output, lse=r.lse))
        if m.says == "the window is ignored"
    ]
    np.testing.assert_array_equal(finished.forward({**arguments, "reach": 2}).output, 2 * result.output)
    assert finished.gradients is None
