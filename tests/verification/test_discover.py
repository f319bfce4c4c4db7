"""Conventions found by asking: every answer of every question, from kernels that were built to give it."""

import json
import math

import numpy as np
import pytest

import refattn as ra
from refattn import cli
from refattn.verification.candidate import open_candidate
from refattn.verification.conventions import UsageError
from refattn.verification.discover import discover

SDPA = ra.scaled_dot_product_attention


def kernel(
    align="lower_right", head_map="repeat", window="inclusive", softcap_after_bias=False, alibi="absolute",
    lse_base="e", lse_includes_sinks=True, empty_rows="zero", empty_lse="-inf", masked_nan="stays",
):  # fmt: skip
    """A dense NumPy kernel of these conventions."""
    width = window

    def attention(
        q, k, v, *, causal=False, window=None, mask=None, bias=None, softcap=None, alibi_slopes=None, sinks=None
    ):
        r = q.shape[1] // k.shape[1]
        spread = (lambda x: np.repeat(x, r, axis=1)) if head_map == "repeat" else (lambda x: np.tile(x, (1, r, 1, 1)))
        q, k, v = q.astype(float), spread(k).astype(float), spread(v).astype(float)
        offset = k.shape[2] - q.shape[2] if align == "lower_right" else 0
        away = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None] - offset
        visible = np.ones(away.shape, bool) if mask is None else mask
        if causal:
            visible = visible & (away <= 0)
        if window:
            left, right = window[0] - (width == "count"), window[1]
            visible = visible & (away >= -left) & (away <= (math.inf if right is None else right))
        added = 0.0 if bias is None else bias.astype(float)
        if alibi_slopes is not None:
            added = added + alibi_slopes[:, None, None] * (away if alibi == "signed" else -abs(away))
        logits = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]) + (added if softcap_after_bias else 0.0)
        logits = softcap * np.tanh(logits / softcap) if softcap else logits
        logits = np.where(visible, logits + (0.0 if softcap_after_bias else added), -math.inf)
        p = np.where(visible, np.exp(logits), 0.0)
        keys = p.sum(-1)
        total = keys + (0.0 if sinks is None else np.exp(sinks.astype(float))[:, None])
        with np.errstate(divide="ignore"):
            lse = np.log(total if lse_includes_sinks else keys)
        v = np.where(np.isnan(v), 0.0, v) if masked_nan == "stays" else v
        output = p @ v / np.where(total == 0, 1, total)[..., None]
        empty = total == 0
        fill = {"zero": 0.0, "mean": v.mean(-2, keepdims=True), "nan": math.nan}[empty_rows]
        output = np.where(empty[..., None], fill, output)
        lse = np.where(empty, {"-inf": -math.inf, "+inf": math.inf, "0": 0.0, "finite": -1e38}[empty_lse], lse)
        return output.astype(np.float32), lse / (math.log(2) if lse_base == "2" else 1.0)

    return attention


ANSWERS = {
    "align": ("lower_right", "upper_left"),
    "head_map": ("repeat", "tile"),
    "window": ("inclusive", "count"),
    "softcap_after_bias": (False, True),
    "alibi": ("absolute", "signed"),
    "lse_base": ("e", "2"),
    "lse_includes_sinks": (True, False),
    "empty_rows": ("zero", "mean", "nan"),
    "empty_lse": ("-inf", "+inf", "0", "finite"),
    "masked_nan": ("stays", "may_leak"),
}


@pytest.mark.parametrize("field, value", [(n, x) for n, values in ANSWERS.items() for x in values])
def test_one_at_a_time(field, value):
    with open_candidate(kernel(**{field: value}), SDPA) as candidate:
        found, _ = discover(candidate, SDPA)
    assert getattr(found, field) == value


@pytest.mark.parametrize("seed", range(4))
def test_all_together(seed):
    rng = np.random.default_rng(seed)
    built = {n: values[rng.integers(len(values))] for n, values in ANSWERS.items()}
    with open_candidate(kernel(**built), SDPA) as candidate:
        found, undecided = discover(candidate, SDPA)
    assert found.declared() == built
    assert undecided == {}


def test_what_cannot_be_asked_stays_open():
    def plain(q, k, v):
        if q.shape[1] != k.shape[1]:
            raise ValueError("as many key heads as query heads, please")
        return kernel()(q, k, v)[0]

    with open_candidate(plain, SDPA) as candidate:
        found, undecided = discover(candidate, SDPA)
    assert found.declared() == {}
    assert set(undecided) == set(ANSWERS)
    assert "fewer key heads" in undecided["head_map"]
    assert "no causal" in undecided["align"]
    assert undecided["lse_base"] == "it returns no lse"


def test_what_is_plainly_wrong_fits_no_answer():
    with open_candidate(lambda q, k, v, *, causal=False: (q * 0, q[..., 0]), SDPA) as candidate:
        found, undecided = discover(candidate, SDPA)
    assert found.declared() == {}
    assert "no answer fits" in undecided["align"]


def test_other_mechanisms_are_refused():
    class Other:
        name, positional, outputs = "other", ("q", "k", "v"), ("output",)

    with open_candidate(kernel(), SDPA) as candidate, pytest.raises(UsageError, match="other"):
        discover(candidate, Other())


def test_the_command_prints_a_record(tmp_path, capsys):
    path = tmp_path / "kernel_to_discover.py"
    path.write_text("def f(q, k, v, *, causal=False): return q * 1\n")
    argv = [
        "discover",
        f"{path}:f",
        "--mechanism",
        SDPA.name,
        "--conventions",
        '{"align": "upper_left", "lse_base": "2"}',
    ]
    assert cli.main(argv) == 0
    streams = capsys.readouterr()
    assert json.loads(streams.out) == {}, "a declared answer that does not fit is not repeated"
    assert "align is open: no answer fits" in streams.err
