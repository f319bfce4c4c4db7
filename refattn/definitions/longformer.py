"""Longformer attention in steps: two softmax attentions over the same positions, of which each row takes one.

    local row i:    softmax(scale q[i] . k[j]) over i - left <= j <= i + right and the global keys
    global row i:   softmax(scale q_global[i] . k_global[j]) over all keys

Source: Beltagy, Peters, Cohan 2020, arXiv:2004.05150, section 3.1.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import Definition, step

__all__ = ["Longformer", "Rows", "definition"]


class Rows(ScaledDotProduct):
    """Softmax attention over a window and the keys that every row sees."""

    defaults = {**ScaledDotProduct.defaults, "global_keys": None}

    @step
    def visible_by_window(self):
        """In the window, or a global key."""
        near = super().visible_by_window
        return near if self.global_keys is None else near | self.global_keys[..., None, None, :]


class Longformer(Definition):
    """Local rows see a window and the global keys by the local arrays, global rows all keys by the global arrays."""

    gradients = ("q", "k", "v", "q_global", "k_global", "v_global", "scale")
    defaults = {
        "q_global": None, "k_global": None, "v_global": None, "global_tokens": None, "scale": None, "align": None,
        "query_lengths": None, "key_lengths": None,
    }  # fmt: skip
    inner = Rows

    @step
    def lead(self):
        """The batch axes of all arrays together."""
        names = ("q", "k", "v", "q_global", "k_global", "v_global")
        arrays = [x for n in names if (x := self.argument(n)) is not None]
        return np.broadcast_shapes(self.tokens.shape[:-1], *(x.shape[:-3] for x in arrays))

    @step
    def tokens(self):
        """Which positions are global, (..., t)"""
        return np.zeros(self.q.shape[-2], bool) if self.global_tokens is None else np.asarray(self.global_tokens)

    @step
    def global_rows(self):
        """Rows that take the global softmax, (..., 1, t, 1)"""
        return self.tokens[..., None, :, None]

    @step
    def global_keys(self):
        """Keys that local rows see wherever they stand, (..., t)"""
        return self.tokens

    @step
    def arrays_of_local_rows(self):
        """q, k and v of the local rows."""
        return self.q, self.k, self.v

    @step
    def arrays_of_global_rows(self):
        """q, k and v of the global rows: each the global one where there is one."""
        pairs = ((self.q_global, self.q), (self.k_global, self.k), (self.v_global, self.v))
        return tuple(x if g is None else g for g, x in pairs)

    @step
    def scale_of_global_rows(self):
        """The same as that of the local rows."""
        return self.scale

    @step
    def key_lengths_of_global_rows(self):
        """Padding is seen by no global row either."""
        return self.key_lengths

    def called(self, arrays, **options):
        """Softmax attention over the same positions, called from a step."""
        q, k, v = arrays
        q = np.broadcast_to(q, (*self.lead, *q.shape[-3:]))
        return self.begin(
            self.inner, {"q": q, "k": k, "v": v, "query_lengths": self.query_lengths, "align": 0, **options}
        )

    @step
    def local(self):
        """The attention of the local rows."""
        options = {"window": self.window, "global_keys": self.global_keys, "key_lengths": self.key_lengths}
        return self.called(self.arrays_of_local_rows, scale=self.scale, **options)

    @step
    def whole(self):
        """The attention of the global rows."""
        options = {"key_lengths": self.key_lengths_of_global_rows, "scale": self.scale_of_global_rows}
        return self.called(self.arrays_of_global_rows, **options)

    @step
    def output(self):
        """Each row from its own softmax."""
        return np.where(self.global_rows, self.whole.output, self.local.output)

    # ------------------------------------------------------------------ backward

    @step
    def d_local(self):
        """The backward of the local rows."""
        return self.local.pull(output=np.where(self.global_rows, 0.0, self.cotangent("output")))

    @step
    def d_whole(self):
        """The backward of the global rows."""
        return self.whole.pull(output=np.where(self.global_rows, self.cotangent("output"), 0.0))

    def joined(self, name):
        """A local array's cotangent: that of the global rows too, where they have no array of their own."""
        local, whole = (getattr(call, f"d_{name}") for call in (self.d_local, self.d_whole))
        return local + whole if self.argument(f"{name}_global") is None else local

    @step
    def d_q(self):
        return self.joined("q")

    @step
    def d_k(self):
        return self.joined("k")

    @step
    def d_v(self):
        return self.joined("v")

    @step
    def d_q_global(self):
        return self.d_whole.d_q

    @step
    def d_k_global(self):
        return self.d_whole.d_k

    @step
    def d_v_global(self):
        return self.d_whole.d_v

    @step
    def d_scale(self):
        return self.d_local.d_scale + self.d_whole.d_scale


definition = Longformer
