"""LSH attention by its definition: one query at a time, every pair of every round written down, in float64.

The second, independent path: buckets by an explicit argmax over [xR ; -xR], Python sorting, windows as lists of
(round, position), and for every query a dictionary of how often it meets each key.
"""

import math
from collections import Counter
from typing import Any

import numpy as np

from refattn.records import Result

__all__ = ["all_buckets", "definition", "meetings", "plain_buckets"]


def definition(
    qk: np.ndarray,
    v: np.ndarray,
    *,
    rotations: np.ndarray | None = None,
    buckets: np.ndarray | None = None,
    rng: np.random.Generator | None = None,
    hashes: int | None = None,
    n_buckets: Any = None,
    chunk: int = 64,
    before: int = 1,
    after: int = 0,
    causal: bool = False,
    within_bucket: bool = True,
    duplicates: str = "union",
    key_norm: str = "l2",
    norm_eps: float | None = None,
    wrap: str = "none",
    mask: np.ndarray | None = None,
    padding_bucket: bool = False,
    short: str = "hash",
    self_attention: str = "last_resort",
    scale: float | None = None,
    pattern: Any = None,
    dropout_mask: np.ndarray | None = None,
    dropout_rate: float = 0.0,
) -> Result:
    """softmax over the pairs (round, key) that the rounds show; arguments and results as ``lsh_attention``.

    output_i = sum_j w_ij v_j, w_ij = c_ij exp(a_ij) / sum_j c_ij exp(a_ij), with a_ij = scale q_i.k_j and c_ij the
    number of rounds (and places of a window) in which i meets j; 1 for ``duplicates="union"``.

    Source: Kitaev et al. 2020, arXiv:2001.04451, section 2 and appendix A.
    """
    lead = np.broadcast_shapes(qk.shape[:-3], v.shape[:-3])
    qk, v = (np.broadcast_to(x, lead + x.shape[-3:]) for x in (qk, v))
    h, t, d = qk.shape[-3:]
    whole = (*lead, h)
    full = short == "full" and t <= chunk
    keep = np.ones((*lead, t), dtype=bool) if mask is None else np.broadcast_to(mask, (*lead, t))
    if full:
        found = np.zeros((*whole, 1, t), dtype=np.int64)
    else:
        source = {"rotations": rotations, "buckets": buckets, "rng": rng, "hashes": hashes, "n_buckets": n_buckets}
        found = all_buckets(qk, lead, chunk=chunk, keep=keep if padding_bucket else None, **source)
    factor = d**-0.5 if scale is None else float(np.reshape(scale, ()))
    eps = {"l2": 1e-12, "rms": 1e-6}[key_norm] if norm_eps is None else norm_eps
    kept = None if dropout_mask is None else np.broadcast_to(dropout_mask, (*whole, t, t)) / (1 - dropout_rate)
    seen = np.ones((*whole, t, t), dtype=bool)
    if pattern is not None:
        fitted = pattern.fit(t, t, batch=lead, heads=h)
        n = np.arange(t)
        for b, batch in enumerate(np.ndindex(lead)):
            for head in range(h):
                where = {"q": t, "k": t, "b": np.asarray(b), "h": np.asarray(head)}
                seen[(*batch, head)] = fitted.visible(n[:, None], n[None, :], **where)

    output, lse = np.zeros((*whole, t, v.shape[-1])), np.full((*whole, t), -np.inf)
    for at in np.ndindex(whole):
        q, values = qk[at], v[at]
        with np.errstate(all="ignore"):
            if key_norm == "l2":
                keys = np.stack([x / max(math.sqrt(np.sum(x * x)), eps) for x in q]) if t else q
            else:
                keys = q / np.sqrt(np.mean(q * q, axis=-1, keepdims=True) + eps)
        if full:
            meets = [Counter(dict.fromkeys(range(t), 1)) for _ in range(t)]
            counted = meets
        else:
            rounds = [list(map(int, row)) for row in found[at]]
            meets, counted = meetings(rounds, chunk, before, after, wrap == "global", within_bucket)
        for i in range(t):
            logits, copies = {}, {}
            for j, times in meets[i].items():
                hidden = (causal and j > i) or not keep[at[:-1]][j] or not seen[at][i, j]
                if hidden or (j == i and self_attention != "always"):
                    continue
                logits[j] = factor * float(np.dot(q[i], keys[j]))
                copies[j] = float(times)
                if full or duplicates == "union":
                    copies[j] = 1.0
                elif duplicates == "trax1":
                    copies[j] = times / (counted[i][j] + 1e-9)
            if not logits and self_attention == "last_resort":
                logits, copies = {i: factor * float(np.dot(q[i], keys[i]))}, {i: 1.0}
            if not logits:
                continue
            top = max(logits.values())
            shares = {j: copies[j] * math.exp(x - top) for j, x in logits.items()}
            total = math.fsum(shares.values())
            lse[at][i] = top + math.log(total)
            for j, share in shares.items():
                weight = share / total
                output[at][i] += (weight if kept is None else weight * kept[at][i, j]) * values[j]
    return Result(output=output, lse=lse, buckets=None if full else found)


