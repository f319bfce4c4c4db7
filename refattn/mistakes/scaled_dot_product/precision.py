"""Mistakes of precision: numbers that are stored, summed or multiplied in fewer bits than declared.

Which of several orders a kernel sums in is its own; the one taken here is that of its loop over tiles.
"""

import math

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct, divide
from refattn.definitions.steps import contract, einsum, step
from refattn.mistakes.scaled_dot_product.base import TILES, arithmetic, catalogue
from refattn.precision import round_to

# ---------------------------------------------------------------------- half storage


class Stored(ScaledDotProduct):
    """Names what a half dtype keeps of a number."""

    def stored(self, x):
        """As the storage dtype holds it; nothing changes where that is as wide as the arithmetic."""
        return round_to(x, self.storage) if self.storage.itemsize == 2 and x.dtype == np.float64 else x


@catalogue.mistake(why="Logits are written to memory between two kernels.")
class scores_in_storage(Stored):
    """logits are rounded to the storage dtype"""

    @step
    def logits(self):
        return self.stored(super().logits)


@catalogue.mistake(name="scores_in_storage", why="q.k comes out of a product of half arrays.")
class products_in_storage(Stored):
    """q.k is rounded to the storage dtype"""

    @step
    def products(self):
        return self.stored(super().products)


@catalogue.mistake(name="scores_in_storage", why="Weights are written to memory between two kernels.")
class weights_in_storage(Stored):
    """weights are rounded to the storage dtype"""

    @step
    def weights(self):
        return self.stored(super().weights)


@catalogue.mistake(name="scores_in_storage", why="Every step is a kernel of its own, as in eager frameworks.")
class every_step_in_storage(Stored):
    """q.k, scaled logits, logits and weights are rounded to the storage dtype"""

    @step
    def products(self):
        return self.stored(super().products)

    @step
    def scaled(self):
        return self.stored(super().scaled)

    @step
    def logits(self):
        return self.stored(super().logits)

    @step
    def weights(self):
        return self.stored(super().weights)


@catalogue.mistake(name="scores_in_storage", why="exp is computed on half numbers.")
class exponentials_in_storage(Stored):
    """exponentials are rounded to the storage dtype before they are summed"""

    @step
    def exponentials(self):
        return self.stored(super().exponentials)


@catalogue.mistake(name="scores_in_storage", why="The backward stores dP or dS.", sides=("backward",))
class d_logits_in_storage(Stored):
    """dP is rounded to the storage dtype"""

    @step
    def d_used_weights(self):
        return self.stored(super().d_used_weights)


@catalogue.mistake(why="The accumulator has the dtype of the inputs.", variants=({"tile": 1}, *TILES))
class low_prec_accum(Stored):
    """the row sum is accumulated in the storage dtype, after every {tile} keys"""

    tile = 1

    @step
    def key_sum(self):
        if self.storage.itemsize != 2:
            return super().key_sum
        parts = np.add.reduceat(self.exponentials, np.arange(0, self.keys, self.tile), axis=-1)
        return self.accumulated(np.moveaxis(parts, -1, 0))[..., None]

    def accumulated(self, parts):
        """The sum over the first axis, rounded after every addition."""
        total = self.stored(parts[0])
        for part in parts[1:]:
            total = self.stored(total + part)
        return total


@catalogue.mistake(name="low_prec_accum", why="The accumulator has the dtype of the output.", variants=TILES)
class output_accumulated(low_prec_accum):
    """the output is accumulated in the storage dtype, after every {tile} keys"""

    @step
    def output(self):
        if self.storage.itemsize != 2:
            return super().output
        starts = range(0, self.keys, self.tile)
        return self.accumulated([self.of_keys(slice(n, n + self.tile)) for n in starts])

    def of_keys(self, some):
        seen = self.seen[..., some] | (self.weights[..., some] != 0)
        values = self.values_of_head[..., some, :]
        return contract("...hqk,...hke->...hqe", self.used_weights[..., some], values, seen)

    key_sum = ScaledDotProduct.key_sum


