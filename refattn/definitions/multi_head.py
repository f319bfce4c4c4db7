"""Multi-head attention in steps: projections around softmax attention.

    q = x_q w_q + b_q      k = x_k w_k + b_k      v = x_v w_v + b_v      output = heads w_o + b_o

Axes: ``...`` any leading batch axes, ``h`` query head, ``g`` key head, ``q`` and ``k`` positions, ``t`` either of them, ``m`` model
channel, ``d`` and ``e`` channels.

Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct, per_batch
from refattn.definitions.steps import Definition, einsum, step, sum_to_shape

__all__ = ["MultiHead", "definition"]

SHARED = tuple(n for n in ScaledDotProduct.defaults if n != "extra_keys")
TOKENS = ("x_q", "x_k", "x_v")


class MultiHead(Definition):
    """x_k left out is x_q, x_v left out is x_k.  An extra key and a key of zeros stand behind the others, seen by every row."""

    gradients = (
        *("x_q", "x_k", "x_v", "w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o", "extra_key", "extra_value"),
        *(n for n in ScaledDotProduct.gradients if n not in "qkv"),
    )
    defaults = {
        "x_k": None, "x_v": None, "b_q": None, "b_k": None, "b_v": None, "b_o": None, "extra_key": None, "extra_value": None,
        "zero_attention": False, **{n: ScaledDotProduct.defaults[n] for n in SHARED},
    }  # fmt: skip
    inner = ScaledDotProduct

    def result_fields(self):
        kept = ("weights", "logits") if self.keep_weights else ()
        return {"output": "output", "lse": "lse", **{n: n for n in kept}}

    # ------------------------------------------------------------------ forward

    @step
    def role_of_keys(self):
        """The array that keys are made of."""
        return next(n for n in ("x_k", "x_q") if self.argument(n) is not None)

    @step
    def role_of_values(self):
        return next(n for n in ("x_v", "x_k", "x_q") if self.argument(n) is not None)

    @step
    def query_tokens(self):
        return self.x_q

    @step
    def key_tokens(self):
        return getattr(self, self.role_of_keys)

    @step
    def value_tokens(self):
        return getattr(self, self.role_of_values)

    @step
    def q(self):
        """x_q w_q + b_q, (..., h, q, d)"""
        return einsum("...tm,mhd->...htd", self.query_tokens, self.w_q) + across(self.b_q)

    @step
    def own_k(self):
        """x_k w_k + b_k, (..., g, k, d)"""
        return einsum("...tm,mhd->...htd", self.key_tokens, self.w_k) + across(self.b_k)

    @step
    def own_v(self):
        """x_v w_v + b_v, (..., g, k, e)"""
        return einsum("...tm,mhe->...hte", self.value_tokens, self.w_v) + across(self.b_v)

    @step
    def extra_of_keys(self):
        """What stands behind the keys, (g, n, d)."""
        rows = [] if self.extra_key is None else [self.extra_key]
        return stacked(rows + [self.zero_key] * bool(self.zero_attention), self.own_k)

    @step
    def extra_of_values(self):
        rows = [] if self.extra_value is None else [self.extra_value]
        return stacked(rows + [self.zero_value] * bool(self.zero_attention), self.own_v)

    @step
    def zero_key(self):
        return np.zeros((self.own_k.shape[-3], self.own_k.shape[-1]))

    @step
    def zero_value(self):
        return np.zeros((self.own_v.shape[-3], self.own_v.shape[-1]))

    @step
    def k(self):
        """The keys and the extra keys."""
        return behind(self.own_k, self.extra_of_keys)

    @step
    def v(self):
        return behind(self.own_v, self.extra_of_values)

    @step
    def attention(self):
        """Softmax attention of q, k and v, with every shared option."""
        shared = {n: getattr(self, n) for n in SHARED}
        extra = {"extra_keys": self.extra_of_keys.shape[-2]}
        return self.begin(self.inner, {"q": self.q, "k": self.k, "v": self.v, **extra, **shared})

    @step
    def heads_output(self):
        """(..., h, q, e)"""
        return self.attention.output

    @step
    def real_rows(self):
        """Rows that are no padding, (..., q, 1)."""
        queries, lead = self.q.shape[-2], self.heads_output.shape[:-3]
        lengths = per_batch(queries if self.query_lengths is None else self.query_lengths, lead)
        return (np.arange(queries) < lengths[..., 0, 0, :])[..., None]

    @step
    def output(self):
        """Sum over heads of o w_o, + b_o"""
        output = einsum("...hqe,hem->...qm", self.heads_output, self.w_o)
        return np.where(self.real_rows, output + (0.0 if self.b_o is None else self.b_o), 0.0)

    @step
    def lse(self):
        return self.attention.lse

    @step
    def weights(self):
        return self.attention.used_weights

    @step
    def logits(self):
        return self.attention.shown_logits

    # ------------------------------------------------------------------ backward

    @step
    def d_output(self):
        return np.where(self.real_rows, self.cotangent("output"), 0.0)

    @step
    def d_b_o(self):
        return self.d_output.sum(axis=tuple(range(self.d_output.ndim - 1)))

    @step
    def d_w_o(self):
        """o . dO over batch and rows"""
        return einsum("...hqe,...qm->hem", self.heads_output, self.d_output)

    @step
    def d_heads_output(self):
        return einsum("...qm,hem->...hqe", self.d_output, self.w_o)

    @step
    def pulled(self):
        """The attention's gradients."""
        return self.attention.pull(output=self.d_heads_output, lse=self.cotangent("lse"))

    @step
    def d_q(self):
        return self.pulled.d_q

    @step
    def d_k(self):
        """Of keys and extra keys."""
        return self.pulled.d_k

    @step
    def d_v(self):
        return self.pulled.d_v

    @step
    def d_own_k(self):
        return self.d_k[..., : self.own_k.shape[-2], :]

    @step
    def d_own_v(self):
        return self.d_v[..., : self.own_v.shape[-2], :]

    @step
    def d_extra_key(self):
        d = self.d_k[..., self.own_k.shape[-2], :]
        return d.sum(axis=tuple(range(d.ndim - 2)))

    @step
    def d_extra_value(self):
        d = self.d_v[..., self.own_v.shape[-2], :]
        return d.sum(axis=tuple(range(d.ndim - 2)))

    @step
    def d_w_q(self):
        """x . dq over batch and positions"""
        return einsum("...tm,...htd->mhd", met(self.query_tokens, self.d_q), self.d_q)

    @step
    def d_w_k(self):
        return einsum("...tm,...htd->mhd", met(self.key_tokens, self.d_own_k), self.d_own_k)

    @step
    def d_w_v(self):
        return einsum("...tm,...htd->mhd", met(self.value_tokens, self.d_own_v), self.d_own_v)

    @step
    def d_b_q(self):
        return over_tokens(self.d_q)

    @step
    def d_b_k(self):
        return over_tokens(self.d_own_k)

    @step
    def d_b_v(self):
        return over_tokens(self.d_own_v)

    @step
    def d_query_tokens(self):
        """dq . w_q"""
        return einsum("...htd,mhd->...tm", self.d_q, self.w_q)

    @step
    def d_key_tokens(self):
        return einsum("...htd,mhd->...tm", self.d_own_k, self.w_k)

    @step
    def d_value_tokens(self):
        return einsum("...hte,mhe->...tm", self.d_own_v, self.w_v)

    @step
    def d_roles(self):
        """The gradients of each array of tokens, one from every role that it has."""
        found = {n: [] for n in TOKENS}
        found["x_q"].append(self.d_query_tokens)
        found[self.role_of_keys].append(self.d_key_tokens)
        found[self.role_of_values].append(self.d_value_tokens)
        return {n: [sum_to_shape(d, self.argument(n).shape) for d in parts] for n, parts in found.items()}

    @step
    def d_x_q(self):
        """The sum over its roles."""
        return sum(self.d_roles["x_q"])

    @step
    def d_x_k(self):
        return sum(self.d_roles["x_k"], np.zeros(self.argument("x_k").shape))

    @step
    def d_x_v(self):
        return sum(self.d_roles["x_v"], np.zeros(self.argument("x_v").shape))


