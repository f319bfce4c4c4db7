"""Threads and processes: a fork after use, spawned workers, and the same bits with any number of threads.

Each check runs in a Python process of its own, with as many BLAS threads as it says, so that a hang is a failed test.
"""

import os
import subprocess
import sys
import textwrap

import pytest

SETUP = """
import hashlib, os, sys
import numpy as np
import refattn as ra

def draw(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)

def bits(backend=None):
    q, k = draw(2, 4, 600, 24), draw(2, 2, 600, 24)
    result, pullback = ra.scaled_dot_product_attention.vjp(q, k, k, causal=True, scale=0.3, backend=backend)
    arrays = [result.output, result.lse, *pullback(result.output).values()]
    if backend is None:
        result, pullback = ra.talking_heads_attention.vjp(
            *[draw(4, 640, 8)] * 3, logits_projection=draw(4, 4)
        )
        arrays += [result.output, *pullback(result.output).values()]
    return hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)).hexdigest()
"""


def run(code, *, threads=2, blas=2, limit=120):
    environment = os.environ | {"REFATTN_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(blas)}
    environment.pop("REFATTN_BACKEND", None)
    script = SETUP + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("backend", [None, "numba"])
def test_any_number_of_threads_gives_the_same_bits(backend):
    """With BLAS left to take two threads of its own; its controller, which takes 5 ms to build, is built once."""
    code = f"""
    from refattn.backends.numpy import blas_threads
    runs, controllers = set(), set()
    for threads in ("1", "2", "3"):
        os.environ["REFATTN_THREADS"] = threads
        runs.add(bits({backend!r}))
        controllers.add(id(blas_threads()))
    print(len(runs), len(controllers))
    """
    assert run(code) == ["1", "1"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("backend", [None, "numba"])
def test_a_fork_after_use_computes_on(backend):
    code = f"""
    before = bits({backend!r})
    for generation in range(2):  # a child of a child too
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status))
        assert bits({backend!r}) == before
    os._exit(0)
    """
    run(code)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_in_the_middle_of_a_call_computes_on():
    """Another thread computes, and holds what it holds, while the process forks: again and again.

    BLAS has one thread: in the child of a fork from within a product of several threads OpenBLAS waits for ever, for NumPy
    alone just as well.
    """
    code = """
    import threading, time
    before = bits()
    stop = threading.Event()
    def work():
        while not stop.is_set():
            bits()
    other = threading.Thread(target=work, daemon=True)
    other.start()
    for delay in (0.0, 0.01, 0.03):
        time.sleep(delay)
        child = os.fork()
        if not child:
            os._exit(0 if bits() == before else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    stop.set()
    other.join()
    """
    run(code, blas=1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_an_executor(method, tmp_path):
    script = tmp_path / "workers.py"
    script.write_text(
        SETUP
        + textwrap.dedent(f"""
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        if __name__ == "__main__":
            before = bits()
            with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context({method!r})) as pool:
                assert list(pool.map(bits, [None, None])) == [before, before]
            print("done")
        """)
    )
    environment = os.environ | {"REFATTN_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-P", str(script)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["done"]), done.stderr
