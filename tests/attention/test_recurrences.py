"""Recurrences: identities between them, forms and cuts, strong decays, hand-computed numbers, bad input, memory."""

import importlib

import numpy as np
import pytest
from support import assert_close, assert_mistakes_differentiate, random_cotangents

import refattn as ra
from refattn.mistakes.engine import Case

linear, delta, rwkv7, ssd = (
    ra.gated_linear_attention,
    ra.delta_rule_attention,
    ra.rwkv7_attention,
    ra.ssd_attention,
)
SETTINGS = {
    "decay": (linear, {"decay": True, "state": True}),
    "channels": (linear, {"channel_decay": True, "state": True}),
    "before": (linear, {"channel_decay": True, "state": True, "read": "before", "bonus": True}),
    "delta": (delta, {"beta": True, "decay": True, "state": True, "qk_norm": "l2_sum"}),
    "kda": (delta, {"beta": True, "channel_decay": True, "state": True}),
    "rwkv7": (rwkv7, {"channel_decay": True, "state": True}),
    "ssd": (ssd, {"state": True, "skip": True, "dt_softplus": True}),
}


def rng(seed=0):
    return np.random.default_rng(seed)


def drawn(name, t, seed=0, **more):
    function, options = SETTINGS[name]
    return function, function.example(rng(seed), b=2, h=2, t=t, d=4, e=3, **options, **more)


def assert_all(got, want, tolerance=1e-12):
    """Results or gradients, in units of the largest entry of each array."""
    for n, x in (want if isinstance(want, dict) else want.fields).items():
        y = got[n] if isinstance(got, dict) else getattr(got, n)
        size = max(1.0, np.max(np.abs(x), initial=0.0))
        assert_close(np.asarray(y) / size, np.asarray(x) / size, tolerance)


# ---------------------------------------------------------------------------------------------- forms and cuts


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("t", [0, 1, 4, 5, 21])
def test_every_form_and_chunk_gives_the_same(name, t):
    function, given = drawn(name, t)
    result, pullback = function.vjp(**given, form="recurrent")
    cotangents = random_cotangents(function, result, rng(1))
    gradients = pullback(**cotangents)
    for form, chunk in (("parallel", 1), ("chunked", 1), ("chunked", 4), ("chunked", 20), ("chunked", 64)):
        other, back = function.vjp(**given, form=form, chunk=chunk)
        assert_all(other, result)
        assert_all(back(**cotangents), gradients)


TOKENS = {"q", "k", "v", "decay", "channel_decay", "beta", "remove", "replace", "x", "dt", "b", "c"}


def part(given, rows):
    """The arguments of some of the tokens."""
    axis = {"decay": -1, "beta": -1, "dt": -1}
    found = {
        n: np.moveaxis(np.moveaxis(x, axis.get(n, -2), 0)[rows], 0, axis.get(n, -2))
        for n, x in given.items()
        if n in TOKENS
    }
    return {**given, **found}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("cut", [0, 1, 7, 11])
def test_a_sequence_in_two_parts_is_the_whole(name, cut):
    function, given = drawn(name, 11)
    result, pullback = function.vjp(**given, chunk=4)
    cotangents = random_cotangents(function, result, rng(1))
    gradients = pullback(**cotangents)
    first, first_back = function.vjp(**part(given, slice(0, cut)), chunk=4)
    second, second_back = function.vjp(**{**part(given, slice(cut, None)), "state": first.state}, chunk=4)
    assert_close(np.concatenate([first.output, second.output], axis=-2), result.output, 1e-12)
    assert_close(second.state, result.state, 1e-12)
    behind = second_back(output=cotangents["output"][..., cut:, :], state=cotangents["state"])
    before = first_back(output=cotangents["output"][..., :cut, :], state=behind["state"])
    assert_close(before["state"], gradients["state"], 1e-12)
    for n, g in gradients.items():
        axis = -1 if n in ("decay", "beta", "dt") else -2
        if n in TOKENS:
            assert_all({n: np.concatenate([before[n], behind[n]], axis=axis)}, {n: g})
        elif n != "state":
            assert_all({n: before[n] + behind[n]}, {n: g})


