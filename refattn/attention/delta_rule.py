r"""Delta rule attention: before a token writes, what its key reads from the state is taken away.

    A[d,e]       = exp(gamma_t[d]) S_{t-1}[d,e]
    u[e]         = beta_t (v_t[e] - sum_d erase_key_t[d] A[d,e])
    S_t[d,e]     = A[d,e] + k_t[d] u[e]
    output[t,e]  = scale * sum_d q_t[d] S_t[d,e]

======  ======================  =====================================================
letter  axis                    where
======  ======================  =====================================================
...     any batch axes          all
h       query head              q; output has max(h, g) heads
g       state (= value) head    v, beta, decays, state; k, erase_key or a divisor of it
t       token                   q, decays
d       key channel             q, k, erase_key, channel_decay, state
e       value channel           v, state, output
======  ======================  =====================================================

One equation, many names: without decay DeltaNet; with ``decay`` Gated DeltaNet; with ``channel_decay`` Kimi Delta Attention; with
``erase_key`` Gated DeltaNet-2; with ``steps`` DeltaProduct, several writes a token.

In chunks: N U = beta (V - P exp(G) S) with N = I + beta tril(pair(erase_key, k), -1), solved by substitution; U then stands where
gated linear attention has its values.

Conventions: gamma is the sum of the decays that are given, natural logs, at most 0; -inf forgets everything.  A token beyond its
length is never read: output 0, state as it was, gradients 0.  ``reset`` empties the state before its token.

Source: Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464, sections 3.1 to 3.3; Yang et al. 2024, arXiv:2406.06484, section 3.
"""

from typing import Any

from refattn.arrays import device, namespace, real, require_axes, require_integer, require_number, require_one_of
from refattn.contraction import einsum
from refattn.core.decays import hidden, solve_unit_lower
from refattn.core.recurrence import Walk, decay_shapes, default_scale, drawn
from refattn.cost.recurrence import recurrence_counts
from refattn.mechanism import mechanism
from refattn.records import Counts, Result

__all__ = ["delta_rule_attention"]

