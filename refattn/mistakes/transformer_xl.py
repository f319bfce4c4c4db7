"""How people get Transformer-XL attention wrong: distances and the shift, the two biases, the memory, their gradients."""

import numpy as np

from refattn.definitions.steps import contract, step
from refattn.definitions.transformer_xl import TransformerXL
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.scaled_dot_product import catalogue as dense

catalogue = Catalogue(
    TransformerXL,
    built_on=dense,
    without=(
        "alibi_*", "cap_*", "drop_*", "gqa_*", "lengths_*", "pattern_drop", "score_mod_drop", "segments_*",
        "sink_*", "tail_*",
    ),
)  # fmt: skip
"""Without the mistakes with options that are not here."""


# ---------------------------------------------------------------------------------------------- the shift


@catalogue.mistake(why="x[:-1] in place of x[1:] after the reshape.")
class rel_shift_slice(TransformerXL):
    """the shift drops the last row in place of the first"""

    @step
    def line(self):
        if self.longest != self.queries - 1 or self.rows_of_table != self.keys:
            return super().line
        n, k = self.queries, self.keys
        line = np.arange(n * (k + 1)).reshape(k + 1, n)[:-1].reshape(n, k)
        return without_zero_column(line, k)


@catalogue.mistake(why="The causal shift is used in an encoder.")
class rel_shift_leak(TransformerXL):
    """beyond the edge of the shift stand the next query's scores"""

    @step
    def line(self):
        n, k = self.queries, self.keys
        if self.longest != n or self.rows_of_table != k + n:
            return super().line
        line = np.arange(n * (k + 1)).reshape(k + 1, n)[1:].reshape(n, k)
        place = without_zero_column(line, k)
        query, row = np.divmod(place, k)
        return np.where(
            place < 0, -1, query * self.rows_of_table + row + 1
        )  # row 1 of the long table is distance k - 1


@catalogue.mistake(why="Both matrices have the same shape, so that they can be added.")
class rel_shift_missing(TransformerXL):
    """scores by table row are added as if they were scores by key"""

    @step
    def row(self):
        return np.broadcast_to(self.key_stands, (self.queries, self.keys))


@catalogue.mistake(why="The positions are counted up, where the authors count down.")
class xl_distance_order(TransformerXL):
    """the table is read by rising distance"""

    @step
    def row(self):
        return self.rows_of_table - 1 - super().row


@catalogue.mistake(why="The distance of a token to itself is taken as 1.")
class xl_distance_off1(TransformerXL):
    """every distance is one too large"""

    @step
    def row(self):
        return super().row - 1


@catalogue.mistake(name="xl_distance_off1", why="A table without its row of distance 0.")
class xl_distance_short(TransformerXL):
    """every distance is one too small"""

    @step
    def row(self):
        return super().row + 1


@catalogue.mistake(why="Query 0 is placed at key 0.")
class xl_offset_missing(TransformerXL):
    """distances leave out the length of the memory"""

    @step
    def row(self):
        return super().row + (self.keys - self.queries)


@catalogue.mistake(why="i - j is taken within the segment, and its sign is lost.")
class xl_distance_signed(TransformerXL):
    """distances of keys on both sides are taken without their sign"""

    @step
    def row(self):
        longest = self.rows_of_table - (1 if self.argument("causal") else self.queries)  # the distance of row 0
        return longest - np.abs(longest - super().row)


@catalogue.mistake(why="Places are a refinement that most code lacks.")
class xl_places_ignored(TransformerXL):
    """distances count keys, whatever key_places says"""

    @step
    def row(self):
        return super().row - self.key_stands + np.arange(self.keys) + self.rows_lost

    @step
    def rows_lost(self):
        """Keys are counted back from the last place."""
        return int(self.key_stands[-1]) + 1 - self.keys if self.keys else 0


# ---------------------------------------------------------------------------------------------- biases and scale