def test_future_tokens_do_not_change_a_bit_of_the_prefix():
    for name in SETTINGS:
        function, given = drawn(name, 9)
        whole = function(**given, form="recurrent")
        assert np.array_equal(function(**part(given, slice(0, 5)), form="recurrent"), whole[..., :5, :])


# ---------------------------------------------------------------------------------------------- strong decays, equal keys


@pytest.mark.parametrize("name", ["decay", "channels", "before", "delta", "kda", "rwkv7"])
@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_gradients_at_strong_decays(name, form):
    """Log decays of -20, -745, -inf and 0: finite, equal to the definition's to 1e-12 of every entry's own size."""
    function, given = drawn(name, 13)
    key = "channel_decay" if "channel_decay" in given else "decay"
    at = given[key]
    for row, value in ((3, -20.0), (6, -745.0), (8, -np.inf), (10, 0.0)):
        at[:, :, row] = value
    result, pullback = function.vjp(**given, form=form, chunk=8)
    reference, reference_back = function.definition.vjp(**given)
    assert_all(result, reference)
    cotangents = random_cotangents(function, result, rng(1))
    gradients, wanted = pullback(**cotangents), reference_back(**cotangents)
    assert all(np.isfinite(g).all() for g in gradients.values())
    assert_all(gradients, wanted)
    rows = (slice(None), slice(None))
    smallest = 100 * 5e-324  # exp(-745) is the smallest number there is: nothing has digits beyond it
    g, w = gradients[key], wanted[key]
    assert np.all(g[(*rows, 8)] == 0)
    for row in (3, 6, 10):  # in units of the row itself, however small it is
        size = np.max(np.abs(w[(*rows, row)]))
        assert np.max(np.abs(g[(*rows, row)] - w[(*rows, row)])) <= 1e-12 * size + smallest


def test_a_whole_chunk_of_decays_that_underflow():
    for name in ("decay", "channels", "kda", "rwkv7"):
        function, given = drawn(name, 70)
        key = "channel_decay" if "channel_decay" in given else "decay"
        given[key] = np.full_like(given[key], -745.0)
        result, pullback = function.vjp(**given)
        assert_all(result, function.definition(**given))
        assert all(np.isfinite(g).all() for g in pullback(**random_cotangents(function, result, rng(1))).values())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_64_equal_unit_keys_are_exact(dtype):
    key = np.zeros((1, 64, 8), dtype)
    key[..., 3] = 1
    v = rng().integers(-9, 9, (1, 64, 5)).astype(dtype)
    result = delta.forward(key, key, v, scale=1.0)
    assert np.array_equal(result.output, v)  # every write replaces the one before
    assert np.array_equal(result.state[0, 3], v[0, -1])


def test_reflections():
    """beta = 2, v = 0, one unit key, an even number of steps: the state is where it was."""
    key = np.zeros((1, 6, 3))
    key[..., 0], state = 1, rng().standard_normal((1, 3, 2))
    result = delta.forward(key, key, np.zeros((1, 6, 2)), beta=np.full((1, 6), 2.0), state=state)
    assert_close(result.state, state, 1e-14)


# ---------------------------------------------------------------------------------------------- one of them is another