NORMS = (None, "l2_sum", "l2")


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    beta: Any = None,
    decay: Any = None,
    channel_decay: Any = None,
    head_decay: Any = None,
    erase_key: Any = None,
    qk_norm: str | None = None,
    norm_eps: float = 1e-6,
    steps: int = 1,
    scale: Any = None,
    state: Any = None,
    lengths: Any = None,
    reset: Any = None,
    form: str = "chunked",
    chunk: int = 64,
    head_map: str = "repeat",
    backend: Any,
) -> tuple[Result, Any]:
    """Attention through a state in which a key's old value is replaced by its new one.

    Parameters
    ----------
    q : array (..., h, t, d)
        h divides g, or is a multiple of it.
    k : array (..., g, t * steps, d), or with a divisor of g heads
    v : array (..., g, t * steps, e)
    beta : array (..., g, t * steps), optional
        How much of the old value is replaced; left out: 1.
    decay : array (..., g, t), optional
        Log decay of a token and head.
    channel_decay : array (..., g, t, d), optional
        Log decay of each key channel.
    head_decay : array (g,), optional
        Log decay of a head at every token.  The decays that are given add up.
    erase_key : array (..., g, t * steps, d), optional
        What reads the value that is taken away; left out: the key, normalised as ``qk_norm`` says.  A given one is taken as it is.
    qk_norm : {None, "l2_sum", "l2"}
        Queries and keys of length 1: x / sqrt(sum x^2 + eps), or x / max(|x|, eps).
    norm_eps : float
    steps : int
        Writes of a token; it decays before the first and is read after the last.
    scale : float
        Factor of the (normalised) q, default d**-0.5.  Differentiable.
    state : array (..., g, d, e), optional
        Before the first token; left out: 0.
    lengths : ints per batch, optional
        Tokens beyond are padding.
    reset : bool array (..., t), optional
        The state is 0 before these tokens.
    form : {"chunked", "recurrent", "parallel"}
        Rows taken at once: ``chunk``, one, or all.  The same numbers up to rounding.
    chunk : int
        Rows of a chunk; at most 16 are taken at once where channels decay each in its own way.
    head_map : {"repeat", "tile"}
        Where there are fewer of one kind of head, a state head i uses head i // (g/h) of them, or i % h.

    Returns
    -------
    output : array (..., max(h, g), t, e), in the dtype of the inputs
    state : array (..., g, d, e), in the compute dtype
        Behind the last token.

    Raises
    ------
    ValueError
        Shapes or numbers of heads that do not fit, an unknown norm, lengths beyond t.

    Examples
    --------
    Writing to the same unit key again replaces its value:

    >>> import numpy as np
    >>> one, v = np.ones((1, 3, 1)), np.array([[[4.0], [2.0], [8.0]]])
    >>> delta_rule_attention(one, one, v)[0, :, 0]
    array([4., 2., 8.])
    """
    steps = require_integer("steps", steps, minimum=1)
    sizes = require_axes(q=(q, "... h t d"))
    rows = sizes["t"] * steps
    where = {"n": rows}
    sizes = {**require_axes({**sizes, **where}, v=(v, "... g n e")), "t": rows}
    require_axes(sizes, k=(k, "... x n d"), **({} if beta is None else {"beta": (beta, "... g n")}))
    if erase_key is not None:
        require_axes(sizes, erase_key=(erase_key, "... x n d"))
    require_one_of("qk_norm", qk_norm, NORMS)
    norm_eps = require_number("norm_eps", norm_eps, minimum=0)
    given = {"decay": decay, "channel_decay": channel_decay}
    if steps > 1:
        for name, x, axes in (("decay", decay, "... g m"), ("channel_decay", channel_decay, "... g m d")):
            if x is not None:
                require_axes({**sizes, "m": rows // steps}, **{name: (x, axes)})
                given[name] = _spread(x, steps, 0, axis=-2 if name == "channel_decay" else -1)
        q = _spread(q, steps, steps - 1, axis=-2)
    xp = namespace(q, k, v)
    walk = Walk(
        backend,
        {
            "q": q,
            "k": k,
            "v": v,
            "beta": None if beta is None else xp.expand_dims(beta, axis=-1),
            "erase_key": erase_key,
        },
        sizes,
        **given,
        head_decay=head_decay,
        state=state,
        lengths=lengths,
        reset=reset,
        form=form,
        chunk=chunk,
        head_map=head_map,
        steps=steps,
    )
    scale = default_scale(scale, sizes["d"])
    norm = (qk_norm, norm_eps)
    output, final, kept = walk.forward(chunk_forward(scale, norm))
    return Result(output=_taken(output, steps, steps - 1, axis=-2), state=final), (walk, kept, scale, norm, steps)


def backward(saved: Any, *, output: Any, state: Any) -> dict[str, Any]:
    """Cotangents of all arrays, chunk by chunk from the last; a chunk's own steps are computed again."""
    walk, kept, scale, norm, steps = saved
    if output is not None:
        output = _spread(output, steps, steps - 1, axis=-2)
    found = walk.backward(chunk_forward(scale, norm), chunk_backward(scale, norm), kept, output, state)
    if "beta" in found:
        found["beta"] = found["beta"][..., 0]
    found["q"] = _taken(found["q"], steps, steps - 1, axis=-2)
    for name, axis in (("decay", -1), ("channel_decay", -2)):
        if name in found:
            found[name] = _taken(found[name], steps, 0, axis=axis)
    return found


# ------------------------------------------------------------------------------------------------ one chunk


def chunk_forward(scale: Any, norm: tuple[str | None, float]) -> Any:
    """N U = beta E with E = v - read(p, S);  output = A U + read(q, S);  S' = write(S, k, U)."""

    def rule(rows: Any, state: Any) -> tuple[Any, Any, Any]:
        decays = rows.decays
        q, k = normalized(rows["q"], norm) * scale, normalized(rows["k"], norm)
        p, beta = rows.get("erase_key", k), rows.get("beta")
        erased = decays.pair(p, k, strict=True)  # M
        rest = rows["v"] - decays.read(p, state)  # E
        if beta is None:
            u = solve_unit_lower(erased, rest, decays)
        else:
            u = solve_unit_lower(beta * erased, beta * rest, decays)
        pairs = decays.pair(q, k)
        output = decays.seen(pairs, u) + decays.read(q, state)
        return output, decays.write(state, k, u), (q, k, p, erased, rest, u, pairs)

    return rule


def chunk_backward(scale: Any, norm: tuple[str | None, float]) -> Any:
    """dU = A^T dO + what the state behind sends;  N^T dR = dU;  dE = beta dR;  dN = -tril(dR U^T, -1);  dM = beta dN."""

    def back(chunk: Any, d_output: Any, d_state: Any, pull: Any) -> tuple[dict[str, Any], Any]:
        rows, state, (q, k, p, erased, rest, u, pairs) = chunk
        decays, beta, xp = rows.decays, rows.get("beta"), chunk.rows.decays.xp
        d_start, d_k, d_u = pull.write(d_state, state, k, u)
        d_u = d_u + decays.seen_from(pairs, d_output)
        d_pairs = decays.hide(einsum("...ie,...je->...ij", d_output, u))  # dA
        d_q, more = pull.pair(d_pairs, q, k, pairs)
        d_k = d_k + more
        read_q, more = pull.read(d_output, q, state)
        d_q, d_start = d_q + read_q, d_start + more
        d_right = solve_unit_lower(erased if beta is None else beta * erased, d_u, decays, transposed=True)  # dR
        d_lower = -decays.hide(einsum("...ie,...je->...ij", d_right, u), strict=True)  # dN
        found: dict[str, Any] = {}
        if beta is not None:
            found["beta"] = xp.sum(d_right * rest, axis=-1, keepdims=True) + xp.sum(
                d_lower * erased, axis=-1, keepdims=True
            )
            d_right, d_lower = beta * d_right, beta * d_lower
        found["v"] = d_right  # dE
        d_p, more = pull.read(-d_right, p, state)
        d_start = d_start + more
        pair_p, more = pull.pair(d_lower, p, k, erased, strict=True)
        d_k, d_p = d_k + more, d_p + pair_p
        if "erase_key" in rows:
            found["erase_key"] = d_p
        else:
            d_k = d_k + d_p
        found["scale"] = xp.sum(d_q * normalized(rows["q"], norm))
        found["q"] = normalized_backward(rows["q"], norm, d_q * scale)
        found["k"] = normalized_backward(rows["k"], norm, d_k)
        return found, d_start

    return back


def normalized(x: Any, norm: tuple[str | None, float]) -> Any:
    """x / sqrt(sum x^2 + eps), or x / max(|x|, eps)."""
    return x if norm[0] is None else x * _reciprocal(x, norm)[0]


def _reciprocal(x: Any, norm: tuple[str | None, float]) -> tuple[Any, Any]:
    """1 over the length of each row (one over eps where it is shorter), and bool: it follows x."""
    kind, eps = norm
    xp = namespace(x)
    squares = xp.sum(x * x, axis=-1, keepdims=True)
    if kind == "l2_sum":
        squares = squares + eps
        follows = real(squares) > 0
        return hidden(follows, 1 / xp.sqrt(xp.where(follows, squares, xp.ones_like(squares)))), follows
    follows = real(squares) > eps * eps
    length = xp.sqrt(xp.where(follows, squares, xp.ones_like(squares)))
    short = xp.asarray(1 / eps if eps else 0.0, dtype=x.dtype, device=device(x))
    return xp.where(follows, 1 / length, short), follows


def normalized_backward(x: Any, norm: tuple[str | None, float], d_y: Any) -> Any:
    """dx = r (dy - y (y . dy)), r = 1 / length; a row shorter than eps is only scaled."""
    if norm[0] is None:
        return d_y
    factor, follows = _reciprocal(x, norm)
    y, xp = x * factor, namespace(x)
    along = hidden(follows, y * xp.sum(y * d_y, axis=-1, keepdims=True))
    return factor * (d_y - along)


# ------------------------------------------------------------------------------------------------ several writes a token


def _spread(x: Any, steps: int, place: int, *, axis: int) -> Any:
    """Rows of tokens among the rows of their writes: at ``place`` of each ``steps``, 0 elsewhere."""
    if steps == 1:
        return x
    xp = namespace(x)
    none = xp.zeros_like(x)
    parts = xp.stack([x if n == place else none for n in range(steps)], axis=x.ndim + axis + 1)
    at = x.ndim + axis
    return xp.reshape(parts, (*x.shape[:at], steps * x.shape[at], *x.shape[at + 1 :]))


def _taken(x: Any, steps: int, place: int, *, axis: int) -> Any:
    """Every token's row of :func:`_spread`."""
    if steps == 1:
        return x
    rows = slice(place, None, steps)
    return x[..., rows] if axis == -1 else x[..., rows, :]


# ------------------------------------------------------------------------------------------------ counts, example


def cost(
    *,
    b: int = 1,
    h: int = 1,
    g: int | None = None,
    t: int,
    d: int,
    e: int | None = None,
    channel_decay: Any = None,
    steps: int = 1,
    form: str = "chunked",
    chunk: int = 64,
) -> Counts:
    """Counts of one call.

    A row erases, writes and is read with d e multiply-adds each; pairs inside a chunk take 2 d + e, and e more for the solve.
    """
    return recurrence_counts(
        b=b, h=h, g=g, t=t * steps, d=d, e=e, channel_decay=channel_decay, form=form, chunk=chunk, erases=1, gates=2
    )


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
    steps: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Normal q (b,h,t,d), k of min(h, g) heads, v of g; ``beta=True`` and others draw those options too.

    Without ``qk_norm`` keys are of length 1, so that a write does not grow what it replaces.
    """
    g, n = h if g is None else g, t * steps
    shapes = {
        "q": (b, h, t, d),
        "k": (b, min(h, g), n, d),
        "v": (b, g, n, e),
        "beta": (b, g, n),
        "erase_key": (b, g, n, d),
    }
    if steps != 1:
        settings["steps"] = steps
    given = drawn(
        rng, {**shapes, **decay_shapes(b=b, g=g, t=t, d=d, e=e)}, settings, required=("q", "k", "v"), strength=strength
    )
    if given.get("qk_norm") is None:
        given["k"] = normalized(given["k"], ("l2", 1e-300))
    return given


delta_rule_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="delta_rule_attention",
    differentiable=("q", "k", "v", "beta", "decay", "channel_decay", "head_decay", "erase_key", "scale", "state"),
    outputs=("output", "state"),
)
