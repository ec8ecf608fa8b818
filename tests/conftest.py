"""What the tests share."""

import gc
import getpass
import json
import os
import signal
import tempfile
from pathlib import Path

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import settings

# Torch's own choice, which a plan in this process would change for the tests that compile.
CACHE = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", CACHE)
settings.register_profile("busy machine", deadline=None, max_examples=50, database=None)
settings.load_profile("busy machine")
signal.signal(
    signal.SIGHUP, signal.SIG_DFL
)  # the tests may run under nohup, which the program respects
torch.set_num_threads(1)  # the models are tiny: a second thread would only wait for the first


def pytest_collection_finish() -> None:
    """Leaves what the libraries have made out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def wav():
    """wav(path, seconds=1.0, rate=16000) writes noise and returns the path as text."""

    def write(path: Path, seconds: float = 1.0, rate: int = 16_000, **options) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        samples = np.random.default_rng(0).uniform(-0.5, 0.5, round(seconds * rate))
        soundfile.write(path, samples, rate, **options)
        return str(path)

    return write


@pytest.fixture
def json_lines():
    """json_lines(path, rows) writes a manifest and returns its path as text. A row is a dict, or a
    line of bytes."""

    def write(path: Path, rows: list) -> str:
        lines = [
            row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode()
            for row in rows
        ]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return str(path)

    return write


@pytest.fixture
def no_hang():
    """Fails a test that takes more than a minute."""

    def stop(number, frame):
        raise TimeoutError("the test hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
