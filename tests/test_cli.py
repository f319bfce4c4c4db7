"""The command line: arguments, exit statuses, what goes to which stream."""

import inspect
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import refattn as ra
from refattn import cli
from refattn.verification.candidate import UsageError

NAME = "scaled_dot_product_attention"

KERNEL = """
import os, signal
import numpy as np

def fine(q, k, v):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    logits = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True) @ v).astype(np.float32)

def no_scale(q, k, v):
    return fine(q * np.float32(np.sqrt(q.shape[-1])), k, v)

def fatal(q, k, v):
    if q.shape[2] == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return fine(q, k, v)

def later(q, k, v):
    raise NotImplementedError("not yet")
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "kernel_of_cli.py"
    path.write_text(KERNEL)
    return path


def run(*argv, **env):
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "refattn.cli", *map(str, argv)],
        capture_output=True, text=True, timeout=120, env={**os.environ, **env}, check=False,
    )  # fmt: skip


# ---------------------------------------------------------------------- verify, for real


def test_a_match(kernel, tmp_path):
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "junit", "html")}
    options = [x for kind, path in files.items() for x in (f"--{kind}", path)]
    done = run("verify", f"{kernel}:fine", "--mechanism", NAME, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "matches" in done.stdout
    assert "calls" in done.stderr, "progress goes to standard error"
    assert "\x1b" not in done.stdout + done.stderr, "no colours where there is no terminal"
    report = json.loads(files["json"].read_text())
    assert "schema" in " ".join(report)
    assert files["junit"].read_text().startswith("<")
    assert "<html" in files["html"].read_text().lower()


@pytest.mark.parametrize(
    "function, status, says", [("no_scale", 1, "no_scale"), ("fatal", 3, "SIGSEGV"), ("later", 4, "not yet")]
)
def test_other_verdicts(kernel, function, status, says):
    done = run("verify", f"{kernel}:{function}", "--mechanism", NAME)
    assert done.returncode == status, done.stdout + done.stderr
    assert says in done.stdout


# ---------------------------------------------------------------------- verify, what it hands on


@pytest.fixture
def handed(monkeypatch):
    """What the command gives to ``verify``; the report is the test's."""
    seen = {}

    def verify(target, mechanism, **asked):
        seen.update(target=target, mechanism=mechanism, **asked)
        asked["progress"](1, 4, "here")
        return types.SimpleNamespace(table=lambda **how: "the table", exit_code=1)

    import refattn.verification

    monkeypatch.setattr(refattn.verification, "verify", verify)
    return seen


def test_everything_is_handed_on(handed, capsys):
    status = cli.main(
        ["verify", "a.py:f", "--mechanism", NAME, "--dtype", "float32,bfloat16", "--gradients", "--backward", "a.py:g",
         "--framework", "torch", "--layout", "blhd", "--rename", "causal=is_causal,scale=sm_scale", "--supports", "causal,window",
         "--conventions", '{"align": "upper_left"}', "--options", '{"causal": true, "window": [3, 0]}', "--properties",
         "--jobs", "2", "--backend", "numpy", "--requires", "causal,one_query", "--sizes", "q=16n,h=g", "--also", "q=1,k=2048",
         "--thorough", "--seed", "7", "--time-limit", "5", "--memory-limit", "0.5", "--hang-budget", "20"]
    )  # fmt: skip
    assert status == 1
    assert handed.pop("progress") is not None
    assert handed == {
        "target": "a.py:f",
        "mechanism": ra.mechanisms[NAME],
        "dtypes": ("float32", "bfloat16"),
        "gradients": True,
        "backward": "a.py:g",
        "framework": "torch",
        "layout": "blhd",
        "rename": {"causal": "is_causal", "scale": "sm_scale"},
        "supports": ("causal", "window"),
        "conventions": {"align": "upper_left"},
        "options": {"causal": True, "window": (3, 0)},
        "properties": True,
        "jobs": 2,
        "backend": "numpy",
        "requires": ("causal", "one_query"),
        "sizes": "q=16n,h=g",
        "also": "q=1,k=2048",
        "thorough": True,
        "seed": 7,
        "time_limit": 5.0,
        "memory_limit": 0.5,
        "hang_budget": 20.0,
    }
    streams = capsys.readouterr()
    assert streams.out == "the table\n"
    assert streams.err == "refattn: 1 of 4 calls (here)\n"


