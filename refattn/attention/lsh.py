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

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from refattn.arrays import (
    broadcast_leading,
    device,
    flatten_leading,
    is_array,
    is_bool,
    is_integer,
    namespace,
    real,
    require_axes,
    require_integer,
    require_one_of,
    to_namespace,
)
from refattn.attention.blocks.lsh import PAIRS, Multiplicity, Plan, Units, bucket_factors, hash_buckets, sort_buckets
from refattn.core import options
from refattn.core.backward import backward_group
from refattn.core.blocks import SPLIT, Group, View
from refattn.core.forward import forward_group
from refattn.core.problem import prepare
from refattn.core.selections import take_order
from refattn.cost import require_sizes
from refattn.mechanism import mechanism
from refattn.normalization import lse_of
from refattn.records import Counts, Elements, Pass, Result

__all__ = ["lsh_attention"]

NORM_EPS = {"l2": 1e-12, "rms": 1e-6}
APART = 1 << 22
"""Operations from which units hash and sort one by one, and few units compute round by round."""


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
    require_axes(qk=(qk, "... h t d"), v=(v, "... h t e"))
    lead = broadcast_leading(qk=(qk, 3), v=(v, 3))
    h, t = qk.shape[-3:-1]
    chunk = require_integer("chunk", chunk, minimum=1)
    before, after = (require_integer(n, x, minimum=0) for n, x in (("before", before), ("after", after)))
    require_one_of("duplicates", duplicates, ("union", "multiset", "trax1"))
    require_one_of("key_norm", key_norm, ("l2", "rms"))
    require_one_of("wrap", wrap, ("none", "global"))
    require_one_of("short", short, ("hash", "full"))
    require_one_of("self_attention", self_attention, ("last_resort", "never", "always"))
    eps = NORM_EPS[key_norm] if norm_eps is None else norm_eps
    keep = _mask(mask, lead, t)
    qk, v = (xp.broadcast_to(x, (*lead, *x.shape[-3:])) for x in (qk, v))
    problem = prepare(qk, qk, v, backend=backend, **shared).problem

    full = short == "full" and t <= chunk
    if full:
        found = xp.zeros((problem.q.shape[0], h, 1, t), dtype=xp.int64, device=device(qk))
        chunk, before, after, wrap = max(1, t), 0, 0, "none"
    else:
        found = _buckets(
            problem.q[:, :, 0, ...],
            backend,
            lead,
            rotations,
            buckets,
            rng,
            hashes,
            n_buckets,
            chunk,
            keep if padding_bucket else None,
        )
    if t == 0:
        before = after = 0
    if wrap == "global" and t % chunk:
        raise ValueError(f'wrap="global" needs a length that is a multiple of chunk: t is {t} and chunk is {chunk}')
    plan = Plan(
        length=t,
        hashes=found.shape[2],
        chunk=min(chunk, max(1, t)),
        before=before,
        after=after,
        ring=wrap == "global",
        causal=bool(causal),
        within_bucket=bool(within_bucket) and not full,
        duplicates="multiset" if full else duplicates,
        self_visible=self_attention == "always",
        algorithm=algorithm,
    )
    work = 16 * plan.hashes * t
    order, rank = _by_unit(
        backend, found.shape[:2], found.shape, 2, work, device(qk), lambda unit: sort_buckets(found[(*unit, ...)])
    )
    rounds = _Rounds(problem, backend, plan, order, rank, found, keep, key_norm, eps, self_attention == "last_resort")
    output, lse, alone = rounds.forward()
    result = Result(
        output=xp.reshape(output, (*lead, *output.shape[1:])),
        lse=xp.reshape(lse, (*lead, *lse.shape[1:])),
        buckets=None if full else xp.reshape(found, (*lead, *found.shape[1:])),
    )
    return result, (rounds, lead, output, lse, alone)


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """Cotangents of qk, v and scale.

    With p[s,i,j] = exp(logits - lse) over all rounds and Delta_i = d_output_i . output_i:
    dv_j = sum_{s,i} p d_output_i; da = p (d_output_i . v_j - Delta_i + d_lse_i), a gradient through the weights of the
    rounds as well; d_qk_i = scale sum_{s,j} da k_j as query, and as key through the normalisation.
    """
    rounds, lead, result, result_lse, alone = saved
    xp = rounds.backend.xp
    d_output = None if output is None else flatten_leading(output, 3, lead)
    d_lse = None if lse is None else flatten_leading(lse, 2, lead)
    d_qk, d_v, d_scale = rounds.backward(result, result_lse, alone, d_output, d_lse)
    return {
        "qk": xp.reshape(d_qk, (*lead, *d_qk.shape[1:])),
        "v": xp.reshape(d_v, (*lead, *d_v.shape[1:])),
        "scale": d_scale,
    }


