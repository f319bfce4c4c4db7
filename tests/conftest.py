import refattn


def pytest_report_header() -> str:
    return f"refattn {refattn.__version__} from {refattn.__path__[0]}"
