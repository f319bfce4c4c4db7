"""Compressive Transformer attention in steps: projections around Transformer-XL attention over [compressed, memory, x].

    context = [compressed, memory, x]      q = x w_q      k = context w_k      v = context w_v      output = heads w_o

Axes: ``...`` any leading batch axes, ``q`` position in the segment, ``k`` row of the context, ``m`` model channel, ``h`` head,
``d`` and ``e`` channels.

Source: Rae et al. 2019, arXiv:1911.05507, section 3 and algorithm 1.
"""

import numpy as np

from refattn.definitions.steps import Definition, einsum, step
from refattn.definitions.transformer_xl import TERMS, TransformerXL

__all__ = ["Compressive", "definition"]

PASSED_ON = ("r", "u", "w", "bias", "mask", "scale", "same_length", "keep_weights", "keep_terms")


class Compressive(Definition):
    """Memories are constants unless ``through_memory``; w_k and w_v learn through their rows in either case."""

    gradients = ("x", "memory", "compressed", "w_q", "w_k", "w_v", "w_o", "r", "u", "w", "bias", "scale")
    defaults = {
        "memory": None, "compressed": None, "w_o": None, "compressed_positions": "slot", "rate": None,
        "through_memory": False, **dict.fromkeys(PASSED_ON), "same_length": False, "keep_weights": False, "keep_terms": False,
    }  # fmt: skip
    inner = TransformerXL

    def result_fields(self):
        kept = ("weights", "logits") if self.keep_weights else ()
        kept += TERMS if self.keep_terms else ()
        return {"output": "output", "lse": "lse", **{n: n for n in kept}}

    # ------------------------------------------------------------------ the context

    @step
    def lead(self):
        """The batch axes of x and the memories together."""
        return np.broadcast_shapes(*(x.shape[:-2] for x in (self.compressed, self.memory, self.x) if x is not None))

    @step
    def order(self):
        """The parts of the context, oldest first."""
        return tuple(n for n in ("compressed", "memory", "x") if self.argument(n) is not None)

    @step
    def parts(self):
        """Rows of each part, broadcast to the batch."""
        given = {n: getattr(self, n) for n in self.order}
        return {n: np.broadcast_to(x, (*self.lead, *x.shape[-2:])) for n, x in given.items()}

    @step
    def context(self):
        """[compressed, memory, x], (..., k, m)"""
        return np.concatenate([self.parts[n] for n in self.order], axis=-2)

    @step
    def within(self):
        """At which of the tokens that it stands for a compressed row is placed; None: rows count as one place each."""
        if self.compressed_positions == "slot":
            return None
        return self.rate - 1 if self.compressed_positions == "span_end" else self.rate // 2

    @step
    def places(self):
        """Where each row of the context stands; None: one after the other."""
        if self.within is None:
            return None
        old = 0 if self.compressed is None else self.compressed.shape[-2]
        rest = self.context.shape[-2] - old
        return np.concatenate([np.arange(old) * self.rate + self.within, old * self.rate + np.arange(rest)])

    # ------------------------------------------------------------------ forward

    @step
    def q(self):
        """x w_q, (..., h, q, d)"""
        return einsum("...qm,mhd->...hqd", self.x, self.w_q)

    @step
    def k(self):
        """context w_k, (..., h, k, d)"""
        return einsum("...km,mhd->...hkd", self.context, self.key_projection)

    @step
    def v(self):
        """context w_v, (..., h, k, e)"""
        return einsum("...km,mhe->...hke", self.context, self.value_projection)

    @step
    def key_projection(self):
        return self.w_k

    @step
    def value_projection(self):
        return self.w_v

    @step
    def attention(self):
        """Transformer-XL attention of q over k and v"""
        given = {"q": self.q, "k": self.k, "v": self.v, "key_places": self.places}
        given |= {n: getattr(self, n) for n in PASSED_ON}
        return self.begin(self.inner, {n: x for n, x in given.items() if x is not None})

    @step
    def heads(self):
        """The output per head, (..., h, q, e)"""
        return self.attention.output

    @step
    def output(self):
        """heads w_o"""
        return self.heads if self.w_o is None else einsum("...hqe,hem->...qm", self.heads, self.w_o)

    @step
    def lse(self):
        return self.attention.lse

    @step
    def weights(self):
        return self.attention.used_weights

    @step
    def logits(self):
        return self.attention.shown_logits

    @step
    def term_a(self):
        return self.attention.term_a

    @step
    def term_b(self):
        return self.attention.term_b

    @step
    def term_c(self):
        return self.attention.term_c

    @step
    def term_d(self):
        return self.attention.term_d

    # ------------------------------------------------------------------ backward

    @step
    def d_output(self):
        return self.cotangent("output")

    @step
    def d_heads(self):
        """d_output w_o^T"""
        return self.d_output if self.w_o is None else einsum("...qm,hem->...hqe", self.d_output, self.w_o)

    @step
    def d_attention(self):
        """The attention with the cotangents of its results."""
        return self.attention.pull(output=self.d_heads, lse=self.cotangent("lse"))

    @step
    def d_w_o(self):
        """heads^T . d_output"""
        return einsum("...hqe,...qm->hem", self.heads, self.d_output)

    @step
    def query_rows(self):
        """Rows through which w_q learns."""
        return self.x

    @step
    def key_rows(self):
        """Rows through which w_k learns."""
        return self.context

    @step
    def value_rows(self):
        """Rows through which w_v learns."""
        return self.context

    @step
    def d_w_q(self):
        """x^T . d_q"""
        return einsum("...hqm,...hqd->mhd", used_rows(self.query_rows, self.d_attention.d_q), self.d_attention.d_q)

    @step
    def d_w_k(self):
        """context^T . d_k"""
        return einsum("...hkm,...hkd->mhd", used_rows(self.key_rows, self.d_attention.d_k), self.d_attention.d_k)

    @step
    def d_w_v(self):
        """context^T . d_v"""
        return einsum("...hkm,...hke->mhe", used_rows(self.value_rows, self.d_attention.d_v), self.d_attention.d_v)

    @step
    def d_context(self):
        """d_k w_k^T + d_v w_v^T"""
        keys = einsum("...hkd,mhd->...km", self.d_attention.d_k, self.key_projection)
        return keys + einsum("...hke,mhe->...km", self.d_attention.d_v, self.value_projection)

    def d_part(self, name):
        """The rows of one part in d_context."""
        start = sum(self.parts[n].shape[-2] for n in self.order[: self.order.index(name)])
        return self.d_context[..., start : start + self.parts[name].shape[-2], :]

    @step
    def d_x(self):
        """Of the segment's own keys and values, and of its queries"""
        return self.d_part("x") + einsum("...hqd,mhd->...qm", self.d_attention.d_q, self.w_q)

    @step
    def memory_passes(self):
        """Whether memories get a gradient."""
        return self.through_memory

    @step
    def d_memory(self):
        return self.d_part("memory") if self.memory_passes else np.zeros_like(self.parts["memory"])

    @step
    def d_compressed(self):
        return self.d_part("compressed") if self.memory_passes else np.zeros_like(self.parts["compressed"])

    @step
    def d_r(self):
        return self.d_attention.d_r

    @step
    def d_u(self):
        return self.d_attention.d_u

    @step
    def d_w(self):
        return self.d_attention.d_w

    @step
    def d_bias(self):
        return self.d_attention.d_bias

    @step
    def d_scale(self):
        return self.d_attention.d_scale


def used_rows(rows, d):
    """Rows of a sequence for each head, 0 where the head has no cotangent ``d``: a row that nobody sees reaches no weight."""
    rows = rows[..., None, :, :]
    return rows if np.isfinite(rows).all() else np.where((d != 0).any(-1, keepdims=True), rows, 0.0)


definition = Compressive
