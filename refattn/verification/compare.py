"""Errors, bounds and the verdict: how far a candidate's arrays are from the truth, in units of what rounding explains.

The truth is the mechanism in float64 on the candidate's own rounded inputs.  An element's error is divided by its bound,
and an array passes when both statistics stay within the thresholds of its dtype: the *maximum* over elements (nothing
stands out) and the *median* (nothing is off everywhere).

Bounds
------
``derived``
    ``output`` of a mechanism whose output is weights times values: the root-sum-square forward bound of
    :func:`refattn.precision.output_bound`.  Its worst-case form is reported beside it: beyond it no rounding explains
    the error.  It is never a permission.
``spread``
    Everything else: the error of refattn itself in the candidate's precision over legal evaluation orders (whole and
    tiled, channels in another order with the scale folded into q, matrix products whose operands are rounded to the
    storage dtype, the row term of the softmax derivative from a rounded output).  The squared errors of these runs are
    averaged, and joined with the mean over the row and over the array, so that an order that was lucky in one
    element cannot fail a right kernel.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from refattn import arrays, precision
from refattn.mechanism import Mechanism
from refattn.verification import conventions as conventions_
from refattn.verification.conventions import Conventions
from refattn.verification.probes import storage_dtype

__all__ = [
    "THRESHOLDS",
    "Judgement",
    "Question",
    "ReferenceNaNError",
    "Truth",
    "axes_of",
    "counted",
    "judge",
    "locate",
    "passes",
    "ratio",
    "statistics",
    "truth_of",
]

THRESHOLDS: dict[str, dict[str, tuple[float, float]]] = {
    "float64": {"derived": (4.0, 0.75), "spread": (64.0, 3.0)},
    "float32": {"derived": (4.0, 0.75), "spread": (24.0, 2.0)},
    "float16": {"derived": (4.0, 0.75), "spread": (24.0, 2.0)},
    "bfloat16": {"derived": (4.0, 0.75), "spread": (24.0, 2.0)},
}
"""Largest maximum and median of error/bound that pass, per dtype and kind of bound.

Reproduced by ``pytest tests/verification/test_compare.py -k calibration -s``, which runs independent right kernels over all probes
in every dtype and prints the largest statistics seen; the thresholds leave a factor of about two.
"""

FEW = 32
"""Below so many elements the median says no more than the maximum: only the maximum decides."""


class ReferenceNaNError(RuntimeError):
    """refattn itself gave a NaN where no input explains one: an error of this library, never a verdict."""


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Verdict on one array."""

    array: str
    verdict: str  # "ok" | "mismatch" | "not provided" | "not checked"
    maximum: float = 0.0
    median: float = 0.0
    bound: str = ""
    certain: bool = False
    says: str = ""
    where: dict[str, Any] = dataclasses.field(default_factory=dict)
    limits: tuple[float, float] = (math.inf, math.inf)  # of maximum and median

    @property
    def ok(self) -> bool:
        return self.verdict != "mismatch"


# ---------------------------------------------------------------------- truth


