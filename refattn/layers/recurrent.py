"""The attention layers of Transformer-XL and of the Compressive Transformer: attention, residual connection, layer norm.

    post    output = norm(x + attention(x, [compressed, memory, x]))
    pre     output = x + attention(norm(x), [norm(compressed), norm(memory), norm(x)])

with the relative table r = sinusoid(distances) w_r, distances clamped first.  The memories are rows of this layer's input in
earlier segments; they are constants of the segment, while w_k, w_v (and under "pre" the norm) learn through them too.

Axes: ... batch, q position in the segment, k row of a memory, m model channel, h head, d and e channels.

Source: Dai et al. 2019, arXiv:1901.02860, section 3.3; Rae et al. 2019, arXiv:1911.05507, algorithm 1.
"""

import inspect
from typing import Any

import numpy as np

from refattn import normalization
from refattn.arrays import namespace, require_array, require_integer, require_one_of, to_namespace
from refattn.attention import compressive
from refattn.contraction import einsum
from refattn.layers.basics import require_channels
from refattn.mechanism import function
from refattn.positions import sinusoid
from refattn.records import Result

__all__ = ["compressive_layer", "transformer_xl_layer"]

EPS = 1e-5
WEIGHTS = ("w_q", "w_k", "w_v", "w_o", "w_r", "u", "w", "norm_weight", "norm_bias")


def _compressive_forward(
    x: Any,
    memory: Any = None,
    compressed: Any = None,
    *,
    w_q: Any,
    w_k: Any,
    w_v: Any,
    w_o: Any,
    w_r: Any,
    u: Any = None,
    w: Any = None,
    norm_weight: Any = None,
    norm_bias: Any = None,
    norm: str = "post",
    clamp_length: int | None = None,
    same_length: bool | int = False,
    through_memory: bool = False,
    compressed_positions: str = "slot",
    rate: int | None = None,
    keep_weights: bool = False,
    backend: Any,
    algorithm: str,
) -> tuple[Result, Any]:
    """Attention of a segment over [compressed, memory, segment] with residual connection and layer norm.

    Parameters
    ----------
    x : array (..., q, m)
    memory, compressed : arrays (..., k, m)
        Rows of earlier inputs of this layer, oldest first, and compressed older ones; either may be left out.
    w_q, w_k, w_r : arrays (m, h, d)
    w_v, w_o : arrays (m, h, e), (h, e, m)
    u, w : arrays (h, d)
        Biases towards keys and positions; pass the same arrays to several layers to tie them (and add their gradients).
    norm_weight, norm_bias : arrays (m,)
        Left out: 1 and 0.
    norm : {"post", "pre"}
        Norm of the sum, or of the attention's input, memory included; eps 1e-5.
    clamp_length : int, optional
        Distances beyond count as this one.
    same_length : bool or int
        As for ``transformer_xl_attention``.
    through_memory : bool
        Let gradients into the memory, in place of zero.
    compressed_positions, rate
        As for ``compressive_attention``.
    keep_weights : bool
        The Result also holds ``weights`` and ``logits`` (..., h, q, k).

    Returns
    -------
    output : array (..., q, m)

    Raises
    ------
    ValueError
        Shapes that disagree, such as a memory of another width.
    """
    require_one_of("norm", norm, ("post", "pre"))
    if clamp_length is not None:
        require_integer("clamp_length", clamp_length, minimum=0)
    for name, a in (("x", x), ("memory", memory), ("compressed", compressed)):
        if a is not None:
            require_array(name, a, axes=2)
            if a.shape[-1] != x.shape[-1]:
                raise ValueError(f"{name} has shape {tuple(a.shape)}: expected rows of {x.shape[-1]} channels like x")
    require_channels(x, norm_weight=norm_weight, norm_bias=norm_bias)
    require_one_of("compressed_positions", compressed_positions, ("slot", "span_end", "span_mid"))
    if rate is not None:
        require_integer("rate", rate, minimum=1)
    if w_r.ndim != 3 or w_r.shape[0] != x.shape[-1]:
        raise ValueError(f"w_r has shape {tuple(w_r.shape)}: expected (m, h, d) with m = {x.shape[-1]} like x")
    rows = {"compressed": compressed, "memory": memory, "x": x}
    rows = {n: a for n, a in rows.items() if a is not None}
    span = 1 if compressed_positions == "slot" else rate or 1
    count = sum(a.shape[-2] * (span if n == "compressed" else 1) for n, a in rows.items())
    distances = np.arange(count - 1, -1, -1)
    distances = distances if clamp_length is None else np.minimum(distances, clamp_length)
    table = to_namespace(sinusoid(distances, x.shape[-1]), namespace(x), dtype=x.dtype, like=x)
    weights = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o, "r": einsum("pm,mhd->hpd", table, w_r), "u": u, "w": w}

    kept = {}
    if norm == "pre":
        kept = {n: normalization.layer_norm(a, EPS) for n, a in rows.items()}
        rows = {n: _affine(normal, norm_weight, norm_bias) for n, (normal, _) in kept.items()}
    result, inner = compressive.forward(
        **rows, **weights, through_memory=True, same_length=same_length, compressed_positions=compressed_positions, rate=rate,
        keep_weights=keep_weights, backend=backend, algorithm=algorithm,
    )  # fmt: skip
    output = x + result.output
    if norm == "post":
        kept = {"x": normalization.layer_norm(output, EPS)}
        output = _affine(kept["x"][0], norm_weight, norm_bias)
    fields = {n: a for n, a in result.fields.items() if n in ("weights", "logits")}
    return Result(output=output, **fields), (inner, kept, table, norm, norm_weight, through_memory)


