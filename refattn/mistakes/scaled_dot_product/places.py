"""Mistakes about where numbers are read and written: batch entries, rows of the lse, tiles, whole arrays."""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct, finite
from refattn.definitions.steps import contract, step, sum_to_shape
from refattn.mistakes.scaled_dot_product.base import TILES, catalogue

# ---------------------------------------------------------------------- batch entries


class Crossed(ScaledDotProduct):
    """Another batch entry's array is read."""

    arrays, step_to = ("k",), 1

    @step
    def read_entry(self):
        """Which batch entry (flat) is read for each."""
        n = int(np.prod(self.lead))
        return np.zeros(n, int) if self.step_to is None else (np.arange(n) + self.step_to) % max(1, n)

    def read(self, name):
        given = self.argument(name)
        if name not in self.arrays:
            return given
        whole = np.broadcast_to(given, (*self.whole_lead, *given.shape[-3:]))
        flat = whole.reshape(-1, *given.shape[-3:])
        return flat[self.read_entry].reshape(whole.shape) if len(flat) else given

    @property
    def whole_lead(self):
        return np.broadcast_shapes(*(self.argument(n).shape[:-3] for n in "qkv"))

    @step
    def lead(self):
        return self.whole_lead

    def returned(self, name, d):
        """The adjoint of reading."""
        if name not in self.arrays:
            return d
        flat = np.broadcast_to(d, (*self.whole_lead, *d.shape[-3:])).reshape(-1, *d.shape[-3:])
        total = np.zeros(flat.shape, flat.dtype)
        np.add.at(total, self.read_entry, flat)
        return sum_to_shape(total.reshape((*self.whole_lead, *d.shape[-3:])), self.argument(name).shape)

    @step
    def q(self):
        return self.read("q")

    @step
    def k(self):
        return self.read("k")

    @step
    def v(self):
        return self.read("v")

    @step
    def d_q(self):
        return self.returned("q", super().d_q)

    @step
    def d_k(self):
        return self.returned("k", super().d_k)

    @step
    def d_v(self):
        return self.returned("v", super().d_v)


@catalogue.mistake(
    why="A batch stride is missing, or an index of the batch is shifted.",
    variants=[
        {"what": what, "arrays": arrays, "where": where, "step_to": step_to}
        for what, arrays in (("q", ("q",)), ("k", ("k",)), ("v", ("v",)), ("k and v", ("k", "v")))
        for where, step_to in (("batch entry 0", None), ("the next batch entry", 1), ("the batch entry before", -1))
    ],
)
class batch_crossed(Crossed):
    """{what} is that of {where}"""


@catalogue.mistake(
    name="batch_crossed",
    why="The index of the batch is shifted when results are stored.",
    variants=({"where": "next", "by": 1}, {"where": "previous", "by": -1}),
)
class batch_stored_crossed(ScaledDotProduct):
    """results of a batch entry stand in the {where} one's place"""

    by = 1

    def rolled(self, x, by):
        flat = x.reshape(-1, *x.shape[len(self.lead) :])
        return np.roll(flat, by, axis=0).reshape(x.shape) if self.lead else x

    @step
    def output(self):
        return self.rolled(super().output, self.by)

    @step
    def lse(self):
        return self.rolled(super().lse, self.by)

    @step
    def d_output(self):
        return self.rolled(super().d_output, -self.by)

    @step
    def d_lse(self):
        return self.rolled(super().d_lse, -self.by)

    @step
    def delta(self):
        if self.is_handed("output"):
            return super().delta
        output = self.rolled(self.output, -self.by)
        return np.where(self.real_rows, (self.d_output * output).sum(-1, keepdims=True), 0.0)


@catalogue.mistake(
    name="batch_crossed", why="Heads are the outer axis in one place, batch entries in the other.", sides=("forward",)
)
class batch_and_head_crossed(ScaledDotProduct):
    """results are stored as (head, batch) and read as (batch, head)"""

    def crossed(self, x):
        flat = x.reshape(-1, *x.shape[len(self.lead) :])
        return np.swapaxes(flat, 0, 1).reshape(x.shape)

    @step
    def output(self):
        return self.crossed(super().output)

    @step
    def lse(self):
        return self.crossed(super().lse)


# ---------------------------------------------------------------------- rows of the lse


class Packed(ScaledDotProduct):
    """Rows of all sequences behind one another, without padding."""

    @step
    def first_row(self):
        """Where the rows of each batch entry begin, and how many there are in all."""
        lengths = np.clip(self.real_queries.ravel(), 0, self.queries)
        return np.concatenate([[0], np.cumsum(lengths)])


