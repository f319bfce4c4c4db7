r"""Forgetting attention: causal softmax attention whose logits lose, for every token between key and query, what a gate forgets.

    logits[h,i,j] = scale * sum_d q[h,i,d] * k[g(h),j,d] + sum_{l = j+1 ... i} log_forget[h,l]      j <= i
    output[h,i,e] = sum_j exp(logits[h,i,j] - lse[h,i]) * v[g(h),j,e]

======  =============================================  ======================
letter  axis                                           where
======  =============================================  ======================
...     any batch axes                                 all
h       query head                                     q, log_forget, output, lse
g       key head, h a multiple of g                    k, v
q, k    query position, key position                   q, output; k, v, log_forget
d, e    query/key channel, value channel               q, k; v, output
======  =============================================  ======================

Conventions: always causal; query i stands at position align + i of the keys, by default at the end of them (``"lower_right"``).
The gates are natural logarithms, at most 0, one for each query head though k is grouped; what they take is added where a bias is
(after the soft cap).  -inf forgets everything before the token.  Sinks are not decayed.  log_forget[0] changes nothing.

The sums are differences of one running sum, kept in float64 and taken relative to each block: in float32 the sum over a long
sequence is too coarse for the differences of neighbours.  Tokens that forget everything are counted, never subtracted.

Source: Lin et al. 2025, arXiv:2503.02130, section 3.
"""

from typing import Any

import numpy as np

from refattn import cost as costs
from refattn.arrays import broadcast_leading, flatten_leading, is_complex, namespace, real, require_axes
from refattn.core import options
from refattn.core.problem import prepare
from refattn.core.selections import take_pairs
from refattn.core.terms import Term, add_pairs
from refattn.mechanism import mechanism
from refattn.records import Counts, Elements, Pass, Result

__all__ = ["forgetting_attention"]

SHARED = tuple(n for n in options.SHARED if n not in ("causal", "align"))
INFINITY = float("inf")


class Decay(Term):
    """logits + of_query - of_key, (b|1, g, r, q, 1) and (b|1, g, r, 1, k): the running sums of the gates at both ends."""

    names = ("decay_of_query", "decay_of_key")

    def __init__(self, of_query: Any, of_key: Any, passed: tuple[Any, Any] | None) -> None:
        self.ends = dict(zip(self.names, (of_query, of_key), strict=True))
        self.passed = passed  # how many tokens up to either end forget everything; None where none does

    def start(self, view: Any) -> dict[str, Any]:
        return {n: namespace(x).zeros_like(view.part(x)) for n, x in self.ends.items()}

    def whole(self) -> dict[str, Any]:
        return {n: namespace(x).zeros_like(x) for n, x in self.ends.items()}

    def place(self, name: str, total: Any, part: Any, view: Any) -> Any:
        return view.backend.accumulate(total, (*view.slices(total), ...), part)

    def apply(self, logits: Any, view: Any) -> tuple[Any, Any]:
        xp = namespace(logits)
        of_query, of_key = (take_pairs(view.part(x), view.queries, view.keys) for x in self.ends.values())
        base = of_key[..., -1:]
        of_query, of_key = (xp.astype(x - base, logits.dtype) for x in (of_query, of_key))
        if self.passed is not None:
            at_query, at_key = (take_pairs(view.part(x), view.queries, view.keys) for x in self.passed)
            view.hide(xp.broadcast_to(at_query != at_key, logits.shape))
        return logits + (of_query - of_key), None

    def pull(self, d_logits: Any, kept: Any, view: Any, sums: dict[str, Any]) -> Any:
        for n, sign in zip(self.names, (1, -1), strict=True):
            sums[n] = add_pairs(sums[n], sign * d_logits, view)
        return d_logits


