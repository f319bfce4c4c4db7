"""Kernels with the signatures of known libraries of recurrences: recognised, called their way, and read back."""

import numpy as np
import pytest
from verification.recurrent_state_kernels import delta, gated, rwkv7, ssd

import refattn as ra

SMALL = "b=2,h=2,g=2,t=20,d=4,e=3"


def turn(x):
    """(b, t, h, ...) as (b, h, t, ...), and back."""
    return None if x is None else np.ascontiguousarray(np.swapaxes(x, 1, 2))


def flip(s):
    """(d, e) as (e, d), and back."""
    return None if s is None else np.ascontiguousarray(np.swapaxes(s, -1, -2))


def fla(q, k, v, g, beta, initial_state=None, output_final_state=False, cu_seqlens=None):
    found = delta()[0](turn(q), turn(k), turn(v), beta=turn(beta), decay=turn(g), state=initial_state)
    return turn(found["output"]), found["state"] if output_final_state else None


def fla_backward(do, q, k, v, g, beta, initial_state=None, dht=None):
    found = delta()[1](*map(turn, (do, q, k, v)), beta=turn(beta), decay=turn(g), state=initial_state, d_state=dht)
    state = {"initial_state": found["state"]} if initial_state is not None else {}
    return {"q": turn(found["q"]), "k": turn(found["k"]), "v": turn(found["v"]), "g": turn(found["decay"]),
            "beta": turn(found["beta"]), **state}  # fmt: skip


def head_first(q, k, v, g, beta, initial_state=None, output_final_state=False):
    found = delta()[0](q, k, v, beta=beta, decay=g, state=initial_state)
    return found["output"], found["state"]


def hf(
    query,
    key,
    value,
    g,
    beta,
    chunk_size=64,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
):
    if use_qk_l2norm_in_kernel:
        query, key = (x / np.sqrt((x * x).sum(-1, keepdims=True) + x.dtype.type(1e-6)) for x in (query, key))
    return fla(query, key, value, g, beta, initial_state, output_final_state)


def mamba(
    x, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None, dt_softplus=False, return_final_states=False
):
    y, state = ssd()[0](
        turn(x),
        turn(dt),
        A,
        turn(B),
        turn(C),
        skip=D,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        state=flip(initial_states),
    )
    return turn(y), flip(state)


def mamba_backward(
    do, x, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None, dt_softplus=False, d_state=None
):
    found = ssd()[1](
        turn(do), turn(x), turn(dt), A, turn(B), turn(C), skip=D, dt_bias=dt_bias, dt_softplus=dt_softplus,
        state=flip(initial_states), d_state=flip(d_state),
    )  # fmt: skip
    theirs = {
        "x": "x",
        "dt": "dt",
        "a": "A",
        "b": "B",
        "c": "C",
        "skip": "D",
        "dt_bias": "dt_bias",
        "state": "initial_states",
    }
    back = {n: g if n in ("a", "skip", "dt_bias") else flip(g) if n == "state" else turn(g) for n, g in found.items()}
    return {theirs[n]: g for n, g in back.items()}


def rwkv(r, w, k, v, a, b, state=None):
    y, s = rwkv7()[0](
        turn(r), turn(k), turn(v), remove=turn(a), replace=turn(b), channel_decay=-np.exp(turn(w)), state=flip(state)
    )
    return turn(y), flip(s)


def rwkv_backward(do, r, w, k, v, a, b, state=None, d_state=None):
    decay = -np.exp(turn(w))
    found = rwkv7()[1](
        turn(do), turn(r), turn(k), turn(v), remove=turn(a), replace=turn(b), channel_decay=decay, state=flip(state),
        d_state=flip(d_state),
    )  # fmt: skip
    names = {"q": "r", "k": "k", "v": "v", "remove": "a", "replace": "b"}
    theirs = {m: turn(found[n]) for n, m in names.items()} | {"w": turn(found["channel_decay"] * decay)}
    return theirs | ({"state": flip(found["state"])} if state is not None else {})


def onnx(
    query,
    key,
    value,
    past_state=None,
    decay=None,
    beta=None,
    *,
    q_num_heads=2,
    kv_num_heads=2,
    update_rule="gated_delta",
):
    def split(x):
        return turn(x.reshape(*x.shape[:2], kv_num_heads, -1))

    decay = np.zeros((*query.shape[:2], kv_num_heads), query.dtype) if decay is None else decay
    if update_rule in ("linear", "gated"):
        y, state = gated()[0](split(query), split(key), split(value), decay=turn(decay), state=past_state)
    else:
        found = delta()[0](split(query), split(key), split(value), beta=turn(beta), decay=turn(decay), state=past_state)
        y, state = found["output"], found["state"]
    return turn(y).reshape(*query.shape[:2], -1), state


