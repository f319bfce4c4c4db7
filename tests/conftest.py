from importlib.metadata import version

import refattn


def pytest_report_header() -> str:
    return f"refattn {version('refattn')} from {refattn.__path__[0]}"
