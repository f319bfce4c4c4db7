"""Talking-Heads attention in steps: every projection over the heads as a coefficient for each pair of heads and positions.

    products = scale q.k      logits = sum_x products L[x,h]      weights = softmax(logits)      output = (sum_h weights W[h,y]) . v

Axes: ``...`` any leading batch axes, ``x`` key head, ``h`` softmax head, ``y`` value head, ``q`` and ``k`` positions, ``d`` and ``e``
channels.

Source: Shazeer et al. 2020, arXiv:2003.02436 (with its dynamic projections).
"""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import Definition, contract, einsum, step

__all__ = ["SoftmaxOfLogits", "TalkingHeads", "definition"]

SHARED = tuple(
    n
    for n in ScaledDotProduct.defaults
    if n not in ("scale", "sinks", "lse_includes_sinks", "head_map", "extra_keys")
    and n not in ("indices", "block_indices", "block", "duplicates")
)
PARTS = ("logits_projection", "query_logits", "key_logits", "weights_projection", "query_weights", "key_weights")


class SoftmaxOfLogits(ScaledDotProduct):
    """Softmax attention whose products are given, (..., h, q, k), and whose values are a unit vector for each key.

    Its output is the weights after dropout.
    """

    results = {"output": "output", "lse": "lse"}
    scale = 1.0

    @step
    def products(self):
        return self.given_products

    @step
    def lead(self):
        return self.given_products.shape[:-3]

    @step
    def q(self):
        """Queries and keys of these products, for those who ask."""
        return np.where(np.isfinite(self.given_products), self.given_products, 0.0)

    @step
    def k(self):
        return np.eye(self.keys)[None]

    @step
    def v(self):
        return self.k

    @property
    def keys(self):
        """Without asking for ``k``, which is as large as the square of their number."""
        return self.given_products.shape[-1]

    @property
    def channels(self):
        return self.keys

    @property
    def key_heads(self):
        return 1

    @step
    def output(self):
        return self.used_weights

    @step
    def d_used_weights(self):
        return np.where(self.touched, self.d_output, 0.0)


