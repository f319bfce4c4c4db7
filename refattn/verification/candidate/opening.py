"""Opening a candidate: where it runs, and one way of calling all of them."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from refattn.mechanism import mechanisms
from refattn.verification.candidate.adapter import Adapter
from refattn.verification.candidate.calls import Call, Outcome
from refattn.verification.candidate.places import Here, InChild, Program, Recorded
from refattn.verification.candidate.signature import Acceptance
from refattn.verification.candidate.targets import TARGET_FORMS, load_function
from refattn.verification.conventions import CONVENTION_OPTIONS, resolve
from refattn.verification.errors import UsageError

__all__ = ["Abilities", "Candidate", "Patience", "open_candidate"]


@dataclasses.dataclass(frozen=True)
class Abilities:
    """What a candidate can be asked beyond the planned calls.

    Attributes
    ----------
    resize
        It takes arrays of other lengths.
    options
        It takes options that are handed over (those that :meth:`Candidate.accepts`).
    values
        It takes arrays of other values.
    gradients
        It gives gradients.
    """

    resize: bool = True
    options: bool = True
    values: bool = True
    gradients: bool = False


class Patience:
    """How long a candidate that hangs or crashes is put up with.

    After the second call that ran out of time every further one gets ``short`` seconds; after the fifth, or when all hung
    calls together took ``budget`` seconds, or after ``crashes`` crashes, no call is made any more.
    """

    def __init__(self, budget: float = 90.0, *, short: float = 3.0, hangs: int = 5, crashes: int = 12) -> None:
        self.budget, self.short, self.hangs, self.crashes = budget, short, hangs, crashes
        self.hung = self.crashed = 0
        self.spent = 0.0

    @property
    def over(self) -> bool:
        """Whether no call is made any more."""
        return self.hung >= self.hangs or self.crashed >= self.crashes or self.spent >= self.budget

    def seconds(self, limit: float) -> float:
        """The time that the next call gets; 0 = it is not made."""
        if self.over:
            return 0.0
        return min(limit if self.hung < 2 else min(limit, self.short), self.budget - self.spent)

    def note(self, outcome: Outcome, seconds: float) -> None:
        """Take a call's end into account."""
        if outcome.status == "timeout":
            self.hung += 1
            self.spent += seconds
        elif outcome.status in ("crash", "memory"):
            self.crashed += 1

    def words(self) -> str:
        if self.crashed >= self.crashes:
            return f"not called: {self.crashed} calls before it crashed"
        return f"not called: {self.hung} calls before it hung"


