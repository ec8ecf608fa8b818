"""What several tests compare with."""

import math

import numpy as np
import pytest
import torch

try:
    import torchaudio
except (ImportError, RuntimeError):  # its last version refuses torch 2.15
    torchaudio = None
needs_torchaudio = pytest.mark.skipif(torchaudio is None, reason="no torchaudio runs here")


def assert_rounded(ours, theirs, low: torch.dtype | None = None) -> None:
    """That tensors, or None, are those of another way of adding the same terms. Every CPU's
    libraries choose their own order for a product of such and such a form, so they differ by
    roundings: sixteen of `low`, the type in which the products were computed, if it is not
    theirs."""
    for one, other in zip(ours, theirs, strict=True):
        if other is None:
            assert one is None
            continue
        rounding = torch.finfo(low or other.dtype).eps
        assert one.dtype == other.dtype
        assert (one - other).norm() <= 16 * rounding * other.norm()


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
