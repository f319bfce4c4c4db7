"""The ways people get softmax attention wrong, each as the numbers that the mistake gives.

A mistake changes the arguments (the causal flag is forgotten) or replaces a step of
:class:`~refattn.definitions.dense_steps.Steps` (the running maximum is clamped).  The gradients that come with a wrong
forward are those that the right backward makes of the wrong weights; a mistake of the backward alone has no forward.

The verifier holds these numbers against those of a failing kernel.  A mistake that changes nothing for the arguments at
hand gives None.
"""

import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from refattn.arrays import sum_to_shape
from refattn.definitions.dense_steps import Arguments, Steps, conjunction, divide, product, transpose
from refattn.records import Mutation, Result

__all__ = ["dense_mutations", "mutations_for"]

_TILES = (4, 8, 16, 32, 64, 128)
_SAME = 1e-9  # results closer than this, relative to the largest entry, are the same


# ---------------------------------------------------------------------- making mutations


def _mistake(
    class_: str,
    says: str,
    *,
    change: Callable[[Steps], Arguments | None] | None = None,
    cut: Collection[str] = (),
    without: Collection[str] = (),
    forward: bool = True,
    gradients: bool = True,
    **steps: Callable[..., Any],
) -> Mutation:
    """A Mutation from changed arguments and replaced steps.

    ``change`` gets the right call and gives new arguments, None where the mistake does not apply.  The gradient of an
    argument that was replaced is not given (its place in the graph is another), that of one that was dropped is zero;
    names in ``cut`` were padded or zeroed, so theirs is cut to the old shape.  ``without`` leaves out further gradients.
    """
    wrong_class = type("_Mistaken", (Steps,), steps)

    def run(arguments: Arguments) -> tuple[Steps, Steps, Result, Result] | None:
        right = Steps(arguments)
        if not right.h * right.rows * right.d * right.e:
            return None
        changed = {} if change is None else change(right)
        if changed is None:
            return None
        wrong = wrong_class({**arguments, **changed})
        return right, wrong, right.forward(), wrong.forward()

    def mistaken_forward(arguments: Arguments) -> Result | None:
        with np.errstate(all="ignore"):
            found = run(arguments)
        if found is None:
            return None
        _, _, expected, result = found
        return result if _differ(expected.fields, result.fields) else None

    def mistaken_gradients(arguments: Arguments, cotangents: Arguments) -> dict[str, Any] | None:
        with np.errstate(all="ignore"):
            found = run(arguments)
            if found is None:
                return None
            right, wrong, _, _ = found
            expected, computed = right.backward(cotangents), wrong.backward(cotangents)
        result = {}
        for name, g in expected.items():
            if name in without:
                continue
            if wrong.get(name) is arguments[name]:
                result[name] = computed[name]
            elif name in cut:
                result[name] = computed[name][tuple(slice(0, n) for n in g.shape)]
            elif wrong.get(name) is None:
                result[name] = np.zeros_like(g)
        return result if _differ({n: expected[n] for n in result}, result) else None

    return Mutation(
        class_, says, forward=mistaken_forward if forward else None, gradients=mistaken_gradients if gradients else None
    )


def _differ(expected: Any, found: Any) -> bool:
    for name, right in expected.items():
        wrong = found[name]
        if np.shape(right) != np.shape(wrong):
            return True
        finite = np.isfinite(right) & np.isfinite(wrong)
        if not np.array_equal(np.where(finite, 0.0, right), np.where(finite, 0.0, wrong), equal_nan=True):
            return True
        right, wrong = np.where(finite, right, 0.0), np.where(finite, wrong, 0.0)
        if right.size and np.abs(wrong - right).max() > _SAME * max(1.0, np.abs(right).max()):
            return True
    return False


def mutations_for(
    prepare: Callable[[Arguments], Arguments | None],
    *,
    exclude: Collection[str] = (),
    finish: Callable[[Arguments, Result], Result] | None = None,
) -> tuple[Mutation, ...]:
    """The mistakes of softmax attention as mistakes of another mechanism.

    ``prepare`` maps the mechanism's arguments onto those of ``scaled_dot_product_attention`` (None: not for these), and
    ``finish``, where given, the Result back.  Gradients are offered only without ``finish``, under the same names.
    Classes in ``exclude`` are left out.
    """

    def adapted(mutation: Mutation) -> Mutation:
        def forward(arguments: Arguments) -> Result | None:
            prepared = prepare(arguments)
            result = None if prepared is None or mutation.forward is None else mutation.forward(prepared)
            return result if result is None or finish is None else finish(arguments, result)

        def gradients(arguments: Arguments, cotangents: Arguments) -> dict[str, Any] | None:
            prepared = prepare(arguments)
            if prepared is None or mutation.gradients is None:
                return None
            found = mutation.gradients(prepared, cotangents)
            return None if found is None else {n: g for n, g in found.items() if n in arguments}

        return Mutation(
            mutation.class_,
            mutation.says,
            forward=None if mutation.forward is None else forward,
            gradients=None if mutation.gradients is None or finish is not None else gradients,
        )

    kept = [m for m in dense_mutations if m.class_ not in exclude]
    return tuple(m for m in map(adapted, kept) if m.forward is not None or m.gradients is not None)


