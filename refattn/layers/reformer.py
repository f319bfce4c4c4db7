"""The attention layer of the Reformer: layer norm, shared projection of queries and keys, LSH attention, output projection.

    n = norm(x)        qk = n w_qk        v = n w_v        output = LSH(qk, v) w_o

Axes: ... batch, t position, m model channel, h head, d and e channels, s hash round.  It is the f of a reversible block; the
residual connection belongs to the block.

Source: Kitaev et al. 2020, arXiv:2001.04451, sections 2 and 3.
"""

import inspect
from typing import Any

from refattn import normalization
from refattn.arrays import require_axes
from refattn.attention import lsh
from refattn.contraction import einsum
from refattn.layers.basics import require_channels
from refattn.mechanism import function
from refattn.records import Result

__all__ = ["lsh_layer"]

EPS = 1e-5
OWN = ("w_qk", "w_v", "w_o", "norm_weight", "norm_bias")


def _forward(
    x: Any,
    *,
    w_qk: Any,
    w_v: Any,
    w_o: Any,
    norm: bool = True,
    norm_weight: Any = None,
    norm_bias: Any = None,
    backend: Any,
    algorithm: str,
    **options: Any,
) -> tuple[Result, Any]:
    """LSH attention of norm(x), projected back to the channels of x.

    Parameters
    ----------
    x : array (..., t, m)
    w_qk, w_v, w_o : arrays (m, h, d), (m, h, e), (h, e, m)
    norm : bool
        Layer norm before the projections (eps 1e-5).
    norm_weight, norm_bias : arrays (m,)
        Left out: 1 and 0.
    rotations, buckets, hashes, n_buckets, chunk, causal, ...
        Options of ``lsh_attention``.

    Returns
    -------
    output : array (..., t, m)
    buckets : int64 array (..., h, s, t)
    """
    require_axes(x=(x, "... t m"), w_qk=(w_qk, "m h d"), w_v=(w_v, "m h e"), w_o=(w_o, "h e m"))
    require_channels(x, norm_weight=norm_weight, norm_bias=norm_bias)
    normed, factor, scaled = x, None, x
    if norm:
        normed, factor = normalization.layer_norm(x, EPS)
        scaled = normed if norm_weight is None else normed * norm_weight
        scaled = scaled if norm_bias is None else scaled + norm_bias
    qk, v = einsum("...tm,mhd->...htd", scaled, w_qk), einsum("...tm,mhe->...hte", scaled, w_v)
    result, saved = lsh.forward(qk, v, backend=backend, algorithm=algorithm, **options)
    output = einsum("...hte,hem->...tm", result.output, w_o)
    return Result(output=output, buckets=result.buckets), (
        saved, result.output, normed, factor, scaled, w_qk, w_v, w_o, norm_weight,
    )  # fmt: skip


def _backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """The steps of the forward in reversed order."""
    attention, heads, normed, factor, scaled, w_qk, w_v, w_o, norm_weight = saved
    if output is None:
        return {}
    d_heads = einsum("...tm,hem->...hte", output, w_o)
    found = lsh.backward(attention, output=d_heads, lse=None)
    gradients = {
        "w_o": einsum("...hte,...tm->hem", heads, output),
        "w_qk": einsum("...tm,...htd->mhd", scaled, found["qk"]),
        "w_v": einsum("...tm,...hte->mhe", scaled, found["v"]),
        "scale": found["scale"],
    }
    d = einsum("...htd,mhd->...tm", found["qk"], w_qk) + einsum("...hte,mhe->...tm", found["v"], w_v)
    if factor is None:
        return {"x": d, **gradients}
    gradients["norm_weight"], gradients["norm_bias"] = einsum("...m,...m->m", normed, d), einsum("...m->m", d)
    d = d if norm_weight is None else d * norm_weight
    return {"x": normalization.layer_norm_backward(normed, factor, d), **gradients}


_own = [p for p in inspect.signature(_forward).parameters.values() if p.name not in ("backend", "algorithm", "options")]
_shared = [p for n, p in inspect.signature(lsh.forward).parameters.items() if n not in ("qk", "v")]
_forward.__signature__ = inspect.Signature([*_own, *_shared])  # type: ignore[attr-defined]

lsh_layer = function(
    _forward,
    _backward,
    name="lsh_layer",
    differentiable=("x", *OWN, "scale"),
    floating=("rotations",),
)
