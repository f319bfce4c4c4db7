"""How people get Longformer attention wrong: which softmax a row takes, by which arrays, and what fills up its lists."""

import numpy as np

from refattn.definitions.longformer import Longformer, Rows
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.options import about
from refattn.mistakes.scaled_dot_product import catalogue as dense

NONE_OF = about(
    "alibi_slopes", "bias", "dropout", "head_map", "pattern", "score_mod", "segments", "sinks", "softcap",
    "mask"
)  # fmt: skip
"""Mistakes of softmax attention about what this mechanism does not have."""

catalogue = Catalogue(Longformer, built_on=dense, without=NONE_OF)


# ---------------------------------------------------------------------------------------------- who sees whom


class WiderWindow(Longformer):
    """The window with other counts."""

    @step
    def window(self):
        """Counts to the left and right, None = unlimited."""
        return tuple(
            None if x is None else self.counted(int(x), side) for side, x in enumerate(self.argument("window"))
        )

    def counted(self, count, side):
        return count


@catalogue.mistake(
    why="Inclusive counts are read as exclusive ones, or the other way round.",
    variants=[
        {"what": "one key too many to the left", "more": (1, 0)},
        {"what": "one key too few to the left", "more": (-1, 0)},
        {"what": "one key too many to the right", "more": (0, 1)},
        {"what": "one key too few to the right", "more": (0, -1)},
    ],
)
class window_plus1(WiderWindow):
    """the window sees {what}"""

    more = (1, 0)

    def counted(self, count, side):
        return count + self.more[side]


@catalogue.mistake(why="A library's attention window is the whole width, half of it on each side.")
class longformer_window_halved(WiderWindow):
    """the counts are taken for whole widths: half of each is seen"""

    def counted(self, count, side):
        return count // 2


@catalogue.mistake(why="Only the rows of global tokens are treated apart.")
class global_columns_drop(Longformer):
    """nobody but its neighbours sees a global token"""

    global_keys = None


@catalogue.mistake(why="Only the columns of global tokens are added.")
class global_rows_drop(Longformer):
    """global tokens see their window alone"""

    global_rows = False


class _CountedTwice(Rows):
    """A global key in the window counts in both lists."""

    @step
    def times(self):
        near = True if self.window is None else self.within(*self.window)
        both = np.zeros(1, bool) if self.global_keys is None else near & self.global_keys[..., None, None, :]
        return 1.0 + both

    @step
    def exponentials(self):
        return self.times * super().exponentials

    @step
    def rebuilt_weights(self):
        return self.times * super().rebuilt_weights if self.is_handed("lse") else super().rebuilt_weights


@catalogue.mistake(why="Window keys and global keys are concatenated, and nothing takes the overlap away.")
class global_twice(Longformer):
    """a global key inside the window counts twice"""

    inner = _CountedTwice


class _FilledLists(Rows):
    """Batch entries with fewer global keys than others have zeros in their place."""

    @step
    def filling(self):
        """Places of the list of global keys that hold none, (..., 1, 1, 1)"""
        if self.global_keys is None:
            return np.zeros((1, 1, 1))
        counts = self.global_keys.sum(-1)
        return (np.max(counts, initial=0) - counts)[..., None, None, None]

    @step
    def maximum(self):
        top = super().maximum
        return np.where(self.filling > 0, np.maximum(top, 0.0), top)

    @step
    def row_sum(self):
        return super().row_sum + self.filling * np.exp(-self.maximum)


@catalogue.mistake(
    why="The lists of global keys are filled up to the longest one, and the filling is not hidden.",
    sides=("both", "forward"),
)
class longformer_pad_global(Longformer):
    """places that only fill up unequal lists of global keys count as keys of logit 0"""

    inner = _FilledLists


@catalogue.mistake(why="The rows of global tokens are computed apart, without the padding mask.")
class tail_unmasked(Longformer):
    """global rows see padded keys"""

    key_lengths_of_global_rows = None


@catalogue.mistake(why="The marks of one batch entry are used for all.")
class longformer_tokens_shared(Longformer):
    """all batch entries have the global tokens of the first"""

    @step
    def tokens(self):
        right = super().tokens
        if right.ndim < 2 or not right.size:
            return right
        return np.broadcast_to(right.reshape(-1, right.shape[-1])[0], right.shape)


