r"""Multi-head attention: heads are projections of the tokens, attend each for itself, and are projected back and added.

    q[h,q,d] = sum_m x_q[q,m] w_q[m,h,d] + b_q[h,d]         likewise k[g,k,d] of x_k, v[g,k,e] of x_v
    o[h,q,e] = softmax attention of q, k, v                 with every shared option
    output[q,m] = sum_he o[h,q,e] w_o[h,e,m] + b_o[m]

======  =============================================  =========================
letter  axis                                           where
======  =============================================  =========================
...     any batch axes, broadcast as in matmul         x_q, x_k, x_v, output, lse
h       query head                                     w_q, w_o, lse
g       key head, h a multiple of g                    w_k, w_v
q, k    query position, key position                   x_q, output; x_k, x_v
d, e    query/key channel, value channel               w_q, w_k; w_v, w_o
m       model channel; m1, m2 those of x_k, x_v        x_q, output; x_k, x_v
======  =============================================  =========================

Conventions: x_k left out is x_q, x_v left out is x_k, and a gradient covers every role of its array.  ``extra_key`` and a key
of zeros (``zero_attention``) stand behind the k keys, in that order.  Nothing that speaks of positions touches them: mask,
pattern, causal, window, lengths, segments, bias, ALiBi and score_mod are about the k keys; a soft cap acts on all logits; lse
and weights include them.  Rows beyond ``query_lengths`` give output 0; a row that sees nothing gives b_o.

Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2.  Extra and zero keys: as in PyTorch's ``nn.MultiheadAttention``.
"""

import dataclasses
from typing import Any

import numpy as np

from refattn import cost as costs
from refattn.arrays import broadcast_leading, device, namespace, require_axes, sum_to_shape, to_namespace
from refattn.contraction import einsum
from refattn.core import options
from refattn.core.problem import prepare
from refattn.mechanism import mechanism
from refattn.records import Counts, Result

__all__ = ["multi_head_attention"]


