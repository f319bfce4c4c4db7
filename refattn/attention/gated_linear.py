r"""Gated linear attention: keys and values are added to a state that decays, and queries read it.

    S_t[d,e]     = exp(gamma_t[d]) S_{t-1}[d,e] + k_t[d] v_t[e]
    output[t,e]  = scale * sum_d q_t[d] S_t[d,e]
    read before:   scale * sum_d q_t[d] (S_{t-1}[d,e] + bonus[d] k_t[d] v_t[e])

======  ======================  =============================================
letter  axis                    where
======  ======================  =============================================
...     any batch axes          all
h       query head              q; output has max(h, g) heads
g       state (= value) head    v, decays, bonus, state; k, or a divisor of it
t       token                   all but the state
d       key channel             q, k, channel_decay, bonus, state
e       value channel           v, state, output
======  ======================  =============================================

One equation, many names: without decay linear attention without its normaliser; with ``head_decay`` RetNet and lightning
attention; with ``decay`` simple GLA and the heart of Mamba-2; with ``channel_decay`` GLA and HGRN-2 (k = 1 - exp(gamma)); with
``read="before"`` and a bonus RWKV-6.

Conventions: gamma is the sum of the decays that are given, natural logs, at most 0; -inf forgets everything.  A token beyond its
length is never read: output 0, state as it was, gradients 0.  ``reset`` empties the state before its token.

Source: Yang, Wang, Shen, Panda, Kim 2023, arXiv:2312.06635, sections 3 and 4.
"""

from typing import Any

from refattn.arrays import require_axes, require_one_of
from refattn.contraction import einsum
from refattn.core.decays import fold
from refattn.core.recurrence import Walk, decay_shapes, default_scale, drawn
from refattn.cost.recurrence import recurrence_counts
from refattn.mechanism import mechanism
from refattn.records import Counts, Result

__all__ = ["gated_linear_attention"]

