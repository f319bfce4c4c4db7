"""How people get LSH attention wrong: hashing, windows, what counts how often, and the two roles of the queries."""

import numpy as np

from refattn.definitions.lsh import LSH
from refattn.definitions.steps import einsum, step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.options import about
from refattn.mistakes.scaled_dot_product import catalogue as dense

NONE_OF = (
    *about(
        "alibi_slopes", "bias", "head_map", "lengths", "mask", "score_mod", "segments", "sinks", "softcap", "window"
    ),
    "d_truncated",
    "arguments_exchanged",
    "batch_crossed",
    "swap_kv",
)
"""Mistakes of softmax attention about what this mechanism does not have."""

catalogue = Catalogue(LSH, built_on=dense, without=NONE_OF)


# ---------------------------------------------------------------------------------------------- keys


@catalogue.mistake(why="Queries and keys share a projection; that keys have norm 1 is a line of its own.")
class lsh_key_not_normalised(LSH):
    """keys are the queries as they are, not divided by their norm"""

    norm = 1.0
    d_norm_share = 0.0


@catalogue.mistake(why="One family of code has keys of norm 1 and a scale, the other keys of norm sqrt(d) and none.")
class lsh_scale(LSH):
    """keys have norm sqrt(d) where norm 1 is due, or 1 where sqrt(d) is: logits are off by sqrt(d)"""

    @step
    def ratio(self):
        """How much longer the keys are."""
        return max(1, self.channels) ** (0.5 if self.key_norm == "l2" else -0.5)

    @step
    def k(self):
        return super().k * self.ratio

    @step
    def d_norm_share(self):
        return super().d_norm_share / self.ratio**2

    @step
    def d_q_as_key(self):
        return super().d_q_as_key * self.ratio


@catalogue.mistake(why="The normalised keys serve as queries too.")
class lsh_query_normalised(LSH):
    """queries are divided by their norm, as keys are"""

    @step
    def plain(self):
        """qk with the batch axes of all arrays."""
        return np.broadcast_to(self.qk, (*self.lead, *self.qk.shape[-3:]))

    @step
    def length(self):
        """What queries and keys are divided by."""
        square = (self.plain * self.plain).sum(-1, keepdims=True)
        if self.key_norm == "rms":
            return np.sqrt(square / self.plain.shape[-1] + self.smallest_norm)
        return np.maximum(np.sqrt(square), self.smallest_norm)

    @step
    def q(self):
        return self.plain / self.length

    @step
    def projected(self):
        directions = np.broadcast_to(self.directions, (*self.lead, self.heads, *self.directions.shape[-3:]))
        return einsum("...htd,...hdsn->...hstn", self.plain, directions)

    @step
    def k(self):
        return self.q

    @step
    def d_qk(self):
        d = self.d_q + self.d_k
        inner = (self.q * d).sum(-1, keepdims=True)
        if self.key_norm == "rms":
            inner = inner / self.channels
        else:
            inner = np.where(self.length > self.smallest_norm, inner, 0.0)
        return (d - self.q * inner) / self.length


# ---------------------------------------------------------------------------------------------- hashing


