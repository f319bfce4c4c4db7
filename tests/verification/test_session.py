"""The session: what a candidate is asked first, what it takes, when it is given up, and calls that are asked again."""

import numpy as np
import pytest
from verification.kernels.dense import attention

import refattn as ra
from refattn.verification.candidate import Call, Outcome, Patience, open_candidate
from refattn.verification.capabilities import shape_capabilities
from refattn.verification.limits import Limits, parse_sizes
from refattn.verification.session import Budget, Session

RIGHT, BACKWARD = attention()
DENSE = ra.scaled_dot_product_attention


def test_sizes_are_fitted():
    limits = parse_sizes("q=16n,k=16n,h=g,d=64/128,b=1")
    assert limits.words() == "d=64/128,b=1,q=16n,k=16n,h=g"
    fitted = limits.fit({"b": 3, "h": 6, "g": 2, "q": 19, "k": 33, "d": 120, "e": 14})
    assert fitted == {"b": 1, "h": 6, "g": 6, "q": 32, "k": 48, "d": 128, "e": 14}
    assert Limits().fit({"h": 6, "g": 4}) == {"h": 6, "g": 3}, "key heads divide query heads"


def test_what_shapes_ask_for():
    assert shape_capabilities({"b": 1, "h": 4, "g": 4, "q": 8, "k": 8, "d": 16, "e": 16}) == set()
    assert shape_capabilities({"b": 2, "h": 4, "g": 2, "q": 1, "k": 8, "d": 16, "e": 8}) == {
        "batch",
        "grouped_heads",
        "one_query",
        "unequal_lengths",
        "value_channels",
    }


def test_patience_ends():
    patience = Patience(90.0)
    hung = Outcome("timeout")
    given = []
    while seconds := patience.seconds(30.0):
        given.append(seconds)
        patience.note(hung, seconds)
    assert given == [30.0, 30.0, 3.0, 3.0, 3.0]
    assert patience.words() == "not called: 5 calls before it hung"
    short = Patience(10.0)
    short.note(hung, 8.0)
    assert short.seconds(30.0) == 2.0
    crashing = Patience()
    for _ in range(12):
        assert crashing.seconds(30.0) == 30.0
        crashing.note(Outcome("crash"), 30.0)
    assert crashing.over


def test_arrays_in_tuples_and_strides_of_cotangents_reach_the_child(tmp_path):
    (tmp_path / "kernel.py").write_text(
        "import numpy as np\n"
        "def f(q, k, v, *, centroids, members, average_eps=1):\n"
        "    assert isinstance(members, tuple) and members[1].dtype == np.int64 and average_eps is None\n"
        "    return q * 0 + members[0].sum() + members[1].sum()\n"
        "def g(d_output, q, k, v, *, centroids, members, average_eps=1):\n"
        "    return {'v': v * 0 + (d_output.strides[0] == 0)}\n"
    )
    x = np.ones((1, 2, 5, 4), np.float32)
    members = (np.arange(4).reshape(1, 2, 1, 2), 10 * np.arange(4).reshape(1, 2, 1, 2))
    call = Call(
        "0",
        "routing_attention",
        {"q": x, "k": None, "v": x},
        {"centroids": np.ones((2, 1, 4), np.float32), "members": members, "average_eps": None},
        {"output": np.broadcast_to(np.float32(1.0), x.shape)},
        ("v",),
    )
    path = tmp_path / "kernel.py"
    with open_candidate(f"{path}:f", ra.routing_attention, backward=f"{path}:g") as candidate:
        (outcome,) = candidate.run([call])
    assert outcome.status == "ok", outcome.message + outcome.traceback
    assert (outcome.fields["output"] == 66).all()
    assert (outcome.gradients["v"] == 1).all()


def narrow(q, k, v, *, causal=False):
    """Decoding alone, 64 channels alone."""
    if q.shape[2] != 1 or q.shape[3] != 64 or v.shape[3] != 64:
        raise ValueError(f"one query of 64 channels, not {q.shape}")
    return RIGHT(q, k, v, causal=causal)[0]


def test_a_kernel_that_refuses_shapes_is_asked_which_it_takes():
    report = ra.verify(narrow, DENSE)
    assert report.exit_code == 0, report.table()
    assert any("other sizes are refused" in note for note in report.notes)
    assert sum(row.status == "ok" for row in report.rows) > 10
    wrong = ra.verify(lambda q, k, v: 2 * narrow(q, k, v), DENSE)
    assert wrong.exit_code == 1


@pytest.fixture
def session():
    def candidate(q, k, v, *, causal=False, mask=None, scale=None):
        wrong = causal and mask is not None
        return RIGHT(q, k, v, causal=causal, mask=None if wrong else mask, scale=scale)

    with open_candidate(candidate, DENSE, backward=None) as opened:
        made = Session(opened, DENSE, dtypes=("float32",), gradients=False)
        made.run()
        yield made


def test_a_judged_call_can_be_asked_again(session):
    case = next(c for c in session.cases if c.failing and "memory" not in session.probe_of(c).features)
    assert {"causal", "mask"} <= set(session.probe_of(case).features)
    assert session.again(case).failing == case.failing
    assert session.again(case, seed=5).failing
    assert not session.again(case, drop=("mask",)).failing, "by the name of the feature"
    assert not session.again(case, drop=("causal",)).failing
    smaller = session.again(case, sizes={"b": 1, "d": 8, "e": 8})
    assert smaller.got["output"].shape[0] == 1
    assert smaller.failing
    ones = session.again(case, values={"v": np.ones_like(session.probe_of(case).arguments["v"])})
    assert np.isclose(ones.got["output"][np.isfinite(case.got["lse"])], 1, atol=1e-5).any()
    assert session.budget.calls == 200 - 6
    session.budget = Budget(calls=0)
    assert session.again(case) is None


def plain(q, k, v):
    return RIGHT(q, k, v)


def test_a_backward_that_raises_leaves_the_forward_its_verdict():
    def fails(d_output, q, k, v):
        raise RuntimeError("no gradient today")

    report = ra.verify(plain, DENSE, backward=fails)
    assert report.exit_code == 1
    row = next(row for row in report.rows if row.probe == "plain")
    verdicts = {j.array: (j.verdict, j.says) for j in row.judgements}
    assert verdicts["output"][0] == "ok"
    assert verdicts["d_q"] == ("mismatch", "the backward raised RuntimeError: no gradient today")


def test_gradients_that_torch_cannot_give_are_absent():
    torch = pytest.importorskip("torch", reason="torch is not installed (extra peers)")

    def detached(q, k, v):
        k = k.detach()
        weights = torch.softmax(q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5, -1)
        return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    report = ra.verify(detached, DENSE, framework="torch", gradients=True)
    assert report.exit_code == 1
    (entry,) = (e for e in report.explanations if e["class"] == "gradient_absent")
    assert entry["outputs"] == ["d_k"]