READS = ("after", "before")


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    channel_decay: Any = None,
    head_decay: Any = None,
    bonus: Any = None,
    read: str = "after",
    scale: Any = None,
    state: Any = None,
    lengths: Any = None,
    reset: Any = None,
    form: str = "chunked",
    chunk: int = 64,
    head_map: str = "repeat",
    backend: Any,
) -> tuple[Result, Any]:
    """Attention through a state that decays.

    Parameters
    ----------
    q : array (..., h, t, d)
        h divides g, or is a multiple of it.
    k : array (..., g, t, d), or with a divisor of g heads
    v : array (..., g, t, e)
    decay : array (..., g, t), optional
        Log decay of a token and head.
    channel_decay : array (..., g, t, d), optional
        Log decay of each key channel.
    head_decay : array (g,), optional
        Log decay of a head at every token.  The decays that are given add up.
    bonus : array (g, d), optional
        Weight of the token's own key, with ``read="before"``.
    read : {"after", "before"}
        Whether a query reads the state that its own token has written to, or the one before it, which has not decayed yet.
    scale : float
        Factor of q, default d**-0.5.  Differentiable.
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
        Shapes or numbers of heads that do not fit, a bonus without ``read="before"``, lengths beyond t.

    Examples
    --------
    Half of everything is forgotten with each token:

    >>> import numpy as np
    >>> one, v = np.ones((1, 3, 1)), np.array([[[4.0], [2.0], [8.0]]])
    >>> result = gated_linear_attention.forward(one, one, v, head_decay=np.log([0.5]))
    >>> result.output[0, :, 0].round(12), result.state.round(12).item()
    (array([ 4.,  4., 10.]), 10.0)
    """
    sizes = require_axes(q=(q, "... h t d"), v=(v, "... g t e"))
    require_axes(sizes, k=(k, "... x t d"))
    require_one_of("read", read, READS)
    if bonus is not None:
        require_axes(sizes, bonus=(bonus, "g d"))
        if read != "before":
            raise ValueError('bonus is given: expected read="before"; a state read afterwards holds the token itself')
    walk = Walk(
        backend,
        {"q": q, "k": k, "v": v},
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
    equations = {"scale": default_scale(scale, sizes["d"]), "read": read, "bonus": bonus}
    output, final, kept = walk.forward(chunk_forward(**equations))
    return Result(output=output, state=final), (walk, kept, equations)


def backward(saved: Any, *, output: Any, state: Any) -> dict[str, Any]:
    """Cotangents of all arrays, chunk by chunk from the last; a chunk's own steps are computed again."""
    walk, kept, equations = saved
    return walk.backward(chunk_forward(**equations), chunk_backward(**equations), kept, output, state)


# ------------------------------------------------------------------------------------------------ one chunk


def chunk_forward(scale: Any, read: str, bonus: Any) -> Any:
    """With A the pairs of q and k: output = A v + read(q, S);  S' = write(S, k, v)."""
    before = read == "before"

    def rule(rows: Any, state: Any) -> tuple[Any, Any, Any]:
        decays, k, v = rows.decays, rows["k"], rows["v"]
        q = rows["q"] * scale
        pairs = decays.pair(q, k, before=before)
        output = decays.seen(pairs, v, strict=before) + decays.read(q, state, before=before)
        if bonus is not None:
            output = output + einsum("...td,...td->...t", q, own_weight(bonus) * k)[..., None] * v
        return output, decays.write(state, k, v), (q, pairs)

    return rule


def chunk_backward(scale: Any, read: str, bonus: Any) -> Any:
    """dA = dO v^T of visible pairs;  dv = A^T dO + what the state behind the chunk sends;  dq, dk through A, read and write."""
    before = read == "before"

    def back(chunk: Any, d_output: Any, d_state: Any, pull: Any) -> tuple[dict[str, Any], Any]:
        rows, state, (q, pairs) = chunk
        decays, k, v = rows.decays, rows["k"], rows["v"]
        d_start, d_k, d_v = pull.write(d_state, state, k, v)
        d_v = d_v + decays.seen_from(pairs, d_output, strict=before)
        d_pairs = decays.hide(einsum("...ie,...je->...ij", d_output, v), strict=before)  # dA
        d_q, more = pull.pair(d_pairs, q, k, pairs, before=before)
        d_k = d_k + more
        read_q, more = pull.read(d_output, q, state, before=before)
        d_q, d_start = d_q + read_q, d_start + more
        found: dict[str, Any] = {}
        if bonus is not None:
            u, xp = own_weight(bonus), decays.xp
            shared = einsum("...te,...te->...t", d_output, v)[..., None]  # d(q . bonus k)
            d_q = d_q + u * k * shared
            d_k = d_k + fold(u * q * shared)
            d_v = d_v + fold(d_output * xp.sum(q * u * k, axis=-1, keepdims=True))
            found["bonus"] = einsum("...grtd->gd", xp.broadcast_to(q * k * shared, shared.shape[:-1] + q.shape[-1:]))
        found |= {"q": d_q * scale, "k": d_k, "v": d_v, "scale": decays.xp.sum(d_q * rows["q"])}
        return found, d_start

    return back


def own_weight(bonus: Any) -> Any:
    """bonus (g, d) beside rows (..., g, r, t, d)."""
    return bonus[:, None, None, :]


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

    A token writes to its state and a query reads it with d e multiply-adds each; pairs inside a chunk take d + e.  Backward: the
    forward of every chunk again, 3 d + 2 e a pair, 5 d e a token.
    """
    return recurrence_counts(b=b, h=h, g=g, t=t, d=d, e=e, channel_decay=channel_decay, form=form, chunk=chunk)


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
    """Normal q (b,h,t,d), k of min(h, g) heads, v of g; ``decay=True`` and others draw those options too."""
    g = h if g is None else g
    given = {"q": (b, h, t, d), "k": (b, min(h, g), t, d), "v": (b, g, t, e), **decay_shapes(b=b, g=g, t=t, d=d, e=e)}
    return drawn(rng, {**given, "bonus": (g, d)}, settings, required=("q", "k", "v"), strength=strength)


gated_linear_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="gated_linear_attention",
    differentiable=("q", "k", "v", "decay", "channel_decay", "head_decay", "bonus", "scale", "state"),
    outputs=("output", "state"),
)
