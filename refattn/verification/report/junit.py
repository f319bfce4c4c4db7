"""The report as JUnit XML."""

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

from refattn.verification.report import CRASHES, Report

__all__ = ["write"]


def write(report: Report, path: str | Path) -> None:
    """Write the report as JUnit XML: one test case per call."""
    counts = Counter("error" if r.status in (*CRASHES, "error") else r.status for r in report.rows)
    suite = ET.Element(
        "testsuite",
        name=f"refattn.{report.mechanism}",
        tests=str(len(report.rows)),
        failures=str(counts["mismatch"]),
        errors=str(counts["error"]),
        skipped=str(counts["not run"] + counts["not supported"]),
        time=f"{sum(r.seconds for r in report.rows):.3f}",
    )
    for row in report.rows:
        named = {
            "classname": f"refattn.{report.mechanism}",
            "name": f"{row.probe}[{row.dtype}]",
            "time": f"{row.seconds:.3f}",
        }
        case = ET.SubElement(suite, "testcase", named)
        if row.status == "ok":
            continue
        kind = {"not run": "skipped", "not supported": "skipped", "mismatch": "failure"}.get(row.status, "error")
        wrong = [f"{j.array}: {j.says}" for j in row.judgements if not j.ok]
        message = _xml_text(row.message or "; ".join(wrong))
        ET.SubElement(case, kind, message=message).text = _xml_text("\n".join([*wrong, row.traceback]))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def _xml_text(text: str) -> str:
    """XML 1.0 has no control characters."""
    return "".join(c for c in text if c in "\t\n\r" or ord(c) >= 32)
