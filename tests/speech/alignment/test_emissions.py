"""Log-probabilities of a long recording in windows: as if it was heard at once."""

import numpy as np
import pytest
import soundfile
import torch

from speech.alignment.emissions import collect, window_for, windows_of
from speech.signal.audio import SAMPLE_RATE

FRAME = 0.02
SAMPLES = round(FRAME * SAMPLE_RATE)
SIZE = 5


def log_probs_of(waveform: torch.Tensor) -> np.ndarray:
    """A recogniser that hears each frame by itself, and like many leaves out the last part of a
    frame."""
    whole = waveform[: len(waveform) // SAMPLES * SAMPLES].reshape(-1, SAMPLES)
    scores = whole.abs().mean(1)[:, None] * torch.arange(SIZE)
    return scores.log_softmax(-1).numpy()


@pytest.fixture
def recording(tmp_path):
    def of(seconds: float) -> tuple[str, np.ndarray]:
        random = np.random.default_rng(round(seconds))
        samples = random.uniform(-1, 1, round(seconds * SAMPLE_RATE)).astype(np.float32)
        path = str(tmp_path / f"{seconds}.wav")
        soundfile.write(path, samples, SAMPLE_RATE, subtype="FLOAT")
        return path, samples

    return of


@pytest.mark.parametrize("seconds", [0.5, 3.99, 4.0, 4.01, 5.0, 12.345, 30.0])
@pytest.mark.parametrize("sizes", [(4.0, 1.0), (3.0, 0.0)])
def test_windows_follow_each_other(recording, seconds, sizes):
    path, samples = recording(seconds)
    energy = []
    windows = list(windows_of(path, log_probs_of, FRAME, energy, sizes))
    joined = np.concatenate(windows)
    whole = log_probs_of(torch.from_numpy(samples))
    assert len(whole) <= len(joined) <= len(whole) + 1
    np.testing.assert_allclose(joined[: len(whole)], whole, rtol=1e-6)
    power = samples[: len(samples) // 160 * 160].reshape(-1, 160) ** 2
    found = np.concatenate(energy)[: len(power)]
    np.testing.assert_allclose(found, 10 * np.log10(power.mean(1)), atol=1e-3)


def test_a_recogniser_hears_no_more_than_it_can(recording):
    longest = []

    def remembers(waveform: torch.Tensor) -> np.ndarray:
        longest.append(len(waveform) / SAMPLE_RATE)
        return log_probs_of(waveform)

    path, _ = recording(60.0)
    for limit in (3.0, 15.0, 36.0, 120.0):
        longest.clear()
        sizes = window_for(limit)
        list(windows_of(path, remembers, FRAME, [], sizes))
        assert max(longest) <= min(limit, 36.0) + 1.1  # files are read a second at a time
    assert window_for(120.0) == (30.0, 3.0)


def test_only_the_columns_of_the_text_are_kept():
    random = np.random.default_rng(0)
    log_probs = torch.from_numpy(random.normal(size=(50, 1000))).log_softmax(-1).numpy()
    found = collect([log_probs[:20], log_probs[20:]], FRAME, np.array([7, 3, -1, 7]), 999)
    assert found.column_of == {3: 0, 7: 1, 999: 2} and found.log_probs.dtype == np.float16
    np.testing.assert_allclose(found.log_probs, log_probs[:, [3, 7, 999]], rtol=1e-3)
    assert (found.heard == log_probs.argmax(1)).all()
    assert found.seconds == pytest.approx(1.0)