@catalogue.mistake(
    name="low_prec_accum", why="The accumulator has the dtype of the gradient.", sides=("backward",), variants=TILES
)
class d_q_accumulated(low_prec_accum):
    """dQ is accumulated in the storage dtype, after every {tile} keys"""

    key_sum = ScaledDotProduct.key_sum

    @step
    def d_q(self):
        if self.storage.itemsize != 2:
            return super().d_q
        tiles = [slice(n, n + self.tile) for n in range(0, self.keys, self.tile)]
        spec = "...hqk,...hkd->...hqd"
        return self.accumulated(
            [contract(spec, self.d_products[..., t], self.keys_of_head[..., t, :], self.touched[..., t]) for t in tiles]
        )


@catalogue.mistake(
    name="low_prec_accum", why="The accumulator has the dtype of the gradient.", sides=("backward",), variants=TILES
)
class d_kv_accumulated(low_prec_accum):
    """dK and dV are accumulated in the storage dtype, after every {tile} queries"""

    key_sum = ScaledDotProduct.key_sum

    @step
    def d_keys_of_head(self):
        return self.of_tiles("...hqk,...hqd->...hkd", self.d_products, self.q)

    @step
    def d_values_of_head(self):
        return self.of_tiles("...hqk,...hqe->...hke", self.rebuilt_weights * self.rebuilt_dropout, self.d_output)

    def of_tiles(self, spec, weights, rows):
        step = self.tile if self.storage.itemsize == 2 else max(1, self.queries)
        tiles = [slice(n, n + step) for n in range(0, self.queries, step)]
        seen = self.touched
        return self.accumulated([contract(spec, weights[..., t, :], rows[..., t, :], seen[..., t, :]) for t in tiles])


@catalogue.mistake(name="low_prec_accum", why="The row term is stored between two kernels.", sides=("backward",))
class delta_in_storage(Stored):
    """the row term dO . O is rounded to the storage dtype"""

    @step
    def delta(self):
        return self.stored(super().delta)


@catalogue.mistake(name="low_prec_accum", why="The row term is that of the stored output.", sides=("backward",))
class lse_in_storage(Stored):
    """the backward's lse is rounded to the storage dtype"""

    @step
    def saved_lse(self):
        return self.stored(super().saved_lse)


@catalogue.mistake(
    name="low_prec_accum",
    why="Shares of rows are rounded before they are summed.",
    sides=("backward",),
    arrays=("sinks",),
)
class sink_shares_in_storage(Stored):
    """the shares of the sinks' gradient are rounded to the storage dtype before their sum"""

    @step
    def d_sink_logits(self):
        return self.stored(super().d_sink_logits)


SPLITS = tuple({"splits": n} for n in (2, 4, 8))