@dataclasses.dataclass(frozen=True)
class Question:
    """One call as the candidate gets it: rounded arrays, and the conventions after which it is to be answered."""

    mechanism: Mechanism
    arrays: dict[str, Any]
    options: dict[str, Any]
    cotangents: dict[str, np.ndarray]
    wrt: tuple[str, ...]
    dtype: str
    conventions: Conventions = dataclasses.field(default_factory=Conventions)
    takes: frozenset[str] = frozenset()
    backend: str | None = None

    @property
    def precision(self) -> str:
        """Dtype whose rounding the candidate's arithmetic shows."""
        return "float32" if self.conventions.compute == "float32" and self.dtype == "float64" else self.dtype

    def arguments(self, conventions: Conventions | None = None, *, exact: bool = True) -> dict[str, Any]:
        """Arguments of the mechanism, floating arrays in float64 unless ``exact`` is False."""
        key = (conventions, exact)
        if key not in self._made:
            follow = conventions or self.conventions
            taken = self.takes.__contains__ if conventions is None else lambda name: False
            given = conventions_.reference_arguments(self.mechanism, self.arrays, self.options, follow, taken)
            self._made[key] = {n: _float64(x) if exact and _floating(x) else x for n, x in given.items()}
        return dict(self._made[key])

    @functools.cached_property
    def cotangents64(self) -> dict[str, np.ndarray]:
        return {n: _float64(x) for n, x in self.cotangents.items()}

    @functools.cached_property
    def _made(self) -> dict[Any, dict[str, Any]]:
        return {}

    def answer(
        self, arguments: Mapping[str, Any], cotangents: Any, conventions: Conventions | None = None, **how: Any
    ) -> dict[str, np.ndarray]:
        """Results and gradients by array name, as a candidate of these conventions should give them."""
        result, pullback = self.vjp(arguments, **how)
        return self.read(result, pullback, arguments, cotangents, conventions)

    def vjp(self, arguments: Mapping[str, Any], **how: Any) -> tuple[Any, Any]:
        """The mechanism's own Result, and its pullback where gradients are wanted."""
        if self.backend is not None:
            how.setdefault("backend", self.backend)
        with np.errstate(all="ignore"):
            if self.wrt and self.cotangents:
                return self.mechanism.vjp(**arguments, **how)
            return self.mechanism.forward(**arguments, **how), None

    def read(
        self,
        result: Any,
        pullback: Any,
        arguments: Mapping[str, Any],
        cotangents: Mapping[str, Any],
        conventions: Conventions | None = None,
    ) -> dict[str, np.ndarray]:
        """A Result and its gradients in the conventions asked for, as NumPy arrays."""
        follow = conventions or self.conventions
        host = {n: arrays.to_numpy(x) if arrays.is_array(x) else x for n, x in arguments.items()}
        values = conventions_.reference_result(result, host, follow)
        values = {n: x for n, x in values.items() if n in self.mechanism.outputs}
        if pullback is not None:
            with np.errstate(all="ignore"):
                gradients = pullback(**conventions_.reference_cotangents(cotangents, follow))
            plain = {n: arrays.to_numpy(x) for n, x in cotangents.items()}
            wanted = conventions_.reference_gradients(gradients, result, host, plain, follow, self.options)
            values |= {f"d_{n}": x for n, x in wanted.items() if n in self.wrt}
        return values


@dataclasses.dataclass(frozen=True)
class Truth:
    """What is right: values and bounds by array name (``output``, ``lse``, ``d_q`` ...).

    ``worst`` holds the worst-case bound where one is derived, ``kinds`` the kind of each bound, ``open`` the elements
    that the conventions leave to the implementation (True = not compared; the whole array: not checked).
    """

    question: Question
    values: dict[str, np.ndarray]
    bounds: dict[str, np.ndarray]
    worst: dict[str, np.ndarray]
    kinds: dict[str, str]
    open: dict[str, np.ndarray]


def _floating(x: Any) -> bool:
    return isinstance(x, np.ndarray) and arrays.is_real_floating(x.dtype)


def _float64(x: Any) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.asarray(x).astype(np.float64)


def truth_of(question: Question) -> Truth:
    """Truth and bounds of one call.

    Raises
    ------
    ReferenceNaNError
        If the float64 reference has a NaN that no input explains.
    """
    follow, mechanism = question.conventions, question.mechanism
    exact, cotangents = question.arguments(), question.cotangents64
    # The weights come with the same call; after dropout they are no softmax, so then they are asked for apart.
    keep = {"keep_weights": True} if _bounded(mechanism) and exact.get("dropout_mask") is None else {}
    result, pullback = question.vjp(exact, **keep)
    native = dataclasses.replace(question, conventions=Conventions()).read(result, pullback, exact, cotangents)
    for name, x in native.items():
        if np.isnan(x).any() and not _nan_is_due(mechanism, exact):
            shapes = ", ".join(f"{n} {np.shape(x)}" for n, x in exact.items() if isinstance(x, np.ndarray))
            raise ReferenceNaNError(f"{mechanism.name}: NaN in {name} of the reference ({shapes}): an error of refattn")
    values = {n: _float64(x) for n, x in question.read(result, pullback, exact, cotangents).items()}
    left_open = dict(conventions_.open_elements(result, exact, follow))
    if conventions_.gradients_open(result, exact, follow):
        left_open |= {n: np.ones(x.shape, dtype=bool) for n, x in values.items() if n.startswith("d_")}

    runs = [*_orders(question, exact, values), _noisy_row_term(question, exact, result, pullback)]
    unit, accumulate = precision.unit_roundoff(question.precision), _accumulation(question.precision)
    bounds, worst = {}, {}
    kinds = dict.fromkeys(values, "spread")
    for name, x in values.items():
        stored = accumulate if name == "lse" else unit
        bounds[name] = _spread(x, [_float64(run[name]) for run in runs if name in run], stored, accumulate)
    derived = _derived(question, exact, result)
    if derived is not None and derived[0].shape == values["output"].shape:
        # Rows that a convention fills otherwise (the mean of v in empty rows) are no weighted sum: their bound is the spread.
        filled = (values["output"] != native["output"]) & ~np.isnan(native["output"])
        bounds["output"], worst["output"] = (np.where(filled, np.fmax(x, bounds["output"]), x) for x in derived)
        kinds["output"] = "derived"
    return Truth(question, values, bounds, worst, kinds, left_open)