class Candidate:
    """An opened candidate (see :func:`open_candidate`); a context manager.

    Attributes
    ----------
    name, where
        What it is called; "this process", "child process" or "recorded call".
    conventions
        Declared ones, a preset's included.
    framework, layout, notes
        What it is called with, and sentences for the report.
    has_backward
        A backward was given, or the framework differentiates.
    abilities, patience
        What it can be asked beyond the planned calls; how long hanging is put up with.
    recorded
        The only calls that a recorded call can answer; empty for every other candidate.
    """

    def __init__(self, make: Callable[[], Any], jobs: int = 1, abilities: Abilities | None = None) -> None:
        self._make = make
        self._places = [make()]
        first = self._places[0]
        about = first.loaded
        self._jobs = max(1, jobs) if first.where == "child process" else 1
        self.name: str = about["name"]
        self.where: str = first.where
        self.conventions = resolve(about["conventions"])
        self.framework: str = about["framework"]
        self.layout: str = about["layout"]
        self.has_backward: bool = about["has_backward"]
        self.explicit_backward: bool = about["explicit_backward"]
        self.compiles: bool = about["compiles"]
        self.notes: tuple[str, ...] = tuple(about["notes"])
        self.patience = Patience()
        self._called: set[str] = set()
        self._mechanism: str = about["mechanism"]
        self.abilities = dataclasses.replace(abilities or Abilities(), gradients=self.has_backward)
        self.recorded: tuple[Call, ...] = (first.call,) if isinstance(first, Recorded) else ()
        acceptance = about["acceptance"]
        for n in ("names", "supports", "built_in"):
            acceptance[n] = None if acceptance[n] is None else tuple(acceptance[n])
        self._acceptance = Acceptance(**acceptance)

    @property
    def independent(self) -> bool | None:
        """False when it called one of refattn's mechanisms by now; None where nobody can tell."""
        if self.where == "recorded call" or self.name.startswith("command:") or self.name.endswith(".onnx"):
            return None
        return not self.asked_of_refattn

    @property
    def asked_of_refattn(self) -> tuple[str, ...]:
        """The mechanisms of refattn that it called, the one it is held against among them whatever its kind."""
        return tuple(sorted(n for n in self._called if n in mechanisms or n == self._mechanism))

    def _independence_notes(self) -> list[str]:
        helpers = sorted(self._called - set(self.asked_of_refattn))
        notes = [f"it calls refattn's {', '.join(helpers)}: helpers, not the mechanism"] if helpers else []
        if any(place.imports_refattn for place in self._places) and not self._called:
            notes.append("it imports refattn; no mechanism of it was called")
        return notes

    def takes(self, name: str) -> bool:
        """Whether its signature names a convention option (``**kwargs`` does not count)."""
        return self._acceptance.takes(name)

    def names(self, name: str) -> bool:
        """Whether its signature, or what was said by hand, names an option (``**kwargs`` does not count)."""
        return self._acceptance.mentions(name)

    def accepts(self, options: Iterable[str]) -> tuple[bool, str]:
        """Whether these options can be asked for, else the reason."""
        for name in options:
            if name not in CONVENTION_OPTIONS and (reason := self._acceptance.refusal(name)):
                return False, reason
        return True, ""

    def run(self, calls: Sequence[Call], progress: Callable[[int, int], None] | None = None) -> list[Outcome]:
        """One outcome per call, in order.

        In a child process a call that crashes, hangs or runs out of memory takes nothing with it: the remaining calls go
        to a new child.  ``progress(done, total)`` is called after each outcome.
        """
        done = 0

        def some(place: Any, part: Sequence[Call]) -> list[Outcome]:
            nonlocal done
            found = []
            for call in part:
                seconds = self.patience.seconds(call.seconds)
                if seconds > 0:
                    outcome = place.run(dataclasses.replace(call, seconds=seconds))
                    self.patience.note(outcome, seconds)
                    self._called.update(outcome.called)
                else:
                    outcome = Outcome("unsupported", message=self.patience.words())
                found.append(outcome)
                done += 1
                if progress is not None:
                    progress(done, len(calls))
            return found

        jobs = min(self._jobs, len(calls))
        if jobs <= 1:
            return some(self._places[0], calls)
        while len(self._places) < jobs:
            self._places.append(self._make())
        size = math.ceil(len(calls) / jobs)
        parts = [calls[i : i + size] for i in range(0, len(calls), size)]
        with ThreadPoolExecutor(jobs) as pool:
            return [x for part in pool.map(some, self._places, parts) for x in part]

    def describe(self) -> dict[str, Any]:
        """For the report: what was verified and how it was called."""
        return {
            "target": self.name,
            "where": self.where,
            "framework": self.framework,
            "layout": self.layout,
            "preset": self._acceptance.preset,
            "conventions": self.conventions.declared(),
            "independent": self.independent,
            "called": f"it calls refattn's {', '.join(self.asked_of_refattn)}" if self.asked_of_refattn else "",
            "notes": [*self.notes, *self._independence_notes()],
        }

    def close(self) -> None:
        """End its processes."""
        for place in self._places:
            place.close()

    def __enter__(self) -> "Candidate":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_candidate(
    target: Callable[..., Any] | str,
    mechanism: Any,
    *,
    framework: str | None = None,
    layout: str | None = None,
    rename: Mapping[str, str] | None = None,
    supports: Sequence[str] | None = None,
    conventions: Any = None,
    backward: Callable[..., Any] | str | None = None,
    options: Mapping[str, Any] | None = None,
    jobs: int = 1,
) -> Candidate:
    """Load a candidate and find out how it is called.

    Parameters
    ----------
    target
        A callable, or a target string (see the module docstring).
    mechanism
        The Mechanism it is held against.
    framework
        "numpy", "torch", "jax", "cupy" or "torch:<device>"; None = NumPy, or what a known signature works with.
    layout
        Axis order of q, k, v and the output: a permutation of "bhld"; None = "bhld", or that of a known signature.
    rename
        Its names for refattn's options.  With it, known signatures are not looked for.
    supports
        The options it has, said by hand.
    conventions
        A preset's name, a dict of fields, or a Conventions record.
    backward
        Its backward, callable or string like the target.
    options
        Options fixed in every probe: built in for an ONNX model, otherwise handed over like the others.
    jobs
        Child processes that share the calls.

    Raises
    ------
    UsageError
        The target does not load, or framework, layout, conventions or preset are unknown.
    """
    positional = tuple(mechanism.positional)
    request: dict[str, Any] = {
        "mechanism": mechanism.name,
        "positional": list(positional),
        "framework": framework,
        "layout": layout,
        "rename": dict(rename or {}),
        "supports": None if supports is None else list(supports),
        "conventions": resolve(conventions).declared(),
    }
    if not isinstance(target, str):
        function = load_function(backward) if isinstance(backward, str) else backward
        return Candidate(lambda: Here(Adapter(target, function, **request)))
    if backward is not None and not isinstance(backward, str):
        raise UsageError("a target string runs in a child process: its backward must be a target string as well")
    if target.startswith("command:"):
        if backward is not None:
            raise UsageError("a command writes its gradients beside its outputs; it takes no backward target")
        return Candidate(lambda: Program(target, request), jobs)
    if target.endswith(".safetensors"):
        known = list(inspect.signature(mechanism).parameters)
        return Candidate(lambda: Recorded(Path(target), request, known), 1, Abilities(False, False, False))
    if target.endswith(".onnx"):
        request["built_in"] = list(options or {})
    elif ":" not in target:
        raise UsageError(f"target {target!r}: {TARGET_FORMS}")
    spec = {"target": target, "backward": backward, "folder": str(Path.cwd()), "adapter": request}
    return Candidate(lambda: InChild(spec), jobs)
