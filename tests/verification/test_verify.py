"""verify: statuses, exit codes, state and strides, files, errors of use."""

import json
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from verification.kernels.dense import attention

import refattn as ra
from refattn.verification import UsageError

MECHANISM = "scaled_dot_product_attention"
RIGHT, BACKWARD = attention()


def plain(q, k, v):
    return RIGHT(q, k, v)


def simple(q, k, v, *, causal=False):
    """Only causal, and no grouped heads."""
    if q.shape[1] != k.shape[1]:
        raise NotImplementedError("grouped heads")
    return RIGHT(q, k, v, causal=causal)[0]


def test_unsupported_is_not_run_never_failed():
    report = ra.verify(simple, MECHANISM)
    assert report.ok, report.table()
    assert report.exit_code == 0
    refused = {row.says: row.message for row in report.rows if row.status == "not supported"}
    assert refused == {"grouped_heads": "does not take grouped_heads (grouped heads)"}
    # All other probes were drawn with as many key heads as query heads instead.
    ran = {row.probe for row in report.rows if row.status == "ok"}
    assert ran >= {"plain", "value_channels", "mixed", "causal_on"}


def test_nothing_was_checked():
    def refuses(q, k, v):
        raise NotImplementedError("not today")

    report = ra.verify(refuses, MECHANISM)
    assert report.exit_code == 4
    assert not report.ok
    assert "NOTHING WAS CHECKED" in report.table()


def test_an_exception_on_the_first_call_says_what_is_not_taken():
    def fails(q, k, v, *, softcap=None):
        if softcap is not None:
            raise ValueError("no cap today")
        return RIGHT(q, k, v)

    report = ra.verify(fails, MECHANISM)
    assert report.exit_code == 0
    (row,) = (row for row in report.rows if row.status == "not supported")
    assert (row.says, row.message) == ("softcap", "does not take softcap (ValueError: no cap today)")
    assert ra.verify(fails, MECHANISM, requires=["softcap"]).exit_code == 1
    assert ra.verify(fails, MECHANISM, requires=["mask"]).exit_code == 0


def test_an_exception_after_the_option_was_answered_is_a_mismatch():
    def fails(q, k, v, *, mask=None):
        if mask is not None and mask.shape[1] == 1 < mask.shape[2]:
            raise ValueError("one head only")
        return RIGHT(q, k, v, mask=mask)

    report = ra.verify(fails, MECHANISM)
    assert report.exit_code == 1
    assert {row.probe for row in report.rows if row.status == "error"} >= {"mask_batch", "mask_empty"}
    assert "one head only" in report.table()


def test_gradients_left_out_are_not_wrong():
    def partial(d_output, q, k, v):
        return {"v": BACKWARD(d_output, q, k, v)["v"]}

    report = ra.verify(plain, MECHANISM, backward=partial)
    assert report.ok, report.table()
    row = next(r for r in report.rows if r.probe == "mixed")
    assert {j.array: j.verdict for j in row.judgements}["d_v"] == "ok"
    assert {j.array: j.verdict for j in row.judgements}["d_q"] == "not provided"
    assert "d_q, d_k: not provided" in report.table()


def test_the_cotangent_counts():
    """A backward that assumes ones is wrong."""

    def ones(d_output, q, k, v):
        return BACKWARD(np.ones_like(d_output), q, k, v)

    report = ra.verify(lambda q, k, v: RIGHT(q, k, v)[0], MECHANISM, backward=ones)
    assert report.exit_code == 1
    assert report.explanations[0]["class"] == "dout_ignored"


def test_without_lse_it_is_not_checked():
    report = ra.verify(lambda q, k, v: RIGHT(q, k, v)[0], MECHANISM)
    assert report.ok
    assert "lse: the candidate does not return it" in report.table()


def test_changed_input():
    def changes(q, k, v):
        q *= 1
        k[..., 0, 0] += 1
        return RIGHT(q, k, v)[0]

    report = ra.verify(changes, MECHANISM)
    assert report.exit_code == 1
    assert "input_mutation" in {e["class"] for e in report.explanations}


def test_strides():
    def assumes_contiguous(q, k, v):
        flat = [np.lib.stride_tricks.as_strided(x, x.shape, np.empty(x.shape, x.dtype).strides) for x in (q, k, v)]
        return RIGHT(*flat)[0]

    report = ra.verify(assumes_contiguous, MECHANISM)
    assert report.exit_code == 1
    assert "alias_stride" in {e["class"] for e in report.explanations}


def test_state_of_earlier_calls():
    calls = []

    def stale(q, k, v):
        calls.append(0)
        output = RIGHT(q, k, v)[0]
        return output + q.dtype.type(0.01) if len(calls) > 20 else output

    report = ra.verify(stale, MECHANISM)
    assert report.exit_code == 1
    assert "stale_scratch" in {e["class"] for e in report.explanations}


def test_nondeterminism():
    rng = np.random.default_rng(0)

    def last_bits(q, k, v):
        output = RIGHT(q, k, v)[0]
        return output * (1 + rng.choice([-1, 0, 1], output.shape).astype(q.dtype) * np.finfo(q.dtype).eps / 2)

    report = ra.verify(last_bits, MECHANISM)
    assert report.ok, report.table()
    assert any("last bits" in note for note in report.notes)


