"""What a call may have: shapes, options of the score, memory.  Each feature once, with its levels.

A feature is offered to every mechanism that has the options of its levels.  What only one mechanism has stands in ``own``;
values that must be chosen (far logits, poison, ties ...) in ``special``.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from refattn.mechanism import Mechanism
from refattn.verification.conventions import CONVENTION_OPTIONS
from refattn.verification.probes.draft import Draft, Feature, Impossible, Level

__all__ = ["COVERED", "HIDING", "LONGEST", "PAPER_SLOPES", "SHAPES", "possible", "random_mask", "shared_features"]

LONGEST = 200
"""Positions of a sequence that is queries and keys alike: its pairs are the square."""

SHAPES: dict[str, Level] = {
    n: Level(
        sizes=dict(zip("bhgqkde", lengths, strict=True)) | {"t": min(lengths[4], LONGEST), "x": 4, "y": 5, "m": 11},
        says=says,
    )
    for n, (lengths, says) in {
        "plain": ((2, 5, 5, 19, 33, 20, 20), "as many key heads as query heads"),
        "mixed": (
            (3, 6, 2, 19, 33, 20, 14),
            "6 query heads on 2 key heads, other value channels, all lengths different",
        ),
        "square": ((2, 6, 2, 33, 33, 20, 14), "as many queries as keys"),
        "square_plain": ((2, 5, 5, 33, 33, 20, 20), "as many queries as keys, as many key heads as query heads"),
        "more_queries": ((3, 6, 2, 37, 11, 20, 14), "more queries than keys"),
        "more_queries_plain": ((2, 5, 5, 37, 11, 20, 20), "more queries than keys, equal head counts"),
        "decode": ((3, 6, 2, 1, 65, 20, 14), "one query; 65 keys, one beyond the tile"),
        "decode_plain": ((2, 5, 5, 1, 65, 20, 20), "one query, equal head counts"),
        "tile": ((2, 6, 3, 64, 64, 32, 32), "lengths that are multiples of the usual tiles"),
        "one_group": (
            (2, 4, 1, 17, 129, 20, 20),
            "one key head for all; 129 keys, one beyond a tile of 128, 64 and 32",
        ),
        "many_queries": (
            (1, 6, 2, 129, 17, 20, 14),
            "129 queries on 17 keys: gradients of keys are summed over tiles of queries",
        ),
        "long_decode": ((2, 6, 2, 1, 2050, 12, 12), "one query and 2,050 keys"),
    }.items()
}

HIDING = ("mask", "causal", "window", "lengths", "segments", "pattern")
"""Features whose levels hide keys: more than two of them in a row of the covering array would hide nearly all."""

MOST_HIDING, MOST_OPTIONS = 2, 6


def random_mask(rng: np.random.Generator, shape: tuple[int, ...], share: float = 0.6) -> np.ndarray:
    """Random bool mask where every row sees something and no column pattern repeats."""
    mask = rng.random(shape) < share
    mask[..., -1] |= ~mask.any(axis=-1)
    return mask


# ---------------------------------------------------------------------- the options of the score


def _mask(*axes: str) -> Level:
    def apply(draft: Draft) -> None:
        shape = tuple(getattr(draft, n) if n in axes else 1 for n in "bhqk")
        draft.give(mask=random_mask(draft.rng("mask"), shape))

    return Level(
        options=("mask",), apply=apply, says=f"mask over ({', '.join(n if n in axes else '1' for n in 'bhqk')})"
    )


def _mask_with_empty_rows(draft: Draft) -> None:
    mask = random_mask(draft.rng("mask"), (draft.b, 1, draft.q, draft.k))
    mask[0, :, draft.q // 4 : draft.q // 4 + 3] = False
    mask[-1, :, -1] = False
    draft.give(mask=mask)
    _raise_values(draft)


def _raise_values(draft: Draft) -> None:
    """Values whose mean is not 0: it is what some give for an empty row."""
    if isinstance(draft.arguments.get("v"), np.ndarray):
        draft.arguments["v"] = draft.arguments["v"] + 1.0


def _mask_true(draft: Draft) -> None:
    draft.give(mask=np.ones((draft.b, 1, draft.q, draft.k), dtype=bool))


def _causal(draft: Draft) -> None:
    draft.give(causal=True)


def _aligned(where: Any, form: str = "") -> Level:
    return Level(
        options=("align",),
        apply=lambda draft: draft.give(align=where),
        named=("align",),
        says=f"aligned at {where}",
        form=form,
    )


def _window(left: Any, right: Any, says: str) -> Level:
    def apply(draft: Draft) -> None:
        sides = (x(draft.k) if callable(x) else x for x in (left, right))
        draft.give(window=tuple(sides))

    return Level(options=("window",), apply=apply, says=says)


def _ragged(n: int, b: int, first: int) -> np.ndarray:
    """Lengths per batch entry, none of them equal where there is room."""
    parts = np.array([0.65, 0.4, 0.85, 0.25])
    return np.maximum(1, np.rint(n * np.resize(np.roll(parts, -first), b))).astype(np.int32)


def _key_lengths(draft: Draft, *, empty: bool = False, full: bool = False, poison: bool = False) -> None:
    lengths = np.full(draft.b, draft.k, dtype=np.int32) if full else _ragged(draft.k, draft.b, 0)
    if not full and draft.b > 2:
        lengths[0] = draft.k
    if empty:
        if draft.b < 2:
            raise Impossible("an empty entry beside others needs two batch entries")
        lengths[1] = 0
        _raise_values(draft)
    draft.give(key_lengths=lengths)
    if poison:
        for batch, n in enumerate(lengths):
            draft.arguments["k"][batch][..., n:, :] = np.nan
            draft.arguments["v"][batch][..., n:, :] = np.nan if batch != 2 else 1e30
        draft.poison = True


def _query_lengths(draft: Draft) -> None:
    draft.give(query_lengths=_ragged(draft.q, draft.b, 1))


def _both_lengths(draft: Draft, *, empty: bool = False) -> None:
    _query_lengths(draft)
    _key_lengths(draft, empty=empty)
    if draft.b > 2:
        draft.arguments["key_lengths"] = draft.arguments["key_lengths"][[1, 0, 2]]


def _segments(draft: Draft, *, ordered: bool) -> None:
    rng = draft.rng("segments")
    count = min(3, draft.q, draft.k)

    def ids(n: int) -> np.ndarray:
        drawn = rng.integers(0, count, (draft.b, n)) * 2 + 1
        return (np.sort(drawn, axis=-1) if ordered else drawn).astype(np.int32)

    queries = ids(draft.q)
    keys = queries.copy() if draft.q == draft.k else ids(draft.k)
    draft.give(query_segments=queries, key_segments=keys)
    _raise_values(draft)


def _scale(draft: Draft) -> None:
    draft.give(scale=0.37)


def _softcap(draft: Draft) -> None:
    for name in draft.mechanism.positional[:1]:
        draft.arguments[name] = draft.arguments[name] * 2.0
    draft.give(softcap=1.5)


def _bias(*axes: str) -> Level:
    def apply(draft: Draft) -> None:
        shape = tuple(getattr(draft, n) if n in axes else 1 for n in "bhqk")
        draft.give(bias=draft.rng("bias").standard_normal(shape))

    return Level(
        options=("bias",), apply=apply, says=f"bias over ({', '.join(n if n in axes else '1' for n in 'bhqk')})"
    )


def _hiding_bias(draft: Draft) -> None:
    rng = draft.rng("bias")
    shape = (1, draft.h, draft.q, draft.k)
    bias = rng.standard_normal(shape)
    bias[~random_mask(rng, shape, 0.7)] = -np.inf
    bias[:, 1 % draft.h, draft.q // 4] = -np.inf
    _raise_values(draft)
    draft.give(bias=bias)


PAPER_SLOPES = (0.25, 0.0625, 2.0**-6, 2.0**-8, 0.5, 0.125)  # the paper's code for 6 heads


def _alibi(draft: Draft) -> None:
    draft.give(alibi_slopes=np.resize(PAPER_SLOPES, draft.h))


def _sinks(draft: Draft, *, several: bool = False, hidden: bool = False) -> None:
    rng = draft.rng("sinks")
    shape = (draft.h, 3) if several else (draft.h,)
    sinks = math.log(draft.k) + rng.uniform(-1.0, 2.0, shape) - (1.0 if several else 0.0)
    if hidden:
        sinks[:: max(1, draft.h // 2)] = -np.inf
    draft.give(sinks=sinks)


def _dropout(draft: Draft) -> None:
    keep = draft.rng("dropout").random((draft.b, draft.h, draft.q, draft.k)) >= 0.25
    draft.give(dropout_mask=keep, dropout_rate=0.25)


def _set(name: str, value: Any) -> Level:
    return Level(
        options=(name,), apply=lambda draft: draft.give(**{name: value}), named=(name,), says=f"{name}={value}"
    )


OFF = Level()

SCORE: tuple[Feature, ...] = (
    Feature(
        "mask",
        {
            "none": OFF,
            "full": _mask("b", "h", "q", "k"),
            "heads": _mask("h", "q", "k"),
            "batch": _mask("b", "q", "k"),
            "keys": _mask("b", "k"),
            "empty": Level(
                options=("mask",), apply=_mask_with_empty_rows, says="a mask that leaves rows without any key"
            ),
        },
    ),
    Feature("causal", {"none": OFF, "on": Level(options=("causal",), apply=_causal, says="causal")}),
    Feature(
        "align", {"lower_right": OFF, "upper_left": _aligned("upper_left"), "number": _aligned(3, "numeric_align")}
    ),
    Feature(
        "window",
        {
            "none": OFF,
            "small": _window(3, 2, "window (3, 2)"),
            "zero": _window(0, 0, "window (0, 0)"),
            "left": _window(5, None, "window (5, None)"),
            "right": _window(None, 1, "window (None, 1)"),
            "keys": _window(lambda k: k - 1, lambda k: k, "a window as long as the keys"),
            "longer": _window(lambda k: k + 7, 0, "a window longer than the keys"),
        },
    ),
    Feature(
        "lengths",
        {
            "none": OFF,
            "keys": Level(options=("key_lengths",), apply=_key_lengths, says="unequal key lengths"),
            "one_empty": Level(
                options=("key_lengths",), apply=lambda d: _key_lengths(d, empty=True), says="an empty batch entry"
            ),
            "full": Level(
                options=("key_lengths",),
                apply=lambda d: _key_lengths(d, full=True),
                says="key lengths that hide nothing",
            ),
            "queries": Level(options=("query_lengths",), apply=_query_lengths, says="unequal query lengths"),
            "both": Level(
                options=("query_lengths", "key_lengths"), apply=_both_lengths, says="unequal query and key lengths"
            ),
            "poisoned": Level(
                options=("key_lengths",),
                apply=lambda d: _key_lengths(d, poison=True),
                says="NaN beyond the key lengths",
            ),
        },
    ),
    Feature(
        "segments",
        {
            "none": OFF,
            "documents": Level(
                options=("query_segments", "key_segments"),
                apply=lambda d: _segments(d, ordered=True),
                says="packed documents",
            ),
            "unordered": Level(
                options=("query_segments", "key_segments"),
                apply=lambda d: _segments(d, ordered=False),
                says="segments in no order",
            ),
        },
    ),
    Feature("scale", {"default": OFF, "given": Level(options=("scale",), apply=_scale, says="a scale of one's own")}),
    Feature("softcap", {"none": OFF, "on": Level(options=("softcap",), apply=_softcap, says="soft cap 1.5")}),
    Feature(
        "bias",
        {
            "none": OFF,
            "heads": _bias("h", "q", "k"),
            "batch": _bias("b", "q", "k"),
            "keys": _bias("b", "h", "k"),
            "full": _bias("b", "h", "q", "k"),
            "hidden": Level(options=("bias",), apply=_hiding_bias, says="-inf in the bias hides pairs, one row wholly"),
        },
    ),
    Feature("alibi", {"none": OFF, "on": Level(options=("alibi_slopes",), apply=_alibi, says="ALiBi")}),
    Feature(
        "sinks",
        {
            "none": OFF,
            "one": Level(options=("sinks",), apply=_sinks, says="sinks as heavy as all keys together"),
            "several": Level(
                options=("sinks",),
                apply=lambda d: _sinks(d, several=True),
                says="three sinks a head",
                form="several_sinks",
            ),
            "hidden": Level(options=("sinks",), apply=lambda d: _sinks(d, hidden=True), says="some sinks of -inf"),
        },
    ),
    Feature(
        "dropout",
        {
            "none": OFF,
            "on": Level(options=("dropout_mask", "dropout_rate"), apply=_dropout, says="a keep mask at rate 1/4"),
        },
    ),
    Feature("head_map", {"repeat": OFF, "tile": _set("head_map", "tile")}),
    Feature("softcap_after_bias", {"off": OFF, "on": _set("softcap_after_bias", True)}),
    Feature("lse_includes_sinks", {"on": OFF, "off": _set("lse_includes_sinks", False)}),
)

# ---------------------------------------------------------------------- memory and cotangents


def _memory(form: str) -> Level:
    def apply(draft: Draft) -> None:
        draft.memory = form
        if form == "expanded":
            for name in draft.mechanism.positional[1:]:
                x = draft.arguments.get(name)
                if isinstance(x, np.ndarray) and x.ndim > 2:
                    x[1:] = x[:1]

    return Level(apply=apply, says=f"arrays {form} in memory")


def _cotangents(form: str) -> Level:
    def apply(draft: Draft) -> None:
        draft.memory_of_cotangents = form

    return Level(apply=apply, says=f"a cotangent {form} in memory")


def _only(name: str) -> Level:
    def apply(draft: Draft) -> None:
        if name not in draft.mechanism.outputs:
            raise Impossible(f"it has no {name}")
        draft.cotangents_of = (name,)

    return Level(apply=apply, says=f"a cotangent of the {name} alone", cotangent=name)


FORMS: tuple[Feature, ...] = (
    Feature("memory", {"contiguous": OFF, **{n: _memory(n) for n in ("transposed", "sliced", "expanded")}}),
    Feature(
        "cotangent_memory", {"contiguous": OFF, **{n: _cotangents(n) for n in ("transposed", "sliced", "expanded")}}
    ),
    Feature("cotangents", {"all": OFF, "output": _only("output"), "lse": _only("lse")}),
)


def shared_features(mechanism: Mechanism) -> dict[str, Feature]:
    """The features that a mechanism has, by name: those of the score whose options are its own, memory, cotangents."""
    found = {}
    for feature in SCORE:
        levels = {n: x for n, x in feature.levels.items() if all(o in mechanism.options for o in x.options)}
        if len(levels) > 1:
            found[feature.name] = Feature(feature.name, levels)
    for feature in FORMS:
        levels = dict(feature.levels)
        if feature.name == "cotangents":
            levels = {n: x for n, x in levels.items() if n == "all" or n in mechanism.outputs}
            levels = levels if len(mechanism.outputs) > 1 else {"all": OFF}
        if len(levels) > 1:
            found[feature.name] = Feature(feature.name, levels)
    return found


def possible(row: Mapping[str, str], features: Mapping[str, Feature]) -> bool:
    """Whether levels go together; what is refused stays refused however many are added."""
    on = [(n, features[n].levels[x]) for n, x in row.items() if x != features[n].plain]
    if sum(n in HIDING for n, _ in on) > MOST_HIDING or sum(bool(x.options) for _, x in on) > MOST_OPTIONS:
        return False
    batches = features["shape"].levels[row["shape"]].sizes.get("b", 2) if "shape" in row else 2
    # A sink of -inf in a row that sees nothing: 0 / 0 in nearly every kernel, and nobody's promise.
    if row.get("sinks") == "hidden" and (any(n in HIDING for n, _ in on) or row.get("bias") == "hidden"):
        return False
    lengths = row.get("lengths")
    if lengths in ("one_empty", "poisoned") and batches < 2:
        return False
    return not (lengths == "poisoned" and (row.get("memory") == "expanded" or row.get("cotangents") == "lse"))


COVERED = ("shape", *(f.name for f in SCORE if f.name not in CONVENTION_OPTIONS), *(f.name for f in FORMS))
"""The features whose pairs are covered; conventions, which few candidates name, have probes of their own."""
