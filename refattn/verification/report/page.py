"""The report as one HTML page that needs no other file."""

import html
from collections.abc import Iterable
from typing import Any

import refattn
from refattn.verification.report import Report
from refattn.verification.report.text import WORDS, explanation, figure, not_checked, thresholds, where

__all__ = ["written"]

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


def written(report: Report) -> str:
    def cell(text: Any, kind: str = "") -> str:
        return f'<td class="{kind}">{html.escape(str(text))}</td>' if kind else f"<td>{html.escape(str(text))}</td>"

    def section(title: str, entries: Iterable[str]) -> str:
        listed = "".join(f"<li>{html.escape(entry)}</li>" for entry in entries)
        return f"<h2>{html.escape(title)}</h2><ul>{listed}</ul>" if listed else ""

    rows = []
    for row in report.rows:
        word = WORDS.get(row.status, row.status)
        kind = {"ok": "ok", "not run": "dim", "not supported": "dim"}.get(row.status, "bad")
        judged = [j for j in row.judgements if j.verdict in ("ok", "mismatch")]
        if not judged or row.message:
            rows.append(
                f"<tr>{cell(row.probe)}{cell(row.dtype)}{cell('')}{cell('')}{cell('')}{cell(word, kind)}{cell(row.message)}</tr>"
            )
        for j in judged:
            verdict, style = ("ok", "ok") if j.ok else ("MISMATCH" + (" (certain)" if j.certain else ""), "bad")
            figures = cell(figure(j.maximum), "n") + cell(figure(j.median), "n")
            rows.append(
                f"<tr>{cell(row.probe)}{cell(row.dtype)}{cell(j.array)}{figures}{cell(verdict, style)}{cell(j.says or row.says)}</tr>"
            )
    head = "".join(f"<th>{name}</th>" for name in ("probe", "dtype", "array", "max", "median", "verdict", ""))
    style = "ok" if report.ok else "bad"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(report.headline())}</title><style>{_STYLE}</style></head><body>"
        f'<h1 class="{style}">{html.escape(report.headline())}</h1><p>{html.escape(where(report))}</p>'
        + section("Explained by", [explanation(e) for e in report.explanations])
        + section(
            "Checks without a reference",
            [f"{p['name']}: {'ok' if p['ok'] else 'failed'}. {p['says']}" for p in report.properties],
        )
        + section("Notes", [*report.candidate.get("notes", ()), *report.notes])
        + f"<h2>Calls</h2><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        + section("Not checked", not_checked(report))
        + section("Error/bound that passes", thresholds(report))
        + f'<p class="dim">refattn {html.escape(refattn.__version__)}</p></body></html>\n'
    )