@options.takes(*SHARED)
def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    log_forget: Any,
    align: Any = "lower_right",
    backend: Any,
    algorithm: str,
    **shared: Any,
) -> tuple[Result, Any]:
    """softmax(scale q k^T + sums of log_forget between key and query) v, causal.

    Parameters
    ----------
    q : array (..., h, q, d)
    k : array (..., g, k, d)
    v : array (..., g, k, e)
    log_forget : array (..., h, k)
        Natural logarithms of the gates: at most 0, which is not checked; at -inf the gradient is 0.
    align : {"upper_left", "lower_right"}, int or ints per batch
        Where query 0 stands on the key axis: 0, k - q (of the lengths, where these are given), or a number.
    {shared}

    Returns
    -------
    output : array (..., h, q, e), in the dtype of the inputs
    lse : array (..., h, q), in the compute dtype (float32 for half inputs)

    Raises
    ------
    ValueError
        Shapes that disagree, heads that do not divide.

    Examples
    --------
    Equal logits, and half forgotten at each token: weights 1/4, 1/2 and 1 of the sum.

    >>> import numpy as np
    >>> x, half = np.zeros((1, 3, 1)), np.full((1, 3), np.log(0.5))
    >>> forgetting_attention(x, x, np.array([[[7.0], [0.0], [0.0]]]), log_forget=half)[0, :, 0].round(6).tolist()
    [7.0, 2.333333, 1.0]
    """
    sizes = options.read_sizes(q, k, v)
    lead = broadcast_leading(q=(q, 3), k=(k, 3), v=(v, 3), log_forget=(log_forget, 2))
    if lead != sizes.lead:  # only the gates have this batch
        q = namespace(q).broadcast_to(q, (*lead, *q.shape[-3:]))
        sizes = options.read_sizes(q, k, v)
    require_axes({"h": sizes.h, "k": sizes.k}, log_forget=(log_forget, "... h k"))
    offset = options.offsets(sizes.lead, sizes.q, sizes.k, {**options.SHARED, **shared, "causal": True, "align": align})
    gates = _Gates(flatten_leading(log_forget, 2, sizes.lead), offset, sizes)
    prepared = prepare(
        q, k, v, backend=backend, algorithm=algorithm, causal=True, align=align, added_terms=gates.terms, **shared
    )
    result, saved = prepared.run()
    return result, (prepared, saved, gates, sizes.lead)


def backward(saved: Any, *, output: Any, lse: Any) -> dict[str, Any]:
    """dlog_forget[l] = sum over the pairs j < l <= i of dlogits: what queries from l on take, less what keys from l on give."""
    prepared, forward_state, gates, lead = saved
    gradients = prepared.gradients(forward_state, output, lse)
    d_gates = gates.pull(gradients.pop("decay_of_query"), gradients.pop("decay_of_key"))
    xp = namespace(d_gates)
    lead = lead if d_gates.shape[0] != 1 else (1,) * len(lead)
    return {**gradients, "log_forget": xp.reshape(d_gates, (*lead, *d_gates.shape[1:]))}


class _Gates:
    """Running sums of gates (b|1, h, k), read where the queries stand and where the keys stand."""

    def __init__(self, log_forget: Any, offset: np.ndarray, sizes: Any) -> None:
        self.xp = xp = namespace(log_forget)
        self.dtype, self.offset, self.queries, self.keys = (
            log_forget.dtype,
            np.asarray(offset, dtype=np.int64),
            sizes.q,
            sizes.k,
        )
        self.forgets = real(log_forget) == -INFINITY
        finite = xp.where(self.forgets, xp.zeros_like(log_forget), log_forget)
        wide = log_forget.dtype if is_complex(log_forget.dtype) else xp.float64
        self.sums = xp.cumulative_sum(xp.astype(finite, wide), axis=-1)
        self.passed = None
        if bool(xp.any(self.forgets)):
            self.passed = xp.cumulative_sum(xp.astype(self.forgets, xp.int64), axis=-1)

    def terms(self, heads: Any, lead: Any) -> list[Decay]:
        """The term of the logits."""
        self.heads = heads
        return [Decay(*self._ends(self.sums), None if self.passed is None else self._ends(self.passed))]

    def _ends(self, x: Any) -> tuple[Any, Any]:
        """x at the queries and at the keys, (b|1, g, r, q, 1) and (b|1, g, r, 1, k); queries behind the keys count all of them."""
        at = np.clip(self.offset[:, None] + np.arange(self.queries), 0, max(0, self.keys - 1))
        of_query = self._taken(x, at) if self.keys else self.xp.zeros((*x.shape[:-1], self.queries), dtype=x.dtype)
        return self.heads.split(of_query)[..., :, None], self.heads.split(x)[..., None, :]

    def _taken(self, x: Any, at: np.ndarray) -> Any:
        """x (b|1, h, n) at the positions (b|1, m)."""
        b = max(x.shape[0], at.shape[0]) if x.shape[0] and at.shape[0] else 0
        index = np.broadcast_to(at[:b, None, :], (b, x.shape[1], at.shape[1]))
        return self.xp.take_along_axis(self.xp.broadcast_to(x, (b, *x.shape[1:])), self.xp.asarray(index), axis=-1)

    def pull(self, d_query: Any, d_key: Any) -> Any:
        """Cotangent (b|1, h, k) of the gates from those of the two ends: gate l lies behind the queries from l on."""
        xp = self.xp
        d_query, d_key = self.heads.join(d_query, 1)[..., 0], self.heads.join(d_key, 1)[..., 0, :]
        if not self.queries or not self.keys:
            return xp.astype(xp.zeros_like(d_key), self.dtype)
        from_query = xp.concat([_from_there_on(d_query), xp.zeros_like(d_query[..., :1])], axis=-1)
        first = np.clip(np.arange(self.keys) - self.offset[:, None], 0, self.queries)
        taken = self._taken(from_query, first)
        if taken.shape[0] != d_key.shape[0]:  # one row of gates, and queries that stand elsewhere in each batch entry
            taken = xp.sum(taken, axis=0, keepdims=True)
        total = taken + _from_there_on(d_key)
        return xp.astype(xp.where(self.forgets, xp.zeros_like(total), total), self.dtype)