def test_names_of_one_equation():
    _, given = drawn("delta", 9)
    plain = {n: x for n, x in given.items() if n != "qk_norm"}
    plain["k"] = plain["k"] / np.sqrt((plain["k"] ** 2).sum(-1, keepdims=True))
    want = delta.forward(**plain)
    channels = {n: x for n, x in plain.items() if n != "decay"}
    wide = np.repeat(plain["decay"][..., None], 4, axis=-1)
    assert_all(delta.forward(**channels, channel_decay=wide), want)  # KDA with equal channels = GDN
    assert_all(delta.forward(**plain, erase_key=plain["k"]), want)
    both = {n: x for n, x in plain.items() if n != "beta"}
    b = plain["beta"][..., None]
    assert_all(delta.forward(**{**both, "v": b * plain["v"]}, erase_key=b * plain["k"]), want)  # GDN-2
    remove = np.exp(plain["decay"])[..., None] * plain["k"]
    arrays = {n: plain[n] for n in ("q", "k", "decay", "state")}
    as_dplr = rwkv7.forward(**arrays, v=b * plain["v"], remove=remove, replace=-b * plain["k"], scale=0.5)
    assert_all(as_dplr, want)
    nothing = np.zeros_like(plain["k"])
    gla = {n: x for n, x in plain.items() if n != "beta"}
    assert_all(rwkv7.forward(**gla, remove=nothing, replace=nothing, scale=0.5), linear.forward(**gla))
    still = delta.forward(**{**plain, "beta": 0 * plain["beta"], "decay": 0 * plain["decay"]})
    assert np.array_equal(still.state, plain["state"])


def test_ssd_is_gated_linear_attention():
    _, given = drawn("ssd", 9)
    step = np.logaddexp(0.0, given["dt"])
    result = linear.forward(
        given["c"],
        given["b"],
        step[..., None] * given["x"],
        decay=step * given["a"][:, None],
        scale=1.0,
        state=given["state"],
    )
    want = ssd.forward(**given)
    assert_close(result.output + given["skip"][:, None, None] * given["x"], want.output, 1e-13)
    assert_close(result.state, want.state, 1e-13)


def test_without_decay_it_is_linear_attention():
    _, given = drawn("decay", 9)
    q, k, v = (given[n] for n in "qkv")
    want = ra.linear_attention.forward(
        q, k, v, causal=True, feature_map="identity", normalize=False, state=given["state"]
    )
    got = linear.forward(q, k, v, decay=0 * given["decay"], state=given["state"])
    assert_close(got.output, want.output, 1e-13)
    assert_close(got.state, want.state, 1e-13)


def test_a_decay_of_minus_infinity_is_a_reset():
    for name in ("decay", "channels", "delta", "kda"):
        function, given = drawn(name, 9)
        key = "channel_decay" if "channel_decay" in given else "decay"
        cut, reset = given[key].copy(), np.arange(9) == 4
        cut[:, :, 4] = -np.inf
        assert_all(function.forward(**{**given, key: cut}, chunk=8), function.forward(**given, reset=reset, chunk=8))


def test_superposition():
    """Output and state are linear in the values and the initial state together."""
    for name in SETTINGS:
        function, given = drawn(name, 9)
        v = "x" if "x" in given else "v"
        other = {v: rng(3).standard_normal(given[v].shape), "state": rng(4).standard_normal(given["state"].shape)}
        both = {n: given[n] + x for n, x in other.items()}
        one, two, sum_ = (function.forward(**{**given, **x}) for x in ({}, other, both))
        assert_all(sum_, {n: getattr(one, n) + getattr(two, n) for n in ("output", "state")})


def test_hgrn2_and_retnet_by_hand():
    gamma = -rng().exponential(size=(1, 5, 3))
    k = 1 - np.exp(gamma)
    state = linear.forward(np.ones((1, 5, 3)), k, np.ones((1, 5, 1)), channel_decay=gamma).state
    assert_close(state[..., 0], 1 - np.exp(gamma.sum(-2)), 1e-14)
    decay = ra.positions.retention_decay(2)
    one = np.ones((2, 6, 1))
    g = np.exp(decay)[:, None]
    want = (1 - g ** (np.arange(6) + 1)) / (1 - g)
    assert_close(linear(one, one, one, head_decay=decay)[..., 0], want, 1e-13)


def test_rotations_of_the_key_channels():
    turn = np.linalg.qr(rng(5).standard_normal((4, 4)))[0]
    for name, same in (("decay", True), ("channels", False), ("delta", True), ("kda", False)):
        function, given = drawn(name, 9)
        turned = {n: given[n] @ turn for n in ("q", "k")}
        turned["state"] = turn.T @ given["state"]
        close = np.allclose(function(**{**given, **turned}), function(**given), atol=1e-12)
        assert close == same, name


