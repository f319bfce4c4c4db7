"""What the hash finds: closed forms against draws, windows against the definition's, the law of the rounds."""

import math

import numpy as np
import pytest
from oracles.lsh_meetings import meetings

from refattn.attention.lsh_recall import (
    collision_probability,
    found_by_rounds,
    found_pairs,
    measured_collisions,
    recall,
    shown_pairs,
)


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("n_buckets", [2, 4])
@pytest.mark.parametrize("angle", [0.0, 0.4, 1.2, math.pi / 2, 2.5, math.pi])
def test_closed_form(n_buckets, angle):
    p = collision_probability(angle, n_buckets)
    measured = measured_collisions(angle, n_buckets, d=7, rng=rng(1), samples=20000)
    assert abs(measured - p) <= 4.5 * math.sqrt(p * (1 - p) / 20000)


def test_collisions_of_more_buckets():
    angles = np.linspace(0, math.pi, 7)
    few, many, factored = (
        np.array([measured_collisions(a, n, d=16, rng=rng(2), samples=4000) for a in angles]) for n in (8, 32, (4, 8))
    )
    assert few[0] == many[0] == factored[0] == 1.0
    assert few[-1] == many[-1] == 0.0  # opposite vectors fall into opposite buckets
    assert np.all(np.diff(few[:5]) < 0)
    assert np.all(many[1:4] < few[1:4])
    # a random pair at right angles shares one of n buckets with probability 1/n
    assert abs(many[3] - 1 / 32) < 4.5 * math.sqrt(1 / 32 / 4000)
    assert abs(factored[3] - 1 / 32) < 4.5 * math.sqrt(1 / 32 / 4000)
    with pytest.raises(ValueError, match="expected 2 or 4"):
        collision_probability(1.0, 8)


@pytest.mark.parametrize("options", [{}, {"before": 2, "after": 1}, {"within_bucket": False, "causal": True}])
def test_shown_pairs_are_those_of_the_definition(options):
    buckets = rng(3).integers(0, 4, (2, 22))
    shown = shown_pairs(buckets, chunk=4, **options)
    given = {"before": 1, "after": 0, "within_bucket": True, "causal": False, **options}
    for s in range(2):
        meets = meetings([buckets[s].tolist()], 4, given["before"], given["after"], False, given["within_bucket"])
        for i in range(22):
            want = {j for j in meets[i] if j != i and (j < i or not given["causal"])}
            assert set(np.flatnonzero(shown[s, i])) == want


def test_recall_of_everything_and_nothing():
    qk = rng(4).standard_normal((2, 20, 5))
    everything = np.ones((2, 3, 20, 20), bool)
    for causal in (False, True):
        found, mass = recall(qk, everything, top=4, causal=causal)
        assert found.shape == mass.shape == (2, 3)
        assert np.allclose(found, 1)
        assert np.allclose(mass, 1)
        assert np.all(recall(qk, ~everything, top=4, causal=causal)[1] == 0)
    half = np.broadcast_to(np.arange(20) < 10, (2, 1, 20, 20))
    keys = qk / np.linalg.norm(qk, axis=-1, keepdims=True)
    weights = np.exp(5**-0.5 * qk @ np.swapaxes(keys, -1, -2)) * ~np.eye(20, dtype=bool)
    assert np.allclose(recall(qk, half)[1][:, 0], (weights[..., :10].sum(-1) / weights.sum(-1)).mean(-1))


def test_rounds_follow_the_law():
    """Planted neighbours at one angle: the share found by H rounds is 1 - (1 - p)^H, p the share found by one."""
    draw = rng(5)
    pairs, d, hashes = 600, 32, 8
    x = draw.standard_normal((pairs, d))
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    other = draw.standard_normal((pairs, d))
    other -= x * np.sum(x * other, -1, keepdims=True)
    other /= np.linalg.norm(other, axis=-1, keepdims=True)
    tokens = np.concatenate([x, 0.9 * x + math.sqrt(1 - 0.81) * other])
    projected = np.einsum("td,dsn->stn", tokens, draw.standard_normal((d, hashes, 16)))
    buckets = np.argmax(np.concatenate([projected, -projected], -1), -1)
    shown = buckets[:, :pairs] == buckets[:, pairs:]
    p = shown.mean()
    for n in (2, 4, 8):
        found = shown[:n].any(0).mean()
        law = found_by_rounds(p, n)
        assert abs(found - law) <= 5 * math.sqrt(law * (1 - law) / pairs + n**2 * p * (1 - p) / pairs / hashes)
    both = found_pairs(shown_pairs(buckets, chunk=64, windows=False))
    assert np.array_equal(both[-1][np.arange(pairs), np.arange(pairs) + pairs], shown.any(0))
