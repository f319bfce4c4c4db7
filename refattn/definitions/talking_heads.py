"""Talking-Heads attention by its definition: query by query and head by head, in float64."""

import math
from typing import Any

import numpy as np

from refattn.definitions import dense_loop as dense_definition
from refattn.records import Result

__all__ = ["definition"]

_VISIBILITY = (
    "mask",
    "pattern",
    "causal",
    "align",
    "window",
    "query_lengths",
    "key_lengths",
    "query_segments",
    "key_segments",
)


def definition(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    logits_projection: np.ndarray | None = None,
    weights_projection: np.ndarray | None = None,
    query_logits: np.ndarray | None = None,
    key_logits: np.ndarray | None = None,
    query_weights: np.ndarray | None = None,
    key_weights: np.ndarray | None = None,
    **shared: Any,
) -> Result:
    """Every projection as a sum over heads, one coefficient for each pair, with every shared option.

    The softmax between the projections is that of the dense definition, on logits that are handed to it as they are.
    """
    lead = np.broadcast_shapes(
        *(x.shape[:-3] for x in (q, k, v)),
        *(x.shape[:-3] for x in (query_logits, key_logits, query_weights, key_weights) if x is not None),
    )
    q, k, v = (np.broadcast_to(x, (*lead, *x.shape[-3:])) for x in (q, k, v))
    (n_x, rows, channels), columns, n_y = q.shape[-3:], k.shape[-2], v.shape[-3]
    n_h = n_x
    for part in (logits_projection, query_logits, key_logits):
        n_h = n_h if part is None else part.shape[-1]
    for part in (weights_projection, query_weights, key_weights):
        n_h = n_h if part is None else part.shape[-2]

    def coefficients(static: Any, by_query: Any, by_key: Any, n: int, m: int) -> np.ndarray:
        """(..., n, m, q, k)"""
        total = np.zeros((*lead, n, m, rows, columns))
        total += (np.eye(n, m) if static is None else static)[:, :, None, None]
        if by_query is not None:
            total += np.moveaxis(np.broadcast_to(by_query, (*lead, rows, n, m)), -3, -1)[..., None]
        if by_key is not None:
            total += np.moveaxis(np.broadcast_to(by_key, (*lead, columns, n, m)), -3, -1)[..., None, :]
        return total

    given = shared.get("scale")
    scale = (channels**-0.5 if channels else 1.0) if given is None else float(np.reshape(given, ()))
    with np.errstate(all="ignore"):
        before = coefficients(logits_projection, query_logits, key_logits, n_x, n_h)
        logits = np.zeros((*lead, n_h, rows, columns))
        for at in np.ndindex(*lead, rows):
            batch, i = at[:-1], at[-1]
            for x in range(n_x):
                products = scale * (q[(*batch, x, i)] * k[(*batch, x)]).sum(-1)
                for h in range(n_h):
                    coefficient = before[(*batch, x, h, i)]
                    logits[(*batch, h, i)] += np.where(coefficient == 0, 0.0, coefficient * products)

        softmax = _softmax(logits, **shared)
        pairs = {n: shared[n] for n in _VISIBILITY if n in shared}
        visible = dense_definition.visible_pairs(lead, n_h, rows, columns, **pairs) & (softmax.logits != -np.inf)
        behind = coefficients(weights_projection, query_weights, key_weights, n_h, n_y)
        output = np.zeros((*lead, n_y, rows, v.shape[-1]))
        for at in np.ndindex(*lead, n_y, rows):
            batch, y, i = at[:-2], at[-2], at[-1]
            for j in range(columns):
                mixed, reached = 0.0, False
                for h in range(n_h):
                    coefficient = behind[(*batch, h, y, i, j)]
                    if visible[(*batch, h, i, j)] and coefficient != 0:
                        mixed, reached = mixed + coefficient * softmax.weights[(*batch, h, i, j)], True
                if reached:
                    output[at] += mixed * v[(*batch, y, j)]
    fields = {"output": output, "lse": softmax.lse}
    if shared.get("keep_weights"):
        fields |= {"weights": softmax.weights, "logits": softmax.logits}
    return Result(**fields)


def _softmax(logits: np.ndarray, *, score_mod: Any = None, **shared: Any) -> Result:
    """The dense definition on given logits (..., h, q, k): it asks for them where it would modify its own, which are 0."""
    lead, (h, q, k) = logits.shape[:-3], logits.shape[-3:]
    flat = logits.reshape(math.prod(lead), h, q, k)

    def given(_: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return flat[b, h, i, j] if score_mod is None else score_mod(flat[b, h, i, j], b, h, i, j)

    nothing: dict[str, Any] = {
        "q": np.zeros((*lead, h, q, 1)),
        "k": np.zeros((*lead, 1, k, 1)),
        "v": np.zeros((*lead, 1, k, 0)),
    }
    return dense_definition.definition(**nothing, **{**shared, "scale": 1.0, "score_mod": given, "keep_weights": True})
