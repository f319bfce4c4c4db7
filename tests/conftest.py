from importlib.metadata import version

import perturb
import pytest

import refattn


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--perturb", type=int, metavar="SEED", help="round products as another BLAS might; see tests/perturb.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("perturb") is not None:
        perturb.install(config.getoption("perturb"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of bitwise equality between two orders of summation, and of counted calls, ask nothing of a rounding that is made up."""
    if config.getoption("perturb") is not None:
        left_out = [item for item in items if item.get_closest_marker("bitwise")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("bitwise")]


def pytest_report_header() -> str:
    return f"refattn {version('refattn')} from {refattn.__path__[0]}"
