"""Everything that explains what fails, in the order in which a report says it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from refattn.verification.allowances import explained_by_allowance
from refattn.verification.diagnosis import Explanation, JudgedCall, Live, Workbench, explain

__all__ = ["Causes", "causes_of"]


@dataclasses.dataclass(frozen=True)
class Causes:
    """``mistakes`` are what diagnosis found; ``records`` are all explanations, as the report shows them."""

    mistakes: list[Explanation]
    records: list[dict[str, Any]]


def causes_of(
    cases: Sequence[JudgedCall],
    bench: Workbench,
    *,
    live: Live | None = None,
    structural: Sequence[dict[str, Any]] = (),
) -> Causes:
    """Explanations of the failing calls; ``structural`` are those that are known from how the candidate behaves.

    Calls that these are about are not explained once more.
    """
    covered = {probe for entry in structural for probe in entry["probes"]}
    open_cases = [c for c in cases if not (c.failing and c.probe in covered)]
    failing = sum(bool(c.failing) for c in open_cases)
    mistakes = explain(open_cases, bench, live=live)
    records = [e.as_record(failing) for e in mistakes] + list(structural)
    roundings = [e.as_record() for e in explained_by_allowance(open_cases)]
    declarable = {e["class"] for e in roundings}
    records = [e for e in records if e["class"] not in declarable]
    whole = any(e.confirmed and not e.left and e.name not in declarable for e in mistakes)
    return Causes(mistakes, records + roundings if whole else roundings + records)
