"""Bounds from legal evaluation orders of refattn itself in the candidate's precision."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from refattn import arrays, precision
from refattn.verification.probes import storage_dtype
from refattn.verification.question import Question, floating

__all__ = ["accumulation", "noisy_row_term", "orders", "spread"]


def orders(question: Question, exact: dict[str, Any], values: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """The mechanism in the candidate's precision, in several legal orders; results rounded to the storage dtype."""
    name = question.precision
    compute = np.dtype(np.float32) if arrays.is_half(name) else storage_dtype(name)
    cast = {n: x.astype(compute) if floating(x) else x for n, x in exact.items()}
    cotangents = {n: x.astype(compute) for n, x in question.cotangents.items()}
    algorithms = ("whole", "tiled") if "algorithm" in question.mechanism._wants else ("auto",)
    for algorithm in algorithms:
        yield _stored(question.answer(cast, cotangents, algorithm=algorithm), name)
    if len(algorithms) == 1:  # no second order of its own: arrays a last bit away show what rounding does to the call
        yield _stored(question.answer(_a_bit_away(question, cast), cotangents), name)
    for alone in (True, False):
        if _is_legal(question, exact, values, alone):
            yield _stored(_reordered(question, cast, cotangents, alone), name)
            break
    if arrays.is_half(name):
        xp = _RoundedOperands(name, _channels(cast))
        inside = {n: _inside(xp, n, x) for n, x in cast.items()}
        yield _stored(question.answer(inside, {n: xp.asarray(x) for n, x in cotangents.items()}), name)


def _a_bit_away(question: Question, cast: dict[str, Any]) -> dict[str, Any]:
    """Every other entry of the positional arrays moved to the next number above it."""
    rng = np.random.default_rng(0)
    moved = {n: cast[n] for n in question.mechanism.positional if floating(cast.get(n))}
    with np.errstate(over="ignore"):
        return cast | {
            n: np.where(rng.random(x.shape) < 0.5, np.nextafter(x, x.dtype.type(np.inf)), x) for n, x in moved.items()
        }


def _channels(arguments: Mapping[str, Any]) -> frozenset[int]:
    """Channel counts of q, k, v that are no length of a sequence too."""
    given = [x for n in ("q", "k", "v") if isinstance(x := arguments.get(n), np.ndarray) and x.ndim >= 2]
    return frozenset(x.shape[-1] for x in given) - {x.shape[-2] for x in given}


def _inside(xp: Any, name: str, x: Any) -> Any:
    """An argument for an instrumented namespace; lengths and offsets are lists there, they stay on the host."""
    if not isinstance(x, np.ndarray):
        return x
    return x.tolist() if name in ("query_lengths", "key_lengths", "align") else xp.asarray(x)


