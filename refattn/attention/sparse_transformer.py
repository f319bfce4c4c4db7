"""Sparse Transformer: causal attention whose rows see about sqrt(t) keys, in two parts that together reach every position.

    output[h,i,e] = sum_{j in A_h(i)} exp(logits[h,i,j] - lse[h,i]) * v[g(h),j,e]    logits = scale * q k^T and shared terms

    strided  first:  j = max(0, i - stride) ... i               second:  (i - j) mod stride = 0
    fixed    first:  j // stride = i // stride                  second:  stride - o - c <= j mod stride < stride - o

all with j <= i; c is ``summary``, o the head's entry of ``summary_offsets``.  A *merged* head has one softmax over the union.

======= ==========================================  ==================
letter  axis                                        where
======= ==========================================  ==================
...     any batch axes, broadcast as in matmul      all
h       query head                                  q, output, lse
g       key head, h a multiple of g                 k, v
t, i, j position, of queries and keys alike         all
d, e    query/key channel, value channel            q, k; v, output
======= ==========================================  ==================

Conventions: the paper's first strided part holds stride + 1 keys; its released code keeps stride of them
(``variant="code"``).  The paper prints the last summary residue as stride, which does not occur; its example has stride - 1.
Only the listed pairs are computed, up to about half as many again: work and memory are O(t (stride + t / stride)) and O(t).

Source: Child et al. 2019, arXiv:1904.10509, section 4.2 (patterns) and 4.3 (heads).
"""

from typing import Any

import numpy as np

from refattn import cost as costs
from refattn.arrays import namespace
from refattn.attention.blocks.sparse_transformer import (
    blocks_of,
    computed_pairs,
    fold_heads,
    key_heads,
    mixed_parts,
    pattern_of,
    read_parts,
    repeat_heads,
)
from refattn.core import options
from refattn.core.blocks import one_length
from refattn.core.listed import CHOICES
from refattn.core.problem import prepare
from refattn.mechanism import mechanism
from refattn.records import Counts, Result

__all__ = ["sparse_transformer_attention"]

_SHARED = tuple(n for n in options.SHARED if n not in ("pattern", *CHOICES))


@options.takes(*_SHARED)
def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    pattern: str = "strided",
    stride: int,
    summary: int | None = None,
    summary_offsets: Any = None,
    heads: str = "split",
    layer: int | None = None,
    variant: str = "paper",
    backend: Any,
    algorithm: str,
    **shared: Any,
) -> tuple[Result, Any]:
    """softmax(scale q k^T, over the keys of the sparse pattern) v.

    Parameters
    ----------
    q : array (..., h, t, d)
    k : array (..., g, t, d)
    v : array (..., g, t, e)
    pattern : {"strided", "fixed"}
    stride : int
        At least 1; near sqrt(t) for the least work.
    summary : int
        Summary columns in each block of ``stride`` positions; for the fixed pattern, at most ``stride``.
    summary_offsets : int or ints (h,), optional
        How far to the left of the block's end each head's columns stand, in tokens; default 0.
    heads : {"split", "merged", "first", "second", "interleaved"}
        "split": the first ceil(h / 2) heads take the first part, the others the second; "merged": all the union;
        "interleaved": all the first part in even layers, the second in odd ones.
    layer : int
        For "interleaved".
    variant : {"paper", "code"}
        Whether the first strided part holds stride + 1 or stride keys.
    {shared}

    Returns
    -------
    output : array (..., h, t, e), in the dtype of the inputs
    lse : array (..., h, t), in the compute dtype (float32 for half inputs)

    Raises
    ------
    ValueError
        Shapes that disagree, queries and keys of different number, a stride below 1, a summary wider than the stride,
        columns outside the block, options that the pattern or the heads do not use.
    TypeError
        Options or arrays of the wrong type.

    Examples
    --------
    Zero queries take the mean of what they see.  Row 4 at stride 2: keys 2, 3, 4, then 0, 2, 4; together 0, 2, 3, 4.

    >>> import numpy as np
    >>> q, k, v = np.zeros((1, 5, 2)), np.ones((1, 5, 2)), np.arange(5.0).reshape(1, 5, 1)
    >>> [float(sparse_transformer_attention(q, k, v, stride=2, heads=x)[0, 4, 0]) for x in ("first", "second", "merged")]
    [3.0, 2.0, 2.25]
    """
    own = {"pattern": pattern, "stride": stride, "summary": summary, "summary_offsets": summary_offsets}
    sizes = options.read_sizes(q, k, v)
    t, h, g = sizes.q, sizes.h, sizes.g
    if t != sizes.k:
        raise ValueError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: expected as many queries as keys")
    parts = read_parts(h, **own, heads=heads, layer=layer, variant=variant)
    arguments: dict[str, Any] = {"backend": backend, "algorithm": algorithm, **shared}
    repeated = None
    if algorithm == "whole" or shared.get("keep_weights"):
        prepared = prepare(q, k, v, extra_pattern=pattern_of(parts), **arguments)
    else:
        blocks = blocks_of(parts, t, namespace(q, k, v), q)
        numbers = key_heads(h, g, shared.get("head_map", "repeat"))
        if mixed_parts(parts, numbers):  # heads of one key head see different keys: each gets a copy of its own
            repeated = (numbers, g)
            arguments["head_map"] = "repeat"
            k, v = (repeat_heads(x, numbers) for x in (k, v))
        prepared = prepare(q, k, v, blocks=blocks, apart=len(set(parts)) > 1, **arguments)
    result, saved = prepared.run()
    return result, (prepared, saved, repeated)


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """Cotangents of q, k, v and the shared options (derivation: ``refattn.core.backward``)."""
    prepared, forward_state, repeated = saved
    gradients = prepared.gradients(forward_state, output, lse)
    if repeated is not None:
        for name in ("k", "v"):
            gradients[name] = fold_heads(gradients[name], *repeated)
    return gradients


