r"""Compressive Transformer attention: a segment attends to compressed old memories, the memory, and itself.

    context = [compressed, memory, x]        oldest first
    q = x w_q        k = context w_k        v = context w_v        per head
    output = softmax(scale ((q + u) k^T + shift((q + w) r^T)), where visible) v w_o

The attention is that of Transformer-XL with a longer memory, part of which stands for several tokens a row.

======  ==================================================  ==========================
letter  axis                                                where
======  ==================================================  ==========================
...     any batch axes, broadcast as in matmul              x, memory, compressed
q       position in the segment                             x, output, lse
k       row of a memory, or of the context                  memory, compressed; r, mask
m       model channel                                       x, memories, projections
h       head                                                projections, r, u, w
d, e    query/key channel, value channel                    w_q, w_k, r; w_v, w_o
======  ==================================================  ==========================

Conventions: causal; memories are constants of the segment (stop-gradient), while w_k and w_v learn through their rows too; a
compressed row counts as one position (``compressed_positions="slot"``): the paper does not say otherwise, and public code
does the same.  Empty memories may be left out.  Compression and its losses: ``refattn.memory``.

Source: Rae et al. 2019, arXiv:1911.05507, section 3 and algorithm 1.
"""

from typing import Any

import numpy as np

from refattn.arrays import broadcast_leading, namespace, require_array, require_axes, require_integer, require_one_of
from refattn.attention import transformer_xl
from refattn.contraction import einsum
from refattn.core import options
from refattn.cost import require_sizes
from refattn.mechanism import mechanism
from refattn.records import Counts, Pass, Result

__all__ = ["compressive_attention"]

POSITIONS = ("slot", "span_end", "span_mid")


