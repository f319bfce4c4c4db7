"""Prints the lowest version of every dependency that pyproject.toml allows, as constraints for pip (`make test-lowest`)."""

import pathlib
import re
import tomllib

project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
for requirement in (*project["dependencies"], *project["optional-dependencies"]["test"]):
    name, lowest = re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)", requirement).groups()
    print(f"{name}=={lowest}")
