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
    untouched = xp.all(d_normal == 0, axis=-1, keepdims=True)  # masked tokens, NaN or not
    return xp.where(untouched, xp.zeros_like(d_x), d_x)


def nearest_centroid(x: Any, centroids: Any) -> Any:
    """Index of the centroid with the largest product, x (t, d) and centroids (c, d) -> (t,); ties to the first."""
    return namespace(x).argmax(einsum("td,cd->tc", real(x), real(centroids)), axis=-1)


class Routed:
    """What meets the centroids: an array (b, h, t, d) after its normalisation and projection."""

    def __init__(self, x: Any, keep: Any, projection: Any) -> None:
        self.keep, self.projection = keep, projection
        self.x = x if projection is None else einsum("bhtd,df->bhtf", x, projection)
        self.centroids: Any = None
        self.nearest: list[Any] | None = None  # of every head (t,): index of the nearest centroid

    def _by_head(self, function: Any, backend: Any, work: int) -> list[Any]:
        """function(b, h) of every head."""
        b, h = self.x.shape[:2]
        return backend.map(lambda n: function(*divmod(n, h)), range(b * h), work=work)

    def members(self, centroids: Any, width: int, backend: Any) -> Any:
        """Positions of the tokens with the largest products, int64 (b, h, c, w): in rising order, -1 for none last."""
        xp = backend.xp
        b, h, t, _ = self.x.shape
        c = centroids.shape[-2]
        if 0 in (b, h, width):
            return xp.zeros((b, h, c, width), dtype=xp.int64)

        def of_head(b: int, g: int) -> Any:
            scores = einsum("cd,td->ct", real(centroids)[g, ...], real(self.x)[b, g, ...])
            if self.keep is not None:
                scores = xp.where(self.keep[b, ...], scores, xp.full_like(scores, -math.inf))
            found = xp.astype(backend.largest(scores, width), xp.int64)
            if self.keep is None:
                return found
            alive = xp.reshape(xp.take(self.keep[b, 0, ...], xp.reshape(found, (-1,))), found.shape)
            found = xp.sort(xp.where(alive, found, xp.full_like(found, t)), axis=-1)
            return xp.where(found == t, xp.full_like(found, -1), found)

        found = xp.stack(self._by_head(of_head, backend, 8 * b * h * t * c))
        return xp.reshape(found, (b, h, c, width))

    def loss(self, centroids: Any, backend: Any) -> tuple[Any, int]:
        """The sum of squared distances to the nearest centroids, and how many tokens it is over."""
        xp = backend.xp
        b, h, t, _ = self.x.shape
        self.centroids = centroids
        if 0 in (b, h, t):
            return xp.sum(self.x), 0

        def of_head(b: int, g: int) -> tuple[Any, Any]:
            nearest = nearest_centroid(self.x[b, g, ...], centroids[g, ...])
            gap = self._gap(b, g, nearest)
            return nearest, xp.sum(gap * gap)

        found = self._by_head(of_head, backend, 2 * b * h * t * centroids.shape[-2])
        self.nearest = [nearest for nearest, _ in found]
        return sum(x for _, x in found), b * h * t if self.keep is None else h * int(xp.count_nonzero(self.keep))

    def _gap(self, b: int, g: int, nearest: Any) -> Any:
        """x - nearest centroid (t, d), 0 for masked tokens."""
        xp = namespace(self.x)
        gap = self.x[b, g, ...] - xp.take(self.centroids[g, ...], nearest, axis=0)
        return gap if self.keep is None else xp.where(self.keep[b, 0, :, None], gap, xp.zeros_like(gap))

    def backward(self, factor: Any) -> Any:
        """Cotangent of the array that was given: factor (x - nearest centroid), back through the projection."""
        if self.nearest is None:
            return namespace(self.x).zeros_like(self.x)
        h = self.x.shape[1]
        gaps = [self._gap(n // h, n % h, nearest) * factor for n, nearest in enumerate(self.nearest)]
        d_x = namespace(self.x).reshape(namespace(self.x).stack(gaps), self.x.shape)
        return d_x if self.projection is None else einsum("bhtf,df->bhtd", d_x, self.projection)
