"""Which axis lengths a candidate takes: said by hand (``--sizes``), read from a model, or found out by asking."""

import dataclasses
from collections.abc import Mapping

from refattn.verification.errors import UsageError

__all__ = ["LETTERS", "Limits", "parse_sizes"]

LETTERS = "bhgqkdetmxyn"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Axis lengths that a candidate takes, by letter.

    Attributes
    ----------
    only
        The numbers that are allowed; the nearest one is taken.
    multiples
        Lengths are rounded up to a multiple.
    equal
        The second letter of each entry follows the first: ``{"h": "g"}`` = as many key heads as query heads.
    largest
        Lengths are cut to this.
    """

    only: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    multiples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    equal: Mapping[str, str] = dataclasses.field(default_factory=dict)
    largest: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def fit(self, sizes: dict[str, int]) -> dict[str, int]:
        """The nearest sizes that are allowed."""
        fitted = dict(sizes)
        for letter, numbers in self.only.items():
            if letter in fitted:
                fitted[letter] = min(numbers, key=lambda n: abs(n - sizes[letter]))
        for letter, step in self.multiples.items():
            if letter in fitted:
                fitted[letter] = -(-fitted[letter] // step) * step
        for letter, most in self.largest.items():
            if letter in fitted:
                fitted[letter] = min(fitted[letter], most)
        for leader, follower in self.equal.items():
            if leader in fitted and follower in fitted:
                fitted[follower] = fitted[leader]
        if fitted.get("g") and fitted.get("h") and fitted["h"] % fitted["g"]:
            fitted["g"] = next(g for g in range(fitted["g"], 0, -1) if fitted["h"] % g == 0)
        return fitted

    def with_equal(self, leader: str, follower: str) -> "Limits":
        return dataclasses.replace(self, equal={**self.equal, leader: follower})

    def with_only(self, **numbers: int) -> "Limits":
        return dataclasses.replace(self, only={**self.only, **{n: (x,) for n, x in numbers.items()}})

    def with_multiples(self, **steps: int) -> "Limits":
        return dataclasses.replace(self, multiples={**self.multiples, **steps})

    def words(self) -> str:
        """In the form that ``--sizes`` takes."""
        parts = [f"{n}={'/'.join(map(str, x))}" for n, x in self.only.items()]
        parts += [f"{n}={x}n" for n, x in self.multiples.items()]
        parts += [f"{n}={x}" for n, x in self.equal.items()]
        return ",".join(parts)


def parse_sizes(text: str) -> Limits:
    """``q=128n,k=128n,h=g,d=64/128,b=1``: a number, a list, any multiple of a number, or another letter.

    Raises
    ------
    UsageError
        If it is not of that form.
    """
    only: dict[str, tuple[int, ...]] = {}
    multiples: dict[str, int] = {}
    equal: dict[str, str] = {}
    for part in filter(None, (x.strip() for x in text.split(","))):
        letter, _, value = (x.strip() for x in part.partition("="))
        if len(letter) != 1 or letter not in LETTERS or not value:
            raise UsageError(
                f"sizes: {part!r}: expected LETTER=NUMBER, NUMBER/NUMBER, NUMBERn or LETTER, letters of {LETTERS}"
            )
        if len(value) == 1 and value in LETTERS:
            equal[letter] = value
        elif value.endswith("n") and value[:-1].isdecimal() and int(value[:-1]) > 0:
            multiples[letter] = int(value[:-1])
        elif all(x.isdecimal() and int(x) > 0 for x in value.split("/")):
            only[letter] = tuple(int(x) for x in value.split("/"))
        else:
            raise UsageError(f"sizes: {letter} is {value!r}: expected NUMBER, NUMBER/NUMBER, NUMBERn or another letter")
    return Limits(only, multiples, equal)
