"""Mistakes of the backward alone."""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import contract, step
from refattn.mistakes.scaled_dot_product.base import TILES, catalogue, last_tile

BACKWARD = ("backward",)


@catalogue.mistake(why="Tests feed ones.", sides=BACKWARD)
class dout_ignored(ScaledDotProduct):
    """the cotangent of the output is taken for ones"""

    @step
    def d_output(self):
        return np.ones(self.output.shape)


@catalogue.mistake(why="The lse is taken for something that nobody differentiates.", sides=BACKWARD)
class dlse_ignored(ScaledDotProduct):
    """the cotangent of the lse is ignored"""

    @step
    def d_lse(self):
        return np.zeros(self.lse.shape)


@catalogue.mistake(why="The softmax's derivative is taken for that of exp.", sides=BACKWARD)
class delta_missing(ScaledDotProduct):
    """dS lacks the row term"""

    @step
    def d_softmax(self):
        return self.rebuilt_weights * self.d_weights


@catalogue.mistake(name="delta_missing", why="The output is computed again without dropout.", sides=BACKWARD)
class delta_undropped(ScaledDotProduct):
    """the row term comes from the undropped output"""

    @step
    def d_softmax(self):
        undropped = contract("...hqk,...hke->...hqe", self.rebuilt_weights, self.values_of_head, self.seen)
        delta = np.where(self.real_rows, (self.d_output * undropped).sum(-1, keepdims=True), 0.0)
        return self.rebuilt_weights * (self.d_weights - delta)


@catalogue.mistake(why="A sign.", sides=BACKWARD)
class grad_sign(ScaledDotProduct):
    """the row term has the wrong sign"""

    @step
    def d_softmax(self):
        return self.rebuilt_weights * (self.d_weights + self.delta)


@catalogue.mistake(name="grad_sign", why="A sign.", sides=BACKWARD)
class grad_sign_logits(ScaledDotProduct):
    """dS has the wrong sign"""

    @step
    def d_softmax(self):
        return self.rebuilt_weights * (self.delta - self.d_weights)


@catalogue.mistake(name="grad_sign", why="delta + d_lse in place of delta - d_lse.", sides=BACKWARD)
class grad_sign_lse(ScaledDotProduct):
    """the cotangent of the lse enters dS with the wrong sign"""

    @step
    def d_lse(self):
        return -super().d_lse


@catalogue.mistake(why="dQ and dK are products of dS, and the scale is forgotten.", sides=BACKWARD)
class scale_grad(ScaledDotProduct):
    """dQ and dK lack the scale"""

    scale_of_gradients = 1.0


@catalogue.mistake(name="scale_grad", why="dS is scaled, then dQ and dK.", sides=BACKWARD)
class scale_grad_twice(ScaledDotProduct):
    """dQ and dK have the scale twice"""

    @step
    def scale_of_gradients(self):
        return self.scale**2


@catalogue.mistake(
    why="A group's query heads each write the gradient of their key head.",
    sides=BACKWARD,
    variants=({"which": "first", "rank": 0}, {"which": "last", "rank": -1}),
)
class gqa_grad_nosum(ScaledDotProduct):
    """dK and dV are those of a group's {which} head"""

    rank = 0

    @step
    def query_heads_summed(self):
        right = super().query_heads_summed
        kept = np.zeros(right.shape)
        for row, ones in zip(kept, right, strict=True):
            if ones.any():
                row[np.flatnonzero(ones)[self.rank]] = 1.0
        return kept


@catalogue.mistake(name="gqa_grad_nosum", why="A mean where a sum is due.", sides=BACKWARD)
class gqa_grad_mean(ScaledDotProduct):
    """dK and dV are the mean over a group"""

    @step
    def query_heads_summed(self):
        right = super().query_heads_summed
        return right / np.maximum(right.sum(-1, keepdims=True), 1.0)


@catalogue.mistake(name="gqa_tile", why="The forward's map of heads is not the backward's.", sides=BACKWARD)
class gqa_grad_tile(ScaledDotProduct):
    """dK and dV are summed over the other map of heads"""

    @step
    def query_heads_summed(self):
        heads = np.arange(self.heads)
        other = heads // (self.heads // self.key_heads) if self.head_map == "tile" else heads % self.key_heads
        return (np.arange(self.key_heads)[:, None] == other).astype(float)


@catalogue.mistake(why="The factor of the backward is written again.", sides=BACKWARD)
class drop_bwd_scale(ScaledDotProduct):
    """the backward scales kept weights by the rate"""

    @step
    def rebuilt_dropout(self):
        return self.dropout * (1 - self.dropout_rate) * (self.dropout_rate or 1.0)


