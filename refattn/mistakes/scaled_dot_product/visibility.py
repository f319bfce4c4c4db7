"""Mistakes about who sees whom."""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct, per_batch
from refattn.definitions.steps import step, sum_to_shape
from refattn.mistakes.scaled_dot_product.base import TILES, catalogue, scattered

# ---------------------------------------------------------------------- the diagonal

PLACES = (
    {"place": "upper left"},
    {"place": "lower right"},
    {"place": "lower right of the padded lengths"},
    {"place": "lower right of the padded keys"},
    {"place": "lower right of the padded queries"},
    {"place": "as far to the other side"},
)


class Misplaced(ScaledDotProduct):
    """A place of query 0 that is not the one asked for."""

    place = "upper left"

    @step
    def misplaced(self):
        """Where the mistake puts query 0 on the key axis."""
        return {
            "upper left": per_batch(0, self.lead),
            "lower right": self.real_keys - self.real_queries,
            "lower right of the padded lengths": per_batch(self.keys - self.queries, self.lead),
            "lower right of the padded keys": self.keys - self.real_queries,
            "lower right of the padded queries": self.real_keys - self.queries,
            "as far to the other side": -super().offset,
        }[self.place]


@catalogue.mistake(
    why="Frameworks put the diagonal at the upper left or the lower right; a cache's length is forgotten.",
    sides=("both", "forward"),
    variants=PLACES,
)
class causal_other(Misplaced):
    """causal and window stand {place}"""

    @step
    def offset(self):
        return self.misplaced if self.causal or self.window is not None else super().offset


@catalogue.mistake(
    name="causal_other",
    why="causal is a path of its own, with another origin than the window's.",
    sides=("both", "forward"),
    variants=PLACES,
)
class causal_diagonal_other(Misplaced):
    """the causal diagonal stands {place}"""

    @step
    def visible_by_causal(self):
        return self.j - self.i <= self.misplaced if self.causal else True


@catalogue.mistake(
    name="causal_other",
    why="The bound of the loop over keys is rounded up, and its last tile is not masked.",
    variants=TILES,
)
class causal_rounded(ScaledDotProduct):
    """all keys of the diagonal's tile of {tile} keys are visible"""

    @step
    def visible_by_causal(self):
        return self.j // self.tile <= (self.i + self.offset) // self.tile if self.causal else True


@catalogue.mistake(why="The backward has an offset of its own.", sides=("backward",), variants=PLACES)
class causal_bwd_other(causal_diagonal_other):
    """the causal diagonal of the backward stands {place}"""


@catalogue.mistake(
    name="causal_bwd_other", why="The backward has an offset of its own.", sides=("backward",), variants=PLACES
)
class causal_and_window_bwd_other(causal_other):
    """causal and window of the backward stand {place}"""


@catalogue.mistake(
    why="The flag is lost on a side path: with dropout, with returned weights.", sides=("both", "forward")
)
class causal_drop(ScaledDotProduct):
    """causal is ignored"""

    causal = False


@catalogue.mistake(why="< in place of <=.")
class causal_strict(ScaledDotProduct):
    """the diagonal is not visible"""

    @step
    def visible_by_causal(self):
        return self.ahead < 0 if self.causal else True


@catalogue.mistake(name="causal_other", why="The comparison is made with a count, not with an index.")
class causal_one_more(ScaledDotProduct):
    """one key beyond the diagonal is visible"""

    @step
    def visible_by_causal(self):
        return self.ahead <= 1 if self.causal else True


@catalogue.mistake(why="The comparison is turned round.")
class causal_inverted(ScaledDotProduct):
    """only the future is visible"""

    @step
    def visible_by_causal(self):
        return self.ahead > 0 if self.causal else True


@catalogue.mistake(name="causal_inverted", why="The comparison is turned round.")
class causal_transposed(ScaledDotProduct):
    """only the diagonal and the future are visible"""

    @step
    def visible_by_causal(self):
        return self.ahead >= 0 if self.causal else True


# ---------------------------------------------------------------------- the window


@catalogue.mistake(why="The window never reaches the path that runs.", sides=("both", "forward"))
class window_drop(ScaledDotProduct):
    """the window is ignored"""

    window = None


@catalogue.mistake(name="window_drop", why="The bound of the loop over keys takes its place, but for a tile.")
class window_left_drop(ScaledDotProduct):
    """the left edge of the window is ignored"""

    window_left = None


@catalogue.mistake(name="window_drop", why="causal is taken to cover it.")
class window_right_drop(ScaledDotProduct):
    """the right edge of the window is ignored"""

    window_right = None


@catalogue.mistake(name="window_drop", why="`if window:` is false for 0.")
class window_zero_drop(ScaledDotProduct):
    """a count of zero is read as no limit"""

    @step
    def window_left(self):
        return super().window_left or None

    @step
    def window_right(self):
        return super().window_right or None


@catalogue.mistake(why="The two counts are handed over in another order.")
class window_swapped(ScaledDotProduct):
    """left and right are exchanged"""

    @step
    def window_left(self):
        return super().window_right

    @step
    def window_right(self):
        return super().window_left


