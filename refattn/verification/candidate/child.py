"""What runs in the child process: load the candidate, answer one call per line of its standard input."""

import contextlib
import faulthandler
import json
import os
from pathlib import Path
from typing import IO, Any

from refattn.verification.candidate.targets import load_adapter
from refattn.verification.errors import UsageError

__all__ = ["serve"]

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def serve() -> None:
    """Answer requests until the standard input ends: first ``load``, then any number of ``call``."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the candidate prints belongs to the log
    faulthandler.enable()
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    adapter: Any = None
    loaded_size = 0
    for line in requests:
        request = json.loads(line)
        faulthandler.dump_traceback_later(request["seconds"], exit=True)
        if adapter is None:
            try:
                adapter = load_adapter(request["load"])
                answer = {"loaded": adapter.description()}
            except UsageError as error:
                answer = {"failed": str(error)}
            loaded_size = _address_space()
        else:
            with _address_limit(loaded_size, request["bytes"] if adapter.limits_address_space else None):
                answer = adapter.answer(Path(request["call"]), Path(request["outcome"]))
        faulthandler.cancel_dump_traceback_later()
        _send(answers, answer)


def _send(stream: IO[bytes], answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer).encode() + b"\n")
    stream.flush()


def _address_space() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    except OSError:
        return 0


@contextlib.contextmanager
def _address_limit(start: int, limit: int | None) -> Any:
    """Let the address space grow to ``start`` + ``limit`` bytes, where the system can say so."""
    if limit is None or not start:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = start + limit if hard == resource.RLIM_INFINITY else min(start + limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
