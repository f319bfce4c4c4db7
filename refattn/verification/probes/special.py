"""Values that must be chosen: far logits, sinks above everything, poison, ties, cancelling cotangents, long rows.

``VALUES`` is one more feature (its levels draw nothing but change what was drawn), and ``special_recipes`` says beside
which other levels each value must stand: a finite number that stands for "masked" shows only beside a mask, a sink
outside the maximum only above all logits, a narrow position only far from the start.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from refattn.mechanism import Mechanism
from refattn.verification.probes.draft import Draft, Feature, Impossible, Level
from refattn.verification.probes.features import OFF, random_mask
from refattn.verification.probes.recurrences import RECURRENT_VALUES, recurrent_recipes

__all__ = ["special_recipes", "values_feature"]


def _logits_near(center: float, spread: float) -> Callable[[Draft], None]:
    """Logits at ``center`` with about ``spread`` around it, at moderate size of every entry of q and k."""

    def apply(draft: Draft) -> None:
        q, k = draft.arguments["q"], draft.arguments["k"]
        rng = draft.rng("logits")
        channels = q.shape[-1]
        half = channels // 2
        side = math.sqrt(abs(center) * math.sqrt(channels) / half)
        q[..., :half] = side
        k[..., :half] = math.copysign(side, center)
        factor = math.sqrt(spread * math.sqrt(channels) / math.sqrt(channels - half))
        q[..., half:] = factor * rng.uniform(-1.7, 1.7, q[..., half:].shape)
        k[..., half:] = factor * rng.uniform(-1.7, 1.7, k[..., half:].shape)

    return apply


def _duplicates(draft: Draft) -> None:
    k = draft.arguments["k"]
    half = k.shape[-2] // 2
    k[..., half : 2 * half, :] = k[..., :half, :]


def _outliers(draft: Draft) -> None:
    given = draft.arguments
    given["q"][..., 3] *= 12.0
    given["k"][..., 5 % draft.k, :] *= 15.0
    given["v"][..., 7 % draft.k, :] *= 30.0


def _one_hot(draft: Draft) -> None:
    v = draft.arguments["v"]
    draft.arguments["v"] = np.broadcast_to(np.eye(v.shape[-2])[:, : v.shape[-1]], v.shape).copy()


def _first_tile_hidden(draft: Draft) -> None:
    _logits_near(-160.0, 9.0)(draft)
    mask = np.ones((1, 1, draft.q, draft.k), dtype=bool)
    mask[..., : min(128, draft.k - 5)] = False
    draft.give(mask=mask)


def _poison(keys: float | None, values: float | None) -> Callable[[Draft], None]:
    """Places that a mask hides from every row hold NaN or a huge number."""

    def apply(draft: Draft) -> None:
        rng = draft.rng("mask")
        mask = random_mask(rng, (draft.b, 1, draft.q, draft.k))
        mask[..., draft.k // 2] = True
        hidden = [sorted(rng.choice(draft.k, 3, replace=False).tolist()) for _ in range(draft.b)]
        for batch, columns in enumerate(hidden):
            columns = [j for j in columns if j != draft.k // 2]
            mask[batch][..., columns] = False
            for name, x in (("k", keys), ("v", values)):
                if x is not None:
                    draft.arguments[name][batch][..., columns, :] = x
        draft.give(mask=mask)
        draft.poison = True

    return apply


def _sinks_above(draft: Draft) -> None:
    """Logits near -60, sinks near 40: apart by more than the log of the largest float32."""
    draft.shift_logits(-60.0)
    draft.give(sinks=draft.rng("sinks").uniform(38.0, 42.0, draft.h))


def _sinks_beside(center: float, low: float, high: float) -> Callable[[Draft], None]:
    def apply(draft: Draft) -> None:
        draft.shift_logits(center)
        draft.give(sinks=draft.rng("sinks").uniform(low, high, draft.h))

    return apply


def _long_row(draft: Draft) -> None:
    """Values around 3 and logits near 0: every partial sum is large, and an accumulator that is not float32 shows."""
    draft.arguments["q"] = draft.arguments["q"] * 0.1
    draft.arguments["v"] = draft.arguments["v"] + 3.0


def _quiet_row(draft: Draft) -> None:
    draft.arguments["q"] = draft.arguments["q"] * 0.1


def _same_signs(draft: Draft) -> None:
    """Values around 3, cotangents of one sign: dP and its row term are large, their difference is small."""
    draft.arguments["q"] = draft.arguments["q"] * 0.5
    draft.arguments["v"] = draft.arguments["v"] + 3.0
    draft.change_cotangents = lambda name, x: np.abs(x) if name == "output" else x


def _cancelling(draft: Draft) -> None:
    """Cotangents whose sum over the rows nearly cancels: gradients that are summed over rows are small differences."""

    def change(name: str, x: np.ndarray) -> np.ndarray:
        if name != "output" or x.shape[-2] < 2:
            return x
        half = x.shape[-2] // 2
        x[..., half : 2 * half, :] = -x[..., :half, :] * (1 + 1e-2)
        return x

    q = draft.arguments["q"]
    half = q.shape[-2] // 2
    if half:
        q[..., half : 2 * half, :] = q[..., :half, :]
    draft.change_cotangents = change


def _large(draft: Draft) -> None:
    """The first array 40 times as large: exponentials overflow unless the maximum is subtracted."""
    name = draft.mechanism.positional[0]
    draft.arguments[name] = draft.arguments[name] * 40.0


def _raised(draft: Draft) -> None:
    """Every array that a softmax may see, moved up by 800: no weight changes, no exponential is finite unshifted."""
    for name in draft.mechanism.positional[:2]:
        if isinstance(draft.arguments.get(name), np.ndarray):
            draft.arguments[name] = draft.arguments[name] + 800.0


def _lowered(draft: Draft) -> None:
    """All logits near -160, those of global queries and keys too."""
    draft.shift_logits(-160.0)
    for name, like in (("q_global", "q"), ("k_global", "k")):
        if isinstance(draft.arguments.get(name), np.ndarray):
            draft.arguments[name][..., -1] = draft.arguments[like].flat[-1]


def _only_gradient(name: str) -> Callable[[Draft], None]:
    def apply(draft: Draft) -> None:
        if draft.arguments.get(name) is None:
            raise Impossible(f"there is no {name}")
        draft.wrt = (name,)

    return apply


def _level(says: str, apply: Callable[[Draft], None], *options: str) -> Level:
    return Level(says=says, apply=apply, options=options)


_DENSE = {
    "negative": _level(
        "all logits between -200 and -120: a running maximum that starts at 0 gives zero rows",
        _logits_near(-160.0, 9.0),
    ),
    "far": _level("logits near -1e5: a finite number that stands for 'masked' shows", _logits_near(-1e5, 3.0)),
    "farther": _level("logits near -1e6", _logits_near(-1e6, 3.0)),
    "far_half": _level("logits near -2e4", _logits_near(-2e4, 3.0)),
    "large": _level(
        "q.k beyond 65504, scale * q.k below: overflow before the scale in float16", _logits_near(2.2e4, 3.0)
    ),
    "duplicates": _level("half of the keys stand twice, with different values", _duplicates),
    "outliers": _level("one channel, one key and one value much larger than the rest", _outliers),
    "one_hot": _level("values are unit vectors: the output is the weights", _one_hot),
    "first_tile_hidden": _level("logits below -120 and the first 128 keys masked", _first_tile_hidden, "mask"),
    "poisoned_keys": _level("NaN in keys that are masked everywhere", _poison(np.nan, None), "mask"),
    "poisoned_values": _level("NaN in values that are masked everywhere", _poison(None, np.nan), "mask"),
    "poisoned_large": _level("1e30 in keys and values that are masked everywhere", _poison(1e30, 1e30), "mask"),
    "sinks_above": _level("sinks above all logits by more than 88.7", _sinks_above, "sinks"),
    "sinks_negative": _level("all logits near -40 and sinks beside them", _sinks_beside(-40.0, -38.0, -35.0), "sinks"),
    "sinks_positive": _level("all logits near 40 and sinks beside them", _sinks_beside(40.0, 42.0, 45.0), "sinks"),
    "long_row": _level("a long row of values around 3: an accumulator that is not float32 shows", _long_row),
    "quiet_row": _level("a long row of equal weights", _quiet_row),
    "same_signs": _level("values and cotangents of one sign: large terms, small differences", _same_signs),
    "cancelling": _level("cotangents that nearly cancel over the rows", _cancelling),
    "negative_tail": _level(
        "1000 keys with negative logits: zero-padded tail keys in the denominator show", lambda d: d.shift_logits(-6.0)
    ),
    "gradient_of_q": _level("the gradient of q and of nothing else", _only_gradient("q")),
    "gradient_of_v": _level("the gradient of v and of nothing else", _only_gradient("v")),
    "gradient_of_bias": _level("the gradient of the bias and of nothing else", _only_gradient("bias")),
}

_GENERAL = {
    "large": _level("the first array 40 times as large", _large),
    "lowered": _level("all logits near -160: a running maximum that starts at 0 gives zero rows", _lowered),
    "raised": _level("arrays moved up by 800: no exponential is finite unless its maximum is subtracted", _raised),
}


def _is_dense(mechanism: Mechanism) -> bool:
    return {"q", "k", "v"} <= set(mechanism.positional) and {"mask", "causal"} <= set(mechanism.options)


_LOWERED = (
    "adaptive_span_attention",
    "bigbird_attention",
    "etc_attention",
    "longformer_attention",
    "nystrom_attention",
)
"""Where products of queries and keys alone make the logits of a softmax over them."""


def values_feature(mechanism: Mechanism) -> Feature:
    """The chosen values that a mechanism can have."""
    levels = RECURRENT_VALUES.get(mechanism.name) or (_DENSE if _is_dense(mechanism) else _GENERAL)
    fitting = {n: x for n, x in levels.items() if all(o in mechanism.options for o in x.options)}
    if mechanism.name not in ("efficient_attention",):
        fitting.pop("raised", None)
    if mechanism.name not in _LOWERED:
        fitting.pop("lowered", None)
    return Feature("values", {"drawn": OFF, **fitting})


Recipe = tuple[str, dict[str, str], dict[str, int]]
"""A name, levels by feature, axis lengths that replace those of the levels."""


def special_recipes(mechanism: Mechanism, features: Mapping[str, Any]) -> list[Recipe]:
    """The recipes that a covering array would not find."""
    if mechanism.name in RECURRENT_VALUES:
        return recurrent_recipes(mechanism.name, features)
    if not _is_dense(mechanism):
        found: list[Recipe] = [(n, {"values": n}, {}) for n in features["values"].levels if n != "drawn"]
        return found + _own_recipes(mechanism, features)
    small = {"b": 1, "h": 6, "g": 2, "q": 17, "k": 161, "d": 20, "e": 14, "t": 161}
    recipes: list[Recipe] = [
        ("one_key", {}, {"b": 2, "h": 6, "g": 2, "q": 7, "k": 1}),
        ("wide_channels", {}, {"b": 1, "h": 6, "g": 2, "q": 9, "k": 17, "d": 136, "e": 72}),
        ("tile_plus_one", {}, {"b": 1, "h": 6, "g": 2, "q": 17, "k": 129}),
        ("one_hot_values", {"values": "one_hot", "shape": "mixed"}, {"q": 11, "k": 20, "d": 20, "e": 20}),
        ("duplicates", {"values": "duplicates", "shape": "mixed"}, {}),
        ("outliers", {"values": "outliers", "shape": "mixed"}, {}),
        ("long_tail", {"values": "negative_tail", "shape": "mixed"}, {"b": 1, "q": 3, "k": 1000}),
        ("negative_logits", {"values": "negative"}, small),
        ("far_negative_logits", {"values": "far", "shape": "mixed"}, {}),
        ("large_logits", {"values": "large", "shape": "mixed"}, {}),
        ("negative_masked_tile", {"values": "first_tile_hidden"}, small),
        ("negative_window", {"values": "negative", "window": "left", "causal": "on"}, small),
        ("poisoned_keys", {"values": "poisoned_keys", "shape": "mixed"}, {}),
        ("poisoned_values", {"values": "poisoned_values", "shape": "mixed"}, {}),
        ("poisoned_large", {"values": "poisoned_large", "shape": "mixed"}, {}),
        ("sinks_above", {"values": "sinks_above", "shape": "mixed"}, {}),
        ("sinks_negative", {"values": "sinks_negative", "shape": "mixed"}, {}),
        ("sinks_positive", {"values": "sinks_positive", "shape": "mixed"}, {}),
        ("sinks_empty_rows", {"sinks": "one", "mask": "empty", "shape": "mixed"}, {}),
        ("long_row", {"values": "long_row"}, {"b": 1, "h": 1, "g": 1, "q": 2, "k": 4096, "d": 16, "e": 16}),
        ("quiet_row", {"values": "quiet_row"}, {"b": 1, "h": 1, "g": 1, "q": 2, "k": 4096, "d": 16, "e": 16}),
        ("same_signs", {"values": "same_signs"}, {"b": 1, "h": 1, "g": 1, "q": 5, "k": 1000, "d": 128, "e": 128}),
        ("cancelling", {"values": "cancelling", "shape": "square"}, {}),
        ("cancelling_bias", {"values": "cancelling", "bias": "keys", "shape": "square"}, {}),
        ("cancelling_sinks", {"values": "cancelling", "sinks": "one", "shape": "square"}, {}),
        ("gradient_of_q", {"values": "gradient_of_q"}, {}),
        ("gradient_of_v", {"values": "gradient_of_v"}, {}),
        ("gradient_of_bias", {"values": "gradient_of_bias", "bias": "heads", "shape": "mixed"}, {}),
    ]
    ways: dict[str, tuple[dict[str, str], ...]] = {
        "far_half": (
            {"mask": "batch"},
            {"causal": "on"},
            {"window": "small"},
            {"lengths": "keys"},
            {"segments": "documents"},
            {"bias": "hidden"},
        ),
        "far": ({"mask": "empty"}, {"lengths": "one_empty"}),
        "farther": ({"mask": "batch"}, {"causal": "on"}),
        "negative": ({"causal": "on"}, {"window": "small"}, {"lengths": "keys"}),
        "large": ({"mask": "batch"}, {"causal": "on"}),
    }
    for values, beside in ways.items():
        for way in beside:
            recipes.append((f"{values}_{next(iter(way))}", {"values": values, "shape": "mixed", **way}, {}))
    # Positions beyond 127, 255 and 32,767: a narrow index wraps.
    far = {"b": 1, "h": 1, "g": 1, "q": 9, "k": 260, "d": 8, "e": 8, "t": 260}
    farther = {"b": 1, "h": 1, "g": 1, "q": 2, "k": 32_800, "d": 4, "e": 4}
    for way in (
        {},
        {"causal": "on"},
        {"window": "small"},
        {"window": "left"},
        {"alibi": "on"},
        {"segments": "documents"},
    ):
        name = "_".join((*way, *way.values())) or "plain"
        recipes.append((f"positions_260_{name}", way, far))
        if way and way.get("window") != "small":
            recipes.append((f"positions_32800_{name}", way, farther))
    recipes.append(("positions_65537", {}, {"b": 1, "h": 1, "g": 1, "q": 1, "k": 65_537, "d": 1, "e": 1}))
    # Triples on which kernels branch.
    for shape in ("mixed", "decode"):
        for window in ("small", "left", "longer", "keys"):
            recipe = {"shape": shape, "causal": "on", "window": window}
            recipes.append((f"causal_window_{window}_lengths_{shape}", {**recipe, "lengths": "keys"}, {}))
        recipes += [
            (
                f"causal_segments_mask_{shape}",
                {"shape": shape, "causal": "on", "segments": "documents", "mask": "batch"},
                {},
            ),
            (f"causal_window_{shape}", {"shape": shape, "causal": "on", "window": "longer"}, {}),
            (f"window_sinks_{shape}", {"shape": shape, "window": "small", "sinks": "one"}, {}),
            (f"lengths_grouped_{shape}", {"shape": shape, "lengths": "keys"}, {}),
            (f"dropout_causal_{shape}", {"shape": shape, "dropout": "on", "causal": "on"}, {}),
        ]
    recipes.append(("causal_lengths_both", {"shape": "mixed", "causal": "on", "lengths": "both"}, {}))
    for shape in ("mixed", "more_queries", "decode"):
        for option in ({"causal": "on"}, {"window": "small"}, {"alibi": "on"}):
            feature = next(iter(option))
            recipes.append((f"{feature}_upper_left_{shape}", {"shape": shape, "align": "upper_left", **option}, {}))
        recipes.append((f"causal_aligned_{shape}", {"shape": shape, "align": "number", "causal": "on"}, {}))
    recipes += [
        ("head_map_tile", {"head_map": "tile", "shape": "mixed"}, {}),
        ("softcap_after_bias", {"softcap_after_bias": "on", "softcap": "on", "bias": "heads", "shape": "mixed"}, {}),
        ("sinks_outside_lse", {"lse_includes_sinks": "off", "sinks": "one", "shape": "mixed"}, {}),
    ]
    return recipes + _own_recipes(mechanism, features)


def _own_recipes(mechanism: Mechanism, features: Mapping[str, Any]) -> list[Recipe]:
    """What a mechanism needs beside its pairs."""
    own: dict[str, list[Recipe]] = {
        "routing_attention": [
            ("own_keys_causal", {"keys": "own", "causal": "on", "membership": "chosen"}, {"c": 1}),
            ("own_keys_causal_clusters", {"keys": "own", "causal": "on", "membership": "chosen"}, {}),
        ],
        "linear_attention": [
            ("three_chunks", {"causal": "on"}, {"q": 129, "k": 129}),
            ("many_chunks", {"causal": "on"}, {"q": 200, "k": 200}),
        ],
        "performer_attention": [
            ("three_chunks", {"causal": "on"}, {"q": 129, "k": 129}),
            ("many_chunks", {"causal": "on"}, {"q": 200, "k": 200}),
        ],
    }
    return own.get(mechanism.name, [])
