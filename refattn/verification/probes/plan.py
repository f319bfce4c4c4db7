"""Which probes a candidate gets: every level alone, special values, pairs; and the table of pairs."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from refattn.mechanism import Mechanism
from refattn.verification.conventions import CONVENTION_OPTIONS
from refattn.verification.probes.covering import combinations, covering_rows
from refattn.verification.probes.draft import Feature, Impossible, Level, build, sizes_of
from refattn.verification.probes.features import COVERED, possible
from refattn.verification.probes.own import features_of
from refattn.verification.probes.probe import Probe
from refattn.verification.probes.special import special_recipes, values_feature

__all__ = ["Entry", "Plan", "probes", "redraw"]

_TURNS = 8

FEW_SHAPES = ("plain", "mixed", "square", "more_queries", "decode", "equal", "single")
"""The shapes for candidates that are compiled anew for each."""

CAPABILITY_SIZES: dict[str, dict[str, int]] = {
    "grouped_heads": {"b": 1, "h": 6, "g": 2, "q": 13, "k": 21, "d": 20, "e": 20},
    "value_channels": {"b": 1, "h": 5, "g": 5, "q": 9, "k": 23, "d": 20, "e": 14},
}
"""Shapes that are asked first: the shapes of the table combine them."""

Accepts = Callable[[tuple[str, ...]], bool]
Fit = Callable[[dict[str, int]], dict[str, int]]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A recipe with its name: what a probe is built from."""

    name: str
    recipe: Mapping[str, str]
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    family: str = "alone"  # "alone" | "special" | "pairs"
    about: str = ""  # the feature that an "alone" probe asks for


