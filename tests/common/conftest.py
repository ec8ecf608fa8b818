"""What the tests of `common` share."""

import gc

import pytest

from common import report
from tests import processes


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """Drawing training.png takes longer than a small run; test_report.py draws it."""
    monkeypatch.setattr(report.Report, "draw", lambda self, metric: None)


@pytest.fixture(autouse=True)
def small_heap():
    """Recovery from out of memory collects garbage. Here it passes over the objects of the
    libraries."""
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_collection_modifyitems(items) -> None:
    """Starts the server of `run_ranks`, so that it imports torch while other tests run."""
    if any("run_ranks" in getattr(item, "fixturenames", ()) for item in items):
        processes.start_server()


@pytest.fixture
def run_ranks():
    return processes.run_ranks
