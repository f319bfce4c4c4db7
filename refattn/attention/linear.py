r"""Linear attention: a kernel of features in place of the softmax, so that keys and values fit into one matrix.

    phi(x)       = elu(x) + 1, or x itself
    S[d,e]       = state[d,e] + sum_j phi(k)[j,d] v[j,e]              over the keys j that query i sees
    z[d]         = normalizer[d] + sum_j phi(k)[j,d]
    output[i,e]  = sum_d f[i,d] S[d,e] / (sum_d f[i,d] z[d] + eps)    f = scale * phi(q)

======  ===============================  =======================================
letter  axis                             where
======  ===============================  =======================================
...     any batch axes                   all
h       head                             all
q, k    query position, key position     q, output; k, v
d       feature (= channel)              q, k, state, normalizer
e       value channel                    v, state, output
======  ===============================  =======================================

Three forms of one sum over pieces of the sequence, which differ in where it is cut: ``"parallel"`` is one piece with its
(q, k) matrix of products, ``"recurrent"`` is one position at a time and no matrix, ``"chunked"`` lies between.

Conventions: a row whose denominator is 0 (no key, no initial normalizer, eps = 0) gives output 0 and gradients 0; keys beyond
``key_lengths`` are never read.

Source: Katharopoulos, Vyas, Pappas, Fleuret 2020, arXiv:2006.16236, sections 3.2 and 3.3.
"""

from typing import Any

import numpy as np

from refattn.arrays import (
    broadcast_leading,
    device,
    namespace,
    real,
    require_axes,
    require_finite,
    require_integer,
    require_number,
    require_one_of,
    to_namespace,
)
from refattn.attention.blocks.linear import lower_products, piece, pieces_of
from refattn.contraction import einsum
from refattn.core.blocks import product
from refattn.core.options import per_batch
from refattn.cost import require_sizes
from refattn.mechanism import mechanism
from refattn.records import Counts, Elements, Pass, Result

__all__ = ["linear_attention"]

