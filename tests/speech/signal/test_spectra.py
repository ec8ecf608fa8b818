"""Spectra, against torchaudio where there is one that runs with this torch."""

import numpy as np
import pytest
import torch
from transformers.audio_utils import mel_filter_bank

from speech.signal import spectra
from tests.peers import needs_torchaudio, resampled, torchaudio


@pytest.mark.parametrize("scale", ["htk", "slaney"])
@pytest.mark.parametrize("has_equal_area", [False, True])
@pytest.mark.parametrize(("bins", "bands", "highest"), [(257, 80, 8000.0), (513, 100, 7600.0)])
def test_mel_filters_are_those_of_transformers(bins, bands, highest, scale, has_equal_area):
    norm = "slaney" if has_equal_area else None
    theirs = mel_filter_bank(bins, bands, 0.0, highest, 16_000, norm=norm, mel_scale=scale)
    ours = spectra.mel_filters(bins, highest, bands, 16_000, scale, has_equal_area)
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("source", "target"), [(8000, 16_000), (44_100, 16_000), (22_050, 16_000), (90, 100), (7, 3)]
)
@pytest.mark.parametrize("length", [1, 17, 2000])
def test_resampling_is_the_sum_over_all_samples(source, target, length):
    waveform = np.random.default_rng(length).normal(size=length)
    ours = spectra.resample(torch.from_numpy(waveform), source, target)
    expected = resampled(waveform, source, target)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=1e-11)


@needs_torchaudio
@pytest.mark.parametrize(("source", "target"), [(8000, 16_000), (44_100, 16_000), (7, 3)])
def test_resampling_is_torchaudios(source, target):
    waveform = torch.randn(3000, dtype=torch.float64)
    theirs = torchaudio.functional.resample(waveform, source, target)
    torch.testing.assert_close(spectra.resample(waveform, source, target), theirs)


@needs_torchaudio
def test_a_mel_spectrogram_is_torchaudios():
    waveforms = torch.randn(2, 4000)
    theirs = torchaudio.transforms.MelSpectrogram(
        16_000, n_fft=512, win_length=400, hop_length=160, n_mels=64
    )
    filters = spectra.mel_filters(257, 8000.0, 64, 16_000)
    ours = spectra.MelSpectrogram(512, 160, torch.hann_window(400), filters)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    torch.testing.assert_close(ours(waveforms), theirs(waveforms), rtol=1e-4, atol=1e-4)


@needs_torchaudio
def test_griffin_lim_is_torchaudios():
    window = torch.hann_window(1024, dtype=torch.float64)
    power = torch.rand(513, 9, dtype=torch.float64)
    theirs = torchaudio.functional.griffinlim(
        power, window, 1024, 256, 1024, 2, 20, 0.99, None, False
    )
    torch.testing.assert_close(spectra.griffin_lim(power, window, 256, 20, 0.99), theirs)


def test_a_linear_spectrum_explains_the_bands_better_than_the_pseudo_inverse():
    filters = spectra.mel_filters(513, 8000, 80, 22_050, has_equal_area=True)
    noise = torch.randn(513, 20, generator=torch.Generator().manual_seed(0))
    bands = filters.t() @ (noise.square() * torch.linspace(1, 0, 513)[:, None] ** 8)

    def error(estimate: torch.Tensor) -> float:
        return ((filters.t() @ estimate).clamp_min(1e-9).log() - bands.log()).abs().mean().item()

    estimate = spectra.linear_spectrum(bands, filters)
    assert (estimate >= 0).all()
    assert error(estimate) < 0.05
    assert error(estimate) < 0.5 * error((torch.linalg.pinv(filters.t()) @ bands).clamp_min(0))
