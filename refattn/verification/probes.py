"""Designed inputs: each probe makes one feature, and the mistakes people make with it, visible.

A probe holds float64 master arrays; :meth:`Probe.stored` rounds them to the dtype under test and gives them the memory
form (transposed, sliced, stride 0) that the probe is about.  The truth is computed from those rounded arrays.

Two families:

* **softmax probes** for every mechanism with arrays q, k, v and a lse.  They are built from ``mechanism.example`` and the
  options that its signature has, with axis lengths that differ pairwise, heads that are no power of two, lengths off
  every tile size, and an amplitude chosen per feature.
* **generic probes** for all others: the example at several odd sizes, with every option set listed in the attribute
  ``probe_options`` of the mechanism.

``probe_options`` is a tuple of dicts.  A key that is one letter long is an axis length, any other an option; both go to
``example(rng, **sizes, **options)``, and the options also into the call, unless the example returns its own value for
them.  A key ``"says"`` holds the sentence that the report prints.  Softmax mechanisms may list further sets in the same way.
"""

import dataclasses
import inspect
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from refattn import arrays
from refattn.mechanism import Mechanism
from refattn.verification.conventions import CONVENTION_OPTIONS

__all__ = ["Probe", "probes", "storage_dtype"]

LONGEST = 200
"""Positions of a sequence that is queries and keys alike: its pairs are the square."""

MARGIN = 1e-5
"""A probe of a mechanism that chooses keeps all its choices this far apart: some hundred roundings of float32."""

_POSITIONED = ("causal", "window", "alibi_slopes")


def storage_dtype(name: str) -> np.dtype:
    """NumPy dtype of a name, bfloat16 included."""
    if name == "bfloat16":
        from ml_dtypes import bfloat16

        return np.dtype(bfloat16)
    return np.dtype(name)


@dataclasses.dataclass(frozen=True)
class Probe:
    """One designed call.

    Attributes
    ----------
    name, says : str
        Short name, and what the probe makes visible.
    arguments : dict
        Every argument by its name; arrays are float64 masters (or bool, int), before rounding.
    positional : tuple of str
        The arrays that go by position, in order.
    cotangents : dict
        Random cotangents of the differentiable results.
    wrt : tuple of str
        Arguments whose gradients are asked for.
    memory : str
        Memory form of the arrays: "contiguous", "transposed", "sliced", "expanded" (stride 0 over the batch).
    poison : bool
        Non-finite or huge values stand where nobody may look.
    named : tuple of str
        Conventions that the candidate's signature must name for this probe to make sense.
    """

    name: str
    says: str
    arguments: dict[str, Any]
    positional: tuple[str, ...]
    cotangents: dict[str, np.ndarray]
    wrt: tuple[str, ...]
    memory: str = "contiguous"
    poison: bool = False
    named: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options used, conventions left out: what a candidate must be able to take."""
        return tuple(n for n in self.arguments if n not in self.positional and n not in CONVENTION_OPTIONS)

    @property
    def shapes(self) -> dict[str, bool]:
        """Whether head counts (``gqa``) and channel counts (``value_size``) of q, k and v differ."""
        found = [x for n in ("q", "k", "v") if isinstance(x := self.arguments.get(n), np.ndarray) and x.ndim >= 3]
        if len(found) < 3:
            return {"gqa": False, "value_size": False}
        q, k, v = found
        return {"gqa": q.shape[-3] != k.shape[-3], "value_size": q.shape[-1] != v.shape[-1]}

    @property
    def size(self) -> int:
        """Number of array elements: what "the smallest failing probe" means."""
        return sum(x.size for x in self.arguments.values() if isinstance(x, np.ndarray))

    def stored(self, dtype: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Arguments and cotangents rounded to ``dtype``, in the memory form of the probe.

        Finite values too large for the dtype become its largest finite number.  The cotangent of anything but the
        output has at least float32: so has the lse.
        """
        kind = storage_dtype(dtype)
        arguments = {
            n: _form(_round(x, kind), self.memory) if n in self.positional else _round(x, kind)
            for n, x in self.arguments.items()
        }
        wide = np.dtype(np.float32) if arrays.is_half(dtype) else kind
        cotangents = {n: _round(x, kind if n == "output" else wide) for n, x in self.cotangents.items()}
        return arguments, cotangents

    def clean(self) -> "Probe":
        """The same probe without poison and in plain memory: what tells a leak or a stride mistake from any other."""
        arguments = {
            n: np.where(np.isfinite(x) & (np.abs(x) < 1e29), x, 0.0)
            if n in ("k", "v") and isinstance(x, np.ndarray)
            else x
            for n, x in self.arguments.items()
        }
        return dataclasses.replace(
            self, name=f"{self.name} (clean)", arguments=arguments, memory="contiguous", poison=False
        )


