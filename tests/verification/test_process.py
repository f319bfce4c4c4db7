"""The child process: limits, crashes, prints, and arrays on their way there and back."""

import os
import signal
import sys
import time

import ml_dtypes
import numpy as np
import pytest

import refattn as ra
from refattn.verification.candidate import Call, UsageError, files, open_candidate, process

SDPA = ra.scaled_dot_product_attention

# One file for all tests; what goes wrong goes wrong when softcap is 13, so that other calls of the same process are fine.
KERNELS = """
import os, signal, sys, time
import numpy as np

print("a print while loading must not disturb anything")


def first_rows(q, k, v):
    return q + 0

def fine(q, k, v, *, softcap=None, **options):
    print("noise on standard output", flush=True)
    assert sys.stdin.read() == ""
    return {"output": q + 0, "lse": np.float32([os.getpid()])}

def crash(q, k, v, *, softcap=None):
    if softcap == 13:
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    return {"output": q + 0, "lse": np.float32([os.getpid()])}

def leave(q, k, v, *, softcap=None):
    if softcap == 13:
        os._exit(0)
    return q + 0

def polite_leave(q, k, v, *, softcap=None):
    sys.exit(3)

def hang(q, k, v, *, softcap=None):
    while softcap == 13:
        pass
    return q + 0

def hang_with_offspring(q, k, v, *, softcap=None):
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    if softcap == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return q + 0

def greedy(q, k, v, *, softcap=None):
    if softcap == 13:
        return np.ones(1 << 27)   # 1 GiB
    return q + 0

def strides(q, k, v):
    return {"output": q + 0, "lse": np.array([s for x in (q, k, v) for s in (*x.strides, x.flags.writeable)])}

def gaps(q, k, v):
    whole = np.lib.stride_tricks.as_strided(q, (q.shape[-1] * 2 - 1,), (q.strides[-1] // 2,))
    return {"output": q + 0, "lse": whole + 0}

def kinds(q, k, v, **options):
    assert options["window"] == (3, None) and isinstance(options["window"], tuple), options
    assert options["causal"] is True and type(options["scale"]) is float
    assert "align" not in options
    assert options["mask"].dtype == bool and options["key_lengths"].dtype == np.int64
    assert k is None
    return {"output": q + 0, "commitment_loss": np.asarray(1.5)}

def odd(q, k, v):
    return np.array([object()])
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "kernels.py"
    path.write_text(KERNELS)
    return path


def call(name="0", dtype=np.float32, seconds=20.0, size=1 << 30, **options):
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((1, 2, 3, 4)).astype(dtype) for n in "qkv"}
    return Call(name, SDPA.name, arrays, options, seconds=seconds, bytes=size)


def run(kernels, name, *calls, **more):
    with open_candidate(f"{kernels}:{name}", SDPA, **more) as candidate:
        return candidate.run(calls)


def pid(outcome):
    return float(outcome.fields["lse"][0])


def test_several_calls_share_a_process_and_prints_are_harmless(kernels):
    outcomes = run(kernels, "fine", call(), call("1", softcap=1.0), call("2", np.float64))
    assert [o.status for o in outcomes] == ["ok"] * 3, [o.message for o in outcomes]
    assert len({pid(o) for o in outcomes}) == 1
    assert pid(outcomes[0]) != os.getpid()
    assert outcomes[2].fields["output"].dtype == np.float64


def test_jobs_share_the_calls_among_processes_and_keep_the_order(kernels):
    calls = [call(str(i)) for i in range(4)]
    for i, c in enumerate(calls):
        c.arrays["q"][...] = i
    seen = []
    with open_candidate(f"{kernels}:fine", SDPA, jobs=2) as candidate:
        outcomes = candidate.run(calls, progress=lambda done, total: seen.append((done, total)))
    assert [o.fields["output"].flat[0] for o in outcomes] == [0, 1, 2, 3]
    assert [pid(o) for o in outcomes] == [pid(outcomes[0])] * 2 + [pid(outcomes[2])] * 2
    assert pid(outcomes[0]) != pid(outcomes[2])
    assert sorted(seen) == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_crash_is_reported_and_the_rest_still_runs(kernels):
    before, crashed, after = run(kernels, "crash", call(), call("1", softcap=13), call("2"))
    assert (before.status, crashed.status, after.status) == ("ok", "crash", "ok")
    assert "SIGSEGV" in crashed.message
    assert "last words" in crashed.traceback
    assert "in crash" in crashed.traceback, "the stack at the crash"
    assert pid(before) != pid(after)


@pytest.mark.parametrize("name", ["leave", "polite_leave"])
def test_ending_the_process_is_no_success(kernels, name):
    gone, after = run(kernels, name, call(softcap=13), call("1"))
    if name == "leave":
        assert (gone.status, after.status) == ("crash", "ok")
        assert "status 0" in gone.message
    else:
        assert gone.status == "error"
        assert "SystemExit: 3" in gone.message


def test_a_hang_ends_at_the_limit_and_says_where(kernels):
    start = time.monotonic()
    hung, after = run(kernels, "hang", call(softcap=13, seconds=0.7), call("1"))
    assert time.monotonic() - start < 15
    assert (hung.status, after.status) == ("timeout", "ok")
    assert "0.7 s" in hung.message
    assert "in hang" in hung.traceback


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_death_is_seen_though_offspring_holds_the_pipe(kernels):
    start = time.monotonic()
    (killed,) = run(kernels, "hang_with_offspring", call(softcap=13, seconds=30))
    assert killed.status == "memory"  # SIGKILL that we did not send: the system's own remedy
    assert time.monotonic() - start < 15


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS that is enforced, or /proc")
def test_memory_limit(kernels):
    fed, after = run(kernels, "greedy", call(softcap=13, size=1 << 28), call("1"))
    assert (fed.status, after.status) == ("memory", "ok")
    assert "Unable to allocate 1" in fed.message, "the candidate got an ordinary MemoryError"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_resident_size_is_watched(tmp_path):
    script = tmp_path / "eat.py"
    script.write_text("import time\nx = bytearray(300 << 20)\ntime.sleep(30)\n")
    start = time.monotonic()
    reply = process.run_program([sys.executable, str(script)], 20, 100 << 20, tmp_path / "log")
    assert reply.status == "memory"
    assert time.monotonic() - start < 10


def test_programs_end_in_words(tmp_path):
    def run_code(code, seconds=10.0):
        return process.run_program([sys.executable, "-c", code], seconds, 1 << 30, tmp_path / "log")

    assert run_code("raise SystemExit(3)").body == {"status": 3}
    shot = run_code(f"import os; os.kill(os.getpid(), {int(signal.SIGABRT)})")
    assert (shot.status, shot.message) == ("crash", "the process was ended by SIGABRT")
    assert run_code("raise SystemExit(139)").status == "crash"
    assert run_code("import time; time.sleep(60)", 0.5).status == "timeout"


def test_arrays_keep_dtype_strides_and_writeability(kernels):
    base = np.random.default_rng(1).standard_normal((1, 2, 3, 8)).astype(np.float32)
    arrays = {
        "q": base[..., ::2],
        "k": np.broadcast_to(base[:, :1], (1, 2, 3, 8)),
        "v": np.ascontiguousarray(base.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    }
    (outcome,) = run(kernels, "strides", Call("0", SDPA.name, arrays, {}))
    wanted = [s for x in arrays.values() for s in (*x.strides, x.flags.writeable)]
    assert outcome.fields["lse"].tolist() == wanted
    assert (outcome.fields["output"] == arrays["q"]).all()


def test_gaps_between_elements_are_poisoned(kernels):
    q = np.ones((1, 1, 1, 8), np.float32)[..., ::2]
    (outcome,) = run(kernels, "gaps", Call("0", SDPA.name, {"q": q, "k": q, "v": q}, {}))
    whole = outcome.fields["lse"]
    assert (whole[::2] == 1).all()
    assert np.isnan(whole[1::2]).all()


def test_bfloat16_travels(kernels):
    (outcome,) = run(kernels, "fine", call(dtype=ml_dtypes.bfloat16))
    assert outcome.fields["output"].dtype == ml_dtypes.bfloat16
    assert outcome.fields["output"].tobytes() == call(dtype=ml_dtypes.bfloat16).arrays["q"].tobytes()


def test_options_keep_their_kinds(kernels):
    options = {"window": (3, None), "causal": True, "scale": np.float64(0.1), "align": "upper_left"}
    options.update(mask=np.ones((3, 3), bool), key_lengths=np.array([3]))
    one = call(**options)
    one.arrays["k"] = None
    with open_candidate(f"{kernels}:kinds", SDPA) as candidate:
        assert not candidate.takes("align"), "**kwargs does not count"
        (outcome,) = candidate.run([one])
    assert (outcome.status, outcome.message) == ("ok", "")
    assert outcome.fields["commitment_loss"].shape == ()


def test_what_cannot_travel_is_unsupported_or_wrong(kernels):
    (outcome,) = run(kernels, "fine", call(score_mod=lambda s, b, h, i, j: s))
    assert outcome.status == "unsupported"
    assert "score_mod" in outcome.message
    (outcome,) = run(kernels, "odd", call())
    assert outcome.status == "error"
    assert "object" in outcome.message


@pytest.mark.parametrize(
    "target, says",
    [
        ("{0}:missing", "has no 'missing'"),
        ("{0}:os.path", "not a function"),
        ("/nowhere/file.py:f", "no file"),
        ("no_such_package.module:f", "No module named 'no_such_package'"),
        ("nonsense", "expected package.module:function"),
        ("{1}:f", "SyntaxError"),
        ("{2}:f", "while loading"),
    ],
)
def test_targets_that_do_not_load(kernels, tmp_path, target, says):
    broken, fatal = tmp_path / "broken.py", tmp_path / "fatal.py"
    broken.write_text("def f(:\n")
    fatal.write_text("import os\nos._exit(1)\n")
    with pytest.raises(UsageError, match=says):
        open_candidate(target.format(kernels, broken, fatal), SDPA)


def test_safetensors_files_are_ordinary_ones(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    x = np.arange(6, dtype=np.float32).reshape(2, 3).T
    files.write_tensors(tmp_path / "a", {"x": x, "flag": np.array(True)}, {"note": "1"})
    with safetensors.safe_open(tmp_path / "a", framework="numpy") as file:
        assert file.metadata() == {"note": "1"}
        assert (file.get_tensor("x") == x).all()
    tensors, metadata = files.read_tensors(tmp_path / "a")
    assert metadata == {"note": "1"}
    assert tensors["flag"].shape == ()
    (tmp_path / "b").write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="not a safetensors file"):
        files.read_tensors(tmp_path / "b")
    with pytest.raises(TypeError, match="complex128"):
        files.write_tensors(tmp_path / "c", {"x": np.zeros(2, complex)})


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x[:, ::-1, 1:3],
        lambda x: np.broadcast_to(x[:, :1], (2, 5, 4)),
        lambda x: np.broadcast_to(x[0, 0, 0], (3, 2)),
        lambda x: x[:0],
        lambda x: x[0, 0, 0],
        lambda x: np.broadcast_to(x > 5, (2, 2, 3, 4)),
        lambda x: np.asarray(x[0, 0, 0]),
    ],
)
def test_clone_is_equal_in_every_respect(make):
    x = make(np.arange(24.0).reshape(2, 3, 4))
    x = np.asarray(x)
    y = files.clone(x)
    assert (x == y).all()
    assert x.dtype == y.dtype
    assert x.size == 0 or (x.strides, x.flags.writeable) == (y.strides, y.flags.writeable)
    assert not np.shares_memory(x, y)