class Resized(ScaledDotProduct):
    """A window with other counts."""

    to_left = to_right = 0

    @step
    def window_left(self):
        left = super().window_left
        return None if left is None else left + self.to_left

    @step
    def window_right(self):
        right = super().window_right
        return None if right is None else right + self.to_right


@catalogue.mistake(
    why="A window of n keys and n keys before the own one are taken for the same.",
    variants=(
        {"where": "to the left", "to_left": 1},
        {"where": "to the right", "to_right": 1},
        {"where": "on both sides", "to_left": 1, "to_right": 1},
    ),
)
class window_plus1(Resized):
    """the window sees one key too many {where}"""


@catalogue.mistake(
    why="An edge is exclusive where it is inclusive in the public contract.",
    variants=(
        {"where": "to the left", "to_left": -1},
        {"where": "to the right", "to_right": -1},
        {"where": "on both sides", "to_left": -1, "to_right": -1},
    ),
)
class window_edge(Resized):
    """the window's edge is not visible {where}"""


# ---------------------------------------------------------------------- mask, pattern, segments


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
        whole = np.broadcast_to(super().visible_by_segments, (*self.lead, 1, self.queries, self.keys))
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
        return super().added if given is None else super().added + np.asarray(given, dtype=np.float64)


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
        n = (int(np.prod(self.lead)), *self.pairs[-3:])
        b, h, i, j = np.ogrid[tuple(slice(size) for size in n)]
        at = np.broadcast_arrays(*self.read(b, h, i, j, n))
        return np.ravel_multi_index(at, n).reshape(self.pairs) if np.prod(n) else np.zeros(self.pairs, int)


@catalogue.mistake(
    why="A broadcast axis has stride 0, and a kernel that takes another sees other rows.", variants=READINGS
)
class mask_stride(Misread):
    """the mask is read {how}"""

    @step
    def visible_by_mask(self):
        if self.mask is None:
            return True
        return np.broadcast_to(self.mask, self.pairs).ravel()[self.places]


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
        return None if given is None else np.broadcast_to(given, self.pairs).ravel()[self.places]

    @step
    def d_bias(self):
        d = scattered(np.broadcast_to(self.d_added, self.pairs), self.places, self.pairs)
        return sum_to_shape(d, np.shape(self.argument("bias")))


# ---------------------------------------------------------------------- lengths and tails


@catalogue.mistake(why="Padding is taken for keys.")
class tail_unmasked(ScaledDotProduct):
    """keys beyond key_lengths are seen"""

    visible_by_key_lengths = True


@catalogue.mistake(why="Lengths are not read on this path; the diagonal stands where the padded lengths put it.")
class lengths_drop(ScaledDotProduct):
    """key_lengths are ignored, for the diagonal too"""

    key_lengths = None


@catalogue.mistake(name="lengths_drop", why="Lengths are not read on this path.")
class query_lengths_drop(ScaledDotProduct):
    """query_lengths are ignored, for the diagonal too"""

    query_lengths = None


@catalogue.mistake(name="lengths_drop", why="The lengths of one entry are handed to all.")
class lengths_of_first(ScaledDotProduct):
    """the lengths of batch entry 0 are those of all"""

    @step
    def real_queries(self):
        lengths = super().real_queries
        return np.broadcast_to(lengths.ravel()[0], lengths.shape) if lengths.size else lengths

    @step
    def real_keys(self):
        lengths = super().real_keys
        return np.broadcast_to(lengths.ravel()[0], lengths.shape) if lengths.size else lengths


@catalogue.mistake(why="Rows of padding are computed and stored like others.")
class tail_garbage(ScaledDotProduct):
    """rows beyond query_lengths are computed"""

    visible_by_query_lengths = True


