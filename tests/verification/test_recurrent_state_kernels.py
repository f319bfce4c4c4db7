"""The verifier on kernels of the recurrences: passes the right ones, names what is wrong."""

import numpy as np
import pytest
from verification.recurrent_state_kernels import delta, gated, rwkv7, ssd

import refattn as ra
from refattn.verification import session

SMALL = "b=1,h=1,g=1,t=12,d=4,e=3"  # the probes of these sizes alone: seconds in place of a minute
SIZES = {"group_tile": "b=1,h=4,g=2,t=12,d=4,e=3", "state_lost_at_chunk": "b=1,h=1,g=1,t=70,d=4,e=3"}

_truths: dict = {}


@pytest.fixture(autouse=True)
def one_truth_for_all_kernels(monkeypatch):
    """The probes of a mechanism are the same for every kernel, and so is what is right; it takes most of the time."""
    compute = session.truth_of

    def known(question):
        given = {**question.arrays, **question.options, **{f"d_{n}": x for n, x in question.cotangents.items()}}
        parts = [(n, x.tobytes(), x.shape) if isinstance(x, np.ndarray) else (n, repr(x)) for n, x in given.items()]
        key = (question.mechanism.name, question.dtype, question.wrt, question.conventions, question.takes, *parts)
        if key not in _truths:
            _truths[key] = compute(question)
        return _truths[key]

    monkeypatch.setattr(session, "truth_of", known)


KERNELS = {
    "gated_linear_attention": (
        gated,
        ("decay_base", "decay_first_step", "decay_order", "state_ignored", "state_lost_at_chunk", "state_cotangent"),
    ),
    "delta_rule_attention": (
        delta,
        ("decay_order", "beta_twice", "beta_on_value_only", "erase_dropped", "dk_shared_pair", "d_state_erase"),
    ),
    "rwkv7_attention": (
        rwkv7,
        ("decay_order", "remove_replace", "erase_dropped", "decay_channel_shared", "gate_raw", "d_remove"),
    ),
    "ssd_attention": (
        ssd,
        ("dt_not_in_write", "dt_bias_twice", "group_tile", "skip_dropped", "ddt_one_path"),
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_right_kernel_passes(name):
    forward, backward = KERNELS[name][0]()
    report = ra.verify(forward, name, backward=backward, sizes=SMALL)
    assert report.ok, report.table()


def test_a_running_sum_of_large_terms_is_no_mistake():
    """dgamma as what queries from it on read, minus what was written since, and what the final state sends: right, but for the
    rounding of its terms, which is large beside a gradient at a log decay of -20."""
    forward, backward = rwkv7()

    def from_here(x):
        return np.cumsum(x[..., ::-1, :], axis=-2)[..., ::-1, :]

    def by_running_sum(d_output, q, k, v, *, d_state=None, remove, replace, channel_decay, state=None):
        given = {"remove": remove, "replace": replace, "channel_decay": channel_decay, "state": state}
        g = backward(d_output, q, k, v, d_state=d_state, **given)
        last = forward(q, k, v, **given)[1]
        removed = remove * g["remove"]
        terms = q * g["q"] - k * g["k"] - replace * g["replace"] + removed
        end = 0 if d_state is None else (d_state * last).sum(-1)[..., None, :]
        return {**g, "channel_decay": (from_here(terms) - removed + end).astype(q.dtype)}

    report = ra.verify(forward, "rwkv7_attention", backward=by_running_sum, sizes="b=1,h=1,g=1,t=24,d=4,e=3")
    assert report.ok, report.table()


@pytest.mark.parametrize(("name", "class_"), [(n, c) for n, (_, wrong) in KERNELS.items() for c in wrong])
def test_a_wrong_kernel_is_found_and_its_mistake_named(name, class_):
    forward, backward = KERNELS[name][0](class_)
    report = ra.verify(forward, name, backward=backward, sizes=SIZES.get(class_, SMALL))
    assert not report.ok
    assert class_ in report.explanations[0]["class"].split(" + "), report.explanations