@options.takes("scale", "mask", "bias", "keep_weights")
def forward(
    x: Any,
    memory: Any = None,
    compressed: Any = None,
    *,
    w_q: Any,
    w_k: Any,
    w_v: Any,
    w_o: Any = None,
    r: Any = None,
    u: Any = None,
    w: Any = None,
    compressed_positions: str = "slot",
    rate: int | None = None,
    same_length: bool | int = False,
    through_memory: bool = False,
    keep_terms: bool = False,
    backend: Any,
    algorithm: str,
    **shared: Any,
) -> tuple[Result, Any]:
    """Attention of x over [compressed, memory, x], projections included.

    Parameters
    ----------
    x : array (..., q, m)
        The segment.
    memory, compressed : arrays (..., k, m), each with its own number of rows
        Rows of earlier segments and their compressed predecessors, oldest first.
    w_q, w_k, w_v : arrays (m, h, d), (m, h, d), (m, h, e)
    w_o : array (h, e, m)
        Left out: the output stays per head.
    r : array (h, p, d) or (..., h, p, d)
        Projected relative table by falling distance; one row per row of the context, or with ``compressed_positions`` other
        than "slot" one per token that it stands for: rate * compressed + memory + q.
    u, w : arrays (h, d)
        Biases of the query towards keys and towards positions.
    compressed_positions : {"slot", "span_end", "span_mid"}
        Where a compressed row stands: one place as any other row, or the newest or the middle (the later of two) of the
        ``rate`` tokens it was made of.
    rate : int
        Tokens per compressed row; needed for the spans.
    same_length : bool or int
        As for ``transformer_xl_attention``, counted in rows of the context.
    through_memory : bool
        Let gradients into memory and compressed, in place of zero.
    keep_terms : bool
        The Result also holds the four terms of the logits, as for ``transformer_xl_attention``.
    {shared}

    Returns
    -------
    output : array (..., q, m), or (..., h, q, e) without w_o
    lse : array (..., h, q), in the compute dtype

    Raises
    ------
    ValueError
        Shapes that disagree: a memory of another width, a table that does not match the context; a missing rate.
    TypeError
        Dtypes, as for every mechanism.

    Examples
    --------
    One head, one channel, zero queries: the mean over compressed row, memory and token.

    >>> import numpy as np
    >>> one = np.ones((1, 1, 1))
    >>> x, memory, compressed = np.array([[3.0]]), np.array([[2.0]]), np.array([[1.0]])
    >>> compressive_attention(x, memory, compressed, w_q=0 * one, w_k=one, w_v=one, w_o=one)
    array([[2.]])
    """
    xp = namespace(x, w_q)
    named = {n: a for n, a in (("compressed", compressed), ("memory", memory), ("x", x)) if a is not None}
    sizes = {}
    require_array("x", x, axes=2)
    for name, a in named.items():
        require_array(name, a, axes=2)
        if a.shape[-1] != x.shape[-1]:
            raise ValueError(
                f"{name} has shape {tuple(a.shape)}: expected {x.shape[-1]} channels like x {tuple(x.shape)}"
            )
        sizes[name] = a.shape[-2]
    checked = require_axes({"m": x.shape[-1]}, w_q=(w_q, "m h d"), w_k=(w_k, "m h d"), w_v=(w_v, "m h e"))
    if w_o is not None:
        require_axes(checked, w_o=(w_o, "h e m"))
    lead = broadcast_leading(**{n: (a, 2) for n, a in named.items()})
    context = [xp.broadcast_to(a, (*lead, *a.shape[-2:])) for a in named.values()]
    context = context[0] if len(context) == 1 else xp.concat(context, axis=-2)
    places = _places(sizes.get("compressed", 0), sizes.get("memory", 0) + sizes["x"], compressed_positions, rate)
    with backend.quiet():  # rows that nobody sees may be infinite
        q = einsum("...qm,mhd->...hqd", x, w_q)
        k = einsum("...km,mhd->...hkd", context, w_k)
        v = einsum("...km,mhe->...hke", context, w_v)
    heads, inner = transformer_xl.forward(
        q, k, v, r=r, u=u, w=w, key_places=places, same_length=same_length, keep_terms=keep_terms,
        backend=backend, algorithm=algorithm, **shared,
    )  # fmt: skip
    output = heads.output if w_o is None else einsum("...hqe,hem->...qm", heads.output, w_o)
    saved = (x, context, sizes, (w_q, w_k, w_v, w_o), heads.output, inner, through_memory, backend)
    return Result(**{**heads.fields, "output": output}), saved


def _places(n_compressed: int, n_rest: int, compressed_positions: str, rate: int | None) -> np.ndarray | None:
    """Where every row of the context stands; None: one after the other."""
    require_one_of("compressed_positions", compressed_positions, POSITIONS)
    if rate is not None:
        require_integer("rate", rate, minimum=1)
    if compressed_positions == "slot":
        return None
    if rate is None:
        raise ValueError(f"rate is missing: compressed_positions={compressed_positions!r} counts the tokens of a row")
    within = rate - 1 if compressed_positions == "span_end" else rate // 2
    return np.concatenate([np.arange(n_compressed) * rate + within, np.arange(n_rest) + n_compressed * rate])


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """Cotangents of x and every weight, and of the memories where they are wanted; those of the attention in between as
    in ``transformer_xl``."""
    x, context, sizes, (w_q, w_k, w_v, w_o), heads, inner, through_memory, backend = saved
    gradients = {}
    d_heads = output
    if w_o is not None and output is not None:
        d_heads = einsum("...qm,hem->...hqe", output, w_o)
        gradients["w_o"] = einsum("...hqe,...qm->hem", heads, output)
    gradients.update(transformer_xl.backward(inner, output=d_heads, lse=lse))
    d_q, d_k, d_v = (gradients.pop(n) for n in ("q", "k", "v"))
    with backend.quiet():
        gradients["w_q"] = _through_rows("...qm,...hqd->mhd", x, d_q)
        gradients["w_k"] = _through_rows("...km,...hkd->mhd", context, d_k)  # through the rows of the memories too
        gradients["w_v"] = _through_rows("...km,...hke->mhe", context, d_v)
    d_context = einsum("...hkd,mhd->...km", d_k, w_k) + einsum("...hke,mhe->...km", d_v, w_v)
    start = 0
    for name, n in sizes.items():
        part = d_context[..., start : start + n, :]
        start += n
        if name == "x":
            gradients["x"] = part + einsum("...hqd,mhd->...qm", d_q, w_q)
        elif through_memory:
            gradients[name] = part
    return gradients


