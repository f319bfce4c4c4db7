"""The four terms of Transformer-XL's logits, apart."""

from typing import Any

import numpy as np

from refattn.arrays import device, namespace, to_namespace
from refattn.contraction import einsum

__all__ = ["terms_of"]


def terms_of(
    q: Any, k: Any, given: dict[str, Any], scale: Any, n_p: int, causal: bool, places: np.ndarray | None
) -> dict[str, Any]:
    """The four parts of the logits, (..., h, q, k) each."""
    xp = namespace(q)
    n_q, n_k = q.shape[-2], k.shape[-2]
    pairs = "...hqd,...hkd->...hqk"
    terms = {"a": einsum(pairs, q, k)}
    if given["absolute_q"] is not None:
        terms["b"] = einsum(pairs, q, given["absolute_k"])
        terms["c"] = einsum(pairs, given["absolute_q"], k)
        terms["d"] = einsum(pairs, given["absolute_q"], given["absolute_k"])
    else:
        zero = xp.zeros_like(terms["a"])
        place = np.arange(n_k) if places is None else places
        row = place[None, :] + (n_q - 1 if causal else n_q) - np.arange(n_q)[:, None]
        present = to_namespace(row < n_p, xp, like=q)
        index = to_namespace(np.where(row < n_p, row, 0), xp, like=q)

        def by_key(x: Any) -> Any:
            """(..., h, q|1, p) -> (..., h, q, k)."""
            x = xp.broadcast_to(x, (*x.shape[:-2], n_q, n_p))
            at = xp.broadcast_to(index, (*x.shape[:-1], n_k))
            return xp.where(present, xp.take_along_axis(x, at, axis=-1), xp.zeros((), dtype=x.dtype, device=device(x)))

        r, u, w, scalars = given["r"], given["u"], given["w"], given["position_bias"]
        terms["b"] = zero if r is None else by_key(einsum("...hqd,...hpd->...hqp", q, r))
        terms["c"] = zero if u is None else einsum("hd,...hkd->...hk", u, k)[..., None, :] + zero
        terms["d"] = zero
        if scalars is not None:
            terms["d"] = by_key(scalars[:, None, :]) + zero
        elif w is not None:
            terms["d"] = by_key(einsum("hd,...hpd->...hp", w, r)[..., None, :]) + zero
    return {f"term_{letter}": scale * x for letter, x in terms.items()}
