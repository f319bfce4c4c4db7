"""Memories across segments, in steps: updates, compressions and the losses that these learn from.

    memory' = last rows of [memory, hidden]        compressed' = last rows of [compressed, f(evicted)]

Axes: ``...`` any leading batch axes, ``n`` row of a memory, ``q`` position in the segment, ``m`` and ``o`` channels, ``c``
compressed row, ``a`` tap or place in a span of ``rate`` rows.

Source: Dai et al. 2019, arXiv:1901.02860, section 3.2; Rae et al. 2019, arXiv:1911.05507, section 3.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import Definition, einsum, step

__all__ = ["AutoEncodingLoss", "Compress", "ReconstructionLoss", "UpdateCompressedMemory", "UpdateMemory"]


def joined(*parts):
    """Rows one after the other; None is passed over."""
    rows = [x for x in parts if x is not None]
    lead = np.broadcast_shapes(*(x.shape[:-2] for x in rows))
    return np.concatenate([np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in rows], axis=-2)


def newest(x, count):
    return x[..., max(0, x.shape[-2] - count) :, :]


# ------------------------------------------------------------------------------------------------ updates


class Constants(Definition):
    """Nothing passes: gradients are zeros."""

    gradients = ("memory", "compressed", "hidden")

    @step
    def d_memory(self):
        return np.zeros_like(self.memory)

    @step
    def d_compressed(self):
        return np.zeros_like(self.compressed)

    @step
    def d_hidden(self):
        return np.zeros_like(self.hidden)


class UpdateMemory(Constants):
    """The newest rows."""

    defaults = {"memory": None, "hidden": None}

    @step
    def output(self):
        return newest(joined(self.memory, self.hidden), self.length)


class UpdateCompressedMemory(Constants):
    """What memory lets go of is compressed."""

    results = {"memory": "new_memory", "compressed": "new_compressed", "evicted": "evicted"}
    defaults = {"memory": None, "compressed": None, "hidden": None, "evict": "segment"}

    @step
    def old(self):
        """The rows of memory, none where there is none yet."""
        return self.hidden[..., :0, :] if self.memory is None else self.memory

    @step
    def rows(self):
        """[memory, hidden]"""
        return joined(self.old, self.hidden)

    @step
    def gone(self):
        """How many rows go."""
        q = self.hidden.shape[-2]
        return q if self.evict == "segment" else max(0, self.old.shape[-2] + q - self.memory_length)

    @step
    def evicted(self):
        """The oldest rows"""
        return self.rows[..., : self.gone, :]

    @step
    def new_memory(self):
        """The newest rows"""
        return newest(self.rows, self.memory_length)

    @step
    def new_rows(self):
        """What the compression makes of the evicted rows."""
        if not self.gone or not self.compressed_length:
            return None
        return np.asarray(self.compress(np.ascontiguousarray(self.evicted)))

    @step
    def in_order(self):
        """Compressed rows, oldest first."""
        return (self.compressed, self.new_rows)

    @step
    def new_compressed(self):
        none = self.rows[..., :0, :] if all(x is None for x in self.in_order) else None
        return newest(joined(*self.in_order, none), self.compressed_length)


# ------------------------------------------------------------------------------------------------ compressions


class Compress(Definition):
    """floor(n / rate) rows, each a sum over taps or one of the old rows."""

    gradients = ("old", "weight", "bias")
    defaults = {"method": "mean", "weight": None, "bias": None, "usage": None, "dilation": 2}

    @step
    def count(self):
        return self.old.shape[-2] // self.rate

    @step
    def spans(self):
        """(..., c, a, m)"""
        whole = self.old[..., : self.count * self.rate, :]
        return whole.reshape(*whole.shape[:-2], self.count, self.rate, whole.shape[-1])

    @step
    def places(self):
        """(c, a): the old row that each tap of each new row reads; below 0: none."""
        taps = self.rate if self.weight is None else self.weight.shape[-1]
        step_ = self.dilation if self.method == "dilated_conv" else 1
        last = np.arange(self.count)[:, None] * self.rate + self.rate - 1
        return last - (taps - 1 - np.arange(taps)) * step_

    @step
    def read(self):
        """(..., c, a, m), zeros before the first row"""
        rows = self.old[..., np.maximum(self.places, 0), :]
        return np.where((self.places >= 0)[..., None], rows, 0.0)

    @step
    def share(self):
        """(..., c, a, m): how much of each read row, by channel, the new row is; for the methods without weights."""
        if self.method == "mean":
            return np.full(self.spans.shape, 1.0 / self.rate)
        return np.arange(self.rate)[:, None] == np.argmax(self.spans.real, axis=-2)[..., None, :]

    @step
    def kept(self):
        """(..., c): the rows of the largest usage in their order, the newer of equal ones."""
        whole = self.count * self.rate
        used = np.broadcast_to(self.usage, self.old.shape[:-1])[..., :whole]
        order = np.argsort(-used[..., ::-1], axis=-1, kind="stable")[..., : self.count]
        return np.sort(whole - 1 - order, axis=-1)

    @step
    def output(self):
        if self.method == "most_used":
            return np.take_along_axis(self.old, self.kept[..., None], axis=-2)
        if self.weight is None:
            return (self.spans * self.share).sum(-2)
        return einsum("...cam,oma->...co", self.read, self.weight) + (0.0 if self.bias is None else self.bias)

    # ------------------------------------------------------------------ backward

    @step
    def d_read(self):
        d = self.cotangent("output")
        return d[..., None, :] * self.share if self.weight is None else einsum("...co,oma->...cam", d, self.weight)

    @step
    def d_old(self):
        """Every old row gets what was read from it."""
        d_old = np.zeros_like(self.old)
        if self.method == "most_used":
            np.put_along_axis(d_old, self.kept[..., None], self.cotangent("output"), axis=-2)
            return d_old
        for c, a in np.ndindex(*self.places.shape):
            if self.places[c, a] >= 0:
                d_old[..., self.places[c, a], :] += self.d_read[..., c, a, :]
        return d_old

    @step
    def d_weight(self):
        return einsum("...cam,...co->oma", self.read, self.cotangent("output"))

    @step
    def d_bias(self):
        return einsum("...co->o", self.cotangent("output"))


# ------------------------------------------------------------------------------------------------ losses


class Distance(Definition):
    """The norm of a difference, or its mean square."""

    @step
    def output(self):
        total = np.asarray((self.difference * self.difference).sum())
        return np.sqrt(total) if self.norm == "l2" else total / max(1, self.difference.size)

    @step
    def d_difference(self):
        """Along the difference; 0 where the norm is 0."""
        d = self.cotangent("output")
        if self.norm == "mse":
            return 2.0 * d * self.difference / max(1, self.difference.size)
        return d * self.difference / (self.output if self.output.real > 0 else 1.0)


class ReconstructionLoss(Distance):
    """Attention of the segment to the compressed rows less that to the old ones; a gradient for the compressed rows alone."""

    gradients = ("compressed",)
    defaults = {"norm": "l2", "scale": None}
    inner = ScaledDotProduct

    def attend(self, rows):
        q, k = einsum("...qm,mhd->...hqd", self.hidden, self.w_q), einsum("...nm,mhd->...hnd", rows, self.w_k)
        return {"q": q, "k": k, "v": einsum("...nm,mhe->...hne", rows, self.w_v), "scale": self.scale}

    @step
    def before(self):
        return self.begin(self.inner, self.attend(self.old))

    @step
    def after(self):
        return self.begin(self.inner, self.attend(self.compressed))

    @step
    def difference(self):
        return self.after.output - self.before.output

    @step
    def d_after(self):
        return self.after.pull(output=self.d_difference).gradient(["k", "v"])

    @step
    def d_compressed(self):
        """d_k w_k^T + d_v w_v^T"""
        keys = einsum("...hnd,mhd->...nm", self.d_after["k"], self.w_k)
        return keys + einsum("...hne,mhe->...nm", self.d_after["v"], self.w_v)


class AutoEncodingLoss(Distance):
    """The old rows rebuilt from the compressed ones by a linear decoder, less the old rows, which are constants."""

    gradients = ("compressed", "weight", "bias")
    defaults = {"norm": "l2", "bias": None}

    @step
    def decoded(self):
        """(..., c, a, o)"""
        decoded = einsum("...cm,moa->...cao", self.compressed, self.weight)
        return decoded if self.bias is None else decoded + self.bias

    @step
    def difference(self):
        c, rate = self.decoded.shape[-3:-1]
        whole = self.old[..., : c * rate, :]
        return self.decoded - whole.reshape(*whole.shape[:-2], c, rate, whole.shape[-1])

    @step
    def d_compressed(self):
        return einsum("...cao,moa->...cm", self.d_difference, self.weight)

    @step
    def d_weight(self):
        return einsum("...cao,...cm->moa", self.d_difference, self.compressed)

    @step
    def d_bias(self):
        return einsum("...cao->o", self.d_difference)


# ------------------------------------------------------------------------------------------------ examples


def update_memory_example(rng, *, b=2, n=3, q=2, m=4):
    return {"memory": rng.standard_normal((b, n, m)), "hidden": rng.standard_normal((b, q, m)), "length": n}


def means_of_two(rows):
    """A compression at rate 2."""
    count = rows.shape[-2] // 2
    return rows[..., : 2 * count, :].reshape(*rows.shape[:-2], count, 2, rows.shape[-1]).mean(-2)


def update_compressed_memory_example(rng, *, b=2, n=6, q=4, c=3, m=4):
    shapes = {"memory": (b, n, m), "compressed": (b, c, m), "hidden": (b, q, m)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return {**arrays, "rate": 2, "memory_length": n, "compressed_length": c, "compress": means_of_two}


def compress_example(rng, *, b=2, n=7, m=3, o=4, rate=2, method="dilated_conv", **options):
    normal = rng.standard_normal
    arrays = {"old": normal((b, n, m))}
    if "conv" in method:
        arrays |= {"weight": normal((o, m, 3 if method == "dilated_conv" else rate)), "bias": normal(o)}
    if method == "most_used":
        arrays["usage"] = normal((b, n))
    return {**arrays, "rate": rate, "method": method, **options}


def attention_reconstruction_loss_example(rng, *, b=2, q=3, n=6, c=3, m=4, h=2, d=3, e=5, **options):
    shapes = {"hidden": (b, q, m), "old": (b, n, m), "compressed": (b, c, m), "w_q": (m, h, d), "w_k": (m, h, d)}
    return {
        **{name: rng.standard_normal(x) for name, x in shapes.items()},
        "w_v": rng.standard_normal((m, h, e)),
        **options,
    }


def auto_encoding_loss_example(rng, *, b=2, c=3, m=4, o=5, rate=2, **options):
    normal = rng.standard_normal
    arrays = {"old": normal((b, c * rate + 1, o)), "compressed": normal((b, c, m))}
    return {**arrays, "weight": normal((m, o, rate)), "bias": normal(o), **options}
