"""compressive_attention: gradients, definition, what it is made of, stop-gradients, cost, mistakes, bad input."""

import numpy as np
import pytest
from contract.cases.compressive import base
from support import assert_close

from refattn import precision
from refattn.attention.compressive import compressive_attention as attention
from refattn.attention.transformer_xl import transformer_xl_attention

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def test_it_is_transformer_xl_over_the_joined_rows():
    a = base(7)
    context = np.concatenate([a["compressed"], a["memory"], a["x"]], axis=1)
    q = np.einsum("bqm,mhd->bhqd", a["x"], a["w_q"])
    k, v = (np.einsum("bkm,mhd->bhkd", context, a[n]) for n in ("w_k", "w_v"))
    heads = transformer_xl_attention(q, k, v, r=a["r"], u=a["u"], w=a["w"])
    assert_close(attention(**a), np.einsum("bhqe,hem->bqm", heads, a["w_o"]), 50 * EPS)


def test_a_span_of_one_token_is_a_slot():
    a = base(8)
    for kind in ("span_end", "span_mid"):
        assert_close(attention(**a, compressed_positions=kind, rate=1), attention(**a), 0)


def test_places_of_spans():
    """Two compressed rows of 3 tokens, 2 of memory, 3 of the segment: the query at token 10 reads the rows' distances."""
    a = {**base(9), "u": None, "w": None}
    for kind, distances in (("span_end", (8, 5, 4, 3, 2, 1, 0)), ("span_mid", (9, 6, 4, 3, 2, 1, 0))):
        r = np.zeros((2, 11, 3))
        r[:, :, 0] = np.arange(10, -1, -1)  # the table holds the distance itself
        given = {**a, "r": r, "compressed_positions": kind, "rate": 3, "keep_terms": True}
        q = np.einsum("bqm,mhd->bhqd", a["x"], a["w_q"])
        want = 3**-0.5 * q[:, :, -1, :1] * np.array(distances)
        assert_close(attention.forward(**given).term_b[:, :, -1], want, 50 * EPS)


def test_projections_learn_through_memory_rows():
    """Without memories in the context the gradient of w_k is another one, though nothing flows into the memories."""
    a = base(10)
    result, pullback = attention.vjp(**a)
    gradients = pullback(np.ones_like(result.output))
    assert (gradients["memory"] == 0).all()
    assert (gradients["compressed"] == 0).all()
    wrong = next(m for m in attention.mutations if m.class_ == "memory_weights_detached")
    detached = wrong.gradients(a, {"output": np.ones_like(result.output)})
    assert np.abs(detached["w_k"] - gradients["w_k"]).max() > 1e-3
    assert_close(detached["w_q"], gradients["w_q"], 200 * EPS)


@pytest.mark.parametrize("hidden", [np.nan, np.inf])
def test_hidden_rows_reach_no_projection(hidden):
    """Row 0 of the memory and of the compressed rows is masked for every query of head 0, that of x too."""
    a = base(12)
    rows = sum(a[n].shape[-2] for n in ("compressed", "memory", "x"))
    seen = np.ones((1, rows), bool)
    first = (0, a["compressed"].shape[-2], rows - a["x"].shape[-2])
    seen[:, first] = False
    a.update(mask=np.broadcast_to(seen, (1, a["x"].shape[-2], rows)).copy())
    a["mask"][:, 0] = False  # nor is the first row of x a query
    result, pullback = attention.vjp(**a)
    want = pullback(np.ones_like(result.output))
    poisoned = {n: a[n].copy() for n in ("compressed", "memory", "x")}
    for x in poisoned.values():
        x[..., 0, :] = hidden
    result, pullback = attention.vjp(**{**a, **poisoned})
    got = pullback(np.ones_like(result.output))
    for name in ("w_q", "w_k", "w_v", "w_o", "r", "u", "w"):
        assert_close(got[name], want[name], 1e-12)


def test_cost_equals_counted_products():
    sizes = {"b": 2, "h": 2, "q": 6, "k": 5, "n": 3, "m": 8, "d": 4, "e": 3}
    a = attention.example(rng(11), **sizes)
    xp = precision.counting()
    result, pullback = attention.vjp(**{n: xp.asarray(x) for n, x in a.items()}, through_memory=True)
    forward = xp.counts.multiplies
    assert forward == attention.cost(**sizes, dtype="float64").computed_multiplies
    pullback(result.output)
    assert xp.counts.multiplies - forward == attention.cost(**sizes, direction="backward").computed_multiplies
    assert attention.cost(**sizes).parameters == 8 * 2 * (4 + 4 + 3 + 3) + 2 * 2 * 4


BAD = {
    "memory_width": (
        {"memory": np.zeros((2, 2, 5))},
        ValueError,
        r"memory has shape \(2, 2, 5\): expected 4 channels like x",
    ),
    "compressed_width": ({"compressed": np.zeros((2, 2, 5))}, ValueError, "compressed has shape"),
    "projection": ({"w_k": np.zeros((5, 2, 3))}, ValueError, "w_k has shape"),
    "heads": ({"w_v": np.zeros((4, 3, 2))}, ValueError, "w_v has shape"),
    "output": ({"w_o": np.zeros((2, 3, 4))}, ValueError, "w_o has shape"),
    "table": ({"r": np.zeros((2, 6, 3))}, ValueError, "r has shape .* 7 rows"),
    "w_alone": ({"r": None}, ValueError, "w is given without r"),
    "positions": ({"compressed_positions": "start"}, ValueError, "compressed_positions is 'start'"),
    "rate_missing": ({"compressed_positions": "span_end"}, ValueError, "rate is missing"),
    "rate_0": ({"compressed_positions": "span_end", "rate": 0}, ValueError, "rate is 0"),
    "batch": ({"memory": np.zeros((3, 2, 4))}, ValueError, "leading axes"),
    "rank": ({"x": np.zeros(4)}, ValueError, r"x has shape \(4,\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        attention.forward(**{**base(), **change})