def meetings(
    rounds: list[list[int]], chunk: int, before: int, after: int, ring: bool, within_bucket: bool
) -> tuple[list[Counter], list[Counter]]:
    """For every position, how often its windows hold each key, and how often trax counts the pair.

    ``rounds`` are the bucket numbers of one head, one list a round.
    """
    t = len(rounds[0])
    chunks: list[list[tuple[int, int]]] = []  # (round, position) of every chunk, round after round
    place: list[dict[int, int]] = []  # the chunk of every position, by round
    first: list[int] = []
    for s, numbers in enumerate(rounds):
        order = [n for _, n in sorted(zip(numbers, range(t), strict=True))]
        first.append(len(chunks))
        place.append({n: len(chunks) + m // chunk for m, n in enumerate(order)})
        chunks += [[(s, n) for n in order[m : m + chunk]] for m in range(0, t, chunk)]
    ends = [*first[1:], len(chunks)]
    meets: list[Counter] = [Counter() for _ in range(t)]
    counted: list[Counter] = [Counter() for _ in range(t)]
    for s, numbers in enumerate(rounds):
        for i in range(t):
            own = place[s][i]
            for n in range(own - before, own + after + 1):
                if not ring and not first[s] <= n < ends[s]:
                    continue
                for r, j in chunks[n % len(chunks)]:
                    if not within_bucket or (r == s and numbers[i] == numbers[j]):
                        meets[i][j] += 1
                for j in range(t):
                    same = place[s][j] == (n % len(chunks) if ring else n)
                    if same and (not within_bucket or numbers[i] == numbers[j]):
                        counted[i][j] += 1
    return meets, counted


def plain_buckets(x: np.ndarray, rotation: np.ndarray, factors: tuple[int, ...]) -> list[int]:
    """Buckets of the rows of x (t,d) under one round's rotation (d,n)."""
    found = []
    for row in x @ rotation:
        bucket, base, start = 0, 1, 0
        for factor in factors:
            part = row[start : start + factor // 2]
            bucket += base * int(np.argmax(np.concatenate([part, -part])))
            base, start = base * factor, start + factor // 2
        found.append(bucket)
    return found


def _factors(n_buckets: Any, rotations: Any, t: int, chunk: int, *, given: bool = False) -> tuple[int, ...] | None:
    if given:
        return None
    if n_buckets is None:
        return (2 * max(1, t // chunk) if rotations is None else 2 * rotations.shape[-1],)
    return tuple(n_buckets) if isinstance(n_buckets, (tuple, list)) else (int(n_buckets),)


def all_buckets(
    qk: np.ndarray,
    lead: tuple[int, ...],
    *,
    rotations: Any,
    buckets: Any,
    rng: Any,
    hashes: Any,
    n_buckets: Any,
    chunk: int,
    keep: np.ndarray | None,
) -> np.ndarray:
    """Buckets (..., h, s, t) from whichever source was given; tokens that ``keep`` (..., t) hides fall behind all others."""
    h, t, d = qk.shape[-3:]
    factors = _factors(n_buckets, rotations, t, chunk, given=buckets is not None and n_buckets is None)
    if buckets is not None:
        found = np.broadcast_to(np.asarray(buckets, dtype=np.int64), (*lead, h, *np.shape(buckets)[-2:]))
    else:
        if rotations is None:
            rotations = rng.standard_normal((d, hashes or 1, sum(factors or ()) // 2))
        rotations = np.broadcast_to(rotations, (*lead, h, *rotations.shape[-3:]))
        found = np.zeros((*lead, h, rotations.shape[-2], t), dtype=np.int64)
        for at in np.ndindex(found.shape[:-1]):
            found[at] = plain_buckets(qk[at[:-1]], rotations[at[:-1]][:, at[-1]], factors or ())
    if keep is None:
        return found
    shown = np.broadcast_to(keep[..., None, None, :], found.shape)
    last = int(np.max(found[shown], initial=0)) + 1 if factors is None else math.prod(factors)
    return np.where(shown, found, last)
