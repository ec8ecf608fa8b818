"""What the tests of `common` share."""

import gc
import multiprocessing.forkserver

import pytest
import torch.multiprocessing

from common import report


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
    """Starts the server of `in_processes`, so that it imports torch while other tests run."""
    if any("in_processes" in getattr(item, "fixturenames", ()) for item in items):
        multiprocessing.set_forkserver_preload(["pytest", "tests.small", "torch._dynamo"])
        multiprocessing.forkserver.ensure_running()


@pytest.fixture
def in_processes():
    """in_processes(function, arguments, count) runs `function(rank, *arguments)` in new processes.
    A server that has imported torch forks them, so they start in a fraction of a second."""

    def start(function, arguments: tuple, count: int) -> None:
        torch.multiprocessing.start_processes(
            function, arguments, nprocs=count, start_method="forkserver"
        )

    return start
