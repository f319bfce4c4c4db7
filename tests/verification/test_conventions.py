"""Conventions: records, the reference that follows them, and the signatures that are known."""

import dataclasses
import math
import re

import numpy as np
import pytest

import refattn as ra
from refattn.verification.conventions import (
    PRESETS,
    Conventions,
    UsageError,
    alternatives,
    detect,
    gradients_open,
    open_elements,
    reference_arguments,
    reference_cotangents,
    reference_gradients,
    reference_result,
    resolve,
    settle,
)

SDPA = ra.scaled_dot_product_attention
EPS = np.finfo(np.float64).eps


def arrays(q=5, k=7, h=6, g=2, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "q": rng.standard_normal((2, h, q, 4)),
        "k": rng.standard_normal((2, g, k, 4)),
        "v": rng.standard_normal((2, g, k, 3)),
    }


def visible_keys(conventions, options, q=5, k=5):
    """Keys that each query sees, counted by a softmax over zero logits."""
    given = {"q": np.zeros((1, 1, q, 2)), "k": np.zeros((1, 1, k, 2)), "v": np.ones((1, 1, k, 1))}
    lse = SDPA.forward(**reference_arguments(SDPA, given, options, conventions)).lse[0, 0]
    return np.rint(np.exp(lse)).astype(int).tolist()


def test_a_key_that_is_listed_twice_counts_as_declared():
    lists = np.array([[[[0, 2, 2, 2], [1, 1, -1, -1]]]])
    for declared, counts in ((None, [2, 1]), ("union", [2, 1]), ("multiset", [4, 2])):
        assert visible_keys(Conventions(duplicates=declared), {"indices": lists}, q=2) == counts
    names = [name for name, _ in alternatives(Conventions())]
    assert "duplicates_counted" in names
    assert "duplicates_once" not in names
    given = reference_arguments(ra.lsh_attention, {}, {"duplicates": "trax1"}, Conventions(duplicates="multiset"))
    assert given == {"duplicates": "trax1"}  # an option of its own there


# ---------------------------------------------------------------------- records


def test_resolve_takes_names_fields_and_records():
    assert resolve(None) == Conventions()
    assert resolve("torch") is not None
    assert resolve("torch").align == "upper_left"
    assert resolve({"preset": "jax", "align": "lower_right"}) == dataclasses.replace(
        PRESETS["jax"].conventions, align="lower_right"
    )
    assert resolve({"lse_base": 2}).lse_base == "2"
    record = Conventions(head_map="tile")
    assert resolve(record) is record


@pytest.mark.parametrize(
    "given, says",
    [("trch", "no preset 'trch'"), ({"algin": "upper_left"}, "no field 'algin'"), ({"align": "middle"}, "'middle'")],
)
def test_resolve_names_what_is_wrong(given, says):
    with pytest.raises(UsageError, match=says):
        resolve(given)


def test_settle_follows_the_candidate_then_the_record_then_the_default():
    options = {"causal": True, "align": "upper_left"}
    assert settle(options, Conventions())["align"] == "lower_right"
    assert settle(options, Conventions(), lambda name: True)["align"] == "upper_left"
    assert settle({"causal": True}, Conventions(align="upper_left"))["align"] == "upper_left"
    assert "align" not in settle({"softcap": 2.0, "align": "upper_left"}, Conventions())
    assert settle({"softcap": 2.0}, Conventions(softcap_after_bias=True))["softcap_after_bias"] is True
    assert "softcap_after_bias" not in settle({}, Conventions(softcap_after_bias=True))


def test_convention_options_that_a_mechanism_lacks_are_left_out():
    class Other:
        @staticmethod
        def __call__(q, k, v, *, causal=False):
            raise NotImplementedError

    settled = reference_arguments(Other(), arrays(), {"causal": True}, Conventions(head_map="tile"))
    assert set(settled) == {"q", "k", "v", "causal"}


# ---------------------------------------------------------------------- the reference follows