class TalkingHeads(Definition):
    """A projection left out is the identity.  Everything shared is about the softmax heads; a coefficient of 0 lets nothing through."""

    gradients = ("q", "k", "v", *PARTS, "scale", *(n for n in ScaledDotProduct.gradients if n in SHARED))
    defaults = {**dict.fromkeys(PARTS), "scale": None, **{n: ScaledDotProduct.defaults[n] for n in SHARED}}
    inner = SoftmaxOfLogits

    def result_fields(self):
        kept = ("weights", "logits") if self.keep_weights else ()
        return {"output": "output", "lse": "lse", **{n: n for n in kept}}

    # ------------------------------------------------------------------ sizes, coefficients

    @step
    def lead(self):
        """The batch axes of all arrays together."""
        dynamic = (getattr(self, n) for n in PARTS if not n.endswith("projection"))
        given = [self.q, self.k, self.v, *(x for x in dynamic if x is not None)]
        return np.broadcast_shapes(*(x.shape[:-3] for x in given))

    @step
    def softmax_heads(self):
        for part in (self.logits_projection, self.query_logits, self.key_logits):
            if part is not None:
                return part.shape[-1]
        return self.q.shape[-3]

    def coefficients(self, static, by_query, by_key, n, m):
        """Static and dynamic parts together, (..., n, m, q, k)."""
        total = np.zeros((*self.lead, n, m, self.q.shape[-2], self.k.shape[-2]))
        total = total + (np.eye(n, m) if static is None else static)[:, :, None, None]
        if by_query is not None:
            total = total + np.moveaxis(by_query, -3, -1)[..., None]
        return total if by_key is None else total + np.moveaxis(by_key, -3, -1)[..., None, :]

    @step
    def before(self):
        """L, from key heads to softmax heads, (..., x, h, q, k)."""
        heads = self.q.shape[-3], self.softmax_heads
        return self.coefficients(self.logits_projection, self.query_logits, self.key_logits, *heads)

    @step
    def behind(self):
        """W, from softmax heads to value heads, (..., h, y, q, k)."""
        heads = self.softmax_heads, self.v.shape[-3]
        return self.coefficients(self.weights_projection, self.query_weights, self.key_weights, *heads)

    # ------------------------------------------------------------------ forward

    @step
    def scale(self):
        given = self.argument("scale")
        return self.default_scale if given is None else np.reshape(given, ())[()]

    @step
    def default_scale(self):
        """d**-0.5"""
        return self.q.shape[-1] ** -0.5 if self.q.shape[-1] else 1.0

    @step
    def products(self):
        """q.k, (..., x, q, k)"""
        return einsum("...xqd,...xkd->...xqk", self.q, self.k)

    @step
    def projected(self):
        """sum_x scale q.k L, (..., h, q, k)"""
        return through(self.before, self.scale * self.products)

    @step
    def softmax(self):
        """Softmax over the keys of the projected products, with every shared option."""
        shared = {n: getattr(self, n) for n in SHARED}
        return self.begin(self.inner, {"given_products": self.projected, **shared})

    @step
    def lse(self):
        return self.softmax.lse

    @step
    def weights(self):
        """After dropout, (..., h, q, k)."""
        return self.softmax.output

    @step
    def logits(self):
        return self.softmax.shown_logits

    @step
    def seen(self):
        """What each softmax head sees of real rows."""
        return (self.softmax.seen & self.softmax.real_rows) | (self.weights != 0)

    @step
    def mixed(self):
        """sum_h weights W, (..., y, q, k)"""
        return through(self.behind, self.weights, self.seen)

    @step
    def reached(self):
        """Pairs that reach a value head, (..., y, q, k)."""
        return (self.seen[..., :, None, :, :] & (self.behind != 0)).any(-4)

    @step
    def output(self):
        return contract("...yqk,...yke->...yqe", self.mixed, self.v, self.reached)

    # ------------------------------------------------------------------ backward

    @step
    def d_output(self):
        return self.cotangent("output")

    @step
    def d_v(self):
        return contract("...yqk,...yqe->...yke", self.mixed, self.d_output, self.reached)

    @step
    def d_mixed(self):
        """dO . v"""
        return np.where(self.reached_by_any, einsum("...yqe,...yke->...yqk", self.d_output, self.v), 0.0)

    @step
    def reached_by_any(self):
        """Pairs that some softmax head sees."""
        return self.seen.any(-3, keepdims=True)

    @step
    def d_behind(self):
        """weights d_mixed, (..., h, y, q, k)"""
        share = self.weights[..., :, None, :, :] * self.d_mixed[..., None, :, :, :]
        return np.where(self.seen[..., :, None, :, :], share, 0.0)

    @step
    def d_weights(self):
        """sum_y d_mixed W"""
        return back(self.behind, self.d_mixed, self.seen)

    @step
    def pulled(self):
        """The softmax's gradients."""
        return self.softmax.pull(output=self.d_weights, lse=self.cotangent("lse"))

    @step
    def d_projected(self):
        return self.pulled.d_products

    @step
    def touched(self):
        return self.pulled.touched

    @step
    def d_before(self):
        """scale q.k d_projected, (..., x, h, q, k)"""
        share = self.scale * self.products[..., :, None, :, :] * self.d_projected[..., None, :, :, :]
        return np.where(self.touched[..., None, :, :, :], share, 0.0)

    @step
    def d_products(self):
        """sum_h d_projected L, without the scale"""
        return back(self.before, self.d_projected, True, self.touched)

    @step
    def products_touched(self):
        """Pairs of key heads that a softmax head reads, (..., x, q, k)."""
        return (self.touched[..., None, :, :, :] & (self.before != 0)).any(-3)

    @step
    def scale_of_gradients(self):
        return self.scale

    @step
    def d_q(self):
        d = self.scale_of_gradients * self.d_products
        return contract("...xqk,...xkd->...xqd", d, self.k, self.products_touched)

    @step
    def d_k(self):
        d = self.scale_of_gradients * self.d_products
        return contract("...xqk,...xqd->...xkd", d, self.q, self.products_touched)

    @step
    def d_scale(self):
        return np.where(self.products_touched, self.d_products * self.products, 0.0).sum()

    @step
    def d_logits_projection(self):
        return over_batch(self.d_before.sum((-1, -2)))

    @step
    def d_query_logits(self):
        return np.moveaxis(self.d_before.sum(-1), -1, -3)

    @step
    def d_key_logits(self):
        return np.moveaxis(self.d_before.sum(-2), -1, -3)

    @step
    def d_weights_projection(self):
        return over_batch(self.d_behind.sum((-1, -2)))

    @step
    def d_query_weights(self):
        return np.moveaxis(self.d_behind.sum(-1), -1, -3)

    @step
    def d_key_weights(self):
        return np.moveaxis(self.d_behind.sum(-2), -1, -3)

    @step
    def d_bias(self):
        return self.pulled.d_bias

    @step
    def d_softcap(self):
        return self.pulled.d_softcap

    @step
    def d_alibi_slopes(self):
        return self.pulled.d_alibi_slopes


def through(coefficients, x, seen=True):
    """sum_n x[n] c[n,m]; where c is 0, or x not seen, nothing goes through."""
    seen = np.broadcast_to(seen, x.shape)[..., :, None, :, :] & (coefficients != 0)
    return np.where(seen, coefficients * x[..., :, None, :, :], 0.0).sum(-4)


def back(coefficients, d, seen, touched=True):
    """sum_m d[m] c[n,m], where head n sees the pair and head m has a cotangent."""
    kept = np.ones(coefficients.shape, bool) & (coefficients != 0)
    kept &= np.asarray(seen)[..., :, None, :, :] if np.ndim(seen) else seen
    kept &= np.asarray(touched)[..., None, :, :, :] if np.ndim(touched) else touched
    return np.where(kept, coefficients * d[..., None, :, :, :], 0.0).sum(-3)


def over_batch(d):
    """(..., n, m) -> (n, m)"""
    return d.sum(axis=tuple(range(d.ndim - 2)))


definition = TalkingHeads
