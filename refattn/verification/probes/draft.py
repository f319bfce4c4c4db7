"""A probe in the making: sizes first, then arrays, then what each feature does to them."""

import dataclasses
import inspect
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from refattn.mechanism import Mechanism
from refattn.verification.probes.probe import Probe

__all__ = ["Draft", "Feature", "Impossible", "Level", "build", "sizes_of"]

MARGIN = 1e-5
"""A probe of a mechanism that chooses keeps all its choices this far apart: some hundred roundings of float32."""

WIDE = ("state", "decay", "channel_decay", "head_decay", "beta", "dt", "a", "dt_bias")
"""Arguments of recurrences that stay float32 beside arrays of 16 bits."""
RECURRENCES = ("gated_linear_attention", "delta_rule_attention", "rwkv7_attention", "ssd_attention")


def wide_arguments(name: str) -> tuple[str, ...]:
    return WIDE if name in RECURRENCES else ()


_POSITIONED = ("causal", "window", "alibi_slopes")


class Impossible(Exception):
    """A recipe that this mechanism, or these sizes, do not allow; the message says why."""


@dataclasses.dataclass(frozen=True)
class Level:
    """One state of a feature.

    ``sizes`` are axis lengths by letter, ``example`` further words for the mechanism's example, ``options`` the options of
    the mechanism that it passes, ``apply`` what it does to the draft once the arrays are there, ``says`` a few words
    for the report, ``named`` the conventions that a signature must name, ``form`` a capability of its own: a form of an
    option that many implementations do not have, ``cotangent`` the one result that takes a cotangent.
    """

    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    example: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: tuple[str, ...] = ()
    apply: Callable[["Draft"], None] | None = None
    says: str = ""
    named: tuple[str, ...] = ()
    form: str = ""
    cotangent: str = ""


@dataclasses.dataclass(frozen=True)
class Feature:
    """Something that a call has in one of several ways; the first level is the plain one."""

    name: str
    levels: Mapping[str, Level]

    @property
    def plain(self) -> str:
        return next(iter(self.levels))


class Draft:
    """What features work on: sizes, arguments, memory, cotangents.

    ``b``, ``h``, ``q``, ``k`` are the lengths of the axes over which masks and biases run.
    """

    def __init__(self, mechanism: Mechanism, recipe: Mapping[str, str], sizes: Mapping[str, int], seed: int) -> None:
        self.mechanism, self.recipe, self.sizes, self.seed = mechanism, dict(recipe), dict(sizes), seed
        self.arguments: dict[str, Any] = {}
        self.memory = self.memory_of_cotangents = "contiguous"
        self.cotangents_of: tuple[str, ...] | None = None
        self.poison = False
        self.wrt: tuple[str, ...] | None = None
        self.named: list[str] = []
        self.forms: list[str] = []
        self.change_cotangents: Callable[[str, np.ndarray], np.ndarray] = lambda name, x: x
        self.asked: set[str] = set()  # options that some level is about

    def rng(self, what: str) -> np.random.Generator:
        """A stream of its own for each part of the draft: leaving one out changes no other."""
        return np.random.default_rng([self.seed, zlib.crc32(f"{what} {sorted(self.sizes.items())}".encode())])

    @property
    def q(self) -> int:
        return self._length(self.mechanism.positional[0])

    @property
    def k(self) -> int:
        keys = [n for n in ("k", "x_k") if self.arguments.get(n) is not None]
        return self._length(keys[0] if keys else self.mechanism.positional[0])

    @property
    def b(self) -> int:
        return int(self._first.shape[0]) if self._first.ndim > 2 else 1

    @property
    def h(self) -> int:
        """Query heads: the head axis of masks and biases."""
        return self.sizes.get("h") or (self._first.shape[-3] if self._first.ndim > 3 else 1)

    @property
    def _first(self) -> np.ndarray:
        return self.arguments[self.mechanism.positional[0]]

    def _length(self, name: str) -> int:
        return int(self.arguments[name].shape[-2])

    def give(self, **options: Any) -> None:
        """Pass these options."""
        self.arguments.update(options)
        self.asked |= set(options)

    def shift_logits(self, center: float) -> None:
        """All logits of q and k moved to about ``center`` at the default scale, by one channel of constant size."""
        q, k = self.arguments["q"], self.arguments["k"]
        side = math.sqrt(abs(center) * math.sqrt(q.shape[-1]))
        q[..., -1] = side
        k[..., -1] = math.copysign(side, center)


def sizes_of(mechanism: Mechanism, sizes: Mapping[str, int]) -> dict[str, int]:
    """Those of the sizes that the mechanism's example knows."""
    letters = inspect.signature(mechanism._example).parameters
    return {n: s for n, s in sizes.items() if n in letters}


