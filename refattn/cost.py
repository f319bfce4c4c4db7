"""Exact counts: multiply-adds, element-wise operations, bytes, saved activations, parameters.

``attention`` counts one call of softmax attention, for any pattern and any block list, by walking the blocks that would be
computed (on arrays without memory); ``transformer`` counts whole layers.  Sizes are integers by axis letter; nothing here
measures time.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn import attend, backends, options
from refattn.arrays import dtype_name, require_integer, require_one_of
from refattn.records import Cost

__all__ = ["attention", "itemsize", "require_sizes"]

DIRECTIONS = ("forward", "backward", "both")
TERM_STEPS = {"bias": 1, "alibi_slopes": 3, "softcap": 3, "dropout_mask": 1}


def itemsize(dtype: Any) -> int:
    """Bytes of one element of a dtype given by name or object."""
    name = dtype_name(dtype)
    return 2 if name == "bfloat16" else np.dtype(name).itemsize


def require_sizes(**sizes: Any) -> None:
    """Check that every size is an integer of at least 0."""
    for name, value in sizes.items():
        require_integer(name, value, minimum=0)


def attention(
    *,
    b: int,
    h: int,
    q: int,
    k: int,
    d: int,
    g: int | None = None,
    e: int | None = None,
    dtype: Any = "float32",
    direction: str = "forward",
    recompute: bool = False,
    extra_pattern: Any = None,
    blocks: Callable[..., Any] | None = None,
    extra_keys: int = 0,
    **shared: Any,
) -> Cost:
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
    extra_pattern, blocks, extra_keys
        A mechanism's own pattern and blocks, and how many of the k keys are outside all patterns, as for ``options.prepare``.
    **shared
        Shared options of the softmax mechanisms, as in the call.

    Returns
    -------
    Cost
        Forward products: d + e multiply-adds a pair; backward: 3 d + 2 e (logits again, dV, dP, dQ, dK).  Element-wise:
        4 a pair (maximum, shift, exp, sum; backward: shift, exp, difference, product), and what terms take.  Bytes: arrays
        read and written once.
    """
    g, e = h if g is None else g, d if e is None else e
    require_sizes(b=b, h=h, g=g, q=q, k=k, d=d, e=e)
    require_one_of("direction", direction, DIRECTIONS)
    size = itemsize(dtype)

    def empty(*shape: int) -> np.ndarray:
        return np.broadcast_to(np.zeros((), np.float64), shape)

    arrays = (empty(b, h, q, d), empty(b, g, k, d), empty(b, g, k, e))
    prepared = options.prepare(
        *arrays,
        backend=backends.resolve("numpy", np),
        extra_pattern=extra_pattern,
        blocks=blocks,
        extra_keys=extra_keys,
        **shared,
    )
    problem = prepared.problem
    pattern = problem.visibility
    if blocks is not None and extra_pattern is not None:
        pattern = extra_pattern if pattern is None else pattern & extra_pattern
        pattern = pattern.fit(q, k, batch=(b,), heads=h)
    inner = k - extra_keys
    visible = b * h * q * inner if pattern is None else pattern.pairs(q, inner, batch=b, heads=h)
    visible += h * extra_keys * (b * q if problem.rows is None else int(np.sum(problem.rows)))
    computed, largest = _computed(problem)

    steps = 4 + sum(n for name, n in TERM_STEPS.items() if shared.get(name) is not None)
    forward = {
        "multiplies": visible * (d + e),
        "computed_multiplies": computed * (d + e),
        "elementwise": visible * steps + b * h * q * (d + 2 * e),
        "bytes_read": size * b * (h * q * d + g * k * (d + e)),
        "bytes_written": size * b * h * q * e + max(4, size) * b * h * q,
    }
    backward = {
        "multiplies": visible * (3 * d + 2 * e),
        "computed_multiplies": computed * (3 * d + 2 * e),
        "elementwise": visible * steps + b * h * q * (2 * d + 2 * e),
        "bytes_read": forward["bytes_read"] + forward["bytes_written"] + size * b * h * q * e,
        "bytes_written": size * b * (h * q * d + g * k * (d + e)),
    }
    working = max(4, size)
    inputs = size * b * (h * q * d + g * k * (d + e))
    saved = inputs if recompute else inputs + forward["bytes_written"]
    peaks = {
        "forward": forward["bytes_written"] + 2 * largest * working,
        "backward": backward["bytes_written"] + 4 * largest * working,
    }
    if recompute:
        backward = {n: x + forward[n] for n, x in backward.items()}
        peaks["backward"] += forward["bytes_written"]
    parts = {
        "forward": Cost(**forward, saved_bytes=saved, peak_bytes=peaks["forward"]),
        "backward": Cost(**backward, peak_bytes=peaks["backward"]),
    }
    return parts["forward"] + parts["backward"] if direction == "both" else parts[direction]


def _computed(problem: Any) -> tuple[int, int]:
    """Pairs in the blocks that would be computed, and pairs of the largest block of one group."""
    total = largest = 0
    for group in attend.groups(problem):
        units = (group.b.stop - group.b.start) * group.heads.size
        for block in attend.listed_blocks(problem, group, np):
            n_q, n_k = block.queries.pairs_axes, block.keys.pairs_axes
            pairs = units * n_q[-1] * n_k[-1] * max(math.prod(n_q[:-1]), math.prod(n_k[:-1]))
            total, largest = total + pairs, max(largest, pairs)
    return total, largest
