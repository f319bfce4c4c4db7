"""Sinkhorn attention: blocks of keys and values are sorted by a learned soft permutation, and every block meets the one put beside it.

    R[h]          = sinkhorn((sort_logits[h] + noise[h]) / temperature)               R[u,v] moves block v to place u
    ks[h,u,c,d]   = sum_v R[h,u,v] k[h,v,c,d]          vs[h,u,c,e] = sum_v R[h,u,v] v[h,v,c,e]
    output[h,u,a] = softmax(scale q[h,u,a] . [ks[h,u], k[h,u]]) [vs[h,u], v[h,u]]

    sinkhorn: `iterations` times  x -= logsumexp over v,  then  x -= logsumexp over u;  R = exp(x)

======= ================================================  =========================
letter  axis                                              where
======= ================================================  =========================
...     any batch axes, broadcast as in matmul            all
h       head                                              q, k, v, sort_logits, output
t       position; t = n * block                           q, k, v, output
n, u, v block: place, and which block is put there        sort_logits, noise
a, c    place in a query block, place in a key block      (t as (n, block))
d, e    query/key channel, value channel                  q, k; v, output
======= ================================================  =========================

Conventions: rows first, then columns, so that the columns of R sum to 1; rows do in the limit.  With ``causal`` place u gets
earlier blocks v < u alone, a row u of R depends on rows up to u alone, and the own block is causal; place 0 gets nothing.

Source: Tay, Bahri, Yang, Metzler, Juan 2020, arXiv:2002.11296, sections 3.1 to 3.3 (sorting network, Gumbel-Sinkhorn, blocks).
The paper masks the sort for decoding; how columns are normalised then is chosen here: over the places up to u.
"""

import math
from typing import Any

import numpy as np

from refattn.arrays import (
    broadcast_leading,
    namespace,
    real,
    require_axes,
    require_finite,
    require_integer,
    require_positive,
)
from refattn.attention.blocks.sinkhorn import balance, balance_backward, exp, where
from refattn.contraction import einsum
from refattn.core.blocks import one_length, product
from refattn.cost import require_sizes
from refattn.mechanism import function, mechanism
from refattn.normalization import masked_softmax, masked_softmax_backward
from refattn.records import Counts, Elements, Pass, Result

__all__ = ["sinkhorn", "sinkhorn_attention"]


# ------------------------------------------------------------------------------------------------ the sorting operator


def _checked(scores_name: str, scores: Any, iterations: Any, causal: Any) -> tuple[int, bool]:
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal is {causal!r}: expected True or False")
    if causal and scores.shape[-1] != scores.shape[-2]:
        raise ValueError(
            f"{scores_name} has shape {tuple(scores.shape)}: expected as many places as blocks with causal"
        )
    return require_integer("iterations", iterations, minimum=0), bool(causal)


def _sinkhorn_forward(scores: Any, *, iterations: int, causal: bool = False) -> tuple[Result, Any]:
    """A matrix of positive numbers made doubly stochastic, in logarithms: rows, then columns, `iterations` times; then exp.

    Parameters
    ----------
    scores : array (..., u, v)
        Logarithms of the matrix; -inf is a zero that stays.
    iterations : int
        0 gives exp(scores).
    causal : bool
        Only v < u, and the sums over a column take in the rows up to one's own: no row depends on a later one.

    Returns
    -------
    output : array (..., u, v)
        Its columns sum to 1 (after at least one iteration, not causal).

    Raises
    ------
    ValueError
        Fewer than two axes, negative iterations, causal with u != v.

    Source: Sinkhorn 1964, doi:10.1214/aoms/1177703591; in logarithms: Mena et al. 2018, arXiv:1802.08665, section 2.

    Examples
    --------
    >>> import numpy as np
    >>> sinkhorn(np.log([[1.0, 1.0], [1.0, 3.0]]), iterations=1).round(3)
    array([[0.667, 0.4  ],
           [0.333, 0.6  ]])
    """
    require_axes(scores=(scores, "... u v"))
    iterations, causal = _checked("scores", scores, iterations, causal)
    logs, steps = balance(scores, iterations, causal)
    output = exp(logs)
    return Result(output=output), (steps, output)