@catalogue.mistake(
    name="tail_unmasked", why="A tail tile is filled with zeros, and exp(0) = 1 enters the row sum.", variants=TILES
)
class tail_of_zeros(ScaledDotProduct):
    """zeros that fill the last tile of {tile} keys are counted"""

    @step
    def tail(self):
        """The places beyond the last key up to a whole tile; none where lengths or a score_mod say what is beyond."""
        more = 0 if self.key_lengths is not None or self.score_mod is not None else -self.keys % self.tile
        return self.keys + np.arange(more)

    @step
    def tail_ahead(self):
        positional = self.causal or self.window is not None or self.alibi_slopes is not None
        return self.tail - self.i - self.offset if positional else np.zeros((self.queries, len(self.tail)))

    @step
    def tail_logits(self):
        """Zero keys: what is added remains, where causal and window hide nothing."""
        seen = self.visible_by_query_lengths & np.ones(self.tail_ahead.shape, bool)
        if self.causal:
            seen = seen & (self.tail_ahead <= 0)
        if self.window_left is not None:
            seen = seen & (self.tail_ahead >= -self.window_left)
        if self.window_right is not None:
            seen = seen & (self.tail_ahead <= self.window_right)
        slopes = 0.0 if self.alibi_slopes is None else self.alibi_slopes[:, None, None]
        logits = -slopes * np.abs(self.tail_ahead)
        if self.softcap_after_bias and self.cap is not None:
            logits = self.cap * np.tanh(logits / self.cap)
        return np.where(seen, logits, -np.inf)

    @step
    def largest(self):
        return np.maximum(super().largest, self.tail_logits.real.max(-1, keepdims=True, initial=-np.inf))

    @step
    def tail_exponentials(self):
        return self.exponential(self.tail_logits - self.maximum)

    @step
    def key_sum(self):
        return super().key_sum + self.tail_exponentials.sum(-1, keepdims=True)

    @step
    def d_tail_logits(self):
        """As d_logits, with values of zero."""
        delta, d_lse = self.delta, self.d_lse[..., None]
        if not self.lse_includes_sinks:
            return self.tail_exponentials * (
                np.where(self.row_sum == 0, 0, -delta / self.row_sum) + d_lse / self.key_sum
            )
        return np.where(self.row_sum == 0, 0.0, self.tail_exponentials / self.row_sum * (d_lse - delta))

    @step
    def d_tail_bias(self):
        if self.cap is None or not self.softcap_after_bias:
            return self.d_tail_logits
        return self.d_tail_logits * (1 - np.where(np.isneginf(self.tail_logits), 0, self.tail_logits / self.cap) ** 2)

    @step
    def d_alibi_slopes(self):
        extra = np.broadcast_to(self.d_tail_bias * np.abs(self.tail_ahead), (*self.pairs[:-1], len(self.tail)))
        return super().d_alibi_slopes - np.moveaxis(extra, -3, -1).sum(axis=tuple(range(extra.ndim - 1)))

    @step
    def d_softcap(self):
        if not self.softcap_after_bias:
            return super().d_softcap
        bent = np.where(np.isneginf(self.tail_logits), 0.0, self.tail_logits) / self.cap
        return super().d_softcap + (self.d_tail_logits * (bent - np.arctanh(bent) * (1 - bent**2))).sum()


@catalogue.mistake(why="The loop runs over whole tiles.", variants=TILES)
class tail_dropped(ScaledDotProduct):
    """keys beyond the last full tile of {tile} keys are not read"""

    @step
    def visible(self):
        return super().visible & (self.j < (self.keys // self.tile * self.tile or self.keys))


@catalogue.mistake(
    name="tail_dropped", why="A bound is one too small: a tail of a single key is no tile.", variants=TILES
)
class tail_of_one_dropped(ScaledDotProduct):
    """the last key is not read where it stands alone in a tile of {tile}"""

    @step
    def visible(self):
        alone = self.keys % self.tile == 1 and self.keys > 1
        return super().visible & (self.j < self.keys - 1) if alone else super().visible


class LengthsOff(ScaledDotProduct):
    """A length that is one off; the diagonal stays."""

    by = 1


@catalogue.mistake(
    why="A length is taken for an index, or an index for a length.",
    variants=(
        {"says": "one key beyond key_lengths is seen"},
        {"says": "the last key of key_lengths is not seen", "by": -1},
    ),
)
class lengths_off1(LengthsOff):
    """{says}"""

    @step
    def visible_by_key_lengths(self):
        return True if self.key_lengths is None else self.j < np.clip(self.real_keys + self.by, 0, self.keys)


@catalogue.mistake(
    name="lengths_off1",
    why="A length is taken for an index, or an index for a length.",
    variants=(
        {"says": "one row beyond query_lengths is computed"},
        {"says": "the last row of query_lengths is not computed", "by": -1},
    ),
)
class query_lengths_off1(LengthsOff):
    """{says}"""

    @step
    def visible_by_query_lengths(self):
        lengths = self.real_queries if self.query_lengths is None else self.real_queries + self.by
        return self.i < np.clip(lengths, 0, self.queries)


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
        return super().dropout * super().visible_by_mask


@catalogue.mistake(
    name="mask_after_softmax", why="Weights are normalised over all keys, then those of hidden ones are zeroed."
)
class causal_after_softmax(ScaledDotProduct):
    """causal acts on the weights, which are not normalised again"""

    visible_by_causal = True

    @step
    def dropout(self):
        return super().dropout * super().visible_by_causal


@catalogue.mistake(
    name="mask_after_softmax", why="Weights are normalised over all keys, then those of hidden ones are zeroed."
)
class window_after_softmax(ScaledDotProduct):
    """the window acts on the weights, which are not normalised again"""

    visible_by_window = True

    @step
    def dropout(self):
        return super().dropout * super().visible_by_window


@catalogue.mistake(
    name="mask_after_softmax", why="Weights are normalised over all keys, then those of hidden ones are zeroed."
)
class segments_after_softmax(ScaledDotProduct):
    """segments act on the weights, which are not normalised again"""

    visible_by_segments = True

    @step
    def dropout(self):
        return super().dropout * super().visible_by_segments


@catalogue.mistake(
    name="mask_after_softmax", why="Weights are normalised over all keys, then those of hidden ones are zeroed."
)
class lengths_after_softmax(ScaledDotProduct):
    """key_lengths act on the weights, which are not normalised again"""

    visible_by_key_lengths = True

    @step
    def dropout(self):
        return super().dropout * super().visible_by_key_lengths
