"""Routing attention: normalisation, what meets the centroids, and whom they choose."""

import math
from typing import Any

from refattn.arrays import namespace, real
from refattn.contraction import einsum
from refattn.normalization import layer_norm, layer_norm_backward, unit_norm, unit_norm_backward

__all__ = ["Routed", "nearest_centroid", "normalise", "normalise_backward"]

LAYER_EPS, UNIT_EPS = 1e-6, 1e-12


def normalise(x: Any, kind: str | None) -> tuple[Any, Any]:
    """x normalised over channels, and the factor that its backward needs."""
    if kind is None:
        return x, None
    return layer_norm(x, LAYER_EPS) if kind == "layer" else unit_norm(x, UNIT_EPS)


def normalise_backward(normal: Any, factor: Any, kind: str | None, d_normal: Any) -> Any:
    if kind is None:
        return d_normal
    if kind == "layer":
        return layer_norm_backward(normal, factor, d_normal)
    return unit_norm_backward(normal, factor, d_normal, UNIT_EPS)


def nearest_centroid(x: Any, centroids: Any) -> Any:
    """Index of the centroid with the largest product, x (t, d) and centroids (c, d) -> (t,); ties to the first."""
    return namespace(x).argmax(einsum("td,cd->tc", real(x), real(centroids)), axis=-1)


class Routed:
    """What meets the centroids: x (b, h, t, d) normalised and projected, or the array of the logits projected."""

    def __init__(self, x: Any, normal: Any, keep: Any, kind: str | None, projection: Any) -> None:
        self.own = kind != "same"
        self.kind, self.keep, self.projection = kind, keep, projection
        self.normal, self.factor = normalise(x, kind) if self.own else (normal, None)
        self.x = self.normal if projection is None else einsum("bhtd,df->bhtf", self.normal, projection)
        self.gap: Any = None  # x - nearest centroid, 0 for masked tokens

    def _by_head(self, function: Any, backend: Any, work: int) -> Any:
        """function(b, h) of every head, stacked to (b, h, ...)."""
        xp = backend.xp
        b, h = self.x.shape[:2]
        found = backend.map(lambda n: function(*divmod(n, h)), range(b * h), work=work)
        stacked = xp.stack(found)
        return xp.reshape(stacked, (b, h, *stacked.shape[1:]))

    def members(self, centroids: Any, width: int, keep: Any, backend: Any) -> Any:
        """Positions of the tokens with the largest products, int64 (b, h, c, w): in rising order, -1 for none last."""
        xp = backend.xp
        b, h, t, _ = self.x.shape
        c = centroids.shape[-2]
        if 0 in (b, h, width):
            return xp.zeros((b, h, c, width), dtype=xp.int64)

        def of_head(b: int, g: int) -> Any:
            scores = einsum("cd,td->ct", real(centroids)[g, ...], real(self.x)[b, g, ...])
            if keep is not None:
                scores = xp.where(keep[b, ...], scores, xp.full_like(scores, -math.inf))
            found = xp.astype(backend.largest(scores, width), xp.int64)
            if keep is None:
                return found
            alive = xp.reshape(xp.take(keep[b, 0, ...], xp.reshape(found, (-1,))), found.shape)
            found = xp.sort(xp.where(alive, found, xp.full_like(found, t)), axis=-1)
            return xp.where(found == t, xp.full_like(found, -1), found)

        return self._by_head(of_head, backend, 8 * b * h * t * c)

    def measure(self, centroids: Any, backend: Any) -> int:
        """The distances to the nearest centroids; returns how many tokens they belong to."""
        xp = backend.xp
        b, h, t, _ = self.x.shape
        if 0 in (b, h, t):
            self.gap = self.x
            return 0

        def of_head(b: int, g: int) -> Any:
            own = self.x[b, g, ...]
            gap = own - xp.take(centroids[g, ...], nearest_centroid(own, centroids[g, ...]), axis=0)
            return gap if self.keep is None else xp.where(self.keep[b, 0, :, None], gap, xp.zeros_like(gap))

        self.gap = self._by_head(of_head, backend, 2 * b * h * t * centroids.shape[-2])
        return b * h * t if self.keep is None else h * int(xp.count_nonzero(self.keep))

    def backward(self, factor: Any) -> tuple[Any, Any]:
        """Cotangents of the array of the logits and of x, from gap * factor: one of them is 0."""
        d_x = self.gap * factor
        d_x = d_x if self.projection is None else einsum("bhtf,df->bhtd", d_x, self.projection)
        return (0.0, normalise_backward(self.normal, self.factor, self.kind, d_x)) if self.own else (d_x, 0.0)
