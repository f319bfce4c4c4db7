"""Routing attention: normalisation, what meets the centroids, and whom they choose."""

import math
from typing import Any

from refattn.arrays import namespace, real
from refattn.contraction import einsum
from refattn.core.selections import take_order
from refattn.normalization import layer_norm, layer_norm_backward, unit_norm, unit_norm_backward

__all__ = ["Routed", "nearest_centroid", "normalise", "normalise_backward"]

LAYER_EPS, UNIT_EPS = 1e-6, 1e-12


def normalise(x: Any, kind: str | None) -> tuple[Any, Any]:
    """x normalised over channels, and the factor that its backward needs."""
    if kind is None:
        return x, None
    return layer_norm(x, LAYER_EPS) if kind == "layer" else unit_norm(x, UNIT_EPS)


def normalise_backward(done: tuple[Any, Any, str | None], d_normal: Any) -> Any:
    """Cotangent of x; ``done`` = (normalised x, factor, kind)."""
    normal, factor, kind = done
    if kind is None:
        return d_normal
    if kind == "layer":
        d_x = layer_norm_backward(normal, factor, d_normal)
    else:
        d_x = unit_norm_backward(normal, factor, d_normal, UNIT_EPS)
    xp = namespace(d_x)
    if bool(xp.isfinite(xp.sum(d_x))):
        return d_x
    untouched = xp.all(d_normal == 0, axis=-1, keepdims=True)  # masked tokens, NaN or not
    return xp.where(untouched, xp.zeros_like(d_x), d_x)


def nearest_centroid(x: Any, centroids: Any) -> Any:
    """Index of the centroid with the largest product, x (..., t, d) and centroids (..., c, d) -> (..., t); ties to the first."""
    return namespace(x).argmax(einsum("...td,...cd->...tc", real(x), real(centroids)), axis=-1)


class Routed:
    """What meets the centroids of n heads: an array (n, t, d) after its normalisation and projection; ``keep`` (n, t) or None."""

    def __init__(self, x: Any, keep: Any, projection: Any, centroids: Any) -> None:
        self.keep, self.projection, self.centroids = keep, projection, centroids
        self.x = x if projection is None else einsum("ntd,df->ntf", x, projection)
        self.nearest: Any = None  # (n, t)

    def members(self, width: int, backend: Any) -> Any:
        """Positions of the tokens with the largest products, int64 (n, c, w): in rising order, -1 for none last."""
        xp = backend.xp
        (n, t, _), c = self.x.shape, self.centroids.shape[-2]
        if 0 in (n, width):
            return xp.zeros((n, c, width), dtype=xp.int64)
        scores = einsum("ncd,ntd->nct", real(self.centroids), real(self.x))
        if self.keep is not None:
            scores = xp.where(self.keep[:, None, :], scores, xp.full_like(scores, -math.inf))
        found = xp.astype(backend.largest(scores, width), xp.int64)
        if self.keep is None:
            return found
        alive = take_order(self.keep[..., None], xp.reshape(found, (n, c * width)))
        found = xp.sort(xp.where(xp.reshape(alive, found.shape), found, xp.full_like(found, t)), axis=-1)
        return xp.where(found == t, xp.full_like(found, -1), found)

    def loss(self) -> Any:
        """The sum of squared distances to the nearest centroids."""
        if 0 not in self.x.shape[:2]:
            self.nearest = nearest_centroid(self.x, self.centroids)
        gaps = self._gaps()
        return namespace(gaps).sum(gaps * gaps)

    def _gaps(self) -> Any:
        """x - its nearest centroid, 0 for masked tokens."""
        xp = namespace(self.x)
        if self.nearest is None:
            return xp.zeros_like(self.x)
        gaps = self.x - take_order(self.centroids, self.nearest)
        return gaps if self.keep is None else xp.where(self.keep[..., None], gaps, xp.zeros_like(gaps))

    def backward(self, factor: Any) -> Any:
        """Cotangent of the array that was given: factor (x - nearest centroid), back through the projection."""
        d_x = self._gaps() * factor
        return d_x if self.projection is None else einsum("ntf,df->ntd", d_x, self.projection)