@catalogue.mistake(
    why="The early exit of a sequence without keys computes its place in a dense array; the array is packed.",
    sides=("both", "forward"),
)
class lse_slot(Packed):
    """a sequence without keys writes its -inf over the lse of another; its own is 0"""

    @step
    def lse(self):
        right, n = super().lse, self.queries
        flat = right.reshape(-1, self.heads, n)
        total = self.first_row[-1]
        packed = np.zeros(self.heads * total)
        no_keys = np.broadcast_to(self.real_keys <= 0, (*self.lead, 1, 1, 1)).ravel()
        rows = np.diff(self.first_row)
        for b, start in enumerate(self.first_row[:-1]):
            for h in range(self.heads):
                if not no_keys[b]:
                    packed[h * total + start :][: rows[b]] = flat[b, h, : rows[b]]
        for b in np.flatnonzero(no_keys):
            for h in range(self.heads):
                packed[(b * self.heads + h) * n :][: rows[b]] = -np.inf
        found = np.full(flat.shape, -np.inf)
        for b, start in enumerate(self.first_row[:-1]):
            for h in range(self.heads):
                found[b, h, : rows[b]] = packed[h * total + start :][: rows[b]]
        return found.reshape(right.shape)


@catalogue.mistake(
    name="lse_slot",
    why="Row statistics are packed, and the kernel takes them for dense.",
    sides=("backward",),
    arrays=("sinks",),
)
class sink_slot(Packed):
    """the sinks' gradient reads the lse of ragged rows as if they were padded"""

    @step
    def sink_weights(self):
        flat = np.where(self.real_rows[..., 0], self.saved_lse, np.inf).reshape(-1, self.heads, self.queries)
        rows = np.diff(self.first_row)
        packed = np.concatenate([flat[b, :, : rows[b]] for b in range(len(rows))], axis=-1)
        read = np.full(flat.shape, np.inf)  # beyond the end: a weight of 0
        for b, n in enumerate(rows):
            there = packed[:, b * self.queries :][:, :n]
            read[b, :, : there.shape[-1]] = there
        read = read.reshape(self.saved_lse.shape)
        return np.where(self.real_rows, self.exponential(self.sink_logits - finite(read)), 0.0)


# ---------------------------------------------------------------------- tiles


def overrun(rows, tile):
    """How many rows the last tile reaches beyond an array of this length."""
    return min(rows, -rows % tile)


class Overrun(ScaledDotProduct):
    """Zeros in the first rows of every head but the first, which the last tile of the head before has written."""

    tile = 64

    def overwritten(self, x, rows):
        """x (..., head, row, ...), ``rows`` its axis of rows."""
        number = np.arange(int(np.prod(x.shape[:rows]))).reshape(x.shape[:rows])
        hit = (number[..., None] > 0) & (np.arange(x.shape[rows]) < overrun(x.shape[rows], self.tile))
        return np.where(hit.reshape(hit.shape + (1,) * (x.ndim - rows - 1)), 0.0, x)


@catalogue.mistake(why="Stores of whole tiles have no bound.", sides=("both", "forward"), variants=TILES)
class tile_overrun(Overrun):
    """the last tile of {tile} rows of the output runs over into the next head"""

    @step
    def output(self):
        return self.overwritten(super().output, len(self.lead) + 1)

    @step
    def d_output(self):
        return self.overwritten(super().d_output, len(self.lead) + 1)


@catalogue.mistake(name="tile_overrun", why="Stores of whole tiles have no bound.", sides=("backward",), variants=TILES)
class tile_overrun_d_v(Overrun):
    """the last tile of {tile} rows of dV runs over into the next head"""

    @step
    def d_v(self):
        return self.overwritten(super().d_v, super().d_v.ndim - 2)


@catalogue.mistake(name="tile_overrun", why="Stores of whole tiles have no bound.", sides=("backward",), variants=TILES)
class tile_overrun_d_kv(tile_overrun_d_v):
    """the last tiles of {tile} rows of dK and dV run over into the next head"""

    @step
    def d_k(self):
        return self.overwritten(super().d_k, super().d_k.ndim - 2)


@catalogue.mistake(name="tile_overrun", why="Stores of whole tiles have no bound.", sides=("backward",), variants=TILES)
class tile_overrun_d_q(Overrun):
    """the last tile of {tile} rows of dQ runs over into the next head"""

    @step
    def d_q(self):
        return self.overwritten(super().d_q, super().d_q.ndim - 2)


@catalogue.mistake(
    why="dK and dV need the lists of each key block, and get those of each query block.",
    sides=("backward",),
    variants=TILES,
)
class block_list_transposed(ScaledDotProduct):
    """dK and dV walk the lists of query blocks of {tile}, untransposed"""

    tile = 8

    @step
    def walked(self):
        """The pairs that are met, (..., h, q, k)."""
        x, y = np.arange(self.queries) // self.tile, np.arange(self.keys) // self.tile
        rows = np.arange(0, self.queries, self.tile)
        columns = np.arange(0, self.keys, self.tile)
        grid = np.logical_or.reduceat(np.logical_or.reduceat(self.seen, rows, axis=-2), columns, axis=-1)
        n = max(grid.shape[-2:])
        square = np.zeros((*grid.shape[:-2], n, n), bool)
        square[..., : grid.shape[-2], : grid.shape[-1]] = grid
        return np.swapaxes(square, -1, -2)[..., x[:, None], y]

    @step
    def d_keys_of_head(self):
        return contract("...hqk,...hqd->...hkd", self.d_products * self.walked, self.q, self.touched)

    @step
    def d_values_of_head(self):
        used = self.rebuilt_weights * self.rebuilt_dropout * self.walked
        return contract("...hqk,...hqe->...hke", used, self.d_output, self.touched)


