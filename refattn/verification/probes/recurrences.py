"""Features and shapes of recurrences: decays, states, documents, and values on which kernels of chunks go wrong.

A mild square call shows nothing of nine in 24 forward mistakes: lengths here go beyond a chunk of 64, head counts, d and e differ,
states are as large as what is written, and channels decay at different rates.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from refattn.verification.probes.draft import Draft, Feature, Level

__all__ = ["RECURRENT_SHAPES", "RECURRENT_VALUES", "recurrent_features", "recurrent_recipes"]

OFF = Level()


def _example(says: str, **words: Any) -> Level:
    return Level(example=words, options=tuple(words), says=says)


def _sizes(says: str, **sizes: int) -> Level:
    return Level(sizes=sizes, says=says)


RECURRENT_SHAPES = {
    "plain": _sizes("64 tokens, d = e", b=2, h=2, g=2, t=64, d=8, e=8),
    "ragged": _sizes("75 tokens: one chunk of 64 and a short one", b=2, h=3, g=3, t=75, d=8, e=8),
    "mixed": _sizes("80 tokens, other value channels", b=1, h=3, g=3, t=80, d=10, e=6),
    "short": _sizes("fewer tokens than a chunk of 16", b=2, h=2, g=2, t=11, d=5, e=4),
    "value_heads": _sizes("6 value heads on 2 heads of q and k", b=2, h=2, g=6, t=69, d=6, e=4),
    "query_heads": _sizes("6 query heads on 2 states", b=1, h=6, g=2, t=67, d=6, e=4),
    "single": _sizes("one token", b=3, h=2, g=2, t=1, d=5, e=5),
    "long": _sizes("150 tokens", b=1, h=1, g=1, t=150, d=8, e=8),
}


def _lengths(*share: float) -> Callable[[Draft], None]:
    def apply(draft: Draft) -> None:
        t = draft.sizes["t"]
        draft.give(lengths=np.resize([int(t * s) for s in share], draft.sizes.get("b", 2)).astype(np.int64))

    return apply


def _reset(draft: Draft) -> None:
    """A document border inside the first chunk, one on the edge of a chunk, none at all in the last batch entry."""
    b, t = draft.sizes.get("b", 2), draft.sizes["t"]
    marks = np.zeros((b, t), dtype=bool)
    marks[: max(1, b - 1), [n for n in (5, 32, 64, 70) if n < t]] = True
    draft.give(reset=marks)


_LENGTHS = Feature(
    "lengths",
    {
        "none": OFF,
        "ragged": Level(options=("lengths",), apply=_lengths(0.9, 0.4), says="padded tokens"),
        "one_empty": Level(options=("lengths",), apply=_lengths(0.6, 0.0), says="a batch entry without tokens"),
    },
)
_RESET = Feature("reset", {"none": OFF, "on": Level(options=("reset",), apply=_reset, says="documents")})
_STATE = Feature("state", {"none": OFF, "on": _example("a state to start from", state=True)})
_SCALE = Feature("scale", {"default": OFF, "on": _example("a scale", scale=0.37)})
_DECAY = Feature(
    "decay",
    {
        "token": _example("a decay of each token", decay=True),
        "channels": _example("a decay of each channel", channel_decay=True),
        "head": _example("a decay of each head", head_decay=True),
        "none": Level(says="no decay"),
        "both": _example("two decays that add up", decay=True, channel_decay=True),
    },
)
_SHARED = (_DECAY, _STATE, _LENGTHS, _RESET, _SCALE)

_FEATURES: dict[str, tuple[Feature, ...]] = {
    "gated_linear_attention": (
        *_SHARED,
        Feature(
            "read",
            {
                "after": OFF,
                "before": _example("read before the write", read="before"),
                "bonus": _example("read before the write, with a bonus", read="before", bonus=True),
            },
        ),
    ),
    "delta_rule_attention": (
        Feature("beta", {"on": _example("beta", beta=True), "none": Level(says="beta left out")}),
        *_SHARED,
        Feature("erase_key", {"none": OFF, "on": _example("a key of its own to erase with", erase_key=True)}),
        Feature(
            "qk_norm",
            {
                "none": OFF,
                "l2_sum": _example("normalised, eps inside the root", qk_norm="l2_sum"),
                "l2": _example("normalised by max(length, eps)", qk_norm="l2"),
            },
        ),
        Feature("steps", {"one": OFF, "two": _example("two writes a token", steps=2)}),
    ),
    "rwkv7_attention": (
        Feature(
            "decay",
            {
                "channels": _DECAY.levels["channels"],
                **{n: x for n, x in _DECAY.levels.items() if n not in ("channels", "both")},
            },
        ),
        *_SHARED[1:],
    ),
    "ssd_attention": (
        Feature("dt_softplus", {"off": OFF, "on": _example("softplus of dt", dt_softplus=True)}),
        Feature("dt_bias", {"none": OFF, "on": _example("a bias of dt", dt_bias=True)}),
        Feature("skip", {"none": OFF, "on": _example("a skip", skip=True)}),
        Feature("dt_limit", {"none": OFF, "on": _example("limits of dt", dt_limit=(0.31, 0.83))}),
        _STATE,
        _LENGTHS,
    ),
}


def recurrent_features(name: str) -> tuple[Feature, ...]:
    """The features of a recurrence; none for another mechanism."""
    return _FEATURES.get(name, ())


# ---------------------------------------------------------------------------------------------- chosen values


def _decays(draft: Draft) -> list[np.ndarray]:
    """The decays as arrays whose axis 0 is the token."""
    axis = {"decay": -1, "channel_decay": -2, "dt": -1}
    return [np.moveaxis(draft.arguments[n], a, 0) for n, a in axis.items() if draft.arguments.get(n) is not None]


def _strong(draft: Draft) -> None:
    """One step at -20, one at 0; channels, where they differ, alternate."""
    if draft.arguments.get("dt") is not None:
        draft.arguments["a"][...] = -20.0
        return
    for x in _decays(draft):
        t = x.shape[0]
        x[3 % t] = -20.0
        x[7 % t] = 0.0
        x[min(t - 1, 40)] = -20.0


def _overflowing(draft: Draft) -> None:
    """The decays of a chunk of 64 add up to more than the log of float32's range; no single one is strong."""
    if draft.arguments.get("dt") is not None:
        draft.arguments["a"][...] = -9.0
        return
    for x in _decays(draft):
        x[...] = -2.0 - 0.1 * draft.rng("decays").random(x.shape)


