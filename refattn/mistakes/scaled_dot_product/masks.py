"""Mistakes about mask, pattern and segments."""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import step, sum_to_shape
from refattn.mistakes.scaled_dot_product.base import catalogue, scattered


@catalogue.mistake(why="Two masks are combined by the wrong connective.")
class mask_or_causal(ScaledDotProduct):
    """mask and causal are joined by "or\""""

    @step
    def visible_by_mask(self):
        both = self.mask is not None and self.causal
        return super().visible_by_mask | super().visible_by_causal if both else super().visible_by_mask

    @step
    def visible_by_causal(self):
        return True if self.mask is not None else super().visible_by_causal


@catalogue.mistake(why="A side path, one query say, does not read it.", sides=("both", "forward"))
class mask_drop(ScaledDotProduct):
    """the mask is ignored"""

    mask = None


@catalogue.mistake(why="A side path does not read it.", sides=("both", "forward"))
class pattern_drop(ScaledDotProduct):
    """the pattern is ignored"""

    pattern = None


@catalogue.mistake(why="Packed documents are taken for one sequence.", sides=("both", "forward"))
class segments_wrong(ScaledDotProduct):
    """other documents are visible"""

    query_segments = None


@catalogue.mistake(name="segments_wrong", why="Documents in order make <= look right under causal.")
class segments_at_most(ScaledDotProduct):
    """documents are compared by order: earlier ones are visible too"""

    @step
    def visible_by_segments(self):
        if self.query_segments is None:
            return True
        return self.query_segments[..., None, :, None] >= self.key_segments[..., None, None, :]


@catalogue.mistake(name="segments_wrong", why="The comparison is turned round.")
class segments_at_least(ScaledDotProduct):
    """documents are compared by order: later ones are visible too"""

    @step
    def visible_by_segments(self):
        if self.query_segments is None:
            return True
        return self.query_segments[..., None, :, None] <= self.key_segments[..., None, None, :]


@catalogue.mistake(name="segments_wrong", why="Padding is given the number 0, and so is the first document.")
class segment_zero_hidden(ScaledDotProduct):
    """document 0 is taken for padding"""

    @step
    def visible_by_segments(self):
        if self.query_segments is None:
            return True
        return super().visible_by_segments & (self.key_segments[..., None, None, :] != 0)


@catalogue.mistake(name="segments_wrong", why="The batch axis of the numbers is lost.")
class segments_of_first(ScaledDotProduct):
    """the documents of batch entry 0 are those of all"""

    @step
    def visible_by_segments(self):
        if self.query_segments is None:
            return True
        whole = np.broadcast_to(super().visible_by_segments, (*self.lead, 1, self.queries, self.own_keys))
        return whole.reshape(-1, *whole.shape[-3:])[:1].reshape(whole.shape[-3:]) if whole.size else whole


@catalogue.mistake(why="One library's True means attend, the other's hide.")
class keep_inverted(ScaledDotProduct):
    """True hides"""

    @step
    def visible_by_mask(self):
        return True if self.mask is None else ~np.asarray(self.mask)


@catalogue.mistake(why="A boolean mask is added where a float mask is due.")
class keep_additive(ScaledDotProduct):
    """the mask is added to the logits as 0 and 1"""

    mask = None

    @step
    def added(self):
        given = self.argument("mask")
        return super().added if given is None else super().added + self.beside(np.asarray(given, dtype=np.float64), 0.0)


class BiasAsMask(ScaledDotProduct):
    """The bias decides who is seen, and is not added."""

    bias = None
    d_bias = 0.0

    @step
    def visible_by_bias(self):
        given = self.argument("bias")
        return True if given is None else given.real != 0

    @step
    def visible_by_mask(self):
        return super().visible_by_mask & self.visible_by_bias


@catalogue.mistake(why="A float mask is cast to bool on the way.")
class mask_bool_cast(BiasAsMask):
    """the bias is cast to bool, nonzero = may attend"""


@catalogue.mistake(name="mask_bool_cast", why="A float mask is cast to bool on the way.")
class mask_bool_cast_inverted(BiasAsMask):
    """the bias is cast to bool, nonzero = hidden"""

    @step
    def visible_by_bias(self):
        given = self.argument("bias")
        return True if given is None else given.real == 0


@catalogue.mistake(why="Without a mask none of the code about hidden keys runs.")
class none_mask(ScaledDotProduct):
    """key_lengths count only where a mask is given"""

    @step
    def visible_by_key_lengths(self):
        return True if self.mask is None else super().visible_by_key_lengths


@catalogue.mistake(name="none_mask", why="A mask takes the place of the lengths.")
class mask_for_lengths(ScaledDotProduct):
    """key_lengths do not count where a mask is given"""

    @step
    def visible_by_key_lengths(self):
        return super().visible_by_key_lengths if self.mask is None else True


# ---------------------------------------------------------------------- strides of mask and bias


def _flat(read):
    """Of (b, h, q, k) places the flat ones that are read."""
    return {"read": staticmethod(read)}


