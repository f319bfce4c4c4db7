"""Mistakes about dropout."""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import step
from refattn.mistakes.scaled_dot_product.base import catalogue


@catalogue.mistake(why="The flag of training is not handed on.")
class drop_ignored(ScaledDotProduct):
    """no weight is dropped"""

    dropout_mask = None
    dropout_rate = 0.0


@catalogue.mistake(why="The factor 1 / (1 - rate) is forgotten.")
class drop_scale(ScaledDotProduct):
    """kept weights are not scaled up"""

    dropout_rate = 0.0


@catalogue.mistake(name="drop_scale", why="The two factors are confused.")
class drop_scale_rate(ScaledDotProduct):
    """kept weights are scaled by 1 / rate"""

    @step
    def dropout_rate(self):
        given = self.argument("dropout_rate")
        return 1 - given if given else given


@catalogue.mistake(why="Weights are dropped before they are summed.")
class drop_rowsum(ScaledDotProduct):
    """dropped weights are missing from the row sum"""

    @step
    def keep(self):
        return (self.dropout != 0).astype(float)

    @step
    def row_sum(self):
        return super().row_sum - (self.exponentials * (1 - self.keep)).sum(-1, keepdims=True)

    @step
    def d_softmax(self):
        return self.rebuilt_weights * (self.d_weights - self.keep * self.delta)

    @step
    def lse_share(self):
        return super().lse_share * self.keep if self.lse_includes_sinks else super().lse_share


@catalogue.mistake(
    why="The mask is drawn again, or read with other strides.",
    variants=(
        {"how": "that of query 0 for all", "axis": -2},
        {"how": "that of head 0 for all", "axis": -3},
        {"how": "that of batch entry 0 for all", "axis": -4},
        {"how": "that of key 0 for all", "axis": -1},
    ),
)
class drop_mask_mismatch(ScaledDotProduct):
    """the dropout mask is {how}"""

    axis = -2

    @step
    def dropout(self):
        right = super().dropout
        if right.ndim < -self.axis:
            return right
        first = np.arange(min(1, right.shape[self.axis]))
        return np.broadcast_to(np.take(right, first, axis=self.axis), right.shape)


@catalogue.mistake(name="drop_mask_mismatch", why="True means keep in one library, drop in the other.")
class drop_inverted(ScaledDotProduct):
    """the dropout mask says which weights are dropped"""

    @step
    def dropout_mask(self):
        given = self.argument("dropout_mask")
        return None if given is None else ~np.asarray(given, bool)


@catalogue.mistake(name="drop_mask_mismatch", why="Rows and columns of the mask are exchanged.")
class drop_transposed(ScaledDotProduct):
    """the dropout mask is transposed"""

    @step
    def dropout(self):
        right = super().dropout
        return np.swapaxes(right, -1, -2) if right.shape[-1] == right.shape[-2] else right