def _sinkhorn_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    steps, found = saved
    return {"scores": None if output is None else balance_backward(steps, where(found != 0, output) * found)}


sinkhorn = function(_sinkhorn_forward, _sinkhorn_backward, name="sinkhorn", differentiable=("scores",))


# ------------------------------------------------------------------------------------------------ attention


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    sort_logits: Any,
    block: int,
    temperature: Any = 0.75,
    iterations: int = 7,
    noise: Any = None,
    causal: bool = False,
    scale: Any = None,
    backend: Any,
) -> tuple[Result, Any]:
    """softmax(scale q [sorted k, own k]^T) [sorted v, own v], block by block.

    Parameters
    ----------
    q, k : arrays (..., h, t, d)
    v : array (..., h, t, e)
    sort_logits : array (..., h, n, n)
        How well block v fits beside block u: what a sorting network gives, before noise and temperature.
    block : int
        Positions of a block; t = n * block.
    temperature : float
        Divides sort_logits + noise.  Differentiable.
    iterations : int
        Of :data:`refattn.sinkhorn`; 0 takes exp alone.
    noise : array, broadcasts to (..., h, n, n)
        Gumbel noise, drawn by the caller; no gradient.
    causal : bool
        See above.
    scale : float
        Default d**-0.5.  Differentiable.

    Returns
    -------
    output : array (..., h, t, e), in the dtype of the inputs

    Raises
    ------
    ValueError
        Shapes that disagree, a length that is no multiple of the block, a temperature that is not above 0.

    Examples
    --------
    Two blocks of one position each, exchanged by the sort: every query meets both, with equal weights.

    >>> import numpy as np
    >>> q, k, v = np.zeros((1, 2, 1)), np.ones((1, 2, 1)), np.array([[[2.0], [4.0]]])
    >>> swap = np.array([[[-50.0, 50.0], [50.0, -50.0]]])
    >>> sinkhorn_attention(q, k, v, sort_logits=swap, block=1)
    array([[[3.],
            [3.]]])
    """
    if backend.fused:
        raise ValueError(f"backend {backend.name!r} does not serve sinkhorn_attention: its keys are mixtures")
    block = require_integer("block", block, minimum=1)
    sizes = require_axes(
        q=(q, "... h t d"), k=(k, "... h t d"), v=(v, "... h t e"), sort_logits=(sort_logits, "... h n n")
    )
    h, t, n = sizes["h"], sizes["t"], sizes["n"]
    if t != n * block:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and sort_logits {tuple(sort_logits.shape)}: expected a length of"
            f" {n} blocks of {block}, which is {n * block}"
        )
    lead = broadcast_leading(q=(q, 3), k=(k, 3), v=(v, 3), sort_logits=(sort_logits, 3))
    iterations, causal = _checked("sort_logits", sort_logits, iterations, causal)
    require_positive("temperature", temperature)
    if scale is None:
        scale = max(1, sizes["d"]) ** -0.5
    else:
        require_finite("scale", scale)
    xp = namespace(q, k, v)
    scores = sort_logits
    if noise is not None:
        try:
            full = np.broadcast_shapes(tuple(noise.shape), (*lead, h, n, n))
        except ValueError:
            full = ()
        if full != (*lead, h, n, n):
            raise ValueError(
                f"noise has shape {tuple(noise.shape)}: expected one that broadcasts to {(*lead, h, n, n)}"
            )
        scores = scores + noise
    scores = scores / temperature

    def blocks(x: Any) -> Any:
        return xp.reshape(x, (*x.shape[:-2], n, block, x.shape[-1]))

    with backend.quiet():
        logs, steps = balance(scores, iterations, causal)
        sorting = exp(logs)
        earlier = xp.arange(n)[:, None] > xp.arange(n)[None, :] if causal else None
        q_blocks, k_blocks, v_blocks = blocks(q), blocks(k), blocks(v)
        keys, values = (
            xp.concat(list(xp.broadcast_arrays(_sorted(backend, sorting, x, earlier), x)), axis=-2)
            for x in (k_blocks, v_blocks)
        )  # (..., h, u, c, .), the sorted block first
        visible = _visible(xp, n, block) if causal else None
        products = einsum("...uad,...ucd->...uac", q_blocks, keys)
        weights, _ = masked_softmax(products * scale, visible)
        output = product(backend, weights, values, visible)
    output = xp.reshape(output, (*output.shape[:-3], t, v.shape[-1]))
    kept = (q_blocks, k_blocks, v_blocks, keys, values, products, weights, scores, sorting, steps)
    return Result(output=output), (kept, visible, earlier, scale, temperature, block, backend)


