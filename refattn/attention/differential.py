r"""Differential attention: the difference of two softmax maps over the same values, the second one times lambda.

    logits[s,h,q,k] = scale * sum_d q[(h,s),q,d] * k[(g(h),s),k,d]      s = 1, 2: the two heads of a pair
    output[h,q,e] = sum_k (P[1,h,q,k] - lam[h,q] * P[2,h,q,k]) * v[g(h),k,e]       P = exp(logits - lses)

======  =============================================  ======================
letter  axis                                           where
======  =============================================  ======================
...     any batch axes                                 all
h       pair of query heads, 2 h query heads           q (2 h), lam, output, lses
g       key group, h a multiple of g                   k (2 g, or g), v
q, k    query position, key position                   q, output; k, v
d, e    query/key channel, value channel               q, k; v, output
======  =============================================  ======================

Conventions: the heads of a pair are neighbours (2 h, 2 h + 1), or stand in the two halves (``pairs="halves"``), of q and of a k
with 2 g heads alike; a k with g heads is read by both maps.  Pair h reads group h // (h / g) of k and v.  Options per head
(mask, bias, ALiBi, dropout mask, score_mod) count the 2 h query heads; a pattern of its own for each head is not taken.

Source: Ye et al. 2024, arXiv:2410.05258, section 2.1 (pairs of keys, one lambda); the second version reads one key and has a lambda
for each token and head.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from refattn import cost as costs
from refattn.arrays import broadcast_leading, is_array, namespace, real, require_array, require_one_of
from refattn.core import options
from refattn.core.problem import prepare
from refattn.mechanism import mechanism
from refattn.records import Counts, Elements, Pass, Result

__all__ = ["differential_attention"]

SHARED = tuple(n for n in options.SHARED if n not in ("sinks", "lse_includes_sinks", "keep_weights"))
DIFFERENTIABLE = tuple(n for n in options.DIFFERENTIABLE if n != "sinks")
PER_PAIR = ("mask", "bias", "dropout_mask")
LISTS = ("indices", "block_indices")
PAIRS = ("adjacent", "halves")
INFINITY = float("inf")


@options.takes(*SHARED)
def forward(
    q: Any, k: Any, v: Any, *, lam: Any, pairs: str = "adjacent", backend: Any, algorithm: str, **shared: Any
) -> tuple[Result, Any]:
    """(softmax(scale q_1 k_1^T) - lam softmax(scale q_2 k_2^T)) v.

    Parameters
    ----------
    q : array (..., 2 h, q, d)
    k : array (..., 2 g, k, d), or (..., g, k, d) where both maps read one key
    v : array (..., g, k, e)
    lam : array, 0-d or broadcasting to (..., h, q)
    pairs : {"adjacent", "halves"}
        The heads of pair n are 2 n and 2 n + 1, or n and n + h.
    {shared}

    Returns
    -------
    output : array (..., h, q, e), in the dtype of the inputs
    lses : array (2, ..., h, q), in the compute dtype (float32 for half inputs)

    Raises
    ------
    ValueError
        Shapes that disagree, an odd number of query heads.

    Examples
    --------
    Two equal maps leave 1 - lam of one:

    >>> import numpy as np
    >>> x, v = np.zeros((2, 1, 1)), np.full((1, 1, 1), 4.0)
    >>> float(differential_attention(x, x, v, lam=np.array(0.25))[0, 0, 0])
    3.0
    """
    require_one_of("pairs", pairs, PAIRS)
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_array(name, x, axes=3)
    twice, keys, g = (x.shape[-3] for x in (q, k, v))
    if twice % 2:
        raise ValueError(f"q has shape {tuple(q.shape)}: expected an even number of heads, two for each pair")
    if keys not in (g, 2 * g):
        raise ValueError(f"k has shape {tuple(k.shape)}: expected {g} or {2 * g} heads, those of v or two for each")
    if is_array(lam) and lam.ndim > 2:  # only lambda may have this batch
        lead = broadcast_leading(q=(q, 3), k=(k, 3), v=(v, 3), lam=(lam, 2))
        q = namespace(q).broadcast_to(q, (*lead, *q.shape[-3:]))
    maps = [_Map(s, pairs, twice, keys != g and g > 0, g) for s in range(2)]
    sizes = options.read_sizes(maps[0].heads(q), maps[0].keys(k), v)
    _check(shared, twice, sizes)
    xp = namespace(q, k, v, lam)
    lam = xp.reshape(lam, tuple(lam.shape)) if is_array(lam) else xp.asarray(lam, dtype=q.dtype)
    wanted = (*sizes.lead, sizes.h, sizes.q)
    if lam.ndim > len(wanted) or any(m not in (1, n) for m, n in zip(lam.shape[::-1], wanted[::-1], strict=False)):
        raise ValueError(
            f"lam has shape {tuple(lam.shape)}: expected () or one that broadcasts to (..., h, q) = {wanted}"
        )
    parts, saved = [], []
    for own in maps:
        how = {"backend": backend, "algorithm": algorithm, **own.options(shared)}
        prepared = prepare(own.heads(q), own.keys(k), v, **how)
        result, state = prepared.run()
        parts.append(result)
        saved.append((own, prepared, state))
    factor = lam[..., None] if lam.ndim else lam
    output = parts[0].output - factor * parts[1].output
    lses = xp.stack([part.lse for part in parts])
    return Result(output=output, lses=lses), (saved, lam, parts[1], shared, q, k)


def backward(saved: Any, *, output: Any, lses: Any) -> dict[str, Any]:
    """Two backwards of softmax attention, with dO and -lam dO; dlam = -sum_e dO O_2; shared arrays get the sum of both."""
    maps, lam, second, shared, q, k = saved
    factor = lam[..., None] if lam.ndim else lam
    total: dict[str, Any] = {}
    for own, prepared, state in maps:
        s = own.number
        d_output = None if output is None else output if s == 0 else -factor * output
        found = prepared.gradients(state, d_output, None if lses is None else lses[s, ...])
        for name, part in own.placed(found, shared, q, k).items():
            total[name] = part if name not in total else total[name] + part
    xp = namespace(second.output)
    if output is None:
        return {**total, "lam": xp.zeros_like(lam)}
    along = output * second.output
    seen = real(second.lse)[..., None] > -INFINITY
    d_lam = -xp.sum(xp.where(seen, along, xp.zeros_like(along)), axis=-1)
    return {**total, "lam": d_lam if lam.ndim else xp.sum(d_lam)}


class _Map:
    """One of the two maps: which heads it reads of every array."""

    def __init__(self, number: int, pairs: str, twice: int, two_keys: bool, g: int) -> None:
        step = pairs == "adjacent"
        own = np.arange(twice // 2)
        self.number, self.twice = number, twice
        self.of_query = 2 * own + number if step else own + number * (twice // 2)
        group = np.arange(g)
        self.of_key = (2 * group + number if step else group + number * g) if two_keys else None

    def _taken(self, x: Any, index: np.ndarray, axis: int) -> Any:
        xp = namespace(x)
        return xp.take(x, xp.asarray(index), axis=axis)

    def heads(self, q: Any) -> Any:
        return self._taken(q, self.of_query, -3)

    def keys(self, k: Any) -> Any:
        return k if self.of_key is None else self._taken(k, self.of_key, -3)

    def _has_heads(self, name: str, x: Any) -> bool:
        """Whether an option has an entry for each query head."""
        if name == "alibi_slopes":
            return True
        return name in (*PER_PAIR, *LISTS) and is_array(x) and x.ndim > 2 and x.shape[-3] == self.twice

    def options(self, shared: dict[str, Any]) -> dict[str, Any]:
        """The shared options as this map's heads have them."""
        found = dict(shared)
        for name, x in shared.items():
            if x is None:
                continue
            if name == "score_mod":
                found[name] = _renumbered(x, self.of_query)
            elif self._has_heads(name, x):
                found[name] = self._taken(x, self.of_query, 0 if name == "alibi_slopes" else -3)
        return found

    def placed(self, gradients: dict[str, Any], shared: dict[str, Any], q: Any, k: Any) -> dict[str, Any]:
        """Gradients of this map's heads at the places of the whole arrays."""
        found = dict(gradients)
        found["q"] = self._put(found["q"], self.of_query, -3, self.twice)
        if self.of_key is not None:
            found["k"] = self._put(found["k"], self.of_key, -3, k.shape[-3])
        for name in ("bias", "alibi_slopes"):
            if shared.get(name) is not None and self._has_heads(name, shared[name]):
                found[name] = self._put(found[name], self.of_query, 0 if name == "alibi_slopes" else -3, self.twice)
        return found

    @staticmethod
    def _put(x: Any, index: np.ndarray, axis: int, size: int) -> Any:
        """Zeros of ``size`` with x at the places ``index`` along an axis."""
        xp = namespace(x)
        beside = xp.concat([x, xp.zeros_like(x)], axis=axis)  # every place of the other map reads a zero
        at = np.full(size, x.shape[axis] if x.shape[axis] else 0)
        at[index] = np.arange(index.size)
        return xp.take(beside, xp.asarray(at), axis=axis) if size else x


