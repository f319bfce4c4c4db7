"""What runs on this machine, whether it is right, and how fast it is: one JSON file in less than six minutes.

usage: python examples/device_check.py [--out device_check.json] [--seconds 330]

Meant for a machine with a GPU, where refattn is checked out and installed with the extras test and cuda12; without a
GPU it says so and checks the CPU part. The file is written anew after each part, so that a crash leaves the parts
before it. Exit status: 0 if everything that could run was right, else 1.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import refattn as ra
from refattn import backends

REPOSITORY = Path(__file__).resolve().parents[1]
MECHANISM = "scaled_dot_product_attention"
TESTS = ("tests/test_contraction.py", "tests/backends")
ON_DEVICE = ("cupy", "numba_cuda")
PACKAGES = ("numpy", "scipy", "numba", "numba-cuda", "cupy-cuda12x", "torch", "jax", "array-api-compat", "refattn")
LENGTHS = {"cpu": (256, 1024, 2048), "gpu": (1024, 4096, 16384)}
HEADS, CHANNELS, REPEATS = 8, 64, 5
ROUNDOFF = 2.0**-24
# A logit is a sum of d terms and of size sqrt(d) for normal inputs: worst error d^1.5 roundoffs. The weights inherit it
# as a relative error; output and gradients are sums over the same keys, so relative to their largest element it stays.
ALLOWED_ERROR = CHANNELS**1.5


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def machine() -> dict[str, Any]:
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "gpu": output_of("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "packages": {package: installed(package) for package in PACKAGES},
    }


def run(command: list[str], seconds: float, **environment: str) -> dict[str, Any]:
    """Exit status and the end of what a command printed; a status of None means that its time was up."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=max(1, seconds),
            check=False,
        )
        status, printed = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        status, printed = None, (late.stdout or b"").decode(errors="replace")
    return {
        "command": command,
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "printed": printed[-4000:],
    }


def tests(left: Callable[[], float]) -> list[dict[str, Any]]:
    """The tests of the backends and of what stands on them; Numba-CUDA on the simulator (the GPU is timed and checked)."""
    pytest = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    cuda = "tests/backends/test_numba_cuda.py"
    runs = [
        run([*pytest, *TESTS, f"--ignore={cuda}"], min(100, left())),
        run([*pytest, cuda], min(60, left()), NUMBA_ENABLE_CUDASIM="1"),
    ]
    return [{**found, "ok": found["status"] == 0} for found in runs]


def verifications(left: Callable[[], float]) -> list[dict[str, Any]]:
    """The verifier accepts the correct example (status 0) and refuses every broken one (status 1)."""
    expected = {REPOSITORY / "examples" / "online_softmax.py": 0}
    expected |= dict.fromkeys(sorted((REPOSITORY / "examples" / "broken").glob("*.py")), 1)
    found = []
    for path, status in expected.items():
        file = path.relative_to(REPOSITORY)
        command = [
            str(Path(sys.executable).with_name("refattn")),
            "verify",
            f"{file}:attention",
            "--mechanism",
            MECHANISM,
        ]
        if "def attention_backward(" in path.read_text(encoding="utf-8"):
            command += ["--gradients", "--backward", f"{file}:attention_backward"]
        result = run(command, min(60, left()))
        found.append({**result, "ok": result["status"] == status})
    return found


def backends_by_name() -> dict[str, Any]:
    return {capability.name: capability for capability in backends.capabilities()}


def measure(backend: str, length: int, direction: str, options: dict[str, Any]) -> dict[str, Any]:
    """Median time of one call in float32, and the largest error against float64 NumPy on the first 256 queries."""
    row: dict[str, Any] = {"backend": backend, "length": length, "direction": direction, "options": options}
    xp: Any = np
    if backend in ON_DEVICE:
        import cupy as xp
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((1, HEADS, length, CHANNELS), dtype=np.float32) for _ in range(4)]
    q, k, v, d_output = (xp.asarray(x) for x in host)
    attention = ra.mechanisms[MECHANISM]
    wait = backends.resolve(backend, xp).synchronize

    def call() -> Any:
        if direction == "forward":
            return attention(q, k, v, backend=backend, **options)
        _, pullback = attention.vjp(q, k, v, backend=backend, **options)
        return pullback(d_output)["q"]

    try:
        found = call()
    except (NotImplementedError, ValueError) as refusal:  # a fused backend names what it does not serve
        return {**row, "refused": str(refusal)}
    wait()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)

    rows = slice(0, 256)
    exact = [x.astype(np.float64) for x in (host[0][:, :, rows], host[1], host[2])]
    result, pullback = attention.vjp(*exact, **options, **({"align": "upper_left"} if options else {}))
    true = result.output if direction == "forward" else pullback(host[3][:, :, rows].astype(np.float64))["q"]
    difference = np.abs(backends.resolve(backend, xp).to_numpy(found)[:, :, rows] - true)
    error = float(difference.max() / np.abs(true).max() / ROUNDOFF)
    return {**row, "seconds": statistics.median(times), "error_in_roundoffs": error, "ok": error <= ALLOWED_ERROR}


def timings(left: Callable[[], float]) -> list[dict[str, Any]]:
    """Every usable backend except the generic one, whose speed is that of the library behind it."""
    found = []
    for name, capability in backends_by_name().items():
        if name == "array_api" or not capability.usable:
            continue
        for length in LENGTHS["gpu" if name in ON_DEVICE else "cpu"]:
            for direction in ("forward", "forward + backward"):
                for options in ({}, {"causal": True}):
                    if left() < 20:
                        return [*found, {"stopped": "the time was up"}]
                    found.append(measure(name, length, direction, options))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("device_check.json"))
    parser.add_argument("--seconds", type=float, default=330)
    given = parser.parse_args()
    start = time.monotonic()

    def left() -> float:
        return given.seconds - (time.monotonic() - start)

    capabilities = backends_by_name()
    on_device = [name for name in ON_DEVICE if capabilities[name].usable]
    report: dict[str, Any] = {
        "schema": 1,
        "machine": machine(),
        "backends": [dataclasses.asdict(capability) for capability in capabilities.values()],
        "device": bool(on_device),
    }
    if not on_device:
        reasons = "; ".join(f"{name}: {capabilities[name].reason}" for name in ON_DEVICE)
        print(f"no GPU backend is usable here ({reasons}): the CPU part only")

    for name, part in {"timings": timings, "verifications": verifications, "tests": tests}.items():
        report[name] = part(left)
        report["seconds"] = round(time.monotonic() - start, 1)
        report["ok"] = all(
            row.get("ok", True) for part in ("timings", "verifications", "tests") for row in report.get(part, [])
        )
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        wrong = [row for row in report[name] if not row.get("ok", True)]
        print(f"{name}: {len(report[name])} done, {len(wrong)} wrong, {report['seconds']} s", flush=True)
        for row in wrong:
            print("  ", json.dumps({key: value for key, value in row.items() if key != "printed"}))
    print(f"written to {given.out}")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
