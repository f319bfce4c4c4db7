"""Transformer-XL attention in steps: softmax attention whose products have a part read from a table by distance.

    products = (q + u) . k + shift((q + w) . r)      logits = scale products + bias

The shift reads, for query i and key j, the row of their distance in the line of all (query, row) products.

Axes: ``...`` any leading batch axes, ``h`` head, ``q`` and ``k`` positions, ``p`` row of the table, ``d`` and ``e`` channels.

Source: Dai et al. 2019, arXiv:1901.02860, section 3.3 and appendix B.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import contract, einsum, step

__all__ = ["TransformerXL", "definition"]

TERMS = ("term_a", "term_b", "term_c", "term_d")


class TransformerXL(ScaledDotProduct):
    """The memory stands before the segment; table rows have falling distances; a pair whose row is missing reads 0."""

    gradients = (
        "q", "k", "v", "r", "u", "w", "position_bias", "absolute_q", "absolute_k", "bias", "scale",
    )  # fmt: skip
    defaults = {
        **ScaledDotProduct.defaults, "causal": True, "align": "lower_right", "r": None, "u": None, "w": None,
        "absolute_q": None, "absolute_k": None, "same_length": False, "key_places": None, "keep_terms": False,
    }  # fmt: skip

    def result_fields(self):
        terms = TERMS if self.keep_terms else ()
        return {**super().result_fields(), **{n: n for n in terms}}

    @step
    def lead(self):
        """The batch axes of all arrays together."""
        arrays = (self.q, self.k, self.v, self.r, self.absolute_q, self.absolute_k)
        return np.broadcast_shapes(*(x.shape[:-3] for x in arrays if x is not None))

    # ------------------------------------------------------------------ who sees whom

    @step
    def keys_shown(self):
        """How many of the newest keys a query sees, itself included; None: all."""
        if self.same_length is False:
            return None
        return self.keys - self.queries if self.same_length is True else self.same_length

    @step
    def window(self):
        return None if self.keys_shown is None else (self.keys_shown - 1, None)

    # ------------------------------------------------------------------ distances and the table

    @step
    def key_stands(self):
        """Where each key stands, (k,)."""
        return np.arange(self.keys) if self.key_places is None else np.asarray(self.key_places)

    @step
    def rows_of_table(self):
        """Rows of the table: one per place, and one per query more where both directions are seen."""
        span = int(self.key_stands[-1]) + 1 if self.keys else 0
        return span if self.argument("causal") else span + self.queries

    @step
    def longest(self):
        """Row 0 of the table holds the distance of the last query to place 0, or one more."""
        return self.queries - 1 if self.argument("causal") else self.queries

    @step
    def row(self):
        """The table row of query i and key j: by how much their distance is below the longest."""
        return self.key_stands + self.longest - self.i

    @step
    def line(self):
        """The place of each pair in the line of all (query, row) products; -1 reads 0."""
        present = (self.row >= 0) & (self.row < self.rows_of_table)
        return np.where(present, self.i * self.rows_of_table + self.row, -1)

    # ------------------------------------------------------------------ logits

    @step
    def content_bias(self):
        """u, which meets the keys, (h, 1, d)."""
        return 0.0 if self.u is None else self.u[:, None, :]

    @step
    def place_bias(self):
        """w, which meets the positions, (h, 1, d)."""
        return 0.0 if self.w is None else self.w[:, None, :]

    @step
    def content_query(self):
        """q + u, or q + absolute_q"""
        return self.q + (self.content_bias if self.absolute_q is None else self.absolute_q)

    @step
    def place_query(self):
        """q + w"""
        return self.q + self.place_bias

    @step
    def keys_of_head(self):
        """k, or k + absolute_k"""
        right = super().keys_of_head
        return right if self.absolute_k is None else right + self.absolute_k

    @step
    def content(self):
        """(q + u) . k"""
        return einsum("...hqd,...hkd->...hqk", self.content_query, self.keys_of_head)

    @step
    def scalars(self):
        """Learned scalars in place of w . r, (h, 1, p)."""
        given = self.argument("position_bias")
        return 0.0 if given is None else given[:, None, :]

    @step
    def table(self):
        """(q + w) . r + scalars, (..., h, q, p)"""
        shape = (*self.lead, self.heads, self.queries, self.rows_of_table)
        found = np.zeros(shape) + self.scalars
        return found if self.r is None else found + einsum("...hqd,...hpd->...hqp", self.place_query, self.r)

    @step
    def place_products(self):
        """The table's products shifted to keys, (..., h, q, k)"""
        return shifted(self.table, self.line)

    @step
    def products(self):
        """(q + u) . k + shift((q + w) . r)"""
        return self.content + self.place_products

    @step
    def term_a(self):
        """scale q . k"""
        return np.broadcast_to(self.scale * einsum("...hqd,...hkd->...hqk", self.q, self.k), self.pairs)

    @step
    def term_b(self):
        """scale q . r, or scale q . absolute_k"""
        if self.absolute_k is not None:
            return self.whole_term(einsum("...hqd,...hkd->...hqk", self.q, self.absolute_k))
        return self.whole_term(0.0 if self.r is None else self.term_by_row(self.q))

    @step
    def term_c(self):
        """scale u . k, or scale absolute_q . k"""
        if self.absolute_q is not None:
            return self.whole_term(einsum("...hqd,...hkd->...hqk", self.absolute_q, self.k))
        return self.whole_term(0.0 if self.u is None else einsum("hqd,...hkd->...hqk", self.u[:, None, :], self.k))

    @step
    def term_d(self):
        """scale w . r, or scale absolute_q . absolute_k"""
        if self.absolute_q is not None:
            return self.whole_term(einsum("...hqd,...hkd->...hqk", self.absolute_q, self.absolute_k))
        if self.argument("position_bias") is not None:
            rows = (*self.pairs[:-1], self.rows_of_table)
            return self.whole_term(shifted(np.broadcast_to(self.scalars, rows), self.line))
        return self.whole_term(0.0 if self.w is None else self.term_by_row(self.w[:, None, :]))

    def term_by_row(self, query):
        products = einsum("...hqd,...hpd->...hqp", query, self.r)
        return shifted(np.broadcast_to(products, (*self.pairs[:-1], self.rows_of_table)), self.line)

    def whole_term(self, x):
        return np.broadcast_to(self.scale * x, self.pairs)

    # ------------------------------------------------------------------ backward

    @step
    def d_content_query(self):
        """d_products . k"""
        return contract("...hqk,...hkd->...hqd", self.d_products, self.keys_of_head, self.touched)

    @step
    def d_keys_of_head(self):
        """d_products^T . (q + u)"""
        return contract("...hqk,...hqd->...hkd", self.d_products, self.content_query, self.touched)

    @step
    def d_table(self):
        """The cotangents of the pairs, added up at the (query, row) products that they were read from."""
        return unshifted(self.d_products, self.line, self.rows_of_table)

    @step
    def rows_touched(self):
        """Products of the table that a touched pair reads."""
        return unshifted(1.0 * np.broadcast_to(self.touched, self.pairs), self.line, self.rows_of_table) != 0

    @step
    def d_place_query(self):
        """d_table . r"""
        if self.r is None:
            return np.zeros((*self.pairs[:-1], self.channels))
        return contract("...hqp,...hpd->...hqd", self.d_table, self.r, self.rows_touched)

    @step
    def d_q(self):
        """Of both queries: q + u and q + w"""
        return self.d_content_query + self.d_place_query

    @step
    def d_u(self):
        """The sum of d(q + u) over the queries"""
        return self.d_content_query.sum(-2)

    @step
    def d_w(self):
        """The sum of d(q + w) over the queries"""
        return self.d_place_query.sum(-2)

    @step
    def d_r(self):
        """d_table^T . (q + w)"""
        return contract("...hqp,...hqd->...hpd", self.d_table, self.place_query, self.rows_touched)

    @step
    def d_position_bias(self):
        """The sum of d_table over the queries"""
        return self.d_table.sum(-2)

    @step
    def d_absolute_q(self):
        return self.d_content_query

    @step
    def d_absolute_k(self):
        return self.d_keys_of_head


def shifted(table, line):
    """Of every row of (query, table row) products, laid out as one line, the entries at ``line``; 0 at -1."""
    flat = table.reshape(*table.shape[:-2], table.shape[-2] * table.shape[-1])
    flat = np.concatenate([flat, np.zeros((*flat.shape[:-1], 1))], axis=-1)
    return flat[..., line]


def unshifted(d_pairs, line, rows):
    """The adjoint of :func:`shifted`: (..., q, k) -> (..., q, rows)."""
    lead, (queries, keys) = d_pairs.shape[:-2], d_pairs.shape[-2:]
    flat = np.zeros((queries * rows + 1, *lead))
    np.add.at(flat, line.reshape(-1), np.moveaxis(d_pairs.reshape(*lead, queries * keys), -1, 0))
    return np.moveaxis(flat[:-1], 0, -1).reshape(*lead, queries, rows)


definition = TransformerXL
