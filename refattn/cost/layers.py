"""Whole layers, projections included, and the arrays that they leave for their backward."""

import dataclasses
from typing import Any

from refattn.arrays import itemsize, require_flag, require_one_of
from refattn.cost.softmax import DIRECTIONS, require_sizes
from refattn.records import Cost

__all__ = ["activations", "transformer"]


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Sizes of a layer with everything that defaults filled in."""

    b: int
    m: int
    h: int
    x: int
    g: int
    y: int
    q: int
    k: int
    span: int
    d: int
    e: int
    f: int
    talking: bool


def _layer(
    *,
    b: int = 1,
    m: int,
    h: int,
    q: int,
    k: int | None = None,
    span: int | None = None,
    g: int | None = None,
    x: int | None = None,
    y: int | None = None,
    d: int | None = None,
    e: int | None = None,
    f: int = 0,
) -> _Layer:
    given = {"b": b, "m": m, "h": h, "q": q, "k": k, "span": span, "g": g, "x": x, "y": y, "d": d, "e": e, "f": f}
    require_sizes(**{n: value for n, value in given.items() if value is not None or n in ("b", "m", "h", "q", "f")})
    talking = x is not None or y is not None
    if talking and g is not None:
        raise ValueError(f"g is {g}: Talking-Heads (x or y given) has no shared key heads")
    x, y = h if x is None else x, h if y is None else y
    k = q if k is None else k
    if d is None:
        if x == 0 or m % x:
            raise ValueError(f"d is missing: m = {m} is not a multiple of the x = {x} heads")
        d = m // x
    e = d if e is None else e
    return _Layer(b, m, h, x, h if g is None else g, y, q, k, k if span is None else span, d, e, f, talking)


def transformer(
    *,
    layers: int = 1,
    biases: bool = False,
    norms: bool = False,
    embeddings: int = 0,
    dtype: Any = "float32",
    direction: str = "forward",
    recompute: bool = False,
    **sizes: Any,
) -> Cost:
    """Counts of whole layers: projections, attention of all heads, output projection, feed-forward.

    Parameters
    ----------
    layers : int
        Equal layers, one after the other.
    m, h, q : int
        Model channels, heads, tokens.
    b, k, span, g, d, e, f : int, optional
        Batch (1); tokens that are projected to keys and values (k = q) and keys that a query meets (span = k; for tokens that
        meet ``span`` cached keys give span alone); key heads (g = h); channels of a head (d = m / h, e = d); feed-forward channels
        (f = 0: none).
    x, y : int, optional
        Key heads and value heads of Talking-Heads attention; d then defaults to m / x.  Either makes it one: both projections
        over the heads are counted, h (x + y) a pair.
    biases, norms : bool
        Parameters of the biases of all projections, and of two layer norms a layer.
    embeddings : int
        Rows of tables of m channels: vocabulary, positions, types.
    dtype, direction, recompute
        As for :func:`attention`; ``recompute`` keeps only the tokens that enter each layer.

    Returns
    -------
    Cost
        ``multiplies`` forward, for every layer: b m (h d q + g (d + e) k + h e q) of the projections, b h (d + e) q span of the
        attention, 2 b m f q of the feed-forward; backward twice the products with weights, and 3 d + 2 e for a pair.
        ``saved_bytes``: all of :func:`activations`.  ``parameters``: weights, biases, norms, embeddings.

    Examples
    --------
    Vaswani et al.'s attention costs the same for any number of heads:

    >>> [transformer(m=768, h=h, q=512).multiplies for h in (6, 12, 48)]
    [1610612736, 1610612736, 1610612736]
    """
    n = _layer(**sizes)
    require_sizes(layers=layers, embeddings=embeddings)
    require_one_of("direction", direction, DIRECTIONS)
    for name, flag in (("biases", biases), ("norms", norms), ("recompute", recompute)):
        require_flag(name, flag)
    key_heads, value_heads, heads_back = (n.x, n.y, n.y) if n.talking else (n.g, n.g, n.h)
    products = n.x if n.talking else n.h  # heads that multiply queries and keys
    weights = n.m * (products * n.d + key_heads * n.d + value_heads * n.e + heads_back * n.e)
    mixing = n.h * (n.x + n.y) if n.talking else 0
    per_layer = weights + 2 * n.m * n.f + mixing
    if biases:
        per_layer += products * n.d + key_heads * n.d + value_heads * n.e + n.m + (n.f + n.m) * bool(n.f)
    if norms:
        per_layer += 4 * n.m
    parameters = layers * per_layer + embeddings * n.m

    by_query = n.m * (products * n.d + heads_back * n.e) + 2 * n.m * n.f
    linear = n.b * (n.q * by_query + n.k * n.m * (key_heads * n.d + value_heads * n.e))
    pairs = n.b * n.q * n.span
    multiplies = {
        "forward": linear + pairs * (products * n.d + heads_back * n.e + mixing),
        "backward": 2 * linear + pairs * (3 * products * n.d + 2 * heads_back * n.e + 3 * mixing),
    }
    elementwise = pairs * n.h * 4 + n.b * n.q * (n.f + 2 * n.m)  # softmax; activation and residuals
    size = itemsize(dtype)
    kept = sum(activations(layers=layers, dtype=dtype, **sizes).values())
    one_layer = kept // max(1, layers)
    tokens = size * layers * n.b * n.q * n.m
    saved = tokens if recompute else kept
    forward = Cost(
        multiplies=layers * multiplies["forward"],
        computed_multiplies=layers * multiplies["forward"],
        elementwise=layers * elementwise,
        bytes_read=size * parameters + kept,
        bytes_written=kept,
        saved_bytes=saved,
        peak_bytes=saved + (one_layer if recompute else 0),
        parameters=parameters,
    )
    backward = Cost(
        multiplies=layers * multiplies["backward"],
        computed_multiplies=layers * multiplies["backward"],
        elementwise=layers * elementwise,
        bytes_read=size * parameters + kept,
        bytes_written=size * parameters + kept,
        peak_bytes=saved + one_layer,
    )
    if recompute:
        backward = dataclasses.replace(backward + forward, saved_bytes=0, parameters=0)
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def activations(*, layers: int = 1, dtype: Any = "float32", **sizes: Any) -> dict[str, int]:
    """Bytes of the arrays that whole layers leave for their backward, by name; sizes as for :func:`transformer`.

    ``tokens`` (b,q,m) enter a layer, ``q``, ``k``, ``v`` are their projections, ``weights`` the (b,h,q,span) matrices of the softmax
    (one, as logits are overwritten), ``attended`` the heads' results, ``hidden`` the feed-forward's (b,q,f).

    Examples
    --------
    BERT base at 512 tokens: 12 MiB of attention weights a layer, eight times the keys.

    >>> found = activations(m=768, h=12, q=512)
    >>> found["weights"] // 2**20, found["weights"] // found["k"]
    (12, 8)
    """
    n = _layer(**sizes)
    require_sizes(layers=layers)
    key_heads, value_heads, heads_back = (n.x, n.y, n.y) if n.talking else (n.g, n.g, n.h)
    entries = {
        "tokens": n.q * n.m,
        "q": n.q * (n.x if n.talking else n.h) * n.d,
        "k": n.k * key_heads * n.d,
        "v": n.k * value_heads * n.e,
        "weights": n.h * n.q * n.span,
        "attended": n.q * heads_back * n.e,
        "hidden": n.q * n.f,
    }
    return {name: layers * itemsize(dtype) * n.b * count for name, count in entries.items()}
