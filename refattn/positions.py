"""Positions: tables of them, the relative shift, and rotations.

    sinusoid        [sin(t w_x), cos(t w_x)],  w_x = 10000^(-2x/m)     Vaswani et al. 2017, arXiv:1706.03762, 3.5
    rel_shift       output[i,j] = x[i, j + q - 1 - i]                  Dai et al. 2019, arXiv:1901.02860, app. B
    rotary          (a, c) -> (a cos - c sin, c cos + a sin)           Su et al. 2021, arXiv:2104.09864, 3.2
    alibi_slopes    2^(-8n/h)                                          Press et al. 2021, arXiv:2108.12409, 3
    t5_bucket       exact up to a distance, then logarithmic           Raffel et al. 2020, arXiv:1910.10683, 2.1

Tables are NumPy arrays, computed in float64 on the host; :data:`rotary` and :data:`rel_shift` are differentiable and
work in the library and dtype of their argument.  Axes: q query, k key, m model channel, d head channel, p row of a
relative table, h head.
"""

from typing import Any

import numpy as np

from refattn.arrays import (
    device,
    is_array,
    is_integer,
    is_real_floating,
    namespace,
    require_flag,
    require_integer,
    require_one_of,
    require_positive,
    to_numpy,
)
from refattn.mechanism import function
from refattn.records import Result

__all__ = [
    "alibi_slopes",
    "lightning_decay",
    "rel_shift",
    "relative_distances",
    "retention_decay",
    "rotary",
    "sinusoid",
    "t5_bucket",
]


MOST_BUCKETS = 4096
"""More would take minutes to find their edges in whole numbers; papers have 32."""

# ---------------------------------------------------------------------- tables


def sinusoid(positions: Any, m: int) -> np.ndarray:
    """Sinusoids of positions or distances: the sines of all frequencies first, then the cosines.

    output[..., x] = sin(t w_x) and output[..., m/2 + x] = cos(t w_x), with w_x = 10000^(-2x/m) for x = 0 ... m/2 - 1.

    Parameters
    ----------
    positions : real array, list or number (...)
        Positions or distances t; may be negative or fractional.
    m : int
        Number of channels, even.

    Returns
    -------
    float64 NumPy array (..., m).
    """
    m = require_integer("m", m, minimum=2)
    if m % 2:
        raise ValueError(f"m is {m}: expected an even number of channels, half of them sines")
    angles = _angles(positions, m, 10000.0)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def relative_distances(q: int, k: int, *, causal: bool = True) -> np.ndarray:
    """Distances (query position minus key position) that belong to the rows of a relative table, as an int array (p,).

    With the queries standing on the last q of the k key positions: ``causal`` k - 1 ... 0 (p = k rows), otherwise
    k ... -q + 1 (p = k + q rows).  :data:`rel_shift` brings the row of distance i + k - q - j to place (i, j).

    >>> relative_distances(2, 3)
    array([2, 1, 0])
    >>> relative_distances(2, 3, causal=False)
    array([ 3,  2,  1,  0, -1])
    """
    q, k = require_integer("q", q, minimum=0), require_integer("k", k, minimum=0)
    require_flag("causal", causal)
    return np.arange(k - 1, -1, -1) if causal else np.arange(k, -q, -1)


def alibi_slopes(h: int) -> np.ndarray:
    """Slopes (h,) of attention with linear biases, float64, by the rule of the authors' code for any number of heads.

    For h a power of two, slope n = 2^(-8n/h), n = 1 ... h.  Otherwise the slopes of the next lower power of two p, then
    every second one of those of 2p, beginning with the first, until there are h.

    >>> alibi_slopes(6)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625, 0.5       , 0.125     ])
    """
    h = require_integer("h", h, minimum=1)
    p = 1 << (h.bit_length() - 1)
    slopes = [2.0 ** (-8 * n / p) for n in range(1, p + 1)]
    slopes += [2.0 ** (-4 * n / p) for n in range(1, 2 * (h - p), 2)]
    return np.array(slopes)