def _stored(values: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    kind = storage_dtype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return {n: x if n == "lse" or x.ndim == 0 else x.astype(kind) for n, x in values.items()}


def _reordered(question: Question, cast: dict[str, Any], cotangents: Any, alone: bool) -> dict[str, np.ndarray]:
    """Channels in reverse order: of q and k ``alone``, with the scale folded into q, or of every array that has them."""
    q, k = cast["q"], cast["k"]
    if not alone:
        turned = [n for n, x in cast.items() if n != "v" and floating(x) and x.shape[-1:] == q.shape[-1:]]
        values = question.answer(cast | {n: cast[n][..., ::-1] for n in turned}, cotangents)
        return values | {f"d_{n}": values[f"d_{n}"][..., ::-1] for n in turned if f"d_{n}" in values}
    scale = q.dtype.type(q.shape[-1] ** -0.5 if cast.get("scale") is None else cast["scale"])
    folded = {**cast, "q": (q * scale)[..., ::-1], "k": k[..., ::-1], "scale": 1.0}
    values = question.answer(folded, cotangents)
    values.pop("d_scale", None)
    if "d_q" in values:
        values["d_q"] = values["d_q"][..., ::-1] * scale
    if "d_k" in values:
        values["d_k"] = values["d_k"][..., ::-1]
    return values


_legal: dict[tuple[str, frozenset[str], bool], bool] = {}


def _is_legal(question: Question, exact: dict[str, Any], values: dict[str, np.ndarray], alone: bool) -> bool:
    """Whether a reordering is the same function: not where other arrays carry the channels or the scale too.

    Tried once per mechanism and set of arguments.
    """
    mechanism = question.mechanism
    if not {"q", "k", "v"} <= set(mechanism.positional) or not {"scale", "keep_weights"} <= set(mechanism.options):
        return False
    key = (mechanism.name, frozenset(exact), alone)
    if key not in _legal:
        reordered = _reordered(question, exact, question.cotangents64, alone)
        _legal[key] = all(_same(x, values[name]) for name, x in reordered.items())
    return _legal[key]


def _same(x: np.ndarray, right: np.ndarray) -> bool:
    finite = np.isfinite(right)
    size = np.max(np.abs(right[finite]), initial=0.0)
    with np.errstate(invalid="ignore"):
        return not np.any(np.abs(x - right)[finite] > 1e-6 * size + TINY)


class _RoundedOperands(precision.Instrumented):
    """float32 arithmetic with matrix products whose operands are rounded to a narrow format, as tensor cores work.

    Weights and logit cotangents are thus rounded to the storage dtype before they meet values, keys and queries.
    Products over channels have inputs of the call as operands, which are in the storage dtype already; they are left
    alone, because refattn multiplies q by the scale first.
    """

    def __init__(self, dtype: str, channels: frozenset[int]) -> None:
        super().__init__(f"rounded_operands_{dtype}", np)
        self._dtype, self._channels = dtype, channels

    def apply(self, name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "matmul" and args[0].shape[-1] not in self._channels:
            args = tuple(self.asarray(precision.round_to(self.unwrap(x), self._dtype)) for x in args)
        return super().apply(name, function, *args, **kwargs)

    def finish(self, name: str, args: tuple, raw: Any) -> Any:
        return raw


def noisy_row_term(question: Question, exact: dict[str, Any], result: Any, pullback: Any) -> dict[str, np.ndarray]:
    """Gradients when the row term (sum of d_output * output) comes from an output rounded to the storage dtype.

    An error of that term acts like a cotangent of the lse.  It is what keeps gradients that cancel exactly (a row with
    one key) from getting the bound 0.
    """
    cotangents = question.cotangents64
    if pullback is None or "lse" not in question.mechanism.outputs or "output" not in cotangents:
        return {}
    output, lse = np.asarray(result.output), np.asarray(result.lse)
    size = np.sqrt(np.sum(np.square(cotangents["output"] * np.where(np.isfinite(output), output, 0.0)), axis=-1))
    if size.shape != lse.shape:
        return {}
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size.shape)
    unit = precision.unit_roundoff(question.precision)
    unit += math.sqrt(output.shape[-1]) * accumulation(question.precision)
    noise = np.where(np.isfinite(lse), unit * size * signs, 0.0)
    turned = {**cotangents, "lse": cotangents.get("lse", np.zeros(lse.shape)) + noise}
    return {n: x for n, x in question.read(result, pullback, exact, turned).items() if n.startswith("d_")}


def spread(truth: np.ndarray, runs: Sequence[np.ndarray], stored: float, accumulate: float) -> np.ndarray:
    """Per-element bound from the errors of several runs."""
    finite = np.isfinite(truth)
    level = np.where(finite, truth, 0.0)
    squares = np.zeros(truth.shape)
    for run in runs:
        with np.errstate(invalid="ignore", over="ignore"):
            squares = squares + np.square(np.where(finite & np.isfinite(run), run - level, 0.0))
    squares = squares / max(len(runs), 1)
    rows = np.mean(squares, axis=-1, keepdims=True) if truth.ndim and truth.shape[-1] else squares
    typical = float(np.mean(rows)) if rows.size else 0.0
    size = math.sqrt(np.mean(np.square(level))) if level.size else 0.0
    return np.sqrt(squares + rows + 0.5 * typical + np.square(stored * level) + np.square(accumulate * size) + TINY)


TINY = float(np.finfo(np.float32).tiny)


def accumulation(dtype: str) -> float:
    return precision.unit_roundoff("float32" if arrays.is_half(dtype) else dtype)