def _renumbered(function: Any, of_query: np.ndarray) -> Callable[..., Any]:
    """A score_mod that is told the numbers of the query heads among all 2 h."""

    def told(logits: Any, b: Any, h: Any, i: Any, j: Any, call: Callable[..., Any]) -> Any:
        xp = namespace(h)
        numbers = xp.take(xp.asarray(of_query), xp.reshape(h, (-1,)), axis=0)
        return call(logits, b, xp.reshape(numbers, h.shape), i, j)

    if not callable(function):
        return function

    def modified(logits: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return told(logits, b, h, i, j, function)

    derivative = getattr(function, "derivative", None)
    if derivative is not None:
        slope = lambda logits, b, h, i, j: told(logits, b, h, i, j, derivative)  # noqa: E731
        modified.derivative = slope  # type: ignore[attr-defined]
    return modified


def _check(shared: dict[str, Any], twice: int, sizes: Any) -> None:
    """Options with a head axis count the query heads, not the pairs."""
    for name in PER_PAIR:
        if shared.get(name) is not None:
            options.require_broadcast(name, shared[name], (*sizes.lead, twice, sizes.q, sizes.k))
    slopes = shared.get("alibi_slopes")
    if slopes is not None and (not is_array(slopes) or tuple(slopes.shape) != (twice,)):
        shape = tuple(getattr(slopes, "shape", ()))
        raise ValueError(f"alibi_slopes has shape {shape}: expected ({twice},), one per query head")
    for name in LISTS:
        x: Any = shared.get(name)
        if is_array(x) and x.ndim > 2 and x.shape[-3] not in (1, sizes.g, twice):
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected 1, {sizes.g} or {twice} heads")


def cost(
    *, b: int = 1, h: int = 1, g: int | None = None, q: int, k: int, d: int, e: int | None = None, two_keys: bool = True,
    **settings: Any,
) -> Counts:  # fmt: skip
    """Twice the counts of softmax attention with h pairs; ``two_keys``: k has 2 g heads."""
    g, e = h if g is None else g, d if e is None else e
    one = costs.softmax_counts(b=b, h=h, g=g, q=q, k=k, d=d, e=e, **settings)
    results = Elements(storage=b * h * q * e)
    combined = Pass(elementwise=2 * b * h * q * e)
    return one + one + Counts(forward=combined, backward=combined + combined, saved=results)


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 2,
    g: int | None = None,
    q: int = 5,
    k: int = 7,
    d: int = 4,
    e: int = 3,
    two_keys: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Normal q (b,2h,q,d), k (b,2g or g,k,d), v (b,g,k,e), and lam (b,h,q) between 0.2 and 0.8; g defaults to h."""
    g = h if g is None else g
    normal = rng.standard_normal
    arrays = {
        "q": normal((b, 2 * h, q, d)),
        "k": normal((b, 2 * g if two_keys else g, k, d)),
        "v": normal((b, g, k, e)),
    }
    return {**arrays, "lam": 0.2 + 0.6 * rng.random((b, h, q)), **settings}


_PROBES = (
    {"says": "one key for both maps, grouped", "two_keys": False, "h": 4, "g": 2, "q": 9, "k": 11},
    {"says": "pairs of keys, grouped", "h": 4, "g": 2, "q": 9, "k": 11},
    {"says": "heads in halves", "pairs": "halves", "h": 3, "g": 3, "q": 9, "k": 11},
    {"says": "one lambda", "lam": np.array(0.6), "q": 7, "k": 13},
)

differential_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="differential_attention",
    differentiable=("q", "k", "v", "lam", *DIFFERENTIABLE),
    outputs=("output", "lses"),
    probes=_PROBES,
)
