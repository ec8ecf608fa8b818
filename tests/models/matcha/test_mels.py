"""Matcha-TTS's mel frames against another program's filters and their definition."""

import numpy as np
import pytest
import torch

from models.matcha.mels import HOP, N_FFT, SAMPLE_RATE, LogMel, frame_count, with_edges


def test_the_frames_are_those_of_their_definition():
    audio_utils = pytest.importorskip("transformers.audio_utils")
    filters = audio_utils.mel_filter_bank(
        513, 80, 0.0, 8000.0, SAMPLE_RATE, norm="slaney", mel_scale="slaney"
    )
    waveform = torch.randn(5000, dtype=torch.float64) / 10
    padded = np.pad(waveform.numpy(), 384, mode="reflect")
    frames = np.stack([padded[i * HOP : i * HOP + N_FFT] for i in range(5000 // HOP)])
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(N_FFT) / N_FFT)
    power = np.abs(np.fft.rfft(frames * window)) ** 2
    expected = np.log(np.maximum(np.sqrt(power + 1e-9) @ filters, 1e-5))
    ours = LogMel().double()(with_edges(waveform)[None])[0]
    assert ours.shape == (frame_count(5000), 80)
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-4)


def test_padding_after_a_clip_changes_none_of_its_frames():
    clip = with_edges(torch.randn(3000))
    frames = frame_count(3000)
    padded = LogMel()(torch.nn.functional.pad(clip, (0, 2000))[None])
    assert torch.equal(padded[0, :frames], LogMel()(clip[None])[0, :frames])
