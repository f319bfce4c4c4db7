"""One thing taken for another: orders in memory, axes, arguments."""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct, divide
from refattn.definitions.steps import contract, step
from refattn.mistakes.scaled_dot_product.base import catalogue

# ---------------------------------------------------------------------- memory


@catalogue.mistake(why="A pointer and a shape are handed over, not the strides.", sides=("backward",))
class alias_stride(ScaledDotProduct):
    """the cotangent's memory is walked as if it were contiguous"""

    @step
    def d_output(self):
        return np.ravel(super().d_output, order="K").reshape(self.output.shape)


@catalogue.mistake(
    name="alias_stride", why="Rows are the outer axis in memory, heads in the kernel.", sides=("backward",)
)
class alias_rows_and_heads(ScaledDotProduct):
    """the cotangent lies as (..., q, h, e) and is read as (..., h, q, e)"""

    @step
    def d_output(self):
        return np.swapaxes(super().d_output, -2, -3).reshape(self.output.shape)


@catalogue.mistake(name="alias_stride", why="The output's buffer has another order than its shape.", sides=("forward",))
class output_memory(ScaledDotProduct):
    """the output is stored as (..., q, h, e) and read as (..., h, q, e)"""

    @step
    def output(self):
        return np.swapaxes(super().output, -2, -3).reshape(super().output.shape)


# ---------------------------------------------------------------------- axes


@catalogue.mistake(name="softmax_wrong_axis", why="The axis is counted from the wrong end.")
class softmax_over_heads(ScaledDotProduct):
    """the softmax runs over the heads"""

    @step
    def weights(self):
        finite_logits = np.where(np.isneginf(self.masked_logits.real), 0.0, self.masked_logits.real)
        p = self.exponential(self.masked_logits - finite_logits.max(-3, keepdims=True))
        return divide(p, p.sum(-3, keepdims=True))

    @step
    def d_softmax(self):
        return self.rebuilt_weights * (self.d_weights - (self.rebuilt_weights * self.d_weights).sum(-3, keepdims=True))

    @step
    def lse_share(self):
        return divide(self.exponentials, self.row_sum if self.lse_includes_sinks else self.key_sum)

    @step
    def d_sink_logits(self):
        return self.sink_weights * (self.d_lse[..., None] if self.lse_includes_sinks else 0.0)


@catalogue.mistake(
    why="Row i is divided by the sum of column i, since both have as many entries.", sides=("both", "forward")
)
class axis_crossed(ScaledDotProduct):
    """exponentials are summed over the queries, and divide the rows"""

    @step
    def weights(self):
        if self.queries != self.keys:
            return super().weights
        sums = np.swapaxes(self.exponentials.sum(-2, keepdims=True), -1, -2)
        return np.where(self.real_rows, divide(self.exponentials, sums), 0.0)

    @step
    def d_softmax(self):
        if self.queries != self.keys:
            return super().d_softmax
        of_row = np.swapaxes((self.rebuilt_weights * self.d_weights).sum(-1, keepdims=True), -1, -2)
        sums = np.swapaxes(self.exponentials.sum(-2, keepdims=True), -1, -2)
        share = divide(self.exponentials, np.swapaxes(sums, -1, -2))
        return self.rebuilt_weights * self.d_weights - share * of_row

    @step
    def lse_share(self):
        return divide(self.exponentials, self.row_sum if self.lse_includes_sinks else self.key_sum)

    @step
    def d_sink_logits(self):
        return super().d_sink_logits if self.queries != self.keys else self.sink_weights * self.d_lse_of_sinks

    @step
    def d_lse_of_sinks(self):
        return self.d_lse[..., None] if self.lse_includes_sinks else 0.0


@catalogue.mistake(name="axis_crossed", why="The row term is summed over one axis too many.", sides=("backward",))
class delta_over_rows(ScaledDotProduct):
    """the row term is summed over the rows too"""

    @step
    def d_softmax(self):
        return self.rebuilt_weights * (self.d_weights - self.delta.sum(-2, keepdims=True))


@catalogue.mistake(name="axis_crossed", why="The row term is summed over one axis too many.", sides=("backward",))
class delta_over_heads(ScaledDotProduct):
    """the row term is summed over the heads too"""

    @step
    def d_softmax(self):
        return self.rebuilt_weights * (self.d_weights - self.delta.sum(-3, keepdims=True))