def test_window_counts():
    options = {"causal": True, "window": (3, 0)}
    assert visible_keys(Conventions(), options) == [1, 2, 3, 4, 4]
    assert visible_keys(Conventions(window="count"), options) == [1, 2, 3, 3, 3]
    assert visible_keys(Conventions(window="count"), {"window": (0, 1)}) == [1, 1, 1, 1, 0]
    assert visible_keys(Conventions(window="count", align="upper_left"), {"window": (0, None)}, q=3, k=5) == [4, 3, 2]
    assert visible_keys(Conventions(window="count"), {"window": (None, 0)}) == [1, 2, 3, 4, 5]


def test_counted_window_of_zero_keeps_the_mask_and_the_lengths():
    mask = np.ones((5, 5), bool)
    mask[1, 2] = False
    given = {"q": np.zeros((2, 1, 5, 2)), "k": np.zeros((2, 1, 5, 2)), "v": np.ones((2, 1, 5, 1))}
    options = {"window": (0, 1), "mask": mask, "key_lengths": np.array([5, 4]), "query_lengths": np.array([5, 3])}
    arguments = reference_arguments(SDPA, given, options, Conventions(window="count"))
    seen = np.rint(np.exp(SDPA.forward(**arguments).lse[:, 0])).astype(int)
    # batch 0: offset 0, query 1 may not see key 2; batch 1: offset 4 - 3 = 1, keys 2, 3 for queries 0, 1, none for 2
    assert seen.tolist() == [[1, 0, 1, 1, 0], [1, 1, 0, 0, 0]]


def test_causal_alignment():
    assert visible_keys(Conventions(), {"causal": True}, q=2, k=4) == [3, 4]
    assert visible_keys(Conventions(align="upper_left"), {"causal": True}, q=2, k=4) == [1, 2]