# ---------------------------------------------------------------------- visibility


def _moved_lengths(step: int) -> Callable[[Steps], Arguments | None]:
    """``key_lengths`` with another end, which leaves the alignment as it was."""

    def change(right: Steps) -> Arguments | None:
        if right.get("key_lengths") is None:
            return None
        lengths = np.clip(right.real_columns[..., 0, 0, 0] + step, 0, right.columns)
        return {"key_lengths": lengths, "align": right.offset[..., 0, 0, 0]}

    return change


def _forgotten(*names: str) -> Callable[[Steps], Any]:
    """Visibility without some of its options."""
    return lambda x: conjunction({n: part for n, part in x.parts().items() if n not in names})


def _misread(name: str, part: Callable[[Steps], Any]) -> Callable[[Steps], Any]:
    """Visibility with one option, where it is in use, read differently."""

    def visible(x: Steps) -> Any:
        parts = x.parts()
        return conjunction({**parts, name: part(x)} if name in parts else parts)

    return visible


_OFFSETS: dict[str, Callable[[Steps], Any]] = {
    "upper left": lambda x: x.per_batch(0, 0),
    "lower right": lambda x: x.real_columns - x.real_rows,
    "lower right of the padded lengths": lambda x: x.per_batch(x.columns - x.rows, 0),
}


def _lead(x: Steps, value: np.ndarray) -> np.ndarray:
    """Ints per batch as an argument again."""
    return np.broadcast_to(value[..., 0, 0, 0], x.lead)


def _aligned(offset: Callable[[Steps], Any]) -> Callable[[Steps], Arguments | None]:
    def change(x: Steps) -> Arguments | None:
        used = x.get("causal") or x.get("window") is not None
        return {"align": _lead(x, offset(x))} if used else None

    return change


def _causal_at(offset: Callable[[Steps], Any]) -> Callable[[Steps], Any]:
    return _misread("causal", lambda x: x.j - x.i - offset(x) <= 0)


def _window(left: int, right: int) -> Callable[[Steps], Any]:
    """The window with its counts changed."""

    def part(x: Steps) -> Any:
        counts = x.get("window")
        return x.within(*(None if n is None else n + more for n, more in zip(counts, (left, right), strict=True)))

    return _misread("window", part)


def _mask_or_causal(x: Steps) -> Any:
    parts = x.parts()
    if not {"mask", "causal"} <= set(parts):
        return conjunction(parts)
    joined = parts.pop("mask") | parts.pop("causal")
    return conjunction({**parts, "joined": joined})


def _pinned(**changes: Any) -> Callable[[Steps], Arguments]:
    """New lengths without moving the diagonal."""
    return lambda x: {**changes, "align": _lead(x, x.offset)}


def _seen_again(visible: Callable[[Steps], Any]) -> Callable[[Steps], np.ndarray]:
    """A backward that recomputes the weights under another visibility, from the lse of the right forward."""

    def recomputed(x: Steps) -> np.ndarray:
        x.seen = np.broadcast_to(visible(x), x.whole) & ~x.hidden
        return np.where(x.seen, np.exp(x.logits - x.full_lse), 0.0)

    return recomputed