class Plan:
    """The probes of one mechanism for one candidate.

    Parameters
    ----------
    accepts
        Whether the candidate takes a set of options, or of forms of them.
    fit
        What its limits make of axis lengths.
    allows
        Whether it takes these lengths: shapes that it does not take are left out.
    fixed
        Options fixed by the user: they go into every probe; features of these options stay plain.
    also
        Axis lengths of the user's own, probed beside the others.
    few_shapes
        The candidate is compiled anew for every shape: half of the shapes, no special ones, no forms of memory.
    seed
        What everything is drawn with.
    thorough
        Triples of levels too.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        *,
        accepts: Accepts | None = None,
        fit: Fit = dict,
        allows: Callable[[Mapping[str, int]], bool] = lambda sizes: True,
        fixed: Mapping[str, Any] | None = None,
        also: Mapping[str, int] | None = None,
        few_shapes: bool = False,
        seed: int = 0,
        thorough: bool = False,
    ) -> None:
        self.mechanism, self.fit, self.fixed, self.seed = mechanism, fit, dict(fixed or {}), seed
        self.allows, self.also, self.few_shapes = allows, dict(also or {}), few_shapes
        self.thorough = thorough
        self.accepts = accepts or (lambda names: True)
        self.all_features = {**features_of(mechanism), "values": values_feature(mechanism)}
        self.forbidden: set[frozenset[tuple[str, str]]] = set()  # levels that the mechanism does not allow together
        self.results: set[str] | None = None  # what the candidate returns, once that is known
        self.refused: dict[str, str] = {}  # recipes (by name) that the mechanism does not allow, and why

    # ------------------------------------------------------------------ features that the candidate takes

    def taken(self) -> dict[str, Feature]:
        """The features with the levels that the candidate takes, the first of them the plain one; others are left out."""
        found = {}
        for feature in self.all_features.values():
            if self.few_shapes and feature.name in ("memory", "cotangent_memory"):
                continue  # what is compiled has no strides
            levels = {n: x for n, x in feature.levels.items() if self._takes(x)}
            levels = levels or {feature.plain: feature.levels[feature.plain]}
            if feature.name == "shape":
                levels = self._shapes(levels)
            only = next(iter(levels.values()))
            if len(levels) > 1 or feature.name == "shape" or only.apply or only.example:
                found[feature.name] = Feature(feature.name, levels)
        return found

    def _shapes(self, levels: Mapping[str, Level]) -> dict[str, Level]:
        """Shapes that the candidate takes, each once."""
        kept: dict[str, Level] = {}
        seen: list[dict[str, int]] = []
        for name, level in levels.items():
            sizes = sizes_of(self.mechanism, self.fit(dict(level.sizes)))
            wanted = not self.few_shapes or name in FEW_SHAPES
            if not kept or (wanted and self.allows(sizes) and sizes not in seen):
                kept[name] = level
                seen.append(sizes)
        return kept

    def again(self, probe: Probe) -> Probe | None:
        """The probe with the limits that hold now."""
        return self.build(Entry(probe.name, probe.features, dict(probe.sizes) if "shape" not in probe.features else {}))

    def features_that_pass(self, options: Sequence[str]) -> set[str]:
        """The features some level of which passes one of these options."""
        found = set()
        for feature in self.all_features.values():
            if any(set(x.options) & set(options) for x in feature.levels.values()) and feature.name != "listed":
                found.add(feature.name)
        return found

    def _takes(self, level: Level) -> bool:
        if level.cotangent and self.results is not None and level.cotangent not in self.results:
            return False
        if set(level.options) & set(self.fixed) or (level.form and not self.accepts((level.form,))):
            return False
        asked = [n for n in level.options if n in self.mechanism.options and n not in self.mechanism.positional]
        return self.accepts(tuple(n for n in asked if n not in CONVENTION_OPTIONS))

    # ------------------------------------------------------------------ recipes

    def alone(self) -> list[Entry]:
        """The plainest call, and each level alone."""
        found = [Entry("plain", {})]
        for name, sizes in CAPABILITY_SIZES.items():
            known = sizes_of(self.mechanism, sizes)
            if "k" in known and known.keys() >= ({"g"} if name == "grouped_heads" else {"d", "e"}):
                found.append(Entry(name, {}, sizes, about="capability"))
        for feature in self.taken().values():
            if feature.name in CONVENTION_OPTIONS or feature.name == "values":
                continue
            for level in feature.levels:
                if level != feature.plain:
                    name = level if feature.name == "shape" else f"{feature.name}_{level}"
                    found.append(Entry(name, {feature.name: level}, about=feature.name))
        return found

    def special(self) -> list[Entry]:
        """Chosen values, triples on which kernels branch, all options at once."""
        taken = self.taken()
        found = [
            Entry(name, recipe, sizes, "special")
            for name, recipe, sizes in special_recipes(self.mechanism, self.all_features)
            if not (sizes and self.few_shapes) and all(n in taken and x in taken[n].levels for n, x in recipe.items())
        ]
        if self.also:
            found.append(Entry("also", {}, {"b": 1, **self.also}, "special"))
            if "causal" in taken:
                found.append(Entry("also_causal", {"causal": "on"}, {"b": 1, **self.also}, "special"))
        options = {
            n: next(x for x in f.levels if x != f.plain)
            for n, f in taken.items()
            if n in COVERED and n not in ("shape", "memory", "cotangent_memory", "cotangents")
        }
        shape = "mixed" if "mixed" in taken["shape"].levels else taken["shape"].plain
        if len(options) > 2:
            every = {n: x for n, x in options.items() if n not in ("lengths", "segments", "listed")}
            found.append(Entry("combined", {"shape": shape, **every}, {}, "special"))
        return found

    def pairs(self, covered: Sequence[Probe] = ()) -> list[Probe]:
        """Probes in which every pair of levels stands that none of those ``covered`` has.

        What the mechanism does not allow together is learnt from the rows that cannot be built; the others are drawn anew.
        """
        features = self._covered_features()
        levels = {n: tuple(f.levels) for n, f in features.items()}
        done = [self._row(p) for p in covered if set(p.features) <= set(features)]
        built: dict[tuple[tuple[str, str], ...], Probe | None] = {}

        def probe_of(recipe: Mapping[str, str]) -> Probe | None:
            key = tuple(recipe.items())
            if key not in built:
                built[key] = self.build(Entry("", recipe, {}, "pairs"))
            return built[key]

        rows: list[dict[str, str]] = []
        for _ in range(_TURNS):
            rows = []
            for strength in (2, 3) if self.thorough else (2,):
                fits = functools.partial(self._fits, features)
                rows += covering_rows(levels, strength=strength, possible=fits, covered=done + rows, seed=self.seed)
            recipes = [{n: x for n, x in row.items() if x != features[n].plain} for row in rows]
            bad = [recipe for recipe in recipes if probe_of(recipe) is None]
            if not bad:
                break
            for recipe in bad:
                self._learn(recipe, probe_of)
        found = [probe for recipe in recipes if (probe := probe_of(recipe)) is not None]
        return [dataclasses.replace(p, name=f"pairs_{i + 1}") for i, p in enumerate(found)]

    def _fits(self, features: Mapping[str, Feature], row: Mapping[str, str]) -> bool:
        return possible(row, features) and not any(pair <= row.items() for pair in self.forbidden)

    def _learn(self, recipe: Mapping[str, str], probe_of: Callable[[Mapping[str, str]], Any]) -> None:
        """Find the smallest part of the recipe that cannot be built, and never ask for it again."""
        part = dict(recipe)
        for name in recipe:
            less = {n: x for n, x in part.items() if n != name}
            if probe_of(less) is None:
                part = less
        self.forbidden.add(frozenset(part.items()))

    def _covered_features(self) -> dict[str, Feature]:
        own = set(self.all_features) - set(COVERED) - set(CONVENTION_OPTIONS) - {"values", "listed"}
        return {n: f for n, f in self.taken().items() if n in COVERED or n in own}

    def _row(self, probe: Probe) -> dict[str, str]:
        return {n: probe.features.get(n, f.plain) for n, f in self._covered_features().items()}

    # ------------------------------------------------------------------ probes

    def build(self, entry: Entry) -> Probe | None:
        """The probe, or None where the mechanism does not allow it (see ``refused``)."""
        try:
            return build(
                self.mechanism,
                self.taken(),
                entry.recipe,
                name=entry.name,
                sizes=entry.sizes,
                fit=self.fit,
                fixed=self.fixed,
                seed=self.seed,
            )
        except Impossible as error:
            self.refused[entry.name] = str(error)
            return None

    def build_all(self, entries: Sequence[Entry]) -> list[Probe]:
        return [probe for entry in entries if (probe := self.build(entry)) is not None]

    def rest(self, before: Sequence[Probe]) -> list[Probe]:
        """All probes beyond those ``before``: special ones, then pairs, rows that cannot be built taken apart."""
        made = self.build_all(self.special())
        return made + self.pairs([*before, *made])

    # ------------------------------------------------------------------ the table

    def table(self, made: Sequence[Probe], strength: int = 2) -> dict[tuple[tuple[str, str], ...], str]:
        """Every pair of levels that go together, and the probe in which it stands ("" = in none)."""
        features = self._covered_features()
        levels = {n: tuple(f.levels) for n, f in features.items()}
        where = dict.fromkeys(combinations(levels, strength, functools.partial(self._fits, features)), "")
        for probe in made:
            if set(probe.features) <= set(features):
                for chosen in itertools.combinations(self._row(probe).items(), strength):
                    if where.get(chosen) == "":
                        where[chosen] = probe.name
        return where


def probes(
    mechanism: Mechanism,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    accepts: Accepts | None = None,
    fit: Fit = dict,
    thorough: bool = False,
) -> list[Probe]:
    """All probes of a mechanism, those of one level alone in front (see :class:`Plan` for the arguments)."""
    plan = Plan(mechanism, accepts=accepts, fit=fit, fixed=options, seed=seed, thorough=thorough)
    first = plan.build_all(plan.alone())
    return first + plan.rest(first)


def redraw(
    mechanism: Mechanism,
    probe: Probe,
    *,
    features: Mapping[str, Feature] | None = None,
    drop: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    seed: int | None = None,
    fixed: Mapping[str, Any] | None = None,
    fit: Fit = dict,
) -> Probe:
    """The probe again: without some features, with other axis lengths, with another seed.

    Raises
    ------
    Impossible
        The mechanism does not allow it.
    """
    features = features or {**features_of(mechanism), "values": values_feature(mechanism)}
    recipe = {n: x for n, x in probe.features.items() if n not in drop}
    kept = {} if "shape" in drop else dict(probe.sizes)
    return build(
        mechanism,
        features,
        recipe,
        name=probe.name,
        sizes={**kept, **(sizes or {})},
        fit=fit,
        fixed=fixed,
        seed=probe.seed if seed is None else seed,
    )
