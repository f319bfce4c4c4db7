"""How people get Linformer wrong: the projections along the positions; the attention itself is softmax attention."""

import numpy as np

from refattn.definitions.linformer import Linformer
from refattn.definitions.steps import einsum, step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.scaled_dot_product import catalogue as dense

catalogue = Catalogue(
    Linformer,
    built_on=dense,
    without=(
        "alibi_*", "bias_*", "cap_*", "causal_*", "dlse_ignored", "drop_*", "gqa_*", "keep_*", "lengths_*",
        "lse_*", "mask_*", "none_mask", "pattern_drop", "score_mod_drop", "segments_*", "sink_*", "tail_*",
        "window_*", "empty_row_nan", "bwd_mask_dropped", "merge_empty", "masked_value_leak",
    ),
)  # fmt: skip
"""Without the mistakes with options that are not here."""


@catalogue.mistake(why="Sharing the projections is an option of the paper, and the default of some code.")
class linformer_shared(Linformer):
    """the values are projected by e_k"""

    @step
    def value_projection(self):
        return self.e_k

    @step
    def d_e_k(self):
        return super().d_e_k + super().d_e_v

    d_e_v = 0.0


@catalogue.mistake(name="linformer_shared", why="The two tables are handed over in the other order.")
class linformer_exchanged(Linformer):
    """e_k projects the values and e_v the keys"""

    @step
    def key_projection(self):
        return self.e_v

    @step
    def value_projection(self):
        return self.e_k

    @step
    def d_e_k(self):
        return super().d_e_v

    @step
    def d_e_v(self):
        return super().d_e_k


@catalogue.mistake(why="A projection is taken for a pooling, whose weights sum to 1.")
class linformer_normalised(Linformer):
    """the columns of the projections are divided by the sums of their absolute entries"""

    @step
    def key_projection(self):
        return self.e_k / column_sizes(self.e_k)

    @step
    def value_projection(self):
        return self.e_v / column_sizes(self.e_v)

    @step
    def d_e_k(self):
        return through_columns(self.e_k, super().d_e_k)

    @step
    def d_e_v(self):
        return through_columns(self.e_v, super().d_e_v)


@catalogue.mistake(name="linformer_normalised", why="A softmax over the positions makes a learned pooling of it.")
class linformer_softmax(Linformer):
    """the columns of the projections go through a softmax over positions"""

    @step
    def key_projection(self):
        return column_softmax(self.e_k)

    @step
    def value_projection(self):
        return column_softmax(self.e_v)

    @step
    def d_e_k(self):
        p, d = self.key_projection, super().d_e_k
        return p * (d - (p * d).sum(0))

    @step
    def d_e_v(self):
        p, d = self.value_projection, super().d_e_v
        return p * (d - (p * d).sum(0))


@catalogue.mistake(why="E of the paper is e_k transposed; of a square table either reading runs.")
class linformer_transposed(Linformer):
    """square projections are applied transposed"""

    @step
    def turned(self):
        return self.e_k.shape[0] == self.e_k.shape[1]

    @step
    def key_projection(self):
        return self.e_k.T if self.turned else self.e_k

    @step
    def value_projection(self):
        return self.e_v.T if self.turned else self.e_v

    @step
    def d_e_k(self):
        return super().d_e_k.T if self.turned else super().d_e_k

    @step
    def d_e_v(self):
        return super().d_e_v.T if self.turned else super().d_e_v


@catalogue.mistake(why="Left padding in one place, right padding in the other.")
class linformer_rows_reversed(Linformer):
    """the tables are read from the last position backwards"""

    @step
    def key_projection(self):
        return self.e_k[::-1]

    @step
    def value_projection(self):
        return self.e_v[::-1]

    @step
    def d_e_k(self):
        return super().d_e_k[::-1]

    @step
    def d_e_v(self):
        return super().d_e_v[::-1]


@catalogue.mistake(name="step_dropped", why="Pooling alone, the paper's cheapest form, is left in.")
class linformer_pooled(Linformer):
    """keys and values are means over equal segments of the positions, whatever the tables say"""

    @step
    def key_projection(self):
        return pooling(self.e_k.shape)

    @step
    def value_projection(self):
        return pooling(self.e_v.shape)

    d_e_k = 0.0
    d_e_v = 0.0


@catalogue.mistake(
    name="step_dropped", why="The values keep their shape where n equals the length, so that nothing fails."
)
class linformer_values_unprojected(Linformer):
    """the first n values are taken as they are"""

    @step
    def value_projection(self):
        return np.eye(*self.e_v.shape)

    d_e_v = 0.0


@catalogue.mistake(why="The scale is that of a matrix with n columns.")
class linformer_scale(Linformer):
    """the default scale is that of the projected rows, n**-0.5"""

    @step
    def scale(self):
        return max(1, self.e_k.shape[1]) ** -0.5 if self.argument("scale") is None else self.argument("scale")


@catalogue.mistake(sides=("backward",), why="The tables are buffers.")
class linformer_grad(Linformer):
    """the projections get no gradient"""

    d_e_k = 0.0
    d_e_v = 0.0


@catalogue.mistake(name="linformer_grad", sides=("backward",), why="One of two parameters is not registered.")
class linformer_grad_of_values(Linformer):
    """e_v gets no gradient"""

    d_e_v = 0.0


@catalogue.mistake(
    name="linformer_grad", sides=("backward",), why="The tables are shared by all heads, and one head writes."
)
class linformer_grad_of_one_head(Linformer):
    """the projections get the gradient of the last head alone"""

    @step
    def d_e_k(self):
        return einsum("...kd,...nd->kn", self.k[..., -1, :, :], self.d_keys[..., -1, :, :])

    @step
    def d_e_v(self):
        return einsum("...ke,...ne->kn", self.v[..., -1, :, :], self.d_values[..., -1, :, :])


@catalogue.mistake(name="linformer_grad", sides=("backward",), why="A mean over the batch where a sum is due.")
class linformer_grad_mean(Linformer):
    """the gradients of the projections are means over heads"""

    @step
    def d_e_k(self):
        return super().d_e_k / self.k.shape[-3]

    @step
    def d_e_v(self):
        return super().d_e_v / self.v.shape[-3]


def column_sizes(table):
    sizes = np.abs(table).sum(0)
    return np.where(sizes == 0, 1.0, sizes)


def through_columns(table, d):
    """The cotangent of a table whose columns were divided by their sizes."""
    unit, sizes = table / column_sizes(table), column_sizes(table)
    return (d - np.sign(table) * (d * unit).sum(0)) / sizes


def column_softmax(table):
    grown = np.exp(table - table.max(0, initial=-np.inf))
    return grown / grown.sum(0)


def pooling(shape):
    """(k, n): position t belongs to segment t n // k."""
    positions, rows = shape
    member = np.arange(positions)[:, None] * rows // positions == np.arange(rows)
    return member / np.maximum(1, member.sum(0))