def flashkda(q, k, v, g, beta, scale=None, A_log=None, dt_bias=None, lower_bound=-5.0, initial_state=None):
    kind = q.dtype
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + kind.type(1e-6)) for x in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    gamma = lower_bound / (1 + np.exp(-np.exp(A_log)[:, None] * (g + dt_bias)))
    beta, s = 1 / (1 + np.exp(-beta)), flip(initial_state)
    s = np.zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3]), kind) if s is None else s
    rows = []
    for t in range(q.shape[1]):
        s = np.exp(gamma[:, t, ..., None]) * s
        u = beta[:, t, :, None] * (v[:, t] - np.einsum("bhd,bhde->bhe", k[:, t], s))
        s = s + k[:, t, ..., None] * u[..., None, :]
        rows.append(np.einsum("bhd,bhde->bhe", scale * q[:, t], s))
    return np.stack(rows, 1).astype(kind), flip(s).astype(kind)


def gla2(q, k, v, *, decay, state=None):
    """Decays are powers of 2."""
    return gated()[0](q, k, v, decay=(decay * np.log(2.0)).astype(decay.dtype), state=state)


RIGHT = {
    "fla": (fla, fla_backward, "delta_rule_attention", None),
    "fla-head-first": (head_first, None, "delta_rule_attention", "fla-head-first"),
    "hf-gdn": (hf, None, "delta_rule_attention", None),
    "mamba": (mamba, mamba_backward, "ssd_attention", None),
    "rwkv": (rwkv, rwkv_backward, "rwkv7_attention", None),
    "onnx-linear": (onnx, None, "delta_rule_attention", None),
    "flashkda": (flashkda, None, "delta_rule_attention", None),
}


@pytest.mark.parametrize("name", RIGHT)
def test_signatures_of_libraries(name):
    forward, backward, mechanism, said = RIGHT[name]
    sizes = SMALL.replace("e=3", "e=4") if name == "rwkv" else SMALL
    report = ra.verify(forward, mechanism, backward=backward, conventions=said, sizes=sizes)
    assert report.ok, report.table()
    assert report.candidate["preset"] == name
    arrays = {n for row in report.rows for n in row.arrays} if hasattr(report.rows[0], "arrays") else set()
    if arrays:
        assert "state" in arrays


@pytest.mark.parametrize(
    ("declared", "passes"), [({"log_base": "2"}, True), ({}, False)], ids=["declared", "undeclared"]
)
def test_the_base_of_decays_is_a_convention(declared, passes):
    report = ra.verify(gla2, "gated_linear_attention", conventions=declared, sizes="b=1,h=2,g=2,t=20,d=4,e=3")
    assert report.ok == passes, report.table()
    if not passes:
        assert report.explanations[0]["class"] == "decay_base"


def test_the_layout_of_states_is_a_convention():
    def kernel(q, k, v, *, decay, state=None):
        y, s = gated()[0](q, k, v, decay=decay, state=flip(state))
        return y, flip(s)

    sizes = "b=1,h=2,g=2,t=20,d=4,e=4"
    assert ra.verify(kernel, "gated_linear_attention", conventions={"state_layout": "ed"}, sizes=sizes).ok
    report = ra.verify(kernel, "gated_linear_attention", sizes=sizes)
    assert not report.ok
    assert "state_transposed" in report.explanations[0]["class"]


def test_what_is_built_in_is_not_passed():
    def kernel(q, k, v, *, beta, decay, state=None):
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + x.dtype.type(1e-6)) for x in (q, k))
        return delta()[0](q, k, v, beta=beta, decay=decay, state=state)

    sizes = "b=1,h=2,g=2,t=20,d=4,e=3"
    report = ra.verify(kernel, "delta_rule_attention", conventions={"qk_norm": "l2_sum"}, sizes=sizes)
    assert report.ok, report.table()


def test_a_narrow_state_is_a_mismatch_unless_it_is_declared():
    def kernel(q, k, v, *, decay, state=None):
        y, s = gated()[0](q, k, v, decay=decay, state=state)
        return y, s.astype(np.float16)

    settings = {"dtypes": "float16", "sizes": "b=1,h=2,g=2,t=20,d=4,e=3"}
    report = ra.verify(kernel, "gated_linear_attention", **settings)
    assert not report.ok
    assert "dtype float16, expected float32" in report.table()
