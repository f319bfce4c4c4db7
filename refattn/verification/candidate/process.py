"""A child process that runs a candidate under a time and a memory limit, and outlives none of its mistakes.

:class:`Child` starts a fresh interpreter (no fork), in which :mod:`child` loads the candidate and answers one request
per line of JSON on its standard input; arrays travel in safetensors files of a temporary folder.  What the candidate prints
goes to a log, whose end is shown when the process dies.

- *Time*: at the limit the child writes where it hangs into the log and ends; the parent kills it a second later if it did not.
- *Memory*: where the system has ``RLIMIT_AS``, the address space may grow by the limit over what the child held once the
  candidate was loaded, so that most libraries raise an ordinary error; besides, the parent watches the resident size.
- A child that crashed, hung or ran out of memory is not used again; the caller starts another one.

:func:`run_program` gives a foreign program the same treatment.
"""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["LOAD_SECONDS", "Child", "LoadError", "Reply", "exit_words", "run_program"]

LOAD_SECONDS = 180.0
"""Time for starting the interpreter and importing the candidate (and, with it, perhaps a large library)."""

_GRACE = 1.0
_TICK = 0.05
_LOG_TAIL = 4000
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class LoadError(Exception):
    """The child could not load the candidate."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """What became of a request: ``status`` "ok" (then ``body`` is the answer), "crash", "timeout" or "memory"."""

    status: str
    body: dict[str, Any] = dataclasses.field(default_factory=dict)
    message: str = ""
    log: str = ""


class _Watched:
    """A process of its own session, its log, its resident size, its end."""

    def __init__(self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None, **streams: Any) -> None:
        self.log = log
        self._log_file = log.open("wb")
        self.process = subprocess.Popen(
            argv, stderr=self._log_file, env=env, start_new_session=True, **{"stdin": subprocess.DEVNULL, **streams}
        )

    def resident(self) -> int:
        try:
            return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * _PAGE
        except (OSError, IndexError, ValueError):
            return 0  # no /proc here, or the process is gone

    def kill(self) -> None:
        """End the process and whatever it started (its session may outlive it)."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def tail(self) -> str:
        self._log_file.flush()
        lines = self.log.read_bytes().decode(errors="replace").splitlines()
        # faulthandler's list of loaded extension modules says nothing and is long
        return "\n".join(x for x in lines if not x.startswith("Extension modules:"))[-_LOG_TAIL:].strip()

    def close(self) -> None:
        self.kill()
        self._log_file.close()

    def ending(self, elapsed: float, seconds: float) -> Reply:
        """Why the process, which has ended by itself, did so."""
        code = self.process.wait()
        if elapsed >= seconds:
            return Reply("timeout", message=f"no answer within {seconds:g} s", log=self.tail())
        if code == -getattr(signal, "SIGKILL", 9):
            return Reply("memory", message="killed by the system, most likely for memory (SIGKILL)", log=self.tail())
        return Reply("crash", message=f"the process {exit_words(code)}", log=self.tail())

    def out_of_time(self, seconds: float) -> Reply:
        self.kill()
        return Reply("timeout", message=f"no answer within {seconds:g} s", log=self.tail())

    def out_of_memory(self, limit: int) -> Reply:
        self.kill()
        return Reply("memory", message=f"took more than {limit / 2**30:.3g} GiB beyond its start", log=self.tail())


def exit_words(code: int) -> str:
    """An exit status in words."""
    if code < 0:
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"
    return f"ended with status {code}"


class Child:
    """A child process with the candidate loaded.

    Parameters
    ----------
    load
        What ````targets.load_adapter```` needs, JSON-able.

    Raises
    ------
    LoadError
        The candidate does not load; the message says why.
    """

    def __init__(self, load: Mapping[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="refattn-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        # The child finds packages where this process does; -P keeps its working directory from shadowing them.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        argv = [sys.executable, "-P", "-c", "from refattn.verification.candidate.child import serve; serve()"]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._watched = _Watched(argv, self.folder / "log.txt", env, **streams)
        self._answers: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            reply = self.ask({"load": dict(load)}, LOAD_SECONDS, None)
            if reply.status != "ok":
                raise LoadError(f"{reply.message} while loading\n{reply.log}".strip())
            if "failed" in reply.body:
                raise LoadError(reply.body["failed"])
        except BaseException:
            self.close()
            raise
        self.loaded: dict[str, Any] = reply.body["loaded"]
        self._start_size = self._watched.resident()

    def _listen(self) -> None:
        stdout = self._watched.process.stdout
        assert stdout is not None
        for line in stdout:
            self._answers.put(line)
        self._answers.put(b"")

    @property
    def alive(self) -> bool:
        return self._watched.process.poll() is None

    def ask(self, request: Mapping[str, Any], seconds: float, limit: int | None) -> Reply:
        """Send a request and wait; ``limit`` is in bytes beyond the size after loading."""
        message = json.dumps({**request, "seconds": seconds, "bytes": limit}).encode() + b"\n"
        start = time.monotonic()
        stdin = self._watched.process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(message)
            stdin.flush()
        while True:
            try:
                line = self._answers.get(timeout=_TICK)
            except queue.Empty:
                if time.monotonic() - start > seconds + _GRACE:
                    return self._watched.out_of_time(seconds)
                if limit is not None and self._watched.resident() > self._start_size + limit:
                    return self._watched.out_of_memory(limit)
                if not self.alive:  # its own children may hold the pipe open
                    return self._watched.ending(time.monotonic() - start, seconds)
                continue
            if not line:
                return self._watched.ending(time.monotonic() - start, seconds)
            return Reply("ok", body=json.loads(line))

    def close(self) -> None:
        """End the child and remove its files."""
        self._watched.close()
        for stream in (self._watched.process.stdin, self._watched.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._folder.cleanup()


def run_program(argv: Sequence[str], seconds: float, limit: int, log: Path) -> Reply:
    """Run a foreign program to its end; ``body["status"]`` is its exit status.

    Raises
    ------
    OSError
        If it cannot be started.
    """
    start = time.monotonic()
    watched = _Watched(argv, log, stdout=subprocess.DEVNULL)
    try:
        while True:
            try:
                code = watched.process.wait(timeout=_TICK)
            except subprocess.TimeoutExpired:
                if time.monotonic() - start > seconds:
                    return watched.out_of_time(seconds)
                if watched.resident() > limit:
                    return watched.out_of_memory(limit)
                continue
            if code < 0 or code >= 128:  # a shell says 128 + signal
                return watched.ending(0.0, seconds)
            return Reply("ok", body={"status": code}, log=watched.tail())
    finally:
        watched.close()
