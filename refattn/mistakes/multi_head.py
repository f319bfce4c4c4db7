"""The ways people get multi-head attention wrong; those of softmax attention are lifted."""

import numpy as np

from refattn.definitions.multi_head import MultiHead
from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.scaled_dot_product import catalogue as dense

__all__ = ["catalogue"]

catalogue = Catalogue(MultiHead, built_on=dense)

# ---------------------------------------------------------------------- projections


def interleaved(w):
    """A projection (m, h, d) whose columns are read as d groups of h."""
    m, h, d = w.shape
    return np.swapaxes(w.reshape(m, d, h), 1, 2)


def parted(w):
    """The inverse of ``interleaved``."""
    return np.swapaxes(w, 1, 2).reshape(w.shape)


@catalogue.mistake(why="One wide projection is cut as (channel, head) where (head, channel) is due.")
class heads_interleaved(MultiHead):
    """the columns of w_q and w_k are read channel by channel, not head by head"""

    @step
    def w_q(self):
        return interleaved(self.argument("w_q"))

    @step
    def w_k(self):
        return interleaved(self.argument("w_k"))

    @step
    def d_w_q(self):
        return parted(super().d_w_q)

    @step
    def d_w_k(self):
        return parted(super().d_w_k)


@catalogue.mistake(
    name="heads_interleaved", why="One wide projection is cut as (channel, head) where (head, channel) is due."
)
class all_heads_interleaved(heads_interleaved):
    """the columns of w_q, w_k and w_v are read channel by channel, not head by head"""

    @step
    def w_v(self):
        return interleaved(self.argument("w_v"))

    @step
    def d_w_v(self):
        return parted(super().d_w_v)


@catalogue.mistake(why="Heads are merged by a reshape without moving their axis, or in another order.")
class heads_not_merged(MultiHead):
    """the output projection reads the heads' channels in another order than they stand in"""

    @step
    def w_o(self):
        h, e, m = self.argument("w_o").shape
        return np.swapaxes(self.argument("w_o").reshape(e, h, m), 0, 1)

    @step
    def d_w_o(self):
        return np.swapaxes(super().d_w_o, 0, 1).reshape(self.argument("w_o").shape)


@catalogue.mistake(
    name="heads_not_merged", why="(..., h, q, e) is reshaped to (..., q, h e) without moving the head's axis."
)
class heads_reshaped(MultiHead):
    """heads are merged by a reshape that leaves their axis where it is"""

    @step
    def heads_output(self):
        right = super().heads_output
        return np.swapaxes(right.reshape(*right.shape[:-3], right.shape[-2], right.shape[-3], -1), -2, -3)

    @step
    def d_heads_output(self):
        return np.swapaxes(super().d_heads_output, -2, -3).reshape(self.attention.output.shape)


@catalogue.mistake(why="A weight is stored as (out, in).")
class projection_transposed(MultiHead):
    """w_q and w_k of all heads together are read transposed, where that is possible"""

    def transposed(self, w):
        m, h, d = w.shape
        return w.reshape(m, h * d).T.reshape(w.shape) if m == h * d else w

    @step
    def w_q(self):
        return self.transposed(self.argument("w_q"))

    @step
    def w_k(self):
        return self.transposed(self.argument("w_k"))

    @step
    def d_w_q(self):
        return self.transposed(super().d_w_q)

    @step
    def d_w_k(self):
        return self.transposed(super().d_w_k)


@catalogue.mistake(why="The embedding's size is taken for that of a head.")
class scale_dmodel(MultiHead):
    """the scale comes from the model channels, not from those of a head"""

    @step
    def scale(self):
        given = self.argument("scale")
        return self.x_q.shape[-1] ** -0.5 if given is None else given


@catalogue.mistake(
    why="A bias is not loaded, or not handed on.",
    variants=[
        {"what": " and ".join(names), **dict.fromkeys(names), **{f"d_{n}": 0.0 for n in names}}
        for names in (("b_q",), ("b_k",), ("b_v",), ("b_o",), ("b_q", "b_k", "b_v"))
    ],
)
class projection_bias_drop(MultiHead):
    """{what} not added"""


@catalogue.mistake(why="A mean where a sum is due.", sides=("backward",), arrays=("b_q", "b_k", "b_v", "b_o"))
class projection_bias_grad(MultiHead):
    """gradients of the projections' biases are means over the tokens"""

    @step
    def d_b_q(self):
        return super().d_b_q / tokens(self.d_q)

    @step
    def d_b_k(self):
        return super().d_b_k / tokens(self.d_own_k)

    @step
    def d_b_v(self):
        return super().d_b_v / tokens(self.d_own_v)

    @step
    def d_b_o(self):
        return super().d_b_o / max(1, np.prod(self.d_output.shape[:-1]))


def tokens(d):
    """How many positions of all batch entries d (..., h, t, d) has."""
    return max(1, d[..., 0, :, 0].size) if d.size else 1


@catalogue.mistake(
    name="projection_bias_grad",
    why="Only one batch entry is summed.",
    sides=("backward",),
    arrays=("b_q", "b_k", "b_v", "b_o"),
)
class projection_bias_grad_of_first(MultiHead):
    """gradients of the projections' biases are those of batch entry 0"""

    def first(self, d):
        d = d.reshape(-1, *d.shape[-3:])[:1]
        return d.sum((0, -2))

    @step
    def d_b_q(self):
        return self.first(self.d_q)

    @step
    def d_b_k(self):
        return self.first(self.d_own_k)

    @step
    def d_b_v(self):
        return self.first(self.d_own_v)

    @step
    def d_b_o(self):
        return self.first(self.d_output[..., None, :, :])[0]