def cost(
    *,
    b: int = 1,
    h: int = 1,
    g: int | None = None,
    t: int | None = None,
    q: int | None = None,
    k: int | None = None,
    d: int,
    e: int | None = None,
    pattern: str = "strided",
    stride: int,
    summary: int | None = None,
    summary_offsets: Any = None,
    heads: str = "split",
    layer: int | None = None,
    variant: str = "paper",
    **settings: Any,
) -> Counts:
    """Counts over the visible pairs; ``computed_multiplies`` over the blocks.  t, or q = k, is the length."""
    t, e, groups = one_length(t, q, k), d if e is None else e, h if g is None else g
    own = {"pattern": pattern, "stride": stride, "summary": summary, "summary_offsets": summary_offsets}
    parts = read_parts(h, **own, heads=heads, layer=layer, variant=variant)
    sizes: dict[str, Any] = {"b": b, "h": h, "q": t, "k": t, "d": d, "e": e, "extra_pattern": pattern_of(parts)}
    if settings.get("keep_weights"):
        return costs.softmax_counts(g=groups, **sizes, **settings)
    mixed = mixed_parts(parts, key_heads(h, groups, settings.get("head_map", "repeat")))
    if mixed:
        groups, settings = h, {**settings, "head_map": "repeat"}
    blocks, computed = blocks_of(parts, t, np, np.zeros(0)), sum(computed_pairs(part, t) for part in parts)
    apart = len(set(parts)) > 1
    return costs.softmax_counts(g=groups, **sizes, blocks=blocks, computed=computed, apart=apart, **settings)


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 4,
    g: int | None = None,
    t: int = 11,
    d: int = 4,
    e: int = 3,
    stride: int = 3,
    pattern: str = "strided",
    **settings: Any,
) -> dict[str, Any]:
    """Normal q (b,h,t,d), k (b,g,t,d), v (b,g,t,e); options are passed through.  g defaults to h."""
    g = g or h
    normal = rng.standard_normal
    if pattern == "fixed":
        settings.setdefault("summary", 1)
    arrays = {"q": normal((b, h, t, d)), "k": normal((b, g, t, d)), "v": normal((b, g, t, e))}
    return {**arrays, "pattern": pattern, "stride": stride, **settings}


_PROBES = (
    {"t": 29, "stride": 5, "heads": "merged", "says": "merged heads: the key that both parts hold counts once"},
    {"t": 30, "stride": 5, "heads": "first", "says": "the run of stride + 1 keys alone"},
    {"t": 30, "stride": 5, "heads": "first", "variant": "code", "says": "the run of stride keys of the released code"},
    {"t": 31, "stride": 5, "heads": "second", "says": "the multiples of the stride alone"},
    {"t": 17, "h": 3, "stride": 4, "heads": "interleaved", "layer": 1, "says": "an odd layer: the second part"},
    {"t": 29, "stride": 6, "pattern": "fixed", "summary": 2, "says": "fixed, heads split between the parts"},
    {
        "t": 31,
        "h": 3,
        "stride": 6,
        "pattern": "fixed",
        "summary": 2,
        "heads": "merged",
        "summary_offsets": np.array([0, 2, 4]),
        "says": "fixed, merged, each head with summary columns of its own",
    },
    {"t": 28, "stride": 6, "pattern": "fixed", "summary": 2, "heads": "second", "says": "summary columns alone"},
)

sparse_transformer_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="sparse_transformer_attention",
    differentiable=("q", "k", "v", *options.DIFFERENTIABLE),
    outputs=("output", "lse"),
    probes=_PROBES,
)
