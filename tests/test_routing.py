"""ra.routing: updates against small loops, the pitfalls they document, and whether k-means members find the keys that matter."""

import array_api_strict
import numpy as np
import pytest
from support import assert_close

import refattn as ra
from refattn import routing

EPS = np.finfo(np.float64).eps


def rng(seed=0):
    return np.random.default_rng(seed)


def arrays(seed=0, b=2, h=2, t=20, c=3, d=4):
    draw = rng(seed)
    return tuple(draw.standard_normal(s) for s in ((h, c, d), (b, h, t, d), (b, h, t, d)))


def members(x, centroids, h, n):
    """The tokens of head h whose nearest centroid is n, by a loop."""
    tokens = x[:, h].reshape(-1, x.shape[-1])
    return [token for token in tokens if max(range(len(centroids[h])), key=lambda m: token @ centroids[h][m]) == n]


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_paper_adds_sums_of_queries_and_keys():
    mu, q, k = arrays(1)
    got = routing.update_centroids.forward(mu, q, k, decay=0.9)
    assert got.state is None
    for h, n in np.ndindex(2, 3):
        total = sum(members(q, mu, h, n) + members(k, mu, h, n), np.zeros(4))
        assert_close(got.centroids[h, n], 0.9 * mu[h, n] + 0.05 * total, 50 * EPS)
    shared = routing.update_centroids.forward(mu, q, decay=0.9).centroids
    both = routing.update_centroids.forward(mu, q, q, decay=0.9).centroids
    assert_close(shared, both, 0)


def test_means_are_unit_and_empty_clusters_stay():
    mu, q, k = arrays(2)
    mu[:, 2] = -1e-6 * np.sum(unit(q), axis=(0, 1, 2))  # hardly anybody's nearest one
    mu[0, 2] = 0.0
    mu[0, 0], mu[0, 1] = [5.0, 0, 0, 0], [-5.0, 0, 0, 0]  # one of them is above 0 for every token
    got = routing.update_centroids.forward(mu, q, k, decay=0.25, method="means").centroids
    for h, n in np.ndindex(2, 3):
        own = members(q, mu, h, n) + members(k, mu, h, n)
        if own:
            new = unit(sum(unit(x) for x in own))
            assert_close(got[h, n], 0.25 * mu[h, n] + 0.75 * new, 50 * EPS)
    assert not members(q, mu, 0, 2) + members(k, mu, 0, 2)
    assert_close(got[0, 2], mu[0, 2], EPS)


def test_ema_is_the_running_quotient_and_its_first_step_stretches():
    mu, q, k = arrays(3)
    got = routing.update_centroids.forward(mu, q, k, decay=0.9, method="ema")
    counts, sums = np.zeros((2, 3)), mu.copy()
    for x in (q, k):
        for h, n in np.ndindex(2, 3):
            own = members(x, mu, h, n)
            counts[h, n] = 0.9 * counts[h, n] + 0.1 * len(own)
            sums[h, n] = 0.9 * sums[h, n] + 0.1 * sum(own, np.zeros(4))
    whole = counts.sum(-1, keepdims=True)
    smooth = (counts + 1e-5) / (whole + 3e-5) * whole
    assert_close(got.state[0], counts, 50 * EPS)
    assert_close(got.state[1], sums, 50 * EPS)
    assert_close(got.centroids, sums / smooth[..., None], 1e-12)
    # tokens equal to their centroid change nothing, but for the counts that start at 0
    mu = np.eye(4)[None, :2]
    for n, factor in ((512, 2.95), (5, 200.8)):  # 1 + 0.999 / (0.001 n)
        tokens = np.repeat(mu, n, axis=1)
        first = routing.update_centroids.forward(mu, tokens, decay=0.999, method="ema")
        assert np.linalg.norm(first.centroids[0, 0]) == pytest.approx(factor, rel=0.01)
        seeded = (np.full((1, 2), float(n)), mu * n)
        kept = routing.update_centroids.forward(mu, tokens, decay=0.999, method="ema", state=seeded)
        assert_close(kept.centroids, mu, 1e-4)