# ---------------------------------------------------------------------- which tokens


@catalogue.mistake(why="Self-attention is the only case that is tried.")
class values_from_queries(MultiHead):
    """k and v are projections of the query tokens"""

    @step
    def alike(self):
        shapes = {self.argument(n).shape for n in ("x_q", super().role_of_keys, super().role_of_values)}
        return len(shapes) == 1

    @step
    def role_of_keys(self):
        return "x_q" if self.alike else super().role_of_keys

    @step
    def role_of_values(self):
        return "x_q" if self.alike else super().role_of_values


@catalogue.mistake(name="values_from_queries", why="x_v has the default of x_k, and is never read.")
class values_from_keys(MultiHead):
    """v is a projection of the key tokens"""

    @step
    def role_of_values(self):
        alike = self.argument(super().role_of_values).shape == self.key_tokens.shape
        return self.role_of_keys if alike else super().role_of_values


@catalogue.mistake(name="swap_kv", why="Two arguments are handed over in another order.")
class tokens_swapped(MultiHead):
    """keys and values are made of each other's tokens"""

    @step
    def alike(self):
        return self.argument(super().role_of_keys).shape == self.argument(super().role_of_values).shape

    @step
    def role_of_keys(self):
        return super().role_of_values if self.alike else super().role_of_keys

    @step
    def role_of_values(self):
        return super().role_of_keys if self.alike else super().role_of_values


class OneRole(MultiHead):
    """An array in several roles gets the gradient of one."""

    last = False

    @step
    def d_roles(self):
        return {n: parts[-1:] if self.last else parts[:1] for n, parts in super().d_roles.items()}


@catalogue.mistake(
    why="The gradient of one role overwrites that of another.",
    sides=("backward",),
    variants=({"which": "first", "last": False}, {"which": "last", "last": True}),
)
class role_grad_dropped(OneRole):
    """an array in several roles gets the gradient of its {which} one"""


# ---------------------------------------------------------------------- extra keys


class FewerExtras(MultiHead):
    """A dropout mask without the columns of what is left out."""

    @step
    def dropout_mask(self):
        given = self.argument("dropout_mask")
        own = self.own_k.shape[-2]
        if given is None or given.shape[-1] <= own:
            return given
        left_out = own if self.argument("extra_key") is not None and self.extra_key is None else -1
        return np.delete(given, left_out, axis=-1) if self.fewer else given

    @step
    def fewer(self):
        given = (self.argument("extra_key") is not None) + bool(self.argument("zero_attention"))
        return self.extra_of_keys.shape[-2] < given


@catalogue.mistake(why="Two learned rows are easily forgotten.")
class extra_key_drop(FewerExtras):
    """the extra key and value are left out"""

    extra_key = None
    extra_value = None
    d_extra_key = 0.0
    d_extra_value = 0.0


@catalogue.mistake(why="An option that few use.")
class zero_attention_drop(FewerExtras):
    """the key of zeros is left out"""

    zero_attention = False


@catalogue.mistake(why="The row of zeros is appended to the tokens, before they are projected.")
class zero_attention_projected(MultiHead):
    """the row of zeros is a token: its key and value are the biases of the projections"""

    @step
    def zero_key(self):
        return super().zero_key if self.b_k is None else self.b_k

    @step
    def zero_value(self):
        return super().zero_value if self.b_v is None else self.b_v

    @step
    def d_b_k(self):
        return super().d_b_k + self.of_zero(self.d_k)

    @step
    def d_b_v(self):
        return super().d_b_v + self.of_zero(self.d_v)

    def of_zero(self, d):
        d = d[..., -1, :] * float(self.zero_attention)
        return d.sum(axis=tuple(range(d.ndim - 2)))


class LastKeyHides(ScaledDotProduct):
    """Extra keys are visible where the last key is."""

    @step
    def visible(self):
        seen = super().visible
        if not self.extra_keys or not self.own_keys:
            return seen
        last = seen[..., self.own_keys - 1 : self.own_keys]
        return np.concatenate([seen[..., : self.own_keys], seen[..., self.own_keys :] & last], axis=-1)


@catalogue.mistake(why="The mask is padded with its last column.")
class extra_key_masked(MultiHead):
    """mask, causal and lengths hide the extra keys with the last key"""

    inner = LastKeyHides


@catalogue.mistake(name="extra_key_masked", why="The extra value is taken for a key's, and the other way round.")
class extra_swapped(MultiHead):
    """extra key and extra value are exchanged"""

    @step
    def alike(self):
        return self.argument("extra_key") is not None and np.shape(self.argument("extra_key")) == np.shape(
            self.argument("extra_value")
        )

    @step
    def extra_key(self):
        return self.argument("extra_value" if self.alike else "extra_key")

    @step
    def extra_value(self):
        return self.argument("extra_key" if self.alike else "extra_value")

    @step
    def d_extra_key(self):
        return super().d_extra_value if self.alike else super().d_extra_key

    @step
    def d_extra_value(self):
        return super().d_extra_key if self.alike else super().d_extra_value
