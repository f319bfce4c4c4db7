"""The report of a verification: text, JSON, JUnit, HTML.

Rows are calls (probe x dtype), each with one judgement per array.  The text shows every array of a failing call and the
worst one of a passing call; ``table(full=True)`` shows all.
"""

import dataclasses
import html
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import refattn
from refattn.verification.verdict import THRESHOLDS, Judgement

__all__ = ["SCHEMA_VERSION", "Report", "Row"]

SCHEMA_VERSION = 1

_CRASHES = ("crash", "timeout", "memory")
_WORDS = {
    "ok": "ok",
    "mismatch": "MISMATCH",
    "error": "ERROR",
    "crash": "CRASH",
    "timeout": "TIMEOUT",
    "memory": "OUT OF MEMORY",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One call: ``status`` is "ok", "mismatch", "error", "crash", "timeout", "memory" or "not run"."""

    probe: str
    dtype: str
    says: str
    status: str
    judgements: tuple[Judgement, ...] = ()
    message: str = ""
    traceback: str = ""
    seconds: float = 0.0

    @property
    def ran(self) -> bool:
        return self.status != "not run"


@dataclasses.dataclass(frozen=True)
class Report:
    """What a verification found.

    Attributes
    ----------
    mechanism : str
    candidate : dict
        What was verified, where it ran, and how it was called.
    rows : tuple of Row
    explanations : list of dict
        ``class`` (a name of the catalogue of mistakes), ``residual`` in units of the bound, ``outputs`` it explains,
        ``says``; best first, empty when nothing fits.
    notes : tuple of str
        Sentences: what the structure of the errors looks like, what was not checked and why, nondeterminism within the bound.
    properties : tuple of dict
        Checks without a reference (``properties=True``): ``name``, ``ok``, ``says``.
    """

    mechanism: str
    candidate: dict[str, Any]
    rows: tuple[Row, ...]
    explanations: list[dict[str, Any]]
    notes: tuple[str, ...] = ()
    properties: tuple[dict[str, Any], ...] = ()

    # ------------------------------------------------------------------ verdict

    @property
    def independent(self) -> bool | None:
        """False: the candidate itself imports refattn, and its agreement says nothing."""
        return self.candidate.get("independent")

    @property
    def exit_code(self) -> int:
        """0 matches, 1 mismatch, 3 crashed, hung or ran out of memory, 4 nothing was checked."""
        statuses = {row.status for row in self.rows}
        if statuses & set(_CRASHES):
            return 3
        if statuses & {"mismatch", "error"} or self.independent is False or not all(p["ok"] for p in self.properties):
            return 1
        return 0 if "ok" in statuses else 4

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def failing(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.status not in ("ok", "not run"))

    def __repr__(self) -> str:
        return f"<Report {self._headline()}>"

    def _headline(self) -> str:
        ran = [row for row in self.rows if row.ran]
        word = {0: "matches", 1: "MISMATCH", 3: "CRASHED", 4: "NOTHING WAS CHECKED"}[self.exit_code]
        parts = [f"{self.candidate.get('target', 'candidate')} as {self.mechanism}: {word}", f"{len(ran)} calls"]
        if self.failing:
            kinds = Counter(row.status for row in self.failing)
            parts.append(", ".join(f"{n} {kind}" for kind, n in kinds.items()))
        skipped = len({row.probe for row in self.rows if not row.ran})
        if skipped:
            parts.append(f"{skipped} probes not run")
        return "; ".join(parts)

    # ------------------------------------------------------------------ text

    def table(self, *, full: bool = False) -> str:
        """The report as plain text; ``full`` shows every array of every call."""
        lines = [self._headline(), self._where()]
        if self.independent is False:
            lines.append("NOT INDEPENDENT: the candidate imports refattn, so its agreement says nothing")
        lines += ["", *self._calls(full)]
        sections = [
            ("explained by", [_explanation(e) for e in self.explanations]),
            (
                "checks without a reference",
                [f"{'ok  ' if p['ok'] else 'FAILED'} {p['name']}: {p['says']}" for p in self.properties],
            ),
            ("notes", [*self.candidate.get("notes", ()), *self.notes]),
            ("not run", self._not_run()),
            ("not checked", self._not_checked()),
            ("error/bound that passes", self._thresholds()),
        ]
        for title, entries in sections:
            if entries:
                lines += ["", f"{title}:", *(f"  {entry}" for entry in entries)]
        return "\n".join(lines)

    def _where(self) -> str:
        about = self.candidate
        parts = [f"ran in {about.get('where', 'this process')}"]
        parts += [f"{name} {about[name]}" for name in ("framework", "layout", "preset") if about.get(name)]
        if about.get("conventions"):
            parts.append("declared: " + ", ".join(f"{n}={x}" for n, x in about["conventions"].items()))
        return "; ".join(parts)

    def _calls(self, full: bool) -> list[str]:
        rows = [row for row in self.rows if row.ran]
        if not rows:
            return ["no probe was run"]
        body = [("probe", "dtype", "array", "max", "median", "verdict")]
        for row in rows:
            name, dtype = row.probe, row.dtype
            judged = [j for j in row.judgements if j.verdict in ("ok", "mismatch")]
            if row.status == "ok" and not full:
                worst = max(judged, key=lambda j: j.maximum, default=None)
                arrays = " ".join(j.array for j in judged)
                figures = (
                    ("", "") if worst is None else (_figure(worst.maximum), _figure(max(j.median for j in judged)))
                )
                body.append((name, dtype, arrays, *figures, "ok"))
                continue
            for j in judged:
                verdict = "ok" if j.ok else "MISMATCH" + (" (certain)" if j.certain else "")
                body.append(
                    (name, dtype, j.array, _figure(j.maximum), _figure(j.median), f"{verdict}  {j.says}".rstrip())
                )
                name = dtype = ""
            if row.message or not judged:
                body.append((name, dtype, "", "", "", f"{_WORDS[row.status]}  {_first_line(row.message)}".rstrip()))
        return _aligned(body)

    def _not_run(self) -> list[str]:
        reasons: dict[str, list[str]] = {}
        for row in self.rows:
            if not row.ran and row.probe not in reasons.setdefault(_first_line(row.message), []):
                reasons[_first_line(row.message)].append(row.probe)
        return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]

    def _not_checked(self) -> list[str]:
        """One line per reason: the arrays, and how many calls."""
        arrays: dict[str, list[str]] = {}
        calls: Counter[str] = Counter()
        for row in self.rows:
            reasons = set()
            for j in row.judgements:
                if j.verdict in ("not checked", "not provided"):
                    reason = j.says or j.verdict
                    reasons.add(reason)
                    if j.array not in arrays.setdefault(reason, []):
                        arrays[reason].append(j.array)
            calls.update(reasons)
        return [f"{', '.join(arrays[reason])}: {reason} ({count} calls)" for reason, count in calls.most_common()]

    def _thresholds(self) -> list[str]:
        judged = [(row.dtype, j) for row in self.rows for j in row.judgements]
        used = sorted({(dtype, j.bound, j.limits) for dtype, j in judged if math.isfinite(j.limits[0])})
        return [f"{d}, {_KINDS[kind]}: maximum {largest:g}, median {median:g}" for d, kind, (largest, median) in used]

    # ------------------------------------------------------------------ files

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it; infinities are the strings "inf" and "-inf"."""
        return {
            "schema": "refattn.report",
            "schema_version": SCHEMA_VERSION,
            "refattn": refattn.__version__,
            "ok": self.ok,
            "exit_code": self.exit_code,
            "mechanism": self.mechanism,
            "candidate": _plain(self.candidate),
            "explanations": _plain(self.explanations),
            "notes": list(self.notes),
            "properties": _plain(self.properties),
            "rows": [_plain(dataclasses.asdict(row)) for row in self.rows],
            "thresholds": {d: {k: list(v) for k, v in kinds.items()} for d, kinds in THRESHOLDS.items()},
        }

    def to_json(self, path: str | Path) -> None:
        """Write the report as JSON; ``schema_version`` changes when a reader would have to."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def to_junit(self, path: str | Path) -> None:
        """Write the report as JUnit XML: one test case per call."""
        counts = Counter("error" if r.status in (*_CRASHES, "error") else r.status for r in self.rows)
        suite = ET.Element(
            "testsuite",
            name=f"refattn.{self.mechanism}",
            tests=str(len(self.rows)),
            failures=str(counts["mismatch"]),
            errors=str(counts["error"]),
            skipped=str(counts["not run"]),
            time=f"{sum(r.seconds for r in self.rows):.3f}",
        )
        for row in self.rows:
            named = {
                "classname": f"refattn.{self.mechanism}",
                "name": f"{row.probe}[{row.dtype}]",
                "time": f"{row.seconds:.3f}",
            }
            case = ET.SubElement(suite, "testcase", named)
            if row.status == "ok":
                continue
            kind = {"not run": "skipped", "mismatch": "failure"}.get(row.status, "error")
            wrong = [f"{j.array}: {j.says}" for j in row.judgements if not j.ok]
            message = _xml_text(row.message or "; ".join(wrong))
            ET.SubElement(case, kind, message=message).text = _xml_text("\n".join([*wrong, row.traceback]))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        ET.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)

    def to_html(self, path: str | Path) -> None:
        """Write the report as one page that needs no other file."""
        Path(path).write_text(_page(self), encoding="utf-8")


_KINDS = {"derived": "output against its derived bound", "spread": "everything else against the spread of legal orders"}


def _figure(x: float) -> str:
    return "inf" if math.isinf(x) else f"{x:.2g}" if x < 100 else f"{x:.3g}"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _explanation(entry: dict[str, Any]) -> str:
    where = f"{', '.join(entry['outputs'])}; residual {_figure(entry['residual'])} bounds"
    share = f"; {entry['share']:.0%} of the failing calls" if "share" in entry else ""
    return f"{entry['class']}: {entry['says']} ({where}{share})"


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


def _plain(x: Any) -> Any:
    if isinstance(x, float):
        return x if math.isfinite(x) else str(x)
    if isinstance(x, dict):
        return {str(n): _plain(y) for n, y in x.items()}
    if isinstance(x, (list, tuple, set, frozenset)):
        return [_plain(y) for y in x]
    return x if x is None or isinstance(x, (str, int, bool)) else str(x)


def _xml_text(text: str) -> str:
    """XML 1.0 has no control characters."""
    return "".join(c for c in text if c in "\t\n\r" or ord(c) >= 32)


# ---------------------------------------------------------------------- HTML

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
  color: #1b1f24; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #d8dee4; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.ok { color: #1a7f37; } .bad { color: #c11f2d; font-weight: 600; } .dim { color: #59636e; }
@media (prefers-color-scheme: dark) {
  body { background: #0d1117; color: #e6edf3; } th, td { border-color: #30363d; }
  .ok { color: #3fb950; } .bad { color: #ff7b72; } .dim { color: #9198a1; }
}
"""


def _page(report: Report) -> str:
    def cell(text: Any, kind: str = "") -> str:
        return f'<td class="{kind}">{html.escape(str(text))}</td>' if kind else f"<td>{html.escape(str(text))}</td>"

    def section(title: str, entries: Iterable[str]) -> str:
        listed = "".join(f"<li>{html.escape(entry)}</li>" for entry in entries)
        return f"<h2>{html.escape(title)}</h2><ul>{listed}</ul>" if listed else ""

    rows = []
    for row in report.rows:
        word = "not run" if row.status == "not run" else _WORDS[row.status]
        kind = {"ok": "ok", "not run": "dim"}.get(row.status, "bad")
        judged = [j for j in row.judgements if j.verdict in ("ok", "mismatch")]
        if not judged or row.message:
            rows.append(
                f"<tr>{cell(row.probe)}{cell(row.dtype)}{cell('')}{cell('')}{cell('')}{cell(word, kind)}{cell(row.message)}</tr>"
            )
        for j in judged:
            verdict, style = ("ok", "ok") if j.ok else ("MISMATCH" + (" (certain)" if j.certain else ""), "bad")
            figures = cell(_figure(j.maximum), "n") + cell(_figure(j.median), "n")
            rows.append(
                f"<tr>{cell(row.probe)}{cell(row.dtype)}{cell(j.array)}{figures}{cell(verdict, style)}{cell(j.says or row.says)}</tr>"
            )
    head = "".join(f"<th>{name}</th>" for name in ("probe", "dtype", "array", "max", "median", "verdict", ""))
    style = "ok" if report.ok else "bad"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(report._headline())}</title><style>{_STYLE}</style></head><body>"
        f'<h1 class="{style}">{html.escape(report._headline())}</h1><p>{html.escape(report._where())}</p>'
        + section("Explained by", [_explanation(e) for e in report.explanations])
        + section(
            "Checks without a reference",
            [f"{p['name']}: {'ok' if p['ok'] else 'failed'}. {p['says']}" for p in report.properties],
        )
        + section("Notes", [*report.candidate.get("notes", ()), *report.notes])
        + f"<h2>Calls</h2><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        + section("Not checked", report._not_checked())
        + section("Error/bound that passes", report._thresholds())
        + f'<p class="dim">refattn {html.escape(refattn.__version__)}</p></body></html>\n'
    )