def _nan_is_due(mechanism: Mechanism, exact: Mapping[str, Any]) -> bool:
    """Whether the definition has a NaN too: then an input put it there."""
    if all(np.isfinite(x).all() for x in exact.values() if _floating(x)):
        return False
    with np.errstate(all="ignore"):
        return any(np.isnan(x).any() for x in mechanism.definition(**exact).fields.values() if _floating(x))


# ---------------------------------------------------------------------- spread over legal evaluation orders


def _orders(
    question: Question, exact: dict[str, Any], values: dict[str, np.ndarray]
) -> Iterator[dict[str, np.ndarray]]:
    """The mechanism in the candidate's precision, in several legal orders; results rounded to the storage dtype."""
    name = question.precision
    compute = np.dtype(np.float32) if arrays.is_half(name) else storage_dtype(name)
    cast = {n: x.astype(compute) if _floating(x) else x for n, x in exact.items()}
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
    moved = {n: cast[n] for n in question.mechanism._positional if _floating(cast.get(n))}
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
        turned = [n for n, x in cast.items() if n != "v" and _floating(x) and x.shape[-1:] == q.shape[-1:]]
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
    if not {"q", "k", "v"} <= set(mechanism._positional) or not {"scale", "keep_weights"} <= set(mechanism._options):
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
        return not np.any(np.abs(x - right)[finite] > 1e-6 * size + _TINY)


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


def _noisy_row_term(question: Question, exact: dict[str, Any], result: Any, pullback: Any) -> dict[str, np.ndarray]:
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
    unit += math.sqrt(output.shape[-1]) * _accumulation(question.precision)
    noise = np.where(np.isfinite(lse), unit * size * signs, 0.0)
    turned = {**cotangents, "lse": cotangents.get("lse", np.zeros(lse.shape)) + noise}
    return {n: x for n, x in question.read(result, pullback, exact, turned).items() if n.startswith("d_")}


def _spread(truth: np.ndarray, runs: Sequence[np.ndarray], stored: float, accumulate: float) -> np.ndarray:
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
    return np.sqrt(squares + rows + 0.5 * typical + np.square(stored * level) + np.square(accumulate * size) + _TINY)


_TINY = float(np.finfo(np.float32).tiny)


# ---------------------------------------------------------------------- derived bound of the output


_OTHER_PRODUCTS = ("r", "key_positions")
"""Arrays whose products with q are part of the logits: the bound knows the rounding of q k^T alone."""


def _bounded(mechanism: Mechanism) -> bool:
    return "keep_weights" in mechanism._options and {"q", "k", "v"} <= set(mechanism._positional)