def test_padding_without_decay_leaves_the_state():
    _, given = drawn("delta", 9)
    given.pop("qk_norm")
    for n in ("k", "v", "beta", "decay"):
        given[n][:, :, 4:7] = 0
    keep = [0, 1, 2, 3, 7, 8]
    want = delta.forward(**part(given, keep))
    got = delta.forward(**given)
    assert_close(got.output[:, :, keep], want.output, 1e-13)
    assert_close(got.state, want.state, 1e-13)


# ---------------------------------------------------------------------------------------------- heads by hand


@pytest.mark.parametrize("head_map, order", [("repeat", [0, 0, 1, 1]), ("tile", [0, 1, 0, 1])])
def test_shared_heads(head_map, order):
    few, many = rng().standard_normal((2, 5, 3)), rng(1).standard_normal((4, 5, 3))
    assert_close(linear(few, few, many, head_map=head_map), linear(few[order], few[order], many), 1e-14)
    k, v = few, rng(2).standard_normal((2, 5, 2))
    assert_close(linear(many, k, v, head_map=head_map), linear(many, k[order], v[order]), 1e-14)


# ---------------------------------------------------------------------------------------------- long, bad input


def test_a_backward_keeps_few_states():
    """Beyond the arrays of the call: states for the square root of the chunks, not one for each."""
    import tracemalloc

    t, d = 1 << 14, 32
    given = {n: rng().standard_normal((1, t, d)).astype(np.float32) for n in "qkv"}
    given["decay"] = -rng().exponential(size=(1, t)).astype(np.float32)
    tracemalloc.start()
    result, pullback = linear.vjp(**given)
    gradients = pullback(output=np.ones_like(result.output))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    arrays = 3 * t * d * 4 + 2 * t * d * 4 + 4 * t  # gradients; output and its cotangent
    assert gradients["q"].shape == (1, t, d)
    assert peak - arrays < 256 * d * d * 4 * 3  # a state a chunk would be 256


WRONG = [
    (linear, {"q": np.ones((3, 5, 4))}, "q has 3 heads: expected a divisor or a multiple of the 2"),
    (linear, {"k": np.ones((3, 5, 4))}, "k has 3 heads: expected a divisor of the 2"),
    (linear, {"decay": np.zeros((2, 4))}, "decay has shape"),
    (linear, {"head_decay": np.zeros(3)}, "head_decay has shape"),
    (linear, {"bonus": np.zeros((2, 4))}, 'read="before"'),
    (linear, {"read": "middle"}, "read is 'middle'"),
    (linear, {"form": "auto"}, "form is 'auto'"),
    (linear, {"chunk": 0}, "chunk is 0: expected at least 1"),
    (linear, {"lengths": (6,)}, "lengths is"),
    (linear, {"reset": np.zeros(4, bool)}, "reset is bool"),
    (linear, {"reset": np.zeros(5)}, "reset is float64"),
    (linear, {"state": np.zeros((2, 4, 4))}, "state has shape"),
    (linear, {"scale": np.inf}, "scale is"),
    (linear, {"head_map": "group"}, "head_map is 'group'"),
    (delta, {"qk_norm": "l1"}, "qk_norm is 'l1'"),
    (delta, {"norm_eps": -1.0}, "norm_eps is"),
    (delta, {"steps": 2}, "v has shape"),
    (delta, {"beta": np.ones((2, 5, 1))}, "beta has shape"),
]


@pytest.mark.parametrize("function, wrong, says", WRONG, ids=lambda x: next(iter(x)) if isinstance(x, dict) else None)
def test_bad_input_is_named(function, wrong, says):
    given = {"q": np.ones((2, 5, 4)), "k": np.ones((2, 5, 4)), "v": np.ones((2, 5, 3)), **wrong}
    with pytest.raises((TypeError, ValueError)) as error:
        function(**given)
    assert says in str(error.value), str(error.value)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"b": np.ones((3, 5, 4)), "c": np.ones((3, 5, 4))}, "b has 3 groups"),
        ({"dt_limit": 3}, "dt_limit is 3"),
        ({"dt_limit": (2.0, 1.0)}, "dt_limit is 1.0"),
        ({"skip": np.ones(3)}, "skip has shape"),
    ],
)
def test_bad_input_of_ssd_is_named(wrong, says):
    given = {
        "x": np.ones((2, 5, 3)),
        "dt": np.ones((2, 5)),
        "a": -np.ones(2),
        "b": np.ones((1, 5, 4)),
        "c": np.ones((1, 5, 4)),
    }
    with pytest.raises((TypeError, ValueError)) as error:
        ssd(**{**given, **wrong})
    assert says in str(error.value), str(error.value)


