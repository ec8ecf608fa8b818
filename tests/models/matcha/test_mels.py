"""Matcha-TTS's mel frames against another program's filters and their definition."""

import numpy as np
import pytest
import torch

from models.matcha import mels
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


def test_griffin_lim_brings_frames_back():
    time = torch.arange(40 * HOP) / SAMPLE_RATE
    voice = sum(torch.sin(2 * torch.pi * 150 * n * time) / n for n in range(1, 20))
    voice = voice * (1 + torch.sin(2 * torch.pi * 4 * time)) / 10
    frames = LogMel()(with_edges(voice)[None])[0]
    made = mels.griffin_lim(frames)
    assert made.shape == voice.shape and made.isfinite().all()
    again = LogMel()(with_edges(made)[None])[0]
    loud = frames > frames.max() - 4
    assert (again - frames)[loud].abs().mean() < 0.25
    # Frames stay where they are: the loudness of both rises and falls together.
    levels = [x.unfold(0, HOP, HOP).square().mean(1).sqrt() for x in (voice, made)]
    assert torch.corrcoef(torch.stack(levels))[0, 1] > 0.98
