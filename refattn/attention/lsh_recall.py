"""What the hash finds: how likely two vectors share a bucket, and how much of exact attention the windows hold.

    P(same sign of r.x and r.y)                      = 1 - angle / pi              2 buckets
    P(same argmax of [r.x, s.x, -r.x, -s.x])         = (1 - angle / pi)^2          4 buckets: the signs of (r + s).x, (r - s).x
    P(found in at least one of H rounds)             = 1 - (1 - p)^H               p the probability of one round

These functions look at small problems: they hold (s, t, t) arrays.

Source: Andoni et al. 2015, arXiv:1509.02897, section 3; Kitaev et al. 2020, arXiv:2001.04451, section 2 and table 2.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from refattn.arrays import require_integer
from refattn.attention.blocks.lsh_buckets import bucket_factors, hash_buckets, sort_buckets
from refattn.contraction import einsum

__all__ = ["collision_probability", "found_by_rounds", "found_pairs", "measured_collisions", "recall", "shown_pairs"]


def collision_probability(angle: Any, n_buckets: int) -> Any:
    """Probability that two vectors at this angle (radians) share one of 2 or 4 buckets: (1 - angle / pi)^(n_buckets / 2).

    Raises
    ------
    ValueError
        For any other number: there is no closed form, see :func:`measured_collisions`.

    >>> round(float(collision_probability(math.pi / 3, 4)), 4)
    0.4444
    """
    if n_buckets not in (2, 4):
        raise ValueError(f"n_buckets is {n_buckets}: expected 2 or 4, the numbers with a closed form")
    return (1 - np.asarray(angle) / math.pi) ** (n_buckets // 2)


def measured_collisions(
    angle: float, n_buckets: int | Sequence[int], *, d: int, rng: "np.random.Generator", samples: int = 10000
) -> float:
    """Share of ``samples`` random rotations under which two vectors (d,) at this angle share a bucket.

    Its standard error is sqrt(p (1 - p) / samples).
    """
    require_integer("d", d, minimum=2)
    require_integer("samples", samples, minimum=1)
    factors = bucket_factors(n_buckets, 0, 1)
    x = np.zeros((1, 1, 2, d))
    x[..., 0, 0] = 1.0
    x[..., 1, :2] = math.cos(angle), math.sin(angle)
    rotations = rng.standard_normal((1, 1, d, samples, sum(factors) // 2))
    buckets = hash_buckets(x, rotations, factors)
    return float(np.mean(buckets[..., 0] == buckets[..., 1]))


def found_by_rounds(p: Any, hashes: int) -> Any:
    """1 - (1 - p)^hashes: a pair that one round finds with probability p is found by independent rounds with this one.

    >>> float(found_by_rounds(0.5, 3))
    0.875
    """
    return 1 - (1 - np.asarray(p)) ** hashes


def shown_pairs(
    buckets: np.ndarray,
    *,
    chunk: int,
    before: int = 1,
    after: int = 0,
    within_bucket: bool = True,
    causal: bool = False,
    windows: bool = True,
) -> np.ndarray:
    """Which pairs each round shows: buckets (..., s, t) -> bool (..., s, t, t), no token to itself, no wrap-around.

    ``windows=False`` leaves the windows out: all pairs of one bucket, what a hash without chunks would show.
    """
    buckets = np.asarray(buckets)
    t = buckets.shape[-1]
    n = np.arange(t)
    seen = np.broadcast_to(n[None, :] < n[:, None] if causal else n[None, :] != n[:, None], (*buckets.shape, t))
    if windows:
        _, rank = sort_buckets(buckets)
        ahead = (rank // chunk)[..., None, :] - (rank // chunk)[..., :, None]
        seen = seen & (ahead >= -before) & (ahead <= after)
    return seen & (buckets[..., :, None] == buckets[..., None, :]) if within_bucket or not windows else seen


def found_pairs(shown: np.ndarray) -> np.ndarray:
    """(..., s, t, t) -> (..., s, t, t): what the first 1, 2 ... s rounds show together."""
    return np.logical_or.accumulate(shown, axis=-3)


def recall(
    qk: np.ndarray, found: np.ndarray, *, top: int = 8, scale: float | None = None, causal: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """How much of exact shared-QK attention some pairs hold.

    Parameters
    ----------
    qk : array (..., t, d)
        Queries; the keys are the same vectors with norm 1.
    found : bool array (..., s, t, t)
        Pairs of :func:`found_pairs` for 1 ... s rounds, or any others.
    top : int
        Largest logits a query.
    scale : float
        Default d**-0.5.

    Returns
    -------
    recall : array (..., s)
        Mean share of the ``top`` keys with the largest logits that are found, over the queries that have so many keys.
    mass : array (..., s)
        Mean share of the softmax weight that stands on found pairs, over the queries that have a key.
    """
    t, d = qk.shape[-2:]
    n = np.arange(t)
    allowed = n[None, :] < n[:, None] if causal else n[None, :] != n[:, None]
    keys = qk / np.sqrt(np.sum(qk * qk, axis=-1, keepdims=True))
    logits = np.where(allowed, (d**-0.5 if scale is None else scale) * einsum("...qd,...kd->...qk", qk, keys), -np.inf)
    some, enough = allowed.any(axis=-1), allowed.sum(axis=-1) >= top
    weights = np.exp(logits[..., some, :] - np.max(logits[..., some, :], axis=-1, keepdims=True))
    weights = weights / np.sum(weights, axis=-1, keepdims=True)
    mass = np.mean(np.sum(np.where(found[..., some, :], weights[..., None, :, :], 0.0), axis=-1), axis=-1)
    best = np.argsort(-logits, axis=-1, kind="stable")[..., None, :, :top]
    best = np.broadcast_to(best, (*found.shape[:-1], best.shape[-1]))
    hit = np.take_along_axis(found, best, axis=-1)
    return np.mean(hit[..., enough, :], axis=(-1, -2)), mass
