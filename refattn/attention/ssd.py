r"""State-space duality (Mamba-2): a selective state space as attention through a state that decays.

    step[t]      = clip(softplus(dt[t] + dt_bias), dt_limit)
    S_t[d,e]     = exp(step[t] a) S_{t-1}[d,e] + step[t] b_t[d] x_t[e]
    output[t,e]  = sum_d c_t[d] S_t[d,e] + skip[e] x_t[e]

======  ===============  =======================================
letter  axis             where
======  ===============  =======================================
...     any batch axes   all
h       head             x, dt, a, skip, dt_bias, state, output
g       group of heads   b, c: head h reads group h // (h/g)
t       token            x, dt, b, c, output
d       state channel    b, c, state
e       head channel     x, skip, state, output
======  ===============  =======================================

It is gated linear attention with q = c, k = b, v = step x, the decay step a and the scale 1, so that a step acts twice: on what is
forgotten and on what is written.

Conventions: a is at most 0 (a model has -exp(a_log)).  A token beyond its length is never read, its step is 0 whatever the bias:
output 0, state as it was, gradients 0.  At a limit of dt and beyond it the gradient is 0.

Source: Dao, Gu 2024, arXiv:2405.21060, sections 3 and 6.
"""

import math
from typing import Any

from refattn.arrays import namespace, real, require_axes, require_number
from refattn.attention.gated_linear import chunk_backward as linear_backward
from refattn.attention.gated_linear import chunk_forward as linear_forward
from refattn.contraction import einsum
from refattn.core.decays import Decays, hidden
from refattn.core.recurrence import Rows, Walk, drawn
from refattn.cost.recurrence import recurrence_counts
from refattn.mechanism import mechanism
from refattn.records import Counts, Result

__all__ = ["ssd_attention"]

EQUATIONS: dict[str, Any] = {"scale": 1.0, "read": "after", "bonus": None}


def forward(
    x: Any,
    dt: Any,
    a: Any,
    b: Any,
    c: Any,
    *,
    skip: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    dt_limit: Any = (0.0, math.inf),
    state: Any = None,
    lengths: Any = None,
    form: str = "chunked",
    chunk: int = 64,
    backend: Any,
) -> tuple[Result, Any]:
    """A selective state space with one decay a head.

    Parameters
    ----------
    x : array (..., h, t, e)
    dt : array (..., h, t)
        Steps, or what they are computed from.
    a : array (h,)
        At most 0.
    b, c : arrays (..., g, t, d)
        What writes x to the state, and what reads it; g divides h.
    skip : array (h,) or (h, e), optional
        Weight of x in the output.
    dt_bias : array (h,), optional
        Added to dt.
    dt_softplus : bool
        The step is softplus(dt + dt_bias) in place of dt + dt_bias.
    dt_limit : pair of floats
        The step is clipped to it, after the softplus.
    state : array (..., h, d, e), optional
        Before the first token; left out: 0.
    lengths : ints per batch, optional
        Tokens beyond are padding.
    form : {"chunked", "recurrent", "parallel"}
        Tokens taken at once: ``chunk``, one, or all.  The same numbers up to rounding.
    chunk : int
        Tokens of a chunk.

    Returns
    -------
    output : array (..., h, t, e), in the dtype of the inputs
    state : array (..., h, d, e), in the compute dtype
        Behind the last token.

    Raises
    ------
    ValueError
        Shapes or groups that do not fit, limits that are no pair of numbers, lengths beyond t.

    Examples
    --------
    With steps of 1 and a = log 0.5 half of everything is forgotten with each token:

    >>> import numpy as np
    >>> one, x = np.ones((1, 3, 1)), np.array([[[4.0], [2.0], [8.0]]])
    >>> ssd_attention(x, np.ones((1, 3)), np.log([0.5]), one, one)[0, :, 0].round(12)
    array([ 4.,  4., 10.])
    """
    sizes = require_axes(x=(x, "... h t e"), dt=(dt, "... h t"), a=(a, "h"))
    sizes = require_axes(sizes, b=(b, "... g t d"), c=(c, "... g t d"))
    if dt_bias is not None:
        require_axes(sizes, dt_bias=(dt_bias, "h"))
    if skip is not None:
        require_axes(sizes, skip=(skip, "h" if getattr(skip, "ndim", 0) == 1 else "h e"))
    if sizes["g"] != sizes["h"] and (not sizes["g"] or sizes["h"] % sizes["g"]):
        raise ValueError(f"b has {sizes['g']} groups: expected a divisor of the {sizes['h']} heads of x")
    limit = _limits(dt_limit)
    xp = namespace(x, dt)
    if state is not None:
        require_axes({**sizes}, state=(state, "... h d e"))
    walk = Walk(
        backend,
        {"c": c, "b": b, "x": x, "dt": xp.expand_dims(dt, axis=-1)},
        {**sizes, "g": sizes["h"]},
        state=state,
        lengths=lengths,
        form=form,
        chunk=chunk,
        decays_of_rule=True,
    )
    wide = lambda y: None if y is None else y[:, None, None, None] if y.ndim == 1 else y[:, None, None, :]  # noqa: E731
    parameters: dict[str, Any] = {
        "a": wide(a),
        "skip": wide(skip),
        "dt_bias": wide(dt_bias),
        "softplus": dt_softplus,
        "limit": limit,
    }
    output, final, kept = walk.forward(chunk_forward(**parameters))
    return Result(output=output, state=final), (walk, kept, parameters, skip)