def _visibility() -> list[Mutation]:
    made = []
    for place, offset in _OFFSETS.items():
        made += [
            _mistake("causal_other", f"causal and window stand {place}", change=_aligned(offset)),
            _mistake("causal_other", f"the causal diagonal stands {place}", visible=_causal_at(offset)),
            _mistake(
                "causal_bwd_other",
                f"the causal diagonal of the backward stands {place}",
                forward=False,
                recomputed=_seen_again(_causal_at(offset)),
            ),
        ]
    made += [
        _mistake("causal_drop", "causal is ignored", visible=_forgotten("causal")),
        _mistake("causal_strict", "the diagonal is not visible", visible=_misread("causal", lambda x: x.ahead < 0)),
        _mistake("causal_inverted", "only the future is visible", visible=_misread("causal", lambda x: x.ahead > 0)),
        _mistake(
            "causal_inverted",
            "only the diagonal and the future are visible",
            visible=_misread("causal", lambda x: x.ahead >= 0),
        ),
        _mistake("window_drop", "the window is ignored", visible=_forgotten("window")),
        _mistake(
            "window_drop",
            "the left edge of the window is ignored",
            visible=_misread("window", lambda x: x.within(None, x.get("window")[1])),
        ),
        _mistake(
            "window_drop",
            "the right edge of the window is ignored",
            visible=_misread("window", lambda x: x.within(x.get("window")[0], None)),
        ),
        _mistake(
            "window_swapped",
            "left and right are exchanged",
            visible=_misread("window", lambda x: x.within(*x.get("window")[::-1])),
        ),
    ]
    for sides, left, right in (("to the left", 1, 0), ("to the right", 0, 1), ("on both sides", 1, 1)):
        made += [
            _mistake("window_plus1", f"the window sees one key too many {sides}", visible=_window(left, right)),
            _mistake("window_edge", f"the window's edge is not visible {sides}", visible=_window(-left, -right)),
        ]
    made += [
        _mistake("mask_or_causal", 'mask and causal are joined by "or"', visible=_mask_or_causal),
        _mistake("mask_drop", "the mask is ignored", visible=_forgotten("mask")),
        _mistake("pattern_drop", "the pattern is ignored", visible=_forgotten("pattern")),
        _mistake("segments_wrong", "other documents are visible", visible=_forgotten("segments")),
        _mistake("keep_inverted", "True hides", visible=_misread("mask", lambda x: ~np.asarray(x.get("mask")))),
        _mistake("keep_additive", "the mask is added to the logits as 0 and 1", change=_mask_added),
        _mistake("mask_bool_cast", "the bias is cast to bool, nonzero = may attend", change=_bias_as_mask(operator.ne)),
        _mistake("mask_bool_cast", "the bias is cast to bool, nonzero = hidden", change=_bias_as_mask(operator.eq)),
        _mistake("tail_unmasked", "keys beyond key_lengths are seen", change=_pinned(key_lengths=None)),
        _mistake("tail_garbage", "rows beyond query_lengths are computed", change=_pinned(query_lengths=None)),
    ]
    for name in ("mask", "bias"):
        for how, read in _STRIDES.items():
            made.append(_mistake("mask_stride", f"the {name} is read {how}", change=_read_as(name, read)))
    for tile in _TILES:
        made += [
            _mistake(
                "tail_unmasked",
                f"zeros that fill the last tile of {tile} keys are counted",
                change=_padded(tile),
                cut=("k", "v", "bias"),
            ),
            _mistake(
                "tail_dropped", f"keys beyond the last full tile of {tile} are not read", visible=_full_tiles(tile)
            ),
        ]
    for step, says in ((1, "one key beyond key_lengths is seen"), (-1, "the last key of key_lengths is not seen")):
        made.append(_mistake("lengths_off1", says, change=_moved_lengths(step)))
    for name in ("causal", "window", "mask", "pattern", "segments", "key_lengths"):
        made.append(
            _mistake(
                "bwd_mask_dropped",
                f"the backward ignores {name}",
                forward=False,
                recomputed=_seen_again(_forgotten(name)),
            )
        )
    return made


def _mask_added(x: Steps) -> Arguments | None:
    if x.get("mask") is None:
        return None
    bias = 0.0 if x.get("bias") is None else x.array("bias")
    return {"mask": None, "bias": bias + np.asarray(x.get("mask"), dtype=np.float64)}


def _bias_as_mask(compare: Callable[[Any, Any], Any]) -> Callable[[Steps], Arguments | None]:
    def change(x: Steps) -> Arguments | None:
        if x.get("bias") is None:
            return None
        return {"bias": None, "mask": compare(x.array("bias"), 0) & (True if x.get("mask") is None else x.get("mask"))}

    return change


_STRIDES: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # on (b, h, q, k)
    "from batch 0 for all": lambda m: np.broadcast_to(m[:1], m.shape),
    "from head 0 for all": lambda m: np.broadcast_to(m[:, :1], m.shape),
    "with the head's number as its batch": lambda m: np.broadcast_to(
        m[np.arange(m.shape[1]) % len(m), np.arange(m.shape[1])], m.shape
    ),
    "with (batch, head) counted through as its batch": lambda m: np.stack(
        [m[(b * m.shape[1] + np.arange(m.shape[1])) % len(m), np.arange(m.shape[1])] for b in range(len(m))]
    ),
    "transposed": lambda m: transpose(m) if m.shape[-1] == m.shape[-2] else m,
}


def _read_as(name: str, read: Callable[[np.ndarray], np.ndarray]) -> Callable[[Steps], Arguments | None]:
    def change(x: Steps) -> Arguments | None:
        if x.get(name) is None or not math.prod(x.whole):
            return None
        full = np.broadcast_to(np.asarray(x.get(name)), x.whole)
        return {name: read(full.reshape(-1, *x.whole[-3:])).reshape(x.whole)}

    return change


def _padded(tile: int) -> Callable[[Steps], Arguments | None]:
    """Zero keys and values up to a multiple of the tile, hidden by nothing but causal and window."""

    def change(x: Steps) -> Arguments | None:
        more = -x.columns % tile
        if not more or x.get("key_lengths") is not None or x.get("score_mod") is not None:
            return None

        def pad(array: Any, axis: int, value: Any) -> np.ndarray:
            array = np.asarray(array)
            filler = np.full_like(
                array, value, shape=(*array.shape[:axis], more, *array.shape[array.ndim + axis + 1 :])
            )
            return np.concatenate([array, filler], axis=axis)

        stays = {n: part for n, part in x.parts().items() if n in ("mask", "pattern", "segments")}
        mask = pad(np.broadcast_to(conjunction({"": np.ones((), bool), **stays}), x.whole), -1, True)
        changed = {
            "k": pad(x.get("k"), -2, 0),
            "v": pad(x.get("v"), -2, 0),
            "mask": mask,
            "pattern": None,
            "query_segments": None,
            "key_segments": None,
            "align": _lead(x, x.offset),
        }
        if x.get("bias") is not None:
            changed["bias"] = pad(np.broadcast_to(x.array("bias"), x.whole), -1, 0.0)
        if x.get("dropout_mask") is not None:
            changed["dropout_mask"] = pad(np.broadcast_to(x.get("dropout_mask"), x.whole), -1, True)
        return changed

    return change