def _round(x: Any, dtype: np.dtype) -> Any:
    if not isinstance(x, np.ndarray) or x.dtype != np.float64:
        return x
    largest = float(_finfo(dtype).max)
    clipped = np.where(np.isfinite(x), np.clip(x, -largest, largest), x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return clipped.astype(dtype)


def _finfo(dtype: np.dtype) -> Any:
    if dtype.name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.finfo(dtype)
    return np.finfo(dtype)


def _form(x: Any, memory: str) -> Any:
    if not isinstance(x, np.ndarray) or x.ndim < 3 or memory == "contiguous":
        return x
    if memory == "transposed":
        return np.swapaxes(np.ascontiguousarray(np.swapaxes(x, -3, -2)), -3, -2)
    if memory == "sliced":
        wide = np.full((*x.shape[:-2], 2 * x.shape[-2] + 1, x.shape[-1]), 7.0).astype(x.dtype)
        view = wide[..., 1::2, :]
        view[...] = x
        return view
    if memory == "expanded":
        same = x.shape[0] > 1 and bool(np.all(x[:1].astype(np.float64) == x.astype(np.float64)))
        if same:
            return np.broadcast_to(x[:1], x.shape)
        x = x.copy()
        x.flags.writeable = False
        return x
    raise ValueError(f"memory is {memory!r}: expected contiguous, transposed, sliced or expanded")


def probes(
    mechanism: Mechanism,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    accepts: Callable[[tuple[str, ...]], bool] | None = None,
    gqa: bool = True,
    value_size: bool = True,
) -> list[Probe]:
    """All probes of a mechanism, the three that tell which
    shapes a candidate takes (``plain``, ``grouped_heads``, ``value_channels``) in front.

    Parameters
    ----------
    seed : int
        Every probe draws from its own stream (seed, name): leaving one out changes no other.
    options : mapping
        Options fixed by the user: they go into every probe.
    accepts : callable
        Whether the candidate takes a set of options: decides what the probe with everything combined contains.
    gqa, value_size : bool
        False draws every probe with as many key heads as query heads, with value channels = key channels.
    """
    maker = _Maker(mechanism, seed, dict(options or {}), accepts, gqa, value_size)
    if maker.softmax:
        _softmax_probes(maker)
    else:
        _generic_probes(maker)
    for index, entry in enumerate(getattr(mechanism, "probe_options", ())):
        maker.listed(f"listed_{index}", dict(entry))
    return maker.made


class _Maker:
    """Draws arrays, fills in what every probe needs, and keeps the list."""

    def __init__(
        self, mechanism: Mechanism, seed: int, fixed: dict[str, Any], accepts: Any, gqa: bool, value_size: bool
    ) -> None:
        self.mechanism, self.seed, self.fixed = mechanism, seed, fixed
        self.accepts = accepts or (lambda names: True)
        self.gqa, self.value_size = gqa, value_size
        self.positional = mechanism.positional
        self.letters = tuple(inspect.signature(mechanism._example).parameters)[1:]
        self.softmax = {"q", "k", "v"} <= set(self.positional) and "lse" in mechanism.outputs and self.has("mask")
        self.square = "t" in self.letters and "q" not in self.letters
        self.made: list[Probe] = []

    def has(self, *names: str) -> bool:
        return all(n in self.mechanism.options for n in names)

    def rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def example(self, name: str, **sizes: int) -> dict[str, Any]:
        known = {n: s for n, s in sizes.items() if n in self.letters or not self.letters}
        return dict(self.mechanism.example(self.rng(name), **known))

    def arrays(
        self,
        name: str,
        *,
        q: int = 19,
        k: int = 33,
        b: int = 3,
        h: int = 6,
        g: int = 2,
        d: int = 20,
        e: int = 14,
        amplitude: float = 1.0,
        shift: float = 0.0,
    ) -> tuple[dict[str, Any], np.random.Generator]:
        """q, k, v with logits of about N(shift, amplitude^2) at the default scale, and a generator for the rest."""
        g = g if self.gqa else h
        e = e if self.value_size else d
        given = self.example(name, b=b, h=h, g=g, q=q, k=k, t=min(k, LONGEST), d=d, e=e, x=4, y=5)
        rng = self.rng(name + " options")
        given["q"] = given["q"] * amplitude
        if shift:
            # One channel of constant size in q and k: their product is the same for every pair.
            channels = given["q"].shape[-1]
            side = math.sqrt(abs(shift) * math.sqrt(channels))
            given["q"][..., -1] = side
            given["k"][..., -1] = math.copysign(side, shift)
        return given, rng

    def add(
        self,
        name: str,
        says: str,
        given: dict[str, Any],
        *,
        memory: str = "contiguous",
        poison: bool = False,
        wrt: tuple[str, ...] | None = None,
        named: tuple[str, ...] = (),
    ) -> None:
        given = {**given, **self.fixed}
        if not self.has(*(n for n in given if n not in self.positional)):
            return
        square = (
            "q" in given and "k" in given and given["k"] is not None and given["q"].shape[-2] == given["k"].shape[-2]
        )
        if self.softmax and self.square and not square:
            return
        if self.softmax and self.square:
            given = _squared(given)
        positioned = any(given.get(n) is not None and given.get(n) is not False for n in _POSITIONED)
        lengths = "query_lengths" in given or "key_lengths" in given
        if positioned and self.has("align") and "align" not in given and (not square or lengths):
            given["align"] = "lower_right"
        try:
            result = self.mechanism.forward(**given)
        except (ValueError, TypeError):
            if not self.made:  # the plainest call must be possible
                raise
            return  # lengths or fixed options that this mechanism refuses
        if self.mechanism.margin is not None and self.mechanism.margin(given) < MARGIN:
            return  # rounding alone may choose otherwise
        rng = self.rng(name + " cotangents")
        cotangents = {
            n: rng.standard_normal(np.shape(getattr(result, n))) for n in self.mechanism.outputs if n in result
        }
        differentiable = tuple(n for n in self.mechanism.differentiable if _is_real(given.get(n)))
        made = Probe(
            name=name,
            says=says,
            arguments=given,
            positional=self.positional,
            cotangents=cotangents,
            wrt=differentiable if wrt is None else tuple(n for n in wrt if n in differentiable),
            memory=memory,
            poison=poison,
            named=named,
        )
        self.made.append(made)

    def listed(self, name: str, entry: dict[str, Any]) -> None:
        """One set of ``probe_options``."""
        says = entry.pop(
            "says", "an option set that the mechanism lists: " + ", ".join(f"{n}={x}" for n, x in entry.items())
        )
        sizes = {n: x for n, x in entry.items() if len(n) == 1}
        options = {n: x for n, x in entry.items() if len(n) > 1}
        given = self.mechanism.example(self.rng(name), **sizes, **options)
        self.add(name, says, {**options, **given})


def _squared(given: dict[str, Any]) -> dict[str, Any]:
    """Options drawn for q x k pairs, with their rows repeated or cut to the one length that q and k have here."""
    length = given["q"].shape[-2]
    found = dict(given)
    for name, axis in (("mask", -2), ("bias", -2), ("dropout_mask", -2), ("query_segments", -1)):
        x = given.get(name)
        if isinstance(x, np.ndarray) and x.ndim >= -axis and x.shape[axis] not in (1, length):
            found[name] = np.take(x, np.arange(length) % x.shape[axis], axis=axis)
    return found


def _is_real(x: Any) -> bool:
    return (isinstance(x, np.ndarray) and x.dtype == np.float64) or (isinstance(x, float) and not isinstance(x, bool))


# ---------------------------------------------------------------------- generic mechanisms


def _generic_probes(make: _Maker) -> None:
    sizes = {
        "plain": {"b": 2, "h": 3, "g": 3, "q": 19, "k": 33, "t": 33, "d": 10, "e": 7, "m": 11, "x": 4, "y": 5},
        "mixed": {"b": 1, "h": 5, "g": 5, "q": 37, "k": 11, "t": 40, "d": 6, "e": 9, "m": 13, "x": 2, "y": 3},
        "single": {"b": 3, "h": 2, "g": 2, "q": 1, "k": 17, "t": 1, "d": 5, "e": 3, "m": 7, "x": 3, "y": 2},
    }
    for name, choice in sizes.items():
        try:
            given = make.example(name, **choice)
        except ValueError:
            given = make.example(name)  # lengths that this mechanism cannot have: its own defaults
        make.add(name, "the example at lengths that differ pairwise and meet no tile size", given)
        if name == "plain":
            for option, parameter in inspect.signature(make.mechanism._forward).parameters.items():
                if isinstance(parameter.default, bool) and option not in given and option != "keep_weights":
                    flipped = {**given, option: not parameter.default}
                    if _valid(make.mechanism, flipped):
                        make.add(option, f"{option}={not parameter.default}", flipped)
    given = make.example("transposed", **sizes["plain"])
    make.add("transposed", "arrays whose length and head axes are exchanged in memory", given, memory="transposed")


def _valid(mechanism: Mechanism, given: dict[str, Any]) -> bool:
    try:
        mechanism.forward(**given)
    except (ValueError, TypeError):
        return False
    return True


# ---------------------------------------------------------------------- softmax mechanisms


def _softmax_probes(make: _Maker) -> None:
    _shapes(make)
    _ranges(make)
    _masks(make)
    _positions(make)
    _lengths_and_segments(make)
    _logit_terms(make)
    _sinks_and_dropout(make)
    _memory_forms(make)
    _combined(make)


def _shapes(make: _Maker) -> None:
    given, _ = make.arrays("plain", h=5, g=5, d=20, e=20, b=2, q=19, k=33)
    make.add("plain", "no options, as many key heads as query heads", given)
    given, _ = make.arrays("grouped_heads", h=6, g=2, d=20, e=20, b=1, q=13, k=21, amplitude=1.5)
    make.add("grouped_heads", "6 query heads on 2 key heads", given)
    given, _ = make.arrays("value_channels", h=5, g=5, b=1, q=9, k=23)
    make.add("value_channels", "other value channels than key channels", given)
    given, _ = make.arrays("mixed", amplitude=1.5)
    make.add(
        "mixed", "6 query heads on 2 key heads, value channels other than key channels, all lengths different", given
    )
    given, _ = make.arrays("more_queries", q=37, k=11, amplitude=1.5)
    make.add("more_queries", "more queries than keys", given)
    given, _ = make.arrays("one_query", q=1, k=65)
    make.add("one_query", "one query (decoding); 65 keys = 1 beyond the tile", given)
    given, _ = make.arrays("one_key", q=7, k=1)
    make.add("one_key", "one key: every weight is 1, the gradients of q and k cancel exactly", given)
    given, _ = make.arrays("one_group", h=5, g=1, q=9, k=17)
    make.add("one_group", "one key head for all query heads", given)
    given, _ = make.arrays("tile_exact", b=1, q=64, k=64)
    make.add("tile_exact", "lengths that are multiples of the usual tiles", given)
    given, _ = make.arrays("tile_plus_one", b=1, q=17, k=129)
    make.add("tile_plus_one", "129 keys: one beyond a tile of 128, 64 and 32", given)
    given, _ = make.arrays("tile_plus_one_queries", b=1, q=129, k=17)
    make.add(
        "tile_plus_one_queries", "129 queries: gradients of the keys are summed over several tiles of queries", given
    )
    given, _ = make.arrays("wide_channels", b=1, q=9, k=17, d=136, e=72)
    make.add("wide_channels", "136 key and 72 value channels: more than one block of each, the last one ragged", given)
    # Logits around -6: a padded tail key with logit 0 outweighs hundreds of real ones.
    given, _ = make.arrays("long_tail", b=1, q=3, k=1000, shift=-6.0)
    make.add("long_tail", "1000 keys with negative logits: zero-padded tail keys in the denominator show", given)
    given, _ = make.arrays("one_hot_values", q=11, k=20, d=20, e=20, amplitude=1.5)
    given["v"] = np.broadcast_to(np.eye(20), given["v"].shape).copy()
    make.add("one_hot_values", "values are unit vectors: the output is the weights", given)


def _ranges(make: _Maker) -> None:
    given, rng = make.arrays("negative_logits", q=17, k=161, b=1)
    _range_of_logits(given, rng, -160.0, 9.0)
    make.add(
        "negative_logits", "all logits between -200 and -120: a running maximum that starts at 0 gives zero rows", given
    )
    given, rng = make.arrays("far_negative_logits")
    _range_of_logits(given, rng, -1e5, 3.0)
    make.add("far_negative_logits", "logits near -1e5: a finite number that stands for 'masked' shows", given)
    given, rng = make.arrays("large_logits")
    _range_of_logits(given, rng, 2.2e4, 3.0)
    make.add("large_logits", "q.k beyond 65504, scale * q.k below: overflow before the scale in float16", given)
    given, _ = make.arrays("duplicates", amplitude=2.0)
    half = given["k"].shape[-2] // 2
    given["k"][..., half : 2 * half, :] = given["k"][..., :half, :]
    make.add("duplicates", "16 keys stand twice, with different values", given)
    given, rng = make.arrays("outliers")
    given["q"][..., 3] *= 12.0
    given["k"][..., 5, :] *= 15.0
    given["v"][..., 7, :] *= 30.0
    make.add("outliers", "one channel, one key and one value much larger than the rest", given)
    if make.has("mask"):
        given, rng = make.arrays("negative_masked_tile", q=17, k=161, b=1)
        _range_of_logits(given, rng, -160.0, 9.0)
        mask = np.ones((1, 1, 17, 161), dtype=bool)
        mask[..., :128] = False
        make.add("negative_masked_tile", "logits below -120 and the first 128 keys masked", {**given, "mask": mask})
    if make.has("window"):
        given, rng = make.arrays("negative_window", q=17, k=161, b=1)
        _range_of_logits(given, rng, -160.0, 9.0)
        says = "logits below -120 and a window that sees nothing of the first tiles"
        make.add("negative_window", says, {**given, "window": (9, 0), "align": "lower_right"})


def _range_of_logits(given: dict[str, Any], rng: np.random.Generator, center: float, spread: float) -> None:
    """Shift the logits to ``center`` with about ``spread`` around it, at moderate size of every entry of q and k."""
    q, k = given["q"], given["k"]
    channels = q.shape[-1]
    half = channels // 2
    side = math.sqrt(abs(center) * math.sqrt(channels) / half)
    q[..., :half] = side
    k[..., :half] = math.copysign(side, center)
    factor = math.sqrt(spread * math.sqrt(channels) / math.sqrt(channels - half))
    q[..., half:] = factor * rng.uniform(-1.7, 1.7, q[..., half:].shape)
    k[..., half:] = factor * rng.uniform(-1.7, 1.7, k[..., half:].shape)


def _random_mask(rng: np.random.Generator, shape: tuple[int, ...], share: float = 0.6) -> np.ndarray:
    """Random bool mask where every row sees something and no column pattern repeats."""
    mask = rng.random(shape) < share
    mask[..., -1] |= ~mask.any(axis=-1)
    return mask


def _masks(make: _Maker) -> None:
    if not make.has("mask"):
        return
    b, h, q, k = 3, 6, 19, 33
    given, rng = make.arrays("mask_per_batch")
    make.add(
        "mask_per_batch",
        "mask (b, 1, q, k): its strides, its polarity",
        {**given, "mask": _random_mask(rng, (b, 1, q, k))},
    )
    given, rng = make.arrays("mask_per_head")
    make.add("mask_per_head", "mask (1, h, q, k)", {**given, "mask": _random_mask(rng, (1, h, q, k))})
    given, rng = make.arrays("mask_full")
    make.add("mask_full", "mask (b, h, q, k)", {**given, "mask": _random_mask(rng, (b, h, q, k))})
    given, rng = make.arrays("mask_keys")
    make.add("mask_keys", "mask (b, 1, 1, k), one for all queries", {**given, "mask": _random_mask(rng, (b, 1, 1, k))})
    given, rng = make.arrays("mask_true")
    make.add(
        "mask_true", "a mask that hides nothing changes nothing", {**given, "mask": np.ones((b, 1, q, k), dtype=bool)}
    )
    given, rng = make.arrays("mask_square", q=k, k=k)
    says = "mask (b, 1, q, k) with as many queries as keys: a transposed read fits"
    make.add("mask_square", says, {**given, "mask": _random_mask(rng, (b, 1, k, k))})
    given, rng = make.arrays("mask_empty_rows", amplitude=2.0)
    given["v"] = given["v"] + 1.0  # the mean of the values must not be 0: it is what some give for an empty row
    mask = _random_mask(rng, (b, 1, q, k))
    mask[0, :, 4:7] = False
    mask[2, :, -1] = False
    make.add("mask_empty_rows", "rows without any key, with a cotangent that is not 0", {**given, "mask": mask})
    mask = _random_mask(rng, (b, 1, q, k))
    hidden = np.array([[2, 11, 30], [0, 1, 32], [7, 8, 9]])
    for batch, columns in enumerate(hidden):
        mask[batch, :, :, columns] = False
    mask[..., 13] = True
    for name, says, poison_k, poison_v in (
        ("poisoned_keys", "NaN in keys that are masked everywhere", np.nan, None),
        ("poisoned_values", "NaN in values that are masked everywhere", None, np.nan),
        ("poisoned_large", "1e30 in keys and values that are masked everywhere", 1e30, 1e30),
    ):
        given, _ = make.arrays(name)
        for batch, columns in enumerate(hidden):
            if poison_k is not None:
                given["k"][batch][..., columns, :] = poison_k
            if poison_v is not None:
                given["v"][batch][..., columns, :] = poison_v
        make.add(name, says, {**given, "mask": mask.copy()}, poison=True)


def _positions(make: _Maker) -> None:
    if make.has("causal"):
        for name, q, k, says in (
            ("causal_square", 33, 33, "causal, lengths off the tiles"),
            ("causal_tile", 64, 64, "causal, lengths that are multiples of the tile"),
            ("causal_fewer_queries", 19, 33, "causal with fewer queries than keys: where the diagonal stands"),
            ("causal_more_queries", 37, 11, "causal with more queries than keys: the first rows may be empty"),
            ("causal_one_query", 1, 65, "causal with one query (decoding)"),
        ):
            given, _ = make.arrays(name, q=q, k=k, b=1 if q == 64 else 3, amplitude=1.5)
            make.add(name, says, {**given, "causal": True, **({"align": "lower_right"} if make.has("align") else {})})
        if make.has("align"):
            given, _ = make.arrays("causal_upper_left")
            says = "causal, query 0 at key 0"
            make.add("causal_upper_left", says, {**given, "causal": True, "align": "upper_left"}, named=("align",))
    if make.has("causal", "mask"):
        given, rng = make.arrays("causal_and_mask")
        mask = _random_mask(rng, (3, 1, 19, 33))
        mask[..., 0] = True
        make.add("causal_and_mask", "mask and causal together", {**given, "causal": True, "mask": mask})
    if make.has("window"):
        t = 20
        for name, window in (
            ("window_0", (0, 0)),
            ("window_1", (1, 0)),
            ("window_uneven", (2, 5)),
            ("window_left", (3, None)),
            ("window_right", (None, 2)),
            ("window_t_minus_1", (t - 1, 0)),
            ("window_t", (t, t)),
        ):
            given, _ = make.arrays(name, q=t, k=t, d=t, e=t, b=1)
            given["v"] = np.broadcast_to(np.eye(t), given["v"].shape).copy()
            make.add(name, f"window {window} on {t} tokens, values are unit vectors", {**given, "window": window})
        given, _ = make.arrays("window_fewer_queries")
        make.add("window_fewer_queries", "window (3, 2) with fewer queries than keys", {**given, "window": (3, 2)})
        given, _ = make.arrays("window_more_queries", q=37, k=11)
        make.add("window_more_queries", "right edge alone with more queries than keys", {**given, "window": (None, 1)})
    if make.has("window", "causal"):
        given, _ = make.arrays("window_causal", q=33, k=33)
        make.add("window_causal", "window (4, 0) and causal", {**given, "window": (4, 0), "causal": True})
    if make.has("head_map"):
        given, _ = make.arrays("head_map_tile")
        make.add("head_map_tile", "query head i on key head i % g", {**given, "head_map": "tile"}, named=("head_map",))


def _lengths_and_segments(make: _Maker) -> None:
    if make.has("key_lengths"):
        lengths = np.array([33, 0, 13], dtype=np.int32)
        given, _ = make.arrays("key_lengths")
        for batch, n in enumerate(lengths):
            given["k"][batch][..., n:, :] = np.nan
            given["v"][batch][..., n:, :] = np.nan if batch != 2 else 1e30
        says = "key lengths 33, 0 and 13; NaN and 1e30 beyond them"
        make.add("key_lengths", says, {**given, "key_lengths": lengths}, poison=True)
    if make.has("key_lengths", "query_lengths"):
        query_lengths, key_lengths = np.array([19, 7, 12], dtype=np.int32), np.array([13, 33, 0], dtype=np.int32)
        given, _ = make.arrays("both_lengths")
        given_lengths = {"query_lengths": query_lengths, "key_lengths": key_lengths}
        make.add("both_lengths", "query and key lengths that differ per batch", {**given, **given_lengths})
        if make.has("causal"):
            given, _ = make.arrays("causal_lengths")
            says = "causal with lengths: the diagonal of each batch ends at its own last key"
            make.add("causal_lengths", says, {**given, **given_lengths, "causal": True})
    if make.has("query_segments", "key_segments"):
        given, rng = make.arrays("segments", q=33, k=33)
        ids = np.sort(rng.integers(0, 4, (3, 33)), axis=-1).astype(np.int32)
        make.add("segments", "packed documents", {**given, "query_segments": ids, "key_segments": ids.copy()})


def _logit_terms(make: _Maker) -> None:
    b, h, q, k = 3, 6, 19, 33
    if make.has("scale"):
        given, _ = make.arrays("scale")
        make.add("scale", "a scale of one's own", {**given, "scale": 0.37})
    if make.has("softcap"):
        given, _ = make.arrays("softcap", amplitude=3.0)
        make.add("softcap", "soft cap 1.5, logits of order 3", {**given, "softcap": 1.5})
        if make.has("mask"):
            given, rng = make.arrays("softcap_mask", amplitude=3.0)
            mask = _random_mask(rng, (b, 1, q, k), 0.4)
            make.add(
                "softcap_mask", "soft cap 1.5 with a mask: the cap comes first", {**given, "softcap": 1.5, "mask": mask}
            )
        if make.has("bias"):
            given, rng = make.arrays("softcap_bias", amplitude=3.0)
            bias = 2.0 * rng.standard_normal((h, q, k))
            make.add(
                "softcap_bias",
                "soft cap 1.5 with a bias: the bias comes after it",
                {**given, "softcap": 1.5, "bias": bias},
            )
            if make.has("softcap_after_bias"):
                more = {"softcap": 1.5, "bias": bias.copy(), "softcap_after_bias": True}
                make.add(
                    "softcap_after_bias",
                    "the cap around logits plus bias",
                    {**given, **more},
                    named=("softcap_after_bias",),
                )
        if make.has("causal"):
            given, _ = make.arrays("softcap_causal", amplitude=3.0)
            make.add("softcap_causal", "soft cap 1.5 and causal", {**given, "softcap": 1.5, "causal": True})
    if make.has("bias"):
        given, rng = make.arrays("bias")
        make.add("bias", "bias (1, h, q, k) of order 1", {**given, "bias": rng.standard_normal((1, h, q, k))})
        given, rng = make.arrays("bias_per_batch")
        make.add(
            "bias_per_batch",
            "bias (b, 1, q, k): its strides, its gradient",
            {**given, "bias": rng.standard_normal((b, 1, q, k))},
        )
        given, rng = make.arrays("bias_keys")
        make.add(
            "bias_keys",
            "bias (b, h, 1, k): the gradient is summed over queries",
            {**given, "bias": rng.standard_normal((b, h, 1, k))},
        )
        given, rng = make.arrays("bias_square", q=k, k=k)
        says = "bias (1, h, q, k) with as many queries as keys: a transposed read fits"
        make.add("bias_square", says, {**given, "bias": rng.standard_normal((1, h, k, k))})
        given, rng = make.arrays("bias_hidden")
        bias = rng.standard_normal((1, h, q, k))
        bias[~_random_mask(rng, (1, h, q, k), 0.7)] = -np.inf
        bias[:, 1, 3] = -np.inf
        make.add("bias_hidden", "-inf in the bias hides pairs, one row wholly", {**given, "bias": bias})
        given, rng = make.arrays("bias_gradient_alone")
        bias = rng.standard_normal((1, h, q, k))
        make.add(
            "bias_gradient_alone",
            "the gradient of the bias and of nothing else",
            {**given, "bias": bias},
            wrt=("bias",),
        )
        if make.has("causal"):
            given, rng = make.arrays("bias_causal")
            bias = rng.standard_normal((1, h, q, k))
            make.add(
                "bias_causal", "bias and causal with fewer queries than keys", {**given, "bias": bias, "causal": True}
            )
    else:
        given, _ = make.arrays("one_gradient")
        make.add("one_gradient", "the gradient of q and of nothing else", given, wrt=("q",))
    if make.has("alibi_slopes"):
        slopes = np.array([0.25, 0.0625, 2.0**-6, 2.0**-8, 0.5, 0.125])  # the paper's code for 6 heads
        given, _ = make.arrays("alibi")
        make.add(
            "alibi", "ALiBi for 6 heads, fewer queries than keys, both directions", {**given, "alibi_slopes": slopes}
        )
        given, _ = make.arrays("alibi_more_queries", q=37, k=11)
        make.add("alibi_more_queries", "ALiBi with more queries than keys", {**given, "alibi_slopes": slopes})
        given, _ = make.arrays("alibi_one_query", q=1, k=65)
        make.add("alibi_one_query", "ALiBi in decoding: one query at the end", {**given, "alibi_slopes": slopes})
        if make.has("causal"):
            given, _ = make.arrays("alibi_causal")
            make.add("alibi_causal", "ALiBi and causal", {**given, "alibi_slopes": slopes, "causal": True})


def _sinks_and_dropout(make: _Maker) -> None:
    b, h, q, k = 3, 6, 19, 33
    if make.has("sinks"):
        given, rng = make.arrays("sinks")
        large = math.log(k) + rng.uniform(-1.0, 2.0, h)
        make.add("sinks", "sinks as heavy as all keys together", {**given, "sinks": large})
        given, rng = make.arrays("sinks_negative", shift=-40.0)
        says = "all logits near -40 and sinks beside them: a sink that is not shifted by the maximum shows"
        make.add("sinks_negative", says, {**given, "sinks": rng.uniform(-38.0, -35.0, h)})
        given, rng = make.arrays("sinks_below_keys", shift=40.0)
        make.add(
            "sinks_below_keys",
            "all logits near 40 and sinks beside them",
            {**given, "sinks": rng.uniform(42.0, 45.0, h)},
        )
        if make.has("mask"):
            given, rng = make.arrays("sinks_empty_rows")
            mask = _random_mask(rng, (b, 1, q, k))
            mask[1, :, 2:5] = False
            says = "rows without keys but with sinks: output 0, lse that of the sinks"
            make.add("sinks_empty_rows", says, {**given, "sinks": rng.uniform(-1.0, 3.0, h), "mask": mask})
        if make.has("causal"):
            given, rng = make.arrays("sinks_causal")
            make.add("sinks_causal", "sinks and causal", {**given, "sinks": rng.uniform(0.0, 4.0, h), "causal": True})
        if make.has("lse_includes_sinks"):
            given, rng = make.arrays("sinks_outside_lse")
            more = {"sinks": rng.uniform(0.0, 4.0, h), "lse_includes_sinks": False}
            make.add("sinks_outside_lse", "lse of the keys alone", {**given, **more}, named=("lse_includes_sinks",))
    if make.has("dropout_mask", "dropout_rate"):
        given, rng = make.arrays("dropout")
        keep = rng.random((b, h, q, k)) >= 0.25
        says = "a given keep mask at rate 1/4: scale, row sum, softmax derivative"
        make.add("dropout", says, {**given, "dropout_mask": keep, "dropout_rate": 0.25})


def _memory_forms(make: _Maker) -> None:
    given, _ = make.arrays("transposed")
    make.add("transposed", "length and head axes exchanged in memory", given, memory="transposed")
    given, _ = make.arrays("sliced")
    make.add("sliced", "every second row of a longer array", given, memory="sliced")
    given, rng = make.arrays("expanded")
    for name in ("k", "v"):
        given[name][1:] = given[name][:1]
    if make.has("mask"):
        given["mask"] = _random_mask(rng, (3, 1, 19, 33))
    make.add("expanded", "k and v with stride 0 over the batch, read-only, 33 keys", given, memory="expanded")


def _combined(make: _Maker) -> None:
    """Everything at once: all options that the candidate takes."""
    b, h, q, k = 3, 6, 19, 33
    given, rng = make.arrays("combined", amplitude=2.0)
    mask = _random_mask(rng, (b, 1, q, k), 0.8)
    mask[0, :, 5] = False
    every: dict[str, Any] = {
        "mask": mask,
        "bias": rng.standard_normal((1, h, q, k)),
        "causal": True,
        "window": (20, None),
        "scale": 0.31,
        "softcap": 2.5,
        "alibi_slopes": np.array([0.25, 0.0625, 2.0**-6, 2.0**-8, 0.5, 0.125]),
        "sinks": rng.uniform(-1.0, 3.0, h),
        "dropout_mask": rng.random((b, h, q, k)) >= 0.25,
        "dropout_rate": 0.25,
    }
    taken = {n: x for n, x in every.items() if make.has(n) and make.accepts((n,))}
    if "dropout_mask" not in taken or "dropout_rate" not in taken:
        taken = {n: x for n, x in taken.items() if not n.startswith("dropout")}
    if len(taken) > 1:
        make.add("combined", "all options together: " + ", ".join(taken), {**given, **taken})