@catalogue.mistake(why="argmax of the projections, without their negatives.")
class lsh_half_hash(LSH):
    """the bucket is the argmax of xR without -xR: half the buckets stay empty"""

    def digit(self, part):
        return np.argmax(part, axis=-1)

    @step
    def hashed(self):
        bucket, base, start = 0, 1, 0
        for factor in self.factors:
            bucket = bucket + base * self.digit(self.projected[..., start : start + factor // 2])
            base, start = base * factor, start + factor // 2
        return bucket


@catalogue.mistake(why="Digits are joined in the order of reading.")
class lsh_factor_order(LSH):
    """the first factor of the buckets is the most significant digit"""

    @step
    def hashed(self):
        bucket, start = 0, 0
        for factor in self.factors:
            bucket = bucket * factor + self.digit(self.projected[..., start : start + factor // 2])
            start += factor // 2
        return bucket


@catalogue.mistake(why="Sort keys of 32 bits hold bucket, round and position at once.")
class lsh_offset_overflow(LSH):
    """the sort keys (bucket + round offset) * t + position overflow 32 bits"""

    @step
    def order(self):
        rounds, t = self.bucket.shape[-2:]
        offset = np.arange(rounds)[:, None] * (int(self.bucket.max(initial=0)) + 1)
        keys = ((self.bucket + offset).astype(np.int64) * t + np.arange(t)).astype(np.int32)  # wraps around
        return np.argsort(keys, axis=-1, kind="stable")


@catalogue.mistake(why="A sort that is not stable, or descending positions.")
class lsh_sort_unstable(LSH):
    """positions of one bucket are sorted from the last to the first"""

    @step
    def order(self):
        t = self.keys
        return t - 1 - np.argsort(self.bucket[..., ::-1], axis=-1, kind="stable")


# ---------------------------------------------------------------------------------------------- who meets whom


@catalogue.mistake(why="Every other attention lets a token see itself.")
class lsh_self_visible(LSH):
    """a token sees itself like any other key, although it should only as last resort"""

    @step
    def self_attention(self):
        return "never" if self.argument("self_attention") == "always" else "always"


@catalogue.mistake(why="A mask of -1e9 on oneself leaves nothing where nothing else is.")
class lsh_last_resort_drop(LSH):
    """a row that meets nobody is empty, although it should see itself"""

    @step
    def self_attention(self):
        given = self.argument("self_attention")
        return "never" if given == "last_resort" else given


@catalogue.mistake(why="Rounds are weighted by their lse, which counts a pair in each of them.")
class lsh_duplicates(LSH):
    """a pair that meets in several rounds counts in each of them (or once where it should count in each)"""

    @step
    def duplicates(self):
        return "union" if self.argument("duplicates") == "multiset" else "multiset"


@catalogue.mistake(why="Chunks are rolled over the whole axis of rounds and chunks.")
class lsh_wrap(LSH):
    """windows run on over the ends of a round (or stop there where they should run on)"""

    @step
    def wrap(self):
        return "none" if self.argument("wrap") == "global" else "global"


@catalogue.mistake(why="The look-back chunk is not concatenated.")
class lsh_look_back_missing(LSH):
    """a chunk sees only itself"""

    before = 0
    after = 0


@catalogue.mistake(why="The chunks before and after are exchanged: a roll by -1 for +1.")
class lsh_look_ahead(LSH):
    """a chunk sees the chunks after it where those before it are due"""

    @step
    def before(self):
        return self.argument("after")

    @step
    def after(self):
        return self.argument("before")


@catalogue.mistake(why="Code that lets chunks attend across buckets is the common one.")
class lsh_other_buckets(LSH):
    """keys of other buckets that share the window are seen"""

    @step
    def within_bucket(self):
        return not self.argument("within_bucket")


@catalogue.mistake(why="The mask is a triangle over slots.")
class lsh_sorted_causal(LSH):
    """causality compares places in the sorted order, not positions: queries see the future"""

    visible_by_causal = True

    @step
    def meetings(self):
        met = super().meetings
        if not self.causal:
            return met
        later = self.rank[..., None, :] > self.rank[..., :, None]
        return np.where(later, 0, met)


@catalogue.mistake(why="The mask is applied before the sort and lost with it.")
class lsh_mask_ignored(LSH):
    """hidden keys are seen"""

    mask = None


@catalogue.mistake(why="The mask is not brought into the sorted order.")
class lsh_mask_unsorted(LSH):
    """the mask hides slots of the sorted order, not positions"""

    visible_by_mask = True

    @step
    def meetings(self):
        if self.mask is None:
            return super().meetings
        shown = np.broadcast_to(self.shown_keys[..., None, None, :], self.rank.shape)
        return super().meetings * np.take_along_axis(shown, self.rank, axis=-1)[..., None, :]


# ---------------------------------------------------------------------------------------------- rounds


class ByRounds(LSH):
    """The output as a mean of the rounds' outputs, each with a softmax of its own."""

    @step
    def round_copies(self):
        """How often a pair counts in each round, (..., h, s, t, t); a pair is spread over the rounds that show it."""
        met = np.where(self.allowed[..., None, :, :], self.meetings, 0).astype(float)
        total = np.maximum(met.sum(-3, keepdims=True), 1)
        copies = met * np.where(self.copies > 0, self.copies, 0.0)[..., None, :, :] / total
        resort = np.where(self.copies * (met.sum(-3) == 0) > 0, self.copies, 0.0)  # oneself as last resort, in round 0
        copies[..., 0, :, :] += resort
        return copies

    @step
    def round_exponentials(self):
        """copies exp(logits - maximum) of each round"""
        seen = self.round_copies > 0
        return np.where(seen, self.round_copies * np.exp(self.logits - self.maximum)[..., None, :, :], 0.0)

    @step
    def round_sums(self):
        """Sum of the exponentials of each round, (..., h, s, t, 1)"""
        return self.round_exponentials.sum(-1, keepdims=True)

    @step
    def round_weights(self):
        """Softmax of each round."""
        return self.round_exponentials / np.where(self.round_sums == 0, 1.0, self.round_sums)

    @step
    def round_shares(self):
        """Weight of each round, (..., h, s, t, 1): exp(lse of the round - lse)"""
        total = self.round_sums.sum(-3, keepdims=True)
        return self.round_sums / np.where(total == 0, 1.0, total)

    @step
    def d_round_weights(self):
        """dP of each round, the same for all of them."""
        return self.d_weights[..., None, :, :]


@catalogue.mistake(why="Rounds are averaged like heads or samples.")
class lsh_rounds_mean(ByRounds):
    """the outputs of the rounds are averaged, not weighted by exp(lse of the round)"""

    @step
    def round_shares(self):
        shown = self.round_sums > 0
        return shown / np.maximum(shown.sum(-3, keepdims=True), 1)

    @step
    def weights(self):
        return (self.round_shares * self.round_weights).sum(-3)

    @step
    def rebuilt_weights(self):
        return self.weights

    @step
    def lse_share(self):
        """The lse is that of all rounds together."""
        total = self.round_sums.sum(-3)
        return self.round_exponentials.sum(-3) / np.where(total == 0, 1.0, total)

    @step
    def d_softmax(self):
        p = self.round_weights
        delta = (p * self.d_round_weights).sum(-1, keepdims=True)
        return (self.round_shares * p * (self.d_round_weights - delta)).sum(-3)


@catalogue.mistake(why="The weights of the rounds are computed under a stop-gradient.", sides=("backward",))
class lsh_round_weights_constant(ByRounds):
    """the gradient takes the weights of the rounds as constants"""

    @step
    def d_softmax(self):
        p = self.round_weights
        delta = (p * self.d_round_weights).sum(-1, keepdims=True)
        return (self.round_shares * p * (self.d_round_weights - delta)).sum(-3)


@catalogue.mistake(why="Sorting and un-sorting are each other's adjoint, and easily exchanged.", sides=("backward",))
class unsort_grad(ByRounds):
    """the gradient of the un-sort is gathered by the inverse of the permutation it needs"""

    @step
    def twice(self):
        """rank[rank[i]] of every round, (..., h, s, t)"""
        return np.take_along_axis(self.rank, self.rank, axis=-1)

    @step
    def d_round_output(self):
        """Cotangents of the rounds' outputs, exchanged, (..., h, s, t, e)"""
        d = self.round_shares * self.d_output[..., None, :, :]
        return np.take_along_axis(d, self.twice[..., None], axis=-2)

    @step
    def d_round_lse(self):
        """Cotangents of the rounds' lse, exchanged, (..., h, s, t, 1)"""
        used = self.round_weights * self.dropout[..., None, :, :]
        parts = einsum("...hsij,...hje->...hsie", used, self.values_of_head)
        through = (self.d_output[..., None, :, :] * (parts - self.output[..., None, :, :])).sum(-1)
        d = self.round_shares[..., 0] * (through + self.d_lse[..., None, :])
        return np.take_along_axis(d, self.twice, axis=-1)[..., None]

    @step
    def d_logits(self):
        d_p = einsum("...hsie,...hje->...hsij", self.d_round_output, self.values_of_head)
        d_p = d_p * self.dropout[..., None, :, :]
        p = self.round_weights
        return (p * (d_p - (p * d_p).sum(-1, keepdims=True) + self.d_round_lse)).sum(-3)

    @step
    def d_values_of_head(self):
        used = self.round_weights * self.dropout[..., None, :, :]
        return einsum("...hsij,...hsie->...hje", used, self.d_round_output)


# ---------------------------------------------------------------------------------------------- gradients alone


@catalogue.mistake(why="The norm is computed under a stop-gradient, as the hash is.", sides=("backward",))
class lsh_norm_constant(LSH):
    """the gradient takes the norm of the key as a constant"""

    d_norm_share = 0.0


@catalogue.mistake(
    why="One array has two roles, and a backward written for three arrays returns one of them.", sides=("backward",)
)
class lsh_key_role_missing(LSH):
    """the gradient of qk leaves out its role as key"""

    d_q_as_key = 0.0


@catalogue.mistake(
    name="lsh_key_role_missing", why="The keys' gradient is added where the queries' is due.", sides=("backward",)
)
class lsh_query_role_missing(LSH):
    """the gradient of qk leaves out its role as query"""

    @step
    def d_qk(self):
        return self.d_q_as_key