def dense(q, k, v, bias):
    """Softmax attention, safe for complex step."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    logits = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1]) + bias
    top = logits.real.max(-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    return weights @ v / total, (top + np.log(total))[..., 0]


def complex_step(function, x, seed=5):
    """Derivative of a scalar function along a random direction, and the direction."""
    direction = np.random.default_rng(seed).standard_normal(x.shape)
    return function(x + 1e-30j * direction).imag / 1e-30, direction


@pytest.mark.parametrize("with_bias", [False, True])
def test_signed_alibi_forward_and_gradients(with_bias):
    given = arrays()
    rng = np.random.default_rng(1)
    options = {"alibi_slopes": rng.random(6)}
    if with_bias:
        options["bias"] = rng.standard_normal((1, 6, 5, 1))
    signed = Conventions(alibi="signed")
    arguments = reference_arguments(SDPA, given, options, signed)
    result, pull = SDPA.vjp(**arguments)
    distance = np.arange(7) - np.arange(5)[:, None] - 2

    plain_bias = options.get("bias", 0.0)

    def full(slopes, bias=plain_bias):
        return dense(**given, bias=bias + slopes[:, None, None] * distance)

    output, lse = full(options["alibi_slopes"])
    # 7 products and a few roundings; logits reach about 10
    np.testing.assert_allclose(result.output, output, rtol=0, atol=200 * EPS)
    np.testing.assert_allclose(result.lse, lse, rtol=0, atol=200 * EPS)

    cotangents = {"output": rng.standard_normal(output.shape), "lse": rng.standard_normal(lse.shape)}
    gradients = reference_gradients(
        pull(**reference_cotangents(cotangents, signed)), result, arguments, cotangents, signed, options
    )
    assert gradients.keys() == {"q", "k", "v", *options}

    def loss(**changed):
        o, s = full(changed.get("slopes", options["alibi_slopes"]), **{n: x for n, x in changed.items() if n == "bias"})
        return (o * cotangents["output"]).sum() + (s * cotangents["lse"]).sum()

    wanted, direction = complex_step(lambda x: loss(slopes=x), options["alibi_slopes"])
    assert abs((gradients["alibi_slopes"] * direction).sum() - wanted) < 1e-12 * abs(gradients["alibi_slopes"]).sum()
    if with_bias:
        wanted, direction = complex_step(lambda x: loss(bias=x), options["bias"])
        assert gradients["bias"].shape == options["bias"].shape
        assert abs((gradients["bias"] * direction).sum() - wanted) < 1e-12 * abs(gradients["bias"]).sum()


def test_signed_alibi_in_half_precision_is_not_rounded_to_half():
    given = {n: x.astype(np.float16) for n, x in arrays().items()}
    arguments = reference_arguments(
        SDPA, given, {"alibi_slopes": np.full(6, 0.1, np.float16)}, Conventions(alibi="signed")
    )
    assert arguments["bias"].dtype == np.float32


def test_lse_to_base_two():
    given = arrays()
    two = Conventions(lse_base="2")
    result, pull = SDPA.vjp(**given)
    np.testing.assert_allclose(2.0 ** reference_result(result, given, two)["lse"], np.exp(result.lse), rtol=20 * EPS)
    d_lse = np.random.default_rng(2).standard_normal(result.lse.shape)
    gradients = pull(**reference_cotangents({"lse": d_lse}, two))
    wanted, direction = complex_step(
        lambda q: (dense(q, given["k"], given["v"], 0.0)[1] / math.log(2) * d_lse).sum(), given["q"]
    )
    assert abs((gradients["q"] * direction).sum() - wanted) < 1e-12 * abs(gradients["q"]).sum()


def empty_row_call(conventions, **more):
    given = arrays()
    mask = np.ones((2, 1, 5, 7), bool)
    mask[1, 0, 3] = False
    options = {"mask": mask, **more}
    arguments = reference_arguments(SDPA, given, options, conventions)
    result, pull = SDPA.vjp(**arguments)
    return given, options, arguments, result, pull


def test_mean_of_v_in_empty_rows():
    mean = Conventions(empty_rows="mean", empty_gradients="v")
    given, options, arguments, result, pull = empty_row_call(mean)
    fields = reference_result(result, arguments, mean)
    own = np.repeat(given["v"], 3, axis=1)[1].mean(axis=-2)
    np.testing.assert_allclose(fields["output"][1, :, 3], own, rtol=0, atol=8 * EPS)
    assert (fields["output"][0] == result.output[0]).all()
    assert (result.output[1, :, 3] == 0).all(), "the result itself stays as it was"

    d_output = np.random.default_rng(3).standard_normal(result.output.shape)
    cotangents = {"output": d_output}
    gradients = reference_gradients(pull(**cotangents), result, arguments, cotangents, mean, options)
    plain = pull(**cotangents)
    share = d_output[1, :, 3].reshape(2, 3, 3).sum(1) / 7
    np.testing.assert_allclose(gradients["v"][1], plain["v"][1] + share[:, None, :], rtol=0, atol=20 * EPS)
    assert (gradients["v"][0] == plain["v"][0]).all()
    assert (gradients["q"] == plain["q"]).all()
    assert not gradients_open(result, arguments, mean)
    assert gradients_open(result, arguments, Conventions(empty_rows="mean"))


def test_mean_of_v_follows_the_head_map():
    tile = Conventions(empty_rows="mean", head_map="tile")
    given, _, arguments, result, _ = empty_row_call(tile)
    own = np.tile(given["v"], (1, 3, 1, 1))[1].mean(axis=-2)
    np.testing.assert_allclose(reference_result(result, arguments, tile)["output"][1, :, 3], own, rtol=0, atol=8 * EPS)


@pytest.mark.parametrize("value, wanted", [("+inf", math.inf), ("0", 0.0), ("-inf", -math.inf)])
def test_lse_of_empty_rows(value, wanted):
    record = Conventions(empty_lse=value)
    _, _, arguments, result, _ = empty_row_call(record)
    fields = reference_result(result, arguments, record)
    assert (fields["lse"][1, :, 3] == wanted).all()
    assert (fields["lse"][0] == result.lse[0]).all()


def test_nan_rows_and_what_is_open():
    record = Conventions(empty_rows="nan", empty_lse="finite")
    _, _, arguments, result, _ = empty_row_call(record)
    fields = reference_result(result, arguments, record)
    assert np.isnan(fields["output"]).sum() == 6 * 3
    assert gradients_open(result, arguments, record)
    left_open = open_elements(result, arguments, record)
    assert left_open["lse"].sum() == 6
    assert left_open["lse"][1, :, 3].all()
    assert "output" not in left_open
    assert open_elements(result, arguments, Conventions()) == {}


def test_padded_rows_are_not_empty_rows():
    record = Conventions(empty_rows="mean", padded_rows="open")
    _, _, arguments, result, _ = empty_row_call(record, query_lengths=np.array([5, 3]), key_lengths=np.array([7, 7]))
    assert (reference_result(result, arguments, record)["output"][1, :, 3] == 0).all()
    left_open = open_elements(result, arguments, record)
    assert left_open["output"][1, :, 3:].all()
    assert left_open["output"].sum() == 6 * 2 * 3


def test_rows_emptied_by_a_bias_may_be_nobodys_promise():
    record = Conventions(bias_hides=False)
    given = arrays()
    bias = np.zeros((5, 7))
    bias[2] = -math.inf
    arguments = reference_arguments(SDPA, given, {"bias": bias}, record)
    result = SDPA.forward(**arguments)
    assert open_elements(result, arguments, record)["output"][:, :, 2].all()
    assert gradients_open(result, arguments, record)
    assert not gradients_open(result, arguments, Conventions())


# ---------------------------------------------------------------------- alternatives and presets


def test_alternatives_flip_one_field_each():
    for start in (Conventions(), PRESETS["torch"].conventions, PRESETS["jax"].conventions):
        found = alternatives(start)
        assert {"causal_other", "gqa_tile", "lse_base2", "alibi_signed", "cap_after_bias"} <= {n for n, _ in found}
        for _, other in found:
            before, after = dataclasses.asdict(start), dataclasses.asdict(other)
            assert sum(before[n] != after[n] for n in before) == 1
            assert all(other.effective(n) != start.effective(n) for n in before if before[n] != after[n])


def test_alternatives_name_the_other_direction():
    names = {n for n, _ in alternatives(Conventions(window="count", head_map="tile"))}
    assert {"window_plus1", "gqa_repeat"} <= names
    assert "window_edge" not in names


@pytest.mark.parametrize(
    "parameters, preset",
    [
        ("query key value attn_mask dropout_p is_causal scale enable_gqa", "torch"),
        ("query key value bias mask scale is_causal query_seq_lengths key_value_seq_lengths local_window_size", "jax"),
        ("q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic", "flash-attn"),
        ("q k v custom_mask causal kv_layout sm_scale window_left logits_soft_cap return_lse", "flashinfer"),
        ("Q K V attn_mask past_key past_value nonpad_kv_seqlen scale is_causal softcap", "onnx"),
        ("module query key value attention_mask scaling dropout softcap kwargs", "hf"),
        ("q k v causal align window scale softcap mask bias", None),
        ("q k v is_causal", None),
    ],
)
def test_signatures_are_told_by_their_names(parameters, preset):
    assert detect(parameters.split()) == preset


def test_presets_declare_valid_records():
    for name, preset in PRESETS.items():
        assert resolve(preset.conventions.declared()) == preset.conventions
        assert preset.conventions.preset == name
        assert preset.speaks(preset.parameters)
        assert not preset.speaks(["q", "k", "v", "causal", "scale", "mask", "bias"])


def test_allowed_errors_are_numbers_by_name():
    found = resolve({"allow": {"tanh": 5e-4, "exp": 1e-5}, "compute": "tf32", "scores": "storage"})
    assert resolve(found.declared()) == found
    assert found.declared()["allow"] == {"tanh": 5e-4, "exp": 1e-5}
    assert hash(found) == hash(resolve(found))
    for wrong, says in (
        ({"sine": 1e-5}, "allow has 'sine': expected some of tanh, exp"),
        ({"exp": 2}, "allow gives exp 2: expected a relative error from 0 to below 1"),
        (1e-5, "allow is 1e-05: expected relative errors by name"),
    ):
        with pytest.raises(UsageError, match=re.escape(says)):
            resolve({"allow": wrong})