def _of_attention(name):
    """The gradient of a shared option: that of the attention."""

    @step
    def gradient(self):
        return getattr(self.pulled, f"d_{name}")

    gradient.name = f"d_{name}"
    return gradient


for _name in MultiHead.gradients:
    if _name in ScaledDotProduct.gradients:
        setattr(MultiHead, f"d_{_name}", _of_attention(_name))


def across(bias):
    """A bias (h, d) against (..., h, t, d)."""
    return 0.0 if bias is None else bias[:, None, :]


def stacked(rows, like):
    """Rows (g, d) as (g, n, d)."""
    return np.stack(rows, axis=1) if rows else np.zeros((like.shape[-3], 0, like.shape[-1]))


def behind(own, extra):
    """own (..., g, k, d) and extra (g, n, d) along the keys."""
    return np.concatenate([own, np.broadcast_to(extra, (*own.shape[:-2], *extra.shape[-2:]))], axis=-2)


def over_tokens(d):
    """(..., h, t, d) -> (h, d)"""
    return d.sum(axis=(*range(d.ndim - 3), -2))


def met(tokens, d):
    """The tokens, with zeros for those that no gradient belongs to: what stands in padding reaches nothing."""
    return tokens if np.isfinite(tokens).all() else np.where((d != 0).any((-3, -1))[..., None], tokens, 0.0)


definition = MultiHead