def test_masked_tokens_do_not_count_and_strict_namespace():
    mu, q, k = arrays(4)
    keep = rng(4).random((2, 20)) < 0.6
    for method in ("paper", "means", "ema"):
        poisoned = np.where(keep[:, None, :, None], q, np.nan)
        got = routing.update_centroids.forward(mu, poisoned, k, decay=0.5, method=method, query_mask=keep)
        strict = routing.update_centroids.forward(
            *map(array_api_strict.asarray, (mu, q, k)),
            decay=0.5,
            method=method,
            query_mask=array_api_strict.asarray(keep),
        )
        assert np.all(np.isfinite(got.centroids))
        assert_close(np.asarray(strict.centroids), got.centroids, 50 * EPS)
    assert np.array_equal(routing.update_centroids.forward(mu, q, decay=1.0, method="means").centroids, mu)


def test_initial_centroids():
    normal = routing.initial_centroids(rng(5), h=2, c=6, d=16)
    assert_close(normal.mean(-1), np.zeros((2, 6)), 1e-14)
    assert_close((normal**2).mean(-1), np.ones((2, 6)), 1e-5)
    # well separated directions: k-means finds each once, from most draws; drawn tokens are all of the head's own
    tokens = np.repeat(np.eye(4)[None], 5, axis=1).reshape(1, 20, 4) + 0.01 * rng(6).standard_normal((1, 20, 4))
    found = routing.initial_centroids(rng(1), c=4, tokens=tokens)
    assert_close(np.linalg.norm(found, axis=-1), np.ones((1, 4)), 10 * EPS)
    for text, options in (
        ("needs h and d", {"c": 2}),
        ("fewer than c = 30", {"c": 30, "tokens": tokens}),
        ("c is 0", {"c": 0, "h": 1, "d": 1}),
    ):
        with pytest.raises(ValueError, match=text):
            routing.initial_centroids(rng(), **options)


BAD = {
    "width": ({"q": np.zeros((2, 2, 20, 5))}, ValueError, "q has shape (2, 2, 20, 5)"),
    "k": ({"k": np.zeros((2, 3, 20, 4))}, ValueError, "k has shape (2, 3, 20, 4)"),
    "decay": ({"decay": 1.5}, ValueError, "decay is 1.5"),
    "method": ({"method": "median"}, ValueError, "method is 'median'"),
    "state": ({"state": (np.zeros((2, 3)), np.zeros((2, 3, 4)))}, ValueError, "state is given: method='paper' has none"),
    "state_shape": ({"method": "ema", "state": (np.zeros((2, 4)), np.zeros((2, 3, 4)))}, ValueError, "state[0] has shape"),
    "mask": ({"query_mask": np.ones(20)}, TypeError, "query_mask"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, kind, message = BAD[name]
    mu, q, k = arrays()
    with pytest.raises(kind) as caught:
        routing.update_centroids.forward(**{"centroids": mu, "q": q, "k": k, "decay": 0.5, **change})
    assert message in str(caught.value)


def test_k_means_members_find_the_keys_that_matter():
    """Tokens around 16 directions: of each query's 16 largest logits, how many does it meet?"""
    draw, t, c, w = rng(7), 256, 16, 32
    directions = unit(draw.standard_normal((c, 16)))
    q = (directions[draw.integers(0, c, t)] + 0.1 * draw.standard_normal((t, 16)))[None]
    logits = q[0] @ q[0].T
    wanted = np.argsort(-logits, axis=-1)[:, :16]

    def recall(sees):
        return np.mean(np.take_along_axis(sees, wanted, -1))

    def routed(centroids):
        given = {"centroids": centroids, "cluster_size": w, "normalize": "l2"}
        found = ra.routing_attention.forward(q, None, q, **given).members_q[0]
        sees = np.zeros((t, t), bool)
        for tokens in found:
            sees[np.ix_(tokens, tokens)] = True
        return recall(sees)

    by_k_means = routed(routing.initial_centroids(draw, c=c, tokens=q))
    by_chance = np.zeros((t, t), bool)
    for _ in range(c):
        tokens = draw.choice(t, w, replace=False)
        by_chance[np.ix_(tokens, tokens)] = True
    local = abs(np.arange(t)[:, None] - np.arange(t)) < w
    assert by_k_means > 0.75
    assert by_k_means > 2 * max(recall(by_chance), recall(local))
