"""What a mechanism's file says of itself: title, equation, axes and source, read from its docstring.

The docstring stands in this order::

    Name of the mechanism: one sentence.

        output[h,q,e] = ...                     indented: the equation, up to the first line that is not indented

    ======  ==============  =========
    letter  axis            where
    ======  ==============  =========
    h       head            q, k, v             one letter, one text; or several of each, separated by ", ":
    q, k    query, key      q; k, v             one text for every letter, else one text for all of them
    ======  ==============  =========

    Source: author year, where, section.  Anything after two spaces is not part of it.

Anything else may stand between these parts.
"""

import dataclasses
import re
from types import MappingProxyType
from typing import Any

__all__ = ["Description", "described"]


@dataclasses.dataclass(frozen=True)
class Description:
    """The parts of a docstring."""

    title: str
    equation: str
    paper: str
    axes: MappingProxyType[str, str]


def described(where: str, text: str | None) -> Description:
    """The parts of a module's docstring; an error names the module and the part that is missing."""
    lines = (text or "").strip().splitlines()
    parts: dict[str, Any] = {
        "title": " ".join(lines[:1]).strip(),
        "equation": _equation(lines[1:]),
        "axes": _axes(lines),
        "paper": _paper("\n".join(lines)),
    }
    wanted = {
        "title": "a first line",
        "equation": "an indented equation",
        "axes": 'a table of axes with the head "letter  axis  where"',
        "paper": 'a paragraph "Source: ..."',
    }
    for name, part in parts.items():
        if not part:
            raise ValueError(f"the docstring of {where} has no {name}: expected {wanted[name]} (refattn.described)")
    return Description(**{**parts, "axes": MappingProxyType(parts["axes"])})


def _equation(lines: list[str]) -> str:
    """The first run of indented lines, empty ones inside it included, without the common indentation."""
    run: list[str] = []
    for line in lines:
        if line.startswith("    ") or (run and not line.strip()):
            run.append(line)
        elif run:
            break
    shift = min((len(x) - len(x.lstrip()) for x in run if x.strip()), default=0)
    return "\n".join(x[shift:].rstrip() for x in run).strip("\n")


def _axes(lines: list[str]) -> dict[str, str]:
    """Letter -> text, of the table whose head begins with ``letter``."""
    heads = [n for n, line in enumerate(lines) if re.match(r"letter +axis", line)]
    if not heads or heads[0] == 0:
        return {}
    rule = lines[heads[0] - 1]
    columns = [m.span() for m in re.finditer("=+", rule)]
    if len(columns) < 2:
        return {}
    rows: list[list[str]] = []
    for line in lines[heads[0] + 2 :]:
        if line.startswith("==="):
            break
        letters, text = (line[start:end].strip() for start, end in columns[:2])
        if letters:
            rows.append([letters, text])
        elif rows:
            rows[-1][1] += f" {text}"
    axes: dict[str, str] = {}
    for letters, text in rows:
        names, texts = letters.split(", "), text.split(", ")
        if len(names) == 1 or len(names) != len(texts):
            texts = [text] * len(names)
        axes.update((n, x) for n, x in zip(names, texts, strict=True) if n != "...")
    return axes


def _paper(text: str) -> str:
    """What follows ``Source:``, up to two spaces or the end of the paragraph."""
    found = re.search(r"Source: +(.*?)(?:\.?  |\n\n|\Z)", text, re.DOTALL)
    return " ".join(found.group(1).split()).rstrip(".") if found else ""