def _full_tiles(tile: int) -> Callable[[Steps], Any]:
    def visible(x: Steps) -> Any:
        full = x.columns // tile * tile
        return conjunction(x.parts()) & (x.j < (full or x.columns))

    return visible


# ---------------------------------------------------------------------- logits


def _scale(value: Callable[[Steps], float], *, default_only: bool = False) -> Callable[[Steps], Arguments | None]:
    def change(x: Steps) -> Arguments | None:
        return None if default_only and x.get("scale") is not None else {"scale": value(x)}

    return change


def _slopes(first: int) -> Callable[[Steps], Arguments | None]:
    """The geometric list 2**(-8 n / h) with n counted from ``first``."""

    def change(x: Steps) -> Arguments | None:
        if x.get("alibi_slopes") is None:
            return None
        return {"alibi_slopes": 2.0 ** (-8.0 * (np.arange(x.h) + first) / x.h)}

    return change


def _only_channels(count: Callable[[int], int], names: tuple[str, ...]) -> Callable[[Steps], Arguments | None]:
    """Arrays with zeros beyond the first channels."""

    def change(x: Steps) -> Arguments | None:
        changed = {}
        for name in names:
            array = x.array(name)
            size = array.shape[-1]
            if not 0 < count(size) < size:
                return None
            changed[name] = np.where(np.arange(size) < count(size), array, 0.0)
        return changed

    return change


