"""A function for instrumented namespaces to run."""

from refattn.arrays import namespace
from refattn.contraction import einsum


def attention(q, k, v, mask):
    """Softmax attention as mechanisms are written: the namespace of the inputs, slices, selects, in-place parts."""
    xp = namespace(q, k, v)
    logits = einsum("...qd,...kd->...qk", q, k) * q.shape[-1] ** -0.5
    logits = xp.where(mask, logits, xp.asarray(-xp.inf, dtype=logits.dtype))
    top = xp.max(logits, axis=-1, keepdims=True)
    weights = xp.exp(logits - top)
    total = xp.sum(weights, axis=-1, keepdims=True)
    output = xp.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)
    for rows in (slice(0, 2), slice(2, None)):
        output[..., rows, :] += einsum("...qk,...ke->...qe", weights[..., rows, :] / total[..., rows, :], v)
    assert xp.isdtype(output.dtype, "real floating")
    assert output.dtype == xp.float32
    assert bool(xp.all(total >= 1))
    assert float(xp.finfo(xp.float32).eps) == 2.0**-23
    return output, xp.log(total[..., 0]) + top[..., 0]