def backward(saved: Any, *, output: Any, state: Any) -> dict[str, Any]:
    """Cotangents of all arrays, chunk by chunk from the last; a chunk's own steps are computed again."""
    walk, kept, parameters, skip = saved
    found = walk.backward(chunk_forward(**parameters), chunk_backward(**parameters), kept, output, state)
    found["dt"] = found["dt"][..., 0]
    for name in ("a", "dt_bias", "skip"):
        if name in found:
            found[name] = einsum("...hrtn->hn", found[name])
            found[name] = found[name][:, 0] if name != "skip" or skip.ndim == 1 else found[name]
    return found


# ------------------------------------------------------------------------------------------------ one chunk


def chunk_forward(*, a: Any, skip: Any, dt_bias: Any, softplus: bool, limit: tuple[float, float]) -> Any:
    """Gated linear attention with v = step x and the decay step a, and skip x."""
    linear = linear_forward(**EQUATIONS)

    def rule(rows: Any, state: Any) -> tuple[Any, Any, Any]:
        step, slope = _steps(rows["dt"], dt_bias, softplus, limit)
        if rows.keep is not None:
            step, slope = hidden(rows.keep, step), hidden(rows.keep, slope)
        rows.decays = Decays(rows.decays.backend, step * a)
        inner = _linear_rows(rows, step)
        output, after, record = linear(inner, state)
        if skip is not None:
            output = output + skip * rows["x"]
        return output, after, (inner, record, step, slope)

    return rule


def chunk_backward(*, a: Any, skip: Any, dt_bias: Any, softplus: bool, limit: tuple[float, float]) -> Any:
    """dx = step dv + skip dO;  dstep = sum_e dv x + a dgamma: the step has two paths;  da = sum_t step dgamma."""
    linear = linear_backward(**EQUATIONS)

    def back(chunk: Any, d_output: Any, d_state: Any, pull: Any) -> tuple[dict[str, Any], Any]:
        rows, state, (inner, record, step, slope) = chunk
        xp = rows.decays.xp
        d_rows, d_start = linear((inner, state, record), d_output, d_state, pull)
        d_v, d_gamma = d_rows["v"], pull.gamma()
        d_step = slope * (xp.sum(d_v * rows["x"], axis=-1, keepdims=True) + a * d_gamma)
        d_x = step * d_v
        found = {"c": d_rows["q"], "b": d_rows["k"], "dt": d_step, "a": _rows_summed(step * d_gamma)}
        if skip is not None:
            d_x = d_x + skip * d_output
            own = d_output * rows["x"]
            found["skip"] = _rows_summed(own if skip.shape[-1] != 1 else xp.sum(own, axis=-1, keepdims=True))
        if dt_bias is not None:
            found["dt_bias"] = _rows_summed(d_step)
        return {**found, "x": d_x}, d_start

    return back