@catalogue.mistake(
    why="Partial outputs travel, or are stored, in the dtype of the output.", sides=("both", "forward"), variants=SPLITS
)
class round_partials(Stored):
    """partial outputs of {splits} splits of the keys are rounded to the storage dtype before they are merged"""

    splits = 2

    @step
    def output(self):
        size = max(1, -(-self.keys // self.splits))
        total = 0.0
        for start in range(0, max(1, self.keys), size):
            some = slice(start, start + size)
            mass = self.weights[..., some].sum(-1, keepdims=True)
            weights = divide(self.used_weights[..., some], mass)
            seen = self.seen[..., some] | (weights != 0)
            part = contract("...hqk,...hke->...hqe", weights, self.values_of_head[..., some, :], seen)
            total = total + mass * self.stored(part)
        return total


# ---------------------------------------------------------------------- operands of products


def truncated(x):
    """float32 numbers of which 13 bits are cut off: TF32 without rounding."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32).astype(np.float64)


NARROW = tuple(
    {"narrow": narrow, "kind": kind}
    for narrow in ("TF32", "TF32, cut off", "bfloat16", "float16")
    for kind in ("all products", "all products, weights before they are normalised", "q.k")
)


@catalogue.mistake(why="The library's default allows it.", variants=NARROW)
class narrow_products(ScaledDotProduct):
    """operands of {kind} are rounded to {narrow}"""

    narrow, kind = "TF32", "all products"

    def narrowed(self, x):
        """The operand as the product reads it; storage that is no wider keeps its numbers."""
        if self.storage.itemsize != 4 or np.iscomplexobj(x):
            return x
        match self.narrow:
            case "TF32":
                return round_to(x, "tf32")
            case "TF32, cut off":
                return truncated(x)
        return round_to(round_to(x, "float32"), self.narrow)

    def others(self, x):
        return x if self.kind == "q.k" else self.narrowed(x)

    @step
    def products(self):
        return einsum("...hqd,...hkd->...hqk", self.narrowed(self.q), self.narrowed(self.keys_of_head))

    @step
    def output(self):
        if "before" in self.kind:
            weights = divide(self.narrowed(self.exponentials * self.dropout), self.row_sum)
        else:
            weights = self.others(self.used_weights)
        weights = np.where(self.real_rows, weights, 0.0)
        seen = self.seen | (weights != 0)
        return contract("...hqk,...hke->...hqe", weights, self.others(self.values_of_head), seen)

    @step
    def d_used_weights(self):
        d = einsum("...hqe,...hke->...hqk", self.others(self.d_output), self.others(self.values_of_head))
        return np.where(self.touched, d, 0.0)

    @step
    def d_q(self):
        keys = self.narrowed(self.keys_of_head)
        return contract("...hqk,...hkd->...hqd", self.narrowed(self.d_products), keys, self.touched)

    @step
    def d_keys_of_head(self):
        return contract("...hqk,...hqd->...hkd", self.narrowed(self.d_products), self.narrowed(self.q), self.touched)

    @step
    def d_values_of_head(self):
        used = self.others(self.rebuilt_weights * self.rebuilt_dropout)
        return contract("...hqk,...hqe->...hke", used, self.others(self.d_output), self.touched)


@catalogue.mistake(name="narrow_products", why="The scale is folded into q, which is stored again.")
class scaled_q_in_storage(Stored):
    """q times the scale is rounded to the storage dtype before q.k"""

    @step
    def scaled(self):
        return einsum("...hqd,...hkd->...hqk", self.stored(self.scale * self.q), self.keys_of_head)


@catalogue.mistake(name="narrow_products", why="A double kernel has a single-precision part.")
class single_in_double(ScaledDotProduct):
    """the logits of float64 arrays are computed in float32"""

    @step
    def logits(self):
        return (
            super().logits.astype(np.float32).astype(np.float64) if arithmetic(self) is np.float64 else super().logits
        )


# ---------------------------------------------------------------------- approximations


def base_two(polynomial):
    """exp by 2^n times a polynomial of the fraction."""

    def exponential(x):
        x = np.maximum(x * math.log2(math.e), -1000.0)
        whole = np.floor(x)
        return np.where(np.isneginf(x) | (x <= -1000.0), 0.0, np.exp2(whole) * polynomial(x - whole))

    return exponential


@catalogue.mistake(
    why="A polynomial is cheaper than the special function unit.",
    variants=(
        {"how": "1 + f", "degree": 1},
        {"how": "a polynomial of degree 2", "degree": 2},
        {"how": "a polynomial of degree 3", "degree": 3},
    ),
)
class rough_exponential(ScaledDotProduct):
    """exp is 2**n times {how} of the fraction f"""

    degree = 1

    @step
    def exponential(self):
        return base_two(
            {
                1: lambda f: 1 + f,
                2: lambda f: 1 + f * (0.6565 + 0.3435 * f),
                3: lambda f: 1 + f * (0.695146 + f * (0.227564 + 0.077119 * f)),
            }[self.degree]
        )


@catalogue.mistake(name="rough_exponential", why="A rational function is cheaper than tanh.")
class rough_tanh(ScaledDotProduct):
    """tanh is x (27 + x^2) / (27 + 9 x^2), at most 1"""

    @step
    def capped(self):
        if self.cap is None:
            return self.capped_input
        x = self.capped_input / self.cap
        return self.cap * np.clip(x * (27 + x**2) / (27 + 9 * x**2), -1.0, 1.0)


# ---------------------------------------------------------------------- integers


@catalogue.mistake(
    why="Positions or their differences are kept in few bits.",
    variants=[{"bits": n} for n in ("int8", "uint8", "int16", "uint16")],
)
class idx32(ScaledDotProduct):
    """positions wrap round in {bits}"""

    bits = "int8"

    @step
    def i(self):
        return super().i.astype(self.bits).astype(np.int64)

    @step
    def j(self):
        return super().j.astype(self.bits).astype(np.int64)