def test_nothing_said_is_nothing_handed_on(handed):
    cli.main(["verify", "a.py:f", "--mechanism", NAME, "--conventions", "torch"])
    assert "dtypes" not in handed
    assert handed["gradients"] is False
    assert handed["conventions"] == "torch"
    assert set(handed) == {"target", "mechanism", "progress", "gradients", "conventions", "seed"}


def test_every_option_is_a_keyword_of_verify():
    keywords = inspect.signature(ra.verify).parameters
    assert {setting.keyword for setting in cli.VERIFY_OPTIONS} == set(keywords) - {"candidate", "mechanism", "progress"}
    page = " ".join(run("verify", "--help").stdout.split())
    for setting in cli.VERIFY_OPTIONS:
        assert setting.flag in page
        assert " ".join(setting.says.split()[:3]) in page


def test_conventions_from_a_file(handed, tmp_path):
    (tmp_path / "found.json").write_text('{"align": "upper_left"}')
    cli.main(["verify", "a.py:f", "--mechanism", NAME, "--conventions", str(tmp_path / "found.json")])
    assert handed["conventions"] == {"align": "upper_left"}


def test_reports_that_cannot_be_written_are_refused_before_the_run(handed, tmp_path, capsys):
    for path in (tmp_path, tmp_path / "no" / "r.json"):
        assert cli.main(["verify", "a.py:f", "--mechanism", NAME, "--json", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    assert handed == {}


def test_a_mechanism_of_ones_own(tmp_path, handed):
    (tmp_path / "own.py").write_text("import refattn\nmine = refattn.topk_attention\nother = len\n")
    assert cli.main(["verify", "a.py:f", "--mechanism", f"{tmp_path / 'own.py'}:mine"]) == 1
    assert handed["mechanism"] is ra.topk_attention
    assert cli.main(["verify", "a.py:f", "--mechanism", f"{tmp_path / 'own.py'}:other"]) == 2


@pytest.mark.parametrize(
    "argv, says",
    [
        ([], "required"),
        (["verify", "a.py:f"], "--mechanism"),
        (["verify", "a.py:f", "--mechanism", NAME, "--options", "[1]"], "JSON object"),
        (["verify", "a.py:f", "--mechanism", NAME, "--options", "{"], "no JSON"),
        (["verify", "a.py:f", "--mechanism", NAME, "--rename", "causal"], "ours=theirs"),
        (["verify", "a.py:f", "--mechanism", NAME, "--jobs", "0"], "at least 1"),
        (["verify", "a.py:f", "--mechanism", NAME, "--time-limit", "-1"], "above 0"),
        (["verify", "a.py:f", "--mechanism", NAME, "--seed", "x"], "at least 0"),
        (["verify", "a.py:f", "--mechanism", NAME, "--conventions", "no.json"], "cannot be read"),
        (["cost", NAME, "b"], "KEY=VALUE"),
        (["plot", NAME], "invalid choice"),
    ],
)
def test_wrong_arguments_exit_with_2(argv, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, says",
    [
        (["verify", "a.py:f", "--mechanism", "scaled_dot_product"], f"did you mean '{NAME}'"),
        (["verify", "/nowhere.py:f", "--mechanism", NAME], "no file /nowhere.py"),
        (["verify", "nonsense", "--mechanism", NAME], "expected package.module:function"),
        (["verify", "math:sqrt", "--mechanism", NAME, "--conventions", "trch"], "no preset 'trch'"),
        (["verify", "math:sqrt", "--mechanism", NAME, "--framework", "tensorflow"], "framework"),
        (["verify", "math:sqrt", "--mechanism", NAME, "--rename", "caual=c"], "did you mean 'causal'"),
        (["verify", "math:sqrt", "--mechanism", NAME, "--supports", "maks"], "did you mean 'mask'"),
        (["verify", "math:sqrt", "--mechanism", NAME, "--requires", "grouped_head"], "did you mean 'grouped_heads'"),
        (["verify", "math:sqrt", "--mechanism", NAME, "--sizes", "q=0"], "sizes"),
        (["verify", "math:sqrt", "--mechanism", NAME, "--also", "q=2n"], "also"),
        (["verify", "math:sqrt", "--mechanism", NAME, "--backend", "foo"], "backend is 'foo'"),
        (["verify", "math:sqrt", "--mechanism", NAME, "--gradients"], "--backward"),
        (["verify", "math:sqrt", "--mechanism", NAME, "--options", '{"align": "upper_left"}'], "convention"),
        (["show", "xyz"], "refattn list"),
        (["cost", NAME, "b=1"], "'q'"),
        (["cost", NAME, "q=-1", "k=1", "d=1"], "q is -1"),
    ],
)
def test_requests_that_cannot_be_carried_out_exit_with_2(argv, says, capsys):
    assert cli.main(argv) == 2
    streams = capsys.readouterr()
    assert says in streams.err
    assert streams.out == ""


def test_an_error_of_refattn_is_no_verdict(monkeypatch, capsys):
    import refattn.verification

    def verify(*_, **__):
        raise ValueError("inside")

    monkeypatch.setattr(refattn.verification, "verify", verify)
    assert cli.main(["verify", "a.py:f", "--mechanism", NAME]) == 70
    assert "ValueError: inside" in capsys.readouterr().err

    def usage(*_, **__):
        raise UsageError("asked for too much")

    monkeypatch.setattr(refattn.verification, "verify", usage)
    assert cli.main(["verify", "a.py:f", "--mechanism", NAME]) == 2
    assert capsys.readouterr().err == "refattn: asked for too much\n"


# ---------------------------------------------------------------------- the other commands


def test_list_is_quick_to_load():
    code = (
        "import sys; from refattn import cli; status = cli.main(['list']);"
        "print({'numba', 'torch', 'jax', 'matplotlib', 'scipy', 'rich', 'refattn.verification'} & set(sys.modules)); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert NAME in done.stdout
    assert done.stdout.endswith("set()\n")


def test_list_and_show(capsys):
    assert cli.main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["schema"] == cli.SCHEMA
    assert [m["name"] for m in listed["mechanisms"]] == list(ra.mechanisms)
    for name, mechanism in ra.mechanisms.items():
        assert cli.main(["show", name]) == 0
        text = capsys.readouterr().out
        for part in (
            *mechanism.equation.splitlines(),
            mechanism.paper,
            *mechanism.axes,
            *(m.class_ for m in mechanism.mutations),
        ):
            assert part in text
    assert cli.main(["show", NAME, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["arrays"] == ["q", "k", "v"]
    assert shown["options"]["causal"] == "False"
    assert "backend" not in shown["options"]


def test_cost(capsys):
    argv = ["cost", NAME, "b=1", "h=8", "q=512", "k=512", "d=64", "e=64", "dtype=float32", "direction=forward"]
    assert cli.main([*argv, "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)["cost"]
    assert counted["multiplies"] == 8 * 512 * 512 * (64 + 64)
    assert counted["flops"] == 2 * counted["multiplies"] + counted["elementwise"]
    assert cli.main([*argv, "causal=true", "window=[100,0]"]) == 0
    text = capsys.readouterr().out
    pairs = sum(min(i, 100) + 1 for i in range(512))
    assert f"{8 * pairs * 128:,}" in text


def test_backends_and_probes(capsys):
    assert cli.main(["backends"]) == 0
    text = capsys.readouterr().out
    assert "numpy" in text
    assert "usable" in text
    assert cli.main(["backends", "--json"]) == 0
    assert {"name", "usable", "reason", "fused"} <= set(json.loads(capsys.readouterr().out)["backends"][0])
    assert cli.main(["probes", NAME, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["pairs"]) > 1000
    assert all(pair["probe"] for pair in printed["pairs"])
    found = printed["probes"]
    assert any(p["options"] == ["causal"] for p in found)
    assert all(p["says"] for p in found)


def test_version_and_closed_pipes(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert ra.__version__ in capsys.readouterr().out
    listing = subprocess.Popen(
        [sys.executable, "-P", "-m", "refattn.cli", "show", NAME], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    listing.stdout.close()
    assert listing.stderr.read() == b""
    listing.stderr.close()
    assert listing.wait(60) == 0


def test_verify_prints_as_much_as_asked(capsys):
    broken = Path(__file__).parents[1] / "examples" / "broken" / "causal_upper_left.py"
    printed = {}
    for flags in ((), ("--brief",), ("--verbose",)):
        assert cli.main(["verify", f"{broken}:attention", "--mechanism", NAME, "--seed", "1", *flags]) == 1
        printed[flags] = capsys.readouterr().out
    brief, usual, verbose = printed["--brief",], printed[()], printed["--verbose",]
    assert brief in usual
    assert "causal_other" in brief
    assert "calls match" not in brief
    assert "calls match" in usual
    assert "passing:" in verbose
    assert len(brief) < len(usual) < len(verbose)