FEATURES = ("elu", "identity")
FORMS = ("auto", "parallel", "recurrent", "chunked")


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    feature_map: str = "elu",
    causal: bool = False,
    scale: Any = None,
    normalize: bool = True,
    normalize_eps: float = 0.0,
    state: Any = None,
    normalizer: Any = None,
    key_lengths: Any = None,
    form: str = "auto",
    chunk: int = 64,
    backend: Any,
) -> tuple[Result, Any]:
    """Attention with weights phi(q) . phi(k): linear in the length, with a state to carry on.

    Parameters
    ----------
    q : array (..., h, q, d)
    k : array (..., h, k, d)
    v : array (..., h, k, e)
    feature_map : {"elu", "identity"}
        phi(x) = elu(x) + 1, or x (for features computed outside).
    causal : bool
        Query i sees the keys j <= i; needs q = k.
    scale : float
        Factor of phi(q), default d**-0.5; with ``normalize`` it acts on the eps alone.  Differentiable.
    normalize : bool
        Divide by the sum of the weights.
    normalize_eps : float
        Added to that sum.
    state : array (..., h, d, e)
        Sum of phi(k) v^T over earlier keys, seen by every query; left out: 0.
    normalizer : array (..., h, d)
        Sum of phi(k) over earlier keys; left out: 0, whether or not a state is given.
    key_lengths : ints per batch
        Keys beyond are padding.
    form : {"auto", "parallel", "recurrent", "chunked"}
        Order of the sum: the same numbers up to rounding.  Causal: the parallel form holds a (q, k) matrix, the chunked one
        (chunk, chunk) matrices and a state for each chunk.  "auto" takes chunks where it is causal: its memory is linear
        in the length.
    chunk : int
        Positions of a piece of the chunked form.

    Returns
    -------
    output : array (..., h, q, e), in the dtype of the inputs
    state : array (..., h, d, e), in the compute dtype
        Sum of phi(k) v^T over all real keys, plus the initial one.
    normalizer : array (..., h, d), in the compute dtype

    Raises
    ------
    ValueError
        Shapes that disagree, ``causal`` with q != k, an unknown feature map or form, lengths beyond k, a chunk below 1.

    Examples
    --------
    With zero queries and keys every weight is 1, and the output a running mean:

    >>> import numpy as np
    >>> x, v = np.zeros((1, 3, 2)), np.array([[[3.0], [5.0], [1.0]]])
    >>> result = linear_attention.forward(x, x, v, causal=True)
    >>> result.output[0, :, 0]
    array([3., 4., 3.])
    >>> linear_attention(x[:, :1], x[:, :1], v[:, :1] + 4, state=result.state, normalizer=result.normalizer)
    array([[[4.]]])
    """
    sizes = require_axes(q=(q, "... h q d"), k=(k, "... h k d"), v=(v, "... h k e"))
    given = {"q": (q, 3), "k": (k, 3), "v": (v, 3)}
    if state is not None:
        require_axes(sizes, state=(state, "... h d e"))
        given["state"] = (state, 3)
    if normalizer is not None:
        require_axes(sizes, normalizer=(normalizer, "... h d"))
        given["normalizer"] = (normalizer, 2)
    lead = broadcast_leading(**given)
    require_one_of("feature_map", feature_map, FEATURES)
    require_one_of("form", form, FORMS)
    chunk = require_integer("chunk", chunk, minimum=1)
    normalize_eps = require_number("normalize_eps", normalize_eps, minimum=0)
    if causal and sizes["q"] != sizes["k"]:
        raise ValueError(
            f"causal linear attention needs as many queries as keys: q has shape {tuple(q.shape)}, k {tuple(k.shape)}"
        )
    scale = (sizes["d"] ** -0.5 if sizes["d"] else 1.0) if scale is None else scale
    require_finite("scale", scale)

    xp = namespace(q, k, v)
    phi_q, phi_k = _features(q, feature_map), _features(k, feature_map)
    keep = _real_keys(key_lengths, lead, phi_k)
    # One more value channel of ones sums the normalizer along with the state.
    values = xp.concat([v, xp.ones((*v.shape[:-1], 1), dtype=v.dtype, device=device(v))], axis=-1)
    if keep is not None:
        phi_k, values = _selected(keep, phi_k), _selected(keep, values)
    start = _joined(state, normalizer, (*lead, sizes["h"], sizes["d"], sizes["e"]), v)

    pieces = pieces_of(sizes["k"], piece(form, causal, sizes["k"], chunk))
    f = phi_q * scale
    with backend.quiet():
        states, sums, weighted = [], start, []
        for at in pieces:
            states.append(sums)
            if causal:
                weights, visible = lower_products(f[..., at, :], phi_k[..., at, :])
                own = product(backend, weights, values[..., at, :], visible)
                weighted.append(own + einsum("...qd,...de->...qe", f[..., at, :], sums))
            sums = sums + einsum("...kd,...ke->...de", phi_k[..., at, :], values[..., at, :])
        if causal and pieces:
            total = xp.concat(weighted, axis=-2)
        else:
            total = einsum("...qd,...de->...qe", f, sums)
        output, divisor, empty = _quotient(total, normalize, normalize_eps)
    result = Result(output=output, state=sums[..., :-1] + 0, normalizer=sums[..., -1] + 0)
    kept = (q, k, phi_q, phi_k, values, keep, scale, f, states if causal else [], sums, output, divisor, empty)
    return result, (kept, pieces, causal, feature_map, normalize, backend)