@options.takes()
def forward(
    x_q: Any,
    x_k: Any = None,
    x_v: Any = None,
    *,
    w_q: Any,
    w_k: Any,
    w_v: Any,
    w_o: Any,
    b_q: Any = None,
    b_k: Any = None,
    b_v: Any = None,
    b_o: Any = None,
    extra_key: Any = None,
    extra_value: Any = None,
    zero_attention: bool = False,
    backend: Any,
    algorithm: str,
    **shared: Any,
) -> tuple[Result, Any]:
    """sum over heads of softmax(scale (x_q w_q) (x_k w_k)^T) (x_v w_v) w_o.

    Parameters
    ----------
    x_q : array (..., q, m)
    x_k : array (..., k, m1)
        Left out: x_q.
    x_v : array (..., k, m2)
        Left out: x_k.
    w_q, w_k, w_v : arrays (m, h, d), (m1, g, d), (m2, g, e)
    w_o : array (h, e, m)
    b_q, b_k, b_v, b_o : arrays (h, d), (g, d), (g, e), (m,)
        Added after the projections.
    extra_key, extra_value : arrays (g, d), (g, e)
        One more key and value behind the others, seen by every row.
    zero_attention : bool
        A key and a value of zeros behind these.
    {shared}

    Returns
    -------
    output : array (..., q, m), in the dtype of the inputs
    lse : array (..., h, q), in the compute dtype

    Raises
    ------
    ValueError
        Shapes that disagree, heads that do not divide, a missing ``align``.
    TypeError
        Dtypes; ``extra_key`` without ``extra_value``.

    Notes
    -----
    ``dropout_mask`` covers the k keys, and drops no others; with k + 1 or k + 2 columns it covers the extra keys too.
    ``weights`` and ``logits`` (``keep_weights``) have k + 1 or k + 2 columns where there are extra keys.

    Examples
    --------
    One head that copies, and the key of zeros, which takes a third of the weight:

    >>> import numpy as np
    >>> x, copy = np.array([[0.0, 3.0], [0.0, 6.0]]), np.eye(2)
    >>> score = np.array([[1.0, 0.0], [0.0, 0.0]])  # looks at channel 0 alone: all logits are 0
    >>> multi_head_attention(x, w_q=score[:, None], w_k=score[:, None], w_v=copy[:, None], w_o=copy[None], zero_attention=True)
    array([[0., 3.],
           [0., 3.]])
    """
    roles = {"x_q": "x_q", "x_k": "x_q" if x_k is None else "x_k"}
    roles["x_v"] = roles["x_k"] if x_v is None else "x_v"
    given = {"x_q": x_q, "x_k": x_k, "x_v": x_v}
    x = {n: given[role] for n, role in roles.items()}
    w = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}
    bias = {"b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}
    _check(x, w, bias, extra_key, extra_value, zero_attention)
    extra = [(extra_key, extra_value)] * (extra_key is not None) + [(None, None)] * bool(zero_attention)

    with backend.quiet():
        q = _heads(einsum("...qm,mhd->...hqd", x["x_q"], w_q), b_q)
        k = _behind(_heads(einsum("...km,mgd->...gkd", x["x_k"], w_k), b_k), [key for key, _ in extra])
        v = _behind(_heads(einsum("...km,mge->...gke", x["x_v"], w_v), b_v), [value for _, value in extra])
        prepared = prepare(q, k, v, backend=backend, algorithm=algorithm, extra_keys=len(extra), **shared)
        result, core = prepared.run()
        output = einsum("...hqe,hem->...qm", result.output, w_o)
        output = _real(prepared, output if b_o is None else output + b_o)
    saved = (prepared, core, result.output, roles, x, w, bias, extra)
    return Result(**{**result.fields, "output": output}), saved


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """Cotangents of tokens, projections, extra key and value, and the shared options."""
    prepared, core, o, roles, x, w, bias, extra = saved
    found: dict[str, Any] = {}
    d_o = None
    with prepared.backend.quiet():
        if output is not None:
            output = _real(prepared, output)
            found["b_o"] = einsum("...qm->m", output)
            found["w_o"] = einsum("...hqe,...qm->hem", o, output)
            d_o = einsum("...qm,hem->...hqe", output, w["w_o"])
        gradients = prepared.gradients(core, d_o, lse)  # softmax attention
        d = {n: gradients.pop(n) for n in ("q", "k", "v")}
        count = d["k"].shape[-2] - len(extra)
        if extra and extra[0][0] is not None:
            found["extra_key"] = einsum("...gd->gd", d["k"][..., count, :])
            found["extra_value"] = einsum("...ge->ge", d["v"][..., count, :])
        d["k"], d["v"] = d["k"][..., :count, :], d["v"][..., :count, :]
        for n, d_heads in d.items():
            tokens = x[f"x_{n}"]
            if bias[f"b_{n}"] is not None:
                found[f"b_{n}"] = einsum("...htd->hd", d_heads)
            found[f"w_{n}"] = einsum("...tm,...htd->mhd", _used(tokens, d_heads), d_heads)
            d_tokens = sum_to_shape(einsum("...htd,mhd->...tm", d_heads, w[f"w_{n}"]), tuple(tokens.shape))
            role = roles[f"x_{n}"]
            found[role] = found[role] + d_tokens if role in found else d_tokens  # one array, several roles
    return {**gradients, **found}


def _check(x: Any, w: Any, bias: Any, extra_key: Any, extra_value: Any, zero_attention: Any) -> None:
    axes = {
        "x_q": "... q m", "w_q": "m h d", "x_k": "... k m1", "w_k": "m1 g d", "x_v": "... k m2", "w_v": "m2 g e", "w_o": "h e o",
        "b_q": "h d", "b_k": "g d", "b_v": "g e", "b_o": "o", "extra_key": "g d", "extra_value": "g e",
    }  # fmt: skip
    for n, weight in w.items():
        if weight is None:
            raise TypeError(f"{n} is None: expected an array ({axes[n].replace(' ', ', ')})")
    arrays = {**x, **w, **bias, "extra_key": extra_key, "extra_value": extra_value}
    require_axes(**{n: (arrays[n], letters) for n, letters in axes.items() if arrays[n] is not None})
    if (extra_key is None) != (extra_value is None):
        missing = "extra_key" if extra_key is None else "extra_value"
        raise TypeError(f"{missing} is missing: an extra key and its value are given together")
    if not isinstance(zero_attention, (bool, np.bool_)):
        raise TypeError(f"zero_attention is {zero_attention!r}: expected True or False")
    broadcast_leading(**{n: (tokens, 2) for n, tokens in x.items()})


def _heads(projected: Any, bias: Any) -> Any:
    return projected if bias is None else projected + bias[:, None, :]


def _behind(x: Any, rows: list[Any]) -> Any:
    """x (..., g, k, d) with rows (g, d) behind its own; None is a row of zeros."""
    if not rows:
        return x
    xp = namespace(x)
    shape = (*x.shape[:-2], 1, x.shape[-1])
    zeros = xp.zeros(shape, dtype=x.dtype, device=device(x))
    return xp.concat([x, *(zeros if r is None else xp.broadcast_to(r[:, None, :], shape) for r in rows)], axis=-2)


def _real(prepared: Any, x: Any) -> Any:
    """x (..., q, m) with zeros in the rows beyond ``query_lengths``."""
    rows = prepared.problem.query_lengths
    if rows is None:
        return x
    xp = namespace(x)
    real = np.arange(x.shape[-2]) < np.reshape(rows, (*prepared.lead, 1))
    return xp.where(to_namespace(real[..., None], xp, like=x), x, xp.zeros_like(x))


def _used(tokens: Any, d_heads: Any) -> Any:
    """The tokens, with zeros for one that no gradient belongs to: what stands in padding reaches nothing."""
    xp = namespace(tokens)
    if bool(xp.all(xp.isfinite(tokens))):
        return tokens
    used = xp.any(xp.any(d_heads != 0, axis=-1), axis=-2)[..., None]
    return xp.where(used, tokens, xp.zeros_like(tokens))


def cost(
    *,
    b: int = 1,
    h: int,
    g: int | None = None,
    q: int,
    k: int,
    d: int,
    e: int | None = None,
    m: int | None = None,
    m1: int | None = None,
    m2: int | None = None,
    biases: bool = False,
    extra_key: Any = None,
    zero_attention: bool = False,
    **settings: Any,
) -> Counts:
    """Counts of the attention of the heads (``refattn.cost.attention``), and the parameters of the projections.

    The model channels m, m1, m2 default to h d, m, m1: m h d + m1 g d + m2 g e + h e m parameters, which is 4 m**2 whatever the
    number of heads; ``biases`` adds h d + g d + g e + m, ``extra_key`` (anything but None) g d + g e and one key, ``zero_attention``
    one key.  Whole layers, projections included: ``refattn.cost.transformer``.
    """
    g, e = h if g is None else g, d if e is None else e
    m = h * d if m is None else m
    m1 = m if m1 is None else m1
    m2 = m1 if m2 is None else m2
    settings.pop("extra_value", None)
    count = int(extra_key is not None) + int(bool(zero_attention))
    core = costs.softmax_counts(b=b, h=h, g=g, q=q, k=k + count, d=d, e=e, extra_keys=count, **settings)
    parameters = m * h * d + m1 * g * d + m2 * g * e + h * e * m
    parameters += (h * d + g * d + g * e + m) * bool(biases) + (g * d + g * e) * (extra_key is not None)
    return dataclasses.replace(core, parameters=parameters)


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 6,
    g: int | None = None,
    q: int = 5,
    k: int = 7,
    d: int = 4,
    e: int = 3,
    m: int = 8,
    m1: int | None = None,
    m2: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Normal tokens x_q (b,q,m), x_k (b,k,m1), x_v (b,k,m2), projections of variance 1/m and biases; g defaults to h // 3 where that
    divides.  An array asked for by True is drawn (``extra_key=True``), by None left out (``x_v=None``, ``b_q=None``)."""
    g = g or (h // 3 if h % 3 == 0 else h)
    m1 = m if m1 is None or settings.get("x_k", True) is None else m1
    m2 = m1 if m2 is None or settings.get("x_v", True) is None else m2
    shapes: dict[str, tuple[int, ...]] = {"x_q": (b, q, m), "x_k": (b, k, m1), "x_v": (b, k, m2)}
    shapes |= {"w_q": (m, h, d), "w_k": (m1, g, d), "w_v": (m2, g, e), "w_o": (h, e, m)}
    shapes |= {"b_q": (h, d), "b_k": (g, d), "b_v": (g, e), "b_o": (m,), "extra_key": (g, d), "extra_value": (g, e)}
    variance = {"w_q": m, "w_k": m1, "w_v": m2, "w_o": h * e}
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        asked = settings.pop(name, None if name.startswith("extra") else True)
        if asked is True:
            asked = rng.standard_normal(shape) / max(1, variance.get(name, 1)) ** 0.5
        if asked is not None:
            found[name] = asked
    return {**found, **settings}


_PROBES = (
    {"h": 4, "q": 9, "x_k": None, "x_v": None, "says": "self-attention: one array in all three roles"},
    {"h": 4, "q": 9, "k": 13, "d": 6, "e": 6, "x_v": None, "says": "keys and values of the same tokens"},
    {"h": 4, "q": 9, "k": 9, "d": 6, "e": 6, "says": "three arrays of one shape"},
    {"h": 6, "g": 2, "q": 9, "k": 9, "causal": True, "says": "causal, 6 query heads on 2 key heads"},
    {
        "h": 6,
        "g": 2,
        "q": 9,
        "k": 9,
        "extra_key": True,
        "extra_value": True,
        "causal": True,
        "says": "an extra key and causal",
    },
    {
        "h": 3,
        "q": 7,
        "k": 11,
        "extra_key": True,
        "extra_value": True,
        "zero_attention": True,
        "says": "an extra key and a key of zeros",
    },
    {"h": 3, "q": 7, "k": 11, "b_q": None, "b_k": None, "b_v": None, "b_o": None, "says": "no biases"},
)

multi_head_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="multi_head_attention",
    differentiable=(
        *("x_q", "x_k", "x_v", "w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o", "extra_key", "extra_value"),
        *options.DIFFERENTIABLE,
    ),
    outputs=("output", "lse"),
    probes=_PROBES,
)
