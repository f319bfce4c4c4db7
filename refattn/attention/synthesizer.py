r"""Synthesizer: attention weights made from each token alone, or learned as a table, without comparing queries and keys.

    hidden[h,q,f] = max(sum_m x[q,m] w_1[h,m,f] + b_1[h,f], 0)
    dense           B[h,q,k] = sum_f hidden[h,q,f] w_2[h,f,k] + b_2[h,k]
    dense, factors  B[h,q,k] = left[h,q,n] right[h,q,p],  k = n P + p,  left = hidden w_a + b_a,  right = hidden w_b + b_b
    random          B[h,q,k] = random[h,q,k]
    random, factors B[h,q,k] = sum_r random_1[h,q,r] random_2[h,k,r]
    others          B[h,q,k] = other_logits[h,q,k]
    logits[h,q,k]  = sum_s alpha[h,s] B_s[h,q,k],   alpha = softmax_s(mixture)
    output[h,q,e]  = sum_k softmax_k(logits)[h,q,k] v[h,k,e]

======  ==============================================  ====================================
letter  axis                                            where
======  ==============================================  ====================================
...     any batch axes                                  x, v, other_logits, mask, output
h       head                                            all but x
q, k    query position, key position                    x, output; v, w_2; tables
m, f    model channel, hidden channel                   x, w_1; w_1, w_2, w_a, w_b
n, p    factor of the length; N P keys in all           w_a, b_a; w_b, b_b
r       rank                                            random_1, random_2
s       part of the mixture, in the order above         mixture
e       value channel                                   v, output
======  ==============================================  ====================================

Conventions: the parts are those whose arrays are given; the mixture acts on logits, before the softmax.  The two factors share one hidden
layer: separate ones are two halves of it.  v is already projected.  Tables are those of the positions in use, so one made for longer
sequences is cut by the caller.

Source: Tay, Bahri, Metzler, Juan, Zhao, Zheng 2020, arXiv:2005.00743, section 3: dense, random, factorized and mixtures (the part
``other_logits`` takes the scaled products of queries and keys there, "vanilla").
"""

from typing import Any

import numpy as np

from refattn.arrays import broadcast_leading, namespace, real, require_flag, require_one_of, sum_to_shape
from refattn.attention.blocks.synthesizer import AXES, PARTS, read_parts
from refattn.contraction import einsum
from refattn.core.blocks import product
from refattn.core.options import require_mask
from refattn.cost import require_sizes
from refattn.mechanism import mechanism
from refattn.normalization import masked_softmax, masked_softmax_backward
from refattn.records import Counts, Elements, Pass, Result

__all__ = ["synthesizer_attention"]