def build(
    mechanism: Mechanism,
    features: Mapping[str, Feature],
    recipe: Mapping[str, str],
    *,
    name: str = "",
    says: str = "",
    sizes: Mapping[str, int] | None = None,
    fit: Callable[[dict[str, int]], dict[str, int]] = dict,
    fixed: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Probe:
    """The probe of a recipe.

    Parameters
    ----------
    features
        What there is; the first level of each is what a recipe leaves out.
    recipe
        Level by feature; what is left out is plain.
    sizes
        Axis lengths that replace those of the recipe's levels.
    fit
        What a candidate's limits make of the sizes.
    fixed
        Options fixed by the user: they go into every probe.

    Raises
    ------
    Impossible
        The mechanism does not allow it.
    """
    for wanted_feature, x in recipe.items():
        if wanted_feature not in features or x not in features[wanted_feature].levels:
            raise Impossible(f"{wanted_feature} {x} is not to be had")
    levels = [f.levels[recipe.get(n, f.plain)] for n, f in features.items()]  # chosen values last
    wanted: dict[str, int] = {}
    words: dict[str, Any] = {}
    for level in levels:
        wanted.update(level.sizes)
        words.update(level.example)
    wanted = sizes_of(mechanism, fit({**wanted, **(sizes or {})}))
    draft = Draft(mechanism, recipe, wanted, seed)
    letters = [n for n in words if len(n) == 1 and not isinstance(words[n], bool)]
    words.update({n: x for n, x in (fixed or {}).items() if x is not None})
    try:
        wanted.update({n: words.pop(n) for n in letters})
        given = dict(mechanism.example(draft.rng("arrays"), **wanted, **words))
        given = {**{n: x for n, x in words.items() if n in mechanism.options}, **given}
        draft.arguments = {n: x for n, x in given.items() if x is not None or n in mechanism.positional}
        for level in levels:
            draft.asked |= set(level.options) | set(level.example)
            draft.named += level.named
            draft.forms += [level.form] if level.form else []
            if level.apply is not None:
                level.apply(draft)
        draft.arguments.update(fixed or {})
        draft.asked |= set(fixed or {})
        return _finished(draft, name, says or _words(features, recipe))
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise Impossible(str(error)) from None


def _words(features: Mapping[str, Feature], recipe: Mapping[str, str]) -> str:
    said = [features[n].levels[x].says or f"{n} {x}".replace("_", " ") for n, x in recipe.items()]
    return "; ".join(said) or "no options"


def _finished(draft: Draft, name: str, says: str) -> Probe:
    mechanism, given = draft.mechanism, draft.arguments
    unknown = [n for n in given if n not in mechanism.positional and n not in mechanism.options]
    if unknown:
        raise Impossible(f"{mechanism.name} has no option {unknown[0]!r}")
    positioned = any(given.get(n) is not None and given.get(n) is not False for n in _POSITIONED)
    lengths = "query_lengths" in given or "key_lengths" in given
    if positioned and "align" in mechanism.options and "align" not in given and (draft.q != draft.k or lengths):
        given["align"] = "lower_right"
    with np.errstate(all="ignore"):
        result = mechanism.forward(**given)
        _drop_what_follows(draft, result)
    if mechanism.margin is not None and mechanism.margin(given) < MARGIN:
        raise Impossible("two choices of the mechanism are so close that rounding alone may choose otherwise")
    rng = draft.rng("cotangents")
    drawn = {n: rng.standard_normal(np.shape(getattr(result, n))) for n in mechanism.outputs if n in result}
    cotangents = {n: draft.change_cotangents(n, x) for n, x in drawn.items()}
    if draft.cotangents_of is not None:
        cotangents = {n: x for n, x in cotangents.items() if n in draft.cotangents_of} or cotangents
    if draft.memory_of_cotangents == "expanded" and "output" in cotangents:
        cotangents["output"] = np.full_like(cotangents["output"], 0.75)
    differentiable = tuple(n for n in mechanism.differentiable if _is_real(given.get(n)))
    return Probe(
        name=name,
        says=says,
        arguments=given,
        positional=mechanism.positional,
        cotangents=cotangents,
        wrt=differentiable if draft.wrt is None else tuple(n for n in draft.wrt if n in differentiable),
        features=draft.recipe,
        sizes=draft.sizes,
        seed=draft.seed,
        memory=draft.memory,
        memory_of_cotangents=draft.memory_of_cotangents,
        poison=draft.poison,
        forms=tuple(draft.forms),
        named=tuple(draft.named),
        wide=wide_arguments(mechanism.name),
    )


_follows: dict[tuple[str, str, tuple[str, ...]], bool] = {}


def _drop_what_follows(draft: Draft, result: Any) -> None:
    """Options that no level is about and that change nothing: their default, or what an array given beside them says."""
    mechanism, given = draft.mechanism, draft.arguments
    for name in list(given):
        if name in mechanism.positional or name in draft.asked or isinstance(given[name], np.ndarray):
            continue
        key = (mechanism.name, f"{name}={given[name]!r}"[:80], tuple(sorted(given)))
        if key not in _follows:
            _follows[key] = _same_without(mechanism, given, name, result)
        if _follows[key]:
            del given[name]


def _same_without(mechanism: Mechanism, given: Mapping[str, Any], name: str, result: Any) -> bool:
    try:
        other = mechanism.forward(**{n: x for n, x in given.items() if n != name})
    except (ValueError, TypeError):
        return False
    return all(
        not isinstance(x, np.ndarray) or (n in other and np.array_equal(getattr(other, n), x, equal_nan=True))
        for n, x in result.fields.items()
    )


def _is_real(x: Any) -> bool:
    return (isinstance(x, np.ndarray) and x.dtype == np.float64) or (isinstance(x, float) and not isinstance(x, bool))
