"""The report as text: the verdict and its cause first, then the failing calls, then everything else in few lines."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from refattn.verification.report import Report, Row

__all__ = ["WORDS", "explanation", "figure", "not_checked", "thresholds", "where", "written"]

WORDS = {
    "ok": "ok",
    "mismatch": "MISMATCH",
    "error": "ERROR",
    "crash": "CRASH",
    "timeout": "TIMEOUT",
    "memory": "OUT OF MEMORY",
}

_SHOWN = 12
"""Failing calls of one cause that are shown; the others are counted."""


def written(report: Report, *, full: bool = False, brief: bool = False, width: int = 100) -> str:
    """The whole text; see :meth:`Report.table`."""
    lines = [report.headline()]
    if report.independent is False:
        why = report.candidate.get("called") or "it imports refattn"
        lines.append(f"NOT INDEPENDENT: {why}, so its agreement says nothing")
    lines += _causes(report, width)
    if brief:
        return "\n".join(lines)
    lines.append(where(report))
    lines += _calls(report, full, width)
    sections = [
        (
            "checks without a reference",
            [f"{'ok  ' if p['ok'] else 'FAILED'} {p['name']}: {p['says']}" for p in report.properties],
        ),
        ("notes", [*report.candidate.get("notes", ()), *report.notes]),
        ("not run", _not_run(report)),
        ("not checked", not_checked(report)),
        ("error/bound that passes", thresholds(report)),
    ]
    for title, entries in sections:
        if entries:
            lines += ["", f"{title}:", *(line for entry in entries for line in _wrapped(entry, width, "  "))]
    return "\n".join(lines)


def explanation(entry: dict[str, Any]) -> str:
    """One explanation in one line."""
    place = f"{', '.join(entry['outputs'])}; residual {figure(entry['residual'])} bounds"
    share = f"; {entry['share']:.0%} of the failing calls" if "share" in entry else ""
    return f"{entry['class']}: {entry['says']} ({place}{share})"


def _causes(report: Report, width: int) -> Iterator[str]:
    if report.explanations:
        yield ""
        yield "explained by:"
    for entry in report.explanations:
        yield from _wrapped(explanation(entry), width, "  ")
        details = [("where", entry.get("scope")), ("why", entry.get("why"))]
        if entry.get("side") in ("forward", "backward"):
            details.append(("in", f"the {entry['side']} alone"))
        if entry.get("at some places only"):
            details.append(("but", f"at some places of {', '.join(entry['at some places only'])} only"))
        if entry.get("left"):
            details.append(("leaves", f"{', '.join(entry['left'])} unexplained"))
        if entry.get("confirmed") is False and "confirmed" in entry:
            details.append(("note", "one call shows it: possible, not confirmed"))
        for word, detail in details:
            if detail:
                yield from _wrapped(f"{word}: {detail}", width, "    ")
        for source in entry.get("sources", ())[:2]:
            if source["right"] and source["edited"]:
                yield f"    step {source['step']}, right:"
                yield from textwrap.indent(source["right"], "      ").splitlines()[:12]
                yield "    with the mistake:"
                yield from textwrap.indent(source["edited"], "      ").splitlines()[:12]
    departs = report.departs_at
    if departs["values"] or departs["gradients"]:
        steps = [f"{what} at {departs[what]}" for what in ("values", "gradients") if departs[what]]
        yield f"first step that departs from the definition: {', '.join(steps)}"
    if departs["unexplained"]:
        yield f"no mistake of the catalogue and no other convention explains {', '.join(departs['unexplained'])}"
    for sentence in report.readings:
        yield from _wrapped(f"read from the kernel: {sentence}", width, "")


def where(report: Report) -> str:
    """Where the candidate ran, and after which conventions."""
    about = report.candidate
    parts = [f"ran in {about.get('where', 'this process')}"]
    parts += [f"{name} {about[name]}" for name in ("framework", "layout", "preset") if about.get(name)]
    if about.get("conventions"):
        parts.append("declared: " + ", ".join(f"{n}={x}" for n, x in about["conventions"].items()))
    return "; ".join(parts)


def _calls(report: Report, full: bool, width: int) -> Iterator[str]:
    rows = [row for row in report.rows if row.ran]
    if not rows:
        yield "no probe was run"
        return
    passed = [row for row in rows if row.status == "ok"]
    failed = [row for row in rows if row.status != "ok"]
    for cause, some in _by_cause(report, failed):
        yield ""
        yield f"failing, {cause}:" if cause else "failing:"
        if full:
            yield from _aligned([_HEAD, *(line for row in some for line in _arrays(row))])
            continue
        lines = [(row.probe, row.dtype, _in_short(row)) for row in some[:_SHOWN]]
        yield from (f"  {line}" for line in _aligned(lines))
        for j in some[0].judgements:
            if not j.ok:
                yield from _wrapped(f"{some[0].probe}, {j.array}: {j.says}", width, "    ")
        if len(some) > _SHOWN:
            yield f"  and {len(some) - _SHOWN} more"
    if full and passed:
        yield ""
        yield "passing:"
        yield from _aligned([_HEAD, *(line for row in passed for line in _arrays(row))])
    elif passed:
        judged = [(j.maximum, j.array, row.probe) for row in passed for j in row.judgements if j.verdict == "ok"]
        worst = max(judged, default=None)
        told = "" if worst is None else f", worst {figure(worst[0])} bounds ({worst[1]} of {worst[2]})"
        arrays = sorted({array for _, array, _ in judged})
        yield ""
        yield from _wrapped(f"{len(passed)} calls match{told}: {', '.join(arrays)}", width, "")


def _in_short(row: Row) -> str:
    """The failing arrays of a call with their largest error in bounds; what else is wrong with it."""
    wrong = [j for j in row.judgements if not j.ok]
    told = [f"{j.array} {figure(j.maximum)}" for j in wrong]
    certain = " (certain: beyond what any rounding explains)" if any(j.certain for j in wrong) else ""
    parts = [f"{WORDS.get(row.status, row.status)}{certain}"]
    if told:
        parts.append(", ".join(told) + " bounds")
    if row.message:
        parts.append(_first_line(row.message))
    return "  ".join(parts)


_HEAD = ("probe", "dtype", "array", "max", "median", "verdict")


def _by_cause(report: Report, failed: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Failing calls under the explanation that covers them, the others last."""
    left = list(failed)
    for entry in report.explanations:
        named = set(entry.get("probes", ()))
        some = [row for row in left if row.probe in named]
        if some:
            left = [row for row in left if row.probe not in named]
            yield entry["class"], some
    if left:
        yield "unexplained" if report.explanations else "", left


