"""Mistakes of softmax attention: every one shows where it should and only there, with the numbers it should have."""

import math

import numpy as np
import pytest
from dense_calls import FINITE, PROBES, call, coin, cotangents_of, normal
from mistake_slopes import assert_slopes
from ml_dtypes import bfloat16

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.mistakes.engine import Case
from refattn.mistakes.scaled_dot_product import catalogue
from refattn.records import Result

MISTAKES = tuple(catalogue)


def side_of(mistake):
    return "both" if "both" in mistake.sides else mistake.sides[0]


def definition(*args, **arguments):
    arguments |= dict(zip("qkv", args, strict=False))
    return Result(**ScaledDotProduct(arguments).result())


KINDS = ("results", "gradients")
BY_TILE = (
    "accumulator_overwritten", "block_list_transposed", "causal_other", "d_truncated", "dv_block_nosum", "grad_overwritten",
    "lse_partial_max", "online_sum", "rescale_missing", "scale_padded", "sink_twice", "tail_dropped", "tail_unmasked",
    "tile_overrun", "unwritten",
)  # fmt: skip


ONLY = {
    "wide": BY_TILE,
    "wide_causal": ("block_list_transposed",),
    "many_positions": ("idx32",),
    "positions": ("idx32",),
}


@pytest.fixture(scope="module")
def shown():
    """(Mistake number, kind) -> the first probe on which it shows."""
    found = {}
    for name, arguments in PROBES.items():
        case = Case(ScaledDotProduct, arguments, cotangents_of(arguments))
        for i, mistake in enumerate(MISTAKES):
            if mistake.class_ not in ONLY.get(name, (mistake.class_,)):
                continue
            for kind in KINDS:
                if (i, kind) not in found and getattr(case, kind)(mistake, side_of(mistake)) is not None:
                    found[i, kind] = name
    return found


def test_every_mistake_shows(shown):
    kinds = ["gradients" if side_of(m) == "backward" else "results" for m in MISTAKES]
    hidden = [
        (m.class_, m.says)
        for i, m in enumerate(MISTAKES)
        if (i, kinds[i]) not in shown and m.edit.__name__ != "alias_stride"
    ]
    assert not hidden


def test_mistakes_need_their_option(shown):
    """On plain attention nothing shows that is about an option."""
    plain = {MISTAKES[i].class_ for (i, _), name in shown.items() if name == "plain"}
    assert plain == {
        "accumulator_overwritten", "alias_stride", "arguments_exchanged", "axis_crossed", "batch_crossed",
        "block_list_transposed", "d_truncated", "delta_missing", "dlse_ignored", "dout_ignored", "exp2_nolog2e",
        "gqa_axis", "gqa_grad_nosum", "gqa_tile", "grad_overwritten", "grad_sign", "gradient_absent", "lse_base2",
        "lse_layout", "lse_partial_max", "merge_lse", "merge_unweighted", "narrow_products", "no_scale",
        "norm_grad_missing", "online_sum", "rescale_missing", "rough_exponential", "row_sum_eps",
        "scale_default_missing", "scale_dmodel", "scale_grad", "scale_inv", "scale_padded", "scale_twice",
        "scale_value", "softmax_wrong_axis", "stale_scratch", "tail_dropped", "tail_unmasked", "tile_overrun",
        "unwritten", "zeros",
    }  # fmt: skip


# Whose backward is not the derivative of what they compute, or has none that differences see.
UNDERIVED = (
    "exp2_nolog2e_underived", "rough_exponential", "rough_tanh", "single_in_double",
    "cap_clipped",  # a kink
)  # fmt: skip


def test_gradients_of_a_mistake_are_slopes_of_its_results(shown):
    """As a framework would derive them.  Central differences, two steps and Richardson: error ~ h^4 and U / h.

    What is subtracted before exp is held fixed, as frameworks hold it.
    """
    rng = np.random.default_rng(5)
    for i, mistake in enumerate(MISTAKES):
        name = shown.get((i, "gradients"))
        if (
            name not in FINITE
            or name.startswith("deep")
            or "both" not in mistake.sides
            or mistake.edit.__name__ in UNDERIVED
        ):
            continue
        arguments = PROBES[name]
        cotangents = cotangents_of(arguments)
        if mistake.class_ == "finite_sentinel":  # large numbers leave differences no digits
            if mistake.edit.number < -1e5:
                continue
            cotangents["lse"] *= 0.0
        assert_slopes(mistake, arguments, cotangents, rng, fixed=("maximum", "last_maximum"))


def results(class_, arguments, says=""):
    """What the mistakes of a class give for these arguments."""
    case = Case(ScaledDotProduct, arguments)
    asked = [m for m in MISTAKES if m.class_ == class_ and says in m.says and side_of(m) != "backward"]
    found = [case.results(m, side_of(m)) for m in asked]
    return [Result(**r) for r in found if r is not None]


def gradients(class_, arguments, says="", **cotangents):
    case = Case(ScaledDotProduct, arguments, cotangents or cotangents_of(arguments))
    asked = [m for m in MISTAKES if m.class_ == class_ and says in m.says]
    return [g for m in asked if (g := case.gradients(m, side_of(m))) is not None]


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
    lse = [float(r.lse[0, 0, 0]) for r in results("merge_empty", arguments)]
    assert lse[:2] == [np.inf, 0.0]
    assert np.isnan(lse[2])


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


def test_cotangents_of_other_strides():
    arguments, cotangents = PROBES["plain"], cotangents_of(PROBES["plain"])
    assert not gradients("alias_stride", arguments, "contiguous")
    cotangents["output"] = np.ascontiguousarray(np.swapaxes(cotangents["output"], 1, 2)).swapaxes(1, 2)
    (walked,) = gradients("alias_stride", arguments, "contiguous", **cotangents)
    memory = np.swapaxes(cotangents["output"], 1, 2).reshape(2, 6, 5, 3)
    want = ScaledDotProduct(arguments, {**cotangents, "output": memory}).gradient()
    np.testing.assert_allclose(walked["v"], want["v"], rtol=0, atol=1e-14)


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
    per_head = ScaledDotProduct(alone, cotangents).gradient()
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
        return ScaledDotProduct(arguments, some).gradient()

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


def test_arguments_stay_as_they_are():
    arguments = call(3, mask=coin(5, 9), sinks=normal(6), softcap=2.0, bias=normal(5, 9), dtype=bfloat16)
    before = {n: np.array(x) for n, x in arguments.items()}
    cotangents = cotangents_of(arguments)
    for array in (*arguments.values(), *cotangents.values()):
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    case = Case(ScaledDotProduct, arguments, cotangents)
    for mistake in MISTAKES:
        for side in mistake.sides:
            case.results(mistake, side)
            case.gradients(mistake, side)
    for n, x in before.items():
        np.testing.assert_array_equal(np.asarray(arguments[n], np.float64), x.astype(np.float64))


@pytest.mark.parametrize(
    "sizes", [{"b": 0}, {"q": 0}, {"k": 0}, {"e": 0}, {"b": 1, "h": 1, "g": 1, "q": 1, "k": 1, "d": 1, "e": 1}]
)
def test_small_sizes(sizes):
    arguments = call(**sizes)
    case = Case(ScaledDotProduct, arguments, cotangents_of(arguments))
    for mistake in MISTAKES:
        for side in mistake.sides:
            case.results(mistake, side)
            case.gradients(mistake, side)
