"""What the compression learns from: attention rebuilt from compressed rows, and the rows themselves."""

from typing import Any

from refattn.arrays import broadcast_leading, namespace, real, require_axes, require_finite, require_one_of
from refattn.contraction import einsum
from refattn.mechanism import function
from refattn.normalization import masked_softmax, masked_softmax_backward
from refattn.records import Result

__all__ = ["attention_reconstruction_loss", "auto_encoding_loss"]


def _distance(difference: Any, norm: str) -> Any:
    """The Euclidean norm of all entries, or their mean square (0 of nothing)."""
    xp = namespace(difference)
    total = xp.sum(difference * difference)
    if norm == "l2":
        return xp.sqrt(total)
    return total / max(1, _entries(difference))


def _distance_backward(difference: Any, norm: str, loss: Any, d: Any) -> Any:
    """Cotangent of the difference; the norm has gradient 0 where it is 0."""
    if norm == "mse":
        return difference * (2.0 * d / max(1, _entries(difference)))
    xp = namespace(difference)
    zero = real(loss) == 0
    return difference * xp.where(zero, xp.zeros_like(loss), d / xp.where(zero, xp.ones_like(loss), loss))


def _entries(x: Any) -> int:
    count = 1
    for n in x.shape:
        count *= n
    return count


def _reconstruction_forward(
    hidden: Any,
    old: Any,
    compressed: Any,
    *,
    w_q: Any,
    w_k: Any,
    w_v: Any,
    norm: str = "l2",
    scale: float | None = None,
) -> tuple[Result, Any]:
    """How much attention changes when it reads the compressed rows in place of the old ones.

    loss = ||attention(hidden, old) - attention(hidden, compressed)||, by content alone: no positions, no causal mask, no
    mixing with the segment.  The gradient goes to ``compressed`` alone, and from there into the compression.

    Parameters
    ----------
    hidden : array (..., q, m)
    old : array (..., n, m)
    compressed : array (..., c, m)
    w_q, w_k, w_v : arrays (m, h, d), (m, h, d), (m, h, e)
    norm : {"l2", "mse"}
        The Euclidean norm over all entries (the paper's; its gradient at 0 is 0), or the mean square (public code).
    scale : float
        Of the logits; default d**-0.5.  (The paper's algorithm writes none; code uses it.)

    Returns
    -------
    output : 0-d array

    Raises
    ------
    ValueError
        Shapes that disagree.
    """
    require_one_of("norm", norm, ("l2", "mse"))
    for name, a in (("hidden", hidden), ("old", old), ("compressed", compressed)):
        if a.ndim < 2:
            raise ValueError(f"{name} has shape {tuple(a.shape)}: expected (..., rows, m)")
    sizes = require_axes(
        hidden=(hidden, "... q m"), old=(old, "... n m"), compressed=(compressed, "... c m"),
        w_q=(w_q, "m h d"), w_k=(w_k, "m h d"), w_v=(w_v, "m h e"),
    )  # fmt: skip
    broadcast_leading(hidden=(hidden, 2), old=(old, 2), compressed=(compressed, 2))
    if scale is not None:
        require_finite("scale", scale)
    scale = (sizes["d"] ** -0.5 if sizes["d"] else 1.0) if scale is None else scale
    q = einsum("...qm,mhd->...hqd", hidden, w_q) * scale

    def attend(rows: Any) -> tuple[Any, Any, Any, Any]:
        k, v = einsum("...nm,mhd->...hnd", rows, w_k), einsum("...nm,mhe->...hne", rows, w_v)
        weights, _ = masked_softmax(einsum("...hqd,...hnd->...hqn", q, k))
        return einsum("...hqn,...hne->...hqe", weights, v), weights, k, v

    want, (got, weights, _, v) = attend(old)[0], attend(compressed)
    difference = got - want
    loss = _distance(difference, norm)
    return Result(output=loss), (q, weights, v, w_k, w_v, difference, norm, loss)


def _reconstruction_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    """Softmax attention backwards, to its keys and values alone: d compressed = dk w_k^T + dv w_v^T."""
    q, weights, v, w_k, w_v, difference, norm, loss = saved
    if output is None:
        return {}
    d_out = _distance_backward(difference, norm, loss, output)
    d_v = einsum("...hqn,...hqe->...hne", weights, d_out)
    d_logits = masked_softmax_backward(weights, einsum("...hqe,...hne->...hqn", d_out, v))
    d_k = einsum("...hqn,...hqd->...hnd", d_logits, q)
    return {"compressed": einsum("...hnd,mhd->...nm", d_k, w_k) + einsum("...hne,mhe->...nm", d_v, w_v)}


def _auto_encoding_forward(
    old: Any, compressed: Any, *, weight: Any, bias: Any = None, norm: str = "l2"
) -> tuple[Result, Any]:
    """How well a linear decoder rebuilds the old rows from the compressed ones: ||old - decoded||.

    decoded[c rate + a, o] = sum over m of compressed[c, m] weight[m, o, a] + bias[o].  ``old`` is a constant.

    Parameters
    ----------
    old : array (..., n, o)
        The rows after the last whole span are left out of account.
    compressed : array (..., c, m)
    weight : array (m, o, rate)
    bias : array (o,), optional
    norm : {"l2", "mse"}

    Returns
    -------
    output : 0-d array

    Raises
    ------
    ValueError
        Shapes that disagree: more compressed rows than old ones can have given.
    """
    require_one_of("norm", norm, ("l2", "mse"))
    for name, a in (("old", old), ("compressed", compressed)):
        if a.ndim < 2:
            raise ValueError(f"{name} has shape {tuple(a.shape)}: expected (..., rows, channels)")
    sizes = require_axes(old=(old, "... n o"), compressed=(compressed, "... c m"), weight=(weight, "m o a"))
    broadcast_leading(old=(old, 2), compressed=(compressed, 2))
    if bias is not None:
        require_axes(sizes, bias=(bias, "o"))
    n, c, rate = sizes["n"], sizes["c"], sizes["a"]
    if c != (n // rate if rate else 0):
        raise ValueError(
            f"compressed has {c} rows: expected {n // rate if rate else 0}, one for each {rate} of the {n} rows of old"
        )
    xp = namespace(compressed)
    decoded = einsum("...cm,moa->...cao", compressed, weight)
    decoded = decoded if bias is None else decoded + bias
    spans = xp.reshape(old[..., : c * rate, :], (*old.shape[:-2], c, rate, old.shape[-1]))
    difference = decoded - spans
    loss = _distance(difference, norm)
    return Result(output=loss), (compressed, weight, difference, norm, loss)


def _auto_encoding_backward(saved: Any, *, output: Any) -> dict[str, Any]:
    compressed, weight, difference, norm, loss = saved
    if output is None:
        return {}
    d = _distance_backward(difference, norm, loss, output)
    return {
        "compressed": einsum("...cao,moa->...cm", d, weight),
        "weight": einsum("...cao,...cm->moa", d, compressed),
        "bias": einsum("...cao->o", d),
    }


attention_reconstruction_loss = function(
    _reconstruction_forward,
    _reconstruction_backward,
    name="attention_reconstruction_loss",
    differentiable=("compressed",),
    floating=("hidden", "old", "w_q", "w_k", "w_v", "scale"),
)
auto_encoding_loss = function(
    _auto_encoding_forward,
    _auto_encoding_backward,
    name="auto_encoding_loss",
    differentiable=("compressed", "weight", "bias"),
    floating=("old",),
)
