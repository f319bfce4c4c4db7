"""ETC attention in steps: one softmax attention of [global, long] with itself, with labels added to the keys.

    logits[h,i,j] = scale q[h,i] . (k[h,j] + labels[h,l(i,j)])         where row i sees key j

A long row sees the global keys and the long ones within the radius, a global row everything; l(i,j) between long tokens is
clip + min(max(j - i, -clip), clip), elsewhere as the tables say, -1 = none.

Source: Ainslie et al. 2020, arXiv:2004.08483; labels after Shaw, Uszkoreit, Vaswani 2018, arXiv:1803.02155.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct, per_batch
from refattn.definitions.steps import Definition, contract, einsum, step

__all__ = ["ETC", "LabelledKeys", "definition"]


class LabelledKeys(ScaledDotProduct):
    """Softmax attention over given pairs whose keys have a label each, another one for every query."""

    gradients = (*ScaledDotProduct.gradients, "labels")
    defaults = {**ScaledDotProduct.defaults, "labels": None, "label": None, "pairs_seen": True}

    @step
    def visible(self):
        """Given, and every option agrees."""
        return super().visible & self.pairs_seen[..., None, :, :]

    @step
    def labelled(self):
        """Pairs that have a label, (..., 1, q, k)"""
        return self.label[..., None, :, :] >= 0

    @step
    def label_products(self):
        """q . labels, (..., h, q, p)"""
        return einsum("...hqd,hpd->...hqp", self.q, self.labels)

    @step
    def label_term(self):
        """q . labels[l(i,j)], (..., h, q, k)"""
        index = np.broadcast_to(self.label[..., None, :, :], self.pairs)
        taken = np.take_along_axis(
            np.broadcast_to(self.label_products, (*self.pairs[:-1], self.labels.shape[-2])),
            np.maximum(index, 0),
            axis=-1,
        )
        return np.where(self.labelled, taken, 0.0)

    @step
    def products(self):
        """q . (k + label)"""
        return super().products if self.labels is None else super().products + self.label_term

    @step
    def d_label_products(self):
        """Sum of dS over the keys with this label, (..., h, q, p)"""
        share = np.where(self.touched, self.d_products, 0.0)
        label = self.label[..., None, :, :]
        return np.stack([np.where(label == p, share, 0.0).sum(-1) for p in range(self.labels.shape[-2])], axis=-1)

    @step
    def d_q_of_labels(self):
        """dS . label"""
        return einsum("...hqp,hpd->...hqd", self.d_label_products, self.labels)

    @step
    def d_q(self):
        """scale dS . (k + label)"""
        return super().d_q if self.labels is None else super().d_q + self.d_q_of_labels

    @step
    def d_labels(self):
        """Sum of dS q over the pairs with this label."""
        rows = np.broadcast_to(self.touched.any(-1, keepdims=True), self.d_label_products.shape)
        return contract("...hqp,...hqd->...hpd", self.d_label_products, self.q, rows)


class ETC(Definition):
    """The four pieces (global and long rows and keys) as one square matrix, global first."""

    results = {"output": "output", "output_global": "output_global"}
    gradients = ("q", "k", "v", "q_global", "k_global", "v_global", "labels", "scale")
    defaults = {
        "labels": None, "clip": None, "long_labels": None, "global_labels": None, "long_mask": None, "global_mask": None,
        "lengths": None, "global_lengths": None, "scale": None,
    }  # fmt: skip
    inner = LabelledKeys

    @property
    def long(self):
        return self.q.shape[-2]

    @property
    def globals(self):
        return self.q_global.shape[-2]

    @step
    def lead(self):
        """The batch axes of all arrays and tables together."""
        arrays = (self.q, self.k, self.v, self.q_global, self.k_global, self.v_global)
        tables = (self.long_labels, self.global_labels, self.long_mask, self.global_mask)
        return np.broadcast_shapes(
            *(x.shape[:-3] for x in arrays), *(np.shape(x)[:-2] for x in tables if x is not None)
        )

    @step
    def position(self):
        """Places in [global, long]; those of long tokens count from 0, those of global ones are negative."""
        return np.arange(self.globals + self.long) - self.globals

    # ------------------------------------------------------------------ who sees whom

    @step
    def query_is_long(self):
        """(n + t, 1)"""
        return self.position[:, None] >= 0

    @step
    def key_is_long(self):
        """(n + t,)"""
        return self.position >= 0

    @step
    def distance(self):
        """Key minus query, (n + t, n + t)"""
        return self.position - self.position[:, None]

    @step
    def long_to_long(self):
        """Within the radius."""
        return abs(self.distance) <= self.radius

    @step
    def long_to_global(self):
        """As long_mask says."""
        return self.placed(True, self.long_mask, True)

    @step
    def from_global(self):
        """As global_mask says."""
        return self.placed(True, self.global_mask, False)

    @step
    def real(self):
        """Which of [global, long] are no padding, (..., n + t)"""
        lengths = (
            self.globals if self.global_lengths is None else self.global_lengths,
            self.long if self.lengths is None else self.lengths,
        )
        ends = [per_batch(x, self.lead)[..., 0, 0] for x in lengths]
        return np.where(self.key_is_long, self.position < ends[1], self.position + self.globals < ends[0])

    @step
    def real_keys(self):
        """(..., 1, n + t)"""
        return self.real[..., None, :]

    @step
    def pairs_seen(self):
        """The four pieces together, without padding, (..., n + t, n + t)"""
        from_long = np.where(self.key_is_long, self.long_to_long, self.long_to_global)
        seen = np.where(self.query_is_long, from_long, self.from_global)
        return seen & self.real_keys & self.real[..., :, None]

    def placed(self, default, table, from_long):
        """A table of global keys for long queries, or of all keys for global ones, in its place of the square."""
        n, t = self.globals, self.long
        whole = np.full((*self.lead, n + t, n + t), default)
        if table is not None and from_long:
            whole[..., n:, :n] = table
        elif table is not None:
            whole[..., :n, :] = table
        return whole

    # ------------------------------------------------------------------ labels

    @step
    def largest_distance(self):
        """Longer distances take the label of this one."""
        if self.labels is None:
            return 0
        return self.labels.shape[-2] // 2 if self.clip is None else min(self.clip, self.long)

    @step
    def distance_label(self):
        """clip + min(max(distance, -clip), clip)"""
        most = self.largest_distance
        middle = self.labels.shape[-2] // 2 if self.clip is None else self.clip
        return middle + np.minimum(np.maximum(self.distance, -most), most)

    @step
    def label(self):
        """The label of every pair, -1 = none, (..., n + t, n + t)"""
        if self.labels is None:
            return None
        from_long = np.where(self.key_is_long, self.distance_label, self.placed(-1, self.long_labels, True))
        return np.where(self.query_is_long, from_long, self.placed(-1, self.global_labels, False))

    # ------------------------------------------------------------------ the attention

    def joined(self, first, second):
        """Arrays of global and long tokens, one after the other."""
        return np.concatenate([np.broadcast_to(x, (*self.lead, *x.shape[-3:])) for x in (first, second)], axis=-2)

    @step
    def given(self):
        """The arguments of the attention of [global, long]."""
        return {
            "q": self.joined(self.q_global, self.q), "k": self.joined(self.k_global, self.k),
            "v": self.joined(self.v_global, self.v), "labels": self.labels, "label": self.label,
            "pairs_seen": self.pairs_seen, "scale": self.scale,
        }  # fmt: skip

    @step
    def attention(self):
        """Softmax attention of [global, long] with itself."""
        return self.begin(self.inner, self.given)

    @step
    def output(self):
        """Rows of long tokens."""
        return self.attention.output[..., self.globals :, :]

    @step
    def output_global(self):
        """Rows of global tokens."""
        return self.attention.output[..., : self.globals, :]

    # ------------------------------------------------------------------ backward

    @step
    def d_attention(self):
        """The backward of all rows."""
        return self.attention.pull(output=self.joined(self.cotangent("output_global"), self.cotangent("output")))

    def rows(self, name, long):
        """The long or the global part of a cotangent of [global, long]."""
        whole = np.broadcast_to(getattr(self.d_attention, f"d_{name}"), self.given[name].shape)
        return whole[..., self.globals :, :] if long else whole[..., : self.globals, :]

    @step
    def d_q(self):
        return self.rows("q", long=True)

    @step
    def d_k(self):
        return self.rows("k", long=True)

    @step
    def d_v(self):
        return self.rows("v", long=True)

    @step
    def d_q_global(self):
        return self.rows("q", long=False)

    @step
    def d_k_global(self):
        return self.rows("k", long=False)

    @step
    def d_v_global(self):
        return self.rows("v", long=False)

    @step
    def d_labels(self):
        return self.d_attention.d_labels

    @step
    def d_scale(self):
        return self.d_attention.d_scale


definition = ETC