def _padded_scale(multiple: int) -> Callable[[Steps], float]:
    return lambda x: (-(-x.d // multiple) * multiple) ** -0.5


def _whole_blocks(block: int) -> Callable[[int], int]:
    return lambda size: size // block * block


def _below_power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def _if_given(name: str, value: Callable[[Steps], Any]) -> Callable[[Steps], Arguments | None]:
    return lambda x: None if x.get(name) is None else {name: value(x)}


def _cap_masked(x: Steps) -> np.ndarray:
    """Hidden logits went through the cap: -inf became -cap."""
    if x.cap is None:
        return np.where(x.seen, x.logits, -np.inf)
    hidden = -x.cap + np.where(np.isneginf(x.outside), 0.0, x.outside)
    return np.where(x.seen, x.logits, np.where(x.real, hidden, -np.inf))


def _overflowing(x: Steps) -> np.ndarray:
    dot = x.q @ transpose(x.k)
    return np.where(np.abs(dot) > 65504, np.sign(dot) * np.inf, dot) if x.storage == np.float16 else dot


def _logits() -> list[Mutation]:
    made = [
        _mistake("no_scale", "the scale is missing", change=_scale(lambda x: 1.0)),
        _mistake("scale_twice", "the scale is applied twice", change=_scale(lambda x: x.scale**2)),
        _mistake(
            "scale_inv", "multiplied where it should be divided by the scale", change=_scale(lambda x: 1 / x.scale)
        ),
        _mistake(
            "scale_ignored", "d**-0.5 in place of the scale given", change=_if_given("scale", lambda x: x.d**-0.5)
        ),
        _mistake(
            "scale_dmodel",
            "the scale is that of all heads together",
            change=_scale(lambda x: (x.h * x.d) ** -0.5, default_only=True),
        ),
        _mistake(
            "scale_value",
            "the scale is that of the value channels",
            change=_scale(lambda x: x.e**-0.5, default_only=True),
        ),
        _mistake(
            "scale_padded",
            "the scale is that of d padded to a power of two",
            change=_scale(lambda x: (1 << (x.d - 1).bit_length()) ** -0.5, default_only=True),
        ),
        _mistake("qk_overflow", "q.k overflows float16 before the scale", dots=_overflowing),
        _mistake("cap_drop", "the soft cap is ignored", change=_if_given("softcap", lambda x: None)),
        _mistake(
            "cap_before_scale",
            "the cap is taken before the scale",
            change=_if_given("softcap", lambda x: x.cap * x.scale),
            without=("scale",),
        ),
        _mistake("cap_after_mask", "hidden logits of -inf become -cap", masked=_cap_masked),
        _mistake(
            "cap_after_mask",
            "the cap is taken around logits, bias and mask",
            change=lambda x: {"softcap_after_bias": True},
            masked=_cap_masked,
        ),
        _mistake(
            "cap_after_bias",
            "the cap is taken around logits plus bias, or around logits alone where it should be so",
            change=lambda x: {"softcap_after_bias": not x.get("softcap_after_bias")},
        ),
        _mistake(
            "cap_formula",
            "x tanh(x / cap)",
            capped=lambda x: x.inside * np.tanh(x.inside / x.cap),
            bend=lambda x: np.tanh(x.inside / x.cap) + x.inside / x.cap * (1 - np.tanh(x.inside / x.cap) ** 2),
            without=("softcap",),
        ),
        _mistake(
            "cap_formula",
            "tanh(x / cap), not multiplied by the cap",
            capped=lambda x: np.tanh(x.inside / x.cap),
            gradients=False,
        ),
        _mistake("cap_bwd_drop", "the backward lacks 1 - tanh**2", forward=False, bend=lambda x: np.ones(x.whole)),
        _mistake(
            "cap_bwd_drop",
            "the backward takes 1 - tanh**2 of the capped logits",
            forward=False,
            bend=lambda x: 1 - np.tanh(np.tanh(x.inside / x.cap)) ** 2,
        ),
        _mistake("alibi_drop", "the slopes are ignored", change=_if_given("alibi_slopes", lambda x: None)),
        _mistake("alibi_geom", "the slopes are one geometric sequence", change=_slopes(1)),
        _mistake("alibi_off1", "the exponent of the slopes starts at 0", change=_slopes(0)),
        _mistake("alibi_nooffset", "distances are counted from the upper left", distance=lambda x: np.abs(x.j - x.i)),
        _mistake("alibi_signed", "future keys get a bonus", distance=lambda x: -x.ahead),
        _mistake("alibi_signed", "every distance is a bonus", distance=lambda x: -np.abs(x.ahead)),
        _mistake("bias_drop", "the bias is ignored", change=_if_given("bias", lambda x: None)),
        _mistake(
            "bias_scaled", "the bias is scaled too", change=_if_given("bias", lambda x: x.array("bias") * x.scale)
        ),
        _mistake(
            "bias_nooffset",
            "the bias is read k - q keys too far to the left",
            change=_if_given("bias", lambda x: np.roll(x.array("bias"), x.columns - x.rows, axis=-1)),
        ),
        _mistake(
            "bias_nooffset",
            "the bias is read k - q keys too far to the right",
            change=_if_given("bias", lambda x: np.roll(x.array("bias"), x.rows - x.columns, axis=-1)),
        ),
        _mistake("score_mod_drop", "score_mod is not called", change=_if_given("score_mod", lambda x: None)),
        _mistake("gqa_tile", "the heads are mapped the other way", change=_other_heads),
        _mistake("gqa_axis", "the key heads are repeated along the positions", change=_repeated_positions),
        _mistake(
            "swap_kv",
            "k and v are exchanged",
            change=lambda x: {"k": x.get("v"), "v": x.get("k")} if x.d == x.e else None,
        ),
    ]
    for multiple in (8, 16, 32, 64, 128):
        made.append(
            _mistake(
                "scale_padded",
                f"the scale is that of d padded to a multiple of {multiple}",
                change=_scale(_padded_scale(multiple), default_only=True),
            )
        )
    counts: list[tuple[str, Callable[[int], int]]] = [("the power of two below d", _below_power_of_two)]
    counts += [(f"whole blocks of {n}", _whole_blocks(n)) for n in (4, 16, 32, 64)]
    for which, count in counts:
        made += [
            _mistake("d_truncated", f"q.k over {which} only", change=_only_channels(count, ("q", "k")), cut=("q", "k")),
            _mistake("d_truncated", f"values of {which} only", change=_only_channels(count, ("v",))),
        ]
    return made


def _other_heads(x: Steps) -> Arguments:
    return {"head_map": "repeat" if x.tiled_heads else "tile"}


def _repeated_positions(x: Steps) -> Arguments | None:
    """Laid out (length, head, channel), the length repeated h / g times, then cut into h heads again."""
    if x.g == x.h:
        return None
    changed = {}
    for name in ("k", "v"):
        array = np.swapaxes(x.array(name), -2, -3)
        tiled = np.concatenate([array] * (x.h // x.g), axis=-3)
        changed[name] = np.swapaxes(tiled.reshape(*array.shape[:-3], x.columns, x.h, array.shape[-1]), -2, -3)
    return changed


# ---------------------------------------------------------------------- softmax


def _kernel_dtype(x: Steps) -> Any:
    """What a kernel computes in when its inputs are stored as these are."""
    return np.float64 if x.storage == np.float64 else np.float32


def _filled(value: float, *, added: bool = False) -> Callable[[Steps], np.ndarray]:
    """Hidden logits replaced by a finite number, or with it added (in the precision of the kernel)."""

    def masked(x: Steps) -> np.ndarray:
        kernel = _kernel_dtype(x)
        hidden = np.full(x.whole, value)
        if added:
            hidden = (np.where(np.isfinite(x.logits), x.logits, 0.0).astype(kernel) + kernel(value)).astype(np.float64)
        return np.where(x.seen, x.logits, np.where(x.real, hidden, -np.inf))

    return masked


def _in_range(x: np.ndarray, steps: Steps) -> np.ndarray:
    """exp in the range of the arithmetic: float32 for inputs of up to four bytes."""
    top, least = (88.7, -103.9) if steps.storage.itemsize <= 4 else (709.7, -745.1)
    return np.where(x > top, np.inf, np.where(x < least, 0.0, np.exp(np.minimum(x, top))))


def _floored(floor: float) -> dict[str, Any]:
    """A running maximum that starts at ``floor``: the exponentials underflow in the precision of the kernel."""

    def exponentials(x: Steps) -> tuple[np.ndarray, np.ndarray]:
        kernel = _kernel_dtype(x)
        return tuple(np.exp(a - x.shift).astype(kernel).astype(np.float64) for a in (x.faced, x.sinks))

    return {"maximum": lambda x: np.maximum(Steps.maximum(x), floor), "exponentials": exponentials}


def _empty(x: Steps) -> np.ndarray:
    return x.real & (x.total == 0)


def _nan_weights(x: Steps) -> np.ndarray:
    return np.where(_empty(x), np.nan, Steps.normalized(x))


def _nan_lse(x: Steps) -> np.ndarray:
    return np.where(_empty(x), np.nan, Steps.log_sum(x))


def _empty_lse(value: float) -> Callable[[Steps], np.ndarray]:
    return lambda x: np.where(_empty(x)[..., 0], value, x.lse)


def _leaking(x: Steps) -> np.ndarray:
    return (x.weights * x.kept) @ x.v


def _additive(x: Steps) -> np.ndarray:
    return x.logits + np.where(x.seen, 0.0, -np.inf)


def _running(x: Steps, tile: int) -> np.ndarray:
    """For each key the maximum that an online softmax has reached at the end of its tile."""
    end = np.minimum((np.arange(x.columns) // tile + 1) * tile, x.columns) - 1
    top = np.take(np.maximum.accumulate(x.faced, axis=-1), end, axis=-1)
    return np.where(np.isneginf(top), 0.0, top)


def _unscaled_output(tile: int) -> Callable[[Steps], np.ndarray]:
    return lambda x: divide(np.exp(x.faced - _running(x, tile)), x.total)


def _unscaled_sums(tile: int) -> Callable[[Steps], tuple[np.ndarray, np.ndarray]]:
    def exponentials(x: Steps) -> tuple[np.ndarray, np.ndarray]:
        return np.exp(x.faced - _running(x, tile)), np.exp(x.sinks - x.shift)

    return exponentials


def _last_maximum(tile: int) -> Callable[[Steps], np.ndarray]:
    def log_sum(x: Steps) -> np.ndarray:
        last = x.faced[..., max(0, x.columns - 1) // tile * tile :].max(-1, keepdims=True, initial=-np.inf)
        return Steps.log_sum(x) - x.shift + last

    return log_sum


def _over_queries(x: Steps) -> np.ndarray:
    p = np.exp(x.faced - np.where(np.isneginf(x.faced), 0.0, x.faced).max(-2, keepdims=True, initial=-np.inf))
    return divide(p, p.sum(-2, keepdims=True))


def _pull_over_queries(x: Steps, weights: Any, kept: Any, d_weights: Any, d_output: Any) -> np.ndarray:
    return weights * (kept * d_weights - (weights * kept * d_weights).sum(-2, keepdims=True))


def _sinks_regrouped(x: Steps) -> np.ndarray:
    sinks = x.array("sinks")
    return sinks.reshape(x.g, x.h // x.g, *sinks.shape[1:]).swapaxes(0, 1).reshape(sinks.shape)


def _with_lse(lse: Callable[[Steps], np.ndarray]) -> Callable[[Steps], np.ndarray]:
    """A backward that recomputes the weights from a wrong lse."""
    return lambda x: np.where(x.seen, np.exp(x.logits - lse(x)), 0.0)


def _softmax() -> list[Mutation]:
    single = float(np.finfo(np.float32).max)
    made = [
        _mistake("empty_row_nan", "a row without keys is NaN", normalized=_nan_weights, log_sum=_nan_lse),
        _mistake("empty_row_nan", "the output of a row without keys is NaN", normalized=_nan_weights),
        _mistake(
            "merge_empty", "the lse of a row without keys is +inf", stored_lse=_empty_lse(np.inf), gradients=False
        ),
        _mistake("merge_empty", "the lse of a row without keys is 0", stored_lse=_empty_lse(0.0), gradients=False),
        _mistake("masked_value_leak", "0 times a hidden NaN enters the output", contracted=_leaking, gradients=False),
        _mistake("masked_value_leak", "a hidden NaN logit stays NaN under -inf", masked=_additive, gradients=False),
        _mistake("max_clamped0", "the running maximum starts at 0", **_floored(0.0)),
        _mistake(
            "unshifted_softmax",
            "the maximum is not subtracted before exp, which overflows or underflows in the arithmetic's range",
            maximum=lambda x: np.zeros_like(x.faced.max(-1, keepdims=True, initial=0.0)),
            exponentials=lambda x: (_in_range(x.faced, x), _in_range(x.sinks, x)),
            normalized=lambda x: np.where((x.faced != -np.inf).any(-1, keepdims=True), x.p / x.total, 0.0),
            gradients=False,
        ),
        _mistake("sink_drop", "the sinks are ignored", change=_if_given("sinks", lambda x: None)),
        _mistake(
            "sink_drop", "the sinks get no gradient", forward=False, sinks_pull=lambda x, p, d_lse: np.zeros(p.shape)
        ),
        _mistake(
            "sink_unshifted",
            "the maximum is not subtracted from the sinks",
            maximum=lambda x: x.faced.max(-1, keepdims=True, initial=-np.inf),
            exponentials=lambda x: (np.exp(x.faced - x.shift), np.exp(x.sinks)),
        ),
        _mistake(
            "sink_twice",
            "the sinks are counted twice",
            exponentials=lambda x: (np.exp(x.faced - x.shift), 2 * np.exp(x.sinks - x.shift)),
        ),
        _mistake(
            "sink_heads", "the sinks are laid out by group, not by head", change=_if_given("sinks", _sinks_regrouped)
        ),
        _mistake(
            "sink_lse",
            "the lse leaves the sinks out, or counts them where it should not",
            change=_sink_convention,
        ),
        _mistake(
            "sink_lse",
            "the backward recomputes the weights from an lse without the sinks",
            forward=False,
            recomputed=_with_lse(lambda x: x.shift + np.log(x.p.sum(-1, keepdims=True))),
        ),
        _mistake(
            "lse_base2",
            "the lse is a logarithm to base 2",
            stored_lse=lambda x: x.lse / math.log(2),
            cotangents=_divided_lse,
        ),
        _mistake(
            "lse_base2",
            "the backward takes an lse to base 2 for a natural one",
            forward=False,
            recomputed=_with_lse(lambda x: x.full_lse / math.log(2)),
        ),
        _mistake(
            "exp2_nolog2e",
            "2**x in place of e**x",
            exponentials=lambda x: (np.exp2(x.faced - x.shift), np.exp2(x.sinks - x.shift)),
        ),
        _mistake(
            "exp2_nolog2e",
            "2**x in place of e**x, and the lse in base 2",
            exponentials=lambda x: (np.exp2(x.faced - x.shift), np.exp2(x.sinks - x.shift)),
            stored_lse=lambda x: np.where(np.isneginf(x.lse), x.lse, (x.shift + np.log2(x.total))[..., 0]),
            gradients=False,
        ),
        _mistake("lse_layout", "the lse is (..., q, h)", stored_lse=lambda x: transpose(x.lse), gradients=False),
        _mistake(
            "softmax_wrong_axis",
            "the softmax runs over the queries",
            normalized=_over_queries,
            softmax_pull=_pull_over_queries,
        ),
        _mistake("drop_ignored", "no weight is dropped", change=lambda x: {"dropout_mask": None, "dropout_rate": 0.0}),
        _mistake("drop_scale", "kept weights are not scaled up", change=lambda x: {"dropout_rate": 0.0}),
        _mistake("drop_rowsum", "dropped weights are missing from the row sum", row_sum=_kept_sum),
    ]
    fills = {
        "-1e4": -1e4,
        "-5e4": -5e4,
        "-65504": -65504.0,
        "-1e9": -1e9,
        "-1e30": -1e30,
        "-0.7 float32 max": -0.7 * single,
        "-float32 max": -single,
    }
    for name, fill in fills.items():
        made.append(_mistake("finite_sentinel", f"hidden logits are {name}, not -inf", masked=_filled(fill)))
        if fill >= -1e9:
            made += [
                _mistake("finite_sentinel", f"{name} is added to hidden logits", masked=_filled(fill, added=True)),
                _mistake("finite_sentinel", f"the running maximum starts at {name}", **_floored(fill)),
            ]
    for tile in _TILES:
        made += [
            _mistake(
                "rescale_missing",
                f"the output is not rescaled from tile to tile of {tile} keys",
                normalized=_unscaled_output(tile),
                gradients=False,
            ),
            _mistake(
                "rescale_missing",
                f"output and row sum are not rescaled from tile to tile of {tile} keys",
                exponentials=_unscaled_sums(tile),
                gradients=False,
            ),
            _mistake(
                "lse_partial_max",
                f"the lse has the maximum of the last tile of {tile} keys",
                log_sum=_last_maximum(tile),
                gradients=False,
            ),
        ]
    return made


def _sink_convention(x: Steps) -> Arguments | None:
    return None if x.get("sinks") is None else {"lse_includes_sinks": x.get("lse_includes_sinks") is False}


def _divided_lse(x: Steps, d_output: Any, d_lse: Any) -> tuple[np.ndarray, np.ndarray]:
    d_output, d_lse = Steps.cotangents(x, d_output, d_lse)
    return d_output, d_lse / math.log(2)


def _kept_sum(x: Steps) -> np.ndarray:
    keep = x.get("dropout_mask")
    p = x.p if keep is None else x.p * np.asarray(keep)
    return p.sum(-1, keepdims=True) + x.s.sum(-1, keepdims=True)


# ---------------------------------------------------------------------- backward alone


def _last(size: int, tile: int) -> np.ndarray:
    return np.arange(size) >= max(0, size - 1) // tile * tile


def _undropped_delta(x: Steps, weights: Any, kept: Any, d_weights: Any, d_output: Any) -> np.ndarray:
    delta = (d_output * product(weights, x.v, x.seen)).sum(-1, keepdims=True)
    return weights * (kept * d_weights - np.where(x.real, delta, 0.0))


def _copied_axes(d: np.ndarray, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of ``d`` along which an argument of this shape is stretched."""
    full = (1,) * (d.ndim - len(shape)) + tuple(shape)
    return tuple(a for a, n in enumerate(full) if n == 1 and d.shape[a] != 1)


def _bias_copy(which: slice) -> Callable[..., np.ndarray]:
    def pull(x: Steps, d: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        axes = _copied_axes(d, shape)
        return d[tuple(which if a in axes else slice(None) for a in range(d.ndim))].reshape(shape)

    return pull


def _bias_mean(x: Steps, d: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return d.mean(_copied_axes(d, shape)).reshape(shape)


def _backward() -> list[Mutation]:
    def only(class_: str, says: str, **steps: Any) -> Mutation:
        return _mistake(class_, says, forward=False, **steps)

    made = [
        only("dout_ignored", "the cotangent of the output is taken for ones", cotangents=_ones),
        only(
            "dlse_ignored",
            "the cotangent of the lse is ignored",
            cotangents=lambda x, d_output, d_lse: Steps.cotangents(x, d_output, None),
        ),
        only("delta_missing", "dS lacks the row term", softmax_pull=lambda x, w, kept, d_w, d_o: w * kept * d_w),
        only("delta_missing", "the row term comes from the undropped output", softmax_pull=_undropped_delta),
        only(
            "grad_sign",
            "the row term has the wrong sign",
            softmax_pull=lambda x, w, kept, d_w, d_o: w * (kept * d_w + x.delta),
        ),
        only(
            "grad_sign", "dS has the wrong sign", softmax_pull=lambda x, w, kept, d_w, d_o: w * (x.delta - kept * d_w)
        ),
        only("scale_grad", "dQ and dK lack the scale", scale_again=lambda x: 1.0),
        only("scale_grad", "dQ and dK have the scale twice", scale_again=lambda x: x.scale**2),
        only(
            "gqa_grad_nosum",
            "dK and dV are those of a group's first head",
            over_group=lambda x, d: x.by_group(d, x.tiled_heads)[0],
        ),
        only(
            "gqa_grad_nosum",
            "dK and dV are those of a group's last head",
            over_group=lambda x, d: x.by_group(d, x.tiled_heads)[-1],
        ),
        only(
            "gqa_grad_nosum",
            "dK and dV are the mean over a group",
            over_group=lambda x, d: x.by_group(d, x.tiled_heads).mean(0),
        ),
        only(
            "gqa_tile",
            "dK and dV are summed over the other map of heads",
            over_group=lambda x, d: x.by_group(d, not x.tiled_heads).sum(0),
        ),
        only(
            "drop_bwd_scale",
            "the backward scales kept weights by the rate",
            kept_again=lambda x: x.keep * (x.rate or 1.0),
        ),
        only("drop_bwd_scale", "the backward does not scale kept weights up", kept_again=lambda x: x.keep),
        only("drop_mask_mismatch", "the backward drops nothing", kept_again=lambda x: np.ones(x.whole)),
        only(
            "drop_softmax_bwd",
            "the derivative of the softmax uses the dropped weights",
            softmax_pull=lambda x, w, kept, d_w, d_o: w * kept * (d_w - x.delta),
        ),
        only("bias_grad", "the gradient of the bias is that of its first copy", bias_pull=_bias_copy(slice(0, 1))),
        only("bias_grad", "the gradient of the bias is that of its last copy", bias_pull=_bias_copy(slice(-1, None))),
        only("bias_grad", "the gradient of the bias is the mean over its copies", bias_pull=_bias_mean),
        only(
            "bias_grad",
            "the gradient of the bias is scaled",
            bias_pull=lambda x, d, shape: x.scale * sum_to_shape(d, shape),
        ),
    ]
    for tile in _TILES:
        made += [
            only(
                "grad_overwritten",
                f"dK and dV are those of the last tile of {tile} queries",
                pull_k=lambda x, d, seen, n=tile: Steps.pull_k(x, d * _last(x.rows, n)[:, None], seen),
                pull_v=lambda x, w, d, seen, n=tile: Steps.pull_v(x, w * _last(x.rows, n)[:, None], d, seen),
            ),
            only(
                "grad_overwritten",
                f"dQ is that of the last tile of {tile} keys",
                pull_q=lambda x, d, seen, n=tile: Steps.pull_q(x, d * _last(x.columns, n), seen),
            ),
            only(
                "dv_block_nosum",
                f"dQ and dK see the last block of {tile} value channels only",
                value_cotangent=lambda x, d, n=tile: d * _last(x.e, n),
            ),
            only(
                "dv_block_nosum",
                f"dQ and dK see the first block of {tile} value channels only",
                value_cotangent=lambda x, d, n=tile: d * (np.arange(x.e) < n),
            ),
        ]
    return made


def _ones(x: Steps, d_output: Any, d_lse: Any) -> tuple[np.ndarray, np.ndarray]:
    return Steps.cotangents(x, np.ones(x.output.shape), d_lse)


dense_mutations: tuple[Mutation, ...] = (*_visibility(), *_logits(), *_softmax(), *_backward())
"""Every mistake; several of one class where its numbers depend on a tile size or a constant."""
