"""The report of a verification: what was found, as a record, and as text, JSON, JUnit and HTML.

Rows are calls (probe x dtype), each with one judgement per array.
"""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import refattn
from refattn.verification.verdict import THRESHOLDS, Judgement

__all__ = ["CRASHES", "SCHEMA_VERSION", "Report", "Row"]

SCHEMA_VERSION = 2

CRASHES = ("crash", "timeout", "memory")
"""Statuses of a call that did not come back."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One call: ``status`` is "ok", "mismatch", "error", "crash", "timeout", "memory", "not run" or "not supported"."""

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
        return self.status not in ("not run", "not supported")


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
        ``class`` (a name of the catalogue of mistakes), ``residual`` in units of the bound, ``outputs`` it explains, ``says``,
        ``scope`` (under which conditions), ``side`` ("both", "forward", "backward"), ``confirmed``; best first, empty when nothing
        fits.
    departs_at : dict
        ``values`` and ``gradients``: the first step of the definition at which the candidate departs, or None; ``unexplained``:
        failing arrays that no explanation covers.
    readings : tuple of str
        What the candidate attends to, where that was read.
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
    departs_at: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"values": None, "gradients": None, "unexplained": []}
    )
    readings: tuple[str, ...] = ()

    # ------------------------------------------------------------------ verdict

    @property
    def independent(self) -> bool | None:
        """False: the candidate itself imports refattn, and its agreement says nothing."""
        return self.candidate.get("independent")

    @property
    def exit_code(self) -> int:
        """0 matches, 1 mismatch, 3 crashed, hung or ran out of memory, 4 nothing was checked."""
        statuses = {row.status for row in self.rows}
        if statuses & set(CRASHES):
            return 3
        if statuses & {"mismatch", "error"} or self.independent is False or not all(p["ok"] for p in self.properties):
            return 1
        return 0 if "ok" in statuses else 4

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def failing(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.status not in ("ok", "not run", "not supported"))

    def __repr__(self) -> str:
        return f"<Report {self.headline()}>"

    def headline(self) -> str:
        """The verdict in one line."""
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

    def table(self, *, full: bool = False, brief: bool = False, width: int = 100) -> str:
        """The report as plain text: the verdict, what explains it, the failing calls, one line for all that passed.

        ``full`` shows every array of every call, ``brief`` the verdict and its causes alone; lines are wrapped to ``width``.
        """
        from refattn.verification.report import text

        return text.written(self, full=full, brief=brief, width=width)

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
            "departs_at": _plain(self.departs_at),
            "readings": list(self.readings),
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
        from refattn.verification.report import junit

        junit.write(self, path)

    def to_html(self, path: str | Path) -> None:
        """Write the report as one page that needs no other file."""
        from refattn.verification.report import page

        Path(path).write_text(page.written(self), encoding="utf-8")


def _plain(x: Any) -> Any:
    if isinstance(x, float):
        return x if math.isfinite(x) else str(x)
    if isinstance(x, dict):
        return {str(n): _plain(y) for n, y in x.items()}
    if isinstance(x, (list, tuple, set, frozenset)):
        return [_plain(y) for y in x]
    return x if x is None or isinstance(x, (str, int, bool)) else str(x)