# ------------------------------------------------------------------------------------------------ arguments


def _mask(mask: Any, lead: tuple[int, ...], t: int) -> Any:
    """The mask as (b|1, 1, t), or None."""
    if mask is None:
        return None
    if not is_array(mask) or not is_bool(mask.dtype):
        kind = f"has dtype {mask.dtype}" if is_array(mask) else f"is a {type(mask).__name__}"
        raise TypeError(f"mask {kind}: expected a bool array (..., t), True = a key")
    require_axes({"t": t}, mask=(mask, "... t"))
    _require_within(
        "mask", mask, 1, lead, "(..., t); a (..., q, k) mask goes in as pattern=refattn.patterns.dense(mask)"
    )
    flat = flatten_leading(mask, 1, lead)
    return namespace(mask).expand_dims(flat, axis=1)


def _require_within(name: str, x: Any, keep: int, lead: tuple[int, ...], shape: str) -> None:
    own = tuple(x.shape[: x.ndim - keep])
    fits = len(own) <= len(lead) and all(m in (1, n) for m, n in zip(reversed(own), reversed(lead), strict=False))
    if not fits:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: its leading axes do not broadcast to {lead}; expected {shape}"
        )


def _buckets(
    x: Any,
    backend: Any,
    lead: tuple[int, ...],
    rotations: Any,
    buckets: Any,
    rng: Any,
    hashes: Any,
    n_buckets: Any,
    chunk: int,
    pad: Any,
) -> Any:
    """Buckets of every round, int64 (b,h,s,t), from whatever was given."""
    xp = namespace(x)
    b, h, t, d = x.shape
    sources = {"rotations": rotations, "buckets": buckets, "rng": rng}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        what = " and ".join(given) or "none of them"
        raise ValueError(f"the buckets come from one of rotations, buckets and rng: {what} was given")
    if hashes is not None:
        hashes = require_integer("hashes", hashes, minimum=1)
    factors = None if n_buckets is None else bucket_factors(n_buckets, t, chunk)
    if buckets is not None:
        found = _given_buckets(buckets, xp, lead, (b, h, t), hashes, factors, pad is not None)
    else:
        if rng is not None:
            if not isinstance(rng, np.random.Generator):
                raise TypeError(f"rng is a {type(rng).__name__}: expected a numpy.random.Generator")
            factors = bucket_factors(n_buckets, t, chunk)
            draw = rng.standard_normal((d, hashes or 1, sum(factors) // 2))
            rotations = to_namespace(draw, xp, like=x, dtype=real(x).dtype)
        factors = (2 * rotations.shape[-1],) if factors is None and rotations.ndim else factors or (2,)
        found = _hashed(x, backend, rotations, lead, hashes, factors)
    if pad is not None:
        if factors is not None:
            last = math.prod(factors)
        else:
            real_ones = xp.where(pad[:, :, None, :], found, xp.zeros_like(found))
            last = 1 + (int(xp.max(real_ones)) if t and b and h else 0)
        found = xp.where(pad[:, :, None, :], found, xp.full_like(found, last))
    return found


def _given_buckets(
    buckets: Any,
    xp: Any,
    lead: tuple[int, ...],
    sizes: tuple[int, int, int],
    hashes: int | None,
    factors: tuple[int, ...] | None,
    padding: bool,
) -> Any:
    """Buckets that the caller gives, checked, as int64 (b,h,s,t)."""
    b, h, t = sizes
    if not is_array(buckets) or not is_integer(buckets.dtype):
        raise TypeError("buckets: expected an integer array (..., h, s, t)")
    if buckets.ndim < 3 or buckets.shape[-1] != t or buckets.shape[-3] not in (1, h):
        raise ValueError(f"buckets has shape {tuple(buckets.shape)}: expected (..., h, s, t) with h = {h}, t = {t}")
    if hashes not in (None, buckets.shape[-2]) or buckets.shape[-2] == 0:
        wanted = "at least one round" if hashes is None else f"hashes = {hashes} rounds"
        raise ValueError(f"buckets has shape {tuple(buckets.shape)}: expected (..., h, s, t) with {wanted}")
    _require_within("buckets", buckets, 3, lead, "(..., h, s, t)")
    found = xp.astype(flatten_leading(buckets, 3, lead), xp.int64)
    found = xp.broadcast_to(found, (b, h, *found.shape[2:]))
    if t and b and h:
        lowest, highest = int(xp.min(found)), int(xp.max(found))
        limit = None if factors is None else math.prod(factors) + padding
        if lowest < 0 or (limit is not None and highest >= limit):
            wanted = "numbers from 0" if limit is None else f"numbers from 0 to {limit - 1}"
            raise ValueError(f"buckets holds {lowest} ... {highest}: expected {wanted}, without round offsets")
    return found


def _hashed(
    x: Any, backend: Any, rotations: Any, lead: tuple[int, ...], hashes: int | None, factors: tuple[int, ...]
) -> Any:
    """Buckets by rotations, int64 (b,h,s,t)."""
    xp = namespace(x)
    b, h, t, d = x.shape
    shape = tuple(rotations.shape)
    if len(shape) < 3:
        raise ValueError(f"rotations has shape {shape}: expected (d, s, n), (h, d, s, n) or (..., h, d, s, n)")
    full = rotations if len(shape) > 3 else rotations[None, ...]
    own = (d, shape[-2] if hashes is None else hashes, sum(factors) // 2)
    if shape[-3:] != own or full.shape[-4] not in (1, h) or shape[-2] == 0:
        raise ValueError(
            f"rotations has shape {shape}: expected (d, s, n) = {own}, n half the sum of the factors {factors},"
            f" perhaps after (..., h) with h = {h}"
        )
    _require_within("rotations", full, 4, lead, "(d, s, n), (h, d, s, n) or (..., h, d, s, n)")
    flat = xp.broadcast_to(flatten_leading(full, 4, lead), (b, h, *own))

    def run(unit: tuple[slice, slice]) -> tuple[Any]:
        return (hash_buckets(x[(*unit, ...)], flat[(*unit, ...)], factors),)

    return _by_unit(backend, (b, h), (b, h, own[1], t), 1, t * math.prod(own), device(x), run)[0]


def _by_unit(
    backend: Any,
    units: tuple[int, int],
    shape: tuple[int, ...],
    count: int,
    work: int,
    where: Any,
    function: Callable[[tuple[slice, slice]], tuple[Any, ...]],
) -> list[Any]:
    """int64 arrays (b,h,...) of that shape, made for every (batch, head) unit by itself where there is much to do."""
    b, h = units
    tasks = [(slice(0, b), slice(0, h))]
    if b * h * work > APART:
        tasks = [(slice(i, i + 1), slice(j, j + 1)) for i in range(b) for j in range(h)]
    found = [backend.xp.zeros(shape, dtype=backend.xp.int64, device=where) for _ in range(count)]
    for unit, parts in zip(tasks, backend.map(function, tasks, work=b * h * work), strict=True):
        found = [backend.assign(x, (*unit, ...), part) for x, part in zip(found, parts, strict=True)]
    return found


# ------------------------------------------------------------------------------------------------ the rounds


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """All rounds of one call: (batch, head) units in groups, round after round, each in its own order."""

    problem: Any
    backend: Any
    plan: Plan
    order: Any
    rank: Any
    buckets: Any
    keep: Any
    key_norm: str
    eps: float
    last_resort: bool

    def _units(self, view: Any) -> Units:
        group = view.group
        return Units(
            self.plan,
            view.part(self.order),
            view.part(self.rank),
            view.part(self.buckets),
            keep=None if self.keep is None else view.part(self.keep),
            visibility=self.problem.visibility,
            numbers=(group.batches, group.heads.reshape(-1)),
        )

    def _round(self, view: Any, units: Units, s: int, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Round s as a problem of its own, q, k and v in its order; its one group; its query rows."""
        plan = self.plan
        keys = units.key_rows(s)
        rows = keys[..., plan.before * plan.chunk : plan.before * plan.chunk + plan.rows]
        dropout = self.problem.dropout
        problem = dataclasses.replace(
            self.problem,
            q=take_order(q, rows),
            k=take_order(k, keys[:, :, 0, :]),
            v=take_order(v, keys[:, :, 0, :]),
            terms=(Multiplicity(units, rows, keys),) if plan.duplicates == "trax1" else (),
            visibility=None,
            blocks=lambda group: units.blocks(s, rows, keys),
            dropout=None if dropout is None else (view.part(dropout[0]), dropout[1]),
        )
        whole = Group(slice(0, q.shape[0]), slice(0, q.shape[1]), (0, plan.rows), view.group.heads)
        return problem, whole, rows

    def _keys(self, x: Any) -> tuple[Any, Any]:
        """Normalised keys (b,h,t,d), and the factors that the normalisation multiplies by, (b,h,t,1)."""
        xp = self.backend.xp
        square = xp.sum(x * x, axis=-1, keepdims=True)
        if self.key_norm == "rms":
            factor = 1 / xp.sqrt(square / x.shape[-1] + self.eps)
        else:
            norm = xp.sqrt(square)
            factor = 1 / xp.where(real(norm) > self.eps, norm, xp.full_like(norm, self.eps))
        return x * factor, factor

    def _keys_backward(self, k: Any, factor: Any, d_k: Any) -> Any:
        """factor (d_k - k (k . d_k) / n): n = 1 for l2 (no second term where the norm is below eps), d for rms."""
        xp = self.backend.xp
        inner = xp.sum(k * d_k, axis=-1, keepdims=True)
        if self.key_norm == "rms":
            inner = inner / k.shape[-1]
        else:
            inner = xp.where(real(factor) < 1 / self.eps, inner, xp.zeros_like(inner))
        return factor * (d_k - k * inner)

    def _groups(self) -> list[Any]:
        """As many units together as fill a block of one round."""
        b, h = self.problem.q.shape[:2]
        per_unit = max(1, self.plan.rows * self.plan.reach * self.plan.chunk)
        together = max(1, PAIRS // per_unit)
        heads, batches = min(h, together), max(1, together // max(1, h))
        numbers, rows = np.asarray(self.problem.heads), (0, self.plan.length)
        return [
            Group(slice(i, min(i + batches, b)), slice(j, min(j + heads, h)), rows, numbers[j : j + heads])
            for i in range(0, b, batches)
            for j in range(0, h, max(1, heads))
        ]

    def _jobs(self) -> tuple[list[Any], list[tuple[int, ...]], int]:
        """Groups of units, the rounds that each takes at a time, and the work of all: few units share out their rounds."""
        plan, groups = self.plan, self._groups()
        units = self.problem.q.shape[0] * self.problem.q.shape[1]
        work = 2 * units * plan.hashes * plan.rows * plan.reach * plan.chunk
        every = tuple(range(plan.hashes))
        apart = len(groups) < SPLIT and work > APART
        return groups, [(s,) for s in every] if apart else [every], work

    def _run(self, function: Callable[..., tuple[Any, ...]], gradient: bool) -> Iterator[tuple[Any, list[Any]]]:
        """Every group's view, and what the function gives for its shares of the rounds, in order."""
        groups, shares, work = self._jobs()
        views = [View(self.problem, group, self.backend, gradient) for group in groups]

        def run(job: tuple[Any, tuple[int, ...]]) -> tuple[Any, ...]:
            with self.backend.quiet():
                return function(*job)

        done = self.backend.map(run, [(view, rounds) for view in views for rounds in shares], work=work)
        for n, view in enumerate(views):
            yield view, done[n * len(shares) : (n + 1) * len(shares)]

    def forward(self) -> tuple[Any, Any, Any]:
        """output (b,h,t,e), lse (b,h,t), and bool (b,h,t): the rows that see nobody but, perhaps, themselves."""
        xp, backend, problem = self.backend.xp, self.backend, self.problem
        shape, like = (*problem.q.shape[:2], problem.q.shape[-2]), {"device": device(problem.q)}
        output = xp.zeros((*shape, problem.v.shape[-1]), dtype=problem.q.dtype, **like)
        lse = xp.full(shape, -math.inf, dtype=problem.q.dtype, **like)
        for view, parts in self._run(self._forward_rounds, False):
            o, z = parts[0]
            with backend.quiet():
                for part in parts[1:]:
                    o, z = _with_round(xp, o, z, *part)
            index = (view.group.b, view.group.g, ...)
            output, lse = backend.assign(output, index, o), backend.assign(lse, index, z)
        alone = real(lse) == -math.inf
        if not self.last_resort:
            return output, lse, alone
        for group in self._groups():
            view = View(problem, group, backend, gradient=False)
            here = view.part(alone)
            if not bool(xp.any(here)):
                continue
            q, v, kept = view.part(problem.q)[:, :, 0, ...], view.part(problem.v), self._own_weight(view)
            with backend.quiet():
                k, _ = self._keys(q)
                own = xp.where(here[..., None], v if kept is None else v * kept, view.part(output))
                logits = xp.where(here, problem.scale * xp.sum(q * k, axis=-1), view.part(lse))
            index = (group.b, group.g, ...)
            output, lse = backend.assign(output, index, own), backend.assign(lse, index, logits)
        return output, lse, alone

    def _forward_rounds(self, view: Any, rounds: tuple[int, ...]) -> tuple[Any, Any]:
        xp, units = self.backend.xp, self._units(view)
        q, v = view.part(self.problem.q), view.part(self.problem.v)
        k, _ = self._keys(q[:, :, 0, ...])
        output = lse = None
        for s in rounds:
            problem, group, _ = self._round(view, units, s, q, k, v)
            whole = forward_group(problem, group, self.backend)
            part, z = whole.output, lse_of(whole.maximum, whole.row_sum)
            part, z = units.to_positions(part[:, :, 0, ...], s), units.to_positions(z[:, :, 0, :, None], s)[..., 0]
            output, lse = (part, z) if output is None else _with_round(xp, output, lse, part, z)
        return output, lse

    def _own_weight(self, view: Any) -> Any:
        """Dropout factors of the pairs (i, i), (b|1,h|1,t|1,1); None without dropout."""
        if self.problem.dropout is None:
            return None
        xp = self.backend.xp
        mask, factor = self.problem.dropout
        mask = view.part(mask)[:, :, 0, ...]
        n_q, n_k = mask.shape[-2:]
        if n_q > 1 and n_k > 1:
            flat = xp.reshape(mask, (*mask.shape[:-2], n_q * n_k))
            mask = xp.take(flat, xp.arange(n_q) * (n_k + 1), axis=-1)
        else:
            mask = xp.reshape(mask, (*mask.shape[:-2], n_q * n_k))
        return xp.astype(mask, self.problem.q.dtype)[..., None] * factor

    def backward(self, output: Any, lse: Any, alone: Any, d_output: Any, d_lse: Any) -> tuple[Any, Any, Any]:
        """Cotangents of qk (b,h,t,d), v (b,h,t,e) and scale."""
        xp, backend, problem = self.backend.xp, self.backend, self.problem
        zeros = {"dtype": problem.q.dtype, "device": device(problem.q)}
        d_qk = xp.zeros((*lse.shape, problem.q.shape[-1]), **zeros)
        d_v = xp.zeros((*lse.shape, problem.v.shape[-1]), **zeros)
        d_scale = xp.zeros((), **zeros)
        d_output = xp.zeros_like(output) if d_output is None else xp.broadcast_to(d_output, output.shape)
        d_lse = None if d_lse is None else xp.broadcast_to(d_lse, lse.shape)

        def rounds(view: Any, which: tuple[int, ...]) -> tuple[Any, ...]:
            parts = [None if x is None else view.part(x) for x in (output, lse, alone, d_output, d_lse)]
            found = self._backward_rounds(view, which, *parts)
            return found if len(which) < self.plan.hashes else self._with_own(view, found, *parts[2:])

        for view, (first, *others) in self._run(rounds, True):
            if others:
                parts = [None if x is None else view.part(x) for x in (alone, d_output, d_lse)]
                with backend.quiet():
                    for other in others:
                        first = tuple(a + b for a, b in zip(first, other, strict=True))
                    first = self._with_own(view, first, *parts)
            index = (view.group.b, view.group.g, ...)
            d_qk, d_v = backend.assign(d_qk, index, first[0]), backend.assign(d_v, index, first[1])
            d_scale = d_scale + first[2]
        return d_qk, d_v, d_scale

    def _backward_rounds(
        self, view: Any, which: tuple[int, ...], output: Any, lse: Any, alone: Any, d_output: Any, d_lse: Any
    ) -> tuple[Any, Any, Any, Any]:
        """Sums over some rounds: cotangents of q, k, v and scale."""
        xp, units = self.backend.xp, self._units(view)
        q, v = view.part(self.problem.q), view.part(self.problem.v)
        k, _ = self._keys(q[:, :, 0, ...])
        shift = xp.sum(d_output * output, axis=-1)  # Delta
        shift = xp.where(alone, xp.zeros_like(shift), shift if d_lse is None else shift - d_lse)
        per_row = xp.stack([xp.where(alone, xp.zeros_like(lse), lse), shift], axis=-1)
        d_q, d_k, d_v = xp.zeros_like(k), xp.zeros_like(k), xp.zeros_like(v)
        d_scale = xp.zeros((), dtype=k.dtype, device=device(k))
        for s in which:
            problem, group, rows = self._round(view, units, s, q, k, v)
            z_s, d_o = take_order(per_row[:, :, None, ...], rows), take_order(d_output[:, :, None, ...], rows)
            a, b, c, e, _ = backward_group(problem, group, self.backend, z_s[..., 0], z_s[..., 1], d_o)
            d_q += units.to_positions(a[:, :, 0, ...], s)
            d_k += units.keys_to_positions(b, s)
            d_v += units.keys_to_positions(c, s)
            d_scale = d_scale + e
        return d_q, d_k, d_v, d_scale

    def _with_own(
        self, view: Any, found: tuple[Any, Any, Any, Any], alone: Any, d_output: Any, d_lse: Any
    ) -> tuple[Any, Any, Any]:
        """Cotangents of qk, v and scale: rows that see themselves added, both roles of qk together."""
        xp, scale = self.backend.xp, self.problem.scale
        d_q, d_k, d_v, d_scale = found
        q = view.part(self.problem.q)[:, :, 0, ...]
        k, factor = self._keys(q)
        if self.last_resort:
            d_own = d_output if (kept := self._own_weight(view)) is None else d_output * kept
            d_v = d_v + xp.where(alone[..., None], d_own, xp.zeros_like(d_own))
            if d_lse is not None:  # the row's lse is its own logit, scale q_i . k_i
                d_own = xp.where(alone, d_lse, xp.zeros_like(d_lse))[..., None]
                d_q, d_k = d_q + scale * d_own * k, d_k + scale * d_own * q
                d_scale = d_scale + xp.sum(d_own * q * k)
        return d_q + self._keys_backward(k, factor, d_k), d_v, d_scale


def _with_round(xp: Any, output: Any, lse: Any, part: Any, z: Any) -> tuple[Any, Any]:
    """output and lse with one more round; overwrites the arrays it is given."""
    peak = xp.maximum(real(lse), real(z))
    shift = xp.where(peak == -math.inf, xp.zeros_like(peak), peak)
    before, now = xp.exp(lse - shift), xp.exp(z - shift)
    total = before + now
    empty = peak == -math.inf
    safe = xp.where(empty, xp.ones_like(total), total)
    output *= (before / safe)[..., None]
    part *= (now / safe)[..., None]
    output += part
    return output, xp.where(empty, xp.full_like(total, -math.inf), xp.log(safe) + shift)


# ------------------------------------------------------------------------------------------------ counts and example


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
        unsafe = _margin(qk, given["rotations"], factors) < 0.02
        if not unsafe.any():
            return given
        qk[unsafe] = normal((int(unsafe.sum()), d))
    raise ValueError(f"no example with clear hash choices was found for n_buckets = {n_buckets}")


def _margin(x: np.ndarray, rotations: np.ndarray, factors: tuple[int, ...]) -> np.ndarray:
    """Smallest lead of a winning bucket over the runner-up, in any round and factor, relative to the norm: (b,h,t)."""
    rotations = rotations if rotations.ndim > 3 else rotations[None]
    projected = np.einsum("...td,...dsn->...tsn", x / np.sqrt(np.sum(x * x, -1, keepdims=True)), rotations)
    lead, start = np.full(x.shape[:-1], np.inf), 0
    for factor in factors:
        part = projected[..., start : start + factor // 2]
        ranked = np.sort(np.concatenate([part, -part], axis=-1), axis=-1)
        lead = np.minimum(lead, np.min(ranked[..., -1] - ranked[..., -2], axis=-1))
        start += factor // 2
    return lead


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