def backward(saved: Any, *, output: Any, state: Any, normalizer: Any) -> dict[str, Any]:
    """Cotangents of q, k, v, scale and the initial state and normalizer, one piece after the other from the last.

    With y = n / D, n = A v + f S and D = A 1 + f . z + eps, A = tril(f phi(k)^T) of the piece:
    dn = dy / D and dD = -(dy . y) / D, joined as the cotangent of A [v, 1] + f [S, z];
    dA = tril(dn v^T + dD);  df = dA phi(k) + dn S^T + dD z;  dphi(k) = dA^T f + v dS^T + dz;  dv = A^T dn + phi(k) dS;
    dS and dz, of the state behind the piece, then gain f^T dn and sum f dD.
    """
    kept, pieces, causal, feature_map, normalize, backend = saved
    q, k, phi_q, phi_k, values, keep, scale, f, states, sums, y, divisor, empty = kept
    xp = namespace(q, k)
    with backend.quiet():
        d_y = xp.zeros_like(y) if output is None else output
        if normalize:
            d_n = _selected(xp.logical_not(empty), d_y / divisor)
            d_divisor = -xp.sum(d_n * y, axis=-1, keepdims=True)
        else:
            d_n, d_divisor = d_y, xp.zeros((*y.shape[:-1], 1), dtype=y.dtype, device=device(y))
        d_total = xp.concat([d_n, d_divisor], axis=-1)
        d_sums = _joined(state, normalizer, tuple(sums[..., :-1].shape), values)
        if not causal:
            d_f = einsum("...qe,...de->...qd", d_total, sums)
            d_sums = d_sums + einsum("...qd,...qe->...de", f, d_total)
        d_features, d_keys, d_values = [], [], []
        for n in range(len(pieces) - 1, -1, -1):
            at = pieces[n]
            rows_k, rows_v = phi_k[..., at, :], values[..., at, :]
            d_k = einsum("...ke,...de->...kd", rows_v, d_sums)  # v dS^T + dz
            d_v = einsum("...kd,...de->...ke", rows_k, d_sums)  # phi(k) dS
            if causal:
                rows_f, d_rows = f[..., at, :], d_total[..., at, :]
                weights, visible = lower_products(rows_f, rows_k)
                d_weights, _ = lower_products(d_rows, rows_v)  # dA
                d_features.append(
                    product(backend, d_weights, rows_k, visible)
                    + einsum("...qe,...de->...qd", d_rows, states[n])  # dn S^T + dD z
                )
                d_k = d_k + product(backend, d_weights, rows_f, visible, transposed=True)
                d_v = d_v + product(backend, weights, d_rows, visible, transposed=True)
                d_sums = d_sums + einsum("...qd,...qe->...de", rows_f, d_rows)
            d_keys.append(d_k)
            d_values.append(d_v)
        if causal and pieces:
            d_f = xp.concat(d_features[::-1], axis=-2)
        elif causal:
            d_f = xp.zeros_like(f)
        d_k = xp.concat(d_keys[::-1], axis=-2) if pieces else xp.zeros_like(phi_k)
        d_v = xp.concat(d_values[::-1], axis=-2) if pieces else xp.zeros_like(values)
        if keep is not None:
            d_k, d_v = _selected(keep, d_k), _selected(keep, d_v)
        return {
            "q": _features_backward(q, feature_map, d_f * scale),
            "k": _features_backward(k, feature_map, d_k),
            "v": d_v[..., :-1],
            "scale": xp.sum(xp.where(d_f == 0, xp.zeros_like(d_f), d_f * phi_q)),
            "state": d_sums[..., :-1],
            "normalizer": d_sums[..., -1],
        }


# ------------------------------------------------------------------------------------------------ steps


def _features(x: Any, feature_map: str) -> Any:
    """elu(x) + 1: x + 1 above 0, exp(x) below."""
    if feature_map == "identity":
        return x
    xp = namespace(x)
    above = real(x) > 0
    return xp.where(above, x + 1, xp.exp(xp.where(above, xp.zeros_like(x), x)))


def _features_backward(x: Any, feature_map: str, d_phi: Any) -> Any:
    """The slope of elu + 1 is 1 above 0 and exp(x) below."""
    if feature_map == "identity":
        return d_phi
    xp = namespace(x)
    above = real(x) > 0
    slope = xp.exp(xp.where(above, xp.zeros_like(x), x))
    return xp.where(d_phi == 0, xp.zeros_like(d_phi), d_phi * slope)


def _real_keys(key_lengths: Any, lead: tuple[int, ...], phi_k: Any) -> Any:
    """(..., 1, k, 1) bool: keys that are no padding; None where there is none."""
    if key_lengths is None:
        return None
    n_k = phi_k.shape[-2]
    lengths = per_batch("key_lengths", key_lengths, lead)
    if lengths.size and (lengths.min() < 0 or lengths.max() > n_k):
        raise ValueError(f"key_lengths is {lengths.tolist()}: expected between 0 and {n_k}")
    lengths = lengths.reshape(lead if lengths.size != 1 else (1,) * len(lead))
    return to_namespace(np.arange(n_k)[:, None] < lengths[..., None, None, None], namespace(phi_k), like=phi_k)


def _selected(keep: Any, x: Any) -> Any:
    return namespace(x).where(keep, x, namespace(x).zeros_like(x))


def _joined(state: Any, normalizer: Any, shape: tuple[int, ...], like: Any) -> Any:
    """[state, normalizer] as one array (..., d, e + 1), zeros for what is None."""
    xp = namespace(like)
    if state is None:
        state = xp.zeros(shape, dtype=like.dtype, device=device(like))
    if normalizer is None:
        normalizer = xp.zeros(shape[:-1], dtype=like.dtype, device=device(like))
    column = xp.broadcast_to(xp.expand_dims(normalizer, axis=-1), (*shape[:-1], 1))
    return xp.concat([xp.broadcast_to(state, shape), column], axis=-1)


def _quotient(total: Any, normalize: bool, eps: float) -> tuple[Any, Any, Any]:
    """Weighted values over the sum of weights; the divisor (1 where it is 0), and bool: rows whose sum is 0."""
    if not normalize:
        return total[..., :-1] + 0, None, None
    xp = namespace(total)
    divisor = total[..., -1:] + eps
    empty = real(divisor) == 0
    divisor = xp.where(empty, xp.ones_like(divisor), divisor)
    return _selected(xp.logical_not(empty), total[..., :-1] / divisor), divisor, empty


