"""Few queries that meet many keys: the keys are shared out, and what each share gives is merged."""

import numpy as np
import pytest
from support import assert_close

import refattn as ra
from refattn import backends
from refattn.core.blocks import groups
from refattn.core.problem import prepare

attention = ra.scaled_dot_product_attention
EPS = np.finfo(np.float64).eps
KEYS = 9000
CASES = {
    "plain": {},
    "causal": {"causal": True, "align": KEYS - 3000},
    "lengths": {"key_lengths": [4000], "query_lengths": [120]},
    "no keys": {"key_lengths": [0]},
    "everything": {
        "bias": np.linspace(-1, 1, KEYS).reshape(1, KEYS),
        "softcap": 3.0,
        "alibi_slopes": np.full(4, 1e-3),
        "align": 5,
        "sinks": np.full(4, 0.3),
        "mask": np.arange(KEYS) % 7 != 3,
    },
}


def arrays():
    r = np.random.default_rng(0)
    return r.standard_normal((1, 4, 130, 5)), r.standard_normal((1, 1, KEYS, 5)), r.standard_normal((1, 1, KEYS, 3))


def test_keys_are_shared_out():
    problem = prepare(*arrays(), backend=backends.resolve(None, np)).problem
    shares = [group.k for group in groups(problem, by_keys=True)]
    assert len(shares) > 1
    assert [start for start, _ in shares] == [0, *(stop for _, stop in shares[:-1])]
    assert shares[-1][1] == KEYS
    assert [group.k for group in groups(problem)] == [None]  # for mechanisms that need whole rows


@pytest.mark.parametrize("name", CASES)
def test_shares_of_the_keys_are_merged(name):
    x, settings = arrays(), {"scale": 0.4, **CASES[name]}
    (got, got_pull), (want, want_pull) = (attention.vjp(*x, **settings, algorithm=a) for a in ("auto", "whole"))
    assert_close(got.output, want.output, 100 * EPS)
    assert_close(got.lse, want.lse, 100 * EPS)
    r = np.random.default_rng(1)
    cotangents = {"output": r.standard_normal(got.output.shape), "lse": r.standard_normal(got.lse.shape)}
    wanted = want_pull(**cotangents)
    for n, g in got_pull(**cotangents).items():
        assert_close(g, wanted[n], 4 * np.sqrt(KEYS * 520) * EPS)  # sums of up to 520 x 9000 terms of order 1