def _through_rows(spec: str, rows: Any, d: Any) -> Any:
    """The gradient of a projection; a row without a cotangent adds nothing, be it NaN or infinite."""
    xp = namespace(rows)
    if bool(xp.all(xp.isfinite(rows))):
        return einsum(spec, rows, d)
    used = xp.any(d != 0, axis=-1, keepdims=True)  # (..., h, rows, 1)
    rows = xp.expand_dims(rows, axis=-3)
    by_head = xp.where(used, rows, xp.zeros_like(rows))
    first, rest = spec.split(",", 1)
    return einsum(f"...h{first.removeprefix('...')},{rest}", by_head, d)


def cost(
    *,
    b: int = 1,
    h: int = 1,
    q: int,
    k: int,
    n: int = 0,
    m: int,
    d: int,
    e: int | None = None,
    output_projection: bool = True,
    **shared: Any,
) -> Counts:
    """Counts of Transformer-XL attention over n + k + q rows and of the projections; k rows of memory, n compressed."""
    e = d if e is None else e
    require_sizes(b=b, h=h, q=q, k=k, n=n, m=m, d=d, e=e)
    rows = n + k + q
    core = transformer_xl.cost(b=b, h=h, q=q, k=rows, d=d, e=e, **shared)
    products = b * h * m * (q * d + rows * (d + e) + (q * e if output_projection else 0))
    weights = h * m * (2 * d + e + (e if output_projection else 0))
    own = Counts(forward=Pass(multiplies=products), backward=Pass(multiplies=2 * products), parameters=weights)
    return core + own


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    q: int = 4,
    k: int = 5,
    n: int = 3,
    m: int = 6,
    d: int = 4,
    e: int = 5,
    compressed_positions: str = "slot",
    rate: int = 2,
    **settings: Any,
) -> dict[str, Any]:
    """Normal x (b,q,m), memory (b,k,m), compressed (b,n,m), and projections of about unit gain with a matching table."""
    normal = rng.standard_normal
    arrays = {"x": normal((b, q, m)), "memory": normal((b, k, m)), "compressed": normal((b, n, m))}
    gain, gain_o = m**-0.5, (h * e) ** -0.5
    weights = {"w_q": gain * normal((m, h, d)), "w_k": gain * normal((m, h, d)), "w_v": gain * normal((m, h, e))}
    weights["w_o"] = gain_o * normal((h, e, m))
    span = 1 if compressed_positions == "slot" else rate
    own = {"r": normal((h, span * n + k + q, d)), "u": normal((h, d)), "w": normal((h, d))}
    more = {} if compressed_positions == "slot" else {"compressed_positions": compressed_positions, "rate": rate}
    return {**arrays, **weights, **own, **more, **settings}


_PROBES = (
    {"compressed_positions": "span_end", "rate": 3, "says": "a compressed row stands at the end of its span"},
    {"compressed_positions": "span_mid", "rate": 4, "says": "a compressed row stands in the middle of its span"},
    {"q": 2, "k": 9, "n": 1, "says": "a memory longer than segment and compressed rows"},
)

compressive_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="compressive_attention",
    differentiable=("x", "memory", "compressed", "w_q", "w_k", "w_v", "w_o", "r", "u", "w", "bias", "scale"),
    outputs=("output", "lse"),
    probes=_PROBES,
)
