"""What the tests of recipes share: small spoken corpora, and the server that forks their
processes."""

import numpy as np
import pytest
import soundfile

from speech.data import demo
from tests import processes


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems() -> None:
    processes.start_server()


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    processes.end_all()


@pytest.fixture(scope="session")
def konkani(tmp_path_factory):
    """Manifests "train" and "val" of spoken Konkani. The seed is one with which "train" has every
    character of "val"."""
    folder, sizes = tmp_path_factory.mktemp("konkani"), {"train": 14, "val": 4}
    voices = demo.KONKANI_VOICES[:3]
    return demo.speech_corpus(folder, demo.KONKANI_WORDS, voices, sizes, seed=19)


@pytest.fixture(scope="session")
def manifests(konkani) -> list[str]:
    """The flags that name these."""
    return ["--train_manifest", konkani["train"], "--val_manifest", konkani["val"]]


@pytest.fixture(scope="session")
def spoken(tmp_path_factory):
    """Manifests "train", "val" and "test" of spoken Vietnamese."""
    folder, sizes = tmp_path_factory.mktemp("vietnamese"), {"train": 14, "val": 3, "test": 3}
    return demo.speech_corpus(folder, demo.VIETNAMESE_WORDS, demo.VIETNAMESE_VOICES[:3], sizes)


@pytest.fixture
def silence(tmp_path):
    """A file with a second of digital silence."""
    soundfile.write(tmp_path / "silence.wav", np.zeros(16_000), 16_000)
    return str(tmp_path / "silence.wav")
