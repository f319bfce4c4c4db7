r"""LSH attention of the Reformer: every query looks at the keys of its own hash bucket, in several hash rounds.

    k[t,d]       = q[t,d] / ||q[t]||                                queries and keys are one array
    bucket[s,t]  = argmax_n [q R_s ; -q R_s][t,n]
    order[s]     = positions sorted by (bucket[s], position), cut into chunks of w; a chunk sees itself and ``before`` ones
    logits[s,i,j] = scale * sum_d q[i,d] k[j,d]                     where round s shows the pair
    output[i,e]  = sum_{s,j} exp(logits[s,i,j] - lse[i]) v[j,e]     lse[i] = ln sum_{s,j} exp(logits[s,i,j])

The rounds are *one* softmax over the pairs (round, key): weighting the rounds' outputs by exp(lse[s] - lse) is the same.
With ``duplicates="union"`` a pair that meets in several rounds counts once, and the output is that of plain attention
over the union of what the rounds show.

======  ==================================================  =====================================
letter  axis                                                where
======  ==================================================  =====================================
...     any batch axes                                      all
h       head                                                all
t       position                                            qk, v, output, lse, buckets
i, j    position as query, position as key                  logits
d, e    query/key channel, value channel                    qk; v, output
s       hash round                                          rotations, buckets
n       half the buckets (of every factor, side by side)    rotations
w       slot in a chunk                                     ``chunk``
======  ==================================================  =====================================

Conventions: natural logarithm; a token does not see itself unless it sees nothing else in any round, then its output is its
own value and its lse its own logit; no number stands for "hidden"; the hash has no gradient.

Source: Kitaev, Kaiser, Levskaya 2020, arXiv:2001.04451, section 2 and appendix A.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from refattn.arrays import (
    broadcast_leading,
    device,
    flatten_leading,
    namespace,
    require_axes,
    require_flag,
    require_integer,
    require_number,
    require_one_of,
)
from refattn.attention.blocks.lsh import Plan
from refattn.attention.blocks.lsh_buckets import bucket_factors, hash_margin, read_buckets, read_mask, sorted_rounds
from refattn.attention.blocks.lsh_rounds import Rounds
from refattn.core import options
from refattn.core.problem import prepare
from refattn.cost import require_sizes
from refattn.mechanism import mechanism
from refattn.normalization import lse_of
from refattn.records import Counts, Elements, Pass, Result

__all__ = ["lsh_attention"]

NORM_EPS = {"l2": 1e-12, "rms": 1e-6}


@options.takes("scale", "pattern", "dropout_mask", "dropout_rate")
def forward(
    qk: Any,
    v: Any,
    *,
    rotations: Any = None,
    buckets: Any = None,
    rng: "np.random.Generator | None" = None,
    hashes: int | None = None,
    n_buckets: int | Sequence[int] | None = None,
    chunk: int = 64,
    before: int = 1,
    after: int = 0,
    causal: bool = False,
    within_bucket: bool = True,
    duplicates: str = "union",
    key_norm: str = "l2",
    norm_eps: float | None = None,
    wrap: str = "none",
    mask: Any = None,
    padding_bucket: bool = False,
    short: str = "hash",
    self_attention: str = "last_resort",
    backend: Any,
    algorithm: str,
    **shared: Any,
) -> tuple[Result, Any]:
    """Softmax over the keys that share a bucket and a window with the query in some hash round.

    Parameters
    ----------
    qk : array (..., h, t, d)
        Queries; keys are the same vectors, normalised.
    v : array (..., h, t, e)
    rotations : array (d, s, n), (h, d, s, n) or (..., h, d, s, n)
        Random directions; n = half the buckets (half the sum of the factors).  No gradient.
    buckets : int array (..., h, s, t)
        The buckets themselves, without round offsets, in place of rotations.
    rng : numpy.random.Generator
        Draws standard normal rotations (d, s, n), in place of both.
    hashes : int
        Hash rounds; default: as many as rotations or buckets have, else 1.
    n_buckets : int or tuple of int
        Even, or even factors whose product is the number of buckets.  Default: twice the columns of the rotations, else
        2 * max(1, t // chunk).
    chunk, before, after : int
        Slots of a chunk, and the chunks seen before and after one's own.  The last chunk of a round may be short.
    causal : bool
        Query i sees the keys j <= i.
    within_bucket : bool
        Only keys of the query's own bucket; False: all keys of the window.
    duplicates : {"union", "multiset", "trax1"}
        A pair counts in the first round that shows it; in every round; or in every round with -ln(N + 1e-9) added to its
        logit, N as trax counted (0 for pairs that meet only across the border of two rounds).
    key_norm : {"l2", "rms"}
        k = q / max(||q||, norm_eps), or q / sqrt(mean q^2 + norm_eps).
    norm_eps : float
        Default 1e-12 for "l2", 1e-6 for "rms".
    wrap : {"none", "global"}
        "global": the windows run on over the chunks of all rounds and around the end, as most code does; needs t to be a
        multiple of chunk.
    mask : bool array (..., t)
        True = a key; False hides the key from every query.
    padding_bucket : bool
        Tokens that the mask hides get a bucket of their own, behind all others.
    short : {"hash", "full"}
        "full": t <= chunk needs no hashing, every query sees all keys, and buckets is None.
    self_attention : {"last_resort", "never", "always"}
        Whether a token sees itself: only if it sees nothing else in any round (it counts once, whatever hides it
        otherwise), never, or like any other key.
    {shared}

    Returns
    -------
    output : array (..., h, t, e), in the dtype of the inputs
    lse : array (..., h, t), in the compute dtype
    buckets : int64 array (..., h, s, t), or None

    Raises
    ------
    ValueError
        Odd bucket counts or factors, rotations or buckets that do not fit rounds, factors or length, a chunk below 1,
        a length that is no multiple of chunk with ``wrap="global"``, no source of buckets.
    TypeError
        A mask that is not bool, buckets that are no integers.

    Examples
    --------
    Tokens 0 and 2 share a bucket, tokens 1 and 3 another; token 0 sees nobody but token 2:

    >>> import numpy as np
    >>> qk, v = np.ones((1, 4, 1)), np.array([[[1.0], [2.0], [3.0], [4.0]]])
    >>> result = lsh_attention.forward(qk, v, buckets=np.array([[[0, 1, 0, 1]]]), chunk=2)
    >>> result.output[0, :, 0]
    array([3., 4., 1., 2.])
    >>> lsh_attention(qk, v, buckets=np.array([[[0, 1, 0, 1]]]), chunk=2, causal=True)[0, :, 0]
    array([1., 2., 1., 2.])
    """
    if backend.fused:
        raise ValueError(f"backend {backend.name!r} does not serve lsh_attention: its blocks are gathered")
    xp = namespace(qk, v)
    sizes = require_axes(qk=(qk, "... h t d"), v=(v, "... h t e"))
    lead = broadcast_leading(qk=(qk, 3), v=(v, 3))
    require_one_of("key_norm", key_norm, tuple(NORM_EPS))
    eps = NORM_EPS[key_norm] if norm_eps is None else require_number("norm_eps", norm_eps, minimum=0)
    plan, full = Plan.read(
        sizes["t"], chunk=chunk, before=before, after=after, causal=causal, within_bucket=within_bucket,
        duplicates=duplicates, wrap=wrap, short=short, self_attention=self_attention, algorithm=algorithm,
    )  # fmt: skip
    keep = read_mask(mask, lead, sizes["t"])
    hides = require_flag("padding_bucket", padding_bucket)
    qk, v = (xp.broadcast_to(x, (*lead, *x.shape[-3:])) for x in (qk, v))
    problem = prepare(qk, qk, v, backend=backend, **shared).problem
    units = problem.q.shape[0], sizes["h"]
    if full:
        hashed = xp.zeros((*units, 1, sizes["t"]), dtype=xp.int64, device=device(qk))
    else:
        hashed = read_buckets(
            xp.reshape(problem.q, (*units, *qk.shape[-2:])), backend, lead, rotations=rotations, buckets=buckets, rng=rng, hashes=hashes,
            n_buckets=n_buckets, chunk=chunk, pad=keep if hides else None,
        )  # fmt: skip
    plan = plan.of(hashed.shape[2])
    order, rank = sorted_rounds(hashed, backend)
    rounds = Rounds(problem, backend, plan, order, rank, hashed, keep, key_norm, eps, self_attention == "last_resort")
    total, alone = rounds.forward()  # output = sum over rounds and keys of exp(logits - maximum) / row_sum v
    lse = lse_of(total.maximum, total.row_sum)
    result = Result(
        output=xp.reshape(total.output, (*lead, *total.output.shape[1:])),
        lse=xp.reshape(lse, (*lead, *lse.shape[1:])),
        buckets=None if full else xp.reshape(hashed, (*lead, *hashed.shape[1:])),
    )
    return result, (rounds, lead, total, alone)


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """Cotangents of qk, v and scale, through the weights of the rounds as well (derivation: ``blocks.lsh_rounds``)."""
    rounds, lead, total, alone = saved
    xp = rounds.backend.xp
    d_output = None if output is None else flatten_leading(output, 3, lead)
    d_lse = None if lse is None else flatten_leading(lse, 2, lead)
    d_qk, d_v, d_scale = rounds.backward(total, alone, d_output, d_lse)
    return {
        "qk": xp.reshape(d_qk, (*lead, *d_qk.shape[1:])),
        "v": xp.reshape(d_v, (*lead, *d_v.shape[1:])),
        "scale": d_scale,
    }


def cost(
    *,
    b: int = 1,
    h: int = 1,
    t: int,
    d: int,
    e: int | None = None,
    hashes: int = 1,
    n_buckets: Any = None,
    chunk: int = 64,
    before: int = 1,
    after: int = 0,
    wrap: str = "none",
    short: str = "hash",
    hashing: bool = True,
) -> Counts:
    """Counts of one call: rounds * t * (before + 1 + after) * chunk pairs a head.

    Which pairs are visible depends on the buckets: ``multiplies`` counts the pairs of a window and leaves out the chunks
    that the ends of a round do not have and empty slots; ``computed_multiplies`` counts them too.  The projections onto the
    rotations, t d s n multiply-adds a head, are in both (``hashing=False``: buckets given).  Saved are qk, v, output, lse and,
    as 64-bit integers, the buckets, the order and the places of every round.
    """
    e = d if e is None else e
    require_sizes(b=b, h=h, t=t, d=d, e=e, hashes=hashes, before=before, after=after)
    require_integer("chunk", chunk, minimum=1)
    require_one_of("wrap", wrap, ("none", "global"))
    require_one_of("short", short, ("hash", "full"))
    factors = bucket_factors(n_buckets, t, chunk)
    if short == "full" and t <= chunk:
        hashes, chunk, before, after, hashing = 1, max(t, 1), 0, 0, False
    chunk = min(chunk, max(t, 1))
    whole, rest = divmod(t, chunk)  # chunks that are full, and tokens in a last one
    chunks, reach = whole + bool(rest), before + 1 + after
    computed = hashes * chunks * chunk * reach * chunk
    if wrap == "global":
        visible = computed
    else:
        met = sum(m * whole - m * (m + 1) // 2 for m in (min(before, whole - 1), min(after, whole - 1)) if m > 0)
        visible = (whole + met) * chunk**2 + rest * (rest + chunk * (min(before, whole) + min(after, whole)))
        visible *= hashes
    units = b * h
    hashed = t * d * hashes * sum(factors) // 2 if hashing else 0
    inputs, outputs = Elements(storage=units * t * (d + e)), Elements(storage=units * t * e, compute=units * t)
    indices = Elements(index=units * t * hashes * 3)
    block = Elements(compute=2 * max(1 << 18, chunk * chunk * reach))
    return Counts(
        forward=Pass(
            multiplies=units * (visible * (d + e) + hashed),
            computed=units * (computed * (d + e) + hashed),
            elementwise=units * (4 * visible + t * (3 * d + 2 * e * hashes)),
            read=inputs,
            written=outputs,
            peak=outputs + indices + block,
        ),
        backward=Pass(
            multiplies=units * visible * (3 * d + 2 * e),
            computed=units * computed * (3 * d + 2 * e),
            elementwise=units * (4 * visible + t * (6 * d + 3 * e)),
            read=inputs + 2 * outputs,
            written=inputs,
            peak=inputs + 2 * block,
        ),
        saved=inputs + outputs + indices,
    )


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 3,
    t: int = 24,
    d: int = 6,
    e: int = 5,
    hashes: int = 2,
    chunk: int = 4,
    n_buckets: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """Normal qk (b,h,t,d), v (b,h,t,e) and rotations (d,s,n), redrawn until every hash choice has a margin of 0.02.

    So much that rounding qk and the rotations to bfloat16 changes no bucket.
    """
    factors = bucket_factors(n_buckets, t, chunk)
    normal = rng.standard_normal
    qk, v = normal((b, h, t, d)), normal((b, h, t, e))
    given = {"qk": qk, "v": v, "hashes": hashes, "chunk": chunk, **settings}
    given["n_buckets"] = factors if isinstance(n_buckets, (tuple, list)) else factors[0]
    if "buckets" in settings or "rng" in settings:
        return given
    if "rotations" not in settings:
        given["rotations"] = normal((d, hashes, sum(factors) // 2))
    for _ in range(200):
        unsafe = hash_margin(qk, given["rotations"], factors) < 0.02
        if not unsafe.any():
            return given
        qk[unsafe] = normal((int(unsafe.sum()), d))
    raise ValueError(f"no example with clear hash choices was found for n_buckets = {n_buckets}")


_PROBES = (
    {"t": 24, "hashes": 3, "causal": True, "says": "causal, three rounds: pairs that meet twice count once"},
    {"t": 24, "hashes": 3, "duplicates": "multiset", "says": "pairs that meet twice count twice"},
    {
        "t": 24,
        "within_bucket": False,
        "causal": True,
        "says": "all keys of the window: the sorted order is not that of time",
    },
    {
        "t": 24,
        "wrap": "global",
        "within_bucket": False,
        "duplicates": "multiset",
        "says": "windows run on around the ends",
    },
    {"t": 27, "before": 2, "after": 1, "says": "two chunks before, one after, a short last chunk"},
    {"t": 24, "n_buckets": (2, 4), "says": "factored hash"},
    {"t": 24, "key_norm": "rms", "says": "keys of norm sqrt(d)"},
    {"t": 24, "self_attention": "always", "says": "a token sees itself like any other key"},
    {"t": 24, "self_attention": "never", "causal": True, "says": "rows that see nobody are empty"},
    {"t": 24, "b": 2, "mask": np.arange(24) < np.array([[24], [15]]), "says": "padding is hidden"},
    {"t": 4, "chunk": 8, "short": "full", "says": "shorter than a chunk: no hashing"},
)

lsh_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="lsh_attention",
    differentiable=("qk", "v", "scale"),
    floating=("rotations",),
    outputs=("output", "lse"),
    probes=_PROBES,
)