# ---------------------------------------------------------------------------------------------- by which arrays


@catalogue.mistake(why="The second set of projections is loaded and not used.")
class global_projection_drop(Longformer):
    """global rows use the local arrays"""

    @step
    def arrays_of_global_rows(self):
        return self.arrays_of_local_rows

    def joined(self, name):
        return getattr(self.d_local, f"d_{name}") + getattr(self.d_whole, f"d_{name}")

    @step
    def d_q_global(self):
        return np.zeros(self.q_global.shape)

    @step
    def d_k_global(self):
        return np.zeros(self.k_global.shape)

    @step
    def d_v_global(self):
        return np.zeros(self.v_global.shape)


@catalogue.mistake(why="Queries are scaled once before the split, those of global rows not at all.")
class global_scale_drop(Longformer):
    """global rows are not scaled"""

    scale_of_global_rows = 1.0

    @step
    def d_scale(self):
        return self.d_local.d_scale


@catalogue.mistake(why="The global keys are gathered once, from the global arrays, for rows of both kinds.")
class global_columns_projection(Longformer):
    """local rows read global keys through the global arrays"""

    @step
    def length(self):
        return self.q.shape[-2]

    @step
    def local(self):
        """Local keys that are not global, then the global arrays' keys that are."""
        _, k, v = self.arrays_of_global_rows
        lead = self.lead
        keys, values = (
            np.concatenate([np.broadcast_to(x, (*lead, *x.shape[-3:])) for x in pair], axis=-2)
            for pair in ((self.k, k), (self.v, v))
        )
        tokens = np.broadcast_to(self.tokens, (*lead, self.length))[..., None, :]
        ahead = np.arange(self.length) - np.arange(self.length)[:, None]
        left, right = (self.length if x is None else x for x in self.window)
        near = (ahead >= -left) & (ahead <= right) & ~tokens
        seen = np.concatenate([near, np.broadcast_to(tokens, near.shape)], axis=-1)[..., None, :, :]
        if self.key_lengths is not None:
            ends = np.reshape(self.key_lengths, (-1, *[1] * 3)) if np.ndim(self.key_lengths) else self.key_lengths
            seen = seen & (np.arange(2 * self.length) % self.length < np.reshape(ends, (*np.shape(seen)[:-3], 1, 1, 1)))
        return self.called((self.q, keys, values), mask=seen, scale=self.scale)

    def joined(self, name):
        whole = getattr(self.d_whole, f"d_{name}")
        local = getattr(self.d_local, f"d_{name}")
        given = self.argument(f"{name}_global") is not None
        if name == "q":
            return local if given else local + whole
        first, second = local[..., : self.length, :], local[..., self.length :, :]
        return first if given else first + second + whole

    @step
    def d_k_global(self):
        return self.d_whole.d_k + self.d_local.d_k[..., self.length :, :]

    @step
    def d_v_global(self):
        return self.d_whole.d_v + self.d_local.d_v[..., self.length :, :]


# ---------------------------------------------------------------------------------------------- gradients alone


@catalogue.mistake(
    why="Global rows are written over local ones, and the backward has the local kernel alone.", sides=("backward",)
)
class global_grad_drop(Longformer):
    """no gradient comes from the global rows"""

    @step
    def d_whole(self):
        return self.whole.pull()


@catalogue.mistake(name="global_grad_drop", why="Gathered keys need a scatter in the backward.", sides=("backward",))
class global_columns_grad(Longformer):
    """global keys get no gradient from local rows"""

    def joined(self, name):
        if name == "q":
            return super().joined(name)
        whole = 0.0 if self.argument(f"{name}_global") is not None else getattr(self.d_whole, f"d_{name}")
        return whole + np.where(self.tokens[..., None, :, None], 0.0, getattr(self.d_local, f"d_{name}"))

    @step
    def d_k(self):
        return self.joined("k")

    @step
    def d_v(self):
        return self.joined("v")


@catalogue.mistake(
    name="global_grad_drop",
    why="The local kernel's cotangent is not cleared where a global row took its place.",
    sides=("backward",),
)
class global_rows_counted_twice(Longformer):
    """the local softmax of a global row gets its cotangent too"""

    @step
    def d_local(self):
        return self.local.pull(output=self.cotangent("output"))
