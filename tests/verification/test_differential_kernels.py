"""Independent kernels of differential attention: the right one passes, a wrong one is named."""

import numpy as np
import pytest

import refattn as ra

SIZES = "q=7,k=11"


def kernels(*, halves=False, sign=-1, own_key=True):
    """Whole matrices, one map after the other; each flag breaks one step."""

    def of_map(x, s):
        n = x.shape[1] // 2
        return x[:, s * n : (s + 1) * n] if halves else x[:, s::2]

    def softmax(q, k, r):
        k = np.repeat(k, r, axis=1).astype(np.float32)
        x = q.shape[-1] ** -0.5 * (q.astype(np.float32) @ k.swapaxes(-1, -2))
        top = x.max(-1, keepdims=True)
        p = np.exp(x - top)
        return p / p.sum(-1, keepdims=True), (top + np.log(p.sum(-1, keepdims=True)))[..., 0]

    def forward(q, k, v, *, lam):
        r = q.shape[1] // 2 // v.shape[1]
        wide, outputs, lses = np.repeat(v, r, axis=1).astype(np.float32), [], []
        for s in range(2):
            key = k if k.shape[1] == v.shape[1] else of_map(k, s if own_key else 0)
            p, lse = softmax(of_map(q, s), key, r)
            outputs.append(p @ wide)
            lses.append(lse)
        factor = lam[..., None] if np.ndim(lam) else lam
        return {"output": (outputs[0] + sign * factor * outputs[1]).astype(q.dtype), "lses": np.stack(lses)}

    return forward


def test_the_right_kernel_passes():
    report = ra.verify(kernels(), "differential_attention", sizes=SIZES)
    assert report.ok, report.table()


@pytest.mark.parametrize(
    ("name", "broken"),
    [("diff_pairs", {"halves": True}), ("diff_sign", {"sign": 1}), ("diff_gqa_single", {"own_key": False})],
)
def test_a_wrong_kernel_is_named(name, broken):
    report = ra.verify(kernels(**broken), "differential_attention", sizes=SIZES)
    assert report.exit_code == 1
    assert name in [e["class"] for e in report.explanations[:2]]
