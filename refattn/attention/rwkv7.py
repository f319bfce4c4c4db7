r"""RWKV-7 attention: a state that decays, from which one vector reads and to which another writes back what was read.

    c[e]         = sum_d remove_t[d] S_{t-1}[d,e]
    S_t[d,e]     = exp(gamma_t[d]) S_{t-1}[d,e] + replace_t[d] c[e] + k_t[d] v_t[e]
    output[t,e]  = scale * sum_d q_t[d] S_t[d,e]

======  ======================  =============================================================
letter  axis                    where
======  ======================  =============================================================
...     any batch axes          all
h       query head              q; output has max(h, g) heads
g       state (= value) head    v, decays, state; k, remove, replace or a divisor of it
t       token                   all but the state
d       key channel             q, k, remove, replace, channel_decay, state
e       value channel           v, state, output
======  ======================  =============================================================

The state's transition is a diagonal plus a matrix of rank 1 (DPLR): without decays IPLR; with remove = p and replace = -beta k
Comba.  ``remove`` reads the state *before* it decays, unlike the delta rule's erase key, so that ``reset`` is more than a decay
of -inf.  A model's own arrays: r = q, w = exp(-exp(w')), remove = -kk, replace = kk a.

In chunks: (I - tril(pair(remove, replace), -1)) C = read(remove, S) + tril(pair(remove, k), -1) V, with decays up to the row before
in the rows of remove, solved by substitution.

Conventions: gamma is the sum of the decays that are given, natural logs, at most 0.  A token beyond its length is never read:
output 0, state as it was, gradients 0.  ``reset`` empties the state before its token.

Source: Peng et al. 2025, arXiv:2503.14456, section 4.1.
"""

from typing import Any

from refattn.arrays import require_axes
from refattn.contraction import einsum
from refattn.core.decays import solve_unit_lower
from refattn.core.recurrence import Walk, decay_shapes, default_scale, drawn
from refattn.cost.recurrence import recurrence_counts
from refattn.mechanism import mechanism
from refattn.records import Counts, Result

__all__ = ["rwkv7_attention"]


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    remove: Any,
    replace: Any,
    decay: Any = None,
    channel_decay: Any = None,
    head_decay: Any = None,
    scale: Any = 1.0,
    state: Any = None,
    lengths: Any = None,
    reset: Any = None,
    form: str = "chunked",
    chunk: int = 64,
    head_map: str = "repeat",
    backend: Any,
) -> tuple[Result, Any]:
    """Attention through a state whose transition is a diagonal plus a matrix of rank 1.

    Parameters
    ----------
    q : array (..., h, t, d)
        h divides g, or is a multiple of it.
    k : array (..., g, t, d), or with a divisor of g heads
    v : array (..., g, t, e)
    remove, replace : arrays (..., g, t, d)
        What reads the state before it decays, and where that is added.
    decay : array (..., g, t), optional
        Log decay of a token and head.
    channel_decay : array (..., g, t, d), optional
        Log decay of each key channel.
    head_decay : array (g,), optional
        Log decay of a head at every token.  The decays that are given add up.
    scale : float
        Factor of q.  Differentiable.
    state : array (..., g, d, e), optional
        Before the first token; left out: 0.
    lengths : ints per batch, optional
        Tokens beyond are padding.
    reset : bool array (..., t), optional
        The state is 0 before these tokens.
    form : {"chunked", "recurrent", "parallel"}
        Tokens taken at once: ``chunk``, one, or all.  The same numbers up to rounding.
    chunk : int
        Tokens of a chunk; at most 16 are taken at once where channels decay each in its own way.
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
        Shapes or numbers of heads that do not fit, lengths beyond t.

    Examples
    --------
    With replace = -remove = 1 the old value goes, as in the delta rule:

    >>> import numpy as np
    >>> one, v = np.ones((1, 3, 1)), np.array([[[4.0], [2.0], [8.0]]])
    >>> rwkv7_attention(one, one, v, remove=one, replace=-one)[0, :, 0]
    array([4., 2., 8.])
    """
    sizes = require_axes(q=(q, "... h t d"), v=(v, "... g t e"))
    for name, x in (("k", k), ("remove", remove), ("replace", replace)):
        require_axes(sizes, **{name: (x, "... x t d")})
    walk = Walk(
        backend,
        {"q": q, "k": k, "v": v, "remove": remove, "replace": replace},
        sizes,
        decay=decay,
        channel_decay=channel_decay,
        head_decay=head_decay,
        state=state,
        lengths=lengths,
        reset=reset,
        form=form,
        chunk=chunk,
        head_map=head_map,
    )
    scale = default_scale(scale, sizes["d"])
    output, final, kept = walk.forward(chunk_forward(scale))
    return Result(output=output, state=final), (walk, kept, scale)


