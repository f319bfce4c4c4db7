"""Does routing find the keys that matter?  K-means members, random members and a local window on data with clusters.

Tokens stand around a few directions in no order of position.  Of each query's w largest logits, which share does it meet?
All three look at about as many keys: a cluster has w tokens, and the window has w positions.  The share of the softmax
weight that the keys met would have in full attention stands beside it.
"""

import numpy as np

import refattn as ra


def share(sees: np.ndarray, logits: np.ndarray, w: int) -> tuple[float, float]:
    """Recall of the w largest logits of each row, and the full softmax's weight on the keys that are seen."""
    wanted = np.argsort(-logits, axis=-1)[:, :w]
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return float(np.take_along_axis(sees, wanted, -1).mean()), float((weights * sees).sum(-1).mean())


def met(members: np.ndarray, t: int) -> np.ndarray:
    """Who meets whom: both in one cluster."""
    sees = np.zeros((t, t), bool)
    for tokens in members:
        sees[np.ix_(tokens, tokens)] = True
    return sees


def main(t: int = 1024, d: int = 32, directions: int = 32) -> None:
    rng = np.random.default_rng(0)
    w = t // directions
    centres = rng.standard_normal((directions, d))
    print(f"{t} tokens around {directions} directions, clusters and windows of {w}")
    print(f"{'noise':>6}{'members':>20}{'recall':>9}{'weight':>9}{'keys met':>10}")
    for noise in (0.2, 0.5, 1.0):
        x = centres[rng.integers(0, directions, t)] + noise * rng.standard_normal((t, d))
        q = (x / np.sqrt(np.mean(x * x, -1, keepdims=True)))[None]
        logits = q[0] @ q[0].T * d**-0.5
        learned = ra.routing.initial_centroids(rng, c=directions, tokens=q)
        start = ra.routing.initial_centroids(rng, h=1, c=directions, d=d)
        found = {
            "k-means centroids": learned,
            "random centroids": start,
        }
        sees = {
            name: met(ra.routing_attention.forward(q, None, q, centroids=c, cluster_size=w).members_q[0], t)
            for name, c in found.items()
        }
        sees["random members"] = met([rng.choice(t, w, replace=False) for _ in range(directions)], t)
        sees["local window"] = abs(np.arange(t)[:, None] - np.arange(t)) <= w // 2
        for name, seen in sees.items():
            recall, weight = share(seen, logits, w)
            print(f"{noise:>6}{name:>20}{recall:>9.3f}{weight:>9.3f}{seen.sum() / t:>10.1f}")


if __name__ == "__main__":
    main()
