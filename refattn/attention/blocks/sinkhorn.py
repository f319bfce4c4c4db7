"""Sinkhorn's balancing of a matrix in logarithms, half step by half step, forward and backward."""

import math
from typing import Any

import numpy as np

from refattn.arrays import namespace, real
from refattn.normalization import row_maximum

__all__ = ["balance", "balance_backward", "exp", "where"]


def where(seen: Any, x: Any) -> Any:
    return namespace(x).where(seen, x, namespace(x).zeros_like(x))


def exp(x: Any) -> Any:
    """exp, 0 at -inf (also in complex arithmetic)."""
    seen = real(x) != -math.inf
    return where(seen, namespace(x).exp(where(seen, x)))


def _over_last(x: Any) -> Any:
    """x - logsumexp over the last axis; -inf stays."""
    xp = namespace(x)
    seen = real(x) != -math.inf
    _, shift = row_maximum(x)
    total = xp.sum(where(seen, xp.exp(where(seen, x) - shift[..., None])), axis=-1)
    total = xp.where(xp.any(seen, axis=-1), total, xp.ones_like(total))
    return xp.where(seen, x - (xp.log(total) + shift)[..., None], x)


def _over_last_backward(y: Any, d_y: Any) -> Any:
    """dx = dy - exp(y) sum(dy)."""
    xp = namespace(y)
    d_y = where(real(y) != -math.inf, d_y)
    return d_y - exp(y) * xp.sum(d_y, axis=-1, keepdims=True)


def _down(x: Any) -> tuple[Any, Any]:
    """x - logsumexp over the rows up to one's own, and these running sums (..., u, v); -inf stays."""
    xp = namespace(x)
    sums = [x[..., 0, :]]
    for u in range(1, x.shape[-2]):
        before, own = sums[-1], x[..., u, :]
        top = xp.where(real(before) > real(own), real(before), real(own))
        empty = top == -math.inf
        shift = xp.where(empty, xp.zeros_like(top), top)
        total = sum(exp(xp.where(real(y) == -math.inf, y, y - shift)) for y in (before, own))
        sums.append(xp.where(empty, own, xp.log(xp.where(empty, xp.ones_like(total), total)) + shift))
    running = xp.stack(sums, axis=-2)
    seen = real(x) != -math.inf
    return xp.where(seen, x - where(seen, running), x), running


def _down_backward(y: Any, running: Any, d_y: Any) -> Any:
    """dx[u] = dy[u] - exp(y[u]) a[u],  a[u] = dy[u] + exp(s[u] - s[u + 1]) a[u + 1]: all later rows hold x[u] in their sum s."""
    xp = namespace(y)
    d_y = where(real(y) != -math.inf, d_y)
    later = [d_y[..., -1, :]]
    for u in range(y.shape[-2] - 2, -1, -1):
        own, following = running[..., u, :], running[..., u + 1, :]
        seen = real(own) != -math.inf
        ratio = where(seen, xp.exp(where(seen, own) - where(seen, following)))
        later.append(d_y[..., u, :] + ratio * later[-1])
    return d_y - exp(y) * xp.stack(later[::-1], axis=-2)


def balance(scores: Any, iterations: int, causal: bool) -> tuple[Any, list[Any]]:
    """ln R, and what each half step leaves for the backward."""
    xp = namespace(scores)
    x = scores
    steps: list[tuple[Any, Any]] = []
    if causal:
        places = xp.arange(scores.shape[-1])
        x = xp.where(places[:, None] > places[None, :], x, xp.full_like(x, -math.inf))
    if 0 in scores.shape:
        return x, steps
    with np.errstate(invalid="ignore"):
        for _ in range(iterations):
            x = _over_last(x)
            steps.append((x, None))
            if causal:
                x, running = _down(x)
                steps.append((x, running))
            else:
                turned = _over_last(xp.matrix_transpose(x))
                x = xp.matrix_transpose(turned)
                steps.append((turned, True))
    return x, steps


def balance_backward(steps: list[Any], d_x: Any) -> Any:
    """Cotangent of the scores from that of ln R, half step by half step from the last."""
    xp = namespace(d_x)
    for y, kind in reversed(steps):
        if kind is None:
            d_x = _over_last_backward(y, d_x)
        elif kind is True:
            d_x = xp.matrix_transpose(_over_last_backward(y, xp.matrix_transpose(d_x)))
        else:
            d_x = _down_backward(y, kind, d_x)
    return d_x