def _sorted(backend: Any, sorting: Any, x: Any, earlier: Any) -> Any:
    """(..., h, u, v) times (..., h, v, c, d): every place gets its mixture of blocks."""
    xp = namespace(x)
    *_, c, d = x.shape
    moved = product(backend, sorting, xp.reshape(x, (*x.shape[:-2], c * d)), earlier)
    return xp.reshape(moved, (*moved.shape[:-1], c, d))


def _visible(xp: Any, n: int, block: int) -> Any:
    """(u, a, c) bool under causal: no sorted block at place 0, the own block up to oneself."""
    sorted_part = xp.broadcast_to((xp.arange(n) > 0)[:, None, None], (n, block, block))
    own = xp.broadcast_to(xp.arange(block)[:, None] >= xp.arange(block)[None, :], (n, block, block))
    return xp.concat([sorted_part, own], axis=-1)


def backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """Cotangents of q, k, v, sort_logits, temperature and scale.

    A block gets the cotangent of its own copy and R^T times those of the sorted ones; dR = d(sorted) . k + d(sorted) . v
    goes back through exp and the half steps: after each, y = x - lse gives dx = dy - exp(y) sum(dy).
    """
    if output is None:
        return {}
    kept, visible, earlier, scale, temperature, block, backend = saved
    q_blocks, k_blocks, v_blocks, keys, values, products, weights, scores, sorting, steps = kept
    xp = namespace(output)
    d_output = xp.reshape(output, (*output.shape[:-2], q_blocks.shape[-3], block, output.shape[-1]))
    with backend.quiet():
        d_values = product(backend, weights, d_output, visible, transposed=True)
        d_weights = einsum("...uae,...uce->...uac", d_output, values)
        d_logits = masked_softmax_backward(weights, d_weights)
        d_products = d_logits * scale
        d_q = product(backend, d_products, keys, visible)
        d_keys = product(backend, d_products, q_blocks, visible, transposed=True)
        d_sorting: Any = 0.0
        found = []
        for d_both, x in ((d_keys, k_blocks), (d_values, v_blocks)):
            d_moved, d_own = d_both[..., :block, :], d_both[..., block:, :]
            flat = xp.reshape(d_moved, (*d_moved.shape[:-2], d_moved.shape[-2] * d_moved.shape[-1]))
            d_sorting = d_sorting + einsum("...ux,...vx->...uv", flat, xp.reshape(x, (*x.shape[:-2], flat.shape[-1])))
            back = product(backend, sorting, flat, earlier, transposed=True)
            found.append(d_own + xp.reshape(back, (*back.shape[:-1], *d_own.shape[-2:])))
        d_scores = balance_backward(steps, where(sorting != 0, d_sorting) * sorting)
        seen = real(scores) != -math.inf
        d_scores = where(seen, d_scores)

    def whole(x: Any) -> Any:
        return xp.reshape(x, (*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1]))

    seen_products = xp.where(d_logits == 0, xp.zeros_like(d_logits), d_logits * products)
    return {
        "q": whole(d_q),
        "k": whole(found[0]),
        "v": whole(found[1]),
        "sort_logits": d_scores / temperature,
        "temperature": -xp.sum(d_scores * where(d_scores != 0, scores)) / temperature,
        "scale": xp.sum(seen_products),
    }


