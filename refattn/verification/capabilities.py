"""What a candidate takes: asked once, by one small call each, and remembered.

A *capability* is a name: a shape (``grouped_heads``, ``value_channels``, ``one_query``, ``more_queries``,
``unequal_lengths``, ``batch``, ``wide_channels``, ``long``), an option, or a dtype.  An exception on the first call that
asks for one means "does not take it"; after it was answered once, an exception is a mismatch.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from refattn.verification.candidate import Outcome
from refattn.verification.limits import Limits
from refattn.verification.probes import Probe

__all__ = ["SHAPE_CAPABILITIES", "Capabilities", "capabilities_of", "shape_capabilities"]

SHAPE_CAPABILITIES = (
    "grouped_heads",
    "value_channels",
    "one_query",
    "more_queries",
    "unequal_lengths",
    "batch",
    "wide_channels",
    "long",
    "value_groups",
    "ragged_length",
)


def shape_capabilities(sizes: Mapping[str, int]) -> set[str]:
    """What a set of axis lengths asks for."""
    b, h, g, q, k, d, e, t = (sizes.get(n) for n in "bhgqkdet")
    asked = {
        "grouped_heads": bool(g and h and g < h),
        "value_channels": bool(d and e and d != e),
        "one_query": q == 1,
        "more_queries": bool(q and k and q > k),
        "unequal_lengths": bool(q and k and q != k),
        "batch": bool(b and b > 1),
        "wide_channels": max(d or 0, e or 0) > 128,
        "long": max(q or 0, k or 0) >= 2000,
        "value_groups": bool(g and h and g > h),
        "ragged_length": bool(g and t and not q and not k and t % 16),
    }
    return {n for n, x in asked.items() if x}


def capabilities_of(probe: Probe) -> set[str]:
    """What a probe asks for: its shape, its options, unusual forms of these."""
    return shape_capabilities(probe.sizes) | set(probe.options) | set(probe.forms)


class Capabilities:
    """What was asked and answered so far.

    Parameters
    ----------
    limits
        Axis lengths that are known to be taken.
    requires
        Capabilities whose refusal is a mismatch.
    recurrent
        Heads may be unequal in two ways, and refusing one of them says nothing of the other.
    """

    def __init__(self, limits: Limits, requires: Sequence[str] = (), *, recurrent: bool = False) -> None:
        self.limits, self.requires, self.recurrent = limits, tuple(requires), recurrent
        self._answered: set[str] = set()
        self._refused: dict[str, str] = {}

    def answer(self, names: set[str], outcome: Outcome) -> None:
        if outcome.status in ("ok", "crash", "timeout", "memory"):
            self._answered |= names

    def refuse(self, name: str, why: str, *, known: bool = False) -> None:
        """It is not taken; shapes that ask for it are changed or left out from now on."""
        self._refused[name] = why
        if name == "grouped_heads" and not self.recurrent:
            self.limits = self.limits.with_equal("h", "g")
        elif name == "value_channels":
            self.limits = self.limits.with_equal("d", "e")
        elif name == "ragged_length":
            self.limits = dataclasses.replace(self.limits, multiples={**self.limits.multiples, "t": 16})
        elif name == "unequal_lengths":
            self.limits = self.limits.with_equal("q", "k")
        elif name == "batch":
            self.limits = self.limits.with_only(b=1)
        elif name == "wide_channels":
            self.limits = dataclasses.replace(self.limits, largest={**self.limits.largest, "d": 128, "e": 128})
        if known:
            self._answered.add(name)

    def refused(self, name: str) -> bool:
        return name in self._refused

    def required(self, words: str) -> bool:
        return any(n in self.requires for n in words.split(", "))

    def unknown(self, names: set[str]) -> set[str]:
        """Those that were never answered."""
        return {n for n in names if n not in self._answered and n not in self._refused}

    def allows(self, sizes: Mapping[str, int]) -> bool:
        """Whether nothing that these lengths ask for is refused."""
        return not any(self.refused(n) for n in shape_capabilities(sizes))

    # ------------------------------------------------------------------ a kernel that refuses the plainest shapes

    def friendly(self) -> Iterator[Limits]:
        """Sizes that kernels with narrow shapes take, the most usual first."""
        start = self.limits
        yield start.with_only(q=1)  # a kernel for decoding
        for d in (64, 128, 32):
            for step in (128, 16):
                yield dataclasses.replace(
                    start,
                    only={"b": (1,), "d": (d,), "e": (d,), "h": (4,), "g": (4,), **start.only},
                    multiples={"q": step, "k": step, "t": step, **start.multiples},
                    equal={"q": "k", "h": "g", "d": "e", **start.equal},
                )
        yield dataclasses.replace(
            start, only={"b": (1,), "q": (1,), "d": (64,), "e": (64,), "h": (4,), "g": (4,), **start.only}
        )

    def relaxations(self) -> Iterator[Limits]:
        """One limit after another taken off those in force now; what is refused is put back by the caller."""
        for letters in (("b",), ("h", "g"), ("d", "e")):
            if not set(letters) & set(self.limits.only):
                continue
            only = {n: x for n, x in self.limits.only.items() if n not in letters}
            yield dataclasses.replace(self.limits, only=only)
        for leader in ("h", "d", "q"):
            if leader in self.limits.equal:
                yield dataclasses.replace(
                    self.limits, equal={n: x for n, x in self.limits.equal.items() if n != leader}
                )
        for step in (1, 16, 32, 64):
            if step < self.limits.multiples.get("q", 1):
                multiples = dict.fromkeys(self.limits.multiples, step) if step > 1 else {}
                yield dataclasses.replace(self.limits, multiples=multiples)
