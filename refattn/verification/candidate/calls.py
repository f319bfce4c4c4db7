"""One call of a candidate and what became of it, in memory and as files between two processes."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from refattn.verification.candidate import files
from refattn.verification.errors import Unsupported

__all__ = ["Call", "Outcome", "read_call", "read_outcome", "write_call", "write_outcome"]


@dataclasses.dataclass(frozen=True)
class Call:
    """One invocation of the candidate.

    ``arrays`` are the positional arrays of the mechanism in order, ``options`` everything else by refattn's names, both
    as NumPy arrays in storage dtype (bfloat16 of ml_dtypes) with axes (b, head, length, channel); ``cotangents`` by result,
    None = forward only; ``wrt`` the arguments whose gradients are wanted; ``bytes`` is the memory limit.
    """

    id: str
    mechanism: str
    arrays: dict[str, np.ndarray | None]
    options: dict[str, Any]
    cotangents: dict[str, np.ndarray] | None = None
    wrt: tuple[str, ...] = ()
    seconds: float = 30.0
    bytes: int = 4 << 30


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a call.

        Attributes
    ----------
    status : str
        "ok", "unsupported", "error" (an exception, or results that are none), "crash", "timeout" or "memory".
    fields, gradients : dict
        NumPy arrays by refattn's names and in its layout.
    message, traceback, seconds
        What was said, and how long the candidate took.
    mutated : tuple of str
        The inputs that it changed.
    cotangents : tuple of str
        Those that reached its backward.
    due : tuple of str
        Arrays whose gradient the library itself must give (torch, JAX).
    backward_failed : str
        The exception of a backward whose forward is right.
    called : tuple of str
        The functions of refattn that it called.
    """

    status: str
    fields: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    gradients: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    message: str = ""
    mutated: tuple[str, ...] = ()
    traceback: str = ""
    seconds: float = 0.0
    cotangents: tuple[str, ...] = ()
    due: tuple[str, ...] = ()
    backward_failed: str = ""
    called: tuple[str, ...] = ()


def write_call(call: Call, path: Path) -> None:
    """Raises Unsupported for options that cannot leave the process."""
    tensors, forms = {}, {}
    plain: dict[str, dict[str, Any]] = {"arrays": {}, "options": {}}
    for group in ("arrays", "options"):
        for name, x in files.flat(getattr(call, group)).items():
            key = f"{group}.{name}"
            if isinstance(x, np.ndarray):
                tensors[key], forms[key] = files.compact(x), files.memory_form(x)
            else:
                try:
                    plain[group][name] = files.to_json(x)
                except TypeError as error:
                    raise Unsupported(f"{name}: {error}") from None
    for name, x in (call.cotangents or {}).items():
        key = f"cotangents.{name}"
        tensors[key], forms[key] = files.compact(x), files.memory_form(x)
    parts = {  # how many arrays stand in a tuple, 0 = no tuple
        group: {n: len(x) if files.holds_arrays(x) else 0 for n, x in getattr(call, group).items()}
        for group in ("arrays", "options")
    }
    about = {"id": call.id, "mechanism": call.mechanism, "wrt": list(call.wrt), "forward": call.cotangents is None}
    files.write_tensors(path, tensors, {"call": json.dumps({**about, "forms": forms, "plain": plain, "parts": parts})})


def read_call(path: Path) -> Call:
    tensors, metadata = files.read_tensors(path)
    about = json.loads(metadata["call"])

    def group(name: str) -> dict[str, Any]:
        values = {n: files.from_json(x) for n, x in about["plain"][name].items()}
        for key, x in tensors.items():
            kind, _, own = key.partition(".")
            if kind == name:
                values[own] = files.in_form(x, about["forms"][key])
        return files.nested(values, about["parts"][name])

    cotangents = {
        key.partition(".")[2]: files.in_form(x, about["forms"][key])
        for key, x in tensors.items()
        if key.startswith("cotangents.")
    }
    return Call(
        id=about["id"],
        mechanism=about["mechanism"],
        arrays=group("arrays"),
        options=group("options"),
        cotangents=None if about["forward"] else cotangents,
        wrt=tuple(about["wrt"]),
    )


_PLAIN = ("status", "message", "mutated", "traceback", "seconds", "cotangents", "due", "backward_failed", "called")


def write_outcome(outcome: Outcome, path: Path, imports_refattn: bool) -> dict[str, Any]:
    tensors = {f"fields.{n}": x for n, x in outcome.fields.items()}
    tensors.update({f"gradients.{n}": x for n, x in outcome.gradients.items()})
    try:
        files.write_tensors(path, tensors)
    except TypeError as error:
        outcome = Outcome("error", message=str(error), seconds=outcome.seconds, mutated=outcome.mutated)
        files.write_tensors(path, {})
    return {**{n: getattr(outcome, n) for n in _PLAIN}, "imports_refattn": imports_refattn}


def read_outcome(path: Path, body: Mapping[str, Any]) -> Outcome:
    tensors, _ = files.read_tensors(path)
    groups: dict[str, dict[str, np.ndarray]] = {"fields": {}, "gradients": {}}
    for key, x in tensors.items():
        kind, _, name = key.partition(".")
        groups[kind][name] = x
    plain: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in body.items() if n in _PLAIN}
    return Outcome(fields=groups["fields"], gradients=groups["gradients"], **plain)
