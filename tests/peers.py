"""What several tests compare with."""

import math

import numpy as np
import pytest

try:
    import torchaudio
except (ImportError, RuntimeError):  # its last version refuses torch 2.15
    torchaudio = None
needs_torchaudio = pytest.mark.skipif(torchaudio is None, reason="no torchaudio runs here")


def resampled(waveform: np.ndarray, source: int, target: int) -> np.ndarray:
    """(T,) at `target` Hz of (T,) at `source` Hz by the definition: each sample is the sum over all
    samples, weighted by a sinc with six zero crossings on each side under a Hann window."""
    rate = 0.99 * min(source, target)
    made = np.arange(math.ceil(len(waveform) * target / source)) / target
    first = np.floor((made - 6 / rate) * source).astype(int)
    near = first[:, None] + np.arange(math.ceil(12 * source / rate) + 2)
    x = rate * (made[:, None] - near / source)
    weights = np.where(abs(x) < 6, np.sinc(x) * np.cos(math.pi * x / 12) ** 2, 0.0)
    weights[(near < 0) | (near >= len(waveform))] = 0.0
    near = near.clip(0, len(waveform) - 1)
    return (weights * waveform[near]).sum(1) * rate / source
