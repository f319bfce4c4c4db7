"""The places where a candidate runs: this process, a child process, a program of its own, a recording."""

import dataclasses
import json
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refattn.verification.candidate import files, process
from refattn.verification.candidate.adapter import Adapter
from refattn.verification.candidate.calls import Call, Outcome, read_outcome, write_call
from refattn.verification.errors import Unsupported, UsageError

__all__ = ["Here", "InChild", "Program", "Recorded"]


class Here:
    """A callable, in this process."""

    where = "this process"
    imports_refattn = False

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.loaded = adapter.description()

    def run(self, call: Call) -> Outcome:
        return self.adapter.invoke(call)

    def close(self) -> None:
        """Nothing to end."""


class InChild:
    """A target string: one child process, replaced when it dies."""

    where = "child process"

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        self._child: process.Child | None = self._start()
        assert self._child is not None
        self.loaded = self._child.loaded
        self.imports_refattn: bool = self.loaded["imports_refattn"]

    def _start(self) -> process.Child:
        try:
            return process.Child(self._spec)
        except process.LoadError as error:
            raise UsageError(str(error)) from None

    def run(self, call: Call) -> Outcome:
        if self._child is None:
            self._child = self._start()
        files = {n: self._child.folder / f"{n}.safetensors" for n in ("call", "outcome")}
        try:
            write_call(call, files["call"])
        except Unsupported as error:
            return Outcome("unsupported", message=str(error))
        request = {n: str(path) for n, path in files.items()}
        reply = self._child.ask(request, call.seconds, call.bytes)
        if reply.status != "ok":
            self.close()
            return Outcome(reply.status, message=reply.message, traceback=reply.log)
        self.imports_refattn |= reply.body["imports_refattn"]
        outcome = read_outcome(files["outcome"], reply.body)
        if outcome.status == "memory":  # an allocation failed somewhere: what is left of the process is not trusted
            self.close()
        return outcome

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class Program:
    """A foreign program, started once per call (see the module docstring for the files)."""

    where = "child process"
    imports_refattn = False

    def __init__(self, target: str, request: Mapping[str, Any]) -> None:
        self.argv = shlex.split(target.removeprefix("command:"))
        if not self.argv or not any("{inputs}" in a for a in self.argv) or not any("{outputs}" in a for a in self.argv):
            raise UsageError(f"target {target!r}: expected 'command:./program {{inputs}} {{outputs}}'")
        if shutil.which(self.argv[0]) is None:
            raise UsageError(f"target {target!r} does not load: there is no program {self.argv[0]!r}")

        def anything(*arrays: Any, **options: Any) -> None:
            """Stands for the program where only its signature is asked for."""

        more = {n: x for n, x in request.items() if n != "framework"}
        self._adapter = Adapter(anything, name=target, **more)
        self.loaded = {
            **self._adapter.description(),
            "has_backward": True,
            "explicit_backward": True,
        }
        self._folder = tempfile.TemporaryDirectory(prefix="refattn-", ignore_cleanup_errors=True)

    def run(self, call: Call) -> Outcome:
        adapter, folder = self._adapter, Path(self._folder.name)
        inputs, outputs = folder / "inputs.safetensors", folder / "outputs.safetensors"
        outputs.unlink(missing_ok=True)
        try:
            options = adapter.admitted(call.options)
            named = {adapter.acceptance.rename.get(n, n): x for n, x in {**call.arrays, **options}.items()}
            named = {n.replace("@", "."): x for n, x in files.flat(named).items()}
            rest = {n: files.to_json(x) for n, x in named.items() if not isinstance(x, np.ndarray) and x is not None}
        except (Unsupported, TypeError) as error:
            return Outcome("unsupported", message=str(error))
        tensors = {n: adapter.turn_in(n, x) for n, x in named.items() if isinstance(x, np.ndarray)}
        tensors.update({f"d_{n}": adapter.result_in(n, x) for n, x in (call.cotangents or {}).items()})
        metadata = {
            "mechanism": call.mechanism,
            "options": json.dumps({n: x["tuple"] if isinstance(x, dict) else x for n, x in rest.items()}),
            "wrt": json.dumps(list(call.wrt)),
        }
        files.write_tensors(inputs, tensors, metadata)
        argv = [a.replace("{inputs}", str(inputs)).replace("{outputs}", str(outputs)) for a in self.argv]
        start = time.perf_counter()
        try:
            reply = process.run_program(argv, call.seconds, call.bytes, folder / "log.txt")
        except OSError as error:
            return Outcome("error", message=f"the program does not start: {error}")
        seconds = time.perf_counter() - start
        if reply.status != "ok":
            return Outcome(reply.status, message=reply.message, traceback=reply.log, seconds=seconds)
        if reply.body["status"] != 0:
            says = f"the program {process.exit_words(reply.body['status'])}"
            return Outcome("error", message=says, traceback=reply.log, seconds=seconds)
        try:
            made, said = files.read_tensors(outputs)
        except (OSError, ValueError) as error:
            return Outcome(
                "error", message=f"its outputs cannot be read: {error}", traceback=reply.log, seconds=seconds
            )
        if "unsupported" in said:
            return Outcome("unsupported", message=said["unsupported"], seconds=seconds)
        return _outcome_from_tensors(made, call, adapter, seconds)

    def close(self) -> None:
        self._folder.cleanup()


