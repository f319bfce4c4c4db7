"""Exact top-k attention in steps: softmax attention over the keys with the largest logits of each row.

    chosen[h,i] = the ``count`` keys with the largest logits among those that row i sees, equal ones by lower index

The choice has no gradient.

Source: Kitaev et al. 2020, arXiv:2001.04451, section 2; Gupta et al. 2021, arXiv:2106.06899, section 2.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import step

__all__ = ["TopK", "definition"]


class TopK(ScaledDotProduct):
    """Softmax attention over the chosen keys."""

    results = {**ScaledDotProduct.results, "indices": "chosen"}
    defaults = {**ScaledDotProduct.defaults, "count": None}

    visible_by_list = True  # a list given is the choice

    @step
    def candidates(self):
        """Pairs that are seen, whatever is chosen."""
        return super().seen

    @step
    def compared(self):
        """What the keys of a row are chosen by: logits as they meet visibility, NaN above all, -inf for hidden keys."""
        real = np.real(self.logits)
        return np.where(self.candidates, np.where(np.isnan(real), np.inf, real), -np.inf)

    @step
    def ranked(self):
        """All keys of a row by falling logit, equal ones by rising index, (..., h, q, k)"""
        return np.argsort(-self.compared, axis=-1, kind="stable")

    @step
    def chosen(self):
        """The keys of each row, -1 where it has fewer, (..., h, q, n)"""
        if self.listed_keys is not None:
            return np.broadcast_to(self.listed_keys, (*self.pairs[:-1], self.listed_keys.shape[-1]))
        first = self.ranked[..., : self.count]
        return np.where(np.take_along_axis(self.compared, first, axis=-1) == -np.inf, -1, first)

    @step
    def visible_by_choice(self):
        """Pairs that are chosen, (..., h, q, k)"""
        places = np.zeros((*self.pairs[:-1], self.keys + 1), dtype=bool)  # the last place collects what is no key
        absent = (self.chosen < 0) | (self.chosen > self.keys)
        np.put_along_axis(places, np.where(absent, self.keys, self.chosen), True, axis=-1)
        return places[..., : self.keys]

    @step
    def seen(self):
        """Candidates that are chosen."""
        return self.candidates & self.visible_by_choice


definition = TopK