def _from_there_on(x: Any) -> Any:
    """The sum of x from each position to the end."""
    xp = namespace(x)
    return xp.flip(xp.cumulative_sum(xp.flip(x, axis=-1), axis=-1), axis=-1)


def cost(
    *, b: int = 1, h: int = 1, g: int | None = None, q: int, k: int, d: int, e: int | None = None, align: Any = "lower_right",
    **settings: Any,
) -> Counts:  # fmt: skip
    """Counts over the pairs that causality and the other options leave; a pair's decay is two steps more."""
    counts = costs.softmax_counts(b=b, h=h, g=g, q=q, k=k, d=d, e=e, causal=True, align=align, **settings)
    gates, sums = Elements(storage=b * h * k), Elements(compute=2 * b * h * (q + k))
    pairs = counts.forward.multiplies // max(1, d + (d if e is None else e))
    forward = Pass(elementwise=2 * pairs + b * h * k, read=gates)
    backward = Pass(elementwise=2 * pairs + 2 * b * h * (q + k), read=gates, written=gates, peak=sums)
    return counts + Counts(forward=forward, backward=backward, saved=gates + sums)


def example(
    rng: "np.random.Generator",
    *,
    b: int = 2,
    h: int = 4,
    g: int | None = None,
    q: int = 5,
    k: int = 7,
    d: int = 4,
    e: int = 3,
    **settings: Any,
) -> dict[str, Any]:
    """Normal q (b,h,q,d), k (b,g,k,d), v (b,g,k,e) and the log of gates between 0.2 and 1; g defaults to h // 2 where that divides."""
    g = g or (h // 2 if h % 2 == 0 and h else h)
    normal = rng.standard_normal
    arrays = {"q": normal((b, h, q, d)), "k": normal((b, g, k, d)), "v": normal((b, g, k, e))}
    return {**arrays, "log_forget": np.log(0.2 + 0.8 * rng.random((b, h, k))), **settings}


_PROBES = (
    {
        "says": "gates near one: the sum reaches far",
        "q": 40,
        "k": 40,
        "log_forget": -0.01 - np.arange(40)[None, None] / 4000,
    },
    {"says": "one query behind many keys", "q": 1, "k": 33},
    {"says": "fewer queries than keys, grouped heads", "h": 4, "g": 2, "q": 7, "k": 29},
    {"says": "more queries than keys", "q": 9, "k": 5},
)

forgetting_attention = mechanism(
    forward,
    backward,
    cost,
    example,
    name="forgetting_attention",
    differentiable=("q", "k", "v", "log_forget", *options.DIFFERENTIABLE),
    outputs=("output", "lse"),
    probes=_PROBES,
)