def forward(
    x: Any = None,
    v: Any = None,
    *,
    w_1: Any = None,
    b_1: Any = None,
    w_2: Any = None,
    b_2: Any = None,
    w_a: Any = None,
    b_a: Any = None,
    w_b: Any = None,
    b_b: Any = None,
    random: Any = None,
    random_1: Any = None,
    random_2: Any = None,
    other_logits: Any = None,
    mixture: Any = None,
    mask: Any = None,
    causal: bool = False,
    backend: Any,
) -> tuple[Result, Any]:
    """softmax(B) v with synthetic logits B: dense, random, factorised, or a mixture of them.

    Parameters
    ----------
    x : array (..., q, m)
        Tokens, shared by all heads; needed by the dense parts alone.
    v : array (..., h, k, e)
        Values, already projected.
    w_1, b_1 : arrays (h, m, f), (h, f)
        Hidden layer of the dense parts; every bias may be left out.
    w_2, b_2 : arrays (h, f, k), (h, k)
        Dense part: one logit for each key position.
    w_a, b_a, w_b, b_b : arrays (h, f, n), (h, n), (h, f, p), (h, p)
        Factorised dense part, n p = k: the logit of key i p + j is left[i] right[j].
    random : array (h, q, k)
        Random part: a table of logits, the same for every input.
    random_1, random_2 : arrays (h, q, r), (h, k, r)
        Factorised random part: a table of rank r.
    other_logits : array (..., h, q, k)
        Any further logits, such as scaled products of queries and keys.
    mixture : array (s) or (h, s)
        One number for each part given, in the order of these arguments; their softmax weighs the parts.  Needed with
        more than one part.
    mask : bool array
        True = may attend; broadcasts to (..., h, q, k).
    causal : bool
        Query i sees the keys j <= i; needs q = k.

    Returns
    -------
    output : array (..., h, q, e)

    Raises
    ------
    TypeError
        No values, a mask that is not bool.
    ValueError
        No part, arrays that a part lacks, several parts without a mixture, shapes that disagree, ``causal`` with q != k.

    Examples
    --------
    A table that looks one token back, whatever the tokens are:

    >>> import numpy as np
    >>> v = np.array([[[1.0], [2.0], [4.0]]])
    >>> table = np.array([[[0.0, -99.0, -99.0], [0.0, -99.0, -99.0], [-99.0, 0.0, -99.0]]])
    >>> synthesizer_attention(None, v, random=table)
    array([[[1.],
            [1.],
            [2.]]])
    """
    arrays = {
        "w_1": w_1, "b_1": b_1, "w_2": w_2, "b_2": b_2, "w_a": w_a, "b_a": b_a, "w_b": w_b, "b_b": b_b,
        "random": random, "random_1": random_1, "random_2": random_2, "other_logits": other_logits,
    }  # fmt: skip
    arrays = {n: a for n, a in arrays.items() if a is not None}
    parts, sizes = read_parts(x, v, arrays, mixture)
    causal = require_flag("causal", causal)
    lead = broadcast_leading(
        v=(v, 3),
        **({} if x is None else {"x": (x, 2)}),
        **({} if other_logits is None else {"other_logits": (other_logits, 3)}),
    )
    xp = namespace(v)
    visible = None
    if causal:
        if sizes["q"] != sizes["k"]:
            raise ValueError(
                f"causal Synthesizer attention needs as many queries as keys: {sizes['q']} and {sizes['k']}"
            )
        visible = xp.arange(sizes["q"])[:, None] >= xp.arange(sizes["k"])[None, :]
    if mask is not None:
        require_mask(mask, (*lead, sizes["h"], sizes["q"], sizes["k"]))
        visible = mask if visible is None else xp.logical_and(mask, visible)
    with backend.quiet():
        made = _logits(x, arrays, parts)
        if mixture is None:
            alpha, logits = None, made[parts[0]]
        else:
            alpha, _ = masked_softmax(mixture)
            logits = sum(alpha[..., s, None, None] * made[name] for s, name in enumerate(parts))
        weights, _ = masked_softmax(logits, visible)
        output = product(backend, weights, v, visible)
    return Result(output=output), (x, v, arrays, parts, made, alpha, weights, visible, backend)


def backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """Cotangents of the values, of the logits, of the mixture's shares, and of the arrays behind each part."""
    if output is None:
        return {}
    x, v, arrays, parts, made, alpha, weights, visible, backend = saved
    xp = namespace(v)
    with backend.quiet():
        found = {"v": product(backend, weights, output, visible, transposed=True)}
        d_logits = masked_softmax_backward(weights, einsum("...qe,...ke->...qk", output, v))
        rows = xp.any(d_logits != 0, axis=-1, keepdims=True)
        if alpha is None:
            return found | _logits_backward(x, arrays, made, {parts[0]: d_logits}, rows)
        seen = [xp.where(d_logits == 0, xp.zeros_like(d_logits), d_logits * made[name]) for name in parts]
        d_alpha = xp.stack([sum_to_shape(xp.sum(d, axis=(-1, -2)), tuple(alpha.shape[:-1])) for d in seen], axis=-1)
        found["mixture"] = masked_softmax_backward(alpha, d_alpha)
        shared = {name: alpha[..., s, None, None] * d_logits for s, name in enumerate(parts)}
        return found | _logits_backward(x, arrays, made, shared, rows)


# ------------------------------------------------------------------------------------------------ steps


def _affine(spec: str, x: Any, arrays: dict[str, Any], weight: str, bias: str) -> Any:
    product = einsum(spec, x, arrays[weight])
    return product + arrays[bias][:, None, :] if bias in arrays else product


def _logits(x: Any, arrays: dict[str, Any], parts: list[str]) -> dict[str, Any]:
    """The logits of every part, and of the dense ones also the hidden layer and the two factors."""
    made: dict[str, Any] = {}
    if "dense" in parts or "dense_factors" in parts:
        before = _affine("...qm,hmf->...hqf", x, arrays, "w_1", "b_1")
        xp = namespace(before)
        made["above"] = xp.logical_not(real(before) <= 0)  # NaN stays NaN
        made["hidden"] = xp.where(made["above"], before, xp.zeros_like(before))
    if "dense" in parts:
        made["dense"] = _affine("...hqf,hfk->...hqk", made["hidden"], arrays, "w_2", "b_2")
    if "dense_factors" in parts:
        left = made["left"] = _affine("...hqf,hfn->...hqn", made["hidden"], arrays, "w_a", "b_a")
        right = made["right"] = _affine("...hqf,hfp->...hqp", made["hidden"], arrays, "w_b", "b_b")
        outer = left[..., :, None] * right[..., None, :]
        made["dense_factors"] = namespace(x).reshape(outer, (*outer.shape[:-2], outer.shape[-2] * outer.shape[-1]))
    if "random" in parts:
        made["random"] = arrays["random"]
    if "random_factors" in parts:
        made["random_factors"] = einsum("hqr,hkr->hqk", arrays["random_1"], arrays["random_2"])
    if "others" in parts:
        made["others"] = arrays["other_logits"]
    return made