# ------------------------------------------------------------------------------------------------ counts, example


def cost(
    *,
    b: int = 1,
    h: int = 1,
    t: int | None = None,
    q: int | None = None,
    k: int | None = None,
    d: int,
    e: int | None = None,
    block: int,
    iterations: int = 7,
    causal: bool = False,
) -> Counts:
    """Counts: t n (d + e) for the sort and 2 t block (d + e) for attention, forward; twice as many backward.

    t, or q = k, is the length.  The sort is quadratic in the number n = t / block of blocks; sqrt(t / 2) balances both.
    """
    t, e = one_length(t, q, k), d if e is None else e
    require_sizes(b=b, h=h, t=t, d=d, e=e, iterations=iterations)
    if t % require_integer("block", block, minimum=1):
        raise ValueError(f"t is {t} and block {block}: expected a multiple of the block")
    n, units = t // block, b * h
    moves = n * n
    visible_moves = n * (n - 1) // 2 if causal else moves
    pairs = 2 * t * block
    visible = t * (block + 1) // 2 + max(0, t - block) * block if causal else pairs
    once = units * (d + e) * (visible_moves * block + visible)
    computed = units * (d + e) * (moves * block + pairs)
    steps = units * (4 * pairs + 6 * iterations * moves)
    inputs, written = Elements(storage=units * (2 * t * d + t * e + moves)), Elements(storage=units * t * e)
    kept = Elements(compute=units * (2 * t * (d + e) + 2 * pairs + (1 + 2 * iterations) * moves))
    return Counts(
        forward=Pass(
            multiplies=once, computed=computed, elementwise=steps, read=inputs, written=written, peak=written + kept
        ),
        backward=Pass(
            multiplies=2 * once,
            computed=2 * computed,
            elementwise=steps,
            read=inputs + kept + written,
            written=inputs,
            peak=inputs + 2 * kept,
        ),
        saved=inputs + kept,
    )


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    t: int = 12,
    d: int = 4,
    e: int = 3,
    block: int = 3,
    temperature: float = 0.75,
    iterations: int = 4,
    noise: Any = True,
    **settings: Any,
) -> dict[str, Any]:
    """Normal arrays and sort_logits, Gumbel noise (``noise=None``: without); t is cut to a multiple of the block, at least one."""
    n = max(1, t // block)
    t = n * block
    normal = rng.standard_normal
    given: dict[str, Any] = {"q": normal((b, h, t, d)), "k": normal((b, h, t, d)), "v": normal((b, h, t, e))}
    given.update(sort_logits=normal((b, h, n, n)), block=block, temperature=temperature, iterations=iterations)
    if noise is True:
        given["noise"] = rng.gumbel(size=(b, h, n, n))
    elif noise is not None:
        given["noise"] = noise
    return {**given, **settings}


_PROBES = (
    {"t": 24, "block": 4, "iterations": 7, "noise": None, "says": "no noise, seven iterations"},
    {
        "t": 20,
        "block": 4,
        "iterations": 1,
        "scale": 0.3,
        "temperature": 1.5,
        "says": "one iteration, a scale of one's own",
    },
    {"t": 15, "block": 5, "iterations": 0, "noise": None, "says": "no iteration: exp of the scores"},
    {"t": 21, "block": 3, "causal": True, "says": "causal: earlier blocks alone, and the own block up to oneself"},
)

sinkhorn_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="sinkhorn_attention",
    differentiable=("q", "k", "v", "sort_logits", "temperature", "scale"),
    floating=("noise",),
    probes=_PROBES,
)