# ---------------------------------------------------------------------------------------------- mistakes


SHOWN = {
    "gated_linear": (
        {"t": 35, "d": 4, "e": 4, "channel_decay": True, "decay": True, "state": True, "scale": 0.7},
        {"h": 2, "g": 6, "t": 9, "lengths": (4, 9), "reset": True, "decay": True, "state": True},
        {"read": "before", "bonus": True, "decay": True, "state": True, "scale": 0.7},
    ),
    "delta_rule": (
        {"t": 35, "d": 4, "e": 4, "channel_decay": True, "decay": True, "state": True, "scale": 0.7, "beta": True},
        {"h": 2, "g": 6, "t": 9, "lengths": (4, 9), "reset": True, "decay": True, "state": True},
        {"qk_norm": "l2_sum", "norm_eps": 0.3, "erase_key": True, "beta": True, "scale": 0.7},
        {"d": 5, "e": 3, "scale": None, "steps": 2, "decay": True},
    ),
    "rwkv7": ({"t": 35, "d": 4, "e": 4, "channel_decay": True, "decay": True, "state": True, "scale": 0.7},),
    "ssd": (
        {
            "t": 9,
            "d": 4,
            "e": 4,
            "state": True,
            "dt_softplus": True,
            "dt_bias": True,
            "skip": True,
            "dt_limit": (0.5, 0.9),
        },
        {"h": 6, "g": 2, "t": 9, "lengths": (4, 9), "dt_bias": True, "state": True, "dt_softplus": True},
    ),
}


@pytest.mark.parametrize("file", SHOWN)
def test_wrong_forwards_have_their_own_gradients(file):
    """Of every mistake, also of those that all recurrences share: only rounding, jumps and exploding numbers are left out."""
    catalogue = importlib.import_module(f"refattn.mistakes.{file}").catalogue
    without = ("state_low_precision", "safe_exp", "state_tail_decay")
    whole = type("Whole", (), {"own": list(catalogue), "definition": catalogue.definition})
    assert_mistakes_differentiate(ra.mechanisms[f"{file}_attention"], whole, SHOWN[file], rng(), without=without)


def test_mistakes_by_hand():
    """Unit key, beta = 1/2, decay 1/2: S = A + k (v - A k) / 2."""
    one, v = np.ones((1, 2, 1)), np.array([[[4.0], [8.0]]])
    given = {
        "q": one,
        "k": one,
        "v": v,
        "beta": np.full((1, 2), 0.5),
        "decay": np.log(np.full((1, 2), 0.5)),
        "scale": 1.0,
    }
    catalogue = importlib.import_module("refattn.mistakes.delta_rule").catalogue
    case = Case(catalogue.definition, given)

    def output(name):
        mistake = next(m for m in catalogue if m.edit.__name__ == name)
        return case.results(mistake)["output"][0, :, 0].tolist()

    assert case.right.output[0, :, 0].tolist() == [2.0, 4.5]  # 2, then 1 + (8 - 1) / 2
    assert output("erase_undecayed") == [2.0, 4.0]  # 1 + (8 - 2) / 2
    assert output("erase_dropped") == [2.0, 5.0]
    assert output("beta_on_value_only") == [2.0, 4.0]
    assert output("beta_twice") == [1.0, 0.5 + (8 - 0.5) / 4]
    assert output("read_before_write") == [0.0, 2.0]
    np.testing.assert_allclose(output("decay_dropped"), [2.0, 5.0], rtol=1e-15)