def test_files(tmp_path):
    forward, _ = attention(key_head=lambda i, h, g: i % g)

    def candidate(q, k, v, *, mask=None):
        if mask is not None and mask.shape[0] == 1:
            raise ValueError("<b>&\x01")
        return forward(q, k, v)

    report = ra.verify(candidate, MECHANISM)
    report.to_json(tmp_path / "r.json")
    report.to_junit(tmp_path / "r.xml")
    report.to_html(tmp_path / "r.html")
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["schema_version"] == 2
    assert saved["exit_code"] == 1
    assert saved["explanations"][0]["class"] == "gqa_tile"
    assert set(saved["explanations"][0]) >= {"class", "residual", "outputs", "says"}
    suite = ET.parse(tmp_path / "r.xml").getroot()
    assert int(suite.get("tests")) == len(report.rows) == len(suite)
    assert int(suite.get("failures")) == sum(r.status == "mismatch" for r in report.rows) > 0
    assert int(suite.get("errors")) == sum(r.status == "error" for r in report.rows) > 0
    page = (tmp_path / "r.html").read_text()
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert "http" not in page


def test_table_tells_what_where_and_how():
    text = ra.verify(simple, MECHANISM).table()
    for words in ("ran in this process", "not run:", "error/bound that passes:", "maximum 4, median 0.75"):
        assert words in text
    full = ra.verify(simple, MECHANISM).table(full=True)
    assert len(full.splitlines()) >= len(text.splitlines())


def test_assert_matches():
    assert ra.assert_matches(simple, MECHANISM).ok
    forward, _ = attention(reach=1)
    with pytest.raises(AssertionError, match=r"(?s)MISMATCH.*window_plus1"):
        ra.assert_matches(forward, MECHANISM)


def test_what_cannot_be_asked():
    with pytest.raises(UsageError, match="did you mean 'scaled_dot_product_attention'"):
        ra.verify(simple, "scaled_dot_product_atention")
    with pytest.raises(UsageError, match="dtypes: 'float8'"):
        ra.verify(simple, MECHANISM, dtypes=("float8",))
    with pytest.raises(UsageError, match="no option 'casual'; did you mean 'causal'"):
        ra.verify(simple, MECHANISM, options={"casual": True})


def test_fixed_options():
    def always(q, k, v, *, causal):
        assert causal is True
        return RIGHT(q, k, v, causal=causal)[0]

    report = ra.verify(always, MECHANISM, options={"causal": True})
    assert report.ok, report.table()


def test_options_that_fit_no_probe_are_a_usage_error():
    def nystrom(q, k, v, *, landmarks, iterations=6):
        return v

    with pytest.raises(UsageError, match=r"landmarks=500 fit no probe of nystrom_attention: .*landmarks"):
        ra.verify(nystrom, "nystrom_attention", options={"landmarks": 500})


def test_lengths_are_drawn_to_fit_the_options():
    for name, options in (
        ("linear_attention", {"causal": True}),
        ("performer_attention", {"causal": True}),
        ("sinkhorn_attention", {"block": 4}),
    ):
        report = ra.verify(lambda *arrays, **more: arrays[2], name, options=options)
        assert report.exit_code == 1
        assert not any(row.status == "not run" for row in report.rows if row.probe in ("plain", "mixed"))


def test_progress():
    told = []
    ra.verify(simple, MECHANISM, progress=lambda done, total, label: told.append((done, total, label)))
    assert told
    assert all(0 < done <= total for done, total, _ in told)


def test_the_reference_is_not_independent():
    def cheating(q, k, v):
        return ra.scaled_dot_product_attention(q, k, v)

    report = ra.verify(cheating, MECHANISM)
    assert report.independent is False
    assert report.exit_code == 1
    assert "NOT INDEPENDENT" in report.table()


CRASHES = """
import os, time
import numpy as np

def attention(q, k, v, *, scale=None, causal=False):
    if scale is not None:
        os._exit(3)
    if causal:
        time.sleep(60)
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    logits = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v
"""


def test_a_crash_and_a_hang_are_verdicts_and_the_rest_still_runs(tmp_path):
    (tmp_path / "kernel.py").write_text(CRASHES)
    report = ra.verify(f"{tmp_path / 'kernel.py'}:attention", MECHANISM, time_limit=1.0)
    assert report.exit_code == 3
    statuses = {row.probe: row.status for row in report.rows}
    assert statuses["plain"] == statuses["mixed"] == statuses["memory_sliced"] == "ok"
    assert statuses["causal_on"] == "timeout"
    assert statuses["scale_given"] == "crash"
    assert "hang" in {e["class"] for e in report.explanations}
    assert "TIMEOUT" in report.table()


def test_properties():
    report = ra.verify(plain, MECHANISM, properties=True)
    assert report.ok, report.table()
    assert [p["name"] for p in report.properties] == ["ones", "linear", "key_order", "batch", "shift"]
    assert "checks without a reference:" in report.table()

    def unnormalised(q, k, v, *, causal=False):
        return RIGHT(q, k, v, causal=causal)[0] * q.dtype.type(1.001)

    report = ra.verify(unnormalised, MECHANISM, properties=True)
    assert {p["name"]: p["ok"] for p in report.properties} == {
        "ones": False,
        "linear": True,
        "key_order": True,
        "batch": True,
        "shift": True,
        "future": True,
    }
