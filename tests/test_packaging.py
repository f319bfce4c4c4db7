"""The distribution and the shape of the house: metadata, import cost, and who may import whom."""

import ast
import importlib.metadata
import importlib.resources
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import refattn

REPOSITORY = Path(__file__).resolve().parents[1]

# Ground floor first: a room imports only from rooms on lines above its own. Rooms that share a line are one floor.
FLOORS = [
    ["arrays"],
    ["records"],
    ["backends"],
    ["described"],
    ["mechanism"],
    ["contraction"],
    ["normalization"],
    ["positions", "gates"],
    ["patterns"],
    ["definitions"],
    ["core"],
    ["cost"],
    ["precision"],
    ["mistakes"],  # still imported by attention: they go above it, loaded by name
    ["attention"],
    ["memory", "routing"],
    ["layers"],
    ["serving"],
    ["verification"],
    ["cli"],
]
FLOOR_OF = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
WHOLE = FLOOR_OF["verification"]  # from here up a room may import refattn itself: everything else lies below

HEAVY = ("numba", "scipy", "matplotlib", "torch", "jax", "cupy", "rich", "mpmath")


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py"))]


def module_name(path: Path) -> str:
    """refattn.attention.x of refattn/attention/x.py; refattn.backends.x of backends/x.py; a package is its __init__."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    parts = ("refattn", *parts) if parts[0] == "backends" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything imported at run time; ``from a import b`` counts as a.b."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        else:
            yield from imported_modules(node, package)


def imports_of(path: Path) -> list[tuple[int, str]]:
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return list(imported_modules(ast.parse(path.read_text(encoding="utf-8")), package))


def room_of(module: str) -> str | None:
    """The room of refattn.<room>...; None for refattn itself and for other distributions."""
    parts = module.split(".")
    return parts[1] if parts[0] == "refattn" and len(parts) > 1 and parts[1] in FLOOR_OF else None


def forbidden_imports(room: str, imports: list[tuple[int, str]]) -> list[str]:
    """Imports that a room must not have: of a room on its own floor or above, or of the whole package."""
    bad = []
    for line, name in imports:
        if name.split(".")[0] != "refattn":
            continue
        other = room_of(name)
        if other is None:
            if FLOOR_OF[room] < WHOLE and name != "refattn.__version__":
                bad.append(f"line {line}: {name} (the whole package)")
        elif other != room and FLOOR_OF[other] >= FLOOR_OF[room]:
            bad.append(f"line {line}: {name}")
    return bad


def test_version_is_that_of_the_metadata():
    assert refattn.__version__ == importlib.metadata.version("refattn")


def test_command_is_installed():
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="refattn")
    assert callable(command.load())


def test_types_are_shipped():
    assert importlib.resources.files("refattn").joinpath("py.typed").is_file()


def test_all_names_exist_once():
    assert [name for name in refattn.__all__ if not hasattr(refattn, name)] == []
    assert len(set(refattn.__all__)) == len(refattn.__all__)


def test_import_leaves_heavy_packages_alone():
    code = f"import sys, refattn; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.split(), run.stderr) == (0, [], "")


def test_every_folder_with_modules_is_a_package():
    # setup.py finds packages by their __init__.py; a folder without one would be missing from the wheel.
    folders = {path.parent for path in python_files("refattn", "backends")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_every_module_has_a_room():
    homeless = {
        path.name
        for path in python_files("refattn")
        if path != REPOSITORY / "refattn" / "__init__.py" and room_of(module_name(path)) is None
    }
    assert homeless == set()


@pytest.mark.parametrize("room", FLOOR_OF)
def test_room_imports_only_from_the_floors_below(room):
    bad = {}
    for path in python_files("refattn", "backends"):
        if room_of(module_name(path)) == room and (found := forbidden_imports(room, imports_of(path))):
            bad[str(path.relative_to(REPOSITORY))] = found
    assert bad == {}


EXAMPLE_OF_BAD_IMPORTS = """
import refattn
from refattn import arrays
from refattn.core import attend
def late():
    from ..cli import main
if TYPE_CHECKING:
    from refattn.cli import main
"""


def test_forbidden_imports_are_seen():
    imports = list(imported_modules(ast.parse(EXAMPLE_OF_BAD_IMPORTS), "refattn.verification"))
    assert forbidden_imports("normalization", imports) == [
        "line 2: refattn (the whole package)",
        "line 4: refattn.core.attend",
        "line 6: refattn.cli.main",
    ]


def test_backends_is_only_imported_as_part_of_refattn():
    bad = [
        f"{path.relative_to(REPOSITORY)}:{line}"
        for path in python_files("refattn", "backends", "tests", "examples", "docs", "asv_benchmarks")
        for line, name in imports_of(path)
        if name.split(".")[0] == "backends"
    ]
    assert bad == []


# Products are einsum strings of refattn.contraction; these rooms lower them, or are NumPy's own (np.einsum).
PRODUCTS = {"backends", "contraction", "precision", "definitions", "mistakes", "verification"}


def products_without_einsum(tree: ast.AST) -> list[int]:
    """Lines with ``@``, ``matmul`` and its like."""
    names = {"matmul", "dot", "tensordot", "vecdot", "inner"}
    return sorted(
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult))
        or (isinstance(node, ast.AugAssign) and isinstance(node.op, ast.MatMult))
        or (isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in names)
    )


def test_products_are_einsum_strings():
    files = {}
    for path in python_files("refattn", "backends"):
        if room_of(module_name(path)) not in PRODUCTS:
            lines = products_without_einsum(ast.parse(path.read_text(encoding="utf-8")))
            if lines:
                files[path.relative_to(REPOSITORY / "refattn").as_posix()] = lines
    assert files == {}


def test_products_without_einsum_are_seen():
    code = "x = a @ b\ny = xp.matmul(a, b)\nz = einsum('ij,jk->ik', a, b)\nx @= b\ndot(a, b)"
    assert products_without_einsum(ast.parse(code)) == [1, 2, 4, 5]


def test_every_room_exists_and_is_described():
    """No floor for a room that is not there; CONTRIBUTING.md tells newcomers about each, and about no other."""
    there = {
        path.stem
        for path in (REPOSITORY / "refattn").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert set(FLOOR_OF) == {*there - {"__init__"}, "backends"}
    table = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8").split("| room | holds |")[1].split("\n\n")[0]
    named = {
        x.rstrip("/")
        for row in table.splitlines()
        if row.startswith("| ")
        for x in re.findall(r"`([\w/]+)`", row.split("|")[1])
    }
    assert named == set(FLOOR_OF)


def test_import_loads_no_definitions_mistakes_or_verifier():
    code = "import sys, refattn; print(*[n for n in sys.modules if n.split('.')[1:2] and n.split('.')[0] == 'refattn'])"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    late = {n for n in run.stdout.split() if n.split(".")[1] in ("definitions", "mistakes", "verification", "cli")}
    assert late == set()


def test_import_takes_no_longer_than_numpy_s():
    """60 ms beyond NumPy's 70 on an idle machine; CPU seconds of both are compared, as load stretches them alike."""

    def seconds(module):
        best = float("inf")
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-P", "-c", f"import {module}"], check=True, env=environment)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return best

    environment = {n: x for n, x in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"} | {
        "OPENBLAS_NUM_THREADS": "1"
    }
    numpy, whole = seconds("numpy"), seconds("refattn")
    assert whole - numpy < 60e-3 * max(1.0, numpy / 70e-3)