def _forgotten(draft: Draft) -> None:
    for x in _decays(draft):
        x[5 % x.shape[0]] = -np.inf


def _short_vectors(draft: Draft) -> None:
    """Lengths of about 1e-3: where eps stands in a norm shows."""
    for name in ("q", "k"):
        x = draft.arguments[name]
        x *= 1e-3 / np.sqrt((x**2).mean())


def _equal_keys(draft: Draft) -> None:
    """The same unit key in a whole chunk: an inverse by doubling explodes."""
    k = draft.arguments["k"]
    k[..., :, :] = k[..., :1, :] / np.sqrt((k[..., :1, :] ** 2).sum(-1, keepdims=True))
    if draft.arguments.get("decay") is not None:
        draft.arguments["decay"] *= 0.01
    if draft.arguments.get("beta") is not None:
        draft.arguments["beta"][...] = 0.9


def _large_state(draft: Draft) -> None:
    draft.arguments["state"] *= 3.0
    if draft.arguments.get("beta") is not None:
        draft.arguments["beta"] *= 0.3


def _far_steps(draft: Draft) -> None:
    """Steps of up to 120: log(1 + exp(z)) overflows in float32."""
    draft.arguments["dt"][..., 2] = 120.0
    draft.arguments["a"][...] *= 0.05


_ANY = {
    "strong": Level(apply=_strong, says="one step decays by exp(-20)"),
    "overflowing": Level(apply=_overflowing, says="decays whose inverse overflows within a chunk"),
    "large_state": Level(apply=_large_state, options=("state",), example={"state": True}, says="a large state"),
}
RECURRENT_VALUES: dict[str, dict[str, Level]] = {
    "gated_linear_attention": {**_ANY, "forgotten": Level(apply=_forgotten, says="a log decay of -inf", form="-inf")},
    "delta_rule_attention": {
        **_ANY,
        "forgotten": Level(apply=_forgotten, says="a log decay of -inf", form="-inf"),
        "short_vectors": Level(apply=_short_vectors, options=("qk_norm",), says="q and k of length 1e-3"),
        "equal_keys": Level(apply=_equal_keys, says="the same key in a whole chunk"),
    },
    "rwkv7_attention": {**_ANY, "forgotten": Level(apply=_forgotten, says="a log decay of -inf", form="-inf")},
    "ssd_attention": {
        **_ANY,
        "far_steps": Level(
            apply=_far_steps, options=("dt_softplus",), example={"dt_softplus": True}, says="large steps"
        ),
    },
}


def recurrent_recipes(name: str, features: Mapping[str, Feature]) -> list[tuple[str, dict[str, str], dict[str, int]]]:
    """What a covering array would not find: chosen values beside the features that they need."""
    found: list[tuple[str, dict[str, str], dict[str, int]]] = []
    for value in RECURRENT_VALUES.get(name, {}):
        recipe = {"values": value, "shape": "ragged"}
        if value == "short_vectors":
            found += [(f"{value}_{norm}", {**recipe, "qk_norm": norm}, {}) for norm in ("l2_sum", "l2")]
            continue
        found.append((value, recipe, {}))
        if value != "large_state":
            found.append((f"{value}_state", {**recipe, "state": "on"}, {}))
        if value in ("strong", "overflowing", "forgotten") and "decay" in features:
            found.append((f"{value}_channels", {**recipe, "decay": "channels"}, {}))
    if "lengths" in features:
        found.append(("padding_state", {"lengths": "ragged", "state": "on", "shape": "ragged"}, {}))
    return found
