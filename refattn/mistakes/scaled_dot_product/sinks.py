"""Mistakes about sinks."""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import step
from refattn.mistakes.scaled_dot_product.base import TILES, catalogue
from refattn.mistakes.scaled_dot_product.softmax import InRange


@catalogue.mistake(why="Sinks are zero at first, and nothing shows.")
class sink_drop(ScaledDotProduct):
    """the sinks are ignored"""

    sinks = None
    d_sinks = 0.0


@catalogue.mistake(name="sink_drop", why="The backward knows no sinks.", sides=("backward",), arrays=("sinks",))
class sink_gradient_drop(ScaledDotProduct):
    """the sinks get no gradient"""

    d_sinks = 0.0


@catalogue.mistake(why="Only the logits are shifted.")
class sink_unshifted(ScaledDotProduct):
    """the maximum is not subtracted from the sinks"""

    @step
    def largest(self):
        return self.masked_logits.real.max(-1, keepdims=True, initial=-np.inf)

    @step
    def sink_exponentials(self):
        return np.broadcast_to(self.exponential(self.sink_logits), (*self.pairs[:-1], self.sink_logits.shape[-1]))


@catalogue.mistake(name="sink_unshifted", why="The sinks are counted after the loop over keys.")
class sink_outside_maximum(InRange):
    """the sinks are left out of the maximum: exp(sink - maximum) overflows"""

    @step
    def largest(self):
        return self.masked_logits.real.max(-1, keepdims=True, initial=-np.inf)


@catalogue.mistake(why="A sink enters in the loop and at its end.")
class sink_twice(ScaledDotProduct):
    """the sinks are counted twice"""

    @step
    def sink_exponentials(self):
        return 2 * super().sink_exponentials


@catalogue.mistake(name="sink_twice", why="Every split counts the sinks, then the splits are merged.", variants=TILES)
class sink_every_split(ScaledDotProduct):
    """the sinks are counted in every split of {tile} keys"""

    @step
    def sink_exponentials(self):
        return max(1, -(-self.keys // self.tile)) * super().sink_exponentials


@catalogue.mistake(why="The axis of heads is (group, head of the group) in one place, the reverse in the other.")
class sink_heads(ScaledDotProduct):
    """the sinks are laid out by group, not by head"""

    @step
    def regrouped(self):
        """Whose sinks each head gets."""
        return np.arange(self.heads).reshape(self.key_heads, -1).T.ravel()

    @step
    def sinks(self):
        given = self.argument("sinks")
        return None if given is None else given[self.regrouped]

    @step
    def d_sinks(self):
        return super().d_sinks[np.argsort(self.regrouped)]


@catalogue.mistake(why="Both conventions of the lse are in use.")
class sink_lse(ScaledDotProduct):
    """the lse leaves the sinks out, or counts them where it should not"""

    @step
    def lse_includes_sinks(self):
        return not self.argument("lse_includes_sinks")


@catalogue.mistake(name="sink_lse", why="The lse of the keys is what is stored.", sides=("backward",))
class sink_saved_lse(ScaledDotProduct):
    """the backward recomputes the weights from an lse without the sinks"""

    @step
    def saved_lse(self):
        return np.where(self.real_rows, self.maximum + np.log(self.key_sum), -np.inf)[..., 0]


@catalogue.mistake(
    why="Rows, terms or factors of the sum are lost.",
    sides=("backward",),
    arrays=("sinks",),
    variants=(
        {"says": "the sinks' gradient lacks the cotangent of the lse", "d_lse": 0.0},
        {"says": "the sinks' gradient lacks the row term", "delta": 0.0},
        {"says": "the sinks' gradient sums over padded rows too", "visible_by_query_lengths": True},
    ),
)
class sink_grad(ScaledDotProduct):
    """{says}"""

    @step
    def d_sink_logits(self):
        d_lse = self.d_lse[..., None] if self.lse_includes_sinks and np.ndim(self.d_lse) else 0.0
        return np.where(self.sink_weights == 0, 0.0, self.sink_weights * (d_lse - self.delta))


@catalogue.mistake(
    name="sink_grad",
    why="Rows of the sum are lost.",
    sides=("backward",),
    arrays=("sinks",),
    variants=(
        {"which": "batch entry 0", "axis": "batch", "first": True},
        {"which": "the last batch entry", "axis": "batch", "first": False},
        {"which": "the first row", "axis": "rows", "first": True},
        {"which": "the last row", "axis": "rows", "first": False},
    ),
)
class sink_grad_rows(ScaledDotProduct):
    """the sinks' gradient is that of {which}"""

    axis, first = "rows", True

    @step
    def d_sinks(self):
        x = self.d_sink_logits
        x = x.reshape(-1, *x.shape[-3:])
        end = slice(0, 1) if self.first else slice(-1, None)
        x = x[end] if self.axis == "batch" else x[..., end, :]
        return x.sum((0, 2)).reshape(np.shape(self.argument("sinks")))


@catalogue.mistake(name="sink_grad", why="A sign is lost.", sides=("backward",), arrays=("sinks",))
class sink_grad_sign(ScaledDotProduct):
    """the sinks' gradient has the wrong sign"""

    @step
    def d_sinks(self):
        return -super().d_sinks
