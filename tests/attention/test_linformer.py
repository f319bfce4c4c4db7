"""linformer_attention: gradients, definition, identity projections, stored cases, counts, mistakes."""

import numpy as np
import pytest
from contract.cases.linformer import arguments
from support import assert_close, cases, random_cotangents

from refattn.attention.linformer import linformer_attention as attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def test_identity_projections_are_full_attention():
    given = arguments(seed=5, k=7, n=7)
    given.update(e_k=np.eye(7), e_v=np.eye(7))
    result, pullback = attention.vjp(**given)
    qkv = {n: given[n] for n in "qkv"}
    want, back = scaled_dot_product_attention.vjp(**qkv)
    assert_close(result.output, want.output, 20 * EPS)
    cotangent = random_cotangents(attention, result, rng(5))
    for n, g in back(**cotangent).items():
        assert_close(pullback(**cotangent)[n], g, 50 * EPS)


def test_cost_is_linear_in_the_length():
    counts = [attention.cost(q=n, k=n, n=256, d=64, direction="both").multiplies for n in (1024, 4096)]
    assert counts[1] == 4 * counts[0]


@pytest.mark.parametrize("name, meta, arrays", list(cases("linformer")), ids=lambda x: x if isinstance(x, str) else "")
def test_stored_cases(name, meta, arrays):
    """A module: tokens to heads by one matrix each, attention, and back; a table for longer sequences is cut."""
    x, h = arrays["in_x"], meta["options"]["heads"]
    b, t, _ = x.shape

    def heads(w):
        return (x @ w.T).reshape(b, t, h, -1).swapaxes(1, 2)

    def joined(y):
        return y.swapaxes(1, 2).reshape(b, t, -1)

    weights = {c: arrays[f"in_to_{c}__weight"] for c in "qkv"}
    given = {c: heads(w) for c, w in weights.items()}
    given.update(e_k=arrays["in_proj_k"][:t], e_v=arrays["in_proj_v"][:t])
    result, pullback = attention.vjp(**given)
    out = joined(result.output) @ arrays["in_to_out__weight"].T + arrays["in_to_out__bias"]
    assert_close(out, arrays["out"], 1e-9)
    assert_close(attention.definition(**given).output, result.output, 1e-12)
    d = (arrays["cot_out"] @ arrays["in_to_out__weight"]).reshape(b, t, h, -1).swapaxes(1, 2)
    gradients = pullback(d)
    for c in "qkv":
        assert_close(np.einsum("btf,btm->fm", joined(gradients[c]), x), arrays[f"grad_to_{c}__weight"], 1e-8)
        assert_close(gradients["e_" + c] if c != "q" else 0.0, arrays[f"grad_proj_{c}"][:t] if c != "q" else 0.0, 1e-8)
    assert_close(sum(joined(gradients[c]) @ weights[c] for c in "qkv"), arrays["grad_x"], 1e-8)


BAD = {
    "rows": ({"e_k": np.zeros((6, 4))}, ValueError, "e_k has shape (6, 4): its axis 'k'"),
    "columns": ({"e_v": np.zeros((5, 3))}, ValueError, "e_v has shape (5, 3): its axis 'n'"),
    "channels": ({"k": np.zeros((2, 2, 5, 4))}, ValueError, "k has shape (2, 2, 5, 4): its axis 'd'"),
    "scale": ({"scale": float("inf")}, ValueError, "scale is inf"),
    "causal": ({"causal": True}, TypeError, "has no option 'causal'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind) as caught:
        attention.forward(**{**arguments(), **change})
    assert message in str(caught.value)
