"""routing_attention: gradients, definition, plain attention in special cases, stored cases, counts, mistakes, bad input."""

import array_api_strict
import numpy as np
import pytest
from support import assert_adjoint, assert_close, assert_gradients, cases, random_cotangents

from refattn import backends, patterns, precision
from refattn.attention.routing import routing_attention as attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention

EPS = np.finfo(np.float64).eps
B, H, T, C, D, E, N = 2, 2, 8, 2, 4, 2, 2


def rng(seed=0):
    return np.random.default_rng(seed)


KEEP = rng(5).random((B, T)) < 0.7
KEPT_KEYS = rng(6).random((B, T)) < 0.6
DROPOUT = rng(7).random((B, H, T, T)) < 0.6
OPTIONS = {
    "shared": {},
    "separate": {"k": True},
    "causal": {"causal": True},
    "causal_separate": {"causal": True, "k": True},
    "rank": {"causal": True, "causal_by": "rank", "k": True},
    "sizes": {"cluster_size": (3, 5), "k": True, "causal": True},
    "sizes_shared": {"cluster_size": (5, 3), "causal": True, "self_attention": "last_resort"},
    "clipped": {"cluster_size": 30},
    "few": {"cluster_size": 2, "average_eps": 0.3},
    "l2": {"normalize": "l2", "k": True},
    "none": {"normalize": None},
    "cluster_l2": {"normalize": None, "cluster_normalize": "l2", "k": True},
    "cluster_layer": {"normalize": "l2", "cluster_normalize": "layer"},
    "cluster_none": {"cluster_normalize": None},
    "key_norm": {"normalize": None, "cluster_normalize": "l2", "key_norm": "l2"},
    "key_norm_separate": {"key_norm": "l2", "k": True},
    "projection": {"projection": True, "k": True},
    "projection_l2": {"projection": True, "cluster_normalize": "l2"},
    "last_resort": {"self_attention": "last_resort", "causal": True},
    "never": {"self_attention": "never", "causal": True},
    "members": {"members": True, "k": True},
    "members_shared": {"members": True, "causal": True, "causal_by": "rank"},
    "masks": {"query_mask": KEEP, "key_mask": KEPT_KEYS, "k": True},
    "masks_shared": {"query_mask": KEEP, "key_mask": KEEP, "causal": True, "average_eps": 0.1},
    "masks_members": {"query_mask": KEEP, "key_mask": KEPT_KEYS, "k": True, "members": True},
    "one_mask": {"key_mask": KEPT_KEYS[:1], "self_attention": "last_resort"},
    "memory": {"memory_keys": True, "causal": True, "k": True},
    "memory_self": {"memory_keys": True, "causal": True, "self_attention": "last_resort"},
    "memory_never": {"memory_keys": True, "causal": True, "self_attention": "never"},
    "relative": {"relative_keys": True, "relative_values": True, "cluster_size": 5, "causal": True},
    "relative_keys": {"relative_keys": True, "k": True, "cluster_size": (4, 6)},
    "relative_all": {
        "relative_keys": True, "relative_values": True, "memory_keys": True, "cluster_size": 5, "query_mask": KEEP,
        "dropout_mask": DROPOUT, "dropout_rate": 0.4,
    },
    "pattern": {"pattern": patterns.dense(rng(8).random((B, 1, T, T)) < 0.6), "k": True},
    "pattern_heads": {"pattern": patterns.dense(rng(8).random((H, T, T)) < 0.6) & patterns.window(5, 2)},
    "dropout": {"dropout_mask": DROPOUT, "dropout_rate": 0.4, "causal": True},
    "dropout_shared": {"dropout_mask": DROPOUT[0, 0, :1], "dropout_rate": 0.25, "k": True},
}  # fmt: skip


def arguments(name, seed=0, **more):
    sizes = {"b": B, "h": H, "t": T, "c": C, "d": D, "e": E, "n": N}
    return attention.example(rng(seed), **{**sizes, **OPTIONS[name], "scale": 0.7, **more})


def small(name):
    """The same options on one batch entry and one head: the sum over them is tested by the adjoint identity."""
    given = dict(OPTIONS[name])
    for n, x in given.items():
        if isinstance(x, np.ndarray):
            given[n] = x[:1, :1] if x.ndim == 4 else x[:1]
    if "pattern" in given:
        mask = given["pattern"].to_mask(T, T)
        given["pattern"] = patterns.dense(mask.reshape(-1, T, T)[0])
    return attention.example(rng(3), b=1, h=1, t=T, c=C, d=D, e=E, n=N, **given, scale=0.7)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_by_complex_step(name):
    assert_gradients(attention, small(name), rng(1))


@pytest.mark.parametrize("name", OPTIONS)
def test_adjoint_identity(name):
    assert_adjoint(attention, arguments(name, 1), rng(2))


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_definition(name):
    given = arguments(name, 2)
    want = attention.definition(**given)
    for algorithm in ("auto", "whole", "tiled"):
        result = attention.forward(**given, algorithm=algorithm)
        # normalised vectors of length 2, softmax over at most 10 keys, means of values of order 1
        assert_close(result.output, want.output, 100 * EPS)
        assert_close(result.commitment_loss, want.commitment_loss, 100 * EPS)
        assert np.array_equal(result.members_q, want.members_q)
        assert np.array_equal(result.members_k, want.members_k)


@pytest.mark.parametrize("name", ["causal_separate", "relative_all", "memory_self", "masks_members", "pattern"])
def test_tiled_gradients_equal_whole(name):
    given = arguments(name, 3)
    (whole, back), (_, back_tiled) = (attention.vjp(**given, algorithm=a) for a in ("whole", "tiled"))
    cotangents = random_cotangents(attention, whole, rng(3))
    want, got = back(**cotangents), back_tiled(**cotangents)
    for n in want:
        assert_close(got[n], want[n], 200 * EPS)


@pytest.mark.parametrize("name", OPTIONS)
def test_strict_namespace(name):
    given = arguments(name, 4)

    def strict(x):
        if isinstance(x, tuple):
            return tuple(map(strict, x))
        return array_api_strict.asarray(x) if isinstance(x, np.ndarray) else x

    want, back = attention.vjp(**given)
    got, back_strict = attention.vjp(**{n: strict(x) for n, x in given.items()})
    cotangents = random_cotangents(attention, want, rng(4))
    gradients, others = back(**cotangents), back_strict(**{n: strict(np.asarray(x)) for n, x in cotangents.items()})
    for n in want:
        assert_close(np.asarray(getattr(got, n)), getattr(want, n), 100 * EPS)
    for n, g in gradients.items():
        assert_close(np.asarray(others[n]), g, 200 * EPS)