def _derived(question: Question, exact: dict[str, Any], result: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """A-priori bound of the output, for mechanisms whose output is softmax weights times values (checked, not assumed)."""
    if not _bounded(question.mechanism) or any(exact.get(name) is not None for name in _OTHER_PRODUCTS):
        return None
    if "weights" not in result:
        undropped = {n: x for n, x in exact.items() if n not in ("dropout_mask", "dropout_rate")}
        with np.errstate(all="ignore"):
            result = question.mechanism.forward(**undropped, keep_weights=True)
    if "weights" not in result or "logits" not in result:
        return None
    q, k, v = (np.where(np.isfinite(exact[n]), exact[n], 0.0) for n in ("q", "k", "v"))
    weights, logits = np.asarray(result.weights), np.asarray(result.logits)
    heads, groups = q.shape[-3], k.shape[-3]
    if weights.shape != logits.shape or weights.shape[-3:] != (heads, q.shape[-2], k.shape[-2]) or heads % groups:
        return None
    order = np.arange(heads) % groups if exact.get("head_map") == "tile" else np.arange(heads) // (heads // groups)
    k, v = k[..., order, :, :], v[..., order, :, :]
    weights = np.where(np.isfinite(weights), weights, 0.0)
    with np.errstate(all="ignore"):
        sure = (weights > 0) & np.isfinite(logits) & np.isfinite(result.lse)[..., None]
        sinks = (
            exact.get("sinks") is not None or exact.get("dropout_mask") is not None
        )  # lse or weights are others then
        softmax = sinks or np.allclose(weights[sure], np.exp(logits - result.lse[..., None])[sure], rtol=1e-6, atol=0)
    if not softmax:  # weighted otherwise, as by a ramp
        return None
    finite = np.isfinite(result.output)
    if not np.allclose((weights @ v)[finite], result.output[finite], rtol=1e-9, atol=1e-9):
        return None
    keep = exact.get("dropout_mask")
    factor = None if keep is None else np.broadcast_to(keep / (1.0 - exact["dropout_rate"]), weights.shape)
    scale = exact.get("scale")
    unit = precision.unit_roundoff(question.precision)
    with np.errstate(all="ignore"):
        bounds = precision.output_bound(
            q, k, v, logits=np.where(weights > 0, logits, -np.inf), weights=weights, factor=factor,
            scale=None if scale is None else float(scale),
            unit=_accumulation(question.precision), unit_weights=unit, unit_output=unit,
        )  # fmt: skip
    return np.asarray(bounds.rss) + _TINY, np.asarray(bounds.worst) + _TINY


def _accumulation(dtype: str) -> float:
    return precision.unit_roundoff("float32" if arrays.is_half(dtype) else dtype)


# ---------------------------------------------------------------------- verdict


def ratio(got: np.ndarray, truth: np.ndarray, bound: np.ndarray, *, leak: bool = False) -> np.ndarray:
    """|got - truth| / bound per element; infinite where NaN or infinity stands in one and not, or otherwise, in the other.

    ``leak=True`` lets a NaN of ``got`` stand anywhere.
    """
    got, truth = _float64(got), _float64(truth)
    with np.errstate(all="ignore"):
        units = np.abs(got - truth) / bound
    same = (got == truth) | (np.isnan(got) & np.isnan(truth))
    units = np.where(np.isfinite(got) & np.isfinite(truth), units, np.inf)
    units = np.where(same, 0.0, units)
    return np.where(np.isnan(got), 0.0, units) if leak else units


def counted(right: np.ndarray) -> np.ndarray:
    """Elements that the median is about: zeros that are due (padding, empty rows) are no evidence."""
    return np.isfinite(right) & (right != 0)


def statistics(units: np.ndarray, inside: np.ndarray | None = None) -> tuple[float, float, int]:
    """Maximum of error/bound, its median over the elements ``inside`` that count, and how many these are."""
    if not units.size:
        return 0.0, 0.0, 0
    chosen = units[inside | (units > 0)] if inside is not None else units
    return float(units.max()), float(np.median(chosen)) if chosen.size else 0.0, chosen.size


def passes(maximum: float, median: float, count: int, limits: tuple[float, float]) -> bool:
    return maximum <= limits[0] and (count < FEW or median <= limits[1])


def judge(
    array: str,
    got: Any,
    truth: Truth,
    *,
    dtype: Any = None,
    leak: bool = False,
) -> Judgement:
    """Verdict on one array of a candidate.

    Parameters
    ----------
    array : str
        Its name: ``output``, ``lse``, ``d_q`` ...
    got : array or None
        What the candidate gave; None = nothing.
    dtype : dtype or None
        The dtype it must have; None = any floating dtype.
    leak : bool
        NaN may stand where the truth has none (declared by the convention ``masked_nan``).

    Raises
    ------
    ReferenceNaNError
        If the truth holds a NaN where it has a bound for a number.
    """
    right, bound, kind = truth.values[array], truth.bounds[array], truth.kinds[array]
    if np.isnan(bound).any():
        raise ReferenceNaNError(f"the bound of {array} has a NaN")
    if got is None:
        return Judgement(array, "not provided")
    got = np.asarray(got)
    if got.shape != right.shape:
        return Judgement(array, "mismatch", math.inf, math.inf, kind, says=f"shape {got.shape}, expected {right.shape}")
    if dtype is not None and got.dtype != dtype:
        wrong = f"dtype {got.dtype.name}, expected {np.dtype(dtype).name}"
        return Judgement(array, "mismatch", math.inf, math.inf, kind, says=wrong)
    if not arrays.is_real_floating(got.dtype):
        return Judgement(
            array, "mismatch", math.inf, math.inf, kind, says=f"dtype {got.dtype.name}, expected a floating dtype"
        )
    if dtype is None:
        bound = np.hypot(bound, precision.unit_roundoff(got.dtype) * np.where(np.isfinite(right), right, 0.0))
    skipped = truth.open.get(array, np.zeros((), dtype=bool))
    if right.size and skipped.all():
        return Judgement(array, "not checked", says="the conventions promise nothing here")
    units = np.where(skipped, 0.0, ratio(got, right, bound, leak=leak))
    maximum, median, many = statistics(units, counted(right) & ~skipped)
    limits = THRESHOLDS[truth.question.precision][kind]
    ok = passes(maximum, median, many, limits)
    worst = truth.worst.get(array)
    certain = not ok and (
        not math.isfinite(maximum)
        or (worst is not None and bool((np.where(skipped, 0.0, ratio(got, right, worst, leak=leak)) > 1).any()))
    )
    says = ""
    where: dict[str, Any] = {}
    if not ok:
        bad = units > limits[0]
        where = locate(bad if bad.any() else units > limits[1], units, array)
        says = _says(got, right, units, where)
    return Judgement(array, "ok" if ok else "mismatch", maximum, median, kind, certain, says, where, limits)


def _says(got: np.ndarray, right: np.ndarray, units: np.ndarray, where: dict[str, Any]) -> str:
    at = tuple(where["worst"].values())
    wrong_nan = int((np.isnan(got.astype(np.float64)) & ~np.isnan(right)).sum())
    parts = [f"worst at {_named(where['worst'])}: {float(got[at]):.6g}, expected {float(right[at]):.6g}"]
    if wrong_nan:
        parts.append(f"{wrong_nan} of {got.size} are NaN where numbers are due")
    parts.append(f"{where['count']} of {got.size} elements off, the first at {_named(where['first'])}")
    parts.extend(f"{letter} only {_ranges(only)}" for letter, only in where["only"].items())
    if where.get("starts_at_multiple_of"):
        parts.append(f"the bad rows start at {where['first_row']}, a multiple of {where['starts_at_multiple_of']}")
    return "; ".join(parts)


def _named(index: Mapping[str, int]) -> str:
    return "(" + ", ".join(f"{letter}={i}" for letter, i in index.items()) + ")"


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3, 7`` for [0, 1, 2, 3, 7]."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


# ---------------------------------------------------------------------- where

_AXES = {
    "output": "bhqe", "lse": "bhq", "q": "bhqd", "k": "bgkd", "v": "bgke", "qk": "bhtd", "bias": "bhqk", "sinks": "hn", "alibi_slopes": "h",
    "x": "btm", "x_q": "bqm", "x_k": "bkm", "x_v": "bkm", "w_q": "mhd", "w_k": "mgd", "w_v": "mge", "w_o": "hem",
}  # fmt: skip
_TILES = (128, 64, 32, 16)


def axes_of(array: str, ndim: int) -> list[str]:
    """Axis letters of an array; further leading axes are b0, b1 ..., axes of unknown arrays axis0, axis1 ..."""
    letters = list(_AXES.get(array.removeprefix("d_"), ""))
    if array == "d_sinks" and ndim == 1:
        letters = ["h"]
    if not letters:
        return [f"axis{i}" for i in range(ndim)]
    missing = ndim - len(letters)
    return (
        [f"b{i}" for i in range(missing)] + letters if missing > 0 else letters[-missing:] if missing < 0 else letters
    )


def locate(bad: np.ndarray, units: np.ndarray, array: str) -> dict[str, Any]:
    """Where an array is wrong.

    Returns
    -------
    dict
        ``worst`` and ``first`` index by axis letter, ``count`` and ``share`` of bad elements, ``only``: for each axis on which not all
        positions hold a bad element, the ones that do; ``first_row`` and ``starts_at_multiple_of`` for the length axis.
    """
    letters = axes_of(array, bad.ndim)
    worst = np.unravel_index(int(np.argmax(units)), units.shape)
    first = np.unravel_index(int(np.argmax(bad)), bad.shape)
    found: dict[str, Any] = {
        "worst": {letter: int(i) for letter, i in zip(letters, worst, strict=True)},
        "first": {letter: int(i) for letter, i in zip(letters, first, strict=True)},
        "count": int(bad.sum()),
        "share": float(bad.mean()),
        "only": {},
    }
    for axis, letter in enumerate(letters):
        hit = bad.any(axis=tuple(a for a in range(bad.ndim) if a != axis))
        if hit.any() and not hit.all():
            found["only"][letter] = [int(i) for i in np.flatnonzero(hit)]
        if letter in ("q", "k", "t") and hit.any():
            start = int(np.argmax(hit))
            if start:
                found["first_row"] = start
                found["starts_at_multiple_of"] = next((n for n in _TILES if start % n == 0), None)
    return found