def _outcome_from_tensors(
    made: Mapping[str, np.ndarray], call: Call, adapter: Adapter, seconds: float = 0.0
) -> Outcome:
    gradients, fields = {}, {}
    for name, x in made.items():
        own = name.removeprefix("d_")
        if name.startswith("d_") and own in call.wrt:
            gradients[own] = adapter.turn_out(own, x)
        elif not name.startswith("d_"):
            fields[name] = adapter.result_out(name, x)
    if "output" not in fields:
        return Outcome("error", message=f"there is no 'output' among the outputs ({', '.join(made) or 'none'})")
    applied = tuple(n for n in (call.cotangents or {}) if n == "output" or n in fields) if gradients else ()
    return Outcome("ok", fields, gradients, seconds=seconds, cotangents=applied)


class Recorded:
    """A recorded call: its inputs are the only probe, its outputs the only answer."""

    where = "recorded call"
    imports_refattn = False

    def __init__(self, path: Path, request: Mapping[str, Any], known: Sequence[str]) -> None:
        if not path.is_file():
            raise UsageError(f"there is no file {path}")
        try:
            tensors, metadata = files.read_tensors(path)
            options = json.loads(metadata.get("options", "{}"))
        except ValueError as error:
            raise UsageError(f"{path} does not load: {error}") from None
        request = {**request, "layout": request["layout"] or metadata.get("layout")}

        def anything(*arrays: Any, **options: Any) -> None:
            """Stands for whatever was recorded."""

        adapter = Adapter(anything, name=str(path), **{n: x for n, x in request.items() if n != "framework"})
        self.loaded = adapter.description()
        tensors = {n.removeprefix("inputs.").removeprefix("outputs."): x for n, x in tensors.items()}
        ours = {theirs: n for n, theirs in adapter.acceptance.rename.items()}
        tensors = {ours.get(n, n): x for n, x in tensors.items()}
        options = {ours.get(n, n): tuple(x) if isinstance(x, list) else x for n, x in options.items()}
        missing = [n for n in adapter.positional[:1] if n not in tensors]
        if missing or "output" not in tensors:
            what = ", ".join([*missing, *([] if "output" in tensors else ["output"])])
            raise UsageError(f"{path} holds no {what}: it has {', '.join(tensors) or 'no arrays'}")
        unknown = [n for n in options if n not in known]
        if unknown:
            raise UsageError(f"{path}: the mechanism has no option {', '.join(unknown)}")
        arrays = {n: adapter.turn_out(n, tensors[n]) if n in tensors else None for n in adapter.positional}
        options.update({n: adapter.turn_out(n, x) for n, x in tensors.items() if n in known and n not in arrays})
        wrt = tuple(n for n in (*arrays, *options) if f"d_{n}" in tensors)
        cotangents = {n: adapter.result_out(n, tensors[f"d_{n}"]) for n in ("output", "lse") if f"d_{n}" in tensors}
        self.call = Call(
            "recorded", request["mechanism"], arrays, options, cotangents if wrt and cotangents else None, wrt
        )
        made = {n: x for n, x in tensors.items() if n not in known and n not in ("d_output", "d_lse")}
        self.outcome = _outcome_from_tensors(made, self.call, adapter)
        if self.outcome.gradients:
            self.outcome = dataclasses.replace(self.outcome, cotangents=tuple(cotangents))
        self.loaded["has_backward"] = bool(self.outcome.gradients)

    def run(self, call: Call) -> Outcome:
        if call.id != self.call.id:
            return Outcome("unsupported", message="a recorded call answers no other")
        return self.outcome

    def close(self) -> None:
        """Nothing to end."""