def _linear_rows(rows: Any, step: Any) -> Any:
    inner = Rows(q=rows["c"], k=rows["b"], v=step * rows["x"])
    inner.decays, inner.keep = rows.decays, rows.keep
    return inner


def _rows_summed(x: Any) -> Any:
    return namespace(x).sum(x, axis=-2, keepdims=True)


def _steps(dt: Any, dt_bias: Any, softplus: bool, limit: tuple[float, float]) -> tuple[Any, Any]:
    """The steps and their derivatives by dt: sigma(z) of softplus(z), 0 at a limit and beyond."""
    xp = namespace(dt)
    z = dt if dt_bias is None else dt + dt_bias
    step, slope = z, xp.ones_like(z)
    if softplus:
        above = real(z) > 0
        e = xp.exp(xp.where(above, -z, z))  # at most 1
        step = xp.where(above, z, xp.zeros_like(z)) + xp.log1p(e)
        slope = xp.where(above, xp.ones_like(e), e) / (1 + e)
    low, high = limit
    inside = (real(step) > low) & (real(step) < high)
    ends = xp.where(real(step) <= low, xp.asarray(low, dtype=z.dtype), xp.asarray(min(high, 1e300), dtype=z.dtype))
    return xp.where(inside, step, ends), xp.where(inside, slope, xp.zeros_like(slope))


def _limits(value: Any) -> tuple[float, float]:
    """Two numbers, the second one possibly infinite."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"dt_limit is {value!r}: expected a pair (lowest, highest)")
    low, high = value
    low = require_number("dt_limit", low, minimum=0)
    infinite = isinstance(high, float) and high == math.inf
    return low, math.inf if infinite else require_number("dt_limit", high, minimum=low)


# ------------------------------------------------------------------------------------------------ counts, example


def cost(
    *,
    b: int = 1,
    h: int = 1,
    g: int | None = None,
    t: int,
    d: int,
    e: int | None = None,
    form: str = "chunked",
    chunk: int = 64,
) -> Counts:
    """Counts of one call: those of gated linear attention with h states."""
    return recurrence_counts(b=b, h=h, g=h, t=t, d=d, e=e, channel_decay=None, form=form, chunk=chunk)


def example(
    rng: Any,
    *,
    b: int = 2,
    h: int = 2,
    g: int | None = None,
    t: int = 7,
    d: int = 3,
    e: int = 4,
    strength: float = 1.0,
    **settings: Any,
) -> dict[str, Any]:
    """Normal x (b,h,t,e), b and c of g groups, steps between 0.1 and 1, a about -``strength``.

    ``skip=True`` and others draw those options too.
    """
    g = h if g is None else g
    groups = (b, g, t, d)
    shapes = {"x": (b, h, t, e), "b": groups, "c": groups, "skip": (h,), "dt_bias": (h,), "state": (b, h, d, e)}
    given = drawn(rng, shapes, settings, required=("x", "b", "c"))
    steps = rng.uniform(0.1, 1.0, (b, h, t))
    return {**given, "dt": steps, "a": -strength * rng.uniform(0.2, 2.0, h)}


ssd_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="ssd_attention",
    differentiable=("x", "dt", "a", "b", "c", "skip", "dt_bias", "state"),
    outputs=("output", "state"),
    primary=("x", "b", "c"),
)