READINGS = (
    {"how": "from batch 0 for all", **_flat(lambda b, h, i, j, n: (0 * b, h, i, j))},
    {"how": "from head 0 for all", **_flat(lambda b, h, i, j, n: (b, 0 * h, i, j))},
    {"how": "from query 0 for all", **_flat(lambda b, h, i, j, n: (b, h, 0 * i, j))},
    {"how": "with the head's number as its batch", **_flat(lambda b, h, i, j, n: (h % n[0] + 0 * b, h, i, j))},
    {
        "how": "with (batch, head) counted through as its batch",
        **_flat(lambda b, h, i, j, n: ((b * n[1] + h) % n[0], h, i, j)),
    },
    {"how": "transposed", **_flat(lambda b, h, i, j, n: (b, h, j, i) if n[2] == n[3] else (b, h, i, j))},
    {
        "how": "with as many keys in a row as there are queries",
        **_flat(lambda b, h, i, j, n: _in_rows(b, h, i, j, n, n[2])),
    },
    {"how": "with one key more in a row", **_flat(lambda b, h, i, j, n: _in_rows(b, h, i, j, n, n[3] + 1))},
    *(
        {
            "how": f"in rows padded to a multiple of {m}",
            **_flat(lambda b, h, i, j, n, m=m: _in_rows(b, h, i, j, n, -(-n[3] // m) * m)),
        }
        for m in (4, 8, 16)
    ),
)


def _in_rows(b, h, i, j, n, stride):
    flat = (i * stride + j) % (n[2] * n[3])
    return b, h, flat // n[3], flat % n[3]


class Misread(ScaledDotProduct):
    """An array of pairs read with other strides."""

    @step
    def places(self):
        """The flat place in (..., h, q, k) that is read for each pair."""
        n = (int(np.prod(self.lead)), *self.own_pairs[-3:])
        b, h, i, j = np.ogrid[tuple(slice(size) for size in n)]
        at = np.broadcast_arrays(*self.read(b, h, i, j, n))
        return np.ravel_multi_index(at, n).reshape(self.own_pairs) if np.prod(n) else np.zeros(self.own_pairs, int)


@catalogue.mistake(
    why="A broadcast axis has stride 0, and a kernel that takes another sees other rows.", variants=READINGS
)
class mask_stride(Misread):
    """the mask is read {how}"""

    @step
    def visible_by_mask(self):
        if self.mask is None:
            return True
        return np.broadcast_to(self.mask, self.own_pairs).ravel()[self.places]


@catalogue.mistake(
    name="mask_stride",
    why="A broadcast axis has stride 0, and a kernel that takes another sees other rows.",
    variants=READINGS,
)
class bias_stride(Misread):
    """the bias is read {how}"""

    @step
    def bias(self):
        given = self.argument("bias")
        return None if given is None else np.broadcast_to(given, self.own_pairs).ravel()[self.places]

    @step
    def d_bias(self):
        d = scattered(self.d_own_added, self.places, self.own_pairs)
        return sum_to_shape(d, np.shape(self.argument("bias")))


# ---------------------------------------------------------------------- where hidden pairs come back


@catalogue.mistake(
    why="The backward rebuilds the weights and forgets what hid them.",
    sides=("backward",),
    variants=(
        {"what": "causal", "causal": False},
        {"what": "window", "window": None},
        {"what": "causal and window", "causal": False, "window": None},
        {"what": "mask", "mask": None},
        {"what": "pattern", "pattern": None},
        {"what": "segments", "query_segments": None},
        {"what": "key_lengths", "visible_by_key_lengths": True},
        {"what": "every restriction", "visible": True},
    ),
)
class bwd_mask_dropped(ScaledDotProduct):
    """the backward ignores {what}"""


@catalogue.mistake(why="Weights are normalised over all keys, then those of hidden ones are zeroed.")
class mask_after_softmax(ScaledDotProduct):
    """the mask acts on the weights, which are not normalised again"""

    visible_by_mask = True

    @step
    def dropout(self):
        return super().dropout * self.beside(super().visible_by_mask, True)


@catalogue.mistake(
    name="mask_after_softmax", why="Weights are normalised over all keys, then those of hidden ones are zeroed."
)
class causal_after_softmax(ScaledDotProduct):
    """causal acts on the weights, which are not normalised again"""

    visible_by_causal = True

    @step
    def dropout(self):
        return super().dropout * self.beside(super().visible_by_causal, True)


@catalogue.mistake(
    name="mask_after_softmax", why="Weights are normalised over all keys, then those of hidden ones are zeroed."
)
class window_after_softmax(ScaledDotProduct):
    """the window acts on the weights, which are not normalised again"""

    visible_by_window = True

    @step
    def dropout(self):
        return super().dropout * self.beside(super().visible_by_window, True)


@catalogue.mistake(
    name="mask_after_softmax", why="Weights are normalised over all keys, then those of hidden ones are zeroed."
)
class segments_after_softmax(ScaledDotProduct):
    """segments act on the weights, which are not normalised again"""

    visible_by_segments = True

    @step
    def dropout(self):
        return super().dropout * self.beside(super().visible_by_segments, True)


@catalogue.mistake(
    name="mask_after_softmax", why="Weights are normalised over all keys, then those of hidden ones are zeroed."
)
class lengths_after_softmax(ScaledDotProduct):
    """key_lengths act on the weights, which are not normalised again"""

    visible_by_key_lengths = True

    @step
    def dropout(self):
        return super().dropout * self.beside(super().visible_by_key_lengths, True)