def _logits_backward(
    x: Any, arrays: dict[str, Any], made: dict[str, Any], d: dict[str, Any], rows: Any
) -> dict[str, Any]:
    """Cotangents of x and of the arrays from those of the parts' logits; ``rows`` (..., h, q, 1) see anything."""
    found: dict[str, Any] = {}
    d_hidden = []

    def seen(values: Any) -> Any:
        """What rows that see nothing hold may be NaN, and reaches no weight."""
        return namespace(values).where(rows, values, namespace(values).zeros_like(values))

    hidden = seen(made["hidden"]) if "hidden" in made else None
    if "dense" in d:
        found["w_2"] = einsum("...hqf,...hqk->hfk", hidden, d["dense"])
        found["b_2"] = einsum("...hqk->hk", d["dense"])
        d_hidden.append(einsum("...hqk,hfk->...hqf", d["dense"], arrays["w_2"]))
    if "dense_factors" in d:  # the product of two factors: each gets the other's share
        xp, left, right = namespace(x), seen(made["left"]), seen(made["right"])
        d_outer = d["dense_factors"]
        d_outer = xp.reshape(d_outer, (*d_outer.shape[:-1], left.shape[-1], right.shape[-1]))
        d_left = einsum("...hqnp,...hqp->...hqn", d_outer, right)
        d_right = einsum("...hqnp,...hqn->...hqp", d_outer, left)
        found["w_a"], found["b_a"] = einsum("...hqf,...hqn->hfn", hidden, d_left), einsum("...hqn->hn", d_left)
        found["w_b"], found["b_b"] = einsum("...hqf,...hqp->hfp", hidden, d_right), einsum("...hqp->hp", d_right)
        d_hidden.append(einsum("...hqn,hfn->...hqf", d_left, arrays["w_a"]))
        d_hidden.append(einsum("...hqp,hfp->...hqf", d_right, arrays["w_b"]))
    if d_hidden:
        xp = namespace(x)
        total = sum(d_hidden[1:], d_hidden[0])
        total = xp.where(made["above"], total, xp.zeros_like(total))  # through the relu
        if bool(xp.all(xp.isfinite(x))):
            found["w_1"] = einsum("...qm,...hqf->hmf", x, total)
        else:
            found["w_1"] = einsum("...hqm,...hqf->hmf", seen(x[..., None, :, :]), total)
        found["b_1"] = einsum("...hqf->hf", total)
        found["x"] = einsum("...hqf,hmf->...qm", total, arrays["w_1"])
    if "random" in d:
        found["random"] = einsum("...hqk->hqk", d["random"])
    if "random_factors" in d:
        table = einsum("...hqk->hqk", d["random_factors"])
        found["random_1"] = einsum("hqk,hkr->hqr", table, arrays["random_2"])
        found["random_2"] = einsum("hqk,hqr->hkr", table, arrays["random_1"])
    if "others" in d:
        found["other_logits"] = d["others"]
    return found


# ------------------------------------------------------------------------------------------------ counts, example