@catalogue.mistake(why="Rows of the last tile are not stored.", sides=("both", "forward"), variants=TILES)
class unwritten(ScaledDotProduct):
    """rows beyond the last full tile of {tile} queries stay zero"""

    tile = 64

    @step
    def written(self):
        return np.arange(self.queries) < (self.queries // self.tile * self.tile or self.queries)

    @step
    def output(self):
        return np.where(self.written[:, None], super().output, 0.0)

    @step
    def lse(self):
        return np.where(self.written, super().lse, 0.0)

    @step
    def d_output(self):
        return np.where(self.written[:, None], super().d_output, 0.0)

    @step
    def d_lse(self):
        return np.where(self.written, super().d_lse, 0.0)


@catalogue.mistake(name="unwritten", why="The bound of the last store is one short.", sides=("both", "forward"))
class last_row_unwritten(unwritten):
    """the last row stays zero"""

    @step
    def written(self):
        return np.arange(self.queries) < self.queries - 1


@catalogue.mistake(
    name="tail_garbage", why="Buffers of gradients are not cleared, and nobody writes the padding.", sides=("backward",)
)
class gradient_padding_garbage(ScaledDotProduct):
    """rows of dK and dV beyond key_lengths hold what was there before, NaN"""

    @step
    def real(self):
        j = np.arange(self.keys)
        return ((j < self.real_keys[..., 0, :]) | (j >= self.own_keys))[..., None]

    @step
    def d_k(self):
        return np.where(self.real, super().d_k, np.nan)

    @step
    def d_v(self):
        return np.where(self.real, super().d_v, np.nan)


# ---------------------------------------------------------------------- whole arrays


@catalogue.mistake(why="A branch for some options returns what it was given.")
class zeros(ScaledDotProduct):
    """the output is zero"""

    @step
    def output(self):
        return np.zeros(super().output.shape)

    @step
    def d_output(self):
        return np.zeros(self.output.shape)


@catalogue.mistake(name="zeros", why="A branch for some options returns what it was given.")
class all_zeros(zeros):
    """output and lse are zero"""

    @step
    def lse(self):
        return np.zeros(super().lse.shape)

    @step
    def d_lse(self):
        return np.zeros(self.lse.shape)


@catalogue.mistake(name="zeros", why="A branch for some options computes no gradient.", sides=("backward",))
class zero_gradients(ScaledDotProduct):
    """all gradients are zero"""

    @step
    def d_output(self):
        return np.zeros_like(super().d_output)

    @step
    def d_lse(self):
        return np.zeros_like(super().d_lse)

    @step
    def d_logits(self):
        return np.zeros(self.pairs)

    @step
    def d_values_of_head(self):
        return np.zeros(self.values_of_head.shape)

    @step
    def d_sink_logits(self):
        return np.zeros((*self.pairs[:-1], self.sink_logits.shape[-1]))


def _absent(name):
    def zeros(self):
        return np.zeros(np.shape(self.argument(name)))

    @catalogue.mistake(
        name="gradient_absent", why="An array is detached, or its gradient is never computed.", sides=("backward",), arrays=(name,),
        variants=({"array": name, f"d_{name}": step(zeros)},),
    )  # fmt: skip
    class gradient_absent(ScaledDotProduct):
        """the gradient of {array} is zero"""

    return gradient_absent


ABSENT = tuple(_absent(name) for name in ScaledDotProduct.gradients)


@catalogue.mistake(why="The accumulator is not cleared.", sides=("backward",))
class stale_scratch(ScaledDotProduct):
    """dK and dV begin with those of the head before"""

    def kept(self, x):
        flat = x.reshape(-1, *x.shape[-2:])
        return np.cumsum(flat, axis=0).reshape(x.shape)

    @step
    def d_keys_of_head(self):
        return self.kept(super().d_keys_of_head)

    @step
    def d_values_of_head(self):
        return self.kept(super().d_values_of_head)


@catalogue.mistake(name="stale_scratch", why="The accumulator is not cleared.", sides=("backward",))
class stale_d_q(ScaledDotProduct):
    """dQ begins with that of the head before"""

    @step
    def d_q(self):
        d = super().d_q
        return np.cumsum(d.reshape(-1, *d.shape[-2:]), axis=0).reshape(d.shape)