@catalogue.mistake(why="The code calls them r_w_bias and r_r_bias, the paper u and v.")
class xl_uw_swapped(TransformerXL):
    """u meets the positions and w the keys"""

    @step
    def content_bias(self):
        return 0.0 if self.w is None else self.w[:, None, :]

    @step
    def place_bias(self):
        return 0.0 if self.u is None else self.u[:, None, :]

    @step
    def d_u(self):
        return self.d_place_query.sum(-2)

    @step
    def d_w(self):
        return self.d_content_query.sum(-2)


@catalogue.mistake(why="One bias is added to the query before it meets both.")
class xl_bias_shared(TransformerXL):
    """u is added once, for keys and positions"""

    @step
    def place_bias(self):
        return 0.0 if self.u is None else self.u[:, None, :]

    @step
    def d_u(self):
        return (self.d_content_query + self.d_place_query).sum(-2)

    d_w = 0.0


@catalogue.mistake(name="xl_bias_drop", why="The biases look like an extra.")
class xl_content_bias_drop(TransformerXL):
    """u is left out"""

    content_bias = 0.0
    d_u = 0.0


@catalogue.mistake(name="xl_bias_drop", why="The biases look like an extra.")
class xl_place_bias_drop(TransformerXL):
    """w is left out"""

    place_bias = 0.0
    d_w = 0.0


@catalogue.mistake(name="xl_bias_drop", why="The term with q . r is the one that everybody remembers.")
class xl_positions_drop(TransformerXL):
    """the positions are left out"""

    @step
    def place_products(self):
        return np.zeros_like(super().place_products)

    @step
    def d_table(self):
        return np.zeros_like(super().d_table)


class PositionsScaled(TransformerXL):
    """The positions have a factor of their own beside the scale."""

    factor = None

    @step
    def place_products(self):
        return self.factor * super().place_products

    @step
    def d_table(self):
        return self.factor * super().d_table


@catalogue.mistake(why="The scale is applied to q . k, and the positions are added afterwards.")
class xl_position_unscaled(PositionsScaled):
    """only the content part is scaled"""

    @step
    def factor(self):
        return 1 / self.scale

    @step
    def d_scale(self):
        return np.where(self.touched, self.d_scaled * self.content, 0.0).sum()


@catalogue.mistake(name="xl_position_unscaled", why="Both parts are scaled, and their sum once more.")
class xl_position_scaled_twice(PositionsScaled):
    """the position part is scaled twice"""

    @step
    def factor(self):
        return self.scale

    @step
    def d_scale(self):
        return super().d_scale + np.where(self.touched, self.d_scaled * self.place_products, 0.0).sum()


# ---------------------------------------------------------------------------------------------- memory and visibility


@catalogue.mistake(why="concat([segment, memory]).")
class memory_order(TransformerXL):
    """the memory stands after the segment"""

    @step
    def keys_read(self):
        return np.roll(np.arange(self.keys), self.queries)

    @step
    def keys_of_head(self):
        return super().keys_of_head[..., self.keys_read, :]

    @step
    def values_of_head(self):
        return super().values_of_head[..., self.keys_read, :]

    @step
    def d_k(self):
        return super().d_k[..., np.argsort(self.keys_read), :]

    @step
    def d_v(self):
        return super().d_v[..., np.argsort(self.keys_read), :]


@catalogue.mistake(why="Their PyTorch and their TensorFlow code differ by it.")
class xl_same_length_off1(TransformerXL):
    """same_length shows one key more"""

    @step
    def keys_shown(self):
        right = super().keys_shown
        return None if right is None else right + 1


@catalogue.mistake(name="xl_same_length_off1", why="The query itself is counted apart.")
class xl_same_length_short(TransformerXL):
    """same_length shows one key less"""

    @step
    def keys_shown(self):
        right = super().keys_shown
        return None if right is None else max(0, right - 1)


@catalogue.mistake(why="It is an option of the evaluation alone.")
class xl_same_length_ignored(TransformerXL):
    """same_length is not applied"""

    keys_shown = None