# ---------------------------------------------------------------------- arguments


@catalogue.mistake(why="Two halves of a packed array, or two arguments, are taken for one another.")
class swap_kv(ScaledDotProduct):
    """k and v are exchanged"""

    @step
    def alike(self):
        return self.argument("k").shape == self.argument("v").shape

    @step
    def k(self):
        return self.argument("v" if self.alike else "k")

    @step
    def v(self):
        return self.argument("k" if self.alike else "v")

    @step
    def d_k(self):
        return super().d_v if self.alike else super().d_k

    @step
    def d_v(self):
        return super().d_k if self.alike else super().d_v


@catalogue.mistake(
    why="A name or a pointer is mixed up.",
    variants=[{"read": a, "due": b} for a in "qkv" for b in "qkv" if a != b],
)
class arguments_exchanged(ScaledDotProduct):
    """{read} is read where {due} is due"""

    read, due = "v", "k"

    @step
    def mixed_up(self):
        return self.argument(self.read).shape == self.argument(self.due).shape

    def taken(self, name):
        return self.argument(self.read if self.mixed_up and name == self.due else name)

    @step
    def q(self):
        return self.taken("q")

    @step
    def k(self):
        return self.taken("k")

    @step
    def v(self):
        return self.taken("v")

    def returned(self, name):
        """Both uses of what is read; nothing reads what was due."""
        parts = {"q": lambda: self.d_as_q, "k": lambda: self.d_as_k, "v": lambda: self.d_as_v}
        if not self.mixed_up:
            return parts[name]()
        if name == self.due:
            return np.zeros(self.argument(name).shape)
        return parts[name]() + parts[self.due]() if name == self.read else parts[name]()

    @step
    def d_as_q(self):
        return super().d_q

    @step
    def d_as_k(self):
        return super().d_k

    @step
    def d_as_v(self):
        return super().d_v

    @step
    def d_q(self):
        return self.returned("q")

    @step
    def d_k(self):
        return self.returned("k")

    @step
    def d_v(self):
        return self.returned("v")


@catalogue.mistake(name="arguments_exchanged", why="Two arguments are handed over in another order.")
class lengths_exchanged(ScaledDotProduct):
    """query_lengths and key_lengths are exchanged"""

    @step
    def real_queries(self):
        return np.minimum(super().real_keys, self.queries)

    @step
    def real_keys(self):
        return np.minimum(super().real_queries, self.own_keys)


@catalogue.mistake(name="arguments_exchanged", why="Two arguments are handed over in another order.")
class segments_exchanged(ScaledDotProduct):
    """query_segments and key_segments are exchanged"""

    @step
    def visible_by_segments(self):
        right = super().visible_by_segments
        square = self.query_segments is not None and self.queries == self.own_keys
        return np.swapaxes(right, -1, -2) if square else right


@catalogue.mistake(name="arguments_exchanged", why="The wrong buffer is handed to the backward.", sides=("backward",))
class output_for_cotangent(ScaledDotProduct):
    """the row term is made of the cotangent alone"""

    @step
    def delta(self):
        return np.where(self.real_rows, (self.d_output**2).sum(-1, keepdims=True), 0.0)


@catalogue.mistake(name="arguments_exchanged", why="The wrong buffer is handed to the backward.", sides=("backward",))
class cotangent_for_output(ScaledDotProduct):
    """the output is taken for its cotangent in dV"""

    @step
    def d_values_of_head(self):
        used = self.rebuilt_weights * self.rebuilt_dropout
        return contract("...hqk,...hqe->...hke", used, self.output, self.touched)


@catalogue.mistake(why="Terms of one factor are lost: dS is stored without it.", sides=("backward",))
class norm_grad_missing(ScaledDotProduct):
    """dK lacks the row term"""

    @step
    def d_keys_of_head(self):
        lacking = self.d_logits + np.where(self.touched, self.rebuilt_weights * self.delta, 0.0)
        d = self.scale_of_gradients * lacking * self.cap_slope
        return contract("...hqk,...hqd->...hkd", d, self.q, self.touched)
