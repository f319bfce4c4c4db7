"""Counts of one call of a recurrence, walked in chunks."""

import math
from typing import Any

from refattn.arrays import require_integer, require_one_of
from refattn.core.recurrence import FORMS, chunk_rows
from refattn.cost.softmax import require_sizes
from refattn.records import Counts, Elements, Pass

__all__ = ["recurrence_counts"]


def recurrence_counts(
    *,
    b: int,
    h: int,
    g: int | None,
    t: int,
    d: int,
    e: int | None,
    channel_decay: Any,
    form: str,
    chunk: int,
    erases: int = 0,
    keys: int = 1,
    gates: int = 1,
) -> Counts:
    """Counts of q (b,h,t,d), k (b,g,t,d), v (b,g,t,e), in chunks of c tokens; s = max(h, g) query heads at g states.

    Forward.  Pairs of a chunk: s d for each of ``keys`` arrays that queries meet and s e for their values; with ``erases`` = 1 (the
    delta rule) g d and g e more, a unit-lower solve of e columns, with 2 (removal and replacement) a pair of arrays besides.
    Through the state: s d e for the query, g d e for every array written and every one that erases.  Backward: that again, and
    two products for each of its products.  Where channels decay each in its own way the products of pairs over d are
    element-wise, c^2 d exponentials a chunk.
    """
    e = d if e is None else e
    g = h if g is None else g
    require_sizes(b=b, h=h, g=g, t=t, d=d, e=e)
    require_one_of("form", form, FORMS)
    by_channel = channel_decay is not None and channel_decay is not False
    rows = chunk_rows(form, require_integer("chunk", chunk, minimum=1), t, by_channel)
    whole, rest = divmod(t, rows)  # chunks of ``rows`` tokens, and one of the others
    s = max(h, g)
    visible = whole * (rows * (rows + 1) // 2) + rest * (rest + 1) // 2
    strict = visible - t
    computed = whole * rows * rows + rest * rest
    products = s * keys + g * erases  # pair products over d
    values = s * keys + g * (erases == 2)  # of pairs with values
    solved = g * strict * e if erases else 0
    through = d * e * (s + g * keys + g * (erases > 0)) * t
    channels = 0 if by_channel else d
    more = g * (erases + (erases == 2)) if erases else 0  # pairs whose cotangent is a product over e

    def forward(pairs: int) -> int:
        return pairs * (products * channels + values * e) + solved + through

    def backward(pairs: int) -> int:
        pulled = pairs * (2 * products * channels + (2 * s * keys + more) * e) + solved + 2 * through
        return forward(pairs) + pulled + (pairs * g * e if erases == 2 else 0) - (pairs * g * e if erases == 2 else 0)

    inputs = Elements(storage=b * t * (h * d + g * (keys + (erases == 2)) * d + g * e + g * gates))
    written = Elements(storage=b * s * t * e, compute=b * g * d * e)
    chunks = whole + bool(rest)
    every = max(1, math.isqrt(chunks))
    kept = Elements(compute=b * g * d * e * (-(-chunks // every) if chunks else 0))
    own = b * (s * keys + g * erases) * min(rows, t) ** 2 * (d if by_channel else 1)
    largest = Elements(compute=own + b * min(rows, t) * (s + 2 * g) * (d + e))
    group = Elements(compute=every * (b * g * d * e + own))
    element = b * (s * keys + g * erases) * (computed * (4 * d if by_channel else 3) + 4 * t * d)
    return Counts(
        forward=Pass(
            multiplies=b * forward(visible),
            computed=b * forward(computed),
            elementwise=element,
            read=inputs,
            written=written,
            peak=written + kept + largest,
        ),
        backward=Pass(
            multiplies=b * backward(visible),
            computed=b * backward(computed),
            elementwise=4 * element,
            read=inputs + Elements(storage=b * s * t * e),
            written=inputs,
            peak=inputs + kept + group + 2 * largest,
        ),
        saved=inputs + kept,
    )