def _arrays(row: Row) -> Iterator[tuple[str, ...]]:
    """A line for every array of a call."""
    name, dtype = row.probe, row.dtype
    judged = [j for j in row.judgements if j.verdict in ("ok", "mismatch")]
    for j in judged:
        certain = " (certain)" if j.certain else ""
        verdict = "ok" if j.ok else f"MISMATCH{certain}  {j.says}".rstrip()
        yield name, dtype, j.array, figure(j.maximum), figure(j.median), verdict
        name = dtype = ""
    if row.message or not judged:
        yield name, dtype, "", "", "", f"{WORDS.get(row.status, row.status)}  {_first_line(row.message)}".rstrip()


def _not_run(report: Report) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for row in report.rows:
        if not row.ran and row.probe not in reasons.setdefault(_first_line(row.message), []):
            reasons[_first_line(row.message)].append(row.probe)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


def not_checked(report: Report) -> list[str]:
    """One line per reason: the arrays, and how many calls."""
    arrays: dict[str, list[str]] = {}
    calls: Counter[str] = Counter()
    for row in report.rows:
        reasons = set()
        for j in row.judgements:
            if j.verdict in ("not checked", "not provided"):
                reason = j.says or j.verdict
                reasons.add(reason)
                if j.array not in arrays.setdefault(reason, []):
                    arrays[reason].append(j.array)
        calls.update(reasons)
    return [f"{', '.join(arrays[reason])}: {reason} ({count} calls)" for reason, count in calls.most_common()]


def thresholds(report: Report) -> list[str]:
    """The error/bound that passes, for every dtype and kind of bound in use."""
    judged = [(row.dtype, j) for row in report.rows for j in row.judgements]
    used = sorted({(dtype, j.bound, j.limits) for dtype, j in judged if math.isfinite(j.limits[0])})
    return [
        f"{dtype}, {kind or 'any'} bound: maximum {largest:g}, median {median:g}"
        for dtype, kind, (largest, median) in used
    ]


def figure(x: float) -> str:
    """A number of bounds, two or three digits."""
    return "inf" if math.isinf(x) else f"{x:.2g}" if x < 100 else f"{x:.3g}"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text, max(width, 40), initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False
    )


def _aligned(body: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[i]) for line in body) for i in range(len(body[0]) - 1)]
    lines = []
    for line in body:
        cells = [
            cell.rjust(w) if i in (3, 4) else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=False))
        ]
        lines.append("  ".join([*cells, line[-1]]).rstrip())
    return lines
