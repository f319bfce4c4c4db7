"""Functions around attention as what a kernel is held against, by their dotted names."""

import numpy as np
import pytest

import refattn as ra


def convolution(broken=""):
    def run(x, weight, bias=None, *, state=None, activation=None):
        t, w = x.shape[-2], weight.shape[-1]
        old = np.zeros((*x.shape[:-2], w - 1, x.shape[-1]), x.dtype) if state is None else state
        rows = np.concatenate([0 * old if broken == "state_ignored" else old, x], axis=-2)
        taps = weight[:, ::-1] if broken == "conv_flipped" else weight
        y = sum(rows[..., i : i + t, :] * taps[:, i] for i in range(w))
        y = y if bias is None or broken == "conv_bias_dropped" else y + bias
        y = y / (1 + np.exp(-y)) if activation == "silu" else y
        new = rows[..., t:, :].copy()
        if broken == "conv_state_short" and t < w - 1:
            new[..., : w - 1 - t, :] = 0
        if broken == "conv_state_activated":
            n = min(t, w - 1)
            new[..., w - 1 - n :, :] = y[..., t - n :, :]
        return y.astype(x.dtype), new

    return run


def test_a_right_convolution_and_a_right_gate_pass():
    report = ra.verify(convolution(), "layers.causal_convolution")
    assert report.ok, report.table()

    def gate(z, *, a_log=0.0, bias=0.0):
        return -np.exp(a_log) * np.logaddexp(0, z + bias)

    assert ra.verify(gate, "gates.log_decay").ok
    assert not ra.verify(lambda z, *, a_log=0.0, bias=0.0: -np.logaddexp(0, z + bias), ra.gates.log_decay).ok


@pytest.mark.parametrize(
    "class_", ["conv_flipped", "conv_state_short", "conv_state_activated", "state_ignored", "conv_bias_dropped"]
)
def test_wrong_convolutions_are_named(class_):
    report = ra.verify(convolution(class_), "layers.causal_convolution")
    assert not report.ok
    assert class_ in report.explanations[0]["class"].split(" + "), report.explanations