def _transformer_xl_forward(x: Any, memory: Any = None, **options: Any) -> tuple[Result, Any]:
    """Attention of a segment over [memory, segment] with residual connection and layer norm.

    Parameters
    ----------
    x : array (..., q, m)
    memory : array (..., k, m)
        Rows of earlier inputs of this layer, oldest first; may be left out.
    w_q, w_k, w_v, w_o, w_r, u, w, norm_weight, norm_bias, norm, clamp_length, same_length, through_memory, keep_weights
        As for ``compressive_layer``.

    Returns
    -------
    output : array (..., q, m)
    """
    return _compressive_forward(x, memory, None, **options)


_shared = inspect.signature(_compressive_forward).parameters
_transformer_xl_forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [p for n, p in _shared.items() if n not in ("compressed", "compressed_positions", "rate")]
)


def _affine(normal: Any, weight: Any, bias: Any) -> Any:
    y = normal if weight is None else normal * weight
    return y if bias is None else y + bias


def _backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """The layer in reversed order; the norm of "pre" collects from every row, memories included."""
    inner, kept, table, norm, norm_weight, through_memory = saved
    if output is None:
        return {}
    gradients: dict[str, Any] = {"norm_weight": 0.0, "norm_bias": 0.0}

    def before_norm(name: str, d: Any) -> Any:
        normal, factor = kept[name]
        gradients["norm_weight"] = gradients["norm_weight"] + einsum("...m,...m->m", normal, d)
        gradients["norm_bias"] = gradients["norm_bias"] + einsum("...m->m", d)
        return normalization.layer_norm_backward(normal, factor, d if norm_weight is None else d * norm_weight)

    d_sum = before_norm("x", output) if norm == "post" else output
    found = compressive.backward(inner, output=d_sum, lse=None)
    for name in ("compressed", "memory", "x"):
        if name in found:
            d = found.pop(name)
            gradients[name] = before_norm(name, d) if norm == "pre" else d
    gradients["x"] = gradients["x"] + d_sum
    gradients["w_r"] = einsum("pm,...hpd->mhd", table, found.pop("r"))
    if not through_memory:
        gradients.pop("memory", None)
        gradients.pop("compressed", None)
    return {**gradients, **found}


transformer_xl_layer = function(
    _transformer_xl_forward, _backward, name="transformer_xl_layer", differentiable=("x", "memory", *WEIGHTS)
)
compressive_layer = function(
    _compressive_forward, _backward, name="compressive_layer", differentiable=("x", "memory", "compressed", *WEIGHTS)
)