@catalogue.mistake(name="drop_bwd_scale", why="The factor is forgotten in the backward.", sides=BACKWARD)
class drop_bwd_unscaled(ScaledDotProduct):
    """the backward does not scale kept weights up"""

    @step
    def rebuilt_dropout(self):
        return self.dropout * (1 - self.dropout_rate)


@catalogue.mistake(name="drop_mask_mismatch", why="The backward does not draw the mask again.", sides=BACKWARD)
class drop_bwd_nothing(ScaledDotProduct):
    """the backward drops nothing"""

    rebuilt_dropout = 1.0


@catalogue.mistake(why="The stored weights are those after dropout.", sides=BACKWARD)
class drop_softmax_bwd(ScaledDotProduct):
    """the derivative of the softmax uses the dropped weights"""

    @step
    def d_softmax(self):
        return self.rebuilt_weights * self.rebuilt_dropout * (self.d_used_weights - self.delta)


class BiasCopies(ScaledDotProduct):
    """Names the axes along which the bias is broadcast."""

    @step
    def copied(self):
        shape = np.shape(self.argument("bias"))
        full = (1,) * (len(self.own_pairs) - len(shape)) + tuple(shape)
        return tuple(a for a, n in enumerate(full) if n == 1 and self.own_pairs[a] != 1)


@catalogue.mistake(
    why="The copies of a broadcast bias each write its gradient.",
    sides=BACKWARD,
    arrays=("bias",),
    variants=({"which": "first", "at": slice(0, 1)}, {"which": "last", "at": slice(-1, None)}),
)
class bias_grad(BiasCopies):
    """the gradient of the bias is that of its {which} copy"""

    at = slice(0, 1)

    @step
    def d_bias(self):
        d = self.d_own_added
        kept = tuple(self.at if a in self.copied else slice(None) for a in range(d.ndim))
        return d[kept].reshape(np.shape(self.argument("bias")))


@catalogue.mistake(name="bias_grad", why="A mean where a sum is due.", sides=BACKWARD, arrays=("bias",))
class bias_grad_mean(BiasCopies):
    """the gradient of the bias is the mean over its copies"""

    @step
    def d_bias(self):
        return self.d_own_added.mean(self.copied).reshape(np.shape(self.argument("bias")))


@catalogue.mistake(name="bias_grad", why="dS times the scale is what is stored.", sides=BACKWARD, arrays=("bias",))
class bias_grad_scaled(ScaledDotProduct):
    """the gradient of the bias is scaled"""

    @step
    def d_bias(self):
        return self.scale * super().d_bias


@catalogue.mistake(why="A tile's share is stored where it should be added.", sides=BACKWARD, variants=TILES)
class grad_overwritten(ScaledDotProduct):
    """dK and dV are those of the last tile of {tile} queries"""

    @step
    def last_rows(self):
        return last_tile(self.queries, self.tile)[:, None]

    @step
    def d_keys_of_head(self):
        return contract("...hqk,...hqd->...hkd", self.d_products * self.last_rows, self.q, self.touched)

    @step
    def d_values_of_head(self):
        used = self.rebuilt_weights * self.rebuilt_dropout * self.last_rows
        return contract("...hqk,...hqe->...hke", used, self.d_output, self.touched)


@catalogue.mistake(
    name="grad_overwritten", why="A tile's share is stored where it should be added.", sides=BACKWARD, variants=TILES
)
class grad_overwritten_q(ScaledDotProduct):
    """dQ is that of the last tile of {tile} keys"""

    @step
    def d_q(self):
        d = self.d_products * last_tile(self.keys, self.tile)
        return contract("...hqk,...hkd->...hqd", d, self.keys_of_head, self.touched)


class ValueBlock(ScaledDotProduct):
    """dP of some value channels only."""

    tile = 4

    @step
    def channels_read(self):
        return np.arange(self.v.shape[-1]) < self.tile

    @step
    def d_used_weights(self):
        d = self.d_output * self.channels_read
        right = np.einsum("...hqe,...hke->...hqk", d, self.values_of_head, optimize=True)
        return np.where(self.touched, right, 0.0)


@catalogue.mistake(
    why="Value channels are split over blocks, and dP is not summed over them.", sides=BACKWARD, variants=TILES
)
class dv_block_nosum(ValueBlock):
    """dQ and dK see the first block of {tile} value channels only"""


@catalogue.mistake(
    name="dv_block_nosum",
    why="Value channels are split over blocks, and dP is not summed over them.",
    sides=BACKWARD,
    variants=TILES,
)
class dv_last_block(ValueBlock):
    """dQ and dK see the last block of {tile} value channels only"""

    @step
    def channels_read(self):
        return last_tile(self.v.shape[-1], self.tile)