def cost(
    *,
    b: int = 1,
    h: int = 1,
    q: int,
    k: int,
    e: int,
    m: int = 0,
    f: int = 0,
    n: int = 0,
    p: int = 0,
    r: int = 0,
    parts: tuple[str, ...] = ("dense",),
    causal: bool = False,
) -> Counts:
    """Counts of the parts named (keys of ``PARTS``); every pair is computed, also with ``causal``.

    The values: q k e.  Hidden layer: q m f; dense: q f k; its factors: q f (n + p); random factors: q k r once for the
    whole batch.  Backward: twice each, and the two factors of the dense part cost 2 q k there.
    """
    require_sizes(b=b, h=h, q=q, k=k, e=e, m=m, f=f, n=n, p=p, r=r)
    if not isinstance(parts, (tuple, list)):
        raise TypeError(f"parts is {parts!r}: expected names of parts, {', '.join(PARTS)}")
    for name in parts:
        require_one_of("parts", name, tuple(PARTS))
    units = b * h
    hidden = units * q * m * f if "dense" in parts or "dense_factors" in parts else 0
    dense = units * q * f * k if "dense" in parts else 0
    factors = units * q * f * (n + p) if "dense_factors" in parts else 0
    ranked = h * q * k * r if "random_factors" in parts else 0
    pairs = units * q * k
    visible = units * q * (q + 1) // 2 if causal else pairs
    through = hidden + dense + factors + ranked
    weights = {
        "dense": h * (m * f + f * k), "dense_factors": h * (m * f + f * (n + p)), "random": h * q * k,
        "random_factors": h * (q + k) * r, "others": 0,
    }  # fmt: skip
    learned = sum(weights[name] for name in parts) + (len(parts) if len(parts) > 1 else 0)
    arrays = learned + units * k * e + (b * q * m if hidden else 0) + (pairs if "others" in parts else 0)
    inputs, written = Elements(storage=arrays), Elements(storage=units * q * e)
    kept = Elements(compute=pairs * (1 + len(parts)) + units * q * f + (units * q * (n + p) if factors else 0))
    back = 2 * through + (2 * pairs if factors else 0)
    return Counts(
        forward=Pass(
            multiplies=visible * e + through,
            computed=pairs * e + through,
            elementwise=pairs * (3 + 2 * len(parts)) + units * q * f,
            read=inputs,
            written=written,
            peak=written + kept,
        ),
        backward=Pass(
            multiplies=2 * visible * e + back,
            computed=2 * pairs * e + back,
            elementwise=pairs * (4 + 3 * len(parts)) + units * q * f,
            read=inputs + kept + written,
            written=inputs,
            peak=inputs + 2 * kept,
        ),
        saved=inputs + kept,
        parameters=learned,
    )


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    q: int = 6,
    k: int = 6,
    e: int = 3,
    m: int = 5,
    f: int = 4,
    p: int = 2,
    r: int = 2,
    **settings: Any,
) -> dict[str, Any]:
    """Normal arrays.  ``w_2``, ``w_a``, ``random``, ``random_1``, ``other_logits`` = True ask for their parts (none: dense),
    ``mixture=True`` for a mixture, which several parts always get.  Keys become a multiple of p where factors are asked for.
    """
    normal = rng.standard_normal
    wanted = {
        n: settings.pop(n) for n in ("w_2", "w_a", "random", "random_1", "other_logits") if settings.get(n) is True
    }
    wanted = wanted or {"w_2": True}
    if "w_a" in wanted:
        k = max(1, k // p) * p
    q = k if settings.get("causal") else q
    given = {"x": normal((b, q, m)), "v": normal((b, h, k, e))}
    if "w_2" in wanted or "w_a" in wanted:
        given.update(w_1=normal((h, m, f)) / m**0.5, b_1=normal((h, f)))
    if "w_2" in wanted:
        given.update(w_2=normal((h, f, k)), b_2=normal((h, k)))
    if "w_a" in wanted:
        given.update(w_a=normal((h, f, k // p)), b_a=normal((h, k // p)), w_b=normal((h, f, p)), b_b=normal((h, p)))
    if "random" in wanted:
        given["random"] = normal((h, q, k))
    if "random_1" in wanted:
        given.update(random_1=normal((h, q, r)), random_2=normal((h, k, r)))
    if "other_logits" in wanted:
        given["other_logits"] = normal((b, h, q, k))
    if settings.pop("mixture", None) is True or len(wanted) > 1:
        given["mixture"] = normal((h, len(wanted)))
    return given | settings


_PROBES = (
    {"q": 13, "k": 20, "p": 4, "w_a": True, "says": "two factors, of 5 and 4 positions, for 20 keys"},
    {"q": 13, "k": 21, "random": True, "says": "a table of logits: the tokens do not count"},
    {"q": 17, "k": 17, "random": True, "causal": True, "says": "a square table, causal: a transposed read shows"},
    {"q": 13, "k": 21, "r": 3, "random_1": True, "says": "a table of rank 3"},
    {
        "q": 11,
        "k": 18,
        "p": 3,
        "w_2": True,
        "w_a": True,
        "random": True,
        "random_1": True,
        "other_logits": True,
        "says": "all five parts in one mixture",
    },
    {"q": 15, "k": 15, "w_2": True, "random": True, "causal": True, "says": "a dense part and a table, causal"},
)

synthesizer_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="synthesizer_attention",
    differentiable=("x", "v", *AXES, "mixture"),
    probes=_PROBES,
)
