"""LSH attention in steps: softmax attention in which a pair counts as often as the hash rounds show it.

    k = q / norm         weights[i,j] = copies[i,j] exp(scale q[i] . k[j] - lse[i])

``copies`` comes from the buckets: positions of a round sorted by (bucket, position) and cut into chunks, a query seeing its
own chunk and those near it.  All rounds together are one softmax.

Source: Kitaev, Kaiser, Levskaya 2020, arXiv:2001.04451, section 2 and appendix A.
"""

import math

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import einsum, step

__all__ = ["LSH", "definition"]


class LSH(ScaledDotProduct):
    """Softmax attention over the pairs that share a bucket and a window in some round; queries and keys are one array."""

    results = {**ScaledDotProduct.results, "buckets": "shown_buckets"}
    gradients = ("qk", "v", "scale")
    defaults = {
        **ScaledDotProduct.defaults, "rotations": None, "buckets": None, "rng": None, "hashes": None, "n_buckets": None,
        "chunk": 64, "before": 1, "after": 0, "within_bucket": True, "duplicates": "union", "key_norm": "l2",
        "norm_eps": None, "wrap": "none", "padding_bucket": False, "short": "hash", "self_attention": "last_resort",
    }  # fmt: skip

    # ------------------------------------------------------------------ queries and keys

    @step
    def lead(self):
        return np.broadcast_shapes(self.qk.shape[:-3], self.v.shape[:-3])

    @step
    def q(self):
        return np.broadcast_to(self.qk, (*self.lead, *self.qk.shape[-3:]))

    @step
    def smallest_norm(self):
        """norm_eps"""
        return {"l2": 1e-12, "rms": 1e-6}[self.key_norm] if self.norm_eps is None else self.norm_eps

    @step
    def norm(self):
        """max(|q|, norm_eps), or sqrt(mean q^2 + norm_eps), (..., h, t, 1)"""
        square = (self.q * self.q).sum(-1, keepdims=True)
        if self.key_norm == "rms":
            return np.sqrt(square / self.channels + self.smallest_norm)
        return np.where(np.sqrt(square) <= self.smallest_norm, self.smallest_norm, np.sqrt(square))

    @step
    def k(self):
        """q / norm"""
        return self.q / self.norm

    # ------------------------------------------------------------------ hashing

    @step
    def full(self):
        """Whether a short sequence needs no hashing: everybody meets everybody once."""
        return self.short == "full" and self.keys <= self.chunk

    @step
    def factors(self):
        """Factors of the number of buckets; None where the buckets are given without it."""
        if self.n_buckets is not None:
            return tuple(self.n_buckets) if isinstance(self.n_buckets, (tuple, list)) else (int(self.n_buckets),)
        if self.buckets is not None:
            return None
        return (2 * max(1, self.keys // self.chunk) if self.rotations is None else 2 * self.rotations.shape[-1],)

    @step
    def directions(self):
        """The rotations, drawn where a generator is given, (..., d, s, n)"""
        if self.rotations is not None:
            return self.rotations
        return self.rng.standard_normal((self.channels, self.hashes or 1, sum(self.factors) // 2))

    @step
    def projected(self):
        """q R, (..., h, s, t, n)"""
        directions = np.broadcast_to(self.directions, (*self.lead, self.heads, *self.directions.shape[-3:]))
        return einsum("...htd,...hdsn->...hstn", np.real(self.q), directions)

    @step
    def hashed(self):
        """Bucket of every position in every round: digits argmax [x; -x], the first factor the least significant."""
        bucket, base, start = 0, 1, 0
        for factor in self.factors:
            part = self.projected[..., start : start + factor // 2]
            bucket = bucket + base * self.digit(part)
            base, start = base * factor, start + factor // 2
        return bucket

    def digit(self, part):
        """The first largest of [x; -x]."""
        return np.argmax(np.concatenate([part, -part], axis=-1), axis=-1)

    @step
    def shown_keys(self):
        """Keys that the mask shows, (..., t)"""
        return np.broadcast_to(True if self.mask is None else self.mask, (*self.lead, self.keys))

    @step
    def bucket(self):
        """Buckets (..., h, s, t), hidden keys behind all others where ``padding_bucket`` says so."""
        if self.full:
            return np.zeros((*self.lead, self.heads, 1, self.keys), dtype=np.int64)
        if self.buckets is not None:
            given = np.asarray(self.buckets, dtype=np.int64)
            found = np.broadcast_to(given, (*self.lead, self.heads, *given.shape[-2:]))
        else:
            found = self.hashed
        if not self.padding_bucket or self.mask is None:
            return found
        real = np.broadcast_to(self.shown_keys[..., None, None, :], found.shape)
        last = int(np.max(found[real], initial=0)) + 1 if self.factors is None else math.prod(self.factors)
        return np.where(real, found, last)

    @step
    def shown_buckets(self):
        """The result ``buckets``."""
        return None if self.full else self.bucket

    # ------------------------------------------------------------------ who meets whom

    @step
    def order(self):
        """Positions of every round by (bucket, position), (..., h, s, t)"""
        return np.argsort(self.bucket, axis=-1, kind="stable")

    @step
    def rank(self):
        """Place of every position in the order of its round."""
        return np.argsort(self.order, axis=-1)

    @step
    def slots(self):
        """Slots of a chunk."""
        return min(self.chunk, max(1, self.keys))

    @step
    def chunks(self):
        """Chunks of a round; the last may be short."""
        return -(-self.keys // self.slots)

    @step
    def chunk_number(self):
        """The chunk of every position, (..., h, s, t)"""
        return self.rank // self.slots

    @step
    def rings(self):
        """Whether windows run on over the chunks of all rounds and around the end."""
        return self.wrap == "global"

    @step
    def reach(self):
        """Chunks that a query sees, counted from its own."""
        most = self.bucket.shape[-2] * self.chunks
        return range(-min(self.before, most), min(self.after, most) + 1)

    def ahead_of(self, s, r):
        """How many chunks the place of key j in round r stands ahead of that of query i in round s, (..., h, t, t)"""
        gap = self.chunk_number[..., r, None, :] - self.chunk_number[..., s, :, None]
        return gap + (r - s) * self.chunks

    def near(self, gap, step):
        """Pairs that stand ``step`` chunks apart."""
        total = self.bucket.shape[-2] * self.chunks
        return (gap - step) % max(1, total) == 0 if self.rings else gap == step

    @step
    def same_bucket(self):
        """(..., h, s, t, t)"""
        return self.bucket[..., :, None] == self.bucket[..., None, :]

    @step
    def meetings(self):
        """How often query i meets key j in the windows of each round, (..., h, s, t, t)"""
        rounds = self.bucket.shape[-2]
        if self.full:
            return np.ones(self.same_bucket.shape, dtype=np.int32)
        met = np.zeros(self.same_bucket.shape, dtype=np.int32)
        for s in range(rounds):
            others = range(rounds) if self.rings and not self.within_bucket else (s,)
            for r in others:
                gap = self.ahead_of(s, r)
                for step_ in self.reach:
                    met[..., s, :, :] += self.near(gap, step_)
            if self.within_bucket:
                met[..., s, :, :] *= self.same_bucket[..., s, :, :]
        return met

    @step
    def counted(self):
        """How often trax counts a pair: by chunk numbers of the same round alone, (..., h, t, t)"""
        total = np.zeros(self.pairs)
        for s in range(self.bucket.shape[-2]):
            gap = self.ahead_of(s, s)
            for step_ in self.reach:
                here = self.near(gap, step_)
                total += here & self.same_bucket[..., s, :, :] if self.within_bucket else here
        return total

    @step
    def visible_by_mask(self):
        """The mask hides keys."""
        return self.shown_keys[..., None, None, :]

    @step
    def oneself(self):
        """i = j, (t, t)"""
        return self.i == self.j

    @step
    def allowed(self):
        """Pairs that every option allows; oneself only with ``self_attention="always"``, (..., h, t, t)"""
        return super().visible & (True if self.self_attention == "always" else ~self.oneself)

    @step
    def multiplicity(self):
        """How often a pair counts: once, in every meeting, or that over trax's count."""
        times = self.meetings.sum(-3)
        if self.full or self.duplicates == "union":
            return np.minimum(times, 1).astype(float)
        return times / (self.counted + 1e-9) if self.duplicates == "trax1" else times.astype(float)

    @step
    def alone(self):
        """Rows that meet nobody in any round, (..., h, t, 1)"""
        return ~((self.multiplicity > 0) & self.allowed).any(-1, keepdims=True)

    @step
    def copies(self):
        """How often a pair counts in the softmax; a row that meets nobody meets itself once, as last resort."""
        copies = np.where(self.allowed, self.multiplicity, 0.0)
        if self.self_attention != "last_resort":
            return copies
        return np.where(self.alone & self.oneself, 1.0, copies)

    @step
    def visible(self):
        """Pairs that count."""
        return self.copies > 0

    # ------------------------------------------------------------------ softmax

    @step
    def exponentials(self):
        """copies exp(logits - maximum)"""
        return np.where(self.seen, self.copies * super().exponentials, 0.0)

    @step
    def rebuilt_weights(self):
        """copies exp(logits - lse) where an lse is handed over"""
        rebuilt = super().rebuilt_weights
        return self.copies * rebuilt if self.is_handed("lse") else rebuilt

    # ------------------------------------------------------------------ backward

    @step
    def d_q_as_key(self):
        """(dK - k (k . dK) / n) / norm: n = d for rms, 1 for l2, whose norm is constant below norm_eps"""
        seen = (self.d_k != 0).any(-1, keepdims=True)  # a key that nobody saw gives 0, even where it is NaN
        return np.where(seen, (self.d_k - self.k * self.d_norm_share) / self.norm, 0.0)

    @step
    def d_norm_share(self):
        """What the norm's own derivative takes away, (..., h, t, 1)"""
        inner = (self.k * self.d_k).sum(-1, keepdims=True)
        if self.key_norm == "rms":
            return inner / self.channels
        return np.where(self.norm > self.smallest_norm, inner, 0.0)

    @step
    def d_qk(self):
        """As query and as key."""
        return self.d_q + self.d_q_as_key


definition = LSH
