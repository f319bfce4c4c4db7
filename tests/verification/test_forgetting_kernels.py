"""Independent kernels of forgetting attention: the right one passes, wrong ones are named."""

import numpy as np
import pytest

import refattn as ra

SIZES = "q=7,k=33"


def kernels(*, own_gate=False, sign=1, rows=True):
    """Whole matrices in float32, running sums in float64; each flag breaks one step."""

    def run(q, k, v, log_forget, scale):
        r, keys = q.shape[1] // k.shape[1], k.shape[2]
        k, v = (np.repeat(x, r, axis=1).astype(np.float32) for x in (k, v))
        sums = np.cumsum(log_forget.astype(np.float64), axis=-1)
        place = np.arange(q.shape[2]) + keys - q.shape[2]
        at_key = sums - log_forget if own_gate else sums
        decay = sums[..., np.clip(place, 0, keys - 1), None] - at_key[..., None, :]
        s = (q.shape[-1] ** -0.5 if scale is None else scale) * (q.astype(np.float32) @ k.swapaxes(-1, -2))
        s = np.where(np.arange(keys) <= place[:, None], s + sign * decay.astype(np.float32), -np.inf)
        top = np.maximum(s.max(-1, keepdims=True), -1e30)
        p = np.exp(s - top)
        total = p.sum(-1, keepdims=True)
        some = np.where(total == 0, 1, total)
        return p / some, np.where(total > 0, top + np.log(some), -np.inf)[..., 0], k, v, place

    def forward(q, k, v, *, log_forget, scale=None):
        p, lse, _, v, _ = run(q, k, v, log_forget, scale)
        return (p @ v).astype(q.dtype), lse

    def backward(d_output, q, k, v, *, log_forget, scale=None, d_lse=None):
        b, g, _, _ = k.shape
        p, _, wide_k, wide_v, place = run(q, k, v, log_forget, scale)
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        d_p = d_output.astype(np.float32) @ wide_v.swapaxes(-1, -2)
        d_s = p * (d_p - (p * d_p).sum(-1, keepdims=True) + (0 if d_lse is None else d_lse[..., None]))
        by_group = lambda x: x.reshape(b, g, -1, *x.shape[2:]).sum(2)  # noqa: E731
        d_sums = -d_s.sum(-2, dtype=np.float64)
        for i, at in enumerate(place):
            if rows and at >= 0:
                d_sums[..., at] += d_s[..., i, :].sum(-1, dtype=np.float64)
        return {
            "q": (factor * d_s @ wide_k).astype(q.dtype),
            "k": by_group(factor * d_s.swapaxes(-1, -2) @ q.astype(np.float32)).astype(k.dtype),
            "v": by_group(p.swapaxes(-1, -2) @ d_output.astype(np.float32)).astype(v.dtype),
            "log_forget": sign * np.flip(np.cumsum(np.flip(d_sums, -1), -1), -1).astype(log_forget.dtype),
        }

    return forward, backward


def test_the_right_kernel_passes():
    forward, backward = kernels()
    report = ra.verify(forward, "forgetting_attention", backward=backward, sizes=SIZES)
    assert report.ok, report.table()


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("forget_off_by_one", {"own_gate": True}),
        ("forget_dropped", {"sign": 0}),
        ("forget_grad_rows", {"rows": False}),
    ],
)
def test_a_wrong_kernel_is_named(name, broken):
    forward, backward = kernels(**broken)
    report = ra.verify(forward, "forgetting_attention", backward=backward, sizes=SIZES)
    assert report.exit_code == 1
    assert name in [e["class"] for e in report.explanations[:2]]