@catalogue.mistake(why="The mask of a square is used.")
class xl_causal_upper_left(TransformerXL):
    """the causal diagonal starts at key 0"""

    @step
    def offset(self):
        return np.zeros_like(super().offset)


@catalogue.mistake(name="memory_drop", why="The memory is empty in the first segment, where the test ends.")
class xl_memory_drop(TransformerXL):
    """the memory is not seen"""

    @step
    def visible(self):
        return super().visible & (self.j >= self.keys - self.queries)


@catalogue.mistake(
    name="memory_drop", why="A shift of 0 in the window of the mask hides the first slot (transformers#14832)."
)
class xl_first_slot_hidden(TransformerXL):
    """the oldest slot of the memory is not seen"""

    @step
    def visible(self):
        return super().visible & ((self.j > 0) | (self.keys <= self.queries))


# ---------------------------------------------------------------------------------------------- gradients


@catalogue.mistake(sides=("backward",), why="The memory is detached, and its keys and values with it.")
class xl_memory_detached(TransformerXL):
    """keys and values of the memory get no gradient"""

    @step
    def own(self):
        return (np.arange(self.keys) >= self.keys - self.queries)[:, None]

    @step
    def d_k(self):
        return np.where(self.own, super().d_k, 0.0)

    @step
    def d_v(self):
        return np.where(self.own, super().d_v, 0.0)


@catalogue.mistake(sides=("backward",), why="The shift's adjoint is a shift the other way, which is forgotten.")
class xl_shift_adjoint(TransformerXL):
    """the gradient is not shifted back to table rows"""

    @step
    def d_table(self):
        found = np.zeros((*self.pairs[:-1], self.rows_of_table))
        n = min(self.rows_of_table, self.keys)
        found[..., :n] = self.d_products[..., :n]
        return found

    @step
    def rows_touched(self):
        return np.ones((*self.pairs[:-1], self.rows_of_table), dtype=bool)


@catalogue.mistake(sides=("backward",), why="q is at hand, q + w is not.")
class xl_table_gradient(TransformerXL):
    """dr leaves out w"""

    @step
    def d_r(self):
        return contract("...hqp,...hqd->...hpd", self.d_table, self.q, self.rows_touched)


@catalogue.mistake(name="xl_table_gradient", sides=("backward",), why="q is at hand, q + u is not.")
class xl_key_gradient(TransformerXL):
    """dk leaves out u"""

    @step
    def d_keys_of_head(self):
        return contract("...hqk,...hqd->...hkd", self.d_products, self.q, self.touched)


@catalogue.mistake(sides=("backward",), why="du is dq summed, and dw too.")
class xl_bias_gradient(TransformerXL):
    """du and dw are both the whole query cotangent"""

    @step
    def d_u(self):
        return self.d_q.sum(-2)

    @step
    def d_w(self):
        return self.d_q.sum(-2)


@catalogue.mistake(name="xl_query_gradient", sides=("backward",), why="The position part is taken for a bias.")
class xl_query_of_keys_alone(TransformerXL):
    """dq leaves out the positions"""

    @step
    def d_q(self):
        return self.d_content_query


@catalogue.mistake(
    name="gradient_absent", sides=("backward",), why="Sinusoids are constants, so their projection seems to be."
)
class xl_table_absent(TransformerXL):
    """the table gets no gradient"""

    d_r = 0.0


@catalogue.mistake(name="scale_grad", sides=("backward",), why="Of two products one is scaled in the backward.")
class xl_table_gradient_unscaled(TransformerXL):
    """dr and dw are not scaled"""

    @step
    def d_r(self):
        return super().d_r / self.scale

    @step
    def d_w(self):
        return super().d_w / self.scale


def without_zero_column(line, n):
    """Places in rows of n + 1 with a zero first, as places in rows of n; -1 for the zero."""
    query, row = np.divmod(line, n + 1)
    return np.where(row == 0, -1, query * n + row - 1)