# ------------------------------------------------------------------------------------------------ counts, example


def cost(
    *,
    b: int = 1,
    h: int = 1,
    q: int,
    k: int,
    d: int,
    e: int | None = None,
    causal: bool = False,
    form: str = "auto",
    chunk: int = 64,
) -> Counts:
    """Counts of one call; the normalizer is one more value channel, so that each e below is e + 1.

    A key enters the state with d e multiply-adds and a query reads it with as many.  Causal pieces of a positions add
    a (a + 1) / 2 visible pairs of d + e (computed: a^2).  Backward: 3 d + 2 e a pair, and four products with the state.
    """
    e = d if e is None else e
    require_sizes(b=b, h=h, q=q, k=k, d=d, e=e)
    require_one_of("form", form, FORMS)
    wide, units = e + 1, b * h
    step = piece(form, causal, k, require_integer("chunk", chunk, minimum=1))
    whole, rest = divmod(k, step)  # pieces of ``step`` positions, and one of the others
    visible = whole * (step * (step + 1) // 2) + rest * (rest + 1) // 2 if causal else 0
    computed = whole * step * step + rest * rest if causal else 0
    through = d * wide * (q + k)
    inputs = Elements(storage=units * (q * d + k * (d + e)))
    written = Elements(storage=units * q * e, compute=units * d * wide)
    kept = Elements(compute=units * (2 * q * d + k * (d + wide) + q * wide))  # features
    kept += Elements(compute=units * d * wide * (whole + bool(rest) if causal else 1))  # states
    largest = Elements(compute=units * min(step, k) ** 2 if causal else 0)
    return Counts(
        forward=Pass(
            multiplies=units * (visible * (d + wide) + through),
            computed=units * (computed * (d + wide) + through),
            elementwise=units * (2 * q * d + k * d + q * e),
            read=inputs,
            written=written,
            peak=written + kept + largest,
        ),
        backward=Pass(
            multiplies=units * (visible * (3 * d + 2 * wide) + 2 * through),
            computed=units * (computed * (3 * d + 2 * wide) + 2 * through),
            elementwise=units * (3 * q * d + k * d + 2 * q * e),
            read=inputs + written + Elements(storage=units * q * e),
            written=inputs,
            peak=inputs + kept + 2 * largest,
        ),
        saved=inputs + written + kept,
    )


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    q: int = 5,
    k: int = 7,
    d: int = 4,
    e: int = 6,
    **settings: Any,
) -> dict[str, Any]:
    """Normal q (b,h,q,d), k (b,h,k,d), v (b,h,k,e); ``state=True`` and ``normalizer=True`` draw those too.

    Causal: q becomes k.  Features that are taken as they are ("identity") are positive, so that no sum of weights is near 0.
    """
    normal = rng.standard_normal
    q = k if settings.get("causal") else q
    given = {"q": normal((b, h, q, d)), "k": normal((b, h, k, d)), "v": normal((b, h, k, e)), **settings}
    if settings.get("feature_map") == "identity":
        given.update(q=np.exp(given["q"]), k=np.exp(given["k"]))
    if settings.get("state") is True:
        given["state"] = normal((b, h, d, e))
    if settings.get("normalizer") is True:
        given["normalizer"] = rng.uniform(0.5, 2.0, (b, h, d))
    return given


_PROBES = (
    {"q": 21, "k": 21, "causal": True, "says": "causal: query i sees the keys up to its own"},
    {"q": 70, "k": 70, "causal": True, "form": "chunked", "chunk": 16, "says": "pieces of 16 do not divide 70"},
    {"q": 19, "k": 19, "causal": True, "state": True, "normalizer": True, "says": "a state to start from"},
    {"q": 13, "k": 22, "state": True, "normalizer": True, "says": "a state to start from, not causal"},
    {"q": 17, "k": 17, "causal": True, "feature_map": "identity", "normalize": False, "says": "plain sums, scaled"},
    {"q": 9, "k": 15, "b": 2, "key_lengths": (15, 6), "says": "padded keys"},
    {"q": 9, "k": 15, "normalize_eps": 0.5, "scale": 0.3, "says": "a constant added to the sum of weights"},
)

linear_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="linear_attention",
    differentiable=("q", "k", "v", "scale", "state", "normalizer"),
    outputs=("output", "state", "normalizer"),
    probes=_PROBES,
)
