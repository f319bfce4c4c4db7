"""Centroids of routing attention moved towards the tokens that are nearest to them, token by token; no gradient.

Source: Roy, Saffar, Vaswani, Grangier 2020, arXiv:2003.05997, algorithm 1; the running means as in their released code.
"""

import numpy as np

from refattn.definitions.steps import Definition, step

__all__ = ["UpdateCentroids", "update_centroids_example"]


class UpdateCentroids(Definition):
    """Moving averages of the sums, of the unit means, or of running counts and sums."""

    results = {"centroids": "moved", "state": "new_state"}
    defaults = {"k": None, "method": "paper", "state": None, "query_mask": None, "key_mask": None}

    @step
    def sources(self):
        """Tokens and whether each one counts, of the queries and of keys of their own."""
        pairs = [(self.q, self.query_mask), (self.k, self.key_mask)]
        return [
            (x, np.ones(x.shape[:-3] + x.shape[-2:-1], bool) if m is None else m) for x, m in pairs if x is not None
        ]

    def taken(self, tokens, mask):
        """Counts (h, c) and sums (h, c, d) of the tokens nearest to each centroid."""
        counts, sums = np.zeros(self.centroids.shape[:2]), np.zeros(self.centroids.shape)
        mask = np.broadcast_to(mask[..., None, :], tokens.shape[:-1])
        for at in np.ndindex(*tokens.shape[:-1]):
            if mask[at]:
                h, x = at[-2], tokens[at]
                c = int(np.argmax(self.centroids[h] @ x))
                counts[h, c] += 1
                sums[h, c] += unit(x) if self.method == "means" else x
        return counts, sums

    @step
    def added(self):
        return [self.taken(*source) for source in self.sources]

    @step
    def running(self):
        """Counts and sums after each source."""
        counts, sums = (np.zeros(self.centroids.shape[:2]), self.centroids) if self.state is None else self.state
        for count, total in self.added:
            counts = self.decay * counts + (1 - self.decay) * count
            sums = self.decay * sums + (1 - self.decay) * total
        return counts, sums

    @step
    def new_state(self):
        return self.running if self.method == "ema" else None

    @step
    def target(self):
        """What the centroids move towards."""
        counts, sums = (sum(part[n] for part in self.added) for n in (0, 1))
        if self.method == "paper":
            return sums if len(self.added) == 1 else sums / 2
        return np.where(counts[..., None] > 0, unit(sums), self.centroids)

    @step
    def moved(self):
        if self.method != "ema":
            return self.decay * self.centroids + (1 - self.decay) * self.target
        counts, sums = self.running
        whole = counts.sum(-1, keepdims=True)
        smooth = (counts + 1e-5) / (whole + counts.shape[-1] * 1e-5) * whole
        return np.where(whole[..., None] > 0, sums / smooth[..., None], self.centroids)


def unit(x):
    norm = np.sqrt((x * x).sum(-1, keepdims=True))
    return x / np.where(norm == 0, 1.0, norm)


def update_centroids_example(rng, *, b=2, h=2, t=6, c=3, d=4, method="paper"):
    normal = rng.standard_normal
    return {"centroids": normal((h, c, d)), "q": normal((b, h, t, d)), "decay": 0.9, "method": method}
