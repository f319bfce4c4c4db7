"""Counts of one call of softmax attention, for any pattern and any block list."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refattn.arrays import itemsize, require_flag, require_integer, require_one_of
from refattn.core import options
from refattn.core.blocks import KEYS, ROWS, SMALL, groups, listed_blocks
from refattn.core.listed import Lists
from refattn.records import AttentionSettings, Block, Cost, Counts, Elements, Pass, Sizes

__all__ = [
    "DIRECTIONS",
    "TERM_STEPS",
    "attention",
    "distinct_groups",
    "listed_pairs",
    "require_sizes",
    "rows_of_tiles",
    "softmax_counts",
    "softmax_settings",
    "tiled_pairs",
]

DIRECTIONS = ("forward", "backward", "both")
TERM_STEPS = {"bias": 1, "alibi_slopes": 3, "softcap": 3, "dropout_mask": 1}

WALKED = 1 << 28
"""Pairs of one head up to which blocks are listed one by one, as the computation would; beyond, they are counted by rows."""


RUNS = 1 << 16
"""Runs of rows at most that are looked at one by one."""


def require_sizes(**sizes: Any) -> None:
    """Check that every size is an integer of at least 0."""
    for name, value in sizes.items():
        require_integer(name, value, minimum=0)


def attention(*, dtype: Any = "float32", direction: str = "forward", recompute: bool = False, **sizes: Any) -> Cost:
    """Counts of one call of softmax attention on q (b,h,q,d), k (b,g,k,d), v (b,g,k,e).

    Parameters
    ----------
    b, h, g, q, k, d, e : int
        Sizes; g defaults to h, e to d.
    dtype : str or dtype
        Storage dtype of the arrays.
    direction : {"forward", "backward", "both"}
    recompute : bool
        Checkpointing: the backward runs the forward again and only q, k, v are saved.
    **sizes
        Also the shared options of the softmax mechanisms, as in the call, and what :func:`softmax_counts` takes.

    Returns
    -------
    Cost
        Forward products: d + e multiply-adds a pair; backward: 3 d + 2 e (logits again, dV, dP, dQ, dK).  Element-wise:
        4 a pair (maximum, shift, exp, sum; backward: shift, exp, difference, product), and what terms take.  Bytes: arrays
        read and written once.
    """
    require_one_of("direction", direction, DIRECTIONS)
    return softmax_counts(**sizes).cost(itemsize(dtype), direction, require_flag("recompute", recompute))


def softmax_settings(
    *, b: int, h: int, g: int, q: int, k: int, d: int = 0, e: int = 0, **shared: Any
) -> AttentionSettings:
    """What the shared options mean for these sizes: who sees whom, and how it is cut into blocks."""
    require_sizes(b=b, h=h, g=g, q=q, k=k, d=d, e=e)
    sizes = Sizes(lead=(b,), h=h, g=g, q=q, k=k, d=d, e=e)
    return options.read(sizes, xp=np, dtype=np.float64, **shared).settings


def softmax_counts(
    *,
    b: int,
    h: int,
    q: int,
    k: int,
    d: int,
    g: int | None = None,
    e: int | None = None,
    extra_pattern: Any = None,
    blocks: Callable[..., Any] | None = None,
    visible: int | None = None,
    computed: int | None = None,
    extra_keys: int = 0,
    **shared: Any,
) -> Counts:
    """The counts of :func:`attention` by kind of element.

    ``extra_pattern``, ``blocks``, ``extra_keys``: a mechanism's own pattern and blocks, and how many of the k keys are outside
    all patterns, as for ``core.options.read``.  ``visible``: the visible pairs, where the caller knows them better than the
    pattern.  ``computed``: pairs of one batch entry in the mechanism's blocks, used where these are not given or too many to
    list.
    """
    g, e = h if g is None else g, d if e is None else e
    require_sizes(b=b, h=h, g=g, q=q, k=k, d=d, e=e)
    if h % g if g else h:
        raise ValueError(f"h is {h} and g is {g}: expected as many query heads as key heads, or a multiple")
    own = {"extra_pattern": extra_pattern, "extra_keys": extra_keys}
    sizes = Sizes(lead=(b,), h=h, g=g, q=q, k=k, d=d, e=e)
    read = options.read(sizes, xp=np, dtype=np.float64, **own, blocks=blocks, **shared)
    settings = read.settings
    pattern = settings.visibility
    if blocks is not None and extra_pattern is not None:
        pattern = extra_pattern if pattern is None else pattern & extra_pattern
        pattern = pattern.fit(q, k, batch=(b,), heads=h)
    inner = k - extra_keys
    if visible is None and read.lists is not None:
        visible = listed_pairs(read.lists, settings.visibility)
    if visible is None:
        visible = b * h * q * inner if pattern is None else pattern.pairs(q, inner, batch=b, heads=h)
    visible += h * extra_keys * (b * q if settings.query_lengths is None else int(np.sum(settings.query_lengths)))
    if computed is not None and (blocks is None or q * k > WALKED):
        pairs, largest = b * computed, SMALL
    elif q * k <= WALKED or blocks is not None or read.lists is not None:
        pairs, largest = _listed(settings)
    else:
        rows, keys, units = rows_of_tiles(settings, extra_keys)
        pairs = units * int((rows * keys).sum())
        largest = h // max(1, g) * int((np.minimum(rows, ROWS) * np.minimum(keys, KEYS)).max(initial=0))

    steps = 4 + sum(n for name, n in TERM_STEPS.items() if shared.get(name) is not None)
    inputs = Elements(storage=b * (h * q * d + g * k * (d + e)))
    results = Elements(storage=b * h * q * e, compute=b * h * q)
    return Counts(
        forward=Pass(
            multiplies=visible * (d + e),
            computed=pairs * (d + e),
            elementwise=visible * steps + b * h * q * (d + 2 * e),
            read=inputs,
            written=results,
            peak=results + Elements(compute=2 * largest),
        ),
        backward=Pass(
            multiplies=visible * (3 * d + 2 * e),
            computed=pairs * (3 * d + 2 * e),
            elementwise=visible * steps + b * h * q * (2 * d + 2 * e),
            read=inputs + results + Elements(storage=b * h * q * e),
            written=inputs,
            peak=inputs + Elements(compute=4 * largest),
        ),
        saved=inputs + results,
    )


# ------------------------------------------------------------------------------------------------ pairs of blocks


def listed_pairs(lists: Lists, pattern: Any) -> int:
    """Pairs that the lists name and a pattern (or None) does not hide."""
    sizes = lists.sizes
    if pattern is None:
        return lists.pairs(sizes.lead)
    seen = (pattern & lists.pattern()).fit(sizes.q, sizes.k, batch=sizes.lead, heads=sizes.h)
    return int(seen.pairs(sizes.q, sizes.k, batch=sizes.b, heads=sizes.h))


def distinct_groups(settings: AttentionSettings) -> Iterator[tuple[int, Any]]:
    """The groups whose blocks differ, each with the number of groups like it."""
    pattern = settings.visibility
    own = settings.blocks is not None  # which may look at batch entries and heads
    by_batch = own or (pattern is not None and pattern.batch > 1)
    by_head = own or (pattern is not None and pattern.heads > 1)
    like: dict[Any, list[Any]] = {}
    for group in groups(settings):
        place = (group.b.start if by_batch else 0, group.g.start if by_head else 0)
        key = (*place, group.b.stop - group.b.start, group.heads.shape, group.q)
        like.setdefault(key, []).append(group)
    return ((len(alike), alike[0]) for alike in like.values())


def rows_of_tiles(settings: AttentionSettings, extra_keys: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """Queries (n,) and keys (b | 1, h | 1, n) of each run of tiles, and how many (batch, head) units are alike.

    Keys are those between the first and the last one that a row of the run sees (``Pattern.reach``), and the extra ones.
    """
    sizes = settings.sizes
    q, k = sizes.q, sizes.k - extra_keys
    step = settings.tile[0] if settings.tile else max(16, ROWS // max(1, sizes.r))
    starts, stops = _row_runs(q, step)
    if settings.visibility is None:
        keys = np.full((1, 1, len(starts)), k)
    else:
        keys = settings.visibility.reach(starts, stops, q=q, k=k, least=step)
    rows, keys = stops - starts, keys + extra_keys
    if q * sizes.k >= 1 << 60:  # products that need more than 64 bits
        rows, keys = rows.astype(object), keys.astype(object)
    return rows, keys, sizes.b * sizes.h // max(1, keys.shape[0] * keys.shape[1])


def tiled_pairs(pattern: Any, t: int) -> int:
    """Pairs of one head in the tiles of a pattern on t queries and t keys."""
    starts, stops = _row_runs(t, ROWS)
    keys = pattern.reach(starts, stops, q=t, k=t)
    return sum(((stops - starts).astype(object) * keys.astype(object)).reshape(-1).tolist())


def _row_runs(q: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the runs of rows; several tiles make one where there would be millions of them."""
    step *= max(1, -(-q // (step * RUNS)))
    starts = np.arange(0, q, step)
    return starts, np.minimum(starts + step, q)


def _listed(settings: AttentionSettings) -> tuple[int, int]:
    """Pairs in the blocks that would be computed, and pairs of the largest block of one group."""
    total = largest = 0
    for times, group in distinct_groups(settings):
        units = (group.b.stop - group.b.start) * group.heads.size
        for block in listed_blocks(settings, group, np):
            pairs = units * pairs_of(block)
            total, largest = total + times * pairs, max(largest, pairs)
    return total, largest


def pairs_of(block: Block) -> int:
    """Pairs of one (batch, head) in a block."""
    queries, keys = block.queries.pairs_axes, block.keys.pairs_axes
    return queries[-1] * keys[-1] * max(math.prod(queries[:-1]), math.prod(keys[:-1]))