def retention_decay(h: int) -> np.ndarray:
    """Log decays of RetNet's heads, ln(1 - 2^(-5 - i)), for ``head_decay``.

    >>> np.exp(retention_decay(2))
    array([0.96875 , 0.984375])
    """
    h = require_integer("h", h, minimum=1)
    return np.log1p(-(2.0 ** (-5.0 - np.arange(h))))


def lightning_decay(h: int, layer: int, layers: int) -> np.ndarray:
    """Log decays of lightning attention's heads in one of the layers, counted from 0, for ``head_decay``.

    Minus 2^(-8 (i + 1) / h) (1 - layer / (layers - 1 + 1e-5) + 1e-5), as MiniMax in the transformers package has them.

    >>> lightning_decay(2, 0, 2).round(4)
    array([-0.0625, -0.0039])
    """
    h = require_integer("h", h, minimum=1)
    layers = require_integer("layers", layers, minimum=1)
    layer = require_integer("layer", layer, minimum=0, maximum=layers - 1)
    return -(2.0 ** (-8.0 * (np.arange(h) + 1) / h)) * (1 - layer / (layers - 1 + 1e-5) + 1e-5)


def t5_bucket(distance: Any, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> np.ndarray:
    """Bucket of each distance: one each for small ones, then ever wider, the last open-ended.

    Parameters
    ----------
    distance : integer array, list or number (...)
        Query position minus key position.
    buckets : int
        Number of buckets; ``bidirectional`` gives the upper half to distances below 0.
    max_distance : int
        Distance from which on everything falls into the last bucket.
    bidirectional : bool
        False: keys after the query (distance below 0) fall into bucket 0.

    Returns
    -------
    int64 NumPy array (...).  With n buckets on a side and e = n // 2, |distance| < e is its own bucket, and beyond it
    is e + floor(ln(|distance| / e) / ln(max_distance / e) * (n - e)), at most n - 1.  The edges are found in whole
    numbers, so no rounding of a logarithm moves one.
    """
    try:
        distance = to_numpy(distance) if is_array(distance) else np.asarray(distance)
    except ValueError:
        raise TypeError(f"distance is {distance!r}: expected integers") from None
    if distance.size and not is_integer(distance.dtype):
        raise TypeError(f"distance has dtype {distance.dtype} and shape {distance.shape}: expected integers")
    sides = 2 if require_flag("bidirectional", bidirectional) else 1
    buckets = require_integer("buckets", buckets, minimum=2 * sides, maximum=MOST_BUCKETS)
    if buckets % sides:
        raise ValueError(f"buckets is {buckets}: expected an even number, half of them for each direction")
    n = buckets // sides
    e = n // 2
    max_distance = require_integer("max_distance", max_distance, minimum=e + 1)
    distance = np.minimum(distance, max_distance).astype(np.int64)  # beyond, all are alike
    distance = np.maximum(distance, -max_distance)
    size = np.abs(distance) if bidirectional else np.maximum(distance, 0)
    edges = [_first_distance(e, max_distance, step, n - e) for step in range(1, n - e)]
    bucket = np.where(size < e, size, e + np.searchsorted(edges, size, side="right"))
    if bidirectional:
        bucket = bucket + np.where(distance < 0, n, 0)
    return bucket.astype(np.int64)


def _first_distance(e: int, end: int, step: int, steps: int) -> int:
    """Smallest whole x with e (end/e)^(step/steps) <= x, that is e^(steps-step) end^step <= x^steps."""
    power = e ** (steps - step) * end**step
    x = round(e * (end / e) ** (step / steps))
    while x**steps >= power:
        x -= 1
    while x**steps < power:
        x += 1
    return x


def _angles(positions: Any, channels: int, base: float) -> np.ndarray:
    """positions[..., None] * base^(-2x/channels), float64."""
    try:
        host = to_numpy(positions) if is_array(positions) else np.asarray(positions)
    except ValueError:
        raise TypeError(f"positions are {positions!r}: expected real numbers, one for each token") from None
    if not (is_integer(host.dtype) or is_real_floating(host.dtype)):
        raise TypeError(f"positions have dtype {host.dtype}: expected real numbers")
    if not np.all(np.isfinite(host)):
        raise ValueError("positions hold NaN or infinity: expected finite numbers")
    frequencies = float(base) ** (-2.0 * np.arange(channels // 2) / channels)
    return host.astype(np.float64)[..., None] * frequencies


# ---------------------------------------------------------------------- relative shift


def _rel_shift_forward(x: Any, *, causal: bool) -> tuple[Result, Any]:
    """Bring scores by table row to scores by key.

    ``causal``: output[i, j] = x[i, j + q - 1 - i], 0 where that row does not exist (p = k rows, see
    :func:`relative_distances`).  Otherwise output[i, j] = x[i, j + q - i] for p = k + q rows, which all exist.  Nothing
    of a neighbouring query shows up beyond the edge.

    Parameters
    ----------
    x : array (..., q, p)

    Returns
    -------
    output : array (..., q, k)
    """
    if x.ndim < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: expected (..., q, p)")
    *lead, q, p = x.shape
    k = p if causal else p - q
    if k < 0:
        raise ValueError(f"x has shape {tuple(x.shape)}: without causal, p = k + q rows are needed, at least {q}")
    xp = namespace(x)
    # In the line of all rows of length n, place (i, j + s - i) stands at i (n - 1) + j + s: rows of n - 1 from s on.
    if causal:
        x = xp.concat([x, xp.zeros((*lead, q, q), dtype=x.dtype, device=device(x))], axis=-1)
    n, start = x.shape[-1], q - 1 if causal else q
    if q == 0:
        return Result(output=xp.zeros((*lead, 0, k), dtype=x.dtype, device=device(x))), (q, p, causal)
    line = xp.reshape(x, (*lead, q * n))[..., start : start + q * (n - 1)]
    return Result(output=xp.reshape(line, (*lead, q, n - 1))[..., :k]), (q, p, causal)


def _rel_shift_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """The same cuts, backwards: what was cut off gets zeros."""
    q, p, causal = saved
    if output is None or q == 0:
        return {}
    xp = namespace(output)
    lead = output.shape[:-2]
    n, start = (p + q, q - 1) if causal else (p, q)

    def zeros(*shape: int) -> Any:
        return xp.zeros((*lead, *shape), dtype=output.dtype, device=device(output))

    rows = xp.concat([output, zeros(q, n - 1 - output.shape[-1])], axis=-1)
    line = xp.concat([zeros(start), xp.reshape(rows, (*lead, q * (n - 1))), zeros(q - start)], axis=-1)
    return {"x": xp.reshape(line, (*lead, q, n))[..., :p]}


# ---------------------------------------------------------------------- rotary


def _rotary_forward(
    x: Any,
    positions: Any = None,
    *,
    base: float = 10000.0,
    layout: str = "half",
    dims: int | None = None,
    cos: Any = None,
    sin: Any = None,
) -> tuple[Result, Any]:
    """Rotate pairs of channels by an angle proportional to the position.

    (a, c) -> (a cos - c sin, c cos + a sin), with the angle t base^(-2n/dims) for pair n of the token at position t.

    Parameters
    ----------
    x : array (..., q, d)
        Queries or keys.
    positions : real array (..., q), optional
        Positions t, which may be fractional and broadcast to the axes of x before the last; default 0 ... q - 1.
    base : float
        Above 0.
    layout : {"half", "interleaved"}
        Pair n is the channels (n, n + dims/2), or (2n, 2n + 1).
    dims : int, optional
        Even; only the first ``dims`` channels are rotated, the others pass through. Default d.
    cos, sin : arrays (..., q, dims/2), optional
        In place of positions and base; differentiable.

    Returns
    -------
    output : array of the shape and dtype of x
        Half precision is rotated in float32; the angles are computed in float64.
    """
    require_one_of("layout", layout, ("half", "interleaved"))
    if x.ndim < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: expected (..., q, d)")
    dims = require_integer("dims", x.shape[-1] if dims is None else dims, minimum=0)
    if dims % 2 or dims > x.shape[-1]:
        raise ValueError(f"dims is {dims} and x has shape {tuple(x.shape)}: expected an even number of its channels")
    xp = namespace(x)
    if (cos is None) != (sin is None):
        raise ValueError(f"{'sin' if sin is None else 'cos'} is missing: cos and sin are given together")
    given = cos is not None
    if given:
        if positions is not None:
            raise ValueError("positions are given together with cos and sin, which take their place")
        for name, table in (("cos", cos), ("sin", sin)):
            if table.ndim < 1 or table.shape[-1] != dims // 2:
                raise ValueError(f"{name} has shape {tuple(table.shape)}: expected (..., q, dims/2 = {dims // 2})")
            _require_leading(name, table.shape[:-1], x)
    else:
        require_positive("base", base)
        angles = _angles(np.arange(x.shape[-2]) if positions is None else positions, dims, base)
        _require_leading("positions", angles.shape[:-1], x)
        cos, sin = (xp.asarray(f(angles), dtype=x.dtype, device=device(x)) for f in (np.cos, np.sin))
    a, c = _split_pairs(xp, x, dims, layout)
    output = _join_pairs(xp, a * cos - c * sin, c * cos + a * sin, x, dims, layout)
    return Result(output=output), (a, c, cos, sin, given, dims, layout)


def _rotary_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    a, c, cos, sin, given, dims, layout = saved
    if output is None:
        return {}
    xp = namespace(output)
    d_a, d_c = _split_pairs(xp, output, dims, layout)
    back = d_a * cos + d_c * sin, d_c * cos - d_a * sin  # rotation by the opposite angle
    gradients = {"x": _join_pairs(xp, *back, output, dims, layout)}
    if given:
        gradients |= {"cos": d_a * a + d_c * c, "sin": d_c * a - d_a * c}
    return gradients


def _split_pairs(xp: Any, x: Any, dims: int, layout: str) -> tuple[Any, Any]:
    """First and second channels of the pairs, each (..., q, dims/2)."""
    if layout == "half":
        return x[..., : dims // 2], x[..., dims // 2 : dims]
    return x[..., 0:dims:2], x[..., 1:dims:2]


def _join_pairs(xp: Any, a: Any, c: Any, x: Any, dims: int, layout: str) -> Any:
    """The inverse of _split_pairs; channels from ``dims`` on are those of x."""
    if layout == "half":
        parts = [a, c]
    else:
        parts = [xp.reshape(xp.stack([a, c], axis=-1), (*a.shape[:-1], dims))]
    if dims < x.shape[-1]:
        parts.append(xp.broadcast_to(x[..., dims:], (*a.shape[:-1], x.shape[-1] - dims)))
    return xp.concat(parts, axis=-1)


def _require_leading(name: str, own: tuple[int, ...], x: Any) -> None:
    """The axes of positions, or those of cos and sin before their last, broadcast with those of x before its last."""
    try:
        np.broadcast_shapes(own, x.shape[:-1])
    except ValueError:
        raise ValueError(
            f"{name} has the axes (..., q) = {tuple(own)}: they do not broadcast with those of x {tuple(x.shape)}"
        ) from None


rel_shift = function(
    _rel_shift_forward, _rel_shift_backward, differentiable=("x",), name="rel_shift", doc=_rel_shift_forward.__doc__
)
rotary = function(
    _rotary_forward, _rotary_backward, differentiable=("x", "cos", "sin"), name="rotary", doc=_rotary_forward.__doc__
)