def backward(saved: Any, *, output: Any, state: Any) -> dict[str, Any]:
    """Cotangents of all arrays, chunk by chunk from the last; a chunk's own steps are computed again."""
    walk, kept, scale = saved
    return walk.backward(chunk_forward(scale), chunk_backward(scale), kept, output, state)


# ------------------------------------------------------------------------------------------------ one chunk


def chunk_forward(scale: Any) -> Any:
    """(I - M) C = read(a, S) + pair(a, k) V with M = pair(a, b);  output = pair(q, k) V + pair(q, b) C + read(q, S)."""

    def rule(rows: Any, state: Any) -> tuple[Any, Any, Any]:
        decays, k, v = rows.decays, rows["k"], rows["v"]
        q, a, b = rows["q"] * scale, rows["remove"], rows["replace"]
        again, fresh = decays.pair(a, b, before=True), decays.pair(a, k, before=True)  # M
        right = decays.read(a, state, before=True) + decays.seen(fresh, v, strict=True)
        c = solve_unit_lower(-again, right, decays)
        to_k, to_b = decays.pair(q, k), decays.pair(q, b)
        output = decays.seen(to_k, v) + decays.seen(to_b, c) + decays.read(q, state)
        return output, decays.write(state, k, v, (b, c)), (q, again, fresh, c, to_k, to_b)

    return rule


def chunk_backward(scale: Any) -> Any:
    """dC = pair(q, b)^T dO + what the state behind sends;  (I - M)^T dR = dC;  dM = tril(dR C^T, -1), and dR V^T for pair(a, k)."""

    def back(chunk: Any, d_output: Any, d_state: Any, pull: Any) -> tuple[dict[str, Any], Any]:
        rows, state, (q, again, fresh, c, to_k, to_b) = chunk
        decays, k, v, a, b = rows.decays, rows["k"], rows["v"], rows["remove"], rows["replace"]
        d_start, d_k, d_v, d_b, d_c = pull.write(d_state, state, k, v, (b, c))
        d_v = d_v + decays.seen_from(to_k, d_output)
        d_c = d_c + decays.seen_from(to_b, d_output)
        d_q, d_start = _plus(pull.read(d_output, q, state), (0, d_start))
        d_q, d_k = _plus((d_q, d_k), pull.pair(decays.hide(_outer(d_output, v)), q, k, to_k))
        d_q, d_b = _plus((d_q, d_b), pull.pair(decays.hide(_outer(d_output, c)), q, b, to_b))
        d_right = solve_unit_lower(-again, d_c, decays, transposed=True)  # dR
        d_v = d_v + decays.seen_from(fresh, d_right, strict=True)
        d_a, d_start = _plus(pull.read(d_right, a, state, before=True), (0, d_start))
        d_again, d_fresh = (decays.hide(_outer(d_right, x), strict=True) for x in (c, v))
        d_a, d_b = _plus((d_a, d_b), pull.pair(d_again, a, b, again, before=True))
        d_a, d_k = _plus((d_a, d_k), pull.pair(d_fresh, a, k, fresh, before=True))
        found = {"q": d_q * scale, "k": d_k, "v": d_v, "remove": d_a, "replace": d_b}
        return {**found, "scale": decays.xp.sum(d_q * rows["q"])}, d_start

    return back


def _outer(left: Any, right: Any) -> Any:
    return einsum("...ie,...je->...ij", left, right)


def _plus(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    return one[0] + other[0], one[1] + other[1]


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
    form: str = "chunked",
    chunk: int = 64,
) -> Counts:
    """Counts of one call.

    A token reads its removal, writes twice and is read with d e multiply-adds each; pairs inside a chunk take 4 (d + e).
    """
    return recurrence_counts(
        b=b, h=h, g=g, t=t, d=d, e=e, channel_decay=channel_decay, form=form, chunk=chunk, erases=2, keys=2
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
    **settings: Any,
) -> dict[str, Any]:
    """Normal q (b,h,t,d), k of min(h, g) heads, v of g; remove is a unit vector and replace minus half of it, as in a model."""
    g = h if g is None else g
    shapes = {"q": (b, h, t, d), "k": (b, min(h, g), t, d), "v": (b, g, t, e), **decay_shapes(b=b, g=g, t=t, d=d, e=e)}
    given = drawn(
        rng, {**shapes, "remove": (b, g, t, d)}, settings, required=("q", "k", "v", "remove"), strength=strength
    )
    unit = given["remove"] / ((given["remove"] ** 2).sum(-1, keepdims=True) + 1e-300) ** 0.5
    return {**given, "remove": unit, "replace": rng.uniform(-0.7, -0.3, unit.shape) * unit}


rwkv7_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="rwkv7_attention",
    differentiable=("q", "k", "v", "remove", "replace", "decay", "channel_decay", "head_decay", "scale", "state"),
    outputs=("output", "state"),
)
