"""The documentation covers what is public, and its Python runs."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import refattn

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
PAGES = {name: text for name, text in PAGES.items() if not name.startswith("_build/")}


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_every_public_name_is_documented():
    text = "\n".join(PAGES.values())
    documented = set(re.findall(r"\b(?:ra|refattn)\.(\w+)", text)) | set(re.findall(r"\{mechanism\} (\w+)", text))
    assert [name for name in refattn.__all__ if name not in documented] == []


def test_every_public_module_is_documented_whole():
    modules = [name for name in refattn.__all__ if inspect.ismodule(getattr(refattn, name))]
    assert modules
    assert [
        name for name in modules if not re.search(rf"(\{{public\}}|automodule::) refattn\.{name}\n", PAGES["api.md"])
    ] == []


@pytest.mark.parametrize("name", list(refattn.mechanisms))
def test_every_mechanism_has_a_page(name):
    page = PAGES[f"mechanisms/{name}.md"]
    assert f"```{{mechanism}} {name}\n" in page
    assert f"ra.{name}" in page, "an example is missing"


@pytest.mark.parametrize("name", list(refattn.mechanisms))
def test_every_option_of_a_mechanism_is_explained(name):
    parameters = inspect.signature(refattn.mechanisms[name]).parameters.values()
    options = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert options, "a mechanism without options: is the signature the right one?"
    page = PAGES[f"mechanisms/{name}.md"]
    explained = set(re.findall(r"`(\w+)", page + PAGES["options.md"]))
    if f"autofunction:: refattn.{name}\n" in page:  # then the parameters of the docstring stand on the page
        for listed in re.findall(r"^([\w, ]+) :", inspect.getdoc(refattn.mechanisms[name]), flags=re.MULTILINE):
            explained |= set(listed.split(", "))
    assert sorted(options - explained) == []


RUNNABLE = {"README.md": (REPOSITORY / "README.md").read_text(encoding="utf-8"), **PAGES}
RUNNABLE = {name: text for name, text in RUNNABLE.items() if python_blocks(text)}


@pytest.mark.parametrize("name", RUNNABLE)
def test_python_of_the_page_runs(name, tmp_path):
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    run = []
    for block in python_blocks(RUNNABLE[name]):
        file = re.match(r"# (\w+\.py)\n", block)  # a block that begins with a file's name is that file
        if file:
            (tmp_path / file[1]).write_text(block, encoding="utf-8")
        else:
            run.append(block)
    code = "import sys; sys.path.insert(0, '.')\n" + "\n".join(run)
    command = [sys.executable, "-P", "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
